"""Alignment in event time on real Spark: nobody is ahead by more than the drift and a batch, whoever fails or is idle."""

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
from support.waiting import eventually

cloudpickle.register_pickle_by_value(sys.modules[__name__])

DRIFT = 20


@pytest.fixture
def cluster(sessions):
    """A session on a cluster of two executors, in which attempts may fail often."""
    return sessions.get(LOCAL_CLUSTER, **{"spark.task.maxFailures": "30"})


def reading(path: str, pace: dict[int, float], dies: int | None = None, mark: str = "") -> Any:
    """Work that goes through a hundred event times at its subtask's pace, and writes down each when it may read it."""

    def work(aligner, batches):
        for _ in batches:
            pass
        journal = Journal(path)
        for event in range(100):
            aligner.advance(event)
            journal.write(subtask=aligner.subtask, at=event, pid=os.getpid())
            if event == 0:  # who has not begun holds nobody
                eventually(lambda: {entry["subtask"] for entry in journal.read()} == set(pace), 60, "all take part")
            time.sleep(pace[aligner.subtask])
            if event == dies and aligner.subtask == 0 and not os.path.exists(mark):
                Path(mark).touch()
                os.kill(os.getpid(), signal.SIGKILL)
        yield pa.record_batch({"subtask": [aligner.subtask]})

    return work


def spreads(entries: list[dict[str, Any]]) -> list[int]:
    """How far each read was ahead of what the other task had come to, while both read."""
    at: dict[int, int] = {}
    found = []
    for entry in entries:
        at[entry["subtask"]] = entry["at"]
        if len(at) == 2 and min(at.values()) < 99:
            found.append(entry["at"] - min(at.values()))
    return found


def test_the_fast_one_waits(cluster, journal):
    """Two tasks at different paces stay within the drift and one event."""
    with stagecrew.crew(cluster).topology("t") as topology:
        alignment = topology.align("a", DRIFT)
        rows = alignment.map(
            cluster.range(0, 2, 1, 2), reading(journal.path, {0: 0.01, 1: 0.0}), "subtask long"
        ).collect()
        assert sorted(row.subtask for row in rows) == [0, 1]
        assert "slowest" in topology.progress["a/1"]
    entries = journal.read()
    assert len(entries) == 200
    apart = spreads(entries)
    assert max(apart) <= DRIFT + 1
    assert max(apart) >= DRIFT - 2  # it did wait


def test_a_task_dies(cluster, journal, tmp_path):
    """The others do not wait for one that is dead; the next attempt begins anew, and holds them again."""
    with stagecrew.crew(cluster).topology("t") as topology:
        alignment = topology.align("a", DRIFT)
        work = reading(journal.path, {0: 0.005, 1: 0.005}, dies=30, mark=str(tmp_path / "died"))
        assert alignment.map(cluster.range(0, 2, 1, 2), work, "subtask long").count() == 2
    assert len([entry for entry in journal.read() if entry["subtask"] == 0]) == 131


def test_idle_and_finished(cluster, tmp_path):
    """A source that says it has nothing for now, or ever, holds nobody any more, also where silence says nothing."""
    there, held, passed = tmp_path / "there", tmp_path / "held", tmp_path / "passed"

    def work(aligner, batches):
        for _ in batches:
            pass
        if aligner.subtask == 0:
            aligner.advance(0)
            aligner.advance(0, "second")
            there.touch()
            eventually(held.exists, 60)
            aligner.idle()
            aligner.finish("second")
            eventually(passed.exists, 60)
        else:
            eventually(there.exists, 60)
            with pytest.raises(stagecrew.AlignmentFailed):
                aligner.advance(1000, timeout=0.2)
            held.touch()
            aligner.advance(1000, timeout=30)
            passed.touch()
        yield pa.record_batch({"attempt": [TaskContext.get().attemptNumber()]})

    with stagecrew.crew(cluster).topology("t") as topology:
        alignment = topology.align("a", DRIFT)
        rows = alignment.map(cluster.range(0, 2, 1, 2), work, "attempt long").collect()
        assert [row.attempt for row in rows] == [0, 0]  # a second attempt would hide that the first was held


def test_a_silent_source(cluster, tmp_path):
    """One that says nothing at all holds nobody after `idle_after` seconds."""
    there, passed = tmp_path / "there", tmp_path / "passed"

    def work(aligner, batches):
        for _ in batches:
            pass
        if aligner.subtask == 0:
            aligner.advance(0)
            there.touch()
            eventually(passed.exists, 60)
        else:
            eventually(there.exists, 60)
            aligner.advance(1000, timeout=30)
            passed.touch()
        yield pa.record_batch({"attempt": [TaskContext.get().attemptNumber()]})

    with stagecrew.crew(cluster).topology("t") as topology:
        alignment = topology.align("a", DRIFT, idle_after=1.0)
        rows = alignment.map(cluster.range(0, 2, 1, 2), work, "attempt long").collect()
        assert [row.attempt for row in rows] == [0, 0]  # a second attempt would hide that the first was held


