"""The contract of listeners, through the public API, on all masters."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pyspark import cloudpickle
from pyspark.sql import SparkSession

import stagecrew
from support.journal import Journal, Recorder, executor_wide, recording_body, rendezvous
from support.processes import kill
from support.sessions import slots
from support.waiting import eventually

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def run(spark: SparkSession, journal: Journal, partitions: int = 4, name: str = "body", seconds: float = 0.0) -> None:
    spark.sparkContext.parallelize(range(partitions), partitions).mapPartitions(
        recording_body(journal, name, seconds)
    ).collect()


def by_process(journal: Journal, **matching: object) -> dict[int, list[dict]]:
    found: dict[int, list[dict]] = {}
    for event in journal.read(**matching):
        found.setdefault(event["pid"], []).append(event)
    return found


@pytest.mark.contract
def test_a_listener_opens_before_the_first_task_and_closes_after_the_last(spark, crew, journal):
    """In each worker, a listener opens once before the first task body and closes once after the last."""
    with crew.topology("t", listeners=[Recorder(journal)]) as topology:
        run(spark, journal, 6)
        run(spark, journal, 6)
    processes = by_process(journal)
    assert processes
    for events in processes.values():
        names = [event["event"] for event in events]
        assert names[0] == "open"
        assert names[-1] == "close"
        assert names.count("open") == names.count("close") == 1
        assert all(event.get("main", True) for event in events)
    report = topology.report
    assert report.opens == report.closes == len(processes)
    assert report.failures == report.lost == 0
    assert sum(report.processes.values()) == len(processes)
    assert report.state == "closed"
    assert not report.unclosed


@pytest.mark.contract
def test_decorate_surrounds_each_task(spark, crew, journal):
    """`decorate` is entered before each task body and left after it, once per task.

    The listener registered last is innermost.
    """
    with crew.topology("t", listeners=[Recorder(journal, "outer"), Recorder(journal, "inner")]):
        run(spark, journal, 5)
    for attempt in {event["attempt"] for event in journal.read(event="body")}:
        events = [e for e in journal.read(attempt=attempt) if e["event"] != "body end"]
        assert [(e["event"], e.get("listener")) for e in events] == [
            ("enter", "outer"),
            ("enter", "inner"),
            ("body", None),
            ("leave", "inner"),
            ("leave", "outer"),
        ]


def test_listeners_open_in_registration_order_and_close_in_reverse(spark, crew, journal):
    """In each process, listeners open in registration order and close in reverse."""
    with crew.topology("t", listeners=[Recorder(journal, name) for name in "abc"]):
        run(spark, journal, 2)
    for events in by_process(journal).values():
        assert [e["listener"] for e in events if e["event"] == "open"] == ["a", "b", "c"]
        assert [e["listener"] for e in events if e["event"] == "close"] == ["c", "b", "a"]


def test_consecutive_topologies_open_and_close_separately(spark, crew, journal):
    """Each of two topologies has its own opens and closes, even in a worker process that serves both."""
    for name in ("first", "second"):
        with crew.topology(name, listeners=[Recorder(journal, name)]):
            run(spark, journal, 4, name)
    for name in ("first", "second"):
        for events in by_process(journal, listener=name).values():
            assert [e["event"] for e in events if e["event"] in ("open", "close")] == ["open", "close"]
    last_close = max(e["time"] for e in journal.read(event="close", listener="first"))
    assert last_close < min(e["time"] for e in journal.read(event="open", listener="second"))
    name_by_attempt = {e["attempt"]: e["name"] for e in journal.read(event="body")}
    assert sorted((e["attempt"], e["listener"]) for e in journal.read(event="enter")) == sorted(name_by_attempt.items())
    assert set(by_process(journal, listener="first")) & set(by_process(journal, listener="second"))


def test_tasks_of_concurrent_topologies_meet_only_their_own_listeners(spark, crew, journal):
    """Two threads run topologies whose tasks run at the same time.

    Each task enters exactly its own topology's listeners.
    """
    errors: list[BaseException] = []
    log = Journal(journal.path)

    def wait_for_both(rows):
        rows = list(rows)  # reading the input runs `body`
        eventually(
            lambda: {e["name"] for e in log.read(event="body")} == {"left", "right"},
            60,
            "tasks of both topologies are running",
        )
        return iter(rows)

    def run_topology(name: str) -> None:
        try:
            with crew.topology(name, listeners=[Recorder(journal, name)]):
                spark.sparkContext.parallelize([1], 1).mapPartitions(recording_body(journal, name)).mapPartitions(
                    wait_for_both
                ).collect()
                for _ in range(2):
                    run(spark, journal, 4, name)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run_topology, args=(name,)) for name in ("left", "right")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors
    assert not any(thread.is_alive() for thread in threads)
    name_by_attempt = {e["attempt"]: e["name"] for e in journal.read(event="body")}
    assert set(name_by_attempt.values()) == {"left", "right"}
    for entered in journal.read(event="enter"):
        assert entered["listener"] == name_by_attempt[entered["attempt"]] == entered["topology"]
    assert len(journal.read(event="enter")) == len(name_by_attempt)
    assert len(journal.read(event="open")) == len(journal.read(event="close"))


def test_tasks_of_a_nested_topology_meet_both_listeners(spark, crew, journal):
    """Tasks of an inner topology enter both listeners. The outer listener is entered first and closes last."""
    with crew.topology("outer", listeners=[Recorder(journal, "outer")]):
        with crew.topology("inner", listeners=[Recorder(journal, "inner")]):
            run(spark, journal, 4, "in")
        run(spark, journal, 4, "out")
    for inside in journal.read(event="body", name="in"):
        enters = [e["listener"] for e in journal.read(event="enter", attempt=inside["attempt"])]
        assert enters == ["outer", "inner"]
    for outside in journal.read(event="body", name="out"):
        assert [e["listener"] for e in journal.read(event="enter", attempt=outside["attempt"])] == ["outer"]
    for events in by_process(journal).values():
        order = [(e["event"], e["listener"]) for e in events if e["event"] in ("open", "close")]
        if ("open", "inner") in order:
            assert order.index(("open", "outer")) < order.index(("open", "inner"))
            assert order.index(("close", "inner")) < order.index(("close", "outer"))


@pytest.mark.contract
def test_an_outer_topology_closes_open_inner_ones_first(spark, crew, journal):
    """A topology that is left open inside another one closes when the outer one ends, before the outer one closes."""
    with crew.topology("outer", listeners=[Recorder(journal, "outer")]):
        crew.topology("inner", listeners=[Recorder(journal, "inner")]).start()
        run(spark, journal, 2)
    for events in by_process(journal).values():
        assert [e["listener"] for e in events if e["event"] == "close"] == ["inner", "outer"]
    assert spark.sparkContext.getLocalProperty("spark.stagecrew.topology") is None


def test_jobs_after_a_topology_was_closed_elsewhere_run_without_it(spark, crew, journal):
    """A thread's jobs run normally, outside the topology, after another thread has closed the thread's topology."""
    topology = crew.topology("t", listeners=[Recorder(journal)]).start()
    try:
        closer = threading.Thread(target=topology.close, kwargs={"cancel": True})
        closer.start()
        closer.join(60)
        run(spark, journal)
    finally:
        topology.close()
    assert len(journal.read(event="body end")) == 4
    assert not journal.read(event="enter")
    assert topology.report.jobs == 0


def test_idle_workers_close_within_a_second_of_the_exit(spark, crew, journal):
    """At the exit, every idle worker closes its listeners within 1 s, and the exit waits for them."""
    topology = crew.topology("t", listeners=[Recorder(journal)])
    with topology:
        run(spark, journal, 8)
        exit_started = time.time()
    closed = [e["time"] - exit_started for e in journal.read(event="close")]
    assert len(closed) == len(journal.read(event="open")) > 0
    assert max(closed) < 1.0
    assert topology.report.closes == len(closed)


class Cycle:
    """An object that only a garbage collection deletes, because it refers to itself."""

    def __init__(self) -> None:
        self.itself = self


def after_the_last_task(_: object) -> tuple[bool, int]:
    """Leaves a cycle in this worker. Returns whether the one of the last task lives, and how many objects are visited.

    Collections visit these objects. There is no cycle before the first task. The table of contents of a zip archive, with
    a tuple of eight values for each file, does not count: before 4.2, each task of PySpark reads its archives again.
    """
    last = sys.__dict__.get("_cycle_of_the_last_task", lambda: None)
    sys.__dict__["_cycle_of_the_last_task"] = weakref.ref(Cycle())
    visited = sum(1 for one in gc.get_objects() if not (type(one) is tuple and len(one) == 8))
    return last() is not None, visited


@pytest.mark.parametrize("listeners", [True, False], ids=["with listeners", "without listeners"])
def test_collections_between_tasks_visit_only_objects_of_user_code(spark, crew, journal, listeners):
    """PySpark collects garbage after each task, and a worker cannot close meanwhile.

    A collection deletes garbage of the task, but does not visit the 33,000 objects of PySpark's modules.
    """
    numbers = spark.sparkContext.parallelize(range(8), 8)
    with crew.topology("t", listeners=[Recorder(journal)]) if listeners else contextlib.nullcontext():
        found = [numbers.map(after_the_last_task).collect() for _ in range(2)]
    assert [one for one in found if any(lives for lives, _ in one)] == []
    assert min(visited for _, visited in found[1]) < 10_000


@pytest.mark.parametrize("long_has_listeners", [True, False], ids=["another topology", "no topology"])
def test_a_busy_worker_closes_right_after_its_task(spark, crew, master, journal, tmp_path, long_has_listeners):
    """A worker that runs a task of another topology, or of none, does not delay the exit.

    The worker closes the ended topology's listeners right after that task.
    """
    sc, task_slots, end = spark.sparkContext, slots(master), tmp_path / "end"
    errors: list[BaseException] = []

    def run_long_tasks() -> None:
        try:
            with (
                crew.topology("long", listeners=[Recorder(journal, "long")])
                if long_has_listeners
                else contextlib.nullcontext()
            ):
                sc.parallelize(range(task_slots), task_slots).mapPartitions(
                    rendezvous(journal.path, "long", task_slots, str(end))
                ).collect()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run_long_tasks)
    try:
        with crew.topology("short", listeners=[Recorder(journal, "short")]) as short:
            sc.parallelize(range(task_slots), task_slots).mapPartitions(
                rendezvous(journal.path, "short", task_slots)
            ).collect()
            thread.start()
            long_tasks = eventually(
                lambda: (e := journal.read(event="body", name="long")) and len(e) == task_slots and e,
                60,
                "every task slot is in use",
            )
            exit_started = time.time()
        exit_seconds = time.time() - exit_started
        deferred = short.report.deferred
        opened = {e["pid"] for e in journal.read(event="open", listener="short")}
        busy = opened & {e["pid"] for e in long_tasks}
        assert not errors
        assert len(opened) == task_slots
        assert busy
        assert exit_seconds < 2.5
        assert sum(deferred.values()) == len(busy)
        assert {e["pid"] for e in journal.read(event="close", listener="short")} == opened - busy
    finally:
        end.touch()
    thread.join(120)
    assert not errors
    closes = eventually(lambda: (c := journal.read(event="close", listener="short")) and len(c) == len(opened) and c)
    assert {e["pid"] for e in closes} == opened
    for close in closes:
        if close["pid"] in busy and long_has_listeners:
            (task_ended,) = [e["time"] for e in journal.read(event="leave", listener="long", pid=close["pid"])]
            assert 0 <= close["time"] - task_ended < 1.0
    eventually(
        lambda: short.report.closes == len(opened) and not short.report.deferred,
        what="the report includes the late closes",
    )


def test_a_busy_worker_with_nothing_to_close_does_not_delay_the_exit(spark, crew, master, journal, tmp_path):
    """An exit does not wait for the tasks of workers that have run its tasks, but have opened no listener.

    The agent has the topology's only listener, and closes it. The workers run tasks without listeners.
    """
    sc, task_slots, end = spark.sparkContext, slots(master), tmp_path / "end"
    long = rendezvous(journal.path, "long", task_slots, str(end))
    with ThreadPoolExecutor(1) as pool:
        try:
            with crew.topology("short", listeners=[executor_wide(journal.path)]) as short:
                short_tasks = rendezvous(journal.path, "short", task_slots)
                sc.parallelize(range(task_slots), task_slots).mapPartitions(short_tasks).collect()
                running = pool.submit(
                    lambda: sc.parallelize(range(task_slots), task_slots).mapPartitions(long).collect()
                )
                eventually(
                    lambda: len(journal.read(event="body", name="long")) == task_slots, 60, "every slot is in use"
                )
                exit_started = time.time()
            assert time.time() - exit_started < 2.5
            assert short.report.unclosed == ()
            assert short.report.closes == short.report.opens > 0
            assert not running.done()
        finally:
            end.touch()
        running.result(120)
    pids = [{e["pid"] for e in journal.read(event="body", name=name)} for name in ("short", "long")]
    assert pids[0] & pids[1], "no worker ran tasks of both jobs"


@pytest.mark.contract
def test_listeners_close_after_a_failed_task(spark, crew, journal):
    """A failed task's worker closes its listeners, and `decorate` sees the exception."""

    def fail(rows):
        if sum(1 for _ in rows) >= 0:
            raise KeyError("on purpose")
        yield 1

    with crew.topology("t", listeners=[Recorder(journal)]) as topology, pytest.raises(Exception, match="on purpose"):
        # A second task could be killed in its open, which would then not be in the journal.
        spark.sparkContext.parallelize(range(2), 1).mapPartitions(fail).collect()
    assert {e["error"] for e in journal.read(event="leave")} == {"KeyError"}
    for events in by_process(journal).values():
        assert [e["event"] for e in events].count("open") == [e["event"] for e in events].count("close") == 1
    assert topology.report.opens == topology.report.closes


