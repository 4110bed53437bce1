"""A file in which processes record events, and listeners and task functions that write to this file."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from pyspark import cloudpickle

import stagecrew
from support.waiting import eventually

# Executors cannot import the tests, so the definitions of this module are pickled by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@dataclasses.dataclass
class Journal:
    """A file to which several processes append lines. Each line is written in one call, so lines never mix."""

    path: str

    def write(self, **fields: Any) -> None:
        line = json.dumps({"pid": os.getpid(), "time": time.time(), **fields}) + "\n"
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(fd, line.encode())
        finally:
            os.close(fd)

    def read(self, **matching: Any) -> list[dict[str, Any]]:
        if not os.path.exists(self.path):
            return []
        with open(self.path, encoding="utf-8") as file:
            lines = file.read().split("\n")
        # While a process writes a line, a reader may see the first part of it, and the last of `lines` is that part.
        events = [json.loads(line) for line in lines[:-1]]
        return [event for event in events if all(event.get(key) == value for key, value in matching.items())]


class Recorder(stagecrew.Listener):
    """Records each call. `fail` names hooks that raise. `hang` names a hook that never returns."""

    def __init__(
        self, journal: Journal, name: str = "recorder", fail: tuple[str, ...] = (), hang: str = "", **attributes: Any
    ):
        self.journal, self.name, self.fail, self.hang = journal, name, fail, hang
        for key, value in attributes.items():
            setattr(self, key, value)

    def _record(self, hook: str, **fields: Any) -> None:
        main = threading.current_thread() is threading.main_thread()
        self.journal.write(event=hook, listener=self.name, main=main, **fields)
        if hook in self.fail:
            raise ValueError(f"{hook} of {self.name} fails on purpose")
        if self.hang == hook:
            while True:
                time.sleep(0.05)
        if self.hang == f"{hook} in C":
            import ctypes

            libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(256)
            for _ in range(2):  # the second call never returns, so Python runs no signal handler any more
                libc.pthread_mutex_lock(mutex)

    def open(self, context: stagecrew.ListenerContext) -> None:
        self._record("open", topology=context.topology, executor=context.executor)

    def close(self, context: stagecrew.ListenerContext) -> None:
        self._record("close", topology=context.topology, executor=context.executor)

    @contextlib.contextmanager
    def decorate(self, task: stagecrew.Task) -> Iterator[None]:
        self._record("enter", topology=task.topology, attempt=task.attempt, stage=task.stage, partition=task.partition)
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._record(
                "leave", topology=task.topology, attempt=task.attempt, error=type(error).__name__ if error else None
            )


def recording_body(journal: Journal, name: str = "body", seconds: float = 0.0) -> Callable[[Any], Iterator[Any]]:
    """Returns a function for `mapPartitions` that records its beginning and its end, and passes its input on."""

    def run(rows: Any) -> Iterator[Any]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        journal.write(event="body", name=name, attempt=context.taskAttemptId(), partition=context.partitionId())
        yield from rows
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            time.sleep(0.01)
        journal.write(event="body end", name=name, attempt=context.taskAttemptId())

    return run


def rendezvous(path: str, name: str, count: int, until: str = "") -> Callable[[Any], Iterator[Any]]:
    """Returns a function for `mapPartitions` that waits until `count` tasks run it and the file `until` exists."""

    def run(rows: Any) -> Iterator[Any]:
        log = Journal(path)
        log.write(event="body", name=name)
        eventually(lambda: len(log.read(event="body", name=name)) >= count, 60, f"{count} tasks run {name}")
        if until:
            eventually(lambda: os.path.exists(until), 60, f"{until} exists, so that {name} can end")
        yield os.getpid()

    return run


@stagecrew.resource(scope=stagecrew.Scope.EXECUTOR, name="executor wide")
def executor_wide(context: stagecrew.ListenerContext, path: str) -> Iterator[int]:
    """A listener with executor scope that records its open and its close."""
    log = Journal(path)
    log.write(event="open", listener="executor wide", executor=context.executor)
    yield os.getpid()
    log.write(event="close", listener="executor wide", executor=context.executor)


@stagecrew.resource()
def secret_pool(context: stagecrew.ListenerContext, password: str) -> Iterator[int]:
    """A resource whose argument is a secret."""
    yield len(password)
