"""Connection errors contain their reason, keep their cause, and contain no password."""

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
def closed_port() -> int:
    """A port on which no process listens."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port: int = reserved.getsockname()[1]
    return port


def test_a_refused_database_connection_names_host_port_and_reason(closed_port):
    """The message is one line. The cause is the database driver's own error."""
    psycopg = pytest.importorskip("psycopg")
    sink = DatabaseSink(f"postgresql://me:{SECRET}@127.0.0.1:{closed_port}/db", "t")
    with pytest.raises(CommitFailed, match=f"127.0.0.1.*port {closed_port} failed: Connection refused") as failed:
        sink.begin(STAGING)
    assert "\n" not in str(failed.value)
    cause = failed.value.__cause__
    assert isinstance(cause, psycopg.OperationalError)
    assert SECRET not in f"{failed.value} {cause!r} {cause}"


@pytest.mark.parametrize(
    ("url", "driver_error", "message"),
    [
        (f"postgresql://me:{SECRET}@host/db", f"no login with {SECRET}", "no login with ***"),
        ("postgresql://me:s3%63ret@host/db", f"no login with {SECRET} or s3%63ret", "no login with *** or ***"),
        (f"postgresql://me@host/db?password={SECRET}", f"no login with {SECRET}", "no login with ***"),
        ("postgresql://me@host/db?password=s3%63ret+more", f"no login with {SECRET}+more", "no login with ***"),
        (f"postgresql://me@host/db?pass%77ord={SECRET}", f"no login with {SECRET}", "no login with ***"),
        ("postgresql://me:s3@cret@host/db", "failed to resolve host 'cret@host'", "@ as %40"),
    ],
)
def test_an_error_of_the_database_driver_is_shown_without_the_password(monkeypatch, url, driver_error, message):
    """Neither the message nor its causes contain a part of the password."""
    psycopg = pytest.importorskip("psycopg")

    def refuse(*_args, **_kwargs):
        raise psycopg.OperationalError(driver_error)

    monkeypatch.setattr(psycopg, "connect", refuse)
    with pytest.raises(CommitFailed, match="cannot be reached") as failed:
        DatabaseSink(url, "t").begin(STAGING)
    assert message in str(failed.value)
    assert isinstance(failed.value.__cause__, psycopg.OperationalError)
    text = "".join(traceback.format_exception(failed.value))
    assert not [secret for secret in (SECRET, "s3%63ret", "cret@") if secret in text]


def test_a_refused_zookeeper_connection_names_host_port_and_reason(closed_port):
    """The message names host, port and reason. The innermost cause is the operating system's error."""
    with (
        contextlib.closing(ZooKeeperStore(f"127.0.0.1:{closed_port}", "/x", timeout=2, call_timeout=0.5)) as store,
        pytest.raises(StoreUnavailable, match=f"127.0.0.1:{closed_port}: .*Connection refused") as unavailable,
    ):
        store.read("a")
    assert isinstance(innermost(unavailable.value), ConnectionRefusedError)


def test_an_unknown_zookeeper_host_is_named_with_the_reason(monkeypatch):
    """The error contains the unknown host, and the reason from the name service."""
    resolve = socket.getaddrinfo

    def getaddrinfo(host, *arguments, **options):
        if host == "zookeeper.invalid":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve(host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    with (
        contextlib.closing(ZooKeeperStore("zookeeper.invalid:2181", "/x", timeout=2, call_timeout=0.5)) as store,
        pytest.raises(StoreUnavailable, match="zookeeper.invalid: .*Name or service not known") as unavailable,
    ):
        store.read("a")
    assert isinstance(innermost(unavailable.value), socket.gaierror)


def test_a_zookeeper_server_without_tls_is_a_tls_error():
    """If a ZooKeeper server does not speak TLS, the message contains the TLS library's reason."""
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
            pytest.raises(StoreUnavailable, match="SSL") as unavailable,
        ):
            store.read("a")
    assert isinstance(innermost(unavailable.value), OSError)


def innermost(error: BaseException) -> BaseException:
    """Returns the last error in the chain of causes."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error
