"""Samples an executor's Python processes with psutil: memory, CPU, threads and open files.

PySpark's daemon samples its workers when its loop wakes, which happens every second anyway. It needs no thread and no
process for this. The agent samples itself while it waits for its executor. Both send SAMPLES frames to the executor,
which passes them on to the driver.

The daemon must never delay a fork, and a worker must not inherit anything:

- The connection to the executor never blocks. While the executor is not reading, no samples are taken.
- A round of samples is interrupted as soon as a worker is requested, and continues when the loop wakes next.
- A forked worker closes its copy of the connection.
- psutil is imported at the first sample. It is not in the `sys.modules` of a forked worker, which may import its own.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import select
import socket
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

from stagecrew import operating_system
from stagecrew.observability.error_summary import error_text
from stagecrew.wire.channel_address import ChannelAddress
from stagecrew.wire.frames import Decoder, Frame, encode
from stagecrew.wire.handshake import Handshake

__all__ = ["FIRST_SAMPLE", "VARIABLE", "DaemonSampler", "Sampler", "configured", "install"]

#: The environment variable that the executor sets: the seconds between two samples, a space, and the address file.
VARIABLE: Final = "STAGECREW_SAMPLING"

#: The first sample is taken after this many seconds at most.
FIRST_SAMPLE: Final = 2.0
#: How long to wait for the executor's part of the handshake before the daemon checks for it again, in seconds.
_HANDSHAKE_PAUSE: Final = 0.05
#: The longest frame that the executor sends to a sampler: WELCOME, with the configuration.
_MAX_FRAME: Final = 1 << 24

_log = logging.getLogger("stagecrew")

_Files: TypeAlias = list[Any]
_Selected: TypeAlias = tuple[_Files, _Files, _Files]


def configured() -> tuple[float, str] | None:
    """The seconds between two samples and the address file of the executor's channel; None if sampling is off."""
    seconds, _, address_file = os.environ.get(VARIABLE, "").partition(" ")
    return (float(seconds), address_file) if address_file else None


