"""The results of `make bench`: medians, ratios of rounds, goals, and the tables of the documentation."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from measurements import (  # noqa: E402 (in the folder of the benchmarks)
    Figure,
    Goal,
    Measurement,
    at_least,
    at_most,
    number,
    percentiles,
    ratio_at_least,
    ratio_at_most,
)

PUBLISHED = sorted((Path(__file__).parents[2] / "docs" / "assets" / "bench").glob("*.json"))


def test_a_ratio_is_that_of_single_rounds() -> None:
    """A slow hour, which affects both sides of a round, does not change the ratio."""
    one = Measurement("m", "us", [1.0, 10.0, 2.0, 4.0, 3.0], "peer", [2.0, 20.0, 4.0, 8.0, 6.0])
    assert (one.ratio, one.interval) == (0.5, (0.5, 0.5))


def test_the_interval_contains_the_ratio_and_narrows_with_more_rounds() -> None:
    """The 95 % interval contains the median, is within the range, and is narrower with more rounds."""
    few = Measurement("m", "", [1.0, 1.1, 1.2, 0.9, 0.8], "peer", [1.0] * 5)
    many = Measurement("m", "", few.ours * 20, "peer", [1.0] * 100)
    for one in (few, many):
        low, high = one.interval
        assert 0.8 <= low <= one.ratio <= high <= 1.2
    assert many.interval[1] - many.interval[0] < few.interval[1] - few.interval[0]
    assert Measurement("m", "", [1.0] * 4, "peer", [1.0] * 4).interval is None


@pytest.mark.parametrize(
    ("goal", "ours", "theirs", "met"),
    [
        (at_most(5), [5.0], [], True),
        (at_most(5), [5.1], [], False),
        (at_least(5), [5.0], [], True),
        (at_least(5), [4.9], [], False),
        (ratio_at_most(0.5), [5.0], [10.0], True),
        (ratio_at_most(0.5), [6.0], [10.0], False),
        (ratio_at_least(0.5), [5.0], [10.0], True),
        (ratio_at_least(0.5), [4.0], [10.0], False),
        (ratio_at_most(0.5), [4.0], [], False),
        (None, [4.0], [], None),
    ],
)
def test_goals(goal: Goal | None, ours: list[float], theirs: list[float], met: bool | None) -> None:
    """A goal bounds the median, or the ratio to the peer. A ratio without a peer misses it."""
    assert Measurement("m", "us", ours, "peer" if theirs else "", theirs, goal).is_met is met


def test_percentiles_are_those_of_each_round() -> None:
    """A round has its own median and 99th percentile, and the goals apply to the first peer only."""
    rounds = [[float(one) for one in range(101)], [7.0] * 3]
    found = list(percentiles("m", "us", {"stagecrew": rounds, "a": rounds, "b": rounds}, (at_most(1), None)))
    assert [(one.name, one.peer, one.ours, one.goal) for one in found] == [
        ("m, p50", "a", [50.0, 7.0], at_most(1)),
        ("m, p50", "b", [50.0, 7.0], None),
        ("m, p99", "a", [99.0, 7.0], None),
        ("m, p99", "b", [99.0, 7.0], None),
    ]


def test_a_figure_is_read_as_it_was_written(tmp_path: Path) -> None:
    """The JSON of a figure contains everything, and its table names ratio, goal and commit."""
    measured = Measurement("m", "us", [1.0, 2.0], "peer", [2.0, 4.0], ratio_at_most(0.4))
    about = {"commit": "abc", "date": "2026-11-25", "cores": 2, "python": "3.11", "pyspark": "4.3"}
    figure = Figure("f", [measured], [1.25], about, {"title": {"stagecrew": [1.0]}})
    figure.write(tmp_path)
    assert Figure.read(tmp_path / "f.json") == figure
    assert figure.markdown().splitlines()[2:] == [
        "| m | 1.50 us (1.00 to 2.00) | peer: 3.00 us (2.00 to 4.00) | 0.500 | ≤ 0.400 of the peer: missed |",
        "",
        "Commit `abc`, 2026-11-25: 2 cores, Python 3.11, PySpark 4.3, load 1.2 to 1.2.",
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.01234, "0.0123"), (1.0, "1.00"), (12.34, "12.3"), (123.4, "123"), (291_000.4, "291,000")],
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    """Numbers have at least three significant digits."""
    assert number(value) == text


def test_each_published_figure_has_a_chart_and_is_in_the_documentation() -> None:
    """Each figure in the documentation has its JSON, its chart and its place, and at least five rounds where it has any."""
    for path in PUBLISHED:
        figure = Figure.read(path)
        assert path.with_suffix(".svg").exists()
        page = (path.parents[2] / "reference" / "performance.md").read_text()
        assert f"<!-- bench: {figure.name} -->" in page
        assert all(len(one.ours) == 1 or len(one.ours) >= 5 for one in figure.measurements)
        assert "changes" not in figure.about["commit"]
