"""Event-time alignment on real Spark.

No source gets ahead of another by more than the drift plus one batch, whichever source fails or is idle.
"""

from __future__ import annotations

import itertools
import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import TaskContext, cloudpickle

import stagecrew
from support.journal import Journal
from support.sessions import LOCAL, LOCAL_CLUSTER
from support.spark_versions import PASSES_START_OF_BATCH
from support.waiting import eventually

cloudpickle.register_pickle_by_value(sys.modules[__name__])

DRIFT = 20


@pytest.fixture
def cluster(sessions):
    """A session on a cluster of two executors, in which attempts may fail often."""
    return sessions.get(LOCAL_CLUSTER, **{"spark.task.maxFailures": "30"})


def read_at_pace(path: str, pace: dict[int, float], dies_at: int | None = None, marker: str = "") -> Any:
    """Returns work that reads 100 event times at its subtask's pace. It records each one when the aligner admits it."""

    def work(aligner, batches):
        for _ in batches:
            pass
        journal = Journal(path)
        for event in range(100):
            aligner.advance(event)
            journal.write(subtask=aligner.subtask, at=event, pid=os.getpid())
            if event == 0:  # a task that has not begun holds back no other task
                eventually(
                    lambda: {entry["subtask"] for entry in journal.read()} == set(pace), 60, "all tasks take part"
                )
            time.sleep(pace[aligner.subtask])
            if event == dies_at and aligner.subtask == 0 and not os.path.exists(marker):
                Path(marker).touch()
                os.kill(os.getpid(), signal.SIGKILL)
        yield pa.record_batch({"subtask": [aligner.subtask]})

    return work


def distances(entries: list[dict[str, Any]]) -> list[int]:
    """How far each read was ahead of the slower task's last read, while both were reading."""
    last_read: dict[int, int] = {}
    found = []
    for entry in entries:
        last_read[entry["subtask"]] = entry["at"]
        if len(last_read) == 2 and min(last_read.values()) < 99:
            found.append(entry["at"] - min(last_read.values()))
    return found


@pytest.mark.contract
def test_tasks_at_different_paces_stay_within_the_drift(cluster, journal):
    """Two tasks at different paces stay within the drift plus one event of each other."""
    with stagecrew.crew(cluster).topology("t") as topology:
        alignment = topology.align("a", DRIFT)
        rows = alignment.map(
            cluster.range(0, 2, 1, 2), read_at_pace(journal.path, {0: 0.01, 1: 0.0}), "subtask long"
        ).collect()
        assert sorted(row.subtask for row in rows) == [0, 1]
        assert "slowest" in topology.progress["a/1"]
    entries = journal.read()
    assert len(entries) == 200
    ahead = distances(entries)
    assert max(ahead) <= DRIFT + 1
    assert max(ahead) >= DRIFT - 2  # the fast task did wait


def test_a_dead_task_holds_no_other_until_its_next_attempt(cluster, journal, tmp_path):
    """Other tasks do not wait for a dead task. Its next attempt starts over, and they wait for it again."""
    with stagecrew.crew(cluster).topology("t") as topology:
        alignment = topology.align("a", DRIFT)
        work = read_at_pace(journal.path, {0: 0.005, 1: 0.005}, dies_at=30, marker=str(tmp_path / "died"))
        assert alignment.map(cluster.range(0, 2, 1, 2), work, "subtask long").count() == 2
    assert len([entry for entry in journal.read() if entry["subtask"] == 0]) == 131


def test_idle_and_finished_sources_hold_no_other(cluster, tmp_path):
    """A source that calls `idle` or `finish` holds back no other source, even without `idle_after`."""
    waiting, held, passed = tmp_path / "there", tmp_path / "held", tmp_path / "passed"

    def work(aligner, batches):
        for _ in batches:
            pass
        if aligner.subtask == 0:
            aligner.advance(0)
            aligner.advance(0, "second")
            waiting.touch()
            eventually(held.exists, 60)
            aligner.idle()
            aligner.finish("second")
            eventually(passed.exists, 60)
        else:
            eventually(waiting.exists, 60)
            with pytest.raises(stagecrew.errors.OperatorFailed):
                aligner.advance(1000, timeout=0.2)
            held.touch()
            aligner.advance(1000, timeout=30)
            passed.touch()
        yield pa.record_batch({"attempt": [TaskContext.get().attemptNumber()]})

    with stagecrew.crew(cluster).topology("t") as topology:
        alignment = topology.align("a", DRIFT)
        rows = alignment.map(cluster.range(0, 2, 1, 2), work, "attempt long").collect()
        assert [row.attempt for row in rows] == [0, 0]  # a second attempt would hide that the first one failed


