"""The methods of a topology that create operators, and take and restore checkpoints of their coordinators."""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

from stagecrew.coordination.operators import COMMIT, Operators
from stagecrew.errors import OperatorMisused, TopologyError
from stagecrew.observability.error_summary import error_text
from stagecrew.session.active_topologies import ActiveTopologies, TopologyNode
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

#: The maximum length of the reason for which Spark cancels jobs.
_MAX_TEXT: Final = 1000


class TopologyOperators(TopologyNode):
    """The methods of `Topology` that create operators, and take and restore checkpoints of their coordinators."""

    def __init__(
        self,
        connection: PluginConnection,
        topologies: ActiveTopologies,
        name: str,
        id_: str,
        has_listeners: bool,
        commit_log: CommitLog,
    ) -> None:
        super().__init__(name, id_, has_listeners)
        self._connection, self._topologies = connection, topologies
        #: The commit log for commits without a `commit_log` argument.
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
                f"operator {name!r}: the factory is a {type(factory).__name__}, which cannot be called. Pass a "
                f"Coordinator class, or a function that takes a CoordinatorContext and returns a coordinator"
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
        """Creates a DataFrame whose tasks pull splits one after the other, so a slow split delays only one task.

        The guarantees are those of any Spark source, even if tasks fail or run twice: each subtask has a log of its
        splits, and each evaluation of the subtask replays this log before it requests more splits.

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
            OperatorMisused: An argument is wrong.
            TopologyError: The topology is not active.
            NotActive: The session has stopped.

        Examples:
            rows = topology.splits(range(1000), read_range, "id long")
            rows.write.parquet(path)

        When the enumerator fails, the topology fails: the action raises Spark's own error, and the `with` statement
        raises `CoordinatorFailed`, whose `__cause__` is `OperatorFailed`.

        Not promised: which subtask reads a split, and the order of the rows.

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
                with more partitions than slots, and it refuses dynamic allocation.
            work: Called as `work(steps, batches)`, once for each partition, with a `SuperstepContext` and the
                partition's batches. Yields `pyarrow.RecordBatch`es of `schema`. `steps.reduce(value, op)` combines
                the values of all tasks and returns the result to each of them.
            schema: The schema of the rows that `work` yields.
            name: The operator's name; by default "supersteps".
            stop_when: Called on the driver as `stop_when(step, value)` with the result of each step. After it returns
                True, `steps.stopped` is True in every task.
            timeout: How long a step waits until all tasks have reached it, in seconds.

        Returns:
            The DataFrame. It adds a shuffle, which keeps the rows of a subtask together and in order.

        Raises:
            OperatorMisused: An argument is wrong.
            TopologyError: The topology is not active.
            NotActive: The session has stopped.

        Examples:
            centers = topology.supersteps(points, kmeans, "x double, y double")

        Values are reduced in the order of subtasks. The result equals that of a single process, to the last bit, if
        the reducer is associative or the number of partitions is the same.

        When a task fails, or Spark loses output of the stage, the whole stage runs again from step 0, at most
        `spark.stage.maxConsecutiveAttempts` times. When tasks reduce differently, the topology fails: the action
        raises Spark's own error, and the `with` statement raises `CoordinatorFailed`, whose `__cause__` is
        `OperatorFailed`.

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
        """Writes a DataFrame to a sink: whatever fails, either all of its rows become visible at once, or none.

        Tasks stage their rows where no reader sees them. The commit contains exactly the output of the attempts that
        Spark accepted. Failed, speculative, lost and repeated attempts contribute nothing.

        If the `commit_id` and the `commit_log` outlive the driver, a driver may die at any point, and another driver
        may call this again. If the commit was decided, the new driver finishes it, and does not run the dataset again.
        If the commit was not decided, the new driver discards what was staged and writes the dataset again. If the
        commit is already finished, nothing happens.

        Inside a job (`stagecrew.current_job`) the job provides both: it derives the id from the job, the step and
        `name`, and keeps the log in its store. Each commit in a step needs its own `name`.

        A commit id belongs to one set of rows. A call with the id of a commit that is already decided writes nothing,
        and logs a warning with the time of that commit and its number of rows. In a job this call logs nothing,
        unless an earlier run of the job decided the commit with other content, another sink or another schema: then
        it logs a warning, and the rows of the earlier run stay.

        Args:
            dataset: The rows.
            sink: Where to write: a sink of `stagecrew.operators.sinks` (Parquet files, objects with a manifest,
                databases, Iceberg tables) or a `Committer` of your own.
            commit_id: 1 to 200 characters. By default each call is a new commit; errors contain its id.
            commit_log: A `CommitLog`, or the path of a folder for a `FileCommitLog`. By default the session's own
                log, which is in memory.
            name: The operator's name.
            content: A text that identifies the rows, such as a date or a snapshot id.

        Returns:
            The numbers of rows, parts and bytes that were committed, and whether an earlier call had decided the
            commit.

        Raises:
            CommitFailed: This call committed nothing, and deleted its staged data. After a `CommitSuperseded`,
                another driver continues the commit.
            CommitPending: The commit is decided, but could not be finished yet. Commit with the same id again.
            CommitUnknown: The outcome of a write to the log is unknown. Commit with the same id again.
            RecordUnreadable: Another version of stagecrew wrote the record of this commit.
            OperatorMisused: An argument is wrong; or the commit was decided with another sink, other columns or other
                content. The nullability, order and metadata of columns are not compared.
            TopologyError: The topology is not active.
            NotActive: The session has stopped.

        Examples:
            report = topology.commit(flights, ParquetSink(path), commit_id="flights-2013-01-01", commit_log=log_folder)

        If the Spark job fails, its error is raised unchanged.

        Source: Flink's two-phase commit sinks (FLIP-143). Here the commit is decided by the result of Spark's action.
        """
        from stagecrew.operators.commit_log import commit_log_of
        from stagecrew.operators.commit_operator import commit_dataset

        self._require_active("commit datasets")
        job = running_job()
        if job is not None:
            commit_id = job.commit_id(name) if commit_id is None else commit_id
            commit_log = job.commit_log(sink) if commit_log is None else commit_log
        id_ = uuid.uuid4().hex if commit_id is None else commit_id
        if not isinstance(id_, str):
            raise OperatorMisused(f"commit_id must be a text, not {type(id_).__name__}: pass str(...)")
        if not id_ or len(id_) > 200:
            raise OperatorMisused(f"commit_id has {len(id_)} characters; use 1 to 200 characters")
        with self._topologies.describing(name):
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

        Map datasets with the result. The mapped function, `work(aligner, batches)`, calls
        `aligner.advance(watermark)` as it proceeds. A source takes part from its first watermark until it finishes,
        its task ends, or it is silent for `idle_after` seconds.

        Args:
            name: The operator's name, unique in the topology.
            drift: The largest distance to the slowest source: a number if event times are numbers, or a `timedelta` if
                they are `datetime`s.
            idle_after: A source that is silent for this many seconds no longer holds back others. By default a silent
                source holds back others forever.

        Returns:
            The alignment, which maps datasets.

        Raises:
            OperatorMisused: An argument is wrong, or the name is taken.
            TopologyError: The topology is not active.
            NotActive: The session has stopped.

        Examples:
            alignment = topology.align("event-time", drift=3600)
            rows = alignment.map(clicks, read, schema)

        If `advance` waits for longer than its timeout, it raises `OperatorFailed`.

        Not promised: that sources wait for a source whose task has not begun. Give every task a slot, or read the
        sources as splits with `EventTimeSplits`.

        Source: Flink's watermark alignment (FLIP-182).
        """
        from stagecrew.operators.alignment import align

        self._require_active("align sources")
        alignment = align(self, name, drift, idle_after)
        self.operators.name_operator(name)  # last, so that a refused argument does not use up the name
        return alignment

    @property
    def progress(self) -> dict[str, dict[str, Any]]:
        """The progress of this topology's coordinators, by operator and use: `{"supersteps/1": {"step": 12}}`.

        The names are those of `progress` in `report.operators`, and the values are the coordinators' original objects.
        A value that a coordinator passes to `context.report` is included at once. A value that `Coordinator.progress`
        returns is included about a second later, and when the coordinator ends.
        """
        return self.operators.progress()

    def checkpoint(self, checkpoint_id: int | None = None, timeout: float = 30.0) -> Checkpoint:
        """Takes a checkpoint of all coordinators of this topology.

        The *cut* of a coordinator is the moment when its `checkpoint` method, or the future that this method returned,
        delivers the state. The state includes the messages that the coordinator handled before its cut. When this
        method returns, the mailboxes of the tasks contain all events that were sent before the cut, and none that were
        sent after it.

        Args:
            checkpoint_id: Must be larger than that of the last checkpoint; by default the next number.
            timeout: The time that all coordinators together may take, in seconds.

        Returns:
            The states. Store them with `Checkpoint.to_bytes`.

        Raises:
            CheckpointFailed: The id is not larger than the last one, or a coordinator declined, returned an invalid
                state or was reset. The coordinators that were asked get `checkpoint_aborted`.
            CheckpointTimeout: A state or an acknowledgement did not arrive in time. All get `checkpoint_aborted`.
            CoordinatorFailed: A coordinator has failed.
            TopologyError: The topology is not active.
            NotActive: The session has stopped.

        Examples:
            saved = topology.checkpoint().to_bytes()

        Not promised: that the cuts of several coordinators are made at the same instant.
        """
        self._require_active("take checkpoints")
        return self.operators.checkpoint(checkpoint_id, timeout)

    def reset(self, checkpoint: Checkpoint | None = None) -> None:
        """Replaces all coordinators with new instances, which are restored or have no state.

        It does not wait until they have started. If tasks are reading splits, it waits up to 2 s for them to end.
        Each current instance closes first. An evaluation that began before the reset gets no more replies and cannot
        succeed: its attempt fails, and Spark runs the task again.

        Not promised: that an action that is running stays correct. Spark keeps the results of tasks that have finished,
        although their coordinators were reset. So reset between actions. While tasks read splits, a reset fails the
        topology.

        Args:
            checkpoint: The states to restore. By default the new coordinators have no state.

        Raises:
            CoordinatorFailed: A coordinator has failed.
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
        """How long tasks wait for a reply from their coordinator, in seconds."""
        return self._connection.request_timeout

    def streaming_query(self) -> QueryCheck | None:
        """Returns a function that checks whether the streaming query that called this thread is still running.

        Returns None in a thread that no streaming query called.
        """
        return self._connection.streaming_query()

    def cancel_failed(self, cause: BaseException) -> None:
        """Cancels the Spark jobs of the topology after a coordinator failed, without waiting."""

        def cancel() -> None:
            with contextlib.suppress(Exception):  # the session may be stopping, which also cancels the jobs
                text = error_text(cause)[:_MAX_TEXT]
                self._connection.cancel(self.id, f"a coordinator of topology {self.name!r} failed: {text}")

        # In its own thread, because a call to the JVM must not block the coordinator or hold a lock.
        threading.Thread(target=cancel, name="stagecrew-fail", daemon=True).start()

    def _require_active(self, what: str) -> None:
        if not self.is_active:
            raise TopologyError(f"topology {self.name!r} is {self._state}; {what} only inside its `with` statement")
        self._connection.require_running()
