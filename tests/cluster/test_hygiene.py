"""stagecrew leaks no secrets, processes or files, and Spark behaves the same with stagecrew as without it."""

from __future__ import annotations

import base64
import contextlib
import glob
import os
import pickle
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import psutil
import pyspark
import pytest
from py4j.protocol import Py4JJavaError
from pyspark import SparkContext
from pyspark.sql.functions import lit, udf

import stagecrew
from support.journal import Recorder, recording_body
from support.processes import is_alive
from support.sessions import LOCAL_CLUSTER, Sessions, master_with_free_cores
from support.spark_versions import HAS_PIPELINED_UDFS, HAS_UNIX_SOCKETS, HAS_WORKER_LOGS, KILLS_SILENT_WORKERS
from support.waiting import eventually

TESTS = str(Path(__file__).parent.parent)
SECRET = "correct-horse-battery-staple"


def run_driver(
    script: str, timeout: int = 150, python: str = sys.executable, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs a script in a driver process of its own."""
    head = f"import os, sys\nsys.path.insert(0, {TESTS!r})\n"
    return subprocess.run(
        [python, "-c", head + textwrap.dedent(script)],
        capture_output=True, text=True, timeout=timeout, check=False, env={**os.environ, **environment},
    )  # fmt: skip


def encodings(secret: str) -> set[str]:
    """A secret in every form it can have in a text: plain, hexadecimal, and base64 at any offset in a larger value."""
    found = {secret, secret.encode().hex()}
    for offset in range(3):
        encoded = base64.b64encode(b"?" * offset + secret.encode()).decode()
        # The first and the last group may share bits with the surrounding bytes.
        found |= {encoded[4:-4], encoded[4:-4].replace("+", "-").replace("/", "_")}
    for offset in range(3):
        encoded_pickle = base64.b64encode(b"x" * offset + pickle.dumps({"password": secret})).decode()
        assert any(encoding in encoded_pickle for encoding in found), "a pickle that contains the secret is recognized"
    return found


DEBUG_LOGGING = """
rootLogger.level = debug
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %p %c: %m%n%ex
"""


@pytest.mark.parametrize("master_name", [pytest.param("local[2]", marks=pytest.mark.long), "standalone"])
def test_a_listeners_secret_appears_nowhere(journal, tmp_path, tmp_path_factory, sessions, request, master_name):
    """A listener's attributes are in no configuration value, page, log, event log or command line."""
    master = master_with_free_cores(master_name, request, sessions)
    secrets = encodings(SECRET)
    events = tmp_path / "events"
    events.mkdir()
    (tmp_path / "log4j2.properties").write_text(DEBUG_LOGGING)
    script = f"""
    from support.script_prelude import *
    import psutil, urllib.request
    journal = Journal({journal.path!r})
    listeners = [Recorder(journal, "app", password={SECRET!r})]
    debug = "-Dlog4j2.configurationFile=file://{tmp_path}/log4j2.properties"
    builder = (session_builder({master!r}).config("spark.ui.enabled", "true").config("spark.ui.port", "0").config("spark.log.level", "DEBUG")
        .config("spark.executor.extraJavaOptions", QUICK_JVM_OPTIONS + " " + debug)
        .config("spark.eventLog.enabled", "true").config("spark.eventLog.compress", "false").config("spark.eventLog.dir", "file://{events}"))
    spark = stagecrew.configure(builder, listeners=listeners).getOrCreate()
    application = spark.sparkContext.applicationId
    pool = secret_pool({SECRET!r})
    inner_listeners = [Recorder(journal, "inner", password={SECRET!r}), Recorder(journal, "wide", password={SECRET!r}, scope=stagecrew.Scope.EXECUTOR)]
    with stagecrew.crew(spark).topology("t", listeners=[pool, *inner_listeners]):
        spark.sparkContext.parallelize(range(4), 4).map(lambda _: pool.get()).collect()
        visible = [str(spark.sparkContext.getConf().getAll())]
        for page in ("environment", "stagecrew", "stagecrew/json", "stagecrew/processes", "executors", "api/v1/applications"):
            visible.append(urllib.request.urlopen(spark.sparkContext.uiWebUrl + "/" + page).read().decode())
        visible += [" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"]) if p.pid != os.getpid()]
        assert any("stagecrew.worker.agent" in one for one in visible)
    spark.stop()
    assert not any(secret in one for one in visible for secret in {secrets!r}), "visible"
    print("DONE", application)
    """
    path = tmp_path / "driver.py"  # a file, because the driver's command line must not contain the secret
    path.write_text(f"import os, sys\nsys.path.insert(0, {TESTS!r})\n" + textwrap.dedent(script))
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=150, check=False)
    assert "DONE" in done.stdout, done.stderr[-3000:]
    written = [path for path in events.glob("**/*") if path.is_file()]
    assert written
    if master_name == "standalone":
        application = done.stdout.split("DONE ")[1].split()[0]
        logs = [*tmp_path_factory.getbasetemp().glob(f"standalone*/worker*/{application}/*/std*")]
        assert any("DEBUG" in path.read_text() for path in logs)
        written += logs
    assert "DEBUG" in done.stderr
    for text in [done.stdout, done.stderr, *(path.read_bytes().decode(errors="replace") for path in written)]:
        assert not any(secret in text for secret in secrets)


