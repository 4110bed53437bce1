"""The Python worker daemon: how it terminates workers, and how it imports from the jar."""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import types
import zipfile
import zipimport

import psutil
import pytest

from stagecrew.worker import daemon, graceful_shutdown
from support.waiting import eventually

CATCHES = (
    "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: {then}); "
    "print('ready', flush=True); signal.pause(); signal.pause()"
)
IGNORES_SIGTERM = CATCHES.format(then="None")
EXITS_ON_SIGTERM = CATCHES.format(then="sys.exit(7)")
WITHOUT_HANDLER = "import time; print('ready', flush=True)\nwhile True: time.sleep(0.02)"


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Shortens the grace period, and restores the handler of SIGALRM at the end."""
    before = signal.getsignal(signal.SIGALRM)
    monkeypatch.setattr(graceful_shutdown, "SECONDS", 0.3)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    graceful_shutdown._asked.clear()


@pytest.fixture
def child():
    """A function that starts a Python process and waits until it is ready for signals."""
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


@pytest.mark.timeout(30, method="thread")  # the other method uses SIGALRM itself
def test_a_worker_that_handles_sigterm_gets_it_first(child, monkeypatch):
    """A worker with a SIGTERM handler gets SIGTERM instead of SIGKILL, so that it can close its listeners and exit."""
    monkeypatch.setattr(graceful_shutdown, "SECONDS", 10.0)
    process = child(EXITS_ON_SIGTERM)
    graceful_shutdown._kill(process.pid, signal.SIGKILL)
    assert process.wait(10) == 7


@pytest.mark.timeout(30, method="thread")
def test_a_worker_that_does_not_end_is_killed(child):
    """A worker that does not end within the grace period gets SIGKILL."""
    process = child(IGNORES_SIGTERM)
    graceful_shutdown._kill(process.pid, signal.SIGKILL)
    assert process.wait(10) == -signal.SIGKILL
    assert not graceful_shutdown._asked


@pytest.mark.timeout(30, method="thread")
def test_a_worker_without_listeners_is_killed_immediately(child):
    """A worker without a SIGTERM handler gets SIGKILL, as with Spark's daemon. Other signals are sent unchanged."""
    process = child(WITHOUT_HANDLER)
    graceful_shutdown._kill(process.pid, signal.SIGKILL)
    assert process.wait(10) == -signal.SIGKILL
    assert not graceful_shutdown._asked
    other = child(WITHOUT_HANDLER)
    graceful_shutdown._kill(other.pid, signal.SIGINT)
    assert other.wait(10) != -signal.SIGKILL


@pytest.mark.timeout(30, method="thread")
def test_terminating_one_worker_does_not_delay_another(child, monkeypatch):
    """A worker whose grace period has ended is killed, even if the daemon keeps terminating other workers."""
    monkeypatch.setattr(graceful_shutdown, "SECONDS", 1.0)
    first = child(IGNORES_SIGTERM)
    others = child(IGNORES_SIGTERM.replace("signal.pause()", "[signal.pause() for _ in range(99)]"))
    graceful_shutdown._kill(first.pid, signal.SIGKILL)
    asked = time.monotonic()
    while first.poll() is None and time.monotonic() < asked + 10:
        graceful_shutdown._kill(others.pid, signal.SIGKILL)
        time.sleep(0.2)
    assert first.returncode == -signal.SIGKILL
    assert time.monotonic() - asked < 5
    assert others.wait(10) == -signal.SIGKILL
    # The daemon may have signalled the other worker again while it died. The timer's next tick forgets this worker.
    eventually(
        lambda: not graceful_shutdown._asked and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0),
        5,
        "no worker is waited for",
    )


@pytest.mark.timeout(30, method="thread")
def test_a_worker_can_have_a_longer_grace_period(child, monkeypatch):
    """A worker that has announced how many seconds it needs gets this grace period."""
    monkeypatch.setattr(graceful_shutdown, "_needed", graceful_shutdown._shared_table())
    process = child(IGNORES_SIGTERM)
    graceful_shutdown._needed[process.pid] = 2
    asked = time.monotonic()
    graceful_shutdown._kill(process.pid, signal.SIGKILL)
    assert process.wait(10) == -signal.SIGKILL
    assert 2 <= time.monotonic() - asked < 5


