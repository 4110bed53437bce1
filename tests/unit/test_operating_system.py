"""The values that stagecrew reads from the operating system, and how it works on macOS, which reports fewer."""

from __future__ import annotations

import ast
import concurrent.futures
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from stagecrew import doctor, operating_system
from stagecrew.coordination.channel import DriverChannel
from stagecrew.mounts import filesystem, shared
from stagecrew.operators.sinks import parquet
from stagecrew.recovery.driver.process_group import ProcessGroup
from stagecrew.recovery.stores.sqlite import SQLiteStore
from stagecrew.worker import graceful_shutdown
from stagecrew.worker.sampling import Sampler
from support.fake_channel import FakeServer

PACKAGE = Path(operating_system.__file__).parent
#: The names that differ between operating systems.
DIFFERENT = {"sys.platform", "os.name", "os.uname", "socket.SO_PEERCRED"}
HANDLES_SIGTERM = (
    "import signal; signal.signal(signal.SIGTERM, lambda *_: None); print('ready', flush=True)\n"
    "while True: signal.pause()"
)


@pytest.fixture
def macos(monkeypatch, tmp_path):
    """What this process finds on macOS: no /proc, no SO_PEERCRED, no `os.pipe2`, but F_FULLFSYNC."""
    monkeypatch.setattr(operating_system, "PROC", str(tmp_path / "proc"))
    monkeypatch.setattr(operating_system, "_COUNTING_OPENS_A_FILE", False)
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.delattr(socket, "SO_PEERCRED")
    monkeypatch.delattr(os, "pipe2")
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)


@pytest.fixture
def worker():
    """A process that handles SIGTERM, as a worker with listeners does, and leads a process group."""
    command = [sys.executable, "-c", HANDLES_SIGTERM]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout.readline() == b"ready\n"
        yield process
        process.kill()


# -- The values


def test_linux_reports_every_value(worker):
    """On Linux, each value is right for a process that handles SIGTERM."""
    assert operating_system.max_pid() > worker.pid
    assert operating_system.takes_signal(worker.pid, signal.SIGTERM) is True
    assert operating_system.takes_signal(worker.pid, signal.SIGHUP) is False
    started = operating_system.start_time(worker.pid)
    assert operating_system.start_time(worker.pid) == started != operating_system.start_time(os.getppid())
    assert ("/proc", "proc") in operating_system.mount_points()
    for end in socket.socketpair():
        with end:
            assert operating_system.peer_user(end) == os.geteuid()
    assert operating_system.fsync_reaches_disk()


@pytest.mark.usefixtures("macos")
def test_macos_reports_no_value(worker):
    """On macOS, each function returns None or False. None of them raises."""
    assert operating_system.max_pid() is None
    assert operating_system.takes_signal(worker.pid, signal.SIGTERM) is None
    assert operating_system.start_time(worker.pid) is None
    assert operating_system.mount_points() is None
    assert not operating_system.knows_peer_user()
    for end in socket.socketpair():
        with end:
            assert operating_system.peer_user(end) is None
    assert not operating_system.fsync_reaches_disk()


def test_only_one_module_depends_on_the_operating_system():
    """No other module has a path below /proc, imports psutil, or checks which operating system runs Python.

    `make check` also checks the types of the package for macOS, and so finds functions that only Linux has.
    """
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant):
                names = re.findall(r"(?<!\w)/proc/", str(node.value))
            elif isinstance(node, ast.Import | ast.ImportFrom):
                names = {*(one.name for one in node.names), getattr(node, "module", None)} & {"psutil"}
            else:
                names = {ast.unparse(node)} & DIFFERENT if isinstance(node, ast.Attribute) else ()
            found += [(path.name, name) for name in names]
    assert {file for file, _ in found} == {"operating_system.py"}, found


# -- What each caller does on macOS


@pytest.mark.usefixtures("macos")
@pytest.mark.timeout(30, method="thread")
def test_on_macos_a_worker_is_killed_immediately(worker):
    """The daemon sends SIGKILL to a worker that handles SIGTERM, as without stagecrew, and does not wait for it."""
    graceful_shutdown._kill(worker.pid, signal.SIGKILL)
    assert worker.wait(10) == -signal.SIGKILL
    assert not graceful_shutdown._asked


@pytest.mark.usefixtures("macos")
def test_on_macos_there_is_no_table_of_the_time_that_workers_need(monkeypatch):
    """Without the limit of process ids there is no table, and a worker that sets its time changes nothing."""
    monkeypatch.setattr(graceful_shutdown, "_needed", graceful_shutdown._shared_table())
    graceful_shutdown.set_seconds_to_end(60)
    assert graceful_shutdown._needed is None
    assert graceful_shutdown._grace(os.getpid()) == graceful_shutdown.SECONDS


