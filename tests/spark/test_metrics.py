"""The counts of listeners as metrics of the plugin, on the driver and on executors."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from pyspark import cloudpickle
from pyspark.sql import SparkSession

import stagecrew
from crewtools import Journal, Recorder, Sessions, eventually, kill

# Executors do not have this module: its listeners travel by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

PLUGIN = "plugin.stagecrew.StagecrewPlugin"
SAMPLE = Path(__file__).parents[2] / "conf/metrics.properties"
NAMES = ["listeners.opens", "listeners.closes", "listeners.failures", "listeners.lost"]


class Quiet(stagecrew.Listener):
    """Does nothing."""


def session(sessions: Sessions, master: str = "local[2]", **conf: str) -> SparkSession:
    """A session of its own, in which nothing has run, with its UI."""
    sessions.stop()
    return sessions.get(master, **{"spark.ui.enabled": "true", "spark.ui.port": "0", **conf})


def run(spark: SparkSession, name: str) -> stagecrew.TopologyReport:
    with stagecrew.crew(spark).topology(name, listeners=[Quiet()]) as topology:
        assert spark.sparkContext.parallelize(range(4), 2).map(lambda x: x + 1).sum() == 10
    return topology.report


def gauges(spark: SparkSession) -> dict[str, int]:
    """The plugin's gauges as the driver's JSON servlet shows them, by their names behind the plugin's."""
    port = urlsplit(spark.sparkContext.uiWebUrl).port
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics/json/") as response:
        every = json.load(response)["gauges"]
    prefix = f"{spark.sparkContext.applicationId}.driver.{PLUGIN}."
    return {key.removeprefix(prefix): gauge["value"] for key, gauge in every.items() if key.startswith(prefix)}


def bean(spark: SparkSession, name: str) -> int:
    """A gauge as JMX has it in this JVM. By reflection: the server's own class is none that py4j may call."""
    jvm, gateway = spark.sparkContext._jvm, spark.sparkContext._gateway
    server = jvm.java.lang.management.ManagementFactory.getPlatformMBeanServer()
    (get,) = (
        m
        for m in jvm.java.lang.Class.forName("javax.management.MBeanServer").getMethods()
        if m.getName() == "getAttribute"
    )
    arguments = gateway.new_array(jvm.java.lang.Object, 2)
    arguments[0], arguments[1] = jvm.javax.management.ObjectName(f"metrics:name={name},type=gauges"), "Value"
    found: int = get.invoke(server, arguments)
    return found


def sums(reports: list[stagecrew.TopologyReport]) -> dict[str, int]:
    return {name: sum(getattr(report, name.removeprefix("listeners.")) for report in reports) for name in NAMES}


def test_the_drivers_metrics_agree_with_reports_and_never_go_down(sessions: Sessions, tmp_path: Path) -> None:
    """Driver gauges are the sums of all reports, also of topologies that were forgotten: in each sink of conf/metrics.properties."""
    conf = {
        "spark.metrics.conf": str(SAMPLE),
        "spark.metrics.conf.*.sink.csv.directory": str(tmp_path),
        "spark.stagecrew.ui.retainedTopologies": "2",
    }
    spark = session(sessions, **conf)
    first = gauges(spark)
    assert {name: value for name, value in first.items() if value} == {"topologies.active": 1}
    assert set(NAMES) < set(first)
    documented = re.findall(
        r"^\| `(\S+)` \| gauge \|", (SAMPLE.parents[1] / "docs/reference/metrics.md").read_text(), re.MULTILINE
    )
    assert sorted(first) == sorted(documented)
    reports: list[stagecrew.TopologyReport] = []
    for number in range(4):
        reports.append(run(spark, f"run {number}"))
        wanted = sums(reports)
        assert wanted["listeners.opens"] == wanted["listeners.closes"] >= number + 1
        shown = gauges(spark)
        assert {name: shown[name] for name in NAMES} == wanted
    assert [report.name for report in stagecrew.crew(spark).reports] == ["application", "run 2", "run 3"]
    port = urlsplit(spark.sparkContext.uiWebUrl).port
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/stagecrew/") as response:
        assert "4 closed; the last 2 closed ones are listed" in response.read().decode()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics/prometheus/") as response:
        text = response.read().decode()
    name = "plugin_stagecrew_StagecrewPlugin_listeners_opens_Value"
    found = re.findall(rf"^metrics_\S*_driver_{name}\S* (\d+)", text, re.MULTILINE)
    opens = sums(reports)["listeners.opens"]
    assert found == [str(opens)]
    key = f"{spark.sparkContext.applicationId}.driver.{PLUGIN}"
    assert bean(spark, f"{key}.listeners.opens") == opens
    sessions.stop()  # then each sink is written once more
    lines = (tmp_path / f"{key}.listeners.opens.csv").read_text().splitlines()
    assert int(list(csv.DictReader(lines))[-1]["value"]) >= opens


