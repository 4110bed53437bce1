"""The comparison of PySpark's own tests with and without the plugin (`make compat`): it sees what it should."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

RUN = Path(__file__).parent.parent / "compat" / "run.py"
M = "pyspark.tests.test_one"


@pytest.fixture
def compat(monkeypatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("compat_run", RUN)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, "compat_run", module)  # dataclasses look for it
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def compare(compat, monkeypatch, tmp_path):
    """Compares made-up outcomes: per variation, one dict for each time that it runs."""

    def compare(off, on, opens=1, alone=None):
        whole = {"off": list(off), "on": list(on), "on with a listener": list(on)}
        named = alone or {}

        def run_module(module, environment, folder, timeout, tests):
            name = environment["name"]
            outcomes = named.get(name, {}) if tests else whole[name].pop(0)
            return compat.Run(dict(outcomes), {}, 1.0, opens, opens)

        monkeypatch.setattr(compat, "run_module", run_module)
        environments = {name: {"name": name} for name in compat.VARIATIONS}
        compared, idle, differences = compat.found_differences([M], environments, tmp_path, 1.0)
        return compared, idle, [test for test, _, _ in differences]

    return compare


def test_no_difference(compare):
    """What ends alike everywhere is compared, when it passes without the plugin."""
    same = {"a": "passed", "b": "skipped", "c": "failed"}
    assert compare([same], [same]) == (1, [], [])


def test_a_difference_that_lasts(compare):
    """A test that differs with its module and alone is one."""
    alone = {"off": {"a": "passed"}, "on": {"a": "failed"}, "on with a listener": {"a": "failed"}}
    assert compare([{"a": "passed"}], [{"a": "failed"}], alone=alone) == (1, [], ["a"])


def test_a_difference_that_takes_the_whole_module(compare):
    """One that does not differ alone is run with its module again, and counts when it differs there."""
    alone = {name: {"a": "passed"} for name in ("off", "on", "on with a listener")}
    passed, failed = {"a": "passed"}, {"a": "failed"}
    assert compare([passed, passed], [failed, failed], alone=alone) == (1, [], ["a"])
    assert compare([passed, passed], [failed, passed], alone=alone) == (1, [], [])


def test_a_module_that_breaks_off(compare):
    """It is run whole again; one that breaks off on all sides compares nothing, which is said."""
    broken = {M: "broke off"}
    assert compare([{"a": "passed"}] * 2, [broken, broken])[2] == ["a", M]
    compared, idle, differences = compare([broken], [broken])
    assert (compared, differences) == (0, [])
    assert "no test of it passes" in idle[0]


def test_a_listener_that_never_opened(compare):
    """Without an open nothing shows that the plugin was on."""
    same = {"a": "passed"}
    compared, idle, differences = compare([same], [same], opens=0)
    assert (compared, differences) == (1, [])
    assert "never opened" in idle[0]
