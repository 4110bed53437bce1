"""Joins coordinators to what comes from executors: who is live, in which order a coordinator hears of it, and nothing twice.

Frames come from one thread, in the order of each executor. The host keeps its state under one lock, and calls nothing while
it holds it: coordinators are called by their loops, and what is to be sent is enqueued.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, Protocol

from stagecrew.coordination.binding import Binding
from stagecrew.coordination.checkpoints import Pending, Taken
from stagecrew.coordination.contract import NO_CHECKPOINT
from stagecrew.coordination.evaluation import Evaluation
from stagecrew.coordination.gateway import Gateway
from stagecrew.coordination.instance import Instance, Owner
from stagecrew.coordination.live import Live
from stagecrew.coordination.statistics import Statistics
from stagecrew.coordination.statistics_reporter import StatisticsReporter
from stagecrew.errors import ChannelClosed, ChannelError, CheckpointFailed
from stagecrew.observability.logs import set_current_evaluation
from stagecrew.wire.frames import Frame, decode_all, encode
from stagecrew.wire.serialization import WINDOW, WINDOW_BYTES, failure, pack, unpack

__all__ = ["Host", "Wire"]

#: How many replies an evaluation's host remembers, so that a request that comes twice gets the first answer; of those of
#: this many bytes and more only the last.
_REPLIES: Final = 64
_LARGE: Final = 1 << 16
#: How often a task whose messages take long to handle is told of it, in seconds.
_TELL: Final = 1.0
#: How many bindings, and how many evaluations, it remembers that ended.
_REMOVED: Final = 256
_OVER: Final = 4096


class Wire(Protocol):
    """The way to executors."""

    def send(self, executor: str, frame: bytes) -> None:
        """Enqueues a frame for an executor."""

    def dirty(self, gateway: Gateway) -> None:
        """A gateway has something to send."""

    def flush(self) -> None:
        """Sends what is enqueued."""


class Host:
    """Knows every binding of the session, and all live evaluations."""

    def __init__(self, wire: Wire, limit: int, ack_timeout: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.wire = wire
        self.limit = limit
        self._ack_timeout, self._clock = ack_timeout, clock
        self._lock = threading.Lock()
        self._bindings: dict[str, Binding] = {}
        self._live: dict[int, tuple[Binding, Live]] = {}
        self._leaving: list[Binding] = []
        #: Why a binding is not served any more, and what evaluations are over; of the last ones.
        self._removed: dict[str, str] = {}
        self._ended: dict[int, None] = {}
        self._teller = StatisticsReporter(clock, ack_timeout)
        #: Why nothing reaches executors any more, when that is so.
        self._broken: str | None = None

    @property
    def is_busy(self) -> bool:
        """Whether any evaluation is live."""
        return bool(self._live)

    def live_bindings(self, owner: Owner) -> list[Binding]:
        """The owner's bindings that have a live evaluation."""
        with self._lock:
            return list(dict.fromkeys(binding for binding, _ in self._live.values() if binding.owner is owner))

    def add(self, binding: Binding) -> None:
        """Evaluations of the binding are served from now on."""
        with self._lock:
            self._bindings[binding.id] = binding
            self._teller.add(binding)
            broken = self._broken
        if broken is not None:
            binding.owner.fail(ChannelClosed(broken))

    def remove(self, binding: Binding, reason: str) -> None:
        """They are not any more; those that live are told why."""
        with self._lock:
            if self._bindings.pop(binding.id, None) is not None:
                _remember(self._removed, binding.id, reason, _REMOVED)
                if binding.statistics.is_failed:
                    self._leaving.append(binding)  # so that it is told of, also when its topology goes on
            over = self._cut_off(binding)
            pending, binding.pending = binding.pending, None
        if pending is not None:
            pending.fail(CheckpointFailed(reason))
        self._tell(binding, over, reason)

    def reset(
        self, binding: Binding, checkpoint_id: int, state: bytes | None, seconds: float, subtasks: int = 0
    ) -> None:
        """A new coordinator takes over, as of a checkpoint; no evaluation of before gets an answer, or succeeds."""
        with self._lock:
            over = self._cut_off(binding)
            binding.seen = subtasks
            pending, binding.pending = binding.pending, None
            binding.reset(checkpoint_id, state, seconds)
        if pending is not None:
            pending.fail(CheckpointFailed(f"the coordinator of operator {binding.operator!r} was reset meanwhile"))
        self._tell(binding, over, "its coordinator was reset")

    # -- Checkpoints

    def checkpoint(self, binding: Binding, checkpoint_id: int) -> Future[Taken]:
        """Asks the coordinator for its state. Answers a future of it, done when all that it sent before is in mailboxes.

        `end_checkpoint` has to follow; until then what it sends after its cut is kept back.
        """
        with self._lock:
            pending = binding.pending = Pending(checkpoint_id)
            binding.instance.loop.call(binding.instance.checkpoint, pending, functools.partial(self._cut, binding))
        return pending.result

    def _cut(self, binding: Binding, pending: Pending, state: bytes | None) -> None:
        with self._lock:
            if binding.pending is not pending:
                return  # given up meanwhile
            binding.held = True
            held = [live.gateway.hold() for live in binding.live.values()]
            sent = [future for future in held if future is not None]
            taken = state, binding.seen
        pending.cut(taken, sent)
        self.wire.flush()

    def end_checkpoint(self, binding: Binding, checkpoint_id: int, complete: bool) -> None:
        """It is complete, or given up; what was kept back is sent."""
        with self._lock:
            pending = binding.pending
            if pending is None or pending.id != checkpoint_id:
                return  # another instance has taken over, which knows nothing of it
            binding.pending, binding.held = None, False
            binding.instance.tell_outcome("checkpoint_complete" if complete else "checkpoint_aborted", checkpoint_id)
            gateways = [live.gateway for live in binding.live.values()]
        pending.fail(CheckpointFailed(f"checkpoint {checkpoint_id} was given up"))
        for gateway in gateways:
            gateway.release()
        self.wire.flush()

    def _cut_off(self, binding: Binding) -> list[Live]:
        over = list(binding.live.values())
        binding.live.clear()
        binding.statistics.count("failed", len(over))
        for one in over:
            self._live.pop(one.evaluation.id, None)
            _remember(self._ended, one.evaluation.id, None, _OVER)
        return over

    def _tell(self, binding: Binding, over: list[Live], reason: str) -> None:
        for one in over:
            self._poison(one.evaluation.executor, one.evaluation.id, reason)
            one.gateway.end(reason)
            binding.statistics.ended(one.gateway)
        self.wire.flush()

    # -- What people see

    def statistics(self) -> bytes | None:
        """A frame for the driver's JVM of what changed since the last; None when nothing did."""
        with self._lock:
            bindings = [(binding, list(binding.live.values())) for binding in (*self._teller.due(), *self._leaving)]
            self._leaving.clear()
        return self._teller.frame(bindings)

    def ended(self, binding: Binding) -> None:
        """It has closed before its topology ends."""
        with self._lock:
            binding.statistics.is_closed = True
            self._leaving.append(binding)

    def last_statistics(self, owner: str, bindings: list[Binding]) -> bytes | None:
        """The last word of a topology's bindings, which have closed."""
        with self._lock:
            bindings = [*(one for one in self._leaving if one.owner.id == owner), *bindings]
            self._leaving = [one for one in self._leaving if one.owner.id != owner]
        for binding in bindings:
            binding.statistics.is_closed = True
        return self._teller.frame([(binding, ()) for binding in bindings], last=True)

    # -- What comes from executors (the channel's thread)

    def received(self, executor: str, frames: bytes) -> None:
        """Frames of evaluations on this executor."""
        for frame in decode_all(frames):
            self._received(executor, frame)
        self.wire.flush()

    def lost(self, executor: str, reason: str) -> None:
        """An executor is gone, and all that lived there."""
        with self._lock:
            gone = [live.evaluation.id for _, live in self._live.values() if live.evaluation.executor == executor]
        for id_ in gone:
            self._over(id_, "failed", reason)

    def broken(self, reason: str) -> None:
        """Nothing reaches executors any more, nor comes from them: every topology with operators fails."""
        with self._lock:
            self._broken = reason
            owners = {id(binding.owner): binding.owner for binding in self._bindings.values()}
        for owner in owners.values():
            owner.fail(ChannelClosed(reason))

    def due(self) -> float | None:
        """When the next acknowledgement is late."""
        with self._lock:
            times = [due for _, live in self._live.values() if (due := live.gateway.due) is not None]
        return min(times, default=None)

    def expire(self) -> None:
        """Fails the attempts whose executor has not said in time that it has an event; to be called when nothing came."""
        now = self._clock()
        with self._lock:
            late = [
                live.evaluation
                for _, live in self._live.values()
                if (due := live.gateway.due) is not None and due <= now
            ]
        for evaluation in late:
            self._refuse(
                evaluation.id,
                f"executor {evaluation.executor} has not said within {self._ack_timeout} s that it has an event",
            )
        if late:
            self.wire.flush()

    def _received(self, executor: str, frame: Frame) -> None:
        id_ = frame["evaluation"]
        if frame.kind == "READY":
            self._ready(executor, frame)
            return
        if frame.kind == "ENDED":
            self._over(id_, frame["outcome"], frame["reason"])
            return
        with self._lock:
            known = self._live.get(id_)
            instance = known[0].instance if known is not None else None
        if known is None or instance is None:
            if frame.kind in ("EVENTS", "REQUEST", "FINISH", "CREDIT"):
                self._poison(executor, id_, "its topology has ended, or its coordinator was reset")
            return
        binding, live = known
        if frame.kind == "EVENTS":
            if (fresh := self._fresh(live, frame["first"], frame["payloads"])) is not None:
                binding.statistics.events_in += len(fresh)
                instance.enqueue(self._handle_events, instance, live, fresh)
        elif frame.kind == "REQUEST":
            self._request(binding, instance, live, frame["sequence"], frame["payload"])
        elif frame.kind == "FINISH":
            self._finish(live, frame)
        elif frame.kind == "CREDIT":
            instance.loop.call(self._tell_handled, live)  # behind all that it sent before
        elif frame.kind == "ACCEPTED":
            if (due := live.gateway.acknowledge(frame["sequence"])) is not None:
                binding.statistics.acknowledgements.add(self._clock() - due + self._ack_timeout)
        elif frame.kind == "OVERFLOWED":
            self._refuse(id_, frame["reason"])
        else:
            raise ChannelError(f"an executor does not send {frame.kind} to a coordinator")

    def _ready(self, executor: str, frame: Frame) -> None:
        subtask = None if frame["subtask"] < 0 else int(frame["subtask"])
        with self._lock:
            binding = self._bindings.get(frame["binding"])
            if frame["evaluation"] in self._live or frame["evaluation"] in self._ended:
                return  # it came twice, or behind the word that it is over
            if binding is not None:
                evaluation = Evaluation(
                    id=frame["evaluation"],
                    operator=binding.operator,
                    subtask=subtask,
                    attempt=frame["attempt"],
                    attempt_number=frame["number"],
                    stage=frame["stage"],
                    partition=frame["partition"],
                    stage_attempt=frame["stage_attempt"],
                    partitions=frame["partitions"],
                    executor=executor,
                )
                gateway = Gateway(evaluation, self.limit, lambda: self._clock() + self._ack_timeout, self.wire.dirty)
                if binding.held:
                    gateway.hold()
                live = Live(evaluation, gateway, self._clock())
                binding.statistics.began(gateway)
                anew = (
                    subtask is not None
                    and binding.seen >> subtask & 1
                    and not any(one.evaluation.subtask == subtask for one in binding.live.values())
                )
                if subtask is not None:
                    binding.seen |= 1 << subtask
                binding.live[evaluation.id] = live
                self._live[evaluation.id] = (binding, live)
                # With the lock: an instance hears only of evaluations that began under it.
                if anew:
                    binding.instance.call("subtask_reset", subtask, NO_CHECKPOINT)
                binding.instance.ready(live)
        if binding is None:
            reason = self._removed.get(frame["binding"], "its topology has ended")
            self._poison(executor, frame["evaluation"], reason)

    def _fresh(self, live: Live, first: int, payloads: list[bytes]) -> list[bytes] | None:
        """What of these did not come before."""
        if first > live.expected:
            self._refuse(live.evaluation.id, f"its messages {live.expected} to {first - 1} were lost on their way")
            return None
        fresh = payloads[live.expected - first :]
        live.expected += len(fresh)
        return fresh

    def _request(self, binding: Binding, instance: Instance, live: Live, sequence: int, payload: bytes) -> None:
        if sequence < live.expected:
            if (known := live.replies.get(sequence)) is not None:
                self._reply(live, sequence, *known)
            return  # it is being answered, or was so long ago
        if self._fresh(live, sequence, [payload]) is not None:
            live.replies[sequence] = None
            if len(live.replies) > _REPLIES:
                live.replies.pop(min(live.replies), None)
            binding.statistics.requests += 1
            instance.enqueue(self._handle_request, instance, live, sequence, payload, binding.statistics, self._clock())

    def _finish(self, live: Live, frame: Frame) -> None:
        if frame["sequence"] > live.expected:
            self._fresh(live, frame["sequence"], [])
            return
        self._reply(live, frame["sequence"], "ok", b"")
        self._over(live.evaluation.id, frame["outcome"], frame["reason"])

    def _over(self, id_: int, outcome: str, reason: str) -> None:
        with self._lock:
            known = self._live.pop(id_, None)
            _remember(self._ended, id_, None, _OVER)
            if known is None:
                return
            binding, live = known
            binding.live.pop(id_, None)
            binding.live = binding.live or {}  # one that was used is larger, and an idle binding stays
            binding.statistics.count(outcome)
            binding.instance.over(live, outcome, *([reason] if outcome == "failed" else []))
        live.gateway.end(reason or outcome)
        binding.statistics.ended(live.gateway)

    def _refuse(self, id_: int, reason: str) -> None:
        """The attempt has to fail, because only then both sides agree on what arrived."""
        with self._lock:
            known = self._live.get(id_)
        if known is not None:
            self._poison(known[1].evaluation.executor, id_, reason)
            self._over(id_, "failed", reason)

    def _poison(self, executor: str, id_: int, reason: str) -> None:
        self.wire.send(executor, encode("ABORT", evaluation=id_, reason=reason))

    # -- On a coordinator's thread

    def _handle_events(self, instance: Instance, live: Live, payloads: list[bytes]) -> None:
        if instance.context.state == "closed" or instance.coordinator is None:
            return  # it was reset: what came before is dropped
        handle, evaluation = instance.coordinator.handle_event, live.evaluation
        set_current_evaluation(evaluation)
        context = instance.context
        for payload in payloads:
            if context.state == "closed":
                return
            handle(evaluation, unpack(payload))
            self._handled(live, len(payload))

    def _handle_request(
        self, instance: Instance, live: Live, sequence: int, payload: bytes, counts: Statistics, came: float
    ) -> None:
        if instance.context.state == "closed" or instance.coordinator is None:
            return
        set_current_evaluation(live.evaluation)
        try:
            reply = instance.coordinator.handle_request(live.evaluation, unpack(payload))
            if isinstance(reply, Future):
                reply.add_done_callback(lambda done: self._answer(instance, live, sequence, done, counts, came))
            else:
                self._reply(live, sequence, "ok", pack(reply, self.limit))
                counts.replies.add(self._clock() - came)
        except Exception as error:
            self._failed_reply(live, sequence, error, counts, came)
        self._handled(live, len(payload))

    def _answer(
        self, instance: Instance, live: Live, sequence: int, done: Future[Any], counts: Statistics, came: float
    ) -> None:
        try:
            self._reply(live, sequence, "ok", pack(done.result(), self.limit))
            counts.replies.add(self._clock() - came)
        except BaseException as error:  # a cancelled future's too
            self._failed_reply(live, sequence, error, counts, came)
        if not instance.loop.is_current:  # there several may be answered at once: they travel together when it is idle
            self.wire.flush()

    def _failed_reply(self, live: Live, sequence: int, error: BaseException, counts: Statistics, came: float) -> None:
        self._reply(live, sequence, "failed", failure(error, self.limit))
        counts.raised(error, fails=False)
        counts.replies.add(self._clock() - came)

    def _reply(self, live: Live, sequence: int, outcome: str, payload: bytes) -> None:
        if sequence in live.replies:
            live.replies[sequence] = (outcome, payload)
            if len(payload) >= _LARGE:
                live.replies.pop(live.large, None)
                live.large = sequence
        evaluation = live.evaluation
        self.wire.send(
            evaluation.executor,
            encode("REPLY", evaluation=evaluation.id, sequence=sequence, outcome=outcome, payload=payload),
        )

    def _handled(self, live: Live, size: int) -> None:
        """One more message, of so many bytes. The task is told often enough that a window of small ones never fills up, and
        where each takes long, that something is handled."""
        live.handled += 1
        live.untold_bytes += size
        many = live.handled - live.told >= WINDOW // 4 or live.untold_bytes >= WINDOW_BYTES // 4
        if many or self._clock() - live.told_at >= _TELL:
            self._tell_handled(live)

    def _tell_handled(self, live: Live) -> None:
        live.told, live.untold_bytes, live.told_at = live.handled, 0, self._clock()
        evaluation = live.evaluation
        self.wire.send(evaluation.executor, encode("HANDLED", evaluation=evaluation.id, sequence=live.handled))


def _remember(what: dict[Any, Any], key: Any, value: Any, limit: int) -> None:
    """The last so many."""
    what[key] = value
    if len(what) > limit:
        del what[next(iter(what))]
