"""`.ci/run` installs the missing programs, then builds and tests in a folder named `stagecrew`.

The checkout's own folder may have any name.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "run"

#: Replaces `make`: prints its folder and the folder's files, then exits with the given status.
MAKE = """#!/bin/sh
echo "make $* in $PWD"
ls -A
cat "tracked file.txt"
echo "3 passed in 0.1s"
echo "a warning" >&2
touch built
exit $MAKE_STATUS
"""


#: Replaces `bootstrap`: prints its arguments, then exits with the given status.
BOOTSTRAP = """#!/bin/sh
echo "bootstrap $*"
exit $BOOTSTRAP_STATUS
"""


def run_script(folder: Path, status: int = 0, bootstrap_status: int = 0) -> subprocess.CompletedProcess[str]:
    """Runs the script in a small checkout in this folder, with fake `make` and `bootstrap`."""
    programs, temporary = folder.parent / "programs", folder.parent / "temporary"
    for created in (folder / ".ci", programs, temporary):
        created.mkdir(parents=True)
    for path, text in {
        folder / ".ci" / "run": SCRIPT.read_text(),
        folder / "bootstrap": BOOTSTRAP,
        programs / "make": MAKE,
    }.items():
        path.write_text(text)
        path.chmod(0o755)
    (folder / "tracked file.txt").write_text("as committed\n")
    (folder / "deleted.txt").touch()
    for command in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *command], cwd=folder, check=True)
    (folder / "deleted.txt").unlink()
    (folder / "tracked file.txt").write_text("as edited\n")
    (folder / "untracked.txt").touch()
    environment = os.environ | {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "TMPDIR": str(temporary),
        "CI": "true",
        "MAKE_STATUS": str(status),
        "BOOTSTRAP_STATUS": str(bootstrap_status),
    }
    return subprocess.run(
        [folder / ".ci" / "run"], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
    )


def test_a_checkout_with_another_name_is_tested_in_a_copy_named_stagecrew(tmp_path: Path) -> None:
    """The copy is outside the checkout and contains the tracked files as they are now. The script removes the copy."""
    checkout = tmp_path / "another name"
    result = run_script(checkout)
    assert result.returncode == 0, result.stderr
    output = result.stdout.splitlines()
    (copy,) = (Path(line.removeprefix("make test in ")) for line in output if line.startswith("make test in "))
    assert copy.name == "stagecrew"
    assert checkout not in copy.parents
    assert output[-1] == "3 passed in 0.1s"
    assert "as edited" in output
    assert "untracked.txt" not in output
    assert "deleted.txt" not in output
    assert result.stderr == 2 * "a warning\n"
    assert [line for line in output if line.startswith("make ")] == [
        f"make test in {copy}", f"make test-matrix in {copy}",
    ]  # fmt: skip
    assert not copy.parent.exists()
    assert not (checkout / "built").exists()


def test_a_checkout_named_stagecrew_is_tested_in_place(tmp_path: Path) -> None:
    """The script does not copy a checkout that is already named stagecrew."""
    checkout = tmp_path / "stagecrew"
    result = run_script(checkout)
    assert result.returncode == 0, result.stderr
    assert f"make test in {checkout}" in result.stdout.splitlines()


@pytest.mark.parametrize("name", ["stagecrew", "another"])
def test_the_script_fails_when_the_tests_fail(tmp_path: Path, name: str) -> None:
    """The script exits with the status of `make` and leaves no temporary files."""
    result = run_script(tmp_path / name, status=2)
    assert result.returncode == 2
    assert "3 passed in 0.1s" in result.stdout.splitlines()
    assert list((tmp_path / "temporary").iterdir()) == []


def test_what_the_tests_need_is_installed_before_them(tmp_path: Path) -> None:
    """The script first runs `bootstrap` for both targets of `make`. If that fails, the script fails and runs no test."""
    result = run_script(tmp_path / "first" / "stagecrew")
    assert result.stdout.startswith(f"bootstrap --for test test-matrix\nmake test in {tmp_path}")
    result = run_script(tmp_path / "second" / "stagecrew", bootstrap_status=1)
    assert (result.returncode, result.stdout) == (1, "bootstrap --for test test-matrix\n")
