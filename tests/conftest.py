"""Fixtures for the tests with real Spark. One SparkContext exists at a time; tests are grouped by master."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from xdist.scheduler import LoadFileScheduling

# If a shell starts pytest in the background, pytest ignores Ctrl-C. The processes that tests start and interrupt would
# inherit this setting.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A time limit for each example would fail on a busy machine. pytest limits the time of each test.
hypothesis.settings.register_profile("stagecrew", deadline=None)
hypothesis.settings.load_profile("stagecrew")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--hide-proc",
        action="store_true",
        help="hide /proc and SO_PEERCRED from stagecrew's modules, in the tests and in all Python processes of Spark",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Hides /proc if requested. Ignores the warnings about sockets that old versions of PySpark do not close."""
    from support.hidden_proc import hide_proc
    from support.spark_versions import LEAKS_SOCKETS

    if config.getoption("hide_proc"):
        hide_proc()
    if LEAKS_SOCKETS:
        config.addinivalue_line("filterwarnings", "ignore:unclosed <socket.socket:ResourceWarning")


class ModuleAndMasterScheduling(LoadFileScheduling):
    """Runs the tests of one module with one master in one process. `--dist loadfile` means this scheduling here.

    pytest sorts the tests of all modules by master, so that modules share a session. If a process ran whole modules, it
    would change the master in each of them, and start a session each time. Tests with a version of Spark as parameter
    are divided in the same way.
    """

    def _split_scope(self, nodeid: str) -> str:
        module, _, test = nodeid.partition("::")
        master = re.search(r"[\[-](local|local-cluster|standalone|\d\.\d)\b", test)
        return f"{module} {master[1]}" if master else module


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ModuleAndMasterScheduling | None:
    return ModuleAndMasterScheduling(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(tryfirst=True)  # before `-m` selects tests
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Marks `long_on_clusters` tests as long if their master is a cluster. Long tests get a timeout of half an hour.

    Of each contract test, marks the cases that `make test-matrix` runs: those of `make test`, except on the standalone
    cluster, or else those on local-cluster.
    """
    contract: dict[str, list[pytest.Function]] = {}
    for item in items:
        if item.get_closest_marker("long_on_clusters") and not item.callspec.params["master"].startswith("local["):
            item.add_marker(pytest.mark.long)
        if item.get_closest_marker("long") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(1800))
        if item.get_closest_marker("contract") and "standalone" not in item.nodeid:
            contract.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in contract.values():
        short = [case for case in cases if not case.get_closest_marker("long")]
        for case in short or [case for case in cases if "local-cluster" in case.nodeid]:
            case.add_marker(pytest.mark.matrix)


@pytest.fixture(scope="session", autouse=True)
def _spark_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Sets the environment of Spark, and keeps the files that it writes out of the checkout and site-packages."""
    from support.sessions import QUICK_JVM_OPTIONS
    from support.spark_home import unchanged_installation, use_spark_home

    folder = tmp_path_factory.mktemp("spark")
    os.environ["STAGECREW_TEST_FOLDER"] = str(folder)
    use_spark_home()
    os.environ["SPARK_SUBMIT_OPTS"] = QUICK_JVM_OPTIONS  # executors get the options from `session_builder`
    os.environ["SPARK_LAUNCHER_OPTS"] = QUICK_JVM_OPTIONS  # for the JVM that prints the command line of the next JVM
    # On a cluster, Spark runs the first python3 on the PATH, even when it plans data sources on the driver. It must be
    # the interpreter that runs the tests.
    os.environ["PATH"] = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"
    with unchanged_installation():
        yield


@pytest.fixture(scope="session")
def sessions() -> Iterator[object]:
    """Creates Spark sessions. The last session is stopped at the end."""
    from support.sessions import Sessions

    made = Sessions()
    yield made
    made.stop()


@pytest.fixture(scope="session")
def standalone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a real standalone cluster."""
    from support.clusters import standalone_cluster

    with standalone_cluster(tmp_path_factory.mktemp("standalone")) as url:
        yield url


@pytest.fixture(
    scope="session",
    params=["local[2,4]", pytest.param("local-cluster[2,2,1024]", marks=pytest.mark.long), "standalone"],
)
def master(request: pytest.FixtureRequest) -> str:
    """The Spark masters with which the contract must hold.

    `make test` uses a local master and the standalone cluster, whose executors are processes of their own.
    `make test-long` also uses local-cluster.
    """
    return request.getfixturevalue("standalone") if request.param == "standalone" else request.param


@pytest.fixture(scope="session")
def jvm_listeners(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A user's jar with two JVM listeners, and the file to which they write."""
    from support.jvm_listeners import compile_jvm_listeners

    folder = tmp_path_factory.mktemp("jvm")
    return compile_jvm_listeners(folder), str(folder / "journal")


@pytest.fixture
def jvm_journal(jvm_listeners: tuple[str, str]) -> object:
    """The entries that the JVM listeners wrote since this test began."""
    from support.journal import Journal

    Path(jvm_listeners[1]).unlink(missing_ok=True)
    return Journal(jvm_listeners[1])


@pytest.fixture
def journal(tmp_path: Path) -> object:
    """The file to which the listeners of one test write."""
    from support.journal import Journal

    return Journal(str(tmp_path / "journal"))