@pytest.mark.long
def test_the_channel_token_is_in_no_event_log(tmp_path, journal):
    """The token of the channel is in no event log.

    With a local master, tasks share their properties with the job, so the token must not be a property.
    """
    events = tmp_path / "events"
    events.mkdir()
    done = run_driver(f"""
    from support.script_prelude import *
    import json
    journal = Journal({journal.path!r})
    builder = session_builder("local[2]").config("spark.eventLog.enabled", "true").config("spark.eventLog.compress", "false").config("spark.eventLog.dir", "file://{events}")
    spark = stagecrew.configure(builder, listeners=[Recorder(journal)]).getOrCreate()
    def address_file(rows):
        from pyspark import TaskContext
        yield TaskContext.get().getLocalProperty("spark.stagecrew.addressFile")
    path = spark.sparkContext.parallelize([1], 1).mapPartitions(address_file).collect()[0]
    token = json.load(open(path))["token"]
    print(oct(os.stat(path).st_mode & 0o777), oct(os.stat(os.path.dirname(path)).st_mode & 0o777))
    spark.range(0, 100, 1, 4).mapInArrow(lambda batches: batches, "id long").groupBy("id").count().collect()
    spark.stop()
    print("TOKEN", token)
    print("GONE", not os.path.exists(path))
    """)
    assert "GONE True" in done.stdout, done.stderr[-3000:]
    assert "0o600 0o700" in done.stdout
    token = done.stdout.split("TOKEN ")[1].split()[0]
    read = [Path(log).read_text() for log in glob.glob(f"{events}/**/*", recursive=True) if os.path.isfile(log)]
    assert any("spark.stagecrew.listeners" in log or "SparkListenerTaskEnd" in log for log in read)
    assert not any(token in log for log in read)
    assert token not in done.stderr


