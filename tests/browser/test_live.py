"""The tab shows work while it runs, without a reload of the page."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow as pa
import pytest
from playwright.sync_api import Page, expect
from pyspark import cloudpickle
from pyspark.sql import SparkSession

import stagecrew
from support.sessions import LOCAL_CLUSTER, Sessions
from support.spark_versions import SENDS_SECURITY_POLICY
from support.waiting import eventually
from support.web_pages import table_rows

cloudpickle.register_pickle_by_value(sys.modules[__name__])
#: How long the page may take to show a change.
SHOWN_WITHIN_MS = 2000


@pytest.fixture(scope="module")
def spark(sessions: Sessions) -> SparkSession:
    """A new session with the UI."""
    sessions.stop()
    conf = {"spark.ui.enabled": "true", "spark.ui.port": "0", "spark.app.name": "live"}
    return sessions.get("local[2]", **conf, **{"spark.stagecrew.processes.interval": "500ms"})


@pytest.fixture(scope="module")
def base(spark: SparkSession) -> str:
    """The URL of the UI, with an address that always resolves."""
    return f"http://127.0.0.1:{urlsplit(spark.sparkContext.uiWebUrl).port}"


@pytest.fixture
def release(tmp_path: Path) -> Iterator[Callable[[], None]]:
    """A function that lets the tasks of `run_waiting` end."""
    yield (tmp_path / "release").touch
    (tmp_path / "release").touch()


def run_waiting(spark: SparkSession, topology: stagecrew.Topology, folder: Path) -> threading.Thread:
    """Starts a job whose two tasks wait for a file. Returns when both tasks run."""

    def wait(rows: Iterator[int]) -> Iterator[int]:
        (folder / f"began-{next(iter(rows))}").touch()
        while not (folder / "release").exists():
            time.sleep(0.02)
        yield 1

    def run() -> None:
        spark.sparkContext.parallelize(range(2), 2).mapPartitions(wait).collect()

    thread = threading.Thread(target=topology.wrap(run), daemon=True)
    thread.start()
    eventually(lambda: len(list(folder.glob("began-*"))) == 2, 30)
    return thread


def updates(page: Page) -> int:
    """How many times the page has been updated."""
    return int(page.locator("#stagecrew-content").get_attribute("data-stagecrew-updates") or 0)


def test_running_tasks_appear_and_end_without_a_reload(
    spark: SparkSession, base: str, page: Page, tmp_path: Path, release: Callable[[], None]
) -> None:
    """Tasks that run are in the timeline within two seconds, and no longer running within two seconds of their end."""
    with stagecrew.crew(spark).topology("waiting") as topology:
        page.goto(f"{base}/stagecrew/topology/?id={topology.id}")
        expect(page.get_by_text("no listener or task began")).to_be_visible()
        thread = run_waiting(spark, topology, tmp_path)
        expect(page.get_by_text("2 still running")).to_be_visible(timeout=SHOWN_WITHIN_MS)
        with urllib.request.urlopen(f"{base}/stagecrew/topology/json/?id={topology.id}") as response:
            running = json.load(response)["running"]
        assert [(task["executor"], task["kind"], task["ended"]) for task in running] == [("driver", "task", 0)] * 2
        page.screenshot(path=tmp_path / "running.png", full_page=True)
        release()
        thread.join(30)
        expect(page.get_by_text("2 still running")).to_be_hidden(timeout=SHOWN_WITHIN_MS)
    expect(page.locator("#stagecrew-content", has_text="State: closed")).to_be_visible(timeout=SHOWN_WITHIN_MS)
    assert updates(page) >= 2


def test_a_new_topology_appears_in_the_overview(spark: SparkSession, base: str, page: Page) -> None:
    """The list of topologies grows while the page is open. The keyboard focus stays on the same link."""
    with stagecrew.crew(spark).topology("first"):
        page.goto(f"{base}/stagecrew/")
        page.get_by_role("link", name="Python processes").focus()
        with stagecrew.crew(spark).topology("second") as second:
            expect(page.locator("#stagecrew-topologies", has_text=second.id)).to_be_visible(timeout=SHOWN_WITHIN_MS)
            states = {row["Id"]: row["State"] for row in table_rows(page, "stagecrew-topologies")}
            assert states[second.id] == "active"
            assert page.evaluate("document.activeElement.textContent") == "Python processes"


def test_an_idle_page_shows_new_work_within_two_seconds(spark: SparkSession, base: str, page: Page) -> None:
    """A page that was opened while nothing ran is updated as often as any other."""
    page.goto(f"{base}/stagecrew/")
    eventually(lambda: updates(page) >= 3, 10)
    with stagecrew.crew(spark).topology("after a pause") as topology:
        expect(page.locator("#stagecrew-content")).to_contain_text(topology.id, timeout=SHOWN_WITHIN_MS)


class Proxy(BaseHTTPRequestHandler):
    """A reverse proxy that serves the Spark UI under /gateway, and says so in the header that Spark reads."""

    target: str

    def do_GET(self) -> None:
        if not self.path.startswith("/gateway/"):
            self.send_error(404)
            return
        request = urllib.request.Request(
            self.target + self.path.removeprefix("/gateway"), headers={"X-Forwarded-Context": "/gateway"}
        )
        with urllib.request.urlopen(request) as response:
            self.send_response(response.status)
            for name in ("Content-Type", "Content-Security-Policy"):
                if (value := response.headers[name]) is not None:
                    self.send_header(name, value)
            self.end_headers()
            self.wfile.write(response.read())

    def log_request(self, *args: object) -> None:
        pass


class ProxyServer(ThreadingHTTPServer):
    request_queue_size = 64  # the browser opens several connections at once


@contextlib.contextmanager
def serving(handler: type[Proxy], page: Page) -> Iterator[str]:
    """Serves the Spark UI through a proxy, and yields the URL. Then leaves the page, so that it requests nothing more."""
    with ProxyServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/gateway"
            page.goto("about:blank")
        finally:
            server.shutdown()


def test_the_page_is_updated_and_its_links_work_through_a_reverse_proxy(
    spark: SparkSession, base: str, page: Page
) -> None:
    """Script, updates and links keep the proxy's prefix."""
    handler = type("handler", (Proxy,), {"target": base})
    with serving(handler, page) as prefix:
        page.goto(f"{prefix}/stagecrew/")
        with stagecrew.crew(spark).topology("behind a proxy") as topology:
            expect(page.locator("#stagecrew-content")).to_contain_text(topology.id, timeout=SHOWN_WITHIN_MS)
            page.locator(f"#stagecrew-topologies a[href$='id={topology.id}']").click()
            expect(page.locator("#stagecrew-content")).to_contain_text("State: active")
        assert page.url.startswith(f"{prefix}/stagecrew/topology/?id=")
        page.get_by_role("link", name="Python processes").click()
        expect(page.get_by_role("heading", name="Stagecrew: Python processes")).to_be_visible()


