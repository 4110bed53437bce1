"""Commits on real clusters: exactly the attempts that Spark accepted are committed.

Other attempts leave nothing, however late they write.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark import cloudpickle

import stagecrew
from support.coordination import executor_pid
from support.hdfs import hdfs
from support.postgres import postgresql
from support.processes import is_alive, kill, stop
from support.s3 import s3_server
from support.sessions import LOCAL_CLUSTER
from support.sink_targets import SinkTarget, accepted_attempts, attempts_by_partition, recording_sink, rows_of
from support.spark_storage import executor_ids
from support.waiting import eventually

cloudpickle.register_pickle_by_value(sys.modules[__name__])

LONG_TARGETS = [pytest.param(name, marks=pytest.mark.long) for name in ("parquet", "sqlite", "iceberg")]
#: Sinks that write to servers. Each sink is pickled with its connection settings and sent to the tasks.
SERVER_TARGETS = [pytest.param(name, marks=pytest.mark.long) for name in ("postgresql", "s3", "hdfs")]


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Returns a function that starts each server on first use."""
    with contextlib.ExitStack() as stack:
        found = {}

        def get(name):
            if name in ("postgresql", "s3", "hdfs") and name not in found:
                make = {"postgresql": postgresql, "s3": s3_server}.get(name)
                entered = stack.enter_context(make() if make else hdfs(tmp_path_factory.mktemp("hdfs")))
                found[name] = entered[0] if name == "s3" else entered
            return found.get(name)

        yield get


@pytest.fixture(params=["objects", *LONG_TARGETS])
def target(request, tmp_path):
    (tmp_path / "sink").mkdir()
    return SinkTarget(request.param, tmp_path / "sink")


@pytest.fixture(params=["append", pytest.param("objects", marks=pytest.mark.long), *LONG_TARGETS, *SERVER_TARGETS])
def any_target(request, tmp_path, servers):
    """A sink target in the test's directory or on a server."""
    (tmp_path / "sink").mkdir()
    return SinkTarget(request.param, tmp_path / "sink", servers(request.param))


@pytest.fixture
def cluster(sessions):
    """A session on a cluster of two executors. The job fails only when one task has failed 30 times."""
    return sessions.get(LOCAL_CLUSTER, **{"spark.task.maxFailures": "30"})


@contextlib.contextmanager
def do_when(condition, action):
    """Runs an action in another thread as soon as a condition holds."""
    problems = []

    def run():
        try:
            eventually(condition, 110, "the condition for the action")
            action()
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join(120)
    assert not problems, problems


def have_offered(topology, number):
    """Returns a condition that holds once the driver has received offers from at least `number` attempts."""
    return lambda: topology.progress.get("commit/1", {}).get("staged", 0) >= number


def check_commit(spark, target, journal):
    """Checks that each row is visible once and that each partition's rows come from one attempt that Spark accepted."""
    visible = target.visible()
    assert [number for number, _ in visible] == list(range(40))
    writers = attempts_by_partition(visible)
    assert {partition for partition, numbers in writers.items() if len(numbers) == 1} == {0, 1, 2, 3}
    assert set.union(*writers.values()) <= accepted_attempts(spark, journal)
    assert target.leftovers() == []


def test_attempts_that_die_after_staging_are_not_committed(cluster, any_target, tmp_path, journal):
    """The rows of attempts that die after staging are not committed.

    A worker is killed after it has staged its rows, and an executor after its task's offer has reached the driver.
    """
    offered, ready_to_die = str(tmp_path / "offered"), str(tmp_path / "ready to die")

    def kill_after_staging(partition, attempt, number):
        if partition == 1 and number == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def kill_executor_after_offer(partition, attempt, number):
        if partition == 2:
            with contextlib.suppress(FileExistsError):
                os.close(os.open(ready_to_die, os.O_CREAT | os.O_EXCL))
                eventually(lambda: os.path.exists(offered), 60, "the driver has received the offer")
                kill(executor_pid())
                time.sleep(60)

    sink = recording_sink(any_target.sink(), journal, staged=kill_after_staging, offered=kill_executor_after_offer)
    with stagecrew.crew(cluster).topology("t") as topology:

        def driver_received_all():
            # An attempt of each partition has offered, so the executor that will be killed is running no other task.
            return os.path.exists(ready_to_die) and have_offered(topology, 4)()

        with do_when(driver_received_all, lambda: Path(offered).touch()):
            report = topology.commit(rows_of(cluster), sink)
        assert (report.rows, report.parts) == (40, 4)
        assert topology.progress["commit/1"]["staged"] >= 5
    check_commit(cluster, any_target, journal)


