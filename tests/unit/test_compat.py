"""`make compat` compares PySpark's own tests with and without the plugin. These tests check the comparison itself."""

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
    monkeypatch.setitem(__import__("sys").modules, "compat_run", module)  # dataclasses need it
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def compare(compat, monkeypatch, tmp_path):
    """Compares invented outcomes. Each variation has one dict of outcomes for each run of the module."""

    def compare(off, on, opens=1, alone=None):
        with_module = {"off": list(off), "on": list(on), "on with a listener": list(on)}
        outcomes_alone = alone or {}

        def run_module(module, environment, folder, timeout, tests):
            name = environment["name"]
            outcomes = outcomes_alone.get(name, {}) if tests else with_module[name].pop(0)
            return compat.Run(dict(outcomes), {}, 1.0, opens, opens)

        monkeypatch.setattr(compat, "run_module", run_module)
        environments = {name: {"name": name} for name in compat.VARIATIONS}
        compared, idle, differences = compat.find_differences([M], environments, tmp_path, 1.0)
        return compared, idle, [test for test, _, _ in differences]

    return compare


def test_equal_outcomes_are_no_difference(compare):
    """Only tests that pass without the plugin count as compared."""
    same = {"a": "passed", "b": "skipped", "c": "failed"}
    assert compare([same], [same]) == (1, [], [])


def test_a_test_that_differs_again_when_run_alone_is_a_difference(compare):
    """It differed with its module first."""
    alone = {"off": {"a": "passed"}, "on": {"a": "failed"}, "on with a listener": {"a": "failed"}}
    assert compare([{"a": "passed"}], [{"a": "failed"}], alone=alone) == (1, [], ["a"])


def test_a_test_that_differs_only_with_its_module_is_run_with_the_module_again(compare):
    """It is a difference if it differs in that run too."""
    alone = {name: {"a": "passed"} for name in ("off", "on", "on with a listener")}
    passed, failed = {"a": "passed"}, {"a": "failed"}
    assert compare([passed, passed], [failed, failed], alone=alone) == (1, [], ["a"])
    assert compare([passed, passed], [failed, passed], alone=alone) == (1, [], [])


def test_a_module_that_breaks_off_is_run_again(compare):
    """If it breaks off in every variation, nothing is compared, and the report says so."""
    broken = {M: "broke off"}
    assert compare([{"a": "passed"}] * 2, [broken, broken])[2] == ["a", M]
    compared, idle, differences = compare([broken], [broken])
    assert (compared, differences) == (0, [])
    assert "no test of it passes" in idle[0]


def test_a_listener_that_never_opened_is_reported(compare):
    """Without an open, nothing shows that the plugin was active."""
    same = {"a": "passed"}
    compared, idle, differences = compare([same], [same], opens=0)
    assert (compared, differences) == (1, [])
    assert "never opened" in idle[0]
