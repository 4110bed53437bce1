"""The nodes of a store in ZooKeeper: its entries, its sessions, its format and their access control."""

from __future__ import annotations

import operator
from typing import Any, Final

from kazoo.exceptions import NodeExistsError, NoNodeError
from kazoo.security import OPEN_ACL_UNSAFE, make_digest_acl

from stagecrew.errors import StoreRefused, StoreUnsupported
from stagecrew.recovery.stores.contract import FORMAT
from stagecrew.recovery.stores.validation import format_error
from stagecrew.recovery.stores.zookeeper.session import ZooKeeperSession, first_failure

__all__ = ["acl_of", "prepare", "register"]

#: The value of the node above all entries is this prefix and the number of the format.
_FORMAT_PREFIX: Final = b"stagecrew store "


def acl_of(credentials: str | None) -> list[Any]:
    """Returns an access control list (ACL) that gives these credentials all permissions; if None, everyone."""
    if credentials is None:
        return list(OPEN_ACL_UNSAFE)
    user, _, password = credentials.partition(":")
    return [make_digest_acl(user, password, all=True)]


def prepare(session: ZooKeeperSession, root: str, acl: list[Any], where: str, deadline: float) -> None:
    """Creates the store if it does not exist.

    Refuses a store with another format or another ACL, and does not change it.
    """
    if session.call(operator.methodcaller("exists_async", f"{root}/entries"), deadline) is not None:
        _check_format(session, root, where, deadline)
    parts = root.split("/")[1:]
    paths = ["/" + "/".join(parts[: number + 1]) for number in range(len(parts))]
    # The node with the format is created last, so if it exists, all the others exist.
    for path in (*paths, f"{root}/sessions", f"{root}/entries"):
        if session.call(operator.methodcaller("exists_async", path), deadline) is None:
            _create(session, path, _FORMAT_PREFIX + b"%d" % FORMAT if path == f"{root}/entries" else b"", deadline)
    for path in (f"{root}/sessions", f"{root}/entries"):
        found, _ = session.call(operator.methodcaller("get_acls_async", path), deadline)
        if list(found) != acl:
            raise StoreRefused(
                f"{where} has an ACL that does not match these credentials: use another path, or change its ACL"
            )
    _check_format(session, root, where, deadline)  # another process can have created the store in the meantime


def _check_format(session: ZooKeeperSession, root: str, where: str, deadline: float) -> None:
    value, _ = session.call(operator.methodcaller("get_async", f"{root}/entries"), deadline)
    if not value.startswith(_FORMAT_PREFIX):
        raise StoreUnsupported(f"{where} belongs to another program: it was not changed; use another path")
    if value != _FORMAT_PREFIX + b"%d" % FORMAT:
        raise format_error(where, value.removeprefix(_FORMAT_PREFIX).decode(errors="replace"))


def register(session: ZooKeeperSession, root: str, deadline: float) -> str:
    """Creates the session's own ephemeral node and returns its path.

    This is a write, so everything that the session reads later is at least as new as this write.
    """
    path = f"{root}/sessions/{session.name}"
    _create(session, path, b"", deadline, ephemeral=True)
    return path


def _create(session: ZooKeeperSession, path: str, value: bytes, deadline: float, *, ephemeral: bool = False) -> None:
    def send(kazoo: Any) -> Any:
        transaction = kazoo.transaction()
        transaction.create(path, value, ephemeral=ephemeral)
        return transaction.commit_async()

    _, result = first_failure(session.call(send, deadline))
    if isinstance(result, NodeExistsError) and not ephemeral:
        return
    if isinstance(result, NoNodeError):
        raise StoreUnsupported(f"another program deleted {path} while the store was opened: use a path of your own")
    if isinstance(result, Exception):
        raise result