class Sampler:
    """Samples one group of processes of this host, and remembers their CPU times."""

    def __init__(self, role: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._role, self._clock = role, clock
        self._has_psutil = False
        self._problem = ""
        #: By pid: the process, the time of its last sample, and its CPU seconds at that time.
        self._known: dict[int, tuple[Any, float, float]] = {}

    @property
    def problem(self) -> str:
        """Why there are no samples, and what to do. Empty if there are samples."""
        if not self._has_psutil and not self._problem:
            try:
                operating_system.load_psutil()
                self._has_psutil = True
            except Exception as error:
                self._problem = (
                    f"its Python processes are not sampled, because psutil cannot be imported by {sys.executable} "
                    f"({error_text(error)}). Install psutil for the Python of the executors"
                )
        return self._problem

    def sample(self, pid: int) -> dict[str, Any] | None:
        """Samples a process, in the format of the executor. Returns None if the process has ended."""
        process, before, cpu_before = self._known.get(pid) or (operating_system.find_process(pid), 0.0, 0.0)
        found = None if process is None else operating_system.figures(process)
        if found is None:
            self._known.pop(pid, None)
            return None
        now = self._clock()
        elapsed = now - before if before else time.time() - found.started
        self._known[pid] = (process, now, found.cpu)
        millicores = int((found.cpu - cpu_before) * 1000 / elapsed) if elapsed > 0 else 0
        sample = {"rss": found.memory, "cpu": max(0, millicores), "threads": found.threads, "files": found.files}
        return {"pid": pid, "role": self._role, "started": int(found.started * 1000), "samples": [sample]}

    def forget(self, pid: int) -> None:
        """Forgets the process with this pid, which has ended."""
        self._known.pop(pid, None)

    def frame(self, processes: list[dict[str, Any]]) -> bytes:
        """The frame with these samples, or with the problem that prevents them."""
        if self._problem:
            no_samples = {"pid": os.getpid(), "role": "daemon", "started": 0, "problem": self._problem, "samples": [{}]}
            processes = [no_samples]
        return encode("SAMPLES", body=json.dumps({"processes": processes}))


class DaemonSampler:
    """Samples the workers of PySpark's daemon, between the waits of its loop."""

    def __init__(self, seconds: float, address_file: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._connection: _Connection | None = _Connection(address_file)
        self._sampler = Sampler("worker", clock)
        self._workers: dict[int, None] = {}
        self._due = clock() + min(FIRST_SAMPLE, seconds)
        self._round: Iterator[int] | None = None
        self._sampled: list[dict[str, Any]] = []

    def fork(self) -> int:
        """`os.fork` of the daemon's loop."""
        pid = os.fork()
        if pid:
            self._sampler.forget(pid)  # an earlier worker may have had the same pid
            self._workers[pid] = None
        else:
            self.close()
            operating_system.forget_psutil()
        return pid

    def poll(self) -> _Poll:
        """`select.poll` of the daemon's loop (from Spark 4.2)."""
        return _Poll(self)

    def select(self, reading: _Files, writing: _Files, exceptional: _Files, seconds: float) -> _Selected:
        """`select.select` of the daemon's loop (before Spark 4.2)."""
        files = reading, writing, exceptional
        ready = select.select(*files, self.wait_at_most(int(seconds * 1000)) / 1000)
        if not any(ready):
            self.run(lambda: any(select.select(*files, 0)))
        return ready

    def close(self) -> None:
        """Ends sampling, and closes the connection of this process."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def wait_at_most(self, milliseconds: int) -> int:
        """Returns how long the loop may wait, so that the next sample is taken in time."""
        if self._connection is None:
            return milliseconds
        return min(milliseconds, max(0, int((self._due - self._clock()) * 1000) + 1))

    def run(self, interrupted: Callable[[], bool]) -> None:
        """Samples the workers if a round is due. If `interrupted()` is true after a process, a later call continues."""
        if self._connection is None or self._clock() < self._due:
            return
        try:
            self._continue(interrupted)
        except OSError:  # the executor is gone, or has no channel
            self.close()
        except Exception:  # the daemon must not end
            _log.warning("the Python workers of this executor are no longer sampled", exc_info=True)
            self.close()

    def _continue(self, interrupted: Callable[[], bool]) -> None:
        assert self._connection is not None
        if self._round is None:
            if not self._connection.write_unsent():
                pause = _HANDSHAKE_PAUSE if self._connection.in_handshake else 1.0
                self._due = self._clock() + min(pause, self._seconds)
                return
            self._round, self._sampled = iter([] if self._sampler.problem else list(self._workers)), []
        for pid in self._round:
            sample = self._sampler.sample(pid)
            if sample is None:
                self._workers.pop(pid, None)
            else:
                self._sampled.append(sample)
            if interrupted():
                return
        self._round = None
        self._connection.send(self._sampler.frame(self._sampled))
        self._due = self._clock() + self._seconds


class _Poll:
    """A `select.poll` object whose waits leave time for samples."""

    def __init__(self, sampler: DaemonSampler) -> None:
        self._poll, self._sampler = select.poll(), sampler
        self.register, self.unregister = self._poll.register, self._poll.unregister

    def poll(self, milliseconds: int) -> list[tuple[int, int]]:
        ready = self._poll.poll(self._sampler.wait_at_most(milliseconds))
        if not ready:
            self._sampler.run(lambda: bool(self._poll.poll(0)))
        return ready


class _Connection:
    """The connection to the executor's channel. It never waits: bytes that cannot be written at once are kept."""

    def __init__(self, address_file: str) -> None:
        self._address_file = address_file
        self._socket: socket.socket | None = None
        self._handshake: Handshake | None = None
        self._decoder = Decoder(_MAX_FRAME)
        self._is_welcome = False
        self._unsent = b""

    def write_unsent(self) -> bool:
        """Writes the kept bytes. Returns whether none are left, and the executor's proof has arrived.

        The first call connects, and so does a call after the executor has dropped a connection before it accepted it,
        or had no room for another one. Raises `OSError` if the executor is gone, and `ChannelError` if the server is
        not the executor.
        """
        if self._socket is None:
            self._connect()
        if self._socket is None:
            return False
        if self._read():
            self._write()
        elif self._is_welcome:
            raise ConnectionResetError("the executor closed the channel")
        else:
            self.close()
        return self._socket is not None and self._handshake is None and not self._unsent

    @property
    def in_handshake(self) -> bool:
        """Whether the executor's proof has not arrived yet."""
        return self._socket is not None and self._handshake is not None

    def send(self, frame: bytes) -> None:
        """Writes a frame, and keeps the bytes that cannot be written yet."""
        self._unsent += frame
        self._write()

    def close(self) -> None:
        """Closes the socket."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _opened(self) -> socket.socket:
        assert self._socket is not None
        return self._socket

    def _connect(self) -> None:
        where = ChannelAddress.read(self._address_file, "sampler")
        self._socket = where.new_socket()
        self._socket.setblocking(False)
        error = self._socket.connect_ex(where.address)
        if error == errno.EAGAIN:  # the queue of the server's Unix socket is full
            self.close()
            return
        if error not in (0, errno.EINPROGRESS):
            raise OSError(error, os.strerror(error))
        if error == 0:
            where.check_peer(self._socket)
        self._handshake = Handshake(where.token, "sampler", "the executor")
        self._decoder = Decoder(_MAX_FRAME)
        self._unsent = self._handshake.connect()

    def _read(self) -> bool:
        """Handles the frames that have arrived. Returns False at the end of the stream."""
        try:
            while data := self._opened().recv(1 << 16):
                for frame in self._decoder.feed(data):
                    self._handle(frame)
        except BlockingIOError:
            return True
        except (ConnectionResetError, BrokenPipeError):
            pass
        return False

    def _handle(self, frame: Frame) -> None:
        if frame.kind == "WELCOME":
            self._is_welcome = True
        elif self._handshake is not None:
            self._unsent += self._handshake.hello(frame)
            self._handshake = None

    def _write(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                self._unsent = self._unsent[self._opened().send(self._unsent) :]


def install() -> None:
    """Makes PySpark's daemon sample its workers, if the executor requests it. Called in the daemon, before its loop."""
    import pyspark.daemon

    if (settings := configured()) is not None:
        sampler = DaemonSampler(*settings)
        loop: Any = pyspark.daemon
        loop.os = types.SimpleNamespace(**{**_names(loop.os), "fork": sampler.fork})
        waits = {"poll": sampler.poll, "select": sampler.select}
        loop.select = types.SimpleNamespace(**{**_names(select), **waits})


def _names(module: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if not name.startswith("__")}
