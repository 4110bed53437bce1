"""`bootstrap` names everything that a machine lacks for a target of `make`, and installs it."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stagecrew.spark_version import NEWEST_JAVA
from support.requirements import SCRIPT, bootstrap

ROOT = SCRIPT.parent
PROGRAMS = (
    "make",
    "git",
    "ps",
    "mvn",
    "initdb",
    "chromium",
    "java",
    "javac",
    "ip",
    "debootstrap",
    "bwrap",
    "promtool",
    "systemd-analyze",
)


class Machine:
    """A PATH with fake programs only, and everything else that `bootstrap` inspects."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.programs = folder / "jdk" / "bin"  # java's folder must be in the folder of the JDK's file `release`
        self.programs.mkdir(parents=True)
        self.os_release = folder / "os-release"
        self._capsys = capsys
        self._monkeypatch = monkeypatch
        (folder / "build").mkdir()
        shutil.copy(ROOT / "build" / "sbt", folder / "build")
        monkeypatch.setenv("PATH", str(self.programs))
        monkeypatch.delenv("JAVA_HOME", raising=False)
        monkeypatch.setattr(bootstrap, "ROOT", folder)
        monkeypatch.setattr(bootstrap, "POSTGRESQL", (f"{folder}/postgresql/*/bin",))
        monkeypatch.setattr(bootstrap, "OS_RELEASE", self.os_release)
        monkeypatch.setattr(bootstrap.ctypes, "CDLL", self._load)
        self.libraries = {"libatomic.so.1"}
        self.set_user(0)
        self.set_java("17.0.9")

    def add(self, *names: str, text: str = "#!/bin/sh\nexit 99\n") -> None:
        """Adds programs to the PATH. By default, each fails if it is run."""
        for name in names:
            (self.programs / name).write_text(text)
            (self.programs / name).chmod(0o755)

    def remove(self, *names: str) -> None:
        for name in names:
            (self.programs / name).unlink()

    def set_java(self, version: str) -> None:
        (self.folder / "jdk" / "release").write_text(f'IMPLEMENTOR="x"\nJAVA_VERSION="{version}"\n')

    def set_python(self, *version: int) -> None:
        self._monkeypatch.setattr(sys, "version_info", (*version, "final", 0))

    def set_user(self, user: int) -> None:
        self._monkeypatch.setattr(os, "geteuid", lambda: user)

    def _load(self, name: str) -> None:
        if name not in self.libraries:
            raise OSError(f"{name}: cannot open shared object file")

    def check(self, *arguments: str) -> tuple[int, str]:
        """Returns the exit status of `bootstrap --check`, and its output, which is on stderr if anything is missing."""
        status = bootstrap.main(["--check", *arguments])
        printed = self._capsys.readouterr()
        assert (printed.err if status == 0 else printed.out) == ""
        return status, printed.out + printed.err


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Machine:
    """A Debian with every program."""
    made = Machine(tmp_path, monkeypatch, capsys)
    made.os_release.write_text('PRETTY_NAME="Debian"\nVERSION_ID="12"\nID=debian\n')
    made.add(*PROGRAMS, "apt-get")
    return made


@pytest.fixture
def bare(machine: Machine) -> Machine:
    """A Debian with Python and apt-get only."""
    machine.remove(*PROGRAMS)
    machine.libraries.clear()
    return machine


def lacked(output: str) -> dict[str, str]:
    """Returns the names of the missing requirements, each with the commands that need it."""
    return dict(re.findall(r"^  (.+?): .+ \(needed for (.+?)\)", output, re.MULTILINE))


def test_old_versions_of_python_can_read_the_script() -> None:
    """The script, and the script of the build that it imports, have the syntax of Python 3.6."""
    for path in (SCRIPT, ROOT / "build" / "jar.py"):
        tree = ast.parse(path.read_text(), feature_version=(3, 6))
        assert not [one for one in ast.walk(tree) if isinstance(one, ast.ImportFrom) and one.module == "__future__"]


def test_everything_that_is_missing_is_in_one_message(bare: Machine) -> None:
    """Each missing requirement is named with the commands that need it, and one line installs all of them."""
    status, output = bare.check()
    assert status == 1
    assert lacked(output) == {
        "make": "`make demo` and `make test`",
        "a JDK 17 or newer (a JRE has no compiler)": "`make demo` and `make test`",
        "git": "`make test`",
        "ps": "`make test`",
        "Maven or sbt": "`make test`",
        "PostgreSQL's server (initdb)": "`make test`",
        "Chromium or Google Chrome (not a snap)": "`make test`",
        "libatomic": "`make test`",
        "bubblewrap": "`make test`",
    }
    assert output.endswith(
        "To install, run this line or `./bootstrap`:\n  apt-get update && apt-get install -y --no-install-recommends "
        "make default-jdk-headless git procps maven postgresql chromium libatomic1 bubblewrap\n"
    )