BARE_PACKAGES = (
    "pyspark",
    "py4j",
    "pandas",
    "numpy",
    "numpy.libs",
    "pyarrow",
    "pyarrow.libs",
    "pytz",
    "dateutil",
    "six.py",
    "tzdata",
)


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory) -> str:
    """A Python with PySpark, pandas and pyarrow, but without stagecrew and psutil."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    site_packages = Path(SparkContext.__module__ and sys.modules["pyspark"].__file__).parent.parent
    bare_site_packages = next((folder / "venv").glob("lib/python3*/site-packages"))
    for name in BARE_PACKAGES:
        if (site_packages / name).exists():
            (bare_site_packages / name).symlink_to(site_packages / name)
    python = str(folder / "venv" / "bin" / "python")
    for missing in ("stagecrew", "psutil"):
        assert subprocess.run([python, "-c", f"import {missing}"], check=False, capture_output=True).returncode == 1
    return python


@pytest.mark.contract
@pytest.mark.parametrize(
    "master_name",
    [
        pytest.param("local[2]", marks=pytest.mark.long),
        LOCAL_CLUSTER,  # `make test-matrix` runs it, and no test with standalone
        pytest.param("standalone", marks=pytest.mark.long),
    ],
)
def test_executors_need_only_pyspark(bare_python, journal, master_name, request, sessions):
    """On executors whose Python lacks stagecrew and psutil, listeners of both scopes open, decorate and close."""
    master = master_with_free_cores(master_name, request, sessions)
    done = run_driver(f"""
    from support.sessions import session_builder
    import contextlib, stagecrew
    os.environ["PYSPARK_PYTHON"] = {bare_python!r}
    del os.environ["PYTHONPATH"]
    def note(event, listener):
        import json, os, sys
        with open({journal.path!r}, "a") as file:
            file.write(json.dumps(dict(event=event, listener=listener, pid=os.getpid(), prefix=sys.prefix)) + "\\n")
    @stagecrew.resource(scope=stagecrew.Scope.EXECUTOR)
    def number(context):
        note("open", "port")
        yield os.getpid()
        note("close", "port")
    class Pool(stagecrew.Listener):
        def open(self, context): note("open", "pool")
        def close(self, context): note("close", "pool")
        @contextlib.contextmanager
        def decorate(self, task):
            note("enter", "pool")
            yield
            note("leave", "pool")
    port, pool = number(), Pool()
    builder = session_builder({master!r}).config("spark.stagecrew.listeners", "stagecrew:LoggingContext")
    spark = stagecrew.configure(builder, listeners=[port]).getOrCreate()
    with stagecrew.crew(spark).topology("t", listeners=[pool]) as topology:
        print("VALUES", spark.sparkContext.parallelize(range(4), 2).map(lambda _: port.get() > 0 and pool.get() is not None).collect())
        print("ROWS", spark.range(4).mapInArrow(lambda batches: batches, "id long").count())
    print("FAILED", topology.report.failures, stagecrew.crew(spark).report("application").failures)
    spark.stop()
    """, PYTHONPATH="")  # fmt: skip
    assert "FAILED 0 0" in done.stdout, done.stderr[-3000:]
    assert "VALUES [True, True, True, True]" in done.stdout
    assert "ROWS 4" in done.stdout
    assert {e["prefix"] for e in journal.read()} == {str(Path(bare_python).parent.parent)}
    for listener in ("port", "pool"):
        opened = sorted(e["pid"] for e in journal.read(event="open", listener=listener))
        assert opened == sorted(e["pid"] for e in journal.read(event="close", listener=listener)) != []
    assert len(journal.read(event="enter")) == len(journal.read(event="leave")) >= 4


@pytest.mark.parametrize(
    ("master_name", "channel"),
    [
        *(pytest.param(one, "auto", marks=pytest.mark.long) for one in ("local[2]", LOCAL_CLUSTER)),
        ("standalone", "auto"),
        pytest.param("standalone", "tcp", marks=pytest.mark.long),
    ],
)
def test_a_session_leaves_no_process_port_or_file(journal, master_name, channel, request, sessions):
    """After a session has ended, no process, port, socket or file of stagecrew is left."""
    master = master_with_free_cores(master_name, request, sessions)
    done = run_driver(f"""
    from support.script_prelude import *
    journal = Journal({journal.path!r})
    builder = session_builder({master!r}).config("spark.stagecrew.channel", {channel!r})
    spark = stagecrew.configure(builder, listeners=[Recorder(journal), executor_wide(journal.path)]).getOrCreate()
    def address_file(rows):
        from pyspark import TaskContext
        journal.write(event="runs", daemon=os.getppid())
        yield TaskContext.get().getLocalProperty("spark.stagecrew.addressFile")
    for path in set(spark.sparkContext.parallelize(range(4), 4).mapPartitions(address_file).collect()):
        where = json.load(open(path))
        print("ADDRESS_FILE", path, where.get("path", where.get("port")))
    spark.stop()
    """)
    places = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("ADDRESS_FILE")]
    assert places, done.stderr[-3000:]
    pids = {e["pid"] for e in journal.read(event="open")} | {e["daemon"] for e in journal.read(event="runs")}
    eventually(lambda: not any(is_alive(pid) for pid in pids), 20, "the session's processes end")
    for path, where in places:
        eventually(lambda path=path: not os.path.exists(os.path.dirname(path)), 10, f"{path} is removed")
        assert where.isdigit() == (channel == "tcp")
        listening = {str(c.laddr.port) for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        sockets = {c.laddr for c in psutil.net_connections("unix")}
        assert where not in listening | sockets
        assert not os.path.exists(where)


@pytest.mark.long
def test_twenty_sessions_leak_no_threads_or_descriptors(journal, tmp_path):
    """Twenty sessions in one process leak at most three more threads or file descriptors than plain Spark.

    The limit applies separately to threads and to descriptors, in Python and in the JVM.
    """
    script = f"""
    import os, sys
    sys.path.insert(0, {TESTS!r})
    from support.script_prelude import *
    import psutil
    from support.driver_scripts import java_processes
    journal = Journal({journal.path!r})
    SparkContext._ensure_initialized()
    def run_session():
        builder = session_builder("local[1]")
        if "with" in sys.argv:
            spark = stagecrew.configure(builder, listeners=[Recorder(journal), executor_wide(journal.path)]).getOrCreate()
            topology = stagecrew.crew(spark).topology("t", listeners=[Recorder(journal, "inner")])
        else:
            spark, topology = builder.getOrCreate(), contextlib.nullcontext()
        with topology:
            spark.sparkContext.parallelize([1], 1).map(lambda x: x).collect()
        spark.stop()
    def counts():
        jvm = java_processes()[0]
        return [psutil.Process().num_threads(), psutil.Process().num_fds(), jvm.num_threads(), jvm.num_fds()]
    def lowest_counts(seconds, target=(0, 0, 0, 0)):
        # Allow threads some time to end.
        deadline = time.monotonic() + seconds
        best = counts()
        while time.monotonic() < deadline and any(a > b for a, b in zip(best, target)):
            best = [min(a, b) for a, b in zip(best, counts())]
            time.sleep(0.2)
        return best
    for _ in range(3):
        run_session()
    before = lowest_counts(3)
    for _ in range(20):
        run_session()
    print("GREW", *[b - a for a, b in zip(before, lowest_counts(15, before))])
    """
    path = tmp_path / "driver.py"
    path.write_text(textwrap.dedent(script))
    running = {
        plugin: subprocess.Popen([sys.executable, str(path), plugin], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for plugin in ("without", "with")
    }  # fmt: skip
    grew = {}
    for plugin, process in running.items():
        out, err = process.communicate(timeout=360)
        assert "GREW" in out, err[-3000:]
        grew[plugin] = [int(n) for n in out.split("GREW")[1].split()]
    for without, with_plugin in zip(grew["without"], grew["with"], strict=True):
        assert with_plugin <= without + 3, grew


def test_spark_features_work_with_open_listeners(sessions: Sessions, journal):
    """Accumulators, broadcasts and barrier tasks work while listeners are open."""
    spark = sessions.get("local[2,4]")
    sc = spark.sparkContext
    with stagecrew.crew(spark).topology("t", listeners=[Recorder(journal)]):
        total, word = sc.accumulator(0), sc.broadcast("shared")

        def add(rows):
            for row in rows:
                total.add(row)
                yield word.value

        assert sc.parallelize(range(5), 2).mapPartitions(add).collect() == ["shared"] * 5
        assert total.value == 10

        def together(rows):
            from pyspark import BarrierTaskContext

            context = BarrierTaskContext.get()
            context.barrier()
            yield context.allGather(str(context.partitionId()))

        assert sc.parallelize(range(2), 2).barrier().mapPartitions(together).collect() == [["0", "1"]] * 2
    assert len(journal.read(event="open")) == len(journal.read(event="close"))


UNIX_SOCKETS, PIPELINED = "spark.python.unix.domain.socket.enabled", "spark.python.udf.pipelined.enabled"
FAULT_HANDLER, MEMORY, PROFILE = (
    "spark.python.worker.faulthandler.enabled",
    "spark.executor.pyspark.memory",
    "spark.python.profile",
)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        pytest.param(
            UNIX_SOCKETS,
            "true",
            marks=pytest.mark.skipif(not HAS_UNIX_SOCKETS, reason="this Spark has no Unix sockets"),
        ),
        pytest.param(
            PIPELINED, "true", marks=pytest.mark.skipif(not HAS_PIPELINED_UDFS, reason="this Spark pipelines no UDFs")
        ),
        (FAULT_HANDLER, "true"),
        *(pytest.param(*one, marks=pytest.mark.long) for one in ((MEMORY, "2g"), (PROFILE, "true"))),
    ],
)
def test_sparks_python_settings_stay_in_effect(sessions: Sessions, journal, key, value):
    """Spark's settings for workers stay in effect while listeners are open, and the listeners open and close as usual.

    They concern Unix sockets, pipelined UDFs, the fault handler, the memory limit and the profiler.
    """
    spark = sessions.get("local[2,4]", **{key.replace(".", "__"): value})
    sc = spark.sparkContext

    def limits(_rows):
        import faulthandler
        import resource

        yield faulthandler.is_enabled(), resource.getrlimit(resource.RLIMIT_AS)[0]

    @udf("string")
    def environment_of_worker(_n):
        import os

        # PySpark's daemon and worker read these variables.
        return f"{os.environ.get('PYTHON_UNIX_DOMAIN_ENABLED')} {os.environ.get('SPARK_PIPELINED_UDF')}"

    with stagecrew.crew(spark).topology("t", listeners=[Recorder(journal)]) as topology:
        sc.parallelize(range(4), 4).mapPartitions(recording_body(journal)).collect()
        environments = [row[0] for row in spark.range(10).select(environment_of_worker("id")).collect()]
        ((faults, memory),) = sc.parallelize([1], 1).mapPartitions(limits).collect()
    assert topology.report.opens == topology.report.closes == len(journal.read(event="open")) > 0
    assert topology.report.failures == topology.report.lost == 0
    assert environments == [f"{'True' if key == UNIX_SOCKETS else None} {'1' if key == PIPELINED else None}"] * 10
    assert faults == (key == FAULT_HANDLER)
    assert (0 < memory <= 2 << 30) == (key == MEMORY)
    profiled = sc.profiler_collector.profilers if sc.profiler_collector else []
    assert bool(profiled) == (key == PROFILE)
    # The workers' profiles, by function name.
    stats = [profiler.stats() for _, profiler, _ in profiled]
    assert all(stats)
    assert any(name == "limits" for measured in stats for _, _, name in measured.stats) == (key == PROFILE)
    profiled.clear()  # otherwise PySpark prints the profiles when Python exits


@pytest.mark.skipif(not KILLS_SILENT_WORKERS, reason="this Spark does not kill a worker that is silent")
def test_a_worker_that_spark_terminates_as_idle_closes_its_listeners(sessions: Sessions, journal, tmp_path):
    """A worker that Spark terminates at its idle timeout closes its listeners, and the job fails with Spark's error."""
    # Only one attempt: a retry's new worker might reach the idle timeout while it imports pandas.
    spark = sessions.get("local[2,1]")
    limits = {"idleTimeoutSeconds": "3s", "killOnIdleTimeout": "true"}
    done = str(tmp_path / "done")

    @udf("string")
    def silent(row):
        import time

        # Yields nothing until Spark kills the worker. If Spark does not, the test's own timeout fails the test.
        while row is not None and not os.path.exists(done):
            time.sleep(0.05)
        return str(row)

    try:
        with stagecrew.crew(spark).topology("t", listeners=[Recorder(journal)]) as topology:
            one_row = spark.range(0, 1, 1, 1)
            one_row.select(
                silent(lit(None))
            ).collect()  # the next query reuses this worker, which has imported everything
            for key, value in limits.items():
                spark.conf.set(f"spark.sql.execution.pyspark.udf.{key}", value)
            with pytest.raises(Py4JJavaError, match=r"worker process terminated due to idle timeout \(timeout: 3 sec"):
                one_row.select(silent("id")).collect()
            eventually(lambda: journal.read(event="close"), what="the worker closes")
    finally:
        Path(done).touch()
        for key in limits:
            spark.conf.unset(f"spark.sql.execution.pyspark.udf.{key}")
    assert [entry["error"] for entry in journal.read(event="leave")] == [None, "TaskKilled"]
    assert len(journal.read(event="open")) == len(journal.read(event="close")) == 1
    assert topology.report.opens == topology.report.closes == 1
    assert topology.report.failures == topology.report.lost == 0


