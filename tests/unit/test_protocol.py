"""The protocol between a task and its coordinator over a network that drops, duplicates, delays and reorders frames.

The task's gateway and the host with its coordinator are real. Between them is a model of an executor's mailbox
(`Mailbox.scala`). A frame arrives only when the test delivers it.
"""

from __future__ import annotations

import types

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import stagecrew
from stagecrew.coordination.binding import Binding
from stagecrew.coordination.host import Host
from stagecrew.coordination.instance import Threads
from stagecrew.testing.inline import InlineLoop
from stagecrew.wire.frames import Decoder, decode_all, encode
from stagecrew.wire.serialization import unpack
from stagecrew.worker.task_gateway import Bound, TaskGateway


class Echo(stagecrew.Coordinator):
    """Records its messages. The reply to a request contains the request."""

    def __init__(self, context):
        super().__init__(context)
        self.received_messages, self.requests_received, self.outcomes, self.gateway = [], [], [], None

    def ready(self, evaluation, gateway):
        self.gateway = gateway

    def handle_event(self, evaluation, event):
        self.received_messages.append(event)

    def handle_request(self, evaluation, request):
        self.received_messages.append(request)
        self.requests_received.append(request)
        return ("reply", request)

    def failed(self, evaluation, reason):
        self.outcomes.append("failed")

    def finished(self, evaluation):
        self.outcomes.append("finished")


class InlineThreads(Threads):
    """Loops whose calls wait until the state machine runs them."""

    def __init__(self):
        self.loops = []

    def loop(self, _name, failed, _idle):
        self.loops.append(InlineLoop(failed))
        return self.loops[-1]


class FakeMailbox:
    """A model of an executor's mailbox for one evaluation (Mailbox.scala), whose worker has unlimited credit."""

    def __init__(self):
        self.accepted, self.refused = 0, None

    def offer(self, first, payloads):
        if self.refused is None and first > self.accepted + 1:
            self.refused = "lost"
        if self.refused is not None:
            return []
        fresh = payloads[self.accepted + 1 - first :]
        self.accepted += len(fresh)
        return fresh


