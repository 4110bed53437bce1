"""Jobs survive the death of their driver: real drivers, real Spark and a real store, with SIGKILL."""

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

from stagecrew.errors import StateStorageError, StoreUnavailable
from stagecrew.recovery.jobs.spec import JobSpec
from stagecrew.recovery.stores import open_store
from stagecrew.recovery.stores.contract import FORMAT
from support.cli import run_stagecrew
from support.clusters import standalone_cluster
from support.driver_processes import LONG_TIMEOUT, QUICK_CONF, campaigning_drivers, wait_until
from support.example_jobs import job_spec, recorded_lines
from support.processes import is_alive
from support.web_pages import fetch_json

SPECIAL_CHARACTERS = "a = b: c # d ! \\ é € 𝄞"
SCRIPT = f"""
import sys
import stagecrew
from pyspark import SparkContext
assert sys.argv[1:] == ["a b", "--c"], sys.argv
assert stagecrew.current_job().id == "script"
SparkContext._ensure_initialized()
assert SparkContext._jvm.System.getProperty("spark.odd") == {SPECIAL_CHARACTERS!r}
"""


@pytest.fixture
def drivers(tmp_path):
    """Drivers that use SQLite, and a directory that jobs write to."""
    with campaigning_drivers(f"sqlite://{tmp_path}/jobs.db", tmp_path) as found:
        yield found


@pytest.mark.contract
def test_a_standby_finishes_the_job_of_a_killed_leader(drivers):
    """A standby finishes the job of a killed leader.

    The killed leader's run ends itself, and finished steps do not run again. The leader's log names spark-submit, which
    is the parent of the process that the store names.
    """
    out = drivers.folder / "out"
    (out / "hold-2").touch()
    drivers.start()
    leader = drivers.leader()
    standby = drivers.start()
    drivers.submit(job_spec("steps", drivers, count=4), "job")
    wait_until(lambda: recorded_lines(drivers, "step-2"), "the third step runs")
    orphan = drivers.process("job")
    log = (drivers.folder / "driver-0.log").read_text()
    assert f"run 1 is starting; its spark-submit is process {psutil.Process(orphan).ppid()}," in log
    drivers.kill(leader)
    assert drivers.leader() is standby
    wait_until(lambda: not is_alive(orphan), "the run of the killed leader has ended itself")
    wait_until(lambda: len(recorded_lines(drivers, "step-2")) == 2, "the interrupted step runs again")
    (out / "go-2").touch()
    result = drivers.result("job")
    assert result.value() == 60
    assert [recorded_lines(drivers, f"step-{number}") for number in range(4)] == [["1"], ["1"], ["1", "2"], ["2"]]
    assert drivers.record("job").run == 2


@pytest.mark.long
def test_the_tab_shows_each_run_of_a_job(drivers):
    """The Spark UI tab of each run of a job shows the run, leader, term and steps, even if the run recovers the job."""
    out = drivers.folder / "out"
    conf = {"spark.ui.enabled": "true", "spark.ui.port": "0"}

    def jobs_page(run):
        url = wait_until(lambda: recorded_lines(drivers, "ui")[run - 1 :], f"run {run} is in its second step")[0]
        return f"http://127.0.0.1:{urlsplit(url).port}/stagecrew/jobs"

    def shown_steps(run):
        recovery = fetch_json(f"{jobs_page(run)}/json/")["recovery"]
        assert all(step["started"] <= step["ended"] for step in recovery["steps"] if step["state"] != "running")
        return recovery["facts"], [(step["name"], step["state"]) for step in recovery["steps"]]

    drivers.start()
    leader = drivers.leader()
    standby = drivers.start()
    drivers.submit(job_spec("shown", drivers, conf), "job")
    with drivers.jobs() as jobs:
        first = jobs.leader()
        facts = {"job": "job", "run": "1", "term": str(first.term), "leader": first.host, "store": "sqlite"}
        assert shown_steps(1) == (facts, [("load", "finished"), ("sum", "running")])
        drivers.kill(leader)
        assert drivers.leader() is standby
        second = jobs.leader()
        assert second.term > first.term
        second_facts = facts | {"run": "2", "term": str(second.term)}
        assert shown_steps(2) == (second_facts, [("load", "found"), ("sum", "running")])
        with urllib.request.urlopen(jobs_page(2), timeout=60) as response:
            assert str(drivers.folder) not in response.read().decode()  # the location of the store
    (out / "go").touch()
    assert drivers.result("job").value() == 13


