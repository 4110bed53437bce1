"""For one run, the tab, the metrics, `stagecrew report` and `topology.report` agree with the counts of the test."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
import urllib.request
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import py4j
import pyspark
import pytest
from click.testing import CliRunner
from pyspark import cloudpickle
from pyspark.java_gateway import ensure_callback_server_started
from pyspark.sql import SparkSession

import stagecrew
from stagecrew.cli import main
from stagecrew.recovery.jobs.job import Job
from stagecrew.recovery.state.handles import StateHandleStore
from stagecrew.recovery.state.storage import StateStorage
from support.coordination import batch_of
from support.journal import Journal, Recorder, executor_wide
from support.model_store import ModelServer
from support.sessions import Sessions
from support.waiting import eventually

# Executors do not have this module: its definitions are pickled by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

PLUGIN = "plugin.stagecrew.StagecrewPlugin"
EVENTS, REQUESTS, TASKS = 30, 7, 3
MAPS, REDUCES = 3, 2  # tasks of the shuffle
pytestmark = pytest.mark.timeout(240)


def fetch_json(spark: SparkSession, path: str) -> Any:
    port = urlsplit(spark.sparkContext.uiWebUrl).port
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}") as response:
        return json.load(response)


def gauges(spark: SparkSession) -> dict[str, int]:
    prefix = f"{spark.sparkContext.applicationId}.driver.{PLUGIN}."
    all_gauges = fetch_json(spark, "/metrics/json/")["gauges"]
    return {key.removeprefix(prefix): one["value"] for key, one in all_gauges.items() if key.startswith(prefix)}


class EchoCoordinator(stagecrew.Coordinator):
    """Sends each task two events, replies to each request with the request, and reports what it waits for."""

    def __init__(self, context: stagecrew.CoordinatorContext, received: list[Any]) -> None:
        super().__init__(context)
        self.received = received

    def ready(self, evaluation: stagecrew.Evaluation, gateway: stagecrew.Gateway) -> None:
        gateway.send("a")
        gateway.send("b")

    def handle_event(self, evaluation: stagecrew.Evaluation, event: Any) -> None:
        self.received.append(event)

    def handle_request(self, evaluation: stagecrew.Evaluation, request: Any) -> Any:
        self.received.append(request)
        return request

    def waits_for(self) -> str:
        return "the test"

    def progress(self) -> dict[str, Any]:
        return {"taken": len(self.received)}


def field_names(body: Any) -> set[str]:
    """The names of all fields. Keys that users choose are not included."""
    if isinstance(body, list):
        return set().union(*map(field_names, body))
    if not isinstance(body, dict):
        return set()
    inside = [
        field_names(value) for name, value in body.items() if name not in ("executors", "progress", "facts", "running")
    ]
    return set(body).union(*inside, *map(field_names, body.get("executors", {}).values()))


def table_cells(text: str, title: str, *names: str) -> list[dict[str, str]]:
    """The rows of a table of `stagecrew report`: the text below each of these headers, which are next to each other."""
    lines = text.split("\n")
    header, *rest = lines[lines.index(title) + 1 :]
    starts = [0]
    for name in names[1:]:
        starts.append(header.index(f" {name}", starts[-1]) + 1)
    bounds = list(zip(names, starts, [*starts[1:], None], strict=True))
    return [{name: line[a:b].strip() for name, a, b in bounds} for line in rest[: [*rest, ""].index("")]]


def test_tab_metrics_and_reports_agree_with_the_tests_own_counts(
    sessions: Sessions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tab, metrics and reports agree about a run with listeners, a coordinator, splits, a shuffle and an agent.

    They agree while the run is in progress and after it, and the report from its event log agrees with them.
    """
    logs = tmp_path / "logs"
    logs.mkdir()
    conf = {"spark.ui.enabled": "true", "spark.ui.port": "0", "spark.stagecrew.processes.interval": "200ms"}
    conf |= {"spark.eventLog.enabled": "true", "spark.eventLog.dir": logs.as_uri()}
    spark = sessions.get("local[3]", **conf)
    crew = stagecrew.crew(spark)
    journal = Journal(str(tmp_path / "journal"))
    released, received = str(tmp_path / "released"), []

    def work(gateway: stagecrew.TaskGateway, batches: Iterator[Any]) -> Iterator[Any]:
        for _ in batches:
            pass
        for number in range(EVENTS):
            gateway.send(number)
        for number in range(REQUESTS):
            assert gateway.request(number) == number
        journal.write(event="task")
        eventually(lambda: os.path.exists(released), 120, "the test releases the tasks")
        yield batch_of(os.getpid())

    name = "watched <&>"
    with crew.topology(name, listeners=[Recorder(journal), executor_wide(journal.path)]) as topology:
        dataset = topology.coordinate("o", lambda context: EchoCoordinator(context, received)).map(
            spark.range(0, TASKS, 1, TASKS), work, "a long"
        )
        pids: list[int] = []
        run = threading.Thread(target=topology.wrap(lambda: pids.extend(row.a for row in dataset.collect())))
        run.start()
        eventually(lambda: len(journal.read(event="task")) == TASKS, 120, "all tasks have sent their messages")

        def live() -> Any:
            found = [
                one for one in topology.report.operators if one.progress == {"taken": str(TASKS * (EVENTS + REQUESTS))}
            ]
            return found and found[0].live == TASKS and found[0]

        running = eventually(live, what="the running coordinator is reported")
        assert running.waits_for.startswith("the test, since ")
        assert running.state == "active"
        workers = eventually(
            lambda: _sampled_processes(spark, TASKS), what="the workers and the agent are sampled twice"
        )
        (agent,) = (one["pid"] for one in workers if one["role"] == "agent")
        assert "stagecrew.worker.agent" in psutil.Process(agent).cmdline()
        Path(released).touch()
        run.join(60)
        assert sorted(pids) == sorted(one["pid"] for one in workers if one["role"] == "worker")
        split = topology.splits(range(5), lambda one: [batch_of(one)], "a long", parallelism=2)
        assert sorted(row.a for row in split.collect()) == list(range(5))
        assert spark.sparkContext.parallelize(range(6), MAPS).map(lambda x: (x % 2, x)).groupByKey(REDUCES).count() == 2
        stored = eventually(lambda: sum(one.outputs for one in topology.report.partitions) == MAPS and topology.report)
        output_bytes = sum(one.output_bytes for one in stored.partitions)
        meters = gauges(spark)
        assert (meters["partitions.outputs"], meters["partitions.outputs.bytes"]) == (MAPS, output_bytes)
        assert (meters["topologies.active"], meters["partitions.inProgress"], meters["partitions.released"]) == (
            2,
            0,
            0,
        )
        (topology_json,) = (one for one in fetch_json(spark, "/stagecrew/json")["topologies"] if one["name"] == name)
        assert sum(one["partitions"]["outputBytes"] for one in topology_json["executors"].values()) == output_bytes > 0
    assert sorted(set(received)) == list(range(EVENTS))
    report = topology.report
    expected_counts = {
        "events_in": TASKS * EVENTS,
        "events_out": 2 * TASKS,
        "requests": TASKS * REQUESTS,
        "finished": TASKS,
    }
    operator, splits = report.operators
    assert {key: getattr(operator, key) for key in expected_counts} == expected_counts
    assert (operator.name, operator.state, operator.live, operator.failed, operator.queued, operator.waits_for) == (
        "o/1",
        "closed",
        0,
        0,
        0,
        "",
    )
    assert operator.replies.count == TASKS * REQUESTS
    assert 0 < operator.replies.p50 <= operator.replies.p99 <= operator.replies.max < 60
    assert 1 <= operator.acknowledgements.count <= 2 * TASKS
    assert (splits.name, splits.kind, splits.progress["splits done"]) == ("splits/1", "splits", "5")
    assert topology.progress["splits/1"] == {"splits done": 5, "splits in progress": 0, "splits left": 0}

    tab = fetch_json(spark, "/stagecrew/json")
    (topology_json,) = (one for one in tab["topologies"] if one["name"] == name)
    assert [stagecrew.OperatorReport._from_json(node) for node in topology_json["operators"]] == list(report.operators)
    opens = [span for span in topology_json["spans"] if span["kind"] == "open"]
    closes = [span for span in topology_json["spans"] if span["kind"] == "close"]
    assert len(opens) == len(closes) == report.opens == report.closes == len(journal.read(event="open"))
    assert {span["name"] for span in opens} == {"recorder", "executor wide"}
    tasks = [span for span in topology_json["spans"] if span["kind"] == "task"]
    assert len(tasks) == TASKS + 2 + MAPS + REDUCES
    assert topology_json["spansDropped"] == 0
    assert {span["failed"] for span in topology_json["spans"]} == {False}
    now = time.time() * 1000
    assert all(
        topology_json["started"] - 1000 <= span["started"] <= span["ended"] <= now + 1000
        for span in topology_json["spans"]
    )
    assert max(span["ended"] - span["started"] for span in tasks) > 0

    coordinator_totals = tab["coordinators"]
    meters = gauges(spark)
    assert (
        meters["coordinators.events.in"]
        == coordinator_totals["eventsIn"]
        == sum(one.events_in for one in report.operators)
    )
    assert (
        meters["coordinators.requests"]
        == coordinator_totals["requests"]
        == sum(one.requests for one in report.operators)
    )
    assert meters["coordinators.evaluations.finished"] == coordinator_totals["finished"] == TASKS + 2
    assert meters["coordinators.replies.max.micros"] == coordinator_totals["replies"]["max"] > 0
    assert meters["listeners.opens"] == report.opens
    open_micros = round(sum(one.open_seconds for one in report.listeners) * 1e6)
    assert meters["listeners.open.micros"] == tab["totals"]["openMicros"] == open_micros
    assert meters["partitions.outputs"] == meters["partitions.outputs.bytes"] == 0
    assert meters["partitions.released"] == tab["totals"]["released"] == report.released == MAPS
    assert (
        meters["partitions.released.bytes"] == tab["totals"]["releasedBytes"] == report.released_bytes == output_bytes
    )
    assert meters["processes.workers"] >= TASKS
    assert meters["processes.memory.bytes"] > 10_000_000
    store = ModelServer().session()
    store.ensure("steps", "commits")
    (tmp_path / "states").mkdir()
    storage = StateStorage(str(tmp_path / "states"))
    steps, commits = (StateHandleStore(store, storage, name) for name in ("steps", "commits"))
    job = Job("nightly", 2, steps, commits, facts={"term": "3", "store": "sqlite"})
    assert job.step("load", lambda: 5) == 5

    def step_ended() -> Any:
        found = fetch_json(spark, "/stagecrew/json")["recovery"]
        return [step["state"] for step in found["steps"]] == ["finished"] and found

    recovery = eventually(step_ended, what="the page shows the end of the step")
    assert recovery["facts"] == {"job": "nightly", "run": "2", "term": "3", "store": "sqlite"}
    (step,) = recovery["steps"]
    assert (step["name"], step["state"]) == ("load", "finished")
    assert 0 < step["started"] <= step["ended"] <= time.time() * 1000
    eventually(lambda: _ended(spark, agent), what="the ended agent is shown as ended")

    live = fetch_json(spark, "/stagecrew/json")
    guide = re.findall(r"`(\w+)`", (Path(__file__).parents[2] / "docs/reference/events.md").read_text())
    assert field_names(live) - set(guide) == set()
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

    monkeypatch.setattr("stagecrew.observability.event_log.read_event_log", lambda log: found)  # avoids another JVM
    text = CliRunner().invoke(main, ["report", str(log)]).output
    columns = ("topology", "id", "kind", "state", "began", "seconds", "Spark jobs", "executors", "unclosed listeners")
    _, row = table_cells(text, "Topologies", *columns)
    assert report.ended is not None
    assert float(row["seconds"]) == pytest.approx((report.ended - report.started).total_seconds(), abs=0.06)
    expected_row = (name, report.id, "named", "closed", str(report.jobs), "1", "0")
    assert tuple(row[key] for key in columns if key not in ("began", "seconds")) == expected_row
    columns = ("topology", "listener", "scope", "executor", "opens", "closes", "failures", "lost", "open s", "close s")
    assert [tuple(row.values())[1:9] for row in table_cells(text, "Listeners", *columns, "last error")] == [
        (
            one.name,
            one.scope,
            one.executor,
            *map(str, (one.opens, one.closes, one.failures, one.lost)),
            f"{one.open_seconds:.3f}",
        )
        for one in report.listeners
    ]
    (row,) = table_cells(
        text,
        "Partitions",
        "topology",
        "executor",
        "in progress",
        "outputs",
        "output bytes",
        "blocks",
        "block bytes",
        "released",
        "bytes released",
        "release failures",
    )
    assert (row["outputs"], row["released"], row["bytes released"], row["release failures"]) == (
        "0",
        str(MAPS),
        str(output_bytes),
        "0",
    )
    columns = (
        "topology",
        "operator",
        "kind",
        "state",
        "evaluations",
        "failed",
        "events in",
        "events out",
        "requests",
        "reply ms p50, p99",
    )
    row, splits_row = table_cells(text, "Operators", *columns, "progress")
    assert tuple(row.values())[1:9] == (
        *("o/1", "coordinator", "closed", str(TASKS), "0"), str(TASKS * EVENTS), str(2 * TASKS), str(TASKS * REQUESTS),
    )  # fmt: skip
    assert row["reply ms p50, p99"] == f"{operator.replies.p50 * 1000:.1f}, {operator.replies.p99 * 1000:.1f}"
    assert row["progress"] == f"taken {TASKS * (EVENTS + REQUESTS)}"
    assert splits_row["progress"].startswith("splits done 5")
    assert [(row["step"], row["state"]) for row in table_cells(text, "Steps", "step", "state", "began", "ended")] == [
        ("load", "finished")
    ]
    assert re.search(r"^term +3 *$", text, re.MULTILINE)


