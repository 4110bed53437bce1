"""One ZooKeeper session on a kazoo client, which is kept from opening a second session."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from kazoo.client import KazooClient
from kazoo.exceptions import (
    AuthFailedError,
    BadArgumentsError,
    BadVersionError,
    InvalidACLError,
    NoAuthError,
    NoChildrenForEphemeralsError,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    QuotaExceededError,
    RolledBackError,
    ZookeeperError,
)
from kazoo.handlers.threading import KazooTimeoutError, SequentialThreadingHandler
from kazoo.protocol.serialization import SetData
from kazoo.protocol.states import KazooState

__all__ = [
    "NoResponseError",
    "NotConnectedError",
    "SessionEndedError",
    "ZooKeeperSession",
    "ZookeeperError",
    "first_failure",
    "session_name",
]

#: Responses that prove that a request was not applied. After any other error, it can still be applied later.
_NOT_APPLIED: Final = (
    AuthFailedError, BadArgumentsError, BadVersionError, InvalidACLError, NoAuthError, NoChildrenForEphemeralsError,
    NodeExistsError, NoNodeError, NotEmptyError, QuotaExceededError,
)  # fmt: skip
#: How often a waiting call checks whether the session has ended, in seconds.
_CHECK_PERIOD: Final = 0.2
#: How many seconds `close` waits for the server's response, and then for kazoo's threads.
_CLOSE_TIMEOUT: Final = 3.0

# Below INFO, kazoo logs requests with credentials and values, so the filter drops these records. It also logs every
# attempt to connect, which our errors summarize, so the handler keeps it silent unless logging is configured.
_log = logging.getLogger("stagecrew.zookeeper")
_log.addFilter(lambda record: record.levelno >= logging.INFO)
_log.addHandler(logging.NullHandler())


class NotConnectedError(Exception):
    """There was no connection, and the request was not sent."""


class SessionEndedError(Exception):
    """The session has ended, and the request was not sent."""


class NoResponseError(Exception):
    """No response arrived. Unless `sent` is false, the request may have been applied, or can still be applied later."""

    def __init__(self, message: str, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class _Handler(SequentialThreadingHandler):  # type: ignore[misc]
    """kazoo's threads and connections, for one session only."""

    def __init__(self, session: ZooKeeperSession, context: ssl.SSLContext | None, connect_timeout: float) -> None:
        super().__init__()
        self._session, self._context, self._connect_timeout = session, context, connect_timeout
        self._socket: socket.socket | None = None
        #: Why there is no connection, and the operating system's error.
        self.problem = "no server was tried yet"
        self.cause: Exception | None = None

    def create_connection(
        self, address: tuple[str, int], hostname: str | None = None, timeout: float | None = None, **options: Any
    ) -> socket.socket:
        if self._session.ended:
            # kazoo would now open a new session, which the users of this session must not use.
            raise ConnectionAbortedError("the session has ended")
        try:
            connection = socket.create_connection(address, min(timeout or self._connect_timeout, self._connect_timeout))
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._context is not None:
                    connection = self._context.wrap_socket(connection, server_hostname=hostname)
            except BaseException:
                connection.close()
                raise
        except (OSError, ValueError) as error:
            # TLS raises ValueError for a host name that it cannot verify. If not caught, this would end kazoo's thread.
            self.record_problem(f"{hostname or address[0]}:{address[1]}: {error}", error)
            raise ConnectionError(self.problem) from error
        self.record_problem(f"{hostname or address[0]}:{address[1]} does not respond", None)
        self._socket = connection
        return connection

    def record_problem(self, problem: str, cause: Exception | None) -> None:
        """Records why there is no connection."""
        self.problem, self.cause = problem, cause

    def abort(self) -> None:
        """Closes the connection, so that kazoo stops waiting for it."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)


class _SequenceUpdate(SetData):  # type: ignore[misc]
    """The first operation of a transaction. It records whether it was sent, and until then it can be withdrawn."""

    def __new__(cls, path: str, value: bytes, version: int) -> _SequenceUpdate:
        update: _SequenceUpdate = super().__new__(cls, path, value, version)
        update._lock, update._sent, update._withdrawn = threading.Lock(), False, False
        return update

    _lock: threading.Lock
    _sent: bool
    _withdrawn: bool

    def withdraw(self) -> bool:
        """Withdraws the request, and returns whether it was already sent.

        If it was not, kazoo can still send it, but the server will reject it.
        """
        with self._lock:
            self._withdrawn = True
            return self._sent

    def serialize(self) -> bytearray:
        with self._lock:
            self._sent = self._sent or not self._withdrawn
            version = -2 if self._withdrawn else self.version
        return bytearray(SetData(self.path, self.data, version).serialize())


class ZooKeeperSession:
    """A session that starts when it connects, and ends permanently when ZooKeeper or `close` ends it.

    kazoo's listeners and threads only set flags here. Everything else runs in the calling thread.
    """

    def __init__(
        self, hosts: str, timeout: float, auth: Sequence[tuple[str, str]], acl: Any, context: ssl.SSLContext | None
    ) -> None:
        #: The seconds of silence after which the session ends, as agreed with the server.
        self.timeout = timeout
        self._ended = threading.Event()
        self.name: str | None = None
        self._connected = threading.Event()
        self._handler = _Handler(self, context, max(1.0, timeout / (1 + hosts.count(","))))
        self._kazoo = KazooClient(
            hosts, timeout, handler=self._handler, auth_data=auth, default_acl=acl, logger=_log,
            connection_retry={"max_tries": -1, "delay": 0.05, "max_delay": 1.0, "sleep_func": self._handler.sleep_func},
        )  # fmt: skip
        self._capture_timeout()
        self._capture_name_errors()
        self._kazoo.add_listener(self._on_state)
        self._kazoo.start_async()

    @property
    def ended(self) -> bool:
        """Whether the session has ended, because ZooKeeper has ended it or `close` was called."""
        return self._ended.is_set()

    @property
    def connected(self) -> bool:
        """Whether a server is connected, and the session has not ended."""
        return self._connected.is_set() and not self.ended

    @property
    def problem(self) -> str:
        """Why there is no connection, if that is known."""
        return self._handler.problem

    def call(self, send: Callable[[KazooClient], Any], deadline: float, update: _SequenceUpdate | None = None) -> Any:
        """Sends a request, and waits until the deadline (a time of `time.monotonic`) for its response.

        Raises `NotConnectedError`, `SessionEndedError`, `NoResponseError`, and kazoo's errors for responses that are
        errors.
        """
        while not self._connected.wait(max(0.0, min(_CHECK_PERIOD, deadline - time.monotonic()))):
            if self._ended.is_set():
                break
            if time.monotonic() >= deadline:
                raise NotConnectedError(self.problem) from self._handler.cause
        if self._ended.is_set():
            raise SessionEndedError
        pending = send(self._kazoo)
        end_was_seen = False
        while True:
            try:
                return pending.get(timeout=max(0.0, min(_CHECK_PERIOD, deadline - time.monotonic())))
            except KazooTimeoutError:
                # The last responses of a session arrive shortly after its end is known.
                if time.monotonic() < deadline and not end_was_seen:
                    end_was_seen = self._ended.is_set()
                    continue
                raise NoResponseError("no response", update is None or update.withdraw()) from None
            except _NOT_APPLIED:
                raise
            except Exception as error:
                raise NoResponseError(type(error).__name__, update is None or update.withdraw()) from error

    def multi(
        self, path: str, value: bytes, version: int, add: Callable[[Any], None], deadline: float
    ) -> tuple[int, Any]:
        """Sends a transaction whose first operation replaces this version of the entry at `path` with `value`.

        Returns the index of the operation that failed (0 is the replacement) and its error, or -1 and the results.
        """
        update = _SequenceUpdate(path, value, version)

        def send(kazoo: KazooClient) -> Any:
            transaction = kazoo.transaction()
            transaction.operations.append(update)
            add(transaction)
            return transaction.commit_async()

        return first_failure(self.call(send, deadline, update))

    def close(self) -> None:
        """Ends the session here, and also at the server if it responds. Takes a few seconds at most."""
        if not self._connected.is_set():
            self._handler.abort()
        self._ended.set()
        closing = threading.Thread(target=self._close_client, name="stagecrew-zookeeper-close", daemon=True)
        closing.start()
        closing.join(_CLOSE_TIMEOUT)
        if closing.is_alive():
            self._handler.abort()
            closing.join(_CLOSE_TIMEOUT)

    def _close_client(self) -> None:
        with contextlib.suppress(Exception):
            self._kazoo.stop()
        with contextlib.suppress(Exception):
            self._kazoo.close()

    def _on_state(self, state: str) -> None:
        if state == KazooState.CONNECTED:
            identity = self._kazoo.client_id
            name = session_name(identity[0]) if identity else None
            if self.name not in (None, name):
                self._ended.set()
            self.name = name
            self._connected.set()
        else:
            self._connected.clear()
            if state == KazooState.LOST:
                self._ended.set()

    def _capture_timeout(self) -> None:
        """Captures the negotiated session timeout, which kazoo hides: its read timeout is two thirds of it."""
        connect = self._kazoo._connection._connect

        def connect_and_capture(*arguments: Any) -> tuple[float, float]:
            read_timeout, connect_timeout = connect(*arguments)
            self.timeout = read_timeout * 1.5 / 1000
            return read_timeout, connect_timeout

        self._kazoo._connection._connect = connect_and_capture

    def _capture_name_errors(self) -> None:
        """Captures the errors of name resolution, which kazoo only logs."""
        expand = self._kazoo._connection._expand_client_hosts

        def expand_and_capture() -> Any:
            if not (found := expand()):
                for host, port in self._kazoo.hosts:
                    try:
                        socket.getaddrinfo(host, port, 0, 0, socket.IPPROTO_TCP)
                    except OSError as error:
                        self._handler.record_problem(f"{host}: {error}", error)
            return found

        self._kazoo._connection._expand_client_hosts = expand_and_capture


def first_failure(results: Sequence[Any]) -> tuple[int, Any]:
    """Returns the index and the error of the operation that failed, or -1 and the results.

    ZooKeeper reports the operations before the failed one as rolled back.
    """
    for index, result in enumerate(results):
        if isinstance(result, ZookeeperError) and not isinstance(result, RolledBackError):
            return index, result
    return -1, results


def session_name(owner: int) -> str:
    """Returns the name of a session in the store: its ZooKeeper id, which no other session gets."""
    return f"{owner & 0xFFFF_FFFF_FFFF_FFFF:x}"
