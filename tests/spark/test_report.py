"""`stagecrew report`: what an event log says, as the driver's own report said it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pyspark import cloudpickle

import stagecrew
from crewtools import eventually
from eventlogs import listener, state, topology, written
from stagecrew.cli import main
from stagecrew.observability.event_log import read_event_log

# Executors do not have this module: its listeners travel by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Quiet(stagecrew.Listener):
    """Does nothing; its name is markup of rich."""

    name = "[bold]quiet[/bold]"


def log_to(folder: Path, **more: str) -> dict[str, str]:
    folder.mkdir()
    return {"spark.eventLog.enabled": "true", "spark.eventLog.dir": folder.as_uri(), **more}


def only(folder: Path) -> str:
    (log,) = folder.iterdir()
    return str(log)


def test_a_finished_application(sessions: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rolling, compressed log says what topology.report said, as text and as JSON."""
    sessions.stop()
    spark = sessions.get("local[2]", **log_to(tmp_path / "events", **{"spark.eventLog.rolling.enabled": "true"}))
    with stagecrew.crew(spark).topology("nightly", listeners=[Quiet()]) as topology:
        assert spark.sparkContext.parallelize(range(4), 2).map(lambda x: (x % 2, x)).groupByKey().count() == 2
    said = topology.report
    application = spark.sparkContext.applicationId
    sessions.stop()
    log = only(tmp_path / "events")
    shown = CliRunner().invoke(main, ["report", log, "--json"])
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.output)
    assert found["version"] == 1
    assert (found["application"]["id"], found["application"]["name"]) == (application, "stagecrew tests")
    assert found["application"]["spark"].startswith("4.3.")
    assert found["application"]["ended"] > found["application"]["started"] > 0
    assert found["notes"] == []
    assert stagecrew.TopologyReport.of(found["topologies"][-1]) == said
    assert said.opens == said.closes >= 1
    monkeypatch.setattr("stagecrew.observability.event_log.read_event_log", lambda log: found)  # without another JVM
    text = CliRunner().invoke(main, ["report", log], env={"COLUMNS": "250"}).output
    assert f"stagecrew tests ({application})" in text
    assert "[bold]quiet[/bold]" in text
    assert said.id in text


def renamed(node: Any) -> Any:
    """What an older stagecrew said, with the names that fields have now."""
    if isinstance(node, list):
        return [renamed(one) for one in node]
    if isinstance(node, dict):
        return {{"cut": "abandoned"}.get(name, name): renamed(one) for name, one in node.items()}
    return node


def says(found: Any, expected: Any) -> bool:
    """Whether `found` has all that is expected: fields are added between versions, and never changed."""
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(says, found, expected))
    if isinstance(expected, dict):
        return all(name in found and says(found[name], one) for name, one in expected.items())
    return bool(found == expected)


def test_an_event_log_from_before_the_first_release_is_read() -> None:
    """The report of a recorded log says what it said when it was recorded, with the names that fields have now."""
    folder = Path(__file__).parents[1] / "data" / "event-log-before-the-first-release"
    shown = CliRunner().invoke(main, ["report", str(folder / "recorded"), "--json"])
    assert shown.exit_code == 0, shown.output
    expected = renamed(json.loads((folder / "report.json").read_text()))
    assert len(expected["topologies"]) == 2
    assert says(json.loads(shown.output), expected)


KILLED = """
import sys, time
sys.path.insert(0, {tests!r})
import stagecrew
from crewtools import base
builder = base("local[2]")
for key, value in {conf!r}.items():
    builder = builder.config(key, value)
spark = stagecrew.configure(builder).getOrCreate()
stagecrew.crew(spark).topology("nightly").start()
spark.range(10).count()
print("ready", flush=True)
time.sleep(600)
"""


