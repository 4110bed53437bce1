"""Log records name the place that they come from."""

from __future__ import annotations

import io
import json
import logging
import threading

import pytest
from pyspark.logger import PySparkLogger

from stagecrew import Coordinator, StructuredFormatter
from stagecrew.coordination.evaluation import Evaluation
from stagecrew.coordination.loop import Loop
from stagecrew.observability import logs
from stagecrew.observability.logs import FIELDS, set_current_coordinator, set_current_evaluation
from stagecrew.testing import CoordinatorHarness

ONE = Evaluation(
    id=1,
    operator="o",
    subtask=3,
    attempt=77,
    attempt_number=1,
    stage=4,
    partition=5,
    executor="1",
    stage_attempt=0,
    partitions=8,
)


def record() -> dict[str, object]:
    """Returns the place that a new record names."""
    made = logging.getLogRecordFactory()("x", logging.INFO, "f", 1, "hello", (), None)
    return {name: made.__dict__[name] for name in FIELDS if name in made.__dict__}


@pytest.fixture
def factory(monkeypatch):
    """Restores the record factory afterwards: coordinator threads set their own."""
    before = logging.getLogRecordFactory()
    monkeypatch.setattr(logs, "_installed", False)
    yield
    logging.setLogRecordFactory(before)


@pytest.mark.usefixtures("factory")
def test_records_of_a_coordinator_name_operator_and_evaluation():
    """Only on its own thread, and with an evaluation only while it handles a message of that evaluation."""
    found, done = [], threading.Event()
    loop = Loop("o", lambda error: None, lambda: None, topology="t")
    for evaluation in (None, ONE, None):
        loop.call(set_current_evaluation, evaluation)
        loop.call(lambda: found.append(record()))
    loop.call(done.set)
    assert done.wait(10)
    assert loop.end(10)
    place = {"topology": "t", "operator": "o"}
    assert found == [place, place | {"subtask": 3, "stage": 4, "partition": 5, "attempt": 77}, place]
    assert record() == {}


@pytest.mark.usefixtures("factory")
def test_extra_of_a_coordinator_takes_precedence(monkeypatch):
    """A field with the name of an attribute does not make a log call raise."""
    found, done = [], threading.Event()
    logger = logging.getLogger("of-a-coordinator")
    monkeypatch.setattr(logger, "handle", found.append)
    given = {name: f"my {name}" for name in FIELDS}

    def logs_all():
        logger.warning("x", extra=given)
        logger.warning("x", extra={"stage": None})
        logger.warning("x")

    loop = Loop("o", found.append, lambda: None, topology="t")
    loop.call(set_current_evaluation, ONE)
    loop.call(logs_all)
    loop.call(done.set)
    assert done.wait(10)
    assert loop.end(10)
    known = {"topology": "t", "operator": "o", "subtask": 3, "stage": 4, "partition": 5, "attempt": 77}
    assert [{name: one.__dict__[name] for name in FIELDS if name in one.__dict__} for one in found] == [
        given,
        known | {"stage": None},
        known,
    ]


@pytest.mark.usefixtures("factory")
def test_records_of_progress_name_no_evaluation():
    """A record of `progress` names no evaluation, even directly after a message of an evaluation."""
    found: list[object] = []

    class Says(Coordinator):
        def handle_event(self, evaluation, event):
            found.append(record().get("subtask"))

        def progress(self):
            found.append(record().get("subtask"))
            return {}

        def waits_for(self):
            found.append(record().get("subtask"))
            return ""

    def in_thread():
        set_current_coordinator("t", "o")
        with CoordinatorHarness(Says) as harness:
            harness._host.statistics()
            harness.run()
            found.clear()
            harness.evaluation(subtask=3).send(1)
            harness._host.statistics()
            harness.run()

    thread = threading.Thread(target=in_thread)  # a coordinator's factory from then on
    thread.start()
    thread.join(30)
    assert found[:3] == [3, None, None]
    assert set(found[3:]) == {None}


def test_a_structured_record_has_context_and_given_fields():
    """One line of JSON. Given fields take precedence over those of stagecrew."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger = PySparkLogger("structured")
    logger.addHandler(handler)
    handler.setFormatter(StructuredFormatter())  # after PySpark's own factory
    before = logging.getLogRecordFactory()

    def factory(*args, **kwargs):
        made = before(*args, **kwargs)
        made.topology, made.stage = "t", 4
        return made

    try:
        logging.setLogRecordFactory(factory)
        logger.warning("three\nrows", table="<a>", stage="mine")
    finally:
        logging.setLogRecordFactory(before)
    (line,) = stream.getvalue().splitlines()
    found = json.loads(line)
    assert found["msg"] == "three\nrows"
    assert found["context"] == {"topology": "t", "stage": "mine", "table": "<a>"}


def test_a_record_with_another_kind_of_context_is_written():
    """A library's `context` that is not a mapping stays as it is. The record is written, with stagecrew's fields."""
    for given in ("text", 7, ["a"], b"x", None):
        record = logging.makeLogRecord({"msg": "three rows", "context": given, "topology": "nightly"})
        found = json.loads(StructuredFormatter().format(record))
        assert (found["msg"], found["context"]) == ("three rows", {"topology": "nightly"})
