"""The counts of listeners as metrics of the plugin, on the driver and on the executors."""

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
from stagecrew.observability.event_log import read_event_log
from support.journal import Journal, Recorder
from support.processes import kill
from support.sessions import Sessions
from support.waiting import eventually

# Executors do not have this module: its listeners are pickled by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

PLUGIN = "plugin.stagecrew.StagecrewPlugin"
SAMPLE = Path(__file__).parents[2] / "conf/metrics.properties"
NAMES = ["listeners.opens", "listeners.closes", "listeners.failures", "listeners.lost"]


class Quiet(stagecrew.Listener):
    """A listener that does nothing."""


def new_session(sessions: Sessions, master: str = "local[2]", **conf: str) -> SparkSession:
    """A new session with the UI, in which nothing has run."""
    sessions.stop()
    return sessions.get(master, **{"spark.ui.enabled": "true", "spark.ui.port": "0", **conf})


def run_topology(spark: SparkSession, name: str) -> stagecrew.TopologyReport:
    with stagecrew.crew(spark).topology(name, listeners=[Quiet()]) as topology:
        assert spark.sparkContext.parallelize(range(4), 2).map(lambda x: x + 1).sum() == 10
    return topology.report


def driver_gauges(spark: SparkSession) -> dict[str, int]:
    """The plugin's gauges from the driver's JSON servlet, by their names without the plugin's prefix."""
    port = urlsplit(spark.sparkContext.uiWebUrl).port
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics/json/") as response:
        all_gauges = json.load(response)["gauges"]
    namespace = spark.sparkContext.getConf().get("spark.metrics.namespace", spark.sparkContext.applicationId)
    prefix = f"{namespace}.driver.{PLUGIN}."
    return {key.removeprefix(prefix): gauge["value"] for key, gauge in all_gauges.items() if key.startswith(prefix)}


def jmx_value(spark: SparkSession, name: str) -> int:
    """A gauge's value in JMX, read by reflection because py4j cannot call methods of the server's own class."""
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


def totals(reports: list[stagecrew.TopologyReport]) -> dict[str, int]:
    return {name: sum(getattr(report, name.removeprefix("listeners.")) for report in reports) for name in NAMES}


def test_the_drivers_metrics_equal_the_sums_of_all_reports(sessions: Sessions, tmp_path: Path) -> None:
    """In each sink of conf/metrics.properties, the driver's gauges are the sums of all reports.

    The sums include the reports of forgotten topologies.
    """
    conf = {
        "spark.metrics.conf": str(SAMPLE),
        "spark.metrics.conf.*.sink.csv.directory": str(tmp_path),
        "spark.metrics.namespace": "spark",
        "spark.stagecrew.ui.retainedTopologies": "2",
    }
    spark = new_session(sessions, **conf)
    first = driver_gauges(spark)
    assert {name: value for name, value in first.items() if value} == {"topologies.active": 1}
    assert set(NAMES) < set(first)
    documented = re.findall(
        r"^\| `(\S+)` \| gauge \|", (SAMPLE.parents[1] / "docs/reference/metrics.md").read_text(), re.MULTILINE
    )
    assert sorted(first) == sorted(documented)
    reports: list[stagecrew.TopologyReport] = []
    for number in range(4):
        reports.append(run_topology(spark, f"run {number}"))
        expected = totals(reports)
        assert expected["listeners.opens"] == expected["listeners.closes"] >= number + 1
        current = driver_gauges(spark)
        assert {name: current[name] for name in NAMES} == expected
    assert [report.name for report in stagecrew.crew(spark).reports] == ["application", "run 2", "run 3"]
    port = urlsplit(spark.sparkContext.uiWebUrl).port
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/stagecrew/") as response:
        assert "4 closed; the last 2 closed ones are listed" in response.read().decode()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics/prometheus/") as response:
        text = response.read().decode()
    name = "metrics_spark_driver_plugin_stagecrew_StagecrewPlugin_listeners_opens_Value"
    found = re.findall(rf"^{name}\S* (\d+)", text, re.MULTILINE)
    opens = totals(reports)["listeners.opens"]
    assert found == [str(opens)]
    key = f"spark.driver.{PLUGIN}"
    assert jmx_value(spark, f"{key}.listeners.opens") == opens
    sessions.stop()  # the stop writes each sink once more
    lines = (tmp_path / f"{key}.listeners.opens.csv").read_text().splitlines()
    assert int(list(csv.DictReader(lines))[-1]["value"]) >= opens


def test_executors_report_their_metrics_and_the_driver_sums_them(sessions: Sessions, tmp_path: Path) -> None:
    """An executor's sinks contain its counts even after it has forgotten the topology. The driver has the sum."""
    conf = {
        "spark.metrics.conf.executor.sink.csv.class": "org.apache.spark.metrics.sink.CsvSink",
        "spark.metrics.conf.executor.sink.csv.directory": str(tmp_path),
        "spark.metrics.conf.executor.sink.csv.period": "1",
        "spark.metrics.conf.executor.sink.csv.unit": "seconds",
    }
    spark = new_session(sessions, "local-cluster[2,1,1024]", **conf)
    report = run_topology(spark, "first")
    expected = {name: value for name, value in totals([report]).items() if value}
    assert expected["listeners.opens"] >= 1
    executors = {listener.executor for listener in report.listeners}
    histograms = {
        "tasks.duration.micros": 2,
        "listeners.open.duration.micros": report.opens,
        "listeners.close.duration.micros": report.closes,
    }

    def last_values(names: Any, column: str) -> dict[str, int]:
        found = dict.fromkeys(names, 0)
        for executor in executors:
            for name in names:
                path = tmp_path / f"{spark.sparkContext.applicationId}.{executor}.{PLUGIN}.{name}.csv"
                lines = list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []
                found[name] += int(lines[-1][column]) if lines and lines[-1][column] else 0
        return found

    eventually(lambda: last_values(expected, "value") == expected, what=f"the executors' sinks contain {expected}")
    eventually(
        lambda: last_values(histograms, "count") == histograms,
        what=f"the executors' histograms have counted {histograms}",
    )
    current = driver_gauges(spark)
    assert {name: current[name] for name in expected} == expected


