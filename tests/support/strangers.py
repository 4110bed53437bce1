"""Runs a process of another user, which attacks the ports, sockets and files of a Spark application.

The attacks go only to ports of the application's own process tree, on 127.0.0.1. They are bounded in number and in
time, and end with the test.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
from typing import Any, Final

import psutil

from support.processes import terminate

__all__ = ["BECOME_NOBODY", "NOBODY", "HostileUser", "as_nobody", "files_of"]

#: The user id and the group id of `nobody`.
NOBODY: Final = 65534

#: The first lines of a script. From then on, the process runs as the user `nobody`. The script must not import other
#: modules afterwards, because this user may be unable to read the interpreter's folder.
BECOME_NOBODY: Final = f"""
import encodings.idna, errno, json, os, random, select, selectors, socket, sys, time
os.setgroups([])
os.setresgid({NOBODY}, {NOBODY}, {NOBODY})
os.setresuid({NOBODY}, {NOBODY}, {NOBODY})
"""

#: Reads lines from the standard input: `port NUMBER`, `socket PATH` or `file PATH` attacks a target, and `stop` ends the
#: attack.
ATTACK: Final = """
limit, seconds = int(sys.argv[1]), float(sys.argv[2])
random.seed(20261125)
ports, counts, received, opened = [], {}, {}, []
deadline = time.monotonic() + seconds
held = []  # open connections: the time when each is closed, its port, and the connection
lines = b""
os.set_blocking(0, False)

def handle(line):
    kind, target = line.split(" ", 1)
    if kind == "port":
        ports.append(int(target))
        return
    try:
        if kind == "file":
            opened.append(target if os.path.isdir(target) and os.listdir(target) is not None else open(target, "rb").name)
        else:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(target)
                opened.append(target)
    except OSError as error:
        name = errno.errorcode[error.errno]
        counts[name] = counts.get(name, 0) + 1

ended = False
sent = 0
while time.monotonic() < deadline and not ended:
    try:
        chunk = os.read(0, 65536)
        ended = ended or not chunk
        lines += chunk
    except BlockingIOError:
        pass
    *whole, lines = lines.split(b"\\n")
    for line in whole:
        if line == b"stop":
            deadline = 0
        else:
            handle(line.decode())
    now = time.monotonic()
    while held and (held[0][0] < now or len(held) > 300):
        _, port, connection = held.pop(0)
        try:
            received[port] = max(received.get(port, 0), len(connection.recv(1 << 16)))
        except OSError:
            pass
        connection.close()
    if not ports or sent >= limit:
        if sent == limit:
            print("attacked", flush=True)
            sent += 1
        time.sleep(0.01)
        continue
    port = random.choice(ports)
    connection = socket.socket()
    connection.setblocking(False)
    sent += 1
    try:
        connection.connect_ex(("127.0.0.1", port))
        select.select([], [connection], [], 0.05)
        attack = random.choice(["silence", "half", "garbage", "gone"])
        counts[attack] = counts.get(attack, 0) + 1
        if attack == "half":
            connection.send((37).to_bytes(4, "big") + b"\\x12")
        elif attack == "garbage":
            connection.send(random.randbytes(random.randrange(1, 500)))
        if attack == "gone":
            connection.close()
        else:
            held.append((now + 1.0, port, connection))
    except OSError:
        connection.close()
for _, _, connection in held:
    connection.close()
print(json.dumps({"sent": min(sent, limit), "counts": counts, "received": received, "opened": opened, "ports": len(ports)}))
"""


def as_nobody(script: str, *arguments: str) -> list[str]:
    """The command line of a Python process that runs as the user `nobody`."""
    return [sys.executable, "-c", BECOME_NOBODY + script, *arguments]


def files_of(process: psutil.Process) -> list[str]:
    """The files of a process that could reveal its secrets. Other users must not be able to read them."""
    return [f"/proc/{process.pid}/{name}" for name in ("environ", "mem", "maps", "fd")]


class HostileUser:
    """Attacks all processes of a tree, including those that start later. Use it as a context manager.

    Of the processes' files, it attacks only those of JVMs.
    """

    def __init__(self, pid: int, connections: int, seconds: float) -> None:
        self._pid = pid
        self._process: subprocess.Popen[str] = subprocess.Popen(
            as_nobody(ATTACK, str(connections), str(seconds)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._stops = threading.Event()
        self._known: set[str] = set()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        #: Set when the attacker has tried to open all connections.
        self.attacked = threading.Event()
        #: The numbers of attacks, and everything that the attacker opened or received. Set at the end.
        self.outcome: dict[str, Any] = {}

    def __enter__(self) -> HostileUser:
        self._watcher.start()
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stops.set()
        self._watcher.join()
        with contextlib.suppress(BrokenPipeError):
            self._send("stop")
            self._process.stdin.close()
        self._reader.join(30)
        terminate(self._process)
        self._process.stdout.close()

    def _read(self) -> None:
        for line in self._process.stdout:
            if line == "attacked\n":
                self.attacked.set()
            else:
                self.outcome = json.loads(line)

    def attack_file(self, path: str) -> None:
        """Makes the attacker try to open this file or folder."""
        self._send(f"file {path}")

    def _watch(self) -> None:
        while not self._stops.wait(0.05):
            with contextlib.suppress(psutil.Error, BrokenPipeError):
                tree = psutil.Process(self._pid)
                self._add_targets([tree, *tree.children(recursive=True)])

    def _add_targets(self, processes: list[psutil.Process]) -> None:
        targets = set()
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.name() == "java":
                    targets.update(f"file {path}" for path in files_of(process))
        pids = {process.pid for process in processes}
        # One call for all processes: each call reads the list of all connections of the host.
        for connection in psutil.net_connections("all"):
            if connection.pid not in pids or not connection.laddr:
                continue
            if connection.family == socket.AF_UNIX:
                targets.add(f"socket {connection.laddr}")
            elif connection.status == psutil.CONN_LISTEN:
                targets.add(f"port {connection.laddr.port}")
        for target in sorted(targets - self._known):
            self._known.add(target)
            self._send(target)

    def targets_of(self, *kinds: str) -> set[str]:
        """The targets of these kinds, "file", "socket" or "port", that were found so far."""
        return {target for target in self._known if target.split(" ")[0] in kinds}

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