@pytest.mark.contract
def test_an_exception_in_the_with_cancels_and_closes(spark, crew, journal):
    """An exception in the `with` cancels jobs, closes listeners even in cancelled workers, and is raised unchanged."""
    raised = RuntimeError("the user's own")
    with pytest.raises(RuntimeError) as caught, crew.topology("t", listeners=[Recorder(journal)]) as topology:
        runner = threading.Thread(
            target=lambda: _ignore_exceptions(topology.wrap(lambda: run(spark, journal, 2, seconds=60)))
        )
        runner.start()
        # wait for both: a task cancelled in its open would close without an open in the journal
        eventually(lambda: len(journal.read(event="body")) == 2, 60, "both tasks are running")
        raise raised
    assert caught.value is raised
    assert caught.value.__context__ is None
    runner.join(30)
    assert not runner.is_alive()
    assert not journal.read(event="body end")
    opened = {e["pid"] for e in journal.read(event="open")}
    assert {e["pid"] for e in journal.read(event="close")} == opened
    assert {e["error"] for e in journal.read(event="leave")} == {"TaskKilled"}


def test_decorate_exits_when_a_task_stops_reading_early(spark, crew, journal):
    """When a limit stops a task before its input ends, `decorate` exits immediately, not at the topology's exit."""
    with crew.topology("t", listeners=[Recorder(journal)]):

        def endless(batches):
            for batch in batches:
                while True:
                    yield batch

        rows = spark.range(0, 100_000, 1, 2).mapInArrow(endless, "id long").limit(3).collect()
        assert len(rows) == 3
        eventually(
            lambda: len(journal.read(event="leave")) == len(journal.read(event="enter")) > 0,
            what="each task's decorate has exited",
        )
    assert len(journal.read(event="enter")) == len(journal.read(event="leave"))
    assert len(journal.read(event="open")) == len(journal.read(event="close"))


