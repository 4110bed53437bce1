"""The hooks of the build: they put the jars into `stagecrew/jars/` of wheel and sdist, and adapt the README's links.

The sdist of a release contains the jars of all supported versions of Spark, so that a wheel can be built from it
without a JDK. In a git checkout, `make jars` builds them. If none exists, or if one is older than its sources, the
hook builds the jar for the installed PySpark (`jar.py`).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

sys.path.insert(0, str(Path(__file__).parent))
import jar as jar_builder
import readme


class ReadmeHook(MetadataHookInterface):
    """Sets the project's addresses, and the README with links that work on a package index."""

    def update(self, metadata: dict[str, Any]) -> None:  # noqa: D102
        repository = self.config["repository"].rstrip("/")
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": readme.published(text, repository)}
        metadata["urls"] = readme.urls(repository)


class JarHook(BuildHookInterface):
    """Builds a jar if necessary, or fails with one sentence that names the missing part."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: D102
        found = jar_builder.current(in_sdist=Path(self.root, "PKG-INFO").exists())
        for stale in set(jar_builder.JARS.glob("*.jar")) - found:
            stale.unlink()
        if found:
            return
        try:
            jar_builder.build(jar_builder.installed_spark())
        except jar_builder.CannotBuildError as error:
            sys.exit(f"\n{error}.\n")  # an exception would be shown with a long traceback
        except subprocess.CalledProcessError as error:
            sys.exit(f"\nthe compiler failed with status {error.returncode}; its messages are above.\n")
