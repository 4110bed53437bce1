"""Hooks that raise and hooks that hang: which error users see, and which listeners close."""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from pyspark import cloudpickle
from pyspark.sql import SparkSession

import stagecrew
from support.journal import Journal, Recorder, recording_body
from support.processes import kill
from support.sessions import LOCAL, LOCAL_CLUSTER, PACKAGE_IN_JAR, STANDALONE, Sessions, master_with_free_cores, slots
from support.waiting import eventually

cloudpickle.register_pickle_by_value(sys.modules[__name__])


SHORT_TIMEOUTS = {"spark__stagecrew__open__timeout": "1500ms", "spark__stagecrew__close__timeout": "2s"}


@pytest.fixture
def spark(sessions: Sessions, master: str, jvm_listeners) -> SparkSession:
    return sessions.get(
        master,
        **SHORT_TIMEOUTS,
        spark__jars=jvm_listeners[0],
        spark__test__journal=jvm_listeners[1],
    )


@pytest.fixture
def crew(spark: SparkSession) -> stagecrew.Crew:
    return stagecrew.crew(spark)


@pytest.mark.contract
def test_an_open_that_raises_fails_the_task_with_that_exception(spark, crew, journal):
    """If `open` raises, the task fails, and users see the exception with its traceback.

    The task has maxFailures attempts, and in each of them `close` is called once.
    """
    with (
        crew.topology("t", listeners=[Recorder(journal, fail=("open",))]) as topology,
        pytest.raises(Exception) as caught,
    ):
        spark.sparkContext.parallelize([1], 1).mapPartitions(recording_body(journal)).collect()
    text = str(caught.value)
    assert "ValueError: open of recorder fails on purpose" in text
    assert "in _record" in text  # the user's own frames
    assert PACKAGE_IN_JAR not in text
    assert "raised by open of listener 'recorder' (topology 't', executor" in text
    assert not journal.read(event="body")
    assert len(journal.read(event="open")) == len(journal.read(event="close")) == 4
    order = [event["event"] for event in journal.read()]
    assert order == ["open", "close"] * 4
    assert topology.report.failures == 4


#: `make test` uses one master and `make test-long` the others, because each hang takes some seconds.
MASTERS = pytest.mark.parametrize(
    "master_name", [LOCAL_CLUSTER, *(pytest.param(name, marks=pytest.mark.long) for name in (LOCAL, STANDALONE))]
)
SCOPES = pytest.mark.parametrize("scope", list(stagecrew.Scope))


@SCOPES
def test_a_failing_optional_listener_is_disabled(spark, crew, journal, caplog, scope):
    """If a listener with `required = False` fails, the job succeeds without it, and the failure is reported.

    The failure is counted, and a warning names the listener. Other listeners are not affected.
    """
    optional = Recorder(journal, "optional", fail=("open",), required=False, scope=scope)
    with (
        caplog.at_level(logging.WARNING, "stagecrew"),
        crew.topology("t", listeners=[optional, Recorder(journal, "other")]) as topology,
    ):
        assert spark.sparkContext.parallelize(range(4), 2).mapPartitions(recording_body(journal)).count() == 4
    opened = journal.read(event="open", listener="optional")
    assert len(opened) == len(journal.read(event="close", listener="optional")) == topology.report.failures
    assert not journal.read(event="enter", listener="optional")
    assert journal.read(event="enter", listener="other")
    assert "listener 'optional' failed" in caplog.text
    assert "open of optional fails on purpose" in caplog.text
    assert "'other'" not in caplog.text


def test_a_later_attempt_opens_again(spark, crew, journal, tmp_path):
    """After a failed open, the task's next attempt opens the listener again and succeeds."""
    marker = tmp_path / "marker"

    class FailsOnce(Recorder):
        def open(self, context):
            super().open(context)
            if not marker.exists():
                marker.touch()
                raise ValueError("only the first time")

    with crew.topology("t", listeners=[FailsOnce(journal)]):
        assert spark.sparkContext.parallelize([1], 1).mapPartitions(recording_body(journal)).count() == 1
    assert len(journal.read(event="open")) == len(journal.read(event="close")) == 2


