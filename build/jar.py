"""Builds the jar of stagecrew for one version of Spark: `python build/jar.py [FOLDER]`.

FOLDER is an installed PySpark, or a SPARK_HOME; the default is SPARK_HOME, or else the PySpark of this environment.
The build needs only a JDK, because Spark's jars contain the Scala compiler. The same sources give the same bytes.
"""

# `bootstrap` imports this file, also with old versions of Python. So importing it needs only the syntax of Python 3.6.

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAIN = ROOT / "jvm-shim" / "src" / "main"
PACKAGE = ROOT / "python" / "stagecrew"
JARS = PACKAGE / "jars"
EXAMPLES = PACKAGE / "examples"

SCALA_OPTIONS = (
    "-release:17", "-deprecation", "-feature", "-unchecked", "-Xlint", "-Wunused", "-Wdead-code", "-Werror",
)  # fmt: skip
JAVA_OPTIONS = ("--release", "17", "-Xlint:all,-path", "-Werror")  # Spark's jars refer to jars that it does not have
OLDEST_JAVA = 17


class CannotBuildError(Exception):
    """The jar cannot be built here. The message names the missing part, in one sentence."""


def version() -> str:
    """Returns the version of the package."""
    found = re.search('__version__ = "(.+)"', (PACKAGE / "_version.py").read_text())
    assert found is not None
    return found[1]


def spark_jars(folder: Path) -> Path:
    """Returns the folder with Spark's jars in an installed PySpark or a SPARK_HOME."""
    if not list(folder.glob("jars/spark-core_*.jar")):
        raise CannotBuildError(f"{folder} has no jars/spark-core_*.jar, so it is neither a PySpark nor a SPARK_HOME")
    return folder / "jars"


def installed_spark() -> Path:
    """Returns SPARK_HOME, or else the folder of PySpark in this environment."""
    # pip hides the environment's packages while it builds, but the path of their folder stays the same.
    for folder in (os.environ.get("SPARK_HOME"), Path(sysconfig.get_paths()["purelib"], "pyspark")):
        if folder and Path(folder, "jars").is_dir():
            return Path(folder)
    raise CannotBuildError(
        "to build stagecrew from its sources, first install the PySpark that will run it "
        "(`pip install 'pyspark[sql]~=4.3.0' 'pandas>=2.2.2,<3'`), or set SPARK_HOME; the build compiles against "
        "Spark's jars"
    )


def spark_line(jars: Path) -> str:
    """Returns the version of Spark in this folder, as major.minor."""
    (core,) = jars.glob("spark-core_*.jar")
    found = re.fullmatch(r"spark-core_[\d.]+-(\d+\.\d+)\..+\.jar", core.name)
    line = found[1] if found else core.name
    if not (MAIN / f"scala-{line}").is_dir():
        lines = sorted(path.name.removeprefix("scala-") for path in MAIN.glob("scala-*"))
        raise CannotBuildError(f"stagecrew supports Spark {lines[0]} to {lines[-1]}, and {jars} has Spark {line}")
    return line


def find_jdk() -> "tuple[str, str]":
    """Returns the commands `java` and `javac` of a JDK that is new enough. LookupError names the problem."""
    home = os.environ.get("JAVA_HOME")
    commands = [str(Path(home, "bin", name)) if home else shutil.which(name) for name in ("java", "javac")]
    absent = [name for name, path in zip(("java", "javac"), commands) if path is None or not Path(path).exists()]
    if absent:
        raise LookupError(f"{f'JAVA_HOME={home}' if home else 'the PATH'} has no {' and no '.join(absent)}")
    java, javac = map(str, commands)
    for command in (java, javac):
        version = java_version(command)
        if java_number(version) < OLDEST_JAVA:
            raise LookupError(f"{command} is version {version}" if version else f"`{command} -version` fails")
    return java, javac


