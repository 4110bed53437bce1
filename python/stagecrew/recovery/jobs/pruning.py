"""Pruning: removes jobs that ended long ago, with their results."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from stagecrew.errors import (
    HandleError,
    JobError,
    JobUnknown,
    RecordUnreadable,
    StateStorageError,
    StoreConflict,
    StoreUnsupported,
)
from stagecrew.recovery.jobs.keys import hour_of, job_key
from stagecrew.recovery.state.sweep import sweep
from stagecrew.recovery.stores.contract import Delete, Store, decode_segment

if TYPE_CHECKING:
    from stagecrew.recovery.jobs.record import JobRecord
    from stagecrew.recovery.state.handles import StateHandleStore
    from stagecrew.recovery.state.storage import StateStorage

__all__ = ["PruneResult", "prune"]

_log = logging.getLogger("stagecrew")

#: The entries below a job that are deleted with it.
_REMOVED_WITH_JOB: Final = frozenset({"claim", "steps", "commits", "cancel"})


@dataclasses.dataclass(frozen=True)
class PruneResult:
    """One ended job that a prune examined.

    Attributes:
        job: The id of the job.
        removed: Whether this prune removed it.
        reason: Why an old job could not be removed. Empty if it was removed, is not clean, has not ended long enough
            ago, or was changed by another process.
    """

    job: str
    removed: bool
    reason: str = ""


def prune(
    store: Store,
    storage: StateStorage,
    results: StateHandleStore,
    read: Callable[[str], tuple[JobRecord, int]],
    limit: float,
) -> Iterator[PruneResult]:
    """Removes the clean jobs that ended before `limit`, examining one per iteration. See `Jobs.prune`."""
    last_hour = hour_of(limit)
    for hour in store.children("ended"):
        if hour > last_hour:
            return
        for name in store.children(f"ended/{hour}"):
            job = decode_segment(name.partition("-")[2])
            try:
                result = PruneResult(job, _prune_job(store, storage, results, read, job, f"ended/{hour}/{name}", limit))
            except (JobUnknown, StoreConflict):
                result = PruneResult(job, False)  # another process has removed it, or is writing to it
            except (JobError, RecordUnreadable, HandleError, StoreUnsupported) as error:
                result = PruneResult(job, False, str(error))
            yield result
        if hour < last_hour:
            with contextlib.suppress(StoreConflict):  # the hour still has a job, or another prune has deleted the hour
                store.transact(Delete(f"ended/{hour}"))


def _prune_job(
    store: Store,
    storage: StateStorage,
    results: StateHandleStore,
    read: Callable[[str], tuple[JobRecord, int]],
    job: str,
    ended_entry: str,
    limit: float,
) -> bool:
    record, _ = read(job)
    if not record.clean or record.ended is None or record.ended >= limit:
        return False
    key = job_key(job)
    children = store.children(key)
    if others := set(children) - _REMOVED_WITH_JOB:
        raise JobError(
            f"job {job!r} has ended, but still has {', '.join(sorted(others))} in the store, so it was not removed: "
            "end its process, then prune again"
        )
    # Once the job is removed, no sweep finds these folders. So states that dead writers left there are deleted first.
    swept = sweep(store, storage, [f"{key}/steps", f"{key}/commits"], 0.0, lambda: math.inf)
    if swept.failed:
        raise JobError(
            f"states of job {job!r} could not be deleted, so it was not removed: {'; '.join(swept.failed.values())}"
        )
    deletions = [*(Delete(f"{key}/{name}") for name in children), Delete(key), Delete(ended_entry)]
    try:
        if not results.remove(job, deletions):
            store.transact(*deletions)  # its result was removed by hand
    except StateStorageError as error:
        # The transaction that marked the result for removal has also deleted the record.
        _log.warning("job %r is removed, but not its result; a sweep will delete it: %s", job, error)
    return True
