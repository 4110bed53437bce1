"""The progress of a job, as shown in the Spark UI: its leader, its run, and the states of its steps."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

__all__ = ["JobProgress"]

#: How many steps are kept. Beyond that, the step that ended first is dropped. A running step is never dropped.
_MAX_STEPS: Final = 200


class JobProgress:
    """The facts and the steps of one job. Sends them to the Spark UI after each change. Any thread can use it.

    A step is `running`, `finished`, `failed`, or `found` if an earlier run has stored its result.
    """

    def __init__(self, facts: Mapping[str, str], clock: Callable[[], float] = time.time) -> None:
        self._facts, self._clock = dict(facts), clock
        self._lock = threading.Lock()
        self._steps: dict[str, dict[str, Any]] = {}
        self._dropped = 0

    def record_step(self, name: str, state: str) -> None:
        """Records the new state of a step, and sends the progress."""
        now = int(self._clock() * 1000)
        with self._lock:
            previous = self._steps.get(name)
            started = previous["started"] if previous is not None and state != "running" else now
            self._steps[name] = {
                "name": name,
                "state": state,
                "started": started,
                "ended": 0 if state == "running" else now,
            }
            ended = [step for step in self._steps.values() if step["ended"]]
            if len(self._steps) > _MAX_STEPS and ended:
                del self._steps[min(ended, key=lambda step: step["ended"])["name"]]
                self._dropped += 1
        self.send()

    def send(self) -> None:
        """Sends the progress to the driver's JVM if a session is running in this process."""
        from stagecrew.session.builder import running_crew

        if (crew := running_crew()) is not None:
            crew.connection.send_job_progress(self.to_json())

    def ui(self) -> str | None:
        """The address of the Spark UI of the session in this process, or None without a session or without a UI."""
        from stagecrew.session.builder import running_crew

        crew = running_crew()
        return None if crew is None else crew.context.uiWebUrl

    def to_json(self) -> str:
        """Encodes the progress for the driver's JVM."""
        with self._lock:
            return json.dumps(
                {"facts": self._facts, "steps": list(self._steps.values()), "forgottenSteps": self._dropped}
            )