def test_a_silent_source_holds_no_other_after_idle_after(cluster, tmp_path):
    """A source that reports nothing holds back no other source after `idle_after` seconds."""
    began, passed = tmp_path / "there", tmp_path / "passed"

    def work(aligner, batches):
        for _ in batches:
            pass
        if aligner.subtask == 0:
            aligner.advance(0)
            began.touch()
            eventually(passed.exists, 60)
        else:
            eventually(began.exists, 60)
            aligner.advance(1000, timeout=30)
            passed.touch()
        yield pa.record_batch({"attempt": [TaskContext.get().attemptNumber()]})

    with stagecrew.crew(cluster).topology("t") as topology:
        alignment = topology.align("a", DRIFT, idle_after=1.0)
        rows = alignment.map(cluster.range(0, 2, 1, 2), work, "attempt long").collect()
        assert [row.attempt for row in rows] == [0, 0]  # a second attempt would hide that the first one failed


def test_waiting_too_long_for_a_stalled_source_raises(cluster, tmp_path):
    """A task that waits too long for another task gets an error that says what to do.

    An event time that cannot be compared with the earlier ones raises an error, too.
    """
    began, raised = tmp_path / "there", tmp_path / "told"

    def work(aligner, batches):
        for _ in batches:
            pass
        aligner.advance(0)
        if aligner.subtask == 0:
            began.touch()
            eventually(raised.exists, 60)
        else:
            eventually(began.exists, 60)
            with pytest.raises(stagecrew.errors.OperatorFailed, match="set idle_after"):
                aligner.advance(1000, timeout=0.5)
            with pytest.raises(stagecrew.errors.OperatorFailed, match="cannot be compared"):
                aligner.advance("noon")
            raised.touch()
        yield pa.record_batch({"attempt": [TaskContext.get().attemptNumber()]})

    with stagecrew.crew(cluster).topology("t") as topology:
        rows = topology.align("a", DRIFT).map(cluster.range(0, 2, 1, 2), work, "attempt long").collect()
        assert [row.attempt for row in rows] == [0, 0]


def test_merged_sources_are_read_within_the_drift(cluster, journal):
    """Splits of several sources, one of them skewed, are read within the drift. Every row is returned once."""
    sources = {"a": list(range(0, 200, 5)), "b": list(range(0, 200, 50)), "c": [199]}
    path = journal.path

    def read(split):
        source, at = split
        log = Journal(path)
        log.write(event="begin", at=at, pid=os.getpid())
        time.sleep(0.05 if source == "b" else 0.005)
        log.write(event="end", at=at, pid=os.getpid())
        yield pa.record_batch({"source": [source], "at": [at]})

    merged = stagecrew.operators.EventTimeSplits(sources, lambda at: at, DRIFT)
    with stagecrew.crew(cluster).topology("t") as topology:
        splits = topology.splits(merged, read, "source string, at long", parallelism=3)
        rows = sorted((row.source, row["at"]) for row in splits.collect())
        assert rows == sorted((name, at) for name, times in sources.items() for at in times)
        assert splits.count() == len(rows)  # replays the split log
        single_reader = topology.splits(merged, read, "source string, at long", parallelism=1)
        order = [row["at"] for row in single_reader.collect()]
        assert order == sorted(order)
    reading: dict[int, int] = {}
    for entry in journal.read()[: 2 * len(rows)]:
        if entry["event"] == "begin":
            assert all(entry["at"] <= other + DRIFT for other in reading.values())
            reading[entry["pid"]] = entry["at"]
        else:
            del reading[entry["pid"]]


