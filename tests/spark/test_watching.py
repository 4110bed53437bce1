"""What people see of one run: tab, metrics, `stagecrew report` and `topology.report` say the same, and what the test itself counted."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from click.testing import CliRunner
from pyspark import cloudpickle
from pyspark.java_gateway import ensure_callback_server_started
from pyspark.sql import SparkSession

import stagecrew
from coordinators import rows
from crewtools import Journal, Recorder, Sessions, eventually, executor_wide
from modelstore import ModelServer
from stagecrew.cli import main
from stagecrew.recovery.jobs.job import Job
from stagecrew.recovery.state.handles import StateHandleStore
from stagecrew.recovery.state.storage import StateStorage

# Executors do not have this module: what it defines travels by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

PLUGIN = "plugin.stagecrew.StagecrewPlugin"
EVENTS, REQUESTS, TASKS = 30, 7, 3
MAPS, REDUCES = 3, 2  # of the shuffle
pytestmark = pytest.mark.timeout(240)


def fetched(spark: SparkSession, path: str) -> Any:
    port = urlsplit(spark.sparkContext.uiWebUrl).port
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}") as response:
        return json.load(response)


def gauges(spark: SparkSession) -> dict[str, int]:
    prefix = f"{spark.sparkContext.applicationId}.driver.{PLUGIN}."
    every = fetched(spark, "/metrics/json/")["gauges"]
    return {key.removeprefix(prefix): one["value"] for key, one in every.items() if key.startswith(prefix)}


class Answering(stagecrew.Coordinator):
    """Sends each task two events, answers each request, and says whom it waits for while the test holds it."""

    def __init__(self, context: stagecrew.CoordinatorContext, taken: list[Any]) -> None:
        super().__init__(context)
        self.taken = taken

    def ready(self, evaluation: stagecrew.Evaluation, gateway: stagecrew.Gateway) -> None:
        gateway.send("a")
        gateway.send("b")

    def handle_event(self, evaluation: stagecrew.Evaluation, event: Any) -> None:
        self.taken.append(event)

    def handle_request(self, evaluation: stagecrew.Evaluation, request: Any) -> Any:
        self.taken.append(request)
        return request

    def waits_for(self) -> str:
        return "the test"

    def progress(self) -> dict[str, Any]:
        return {"taken": len(self.taken)}


def documented(body: Any) -> set[str]:
    """The names of all fields; what stands by names of users' own has none."""
    if isinstance(body, list):
        return set().union(*map(documented, body))
    if not isinstance(body, dict):
        return set()
    inside = [documented(of) for name, of in body.items() if name not in ("executors", "progress", "facts")]
    return set(body).union(*inside, *map(documented, body.get("executors", {}).values()))


def cells(text: str, title: str, *names: str) -> list[dict[str, str]]:
    """A table of `stagecrew report`: what stands below each of these headers, which follow each other."""
    lines = text.split("\n")
    header, *rest = lines[lines.index(title) + 1 :]
    starts = [0]
    for name in names[1:]:
        starts.append(header.index(f" {name}", starts[-1]) + 1)
    bounds = list(zip(names, starts, [*starts[1:], None], strict=True))
    return [{name: line[a:b].strip() for name, a, b in bounds} for line in rest[: [*rest, ""].index("")]]


