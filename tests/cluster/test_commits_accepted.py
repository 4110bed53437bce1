"""Commits on real clusters: exactly the attempts that Spark accepted are committed, and the others leave nothing, however late."""

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
from support.processes import is_alive, kill
from support.s3 import s3_server
from support.sessions import LOCAL_CLUSTER
from support.sink_targets import SinkTarget, accepted_attempts, attempts_by_partition, recording_sink, rows_of
from support.spark_storage import executor_ids
from support.waiting import eventually

cloudpickle.register_pickle_by_value(sys.modules[__name__])

OTHERS = [pytest.param(name, marks=pytest.mark.long) for name in ("parquet", "sqlite", "iceberg")]
#: Sinks at servers, which travel to tasks with how to reach them.
SERVERS = [pytest.param(name, marks=pytest.mark.long) for name in ("postgresql", "s3", "hdfs")]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Starts each server when it is first asked for."""
    with contextlib.ExitStack() as started:
        found = {}

        def get(name):
            if name in ("postgresql", "s3", "hdfs") and name not in found:
                make = {"postgresql": postgresql, "s3": s3_server}.get(name)
                made = started.enter_context(make() if make else hdfs(tmp_path_factory.mktemp("hdfs")))
                found[name] = made[0] if name == "s3" else made
            return found.get(name)

        yield get


@pytest.fixture(params=["objects", *OTHERS])
def place(request, tmp_path):
    (tmp_path / "sink").mkdir()
    return SinkTarget(request.param, tmp_path / "sink")


@pytest.fixture(params=["append", pytest.param("objects", marks=pytest.mark.long), *OTHERS, *SERVERS])
def anywhere(request, tmp_path, server):
    """A place in the folder of the test, or at a server."""
    (tmp_path / "sink").mkdir()
    return SinkTarget(request.param, tmp_path / "sink", server(request.param))


@pytest.fixture
def cluster(sessions):
    """A session on a cluster of two executors, in which attempts may fail often."""
    return sessions.get(LOCAL_CLUSTER, **{"spark.task.maxFailures": "30"})


@contextlib.contextmanager
def when(condition, then):
    """Does something, beside, when a condition holds."""
    problems = []

    def run():
        try:
            eventually(condition, 110, "what this test waits for")
            then()
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join(120)
    assert not problems, problems


def offers(topology, number):
    """Whether so many attempts have offered what they staged."""
    return lambda: topology.progress.get("commit/1", {}).get("staged", 0) >= number


def check(spark, place, journal):
    """All rows are there, once, and those of each partition by one attempt, which Spark accepted."""
    visible = place.visible()
    assert [number for number, _ in visible] == list(range(40))
    writers = attempts_by_partition(visible)
    assert {partition for partition, numbers in writers.items() if len(numbers) == 1} == {0, 1, 2, 3}
    assert set.union(*writers.values()) <= accepted_attempts(spark, journal)
    assert place.leftovers() == []


def test_tasks_that_die(cluster, anywhere, tmp_path, journal):
    """A worker that is killed when it has staged all; an executor that is, when the driver has heard the offer of its task."""
    offered, died = str(tmp_path / "offered"), str(tmp_path / "died")

    def staged(partition, attempt, number):
        if partition == 1 and number == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def dies(partition, attempt, number):
        if partition == 2:
            with contextlib.suppress(FileExistsError):
                os.close(os.open(died, os.O_CREAT | os.O_EXCL))
                eventually(lambda: os.path.exists(offered), 60, "the driver has heard of it")
                kill(executor_pid())
                time.sleep(60)

    sink = recording_sink(anywhere.sink(), journal, staged=staged, offered=dies)
    with stagecrew.crew(cluster).topology("t") as topology:

        def heard():
            return os.path.exists(died) and offers(topology, 4)()  # of all four: no other runs on its executor

        with when(heard, lambda: Path(offered).touch()):
            report = topology.commit(rows_of(cluster), sink)
        assert (report.rows, report.parts) == (40, 4)
        assert topology.progress["commit/1"]["staged"] >= 5
    check(cluster, anywhere, journal)


@pytest.mark.parametrize("ends", ["both", pytest.param("one", marks=pytest.mark.long)])
def test_speculation(sessions, standalone, place, tmp_path, journal, ends):
    """Two attempts of a task that both stage all, and end at the same time, or of which one does not end until it is killed."""
    spark = sessions.get(
        standalone,
        spark__speculation="true",
        spark__speculation__interval="100ms",
        spark__speculation__quantile="0.5",
        spark__speculation__multiplier="0.1",
        spark__speculation__minTaskRuntime="200ms",
    )
    eventually(lambda: len(executor_ids(spark)) == 2, 120, "both executors are here, on two hosts")
    go = str(tmp_path / "go")

    def meets(partition, attempt, number):
        if partition == 0:
            journal.write(event="offered", attempt=attempt)
            eventually(lambda: os.path.exists(go), 120, "both have offered")
            if ends == "one" and number == 0:
                time.sleep(60)

    sink = recording_sink(place.sink(), journal, offered=meets)
    with stagecrew.crew(spark).topology("t") as topology, when(offers(topology, 5), lambda: Path(go).touch()):
        assert topology.commit(rows_of(spark), sink).rows == 40
    assert len(journal.read(event="staged", partition=0)) == 2
    check(spark, place, journal)


def tree_of_this_worker():
    """The executor, its daemon, and this worker."""
    return [executor_pid(), os.getppid(), os.getpid()]


@pytest.mark.parametrize("how", ["killed", pytest.param("stopped", marks=pytest.mark.long)])
def test_a_zombie(sessions, anywhere, tmp_path, journal, how):
    """A worker that outlives its executor, or stands still with it, and writes when the commit is over: nothing of it is left."""
    quick = {
        "spark.executor.heartbeatInterval": "1s",
        "spark.network.timeout": "8s",
        "spark.network.timeoutInterval": "1s",
    }
    cluster = sessions.get(LOCAL_CLUSTER, **{"spark.task.maxFailures": "30"}, **(quick if how == "stopped" else {}))
    over = str(tmp_path / "over")

    def late(partition, attempt, number):
        if partition == 2 and number == 0:
            for one in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
                signal.signal(one, signal.SIG_IGN)
            pids = tree_of_this_worker()
            journal.write(event="late", pids=pids)
            if how == "killed":
                kill(pids[0])
            eventually(lambda: os.path.exists(over), 120, "the commit is over")
            journal.write(event="goes on", attempt=attempt)

    def stop():
        for pid in journal.read(event="late")[0]["pids"]:
            kill(pid, signal.SIGSTOP)

    sink = recording_sink(anywhere.sink(), journal, before=late)
    try:
        stops = when(lambda: journal.read(event="late"), stop) if how == "stopped" else contextlib.nullcontext()
        with stagecrew.crew(cluster).topology("t") as topology, stops:
            assert topology.commit(rows_of(cluster), sink).rows == 40
        Path(over).touch()
    finally:
        (line,) = journal.read(event="late")
        for pid in line["pids"]:
            kill(pid, signal.SIGCONT)
    eventually(lambda: journal.read(event="goes on"), 30, "it goes on")
    worker = line["pids"][2]
    eventually(lambda: not is_alive(worker), 60, "it has ended")
    check(cluster, anywhere, journal)
    eventually(lambda: not any(map(is_alive, line["pids"])), 60, "and so have its executor and its daemon")


CASES = {
    # Spark finds out that the map stage gives other rows now, and has taken a result: it fails the job.
    "taken": ("true", "some"),
    # It has taken none: it runs the stage that reads them again as a whole.
    "again": ("true", "none"),
    # It does not look, and takes rows of both.
    "unseen": ("false", "some"),
}


def claimed(path):
    """Whether this call is the first that creates the file."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_upstream_with_other_output(cluster, place, tmp_path, journal, case):
    """A map stage that runs again and writes other rows: what Spark accepts is committed, and when it accepts none, none is."""
    looks, before = CASES[case]
    cluster.conf.set("spark.sql.shuffle.orderIndependentChecksum.enabled", looks)
    cluster.conf.set("spark.sql.shuffle.orderIndependentChecksum.enableFullRetryOnMismatch", looks)
    taken, died, again = (str(tmp_path / name) for name in ("taken", "died", "again"))

    def salted(batches):
        salt = os.urandom(4).hex()
        (tmp_path / f"map-{executor_pid()}").touch()
        if os.path.exists(died):
            Path(again).touch()
        for batch in batches:
            ids = batch.column(0)
            yield pa.record_batch({"id": ids, "text": [f"{salt} of {one // 10}" for one in ids.to_pylist()]})

    def dies(batches):
        first = not os.path.exists(again)
        yield from batches
        if not first:
            return
        executor = executor_pid()
        # One task kills its executor, and only one that has map output: on a slow machine an executor may have none.
        if (tmp_path / f"map-{executor}").exists() and claimed(tmp_path / "killer"):
            if before == "some":
                eventually(lambda: os.path.exists(taken), 60, "Spark has taken a result")
            Path(died).touch()
            kill(executor)
            time.sleep(60)
        elif before == "none":
            time.sleep(
                240
            )  # Spark kills it, as its rows are old. If it ended before that, Spark would have taken a result.

    dataset = rows_of(cluster).mapInArrow(salted, "id long, text string").repartition(4, "id")
    dataset = dataset.mapInArrow(dies, dataset.schema)
    tracker = cluster.sparkContext.statusTracker()

    def one_is_taken():
        stages = {line["stage"] for line in journal.read(event="attempt")}
        return any((info := tracker.getStageInfo(stage)) and info.numCompletedTasks for stage in stages)

    sink, failure = recording_sink(place.sink(), journal), None
    try:
        takes = when(one_is_taken, lambda: Path(taken).touch()) if before == "some" else contextlib.nullcontext()
        with stagecrew.crew(cluster).topology("t") as topology, takes:
            topology.commit(dataset, sink)
    except Exception as error:
        failure = str(error)
    finally:
        cluster.conf.unset("spark.sql.shuffle.orderIndependentChecksum.enabled")
        cluster.conf.unset("spark.sql.shuffle.orderIndependentChecksum.enableFullRetryOnMismatch")
    visible = place.visible()
    assert os.path.exists(again)
    assert place.leftovers() == []
    if case == "taken":
        assert failure is not None
        assert "indeterminate output" in failure
        assert visible == []
        return
    assert failure is None
    assert [number for number, _ in visible] == list(range(40))
    assert {int(text.rsplit(" ", 1)[1]) for _, text in visible} <= accepted_attempts(cluster, journal)
    salts = {text.split(" by ")[0] for _, text in visible}
    assert len(salts) == 4 if case == "again" else len(salts) > 4
