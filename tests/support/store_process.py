"""A process that opens a store and executes commands in its own session. Tests kill it, pause it, and race with it."""

from __future__ import annotations

import base64
import contextlib
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

__all__ = ["StoreProcess"]


class StoreProcess:
    """Starts such a process and calls its store.

    `process("transact", ...)` returns the result of the store's method, or raises an error with the class, arguments
    and attributes of the error that the method raised.
    """

    def __init__(self, url: str, **environment: str) -> None:
        self._start(url, environment)
        self.session = self.receive()

    @classmethod
    def start_without_waiting(cls, url: str):
        """Starts a process without waiting until its store is open. The first `receive` then returns its session."""
        process = cls.__new__(cls)
        process._start(url, {})
        return process

    def _start(self, url, environment):
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-W", "error", __file__, url],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment},
        )  # fmt: skip
        self.pid = self._process.pid

    def send(self, name, *arguments):
        """Sends a command without waiting for the response, which a later `receive` returns."""
        print(base64.b64encode(pickle.dumps((name, arguments))).decode(), file=self._process.stdin, flush=True)

    def receive(self):
        line = self._process.stdout.readline()
        assert line, f"the process has ended: {self._process.wait(10)}"
        error_class, result, attributes = pickle.loads(base64.b64decode(line))
        if error_class is None:
            return result
        error = error_class.__new__(error_class)
        error.args = result
        error.__dict__.update(attributes)
        raise error

    def __call__(self, name, *arguments):
        self.send(name, *arguments)
        return self.receive()

    def kill(self, with_signal=signal.SIGKILL):
        """Sends a signal to the process. After SIGKILL, waits until it has ended."""
        self._process.send_signal(with_signal)
        if with_signal == signal.SIGKILL:
            self._process.wait(20)
            for pipe in (self._process.stdin, self._process.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.kill()


def _count(store, key, other):
    """Counts forever. Writes each number to both entries in one transaction, then prints the number."""
    from stagecrew.recovery.stores.contract import Replace

    number = store.read(key).version
    while True:
        store.transact(Replace(key, b"%d" % (number + 1), number), Replace(other, b"%d" % (number + 1), number))
        number += 1
        print(number, flush=True)


def _limit_file_size(store, size):
    """Limits the size of the files that this process writes."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def main() -> None:
    from stagecrew.recovery.stores import open_store

    commands = {"count": _count, "limit_file_size": _limit_file_size}

    def execute(name, arguments):
        if name in commands:
            return commands[name](store, *arguments)
        attribute = getattr(store, name)
        return attribute(*arguments) if callable(attribute) else attribute

    def respond(work, *arguments):
        try:
            response = (None, work(*arguments), None)
        except Exception as error:
            response = (type(error), error.args, error.__dict__)
        print(base64.b64encode(pickle.dumps(response)).decode(), flush=True)

    store = open_store(sys.argv[1])
    respond(lambda: store.session)
    for line in sys.stdin:
        respond(execute, *pickle.loads(base64.b64decode(line)))


if __name__ == "__main__":
    root = Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(root / "python"), str(root / "tests")]
    main()
