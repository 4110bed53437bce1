"""The driver's side of a commit, without Spark: staged rows become visible all at once, or not at all."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Final

import pyarrow as pa

from stagecrew.errors import CommitFailed, CommitPending, OperatorMisused
from stagecrew.observability.error_summary import error_text
from stagecrew.operators.commit_log import CommitLog
from stagecrew.operators.commit_records import FORMAT, Known, Record, States, encoded_schema, known_of, read_mark
from stagecrew.operators.commit_rollforward import (
    RollForward,
    delete_earlier_runs,
    discard,
    name_of_sink,
    read_record,
    record_applied,
    report_of,
    staging_of,
)
from stagecrew.operators.committer import CommitReport, Committer, Message, Staging

__all__ = ["abandon", "commit", "resume"]

_log = logging.getLogger("stagecrew")

_REPEATED: Final = (
    "commit %r was already done: it was decided on %s, with %d rows. This call has written nothing. Use another commit "
    "id for other data"
)
_FINISHED_NOW: Final = (
    "commit %r was already decided on %s, with %d rows, and is finished now. This call has written nothing else. Use "
    "another commit id for other data"
)
_REPEATED_UNKNOWN: Final = (
    "commit %r was already done: the sink contains it. Its time, number of rows and content are unknown. This call has "
    "written nothing. Use another commit id for other data"
)
_OTHER_RUN: Final = "an earlier run of this job has decided commit %r, and its rows stay. This run differs: %s"
_NOT_DELETED: Final = (
    "commit %r is aborted, and will never be finished. The sink could not report whether the commit is visible, so the "
    "data staged for %s stays: the folders or the tables with %s in their names. When the sink is available again, "
    "delete them unless the sink contains this commit"
)


def commit(
    sink: Committer,
    commit_log: CommitLog,
    commit_id: str,
    schema: pa.Schema,
    execute: Callable[[Staging], Sequence[Message]],
    wait_for_tasks: Callable[[], None] = lambda: None,
    sleep: Callable[[float], None] = time.sleep,
    *,
    content: str | None = None,
    writer: tuple[str, int] | None = None,
    clock: Callable[[], float] = time.time,
) -> CommitReport:
    """Commits the rows that `execute` stages, once. If the commit is already decided, finishes it without `execute`.

    The `decided` record in the commit log is the decision. Before it is written, a new driver can only abort the
    commit. Afterwards, a new driver can only finish the commit.

    Args:
        sink: Where the rows become visible.
        commit_log: Keeps the record of the commit.
        commit_id: The id of the commit.
        schema: The Arrow schema of the dataset.
        execute: Runs the tasks, and returns the messages of the attempts that Spark accepted.
        wait_for_tasks: Waits until no task is staging rows any more, or until a timeout.
        sleep: Waits between two tries.
        content: The caller's name for the rows. A repeat must pass the same name.
        writer: The id of the job and the number of its run, if a job makes this commit.
        clock: Returns the current time in seconds since the epoch.

    Returns:
        The size of the commit, and whether it is a repeat.

    Raises:
        OperatorMisused: If the id was used for another sink, other columns or another `content`.
        CommitFailed: If nothing was committed.
        CommitPending: If the commit is decided, but could not be applied yet.
        CommitUnknown: If the commit log cannot say whether a record was written.
        RecordUnreadable: If the record is invalid, or another version wrote it in another format.
    """
    if content is not None and not isinstance(content, str):
        raise OperatorMisused(
            f"the content of a commit is a text, such as a date or a snapshot id, not {content!r}: pass a str, or "
            "leave it out"
        )
    call = _Call(sink, commit_log, commit_id, schema, content, writer, sleep)
    stored = read_record(commit_log, commit_id)
    report = None if stored is None else call.repeat_from_record(*stored)
    if report is None and sink.done(commit_id):  # the sink may remember a commit for longer than the log
        report = call.repeat_from_sink(stored)
    return report or call.first_time(stored, execute, wait_for_tasks, clock)


def resume(sink: Committer, commit_log: CommitLog, commit_id: str, sleep: Callable[[float], None] = time.sleep) -> bool:
    """Finishes a commit if it is decided. Needs only the commit's record.

    Returns whether the commit is decided. Raises the same errors as `commit`.
    """
    stored = read_record(commit_log, commit_id)
    if stored is None or stored[1]["state"] not in (States.DECIDED, States.APPLIED):
        return False
    RollForward(sink, commit_log, commit_id, stored, sleep).run()
    return True


def abandon(
    sink: Committer,
    commit_log: CommitLog,
    commit_id: str,
    last: bool = True,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Permanently aborts a commit that is not decided, and deletes its staged data. Raises the errors of `commit`.

    If the sink contains the commit, the record is an old copy. Then the rows stay, and the record becomes applied. If
    the sink cannot report whether it contains the commit, this function raises `CommitPending`, unless this is the
    `last` call, which then aborts the commit and deletes nothing.
    """
    stored = read_record(commit_log, commit_id)
    if stored is None or stored[1]["state"] not in (States.OPEN, States.ABORTED):
        return
    version, record = stored
    is_visible: bool | None = None
    try:
        is_visible = sink.done(commit_id)
    except Exception as error:
        if not last:
            raise CommitPending(
                f"the sink could not report whether commit {commit_id!r} is visible: {error_text(error)}. "
                "This is retried"
            ) from error
        runs = ", ".join([*record["before"], record["run"]])
        _log.warning(_NOT_DELETED, commit_id, name_of_sink(sink), runs, exc_info=True)
    if is_visible:
        commit_log.write(commit_id, _found_in_sink(record, _stored_mark(sink, commit_id)), version)
        return
    if record["state"] == States.OPEN:  # after this write, no driver can decide the commit
        commit_log.write(commit_id, record | {"state": States.ABORTED, "reason": "its job has ended"}, version)
    if is_visible is None:
        return
    delete_earlier_runs(sink, commit_id, record)
    discard(sink, staging_of(commit_id, record), (), sleep)


