"""The tab in the History Server: of applications that finished, were killed, or run; and of logs as others may write them."""

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
from support.waiting import eventually
from support.web_pages import THEMES, fetch_json, set_theme, table_rows

cloudpickle.register_pickle_by_value(sys.modules[__name__])

HOSTILE = "</td></table><script>alert(1)</script>\"' onclick='alert(2)' \u202egpj"
LONG = "a name of ten thousand characters " * 300
BROWSED_BELOW = (
    *("", "topology/?id=enrich-2b8c41d09e63", "processes/", "jobs/"),
    *("json/", "topology/json/?id=enrich-2b8c41d09e63", "processes/json/", "jobs/json/"),
)
BROWSED = ("stagecrew/", "stagecrew/processes/", "stagecrew/jobs/")

#: A driver that is in the middle of a topology when it is killed.
MIDDLE = """
import pyspark
session = stagecrew.configure(session_builder("local[2]").config("spark.eventLog.enabled", "true").config("spark.eventLog.dir", {logs!r}))
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


class Echo(stagecrew.Coordinator):
    """Answers, and hears."""

    def handle_event(self, evaluation: stagecrew.Evaluation, event: Any) -> None:
        pass

    def handle_request(self, evaluation: stagecrew.Evaluation, request: Any) -> Any:
        return request


def asks(gateway: stagecrew.TaskGateway, batches: Iterator[Any]) -> Iterator[Any]:
    """Each task asks twice, tells once, and has two rows."""
    for _ in batches:
        pass
    assert [gateway.request(number) for number in range(2)] == [0, 1]
    gateway.send("done")
    yield row_of(1)
    yield row_of(2)


class Made:
    """The applications whose logs are there, what their reports and their tabs said, and what was counted."""

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self.finished = self.killed = self.running = self.capped = ""
        self.reports: dict[str, stagecrew.TopologyReport] = {}
        self.live: dict[str, Any] = {}
        self.opens = 0  # of the one that was killed


@pytest.fixture(scope="module")
def made(sessions: Sessions, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    """One application that has finished, one that was killed, one that runs."""
    folder = tmp_path_factory.mktemp("history")
    logs = folder / "logs"
    logs.mkdir()
    made = Made(logs)
    settings = {"spark.eventLog.enabled": "true", "spark.eventLog.dir": logs.as_uri()}
    settings |= {"spark.ui.enabled": "true", "spark.ui.port": "0", "spark.stagecrew.processes.interval": "200ms"}

    def ran(which: str) -> str:
        sessions.stop()
        spark = sessions.get("local[2]", **settings)
        with stagecrew.crew(spark).topology("nightly", listeners=[Quiet()]) as topology:
            assert spark.sparkContext.parallelize(range(4), 2).map(lambda x: (x % 2, x)).groupByKey(2).count() == 2
            operator = topology.coordinate("echo", Echo)
            assert operator.map(spark.range(0, 4, 1, 2), asks, "a long").count() == 4
        made.reports[which] = topology.report
        made.live[which] = fetch_json(f"http://127.0.0.1:{urlsplit(spark.sparkContext.uiWebUrl).port}/stagecrew/json/")
        return str(spark.sparkContext.applicationId)

    def capped() -> str:
        sessions.stop()
        few = {"spark.stagecrew.eventLog.interval": "100ms", "spark.stagecrew.eventLog.maxEvents": "2"}
        spark = sessions.get("local[2]", **settings, **few, **{"spark.eventLog.compress": "false"})
        app = str(spark.sparkContext.applicationId)
        crew = stagecrew.crew(spark)
        with crew.topology("often") as topology:
            for number in range(3):
                with crew.topology(f"inside {number}") as inside:  # what is due is stored of both at once
                    assert spark.sparkContext.parallelize(range(4), 2).sum() == 6
                    eventually(lambda inside=inside: len(stored(logs, app, inside.id)) == 2, 30, "its job is stored")
        made.reports["capped"] = topology.report
        return app

    journal = Journal(str(folder / "journal"))
    with driver_script(folder, journal, "local[2]", MIDDLE.replace("{logs!r}", repr(logs.as_uri()))) as process:
        made.finished = ran("finished")
        ready = eventually(lambda: journal.read(event="ready"), 120, "the driver is in its topology")[0]
        made.killed = ready["application"]
        # Its listeners' opens are in its log before it dies.
        (log,) = logs.glob(f"*{made.killed}*/events*")
        made.opens = len(journal.read(event="open", listener="pool"))
        eventually(lambda: f'\\"opens\\":{made.opens},' in log.read_text(), 30, "the log tells of the opens")
        # The JVM first: one whose Python is gone ends in good order.
        for killed in (*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)):
            kill(killed.pid)
        process.wait(30)
    made.capped = capped()
    made.running = ran("running")
    yield made
    sessions.stop()


@pytest.fixture(scope="module")
def history(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A History Server that has the jar on its class path, over logs of real applications and such as are made up."""
    write_log(made.logs, "app-example", example_events())
    write_log(made.logs, "app-without", [])
    write_log(made.logs, "app-hostile", hostile())
    write_log(made.logs, "app-newer", newer())
    write_log(made.logs, "app-many-rows", [state("topology", topology(f"t-{i:03}", f"run {i}")) for i in range(130)])
    with history_server(tmp_path_factory.mktemp("server"), made.logs, stagecrew.jar_path()) as base:
        listed(base, 9)
        yield base


