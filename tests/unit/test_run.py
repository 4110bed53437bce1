"""The process of a run: what it monitors, and how it is started."""

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
    """A run in term 1 whose claim has version 2, with a clock that the test advances."""

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
        self.watch = RunWatchdog(self.store, 1, self.claimed, lambda reason: None, lambda: self.now)


def test_a_run_that_may_continue():
    """A run continues while its leader leads and its claim is the latest."""
    watched = MonitoredRun(timeout=9.0)
    for second in range(100):
        watched.now = float(second)
        assert watched.watch.check() is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda w: w.leader.close(), "does not lead any more"),
        (lambda w: w.leader.transact(Replace(TERM, b"", 1)), "does not lead any more"),
        (lambda w: w.leader.transact(Replace("jobs/one/claim", b"", 2)), "another run"),
        (lambda w: w.leader.transact(Delete("jobs/one/claim")), "another run"),
        (lambda w: w.server.expire(w.store.session), "its session"),
    ],
)
def test_a_run_that_must_end(change, reason):
    """A run ends when its leader no longer leads, its claim is not the latest, or its own session has expired."""
    watched = MonitoredRun()
    assert watched.watch.check() is None
    change(watched)
    assert reason in watched.watch.check()


def test_a_store_that_does_not_respond(monkeypatch):
    """A run ends 2/3 of the session timeout after the last response, as another may lead soon.

    Without a session timeout it continues.
    """

    def away(key):
        raise StoreUnavailable("away")

    for timeout in (9.0, None):
        watched = MonitoredRun(timeout)
        watched.now = 100.0
        assert watched.watch.check() is None
        monkeypatch.setattr(watched.store, "read", away)
        watched.now = 105.9
        assert watched.watch.check() is None
        watched.now = 106.1
        assert (watched.watch.check() is None) == (timeout is None)


def test_a_hanging_read():
    """A run whose read of the store hangs, or fails with an unexpected error, ends by its own clock."""
    watched = MonitoredRun(9.0)
    watched.now = 6.1
    assert "has not responded" in watched.watch.check_silence()
    assert "KeyError" in watched.watch._reason(lambda: {}["x"])


def test_a_jvm_that_has_ended(monkeypatch):
    """A run ends when the process that started it is gone: SIGKILL of a JVM leaves its Python alive."""
    watched = MonitoredRun()
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert "started it has ended" in watched.watch.check()


MODULE = """
import atexit, os, pathlib, threading, time

def ends(folder):
    def late():
        time.sleep(1.5)
        pathlib.Path(folder, "hook").touch()
    atexit.register(late)
    return 7

def marks(folder):
    with open(f"{folder}/marks", "a") as file:
        file.write("here\\n")

def lost(folder):
    import stagecrew
    print("said before it was lost")
    threading.Thread(target=time.sleep, args=(600,)).start()
    raise stagecrew.errors.PossiblyInconsistentError("nobody knows")
"""


def process_of(tmp_path, function, leads, number=1):
    """Processes of one run without Spark, under a leader that is this process. Yields them with the jobs."""
    (tmp_path / "run_jobs.py").write_text(MODULE)
    (tmp_path / "state").mkdir()
    places = {"STAGECREW_STORE": f"sqlite://{tmp_path}/jobs.db", "STAGECREW_STATE": str(tmp_path / "state")}
    spec = JobSpec.of_function(f"run_jobs:{function}", {"folder": str(tmp_path)}, {}, [tmp_path / "run_jobs.py"])
    store = open_store(places["STAGECREW_STORE"])
    leads.callback(store.close)
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
        subprocess.Popen(command, env=os.environ | places, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(number)
    ]
    ended = []
    for process in started:
        with process:
            output = process.communicate(timeout=120)
            ended.append(subprocess.CompletedProcess(command, process.returncode, *output))
    return (ended if number > 1 else ended[0]), jobs


