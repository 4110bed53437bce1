"""However an application, an executor or a worker ends, listeners are closed wherever code can still run."""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import psutil
import pyspark
import pytest

import stagecrew
from support.driver_scripts import driver_script, java_processes
from support.journal import Journal, Recorder, executor_wide, recording_body, rendezvous
from support.processes import is_alive, kill
from support.sessions import LOCAL, LOCAL_CLUSTER, Sessions, master_with_free_cores
from support.spark_versions import HAS_IDLE_WORKER_LIMIT, INTERRUPTIONS
from support.waiting import eventually

EIGHT_SLOTS = "local-cluster[1,8,1024]"

RUNNING_DRIVER = """
listeners = [Recorder(journal), executor_wide(journal.path)]
spark = stagecrew.configure(session_builder({master!r}).config("spark.port.maxRetries", "50"), listeners=listeners).getOrCreate()
def run(partitions, seconds=0.0):
    return spark.sparkContext.parallelize(range(partitions), partitions).mapPartitions(recording_body(journal, seconds=seconds)).collect()
run(2)
"""


def driver_code(lines: str) -> str:
    """Code that a driver runs after `RUNNING_DRIVER`."""
    return textwrap.dedent(lines)


@pytest.fixture(
    params=[
        pytest.param(LOCAL, marks=pytest.mark.long),
        pytest.param(LOCAL_CLUSTER, marks=pytest.mark.long),
        "standalone",
    ]
)
def any_master(request, sessions) -> str:
    return master_with_free_cores(request.param, request, sessions)


@pytest.fixture(params=[LOCAL_CLUSTER, "standalone"])
def cluster_master(request, sessions) -> str:
    return master_with_free_cores(request.param, request, sessions)


def wait_until_all_closed(journal: Journal, seconds: float = 20) -> None:
    """Waits until every listener that was opened has been closed in the same process."""

    def every_open_is_closed() -> bool:
        opened = sorted((e["pid"], e["listener"]) for e in journal.read(event="open"))
        return bool(opened) and sorted((e["pid"], e["listener"]) for e in journal.read(event="close")) == opened

    eventually(
        every_open_is_closed,
        seconds,
        f"every listener closes: {[(e['event'], e['listener'], e['pid']) for e in journal.read() if 'listener' in e]}",
    )


def wait_until_processes_end(journal: Journal, seconds: float = 20) -> None:
    """Waits until every process that opened a listener has ended."""
    pids = {e["pid"] for e in journal.read(event="open")}
    eventually(lambda: not any(is_alive(pid) for pid in pids), seconds, f"processes {pids} end")


def driver_jvm(process: subprocess.Popen[bytes]) -> psutil.Process:
    """The JVM of a Python driver."""
    return java_processes(process.pid)[0]


@pytest.mark.long
def test_spark_stop_in_a_topology_closes_everything(tmp_path, journal, any_master):
    """`spark.stop()` in a topology closes every listener, and the processes end."""
    script = RUNNING_DRIVER + driver_code("""
    topology = stagecrew.crew(spark).topology("t", listeners=[Recorder(journal, "inner")]).start()
    run(2)
    spark.stop()
    """)
    with driver_script(tmp_path, journal, any_master, script) as process:
        assert process.wait(120) == 0
    wait_until_all_closed(journal)
    wait_until_processes_end(journal)
    assert journal.read(event="close", listener="inner")


def test_a_driver_that_ends_without_stop_closes_everything(tmp_path, journal, any_master):
    """When a script ends without `stop`, every listener closes, and the log reports no unclosed listener."""
    with driver_script(
        tmp_path, journal, any_master, RUNNING_DRIVER + 'spark.sparkContext.setLogLevel("WARN")'
    ) as process:
        assert process.wait(120) == 0
    wait_until_all_closed(journal)
    wait_until_processes_end(journal)
    assert "have not closed" not in (tmp_path / "driver.log").read_text()


