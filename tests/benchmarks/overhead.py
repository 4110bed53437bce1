"""Measures the cost of the plugin for tasks that do not need it: short tasks, sampling, and the tab of the Spark UI."""

from __future__ import annotations

from measurements import Measurement, at_most, percentiles, ratio_at_most
from processes import Process, Run, console, driver, in_turn

from support.otlp import receiver

#: A round is this many jobs on each side. The sides alternate after each job, and take turns in being the first. So
#: load and drift of the machine, which come in waves of some seconds, affect both.
TURNS = 4
TASKS = 2000


def jvm(run: Run):
    """Many short JVM tasks without listeners, with and without the plugin."""
    # During the first minute, the just-in-time compiler of each JVM still changes the result.
    yield from _tasks(run, "jvm", f"{TASKS:,} JVM tasks", warm_ups=40, rounds=30, most=1.02)


def python(run: Run):
    """Many short Python tasks, with a listener that does nothing, and without the plugin."""
    yield from _tasks(run, "python", f"{TASKS:,} Python tasks, one no-op listener", warm_ups=4, rounds=10, most=1.03)


def watched(run: Run):
    """Python tasks, with a UI whose tab is loaded each second, compared with the plugin without a UI."""
    words = f"{TASKS:,} Python tasks, the tab loaded each second"
    yield from _tasks(run, "watched", words, warm_ups=4, rounds=10, most=1.01, off="no-ui", peer="no UI")


def traced(run: Run):
    """Python tasks whose spans are exported to a collector, and requests, compared with the plugin without tracing."""
    words = f"{TASKS:,} Python tasks, traced"
    with receiver() as collector:
        traces = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
        yield from _tasks(
            run, "python", words, warm_ups=4, rounds=10, most=1.03, off="on", on="traced", peer="not traced", **traces
        )
        found: dict[str, list[list[float]]] = {"stagecrew": [], "not traced": []}
        with driver("on") as without, driver("traced", **traces) as with_tracing:
            sides = {"stagecrew": with_tracing, "not traced": without}
            for side in (*sides.values(), *sides.values()):
                side("requests", tasks=1, count=2000)
            for round_ in run.rounds(10):
                for name in in_turn(sides, round_):
                    seconds = sides[name]("requests", tasks=1, count=1000)["seconds"]
                    found[name].append([1e6 * one for one in seconds])
    yield from percentiles("request and reply of 100 bytes, traced", "us", found, (ratio_at_most(1.03),))


def _tasks(
    run: Run,
    kind: str,
    words: str,
    *,
    warm_ups: int,
    rounds: int,
    most: float,
    off: str = "off",
    on: str = "on",
    peer: str = "plain Spark",
    **environment: str,
):
    with driver(off) as without, driver(on, **environment) as with_plugin:
        for _ in range(warm_ups):
            for side in (without, with_plugin):
                side(kind, tasks=TASKS)
        seconds, cpu = ({without: [], with_plugin: []} for _ in range(2))
        for round_ in run.rounds(rounds):
            for values in (seconds, cpu):
                for of in values.values():
                    of.append(0.0)
            for turn in range(TURNS):
                for side in in_turn((without, with_plugin), round_ + turn):
                    _add(side, side(kind, tasks=TASKS // TURNS), seconds, cpu)
            console.print(f"{kind} tasks: {seconds[without][-1]:.3f} s without, {seconds[with_plugin][-1]:.3f} s with")
    yield Measurement(words, "s", seconds[with_plugin], peer, seconds[without], ratio_at_most(most))
    yield Measurement(f"{words}: CPU time", "s", cpu[with_plugin], peer, cpu[without])
    extra = [1e6 * (one - other) / TASKS for one, other in zip(seconds[with_plugin], seconds[without], strict=True)]
    yield Measurement(f"{words}: the plugin's part of a task", "us", extra)


def _add(side: Process, outcome, seconds, cpu) -> None:
    seconds[side][-1] += outcome["seconds"]
    cpu[side][-1] += outcome["cpu"]


def sampling(run: Run):
    """The CPU time that an executor's Python daemon takes to sample its workers, at the default interval.

    The value is that of the busier executor, minus the smallest of a daemon without sampling.
    """
    master = "local-cluster[2,4,1024]"
    found = []
    with driver("no-sampling", master) as without, driver("on", master) as with_sampling:
        for _ in run.rounds():
            smallest = min(without("sampling", seconds=60)["shares"])
            found.append(100 * (max(with_sampling("sampling", seconds=60)["shares"]) - smallest))
    yield Measurement("samples of the workers of an executor: CPU time", "% of a core", found, goal=at_most(0.1))
