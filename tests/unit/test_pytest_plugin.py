"""The plugin of pytest: its fixtures work in a project that does not import them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import stagecrew
from support.spark_versions import LEAKS_SOCKETS

PROJECT = """
import contextlib

import stagecrew
from stagecrew.testing import CoordinatorHarness, ScriptedEvaluation

events = []


@stagecrew.resource
def prices(context, path):
    events.append("open")
    with open(path) as file:
        yield dict(line.split() for line in file)
    events.append("close")


class Audit(stagecrew.Listener):
    @contextlib.contextmanager
    def decorate(self, task):
        yield task.partition


class Budget(stagecrew.Coordinator):
    left = 100

    def handle_request(self, evaluation, wanted):
        granted = min(wanted, self.left)
        self.left -= granted
        return granted
"""
TESTS = """
import pytest
import stagecrew
from shop import Audit, Budget, events, prices


def test_a_fake(open_listener):
    catalogue = prices("/nowhere")
    assert open_listener(catalogue, value={"tea": "2"}) == {"tea": "2"}
    assert catalogue.get() == {"tea": "2"}


def test_an_opened_resource(open_listener, tmp_path):
    (tmp_path / "prices").write_text("tea 3")
    catalogue = prices(str(tmp_path / "prices"))
    assert open_listener(catalogue) == {"tea": "3"} == catalogue.get()
    assert events == ["open"]


def test_it_was_closed_after_the_test():
    assert events == ["open", "close"]
    with pytest.raises(stagecrew.errors.ResourceNotOpen):
        prices("/nowhere").get()


def test_a_task_has_defaults(crew_task):
    task = crew_task(partition=3)
    assert (task.partition, task.stage) == (3, 0)
    with Audit().decorate(task) as partition:
        assert partition == 3


def test_a_harness(coordinator_harness):
    harness = coordinator_harness(Budget)
    assert harness.evaluation(subtask=0).request(70) == 70
    assert harness.evaluation(subtask=1).request(70) == 30
"""
IN_SPARK = """
import stagecrew
from shop import prices


def test_a_session(crew_session, tmp_path):
    (tmp_path / "prices").write_text("tea 3")
    catalogue = prices(str(tmp_path / "prices"))
    with stagecrew.crew(crew_session).topology("prices", listeners=[catalogue]) as topology:
        rows = crew_session.sparkContext.parallelize([1], 1).map(lambda _: catalogue.get()["tea"]).collect()
    assert rows == ["3"]
    assert topology.report.opens == topology.report.closes == 1
    assert crew_session.conf.get("spark.app.name") == "shop"
"""
CONFTEST = """
import pytest


@pytest.fixture(scope="session")
def crew_conf(crew_conf):
    return crew_conf | {"spark.app.name": "shop"}
"""


def run_project(folder: Path, tests: str) -> str:
    """Runs pytest in a project of its own, with warnings as errors. Returns its output."""
    for name, text in {"shop.py": PROJECT, "test_shop.py": tests, "conftest.py": CONFTEST}.items():
        (folder / name).write_text(textwrap.dedent(text))
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    leaks = ["-W", "ignore::ResourceWarning"] if LEAKS_SOCKETS else []
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", *leaks, "-p", "no:cacheprovider", "-p", "no:xdist"]
    if not entry_points(group="pytest11", name="stagecrew"):  # the package is on the path, and not installed
        command += ["-p", "stagecrew.testing.plugin"]
    package = str(Path(stagecrew.__file__).parents[1])
    done = subprocess.run(
        command,
        cwd=folder,
        env=kept | {"PYTHONPATH": package},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_fixtures_work_without_imports(tmp_path):
    """Listeners, tasks and harnesses are available in any test, and end with it."""
    assert re.search(r"5 passed", run_project(tmp_path, TESTS))


@pytest.mark.slow
def test_a_session_for_all_tests(tmp_path):
    """`crew_session` is a Spark session with stagecrew, with the properties of `crew_conf`."""
    assert re.search(r"1 passed", run_project(tmp_path, IN_SPARK))


def test_the_plugin_imports_nothing_else():
    """pytest loads the plugin in every project, so it does not load PySpark."""
    code = "import sys, stagecrew.testing.plugin; sys.exit('pyspark' in sys.modules or 'pyarrow' in sys.modules)"
    package = str(Path(stagecrew.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": package}, check=False)
    assert done.returncode == 0
