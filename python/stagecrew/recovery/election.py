"""Who leads: one integer term for each leadership, by which every write of it is fenced. Keys, fences, and the rules, which are pure."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import math
import os
import socket
import uuid
from typing import Final

from stagecrew.errors import LeadershipLost, RecoveryMisused, StoreConflict, StoreUnsupported
from stagecrew.recovery.stores.contract import Check, Entry, Operation, Store
from stagecrew.recovery.stores.requests import ensured

__all__ = [
    "HOLDER",
    "TERM",
    "Acquired",
    "Election",
    "Fenced",
    "Granted",
    "Heard",
    "LeaderInfo",
    "Lost",
    "Refused",
    "Renewed",
    "Resigned",
    "Revoked",
    "Suspended",
    "Ticked",
    "Unanswered",
    "fence",
    "leader_of",
]

#: Stays for ever. Its version is the term; its value names who led last. Whoever deletes it makes terms begin again.
TERM: Final = "leader/term"
#: Ephemeral: ends with the session of the one that leads. Its value is that of `TERM`.
HOLDER: Final = "leader/holder"

_FORMAT: Final = 1


# -- who leads, for everybody


@dataclasses.dataclass(frozen=True)
class LeaderInfo:
    """One acquisition of leadership, as it is stored."""

    term: int
    host: str
    pid: int
    #: By the wall clock of its host: for people.
    since: dt.datetime
    #: Of the store.
    session: str
    #: No two acquisitions share one.
    uuid: str

    @classmethod
    def of_this_process(cls, term: int, session: str) -> LeaderInfo:
        """A new one."""
        now = dt.datetime.now(dt.UTC)
        return cls(term, socket.gethostname(), os.getpid(), now, session, uuid.uuid4().hex)

    def to_bytes(self) -> bytes:
        """As the value of an entry."""
        return json.dumps(
            {"format": _FORMAT, **dataclasses.asdict(self), "since": self.since.isoformat(timespec="milliseconds")}
        ).encode()

    @classmethod
    def from_bytes(cls, value: bytes) -> LeaderInfo:
        """What `to_bytes` made. Raises `StoreUnsupported` for anything else."""
        try:
            found = json.loads(value)
            if found.pop("format") != _FORMAT:
                raise StoreUnsupported(
                    f"{HOLDER} is of another format than {_FORMAT}: the leader runs another stagecrew; use that one"
                )
            known = {field.name: found[field.name] for field in dataclasses.fields(cls)}
            return cls(**{**known, "since": dt.datetime.fromisoformat(known["since"])})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreUnsupported(f"{HOLDER} is not what stagecrew writes there: {error!r}. Who else does?") from error


def leader_of(store: Store) -> LeaderInfo | None:
    """Who leads, for commands and standbys; None when nobody does. Reads only, so it may be over when it is answered."""
    entry = store.read(HOLDER)
    return None if entry is None else LeaderInfo.from_bytes(entry.value)


# -- fences


def fence(term: int) -> Check:
    """What each write of a leader, and of all that works for it, carries in its own transaction.

    >>> fence(3)
    Check(key='leader/term', version=3)
    """
    if term < 1:  # 0 is the version of an entry by which nobody has led
        raise RecoveryMisused(f"{term} is no term: the first is 1")
    return Check(TERM, term)


class Fenced:
    """A store whose every transaction is done only while these checks hold, in the same transaction. Reads are not fenced.

    Where a check does not hold, `transact` and `ensure` raise `LeadershipLost`: that transaction has changed nothing. As always,
    one that is repeated behind a `PossiblyInconsistentError` says nothing about the first.
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
        """See `Store`. What is there already needs no write, so no check."""
        ensured(self, keys)

    def read(self, key: str) -> Entry | None:
        """See `Store`."""
        return self._store.read(key)

    def children(self, key: str) -> list[str]:
        """See `Store`."""
        return self._store.children(key)

    def transact(self, *operations: Operation) -> list[int | None]:
        """See `Store`. Versions, and the index of a conflict, are those of the operations that were given."""
        try:
            return self._store.transact(*self._checks, *operations)[len(self._checks) :]
        except StoreConflict as conflict:
            if conflict.index < len(self._checks):
                check = self._checks[conflict.index]
                raise LeadershipLost(
                    f"nothing was written: {check.key} is not as this process left it ({conflict.why}, not version {check.version}), so "
                    f"another leads by now, or did"
                ) from conflict
            raise StoreConflict(str(conflict), conflict.index - len(self._checks), conflict.why) from conflict

    def close(self) -> None:
        """Nothing: whoever opened the store closes it."""


