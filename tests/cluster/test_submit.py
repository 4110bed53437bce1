"""Applications started by spark-submit or PYSPARK_SUBMIT_ARGS that switch stagecrew on with `configure`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pyspark
import pytest

import stagecrew
from support.journal import Journal

TESTS = str(Path(__file__).parent.parent)
PAGE = Path(__file__).parents[2] / "docs/deploy/local-and-standalone.md"

QUIET = ["spark.ui.enabled=false", "spark.driver.host=127.0.0.1", "spark.driver.bindAddress=127.0.0.1"]
CONF = [word for setting in QUIET for word in ("--conf", setting)]

HEAD = """
import os, sys
sys.path.insert(0, {tests!r})
import stagecrew
from support.script_prelude import *
journal = Journal({journal!r})
def names_in(spark, key):
    return sorted(os.path.basename(one) for one in spark.conf.get(key).split(","))
"""


def create_user_jar(folder: Path) -> Path:
    """Creates a user's jar with one file in it."""
    path = folder / "of the user.jar"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("of-the-user.txt", "here")
    return path


def run_script(command: list[str], folder: Path, journal: Journal, script: str, **variables: str) -> None:
    """Runs a script, which must exit with 0."""
    path = folder / "app.py"
    path.write_text(HEAD.format(tests=TESTS, journal=journal.path) + textwrap.dedent(script))
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1", **variables}
    done = subprocess.run(
        [*command, str(path)], capture_output=True, text=True, timeout=150, env=environment, cwd=folder, check=False
    )
    assert done.returncode == 0, done.stderr[-6000:]


@pytest.mark.parametrize("jar_is_named", [pytest.param(False, marks=pytest.mark.long), True])
def test_configure_switches_stagecrew_on_in_a_submitted_script(tmp_path, journal, jar_is_named):
    """`configure` alone switches stagecrew on in an application started by spark-submit. Listeners open and close.

    Executors have the user's jar and the stagecrew jar once each, whether or not `--jars` names the stagecrew jar.
    """
    jars = [str(create_user_jar(tmp_path)), *([stagecrew.jar_path()] if jar_is_named else [])]
    submit = [str(Path(pyspark.__file__).parent / "bin" / "spark-submit"), "--master", "local-cluster[1,1,1024]"]
    submit += ["--jars", ",".join(jars), "--conf", "spark.plugins=", *CONF]
    run_script(submit, tmp_path, journal, """
        from pyspark.sql import SparkSession
        spark = stagecrew.configure(SparkSession.builder, listeners=[Recorder(journal)]).getOrCreate()
        def find_jars(rows):
            yield sorted(name for name in os.listdir() if name.endswith(".jar")), stagecrew.__file__
        (found, file), = spark.sparkContext.parallelize([1], 1).mapPartitions(find_jars).collect()
        journal.write(event="body", jars=found, file=file)
        journal.write(event="driver", jars=names_in(spark, "spark.jars"), plugins=names_in(spark, "spark.plugins"))
        spark.stop()
    """)  # fmt: skip
    both = sorted(["of the user.jar", Path(stagecrew.jar_path()).name])
    (driver,) = journal.read(event="driver")
    assert sorted(name.replace("%20", " ") for name in driver["jars"]) == both
    assert driver["plugins"] == ["stagecrew.StagecrewPlugin"]
    (body,) = journal.read(event="body")
    assert sorted(name.replace("%20", " ") for name in body["jars"]) == both
    assert ".jar" in body["file"]
    assert len(journal.read(event="open")) == len(journal.read(event="close")) == 1


@pytest.mark.long
def test_consecutive_sessions_in_one_process_keep_their_jars(tmp_path, journal):
    """Each session has the stagecrew jar, the jar in PYSPARK_SUBMIT_ARGS and the jar in its builder, once each.

    `create` starts a session just as `getOrCreate` does.
    """
    jar = create_user_jar(tmp_path)
    other = tmp_path / "mine.jar"
    other.write_bytes(jar.read_bytes())
    arguments = f"--conf 'spark.jars={jar}' {' '.join(CONF)} pyspark-shell"
    run_script([sys.executable], tmp_path, journal, f"""
        from pyspark.sql import SparkSession
        for way in ("getOrCreate", "create", "getOrCreate"):
            builder = SparkSession.builder.master("local[1]").config("spark.jars", {str(other)!r})
            builder = builder.config("spark.driver.memory", "700m")
            spark = getattr(stagecrew.configure(builder, listeners=[Recorder(journal)]), way)()
            assert spark.sparkContext.parallelize([1], 1).map(lambda _: 1).count() == 1
            reused = getattr(stagecrew.configure(SparkSession.builder), way)()
            assert stagecrew.crew(reused) is stagecrew.crew(spark)
            memory = spark._jvm.java.lang.Runtime.getRuntime().maxMemory() >> 20
            journal.write(event="session", jars=names_in(spark, "spark.jars"), plugins=names_in(spark, "spark.plugins"), memory=memory)
            spark.stop()
    """, PYSPARK_SUBMIT_ARGS=arguments)  # fmt: skip
    sessions = journal.read(event="session")
    assert len(sessions) == 3
    for session in sessions:
        names = sorted(name.replace("%20", " ") for name in session["jars"])
        assert names == sorted(["mine.jar", "of the user.jar", Path(stagecrew.jar_path()).name])
        assert session["plugins"] == ["stagecrew.StagecrewPlugin"]
        assert 600 < session["memory"] <= 700  # a setting that needs a new JVM is still in effect
    assert len(journal.read(event="open")) == len(journal.read(event="close")) == 3


@pytest.mark.contract
@pytest.mark.parametrize("master", ["spark://127.0.0.1:7077", "local[1]"])
def test_spark_refuses_cluster_mode_as_the_page_says(tmp_path, master):
    """On a standalone cluster and with a local master, Spark refuses cluster mode. The page quotes its message."""
    (tmp_path / "app.py").touch()
    submit = [str(Path(pyspark.__file__).parent / "bin" / "spark-submit"), "--master", master]
    environment = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1"}
    done = subprocess.run(
        [*submit, "--deploy-mode", "cluster", str(tmp_path / "app.py")],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode != 0
    message = re.search(r"SparkException: (.*)", done.stderr)[1]
    assert f"```console\n{message}\n```" in PAGE.read_text(encoding="utf-8")
