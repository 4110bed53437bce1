"""One session of ZooKeeper over kazoo, and never a second one behind it."""

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

__all__ = ["AwayError", "NoAnswerError", "OverError", "ZooKeeperSession", "ZookeeperError", "failed", "session_name"]

#: Answers of a server that has done nothing, and will do nothing. Behind all others a request may be done yet.
_DEFINITE: Final = (
    AuthFailedError, BadArgumentsError, BadVersionError, InvalidACLError, NoAuthError, NoChildrenForEphemeralsError,
    NodeExistsError, NoNodeError, NotEmptyError, QuotaExceededError,
)  # fmt: skip
#: How often one that waits for an answer looks whether the session is over, in seconds.
_LOOK: Final = 0.2
#: How many seconds `close` waits for the server's answer, and then for kazoo's threads.
_CLOSING: Final = 3.0

# kazoo tells requests at lower levels, with credentials and values in them; and each try to connect, which our errors sum up: where no
# log is configured it is not heard.
_log = logging.getLogger("stagecrew.zookeeper")
_log.addFilter(lambda record: record.levelno >= logging.INFO)
_log.addHandler(logging.NullHandler())


class AwayError(Exception):
    """There was no connection: nothing was sent."""


class OverError(Exception):
    """The session is over: nothing was sent."""


