"""The part of a topology that creates operators and takes checkpoints of their coordinators."""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from stagecrew.coordination.operators import COMMIT, Operators
from stagecrew.errors import OperatorMisused, TopologyError
from stagecrew.session.active_topologies import TopologyNode
from stagecrew.session.running_job import running_job

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

    from stagecrew.coordination.binding_table import QueryCheck
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
        """Creates an operator, which connects the tasks of a dataset with a coordinator on the driver.

        Args:
            name: The operator's name, unique in the topology. Checkpoints, reports and the UI use it.
            factory: A `Coordinator` class, or another callable that takes a `CoordinatorContext` and returns a
                coordinator.

        Returns:
            The operator. Each dataset that it is bound to gets a coordinator of its own.

        Raises:
            OperatorMisused: `factory` cannot be called, or the topology already has an operator of this name.
            TopologyError: The topology is not active.
            NotActive: The session has stopped.

        Examples:
            budget = topology.coordinate("budget", Budget)
            dataset = budget.map(flights, spend, schema)
        """
        from stagecrew.coordination.operator import Operator

        if not callable(factory):
            raise OperatorMisused(
                f"operator {name!r}: the factory is a {type(factory).__name__}, which cannot be called. Pass a Coordinator "
                f"class, or a function that takes a CoordinatorContext and returns a coordinator"
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
        """Creates a DataFrame whose tasks pull splits one after the other, so that no task is left with a backlog.

        Every split is in the result exactly as often as Spark's semantics say, whatever fails or runs twice: each
        subtask has a log of its splits, and each evaluation of the subtask replays this log before it asks for more.

        Args:
            enumerator: An iterable of picklable splits, or an object with `splits()` that returns one. It may have
                `locations(split)`, a list of preferred host names. It is read lazily, on the driver. See
                `stagecrew.operators.enumerators` for enumerators of files, row groups, key ranges and the partitions
                of a `DataSource` reader.
            read: Runs in the tasks. Takes a split and yields `pyarrow.RecordBatch`es of `schema`.
            schema: The schema of the rows.
            parallelism: The number of tasks; by default `sparkContext.defaultParallelism`.
            name: The operator's name; by default "splits".

        Returns:
            The DataFrame. It is lazy, like every DataFrame.

        Raises:
            OperatorMisused: An argument is wrong, or the name is taken.
            TopologyError: The topology is not active.
            NotActive: The session has stopped.

        Examples:
            rows = topology.splits(range(1000), read_range, "id long")
            rows.write.parquet(path)

        When the enumerator fails, the topology fails: the action raises Spark's own error, and the `with` raises
        `CoordinatorFailed`, whose `__cause__` is `OperatorFailed`.

        Not promised: which subtask reads which split, and the order of rows.

        Source: Flink's split enumerators (FLIP-27).
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
        """Creates a DataFrame whose tasks compute together, step by step, without a Spark job for each step.

        Args:
            dataset: The input. All its partitions run at the same time, so each needs a slot. Spark refuses a dataset
                with more partitions than slots, and dynamic allocation.
            work: Called as `work(steps, batches)`, once for each partition, with a `SuperstepContext` and the
                partition's batches. Yields `pyarrow.RecordBatch`es of `schema`. `steps.reduce(value, op)` combines
                the values of all tasks and returns the result to each of them.
            schema: The schema of the rows that `work` yields.
            name: The operator's name; by default "supersteps".
            stop_when: Called on the driver as `stop_when(step, value)` with the result of each step. After it returns
                True, `steps.stopped` is True in every task.
            timeout: The time that a step waits for its last task, in seconds.

        Returns:
            The DataFrame. It adds a shuffle, which keeps the rows of a subtask together and in order.

        Raises:
            OperatorMisused: An argument is wrong, or the name is taken.
            TopologyError: The topology is not active.
            NotActive: The session has stopped.

        Examples:
            centers = topology.supersteps(points, kmeans, "x double, y double")

        Values are reduced in the order of subtasks. The result equals that of a single process, to the last bit, if
        the reducer is associative or the number of partitions is the same.

        When a task fails, or Spark loses output of the stage, the whole stage runs again from step 0, at most
        `spark.stage.maxConsecutiveAttempts` times. When tasks reduce differently, the topology fails: the action
        raises Spark's own error, and the `with` raises `CoordinatorFailed`, whose `__cause__` is `OperatorFailed`.

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
        """Writes a DataFrame to a sink: either all of its rows become visible at once, or none, whatever fails.

        Tasks stage their rows where no reader sees them. The commit contains exactly the output of the attempts that
        Spark accepted: failed, speculative, lost and repeated attempts leave nothing.

        With a `commit_id` and a `commit_log` that outlive the driver, a driver may die at any point, and another one
        may call this again: a commit that was decided is finished without running the dataset again; one that was not
        decided is discarded and written again; one that is done stays as it is.

        Inside a job (`stagecrew.current_job`) the job gives both: it derives the id from the job, the step and
        `name`, which a step uses once, and keeps the log in its store.

        A commit id belongs to one set of rows. A call with the id of a commit that is already decided writes nothing,
        and logs a warning with the time of that commit and its number of rows. In a job a repeat logs nothing; if an
        earlier run of the job decided the commit with another content, sink or schema, it logs a warning, and the
        rows of that run stay.

        Args:
            dataset: The rows.
            sink: Where to write: a sink of `stagecrew.operators.sinks` (Parquet files, objects with a manifest,
                databases, Iceberg tables) or a `Committer` of your own.
            commit_id: 1 to 200 characters. By default each call is a new commit; errors contain its id.
            commit_log: A `CommitLog`, or the path of a folder for a `FileCommitLog`. By default the session's own
                log, which is in memory.
            name: The operator's name.
            content: Names the set of rows: a date, a snapshot id, or any other text.

        Returns:
            The numbers of rows, parts and bytes that were committed, and whether an earlier call had decided the
            commit.

        Raises:
            CommitFailed: No row is visible, and nothing that was staged is left.
            CommitPending: The commit is decided, but could not be finished yet. Commit with the same id again.
            CommitUnknown: The outcome of a write to the log is unknown. Commit with the same id again.
            RecordUnreadable: Another version of stagecrew wrote the record of this commit.
            OperatorMisused: An argument is wrong; or the commit was decided with another sink, other columns or other
                content. Nullability, order and metadata of columns do not count.
            TopologyError: The topology is not active.
            NotActive: The session has stopped.

        Examples:
            report = topology.commit(flights, ParquetSink(path), commit_id="flights-2013-01-01", commit_log=log_folder)

        A failure of the Spark job is raised unchanged.

        Source: Flink's two-phase commit sinks (FLIP-143). Here the result of Spark's action decides.
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
            raise OperatorMisused(f"commit_id has {len(id_)} characters; use 1 to 200 characters")
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
        """Aligns tasks in event time: a source that is ahead of the slowest one by more than `drift` waits.

        Map datasets with the result: `work(aligner, batches)` calls `aligner.advance(watermark)` as it proceeds. A
        source takes part from its first watermark until it finishes, its task ends, or it is silent for `idle_after`
        seconds.

        Args:
            name: The operator's name, unique in the topology.
            drift: The largest distance to the slowest source. Event times are numbers; or `datetime`s, and `drift` is
                a `timedelta`.
            idle_after: A source that is silent for this many seconds does not hold back others. By default every
                source does.

        Returns:
            The alignment, which maps datasets.

        Raises:
            OperatorMisused: An argument is wrong, or the name is taken.
            TopologyError: The topology is not active.
            NotActive: The session has stopped.

        Examples:
            alignment = topology.align("event-time", drift=3600)
            rows = alignment.map(clicks, read, schema)

        A source that waits for too long gets `OperatorFailed`.

        Not promised: that sources wait for a source whose task has not begun. Give every task a slot, or read the
        sources as splits with `EventTimeSplits`.

        Source: Flink's watermark alignment (FLIP-182).
        """
        from stagecrew.operators.alignment import align

        self._require_active("align sources")
        alignment = align(self, name, drift, idle_after)
        self.operators.name_operator(name)  # last: the name stays free if an argument is refused
        return alignment

    @property
    def progress(self) -> dict[str, dict[str, Any]]:
        """The progress of this topology's coordinators, by operator and use: `{"supersteps/1": {"step": 12}}`.

        It has the names of `progress` in `report.operators`, with the original values. A value that a coordinator
        reports is here at once. A value that `Coordinator.progress` returns is here about a second later, and at the
        end.
        """
        return self.operators.progress()

    def checkpoint(self, checkpoint_id: int | None = None, timeout: float = 30.0) -> Checkpoint:
        """Takes a checkpoint of all coordinators of this topology.

        When it returns, the events that each coordinator sent before its cut are in the mailboxes of its tasks, and
        none that it sent after the cut is. A coordinator's state includes the messages of tasks that it had handled
        by its cut.

        Args:
            checkpoint_id: Must be larger than that of the last checkpoint; by default the next number.
            timeout: The time that all coordinators together may take, in seconds.

        Returns:
            The states. Store them with `Checkpoint.to_bytes`.

        Raises:
            CheckpointFailed: A coordinator declined. All coordinators get `checkpoint_aborted`.
            CheckpointTimeout: A state or an acknowledgement did not arrive in time. All get `checkpoint_aborted`.
            TopologyError: The topology is not active.
            NotActive: The session has stopped.

        Examples:
            saved = topology.checkpoint().to_bytes()

        Not promised: that the cuts of several coordinators are made at one instant.
        """
        self._require_active("take checkpoints")
        return self.operators.checkpoint(checkpoint_id, timeout)

    def reset(self, checkpoint: Checkpoint | None = None) -> None:
        """Replaces all coordinators by new instances, restored or without state. Does not wait for it.

        Each current instance closes first. No evaluation that began before the reset gets a reply or succeeds: its
        attempt fails, and Spark runs the task again.

        Args:
            checkpoint: The states to restore. By default coordinators begin without state.

        Raises:
            TopologyError: The topology is not active.
            NotActive: The session has stopped.

        Examples:
            topology.reset(Checkpoint.from_bytes(saved))
        """
        self._require_active("reset coordinators")
        self.operators.reset(checkpoint)

    def host(self) -> Host:
        """The host of this topology's coordinators."""
        return self._connection.host()

    @property
    def request_timeout(self) -> float:
        """How long tasks wait for a reply of their coordinator, in seconds."""
        return self._connection.request_timeout

    def streaming_query(self) -> QueryCheck | None:
        """Whether the streaming query still runs whose batch the calling thread processes. None in other threads."""
        return self._connection.streaming_query()

    def cancel_failed(self, cause: BaseException) -> None:
        """Starts to cancel the Spark jobs of the topology after a coordinator failed. Does not wait."""

        def cancel() -> None:
            with contextlib.suppress(Exception):  # the session may be stopping, which cancels too
                self._connection.cancel(self.id, f"a coordinator of topology {self.name!r} failed: {cause!r}")

        # In a thread of its own: a call to the JVM must not block the coordinator or hold a lock.
        threading.Thread(target=cancel, name="stagecrew-fail", daemon=True).start()

    def _require_active(self, what: str) -> None:
        if not self.is_active:
            raise TopologyError(f"topology {self.name!r} is {self._state}; {what} only inside its `with`")
        self._connection.require_running()
