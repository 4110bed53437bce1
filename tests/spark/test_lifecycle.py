"""The contract of listeners, on all masters, through the public API."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from pyspark import cloudpickle
from pyspark.sql import SparkSession

import stagecrew
from support.journal import Journal, Recorder, recording_body, rendezvous
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


def test_open_before_the_first_body_and_close_after_the_last(spark, crew, journal):
    """In each worker a listener is opened once before the first body, and closed once after the last."""
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


def test_decorate_surrounds_each_task(spark, crew, journal):
    """decorate is entered before each body and left after it, once per task, innermost last registered."""
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


def test_listeners_open_as_registered_and_close_in_reverse(spark, crew, journal):
    """Listeners open in the order registered and close in reverse, in each process."""
    with crew.topology("t", listeners=[Recorder(journal, name) for name in "abc"]):
        run(spark, journal, 2)
    for events in by_process(journal).values():
        assert [e["listener"] for e in events if e["event"] == "open"] == ["a", "b", "c"]
        assert [e["listener"] for e in events if e["event"] == "close"] == ["c", "b", "a"]


def test_topologies_one_after_the_other(spark, crew, journal):
    """Each topology has its own opens and closes, and the same worker process serves both."""
    for name in ("first", "second"):
        with crew.topology(name, listeners=[Recorder(journal, name)]):
            run(spark, journal, 4, name)
    for name in ("first", "second"):
        for events in by_process(journal, listener=name).values():
            assert [e["event"] for e in events if e["event"] in ("open", "close")] == ["open", "close"]
    last_close = max(e["time"] for e in journal.read(event="close", listener="first"))
    assert last_close < min(e["time"] for e in journal.read(event="open", listener="second"))
    of = {e["attempt"]: e["name"] for e in journal.read(event="body")}
    assert sorted((e["attempt"], e["listener"]) for e in journal.read(event="enter")) == sorted(of.items())
    assert set(by_process(journal, listener="first")) & set(by_process(journal, listener="second"))


def test_two_topologies_at_once(spark, crew, journal):
    """Two topologies from two threads whose tasks run side by side: each task meets exactly the listeners of its own."""
    errors: list[BaseException] = []
    log = Journal(journal.path)

    def meet(rows):
        rows = list(rows)  # now the body runs
        eventually(lambda: {e["name"] for e in log.read(event="body")} == {"left", "right"}, 60, "tasks of both run")
        return iter(rows)

    def one(name: str) -> None:
        try:
            with crew.topology(name, listeners=[Recorder(journal, name)]):
                spark.sparkContext.parallelize([1], 1).mapPartitions(recording_body(journal, name)).mapPartitions(
                    meet
                ).collect()
                for _ in range(2):
                    run(spark, journal, 4, name)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(name,)) for name in ("left", "right")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors
    assert not any(thread.is_alive() for thread in threads)
    of = {e["attempt"]: e["name"] for e in journal.read(event="body")}
    assert set(of.values()) == {"left", "right"}
    for entered in journal.read(event="enter"):
        assert entered["listener"] == of[entered["attempt"]] == entered["topology"]
    assert len(journal.read(event="enter")) == len(of)
    assert len(journal.read(event="open")) == len(journal.read(event="close"))


def test_nested_topologies(spark, crew, journal):
    """Inside a topology another one's tasks meet both listeners, the outer first; the outer closes last."""
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


def test_the_outer_topology_ends_those_inside_it(spark, crew, journal):
    """A topology that is left open inside another is closed when the outer one ends, before it."""
    with crew.topology("outer", listeners=[Recorder(journal, "outer")]):
        crew.topology("inner", listeners=[Recorder(journal, "inner")]).start()
        run(spark, journal, 2)
    for events in by_process(journal).values():
        assert [e["listener"] for e in events if e["event"] == "close"] == ["inner", "outer"]
    assert spark.sparkContext.getLocalProperty("spark.stagecrew.topology") is None


def test_a_thread_that_bears_the_mark_of_a_topology_closed_elsewhere(spark, crew, journal):
    """What it starts then runs under the application's topology: it is not cancelled with the one that is closed."""
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
    """At the exit every idle worker closes within 1 s, and the exit waits for it."""
    topology = crew.topology("t", listeners=[Recorder(journal)])
    with topology:
        run(spark, journal, 8)
        left = time.time()
    closed = [e["time"] - left for e in journal.read(event="close")]
    assert len(closed) == len(journal.read(event="open")) > 0
    assert max(closed) < 1.0
    assert topology.report.closes == len(closed)


