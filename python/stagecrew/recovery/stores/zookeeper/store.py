"""A store for the processes of several hosts: ZooKeeper, with kazoo as its client."""

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
    SessionLost,
    StoreError,
    StoreRefused,
    StoreUnavailable,
)
from stagecrew.recovery.retry import retry_if_none, retry_on
from stagecrew.recovery.stores.contract import Entry, Operation, checked_key
from stagecrew.recovery.stores.validation import check_transaction, conflict_error, ensure_entries
from stagecrew.recovery.stores.zookeeper.operations import conflict_reason, plan_transaction
from stagecrew.recovery.stores.zookeeper.tls import tls_context

if TYPE_CHECKING:
    from stagecrew.recovery.stores.zookeeper.session import ZooKeeperSession

__all__ = ["ZooKeeperStore"]

_HOST: Final = r"([\w.-]+|\[[0-9a-fA-F:]+\])(:\d{1,5})?"
#: The value that is written instead of a transaction's token, so that the transaction can no longer be applied.
_FENCE: Final = b"fence"


class ZooKeeperStore:
    """A `Store` in ZooKeeper.

    The first call that needs a session opens it. After the session has ended, create a new `ZooKeeperStore`.

    Each session has an ephemeral entry, whose version is the session's sequence number. Every transaction increments
    this version and writes a token into the entry. So no transaction is applied after its session has ended, and none
    is applied twice, even if a lost request arrives late. If a response is lost, the entry shows whether the
    transaction was applied.

    If the store has credentials, clients with other credentials, or with none, cannot read or write anything. Without
    TLS, the credentials are sent in clear text.
    """

    def __init__(
        self,
        hosts: str,
        chroot: str,
        *,
        timeout: float = 10.0,
        credentials: str | None = None,
        tls: ssl.SSLContext | None = None,
        call_timeout: float | None = None,
    ) -> None:
        """`hosts` is `host:port,host2:port`. The store creates `chroot` if it does not exist.

        A session ends after `timeout` seconds of silence. The servers limit this time: see the property `timeout`.
        `credentials` is `user:password`. `call_timeout` is how many seconds a call waits for connections and responses;
        by default, `timeout`.
        """
        try:
            import kazoo  # noqa: F401
        except ImportError as error:
            raise ConfigurationError(
                "ZooKeeper needs kazoo, which is not installed: pip install 'stagecrew[zookeeper]'"
            ) from error
        if not re.fullmatch(rf"{_HOST}(,{_HOST})*", hosts):
            raise ConfigurationError("the hosts of ZooKeeper are invalid: write host:port,host2:port")
        if credentials is not None and not re.fullmatch(r"[^:]+:.+", credentials, re.DOTALL):
            raise ConfigurationError("the credentials for ZooKeeper are invalid: write user:password")
        if not timeout > 0:
            raise ConfigurationError(f"the session timeout is {timeout} s: it must be positive")
        self._root = "/" + checked_key(chroot.strip("/"))
        self._hosts, self._requested_timeout, self._tls = hosts, timeout, tls
        self._call_timeout = timeout if call_timeout is None else call_timeout
        self._credentials = credentials
        self._where = f"ZooKeeper at {hosts}{self._root}"
        self._process = os.getpid()
        #: Allows one transaction at a time, because each transaction takes the next sequence number.
        self._lock = threading.Lock()
        self._session: ZooKeeperSession | None = None
        #: Why the session has ended; None while it is alive.
        self._ended: str | None = None
        self._closed = threading.Event()
        #: The path of the session's own entry, and its current version.
        self._session_entry = ""
        self._sequence = 0
        self._tokens = itertools.count(1)
        #: The token of the last transaction, if its outcome is unknown.
        self._unknown_token: bytes | None = None

    @classmethod
    def from_options(
        cls, hosts: str, chroot: str, options: Sequence[tuple[str, str]], credentials: str | None
    ) -> ZooKeeperStore:
        """Creates a store with the options of a URL."""
        given = dict(options)
        unknown = set(given) - {"timeout", "ca", "certfile", "keyfile", "verify"}
        if unknown or len(given) != len(options) or given.get("verify", "true") not in ("true", "false"):
            raise ConfigurationError(
                "the options of the ZooKeeper URL are invalid: use timeout, ca, certfile, keyfile and verify (true "
                "or false), each at most once"
            )
        try:
            timeout = float(given.pop("timeout", "10"))
        except ValueError as error:
            raise ConfigurationError(
                "the timeout in the ZooKeeper URL is invalid: write a number of seconds"
            ) from error
        tls = tls_context(**given) if given else None
        return cls(hosts, chroot, timeout=timeout, credentials=credentials, tls=tls)

    def __repr__(self) -> str:
        return f"ZooKeeperStore({self._hosts!r}, {self._root!r})"

    # -- The contract

    @property
    def session(self) -> str:
        """See `Store`."""
        name = self._open_session(self._deadline()).name
        assert name is not None
        return name

    @property
    def timeout(self) -> float:
        """See `Store`. It is the requested timeout, until the server has set another one for the session."""
        return self._requested_timeout if self._session is None else self._session.timeout

    @property
    def suspended(self) -> bool:
        """See `Store`."""
        return self._ended is not None or self._session is None or not self._session.connected

    def ensure(self, *keys: str) -> None:
        """See `Store`."""
        ensure_entries(self, keys)

    def read(self, key: str) -> Entry | None:
        """See `Store`."""
        checked_key(key)
        found = self._read(operator.methodcaller("get_async", self._path(key)), self._deadline())
        if found is None:
            return None
        value, stat = found
        from stagecrew.recovery.stores.zookeeper.session import session_name

        return Entry(value, stat.version, session_name(stat.ephemeralOwner) if stat.ephemeralOwner else None)

    def children(self, key: str) -> list[str]:
        """See `Store`."""
        checked_key(key)
        return sorted(self._read(operator.methodcaller("get_children_async", self._path(key)), self._deadline()) or [])

    def transact(self, *operations: Operation) -> list[int | None]:
        """See `Store`."""
        check_transaction(operations)
        deadline = self._deadline()
        session = self._open_session(deadline)
        with self._exclusive_use(deadline):
            if self._unknown_token is not None:
                self._settle_outcome(session, self._unknown_token, deadline, is_current=False)
            versions = retry_if_none(lambda: self._try_transaction(session, operations, deadline))
            assert versions is not None, "only a deadline ends the tries"
            return versions

    def close(self) -> None:
        """See `Store`."""
        if os.getpid() != self._process:
            return
        self._ended = "the session is closed: open the store again"
        self._closed.set()
        session = self._session
        if session is not None:
            session.close()

    # -- Transactions

    def _try_transaction(
        self, session: ZooKeeperSession, operations: Sequence[Operation], deadline: float
    ) -> list[int | None] | None:
        """Returns the versions; None if this try was not applied, and never will be, so that another try is needed."""
        from stagecrew.recovery.stores.zookeeper import session as zk

        def current_version(key: str) -> int | None:
            stat = self._read(operator.methodcaller("exists_async", self._path(key)), deadline)
            return None if stat is None else int(stat.version)

        plan = plan_transaction(operations, self._path, current_version)
        token = b"%d" % next(self._tokens)
        try:
            index, result = session.multi(self._session_entry, token, self._sequence, plan.add_to, deadline)
        except zk.NoResponseError as error:
            if not error.sent:
                if time.monotonic() >= deadline:
                    raise self._unavailable(error) from error
                return None  # the next try waits for a connection
            return plan.versions if self._settle_outcome(session, token, deadline, is_current=True) else None
        except zk.NotConnectedError as error:
            raise self._unavailable(error) from error
        except zk.SessionEndedError as error:
            raise self._session_lost() from error
        except zk.ZookeeperError as error:
            raise self._refused(error) from error
        if index == -1:
            self._sequence += 1
            return plan.versions
        if index == 0:
            raise self._sequence_failed(result)
        reason = conflict_reason(operations[index - 1], result)
        if reason == "version" and index - 1 in plan.any_version_checks:
            if time.monotonic() > deadline:
                raise StoreUnavailable(
                    f"{operations[index - 1].key!r} changes too often to be checked: nothing was changed; try again"
                )
            return None
        raise conflict_error(operations, index - 1, reason) if reason else self._refused(result)

    def _settle_outcome(self, session: ZooKeeperSession, token: bytes, deadline: float, *, is_current: bool) -> bool:
        """Returns whether the transaction with this token was applied. If it was not, it never will be.

        To guarantee this, it increments the sequence number of the session, unless the transaction has done so.
        `is_current` is true if the caller waits for this transaction, and false if it waits for a later transaction.
        """
        from stagecrew.recovery.stores.zookeeper import session as zk

        self._unknown_token = token
        try:
            value, sequence = retry_on(lambda: self._advance_sequence(session, deadline), zk.NoResponseError)
        except (zk.NotConnectedError, zk.SessionEndedError) as error:
            if not is_current:
                unavailable = isinstance(error, zk.NotConnectedError)
                raise (self._unavailable(error) if unavailable else self._session_lost()) from error
            raise self._outcome_unknown() from error
        except zk.ZookeeperError as error:
            if is_current:
                raise self._outcome_unknown() from error
            raise self._sequence_failed(error) from error
        self._sequence, self._unknown_token = sequence, None
        return value == token

    def _advance_sequence(self, session: ZooKeeperSession, deadline: float) -> tuple[bytes, int]:
        """Returns the session's last token and sequence number. No earlier request can be applied after this."""
        from kazoo.exceptions import BadVersionError

        if time.monotonic() >= deadline:
            from stagecrew.recovery.stores.zookeeper.session import NotConnectedError

            raise NotConnectedError(session.problem)
        try:
            stat = session.call(
                operator.methodcaller("set_async", self._session_entry, _FENCE, self._sequence), deadline
            )
            return _FENCE, stat.version
        except BadVersionError:
            value, stat = session.call(operator.methodcaller("get_async", self._session_entry), deadline)
            return value, stat.version

    # -- Sessions

    def _open_session(self, deadline: float) -> ZooKeeperSession:
        if os.getpid() != self._process:
            raise ConfigurationError(
                f"the session at {self._where} belongs to process {self._process}, but this is a fork of it: open the "
                "store again in this process"
            )
        if self._session is None and self._ended is None:
            with self._exclusive_use(deadline):
                if self._session is None and self._ended is None:
                    self._session = self._new_session(deadline)
                    if self._closed.is_set():  # it was closed in the meantime
                        self._session.close()
        session = self._session
        if self._ended is not None or session is None:
            raise SessionLost(self._ended)
        if session.ended:
            raise self._session_lost()
        return session

    def _new_session(self, deadline: float) -> ZooKeeperSession:
        from stagecrew.recovery.stores.zookeeper import session as zk

        try:
            # Everything that a failed session did is idempotent, or is deleted when the session ends.
            return retry_on(
                lambda: self._try_session(deadline), zk.NoResponseError, zk.SessionEndedError, deadline=deadline
            )
        except (zk.NoResponseError, zk.SessionEndedError, zk.NotConnectedError) as error:
            raise self._unavailable(error) from error
        except zk.ZookeeperError as error:
            raise self._refused(error) from error

    def _try_session(self, deadline: float) -> ZooKeeperSession:
        from stagecrew.recovery.stores.zookeeper import layout
        from stagecrew.recovery.stores.zookeeper.session import ZooKeeperSession

        auth = [("digest", self._credentials)] if self._credentials else []
        acl = layout.acl_of(self._credentials)
        session = ZooKeeperSession(self._hosts, self._requested_timeout, auth, acl, self._tls)
        try:
            layout.prepare(session, self._root, acl, self._where, deadline)
            self._session_entry = layout.register(session, self._root, deadline)
        except BaseException:
            session.close()
            raise
        return session

    def _read(self, send: Callable[[Any], Any], deadline: float) -> Any:
        """Returns the response of a read, or None if the node does not exist."""
        from kazoo.exceptions import NoNodeError

        from stagecrew.recovery.stores.zookeeper import session as zk

        session = self._open_session(deadline)
        try:
            return retry_on(lambda: session.call(send, deadline), zk.NoResponseError, deadline=deadline)
        except NoNodeError:
            return None
        except (zk.NoResponseError, zk.NotConnectedError) as error:
            raise self._unavailable(error) from error
        except zk.SessionEndedError as error:
            raise self._session_lost() from error
        except zk.ZookeeperError as error:
            raise self._refused(error) from error

    @contextlib.contextmanager
    def _exclusive_use(self, deadline: float) -> Iterator[None]:
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise StoreUnavailable(
                f"other threads have used the session at {self._where} for {self._call_timeout:g} s: nothing was "
                "changed; try again"
            )
        try:
            yield
        finally:
            self._lock.release()

    def _deadline(self) -> float:
        return time.monotonic() + self._call_timeout

    def _path(self, key: str) -> str:
        return f"{self._root}/entries/{key}"

    # -- Errors

    def _unavailable(self, error: Exception) -> StoreUnavailable:
        return StoreUnavailable(
            f"{self._where} did not respond within {self._call_timeout:g} s ({error}): nothing was changed; check the "
            "servers, then try again"
        )

    def _session_lost(self) -> SessionLost:
        self._ended = (
            self._ended
            or f"the session at {self._where} has ended, and its ephemeral entries are deleted: open the store again"
        )
        return SessionLost(self._ended)

    def _outcome_unknown(self) -> PossiblyInconsistentError:
        return PossiblyInconsistentError(
            f"{self._where}: it is unknown whether the transaction was applied: repeat it to find out"
        )

    def _sequence_failed(self, error: Exception) -> StoreError:
        from kazoo.exceptions import BadVersionError, NoNodeError

        if isinstance(error, NoNodeError | BadVersionError):  # another client has deleted or changed the entry
            return self._session_lost()
        return self._refused(error)

    def _refused(self, error: Exception) -> StoreError:
        from kazoo.exceptions import AuthFailedError, NoAuthError

        if isinstance(error, NoAuthError | AuthFailedError):
            client = "these credentials" if self._credentials else "clients without credentials"
            return StoreRefused(
                f"{self._where} does not accept {client}: nothing was changed; set STAGECREW_STORE_CREDENTIALS to the "
                f"user:password of the user that created the store"
            )
        return StoreRefused(
            f"{self._where} refused the request ({type(error).__name__}): nothing was changed; see the log of the "
            "server"
        )
