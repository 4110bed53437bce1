"""What a topology offers to its program: operators with their coordinators, and checkpoints of these."""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from stagecrew.coordination.operators import COMMIT, Operators
from stagecrew.errors import OperatorMisused, TopologyClosed
from stagecrew.session.active_topologies import TopologyNode
from stagecrew.session.running_job import running_job

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
    from stagecrew.operators.committer import CommitReport, Committer
    from stagecrew.operators.superstep_context import SuperstepContext
    from stagecrew.session.connection import PluginConnection

__all__ = ["TopologyOperators"]


class TopologyOperators(TopologyNode):
    """The part of `Topology` that makes operators and takes checkpoints of their coordinators."""

    def __init__(
        self, connection: PluginConnection, name: str, id_: str, has_listeners: bool, commit_log: CommitLog
    ) -> None:
        super().__init__(name, id_, has_listeners)
        self._connection = connection
        #: For commits that are given no other log.
        self._commit_log = commit_log
        self.operators = Operators(self, lambda: connection.close_timeout)

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
        return read_splits(self, self._connection.context, enumerator, read, schema, parallelism, name)

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
        return run_supersteps(self, dataset, work, schema, name, stop_when, timeout, self._connection.await_slots)

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
        from stagecrew.operators.commit_operator import commit_dataset

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
            self._commit_log if commit_log is None else commit_log_of(commit_log),
            self._connection.close_timeout,
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
        return self._connection.host()

    @property
    def request_timeout(self) -> float:
        """How long its tasks wait for their coordinator, in seconds."""
        return self._connection.request_timeout

    def cancel_failed(self, cause: BaseException) -> None:
        """Begins to cancel what runs of it, because a coordinator failed."""

        def cancel() -> None:
            with contextlib.suppress(Exception):  # the session may be stopping, which cancels as well
                self._connection.cancel(self.id, f"a coordinator of topology {self.name!r} failed: {cause!r}")

        # Not on the coordinator's thread, nor under a lock of ours: this asks the JVM.
        threading.Thread(target=cancel, name="stagecrew-fail", daemon=True).start()

    def _require_active(self, what: str) -> None:
        if not self.is_active:
            raise TopologyClosed(f"topology {self.name!r} is {self._state}: {what} inside the `with`")
        self._connection.require_running()
