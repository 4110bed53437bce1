"""Commits with real Spark: what is committed is what Spark accepted, whatever attempts and drivers do."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
from pyspark import cloudpickle
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import functions as f

import stagecrew
from crewtools import LOCAL, LOCAL_CLUSTER, eventually
from drivers import driver
from modelstore import ModelServer
from places import ROWS, Place, rows_of
from stagecrew.operators.sinks import DatabaseSink, ParquetSink
from stagecrew.recovery.jobs.job import Job
from stagecrew.recovery.run.execution import infrastructure_error
from stagecrew.recovery.state.handles import StateHandleStore
from stagecrew.recovery.state.storage import StateStorage
from stagecrew.session.running_job import set_running_job

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(
    params=["parquet", *(pytest.param(name, marks=pytest.mark.long) for name in ("objects", "sqlite", "iceberg"))]
)
def place(request, tmp_path):
    (tmp_path / "sink").mkdir()
    return Place(request.param, tmp_path / "sink")


@pytest.fixture
def cluster(sessions):
    """A session on a cluster of two executors, in which attempts may fail often."""
    return sessions.get(LOCAL_CLUSTER, **{"spark.task.maxFailures": "30"})


@pytest.fixture
def strict(sessions):
    """A session in which attempts may fail twice."""
    return sessions.get(LOCAL_CLUSTER, **{"spark.task.maxFailures": "2"})


def through(dataset: Any, work: Any) -> Any:
    """The dataset, with something done to its tasks."""
    return dataset.mapInArrow(work, dataset.schema)


def test_a_session_remembers_its_commits(strict, place):
    """One that is decided, and cannot be done yet, goes on when it is called again, though no decisions were given; nothing runs."""
    times = [4]
    sink = place.sink()
    commit = type(sink).commit

    class Down(type(sink)):
        """It cannot be reached, for a while."""

        def commit(self, staging, messages):
            if times[0]:
                times[0] -= 1
                raise OSError("the network is down")
            commit(self, staging, messages)

    def never(batches):
        raise ValueError("it ran again")
        yield

    sink.__class__ = Down
    with (
        pytest.raises(stagecrew.CommitPending, match="the network is down"),
        stagecrew.crew(strict).topology("one") as topology,
    ):
        topology.commit(rows_of(strict), sink, f"daily {place.folder}")
    assert place.visible() == []
    with stagecrew.crew(strict).topology("two") as topology:
        report = topology.commit(through(rows_of(strict), never), sink, f"daily {place.folder}")
    assert (report.rows, report.repeated) == (40, True)
    assert place.visible() == ROWS
    assert place.left() == []


@pytest.mark.long
def test_ctrl_c(cluster, place):
    """Ctrl-C while tasks stage: nothing is visible, nothing left."""
    import threading

    sink = place.sink()
    stage = type(sink).stage

    class Slow(type(sink)):
        """Its tasks have staged all, and go on for long."""

        def stage(self, staging, partition, attempt, batches):
            message = stage(self, staging, partition, attempt, batches)
            time.sleep(60)
            return message

    sink.__class__ = Slow

    def interrupts():
        with contextlib.suppress(AssertionError):
            eventually(lambda: topology.progress.get("commit/1", {}).get("staging", 0) >= 2, 20, "tasks stage")
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt), stagecrew.crew(cluster).topology("t") as topology:
        threading.Thread(target=interrupts).start()
        topology.commit(rows_of(cluster), sink)
    assert place.visible() == []
    assert place.left() == []


DRIVER = """
import os, signal
from places import Place, ROWS, rows_of
from sinks import Driver, Killed

class Kills(Driver):
    def moment(self, name, holds=False):
        super().moment(name)
        if self.moments == {at}:
            os.kill(os.getpid(), signal.SIGKILL)

place = Place.__new__(Place)
place.name, place.folder, place.conf = {name!r}, __import__("pathlib").Path({folder!r}), {conf!r}
spark = stagecrew.configure(base({master!r})).getOrCreate()
watcher = Kills()
sink = place.sink()
decisions = watcher.watched(stagecrew.FileCommitLog({log!r}), ("write",))

class Watches(type(sink)):
    def begin(self, staging):
        watcher.moment("before begin"); super().begin(staging); watcher.moment("after begin")
    def commit(self, staging, messages):
        watcher.moment("before commit"); super().commit(staging, messages); watcher.moment("after commit")
    def discard(self, staging, kept):
        watcher.moment("before discard"); super().discard(staging, kept); watcher.moment("after discard")
    def __reduce__(self):
        return (type(sink).__mro__[1].__new__, (type(sink).__mro__[1],), self.__getstate__())

