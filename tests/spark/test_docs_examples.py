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
from support.sessions import QUICK_JVM_OPTIONS
from support.spark_home import spark_home

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(600)
DOCS = ROOT / "docs"
# Pages that share a session come first. Each other page starts without one.
PAGES = sorted(
    (page for page in [*DOCS.rglob("*.md"), ROOT / "README.md"] if blocks(page.read_text(encoding="utf-8"))),
    key=lambda page: ("spark.stop()" in page.read_text(encoding="utf-8"), page),
)
SUBMITTED = {"audit.py", "plain_job.py"}  # test_conf_samples runs these
EXAMPLES = [path for path in sorted((DOCS / "examples").glob("*.py")) if path.name not in SUBMITTED]
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
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=560, check=False
    )
    print(done.stderr[-20000:], file=sys.stderr)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"file": ')]
    return {
        "code": done.returncode,
        "problems": {one["file"].removeprefix(f"{ROOT}/"): one["problem"] for one in found},
        "output": done.stdout,
        "left": sorted(
            str(path.relative_to(folder)) for path in folder.rglob("*") if re.search("channel|scratch-", path.name)
        ),
    }


@pytest.mark.parametrize("name", FILES)
def test_pages_and_examples_run(outcomes, name):
    """The blocks of each page, each example, and the examples in docstrings run unchanged."""
    assert name in outcomes["problems"], "the process ended before this file"
    assert outcomes["problems"][name] is None, outcomes["problems"][name]


def test_the_process_ends_without_errors_or_leftovers(outcomes):
    """After all pages and examples the process exits with 0, and no channel file or folder of a listener is left."""
    assert outcomes["code"] == 0
    assert outcomes["left"] == []


def test_blocks_that_do_not_run_give_a_reason():
    """A block that is not run states a reason."""
    for page in PAGES:
        for block in blocks(page.read_text(encoding="utf-8")):
            assert block.norun is None or len(block.norun) > 10, f"{page}:{block.line}"
