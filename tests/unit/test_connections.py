"""An error of a connection keeps the reason and its cause, and shows no password."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import traceback

import pyarrow as pa
import pytest

from stagecrew.errors import CommitFailed, StoreUnavailable
from stagecrew.operators.commits import Staging
from stagecrew.operators.sinks.database import DatabaseSink
from stagecrew.recovery.stores.zookeeper import ZooKeeperStore

SECRET = "s3cret"
STAGING = Staging("commit", "run", pa.schema([("a", pa.int64())]))


@pytest.fixture
def closed() -> int:
    """A port that nothing listens at."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port: int = reserved.getsockname()[1]
    return port


def test_a_database_that_cannot_be_reached(closed):
    """The message has host, port and the system's reason, on one line; the cause is the driver's own error."""
    psycopg = pytest.importorskip("psycopg")
    sink = DatabaseSink(f"postgresql://me:{SECRET}@127.0.0.1:{closed}/db", "t")
    with pytest.raises(CommitFailed, match=f"127.0.0.1.*port {closed} failed: Connection refused") as failed:
        sink.begin(STAGING)
    assert "\n" not in str(failed.value)
    cause = failed.value.__cause__
    assert isinstance(cause, psycopg.OperationalError)
    assert SECRET not in f"{failed.value} {cause!r} {cause}"


@pytest.mark.parametrize(
    ("url", "said", "shown"),
    [
        (f"postgresql://me:{SECRET}@host/db", f"no login with {SECRET}", "no login with ***"),
        ("postgresql://me:s3%63ret@host/db", f"no login with {SECRET} or s3%63ret", "no login with *** or ***"),
        (f"postgresql://me@host/db?password={SECRET}", f"no login with {SECRET}", "no login with ***"),
        ("postgresql://me:s3@cret@host/db", "failed to resolve host 'cret@host'", "@ as %40"),
    ],
)
def test_a_database_whose_error_has_a_part_of_the_password(monkeypatch, url, said, shown):
    """Neither the message nor the causes show the password."""
    psycopg = pytest.importorskip("psycopg")

    def refuses(*_args, **_kwargs):
        raise psycopg.OperationalError(said)

    monkeypatch.setattr(psycopg, "connect", refuses)
    with pytest.raises(CommitFailed, match="cannot be reached") as failed:
        DatabaseSink(url, "t").begin(STAGING)
    assert shown in str(failed.value)
    assert isinstance(failed.value.__cause__, psycopg.OperationalError)
    text = "".join(traceback.format_exception(failed.value))
    assert not [secret for secret in (SECRET, "s3%63ret", "cret@") if secret in text]


def test_a_zookeeper_that_refuses_connections(closed):
    """The message has host, port and the system's reason; the causes end with the system's error."""
    with (
        contextlib.closing(ZooKeeperStore(f"127.0.0.1:{closed}", "/x", timeout=2, call_timeout=0.5)) as store,
        pytest.raises(StoreUnavailable, match=f"127.0.0.1:{closed}: .*Connection refused") as away,
    ):
        store.read("a")
    assert isinstance(innermost(away.value), ConnectionRefusedError)


def test_a_zookeeper_whose_name_has_no_address(monkeypatch):
    """The message has the name and the reason of the name service."""
    resolve = socket.getaddrinfo

    def getaddrinfo(host, *arguments, **options):
        if host == "zookeeper.invalid":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve(host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    with (
        contextlib.closing(ZooKeeperStore("zookeeper.invalid:2181", "/x", timeout=2, call_timeout=0.5)) as store,
        pytest.raises(StoreUnavailable, match="zookeeper.invalid: .*Name or service not known") as away,
    ):
        store.read("a")
    assert isinstance(innermost(away.value), socket.gaierror)


def test_a_zookeeper_without_tls():
    """The reason is that of TLS."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        server.settimeout(10)
        port = server.getsockname()[1]

        def greet() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    connection.sendall(b"no TLS here")
                    connection.close()

        threading.Thread(target=greet, daemon=True).start()
        with (
            contextlib.closing(
                ZooKeeperStore(f"127.0.0.1:{port}", "/x", timeout=2, call_timeout=1, tls=ssl.create_default_context())
            ) as store,
            pytest.raises(StoreUnavailable, match="SSL") as away,
        ):
            store.read("a")
    assert isinstance(innermost(away.value), OSError)


def innermost(error: BaseException) -> BaseException:
    """The last of the causes."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error
