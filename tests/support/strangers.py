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
import time
from typing import Any, Final

import psutil

from support.processes import terminate

__all__ = ["BECOME_NOBODY", "NOBODY", "HostileUser", "as_nobody", "files_of"]

#: The user id and the group id of `nobody`.
NOBODY: Final = 65534

#: The number of connections that the attacker holds on each port: more than a server accepts from strangers.
HELD: Final = 300

#: The ports of JVMs get this number of connections per second, and those of Python processes fewer: Spark's Python daemon
#: forks a process for each of its connections.
JVM_RATE: Final = 100
PYTHON_RATE: Final = 10

#: The first lines of a script. From then on, the process runs as the user `nobody`, and may open 10,000 files. The script
#: must not import other modules afterwards, because this user may be unable to read the interpreter's folder.
BECOME_NOBODY: Final = f"""
import encodings.idna, errno, json, os, random, resource, select, selectors, socket, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, (10000, 10000))
os.setgroups([])
os.setresgid({NOBODY}, {NOBODY}, {NOBODY})
os.setresuid({NOBODY}, {NOBODY}, {NOBODY})
"""

#: Reads lines from the standard input: `port NUMBER CONNECTIONS RATE`, `socket PATH` or `file PATH` attacks a target, and
#: `stop` ends the attack. Each port gets its connections at its own rate, per second. Silent connections and half frames
#: are held, at most `HELD` for each port, the oldest are closed first.
ATTACK: Final = """
seconds = float(sys.argv[1])
random.seed(20261125)
ports, counts, hits, received, opened, held = {}, {}, {}, {}, [], {}
deadline = time.monotonic() + seconds
lines = b""
os.set_blocking(0, False)

def handle(line):
    kind, target = line.split(" ", 1)
    if kind == "port":
        number, connections, rate = map(int, target.split(" "))
        ports[number] = [connections, time.monotonic(), 1 / rate]
        hits[number], received[number], held[number] = 0, 0, []
        return
    try:
        if kind == "file":
            # The files of a process that has ended can be opened, and are empty.
            if os.listdir(target) if os.path.isdir(target) else open(target, "rb").read(1):
                opened.append(target)
            else:
                counts["empty"] = counts.get("empty", 0) + 1
        else:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(target)
                opened.append(target)
    except OSError as error:
        name = errno.errorcode[error.errno]
        counts[name] = counts.get(name, 0) + 1

def attack(port):
    connection = socket.socket()
    connection.setblocking(False)
    try:
        connection.connect_ex(("127.0.0.1", port))
        poll = select.poll()
        poll.register(connection, select.POLLOUT)
        poll.poll(50)  # milliseconds
        connection.getpeername()
        hits[port] += 1
        kind = random.choice(["silence", "half", "garbage", "gone"])
        counts[kind] = counts.get(kind, 0) + 1
        if kind == "half":
            connection.send((37).to_bytes(4, "big") + b"\\x12")
        elif kind == "garbage":
            connection.send(random.randbytes(random.randrange(1, 500)))
    except OSError:
        kind = "gone"
    if kind == "gone":
        connection.close()
        return
    held[port].append(connection)
    if len(held[port]) > HELD:
        release(port)

def release(port):
    connection = held[port].pop(0)
    try:
        received[port] = max(received[port], len(connection.recv(1 << 16)))
    except OSError:
        pass
    connection.close()

ended = False
while time.monotonic() < deadline and not ended:
    try:
        chunk = os.read(0, 65536)
        ended = not chunk
        lines += chunk
    except BlockingIOError:
        pass
    *whole, lines = lines.split(b"\\n")
    for line in whole:
        if line == b"stop":
            ended = True
        else:
            handle(line.decode())
    port = min((port for port in ports if ports[port][0] > 0), key=lambda port: ports[port][1], default=None)
    if port is None or ports[port][1] > time.monotonic():
        time.sleep(0.002)
        continue
    ports[port][0] -= 1
    ports[port][1] += ports[port][2]
    attack(port)
    if ports[port][0] == 0:
        print("attacked", port, flush=True)
for port in held:
    while held[port]:
        release(port)
print(json.dumps({"counts": counts, "hits": hits, "received": received, "opened": opened}))
"""


