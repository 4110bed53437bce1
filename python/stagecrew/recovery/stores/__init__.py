"""Coordination stores: one contract, and a room for each store behind it."""

from __future__ import annotations

import os
import urllib.parse
from collections.abc import Mapping
from typing import Final

from stagecrew.errors import RecoveryMisused
from stagecrew.recovery.stores.contract import Store

__all__ = ["CREDENTIALS", "open_store"]

#: The environment variable that holds `user:password` for ZooKeeper; with `_FILE` behind it, the path of a file that does.
CREDENTIALS: Final = "STAGECREW_STORE_CREDENTIALS"

_FORMS: Final = "write sqlite:///path, or zookeeper://host:port,host2:port/chroot"


def open_store(url: str, environment: Mapping[str, str] = os.environ) -> Store:
    """A new session at the store of this URL.

    * `sqlite:///var/lib/crew.db`: for processes of one host; the path is absolute.
    * `zookeeper://host:port,host2:port/chroot`, with these options behind a `?`: `timeout` of a session in seconds, and for TLS
      `ca`, `certfile`, `keyfile` (files) and `verify` (false: any server is believed). One of them turns TLS on.

    Credentials do not belong in a URL, which is logged: `STAGECREW_STORE_CREDENTIALS` holds `user:password` for ZooKeeper, or
    `STAGECREW_STORE_CREDENTIALS_FILE` the path of a file that does.
    """
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in ("sqlite", "zookeeper"):
        from stagecrew.files import address

        raise RecoveryMisused(f"{address(url)!r} is no store: {_FORMS}")
    place, _, query = rest.partition("?")
    hosts, slash, path = place.partition("/")
    path = urllib.parse.unquote(path)
    # A password may have a slash or a question mark in it. A path on this host has no credentials.
    if "@" in (hosts if scheme == "sqlite" else rest):
        raise RecoveryMisused(
            f"the URL of a store has credentials in it, and URLs are logged: set {CREDENTIALS} instead"
        )
    if scheme == "sqlite":
        if hosts or query or not path.strip("/") or path.endswith("/"):
            raise RecoveryMisused(f"{url!r} is no store: {_FORMS}; the path of a database is absolute")
        from stagecrew.recovery.stores.sqlite import SQLiteStore

        return SQLiteStore(f"/{path.lstrip('/')}")
    if not hosts or not slash or not path.strip("/"):
        raise RecoveryMisused(f"{url!r} is no store: {_FORMS}; stagecrew needs a path of its own on ZooKeeper")
    from stagecrew.recovery.stores.zookeeper import ZooKeeperStore

    return ZooKeeperStore.from_options(hosts, path, urllib.parse.parse_qsl(query, True), _credentials(environment))


def _credentials(environment: Mapping[str, str]) -> str | None:
    known = environment.get(CREDENTIALS)
    file = environment.get(f"{CREDENTIALS}_FILE")
    if known is not None or file is None:
        return known
    try:
        with open(file, encoding="utf-8") as lines:  # noqa: PTH123
            return lines.read().strip()
    except OSError as error:
        raise RecoveryMisused(f"{CREDENTIALS}_FILE names a file that cannot be read: {error}") from error
