"""What the tests with real Spark share: a listener that writes down what happens, sessions, clusters, waiting."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyspark
from pyspark import SparkContext, cloudpickle
from pyspark.sql import SparkSession

import stagecrew

# Executors do not have the tests: what is defined in these modules travels by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

LOCAL = "local[2,4]"
LOCAL_CLUSTER = "local-cluster[2,2,1024]"
STANDALONE = "standalone"

#: Where `make` keeps the archive of Spark's classes (archive_classes.py).
ARCHIVE = Path(__file__).parents[1] / "build" / "spark-classes.jsa"

#: The JVMs of short sessions do little but start: with one compiler, and without checking Spark's own classes anew, they
#: do that in half the time. (`make demo`, the shim's suites and the benchmarks run as users' JVMs do.)
PLAIN = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"

#: The same, from the archive; a JVM that cannot use it says nothing and starts without.
QUICK = f"{PLAIN} -XX:SharedArchiveFile={ARCHIVE} -Xshare:auto -Xlog:disable -Xlog:all=error:stderr"


def eventually(condition: Callable[[], Any], seconds: float = 20, what: str = "") -> Any:
    """Waits until the condition is true, and answers what it answered; after the deadline the test fails with `what`."""
    deadline = time.monotonic() + seconds
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {what or condition}")
        threading.Event().wait(0.02)


@dataclasses.dataclass
class Journal:
    """A file to which processes append lines; each line is written at once, so none is torn."""

    path: str

    def write(self, **fields: Any) -> None:
        line = json.dumps({"pid": os.getpid(), "time": time.time(), **fields}) + "\n"
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(fd, line.encode())
        finally:
            os.close(fd)

    def read(self, **matching: Any) -> list[dict[str, Any]]:
        if not os.path.exists(self.path):
            return []
        with open(self.path, encoding="utf-8") as file:
            events = [json.loads(line) for line in file]
        return [event for event in events if all(event.get(key) == value for key, value in matching.items())]


class Recorder(stagecrew.Listener):
    """Writes down each call. `fail` names hooks that raise; `hang` hooks that sleep for ever."""

    def __init__(
        self, journal: Journal, name: str = "recorder", fail: tuple[str, ...] = (), hang: str = "", **attributes: Any
    ):
        self.journal, self.name, self.fail, self.hang = journal, name, fail, hang
        for key, value in attributes.items():
            setattr(self, key, value)

    def _called(self, hook: str, **fields: Any) -> None:
        main = threading.current_thread() is threading.main_thread()
        self.journal.write(event=hook, listener=self.name, main=main, **fields)
        if hook in self.fail:
            raise ValueError(f"{hook} of {self.name} fails on purpose")
        if self.hang == hook:
            while True:
                time.sleep(0.05)
        if self.hang == f"{hook} in C":
            import ctypes

            libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(256)
            for _ in range(2):  # the second waits for ever, and no signal handler of Python runs before it returns
                libc.pthread_mutex_lock(mutex)

    def open(self, context: stagecrew.ListenerContext) -> None:
        self._called("open", topology=context.topology, executor=context.executor)

    def close(self, context: stagecrew.ListenerContext) -> None:
        self._called("close", topology=context.topology, executor=context.executor)

    @contextlib.contextmanager
    def decorate(self, task: stagecrew.Task) -> Iterator[None]:
        self._called("enter", topology=task.topology, attempt=task.attempt, stage=task.stage, partition=task.partition)
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._called(
                "leave", topology=task.topology, attempt=task.attempt, error=type(error).__name__ if error else None
            )


def body(journal: Journal, name: str = "body", seconds: float = 0.0) -> Callable[[Any], Iterator[Any]]:
    """A function for mapPartitions that writes down that it ran, and passes its input on."""

    def run(rows: Any) -> Iterator[Any]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        journal.write(event="body", name=name, attempt=context.taskAttemptId(), partition=context.partitionId())
        yield from rows
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            time.sleep(0.01)
        journal.write(event="body end", name=name, attempt=context.taskAttemptId())

    return run


def slots(master: str) -> int:
    """How many tasks run at once on one of the masters."""
    if cluster := re.fullmatch(r"local-cluster\[(\d+),(\d+),\d+\]", master):
        return int(cluster[1]) * int(cluster[2])
    return 2 if master.startswith("local[") else 4


def together(path: str, name: str, how_many: int, until: str = "") -> Callable[[Any], Iterator[Any]]:
    """A function for mapPartitions that ends when so many tasks run it, and the file `until` exists."""

    def run(rows: Any) -> Iterator[Any]:
        log = Journal(path)
        log.write(event="body", name=name)
        eventually(lambda: len(log.read(event="body", name=name)) >= how_many, 60, f"{how_many} tasks run {name}")
        if until:
            eventually(lambda: os.path.exists(until), 60, f"{name} may end")
        yield os.getpid()

    return run


class Sessions:
    """One session at a time in this process; asked for the same again, it is the same."""

    def __init__(self) -> None:
        self._key: Any = None
        self._spark: SparkSession | None = None

    def get(
        self, master: str, listeners: tuple[Any, ...] = (), jvm_listeners: tuple[str, ...] = (), **conf: Any
    ) -> SparkSession:
        key = (master, tuple(map(id, listeners)), jvm_listeners, tuple(sorted(conf.items())))
        if self._key != key or self._spark is None or self._spark.sparkContext._jsc is None:
            self.stop()
            # What a JVM is started with stays a default of later sessions: so it is started with nothing.
            SparkContext._ensure_initialized()
            builder = base(master)
            for name, value in conf.items():
                builder = builder.config(name.replace("__", "."), value)
            self._spark = stagecrew.configure(builder, listeners=listeners, jvm_listeners=jvm_listeners).getOrCreate()
            self._key = key
        return self._spark

    def stop(self) -> None:
        spark, self._spark, self._key = self._spark, None, None
        if spark is not None:
            spark.stop()


def free_master(name: str, request: Any, sessions: Sessions) -> str:
    """The master for a driver of the test's own; the standalone cluster has all its cores free for it."""
    if name != STANDALONE:
        return name
    sessions.stop()
    return str(request.getfixturevalue("standalone"))


