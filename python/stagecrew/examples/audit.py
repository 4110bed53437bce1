"""A listener that writes one line per task to a file. Enable it with `spark.stagecrew.listeners=audit:audit`."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

import stagecrew


class Audit(stagecrew.Listener):
    name = "audit"

    def open(self, context: stagecrew.ListenerContext) -> None:
        folder = context.configuration.get("spark.audit.folder", ".")
        self.file = open(f"{folder}/audit-{context.executor}-{os.getpid()}.log", "a")
        print("open", context.topology, file=self.file)

    def close(self, context: stagecrew.ListenerContext) -> None:
        print("close", context.topology, file=self.file)
        self.file.close()

    @contextlib.contextmanager
    def decorate(self, task: stagecrew.Task) -> Iterator[None]:
        started = time.monotonic()
        yield
        print(f"task {task.stage}/{task.partition}: {time.monotonic() - started:.3f} s", file=self.file)


audit = Audit()
