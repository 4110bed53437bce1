"""The commit log of a job in the coordination store. A run writes it under its claim, and a later run can finish it."""

from __future__ import annotations

import base64
import json
import logging
import pickle
import time
from typing import TYPE_CHECKING, Any

from stagecrew.errors import (
    CommitConflict,
    CommitSuperseded,
    CommitUnknown,
    LeadershipLost,
    PossiblyInconsistentError,
    RecordUnreadable,
    RecoveryError,
    SessionLost,
    StoreConflict,
)
from stagecrew.observability.error_summary import error_text
from stagecrew.operators.commit_log import ENDED_STATES
from stagecrew.operators.commit_records import States, checked
from stagecrew.operators.commits import abandon, resume
from stagecrew.recovery.retry import retry_rounds, retry_until
from stagecrew.recovery.state.handles import HandleExists, HandleMissing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stagecrew.operators.commit_records import Record
    from stagecrew.operators.committer import Committer
    from stagecrew.recovery.state.handles import StateHandleStore

__all__ = ["StoredCommitLog", "finish_commits", "is_done", "require_readable"]

_log = logging.getLogger("stagecrew")


class StoredCommitLog:
    """A `CommitLog` in state handles. It stores the sink with each record, so that recovery needs only the record.

    The pickled sink can contain passwords. It is in the state storage, which only the drivers' user should be able to
    read. A write retries for `retry_timeout` seconds while the storage or the store is unavailable or full.
    """

    def __init__(self, handles: StateHandleStore, sink: Committer, retry_timeout: float = 0.0) -> None:
        self._handles, self._sink, self._retry_timeout = handles, sink, retry_timeout

    def read(self, key: str) -> tuple[int, Record] | None:
        """See `CommitLog`."""
        try:
            state = self._handles.get(key)
        except HandleMissing:
            return None
        except RecoveryError as error:
            raise CommitUnknown(f"the record of commit {key!r} cannot be read: {error}") from error
        return state.version + 1, _parse(key, state.data)[0]

    def write(self, key: str, record: Record, version: int) -> int:
        """See `CommitLog`."""
        from pyspark import cloudpickle

        pickled = cloudpickle.dumps(self._sink)  # type: ignore[no-untyped-call]
        state = self._handles.prepare(
            json.dumps({"record": record, "sink": base64.b64encode(pickled).decode()}).encode()
        )
        description = f"commit {key!r} waits for its record to be stored"
        try:
            if version == 0:
                retry_until(lambda: self._handles.add(key, state), description, self._retry_timeout)
            else:
                retry_until(lambda: self._handles.replace(key, version - 1, state), description, self._retry_timeout)
        except (HandleExists, HandleMissing, StoreConflict, LeadershipLost, SessionLost) as error:
            # No try was applied; otherwise the error would be a PossiblyInconsistentError.
            current = self.read(key) if isinstance(error, HandleExists | StoreConflict) else None
            if current == (version + 1, record):
                return version + 1  # this driver's earlier write, whose outcome was unknown
            raise CommitSuperseded(
                f"this driver can no longer write the record of commit {key!r}, and changes nothing ({error}). Another "
                "driver has taken over the commit, or will"
            ) from error
        except PossiblyInconsistentError as error:
            raise CommitUnknown(f"it is unknown whether the record of commit {key!r} was written: {error}") from error
        except RecoveryError as error:
            raise CommitUnknown(f"the record of commit {key!r} was not written: {error}") from error
        return version + 1


def is_done(handles: StateHandleStore, name: str) -> bool:
    """Returns whether a commit has ended. Raises `RecordUnreadable`."""
    return _decode(name, handles.get(name).data)[0]["state"] in ENDED_STATES


def require_readable(name: str, data: bytes) -> None:
    """Raises `RecordUnreadable` unless these bytes are a record of a commit that this version can use."""
    _decode(name, data)


def _decode(name: str, data: bytes) -> tuple[Record, str]:
    """Returns the record of a commit, and its encoded sink."""
    record, pickled = _parse(name, data)
    return checked(name, record), pickled


def _parse(name: str, data: bytes) -> tuple[Any, str]:
    """Returns the record of a commit, without checking it, and its encoded sink. Raises `RecordUnreadable`."""
    try:
        stored = json.loads(data)
        return stored["record"], stored["sink"]
    except (ValueError, KeyError, TypeError) as error:
        raise RecordUnreadable(
            f"the record of commit {name!r} is damaged ({error_text(error)}): restore the state storage from a backup"
        ) from error


def finish_commits(handles: StateHandleStore, ending: bool, retry_timeout: float = 0.0) -> None:
    """Finishes every decided commit of a job from its record. If the job is ending, aborts the undecided ones.

    Retries for `retry_timeout` seconds while sinks, the storage or the store are unavailable or full. If a commit could
    not be finished, the others are finished first; then this raises the first error, such as `CommitPending`.
    """
    deadline = time.monotonic() + retry_timeout
    warned: set[str] = set()
    retry_rounds(lambda last: list(_finish_all(handles, ending, deadline, last, warned)), retry_timeout)


def _finish_all(
    handles: StateHandleStore, ending: bool, deadline: float, last: bool, warned: set[str]
) -> Iterator[Exception]:
    remaining = deadline - time.monotonic()
    for name in retry_until(handles.names, "a run waits for the list of its job's commits", remaining):
        try:
            _finish(handles, name, ending, deadline, last, warned)
        except CommitConflict as error:
            _log.warning("commit %r was decided, but can never be finished: %s", name, error)
        except Exception as error:
            _log.warning("commit %r could not be finished: %s", name, error_text(error))
            yield error


def _finish(handles: StateHandleStore, name: str, ending: bool, deadline: float, last: bool, warned: set[str]) -> None:
    """Finishes one commit. In the last round, an undecided commit is aborted even if its sink does not respond."""
    record, pickled = _decode(name, handles.get(name).data)
    try:
        sink = pickle.loads(base64.b64decode(pickled))
    except Exception:
        if record["state"] in (States.OPEN, States.DECIDED):
            raise
        if name not in warned:
            warned.add(name)
            _log.warning(
                "commit %r has ended, but its sink cannot be unpickled to delete staged rows", name, exc_info=True
            )
        return
    commit_log = StoredCommitLog(handles, sink, deadline - time.monotonic())
    if not resume(sink, commit_log, name) and ending:
        abandon(sink, commit_log, name, last)