@pytest.mark.skipif(not PASSES_START_OF_BATCH, reason="this Spark does not pass the start of a batch to the reader")
def test_the_example_stream_resumes_from_its_checkpoint(sessions, tmp_path):
    """After a stop, and after a failure in a batch, the example's stream resumes from its checkpoint.

    It returns each row once, and the sources of a batch stay within the drift.
    """
    spark = sessions.get(LOCAL)
    example = runpy.run_path(str(Path(__file__).parents[2] / "python/stagecrew/examples/aligned_stream.py"))
    spark.dataSource.register(example["Merged"])
    batches: dict[int, list[tuple[str, int]]] = {}
    everything = sorted((source, at) for source, (events, _) in example["SOURCES"].items() for at in events)
    failing_batches = [4]

    def collect_batch(frame, number):
        if number in failing_batches:
            failing_batches.remove(number)
            raise ValueError("the sink is not there")
        batches[number] = [(row.source, row["at"]) for row in frame.collect()]

    def run(row_count):
        stream = spark.readStream.format("merged").load().writeStream.foreachBatch(collect_batch)
        query = stream.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
        try:
            eventually(
                lambda: not query.isActive or sum(map(len, batches.values())) >= row_count, 60, "the rows of the stream"
            )
        finally:
            query.stop()
        return query.exception()

    assert run(60) is None
    assert "the sink is not there" in str(run(len(everything)))
    assert run(len(everything)) is None
    assert sorted(row for rows in batches.values() for row in rows) == everything
    offsets = [
        json.loads((tmp_path / "checkpoint/offsets" / str(number)).read_text().splitlines()[2])
        for number in range(len(batches))
    ]
    for previous, following in itertools.pairwise(offsets):
        assert all(previous[source] <= following[source] for source in previous)
    for number in sorted(batches):
        last_times = dict(sorted(batches[number]))
        if len(last_times) == 2:
            assert max(last_times.values()) - min(last_times.values()) <= example["DRIFT"]


def test_a_rejected_call_does_not_use_up_a_name_or_an_alignment(cluster):
    """A rejected call uses up neither the name nor the alignment: the corrected call works.

    Only a further dataset for the same alignment is rejected.
    """
    with stagecrew.crew(cluster).topology("t") as topology:
        with pytest.raises(stagecrew.errors.OperatorMisused, match="idle_after"):
            topology.align("a", DRIFT, idle_after=0)
        alignment = topology.align("a", DRIFT)

        def work(aligner, batches):
            yield from batches

        with pytest.raises(stagecrew.errors.OperatorMisused, match="maps a DataFrame, not int"):
            alignment.map(7, work, "id long")
        with pytest.raises(Exception, match="PARSE_SYNTAX_ERROR"):
            alignment.map(cluster.range(2), work, "no schema at all")
        assert alignment.map(cluster.range(2), work, "id long").count() == 2
        with pytest.raises(stagecrew.errors.OperatorMisused, match="one dataset"):
            alignment.map(cluster.range(2), work, "id long")


def test_invalid_arguments_are_rejected(cluster):
    """Each invalid argument is rejected.

    They are: an `idle_after` that is not a positive number, a non-function, event times that go back, and a closed
    topology.
    """
    with stagecrew.crew(cluster).topology("t") as topology:
        for wrong in (0, -1, float("nan"), "30"):
            with pytest.raises(stagecrew.errors.OperatorMisused, match="idle_after must be a positive number of sec"):
                topology.align("a", DRIFT, idle_after=wrong)
        with pytest.raises(stagecrew.errors.OperatorMisused, match="needs a function work"):
            topology.align("b", DRIFT).map(cluster.range(2), 7, "a long")
        with pytest.raises(stagecrew.errors.OperatorMisused, match="event_time is a function"):
            stagecrew.operators.EventTimeSplits({"a": []}, 7, DRIFT)
        with pytest.raises(stagecrew.errors.OperatorMisused, match="idle_after must be a positive number of seconds"):
            stagecrew.operators.EventTimeSplits({"a": []}, lambda at: at, DRIFT, "30")
        with (
            pytest.raises(stagecrew.errors.CoordinatorFailed, match="source 'a' goes back in time"),
            stagecrew.crew(cluster).topology("inner") as inner,
        ):
            unordered = stagecrew.operators.EventTimeSplits({"a": [5, 1]}, lambda at: at, DRIFT)
            inner.splits(unordered, lambda split: [], "a long", parallelism=1).collect()
    with pytest.raises(stagecrew.errors.TopologyError):
        topology.align("c", DRIFT)
