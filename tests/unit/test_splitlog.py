"""The log of splits: what each evaluation of a subtask gets, under any order of reads, kills, checkpoints and
resets."""

from __future__ import annotations

import itertools
import pickle
import subprocess
import sys

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from stagecrew.errors import OperatorFailed
from stagecrew.operators.splitlog import HELD, SplitLog
from stagecrew.operators.watermarks import WatermarkGroup

SUBTASKS = 3
HOSTS = ("a", "b")


class Numbers:
    """An enumerator of numbers. It counts how often it was started, and how many numbers were read."""

    def __init__(self, count, homes=()):
        self.count, self.homes = count, homes
        self.begun = self.read = 0

    def splits(self):
        self.begun += 1
        for number in range(self.count):
            self.read += 1
            yield number


class LocatedNumbers(Numbers):
    """An enumerator of numbers with preferred hosts."""

    def locations(self, split):
        return self.homes[split]


class SplitLogMachine(RuleBasedStateMachine):
    """Evaluations of three subtasks read their logs, die and run again. The log is reset to any of its checkpoints."""

    @initialize(
        count=st.integers(0, 12),
        homes=st.none() | st.lists(st.sets(st.sampled_from(HOSTS)), min_size=12, max_size=12),
    )
    def begin(self, count, homes):
        self.count = count
        self.make = lambda: Numbers(count) if homes is None else LocatedNumbers(count, homes)
        self.log = SplitLog(self.make(), "operator 'x'")
        #: By subtask: the splits that its evaluations have received.
        self.received = {subtask: [] for subtask in range(SUBTASKS)}
        #: The subtasks whose evaluations have reached the end of their log.
        self.ended = set()
        #: By number of a live evaluation: its subtask, and how many splits it has read.
        self.evaluations = {}
        self.numbers = itertools.count()
        self.checkpoints = [(None, {}, set())]

    @rule(subtask=st.integers(0, SUBTASKS - 1))
    def evaluate(self, subtask):
        self.evaluations[next(self.numbers)] = [subtask, 0]

    @rule(data=st.data(), host=st.sampled_from((*HOSTS, "elsewhere")))
    def read(self, data, host):
        if not self.evaluations:
            return
        evaluation = self.evaluations[data.draw(st.sampled_from(sorted(self.evaluations)))]
        subtask, index = evaluation
        packed = self.log.read(subtask, index, host)
        received = self.received[subtask]
        if packed is None:
            assert index == len(received)
            self.ended.add(subtask)
            return
        evaluation[1] += 1
        split = pickle.loads(packed)
        if index < len(received):
            assert received[index] == split, "two evaluations of a subtask read the same splits"
        else:
            assert subtask not in self.ended, "a log does not grow after its end was seen"
            received.append(split)

    @rule(data=st.data())
    def die(self, data):
        if self.evaluations:
            del self.evaluations[data.draw(st.sampled_from(sorted(self.evaluations)))]

    @rule()
    def checkpoint(self):
        self.checkpoints.append((self.log.state(), {k: list(v) for k, v in self.received.items()}, set(self.ended)))

    @rule(data=st.data())
    def reset(self, data):
        state, received, ended = data.draw(st.sampled_from(self.checkpoints))
        self.log = SplitLog(self.make(), "operator 'x'")
        if state is not None:
            self.log.restore(state)
        self.received = {subtask: list(received.get(subtask, ())) for subtask in range(SUBTASKS)}
        self.ended = set(ended)
        self.evaluations.clear()

    @invariant()
    def each_split_is_in_one_log(self):
        if hasattr(self, "received"):
            all_given = list(itertools.chain.from_iterable(self.received.values()))
            assert len(all_given) == len(set(all_given))
            assert self.log.assigned == len(all_given)

    def teardown(self):
        if hasattr(self, "received"):
            for subtask in range(SUBTASKS):
                while (packed := self.log.read(subtask, len(self.received[subtask]), "a")) is not None:
                    self.received[subtask].append(pickle.loads(packed))
            assert sorted(itertools.chain.from_iterable(self.received.values())) == list(range(self.count))
            assert self.log.sealed


TestSplitLog = SplitLogMachine.TestCase
TestSplitLog.settings = settings(max_examples=200, stateful_step_count=40)


def test_the_enumerator_is_lazy():
    """The first request starts the enumerator. An enumerator without locations is read one split at a time."""
    numbers = Numbers(5)
    log = SplitLog(numbers, "operator 'x'")
    log.state()
    assert numbers.begun == 0
    log.read(0, 0, "a")
    log.read(1, 0, "a")
    assert (numbers.begun, numbers.read) == (1, 2)


def test_a_host_gets_its_preferred_splits():
    """If splits have locations, a task first gets splits of its own host, and then any other split."""
    log = SplitLog(LocatedNumbers(3, [{"b"}, {"a"}, {"b"}]), "operator 'x'")
    assert [pickle.loads(log.read(0, index, "a")) for index in range(3)] == [1, 0, 2]


def test_reading_ahead_does_not_delay_a_task():
    """When there is no time to read ahead, a task gets the first available split. Splits that were already read ahead
    still go to their own hosts first."""
    time_for = iter([True, True, False, False, False])
    numbers = LocatedNumbers(5, [{"b"}, {"b"}, {"a"}, {"a"}, {"b"}])
    log = SplitLog(numbers, "operator 'x'", lambda: next(time_for))
    read = [(pickle.loads(log.read(0, index, "a")), numbers.read) for index in range(5)]
    assert read == [(2, 3), (3, 4), (0, 5), (1, 5), (4, 5)]
    assert log.read(0, 5, "a") is None