@pytest.mark.parametrize("ending_attempts", ["both", pytest.param("one", marks=pytest.mark.long)])
def test_only_one_of_an_attempt_and_its_speculative_copy_is_committed(
    sessions, standalone, target, tmp_path, journal, ending_attempts
):
    """An attempt and its speculative copy stage the same rows, and only one of them is committed.

    Either both attempts end at the same time, or one of them runs until Spark kills it.
    """
    spark = sessions.get(
        standalone,
        spark__speculation="true",
        spark__speculation__interval="100ms",
        spark__speculation__quantile="0.5",
        spark__speculation__multiplier="0.1",
        spark__speculation__minTaskRuntime="200ms",
    )
    eventually(lambda: len(executor_ids(spark)) == 2, 120, "both executors are registered, on two hosts")
    go = str(tmp_path / "go")

    def wait_for_both(partition, attempt, number):
        if partition == 0:
            journal.write(event="offered", partition=partition, attempt=attempt)
            eventually(lambda: os.path.exists(go), 120, "both attempts have offered")
            if ending_attempts == "one" and number == 0:
                time.sleep(60)

    sink = recording_sink(target.sink(), journal, offered=wait_for_both)
    with stagecrew.crew(spark).topology("t") as topology:

        def driver_received_both():
            # Spark may also run a copy of another partition, so five offers are not enough.
            return len(journal.read(event="offered", partition=0)) == 2 and have_offered(topology, 5)()

        with do_when(driver_received_both, lambda: Path(go).touch()):
            assert topology.commit(rows_of(spark), sink).rows == 40
    assert len(journal.read(event="staged", partition=0)) == 2
    check_commit(spark, target, journal)


def executor_daemon_and_worker_pids():
    """The process ids of the executor, its Python daemon and this worker."""
    return [executor_pid(), os.getppid(), os.getpid()]


@pytest.mark.parametrize("fault", ["killed", pytest.param("stopped", marks=pytest.mark.long)])
def test_rows_of_a_worker_that_outlives_its_executor_are_not_left(sessions, any_target, tmp_path, journal, fault):
    """A worker writes after the commit, and nothing that it wrote is left.

    The worker is late because it outlived its executor, or because SIGSTOP stopped it together with its executor.
    """
    short_timeouts = {
        "spark.executor.heartbeatInterval": "1s",
        "spark.network.timeout": "8s",
        "spark.network.timeoutInterval": "1s",
    }
    cluster = sessions.get(
        LOCAL_CLUSTER, **{"spark.task.maxFailures": "30"}, **(short_timeouts if fault == "stopped" else {})
    )
    committed = str(tmp_path / "over")

    def continue_late(partition, attempt, number):
        if partition == 2 and number == 0:
            for signum in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
                signal.signal(signum, signal.SIG_IGN)
            pids = executor_daemon_and_worker_pids()
            journal.write(event="late", pids=pids)
            if fault == "killed":
                kill(pids[0])
            eventually(lambda: os.path.exists(committed), 120, "the commit has finished")
            journal.write(event="continues", attempt=attempt)

    def stop_processes():
        for pid in journal.read(event="late")[0]["pids"]:
            stop(pid)

    sink = recording_sink(any_target.sink(), journal, before=continue_late)
    try:
        stopping = (
            do_when(lambda: journal.read(event="late"), stop_processes)
            if fault == "stopped"
            else contextlib.nullcontext()
        )
        with stagecrew.crew(cluster).topology("t") as topology, stopping:
            assert topology.commit(rows_of(cluster), sink).rows == 40
        Path(committed).touch()
    finally:
        (line,) = journal.read(event="late")
        for pid in line["pids"]:
            kill(pid, signal.SIGCONT)
    eventually(lambda: journal.read(event="continues"), 30, "the late worker continues")
    worker = line["pids"][2]
    eventually(lambda: not is_alive(worker), 60, "the late worker has ended")
    check_commit(cluster, any_target, journal)
    eventually(lambda: not any(map(is_alive, line["pids"])), 60, "the late worker's executor and daemon have ended")