def base(master: str) -> SparkSession.Builder:
    """A builder for quiet and small sessions."""
    return (
        SparkSession.builder.master(master)
        .appName("stagecrew tests")
        .config("spark.ui.enabled", "false")
        .config("spark.log.level", "ERROR")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.executor.extraJavaOptions", QUICK)
        .config("spark.sql.warehouse.dir", os.path.join(os.environ["STAGECREW_TEST_FOLDER"], "warehouse"))
    )


#: In the paths of our frames, as tracebacks of workers and agents have them.
OURS = f"{Path(stagecrew.jar_path()).name}/stagecrew/"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def ends(process: subprocess.Popen[Any], seconds: float = 10) -> None:
    """Ends a process that a test started, by its own id."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def started(folder: Path, name: str, *arguments: str, jar: str = "", **variables: str) -> subprocess.Popen[bytes]:
    """A process of Spark's own, with a jar on its class path; its output goes to a file of this name."""
    jars = os.path.join(os.path.dirname(pyspark.__file__), "jars", "*") + (f"{os.pathsep}{jar}" if jar else "")
    environment = {
        **os.environ,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_HOME": os.path.dirname(pyspark.__file__),
        "SPARK_SCALA_VERSION": "2.13",
        **variables,
    }
    environment.pop("PYSPARK_PYTHON", None)
    # Executors of a cluster run the python3 of their PATH: the tests' own.
    environment["PATH"] = f"{os.path.dirname(sys.executable)}{os.pathsep}{environment['PATH']}"
    options = [
        f"--add-opens=java.base/{p}=ALL-UNNAMED"
        for p in ("java.lang", "java.net", "java.nio", "java.util", "sun.nio.ch")
    ]
    with open(folder / f"{name}.log", "wb") as log:
        command = ["java", "-Xmx256m", *QUICK.split(), *options, "-cp", jars, *arguments]
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)


@contextlib.contextmanager
def shuffle_service(folder: Path) -> Iterator[dict[str, str]]:
    """An external shuffle service of this host. Yields the settings with which executors use it."""
    port = free_port()
    settings = {"spark.shuffle.service.enabled": "true", "spark.shuffle.service.port": str(port)}
    properties = [f"-D{key}={value}" for key, value in settings.items()]
    service = started(folder, "shuffle service", *properties, "org.apache.spark.deploy.ExternalShuffleService")

    def listens() -> bool:
        with socket.socket() as connection:
            return connection.connect_ex(("127.0.0.1", port)) == 0

    try:
        eventually(listens, 60, "the shuffle service listens")
        yield settings
    finally:
        ends(service)


