"""Checks that stagecrew can run on this machine. Each failed check has a remedy."""

from __future__ import annotations

import dataclasses
import importlib
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Literal

from rich.console import Console
from rich.text import Text

from stagecrew import operating_system
from stagecrew._version import __version__
from stagecrew.errors import ConfigurationError, StagecrewError
from stagecrew.jar import installed_jars, jar_path
from stagecrew.observability.console import redirect_stderr, spark_error_line
from stagecrew.observability.error_summary import error_text
from stagecrew.spark_version import NEWEST_JAVA, NEWEST_PYTHON, SPARK_LINES, installed_spark, line_of, supported
from stagecrew.worker.graceful_shutdown import SECONDS

__all__ = ["Check", "examine", "java", "require_java", "show", "show_summary"]

Status = Literal["ok", "warning", "failed", "skipped"]

#: The oldest Java version that Spark 4 supports.
JAVA: Final = 17

#: The supported pandas, as pip reads it. The extra `spark` of the package requires the same.
PANDAS: Final = "pandas>=2.2.2,<3"

#: How long the small application waits for an executor, in seconds.
PATIENCE: Final = 60.0


@dataclasses.dataclass(frozen=True)
class Check:
    """The result of one check. `found` describes the result. `remedy` says what to do, unless `status` is `ok`."""

    name: str
    status: Status
    found: str
    remedy: str = ""

    def as_json(self) -> dict[str, str]:
        """The fields, for machines."""
        return dataclasses.asdict(self)


def examine(master: str | None) -> Iterator[Check]:
    """Runs all checks, in an order in which each follows those that it depends on. Yields each one when it is done.

    It raises nothing. If `master` is None, Spark is not started.
    """
    broken = []
    required = {"System": system, "Java": java, "PySpark": pyspark_version, "Jar": jar}
    for name, check in required.items():
        done = _run_check(name, check)
        broken += [name] * (done.status == "failed")
        yield done
    yield _run_check("pandas", pandas_version)
    yield _run_check("PyArrow", arrow_version)
    if store := os.environ.get("STAGECREW_STORE"):
        yield _run_check("Store", lambda: coordination_store(store))
    if state := os.environ.get("STAGECREW_STATE"):
        yield _run_check("State", lambda: state_storage(state))
    if master is None:
        yield Check("Spark", "skipped", "not started", "run `stagecrew doctor` without --no-spark")
    elif broken:
        yield Check("Spark", "skipped", "not started", f"first fix: {', '.join(broken)}")
    else:
        yield from spark(master)


