"""What a coordination store is: a tree of small entries, changed by transactions, with sessions that end with their process."""

from __future__ import annotations

import dataclasses
import re
import urllib.parse
from collections.abc import Sequence
from typing import Final, Protocol

from stagecrew.errors import RecoveryMisused

__all__ = [
    "FORMAT", "Check", "Create", "Delete", "Entry", "Operation", "Replace", "Store", "checked_key", "segment", "text_of",
]  # fmt: skip

#: The format of all that is kept in a store: entries, and the states that they refer to. Each store carries this number, and every
#: process checks it before it reads or writes anything else.
#: 2: keys of coordinators in checkpoints, records of commits, and the indexes of open and of ended jobs are new.
FORMAT: Final = 2

#: The largest value of an entry, in bytes: an entry is a small reference. ZooKeeper's own limit is 1 MiB for a whole request.
LARGEST: Final = 64 << 10


@dataclasses.dataclass(frozen=True)
class Entry:
    """What is at a key. `version` is 0 when it was created, and grows by one with each `Replace`.

    `session` names the session that an ephemeral entry lives and ends with; None for one that stays.
    """

    value: bytes
    version: int
    session: str | None = None


@dataclasses.dataclass(frozen=True)
class Create:
    """Makes an entry whose parent is there. `exists` when it is there already, `no parent`."""

    key: str
    value: bytes = b""
    #: Ends with the session that made it; can have no children.
    ephemeral: bool = False


@dataclasses.dataclass(frozen=True)
class Replace:
    """Changes the value of an entry that has this version. `missing`, `version`."""

    key: str
    value: bytes
    version: int


@dataclasses.dataclass(frozen=True)
class Delete:
    """Takes an entry away that has this version; any, when it is None. `missing`, `version`, `not empty` when it has children."""

    key: str
    version: int | None = None


@dataclasses.dataclass(frozen=True)
class Check:
    """Changes nothing: fails the transaction unless the entry has this version; any, when it is None. `missing`, `version`."""

    key: str
    version: int | None = None


Operation = Create | Replace | Delete | Check


class Store(Protocol):
    """One session at a coordination store. Usable from any thread of one process, not from its forks.

    Keys are paths such as `jobs/nightly`; each part between slashes is made by `segment` unless it is a word of the program.
    The root has no entry. Values are at most 64 KiB.

    Guarantees:

    * A transaction is done whole or not at all, and behind all transactions that any session was answered for before.
    * Whoever was answered reads what it wrote, and whatever was there before: the first read of a session is not an older state
      than any answer that was given to anybody before that session began.
    * Ephemeral entries of a session are gone some time after its process has died or `close` was called: at once on a store of one
      host, after the session's time-out on ZooKeeper. From then on no write of that session is done, also when its process was
      only paused.

    Not promised: that a session whose process lives is not ended by the store; that entries are read in a common order across
    keys outside a transaction.
    """

    @property
    def session(self) -> str:
        """The name of this session, unique for ever. Raises `StoreUnavailable` when none could be had yet."""

    @property
    def timeout(self) -> float | None:
        """After how many seconds of silence the store ends this session; None when it ends with its process alone."""

    @property
    def suspended(self) -> bool:
        """Whether the connection is down, or the session is over: what only a live session may do has to stop now."""

    def ensure(self, *keys: str) -> None:
        """Makes these entries that stay, with their parents, where they are not there. Raises as `transact`."""

    def read(self, key: str) -> Entry | None:
        """The entry; None when there is none. Raises `StoreUnavailable`, `SessionLost`."""

    def children(self, key: str) -> list[str]:
        """The last parts of the keys right below, sorted; none when the entry is not there. Raises as `read`."""

    def transact(self, *operations: Operation) -> list[int | None]:
        """Does all, or nothing. Answers the version that each key has now: None behind `Delete`.

        What is lost on the way is repeated for some seconds: where the repetition finds what the first has done, it counts as
        done. So values of `Create` and `Replace` should differ from all that others would write (a uuid in them).

        Definitely nothing was done, by an earlier repetition neither: `StoreConflict` with the index of the operation that failed and why; `StoreUnavailable`;
        `SessionLost`; `StoreRefused` (no access; an entry that is too large). Nobody knows: `PossiblyInconsistentError`.
        """

    def close(self) -> None:
        """Ends the session and takes its ephemeral entries away. Repeatable; takes at most some seconds."""


_SAFE: Final = re.compile(r"[A-Za-z0-9_.~-]+")


def segment(text: str) -> str:
    """Any text as one part of a key. `text_of` is its inverse.

    >>> segment("orders/2026 …")
    'orders%2F2026%20%E2%80%A6'
    >>> segment("..")
    '%2E%2E'
    """
    if not text:
        raise RecoveryMisused("a name in the store cannot be empty")
    quoted = urllib.parse.quote(text, safe="")
    return quoted.replace(".", "%2E") if quoted in (".", "..") else quoted


def text_of(part: str) -> str:
    """The text that `segment` was given.

    >>> text_of(segment("a/b"))
    'a/b'
    """
    return urllib.parse.unquote(part)


def checked_key(key: str) -> str:
    """The key, when it is one. Raises `RecoveryMisused`."""
    if not all(part and part not in (".", "..") and _SAFE.fullmatch(part.replace("%", "")) for part in key.split("/")):
        raise RecoveryMisused(f"{key!r} is no key: parts of letters, digits and _.~-% between single slashes")
    return key


def parents(key: str) -> Sequence[str]:
    """The keys above a key, the highest first.

    >>> parents("a/b/c")
    ['a', 'a/b']
    """
    parts = key.split("/")
    return ["/".join(parts[:number]) for number in range(1, len(parts))]
