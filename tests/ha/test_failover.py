"""Jobs that survive their driver: real drivers, real Spark, a real store, and SIGKILL."""

import contextlib
import dataclasses
import os
import pickle
import signal
import time
import urllib.request
import uuid
from urllib.parse import urlsplit

import psutil
import pyarrow.parquet as pq
import pytest

from commands import command
from crewtools import alive, standalone_cluster
from hajobs import job_of, lines
from haprocesses import LONG, QUICK, campaign, until
from stagecrew.errors import StateStorageError, StoreUnavailable
from stagecrew.recovery.jobs.spec import JobSpec
from stagecrew.recovery.stores import open_store
from stagecrew.recovery.stores.contract import FORMAT
from webpages import fetched

ODD = "a = b: c # d ! \\ é € 𝄞"
SCRIPT = f"""
import sys
import stagecrew
from pyspark import SparkContext
assert sys.argv[1:] == ["a b", "--c"], sys.argv
assert stagecrew.current_job().id == "script"
SparkContext._ensure_initialized()
assert SparkContext._jvm.System.getProperty("spark.odd") == {ODD!r}
"""


@pytest.fixture
def drivers(tmp_path):
    """Over SQLite, with a folder that jobs write to."""
    with campaign(f"sqlite://{tmp_path}/jobs.db", tmp_path) as found:
        yield found


def test_a_leader_that_is_killed(drivers):
    """A standby runs the job of a killed leader to its end: finished steps are not run again, and its process has ended itself."""
    out = drivers.folder / "out"
    (out / "hold-2").touch()
    drivers.start()
    leader = drivers.leader()
    standby = drivers.start()
    drivers.submit(job_of("steps", drivers, count=4), "job")
    until(lambda: lines(drivers, "step-2"), "the third step runs")
    orphan = drivers.process("job")
    drivers.kill(leader)
    assert drivers.leader() is standby
    until(lambda: not alive(orphan), "the run of the killed leader has ended itself")
    until(lambda: len(lines(drivers, "step-2")) == 2, "the step that was cut short runs again")
    (out / "go-2").touch()
    result = drivers.result("job")
    assert result.value() == 60
    assert [lines(drivers, f"step-{number}") for number in range(4)] == [["1"], ["1"], ["1", "2"], ["2"]]
    assert drivers.record("job").run == 2


@pytest.mark.long
def test_a_job_in_the_tab(drivers):
    """The tab of a job's driver says which run it is, who leads in which term, and how far its steps are: also of the run that recovers it."""
    out = drivers.folder / "out"
    conf = {"spark.ui.enabled": "true", "spark.ui.port": "0"}

    def page(run):
        url = until(lambda: lines(drivers, "ui")[run - 1 :], f"run {run} is in its second step")[0]
        return f"http://127.0.0.1:{urlsplit(url).port}/stagecrew/jobs"

    def shown(run):
        told = fetched(f"{page(run)}/json/")["recovery"]
        assert all(step["started"] <= step["ended"] for step in told["steps"] if step["state"] != "running")
        return told["facts"], [(step["name"], step["state"]) for step in told["steps"]]

    drivers.start()
    leader = drivers.leader()
    standby = drivers.start()
    drivers.submit(job_of("shown", drivers, conf), "job")
    with drivers.jobs() as jobs:
        first = jobs.leader()
        facts = {"job": "job", "run": "1", "term": str(first.term), "leader": first.host, "store": "sqlite"}
        assert shown(1) == (facts, [("load", "finished"), ("sum", "running")])
        drivers.kill(leader)
        assert drivers.leader() is standby
        second = jobs.leader()
        assert second.term > first.term
        again = facts | {"run": "2", "term": str(second.term)}
        assert shown(2) == (again, [("load", "found"), ("sum", "running")])
        with urllib.request.urlopen(page(2), timeout=60) as response:
            assert str(drivers.folder) not in response.read().decode()  # where the store is
    (out / "go").touch()
    assert drivers.result("job").value() == 13