@pytest.mark.contract
@pytest.mark.parametrize(
    "interrupt_threads", [False, pytest.param(True, marks=pytest.mark.long)], ids=["", "interrupted"]
)
def test_a_cancelled_task_that_ignores_taskkilled_is_killed(sessions: Sessions, journal, interrupt_threads):
    """The process of a task that swallows `TaskKilled` is killed, whether or not Spark interrupts the task's thread."""
    spark = sessions.get("local[2,4]")
    topology = stagecrew.crew(spark).topology("t", listeners=[Recorder(journal)])

    def stubborn(rows):
        import time

        while True:
            try:
                journal.write(event="runs")
                while True:
                    time.sleep(0.02)
            except BaseException:
                continue

    def run_until_cancelled() -> None:
        spark.sparkContext.setInterruptOnCancel(interrupt_threads)
        with pytest.raises(Exception, match="cancelled"):
            spark.sparkContext.parallelize([1], 1).mapPartitions(stubborn).collect()

    runner = threading.Thread(target=topology.wrap(run_until_cancelled))
    with contextlib.suppress(ZeroDivisionError), topology:
        runner.start()
        (first_run,) = eventually(lambda: journal.read(event="runs"), 60, "the task is running")
        raise ZeroDivisionError
    runner.join(60)
    eventually(lambda: not is_alive(first_run["pid"]), 30, "the task's process ends")
    assert len(journal.read(event="runs")) == 2  # one more run after the single TaskKilled
    eventually(lambda: topology.report.lost == 1, 10, "the loss is reported")