@dataclasses.dataclass(frozen=True)
class _Call:
    """One call of `commit`: its arguments, and its ways to repeat a commit or to commit for the first time."""

    sink: Committer
    commit_log: CommitLog
    commit_id: str
    schema: pa.Schema
    content: str | None
    writer: tuple[str, int] | None
    sleep: Callable[[float], None]

    def repeat_from_record(self, version: int, record: Record) -> CommitReport | None:
        """Finishes the commit if its record is decided or applied. Otherwise returns None."""
        state = record["state"]
        if record["sink"] != name_of_sink(self.sink):
            self._require_earlier_run(record)
            return report_of(self.commit_id, record)
        is_anonymous = getattr(self.sink, "identity", None) is None
        if state == States.APPLIED and is_anonymous and not self.sink.done(self.commit_id):
            raise OperatorMisused(
                f"commit {self.commit_id!r} is done, but not in this sink: use different commit ids "
                "for different sinks, such as ids that begin with the name of the sink"
            )
        if state not in (States.DECIDED, States.APPLIED):
            return None
        decided = known_of(self.commit_id, record)
        self._require_same_data(decided, record)
        report = RollForward(self.sink, self.commit_log, self.commit_id, (version, record), self.sleep).run()
        self._warn_of_repeat(decided, _FINISHED_NOW if state == States.DECIDED else _REPEATED)
        return report

    def repeat_from_sink(self, stored: tuple[int, Record] | None) -> CommitReport:
        """Returns the report of a commit that the sink contains, although the log has no decision."""
        mark = _stored_mark(self.sink, self.commit_id)
        decided = read_mark(self.commit_id, mark)
        self._require_same_data(decided, None if stored is None else stored[1])
        if stored is not None:  # the record is an old copy, from before the decision
            version, record = stored
            delete_earlier_runs(self.sink, self.commit_id, record)
            record_applied(self.commit_log, self.commit_id, _found_in_sink(record, mark), version)
        self._warn_of_repeat(decided, _REPEATED)
        return CommitReport(self.commit_id, 0, 0, 0, repeated=True)

    def first_time(
        self,
        stored: tuple[int, Record] | None,
        execute: Callable[[Staging], Sequence[Message]],
        wait_for_tasks: Callable[[], None],
        clock: Callable[[], float],
    ) -> CommitReport:
        """Opens the commit, runs the tasks, records the decision, and applies it."""
        staging = Staging(self.commit_id, uuid.uuid4().hex, self.schema)
        opened = self._opened(staging, None if stored is None else stored[1])
        # After this write, no earlier run can decide the commit. A suspended run may still stage data, so this run and
        # each later run delete the data of all earlier runs.
        version = self.commit_log.write(self.commit_id, opened, stored[0] if stored else 0)
        try:
            delete_earlier_runs(self.sink, self.commit_id, opened)
            self.sink.begin(staging)
            messages = list(execute(staging))
            wait_for_tasks()
        except BaseException as error:
            self._abort(staging, opened, version, error, wait_for_tasks)
            raise
        decided = opened | {"state": States.DECIDED, "messages": messages, "time": clock()}
        try:
            version = self.commit_log.write(self.commit_id, decided, version)
        except CommitFailed:  # the decision was not written, so no driver will ever commit this run
            discard(self.sink, staging, (), self.sleep)
            raise
        report = RollForward(self.sink, self.commit_log, self.commit_id, (version, decided), self.sleep).run()
        return dataclasses.replace(report, repeated=False)

    def _opened(self, staging: Staging, earlier: Record | None) -> Record:
        job, attempt = self.writer or (None, None)
        return {
            "format": FORMAT,
            "state": States.OPEN,
            "run": staging.run,
            "before": [*earlier["before"], earlier["run"]] if earlier else [],
            "sink": name_of_sink(self.sink),
            "schema": encoded_schema(self.schema),
            "content": self.content,
            "job": job,
            "attempt": attempt,
        }

    def _abort(
        self,
        staging: Staging,
        opened: Record,
        version: int,
        error: BaseException,
        wait_for_tasks: Callable[[], None],
    ) -> None:
        """Records the abort, then deletes the staged data. Never raises, so that the caller gets the original error."""
        try:
            aborted = opened | {"state": States.ABORTED, "reason": error_text(error)[:1000]}
            self.commit_log.write(self.commit_id, aborted, version)
        except CommitFailed:
            pass  # another driver wrote the record, or no record was written: no driver will commit this run
        except Exception:
            _log.warning(
                "it is unknown whether commit %r is aborted, so the staged data stays. Commit with the same id again "
                "to clean up",
                self.commit_id, exc_info=True,
            )  # fmt: skip
            return
        with contextlib.suppress(Exception):
            wait_for_tasks()
        discard(self.sink, staging, (), self.sleep)

    def _require_earlier_run(self, record: Record) -> None:
        """Raises `OperatorMisused` for a commit to another sink, unless an earlier run of the same job applied it."""
        difference = (
            f"commit {self.commit_id!r} belongs to {record['sink']}, not to {name_of_sink(self.sink)}: use "
            "different commit ids for different sinks, such as ids that begin with the name of the sink"
        )
        is_applied = record["state"] == States.APPLIED and "messages" in record
        if not (self._is_of_earlier_run(record) and is_applied):
            raise OperatorMisused(difference)
        _log.warning(_OTHER_RUN, self.commit_id, difference)

    def _require_same_data(self, decided: Known | None, record: Record | None) -> None:
        """Raises `OperatorMisused` if the commit was decided for other data.

        If an earlier run of the same job decided it, this method only logs a warning, because the decision is valid
        for all runs.
        """
        difference = "" if decided is None else decided.difference(self.schema, self.content)
        if not difference or decided is None:
            return
        text = (
            f"commit {self.commit_id!r} was decided for other data, on {decided.when}, with {decided.rows} rows: "
            f"{difference}. Nothing was written. Use another commit id for other data"
        )
        if record is None or not self._is_of_earlier_run(record):
            raise OperatorMisused(text)
        _log.warning(_OTHER_RUN, self.commit_id, text)

    def _is_of_earlier_run(self, record: Record) -> bool:
        """Whether an earlier run of the same job wrote the record.

        Each run computes its arguments again, and some of them, such as a date, may differ.
        """
        return (
            self.writer is not None
            and record.get("job") == self.writer[0]
            and record.get("attempt") is not None
            and bool(record["attempt"] < self.writer[1])
        )

    def _warn_of_repeat(self, decided: Known | None, text: str) -> None:
        """Logs that this call wrote nothing. Repeats in a job are normal, and are not logged."""
        if self.writer is not None:
            return
        if decided is None:
            _log.warning(_REPEATED_UNKNOWN, self.commit_id)
        else:
            _log.warning(text, self.commit_id, decided.when, decided.rows)


def _stored_mark(sink: Committer, commit_id: str) -> str | None:
    """The mark that the sink stored with a visible commit, if it stores marks."""
    stored_mark = getattr(sink, "stored_mark", None)
    return stored_mark(commit_id) if callable(stored_mark) else None


def _found_in_sink(record: Record, mark: str | None) -> Record:
    """The record of a commit that was found in the sink.

    The run that was committed and its messages are unknown. The sink's mark contains what else is known.
    """
    kept = ("format", "run", "before", "sink", "schema", "job", "attempt")
    return {name: record.get(name) for name in kept} | {"state": States.APPLIED, "mark": mark}
