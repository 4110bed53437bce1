"""The tab in the History Server, for finished, killed and running applications, and for invented event logs."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pyspark
import pytest
from playwright.sync_api import Page
from pyspark import cloudpickle

import stagecrew
from support.clusters import history_server
from support.coordination import batch_of as row_of
from support.driver_scripts import driver_script
from support.event_logs import CLASS, application, example_events, listener, operator, state, topology, write_log
from support.journal import Journal
from support.processes import kill
from support.sessions import Sessions
from support.spark_versions import SENDS_SECURITY_POLICY
from support.waiting import eventually
from support.web_pages import THEMES, fetch_json, set_theme, table_rows, text_colour

cloudpickle.register_pickle_by_value(sys.modules[__name__])

HOSTILE = "</td></table><script>alert(1)</script>\"' onclick='alert(2)' \u202egpj"
LONG = "a name of ten thousand characters " * 300
BROWSED_BELOW = (
    *("", "topology/?id=enrich-2b8c41d09e63", "processes/", "jobs/"),
    *("json/", "topology/json/?id=enrich-2b8c41d09e63", "processes/json/", "jobs/json/"),
)
BROWSED = ("stagecrew/", "stagecrew/processes/", "stagecrew/jobs/")

#: A driver that is killed while it is inside a topology.
RUNNING_DRIVER = """
import pyspark
session = session_builder("local[2]").config("spark.eventLog.enabled", "true").config("spark.eventLog.dir", {logs!r})
session = stagecrew.configure(session).config("spark.eventLog.compress", "false")
spark = session.config("spark.stagecrew.eventLog.interval", "1s").config("spark.app.name", "killed").getOrCreate()
topology = stagecrew.crew(spark).topology("middle", listeners=[Recorder(journal, "pool")])
with topology:
    assert spark.sparkContext.parallelize(range(4), 2).map(lambda x: x).count() == 4
    journal.write(event="ready", application=spark.sparkContext.applicationId, topology=topology.id)
    threading.Event().wait(300)
"""


class Quiet(stagecrew.Listener):
    """A listener that does nothing; the report counts its opens and closes."""

    name = "quiet"


class Echo(stagecrew.Coordinator):
    """Replies with the request, and ignores events."""

    def handle_event(self, evaluation: stagecrew.Evaluation, event: Any) -> None:
        pass

    def handle_request(self, evaluation: stagecrew.Evaluation, request: Any) -> Any:
        return request


def request_and_send(gateway: stagecrew.TaskGateway, batches: Iterator[Any]) -> Iterator[Any]:
    """Each task sends two requests and one event, and returns two rows."""
    for _ in batches:
        pass
    assert [gateway.request(number) for number in range(2)] == [0, 1]
    gateway.send("done")
    yield row_of(1)
    yield row_of(2)


class Applications:
    """The applications with logs: their reports, the JSON of their live tabs, and the test's own counts."""

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self.finished = self.killed = self.running = self.capped = ""
        self.reports: dict[str, stagecrew.TopologyReport] = {}
        self.live: dict[str, Any] = {}
        self.opens = 0  # of the killed application