@pytest.fixture
def drivers_at_zookeeper(tmp_path, zookeeper):
    """Over ZooKeeper, in a folder of the test's own, with sessions of four seconds."""
    with campaign(f"zookeeper://{zookeeper.hosts}/failover-{uuid.uuid4().hex}?timeout=4", tmp_path) as found:
        yield found


@pytest.mark.parametrize("how", ["stopped", pytest.param("killed", marks=pytest.mark.long)])
def test_a_leader_on_zookeeper(drivers_at_zookeeper, how):
    """A leader that is killed, or only stopped, past its session is followed; its run ends itself; back again, it leads no more."""
    drivers = drivers_at_zookeeper
    out = drivers.folder / "out"
    (out / "hold-1").touch()
    drivers.start()
    leader = drivers.leader()
    standby = drivers.start()
    drivers.submit(job_of("steps", drivers, count=2), "job")
    until(lambda: lines(drivers, "step-1"), "the second step runs")
    orphan = drivers.process("job")
    if how == "killed":
        drivers.kill(leader)
    else:
        leader.send_signal(signal.SIGSTOP)
    until(lambda: not alive(orphan), "the run has ended itself")
    until(lambda: len(lines(drivers, "step-1")) == 2, "the step that was cut short runs again")
    assert drivers.leader() is standby
    leader.send_signal(signal.SIGCONT)
    (out / "go-1").touch()
    assert drivers.result("job").value() == 10
    assert [lines(drivers, "step-0"), lines(drivers, "step-1")] == [["1"], ["1", "2"]]
    assert drivers.leader() is standby


def test_rows_of_a_job_whose_leader_is_killed(drivers):
    """Its commit is there once, with all rows, when the leader is killed while tasks stage; and nothing that they staged is left."""
    out = drivers.folder / "out"
    (out / "hold-task").touch()
    drivers.start()
    leader = drivers.leader()
    drivers.start()
    drivers.submit(job_of("committing", drivers), "job")
    until(lambda: lines(drivers, "writes"), "the job writes")
    drivers.kill(leader)
    assert drivers.result("job").value() == 100
    assert sorted(pq.read_table(out / "table")["id"].to_pylist()) == list(range(100))
    assert lines(drivers, "writes") == ["1", "2"]
    assert [path.name for path in out.iterdir() if path.name.startswith("_stagecrew")] == []


@pytest.mark.long
def test_a_jvm_that_is_killed_in_an_action(drivers):
    """A job whose JVM is killed while its Python waits for an action has not failed by what that raises: it runs again."""
    out = drivers.folder / "out"
    (out / "hold-task").touch()
    drivers.start()
    drivers.submit(job_of("committing", drivers), "job")
    until(lambda: lines(drivers, "writes"), "the job writes")
    os.kill(psutil.Process(drivers.process("job")).ppid(), signal.SIGKILL)
    assert drivers.result("job").value() == 100
    assert lines(drivers, "writes") == ["1", "2"]
    assert [path.name for path in out.iterdir() if path.name.startswith("_stagecrew")] == []


@pytest.mark.long
@pytest.mark.parametrize("which", ["jvm", "python"])
def test_a_run_that_is_killed(drivers, which):
    """SIGKILL of the job's Python, or of its JVM alone, loses a run, not the job; the commit that was decided is not done again."""
    out = drivers.folder / "out"
    (out / "hold-end").touch()
    drivers.start()
    drivers.submit(job_of("committing", drivers), "job")
    until(lambda: lines(drivers, "written"), "the rows are written")
    run = drivers.process("job")
    os.kill(run if which == "python" else psutil.Process(run).ppid(), signal.SIGKILL)
    until(lambda: len(lines(drivers, "written")) == 2, "another run goes on")
    assert not alive(run)
    (out / "go-end").touch()
    assert drivers.result("job").value() == 100
    assert lines(drivers, "writes") == ["1"]