@pytest.fixture
def drivers_at_zookeeper(tmp_path, zookeeper):
    """Drivers that use a separate path of ZooKeeper, with a session timeout of four seconds."""
    with campaigning_drivers(f"zookeeper://{zookeeper.hosts}/failover-{uuid.uuid4().hex}?timeout=4", tmp_path) as found:
        yield found


@pytest.mark.parametrize("fault", ["stopped", pytest.param("killed", marks=pytest.mark.long)])
def test_a_standby_leads_after_the_leaders_session_has_ended(drivers_at_zookeeper, fault):
    """If a leader is killed, or suspended until its session expires, its run ends, and a standby leads.

    A leader that was suspended does not lead when it resumes.
    """
    drivers = drivers_at_zookeeper
    out = drivers.folder / "out"
    (out / "hold-1").touch()
    drivers.start()
    leader = drivers.leader()
    standby = drivers.start()
    drivers.submit(job_spec("steps", drivers, count=2), "job")
    wait_until(lambda: recorded_lines(drivers, "step-1"), "the second step runs")
    orphan = drivers.process("job")
    if fault == "killed":
        drivers.kill(leader)
    else:
        leader.send_signal(signal.SIGSTOP)
    wait_until(lambda: not is_alive(orphan), "the run has ended itself")
    wait_until(lambda: len(recorded_lines(drivers, "step-1")) == 2, "the interrupted step runs again")
    assert drivers.leader() is standby
    leader.send_signal(signal.SIGCONT)
    (out / "go-1").touch()
    assert drivers.result("job").value() == 10
    assert [recorded_lines(drivers, "step-0"), recorded_lines(drivers, "step-1")] == [["1"], ["1", "2"]]
    assert drivers.leader() is standby


def test_rows_are_committed_once_when_the_leader_is_killed(drivers):
    """If the leader is killed while tasks are staging rows, all rows are committed once, and no staged rows are left."""
    out = drivers.folder / "out"
    (out / "hold-task").touch()
    drivers.start()
    leader = drivers.leader()
    drivers.start()
    drivers.submit(job_spec("committing", drivers), "job")
    wait_until(lambda: recorded_lines(drivers, "writes"), "the job writes")
    drivers.kill(leader)
    assert drivers.result("job").value() == 100
    assert sorted(pq.read_table(out / "table")["id"].to_pylist()) == list(range(100))
    assert recorded_lines(drivers, "writes") == ["1", "2"]
    assert [path.name for path in out.iterdir() if path.name.startswith("_stagecrew")] == []


@pytest.mark.long
def test_a_job_runs_again_when_its_jvm_is_killed_in_an_action(drivers):
    """If the JVM is killed during an action, the resulting error in Python does not fail the job; the job runs again."""
    out = drivers.folder / "out"
    (out / "hold-task").touch()
    drivers.start()
    drivers.submit(job_spec("committing", drivers), "job")
    wait_until(lambda: recorded_lines(drivers, "writes"), "the job writes")
    os.kill(psutil.Process(drivers.process("job")).ppid(), signal.SIGKILL)
    assert drivers.result("job").value() == 100
    assert recorded_lines(drivers, "writes") == ["1", "2"]
    assert [path.name for path in out.iterdir() if path.name.startswith("_stagecrew")] == []


@pytest.mark.long
@pytest.mark.parametrize("killed_process", ["jvm", "python"])
def test_a_killed_run_does_not_repeat_a_decided_commit(drivers, killed_process):
    """If a job's Python process or JVM is killed, the job runs again, and a decided commit is not repeated."""
    out = drivers.folder / "out"
    (out / "hold-end").touch()
    drivers.start()
    drivers.submit(job_spec("committing", drivers), "job")
    wait_until(lambda: recorded_lines(drivers, "written"), "the rows are written")
    run = drivers.process("job")
    os.kill(run if killed_process == "python" else psutil.Process(run).ppid(), signal.SIGKILL)
    wait_until(lambda: len(recorded_lines(drivers, "written")) == 2, "another run continues")
    assert not is_alive(run)
    (out / "go-end").touch()
    assert drivers.result("job").value() == 100
    assert recorded_lines(drivers, "writes") == ["1"]


