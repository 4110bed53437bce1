"""A coordinator with scripted evaluations and a manual clock: no Spark, no thread, no socket."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Final

from stagecrew.coordination.checkpoints import Checkpoint
from stagecrew.coordination.contract import Coordinator
from stagecrew.coordination.gateway import Gateway
from stagecrew.coordination.host import Host
from stagecrew.coordination.instance import Owner, Threads
from stagecrew.coordination.operators import Factory, Operators
from stagecrew.errors import EvaluationEnded, RequestFailed, RequestTimeout
from stagecrew.wire.frames import Frame, decode_all, encode
from stagecrew.wire.serialization import END, pack, raised, unpack

__all__ = ["CoordinatorHarness", "ScriptedEvaluation"]

_LIMIT: Final = 16 << 20


class CoordinatorHarness:
    """A coordinator under test, served as in a session, but all in the caller's thread.

    Each call returns when the coordinator has handled it, with all that it led to. The clock stands still but for `advance`.
    What a session does beside the coordinator (Spark's retries, cancelled jobs) is scripted by the test.

    >>> import stagecrew
    >>> class Budget(stagecrew.Coordinator):
    ...     left = 5
    ...     def handle_request(self, evaluation, wanted):
    ...         granted = min(wanted, self.left)
    ...         self.left -= granted
    ...         return granted
    >>> with CoordinatorHarness(Budget) as harness:
    ...     task, other = harness.evaluation(subtask=0), harness.evaluation(subtask=1)
    ...     task.request(3), other.request(3)
    (3, 2)
    """

    name = "test"
    id = "test"

    def __init__(self, factory: Factory, ack_timeout: float = 30.0) -> None:
        self.now = 0.0
        #: What failed the topology, if something did.
        self.failure: BaseException | None = None
        self._loops: list[_Calls] = []
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count(1)
        self._evaluations: dict[int, ScriptedEvaluation] = {}
        self._wire = _Wire(self)
        self._host = Host(self._wire, _LIMIT, ack_timeout, lambda: self.now)
        self._made: list[Coordinator] = []
        self._running = False

        def noted(context: Any) -> Coordinator:
            self._made.append(factory(context))
            return self._made[-1]

        self._here = _Here(self)
        self.operators = Operators(self, lambda: 1.0, self._here)
        self.operators.name_operator("operator")
        self._binding = self.operators.add("operator", noted, self._host)
        self.run()

    @property
    def coordinator(self) -> Any:
        """The current instance; after a reset another."""
        return self._made[-1]

    @property
    def is_active(self) -> bool:
        """Whether the topology runs: until something failed it."""
        return self.failure is None

    def evaluation(
        self,
        subtask: int | None = None,
        executor: str = "1",
        attempt_number: int = 0,
        stage_attempt: int = 0,
        partitions: int = 1,
    ) -> ScriptedEvaluation:
        """A task begins to evaluate the bound function: the coordinator hears `ready`.

        Its stage has so many partitions; the others are as in `Evaluation`.
        """
        number = next(self._numbers)
        made = ScriptedEvaluation(self, number, executor)
        self._evaluations[number] = made
        made.say(
            "READY",
            binding=self._binding,
            subtask=-1 if subtask is None else subtask,
            attempt=number,
            number=attempt_number,
            stage=0,
            partition=0 if subtask is None else subtask,
            stage_attempt=stage_attempt,
            partitions=partitions,
        )
        return made

    def lose_executor(self, executor: str, reason: str = "the executor is lost") -> None:
        """An executor is gone, with all evaluations there."""
        self._host.lost(executor, reason)
        self.run()

    def advance(self, seconds: float) -> None:
        """The clock goes on; calls that are due then are made, and acknowledgements are late."""
        until = self.now + seconds
        while self._timers and self._timers[0][0] <= until:
            self.now, _, call = heapq.heappop(self._timers)
            call()
            self.run()
        self.now = until
        self._host.expire()
        self.run()

    def checkpoint(self, checkpoint_id: int | None = None, meanwhile: Callable[[], Any] = lambda: None) -> Checkpoint:
        """As `Topology.checkpoint`. `meanwhile` is called when the coordinator was asked; then its state has to be there."""
        self._here.meanwhile = meanwhile
        try:
            return self.operators.checkpoint(checkpoint_id, 0)
        finally:
            self.run()

    def reset(self, checkpoint: Checkpoint | None = None) -> None:
        """As `Topology.reset`."""
        self.operators.reset(checkpoint)
        self.run()

    def close(self) -> None:
        """The topology ends."""
        self.operators.close("the topology has ended")
        self.run()

    def __enter__(self) -> CoordinatorHarness:
        return self

    def __exit__(
        self, type_: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def run(self) -> None:
        """Makes all calls that wait, and delivers what was sent; after threads of the test have used the coordinator."""
        if self._running:
            return  # whoever runs goes on with it
        self._running = True
        try:
            busy = True
            while busy:
                busy = False
                for loop in self._loops:
                    busy |= loop.run()
                busy |= self._wire.deliver()
        finally:
            self._running = False

    # -- What its operators and its coordinator run on

    def cancel_failed(self, cause: BaseException) -> None:
        """The topology failed."""
        self.failure = cause

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        """A timer of the manual clock."""
        heapq.heappush(self._timers, (self.now + seconds, next(self._numbers), call))

    def received(self, executor: str, frame: bytes) -> None:
        """A frame of an evaluation comes."""
        self._host.received(executor, frame)
        self.run()

    def deliver(self, frame: Frame) -> None:
        """A frame for an evaluation comes."""
        if (evaluation := self._evaluations.get(frame["evaluation"])) is not None:
            evaluation.take(frame)


class ScriptedEvaluation:
    """A task's evaluation, and what the test lets it do. Made by `CoordinatorHarness.evaluation`."""

    def __init__(self, harness: CoordinatorHarness, number: int, executor: str) -> None:
        self._harness, self._number, self._executor = harness, number, executor
        self._sequence = 0
        self._accepted = 0
        self._events: list[Any] = []
        self._replies: dict[int, tuple[str, bytes]] = {}
        #: Whether the coordinator closed its stream of events.
        self.ended = False
        #: Why its attempt has to fail, once it has to.
        self.poisoned: str | None = None
        #: Whether its executor says that it has an event. False: the acknowledgements are lost.
        self.acknowledges = True

    def send(self, event: Any) -> None:
        """As the task's `gateway.send`."""
        self._sequence += 1
        self.say("EVENTS", first=self._sequence, payloads=[pack(event, _LIMIT)])

    def request(self, request: Any) -> Any:
        """As the task's `gateway.request`. A reply that is not there at once is a `RequestTimeout`; `reply` has it later."""
        self._sequence += 1
        self.say("REQUEST", sequence=self._sequence, payload=pack(request, _LIMIT))
        return self.reply()

    def reply(self) -> Any:
        """The reply to the last request."""
        self._harness.run()
        if self._sequence not in self._replies:
            if self.poisoned is not None:
                raise EvaluationEnded(self.poisoned)
            raise RequestTimeout("the coordinator has not answered yet")
        outcome, payload = self._replies[self._sequence]
        if outcome == "ok":
            return unpack(payload)
        error, text = raised(payload)
        raise RequestFailed(text) from error

    def events(self) -> list[Any]:
        """The coordinator's events since it was last asked for them."""
        self._harness.run()
        events, self._events = self._events, []
        return events

    def finish(self) -> None:
        """Its function comes to its end."""
        self._sequence += 1
        self.say("FINISH", sequence=self._sequence, outcome="finished", reason="")

    def abandon(self) -> None:
        """Spark needs no more of its rows."""
        self._sequence += 1
        self.say("FINISH", sequence=self._sequence, outcome="abandoned", reason="Spark needed no more of its rows")

    def fail(self, reason: str = "its process is gone") -> None:
        """Its attempt fails."""
        self.say("ENDED", outcome="failed", reason=reason)

    # -- Frames

    def say(self, kind: str, **fields: Any) -> None:
        """A frame of this evaluation; a test of frames may send any."""
        self._harness.received(self._executor, encode(kind, evaluation=self._number, **fields))

    def take(self, frame: Frame) -> None:
        """A frame for it."""
        if frame.kind == "EVENTS":
            self._accepted = max(self._accepted, frame["first"] + len(frame["payloads"]) - 1)
            for payload in frame["payloads"]:
                if payload == END:
                    self.ended = True
                else:
                    self._events.append(unpack(payload))
            if self.acknowledges:
                self.say("ACCEPTED", sequence=self._accepted)
        elif frame.kind == "REPLY":
            self._replies[frame["sequence"]] = (frame["outcome"], frame["payload"])
        elif frame.kind == "ABORT":
            self.poisoned = frame["reason"]


class _Calls:
    """A coordinator's thread that is none: calls are made when the harness runs."""

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed
        self._waiting: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self._ended = False

    is_current = False

    def call(self, f: Callable[..., Any], *args: Any) -> None:
        if not self._ended:
            self._waiting.append((f, args))

    def end(self, _seconds: float) -> bool:
        self.run()
        self._ended = True
        return True

    def run(self) -> bool:
        ran = bool(self._waiting)
        while self._waiting:
            f, args = self._waiting.pop(0)
            try:
                f(*args)
            except Exception as error:
                self._failed(error)
        return ran


class _InBackground:
    """Calls at once, and timers of the manual clock."""

    def __init__(self, harness: CoordinatorHarness) -> None:
        self._harness, self._closed = harness, False

    def submit(self, f: Callable[[], None]) -> None:
        if not self._closed:
            f()

    def later(self, seconds: float, f: Callable[[], None]) -> None:
        self._harness.later(seconds, lambda: self.submit(f))

    def close(self) -> None:
        self._closed = True


class _Here(Threads):
    """No threads."""

    def __init__(self, harness: CoordinatorHarness) -> None:
        self._harness = harness
        self.meanwhile: Callable[[], Any] = lambda: None

    def loop(self, name: str, failed: Callable[[BaseException], None], owner: Owner) -> _Calls:
        made = _Calls(failed)
        self._harness._loops.append(made)
        return made

    def background(self, name: str) -> _InBackground:
        return _InBackground(self._harness)

    def wait(self, futures: Iterable[Future[Any]], seconds: float) -> Collection[Future[Any]]:
        self._harness.run()
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        self._harness.run()
        return super().wait(futures, seconds)


class _Wire:
    """What is sent to executors comes to the scripted evaluations when the harness runs."""

    def __init__(self, harness: CoordinatorHarness) -> None:
        self._harness = harness
        self._waiting: list[bytes] = []
        self._dirty: dict[Gateway, None] = {}

    def send(self, executor: str, frame: bytes) -> None:
        self._gather()
        self._waiting.append(frame)

    def dirty(self, gateway: Gateway) -> None:
        self._dirty[gateway] = None

    def flush(self) -> None:
        """Nothing: it is delivered when the harness runs."""

    def deliver(self) -> bool:
        self._gather()
        frames, self._waiting = self._waiting, []
        for frame in decode_all(b"".join(frames)):
            self._harness.deliver(frame)
        return bool(frames)

    def _gather(self) -> None:
        for gateway in tuple(self._dirty):
            while (frame := gateway.take()) is not None:
                self._waiting.append(frame)
        self._dirty.clear()
