"""Compares the outcomes of PySpark's own tests, and one of ours, with the plugin on and off: `run.py SPARK_SOURCE`.

No outcome must differ.

SPARK_SOURCE is a tree of Spark's sources, preferably at the tag of the installed PySpark. Only its tests are used; jars
and Python code are those of the installed PySpark. Each module runs in a process of its own, in three variations:
without the plugin, with the plugin and no listener, and with a listener that opens, decorates and closes in every
worker. The variations of a module run concurrently.

Tests of a module whose outcome with the plugin differs from their outcome without it are run again, without the other
tests, in all variations one after the other. If one of them then no longer differs, the whole module is run once more.
A test counts as a difference if it differs again. A test that fails in all variations (the tree may not match the
installed version) is not a difference, but it does not count as compared either.

The exit code is 1 if there are differences. Otherwise it is 2 if a module had no test that passes without the plugin,
or if the listener was never opened, because the run then proves nothing. Otherwise it is 0.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import importlib.util
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import rich.console
import rich.table

HERE = pathlib.Path(__file__).resolve().parent

#: Module -> the behaviour of Spark that it guards.
MODULES = {
    "pyspark.tests.test_daemon": "daemon",
    "pyspark.tests.test_worker": "worker: kills, reuse, exit codes, memory limit, faulthandler",
    "pyspark.tests.test_taskcontext": "TaskContext, barrier tasks, worker reuse",
    "pyspark.tests.test_rddbarrier": "barrier tasks",
    "pyspark.tests.test_broadcast": "broadcasts, encrypted too",
    "pyspark.tests.test_profiler": "profiler",
    "pyspark.tests.test_pin_thread": "pinned threads",
    "pyspark.tests.test_context": "consecutive sessions, files, cancelled jobs",
    "pyspark.sql.tests.test_udf": "Python UDF",
    "pyspark.sql.tests.test_udtf": "Python UDTF",
    "pyspark.sql.tests.test_udf_profiler": "UDF profiler",
    "pyspark.sql.tests.test_job_cancellation": "job tags and cancelled jobs",
    "pyspark.sql.tests.test_python_datasource": "Python DataSource",
    "pyspark.sql.tests.arrow.test_arrow_map": "mapInArrow, also in barrier mode",
    "pyspark.sql.tests.pandas.test_pandas_map": "mapInPandas",
    "pyspark.sql.tests.streaming.test_streaming_foreach": "foreach",
    "pyspark.sql.tests.streaming.test_streaming_foreach_batch": "foreachBatch",
    "compat_paths": "the executor's own PYTHONPATH (a test of this folder)",
}

#: Test classes that need a setting that the plugin refuses by design, with an error.
REFUSED = {"pyspark.tests.test_worker.WorkerSegfaultNonDaemonTest": "spark.python.use.daemon=false"}

VARIATIONS = ("off", "on", "on with a listener")


@dataclasses.dataclass
class Run:
    """One module in one variation."""

    outcomes: dict[str, str]
    reasons: dict[str, str]
    seconds: float
    opens: int = 0
    closes: int = 0


class SparkInstallation:
    """A directory that looks like a Spark installation: the installed PySpark plus the tests of the source tree."""

    def __init__(self, source: pathlib.Path, root: pathlib.Path) -> None:
        spec = importlib.util.find_spec("pyspark")
        assert spec, "PySpark is not installed"
        assert spec.origin, "PySpark is not installed in a directory"
        self._installed = pathlib.Path(spec.origin).parent
        self._source = source
        self.root = root
        self.home = root / "spark"
        python = self.home / "python"
        python.mkdir(parents=True)
        for name in ("bin", "data", "examples", "jars", "licenses", "sbin"):
            if (self._installed / name).exists():
                (self.home / name).symlink_to(self._installed / name)
        # pyspark.zip is left out: workers would import PySpark from it, without the tests.
        (python / "lib").mkdir()
        for archive in (self._installed / "python" / "lib").glob("py4j-*.zip"):
            (python / "lib" / archive.name).symlink_to(archive)
        if (source / "python" / "test_support").exists():
            (python / "test_support").symlink_to(source / "python" / "test_support")
        self._merge(self._installed, source / "python" / "pyspark", python / "pyspark")

    def _merge(self, installed: pathlib.Path, source: pathlib.Path, into: pathlib.Path) -> None:
        """Links the installed files and the source's `tests` packages. Directories that contain both are created."""
        into.mkdir()
        for entry in installed.iterdir():
            below = source / entry.name
            if entry.is_dir() and below.is_dir() and any(below.rglob("tests")):
                self._merge(entry, below, into / entry.name)
            elif entry.name != "__pycache__":
                (into / entry.name).symlink_to(entry)
        if (source / "tests").is_dir() and not (into / "tests").exists():
            # Copied, because tests look for files next to their own directory.
            shutil.copytree(source / "tests", into / "tests")

    def variation(self, name: str, jar: pathlib.Path) -> dict[str, str]:
        """Creates the directories of a variation and returns its environment.

        Only variations that need it copy `pyspark`.
        """
        folder = self.root / name.replace(" ", "-")
        conf, python = folder / "conf", self.home / "python"
        conf.mkdir(parents=True)
        lines = ["spark.ui.showConsoleProgress false"]
        path = [str(python), *map(str, (python / "lib").glob("py4j-*.zip"))]
        if name != "off":
            lines += ["spark.plugins stagecrew.StagecrewPlugin", f"spark.jars {jar}"]
            path = [str(self._with_our_daemon(folder)), *path[1:], str(jar)]
        if name == "on with a listener":
            lines.append("spark.stagecrew.listeners compat_listener:Quiet")
            path.append(str(HERE))
        (conf / "spark-defaults.conf").write_text("\n".join(lines) + "\n")
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("SPARK_", "PYSPARK_", "PYTHON"))}
        return kept | {
            "SPARK_HOME": str(self.home),
            "SPARK_CONF_DIR": str(conf),
            "PYTHONPATH": os.pathsep.join(path),
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_DRIVER_PYTHON": sys.executable,
            "PYARROW_IGNORE_TIMEZONE": "1",
            "PYTHONHASHSEED": "0",
        }

    def _with_our_daemon(self, folder: pathlib.Path) -> pathlib.Path:
        """A `pyspark` whose `daemon.py`, when run as a script by PySpark's daemon test, is stagecrew's daemon.

        Spark itself runs the daemon as a module, on the driver, for planning. That remains PySpark's daemon.
        """
        package = folder / "python" / "pyspark"
        package.mkdir(parents=True)
        for entry in (self.home / "python" / "pyspark").iterdir():
            if entry.name == "tests":
                shutil.copytree(entry, package / "tests")
            elif entry.name != "daemon.py":
                (package / entry.name).symlink_to(entry)
        real = self._installed / "daemon.py"
        (package / "daemon.py").write_text(
            "import sys\n"
            "if __name__ == '__main__' and __spec__ is None:\n"
            "    import runpy\n"
            "    del sys.path[0]\n"
            "    runpy.run_module('stagecrew.worker.daemon', run_name='__main__', alter_sys=True)\n"
            "else:\n"
            f"    exec(compile(open({str(real)!r}).read(), {str(real)!r}, 'exec'))\n"
        )
        return folder / "python"