def java_version(command: str) -> str:
    """Returns the version of this `java` or `javac`, or "" if it is broken."""
    release = Path(command).resolve().parents[1] / "release"
    if release.is_file():  # to start a JVM can take a second
        found = re.search('JAVA_VERSION="(.+)"', release.read_text())
    else:
        printed = subprocess.run([command, "-version"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        found = re.search(r'(?:javac |version ")([\w.]+)', printed.stdout.decode(errors="replace"))
    return found[1] if found else ""


def java_number(version: str) -> int:
    """Returns the first number of a version of Java (for 1.8, it is 8), or 0 if it has none."""
    found = re.match(r"(?:1\.)?(\d+)", version)
    return int(found[1]) if found else 0


def jdk() -> "tuple[str, str]":
    """Returns the commands `java` and `javac` of a JDK that can compile the jar."""
    try:
        return find_jdk()
    except LookupError as error:
        wanted = f"building stagecrew's jar needs a JDK {OLDEST_JAVA} or newer (Debian: default-jdk-headless)"
        raise CannotBuildError(f"{wanted}, and {error}") from None


def sources(line: str) -> "list[Path]":
    """Returns the sources of the jar for this version of Spark."""
    folders = (MAIN / "scala", MAIN / f"scala-{line}", MAIN / "java")
    return sorted(path for folder in folders for path in folder.rglob("*") if path.suffix in (".scala", ".java"))


def modules() -> "list[Path]":
    """Returns the Python modules of the package. The examples are no modules."""
    return [path for path in PACKAGE.rglob("*.py") if EXAMPLES not in path.parents]


def compiled(line: str, jars: Path) -> Path:
    """Compiles the sources, unless this was done before. Returns the folder of the classes."""
    files = sources(line)
    digest = hashlib.sha256(repr((SCALA_OPTIONS, JAVA_OPTIONS, sorted(path.name for path in jars.iterdir()))).encode())
    for path in files:
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    target = ROOT / "jvm-shim" / "target" / line
    classes, stamp = target / "classes", target / "classes.sha256"
    if stamp.exists() and stamp.read_text() == digest.hexdigest():
        return classes
    java, javac = jdk()
    stamp.unlink(missing_ok=True)
    shutil.rmtree(classes, ignore_errors=True)
    classes.mkdir(parents=True)
    path = os.pathsep.join(map(str, sorted(jars.glob("*.jar"))))
    print(f"compiling the jar for Spark {line}", flush=True)
    scala = [java, "-Xss4m", "-Xmx1g", "-cp", path, "scala.tools.nsc.Main", "-classpath", path, "-d", str(classes)]
    subprocess.run([*scala, *SCALA_OPTIONS, *map(str, files)], check=True)
    java_files = [str(file) for file in files if file.suffix == ".java"]
    java_path = f"{classes}{os.pathsep}{path}"
    subprocess.run([javac, *JAVA_OPTIONS, "-cp", java_path, "-d", str(classes), *java_files], check=True)
    stamp.write_text(digest.hexdigest())
    return classes


def current(in_sdist: bool) -> "set[Path]":
    """Returns the jars of this version that are up to date.

    The files of an sdist have the time of its extraction, so there every jar is current.
    """
    found = set(JARS.glob(f"stagecrew-spark-*-{version()}.jar"))
    if not in_sdist:
        shim = (path for path in MAIN.rglob("*") if path.suffix in (".scala", ".java"))
        newest = max(path.stat().st_mtime for path in (*shim, *modules()))
        found = {path for path in found if path.stat().st_mtime >= newest}
    return found


def build(folder: Path) -> Path:
    """Builds the jar for the Spark in this folder, and returns its path."""
    jars = spark_jars(folder)
    line = spark_line(jars)
    classes = compiled(line, jars)
    entries = {str(path.relative_to(base)): path for base in (classes, MAIN / "resources") for path in base.rglob("*")}
    entries |= {str(path.relative_to(PACKAGE.parent)): path for path in modules()}
    entries |= {f"META-INF/{name}": ROOT / name for name in ("LICENSE", "NOTICE")}
    manifest = (
        f"Manifest-Version: 1.0\r\nImplementation-Title: stagecrew\r\nImplementation-Version: {version()}\r\n"
        f"Spark-Version: {line}\r\n\r\n"
    )
    JARS.mkdir(exist_ok=True)
    target = JARS / f"stagecrew-spark-{line}_2.13-{version()}.jar"
    new = target.with_suffix(".new")
    with zipfile.ZipFile(new, "w", zipfile.ZIP_DEFLATED) as archive:
        _write(archive, "META-INF/MANIFEST.MF", manifest.encode())
        for name, path in sorted(entries.items()):
            if path.is_file():
                _write(archive, name, path.read_bytes())
    new.replace(target)
    for other in JARS.glob(f"stagecrew*spark-{line}_*.jar"):
        if other != target:
            other.unlink()
    return target


def _write(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    entry = zipfile.ZipInfo(name)  # with a fixed time
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.external_attr = 0o644 << 16
    archive.writestr(entry, content)


if __name__ == "__main__":
    try:
        print(build(Path(sys.argv[1]) if len(sys.argv) > 1 else installed_spark()))
    except CannotBuildError as error:
        sys.exit(str(error))
    except subprocess.CalledProcessError as error:
        sys.exit(f"the compiler failed with status {error.returncode}")
