"""On a fresh Debian, `./bootstrap` and then `make` are enough, with the oldest and with the newest supported Python.

debootstrap makes a minimal Debian in a folder, and commands run in it with chroot. The Debian has the release of the
host, or one with a newer Python. It uses the package mirror of the host, which apt knows. pip uses the host's pip
configuration: its file, and the variables that start with PIP_. Proxies and certificates are those of the host too. The
folder takes 10 GB.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from stagecrew.spark_version import NEWEST_JAVA, NEWEST_PYTHON, line_of
from support.checkout import copy_checkout
from support.waiting import eventually

CHECKOUT = "/root/stagecrew"

NEWEST = "3.14"

#: The newest versions of Python that some Spark supports, and the release of Debian that has each.
RELEASES = {NEWEST: "forky", "3.13": "trixie"}

#: Selects a JDK that all versions of Spark support. The default JDK of forky is 25.
JAVA_21 = "JAVA_HOME=$(echo /usr/lib/jvm/java-21-openjdk-*)"

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can use chroot"),
    pytest.mark.skipif(
        not Path("/etc/debian_version").exists() or platform.freedesktop_os_release()["ID"] != "debian",
        reason="the packages come from the mirror of a host that runs Debian",
    ),
]

#: Runs a command as root of the Debian in the folder $0. The mounts are visible only to the processes of this command,
#: so they are gone when it ends, even if it is killed. So are the daemons that the installed packages started.
NAMESPACE = ("unshare", "--mount", "--pid", "--fork", "--kill-child")
IN_CHROOT = 'mount -t proc proc "$0/proc" && mount --rbind /dev "$0/dev" && cd "$0" && exec chroot "$0" "$@"'


def mirror_lines() -> list[str]:
    """Returns the lines of sources.list for the host's release, from the host's settings, in whatever format they are.

    The first one is the release itself. Repositories of other projects are left out.
    """
    release = platform.freedesktop_os_release()["VERSION_CODENAME"]
    targets = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE) $(COMPONENT)", "Created-By: Packages"],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    suites = (release, f"{release}-updates", f"{release}-security")
    found = {tuple(line.split()) for line in targets.splitlines()}
    return [f"deb {uri} {suite} main" for suite in suites for uri, one, part in found if (one, part) == (suite, "main")]


def copy_into(root: Path, *paths: str) -> None:
    """Copies these files and folders of the host, if they exist, to the same place in the Debian."""
    for path in paths:
        target = root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        if os.path.isdir(path):
            shutil.copytree(path, target, dirs_exist_ok=True)
        elif os.path.exists(path):
            shutil.copy(path, target)


class Debian:
    """A minimal Debian with Python, in this folder. By default it has the release of the host."""

    def __init__(self, root: Path, release: str = "") -> None:
        self.root = root
        lines = mirror_lines()
        _, uri, host_release, _ = lines[0].split()
        if release:
            lines = [f"deb {uri} {release} main"]
        # The host's debootstrap may be older than a release, and then has no script for it.
        script = ["/usr/share/debootstrap/scripts/sid"] if release else []
        made = subprocess.run(
            [*NAMESPACE, "debootstrap", "--variant=minbase", "--include=python3", release or host_release, root, uri,
             *script],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert made.returncode == 0, made.stdout[-5000:]
        (root / "etc/apt/sources.list").write_text("\n".join(lines) + "\n")
        copy_into(
            root, "/etc/resolv.conf", "/etc/hosts", "/etc/pip.conf", "/etc/apt/apt.conf.d", "/etc/apt/auth.conf.d",
            "/usr/local/share/ca-certificates", os.environ.get("PIP_CONFIG_FILE", ""), os.environ.get("PIP_FIND_LINKS", ""),
        )  # fmt: skip
        self.environment = {
            name: value for name, value in os.environ.items()
            if name.lower().endswith("_proxy") or (name.startswith("PIP_") and name not in ("PIP_CERT", "PIP_CACHE_DIR"))
        }  # fmt: skip
        # Debian's package of certificates replaces its file, so the host's own is in another place.
        certificates = os.environ.get("PIP_CERT", "/etc/ssl/certs/ca-certificates.crt")
        if os.path.exists(certificates):
            shutil.copy(certificates, root / "etc/host-certificates.crt")
            self.environment |= dict.fromkeys(("PIP_CERT", "SSL_CERT_FILE"), "/etc/host-certificates.crt")
        copy_checkout(root / CHECKOUT.lstrip("/"))

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        """Runs a command line in the checkout, without input."""
        variables = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8"} | self.environment
        return subprocess.run(
            [*NAMESPACE, "sh", "-c", IN_CHROOT, self.root, "sh", "-c", f"cd {CHECKOUT} && {command}"],
            env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        )  # fmt: skip


@pytest.fixture
def debian(request: pytest.FixtureRequest) -> Iterator[Debian]:
    """A fresh Debian. It is deleted at the end. The parameter is its release."""
    free = shutil.disk_usage(tempfile.gettempdir()).free
    assert free > 10e9, f"{tempfile.gettempdir()} has {free / 1e9:.1f} GB of free space, and a fresh Debian takes 10 GB"
    folder = Path(tempfile.mkdtemp(prefix="stagecrew-debian-"))
    try:
        yield Debian(folder / "root", getattr(request, "param", ""))
    finally:
        # After a failure the processes in the Debian may be ending.
        eventually(
            lambda: shutil.rmtree(folder, ignore_errors=True) or not folder.exists(), what=f"{folder} is deleted"
        )
        assert str(folder) not in Path("/proc/self/mountinfo").read_text()


def test_bootstrap_and_make_demo_are_enough(debian: Debian) -> None:
    """`./bootstrap --check` names everything that is missing, `./bootstrap` installs it, and `make demo` then runs."""
    check = debian.run("./bootstrap --check")
    assert check.returncode == 1
    missing = re.findall(r"^  (.+?): .+ \(needed for ", check.stderr, re.MULTILINE)
    assert missing == [
        "make", "Python 3.11 or newer, with venv and ensurepip", "a JDK 17 or newer (a JRE has no compiler)", "git", "ps",
        "Maven or sbt", "PostgreSQL's server (initdb)", "Chromium or Google Chrome (not a snap)", "libatomic",
        "bubblewrap",
    ]  # fmt: skip
    line = check.stderr.splitlines()[-1].strip()

    installed = debian.run("./bootstrap")
    assert installed.returncode == 0, installed.stdout[-5000:] + installed.stderr[-5000:]
    assert f"Running: {line}" in installed.stderr
    assert "Nothing is missing for `make demo` and `make test`:" in installed.stdout
    check = debian.run("./bootstrap --check")
    assert (check.returncode, check.stderr) == (0, "")

    demo = debian.run("make demo")
    print(demo.stdout[-20000:], demo.stderr[-20000:])
    assert demo.returncode == 0
    assert "Both enrichments returned the same 336,776 rows" in demo.stdout
    assert (debian.root / CHECKOUT.lstrip("/") / "demo-output" / "flights").is_dir()


def newest_python(pyspark: Path) -> str:
    """Returns the newest version of Python that this distribution of PySpark (its .dist-info) says it supports."""
    metadata = (pyspark / "METADATA").read_text()
    minors = re.findall(r"^Classifier: Programming Language :: Python :: 3\.(\d+)$", metadata, re.MULTILINE)
    return f"3.{max(map(int, minors))}"


@pytest.mark.timeout(5400)
@pytest.mark.parametrize(("python", "debian"), RELEASES.items(), indirect=["debian"])
def test_each_spark_runs_the_contract_tests_with_its_newest_python(debian: Debian, python: str) -> None:
    """The newest Python that PySpark says it supports runs the contract tests; the newest of all also the unit tests."""

    def run(command: str) -> None:
        done = debian.run(command)
        print(done.stdout[-20000:], done.stderr[-20000:])
        assert done.returncode == 0, command

    run("./bootstrap && apt-get install -y --no-install-recommends openjdk-21-jdk-headless")
    assert debian.run("python3 --version").stdout.startswith(f"Python {python}.")
    run("make jars")
    build = debian.root / CHECKOUT.lstrip("/") / "build"
    packages = build.glob("spark-[0-9]*/lib/python3*/site-packages/pyspark-*.dist-info")
    newest = {
        package.relative_to(build).parts[0].removeprefix("spark-"): newest_python(package) for package in packages
    }
    assert python in newest.values(), newest
    if python == NEWEST:
        known = {line: ".".join(map(str, version)) for line, version in NEWEST_PYTHON.items()}
        assert newest == {spark: known.get(line_of(spark), NEWEST) for spark in newest}
        run("make test-unit build/.stamps/classes build/.stamps/hadoop")
        run(".venv/bin/pytest -q tests -m matrix -n 2 --dist loadfile")
    for spark, version in newest.items():
        if version == python:
            run(f"{JAVA_21 if line_of(spark) in NEWEST_JAVA else ''} make contract-{spark}")
