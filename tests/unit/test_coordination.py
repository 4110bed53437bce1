"""The order of a coordinator's calls, and repeated, late and lost messages, without Spark, threads or a real clock."""

from __future__ import annotations

import itertools
import sys
import threading
import time
import types
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from stagecrew.bounded import Bounded
from stagecrew.coordination.binding import Binding
from stagecrew.coordination.channel import _parts
from stagecrew.coordination.contract import Coordinator
from stagecrew.coordination.delivery import Delivery
from stagecrew.coordination.host import Host
from stagecrew.coordination.live import LiveEvaluation
from stagecrew.coordination.outbox import Outbox
from stagecrew.coordination.statistics import Statistics
from stagecrew.errors import ChannelClosed, EvaluationEnded, EventRejected, OperatorMisused
from stagecrew.testing.inline import InlineLoop
from stagecrew.wire.frames import decode_all, encode
from stagecrew.wire.serialization import END, WINDOW, pack, raised, unpack

LIMIT = 1 << 20


class FakeWire:
    """Records the frames that are sent to executors."""

    def __init__(self):
        self.sent: list[tuple[str, Any]] = []
        self.gateways = {}

    def send(self, executor, frame):
        self.take_from_gateways()
        self.sent += [(executor, decoded) for decoded in decode_all(frame)]

    def dirty(self, gateway):
        self.gateways[gateway] = None

    def take_from_gateways(self):
        for gateway in self.gateways:
            while (frame := gateway.take()) is not None:
                self.sent += [(gateway.evaluation.executor, decoded) for decoded in decode_all(frame)]
        self.gateways.clear()

    def flush(self):
        self.take_from_gateways()

    def take(self, kind):
        """Removes and returns the recorded frames of this kind."""
        self.take_from_gateways()
        taken = [frame for _, frame in self.sent if frame.kind == kind]
        self.sent = [(executor, frame) for executor, frame in self.sent if frame.kind != kind]
        return taken


class Recording(Coordinator):
    """A coordinator that records its calls. It replies with the request itself, or raises it if it is an exception."""

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
    """A host with one binding. Tests send it frames as executors would."""

    def __init__(self):
        self.now = 100.0
        self.wire = FakeWire()
        self.host = Host(self.wire, LIMIT, 30.0, lambda: self.now)
        self.failures: list[BaseException] = []
        self.loops: list[InlineLoop] = []
        self.coordinators: list[Recording] = []

        def factory(context):
            self.coordinators.append(Recording(context))
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

    def receive(self, kind, executor="1", route=None, **fields):
        """Makes the host receive a frame from an executor."""
        self.host.received(executor, encode(kind, **fields), route)

    def ready(self, evaluation, subtask=0, executor="1", attempt=None, route=None):
        self.receive(
            "READY", executor, route, evaluation=evaluation, binding="b", subtask=subtask,
            attempt=attempt or evaluation, number=0, stage=1, partition=7, stage_attempt=0, partitions=8,
        )  # fmt: skip

    def events(self, evaluation, first, *events, executor="1"):
        payloads = [pack(event, LIMIT) for event in events]
        self.receive("EVENTS", executor, evaluation=evaluation, first=first, payloads=payloads)

    def finish(self, evaluation, sequence, outcome="finished"):
        self.receive("FINISH", evaluation=evaluation, sequence=sequence, outcome=outcome, reason="r")

    def take_calls(self):
        """Removes and returns the recorded calls of the current coordinator, with evaluations replaced by their ids."""
        for loop in self.loops:
            loop.run()
        calls, self.coordinators[-1].calls[:] = list(self.coordinators[-1].calls), []
        return [tuple(getattr(part, "id", part) for part in call) for call in calls]


@pytest.fixture
def world() -> World:
    world = World()
    assert world.take_calls() == [("start",)]
    return world


def test_an_evaluation_is_ready_then_sends_events_then_finishes(world):
    """An evaluation's calls are made in order, and the reply to FINISH is sent after all of its events are enqueued."""
    world.ready(1)
    world.events(1, 1, "a", "b")
    world.finish(1, 3)
    assert world.take_calls() == [("ready", 1), ("handle_event", 1, "a"), ("handle_event", 1, "b"), ("finished", 1)]
    (reply,) = world.wire.take("REPLY")
    assert (reply["sequence"], reply["outcome"]) == (3, "ok")


