"""The claim of a run: a process can change the job only while it holds the claim."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from stagecrew.recovery.jobs.fenced import FencedJobs, claim_fence
from stagecrew.recovery.jobs.keys import job_key
from stagecrew.recovery.leadership.fencing import FencedStore, fence
from stagecrew.recovery.retry import RETRY_TIMEOUT

if TYPE_CHECKING:
    from stagecrew.recovery.jobs.record import Run
    from stagecrew.recovery.state.storage import StateStorage
    from stagecrew.recovery.stores.contract import Store

__all__ = ["ClaimedRun"]


class ClaimedRun:
    """A run that this process has claimed.

    Writes through `jobs` are fenced by the claim: once another process holds the claim, they are refused.
    """

    def __init__(
        self,
        store: Store,
        storage: StateStorage,
        term: int,
        run: Run,
        claim: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._storage, self._term, self._clock = store, storage, term, clock
        self.run = run
        self.key = f"{job_key(run.job)}/claim"
        self.version = claim
        #: Whether this process itself is changing the version.
        self.renewing = False
        self.jobs = self._fenced_jobs()

    def renew(self) -> None:
        """Renews the claim and replaces `jobs`. Every later write through the previous `jobs` is refused."""
        self.renewing = True
        self.version = self.jobs.renew_claim(self.run.job, self.version, RETRY_TIMEOUT)
        self.jobs = self._fenced_jobs()
        self.renewing = False

    def _fenced_jobs(self) -> FencedJobs:
        fenced = FencedStore(self._store, fence(self._term), claim_fence(self.run.job, self.version))
        return FencedJobs(fenced, self._storage, self._clock)