class SlowProxy(Proxy):
    """Delays the updates of the page, like a driver that takes long to generate it."""

    delays: list[float]
    began: list[float]
    ended: list[float]

    def do_GET(self) -> None:
        if self.headers["Sec-Fetch-Dest"] != "empty":  # the page itself and its files
            super().do_GET()
            return
        number = len(self.began)
        self.began.append(time.monotonic())
        time.sleep(self.delays[number] if number < len(self.delays) else 0)
        super().do_GET()
        self.ended.append(time.monotonic())


def test_only_a_page_that_is_slow_twice_in_a_row_is_requested_less_often(base: str, page: Page) -> None:
    """After one slow response, the next request comes as soon as after a fast one."""
    delays = [0.0, 1.5, 0.0, 0.6, 0.6, 0.0]
    handler = type("handler", (SlowProxy,), {"target": base, "delays": delays, "began": [], "ended": []})
    with serving(handler, page) as prefix:
        page.goto(f"{prefix}/stagecrew/")
        eventually(lambda: updates(page) > len(delays), 30, "each delayed response is shown")
    pauses = [began - ended for ended, began in zip(handler.ended[:5], handler.began[1:6], strict=True)]
    assert pauses[1] < 3  # not 3 * 1.5
    assert pauses[4] >= 3 * 0.6 - 0.1  # the clocks of the browser and of this test may differ a little


