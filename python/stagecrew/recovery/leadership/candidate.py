"""The candidate: campaigns for leadership, renews its lease in one thread, and runs its callbacks in another."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from stagecrew.errors import ConfigurationError, LeadershipLost, SessionLost, StagecrewError, StoreError
from stagecrew.observability.error_summary import error_text
from stagecrew.recovery.leadership.election import (
    Election,
    ElectionEvent,
    Granted,
    LeaseRequestFailed,
    Lost,
    Resigned,
    Revoked,
    Suspended,
    Ticked,
)
from stagecrew.recovery.leadership.fencing import TERM, FencedStore, fence
from stagecrew.recovery.leadership.lease_client import LeaseClient
from stagecrew.recovery.retry import campaign_backoff
from stagecrew.recovery.stores.contract import Operation, Store

__all__ = ["Candidate", "Leadership"]

_log = logging.getLogger("stagecrew")

#: How often a candidate sends a request to a store on this host, in seconds.
_LOCAL_PERIOD: Final = 0.25
#: How often a candidate sends a request to a store with a session timeout, in seconds. It sends requests more often if
#: the timeout is less than ten times this period.
_REMOTE_PERIOD: Final = 0.5
#: How long a candidate waits after a failed `on_grant`, so that others can lead first, in seconds.
_HOLD_OFF: Final = 1.0
#: How often a leader checks its deadline, without a request to the store, in seconds.
_CHECK_PERIOD: Final = 0.1
#: How long the threads may take to end after `close` has closed the store, in seconds. A store can take some seconds to
#: close.
_JOIN_TIMEOUT: Final = 20.0
#: How often it is logged that callbacks still block the campaign, in seconds.
_REMINDER_PERIOD: Final = 60.0


class Leadership:
    """One term of this process, which leads while `valid` is true. Any thread can use it."""

    def __init__(
        self,
        term: int,
        store: Store,
        is_valid: Callable[[Leadership], bool],
        handle: Callable[[ElectionEvent], object],
    ) -> None:
        self.term = term
        #: Why the term has ended; None while it lasts.
        self.reason: str | None = None
        self._is_valid, self._handle = is_valid, handle
        #: Fences every write by the term. Once the term has ended here or in the store, every write raises
        #: `LeadershipLost` and changes nothing.
        self.store: Store = _LeaderStore(self, store)

    @property
    def valid(self) -> bool:
        """Whether this process still leads, according to its own clock and connection. Once false, it stays false.

        This sends no request, so another process can already be leading when the caller uses the result. Actions that
        only the leader may take must be writes through `store`, or through a store that is fenced by `fence(term)`.
        """
        return self._is_valid(self)

    def check(self) -> None:
        """Raises `LeadershipLost` unless this leadership is valid."""
        if not self.valid:
            raise LeadershipLost(f"this process no longer leads in term {self.term}: {self.reason}")

    def end(self, reason: str) -> None:
        """Ends this leadership, so that another process can lead."""
        self._handle(Lost(reason, self.term))


class _LeaderStore(FencedStore):
    """The store of a leader. Once it knows that the leadership has ended, it refuses writes and sends no request."""

    def __init__(self, leadership: Leadership, store: Store) -> None:
        super().__init__(store, fence(leadership.term))
        self._leadership = leadership

    def transact(self, *operations: Operation) -> list[int | None]:
        """See `FencedStore`. Also raises `LeadershipLost` if the session has ended."""
        self._leadership.check()
        try:
            return super().transact(*operations)
        except LeadershipLost as error:
            self._leadership.end(str(error))
            raise
        except SessionLost as error:
            self._leadership.end(str(error))
            raise LeadershipLost(f"nothing was written: {error}") from error


class Candidate:
    """Campaigns for leadership until it is closed, and calls back when it starts and stops leading.

    * One thread calls `on_grant(leadership)` and `on_revoke(term, reason)` in turn. Each `on_grant` that started is
      followed by exactly one `on_revoke`. A grant that ended before its callback is not reported.
    * When leadership ends, `leadership.valid` is false immediately, even if `on_grant` is still running.
    * A session leads at most once. After a revocation, the candidate closes the session when `on_revoke` has returned,
      or after `callback_timeout` seconds. From then on, others can lead. When both callbacks have returned, the
      candidate campaigns again with a new session.
    * Exceptions that callbacks raise are logged. If `on_grant` raises, the candidate gives up leadership, and waits
      before it campaigns again, so that others can lead first.
    * If the store is unavailable, the candidate retries forever. In the meantime `error` says what is wrong.

    With ZooKeeper, a suspended leader (SIGSTOP) is replaced after the session timeout. When it resumes, it can no
    longer write, and notices that it no longer leads. With SQLite it is not replaced, because its session ends only
    with its process.

    `open_store` opens a new session each time; the candidate closes it. `clock` must be monotonic.
    """

    def __init__(
        self,
        open_store: Callable[[], Store],
        on_grant: Callable[[Leadership], None],
        on_revoke: Callable[[int, str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        period: float | None = None,
        callback_timeout: float = 30.0,
    ) -> None:
        if period is not None and period <= 0:
            raise ConfigurationError(f"period must be positive, not {period}")
        if callback_timeout < 0:
            raise ConfigurationError(f"callback_timeout must not be negative, but is {callback_timeout}")
        self._open_store, self._on_grant, self._on_revoke = open_store, on_grant, on_revoke
        self._clock, self._period, self._callback_timeout = clock, period, callback_timeout
        # Guards the five attributes below. While it is held, nothing but the clock is called.
        self._changed = threading.Condition()
        self._election = Election()
        self._granted: Leadership | None = None  # set from the grant until both callbacks have returned
        self._store: Store | None = None
        self._closing = False
        self._hold_off = 0.0
        #: Why the store cannot be used; None if no problem is known.
        self.error: BaseException | None = None
        self._threads = [
            threading.Thread(target=target, name=f"stagecrew-{name}", daemon=True)
            for target, name in ((self._campaign, "election"), (self._run_callbacks, "leadership"))
        ]
        self._start()

    def _start(self) -> None:
        for thread in self._threads:
            thread.start()

    @property
    def leadership(self) -> Leadership | None:
        """The valid leadership, or None if this process does not lead."""
        granted = self._granted
        return granted if granted is not None and granted.valid else None

    def close(self) -> bool:
        """Resigns. Idempotent; can be called at any time.

        Leadership ends immediately. Another process can lead when `on_revoke` has returned, or after
        `callback_timeout`.

        Returns whether all threads have ended. That is false if the store does not close, or if a callback is still
        running, for example because the callback itself calls this. The remaining threads end by themselves.
        """
        with self._changed:
            self._closing = True
            self._handle(Resigned())
            self._changed.notify_all()
        if threading.current_thread() in self._threads:
            return False
        self._wait_for_callbacks(self._callback_timeout)
        if (store := self._store) is not None:
            self._close_store(store)  # closes it here too, which ends a request that hangs
        deadline = time.monotonic() + _JOIN_TIMEOUT
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if alive := [thread.name for thread in self._threads if thread.is_alive()]:
            _log.error("the candidate was closed, but these threads are still running: %s", ", ".join(alive))
        return not alive

    def __enter__(self) -> Candidate:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- The election, from any thread

    def _handle(self, event: ElectionEvent, store: Store | None = None) -> Granted | Revoked | None:
        with self._changed:
            change = self._election.handle(event, self._clock())
            if isinstance(change, Granted):
                assert store is not None
                assert self._granted is None, "a session leads once"
                self._granted = Leadership(change.term, store, self._is_valid, self._handle)
            elif isinstance(change, Revoked):
                assert self._granted is not None
                self._granted.reason = change.reason
            if change is not None:
                self._changed.notify_all()
            return change

    def _is_valid(self, leadership: Leadership) -> bool:
        suspended = leadership.reason is None and leadership.store.suspended
        with self._changed:
            if leadership.reason is None:
                self._handle(Suspended() if suspended else Ticked())
            return leadership.reason is None

    # -- The election thread

    def _campaign(self) -> None:
        self._pause_campaign(0.0)
        while not self._closing:
            campaign_backoff(self._campaign_once, lambda: self._closing, self._pause_campaign)
            self._pause_campaign(0.0)

    def _pause_campaign(self, seconds: float) -> None:
        """Waits for `seconds` or the hold-off, whichever is longer, and then for the callbacks of the last term."""
        with self._changed:
            seconds, self._hold_off = max(seconds, self._hold_off), 0.0
            self._changed.wait_for(lambda: self._closing, seconds)
        while (term := self._wait_for_callbacks(_REMINDER_PERIOD, lambda: self._closing)) is not None:
            _log.warning("this process is not campaigning yet: the callbacks of term %d have not returned", term)

    def _wait_for_callbacks(self, seconds: float, must_stop: Callable[[], bool] = lambda: False) -> int | None:
        """Waits at most `seconds` for running callbacks to return. Returns the term of those that have not, if any.

        Also stops waiting, and returns None, as soon as `must_stop` returns true.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._granted is None or must_stop(), seconds)
            return None if self._granted is None or must_stop() else self._granted.term

    def _campaign_once(self) -> bool:
        """Campaigns with a new session until the session can no longer lead. Returns whether the store responded."""
        if self._closing:
            return True
        try:
            store = self._open_store()
        except BaseException as error:  # user code must not end this thread
            self._record_error(error)
            return False
        self._store = store
        has_response = False
        try:
            has_response = self._campaign_with(store)
        except BaseException as error:
            self._record_error(error)
        self._handle(Lost("its session is no longer used"))
        self._leave(store)
        self._store = None
        return has_response

    def _campaign_with(self, store: Store) -> bool:
        client = LeaseClient(store, self._clock)
        period = self._period or (_LOCAL_PERIOD if store.timeout is None else min(_REMOTE_PERIOD, store.timeout / 10))
        while self._send_request(client):
            with self._changed:
                self._changed.wait_for(lambda: self._is_used_up(client), period)
        return client.has_response

    def _is_used_up(self, client: LeaseClient) -> bool:
        """Returns whether the client's session can no longer lead, or this candidate is closing."""
        return self._closing or self._election.term != client.term

    def _send_request(self, client: LeaseClient) -> bool:
        """Sends one request and handles its outcome. Returns whether another request may follow."""
        with self._changed:
            if self._is_used_up(client):
                return False
        event = client.acquire_or_renew()
        if isinstance(event, Lost):
            self._handle(event)
            return False
        self._record_error(event.error if isinstance(event, LeaseRequestFailed) else None)
        if client.store.suspended:
            self._handle(Suspended())
        if isinstance(self._handle(event, client.store), Granted):
            _log.info("this process leads in term %d", client.term)
        with self._changed:
            # If the lease was acquired too late, this process does not lead, and closes the session.
            return not self._is_used_up(client)

    def _leave(self, store: Store) -> None:
        """Closes the session when the callbacks of its term have returned, or after the callback timeout."""
        if (term := self._wait_for_callbacks(self._callback_timeout)) is not None:
            _log.error(
                "the callbacks of term %d have not returned after %g s: another process can lead while they run",
                term, self._callback_timeout,
            )  # fmt: skip
        # Without a connection, the close would not reach the store, and nobody could lead until the session timeout.
        deadline = time.monotonic() + (store.timeout or 0.0)
        while store.suspended and not self._closing and time.monotonic() < deadline:
            try:
                store.read(TERM)
            except BaseException as error:
                if isinstance(error, SessionLost) or not isinstance(error, StoreError):
                    break
                with self._changed:
                    self._changed.wait_for(lambda: self._closing, _CHECK_PERIOD)
        self._close_store(store)

    @staticmethod
    def _close_store(store: Store) -> None:
        try:
            store.close()
        except BaseException:
            _log.exception("the session at the store could not be closed; it ends by itself")

    def _record_error(self, error: BaseException | None) -> None:
        """Logs a new kind of error once, not after each try."""
        if error is None and self.error is not None:
            _log.warning("the coordination store responds again")
        elif error is not None and type(error) is not type(self.error):
            unexpected = not isinstance(error, StagecrewError)
            _log.warning(
                "the candidate cannot use the coordination store, and tries again: %s", error_text(error),
                exc_info=unexpected,
            )  # fmt: skip
        self.error = error

    # -- The callback thread

    def _run_callbacks(self) -> None:
        while True:
            with self._changed:
                while not self._changed.wait_for(lambda: self._granted is not None or self._closing, 3600):
                    pass
                leadership = self._granted
            if leadership is None:
                return
            if leadership.valid:
                self._serve(leadership)
            with self._changed:
                self._granted = None
                self._changed.notify_all()

    def _serve(self, leadership: Leadership) -> None:
        try:
            self._on_grant(leadership)
        except BaseException as error:
            _log.exception("on_grant of term %d failed: this process gives up leadership", leadership.term)
            with self._changed:
                self._hold_off = _HOLD_OFF
            leadership.end(f"on_grant raised {error_text(error)}")
        while leadership.valid:
            # The election thread can be waiting for the store, so this thread checks the deadline itself.
            with self._changed:
                self._changed.wait_for(lambda: leadership.reason is not None, _CHECK_PERIOD)
        _log.warning("this process no longer leads in term %d: %s", leadership.term, leadership.reason)
        try:
            self._on_revoke(leadership.term, str(leadership.reason))
        except BaseException:
            _log.exception("on_revoke of term %d failed", leadership.term)