# -- the rules


@dataclasses.dataclass(frozen=True)
class Acquired:
    """The store has made this process the leader of a new term. `asked_at` is when it was asked, not when it answered."""

    term: int
    asked_at: float
    #: Of the session, see `Store.timeout`.
    timeout: float | None = None


@dataclasses.dataclass(frozen=True)
class Refused:
    """Another leads."""


@dataclasses.dataclass(frozen=True)
class Renewed:
    """The session is alive, and its term the current one."""

    term: int
    asked_at: float


@dataclasses.dataclass(frozen=True)
class Unanswered:
    """Nobody knows: the store could not be asked, or its answer was lost."""

    error: Exception | None = None


@dataclasses.dataclass(frozen=True)
class Suspended:
    """The connection to the store is down."""


@dataclasses.dataclass(frozen=True)
class Lost:
    """The session is over, or leadership is not to go on for another reason; that of this term only, unless it is None."""

    reason: str
    term: int | None = None


@dataclasses.dataclass(frozen=True)
class Ticked:
    """Time has passed."""


@dataclasses.dataclass(frozen=True)
class Resigned:
    """This process does not want to lead, now or ever again."""


#: What an election may hear.
Heard = Acquired | Refused | Renewed | Unanswered | Suspended | Lost | Ticked | Resigned


@dataclasses.dataclass(frozen=True)
class Granted:
    """This process leads from now on."""

    term: int


@dataclasses.dataclass(frozen=True)
class Revoked:
    """It does not any more."""

    term: int
    reason: str


class Election:
    """Whether one process leads: a follower, then a leader, then a follower again; resigned, for ever, when it wants no more.

    No clock, no socket, no thread: all that it knows is what it hears, with the time of a clock that never goes back.

    * Each term is granted once and revoked once, and terms only grow. Behind a revocation, only an acquisition that was asked
      for later counts.
    * Suspended and lost end leadership at once. So does silence: two thirds of the session's time-out after the last question
      that was answered was *sent*. No answer that comes later brings it back.

    Not promised: that the store agrees. A leader that is slow to hear is kept from writing by its fence, not by this.
    """

    def __init__(self) -> None:
        #: The term that this process leads in; None when it does not.
        self.term: int | None = None
        #: When that ends unless it is renewed; None when only an event ends it.
        self.deadline: float | None = None
        self.resigned = False
        self._timeout: float | None = None
        self._highest = 0
        self._broken_at = -math.inf

    def valid(self, now: float) -> bool:
        """Whether it leads at this time."""
        return self.term is not None and (self.deadline is None or now < self.deadline)

    def hear(self, heard: Heard, now: float) -> Granted | Revoked | None:
        """What follows from it. Answers None when nothing does."""
        if isinstance(heard, Resigned):
            self.resigned = True
            return self._end("it has resigned", now)
        if isinstance(heard, Suspended):
            return self._end("the connection to the store is down", now)
        if isinstance(heard, Lost):
            return self._end(heard.reason, now) if heard.term in (None, self.term) else None
        if self.term is not None and not self.valid(now):
            assert self._timeout is not None
            return self._end(f"the store has not answered for two thirds of the session's {self._timeout:g} s", now)
        if isinstance(heard, Acquired):
            return self._acquired(heard, now)
        if isinstance(heard, Renewed) and heard.term == self.term and self.deadline is not None:
            self.deadline = max(self.deadline, self._lasts(heard.asked_at))
        return None

    def _acquired(self, heard: Acquired, now: float) -> Granted | None:
        late = heard.timeout is not None and now >= heard.asked_at + heard.timeout * 2 / 3
        new = heard.term > self._highest and heard.asked_at > self._broken_at
        if self.resigned or self.term is not None or late or not new:
            return None
        self.term = self._highest = heard.term
        self._timeout = heard.timeout
        self.deadline = None if heard.timeout is None else self._lasts(heard.asked_at)
        return Granted(heard.term)

    def _lasts(self, asked_at: float) -> float:
        assert self._timeout is not None
        return asked_at + self._timeout * 2 / 3

    def _end(self, reason: str, now: float) -> Revoked | None:
        self._broken_at = max(self._broken_at, now)
        if self.term is None:
            return None
        term, self.term, self.deadline = self.term, None, None
        return Revoked(term, reason)