def stored(logs: Path, app: str, id_: str) -> list[dict[str, Any]]:
    """What of ours a log has of a topology, or of the application beside them."""
    (log,) = logs.glob(f"*{app}*/events*")
    events = [json.loads(line) for line in log.read_text().split("\n") if line.endswith("}") and CLASS in line]
    return [one for one in events if one["id"] == id_]


def listed(base: str, how_many: int) -> None:
    """Waits until so many applications are listed."""
    eventually(
        lambda: len(fetch_json(f"{base}/api/v1/applications")) >= how_many, 60, f"{how_many} applications are listed"
    )


def tab_of(app: str) -> str:
    """The path of the tab in the History Server. It has the application's id: pages also show paths of this checkout."""
    return f"/history/{app}/stagecrew/"


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
    named = next(row for row in table_rows(page, "stagecrew-topologies") if row["Id"] == report.id)
    assert (named["State"], named["Jobs"], named["Executors"]) == ("closed", str(report.jobs), "1")
    (quiet,) = table_rows(page, "stagecrew-listeners")
    (counted,) = report.listeners
    assert [int(quiet[name]) for name in ("Opens", "Closes", "Failures", "Lost")] == [
        counted.opens, counted.closes, counted.failures, counted.lost,
    ]  # fmt: skip
    assert tab_of(made.finished) in page.content()
    page.get_by_role("link", name="nightly").first.click()
    page.wait_for_url("**/stagecrew/topology/**")
    assert page.locator(".alert").count() == 0
    body = fetch_json(f"{history}/history/{made.finished}/stagecrew/json/")
    assert [stagecrew.TopologyReport.of(node) for node in body["topologies"] if node["id"] == report.id] == [report]
    assert {node["state"] for node in body["topologies"]} == {"closed"}
    # All of it is as it was: spans, partitions and coordinators too.
    live = made.live["finished"]
    assert [node for node in body["topologies"] if node["id"] == report.id] == [
        node for node in live["topologies"] if node["id"] == report.id
    ]
    assert (body["totals"], body["coordinators"]) == (live["totals"], live["coordinators"])
    looked = {(one["pid"], one["started"]): one["samples"] for one in body["processes"]}
    for one in live["processes"]:
        at = {sample["time"]: sample for sample in looked[one["pid"], one["started"]]}  # only the last ones are kept
        assert [at.get(sample["time"], sample) for sample in one["samples"]] == one["samples"]
    topology_page = f"{history}/history/{made.finished}/stagecrew/topology/json/?id={report.id}"
    (node,) = (node for node in body["topologies"] if node["id"] == report.id)
    assert fetch_json(topology_page) == {"version": 1, "until": node["ended"], "notes": [], "topology": node}
    assert report.released > 0
    assert [(one.requests, one.events_in, one.finished) for one in report.operators] == [(4, 2, 2)]


