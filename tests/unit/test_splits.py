"""The coordinator of splits, without Spark."""

from __future__ import annotations

import time

from stagecrew.operators.splits import SplitCoordinator
from stagecrew.testing import CoordinatorHarness


class SlowEnumerator:
    """Yields each split in time, but all splits together take longer than the timeout."""

    def splits(self):
        for number in range(30):
            time.sleep(0.1)
            yield number

    def locations(self, split):
        return ["h"]


def test_a_slow_enumerator_with_locations():
    """A slow enumerator does not fail its operator during read-ahead, as long as each request gets a split in time."""
    with CoordinatorHarness(lambda context: SplitCoordinator(context, SlowEnumerator(), 1.2)) as harness:
        task = harness.evaluation(subtask=0)
        started = time.monotonic()
        task.request((0, "h"))
        assert time.monotonic() - started < 2
        for index in range(1, 30):
            assert task.request((index, "h")) is not None
        assert task.request((30, "h")) is None
        assert harness.failure is None
