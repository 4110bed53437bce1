"""Alignment in event time, without Spark: watermarks, tasks that wait, and splits in the order of events."""

from __future__ import annotations

import datetime as dt
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stagecrew.errors import OperatorMisused, RequestFailed, RequestTimeout, SplitsFailed
from stagecrew.operators.alignment import AlignmentCoordinator
from stagecrew.operators.enumerators import EventTimeSplits
from stagecrew.operators.splitlog import HELD
from stagecrew.operators.splits import SplitCoordinator
from stagecrew.operators.watermarks import WatermarkGroup
from stagecrew.testing import CoordinatorHarness

DRIFT, BATCH, IDLE = 10, 4, 5.0


class Schedules(RuleBasedStateMachine):
    """Sources read batches of up to BATCH event times, each when the group allows where it is; reports are lost and repeated."""

    @initialize()
    def begin(self):
        self.now = 0.0
        self.group = WatermarkGroup(DRIFT, IDLE, lambda: self.now)
        self.at = {}  # live sources -> the event time that they came to
        self.heard = {}  # as the group knows it
        self.last = {}  # when it was last heard of
        self.finished = {}

    def report(self, source, watermark):
        self.group.report(source, watermark)
        if source not in self.finished:
            self.heard[source] = max(self.heard.get(source, watermark), watermark)
            self.last[source] = self.now

    @rule(source=st.integers(0, 3), start=st.integers(0, 30))
    def join(self, source, start):
        if source not in self.at and source not in self.finished:
            self.at[source] = start
            self.report(source, start)

    @precondition(lambda self: self.at)
    @rule(data=st.data(), far=st.integers(1, BATCH), lost=st.booleans())
    def read(self, data, far, lost):
        """One that may reads a batch; that it did is told, or lost."""
        source = data.draw(st.sampled_from(sorted(self.at)))
        self.report(source, self.at[source])  # whoever asks says where it is
        if self.group.allows(self.at[source]):
            live = [self.heard[one] for one in self.heard if self.now - self.last[one] <= IDLE]
            assert self.at[source] + far <= min(live) + DRIFT + BATCH  # never ahead by more than a batch
            self.at[source] += far
            if not lost:
                self.report(source, self.at[source])

    @precondition(lambda self: self.heard)
    @rule(data=st.data(), back=st.integers(0, 20))
    def repeated(self, data, back):
        """An old report comes again: but for its time, nothing changes."""
        source = data.draw(st.sampled_from(sorted(self.heard)))
        self.report(source, self.heard[source] - back)

    @precondition(lambda self: self.at)
    @rule(data=st.data())
    def finish(self, data):
        source = data.draw(st.sampled_from(sorted(self.at)))
        self.finished[source] = self.at.pop(source)
        self.heard.pop(source, None)
        self.group.finish(source)

    @precondition(lambda self: self.finished)
    @rule(data=st.data())
    def late(self, data):
        """Something of one that finished comes late: it holds nobody."""
        self.group.report(data.draw(st.sampled_from(sorted(self.finished))), 0)

    @rule(seconds=st.floats(0, 8))
    def time_passes(self, seconds):
        self.now += seconds

    @invariant()
    def slowest(self):
        if hasattr(self, "group"):
            live = [self.heard[one] for one in self.heard if self.now - self.last[one] <= IDLE]
            assert self.group.slowest == min(live, default=None)

    @invariant()
    def somebody_goes_on(self):
        """Nobody is held for ever: where a source is live, the slowest may read."""
        if getattr(self, "heard", None):
            live = [self.heard[one] for one in self.heard if self.now - self.last[one] <= IDLE]
            if live:
                assert self.group.allows(min(live))


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)


def test_times_and_their_end():
    """datetime with timedelta; near the end of time nobody is held; what cannot be compared is refused and changes nothing."""
    group = WatermarkGroup(dt.timedelta(hours=1))
    noon = dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC)
    group.report("a", noon)
    assert group.allows(noon + dt.timedelta(minutes=60))
    assert not group.allows(noon + dt.timedelta(minutes=61))
    for wrong in (7, "noon"):
        with pytest.raises(TypeError):
            group.report("b", wrong)
    assert group.slowest == noon
    for drift, wrong in ((1, float("nan")), (-1, 5)):
        with pytest.raises(TypeError, match="no event time"):
            WatermarkGroup(drift).report("a", wrong)
    group.finish("a")
    group.report("c", dt.datetime.max.replace(tzinfo=dt.UTC))
    assert group.limit is None


def asks(evaluation, watermark, source=None):
    """Whether it may go on at once."""
    try:
        evaluation.request((source, watermark))
    except RequestTimeout:
        return False
    return True


def goes_on(evaluation):
    try:
        evaluation.reply()
    except RequestTimeout:
        return False
    return True