@pytest.mark.long
@pytest.mark.parametrize("hold_point", ["1", "after-1"])
def test_a_coordinator_resumes_from_the_last_step_of_a_killed_job(drivers, hold_point):
    """If a job is killed during or between actions, its coordinator resumes from the state after the last step.

    The results are the same as without a kill.
    """
    (drivers.folder / "out" / f"hold-{hold_point}").touch()
    drivers.start()
    drivers.submit(job_spec("counting", drivers), "job")
    started = "action-1" if hold_point == "1" else "after-1"
    wait_until(lambda: recorded_lines(drivers, started), "the job has reached the hold point")
    os.kill(drivers.process("job"), signal.SIGKILL)
    wait_until(lambda: len(recorded_lines(drivers, started)) == 2, "another run continues")
    (drivers.folder / "out" / f"go-{hold_point}").touch()
    assert drivers.result("job").value() == [
        list(range(1, 11)),
        [*range(11, 21), 1, 2, 3],
        list(range(21, 31)),
    ]


@pytest.mark.long
def test_a_killed_job_reads_each_split_once(drivers):
    """If a job is killed while it reads splits, its final result still contains each split once.

    The splits that the finished step had read come first and in their original order, although the enumerator returns
    another order in the second run.
    """
    drivers.start()
    drivers.submit(job_spec("splitting", drivers), "job")
    wait_until(lambda: recorded_lines(drivers, "second"), "the second step reads")
    os.kill(drivers.process("job"), signal.SIGKILL)
    first, second = drivers.result("job").value()
    assert (first, {rows for _, rows in second}) == (0, {20_000})
    read = [n for n, _ in second]
    # how many splits the first step had read
    read_before = next(number for number, n in enumerate(read) if n != number)
    assert read == [*range(read_before), *range(19, read_before - 1, -1)]
    assert 1 <= read_before <= 6
    assert [recorded_lines(drivers, name) for name in ("first", "second")] == [["1"], ["1", "2"]]


@pytest.mark.long
def test_no_run_starts_while_the_suspended_process_of_the_previous_run_exists(drivers):
    """A standby starts no new run while the process of the earlier run is suspended but alive.

    Meanwhile, the standby reconciles other jobs. It starts the next run when that process has ended.
    """
    out = drivers.folder / "out"
    (out / "hold-1").touch()
    drivers.start()
    leader = drivers.leader()
    drivers.start()
    drivers.submit(job_spec("steps", drivers, count=2), "job")
    wait_until(lambda: recorded_lines(drivers, "step-1"), "the second step runs")
    old_run = psutil.Process(drivers.process("job"))
    old_run.suspend()
    try:
        drivers.kill(leader)
        drivers.submit(job_spec("fails", drivers), "other")
        assert drivers.result("other").state == "failed"  # the standby leads and has reconciled both jobs
        assert (drivers.record("job").run, recorded_lines(drivers, "step-1"), old_run.status()) == (
            1,
            ["1"],
            psutil.STATUS_STOPPED,
        )
    finally:
        old_run.resume()
    wait_until(lambda: len(recorded_lines(drivers, "step-1")) == 2, "the next run continues")
    assert not is_alive(old_run.pid)
    (out / "go-1").touch()
    assert drivers.result("job").value() == 10
    assert drivers.record("job").run == 2


def test_a_leader_hands_over_immediately_after_sigterm(drivers):
    """After SIGTERM, the leader hands over immediately: its run ends, and the standby runs the job."""
    out = drivers.folder / "out"
    (out / "hold-1").touch()
    drivers.start()
    leader = drivers.leader()
    drivers.start()
    drivers.submit(job_spec("steps", drivers, count=2), "job")
    wait_until(lambda: recorded_lines(drivers, "step-1"), "the second step runs")
    run = drivers.process("job")
    leader.terminate()
    assert leader.wait(60) == 0
    drivers.running.remove(leader)
    assert not is_alive(run)
    wait_until(lambda: len(recorded_lines(drivers, "step-1")) == 2, "the standby runs the job")
    (out / "go-1").touch()
    assert drivers.result("job").value() == 10


