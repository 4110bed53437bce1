"""Who a coordinator hears of, in which order, and what comes twice, late or never: without Spark, threads or a clock."""

from __future__ import annotations

import itertools
import types
from concurrent.futures import Future
from typing import Any

import pytest

from stagecrew.coordination.binding import Binding
from stagecrew.coordination.channel import _parts
from stagecrew.coordination.contract import Coordinator
from stagecrew.coordination.host import Host
from stagecrew.coordination.outbox import Outbox
from stagecrew.errors import ChannelClosed, EvaluationEnded, EventNotPicklable, EventTooLarge, OperatorMisused
from stagecrew.testing.inline import InlineLoop
from stagecrew.wire.frames import decode_all, encode
from stagecrew.wire.serialization import END, WINDOW, pack, raised, unpack

LIMIT = 1 << 20


class FakeWire:
    """Keeps what is sent to executors."""

    def __init__(self):
        self.sent: list[tuple[str, Any]] = []
        self.gateways = {}

    def send(self, executor, frame):
        self.gather()
        self.sent += [(executor, one) for one in decode_all(frame)]

    def dirty(self, gateway):
        self.gateways[gateway] = None

    def gather(self):
        for gateway in self.gateways:
            while (frame := gateway.take()) is not None:
                self.sent += [(gateway.evaluation.executor, one) for one in decode_all(frame)]
        self.gateways.clear()

    def flush(self):
        self.gather()

    def take(self, kind):
        """What of this kind was sent since it was last asked for."""
        self.gather()
        found = [frame for _, frame in self.sent if frame.kind == kind]
        self.sent = [(executor, frame) for executor, frame in self.sent if frame.kind != kind]
        return found


class Noting(Coordinator):
    """Notes its calls."""

    def __init__(self, context):
        super().__init__(context)
        self.calls: list[tuple[Any, ...]] = []
        self.gateways = {}

    def __getattribute__(self, name):
        if name in (
            "start",
            "failed",
            "finished",
            "abandoned",
            "subtask_reset",
            "close",
            "reset_to_checkpoint",
            "handle_event",
        ):
            return lambda *args: self.calls.append((name, *args))
        return super().__getattribute__(name)

    def ready(self, evaluation, gateway):
        self.calls.append(("ready", evaluation))
        self.gateways[evaluation.id] = gateway

    def handle_request(self, evaluation, request):
        self.calls.append(("handle_request", evaluation, request))
        if isinstance(request, Exception):
            raise request
        return request


class World:
    """A host with one binding, and executors made of frames."""

    def __init__(self):
        self.now = 100.0
        self.wire = FakeWire()
        self.host = Host(self.wire, LIMIT, 30.0, lambda: self.now)
        self.failures: list[BaseException] = []
        self.loops: list[InlineLoop] = []
        self.coordinators: list[Noting] = []

        def factory(context):
            self.coordinators.append(Noting(context))
            return self.coordinators[-1]

        def make_loop(_name, failed, _owner):
            self.loops.append(InlineLoop(failed))
            return self.loops[-1]

        owner = types.SimpleNamespace(
            name="t", id="t-1", store={}, changed={}, fail=self.failures.append, idle=self.wire.flush
        )
        threads = types.SimpleNamespace(loop=make_loop, async_calls=None)
        self.binding = Binding("b", "o/1", "o", factory, owner, threads)
        self.binding.begin()
        self.host.add(self.binding)

    def say(self, kind, executor="1", **fields):
        self.host.received(executor, encode(kind, **fields))

    def ready(self, evaluation, subtask=0, executor="1", attempt=None):
        self.say(
            "READY", executor, evaluation=evaluation, binding="b", subtask=subtask, attempt=attempt or evaluation, number=0,
            stage=1, partition=7, stage_attempt=0, partitions=8,
        )  # fmt: skip

    def events(self, evaluation, first, *events):
        self.say("EVENTS", evaluation=evaluation, first=first, payloads=[pack(event, LIMIT) for event in events])

    def finish(self, evaluation, sequence, outcome="finished"):
        self.say("FINISH", evaluation=evaluation, sequence=sequence, outcome=outcome, reason="r")

    def heard(self):
        """What the current coordinator was called with since it was last asked for; evaluations by their ids."""
        for loop in self.loops:
            loop.run()
        calls, self.coordinators[-1].calls[:] = list(self.coordinators[-1].calls), []
        return [tuple(getattr(part, "id", part) for part in call) for call in calls]