@pytest.fixture(scope="module")
def applications(sessions: Sessions, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Applications]:
    """A finished application, a killed one, one with a capped log, and one that is still running."""
    folder = tmp_path_factory.mktemp("history")
    logs = folder / "logs"
    logs.mkdir()
    applications = Applications(logs)
    settings = {"spark.eventLog.enabled": "true", "spark.eventLog.dir": logs.as_uri()}
    settings |= {"spark.ui.enabled": "true", "spark.ui.port": "0", "spark.stagecrew.processes.interval": "200ms"}

    def run_application(which: str) -> str:
        sessions.stop()
        spark = sessions.get("local[2]", **settings)
        with stagecrew.crew(spark).topology("nightly", listeners=[Quiet()]) as topology:
            assert spark.sparkContext.parallelize(range(4), 2).map(lambda x: (x % 2, x)).groupByKey(2).count() == 2
            operator = topology.coordinate("echo", Echo)
            assert operator.map(spark.range(0, 4, 1, 2), request_and_send, "a long").count() == 4
        applications.reports[which] = topology.report
        applications.live[which] = fetch_json(
            f"http://127.0.0.1:{urlsplit(spark.sparkContext.uiWebUrl).port}/stagecrew/json/"
        )
        return str(spark.sparkContext.applicationId)

    def run_capped_application() -> str:
        sessions.stop()
        small_limits = {"spark.stagecrew.eventLog.interval": "100ms", "spark.stagecrew.eventLog.maxEvents": "2"}
        spark = sessions.get("local[2]", **settings, **small_limits, **{"spark.eventLog.compress": "false"})
        app = str(spark.sparkContext.applicationId)
        crew = stagecrew.crew(spark)
        with crew.topology("often") as topology:
            for number in range(3):
                with crew.topology(f"inside {number}") as inside:  # the states of both topologies are stored together
                    assert spark.sparkContext.parallelize(range(4), 2).sum() == 6
                    eventually(
                        lambda inside=inside: len(stored_states(logs, app, inside.id)) == 2,
                        30,
                        "the state with its job is stored",
                    )
        applications.reports["capped"] = topology.report
        return app

    journal = Journal(str(folder / "journal"))
    with driver_script(folder, journal, "local[2]", RUNNING_DRIVER.replace("{logs!r}", repr(logs.as_uri()))) as process:
        applications.finished = run_application("finished")
        ready = eventually(lambda: journal.read(event="ready"), 120, "the driver is in its topology")[0]
        applications.killed = ready["application"]
        # The log must contain the opens before the driver is killed.
        (log,) = logs.glob(f"*{applications.killed}*/events*")
        applications.opens = len(journal.read(event="open", listener="pool"))
        eventually(lambda: f'\\"opens\\":{applications.opens},' in log.read_text(), 30, "the log contains the opens")
        # The JVM is killed first: if its Python process ended first, the JVM would end in an orderly way.
        for process_to_kill in (*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)):
            kill(process_to_kill.pid)
        process.wait(30)
    applications.capped = run_capped_application()
    applications.running = run_application("running")
    yield applications
    sessions.stop()