@pytest.mark.parametrize("which", ["killed", "running"])
def test_an_application_that_has_not_ended_is_shown_as_of_its_last_event(
    made: Made, history: str, page: Page, which: str
) -> None:
    """Of a killed application, as of one that runs, there is what its log has; and the page says so."""
    app = getattr(made, which)
    page.goto(f"{history}/history/{app}/stagecrew/")
    states = {row["Topology"]: row["State"] for row in table_rows(page, "stagecrew-topologies")}
    assert states == {"application": "active", **({"middle": "active"} if which == "killed" else {"nightly": "closed"})}
    page.get_by_role("link", name="middle" if which == "killed" else "application").first.click()
    page.wait_for_url("**/stagecrew/topology/**")
    assert "it had not ended then" in page.locator(".alert").inner_text()
    page.goto(f"{history}/history/{app}/stagecrew/")
    assert "Python processes and the stored job are shown as of" in page.locator(".alert").inner_text()
    (listener_,) = table_rows(page, "stagecrew-listeners")
    opens = made.opens if which == "killed" else made.reports["running"].opens
    assert int(listener_["Opens"]) == opens >= 1
    assert f"opens {opens}, " in page.locator("li", has_text="Listeners").inner_text()


def test_so_often_a_topology_is_stored_and_the_page_says_what_is_left_out(made: Made, history: str, page: Page) -> None:
    """Of one that changes all the time its log has so many states and its end; that is as its report was."""
    report = made.reports["capped"]
    mine = stored(made.logs, made.capped, report.id)
    assert [(one["number"], one["capped"], json.loads(one["body"])["state"]) for one in mine] == [
        (1, False, "active"), (2, True, "active"), (3, True, "closed"),
    ]  # fmt: skip
    assert 1 <= len(stored(made.logs, made.capped, "")) <= 3
    page.goto(f"{history}/history/{made.capped}/stagecrew/topology/?id={report.id}")
    note = page.locator(".alert").inner_text()
    assert "is left out (spark.stagecrew.eventLog.maxEvents)" in note
    body = fetch_json(f"{history}/history/{made.capped}/stagecrew/topology/json/?id={report.id}")
    assert body["notes"] == [note]
    assert stagecrew.TopologyReport.of(body["topology"]) == report
    assert report.jobs == 3


def test_the_policy_is_sent_by_the_history_server_too(made: Made, history: str) -> None:
    """Each page carries Spark's content security policy."""
    for path in ("", "topology/?id=application", "processes/", "jobs/"):
        with urllib.request.urlopen(f"{history}/history/{made.finished}/stagecrew/{path}", timeout=60) as response:
            assert "script-src 'self'" in response.headers["Content-Security-Policy"]


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
        set_theme(page, theme)
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
    progress = {row["Name"]: row["Progress"] for row in table_rows(page, "stagecrew-coordinators")}
    assert progress == {"flights": "splits done 64 / splits left 0", "budget": "spent 80"}


def test_texts_of_users_stay_text(history: str, page: Page) -> None:
    """Markup is shown, nothing of it runs, and a text of 10,000 characters leaves the table usable."""
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


def test_logs_of_later_versions_and_logs_without_our_events_are_readable(history: str, page: Page) -> None:
    """What is known of a newer log is shown, with a word that it is newer; without an event of ours there is no tab."""
    page.goto(f"{history}/history/app-newer/stagecrew/")
    assert [row["Topology"] for row in table_rows(page, "stagecrew-topologies")] == ["later"]
    page.get_by_role("link", name="later").click()
    page.wait_for_url("**/stagecrew/topology/**")
    assert "newer stagecrew" in page.locator(".alert").inner_text()
    page.goto(f"{history}/history/app-without/jobs/")
    assert page.get_by_role("link", name="Stagecrew").count() == 0