#: The running processes, which end with this process.
_running: set[subprocess.Popen[bytes]] = set()


def run_concurrently(
    module: str, environments: dict[str, dict[str, str]], folder: pathlib.Path, timeout: float
) -> dict[str, Run]:
    """Runs a module in all variations at the same time."""
    with concurrent.futures.ThreadPoolExecutor(len(environments)) as pool:
        runs = {
            name: pool.submit(run_module, module, environment, folder / module / name.replace(" ", "-"), timeout, [])
            for name, environment in environments.items()
        }
        try:
            return {name: run.result() for name, run in runs.items()}
        except BaseException:
            for process in list(_running):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            raise


def run_module(module: str, environment: dict[str, str], folder: pathlib.Path, timeout: float, tests: list[str]) -> Run:
    """Runs a module, or some of its tests, in a process of its own."""
    folder.mkdir(parents=True)
    results, calls = folder / "results.jsonl", folder / "calls"
    calls.touch()
    (folder / "tmp").mkdir()
    # Tests name their files relative to the root of the source tree.
    (folder / "python").symlink_to(pathlib.Path(environment["SPARK_HOME"]) / "python")
    started = time.monotonic()
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, str(HERE / "one_module.py"), module, str(results), *tests],
            cwd=folder,
            env=environment | {"STAGECREW_COMPAT_CALLS": str(calls), "TMPDIR": str(folder / "tmp")},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        _running.add(process)
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            pass
        finally:
            # This kills its JVM too. Python daemons end with the JVM.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            _running.discard(process)
    run = Run({}, {}, time.monotonic() - started)
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    for line in lines:
        if line["outcome"] != "end":
            run.outcomes[line["test"]] = line["outcome"].replace("running", "not ended")
            run.reasons[line["test"]] = line["why"]
    if not lines or lines[-1]["outcome"] != "end":
        # So a module that crashes in only one variation is a difference.
        run.outcomes[module] = "broke off"
        run.reasons[module] = (folder / "output.txt").read_text(errors="replace")[-4000:]
    recorded_calls = calls.read_text()
    run.opens, run.closes = recorded_calls.count("o"), recorded_calls.count("c")
    return run


def tests_that_differ(runs: dict[str, Run]) -> list[str]:
    """The tests whose outcomes are not the same in all variations, except those that need a refused setting."""
    tests = sorted({test for run in runs.values() for test in run.outcomes})
    return [
        test
        for test in tests
        if len({run.outcomes.get(test, "not run") for run in runs.values()}) > 1
        and not any(refused in test for refused in REFUSED)
    ]