def as_nobody(script: str, *arguments: str) -> list[str]:
    """The command line of a Python process that runs as the user `nobody`."""
    return [sys.executable, "-c", BECOME_NOBODY + script, *arguments]


def files_of(process: psutil.Process) -> list[str]:
    """The files of a process that could reveal its secrets. Other users must not be able to read them."""
    return [f"/proc/{process.pid}/{name}" for name in ("environ", "mem", "maps", "fd")]


class HostileUser:
    """Attacks all processes of a tree, including those that start later. Use it as a context manager.

    Two kinds of ports are not attacked, because such an attack stops the jobs of plain Spark too. A port that is open for
    less than a second may be for one result that Spark sends to Python: the first connection to it must be the
    right one. A port of the root is Spark's server of accumulators: it serves one connection after the other.

    Args:
        pid: The root of the tree.
        connections: The number of connections to each port of a JVM. Ports of Python processes get a tenth, at a tenth
            of the rate.
        seconds: When the attack ends at the latest.
        attacks_python: Whether ports of Python processes are attacked.
    """

    def __init__(self, pid: int, connections: int, seconds: float, attacks_python: bool = True) -> None:
        self._pid, self._connections, self._attacks_python = pid, connections, attacks_python
        script = ATTACK.replace("HELD", str(HELD))
        self._process: subprocess.Popen[str] = subprocess.Popen(
            as_nobody(script, str(seconds)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._stops = threading.Event()
        self._known: set[str] = set()
        self._ports_since: dict[int, float] = {}
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        #: The ports to which the attacker has tried to open all connections.
        self.attacked: set[int] = set()
        #: The numbers of attacks, the accepted connections of each port (`hits`), and everything that the attacker opened
        #: or received. Set at the end.
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
            if line.startswith("attacked "):
                self.attacked.add(int(line.split()[1]))
            else:
                self.outcome = json.loads(line)
                for name in ("hits", "received"):
                    self.outcome[name] = {int(port): number for port, number in self.outcome[name].items()}

    def attack_file(self, path: str) -> None:
        """Makes the attacker try to open this file or folder."""
        self._send(f"file {path}")

    def _watch(self) -> None:
        while not self._stops.wait(0.5):
            with contextlib.suppress(psutil.Error, BrokenPipeError):
                tree = psutil.Process(self._pid)
                self._add_targets([tree, *tree.children(recursive=True)])

    def _add_targets(self, processes: list[psutil.Process]) -> None:
        targets: dict[str, str] = {}  # the command of each target
        names = {}
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                names[process.pid] = process.name()
                targets |= {f"file {path}": f"file {path}" for path in files_of(process)}
        ports = {}
        # One call for all processes: each call reads the list of all connections of the host.
        for connection in psutil.net_connections("all"):
            if connection.pid not in names or not connection.laddr:
                continue
            if connection.family == socket.AF_UNIX:
                targets[f"socket {connection.laddr}"] = f"socket {connection.laddr}"
            elif connection.status == psutil.CONN_LISTEN and connection.pid != self._pid:
                ports[connection.laddr.port] = names[connection.pid]
        now = time.monotonic()
        self._ports_since = {port: self._ports_since.get(port, now) for port in ports}
        for port, name in ports.items():
            if name == "java":
                attack = f"{self._connections} {JVM_RATE}"
            elif self._attacks_python:
                attack = f"{self._connections // 10} {PYTHON_RATE}"
            else:
                continue
            if now - self._ports_since[port] > 1:
                targets[f"port {port}"] = f"port {port} {attack}"
        for target in sorted(targets.keys() - self._known):
            self._known.add(target)
            self._send(targets[target])

    def targets_of(self, *kinds: str) -> set[str]:
        """The targets of these kinds, "file", "socket" or "port", that were found so far."""
        return {target for target in self._known if target.split(" ")[0] in kinds}

    def ports(self) -> set[int]:
        """The ports that were found so far."""
        return {int(target.split(" ")[1]) for target in self.targets_of("port")}

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
