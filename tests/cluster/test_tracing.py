"""OpenTelemetry spans on a real cluster: each arrives at a collector, with its parent, whatever fails."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import TaskContext, cloudpickle
from pyspark.sql import SparkSession

import stagecrew
from stagecrew.operators.sinks import ParquetSink
from support.coordination import executor_pid
from support.docs_blocks import blocks
from support.driver_scripts import driver_script
from support.journal import Journal as Events
from support.otlp import Receiver, Span, receiver
from support.sessions import LOCAL, LOCAL_CLUSTER, Sessions
from support.waiting import eventually

cloudpickle.register_pickle_by_value(sys.modules[__name__])

NOWHERE = "http://127.0.0.1:1"
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """A collector, to which the driver exports. The driver itself was called in a trace."""
    with receiver() as found:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", found.url)
        monkeypatch.setenv("TRACEPARENT", CALLER)
        yield found


@pytest.fixture
def spark(sessions: Sessions, collector: Receiver) -> Iterator[SparkSession]:
    """A traced session on two executors, which do not know the collector's address."""
    sessions.stop()
    conf = {"spark.stagecrew.tracing": "true", "spark.app.name": "traced"}
    yield sessions.get(LOCAL_CLUSTER, **conf, **{"spark.executorEnv.OTEL_EXPORTER_OTLP_ENDPOINT": NOWHERE})
    sessions.stop()


@stagecrew.resource(scope="worker")
def pool(context: stagecrew.ListenerContext) -> Iterator[str | None]:
    """Yields the trace context of the topology."""
    yield context.traceparent


@stagecrew.resource(scope="executor")
def cache(context: stagecrew.ListenerContext) -> Iterator[str | None]:
    """As `pool`, once for each executor."""
    yield context.traceparent


class Journal(stagecrew.Listener):
    """Writes the trace context of each task to a file, and which modules of OpenTelemetry a worker has imported."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def decorate(self, task: stagecrew.Task) -> Any:
        Path(self.folder, str(task.attempt)).write_text(str(task.traceparent))
        modules = [name for name in sys.modules if name.partition(".")[0] == "opentelemetry"]
        found = {"modules": modules, "endpoint": os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"]}
        Path(self.folder, f"worker-{os.getpid()}").write_text(json.dumps(found))
        return super().decorate(task)


class Echo(stagecrew.Coordinator):
    """Replies to each request, except to `hang`."""

    def handle_request(self, evaluation: stagecrew.Evaluation, request: str) -> Any:
        return Future() if request == "hang" else request


def ask(gateway: stagecrew.TaskGateway, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Sends a request. The first attempt at partition 1 is killed while it waits for the reply to another one."""
    task = TaskContext.get()
    assert task is not None
    gateway.request("hello")
    if task.partitionId() == 1 and task.attemptNumber() == 0:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
        gateway.request("hang")
    for batch in batches:
        yield pa.record_batch({"value": [pool().get() or "", cache().get() or ""], "rows": [batch.num_rows] * 2})


