"""A job, as its own code sees it: which one it is, and which of its steps were done by a run before."""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from stagecrew.coordination.checkpoints import Checkpoint
from stagecrew.coordination.positions import POSITION
from stagecrew.errors import (
    HandleMissing,
    JobError,
    JobStepReused,
    RecoveryMisused,
    StateStorageError,
    StoreRefused,
    StoreUnavailable,
)
from stagecrew.recovery.decisions import StoredDecisions

if TYPE_CHECKING:
    from stagecrew.coordination.operators import Operators
    from stagecrew.operators.commits import Committer
    from stagecrew.recovery.handles import StateHandleStore

__all__ = ["Job", "current_job"]

T = TypeVar("T")

_log = logging.getLogger("stagecrew")

#: How long a step waits for its result to be stored, in seconds, and how often it tries.
_PATIENCE: Final = 600.0
_AGAIN: Final = 2.0
#: How long the states of coordinators may take, in seconds.
_CHECKPOINT: Final = 30.0

_current: Job | None = None


def current_job() -> Job:
    """The job that this process runs. Raises `JobError` in any other process."""
    if _current is None:
        raise JobError("this process runs no job: start it with `stagecrew submit`, under a `stagecrew driver`")
    return _current


def running_job() -> Job | None:
    """The job that this process runs, if it runs one."""
    return _current


def set_current(job: Job | None) -> None:
    """What `current_job` answers from now on."""
    global _current
    _current = job


