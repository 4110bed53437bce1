"""Topologies: a run with a lifecycle that spans any number of Spark jobs, stages and streaming queries."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from stagecrew.coordination.operators import COMMIT, Operators
from stagecrew.coordination.program_path import PLACE, Place, current_place
from stagecrew.errors import OperatorMisused, TopologyClosed, TopologyError
from stagecrew.listeners.listener import Listener
from stagecrew.observability.error_summary import error_line
from stagecrew.partitions.report import PartitionReport, Release, java_dataset
from stagecrew.session.reports import TopologyReport

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

    from stagecrew.coordination.checkpoints import Checkpoint
    from stagecrew.coordination.context import CoordinatorContext
    from stagecrew.coordination.contract import Coordinator
    from stagecrew.coordination.host import Host
    from stagecrew.coordination.operator import Operator
    from stagecrew.operators.alignment import Alignment
    from stagecrew.operators.commit_log import CommitLog
    from stagecrew.operators.commits import CommitReport, Committer
    from stagecrew.operators.supersteps import SuperstepContext
    from stagecrew.session.crew import Crew

__all__ = ["Topology"]

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger("stagecrew")


class Topology:
    """A run with a lifecycle: its listeners open before the first task on each worker and close after the last.

    Made by `Crew.topology`. Use it as a context manager, or with `start` and `close` in a notebook:

        with crew.topology("enrich", listeners=[orders]) as topology:
            flights.mapInArrow(enrich, schema).write.parquet(path)
        print(topology.report)

    What the thread starts between `start` and `close` belongs to it: jobs, SQL queries, streaming queries and what these
    start. Another thread takes part with `wrap`. A lazy dataset belongs to the topology in which its *action* runs.

    Topologies that begin inside this one in its thread end with it at the latest, so close them in reverse order. `close`
    may be called in another thread; the one that called `start` bears the mark of the ended topology until it next starts,
    wraps or closes one, and what it starts meanwhile runs under the application's topology.

    A normal exit waits for the jobs and streaming queries of the topology, and says every 10 s for whom. An exit by an
    exception or Ctrl-C, and `close(cancel=True)`, stop the queries and cancel the jobs; the exception is unchanged. Then
    the exit waits until every executor has closed what it can, at most `spark.stagecrew.close.timeout`, and names who has
    not. It does **not** wait for workers that are busy with a task of another topology: these close right after it.

    What its tasks wrote as shuffle outputs is deleted at its end, unless another topology, a job of none, or `keep` uses it;
    `release` says otherwise. A dataset that is used again is computed again, with the same rows if it is deterministic.
    """

    def __init__(
        self,
        crew: Crew,
        name: str,
        listeners: Sequence[Listener],
        jvm_listeners: Sequence[str],
        release: Release = Release.SHUFFLES,
    ) -> None:
        self._crew = crew
        self.release = release
        self.name = name
        self.id = f"{name.replace(' ', '-').replace(',', '-')}-{uuid.uuid4().hex[:12]}"
        self.tag = f"stagecrew-{self.id}"
        self._listeners, self._jvm_listeners = tuple(listeners), tuple(jvm_listeners)
        self._state = "new"
        #: Whether it began by `start`, not by a `with`.
        self.by_start = False
        self._told = False  # whether a failure of a coordinator was raised
        self.parent: Topology | None = None
        #: Where in the program it began.
        self.place = Place()
        self._last_report: TopologyReport | None = None
        self.operators = Operators(self, lambda: crew.close_timeout)

    def __repr__(self) -> str:
        return f"<topology {self.name!r} ({self._state})>"

    @property
    def is_active(self) -> bool:
        """Whether it has begun, and not begun to close."""
        return self._state == "active"

    @property
    def has_ended(self) -> bool:
        """Whether it is closed, by itself or with the one that it lay in."""
        return self._state == "closed"

    @property
    def listens(self) -> bool:
        """Whether it has Python listeners of its own."""
        return bool(self._listeners)

    def start(self) -> Topology:
        """Begins the topology in this thread, inside the active one that the thread is in.

        Raises `TopologyClosed` when it began before, `NotActive` after the session has stopped, and `TopologyError` while the
        thread is in an active topology of the same name that began by `start`, as when a notebook cell runs again. Topologies of
        one name may be nested by `with`.
        """
        if self._state == "new" and self._crew.running and self._crew.marks.started(self.name):
            raise TopologyError(
                f"a topology {self.name!r} is active in this thread already, begun by start(), perhaps by an earlier run of this "
                f"cell: close it by its close(), or close all by crew.close_all(), and start again"
            )
        self._begin()
        self.by_start = True
        return self

    def _begin(self) -> None:
        if self._state != "new":
            raise TopologyClosed(
                f"topology {self.name!r} is {self._state}: a topology runs once; create another with crew.topology({self.name!r})"
            )
        crew = self._crew
        crew.require_running()
        self.parent = crew.marks.innermost
        parent = None if self.parent is None else self.parent.id
        crew.begin(self.id, self.name, parent, self._listeners, self._jvm_listeners, self.release)
        for listener in self._listeners:
            listener._stagecrew.registered_for(f"topology {self.name!r}", self.id)
        self.place = Place(crew.place, "topology", self.name)
        self.operators.begin_in(self.place)
        self._state = "active"
        crew._active.append(self)  # also when nobody keeps the object: the thread belongs to it until `close`
        crew.marks.enter(self)
        PLACE.set(self.place)

    def close(self, cancel: bool = False) -> None:
        """Ends the topology, and those that began inside it; a second call does nothing.

        `cancel` stops its streaming queries and cancels its jobs instead of waiting for them. Raises `CoordinatorFailed`, behind
        all else and once, when one of its own coordinators failed, whoever ended the topology; not while something passes that
        is no `Exception`, such as Ctrl-C.
        """
        self._end_once(cancel)
        self._tell(sys.exc_info()[1])

    def _tell(self, error: BaseException | None) -> None:
        """Raises the failure of a coordinator, once, unless what passes is more important."""
        if self.operators.cause is not None and not self._told and (error is None or isinstance(error, Exception)):
            self._told = True
            self.operators.raise_failure()

    def _end_once(self, cancel: bool) -> None:
        if self._state == "new":
            self._state = "closed"
        if self._state in ("closing", "closed"):
            self._crew.marks.leave(self)  # it may have ended in another thread, or with the one that it lay in
            return
        self._state = "closing"
        try:
            if self._crew.running:
                self._finish(cancel)
        finally:
            for topology in (self, *self._inside()):  # the driver ended those inside too
                topology._state = "closed"
                for listener in topology._listeners:
                    listener._stagecrew.has_ended(topology.id)
                topology.place.ended = True
                with contextlib.suppress(ValueError):
                    self._crew._active.remove(topology)
            self._crew.marks.leave(self)
            PLACE.set(current_place())

    def _inside(self) -> Iterator[Topology]:
        """The active ones that lie in this one, at any depth."""
        for topology in tuple(self._crew._active):
            if topology.parent is self and topology.is_active:
                yield topology
                yield from topology._inside()

    def __enter__(self) -> Topology:
        self._begin()
        return self

    def __exit__(
        self, type_: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self._end_once(cancel=False)
            self._tell(None)
            return
        if (supersteps := sys.modules.get("stagecrew.operators.supersteps")) is not None:
            with contextlib.suppress(Exception):  # Spark may be gone, and with it the text of its error
                supersteps.note_remedy(error, self._crew.facade.slots)
        try:
            self._end_once(cancel=True)
        except Exception:
            _log.warning(
                "closing topology %r failed; the exception that ended it is unchanged", self.name, exc_info=True
            )
        self._tell(error)

    def wrap(self, f: Callable[P, T]) -> Callable[P, T]:
        """`f` as a function that takes part in this topology in whatever thread it is called.

        Calling it after the topology closed raises `TopologyClosed`, after the session has stopped `NotActive`.
        """

        here = current_place()
        place = here if here is not None and here.is_within(self.place) else self.place

        @functools.wraps(f)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
            if not self.is_active:
                raise TopologyClosed(
                    f"{getattr(f, '__qualname__', f)!r} was wrapped for topology {self.name!r}, which is {self._state}; "
                    f"call it inside the `with`"
                )
            self._crew.require_running()
            self._crew.marks.enter(self)
            token = PLACE.set(place)
            try:
                return f(*args, **kwargs)
            finally:
                PLACE.reset(token)
                self._crew.marks.leave(self)

        return wrapped

    @property
    def report(self) -> TopologyReport:
        """What happened so far; after the session has stopped, what was known last. Raises `TopologyError` before `start`."""
        report = self._known()
        if report is None:
            raise TopologyError(f"topology {self.name!r} has not begun, or was forgotten; there is no report of it")
        return report

    # -- Partitions

    def keep(self, *datasets: Any) -> None:
        """What these DataFrames and RDDs have stored when the topology ends stays: it is the application's then.

        Their own shuffles, as far as they ran by then, and what they cached; not those of datasets that are made of them
        (`df.count()` runs a plan of its own: its shuffles are not those of `df.collect()`).

        Raises `TopologyError` for anything else, and `TopologyClosed` unless the topology is active.
        """
        every = [java_dataset(dataset) for dataset in datasets]
        self._require_active("keep datasets")
        for dataset in every:
            self._crew.facade.keep(self.id, dataset)

    @property
    def partitions(self) -> tuple[PartitionReport, ...]:
        """What it has stored, per executor; as `report`."""
        return self.report.partitions

    # -- Coordination

    def coordinate(self, name: str, factory: Callable[[CoordinatorContext], Coordinator]) -> Operator:
        """An operator of this topology: bind it to datasets, whose tasks then talk to a coordinator that the factory makes.

        `factory` is a `Coordinator` class, or anything that makes one of a `CoordinatorContext`. Raises `OperatorMisused` when it
        cannot be called, `TopologyClosed` unless the topology is active.
        """
        from stagecrew.coordination.operator import Operator

        if not callable(factory):
            raise OperatorMisused(
                f"operator {name!r}: a coordinator is made by a factory, such as its class; {type(factory).__name__} cannot be called"
            )
        self._require_active("coordinate operators")
        self.operators.name_operator(name)
        return Operator(self, name, factory)

    def splits(
        self,
        enumerator: Any,
        read: Callable[[Any], Iterable[pa.RecordBatch]],
        schema: StructType | str,
        parallelism: int | None = None,
        name: str | None = None,
    ) -> DataFrame:
        """A DataFrame whose tasks pull what they read next, so that none is left with the rest: a dynamic source.

        Every split is in the result exactly as often as Spark's semantics say, whatever fails or runs twice: each subtask has a
        log of its splits, which every evaluation of it replays before it asks for more. Not promised: which subtask reads
        which split, and the order of rows.

        `enumerator` is an iterable of picklable splits, or has `splits()` that answers one, and may have `locations(split)`, a
        list of host names that are preferred when free. It is read lazily, on the driver. `read(split)` runs in the tasks and
        yields `pyarrow.RecordBatch`es of `schema`. `parallelism` is the number of tasks, by default `sparkContext.defaultParallelism`. See
        `stagecrew.operators.splits` for enumerators of files, row groups, key ranges and a DataSource reader's partitions.

        Raises `OperatorMisused` and `TopologyClosed`. When the enumerator fails, so does the topology: an action raises Spark's own error,
        and the `with` `CoordinatorFailed`, whose `__cause__` is `SplitsFailed`.
        """
        from stagecrew.operators.splits import read_splits

        self._require_active("read splits")
        return read_splits(self, self._crew.context, enumerator, read, schema, parallelism, name)

    def supersteps(
        self,
        dataset: DataFrame,
        work: Callable[[SuperstepContext, Iterator[pa.RecordBatch]], Iterable[pa.RecordBatch]],
        schema: StructType | str,
        name: str | None = None,
        stop_when: Callable[[int, Any], bool] | None = None,
        timeout: float = 600.0,
    ) -> DataFrame:
        """A DataFrame whose tasks compute together, step by step: an iteration without a job for each step.

        `work(steps, batches)` runs once for each partition of the dataset, all at the same time, and yields
        `pyarrow.RecordBatch`es of `schema`. `steps.reduce(value, op)` gives every task the one value that is made of all of
        theirs. Values are reduced in the order of subtasks: the result is that of a single process, also in its last bit, where
        the reducer is associative or there are as many partitions.

        `stop_when(step, value)`, on the driver, looks at each step's result until it says True: then `steps.stopped` is, in every
        task. `timeout` is how many seconds a step may wait for its last task.

        A task that fails has the whole stage run again from step 0, as often as `spark.stage.maxConsecutiveAttempts` allows; so has
        output of it that Spark lost. All partitions need a slot at the same time: Spark refuses more, and dynamic allocation.
        A shuffle follows, which keeps the rows of a subtask together and in order.

        Raises `OperatorMisused` and `TopologyClosed`. When tasks reduce differently, the topology fails: an action raises Spark's own
        error, and the `with` `CoordinatorFailed`, whose `__cause__` is `SuperstepsFailed`.

        Source: Flink's iterations with supersteps (PR #10483); Spark's barrier execution.
        """
        from stagecrew.operators.supersteps import run_supersteps

        self._require_active("run supersteps")
        return run_supersteps(self, dataset, work, schema, name, stop_when, timeout, self._crew.await_slots)

    def commit(
        self,
        dataset: DataFrame,
        sink: Committer,
        commit_id: str | None = None,
        commit_log: CommitLog | str | os.PathLike[str] | None = None,
        name: str = COMMIT,
        content: str | None = None,
    ) -> CommitReport:
        """Writes a DataFrame to a sink: all of its rows become visible at once, or none, whatever fails.

        Tasks stage what they write where nobody reads. What is committed is exactly what the attempts staged that Spark accepted:
        failed, speculative, lost and repeated ones leave nothing. See `stagecrew.operators.sinks` for Parquet files, objects with a
        manifest, databases and Iceberg tables, and what readers see in between; `Committer` for one of your own.

        With a `commit_id` and `decisions` that outlive the driver (`FileCommitLog`, or the path of its folder), a driver that dies at any point may be followed by
        another that calls this again: what was decided is finished without running the dataset, what was not is discarded and
        written anew, and what is done stays as it is. Without `decisions` those of this session are taken, in memory; without a
        `commit_id` each call is a commit of its own, whose id the errors name.

        In a job (`stagecrew.current_job`) both are given by the job: the id is made of the job's, the step's and this `name`, which a
        step uses once, and the decisions are the job's store.

        An id belongs to one set of rows. `content` may say which: a date, a snapshot id, or any other text. A call with the id of a commit
        that was decided before writes nothing and logs a warning, which says when that was and how many rows it has; it raises
        `OperatorMisused` when the sink, the columns or the content differ, with both values. Whether columns may be null, their order and
        their metadata do not count. In a job a repeat logs nothing; where an earlier run of the job has decided the commit, another
        content, sink or schema is a warning, and the rows of that run stay.

        Raises `CommitFailed` when nothing is visible, and nothing left, or what the job raised; `CommitPending` when it is decided but
        could not be done yet, `CommitUnknown`; `CommitUnreadable` for a record of another version; `OperatorMisused`, `TopologyClosed`.

        Source: Flink's two-phase sinks (FLIP-143), decided by the result of Spark's action.
        """
        from stagecrew.operators.commit_log import commit_log_of
        from stagecrew.operators.commits import commit_dataset
        from stagecrew.recovery.job import running_job

        self._require_active("commit datasets")
        job = running_job()
        if job is not None:
            commit_id = job.commit_id(name) if commit_id is None else commit_id
            commit_log = job.commit_log(sink) if commit_log is None else commit_log
        id_ = uuid.uuid4().hex if commit_id is None else commit_id
        if not id_ or len(id_) > 200:
            raise OperatorMisused(f"a commit's id is a text of 1 to 200 characters, not of {len(id_)}")
        return commit_dataset(
            self,
            dataset,
            sink,
            name,
            id_,
            self._crew.commit_log if commit_log is None else commit_log_of(commit_log),
            self._crew.close_timeout,
            content,
            None if job is None else (job.id, job.attempt),
        )

    def align(self, name: str, drift: Any, idle_after: float | None = None) -> Alignment:
        """Tasks that advance in event time together: who is ahead of the slowest by more than `drift` waits.

        Map datasets with it: `work(aligner, batches)` calls `aligner.advance(watermark)` as it goes. Sources take part from their
        first watermark until they finish, their task ends, or they are silent for `idle_after` seconds. Event times are numbers,
        or `datetime` with a `timedelta` as drift.

        Not promised: that sources wait for one whose task has not begun; give all their tasks a slot, or read them as splits, with
        `EventTimeSplits`. Raises `OperatorMisused` and `TopologyClosed`; a source that waits for too long gets `AlignmentFailed`.

        Source: Flink's watermark alignment (FLIP-182).
        """
        from stagecrew.operators.alignment import align

        self._require_active("align sources")
        alignment = align(self, name, drift, idle_after)
        self.operators.name_operator(name)  # behind all that may be refused: the name is free then
        return alignment

    @property
    def progress(self) -> dict[str, dict[str, Any]]:
        """The progress of its coordinators, by operator and use: `{"supersteps/1": {"step": 12}}`.

        It has the names of `progress` in `report.operators`, with their values as they are. A value that a coordinator reported is
        here at once; one that it returns from `Coordinator.progress`, as splits do, about a second later, and at the end.
        """
        return self.operators.progress()

    def checkpoint(self, checkpoint_id: int | None = None, timeout: float = 30.0) -> Checkpoint:
        """The states of all coordinators of this topology, as of one cut of each.

        When it returns, what each had sent before its cut is in its tasks' mailboxes, and nothing that it sent after. The
        cuts of several coordinators are not at one instant. What tasks send is in the state as far as it was handled.

        `checkpoint_id` grows from one to the next, by default by one. Raises `CheckpointFailed` when a coordinator declines,
        or within `timeout` seconds gives no state; all then hear `checkpoint_aborted`.
        """
        self._require_active("take checkpoints")
        return self.operators.checkpoint(checkpoint_id, timeout)

    def reset(self, checkpoint: Checkpoint | None = None) -> None:
        """All coordinators begin anew, as of a checkpoint or of nothing: each closes, and another instance takes over.

        No evaluation of before gets an answer, or succeeds: its attempt fails, and Spark tries again. It does not wait for that.
        """
        self._require_active("reset coordinators")
        self.operators.reset(checkpoint)

    def host(self) -> Host:
        """What serves the coordinators of this topology."""
        return self._crew.host()

    @property
    def request_timeout(self) -> float:
        """How long its tasks wait for their coordinator, in seconds."""
        return self._crew.request_timeout

    def cancel_failed(self, cause: BaseException) -> None:
        """Begins to cancel what runs of it, because a coordinator failed."""

        def cancel() -> None:
            with contextlib.suppress(Exception):  # the session may be stopping, which cancels as well
                self._crew.facade.cancel(self.id, f"a coordinator of topology {self.name!r} failed: {cause!r}")
                self._crew.facade.stopQueries(self.id)

        # Not on the coordinator's thread, nor under a lock of ours: this asks the JVM.
        threading.Thread(target=cancel, name="stagecrew-fail", daemon=True).start()

    def _require_active(self, what: str) -> None:
        if not self.is_active:
            raise TopologyClosed(f"topology {self.name!r} is {self._state}: {what} inside the `with`")
        self._crew.require_running()

    def _known(self) -> TopologyReport | None:
        if self._crew.running and (found := self._crew.report(self.id)) is not None:
            self._last_report = found
        return self._last_report

    def _finish(self, cancel: bool) -> None:
        if not cancel:
            try:
                self._wait_for_activity(None)
            except BaseException:
                self._cancel()
                self._end()
                raise
        else:
            self._cancel()
        self._end()

    def _cancel(self) -> None:
        self._crew.facade.cancel(self.id, f"topology {self.name!r} was cancelled")
        self._crew.facade.stopQueries(self.id)
        self._wait_for_activity(self._crew.close_timeout)

    def _wait_for_activity(self, seconds: float | None) -> None:
        """Until nothing of the topology runs; with a bound, that is for the end of what was cancelled."""
        started = said = time.monotonic()
        pause = 0.01
        while True:
            activity: dict[str, list[Any]] = json.loads(self._crew.facade.activity(self.id))
            if seconds is not None and activity["queries"]:
                self._crew.facade.stopQueries(self.id)  # again: one may have been about to start
            waiting = [
                f"{kind[:-1] if kind != 'queries' else 'streaming query'} {one}"
                for kind, ones in activity.items()
                for one in ones
            ]
            now = time.monotonic()
            if not waiting:
                return
            if seconds is not None and now - started > seconds:
                _log.warning(
                    "topology %r was cancelled, and after %g s still runs: %s", self.name, seconds, ", ".join(waiting)
                )
                return
            if now - said >= 10:
                said = now
                _log.warning("topology %r waits for %s", self.name, ", ".join(waiting))
            time.sleep(pause)
            pause = min(pause * 2, 0.2)

    def _end(self) -> None:
        inside = tuple(self._inside())
        for topology in (*inside, self):
            topology.operators.close(
                f"topology {topology.name!r} has ended: what its operators are bound to is run inside its `with`"
            )
            self._crew.tell(topology.operators)
        self._crew.end(self.id, self._crew.close_timeout)
        for topology in (*inside, self):
            topology._warn()

    def _warn(self) -> None:
        report = self._known()
        if report is None:  # the driver remembers only so many: no reason for an exit to fail
            return
        for one in report.listeners:
            if one.failures:
                _log.warning(
                    "topology %r: listener %r failed %d times on executor %s, last: %s",
                    self.name, one.name, one.failures, one.executor, error_line(one.last_error),
                )  # fmt: skip
        if report.unclosed:
            _log.warning(
                "topology %r has ended; not closed after %g s: %s",
                self.name, self._crew.close_timeout, "; ".join(report.unclosed),
            )  # fmt: skip