def test_the_daemon_sees_the_time_that_a_worker_needs(monkeypatch):
    """A worker announces the seconds that it needs in a table in shared memory. Large numbers are capped."""
    monkeypatch.setattr(graceful_shutdown, "_needed", graceful_shutdown._shared_table())
    pid = os.fork()
    if pid == 0:
        graceful_shutdown.set_seconds_to_end(1e9)
        os._exit(0)
    os.waitpid(pid, 0)
    assert graceful_shutdown._needed[pid] == 0xFFFF
    graceful_shutdown.set_seconds_to_end(0.2)
    assert graceful_shutdown._needed[os.getpid()] == 1
    graceful_shutdown.reset_in_worker()
    assert graceful_shutdown._needed[os.getpid()] == 0


@pytest.mark.timeout(30, method="thread")
def test_a_worker_that_blocks_sigterm_gets_it_first(child, monkeypatch):
    """A worker that blocks SIGTERM gets it first: workers with listeners block it while Spark resets their handlers."""
    monkeypatch.setattr(graceful_shutdown, "SECONDS", 10.0)
    process = child(
        "import signal, sys, time; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
        "print('ready', flush=True)\n"
        "while not signal.sigpending(): time.sleep(0.01)\n"
        "sys.exit(7)"
    )
    graceful_shutdown._kill(process.pid, signal.SIGKILL)
    assert process.wait(10) == 7


def test_a_reused_pid_is_not_killed(child):
    """After the grace period, a different process that has the pid of the terminated worker is not killed."""
    process = child(IGNORES_SIGTERM)
    graceful_shutdown._asked.append((0.0, process.pid, "another start"))
    graceful_shutdown._kill_overdue(0, None)
    assert process.poll() is None


SECRET = "s" * 32


def framed(secret: str) -> bytes:
    """A secret as Spark sends it."""
    return len(secret).to_bytes(4, "big") + secret.encode()


@pytest.fixture
def stream(monkeypatch):
    """Spark's end and the worker's end of a stream."""
    monkeypatch.setenv("PYTHON_WORKER_FACTORY_SECRET", SECRET)
    spark, worker = socket.socketpair()
    with spark, worker:
        yield spark, worker


def test_sparks_secret_is_accepted_and_nothing_after_it_is_read(stream):
    """The reply to the right secret is PySpark's. The bytes of the first task stay in the stream."""
    spark, worker = stream
    spark.sendall(framed(SECRET) + b"the task")
    assert daemon._knows_secret(worker)
    assert spark.recv(100) == b"\0\0\0\2ok"
    assert worker.recv(100) == b"the task"


@pytest.mark.parametrize(
    "sent", [framed("x" * 32), framed(SECRET)[:-1], framed(SECRET + "x"), b"", b"\x7f\xff\xff\xff" + b"x" * 40]
)
def test_a_stranger_is_not_accepted(stream, sent):
    """A wrong, short, long or missing secret is refused as in PySpark, and the worker closes its end."""
    spark, worker = stream
    spark.sendall(sent)
    spark.shutdown(socket.SHUT_WR)
    assert not daemon._knows_secret(worker)
    assert spark.recv(100) == b"\0\0\0\3err"
    assert worker.fileno() < 0


def test_a_stranger_that_has_gone_is_not_an_error(stream):
    """A stranger that resets its connection before the reply causes no exception."""
    spark, worker = stream
    spark.sendall(framed("x" * 32))
    spark.close()
    assert not daemon._knows_secret(worker)


