"""Samples of Python processes are correct and cheap, never delay a fork, and leave nothing for a worker to inherit."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stagecrew.worker.sampling import DaemonSampler, Sampler, configured, install
from support.fake_channel import FakeServer

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")]

BUSY_THEN_IDLE = "import time\nwhile time.process_time() < 1.5: pass\nprint('idle', flush=True)\ntime.sleep(60)"
#: Linux assigns no pid this high.
NO_SUCH_PID = 1 << 22


@pytest.fixture
def idle() -> Iterator[int]:
    """The pid of a process that has used 1.5 s of CPU time and is now idle."""
    with subprocess.Popen([sys.executable, "-c", BUSY_THEN_IDLE], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"idle\n"
        yield process.pid
        process.kill()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeServer]:
    """A fake executor channel."""
    with FakeServer(tmp_path) as fake:
        yield fake


def connected(server: FakeServer) -> DaemonSampler:
    """A daemon's sampler that takes samples in every call of `run`. It and the fake executor have exchanged proofs."""
    sampler = DaemonSampler(0.0, server.address_file)
    sampler.run(lambda: False)
    server.challenge()
    assert sampler._connection is not None
    assert sampler._connection.write_unsent()
    (hello,) = server.frames()
    assert server.is_proved(hello)
    assert (hello.kind, hello["role"], hello["pid"]) == ("HELLO", "sampler", os.getpid())
    return sampler


def ps(pid: int, column: str) -> int:
    return int(subprocess.run(["ps", "-o", f"{column}=", "-p", str(pid)], capture_output=True, check=True).stdout)


def test_samples_agree_with_ps(idle: int) -> None:
    """The sampled memory is within 10 % and the CPU seconds within 1 s of what `ps` reports for an idle process."""
    times = iter([100.0, 102.0])
    sampler = Sampler("worker", clock=lambda: next(times))
    assert sampler.problem == ""
    first, second = sampler.sample(idle), sampler.sample(idle)
    assert first is not None
    assert second is not None
    (figures,) = first["samples"]
    assert figures["rss"] == pytest.approx(ps(idle, "rss") * 1024, rel=0.1)
    assert figures["threads"] == ps(idle, "nlwp") == 1
    assert figures["files"] >= 3
    assert sampler._known[idle][2] == pytest.approx(ps(idle, "cputimes"), abs=1.0)
    assert sampler._known[idle][2] >= 1.4
    assert abs(first["started"] / 1000 - (time.time() - ps(idle, "etimes"))) < 2.5
    assert figures["cpu"] > 0  # average since the process started
    assert second["samples"][0]["cpu"] == 0  # average since the previous sample
    assert (first["pid"], first["role"]) == (idle, "worker")


def test_a_process_that_samples_itself_does_not_count_the_descriptor_for_counting() -> None:
    """psutil opens a descriptor to list the open files of a process. The sampler does not count this descriptor."""
    sampler = Sampler("agent")
    assert sampler.problem == ""
    descriptors = []
    for number in range(256):
        with contextlib.suppress(OSError):
            os.fstat(number)
            descriptors.append(number)
    sample = sampler.sample(os.getpid())
    assert sample is not None
    assert sample["samples"][0]["files"] == len(descriptors)


def test_a_zombie_has_no_sample() -> None:
    """`sample` returns None for a process that has ended, but whose parent has not waited for it yet."""
    sampler = Sampler("worker")
    assert not sampler.problem
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert sampler.sample(process.pid) is None


def test_a_process_that_has_ended_has_no_sample(idle: int) -> None:
    """`sample` returns None for a process that does not exist. The sampler forgets a process that has ended."""
    sampler = Sampler("worker")
    assert sampler.problem == ""
    assert sampler.sample(idle) is not None
    assert sampler.sample(NO_SUCH_PID) is None
    assert list(sampler._known) == [idle]
    os.kill(idle, 9)
    os.waitpid(idle, 0)
    assert sampler.sample(idle) is None
    assert list(sampler._known) == []


def test_sampling_takes_at_most_a_thousandth_of_a_core(server: FakeServer, idle: int) -> None:
    """A round that samples ten workers takes less than 10 ms of CPU time: 0.1 % of a core at the default period of 10 s."""
    sampler = connected(server)
    sampler._workers = dict.fromkeys(range(10))
    real = sampler._sampler.sample
    sampler._sampler.sample = lambda _pid: real(idle)  # type: ignore[method-assign]
    sampler.run(lambda: False)  # imports psutil
    before, rounds = time.process_time(), 20
    for _ in range(rounds):
        sampler.run(lambda: False)
    assert (time.process_time() - before) / rounds < 0.01
    assert len(server.frames()) == rounds + 1
    sampler.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_the_daemon_identifies_itself_and_sends_samples_of_its_workers(kind: str, tmp_path: Path, idle: int) -> None:
    """The daemon proves that it knows the token, and then sends one frame per round, without ever waiting."""
    with FakeServer(tmp_path, kind) as server:
        sampler = DaemonSampler(0.0, server.address_file)
        sampler._workers = {idle: None, NO_SUCH_PID: None}
        sampler.run(lambda: False)
        server.accept()
        assert [frame.kind for frame in server.frames()] == ["CONNECT"]
        sampler.run(lambda: False)  # the executor's proof has not arrived yet
        assert server.frames() == []
        sampler.close()
        sampler = connected(server)
        sampler._workers = {idle: None, NO_SUCH_PID: None}
        sampler.run(lambda: False)
        (samples,) = server.frames()
        assert [process["pid"] for process in json.loads(samples["body"])["processes"]] == [idle]
        assert list(sampler._workers) == [idle]
        sampler.close()


