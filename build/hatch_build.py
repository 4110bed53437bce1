"""The build hook: puts the jars into `stagecrew/jars/` of the wheel and of the sdist.

An sdist already contains them, so building from it needs neither sbt nor a JDK. In a git checkout, `make jars` builds
the jar for each supported Spark. If there is none, or if a jar is older than its sources, `build/sbt` builds one, for
the installed PySpark.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class JarHook(BuildHookInterface):
    """Builds a jar if necessary. Fails if an sdist contains no jar."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        jars = root / "python" / "stagecrew" / "jars"
        if (root / "PKG-INFO").exists():
            if not list(jars.glob("*.jar")):
                raise RuntimeError("this sdist is broken, because it contains no jar")
            return
        sources = [
            path
            for folder in (root / "jvm-shim" / "src" / "main", root / "python" / "stagecrew")
            for path in folder.rglob("*")
            if path.suffix in (".scala", ".java", ".py")
        ]
        sources.append(root / "build.sbt")
        newest = max(path.stat().st_mtime for path in sources)
        name = f"stagecrew-spark-*-{self.metadata.version}.jar"
        current = {path for path in jars.glob(name) if path.stat().st_mtime >= newest}
        for stale in set(jars.glob("*.jar")) - current:
            stale.unlink()
        if not current:
            self.app.display_info("building the jar with build/sbt")
            try:
                subprocess.run([str(root / "build" / "sbt"), "shim/package"], cwd=root, check=True)
            except (OSError, subprocess.CalledProcessError) as error:
                raise RuntimeError(
                    "the jar could not be built. It needs a JDK 17+, and sbt or mvn on the PATH, and PySpark in .venv "
                    "(`make setup` does all that)"
                ) from error
