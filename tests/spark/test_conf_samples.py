"""spark-submit with SPARK_CONF_DIR=conf/ and a job that does not import stagecrew: the samples work unchanged."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import stagecrew
from support.sessions import QUICK_JVM_OPTIONS
from support.spark_home import spark_home

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "python/stagecrew/examples"
pytestmark = pytest.mark.timeout(300)


def submit(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs spark-submit with the sample files in conf/. All temporary files go to `folder`."""
    temporary = folder / "tmp"
    temporary.mkdir()
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith(("SPARK_", "PYSPARK_", "PYTHONPATH"))},
        "SPARK_CONF_DIR": str(ROOT / "conf"),
        "SPARK_HOME": spark_home(),
        "SPARK_LOCAL_DIRS": str(temporary),
        "TMPDIR": str(temporary),
        "PYSPARK_PYTHON": sys.executable,
        # Makes the package importable as if it were installed, even if it is only on the path of this process.
        "PYTHONPATH": str(Path(stagecrew.__file__).parents[1]),
    }
    return subprocess.run(
        [
            os.path.join(spark_home(), "bin/spark-submit"),
            *("--master", "local[2]", "--jars", stagecrew.jar_path()),
            *(
                "--conf",
                "spark.ui.enabled=false",
                "--conf",
                f"spark.metrics.conf.*.sink.csv.directory={folder}",
                "--driver-java-options",
                f"-Djava.io.tmpdir={temporary} -XX:-UsePerfData {QUICK_JVM_OPTIONS}",
            ),
            *arguments,
        ],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture(scope="module")
def submitted(tmp_path_factory):
    """A job submitted with the samples and, on the command line, the listener of python/stagecrew/examples/audit.py."""
    folder = tmp_path_factory.mktemp("submitted")
    done = submit(
        folder,
        *("--py-files", str(EXAMPLES / "audit.py"), "--conf", f"spark.audit.folder={folder}"),
        *("--conf", "spark.stagecrew.listeners=stagecrew:LoggingContext,audit:audit"),
        str(EXAMPLES / "plain_job.py"),
    )
    assert done.returncode == 0, done.stderr[-8000:]
    return folder, done


def test_a_job_that_never_imports_stagecrew_has_listeners(submitted):
    """If the configuration names a listener, each worker opens it, decorates each task with it, and closes it."""
    folder, done = submitted
    assert "sum: 285" in done.stdout
    logs = [path.read_text().splitlines() for path in folder.glob("audit-*.log")]
    assert logs
    assert {line for lines in logs for line in (lines[0], lines[-1])} == {"open application", "close application"}
    tasks = sorted(re.match(r"task \d+/(\d+):", line)[1] for lines in logs for line in lines[1:-1])
    assert tasks == ["0", "1"]


def test_log_lines_of_a_task_name_their_topology(submitted):
    """Through MdcListener, log4j2.properties shows topology, stage, partition and attempt in log lines of a task."""
    _, done = submitted
    marked = re.findall(r" INFO (\w+) \[(\S+) (\d+)/(\d+) attempt (\d+)\]: ", done.stderr)
    assert {topology for _, topology, *_ in marked} == {"application"}, done.stderr[-8000:]
    assert {partition for *_, partition, _ in marked} == {"0", "1"}
    assert re.search(r" INFO SparkContext \[-\]: ", done.stderr), "lines outside of a task have no topology"


def test_the_samples_cause_no_warning(submitted):
    """Neither Spark nor stagecrew warns about a key of the samples, and log4j2 accepts its sample file."""
    _, done = submitted
    assert "is not a setting of stagecrew" not in done.stderr
    assert not re.search(r"main (?:WARN|ERROR) ", done.stderr), done.stderr[:4000]
    assert " WARN stagecrew" not in done.stderr


def test_a_job_leaves_no_file_and_no_process(submitted):
    """After the job no channel file, no folder and no agent of stagecrew is left."""
    folder, _ = submitted
    remaining = [path for path in (folder / "tmp").rglob("*") if "channel" in path.name or "stagecrew" in path.name]
    assert remaining == []
    psutil = pytest.importorskip("psutil")
    ours = [p.info for p in psutil.process_iter(["cmdline", "cwd"]) if (p.info["cwd"] or "").startswith(str(folder))]
    assert ours == []


@pytest.mark.long
def test_a_session_without_the_jar_names_the_plugin(tmp_path):
    """With the samples but without the jar, the session fails and names the plugin's class.

    No task runs without listeners.
    """
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    done = subprocess.run(
        [
            os.path.join(spark_home(), "bin/spark-submit"),
            "--master",
            "local[1]",
            str(EXAMPLES / "plain_job.py"),
        ],
        cwd=tmp_path,
        env={
            **{key: value for key, value in os.environ.items() if not key.startswith(("SPARK_", "PYSPARK_"))},
            "SPARK_CONF_DIR": str(tmp_path / "conf"),
            "SPARK_HOME": spark_home(),
            "PYSPARK_PYTHON": sys.executable,
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    assert "stagecrew.StagecrewPlugin" in done.stderr