sink.__class__ = Watches
for _ in range(1 if {at} else 2):
    with stagecrew.crew(spark).topology("t") as topology:
        report = topology.commit(rows_of(spark), sink, "one", decisions)
    there = sorted((str(path), path.stat().st_size) for path in place.folder.rglob("*") if path.is_file())
    journal.write(event="done", repeated=report.repeated, there=there)
spark.stop()
"""


@pytest.mark.long
@pytest.mark.parametrize("at", range(2, 13))  # from when the commit is opened until it is written that it is done
@pytest.mark.parametrize("name", ["parquet", "sqlite", "iceberg", "objects"])
def test_the_driver_is_killed(sessions, tmp_path, journal, name, at):
    """A driver that dies by SIGKILL; another brings all rows, once, and leaves nothing; when it repeats that nothing changes."""
    sessions.stop()
    (tmp_path / "sink").mkdir()
    place = Place(name, tmp_path / "sink")

    def script(moment: int) -> str:
        values = {
            "at": moment, "name": name, "folder": str(place.folder), "conf": place.conf,
            "log": str(tmp_path / "log"),
        }  # fmt: skip
        text = DRIVER
        for key, value in values.items():
            text = text.replace(f"{{{key}!r}}", repr(value)).replace(f"{{{key}}}", str(value))
        return text

    (tmp_path / "one").mkdir(), (tmp_path / "two").mkdir()
    with driver(tmp_path / "one", journal, "local[2]", script(at)) as process:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(120)
        assert process.returncode == -signal.SIGKILL
    assert place.visible() in ([], ROWS)
    with driver(tmp_path / "two", journal, "local[2]", script(0)) as process:
        assert process.wait(120) == 0
    again, repeat = journal.read(event="done")
    assert again["repeated"] == (at >= 6)  # behind the write of the decision
    assert repeat["repeated"]
    assert again["there"] == repeat["there"]
    assert place.visible() == ROWS
    assert place.left() == []


@pytest.mark.parametrize("pending", [True, False])
def test_a_sink_that_is_away_in_a_stream(sessions, pending):
    """What foreachBatch raised comes back as text alone: a job has not failed when a commit in there could not be done yet."""

    def each(frame, batch):
        raise stagecrew.CommitPending("it waits") if pending else ValueError("mine")

    stream = sessions.get(LOCAL).readStream.format("rate-micro-batch").option("rowsPerBatch", 10).load()
    query = stream.writeStream.foreachBatch(each).start()
    with pytest.raises(StreamingQueryException) as raised:
        query.awaitTermination(120)
    why = infrastructure_error(raised.value)
    assert why == ("CommitPending: it waits" if pending else None)


def test_two_topologies_at_once(cluster, place):
    """Two that commit to one place: both land, or one says that it cannot."""
    import threading

    outcomes: list[Any] = []

    def run(name):
        try:
            with stagecrew.crew(cluster).topology(name) as topology:
                outcomes.append(topology.commit(rows_of(cluster), place.sink()))
        except stagecrew.CommitConflict as error:
            outcomes.append(error)

    threads = [threading.Thread(target=run, args=(name,)) for name in ("one", "other")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    conflicts = [one for one in outcomes if isinstance(one, stagecrew.CommitConflict)]
    assert len(outcomes) == 2
    assert len(conflicts) == (1 if place.name == "parquet" else 0)
    assert len(place.visible()) == 40 * (2 - len(conflicts))
    assert place.left() == []


def test_other_content(strict, tmp_path, caplog):
    """An id that is used again for other content raises in a topology. A job's later run gets a warning, and the rows of the earlier run."""
    sink, commit_log = ParquetSink(tmp_path / "table"), stagecrew.FileCommitLog(tmp_path / "log")
    session = ModelServer().session()
    session.ensure("steps", "commits")
    (tmp_path / "state").mkdir()
    handles = [StateHandleStore(session, StateStorage(tmp_path / "state"), name) for name in ("steps", "commits")]
    with stagecrew.crew(strict).topology("t") as topology:
        assert not topology.commit(rows_of(strict), sink, "daily", commit_log, content="monday").repeated
        assert topology.commit(rows_of(strict), sink, "daily", commit_log, content="monday").repeated
        with pytest.raises(stagecrew.OperatorMisused, match="content is 'tuesday', there 'monday'"):
            topology.commit(rows_of(strict), sink, "daily", commit_log, content="tuesday")
        assert [record for record in caplog.messages if "with 40 rows. This call has written nothing" in record]
        caplog.clear()
        in_job = ParquetSink(tmp_path / "other")
        try:
            for attempt in (1, 2):
                set_running_job(Job("nightly", attempt, *handles))
                assert topology.commit(rows_of(strict), in_job, content=f"run {attempt}").repeated == (attempt == 2)
            with pytest.raises(stagecrew.OperatorMisused, match="content is 'other', there 'run 1'"):
                set_running_job(Job("nightly", 1, *handles))
                topology.commit(rows_of(strict), in_job, content="other")
        finally:
            set_running_job(None)
    [said] = [record for record in caplog.messages if "earlier run" in record]
    assert "an earlier run of this job has decided commit 'nightly/commit', and its rows stay" in said
    assert "content is 'run 2', there 'run 1'" in said


