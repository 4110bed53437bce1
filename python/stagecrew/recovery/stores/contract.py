"""The interface of a coordination store: a tree of small entries, which sessions change through transactions."""

from __future__ import annotations

import dataclasses
import re
import urllib.parse
from collections.abc import Sequence
from typing import Final, Protocol

from stagecrew.errors import ConfigurationError

__all__ = [
    "FORMAT", "MAX_VALUE_BYTES", "Check", "Create", "Delete", "Entry", "Operation", "Replace", "Store", "checked_key",
    "decode_segment", "encode_segment", "parents",
]  # fmt: skip

#: The format of everything in a store: its entries, and the states that they reference. Every store records this
#: number, and every process checks it before it reads or writes anything else. Format 2 changed the keys of
#: coordinators in checkpoints and the records of commits, and added the indexes of open and ended jobs.
FORMAT: Final = 2

#: The size of the largest value, in bytes. Values are small references; ZooKeeper limits a whole request to 1 MiB.
MAX_VALUE_BYTES: Final = 64 << 10


@dataclasses.dataclass(frozen=True)
class Entry:
    """The value and version of one key. The version is 0 at first and grows by one with each `Replace`.

    `session` is the owner of an ephemeral entry, which is deleted when that session ends. It is None for a permanent
    entry.
    """

    value: bytes
    version: int
    session: str | None = None


@dataclasses.dataclass(frozen=True)
class Create:
    """Creates an entry below an existing parent. Conflicts: `exists`, `no parent`."""

    key: str
    value: bytes = b""
    #: An ephemeral entry is deleted when the session that created it ends. It cannot have children.
    ephemeral: bool = False


@dataclasses.dataclass(frozen=True)
class Replace:
    """Replaces the value of an entry that has this version. Conflicts: `missing`, `version`."""

    key: str
    value: bytes
    version: int


@dataclasses.dataclass(frozen=True)
class Delete:
    """Deletes an entry that has this version, or any version if it is None.

    Conflicts: `missing`, `version`, `not empty`.
    """

    key: str
    version: int | None = None


@dataclasses.dataclass(frozen=True)
class Check:
    """Fails the transaction unless the entry has this version, or exists if it is None.

    Conflicts: `missing`, `version`.
    """

    key: str
    version: int | None = None


Operation = Create | Replace | Delete | Check


class Store(Protocol):
    """One session at a coordination store. Any thread of one process can use it; its forks cannot.

    Keys are paths such as `jobs/nightly`. Each part between slashes is a word of the program or the result of
    `encode_segment`. The root has no entry. A value is at most 64 KiB.

    Guarantees:

    * A transaction is applied completely or not at all. It is ordered after every transaction that was acknowledged to
      any session before it was sent.
    * A session reads its own writes. The first read of a session is never older than a response that any session
      received before this session began.
    * When the process of a session dies or calls `close`, the session's ephemeral entries are deleted. After a death,
      SQLite deletes them immediately, and ZooKeeper after the session timeout. From then on, no write of that session
      is applied, even if its process was only paused.

    Not promised: that the session of a live process never ends, and that two readers of several keys see changes in the
    same order.
    """

    @property
    def session(self) -> str:
        """The name of this session.

        No other session ever has it. Raises `StoreUnavailable` if no session could be opened yet.
        """

    @property
    def timeout(self) -> float | None:
        """The seconds of silence after which the store ends this session.

        None if a session ends only with its process.
        """

    @property
    def suspended(self) -> bool:
        """Whether the connection is down or the session has ended. Work that needs a live session must stop."""

    def ensure(self, *keys: str) -> None:
        """Creates these permanent entries and their parents, unless they exist.

        Raises the same errors as `transact`.
        """

    def read(self, key: str) -> Entry | None:
        """Returns the entry, or None if it does not exist. Raises `StoreUnavailable`, `SessionLost`."""

    def children(self, key: str) -> list[str]:
        """Returns the last segments of the child keys, sorted. Empty if the entry does not exist.

        Raises the same errors as `read`.
        """

    def transact(self, *operations: Operation) -> list[int | None]:
        """Applies all operations or none. Returns the new version of each key, None for a `Delete`.

        If a response is lost, the store repeats the request for some seconds. If the repeated request finds the effect
        of the first, the transaction counts as applied. So the values of `Create` and `Replace` should be unique, for
        example by containing a UUID.

        Nothing was applied, not even by an earlier repetition, if this raises `StoreConflict` (with the index of the
        operation that failed and the reason), `StoreUnavailable`, `SessionLost` or `StoreRefused` (no access, no
        space, or too much data). The outcome is unknown if it raises `PossiblyInconsistentError`.
        """

    def close(self) -> None:
        """Ends the session and deletes its ephemeral entries, within some seconds. Idempotent."""


_SAFE: Final = re.compile(r"[A-Za-z0-9_.~-]+")


def encode_segment(text: str) -> str:
    """Encodes any text as one segment of a key. `decode_segment` is the inverse.

    >>> encode_segment("orders/2026 …")
    'orders%2F2026%20%E2%80%A6'
    >>> encode_segment("..")
    '%2E%2E'
    """
    if not text:
        raise ConfigurationError("a name in the store cannot be empty: use a name of at least one character")
    quoted = urllib.parse.quote(text, safe="")
    return quoted.replace(".", "%2E") if quoted in (".", "..") else quoted


def decode_segment(part: str) -> str:
    """Returns the text that `encode_segment` encoded.

    >>> decode_segment(encode_segment("a/b"))
    'a/b'
    """
    return urllib.parse.unquote(part)


def checked_key(key: str) -> str:
    """Returns the key if it is valid. Raises `ConfigurationError`."""
    if not all(part and part not in (".", "..") and _SAFE.fullmatch(part.replace("%", "")) for part in key.split("/")):
        raise ConfigurationError(
            f"{key!r} is not a valid key: use parts of letters, digits and _.~-% between single slashes"
        )
    return key


def parents(key: str) -> Sequence[str]:
    """Returns the keys above a key, the topmost first.

    >>> parents("a/b/c")
    ['a', 'a/b']
    """
    parts = key.split("/")
    return ["/".join(parts[:number]) for number in range(1, len(parts))]
