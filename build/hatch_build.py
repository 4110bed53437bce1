"""The build hook: puts exactly one jar into `stagecrew/jars/` of the wheel and of the sdist.

An sdist already contains the jar, so building from it needs neither sbt nor a JDK. In a git checkout, `build/sbt`
builds the jar if it is missing or older than its sources.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class JarHook(BuildHookInterface):
    """Builds the jar if necessary. Fails if an sdist does not contain exactly one jar."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        jars = root / "python" / "stagecrew" / "jars"
        if (root / "PKG-INFO").exists():
            if len(list(jars.glob("*.jar"))) != 1:
                raise RuntimeError("this sdist is broken, because it does not contain exactly one jar")
            return
        sources = [
            path
            for folder in (root / "jvm-shim" / "src" / "main", root / "python" / "stagecrew")
            for path in folder.rglob("*")
            if path.suffix in (".scala", ".java", ".py")
        ]
        sources.append(root / "build.sbt")
        newest = max(path.stat().st_mtime for path in sources)
        wanted = list(jars.glob(f"stagecrew_*-{self.metadata.version}.jar"))
        if not wanted or wanted[0].stat().st_mtime < newest:
            for stale in jars.glob("*.jar"):
                stale.unlink()
            self.app.display_info("building the jar with build/sbt")
            try:
                subprocess.run([str(root / "build" / "sbt"), "shim/package"], cwd=root, check=True)
            except (OSError, subprocess.CalledProcessError) as error:
                raise RuntimeError(
                    "the jar could not be built. It needs a JDK 17+, and sbt or mvn on the PATH, and PySpark in .venv "
                    "(`make setup` does all that)"
                ) from error
        for stale in jars.glob("*.jar"):
            if self.metadata.version not in stale.name:
                stale.unlink()