@contextlib.contextmanager
def history_server(folder: Path, logs: Path, jar: str = "", **settings: str) -> Iterator[str]:
    """A real History Server over a folder of event logs. Yields where it is."""
    port = free_port()
    settings = {
        "spark.history.fs.logDirectory": logs.as_uri(),
        "spark.history.fs.update.interval": "1s",
        "spark.history.ui.port": str(port),
        **settings,
    }
    properties = [f"-D{key}={value}" for key, value in settings.items()]
    server = started(folder, f"history-{port}", *properties, "org.apache.spark.deploy.history.HistoryServer", jar=jar)
    base = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        try:
            with urllib.request.urlopen(f"{base}/api/v1/applications", timeout=60) as response:
                return bool(response.headers.get_content_type() == "application/json")
        except OSError:
            return False

    try:
        eventually(answers, 60, "the History Server answers")
        yield base
    finally:
        ends(server)


@contextlib.contextmanager
def standalone_cluster(folder: Path, workers: int = 2, cores: int = 2) -> Iterator[str]:
    """A real standalone cluster: one Master and its Workers as processes. Yields the master's URL.

    The PYTHONPATH of the Workers has a module `of_the_node`, as nodes and images may provide it.
    """
    running: list[subprocess.Popen[bytes]] = []
    node = folder / "node"
    node.mkdir()
    (node / "of_the_node.py").write_text("NAME = 'here'\n")

    def start(name: str, *arguments: str) -> None:
        running.append(started(folder, name, *arguments, PYTHONPATH=str(node)))

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
            # Hosts of their own: Spark speculates only on another host than that of the first attempt.
            start(f"worker{i}", "org.apache.spark.deploy.worker.Worker", "--host", f"127.0.0.{i + 1}", "--webui-port", "0", "--cores", str(cores),
                  "--memory", "2g", "--work-dir", str(work), url)  # fmt: skip
        for i in range(workers):
            log = folder / f"worker{i}.log"
            eventually(lambda log=log: "Successfully registered with master" in log.read_text(), 60, f"{log} registers")
        yield url
    finally:
        for process in reversed(running):
            ends(process)


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # before, or while, it is read
        return False


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Sends a signal to a process that a test's own Spark started."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


#: A user's listener in the JVM: its name, and what its open does beside writing a line to the file `spark.test.journal`.
JAVA = """
public class %s implements stagecrew.TopologyListener {
  private void log(String event, stagecrew.TopologyContext context) throws Exception {
    String line = "{\\"event\\": \\"" + event + "\\", \\"topology\\": \\"" + context.topology() + "\\", \\"executor\\": \\""
      + context.executor() + "\\", \\"thread\\": \\"" + Thread.currentThread().getName() + "\\"}\\n";
    java.nio.file.Files.writeString(java.nio.file.Path.of(context.configuration().get("spark.test.journal")), line,
      java.nio.file.StandardOpenOption.CREATE, java.nio.file.StandardOpenOption.APPEND);
  }
  @Override public void open(stagecrew.TopologyContext context) throws Exception { log("open", context); %s }
  @Override public void close(stagecrew.TopologyContext context) throws Exception { log("close", context); }
  @Override public AutoCloseable decorate(stagecrew.TopologyContext context, org.apache.spark.TaskContext task) throws Exception {
    log("enter", context);
    return () -> log("leave", context);
  }
}
"""


def compiled_listeners(folder: Path) -> str:
    """A jar of a user with two JVM listeners: `Noting`, and `Failing`, whose open throws."""
    sources = []
    for name, statement in (("Noting", ""), ("Failing", 'throw new IllegalStateException("no such pool");')):
        source = folder / f"{name}.java"
        source.write_text(JAVA % (name, statement))
        sources.append(str(source))
    classpath = f"{stagecrew.jar_path()}:{Path(pyspark.__file__).parent}/jars/*"
    subprocess.run(["javac", "-cp", classpath, "-d", str(folder / "classes"), *sources], check=True)
    jar = folder / "listeners.jar"
    subprocess.run(["jar", "cf", str(jar), "-C", str(folder / "classes"), "."], check=True)
    return str(jar)


@stagecrew.resource(scope=stagecrew.Scope.EXECUTOR, name="executor wide")
def executor_wide(context: stagecrew.ListenerContext, path: str) -> Iterator[int]:
    """A listener of the executor's scope that writes down its open and its close."""
    log = Journal(path)
    log.write(event="open", listener="executor wide", executor=context.executor)
    yield os.getpid()
    log.write(event="close", listener="executor wide", executor=context.executor)


@stagecrew.resource()
def secret_pool(context: stagecrew.ListenerContext, password: str) -> Iterator[int]:
    """A resource whose argument is a secret."""
    yield len(password)
