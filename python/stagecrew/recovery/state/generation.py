"""The sweep generation: a number that sweeps advance, and that each write of a state checks in its transaction."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import uuid
from typing import Final

from stagecrew.errors import PossiblyInconsistentError, StateCorrupt, StoreConflict, StoreUnavailable
from stagecrew.files import quoted
from stagecrew.recovery.state.references import FORMAT, decode_fields
from stagecrew.recovery.stores.contract import Create, Replace, Store

__all__ = ["GENERATION", "Generation", "advance_generation", "read_generation"]

#: Its version is the generation. Its value is the name of the store, so that stores which share a storage use separate
#: folders.
GENERATION: Final = "sweep/generation"


@dataclasses.dataclass(frozen=True)
class Generation:
    """The number of times that a sweep has advanced the generation, and the name of the store."""

    number: int
    store: str

    def folder(self, root: str) -> str:
        """Returns the folder in the storage that contains the states of a root."""
        return f"{self.store}/{quoted(root)}"


def read_generation(store: Store) -> Generation:
    """Returns the current generation. The first caller creates it."""
    entry = store.read(GENERATION)
    if entry is None:
        with contextlib.suppress(StoreConflict, PossiblyInconsistentError):
            store.ensure("sweep")
            store.transact(Create(GENERATION, _encode(uuid.uuid4().hex)))
        entry = store.read(GENERATION)
        if entry is None:
            raise StoreUnavailable(f"{GENERATION} could not be created: no state was written yet; try again")
    name = decode_fields(GENERATION, entry.value).get("store")
    if not isinstance(name, str):
        raise StateCorrupt(
            f"the value of {GENERATION} was not written by stagecrew: {entry.value[:80]!r}. Check which other program "
            "writes to this store"
        )
    return Generation(entry.version, name)


def advance_generation(store: Store) -> None:
    """Advances the generation, unless another sweep advances it at the same time."""
    current = read_generation(store)
    try:
        store.transact(Replace(GENERATION, _encode(current.store), current.number))
    except StoreConflict as error:
        if error.why != "version":
            raise
        # Another sweep has advanced it since it was read here, which serves the same purpose.


def _encode(store: str) -> bytes:
    return json.dumps({"format": FORMAT, "store": store, "uuid": uuid.uuid4().hex}).encode()