@pytest.fixture
def world() -> World:
    made = World()
    assert made.heard() == [("start",)]
    return made


def test_one_evaluation(world):
    """Ready, its events in order, finished; its end is answered when all that came before is enqueued."""
    world.ready(1)
    world.events(1, 1, "a", "b")
    world.finish(1, 3)
    assert world.heard() == [("ready", 1), ("handle_event", 1, "a"), ("handle_event", 1, "b"), ("finished", 1)]
    (reply,) = world.wire.take("REPLY")
    assert (reply["sequence"], reply["outcome"]) == (3, "ok")


def test_what_comes_twice_is_handled_once(world):
    """READY, events wholly or partly, a request and its end: each has its effect once, and a request its first answer."""
    for _ in range(2):
        world.ready(1)
    world.events(1, 1, "a", "b")
    world.events(1, 1, "a", "b")
    world.events(1, 2, "b", "c")
    for _ in range(2):
        world.say("REQUEST", evaluation=1, sequence=4, payload=pack("q", LIMIT))
    assert world.heard() == [
        ("ready", 1), ("handle_event", 1, "a"), ("handle_event", 1, "b"), ("handle_event", 1, "c"), ("handle_request", 1, "q"),
    ]  # fmt: skip
    world.say("REQUEST", evaluation=1, sequence=4, payload=pack("q", LIMIT))
    assert world.heard() == []
    replies = world.wire.take("REPLY")
    assert [unpack(reply["payload"]) for reply in replies] == ["q", "q"]
    world.finish(1, 5)
    world.finish(1, 5)
    assert world.heard() == [("finished", 1)]


def test_a_gap_fails_the_attempt(world):
    """Messages that were lost on their way fail that attempt, and nothing after them is handled."""
    world.ready(1)
    world.ready(2, subtask=1)
    world.events(1, 1, "a")
    world.events(1, 3, "c")
    world.events(1, 2, "b")
    world.events(2, 1, "other")
    heard = world.heard()
    assert heard[:3] == [("ready", 1), ("ready", 2), ("handle_event", 1, "a")]
    assert heard[3][:2] == ("failed", 1)
    assert "messages 2 to 2 were lost" in heard[3][2]
    assert heard[4:] == [("handle_event", 2, "other")]
    assert [frame["evaluation"] for frame in world.wire.take("ABORT")] == [1, 1]
    assert not world.failures


def test_an_end_that_came_before_what_was_sent(world):
    """An end behind a gap is no end: the attempt fails."""
    world.ready(1)
    world.finish(1, 3)
    assert [call[:2] for call in world.heard()] == [("ready", 1), ("failed", 1)]
    assert not world.wire.take("REPLY")


def test_a_later_attempt_of_a_subtask(world):
    """It begins behind the end of all before and a reset, whatever the end was; a live one beside it is no reset."""
    world.ready(1)
    world.say("ENDED", evaluation=1, outcome="failed", reason="its process is gone")
    world.ready(2)
    world.ready(3)  # speculation
    world.finish(3, 1)
    world.say("ENDED", evaluation=2, outcome="failed", reason="another attempt succeeded")
    world.ready(4)  # what had succeeded was lost
    world.say("ENDED", evaluation=4, outcome="abandoned", reason="")
    assert world.heard() == [
        ("ready", 1), ("failed", 1, "its process is gone"), ("subtask_reset", 0, -1), ("ready", 2), ("ready", 3), ("finished", 3),
        ("failed", 2, "another attempt succeeded"), ("subtask_reset", 0, -1), ("ready", 4), ("abandoned", 4),
    ]  # fmt: skip


