"""The leadership requests of one session: acquires a term, then renews it."""

from __future__ import annotations

from collections.abc import Callable

from stagecrew.errors import SessionLost, StoreConflict, StoreError
from stagecrew.recovery.leadership.election import Acquired, ElectionEvent, LeaseRequestFailed, Lost, Refused, Renewed
from stagecrew.recovery.leadership.fencing import HOLDER, TERM, LeaderInfo, fence
from stagecrew.recovery.stores.contract import Check, Create, Entry, Replace, Store

__all__ = ["LeaseClient"]


class LeaseClient:
    """Acquires and renews the lease of one session, one request at a time. Only one thread may use it.

    An acquisition is one transaction. If its outcome is unknown, the client repeats the same transaction until the
    outcome is known, because a read could only show that the transaction is not applied *yet*.
    """

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self.store, self._clock = store, clock
        #: The term that the store has given to this session.
        self.term: int | None = None
        #: Whether the store has responded to any request.
        self.has_response = False
        self._ensured = False
        #: An acquisition whose outcome is unknown.
        self._pending: LeaderInfo | None = None

    def acquire_or_renew(self) -> ElectionEvent:
        """Sends one request: an acquisition if this session has no term, otherwise a renewal. Returns its outcome."""
        try:
            event = self._acquire() if self.term is None else self._renew(self.term)
            self.has_response = True
            return event
        except SessionLost as error:
            return Lost(str(error))
        except StoreError as error:
            return LeaseRequestFailed(error)

    def _acquire(self) -> ElectionEvent:
        if self._pending is None:
            if not self._ensured:
                self.store.ensure(TERM)
                self._ensured = True
            # A standby only reads, because a refused acquisition would cost a write on every server of a quorum.
            if (holder := self.store.read(HOLDER)) is not None:
                return self._refused(holder)
            if (last := self.store.read(TERM)) is None:
                self._ensured = False
                return Refused()
            self._pending = LeaderInfo.of_this_process(last.version + 1, self.store.session)
        info, value, requested_at = self._pending, self._pending.to_bytes(), self._clock()
        try:
            # Both values describe this leader, so they differ from the values of every other process.
            self.store.transact(Create(HOLDER, value, ephemeral=True), Replace(TERM, value, info.term - 1))
        except StoreConflict:
            holder = self.store.read(HOLDER)
            if holder is None or (holder.value, holder.session) != (value, self.store.session):
                self._pending = None
                return Refused() if holder is None else self._refused(holder)
            # An earlier try of this acquisition was applied.
        self._pending, self.term = None, info.term
        return Acquired(info.term, requested_at, self.store.timeout)

    def _refused(self, holder: Entry) -> ElectionEvent:
        if holder.session == self.store.session:
            return Lost("this session holds a term that was not granted to it")
        return Refused()

    def _renew(self, term: int) -> ElectionEvent:
        """Renews the lease with a transaction that changes nothing. It fails without a quorum or a live session."""
        requested_at = self._clock()
        try:
            self.store.transact(fence(term), Check(HOLDER, 0))
        except StoreConflict as conflict:
            return Lost(f"another process leads, or no process does: {conflict}")
        return Renewed(term, requested_at)
