"""`jar_path` returns the jar for the installed Spark, or for the version that it is given."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import stagecrew
from stagecrew.errors import ConfigurationError
from stagecrew.jar import joined
from stagecrew.spark_version import SPARK_LINES, installed_spark

PACKAGE = Path(stagecrew.__file__).parent


@pytest.fixture
def jars(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """An installation with a jar for each supported Spark, one of another version of stagecrew, and PySpark 4.2.1."""
    folder = tmp_path / "jars"
    folder.mkdir()
    (folder / "stagecrew-spark-4.2_2.13-0.0.1.jar").touch()
    paths = {line: folder / f"stagecrew-spark-{line}_2.13-{stagecrew.__version__}.jar" for line in SPARK_LINES}
    for path in paths.values():
        path.touch()
    monkeypatch.setattr("importlib.resources.files", lambda package: tmp_path)
    monkeypatch.setattr("pyspark.__version__", "4.2.1")
    monkeypatch.delenv("SPARK_HOME", raising=False)
    return {line: str(path) for line, path in paths.items()}


def spark_home(folder: Path, jar: str) -> str:
    """Creates a SPARK_HOME with this jar."""
    (folder / "home" / "jars").mkdir(parents=True)
    (folder / "home" / "jars" / jar).touch()
    return str(folder / "home")


def test_the_jar_of_the_installed_spark_is_chosen(jars: dict[str, str]) -> None:
    """Without an argument, it is the jar for PySpark, not that of another version of stagecrew."""
    assert stagecrew.jar_path() == jars["4.2"]


def test_spark_home_is_the_installed_spark(
    jars: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """PySpark starts the JVM of SPARK_HOME. Without Spark's jars there, PySpark decides."""
    monkeypatch.setenv("SPARK_HOME", spark_home(tmp_path, "spark-core_2.13-4.1.4.jar"))
    assert (installed_spark(), stagecrew.jar_path()) == ("4.1.4", jars["4.1"])
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    assert stagecrew.jar_path() == jars["4.2"]


@pytest.mark.parametrize("version", ["4.0", "4.0.5", "4.0.0.dev1"])
def test_the_jar_of_another_spark_can_be_named(jars: dict[str, str], version: str) -> None:
    """The argument may have two parts or more."""
    assert stagecrew.jar_path(version) == jars["4.0"]


@pytest.mark.parametrize("version", ["3.5.9", "4.4.0", "4", "x"])
def test_a_version_that_is_not_supported_is_refused(jars: dict[str, str], version: str) -> None:
    """The error names the supported versions."""
    with pytest.raises(ConfigurationError, match=rf"supports Spark 4\.0 to 4\.3, and this is Spark {version}:"):
        stagecrew.jar_path(version)


def test_a_jar_that_is_not_installed(jars: dict[str, str]) -> None:
    """The error names the jars that are installed, and how to get the others."""
    Path(jars["4.2"]).unlink()
    with pytest.raises(
        ConfigurationError, match=r"has jars for Spark 4\.0, 4\.1, 4\.3, and not for Spark 4\.2\.1: inst"
    ):
        stagecrew.jar_path()


def test_without_spark_a_single_jar_is_chosen(jars: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """If several jars are installed, the version must be named."""
    monkeypatch.delitem(sys.modules, "pyspark")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="Spark is not installed here: name its version"):
        stagecrew.jar_path()
    for line in SPARK_LINES[:-1]:
        Path(jars[line]).unlink()
    assert stagecrew.jar_path() == jars["4.3"]


@pytest.mark.parametrize("is_zip", [False, True])
def test_the_version_of_pyspark_is_found_without_importing_it(tmp_path: Path, is_zip: bool) -> None:
    """PySpark may be a folder, or a zip file as in a container of YARN."""
    path = tmp_path / "pyspark.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("pyspark/__init__.py", "raise AssertionError('imported')")
        archive.writestr("pyspark/version.py", "__version__: str = '4.1.4'\n")
    if not is_zip:
        with zipfile.ZipFile(path) as archive:
            archive.extractall(tmp_path / "folder")
        path = tmp_path / "folder"
    script = f"""
import os, sys
os.environ.pop("SPARK_HOME", None)
sys.path[:0] = [{str(path)!r}, {str(PACKAGE.parent)!r}]
from stagecrew.spark_version import installed_spark
print(installed_spark())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "4.1.4\n"


def test_a_package_in_the_jar_is_its_own_jar(tmp_path: Path) -> None:
    """If the package was imported from the jar, as with `--py-files`, `jar_path` is the path of that jar."""
    path = tmp_path / "any name.jar"
    with zipfile.ZipFile(path, "w") as archive:
        for source in PACKAGE.rglob("*.py"):
            archive.write(source, source.relative_to(PACKAGE.parent))
    script = f"import sys; sys.path.insert(0, {str(path)!r}); import stagecrew; print(stagecrew.jar_path())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == f"{path}\n"


@pytest.mark.parametrize("form", ["{link}", "file://{link}", "local://{link}", "{copy}", "file:{copy}"])
def test_the_jar_is_added_once(jars: dict[str, str], tmp_path: Path, form: str) -> None:
    """A path in an image, a link and a copy in another folder are the same jar. Spark refuses two jars with one name."""
    link, copy = tmp_path / "stagecrew.jar", tmp_path / "copies" / Path(jars["4.2"]).name
    link.symlink_to(jars["4.2"])
    copy.parent.mkdir()
    copy.touch()
    entry = form.format(link=link, copy=copy)
    assert stagecrew.spark_conf(jars=f"a.jar,{entry}")["spark.jars"] == f"a.jar,{entry}"


def test_jars_of_users_with_the_same_name_are_kept(tmp_path: Path) -> None:
    """Only copies of the stagecrew jar are one entry."""
    assert joined("x/a.jar", "y/a.jar", "local:///opt/a.jar") == "x/a.jar,y/a.jar,local:///opt/a.jar"