def test_jobs_fail_end_and_are_cancelled_independently(drivers):
    """Each job ends in its own way, whatever other jobs do.

    A job that raises an error or returns an unpicklable value fails with the reason. A job whose runs all die fails,
    and a cancelled job ends.
    """
    out = drivers.folder / "out"
    (out / "hold-0").touch()
    script = drivers.folder / "script.py"
    script.write_text(
        "import sys, stagecrew\nassert sys.argv[1:] == ['a b', '--c']\nprint(stagecrew.current_job().id)\n"
    )
    drivers.submit(job_spec("fails", drivers), "failing")
    drivers.submit(job_spec("unpicklable", drivers), "unpicklable")
    drivers.submit(job_spec("dies", drivers, max_attempts=2), "dying")
    drivers.submit(job_spec("steps", drivers, count=1), "held")
    drivers.submit(job_spec("steps", drivers, count=1), "early")
    drivers.submit(JobSpec.of_script(script, ["a b", "--c"], QUICK_CONF | {"spark.odd": SPECIAL_CHARACTERS}), "script")
    script.unlink()
    with drivers.jobs() as jobs:
        jobs.cancel("early")
    drivers.start()
    assert drivers.result("failing").reason == "ValueError: no such day"
    assert "in fails" in drivers.result("failing").traceback
    unpicklable = drivers.result("unpicklable")
    assert (unpicklable.state, drivers.record("unpicklable").run) == ("failed", 1)
    assert unpicklable.reason.startswith("the job's return value cannot be pickled: TypeError")
    assert drivers.result("script").state == "succeeded"
    assert drivers.result("early").state == "cancelled"
    wait_until(lambda: recorded_lines(drivers, "step-0"), "the held job runs")
    run = drivers.process("held")
    with drivers.jobs() as jobs:
        jobs.cancel("held")
    assert drivers.result("held").state == "cancelled"
    assert not is_alive(run)
    dying = drivers.result("dying")
    assert (dying.state, recorded_lines(drivers, "died")) == ("failed", ["1", "2"])
    assert "all its 2 runs were lost" in dying.reason


def test_all_jobs_of_a_killed_leader_continue(drivers):
    """All running jobs of a killed leader continue under the next leader, each after its own finished steps."""
    out = drivers.folder / "out"
    folders = [out / str(number) for number in range(3)]
    for folder in folders:
        folder.mkdir()
        (folder / "hold-1").touch()
    drivers.start()
    leader = drivers.leader()
    for number, folder in enumerate(folders):
        spec = job_spec("steps", drivers, count=2)
        drivers.submit(
            dataclasses.replace(spec, arguments=pickle.dumps({"folder": str(folder), "count": 2})), f"job-{number}"
        )
    for number in range(3):
        wait_until(
            lambda number=number: recorded_lines(drivers, f"{number}/step-1"), f"job {number} is in its second step"
        )
    drivers.start()
    drivers.kill(leader)
    for folder in folders:
        (folder / "go-1").touch()
    for number in range(3):
        assert drivers.result(f"job-{number}").value() == 10
        assert recorded_lines(drivers, f"{number}/step-0") == ["1"]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_failover_on_a_standalone_cluster_commits_rows_once(drivers, tmp_path):
    """If the leader is killed while tasks on a standalone cluster are staging rows, all rows are committed once.

    No staged rows are left.
    """
    out = drivers.folder / "out"
    (out / "hold-task").touch()
    (tmp_path / "cluster").mkdir()
    with standalone_cluster(tmp_path / "cluster") as master:
        drivers.start()
        leader = drivers.leader()
        drivers.start()
        conf = {"spark.master": master, "spark.executor.memory": "512m", "spark.driver.host": "127.0.0.1"}
        drivers.submit(job_spec("committing", drivers, conf), "job")
        wait_until(lambda: recorded_lines(drivers, "writes"), "the job writes")
        drivers.kill(leader)
        assert drivers.result("job").value() == 100
    assert sorted(pq.read_table(out / "table")["id"].to_pylist()) == list(range(100))
    assert [path.name for path in out.iterdir() if path.name.startswith("_stagecrew")] == []


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_job_survives_ten_killed_leaders(drivers):
    """If ten leaders are killed, each during a step, finished steps do not run again, and the result is correct."""
    out = drivers.folder / "out"
    for number in range(10):
        (out / f"hold-{number}").touch()
    drivers.start()
    drivers.submit(job_spec("steps", drivers, count=10, max_attempts=30), "job")
    for number in range(10):
        wait_until(lambda number=number: recorded_lines(drivers, f"step-{number}"), f"step {number} runs")
        leader = drivers.leader()
        drivers.start()
        drivers.kill(leader)
        wait_until(
            lambda number=number: len(recorded_lines(drivers, f"step-{number}")) == 2, f"step {number} runs again"
        )
        (out / f"go-{number}").touch()
    assert drivers.result("job").value() == 450
    assert all(len(recorded_lines(drivers, f"step-{number}")) == 2 for number in range(10))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_finished_steps_are_not_repeated_when_each_step_is_killed(drivers):
    """If the process of a job is killed once in each of its five steps, finished steps do not run again."""
    out = drivers.folder / "out"
    for number in range(5):
        (out / f"hold-{number}").touch()
    drivers.start()
    drivers.submit(job_spec("steps", drivers, count=5), "job")
    for number in range(5):
        wait_until(lambda number=number: recorded_lines(drivers, f"step-{number}"), f"step {number} runs")
        os.kill(drivers.process("job"), signal.SIGKILL)
        wait_until(
            lambda number=number: len(recorded_lines(drivers, f"step-{number}")) == 2, f"step {number} runs again"
        )
        (out / f"go-{number}").touch()
    assert drivers.result("job").value() == 100
    assert [recorded_lines(drivers, f"step-{number}") for number in range(5)] == [
        [str(n + 1), str(n + 2)] for n in range(5)
    ]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seconds", [0.0, 0.2, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0])
