"""Event-time alignment without Spark: watermarks, waiting tasks, and splits in the order of their event times."""

from __future__ import annotations

import datetime as dt
import pickle
import zoneinfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stagecrew.errors import CoordinationTimeout, OperatorFailed, OperatorMisused, RequestFailed
from stagecrew.operators.alignment import AlignmentCoordinator
from stagecrew.operators.enumerators import EventTimeSplits
from stagecrew.operators.splitlog import HELD
from stagecrew.operators.splits import SplitCoordinator
from stagecrew.operators.watermarks import WatermarkGroup
from stagecrew.testing import CoordinatorHarness

DRIFT, BATCH, IDLE = 10, 4, 5.0
BERLIN = zoneinfo.ZoneInfo("Europe/Berlin")


class Schedules(RuleBasedStateMachine):
    """Sources read batches of up to BATCH event times when the group allows it. Reports get lost or are repeated."""

    @initialize()
    def begin(self):
        self.now = 0.0
        self.group = WatermarkGroup(DRIFT, IDLE, lambda: self.now)
        self.positions = {}  # live source -> the event time that it has reached
        self.reported = {}  # source -> the latest watermark that the group knows
        self.reported_at = {}  # source -> time of its last report
        self.finished = {}

    def report(self, source, watermark):
        self.group.report(source, watermark)
        if source not in self.finished:
            self.reported[source] = max(self.reported.get(source, watermark), watermark)
            self.reported_at[source] = self.now

    @rule(source=st.integers(0, 3), start=st.integers(0, 30))
    def join(self, source, start):
        if source not in self.positions and source not in self.finished:
            self.positions[source] = start
            self.report(source, start)

    @precondition(lambda self: self.positions)
    @rule(data=st.data(), count=st.integers(1, BATCH), lost=st.booleans())
    def read(self, data, count, lost):
        """A source reads a batch if the group allows it. The report after the batch arrives or is lost."""
        source = data.draw(st.sampled_from(sorted(self.positions)))
        self.report(source, self.positions[source])  # the request to read contains the position
        if self.group.allows(self.positions[source]):
            live = [self.reported[other] for other in self.reported if self.now - self.reported_at[other] <= IDLE]
            assert self.positions[source] + count <= min(live) + DRIFT + BATCH  # ahead by at most one batch
            self.positions[source] += count
            if not lost:
                self.report(source, self.positions[source])

    @precondition(lambda self: self.reported)
    @rule(data=st.data(), back=st.integers(0, 20))
    def repeat_report(self, data, back):
        """An old report that arrives again only renews the source's report time."""
        source = data.draw(st.sampled_from(sorted(self.reported)))
        self.report(source, self.reported[source] - back)

    @precondition(lambda self: self.positions)
    @rule(data=st.data())
    def finish(self, data):
        source = data.draw(st.sampled_from(sorted(self.positions)))
        self.finished[source] = self.positions.pop(source)
        self.reported.pop(source, None)
        self.group.finish(source)

    @precondition(lambda self: self.finished)
    @rule(data=st.data())
    def late_report(self, data):
        """A late report of a finished source holds back no other source."""
        self.group.report(data.draw(st.sampled_from(sorted(self.finished))), 0)

    @rule(seconds=st.floats(0, 8))
    def time_passes(self, seconds):
        self.now += seconds

    @invariant()
    def slowest_is_the_lowest_live_watermark(self):
        if hasattr(self, "group"):
            live = [self.reported[other] for other in self.reported if self.now - self.reported_at[other] <= IDLE]
            assert self.group.slowest_watermark == min(live, default=None)

    @invariant()
    def the_slowest_is_allowed_to_read(self):
        """If any source is live, the slowest is allowed to read. So no source waits forever."""
        if getattr(self, "reported", None):
            live = [self.reported[other] for other in self.reported if self.now - self.reported_at[other] <= IDLE]
            if live:
                assert self.group.allows(min(live))


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(max_examples=200, stateful_step_count=30)


