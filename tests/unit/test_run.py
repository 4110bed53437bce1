"""The process that runs a job: how a driver launches it, when its watchdog terminates it, and how it exits."""

import contextlib
import os
import stat
import subprocess
import sys
import time
from concurrent.futures import Future

import pyarrow.fs
import pytest
from pyspark.errors import PySparkException

from stagecrew import Coordinator
from stagecrew.errors import (
    CheckpointFailed,
    CheckpointTimeout,
    CommitUnknown,
    ConfigurationError,
    JobError,
    LeadershipLost,
    StoreUnavailable,
)
from stagecrew.recovery.driver import launcher as launcher_module
from stagecrew.recovery.driver.launcher import Launcher
from stagecrew.recovery.jobs.fenced import FencedJobs
from stagecrew.recovery.jobs.record import Run
from stagecrew.recovery.jobs.spec import JobSpec
from stagecrew.recovery.leadership.fencing import HOLDER, TERM, LeaderInfo
from stagecrew.recovery.run import main as run_module
from stagecrew.recovery.run.claim import ClaimedRun
from stagecrew.recovery.run.execution import infrastructure_error
from stagecrew.recovery.run.main import EXIT_LOST
from stagecrew.recovery.run.watchdog import RunWatchdog
from stagecrew.recovery.state.storage import StateStorage
from stagecrew.recovery.stores import open_store
from stagecrew.recovery.stores.contract import Create, Delete, Replace
from stagecrew.testing import CoordinatorHarness
from support.model_store import ModelServer


class MonitoredRun:
    """A run in term 1 with a claim of version 2, and its watchdog. The test advances the clock `now`."""

    def __init__(self, timeout=None):
        self.server = ModelServer()
        self.leader, self.store = self.server.session(), self.server.session()
        self.leader.ensure("leader", TERM, "jobs/one/claim", "specs", "results")
        self.leader.transact(Replace(TERM, b"", 0), Create(HOLDER, b"", ephemeral=True))
        self.leader.transact(Replace("jobs/one/claim", b"", 0))
        self.leader.transact(Replace("jobs/one/claim", b"", 1))
        self.store.timeout = timeout
        self.now = 0.0
        filesystem = pyarrow.fs._MockFileSystem()
        filesystem.create_dir("states")
        self.claimed = ClaimedRun(self.store, StateStorage("states", filesystem), 1, Run("one", 1, 1), 2)
        self.watchdog = RunWatchdog(self.store, 1, self.claimed, lambda reason: None, lambda: self.now)


def test_a_run_continues_while_its_leader_leads_and_its_claim_is_the_latest():
    run = MonitoredRun(timeout=9.0)
    for second in range(100):
        run.now = float(second)
        assert run.watchdog.check() is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda w: w.leader.close(), "no longer leads"),
        (lambda w: w.leader.transact(Replace(TERM, b"", 1)), "no longer leads"),
        (lambda w: w.leader.transact(Replace("jobs/one/claim", b"", 2)), "another run"),
        (lambda w: w.leader.transact(Delete("jobs/one/claim")), "another run"),
        (lambda w: w.server.expire(w.store.session), "its session"),
    ],
)
def test_a_run_ends_when_it_loses_its_leader_claim_or_session(change, reason):
    """A run ends when its leader no longer leads, another run has the claim, or its own session has expired."""
    run = MonitoredRun()
    assert run.watchdog.check() is None
    change(run)
    assert reason in run.watchdog.check()


def test_a_run_ends_when_its_store_does_not_respond(monkeypatch):
    """A run ends 2/3 of the session timeout after the store's last response, because another driver could soon lead.

    If the store has no session timeout, the run continues.
    """

    def unavailable(key):
        raise StoreUnavailable("the store is down")

    for timeout in (9.0, None):
        run = MonitoredRun(timeout)
        run.now = 100.0
        assert run.watchdog.check() is None
        monkeypatch.setattr(run.store, "read", unavailable)
        run.now = 105.9
        assert run.watchdog.check() is None
        run.now = 106.1
        assert (run.watchdog.check() is None) == (timeout is None)