@pytest.mark.long_on_clusters
@pytest.mark.parametrize("hang", ["open", "open in C"])
def test_an_open_that_hangs_ends_at_its_timeout(spark, crew, journal, hang):
    """A hanging open ends with an error that names listener and executor, even in C code that no signal interrupts."""
    sleepy = Recorder(journal, "sleepy", hang=hang)
    started = time.time()
    with crew.topology("t", listeners=[sleepy]), pytest.raises(Exception, match="sleepy") as caught:
        spark.sparkContext.parallelize([1], 1).mapPartitions(recording_body(journal)).collect()
    text = str(caught.value)
    assert re.search(
        r"open of listener 'sleepy' \(topology 't', executor \w+, host [^)]+\) took longer than 1\.?5", text
    )
    assert not journal.read(event="body")
    opens = [e["time"] for e in journal.read(event="open")]
    assert len(opens) == 4
    assert time.time() - started < 4 * (1.5 + 1 + 6) + 10


@SCOPES
def test_a_close_that_raises_is_warned_and_counted(spark, crew, journal, caplog, scope):
    """A close that raises is logged, counted and shown in the report. The other listeners close."""
    good, bad = Recorder(journal, "good", scope=scope), Recorder(journal, "bad", fail=("close",), scope=scope)
    with caplog.at_level(logging.WARNING, "stagecrew"), crew.topology("t", listeners=[good, bad]) as topology:
        spark.sparkContext.parallelize(range(2), 2).mapPartitions(recording_body(journal)).collect()
    assert len(journal.read(event="close", listener="good")) == len(journal.read(event="open", listener="good"))
    reports = [one for one in topology.report.listeners if one.name == "bad"]
    assert sum(one.failures for one in reports) == len(journal.read(event="close", listener="bad")) > 0
    assert any("close of bad fails on purpose" in one.last_error for one in reports)
    assert "listener 'bad' failed" in caplog.text


@pytest.mark.long_on_clusters
@pytest.mark.parametrize("hang", ["close", "close in C"])
def test_a_hanging_close_is_bounded_and_named(spark, crew, journal, hang, caplog):
    """The exit ends at the close timeout and names the listener.

    If `close` hangs in C code, the listener's process is killed.
    """
    check_hanging_close(spark, crew, journal, hang, stagecrew.Scope.WORKER, caplog)


@pytest.mark.parametrize("hang", ["close", "close in C"])
@MASTERS
def test_a_hanging_close_in_the_agent_is_bounded_and_named(sessions, request, journal, hang, master_name, caplog):
    """If `close` of an executor-scoped listener hangs, the exit ends at the close timeout and names the listener."""
    spark = sessions.get(master_with_free_cores(master_name, request, sessions), **SHORT_TIMEOUTS)
    check_hanging_close(spark, stagecrew.crew(spark), journal, hang, stagecrew.Scope.EXECUTOR, caplog)


def check_hanging_close(spark, crew, journal, hang, scope, caplog) -> None:
    topology = crew.topology("t", listeners=[Recorder(journal, "stuck", hang=hang, scope=scope)])
    with caplog.at_level(logging.WARNING, "stagecrew"):
        with topology:
            spark.sparkContext.parallelize(range(2), 2).mapPartitions(recording_body(journal)).collect()
            exit_started = time.time()
        assert time.time() - exit_started < 2 + 2.5
    report = topology.report
    messages = [record.getMessage() for record in caplog.records]
    assert any("topology 't'" in line and "stuck" in line for line in messages), (
        messages
    )  # logged at the exit or after it
    eventually(lambda: topology.report.failures == len(journal.read(event="open")), 10, "each hang is counted")
    if hang == "close":  # the interrupted close reports its own name
        for line in topology.report.listeners:
            assert line.name == "stuck"
            named = r"close of listener 'stuck' \(topology 't', executor \w+, host [^)]+\) took longer than 2 s"
            assert re.search(named, line.last_error)
        assert topology.report.closes == topology.report.opens
        assert topology.report.lost == 0
    else:
        assert report.unclosed
        assert all("stuck" in line for line in report.unclosed)
        eventually(
            lambda: topology.report.lost == len(journal.read(event="open")),
            10,
            "the listeners' processes are reported as lost",
        )


