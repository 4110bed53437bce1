"""How a decided commit is applied, and how staged data is deleted.

Both are retried, and both may be repeated by another driver.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from stagecrew.errors import (
    CommitConflict,
    CommitFailed,
    CommitPending,
    CommitSuperseded,
    CommitUnknown,
    RecordUnreadable,
)
from stagecrew.operators.commit_log import CommitLog
from stagecrew.operators.commit_records import Record, States, checked, mark_of, schema_of
from stagecrew.operators.committer import CommitReport, Committer, Message, Staging

__all__ = [
    "RollForward",
    "delete_earlier_runs",
    "discard",
    "named",
    "read_record",
    "record_applied",
    "report_of",
    "staging_of",
]

_log = logging.getLogger("stagecrew")

#: How often a commit is applied, or staged data deleted, before the driver gives up.
_TRIES: Final = 4
#: The seconds before the second try. The pause doubles before each further try.
_PAUSE: Final = 0.2
#: A deletion that took longer than this many seconds is not retried, so that a vanished host delays the caller only
#: once.
_BRIEF: Final = 10.0

_LEFTOVER: Final = (
    "commit %r has staged for %s more than was committed, and the rest of run %s could not be deleted. A repeat with "
    "its id deletes it"
)
_ORPHANS: Final = (
    "what commit %r has staged for %s could not be deleted. It stays in the folders or the table with %s in their "
    "names, and is never committed. A repeat with the same id deletes it; if there will be no repeat, delete them when "
    "the sink is back"
)


def read_record(commit_log: CommitLog, commit_id: str) -> tuple[int, Record] | None:
    """The version and the record of a commit, or None.

    Raises `RecordUnreadable` for a record that this version may not use.
    """
    stored = commit_log.read(commit_id)
    return None if stored is None else (stored[0], checked(commit_id, stored[1]))


class RollForward:
    """Applies one decided commit from its record alone, and cleans up.

    Any number of drivers may do this at the same time. The sink's own conditional write makes the commit visible once.
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
        if "messages" not in self._record:  # found visible in the sink: nobody knows which staged data belongs to it
            return CommitReport(self._commit_id, 0, 0, 0, repeated=True)
        is_applied = self._record["state"] == States.APPLIED
        if not is_applied:
            self._apply()
        discard(self._sink, self._staging, self._record["messages"], self._sleep)
        if not is_applied:
            record_applied(self._commit_log, self._commit_id, self._record | {"state": States.APPLIED}, self._version)
        return report_of(self._commit_id, self._record)

    def _apply(self) -> None:
        pause = _PAUSE
        for number in range(1, _TRIES + 1):
            try:
                self._sink.commit(self._staging, self._record["messages"])
                return
            except CommitConflict as conflict:
                if self._is_visible():
                    return
                self._refuse(conflict)
                raise
            except RecordUnreadable:
                raise  # a retry would read the same
            except Exception as error:
                self._check_other_drivers(error, is_last=number == _TRIES)
                _log.warning(
                    "commit %r is decided and will be tried again: %s: %s", self._commit_id, type(error).__name__, error
                )
                self._sleep(pause)
                pause *= 2

    def _is_visible(self) -> bool:
        try:
            return self._sink.done(self._commit_id)
        except CommitFailed as error:  # the commit is decided, so an unreadable sink does not mean that it failed
            raise CommitPending(
                f"commit {self._commit_id!r} is decided, and the sink does not say whether it is done: {error}. "
                f"{_COMMIT_AGAIN}"
            ) from error

    def _refuse(self, conflict: CommitConflict) -> None:
        """Records that the sink can never take the rows, then deletes them. Returns when both are done."""
        if not self._is_refused():
            try:
                self._record_refusal(conflict)
            except CommitSuperseded as superseded:
                # Another driver wrote first, or this one lost its session. In the second case the commit is still
                # decided, and the next driver needs all staged data.
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
        """Raises `CommitSuperseded` if another driver ended the commit, and `CommitPending` after the last try."""
        if self._is_refused():
            discard(self._sink, self._staging, (), self._sleep)  # this try may have recreated something
            raise CommitSuperseded(
                f"the sink refused commit {self._commit_id!r} to another driver meanwhile, and the staged data is "
                "deleted. This driver changed nothing. Commit with this id again to start over"
            ) from error
        if not is_last:
            return
        if self._is_ended():
            discard(self._sink, self._staging, self._record["messages"], self._sleep)
            raise CommitSuperseded(
                f"another driver has ended commit {self._commit_id!r} meanwhile, and this one changed nothing: "
                f"{type(error).__name__}: {error}"
            ) from error
        raise CommitPending(
            f"commit {self._commit_id!r} is decided, but could not be done: {type(error).__name__}: {error}. The "
            f"staged data stays. {_COMMIT_AGAIN}"
        ) from error

    def _is_refused(self) -> bool:
        """Whether a record says that the data of this run will never be committed."""
        stored = self._stored()
        return stored is not None and (stored[1]["run"] != self._staging.run or stored[1]["state"] == States.REFUSED)

    def _is_ended(self) -> bool:
        """Whether another driver wrote a later record: after the decision, every later record ends the commit."""
        stored = self._stored()
        return stored is not None and stored[0] != self._version

    def _stored(self) -> tuple[int, Record] | None:
        """The record now, or None if it cannot be read."""
        try:
            return read_record(self._commit_log, self._commit_id)
        except (CommitFailed, CommitUnknown, RecordUnreadable):
            return None


