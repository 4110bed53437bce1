"""Coordination stores: the contract of a store, and its implementations on SQLite and ZooKeeper."""

from __future__ import annotations

import os
import urllib.parse
from collections.abc import Mapping
from typing import Final

from stagecrew.errors import ConfigurationError
from stagecrew.recovery.stores.contract import Store

__all__ = ["CREDENTIALS", "open_store"]

#: The environment variable that contains `user:password` for ZooKeeper. The variable with the additional suffix `_FILE`
#: contains the path of a file that contains it.
CREDENTIALS: Final = "STAGECREW_STORE_CREDENTIALS"

_FORMS: Final = "write sqlite:///path, or zookeeper://host:port,host2:port/chroot"


def open_store(url: str, environment: Mapping[str, str] = os.environ) -> Store:
    """Opens a new session at the store with this URL.

    * `sqlite:///var/lib/crew.db` serves processes on one host. The path is absolute.
    * `zookeeper://host:port,host2:port/chroot` accepts these options after a `?`: `timeout` (of a session, in seconds),
      and for TLS `ca`, `certfile`, `keyfile` (paths) and `verify` (false accepts any server). Any of the TLS options
      turns TLS on.

    URLs are logged, so a URL must not contain credentials. Set `STAGECREW_STORE_CREDENTIALS` to `user:password` for
    ZooKeeper, or `STAGECREW_STORE_CREDENTIALS_FILE` to the path of a file that contains it.
    """
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in ("sqlite", "zookeeper"):
        from stagecrew.files import address

        raise ConfigurationError(f"{address(url)!r} is not the URL of a store: {_FORMS}")
    place, _, query = rest.partition("?")
    hosts, slash, path = place.partition("/")
    path = urllib.parse.unquote(path)
    # A password can contain a slash or a question mark. In the path of a database, an @ is not a sign of credentials.
    if "@" in (hosts if scheme == "sqlite" else rest):
        raise ConfigurationError(
            f"the URL of the store contains credentials, but URLs are logged: set {CREDENTIALS} instead"
        )
    if scheme == "sqlite":
        if hosts or query or not path.strip("/") or path.endswith("/"):
            raise ConfigurationError(f"{url!r} is not the URL of a store: {_FORMS}; the path of a database is absolute")
        from stagecrew.recovery.stores.sqlite import SQLiteStore

        return SQLiteStore(f"/{path.lstrip('/')}")
    if not hosts or not slash or not path.strip("/"):
        raise ConfigurationError(
            f"{url!r} is not the URL of a store: {_FORMS}; stagecrew needs a path of its own in ZooKeeper"
        )
    from stagecrew.recovery.stores.zookeeper import ZooKeeperStore

    return ZooKeeperStore.from_options(hosts, path, urllib.parse.parse_qsl(query, True), _credentials(environment))


def _credentials(environment: Mapping[str, str]) -> str | None:
    credentials = environment.get(CREDENTIALS)
    path = environment.get(f"{CREDENTIALS}_FILE")
    if credentials is not None or path is None:
        return credentials
    try:
        with open(path, encoding="utf-8") as file:  # noqa: PTH123
            return file.read().strip()
    except OSError as error:
        raise ConfigurationError(
            f"the file {path} cannot be read ({error}): set {CREDENTIALS}_FILE to a readable file"
        ) from error
