"""The driver process: a candidate that reconciles all jobs while it leads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from stagecrew.errors import LeadershipLost, SessionLost, StagecrewError
from stagecrew.observability.error_summary import error_text
from stagecrew.recovery.driver.process import TERMINATE_TIMEOUT
from stagecrew.recovery.driver.reconciler import JobReconciler
from stagecrew.recovery.jobs.fenced import FencedJobs
from stagecrew.recovery.leadership.candidate import Candidate, Leadership

if TYPE_CHECKING:
    from stagecrew.recovery.driver.launcher import Launcher
    from stagecrew.recovery.state.storage import StateStorage
    from stagecrew.recovery.stores.contract import Store

__all__ = ["Driver"]

_log = logging.getLogger("stagecrew")

#: The pause between two passes over the jobs, in seconds.
_PASS_PERIOD: Final = 0.2


class Driver:
    """Campaigns until it is closed, and reconciles all jobs while it leads.

    A job is removed `keep` seconds after its end, or never if `keep` is None.
    """

    def __init__(
        self,
        open_store: Callable[[], Store],
        storage: StateStorage,
        launcher: Launcher,
        at_once: int = 16,
        keep: float | None = None,
    ) -> None:
        self._storage, self._launcher, self._at_once, self._keep = storage, launcher, at_once, keep
        self._leader: _LeaderThread | None = None
        self._candidate = Candidate(open_store, self._on_grant, self._on_revoke)

    def close(self) -> bool:
        """Resigns, and terminates the processes of this driver. The next leader continues their jobs. Idempotent.

        Returns whether everything has ended. See `Candidate.close`.
        """
        return self._candidate.close()

    def _on_grant(self, leadership: Leadership) -> None:
        self._leader = _LeaderThread(leadership, self._storage, self._launcher, self._at_once, self._keep)
        self._leader.start()

    def _on_revoke(self, term: int, reason: str) -> None:
        leader, self._leader = self._leader, None
        if leader is not None:
            leader.stop()


class _LeaderThread(threading.Thread):
    """Reconciles all jobs during one term."""

    def __init__(
        self, leadership: Leadership, storage: StateStorage, launcher: Launcher, at_once: int, keep: float | None
    ) -> None:
        super().__init__(name=f"stagecrew-term-{leadership.term}", daemon=True)
        self._leadership, self._stopped = leadership, threading.Event()
        self._storage, self._launcher, self._at_once, self._keep = storage, launcher, at_once, keep

    def run(self) -> None:
        """See `threading.Thread`."""
        reconciler: JobReconciler | None = None
        try:
            while not self._stopped.is_set() and self._leadership.valid:
                try:
                    if reconciler is None:
                        jobs = FencedJobs(self._leadership.store, self._storage)
                        reconciler = JobReconciler(
                            jobs, self._leadership.term, self._launcher, self._at_once, keep=self._keep
                        )
                    reconciler.reconcile()
                except (LeadershipLost, SessionLost):
                    return
                except StagecrewError as error:
                    _log.warning("this leader could not complete a pass over its jobs, and will retry: %s", error)
                except Exception as error:
                    _log.exception("this leader cannot continue, and gives up its leadership")
                    self._leadership.end(f"it cannot continue: {error_text(error)}")
                    return
                self._stopped.wait(_PASS_PERIOD)
        finally:
            if reconciler is not None:
                reconciler.stop()

    def stop(self) -> None:
        """Stops the thread, which terminates its processes. Returns within a bounded time."""
        self._stopped.set()
        self.join(3 * TERMINATE_TIMEOUT)