@pytest.mark.long
@pytest.mark.parametrize("moment", ["1", "behind-1"])
def test_a_coordinator_of_a_job_that_is_killed(drivers, moment):
    """A coordinator that dies in the middle of an action, or between two, goes on as of the last step: results are as if undisturbed."""
    (drivers.folder / "out" / f"hold-{moment}").touch()
    drivers.start()
    drivers.submit(job_of("counting", drivers), "job")
    started = "action-1" if moment == "1" else "behind-1"
    until(lambda: lines(drivers, started), "the job has come to its moment")
    os.kill(drivers.process("job"), signal.SIGKILL)
    until(lambda: len(lines(drivers, started)) == 2, "another run goes on")
    (drivers.folder / "out" / f"go-{moment}").touch()
    assert drivers.result("job").value() == [
        list(range(1, 11)),
        [*range(11, 21), 1, 2, 3],
        list(range(21, 31)),
    ]


@pytest.mark.long
def test_splits_of_a_job_that_is_killed(drivers):
    """A job that dies in the middle of reading splits reads each once in the end, those of its finished step first and in their order,
    though its enumerator gives them in another order the second time."""
    drivers.start()
    drivers.submit(job_of("splitting", drivers), "job")
    until(lambda: lines(drivers, "second"), "the second step reads")
    os.kill(drivers.process("job"), signal.SIGKILL)
    first, second = drivers.result("job").value()
    assert (first, {rows for _, rows in second}) == (0, {20_000})
    read = [n for n, _ in second]
    known = next(number for number, n in enumerate(read) if n != number)  # those that the first step had read
    assert read == [*range(known), *range(19, known - 1, -1)]
    assert 1 <= known <= 6
    assert [lines(drivers, name) for name in ("first", "second")] == [["1"], ["1", "2"]]


@pytest.mark.long
def test_a_run_that_is_stopped_while_its_leader_is_killed(drivers):
    """A standby that takes over begins no run of a job whose process of before is only stopped: it tends to others, and the next run
    begins when that process is gone."""
    out = drivers.folder / "out"
    (out / "hold-1").touch()
    drivers.start()
    leader = drivers.leader()
    drivers.start()
    drivers.submit(job_of("steps", drivers, count=2), "job")
    until(lambda: lines(drivers, "step-1"), "the second step runs")
    old = psutil.Process(drivers.process("job"))
    old.suspend()
    try:
        drivers.kill(leader)
        drivers.submit(job_of("fails", drivers), "other")
        assert drivers.result("other").state == "failed"  # the standby leads, and has looked at both jobs
        assert (drivers.record("job").run, lines(drivers, "step-1"), old.status()) == (1, ["1"], psutil.STATUS_STOPPED)
    finally:
        old.resume()
    until(lambda: len(lines(drivers, "step-1")) == 2, "the next run goes on")
    assert not alive(old.pid)
    (out / "go-1").touch()
    assert drivers.result("job").value() == 10
    assert drivers.record("job").run == 2


def test_hand_over(drivers):
    """SIGTERM of the leader hands over at once: its run ends, and the standby runs the job."""
    out = drivers.folder / "out"
    (out / "hold-1").touch()
    drivers.start()
    leader = drivers.leader()
    drivers.start()
    drivers.submit(job_of("steps", drivers, count=2), "job")
    until(lambda: lines(drivers, "step-1"), "the second step runs")
    run = drivers.process("job")
    leader.terminate()
    assert leader.wait(60) == 0
    drivers.running.remove(leader)
    assert not alive(run)
    until(lambda: len(lines(drivers, "step-1")) == 2, "the standby runs it")
    (out / "go-1").touch()
    assert drivers.result("job").value() == 10