class HeldCoordinator(stagecrew.Coordinator):
    """A coordinator that does not handle its first event until the test releases it."""

    def __init__(self, context: stagecrew.CoordinatorContext, released: str, handled: list[Any]) -> None:
        super().__init__(context)
        self.released, self.handled = released, handled

    def handle_event(self, evaluation: stagecrew.Evaluation, event: Any) -> None:
        eventually(lambda: os.path.exists(self.released), 120, "the test releases the coordinator")
        self.handled.append(event)


def test_messages_that_wait_for_a_coordinator_are_counted(sessions: Sessions, tmp_path: Path) -> None:
    """While a coordinator is handling a message, the report, the tab and the metrics count its unhandled messages.

    The count includes the message that the coordinator is handling.
    """
    sessions.stop()
    spark = sessions.get("local[3]", **{"spark.ui.enabled": "true", "spark.ui.port": "0"})
    released, handled, sent = str(tmp_path / "released"), [], 6

    def work(gateway: stagecrew.TaskGateway, batches: Iterator[Any]) -> Iterator[Any]:
        for _ in batches:
            pass
        for number in range(sent):
            gateway.send(number)
        yield batch_of(1)

    with stagecrew.crew(spark).topology("blocked") as topology:
        dataset = topology.coordinate("o", lambda context: HeldCoordinator(context, released, handled)).map(
            spark.range(0, 1, 1, 1), work, "a long"
        )
        run = threading.Thread(target=topology.wrap(lambda: dataset.collect()))
        run.start()
        try:
            eventually(
                lambda: [(one.queued, one.finished) for one in topology.report.operators] == [(sent, 1)],
                60,
                "every queued event is counted, although the task that sent them has ended",
            )
            (topology_json,) = (
                one for one in fetch_json(spark, "/stagecrew/json")["topologies"] if one["name"] == "blocked"
            )
            assert [(one["queued"], one["eventsIn"]) for one in topology_json["operators"]] == [(sent, sent)]
            assert gauges(spark)["coordinators.queued"] == sent
            assert handled == []
        finally:
            Path(released).touch()
        run.join(60)
    assert handled == list(range(sent))  # the task ended long before, but the topology's end waits for its coordinators
    assert [one.queued for one in topology.report.operators] == [0]
    eventually(lambda: gauges(spark)["coordinators.queued"] == 0, what="the metric counts no queued event")


