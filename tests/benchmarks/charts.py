"""Draws one chart for each figure: `charts.py FOLDER`. The folder has the JSON of `run.py`, and gets an SVG for each.

Each row of a chart is one measurement: a dot for each round, a line for the median, and the goal. The peer is below
stagecrew, on the same axis.
"""

from __future__ import annotations

import pathlib
import statistics
import sys

import matplotlib as mpl
import matplotlib.pyplot as plt
from measurements import Figure, Measurement, number

OURS, THEIRS, GOAL = "#00897b", "#c0504d", "#444444"
WIDTH, ROW, HEAD = 8.0, 0.95, 0.5


def draw(figure: Figure, path: pathlib.Path) -> None:
    """Draws the chart of a figure."""
    rows = [one for one in figure.measurements if len(one.ours) > 1]
    count = len(rows) + 3 * len(figure.series)
    heights = [ROW] * len(rows) + [3 * ROW] * len(figure.series)
    drawing, axes = plt.subplots(
        len(heights), 1, figsize=(WIDTH, HEAD + count * ROW), squeeze=False, layout="constrained", height_ratios=heights
    )
    for axis, measurement in zip(axes[:, 0], rows, strict=False):
        _row(axis, measurement)
    for axis, (title, lines) in zip(axes[len(rows) :, 0], figure.series.items(), strict=True):
        _lines(axis, title, lines)
    drawing.savefig(path, metadata={"Date": None})
    plt.close(drawing)


def _row(axis: plt.Axes, one: Measurement) -> None:
    sides = [("stagecrew", one.ours, OURS)]
    if one.theirs:
        sides.append((one.peer, one.theirs, THEIRS))
    for place, (_, values, colour) in enumerate(sides):
        axis.plot(values, [-place] * len(values), "o", color=colour, alpha=0.45, markersize=5, markeredgewidth=0)
        median = statistics.median(values)
        axis.plot([median] * 2, [-place - 0.33, -place + 0.33], color=colour, linewidth=2.5)
        axis.annotate(number(median), (median, -place + 0.36), ha="center", fontsize=7, color=colour)
    most = max(max(values) for _, values, _ in sides)
    if one.goal is not None:
        bound = one.goal.bound * (statistics.median(one.theirs) if one.goal.of == "ratio" else 1)
        axis.axvline(bound, color=GOAL, linestyle="--", linewidth=1)
        most = max(most, bound)
    least = min(min(values) for _, values, _ in sides)
    if least > 0 and most > 100 * least:
        axis.set_xscale("log")
    else:
        axis.set_xlim(min(0, 1.05 * least), 1.05 * max(most, 0) or 1)
    axis.set_ylim(-len(sides) + 0.4, 0.85)
    axis.set_yticks([-place for place in range(len(sides))], [name for name, _, _ in sides], fontsize=8)
    axis.tick_params(axis="x", labelsize=7)
    axis.set_title(f"{one.name} [{one.unit}]" if one.unit else one.name, loc="left", fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def _lines(axis: plt.Axes, title: str, lines: dict[str, list[float]]) -> None:
    for name, values in lines.items():
        colour = OURS if name == "stagecrew" else THEIRS
        axis.plot(range(1, len(values) + 1), values, color=colour, linewidth=2, label=name)
    axis.set_ylim(bottom=0)
    axis.set_title(title, loc="left", fontsize=8)
    axis.tick_params(labelsize=7)
    axis.legend(fontsize=7, frameon=False)
    axis.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "stagecrew"  # the same figures give the same file
    folder = pathlib.Path(sys.argv[1])
    for result in sorted(folder.glob("*.json")):
        draw(Figure.read(result), result.with_suffix(".svg"))
