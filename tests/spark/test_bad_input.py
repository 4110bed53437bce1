"""User errors: each error says what happened and what to do."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pyspark
import pytest
from pyspark import SparkContext
from pyspark.sql import SparkSession

import stagecrew
from support.journal import Recorder
from support.sessions import PACKAGE_IN_JAR, Sessions, session_builder

TESTS = str(Path(__file__).parent.parent)


def error_of_configuration(sessions: Sessions, **conf: str) -> str:
    """The message of the error with which the plugin refuses this configuration."""
    sessions.stop()
    with pytest.raises(stagecrew.errors.ConfigurationError) as caught:
        sessions.get("local[1]", **conf)
    return str(caught.value)


def test_a_custom_daemon_module_is_refused(sessions):
    """A user's own `spark.python.daemon.module` is refused. The error contains the setting and the remedy."""
    text = error_of_configuration(sessions, spark__python__daemon__module="my.daemon")
    assert "spark.python.daemon.module=my.daemon" in text
    assert "remove this setting" in text


def test_running_without_a_daemon_is_refused(sessions):
    """`spark.python.use.daemon=false` is refused, and the error says what to do."""
    text = error_of_configuration(sessions, spark__python__use__daemon="false")
    assert "spark.python.use.daemon=false" in text
    assert "remove this setting" in text


def test_unified_udf_execution_is_refused_at_the_start(sessions):
    """Unified UDF execution is refused if it is on when Spark starts."""
    text = error_of_configuration(sessions, spark__sql__execution__udf__unified__execution__enabled="true")
    assert "bypass stagecrew; set it to false" in text


def test_a_running_context_without_the_plugin_is_refused(sessions, journal):
    """If a SparkContext is already running without the plugin, `configure` and `crew` raise and say what to do."""
    sessions.stop()
    plain = session_builder("local[1]").getOrCreate()
    try:
        assert not stagecrew.is_active(plain)
        with pytest.raises(stagecrew.errors.NotActive, match=r"Stop this session and build it again"):
            stagecrew.configure(session_builder("local[1]"), listeners=[Recorder(journal)]).getOrCreate()
        with pytest.raises(stagecrew.errors.NotActive, match=r"spark-submit --jars"):
            stagecrew.crew(plain)
    finally:
        plain.stop()


def test_configure_returns_a_running_session_and_refuses_new_listeners(sessions, journal):
    """`configure` returns the running session. It refuses new application listeners and names them."""
    mine = Recorder(journal, "mine")
    spark = sessions.get("local[1]", listeners=(mine,))
    assert stagecrew.is_active(spark)
    assert stagecrew.configure(session_builder("local[1]"), listeners=[mine]).getOrCreate() is spark
    with pytest.raises(stagecrew.errors.ConfigurationError, match="it does not have: late"):
        stagecrew.configure(session_builder("local[1]"), listeners=[Recorder(journal, "late")]).getOrCreate()
    with pytest.raises(stagecrew.errors.ConfigurationError, match="takes SparkSession.builder"):
        stagecrew.configure(spark)


def test_a_listener_class_and_an_uncalled_resource_are_refused(sessions):
    """A listener class, and a resource that was not called, are refused, and the error says why."""
    crew = stagecrew.crew(sessions.get("local[1]"))

    @stagecrew.resource()
    def pool(context):
        yield 1

    with pytest.raises(stagecrew.errors.ListenerError, match=r"Recorder is a class; register an instance"):
        crew.topology("t", listeners=[Recorder])
    with pytest.raises(stagecrew.errors.ListenerError, match=r"was not called"):
        crew.topology("t", listeners=[pool])


def test_a_listener_that_cannot_be_pickled_is_named(sessions, journal):
    """The error names the listener and the attribute that cannot be pickled."""
    import threading

    crew = stagecrew.crew(sessions.get("local[1]"))
    bad = Recorder(journal, "bad", guard=threading.Lock())
    with pytest.raises(
        stagecrew.errors.ListenerError, match=r"'bad' cannot be pickled: its attribute 'guard' is a lock"
    ):
        crew.topology("t", listeners=[bad])


def test_a_listener_name_that_cannot_be_imported_fails_the_job(sessions, caplog):
    """If the name of a listener cannot be imported at all, the job fails, and the error's first line says so."""
    spark = sessions.get("local[2,2]", spark__stagecrew__listeners="no_such_module:pool")
    assert "needs the module 'no_such_module', which the driver does not have" in caplog.text
    with pytest.raises(
        Exception, match=r"'no_such_module:pool' in spark.stagecrew.listeners cannot be imported"
    ) as caught:
        spark.sparkContext.parallelize([1], 1).map(lambda x: x).collect()
    (line,) = (line for line in str(caught.value).splitlines() if "this task could not be started on executor" in line)
    assert "ListenerError: 'no_such_module:pool' in spark.stagecrew.listeners cannot be imported" in line
    assert "--py-files" in line
    assert PACKAGE_IN_JAR not in str(caught.value)