def test_a_run_that_ends_its_job(tmp_path):
    """After its job's end a run is not monitored: its exit hooks run even if its session has expired.

    It has not ended as lost.
    """
    with contextlib.ExitStack() as leads:
        ended, jobs = process_of(tmp_path, "ends", leads)
        assert (ended.returncode, "this run ends" in ended.stderr) == (0, False), ended.stderr
        assert (tmp_path / "hook").exists()
        assert (jobs.result("job").value(), jobs.process("job")) == (7, None)


def test_a_run_that_is_lost(tmp_path):
    """A run whose job has not ended ends at once with its message, though its threads continue.

    The job may run again.
    """
    with contextlib.ExitStack() as leads:
        ended, jobs = process_of(tmp_path, "lost", leads)
        assert ended.returncode == EXIT_LOST, ended.stderr
        assert "said before it was lost" in ended.stdout
        assert "this run ends: its job has not ended" in ended.stderr
        assert (jobs.read("job")[0].state, jobs.process("job")) == ("running", None)


def test_processes_of_one_run(tmp_path):
    """Of three processes that are started for one run, one runs the job. The others end, and run no code of the job."""
    with contextlib.ExitStack() as leads:
        ended, jobs = process_of(tmp_path, "marks", leads, number=3)
        assert sorted(one.returncode for one in ended) == [0, EXIT_LOST, EXIT_LOST], ended
        assert (tmp_path / "marks").read_text() == "here\n"
        assert [one.stderr.count("belongs to another process") for one in ended if one.returncode] == [1, 1]
        assert jobs.result("job").value() is None


def test_a_process_whose_threads_do_not_end():
    """A run that has ended its job does not wait forever for threads of the job's code."""
    code = "import threading, time\nfrom stagecrew.recovery.run.exits import exit_within\nexit_within(0.3, 7)\n"
    code += "threading.Thread(target=time.sleep, args=(600,)).start()"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 7


def test_a_run_that_leaves_is_gone(tmp_path):
    """A lost run ends although the disk for its output is full and files hang, and closes its session before."""
    code = "import sys, time, pathlib\nfrom stagecrew.recovery.run import exits\nexits._LAST_ACTIONS_TIMEOUT = 1.0\n"
    code += "exits.exit_as_lost(lambda: print('why', file=sys.stderr, flush=True), lambda: time.sleep(600), "
    code += f"pathlib.Path({str(tmp_path / 'closed')!r}).touch)"
    with open("/dev/full", "wb", buffering=0) as full:
        ended = subprocess.run([sys.executable, "-c", code], timeout=120, check=False, stderr=full)
    assert (ended.returncode, (tmp_path / "closed").exists()) == (EXIT_LOST, True)


def test_a_watch_that_is_stopped():
    """Findings after the watch was stopped end nothing. Earlier findings do."""
    for stopped in (False, True):
        watched, ends = MonitoredRun(), []
        watched.watch._end = ends.append
        watched.leader.close()
        if stopped:
            watched.watch.stop()
        watched.watch._watch(watched.watch.check)
        assert len(ends) == (not stopped)


def test_secrets_are_passed_to_spark_in_a_file(tmp_path, monkeypatch):
    """A job's configuration is in no command line, but in a file that only this user can read.

    The file is deleted with the run.
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
        due = time.monotonic() + 30
        while not argv.exists() or "--term=2" not in argv.read_text():
            assert time.monotonic() < due
            time.sleep(0.01)
        submit_arguments = argv.read_text().split("\n")
        assert not [one for one in submit_arguments if "s3cret" in one]
        # The run is in client mode, whatever the defaults of this host's Spark say.
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


def test_the_jobs_own_plugins_stay():
    """A job keeps its own plugins and jars, with stagecrew's in addition."""
    given = launcher_module._properties(JobSpec("a.py", (), {"spark.plugins": "x.Y", "spark.jars": "/x.jar"}))
    assert given["spark.plugins"] == "x.Y,stagecrew.StagecrewPlugin"
    assert given["spark.jars"].startswith("/x.jar,")
    assert launcher_module._properties(JobSpec("a.py"))["spark.plugins"] == "stagecrew.StagecrewPlugin"


