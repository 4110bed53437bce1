"""Takes the pictures for the documentation: `.venv/bin/python tests/browser/screenshots.py [FOLDER]`.

The pictures of the tab show a real run in a real browser, in both themes: the job of nightly.py on two executors, after
its first run was killed. The picture of a terminal shows the progress of a topology that is running.
"""

from __future__ import annotations

import io
import os
import re
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

import pyarrow as pa  # noqa: E402
from playwright.sync_api import sync_playwright  # noqa: E402
from rich.console import Console  # noqa: E402

import stagecrew  # noqa: E402
from stagecrew.observability.console import table  # noqa: E402
from stagecrew.recovery.jobs.spec import JobSpec  # noqa: E402
from stagecrew.session.progress import progress_rows  # noqa: E402
from support.driver_processes import QUICK_CONF, campaigning_drivers, wait_until  # noqa: E402
from support.sessions import Sessions  # noqa: E402
from support.spark_home import use_spark_home  # noqa: E402
from support.web_pages import THEMES, checked_page, fetch_json, launch_browser, set_theme  # noqa: E402

PAGES = {
    "overview": "", "topology": "topology/?id={enrich}", "running": "topology/?id={checks}", "processes": "processes/",
    "job": "jobs/",
}  # fmt: skip
CONF = QUICK_CONF | {
    "spark.master": "local-cluster[2,2,1024]",
    "spark.ui.enabled": "true",
    "spark.ui.port": "0",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.shuffle.partitions": "16",
    "spark.stagecrew.processes.interval": "1s",
}

#: Hides Spark's floating buttons for long pages, which would cover parts of the page.
HIDE_FLOATING_BUTTONS = """() => document.querySelectorAll('body *').forEach(e => {
  if (getComputedStyle(e).position === 'fixed' && e.tagName !== 'FOOTER') e.style.display = 'none' })"""


def take_screenshots(folder: Path) -> None:
    """Takes a picture of each page in each theme, as `tab-PAGE-THEME.png`."""
    os.environ.setdefault("TZ", "UTC")
    use_spark_home()
    with (
        tempfile.TemporaryDirectory() as temporary,
        campaigning_drivers(f"sqlite://{temporary}/jobs.db", Path(temporary)) as drivers,
    ):
        out = Path(temporary) / "out"
        drivers.start()
        drivers.leader()
        module = Path(__file__).with_name("nightly.py")
        drivers.submit(JobSpec.of_function("nightly:run", {"folder": str(out)}, CONF, [module], 10), "nightly")
        wait_until((out / "loaded-1").exists, "the first step has finished")
        os.kill(drivers.process("nightly"), signal.SIGKILL)
        (out / "go-2").touch()
        wait_until((out / "ui").exists, "the job makes its report", 300)
        base = f"http://127.0.0.1:{urlsplit((out / 'ui').read_text()).port}/stagecrew"

        def topologies_when_report_runs() -> dict[str, str] | None:
            found = {one["name"]: one for one in fetch_json(f"{base}/json/")["topologies"]}
            busy = [one for one in found["report"]["operators"] if one["live"] == 3] if "checks" in found else []
            return {name: one["id"] for name, one in found.items()} if busy else None

        ids = wait_until(topologies_when_report_runs, "the report's last tasks are running")
        with sync_playwright() as playwright:
            browser = launch_browser(playwright)
            for name, path in PAGES.items():
                for theme in THEMES:
                    with checked_page(browser) as page:
                        page.set_viewport_size({"width": 1500, "height": 400})
                        page.goto(f"{base}/{path.format(**ids)}")
                        set_theme(page, theme)
                        page.evaluate(HIDE_FLOATING_BUTTONS)
                        page.screenshot(path=folder / f"tab-{name}-{theme}.png", full_page=True)
            browser.close()
        (out / "go-end").touch()
        print("routes:", drivers.result("nightly").value())


@stagecrew.resource
def airports(context: stagecrew.ListenerContext) -> object:
    """A listener with a slow `open`."""
    time.sleep(0.2)
    yield "a connection"


def take_progress(folder: Path) -> None:
    """Takes a picture of the terminal with `progress=True`, while some splits have been read."""

    def read(split: int) -> object:
        time.sleep(0.1 if split else 5)
        yield pa.record_batch({"split": [split]})

    os.environ.setdefault("STAGECREW_TEST_FOLDER", tempfile.gettempdir())
    sessions = Sessions()
    spark = sessions.get("local[2]")
    with stagecrew.crew(spark).topology("read flights", listeners=[airports()]) as topology:
        splits = topology.splits(range(60), read, "split long", parallelism=2)
        job = threading.Thread(target=topology.wrap(lambda: splits.groupBy("split").count().collect()))
        job.start()
        wait_until(
            lambda: int((topology.progress.get("splits/1") or {}).get("splits done", 0)) > 20, "20 splits are read"
        )
        time.sleep(1.5)  # until the next report
        rows = progress_rows(topology.report)
        job.join()
    sessions.stop()
    console = Console(record=True, width=110, file=io.StringIO())
    console.print(table(("what", "state", "details"), rows))
    picture = console.export_svg(title='crew.topology("read flights", progress=True)')
    (folder / "progress.svg").write_text(re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL))


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else TESTS.parent / "docs" / "assets"
    target.mkdir(parents=True, exist_ok=True)
    take_screenshots(target)
    take_progress(target)
