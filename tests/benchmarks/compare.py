"""Measures this checkout against others: `compare.py [--only FIGURE ...] CHECKOUT ...`.

Use it to show that a change makes nothing slower: pass a checkout of the code without the change. Run `make setup` in
each checkout first. The checkouts take turns, round by round. Each starts its application several times, because
latencies differ between two applications with the same code. Prints tables, and writes each figure as JSON.
"""

import argparse
import contextlib
import dataclasses
import pathlib
import sys
from collections.abc import Callable, Iterator

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # for `support`

from measurements import Figure, Measurement, about, percentiles
from processes import MASTER, Process, Run, in_turn
from run import show

HERE = "this checkout"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A command of `driver.py`, its arguments, and how to get the measured values from its result."""

    command: str
    warm_up_arguments: dict[str, int]
    warm_ups: int
    arguments: dict[str, int]
    unit: str
    #: Returns the values in the result of a round, by the name of the measurement. Lists are reported as percentiles.
    values: Callable[[dict], dict[str, float | list[float]]]


def _requests(tasks: int, words: str) -> Comparison:
    name = f"request and reply of 100 bytes, {words}"
    warm_up, round_ = ({"tasks": tasks, "count": count} for count in (3000, 1000))
    return Comparison(
        "requests", warm_up, 2, round_, "us", lambda result: {name: [1e6 * one for one in result["seconds"]]}
    )


def _events(command: str, name: str) -> Comparison:
    warm_up, round_ = ({"tasks": 2, "count": count, "size": 0} for count in (20_000, 200_000))
    return Comparison(command, warm_up, 3, round_, "us each", lambda result: {name: 1e6 / result["per_second"]})


def _tasks(command: str, warm_ups: int, count: int, name: str) -> Comparison:
    tasks = {"tasks": count}
    return Comparison(command, tasks, warm_ups, tasks, "s", lambda result: {name: result["seconds"]})


COMPARISONS = {
    "requests": _requests(1, "one task"),
    "requests-2": _requests(2, "two tasks"),
    "up": _events("up", "events, task to coordinator"),
    "down": _events("down", "events, coordinator to task"),
    "supersteps": Comparison(
        *("supersteps", {"count": 5000, "size": 8}, 1, {"count": 2000, "size": 8}, "us"),
        lambda result: {"superstep of two tasks, 8 bytes": [1e6 * one for one in result["seconds"]]},
    ),
    "exits": Comparison(
        *("exits", {"count": 150}, 1, {"count": 40}, "ms"),
        lambda result: {"exit to the last close": result["last_close_ms"], "exit to its return": result["returned_ms"]},
    ),
    "jvm": _tasks("jvm", 20, 2000, "2,000 JVM tasks"),
    "python": _tasks("python", 2, 200, "200 Python tasks with a listener"),
}


def measure(name: str, checkouts: dict[str, pathlib.Path], applications: int, rounds: int) -> Figure:
    """Measures a figure in all checkouts, which take turns."""
    comparison, run = COMPARISONS[name], Run(name, rounds)
    found: dict[str, dict[str, list]] = {}
    for _ in range(applications):
        with contextlib.ExitStack() as stack:
            sides = {
                side: stack.enter_context(Process("driver.py", "on", MASTER, checkout=checkout))
                for side, checkout in checkouts.items()
            }
            for _ in range(comparison.warm_ups):
                for process in sides.values():
                    process(comparison.command, **comparison.warm_up_arguments)
            for round_ in run.rounds():
                for side in in_turn(sides, round_):
                    result = sides[side](comparison.command, **comparison.arguments)
                    for measured, values in comparison.values(result).items():
                        found.setdefault(measured, {one: [] for one in sides})[side].append(values)
    measurements = [
        one for measured, by_side in found.items() for one in _measurements(measured, comparison.unit, by_side)
    ]
    return Figure(name, measurements, run.load, about(), run.series)


def _measurements(name: str, unit: str, by_side: dict[str, list]) -> Iterator[Measurement]:
    if isinstance(by_side[HERE][0], list):
        yield from percentiles(name, unit, by_side)
    else:
        for side in list(by_side)[1:]:
            yield Measurement(name, unit, by_side[HERE], side, by_side[side])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=COMPARISONS, help="measure only these figures")
    parser.add_argument(
        "--applications", type=int, default=4, help="how many times each checkout starts its application (default: 4)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each application (default: 5)")
    parser.add_argument(
        "--results", type=pathlib.Path, default=pathlib.Path("bench-results", "compared"), help="folder for the JSON"
    )
    parser.add_argument("checkouts", nargs="+", type=pathlib.Path, metavar="CHECKOUT")
    options = parser.parse_args()
    others = [checkout.resolve() for checkout in options.checkouts]
    checkouts = {HERE: pathlib.Path(__file__).resolve().parents[2]} | {checkout.name: checkout for checkout in others}
    if len(checkouts) <= len(others):
        parser.error("the folders of the checkouts must have different names, because the tables show these names")
    for name in options.only or COMPARISONS:
        figure = measure(name, checkouts, options.applications, options.rounds)
        figure.write(options.results)
        show(figure)


if __name__ == "__main__":
    main()
