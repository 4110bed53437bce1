"""The records of a job's commits, in the coordination store: written under the job's claim, and finished by whoever comes next."""

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
    HandleExists,
    HandleMissing,
    LeadershipLost,
    PossiblyInconsistentError,
    RecoveryError,
    SessionLost,
    StoreConflict,
)
from stagecrew.operators.commit_log import OVER
from stagecrew.operators.commit_records import checked
from stagecrew.operators.commits import abandon, resume
from stagecrew.recovery.writes import passes, pause, retry_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stagecrew.operators.commit_records import Record
    from stagecrew.operators.committer import Committer
    from stagecrew.recovery.handles import StateHandleStore

__all__ = ["StoredCommitLog", "finish_commits", "is_over", "require_readable"]

_log = logging.getLogger("stagecrew")


class StoredCommitLog:
    """`CommitLog` in a state handle store. With each record lies its sink: recovery goes forward from the record alone.

    A sink is pickled: its passwords lie in the state storage, for the user of the drivers alone to read. A write waits `patience`
    seconds for a storage and a store that are away or full.
    """

    def __init__(self, handles: StateHandleStore, sink: Committer, patience: float = 0.0) -> None:
        self._handles, self._sink, self._patience = handles, sink, patience

    def read(self, key: str) -> tuple[int, Record] | None:
        """See `CommitLog`."""
        try:
            state = self._handles.get(key)
        except HandleMissing:
            return None
        except RecoveryError as error:
            raise CommitUnknown(f"what was decided about commit {key!r} cannot be read: {error}") from error
        return state.version + 1, json.loads(state.data)["record"]

    def write(self, key: str, record: Record, version: int) -> int:
        """See `CommitLog`."""
        from pyspark import cloudpickle

        pickled = cloudpickle.dumps(self._sink)  # type: ignore[no-untyped-call]
        state = self._handles.prepare(
            json.dumps({"record": record, "sink": base64.b64encode(pickled).decode()}).encode()
        )
        waits = f"commit {key!r} waits for its record to be stored"
        try:
            if version == 0:
                retry_until(lambda: self._handles.add(key, state), waits, self._patience)
            else:
                retry_until(lambda: self._handles.replace(key, version - 1, state), waits, self._patience)
        except (HandleExists, HandleMissing, StoreConflict, LeadershipLost, SessionLost) as error:
            # None of its tries was done: where one may have been, this is a PossiblyInconsistentError.
            known = self.read(key) if isinstance(error, HandleExists | StoreConflict) else None
            if known == (version + 1, record):
                return version + 1  # our own write, whose outcome was not known
            raise CommitSuperseded(
                f"commit {key!r} is another driver's meanwhile: that one goes on, this one changes nothing ({error})"
            ) from error
        except PossiblyInconsistentError as error:
            raise CommitUnknown(f"whether the record of commit {key!r} was written is not known: {error}") from error
        except RecoveryError as error:
            raise CommitUnknown(f"the record of commit {key!r} was not written: {error}") from error
        return version + 1


def is_over(handles: StateHandleStore, name: str) -> bool:
    """Whether nothing is left to do for a commit. Raises `CommitUnreadable`."""
    return _stored(name, handles.get(name).data)[0]["state"] in OVER


def require_readable(name: str, data: bytes) -> None:
    """Raises `CommitUnreadable` when these bytes are no record of a commit that this version may use."""
    _stored(name, data)


def _stored(name: str, data: bytes) -> tuple[Record, str]:
    """The record of a commit, and its sink, still pickled."""
    stored: dict[str, Any] = json.loads(data)
    return checked(name, stored.get("record")), stored["sink"]


def finish_commits(handles: StateHandleStore, ending: bool, patience: float = 0.0) -> None:
    """Goes forward with every commit of a job that is decided, from its record alone. `ending`: what is not decided is aborted.

    Waits `patience` seconds for sinks, a storage and a store that are away or full. Raises `CommitPending` and what else a commit raises that
    could not be done; the others are done first.
    """
    due = time.monotonic() + patience
    while True:
        last = time.monotonic() >= due  # of each round; the last one gives up what cannot be asked for
        failed = list(_not_finished(handles, ending, due, last))
        if not failed:
            return
        if last or not all(map(passes, failed)):
            raise failed[0]
        pause()


def _not_finished(handles: StateHandleStore, ending: bool, due: float, last: bool) -> Iterator[Exception]:
    for name in retry_until(handles.names, "a run waits for what its job has decided", due - time.monotonic()):
        try:
            _finish(handles, name, ending, due, last)
        except CommitConflict as error:
            _log.warning("commit %r, which was decided, can never be done: %s", name, error)
        except Exception as error:
            _log.warning("commit %r could not be finished: %s: %s", name, type(error).__name__, error)
            yield error


def _finish(handles: StateHandleStore, name: str, ending: bool, due: float, last: bool) -> None:
    _, pickled = _stored(name, handles.get(name).data)
    sink = pickle.loads(base64.b64decode(pickled))
    commit_log = StoredCommitLog(handles, sink, due - time.monotonic())
    if not resume(sink, commit_log, name) and ending:
        abandon(sink, commit_log, name, last)