def test_a_target_needs_only_its_own_requirements(bare: Machine) -> None:
    """`--for` names what these targets need. Every target, also a file, needs what builds the jar."""
    base = {"make", "a JDK 17 or newer (a JRE has no compiler)"}
    needs = {
        "demo": base,
        "build/.stamps/jar": base,
        "check": base | {"git", "ps"},
        "test-jvm": base | {"Maven or sbt"},
        "bench": base | {"git", "Maven or sbt", "PostgreSQL's server (initdb)"},
    }
    for target, wanted in needs.items():
        status, output = bare.check("--for", target)
        assert (status, set(lacked(output))) == (1, wanted), target
        assert f"or `./bootstrap --for {target}`:" in output
    both = lacked(bare.check("--for", "check", "test-jvm")[1])
    assert both["make"] == "`make check` and `make test-jvm`"
    assert both["Maven or sbt"] == "`make test-jvm`"
    if sys.platform == "linux" and os.getuid() == 0:
        assert {"debootstrap", "ip (iproute2)"} <= set(lacked(bare.check("--for", "test-long")[1]))


def test_every_target_of_a_requirement_exists() -> None:
    """The Makefile has each target that `bootstrap` knows."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for requirement in bootstrap.REQUIREMENTS.values():
        assert set(requirement.targets or ()) <= targets, requirement.name


def test_what_was_found_is_listed(machine: Machine) -> None:
    """If nothing is missing, the exit status is 0 and each requirement is listed with its path. No program is run."""
    status, output = machine.check()
    assert status == 0
    assert f"Maven or sbt: {machine.programs}/mvn" in output
    assert f"a JDK 17 or newer (a JRE has no compiler): {machine.programs}/javac" in output
    assert len(output.splitlines()) == 11
    assert machine.check("--for", "test-long")[0] == 0


@pytest.mark.parametrize("version", ["11.0.2", "1.8.0_392"])
def test_an_old_jdk_is_missing(machine: Machine, version: str) -> None:
    """The message names the version that was found."""
    machine.set_java(version)
    status, output = machine.check("--for", "demo")
    assert status == 1
    assert f"{machine.programs}/java is version {version}" in output
    assert "default-jdk-headless" in output


def test_a_jdk_can_be_too_new_for_the_older_versions_of_spark(machine: Machine) -> None:
    """Only the targets that run Spark 4.0 or 4.1 need an older JDK. Installing one would not change the PATH."""
    assert set(NEWEST_JAVA.values()) == {bootstrap.NEWEST_JAVA}
    machine.set_java("25.0.5")
    assert machine.check("--for", "test")[0] == 0
    status, output = machine.check("--for", "test", "test-matrix")
    assert status == 1
    assert lacked(output) == {"a JDK 17 to 21 (Spark 4.0 and 4.1 support no newer one)": "`make test-matrix`"}
    assert f"{machine.programs}/javac is version 25.0.5; set JAVA_HOME to a JDK 21 (package " in output
    assert "install" not in output


@pytest.mark.parametrize(
    ("system", "package"),
    [
        ("ID=debian\nVERSION_ID=11", "openjdk-17-jdk-headless"),
        ("ID=debian\nVERSION_ID=13", "default-jdk-headless"),
        ("ID=debian", "openjdk-21-jdk-headless"),
        ("ID=ubuntu\nVERSION_ID=26.04", "openjdk-21-jdk-headless"),
        ("ID=derivative\nVERSION_ID=7", "default-jdk-headless"),
    ],
)
def test_the_tests_of_all_versions_of_spark_need_only_one_jdk(bare: Machine, system: str, package: str) -> None:
    """Without a JDK, the line installs one that all versions of Spark support."""
    bare.add("apt-get")
    bare.os_release.write_text(system)
    output = bare.check("--for", "test", "test-matrix")[1]
    assert re.findall(r" (\S*jdk\S*)", output.splitlines()[-1]) == [package]


def test_a_jre_is_no_jdk(machine: Machine) -> None:
    """Java without a compiler does not suffice, because the build compiles the jar."""
    machine.remove("javac")
    status, output = machine.check("--for", "demo")
    assert status == 1
    assert "the PATH has no javac" in output


def test_java_home_has_precedence(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The JDK in JAVA_HOME is checked, not the one on the PATH. To install another one would not help."""
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    status, output = machine.check("--for", "demo")
    assert status == 1
    assert "JAVA_HOME=/nowhere has no java and no javac; correct JAVA_HOME, or unset it" in output
    assert "install" not in output
    monkeypatch.setenv("JAVA_HOME", str(machine.folder / "jdk"))
    monkeypatch.setenv("PATH", "/nowhere")
    assert "JDK" not in machine.check("--for", "demo")[1]


