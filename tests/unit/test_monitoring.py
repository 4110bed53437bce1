"""The files for monitoring and for services agree with the metrics, and pass the checks of their own tools."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
RULES = ROOT / "conf/prometheus/stagecrew-rules.yml"
DASHBOARD = ROOT / "conf/grafana/stagecrew.json"
UNIT = ROOT / "conf/stagecrew-driver.service"
#: The names of the driver's metrics in Prometheus, with `spark.metrics.namespace=spark`.
PREFIX = "metrics_spark_driver_plugin_stagecrew_StagecrewPlugin_"


def metrics(text):
    """The metrics that expressions name."""
    return {name.removesuffix("_Value") for name in re.findall(rf"{PREFIX}(\w+)", text)}


def documented():
    """The metrics of the driver in the documentation, as Prometheus writes them."""
    page = (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8")
    return {name.replace(".", "_") for name in re.findall(r"^\| `(\S+)` \| gauge \| driver", page, re.MULTILINE)}


@pytest.mark.parametrize("path", [RULES, DASHBOARD], ids=lambda path: path.name)
def test_expressions_name_metrics_that_exist(path):
    """Each metric in the rules and in the dashboard is a documented gauge of the driver."""
    found = metrics(path.read_text(encoding="utf-8"))
    assert len(found) > 5
    assert found - documented() == set()


def test_the_dashboard_shows_every_metric_of_topologies_and_listeners():
    """No failure is missing in the dashboard."""
    shown = metrics(DASHBOARD.read_text(encoding="utf-8"))
    wanted = {name for name in documented() if name.startswith(("topologies_", "listeners_"))}
    assert wanted - shown == set()


def test_panels_do_not_overlap():
    """Each panel of the dashboard has its own place, and an id of its own."""
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(places)) == len(places)
    assert max(x for x, _ in places) < 24


def test_the_page_explains_each_alert():
    """The table says what to do about each alert."""
    page = (ROOT / "docs/operate/alerts.md").read_text(encoding="utf-8")
    alerts = [rule["alert"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == alerts


@pytest.mark.long
def test_the_alerts_fire_when_they_should():
    """Prometheus' own tool runs the tests of the rules: each alert fires, and not too early."""
    folder = RULES.parent
    done = subprocess.run(
        ["promtool", "test", "rules", "stagecrew-rules-test.yml"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    tested = set(re.findall(r"alertname: (\w+)", (folder / "stagecrew-rules-test.yml").read_text()))
    assert tested == {rule["alert"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]}


@pytest.mark.long
def test_the_service_is_hardened():
    """systemd rates the exposure of the unit at most 3.0 of 10. The page names its rate."""
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=30", str(UNIT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (rate,) = re.findall(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert float(rate) <= 3.0
    assert "rates it 1.7 (of 10" in (ROOT / "docs/operate/security.md").read_text(encoding="utf-8")