@pytest.mark.usefixtures("macos")
def test_on_macos_processes_are_sampled():
    """psutil measures processes. Counting the files of this process opens none there, so none is subtracted."""
    sampler = Sampler("agent")
    assert sampler.problem == ""
    sample = sampler.sample(os.getpid())
    assert sample["samples"][0]["rss"] > 0
    assert sample["samples"][0]["files"] == psutil.Process().num_fds()


@pytest.mark.usefixtures("macos")
def test_on_macos_a_run_is_killed(worker):
    """A signal reaches the process group of a run, and a group whose id was reused gets none."""
    group = ProcessGroup(worker.pid)
    group._leader = psutil.Process()
    group.signal(signal.SIGKILL)
    assert worker.poll() is None
    ProcessGroup(worker.pid).signal(signal.SIGKILL)
    assert worker.wait(10) == -signal.SIGKILL


@pytest.mark.usefixtures("macos")
def test_on_macos_a_store_accepts_every_file_system(tmp_path):
    """The file system is unknown, so the SQLite store opens anywhere."""
    assert filesystem(str(tmp_path)) is None
    assert not shared(filesystem("/proc"))
    SQLiteStore(tmp_path / "crew.db").close()


@pytest.mark.parametrize("is_macos", [False, True])
def test_on_macos_a_bind_mount_is_not_recognized(tmp_path, monkeypatch, request, is_macos):
    """A sink recognizes a bind mount only in the mount table. It recognizes other mount points on macOS, too."""
    proc = tmp_path / "linux"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "mountinfo").write_text(f"23 22 8:1 /source {tmp_path} rw - ext4 /dev/sda1 rw\n")
    monkeypatch.setattr(operating_system, "PROC", str(proc))
    if is_macos:
        request.getfixturevalue("macos")
    assert parquet._fixed(str(tmp_path)) == ("" if is_macos else "a mount point")
    assert parquet._fixed("/") == "a mount point"


@pytest.mark.usefixtures("macos")
def test_on_macos_coordinators_connect(tmp_path):
    """The driver's channel needs no function that macOS lacks, and accepts a server whose user is unknown."""
    with FakeServer(tmp_path) as server, concurrent.futures.ThreadPoolExecutor() as pool:
        connecting = pool.submit(DriverChannel, server.address_file, lambda _: FakeHost())
        server.challenge()
        assert server.is_proved(server.frames(1)[0])
        server.send("WELCOME", body="{}")
        channel = connecting.result(10)
        assert not os.get_blocking(channel._wake_in)  # `wake` never waits
        assert not os.get_blocking(channel._wake_out)
        channel.close()


class FakeHost:
    """A host without evaluations."""

    is_busy = False

    def due(self):
        return None

    def expire(self):
        pass

    def statistics(self):
        return None

    def broken(self, reason):
        pass


# -- The doctor


def test_doctor_finds_nothing_missing_on_linux():
    """The check names the operating system and passes."""
    check = doctor.system()
    assert (check.status, check.remedy) == ("ok", "")
    assert check.found.startswith("Linux ")


@pytest.mark.usefixtures("macos")
def test_doctor_names_the_features_that_are_lost_on_macos():
    """The check warns that stagecrew was not run there, and has one sentence for each feature that is lost."""
    check = doctor.system()
    system, *lost = check.found.splitlines()
    assert check.status == "warning"
    assert system.startswith("Darwin ")
    assert system.endswith(", on which stagecrew was not tested")
    assert [re.sub(", so .*", "", sentence) for sentence in lost] == [
        "- the signals that a process handles cannot be read",
        "- the mount table cannot be read",
        "- the user at the other end of a Unix domain socket is unknown",
        "- fsync does not flush the disk's own cache",
    ]
    assert check.remedy == "use this machine for development only"


def test_doctor_names_what_is_lost_on_a_linux_that_hides_a_file(monkeypatch, tmp_path):
    """Where only the limit of process ids cannot be read, workers end gracefully, but get no more time than 5 s."""
    for name in ("self", str(os.getpid())):
        (tmp_path / name).symlink_to(f"/proc/{name}")
    monkeypatch.setattr(operating_system, "PROC", str(tmp_path))
    check = doctor.system()
    assert (check.status, check.remedy) == ("warning", "mount /proc")
    assert [sentence.partition(",")[0] for sentence in check.found.splitlines()[1:]] == [
        "- the limit of process ids cannot be read"
    ]
    assert "gets 5 s to close" in check.found