@pytest.mark.contract
def test_an_executor_listener_opens_once_per_executor(spark, crew, journal):
    """An executor-scoped listener opens once per executor, in one process. Every worker can read its value."""
    port = executor_port(journal.path)
    with crew.topology("t", listeners=[port]) as topology:
        values = spark.sparkContext.parallelize(range(8), 8).map(lambda _: port.get()).collect()
    opens, closes = journal.read(event="open"), journal.read(event="close")
    executors = {e["executor"] for e in opens}
    assert len(opens) == len(executors)
    assert {e["pid"] for e in opens} == {e["pid"] for e in closes} == set(values)
    assert {e["scope"] for e in opens} == {"executor"}
    assert {one.scope for one in topology.report.listeners} == {"executor"}


def test_listeners_reopen_after_an_agent_is_killed_between_jobs(spark, crew, master, journal):
    """After SIGKILL of the agents between two jobs, the second job opens the listener again.

    No attempt fails, and every worker reads the new value.
    """
    task_slots = slots(master)
    port = executor_port(journal.path)

    def run_job(name: str):
        run_together = rendezvous(journal.path, name, task_slots)

        def run(rows):
            from pyspark import TaskContext

            task = TaskContext.get()
            (pid,) = run_together(rows)
            yield task.getLocalProperty("spark.stagecrew.addressFile"), task.attemptNumber(), pid, port.get()

        return spark.sparkContext.parallelize(range(task_slots), task_slots).mapPartitions(run).collect()

    with crew.topology("t", listeners=[port, Recorder(journal, "worker's")]) as topology:
        first = run_job("first")
        agents = {value for _, _, _, value in first}
        assert agents == {e["pid"] for e in journal.read(event="open", scope="executor")}
        for pid in agents:
            kill(pid)
        eventually(lambda: topology.report.lost == len(agents), what="the loss is reported")
        second = run_job("second")
    assert len(second) == task_slots
    assert {attempt for _, attempt, _, _ in second} == {0}
    assert len(journal.read(event="body", name="second")) == task_slots
    reopened = journal.read(event="open", scope="executor")[len(agents) :]
    assert len(reopened) == len({e["executor"] for e in reopened}) == len(agents)
    assert {value for _, _, _, value in second} == {e["pid"] for e in reopened}
    assert not {e["pid"] for e in reopened} & agents
    for executor_file in {file for file, _, _, _ in second}:  # one value per executor
        assert len({value for file, _, _, value in second if file == executor_file}) == 1
    in_both_jobs = {pid for _, _, pid, _ in first} & {pid for _, _, pid, _ in second}
    assert in_both_jobs
    for pid in in_both_jobs:
        hooks = [e["event"] for e in journal.read(listener="worker's", pid=pid)]
        one_job = ["open", "enter", "leave", "close"]
        assert hooks == one_job * 2
    report = topology.report
    assert report.lost == sum(report.lost_processes.values()) == len(agents)
    assert report.opens == report.closes + report.lost
    assert report.failures == 0


