"""`stagecrew doctor` with a real Spark."""

from __future__ import annotations

import json
import platform
import re
import sys

import pytest

import stagecrew
from support.cli import run_stagecrew
from support.hidden_proc import is_proc_hidden


def checks(done) -> dict[str, dict[str, str]]:
    return {check["name"]: check for check in json.loads(done.stdout)["checks"]}


@pytest.mark.contract
def test_every_check_passes_on_a_working_installation():
    """The plugin is active, and executors run the driver's Python and import stagecrew from the jar."""
    done = run_stagecrew("doctor", "--json", "--master", "local-cluster[1,1,1024]", installed=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    found = checks(done)
    expected = dict.fromkeys(("Java", "PySpark", "Jar", "pandas", "PyArrow", "Spark", "Python", "Workers"), "ok")
    expected["System"] = "warning" if is_proc_hidden() else "ok"
    assert {name: check["status"] for name, check in found.items()} == expected
    assert "the plugin is active" in found["Spark"]["found"]
    assert found["Python"]["found"].count(f"{platform.python_version()} ({sys.executable})") == 2
    assert re.search(
        rf"stagecrew {re.escape(stagecrew.__version__)} from \S+\.jar/stagecrew", found["Workers"]["found"]
    )


def test_the_text_output_has_one_line_per_check():
    """Without --json, the doctor prints one line per check and the verdict, and no line of Spark's log."""
    done = run_stagecrew("doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["ok"] * 9
    assert lines[-1] == f"stagecrew {stagecrew.__version__} can run here."


@pytest.mark.long
def test_a_missing_python_on_executors_is_reported():
    """If workers cannot start, the Python check fails and names the setting. The exit code is 1."""
    done = run_stagecrew("doctor", "--json", PYSPARK_PYTHON="/nowhere/python3")
    assert done.returncode == 1, done.stdout + done.stderr
    found = checks(done)
    assert (found["Spark"]["status"], found["Python"]["status"]) == ("ok", "failed")
    assert "/nowhere/python3" in found["Python"]["found"]
    assert "PYSPARK_PYTHON" in found["Python"]["remedy"]


def test_an_unknown_master_is_reported():
    """A master that Spark does not know fails the Spark check with an example of a valid one."""
    done = run_stagecrew("doctor", "--master", "nonsense")
    assert done.returncode == 1
    message, remedy = re.findall(r"^failed +Spark +(.*)\n +-> (.*)$", done.stdout, re.MULTILINE)[0]
    assert "nonsense" in message
    assert "local[2]" in remedy
