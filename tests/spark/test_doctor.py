"""`stagecrew doctor` with a real Spark."""

from __future__ import annotations

import json
import platform
import re
import sys

import pytest

import stagecrew
from support.cli import run_stagecrew


def checks(ran) -> dict[str, dict[str, str]]:
    return {check["name"]: check for check in json.loads(ran.stdout)["checks"]}


def test_all_is_well():
    """Every check passes: the plugin is active, executors run the driver's Python and import stagecrew from the jar."""
    ran = run_stagecrew("doctor", "--json", "--master", "local-cluster[1,1,1024]", installed=False)
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stdout + ran.stderr
    found = checks(ran)
    assert {name: check["status"] for name, check in found.items()} == dict.fromkeys(
        ("Java", "PySpark", "Jar", "pandas", "Spark", "Python", "Workers"), "ok"
    )
    assert "the plugin is active" in found["Spark"]["found"]
    assert found["Python"]["found"].count(f"{platform.python_version()} ({sys.executable})") == 2
    assert re.search(
        rf"stagecrew {re.escape(stagecrew.__version__)} from \S+\.jar/stagecrew", found["Workers"]["found"]
    )


def test_as_people_read_it():
    """Without --json it prints one line for each check and the verdict, and no line of Spark's log."""
    ran = run_stagecrew("doctor")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stderr == ""
    lines = ran.stdout.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["ok"] * 7
    assert lines[-1] == f"stagecrew {stagecrew.__version__} can run here."


@pytest.mark.long
def test_executors_without_a_python():
    """When workers cannot start, the check of Python fails and says what to set; the exit code is 1."""
    ran = run_stagecrew("doctor", "--json", PYSPARK_PYTHON="/nowhere/python3")
    assert ran.returncode == 1, ran.stdout + ran.stderr
    found = checks(ran)
    assert (found["Spark"]["status"], found["Python"]["status"]) == ("ok", "failed")
    assert "/nowhere/python3" in found["Python"]["found"]
    assert "PYSPARK_PYTHON" in found["Python"]["remedy"]


def test_a_master_that_is_none():
    """A master that Spark does not know fails the check of Spark, with how to write one."""
    ran = run_stagecrew("doctor", "--master", "nonsense")
    assert ran.returncode == 1
    line, remedy = re.findall(r"^failed +Spark +(.*)\n +-> (.*)$", ran.stdout, re.MULTILINE)[0]
    assert "nonsense" in line
    assert "local[2]" in remedy
