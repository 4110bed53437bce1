"""Percentiles computed from a histogram's buckets, compared with the exact percentiles of the same times."""

from __future__ import annotations

import math
import threading

from hypothesis import given, settings
from hypothesis import strategies as st

from stagecrew.coordination.latency import LatencyHistogram

micros = st.one_of(st.integers(0, 200), st.integers(0, 10_000_000), st.integers(0, 1 << 40))


def times_of(values) -> LatencyHistogram:
    times = LatencyHistogram()
    for value in values:
        times.add((value + 0.5) / 1e6)
    return times


def is_close(found: int, exact: int) -> bool:
    return abs(found - exact) <= exact / 64


@settings(derandomize=True, max_examples=200)
@given(values=st.lists(micros, min_size=1, max_size=60))
def test_percentiles_are_exact_within_a_sixty_fourth(values):
    """Each percentile is within 1/64 of the exact nearest-rank percentile.

    Count and maximum are exact, and the percentiles are in ascending order.
    """
    values = [min(value, (1 << 40) - 1) for value in values]
    found, ordered = times_of(values).percentiles(), sorted(values)
    assert (found["count"], found["max"]) == (len(values), ordered[-1])
    for name, part in (("p50", 0.50), ("p95", 0.95), ("p99", 0.99)):
        assert is_close(found[name], ordered[math.ceil(round(part * len(values), 9)) - 1]), name
    assert found["p50"] <= found["p95"] <= found["p99"] <= found["max"]


@settings(derandomize=True, max_examples=50)
@given(one=st.lists(micros, max_size=20), other=st.lists(micros, max_size=20))
def test_a_sum_has_all_times(one, other):
    """The sum of two histograms has the percentiles of all their times, even if both histograms were read before."""
    both, parts = LatencyHistogram(), [LatencyHistogram(), LatencyHistogram()]
    for part, values in zip(parts, (one, other), strict=True):
        part.sum = both
        for value in values:
            part.add((value + 0.5) / 1e6)
        assert part.percentiles() == times_of(values).percentiles()
    assert both.percentiles() == times_of([*one, *other]).percentiles()


def test_no_times_and_extreme_times():
    """Without times, count and percentiles are zero. A negative time counts as zero, and a huge time as the longest."""
    assert times_of([]).percentiles() == {"count": 0, "p50": 0, "p95": 0, "p99": 0, "max": 0}
    times = LatencyHistogram()
    times.add(-1.0)
    assert times.percentiles() == {"count": 1, "p50": 0, "p95": 0, "p99": 0, "max": 0}
    times.add(1e30)
    assert times.percentiles()["max"] == 1 << 40


def test_all_times_of_concurrent_threads_are_counted():
    """No time is lost when four threads add times concurrently."""
    times = LatencyHistogram()
    threads = [threading.Thread(target=lambda: [times.add(n / 1e6) for n in range(5000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert times.percentiles()["count"] == 20_000
