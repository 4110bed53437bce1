"""The results of a benchmark: the values of each round, their medians and ranges, and the goals."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import os
import pathlib
import platform
import statistics
import subprocess
from collections.abc import Iterable, Mapping

import numpy as np

#: The number of samples from which the interval of a ratio is computed.
SAMPLES = 10_000


@dataclasses.dataclass(frozen=True)
class Goal:
    """A bound of a measurement's median, or of its ratio to the peer."""

    bound: float
    of: str = "value"
    at_least: bool = False

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {number(self.bound)}" + (" of the peer" if self.of == "ratio" else "")

    def is_met(self, measured: float) -> bool:
        """Whether this value meets the goal."""
        return measured >= self.bound if self.at_least else measured <= self.bound


def at_most(bound: float) -> Goal:
    """The median is at most this value."""
    return Goal(bound)


def at_least(bound: float) -> Goal:
    """The median is at least this value."""
    return Goal(bound, at_least=True)


def ratio_at_most(bound: float) -> Goal:
    """The ratio to the peer is at most this value."""
    return Goal(bound, of="ratio")


def ratio_at_least(bound: float) -> Goal:
    """The ratio to the peer is at least this value."""
    return Goal(bound, of="ratio", at_least=True)


@dataclasses.dataclass(frozen=True)
class Measurement:
    """A quantity that was measured in several rounds.

    A round has one value of stagecrew and, where there is a peer, one of the peer. They were measured one after the
    other, so that the load of the machine affects both. So the ratio of a round is fairer than the ratio of medians.
    """

    name: str
    unit: str
    ours: list[float]
    peer: str = ""
    theirs: list[float] = dataclasses.field(default_factory=list)
    goal: Goal | None = None

    @property
    def ratios(self) -> list[float]:
        """The ratio to the peer in each round. Empty without a peer."""
        return [one / other for one, other in zip(self.ours, self.theirs, strict=True)] if self.theirs else []

    @property
    def ratio(self) -> float | None:
        """The median of the ratios."""
        return statistics.median(self.ratios) if self.theirs else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the median ratio, by bootstrap. None with fewer than five rounds."""
        if len(self.ratios) < 5:
            return None
        samples = np.random.default_rng(1).choice(self.ratios, (SAMPLES, len(self.ratios)))
        low, high = np.percentile(np.median(samples, axis=1), (2.5, 97.5))
        return float(low), float(high)

    @property
    def is_met(self) -> bool | None:
        """Whether the goal is met. None without a goal."""
        if self.goal is None:
            return None
        measured = self.ratio if self.goal.of == "ratio" else statistics.median(self.ours)
        return measured is not None and self.goal.is_met(measured)

    def row(self) -> list[str]:
        """The cells of the table: name, stagecrew, peer, ratio, goal."""
        ratio = ""
        if self.ratio is not None:
            ratio = number(self.ratio)
            if self.interval is not None:
                ratio += " ({} to {})".format(*map(number, self.interval))
        goal = "" if self.goal is None else f"{self.goal}: {'met' if self.is_met else 'missed'}"
        theirs = f"{self.peer}: {spread(self.theirs, self.unit)}" if self.theirs else ""
        return [self.name, spread(self.ours, self.unit), theirs, ratio, goal]


COLUMNS = ["measurement", "stagecrew", "peer", "ratio (95 % interval)", "goal"]


def spread(values: list[float], unit: str) -> str:
    """The median of some rounds with its unit, and their range."""
    text = f"{number(statistics.median(values))} {unit}".strip()
    return text if len(values) == 1 else f"{text} ({number(min(values))} to {number(max(values))})"


def number(value: float) -> str:
    """A number with at least three significant digits."""
    size = abs(value)
    return f"{value:,.0f}" if size >= 100 or value == 0 else f"{value:.1f}" if size >= 10 else f"{value:#.3g}"


def percentiles(name: str, unit: str, sides: Mapping[str, list[list[float]]], goals: Iterable[Goal | None] = ()):
    """Measurements of the median and of the 99th percentile of each round.

    `sides` has the values of each round of stagecrew, and of each peer. The goals are those of the median and of the
    99th percentile; they apply to the first peer.
    """
    goals = dict(zip((50, 99), goals, strict=False))
    ours, *peers = (
        {part: [float(np.percentile(of, part)) for of in rounds] for part in (50, 99)} for rounds in sides.values()
    )
    names = list(sides)[1:]
    for part in (50, 99):
        if not peers:
            yield Measurement(f"{name}, p{part}", unit, ours[part], goal=goals.get(part))
        for peer, theirs in zip(names, peers, strict=True):
            goal = goals.get(part) if peer == names[0] else None
            yield Measurement(f"{name}, p{part}", unit, ours[part], peer, theirs[part], goal)


@dataclasses.dataclass(frozen=True)
class Figure:
    """The measurements of one figure, and where they were measured."""

    name: str
    measurements: list[Measurement]
    #: The load average of the machine during the rounds.
    load: list[float]
    about: dict[str, str | int]
    #: Values that grow with a number: the title, and the values of each line.
    series: dict[str, dict[str, list[float]]] = dataclasses.field(default_factory=dict)

    def write(self, folder: pathlib.Path) -> None:
        """Writes the figure as JSON."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.name}.json").write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @staticmethod
    def read(path: pathlib.Path) -> Figure:
        """Reads a figure that `write` wrote."""
        found = json.loads(path.read_text())
        measurements = [
            Measurement(**{**one, "goal": one["goal"] and Goal(**one["goal"])}) for one in found.pop("measurements")
        ]
        return Figure(measurements=measurements, **found)

    def markdown(self) -> str:
        """The table of the measurements, and where they were measured."""
        cells = [one.row() for one in self.measurements]
        used = [number for number in range(len(COLUMNS)) if any(row[number] for row in cells)]
        rows = [[row[number] for number in used] for row in (COLUMNS, ["---"] * len(COLUMNS), *cells)]
        about = self.about
        load = f", load {min(self.load):.1f} to {max(self.load):.1f}" if self.load else ""
        where = (
            f"Commit `{about['commit']}`, {about['date']}: {about['cores']} cores, Python {about['python']}, "
            f"PySpark {about['pyspark']}{load}."
        )
        return "\n".join([*(f"| {' | '.join(row)} |" for row in rows), "", where])


def about() -> dict[str, str | int]:
    """Where and on which code the benchmark runs."""
    import pyspark

    here = pathlib.Path(__file__).parent
    commit = subprocess.run(
        ["git", "describe", "--always", "--abbrev=10", "--dirty=, with changes"],
        cwd=here,
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "commit": commit.stdout.strip() or "unknown",
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "cores": os.cpu_count() or 0,
        "python": platform.python_version(),
        "pyspark": pyspark.__version__,
    }