def test_repeated_messages_are_handled_once(world):
    """A READY, a batch of events or a part of it, a request or a FINISH that arrives again is not handled again.

    A repeated request gets the first reply.
    """
    for _ in range(2):
        world.ready(1)
    world.events(1, 1, "a", "b")
    world.events(1, 1, "a", "b")
    world.events(1, 2, "b", "c")
    for _ in range(2):
        world.receive("REQUEST", evaluation=1, sequence=4, payload=pack("q", LIMIT))
    assert world.take_calls() == [
        ("ready", 1), ("handle_event", 1, "a"), ("handle_event", 1, "b"), ("handle_event", 1, "c"),
        ("handle_request", 1, "q"),
    ]  # fmt: skip
    world.receive("REQUEST", evaluation=1, sequence=4, payload=pack("q", LIMIT))
    assert world.take_calls() == []
    replies = world.wire.take("REPLY")
    assert [unpack(reply["payload"]) for reply in replies] == ["q", "q"]
    world.finish(1, 5)
    world.finish(1, 5)
    assert world.take_calls() == [("finished", 1)]


def test_a_gap_fails_the_attempt(world):
    """If messages of an attempt are lost, the attempt fails, and none of its later messages is handled."""
    world.ready(1)
    world.ready(2, subtask=1)
    world.events(1, 1, "a")
    world.events(1, 3, "c")
    world.events(1, 2, "b")
    world.events(2, 1, "other")
    calls = world.take_calls()
    assert calls[:3] == [("ready", 1), ("ready", 2), ("handle_event", 1, "a")]
    assert calls[3][:2] == ("failed", 1)
    assert "messages 2 to 2 were lost" in calls[3][2]
    assert calls[4:] == [("handle_event", 2, "other")]
    assert [frame["evaluation"] for frame in world.wire.take("ABORT")] == [1, 1]
    assert not world.failures


def test_a_finish_after_a_gap_fails_the_attempt(world):
    """A FINISH after lost messages fails the attempt, and the evaluation does not count as finished."""
    world.ready(1)
    world.finish(1, 3)
    assert [call[:2] for call in world.take_calls()] == [("ready", 1), ("failed", 1)]
    assert not world.wire.take("REPLY")


def test_a_later_attempt_of_a_subtask_begins_with_a_reset(world):
    """An attempt that begins after all earlier attempts of its subtask have ended causes a reset, however they ended.

    A speculative attempt causes no reset.
    """
    world.ready(1)
    world.receive("ENDED", evaluation=1, outcome="failed", reason="its process is gone")
    world.ready(2)
    world.ready(3)  # speculation
    world.finish(3, 1)
    world.receive("ENDED", evaluation=2, outcome="failed", reason="another attempt succeeded")
    world.ready(4)  # the output of the successful attempt was lost
    world.receive("ENDED", evaluation=4, outcome="abandoned", reason="")
    assert world.take_calls() == [
        ("ready", 1), ("failed", 1, "its process is gone"), ("subtask_reset", 0, -1), ("ready", 2), ("ready", 3),
        ("finished", 3), ("failed", 2, "another attempt succeeded"), ("subtask_reset", 0, -1), ("ready", 4),
        ("abandoned", 4),
    ]  # fmt: skip


def test_the_slower_of_two_attempts_fails_without_a_reset(world):
    """Of two concurrent attempts, the faster one finishes, and `failed` is then called for the slower one."""
    world.ready(1)
    world.ready(2)
    world.finish(1, 1)
    world.receive("ENDED", evaluation=2, outcome="failed", reason="another attempt succeeded")
    assert [call[:2] for call in world.take_calls()] == [("ready", 1), ("ready", 2), ("finished", 1), ("failed", 2)]


