"""Fixtures for pytest: a session, opened listeners, a task and a harness for coordinators.

pytest loads this plugin if stagecrew is installed. It imports neither PySpark nor anything else before a test uses a
fixture.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from stagecrew.listeners.listener import Listener, Task
    from stagecrew.testing.harness import CoordinatorHarness

__all__ = ["coordinator_harness", "crew_conf", "crew_session", "crew_task", "open_listener"]

_MISSING: Any = object()


@pytest.fixture(scope="session")
def crew_conf() -> dict[str, str]:
    """The Spark properties of `crew_session`. Override this fixture in conftest.py to change them.

    Examples:
        @pytest.fixture(scope="session")
        def crew_conf(crew_conf):
            return crew_conf | {"spark.master": "local[4]"}
    """
    return {
        "spark.master": "local[2]",
        "spark.app.name": "tests",
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "2",
    }


@pytest.fixture(scope="session")
def crew_session(crew_conf: dict[str, str]) -> Iterator[SparkSession]:
    """A Spark session with stagecrew, for all tests. It stops after the last test.

    Examples:
        def test_rows_have_names(crew_session):
            with stagecrew.crew(crew_session).topology("names", listeners=[database]) as topology:
                assert crew_session.range(3).mapInPandas(add_names, "id long, name string").count() == 3
            assert topology.report.opens == topology.report.closes
    """
    from pyspark.sql import SparkSession

    from stagecrew.session.builder import configure

    builder = SparkSession.builder
    for key, value in crew_conf.items():
        builder = builder.config(key, value)
    session = configure(builder).getOrCreate()
    yield session
    session.stop()


@pytest.fixture
def open_listener() -> Iterator[Callable[..., Any]]:
    """A function that opens a listener until the test ends: `open_listener(listener)`.

    `open_listener(listener, value=fake)` opens nothing, and `get()` returns the fake. See `stagecrew.testing.opened`.

    Examples:
        def test_articles_have_prices(open_listener):
            open_listener(catalogue, value={"tea": "2.5"})
            assert list(priced(["tea"])) == [("tea", 2.5)]
    """
    from stagecrew.testing.resources import opened

    with contextlib.ExitStack() as stack:

        def open_(listener: Listener, value: Any = _MISSING) -> Any:
            manager = opened(listener) if value is _MISSING else opened(listener, value)
            return stack.enter_context(manager)

        yield open_


@pytest.fixture
def crew_task() -> Callable[..., Task]:
    """A function that returns a `stagecrew.Task`, for `Listener.decorate`. Each field has a default.

    Examples:
        def test_a_task_is_logged(crew_task):
            with Audit().decorate(crew_task(partition=3)):
                ...
    """
    from stagecrew.listeners.listener import Task

    def make(**fields: Any) -> Task:
        defaults: dict[str, Any] = {
            "application": "test", "topology": "test", "topology_id": "test", "executor": "test",
            "stage": 0, "stage_attempt": 0, "partition": 0, "attempt": 0, "attempt_number": 0,
        }  # fmt: skip
        return Task(**(defaults | fields))

    return make


@pytest.fixture
def coordinator_harness() -> Iterator[Callable[..., CoordinatorHarness]]:
    """A function that creates a `stagecrew.testing.CoordinatorHarness`, which is closed when the test ends.

    Examples:
        def test_the_budget_is_shared(coordinator_harness):
            harness = coordinator_harness(Budget)
            assert harness.evaluation(subtask=0).request(70) == 70
            assert harness.evaluation(subtask=1).request(70) == 30
    """
    from stagecrew.testing.harness import CoordinatorHarness

    with contextlib.ExitStack() as stack:

        def make(*args: Any, **kwargs: Any) -> CoordinatorHarness:
            return stack.enter_context(CoordinatorHarness(*args, **kwargs))

        yield make