def test_a_worker_imports_nothing_before_spark_has_sent_its_secret():
    """A stranger that connects to the daemon makes it fork, as plain Spark does, but not import `pyspark.worker`.

    20 silent strangers take at most half as much memory again as with PySpark's own daemon, and less than 0.2 s of
    CPU time.
    """
    used = {}
    environment = {**os.environ, "PYTHON_WORKER_FACTORY_SECRET": SECRET, "SPARK_REUSE_WORKER": "1"}
    for module in ("pyspark.daemon", "stagecrew.worker.daemon"):
        command = [sys.executable, "-m", module, "pyspark.worker"]
        with (
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process,
            contextlib.ExitStack() as strangers,
        ):
            (port,) = struct.unpack(">i", process.stdout.read(4))
            for _ in range(20):
                stranger = strangers.enter_context(socket.create_connection(("127.0.0.1", port)))
                stranger.recv(4)  # the pid of the worker: it has been forked
            workers = psutil.Process(process.pid).children()
            assert len(workers) == 20
            # Each worker waits for the secret in a read.
            eventually(lambda workers=workers: all(w.status() == psutil.STATUS_SLEEPING for w in workers), 10)
            used[module] = (
                sum(worker.memory_full_info().uss for worker in workers),
                sum(sum(worker.cpu_times()[:2]) for worker in workers),
            )
            process.stdin.close()
    assert used["stagecrew.worker.daemon"][0] < 1.5 * used["pyspark.daemon"][0]
    assert used["stagecrew.worker.daemon"][1] < 0.2


@pytest.mark.parametrize(
    ("arguments", "hooked"),
    [
        (["pyspark.worker"], True),
        ([], True),
        (["my.worker"], True),  # Spark's daemon runs pyspark.worker instead
        (["pyspark.sql.worker.analyze_udtf"], False),
    ],
)
def test_the_worker_that_the_daemon_runs_is_hooked(monkeypatch, arguments, hooked):
    """Listeners open whenever Spark runs pyspark.worker, whatever `spark.python.worker.module` is.

    Such a worker also excludes the imported objects from its garbage collections.
    """
    import pyspark.worker

    handlers = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGCHLD, signal.SIGTERM)}
    for name in ("main", "setup_broadcasts", "handle_worker_exception"):
        monkeypatch.setattr(pyspark.worker, name, getattr(pyspark.worker, name))
    if hasattr(daemon.pyspark.daemon, "worker_main"):
        monkeypatch.setattr(daemon.pyspark.daemon, "worker_main", pyspark.worker.main)
    before, frozen = pyspark.worker.main, gc.get_freeze_count()
    monkeypatch.setattr(daemon, "_hooked", False)
    monkeypatch.setenv("SPARK_REUSE_WORKER", "1")
    monkeypatch.setattr(sys, "argv", ["daemon.py", *arguments])
    daemon._hook_pyspark()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    assert (pyspark.worker.main is not before) == hooked
    assert (gc.get_freeze_count() > frozen) == hooked
    gc.unfreeze()


@pytest.mark.parametrize("has_main_in_daemon", [False, True])  # True before Spark 4.2
def test_a_pyspark_without_a_replaced_function_fails_each_task(monkeypatch, has_main_in_daemon):
    """The error says what PySpark lacks. It reaches Spark as an exception of the task."""
    pyspark_daemon, worker = daemon.pyspark.daemon, types.ModuleType("pyspark.worker")
    worker.main = worker.handle_worker_exception = print
    handlers = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGCHLD, signal.SIGTERM)}
    monkeypatch.setitem(sys.modules, "pyspark.worker", worker)
    monkeypatch.setattr(daemon.pyspark, "worker", worker, raising=False)
    if has_main_in_daemon:
        monkeypatch.setattr(pyspark_daemon, "worker_main", print, raising=False)
    else:
        monkeypatch.delattr(pyspark_daemon, "worker_main", raising=False)
    monkeypatch.setattr(daemon, "_hooked", False)
    monkeypatch.setattr(sys, "argv", ["daemon.py"])
    daemon._hook_pyspark()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    sent = io.BytesIO()
    with pytest.raises(SystemExit):
        (pyspark_daemon.worker_main if has_main_in_daemon else worker.main)(None, sent)
    assert b"does not work with PySpark" in sent.getvalue()
    assert b"whose pyspark.worker has no setup_broadcasts: use another PySpark" in sent.getvalue()
    assert "has no manager" in daemon._missing(
        types.SimpleNamespace(__name__="pyspark.daemon", worker=1, os=1, select=1)
    )


def test_the_jars_file_list_is_read_once(tmp_path, monkeypatch):
    """`importlib.invalidate_caches()`, which PySpark calls for each task, does not make Python read the jar again."""
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