def test_jobs_end_once_whenever_the_leader_is_killed(drivers, seconds):
    """If the leader is killed while two short jobs start, run or end, each of them still ends once."""
    drivers.start()
    leader = drivers.leader()
    drivers.start()
    drivers.submit(job_spec("steps", drivers, count=2), "one")
    drivers.submit(job_spec("fails", drivers), "two")
    time.sleep(seconds)  # the moment of the kill
    drivers.kill(leader)
    assert drivers.result("one").value() == 10
    assert drivers.result("two").state == "failed"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_killed_stream_resumes_from_its_last_batch(drivers):
    """If a job is killed during a batch, the next run repeats this batch, but no finished batch.

    The repeated batch starts with the coordinator state after the previous batch.
    """
    out = drivers.folder / "out"
    (out / "input").mkdir()
    for number in range(3):
        (out / "input" / f"{number}.txt").write_text("one\ntwo\n")
    (out / "hold-1").touch()
    drivers.start()
    drivers.submit(job_spec("streaming", drivers), "job")
    wait_until(lambda: recorded_lines(drivers, "batch-1"), "the second batch runs")
    os.kill(drivers.process("job"), signal.SIGKILL)
    wait_until(lambda: len(recorded_lines(drivers, "batch-1")) == 2, "the second batch runs again")
    (out / "go-1").touch()
    assert drivers.result("job").value() == {1: [3, 4], 2: [5, 6]}
    assert [recorded_lines(drivers, f"batch-{number}") for number in range(3)] == [["1"], ["1", "2"], ["2"]]