def test_a_busy_worker_closes_right_after_its_task(spark, crew, master, journal, tmp_path):
    """A worker that runs another topology's task does not hold up the exit, and closes right after that task."""
    sc, many, end = spark.sparkContext, slots(master), tmp_path / "end"
    errors: list[BaseException] = []

    def long_one() -> None:
        try:
            with crew.topology("long", listeners=[Recorder(journal, "long")]):
                sc.parallelize(range(many), many).mapPartitions(
                    rendezvous(journal.path, "long", many, str(end))
                ).collect()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=long_one)
    try:
        with crew.topology("short", listeners=[Recorder(journal, "short")]) as short:
            sc.parallelize(range(many), many).mapPartitions(rendezvous(journal.path, "short", many)).collect()
            thread.start()
            long = eventually(
                lambda: (e := journal.read(event="body", name="long")) and len(e) == many and e, 60, "no slot is free"
            )
            left = time.time()
        exit_seconds = time.time() - left
        deferred = short.report.deferred
        opened = {e["pid"] for e in journal.read(event="open", listener="short")}
        busy = opened & {e["pid"] for e in long}
        assert not errors
        assert len(opened) == many
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
        if close["pid"] in busy:
            (over,) = [e["time"] for e in journal.read(event="leave", listener="long", pid=close["pid"])]
            assert 0 <= close["time"] - over < 1.0
    eventually(lambda: short.report.closes == len(opened) and not short.report.deferred, what="the report follows")


def test_listeners_close_after_a_failed_task(spark, crew, journal):
    """A failed task's worker closes its listeners, and decorate sees the exception."""

    def fails(rows):
        if sum(1 for _ in rows) >= 0:
            raise KeyError("on purpose")
        yield 1

    with crew.topology("t", listeners=[Recorder(journal)]) as topology, pytest.raises(Exception, match="on purpose"):
        # One task: another would be killed when this one fails for good, perhaps in its open, which is then not written down.
        spark.sparkContext.parallelize(range(2), 1).mapPartitions(fails).collect()
    assert {e["error"] for e in journal.read(event="leave")} == {"KeyError"}
    for events in by_process(journal).values():
        assert [e["event"] for e in events].count("open") == [e["event"] for e in events].count("close") == 1
    assert topology.report.opens == topology.report.closes


def test_an_exception_in_the_with_cancels_and_closes(spark, crew, journal):
    """An exception in the body cancels running jobs, closes in the cancelled workers too, and is unchanged."""
    raised = RuntimeError("the user's own")
    with pytest.raises(RuntimeError) as caught, crew.topology("t", listeners=[Recorder(journal)]) as topology:
        runner = threading.Thread(target=lambda: _swallow(topology.wrap(lambda: run(spark, journal, 2, seconds=60))))
        runner.start()
        # both: one that is cancelled in its open is closed too, and may have written nothing down before
        eventually(lambda: len(journal.read(event="body")) == 2, 60, "both tasks run")
        raise raised
    assert caught.value is raised
    assert caught.value.__context__ is None
    runner.join(30)
    assert not runner.is_alive()
    assert not journal.read(event="body end")
    opened = {e["pid"] for e in journal.read(event="open")}
    assert {e["pid"] for e in journal.read(event="close")} == opened
    assert {e["error"] for e in journal.read(event="leave")} == {"TaskKilled"}


def test_a_task_that_stops_reading_early_is_left(spark, crew, journal):
    """decorate is left when a limit stops the task before its input ends, and not only at the topology's exit."""
    with crew.topology("t", listeners=[Recorder(journal)]):

        def endless(batches):
            for batch in batches:
                while True:
                    yield batch

        rows = spark.range(0, 100_000, 1, 2).mapInArrow(endless, "id long").limit(3).collect()
        assert len(rows) == 3
        eventually(
            lambda: len(journal.read(event="leave")) == len(journal.read(event="enter")) > 0, what="each task is left"
        )
    assert len(journal.read(event="enter")) == len(journal.read(event="leave"))
    assert len(journal.read(event="open")) == len(journal.read(event="close"))


def test_executor_scope_opens_once_per_executor(spark, crew, journal):
    """An executor-scoped listener opens once per executor, in one process, and its value is readable in every worker."""
    port = executor_port(journal.path)
    with crew.topology("t", listeners=[port]) as topology:
        values = spark.sparkContext.parallelize(range(8), 8).map(lambda _: port.get()).collect()
    opens, closes = journal.read(event="open"), journal.read(event="close")
    executors = {e["executor"] for e in opens}
    assert len(opens) == len(executors)
    assert {e["pid"] for e in opens} == {e["pid"] for e in closes} == set(values)
    assert {e["scope"] for e in opens} == {"executor"}
    assert {one.scope for one in topology.report.listeners} == {"executor"}