def test_ends_of_jobs(drivers):
    """Several at once: one that raises, or returns what cannot be pickled, has failed, with why; one that dies each time is given up; one is cancelled."""
    out = drivers.folder / "out"
    (out / "hold-0").touch()
    script = drivers.folder / "script.py"
    script.write_text(
        "import sys, stagecrew\nassert sys.argv[1:] == ['a b', '--c']\nprint(stagecrew.current_job().id)\n"
    )
    drivers.submit(job_of("fails", drivers), "failing")
    drivers.submit(job_of("unpicklable", drivers), "unpicklable")
    drivers.submit(job_of("dies", drivers, max_attempts=2), "dying")
    drivers.submit(job_of("steps", drivers, count=1), "held")
    drivers.submit(job_of("steps", drivers, count=1), "early")
    drivers.submit(JobSpec.of_script(script, ["a b", "--c"], QUICK | {"spark.odd": ODD}), "script")
    script.unlink()
    with drivers.jobs() as jobs:
        jobs.cancel("early")
    drivers.start()
    assert drivers.result("failing").reason == "ValueError: no such day"
    assert "in fails" in drivers.result("failing").traceback
    unpicklable = drivers.result("unpicklable")
    assert (unpicklable.state, drivers.record("unpicklable").run) == ("failed", 1)
    assert unpicklable.reason.startswith("what the job returned cannot be pickled: TypeError")
    assert drivers.result("script").state == "succeeded"
    assert drivers.result("early").state == "cancelled"
    until(lambda: lines(drivers, "step-0"), "the held one runs")
    run = drivers.process("held")
    with drivers.jobs() as jobs:
        jobs.cancel("held")
    assert drivers.result("held").state == "cancelled"
    assert not alive(run)
    dying = drivers.result("dying")
    assert (dying.state, lines(drivers, "died")) == ("failed", ["1", "2"])
    assert "each of its 2 runs was lost" in dying.reason


def test_several_jobs_of_a_leader_that_is_killed(drivers):
    """All running jobs of a killed leader go on under the next, each from its own steps."""
    out = drivers.folder / "out"
    folders = [out / str(number) for number in range(3)]
    for folder in folders:
        folder.mkdir()
        (folder / "hold-1").touch()
    drivers.start()
    leader = drivers.leader()
    for number, folder in enumerate(folders):
        spec = job_of("steps", drivers, count=2)
        drivers.submit(
            dataclasses.replace(spec, arguments=pickle.dumps({"folder": str(folder), "count": 2})), f"job-{number}"
        )
    for number in range(3):
        until(lambda number=number: lines(drivers, f"{number}/step-1"), f"job {number} is in its second step")
    drivers.start()
    drivers.kill(leader)
    for folder in folders:
        (folder / "go-1").touch()
    for number in range(3):
        assert drivers.result(f"job-{number}").value() == 10
        assert lines(drivers, f"{number}/step-0") == ["1"]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_on_a_standalone_cluster(drivers, tmp_path):
    """The same with executors of a cluster: rows once, though the leader dies while tasks stage; no executor is left."""
    out = drivers.folder / "out"
    (out / "hold-task").touch()
    (tmp_path / "cluster").mkdir()
    with standalone_cluster(tmp_path / "cluster") as master:
        drivers.start()
        leader = drivers.leader()
        drivers.start()
        conf = {"spark.master": master, "spark.executor.memory": "512m", "spark.driver.host": "127.0.0.1"}
        drivers.submit(job_of("committing", drivers, conf), "job")
        until(lambda: lines(drivers, "writes"), "the job writes")
        drivers.kill(leader)
        assert drivers.result("job").value() == 100
    assert sorted(pq.read_table(out / "table")["id"].to_pylist()) == list(range(100))
    assert [path.name for path in out.iterdir() if path.name.startswith("_stagecrew")] == []


