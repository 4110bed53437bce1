"""Where a store lies on ZooKeeper: entries, sessions, its format, and who has access."""

from __future__ import annotations

import operator
from typing import Any, Final

from kazoo.exceptions import NodeExistsError, NoNodeError
from kazoo.security import OPEN_ACL_UNSAFE, make_digest_acl

from stagecrew.errors import StoreRefused, StoreUnsupported
from stagecrew.recovery.stores.contract import FORMAT
from stagecrew.recovery.stores.requests import other_format
from stagecrew.recovery.stores.zksession import ZooKeeperSession, failed

__all__ = ["acl_of", "prepare", "register"]

#: Before the format, in the entry above all others.
_MARK: Final = b"stagecrew store "


def acl_of(credentials: str | None) -> list[Any]:
    """Everything for who has these credentials, and nothing for others; everything for all, without."""
    if credentials is None:
        return list(OPEN_ACL_UNSAFE)
    user, _, password = credentials.partition(":")
    return [make_digest_acl(user, password, all=True)]


def prepare(session: ZooKeeperSession, root: str, acl: list[Any], where: str, due: float) -> None:
    """Makes a store where none is, and refuses one of another format or without the protection that it should have.

    A store that is refused is not changed.
    """
    if session.call(operator.methodcaller("exists_async", f"{root}/entries"), due) is not None:
        _check_format(session, root, where, due)
    parts = root.split("/")[1:]
    paths = ["/" + "/".join(parts[: number + 1]) for number in range(len(parts))]
    # What says the format comes last: when it is there, all is there.
    for path in (*paths, f"{root}/sessions", f"{root}/entries"):
        if session.call(operator.methodcaller("exists_async", path), due) is None:
            _create(session, path, _MARK + b"%d" % FORMAT if path == f"{root}/entries" else b"", due)
    for path in (f"{root}/sessions", f"{root}/entries"):
        found, _ = session.call(operator.methodcaller("get_acls_async", path), due)
        if list(found) != acl:
            raise StoreRefused(f"{where} is open to others than these credentials: use another path, or change its ACL")
    _check_format(session, root, where, due)  # another process may have made it meanwhile


def _check_format(session: ZooKeeperSession, root: str, where: str, due: float) -> None:
    value, _ = session.call(operator.methodcaller("get_async", f"{root}/entries"), due)
    if not value.startswith(_MARK):
        raise StoreUnsupported(f"{where} is of another program: it was left as it is")
    if value != _MARK + b"%d" % FORMAT:
        raise other_format(where, value.removeprefix(_MARK).decode(errors="replace"))


def register(session: ZooKeeperSession, root: str, due: float) -> str:
    """Makes the session's own entry, which ends with it, and answers its path. A write: reads behind it see what was before."""
    path = f"{root}/sessions/{session.name}"
    _create(session, path, b"", due, ephemeral=True)
    return path


def _create(session: ZooKeeperSession, path: str, value: bytes, due: float, *, ephemeral: bool = False) -> None:
    def send(kazoo: Any) -> Any:
        transaction = kazoo.transaction()
        transaction.create(path, value, ephemeral=ephemeral)
        return transaction.commit_async()

    _, result = failed(session.call(send, due))
    if isinstance(result, NodeExistsError) and not ephemeral:
        return
    if isinstance(result, NoNodeError):
        raise StoreUnsupported(f"{path} was deleted by somebody while the store was opened")
    if isinstance(result, Exception):
        raise result
