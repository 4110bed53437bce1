"""`stagecrew report`: an event log gives the same report as the driver."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyspark
import pytest
from click.testing import CliRunner
from pyspark import cloudpickle

import stagecrew
from stagecrew.cli import main
from stagecrew.observability.event_log import read_event_log
from support.event_logs import listener, state, topology, write_log
from support.waiting import eventually

# Executors do not have this module: its listeners are pickled by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Quiet(stagecrew.Listener):
    """A listener that does nothing. Its name is rich markup."""

    name = "[bold]quiet[/bold]"


def event_log_settings(folder: Path, **settings: str) -> dict[str, str]:
    folder.mkdir()
    return {"spark.eventLog.enabled": "true", "spark.eventLog.dir": folder.as_uri(), **settings}


def only_log(folder: Path) -> str:
    (log,) = folder.iterdir()
    return str(log)


@pytest.mark.contract
def test_the_report_of_a_finished_application_equals_topology_report(
    sessions: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rolling, compressed log gives the content of `topology.report`, as text and as JSON."""
    sessions.stop()
    spark = sessions.get(
        "local[2]", **event_log_settings(tmp_path / "events", **{"spark.eventLog.rolling.enabled": "true"})
    )
    with stagecrew.crew(spark).topology("nightly", listeners=[Quiet()]) as topology:
        assert spark.sparkContext.parallelize(range(4), 2).map(lambda x: (x % 2, x)).groupByKey().count() == 2
    report = topology.report
    application = spark.sparkContext.applicationId
    sessions.stop()
    log = only_log(tmp_path / "events")
    result = CliRunner().invoke(main, ["report", log, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["version"] == 1
    assert (found["application"]["id"], found["application"]["name"]) == (application, "stagecrew tests")
    assert found["application"]["spark"] == pyspark.__version__
    assert found["application"]["ended"] > found["application"]["started"] > 0
    assert found["notes"] == []
    assert stagecrew.TopologyReport._from_json(found["topologies"][-1]) == report
    assert report.opens == report.closes >= 1
    monkeypatch.setattr("stagecrew.observability.event_log.read_event_log", lambda log: found)  # avoids another JVM
    text = CliRunner().invoke(main, ["report", log]).output
    assert f"stagecrew tests ({application})" in text
    assert "[bold]quiet[/bold]" in text
    assert report.id in text
    page = tmp_path / "report.html"
    assert CliRunner().invoke(main, ["report", log, "--html", str(page)]).output == ""
    html = page.read_text(encoding="utf-8")
    assert f"<h1>stagecrew tests ({application})" in html
    assert report.id in html
    assert all(f"<caption>{title}</caption>" in html for title in ("Topologies", "Listeners"))
    assert not re.search(r"<script|<link|src=", html)
    assert CliRunner().invoke(main, ["report", log, "--json", "--html", str(page)]).exit_code == 2


def with_current_names(node: Any) -> Any:
    """Returns the report of an older stagecrew with today's field names."""
    if isinstance(node, list):
        return [with_current_names(one) for one in node]
    if isinstance(node, dict):
        return {{"cut": "abandoned"}.get(name, name): with_current_names(one) for name, one in node.items()}
    return node


def contains(found: Any, expected: Any) -> bool:
    """Whether `found` contains everything in `expected`. It may contain more, because versions only add fields."""
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(contains, found, expected))
    if isinstance(expected, dict):
        return all(name in found and contains(found[name], one) for name, one in expected.items())
    return bool(found == expected)


def test_an_event_log_from_before_the_first_release_is_read() -> None:
    """The report of a recorded log equals the report of that time, apart from added fields and new field names."""
    folder = Path(__file__).parents[1] / "data" / "event-log-before-the-first-release"
    shown = CliRunner().invoke(main, ["report", str(folder / "recorded"), "--json"])
    assert shown.exit_code == 0, shown.output
    expected = with_current_names(json.loads((folder / "report.json").read_text()))
    assert len(expected["topologies"]) == 2
    assert contains(json.loads(shown.output), expected)


KILLED_APPLICATION = """
import sys, time
sys.path.insert(0, {tests!r})
import stagecrew
from support.sessions import session_builder
builder = session_builder("local[2]")
for key, value in {conf!r}.items():
    builder = builder.config(key, value)
spark = stagecrew.configure(builder).getOrCreate()
stagecrew.crew(spark).topology("nightly").start()
spark.range(10).count()
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.long
def test_the_report_of_a_killed_application_says_it_has_no_end(tmp_path: Path) -> None:
    """The report of a killed application contains what its log contains, and says that no end is recorded."""
    conf = event_log_settings(tmp_path / "events")
    code = KILLED_APPLICATION.format(tests=str(Path(__file__).parents[1]), conf=conf)
    driver = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "ready\n"
        log = only_log(tmp_path / "events")
        eventually(lambda: "nightly" in [one["name"] for one in read_event_log(log)["topologies"]], 60)
    finally:
        os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()
        driver.stdout.close()
    result = CliRunner().invoke(main, ["report", log])
    assert result.exit_code == 0, result.output
    assert "(no end recorded: the application is still running, or was killed)" in result.output
    assert "nightly: The event log shows this topology as of" in result.output


LINE_SEPARATORS = "one\u2028two\u2029three\x85four"
CONTROL_CHARACTERS = "\u202ebackwards\u2066 \x1b[2Jcleared\rover"


def test_line_separators_and_control_characters_are_escaped(tmp_path: Path) -> None:
    """Unicode line separators, direction marks and escape sequences in texts affect neither parser nor terminal."""
    counts = {"1": {"listeners": [listener(0, CONTROL_CHARACTERS, 1, lastError=LINE_SEPARATORS)], "partitions": {}}}
    write_log(
        tmp_path,
        "app-1",
        [state("topology", topology("t-1", LINE_SEPARATORS + CONTROL_CHARACTERS, executors=counts))],
        name=CONTROL_CHARACTERS,
    )
    found = read_event_log(str(tmp_path / "app-1"))
    assert found["application"]["name"] == CONTROL_CHARACTERS
    (one,) = found["topologies"]
    assert one["name"] == LINE_SEPARATORS + CONTROL_CHARACTERS
    assert [row["name"] for row in one["executors"]["1"]["listeners"]] == [CONTROL_CHARACTERS]
    result = CliRunner().invoke(main, ["report", str(tmp_path / "app-1")])
    assert result.exit_code == 0, result.output
    assert {one for one in result.output if not one.isprintable()} == {"\n"}
    assert r"one\u2028two\u2029three\x85four\u202ebackwards\u2066 \x1b[2Jcleared\rover" in result.output
    assert (
        len([line for line in result.output.split("\n") if "backwards" in line]) == 3
    )  # application, topology, listener


def test_the_report_ignores_sparks_default_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report runs locally, whatever the machine's default master and deploy mode are."""
    write_log(tmp_path, "app-1", [state("topology", topology("t-1", "nightly"))])
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


@pytest.mark.parametrize("path_kind", ["nothing", "a folder"])
def test_a_path_without_an_event_log_is_an_error(tmp_path: Path, path_kind: str) -> None:
    """A missing path, or an empty directory, is an error that names the path. The exit code is 1."""
    log = tmp_path / "log"
    if path_kind == "a folder":
        log.mkdir()
    result = CliRunner().invoke(main, ["report", str(log)])
    assert result.exit_code == 1
    assert str(log) in result.output
    assert "Traceback" not in result.output


def test_the_report_of_a_log_without_stagecrew_says_so(tmp_path: Path) -> None:
    """The report of a log in which stagecrew stored nothing says so."""
    log = tmp_path / "app-1"
    log.write_text(
        '{"Event":"SparkListenerLogStart","Spark Version":"4.3.0"}\n'
        '{"Event":"SparkListenerApplicationStart","App Name":"old","App ID":"app-1","Timestamp":1000,"User":"u"}\n'
    )
    result = CliRunner().invoke(main, ["report", str(log)])
    assert "old (app-1), Spark 4.3.0" in result.output
    assert "This log contains no stagecrew data" in result.output