def find_differences(
    modules: list[str], environments: dict[str, dict[str, str]], folder: pathlib.Path, timeout: float
) -> tuple[int, list[str], list[tuple[str, dict[str, str], str]]]:
    """Runs all modules and prints a line for each.

    Returns the number of compared tests, the reasons why something compared nothing, and the confirmed differences.
    """
    console = rich.console.Console(width=None if sys.stdout.isatty() else 200)
    table = rich.table.Table("module", "off", *VARIATIONS[1:], "opens/closes", "seconds", "differ", title="compat")
    differences: list[tuple[str, dict[str, str], str]] = []
    compared, opens = 0, 0
    nothing_compared: list[str] = []
    for module in modules:
        runs = run_concurrently(module, environments, folder, timeout)
        for name in environments:
            console.print(
                f"{module}  {name}: {format_counts(runs[name])}  {runs[name].seconds:.0f} s",
                highlight=False,
                soft_wrap=True,
            )
        passing = [test for test, outcome in runs["off"].outcomes.items() if outcome == "passed"]
        compared += len(passing)
        if not passing:
            nothing_compared.append(f"{module}: no test of it passes without the plugin")
        first_differences = tests_that_differ(runs)
        for test in first_differences:
            console.print(f"  differs: {test} {outcomes_of(runs, test)}; once more", highlight=False, soft_wrap=True)
        confirmed: list[str] = []
        if first_differences:
            # If the module itself crashed, all of its tests are run again.
            tests_to_repeat = first_differences if module not in first_differences else []
            second_runs = {
                name: run_module(
                    module, environment, folder / module / f"{name.replace(' ', '-')}-2", timeout, tests_to_repeat
                )
                for name, environment in environments.items()
            }
            second_differences = set(tests_that_differ(second_runs))
            if not second_differences.issuperset(first_differences):  # the difference may depend on earlier tests
                second_differences |= set(
                    tests_that_differ(run_concurrently(module, environments, folder / "whole", timeout))
                )
            confirmed = [test for test in first_differences if test in second_differences]
            for test in confirmed:
                reason = next(
                    (run.reasons[test] for run in reversed(second_runs.values()) if run.reasons.get(test)), ""
                )
                differences.append((test, outcomes_of(second_runs, test), reason))
        with_listener = runs["on with a listener"]
        opens += with_listener.opens
        table.add_row(
            module.removeprefix("pyspark."),
            *(format_counts(runs[name]) for name in VARIATIONS),
            f"{with_listener.opens}/{with_listener.closes}",
            " ".join(f"{run.seconds:.0f}" for run in runs.values()),
            str(len(confirmed))
            + (f" ({len(first_differences) - len(confirmed)} once)" if len(first_differences) > len(confirmed) else ""),
        )
    console.print(table)
    if opens == 0:
        nothing_compared.append("the listener was never opened, so nothing shows that the plugin was on")
    return compared, nothing_compared, differences


def outcomes_of(runs: dict[str, Run], test: str) -> dict[str, str]:
    """The outcome of a test in each variation."""
    return {name: run.outcomes.get(test, "not run") for name, run in runs.items()}


def format_counts(run: Run) -> str:
    """The counts as text, such as `12 passed, 1 skipped`."""
    counts = collections.Counter(run.outcomes.values())
    return ", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items())) or "nothing"


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "source", type=pathlib.Path, nargs="?", metavar="SPARK_SOURCE", help="a tree of Spark's sources"
    )
    parser.add_argument(
        "--modules", nargs="+", default=list(MODULES), help="modules to run instead of the default ones"
    )
    parser.add_argument("--timeout", type=float, default=1200, help="seconds for one module in one variation")
    parser.add_argument("--keep", type=pathlib.Path, help="a new directory in which outputs and results are kept")
    options = parser.parse_args()
    if options.source is None or not (options.source / "python" / "pyspark" / "tests").is_dir():
        print(
            "make compat SPARK_SOURCE=... needs a tree of Spark's sources with python/pyspark/tests in it, such as a "
            "clone of Spark at the tag of the installed PySpark",
            file=sys.stderr,
        )
        return 2
    import stagecrew

    # An interrupted run must leave neither its directory nor a JVM.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))
    with tempfile.TemporaryDirectory(prefix="stagecrew-compat-") as temporary:
        # A copy, so that the jar can be rebuilt during a long run.
        jar = pathlib.Path(shutil.copy(stagecrew.jar_path(), temporary))
        installation = SparkInstallation(options.source.resolve(), pathlib.Path(temporary) / "installation")
        environments = {name: installation.variation(name, jar) for name in VARIATIONS}
        folder = options.keep.resolve() if options.keep else pathlib.Path(temporary) / "runs"
        compared, nothing_compared, differences = find_differences(
            options.modules, environments, folder, options.timeout
        )
    for test, test_outcomes, reason in differences:
        print(f"\nDIFFERENCE {test}: {test_outcomes}\n{reason}")
    for refused, reason in REFUSED.items():
        if any(refused.startswith(module + ".") for module in options.modules):
            print(f"not compared, because the plugin refuses {reason}: {refused}")
    for reason in nothing_compared:
        print(f"NOTHING COMPARED {reason}")
    print(f"{compared} tests compared, {len(differences)} differ")
    return 1 if differences else 2 if nothing_compared else 0


if __name__ == "__main__":
    sys.exit(main())