def test_executors_have_the_metrics_and_the_driver_sums_them(sessions: Sessions, tmp_path: Path) -> None:
    """Each executor's own sinks carry its counts, also after the topology was forgotten there; the driver has the sum."""
    conf = {
        "spark.metrics.conf.executor.sink.csv.class": "org.apache.spark.metrics.sink.CsvSink",
        "spark.metrics.conf.executor.sink.csv.directory": str(tmp_path),
        "spark.metrics.conf.executor.sink.csv.period": "1",
        "spark.metrics.conf.executor.sink.csv.unit": "seconds",
    }
    spark = session(sessions, "local-cluster[2,1,1024]", **conf)
    report = run(spark, "first")
    wanted = {name: value for name, value in sums([report]).items() if value}
    assert wanted["listeners.opens"] >= 1
    executors = {listener.executor for listener in report.listeners}
    timed = {
        "tasks.duration.micros": 2,
        "listeners.open.duration.micros": report.opens,
        "listeners.close.duration.micros": report.closes,
    }

    def written(names: Any, column: str) -> dict[str, int]:
        found = dict.fromkeys(names, 0)
        for executor in executors:
            for name in names:
                path = tmp_path / f"{spark.sparkContext.applicationId}.{executor}.{PLUGIN}.{name}.csv"
                lines = list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []
                found[name] += int(lines[-1][column]) if lines and lines[-1][column] else 0
        return found

    eventually(lambda: written(wanted, "value") == wanted, what=f"the executors' sinks say {wanted}")
    eventually(lambda: written(timed, "count") == timed, what=f"the executors' histograms have counted {timed}")
    shown = gauges(spark)
    assert {name: shown[name] for name in wanted} == wanted


def test_everything_works_without_the_ui(sessions: Sessions) -> None:
    """With spark.ui.enabled=false there is no tab, and topologies and reports are as ever."""
    spark = session(sessions, **{"spark.ui.enabled": "false"})
    assert spark.sparkContext.uiWebUrl is None
    report = run(spark, "no ui")
    assert report.opens == report.closes >= 1
    assert report.state == "closed"


def of_executor(rows: Iterator[Any]) -> Iterator[int]:
    """The process id of the executor's JVM, as a worker knows it."""
    yield psutil.Process(os.getppid()).ppid()


def instances(jvm: int, name: str) -> int:
    """How many objects of this class of ours live in a JVM."""
    listed = subprocess.run(
        ["jcmd", str(jvm), "GC.class_histogram"], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    found = re.search(rf"^\s*\d+:\s+(\d+)\s+\d+\s+org\.apache\.spark\.stagecrew\.{name}(?: |$)", listed, re.MULTILINE)
    return int(found[1]) if found else 0


@pytest.mark.parametrize("shown", ["nowhere", pytest.param("in the event log", marks=pytest.mark.long)])
def test_timelines_are_made_where_somebody_shows_them(sessions: Sessions, tmp_path: Path, shown: str) -> None:
    """Without the UI and an event log no executor keeps what took time; with one of both it does. Processes are looked at."""
    conf = {"spark.ui.enabled": "false", "spark.stagecrew.processes.interval": "200ms"}
    if shown == "in the event log":
        conf |= {"spark.eventLog.enabled": "true", "spark.eventLog.dir": tmp_path.as_uri()}
    spark = session(sessions, "local-cluster[1,1,1024]", **conf)
    with stagecrew.crew(spark).topology("timed", listeners=[Quiet()]) as topology:
        (jvm,) = spark.sparkContext.parallelize(range(1), 1).mapPartitions(of_executor).collect()
        eventually(lambda: topology.report.opens == 1, what="the executor has told of its listener")
        assert instances(jvm, "executor.ExecutorCounts") >= 1
        assert instances(jvm, "executor.SampleLog") == 1
        assert (instances(jvm, "executor.SpanLog"), instances(jvm, "ui.Span")) == (
            (0, 0) if shown == "nowhere" else (1, 2)
        )
    assert topology.report.opens == topology.report.closes == 1


@pytest.mark.long
def test_of_lost_executors_the_last_ones_are_listed_and_all_are_counted(sessions: Sessions, tmp_path: Path) -> None:
    """What happened on executors that came and went stays in report, tab and metrics, however many there were."""
    spark = session(sessions, "local-cluster[1,1,1024]", **{"spark.stagecrew.ui.retainedDeadExecutors": "1"})
    crew, journal, lost = stagecrew.crew(spark), Journal(str(tmp_path / "journal")), 3
    with crew.topology("loses", listeners=[Recorder(journal)]) as topology:
        for number in range(1, lost + 2):
            (jvm,) = spark.sparkContext.parallelize(range(1), 1).mapPartitions(of_executor).collect()
            eventually(lambda number=number: topology.report.opens == number, what="the executor has told of its open")
            if number <= lost:
                kill(jvm)
                eventually(
                    lambda number=number: (
                        topology.report.forgotten_executors + len(topology.report.lost_executors) == number
                    ),
                    60,
                    "the executor is known to be lost",
                )
    report = topology.report
    assert len(report.lost_executors) == 1
    assert report.forgotten_executors == lost - 1
    assert [one.executor for one in report.listeners if one.executor == "forgotten"] == ["forgotten"]
    assert len(report.listeners) == 3  # the last that was lost, the one that lives, and all before
    assert report.opens == len(journal.read(event="open")) == lost + 1
    assert report.closes == 1  # a worker whose executor was killed closes too, but nobody hears of it
    port = urlsplit(spark.sparkContext.uiWebUrl).port
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/stagecrew/json/") as response:
        body = json.load(response)
    for one in body["topologies"]:
        assert (len(one["askedBy"]), len(one["lostExecutors"]), one["forgottenExecutors"]) == (2, 1, lost - 1)
    assert gauges(spark)["listeners.opens"] == body["totals"]["opens"] == report.opens
