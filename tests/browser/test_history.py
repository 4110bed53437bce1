"""The tab in the History Server: of applications that finished, were killed, or run; and of logs as others may write them."""

from __future__ import annotations

import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from playwright.sync_api import Page
from pyspark import cloudpickle

import stagecrew
from crewtools import Journal, Sessions, eventually, history_server, kill
from drivers import driver
from eventlogs import CLASS, application, example, listener, operator, state, topology, written
from webpages import THEMES, dark, fetched, rows

cloudpickle.register_pickle_by_value(sys.modules[__name__])

HOSTILE = "</td></table><script>alert(1)</script>\"' onclick='alert(2)' \u202egpj"
LONG = "a name of ten thousand characters " * 300
BROWSED = ("stagecrew/", "stagecrew/processes/", "stagecrew/jobs/")

#: A driver that is in the middle of a topology when it is killed.
MIDDLE = """
import pyspark
session = stagecrew.configure(base("local[2]").config("spark.eventLog.enabled", "true").config("spark.eventLog.dir", {logs!r}))
session = session.config("spark.eventLog.compress", "false")
spark = session.config("spark.stagecrew.eventLog.interval", "1s").config("spark.app.name", "killed").getOrCreate()
topology = stagecrew.crew(spark).topology("middle", listeners=[Recorder(journal, "pool")])
with topology:
    assert spark.sparkContext.parallelize(range(4), 2).map(lambda x: x).count() == 4
    journal.write(event="ready", application=spark.sparkContext.applicationId, topology=topology.id)
    threading.Event().wait(300)
"""


class Quiet(stagecrew.Listener):
    """Does nothing, and is counted."""

    name = "quiet"


class Made:
    """The applications whose logs are there."""

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self.finished = self.killed = self.running = ""
        self.reports: dict[str, stagecrew.TopologyReport] = {}


@pytest.fixture(scope="module")
def made(sessions: Sessions, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    """One application that has finished, one that was killed, one that runs."""
    folder = tmp_path_factory.mktemp("history")
    logs = folder / "logs"
    logs.mkdir()
    made = Made(logs)
    settings = {"spark.eventLog.enabled": "true", "spark.eventLog.dir": logs.as_uri()}

    def ran() -> tuple[str, stagecrew.TopologyReport]:
        sessions.stop()
        spark = sessions.get("local[2]", **settings)
        with stagecrew.crew(spark).topology("nightly", listeners=[Quiet()]) as topology:
            assert spark.sparkContext.parallelize(range(4), 2).map(lambda x: x + 1).sum() == 10
        return spark.sparkContext.applicationId, topology.report

    journal = Journal(str(folder / "journal"))
    with driver(folder, journal, "local[2]", MIDDLE.replace("{logs!r}", repr(logs.as_uri()))) as process:
        made.finished, made.reports["finished"] = ran()
        ready = eventually(lambda: journal.read(event="ready"), 120, "the driver is in its topology")[0]
        made.killed = ready["application"]
        # Its listeners' opens are in its log before it dies.
        (log,) = logs.glob(f"*{made.killed}*/events*")
        eventually(lambda: '\\"opens\\":2' in log.read_text(), 30, "the log tells of the opens")
        # The JVM first: one whose Python is gone ends in good order.
        for killed in (*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)):
            kill(killed.pid)
        process.wait(30)
    made.running, made.reports["running"] = ran()
    yield made
    sessions.stop()


