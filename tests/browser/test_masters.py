"""The tab of applications with executors in separate processes, on each kind of master, in both themes."""

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
    """A listener that does nothing; the report counts its opens and closes."""

    name = "quiet"


@pytest.fixture(scope="module")
def spark(sessions: Sessions, master: str) -> SparkSession:
    """A new session with the UI on each master."""
    sessions.stop()
    conf = {"spark.ui.enabled": "true", "spark.ui.port": "0", "spark.app.name": "masters"}
    return sessions.get(master, **conf, **{"spark.stagecrew.processes.interval": "500ms"})


@pytest.fixture(scope="module")
def completed_run(
    spark: SparkSession, master: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Any, list[int]]:
    """The URL of the tab, the report of a topology whose tasks ran on all executors at once, and its workers' pids."""
    path = str(tmp_path_factory.mktemp("masters") / "journal")
    tasks = slots(master)
    with stagecrew.crew(spark).topology("everywhere", listeners=[Quiet()]) as topology:
        data = spark.sparkContext.parallelize(range(tasks), tasks)
        workers = data.mapPartitions(rendezvous(path, "everywhere", tasks)).collect()
        assert data.map(lambda x: (x % 2, x)).groupByKey().count() == 2
    assert len(Journal(path).read(event="body")) == tasks
    return f"http://127.0.0.1:{urlsplit(spark.sparkContext.uiWebUrl).port}/stagecrew", topology.report, workers


@pytest.mark.parametrize("theme", THEMES)
def test_pages_show_the_reports_numbers_for_each_executor(
    completed_run: tuple[str, Any, list[int]], page: Page, theme: str
) -> None:
    """The page of a topology has one row per executor with the report's numbers. No page has an error.

    A column of zeros is hidden.
    """
    base, report, _ = completed_run
    for path in ("/processes/", "/jobs/", "/"):
        page.goto(base + path)
        set_theme(page, theme)
    page.get_by_role("link", name="everywhere").first.click()
    page.wait_for_url("**/topology/**")
    set_theme(page, theme)
    row_by_executor = {row["Executor"]: row for row in table_rows(page, "stagecrew-listeners")}
    assert set(row_by_executor) == {listener.executor for listener in report.listeners}
    for listener in report.listeners:
        row = row_by_executor[listener.executor]
        assert [int(row.get(name, 0)) for name in ("Opens", "Closes", "Failures")] == [
            listener.opens, listener.closes, listener.failures,
        ]  # fmt: skip
    released = {row["Executor"]: int(row.get("Released", 0)) for row in table_rows(page, "stagecrew-executors")}
    assert released == {stored.executor: stored.released for stored in report.partitions}
    assert sum(released.values()) > 0


def test_each_worker_has_a_row_with_its_memory(completed_run: tuple[str, Any, list[int]], page: Page) -> None:
    """The processes page lists the workers that ran the tasks, with their executors and their memory."""
    base, report, workers = completed_run

    def workers_are_sampled() -> bool:
        found = fetch_json(f"{base}/processes/json/")["processes"]
        return {one["pid"] for one in found if one["samples"]} >= set(workers)

    eventually(workers_are_sampled, 30, "each worker is sampled")
    page.goto(f"{base}/processes/")
    row_by_pid = {int(row["Process"]): row for row in table_rows(page, "stagecrew-processes")}
    assert {row_by_pid[pid]["Role"] for pid in workers} == {"worker"}
    assert {row_by_pid[pid]["Executor"] for pid in workers} == {listener.executor for listener in report.listeners}
    for pid in workers:
        memory = re.match(r"([\d.]+) MiB", row_by_pid[pid]["Memory"])
        assert memory is not None
        assert float(memory[1]) > 1


def test_each_page_has_json(completed_run: tuple[str, Any, list[int]]) -> None:
    """Each page's JSON has a version, and the topology's JSON equals the report."""
    base, report, _ = completed_run
    for path in ("/json/", "/processes/json/", "/jobs/json/"):
        assert fetch_json(base + path)["version"] == 1
    body = eventually(
        lambda: fetch_json(f"{base}/topology/json/?id={report.id}"), what="the topology's JSON is available"
    )
    assert stagecrew.TopologyReport._from_json(body["topology"]) == report