def test_the_daemon_connects_again_only_before_it_was_accepted(server: FakeServer) -> None:
    """If the executor closes the connection before it has sent WELCOME, the daemon connects again, but not afterwards."""
    sampler = DaemonSampler(0.0, server.address_file)
    for _ in range(3):
        sampler.run(lambda: False)
        server.accept()
        server.accepted.pop().close()
        sampler.run(lambda: False)
        assert sampler._connection is not None
    sampler.run(lambda: False)
    server.challenge()
    sampler.run(lambda: False)
    assert [frame.kind for frame in server.frames()] == ["HELLO", "SAMPLES"]
    server.send("WELCOME", body="{}")
    sampler.run(lambda: False)
    server.accepted.pop().close()
    sampler.run(lambda: False)
    assert sampler._connection is None


def test_the_daemon_connects_again_if_the_executor_had_no_room(server: FakeServer) -> None:
    """If the queue of the executor's socket is full, the daemon connects later. It does not stop sampling."""
    server.listening.listen(0)
    with socket.socket(socket.AF_UNIX) as waiting:
        waiting.connect(server.listening.getsockname())
        sampler = DaemonSampler(0.0, server.address_file)
        for _ in range(3):
            sampler.run(lambda: False)
        assert sampler._connection is not None
        server.accept()
        server.accepted.pop().close()
    sampler.run(lambda: False)
    server.challenge()
    sampler.run(lambda: False)
    assert [frame.kind for frame in server.frames()] == ["HELLO", "SAMPLES"]
    sampler.close()


def test_the_daemon_sends_nothing_to_a_server_without_the_token(server: FakeServer, caplog: Any) -> None:
    """If the server's proof is wrong, the daemon stops sampling, logs the reason, and has sent no proof of its own."""
    sampler = DaemonSampler(0.0, server.address_file)
    sampler.run(lambda: False)
    server.challenge(token="wrong")
    sampler.run(lambda: False)
    assert sampler._connection is None
    assert server.frames() == []
    assert "it does not know the token" in caplog.text


def test_a_request_for_a_worker_interrupts_a_round(server: FakeServer, idle: int) -> None:
    """After each process, the sampler checks for requests. The round continues when the loop next wakes."""
    sampler = connected(server)
    sampler._workers = dict.fromkeys(range(3))
    sampled: list[int] = []
    sampler._sampler.sample = lambda pid: sampled.append(pid) or None  # type: ignore[method-assign, func-returns-value]
    sampler.run(lambda: True)
    assert sampled == [0]
    sampler.run(lambda: False)
    assert sampled == [0, 1, 2]
    sampler.close()


def test_the_loop_wakes_for_the_next_sample(server: FakeServer) -> None:
    """The daemon's loop passes a timeout to `poll`. If the next sample is due earlier, `poll` returns then."""
    now = 0.0
    sampler = DaemonSampler(10.0, server.address_file, clock=lambda: now)
    poll = sampler.poll()
    reading, writing = os.pipe()
    poll.register(reading, select.POLLIN)
    assert sampler.wait_at_most(1000) == 1000
    now = 1.9  # the first sample is due after FIRST_SAMPLE (2 s), not after 10 s
    assert 90 <= sampler.wait_at_most(1000) <= 110
    assert poll.poll(1000) == []
    os.write(writing, b"x")
    now = 2.0
    assert poll.poll(1000) == [(reading, select.POLLIN)]  # a request takes precedence over a sample
    assert sampler._connection is not None
    assert sampler._connection._socket is None
    poll.unregister(reading)
    sampler.close()
    os.close(reading)
    os.close(writing)


def test_the_loop_of_older_versions_of_spark_wakes_for_the_next_sample(server: FakeServer) -> None:
    """Before Spark 4.2, the daemon's loop waits with `select`. It also returns when the next sample is due."""
    now = 0.0
    sampler = DaemonSampler(10.0, server.address_file, clock=lambda: now)
    reading, writing = os.pipe()
    now = 1.9  # the first sample is due after FIRST_SAMPLE (2 s)
    began = time.monotonic()
    assert sampler.select([reading], [], [], 30) == ([], [], [])
    assert time.monotonic() - began < 20
    os.write(writing, b"x")
    now = 2.0
    assert sampler.select([reading], [], [], 30) == ([reading], [], [])  # a request takes precedence over a sample
    assert sampler._connection is not None
    assert sampler._connection._socket is None
    os.read(reading, 1)
    assert sampler.select([reading], [], [], 30) == ([], [], [])
    assert sampler._connection._socket is not None, "the sampler connects in order to send the sample"
    sampler.close()
    os.close(reading)
    os.close(writing)


