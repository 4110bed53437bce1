"""Takes away the states that nothing refers to: what writers left that died, or whose outcome nobody knew."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from stagecrew.errors import RecoveryError, RecoveryMisused, StoreConflict
from stagecrew.recovery.handles import Audit, StateHandleStore
from stagecrew.recovery.storage import StateStorage, Stored
from stagecrew.recovery.stores.contract import Replace, Store
from stagecrew.recovery.writes import GENERATION, generation, moved

__all__ = ["Report", "sweep"]


@dataclasses.dataclass
class Report:
    """What a sweep did. `bytes` is what the removed states had; `failed` says of each name what was in the way."""

    kept: int = 0
    removed: int = 0
    bytes: int = 0
    failed: dict[str, str] = dataclasses.field(default_factory=dict)


def sweep(
    store: Store,
    storage: StateStorage,
    roots: Sequence[str],
    grace: float,
    clock: Callable[[], float] | None = None,
) -> Report:
    """Removes the states of these roots that nothing refers to and that are older than `grace` seconds.

    Guarantees: no state that is referred to, or will be, is removed, whatever writers do meanwhile, with any grace: a writer whose
    state may have been met writes it again. Removals that stopped half-way are finished. Repeatable at each step.

    A root with a reference that cannot be read is left as it is: nobody knows which state is meant. States of other roots, and of
    other stores in the same storage, are not touched. The age of a state is by the storage's own clock, unless one is given; one
    whose age is not told stays.
    """
    if grace < 0:
        raise RecoveryMisused(f"a grace of {grace} s: 0 is the least")
    report = Report()
    known = generation(store)
    for root in dict.fromkeys(roots):
        handles = StateHandleStore(store, storage, root)
        for name in handles.audit().marked:
            try:
                handles.finish(name)
            except RecoveryError as error:
                report.failed[f"{root}/{name}"] = str(error)
        folder = known.folder(root)
        stored = storage.names(folder)
        if stored:
            before = (clock() if clock is not None else storage.now(folder)) - grace
            old = [one for one in stored if one.modified is not None and one.modified < before]
            _sweep(store, storage, handles, old, root, report)
            report.kept += len(stored)
    report.kept -= report.removed
    return report


def _sweep(
    store: Store, storage: StateStorage, handles: StateHandleStore, old: list[Stored], root: str, report: Report
) -> None:
    """Who had read the generation before it moved wrote its state before, and can refer to it no more; all others' are younger."""
    orphans = _orphans(handles.audit(), old)
    if not orphans:
        return
    _move(store)
    audit = handles.audit()
    if audit.unreadable:
        report.failed |= {f"{root}/{name}": str(error) for name, error in audit.unreadable.items()}
        return
    for stored in _orphans(audit, orphans):
        try:
            storage.discard(stored)
        except RecoveryError as error:
            report.failed[stored.name] = str(error)
        else:
            report.removed += 1
            report.bytes += stored.length


def _orphans(audit: Audit, stored: list[Stored]) -> list[Stored]:
    return [one for one in stored if one.name not in audit.states]


def _move(store: Store) -> None:
    known = generation(store)
    try:
        store.transact(Replace(GENERATION, moved(known.store), known.number))
    except StoreConflict as error:
        if error.why != "version":
            raise
        # Another sweep has moved it since it was read here: that does as well.
