"""Percentiles out of buckets, beside those of the times themselves."""

from __future__ import annotations

import math
import threading

from hypothesis import given, settings
from hypothesis import strategies as st

from stagecrew.coordination.latency import LatencyHistogram

micros = st.one_of(st.integers(0, 200), st.integers(0, 10_000_000), st.integers(0, 1 << 40))


def of(values) -> LatencyHistogram:
    times = LatencyHistogram()
    for value in values:
        times.add((value + 0.5) / 1e6)
    return times


def close(found: int, exact: int) -> bool:
    return abs(found - exact) <= exact / 64


@settings(deadline=None, derandomize=True, max_examples=200)
@given(values=st.lists(micros, min_size=1, max_size=60))
def test_percentiles_are_those_of_the_times_but_for_a_sixty_fourth(values):
    """Each percentile is within 1/64 of the nearest rank's; count and maximum are exact; no percentile is above the next."""
    values = [min(value, (1 << 40) - 1) for value in values]
    found, ordered = of(values).percentiles(), sorted(values)
    assert (found["count"], found["max"]) == (len(values), ordered[-1])
    for name, part in (("p50", 0.50), ("p95", 0.95), ("p99", 0.99)):
        assert close(found[name], ordered[math.ceil(round(part * len(values), 9)) - 1]), name
    assert found["p50"] <= found["p95"] <= found["p99"] <= found["max"]


@settings(deadline=None, derandomize=True, max_examples=50)
@given(one=st.lists(micros, max_size=20), other=st.lists(micros, max_size=20))
def test_a_sum_is_as_if_all_had_been_added_to_it(one, other):
    """The sum of two has the percentiles of both lists, when both were looked at."""
    both, parts = LatencyHistogram(), [LatencyHistogram(), LatencyHistogram()]
    for part, values in zip(parts, (one, other), strict=True):
        part.sum = both
        for value in values:
            part.add((value + 0.5) / 1e6)
        assert part.percentiles() == of(values).percentiles()
    assert both.percentiles() == of([*one, *other]).percentiles()


def test_none_the_least_and_the_most():
    """Nothing has zeros; a time that went back counts as none, and what is beyond all bounds as the longest."""
    assert of([]).percentiles() == {"count": 0, "p50": 0, "p95": 0, "p99": 0, "max": 0}
    times = LatencyHistogram()
    times.add(-1.0)
    assert times.percentiles() == {"count": 1, "p50": 0, "p95": 0, "p99": 0, "max": 0}
    times.add(1e30)
    assert times.percentiles()["max"] == 1 << 40


def test_nothing_is_lost_between_threads():
    """What four threads add is all there."""
    times = LatencyHistogram()
    threads = [threading.Thread(target=lambda: [times.add(n / 1e6) for n in range(5000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert times.percentiles()["count"] == 20_000
