"""The SPARK_HOME of the tests: links to the installed PySpark, and folders that Spark can write into.

Spark writes into its SPARK_HOME. For example, with a local-cluster master, Workers create the folders of their
executors in `work`. Without a separate SPARK_HOME for tests, `work` would be a folder in site-packages.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

__all__ = [
    "ARCHIVE",
    "HOME",
    "PYSPARK_ZIP",
    "installed_pyspark",
    "spark_home",
    "unchanged_installation",
    "use_spark_home",
]

#: One folder for all test processes with this version of PySpark.
HOME = Path(__file__).parents[2] / "build" / "spark-home" / importlib.metadata.version("pyspark")

#: Where `make` puts the archive of Spark's classes. See archive_classes.py.
ARCHIVE = HOME / "classes.jsa"

#: The archive from which Python workers import PySpark, relative to a SPARK_HOME.
PYSPARK_ZIP = Path("python", "lib", "pyspark.zip")


def installed_pyspark() -> Path:
    """Returns the folder of the installed PySpark, without importing it."""
    spec = importlib.util.find_spec("pyspark")
    assert spec is not None, "the tests need PySpark"
    assert spec.origin is not None
    return Path(spec.origin).parent


def spark_home() -> str:
    """Creates or updates the SPARK_HOME of the tests, and returns its path. Processes can call this concurrently."""
    installed = installed_pyspark()
    for name in ("bin", "jars", "sbin", "python/pyspark"):
        _link(HOME / name, installed / name)
    for archive in (installed / PYSPARK_ZIP.parent).glob("*.zip"):
        link = HOME / PYSPARK_ZIP.parent / archive.name
        if not _is_compiled(link, archive):
            _link(link, archive)
    return str(HOME)


def use_spark_home() -> None:
    """Makes this process, and all processes that it starts, use the SPARK_HOME of the tests."""
    os.environ["SPARK_HOME"] = spark_home()


@contextlib.contextmanager
def unchanged_installation() -> Iterator[None]:
    """Fails if the block adds a file or folder to the installed PySpark. Python's bytecode caches are ignored."""
    before = _files(installed_pyspark())
    yield
    added = sorted(_files(installed_pyspark()) - before)
    assert not added, (
        f"the tests wrote into the installed PySpark: {', '.join(added[:5])}. Start Spark with the SPARK_HOME of "
        f"support.spark_home, and delete these {len(added)} files and folders"
    )


def _is_compiled(path: Path, source: Path) -> bool:
    """Returns whether compile_zip.py wrote this archive from this source."""
    return path.is_file() and not path.is_symlink() and path.stat().st_mtime_ns == source.stat().st_mtime_ns


def _link(link: Path, target: Path) -> None:
    if link.is_symlink() and link.readlink() == target:
        return
    link.parent.mkdir(parents=True, exist_ok=True)
    new = link.with_name(f"{link.name}.{uuid.uuid4().hex}")
    new.symlink_to(target)
    new.replace(link)  # atomic, unlike deleting the old link first


def _files(root: Path) -> set[str]:
    found = set()
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name != "__pycache__"]
        found.update(os.path.join(folder, name) for name in (*folders, *files))
    return found