def test_ctrl_c_cancels_jobs_and_closes(tmp_path, journal, any_master):
    """Ctrl-C in a topology cancels its jobs and closes all listeners, even those in cancelled workers.

    The exception of PySpark's handler is raised unchanged.
    """
    script = RUNNING_DRIVER + driver_code("""
    crew = stagecrew.crew(spark)
    topology = crew.topology("t", listeners=[Recorder(journal, "inner")])
    def parts(error):
        return error, error.__cause__, error.__context__, error.args, getattr(error, "__notes__", None)
    try:
        with topology:
            try:
                run(2, seconds=100)
            except BaseException as error:
                raised = parts(error)  # PySpark adds a context: its handler calls the JVM, which is busy with our call
                raise
    except BaseException as error:
        same = all(left is entered for left, entered in zip(parts(error), raised))
        package = os.path.dirname(stagecrew.__file__) + os.sep
        stagecrew_frames = [frame.name for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(package)]
        journal.write(event="interrupted", type=type(error).__name__, same=same, stagecrew_frames=stagecrew_frames)
    def inner_pids(event):
        return sorted(e["pid"] for e in journal.read(event=event, listener="inner"))
    closed = False
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and not closed:
        closed = inner_pids("open") == inner_pids("close") != []
        time.sleep(0.02)
    active = list(spark.sparkContext.statusTracker().getActiveJobsIds())
    journal.write(event="left", closed=closed, active=active, state=topology.report.state, ends=len(journal.read(event="body end")))
    spark.stop()
    """)
    with driver_script(tmp_path, journal, any_master, script) as process:
        eventually(lambda: len(journal.read(event="enter", listener="inner")) == 2, 90, "both tasks are running")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    (interrupted,) = journal.read(event="interrupted")
    assert interrupted["type"] in INTERRUPTIONS
    assert interrupted["same"]
    assert interrupted["stagecrew_frames"] == []
    (after_with,) = journal.read(event="left")  # after the `with`, before spark.stop()
    assert after_with["closed"]
    assert after_with["state"] == "closed"
    assert after_with["active"] == []
    assert after_with["ends"] == 2  # both in the first job: no task of the topology finished
    wait_until_all_closed(journal)
    wait_until_processes_end(journal)
    assert {e["error"] for e in journal.read(event="leave", listener="inner")} == {"TaskKilled"}


@pytest.mark.contract
@pytest.mark.parametrize("killed_process", [pytest.param("Python", marks=pytest.mark.long), "JVM"])
def test_workers_and_executors_close_after_sigkill_of_the_driver(tmp_path, journal, any_master, killed_process):
    """After SIGKILL of the Python driver or of its JVM, workers and executors close their listeners and end."""
    with driver_script(tmp_path, journal, any_master, RUNNING_DRIVER + "time.sleep(1000)") as process:
        eventually(lambda: len(journal.read(event="leave")) >= 2, 90, "the first job has finished")
        jvm = driver_jvm(process)
        (jvm if killed_process == "JVM" else psutil.Process(process.pid)).kill()
        wait_until_all_closed(journal, 40)
        wait_until_processes_end(journal, 40)
        eventually(lambda: not jvm.is_running() or jvm.status() == psutil.STATUS_ZOMBIE, 40, "the driver's JVM ends")


@pytest.mark.parametrize(
    ("cluster_master", "second_job"),
    [
        pytest.param(LOCAL_CLUSTER, "time.sleep(1000)", id="idle", marks=pytest.mark.long),
        pytest.param(LOCAL_CLUSTER, "run(4, seconds=1000)", id="busy"),
        pytest.param("standalone", "run(3, seconds=1000)", id="standalone", marks=pytest.mark.long),
    ],
    indirect=["cluster_master"],
)
def test_an_executor_closes_at_sigterm(tmp_path, journal, cluster_master, second_job):
    """An executor that receives SIGTERM closes listeners in its idle and busy workers and in its agent."""
    with driver_script(tmp_path, journal, cluster_master, RUNNING_DRIVER + second_job):
        eventually(lambda: len(journal.read(event="leave")) >= 2, 90, "the first job has finished")
        if second_job.startswith("run"):
            eventually(lambda: len(journal.read(event="enter")) >= 5, 60, "the second job's tasks are running")
        opened = journal.read(event="open")
        executor = opened[0]["executor"]
        agent = next(e for e in opened if e["executor"] == executor and e["listener"] == "executor wide")
        psutil.Process(agent["pid"]).parent().terminate()
        executor_pids = {e["pid"] for e in opened if e["executor"] == executor}
        eventually(
            lambda: {e["pid"] for e in journal.read(event="close")} >= executor_pids, 20, f"{executor_pids} close"
        )
        eventually(lambda: not any(is_alive(pid) for pid in executor_pids), 20, f"{executor_pids} end")