def test_a_raising_decorate_fails_the_task_only_on_entry(spark, crew, journal):
    """A `decorate` that raises on entry fails the task, and outer ones exit. A raise on exit is only counted."""
    with (
        crew.topology("t", listeners=[Recorder(journal, "outer"), Recorder(journal, "bad", fail=("enter",))]),
        pytest.raises(Exception, match="enter of bad fails on purpose"),
    ):
        spark.sparkContext.parallelize([1], 1).mapPartitions(recording_body(journal)).collect()
    assert len(journal.read(event="leave", listener="outer")) == len(journal.read(event="enter", listener="outer")) == 4
    with crew.topology("t2", listeners=[Recorder(journal, "late", fail=("leave",))]) as topology:
        assert spark.sparkContext.parallelize([1], 1).mapPartitions(recording_body(journal)).count() == 1
    assert topology.report.failures == 1


def test_killed_workers_are_counted_as_lost(spark, crew, journal):
    """After SIGKILL of all workers only executor listeners close, and the report counts the lost workers."""

    @stagecrew.resource(scope=stagecrew.Scope.EXECUTOR)
    def server(context, log):
        log.write(event="open", listener="server")
        yield 1
        log.write(event="close", listener="server")

    with crew.topology("t", listeners=[server(journal), Recorder(journal)]) as topology:
        spark.sparkContext.parallelize(range(8), 8).mapPartitions(recording_body(journal)).collect()
        workers = {e["pid"] for e in journal.read(event="open", listener="recorder")}
        # This includes workers that have nothing open.
        for daemon in {psutil.Process(pid).parent() for pid in workers}:
            for worker in daemon.children():
                kill(worker.pid)
        eventually(lambda: topology.report.lost == len(workers), 10, "the loss is reported")
    assert not journal.read(event="close", listener="recorder")
    servers = sorted(e["pid"] for e in journal.read(event="open", listener="server"))
    assert servers == sorted(e["pid"] for e in journal.read(event="close", listener="server"))
    assert servers
    assert sum(topology.report.lost_processes.values()) == len(workers)


@pytest.mark.contract
def test_a_worker_killed_during_its_task_is_retried_and_counted(spark, crew, journal, tmp_path):
    """After SIGKILL of a worker during its task, the retry opens in another worker, and the loss is reported."""
    killed_marker = tmp_path / "again"

    def wait(rows):
        from pyspark import TaskContext

        journal.write(event="runs", attempt=TaskContext.get().attemptNumber())
        eventually(killed_marker.exists, 60, "the first attempt is killed")
        return rows

    with crew.topology("t", listeners=[Recorder(journal)]) as topology:
        run_job, results = topology.wrap(spark.sparkContext.parallelize([1], 1).mapPartitions(wait).count), []
        thread = threading.Thread(target=lambda: results.append(run_job()))
        thread.start()
        (first_run,) = eventually(lambda: journal.read(event="runs"), 60, "the task is running")
        kill(first_run["pid"])
        eventually(lambda: len(journal.read(event="runs")) == 2, 60, "the task is running again")
        killed_marker.touch()
        thread.join(60)
        assert results == [1]
    killed, retried = journal.read(event="runs")
    assert (killed["attempt"], retried["attempt"]) == (0, 1)
    assert {e["pid"] for e in journal.read(event="open")} == {killed["pid"], retried["pid"]}
    assert {e["pid"] for e in journal.read(event="close")} == {retried["pid"]}
    assert topology.report.lost == sum(topology.report.lost_processes.values()) == 1
    assert topology.report.failures == 0