@pytest.mark.long
@pytest.mark.timeout(900)
def test_ten_kills_in_a_row(drivers):
    """Ten leaders are killed, each in the middle of a step: every step that was done stays done, and the result is right."""
    out = drivers.folder / "out"
    for number in range(10):
        (out / f"hold-{number}").touch()
    drivers.start()
    drivers.submit(job_of("steps", drivers, count=10, max_attempts=30), "job")
    for number in range(10):
        until(lambda number=number: lines(drivers, f"step-{number}"), f"step {number} runs")
        leader = drivers.leader()
        drivers.start()
        drivers.kill(leader)
        until(lambda number=number: len(lines(drivers, f"step-{number}")) == 2, f"step {number} runs again")
        (out / f"go-{number}").touch()
    assert drivers.result("job").value() == 450
    assert all(len(lines(drivers, f"step-{number}")) == 2 for number in range(10))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_killed_in_the_middle_of_each_step(drivers):
    """A job of five steps whose process is killed in each: finished steps are not run again."""
    out = drivers.folder / "out"
    for number in range(5):
        (out / f"hold-{number}").touch()
    drivers.start()
    drivers.submit(job_of("steps", drivers, count=5), "job")
    for number in range(5):
        until(lambda number=number: lines(drivers, f"step-{number}"), f"step {number} runs")
        os.kill(drivers.process("job"), signal.SIGKILL)
        until(lambda number=number: len(lines(drivers, f"step-{number}")) == 2, f"step {number} runs again")
        (out / f"go-{number}").touch()
    assert drivers.result("job").value() == 100
    assert [lines(drivers, f"step-{number}") for number in range(5)] == [[str(n + 1), str(n + 2)] for n in range(5)]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seconds", [0.0, 0.2, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0])
def test_a_leader_that_is_killed_at_any_moment(drivers, seconds):
    """Wherever the leader is with two short jobs - taking them up, starting, ending, cleaning - they end once, under the next."""
    drivers.start()
    leader = drivers.leader()
    drivers.start()
    drivers.submit(job_of("steps", drivers, count=2), "one")
    drivers.submit(job_of("fails", drivers), "two")
    time.sleep(seconds)  # the moment
    drivers.kill(leader)
    assert drivers.result("one").value() == 10
    assert drivers.result("two").state == "failed"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_stream_of_a_job_that_is_killed(drivers):
    """A batch that was cut short begins with the coordinator as it was behind the batch before; one that was done is not done again."""
    out = drivers.folder / "out"
    (out / "input").mkdir()
    for number in range(3):
        (out / "input" / f"{number}.txt").write_text("one\ntwo\n")
    (out / "hold-1").touch()
    drivers.start()
    drivers.submit(job_of("streaming", drivers), "job")
    until(lambda: lines(drivers, "batch-1"), "the second batch runs")
    os.kill(drivers.process("job"), signal.SIGKILL)
    until(lambda: len(lines(drivers, "batch-1")) == 2, "it runs again")
    (out / "go-1").touch()
    assert drivers.result("job").value() == {1: [3, 4], 2: [5, 6]}
    assert [lines(drivers, f"batch-{number}") for number in range(3)] == [["1"], ["1", "2"], ["2"]]


