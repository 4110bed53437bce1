"""The alignment coordinator under random schedules: late, lost, repeated and reordered messages, failures, resets."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stagecrew.operators.alignment import AlignmentCoordinator
from stagecrew.testing import CoordinatorHarness
from stagecrew.wire.serialization import pack

pytestmark = pytest.mark.slow

DRIFT, IDLE, TICK, GOAL = 10, 1.0, 0.2, 60
#: How many event times each subtask reads in one batch.
PACES = (1, 3, 4)
SOURCES = ("a", None)

subtasks, sources = st.integers(0, len(PACES) - 1), st.sampled_from(SOURCES)


class Reader:
    """A task with two sources. Its messages wait in `outbox` until the test delivers them."""

    def __init__(self, harness, subtask, start):
        self.harness, self.subtask = harness, subtask
        self.evaluation = harness.evaluation(subtask, executor=str(subtask))
        self.positions = {source: start + 15 * number for number, source in enumerate(SOURCES)}
        self.sent, self.outbox, self.expected = 0, [], 1
        self.pending = {}  # source -> (number of its latest request, whether the source reads on when it is granted)
        self.waiting = {}  # source -> (number, position) of the request that the coordinator has received
        self.watermarks, self.reported_at, self.finished = {}, {}, set()
        self.ended = False

    def send(self, kind, source=None, back=0):
        self.sent += 1
        if kind == "advance":
            self.pending[source] = (self.sent, not back)
        self.outbox.append((self, self.sent, kind, source, self.positions.get(source, 0) - back))

    def advance_all(self):
        """Each source asks to read on, or finishes if it has reached the goal."""
        for source in SOURCES:
            if self.positions[source] >= GOAL:
                if source not in self.finished:
                    self.send("finish", source)
            elif source not in self.pending or (source not in self.waiting and not self.outbox):  # its request was lost
                self.send("advance", source)

    def deliver(self, frame):
        """Delivers a frame to the coordinator. If an earlier frame is missing, the evaluation must be aborted."""
        _, number, kind, source, position = frame
        if kind == "advance":
            self.evaluation.send_frame("REQUEST", sequence=number, payload=pack((source, position), 1 << 20))
        elif kind == "end":
            self.evaluation.send_frame("FINISH", sequence=number, outcome="finished", reason="")
        else:
            self.evaluation.send_frame("EVENTS", first=number, payloads=[pack((kind, source), 1 << 20)])
        if self.ended or number < self.expected:
            return
        if number > self.expected or kind == "end":
            assert (self.evaluation.abort_reason is not None) == (number > self.expected)
            self.ended = True
            return
        self.expected += 1
        now = self.harness.now
        if kind == "advance":
            self.waiting[source] = (number, position)
            if source not in self.finished:
                self.watermarks[source] = max(position, self.watermarks.get(source, position))
                self.reported_at[source] = now
            return
        if kind == "finish":
            self.finished.add(source)
        self.watermarks.pop(source, None)
        self.waiting.pop(source, None)  # the source's thread is no longer waiting

    def take_grants(self):
        """Takes the coordinator's grants, lets sources whose last request is granted read on, and returns positions."""
        granted = []
        for source, (number, position) in list(self.waiting.items()):
            if number in self.evaluation._replies:
                assert self.evaluation._replies[number][0] == "ok"
                del self.waiting[source]
                self.reported_at[source] = self.harness.now
                granted.append(position)
                if self.pending[source] == (number, True):
                    self.positions[source] += PACES[self.subtask]
                if self.pending[source][0] == number:
                    del self.pending[source]
        return granted


