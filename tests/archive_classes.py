"""Writes the class archive that the JVMs of the tests use.

A JVM that maps its classes from an archive (class data sharing) starts Spark in half the time. Without an archive, or
with an archive of other jars, a JVM loads its classes as usual.
"""

from __future__ import annotations

import contextlib
import os
import sys

from pyspark.sql import SparkSession

from support.sessions import PLAIN_JVM_OPTIONS
from support.spark_home import ARCHIVE, use_spark_home

#: Classes that the JVMs of clusters load, but the JVM of a local session does not.
CLUSTER_CLASSES = (
    "org.apache.spark.executor.CoarseGrainedExecutorBackend",
    "org.apache.spark.scheduler.cluster.StandaloneSchedulerBackend",
    "org.apache.spark.deploy.LocalSparkCluster",
    "org.apache.spark.deploy.master.Master",
    "org.apache.spark.deploy.worker.Worker",
    "org.apache.spark.deploy.worker.ExecutorRunner",
    "org.apache.spark.deploy.client.StandaloneAppClient",
)


def main() -> None:
    """Runs a session without the plugin that uses many parts of Spark. Its JVM writes the archive when it exits."""
    use_spark_home()
    ARCHIVE.unlink(missing_ok=True)
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["SPARK_SUBMIT_OPTS"] = f"{PLAIN_JVM_OPTIONS} -XX:ArchiveClassesAtExit={ARCHIVE} -Xlog:disable"
    spark = (
        SparkSession.builder.master("local[2,4]")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.log.level", "ERROR")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.ui.port", "0")
        .getOrCreate()
    )
    numbers = spark.range(8, numPartitions=4)
    numbers.mapInArrow(lambda batches: batches, "id long").groupBy("id").count().collect()
    numbers.join(numbers, "id").selectExpr("sum(id)").collect()
    spark.sparkContext.parallelize(range(4), 2).map(lambda x: (x, x)).groupByKey().count()
    for name in CLUSTER_CLASSES:
        spark.sparkContext._jvm.java.lang.Class.forName(name)
    gateway = spark.sparkContext._gateway
    spark.stop()
    gateway.shutdown()
    with contextlib.suppress(OSError):
        gateway.proc.stdin.close()  # the JVM exits when its stdin is closed
    gateway.proc.wait(120)
    if not ARCHIVE.exists():
        print(f"this JVM cannot write a class archive to {ARCHIVE}; the tests run without it", file=sys.stderr)


if __name__ == "__main__":
    main()