def test_later_tasks_get_a_new_value_after_an_agent_is_killed_in_a_job(spark, crew, master, journal, tmp_path):
    """After SIGKILL of the agents, running tasks continue, and later tasks get the value of a new open."""
    task_slots, agents_lost = slots(master), str(tmp_path / "lost")
    port = executor_port(journal.path)
    log = Journal(journal.path)

    def run(rows):
        from pyspark import TaskContext

        began_early, value = not os.path.exists(agents_lost), port.get()
        log.write(event="body", value=value)
        eventually(lambda: os.path.exists(agents_lost), 60, "the agents are lost")
        yield began_early, TaskContext.get().attemptNumber(), value

    collected: list[Any] = []
    with crew.topology("t", listeners=[port, Recorder(journal, "worker's")]) as topology:
        job = spark.sparkContext.parallelize(range(3 * task_slots), 3 * task_slots).mapPartitions(run)
        thread = threading.Thread(target=topology.wrap(lambda: collected.extend(job.collect())))
        thread.start()
        eventually(lambda: len(journal.read(event="body")) == task_slots, 60, "the first tasks are running")
        agents = {e["value"] for e in journal.read(event="body")}
        for pid in agents:
            kill(pid)
        eventually(lambda: topology.report.lost == len(agents), what="the loss is reported")
        Path(agents_lost).touch()
        thread.join(60)
    assert [began_early for began_early, _, _ in collected].count(True) == task_slots
    assert len(collected) == 3 * task_slots
    assert {attempt for _, attempt, _ in collected} == {0}
    assert {value for began_early, _, value in collected if began_early} == agents
    later = {value for began_early, _, value in collected if not began_early}
    assert later
    assert not later & agents
    assert later <= {e["pid"] for e in journal.read(event="close", scope="executor")}
    assert len(journal.read(event="open", listener="worker's")) == len(journal.read(event="close", listener="worker's"))


