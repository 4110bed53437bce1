"""Jobs for the tests with real drivers. They record their progress in files, and wait for files that tests create."""

import textwrap

from stagecrew.recovery.jobs.spec import JobSpec
from support.driver_processes import QUICK_CONF

__all__ = ["job_spec", "recorded_lines"]

MODULE = textwrap.dedent(
    '''
    import itertools, os, pathlib, time
    import stagecrew

    def record(folder, name):
        with open(f"{folder}/{name}", "a") as file:
            file.write(f"{stagecrew.current_job().attempt}\\n")

    def wait_for(folder, name):
        due = time.monotonic() + 120
        while not os.path.exists(f"{folder}/{name}"):
            assert time.monotonic() < due, name
            time.sleep(0.02)

    def steps(folder, count):
        """Runs `count` steps. Each records its run. Step N waits for the file go-N if the file hold-N exists."""
        job = stagecrew.current_job()
        def body(number):
            record(folder, f"step-{number}")
            if os.path.exists(f"{folder}/hold-{number}"):
                wait_for(folder, f"go-{number}")
            return number * 10
        return sum(job.step(f"step-{number}", lambda: body(number)) for number in range(int(count)))

    def committing(folder):
        """Commits rows with Spark. Waits in a task if the file hold-task exists, and at the end if hold-end exists."""
        from pyspark.sql import SparkSession
        from stagecrew.operators.sinks import ParquetSink
        job = stagecrew.current_job()
        spark = stagecrew.configure(SparkSession.builder).getOrCreate()
        def write():
            with stagecrew.crew(spark).topology("load") as topology:
                record(folder, "writes")
                rows = spark.range(100)
                if job.attempt == 1 and os.path.exists(f"{folder}/hold-task"):
                    def slow(batches):
                        wait_for(folder, "go-task")
                        yield from batches
                    rows = rows.mapInArrow(slow, "id long")
                return topology.commit(rows, ParquetSink(f"{folder}/table")).rows
        written = job.step("write", write)
        record(folder, "written")
        if os.path.exists(f"{folder}/hold-end"):
            wait_for(folder, "go-end")
        return written

    def ending(folder):
        """Runs no step, and waits for the file go-ending."""
        record(folder, "ending")
        wait_for(folder, "go-ending")
        return 7

    def shown(folder):
        """Runs two steps. The second writes the URL of the Spark UI to the file ui, and waits for the file go."""
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
        """Commits rows in a step without Spark. Records when it stages them and when they are committed."""
        import pyarrow as pa
        from stagecrew.operators.commits import commit
        from stagecrew.operators.sinks import ParquetSink
        job = stagecrew.current_job()
        rows = pa.table({"id": list(range(100))})
        sink = ParquetSink(f"{folder}/table")
        def stage(staging):
            record(folder, "stages")
            if os.path.exists(f"{folder}/hold-stage"):
                wait_for(folder, "go-stage")
            return [sink.stage(staging, 0, job.attempt, iter(rows.to_batches()))]
        def write():
            report = commit(sink, job.commit_log(sink), job.commit_id("table"), rows.schema, stage)
            record(folder, "written")
            return report.rows
        return job.step("write", write)

    class Counter(stagecrew.Coordinator):
        """Hands out consecutive numbers."""
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
        """Runs three actions whose tasks request numbers from one coordinator. The second uses a second dataset too."""
        from pyspark.sql import SparkSession
        job = stagecrew.current_job()
        spark = stagecrew.configure(SparkSession.builder).getOrCreate()
        found = []
        with stagecrew.crew(spark).topology("numbers") as topology:
            counter = topology.coordinate("counter", Counter)
            numbers = counter.map(spark.range(0, 10, 1, 1), ask, "n long")
            def action(number):
                record(folder, f"action-{number}")
                rows = sorted(row.n for row in numbers.collect())
                if number == 1:
                    rows += sorted(row.n for row in counter.map(spark.range(0, 3, 1, 1), ask, "n long").collect())
                if os.path.exists(f"{folder}/hold-{number}"):
                    wait_for(folder, f"go-{number}")
                return rows
            for number in range(3):
                found.append(job.step(f"action-{number}", lambda: action(number)))
                record(folder, f"after-{number}")
                if os.path.exists(f"{folder}/hold-after-{number}"):
                    wait_for(folder, f"go-after-{number}")
        return found

    def splitting(folder):
        """Reads one dataset of splits in two steps: one row, then all. Later runs enumerate the splits in reverse."""
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
            yield pa.record_batch({"n": pa.array([number] * 20_000, pa.int64())})  # more than fits into the send buffer
        with stagecrew.crew(spark).topology("numbers") as topology:
            splits = topology.splits(numbers, read, "n long", parallelism=1)
            def read_first():
                record(folder, "first")
                return splits.first().n
            def read_all():
                record(folder, "second")
                return [(n, len(list(rows))) for n, rows in itertools.groupby(splits.toArrow()["n"].to_pylist())]
            return job.step("first", read_first), job.step("second", read_all)

    def streaming(folder):
        """Runs a streaming query whose tasks request numbers from one coordinator. Each input file is a batch."""
        from pyspark.sql import SparkSession
        job = stagecrew.current_job()
        spark = stagecrew.configure(SparkSession.builder).getOrCreate()
        found = {}
        with stagecrew.crew(spark).topology("numbers") as topology:
            counter = topology.coordinate("counter", Counter)
            lines = spark.readStream.option("maxFilesPerTrigger", 1).text(f"{folder}/input")
            def load(rows, batch_id):
                def body():
                    record(folder, f"batch-{batch_id}")
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
        record(folder, "failed")
        raise ValueError("no such day")

    def dies(folder):
        record(folder, "died")
        os._exit(9)

    def unpicklable(folder):
        return (one for one in ())
    '''
)


def job_spec(function, drivers, conf=(), max_attempts=10, **arguments):
    """Returns the spec of a job that calls a function of `MODULE`. Only the stored job contains the module."""
    path = drivers.folder / "ha_jobs.py"
    path.write_text(MODULE)
    spec = JobSpec.of_function(
        f"ha_jobs:{function}",
        {"folder": str(drivers.folder / "out"), **arguments},
        QUICK_CONF | dict(conf),
        [path],
        max_attempts,
    )
    path.unlink()
    return spec


def recorded_lines(drivers, name):
    path = drivers.folder / "out" / name
    return path.read_text().split() if path.exists() else []
