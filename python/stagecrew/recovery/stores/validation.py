"""Validation of transactions before they are sent, and errors that all stores share."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from stagecrew.errors import ConfigurationError, StoreConflict, StoreRefused, StoreUnsupported
from stagecrew.recovery.retry import retry_on
from stagecrew.recovery.stores.contract import (
    FORMAT,
    MAX_VALUE_BYTES,
    Create,
    Operation,
    Replace,
    Store,
    checked_key,
    parents,
)

__all__ = ["MAX_TRANSACTION_BYTES", "check_transaction", "conflict_error", "ensure_entries", "format_error"]

#: The size of the largest transaction, in bytes. ZooKeeper closes the connection of a client that sends over 1 MiB.
MAX_TRANSACTION_BYTES: Final = 768 << 10
#: The maximum number of bytes of an operation in addition to its key and value, for its header and access control list.
_OPERATION_OVERHEAD: Final = 256
#: Matches nearly all valid keys in one step. `checked_key` checks the others.
_PLAIN_KEY: Final = re.compile(r"[\w~-][\w.~%-]*(/[\w~-][\w.~%-]*)*", re.ASCII)
#: How many times `ensure_entries` tries while other sessions create and delete the same entries.
_ENSURE_TRIES: Final = 20
_VERSIONS: Final = range(1 << 31)
_WITH_VALUE: Final = (Create, Replace)


def check_transaction(operations: Sequence[Operation]) -> None:
    """Raises `ConfigurationError` for invalid operations and `StoreRefused` for a transaction that is too large."""
    size = 0
    for operation in operations:
        key = operation.key
        if not _PLAIN_KEY.fullmatch(key):
            checked_key(key)
        size += len(key) + _OPERATION_OVERHEAD
        if isinstance(operation, _WITH_VALUE):
            if not isinstance(operation.value, bytes):
                raise ConfigurationError(f"the value of {key!r} is {type(operation.value).__name__}: pass bytes")
            if len(operation.value) > MAX_VALUE_BYTES:
                raise StoreRefused(
                    f"the value of {key!r} has {len(operation.value)} bytes, and the limit is {MAX_VALUE_BYTES}: "
                    "store the data in the state storage and a reference to it here"
                )
            size += len(operation.value)
        if not isinstance(operation, Create) and not _is_version(operation.version, isinstance(operation, Replace)):
            raise ConfigurationError(
                f"{operation.version!r} is not a version of {key!r}: pass the version that was read"
            )
    if size > MAX_TRANSACTION_BYTES:
        raise StoreRefused(
            f"a transaction of {len(operations)} operations has {size} bytes, and the limit is "
            f"{MAX_TRANSACTION_BYTES}: split it into several transactions"
        )


def _is_version(version: object, required: bool) -> bool:
    return (version is None and not required) or (type(version) is int and version in _VERSIONS)


_REASONS: Final = {
    "exists": "it already exists",
    "missing": "it does not exist",
    "version": "it has a different version",
    "not empty": "it has children",
    "no parent": "its parent does not exist or is ephemeral",
}


def conflict_error(operations: Sequence[Operation], index: int, why: str) -> StoreConflict:
    """Returns the error for the operation that failed. It does not show values, because they can be secrets."""
    operation = operations[index]
    version = "" if isinstance(operation, Create) or operation.version is None else f" of version {operation.version}"
    verb = {"Create": "create", "Replace": "replace", "Delete": "delete", "Check": "check"}[type(operation).__name__]
    return StoreConflict(f"cannot {verb} {operation.key!r}{version}: {_REASONS[why]}; nothing was changed", index, why)


def format_error(where: str, found: str) -> StoreUnsupported:
    """Returns the error for a store of another format.

    A store without a format number was written by an old version.
    """
    is_newer = found.isdecimal() and int(found) > FORMAT
    writer, remedy = (
        ("A newer", "Use that version, or another store")
        if is_newer
        else ("An older", "Finish its jobs with that version, or use another store")
    )
    return StoreUnsupported(
        f"{where} has format {found or '0'}, but this version of stagecrew supports only format {FORMAT}. {writer} "
        f"stagecrew wrote it; it was not changed. {remedy}"
    )


def ensure_entries(store: Store, keys: Sequence[str]) -> None:
    """Implements `Store.ensure`: creates all missing entries in one transaction, and retries after a conflict."""
    with_parents = dict.fromkeys(one for key in keys for one in (*parents(checked_key(key)), key))

    def create_missing() -> None:
        if missing := [key for key in with_parents if store.read(key) is None]:
            store.transact(*map(Create, missing))

    retry_on(create_missing, StoreConflict, tries=_ENSURE_TRIES)
