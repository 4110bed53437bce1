"""Python workers have plain Spark's module path plus the jar."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest
from pyspark import cloudpickle

import stagecrew
from support.clusters import standalone_cluster
from support.sessions import LOCAL

cloudpickle.register_pickle_by_value(sys.modules[__name__])

APPLICATION = """
import json, os, sys
from pyspark.sql import SparkSession
builder = SparkSession.builder.appName("paths")
if os.environ.get("TEST_CONFIGURE"):
    sys.path.insert(0, os.environ["TEST_CONFIGURE"])
    import stagecrew
    builder = stagecrew.configure(builder)
spark = builder.getOrCreate()
def find_module(rows):
    import sys
    try:
        import of_the_node
        found = of_the_node.NAME
    except ImportError as error:
        found = str(error)
    yield list(sys.path), found
(path, found), = spark.sparkContext.parallelize([1], 1).mapPartitions(find_module).collect()
rows = spark.range(2).mapInArrow(lambda batches: batches, "id long").count()
print("FOUND", json.dumps({"path": path, "found": found, "rows": rows, "imported": "stagecrew" in sys.modules}))
spark.stop()
"""


def run_application(folder: Path, master: str, setup: str, node: Path, user: Path | None) -> dict[str, object]:
    """Runs an application without the plugin ("plain"), with only `spark.plugins` ("alone"), or with `configure`."""
    script = folder / "paths.py"
    script.write_text(APPLICATION)
    jar = stagecrew.jar_path()
    submit = [str(Path(pyspark.__file__).parent / "bin" / "spark-submit"), "--master", master]
    settings = ["spark.ui.enabled=false", "spark.driver.host=127.0.0.1", "spark.driver.bindAddress=127.0.0.1"]
    if setup == "alone":
        submit += ["--jars", jar]
        settings += ["spark.plugins=stagecrew.StagecrewPlugin"]
    if user is not None:
        settings += [f"spark.executorEnv.PYTHONPATH={user}"]
    environment = {
        **{key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    if setup == "configure":
        environment["TEST_CONFIGURE"] = str(Path(stagecrew.__file__).parents[1])
    if not master.startswith("spark:"):
        environment["PYTHONPATH"] = str(node)  # executors inherit the environment of the driver's JVM
    command = [*submit, *(word for setting in settings for word in ("--conf", setting)), str(script)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=environment, cwd=folder, check=False
    )
    assert done.returncode == 0, done.stderr[-6000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    found: dict[str, object] = json.loads(line.removeprefix("FOUND "))
    return found


def comparable(path: list[str], jar: str) -> list[str]:
    """A worker's path without the jar, with a placeholder for the application's directories."""
    return [
        "a folder of the application" if "userFiles-" in one or "/app-" in one else one
        for one in path
        if Path(one).name != jar
    ]


def test_workers_find_modules_of_the_nodes_python_path(sessions, standalone):
    """As in plain Spark, workers use their node's own PYTHONPATH, so a module that only the node provides is found."""

    def find_module(rows):
        import sys

        import of_the_node

        yield of_the_node.NAME, sys.path

    spark = sessions.get(standalone)
    ((name, path),) = spark.sparkContext.parallelize([1], 1).mapPartitions(find_module).collect()
    assert name == "here"
    assert [Path(one).name for one in path].count(Path(stagecrew.jar_path()).name) == 1


@pytest.mark.long
@pytest.mark.parametrize("with_user", [False, True])
@pytest.mark.parametrize("master", [LOCAL, "local-cluster[1,1,1024]", "standalone"])
def test_workers_have_plain_sparks_path_plus_the_jar(tmp_path, master, with_user):
    """With the plugin, the workers' `sys.path` is plain Spark's plus the jar, once.

    With `configure` and with only `spark.plugins`, a module on the node's own PYTHONPATH is found if plain Spark finds
    it. A user's `spark.executorEnv.PYTHONPATH` makes no difference to this.
    """
    node, user = tmp_path / "the driver's host", tmp_path / "user"
    node.mkdir()
    user.mkdir()
    (node / "of_the_node.py").write_text("NAME = 'here'\n")
    setups = ("plain", "alone", "configure")

    def run_all(master: str) -> dict[str, dict[str, object]]:
        return {setup: run_application(tmp_path, master, setup, node, user if with_user else None) for setup in setups}

    if master == "standalone":
        with standalone_cluster(tmp_path, workers=1) as url:
            found = run_all(url)
    else:
        found = run_all(master)
    jar = Path(stagecrew.jar_path()).name
    plain = comparable(found["plain"]["path"], jar)
    for setup in setups[1:]:
        path = found[setup]["path"]
        assert comparable(path, jar) == plain, setup
        assert [Path(one).name for one in path].count(jar) == 1, (setup, path)
        assert (found[setup]["found"], found[setup]["rows"]) == (found["plain"]["found"], 2), setup
    assert not found["alone"]["imported"]
    # As in plain Spark, the user's setting replaces the PYTHONPATH of executors on clusters.
    assert found["plain"]["found"] == "here" or (with_user and not master.startswith("local["))