class Protocol(RuleBasedStateMachine):
    """One evaluation over two networks: `out` has the frames that the task sent, and `back` the frames sent to it."""

    faults = True

    @initialize()
    def begin(self):
        self.out, self.back, self.unsent = [], [], {}
        self.failures, self.now = [], 0.0
        self.threads, self.mailbox = InlineThreads(), FakeMailbox()
        self.broken = None
        self.host = Host(self, 1 << 20, 5.0, lambda: self.now)
        owner = types.SimpleNamespace(
            name="t", id="t-1", store={}, changed={}, fail=self.failures.append, idle=lambda: None
        )
        self.binding = Binding("b", "o/1", "o", Echo, owner, self.threads)
        self.binding.begin()
        self.host.add(self.binding)
        self.connection = types.SimpleNamespace(
            add=lambda _: None,
            remove=lambda _: None,
            send=self.sent_by_task,
            wait=self.wait,
            changed=types.SimpleNamespace(__enter__=None),
            welcome={"host": "h"},
        )
        context = types.SimpleNamespace(
            taskAttemptId=lambda: 1, attemptNumber=lambda: 0, stageId=lambda: 0, partitionId=lambda: 0
        )
        bound = Bound("b", "o", "t", None, 1 << 20, 1.0)
        self.task = TaskGateway(self.connection, bound, 0, context)
        self.run()
        self.first = self.coordinator
        #: Why the host has ended the evaluation. None if it has not.
        self.ended = None
        self.sent, self.requests, self.pushed, self.received, self.futures = [], [], [], [], []
        self.finished = self.lost = False
        self.count = 0

    # -- the environment of both ends

    def sent_by_task(self, *pieces):
        frames = b"".join(pieces)
        self.out += list(Decoder(1 << 20).feed(frames))

    def send(self, _executor, frame):
        self.gather()
        self.back += decode_all(frame)

    def gather(self):
        gateways, self.unsent = self.unsent, {}
        for gateway in gateways:
            while (frame := gateway.take()) is not None:
                self.back += decode_all(frame)

    def dirty(self, gateway):
        self.unsent[gateway] = None

    def flush(self):
        self.gather()

    def run(self):
        while any(loop.run() for loop in self.threads.loops):
            pass
        self.gather()

    def to_host(self, frame):
        self.host.received("1", encode(frame.kind, **frame.fields))
        self.run()

    def to_task(self, frame):
        if frame.kind == "EVENTS":
            fresh = self.mailbox.offer(frame["first"], frame["payloads"])
            self.received += map(unpack, fresh)
            if self.mailbox.refused is None:
                self.to_host_later("ACCEPTED", sequence=self.mailbox.accepted)
            else:
                self.to_host_later("OVERFLOWED", reason="events were lost")
        else:
            self.task._handle(frame)

    def to_host_later(self, kind, **fields):
        self.out += Decoder(1 << 20).feed(encode(kind, evaluation=self.task.id, **fields))

    def settle(self):
        """Delivers all frames in order."""
        self.run()
        while self.out or self.back:
            while self.out:
                self.to_host(self.out.pop(0))
            while self.back:
                self.to_task(self.back.pop(0))
            self.run()

    def wait(self, found, _seconds):
        """Delivers all frames. No other thread sends, so afterwards the result is there or never arrives."""
        if (result := found()) is not None:
            return result
        self.settle()
        return found()

    # -- steps

    @property
    def coordinator(self):
        return self.binding.instance.coordinator

    @property
    def serving(self):
        """The coordinator that serves the evaluation: the first, unless it was reset before the evaluation arrived."""
        return self.first if self.first.gateway is not None else self.coordinator

    def next(self):
        self.count += 1
        return self.count

    def attempt(self, f):
        try:
            return f()
        except (stagecrew.errors.EvaluationEnded, stagecrew.errors.CoordinationTimeout) as error:
            self.broken = error
            return None

    @precondition(lambda self: self.broken is None and not self.finished)
    @rule(hurry=st.booleans())
    def task_sends(self, hurry):
        number = self.next()
        self.task._flushed_at = 0.0 if not hurry else float("inf")
        self.task._flusher = object()  # the test itself flushes
        if self.attempt(lambda: self.task.send(number) or True):
            self.sent.append(number)

    @precondition(lambda self: self.broken is None and not self.finished)
    @rule()
    def task_flushes(self):
        self.attempt(self.task._flush)

    @precondition(lambda self: self.broken is None and not self.finished)
    @rule()
    def task_requests(self):
        number = self.next()
        self.sent.append(number)
        reply = self.attempt(lambda: self.task.request(number))
        assert self.broken is not None or reply == ("reply", number)

    @precondition(lambda self: self.broken is None and not self.finished)
    @rule()
    def task_finishes(self):
        self.attempt(lambda: self.task._finish("finished", ""))
        self.finished = True
        if self.broken is None:
            assert self.serving.received_messages == self.sent
            assert self.ended is None, "an ended evaluation does not succeed"

    @precondition(lambda self: self.first.gateway is not None)
    @rule()
    def coordinator_sends(self):
        number = self.next()
        self.futures.append((number, self.first.gateway.send_acknowledged(number)))
        self.pushed.append(number)
        self.gather()

    @precondition(lambda self: self.ended is None and not self.finished)
    @rule(reason=st.sampled_from(["its executor is lost", "its attempt is killed", "its coordinator is reset"]))
    def evaluation_ends(self, reason):
        if self.serving.gateway is not None or "reset" not in reason:  # an evaluation that arrives after a reset begins
            self.ended = reason
        if "lost" in reason:
            self.host.lost("1", reason)
        elif "killed" in reason:
            self.host.received("1", encode("ENDED", evaluation=self.task.id, outcome="failed", reason=reason))
        else:
            self.host.reset(self.binding, -1, None, 1.0)
        self.run()

    @precondition(lambda self: self.out or self.back)
    @rule(data=st.data())
    def deliver_one(self, data):
        """Delivers the first frame of a network, or any frame if the network reorders."""
        network = data.draw(st.sampled_from([net for net in (self.out, self.back) if net]))
        at = data.draw(st.integers(0, len(network) - 1)) if self.faults else 0
        frame = network.pop(at)
        self.to_host(frame) if network is self.out else self.to_task(frame)

    @precondition(lambda self: self.faults and (self.out or self.back))
    @rule(data=st.data(), double=st.booleans())
    def lose_or_duplicate_one(self, data, double):
        network = data.draw(st.sampled_from([net for net in (self.out, self.back) if net]))
        at = data.draw(st.integers(0, len(network) - 1))
        if double:
            network.insert(data.draw(st.integers(0, len(network))), network[at])
        else:
            del network[at]
            self.lost = True

    @rule(seconds=st.floats(0, 10))
    def advance_time(self, seconds):
        self.now += seconds

    @rule()
    def expire_timeouts(self):
        """Expires timeouts, which the host does only when there is nothing to read."""
        if not self.out:
            self.host.expire()
            self.run()

    # -- invariants

    @invariant()
    def in_order_and_once(self):
        if not hasattr(self, "task"):
            return
        assert self.first.received_messages == self.sent[: len(self.first.received_messages)]
        assert self.received == self.pushed[: len(self.received)]
        assert not self.failures
        assert len(self.first.outcomes) <= 1
        if self.coordinator is not self.first:
            # The new coordinator gets no message of this evaluation or, if READY arrived after the reset, all of them.
            assert self.coordinator.received_messages == self.sent[: len(self.coordinator.received_messages)]
            assert self.first.received_messages == [] or self.coordinator.received_messages == []
        for number, future in self.futures:
            if future.done() and future.exception() is None:
                assert number in self.received

    def teardown(self):
        if not hasattr(self, "task"):
            return
        if self.broken is None and not self.finished:
            self.task_finishes()
        self.settle()
        self.now += 10
        self.host.expire()
        self.run()
        self.settle()
        # No event is lost silently: it has arrived, or its sender has an error.
        for number, future in self.futures:
            assert future.done()
            assert (future.exception() is None) == (number in self.received) or future.exception() is not None
        if self.serving.outcomes == ["finished"]:
            assert self.serving.received_messages == self.sent
        if not self.faults and self.ended is None:
            assert self.serving.outcomes == ["finished"]
            assert self.broken is None


class OrderlyProtocol(Protocol):
    """Networks that only delay frames."""

    faults = False

    @rule(seconds=st.just(0.0))
    def advance_time(self, seconds):
        """Does not advance the clock, so nothing expires."""


TestProtocol = Protocol.TestCase
TestProtocol.settings = settings(max_examples=150, stateful_step_count=40)
TestOrderly = OrderlyProtocol.TestCase
TestOrderly.settings = settings(max_examples=50, stateful_step_count=40)


@pytest.mark.long
class TestProtocolLong(Protocol.TestCase):
    """Runs many more examples of the same state machine."""

    settings = settings(max_examples=5000, stateful_step_count=80)