def test_all_that_is_shown_agrees_with_what_was_counted(
    sessions: Sessions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one run with listeners, a coordinator, splits, a shuffle and an agent; while it runs, when it has ended, out of its log."""
    logs = tmp_path / "logs"
    logs.mkdir()
    conf = {"spark.ui.enabled": "true", "spark.ui.port": "0", "spark.stagecrew.processes.interval": "200ms"}
    conf |= {"spark.eventLog.enabled": "true", "spark.eventLog.dir": logs.as_uri()}
    spark = sessions.get("local[3]", **conf)
    crew = stagecrew.crew(spark)
    journal = Journal(str(tmp_path / "journal"))
    held, taken = str(tmp_path / "held"), []

    def work(gateway: stagecrew.TaskGateway, batches: Iterator[Any]) -> Iterator[Any]:
        for _ in batches:
            pass
        for number in range(EVENTS):
            gateway.send(number)
        for number in range(REQUESTS):
            assert gateway.request(number) == number
        journal.write(event="task")
        eventually(lambda: os.path.exists(held), 120, "the test lets its tasks go")
        yield rows(os.getpid())

    name = "watched <&>"
    with crew.topology(name, listeners=[Recorder(journal), executor_wide(journal.path)]) as topology:
        dataset = topology.coordinate("o", lambda context: Answering(context, taken)).map(
            spark.range(0, TASKS, 1, TASKS), work, "a long"
        )
        pids: list[int] = []
        run = threading.Thread(target=topology.wrap(lambda: pids.extend(row.a for row in dataset.collect())))
        run.start()
        eventually(lambda: len(journal.read(event="task")) == TASKS, 120, "all tasks have talked")

        def live() -> Any:
            found = [
                one for one in topology.report.operators if one.progress == {"taken": str(TASKS * (EVENTS + REQUESTS))}
            ]
            return found and found[0].live == TASKS and found[0]

        while_it_runs = eventually(live, what="the coordinator is told of while it runs")
        assert while_it_runs.waits_for.startswith("the test, since ")
        assert while_it_runs.state == "active"
        workers = eventually(lambda: _looked_at(spark, TASKS), what="workers and the agent are looked at, twice")
        (agent,) = (one["pid"] for one in workers if one["role"] == "agent")
        assert "stagecrew.worker.agent" in psutil.Process(agent).cmdline()
        Path(held).touch()
        run.join(60)
        assert sorted(pids) == sorted(one["pid"] for one in workers if one["role"] == "worker")
        split = topology.splits(range(5), lambda one: [rows(one)], "a long", parallelism=2)
        assert sorted(row.a for row in split.collect()) == list(range(5))
        assert spark.sparkContext.parallelize(range(6), MAPS).map(lambda x: (x % 2, x)).groupByKey(REDUCES).count() == 2
        stored = eventually(lambda: sum(one.outputs for one in topology.report.partitions) == MAPS and topology.report)
        bytes_of = sum(one.output_bytes for one in stored.partitions)
        meters = gauges(spark)
        assert (meters["partitions.outputs"], meters["partitions.outputs.bytes"]) == (MAPS, bytes_of)
        assert (meters["topologies.active"], meters["partitions.inProgress"], meters["partitions.released"]) == (
            2,
            0,
            0,
        )
        (of,) = (one for one in fetched(spark, "/stagecrew/json")["topologies"] if one["name"] == name)
        assert sum(one["partitions"]["outputBytes"] for one in of["executors"].values()) == bytes_of > 0
    assert sorted(set(taken)) == list(range(EVENTS))
    report = topology.report
    counted = {"events_in": TASKS * EVENTS, "events_out": 2 * TASKS, "requests": TASKS * REQUESTS, "finished": TASKS}
    mine, splits = report.operators
    assert {key: getattr(mine, key) for key in counted} == counted
    assert (mine.name, mine.state, mine.live, mine.failed, mine.queued, mine.waits_for) == (
        "o/1",
        "closed",
        0,
        0,
        0,
        "",
    )
    assert mine.replies.count == TASKS * REQUESTS
    assert 0 < mine.replies.p50 <= mine.replies.p99 <= mine.replies.max < 60
    assert 1 <= mine.acknowledgements.count <= 2 * TASKS
    assert (splits.name, splits.kind, splits.progress["splits done"]) == ("splits/1", "splits", "5")
    assert topology.progress["splits/1"] == {"splits done": 5, "splits in work": 0, "splits left": 0}

    shown = fetched(spark, "/stagecrew/json")
    (of,) = (one for one in shown["topologies"] if one["name"] == name)
    assert [stagecrew.OperatorReport.of(node) for node in of["operators"]] == list(report.operators)
    opens = [span for span in of["spans"] if span["kind"] == "open"]
    closes = [span for span in of["spans"] if span["kind"] == "close"]
    assert len(opens) == len(closes) == report.opens == report.closes == len(journal.read(event="open"))
    assert {span["name"] for span in opens} == {"recorder", "executor wide"}
    tasks = [span for span in of["spans"] if span["kind"] == "task"]
    assert len(tasks) == TASKS + 2 + MAPS + REDUCES
    assert of["spansDropped"] == 0
    assert {span["failed"] for span in of["spans"]} == {False}
    now = time.time() * 1000
    assert all(of["started"] - 1000 <= span["started"] <= span["ended"] <= now + 1000 for span in of["spans"])
    assert max(span["ended"] - span["started"] for span in tasks) > 0

    sums = shown["coordinators"]
    meters = gauges(spark)
    assert meters["coordinators.events.in"] == sums["eventsIn"] == sum(one.events_in for one in report.operators)
    assert meters["coordinators.requests"] == sums["requests"] == sum(one.requests for one in report.operators)
    assert meters["coordinators.evaluations.finished"] == sums["finished"] == TASKS + 2
    assert meters["coordinators.replies.max.micros"] == sums["replies"]["max"] > 0
    assert meters["listeners.opens"] == report.opens
    opened = round(sum(one.open_seconds for one in report.listeners) * 1e6)
    assert meters["listeners.open.micros"] == shown["totals"]["openMicros"] == opened
    assert meters["partitions.outputs"] == meters["partitions.outputs.bytes"] == 0
    assert meters["partitions.released"] == shown["totals"]["released"] == report.released == MAPS
    assert meters["partitions.released.bytes"] == shown["totals"]["releasedBytes"] == report.released_bytes == bytes_of
    assert meters["processes.workers"] >= TASKS
    assert meters["processes.memory.bytes"] > 10_000_000
    store = ModelServer().session()
    store.ensure("steps", "commits")
    (tmp_path / "states").mkdir()
    storage = StateStorage(str(tmp_path / "states"))
    steps, commits = (StateHandleStore(store, storage, name) for name in ("steps", "commits"))
    job = Job("nightly", 2, steps, commits, facts={"term": "3", "store": "sqlite"})
    assert job.step("load", lambda: 5) == 5

    def ended() -> Any:
        found = fetched(spark, "/stagecrew/json")["recovery"]
        return [step["state"] for step in found["steps"]] == ["finished"] and found

    recovery = eventually(ended, what="the page shows the step's end")
    assert recovery["facts"] == {"job": "nightly", "run": "2", "term": "3", "store": "sqlite"}
    (step,) = recovery["steps"]
    assert (step["name"], step["state"]) == ("load", "finished")
    assert 0 < step["started"] <= step["ended"] <= time.time() * 1000
    eventually(lambda: _ended(spark, agent), what="the agent that has ended is shown so")

    live = fetched(spark, "/stagecrew/json")
    guide = re.findall(r"`(\w+)`", (Path(__file__).parents[2] / "docs/guide/ui.md").read_text())
    assert documented(live) - set(guide) == set()
    sessions.stop()
    (log,) = logs.iterdir()
    found = json.loads(CliRunner().invoke(main, ["report", str(log), "--json"]).output)
    for part in ("version", "totals", "coordinators", "recovery"):
        assert found[part] == live[part]
    assert [one for one in found["topologies"] if one["name"] == name] == [
        one for one in live["topologies"] if one["name"] == name
    ]
    assert {one["pid"] for one in found["processes"]} >= {one["pid"] for one in live["processes"]}
    assert found["notes"] == []

    monkeypatch.setattr("stagecrew.observability.event_log.read_event_log", lambda log: found)  # without another JVM
    text = CliRunner().invoke(main, ["report", str(log)], env={"COLUMNS": "500"}).output
    _, row = cells(
        text, "Topologies", "topology", "id", "kind", "state", "began", "seconds", "jobs", "executors", "unclosed"
    )
    assert report.ended is not None
    assert float(row["seconds"]) == pytest.approx((report.ended - report.started).total_seconds(), abs=0.06)
    of_it = (name, report.id, "named", "closed", str(report.jobs), "1", "0")
    assert tuple(row[key] for key in ("topology", "id", "kind", "state", "jobs", "executors", "unclosed")) == of_it
    columns = ("topology", "listener", "scope", "executor", "opens", "closes", "failures", "lost", "open s", "close s")
    assert [tuple(row.values())[1:9] for row in cells(text, "Listeners", *columns, "last error")] == [
        (
            one.name,
            one.scope,
            one.executor,
            *map(str, (one.opens, one.closes, one.failures, one.lost)),
            f"{one.open_seconds:.3f}",
        )
        for one in report.listeners
    ]
    (row,) = cells(text, "Partitions", "topology", "executor", "in progress", "outputs", "bytes", "blocks", "their bytes", "released", "bytes released", "not deleted")  # fmt: skip
    assert (row["outputs"], row["released"], row["bytes released"], row["not deleted"]) == (
        "0",
        str(MAPS),
        str(bytes_of),
        "0",
    )
    columns = (
        "topology",
        "operator",
        "kind",
        "state",
        "evaluations",
        "failed",
        "in",
        "out",
        "requests",
        "reply ms p50, p99",
    )
    row, other = cells(text, "Coordinators", *columns, "progress")
    assert tuple(row.values())[1:9] == (
        *("o/1", "coordinator", "closed", str(TASKS), "0"), str(TASKS * EVENTS), str(2 * TASKS), str(TASKS * REQUESTS),
    )  # fmt: skip
    assert row["reply ms p50, p99"] == f"{mine.replies.p50 * 1000:.1f}, {mine.replies.p99 * 1000:.1f}"
    assert row["progress"] == f"taken {TASKS * (EVENTS + REQUESTS)}"
    assert other["progress"].startswith("splits done 5")
    assert [(row["step"], row["state"]) for row in cells(text, "Steps", "step", "state", "began", "ended")] == [
        ("load", "finished")
    ]
    assert re.search(r"^term +3 *$", text, re.MULTILINE)


class Blocked(stagecrew.Coordinator):
    """Handles its first event when the test lets it."""

    def __init__(self, context: stagecrew.CoordinatorContext, go: str, handled: list[Any]) -> None:
        super().__init__(context)
        self.go, self.handled = go, handled

    def handle_event(self, evaluation: stagecrew.Evaluation, event: Any) -> None:
        eventually(lambda: os.path.exists(self.go), 120, "the test lets the coordinator go")
        self.handled.append(event)


def test_what_waits_for_a_coordinator_is_counted(sessions: Sessions, tmp_path: Path) -> None:
    """While it handles one message, and none of the others: in report, tab and metrics, until it has handled them."""
    sessions.stop()
    spark = sessions.get("local[3]", **{"spark.ui.enabled": "true", "spark.ui.port": "0"})
    go, handled, sent = str(tmp_path / "go"), [], 6

    def work(gateway: stagecrew.TaskGateway, batches: Iterator[Any]) -> Iterator[Any]:
        for _ in batches:
            pass
        for number in range(sent):
            gateway.send(number)
        yield rows(1)

    with stagecrew.crew(spark).topology("blocked") as topology:
        dataset = topology.coordinate("o", lambda context: Blocked(context, go, handled)).map(
            spark.range(0, 1, 1, 1), work, "a long"
        )
        run = threading.Thread(target=topology.wrap(lambda: dataset.collect()))
        run.start()
        try:
            eventually(
                lambda: [(one.queued, one.finished) for one in topology.report.operators] == [(sent, 1)],
                60,
                "all that wait are counted, though the task that sent them has ended",
            )
            (of,) = (one for one in fetched(spark, "/stagecrew/json")["topologies"] if one["name"] == "blocked")
            assert [(one["queued"], one["eventsIn"]) for one in of["operators"]] == [(sent, sent)]
            assert gauges(spark)["coordinators.queued"] == sent
            assert handled == []
        finally:
            Path(go).touch()
        run.join(60)
    assert handled == list(range(sent))  # the task ended long before: the topology's end waits for its coordinators
    assert [one.queued for one in topology.report.operators] == [0]
    eventually(lambda: gauges(spark)["coordinators.queued"] == 0, what="the metric says that nothing waits")


class Bus:
    """Hears what is posted on a driver's listener bus, by the names of the events' classes."""

    class Java:
        implements = ("org.apache.spark.scheduler.SparkListenerInterface",)

    def __init__(self) -> None:
        self.names: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("on"):
            raise AttributeError(name)
        return lambda event: self.names.append(event.getClass().getSimpleName())


@pytest.mark.parametrize("stored", [False, True])
def test_without_an_event_log_nothing_is_posted_for_it(sessions: Sessions, tmp_path: Path, stored: bool) -> None:
    """The state of topologies goes over the listener bus where Spark writes an event log, and not at all where it does not."""
    sessions.stop()
    spark = sessions.get(
        "local[2]",
        **{"spark.eventLog.enabled": str(stored).lower(), "spark.eventLog.dir": tmp_path.as_uri()},
        **{"spark.stagecrew.eventLog.interval": "100ms"},
    )
    ensure_callback_server_started(spark.sparkContext._gateway)
    bus = Bus()
    spark.sparkContext._jsc.sc().addSparkListener(bus)
    with stagecrew.crew(spark).topology("posted"):
        assert spark.sparkContext.parallelize(range(4), 2).sum() == 6
        state = eventually(lambda: not stored or "StagecrewState" in bus.names, what="the topology's state is posted")
        assert state
    spark.sparkContext._jsc.sc().listenerBus().waitUntilEmpty()
    assert bus.names.count("SparkListenerJobEnd") == 1
    assert ("StagecrewState" in bus.names) == stored
    sessions.stop()


def _looked_at(spark: SparkSession, workers: int) -> Any:
    """The processes, when all are there and were looked at since they do nothing any more: as psutil sees them."""
    found = [
        one for one in fetched(spark, "/stagecrew/json")["processes"] if len(one["samples"]) > 1 and not one["ended"]
    ]
    roles = [one["role"] for one in found]
    as_it_is = roles.count("worker") == workers and roles.count("agent") == 1 and all(map(_right, found))
    return found if as_it_is else None


def _right(one: dict[str, Any]) -> bool:
    process, sample = psutil.Process(one["pid"]), one["samples"][-1]
    memory = process.memory_info().rss
    return (
        abs(sample["rss"] - memory) <= 0.02 * memory
        and abs(one["started"] / 1000 - process.create_time()) < 2
        and (sample["files"], sample["threads"]) == (process.num_fds(), process.num_threads())
        and any(before["cpu"] > 0 for before in one["samples"])
    )


def _ended(spark: SparkSession, pid: int) -> bool:
    processes = fetched(spark, "/stagecrew/json")["processes"]
    return any(one["pid"] == pid and one["ended"] >= one["samples"][-1]["time"] for one in processes)