def test_everything_works_without_the_ui(sessions: Sessions) -> None:
    """With `spark.ui.enabled=false` there is no tab, but topologies and reports work as usual."""
    spark = new_session(sessions, **{"spark.ui.enabled": "false"})
    assert spark.sparkContext.uiWebUrl is None
    report = run_topology(spark, "no ui")
    assert report.opens == report.closes >= 1
    assert report.state == "closed"


def executor_pid(rows: Iterator[Any]) -> Iterator[int]:
    """The process id of the executor's JVM, read in a worker."""
    yield psutil.Process(os.getppid()).ppid()


def live_objects(jvm: int, name: str) -> int:
    """The number of live objects of one of stagecrew's classes in a JVM."""
    histogram = subprocess.run(
        ["jcmd", str(jvm), "GC.class_histogram"], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    found = re.search(
        rf"^\s*\d+:\s+(\d+)\s+\d+\s+org\.apache\.spark\.stagecrew\.{name}(?: |$)", histogram, re.MULTILINE
    )
    return int(found[1]) if found else 0


@pytest.mark.parametrize("shown_in", ["nowhere", pytest.param("in the event log", marks=pytest.mark.long)])
def test_timelines_are_recorded_only_where_they_are_shown(sessions: Sessions, tmp_path: Path, shown_in: str) -> None:
    """Without UI and event log, executors record no timeline. With an event log, they do.

    Processes are sampled in both cases.
    """
    conf = {"spark.ui.enabled": "false", "spark.stagecrew.processes.interval": "200ms"}
    if shown_in == "in the event log":
        conf |= {"spark.eventLog.enabled": "true", "spark.eventLog.dir": tmp_path.as_uri()}
    spark = new_session(sessions, "local-cluster[1,1,1024]", **conf)
    with stagecrew.crew(spark).topology("timed", listeners=[Quiet()]) as topology:
        (jvm,) = spark.sparkContext.parallelize(range(1), 1).mapPartitions(executor_pid).collect()
        eventually(lambda: topology.report.opens == 1, what="the executor has reported its listener")
        assert live_objects(jvm, "executor.ExecutorCounts") >= 1
        assert live_objects(jvm, "executor.SampleLog") == 1
        if shown_in == "nowhere":
            assert (live_objects(jvm, "executor.SpanLog"), live_objects(jvm, "ui.Span")) == (0, 0)
        else:
            assert live_objects(jvm, "executor.SpanLog") == 1
    assert topology.report.opens == topology.report.closes == 1
    if shown_in == "in the event log":
        sessions.stop()
        (log,) = tmp_path.iterdir()
        (stored,) = [stored for stored in read_event_log(str(log))["topologies"] if stored["name"] == "timed"]
        assert sorted(span["kind"] for span in stored["spans"]) == ["close", "open", "task"]


@pytest.mark.long
def test_all_lost_executors_are_counted_and_the_last_ones_listed(sessions: Sessions, tmp_path: Path) -> None:
    """Report, tab and metrics keep the counts of lost executors, however many there were."""
    spark = new_session(sessions, "local-cluster[1,1,1024]", **{"spark.stagecrew.ui.retainedDeadExecutors": "1"})
    crew, journal, lost_count = stagecrew.crew(spark), Journal(str(tmp_path / "journal")), 3
    with crew.topology("loses", listeners=[Recorder(journal)]) as topology:
        for number in range(1, lost_count + 2):
            (jvm,) = spark.sparkContext.parallelize(range(1), 1).mapPartitions(executor_pid).collect()
            eventually(lambda number=number: topology.report.opens == number, what="the executor has reported its open")
            if number <= lost_count:
                kill(jvm)
                eventually(
                    lambda number=number: (
                        topology.report.forgotten_executors + len(topology.report.lost_executors) == number
                    ),
                    60,
                    "the loss of the executor is reported",
                )
    report = topology.report
    assert len(report.lost_executors) == 1
    assert report.forgotten_executors == lost_count - 1
    assert [row.executor for row in report.listeners if row.executor == "forgotten"] == ["forgotten"]
    assert len(report.listeners) == 3  # the last lost one, the live one, and the sum of all earlier ones
    assert report.opens == len(journal.read(event="open")) == lost_count + 1
    assert report.closes == 1  # workers of killed executors close too, but cannot report it
    port = urlsplit(spark.sparkContext.uiWebUrl).port
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/stagecrew/json/") as response:
        body = json.load(response)
    for row in body["topologies"]:
        assert (len(row["askedBy"]), len(row["lostExecutors"]), row["forgottenExecutors"]) == (2, 1, lost_count - 1)
    assert driver_gauges(spark)["listeners.opens"] == body["totals"]["opens"] == report.opens