def test_the_first_of_two_wins(world):
    """The other is heard to fail behind it; nothing is reset."""
    world.ready(1)
    world.ready(2)
    world.finish(1, 1)
    world.say("ENDED", evaluation=2, outcome="failed", reason="another attempt succeeded")
    assert [call[:2] for call in world.heard()] == [("ready", 1), ("ready", 2), ("finished", 1), ("failed", 2)]


def test_the_same_partition_twice_quickly(world):
    """Where the second is there before the first is known to be gone both are live: as in speculation nothing is reset."""
    world.ready(1)
    world.ready(2, executor="2")
    world.host.lost("1", "executor 1 is lost")
    assert [call[:2] for call in world.heard()] == [("ready", 1), ("ready", 2), ("failed", 1)]


def test_an_end_before_the_begin(world):
    """Nobody hears of one that failed before it was ready; its late hello is none, and the next begins without a reset."""
    world.say("ENDED", evaluation=1, outcome="failed", reason="its process is gone")
    world.ready(1)
    world.events(1, 1, "late")
    world.ready(2)
    assert world.heard() == [("ready", 2)]
    assert [frame["evaluation"] for frame in world.wire.take("ABORT")] == [1]


def test_a_late_hello(world):
    """READY that comes again behind the end begins nothing."""
    world.ready(1)
    world.finish(1, 1)
    world.ready(1)
    assert world.heard() == [("ready", 1), ("finished", 1)]


def test_no_identity_no_reset(world):
    """Evaluations of a binding without subtasks are never reset."""
    for id_ in (1, 2):
        world.ready(id_, subtask=-1)
        world.finish(id_, 1)
    assert [call[0] for call in world.heard()] == ["ready", "finished"] * 2


def test_messages_of_who_is_over(world):
    """They never reach the coordinator, and their sender is told that it is over."""
    world.ready(1)
    world.say("ENDED", evaluation=1, outcome="failed", reason="gone")
    world.heard()
    world.events(1, 1, "late")
    world.say("REQUEST", evaluation=1, sequence=2, payload=pack("late", LIMIT))
    world.finish(1, 3)
    world.say("ENDED", evaluation=1, outcome="failed", reason="again")
    world.say("ACCEPTED", evaluation=1, sequence=1)
    assert world.heard() == []
    assert len(world.wire.take("ABORT")) == 3
    assert not world.wire.take("REPLY")


def test_a_lost_executor(world):
    """All that lived there failed, and nothing else."""
    world.ready(1)
    world.ready(2, subtask=1, executor="2")
    world.host.lost("1", "executor 1 is lost")
    assert world.heard() == [("ready", 1), ("ready", 2), ("failed", 1, "executor 1 is lost")]


def test_what_a_coordinator_sends(world):
    """Events to an evaluation are numbered, and a future is done when all up to it are in the mailbox."""
    world.ready(1)
    world.heard()
    gateway = world.coordinators[0].gateways[1]
    first, second, end = gateway.send_acknowledged("a"), gateway.send_acknowledged(b"b"), gateway.close()
    (frame,) = world.wire.take("EVENTS")
    assert (frame["first"], frame["payloads"]) == (1, [pack("a", LIMIT), b"\0b", END])
    world.say("ACCEPTED", evaluation=1, sequence=2)
    world.say("ACCEPTED", evaluation=1, sequence=1)  # late
    assert first.done()
    assert second.done()
    assert not end.done()
    world.finish(1, 1)
    with pytest.raises(EvaluationEnded):
        end.result(0)
    with pytest.raises(EvaluationEnded, match="has ended"):
        gateway.send_acknowledged("late").result(0)
    assert gateway.close().done()
    assert not world.wire.take("EVENTS")


