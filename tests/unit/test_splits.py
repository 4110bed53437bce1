"""The coordinator of splits, without Spark."""

from __future__ import annotations

import pickle
import time

import pytest

from stagecrew.operators.splitlog import HELD
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


@pytest.mark.slow
def test_a_restored_coordinator_reads_a_slow_enumerator_again():
    """After a restore, the splits that were assigned before are enumerated again over several short requests."""
    with CoordinatorHarness(lambda context: SplitCoordinator(context, SlowEnumerator(), 1.2)) as harness:
        task = harness.evaluation(subtask=0)
        for index in range(25):
            assert task.request((index, "h")) is not None
        checkpoint = harness.checkpoint()
    with CoordinatorHarness(lambda context: SplitCoordinator(context, SlowEnumerator(), 1.2)) as harness:
        harness.reset(checkpoint)
        task, found = harness.evaluation(subtask=0), []
        while (reply := timed_request(task, (len(found), "h"))) is not None:
            if reply != HELD:
                found.append(pickle.loads(reply))
        assert found == list(range(30))
        assert harness.failure is None


def timed_request(task, request):
    """Sends a request. It must be handled in about the time for which a request may read ahead."""
    started = time.monotonic()
    reply = task.request(request)
    assert time.monotonic() - started < 1
    return reply


@pytest.mark.slow
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


@pytest.mark.parametrize("is_live", [True, False])
def test_a_reset_during_an_action_fails_the_topology(is_live):
    """A reset while tasks read splits fails the topology: otherwise splits of finished tasks would be read twice."""
    with CoordinatorHarness(lambda context: SplitCoordinator(context, ["a", "b", "c"], 60.0)) as harness:
        finished, other = harness.evaluation(subtask=0), harness.evaluation(subtask=1)
        assert pickle.loads(finished.request((0, "h"))) == "a"
        finished.finish()
        assert pickle.loads(other.request((0, "h"))) == "b"
        if not is_live:
            other.finish()
        harness.reset()
        if is_live:
            assert "was reset while tasks were reading splits" in str(harness.failure)
        else:
            assert harness.failure is None
