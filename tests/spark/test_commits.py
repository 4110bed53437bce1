"""Commits with real Spark: exactly the rows that Spark accepted are committed, whatever happens to tasks and
drivers."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import signal
import sqlite3
import subprocess
import sys
import time
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark import cloudpickle
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import functions as f

import stagecrew
from stagecrew.operators.sinks import DatabaseSink, ParquetSink
from stagecrew.recovery.jobs.job import Job
from stagecrew.recovery.run.execution import infrastructure_error
from stagecrew.recovery.state.handles import StateHandleStore
from stagecrew.recovery.state.storage import StateStorage
from stagecrew.session.running_job import set_running_job
from support.driver_scripts import driver_script
from support.model_store import ModelServer
from support.sessions import LOCAL, LOCAL_CLUSTER
from support.sink_targets import ROWS, SinkTarget, rows_of
from support.waiting import eventually

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(
    params=["parquet", *(pytest.param(name, marks=pytest.mark.long) for name in ("objects", "sqlite", "iceberg"))]
)
def place(request, tmp_path):
    (tmp_path / "sink").mkdir()
    return SinkTarget(request.param, tmp_path / "sink")


@pytest.fixture
def cluster(sessions):
    """A session on a cluster of two executors. A task may fail 30 times."""
    return sessions.get(LOCAL_CLUSTER, **{"spark.task.maxFailures": "30"})


@pytest.fixture
def few_retries(sessions):
    """A session on a cluster of two executors. A task may fail twice."""
    return sessions.get(LOCAL_CLUSTER, **{"spark.task.maxFailures": "2"})


def map_batches(dataset: Any, work: Any) -> Any:
    """Applies a function to the dataset's batches in its tasks."""
    return dataset.mapInArrow(work, dataset.schema)


def test_a_pending_commit_resumes_in_the_same_session(few_retries, place):
    """A decided commit that could not be applied resumes when `commit` is called again, even without a commit log.

    The second call runs no task.
    """
    failures_left = [4]
    sink = place.sink()
    commit = type(sink).commit

    class UnreachableSink(type(sink)):
        """A sink that cannot be reached during the first calls of `commit`."""

        def commit(self, staging, messages):
            if failures_left[0]:
                failures_left[0] -= 1
                raise OSError("the network is down")
            commit(self, staging, messages)

    def raise_if_run(batches):
        raise ValueError("it ran again")
        yield

    sink.__class__ = UnreachableSink
    with (
        pytest.raises(stagecrew.errors.CommitPending, match="the network is down"),
        stagecrew.crew(few_retries).topology("one") as topology,
    ):
        topology.commit(rows_of(few_retries), sink, f"daily {place.folder}")
    assert place.visible() == []
    with stagecrew.crew(few_retries).topology("two") as topology:
        report = topology.commit(map_batches(rows_of(few_retries), raise_if_run), sink, f"daily {place.folder}")
    assert (report.rows, report.repeated) == (40, True)
    assert place.visible() == ROWS
    assert place.leftovers() == []


@pytest.mark.contract
def test_timestamps_are_committed(few_retries, tmp_path):
    """Timestamps, also inside arrays, are committed as instants, whatever the time zone of the session is."""
    spark, zone = few_retries, few_retries.conf.get("spark.sql.session.timeZone")
    at = dt.datetime(2024, 7, 1, 8, tzinfo=dt.UTC)
    with contextlib.closing(sqlite3.connect(tmp_path / "data.db")) as database:
        database.execute("CREATE TABLE target (t TEXT)")
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    try:
        rows = spark.sql(
            "SELECT timestamp '2024-07-01 08:00:00 UTC' AS t, array(timestamp '2024-07-01 08:00:00 UTC') AS ts"
        )
        with stagecrew.crew(spark).topology("t") as topology:
            topology.commit(rows, ParquetSink(tmp_path / "table"))
            topology.commit(rows.select("t"), DatabaseSink(f"sqlite:///{tmp_path}/data.db", "target"))
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone)
    assert pq.read_table(tmp_path / "table").to_pylist() == [{"t": at, "ts": [at]}]
    with contextlib.closing(sqlite3.connect(tmp_path / "data.db")) as database:
        ((stored,),) = database.execute("SELECT t FROM target").fetchall()
    assert dt.datetime.fromisoformat(stored) == at
    assert stored.endswith("+00:00")


