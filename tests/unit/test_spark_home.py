"""The SPARK_HOME of the tests, over a small installation of PySpark."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

import compile_zip
from support import spark_home


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The folder of a PySpark with one module, which the SPARK_HOME links to."""
    folder = tmp_path / "pyspark"
    for name in ("bin", "jars", "sbin", "python/pyspark", "python/lib"):
        (folder / name).mkdir(parents=True)
    _write_zip(folder, "a = 1")
    monkeypatch.setattr(spark_home, "HOME", tmp_path / "home")
    monkeypatch.setattr(compile_zip, "HOME", tmp_path / "home")
    for module in (spark_home, compile_zip):
        monkeypatch.setattr(module, "installed_pyspark", lambda: folder)
    return folder


def _write_zip(folder: Path, source: str) -> None:
    with zipfile.ZipFile(folder / "python" / "lib" / "pyspark.zip", "w") as archive:
        archive.writestr("pyspark/__init__.py", source)


def test_spark_writes_beside_the_links(installed):
    """A file in the SPARK_HOME is not in the installation, and the SPARK_HOME has the programs and jars of PySpark."""
    home = Path(spark_home.spark_home())
    (home / "work").mkdir()
    assert not (installed / "work").exists()
    (installed / "jars" / "a.jar").touch()
    assert (home / "jars" / "a.jar").exists()
    assert spark_home.spark_home() == str(home)
    assert sorted(path.name for path in home.iterdir()) == ["bin", "jars", "python", "sbin", "work"]


def test_the_compiled_zip_belongs_to_one_installation(installed):
    """compile_zip.py changes the archive of the SPARK_HOME only. Another PySpark replaces the compiled archive."""
    source = installed / "python" / "lib" / "pyspark.zip"
    before = source.read_bytes()
    compile_zip.main()
    assert source.read_bytes() == before
    archive = Path(spark_home.spark_home()) / "python" / "lib" / "pyspark.zip"
    assert zipfile.ZipFile(archive).namelist() == ["pyspark/__init__.py", "pyspark/__init__.pyc"]
    _write_zip(installed, "a = 2")
    os.utime(source, (1, 1))
    spark_home.spark_home()
    assert archive.read_bytes() == source.read_bytes()


def test_a_file_in_the_installation_is_reported(installed):
    """A folder that a test adds to the installation fails the run. A bytecode cache does not."""
    with spark_home.unchanged_installation():
        (installed / "__pycache__").mkdir()
        (installed / "__pycache__" / "a.pyc").touch()
    with pytest.raises(AssertionError, match="/pyspark/work"), spark_home.unchanged_installation():
        (installed / "work").mkdir()