@pytest.fixture
def aligned():
    with CoordinatorHarness(lambda context: AlignmentCoordinator(context, DRIFT, None)) as harness:
        yield harness


def test_who_is_ahead_waits(aligned):
    """Until the slowest has come near, has finished, fails, or is idle."""
    slow, quick = aligned.evaluation(0), aligned.evaluation(1)
    assert asks(slow, 0)
    assert asks(quick, 10)
    assert not asks(quick, 11)
    assert asks(slow, 1)
    assert goes_on(quick)
    for lets_go in (slow.finish, None):
        if lets_go is None:
            slow = aligned.evaluation(0, attempt_number=1)
            assert asks(slow, 2)
        assert not asks(quick, 50)
        (lets_go or slow.fail)()
        assert goes_on(quick)
    third = aligned.evaluation(2)
    assert asks(third, 3)
    assert not asks(quick, 60)
    third.send(("idle", None))
    assert goes_on(quick)
    assert asks(third, 4)
    assert not asks(quick, 70)
    third.send(("finish", None))
    assert goes_on(quick)
    assert asks(third, 5)  # it said that it had finished: it holds nobody
    assert asks(quick, 80)
    assert aligned.operators.progress()["operator/1"] == {"slowest": 80, "waiting": 0}


def test_who_waits_is_not_idle():
    """A source that is kept waiting holds those ahead of it, however long the slowest has kept it."""
    with CoordinatorHarness(lambda context: AlignmentCoordinator(context, DRIFT, IDLE)) as harness:
        harness.coordinator._group._clock = lambda: harness.now
        slow, middle, quick = (harness.evaluation(subtask) for subtask in range(3))
        assert asks(slow, 0)
        assert not asks(middle, 20)
        harness.advance(4)
        assert not asks(quick, 35)
        harness.advance(1.5)  # the slow one is idle now
        assert goes_on(middle)
        assert not goes_on(quick)
        harness.advance(IDLE + 1)  # and now the one that went on, and says nothing more
        assert goes_on(quick)


@pytest.mark.parametrize("says", ["idle", "finish"])
def test_who_gives_up_waiting_and_says_so(aligned, says):
    """A source whose `advance` timed out, and which then is idle or has finished, holds nobody, however often it is looked."""
    slow, gives_up, quick = (aligned.evaluation(subtask) for subtask in range(3))
    assert asks(slow, 0)
    assert not asks(gives_up, 100)
    gives_up.send((says, None))
    slow.finish()
    assert asks(quick, 120)
    aligned.advance(10_000)
    assert asks(quick, 200)
    assert aligned.operators.progress()["operator/1"] == {"slowest": 200, "waiting": 0}
    if says == "idle":
        assert asks(gives_up, 195)  # and it takes part again
        assert not asks(quick, 206)


def test_several_sources_of_a_task(aligned):
    """Each is one of its own."""
    task = aligned.evaluation(0)
    assert asks(task, 0, "a")
    assert asks(task, 8, "b")
    assert not asks(task, 20, "b")
    assert asks(task, 10, "a")


def test_a_watermark_that_cannot_be_compared(aligned):
    """It is an error of its task alone."""
    good, bad = aligned.evaluation(0), aligned.evaluation(1)
    assert asks(good, 0)
    with pytest.raises(RequestFailed):
        bad.request((None, "now"))
    assert asks(good, 5)
    assert aligned.failure is None


# -- Splits in the order of events


def test_merged():
    """Splits of several sources come in the order of their event times; one that goes back in time is named."""
    merged = EventTimeSplits({"a": [1, 5, 9], "b": [2, 3], "c": []}, lambda split: split, 3)
    assert list(merged.splits()) == [("a", 1), ("b", 2), ("b", 3), ("a", 5), ("a", 9)]
    with pytest.raises(SplitsFailed, match="source 'a' goes back in time: a split of 1 follows one of 5"):
        list(EventTimeSplits({"a": [5, 1]}, lambda split: split, 3).splits())
    once = EventTimeSplits({"a": iter([1])}, lambda split: split, 3)
    assert list(once.splits()) == [("a", 1)]
    with pytest.raises(SplitsFailed, match="source 'a' of EventTimeSplits came from an iterator"):
        list(once.splits())
    for wrong in ({}, [1]):
        with pytest.raises(OperatorMisused, match="by their names"):
            EventTimeSplits(wrong, lambda split: split, 3)


