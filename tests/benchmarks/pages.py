"""Measures how long the pages of the tab take with 10, 100 and 1,000 topologies.

Each topology has 66 tasks, 8 opens and closes, two coordinators and two listeners on two executors each. The pages are
read over HTTP from a History Server; they are the same as those of a running application.
"""

import pathlib
import tempfile
import time
import urllib.request

from measurements import Measurement, at_most
from processes import Run

import stagecrew
from support.clusters import history_server
from support.event_logs import application, example_events, write_log
from support.waiting import eventually
from support.web_pages import fetch_json

COUNTS = (10, 100, 1000)
PATHS = {
    "overview": "",
    "overview, sorted": "?topologies.sort=Duration&listeners.sort=Opens",
    "topology": "topology/?id=t7",
    "overview as JSON": "json/",
}
WARM_UPS = 20


def pages(run: Run):
    """How long the pages of the tab take with 10, 100 and 1,000 topologies."""
    busy = next(event for event in example_events() if event["id"].startswith("enrich"))
    name = busy["id"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        logs = folder / "logs"
        logs.mkdir()
        for count in COUNTS:
            events = [{**busy, "id": f"t{i}", "body": busy["body"].replace(name, f"t{i}")} for i in range(count)]
            write_log(logs, f"app-{count}", [*events, application()])
        with history_server(folder, logs, stagecrew.jar_path()) as base:
            eventually(lambda: len(fetch_json(f"{base}/api/v1/applications")) == len(COUNTS), 60, "the logs are listed")
            tabs = {count: f"{base}/history/app-{count}/stagecrew" for count in COUNTS}
            first = {count: seconds(f"{tab}/") for count, tab in tabs.items()}
            times = {(count, page): [] for count in COUNTS for page in PATHS}
            for count, page in times:
                for _ in range(WARM_UPS):
                    seconds(f"{tabs[count]}/{PATHS[page]}")
            for _ in run.rounds(20):
                for (count, page), values in times.items():
                    values.append(seconds(f"{tabs[count]}/{PATHS[page]}"))
    for count in COUNTS:
        yield Measurement(f"{count:,} topologies, first page, which parses the log", "s", [first[count]])
        for page in PATHS:
            goal = None if page.endswith("JSON") else at_most(1)
            yield Measurement(f"{count:,} topologies, {page}", "s", times[count, page], goal=goal)


def seconds(url: str) -> float:
    """Returns the seconds from the request to the last byte of the response."""
    began = time.monotonic()
    with urllib.request.urlopen(url, timeout=60) as response:
        response.read()
    return time.monotonic() - began