def test_selected_text_is_not_replaced(spark: SparkSession, base: str, page: Page) -> None:
    """While a reader selects text, the content stays. It is updated when nothing is selected."""
    with stagecrew.crew(spark).topology("selected") as topology:
        page.goto(f"{base}/stagecrew/topology/?id={topology.id}")
        page.locator("#stagecrew-content h4").first.select_text()
        before = updates(page)  # on a busy machine, the page may have been updated before the text was selected
        spark.range(4).count()
        page.wait_for_timeout(SHOWN_WITHIN_MS)
        assert updates(page) == before
        page.evaluate("document.getSelection().removeAllRanges()")
        eventually(lambda: updates(page) > before, SHOWN_WITHIN_MS / 1000, "the page is updated")


def test_the_script_is_served_as_a_script(spark: SparkSession, base: str) -> None:
    """Browsers run it under Spark's content security policy, which the response also has."""
    with urllib.request.urlopen(f"{base}/stagecrew/static/live.js") as response:
        body = response.read().decode()
        assert response.headers.get_content_type() == "text/javascript"
        policy = response.headers["Content-Security-Policy"]
    assert (policy is not None and "script-src 'self'" in policy) == SENDS_SECURITY_POLICY
    assert "stagecrew-content" in body


@stagecrew.resource(scope="worker")
def slow(context: stagecrew.ListenerContext, folder: str) -> Iterator[None]:
    """Opens when the file `opens` exists."""
    Path(folder, "opening").touch()
    while not Path(folder, "opens").exists():
        time.sleep(0.02)
    yield


def run_opening(spark: SparkSession, topology: stagecrew.Topology, folder: Path) -> threading.Thread:
    """Starts a job with one task. Returns when its listener `slow` is opening."""
    job = topology.wrap(lambda: spark.sparkContext.parallelize([1], 1).map(lambda row: row).count())
    thread = threading.Thread(target=job, daemon=True)
    thread.start()
    eventually((folder / "opening").exists, 30)
    return thread


def test_a_running_open_appears_without_a_reload(spark: SparkSession, base: str, page: Page, tmp_path: Path) -> None:
    """An `open` that runs is in the timeline within two seconds, and no longer runs within two seconds of its end."""
    with stagecrew.crew(spark).topology("opening", listeners=[slow(str(tmp_path))]) as topology:
        page.goto(f"{base}/stagecrew/topology/?id={topology.id}")
        thread = run_opening(spark, topology, tmp_path)
        bar = page.locator("rect.stagecrew-open", has_text="open slow on driver, still running")
        expect(bar).to_be_attached(timeout=SHOWN_WITHIN_MS)
        page.screenshot(path=tmp_path / "opening.png", full_page=True)
        (tmp_path / "opens").touch()
        thread.join(30)
        expect(bar).to_be_hidden(timeout=SHOWN_WITHIN_MS)


class Silent(stagecrew.Coordinator):
    """Does not reply until `later` has a result."""

    def __init__(self, context: stagecrew.CoordinatorContext, later: Future[int]) -> None:
        super().__init__(context)
        self.later = later

    def handle_request(self, evaluation: stagecrew.Evaluation, request: int) -> Future[int]:
        return self.later


