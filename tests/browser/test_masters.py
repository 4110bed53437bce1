"""The tab of applications whose executors are processes, on each kind of master, in both themes."""

from __future__ import annotations

import re
import sys
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Page
from pyspark import cloudpickle
from pyspark.sql import SparkSession

import stagecrew
from support.journal import Journal, rendezvous
from support.sessions import Sessions, slots
from support.waiting import eventually
from support.web_pages import THEMES, fetch_json, set_theme, table_rows

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.long


class Quiet(stagecrew.Listener):
    """Does nothing, and is counted."""

    name = "quiet"


@pytest.fixture(scope="module")
def spark(sessions: Sessions, master: str) -> SparkSession:
    """A session of its own on each master, with its UI."""
    sessions.stop()
    conf = {"spark.ui.enabled": "true", "spark.ui.port": "0", "spark.app.name": "masters"}
    return sessions.get(master, **conf, **{"spark.stagecrew.processes.interval": "500ms"})


@pytest.fixture(scope="module")
def ran(spark: SparkSession, master: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, list[int]]:
    """Where the tab is, the report of a topology that ran on all executors at once, and its workers."""
    path = str(tmp_path_factory.mktemp("masters") / "journal")
    tasks = slots(master)
    with stagecrew.crew(spark).topology("everywhere", listeners=[Quiet()]) as topology:
        data = spark.sparkContext.parallelize(range(tasks), tasks)
        workers = data.mapPartitions(rendezvous(path, "everywhere", tasks)).collect()
        assert data.map(lambda x: (x % 2, x)).groupByKey().count() == 2
    assert len(Journal(path).read(event="body")) == tasks
    return f"http://127.0.0.1:{urlsplit(spark.sparkContext.uiWebUrl).port}/stagecrew", topology.report, workers


@pytest.mark.parametrize("theme", THEMES)
def test_pages_show_each_executor_as_the_report_does(ran: tuple[str, Any, list[int]], page: Page, theme: str) -> None:
    """A topology's page has a row for each executor, with the report's numbers, and nothing goes wrong on any page."""
    base, report, _ = ran
    for path in ("/processes/", "/jobs/", "/"):
        page.goto(base + path)
        set_theme(page, theme)
    page.get_by_role("link", name="everywhere").first.click()
    page.wait_for_url("**/topology/**")
    set_theme(page, theme)
    shown = {row["Executor"]: row for row in table_rows(page, "stagecrew-listeners")}
    assert set(shown) == {listener.executor for listener in report.listeners}
    for listener in report.listeners:
        row = shown[listener.executor]
        assert [int(row[name]) for name in ("Opens", "Closes", "Failures")] == [
            listener.opens, listener.closes, listener.failures,
        ]  # fmt: skip
    released = {row["Executor"]: int(row["Released"]) for row in table_rows(page, "stagecrew-executors")}
    assert released == {stored.executor: stored.released for stored in report.partitions}
    assert sum(released.values()) > 0


def test_each_worker_has_a_row_with_its_memory(ran: tuple[str, Any, list[int]], page: Page) -> None:
    """The page of processes has the workers that ran the tasks, each at its executor, and what it takes."""
    base, report, workers = ran

    def looked_at() -> bool:
        found = fetch_json(f"{base}/processes/json/")["processes"]
        return {one["pid"] for one in found if one["samples"]} >= set(workers)

    eventually(looked_at, 30, "each worker is looked at")
    page.goto(f"{base}/processes/")
    shown = {int(row["Process"]): row for row in table_rows(page, "stagecrew-processes")}
    assert {shown[pid]["Role"] for pid in workers} == {"worker"}
    assert {shown[pid]["Executor"] for pid in workers} == {listener.executor for listener in report.listeners}
    for pid in workers:
        memory = re.match(r"([\d.]+) MiB", shown[pid]["Memory"])
        assert memory is not None
        assert float(memory[1]) > 1


def test_json_of_each_page_is_there(ran: tuple[str, Any, list[int]]) -> None:
    """Each page's JSON has a version, and the topology's is that of the report."""
    base, report, _ = ran
    for path in ("/json/", "/processes/json/", "/jobs/json/"):
        assert fetch_json(base + path)["version"] == 1
    body = eventually(lambda: fetch_json(f"{base}/topology/json/?id={report.id}"), what="the topology's JSON")
    assert stagecrew.TopologyReport.of(body["topology"]) == report
