"""What stagecrew leaves behind and gives away: nothing. And Spark behaves as it does without it."""

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
from support.waiting import eventually

TESTS = str(Path(__file__).parent.parent)
SECRET = "correct-horse-battery-staple"


def run(
    script: str, timeout: int = 150, python: str = sys.executable, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A driver of its own."""
    head = f"import os, sys\nsys.path.insert(0, {TESTS!r})\n"
    return subprocess.run(
        [python, "-c", head + textwrap.dedent(script)],
        capture_output=True, text=True, timeout=timeout, check=False, env={**os.environ, **environment},
    )  # fmt: skip


def shapes(secret: str) -> set[str]:
    """A secret as it stands in text: as it is, in hexadecimal, and in the base64 of whatever holds it, at any place in it."""
    found = {secret, secret.encode().hex()}
    for before in range(3):
        encoded = base64.b64encode(b"?" * before + secret.encode()).decode()
        # The first and the last group may share bits with what stands around it.
        found |= {encoded[4:-4], encoded[4:-4].replace("+", "-").replace("/", "_")}
    for before in range(3):
        held = base64.b64encode(b"x" * before + pickle.dumps({"password": secret})).decode()
        assert any(shape in held for shape in found), "whatever pickles it is found"
    return found


DEBUG = """
rootLogger.level = debug
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %p %c: %m%n%ex
"""


@pytest.mark.parametrize("where", [pytest.param("local[2]", marks=pytest.mark.long), "standalone"])
def test_a_secret_of_a_listener_is_nowhere_to_be_seen(journal, tmp_path, tmp_path_factory, sessions, request, where):
    """What a listener holds is in no configuration value, no page, no log, no event log and no command line."""
    master = master_with_free_cores(where, request, sessions)
    secrets = shapes(SECRET)
    events = tmp_path / "events"
    events.mkdir()
    (tmp_path / "log4j2.properties").write_text(DEBUG)
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
    other = [Recorder(journal, "inner", password={SECRET!r}), Recorder(journal, "wide", password={SECRET!r}, scope=stagecrew.Scope.EXECUTOR)]
    with stagecrew.crew(spark).topology("t", listeners=[pool, *other]):
        spark.sparkContext.parallelize(range(4), 4).map(lambda _: pool.get()).collect()
        seen = [str(spark.sparkContext.getConf().getAll())]
        for page in ("environment", "stagecrew", "stagecrew/json", "stagecrew/processes", "executors", "api/v1/applications"):
            seen.append(urllib.request.urlopen(spark.sparkContext.uiWebUrl + "/" + page).read().decode())
        seen += [" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"]) if p.pid != os.getpid()]
        assert any("stagecrew.worker.agent" in one for one in seen)
    spark.stop()
    assert not any(secret in one for one in seen for secret in {secrets!r}), "seen"
    print("DONE", application)
    """
    path = tmp_path / "driver.py"  # its own command line must not hold the secret
    path.write_text(f"import os, sys\nsys.path.insert(0, {TESTS!r})\n" + textwrap.dedent(script))
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=150, check=False)
    assert "DONE" in done.stdout, done.stderr[-3000:]
    written = [path for path in events.glob("**/*") if path.is_file()]
    assert written
    if where == "standalone":
        application = done.stdout.split("DONE ")[1].split()[0]
        logs = [*tmp_path_factory.getbasetemp().glob(f"standalone*/worker*/{application}/*/std*")]
        assert any("DEBUG" in path.read_text() for path in logs)
        written += logs
    assert "DEBUG" in done.stderr
    for text in [done.stdout, done.stderr, *(path.read_bytes().decode(errors="replace") for path in written)]:
        assert not any(secret in text for secret in secrets)