def test_an_application_that_was_killed(tmp_path: Path) -> None:
    """What had been written is there, and that it had not ended is said."""
    conf = log_to(tmp_path / "events")
    code = KILLED.format(tests=str(Path(__file__).parents[1]), conf=conf)
    driver = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "ready\n"
        log = only(tmp_path / "events")
        eventually(lambda: "nightly" in [one["name"] for one in read_event_log(log)["topologies"]], 60)
    finally:
        os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()
        driver.stdout.close()
    shown = CliRunner().invoke(main, ["report", log], env={"COLUMNS": "250"})
    assert shown.exit_code == 0, shown.output
    assert "no end is stored: it runs, or was killed" in shown.output
    assert "nightly: This is what the event log says as of" in shown.output


LINES = "one\u2028two\u2029three\x85four"
TRICKS = "\u202ebackwards\u2066 \x1b[2Jcleared\rover"


def test_what_ends_a_line_elsewhere_is_text_here(tmp_path: Path) -> None:
    """Separators of Unicode, marks of direction and escape sequences of a name or an error reach neither parser nor terminal."""
    counts = {"1": {"listeners": [listener(0, TRICKS, 1, lastError=LINES)], "partitions": {}}}
    written(tmp_path, "app-1", [state("topology", topology("t-1", LINES + TRICKS, executors=counts))], name=TRICKS)
    found = read_event_log(str(tmp_path / "app-1"))
    assert found["application"]["name"] == TRICKS
    (one,) = found["topologies"]
    assert one["name"] == LINES + TRICKS
    assert [row["name"] for row in one["executors"]["1"]["listeners"]] == [TRICKS]
    shown = CliRunner().invoke(main, ["report", str(tmp_path / "app-1")], env={"COLUMNS": "400"})
    assert shown.exit_code == 0, shown.output
    assert {one for one in shown.output if not one.isprintable()} == {"\n"}
    assert r"one\u2028two\u2029three\x85four\u202ebackwards\u2066 \x1b[2Jcleared\rover" in shown.output
    assert (
        len([line for line in shown.output.split("\n") if "backwards" in line]) == 3
    )  # application, topology, listener


def test_a_clusters_settings_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs here, whatever master and deploy mode this machine's Spark has as its defaults."""
    written(tmp_path, "app-1", [state("topology", topology("t-1", "nightly"))])
    (tmp_path / "conf").mkdir()
    defaults = {
        "spark.master": "spark://127.0.0.1:1",
        "spark.submit.deployMode": "cluster",
        "spark.plugins": "stagecrew.StagecrewPlugin",
    }
    (tmp_path / "conf/spark-defaults.conf").write_text("".join(f"{key} {value}\n" for key, value in defaults.items()))
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path / "conf"))
    monkeypatch.setenv("MASTER", "spark://127.0.0.1:1")
    monkeypatch.setenv("SPARK_REMOTE", "sc://127.0.0.1:1")
    assert [one["name"] for one in read_event_log(str(tmp_path / "app-1"))["topologies"]] == ["nightly"]


@pytest.mark.parametrize("what", ["nothing", "a folder"])
def test_what_is_no_event_log(tmp_path: Path, what: str) -> None:
    """It is an error that names the path, with exit code 1."""
    log = tmp_path / "log"
    if what == "a folder":
        log.mkdir()
    shown = CliRunner().invoke(main, ["report", str(log)])
    assert shown.exit_code == 1
    assert str(log) in shown.output
    assert "Traceback" not in shown.output


def test_a_log_without_stagecrew(tmp_path: Path) -> None:
    """It is said that there is nothing."""
    log = tmp_path / "app-1"
    log.write_text(
        '{"Event":"SparkListenerLogStart","Spark Version":"4.3.0"}\n'
        '{"Event":"SparkListenerApplicationStart","App Name":"old","App ID":"app-1","Timestamp":1000,"User":"u"}\n'
    )
    shown = CliRunner().invoke(main, ["report", str(log)])
    assert "old (app-1), Spark 4.3.0" in shown.output
    assert "stagecrew stored nothing in this log" in shown.output
