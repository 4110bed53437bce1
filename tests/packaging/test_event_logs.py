"""The History Server of one version of Spark shows what stagecrew wrote into the event log of another version."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stagecrew.spark_version import SPARK_LINES
from support.clusters import history_server
from support.installed import Installed
from support.waiting import eventually
from support.web_pages import fetch_json

pytestmark = [pytest.mark.wheel, pytest.mark.timeout(600)]

OLDEST, NEWEST = SPARK_LINES[0], SPARK_LINES[-1]

JOB = """
import json, sys
import stagecrew
from pyspark.sql import SparkSession

@stagecrew.resource
def pool(context):
    yield 1

builder = SparkSession.builder.master("local[2]").appName("writer")
builder = builder.config("spark.eventLog.enabled", "true").config("spark.eventLog.dir", sys.argv[1])
spark = stagecrew.configure(builder.config("spark.ui.enabled", "false")).getOrCreate()
with stagecrew.crew(spark).topology("nightly", listeners=[pool()]) as topology:
    spark.range(100).selectExpr("id % 7 as key").groupBy("key").count().mapInArrow(lambda b: b, "key long, count long").count()
report = topology.report
print("REPORT", json.dumps({"application": spark.sparkContext.applicationId, "id": report.id, "opens": report.opens,
                            "closes": report.closes, "released": report.released}))
spark.stop()
"""


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Installed]]:
    """The oldest and the newest Spark."""
    folders = {line: tmp_path_factory.mktemp(f"spark-{line}") for line in (OLDEST, NEWEST)}
    yield {line: Installed(folder, line) for line, folder in folders.items()}
    for folder in folders.values():
        shutil.rmtree(folder)


def write(installed: Installed, logs: Path) -> dict[str, Any]:
    """Runs an application with an event log, and returns its report."""
    (installed.work / "job.py").write_text(JOB)
    done = installed.run("python", "job.py", logs.as_uri())
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("REPORT "))
    report: dict[str, Any] = json.loads(line.removeprefix("REPORT "))
    assert report["opens"] == report["closes"] > 0
    assert report["released"] > 0
    return report


@pytest.mark.parametrize(("writer", "reader"), [(OLDEST, NEWEST), (NEWEST, OLDEST)], ids=["newer", "older"])
def test_a_history_server_of_another_version_shows_the_report(
    spark: dict[str, Installed], tmp_path: Path, writer: str, reader: str
) -> None:
    """The tab shows the topology with the numbers of its report."""
    logs = tmp_path / "logs"
    logs.mkdir()
    report = write(spark[writer], logs)
    server = spark[reader]
    with history_server(tmp_path, logs, server.jar, str(server.spark_home)) as base:
        eventually(lambda: fetch_json(f"{base}/api/v1/applications"), 60, "the application is listed")
        body = fetch_json(f"{base}/history/{report['application']}/stagecrew/json/")
    (node,) = (node for node in body["topologies"] if node["id"] == report["id"])
    assert node["state"] == "closed"
    counts = [one for executor in node["executors"].values() for one in executor["listeners"]]
    assert sum(one["opens"] for one in counts) == report["opens"]
    assert sum(one["closes"] for one in counts) == report["closes"]