def test_a_driver_that_the_store_refuses_ends_with_a_message(zookeeper, tmp_path):
    """A driver exits with a message if its credentials are wrong, or if a newer stagecrew has written the store.

    Otherwise, the driver would wait indefinitely.
    """
    chroot = f"/refusing-{uuid.uuid4().hex}"
    url = f"zookeeper://{zookeeper.hosts}{chroot}?timeout=4"
    environment = {"STAGECREW_STORE": url, "STAGECREW_STATE": str(tmp_path)}
    with contextlib.closing(open_store(url, {"STAGECREW_STORE_CREDENTIALS": "crew:s3cret"})) as store:
        store.ensure("a")
        wrong_credentials = environment | {"STAGECREW_STORE_CREDENTIALS": "crew:wrong"}
        refused = run_stagecrew("driver", "--work", str(tmp_path / "work"), timeout=LONG_TIMEOUT, **wrong_credentials)
        assert (refused.returncode, "STAGECREW_STORE_CREDENTIALS" in refused.stderr.splitlines()[-1]) == (1, True)
        assert "Traceback" not in refused.stderr
        assert "wrong" not in refused.stderr
    newer = f"zookeeper://{zookeeper.hosts}{chroot}-newer?timeout=4"
    with contextlib.closing(open_store(newer, {})) as store:
        store.ensure("a")
        store._session._kazoo.set(f"{chroot}-newer/entries", b"stagecrew store %d" % (FORMAT + 1))
    refused = run_stagecrew(
        "driver", "--work", str(tmp_path / "work"), timeout=LONG_TIMEOUT, **environment | {"STAGECREW_STORE": newer}
    )
    assert (refused.returncode, f"has format {FORMAT + 1}" in refused.stderr.splitlines()[-1]) == (1, True)
    assert "Traceback" not in refused.stderr


@pytest.mark.long
@pytest.mark.timeout(600)
def test_drivers_wait_for_a_store_that_starts_later(tmp_path):
    """Drivers that start before their store wait for it. When the store starts, one of them leads and runs jobs."""
    from support.zookeeper import zookeeper

    with zookeeper() as server:
        server.kill()
        with campaigning_drivers(f"zookeeper://{server.hosts}/later?timeout=4", tmp_path) as drivers:
            first, second = drivers.start(wait=False), drivers.start(wait=False)
            for number in (0, 1):
                log = tmp_path / f"driver-{number}.log"
                wait_until(
                    lambda log=log: "cannot use the coordination store, and tries again" in log.read_text(),
                    "a driver fails to campaign",
                )
                assert "the store is not available yet" in log.read_text()
            assert (first.poll(), second.poll()) == (None, None)
            server.start()
            server.wait()
            assert drivers.leader() in (first, second)
            drivers.submit(job_spec("steps", drivers, count=2), "job")
            assert drivers.result("job").value() == 10
            assert drivers.record("job").run == 1
            drivers.assert_nothing_left("job")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_job_runs_again_after_the_store_was_lost(tmp_path):
    """If ZooKeeper is killed during a job and restarts only after the run has ended, the job runs again and succeeds."""
    from support.zookeeper import zookeeper

    with zookeeper() as server, campaigning_drivers(f"zookeeper://{server.hosts}/away?timeout=4", tmp_path) as drivers:
        out = tmp_path / "out"
        (out / "hold-1").touch()
        drivers.start()
        drivers.start()
        drivers.submit(job_spec("steps", drivers, count=2), "job")
        wait_until(lambda: recorded_lines(drivers, "step-1"), "the second step runs")
        orphan = drivers.process("job")
        server.kill()
        wait_until(lambda: not is_alive(orphan), "the run ends because it has lost the store")
        with pytest.raises(StoreUnavailable):
            drivers.submit(job_spec("steps", drivers, count=1), "other")
        server.start()
        server.wait()
        wait_until(lambda: len(recorded_lines(drivers, "step-1")) == 2, "the second step runs again")
        (out / "go-1").touch()
        assert drivers.result("job").value() == 10
        assert recorded_lines(drivers, "step-0") == ["1"]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_job_waits_while_the_storage_is_missing(drivers):
    """If the storage is missing when a step ends, the job waits, and then continues in its first run.

    Meanwhile, submitting another job raises an error.
    """
    out = drivers.folder / "out"
    (out / "hold-0").touch()
    drivers.start()
    drivers.submit(job_spec("steps", drivers, count=2), "job")
    wait_until(lambda: recorded_lines(drivers, "step-0"), "the first step runs")
    away = drivers.state.rename(drivers.folder / "away")
    (out / "go-0").touch()
    wait_until(lambda: "waits for its result to be stored" in drivers.logs("job"), "the step waits")
    with pytest.raises(StateStorageError, match="is not an existing folder"):
        drivers.submit(job_spec("steps", drivers, count=1), "other")
    assert recorded_lines(drivers, "step-1") == []
    away.rename(drivers.state)
    assert drivers.result("job").value() == 10
    assert [drivers.record("job").run, recorded_lines(drivers, "step-0")] == [1, ["1"]]
