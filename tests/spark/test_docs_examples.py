"""The documentation's examples run, in one Python process. Pages that do not stop Spark share one session."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.docs_blocks import blocks
from support.postgres import postgresql
from support.sessions import QUICK_JVM_OPTIONS
from support.spark_home import spark_home
from support.spark_versions import PASSES_START_OF_BATCH

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(600)
DOCS = ROOT / "docs"
# Pages that share a session come first. Each other page starts without one.
PAGES = sorted(
    (page for page in [*DOCS.rglob("*.md"), ROOT / "README.md"] if blocks(page.read_text(encoding="utf-8"))),
    key=lambda page: ("spark.stop()" in page.read_text(encoding="utf-8"), page),
)
NOT_RUN_HERE = {"audit.py", "plain_job.py"}  # test_conf_samples runs these
if not PASSES_START_OF_BATCH:
    NOT_RUN_HERE.add("aligned_stream.py")  # it reads the start of a batch
EXAMPLES = [path for path in sorted((ROOT / "python/stagecrew/examples").glob("*.py")) if path.name not in NOT_RUN_HERE]
FILES = [*(str(path.relative_to(ROOT)) for path in [*PAGES, *EXAMPLES]), "docstrings"]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """The problem of each file (or None), the exit code, the output and the files that are left."""
    folder = tmp_path_factory.mktemp("docs")
    temporary = folder / "tmp"
    temporary.mkdir()
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith(("SPARK_", "PYSPARK_"))},
        "SPARK_HOME": spark_home(),
        "TMPDIR": str(temporary),
        "SPARK_LOCAL_DIRS": str(temporary),
        "_JAVA_OPTIONS": f"-Djava.io.tmpdir={temporary} -XX:-UsePerfData {QUICK_JVM_OPTIONS}",
    }
    files = [name if name == "docstrings" else str(ROOT / name) for name in FILES]
    command = [sys.executable, "-P", str(ROOT / "tests/support/docs_blocks.py"), *files]
    with postgresql() as server:
        done = subprocess.run(
            command, cwd=folder, env=environment | {"ORDERS_URL": server.url}, capture_output=True, text=True,
            timeout=560, check=False,
        )  # fmt: skip
    print(done.stderr[-20000:], file=sys.stderr)
    problems, output, printed = {}, {}, []
    for line in done.stdout.splitlines():
        if line.startswith('{"file": '):
            one = json.loads(line)
            name = one["file"].removeprefix(f"{ROOT}/")
            problems[name], output[name], printed = one["problem"], "\n".join(printed), []
        else:
            printed.append(line)
    return {
        "code": done.returncode,
        "problems": problems,
        "output": output,
        "left": sorted(
            str(path.relative_to(folder)) for path in folder.rglob("*") if re.search("channel|scratch-", path.name)
        ),
    }


@pytest.mark.parametrize("name", FILES)
def test_pages_and_examples_run(outcomes, name):
    """The blocks of each page, each example, and the examples in docstrings run unchanged."""
    assert name in outcomes["problems"], "the process ended before this file"
    assert outcomes["problems"][name] is None, outcomes["problems"][name]


def test_pages_show_the_output_of_examples(outcomes):
    """A block after `<!-- output: PATH -->` contains what this example prints."""
    shown = {
        block.output: block.code.strip()
        for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
        for block in blocks(page.read_text(encoding="utf-8"), "console")
        if block.output is not None
    }
    assert shown
    for name, text in shown.items():
        assert text in outcomes["output"][name], name


#: Pages with shell blocks that run here, one after the other in an empty folder.
SHELL_PAGES = {
    str(page.relative_to(ROOT)): shell
    for page in [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"]
    if (
        shell := [
            block.code
            for block in blocks(page.read_text(encoding="utf-8"), "sh", "shell")
            if block.norun is None and block.test is None
        ]
    )
}


@pytest.mark.parametrize("name", SHELL_PAGES)
def test_shell_blocks_run(name, tmp_path):
    """The shell blocks of a page run in order, in an empty folder. None of their commands fails."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SPARK_", "PYSPARK_", "STAGECREW_"))}
    environment = {
        **kept,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "_JAVA_OPTIONS": f"-XX:-UsePerfData {QUICK_JVM_OPTIONS}",
        "SPARK_LOCAL_DIRS": str(tmp_path / "scratch"),
    }
    script = "\n".join(["set -euo pipefail", *SHELL_PAGES[name], "wait"])
    work = tmp_path / "work"
    work.mkdir()
    done = subprocess.run(
        ["bash", "-c", script], cwd=work, env=environment, capture_output=True, text=True, timeout=200, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"


def test_the_process_ends_without_errors_or_leftovers(outcomes):
    """After all pages and examples the process exits with 0, and no channel file or folder of a listener is left."""
    assert outcomes["code"] == 0
    assert outcomes["left"] == []


def test_blocks_that_do_not_run_give_a_reason():
    """A block that is not run states a reason."""
    for page in [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]:
        for block in blocks(page.read_text(encoding="utf-8"), "python", "sh", "shell"):
            assert block.norun is None or len(block.norun) > 10, f"{page}:{block.line}"
