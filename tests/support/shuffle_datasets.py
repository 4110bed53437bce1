"""For the tests of partitions: small datasets with shuffles, and what these shuffles have stored."""

from __future__ import annotations

import contextlib
import operator
from pathlib import Path

from pyspark.sql import functions as f

from support.spark_storage import block_folders, map_outputs, private_field, shuffle_files


def stored_since(spark, tmp_path, stored_before):
    """Returns the shuffle files and map outputs that were added after `stored_before` was recorded."""
    now = map_outputs(spark)
    return set(shuffle_files(spark, tmp_path)) - stored_before[0], {
        s: n for s, n in now.items() if s not in stored_before[1]
    }


def grouped_frame(spark, rows=1000, parts=4):
    """Returns a DataFrame with one shuffle: the sums of ids by key."""
    return spark.range(0, rows, 1, parts).groupBy((f.col("id") % 7).alias("k")).agg(f.sum("id").alias("s"))


def rows(dataset):
    return sorted(map(tuple, dataset.collect()))


def summed_rdd(spark, parts=4):
    """Returns an RDD with one shuffle: the sums by key, which `EXPECTED` contains."""
    return spark.sparkContext.parallelize(range(100), parts).map(lambda n: (n % 5, n)).reduceByKey(operator.add)


EXPECTED = sorted((k, sum(range(k, 100, 5))) for k in range(5))


@contextlib.contextmanager
def sql_settings(spark, settings):
    """Applies SQL settings within the block and restores the previous values."""
    previous = {key: spark.conf.get(key) for key in settings}
    for key, value in settings.items():
        spark.conf.set(key, value)
    try:
        yield
    finally:
        for key, value in previous.items():
            spark.conf.set(key, value)


def drop(spark, crew, shuffles):
    """Unregisters map outputs from Spark's tracker, with the code that runs at the end of a topology."""
    to_scala = spark.sparkContext._jvm.org.apache.spark.api.python.PythonUtils.toSeq
    private_field(crew.connection.facade, "crew").partitions().drop(to_scala(shuffles))
    assert not set(map_outputs(spark)) & set(shuffles)


def delete(spark, tmp_path, shuffles):
    """Deletes the files of these shuffles."""
    for folder in block_folders(spark, tmp_path):
        for shuffle in shuffles:
            for file in Path(folder).glob(f"*/shuffle_{shuffle}_*"):
                file.unlink(missing_ok=True)
