"""The daemon's own: how it ends workers, and how it imports from the jar."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
import zipfile
import zipimport

import pytest

from stagecrew.worker import daemon, graceful_shutdown
from support.waiting import eventually

CATCHES = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: {then}); print('ready', flush=True); signal.pause(); signal.pause()"
IGNORES = CATCHES.format(then="None")
LEAVES = CATCHES.format(then="sys.exit(7)")
PLAIN = "import time; print('ready', flush=True)\nwhile True: time.sleep(0.02)"


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """The grace is short, and the alarm is as it was."""
    before = signal.getsignal(signal.SIGALRM)
    monkeypatch.setattr(graceful_shutdown, "SECONDS", 0.3)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    graceful_shutdown._asked.clear()


@pytest.fixture
def child():
    """Starts a Python process that waits for signals."""
    started = []

    def start(script: str) -> subprocess.Popen[str]:
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.timeout(30, method="thread")  # the other method needs the alarm
def test_a_worker_that_catches_sigterm_is_asked_first(child, monkeypatch):
    """A worker with listeners gets SIGTERM and ends as it likes."""
    monkeypatch.setattr(graceful_shutdown, "SECONDS", 10.0)
    process = child(LEAVES)
    graceful_shutdown._kill(process.pid, signal.SIGKILL)
    assert process.wait(10) == 7


@pytest.mark.timeout(30, method="thread")
def test_one_that_stays_is_killed(child):
    """A worker that is still there after the grace gets SIGKILL."""
    process = child(IGNORES)
    graceful_shutdown._kill(process.pid, signal.SIGKILL)
    assert process.wait(10) == -signal.SIGKILL
    assert not graceful_shutdown._asked


@pytest.mark.timeout(30, method="thread")
def test_a_worker_without_listeners_is_killed_at_once(child):
    """A worker that does not catch SIGTERM gets what Spark's daemon sends; other signals pass unchanged."""
    process = child(PLAIN)
    graceful_shutdown._kill(process.pid, signal.SIGKILL)
    assert process.wait(10) == -signal.SIGKILL
    assert not graceful_shutdown._asked
    other = child(PLAIN)
    graceful_shutdown._kill(other.pid, signal.SIGINT)
    assert other.wait(10) != -signal.SIGKILL


@pytest.mark.timeout(30, method="thread")
def test_one_that_stays_is_killed_while_others_are(child, monkeypatch):
    """A kill of another worker does not put off the end of one that was asked before."""
    monkeypatch.setattr(graceful_shutdown, "SECONDS", 1.0)
    first, others = child(IGNORES), child(IGNORES.replace("signal.pause()", "[signal.pause() for _ in range(99)]"))
    graceful_shutdown._kill(first.pid, signal.SIGKILL)
    asked = time.monotonic()
    while first.poll() is None and time.monotonic() < asked + 10:
        graceful_shutdown._kill(others.pid, signal.SIGKILL)
        time.sleep(0.2)
    assert first.returncode == -signal.SIGKILL
    assert time.monotonic() - asked < 5
    assert others.wait(10) == -signal.SIGKILL
    # It may have been asked once more while it died; what is gone is let go of at the timer's next turn.
    eventually(
        lambda: not graceful_shutdown._asked and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0), 5, "nobody is due"
    )


@pytest.mark.timeout(30, method="thread")
def test_one_that_needs_longer_to_close_has_longer(child, monkeypatch):
    """A worker that is idle or closing has as long as it has said, and no longer."""
    monkeypatch.setattr(graceful_shutdown, "_needed", graceful_shutdown._shared_table())
    process = child(IGNORES)
    graceful_shutdown._needed[process.pid] = 2
    asked = time.monotonic()
    graceful_shutdown._kill(process.pid, signal.SIGKILL)
    assert process.wait(10) == -signal.SIGKILL
    assert 2 <= time.monotonic() - asked < 5


def test_what_a_worker_needs_is_seen_by_the_daemon_that_forked_it(monkeypatch):
    """The table is shared; a number that is too large for it is cut."""
    monkeypatch.setattr(graceful_shutdown, "_needed", graceful_shutdown._shared_table())
    pid = os.fork()
    if pid == 0:
        graceful_shutdown.needs(1e9)
        os._exit(0)
    os.waitpid(pid, 0)
    assert graceful_shutdown._needed[pid] == 0xFFFF
    graceful_shutdown.needs(0.2)
    assert graceful_shutdown._needed[os.getpid()] == 1
    graceful_shutdown.forget()
    assert graceful_shutdown._needed[os.getpid()] == 0


@pytest.mark.timeout(30, method="thread")
def test_a_worker_that_holds_sigterm_is_asked_first(child, monkeypatch):
    """Between two tasks a worker with listeners blocks SIGTERM while Spark resets its handlers."""
    monkeypatch.setattr(graceful_shutdown, "SECONDS", 10.0)
    process = child(
        "import signal, sys, time; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]); print('ready', flush=True)\n"
        "while not signal.sigpending(): time.sleep(0.01)\n"
        "sys.exit(7)"
    )
    graceful_shutdown._kill(process.pid, signal.SIGKILL)
    assert process.wait(10) == 7


def test_a_pid_that_is_used_again_is_left_alone(child):
    """After the grace only the process that was asked is killed, not another one with its pid."""
    process = child(IGNORES)
    graceful_shutdown._asked.append((0.0, process.pid, "another start"))
    graceful_shutdown._later(0, None)
    assert process.poll() is None


@pytest.mark.parametrize(
    ("arguments", "hooked"),
    [
        (["pyspark.worker"], True),
        ([], True),
        (["my.worker"], True),  # Spark's daemon runs its own instead
        (["pyspark.sql.worker.analyze_udtf"], False),
    ],
)
def test_the_worker_that_the_daemon_runs_is_hooked(monkeypatch, arguments, hooked):
    """Whatever `spark.python.worker.module` is: when Spark runs pyspark.worker, listeners open."""
    import pyspark.worker

    handlers = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGCHLD, signal.SIGTERM)}
    for name in ("main", "setup_broadcasts", "handle_worker_exception"):
        monkeypatch.setattr(pyspark.worker, name, getattr(pyspark.worker, name))
    before = pyspark.worker.main
    monkeypatch.setattr(daemon, "_hooked", False)
    monkeypatch.setattr(sys, "argv", ["daemon.py", *arguments])
    daemon._hook_pyspark()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    assert (pyspark.worker.main is not before) == hooked


def test_the_jars_list_of_files_is_read_once(tmp_path, monkeypatch):
    """importlib.invalidate_caches(), which PySpark calls for each task, does not read our jar again."""
    path = tmp_path / "some.jar"
    with zipfile.ZipFile(path, "w") as jar:
        jar.writestr("in_the_jar.py", "answer = 42")
    importer = daemon._Jar(str(path))
    monkeypatch.setitem(sys.path_importer_cache, str(path), importer)

    def read(_archive):
        raise AssertionError("the jar was read again")

    monkeypatch.setattr(zipimport, "_read_directory", read)
    importlib.invalidate_caches()
    spec = importer.find_spec("in_the_jar")
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.answer == 42