class Readers:
    """Three tasks that read splits in the order of events; each thing that happens is looked at on its own."""

    def __init__(self, harness, left):
        self.harness, self.left = harness, left
        self.logs = {subtask: [] for subtask in range(3)}
        self.tasks = {subtask: [harness.evaluation(subtask), 0] for subtask in range(3)}
        self.reading, self.waiting = {}, set()

    def look(self):
        """Takes what those that wait have been given meanwhile."""
        for subtask in sorted(self.waiting):
            try:
                self.took(subtask, self.tasks[subtask][0].reply())
            except RequestTimeout:
                continue

    def asks(self, subtask):
        evaluation, index = self.tasks[subtask]
        self.reading.pop(subtask, None)  # it has read the one before
        try:
            packed = evaluation.request((index, "h"))
        except RequestTimeout:
            self.waiting.add(subtask)
        else:
            self.took(subtask, packed)
        self.look()

    def took(self, subtask, packed):
        assert packed != HELD
        self.waiting.discard(subtask)
        task, log = self.tasks[subtask], self.logs[subtask]
        if packed is None:
            task[0].finish()
            del self.tasks[subtask]
            return
        split = pickle.loads(packed)
        if task[1] == len(log):
            assert all(split[1][0] <= other + DRIFT for other in [*self.reading.values(), self.left[0]])
            self.left.remove(split[1][0])
            log.append(split)
        assert log[task[1]] == split  # also where it is read again
        task[1] += 1
        self.reading[subtask] = split[1][0]

    def fails(self, subtask):
        self.tasks[subtask][0].fail()
        self.reading.pop(subtask, None)
        self.waiting.discard(subtask)
        self.tasks[subtask] = [self.harness.evaluation(subtask), 0]
        self.look()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_split_is_given_too_early(data):
    """Over any schedule of tasks that read, end and fail, also where they read some best: no new split lies further ahead of what is
    read, or is to be read, than the drift; all are read."""
    splits = {
        name: [
            (time, number) for number, time in enumerate(sorted(data.draw(st.lists(st.integers(0, 60), max_size=8))))
        ]
        for name in "abc"
    }
    merged = EventTimeSplits(splits, lambda split: split[0], DRIFT)
    if data.draw(st.booleans()):
        merged.locations = lambda named: ["h"] if named[1][1] % 2 else []
    left = sorted(time for of in splits.values() for time, _ in of)
    with CoordinatorHarness(lambda context: SplitCoordinator(context, merged, 60.0)) as harness:
        readers = Readers(harness, left)
        while readers.tasks:
            ready = sorted(readers.tasks.keys() - readers.waiting)
            assert ready, "all wait for each other"
            subtask = data.draw(st.sampled_from(ready))
            if subtask in readers.reading and data.draw(st.integers(0, 9)) == 0:
                readers.fails(subtask)
            else:
                readers.asks(subtask)
        assert harness.failure is None
        given = [split for log in readers.logs.values() for split in log]
        assert sorted(given) == sorted((name, split) for name in splits for split in splits[name])


def test_one_that_waits_asks_again():
    """A request for a split that may not be given yet is answered far before it times out, and asked again."""
    merged = EventTimeSplits({"a": [0, 100]}, lambda split: split, DRIFT)
    with CoordinatorHarness(lambda context: SplitCoordinator(context, merged, 60.0)) as harness:
        one, other = harness.evaluation(0), harness.evaluation(1)
        assert pickle.loads(one.request((0, "h"))) == ("a", 0)
        with pytest.raises(RequestTimeout):
            other.request((0, "h"))
        (held,) = harness.coordinator._held.values()
        held.until = 0
        harness.advance(1)
        assert other.reply() == HELD
        one.finish()
        assert pickle.loads(other.request((0, "h"))) == ("a", 100)


@pytest.mark.parametrize("idle_after", [None, IDLE])
def test_one_that_reads_for_long(idle_after):
    """Whoever reads at one split for longer than `idle_after` holds nobody, until it asks for the next; without it, for ever."""
    merged = EventTimeSplits({"a": [0, 9, 100], "b": [200]}, lambda split: split, DRIFT, idle_after)
    with CoordinatorHarness(lambda context: SplitCoordinator(context, merged, 60.0)) as harness:
        harness.coordinator._reading._clock = lambda: harness.now
        slow, other, third = (harness.evaluation(subtask) for subtask in range(3))
        assert pickle.loads(slow.request((0, "h"))) == ("a", 0)
        assert pickle.loads(other.request((0, "h"))) == ("a", 9)
        with pytest.raises(RequestTimeout):
            other.request((1, "h"))  # it is for the slow one that it waits
        harness.advance(IDLE - 0.5)
        assert not goes_on(other)
        harness.advance(1.0)
        assert goes_on(other) == (idle_after is not None)
        if idle_after is None:
            harness.advance(1000)
            assert not goes_on(other)
            slow.finish()
            assert goes_on(other)
        assert pickle.loads(other.reply()) == ("a", 100)
        with pytest.raises(RequestTimeout):
            third.request((0, "h"))
        assert not goes_on(third)  # who has just begun is not idle
        other.finish()
        assert pickle.loads(third.reply()) == ("b", 200)
        if idle_after is not None:
            assert slow.request((1, "h")) is None  # it goes on where it was
        assert harness.failure is None
