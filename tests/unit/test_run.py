"""The process of a run: what it watches for, and how it is started."""

import os
import stat
import time

import pytest

from modelstore import ModelServer
from stagecrew.errors import StoreUnavailable
from stagecrew.recovery import driver
from stagecrew.recovery.driver import Launcher
from stagecrew.recovery.election import HOLDER, TERM
from stagecrew.recovery.jobs import Run
from stagecrew.recovery.run import Watch
from stagecrew.recovery.specs import JobSpec
from stagecrew.recovery.stores.contract import Create, Delete, Replace


class Watched:
    """A run of term 1, whose claim has version 2, with a clock that a test turns."""

    def __init__(self, timeout=None):
        self.server = ModelServer()
        self.leader, self.store = self.server.session(), self.server.session()
        self.leader.ensure("leader", TERM, "jobs/one/claim")
        self.leader.transact(Replace(TERM, b"", 0), Create(HOLDER, b"", ephemeral=True))
        self.leader.transact(Replace("jobs/one/claim", b"", 0))
        self.leader.transact(Replace("jobs/one/claim", b"", 1))
        self.store.timeout = timeout
        self.now = 0.0
        self.watch = Watch(self.store, 1, "jobs/one/claim", 2, lambda reason: None, lambda: self.now)


def test_a_run_that_may_go_on():
    """While its leader leads and its claim is the last, a run goes on."""
    watched = Watched(timeout=9.0)
    for second in range(100):
        watched.now = float(second)
        assert watched.watch.look() is None


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
def test_a_run_that_has_to_end(change, reason):
    """It ends when its leader does not lead, its claim is not the last, or its own session is over."""
    watched = Watched()
    assert watched.watch.look() is None
    change(watched)
    assert reason in watched.watch.look()


def test_a_store_that_does_not_answer(monkeypatch):
    """Two thirds of the session's time-out behind the last answer a run ends, as another may lead soon; without one it goes on."""

    def away(key):
        raise StoreUnavailable("away")

    for timeout in (9.0, None):
        watched = Watched(timeout)
        watched.now = 100.0
        assert watched.watch.look() is None
        monkeypatch.setattr(watched.store, "read", away)
        watched.now = 105.9
        assert watched.watch.look() is None
        watched.now = 106.1
        assert (watched.watch.look() is None) == (timeout is None)


def test_a_jvm_that_is_gone(monkeypatch):
    """It ends when the process that started it is gone: SIGKILL of a JVM leaves its Python alive."""
    watched = Watched()
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert "started it is gone" in watched.watch.look()


def test_secrets_reach_spark_by_a_file(tmp_path, monkeypatch):
    """A job's configuration is on no command line: it lies in a file of this user's alone, and is deleted with the run."""
    argv = tmp_path / "argv"
    submit = tmp_path / "spark-submit"
    submit.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {argv}\nsleep 60\n')
    submit.chmod(0o755)
    launcher = Launcher("sqlite:///x", "/y", tmp_path / "work", str(submit))
    spec = JobSpec("job.py", (), {"spark.password": "s3cret = ü#!\\"}, {"etl.py": b"x = 1"}, b"print(1)")
    process = launcher.start(spec, Run("a/b", 3, 5), 2, finish=False)
    try:
        due = time.monotonic() + 30
        while not argv.exists() or "--term=2" not in argv.read_text():
            assert time.monotonic() < due
            time.sleep(0.01)
        said = argv.read_text().split("\n")
        assert not [one for one in said if "s3cret" in one]
        assert {"--job=a/b", "--run=3", "--claim=5", "--term=2"} <= set(said)
        [properties] = (tmp_path / "work").rglob("spark.properties")
        assert "spark.password=s3cret\\ \\=\\ \\u00fc\\#\\!\\\\\n" in properties.read_text()
        assert stat.S_IMODE(properties.stat().st_mode) == 0o600
        assert stat.S_IMODE(properties.parent.stat().st_mode) == 0o700
        assert (properties.parent / "job.py").read_bytes() == b"print(1)"
    finally:
        process.ask()
        process.wait(10)
        process.kill()
    assert process.ended() == -15
    assert not properties.parent.exists()


def test_the_jobs_own_plugins_stay():
    """A job that names plugins of its own keeps them; one that names none gets stagecrew's jar and plugin."""
    assert driver._properties(JobSpec("a.py", (), {"spark.plugins": "x.Y"}))["spark.plugins"] == "x.Y"
    assert driver._properties(JobSpec("a.py"))["spark.plugins"] == "stagecrew.StagecrewPlugin"
