"""A job, as its own code sees it: which one it is, and which of its steps were done by a run before."""

from __future__ import annotations

import functools
import logging
import pickle
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

from stagecrew.coordination.checkpoints import Checkpoint
from stagecrew.coordination.program_path import PLACE, Place, current_place
from stagecrew.errors import (
    HandleMissing,
    JobError,
    JobStepReused,
    RecoveryMisused,
)
from stagecrew.recovery.job_commits import StoredCommitLog, is_over
from stagecrew.recovery.progress import JobProgress
from stagecrew.recovery.writes import PATIENCE, retry_until
from stagecrew.session.running_job import running_job

if TYPE_CHECKING:
    from stagecrew.coordination.operators import Operators
    from stagecrew.operators.committer import Committer
    from stagecrew.recovery.handles import StateHandleStore
    from stagecrew.session.active_topologies import ActiveTopologies

__all__ = ["Job", "current_job"]

T = TypeVar("T")

_log = logging.getLogger("stagecrew")

#: How long the states of coordinators may take, in seconds.
_CHECKPOINT: Final = 30.0
#: Of a commit's id, in characters.
_LONGEST: Final = 200


def current_job() -> Job:
    """The job that this process runs. Raises `JobError` in any other process."""
    job = running_job()
    if not isinstance(job, Job):
        raise JobError("this process runs no job: start it with `stagecrew submit`, under a `stagecrew driver`")
    return job