def test_a_run_ends_when_a_read_of_the_store_hangs():
    """A run whose read of the store hangs ends by its own clock. It also ends when a read raises an unexpected
    error."""
    run = MonitoredRun(9.0)
    run.now = 6.1
    assert "has not responded" in run.watchdog.check_silence()
    assert "KeyError" in run.watchdog._reason(lambda: {}["x"])


def test_a_run_ends_when_its_jvm_has_ended(monkeypatch):
    """A run ends when its parent process, the JVM, is gone. (A Python process survives the SIGKILL of its JVM.)"""
    run = MonitoredRun()
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert "started it has ended" in run.watchdog.check()


MODULE = """
import atexit, os, pathlib, threading, time

def return_7(folder):
    def slow_hook():
        time.sleep(1.5)
        pathlib.Path(folder, "hook").touch()
    atexit.register(slow_hook)
    return 7

def append_line(folder):
    with open(f"{folder}/lines", "a") as file:
        file.write("called\\n")

def fail_with_unknown_outcome(folder):
    import stagecrew
    print("printed by the job")
    threading.Thread(target=time.sleep, args=(600,)).start()
    raise stagecrew.errors.PossiblyInconsistentError("the outcome is unknown")
"""


def execute_run(tmp_path, function, stack, processes=1):
    """Starts processes for one run, without Spark, and waits until they exit.

    The test's process is the leader until `stack` closes.

    Returns the processes (or the process, if there is only one) and the jobs.
    """
    (tmp_path / "run_jobs.py").write_text(MODULE)
    (tmp_path / "state").mkdir()
    environment = {"STAGECREW_STORE": f"sqlite://{tmp_path}/jobs.db", "STAGECREW_STATE": str(tmp_path / "state")}
    spec = JobSpec.of_function(f"run_jobs:{function}", {"folder": str(tmp_path)}, {}, [tmp_path / "run_jobs.py"])
    store = open_store(environment["STAGECREW_STORE"])
    stack.callback(store.close)
    store.ensure("leader", TERM)
    info = LeaderInfo.of_this_process(1, store.session).to_bytes()
    store.transact(Create(HOLDER, info, ephemeral=True), Replace(TERM, info, 0))
    jobs = FencedJobs(store, StateStorage(tmp_path / "state"))
    jobs.submit(spec, "job")
    run = jobs.start_run("job", jobs.read("job"), jobs.claim_version("job"))
    folder = tmp_path / "run"
    (folder / "files").mkdir(parents=True)
    (folder / "files" / "run_jobs.py").write_text(MODULE)
    command = [
        sys.executable, run_module.__file__, f"--job={run.job}", f"--folder={folder}", f"--run={run.number}",
        f"--claim={run.claim}", "--term=1",
    ]  # fmt: skip
    started = [
        subprocess.Popen(
            command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(processes)
    ]
    ended = []
    for process in started:
        with process:
            output = process.communicate(timeout=120)
            ended.append(subprocess.CompletedProcess(command, process.returncode, *output))
    return (ended if processes > 1 else ended[0]), jobs


def test_a_run_is_not_monitored_after_its_job_has_ended(tmp_path):
    """When the job has ended, its process runs its exit hooks even after its session has expired, and does not exit as
    lost."""
    with contextlib.ExitStack() as stack:
        ended, jobs = execute_run(tmp_path, "return_7", stack)
        assert (ended.returncode, "this run ends" in ended.stderr) == (0, False), ended.stderr
        assert (tmp_path / "hook").exists()
        assert (jobs.result("job").value(), jobs.process("job")) == (7, None)


def test_a_lost_run_exits_at_once(tmp_path):
    """If the outcome of a job is unknown, its process logs why and exits, although threads of the job are still
    running.

    The job stays in the state "running", so it can run again.
    """
    with contextlib.ExitStack() as stack:
        ended, jobs = execute_run(tmp_path, "fail_with_unknown_outcome", stack)
        assert ended.returncode == EXIT_LOST, ended.stderr
        assert "printed by the job" in ended.stdout
        assert "this run ends: its job has not ended" in ended.stderr
        assert (jobs.read("job")[0].state, jobs.process("job")) == ("running", None)


def test_only_one_process_of_a_run_executes_the_job(tmp_path):
    """If three processes are started for one run, one executes the job, and the others exit before they run its
    code."""
    with contextlib.ExitStack() as stack:
        ended, jobs = execute_run(tmp_path, "append_line", stack, processes=3)
        assert sorted(process.returncode for process in ended) == [0, EXIT_LOST, EXIT_LOST], ended
        assert (tmp_path / "lines").read_text() == "called\n"
        assert [process.stderr.count("belongs to another process") for process in ended if process.returncode] == [1, 1]
        assert jobs.result("job").value() is None


def test_a_process_exits_although_its_threads_do_not_end():
    """A process whose job has ended does not wait forever for threads that the job started."""
    code = "import threading, time\nfrom stagecrew.recovery.run.exits import exit_within\nexit_within(0.3, 7)\n"
    code += "threading.Thread(target=time.sleep, args=(600,)).start()"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 7


def test_a_lost_run_exits_although_its_last_actions_fail_or_hang(tmp_path):
    """A lost run does its remaining actions and exits, even if the disk for its output is full and another action
    hangs."""
    code = "import sys, time, pathlib\nfrom stagecrew.recovery.run import exits\nexits._LAST_ACTIONS_TIMEOUT = 1.0\n"
    code += "exits.exit_as_lost(lambda: print('why', file=sys.stderr, flush=True), lambda: time.sleep(600), "
    code += f"pathlib.Path({str(tmp_path / 'closed')!r}).touch)"
    with open("/dev/full", "wb", buffering=0) as full:
        ended = subprocess.run([sys.executable, "-c", code], timeout=120, check=False, stderr=full)
    assert (ended.returncode, (tmp_path / "closed").exists()) == (EXIT_LOST, True)


def test_a_stopped_watchdog_does_not_end_the_run():
    """A watchdog that finds a reason to end the run ends it, unless the watchdog was stopped before."""
    for stopped in (False, True):
        run, reasons = MonitoredRun(), []
        run.watchdog._end = reasons.append
        run.leader.close()
        if stopped:
            run.watchdog.stop()
        run.watchdog._watch(run.watchdog.check)
        assert len(reasons) == (not stopped)


def test_secrets_are_passed_to_spark_in_a_file(tmp_path, monkeypatch):
    """The configuration of a job is passed to Spark in a file that only this user can read, not on the command line.

    The file is deleted when the run has ended.
    """
    argv = tmp_path / "argv"
    submit = tmp_path / "bin" / "spark-submit"
    submit.parent.mkdir()
    submit.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {argv}\nsleep 60\n')
    submit.chmod(0o755)
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    launcher = Launcher("sqlite:///x", "s3://key:s3cret@bucket", tmp_path / "work")
    spec = JobSpec("job.py", (), {"spark.password": "s3cret = ü#!\\"}, {"etl.py": b"x = 1"}, b"print(1)")
    process = launcher.start(launcher.prepare(spec, "a/b"), Run("a/b", 3, 5), 2, finish=False)
    try:
        deadline = time.monotonic() + 30
        while not argv.exists() or "--term=2" not in argv.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        submit_arguments = argv.read_text().split("\n")
        assert not [argument for argument in submit_arguments if "s3cret" in argument]
        # The run uses client mode even if the Spark installation of this host has another default.
        assert submit_arguments[submit_arguments.index("--deploy-mode") + 1] == "client"
        assert {"--job=a/b", "--run=3", "--claim=5", "--term=2"} <= set(submit_arguments)
        [properties] = (tmp_path / "work").rglob("spark.properties")
        assert "spark.password=s3cret\\ \\=\\ \\u00fc\\#\\!\\\\\n" in properties.read_text()
        assert stat.S_IMODE(properties.stat().st_mode) == 0o600
        assert stat.S_IMODE(properties.parent.stat().st_mode) == 0o700
        assert (properties.parent / "script" / "job.py").read_bytes() == b"print(1)"
    finally:
        process.terminate()
        process.wait(10)
        process.kill()
    assert process.exit_code() == -15
    assert not properties.parent.exists()


def test_a_process_that_cannot_be_started_is_a_job_error(tmp_path, monkeypatch):
    """If the system cannot start the process of a run, the error says so, and what to check."""
    monkeypatch.setattr(launcher_module, "found_spark_submit", lambda: str(tmp_path / "gone"))
    launcher = Launcher("sqlite:///x", "/y", tmp_path)
    with pytest.raises(JobError, match=r"no process can be started for run 2 of job 'job' \(.*: check the limits of"):
        launcher.start(launcher.prepare(JobSpec("a.py"), "job"), Run("job", 2, 5), 2, finish=False)


def test_a_job_keeps_its_own_plugins():
    """The launcher adds stagecrew's plugin and jar to the job's own plugins and jars."""
    properties = launcher_module._properties(JobSpec("a.py", (), {"spark.plugins": "x.Y", "spark.jars": "/x.jar"}))
    assert properties["spark.plugins"] == "x.Y,stagecrew.StagecrewPlugin"
    assert properties["spark.jars"].startswith("/x.jar,")
    assert launcher_module._properties(JobSpec("a.py"))["spark.plugins"] == "stagecrew.StagecrewPlugin"


def test_an_invalid_work_folder_or_spark_home_is_an_error(tmp_path, monkeypatch):
    """An invalid work folder or SPARK_HOME raises an error that names the problem, and leaves no files."""
    (tmp_path / "work").write_text("a file")
    launcher = Launcher("sqlite:///x", "/y", tmp_path / "work")
    with pytest.raises(JobError, match="cannot be written into"):
        launcher.prepare(JobSpec("a.py"), "job")
    launcher = Launcher("sqlite:///x", "/y", tmp_path / "other")
    with pytest.raises(JobError, match="cannot be written into"):
        launcher.prepare(JobSpec("a.py", (), {}, {"x" * 300: b""}), "..")
    assert list(tmp_path.rglob("run-*")) == []
    assert launcher.prepare(JobSpec("a.py"), "..").parent.parent == tmp_path / "other"
    monkeypatch.setenv("SPARK_HOME", str(tmp_path / "absent"))
    with pytest.raises(ConfigurationError, match="is not an executable file"):
        Launcher("sqlite:///x", "/y", tmp_path)


def test_files_of_killed_runs_are_deleted(tmp_path, monkeypatch):
    """If a run was killed together with its driver, its files (but not its logs) are deleted when the job next runs in
    the same work folder. Files of other jobs and of other stores stay.

    Only the start of a run deletes files: a leader that was replaced while it prepared a run deletes nothing.
    """
    monkeypatch.setattr(launcher_module, "found_spark_submit", lambda: "true")
    launcher = Launcher("sqlite:///x", "/y", tmp_path)
    [first, other] = [launcher.prepare(JobSpec("a.py"), job) for job in ("job", "other")]
    (first.parent / "run-1.log").touch()
    of_another_store = Launcher("sqlite:///z", "/y", tmp_path).prepare(JobSpec("a.py"), "job")
    again = launcher.prepare(JobSpec("a.py"), "job")
    assert first.exists()
    process = launcher.start(again, Run("job", 2, 5), 2, finish=False)
    process.wait(30)
    logs = [first.parent / "run-1.log", first.parent / "run-2.log"]
    assert sorted(first.parent.iterdir()) == sorted([again, of_another_store, *logs])
    assert other.exists()
    process.kill()


def test_infrastructure_errors_do_not_fail_the_job():
    """A job is lost, not failed, if it raises or wraps an error about an unavailable store or an unknown commit."""

    def wrapped(inner):
        try:
            try:
                raise inner
            except Exception as error:
                raise RuntimeError("an error of the job") from error
        except RuntimeError as error:
            return error

    assert "store is down" in infrastructure_error(wrapped(StoreUnavailable("the store is down")))
    assert "CommitUnknown" in infrastructure_error(CommitUnknown("lost"))
    assert infrastructure_error(wrapped(ValueError("an error of the job"))) is None
    errors = [ValueError("an error of the job"), StoreUnavailable("the store is down")]
    assert "store is down" in infrastructure_error(ExceptionGroup("two errors", errors))
    # Spark's text for an error in foreachBatch. tests/spark/test_commits.py tests this with a real error.
    for text, message in (
        (
            "Return Message: Traceback:\n  raise E\nstagecrew.errors.CommitPending: it waits\n SQLSTATE: 39000",
            "it waits",
        ),
        ("Traceback:\nstagecrew.errors.StateCorrupt: cut", "StateCorrupt: cut"),
        ("Traceback:\nstagecrew.errors.CommitConflict: two schemas", None),
        ("Traceback:\nstagecrew.errors.NoSuch: x", None),
        ("the log contains stagecrew.errors.CommitPending: it waits", None),
    ):
        reason = infrastructure_error(wrapped(PySparkException(text)))
        assert message in reason if message else reason is None
    assert infrastructure_error(ValueError("\nstagecrew.errors.CommitPending: it waits")) is None


class SettableState(Coordinator):
    """Returns the state that the test sets (valid, invalid or a future), or raises it if it is an exception."""

    state = None

    def ready(self, evaluation, gateway):
        self.gateway = gateway

    def checkpoint(self, checkpoint_id):
        if isinstance(self.state, Exception):
            raise self.state
        return self.state


def checkpoint_error(harness, **arguments):
    with pytest.raises(CheckpointFailed) as raised:
        harness.checkpoint(**arguments)
    return raised.value


def test_a_late_checkpoint_does_not_fail_the_job():
    """If a checkpoint is late because of a slow coordinator or an unacknowledged event, the run is lost, not the job.

    The job fails if a coordinator declines or returns an invalid state, or if a checkpoint id is not larger than the
    last one.
    """
    with CoordinatorHarness(SettableState) as harness:
        harness.coordinator.state = Future()
        late = checkpoint_error(harness)
        assert isinstance(late, CheckpointTimeout)
        assert "for the coordinators of 'operator'" in infrastructure_error(late)
        text = PySparkException(f"Traceback:\nstagecrew.errors.CheckpointTimeout: {late}\n SQLSTATE: 39000")
        assert "for the coordinators of 'operator'" in infrastructure_error(text)
        harness.coordinator.state = None
        task = harness.evaluation(0)
        task.acknowledges = False
        harness.coordinator.gateway.send("never acknowledged")
        assert infrastructure_error(checkpoint_error(harness)) is not None
        task.fail()
        misused = checkpoint_error(harness, checkpoint_id=1)
        assert "use a larger id" in str(misused)
        assert infrastructure_error(misused) is None
        harness.coordinator.state = "no bytes"
        assert infrastructure_error(checkpoint_error(harness)) is None
    with CoordinatorHarness(SettableState) as harness:
        harness.coordinator.state = Future()
        harness.coordinator.state.set_exception(OSError("no state available"))
        declined = checkpoint_error(harness)
        assert "no state available" in str(declined)
        assert infrastructure_error(declined) is None


def test_a_run_continues_after_it_renews_its_claim():
    """After a run has renewed its claim, it continues, and writes with the earlier claim are refused."""
    run = MonitoredRun()
    jobs_with_old_claim = run.claimed.jobs
    run.claimed.renew()
    assert run.watchdog.check() is None
    with pytest.raises(LeadershipLost):
        jobs_with_old_claim.renew_claim("one", 3)