def test_event_times_can_be_datetimes_and_must_be_comparable():
    """If event times are datetimes, the drift is a timedelta. Near the largest datetime, no source is held back.

    A watermark that cannot be compared is refused and changes nothing.
    """
    group = WatermarkGroup(dt.timedelta(hours=1))
    noon = dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC)
    group.report("a", noon)
    assert group.allows(noon + dt.timedelta(minutes=60))
    assert not group.allows(noon + dt.timedelta(minutes=61))
    for wrong in (7, "noon"):
        with pytest.raises(TypeError):
            group.report("b", wrong)
    assert group.slowest_watermark == noon
    for drift, wrong in ((1, float("nan")), (-1, 5)):
        with pytest.raises(TypeError, match="not an event time"):
            WatermarkGroup(drift).report("a", wrong)
    group.finish("a")
    group.report("c", dt.datetime.max.replace(tzinfo=dt.UTC))
    assert group.limit is None


def test_event_times_with_a_zone_are_instants():
    """When clocks go back an hour, event times of that zone do not go back, and the drift is the time that passed."""
    before = dt.datetime(2026, 10, 25, 2, 50, tzinfo=BERLIN)
    after = dt.datetime(2026, 10, 25, 2, 10, tzinfo=BERLIN, fold=1)  # 20 minutes later
    merged = EventTimeSplits({"a": [before, after], "b": [before]}, lambda split: split, dt.timedelta(minutes=5))
    assert list(merged.splits()) == [("a", before), ("b", before), ("a", after)]
    group = WatermarkGroup(dt.timedelta(minutes=15))
    group.report("a", before)
    assert not group.allows(after)
    group.report("a", after)
    assert group.slowest_watermark == dt.datetime(2026, 10, 25, 1, 10, tzinfo=dt.UTC)
    assert group.allows(before, beside=before)
    assert not group.allows(after, beside=before)


def may_advance(evaluation, watermark, source=None):
    """Reports a watermark. Returns whether the source is allowed to continue immediately."""
    try:
        evaluation.request((source, watermark))
    except CoordinationTimeout:
        return False
    return True


def is_released(evaluation):
    """Returns whether a waiting source has received its reply."""
    try:
        evaluation.reply()
    except CoordinationTimeout:
        return False
    return True


@pytest.fixture
def aligned():
    with CoordinatorHarness(lambda context: AlignmentCoordinator(context, DRIFT, None)) as harness:
        yield harness


def test_a_source_that_is_ahead_waits_for_the_slowest(aligned):
    """A source that is ahead waits until the slowest source catches up, finishes, fails or becomes idle."""
    slow, quick = aligned.evaluation(0), aligned.evaluation(1)
    assert may_advance(slow, 0)
    assert may_advance(quick, 10)
    assert not may_advance(quick, 11)
    assert may_advance(slow, 1)
    assert is_released(quick)
    for release in (slow.finish, None):
        if release is None:
            slow = aligned.evaluation(0, attempt_number=1)
            assert may_advance(slow, 2)
        assert not may_advance(quick, 50)
        (release or slow.fail)()
        assert is_released(quick)
    third = aligned.evaluation(2)
    assert may_advance(third, 3)
    assert not may_advance(quick, 60)
    third.send(("idle", None))
    assert is_released(quick)
    assert may_advance(third, 4)
    assert not may_advance(quick, 70)
    third.send(("finish", None))
    assert is_released(quick)
    assert may_advance(third, 5)  # it has reported its end, so it holds back no other source
    assert may_advance(quick, 80)
    assert aligned.operators.progress()["operator/1"] == {"slowest": 80, "waiting": 0}


def test_a_waiting_source_is_not_idle():
    """A waiting source holds back the sources ahead of it, however long it has been waiting itself."""
    with CoordinatorHarness(lambda context: AlignmentCoordinator(context, DRIFT, IDLE)) as harness:
        harness.coordinator._group._clock = lambda: harness.now
        slow, middle, quick = (harness.evaluation(subtask) for subtask in range(3))
        assert may_advance(slow, 0)
        assert not may_advance(middle, 20)
        harness.advance(4)
        assert not may_advance(quick, 35)
        harness.advance(1.5)  # the slow source is idle now
        assert is_released(middle)
        assert not is_released(quick)
        harness.advance(IDLE + 1)  # now the released source is idle too
        assert is_released(quick)


@pytest.mark.parametrize("event", ["idle", "finish"])
def test_a_source_that_stops_waiting_holds_back_no_other(aligned, event):
    """A source whose `advance` timed out, and that then became idle or finished, never holds back another source."""
    slow, timed_out, quick = (aligned.evaluation(subtask) for subtask in range(3))
    assert may_advance(slow, 0)
    assert not may_advance(timed_out, 100)
    timed_out.send((event, None))
    slow.finish()
    assert may_advance(quick, 120)
    aligned.advance(10_000)
    assert may_advance(quick, 200)
    assert aligned.operators.progress()["operator/1"] == {"slowest": 200, "waiting": 0}
    if event == "idle":
        assert may_advance(timed_out, 195)  # it takes part again
        assert not may_advance(quick, 206)