def test_an_executor_that_does_not_read_delays_nothing(server: FakeServer) -> None:
    """Bytes that cannot be written are kept, and no samples are taken until they have been written."""
    sampler = connected(server)
    sampler._workers = {os.getpid(): None}
    sampler._sampler.frame = lambda _processes: b"x" * (1 << 24)  # type: ignore[method-assign]
    sampler.run(lambda: False)
    assert sampler._connection is not None
    unsent_bytes = len(sampler._connection._unsent)
    assert unsent_bytes > 0
    began = time.monotonic()
    sampler.run(lambda: False)
    assert time.monotonic() - began < 0.5
    assert len(sampler._connection._unsent) <= unsent_bytes
    sampler.close()


def test_sampling_ends_with_its_executor(server: FakeServer, tmp_path: Path) -> None:
    """Sampling ends when the executor closes the channel, or if the address file does not exist."""
    sampler = connected(server)
    server.send("WELCOME", body="{}")
    sampler.run(lambda: False)
    server.accepted[0].close()
    for _ in range(100):
        sampler.run(lambda: False)
    assert sampler._connection is None
    nowhere = DaemonSampler(0.0, str(tmp_path / "none"))
    nowhere.run(lambda: False)
    assert nowhere._connection is None
    assert nowhere.wait_at_most(1000) == 1000


def test_a_forked_worker_closes_the_connection(server: FakeServer) -> None:
    """The worker closes its copy of the connection and takes no samples. The daemon adds the worker to those that it
    samples."""
    sampler = DaemonSampler(0.0, server.address_file)
    sampler.run(lambda: False)
    assert sampler._connection is not None
    assert sampler._connection._socket is not None
    descriptor = sampler._connection._socket.fileno()
    pid = sampler.fork()
    if not pid:
        try:
            os.fstat(descriptor)
        except OSError:
            os._exit(7 if sampler._connection is None else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert list(sampler._workers) == [pid]
    sampler.run(lambda: False)
    sampler.close()


def test_without_psutil_the_problem_is_sent_with_its_remedy(server: FakeServer, monkeypatch: Any) -> None:
    """Without psutil nothing is sampled, and the frame names the interpreter and says to install psutil."""
    monkeypatch.setitem(sys.modules, "psutil", None)
    sampler = connected(server)
    sampler._workers = {os.getpid(): None}
    sampler.run(lambda: False)
    (process,) = json.loads(server.frames()[0]["body"])["processes"]
    assert (process["pid"], process["role"], process["samples"]) == (os.getpid(), "daemon", [{}])
    assert sys.executable in process["problem"]
    assert "Install psutil" in process["problem"]
    sampler.close()


WORKER = """
import os, sys, threading
from stagecrew.worker import sampling
daemon = sampling.DaemonSampler(0.0, "nowhere")
assert daemon._sampler.problem == ""
assert daemon._sampler.sample(os.getpid())
of_daemon = sys.modules["psutil"]
assert threading.active_count() == 1
pid = daemon.fork()
if not pid:
    leftover = [name for name in sys.modules if name.partition(".")[0] == "psutil"]
    import psutil  # the worker's own
    ok = not leftover and psutil is not of_daemon and psutil.Process().pid == os.getpid()
    os._exit(7 if ok else 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
assert daemon._sampler.sample(os.getpid())
"""


def test_a_worker_imports_its_own_psutil() -> None:
    """A worker does not inherit the daemon's psutil. The daemon's import of psutil starts no thread."""
    subprocess.run([sys.executable, "-c", WORKER], check=True)


def test_the_daemon_is_changed_only_when_the_executor_asks_for_samples(monkeypatch: Any) -> None:
    """`install` changes PySpark's daemon only if the executor requests samples: it replaces `os.fork`, `select.poll` and
    `select.select`."""
    import pyspark.daemon

    daemon_module: Any = pyspark.daemon
    monkeypatch.setattr(daemon_module, "os", daemon_module.os)
    monkeypatch.setattr(daemon_module, "select", select)
    monkeypatch.delenv("STAGECREW_SAMPLING", raising=False)
    install()
    assert configured() is None
    assert daemon_module.select is select
    monkeypatch.setenv("STAGECREW_SAMPLING", "2.5 /a folder/channel.json")
    assert configured() == (2.5, "/a folder/channel.json")
    install()
    assert daemon_module.select.poll is not select.poll
    assert daemon_module.select.select is not select.select
    assert daemon_module.select.error is OSError  # which PySpark's loop catches before Spark 4.2
    assert daemon_module.select.POLLIN == select.POLLIN
    assert daemon_module.os.fork is not os.fork
    assert daemon_module.os.getpid is os.getpid
