"""The wheel of a release, installed with one Spark into an environment that contains nothing else."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from support.checkout import ROOT
from support.sessions import QUICK_JVM_OPTIONS

__all__ = ["Installed", "artifact"]


def artifact(pattern: str) -> Path:
    """Returns the only file in `dist` with this name."""
    found = list((ROOT / "dist").glob(pattern))
    assert len(found) == 1, f"call `make wheel`; dist has {found or 'no such file'}"
    return found[0]


class Installed:
    """An environment with the wheel and one Spark, and an empty working folder."""

    #: The extras of the wheel, and other packages.
    extras, packages = "[spark,demo]", ()

    def __init__(self, folder: Path, line: str) -> None:
        self.line = line
        self.programs = folder / "environment" / "bin"
        self.work = folder / "work"
        self.work.mkdir()
        kept = {key: value for key, value in os.environ.items() if not re.match("SPARK_|PYSPARK_|PYTHON|_JAVA", key)}
        path = f"{self.programs}{os.pathsep}{os.environ['PATH']}"
        self.environment = kept | {"PATH": path, "_JAVA_OPTIONS": QUICK_JVM_OPTIONS}
        uv = str(Path(sys.executable).with_name("uv"))
        self.run(uv, "venv", "--quiet", "--python", sys.executable, str(self.programs.parent))
        packages = [f"{artifact('*.whl')}{self.extras}", f"pyspark~={line}.0", *self.packages]
        install = [uv, "pip", "install", "--quiet", "--python", str(self.programs / "python"), *packages]
        # `make` has installed the same PySpark, so uv has it in its cache.
        if subprocess.run([*install, "--offline"], capture_output=True, env=self.environment).returncode != 0:
            self.run(*install)

    def run(self, *command: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Runs a command in the working folder, and checks its exit code."""
        done = subprocess.run(
            command, cwd=self.work, env=self.environment, capture_output=True, text=True, timeout=600,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == code, f"{command}\n{done.stdout[-8000:]}\n{done.stderr[-8000:]}"
        return done

    def copy(self, *paths: str) -> None:
        """Copies files of the checkout into the working folder."""
        for path in paths:
            shutil.copy(ROOT / path, self.work)

    @property
    def spark_home(self) -> Path:
        """The folder of the installed PySpark."""
        (home,) = self.programs.parent.glob("lib/python3*/site-packages/pyspark")
        return home

    @property
    def jar(self) -> str:
        """The path of stagecrew's jar for this Spark."""
        return self.run("stagecrew", "jar").stdout.strip()