def test_a_work_folder_that_cannot_be_written(tmp_path, monkeypatch):
    """A full or invalid work folder, or a missing spark-submit, is an error that names it. No files are left."""
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
    with pytest.raises(ConfigurationError, match="no executable file"):
        Launcher("sqlite:///x", "/y", tmp_path)


def test_files_of_killed_runs(tmp_path, monkeypatch):
    """Files of a run that was killed with its driver are deleted when the job runs here again. Logs stay."""
    monkeypatch.setattr(launcher_module, "found_spark_submit", lambda: "spark-submit")
    launcher = Launcher("sqlite:///x", "/y", tmp_path)
    [first, other] = [launcher.prepare(JobSpec("a.py"), job) for job in ("job", "other")]
    (first.parent / "run-1.log").touch()
    again = launcher.prepare(JobSpec("a.py"), "job")
    assert sorted(first.parent.iterdir()) == sorted([again, first.parent / "run-1.log"])
    Launcher("sqlite:///z", "/y", tmp_path).prepare(JobSpec("a.py"), "job")  # of another installation
    assert again.exists()
    assert other.exists()


def test_errors_that_are_no_failure_of_the_job():
    """A job has not failed if it raised, or wrapped, an error of an unavailable store or of an unknown commit."""

    def wrapped(inner):
        try:
            try:
                raise inner
            except Exception as error:
                raise RuntimeError("my own words") from error
        except RuntimeError as error:
            return error

    assert "away" in infrastructure_error(wrapped(StoreUnavailable("away")))
    assert "CommitUnknown" in infrastructure_error(CommitUnknown("lost"))
    assert infrastructure_error(wrapped(ValueError("mine"))) is None
    assert "away" in infrastructure_error(ExceptionGroup("two", [ValueError("mine"), StoreUnavailable("away")]))
    # Spark's text for an error in foreachBatch. tests/spark/test_commits.py has a real one.
    for text, message in (
        (
            "Return Message: Traceback:\n  raise E\nstagecrew.errors.CommitPending: it waits\n SQLSTATE: 39000",
            "it waits",
        ),
        ("Traceback:\nstagecrew.errors.StateCorrupt: cut", "StateCorrupt: cut"),
        ("Traceback:\nstagecrew.errors.CommitConflict: two schemas", None),
        ("Traceback:\nstagecrew.errors.NoSuch: x", None),
        ("it said that stagecrew.errors.CommitPending: it waits", None),
    ):
        why = infrastructure_error(wrapped(PySparkException(text)))
        assert message in why if message else why is None
    assert infrastructure_error(ValueError("\nstagecrew.errors.CommitPending: it waits")) is None


class Slow(Coordinator):
    """Returns its state when the test says so, or declines, or returns an invalid state."""

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


def test_a_late_checkpoint_is_no_failure_of_the_job():
    """A slow coordinator, or an event that no executor acknowledges, makes a run lost.

    If a coordinator declines, the job fails, even if another one is late; the same holds for a checkpoint id that does
    not grow.
    """
    with CoordinatorHarness(Slow) as harness:
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
    with CoordinatorHarness(Slow) as harness:
        harness.coordinator.state = Future()
        harness.coordinator.state.set_exception(OSError("I have no state now"))
        declined = checkpoint_error(harness)
        assert "I have no state now" in str(declined)
        assert infrastructure_error(declined) is None


def test_a_claim_that_is_renewed():
    """A run that renews its claim continues, and writes with the earlier claim change nothing."""
    watched = MonitoredRun()
    old = watched.claimed.jobs
    watched.claimed.renew()
    assert watched.watch.check() is None
    with pytest.raises(LeadershipLost):
        old.renew_claim("one", 3)
