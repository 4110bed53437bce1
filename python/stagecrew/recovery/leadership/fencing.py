"""Terms and fences: the keys of leadership, and a store whose transactions are applied only in the current term."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import os
import socket
import uuid
from typing import Final

from stagecrew.errors import ConfigurationError, LeadershipLost, StoreConflict, StoreUnsupported
from stagecrew.recovery.stores.contract import Check, Entry, Operation, Store
from stagecrew.recovery.stores.validation import ensure_entries

__all__ = ["HOLDER", "TERM", "FencedStore", "LeaderInfo", "fence", "leader_of"]

#: A permanent entry. Its version is the term, and its value describes the last leader. Deleting it restarts the terms.
TERM: Final = "leader/term"
#: An ephemeral entry that is deleted with the leader's session. Its value equals that of `TERM`.
HOLDER: Final = "leader/holder"

_FORMAT: Final = 1


@dataclasses.dataclass(frozen=True)
class LeaderInfo:
    """The stored description of one acquisition of leadership."""

    term: int
    host: str
    pid: int
    #: By the wall clock of the leader's host. Only for display.
    since: dt.datetime
    #: The leader's session at the store.
    session: str
    #: Unique for each acquisition.
    uuid: str

    @classmethod
    def of_this_process(cls, term: int, session: str) -> LeaderInfo:
        """Describes a new acquisition by this process."""
        now = dt.datetime.now(dt.UTC)
        return cls(term, socket.gethostname(), os.getpid(), now, session, uuid.uuid4().hex)

    def to_bytes(self) -> bytes:
        """Encodes this as the value of an entry."""
        return json.dumps(
            {"format": _FORMAT, **dataclasses.asdict(self), "since": self.since.isoformat(timespec="milliseconds")}
        ).encode()

    @classmethod
    def from_bytes(cls, value: bytes) -> LeaderInfo:
        """Decodes what `to_bytes` returned. Raises `StoreUnsupported` for anything else."""
        try:
            fields = json.loads(value)
            if fields.pop("format") != _FORMAT:
                raise StoreUnsupported(
                    f"{HOLDER} does not have format {_FORMAT}, because the leader runs another version of stagecrew: "
                    "use that version"
                )
            values = {field.name: fields[field.name] for field in dataclasses.fields(cls)}
            return cls(**{**values, "since": dt.datetime.fromisoformat(values["since"])})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreUnsupported(
                f"{HOLDER} was not written by stagecrew ({error!r}): check which other program writes to this store"
            ) from error


def leader_of(store: Store) -> LeaderInfo | None:
    """Returns the current leader, or None if no process leads.

    The result can already be outdated when this returns.
    """
    entry = store.read(HOLDER)
    return None if entry is None else LeaderInfo.from_bytes(entry.value)


def fence(term: int) -> Check:
    """Returns the check that fences the transactions of a leader and of the processes that work for it.

    >>> fence(3)
    Check(key='leader/term', version=3)
    """
    if term < 1:  # the entry has version 0 before the first leader
        raise ConfigurationError(f"{term} is not a term: the first term is 1")
    return Check(TERM, term)


class FencedStore:
    """A store that adds these checks to every transaction. Reads are not fenced.

    If a check fails, `transact` and `ensure` raise `LeadershipLost`, and that transaction has changed nothing. But if
    an earlier try of the same transaction raised `PossiblyInconsistentError`, the outcome of that try is still unknown.
    """

    def __init__(self, store: Store, *checks: Check) -> None:
        self._store, self._checks = store, checks

    @property
    def session(self) -> str:
        """See `Store`."""
        return self._store.session

    @property
    def timeout(self) -> float | None:
        """See `Store`."""
        return self._store.timeout

    @property
    def suspended(self) -> bool:
        """See `Store`."""
        return self._store.suspended

    def ensure(self, *keys: str) -> None:
        """See `Store`. If all entries exist, this writes nothing and so checks nothing."""
        ensure_entries(self, keys)

    def read(self, key: str) -> Entry | None:
        """See `Store`."""
        return self._store.read(key)

    def children(self, key: str) -> list[str]:
        """See `Store`."""
        return self._store.children(key)

    def transact(self, *operations: Operation) -> list[int | None]:
        """See `Store`. The versions, and the index of a conflict, refer to `operations` without the checks."""
        try:
            return self._store.transact(*self._checks, *operations)[len(self._checks) :]
        except StoreConflict as conflict:
            if conflict.index < len(self._checks):
                check = self._checks[conflict.index]
                raise LeadershipLost(
                    f"nothing was written: {check.key} no longer has version {check.version} "
                    f"({conflict.why}), because another process leads or has led; let that process continue"
                ) from conflict
            raise StoreConflict(str(conflict), conflict.index - len(self._checks), conflict.why) from conflict

    def close(self) -> None:
        """Does nothing. The owner of the underlying store closes it."""
