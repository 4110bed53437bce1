"""The tab shows work while it runs, without a reload of the page."""

from __future__ import annotations

import json
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Page, expect
from pyspark import cloudpickle
from pyspark.sql import SparkSession

import stagecrew
from support.sessions import Sessions
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
    return sessions.get("local[2]", **{"spark.ui.enabled": "true", "spark.ui.port": "0", "spark.app.name": "live"})


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
    assert int(page.locator("#stagecrew-content").get_attribute("data-stagecrew-updates")) >= 2


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


def test_selected_text_is_not_replaced(spark: SparkSession, base: str, page: Page) -> None:
    """While a reader selects text, the content stays. It is updated when nothing is selected."""
    with stagecrew.crew(spark).topology("selected") as topology:
        page.goto(f"{base}/stagecrew/topology/?id={topology.id}")
        page.locator("#stagecrew-content h4").first.select_text()
        spark.range(4).count()
        page.wait_for_timeout(SHOWN_WITHIN_MS)
        assert page.locator("#stagecrew-content").get_attribute("data-stagecrew-updates") is None
        page.evaluate("document.getSelection().removeAllRanges()")
        expect(page.locator("#stagecrew-content[data-stagecrew-updates]")).to_be_attached(timeout=SHOWN_WITHIN_MS)


def test_the_script_is_served_as_a_script(spark: SparkSession, base: str) -> None:
    """Browsers run it under Spark's content security policy, which the response also has."""
    with urllib.request.urlopen(f"{base}/stagecrew/static/live.js") as response:
        body = response.read().decode()
        assert response.headers.get_content_type() == "text/javascript"
        policy = response.headers["Content-Security-Policy"]
    assert (policy is not None and "script-src 'self'" in policy) == SENDS_SECURITY_POLICY
    assert "stagecrew-content" in body