@pytest.mark.long
def test_the_token_of_a_channel_is_in_no_event_log(tmp_path, journal):
    """In local mode tasks share their properties with the job: the token must not travel in them."""
    events = tmp_path / "events"
    events.mkdir()
    done = run(f"""
    from support.script_prelude import *
    import json
    journal = Journal({journal.path!r})
    builder = session_builder("local[2]").config("spark.eventLog.enabled", "true").config("spark.eventLog.compress", "false").config("spark.eventLog.dir", "file://{events}")
    spark = stagecrew.configure(builder, listeners=[Recorder(journal)]).getOrCreate()
    def place(rows):
        from pyspark import TaskContext
        yield TaskContext.get().getLocalProperty("spark.stagecrew.place")
    path = spark.sparkContext.parallelize([1], 1).mapPartitions(place).collect()[0]
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


BARE = (
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
    """A Python that has PySpark, pandas and pyarrow, and neither stagecrew nor psutil."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    ours = Path(SparkContext.__module__ and sys.modules["pyspark"].__file__).parent.parent
    theirs = next((folder / "venv").glob("lib/python3*/site-packages"))
    for name in BARE:
        if (ours / name).exists():
            (theirs / name).symlink_to(ours / name)
    python = str(folder / "venv" / "bin" / "python")
    for missing in ("stagecrew", "psutil"):
        assert subprocess.run([python, "-c", f"import {missing}"], check=False, capture_output=True).returncode == 1
    return python


@pytest.mark.parametrize(
    "where",
    [
        pytest.param("local[2]", marks=pytest.mark.long),
        pytest.param(LOCAL_CLUSTER, marks=pytest.mark.long),
        "standalone",
    ],
)
def test_executors_need_nothing_but_pyspark(bare_python, journal, where, request, sessions):
    """Executors whose Python has neither stagecrew nor psutil open, decorate and close, in both scopes, from everywhere."""
    master = master_with_free_cores(where, request, sessions)
    done = run(f"""
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
    "where", [*(pytest.param(one, marks=pytest.mark.long) for one in ("local[2]", LOCAL_CLUSTER)), "standalone"]
)
def test_a_session_leaves_nothing(journal, where, request, sessions):
    """After a session no process, port or file of ours is left."""
    master = master_with_free_cores(where, request, sessions)
    done = run(f"""
    from support.script_prelude import *
    journal = Journal({journal.path!r})
    spark = stagecrew.configure(session_builder({master!r}), listeners=[Recorder(journal), executor_wide(journal.path)]).getOrCreate()
    import json
    def place(rows):
        from pyspark import TaskContext
        journal.write(event="runs", daemon=os.getppid())
        yield TaskContext.get().getLocalProperty("spark.stagecrew.place")
    for path in set(spark.sparkContext.parallelize(range(4), 4).mapPartitions(place).collect()):
        print("PLACE", path, json.load(open(path))["port"])
    spark.stop()
    """)
    places = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("PLACE")]
    assert places, done.stderr[-3000:]
    pids = {e["pid"] for e in journal.read(event="open")} | {e["daemon"] for e in journal.read(event="runs")}
    eventually(lambda: not any(is_alive(pid) for pid in pids), 20, "its processes end")
    for path, port in places:
        eventually(lambda path=path: not os.path.exists(os.path.dirname(path)), 10, f"{path} is removed")
        listening = {c.laddr.port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        assert int(port) not in listening


@pytest.mark.long
def test_twenty_sessions_leak_nothing(journal, tmp_path):
    """Sessions in one process leak no more threads and descriptors, in Python and the JVM, than without the plugin."""
    script = f"""
    import os, sys
    sys.path.insert(0, {TESTS!r})
    from support.script_prelude import *
    import psutil
    from support.driver_scripts import java_processes
    journal = Journal({journal.path!r})
    SparkContext._ensure_initialized()
    def once():
        builder = session_builder("local[1]")
        if "with" in sys.argv:
            spark = stagecrew.configure(builder, listeners=[Recorder(journal), executor_wide(journal.path)]).getOrCreate()
            around = stagecrew.crew(spark).topology("t", listeners=[Recorder(journal, "inner")])
        else:
            spark, around = builder.getOrCreate(), contextlib.nullcontext()
        with around:
            spark.sparkContext.parallelize([1], 1).map(lambda x: x).collect()
        spark.stop()
    def counts():
        jvm = java_processes()[0]
        return [psutil.Process().num_threads(), psutil.Process().num_fds(), jvm.num_threads(), jvm.num_fds()]
    def settled(seconds, enough=(0, 0, 0, 0)):
        # Threads that end by themselves have some time for it.
        deadline = time.monotonic() + seconds
        best = counts()
        while time.monotonic() < deadline and any(a > b for a, b in zip(best, enough)):
            best = [min(a, b) for a, b in zip(best, counts())]
            time.sleep(0.2)
        return best
    for _ in range(3):
        once()
    before = settled(3)
    for _ in range(20):
        once()
    print("GREW", *[b - a for a, b in zip(before, settled(15, before))])
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


def test_spark_behaves_as_without(sessions: Sessions, journal):
    """Accumulators, broadcasts, barrier tasks and files work with listeners open."""
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


UNIX, PIPELINED = "spark.python.unix.domain.socket.enabled", "spark.python.udf.pipelined.enabled"
FAULTS, MEMORY, PROFILE = (
    "spark.python.worker.faulthandler.enabled",
    "spark.executor.pyspark.memory",
    "spark.python.profile",
)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, "true") for key in (UNIX, PIPELINED, FAULTS)),
        *(pytest.param(*one, marks=pytest.mark.long) for one in ((MEMORY, "2g"), (PROFILE, "true"))),
    ],
)
def test_ways_of_running_python(sessions: Sessions, journal, key, value):
    """Unix sockets, pipelined UDFs, fault handler, memory limit and profiler are in effect, and listeners open and close."""
    spark = sessions.get("local[2,4]", **{key.replace(".", "__"): value})
    sc = spark.sparkContext

    def limits(_rows):
        import faulthandler
        import resource

        yield faulthandler.is_enabled(), resource.getrlimit(resource.RLIMIT_AS)[0]

    @udf("string")
    def asked(_n):
        import os

        # What PySpark's daemon and worker look at.
        return f"{os.environ.get('PYTHON_UNIX_DOMAIN_ENABLED')} {os.environ.get('SPARK_PIPELINED_UDF')}"

    with stagecrew.crew(spark).topology("t", listeners=[Recorder(journal)]) as topology:
        sc.parallelize(range(4), 4).mapPartitions(recording_body(journal)).collect()
        ways = [row[0] for row in spark.range(10).select(asked("id")).collect()]
        ((faults, memory),) = sc.parallelize([1], 1).mapPartitions(limits).collect()
    assert topology.report.opens == topology.report.closes == len(journal.read(event="open")) > 0
    assert topology.report.failures == topology.report.lost == 0
    assert ways == [f"{'True' if key == UNIX else None} {'1' if key == PIPELINED else None}"] * 10
    assert faults == (key == FAULTS)
    assert (0 < memory <= 2 << 30) == (key == MEMORY)
    profiled = sc.profiler_collector.profilers if sc.profiler_collector else []
    assert bool(profiled) == (key == PROFILE)
    # What workers measured, by functions' names.
    stats = [profiler.stats() for _, profiler, _ in profiled]
    assert all(stats)
    assert any(name == "limits" for measured in stats for _, _, name in measured.stats) == (key == PROFILE)
    profiled.clear()  # else PySpark prints them when Python ends


