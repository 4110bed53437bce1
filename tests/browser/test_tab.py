"""The tab "Stagecrew" of the Spark UI, in a real browser and over HTTP."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Page
from pyspark import cloudpickle
from pyspark.sql import SparkSession

import stagecrew
from support.sessions import Sessions
from support.waiting import eventually
from support.web_pages import set_theme, table_rows

# Executors do not have this module: its listeners travel by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

HOSTILE = "<script>alert(1)</script>\"'"
HOSTILE_TOPOLOGY = "<img src=x onerror=alert(2)> & co"
HOSTILE_ERROR = "</td><script>alert(3)</script>" + "x" * 200


class Hostile(stagecrew.Listener):
    """Its name is markup."""

    name = HOSTILE


class Failing(stagecrew.Listener):
    """Its error is markup."""

    name = "failing"
    required = False

    def open(self, context: Any) -> None:
        raise ValueError(HOSTILE_ERROR)


@pytest.fixture(scope="module")
def spark(sessions: Sessions) -> SparkSession:
    """A session of its own, in which nothing has run, with its UI."""
    sessions.stop()
    return sessions.get("local[2]", **{"spark.ui.enabled": "true", "spark.ui.port": "0", "spark.app.name": "tab"})


@pytest.fixture(scope="module")
def base(spark: SparkSession) -> str:
    """Where the UI is, by an address that always resolves."""
    return f"http://127.0.0.1:{urlsplit(spark.sparkContext.uiWebUrl).port}"


@pytest.fixture(scope="module")
def reported(spark: SparkSession) -> stagecrew.TopologyReport:
    """Of a topology that has run, with names and an error that are markup."""
    crew = stagecrew.crew(spark)
    with crew.topology(HOSTILE_TOPOLOGY, listeners=[Hostile(), Failing()]) as topology:
        assert spark.sparkContext.parallelize(range(4), 2).map(lambda x: x + 1).sum() == 10
    return topology.report


def test_an_application_without_topologies_says_how_to_begin(spark: SparkSession, base: str, page: Page) -> None:
    """Before any topology the tab shows the application's own, and a sentence that says how to begin one."""
    page.goto(f"{base}/jobs/")
    page.get_by_role("link", name="Stagecrew").click()
    assert "crew(spark).topology(" in page.locator("#stagecrew-begin").inner_text()
    (application,) = table_rows(page, "stagecrew-topologies")
    shown = (application["Topology"], application["Kind"], application["State"])
    assert shown == ("application", "application", "active")
    assert page.locator("#stagecrew-listeners").count() == 0


def test_tables_show_what_the_report_says_and_run_nothing(
    base: str, page: Page, reported: stagecrew.TopologyReport, tmp_path: Path
) -> None:
    """Topologies and listeners stand in the tab with the report's numbers, and names that are markup stay text."""
    page.goto(f"{base}/stagecrew/")
    application, named = table_rows(page, "stagecrew-topologies")
    assert (application["Kind"], application["Jobs"], application["Executors"]) == ("application", "1", "1")
    shown = (named["Topology"], named["Id"], named["Kind"], named["State"])
    assert shown == (HOSTILE_TOPOLOGY, reported.id, "named", "closed")
    counts = [named[name] for name in ("Jobs", "Executors", "Lost executors", "Unclosed")]
    assert counts == ["1", "1", "0", "0"]
    assert int(named["Failures"]) == reported.failures
    listeners = {row["Listener"]: row for row in table_rows(page, "stagecrew-listeners")}
    assert set(listeners) == {HOSTILE, "failing"}
    for listener in reported.listeners:
        row = listeners[listener.name]
        assert (row["Topology"], row["Scope"], row["Executors"]) == (HOSTILE_TOPOLOGY, "worker", "1")
        numbers = [int(row[name]) for name in ("Opens", "Closes", "Failures", "Lost")]
        assert numbers == [listener.opens, listener.closes, listener.failures, listener.lost]
        assert row["Time in open"].endswith("ms")
    assert int(listeners[HOSTILE]["Opens"]) >= 1
    assert int(listeners["failing"]["Failures"]) >= 1
    error = listeners["failing"]["Last error"]
    assert error.startswith("ValueError: </td><script>alert(3)</script>xxx")
    assert len(error) == 120
    title = page.locator("#stagecrew-listeners td[title^='Traceback']").get_attribute("title")
    assert title is not None
    assert HOSTILE_ERROR in title
    assert page.locator("#stagecrew-begin").count() == 0
    assert page.locator("table img, table script").count() == 0
    page.screenshot(path=tmp_path / "light.png", full_page=True)


