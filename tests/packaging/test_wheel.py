"""The wheel of a release works with each supported Spark, in an environment that contains nothing else.

`make test-matrix` runs these tests, after `make wheel`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from stagecrew.spark_version import SPARK_LINES
from support.checkout import ROOT, copy_checkout
from support.docs_blocks import blocks
from support.installed import Installed, artifact

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
    installed.run("stagecrew", "examples", "audit", "plain_job")
    jar = installed.jar
    assert Path(jar).name.startswith(f"stagecrew-spark-{installed.line}_")
    done = installed.run(
        "spark-submit", "--master", "local[2]", "--jars", jar, "--conf", "spark.plugins=stagecrew.StagecrewPlugin",
        "--py-files", "audit.py", "--conf", "spark.stagecrew.listeners=audit:audit", "plain_job.py",
    )  # fmt: skip
    assert "audit" in done.stdout + done.stderr


def test_the_jar_for_another_minor_version_refuses_to_start(installed: Installed) -> None:
    """The jar for the next minor version, or the previous one, is refused with both versions, before any task runs."""
    at = SPARK_LINES.index(installed.line)
    installed.run("stagecrew", "examples", "plain_job")
    for other in {SPARK_LINES[max(at - 1, 0)], SPARK_LINES[min(at + 1, len(SPARK_LINES) - 1)]} - {installed.line}:
        jar = installed.run("stagecrew", "jar", "--spark", other).stdout.strip()
        assert f"stagecrew-spark-{other}_" in jar
        done = installed.run(
            "spark-submit", "--master", "local[1]", "--jars", jar, "--conf", "spark.plugins=stagecrew.StagecrewPlugin",
            "plain_job.py", code=1,
        )  # fmt: skip
        assert f"this jar of stagecrew is built for Spark {other}, but this is Spark {installed.line}." in done.stderr
        assert "sum:" not in done.stdout


def test_the_recipes_that_need_no_server_run(installed: Installed) -> None:
    """A model per worker, skewed files and an iteration, as a reader runs them."""
    pages = ("model-per-worker", "skewed-files", "iteration")
    installed.copy("tests/support/docs_blocks.py", *(f"docs/recipes/{page}.md" for page in pages))
    done = installed.run("python", "-P", "docs_blocks.py", *(f"{page}.md" for page in pages))
    outcomes = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"file": ')]
    assert [outcome["problem"] for outcome in outcomes] == [None] * len(pages)


def test_the_doctor_finds_nothing_wrong(installed: Installed) -> None:
    """Every check passes, and the doctor names the jars of all supported versions."""
    checks = json.loads(installed.run("stagecrew", "doctor", "--json").stdout)["checks"]
    assert {check["name"]: check["status"] for check in checks if check["status"] != "ok"} == {}
    (jar,) = (check["found"] for check in checks if check["name"] == "Jar")
    assert f"for Spark {', '.join(SPARK_LINES)}" in jar


def test_the_demo_runs(installed: Installed) -> None:
    """Each part of the demo gives the right result. The workers close every pool that they open."""
    demo = json.loads(installed.run("stagecrew", "demo", "--flights", "12000", "--json").stdout)
    connections = demo["connections"]
    assert connections["same"]
    closes = sum(pool["closes"] for pool in connections["pools"].values())
    assert connections["with_stagecrew"]["connections"] == closes <= 2
    assert set(demo) == {"connections", "skew", "disk", "driver"}
    assert demo["driver"]["with_stagecrew"] == {"finished": True, "rows": 12000, "twice": 0, "runs": 2}


def test_wheel_and_sdist_contain_the_same_files() -> None:
    """Both have one jar for each version of Spark, the licence, and the same Python code. The sdist has nothing built."""
    jars = {f"stagecrew/jars/{path.name}" for path in (ROOT / "python/stagecrew/jars").glob("*.jar")}
    assert len(jars) == len(SPARK_LINES)
    with zipfile.ZipFile(artifact("*.whl")) as archive:
        wheel = {name: archive.read(name) for name in archive.namelist()}
        notices = [name for name in wheel if name.endswith(("/licenses/LICENSE", "/licenses/NOTICE"))]
    assert len(notices) == 2
    assert artifact("*.whl").stat().st_size < 8_000_000
    (metadata,) = (content.decode() for name, content in wheel.items() if name.endswith(".dist-info/METADATA"))
    assert "Project-URL" not in metadata, "the project has no address yet"
    assert "## One example per capability" in metadata
    targets = re.findall(r"\]\(([^)]+)\)", metadata)
    assert [one for one in targets if not one.startswith(("https://", "#"))] == []
    package = {name: content for name, content in wheel.items() if name.startswith("stagecrew/")}
    assert jars <= package.keys()
    with tarfile.open(artifact("*.tar.gz")) as archive:
        files = {
            member.name.partition("/")[2]: archive.extractfile(member).read() for member in archive if member.isfile()
        }
    assert {
        name.removeprefix("python/"): content for name, content in files.items() if name.startswith("python/")
    } == package
    folders = {name.rpartition("/")[0] for name in files if not name.startswith(("python/", "jvm-shim/src/"))}
    assert folders == {"", "build", "conf", "conf/grafana", "conf/kubernetes", "conf/prometheus", "project"}
    assert {name for name in files if name.startswith("build/")} == {
        f"build/{name}" for name in ("backend.py", "hatch_build.py", "jar.py", "readme.py", "requirements.txt", "sbt")
    }
    assert [name for name in files if name.endswith((".class", ".pyc"))] == []


def test_the_sdist_gives_the_same_wheel_without_spark_and_without_a_jdk(tmp_path: Path) -> None:
    """The sdist contains the jars, so nothing is compiled."""
    uv = str(Path(sys.executable).with_name("uv"))
    nothing = {"JAVA_HOME": "/nowhere", "SPARK_HOME": ""}
    subprocess.run(
        [uv, "build", "--quiet", "--wheel", "--out-dir", str(tmp_path), str(artifact("*.tar.gz"))],
        env=os.environ | nothing, check=True,
    )  # fmt: skip
    (built,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(built) as one, zipfile.ZipFile(artifact("*.whl")) as other:
        assert {name: one.read(name) for name in one.namelist()} == {
            name: other.read(name) for name in other.namelist()
        }


def block_of_the_install_page(text: str) -> str:
    """The only shell block that contains this text."""
    page = (ROOT / "docs/start/install.md").read_text(encoding="utf-8")
    (block,) = (block for block in blocks(page, "sh") if text in block.code)
    return block.code


def test_a_build_from_the_sources_has_one_jar(tmp_path: Path) -> None:
    """The commands of the install page need only a JDK and PySpark. uv runs them, because it has PySpark in its cache."""
    sources, environment = tmp_path / "sources", tmp_path / "environment"
    copy_checkout(sources)
    programs = Path(sys.executable).parent
    subprocess.run([programs / "uv", "venv", "--quiet", "--python", sys.executable, str(environment)], check=True)
    commands = block_of_the_install_page("--no-build-isolation").replace("pip install", f"{programs}/uv pip install")
    variables = {"VIRTUAL_ENV": str(environment), "PATH": f"{environment}/bin:{os.environ['PATH']}"}
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SPARK_", "PYSPARK_"))}
    subprocess.run(["bash", "-euc", commands], cwd=sources, env=kept | variables, check=True)
    doctor = ["stagecrew", "doctor", "--no-spark", "--json"]
    done = subprocess.run(doctor, cwd=tmp_path, env=kept | variables, stdout=subprocess.PIPE, text=True)
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert done.returncode == 0, checks
    assert f"for Spark {SPARK_LINES[-1]}:" in checks["Jar"]["found"]


def test_a_project_of_uv_has_the_wheel(tmp_path: Path) -> None:
    """The commands of the install page, with the file of the wheel, make a project in which the doctor passes."""
    wheel = f'"stagecrew[spark] @ file://{artifact("*.whl")}"'
    commands = block_of_the_install_page("uv init").replace('"stagecrew[spark]"', wheel)
    commands = commands.replace("3.11", f"{sys.version_info.major}.{sys.version_info.minor}")
    kept = {
        key: value for key, value in os.environ.items() if not key.startswith(("SPARK_", "PYSPARK_", "VIRTUAL_ENV"))
    }
    variables = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-euc", commands], cwd=tmp_path, env=kept | variables, stdout=subprocess.PIPE, text=True, check=True
    )
    assert "can run here" in done.stdout


class Spark35(Installed):
    """The wheel with PySpark 3.5, which stagecrew does not support. Its Python 3.11 needs setuptools for distutils."""

    extras, packages = "", ("setuptools<81",)


def test_spark_35_is_refused_when_the_session_starts(tmp_path: Path) -> None:
    """`configure` and the jar each refuse it with one sentence that names both versions, before any task runs."""
    installed = Spark35(tmp_path, "3.5")
    (installed.work / "job.py").write_text(
        "import stagecrew\nfrom pyspark.sql import SparkSession\nstagecrew.configure(SparkSession.builder).getOrCreate()\n"
    )
    refused = installed.run("python", "job.py", code=1).stderr
    assert "ConfigurationError: stagecrew supports Spark 4.0 to 4.3, and this is Spark 3.5." in refused
    installed.run("stagecrew", "examples", "plain_job")
    jar = installed.run("stagecrew", "jar", "--spark", SPARK_LINES[0]).stdout.strip()
    plugin = ("--conf", "spark.plugins=stagecrew.StagecrewPlugin")
    done = installed.run("spark-submit", "--master", "local[1]", "--jars", jar, *plugin, "plain_job.py", code=1)
    assert f"this jar of stagecrew is built for Spark {SPARK_LINES[0]}, but this is Spark 3.5." in done.stderr
    assert "sum:" not in done.stdout


@pytest.mark.parametrize("line", SPARK_LINES)
def test_the_jar_contains_the_same_python_code_as_the_wheel(line: str) -> None:
    """Executors run the code of the jar, and the driver that of the wheel."""
    with zipfile.ZipFile(artifact("*.whl")) as archive:
        modules = (name for name in archive.namelist() if name.endswith(".py") and "/examples/" not in name)
        wheel = {name: archive.read(name) for name in modules}
        (jar,) = (name for name in archive.namelist() if f"/stagecrew-spark-{line}_" in name)
        with archive.open(jar) as file, zipfile.ZipFile(file) as inner:
            code = {name: inner.read(name) for name in inner.namelist() if name.endswith(".py")}
            assert {"META-INF/LICENSE", "META-INF/NOTICE"} <= set(inner.namelist())
    assert code == wheel