@pytest.mark.long
def test_ctrl_c_while_tasks_stage_leaves_nothing(cluster, place):
    """After Ctrl-C while tasks are staging rows, no row is visible, and nothing is left."""
    import threading

    sink = place.sink()
    stage = type(sink).stage

    class SlowSink(type(sink)):
        """A sink whose tasks stage all rows, then keep running."""

        def stage(self, staging, partition, attempt, batches):
            message = stage(self, staging, partition, attempt, batches)
            time.sleep(60)
            return message

    sink.__class__ = SlowSink

    def interrupt():
        with contextlib.suppress(AssertionError):
            eventually(
                lambda: topology.progress.get("commit/1", {}).get("staging", 0) >= 2, 20, "tasks are staging rows"
            )
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt), stagecrew.crew(cluster).topology("t") as topology:
        threading.Thread(target=interrupt).start()
        topology.commit(rows_of(cluster), sink)
    assert place.visible() == []
    assert place.leftovers() == []


#: A driver that kills itself at the step with number `dies_at`. If `dies_at` is 0, it commits twice instead.
DRIVER = """
import os, signal
from support.sink_targets import SinkTarget, ROWS, rows_of
from support.commit_trials import Driver, Killed

class DyingDriver(Driver):
    def moment(self, name, holds_lock=False):
        super().moment(name)
        if self.moments == {dies_at}:
            os.kill(os.getpid(), signal.SIGKILL)

place = SinkTarget.__new__(SinkTarget)
place.name, place.folder, place.conf = {name!r}, __import__("pathlib").Path({folder!r}), {conf!r}
spark = stagecrew.configure(session_builder({master!r})).getOrCreate()
watcher = DyingDriver()
sink = place.sink()
commit_log = watcher.instrument(stagecrew.operators.FileCommitLog({log!r}), ("write",))

class WatchedSink(type(sink)):
    def begin(self, staging):
        watcher.moment("before begin"); super().begin(staging); watcher.moment("after begin")
    def commit(self, staging, messages):
        watcher.moment("before commit"); super().commit(staging, messages); watcher.moment("after commit")
    def discard(self, staging, kept):
        watcher.moment("before discard"); super().discard(staging, kept); watcher.moment("after discard")
    def __reduce__(self):
        return (type(sink).__mro__[1].__new__, (type(sink).__mro__[1],), self.__getstate__())

sink.__class__ = WatchedSink
for _ in range(1 if {dies_at} else 2):
    with stagecrew.crew(spark).topology("t") as topology:
        report = topology.commit(rows_of(spark), sink, "one", commit_log)
    files = sorted((str(path), path.stat().st_size) for path in place.folder.rglob("*") if path.is_file())
    journal.write(event="done", repeated=report.repeated, files=files)
spark.stop()
"""


@pytest.mark.long
@pytest.mark.parametrize("dies_at", range(2, 13))  # from the beginning of the commit to the record that it is done
@pytest.mark.parametrize("name", ["parquet", "sqlite", "iceberg", "objects"])
def test_a_commit_survives_sigkill_of_its_driver(sessions, tmp_path, journal, name, dies_at):
    """After SIGKILL of a driver, the next driver commits all rows once and leaves nothing. A repeat changes nothing."""
    sessions.stop()
    (tmp_path / "sink").mkdir()
    place = SinkTarget(name, tmp_path / "sink")

    def script(moment: int) -> str:
        values = {
            "dies_at": moment, "name": name, "folder": str(place.folder), "conf": place.conf,
            "log": str(tmp_path / "log"),
        }  # fmt: skip
        text = DRIVER
        for key, value in values.items():
            text = text.replace(f"{{{key}!r}}", repr(value)).replace(f"{{{key}}}", str(value))
        return text

    (tmp_path / "one").mkdir(), (tmp_path / "two").mkdir()
    with driver_script(tmp_path / "one", journal, "local[2]", script(dies_at)) as process:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(120)
        assert process.returncode == -signal.SIGKILL
    assert place.visible() in ([], ROWS)
    with driver_script(tmp_path / "two", journal, "local[2]", script(0)) as process:
        assert process.wait(120) == 0
    second_run, repeat = journal.read(event="done")
    assert second_run["repeated"] == (dies_at >= 6)  # after the decision was written
    assert repeat["repeated"]
    assert second_run["files"] == repeat["files"]
    assert place.visible() == ROWS
    assert place.leftovers() == []