def test_a_jvm_listener_opens_per_executor_and_decorates_tasks(spark, crew, jvm_journal):
    """A JVM listener of a topology opens once per executor, decorates each task in its thread, and closes."""
    with crew.topology("t", jvm_listeners=["Noting"]) as topology:
        spark.range(0, 100, 1, 4).selectExpr("sum(id)").collect()
    opens = jvm_journal.read(event="open")
    assert len(opens) == len(jvm_journal.read(event="close")) == len({e["executor"] for e in opens}) > 0
    entered = jvm_journal.read(event="enter")
    assert len(entered) == len(jvm_journal.read(event="leave")) >= 4
    assert all("Executor task launch" in e["thread"] for e in entered)
    assert topology.report.opens == topology.report.closes == len(opens)


def test_a_failing_open_in_the_jvm_cancels_the_job(spark, crew, jvm_journal):
    """If a JVM listener fails to open, no task body runs, retries are limited, and users see the cause."""
    started = time.time()
    with crew.topology("t", jvm_listeners=["Failing"]), pytest.raises(Exception) as caught:
        spark.sparkContext.parallelize([1], 1).count()
    assert "no such pool" in str(caught.value)
    assert "listener Failing" in str(caught.value)
    attempts = len(jvm_journal.read(event="open"))
    assert 4 <= attempts <= 8
    assert len(jvm_journal.read(event="close")) == attempts
    assert not jvm_journal.read(event="enter")
    assert time.time() - started < 30


@stagecrew.resource(scope=stagecrew.Scope.EXECUTOR, name="fragile")
def fragile(context: stagecrew.ListenerContext, path: str, folder: str):
    """Records its process. Its first open on each executor after the agents are lost fails."""
    if os.path.exists(f"{folder}/lost") and not os.path.exists(failed := f"{folder}/failed-{context.executor}"):
        Path(failed).touch()
        raise ConnectionError("the port is still in use")
    Journal(path).write(event="open", listener="fragile", value=os.getpid())
    yield os.getpid()


def test_a_failed_reopen_in_the_agent_closes_no_jvm_listener(spark, crew, master, jvm_journal, journal, tmp_path):
    """If a listener of a lost agent cannot be opened again, JVM listeners stay open, because running tasks use them."""
    task_slots, folder = slots(master), str(tmp_path)
    one, log = fragile(journal.path, folder), Journal(journal.path)

    def run(rows):
        one.get()
        log.write(event="body")
        eventually(lambda: os.path.exists(f"{folder}/end"), 60, "the agents are lost, and an open has failed")
        yield 1

    collected: list[int] = []
    with crew.topology("t", listeners=[one], jvm_listeners=["Noting"]) as topology:
        job = spark.sparkContext.parallelize(range(task_slots), task_slots).mapPartitions(run)
        thread = threading.Thread(target=topology.wrap(lambda: collected.extend(job.collect())))
        thread.start()
        eventually(lambda: len(journal.read(event="body")) == task_slots, 60, "every slot is in use")
        agents = {e["value"] for e in journal.read(event="open")}
        Path(folder, "lost").touch()
        for pid in agents:
            kill(pid)
        eventually(lambda: topology.report.lost == len(agents), what="the loss is reported")
        Path(folder, "end").touch()
        thread.join(60)
        assert len(collected) == task_slots
        later = spark.sparkContext.parallelize(range(task_slots), task_slots).map(lambda _: one.get()).collect()
        assert list(tmp_path.glob("failed-*"))
        assert not jvm_journal.read(event="close")
    assert not set(later) & agents
    opens = jvm_journal.read(event="open")
    assert len(opens) == len({e["executor"] for e in opens}) == len(jvm_journal.read(event="close"))