@pytest.mark.long
def test_settings_alone_open_and_close_listeners_in_a_plain_script(tmp_path, journal, any_master):
    """With settings alone, listeners open and close in a submitted script that does not import stagecrew.

    The settings are `spark.plugins` and `spark.stagecrew.listeners`.
    """
    module = tmp_path / "submitted_listeners.py"
    module.write_text(
        textwrap.dedent(f"""
        import json, os, time
        import stagecrew
        def note(**fields):
            with open({journal.path!r}, "a") as file:
                file.write(json.dumps({{"pid": os.getpid(), "time": time.time(), **fields}}) + "\\n")
        class Pool(stagecrew.Listener):
            def open(self, context): note(event="open", listener="pool", executor=context.executor)
            def close(self, context): note(event="close", listener="pool", executor=context.executor)
        @stagecrew.resource(scope=stagecrew.Scope.EXECUTOR)
        def server(context):
            note(event="open", listener="server", executor=context.executor)
            yield os.getpid()
            note(event="close", listener="server", executor=context.executor)
        pool = Pool()
        """)
    )
    path = tmp_path / "driver.py"
    path.write_text(
        textwrap.dedent(f"""
        import json, os
        from pyspark.sql import SparkSession
        spark = SparkSession.builder.getOrCreate()
        def f(rows):
            import submitted_listeners
            submitted_listeners.note(event="body", same=submitted_listeners.pool.get() is not None)
            yield 1
        assert spark.sparkContext.parallelize(range(4), 4).mapPartitions(f).count() == 4
        import sys
        with open({journal.path!r}, "a") as file:
            file.write(json.dumps({{"event": "driver", "imported": "stagecrew" in sys.modules}}) + "\\n")
        """)
    )
    submit = [
        str(Path(pyspark.__file__).parent / "bin" / "spark-submit"),
        "--master",
        any_master,
        "--jars",
        stagecrew.jar_path(),
    ]
    submit += [
        "--py-files",
        str(module),
        "--conf",
        "spark.plugins=stagecrew.StagecrewPlugin",
        "--conf",
        "spark.ui.enabled=false",
    ]
    submit += ["--conf", "spark.stagecrew.listeners=submitted_listeners:pool,submitted_listeners:server"]
    submit += ["--conf", "spark.driver.host=127.0.0.1", "--conf", "spark.driver.bindAddress=127.0.0.1"]
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    done = subprocess.run(
        [*submit, str(path)], capture_output=True, text=True, timeout=150, env=environment, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert journal.read(event="driver") == [{"event": "driver", "imported": False}]
    assert len(journal.read(event="body", same=True)) == 4
    wait_until_all_closed(journal)
    wait_until_processes_end(journal)
    servers = journal.read(event="open", listener="server")
    assert len(servers) == len({e["executor"] for e in servers}) > 0


def test_without_worker_reuse_each_task_opens_and_closes(sessions: Sessions, journal, any_master):
    """With `spark.python.worker.reuse=false` a listener closes after each task, when its worker ends."""
    spark = sessions.get(any_master, spark__python__worker__reuse="false")
    with stagecrew.crew(spark).topology("t", listeners=[Recorder(journal)]) as topology:
        spark.sparkContext.parallelize(range(4), 4).mapPartitions(recording_body(journal)).collect()
        wait_until_all_closed(journal)
        assert len(journal.read(event="open")) == 4
    assert topology.report.opens == topology.report.closes == 4
    assert topology.report.lost == 0


@pytest.mark.skipif(not HAS_IDLE_WORKER_LIMIT, reason="this Spark does not limit the number of idle workers")
@pytest.mark.parametrize(
    "any_master",
    ["local[4]", *(pytest.param(one, marks=pytest.mark.long) for one in ("local-cluster[1,4,1024]", "standalone"))],
    indirect=True,
)
def test_idle_workers_close_before_spark_terminates_them(sessions: Sessions, journal, any_master):
    """Idle workers close their listeners before Spark terminates them.

    Spark terminates workers beyond `spark.python.factory.idleWorkerMaxPoolSize` as soon as they are idle.
    """
    spark = sessions.get(any_master, spark__python__factory__idleWorkerMaxPoolSize="1")
    topology = stagecrew.crew(spark).topology("t", listeners=[Recorder(journal)])
    with topology:
        spark.sparkContext.parallelize(range(4), 4).mapPartitions(rendezvous(journal.path, "body", 4)).collect()
        opened = journal.read(event="open")
        assert len(opened) == 4
        idle = len(opened) - len({e["executor"] for e in opened})  # one idle worker remains on each executor
        assert idle > 0
        eventually(lambda: len(journal.read(event="close")) == idle, 20, "all idle workers but one per executor close")
    assert len(journal.read(event="close")) == len(opened)
    assert topology.report.lost == 0


def eight_slots_session(sessions: Sessions, jvm_listeners: tuple[str, str]):
    """A session with eight task slots on one executor.

    A JVM listener of the application records each task that starts, right before the task waits until the named
    topology's listeners are open.
    """
    jar, jvm_journal_path = jvm_listeners
    return sessions.get(
        EIGHT_SLOTS,
        jvm_listeners=("Noting",),
        spark__task__maxFailures="2",
        spark__jars=jar,
        spark__test__journal=jvm_journal_path,
    )


def test_concurrent_first_tasks_share_one_open(sessions: Sessions, journal, jvm_listeners, jvm_journal):
    """Eight concurrent first tasks on one executor wait for one executor-scoped open and share its outcome."""

    @stagecrew.resource(scope=stagecrew.Scope.EXECUTOR)
    def slow(context):
        journal.write(event="open")
        eventually(
            lambda: len(jvm_journal.read(event="enter", topology="application")) == 8, 20, "all eight tasks are waiting"
        )
        journal.write(event="opened", tasks=len(jvm_journal.read(event="enter", topology="application")))
        yield os.getpid()
        journal.write(event="close")

    slow = slow()
    spark = eight_slots_session(sessions, jvm_listeners)
    with stagecrew.crew(spark).topology("t", listeners=[slow]):
        values = spark.sparkContext.parallelize(range(8), 8).map(lambda _: slow.get()).collect()
    (opened,) = journal.read(event="open")
    assert values == [opened["pid"]] * 8
    assert [e["tasks"] for e in journal.read(event="opened")] == [8]
    assert [e["pid"] for e in journal.read(event="close")] == [opened["pid"]]


def test_concurrent_first_tasks_share_a_failing_open(sessions: Sessions, journal, jvm_listeners, jvm_journal):
    """If an executor-scoped open raises, all eight attempts of a round share that open and fail with its error."""

    class SlowAndFailing(Recorder):
        def open(self, context):
            super().open(context)
            rounds = len(journal.read(event="open"))
            with contextlib.suppress(AssertionError):  # the end of the job interrupts a third round
                eventually(
                    lambda: len(jvm_journal.read(event="enter", topology="application")) >= 8 * rounds,
                    5,
                    "all eight tasks are waiting",
                )
            raise ValueError("no such server")

    spark = eight_slots_session(sessions, jvm_listeners)
    slow = SlowAndFailing(journal, "slow", scope=stagecrew.Scope.EXECUTOR)
    tracker, store = spark.sparkContext.statusTracker(), spark.sparkContext._jsc.sc().statusStore()
    group = journal.path
    spark.sparkContext.setJobGroup(group, "eight first tasks")
    with stagecrew.crew(spark).topology("t", listeners=[slow]), pytest.raises(Exception, match="no such server"):
        spark.sparkContext.parallelize(range(8), 8).mapPartitions(recording_body(journal)).collect()
    spark.sparkContext.setLocalProperty("spark.jobGroup.id", None)
    rounds = len(journal.read(event="open"))
    assert 2 <= rounds <= 4  # between maxFailures and twice that
    assert len(journal.read(event="close")) == rounds
    assert not journal.read(event="body")
    (job,) = tracker.getJobIdsForGroup(group)
    (stage,) = tracker.getJobInfo(job).stageIds

    def ended() -> list[tuple[int, str]] | None:
        tasks = store.taskList(stage, 0, 1000)
        found = [tasks.apply(i) for i in range(tasks.size())]
        if any(one.status() == "RUNNING" for one in found):
            return None
        return [(one.index(), one.errorMessage().get()) for one in found]

    errors = eventually(ended, 20, "every attempt has ended")
    attempts = collections.Counter(partition for partition, _ in errors)
    assert set(attempts) == set(range(8))
    assert min(attempts.values()) >= 2
    assert max(attempts.values()) == rounds
    assert all("no such server" in error for _, error in errors)


def test_a_killed_executor_is_named_in_the_report(sessions: Sessions, journal):
    """After SIGKILL of an executor, the report names the executor, and the exit does not hang.

    The executor's Python processes close their listeners on their own.
    """
    spark = sessions.get(LOCAL_CLUSTER)
    crew = stagecrew.crew(spark)
    with crew.topology("t", listeners=[Recorder(journal), executor_recorder(journal)]) as topology:
        spark.sparkContext.parallelize(range(4), 4).mapPartitions(recording_body(journal, seconds=0.3)).collect()
        agent = next(e for e in journal.read(event="open", listener="agent's"))
        kill(psutil.Process(agent["pid"]).ppid())
        eventually(lambda: agent["executor"] in topology.report.lost_executors, 30, "the loss is reported")
        executor_pids = {e["pid"] for e in journal.read(event="open", executor=agent["executor"])}
        eventually(
            lambda: {e["pid"] for e in journal.read(event="close")} >= executor_pids,
            20,
            "the executor's processes close on their own",
        )
    assert topology.report.state == "closed"
    sessions.stop()


@pytest.mark.long
def test_an_executor_closes_at_sigterm_despite_an_uninterruptible_task(
    sessions: Sessions, journal, jvm_listeners, jvm_journal
):
    """At SIGTERM, the executor's Python and JVM listeners close although a JVM task is still running."""
    spark = sessions.get(
        LOCAL_CLUSTER, spark__jars=jvm_listeners[0], spark__test__journal=jvm_listeners[1], spark__task__maxFailures="1"
    )
    topology = stagecrew.crew(spark).topology("t", listeners=[executor_wide(journal.path)], jvm_listeners=["Noting"])
    failed: list[BaseException] = []

    def sleep_in_jvm() -> None:
        try:
            spark.range(0, 1, 1, 1).selectExpr("reflect('java.lang.Thread', 'sleep', 600000L)").collect()
        except Exception as error:
            failed.append(error)

    with topology:
        runner = threading.Thread(target=topology.wrap(sleep_in_jvm))
        runner.start()
        eventually(lambda: jvm_journal.read(event="enter"), 60, "the task is running")
        (opened,) = journal.read(event="open")
        psutil.Process(opened["pid"]).parent().terminate()
        eventually(lambda: journal.read(event="close"), 20, "the Python listener closes")
        eventually(lambda: jvm_journal.read(event="close"), 20, "the JVM listener closes")
        eventually(lambda: not is_alive(opened["pid"]), 20, "the agent ends")
        runner.join(60)
        assert not runner.is_alive()
    assert failed  # the task was lost with its executor
    assert not jvm_journal.read(event="leave")  # the task never ended
    assert [e["pid"] for e in journal.read(event="close")] == [opened["pid"]]
    (closed,) = jvm_journal.read(event="close")
    assert closed["executor"] == opened["executor"] == jvm_journal.read(event="open")[0]["executor"]
    sessions.stop()


def executor_recorder(journal: Journal) -> Recorder:
    return Recorder(journal, "agent's", scope=stagecrew.Scope.EXECUTOR)
