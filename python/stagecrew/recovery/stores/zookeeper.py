"""A store for processes of several hosts: ZooKeeper, with kazoo as its client."""

from __future__ import annotations

import contextlib
import itertools
import operator
import os
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from stagecrew.errors import (
    ConfigurationError,
    PossiblyInconsistentError,
    RecoveryMisused,
    SessionLost,
    StoreError,
    StoreRefused,
    StoreUnavailable,
)
from stagecrew.recovery.stores.contract import Check, Create, Delete, Entry, Operation, Replace, checked_key
from stagecrew.recovery.stores.requests import checked, conflict, ensured

if TYPE_CHECKING:
    from stagecrew.recovery.stores.zksession import ZooKeeperSession

__all__ = ["ZooKeeperStore"]

_HOST: Final = r"([\w.-]+|\[[0-9a-fA-F:]+\])(:\d{1,5})?"
_HIGHEST: Final = (1 << 31) - 1


class ZooKeeperStore:
    """See `Store`. A session begins with the first call that needs one; when it is over, open another store.

    Each transaction also renumbers an ephemeral entry of the session: none is done without its session, and none twice, even if
    one that was lost on the way arrives late. When an answer is lost, that entry tells whether the transaction was done.

    With credentials, whoever has others or none can read and write nothing. They go over the network in clear without TLS.
    """

    def __init__(
        self,
        hosts: str,
        chroot: str,
        *,
        timeout: float = 10.0,
        credentials: str | None = None,
        tls: ssl.SSLContext | None = None,
        patience: float | None = None,
    ) -> None:
        """`hosts` is `host:port,host2:port`; `chroot` is made when it is not there.

        `timeout`: after how many seconds of silence a session ends; servers have limits, see the property. `credentials`:
        `user:password`. `patience`: how many seconds a call waits for connections and answers; as long as `timeout`, if not given.
        """
        try:
            import kazoo  # noqa: F401
        except ImportError as error:
            raise ConfigurationError("ZooKeeper needs kazoo: pip install 'stagecrew[zookeeper]'") from error
        if not re.fullmatch(rf"{_HOST}(,{_HOST})*", hosts):
            raise RecoveryMisused("the hosts of ZooKeeper are written host:port,host2:port")
        if credentials is not None and not re.fullmatch(r"[^:]+:.+", credentials, re.DOTALL):
            raise RecoveryMisused("the credentials for ZooKeeper are written user:password")
        if not timeout > 0:
            raise RecoveryMisused(f"a session cannot end after {timeout} s of silence: give more than 0")
        self._root = "/" + checked_key(chroot.strip("/"))
        self._hosts, self._asked, self._tls = hosts, timeout, tls
        self._patience = timeout if patience is None else patience
        self._credentials = credentials
        self._where = f"ZooKeeper at {hosts}{self._root}"
        self._process = os.getpid()
        #: One transaction at a time: each carries the number behind the last one's.
        self._turns = threading.Lock()
        self._session: ZooKeeperSession | None = None
        self._over: str | None = None
        self._closed = threading.Event()
        self._own = ""
        self._number = 0
        self._tokens = itertools.count(1)
        #: The token of a transaction that nobody knows the end of.
        self._unknown: bytes | None = None

    @classmethod
    def from_options(
        cls, hosts: str, chroot: str, options: Sequence[tuple[str, str]], credentials: str | None
    ) -> ZooKeeperStore:
        """From what stands in a URL."""
        given = dict(options)
        unknown = set(given) - {"timeout", "ca", "certfile", "keyfile", "verify"}
        if unknown or len(given) != len(options) or given.get("verify", "true") not in ("true", "false"):
            raise RecoveryMisused(
                "options of ZooKeeper are timeout, ca, certfile, keyfile and verify (true or false), each once"
            )
        try:
            timeout = float(given.pop("timeout", "10"))
        except ValueError as error:
            raise RecoveryMisused("the timeout of a session is a number of seconds") from error
        tls = tls_context(**given) if given else None
        return cls(hosts, chroot, timeout=timeout, credentials=credentials, tls=tls)

    def __repr__(self) -> str:
        return f"ZooKeeperStore({self._hosts!r}, {self._root!r})"

    # -- The contract

    @property
    def session(self) -> str:
        """See `Store`."""
        name = self._opened(self._due()).name
        assert name is not None
        return name

    @property
    def timeout(self) -> float:
        """See `Store`. What was asked for, until there is a session; then what was agreed with the server."""
        return self._asked if self._session is None else self._session.timeout

    @property
    def suspended(self) -> bool:
        """See `Store`."""
        return self._over is not None or self._session is None or not self._session.connected

    def ensure(self, *keys: str) -> None:
        """See `Store`."""
        ensured(self, keys)

    def read(self, key: str) -> Entry | None:
        """See `Store`."""
        found = self._reading(operator.methodcaller("get_async", self._path(key)), self._due())
        if found is None:
            return None
        value, stat = found
        from stagecrew.recovery.stores.zksession import session_name

        return Entry(value, stat.version, session_name(stat.ephemeralOwner) if stat.ephemeralOwner else None)

    def children(self, key: str) -> list[str]:
        """See `Store`."""
        return sorted(self._reading(operator.methodcaller("get_children_async", self._path(key)), self._due()) or [])

    def transact(self, *operations: Operation) -> list[int | None]:
        """See `Store`."""
        checked(operations)
        due = self._due()
        session = self._opened(due)
        with self._turn(due):
            if self._unknown is not None:
                self._settle(session, self._unknown, due, ours=False)
            while True:
                answers = self._try(session, operations, due)
                if answers is not None:
                    return answers

    def close(self) -> None:
        """See `Store`."""
        if os.getpid() != self._process:
            return
        self._over = "the session is closed: open a store"
        self._closed.set()
        session = self._session
        if session is not None:
            session.close()

    # -- Transactions

    def _try(self, session: ZooKeeperSession, operations: Sequence[Operation], due: float) -> list[int | None] | None:
        """The versions; None when another try is needed, and this one will never be done."""
        from stagecrew.recovery.stores import zksession as zk

        add, answers, read = self._plan(operations, due)
        token = b"%d" % next(self._tokens)
        try:
            index, result = session.multi(self._own, token, self._number, add, due)
        except zk.NoAnswerError as error:
            if not error.sent:
                if time.monotonic() >= due:
                    raise self._away(error) from error
                return None  # the next try waits for a connection
            return answers if self._settle(session, token, due, ours=True) else None
        except zk.AwayError as error:
            raise self._away(error) from error
        except zk.OverError as error:
            raise self._lost() from error
        except zk.ZookeeperError as error:
            raise self._refused(error) from error
        if index == -1:
            self._number += 1
            return answers
        if index == 0:
            raise self._stamp_failed(result)
        why = self._why(operations[index - 1], result)
        if why == "version" and index - 1 in read:
            if time.monotonic() > due:
                raise StoreUnavailable(
                    f"{operations[index - 1].key!r} changes too often to be checked: nothing was done"
                )
            return None
        raise conflict(operations, index - 1, why) if why else self._refused(result)

    def _settle(self, session: ZooKeeperSession, token: bytes, due: float, *, ours: bool) -> bool:
        """Whether the transaction of this token was done. If it was not, it never will be.

        For that the session's entry gets the next number, unless it has it already.
        """
        from stagecrew.recovery.stores import zksession as zk

        self._unknown = token
        try:
            while True:
                with contextlib.suppress(zk.NoAnswerError):
                    value, number = self._numbered(session, due)
                    break
        except (zk.AwayError, zk.OverError) as error:
            if not ours:
                raise (self._away(error) if isinstance(error, zk.AwayError) else self._lost()) from error
            raise self._possibly() from error
        except zk.ZookeeperError as error:
            if ours:
                raise self._possibly() from error
            raise self._stamp_failed(error) from error
        self._number, self._unknown = number, None
        return value == token

    def _numbered(self, session: ZooKeeperSession, due: float) -> tuple[bytes, int]:
        """The last token, and the number of the session's entry, where one that is on its way cannot change it any more."""
        from kazoo.exceptions import BadVersionError

        if time.monotonic() >= due:
            from stagecrew.recovery.stores.zksession import AwayError

            raise AwayError(session.problem)
        try:
            stat = session.call(operator.methodcaller("set_async", self._own, _FENCE, self._number), due)
            return _FENCE, stat.version
        except BadVersionError:
            value, stat = session.call(operator.methodcaller("get_async", self._own), due)
            return value, stat.version

    def _plan(
        self, operations: Sequence[Operation], due: float
    ) -> tuple[Callable[[Any], None], list[int | None], set[int]]:
        """What is sent, what its answer is when all is done, and for which operations the version was read before.

        ZooKeeper does not answer the version that it checks: any version is sent as the one that was read.
        """
        answers: list[int | None] = []
        steps: list[Callable[[Any], None]] = []
        now: dict[str, int | None] = {}
        read: set[int] = set()
        for index, one in enumerate(operations):
            key, path = one.key, f"{self._root}/entries/{one.key}"
            version: int | None
            match one:
                case Create(value=value, ephemeral=ephemeral):
                    version = 0
                    steps.append(operator.methodcaller("create", path, value, ephemeral=ephemeral))
                case Replace(value=value, version=before):
                    version = before + 1
                    steps.append(operator.methodcaller("set_data", path, value, before))
                case Delete(version=before):
                    version = None
                    steps.append(operator.methodcaller("delete", path, -1 if before is None else before))
                case Check(version=before):
                    version = before
                    if before is None and now.get(key) is not None:
                        version = now[key]
                    elif before is None:
                        read.add(index)
                        found = self._reading(operator.methodcaller("exists_async", path), due)
                        version = _HIGHEST if found is None else found.version
                    steps.append(operator.methodcaller("check", path, version))
            now[key] = version
            answers.append(version)

        def add(transaction: Any) -> None:
            for step in steps:
                step(transaction)

        return add, answers, read

    @staticmethod
    def _why(operation: Operation, error: Exception) -> str | None:
        from kazoo import exceptions as kazoo

        match error:
            case kazoo.NodeExistsError():
                return "exists"
            case kazoo.NoNodeError():
                return "no parent" if isinstance(operation, Create) else "missing"
            case kazoo.NoChildrenForEphemeralsError():
                return "no parent"
            case kazoo.BadVersionError():
                return "version"
            case kazoo.NotEmptyError():
                return "not empty"
        return None

    # -- Sessions

    def _opened(self, due: float) -> ZooKeeperSession:
        if os.getpid() != self._process:
            raise RecoveryMisused(
                f"the session at {self._where} is process {self._process}'s, and this is a fork of it: open a store here"
            )
        if self._session is None and self._over is None:
            with self._turn(due):
                if self._session is None and self._over is None:
                    self._session = self._begin(due)
                    if self._closed.is_set():  # meanwhile
                        self._session.close()
        session = self._session
        if self._over is not None or session is None:
            raise SessionLost(self._over)
        if session.over:
            raise self._lost()
        return session

    def _begin(self, due: float) -> ZooKeeperSession:
        from stagecrew.recovery.stores import zklayout as layout
        from stagecrew.recovery.stores import zksession as zk

        while True:
            auth = [("digest", self._credentials)] if self._credentials else []
            acl = layout.acl_of(self._credentials)
            session = zk.ZooKeeperSession(self._hosts, self._asked, auth, acl, self._tls)
            try:
                layout.prepare(session, self._root, acl, self._where, due)
                self._own = layout.register(session, self._root, due)
                return session
            except (zk.NoAnswerError, zk.OverError) as error:
                # Whatever this session did is idempotent, or ends with it.
                session.close()
                if time.monotonic() >= due:
                    raise self._away(error) from error
            except zk.AwayError as error:
                session.close()
                raise self._away(error) from error
            except zk.ZookeeperError as error:
                session.close()
                raise self._refused(error) from error
            except BaseException:
                session.close()
                raise

    def _reading(self, ask: Callable[[Any], Any], due: float) -> Any:
        from kazoo.exceptions import NoNodeError

        from stagecrew.recovery.stores import zksession as zk

        session = self._opened(due)
        while True:
            try:
                return session.call(ask, due)
            except NoNodeError:
                return None
            except zk.NoAnswerError as error:
                if time.monotonic() >= due:
                    raise self._away(error) from error
            except zk.AwayError as error:
                raise self._away(error) from error
            except zk.OverError as error:
                raise self._lost() from error
            except zk.ZookeeperError as error:
                raise self._refused(error) from error

    @contextlib.contextmanager
    def _turn(self, due: float) -> Iterator[None]:
        if not self._turns.acquire(timeout=max(0.0, due - time.monotonic())):
            raise StoreUnavailable(
                f"for {self._patience:g} s other threads have used the session at {self._where}: nothing was done"
            )
        try:
            yield
        finally:
            self._turns.release()

    def _due(self) -> float:
        return time.monotonic() + self._patience

    def _path(self, key: str) -> str:
        return f"{self._root}/entries/{checked_key(key)}"

    # -- Errors

    def _away(self, error: Exception) -> StoreUnavailable:
        return StoreUnavailable(f"{self._where} did not answer within {self._patience:g} s ({error}): nothing was done")

    def _lost(self) -> SessionLost:
        self._over = self._over or f"the session at {self._where} is over, and what it held is gone: open another store"
        return SessionLost(self._over)

    def _possibly(self) -> PossiblyInconsistentError:
        return PossiblyInconsistentError(
            f"{self._where}: nobody knows whether the transaction was done; repeating it tells"
        )

    def _stamp_failed(self, error: Exception) -> StoreError:
        from kazoo.exceptions import BadVersionError, NoNodeError

        if isinstance(error, NoNodeError | BadVersionError):  # others may have deleted or written it
            return self._lost()
        return self._refused(error)

    def _refused(self, error: Exception) -> StoreError:
        from kazoo.exceptions import AuthFailedError, NoAuthError

        if isinstance(error, NoAuthError | AuthFailedError):
            return StoreRefused(
                f"{self._where} does not let {'these credentials' if self._credentials else 'us without credentials'} in: set "
                f"STAGECREW_STORE_CREDENTIALS to those of its first user, user:password; nothing was done"
            )
        return StoreRefused(f"{self._where} refuses it ({type(error).__name__}): nothing was done")


_FENCE: Final = b"fence"


def tls_context(
    ca: str | None = None, certfile: str | None = None, keyfile: str | None = None, verify: str = "true"
) -> ssl.SSLContext:
    """What a URL says of TLS. Without `ca`, the system's authorities are believed."""
    try:
        context = ssl.create_default_context(cafile=ca)
        if certfile or keyfile:
            # An encrypted key is refused; nobody is asked for a password.
            context.load_cert_chain(certfile or keyfile or "", keyfile, password="")
    except (OSError, ssl.SSLError) as error:
        raise RecoveryMisused(
            f"the certificates for ZooKeeper cannot be read: {error} ({ca}, {certfile}, {keyfile})"
        ) from error
    if verify == "false":
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