CASES = {
    # Spark detects that the map stage returned other rows, but has already accepted a result, so it fails the job.
    "job_fails": ("true", "some"),
    # Spark has not accepted a result yet, so it reruns the whole stage that reads the rows.
    "stage_reruns": ("true", "none"),
    # Spark does not compare the rows, and accepts results computed from both runs.
    "not_detected": ("false", "some"),
}


def claim(path):
    """Creates the file. Returns whether this call was the first to create it."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_a_recomputed_stage_with_other_rows_commits_what_spark_accepts(cluster, target, tmp_path, journal, case):
    """If a recomputed map stage returns other rows, the rows that Spark accepts are committed.

    If Spark fails the job, no row is committed.
    """
    checksum_enabled, results_before = CASES[case]
    cluster.conf.set("spark.sql.shuffle.orderIndependentChecksum.enabled", checksum_enabled)
    cluster.conf.set("spark.sql.shuffle.orderIndependentChecksum.enableFullRetryOnMismatch", checksum_enabled)
    result_accepted, died, recomputed = (str(tmp_path / name) for name in ("accepted", "died", "recomputed"))

    def add_salt(batches):
        salt = os.urandom(4).hex()
        (tmp_path / f"map-{executor_pid()}").touch()
        if os.path.exists(died):
            Path(recomputed).touch()
        for batch in batches:
            ids = batch.column(0)
            yield pa.record_batch({"id": ids, "text": [f"{salt} of {one // 10}" for one in ids.to_pylist()]})

    def die_after_reading(batches):
        first = not os.path.exists(recomputed)
        yield from batches
        if not first:
            return
        executor = executor_pid()
        # One task kills its executor, which must have map output: on a slow machine an executor may have none.
        if (tmp_path / f"map-{executor}").exists() and claim(tmp_path / "killer"):
            if results_before == "some":
                eventually(lambda: os.path.exists(result_accepted), 60, "Spark has accepted a result")
            Path(died).touch()
            kill(executor)
            time.sleep(60)
        elif results_before == "none":
            time.sleep(240)  # until Spark kills this task for its outdated input: no result may be accepted earlier

    dataset = rows_of(cluster).mapInArrow(add_salt, "id long, text string").repartition(4, "id")
    dataset = dataset.mapInArrow(die_after_reading, dataset.schema)
    tracker = cluster.sparkContext.statusTracker()

    def a_result_is_accepted():
        stages = {line["stage"] for line in journal.read(event="attempt")}
        return any((info := tracker.getStageInfo(stage)) and info.numCompletedTasks for stage in stages)

    sink, failure = recording_sink(target.sink(), journal), None
    try:
        marking = (
            do_when(a_result_is_accepted, lambda: Path(result_accepted).touch())
            if results_before == "some"
            else contextlib.nullcontext()
        )
        with stagecrew.crew(cluster).topology("t") as topology, marking:
            topology.commit(dataset, sink)
    except Exception as error:
        failure = str(error)
    finally:
        cluster.conf.unset("spark.sql.shuffle.orderIndependentChecksum.enabled")
        cluster.conf.unset("spark.sql.shuffle.orderIndependentChecksum.enableFullRetryOnMismatch")
    visible = target.visible()
    assert os.path.exists(recomputed)
    assert target.leftovers() == []
    if case == "job_fails":
        assert failure is not None
        assert "indeterminate output" in failure
        assert visible == []
        return
    assert failure is None
    assert [number for number, _ in visible] == list(range(40))
    assert {int(text.rsplit(" ", 1)[1]) for _, text in visible} <= accepted_attempts(cluster, journal)
    salts = {text.split(" by ")[0] for _, text in visible}
    assert len(salts) == 4 if case == "stage_reruns" else len(salts) > 4