def test_a_worker_that_spark_ends_for_its_silence(sessions: Sessions, journal, tmp_path):
    """Spark's time limit for silent workers ends one with listeners with Spark's own error, and they close there."""
    # One attempt: a second one's worker would be new, and the limit might end it while it still imports pandas.
    spark = sessions.get("local[2,1]")
    limits = {"idleTimeoutSeconds": "3s", "killOnIdleTimeout": "true"}
    done = str(tmp_path / "done")

    @udf("string")
    def silent(row):
        import time

        # Silent until it is ended: a task that is not would be seen by the test's own time limit.
        while row is not None and not os.path.exists(done):
            time.sleep(0.05)
        return str(row)

    try:
        with stagecrew.crew(spark).topology("t", listeners=[Recorder(journal)]) as topology:
            one = spark.range(0, 1, 1, 1)
            one.select(silent(lit(None))).collect()  # its worker is the next query's, and has all that it needs
            for key, value in limits.items():
                spark.conf.set(f"spark.sql.execution.pyspark.udf.{key}", value)
            with pytest.raises(Py4JJavaError, match=r"worker process terminated due to idle timeout \(timeout: 3 sec"):
                one.select(silent("id")).collect()
            eventually(lambda: journal.read(event="close"), what="the worker has not closed")
    finally:
        Path(done).touch()
        for key in limits:
            spark.conf.unset(f"spark.sql.execution.pyspark.udf.{key}")
    assert [entry["error"] for entry in journal.read(event="leave")] == [None, "TaskKilled"]
    assert len(journal.read(event="open")) == len(journal.read(event="close")) == 1
    assert topology.report.opens == topology.report.closes == 1
    assert topology.report.failures == topology.report.lost == 0


