"""The notebooks among the examples run from top to bottom in a Jupyter kernel, and show tables and progress."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from stagecrew.gallery import find_examples
from support.sessions import QUICK_JVM_OPTIONS
from support.spark_home import spark_home

pytestmark = pytest.mark.timeout(300)
NOTEBOOKS = {example.name: example.path for example in find_examples() if example.is_notebook}


def run(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> nbformat.NotebookNode:
    """Runs a notebook in a kernel of its own. Returns it with its outputs."""
    kernel = folder / "share" / "jupyter" / "kernels" / "python3"
    kernel.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(json.dumps({"argv": command, "display_name": "Python 3", "language": "python"}))
    for name, value in {
        "JUPYTER_PATH": str(folder / "share" / "jupyter"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "IPYTHONDIR": str(folder / "ipython"),
        "JUPYTER_PLATFORM_DIRS": "1",
        "SPARK_HOME": spark_home(),
        "SPARK_LOCAL_DIRS": str(folder),
        "_JAVA_OPTIONS": f"-Djava.io.tmpdir={folder} -XX:-UsePerfData {QUICK_JVM_OPTIONS}",
    }.items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert all(cell.get("outputs", []) == [] for cell in notebook.cells), "notebooks are stored without outputs"
    NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(folder)}}).execute()
    return notebook


def html(notebook: nbformat.NotebookNode) -> str:
    """All HTML that the cells of a notebook show."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "\n".join(output["data"].get("text/html", "") for output in outputs if "data" in output)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if "coord" in name else pytest.mark.long) for name in NOTEBOOKS]
)
def test_notebooks_run(name, tmp_path, monkeypatch):
    """Every cell runs. Those with `progress=True` show the progress, and reports are tables."""
    shown = html(run(NOTEBOOKS[name], tmp_path, monkeypatch))
    if "progress=True" in NOTEBOOKS[name].read_text():
        assert "operator " in shown
        assert "topology " in shown
    assert "<table>" in shown
    assert "object at 0x" not in shown


def test_there_are_three_notebooks():
    """They are about resources, a coordinator with live progress, and supersteps."""
    assert list(NOTEBOOKS) == ["notebook_coordinator", "notebook_resources", "notebook_supersteps"]