def test_a_driver_that_the_store_does_not_let_in(zookeeper, tmp_path):
    """Without the credentials of the store's first user, or where a newer stagecrew has written it, a driver ends with a line that says so:
    it would wait for ever."""
    chroot = f"/refusing-{uuid.uuid4().hex}"
    url = f"zookeeper://{zookeeper.hosts}{chroot}?timeout=4"
    places = {"STAGECREW_STORE": url, "STAGECREW_STATE": str(tmp_path)}
    with contextlib.closing(open_store(url, {"STAGECREW_STORE_CREDENTIALS": "crew:s3cret"})) as store:
        store.ensure("a")
        given = places | {"STAGECREW_STORE_CREDENTIALS": "crew:wrong"}
        refused = command("driver", "--work", str(tmp_path / "work"), timeout=LONG, **given)
        assert (refused.returncode, "STAGECREW_STORE_CREDENTIALS" in refused.stderr.splitlines()[-1]) == (1, True)
        assert "Traceback" not in refused.stderr
        assert "wrong" not in refused.stderr
    newer = f"zookeeper://{zookeeper.hosts}{chroot}-newer?timeout=4"
    with contextlib.closing(open_store(newer, {})) as store:
        store.ensure("a")
        store._session._kazoo.set(f"{chroot}-newer/entries", b"stagecrew store %d" % (FORMAT + 1))
    refused = command("driver", "--work", str(tmp_path / "work"), timeout=LONG, **places | {"STAGECREW_STORE": newer})
    assert (refused.returncode, f"has format {FORMAT + 1}" in refused.stderr.splitlines()[-1]) == (1, True)
    assert "Traceback" not in refused.stderr


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_store_that_comes_later(tmp_path):
    """Drivers that are started before their store wait for it: when it comes one of them leads, and runs what is submitted then."""
    from zookeeper import zookeeper

    with zookeeper() as server:
        server.kill()
        with campaign(f"zookeeper://{server.hosts}/later?timeout=4", tmp_path) as drivers:
            first, second = drivers.start(wait=False), drivers.start(wait=False)
            for number in (0, 1):
                log = tmp_path / f"driver-{number}.log"
                until(
                    lambda log=log: "cannot use the coordination store, and tries again" in log.read_text(),
                    "a driver campaigns in vain",
                )
                assert "the store is not available yet" in log.read_text()
            assert (first.poll(), second.poll()) == (None, None)
            server.start()
            server.wait()
            assert drivers.leader() in (first, second)
            drivers.submit(job_of("steps", drivers, count=2), "job")
            assert drivers.result("job").value() == 10
            assert drivers.record("job").run == 1
            drivers.nothing_left("job")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_store_that_is_away(tmp_path):
    """ZooKeeper is killed while a job runs and comes back past the session: the job runs again under whoever leads then, to its end."""
    from zookeeper import zookeeper

    with zookeeper() as server, campaign(f"zookeeper://{server.hosts}/away?timeout=4", tmp_path) as drivers:
        out = tmp_path / "out"
        (out / "hold-1").touch()
        drivers.start()
        drivers.start()
        drivers.submit(job_of("steps", drivers, count=2), "job")
        until(lambda: lines(drivers, "step-1"), "the second step runs")
        orphan = drivers.process("job")
        server.kill()
        until(lambda: not alive(orphan), "its run ends, as it hears nothing of the store")
        with pytest.raises(StoreUnavailable):
            drivers.submit(job_of("steps", drivers, count=1), "other")
        server.start()
        server.wait()
        until(lambda: len(lines(drivers, "step-1")) == 2, "it runs again")
        (out / "go-1").touch()
        assert drivers.result("job").value() == 10
        assert lines(drivers, "step-0") == ["1"]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_storage_that_is_away(drivers):
    """A job whose step ends while the storage is away waits for it and goes on, in its first run; submitting is a named error meanwhile."""
    out = drivers.folder / "out"
    (out / "hold-0").touch()
    drivers.start()
    drivers.submit(job_of("steps", drivers, count=2), "job")
    until(lambda: lines(drivers, "step-0"), "the first step runs")
    away = drivers.state.rename(drivers.folder / "away")
    (out / "go-0").touch()
    until(lambda: "waits for its result to be stored" in drivers.logs("job"), "the step waits")
    with pytest.raises(StateStorageError, match="is not an existing folder"):
        drivers.submit(job_of("steps", drivers, count=1), "other")
    assert lines(drivers, "step-1") == []
    away.rename(drivers.state)
    assert drivers.result("job").value() == 10
    assert [drivers.record("job").run, lines(drivers, "step-0")] == [1, ["1"]]
