"""Log records name the topology, operator and evaluation that they come from."""

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

EVALUATION = Evaluation(
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


def fields_of_new_record() -> dict[str, object]:
    """Returns the fields that name the origin of a new record."""
    made = logging.getLogRecordFactory()("x", logging.INFO, "f", 1, "hello", (), None)
    return {name: made.__dict__[name] for name in FIELDS if name in made.__dict__}


@pytest.fixture
def factory(monkeypatch):
    """Restores the record factory afterwards, because coordinator threads replace it."""
    before = logging.getLogRecordFactory()
    monkeypatch.setattr(logs, "_installed", False)
    yield
    logging.setLogRecordFactory(before)


@pytest.mark.usefixtures("factory")
def test_records_of_a_coordinator_name_operator_and_evaluation():
    """Records of a coordinator's thread name its operator, and while it handles a message also the evaluation. Records
    of other threads name neither."""
    found, done = [], threading.Event()
    loop = Loop("o", lambda error: None, lambda: None, topology="t")

    def handle(evaluation):  # as the coordinator's calls do: the loop may be idle between two calls
        set_current_evaluation(evaluation)
        found.append(fields_of_new_record())

    for evaluation in (None, EVALUATION, None):
        loop.call(handle, evaluation)
    loop.call(done.set)
    assert done.wait(10)
    assert loop.end(10)
    place = {"topology": "t", "operator": "o"}
    assert found == [place, place | {"subtask": 3, "stage": 4, "partition": 5, "attempt": 77}, place]
    assert fields_of_new_record() == {}


@pytest.mark.usefixtures("factory")
def test_extra_of_a_coordinator_takes_precedence(monkeypatch):
    """Fields in `extra` replace stagecrew's fields of the same names, and the log call does not raise."""
    found, done = [], threading.Event()
    logger = logging.getLogger("of-a-coordinator")
    monkeypatch.setattr(logger, "handle", found.append)
    given = {name: f"my {name}" for name in FIELDS}

    def logs_all():
        set_current_evaluation(EVALUATION)
        logger.warning("x", extra=given)
        logger.warning("x", extra={"stage": None})
        logger.warning("x")

    loop = Loop("o", found.append, lambda: None, topology="t")
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

    class RecordsSubtasks(Coordinator):
        def handle_event(self, evaluation, event):
            found.append(fields_of_new_record().get("subtask"))

        def progress(self):
            found.append(fields_of_new_record().get("subtask"))
            return {}

        def waits_for(self):
            found.append(fields_of_new_record().get("subtask"))
            return ""

    def in_thread():
        set_current_coordinator("t", "o")
        with CoordinatorHarness(RecordsSubtasks) as harness:
            harness._host.statistics()
            harness.run()
            found.clear()
            harness.evaluation(subtask=3).send(1)
            harness._host.statistics()
            harness.run()

    thread = threading.Thread(target=in_thread)  # from then on, the record factory is a coordinator's
    thread.start()
    thread.join(30)
    assert found[:3] == [3, None, None]
    assert set(found[3:]) == {None}


def test_a_structured_record_has_context_and_given_fields():
    """A structured record is one line of JSON. The fields of a log call replace stagecrew's fields of the same
    names."""
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


@pytest.mark.parametrize("name", ["context", "kwargs"])
def test_the_context_of_pysparks_loggers_is_kept(name):
    """PySpark 4.0 stores the fields of a log call in `kwargs`, and later versions in `context`."""
    record = logging.makeLogRecord({"msg": "three rows", name: {"table": "a"}, "topology": "nightly"})
    assert json.loads(StructuredFormatter().format(record))["context"] == {"topology": "nightly", "table": "a"}


def test_a_record_with_another_kind_of_context_is_written():
    """A record whose `context` is not a mapping is written nevertheless, with stagecrew's fields as its context."""
    for given in ("text", 7, ["a"], b"x", None):
        record = logging.makeLogRecord({"msg": "three rows", "context": given, "topology": "nightly"})
        found = json.loads(StructuredFormatter().format(record))
        assert (found["msg"], found["context"]) == ("three rows", {"topology": "nightly"})