@pytest.mark.parametrize("end", ["ended", "executor lost", "connection lost", "finished"])
def test_a_retry_on_another_executor_that_overtakes_the_end_of_the_first_attempt(world, end):
    """The frames of two executors may arrive in any order. The new attempt begins after the end of the first one."""
    route = "1" if end != "connection lost" else types.SimpleNamespace(executor="1")
    world.ready(1, route=route)
    world.ready(2, executor="2")
    world.events(2, 1, "a", executor="2")
    assert world.take_calls() == [("ready", 1)]
    ((asked, frame),) = world.wire.sent
    assert (asked, frame.kind, frame["evaluation"]) == (route, "ASK_LIVE", 1)
    if end == "ended":
        world.receive("ENDED", evaluation=1, outcome="failed", reason="killed")
    elif end == "finished":
        world.finish(1, 1)
    elif end == "executor lost":
        world.host.lost("1", "killed")
    else:
        world.host.lost_route(route, "killed")
    ended = ("finished", 1) if end == "finished" else ("failed", 1, "killed")
    assert world.take_calls() == [ended, ("subtask_reset", 0, -1), ("ready", 2), ("handle_event", 2, "a")]


@pytest.mark.parametrize("reply", ["LIVE", "none"])
def test_a_speculative_attempt_on_another_executor_begins_without_a_reset(world, reply):
    """The executor of the first attempt replies that it is live. If it does not reply, nothing waits for it for long."""
    world.ready(1)
    world.ready(2, executor="2")
    world.ready(3, executor="2")
    assert world.take_calls() == [("ready", 1)]
    if reply == "LIVE":
        world.receive("LIVE", evaluation=1)
    else:
        world.now = world.host.due()
        world.host.expire()
    assert world.take_calls() == [("ready", 2), ("ready", 3)]
    assert world.host.due() is None
    world.receive("ENDED", evaluation=1, outcome="failed", reason="another attempt succeeded")
    assert world.take_calls() == [("failed", 1, "another attempt succeeded")]


def test_an_attempt_that_begins_before_the_loss_of_another_causes_no_reset(world):
    """An attempt that begins before another one is lost causes no reset, because both were live at the same time."""
    world.ready(1)
    world.ready(2, executor="2")
    world.receive("LIVE", evaluation=1)
    world.host.lost("1", "executor 1 is lost")
    assert [call[:2] for call in world.take_calls()] == [("ready", 1), ("ready", 2), ("failed", 1)]


@pytest.mark.parametrize("loss", ["executor", "connection"])
def test_an_attempt_that_is_lost_before_it_begins(world, loss):
    """An attempt that waits to begin, and whose executor or connection is lost, does not reach the coordinator."""
    route = "2" if loss == "executor" else types.SimpleNamespace(executor="2")
    world.ready(1)
    world.ready(2, executor="2", route=route)
    if loss == "executor":
        world.host.lost("2", "killed")
    else:
        world.host.lost_route(route, "killed")
    world.receive("ENDED", evaluation=1, outcome="failed", reason="r")
    assert world.take_calls() == [("ready", 1), ("failed", 1, "r")]


def test_attempts_that_wait_begin_in_order_and_may_end_before_they_begin(world):
    """A second retry that was announced while the first one waited begins after it, with a reset of its own."""
    world.ready(1)
    world.ready(2, executor="2")
    world.ready(2, executor="2")  # a frame that arrives twice
    world.receive("ENDED", executor="2", evaluation=2, outcome="failed", reason="killed too")
    world.ready(3, executor="3")
    world.receive("ENDED", evaluation=1, outcome="failed", reason="killed")
    assert world.take_calls() == [
        ("ready", 1), ("failed", 1, "killed"), ("subtask_reset", 0, -1), ("ready", 2), ("failed", 2, "killed too"),
        ("subtask_reset", 0, -1), ("ready", 3),
    ]  # fmt: skip


def test_an_evaluation_that_ended_before_its_ready_is_ignored(world):
    """The coordinator never sees an evaluation whose end arrives before its READY, and the next one causes no reset."""
    world.receive("ENDED", evaluation=1, outcome="failed", reason="its process is gone")
    world.ready(1)
    world.events(1, 1, "late")
    world.ready(2)
    assert world.take_calls() == [("ready", 2)]
    assert [frame["evaluation"] for frame in world.wire.take("ABORT")] == [1]


def test_a_repeated_ready_after_the_end_is_ignored(world):
    """A READY that arrives again after its evaluation has ended does not start another evaluation."""
    world.ready(1)
    world.finish(1, 1)
    world.ready(1)
    assert world.take_calls() == [("ready", 1), ("finished", 1)]


