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
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

import pyarrow as pa  # noqa: E402
from playwright.sync_api import sync_playwright  # noqa: E402
from rich.console import Console  # noqa: E402

import stagecrew  # noqa: E402
from stagecrew.observability.console import table  # noqa: E402
from stagecrew.operators.sinks import ParquetSink  # noqa: E402
from stagecrew.recovery.jobs.spec import JobSpec  # noqa: E402
from stagecrew.session.progress import progress_rows  # noqa: E402
from support.driver_processes import QUICK_CONF, campaigning_drivers, wait_until  # noqa: E402
from support.otlp import Span, receiver  # noqa: E402
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
    title = 'crew.topology("read flights", progress=True)'
    draw(table(("what", "state", "details"), rows), title, folder / "progress.svg")


class Airports(stagecrew.Coordinator):
    """Finds the airport of a request, slowly."""

    def handle_request(self, evaluation: stagecrew.Evaluation, request: object) -> object:
        time.sleep(0.1)  # so that the picture shows the request as longer than a point
        return request


def look_up(gateway: stagecrew.TaskGateway, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Sends a request for each batch."""
    for batch in batches:
        gateway.request(batch.num_rows)
        yield batch


def take_trace(folder: Path) -> None:
    """Takes a picture of a trace: a topology with a listener, requests and a commit."""
    os.environ.setdefault("STAGECREW_TEST_FOLDER", tempfile.gettempdir())
    sessions = Sessions()
    with receiver() as collector, tempfile.TemporaryDirectory() as out:
        os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = collector.url
        spark = sessions.get("local[2]", **{"spark.stagecrew.tracing": "true"})
        for name in ("first", "flights"):  # the first topology starts the workers
            with stagecrew.crew(spark).topology("enrich", listeners=[airports()]) as topology:
                operator = topology.coordinate("airports", Airports)
                rows = operator.map(spark.range(4, numPartitions=2), look_up, "id long")
                topology.commit(rows, ParquetSink(f"{out}/{name}"), name)
        sessions.stop()  # exports the spans
        del os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"]
        root = collector.named("topology enrich")[-1]
    lines = list(trace_lines(collector.spans, root, root, 0))
    draw(table(("span", "start", "duration", ""), lines), "a trace", folder / "trace.svg")


def trace_lines(spans: list[Span], span: Span, root: Span, depth: int) -> Iterator[tuple[str, ...]]:
    """Yields the columns of a span and of the spans inside it: name, start, duration and a bar."""
    width = 60
    scale = width / (root.ended - root.started)
    begin, end = (round((moment - root.started) * scale) for moment in (span.started, span.ended))
    bar = " " * min(begin, width - 1) + "\u2588" * max(1, end - begin)
    start, duration = span.started - root.started, span.ended - span.started
    yield "  " * depth + span.name, f"{start * 1000:.0f} ms", f"{duration * 1000:.0f} ms", bar
    for inner in sorted((one for one in spans if one.parent == span.id), key=lambda one: one.started):
        yield from trace_lines(spans, inner, root, depth + 1)


def draw(content: object, title: str, path: Path) -> None:
    """Draws the output of a terminal, without the fonts that the picture would load from another host."""
    console = Console(record=True, width=110, file=io.StringIO())
    console.print(content)
    picture = console.export_svg(title=title)
    path.write_text(re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL))


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else TESTS.parent / "docs" / "assets"
    target.mkdir(parents=True, exist_ok=True)
    take_screenshots(target)
    take_progress(target)
    take_trace(target)
