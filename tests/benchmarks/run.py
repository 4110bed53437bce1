"""Measures stagecrew: `run.py [--only FIGURE ...]`. Prints tables, and writes each figure as JSON.

Peers alternate with stagecrew in one run, round by round. The tables show the medians of the rounds with their ranges,
and the median of the ratios of single rounds. No result makes the run fail. The figures:

"""

import argparse
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # for `support`

import rich.console
import rich.table
from demo import demo
from failover import failover
from measurements import COLUMNS, Figure, about
from messages import events, growing, hops, requests
from operators import commits, pagerank, splits, supersteps
from overhead import jvm, python, sampling, traced, watched
from pages import pages
from processes import Run
from stores import stores
from topologies import exits, partitions

FIGURES = {
    figure.__name__: figure
    for figure in (
        *(jvm, python, exits, watched, traced, sampling, demo, requests, growing, hops, events, splits, partitions),
        *(supersteps, pagerank, commits, stores, failover, pages),
    )
}
DESCRIPTION = __doc__ + "\n".join(f"* {name}: {figure.__doc__}" for name, figure in FIGURES.items())


def show(figure: Figure) -> None:
    """Prints the table of a figure."""
    table = rich.table.Table(*COLUMNS, title=figure.name)
    for one in figure.measurements:
        table.add_row(*one.row())
    rich.console.Console(highlight=False, width=None if sys.stdout.isatty() else 160).print(table)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=FIGURES, help="measure only these figures")
    parser.add_argument("--rounds", type=int, help="rounds of each figure (default: from 5 to 80)")
    parser.add_argument(
        "--results", type=pathlib.Path, default=pathlib.Path("bench-results"), help="folder for the JSON"
    )
    options = parser.parse_args()
    for name in options.only or FIGURES:
        run = Run(name, options.rounds)
        measurements = list(FIGURES[name](run))
        figure = Figure(name, measurements, run.load, about(), run.series)
        figure.write(options.results)
        show(figure)


if __name__ == "__main__":
    main()