_COMMIT_AGAIN: Final = "Commit with the same id and the same commit log again to finish it"


def record_applied(commit_log: CommitLog, commit_id: str, record: Record, version: int) -> None:
    """Records that a commit is visible. A failed write is logged only: a repeat finds the commit in the sink."""
    try:
        commit_log.write(commit_id, record, version)
    except CommitSuperseded:
        pass  # another driver recorded it
    except (CommitFailed, CommitUnknown):
        _log.warning(
            "commit %r is done, but its record could not be updated; a repeat finds out", commit_id, exc_info=True
        )


def delete_earlier_runs(sink: Committer, commit_id: str, record: Record) -> None:
    """Deletes what earlier runs left.

    Tries once: every repeat tries again, and the caller notices if the sink is unavailable.
    """
    for run in record["before"]:
        discard(sink, Staging(commit_id, run, schema_of(record)), (), None)


def discard(sink: Committer, staging: Staging, kept: Sequence[Message], sleep: Callable[[float], None] | None) -> None:
    """Deletes the staged data of a run, with retries if `sleep` is given.

    Logs a warning for data that it could not delete.
    """
    pause, due = _PAUSE, time.monotonic() + _BRIEF
    for tries_left in reversed(range(_TRIES if sleep else 1)):
        try:
            sink.discard(staging, kept)
            return
        except Exception:
            if sleep is None or not tries_left or time.monotonic() > due:
                text = _LEFTOVER if kept else _ORPHANS
                _log.warning(text, staging.commit_id, named(sink), staging.run, exc_info=True)
                return
        sleep(pause)
        pause *= 2


def report_of(commit_id: str, record: Record) -> CommitReport:
    """The report of a commit whose record has messages."""
    messages = record["messages"]
    rows, size = (sum(message.get(name, 0) for message in messages) for name in ("rows", "bytes"))
    return CommitReport(commit_id, len(messages), rows, size, repeated=True)


def staging_of(commit_id: str, record: Record) -> Staging:
    """The run that a record names, with the mark if the commit is decided."""
    mark = mark_of(record) if record.get("messages") is not None else ""
    return Staging(commit_id, record["run"], schema_of(record), mark)


def named(sink: Committer) -> str:
    """The sink's class and place, without secrets."""
    return str(getattr(sink, "identity", sink.__class__.__qualname__))
