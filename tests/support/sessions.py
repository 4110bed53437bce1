"""Spark sessions for tests: small and quick to start, one at a time."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from pyspark import SparkContext, cloudpickle
from pyspark.sql import SparkSession

import stagecrew
from support.spark_home import ARCHIVE

# Executors cannot import the tests, so the definitions of this module are pickled by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

LOCAL = "local[2,4]"
LOCAL_CLUSTER = "local-cluster[2,2,1024]"
STANDALONE = "standalone"

#: Options for the JVMs of short sessions, which spend most of their time starting. With only one JIT compiler and
#: without bytecode verification, they start in half the time. (`make demo`, the shim's suites and the benchmarks use
#: the options that a user's JVM has.)
PLAIN_JVM_OPTIONS = (
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
)

#: The same options, with the class archive. A JVM that cannot use the archive starts without it, and logs nothing.
QUICK_JVM_OPTIONS = (
    f"{PLAIN_JVM_OPTIONS} -XX:SharedArchiveFile={ARCHIVE} -Xshare:auto -Xlog:disable -Xlog:all=error:stderr"
)


def slots(master: str) -> int:
    """Returns how many tasks can run at the same time with this master."""
    if cluster := re.fullmatch(r"local-cluster\[(\d+),(\d+),\d+\]", master):
        return int(cluster[1]) * int(cluster[2])
    return 2 if master.startswith("local[") else 4


class Sessions:
    """Keeps at most one session in this process. Returns the same session for the same arguments."""

    def __init__(self) -> None:
        self._key: Any = None
        self._spark: SparkSession | None = None

    def get(
        self, master: str, listeners: tuple[Any, ...] = (), jvm_listeners: tuple[str, ...] = (), **conf: Any
    ) -> SparkSession:
        key = (master, tuple(map(id, listeners)), jvm_listeners, tuple(sorted(conf.items())))
        if self._key != key or self._spark is None or self._spark.sparkContext._jsc is None:
            self.stop()
            # The settings with which the JVM starts become defaults for all later sessions, so start it without any.
            SparkContext._ensure_initialized()
            builder = session_builder(master)
            for name, value in conf.items():
                builder = builder.config(name.replace("__", "."), value)
            self._spark = stagecrew.configure(builder, listeners=listeners, jvm_listeners=jvm_listeners).getOrCreate()
            self._key = key
        return self._spark

    def stop(self) -> None:
        spark, self._spark, self._key = self._spark, None, None
        if spark is not None:
            spark.stop()


def master_with_free_cores(name: str, request: Any, sessions: Sessions) -> str:
    """Returns the master URL for a driver that the test starts itself. On the standalone cluster, frees all cores."""
    if name != STANDALONE:
        return name
    sessions.stop()
    return str(request.getfixturevalue("standalone"))


def session_builder(master: str) -> SparkSession.Builder:
    """Returns a builder for small sessions that log little."""
    return (
        SparkSession.builder.master(master)
        .appName("stagecrew tests")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.contentSecurityPolicy.enabled", "true")  # off by default in 4.2, on in 4.3
        .config("spark.log.level", "ERROR")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.executor.extraJavaOptions", QUICK_JVM_OPTIONS)
        .config("spark.sql.warehouse.dir", os.path.join(os.environ["STAGECREW_TEST_FOLDER"], "warehouse"))
    )


#: The path of the package as it appears in tracebacks of workers and agents.
PACKAGE_IN_JAR = f"{Path(stagecrew.jar_path()).name}/stagecrew/"
