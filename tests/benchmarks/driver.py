"""One driver of the benchmark: `driver.py on|off MASTER`. Obeys JSON lines on its standard input, answers each with one.

It stays alive between rounds, so that `run.py` can take turns between one with the plugin and one without.
"""

import contextlib
import json
import os
import sys
import tempfile
import time

from pyspark.sql import SparkSession

import stagecrew


class NoOp(stagecrew.Listener):
    """Has all three hooks, and they do nothing."""

    def open(self, context):
        """See `Listener`."""

    def close(self, context):
        """See `Listener`."""

    @contextlib.contextmanager
    def decorate(self, task):
        """See `Listener`."""
        yield


class Stamps(stagecrew.Listener):
    """Writes down when it opens and when it has closed."""

    def __init__(self, path):
        self.path = path

    def _stamp(self, what):
        # One write to a file opened for appending: lines of several workers do not mix.
        with open(self.path, "ab", buffering=0) as file:
            file.write(f"{what} {time.time()!r}\n".encode())

    def open(self, context):
        """See `Listener`."""
        self._stamp("open")

    def close(self, context):
        """See `Listener`."""
        self._stamp("close")


def nothing(rows):
    """The body of a short task."""


class Driver:
    """A Spark session, and the rounds that it can run."""

    def __init__(self, plugin: bool, master: str) -> None:
        builder = SparkSession.builder.master(master).appName("stagecrew-bench")
        settings = {
            "spark.ui.port": "0",
            "spark.ui.showConsoleProgress": "false",
            # What Spark keeps for its pages grows with each round: kept small, on both sides.
            "spark.ui.retainedTasks": "4000",
            "spark.ui.retainedStages": "10",
            "spark.ui.retainedJobs": "10",
            "spark.pyspark.python": sys.executable,
            "spark.log.level": "WARN",
        }
        for key, value in settings.items():
            builder = builder.config(key, value)
        if plugin:
            stagecrew.configure(builder)
        self.spark = builder.getOrCreate()
        self.sc = self.spark.sparkContext
        self.crew = stagecrew.crew(self.spark) if plugin else None

    def jvm(self, tasks):
        """Seconds for this many tasks in which no Python runs, and no listener is registered."""
        started = time.perf_counter()
        counted = self.sc._jsc.sc().range(0, tasks, 1, tasks).count()
        seconds = time.perf_counter() - started
        assert counted == tasks
        return {"seconds": seconds}

    def python(self, tasks):
        """Seconds for this many Python tasks; with the plugin, in a topology with a listener, already open."""
        topology = contextlib.nullcontext()
        if self.crew is not None:
            topology = self.crew.topology("bench", listeners=[NoOp()])
        with topology:
            # Workers are up, and listeners open, before the clock starts: opens are no part of a task's price.
            self.sc.parallelize(range(32), 32).foreachPartition(nothing)
            rows = self.sc.parallelize(range(tasks), tasks)
            started = time.perf_counter()
            rows.foreachPartition(nothing)
            return {"seconds": time.perf_counter() - started}

    def exits(self, count):
        """Milliseconds from the begin of an exit to the end of the last close, and to its return; one pair per exit."""
        assert self.crew is not None
        last, returned, closes = [], [], []
        with tempfile.TemporaryDirectory() as folder:
            for number in range(count):
                path = os.path.join(folder, f"{number}")
                with self.crew.topology(f"exit-{number}", listeners=[Stamps(path)]):
                    self.sc.parallelize(range(4), 4).foreachPartition(nothing)
                    begin = time.time()
                end = time.time()
                with open(path, encoding="ascii") as file:
                    stamps = [line.split() for line in file]
                closed = [float(at) for what, at in stamps if what == "close"]
                assert len(closed) * 2 == len(stamps), f"an exit returned before all was closed: {stamps}"
                last.append((max(closed) - begin) * 1000)
                returned.append((end - begin) * 1000)
                closes.append(len(closed))
        return {"last_close_ms": last, "returned_ms": returned, "closes": closes}

    def stop(self):
        """Ends Spark."""
        self.spark.stop()
        return {}


def main():
    """Serves until told to stop."""
    # Whatever else writes to the standard output must not get between our lines.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    plugin, master = sys.argv[1] == "on", sys.argv[2]
    driver = Driver(plugin, master)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        do = request.pop("do")
        print(json.dumps(getattr(driver, do)(**request)), file=answers, flush=True)
        if do == "stop":
            return


if __name__ == "__main__":
    main()