def test_one_that_stands_still(cluster, tmp_path):
    """Who waits for it too long is told so, with what to do."""
    there, told = tmp_path / "there", tmp_path / "told"

    def work(aligner, batches):
        for _ in batches:
            pass
        aligner.advance(0)
        if aligner.subtask == 0:
            there.touch()
            eventually(told.exists, 60)
        else:
            eventually(there.exists, 60)
            with pytest.raises(stagecrew.AlignmentFailed, match="set idle_after"):
                aligner.advance(1000, timeout=0.5)
            with pytest.raises(stagecrew.AlignmentFailed, match="cannot be compared"):
                aligner.advance("noon")
            told.touch()
        yield pa.record_batch({"attempt": [TaskContext.get().attemptNumber()]})

    with stagecrew.crew(cluster).topology("t") as topology:
        rows = topology.align("a", DRIFT).map(cluster.range(0, 2, 1, 2), work, "attempt long").collect()
        assert [row.attempt for row in rows] == [0, 0]


def test_merged_sources(cluster, journal):
    """Splits of several sources, one of them skewed: no new split is further ahead of what is read than the drift; all rows are there."""
    sources = {"a": list(range(0, 200, 5)), "b": list(range(0, 200, 50)), "c": [199]}
    path = journal.path

    def read(split):
        source, at = split
        log = Journal(path)
        log.write(event="begin", at=at, pid=os.getpid())
        time.sleep(0.05 if source == "b" else 0.005)
        log.write(event="end", at=at, pid=os.getpid())
        yield pa.record_batch({"source": [source], "at": [at]})

    merged = stagecrew.EventTimeSplits(sources, lambda at: at, DRIFT)
    with stagecrew.crew(cluster).topology("t") as topology:
        splits = topology.splits(merged, read, "source string, at long", parallelism=3)
        rows = sorted((row.source, row["at"]) for row in splits.collect())
        assert rows == sorted((name, at) for name, of in sources.items() for at in of)
        assert splits.count() == len(rows)  # replayed
        one = topology.splits(merged, read, "source string, at long", parallelism=1)
        order = [row["at"] for row in one.collect()]
        assert order == sorted(order)
    began: dict[int, int] = {}
    for entry in journal.read()[: 2 * len(rows)]:
        if entry["event"] == "begin":
            assert all(entry["at"] <= other + DRIFT for other in began.values())
            began[entry["pid"]] = entry["at"]
        else:
            del began[entry["pid"]]


def test_the_example_of_a_stream_starts_again(sessions, tmp_path):
    """Stopped, failed in a batch, and started again from its checkpoint, it goes on where it was: each row once, within the drift."""
    spark = sessions.get(LOCAL)
    example = runpy.run_path(str(Path(__file__).parents[2] / "docs/examples/aligned_stream.py"))
    spark.dataSource.register(example["Merged"])
    batches: dict[int, list[tuple[str, int]]] = {}
    everything = sorted((source, at) for source, (events, _) in example["SOURCES"].items() for at in events)
    fails = [4]

    def keep(frame, number):
        if number in fails:
            fails.remove(number)
            raise ValueError("the sink is not there")
        batches[number] = [(row.source, row["at"]) for row in frame.collect()]

    def run(enough):
        stream = spark.readStream.format("merged").load().writeStream.foreachBatch(keep)
        query = stream.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
        try:
            eventually(lambda: not query.isActive or sum(map(len, batches.values())) >= enough, 60, "the stream's rows")
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
    for one, next_ in itertools.pairwise(offsets):
        assert all(one[source] <= next_[source] for source in one)
    for number in sorted(batches):
        ends = dict(sorted(batches[number]))
        if len(ends) == 2:
            assert max(ends.values()) - min(ends.values()) <= example["DRIFT"]


def test_a_call_that_was_refused(cluster):
    """It has used nothing: the right call with the same name, or on the same alignment, is done. The next is one too many."""
    with stagecrew.crew(cluster).topology("t") as topology:
        with pytest.raises(stagecrew.OperatorMisused, match="idle_after"):
            topology.align("a", DRIFT, idle_after=0)
        alignment = topology.align("a", DRIFT)

        def work(aligner, batches):
            yield from batches

        with pytest.raises(stagecrew.OperatorMisused, match="maps a DataFrame, not int"):
            alignment.map(7, work, "id long")
        with pytest.raises(Exception, match="PARSE_SYNTAX_ERROR"):
            alignment.map(cluster.range(2), work, "no schema at all")
        assert alignment.map(cluster.range(2), work, "id long").count() == 2
        with pytest.raises(stagecrew.OperatorMisused, match="one dataset"):
            alignment.map(cluster.range(2), work, "id long")


def test_bad_input(cluster):
    """What is no function, no time, no mapping."""
    with stagecrew.crew(cluster).topology("t") as topology:
        with pytest.raises(stagecrew.OperatorMisused, match="idle_after is after how many seconds"):
            topology.align("a", DRIFT, idle_after=0)
        with pytest.raises(stagecrew.OperatorMisused, match="maps a function work"):
            topology.align("b", DRIFT).map(cluster.range(2), 7, "a long")
        with pytest.raises(stagecrew.OperatorMisused, match="event_time is a function"):
            stagecrew.EventTimeSplits({"a": []}, 7, DRIFT)
        with (
            pytest.raises(stagecrew.CoordinatorFailed, match="source 'a' goes back in time"),
            stagecrew.crew(cluster).topology("inner") as inner,
        ):
            back = stagecrew.EventTimeSplits({"a": [5, 1]}, lambda at: at, DRIFT)
            inner.splits(back, lambda split: [], "a long", parallelism=1).collect()
    with pytest.raises(stagecrew.TopologyClosed):
        topology.align("c", DRIFT)
