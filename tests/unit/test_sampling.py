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
from types import SimpleNamespace
from typing import Any

import pytest

from stagecrew.wire.frames import Decoder
from stagecrew.worker.sampling import DaemonSampler, Sampler, configured, install

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
def server(tmp_path: Path) -> Iterator[SimpleNamespace]:
    """A fake executor channel: the path of its connection file (`channel.json`), and the frames that arrive."""
    listening = socket.create_server(("127.0.0.1", 0))
    place = tmp_path / "channel.json"
    place.write_text(
        json.dumps({"port": listening.getsockname()[1], "token": "t", "maxFrame": 1 << 20, "timeout": 5.0})
    )
    accepted: list[socket.socket] = []
    decoder = Decoder(1 << 20)

    def frames() -> list[Any]:
        if not accepted:
            accepted.append(listening.accept()[0])
        found = []
        while select.select([accepted[0]], [], [], 0.2)[0] and (read := accepted[0].recv_into(decoder.room())):
            found += decoder.filled(read)
        return found

    yield SimpleNamespace(place=str(place), frames=frames, accepted=accepted)
    for connection in (listening, *accepted):
        connection.close()


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


def test_a_process_that_samples_itself_does_not_count_the_sample() -> None:
    """The descriptor that is open only while the sample counts the open files is not counted."""
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
    """The sampler has no sample of a process that has ended while its parent has not waited for it."""
    sampler = Sampler("worker")
    assert not sampler.problem
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert sampler.sample(process.pid) is None


def test_a_process_that_has_ended_has_no_sample(idle: int) -> None:
    """The sampler has no sample of a process that does not exist, and forgets a process that has ended."""
    sampler = Sampler("worker")
    assert sampler.problem == ""
    assert sampler.sample(idle) is not None
    assert sampler.sample(NO_SUCH_PID) is None
    assert list(sampler._known) == [idle]
    os.kill(idle, 9)
    os.waitpid(idle, 0)
    assert sampler.sample(idle) is None
    assert list(sampler._known) == []


def test_a_round_costs_at_most_a_thousandth_of_a_core(server: SimpleNamespace, idle: int) -> None:
    """Ten workers take less than 10 ms of CPU time per round, which is 0.1 % of a core at the default period of 10
    s."""
    sampler = DaemonSampler(0.0, server.place)
    sampler._workers = dict.fromkeys(range(10))
    real = sampler._sampler.sample
    sampler._sampler.sample = lambda _pid: real(idle)  # type: ignore[method-assign]
    sampler.run(lambda: False)  # imports psutil, connects
    before, rounds = time.process_time(), 20
    for _ in range(rounds):
        sampler.run(lambda: False)
    assert (time.process_time() - before) / rounds < 0.01
    assert len(server.frames()) == rounds + 2
    sampler.close()


def test_the_daemon_identifies_itself_and_sends_samples_of_its_workers(server: SimpleNamespace, idle: int) -> None:
    """The daemon first sends HELLO with its token and its role, and then one frame per round."""
    sampler = DaemonSampler(0.0, server.place)
    sampler._workers = {idle: None, NO_SUCH_PID: None}
    sampler.run(lambda: False)
    hello, samples = server.frames()
    assert (hello.kind, hello["token"], hello["role"], hello["pid"]) == ("HELLO", "t", "sampler", os.getpid())
    assert [process["pid"] for process in json.loads(samples["body"])["processes"]] == [idle]
    assert list(sampler._workers) == [idle]
    sampler.close()


def test_a_request_for_a_worker_interrupts_a_round(server: SimpleNamespace, idle: int) -> None:
    """After each process, the sampler checks for requests. The round continues when the loop next wakes."""
    sampler = DaemonSampler(0.0, server.place)
    sampler._workers = dict.fromkeys(range(3))
    sampled: list[int] = []
    sampler._sampler.sample = lambda pid: sampled.append(pid) or None  # type: ignore[method-assign, func-returns-value]
    sampler.run(lambda: True)
    assert sampled == [0]
    sampler.run(lambda: False)
    assert sampled == [0, 1, 2]
    sampler.close()


def test_the_loop_waits_no_longer_than_until_the_next_sample(server: SimpleNamespace) -> None:
    """The daemon's loop waits only until the next sample is due, or as long as it requested if that is shorter."""
    now = 0.0
    sampler = DaemonSampler(10.0, server.place, clock=lambda: now)
    poll = sampler.poll()
    reading, writing = os.pipe()
    poll.register(reading, select.POLLIN)
    assert sampler.wait_at_most(1000) == 1000
    now = 1.9
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


def test_an_executor_that_does_not_read_delays_nothing(server: SimpleNamespace) -> None:
    """Bytes that cannot be written are kept, and no samples are taken until they have been written."""
    sampler = DaemonSampler(0.0, server.place)
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


def test_sampling_ends_with_its_executor(server: SimpleNamespace, tmp_path: Path) -> None:
    """Sampling ends when the executor closes the channel, or if there is no channel file."""
    sampler = DaemonSampler(0.0, server.place)
    sampler.run(lambda: False)
    server.frames()
    server.accepted[0].close()
    for _ in range(100):
        sampler.run(lambda: False)
    assert sampler._connection is None
    nowhere = DaemonSampler(0.0, str(tmp_path / "none"))
    nowhere.run(lambda: False)
    assert nowhere._connection is None
    assert nowhere.wait_at_most(1000) == 1000


def test_a_forked_worker_closes_the_connection(server: SimpleNamespace) -> None:
    """The worker closes its copy of the connection and takes no samples. The daemon adds the worker to those that it
    samples."""
    sampler = DaemonSampler(0.0, server.place)
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


def test_without_psutil_the_problem_is_sent_with_its_remedy(server: SimpleNamespace, monkeypatch: Any) -> None:
    """Without psutil nothing is sampled, and the frame names the interpreter and says to install psutil."""
    monkeypatch.setitem(sys.modules, "psutil", None)
    sampler = DaemonSampler(0.0, server.place)
    sampler._workers = {os.getpid(): None}
    sampler.run(lambda: False)
    (process,) = json.loads(server.frames()[1]["body"])["processes"]
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
assert threading.active_count() == 1
pid = daemon.fork()
if not pid:
    leftover = [name for name in sys.modules if name.partition(".")[0] == "psutil"]
    import psutil  # the worker's own
    ok = not leftover and psutil is not daemon._sampler._psutil and psutil.Process().pid == os.getpid()
    os._exit(7 if ok else 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
assert daemon._sampler.sample(os.getpid())
"""


def test_a_worker_imports_its_own_psutil() -> None:
    """A worker does not inherit the daemon's psutil. The daemon's import of psutil starts no thread."""
    subprocess.run([sys.executable, "-c", WORKER], check=True)


def test_the_daemon_is_changed_only_when_the_executor_asks_for_samples(monkeypatch: Any) -> None:
    """Only when samples are requested are `fork` and `poll` replaced in the daemon's loop. Everything else stays the
    same."""
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
    assert daemon_module.select.POLLIN == select.POLLIN
    assert daemon_module.os.fork is not os.fork
    assert daemon_module.os.getpid is os.getpid
