"""What people see of a stored job while it runs: who leads, which run this is, and how far its steps are."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

__all__ = ["JobProgress"]

#: How many steps are shown: those that run, and those that ended last.
_STEPS: Final = 200


class JobProgress:
    """The facts and the steps of one job. Whoever shows them is told after each change; what that raises is nothing to the job.

    Steps are `running`, `finished`, `failed`, or `found`: stored by a run before. Usable from any thread.
    """

    def __init__(self, facts: Mapping[str, str], clock: Callable[[], float] = time.time) -> None:
        self._facts, self._clock = dict(facts), clock
        self._lock = threading.Lock()
        self._steps: dict[str, dict[str, Any]] = {}
        self._forgotten = 0

    def step(self, name: str, state: str) -> None:
        """A step is in this state now."""
        now = int(self._clock() * 1000)
        with self._lock:
            before = self._steps.get(name)
            began = before["started"] if before is not None and state != "running" else now
            self._steps[name] = {
                "name": name,
                "state": state,
                "started": began,
                "ended": 0 if state == "running" else now,
            }
            ended = [one for one in self._steps.values() if one["ended"]]
            if len(self._steps) > _STEPS and ended:
                del self._steps[min(ended, key=lambda one: one["ended"])["name"]]
                self._forgotten += 1
        self.tell()

    def tell(self) -> None:
        """Tells the driver's JVM, where a session runs in this process."""
        from stagecrew.session.builder import running_crew

        if (crew := running_crew()) is not None:
            crew.connection.send_job_progress(self.to_json())

    def to_json(self) -> str:
        """As the driver's JVM reads it."""
        with self._lock:
            return json.dumps(
                {"facts": self._facts, "steps": list(self._steps.values()), "forgottenSteps": self._forgotten}
            )
