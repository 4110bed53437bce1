"""Starts Spark's own processes: a standalone cluster, a shuffle service, a History Server."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from support.hidden_proc import python_path
from support.processes import free_port, terminate
from support.sessions import QUICK_JVM_OPTIONS
from support.spark_home import spark_home
from support.waiting import eventually


def start_spark_process(
    folder: Path, name: str, *arguments: str, jar: str = "", home: str = "", **variables: str
) -> subprocess.Popen[bytes]:
    """Starts a Spark process, with `jar` on its class path. Its output is written to `NAME.log` in the folder.

    `home` is another SPARK_HOME than that of the tests.
    """
    home = home or spark_home()
    jars = os.path.join(home, "jars", "*") + (f"{os.pathsep}{jar}" if jar else "")
    environment = {
        **os.environ,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_HOME": home,
        "SPARK_SCALA_VERSION": "2.13",
        **variables,
    }
    environment.pop("PYSPARK_PYTHON", None)
    # The executors of a cluster run the first python3 on their PATH. Make that the interpreter of the tests.
    environment["PATH"] = f"{os.path.dirname(sys.executable)}{os.pathsep}{environment['PATH']}"
    options = [
        f"--add-opens=java.base/{p}=ALL-UNNAMED"
        for p in ("java.lang", "java.net", "java.nio", "java.util", "sun.nio.ch")
    ]
    with open(folder / f"{name}.log", "wb") as log:
        command = ["java", "-Xmx256m", *QUICK_JVM_OPTIONS.split(), *options, "-cp", jars, *arguments]
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)


@contextlib.contextmanager
def shuffle_service(folder: Path) -> Iterator[dict[str, str]]:
    """Runs an external shuffle service on this host. Yields the settings that make executors use it."""
    port = free_port()
    settings = {"spark.shuffle.service.enabled": "true", "spark.shuffle.service.port": str(port)}
    properties = [f"-D{key}={value}" for key, value in settings.items()]
    service = start_spark_process(
        folder, "shuffle service", *properties, "org.apache.spark.deploy.ExternalShuffleService"
    )

    def listens() -> bool:
        with socket.socket() as connection:
            return connection.connect_ex(("127.0.0.1", port)) == 0

    try:
        eventually(listens, 60, "the shuffle service listens")
        yield settings
    finally:
        terminate(service)


@contextlib.contextmanager
def history_server(folder: Path, logs: Path, jar: str = "", home: str = "", **settings: str) -> Iterator[str]:
    """Runs a History Server for a folder of event logs, by default that of the tests' Spark. Yields its URL."""
    port = free_port()
    settings = {
        "spark.history.fs.logDirectory": logs.as_uri(),
        "spark.history.fs.update.interval": "1s",
        "spark.history.ui.port": str(port),
        "spark.ui.contentSecurityPolicy.enabled": "true",
        **settings,
    }
    properties = [f"-D{key}={value}" for key, value in settings.items()]
    server = start_spark_process(
        folder, f"history-{port}", *properties, "org.apache.spark.deploy.history.HistoryServer", jar=jar, home=home
    )
    base = f"http://127.0.0.1:{port}"

    def responds() -> bool:
        try:
            with urllib.request.urlopen(f"{base}/api/v1/applications", timeout=60) as response:
                return bool(response.headers.get_content_type() == "application/json")
        except OSError:
            return False

    try:
        eventually(responds, 60, "the History Server responds")
        yield base
    finally:
        terminate(server)


@contextlib.contextmanager
def standalone_cluster(folder: Path, workers: int = 2, cores: int = 2) -> Iterator[str]:
    """Runs a standalone cluster: a Master process and Worker processes. Yields the master's URL.

    A module `of_the_node` is on the PYTHONPATH of the Workers, like a module that a cluster's nodes or images provide.
    """
    running: list[subprocess.Popen[bytes]] = []
    node = folder / "node"
    node.mkdir()
    (node / "of_the_node.py").write_text("NAME = 'here'\n")

    def start(name: str, *arguments: str) -> None:
        running.append(start_spark_process(folder, name, *arguments, PYTHONPATH=python_path(str(node))))

    port = free_port()
    url = f"spark://127.0.0.1:{port}"
    try:
        start(
            "master",
            "org.apache.spark.deploy.master.Master",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--webui-port",
            "0",
        )
        for i in range(workers):
            work = folder / f"worker{i}"
            work.mkdir()
            # Each Worker has its own host address, because Spark runs a speculative attempt only on another host.
            start(f"worker{i}", "org.apache.spark.deploy.worker.Worker", "--host", f"127.0.0.{i + 1}", "--webui-port", "0", "--cores", str(cores),
                  "--memory", "2g", "--work-dir", str(work), url)  # fmt: skip
        for i in range(workers):
            log = folder / f"worker{i}.log"
            eventually(lambda log=log: "Successfully registered with master" in log.read_text(), 60, f"{log} registers")
        yield url
    finally:
        for process in reversed(running):
            terminate(process)