def test_each_source_of_a_task_is_aligned_separately(aligned):
    """A task that reads two sources can be made to wait for the slower of its own two sources."""
    task = aligned.evaluation(0)
    assert may_advance(task, 0, "a")
    assert may_advance(task, 8, "b")
    assert not may_advance(task, 20, "b")
    assert may_advance(task, 10, "a")


def test_a_watermark_that_cannot_be_compared_fails_only_its_request(aligned):
    """A watermark that cannot be compared fails its request, but neither other tasks nor the coordinator."""
    good, bad = aligned.evaluation(0), aligned.evaluation(1)
    assert may_advance(good, 0)
    with pytest.raises(RequestFailed):
        bad.request((None, "now"))
    assert may_advance(good, 5)
    assert aligned.failure is None


# -- Splits in the order of event times


def test_splits_of_several_sources_come_in_event_time_order():
    """Splits come in the order of their event times.

    Event times that go backwards, an iterator that was already used, and sources without names raise errors that say
    so.
    """
    merged = EventTimeSplits({"a": [1, 5, 9], "b": [2, 3], "c": []}, lambda split: split, 3)
    assert list(merged.splits()) == [("a", 1), ("b", 2), ("b", 3), ("a", 5), ("a", 9)]
    with pytest.raises(OperatorFailed, match="source 'a' goes back in time: a split of 1 follows one of 5"):
        list(EventTimeSplits({"a": [5, 1]}, lambda split: split, 3).splits())
    once = EventTimeSplits({"a": iter([1])}, lambda split: split, 3)
    assert list(once.splits()) == [("a", 1)]
    with pytest.raises(OperatorFailed, match="source 'a' of EventTimeSplits came from an iterator"):
        list(once.splits())
    for wrong in ({}, [1]):
        with pytest.raises(OperatorMisused, match="merges named sources: pass a dict"):
            EventTimeSplits(wrong, lambda split: split, 3)


class Readers:
    """Three tasks that read splits in event-time order. Each method performs one step and checks its outcome."""

    def __init__(self, harness, unread):
        self.harness, self.unread = harness, unread
        self.logs = {subtask: [] for subtask in range(3)}
        self.tasks = {subtask: [harness.evaluation(subtask), 0] for subtask in range(3)}
        self.reading, self.waiting = {}, set()

    def receive_all(self):
        """Receives the splits that the coordinator has given to waiting tasks."""
        for subtask in sorted(self.waiting):
            try:
                self.received(subtask, self.tasks[subtask][0].reply())
            except CoordinationTimeout:
                continue

    def request_split(self, subtask):
        evaluation, index = self.tasks[subtask]
        self.reading.pop(subtask, None)  # the task has finished its previous split
        try:
            packed = evaluation.request((index, "h"))
        except CoordinationTimeout:
            self.waiting.add(subtask)
        else:
            self.received(subtask, packed)
        self.receive_all()

    def received(self, subtask, packed):
        assert packed != HELD
        self.waiting.discard(subtask)
        task, log = self.tasks[subtask], self.logs[subtask]
        if packed is None:
            task[0].finish()
            del self.tasks[subtask]
            return
        split = pickle.loads(packed)
        if task[1] == len(log):
            assert all(split[1][0] <= other + DRIFT for other in [*self.reading.values(), self.unread[0]])
            self.unread.remove(split[1][0])
            log.append(split)
        assert log[task[1]] == split  # a replayed split is the same
        task[1] += 1
        self.reading[subtask] = split[1][0]

    def fail(self, subtask):
        self.tasks[subtask][0].fail()
        self.reading.pop(subtask, None)
        self.waiting.discard(subtask)
        self.tasks[subtask] = [self.harness.evaluation(subtask), 0]
        self.receive_all()