def test_a_history_server_without_the_jar_reads_our_logs(made: Made, tmp_path: Path) -> None:
    """It drops our events, and shows Spark's own pages of the application."""
    with history_server(tmp_path, made.logs) as base:
        listed(base, 4)
        for app in (made.finished, made.killed, made.running):
            with urllib.request.urlopen(f"{base}/history/{app}/jobs/", timeout=60) as response:
                body = response.read().decode()
            assert response.status == 200
            assert tab_of(app) not in body
            assert fetch_json(f"{base}/api/v1/applications/{app}/jobs")


def test_a_table_of_many_rows_is_turned_as_sparks_own(history: str, page: Page) -> None:
    """With Spark's form: to the page that is asked for, with as many rows as are asked for, in the order that was chosen."""
    page.goto(f"{history}/history/app-many-rows/stagecrew/?topologies.sort=Id")

    def ids() -> list[str]:
        return [row["Id"] for row in table_rows(page, "stagecrew-topologies")]

    every = [f"t-{i:03}" for i in range(130)]
    assert ids() == every[:100]
    form = page.locator("form", has=page.locator("input[name='topologies.page']")).first
    form.locator("input[name='topologies.page']").fill("2")
    with page.expect_navigation():
        form.get_by_role("button", name="Go").click()
    assert ids() == every[100:]
    form = page.locator("form", has=page.locator("input[name='topologies.page']")).first
    form.locator("input[name='topologies.page']").fill("3")
    form.locator("input[name='topologies.pageSize']").fill("40")
    with page.expect_navigation():
        form.get_by_role("button", name="Go").click()
    assert ids() == every[80:120]
    with page.expect_navigation():
        page.get_by_role("link", name="4", exact=True).first.click()
    assert ids() == every[120:]


#: As a filter of a user's that knows who asks: it stands in a header.
ASKING = """
import jakarta.servlet.*;
import jakarta.servlet.http.*;
public class Asking implements Filter {
  @Override public void doFilter(ServletRequest request, ServletResponse response, FilterChain chain) throws java.io.IOException, ServletException {
    HttpServletRequest http = (HttpServletRequest) request;
    chain.doFilter(new HttpServletRequestWrapper(http) {
      @Override public String getRemoteUser() { return http.getHeader("user"); }
    }, response);
  }
}
"""


@pytest.mark.long
def test_who_may_not_see_an_application_is_denied_its_tab(tmp_path: Path) -> None:
    """With spark.history.ui.acls.enable the owner of an application and admins see the tab and its JSON; others get 403."""
    (tmp_path / "Asking.java").write_text(ASKING)
    jars = f"{Path(pyspark.__file__).parent}/jars/*"
    subprocess.run(["javac", "-cp", jars, "-d", str(tmp_path / "classes"), str(tmp_path / "Asking.java")], check=True)
    logs = tmp_path / "logs"
    logs.mkdir()
    write_log(logs, "app-example", example_events())
    acls = {"spark.history.ui.acls.enable": "true", "spark.history.ui.admin.acls": "root", "spark.ui.filters": "Asking"}
    classes = f"{stagecrew.jar_path()}:{tmp_path / 'classes'}"

    def asked(path: str, user: str) -> int:
        request = urllib.request.Request(f"{base}/history/app-example/stagecrew/{path}", headers={"user": user})
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                assert b"orders" in response.read() or "topology" not in path
                return int(response.status)
        except urllib.error.HTTPError as refused:
            with refused as answer:
                assert b"orders" not in answer.read()
                return int(answer.code)

    with history_server(tmp_path, logs, classes, **acls) as base:
        listed(base, 1)
        for path in BROWSED_BELOW:
            assert {user: asked(path, user) for user in ("me", "root", "mallory")} == {
                "me": 200,
                "root": 200,
                "mallory": 403,
            }


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
    busy = next(event for event in example_events() if event["id"].startswith("enrich"))
    write_log(
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
        assert len(fetch_json(f"{base}/history/app-many/stagecrew/json/")["topologies"]) == 1000
