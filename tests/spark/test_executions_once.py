"""How often an executor listener with lifetime EXECUTION and the application's JVM listener open."""

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
def observed_session(tmp_path_factory, sessions: Sessions, jvm_listeners) -> tuple[SparkSession, Path]:
    """A session with both listeners after three queries, and the folder to which listeners and the interpreter
    write."""
    folder = tmp_path_factory.mktemp("once")
    # The interpreter of agents and workers records its arguments.
    python = folder / "python"
    python.write_text(f'#!/bin/sh\necho "$*" >> {folder}/started\nexec {sys.executable} "$@"\n')
    python.chmod(0o700)
    execution_listener = Recorder(
        Journal(str(folder / "wide")), "wide", scope=stagecrew.Scope.EXECUTOR, lifetime=stagecrew.Lifetime.EXECUTION
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_PYTHON", str(python))
        spark = sessions.get(
            LOCAL,
            listeners=(execution_listener,),
            jvm_listeners=("Noting",),
            spark__jars=jvm_listeners[0],
            spark__test__journal=str(folder / "jvm"),
        )
    for i in range(3):
        spark.range(0, 10, 1, 2).mapInArrow(lambda batches: batches, "id long").collect()

        def all_closed(i: int = i) -> bool:
            opens, closes = (execution_listener.journal.read(event=event) for event in ("open", "close"))
            return len({e["topology"] for e in opens}) == i + 1 and len(opens) == len(closes)

        eventually(all_closed, 20, "the execution's listener closes")
    return spark, folder


def test_the_executor_listener_opens_once_per_execution(observed_session):
    """For three consecutive queries, the listener opens and closes once per query and executor, in one process."""
    log = Journal(str(observed_session[1] / "wide"))
    opens, closes = (
        sorted((e["topology"], e["executor"], e["pid"]) for e in log.read(event=event)) for event in ("open", "close")
    )
    assert opens == closes
    assert len(opens) == len({(topology, executor) for topology, executor, _ in opens})


def test_the_application_jvm_listener_opens_once_per_executor(observed_session):
    """During these queries, the application's JVM listener opens once per executor and stays open."""
    jvm = Journal(str(observed_session[1] / "jvm"))
    executors = [e["executor"] for e in jvm.read(event="open")]
    execution_listener = Journal(str(observed_session[1] / "wide")).read(event="open")
    assert {e["executor"] for e in execution_listener} <= set(executors)
    assert len(executors) == len(set(executors)), [(e["event"], e["topology"], e["executor"]) for e in jvm.read()]
    assert not jvm.read(event="close")


def test_no_agent_starts_without_a_listener_to_open(observed_session):
    """At most one agent starts per execution and executor. None starts without a listener to open."""
    started = (observed_session[1] / "started").read_text().splitlines()
    agents = [line for line in started if "stagecrew.worker.agent" in line]
    assert 0 < len(agents) <= len(Journal(str(observed_session[1] / "wide")).read(event="open"))