def test_a_failed_job(strict, place):
    """Its exception comes through, nothing is visible, nothing left."""

    def fails(batches):
        for batch in batches:
            yield batch
            if batch.column(0)[0].as_py() >= 30:
                raise ValueError("the last partition is bad")

    with (
        pytest.raises(PySparkException, match="the last partition is bad"),
        stagecrew.crew(strict).topology("t") as topology,
    ):
        topology.commit(through(rows_of(strict), fails), place.sink())
    assert place.visible() == []
    assert place.left() == []


def test_a_file_that_cannot_grow(strict, place, tmp_path):
    """A task that cannot write all of its rows: the error says so, nothing is visible, nothing left."""
    sink = place.sink()
    stage = type(sink).stage

    class Small(type(sink)):
        """Its tasks write files of 512 bytes at most."""

        def stage(self, staging, partition, attempt, batches):
            import resource

            soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (512, hard))
            try:
                return stage(self, staging, partition, attempt, batches)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    sink.__class__ = Small
    with (
        pytest.raises(PySparkException, match="File too large|disk I/O error"),
        stagecrew.crew(strict).topology("t") as topology,
    ):
        topology.commit(rows_of(strict), sink)
    assert place.visible() == []
    assert place.left() == []


@pytest.mark.long
def test_a_full_disk(strict, tmp_path):
    """A small tmpfs: the error says so, nothing is visible, nothing left."""
    disk = tmp_path / "small"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], check=True)
    try:
        large = strict.range(0, 40_000, 1, 4).select(f.sha2(f.col("id").cast("string"), 512).alias("text"))
        with (
            pytest.raises(PySparkException, match="No space left on device"),
            stagecrew.crew(strict).topology("t") as topology,
        ):
            topology.commit(large, ParquetSink(disk / "table"))
        assert list(disk.rglob("*")) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_where_nothing_can_be_written(strict):
    """It is said before anything runs."""
    with (
        pytest.raises(stagecrew.CommitFailed, match="/proc/nowhere/table cannot be written"),
        stagecrew.crew(strict).topology("t") as topology,
    ):
        topology.commit(rows_of(strict), ParquetSink("/proc/nowhere/table"))


@pytest.mark.long
def test_a_read_only_directory(strict, tmp_path):
    """It is said before anything runs."""
    disk = tmp_path / "fixed"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k,ro", "tmpfs", str(disk)], check=True)
    try:
        with (
            pytest.raises(stagecrew.CommitFailed, match="cannot be written.*Read-only file system"),
            stagecrew.crew(strict).topology("t") as topology,
        ):
            topology.commit(rows_of(strict), ParquetSink(disk / "table"))
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_bad_input(strict, tmp_path):
    """What is no DataFrame, no Committer; a table that is not there."""
    with stagecrew.crew(strict).topology("t") as topology:
        with pytest.raises(stagecrew.OperatorMisused, match="takes a DataFrame, not int"):
            topology.commit(7, ParquetSink(tmp_path / "t"))
        with pytest.raises(
            stagecrew.OperatorMisused, match="str is no Committer: it has no begin, stage, commit, done, discard"
        ):
            topology.commit(rows_of(strict), "a path")
        with pytest.raises(stagecrew.CommitFailed, match="no such table: target"):
            topology.commit(rows_of(strict), DatabaseSink(f"sqlite:///{tmp_path}/new.db", "target"))
    with pytest.raises(stagecrew.TopologyClosed):
        topology.commit(rows_of(strict), ParquetSink(tmp_path / "t"))