def test_columns_sort_by_value(base: str, page: Page, reported: stagecrew.TopologyReport) -> None:
    """A click on a header sorts by the value, not by its text: the duration of the application is the longest."""
    page.goto(f"{base}/stagecrew/")
    header = page.locator("#stagecrew-topologies thead th", has_text="Duration").get_by_role("link")
    with page.expect_navigation():
        header.click()
    assert [row["Kind"] for row in table_rows(page, "stagecrew-topologies")] == ["named", "application"]
    with page.expect_navigation():
        header.click()
    assert [row["Kind"] for row in table_rows(page, "stagecrew-topologies")] == ["application", "named"]


def test_dark_theme(base: str, page: Page, reported: stagecrew.TopologyReport, tmp_path: Path) -> None:
    """In Spark's dark theme the text of the tables is light: the tab brings no colours of its own."""
    page.goto(f"{base}/stagecrew/")
    set_theme(page)
    colour = "e => getComputedStyle(e).color.match(/[0-9]+/g).slice(0, 3).map(Number)"
    assert min(page.locator("#stagecrew-listeners tbody td").first.evaluate(colour)) > 128
    page.screenshot(path=tmp_path / "dark.png", full_page=True)


def test_a_reload_shows_the_state_now(
    spark: SparkSession, base: str, page: Page, reported: stagecrew.TopologyReport
) -> None:
    """A topology that runs is shown as active, and as closed when the page is loaded again after its end."""
    with stagecrew.crew(spark).topology("live") as topology:
        page.goto(f"{base}/stagecrew/")
        states = {row["Id"]: row["State"] for row in table_rows(page, "stagecrew-topologies")}
        assert states[topology.id] == "active"
    page.reload()
    states = {row["Id"]: row["State"] for row in table_rows(page, "stagecrew-topologies")}
    assert states[topology.id] == "closed"


def test_json_equals_the_reports(
    spark: SparkSession, base: str, page: Page, reported: stagecrew.TopologyReport
) -> None:
    """The page's JSON, found by its link, has a version and the numbers of the crew's reports."""
    page.goto(f"{base}/stagecrew/")
    page.get_by_role("link", name="JSON").click()
    assert urlsplit(page.url).path.rstrip("/") == "/stagecrew/json"
    crew = stagecrew.crew(spark)

    def shown() -> tuple[dict[str, Any], list[stagecrew.TopologyReport]] | None:
        with urllib.request.urlopen(f"{base}/stagecrew/json/") as response:
            assert response.headers.get_content_type() == "text/json"
            body = json.load(response)
        reports = crew.reports
        return (
            (body, reports) if [stagecrew.TopologyReport.of(node) for node in body["topologies"]] == reports else None
        )

    # Executors report every second: it may change in between.
    body, reports = eventually(shown, what="JSON equals the reports")
    assert body["version"] == 1
    assert reported in reports
    assert body["totals"]["opens"] == sum(report.opens for report in reports)
    assert body["totals"]["failures"] == sum(report.failures for report in reports)


@pytest.mark.parametrize("path", ["stagecrew/", "stagecrew/json/"])
def test_post_is_refused(base: str, path: str) -> None:
    """The tab is read-only: a POST is answered with 405."""
    request = urllib.request.Request(f"{base}/{path}", data=b"x=1", method="POST")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request)
    with refused.value as answer:
        assert answer.code == 405


def test_parameters_are_not_echoed_and_the_policy_is_sent(base: str, reported: stagecrew.TopologyReport) -> None:
    """Nothing of a request stands in the answer, which carries Spark's content security policy."""
    with urllib.request.urlopen(f"{base}/stagecrew/?name=echo-me%3Cscript%3E&id=echo-me") as response:
        body = response.read().decode()
        policy = response.headers["Content-Security-Policy"]
    assert "echo-me" not in body
    assert "script-src 'self'" in policy
    assert HOSTILE not in body
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in body
