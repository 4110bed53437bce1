"""The `Job` object, through which a job's code runs steps and batches. A finished step does not run again."""

from __future__ import annotations

import functools
import logging
import pickle
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

from stagecrew.coordination.program_path import PLACE, Place
from stagecrew.errors import ConfigurationError, JobError, StagecrewError
from stagecrew.observability.error_summary import error_text
from stagecrew.observability.spans import span
from stagecrew.recovery.jobs.commit_log import StoredCommitLog, is_done
from stagecrew.recovery.jobs.coordinator_states import (
    CoordinatorStates,
    current_path,
    current_query,
    forget_uses,
    path_key,
    possible_query_paths,
)
from stagecrew.recovery.jobs.progress import JobProgress
from stagecrew.recovery.jobs.stored_step import StoredStep
from stagecrew.recovery.retry import RETRY_TIMEOUT, retry_until
from stagecrew.recovery.state.handles import HandleMissing
from stagecrew.session.running_job import running_job

if TYPE_CHECKING:
    from stagecrew.operators.committer import Committer
    from stagecrew.recovery.state.handles import StateHandleStore

__all__ = ["Job", "current_job"]

T = TypeVar("T")

_log = logging.getLogger("stagecrew")

#: The longest id of a commit, in characters.
_MAX_COMMIT_ID: Final = 200


def current_job() -> Job:
    """Returns the job that this process runs.

    Returns:
        The job.

    Raises:
        JobError: This process is not running a job.

    Examples:
        >>> from stagecrew.recovery import current_job
        >>> def load(day: str) -> int:
        ...     job = current_job()
        ...     rows = job.step("extract", lambda: [day, day])
        ...     return job.step("load", lambda: len(rows))
    """
    job = running_job()
    if not isinstance(job, Job):
        raise JobError(
            "this process does not run a job: submit it with `stagecrew submit`, and start `stagecrew driver`"
        )
    return job