@pytest.mark.slow
@settings(max_examples=60)
@given(st.data())
def test_no_split_is_given_earlier_than_the_drift_allows(data):
    """When a split is given to a task, it is ahead of every unfinished split by at most the drift. All splits are read.

    This holds for any schedule of tasks that read, end and fail, with and without locality preferences.
    """
    splits = {
        name: [
            (time, number) for number, time in enumerate(sorted(data.draw(st.lists(st.integers(0, 60), max_size=8))))
        ]
        for name in "abc"
    }
    merged = EventTimeSplits(splits, lambda split: split[0], DRIFT)
    if data.draw(st.booleans()):
        merged.locations = lambda named: ["h"] if named[1][1] % 2 else []
    unread = sorted(time for numbered in splits.values() for time, _ in numbered)
    with CoordinatorHarness(lambda context: SplitCoordinator(context, merged, 60.0)) as harness:
        readers = Readers(harness, unread)
        while readers.tasks:
            ready = sorted(readers.tasks.keys() - readers.waiting)
            assert ready, "all tasks are waiting for each other"
            subtask = data.draw(st.sampled_from(ready))
            if subtask in readers.reading and data.draw(st.integers(0, 9)) == 0:
                readers.fail(subtask)
            else:
                readers.request_split(subtask)
        assert harness.failure is None
        given = [split for log in readers.logs.values() for split in log]
        assert sorted(given) == sorted((name, split) for name in splits for split in splits[name])


def test_a_waiting_task_repeats_its_request():
    """The coordinator replies HELD to a waiting task long before its request times out, and the task asks again."""
    merged = EventTimeSplits({"a": [0, 100]}, lambda split: split, DRIFT)
    with CoordinatorHarness(lambda context: SplitCoordinator(context, merged, 60.0)) as harness:
        one, other = harness.evaluation(0), harness.evaluation(1)
        assert pickle.loads(one.request((0, "h"))) == ("a", 0)
        with pytest.raises(CoordinationTimeout):
            other.request((0, "h"))
        (held,) = harness.coordinator._held.values()
        held.until = 0
        harness.advance(1)
        assert other.reply() == HELD
        one.finish()
        assert pickle.loads(other.request((0, "h"))) == ("a", 100)


@pytest.mark.parametrize("idle_after", [None, IDLE])
def test_a_task_that_reads_one_split_for_a_long_time_becomes_idle(idle_after):
    """A task that reads a split for longer than `idle_after` holds back no other task until it requests its next split.

    Without `idle_after`, the task holds back others until it has finished its split.
    """
    merged = EventTimeSplits({"a": [0, 9, 100], "b": [200]}, lambda split: split, DRIFT, idle_after)
    with CoordinatorHarness(lambda context: SplitCoordinator(context, merged, 60.0)) as harness:
        harness.coordinator._watermarks._clock = lambda: harness.now
        slow, other, third = (harness.evaluation(subtask) for subtask in range(3))
        assert pickle.loads(slow.request((0, "h"))) == ("a", 0)
        assert pickle.loads(other.request((0, "h"))) == ("a", 9)
        with pytest.raises(CoordinationTimeout):
            other.request((1, "h"))  # waits for the slow task
        harness.advance(IDLE - 0.5)
        assert not is_released(other)
        harness.advance(1.0)
        assert is_released(other) == (idle_after is not None)
        if idle_after is None:
            harness.advance(1000)
            assert not is_released(other)
            slow.finish()
            assert is_released(other)
        assert pickle.loads(other.reply()) == ("a", 100)
        with pytest.raises(CoordinationTimeout):
            third.request((0, "h"))
        assert not is_released(third)  # a task that has just begun is not idle
        other.finish()
        assert pickle.loads(third.reply()) == ("b", 200)
        if idle_after is not None:
            assert slow.request((1, "h")) is None  # the slow task can continue: no split is left
        assert harness.failure is None


def test_a_failing_event_time_fails_only_the_request_that_waits_for_the_split():
    """If the event time of a split cannot be computed, the request that was held for the split fails, and no other."""
    is_broken = []

    def event_time(split):
        if is_broken:
            raise ValueError("no time in this split")
        return split

    merged = EventTimeSplits({"a": [0, 100]}, event_time, DRIFT)
    with CoordinatorHarness(lambda context: SplitCoordinator(context, merged, 60.0)) as harness:
        slow, held = harness.evaluation(0), harness.evaluation(1)
        slow.request((0, "h"))
        with pytest.raises(CoordinationTimeout):
            held.request((0, "h"))
        is_broken.append(True)
        slow.finish()
        with pytest.raises(RequestFailed, match="no time in this split"):
            held.reply()
        assert harness.failure is None
