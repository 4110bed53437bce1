"""The "Stagecrew" tab of the Spark UI, in a real browser and over HTTP."""

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
from support.spark_versions import HAS_DARK_THEME, SENDS_SECURITY_POLICY
from support.waiting import eventually
from support.web_pages import set_theme, table_rows, text_colour

# Executors do not have this module, so its listeners are pickled by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

HOSTILE = "<script>alert(1)</script>\"'"
HOSTILE_TOPOLOGY = "<img src=x onerror=alert(2)> & co"
HOSTILE_ERROR = "</td><script>alert(3)</script>" + "x" * 200


class Hostile(stagecrew.Listener):
    """A listener whose name is markup."""

    name = HOSTILE


class Failing(stagecrew.Listener):
    """A listener whose error is markup."""

    name = "failing"
    required = False

    def open(self, context: Any) -> None:
        raise ValueError(HOSTILE_ERROR)


@pytest.fixture(scope="module")
def spark(sessions: Sessions) -> SparkSession:
    """A new session with the UI, in which nothing has run yet."""
    sessions.stop()
    return sessions.get("local[2]", **{"spark.ui.enabled": "true", "spark.ui.port": "0", "spark.app.name": "tab"})


@pytest.fixture(scope="module")
def base(spark: SparkSession) -> str:
    """The URL of the UI, with an address that always resolves."""
    return f"http://127.0.0.1:{urlsplit(spark.sparkContext.uiWebUrl).port}"


@pytest.fixture(scope="module")
def hostile_report(spark: SparkSession) -> stagecrew.TopologyReport:
    """The report of a topology whose names and error are markup."""
    crew = stagecrew.crew(spark)
    with crew.topology(HOSTILE_TOPOLOGY, listeners=[Hostile(), Failing()]) as topology:
        assert spark.sparkContext.parallelize(range(4), 2).map(lambda x: x + 1).sum() == 10
    return topology.report


def test_an_application_without_topologies_explains_how_to_start_one(
    spark: SparkSession, base: str, page: Page
) -> None:
    """Before any topology, the tab shows the application topology and a sentence that explains how to start one."""
    page.goto(f"{base}/jobs/")
    page.get_by_role("link", name="Stagecrew").click()
    assert "crew(spark).topology(" in page.locator("#stagecrew-begin").inner_text()
    (application,) = table_rows(page, "stagecrew-topologies")
    shown = (application["Topology"], application["Kind"], application["State"])
    assert shown == ("application", "application", "active")
    assert page.locator("#stagecrew-listeners").count() == 0


@pytest.mark.contract
def test_tables_show_the_reports_numbers_and_escape_markup(
    base: str, page: Page, hostile_report: stagecrew.TopologyReport, tmp_path: Path
) -> None:
    """The tables show the report's numbers of topologies and listeners, and show names with markup as text."""
    page.goto(f"{base}/stagecrew/")
    application, named = table_rows(page, "stagecrew-topologies")
    assert (application["Kind"], application["Jobs"], application["Executors"]) == ("application", "1", "1")
    shown = (named["Topology"], named["Id"], named["Kind"], named["State"])
    assert shown == (HOSTILE_TOPOLOGY, hostile_report.id, "named", "closed")
    assert (named["Jobs"], named["Executors"]) == ("1", "1")
    assert {"Lost executors", "Unclosed"}.isdisjoint(named)  # columns that are 0 in all rows are not shown
    assert int(named["Failures"]) == hostile_report.failures
    listeners = {row["Listener"]: row for row in table_rows(page, "stagecrew-listeners")}
    assert set(listeners) == {HOSTILE, "failing"}
    for listener in hostile_report.listeners:
        row = listeners[listener.name]
        assert (row["Topology"], row["Scope"], row["Executors"]) == (HOSTILE_TOPOLOGY, "worker", "1")
        numbers = [int(row.get(name, 0)) for name in ("Opens", "Closes", "Failures", "Lost")]
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


