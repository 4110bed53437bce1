"""The SPARK_HOME of the tests, here created for a fake installation of PySpark."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

import compile_zip
from support import spark_home


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The folder of a fake PySpark with one module, to which the SPARK_HOME links."""
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


def test_files_in_the_spark_home_are_not_in_the_installation(installed):
    """The SPARK_HOME contains links to the programs and jars of PySpark. Other files in it do not appear in the
    installation."""
    home = Path(spark_home.spark_home())
    (home / "work").mkdir()
    assert not (installed / "work").exists()
    (installed / "jars" / "a.jar").touch()
    assert (home / "jars" / "a.jar").exists()
    assert spark_home.spark_home() == str(home)
    assert sorted(path.name for path in home.iterdir()) == ["bin", "jars", "python", "sbin", "work"]


def test_the_compiled_zip_belongs_to_one_installation(installed):
    """compile_zip.py changes only the zip of the SPARK_HOME, not that of PySpark. When another PySpark is installed,
    its zip replaces the compiled one."""
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
    """A folder that a test adds to the installation fails the test run, except for a bytecode cache."""
    with spark_home.unchanged_installation():
        (installed / "__pycache__").mkdir()
        (installed / "__pycache__" / "a.pyc").touch()
    with pytest.raises(AssertionError, match="/pyspark/work"), spark_home.unchanged_installation():
        (installed / "work").mkdir()