def count_steps(steps: Any, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Takes part in two steps."""
    for _ in range(2):
        total = steps.reduce(1.0, "sum")
    yield pa.record_batch({"total": [float(total)]})


def children(spans: list[Span], parent: Span) -> list[str]:
    return sorted(span.name for span in spans if span.parent == parent.id)


def test_every_span_arrives_with_its_parent(spark: SparkSession, collector: Receiver, tmp_path: Path) -> None:
    """Topology, opens, tasks, requests, commit and supersteps are one trace, over two executors and a killed task."""
    from opentelemetry import trace

    crew = stagecrew.crew(spark)
    assert crew.connection.await_slots(4) == 4  # so that both executors get tasks
    with crew.topology("enrich", listeners=[pool(), cache(), Journal(str(tmp_path))]) as topology:
        assert trace.get_current_span().get_span_context().is_valid
        operator = topology.coordinate("echo", Echo)
        rows = operator.map(spark.range(8, numPartitions=4), ask, "value string, rows long").collect()
        topology.commit(spark.range(10), ParquetSink(str(tmp_path / "table")), "sink")
        totals = topology.supersteps(spark.range(4, numPartitions=4), count_steps, "total double", name="sum").collect()
    assert {row.total for row in totals} == {4.0}
    assert not trace.get_current_span().get_span_context().is_valid
    spark.stop()  # exports the rest, and the span of the application

    (application,) = collector.named("application")
    assert (application.traceparent[:36], application.parent) == (CALLER[:36], CALLER.split("-")[2])
    assert application.service == "traced"
    (enrich,) = collector.named("topology enrich")
    assert (enrich.parent, enrich.outcome) == (application.id, "ok")
    assert {row.value for row in rows} == {enrich.traceparent}  # what both listeners saw
    assert {span.trace for span in collector.spans} == {application.trace}
    ids = [span.id for span in collector.spans]
    assert len(set(ids)) == len(ids)
    assert all(span.parent in {*ids, CALLER.split("-")[2]} for span in collector.spans)
    assert all(span.started <= span.ended for span in collector.spans)

    for name in ("open pool", "open cache", "close pool", "close cache"):
        hooks = collector.named(name)
        assert {hook.parent for hook in hooks} == {enrich.id}, name
        assert {hook.attributes["stagecrew.executor"] for hook in hooks} == {"0", "1"}, name

    tasks = {span.attributes["stagecrew.attempt"]: span for span in collector.named("task")}
    seen = {int(path.name): path.read_text() for path in tmp_path.iterdir() if path.name.isdecimal()}
    assert seen
    assert {attempt: tasks[attempt].traceparent for attempt in seen} == seen
    assert {tasks[attempt].parent for attempt in seen} == {enrich.id}
    (killed,) = (task for task in tasks.values() if task.outcome != "ok")
    assert (killed.outcome, killed.attributes["stagecrew.partition"]) == ("failed", 1)
    assert "Python worker exited unexpectedly" in killed.error

    workers = [json.loads(path.read_text()) for path in tmp_path.glob("worker-*")]
    assert workers == [{"modules": [], "endpoint": NOWHERE}] * len(workers) != []

    requests = collector.named("request echo")
    assert sorted(span.outcome for span in requests) == ["lost", *["ok"] * 5]
    (lost,) = (span for span in requests if span.outcome == "lost")
    assert lost.parent == killed.id
    assert {span.parent for span in requests} <= {task.id for task in tasks.values()}
    (commit,) = collector.named("commit", commit_id="sink")
    assert commit.parent == enrich.id
    steps = collector.named("superstep sum")
    assert [(span.attributes["stagecrew.step"], span.outcome) for span in steps] == [(0, "ok"), (1, "ok")]
    assert {span.parent for span in steps} == {enrich.id}


@stagecrew.resource(scope="worker")
def slow(context: stagecrew.ListenerContext, folder: str) -> Iterator[None]:
    """Writes the process id of its executor to a file, and opens slowly."""
    path = Path(folder, context.executor)
    path.with_suffix(".new").write_text(str(executor_pid()))
    path.with_suffix(".new").rename(path)
    time.sleep(60)
    yield


def test_hooks_of_a_killed_executor_end_as_lost(spark: SparkSession, collector: Receiver, tmp_path: Path) -> None:
    """If an executor is killed while a listener opens there, the span of the open is exported, as lost."""
    crew = stagecrew.crew(spark)
    topology = crew.topology("lost", listeners=[slow(str(tmp_path))]).start()

    def run() -> None:
        with contextlib.suppress(Exception):
            spark.sparkContext.parallelize([1], 1).map(lambda row: row).collect()

    def running() -> list[dict[str, Any]]:
        report = json.loads(crew.connection.facade.report(topology.id))
        return report["running"].get(topology.id, [])

    thread = threading.Thread(target=topology.wrap(run), daemon=True)
    thread.start()
    (hook, *_) = eventually(running, 60)
    assert (hook["kind"], hook["name"], hook["ended"]) == ("open", "slow", 0)
    os.kill(int((tmp_path / hook["executor"]).read_text()), signal.SIGKILL)
    (lost,) = eventually(lambda: [span for span in collector.named("open slow") if span.outcome == "lost"], 60)
    topology.close(cancel=True)
    thread.join(60)
    assert lost.attributes["stagecrew.executor"] == hook["executor"]
    assert "lost" in lost.error
    eventually(lambda: not running())


UNTRACED = """
class Seen(stagecrew.Listener):
    def decorate(self, task):
        assert task.traceparent is None
        return super().decorate(task)

def loaded(_=None):
    return sorted(name for name in sys.modules if name.partition(".")[0] == "opentelemetry")

spark = stagecrew.configure(session_builder({master!r})).getOrCreate()
with stagecrew.crew(spark).topology("untraced", listeners=[Seen()]) as topology:
    operator = topology.coordinate("echo", stagecrew.Coordinator)
    in_tasks = spark.sparkContext.parallelize([1], 1).map(loaded).collect()
spark.stop()
journal.write(event="loaded", modules=[*loaded(), *in_tasks[0]])
"""


def test_without_the_setting_nothing_is_imported(tmp_path: Path) -> None:
    """Neither the driver nor a task imports OpenTelemetry, although it is installed."""
    journal = Events(str(tmp_path / "journal"))
    with driver_script(tmp_path, journal, LOCAL, UNTRACED) as process:
        assert process.wait(120) == 0
    assert [line["modules"] for line in journal.read(event="loaded")] == [[]]
    assert importlib.util.find_spec("opentelemetry.sdk") is not None


MISSING = """
sys.modules["opentelemetry"] = None  # as if it were not installed
builder = session_builder({master!r}).config("spark.stagecrew.tracing", "true")
try:
    stagecrew.configure(builder).getOrCreate()
except stagecrew.errors.ConfigurationError as error:
    journal.write(event="refused", error=str(error), running=SparkContext._active_spark_context is not None)
"""


def test_without_the_package_the_session_is_refused(tmp_path: Path) -> None:
    """The error names the package to install, and no session is left."""
    journal = Events(str(tmp_path / "journal"))
    with driver_script(tmp_path, journal, LOCAL, MISSING) as process:
        assert process.wait(120) == 0
    ((error, running),) = ((line["error"], line["running"]) for line in journal.read(event="refused"))
    assert "pip install 'stagecrew[otel]'" in error
    assert not running


@pytest.mark.long
def test_the_commands_of_the_tracing_page_export_spans(tmp_path: Path) -> None:
    """An application that spark-submit starts exports its spans to the collector in the environment."""
    page = Path(__file__).parents[2] / "docs/operate/tracing.md"
    (block,) = (one for one in blocks(page.read_text(encoding="utf-8"), "sh") if "spark-submit" in one.code)
    (tmp_path / "job.py").write_text(
        "import stagecrew\n"
        "from pyspark.sql import SparkSession\n"
        "spark = SparkSession.builder.getOrCreate()\n"
        "stagecrew.crew(spark)\n"
        "assert spark.range(4, numPartitions=2).count() == 4\n"
        "spark.stop()\n"
    )
    programs = Path(sys.executable).parent
    with receiver() as found:
        _install, *commands = block.code.replace("http://collector:4318", found.url).splitlines()
        subprocess.run(
            ["bash", "-euc", "\n".join(commands)], cwd=tmp_path, check=True,
            env=os.environ | {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"},
        )  # fmt: skip
        (application,) = found.named("application")
        assert {task.parent for task in found.named("task")} == {application.id}
