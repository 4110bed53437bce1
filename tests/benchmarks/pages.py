"""Measures how long the pages of the tab take with 10, 100 and 1,000 topologies.

Each topology has 66 tasks, 8 opens and closes, two coordinators and two listeners on two executors each. The pages are
read over HTTP from a History Server; they are the same as those of a running application.
"""

import pathlib
import statistics
import sys
import tempfile
import time
import urllib.request

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

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
WARM_UPS, ROUNDS = 20, 20


def pages():
    """Returns the seconds of each page by the number of topologies.

    The figures are the median, the maximum, and the time of the first load, which parses the log.
    """
    found = {}
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
            for count in COUNTS:
                tab = f"{base}/history/app-{count}/stagecrew"
                first = seconds(f"{tab}/")
                found[count] = {"first": first}
                for page, path in PATHS.items():
                    times = [seconds(f"{tab}/{path}") for _ in range(WARM_UPS + ROUNDS)][WARM_UPS:]
                    found[count][page] = {"median": statistics.median(times), "longest": max(times)}
    return found


def seconds(url: str) -> float:
    """Returns the seconds from the request to the last byte of the response."""
    began = time.monotonic()
    with urllib.request.urlopen(url, timeout=60) as response:
        response.read()
    return time.monotonic() - began