def test_a_failing_open_in_the_agent_cancels_the_job(spark, crew, journal):
    """If a Python listener of executor scope fails to open, no task body runs, and retries are limited.

    Users see the listener's own traceback.
    """
    failing = Recorder(journal, "server", fail=("open",), scope=stagecrew.Scope.EXECUTOR)
    with crew.topology("t", listeners=[failing]), pytest.raises(Exception) as caught:
        spark.sparkContext.parallelize([1], 1).mapPartitions(recording_body(journal)).collect()
    line = str(caught.value).partition("could not be opened on executor")[2].splitlines()[1]
    assert line == "ValueError: open of server fails on purpose"
    assert PACKAGE_IN_JAR not in str(caught.value)
    assert not journal.read(event="body")
    assert 4 <= len(journal.read(event="open")) <= 8
    assert len(journal.read(event="open")) == len(journal.read(event="close"))


@pytest.mark.parametrize("hang", ["open", pytest.param("open in C", marks=pytest.mark.long)])
@MASTERS
def test_a_hanging_open_in_the_agent_ends_at_its_timeout(sessions, request, journal, hang, master_name):
    """A hanging open of executor scope ends with an error that names listener and executor. No task body runs."""
    spark = sessions.get(master_with_free_cores(master_name, request, sessions), **SHORT_TIMEOUTS)
    crew = stagecrew.crew(spark)
    sleepy = Recorder(journal, "sleepy", hang=hang, scope=stagecrew.Scope.EXECUTOR)
    with crew.topology("t", listeners=[sleepy]), pytest.raises(Exception, match="sleepy") as caught:
        spark.sparkContext.parallelize([1], 1).mapPartitions(recording_body(journal)).collect()
    assert re.search(
        r"open of listener 'sleepy' \(topology 't', executor \w+, host [^)]+\) took longer than 1\.?5",
        str(caught.value),
    )
    assert not journal.read(event="body")
    opens = [e["time"] for e in journal.read(event="open")]
    assert 4 <= len(opens) <= 8
    assert time.time() - opens[0] < len(opens) * (1.5 + 1 + 6) + 2  # executors may take long to start


@pytest.mark.parametrize("with_listener", [True, False])
def test_an_unusable_local_directory_fails_the_job_without_running_it(sessions, journal, tmp_path, with_listener):
    """An executor that cannot create its channel's folder runs no task body, with or without listeners.

    The job fails with the cause. Once the directory is usable again, tasks run.
    """
    file = tmp_path / "local"
    file.write_text("a file in the place of the directory")
    # A new session that samples no Python processes, so that its executor has no channel yet.
    spark = sessions.get(LOCAL, spark__app__name=str(tmp_path), spark__stagecrew__processes__interval="0")
    utils = getattr(getattr(spark._jvm.org.apache.spark.util, "Utils$"), "MODULE$")
    conf = spark.sparkContext._jsc.sc().conf()
    assert not conf.contains("spark.local.dir")
    crew = stagecrew.crew(spark)
    listeners = [Recorder(journal)] if with_listener else []
    numbers = spark.sparkContext.parallelize([1], 1).mapPartitions(recording_body(journal))
    conf.set("spark.local.dir", str(file))
    utils.clearLocalRootDirs()
    try:
        with crew.topology("t", listeners=listeners), pytest.raises(Exception, match=str(file)) as caught:
            numbers.collect()
    finally:
        utils.clearLocalRootDirs()
        conf.remove("spark.local.dir")
    assert "check its local directories (spark.local.dir)" in str(caught.value)
    assert "Failed to get a temp directory" in str(caught.value)
    assert not journal.read(event="body")
    with crew.topology("again", listeners=listeners):
        assert numbers.collect() == [1]
    assert len(journal.read(event="open")) == len(journal.read(event="close")) == with_listener