@pytest.mark.parametrize("interrupt", [False, pytest.param(True, marks=pytest.mark.long)], ids=["", "interrupted"])
def test_a_cancelled_task_that_goes_on_is_ended(sessions: Sessions, journal, interrupt):
    """A task that swallows `TaskKilled` is ended with its process, whether or not Spark interrupts the task's thread."""
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

    def cancelled() -> None:
        spark.sparkContext.setInterruptOnCancel(interrupt)
        with pytest.raises(Exception, match="cancelled"):
            spark.sparkContext.parallelize([1], 1).mapPartitions(stubborn).collect()

    runner = threading.Thread(target=topology.wrap(cancelled))
    with contextlib.suppress(ZeroDivisionError), topology:
        runner.start()
        (runs,) = eventually(lambda: journal.read(event="runs"), 60, "the task runs")
        raise ZeroDivisionError
    runner.join(60)
    eventually(lambda: not is_alive(runs["pid"]), 30, "its process ends")
    assert len(journal.read(event="runs")) == 2  # asked once
    eventually(lambda: topology.report.lost == 1, 10, "the loss is reported")


def test_logs_of_workers_name_the_users_function(sessions: Sessions, journal):
    """Spark's own record of what workers print and log names the user's function, as it does without the plugin."""
    spark = sessions.get("local[2,4]")
    spark.conf.set("spark.sql.pyspark.worker.logging.enabled", "true")

    @udf("long")
    def said(n):
        print("said in the worker")
        return n

    try:
        for listeners in ([], [Recorder(journal)]):
            with stagecrew.crew(spark).topology("t", listeners=listeners):
                spark.range(1).select(said("id")).collect()
        rows = spark.tvf.python_worker_logs().where("logger = 'stdout'").collect()
    finally:
        spark.conf.unset("spark.sql.pyspark.worker.logging.enabled")
    assert [(row.msg, row.context["func_name"]) for row in rows] == [("said in the worker", "said")] * 2


@pytest.mark.long
def test_ends_look_as_without(tmp_path, journal):
    """A worker that leaves by os._exit, and a submitted script that ends with sys.exit, look as they do without."""
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
            while cause is not None and cause.getClass().getName().startswith("org.apache.spark"):  # then the socket's own
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
        subprocess.Popen([*submit, *more, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment, cwd=tmp_path, stdin=subprocess.DEVNULL)
        for more in ([], plugin)
    ]  # fmt: skip
    said = []
    for process in running:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 3, err[-3000:]
        said.append([line for line in out.splitlines() if line.startswith("RAISED")])
    without, with_plugin = said
    assert without == with_plugin
    assert "Python worker exited unexpectedly" in without[-1]
    opened, closed = (sorted(e["pid"] for e in journal.read(event=event)) for event in ("open", "close"))
    assert len(closed) < len(opened)  # os._exit closes nothing
    assert set(closed) < set(opened)


def test_sessions_one_after_the_other(sessions: Sessions, journal):
    """A second session in the same JVM has its own listeners and its own counts."""
    for i in range(2):
        sessions.stop()
        mine = Recorder(journal, f"session {i}")
        spark = sessions.get("local[2,4]", listeners=(mine,))
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
def test_the_drivers_interpreter_in_local_masters(tmp_path, master):
    """In a local master workers and agents run the driver's own interpreter when the user set none, not the PATH's."""
    other = tmp_path / "python3"
    other.write_text("#!/bin/sh\nexit 3\n")
    other.chmod(0o700)
    assert "PYSPARK_PYTHON" not in os.environ
    done = run(
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
        SPARK_HOME=os.path.dirname(pyspark.__file__),  # else spark-submit asks the python3 of the PATH for it
    )
    assert f"RAN {sys.executable} {sys.executable}" in done.stdout, done.stderr[-3000:]


@pytest.mark.long
def test_an_interpreter_that_is_a_script(tmp_path):
    """Where PYSPARK_PYTHON is a script that starts the real interpreter as its child, both scopes open, close and end."""
    wrapper = tmp_path / "wrapped-python"
    wrapper.write_text(f'#!/bin/sh\n"{sys.executable}" "$@"\nexit $?\n')
    wrapper.chmod(0o700)
    done = run(
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
    def mine():
        return [p for p in psutil.process_iter(["cmdline"]) if any(one.endswith("/wrapped-python") for one in p.info["cmdline"] or ())]
    eventually(lambda: not mine(), 20, "the scripts end")
    eventually(lambda: not any(is_alive(pid) for pid in pids), 20, "what they started ends")
    print("GONE")
    """,
        PYSPARK_PYTHON=str(wrapper),
    )
    assert "GONE" in done.stdout, done.stderr[-3000:]
    opens, closes, failures, lost, pids = map(int, done.stdout.split("REPORT ")[1].split()[:5])
    assert opens == closes == pids > 1
    assert failures == lost == 0