def test_evaluations_without_a_subtask_are_never_reset(world):
    """Evaluations of a binding without subtasks cause no reset."""
    for id_ in (1, 2):
        world.ready(id_, subtask=-1)
        world.finish(id_, 1)
    assert [call[0] for call in world.take_calls()] == ["ready", "finished"] * 2


def test_messages_of_an_ended_evaluation_are_refused(world):
    """Messages of an ended evaluation do not reach the coordinator, and their sender gets ABORT."""
    world.ready(1)
    world.receive("ENDED", evaluation=1, outcome="failed", reason="gone")
    world.take_calls()
    world.events(1, 1, "late")
    world.receive("REQUEST", evaluation=1, sequence=2, payload=pack("late", LIMIT))
    world.finish(1, 3)
    world.receive("ENDED", evaluation=1, outcome="failed", reason="again")
    world.receive("ACCEPTED", evaluation=1, sequence=1)
    assert world.take_calls() == []
    assert len(world.wire.take("ABORT")) == 3
    assert not world.wire.take("REPLY")


def test_a_lost_executor_fails_only_its_evaluations(world):
    """If an executor is lost, its evaluations fail, and evaluations on other executors continue."""
    world.ready(1)
    world.ready(2, subtask=1, executor="2")
    world.host.lost("1", "executor 1 is lost")
    assert world.take_calls() == [("ready", 1), ("ready", 2), ("failed", 1, "executor 1 is lost")]


def test_an_evaluation_of_a_lost_executor_never_begins(world):
    """A READY that arrives after the loss of its executor does not reach the coordinator: nothing would end it."""
    world.host.lost("1", "executor 1 is lost")
    world.ready(1)
    world.ready(2, executor="2")
    assert world.take_calls() == [("ready", 2)]
    (abort,) = world.wire.take("ABORT")
    assert (abort["evaluation"], abort["reason"]) == (1, "executor 1 is lost")


def test_the_reason_of_an_abort_can_be_any_text(world):
    """A reason with a lone surrogate, such as the name of an undecodable file, is sent with a replacement."""
    world.ready(1)
    world.host._liveness.fail(1, "no file \udcff")
    (abort,) = world.wire.take("ABORT")
    assert abort["reason"] == "no file ?"


def test_events_to_a_task_are_numbered_and_acknowledged(world):
    """Events to a task are numbered. An event's future completes when all events up to this one are in the mailbox."""
    world.ready(1)
    world.take_calls()
    gateway = world.coordinators[0].gateways[1]
    first, second, end = gateway.send_acknowledged("a"), gateway.send_acknowledged(b"b"), gateway.close()
    (frame,) = world.wire.take("EVENTS")
    assert (frame["first"], frame["payloads"]) == (1, [pack("a", LIMIT), b"\0b", END])
    world.receive("ACCEPTED", evaluation=1, sequence=2)
    world.receive("ACCEPTED", evaluation=1, sequence=1)  # late
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


def test_a_late_acknowledgement_fails_only_its_attempt(world):
    """Only the attempt whose acknowledgement does not arrive within the timeout fails."""
    world.ready(1)
    world.ready(2, subtask=1)
    world.take_calls()
    gateways = world.coordinators[0].gateways
    late, other = gateways[1].send_acknowledged("a"), gateways[2].send_acknowledged("b")
    assert len(world.wire.take("EVENTS")) == 2
    world.receive("ACCEPTED", evaluation=2, sequence=1)
    assert world.host.due() == 130.0
    world.now = 129.9
    world.host.expire()
    assert world.take_calls() == []
    world.now = 130.0
    world.host.expire()
    (failed,) = world.take_calls()
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
    """An event that is not acknowledged fails the attempt, whichever method sent it, with or without a future."""
    world.ready(1)
    world.take_calls()
    gateway = world.coordinators[0].gateways[1]
    getattr(gateway, method)(*([] if method == "close" else ["x"]))
    world.wire.take("EVENTS")
    if failure == "late":
        world.now += 30.0
        world.host.expire()
        reason = "within 30.0 s"
    else:
        world.receive("OVERFLOWED", evaluation=1, reason="its mailbox is full")
        reason = "its mailbox is full"
    ((name, evaluation, why),) = world.take_calls()
    assert (name, evaluation) == ("failed", 1)
    assert reason in why
    assert [frame["evaluation"] for frame in world.wire.take("ABORT")] == [1]


