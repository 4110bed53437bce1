"""`.ci/run` builds and tests in a folder named `stagecrew`, whatever the checkout's folder is called."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "run"

#: Replaces `make`: prints its folder and the files in it, and exits with the wanted status.
MAKE = """#!/bin/sh
echo "make $* in $PWD"
ls -A
cat "a file of the project.txt"
echo "3 passed in 0.1s"
echo "a warning" >&2
touch built
exit $MAKE_STATUS
"""


def ran(folder: Path, status: int = 0) -> subprocess.CompletedProcess[str]:
    """Runs the script of a small checkout in this folder, with replacements of make and apt-get."""
    programs, temporary = folder.parent / "programs", folder.parent / "temporary"
    for new in (folder / ".ci", programs, temporary):
        new.mkdir(parents=True)
    (folder / ".ci" / "run").write_text(SCRIPT.read_text())
    (folder / ".ci" / "run").chmod(0o755)
    (folder / "a file of the project.txt").write_text("as it was committed\n")
    (folder / "deleted.txt").touch()
    for command in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *command], cwd=folder, check=True)
    (folder / "deleted.txt").unlink()
    (folder / "a file of the project.txt").write_text("as it is now\n")
    (folder / "not of the project.txt").touch()
    for name, text in {"make": MAKE, "apt-get": "#!/bin/sh\n"}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "TMPDIR": str(temporary),
        "CI": "true",
        "MAKE_STATUS": str(status),
    }
    return subprocess.run(
        [folder / ".ci" / "run"], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
    )


def test_a_checkout_of_another_name_is_tested_in_a_copy_named_stagecrew(tmp_path: Path) -> None:
    """The copy has the tracked files as they are now, it is outside the checkout, and the script removes it."""
    checkout = tmp_path / "another name"
    done = ran(checkout)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    (where,) = (Path(line.removeprefix("make test in ")) for line in said if line.startswith("make test in "))
    assert where.name == "stagecrew"
    assert checkout not in where.parents
    assert said[-1] == "3 passed in 0.1s"
    assert "as it is now" in said
    assert "not of the project.txt" not in said
    assert "deleted.txt" not in said
    assert done.stderr == "a warning\n"
    assert not where.parent.exists()
    assert not (checkout / "built").exists()


def test_a_checkout_named_stagecrew_is_tested_where_it_is(tmp_path: Path) -> None:
    """It is not copied."""
    checkout = tmp_path / "stagecrew"
    done = ran(checkout)
    assert done.returncode == 0, done.stderr
    assert f"make test in {checkout}" in done.stdout.splitlines()


@pytest.mark.parametrize("name", ["stagecrew", "another"])
def test_it_fails_when_the_tests_fail(tmp_path: Path, name: str) -> None:
    """With the status of make, and with nothing left."""
    done = ran(tmp_path / name, status=2)
    assert done.returncode == 2
    assert "3 passed in 0.1s" in done.stdout.splitlines()
    assert list((tmp_path / "temporary").iterdir()) == []
