"""build/jar.py compiles the jar with a JDK alone, or names the missing part in one sentence."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from stagecrew.spark_version import SPARK_LINES
from support.build_scripts import load_build_script
from support.checkout import copy_checkout


@pytest.fixture
def jar_build() -> ModuleType:
    """The script as a module."""
    return load_build_script("jar")


def java_home(folder: Path, javac: str) -> str:
    """Creates a JAVA_HOME whose compiler prints this version."""
    programs = folder / "jdk" / "bin"
    programs.mkdir(parents=True)
    for name in ("java", "javac"):
        (programs / name).write_text(f"#!/bin/sh\necho '{javac}'\n")
        (programs / name).chmod(0o755)
    return str(folder / "jdk")


def test_without_spark_the_error_says_what_to_install(
    jar_build: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """SPARK_HOME and the environment's packages are searched."""
    monkeypatch.delenv("SPARK_HOME", raising=False)
    monkeypatch.setattr(jar_build.sysconfig, "get_paths", lambda: {"purelib": str(tmp_path)})
    with pytest.raises(jar_build.CannotBuildError, match=r"first install the PySpark .* or set SPARK_HOME"):
        jar_build.installed_spark()
    (tmp_path / "pyspark" / "jars").mkdir(parents=True)
    assert jar_build.installed_spark() == tmp_path / "pyspark"
    (tmp_path / "home" / "jars").mkdir(parents=True)
    monkeypatch.setenv("SPARK_HOME", str(tmp_path / "home"))
    assert jar_build.installed_spark() == tmp_path / "home"


@pytest.mark.parametrize(
    ("javac", "found"),
    [
        ("javac 11.0.2", "java is version 11.0.2"),
        ("javac 1.8.0", "java is version 1.8.0"),
        ("no", "java -version` fails"),
    ],
)
def test_an_old_jdk_is_refused(
    jar_build: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, javac: str, found: str
) -> None:
    """The error names the JDK that is needed, and the one that was found."""
    monkeypatch.setenv("JAVA_HOME", java_home(tmp_path, javac))
    with pytest.raises(jar_build.CannotBuildError, match=rf"needs a JDK 17 or newer .*{found}"):
        jar_build.jdk()


def test_a_runtime_without_a_compiler_is_refused(
    jar_build: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A Java runtime without `javac` cannot build the jar."""
    home = java_home(tmp_path, "javac 17")
    Path(home, "bin", "javac").unlink()
    monkeypatch.setenv("JAVA_HOME", home)
    with pytest.raises(jar_build.CannotBuildError, match=f"JAVA_HOME={home} has no javac$"):
        jar_build.jdk()


@pytest.mark.parametrize("core", ["spark-core_2.12-3.5.9.jar", "spark-core_2.13-5.0.0.jar"])
def test_another_version_of_spark_is_refused(jar_build: ModuleType, tmp_path: Path, core: str) -> None:
    """The error names the supported versions and the one that was found."""
    (tmp_path / "jars").mkdir()
    with pytest.raises(jar_build.CannotBuildError, match="neither a PySpark nor a SPARK_HOME"):
        jar_build.spark_jars(tmp_path)
    (tmp_path / "jars" / core).touch()
    with pytest.raises(jar_build.CannotBuildError, match=r"supports Spark 4\.0 to 4\.3, and .* has Spark [35]\.\d"):
        jar_build.spark_line(jar_build.spark_jars(tmp_path))


def test_there_is_a_compatibility_file_for_each_supported_version(jar_build: ModuleType) -> None:
    """Each folder `scala-4.x` has exactly one file, and its version is the folder's."""
    folders = sorted(jar_build.MAIN.glob("scala-*"))
    assert tuple(folder.name.removeprefix("scala-") for folder in folders) == SPARK_LINES
    for folder, line in zip(folders, SPARK_LINES, strict=True):
        (file,) = (path for path in folder.rglob("*") if path.is_file())
        assert file.name == "SparkVersion.scala"
        assert f'val Line = "{line}"' in file.read_text()


@pytest.mark.slow
def test_pip_names_the_missing_part_before_it_downloads_anything(tmp_path: Path) -> None:
    """Without PySpark or a JDK, a build from the sources ends with one sentence, after at most five seconds of CPU time.

    pip has no access to an index here.
    """
    sources, environment = tmp_path / "sources", tmp_path / "environment"
    copy_checkout(sources)
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)

    def pip(**variables: str) -> str:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [environment / "bin/python", "-m", "pip", "install", "--no-index", "--no-deps", str(sources)],
            env={key: value for key, value in os.environ.items() if key != "SPARK_HOME"} | variables,
            capture_output=True, text=True,
        )  # fmt: skip
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5
        assert done.returncode != 0
        return done.stdout + done.stderr

    assert pip().count("first install the PySpark that will run it") == 1
    spark = tmp_path / "spark"
    (spark / "jars").mkdir(parents=True)
    (spark / "jars" / f"spark-core_2.13-{SPARK_LINES[0]}.0.jar").touch()
    without_jdk = pip(SPARK_HOME=str(spark), JAVA_HOME="/nowhere")
    assert without_jdk.count("needs a JDK 17 or newer") == 1
    assert "JAVA_HOME=/nowhere has no java and no javac" in without_jdk
    assert "Traceback" not in without_jdk
    assert "hatchling" in pip(SPARK_HOME=str(spark)), "with both, pip looks for hatchling"