class NoAnswerError(Exception):
    """It may have been done, or may be done yet. Not when `sent` is false."""

    def __init__(self, message: str, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class _Handler(SequentialThreadingHandler):  # type: ignore[misc]
    """kazoo's threads, and connections that are made for one session only."""

    def __init__(self, session: ZooKeeperSession, context: ssl.SSLContext | None, patience: float) -> None:
        super().__init__()
        self._session, self._context, self._patience = session, context, patience
        self._socket: socket.socket | None = None
        #: Why there was no connection, last, and the error of the system.
        self.problem = "no server was tried yet"
        self.cause: Exception | None = None

    def create_connection(
        self, address: tuple[str, int], hostname: str | None = None, timeout: float | None = None, **options: Any
    ) -> socket.socket:
        if self._session.over:
            # What kazoo would connect to now is a new session, which has nothing to do with who uses this one.
            raise ConnectionAbortedError("the session is over")
        try:
            made = socket.create_connection(address, min(timeout or self._patience, self._patience))
            try:
                made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._context is not None:
                    made = self._context.wrap_socket(made, server_hostname=hostname)
            except BaseException:
                made.close()
                raise
        except (
            OSError,
            ValueError,
        ) as error:  # a name that TLS cannot verify is the latter, which would end kazoo's thread
            self.failed(f"{hostname or address[0]}:{address[1]}: {error}", error)
            raise ConnectionError(self.problem) from error
        self.failed(f"{hostname or address[0]}:{address[1]} does not answer", None)
        self._socket = made
        return made

    def failed(self, problem: str, cause: Exception | None) -> None:
        """There is no connection, for this reason."""
        self.problem, self.cause = problem, cause

    def abort(self) -> None:
        """Has kazoo notice that it waits in vain."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)


class _Stamp(SetData):  # type: ignore[misc]
    """The first operation of a transaction. It knows whether it was given to the network, and can be called back before."""

    def __new__(cls, path: str, value: bytes, version: int) -> _Stamp:
        made: _Stamp = super().__new__(cls, path, value, version)
        made._lock, made._sent, made._called_back = threading.Lock(), False, False
        return made

    _lock: threading.Lock
    _sent: bool
    _called_back: bool

    def call_back(self) -> bool:
        """Whether it is too late. If not, what kazoo still has in a queue fails at the server."""
        with self._lock:
            self._called_back = True
            return self._sent

    def serialize(self) -> bytearray:
        with self._lock:
            self._sent = self._sent or not self._called_back
            version = -2 if self._called_back else self.version
        return bytearray(SetData(self.path, self.data, version).serialize())


class ZooKeeperSession:
    """A session that begins when it connects, and is over for good when ZooKeeper says so.

    Listeners and threads of kazoo only set flags here; all else happens in the thread that calls.
    """

    def __init__(
        self, hosts: str, timeout: float, auth: Sequence[tuple[str, str]], acl: Any, context: ssl.SSLContext | None
    ) -> None:
        #: After how many seconds of silence it ends, as agreed with the server.
        self.timeout = timeout
        self._over = threading.Event()
        self.name: str | None = None
        self._connected = threading.Event()
        self._handler = _Handler(self, context, max(1.0, timeout / (1 + hosts.count(","))))
        self._kazoo = KazooClient(
            hosts, timeout, handler=self._handler, auth_data=auth, default_acl=acl, logger=_log,
            connection_retry={"max_tries": -1, "delay": 0.05, "max_delay": 1.0, "sleep_func": self._handler.sleep_func},
        )  # fmt: skip
        self._learn_timeout()
        self._learn_unresolved()
        self._kazoo.add_listener(self._listen)
        self._kazoo.start_async()

    @property
    def over(self) -> bool:
        return self._over.is_set()

    @property
    def connected(self) -> bool:
        return self._connected.is_set() and not self.over

    @property
    def problem(self) -> str:
        """Why there is no connection, as far as it is known."""
        return self._handler.problem

    def call(self, ask: Callable[[KazooClient], Any], due: float, stamp: _Stamp | None = None) -> Any:
        """Sends a request and waits for its answer until then (`time.monotonic`).

        Raises `AwayError`, `OverError`, `NoAnswerError`, and the answers of kazoo that are errors.
        """
        while not self._connected.wait(max(0.0, min(_LOOK, due - time.monotonic()))):
            if self._over.is_set():
                break
            if time.monotonic() >= due:
                raise AwayError(self.problem) from self._handler.cause
        if self._over.is_set():
            raise OverError
        asked = ask(self._kazoo)
        looked = False
        while True:
            try:
                return asked.get(timeout=max(0.0, min(_LOOK, due - time.monotonic())))
            except KazooTimeoutError:
                # The last answers of a session are a moment later than its end is known.
                if time.monotonic() < due and not looked:
                    looked = self._over.is_set()
                    continue
                raise NoAnswerError("no answer came", stamp is None or stamp.call_back()) from None
            except _DEFINITE:
                raise
            except Exception as error:
                raise NoAnswerError(type(error).__name__, stamp is None or stamp.call_back()) from error

    def multi(self, path: str, value: bytes, version: int, add: Callable[[Any], None], due: float) -> tuple[int, Any]:
        """A transaction that begins by putting `value` in place of this version at `path`.

        Answers the index of the operation that failed (0: that first one) and its error; -1 and the results when all was done.
        """
        stamp = _Stamp(path, value, version)

        def send(kazoo: KazooClient) -> Any:
            transaction = kazoo.transaction()
            transaction.operations.append(stamp)
            add(transaction)
            return transaction.commit_async()

        return failed(self.call(send, due, stamp))

    def close(self) -> None:
        """Ends the session, at the server too when that answers. Takes some seconds at most."""
        if not self._connected.is_set():
            self._handler.abort()
        self._over.set()
        ending = threading.Thread(target=self._end, name="stagecrew-zookeeper-close", daemon=True)
        ending.start()
        ending.join(_CLOSING)
        if ending.is_alive():
            self._handler.abort()
            ending.join(_CLOSING)

    def _end(self) -> None:
        with contextlib.suppress(Exception):
            self._kazoo.stop()
        with contextlib.suppress(Exception):
            self._kazoo.close()

    def _listen(self, state: str) -> None:
        if state == KazooState.CONNECTED:
            identity = self._kazoo.client_id
            name = session_name(identity[0]) if identity else None
            if self.name not in (None, name):
                self._over.set()
            self.name = name
            self._connected.set()
        else:
            self._connected.clear()
            if state == KazooState.LOST:
                self._over.set()

    def _learn_timeout(self) -> None:
        """Has kazoo tell what was agreed, which it keeps for itself: two thirds of it are its time-out of reading."""
        connect = self._kazoo._connection._connect

        def connected(*arguments: Any) -> tuple[float, float]:
            reading, connecting = connect(*arguments)
            self.timeout = reading * 1.5 / 1000
            return reading, connecting

        self._kazoo._connection._connect = connected

    def _learn_unresolved(self) -> None:
        """Keeps the error of the name service, which kazoo only logs."""
        expand = self._kazoo._connection._expand_client_hosts

        def expanded() -> Any:
            if not (found := expand()):
                for host, port in self._kazoo.hosts:
                    try:
                        socket.getaddrinfo(host, port, 0, 0, socket.IPPROTO_TCP)
                    except OSError as error:
                        self._handler.failed(f"{host}: {error}", error)
            return found

        self._kazoo._connection._expand_client_hosts = expanded


def failed(results: Sequence[Any]) -> tuple[int, Any]:
    """Which operation of a transaction failed, and how. Those before it are told as rolled back."""
    for index, result in enumerate(results):
        if isinstance(result, ZookeeperError) and not isinstance(result, RolledBackError):
            return index, result
    return -1, results


def session_name(owner: int) -> str:
    """How a session is named in the store: by the number that ZooKeeper gives to no other."""
    return f"{owner & 0xFFFF_FFFF_FFFF_FFFF:x}"