class Job:
    """A job that outlives its driver. `attempt` is 1 for its first run; `restored` says whether a step is done already.

    What lies outside steps runs again in every run.
    """

    def __init__(
        self,
        id_: str,
        attempt: int,
        steps: StateHandleStore,
        commits: StateHandleStore,
        patience: float = PATIENCE,
        facts: Mapping[str, str] | None = None,
    ) -> None:
        self.id, self.attempt = id_, attempt
        self._steps, self._commits, self._patience = steps, commits, patience
        #: Of each commit's id. A job's id may have slashes, and is not taken for another's with a step.
        self._commits_begin = f"{id_.replace('%', '%25').replace('/', '%2F')}/"
        self.restored = bool(self._read(steps.names))
        self.shown = JobProgress({"job": id_, "run": str(attempt), **(facts or {})})
        self._lock = threading.Lock()
        self._over = False
        self._used: set[tuple[str, str]] = set()
        #: The steps that run now, each with the operators that are open around it.
        self._running: dict[str, list[Operators]] = {}
        #: Of each stream, the batch behind which its coordinators are; None while they are in one.
        self._behind: dict[str, int | None] = {}
        #: Of each stream whose first batch was begun in this run, the states of its coordinators then.
        self._begun: dict[str, dict[str, bytes]] = {}

    def __repr__(self) -> str:
        return f"<run {self.attempt} of job {self.id!r}>"

    def step(self, name: str, f: Callable[[], T]) -> T:
        """What `f()` returns; a run that comes after one which did this step gets that one's result, and does not call it.

        The result is durable when this returns, in one write with the states of all coordinators of the topologies that this thread
        is in: a later run that skips the step gives these their states back. A step inside another is named by the way there.

        Not promised: that `f` runs once. A run that dies in it leaves what it did, and the next begins it anew: what is written
        outside of `topology.commit` may be there twice. The result is picklable. Steps may run at once in several threads, each in a
        topology of its own.

        Raises what `f` raises; `JobStepReused` for a name that was used in the same place; `JobError` when another step runs in the
        same topology and that has coordinators, or another thread uses one of its operators outside of steps; `StateStorageError` and what the store raises when the result cannot be stored for
        ten minutes.
        """
        place = Place(_here(), "step", _named(name))
        key = _key(place)
        self._use("step", key)
        if (known := self._known(key, place)) is not None:
            value: T = known[0]
            return value
        return self._run(place, f)

    def batch(self, name: str, batch_id: int, f: Callable[[], T]) -> T:
        """`step` for a batch of a streaming query, to be called by what `foreachBatch` calls: what `f()` returns.

        A batch that Spark runs again, as it had not committed it, is not run again if it was done: its result is the stored one. Where
        a batch begins that was not done, the coordinators have the states that they had behind the one before, or where the query
        began: so they are always as of the batch that Spark's log has. The last two batches are kept; uses of operators in older ones end.

        Raises as `step`; `JobError` when neither this batch nor the one before is known, though an older one is: the query has another
        checkpoint location than before.
        """
        if not isinstance(batch_id, int) or batch_id < 0:
            raise RecoveryMisused(f"a batch is numbered from 0, not {batch_id!r}")
        stream = Place(_here(), "step", _named(name))
        parent = _key(stream)
        place = Place(stream, "batch", str(batch_id))
        key = _key(place)
        with self._lock:  # a query that is started again does its last batch again
            self._used = {used for used in self._used if not used[1].startswith(f"{key}/")}
        if (known := self._known(key, place)) is not None:
            self._behind[parent] = batch_id
            value: T = known[0]
            return value
        stored = self._batches(parent)
        if stored and batch_id - 1 not in stored:
            raise JobError(
                f"batch {batch_id} of {parent!r} comes behind batch {max(stored)}, which was the last: does the query have another "
                f"checkpoint location than before? Submit it as another job"
            )
        if batch_id - 1 in stored:
            if self._behind.get(parent) != batch_id - 1:
                self._known(f"{parent}/batch-{batch_id - 1}", place)
        elif parent in self._begun:
            self._restore(key, place, self._begun[parent])
        else:
            self._begun[parent] = self._checkpoints(place)
        self._behind[parent] = None
        made = self._run(place, f)
        self._behind[parent] = batch_id
        for old in stored - {batch_id - 1}:
            self._forget(f"{parent}/batch-{old}")
            _forget_uses(Place(stream, "batch", str(old)))
        return made

    def after_stream(self, name: str) -> None:
        """Call it when a query of `job.batch(name, ...)` has ended: the coordinators then have the states of its last batch.

        In the run that executed this batch they have them already. A later run of the job, in which Spark finds that the query has
        nothing left to do, calls no batch, so nothing else restores them.

        Args:
            name: The name that `batch` was given.

        Raises:
            JobError: Another step runs in the same topology, or the topology of a batch is not open here.
            RecoveryMisused: `name` is empty or has a slash.
        """
        for outer in _places_of_queries():
            stream = Place(outer, "step", _named(name))
            parent = _key(stream)
            if stored := self._batches(parent):
                if self._behind.get(parent) is None:
                    last = max(stored)
                    self._known(f"{parent}/batch-{last}", Place(stream, "batch", str(last)))
                    self._behind[parent] = last
                return

    def commit_id(self, name: str) -> str:
        """The id of a commit in this step: the same in every run. Raises `JobStepReused`, `RecoveryMisused` for one that is too long."""
        if self._over:
            raise JobError(
                f"job {self.id!r} has ended, and commits nothing more: wait for its threads and queries before you return"
            )
        here = _here()
        key = "/".join((*(() if here is None else here.steps), name))
        id_ = f"{self._commits_begin}{key}"
        if len(id_) > _LONGEST:
            raise RecoveryMisused(
                f"the id of a commit, {id_!r}, has {len(id_)} characters, and {_LONGEST} at most: give the job, the sink, or the steps that it "
                f"is in, shorter names"
            )
        self._use("commit", key)
        return id_

    def commit_log(self, sink: Committer) -> StoredCommitLog:
        """Where what is decided about this sink's commits is kept."""
        return StoredCommitLog(self._commits, sink, self._patience)

    def show(self) -> None:
        """Shows the job's progress in the session that runs now, if one does."""
        self.shown.tell()

    def end(self) -> None:
        """The job's code has returned, or raised: nothing more is committed for it."""
        self._over = True

    def _use(self, kind: str, key: str) -> None:
        with self._lock:
            if (kind, key) in self._used:
                raise JobStepReused(
                    f"job {self.id!r} has used {kind} {key!r} before: a later run would take one's result for the other's. Name them apart"
                )
            self._used.add((kind, key))

    def _batches(self, parent: str) -> set[int]:
        """The batches of a stream that are stored."""
        parts = (
            name[len(parent) + 1 :] for name in self._read(self._steps.names) if name.startswith(f"{parent}/batch-")
        )
        return {int(part.removeprefix("batch-")) for part in parts if part.removeprefix("batch-").isdigit()}

    def _forget(self, batch: str) -> None:
        """An old batch with its steps, and what it committed: Spark's log is past it."""
        for name in self._read(self._steps.names):
            if name == batch or name.startswith(f"{batch}/"):
                self._remove(self._steps, name)
        for name in self._read(self._commits.names):
            of_it = name.startswith(f"{self._commits_begin}{batch}/")
            if of_it and self._read(functools.partial(is_over, self._commits, name)):
                self._remove(self._commits, name)

    def _read(self, read: Callable[[], T]) -> T:
        return retry_until(read, f"job {self.id!r} waits for what its runs have stored", self._patience)

    def _remove(self, handles: StateHandleStore, name: str) -> None:
        retry_until(
            lambda: handles.remove(name), f"job {self.id!r} waits for an old batch to be removed", self._patience
        )

    def _known(self, key: str, place: Place) -> tuple[Any] | None:
        """What a run before has stored of a step; the coordinators have their states back then."""
        try:
            stored = self._read(lambda: self._steps.get(key))
        except HandleMissing:
            return None
        value, checkpoints = pickle.loads(stored.data)
        self._restore(key, place, checkpoints)
        self.shown.step(key, "found")
        _log.info("step %r of job %r was done by a run before", key, self.id)
        return (value,)

    def _run(self, place: Place, f: Callable[[], T]) -> T:
        """Runs a step or a batch, and stores its result; until then other steps see that it runs."""
        key = _key(place)
        _forget_uses(place)
        with self._lock:
            self._running[key] = _open_operators()
        self.shown.step(key, "running")
        state = "failed"
        token = PLACE.set(place)
        try:
            try:
                made = f()
            finally:
                place.ended = True
                PLACE.reset(token)
            self._store(place, made)
            state = "finished"
        finally:
            with self._lock:
                del self._running[key]
            self.shown.step(key, state)
        return made

    def _store(self, place: Place, value: Any) -> None:
        from pyspark import cloudpickle

        key = _key(place)
        try:
            data = bytes(cloudpickle.dumps((value, self._checkpoints(place))))  # type: ignore[no-untyped-call]
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise JobError(f"the result of step {key!r} of job {self.id!r} cannot be pickled: {error}") from error
        state = self._steps.prepare(data)
        waits = f"step {key!r} of job {self.id!r} is done, and waits for its result to be stored"
        retry_until(lambda: self._steps.add(key, state), waits, self._patience)

    def _restore(self, key: str, place: Place, checkpoints: dict[str, bytes]) -> None:
        """Gives the coordinators of the topologies around a step the states that they had at its end."""
        open_ = {operators.name: operators for operators in _open_operators()}
        for name, data in checkpoints.items():
            if name not in open_:
                raise JobError(
                    f"step {key!r} was done inside topology {name!r}, which is not open here: the program has changed; submit it as "
                    f"another job"
                )
            self._require_alone(place, open_[name])
            open_[name].reset(Checkpoint.from_bytes(data))

    def _require_alone(self, place: Place, operators: Operators) -> None:
        """Raises `JobError` when another step, or a use in another thread, runs in this topology: its coordinators' states would be of both."""
        key = _key(place)
        with self._lock:
            beside = [
                other
                for other, around in self._running.items()
                if operators in around and other != key and not key.startswith(f"{other}/")
            ]
        if beside:
            raise JobError(
                f"steps {key!r} and {beside[0]!r} run at once in topology {operators.name!r}, whose coordinators' states cannot be of "
                f"both positions: run one after the other, or each in a topology of its own. If one is inside the other, carry the place "
                f"into its thread with topology.wrap"
            )
        if (operator := operators.used_by_another_thread(place)) is not None:
            raise JobError(
                f"another thread uses operator {operator!r} of topology {operators.name!r} beside step {key!r}, so the state of its "
                f"coordinator belongs to no certain position: wait for the thread before the step, or give it a topology of its own"
            )

    def _checkpoints(self, place: Place) -> dict[str, bytes]:
        """The states of the coordinators of all topologies that this thread is in, by name."""
        key = _key(place)
        found: dict[str, bytes] = {}
        for operators in _open_operators():
            checkpoint = operators.checkpoint(None, _CHECKPOINT)
            if not checkpoint.states:
                continue
            self._require_alone(place, operators)
            if operators.name in found:
                raise JobStepReused(
                    f"two topologies named {operators.name!r} with operators are open at the end of step {key!r}: a later run could not "
                    f"tell whose state is whose. Name them apart"
                )
            found[operators.name] = checkpoint.to_bytes()
        return found