def test_columns_sort_by_value(base: str, page: Page, hostile_report: stagecrew.TopologyReport) -> None:
    """A click on a header sorts by value, not by text: the application has the longest duration."""
    page.goto(f"{base}/stagecrew/")
    header = page.locator("#stagecrew-topologies thead th", has_text="Duration").get_by_role("link")
    with page.expect_navigation():
        header.click()
    assert [row["Kind"] for row in table_rows(page, "stagecrew-topologies")] == ["named", "application"]
    with page.expect_navigation():
        header.click()
    assert [row["Kind"] for row in table_rows(page, "stagecrew-topologies")] == ["application", "named"]


@pytest.mark.skipif(not HAS_DARK_THEME, reason="this Spark has no dark theme")
def test_tables_are_light_on_dark_in_the_dark_theme(
    base: str, page: Page, hostile_report: stagecrew.TopologyReport, tmp_path: Path
) -> None:
    """In Spark's dark theme the text of the tables is light, because the tab defines no colours of its own."""
    page.goto(f"{base}/stagecrew/")
    set_theme(page)
    assert min(text_colour(page, "#stagecrew-listeners tbody td")) > 128
    page.screenshot(path=tmp_path / "dark.png", full_page=True)


def test_a_reload_shows_the_current_state(
    spark: SparkSession, base: str, page: Page, hostile_report: stagecrew.TopologyReport
) -> None:
    """The tab shows a running topology as active. A reload after its end shows it as closed."""
    with stagecrew.crew(spark).topology("live") as topology:
        page.goto(f"{base}/stagecrew/")
        states = {row["Id"]: row["State"] for row in table_rows(page, "stagecrew-topologies")}
        assert states[topology.id] == "active"
    page.reload()
    states = {row["Id"]: row["State"] for row in table_rows(page, "stagecrew-topologies")}
    assert states[topology.id] == "closed"


@pytest.mark.contract
def test_json_equals_the_reports(
    spark: SparkSession, base: str, page: Page, hostile_report: stagecrew.TopologyReport
) -> None:
    """The page's link leads to its JSON, which has a version and the numbers of the crew's reports."""
    page.goto(f"{base}/stagecrew/")
    page.get_by_role("link", name="JSON").click()
    assert urlsplit(page.url).path.rstrip("/") == "/stagecrew/json"
    crew = stagecrew.crew(spark)

    def stable_json_and_reports() -> tuple[dict[str, Any], list[stagecrew.TopologyReport]] | None:
        with urllib.request.urlopen(f"{base}/stagecrew/json/") as response:
            assert response.headers.get_content_type() == "text/json"
            body = json.load(response)
        reports = crew.reports
        return (
            (body, reports)
            if [stagecrew.TopologyReport._from_json(node) for node in body["topologies"]] == reports
            else None
        )

    # Executors report every second, so one may change between the two reads.
    body, reports = eventually(stable_json_and_reports, what="JSON equals the reports")
    assert body["version"] == 1
    assert hostile_report in reports
    assert body["totals"]["opens"] == sum(report.opens for report in reports)
    assert body["totals"]["failures"] == sum(report.failures for report in reports)


@pytest.mark.parametrize("path", ["stagecrew/", "stagecrew/json/"])
def test_post_requests_are_refused(base: str, path: str) -> None:
    """The tab is read-only: a POST returns 405."""
    request = urllib.request.Request(f"{base}/{path}", data=b"x=1", method="POST")
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(request)
    with raised.value as response:
        assert response.code == 405


def test_parameters_are_not_echoed_and_the_security_policy_is_sent(
    base: str, hostile_report: stagecrew.TopologyReport
) -> None:
    """A response contains nothing from the request's parameters, and has Spark's content security policy."""
    with urllib.request.urlopen(f"{base}/stagecrew/?name=echo-me%3Cscript%3E&id=echo-me") as response:
        body = response.read().decode()
        policy = response.headers["Content-Security-Policy"]
    assert "echo-me" not in body
    assert (policy is not None and "script-src 'self'" in policy) == SENDS_SECURITY_POLICY
    assert HOSTILE not in body
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in body