def test_an_acknowledgement_that_is_late(world):
    """It fails that attempt and nothing else, and only when nothing more has come."""
    world.ready(1)
    world.ready(2, subtask=1)
    world.heard()
    gateways = world.coordinators[0].gateways
    late, other = gateways[1].send_acknowledged("a"), gateways[2].send_acknowledged("b")
    assert len(world.wire.take("EVENTS")) == 2
    world.say("ACCEPTED", evaluation=2, sequence=1)
    assert world.host.due() == 130.0
    world.now = 129.9
    world.host.expire()
    assert world.heard() == []
    world.now = 130.0
    world.host.expire()
    (failed,) = world.heard()
    assert failed[:2] == ("failed", 1)
    assert "within 30.0 s" in failed[2]
    assert world.host.due() is None
    assert other.result(0) is None
    with pytest.raises(EvaluationEnded):
        late.result(0)
    assert [frame["evaluation"] for frame in world.wire.take("ABORT")] == [1]


@pytest.mark.parametrize("method", ["send", "send_acknowledged", "close"])
@pytest.mark.parametrize("failure", ["late", "overflow"])
def test_an_event_that_is_not_acknowledged_fails_the_attempt(world, method, failure):
    """Whichever method sent it, and whether or not the sender keeps a future."""
    world.ready(1)
    world.heard()
    gateway = world.coordinators[0].gateways[1]
    getattr(gateway, method)(*([] if method == "close" else ["x"]))
    world.wire.take("EVENTS")
    if failure == "late":
        world.now += 30.0
        world.host.expire()
        reason = "within 30.0 s"
    else:
        world.say("OVERFLOWED", evaluation=1, reason="its mailbox is full")
        reason = "its mailbox is full"
    ((name, evaluation, why),) = world.heard()
    assert (name, evaluation) == ("failed", 1)
    assert reason in why
    assert [frame["evaluation"] for frame in world.wire.take("ABORT")] == [1]


def test_a_full_mailbox(world):
    """It fails that attempt with the reason."""
    world.ready(1)
    world.say("OVERFLOWED", evaluation=1, reason="its mailbox is full")
    assert world.heard()[1:] == [("failed", 1, "its mailbox is full")]
    assert [frame["reason"] for frame in world.wire.take("ABORT")] == ["its mailbox is full"]