class BusRecorder:
    """Records the class names of events on the driver's listener bus."""

    class Java:
        implements = ("org.apache.spark.scheduler.SparkListenerInterface",)

    def __init__(self) -> None:
        self.names: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("on"):
            raise AttributeError(name)
        return lambda event: self.names.append(event.getClass().getSimpleName())


@pytest.mark.parametrize("with_event_log", [False, True])
def test_topology_state_is_posted_only_with_an_event_log(
    sessions: Sessions, tmp_path: Path, with_event_log: bool
) -> None:
    """The state of topologies is posted to the listener bus only if Spark writes an event log."""
    sessions.stop()
    spark = sessions.get(
        "local[2]",
        **{"spark.eventLog.enabled": str(with_event_log).lower(), "spark.eventLog.dir": tmp_path.as_uri()},
        **{"spark.stagecrew.eventLog.interval": "100ms"},
    )
    ensure_callback_server_started(spark.sparkContext._gateway)
    bus = BusRecorder()
    spark.sparkContext._jsc.sc().addSparkListener(bus)
    with stagecrew.crew(spark).topology("posted"):
        assert spark.sparkContext.parallelize(range(4), 2).sum() == 6
        state = eventually(
            lambda: not with_event_log or "StagecrewState" in bus.names, what="the topology's state is posted"
        )
        assert state
    spark.sparkContext._jsc.sc().listenerBus().waitUntilEmpty()
    assert bus.names.count("SparkListenerJobEnd") == 1
    assert ("StagecrewState" in bus.names) == with_event_log
    sessions.stop()


