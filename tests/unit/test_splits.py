"""The coordinator of splits, without Spark."""

from __future__ import annotations

import time

from stagecrew.operators.splits import SplitCoordinator
from stagecrew.testing import CoordinatorHarness


class Slow:
    """Gives each split in time, but not all of them together."""

    def splits(self):
        for number in range(30):
            time.sleep(0.1)
            yield number

    def locations(self, split):
        return ["h"]


def test_a_slow_enumerator_with_locations():
    """The enumerator is late when no split comes in time, and not during read-ahead: a task needs one split only."""
    with CoordinatorHarness(lambda context: SplitCoordinator(context, Slow(), 1.2)) as harness:
        task = harness.evaluation(subtask=0)
        started = time.monotonic()
        task.request((0, "h"))
        assert time.monotonic() - started < 2
        for index in range(1, 30):
            assert task.request((index, "h")) is not None
        assert task.request((30, "h")) is None
        assert harness.failure is None