def test_a_jdk_without_a_release_file_is_asked_for_its_version(machine: Machine) -> None:
    """A shim of a version manager is a script outside the JDK's folder."""
    (machine.folder / "jdk" / "release").unlink()
    for version, status in ("17.0.9", 0), ("11.0.9", 1):
        machine.add("java", text=f"#!/bin/sh\necho 'openjdk version \"{version}\" 2024-01-16' >&2\n")
        machine.add("javac", text=f"#!/bin/sh\necho javac {version}\n")
        assert machine.check("--for", "demo")[0] == status


def test_an_old_python_is_missing(machine: Machine) -> None:
    """The message names the version that runs the script. An old Debian has no newer one, but an old Red Hat has."""
    machine.set_python(3, 9, 2)
    status, output = machine.check("--for", "demo")
    assert status == 1
    assert f"this is Python 3.9.2 at {sys.executable}" in output
    assert output.endswith("Install by hand: Python 3.11 or newer, with venv and ensurepip.\n")
    machine.remove("apt-get")
    machine.add("dnf")
    assert machine.check("--for", "demo")[1].endswith("  dnf install -y python3.12\n")


def test_an_old_python_names_the_newer_one_that_is_installed(machine: Machine) -> None:
    """If a newer Python is on the PATH, the message says how to use it, and nothing is installed."""
    machine.set_python(3, 9, 2)
    machine.add("python3.10", "python3.12")
    status, output = machine.check("--for", "demo")
    assert status == 1
    assert "`python3.12 ./bootstrap`, and `make PYTHON=python3.12`" in output
    assert "nstall" not in output