@pytest.mark.contract
@pytest.mark.parametrize("pending", [True, False])
def test_a_pending_commit_in_foreach_batch_is_not_the_jobs_fault(sessions, pending):
    """A pending commit in `foreachBatch` does not count as a failure of the job.

    It must be recognized although Spark passes on an exception raised in `foreachBatch` only as text.
    """

    def process_batch(frame, batch):
        raise stagecrew.errors.CommitPending("it waits") if pending else ValueError("mine")

    stream = sessions.get(LOCAL).readStream.format("rate-micro-batch").option("rowsPerBatch", 10).load()
    query = stream.writeStream.foreachBatch(process_batch).start()
    with pytest.raises(StreamingQueryException) as raised:
        query.awaitTermination(120)
    excuse = infrastructure_error(raised.value)
    assert excuse == ("CommitPending: it waits" if pending else None)


@pytest.mark.contract
def test_two_topologies_that_commit_at_once_succeed_or_conflict(cluster, place):
    """If two topologies commit to the same place at the same time, both commits succeed, or one raises a conflict."""
    import threading

    outcomes: list[Any] = []

    def run(name):
        try:
            with stagecrew.crew(cluster).topology(name) as topology:
                outcomes.append(topology.commit(rows_of(cluster), place.sink()))
        except stagecrew.errors.CommitConflict as error:
            outcomes.append(error)

    threads = [threading.Thread(target=run, args=(name,)) for name in ("one", "other")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    conflicts = [outcome for outcome in outcomes if isinstance(outcome, stagecrew.errors.CommitConflict)]
    assert len(outcomes) == 2
    assert len(conflicts) == (1 if place.name == "parquet" else 0)
    assert len(place.visible()) == 40 * (2 - len(conflicts))
    assert place.leftovers() == []


def test_a_commit_id_with_other_content_raises_or_warns(few_retries, tmp_path, caplog):
    """If a commit id is reused with other content in one topology, `commit` raises.

    In a later run of a job, `commit` only logs a warning, and the earlier rows stay.
    """
    sink, commit_log = ParquetSink(tmp_path / "table"), stagecrew.operators.FileCommitLog(tmp_path / "log")
    session = ModelServer().session()
    session.ensure("steps", "commits")
    (tmp_path / "state").mkdir()
    handles = [StateHandleStore(session, StateStorage(tmp_path / "state"), name) for name in ("steps", "commits")]
    with stagecrew.crew(few_retries).topology("t") as topology:
        assert not topology.commit(rows_of(few_retries), sink, "daily", commit_log, content="monday").repeated
        assert topology.commit(rows_of(few_retries), sink, "daily", commit_log, content="monday").repeated
        with pytest.raises(stagecrew.errors.OperatorMisused, match="content is 'tuesday', was 'monday'"):
            topology.commit(rows_of(few_retries), sink, "daily", commit_log, content="tuesday")
        assert [record for record in caplog.messages if "with 40 rows. This call has written nothing" in record]
        caplog.clear()
        in_job = ParquetSink(tmp_path / "other")
        try:
            for attempt in (1, 2):
                set_running_job(Job("nightly", attempt, *handles))
                assert topology.commit(rows_of(few_retries), in_job, content=f"run {attempt}").repeated == (
                    attempt == 2
                )
            with pytest.raises(stagecrew.errors.OperatorMisused, match="content is 'other', was 'run 1'"):
                set_running_job(Job("nightly", 1, *handles))
                topology.commit(rows_of(few_retries), in_job, content="other")
        finally:
            set_running_job(None)
    [warning] = [record for record in caplog.messages if "earlier run" in record]
    assert "an earlier run of this job has decided commit 'nightly/commit', and its rows stay" in warning
    assert "content is 'run 2', was 'run 1'" in warning


def test_a_failed_job_leaves_nothing(few_retries, place):
    """If a job fails, its exception is raised, no row is visible, and nothing is left."""

    def fail_at_the_end(batches):
        for batch in batches:
            yield batch
            if batch.column(0)[0].as_py() >= 30:
                raise ValueError("the last partition is bad")

    with (
        pytest.raises(PySparkException, match="the last partition is bad"),
        stagecrew.crew(few_retries).topology("t") as topology,
    ):
        topology.commit(map_batches(rows_of(few_retries), fail_at_the_end), place.sink())
    assert place.visible() == []
    assert place.leftovers() == []


def test_a_task_that_cannot_write_its_file_leaves_nothing(few_retries, place, tmp_path):
    """If a task cannot write all of its rows, the error says why, no row is visible, and nothing is left."""
    sink = place.sink()
    stage = type(sink).stage

    class SmallFileSink(type(sink)):
        """A sink whose tasks can write files of at most 512 bytes."""

        def stage(self, staging, partition, attempt, batches):
            import resource

            soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (512, hard))
            try:
                return stage(self, staging, partition, attempt, batches)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    sink.__class__ = SmallFileSink
    with (
        pytest.raises(PySparkException, match="File too large|disk I/O error"),
        stagecrew.crew(few_retries).topology("t") as topology,
    ):
        topology.commit(rows_of(few_retries), sink)
    assert place.visible() == []
    assert place.leftovers() == []


