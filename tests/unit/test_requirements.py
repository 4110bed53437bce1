"""The locked versions of development agree with the requirements in pyproject.toml."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from stagecrew import doctor
from stagecrew.spark_version import SPARK_LINES, line_of

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
MAKEFILE = (ROOT / "Makefile").read_text()


def group(name: str) -> list[Requirement]:
    """Returns the requirements of a dependency group and of the groups that it includes."""
    found = []
    for entry in PROJECT["dependency-groups"][name]:
        found += group(entry["include-group"]) if isinstance(entry, dict) else [Requirement(entry)]
    return found


def requirements() -> list[Requirement]:
    """Returns every requirement of the package, of its extras and of its developers, except PySpark."""
    project = PROJECT["project"]
    declared = [
        *project["dependencies"],
        *(one for extra in project["optional-dependencies"].values() for one in extra),
    ]
    found = [*map(Requirement, declared), *group("dev")]
    return [one for one in found if one.name != "pyspark"]


def locked() -> dict[str, str]:
    """Returns the locked versions for this Python and platform, by name."""
    lines = (
        Requirement(line) for line in (ROOT / "build" / "requirements.txt").read_text().splitlines() if line[0] != "#"
    )
    return {
        canonicalize_name(one.name): str(one.specifier).removeprefix("==")
        for one in lines
        if one.marker is None or one.marker.evaluate()
    }


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_the_locked_version_satisfies_the_requirement(requirement: Requirement) -> None:
    """`make lock` was called after the last change of a requirement."""
    version = locked().get(canonicalize_name(requirement.name))
    assert version is not None, f"{requirement} is not in build/requirements.txt: call `make lock`"
    assert requirement.specifier.contains(version), f"{version} is locked, {requirement} is required: call `make lock`"


def test_each_supported_spark_is_tested_and_can_be_installed_with_the_extra() -> None:
    """The Makefile names one PySpark of each supported minor version, and the extra `spark` accepts it."""
    newest, others = (re.search(rf"^{name} := (.+)$", MAKEFILE, re.MULTILINE) for name in ("SPARK", "OTHER_SPARKS"))
    assert newest is not None
    assert others is not None
    versions = [newest[1], *others[1].split()]
    assert [line_of(version) for version in versions] == list(reversed(SPARK_LINES))
    (extra,) = (
        one for one in map(Requirement, PROJECT["project"]["optional-dependencies"]["spark"]) if one.name == "pyspark"
    )
    assert all(extra.specifier.contains(version) for version in versions)
    assert not extra.specifier.contains("3.5.9")


def test_doctor_requires_the_pandas_of_the_package() -> None:
    """The remedies of `doctor`, of the build and of the Dockerfile install the pandas that the package requires."""
    assert doctor.PANDAS in PROJECT["project"]["optional-dependencies"]["spark"]
    for path in ("build/jar.py", "conf/kubernetes/Dockerfile"):
        assert f"'{doctor.PANDAS}'" in (ROOT / path).read_text(), path


def test_make_ignores_the_spark_of_the_user() -> None:
    """A SPARK_HOME of the user does not decide for which Spark a target builds the jar."""
    command = ["make", "-s", "--eval", 'show: ; @echo "[$$SPARK_HOME$$PYSPARK_PYTHON$$PYSPARK_DRIVER_PYTHON]"', "show"]
    names = ("SPARK_HOME", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON")
    environment = os.environ | dict.fromkeys(names, "/nowhere")
    for name in ("MAKEFLAGS", "MAKELEVEL"):  # flags of the outer make may print its folder last
        environment.pop(name, None)
    printed = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout
    assert printed.splitlines()[-1] == "[]"
