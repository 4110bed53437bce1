"""stagecrew on YARN: client and cluster mode, an environment as an archive, a lost container, the shuffle service."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import stagecrew
from support.yarn_cluster import YarnCluster, yarn_cluster

SUPPORT = Path(__file__).parents[1] / "support"
EXAMPLES = Path(__file__).parents[2] / "python/stagecrew/examples"
pytestmark = [pytest.mark.long, pytest.mark.contract, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def yarn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[YarnCluster]:
    """A cluster with one node."""
    with yarn_cluster(tmp_path_factory.mktemp("yarn")) as running:
        yield running


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python environment as an archive. It has the packages of this environment, except stagecrew."""
    folder = tmp_path_factory.mktemp("archive")
    environment = folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--copies", "--without-pip", str(environment)], check=True)
    (packages,) = environment.glob("lib/python3*/site-packages")
    (packages / "shared.pth").write_text(sysconfig.get_paths()["purelib"])
    found = subprocess.run(
        [environment / "bin/python", "-c", "import pyarrow, importlib.util as u; print(u.find_spec('stagecrew'))"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert found.stdout.strip() == "None"
    subprocess.run(["tar", "czf", str(folder / "environment.tar.gz"), "-C", str(environment), "."], check=True)
    return folder / "environment.tar.gz"


def run_job(yarn: YarnCluster, folder: Path, *options: str, **submit: Any) -> dict[str, Any]:
    """Runs the job, checks what holds in each mode, and returns its result."""
    result, journal = folder / "result.json", folder / "journal"
    yarn.submit(*options, str(SUPPORT / "yarn_job.py"), str(result), str(journal), str(yarn.folder), **submit)
    found: dict[str, Any] = json.loads(result.read_text())
    assert found["rows"] == [[key, 100] for key in range(10)]
    assert found["granted"] == 100, "the coordinator grants 100 calls, and no more"
    assert found["same"], "the job has the same result after it lost a container"
    assert found["executors"] == 2
    work, loss = found["reports"]["work"], found["reports"]["loss"]
    assert work["opens"] == work["closes"] > 0
    assert (work["lost"], work["lost_executors"], work["unclosed"]) == (0, [], [])
    assert work["released"] > 0
    assert loss["released"] > 0
    assert work["failures"] == loss["failures"] == 0
    assert len(loss["lost_executors"]) == 1
    assert loss["unclosed"] == []
    lines = [line.split(maxsplit=4) for line in journal.read_text().splitlines()]
    for name in ("work", "loss"):
        opened, closed = (Counter(pid for event, topology, _, pid, _ in lines if (event, topology) == (wanted, name))
                          for wanted in ("open", "close"))  # fmt: skip
        assert opened == closed, f"in each Python process, listeners of {name} close as often as they open"
        assert opened
    found["pythons"] = {python for *_, python in lines}
    return found


def test_client_mode_with_the_shuffle_service(yarn: YarnCluster, tmp_path: Path) -> None:
    """After a container is lost, the node serves its shuffle files. They are deleted when the topology ends."""
    service = {"spark.shuffle.service.enabled": "true", "spark.shuffle.service.port": str(yarn.shuffle_port)}
    found = run_job(yarn, tmp_path, deploy_mode="client", **service)
    assert found["mapped"] == 1000, "no map task runs again"
    assert found["left"] == 0, "no shuffle file is left while the application is still running"


def test_cluster_mode_with_an_archive_and_the_package_from_the_jar(
    yarn: YarnCluster, archive: Path, tmp_path: Path
) -> None:
    """The driver imports stagecrew from the jar in `--py-files`, and all processes run the archive's Python."""
    jar = Path(stagecrew.jar_path())
    found = run_job(
        yarn, tmp_path, "--archives", f"{archive}#environment", "--py-files", str(jar), deploy_mode="cluster",
        python="./environment/bin/python",
    )  # fmt: skip
    assert found["mapped"] > 1000, "map tasks of the lost container run again"
    assert Path(found["jar"]).name == jar.name
    assert found["package"] == f"{found['jar']}/stagecrew/__init__.py"
    assert all(re.fullmatch(r".*/container_\w+/environment/bin/python", python) for python in found["pythons"])


def test_cluster_mode_with_listeners_by_name(yarn: YarnCluster, archive: Path, tmp_path: Path) -> None:
    """Settings alone add a listener from `--py-files` to a job that does not import stagecrew."""
    settings = {
        "spark.plugins": "stagecrew.StagecrewPlugin",
        "spark.stagecrew.listeners": "audit:audit",
        "spark.audit.folder": str(tmp_path),
    }
    yarn.submit(
        "--archives", f"{archive}#environment", "--jars", stagecrew.jar_path(),
        "--py-files", str(EXAMPLES / "audit.py"), str(EXAMPLES / "plain_job.py"), deploy_mode="cluster",
        python="./environment/bin/python", **settings,
    )  # fmt: skip
    logs = [path.read_text().splitlines() for path in tmp_path.glob("audit-*.log")]
    assert sum(line.startswith("task") for lines in logs for line in lines) == 2
    assert all((lines[0], lines[-1]) == ("open application", "close application") for lines in logs)