def test_an_agent_that_is_killed_between_two_jobs(spark, crew, master, journal):
    """After SIGKILL of the agents the next job opens anew, no attempt fails, and every worker reads the new value."""
    many = slots(master)
    port = executor_port(journal.path)

    def places(name: str):
        run_together = rendezvous(journal.path, name, many)

        def run(rows):
            from pyspark import TaskContext

            task = TaskContext.get()
            (pid,) = run_together(rows)
            yield task.getLocalProperty("spark.stagecrew.place"), task.attemptNumber(), pid, port.get()

        return spark.sparkContext.parallelize(range(many), many).mapPartitions(run).collect()

    with crew.topology("t", listeners=[port, Recorder(journal, "worker's")]) as topology:
        first = places("first")
        agents = {value for _, _, _, value in first}
        assert agents == {e["pid"] for e in journal.read(event="open", scope="executor")}
        for pid in agents:
            kill(pid)
        eventually(lambda: topology.report.lost == len(agents), what="the loss is reported")
        second = places("second")
    assert len(second) == many
    assert {attempt for _, attempt, _, _ in second} == {0}
    assert len(journal.read(event="body", name="second")) == many
    anew = journal.read(event="open", scope="executor")[len(agents) :]
    assert len(anew) == len({e["executor"] for e in anew}) == len(agents)
    assert {value for _, _, _, value in second} == {e["pid"] for e in anew}
    assert not {e["pid"] for e in anew} & agents
    for where in {place for place, _, _, _ in second}:  # each executor has one
        assert len({value for place, _, _, value in second if place == where}) == 1
    both = {pid for _, _, pid, _ in first} & {pid for _, _, pid, _ in second}
    assert both
    for pid in both:
        mine = [e["event"] for e in journal.read(listener="worker's", pid=pid)]
        once = ["open", "enter", "leave", "close"]
        assert mine == once * 2
    report = topology.report
    assert report.lost == sum(report.lost_processes.values()) == len(agents)
    assert report.opens == report.closes + report.lost
    assert report.failures == 0


def test_an_agent_that_is_killed_during_a_job(spark, crew, master, journal, tmp_path):
    """After SIGKILL of the agents under a job its running tasks go on, and each task that begins later has a value opened anew."""
    many, lost = slots(master), str(tmp_path / "lost")
    port = executor_port(journal.path)
    log = Journal(journal.path)

    def run(rows):
        from pyspark import TaskContext

        early, before = not os.path.exists(lost), port.get()
        log.write(event="body", value=before)
        eventually(lambda: os.path.exists(lost), 60, "the agents are lost")
        yield early, TaskContext.get().attemptNumber(), before

    collected: list[Any] = []
    with crew.topology("t", listeners=[port, Recorder(journal, "worker's")]) as topology:
        job = spark.sparkContext.parallelize(range(3 * many), 3 * many).mapPartitions(run)
        thread = threading.Thread(target=topology.wrap(lambda: collected.extend(job.collect())))
        thread.start()
        eventually(lambda: len(journal.read(event="body")) == many, 60, "the first tasks run")
        agents = {e["value"] for e in journal.read(event="body")}
        for pid in agents:
            kill(pid)
        eventually(lambda: topology.report.lost == len(agents), what="the loss is reported")
        Path(lost).touch()
        thread.join(60)
    assert [early for early, _, _ in collected].count(True) == many
    assert len(collected) == 3 * many
    assert {attempt for _, attempt, _ in collected} == {0}
    assert {before for early, _, before in collected if early} == agents
    later = {before for early, _, before in collected if not early}
    assert later
    assert not later & agents
    assert later <= {e["pid"] for e in journal.read(event="close", scope="executor")}
    assert len(journal.read(event="open", listener="worker's")) == len(journal.read(event="close", listener="worker's"))


def test_executor_scope_opens_for_stages_without_python(spark, crew, journal):
    """A stage of JVM tasks alone opens the executor's listeners, and not the worker's; Python tasks after it read that open."""
    port = executor_port(journal.path)
    with crew.topology("t", listeners=[port, Recorder(journal, "worker's")]):
        spark.range(0, 1000, 1, 8).selectExpr("sum(id)").collect()
        first = journal.read(event="open", scope="executor")
        assert not journal.read(event="open", listener="worker's")
        values = set(spark.sparkContext.parallelize(range(8), 8).map(lambda _: port.get()).collect())
    opened = journal.read(event="open", scope="executor")
    assert first
    assert opened[: len(first)] == first
    assert len(opened) == len({e["executor"] for e in opened})  # a Python task may be the first of its executor
    assert values <= {e["pid"] for e in opened}
    assert len(journal.read(event="open")) == len(journal.read(event="close"))


@stagecrew.resource(scope=stagecrew.Scope.EXECUTOR)
def executor_port(context, path):
    import os

    log = Journal(path)
    log.write(event="open", executor=context.executor, scope=context.scope.value)
    yield os.getpid()
    log.write(event="close", executor=context.executor, scope=context.scope.value)


def _swallow(f) -> None:
    try:
        f()
    except Exception:  # the job was cancelled: that is what the test is about
        return
