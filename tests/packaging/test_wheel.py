"""The wheel of a release works with each supported Spark, in an environment that contains nothing else.

`make test-matrix` runs these tests, after `make wheel`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from stagecrew.spark_version import SPARK_LINES
from support.installed import ROOT, Installed, artifact

pytestmark = [pytest.mark.wheel, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", params=SPARK_LINES)
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    """An installation with each supported Spark."""
    folder = tmp_path_factory.mktemp(f"spark-{request.param}")
    yield Installed(folder, request.param)
    shutil.rmtree(folder)


def test_the_examples_of_the_readme_run(installed: Installed) -> None:
    """The Python blocks run in an empty folder, without a checkout."""
    installed.copy("README.md", "tests/support/docs_blocks.py")
    done = installed.run("python", "-P", "docs_blocks.py", "README.md")
    (outcome,) = (json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"file": '))
    assert outcome["problem"] is None, outcome["problem"]
    assert "rows committed" in done.stdout


def test_listeners_can_be_added_with_spark_submit(installed: Installed) -> None:
    """The command in the README adds a listener to a job that does not import stagecrew."""
    installed.copy("docs/examples/audit.py", "docs/examples/plain_job.py")
    jar = installed.jar
    assert Path(jar).name.startswith(f"stagecrew-spark-{installed.line}_")
    done = installed.run(
        "spark-submit", "--master", "local[2]", "--jars", jar, "--conf", "spark.plugins=stagecrew.StagecrewPlugin",
        "--py-files", "audit.py", "--conf", "spark.stagecrew.listeners=audit:audit", "plain_job.py",
    )  # fmt: skip
    assert "audit" in done.stdout + done.stderr


def test_the_doctor_finds_nothing_wrong(installed: Installed) -> None:
    """Every check passes, and the doctor names the jars of all supported versions."""
    checks = json.loads(installed.run("stagecrew", "doctor", "--json").stdout)["checks"]
    assert {check["name"]: check["status"] for check in checks if check["status"] != "ok"} == {}
    (jar,) = (check["found"] for check in checks if check["name"] == "Jar")
    assert f"for Spark {', '.join(SPARK_LINES)}" in jar


def test_the_demo_runs(installed: Installed) -> None:
    """Both enrichments give the same rows, and the workers close every pool that they open."""
    demo = json.loads(installed.run("stagecrew", "demo", "--flights", "12000", "--json").stdout)
    assert demo["same"]
    assert demo["with_stagecrew"]["connections"] == sum(pool["closes"] for pool in demo["pools"].values()) <= 2


def test_wheel_and_sdist_contain_the_same_files() -> None:
    """Both have one jar for each version of Spark, the licence, and the same Python code. The sdist has nothing built."""
    jars = {f"stagecrew/jars/{path.name}" for path in (ROOT / "python/stagecrew/jars").glob("*.jar")}
    assert len(jars) == len(SPARK_LINES)
    with zipfile.ZipFile(artifact("*.whl")) as archive:
        wheel = {name: archive.read(name) for name in archive.namelist()}
        notices = [name for name in wheel if name.endswith(("/licenses/LICENSE", "/licenses/NOTICE"))]
    assert len(notices) == 2
    package = {name: content for name, content in wheel.items() if name.startswith("stagecrew/")}
    assert jars <= package.keys()
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    with tarfile.open(artifact("*.tar.gz")) as archive:
        files = {
            member.name.partition("/")[2]: archive.extractfile(member).read() for member in archive if member.isfile()
        }
    assert {
        name.removeprefix("python/"): content for name, content in files.items() if name.startswith("python/")
    } == package
    assert files.keys() - set(tracked) == {"PKG-INFO", *(f"python/{jar}" for jar in jars)}


@pytest.mark.parametrize("line", SPARK_LINES)
def test_the_jar_contains_the_same_python_code_as_the_wheel(line: str) -> None:
    """Executors run the code of the jar, and the driver that of the wheel."""
    with zipfile.ZipFile(artifact("*.whl")) as archive:
        wheel = {name: archive.read(name) for name in archive.namelist() if name.endswith(".py")}
        (jar,) = (name for name in archive.namelist() if f"/stagecrew-spark-{line}_" in name)
        with archive.open(jar) as file, zipfile.ZipFile(file) as inner:
            code = {name: inner.read(name) for name in inner.namelist() if name.endswith(".py")}
            assert {"META-INF/LICENSE", "META-INF/NOTICE"} <= set(inner.namelist())
    assert code == wheel
