"""What every store asks of a transaction before it is sent, and how it says what stood in its way."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Final

from stagecrew.errors import RecoveryMisused, StoreConflict, StoreRefused, StoreUnsupported
from stagecrew.recovery.stores.contract import FORMAT, LARGEST, Create, Operation, Replace, Store, checked_key, parents

__all__ = ["checked", "conflict", "ensured", "other_format"]

#: The largest transaction: ZooKeeper drops the connection of whoever sends more than 1 MiB.
WHOLE: Final = 768 << 10
#: What an operation takes beside its key and value, in bytes, at most: its header and access control list.
_BESIDE: Final = 256
#: What is a key at first sight, as nearly all are.
_PLAIN: Final = re.compile(r"[\w~-][\w.~%-]*(/[\w~-][\w.~%-]*)*", re.ASCII)
#: How often one ensures while others create and delete.
_TRIES: Final = 20
_VERSIONS: Final = range(1 << 31)
_VALUED: Final = (Create, Replace)


def checked(operations: Sequence[Operation]) -> None:
    """Raises `RecoveryMisused` for what can be no transaction, and `StoreRefused` for one that is too large."""
    whole = 0
    for operation in operations:
        key = operation.key
        if not _PLAIN.fullmatch(key):
            checked_key(key)
        whole += len(key) + _BESIDE
        if isinstance(operation, _VALUED):
            if not isinstance(operation.value, bytes):
                raise RecoveryMisused(f"the value of {key!r} is {type(operation.value).__name__}: give bytes")
            if len(operation.value) > LARGEST:
                raise StoreRefused(
                    f"the value of {key!r} has {len(operation.value)} bytes, and may have {LARGEST}: store a reference to it"
                )
            whole += len(operation.value)
        if not isinstance(operation, Create) and not _is_version(operation.version, isinstance(operation, Replace)):
            raise RecoveryMisused(f"{operation.version!r} is no version of {key!r}: give the one that was read")
    if whole > WHOLE:
        raise StoreRefused(
            f"a transaction of {len(operations)} operations has {whole} bytes, and may have {WHOLE}: split it"
        )


def _is_version(version: object, needed: bool) -> bool:
    return (version is None and not needed) or (type(version) is int and version in _VERSIONS)


_WORDS: Final = {
    "exists": "it is there already",
    "missing": "it is not there",
    "version": "it has another version",
    "not empty": "it has children",
    "no parent": "nothing that may have children is above it",
}


def conflict(operations: Sequence[Operation], index: int, why: str) -> StoreConflict:
    """The error of the operation that failed. Values may be secrets, and are not told."""
    operation = operations[index]
    version = "" if isinstance(operation, Create) or operation.version is None else f" of version {operation.version}"
    doing = {"Create": "create", "Replace": "replace", "Delete": "delete", "Check": "check"}[type(operation).__name__]
    return StoreConflict(f"cannot {doing} {operation.key!r}{version}: {_WORDS[why]}; nothing was done", index, why)


def other_format(where: str, found: str) -> StoreUnsupported:
    """The error of a store that carries another format than ours. A store without a number is an older one."""
    is_newer = found.isdecimal() and int(found) > FORMAT
    who, remedy = (
        ("a newer", "Use that one, or another store")
        if is_newer
        else ("an older", "Finish its jobs with that one, or use another store")
    )
    return StoreUnsupported(
        f"{where} has format {found or '0'}, and this stagecrew knows format {FORMAT}: {who} stagecrew wrote it, and nothing in it was "
        f"changed. {remedy}"
    )


def ensured(store: Store, keys: Sequence[str]) -> None:
    """What `ensure` of a store does: all at once what is not there, and again when another came in between."""
    wanted = dict.fromkeys(one for key in keys for one in (*parents(checked_key(key)), key))
    for tries in itertools.count(1):
        missing = [key for key in wanted if store.read(key) is None]
        if not missing:
            return
        try:
            store.transact(*map(Create, missing))
            return
        except StoreConflict:
            if tries == _TRIES:
                raise
