"""Runs a job program in a real job process, with real Spark."""

import concurrent.futures
import json
import os

from pyspark.sql import SparkSession

import stagecrew
from stagecrew.operators.sinks import ParquetSink
from support.job_programs import Runner, Surroundings, Tally


class SparkBackend:
    """Runs the operations of a program with real Spark. See `Runner`."""

    def __init__(self, spark, folder):
        self.spark, self.folder = spark, folder

    def run_threads(self, calls):
        with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
            return [future.result() for future in [pool.submit(call) for call in calls]]

    def numbers(self, values):
        array = f"array({', '.join(map(str, values))})"
        count = len(values)
        return self.spark.range(0, count, 1, count).selectExpr(
            f"cast(element_at({array}, cast(id + 1 as int)) as long) v"
        )

    def stream(self, name, count, f):
        source = f"{self.folder}/input-{name}"
        os.makedirs(source, exist_ok=True)
        for number in range(count):
            with open(f"{source}/{number}.txt", "w") as file:
                file.write("a line")
        query = self.spark.readStream.option("maxFilesPerTrigger", 1).text(source).writeStream
        query = query.trigger(availableNow=True).option("checkpointLocation", f"{self.folder}/checkpoint-{name}")
        query.foreachBatch(lambda rows, number: f(number)).start().awaitTermination()

    def sink(self, name):
        return ParquetSink(f"{self.folder}/sink-{name}", mode="append")

    def write(self, key, value):
        with open(f"{self.folder}/new-{key}", "w") as file:
            json.dump(value, file)
        os.replace(f"{self.folder}/new-{key}", f"{self.folder}/table-{key}")


def run(folder, program):
    """The job's function: runs a program, and returns its result."""
    coordinators = {"c": Tally} if "session" in str(program) else {}
    spark = stagecrew.configure(SparkSession.builder, coordinators=coordinators).getOrCreate()
    return Runner(SparkBackend(spark, folder), stagecrew.crew(spark)).run_body(program, Surroundings())
