"""An executor's listener of each execution beside one of the application in the JVM: each opens as often as it says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import stagecrew
from support.journal import Journal, Recorder
from support.sessions import LOCAL, Sessions
from support.waiting import eventually


@pytest.fixture(scope="module")
def once(tmp_path_factory, sessions: Sessions, jvm_listeners) -> tuple[SparkSession, Path]:
    """A session with both, and where the listeners and the interpreter write."""
    folder = tmp_path_factory.mktemp("once")
    # The interpreter of agents and workers writes down what it is started for.
    python = folder / "python"
    python.write_text(f'#!/bin/sh\necho "$*" >> {folder}/started\nexec {sys.executable} "$@"\n')
    python.chmod(0o700)
    wide = Recorder(
        Journal(str(folder / "wide")), "wide", scope=stagecrew.Scope.EXECUTOR, lifetime=stagecrew.Lifetime.EXECUTION
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_PYTHON", str(python))
        spark = sessions.get(
            LOCAL,
            listeners=(wide,),
            jvm_listeners=("Noting",),
            spark__jars=jvm_listeners[0],
            spark__test__journal=str(folder / "jvm"),
        )
    for i in range(3):
        spark.range(0, 10, 1, 2).mapInArrow(lambda batches: batches, "id long").collect()

        def closed(i: int = i) -> bool:
            opens, closes = (wide.journal.read(event=event) for event in ("open", "close"))
            return len({e["topology"] for e in opens}) == i + 1 and len(opens) == len(closes)

        eventually(closed, 20, "the execution's listener closes")
    return spark, folder


def test_the_executors_listener_opens_once_per_execution(once):
    """Three queries one after the other: one open and one close for each on each executor, in one process."""
    log = Journal(str(once[1] / "wide"))
    opens, closes = (
        sorted((e["topology"], e["executor"], e["pid"]) for e in log.read(event=event)) for event in ("open", "close")
    )
    assert opens == closes
    assert len(opens) == len({(topology, executor) for topology, executor, _ in opens})


def test_the_jvm_listener_of_the_application_opens_once(once):
    """Meanwhile the application's JVM listener opens once on each executor, and stays open."""
    jvm = Journal(str(once[1] / "jvm"))
    executors = [e["executor"] for e in jvm.read(event="open")]
    wide = Journal(str(once[1] / "wide")).read(event="open")
    assert {e["executor"] for e in wide} <= set(executors)
    assert len(executors) == len(set(executors)), [(e["event"], e["topology"], e["executor"]) for e in jvm.read()]
    assert not jvm.read(event="close")


def test_no_agent_is_started_for_nothing(once):
    """At most one agent per execution and executor: none is started to open nothing."""
    started = (once[1] / "started").read_text().splitlines()
    agents = [line for line in started if "stagecrew.worker.agent" in line]
    assert 0 < len(agents) <= len(Journal(str(once[1] / "wide")).read(event="open"))
