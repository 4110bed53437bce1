"""The build backend of stagecrew: hatchling, after a check for PySpark and a JDK, which build the jar.

Without PySpark or a JDK, the build ends with one sentence, before pip downloads hatchling.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import jar as jar_builder

_HATCHLING = "hatchling>=1.27"


def _requirements(*others: str) -> list[str]:
    if not jar_builder.current(in_sdist=(HERE.parent / "PKG-INFO").exists()):
        try:
            jar_builder.spark_line(jar_builder.spark_jars(jar_builder.installed_spark()))
            jar_builder.jdk()
        except jar_builder.CannotBuildError as error:
            sys.exit(f"\n{error}.\n")  # an exception would be shown with a long traceback
    return [_HATCHLING, *others]


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """Returns the packages that build a wheel."""
    return _requirements()


def get_requires_for_build_sdist(config_settings: Any = None) -> list[str]:
    """Returns the packages that build an sdist, which contains the jars too."""
    return _requirements()


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    """Returns the packages that build an editable wheel."""
    return _requirements("editables>=0.5")


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    """Builds a wheel, with hatchling."""
    import hatchling.build

    return str(hatchling.build.build_wheel(wheel_directory, config_settings, metadata_directory))


def build_editable(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    """Builds an editable wheel, with hatchling."""
    import hatchling.build

    return str(hatchling.build.build_editable(wheel_directory, config_settings, metadata_directory))


def build_sdist(sdist_directory: str, config_settings: Any = None) -> str:
    """Builds an sdist, with hatchling."""
    import hatchling.build

    return str(hatchling.build.build_sdist(sdist_directory, config_settings))


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Any = None) -> str:
    """Writes the metadata of the wheel, with hatchling."""
    import hatchling.build

    return str(hatchling.build.prepare_metadata_for_build_wheel(metadata_directory, config_settings))


def prepare_metadata_for_build_editable(metadata_directory: str, config_settings: Any = None) -> str:
    """Writes the metadata of the editable wheel, with hatchling."""
    import hatchling.build

    return str(hatchling.build.prepare_metadata_for_build_editable(metadata_directory, config_settings))
