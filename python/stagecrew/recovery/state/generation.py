"""The sweep generation: a number that a sweep increments before it deletes states.

Each write of a state checks the number in its transaction.
"""

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

#: The key of the entry whose version is the generation. Its value contains the id of the store, so that stores that
#: share one storage use separate folders.
GENERATION: Final = "sweep/generation"


@dataclasses.dataclass(frozen=True)
class Generation:
    """The number of times that sweeps have advanced the generation, and the id of the store."""

    number: int
    store: str

    def folder(self, root: str) -> str:
        """Returns the storage folder for the states of a root."""
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
            raise StoreUnavailable(f"the entry {GENERATION} could not be created, and nothing was written: try again")
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
        # Another sweep has advanced the generation since this call read it. That is enough.


def _encode(store: str) -> bytes:
    return json.dumps({"format": FORMAT, "store": store, "uuid": uuid.uuid4().hex}).encode()
