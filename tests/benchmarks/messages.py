"""Measures messages between tasks and coordinators: requests, events, and the hops of a request."""

from __future__ import annotations

import collections
import itertools
import pathlib
import statistics
import tempfile

import numpy as np
from measurements import Measurement, at_least, at_most, percentiles, ratio_at_least, ratio_at_most
from processes import Process, Run, driver, in_turn

from stagecrew.wire.hops import HOPS

TASKS = {1: "one task", 2: "two tasks"}
IN_ALL = "in all"


def requests(run: Run):
    """A request of 100 bytes and its reply, compared with a call of a Ray actor and of a Dask actor from a task."""
    with driver() as ours, Process("peers.py", "ray") as ray, Process("peers.py", "dask") as dask:
        sides = {"stagecrew": ours, "Ray": ray, "Dask": dask}
        found = {tasks: {name: [] for name in sides} for tasks in TASKS}
        for count in (500, 2000):  # the processes are new, and have not compiled the hot code
            for tasks in TASKS:
                for side in sides.values():
                    side("requests", tasks=tasks, count=count)
        for round_ in run.rounds():
            for tasks in TASKS:
                for name, side in in_turn(sides.items(), round_):
                    found[tasks][name].append(
                        [1e6 * one for one in side("requests", tasks=tasks, count=1000)["seconds"]]
                    )
    for tasks, words in TASKS.items():
        goals = (ratio_at_most(0.33), ratio_at_most(1.0))
        yield from percentiles(f"request and reply of 100 bytes, {words}", "us", found[tasks], goals)


def growing(run: Run):
    """Requests of 1 to 64 tasks on two executors with 32 slots each."""
    sizes = (1, 2, 4, 8, 16, 32, 64)
    with driver(master="local-cluster[2,32,2048]") as ours:
        for tasks in (64, 8, 64):
            ours("requests", tasks=tasks, count=200)
        times, rates = ({size: [] for size in sizes} for _ in range(2))
        for _ in run.rounds():
            for tasks in sizes:
                outcome = ours("load", tasks=tasks, seconds=2)
                times[tasks].append([1e3 * one for one in outcome["seconds"]])
                rates[tasks].append(outcome["per_second"])
    goals = {64: (None, at_most(30.5))}
    for tasks in sizes:
        words = "one task" if tasks == 1 else f"{tasks} tasks"
        yield from percentiles(f"request, {words}", "ms", {"stagecrew": times[tasks]}, goals.get(tasks, ()))
        if tasks != 64:
            yield Measurement(f"requests of {words}", "a second", rates[tasks])
    yield Measurement("requests of 64 tasks", "a second", rates[64], "8 tasks", rates[8], ratio_at_least(1.0))


def events(run: Run):
    """Small events, and those of 1 MiB, with Python handlers on both ends, from and to two tasks."""
    ways = {"up": "task to coordinator", "down": "coordinator to task"}
    rates = {(way, size): [] for way in ways for size in ("small", "large")}
    with driver() as ours:
        for _ in range(3):
            for way in ways:
                ours(way, tasks=2, count=20_000, size=0)
        for _ in run.rounds():
            for way in ways:
                rates[way, "small"].append(ours(way, tasks=2, count=200_000, size=0)["per_second"])
                large = ours(way, tasks=2, count=200, size=(1 << 20) - 1)["per_second"]
                rates[way, "large"].append(large * (1 << 20) / 1e6)
    for way, words in ways.items():
        yield Measurement(f"events, {words}", "a second", rates[way, "small"], goal=at_least(250_000))
        yield Measurement(f"events of 1 MiB, {words}", "MB/s", rates[way, "large"], goal=at_least(250))


def hops(run: Run):
    """The times between the hops of a request of one task, directly and through Spark's RPC.

    The recording itself takes some microseconds of each hop.
    """
    found: dict[bool, dict[str, list[float]]] = {True: {}, False: {}}
    with tempfile.TemporaryDirectory() as temporary:
        folders = {direct: pathlib.Path(temporary, str(direct)) for direct in found}
        for folder in folders.values():
            folder.mkdir()
        with (
            driver("on", STAGECREW_HOPS=str(folders[True])) as direct,
            driver("not-direct", STAGECREW_HOPS=str(folders[False])) as through_rpc,
        ):
            for side in (direct, through_rpc):
                side("requests", tasks=1, count=3000)
            for round_ in run.rounds():
                for side in in_turn((direct, through_rpc), round_):
                    side("requests", tasks=1, count=1000)
        for direct, folder in folders.items():
            found[direct] = _steps(folder, len(run.load), 1000, direct)
    in_all = {direct: steps.pop(IN_ALL) for direct, steps in found.items()}
    yield Measurement(f"a request, {IN_ALL}, directly", "us", in_all[True], "through Spark's RPC", in_all[False])
    for direct, words in ((True, "directly"), (False, "through Spark's RPC")):
        for step, medians in found[direct].items():
            yield Measurement(f"{words}: {step}", "us", medians)


def _steps(folder: pathlib.Path, rounds: int, count: int, direct: bool) -> dict[str, list[float]]:
    """The median microseconds of each step, in each of the last rounds."""
    passed = collections.defaultdict(dict)
    for path in folder.iterdir():
        for line in path.read_text().splitlines():
            hop, evaluation, sequence, nanoseconds = line.split()
            passed[int(evaluation), int(sequence)][hop] = int(nanoseconds)
    expected = {hop: where for hop, where in HOPS if not (direct and where == "driver's JVM")}
    whole = sorted((one for one in passed.values() if one.keys() == expected.keys()), key=lambda one: one[HOPS[0][0]])
    steps = collections.defaultdict(list)
    for round_ in np.array_split(np.array(whole[-rounds * count :], dtype=object), rounds):
        for before, hop in itertools.pairwise(expected):
            name = f"{before} → {hop} ({expected[hop]})"
            steps[name].append(statistics.median((one[hop] - one[before]) / 1000 for one in round_))
        first, *_, last = expected
        steps[IN_ALL].append(statistics.median((one[last] - one[first]) / 1000 for one in round_))
    return steps