def _run_check(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except Exception as error:
        return Check(name, "failed", f"the check failed: {error_text(error)}", "please report this as a bug")


def show(console: Console, check: Check) -> None:
    """Prints the result of a check, and its remedy below it. Lines are not wrapped, so that paths can be copied."""
    style = {"ok": "green", "warning": "yellow", "failed": "red", "skipped": "dim"}[check.status]
    found = check.found.replace("\n", f"\n{'':<18}")
    console.print(Text.assemble((f"{check.status:<8} ", style), f"{check.name:<8} {found}"), soft_wrap=True)
    if check.remedy:
        console.print(Text(f"{'':<18}-> {check.remedy}", style), soft_wrap=True)


def show_summary(console: Console, checks: list[Check]) -> None:
    """Prints whether stagecrew can run here."""
    failed = sum(check.status == "failed" for check in checks)
    warned = sum(check.status == "warning" for check in checks)
    if failed:
        console.print(Text(f"{failed} of {len(checks)} checks failed.", "red"))
    else:
        console.print(
            Text(f"stagecrew {__version__} can run here{f', with {warned} warning(s)' if warned else ''}.", "green")
        )


def system() -> Check:
    """Names the features that are lost on this operating system."""
    is_linux = platform.system() == "Linux"
    found = f"{platform.system()} {platform.release()} ({platform.machine()})"
    if not is_linux:
        found += ", on which stagecrew was not tested"
    lost = [f"- {sentence}" for sentence in _lost_features()]
    if is_linux and not lost:
        return Check("System", "ok", found)
    remedy = "mount /proc" if is_linux else "use this machine for development only"
    return Check("System", "warning", "\n".join([found, *lost]), remedy)


def _lost_features() -> Iterator[str]:
    """Yields a sentence for each feature that stagecrew cannot offer, because the operating system lacks something."""
    pid = os.getpid()
    if operating_system.takes_signal(pid, signal.SIGTERM) is None or operating_system.start_time(pid) is None:
        yield (
            "the signals that a process handles cannot be read, so a worker that Spark terminates is killed "
            "immediately: its listeners may not close, and the report then counts it as lost"
        )
    elif operating_system.max_pid() is None:
        yield (
            f"the limit of process ids cannot be read, so a worker that Spark terminates gets {SECONDS:g} s to close "
            "its listeners, even if their timeouts are longer"
        )
    if operating_system.mount_points() is None:
        yield (
            "the mount table cannot be read, so a SQLite store on a network file system is not refused, and a Parquet "
            "sink does not recognize a bind mount"
        )
    if not operating_system.knows_peer_user():
        yield (
            "the user at the other end of a Unix domain socket is unknown, so Python processes recognize their "
            "executor only by the token"
        )
    if not operating_system.fsync_reaches_disk():
        yield "fsync does not flush the disk's own cache, so a commit, a job or a state can be lost if the power fails"


def java() -> Check:
    """Checks the Java that Spark would start."""
    line = line_of(installed_spark() or "")
    newest = NEWEST_JAVA.get(line)
    install = (
        f"install Java {JAVA} or {newest}, or set JAVA_HOME to one"
        if newest is not None
        else f"install a JDK {JAVA} or newer (Debian: apt-get install default-jdk-headless), or set JAVA_HOME to one"
    )
    home = os.environ.get("JAVA_HOME")
    command = str(Path(home, "bin", "java")) if home else shutil.which("java")
    if command is None or not Path(command).exists():
        where = (
            f"JAVA_HOME is {home}, which has no bin/java" if home else "no `java` on the PATH, and JAVA_HOME is not set"
        )
        return Check("Java", "failed", where, install)
    try:
        ran = subprocess.run([command, "-version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check("Java", "failed", f"{command} cannot be run: {error}", install)
    output = ran.stderr + ran.stdout
    match = re.search(r'version "(?:1\.)?(\d+)[^"]*"', output)
    if match is None:
        return Check("Java", "failed", f"`{command} -version` prints no version (exit code {ran.returncode})", install)
    version = match[0].split('"')[1]
    if int(match[1]) < JAVA:
        return Check("Java", "failed", f"{version}, at {command}", install)
    if newest is not None and int(match[1]) > newest:
        found = (
            f"{version}, at {command}; Spark {line} supports Java {JAVA} and {newest}: in a newer Java, mapInArrow, "
            "pandas functions and operators can fail"
        )
        return Check("Java", "warning", found, f"set JAVA_HOME to Java {JAVA} or {newest}")
    return Check("Java", "ok", f"{version}, at {command}")


def require_java() -> None:
    """Raises `ConfigurationError` if Spark could not start because Java is missing or too old."""
    check = java()
    if check.status == "failed":
        raise ConfigurationError(f"Spark needs Java {JAVA} or newer: {check.found}; {check.remedy}")


def pyspark_version() -> Check:
    """Checks that stagecrew supports the installed PySpark, and that this PySpark supports this Python."""
    install = f"pip install 'pyspark[sql]~={SPARK_LINES[-1]}.0' '{PANDAS}'"
    try:
        found = str(importlib.import_module("pyspark").__version__)
    except ImportError as error:
        if getattr(error, "name", None) in ("pyspark", "py4j"):
            return Check("PySpark", "failed", f"{error.name} is not installed", install)
        return _broken("PySpark", error, install)
    except Exception as error:
        return _broken("PySpark", error, install)
    text = f"{found}; stagecrew supports Spark {supported()}"
    line = line_of(found)
    if line not in SPARK_LINES:
        return Check("PySpark", "failed", text, install)
    newest = NEWEST_PYTHON.get(line)
    if newest is not None and sys.version_info[:2] > newest:
        newest_text = ".".join(map(str, newest))
        return Check(
            "PySpark",
            "warning",
            f"{text}; Spark {line} supports Python up to {newest_text}, and this is Python {platform.python_version()}",
            f"use Python {newest_text}, or a newer Spark",
        )
    return Check("PySpark", "ok", text)


def _broken(name: str, error: Exception, install: str) -> Check:
    return Check(name, "failed", f"it cannot be imported: {error_text(error)}", f"{install} --force-reinstall")


def jar() -> Check:
    """Checks that there is a jar for the installed Spark, and that all jars have the version of this package."""
    reinstall = "reinstall the wheel of stagecrew, or run `make jar` in a checkout"
    try:
        path = jar_path()
    except StagecrewError as error:
        return Check("Jar", "failed", "no jar was found for the installed Spark", str(error))
    jars = installed_jars()
    for line, one in jars.items():
        if (problem := _jar_problem(line, one)) is not None:
            return Check("Jar", "failed", problem, reinstall)
    text = f"{__version__}, the same as the Python package, for Spark {', '.join(jars)}"
    return Check("Jar", "ok", f"{text}: {path}")


def _jar_problem(line: str, path: str) -> str | None:
    """Returns the problem of the jar for this version of Spark, or None."""
    try:
        with zipfile.ZipFile(path) as archive:
            manifest = archive.read("META-INF/MANIFEST.MF").decode()
            inside = archive.read("stagecrew/_version.py").decode()
    except (OSError, zipfile.BadZipFile, KeyError) as error:
        return f"{path} cannot be read: {error}"
    expected = {
        "classes": (re.search(r"^Implementation-Version: (\S+)", manifest, re.MULTILINE), __version__),
        "Python code": (re.search(r'__version__ = "(.+)"', inside), __version__),
        "Spark": (re.search(r"^Spark-Version: (\S+)", manifest, re.MULTILINE), line),
    }
    for what, (match, version) in expected.items():
        if (found := match[1] if match else "unknown") != version:
            return f"the version of the {what} in the jar is {found}, and must be {version}: {path}"
    return None


def pandas_version() -> Check:
    """Checks pandas, which PySpark's Arrow functions need. PySpark 4.3 prints warnings with pandas 3."""
    install = f"pip install '{PANDAS}'"
    try:
        found = str(importlib.import_module("pandas").__version__)
    except ImportError as error:
        if error.name == "pandas":
            return Check("pandas", "warning", "it is not installed; mapInArrow and pandas functions need it", install)
        return _broken("pandas", error, install)
    except Exception as error:
        return _broken("pandas", error, install)
    if int(found.split(".", maxsplit=1)[0]) >= 3:
        return Check("pandas", "failed", f"{found}; stagecrew requires pandas 2", install)
    return Check("pandas", "ok", found)


def arrow_version() -> Check:
    """Checks PyArrow, which PySpark's Arrow functions and stagecrew's operators need."""
    install = "pip install 'pyarrow>=18'"
    try:
        return Check("PyArrow", "ok", str(importlib.import_module("pyarrow").__version__))
    except ImportError as error:
        if error.name == "pyarrow":
            missing = "it is not installed; mapInArrow, operators, splits, commits and supersteps need it"
            return Check("PyArrow", "warning", missing, install)
        return _broken("PyArrow", error, install)
    except Exception as error:
        return _broken("PyArrow", error, install)


def coordination_store(url: str) -> Check:
    """Checks the coordination store that STAGECREW_STORE names. A leader may be using it."""
    from stagecrew.recovery.leadership.fencing import leader_of
    from stagecrew.recovery.stores import open_store

    try:
        store = open_store(url)
        try:
            leader = leader_of(store)
        finally:
            store.close()
    except StagecrewError as error:
        return Check("Store", "failed", str(error), "correct STAGECREW_STORE, or repair the store")
    who = "there is no leader" if leader is None else f"{leader.host}:{leader.pid} leads in term {leader.term}"
    return Check("Store", "ok", f"{type(store).__name__} responds; {who}")


def state_storage(uri: str) -> Check:
    """Checks the state storage that STAGECREW_STATE names: writes, reads and deletes a file."""
    from stagecrew.recovery.state.storage import StateStorage

    try:
        storage = StateStorage(uri)
        reference = storage.write("doctor", b"stagecrew doctor was here", "doctor")
        storage.read(reference)
        storage.discard(reference)
    except StagecrewError as error:
        return Check("State", "failed", str(error), "correct STAGECREW_STATE, or repair the storage")
    return Check("State", "ok", f"{storage!r} can be written and read")


def spark(master: str) -> Iterator[Check]:
    """Runs a small application. Checks that the plugin is active, and which Python and which code its workers use."""
    with tempfile.TemporaryDirectory(prefix="stagecrew-doctor-") as folder:
        log = Path(folder, "spark.log")
        log.touch()
        try:
            yield from _application(master, log)
        except Exception as error:
            yield _failed("Spark", error, log, master)


def _application(master: str, log: Path) -> Iterator[Check]:
    from pyspark.sql import SparkSession

    import stagecrew

    builder = (
        SparkSession.builder.master(master)
        .appName("stagecrew doctor")
        .config("spark.ui.enabled", "false")
        .config("spark.log.level", "ERROR")
        .config("spark.ui.showConsoleProgress", "false")
    )
    with redirect_stderr(log):
        session = stagecrew.configure(builder).getOrCreate()
    try:
        problems = stagecrew.crew(session).connection.problems()
        text = f"{session.version} started with master {master}, and the plugin is active in it"
        if problems:
            yield Check("Spark", "warning", f"{text}, but {'; '.join(problems)}", "use another version of Spark")
        else:
            yield Check("Spark", "ok", text)
        try:
            seen = _first_task(session)
        except Exception as error:
            yield _failed("Python", error, log, master)
            return
    finally:
        session.stop()
    yield _python(seen)
    yield _imported(seen, master)


def _first_task(session: Any) -> dict[str, Any]:
    """Returns what the first task reports. A job that waits too long for an executor is cancelled."""
    context = session.sparkContext
    gave_up = threading.Event()

    def look(_: Iterator[int]) -> Iterator[dict[str, Any]]:
        # Imports inside, because the function is pickled by value, and workers may lack this module's other imports.
        import platform
        import sys

        import stagecrew

        yield {
            "python": platform.python_version(),
            "executable": sys.executable,
            "version": stagecrew.__version__,
            "file": stagecrew.__file__,
        }

    def give_up() -> None:
        gave_up.set()
        context.cancelAllJobs()

    timer = threading.Timer(PATIENCE, give_up)
    timer.daemon = True
    timer.start()
    try:
        seen: list[dict[str, Any]] = context.parallelize([0], 1).mapPartitions(look).collect()
    except Exception as error:
        if gave_up.is_set():
            raise ConfigurationError(f"no executor ran a task within {PATIENCE:g} s") from error
        raise
    finally:
        timer.cancel()
    return seen[0]


def _python(seen: dict[str, Any]) -> Check:
    driver_version = platform.python_version()
    found = (
        f"the driver runs {driver_version} ({sys.executable}), the executors run {seen['python']} "
        f"({seen['executable']})"
    )
    if seen["python"] != driver_version:
        return Check("Python", "warning", found, "set PYSPARK_PYTHON to a Python of the driver's version on every host")
    return Check("Python", "ok", found)


def _imported(seen: dict[str, Any], master: str) -> Check:
    found = f"workers import stagecrew {seen['version']} from {seen['file']}"
    remedy = (
        "uninstall that copy from the executors' Python, or remove its folder from their PYTHONPATH: the jar contains "
        "the package"
    )
    if seen["version"] != __version__:
        return Check("Workers", "failed", found, remedy)
    # In local[n] the workers import the driver's own package.
    if ".jar" not in seen["file"] and not re.match(r"local(\[|$)", master):
        return Check("Workers", "warning", f"{found}, not from the jar", remedy)
    return Check("Workers", "ok", found)


def _failed(name: str, error: Exception, log: Path, master: str) -> Check:
    line = spark_error_line(error)
    if "GATEWAY" in line:  # the JVM did not start, so Spark's log has the reason
        logged = [
            text for text in log.read_text(errors="replace").splitlines() if re.search("ERROR|Error|Exception", text)
        ]
        reason = logged[-1].strip() if logged else line
        line = f"it did not start with master {master!r}: {reason}"
    return Check(name, "failed", line, _remedy(error, line, master))


def _remedy(error: Exception, line: str, master: str) -> str:
    text = f"{error}\n{line}"
    if "PYTHON_VERSION_MISMATCH" in text:
        return (
            "set PYSPARK_PYTHON to a Python of the driver's version on every host"
            f" (the driver runs {platform.python_version()}, {sys.executable})"
        )
    if re.search("Error from python worker|Cannot run program", text):
        return "set PYSPARK_PYTHON to a Python >= 3.11 with PySpark that every host has"
    if "within" in text and isinstance(error, ConfigurationError):
        return f"check that {master} is correct, and that its web page shows a free worker"
    if isinstance(error, StagecrewError):
        return "see the message above"
    if re.search("Could not parse Master URL|Master must either be", text):
        return "write a master such as local[2] or spark://host:7077"
    return f"check that `pyspark --master '{master}'` works without stagecrew; its messages have the details"