class Job:
    """A job that outlives its driver. `attempt` is 1 for its first run; `restored` says whether a step is done already.

    What lies outside steps runs again in every run.
    """

    def __init__(
        self, id_: str, attempt: int, steps: StateHandleStore, commits: StateHandleStore, patience: float = _PATIENCE
    ) -> None:
        self.id, self.attempt = id_, attempt
        self._steps, self._commits, self._patience = steps, commits, patience
        self.restored = bool(steps.names())
        self._lock = threading.Lock()
        self._used: set[str] = set()
        #: Streams whose coordinators are behind a batch of this run.
        self._positioned: set[str] = set()

    def __repr__(self) -> str:
        return f"<run {self.attempt} of job {self.id!r}>"

    def step(self, name: str, f: Callable[[], T]) -> T:
        """What `f()` returns; a run that comes after one which did this step gets that one's result, and does not call it.

        The result is durable when this returns, in one write with the states of all coordinators of the topologies that are open:
        a later run that skips the step gives these their states back. A step inside another is named by the way there.

        Not promised: that `f` runs once. A run that dies in it leaves what it did, and the next begins it anew: what is written
        outside of `topology.commit` may be there twice. The result is picklable.

        Raises what `f` raises; `JobStepReused` for a name that was used in the same place; `StateStorageError` and what the store
        raises when the result cannot be stored for ten minutes.
        """
        path = (*POSITION.get(), _named(name))
        key = "/".join(path)
        self._use(f"step {key!r}")
        if (known := self._known(key)) is not None:
            value: T = known[0]
            return value
        return self._run(path, f)

    def batch(self, name: str, batch_id: int, f: Callable[[], T]) -> T:
        """`step` for a batch of a streaming query, to be called by what `foreachBatch` calls: what `f()` returns.

        A batch that Spark runs again, as it had not committed it, is not run again if it was done: its result is the stored one. Where
        a later run begins with a batch that was not done, the coordinators have the states that they had behind the one before: so
        they are always as of the batch that Spark's log has. The last two batches are kept.

        Raises as `step`; `JobError` when neither this batch nor the one before is known, though an older one is: the query has another
        checkpoint location than before.
        """
        if not isinstance(batch_id, int) or batch_id < 0:
            raise RecoveryMisused(f"a batch is numbered from 0, not {batch_id!r}")
        path = (*POSITION.get(), _named(name), f"batch-{batch_id}")
        key, parent = "/".join(path), "/".join(path[:-1])
        self._use(f"batch {key!r}")
        if (known := self._known(key)) is not None:
            value: T = known[0]
            return value
        stored = {int(one.rpartition("-")[2]) for one in self._steps.names() if one.startswith(f"{parent}/batch-")}
        if batch_id - 1 in stored:
            if parent not in self._positioned:  # else the coordinators are there by themselves
                self._known(f"{parent}/batch-{batch_id - 1}")
        elif stored:
            raise JobError(
                f"batch {batch_id} of {parent!r} comes behind batch {max(stored)}, which was the last: does the query have another "
                f"checkpoint location than before? Submit it as another job"
            )
        self._positioned.add(parent)
        made = self._run(path, f)
        for old in stored - {batch_id - 1}:
            self._steps.remove(f"{parent}/batch-{old}")
        return made

    def _known(self, key: str) -> tuple[Any] | None:
        """What a run before has stored of a step; the coordinators have their states back then."""
        try:
            stored = self._steps.get(key)
        except HandleMissing:
            return None
        value, checkpoints = pickle.loads(stored.data)
        _restore(key, checkpoints)
        _log.info("step %r of job %r was done by a run before", key, self.id)
        return (value,)

    def _run(self, path: tuple[str, ...], f: Callable[[], T]) -> T:
        token = POSITION.set(path)
        try:
            made = f()
        finally:
            POSITION.reset(token)
        self._store("/".join(path), made)
        return made

    def commit_id(self, name: str) -> str:
        """The id of a commit in this step: the same in every run. Raises `JobStepReused`."""
        key = "/".join((*POSITION.get(), name))
        self._use(f"commit {key!r}")
        return f"{self.id}/{key}"

    def decisions(self, sink: Committer) -> StoredDecisions:
        """Where what is decided about this sink's commits is kept."""
        return StoredDecisions(self._commits, sink)

    def _use(self, what: str) -> None:
        with self._lock:
            if what in self._used:
                raise JobStepReused(
                    f"job {self.id!r} has used {what} before: a later run would take one's result for the other's. Name them apart"
                )
            self._used.add(what)

    def _store(self, key: str, value: Any) -> None:
        from pyspark import cloudpickle

        try:
            data = bytes(cloudpickle.dumps((value, _checkpoints(key))))  # type: ignore[no-untyped-call]
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise JobError(f"the result of step {key!r} of job {self.id!r} cannot be pickled: {error}") from error
        due = time.monotonic() + self._patience
        while True:
            try:
                self._steps.add(key, data)
                return
            except (StateStorageError, StoreUnavailable, StoreRefused) as error:  # nothing was written
                if time.monotonic() > due:
                    raise
                _log.warning(
                    "step %r of job %r is done, and waits for its result to be stored: %s", key, self.id, error
                )
                time.sleep(_AGAIN)


def _named(name: str) -> str:
    if not name or "/" in name:
        raise RecoveryMisused(f"a step's name is a text without slashes, not {name!r}")
    return name


def _open_operators() -> list[Operators]:
    """Those of the application, and of the topologies that are open."""
    from stagecrew.session import running_crew

    crew = running_crew()
    return (
        [] if crew is None else [crew.application.operators, *(topology.operators for topology in tuple(crew.active))]
    )


def _checkpoints(key: str) -> dict[str, bytes]:
    """The states of the coordinators of all topologies that are open, by name."""
    found: dict[str, bytes] = {}
    for operators in _open_operators():
        checkpoint = operators.checkpoint(None, _CHECKPOINT)
        if not checkpoint.states:
            continue
        if operators.name in found:
            raise JobStepReused(
                f"two topologies named {operators.name!r} with operators are open at the end of step {key!r}: a later run could not "
                f"tell whose state is whose. Name them apart"
            )
        found[operators.name] = checkpoint.to_bytes()
    return found


def _restore(key: str, checkpoints: dict[str, bytes]) -> None:
    open_ = {operators.name: operators for operators in _open_operators()}
    for name, data in checkpoints.items():
        if name not in open_:
            raise JobError(
                f"step {key!r} was done inside topology {name!r}, which is not open here: the program has changed; submit it as "
                f"another job"
            )
        open_[name].restore(Checkpoint.from_bytes(data))