def test_how_much_was_handled_is_told(world):
    """Often enough that a task which waits for room goes on, and not for each message."""
    world.ready(1)
    for first in range(1, WINDOW + 1, 64):
        world.events(1, first, *range(64))
    world.heard()
    told = [frame["sequence"] for frame in world.wire.take("HANDLED")]
    assert told == list(range(WINDOW // 4, WINDOW + 1, WINDOW // 4))


def test_a_task_that_waits_for_room(world):
    """It is told what is handled, as soon as all that it sent before is."""
    world.ready(1)
    world.events(1, 1, "a", "b")
    world.say("CREDIT", evaluation=1)
    assert not world.wire.take("HANDLED")
    world.heard()
    assert [frame["sequence"] for frame in world.wire.take("HANDLED")] == [2]


def test_a_slow_coordinator_is_heard_of(world):
    """Where messages take long its task is told about every second that something was handled: it waits on, and does not give up."""
    world.ready(1)
    told = []
    for first in range(1, 6):
        world.now += 0.6
        world.events(1, first, "slow")
        world.heard()
        told += [frame["sequence"] for frame in world.wire.take("HANDLED")]
    assert told == [2, 4]


def test_replies(world):
    """A request that raises is answered with the exception, a future with its result when there is one."""
    world.ready(1)
    world.heard()
    later: Future[str] = Future()
    answers = iter([lambda: 1 / 0, lambda: later, lambda: (n for n in ()), lambda: "now"])
    world.coordinators[0].handle_request = lambda *_: next(answers)()
    for sequence in range(1, 5):
        world.say("REQUEST", evaluation=1, sequence=sequence, payload=pack("x", LIMIT))
    world.heard()
    later.set_result("later")
    replies = {frame["sequence"]: frame for frame in world.wire.take("REPLY")}
    outcomes = {sequence: frame["outcome"] for sequence, frame in replies.items()}
    assert outcomes == {1: "failed", 2: "ok", 3: "failed", 4: "ok"}
    assert isinstance(raised(replies[1]["payload"])[0], ZeroDivisionError)
    assert "cannot pickle a generator" in raised(replies[3]["payload"])[1]
    assert [unpack(replies[sequence]["payload"]) for sequence in (2, 4)] == ["later", "now"]
    assert not world.failures


def test_replies_that_are_remembered(world):
    """A request that comes twice gets its first answer again; of large answers only the last is kept, of small ones the last 64."""
    world.ready(1)
    world.heard()
    world.coordinators[0].handle_request = lambda _evaluation, size: bytes(size)
    for sequence in range(1, 200):
        world.say("REQUEST", evaluation=1, sequence=sequence, payload=pack(100_000 if sequence % 2 else 10, LIMIT))
        world.heard()
    world.wire.take("REPLY")
    for sequence in range(1, 200):
        world.say("REQUEST", evaluation=1, sequence=sequence, payload=pack(0, LIMIT))
    assert world.heard() == []  # none is asked again
    again = {reply["sequence"]: len(reply["payload"]) for reply in world.wire.take("REPLY")}
    assert {sequence: size for sequence, size in again.items() if size > 11} == {199: 100_001}
    assert {*range(136, 200, 2)} <= again.keys()
    assert len(again) <= 64


def test_a_reset(world):
    """The old coordinator closes and hears nothing more; no evaluation of before gets an answer; a new one begins."""
    world.ready(1)
    world.heard()
    gateway = world.coordinators[0].gateways[1]
    sent = gateway.send_acknowledged("old")
    world.events(1, 1, "dropped")
    world.host.reset(world.binding, 7, b"state", 1.0)
    world.events(1, 2, "late")
    world.ready(2)
    assert world.heard() == [("reset_to_checkpoint", 7, b"state"), ("start",), ("ready", 2)]
    assert [call[0] for call in world.coordinators[0].calls] == ["close"]
    with pytest.raises(EvaluationEnded, match="reset"):
        sent.result(0)
    assert {frame["reason"] for frame in world.wire.take("ABORT")} == {
        "its coordinator was reset", "its topology has ended, or its coordinator was reset",
    }  # fmt: skip
    world.coordinators[0].context.fail(ValueError("too late"))
    assert not world.failures


def test_reset_to_nothing_twice_and_before_its_start(world):
    """Each reset makes an instance, which starts once; those in between close."""
    world.host.reset(world.binding, -1, None, 1.0)
    world.host.reset(world.binding, 3, None, 1.0)
    assert world.heard() == [("reset_to_checkpoint", 3, None), ("start",)]
    assert all(("start",) not in one.calls for one in world.coordinators[:-1])


def test_a_way_that_breaks(world):
    """When nothing reaches executors any more the topology fails, and says why."""
    world.ready(1)
    world.host.broken("the way from coordinators to executors broke: reset by peer")
    (failure,) = world.failures
    assert isinstance(failure, ChannelClosed)
    assert "reset by peer" in str(failure)


def test_a_binding_on_a_way_that_has_broken(world):
    """One that comes behind the break fails as those before it did."""
    world.host.broken("reset by peer")
    world.failures.clear()
    world.host.add(world.binding)
    assert [str(failure) for failure in world.failures] == ["reset by peer"]


@pytest.mark.parametrize("made", [None, 7, Coordinator], ids=["nothing", "something else", "the class"])
def test_a_factory_that_makes_no_coordinator(world, made):
    """It is named where the function is bound, not by requests that time out."""
    binding = world.binding
    with pytest.raises(OperatorMisused, match="the factory of operator 'o' returned a .*, not a stagecrew.Coordinator"):
        Binding("c", "o/2", "o", lambda _: made, binding.owner, binding.threads)


def test_what_raises_fails_the_topology(world):
    """An exception of a callback goes to the topology."""
    world.coordinators[0].ready = lambda *_: 1 / 0
    world.ready(1)
    world.heard()
    assert [type(error) for error in world.failures] == [ZeroDivisionError]


def test_the_end_of_a_topology(world):
    """What came is handled, then the coordinator closes; who lives is told."""
    world.ready(1)
    world.events(1, 1, "a")
    world.binding.finish()
    assert world.binding.await_closed(1.0)
    world.host.remove(world.binding, "topology 't' has ended")
    assert world.heard() == [("ready", 1), ("handle_event", 1, "a"), ("close",)]
    world.ready(2)
    assert world.heard() == []
    assert [frame["evaluation"] for frame in world.wire.take("ABORT")] == [1, 2]


def test_payloads():
    """Bytes are untouched, functions of anywhere travel, and what cannot is named."""
    for event in (b"\0\1", 3, "x", None, True, {"a": [1.5]}, (1, b"2")):
        assert unpack(pack(event, LIMIT)) == event
    assert unpack(pack(lambda: 3, LIMIT))() == 3
    with pytest.raises(EventNotPicklable, match="cannot pickle a generator"):
        pack((n for n in ()), LIMIT)
    with pytest.raises(
        EventTooLarge, match=r"takes 12 bytes when serialized, more than the 10 bytes of spark.stagecrew.event.maxSize"
    ):
        pack(b"12345678901", 10)


def test_failures_travel():
    """An exception travels with its traceback as text; one that cannot be pickled as that alone."""
    from stagecrew.wire.serialization import failure

    class LocalError(Exception):
        def __init__(self, one, two):
            super().__init__(one)

    def of(error):
        try:
            raise error
        except Exception as caught:
            return raised(failure(caught, LIMIT))

    error, text = of(KeyError("k"))
    assert isinstance(error, KeyError)
    assert "raise error" in text
    error, text = of(ValueError(b"x" * LIMIT))  # larger than a reply may be
    assert error is None
    assert "ValueError" in text
    assert len(text) < 30_000
    error, text = of(LocalError(1, 2))
    assert error is None
    assert "LocalError" in text


def test_much_travels_in_pieces():
    """What is sent to one evaluation at once is cut into frames of about a megabyte, in order."""
    outbox = Outbox()
    for size in (600_000, 600_000, 10, 2_000_000, 5):
        outbox.add(bytes(size), 1.0)
    found = []
    while (taken := outbox.take()) is not None:
        found.append((taken[0], [len(event) for event in taken[1]]))
    assert found == [(1, [600_000, 600_000]), (3, [10, 2_000_000]), (5, [5])]
    assert [sum(map(len, part)) for part in ([piece] for piece in _parts([b"x" * 700_000] * 3 + [b"y"]))] == [
        1_400_000,
        700_001,
    ]


@pytest.mark.parametrize("order", list(itertools.permutations([1, 3, 2, 3])))
def test_acknowledgements_in_any_order(order):
    """Each future is done once, as soon as one acknowledges it, whatever comes late or twice."""
    outbox = Outbox()
    futures: list[Future[None]] = [Future() for _ in range(3)]
    for future in futures:
        outbox.add(b"", 1.0, future)
    outbox.take()
    most = 0
    for sequence in order:
        done = outbox.acknowledge(sequence)
        assert done == futures[most : max(most, sequence)]
        most = max(most, sequence)
    assert outbox.deadline is None
