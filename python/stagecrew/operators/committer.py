"""The interface of a sink, and the objects that it exchanges with the tasks and the driver."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import pyarrow as pa

from stagecrew.observability.notebook import amount, data_size, field_table, html_table, one_line

__all__ = ["CommitReport", "Committer", "Message", "Staging"]

#: A task's description of the data that it staged, as JSON values. The report adds up `rows` and `bytes`.
Message = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Staging:
    """One run of a commit. Each run stages its data separately from all other runs.

    stagecrew creates these objects and passes them to the methods of a `Committer`. If a driver starts a commit over,
    the new run has the same commit id and another run id.

    Args:
        commit_id: The id of the commit.
        run: The id of the run, 32 hexadecimal digits. Sinks use this id in names of folders and tables.
        schema: The Arrow schema of the dataset.
        mark: A line of at most 400 characters, which the sink stores with the commit's id. It is empty until the commit
            is decided.

    Examples:
        >>> Staging("day-1", "0" * 32, pa.schema([("id", pa.int64())])).mark
        ''
    """

    commit_id: str
    run: str
    schema: pa.Schema
    mark: str = ""


@dataclasses.dataclass(frozen=True, repr=False)
class CommitReport:
    """The outcome of a commit whose rows are visible.

    Args:
        commit_id: The id of the commit.
        parts: The number of tasks that staged rows.
        rows: The number of rows that were committed.
        bytes: The size of the staged data in bytes, as the sink measures it.
        repeated: True if the commit was already decided, by this driver or an earlier one, when the call began.

    Examples:
        >>> CommitReport("day-1", parts=2, rows=100, bytes=2048, repeated=False).rows
        100

    Not promised: values of `parts`, `rows` and `bytes` for a commit that is known only from the sink. They are 0.
    """

    commit_id: str
    parts: int
    rows: int
    bytes: int
    repeated: bool

    def __repr__(self) -> str:
        return one_line(
            "commit",
            self.commit_id,
            (
                amount(self.rows, "row"),
                f"staged by {amount(self.parts, 'task')}",
                data_size(self.bytes),
                "repeated" if self.repeated else "",
            ),
        )

    def _repr_html_(self) -> str:
        return html_table("Commit", *field_table((self,)))


class Committer(Protocol):
    """A sink for `Topology.commit`. It stages rows where no reader sees them, and then makes them all visible at once.

    The sink is pickled to tasks, which call `stage`. The driver calls the other methods, one at a time. Any call may be
    repeated, even by another driver, and an earlier call may have stopped at any point. So each method must work even
    if an earlier call has already done part of its work.

    A sink may have three optional members:

    * `identity`, a text without secrets that says where the sink writes. A commit id that was used with one identity is
      refused with another identity.
    * `in_tasks()`, which returns the object that is pickled to tasks in place of the sink, such as a copy without
      passwords.
    * `stored_mark(commit_id)`, which returns the `Staging.mark` that the sink stored with a visible commit, or None. A
      repeat is compared with this mark if the commit log no longer has the record.

    Examples:
        >>> class Lists:
        ...     staged, visible = {}, {}
        ...     def begin(self, staging):
        ...         self.staged[staging.run] = {}
        ...     def stage(self, staging, partition, attempt, batches):
        ...         rows = [row for batch in batches for row in batch.to_pylist()]
        ...         self.staged[staging.run][attempt] = rows
        ...         return {"attempt": attempt, "rows": len(rows)} if rows else None
        ...     def commit(self, staging, messages):
        ...         staged = self.staged.get(staging.run, {})
        ...         self.visible.setdefault(staging.commit_id, [row for m in messages for row in staged[m["attempt"]]])
        ...     def done(self, commit_id):
        ...         return commit_id in self.visible
        ...     def discard(self, staging, kept):
        ...         self.staged.pop(staging.run, None)
        >>> sink, staging = Lists(), Staging("day-1", "0" * 32, pa.schema([("id", pa.int64())]))
        >>> sink.begin(staging)
        >>> message = sink.stage(staging, 0, 0, iter([pa.record_batch({"id": [7]})]))
        >>> sink.commit(staging, [message])
        >>> sink.visible
        {'day-1': [{'id': 7}]}

    Source: Flink's two-phase sinks (FLIP-143).
    """

    def begin(self, staging: Staging) -> None:
        """Prepares the location where tasks stage their rows.

        Args:
            staging: The run that begins.

        Raises:
            CommitFailed: If a dataset of this schema cannot be committed, or the location cannot be written to.
        """

    def stage(
        self, staging: Staging, partition: int, attempt: int, batches: Iterator[pa.RecordBatch]
    ) -> Message | None:
        """Writes the rows of one task where no reader sees them. Runs in the task.

        Several attempts may write for one partition, even after the driver has stopped waiting for them. Data that is
        written after the run's `discard` must not remain. So after this method has written its data, it must check
        whether the run was discarded, and if so, delete the data.

        Args:
            staging: The run that the task belongs to.
            partition: The number of the partition, from 0.
            attempt: The id of the task attempt, unique in the application.
            batches: The rows of the partition.

        Returns:
            The facts that `commit` needs, or None if the partition has no rows.

        Raises:
            CommitFailed: If the rows cannot be staged. The task then fails, and Spark retries it.
        """

    def commit(self, staging: Staging, messages: Sequence[Message]) -> None:
        """Makes the rows that the messages name visible, all at once, together with the commit's id.

        Does nothing if the id is already visible.

        Args:
            staging: The run that staged the rows.
            messages: The messages of the task attempts that Spark accepted.

        Raises:
            CommitConflict: If the sink can never accept these rows. After that, the same call must not succeed in any
                other driver, even if the other driver has already begun the call.
        """

    def done(self, commit_id: str) -> bool:
        """Returns whether a commit is visible.

        Args:
            commit_id: The id of the commit.

        Returns:
            True if the rows of a commit with this id are visible.

        Raises:
            CommitFailed: If the sink cannot be read.
        """

    def discard(self, staging: Staging, kept: Sequence[Message]) -> None:
        """Ends a run and deletes its staged data, except the data of the kept messages, which is visible.

        Args:
            staging: The run to end.
            kept: The messages whose data must stay. Empty if the run was not committed.
        """
