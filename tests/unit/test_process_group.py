"""Signals to the process group of a run, with real processes."""

from __future__ import annotations

import signal
import subprocess
import sys

import psutil
import pytest

from stagecrew.recovery.driver.process_group import ProcessGroup
from support.processes import is_alive
from support.waiting import eventually

#: Starts a child that sleeps, prints the child's process id, and exits at the end of its own stdin.
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdin=subprocess.DEVNULL)
print(child.pid, flush=True)
sys.stdin.read()
child.returncode = 0
"""


@pytest.fixture
def leader():
    """A process that leads a group with one child."""
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    with process:
        yield process
        process.kill()


def test_a_signal_reaches_the_whole_group(leader):
    """Both the leader and its child get the signal. A second signal to the ended group does nothing."""
    group = ProcessGroup(leader.pid)
    child = int(leader.stdout.readline())
    group.signal(signal.SIGKILL)
    assert leader.wait(30) == -signal.SIGKILL
    eventually(lambda: not is_alive(child), 30, "the child ends")
    group.signal(signal.SIGKILL)


def test_a_signal_reaches_the_group_of_an_ended_leader(leader):
    """A child that outlives the group's leader still gets the signal."""
    group = ProcessGroup(leader.pid)
    child = int(leader.stdout.readline())
    leader.stdin.close()
    assert leader.wait(30) == 0
    assert is_alive(child)
    group.signal(signal.SIGKILL)
    eventually(lambda: not is_alive(child), 30, "the child ends")


def test_a_reused_process_id_gets_no_signal(leader):
    """A process with the leader's id but another start time gets no signal, because it is not the leader."""
    group = ProcessGroup(leader.pid)
    child = int(leader.stdout.readline())
    group._leader = psutil.Process()  # as if another process had this id when the group was created
    group.signal(signal.SIGKILL)
    assert leader.poll() is None
    assert is_alive(child)
    ProcessGroup(leader.pid).signal(signal.SIGKILL)
    assert leader.wait(30) == -signal.SIGKILL