class TimedNumbers(LocatedNumbers):
    """An enumerator of numbers with preferred hosts and event times."""

    def event_time(self, split):
        return 10 * split


def test_a_preferred_split_that_is_too_far_ahead():
    """A split of the task's own host is held back while its event time is too far ahead of the slowest reader, or of an
    earlier split that no task is reading yet."""
    homes = [{"b"}, {"b"}, {"a"}, {"b"}, {"a"}]
    log, reading = SplitLog(TimedNumbers(5, homes), "operator 'x'"), WatermarkGroup(10)
    assert pickle.loads(log.read(0, 0, "a", reading)) == 0  # 2 is too far ahead of 0, which no task is reading yet
    reading.report(0, 0)
    assert pickle.loads(log.read(1, 0, "a", reading)) == 1
    reading.report(1, 10)
    assert log.read(2, 0, "a", reading) == HELD
    reading.remove(0)
    assert pickle.loads(log.read(2, 0, "a", reading)) == 2
    reading.remove(1)
    reading.report(2, 20)
    assert pickle.loads(log.read(0, 1, "a", reading)) == 3  # 4 belongs to the task's own host, but it is too far ahead
    reading.remove(2)
    reading.report(0, 30)
    assert pickle.loads(log.read(1, 1, "b", reading)) == 4


class Raises:
    def splits(self):
        raise OSError("no such bucket")


class RaisesLater:
    def splits(self):
        yield 1
        raise OSError("no such bucket")


@pytest.mark.parametrize("enumerator", [Raises(), RaisesLater()], ids=["at once", "later"])
def test_an_enumerator_that_raises(enumerator):
    """If the enumerator raises an error, the current request and all later ones fail, and their errors contain that
    error."""
    log = SplitLog(enumerator, "operator 'x'")
    if isinstance(enumerator, RaisesLater):
        assert pickle.loads(log.read(0, 0, "a")) == 1
    for subtask in (1, 2, 1):
        with pytest.raises(OperatorFailed, match="the enumerator of operator 'x' raised OSError: no such bucket"):
            log.read(subtask, 0, "a")


def test_an_enumerator_that_does_not_repeat_its_splits():
    """After a reset, the enumerator must yield again each split that a task had read before the checkpoint. Otherwise,
    a request at the end of the log fails."""
    log = SplitLog(Numbers(3), "operator 'x'")
    log.read(0, 0, "a"), log.read(0, 1, "a")
    after = SplitLog([1, 2], "operator 'x'")
    after.restore(log.state())
    assert pickle.loads(after.read(1, 0, "a")) == 2
    with pytest.raises(OperatorFailed, match="1 splits that tasks of operator 'x' had read before the checkpoint"):
        after.read(1, 1, "a")


#: A script of a job, whose splits have a class of the script. It reads one split and prints the log's state; or it
#: restores that state and prints the splits that are left.
SCRIPT = """
import dataclasses, pickle, sys
from stagecrew.operators.splitlog import SplitLog

@dataclasses.dataclass
class File:
    path: str

log = SplitLog([File("a"), File("b"), File("c")], "operator 'x'")
if len(sys.argv) == 1:
    log.read(0, 0, "")
    print(log.state().hex())
else:
    log.restore(bytes.fromhex(sys.argv[1]))
    while (split := log.read(1, log.assigned - 1, "")) is not None:
        print(pickle.loads(split).path)
"""


def test_splits_of_a_class_in_the_script_are_recognized_after_a_recovery(tmp_path):
    """If the class of the splits is in the script of the job, the next process of the job recognizes the splits that
    tasks have read."""
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)

    def run(*arguments):
        return subprocess.run(
            [sys.executable, script, *arguments], check=True, capture_output=True, text=True, timeout=60
        ).stdout.split()

    state = run()
    assert run(*state) == ["b", "c"]


def test_splits_that_only_cloudpickle_can_pickle():
    """A split can be an object that only cloudpickle can pickle, and is recognized after a reset."""
    splits = [lambda: "a", lambda: "b"]
    before = SplitLog(splits, "operator 'x'")
    before.read(0, 0, "")
    after = SplitLog(splits, "operator 'x'")
    after.restore(before.state())
    assert pickle.loads(after.read(1, 0, ""))() == "b"
    assert after.read(1, 1, "") is None


def test_a_position_beyond_the_end():
    """A request for a split beyond the end of the log is refused, because another coordinator gave the evaluation its
    earlier splits."""
    with pytest.raises(
        OperatorFailed, match="subtask 0 of operator 'x' asked for split 2 of its log, which has 0 splits"
    ):
        SplitLog([1, 2, 3], "operator 'x'").read(0, 2, "a")


@pytest.mark.parametrize("splits", [[1, 2, 1], [[1], [1]]], ids=["hashable", "by bytes"])
def test_one_split_twice(splits):
    """A split that is enumerated twice is an error, because its rows would be read twice."""
    log = SplitLog(splits, "operator 'x'")
    with pytest.raises(OperatorFailed, match="yielded one split twice"):
        for index in range(3):
            log.read(0, index, "a")


@pytest.mark.parametrize("subtasks", [1, 2, 3, 4, 7])
def test_fewer_subtasks_read_the_logs_of_all(subtasks):
    """After a recovery with another number of tasks, each split is read once."""
    before = SplitLog(list(range(10)), "operator 'x'")
    for number in range(10):
        assert before.read(number % 4, number // 4, "") is not None
    after = SplitLog(list(range(10)), "operator 'x'")
    after.restore(before.state(), subtasks)
    found = []
    for subtask in range(subtasks):
        while (split := after.read(subtask, sum(one == subtask for one, _ in found), "")) is not None:
            found.append((subtask, pickle.loads(split)))
    assert sorted(split for _, split in found) == list(range(10))