def test_a_python_that_cannot_create_environments_is_incomplete(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian has `ensurepip` in a package of its own, for each version of Python."""
    monkeypatch.setattr(bootstrap.importlib.util, "find_spec", lambda name: None if name == "ensurepip" else object())
    machine.set_python(3, 12, 1)
    status, output = machine.check("--for", "demo")
    assert status == 1
    assert "has no module ensurepip" in output
    assert output.endswith("--no-install-recommends python3.12-venv\n")


def test_programs_that_are_not_on_the_path_are_found(machine: Machine) -> None:
    """The newest of PostgreSQL's servers is found in its own folder, and sbt's launcher where `build/sbt` keeps it."""
    machine.remove("initdb", "mvn")
    for version in (9, 15):
        programs = machine.folder / "postgresql" / str(version) / "bin"
        programs.mkdir(parents=True)
        (programs / "initdb").touch(0o755)
    assert lacked(machine.check()[1]).keys() == {"Maven or sbt"}
    version = re.search("launcher_version=(.+)", (ROOT / "build" / "sbt").read_text())
    assert version is not None
    (machine.folder / "build" / f"sbt-launch-{version[1]}.jar").touch()
    status, output = machine.check()
    assert status == 0
    assert "postgresql/15/bin/initdb" in output


@pytest.mark.parametrize(
    ("system", "manager", "line", "by_hand"),
    [
        (
            "ID=debian\nVERSION_ID=13",
            "apt-get",
            "make default-jdk-headless git procps maven postgresql chromium libatomic1 bubblewrap",
            "",
        ),
        (
            "ID=debian\nVERSION_ID=11",
            "apt-get",
            "make openjdk-17-jdk-headless git procps maven postgresql chromium libatomic1 bubblewrap",
            "",
        ),
        (
            "ID=debian",
            "apt-get",
            "make default-jdk-headless git procps maven postgresql chromium libatomic1 bubblewrap",
            "",
        ),
        (
            "ID=ubuntu\nVERSION_ID=22.04",
            "apt-get",
            "make openjdk-17-jdk-headless git procps maven postgresql libatomic1 bubblewrap",
            "Chromium",
        ),
        (
            "ID=ubuntu\nVERSION_ID=24.04",
            "apt-get",
            "make default-jdk-headless git procps maven postgresql libatomic1 bubblewrap",
            "Chromium",
        ),
        (
            "ID=fedora\nVERSION_ID=45",
            "dnf",
            "make java-devel git procps-ng maven postgresql-server chromium libatomic bubblewrap",
            "",
        ),
        (
            "ID=rhel\nVERSION_ID=9",
            "dnf",
            "make java-21-openjdk-devel git procps-ng maven postgresql-server libatomic bubblewrap",
            "Chromium",
        ),
        ("", "brew", "make temurin@21 git maven postgresql@17", "ps; Chromium"),
        ("ID=other", "", "", "make; a JDK 17 or newer (a JRE has no compiler); git; ps; Maven or sbt; Postgre"),
    ],
)
def test_packages_have_the_names_of_the_system(
    bare: Machine, system: str, manager: str, line: str, by_hand: str
) -> None:
    """The line installs the requirements for which the system has a package. The others are named."""
    bare.remove("apt-get")
    bare.add(*([manager] if manager else []))
    bare.os_release.write_text(system)
    status, output = bare.check()
    assert status == 1
    (command,) = re.findall(r"^  (\S* ?(?:update|install).*)$", output, re.MULTILINE) or [""]
    assert command.endswith(line)
    assert command.startswith(manager)
    (found,) = re.findall("^Install by hand: (.+)", output, re.MULTILINE) or [""]
    assert found.startswith(by_hand)
    assert bool(found) == bool(by_hand)


def test_the_line_uses_sudo_if_it_has_to(bare: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    """A user who is not root runs the line with sudo. Without sudo, nothing is run, and the line is for root."""
    bare.set_user(1000)
    assert "To install, run this line or `./bootstrap` as root:\n  apt-get update && apt" in bare.check()[1]
    assert bootstrap.main([]) == 1
    assert "Running" not in capsys.readouterr().err
    bare.add("sudo")
    assert "run this line or `./bootstrap`:\n  sudo apt-get update && sudo apt-get install -y" in bare.check()[1]


def run(folder: Path, *command: str | Path, path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        env={"PATH": str(path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_what_is_missing_is_installed_and_checked_again(bare: Machine) -> None:
    """The line is printed before it runs. Then everything is checked again."""
    (bare.programs / "cp").symlink_to(str(shutil.which("cp", path="/usr/bin:/bin")))
    bare.add("fake")
    install = f"""#!/bin/sh
echo "apt-get $*"
[ $1 = update ] || for name in {" ".join(PROGRAMS)}; do cp -p {bare.programs}/fake {bare.programs}/$name; done
"""
    bare.add("apt-get", text=install)
    if os.getuid() != 0:
        bare.add("sudo", text='#!/bin/sh\n"$@"\n')
    done = run(ROOT, sys.executable, SCRIPT, "--for", "demo", path=bare.programs)
    assert done.returncode == 0, done.stderr
    line = "apt-get install -y --no-install-recommends make default-jdk-headless"
    assert re.search(f"^Running: .*{line}$", done.stderr, re.MULTILINE)
    assert done.stdout.startswith(f"apt-get update\n{line}\nNothing is missing for `make demo`:\n")
    again = run(ROOT, sys.executable, SCRIPT, "--for", "demo", path=bare.programs)
    assert (again.returncode, "apt-get" in again.stdout + again.stderr) == (0, False)


def test_a_failed_installation_fails(bare: Machine) -> None:
    """The exit status is 1, and the message names the line and its status."""
    bare.add("apt-get", "sudo", text="#!/bin/sh\nexit 7\n")
    done = run(ROOT, sys.executable, SCRIPT, path=bare.programs)
    assert done.returncode == 1
    assert re.search("This line failed with status 7: .*apt-get update", done.stderr)


def test_make_names_what_is_missing_before_it_does_anything(bare: Machine) -> None:
    """`make demo` on a machine without a JDK fails with the message of `bootstrap`, and creates no environment."""
    for name in ("make", "find", "mkdir", "grep"):
        (bare.programs / name).symlink_to(str(shutil.which(name, path="/usr/bin:/bin")))
    for name in ("Makefile", "bootstrap", "build/jar.py", "build/requirements.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, bare.folder / name)
    (bare.programs / "python3").symlink_to(sys.executable)
    done = run(bare.folder, "make", "demo", path=bare.programs)
    assert done.returncode != 0
    assert lacked(done.stderr) == {"a JDK 17 or newer (a JRE has no compiler)": "`make demo`"}
    assert "./bootstrap --for demo" in done.stderr
    assert not (bare.folder / ".venv").exists()
    assert not (bare.folder / "build" / ".stamps").exists()


def test_make_uses_the_jdk_of_java_home(machine: Machine) -> None:
    """JAVA_HOME comes before the PATH, also for the programs that look only at the PATH."""
    home = machine.folder / "home"
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "java").touch(0o755)
    command = ["make", "--eval", "show: ; @command -v java", "show"]
    environment = {"PATH": f"{machine.programs}:/usr/bin:/bin", "JAVA_HOME": str(home)}
    machine.remove("make")
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"{home}/bin/java\n"
