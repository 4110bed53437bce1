"""What differs between the versions of PySpark, for the tests."""

from __future__ import annotations

import importlib.metadata

__all__ = [
    "HAS_ARROW_UDF",
    "HAS_DARK_THEME",
    "HAS_IDLE_WORKER_LIMIT",
    "HAS_PIPELINED_UDFS",
    "HAS_UNIX_SOCKETS",
    "HAS_WORKER_LOGS",
    "INTERRUPTIONS",
    "KILLS_SILENT_WORKERS",
    "LEAKS_SOCKETS",
    "PASSES_START_OF_BATCH",
    "SENDS_SECURITY_POLICY",
    "SPARK",
]

#: The installed version, as major and minor.
SPARK = tuple(map(int, importlib.metadata.version("pyspark").split(".")[:2]))

#: PySpark does not close the sockets from which it reads the results of actions.
LEAKS_SOCKETS = SPARK < (4, 2)

#: `pyspark.sql.functions.arrow_udf` exists.
HAS_ARROW_UDF = SPARK >= (4, 1)

#: What PySpark's handler of Ctrl-C may raise. Older handlers do not catch the errors of their own call to the JVM.
INTERRUPTIONS = ("KeyboardInterrupt",) if SPARK >= (4, 2) else ("KeyboardInterrupt", "Py4JError")

#: `spark.python.factory.idleWorkerMaxPoolSize` exists.
HAS_IDLE_WORKER_LIMIT = SPARK >= (4, 1)

#: `spark.sql.execution.pyspark.udf.killOnIdleTimeout` exists.
KILLS_SILENT_WORKERS = SPARK >= (4, 1)

#: `spark.python.unix.domain.socket.enabled` exists.
HAS_UNIX_SOCKETS = SPARK >= (4, 1)

#: `spark.sql.pyspark.worker.logging.enabled` exists.
HAS_WORKER_LOGS = SPARK >= (4, 1)

#: `spark.python.udf.pipelined.enabled` exists.
HAS_PIPELINED_UDFS = SPARK >= (4, 3)

#: Spark passes the start of a batch to the `latestOffset` of a data source in Python.
PASSES_START_OF_BATCH = SPARK >= (4, 2)

#: Spark's pages have a dark theme.
HAS_DARK_THEME = SPARK >= (4, 2)

#: Spark's pages can have a content security policy.
SENDS_SECURITY_POLICY = SPARK >= (4, 2)
