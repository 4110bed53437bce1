"""Applies decided commits, and deletes staged data.

Both are retried, and another driver may repeat both.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from tenacity import Retrying, retry_if_result, stop_after_attempt, stop_after_delay, wait_exponential

from stagecrew.errors import (
    CommitConflict,
    CommitFailed,
    CommitPending,
    CommitSuperseded,
    CommitUnknown,
    RecordUnreadable,
)
from stagecrew.observability.error_summary import error_text
from stagecrew.operators.commit_log import CommitLog
from stagecrew.operators.commit_records import Record, States, checked, mark_of, schema_of
from stagecrew.operators.committer import CommitReport, Committer, Message, Staging

__all__ = [
    "RollForward",
    "delete_earlier_runs",
    "discard",
    "name_of_sink",
    "read_record",
    "record_applied",
    "report_of",
    "staging_of",
]

_log = logging.getLogger("stagecrew")

#: How many times the driver tries to apply a commit, or to delete staged data.
_TRIES: Final = 4
#: The pause before the second try, in seconds. It doubles before each further try.
_PAUSE: Final = 0.2
#: A deletion is not retried after this many seconds, so that an unreachable host delays the caller only once.
_RETRY_LIMIT: Final = 10.0

_LEFTOVER: Final = (
    "commit %r is done, but some of the data that it has staged for %s could not be deleted (run %s). A repeat with "
    "the same id deletes this data"
)
_ORPHANS: Final = (
    "the data that commit %r has staged for %s could not be deleted. It is never committed, and stays in the folders "
    "or the table with %s in their names. A repeat with the same id deletes them. Without a repeat, delete them when "
    "the sink is available again"
)


def read_record(commit_log: CommitLog, commit_id: str) -> tuple[int, Record] | None:
    """Returns the version and the record of a commit, or None if there is no record.

    Raises `RecordUnreadable` if this version of stagecrew cannot read the record.
    """
    stored = commit_log.read(commit_id)
    return None if stored is None else (stored[0], checked(commit_id, stored[1]))


class RollForward:
    """Applies one decided commit, and cleans up. Needs only the commit's record.

    Several drivers may do this at the same time, because the sink's conditional write makes the commit visible only
    once.
    """

    def __init__(
        self,
        sink: Committer,
        commit_log: CommitLog,
        commit_id: str,
        stored: tuple[int, Record],
        sleep: Callable[[float], None],
    ) -> None:
        self._sink, self._commit_log, self._commit_id, self._sleep = sink, commit_log, commit_id, sleep
        self._version, self._record = stored
        self._staging = staging_of(commit_id, self._record)

    def run(self) -> CommitReport:
        """Applies the commit, unless it is already applied, and deletes the other staged data."""
        delete_earlier_runs(self._sink, self._commit_id, self._record)
        if "messages" not in self._record:  # the commit was found in the sink, so its staged data is unknown
            return CommitReport(self._commit_id, 0, 0, 0, repeated=True)
        is_applied = self._record["state"] == States.APPLIED
        if not is_applied:
            self._apply()
        discard(self._sink, self._staging, self._record["messages"], self._sleep)
        if not is_applied:
            record_applied(self._commit_log, self._commit_id, self._record | {"state": States.APPLIED}, self._version)
        return report_of(self._commit_id, self._record)

    def _apply(self) -> None:
        numbers = itertools.count(1)
        Retrying(
            retry=retry_if_result(lambda applied: not applied),
            wait=wait_exponential(multiplier=_PAUSE),
            sleep=self._sleep,
        )(lambda: self._try_to_apply(is_last=next(numbers) == _TRIES))

    def _try_to_apply(self, is_last: bool) -> bool:
        """Tries once. Returns whether the commit is applied. Raises if it must not be tried again."""
        try:
            self._sink.commit(self._staging, self._record["messages"])
        except CommitConflict as conflict:
            if not self._is_visible():
                self._refuse(conflict)
                raise
        except RecordUnreadable:
            raise  # a retry would read the same record
        except Exception as error:
            self._check_other_drivers(error, is_last)
            _log.warning(
                "commit %r is decided but could not be applied, and is retried: %s: %s",
                self._commit_id,
                type(error).__name__,
                error,
            )
            return False
        return True

    def _is_visible(self) -> bool:
        try:
            return self._sink.done(self._commit_id)
        except CommitFailed as error:  # the commit is decided, so it has not failed
            raise CommitPending(
                f"commit {self._commit_id!r} is decided, but the sink could not report whether it is visible: {error}. "
                f"{_COMMIT_AGAIN}"
            ) from error

    def _refuse(self, conflict: CommitConflict) -> None:
        """Records that the sink refuses the rows for good, and then deletes them."""
        if not self._is_refused():
            try:
                self._record_refusal(conflict)
            except CommitSuperseded as superseded:
                # Either another driver wrote the record first, or this driver lost its session. In the second case, the
                # commit is still decided, and the next driver needs all staged data.
                if not self._is_ended():
                    raise self._pending_refusal(conflict, superseded) from conflict
                discard(self._sink, self._staging, self._record["messages"], self._sleep)
                raise
        discard(self._sink, self._staging, (), self._sleep)

    def _record_refusal(self, conflict: CommitConflict) -> None:
        refused = self._record | {"state": States.REFUSED, "reason": str(conflict)[:1000]}
        try:
            self._commit_log.write(self._commit_id, refused, self._version)
        except CommitSuperseded:
            raise
        except CommitFailed as unwritten:
            raise self._pending_refusal(conflict, unwritten) from conflict

    def _pending_refusal(self, conflict: CommitConflict, unwritten: CommitFailed) -> CommitPending:
        return CommitPending(
            f"commit {self._commit_id!r} is decided, and the sink refuses it: {conflict}. The refusal could not be "
            f"recorded: {unwritten}. The staged data stays. {_COMMIT_AGAIN}"
        )

    def _check_other_drivers(self, error: Exception, is_last: bool) -> None:
        """Raises `CommitSuperseded` if another driver had the commit refused. After the last try, always raises.

        The error is then `CommitSuperseded` if another driver ended the commit, and `CommitPending` otherwise.
        """
        if self._is_refused():
            discard(self._sink, self._staging, (), self._sleep)  # this try may have staged data again
            raise CommitSuperseded(
                f"another driver has tried to apply commit {self._commit_id!r}, and the sink refused it. The staged "
                "data is deleted. This driver changed nothing. Commit with this id again to start over"
            ) from error
        if not is_last:
            return
        if self._is_ended():
            discard(self._sink, self._staging, self._record["messages"], self._sleep)
            raise CommitSuperseded(
                f"another driver has ended commit {self._commit_id!r}, and this one changed nothing: "
                f"{error_text(error)}"
            ) from error
        raise CommitPending(
            f"commit {self._commit_id!r} is decided, but could not be applied: {error_text(error)}. The "
            f"staged data stays. {_COMMIT_AGAIN}"
        ) from error

    def _is_refused(self) -> bool:
        """Whether the current record says that the data of this run will never be committed."""
        stored = self._stored()
        return stored is not None and (stored[1]["run"] != self._staging.run or stored[1]["state"] == States.REFUSED)

    def _is_ended(self) -> bool:
        """Whether another driver ended the commit, as every record after the decision does."""
        stored = self._stored()
        return stored is not None and stored[0] != self._version

    def _stored(self) -> tuple[int, Record] | None:
        """Reads the current record. Returns None if it cannot be read."""
        try:
            return read_record(self._commit_log, self._commit_id)
        except (CommitFailed, CommitUnknown, RecordUnreadable):
            return None


_COMMIT_AGAIN: Final = "Commit with the same id and the same commit log again to finish it"


def record_applied(commit_log: CommitLog, commit_id: str, record: Record, version: int) -> None:
    """Records that a commit is visible. A failure is only logged, because a repeat finds the commit in the sink."""
    try:
        commit_log.write(commit_id, record, version)
    except CommitSuperseded:
        pass  # another driver has recorded this
    except (CommitFailed, CommitUnknown):
        _log.warning(
            "commit %r is done, but its record could not be updated. A repeat finds the commit in the sink",
            commit_id,
            exc_info=True,
        )


def delete_earlier_runs(sink: Committer, commit_id: str, record: Record) -> None:
    """Deletes the staged data of earlier runs.

    Does not retry, because each repeat of the commit tries again, and because the caller's next call fails anyway if
    the sink is unavailable.
    """
    for run in record["before"]:
        discard(sink, Staging(commit_id, run, schema_of(record)), (), None)


def discard(sink: Committer, staging: Staging, kept: Sequence[Message], sleep: Callable[[float], None] | None) -> None:
    """Deletes the staged data of a run, with retries if `sleep` is given.

    Logs a warning for data that it could not delete.
    """
    retrying = Retrying(
        stop=stop_after_attempt(_TRIES if sleep else 1) | stop_after_delay(_RETRY_LIMIT),
        wait=wait_exponential(multiplier=_PAUSE),
        sleep=sleep or time.sleep,
        reraise=True,
    )
    try:
        retrying(sink.discard, staging, kept)
    except Exception:
        text = _LEFTOVER if kept else _ORPHANS
        _log.warning(text, staging.commit_id, name_of_sink(sink), staging.run, exc_info=True)


def report_of(commit_id: str, record: Record) -> CommitReport:
    """The report of a commit whose record has messages."""
    messages = record["messages"]
    rows, size = (sum(message.get(name, 0) for message in messages) for name in ("rows", "bytes"))
    return CommitReport(commit_id, len(messages), rows, size, repeated=True)


def staging_of(commit_id: str, record: Record) -> Staging:
    """The `Staging` of the run in a record, with the mark if the commit is decided."""
    mark = mark_of(record) if record.get("messages") is not None else ""
    return Staging(commit_id, record["run"], schema_of(record), mark)


def name_of_sink(sink: Committer) -> str:
    """The class and location of a sink, without secrets."""
    return str(getattr(sink, "identity", sink.__class__.__qualname__))
