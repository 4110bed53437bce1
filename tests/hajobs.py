"""Jobs for the tests with real drivers: what they do is marked in a folder, and they wait there to be let go."""

import textwrap

from haprocesses import QUICK
from stagecrew.recovery.jobs.spec import JobSpec

__all__ = ["job_of", "lines"]

MODULE = textwrap.dedent(
    '''
    import itertools, os, pathlib, time
    import stagecrew

    def mark(folder, name):
        with open(f"{folder}/{name}", "a") as file:
            file.write(f"{stagecrew.current_job().attempt}\\n")

    def wait_for(folder, name):
        due = time.monotonic() + 120
        while not os.path.exists(f"{folder}/{name}"):
            assert time.monotonic() < due, name
            time.sleep(0.02)

    def steps(folder, count):
        """Each step marks that it runs, and the last waits to be let go."""
        job = stagecrew.current_job()
        def body(number):
            mark(folder, f"step-{number}")
            if os.path.exists(f"{folder}/hold-{number}"):
                wait_for(folder, f"go-{number}")
            return number * 10
        return sum(job.step(f"step-{number}", lambda: body(number)) for number in range(int(count)))

    def committing(folder):
        """Writes rows in a commit, in a job of Spark; waits before and behind it to be let go."""
        from pyspark.sql import SparkSession
        from stagecrew.operators.sinks import ParquetSink
        job = stagecrew.current_job()
        spark = stagecrew.configure(SparkSession.builder).getOrCreate()
        def write():
            with stagecrew.crew(spark).topology("load") as topology:
                mark(folder, "writes")
                rows = spark.range(100)
                if job.attempt == 1 and os.path.exists(f"{folder}/hold-task"):
                    def slow(batches):
                        wait_for(folder, "go-task")
                        yield from batches
                    rows = rows.mapInArrow(slow, "id long")
                return topology.commit(rows, ParquetSink(f"{folder}/table")).rows
        written = job.step("write", write)
        mark(folder, "written")
        if os.path.exists(f"{folder}/hold-end"):
            wait_for(folder, "go-end")
        return written

    def ending(folder):
        """Has no step, and waits to be let go."""
        mark(folder, "ending")
        wait_for(folder, "go-ending")
        return 7

    def shown(folder):
        """Two steps, of which the second waits to be let go; where its UI is stands in a file."""
        from pyspark.sql import SparkSession
        job = stagecrew.current_job()
        loaded = job.step("load", lambda: 3)
        spark = stagecrew.configure(SparkSession.builder).getOrCreate()
        def sums():
            with open(f"{folder}/ui", "a") as file:
                file.write(spark.sparkContext.uiWebUrl + "\\n")
            wait_for(folder, "go")
            return loaded + spark.range(10).count()
        return job.step("sum", sums)

    def storing(folder):
        """Commits rows in a step, without Spark; what is done is marked."""
        import pyarrow as pa
        from stagecrew.operators.commits import commit
        from stagecrew.operators.sinks import ParquetSink
        job = stagecrew.current_job()
        rows = pa.table({"id": list(range(100))})
        sink = ParquetSink(f"{folder}/table")
        def stage(staging):
            mark(folder, "stages")
            if os.path.exists(f"{folder}/hold-stage"):
                wait_for(folder, "go-stage")
            return [sink.stage(staging, 0, job.attempt, iter(rows.to_batches()))]
        def write():
            report = commit(sink, job.decisions(sink), job.commit_id("table"), rows.schema, stage)
            mark(folder, "written")
            return report.rows
        return job.step("write", write)

    class Counter(stagecrew.Coordinator):
        """Hands out numbers, one after the other."""
        def __init__(self, context):
            super().__init__(context)
            self.count = 0
        def handle_request(self, evaluation, request):
            self.count += 1
            return self.count
        def checkpoint(self, checkpoint_id):
            return str(self.count).encode()
        def reset_to_checkpoint(self, checkpoint_id, state):
            self.count = int(state or b"0")

    def ask(gateway, batches):
        import pyarrow as pa
        for batch in batches:
            yield pa.record_batch({"n": pa.array([gateway.request("one") for _ in range(batch.num_rows)], pa.int64())})

    def counting(folder):
        """Three actions, each of which gets ten numbers of one coordinator, and one that was bound in the second step."""
        from pyspark.sql import SparkSession
        job = stagecrew.current_job()
        spark = stagecrew.configure(SparkSession.builder).getOrCreate()
        found = []
        with stagecrew.crew(spark).topology("numbers") as topology:
            counter = topology.coordinate("counter", Counter)
            numbers = counter.map(spark.range(0, 10, 1, 1), ask, "n long")
            def action(number):
                mark(folder, f"action-{number}")
                rows = sorted(row.n for row in numbers.collect())
                if number == 1:
                    rows += sorted(row.n for row in counter.map(spark.range(0, 3, 1, 1), ask, "n long").collect())
                if os.path.exists(f"{folder}/hold-{number}"):
                    wait_for(folder, f"go-{number}")
                return rows
            for number in range(3):
                found.append(job.step(f"action-{number}", lambda: action(number)))
                mark(folder, f"behind-{number}")
                if os.path.exists(f"{folder}/hold-behind-{number}"):
                    wait_for(folder, f"go-behind-{number}")
        return found

    def splitting(folder):
        """Two steps that read one dataset of splits: the first a part of it. A later run enumerates the splits in another order."""
        from pyspark.sql import SparkSession
        job = stagecrew.current_job()
        spark = stagecrew.configure(SparkSession.builder).getOrCreate()
        numbers = list(range(20))
        if job.attempt > 1:
            numbers.reverse()
        first_run = job.attempt == 1
        def read(number):
            import pyarrow as pa
            if first_run and number >= 5:
                wait_for(folder, "second")
            if first_run and number >= 10:
                wait_for(folder, "go")
            yield pa.record_batch({"n": pa.array([number] * 20_000, pa.int64())})  # more than waits to be sent
        with stagecrew.crew(spark).topology("numbers") as topology:
            splits = topology.splits(numbers, read, "n long", parallelism=1)
            def part():
                mark(folder, "first")
                return splits.first().n
            def whole():
                mark(folder, "second")
                return [(n, len(list(rows))) for n, rows in itertools.groupby(splits.toArrow()["n"].to_pylist())]
            return job.step("first", part), job.step("second", whole)

    def streaming(folder):
        """A query of three batches, whose tasks get their numbers of one coordinator."""
        from pyspark.sql import SparkSession
        job = stagecrew.current_job()
        spark = stagecrew.configure(SparkSession.builder).getOrCreate()
        found = {}
        with stagecrew.crew(spark).topology("numbers") as topology:
            counter = topology.coordinate("counter", Counter)
            lines = spark.readStream.option("maxFilesPerTrigger", 1).text(f"{folder}/input")
            def load(rows, batch_id):
                def body():
                    mark(folder, f"batch-{batch_id}")
                    numbers = sorted(row.n for row in rows.collect())
                    if os.path.exists(f"{folder}/hold-{batch_id}"):
                        wait_for(folder, f"go-{batch_id}")
                    return numbers
                found[batch_id] = job.batch("load", batch_id, body)
            query = (
                counter.map(lines.coalesce(1), ask, "n long").writeStream.trigger(availableNow=True)
                .option("checkpointLocation", f"{folder}/checkpoint").foreachBatch(topology.wrap(load)).start()
            )
            query.awaitTermination()
        return found

    def fails(folder):
        mark(folder, "failed")
        raise ValueError("no such day")

    def dies(folder):
        mark(folder, "died")
        os._exit(9)

    def unpicklable(folder):
        return (one for one in ())
    '''
)


def job_of(function, drivers, conf=(), max_attempts=10, **arguments):
    """A job of this file's module, which lies nowhere but in the job."""
    path = drivers.folder / "ha_jobs.py"
    path.write_text(MODULE)
    spec = JobSpec.of_function(
        f"ha_jobs:{function}",
        {"folder": str(drivers.folder / "out"), **arguments},
        QUICK | dict(conf),
        [path],
        max_attempts,
    )
    path.unlink()
    return spec


def lines(drivers, name):
    path = drivers.folder / "out" / name
    return path.read_text().split() if path.exists() else []