def test_listeners_work_if_the_executors_interpreter_has_only_pyspark(sessions: Sessions, tmp_path: Path) -> None:
    """Listeners of both scopes work without psutil; the page names the executor, its interpreter and the remedy."""
    folder = tmp_path / "interpreter"
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for module in (pyspark, py4j):
        (package,) = module.__path__
        (site / Path(package).name).symlink_to(package)
    conf = {"spark.ui.enabled": "true", "spark.ui.port": "0", "spark.stagecrew.processes.interval": "200ms"}
    sessions.stop()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_PYTHON", str(folder / "bin" / "python"))
        spark = sessions.get("local[2]", **conf)
    journal = Journal(str(tmp_path / "journal"))
    with stagecrew.crew(spark).topology("t", listeners=[Recorder(journal), executor_wide(journal.path)]) as topology:
        numbers = spark.sparkContext.parallelize(range(4), 2)
        absent = numbers.map(lambda _: __import__("importlib.util").util.find_spec("psutil") is None)
        assert absent.collect() == [True] * 4

        def problems() -> Any:
            processes = fetch_json(spark, "/stagecrew/processes/json/")["processes"]
            return [one["problem"] for one in processes if one["problem"]]

        problem = eventually(problems, what="the page says that there are no samples")[0]
        assert str(folder) in problem
        assert "Install psutil for the Python of the executors" in problem
        port = urlsplit(spark.sparkContext.uiWebUrl).port
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/stagecrew/processes/") as response:
            page = response.read().decode()
        assert "Executor driver (host " in page
        assert "Install psutil" in page
    report = topology.report
    assert report.opens == report.closes == len(journal.read(event="open")) >= 2
    assert report.failures == 0
    sessions.stop()


def _sampled_processes(spark: SparkSession, workers: int) -> Any:
    """The processes, once all of them exist and their last samples match psutil's values."""
    processes = [
        one for one in fetch_json(spark, "/stagecrew/json")["processes"] if len(one["samples"]) > 1 and not one["ended"]
    ]
    roles = [one["role"] for one in processes]
    complete = roles.count("worker") == workers and roles.count("agent") == 1 and all(map(_matches_psutil, processes))
    return processes if complete else None


def _matches_psutil(one: dict[str, Any]) -> bool:
    process, sample = psutil.Process(one["pid"]), one["samples"][-1]
    memory = process.memory_info().rss
    return (
        abs(sample["rss"] - memory) <= 0.02 * memory
        and abs(one["started"] / 1000 - process.create_time()) < 2
        and (sample["files"], sample["threads"]) == (process.num_fds(), process.num_threads())
        and any(before["cpu"] > 0 for before in one["samples"])
    )


def _ended(spark: SparkSession, pid: int) -> bool:
    processes = fetch_json(spark, "/stagecrew/json")["processes"]
    return any(one["pid"] == pid and one["ended"] >= one["samples"][-1]["time"] for one in processes)
