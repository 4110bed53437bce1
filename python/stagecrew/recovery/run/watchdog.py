"""The watchdog of a run: ends the process when it must not continue."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from stagecrew.errors import SessionLost, StoreUnavailable
from stagecrew.observability.error_summary import error_text
from stagecrew.recovery.leadership.fencing import HOLDER, TERM

if TYPE_CHECKING:
    from stagecrew.recovery.run.claim import ClaimedRun
    from stagecrew.recovery.stores.contract import Store

__all__ = ["RunWatchdog"]

#: How often the watchdog checks, in seconds.
_CHECK_PERIOD: Final = 0.25


class RunWatchdog:
    """Ends this process when its leader stops leading, its claim or its session is lost, or its parent has exited.

    The parent is the JVM of spark-submit, or the driver for a process that only finishes commits. If the store has a
    session timeout, the watchdog ends the process after two thirds of this time without a response, even while a
    request hangs. So the process ends before another one can take over.
    """

    def __init__(
        self, store: Store, term: int, claimed: ClaimedRun, end: Callable[[str], None], clock: Callable[[], float]
    ) -> None:
        self._store, self._term, self._claimed = store, term, claimed
        self._end, self._clock = end, clock
        self._last_response = clock()
        self._parent = os.getppid()
        self._stopped = threading.Event()
        self._end_lock = threading.Lock()

    def start(self) -> None:
        """Starts watching. `stop` ends it."""
        for check in (self.check, self.check_silence):
            name = f"stagecrew-{check.__name__.replace('_', '-')}"
            threading.Thread(target=self._watch, args=(check,), name=name, daemon=True).start()

    def stop(self) -> None:
        """Stops watching, because the job has ended. After this returns, the watchdog does not end the process."""
        with self._end_lock:
            self._stopped.set()

    def _watch(self, check: Callable[[], str | None]) -> None:
        while (reason := self._reason(check)) is None:
            if self._stopped.wait(_CHECK_PERIOD):
                return
        with self._end_lock:
            if not self._stopped.is_set():
                self._end(reason)

    @staticmethod
    def _reason(check: Callable[[], str | None]) -> str | None:
        try:
            return check()
        except Exception as error:  # a run that cannot be watched must not continue
            return f"the watchdog failed: {error_text(error)}"

    def check_silence(self) -> str | None:
        """Returns why this process must end according to its own clock, or None if it need not."""
        timeout, silence = self._store.timeout, self._clock() - self._last_response
        if timeout is not None and silence > timeout * 2 / 3:
            return f"the store has not responded for {silence:.1f} s"
        return None

    def check(self) -> str | None:
        """Checks the parent process and reads the store. Returns why this process must end, or None if it need not."""
        if os.getppid() != self._parent:
            return "the process that started it has ended"
        requested_at, expected = self._clock(), self._claimed.version
        try:
            term, holder = self._store.read(TERM), self._store.read(HOLDER)
            claim = self._store.read(self._claimed.key)
        except SessionLost as error:
            return f"its session at the store has ended: {error}"
        except StoreUnavailable:
            return self.check_silence()
        self._last_response = requested_at
        if term is None or term.version != self._term or holder is None:
            return f"its leader, of term {self._term}, no longer leads"
        renewed_here = self._claimed.renewing or self._claimed.version != expected
        if (claim is None or claim.version != expected) and not renewed_here:
            return "another run of the job was started, or the job was ended"
        return None