@pytest.mark.skipif(not HAS_WORKER_LOGS, reason="this Spark does not log the output of workers")
def test_sparks_worker_logs_name_the_users_function(sessions: Sessions, journal):
    """With the plugin, Spark's log of a worker's output still names the user's function."""
    spark = sessions.get("local[2,4]")
    spark.conf.set("spark.sql.pyspark.worker.logging.enabled", "true")

    @udf("long")
    def print_one_line(n):
        print("said in the worker")
        return n

    try:
        for listeners in ([], [Recorder(journal)]):
            with stagecrew.crew(spark).topology("t", listeners=listeners):
                spark.range(1).select(print_one_line("id")).collect()
        rows = spark.tvf.python_worker_logs().where("logger = 'stdout'").collect()
    finally:
        spark.conf.unset("spark.sql.pyspark.worker.logging.enabled")
    assert [(row.msg, row.context["func_name"]) for row in rows] == [("said in the worker", "print_one_line")] * 2


@pytest.mark.long
def test_os_exit_and_sys_exit_look_the_same_as_without_the_plugin(tmp_path, journal):
    """`os._exit` in a worker and `sys.exit` in a submitted script have the same effects with and without the plugin."""
    (tmp_path / "submitted_pool.py").write_text(
        textwrap.dedent(f"""
        import os, stagecrew
        class Pool(stagecrew.Listener):
            def open(self, context): self.note("open")
            def close(self, context): self.note("close")
            def note(self, event):
                with open({journal.path!r}, "a") as file: file.write('{{"event": "%s", "pid": %d}}\\n' % (event, os.getpid()))
        pool = Pool()
        """)
    )
    path = tmp_path / "driver.py"
    path.write_text(
        textwrap.dedent("""
        import os, sys
        from pyspark.sql import SparkSession
        spark = SparkSession.builder.getOrCreate()
        sc = spark.sparkContext
        def leave(rows):
            os._exit(7)
        assert sc.parallelize(range(2), 2).map(lambda n: n + 1).collect() == [1, 2]
        try:
            sc.parallelize([1], 1).mapPartitions(leave).collect()
        except Exception as error:
            print("RAISED", type(error).__name__)
            cause = error.java_exception
            while cause is not None and cause.getClass().getName().startswith("org.apache.spark"):
                print("RAISED", cause.getClass().getName(), cause.getMessage().split(":")[0].split("\\n")[0])
                cause = cause.getCause()
        sys.exit(3)
        """)
    )
    submit = [str(Path(pyspark.__file__).parent / "bin" / "spark-submit"), "--master", "local[1,2]"]
    submit += ["--conf", "spark.ui.enabled=false", "--conf", "spark.driver.host=127.0.0.1"]
    submit += ["--conf", "spark.driver.bindAddress=127.0.0.1", "--conf", "spark.log.level=ERROR"]
    plugin = ["--jars", stagecrew.jar_path(), "--py-files", str(tmp_path / "submitted_pool.py")]
    plugin += ["--conf", "spark.plugins=stagecrew.StagecrewPlugin"]
    plugin += ["--conf", "spark.stagecrew.listeners=submitted_pool:pool"]
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    running = [
        subprocess.Popen([*submit, *options, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment, cwd=tmp_path, stdin=subprocess.DEVNULL)
        for options in ([], plugin)
    ]  # fmt: skip
    raised = []
    for process in running:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 3, err[-3000:]
        raised.append([line for line in out.splitlines() if line.startswith("RAISED")])
    without, with_plugin = raised
    assert without == with_plugin
    assert "Python worker exited unexpectedly" in without[-1]
    opened, closed = (sorted(e["pid"] for e in journal.read(event=event)) for event in ("open", "close"))
    assert len(closed) < len(opened)  # os._exit closes nothing
    assert set(closed) < set(opened)


def test_consecutive_sessions_have_separate_listeners(sessions: Sessions, journal):
    """Tasks of a second session in the same JVM enter only that session's listeners. Every listener closes."""
    for i in range(2):
        sessions.stop()
        recorder = Recorder(journal, f"session {i}")
        spark = sessions.get("local[2,4]", listeners=(recorder,))
        spark.sparkContext.parallelize(range(2), 2).mapPartitions(recording_body(journal, f"body {i}")).collect()
        entered = {
            e["listener"]
            for b in journal.read(event="body", name=f"body {i}")
            for e in journal.read(event="enter", attempt=b["attempt"], pid=b["pid"])
        }
        assert entered == {f"session {i}"}
    sessions.stop()
    assert len(journal.read(event="open")) == len(journal.read(event="close"))


@pytest.mark.parametrize("master", ["local[1]", pytest.param("local-cluster[1,1,1024]", marks=pytest.mark.long)])
def test_local_masters_use_the_drivers_interpreter(tmp_path, master):
    """With a local master and without PYSPARK_PYTHON, workers and agents run the driver's interpreter.

    They do not run the first `python3` on the PATH.
    """
    failing_python = tmp_path / "python3"
    failing_python.write_text("#!/bin/sh\nexit 3\n")
    failing_python.chmod(0o700)
    assert "PYSPARK_PYTHON" not in os.environ
    done = run_driver(
        f"""
    from support.script_prelude import *
    import shutil
    assert shutil.which("python3") != sys.executable
    spark = stagecrew.configure(session_builder({master!r})).getOrCreate()
    @stagecrew.resource(scope=stagecrew.Scope.EXECUTOR)
    def agents(context):
        import sys
        yield sys.executable
    agents = agents()
    with stagecrew.crew(spark).topology("t", listeners=[agents]):
        print("RAN", *spark.sparkContext.parallelize([1], 1).map(lambda _: (__import__("sys").executable, agents.get())).collect()[0])
    spark.stop()
    """,
        PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
    )
    assert f"RAN {sys.executable} {sys.executable}" in done.stdout, done.stderr[-3000:]


@pytest.mark.long
def test_a_wrapper_script_as_interpreter_works(tmp_path):
    """If PYSPARK_PYTHON is a script that starts the interpreter, listeners of both scopes open and close, and all
    processes end."""
    wrapper = tmp_path / "wrapped-python"
    wrapper.write_text(f'#!/bin/sh\n"{sys.executable}" "$@"\nexit $?\n')
    wrapper.chmod(0o700)
    done = run_driver(
        """
    from support.script_prelude import *
    import psutil
    spark = stagecrew.configure(session_builder("local[2]")).getOrCreate()
    @stagecrew.resource(scope=stagecrew.Scope.EXECUTOR)
    def agents(context):
        yield os.getpid()
    @stagecrew.resource()
    def workers(context):
        yield os.getpid()
    agents, workers = agents(), workers()
    with stagecrew.crew(spark).topology("t", listeners=[agents, workers]) as topology:
        pids = set(sum(spark.sparkContext.parallelize(range(4), 2).map(lambda _: (agents.get(), workers.get())).collect(), ()))
    print("REPORT", topology.report.opens, topology.report.closes, topology.report.failures, topology.report.lost, len(pids))
    spark.stop()
    def wrapper_processes():
        return [p for p in psutil.process_iter(["cmdline"]) if any(one.endswith("/wrapped-python") for one in p.info["cmdline"] or ())]
    eventually(lambda: not wrapper_processes(), 20, "the wrapper scripts end")
    eventually(lambda: not any(is_alive(pid) for pid in pids), 20, "the wrapped interpreters end")
    print("GONE")
    """,
        PYSPARK_PYTHON=str(wrapper),
    )
    assert "GONE" in done.stdout, done.stderr[-3000:]
    opens, closes, failures, lost, pids = map(int, done.stdout.split("REPORT ")[1].split()[:5])
    assert opens == closes == pids > 1
    assert failures == lost == 0