def _named(name: str) -> str:
    if not name or "/" in name:
        raise RecoveryMisused(f"a step's name is a text without slashes, not {name!r}")
    return name


def _key(place: Place) -> str:
    return "/".join(place.steps)


def _here() -> Place | None:
    """Where in the program this thread is; None in a thread that is in no step or topology, before a session runs."""
    topologies = _topologies()
    return current_place() if topologies is None else topologies.place


def _places_of_queries() -> list[Place | None]:
    """Where the batches of a query may be that was started here: its function was wrapped, or is in the topology alone, or in no place."""
    topologies = _topologies()
    topology = None if topologies is None else topologies.innermost
    return [_here(), *([] if topology is None else [topology.place]), None]


def _forget_uses(place: Place) -> None:
    """Ends the uses of a batch in all open operators: the batch begins again, or will never be executed again."""
    for operators in _open_operators():
        operators.forget(place)


def _open_operators() -> list[Operators]:
    """Those of the application, and of the topologies that this thread is in."""
    from stagecrew.session.builder import running_crew

    crew = running_crew()
    found: list[Operators] = []
    if crew is not None:
        topology = crew.topologies.innermost
        while topology is not None:
            found.append(topology.operators)
            topology = topology.parent
        found.append(crew.application.operators)
    return found


def _topologies() -> ActiveTopologies | None:
    from stagecrew.session.builder import running_crew

    crew = running_crew()
    return None if crew is None else crew.topologies