class Schedules(RuleBasedStateMachine):
    """Three tasks with two sources each, and their coordinator. Time advances in ticks."""

    @initialize(idle_after=st.sampled_from([None, IDLE]), starts=st.tuples(*[st.integers(0, 40)] * len(PACES)))
    def begin(self, idle_after, starts):
        self.idle_after = idle_after
        self.harness = None
        self.harness = CoordinatorHarness(self.create_coordinator)
        self.readers = {subtask: Reader(self.harness, subtask, start) for subtask, start in enumerate(starts)}
        self.delivered = []

    def create_coordinator(self, context):
        coordinator = AlignmentCoordinator(context, DRIFT, self.idle_after)
        coordinator._group._clock = lambda: 0.0 if self.harness is None else self.harness.now
        return coordinator

    def state(self):
        """Returns the coordinator's whole state."""
        coordinator = self.harness.coordinator
        known = {name: (source.watermark, source.reported_at) for name, source in coordinator._group._sources.items()}
        return (
            known,
            set(coordinator._group._finished),
            {key: position for key, (position, _) in coordinator._waiting.items()},
            dict(coordinator._subtasks),
        )

    def holding_positions(self, margin):
        """Returns the positions of the sources that hold back others, if sources became idle `margin` seconds later."""
        return [
            position
            for reader in self.readers.values()
            for source, position in reader.watermarks.items()
            if self.idle_after is None
            or source in reader.waiting
            or self.harness.now - reader.reported_at[source] <= IDLE + margin
        ]

    def process_grants(self):
        """Lets sources with a grant read on. No grant is too far ahead of the sources that hold back others."""
        for subtask, reader in list(self.readers.items()):
            if reader.ended:
                del self.readers[subtask]
        least = min(self.holding_positions(-2 * TICK), default=None)
        for reader in self.readers.values():
            for position in reader.take_grants():
                assert least is None or position <= least + DRIFT
                if least is not None:
                    assert position + PACES[reader.subtask] <= least + DRIFT + max(PACES)  # ahead by at most one batch

    def deliver_all(self):
        for reader in list(self.readers.values()):
            while reader.outbox:
                self.deliver(reader)

    def deliver(self, reader):
        frame = reader.outbox.pop(0)
        self.delivered = [*self.delivered, frame][-50:]
        reader.deliver(frame)
        self.process_grants()

    @rule(subtask=subtasks, start=st.integers(0, 40))
    def start_attempt(self, subtask, start):
        """Starts the next attempt at a subtask."""
        if subtask not in self.readers:
            self.readers[subtask] = Reader(self.harness, subtask, start)

    @rule()
    def advance_all(self):
        for reader in self.readers.values():
            reader.advance_all()
        self.deliver_all()

    @rule(subtask=subtasks, source=sources)
    def send_another_advance(self, subtask, source):
        """Sends an `advance` that is delivered later, even if an earlier one is pending, as after a timeout."""
        if subtask in self.readers:
            self.readers[subtask].send("advance", source)

    @rule(subtask=subtasks)
    def deliver_one(self, subtask):
        if subtask in self.readers and self.readers[subtask].outbox:
            self.deliver(self.readers[subtask])

    @rule(subtask=subtasks, source=sources)
    def report_an_earlier_position(self, subtask, source):
        if subtask in self.readers:
            self.readers[subtask].send("advance", source, back=7)
            self.deliver_all()

    @rule(subtask=subtasks, source=sources, twice=st.booleans())
    def become_idle(self, subtask, source, twice):
        if subtask in self.readers:
            for _ in range(1 + twice):
                self.readers[subtask].send("idle", source)
            self.deliver_all()

    @rule(subtask=subtasks, source=sources, twice=st.booleans())
    def finish(self, subtask, source, twice):
        if subtask in self.readers:
            for _ in range(1 + twice):
                self.readers[subtask].send("finish", source)
            self.deliver_all()

    @rule(subtask=subtasks, fault=st.sampled_from(["end", "fail", "lose a message", "reorder messages", "reset"]))
    def disrupt(self, subtask, fault):
        if fault == "reset":
            self.reset()
        elif (reader := self.readers.get(subtask)) is None:
            return
        elif fault == "end":
            reader.send("end")
            self.deliver_all()
        elif fault == "fail":
            reader.evaluation.fail()
            reader.ended = True
            self.process_grants()
        elif fault == "lose a message":
            reader.outbox = reader.outbox[1:]
        else:
            reader.outbox.reverse()

    @precondition(lambda self: self.delivered)
    @rule(data=st.data())
    def deliver_again(self, data):
        """A frame that is delivered again changes nothing, whether its task is alive or has ended."""
        reader, *rest = data.draw(st.sampled_from(self.delivered))
        before = self.state()
        reader.deliver((reader, *rest))
        assert self.state() == before

    def reset(self):
        """Resets the coordinator: a new one starts without state, and every running evaluation is aborted."""
        self.harness.reset()
        for reader in self.readers.values():
            assert reader.evaluation.abort_reason is not None
            reader.ended = True
        self.process_grants()
        assert self.state() == ({}, set(), {}, {})

    @rule(ticks=st.integers(1, 10))
    def advance_time(self, ticks):
        for _ in range(ticks):
            self.harness.advance(TICK)
            self.process_grants()

    @invariant()
    def no_source_waits_without_reason(self):
        """Each waiting source is too far ahead of a source that holds it back."""
        least = min(self.holding_positions(2 * TICK), default=None) if getattr(self, "harness", None) else None
        for reader in getattr(self, "readers", {}).values():
            for _, position in reader.waiting.values():
                assert least is not None
                assert position > least + DRIFT
            assert self.harness.failure is None

    def teardown(self):
        """All remaining sources can finish, so none waits forever. Afterwards the coordinator has no state."""
        if getattr(self, "harness", None) is None:
            return
        for _ in range(2 * GOAL * len(PACES)):
            for reader in self.readers.values():
                reader.advance_all()
            self.deliver_all()
            if all(min(reader.positions.values()) >= GOAL for reader in self.readers.values()):
                break
        else:
            raise AssertionError(f"sources never finish: {[reader.positions for reader in self.readers.values()]}")
        for reader in list(self.readers.values()):
            reader.send("end")
        self.deliver_all()
        assert self.readers == {}
        assert self.state() == ({}, set(), {}, {})
        assert self.harness.coordinator._sources == {}
        self.harness.close()


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(max_examples=150, stateful_step_count=40, derandomize=True)


@pytest.mark.long
class TestSchedulesLong(Schedules.TestCase):
    """More and longer schedules."""

    settings = settings(max_examples=1000, stateful_step_count=80)