@pytest.fixture(scope="module")
def history(applications: Applications, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A History Server with the jar on its class path. Its logs are those of real and invented applications."""
    write_log(applications.logs, "app-example", example_events())
    write_log(applications.logs, "app-without", [])
    write_log(applications.logs, "app-hostile", hostile_events())
    write_log(applications.logs, "app-newer", newer_events())
    write_log(
        applications.logs, "app-many-rows", [state("topology", topology(f"t-{i:03}", f"run {i}")) for i in range(130)]
    )
    with history_server(tmp_path_factory.mktemp("server"), applications.logs, stagecrew.jar_path()) as base:
        wait_until_listed(base, 9)
        yield base


def stored_states(logs: Path, app: str, id_: str) -> list[dict[str, Any]]:
    """The events in a log about a topology, or about the application if the id is empty."""
    (log,) = logs.glob(f"*{app}*/events*")
    events = [json.loads(line) for line in log.read_text().split("\n") if line.endswith("}") and CLASS in line]
    return [one for one in events if one["id"] == id_]


def wait_until_listed(base: str, count: int) -> None:
    """Waits until this number of applications is listed."""
    eventually(lambda: len(fetch_json(f"{base}/api/v1/applications")) >= count, 60, f"{count} applications are listed")


def tab_of(app: str) -> str:
    """The path of the tab in the History Server. It contains the application's id: pages also show local paths."""
    return f"/history/{app}/stagecrew/"


def hostile_events() -> list[dict[str, Any]]:
    """Events in which every text is markup or very long."""
    counts = {
        "listeners": [listener(0, HOSTILE, 1, failures=1, lastError=HOSTILE), listener(1, LONG, 1, lastError=LONG)]
    }
    span = {"executor": HOSTILE, "kind": HOSTILE, "name": HOSTILE, "started": 1, "ended": 2, "failed": True}
    bad = operator(HOSTILE, waitsFor=HOSTILE, lastError=HOSTILE, progress={HOSTILE: 1})
    return [
        state(
            "topology",
            topology(
                f"{text}-0", text, operators=[bad], spans=[span], executors={HOSTILE: counts}, unclosed=[HOSTILE, LONG]
            ),
        )
        for text in (HOSTILE, LONG)
    ] + [
        application(
            processes=[
                {
                    "executor": HOSTILE, "host": LONG, "pid": 1, "role": HOSTILE, "started": 1, "ended": 0,
                    "samples": [],
                }
            ],
            recovery={"facts": {HOSTILE: LONG}, "steps": [{"name": HOSTILE, "state": LONG, "started": 1, "ended": 0}]},
        )
    ]  # fmt: skip


def newer_events() -> list[dict[str, Any]]:
    """Events as a later version might write them, and malformed events."""
    return [
        {**state("topology", {**topology("t-1", "later"), "news": [1]}, version=2), "unknown": {"a": 1}},
        {"Event": CLASS, "version": 2, "kind": "a kind of later", "id": "x", "body": "{}"},
        {"Event": CLASS},
        {"Event": CLASS, "kind": "topology", "body": "no JSON"},
        {"Event": "org.apache.spark.stagecrew.AnEventOfLater", "x": 1},
    ]


def test_a_finished_application_is_shown_as_in_its_report(applications: Applications, history: str, page: Page) -> None:
    """The tab of a finished application shows its topologies as closed, with the numbers of the reports."""
    report = applications.reports["finished"]
    page.goto(f"{history}/history/{applications.finished}/stagecrew/")
    named = next(row for row in table_rows(page, "stagecrew-topologies") if row["Id"] == report.id)
    assert (named["State"], named["Jobs"], named["Executors"]) == ("closed", str(report.jobs), "1")
    (quiet,) = table_rows(page, "stagecrew-listeners")
    (counted,) = report.listeners
    assert [int(quiet.get(name, 0)) for name in ("Opens", "Closes", "Failures", "Lost")] == [
        counted.opens, counted.closes, counted.failures, counted.lost,
    ]  # fmt: skip
    assert tab_of(applications.finished) in page.content()
    page.get_by_role("link", name="nightly").first.click()
    page.wait_for_url("**/stagecrew/topology/**")
    assert page.locator(".alert").count() == 0
    body = fetch_json(f"{history}/history/{applications.finished}/stagecrew/json/")
    assert [stagecrew.TopologyReport._from_json(node) for node in body["topologies"] if node["id"] == report.id] == [
        report
    ]
    assert {node["state"] for node in body["topologies"]} == {"closed"}
    # Everything is stored, including spans, partitions and coordinators.
    live = applications.live["finished"]
    assert [node for node in body["topologies"] if node["id"] == report.id] == [
        node for node in live["topologies"] if node["id"] == report.id
    ]
    assert (body["totals"], body["coordinators"]) == (live["totals"], live["coordinators"])
    samples_by_process = {(one["pid"], one["started"]): one["samples"] for one in body["processes"]}
    for one in live["processes"]:
        sample_by_time = {
            sample["time"]: sample for sample in samples_by_process[one["pid"], one["started"]]
        }  # only the last samples are kept
        assert [sample_by_time.get(sample["time"], sample) for sample in one["samples"]] == one["samples"]
    topology_page = f"{history}/history/{applications.finished}/stagecrew/topology/json/?id={report.id}"
    (node,) = (node for node in body["topologies"] if node["id"] == report.id)
    assert fetch_json(topology_page) == {
        "version": 1,
        "until": node["ended"],
        "notes": [],
        "topology": node,
        "running": [],
    }
    assert report.released > 0
    assert [(one.requests, one.events_in, one.finished) for one in report.operators] == [(4, 2, 2)]


@pytest.mark.parametrize("which", ["killed", "running"])
def test_an_application_that_has_not_ended_is_shown_as_of_its_last_event(
    applications: Applications, history: str, page: Page, which: str
) -> None:
    """A killed or running application is shown as of the last event in its log, and the page says so."""
    app = getattr(applications, which)
    page.goto(f"{history}/history/{app}/stagecrew/")
    states = {row["Topology"]: row["State"] for row in table_rows(page, "stagecrew-topologies")}
    assert states == {"application": "active", **({"middle": "active"} if which == "killed" else {"nightly": "closed"})}
    page.get_by_role("link", name="middle" if which == "killed" else "application").first.click()
    page.wait_for_url("**/stagecrew/topology/**")
    assert "before the end" in page.locator(".alert").inner_text()
    page.goto(f"{history}/history/{app}/stagecrew/")
    assert "The event log shows Python processes and the stored job as of" in page.locator(".alert").inner_text()
    (listener_,) = table_rows(page, "stagecrew-listeners")
    opens = applications.opens if which == "killed" else applications.reports["running"].opens
    assert int(listener_["Opens"]) == opens >= 1
    assert f"opens {opens}, " in page.locator("li", has_text="Listeners").inner_text()


def test_the_page_says_which_states_a_capped_log_leaves_out(
    applications: Applications, history: str, page: Page
) -> None:
    """The log of a topology that changes often has a limited number of its states, and its last state.

    The last state equals the topology's report.
    """
    report = applications.reports["capped"]
    states = stored_states(applications.logs, applications.capped, report.id)
    assert [(one["number"], one["capped"], json.loads(one["body"])["state"]) for one in states] == [
        (1, False, "active"), (2, True, "active"), (3, True, "closed"),
    ]  # fmt: skip
    assert 1 <= len(stored_states(applications.logs, applications.capped, "")) <= 3
    page.goto(f"{history}/history/{applications.capped}/stagecrew/topology/?id={report.id}")
    note = page.locator(".alert").inner_text()
    assert "(spark.stagecrew.eventLog.maxEvents): events shortly before the end are missing" in note
    body = fetch_json(f"{history}/history/{applications.capped}/stagecrew/topology/json/?id={report.id}")
    assert body["notes"] == [note]
    assert stagecrew.TopologyReport._from_json(body["topology"]) == report
    assert report.jobs == 3


@pytest.mark.skipif(not SENDS_SECURITY_POLICY, reason="this Spark has no content security policy")
def test_the_history_server_sends_the_security_policy(applications: Applications, history: str) -> None:
    """Each page has Spark's content security policy."""
    for path in ("", "topology/?id=application", "processes/", "jobs/"):
        with urllib.request.urlopen(
            f"{history}/history/{applications.finished}/stagecrew/{path}", timeout=60
        ) as response:
            assert "script-src 'self'" in response.headers["Content-Security-Policy"]


@pytest.mark.parametrize("theme", THEMES)
def test_every_page_is_readable_in_both_themes(history: str, page: Page, theme: str, tmp_path: Path) -> None:
    """Timeline, coordinators, partitions, processes and the job are visible, and their text contrasts with the page."""
    base = f"{history}/history/app-example/stagecrew"
    for path, selector in (
        ("/", "#stagecrew-topologies td"),
        ("/topology/?id=enrich-2b8c41d09e63", "#stagecrew-timeline text"),
        ("/topology/?id=report-5d1f0c77ab12", "#stagecrew-executors td"),
        ("/processes/", "#stagecrew-processes td"),
        ("/jobs/", "#stagecrew-steps td"),
    ):
        page.goto(base + path)
        set_theme(page, theme)
        assert page.locator(selector).first.is_visible()
        colour = text_colour(page, selector, "fill" if "text" in selector else "color")
        assert min(colour) > 128 if theme == "dark" else max(colour) < 128
        page.screenshot(path=tmp_path / f"{path.strip('/').split('/')[0] or 'overview'}.png", full_page=True)


def test_a_timeline_shows_spans_and_describes_them_in_text(history: str, page: Page) -> None:
    """The timeline draws opens, tasks and closes as bars, and marks the failed one. Its label describes the picture."""
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
    progress = {row["Name"]: row["Progress"] for row in table_rows(page, "stagecrew-coordinators")}
    assert progress == {"flights": "splits done 64 / splits left 0", "budget": "spent 80"}


def test_markup_in_users_texts_is_shown_as_text(history: str, page: Page) -> None:
    """Markup in a text is shown, and is not executed. A text of 10,000 characters leaves the table usable."""
    base = f"{history}/history/app-hostile"
    for path in BROWSED:
        page.goto(f"{base}/{path}")
        assert page.locator("table script, table img, li script, svg script").count() == 0
        assert page.evaluate("document.querySelectorAll('[onclick*=alert]').length") == 0
    page.goto(f"{base}/stagecrew/")
    names = [row["Topology"] for row in table_rows(page, "stagecrew-topologies")]
    assert HOSTILE.strip() in names
    assert max(map(len, names)) == 120
    assert page.evaluate("document.documentElement.scrollWidth") < 4000
    for i in range(2):
        page.goto(f"{base}/stagecrew/")
        page.locator("#stagecrew-topologies tbody tr").nth(i).get_by_role("link").click()
        page.wait_for_url("**/stagecrew/topology/**")
        assert table_rows(page, "stagecrew-listeners")[0]["Last error"] == HOSTILE.strip()
        assert page.locator("#stagecrew-timeline rect.stagecrew-failed").count() == 1


def test_newer_logs_and_logs_without_stagecrew_are_readable(history: str, page: Page) -> None:
    """The known part of a newer log is shown with a note. If a log has no event of stagecrew, there is no tab."""
    page.goto(f"{history}/history/app-newer/stagecrew/")
    assert [row["Topology"] for row in table_rows(page, "stagecrew-topologies")] == ["later"]
    page.get_by_role("link", name="later").click()
    page.wait_for_url("**/stagecrew/topology/**")
    assert "newer version of stagecrew" in page.locator(".alert").inner_text()
    page.goto(f"{history}/history/app-without/jobs/")
    assert page.get_by_role("link", name="Stagecrew").count() == 0


def test_a_history_server_without_the_jar_reads_the_logs(applications: Applications, tmp_path: Path) -> None:
    """A History Server without the jar ignores stagecrew's events, and shows Spark's own pages of an application."""
    with history_server(tmp_path, applications.logs) as base:
        wait_until_listed(base, 4)
        for app in (applications.finished, applications.killed, applications.running):
            with urllib.request.urlopen(f"{base}/history/{app}/jobs/", timeout=60) as response:
                body = response.read().decode()
            assert response.status == 200
            assert tab_of(app) not in body
            assert fetch_json(f"{base}/api/v1/applications/{app}/jobs")


def test_a_table_of_many_rows_is_paged_like_sparks_own(history: str, page: Page) -> None:
    """A table of many rows has Spark's form, which selects the page and the number of rows and keeps the order."""
    page.goto(f"{history}/history/app-many-rows/stagecrew/?topologies.sort=Id")

    def ids() -> list[str]:
        return [row["Id"] for row in table_rows(page, "stagecrew-topologies")]

    all_ids = [f"t-{i:03}" for i in range(130)]
    assert ids() == all_ids[:100]
    form = page.locator("form", has=page.locator("input[name='topologies.page']")).first
    form.locator("input[name='topologies.page']").fill("2")
    with page.expect_navigation():
        form.get_by_role("button", name="Go").click()
    assert ids() == all_ids[100:]
    form = page.locator("form", has=page.locator("input[name='topologies.page']")).first
    form.locator("input[name='topologies.page']").fill("3")
    form.locator("input[name='topologies.pageSize']").fill("40")
    with page.expect_navigation():
        form.get_by_role("button", name="Go").click()
    assert ids() == all_ids[80:120]
    with page.expect_navigation():
        page.get_by_role("link", name="4", exact=True).first.click()
    assert ids() == all_ids[120:]


#: A filter that takes the user's name from a header.
HEADER_FILTER = """
import jakarta.servlet.*;
import jakarta.servlet.http.*;
public class HeaderUserFilter implements Filter {
  @Override public void doFilter(ServletRequest request, ServletResponse response, FilterChain chain)
      throws java.io.IOException, ServletException {
    HttpServletRequest http = (HttpServletRequest) request;
    chain.doFilter(new HttpServletRequestWrapper(http) {
      @Override public String getRemoteUser() { return http.getHeader("user"); }
    }, response);
  }
}
"""


@pytest.mark.long
def test_a_user_without_access_to_an_application_is_denied_its_tab(tmp_path: Path) -> None:
    """With `spark.history.ui.acls.enable`, an application's owner and admins see the tab and its JSON.

    Other users get 403.
    """
    (tmp_path / "HeaderUserFilter.java").write_text(HEADER_FILTER)
    jars = f"{Path(pyspark.__file__).parent}/jars/*"
    subprocess.run(
        ["javac", "-cp", jars, "-d", str(tmp_path / "classes"), str(tmp_path / "HeaderUserFilter.java")], check=True
    )
    logs = tmp_path / "logs"
    logs.mkdir()
    write_log(logs, "app-example", example_events())
    acls = {
        "spark.history.ui.acls.enable": "true",
        "spark.history.ui.admin.acls": "root",
        "spark.ui.filters": "HeaderUserFilter",
    }
    classes = f"{stagecrew.jar_path()}:{tmp_path / 'classes'}"

    def status_of(path: str, user: str) -> int:
        request = urllib.request.Request(f"{base}/history/app-example/stagecrew/{path}", headers={"user": user})
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                assert b"orders" in response.read() or "topology" not in path
                return int(response.status)
        except urllib.error.HTTPError as raised:
            with raised as response:
                assert b"orders" not in response.read()
                return int(response.code)

    with history_server(tmp_path, logs, classes, **acls) as base:
        wait_until_listed(base, 1)
        for path in BROWSED_BELOW:
            assert {user: status_of(path, user) for user in ("me", "root", "mallory")} == {
                "me": 200,
                "root": 200,
                "mallory": 403,
            }


def test_unknown_topologies_and_post_requests_are_refused(history: str) -> None:
    """The page of an unknown topology returns 400, as Spark's own pages do, and a POST request returns 405."""
    base = f"{history}/history/app-example/stagecrew"
    for path, data, code in (
        ("topology/?id=%3Cscript%3E", None, 400),
        ("topology/", None, 400),
        ("processes/", b"", 405),
    ):
        with pytest.raises(urllib.error.HTTPError) as raised:
            urllib.request.urlopen(urllib.request.Request(f"{base}/{path}", data=data), timeout=60)
        with raised.value as response:
            assert response.code == code
            assert b"<script>" not in response.read()


@pytest.mark.long
def test_a_thousand_topologies_are_shown_in_under_a_second(tmp_path: Path, page: Page) -> None:
    """Each page of an application with 1,000 topologies loads in less than a second from a History Server."""
    logs = tmp_path / "logs"
    logs.mkdir()
    busy = next(event for event in example_events() if event["id"].startswith("enrich"))
    write_log(
        logs,
        "app-many",
        [{**busy, "id": f"t{i}", "body": busy["body"].replace("enrich-2b8c41d09e63", f"t{i}")} for i in range(1000)],
    )
    store = tmp_path / "store"  # on disk, as on servers with many applications
    store.mkdir()
    with history_server(tmp_path, logs, stagecrew.jar_path(), **{"spark.history.store.path": str(store)}) as base:
        wait_until_listed(base, 1)
        page.goto(f"{base}/history/app-many/stagecrew/")  # reads the log
        for path in ("", "?topologies.sort=Duration", "topology/?id=t7"):
            page.goto(f"{base}/history/app-many/stagecrew/{path}")
            milliseconds = page.evaluate(
                "(e => e.responseEnd - e.requestStart)(performance.getEntriesByType('navigation')[0])"
            )
            assert milliseconds < 1000
            assert page.locator("tbody tr").count() <= 200
        assert len(fetch_json(f"{base}/history/app-many/stagecrew/json/")["topologies"]) == 1000
