"""A process that wants to lead: its questions to the store, and the threads that ask them and tell what came of it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from stagecrew.errors import LeadershipLost, RecoveryMisused, SessionLost, StagecrewError, StoreConflict, StoreError
from stagecrew.recovery.election import (
    HOLDER,
    TERM,
    Acquired,
    Election,
    Fenced,
    Granted,
    Heard,
    LeaderInfo,
    Lost,
    Refused,
    Renewed,
    Resigned,
    Revoked,
    Suspended,
    Ticked,
    Unanswered,
    fence,
)
from stagecrew.recovery.stores.contract import Check, Create, Entry, Operation, Replace, Store

__all__ = ["Contender", "Leadership", "LeaseClient"]

_log = logging.getLogger("stagecrew")

#: How often a leader and a standby look, where the host is one; and at most, where the store has a time-out.
_LOCAL: Final = 0.25
_REMOTE: Final = 0.5
#: How long one waits before the store is opened again, at first and at most.
_BACKOFF: Final = 0.1
_BACKOFF_MOST: Final = 5.0
#: How long others may lead first, behind an `on_grant` that failed.
_HOLD_OFF: Final = 1.0
#: How often a leader looks whether it still is, without asking the store.
_WATCH: Final = 0.1
#: What the store's own calls may take behind its `close`; the contract says "some seconds".
_STORE: Final = 20.0


class LeaseClient:
    """What one session asks the store about leadership, one question at a time. Called by one thread.

    An acquisition is one transaction. Where its outcome is unknown the same one is asked again until it is known: reading could
    only say that it is not done *yet*.
    """

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self.store, self._clock = store, clock
        #: The one that the store has given to this session.
        self.term: int | None = None
        #: Whether the store has answered any.
        self.answered = False
        self._ensured = False
        #: An acquisition that was asked for, and not answered.
        self._asked: LeaderInfo | None = None

    def ask(self) -> Heard:
        """For a term, until there is one; whether it still lasts, from then on."""
        try:
            heard = self._acquire() if self.term is None else self._renew(self.term)
            self.answered = True
            return heard
        except SessionLost as error:
            return Lost(str(error))
        except StoreError as error:
            return Unanswered(error)

    def _acquire(self) -> Heard:
        if self._asked is None:
            if not self._ensured:
                self.store.ensure(TERM)
                self._ensured = True
            # A standby only reads: where the store is a quorum, an acquisition that is refused would cost all of it a write.
            if (holder := self.store.read(HOLDER)) is not None:
                return self._held(holder)
            if (last := self.store.read(TERM)) is None:
                self._ensured = False
                return Refused()
            self._asked = LeaderInfo.of_this_process(last.version + 1, self.store.session)
        info, value, asked_at = self._asked, self._asked.to_bytes(), self._clock()
        try:
            # Both name the leader, so that both differ from what any other would write.
            self.store.transact(Create(HOLDER, value, ephemeral=True), Replace(TERM, value, info.term - 1))
        except StoreConflict:
            holder = self.store.read(HOLDER)
            if holder is None or (holder.value, holder.session) != (value, self.store.session):
                self._asked = None
                return Refused() if holder is None else self._held(holder)
            # It had been done the first time.
        self._asked, self.term = None, info.term
        return Acquired(info.term, asked_at, self.store.timeout)

    def _held(self, holder: Entry) -> Heard:
        if holder.session == self.store.session:
            return Lost("this session holds a term that was not granted to it")
        return Refused()

    def _renew(self, term: int) -> Heard:
        """Changes nothing, but is a transaction: who is cut off from the quorum, or whose session is over, has none answered."""
        asked_at = self._clock()
        try:
            self.store.transact(fence(term), Check(HOLDER, 0))
        except StoreConflict as conflict:
            return Lost(f"the store has another leader, or none: {conflict}")
        return Renewed(term, asked_at)


class Leadership:
    """One term in which this process leads, for as long as it is `valid`. Usable from any thread."""

    def __init__(
        self, term: int, store: Store, look: Callable[[Leadership], bool], hear: Callable[[Heard], None]
    ) -> None:
        self.term = term
        #: Why it is over; None while it is not.
        self.reason: str | None = None
        self._look, self._hear = look, hear
        #: Every write is fenced by the term. `LeadershipLost`, and nothing is done, once the term is over here or in the store.
        self.store: Store = _Led(self, store)

    @property
    def valid(self) -> bool:
        """Whether this process still leads, by its own clock and connection. Once false, always false.

        The look is cheap and asks nobody, so another may lead already when it is used: what must not happen then goes through
        `store`, or through one fenced by `fence(term)`.
        """
        return self._look(self)

    def check(self) -> None:
        """Raises `LeadershipLost` unless it is valid."""
        if not self.valid:
            raise LeadershipLost(f"this process does not lead in term {self.term} any more: {self.reason}")

    def over(self, reason: str) -> None:
        """Ends it: it is revoked, and another may lead."""
        self._hear(Lost(reason, self.term))


class _Led(Fenced):
    """The store of a leader: refuses at once what is known to come too late."""

    def __init__(self, leadership: Leadership, store: Store) -> None:
        super().__init__(store, fence(leadership.term))
        self._leadership = leadership

    def transact(self, *operations: Operation) -> list[int | None]:
        """See `Fenced`. That the session is over is `LeadershipLost` too."""
        self._leadership.check()
        try:
            return super().transact(*operations)
        except LeadershipLost as error:
            self._leadership.over(str(error))
            raise
        except SessionLost as error:
            self._leadership.over(str(error))
            raise LeadershipLost(f"nothing was written: {error}") from error


class Contender:
    """Campaigns from now on until it is closed, and tells when it leads and when it does not any more.

    * `on_grant(leadership)` and `on_revoke(term, reason)` are called one after the other on one thread of their own; each
      `on_grant` that began is followed by exactly one `on_revoke`. A grant that is over before it is told is not told.
    * However long `on_grant` takes, `leadership.valid` is false at once when leadership ends.
    * A session leads once. Behind a revocation it is left, so that others can lead, when `on_revoke` has returned, or `ending`
      seconds later; then the campaign goes on with a new session, and not before both have returned.
    * What they raise is logged. Behind an `on_grant` that raised, leadership is given up, and others may lead first.
    * A store that cannot be reached is tried again, for ever; `error` says what is wrong meanwhile.

    Not promised: that a leader that is stopped, and not dead, is replaced where a session ends with its process alone (SQLite).
    At ZooKeeper it is, after the session's time-out; when it goes on, it writes nothing more and hears that it does not lead.

    `open_store` gives a new session each time, which is closed here. `clock` must not go back.
    """

    def __init__(
        self,
        open_store: Callable[[], Store],
        on_grant: Callable[[Leadership], None],
        on_revoke: Callable[[int, str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        period: float | None = None,
        ending: float = 30.0,
    ) -> None:
        if (period is not None and period <= 0) or ending < 0:
            raise RecoveryMisused(f"period={period} must be more than 0 seconds, and ending={ending} no less")
        self._open_store, self._on_grant, self._on_revoke = open_store, on_grant, on_revoke
        self._clock, self._period, self._ending = clock, period, ending
        self._changed = threading.Condition()
        # Under `_changed`, where nothing else is called but the clock, not even the log:
        self._election = Election()
        self._granted: Leadership | None = None  # until its callbacks have returned
        self._store: Store | None = None
        self._closing = False
        self._hold_off = 0.0
        #: Why the store cannot be used; None when it can, as far as is known.
        self.error: BaseException | None = None
        self._threads = [
            threading.Thread(target=target, name=f"stagecrew-{name}", daemon=True)
            for target, name in ((self._campaign, "election"), (self._call_back, "leadership"))
        ]
        self._start()

    def _start(self) -> None:
        for thread in self._threads:
            thread.start()

    @property
    def leadership(self) -> Leadership | None:
        """The one that is valid; None when this process does not lead."""
        granted = self._granted
        return granted if granted is not None and granted.valid else None

    def close(self) -> bool:
        """Resigns: leadership ends at once, and another can lead when `on_revoke` has returned, or after `ending` seconds.

        Repeatable, at any moment. Answers whether all is over: not when a callback is still running, as when it is called
        from one, or when the store does not let go. What is left ends by itself.
        """
        with self._changed:
            self._closing = True
            self._hear(Resigned())
            self._changed.notify_all()
        if threading.current_thread() in self._threads:
            return False
        self._busy(self._ending)
        if (store := self._store) is not None:
            self._close(store)  # here too, so that a question that hangs is over
        due = time.monotonic() + _STORE
        for thread in self._threads:
            thread.join(max(0.0, due - time.monotonic()))
        if alive := [thread.name for thread in self._threads if thread.is_alive()]:
            _log.error("a contender was closed, but has not ended: %s", ", ".join(alive))
        return not alive

    def __enter__(self) -> Contender:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- what is known, from any thread

    def _hear(self, heard: Heard, store: Store | None = None) -> Granted | Revoked | None:
        with self._changed:
            output = self._election.hear(heard, self._clock())
            if isinstance(output, Granted):
                assert store is not None
                assert self._granted is None, "a session leads once"
                self._granted = Leadership(output.term, store, self._look, self._hear_of)
            elif isinstance(output, Revoked):
                assert self._granted is not None
                self._granted.reason = output.reason
            if output is not None:
                self._changed.notify_all()
            return output

    def _hear_of(self, heard: Heard) -> None:
        self._hear(heard)

    def _look(self, leadership: Leadership) -> bool:
        suspended = leadership.reason is None and leadership.store.suspended
        with self._changed:
            if leadership.reason is None:
                self._hear(Suspended() if suspended else Ticked())
            return leadership.reason is None

    # -- the thread that asks

    def _campaign(self) -> None:
        pause = 0.0
        while self._may_campaign(pause):
            answered = False
            try:
                store = self._open_store()
            except BaseException as error:  # user code; the host lives
                self._failed(error)
            else:
                self._store = store
                try:
                    answered = self._campaign_with(store)
                except BaseException as error:
                    self._failed(error)
                self._hear(Lost("its session is not used any more"))
                self._leave(store)
                self._store = None
            pause = 0.0 if answered else min(_BACKOFF_MOST, max(_BACKOFF, pause * 2))

    def _may_campaign(self, pause: float) -> bool:
        with self._changed:
            pause, self._hold_off = max(pause, self._hold_off), 0.0
            self._changed.wait_for(lambda: self._closing, pause)
        while (term := self._busy(60.0, lambda: self._closing)) is not None:
            _log.warning("no campaign: the callbacks of term %d have not returned", term)
        return not self._closing

    def _busy(self, seconds: float, enough: Callable[[], bool] = lambda: False) -> int | None:
        """Waits so long for callbacks to return. Answers the term of those that have not."""
        with self._changed:
            self._changed.wait_for(lambda: self._granted is None or enough(), seconds)
            return None if self._granted is None or enough() else self._granted.term

    def _campaign_with(self, store: Store) -> bool:
        """Until this session cannot lead, or not any more. Answers whether the store has answered anything."""
        questions = LeaseClient(store, self._clock)
        period = self._period or (_LOCAL if store.timeout is None else min(_REMOTE, store.timeout / 10))
        while self._turn(questions):
            with self._changed:
                self._changed.wait_for(lambda: self._over(questions), period)
        return questions.answered

    def _over(self, questions: LeaseClient) -> bool:
        return self._closing or self._election.term != questions.term

    def _turn(self, questions: LeaseClient) -> bool:
        """One question, and what follows. Answers whether there may be another."""
        with self._changed:
            if self._over(questions):
                return False
        heard = questions.ask()
        if isinstance(heard, Lost):
            self._hear(heard)
            return False
        self._failed(heard.error if isinstance(heard, Unanswered) else None)
        if questions.store.suspended:
            self._hear(Suspended())
        if isinstance(self._hear(heard, questions.store), Granted):
            _log.info("this process leads, in term %d", questions.term)
        with self._changed:
            # An acquisition that came too late is not led with, and the session left.
            return not self._over(questions)

    def _leave(self, store: Store) -> None:
        """Gives the session back when nothing runs any more that began with it."""
        if (term := self._busy(self._ending)) is not None:
            _log.error("the callbacks of term %d run on, for %g s now: another may lead", term, self._ending)
        # While the connection is down, closing would tell nobody, and the session hold its term until its time-out.
        due = time.monotonic() + (store.timeout or 0.0)
        while store.suspended and not self._closing and time.monotonic() < due:
            try:
                store.read(TERM)
            except BaseException as error:
                if isinstance(error, SessionLost) or not isinstance(error, StoreError):
                    break
                with self._changed:
                    self._changed.wait_for(lambda: self._closing, _WATCH)
        self._close(store)

    @staticmethod
    def _close(store: Store) -> None:
        try:
            store.close()
        except BaseException:
            _log.exception("the session at the store could not be closed; it ends by itself")

    def _failed(self, error: BaseException | None) -> None:
        """Says it once, not each time that it is tried."""
        if error is None and self.error is not None:
            _log.warning("the coordination store answers again")
        elif error is not None and type(error) is not type(self.error):
            surprising = not isinstance(error, StagecrewError)
            _log.warning("no campaign, it is tried again: %s: %s", type(error).__name__, error, exc_info=surprising)
        self.error = error

    # -- the thread that tells

    def _call_back(self) -> None:
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
            _log.exception("on_grant of term %d failed: leadership is given up", leadership.term)
            with self._changed:
                self._hold_off = _HOLD_OFF
            leadership.over(f"on_grant raised {type(error).__name__}: {error}")
        while leadership.valid:
            # The other thread may be held up by the store: that time is over is seen here.
            with self._changed:
                self._changed.wait_for(lambda: leadership.reason is not None, _WATCH)
        _log.warning("this process does not lead in term %d any more: %s", leadership.term, leadership.reason)
        try:
            self._on_revoke(leadership.term, str(leadership.reason))
        except BaseException:
            _log.exception("on_revoke of term %d failed", leadership.term)