def test_an_executor_listener_opens_for_stages_without_python(spark, crew, journal):
    """A stage of JVM tasks opens executor listeners but not worker listeners.

    Later Python tasks read the value that is already open.
    """
    port = executor_port(journal.path)
    with crew.topology("t", listeners=[port, Recorder(journal, "worker's")]):
        spark.range(0, 1000, 1, 8).selectExpr("sum(id)").collect()
        first = journal.read(event="open", scope="executor")
        assert not journal.read(event="open", listener="worker's")
        values = set(spark.sparkContext.parallelize(range(8), 8).map(lambda _: port.get()).collect())
    opened = journal.read(event="open", scope="executor")
    assert first
    assert opened[: len(first)] == first
    assert len(opened) == len({e["executor"] for e in opened})  # a Python task may be the first task of an executor
    assert values <= {e["pid"] for e in opened}
    assert len(journal.read(event="open")) == len(journal.read(event="close"))


@stagecrew.resource(scope=stagecrew.Scope.EXECUTOR)
def executor_port(context, path):
    import os

    log = Journal(path)
    log.write(event="open", executor=context.executor, scope=context.scope.value)
    yield os.getpid()
    log.write(event="close", executor=context.executor, scope=context.scope.value)


def _ignore_exceptions(f) -> None:
    try:
        f()
    except Exception:  # the test cancels the job
        return
