"""The alignment's coordinator over any schedule: messages late, lost, doubled and out of order, tasks that fail, and resets."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stagecrew.operators.alignment import AlignmentCoordinator
from stagecrew.testing import CoordinatorHarness
from stagecrew.wire.serialization import pack

DRIFT, IDLE, LOOK, GOAL = 10, 1.0, 0.2, 60
#: How far each subtask reads at once when it may.
PACES = (1, 3, 4)
SOURCES = ("a", None)

subtasks, sources = st.integers(0, len(PACES) - 1), st.sampled_from(SOURCES)


class Reader:
    """A task with two sources. What it sends waits in `out` until the test lets it come; `heard` is what came of it."""

    def __init__(self, harness, subtask, begins):
        self.harness, self.subtask = harness, subtask
        self.evaluation = harness.evaluation(subtask, executor=str(subtask))
        self.at = {source: begins + 15 * number for number, source in enumerate(SOURCES)}
        self.sent, self.out, self.expected = 0, [], 1
        self.asked = {}  # source -> the number of the request that its thread waits for, and whether it reads on then
        self.waiting = {}  # source -> its request that the coordinator has, and from where
        self.heard, self.last, self.finished = {}, {}, set()
        self.is_over = False

    def says(self, what, source=None, back=0):
        self.sent += 1
        if what == "advance":
            self.asked[source] = (self.sent, not back)
        self.out.append((self, self.sent, what, source, self.at.get(source, 0) - back))

    def asks_all(self):
        """Each of its sources goes on, until it is at its end."""
        for source in SOURCES:
            if self.at[source] >= GOAL:
                if source not in self.finished:
                    self.says("finish", source)
            elif source not in self.asked or (source not in self.waiting and not self.out):  # lost: it asks again
                self.says("advance", source)

    def comes(self, frame):
        """A frame comes to the coordinator; behind one that is missing, it is the end of the evaluation."""
        _, number, what, source, at = frame
        if what == "advance":
            self.evaluation.say("REQUEST", sequence=number, payload=pack((source, at), 1 << 20))
        elif what == "end":
            self.evaluation.say("FINISH", sequence=number, outcome="finished", reason="")
        else:
            self.evaluation.say("EVENTS", first=number, payloads=[pack((what, source), 1 << 20)])
        if self.is_over or number < self.expected:
            return
        if number > self.expected or what == "end":
            assert (self.evaluation.poisoned is not None) == (number > self.expected)
            self.is_over = True
            return
        self.expected += 1
        now = self.harness.now
        if what == "advance":
            self.waiting[source] = (number, at)
            if source not in self.finished:
                self.heard[source], self.last[source] = max(at, self.heard.get(source, at)), now
            return
        if what == "finish":
            self.finished.add(source)
        self.heard.pop(source, None)
        self.waiting.pop(source, None)  # whose thread has given up

    def granted(self):
        """Which of its sources may read on: those do that still wait for this answer. Answers where they were."""
        found = []
        for source, (number, at) in list(self.waiting.items()):
            if number in self.evaluation._replies:
                assert self.evaluation._replies[number][0] == "ok"
                del self.waiting[source]
                self.last[source] = self.harness.now
                found.append(at)
                if self.asked[source] == (number, True):
                    self.at[source] += PACES[self.subtask]
                if self.asked[source][0] == number:
                    del self.asked[source]
        return found


class Schedules(RuleBasedStateMachine):
    """Three tasks with two sources each, and the coordinator as in a session; time goes on from look to look."""

    @initialize(idle_after=st.sampled_from([None, IDLE]), begins=st.tuples(*[st.integers(0, 40)] * len(PACES)))
    def begin(self, idle_after, begins):
        self.idle_after = idle_after
        self.harness = None
        self.harness = CoordinatorHarness(self.made)
        self.readers = {subtask: Reader(self.harness, subtask, at) for subtask, at in enumerate(begins)}
        self.came = []

    def made(self, context):
        coordinator = AlignmentCoordinator(context, DRIFT, self.idle_after)
        coordinator._group._clock = lambda: 0.0 if self.harness is None else self.harness.now
        return coordinator

    def state(self):
        """All that the coordinator knows."""
        made = self.harness.coordinator
        known = {name: (one.watermark, one.reported) for name, one in made._group._sources.items()}
        return (
            known,
            set(made._group._finished),
            {key: at for key, (at, _) in made._waiting.items()},
            dict(made._subtasks),
        )

    def live(self, margin):
        """Where those sources are that hold the others, if idleness begins so much later."""
        return [
            at
            for reader in self.readers.values()
            for source, at in reader.heard.items()
            if self.idle_after is None
            or source in reader.waiting
            or self.harness.now - reader.last[source] <= IDLE + margin
        ]

    def look(self):
        """Whoever may read on reads on: none was too far ahead of who holds the group."""
        for subtask, reader in list(self.readers.items()):
            if reader.is_over:
                del self.readers[subtask]
        least = min(self.live(-2 * LOOK), default=None)
        for reader in self.readers.values():
            for at in reader.granted():
                assert least is None or at <= least + DRIFT
                if least is not None:
                    assert at + PACES[reader.subtask] <= least + DRIFT + max(PACES)  # not by more than a batch

    def all_come(self):
        for reader in list(self.readers.values()):
            while reader.out:
                self.comes(reader)

    def comes(self, reader):
        frame = reader.out.pop(0)
        self.came = [*self.came, frame][-50:]
        reader.comes(frame)
        self.look()

    @rule(subtask=subtasks, begins=st.integers(0, 40))
    def begins(self, subtask, begins):
        """The next attempt at a subtask."""
        if subtask not in self.readers:
            self.readers[subtask] = Reader(self.harness, subtask, begins)

    @rule()
    def all_read_on(self):
        for reader in self.readers.values():
            reader.asks_all()
        self.all_come()

    @rule(subtask=subtasks, source=sources)
    def one_says_more(self, subtask, source):
        """Also while its thread waits, as after a request that timed out; it comes late."""
        if subtask in self.readers:
            self.readers[subtask].says("advance", source)

    @rule(subtask=subtasks)
    def one_comes(self, subtask):
        if subtask in self.readers and self.readers[subtask].out:
            self.comes(self.readers[subtask])

    @rule(subtask=subtasks, source=sources)
    def goes_back(self, subtask, source):
        """It says again where it was before."""
        if subtask in self.readers:
            self.readers[subtask].says("advance", source, back=7)
            self.all_come()

    @rule(subtask=subtasks, source=sources, twice=st.booleans())
    def idles(self, subtask, source, twice):
        if subtask in self.readers:
            for _ in range(1 + twice):
                self.readers[subtask].says("idle", source)
            self.all_come()

    @rule(subtask=subtasks, source=sources, twice=st.booleans())
    def finishes(self, subtask, source, twice):
        if subtask in self.readers:
            for _ in range(1 + twice):
                self.readers[subtask].says("finish", source)
            self.all_come()

    @rule(subtask=subtasks, how=st.sampled_from(["ends", "fails", "loses one", "loses order", "all reset"]))
    def goes_wrong(self, subtask, how):
        if how == "all reset":
            self.reset()
        elif (reader := self.readers.get(subtask)) is None:
            return
        elif how == "ends":
            reader.says("end")
            self.all_come()
        elif how == "fails":
            reader.evaluation.fail()
            reader.is_over = True
            self.look()
        elif how == "loses one":
            reader.out = reader.out[1:]
        else:
            reader.out.reverse()

    @precondition(lambda self: self.came)
    @rule(data=st.data())
    def one_comes_again(self, data):
        """Whether its task lives or is over: nothing changes."""
        reader, *rest = data.draw(st.sampled_from(self.came))
        before = self.state()
        reader.comes((reader, *rest))
        assert self.state() == before

    def reset(self):
        """Another coordinator begins; all tasks have to begin anew."""
        self.harness.reset()
        for reader in self.readers.values():
            assert reader.evaluation.poisoned is not None
            reader.is_over = True
        self.look()
        assert self.state() == ({}, set(), {}, {})

    @rule(looks=st.integers(1, 10))
    def time_goes_on(self, looks):
        for _ in range(looks):
            self.harness.advance(LOOK)
            self.look()

    @invariant()
    def nobody_waits_for_nothing(self):
        """Whoever waits is ahead of one that holds the group."""
        least = min(self.live(2 * LOOK), default=None) if getattr(self, "harness", None) else None
        for reader in getattr(self, "readers", {}).values():
            for _, at in reader.waiting.values():
                assert least is not None
                assert at > least + DRIFT
            assert self.harness.failure is None

    def teardown(self):
        """Nobody waits for ever: all that are left come to their end, and nothing is kept of them."""
        if getattr(self, "harness", None) is None:
            return
        for _ in range(2 * GOAL * len(PACES)):
            for reader in self.readers.values():
                reader.asks_all()
            self.all_come()
            if all(min(reader.at.values()) >= GOAL for reader in self.readers.values()):
                break
        else:
            raise AssertionError(f"they wait for ever: {[reader.at for reader in self.readers.values()]}")
        for reader in list(self.readers.values()):
            reader.says("end")
        self.all_come()
        assert self.readers == {}
        assert self.state() == ({}, set(), {}, {})
        assert self.harness.coordinator._sources == {}
        self.harness.close()


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True)


@pytest.mark.long
class TestSchedulesLong(Schedules.TestCase):
    """Many more."""

    settings = settings(max_examples=1000, stateful_step_count=80, deadline=None)