def test_what_takes_long_is_named_and_links_lead_to_sparks_pages(
    spark: SparkSession, base: str, page: Page, tmp_path: Path
) -> None:
    """The slowest request and the slowest split are named with their tasks, splits have a bar, and jobs have links."""
    release, later = tmp_path / "release", Future()

    def read(split: int) -> Iterator[pa.RecordBatch]:
        while split == 3 and not release.exists():
            time.sleep(0.02)
        yield pa.record_batch({"split": [split]})

    def ask(gateway: stagecrew.TaskGateway, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        gateway.request(1)
        yield from batches

    with stagecrew.crew(spark).topology("slow") as topology:
        page.goto(f"{base}/stagecrew/topology/?id={topology.id}")
        splits = topology.splits(list(range(8)), read, "split long", parallelism=1)
        asks = topology.coordinate("silent", lambda context: Silent(context, later)).map(
            spark.range(1, numPartitions=1), ask, "id long"
        )
        threads = [threading.Thread(target=topology.wrap(dataset.count), daemon=True) for dataset in (splits, asks)]
        for thread in threads:
            thread.start()
        coordinators = page.locator("#stagecrew-coordinators")
        expect(coordinators).to_contain_text("slowest split: subtask 0 on executor driver", timeout=30000)
        expect(coordinators).to_contain_text("slowest request: subtask 0 on executor driver")
        expect(coordinators.locator(".progress").first).to_be_visible()
        page.screenshot(path=tmp_path / "slow.png", full_page=True)
        later.set_result(1)
        release.touch()
        for thread in threads:
            thread.join(30)
        expect(coordinators).not_to_contain_text("slowest", timeout=2 * SHOWN_WITHIN_MS)
        for path, heading in (("jobs/job", "Job"), ("stages/stage", "Stage"), ("SQL/execution", "Query")):
            page.goto(f"{base}/stagecrew/topology/?id={topology.id}")
            page.locator(f"#stagecrew-jobs a[href*='{path}/']").first.click()
            expect(page).to_have_title(re.compile(f"Details for {heading}"))


@pytest.mark.contract
def test_a_process_shows_its_topology_and_its_task(
    spark: SparkSession, base: str, page: Page, tmp_path: Path, release: Callable[[], None]
) -> None:
    """The page of processes names the topology and the task of each worker that has listeners."""
    with stagecrew.crew(spark).topology("working", listeners=[stagecrew.LoggingContext()]) as topology:
        thread = run_waiting(spark, topology, tmp_path)
        page.goto(f"{base}/stagecrew/processes/")
        rows = page.locator("#stagecrew-processes tr", has_text="working")
        expect(rows).to_have_count(2, timeout=3000)
        expect(rows.first).to_contain_text(re.compile(r"stage \d+\.0 partition \d attempt \d+"))
        page.screenshot(path=tmp_path / "processes.png", full_page=True)
        release()
        thread.join(30)


@pytest.mark.long
def test_a_running_open_of_an_executor_appears_within_two_seconds(
    sessions: Sessions, page: Page, tmp_path: Path
) -> None:
    """The executor reports it, and the page shows it. Both wait for their next turn."""
    sessions.stop()
    spark = sessions.get(LOCAL_CLUSTER, **{"spark.ui.enabled": "true", "spark.ui.port": "0"})
    url = f"http://127.0.0.1:{urlsplit(spark.sparkContext.uiWebUrl).port}/stagecrew/topology/"
    for number in range(5):  # at five different moments of both periods
        folder = tmp_path / str(number)
        folder.mkdir()
        with stagecrew.crew(spark).topology("opening", listeners=[slow(str(folder))]) as topology:
            page.goto(f"{url}?id={topology.id}")
            thread = run_opening(spark, topology, folder)
            bar = page.locator("rect.stagecrew-open", has_text="open slow on")
            expect(bar).to_be_attached(timeout=SHOWN_WITHIN_MS)
            (folder / "opens").touch()
            thread.join(30)
    page.goto("about:blank")  # so that the page requests nothing more
    sessions.stop()
