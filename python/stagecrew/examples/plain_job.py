"""A job that does not import stagecrew."""

from pyspark.sql import SparkSession

spark = SparkSession.builder.appName("plain").getOrCreate()
print("sum:", spark.sparkContext.parallelize(range(10), 2).map(lambda n: n * n).sum())
spark.stop()