def test_a_full_mailbox_fails_its_attempt(world):
    """A full mailbox fails its attempt, and the reason says so."""
    world.ready(1)
    world.receive("OVERFLOWED", evaluation=1, reason="its mailbox is full")
    assert world.take_calls()[1:] == [("failed", 1, "its mailbox is full")]
    assert [frame["reason"] for frame in world.wire.take("ABORT")] == ["its mailbox is full"]


def test_handled_is_sent_in_steps(world):
    """HANDLED is sent after each quarter of the send window, not for each message."""
    world.ready(1)
    for first in range(1, WINDOW + 1, 64):
        world.events(1, first, *range(64))
    world.take_calls()
    sequences = [frame["sequence"] for frame in world.wire.take("HANDLED")]
    assert sequences == list(range(WINDOW // 4, WINDOW + 1, WINDOW // 4))


def test_a_waiting_task_is_notified_when_its_messages_are_handled(world):
    """After ASK_HANDLED, HANDLED is sent as soon as all earlier messages of the task have been handled."""
    world.ready(1)
    world.events(1, 1, "a", "b")
    world.receive("ASK_HANDLED", evaluation=1)
    assert not world.wire.take("HANDLED")
    world.take_calls()
    assert [frame["sequence"] for frame in world.wire.take("HANDLED")] == [2]


def test_a_slow_coordinator_sends_handled_about_every_second(world):
    """A slow coordinator sends HANDLED about every second, so that a waiting task does not time out."""
    world.ready(1)
    sequences = []
    for first in range(1, 6):
        world.now += 0.6
        world.events(1, first, "slow")
        world.take_calls()
        sequences += [frame["sequence"] for frame in world.wire.take("HANDLED")]
    assert sequences == [2, 4]


def test_a_request_gets_its_result_or_its_exception(world):
    """The reply to a request is the handler's result or exception, or that of the future that the handler returns."""
    world.ready(1)
    world.take_calls()
    later: Future[str] = Future()
    handlers = iter([lambda: 1 / 0, lambda: later, lambda: (n for n in ()), lambda: "now"])
    world.coordinators[0].handle_request = lambda *_: next(handlers)()
    for sequence in range(1, 5):
        world.receive("REQUEST", evaluation=1, sequence=sequence, payload=pack("x", LIMIT))
    world.take_calls()
    later.set_result("later")
    replies = {frame["sequence"]: frame for frame in world.wire.take("REPLY")}
    outcomes = {sequence: frame["outcome"] for sequence, frame in replies.items()}
    assert outcomes == {1: "failed", 2: "ok", 3: "failed", 4: "ok"}
    assert isinstance(raised(replies[1]["payload"])[0], ZeroDivisionError)
    assert "cannot pickle a generator" in raised(replies[3]["payload"])[1]
    assert [unpack(replies[sequence]["payload"]) for sequence in (2, 4)] == ["later", "now"]
    assert not world.failures


def test_recent_replies_are_kept_for_repeated_requests(world):
    """The last large reply and the latest small replies, at most 64 in all, can be repeated without the handler."""
    world.ready(1)
    world.take_calls()
    world.coordinators[0].handle_request = lambda _evaluation, size: bytes(size)
    for sequence in range(1, 200):
        world.receive("REQUEST", evaluation=1, sequence=sequence, payload=pack(100_000 if sequence % 2 else 10, LIMIT))
        world.take_calls()
    world.wire.take("REPLY")
    for _ in range(2):  # a repeated reply can be lost, too
        for sequence in range(1, 200):
            world.receive("REQUEST", evaluation=1, sequence=sequence, payload=pack(0, LIMIT))
        assert world.take_calls() == []  # no request is handled again
        repeated = {reply["sequence"]: len(reply["payload"]) for reply in world.wire.take("REPLY")}
        assert {sequence: size for sequence, size in repeated.items() if size > 11} == {199: 100_001}
        assert {*range(136, 200, 2)} <= repeated.keys()
        assert len(repeated) <= 64


class ExclusiveReplies(Bounded):
    """Kept replies that raise an error if two threads add an entry at the same time."""

    def __init__(self, limit):
        super().__init__(limit)
        self._adding = threading.Lock()

    def __setitem__(self, sequence, reply):
        assert self._adding.acquire(blocking=False), "two threads are adding an entry at the same time"
        time.sleep(0.001)
        super().__setitem__(sequence, reply)
        self._adding.release()


def test_replies_of_other_threads_do_not_disturb_new_requests():
    """One thread adds requests to the kept replies while another thread adds replies, as a future's thread does.

    The two never change the kept replies at the same time. Otherwise, a request could be lost.
    """
    evaluation = types.SimpleNamespace(id=1, executor="1")
    live, handled = LiveEvaluation(evaluation, types.SimpleNamespace(route="1"), 0.0), []
    live.replies = ExclusiveReplies(8)
    instance = types.SimpleNamespace(enqueue=lambda f, instance, live, sequence, *rest: handled.append(sequence))
    delivery, counts = Delivery(FakeWire(), LIMIT, lambda: 0.0, pytest.fail), Statistics()

    def request(sequences):
        for sequence in sequences:
            delivery.request(instance, live, sequence, b"", counts)

    def reply(sequences):
        for sequence in sequences:
            delivery._reply(live, sequence, "ok", b"")

    request(range(1, 9))
    with ThreadPoolExecutor(2) as threads:
        for future in [threads.submit(request, range(9, 60)), threads.submit(reply, [*range(1, 9)] * 10)]:
            future.result()
    assert handled == [*range(1, 60)]
    assert [*live.replies] == [*range(52, 60)]


def test_a_reset_replaces_the_coordinator(world):
    """On a reset, the old coordinator closes and gets no more calls. Its evaluations are aborted and get no replies."""
    world.ready(1)
    world.take_calls()
    gateway = world.coordinators[0].gateways[1]
    sent = gateway.send_acknowledged("old")
    world.events(1, 1, "dropped")
    world.host.reset(world.binding, 7, b"state", 1.0)
    world.events(1, 2, "late")
    world.ready(2)
    assert world.take_calls() == [("reset_to_checkpoint", 7, b"state"), ("start",), ("ready", 2)]
    assert [call[0] for call in world.coordinators[0].calls] == ["close"]
    with pytest.raises(EvaluationEnded, match="reset"):
        sent.result(0)
    assert {frame["reason"] for frame in world.wire.take("ABORT")} == {
        "its coordinator was reset", "its topology has ended, or its coordinator was reset",
    }  # fmt: skip
    world.coordinators[0].context.fail(ValueError("too late"))
    assert not world.failures


def test_each_reset_creates_an_instance_that_starts_once(world):
    """Of several resets before the coordinator has started, only the last one's instance starts, and it starts once."""
    world.host.reset(world.binding, -1, None, 1.0)
    world.host.reset(world.binding, 3, None, 1.0)
    assert world.take_calls() == [("reset_to_checkpoint", 3, None), ("start",)]
    assert all(("start",) not in coordinator.calls for coordinator in world.coordinators[:-1])


def test_a_broken_channel_fails_the_topology(world):
    """A broken channel fails the topology with an error that contains the reason."""
    world.ready(1)
    world.host.broken("the connection from coordinators to executors broke: reset by peer")
    (failure,) = world.failures
    assert isinstance(failure, ChannelClosed)
    assert "reset by peer" in str(failure)


def test_a_binding_added_to_a_broken_channel_fails(world):
    """A binding that is added after the channel has broken fails with the same reason as earlier bindings."""
    world.host.broken("reset by peer")
    world.failures.clear()
    world.host.add(world.binding)
    assert [str(failure) for failure in world.failures] == ["reset by peer"]


@pytest.mark.parametrize("result", [None, 7, Coordinator], ids=["nothing", "another object", "the class"])
def test_a_factory_must_return_a_coordinator(world, result):
    """If a factory does not return a coordinator, an error is raised when the function is bound, not later."""
    binding = world.binding
    with pytest.raises(OperatorMisused, match="the factory of operator 'o' returned a .*, not a stagecrew.Coordinator"):
        Binding("c", "o/2", "o", lambda _: result, binding.owner, binding.threads)


def test_an_exception_in_a_callback_fails_the_topology(world):
    """An exception in a callback is passed to the topology as its failure."""
    world.coordinators[0].ready = lambda *_: 1 / 0
    world.ready(1)
    world.take_calls()
    assert [type(error) for error in world.failures] == [ZeroDivisionError]


def test_the_coordinator_closes_after_pending_messages_at_the_end_of_a_topology(world):
    """At the end of a topology, its coordinator handles pending messages and closes. All evaluations are aborted."""
    world.ready(1)
    world.events(1, 1, "a")
    world.binding.finish()
    assert world.binding.await_closed(1.0)
    world.host.remove(world.binding, "topology 't' has ended")
    assert world.take_calls() == [("ready", 1), ("handle_event", 1, "a"), ("close",)]
    world.ready(2)
    assert world.take_calls() == []
    assert [frame["evaluation"] for frame in world.wire.take("ABORT")] == [1, 2]


def test_payloads_are_pickled_and_bytes_are_unchanged():
    """Objects are pickled, even local functions, but bytes are not. Unpicklable and too large objects are rejected."""
    for event in (b"\0\1", 3, "x", None, True, {"a": [1.5]}, (1, b"2")):
        assert unpack(pack(event, LIMIT)) == event
    assert unpack(pack(lambda: 3, LIMIT))() == 3
    with pytest.raises(EventRejected, match="cannot pickle a generator"):
        pack((n for n in ()), LIMIT)
    with pytest.raises(
        EventRejected, match=r"takes 12 bytes when serialized, more than the 10 bytes of spark.stagecrew.event.maxSize"
    ):
        pack(b"12345678901", 10)


def test_exceptions_are_sent_with_their_traceback():
    """An exception is sent with its traceback as text. If it cannot be pickled or is too large, only text is sent."""
    from stagecrew.wire.serialization import failure

    class LocalError(Exception):
        def __init__(self, one, two):
            super().__init__(one)

    def transferred(error):
        try:
            raise error
        except Exception as caught:
            return raised(failure(caught, LIMIT))

    error, text = transferred(KeyError("k"))
    assert isinstance(error, KeyError)
    assert "raise error" in text
    error, text = transferred(ValueError(b"x" * LIMIT))  # larger than the limit of a reply
    assert error is None
    assert "ValueError" in text
    assert len(text) < 30_000
    error, text = transferred(LocalError(1, 2))
    assert error is None
    assert "LocalError" in text


def test_an_exception_of_a_class_that_only_the_driver_has_is_sent_as_text(monkeypatch):
    """If the task cannot import the exception's class, it gets the traceback as text."""
    module = types.ModuleType("driver_only")
    exec("class OperationalError(Exception): pass", module.__dict__)
    module.OperationalError.__module__ = "driver_only"
    monkeypatch.setitem(sys.modules, "driver_only", module)
    from stagecrew.wire.serialization import failure

    reply = failure(module.OperationalError("the database is down"), LIMIT)
    assert isinstance(raised(reply)[0], module.OperationalError)
    monkeypatch.delitem(sys.modules, "driver_only")
    error, text = raised(reply)
    assert error is None
    assert "OperationalError: the database is down" in text


def test_large_outboxes_are_split_into_frames():
    """Events to an evaluation are sent in order, in frames of about 1 MB. Frames to an executor are split likewise."""
    outbox = Outbox()
    for size in (600_000, 600_000, 10, 2_000_000, 5):
        outbox.add(bytes(size), 1.0)
    frames = []
    while (taken := outbox.take()) is not None:
        frames.append((taken[0], [len(event) for event in taken[1]]))
    assert frames == [(1, [600_000, 600_000]), (3, [10, 2_000_000]), (5, [5])]
    assert [sum(map(len, part)) for part in ([piece] for piece in _parts([b"x" * 700_000] * 3 + [b"y"]))] == [
        1_400_000,
        700_001,
    ]


@pytest.mark.parametrize("order", list(itertools.permutations([1, 3, 2, 3])))
def test_acknowledgements_can_arrive_in_any_order(order):
    """An acknowledgement completes all futures up to its number. A late or repeated acknowledgement does nothing."""
    outbox = Outbox()
    futures: list[Future[None]] = [Future() for _ in range(3)]
    for future in futures:
        outbox.add(b"", 1.0, future)
    outbox.take()
    highest = 0
    for sequence in order:
        done = outbox.acknowledge(sequence)
        assert done == futures[highest : max(highest, sequence)]
        highest = max(highest, sequence)
    assert outbox.deadline is None
