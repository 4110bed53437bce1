"""A listener for the configuration: `spark.stagecrew.listeners=audit:audit`. It writes a line per task into a file."""

import contextlib
import os
import time

import stagecrew


class Audit(stagecrew.Listener):
    name = "audit"

    def open(self, context):
        folder = context.configuration.get("spark.audit.folder", ".")
        self.file = open(f"{folder}/audit-{context.executor}-{os.getpid()}.log", "a")
        print("open", context.topology, file=self.file)

    def close(self, context):
        print("close", context.topology, file=self.file)
        self.file.close()

    @contextlib.contextmanager
    def decorate(self, task):
        started = time.monotonic()
        yield
        print(f"task {task.stage}/{task.partition}: {time.monotonic() - started:.3f} s", file=self.file)


audit = Audit()