class Job:
    """A job that survives its driver. Get it with `current_job`. Any thread of the job can use it.

    A later run does not execute a finished step again. Every run executes the code outside of steps.

    Attributes:
        id: The id of the job.
        attempt: The number of this run; 1 for the first.
        restored: Whether an earlier run has finished a step.

    Examples:
        >>> from stagecrew.recovery import current_job
        >>> def nightly(days: list[str]) -> int:
        ...     job = current_job()
        ...     return sum(job.step(f"load-{day}", lambda day=day: len(day)) for day in days)
    """

    def __init__(
        self,
        id_: str,
        attempt: int,
        steps: StateHandleStore,
        commits: StateHandleStore,
        retry_timeout: float = RETRY_TIMEOUT,
        facts: Mapping[str, str] | None = None,
        show_ui: Callable[[str], None] | None = None,
    ) -> None:
        self.id, self.attempt = id_, attempt
        self._steps, self._commits, self._retry_timeout = steps, commits, retry_timeout
        #: The ids of all commits of the job start with this. Slashes in the job's id are quoted. Otherwise job `a/b`
        #: could have the same prefix as step `b` of job `a`.
        self._commit_prefix = f"{id_.replace('%', '%25').replace('/', '%2F')}/"
        self.restored = bool(self._read(steps.names))
        self._progress = JobProgress({"job": id_, "run": str(attempt), **(facts or {})})
        self._show_ui = show_ui
        self._states = CoordinatorStates()
        self._ended = False
        self._lock = threading.Lock()
        self._used: set[tuple[str, str]] = set()
        #: For each stream, the batch after which its coordinators have their current states; None while a batch runs.
        self._positions: dict[str, int | None] = {}
        #: For each stream, the id of the streaming query whose batches they are; None outside of streaming queries.
        self._queries: dict[str, str | None] = {}
        #: For each stream whose first batch started in this run, the states of its coordinators before that batch.
        self._initial_states: dict[str, dict[str, bytes]] = {}

    def __repr__(self) -> str:
        return f"<run {self.attempt} of job {self.id!r}>"

    # -- Steps

    def step(self, name: str, f: Callable[[], T]) -> T:
        """Calls `f` and stores its result. A later run returns the stored result and does not call `f`.

        The result is durable when this returns. It is stored in one write with the states of all coordinators in the
        topologies that this thread is in. A later run that skips the step restores these states. The name of a step
        inside another step includes the outer step's name. Steps can run at the same time in several threads, if each
        is in its own topology.

        Not promised: that `f` runs only once. If a run dies in `f`, the side effects of `f` stay, and the next run
        calls `f` again. So data that is written without `topology.commit` can be written twice.

        Args:
            name: The name of the step, unique in the enclosing step or batch, or else in the job. It must not contain a
                slash.
            f: The work of the step. Its result must be picklable.

        Returns:
            The result of `f`, from this run or from an earlier one.

        Raises:
            JobError: The enclosing step or batch, or else the job, already has a step with this name.
            JobError: The result cannot be pickled, or another step or thread uses coordinators of the same topology at
                the same time.
            ConfigurationError: The name is empty or has a slash.
            StateStorageError: The result could not be stored for ten minutes.
            StoreError: The store was unavailable for ten minutes.
            RecordUnreadable: Another version of stagecrew stored the step, or its bytes are damaged.
        """
        place = Place(current_path(), "step", _checked_name(name))
        key = path_key(place)
        self._use("step", key)
        if (stored := self._restore(key, place)) is not None:
            value: T = stored[0]
            return value
        return self._run(place, f)

    def batch(self, name: str, batch_id: int, f: Callable[[], T]) -> T:
        """Runs a batch of a streaming query as a step. Call it in the function that you pass to `foreachBatch`.

        Spark repeats a batch that it has not committed. If that batch was finished, this returns its stored result.
        Otherwise, the coordinators first get the states that they had after the previous batch, or when the query
        started. So their states always match the batch in Spark's commit log. The results of the last two batches are
        kept. When an older batch is removed, its uses of operators end.

        Args:
            name: The name of the query, unique in the enclosing step or batch, or else in the job. It must not contain
                a slash.
            batch_id: The id that Spark passes to the function.
            f: The work of the batch. Its result must be picklable.

        Returns:
            The result of `f`, from this run or from an earlier one.

        Raises:
            JobError: The stored batches of this name belong to another streaming query: two queries have the same name,
                or the checkpoint location of the query has changed. Also raised for the same reasons as by `step`.
            ConfigurationError: The name is empty or has a slash, or the id is not a non-negative integer.
            StateStorageError: The result could not be stored for ten minutes.
            StoreError: The store was unavailable for ten minutes.
            RecordUnreadable: Another version of stagecrew stored the batch, or its bytes are damaged.
        """
        if not isinstance(batch_id, int) or batch_id < 0:
            raise ConfigurationError(
                f"{batch_id!r} is not the id of a batch: pass the integer that Spark passes to the function"
            )
        stream = Place(current_path(), "step", _checked_name(name))
        parent = path_key(stream)
        place = Place(stream, "batch", str(batch_id))
        key = path_key(place)
        query = current_query()
        with self._lock:
            if self._queries.setdefault(parent, query) != query:
                raise self._of_another_query(parent)
        self._forget_names_in(key)  # a restarted query repeats its last batch
        if (stored := self._restore(key, place, parent)) is not None:
            self._positions[parent] = batch_id
            value: T = stored[0]
            return value
        stored_ids = self._stored_batches(parent)
        self._restore_position(parent, batch_id, place, stored_ids)
        self._positions[parent] = None
        result = self._run(place, f, query)
        self._positions[parent] = batch_id
        for old in stored_ids - {batch_id - 1}:
            self._remove_batch(f"{parent}/batch-{old}")
            forget_uses(Place(stream, "batch", str(old)))
            self._forget_names_in(f"{parent}/batch-{old}")
        return result

    def after_stream(self, name: str) -> None:
        """Restores the states that a query's coordinators had at the end of its last batch.

        Call it after the query has ended, if its `foreachBatch` function uses `batch`.

        In the run that executed the last batch, the coordinators already have these states. If in a later run the query
        has nothing left to do, Spark calls no batch, so only this method restores them.

        Args:
            name: The name that was passed to `batch`.

        Raises:
            JobError: Another step runs in the same topology, or the topology of a batch is not open here.
            ConfigurationError: The name is empty or has a slash.
        """
        for outer in possible_query_paths():
            stream = Place(outer, "step", _checked_name(name))
            parent = path_key(stream)
            if stored := self._stored_batches(parent):
                if self._positions.get(parent) is None:
                    last = max(stored)
                    self._restore(f"{parent}/batch-{last}", Place(stream, "batch", str(last)))
                    self._positions[parent] = last
                return

    # -- Commits

    def commit_id(self, name: str) -> str:
        """Returns the id of a commit in the current step. It is the same in every run.

        Args:
            name: The name of the sink, unique in the step.

        Returns:
            The id.

        Raises:
            JobError: The name was already used in this step, or the job has ended.
            ConfigurationError: The id would be longer than 200 characters.
        """
        if self._ended:
            raise JobError(
                f"job {self.id!r} has ended, so its commits are refused: wait for its threads and queries before the "
                "job returns"
            )
        here = current_path()
        key = "/".join((*(() if here is None else here.steps), name))
        id_ = f"{self._commit_prefix}{key}"
        if len(id_) > _MAX_COMMIT_ID:
            raise ConfigurationError(
                f"the id of the commit, {id_!r}, has {len(id_)} characters, and the limit is {_MAX_COMMIT_ID}: use "
                "shorter names for the job, the steps or the sink"
            )
        self._use("commit", key)
        return id_

    def commit_log(self, sink: Committer) -> StoredCommitLog:
        """Returns the log of a sink's commits in the job's store.

        Args:
            sink: The sink, which is stored with each record.

        Returns:
            The log.
        """
        return StoredCommitLog(self._commits, sink, self._retry_timeout)

    def show(self) -> None:
        """Shows the job's progress in the Spark UI, and stores the address of the UI, if a session is running."""
        self._progress.send()
        if self._show_ui is not None and (url := self._progress.ui()) is not None:
            try:
                self._show_ui(url)
            except StagecrewError as error:  # the address is a convenience; the watchdog judges errors of the store
                _log.warning("the address of the Spark UI could not be stored: %s", error_text(error))

    def end(self) -> None:
        """Records that the job's code has ended: later commits are refused. The process of the run calls this."""
        self._ended = True

    # -- Stored steps

    def _use(self, kind: str, key: str) -> None:
        with self._lock:
            if (kind, key) in self._used:
                raise JobError(
                    f"job {self.id!r} has already used {kind} {key!r}, so a later run could not tell the two apart: "
                    "use different names"
                )
            self._used.add((kind, key))

    def _forget_names_in(self, key: str) -> None:
        """Forgets the names that were used in a step or batch."""
        with self._lock:
            self._used = {used for used in self._used if not used[1].startswith(f"{key}/")}

    def _of_another_query(self, stream: str) -> JobError:
        return JobError(
            f"the batches {stream!r} of job {self.id!r} belong to another streaming query. If two queries pass this "
            "name to job.batch, give each its own. If the query has another checkpoint location than before, restore "
            "the previous one, or submit the program as another job"
        )

    def _run(self, place: Place, f: Callable[[], T], query: str | None = None) -> T:
        """Runs a step or a batch and stores its result. Other steps see it as running until the result is stored."""
        key = path_key(place)
        forget_uses(place)
        self._states.start(place)
        self._progress.record_step(key, "running")
        state = "failed"
        token = PLACE.set(place)
        try:
            name = f"step {place.name}" if place.kind == "step" else "batch"
            with span(name, {"stagecrew.job": self.id, "stagecrew.run": self.attempt, "stagecrew.step": key}):
                try:
                    result = f()
                finally:
                    place.ended = True
                    PLACE.reset(token)
                self._store(place, result, query)
            state = "finished"
            _log.info("step %r of job %r is finished, and its result is stored", key, self.id)
        finally:
            self._states.end(place)
            self._progress.record_step(key, state)
        return result

    def _store(self, place: Place, value: Any, query: str | None) -> None:
        from pyspark import cloudpickle

        key = path_key(place)
        try:
            pickled = bytes(cloudpickle.dumps(value))  # type: ignore[no-untyped-call]
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise JobError(
                f"the result of step {key!r} of job {self.id!r} cannot be pickled ({error}): return a simpler value"
            ) from error
        state = self._steps.prepare(StoredStep(pickled, self._states.checkpoint(place), query).to_bytes())
        description = f"step {key!r} of job {self.id!r} is done and waits for its result to be stored"
        retry_until(lambda: self._steps.add(key, state), description, self._retry_timeout)

    def _restore(self, key: str, place: Place, stream: str | None = None) -> tuple[Any] | None:
        """Restores a step of an earlier run: returns its result, and gives the coordinators their states.

        Raises `JobError` for a batch of this stream that belongs to another streaming query.
        """
        try:
            stored = self._read(lambda: self._steps.get(key))
        except HandleMissing:
            return None
        step = StoredStep.from_bytes(stored.data)
        if stream is not None and step.query != self._queries[stream]:
            raise self._of_another_query(stream)
        value = pickle.loads(step.value)
        self._states.restore(key, place, step.checkpoints)
        self._progress.record_step(key, "found")
        _log.info("step %r of job %r was finished by an earlier run and is skipped", key, self.id)
        return (value,)

    # -- Stored batches

    def _restore_position(self, parent: str, batch_id: int, place: Place, stored_ids: set[int]) -> None:
        """Gives the coordinators the states that they had before this batch."""
        if batch_id - 1 in stored_ids:
            if self._positions.get(parent) != batch_id - 1:
                self._restore(f"{parent}/batch-{batch_id - 1}", place, parent)
        elif stored_ids:
            raise JobError(
                f"batch {batch_id} of {parent!r} does not follow the last stored batch, {max(stored_ids)}: restore the "
                "query's previous checkpoint location, or submit the program as another job"
            )
        elif parent in self._initial_states:
            self._states.restore(path_key(place), place, self._initial_states[parent])
        else:
            self._initial_states[parent] = self._states.checkpoint(place)

    def _stored_batches(self, parent: str) -> set[int]:
        prefix = f"{parent}/batch-"
        parts = (name.removeprefix(prefix) for name in self._read(self._steps.names) if name.startswith(prefix))
        return {int(part) for part in parts if part.isdigit()}

    def _remove_batch(self, batch: str) -> None:
        """Removes an old batch, with its steps and finished commits. Spark will not repeat the batch."""
        for name in self._read(self._steps.names):
            if name == batch or name.startswith(f"{batch}/"):
                self._remove(self._steps, name)
        for name in self._read(self._commits.names):
            in_batch = name.startswith(f"{self._commit_prefix}{batch}/")
            if in_batch and self._read(functools.partial(is_done, self._commits, name)):
                self._remove(self._commits, name)

    def _read(self, read: Callable[[], T]) -> T:
        return retry_until(read, f"job {self.id!r} waits to read its stored steps and commits", self._retry_timeout)

    def _remove(self, handles: StateHandleStore, name: str) -> None:
        description = f"job {self.id!r} waits for an old batch to be removed"
        retry_until(lambda: handles.remove(name), description, self._retry_timeout)


def _checked_name(name: str) -> str:
    if not name or "/" in name:
        raise ConfigurationError(f"{name!r} is not a valid step name: use a string that is not empty and has no slash")
    return name