@pytest.fixture(scope="module")
def history(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A History Server that has the jar on its class path, over logs of real applications and such as are made up."""
    written(made.logs, "app-example", example())
    written(made.logs, "app-without", [])
    written(made.logs, "app-hostile", hostile())
    written(made.logs, "app-newer", newer())
    with history_server(tmp_path_factory.mktemp("server"), made.logs, stagecrew.jar_path()) as base:
        listed(base, 7)
        yield base


def listed(base: str, how_many: int) -> None:
    """Waits until so many applications are listed."""
    eventually(
        lambda: len(fetched(f"{base}/api/v1/applications")) >= how_many, 60, f"{how_many} applications are listed"
    )


def hostile() -> list[dict[str, Any]]:
    """Every text is markup, or long."""
    counts = {
        "listeners": [listener(0, HOSTILE, 1, failures=1, lastError=HOSTILE), listener(1, LONG, 1, lastError=LONG)]
    }
    span = {"executor": HOSTILE, "kind": HOSTILE, "name": HOSTILE, "started": 1, "ended": 2, "failed": True}
    bad = operator(HOSTILE, waitsFor=HOSTILE, lastError=HOSTILE, progress={HOSTILE: 1})
    return [
        state("topology", topology(f"{text}-0", text, operators=[bad], spans=[span], executors={HOSTILE: counts}, unclosed=[HOSTILE, LONG]))
        for text in (HOSTILE, LONG)
    ] + [
        application(
            processes=[{"executor": HOSTILE, "host": LONG, "pid": 1, "role": HOSTILE, "started": 1, "ended": 0, "samples": []}],
            recovery={"facts": {HOSTILE: LONG}, "steps": [{"name": HOSTILE, "state": LONG, "started": 1, "ended": 0}]},
        )
    ]  # fmt: skip


def newer() -> list[dict[str, Any]]:
    """As a later stagecrew might write; and what none of ours would."""
    return [
        {**state("topology", {**topology("t-1", "later"), "news": [1]}, version=2), "unknown": {"a": 1}},
        {"Event": CLASS, "version": 2, "kind": "a kind of later", "id": "x", "body": "{}"},
        {"Event": CLASS},
        {"Event": CLASS, "kind": "topology", "body": "no JSON"},
        {"Event": "org.apache.spark.stagecrew.AnEventOfLater", "x": 1},
    ]


def test_a_finished_application_is_shown_as_its_report_said(made: Made, history: str, page: Page) -> None:
    """Its topologies have closed, and the numbers are those of the reports."""
    report = made.reports["finished"]
    page.goto(f"{history}/history/{made.finished}/stagecrew/")
    named = next(row for row in rows(page, "stagecrew-topologies") if row["Id"] == report.id)
    assert (named["State"], named["Jobs"], named["Executors"]) == ("closed", "1", "1")
    (quiet,) = rows(page, "stagecrew-listeners")
    (counted,) = report.listeners
    assert [int(quiet[name]) for name in ("Opens", "Closes", "Failures", "Lost")] == [
        counted.opens, counted.closes, counted.failures, counted.lost,
    ]  # fmt: skip
    page.get_by_role("link", name="nightly").first.click()
    page.wait_for_url("**/stagecrew/topology/**")
    assert page.locator(".alert").count() == 0
    body = fetched(f"{history}/history/{made.finished}/stagecrew/json/")
    assert [stagecrew.TopologyReport.of(node) for node in body["topologies"] if node["id"] == report.id] == [report]
    assert {node["state"] for node in body["topologies"]} == {"closed"}


@pytest.mark.parametrize("which", ["killed", "running"])
def test_an_application_that_has_not_ended_is_shown_as_of_its_last_event(
    made: Made, history: str, page: Page, which: str
) -> None:
    """Of a killed application, as of one that runs, there is what its log has; and the page says so."""
    app = getattr(made, which)
    page.goto(f"{history}/history/{app}/stagecrew/")
    states = {row["Topology"]: row["State"] for row in rows(page, "stagecrew-topologies")}
    assert states == {"application": "active", **({"middle": "active"} if which == "killed" else {"nightly": "closed"})}
    page.get_by_role("link", name="middle" if which == "killed" else "application").first.click()
    page.wait_for_url("**/stagecrew/topology/**")
    assert "it had not ended then" in page.locator(".alert").inner_text()


@pytest.mark.parametrize("theme", THEMES)
def test_every_page_is_right_in_both_themes(history: str, page: Page, theme: str, tmp_path: Path) -> None:
    """Timeline, coordinators, partitions, processes and the stored job are there, their text as readable as Spark's."""
    base = f"{history}/history/app-example/stagecrew"
    for path, what in (
        ("/", "#stagecrew-topologies td"),
        ("/topology/?id=enrich-2b8c41d09e63", "#stagecrew-timeline text"),
        ("/topology/?id=report-5d1f0c77ab12", "#stagecrew-executors td"),
        ("/processes/", "#stagecrew-processes td"),
        ("/jobs/", "#stagecrew-steps td"),
    ):
        page.goto(base + path)
        dark(page, theme)
        text = page.locator(what).first
        assert text.is_visible()
        paint = "fill" if "text" in what else "color"
        colour = text.evaluate(f"e => getComputedStyle(e).{paint}.match(/[0-9]+/g).slice(0, 3).map(Number)")
        assert min(colour) > 128 if theme == "dark" else max(colour) < 128
        page.screenshot(path=tmp_path / f"{path.strip('/').split('/')[0] or 'overview'}.png", full_page=True)


def test_a_timeline_has_a_lane_for_each_executor_and_words(history: str, page: Page) -> None:
    """Opens, tasks and closes are bars with titles; the failed one is marked; what the picture says stands below it."""
    page.goto(f"{history}/history/app-example/stagecrew/topology/?id=enrich-2b8c41d09e63")
    counts = {kind: page.locator(f"rect.stagecrew-{kind}").count() for kind in ("open", "task", "close", "failed")}
    assert (counts["open"], counts["close"], counts["failed"]) == (4, 4, 1)
    assert counts["task"] > 50
    label = page.locator("#stagecrew-timeline").get_attribute("aria-label")
    assert label is not None
    assert label == f"Timeline: 4 opens, {counts['task'] + 1} tasks, 4 closes on 2 executors, 1 failed."
    box = page.locator("rect.stagecrew-failed").bounding_box()
    assert box is not None
    assert box["width"] > 5
    progress = {row["Name"]: row["Progress"] for row in rows(page, "stagecrew-coordinators")}
    assert progress == {"flights": "splits done 64 / splits left 0", "budget": "spent 80"}


def test_texts_of_users_stay_text(history: str, page: Page) -> None:
    """Markup is shown, nothing of it runs, and a text of 10,000 characters leaves the table usable."""
    base = f"{history}/history/app-hostile"
    for path in BROWSED:
        page.goto(f"{base}/{path}")
        assert page.locator("table script, table img, li script, svg script").count() == 0
        assert page.evaluate("document.querySelectorAll('[onclick*=alert]').length") == 0
    page.goto(f"{base}/stagecrew/")
    names = [row["Topology"] for row in rows(page, "stagecrew-topologies")]
    assert HOSTILE.strip() in names
    assert max(map(len, names)) == 120
    assert page.evaluate("document.documentElement.scrollWidth") < 4000
    for i in range(2):
        page.goto(f"{base}/stagecrew/")
        page.locator("#stagecrew-topologies tbody tr").nth(i).get_by_role("link").click()
        page.wait_for_url("**/stagecrew/topology/**")
        assert rows(page, "stagecrew-listeners")[0]["Last error"] == HOSTILE.strip()
        assert page.locator("#stagecrew-timeline rect.stagecrew-failed").count() == 1


def test_logs_of_later_versions_and_logs_without_our_events_are_readable(history: str, page: Page) -> None:
    """What is known of a newer log is shown, with a word that it is newer; without an event of ours there is no tab."""
    page.goto(f"{history}/history/app-newer/stagecrew/")
    assert [row["Topology"] for row in rows(page, "stagecrew-topologies")] == ["later"]
    page.get_by_role("link", name="later").click()
    page.wait_for_url("**/stagecrew/topology/**")
    assert "newer stagecrew" in page.locator(".alert").inner_text()
    page.goto(f"{history}/history/app-without/jobs/")
    assert page.get_by_role("link", name="Stagecrew").count() == 0


def test_a_history_server_without_the_jar_reads_our_logs(made: Made, tmp_path: Path) -> None:
    """It drops our events, and shows Spark's own pages of the application."""
    with history_server(tmp_path, made.logs) as base:
        listed(base, 3)
        for app in (made.finished, made.killed, made.running):
            with urllib.request.urlopen(f"{base}/history/{app}/jobs/", timeout=60) as response:
                body = response.read().decode()
            assert response.status == 200
            assert "/stagecrew/" not in body
            assert fetched(f"{base}/api/v1/applications/{app}/jobs")


def test_what_is_not_known_is_refused(history: str) -> None:
    """An unknown topology is answered with 400, as by Spark's own pages, and a POST with 405."""
    base = f"{history}/history/app-example/stagecrew"
    for path, data, code in (
        ("topology/?id=%3Cscript%3E", None, 400),
        ("topology/", None, 400),
        ("processes/", b"", 405),
    ):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(urllib.request.Request(f"{base}/{path}", data=data), timeout=60)
        with refused.value as answer:
            assert answer.code == code
            assert b"<script>" not in answer.read()


@pytest.mark.long
def test_a_thousand_topologies_in_under_a_second(tmp_path: Path, page: Page) -> None:
    """The first page of a History Server's tab over 1,000 topologies that ran for a while comes in under a second."""
    logs = tmp_path / "logs"
    logs.mkdir()
    busy = next(event for event in example() if event["id"].startswith("enrich"))
    written(
        logs,
        "app-many",
        [{**busy, "id": f"t{i}", "body": busy["body"].replace("enrich-2b8c41d09e63", f"t{i}")} for i in range(1000)],
    )
    store = tmp_path / "store"  # on disk, as servers of many applications have it
    store.mkdir()
    with history_server(tmp_path, logs, stagecrew.jar_path(), **{"spark.history.store.path": str(store)}) as base:
        listed(base, 1)
        page.goto(f"{base}/history/app-many/stagecrew/")  # reads the log
        for path in ("", "?topologies.sort=Duration", "topology/?id=t7"):
            page.goto(f"{base}/history/app-many/stagecrew/{path}")
            took = page.evaluate("(e => e.responseEnd - e.requestStart)(performance.getEntriesByType('navigation')[0])")
            assert took < 1000
            assert page.locator("tbody tr").count() <= 200
        assert len(fetched(f"{base}/history/app-many/stagecrew/json/")["topologies"]) == 1000
