"""Garbage collection of states: deletes states that nothing refers to, such as those that dead writers have left."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from stagecrew.errors import ConfigurationError, RecoveryError
from stagecrew.recovery.state.generation import advance_generation, read_generation
from stagecrew.recovery.state.handles import Audit, StateHandleStore
from stagecrew.recovery.state.storage import StateStorage, StoredState
from stagecrew.recovery.stores.contract import Store

__all__ = ["SweepReport", "sweep"]


@dataclasses.dataclass
class SweepReport:
    """The outcome of a sweep.

    Attributes:
        kept: How many states were kept.
        removed: How many states were deleted.
        bytes: The total size of the deleted states.
        failed: For each name that could not be checked or deleted, the reason.
    """

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
) -> SweepReport:
    """Deletes the states of these roots that nothing refers to and that are older than `grace` seconds.

    A state that is or will be referenced is never deleted, whatever writers do at the same time, even if `grace` is 0:
    if a sweep has found the unreferenced state of a writer, the writer writes the state again. The sweep also finishes
    interrupted removals. After an error at any step, it can be run again.

    If a reference of a root cannot be read, nothing of that root is deleted, because it is unknown which state is
    referenced. States of other roots, and of other stores in the same storage, are not touched. The age of a state is
    measured by the clock of the storage, or by `clock`; a state of unknown age is kept.
    """
    if grace < 0:
        raise ConfigurationError(f"the grace is {grace} s: it must not be negative")
    report = SweepReport()
    generation = read_generation(store)
    for root in dict.fromkeys(roots):
        handles = StateHandleStore(store, storage, root)
        for name in handles.audit().unfinished:
            try:
                handles.finish_removal(name)
            except RecoveryError as error:
                report.failed[f"{root}/{name}"] = str(error)
        folder = generation.folder(root)
        stored = storage.names(folder)
        if stored:
            limit = (clock() if clock is not None else storage.now(folder)) - grace
            old = [state for state in stored if state.modified is not None and state.modified < limit]
            _sweep_root(store, storage, handles, old, root, report)
            report.kept += len(stored)
    report.kept -= report.removed
    return report


def _sweep_root(
    store: Store,
    storage: StateStorage,
    handles: StateHandleStore,
    old: list[StoredState],
    root: str,
    report: SweepReport,
) -> None:
    """Advances the generation between two audits of the references.

    A writer that read the previous generation can no longer refer to its state. A writer that reads the new generation
    writes a state that is not in `old`.
    """
    orphans = _orphans(handles.audit(), old)
    if not orphans:
        return
    advance_generation(store)
    audit = handles.audit()
    if audit.unreadable:
        report.failed |= {f"{root}/{name}": str(error) for name, error in audit.unreadable.items()}
        return
    for state in _orphans(audit, orphans):
        try:
            storage.discard(state)
        except RecoveryError as error:
            report.failed[state.name] = str(error)
        else:
            report.removed += 1
            report.bytes += state.length


def _orphans(audit: Audit, stored: list[StoredState]) -> list[StoredState]:
    return [state for state in stored if state.name not in audit.states]