def test_a_missing_attribute_in_a_listener_name_stops_the_session(sessions, tmp_path, monkeypatch):
    """If the module of a listener name lacks the attribute, the session fails to start and is stopped."""
    (tmp_path / "without_a_pool.py").write_text("import stagecrew\n")
    monkeypatch.syspath_prepend(tmp_path)
    sessions.stop()
    with pytest.raises(stagecrew.errors.ListenerError, match="'without_a_pool:pool'.*has no attribute 'pool'"):
        sessions.get("local[2,2]", spark__stagecrew__listeners="without_a_pool:pool")
    assert SparkContext._active_spark_context is None


def test_a_listener_name_that_only_the_driver_can_import_is_reported(sessions, tmp_path, monkeypatch):
    """If only the driver can import the name of a listener, the job fails, and the error says what to do."""
    (tmp_path / "of_the_driver.py").write_text(
        "import stagecrew\nclass Pool(stagecrew.Listener): pass\npool = Pool()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    sessions.stop()
    spark = sessions.get("local-cluster[1,1,1024]", spark__stagecrew__listeners="of_the_driver:pool")
    with pytest.raises(
        Exception, match="'of_the_driver:pool' in spark.stagecrew.listeners cannot be imported"
    ) as caught:
        spark.sparkContext.parallelize([1], 1).map(lambda x: x).collect()
    assert "--py-files" in str(caught.value)


def test_spark_connect_is_refused(monkeypatch):
    """A Connect session, or an environment that requests one, is refused."""
    monkeypatch.setenv("SPARK_REMOTE", "sc://localhost")
    with pytest.raises(stagecrew.errors.ConfigurationError, match="Spark Connect"):
        stagecrew.configure(SparkSession.builder).getOrCreate()


def test_unified_udf_execution_switched_on_later_raises(sessions, journal):
    """A session that switches unified UDF execution on gets an error instead of silently running without listeners."""
    spark = sessions.get("local[2,1]")
    spark.conf.set("spark.sql.execution.udf.unified.execution.enabled", "true")
    try:
        with (
            stagecrew.crew(spark).topology("t", listeners=[Recorder(journal)]),
            pytest.raises(Exception, match="bypass stagecrew; set it to false"),
        ):
            spark.range(2).mapInArrow(lambda batches: batches, "id long").collect()
    finally:
        spark.conf.unset("spark.sql.execution.udf.unified.execution.enabled")


def run_driver(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a script in a driver process of its own."""
    head = f"import os, sys\nsys.path.insert(0, {TESTS!r})\n"
    return subprocess.run(
        [sys.executable, "-c", head + textwrap.dedent(script)],
        capture_output=True, text=True, timeout=120, check=False, env={**os.environ, **environment},
    )  # fmt: skip


def changed_jar(folder, changes):
    """Copies the jar, and replaces bytes in the files that `changes` names. Returns the path of the copy."""
    other = folder / "stagecrew-other.jar"
    with zipfile.ZipFile(stagecrew.jar_path()) as jar, zipfile.ZipFile(other, "w") as other_jar:
        for item in jar.infolist():
            old, new = changes.get(item.filename, (b"", b""))
            other_jar.writestr(item, jar.read(item).replace(old, new) if old else jar.read(item))
    return other


@pytest.mark.contract
def test_a_jar_for_another_spark_is_refused_when_the_session_starts(tmp_path):
    """No task runs. The error names both versions, and how to find the right jar."""
    line = ".".join(pyspark.__version__.split(".")[:2])
    classes = [f"org/apache/spark/stagecrew/spark/SparkVersion{suffix}.class" for suffix in ("", "$")]
    other = changed_jar(tmp_path, dict.fromkeys(classes, (line.encode(), b"4.9")))
    done = run_driver(f"""
    from support.sessions import session_builder
    builder = session_builder("local[1]").config("spark.plugins", "stagecrew.StagecrewPlugin")
    try:
        builder.config("spark.jars", {str(other)!r}).getOrCreate()
    except Exception as error:
        print("REFUSED", error)
    """)
    expected = f"this jar of stagecrew is built for Spark 4.9, but this is Spark {pyspark.__version__}. `stagecrew jar`"
    assert "REFUSED" in done.stdout, done.stderr[-2000:]
    assert expected in done.stdout


@pytest.mark.contract
def test_two_different_jars_are_refused_when_the_session_starts(tmp_path):
    """Otherwise the driver and the executors could use different ones. The error names both."""
    manifest = (f"Implementation-Version: {stagecrew.__version__}".encode(), b"Implementation-Version: 0.0.1")
    other = changed_jar(tmp_path, {"META-INF/MANIFEST.MF": manifest})
    done = run_driver(f"""
    from support.sessions import session_builder
    import stagecrew
    jars = {f"{other},{stagecrew.jar_path()}"!r}
    builder = stagecrew.configure(session_builder("local[1]").config("spark.jars", jars))
    try:
        builder.getOrCreate()
    except stagecrew.errors.ConfigurationError as error:
        print("REFUSED", error)
    """)
    assert "REFUSED two different jars of stagecrew are loaded" in done.stdout, done.stdout + done.stderr[-2000:]
    assert str(other) in done.stdout
    assert Path(stagecrew.jar_path()).name in done.stdout


@pytest.mark.contract
def test_if_spark_lacks_a_private_field_only_keep_is_lost_and_all_say_so(tmp_path):
    """`keep` raises, and log, page and doctor name the field. Listeners and releases work."""
    classes = [f"org/apache/spark/sql/execution/StagecrewPlans{suffix}.class" for suffix in ("", "$")]
    other = changed_jar(tmp_path, dict.fromkeys(classes, (b"_cachedColumnBuffers", b"_cachedColumnBufferz")))
    done = run_driver(f"""
    import urllib.request
    import stagecrew
    from stagecrew import doctor
    from support.sessions import session_builder
    builder = session_builder("local[1]").config("spark.plugins", "stagecrew.StagecrewPlugin")
    builder = builder.config("spark.jars", {str(other)!r}).config("spark.ui.enabled", "true").config("spark.ui.port", "0")
    spark = builder.config("spark.log.level", "WARN").getOrCreate()
    @stagecrew.resource
    def word(context):
        yield "word"
    words = word()
    with stagecrew.crew(spark).topology("t", listeners=[words]) as topology:
        assert spark.sparkContext.parallelize([1, 2], 2).map(lambda n: (n, words.get())).groupByKey().count() == 2
        try:
            topology.keep(spark.range(1))
        except stagecrew.errors.ConfigurationError as error:
            print("REFUSED", error)
    report = topology.report
    print("REPORT", report.opens, report.closes, report.released)
    page = urllib.request.urlopen(spark.sparkContext.uiWebUrl + "/stagecrew/").read().decode()
    print("PAGE", "CachedRDDBuilder._cachedColumnBufferz" in page)
    print("DOCTOR", next(doctor.spark("local[1]")))
    """)
    printed = dict(line.split(" ", 1) for line in done.stdout.splitlines() if line.partition(" ")[0].isupper())
    field = "org.apache.spark.sql.execution.columnar.CachedRDDBuilder._cachedColumnBufferz"
    assert field in printed["REFUSED"], done.stdout + done.stderr[-2000:]
    assert printed["REPORT"] == "1 1 2"
    assert printed["PAGE"] == "True"
    assert "status='warning'" in printed["DOCTOR"]
    assert field in printed["DOCTOR"]
    assert any(field in line and " WARN " in line for line in done.stderr.splitlines())


def test_a_jar_of_another_version_is_refused(tmp_path):
    """If the jar and the package have different versions, the error names both and the path of the right jar."""
    other = changed_jar(tmp_path, {"stagecrew/_version.py": (stagecrew.__version__.encode(), b"0.0.1")})
    done = run_driver(f"""
    from support.sessions import session_builder
    import stagecrew
    spark = session_builder("local[1]").config("spark.plugins", "stagecrew.StagecrewPlugin").config("spark.jars", {str(other)!r}).getOrCreate()
    try:
        stagecrew.crew(spark)
    except stagecrew.errors.ConfigurationError as error:
        print("REFUSED", error)
    spark.stop()
    """)
    assert "REFUSED" in done.stdout, done.stderr[-2000:]
    assert f"stagecrew 0.0.1, and the Python package is {stagecrew.__version__}: use the jar of" in done.stdout
    assert stagecrew.jar_path() in done.stdout


def test_a_missing_jar_is_reported(monkeypatch):
    """If its jar is missing, the package says how to restore the jar."""
    from stagecrew import jar

    monkeypatch.setattr(jar, "__version__", "9.9.9")
    with pytest.raises(stagecrew.errors.ConfigurationError, match="reinstall"):
        stagecrew.configure(SparkSession.builder)


@pytest.mark.long
def test_stagecrew_works_after_a_plain_session_in_the_same_jvm(tmp_path):
    """stagecrew works in a process whose JVM was started by a session without the plugin."""
    done = run_driver("""
    from support.sessions import session_builder
    import stagecrew
    session_builder("local[1]").getOrCreate().stop()
    spark = stagecrew.configure(session_builder("local[1]")).getOrCreate()
    @stagecrew.resource()
    def word(context):
        yield "opened"
    hello = word()
    with stagecrew.crew(spark).topology("t", listeners=[hello]):
        print(spark.sparkContext.parallelize([1], 1).map(lambda _: hello.get()).collect())
    spark.stop()
    """)
    assert "['opened']" in done.stdout, done.stderr[-3000:]
