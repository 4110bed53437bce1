"""The job `nightly:run` enriches real flights. `screenshots.py` takes the pictures of the tab while it runs.

It works in a folder, and waits for files to appear there: after its first step, and while it makes its report.
"""

import os
import sqlite3
import sys
import time

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark import cloudpickle
from pyspark.sql import SparkSession, functions

import stagecrew
from stagecrew.demo.flights import frame
from stagecrew.operators.enumerators import ParquetRowGroups
from stagecrew.operators.sinks import ParquetSink

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # executors do not have this module

PACE = 0.7  # the seconds that slow batches take


def wait_for(path):
    """Waits until a file exists."""
    deadline = time.monotonic() + 300
    while not os.path.exists(path):
        assert time.monotonic() < deadline, path
        time.sleep(0.05)


class Planes(stagecrew.Listener):
    """Opens a database connection in each Python worker."""

    name = "planes"

    def __init__(self, database):
        self.database = database

    def open(self, context):
        """Connects."""
        time.sleep(0.3)  # like a server's handshake
        self.connection = sqlite3.connect(self.database, check_same_thread=False)
        self.connection.execute("SELECT count(*) FROM planes").fetchone()

    def close(self, context):
        """Disconnects."""
        self.connection.close()
        time.sleep(0.1)


class Audit(stagecrew.Listener):
    """Reports each worker to a service that cannot be reached."""

    name = "audit"
    required = False

    def open(self, context):
        """Fails."""
        raise ConnectionRefusedError(111, "Connection refused", "audit.internal:4317")


class Budget(stagecrew.Coordinator):
    """Grants remote calls, counted over all tasks."""

    def __init__(self, context):
        super().__init__(context)
        self.spent = 0

    def handle_request(self, evaluation, request):
        """Grants the calls that a task requests."""
        self.spent += request
        return request

    def progress(self):
        """The progress that the tab shows."""
        return {"calls": self.spent}


def request_budget_and_pass_on(gateway, batches):
    """Requests calls for each batch, and returns the batch. One task fails once with a connection reset."""
    from pyspark import TaskContext

    for number, batch in enumerate(batches):
        for _ in range(20):
            gateway.request(1)
        task = TaskContext.get()
        time.sleep(PACE * (0.3 + (task.partitionId() * 7 + number) % 5 / 6))
        if task.partitionId() == 5 and task.attemptNumber() == 0:
            raise ConnectionResetError("the price service has closed the connection")
        yield batch


def prepare(folder):
    """Writes the flights in row groups with sizes proportional to 1/n, and the planes into a database."""
    table = pa.Table.from_pandas(frame("flights")[["origin", "dest", "tailnum", "distance"]], preserve_index=False)
    shares = [1 / n for n in range(1, 25)]
    with pq.ParquetWriter(f"{folder}/flights.parquet", table.schema) as file:
        start = 0
        for share in shares:
            size = round(len(table) * share / sum(shares))
            file.write_table(table.slice(start, size), row_group_size=size)
            start += size
    with sqlite3.connect(f"{folder}/planes.db") as database:
        frame("planes").to_sql("planes", database, index=False, if_exists="replace")
    return table.num_rows


def enrich(spark, folder):
    """Uses listeners in each worker, splits, a coordinator, a shuffle and a commit."""
    listeners = [Planes(f"{folder}/planes.db"), Audit()]
    with stagecrew.crew(spark).topology("enrich", listeners=listeners) as topology:
        groups = ParquetRowGroups(f"{folder}/flights.parquet")

        def read(group):
            for batch in groups.read(group):
                time.sleep(PACE * batch.num_rows / 20_000)
                yield batch

        flights = topology.splits(groups, read, groups.schema, parallelism=4, name="flights")
        routes = flights.groupBy("origin", "dest").agg(functions.count("*").alias("flights")).repartition(12)
        priced = topology.coordinate("budget", Budget).map(routes, request_budget_and_pass_on, routes.schema)
        return topology.commit(priced, ParquetSink(f"{folder}/routes")).rows


def report(spark, folder):
    """The job's last step. The pictures are taken while it runs."""
    with stagecrew.crew(spark).topology("report", listeners=[Planes(f"{folder}/planes.db")]) as topology:
        routes = spark.read.parquet(f"{folder}/routes").repartition(8, "dest").cache()
        assert routes.count() > 0
        with stagecrew.crew(spark).topology("checks"):

            def pass_on_and_wait(gateway, batches):
                for batch in batches:
                    gateway.request(1)
                    yield batch
                wait_for(f"{folder}/go-end")

            checked = topology.coordinate("budget", Budget).map(routes.coalesce(3), pass_on_and_wait, routes.schema)
            return checked.count()


def run(folder):
    """The three steps of the job."""
    job = stagecrew.current_job()
    job.step("load flights", lambda: prepare(folder))
    with open(f"{folder}/loaded-{job.attempt}", "w"):
        wait_for(f"{folder}/go-{job.attempt}")
    spark = stagecrew.configure(SparkSession.builder.appName("nightly")).getOrCreate()
    job.step("enrich", lambda: enrich(spark, folder))
    with open(f"{folder}/ui", "w") as file:
        file.write(spark.sparkContext.uiWebUrl)
    return job.step("report", lambda: report(spark, folder))