@pytest.mark.long
def test_a_full_disk_leaves_nothing(few_retries, tmp_path):
    """If the disk (a small tmpfs) is full, the error says so, and nothing is left."""
    disk = tmp_path / "small"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], check=True)
    try:
        large = few_retries.range(0, 40_000, 1, 4).select(f.sha2(f.col("id").cast("string"), 512).alias("text"))
        with (
            pytest.raises(PySparkException, match="No space left on device"),
            stagecrew.crew(few_retries).topology("t") as topology,
        ):
            topology.commit(large, ParquetSink(disk / "table"))
        assert list(disk.rglob("*")) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_an_unwritable_path_is_reported_before_anything_runs(few_retries):
    """A commit to a path that cannot be written fails before any task runs."""
    with (
        pytest.raises(stagecrew.errors.CommitFailed, match="/proc/nowhere/table cannot be written"),
        stagecrew.crew(few_retries).topology("t") as topology,
    ):
        topology.commit(rows_of(few_retries), ParquetSink("/proc/nowhere/table"))


@pytest.mark.long
def test_a_read_only_directory_is_reported_before_anything_runs(few_retries, tmp_path):
    """A commit to a read-only directory fails before any task runs."""
    disk = tmp_path / "fixed"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k,ro", "tmpfs", str(disk)], check=True)
    try:
        with (
            pytest.raises(stagecrew.errors.CommitFailed, match="cannot be written.*Read-only file system"),
            stagecrew.crew(few_retries).topology("t") as topology,
        ):
            topology.commit(rows_of(few_retries), ParquetSink(disk / "table"))
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_invalid_arguments_are_rejected(few_retries, tmp_path):
    """Wrong types of dataset and sink, a missing table and a closed topology are rejected."""
    with stagecrew.crew(few_retries).topology("t") as topology:
        with pytest.raises(stagecrew.errors.OperatorMisused, match="takes a DataFrame, not int"):
            topology.commit(7, ParquetSink(tmp_path / "t"))
        with pytest.raises(
            stagecrew.errors.OperatorMisused,
            match="str is not a Committer: it has no begin, stage, commit, done, discard",
        ):
            topology.commit(rows_of(few_retries), "a path")
        with pytest.raises(stagecrew.errors.CommitFailed, match="no such table: target"):
            topology.commit(rows_of(few_retries), DatabaseSink(f"sqlite:///{tmp_path}/new.db", "target"))
    with pytest.raises(stagecrew.errors.TopologyError):
        topology.commit(rows_of(few_retries), ParquetSink(tmp_path / "t"))
