"""The processes of a benchmark: Spark drivers, and frameworks for comparison."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from typing import TypeVar

import psutil
import rich.console

from support.spark_home import spark_home

T = TypeVar("T")

HERE = pathlib.Path(__file__).resolve().parent
MASTER = "local-cluster[2,1,1024]"
#: The Python that has Ray and Dask, which `make bench` installs.
PEERS = HERE.parents[1] / "build" / "peers" / "bin" / "python"

console = rich.console.Console(stderr=True, highlight=False, soft_wrap=True)


class Process:
    """A process that executes commands (see `serving.py`). It stays alive between rounds.

    Use it as a context manager. It belongs to this checkout, or to another one that `make setup` has set up.
    """

    def __init__(self, *command: str, checkout: pathlib.Path = HERE.parents[1], **environment: str) -> None:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("SPARK_", "PYSPARK_"))}
        python = PEERS if command[0] == "peers.py" else checkout / ".venv" / "bin" / "python"
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the process)
        self._process = subprocess.Popen(
            [str(python), str(checkout / "tests" / "benchmarks" / command[0]), *command[1:]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**inherited, "SPARK_HOME": spark_home(), **environment},
            text=True,
        )
        self._response()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self("stop")
        else:  # its JVM ends when it loses this process's pipe
            self._process.kill()
        self._process.wait()
        self._errors.close()

    def __call__(self, do: str, **arguments: object):
        """Runs a round. Returns its result, with the CPU seconds of the driver and all of its processes."""
        before = self._cpu()
        print(json.dumps({"do": do, **arguments}), file=self._process.stdin, flush=True)
        outcome = self._response()
        return outcome if do == "stop" else outcome | {"cpu": self._cpu() - before}

    def _response(self):
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._errors.seek(0)
            text = self._errors.read().decode(errors="replace")[-8000:]
            raise SystemExit(f"a process of the benchmark ended unexpectedly:\n{text}")
        return json.loads(line)

    def _cpu(self) -> float:
        total = 0.0
        root = psutil.Process(self._process.pid)
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total


def driver(mode: str = "on", master: str = MASTER, **environment: str) -> Process:
    """A Spark driver. `driver.py` describes the modes."""
    return Process("driver.py", mode, master, **environment)


class Run:
    """One run of a figure. Counts its rounds, and records the load of the machine in each."""

    def __init__(self, name: str, rounds: int | None) -> None:
        self.name = name
        self._rounds = rounds
        self.load: list[float] = []
        #: See `Figure.series`.
        self.series: dict[str, dict[str, list[float]]] = {}

    def rounds(self, count: int = 5) -> Iterator[int]:
        """The numbers of the rounds. The command line can set another count."""
        count = self._rounds or count
        for round_ in range(count):
            console.print(f"{self.name}: round {round_ + 1} of {count}")
            yield round_
            self.load.append(round(os.getloadavg()[0], 2))


def in_turn(sides: Iterable[T], round_: int) -> list[T]:
    """The sides in an order that changes with each round, so that none is always the first."""
    found = list(sides)
    first = round_ % len(found)
    return found[first:] + found[:first]
