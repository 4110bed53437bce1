"""A scripted evaluation, for which a test makes the calls of the task."""

from __future__ import annotations

from typing import Any, Final, Protocol

from stagecrew.errors import CoordinationTimeout, EvaluationEnded, RequestFailed
from stagecrew.wire.frames import Frame, encode
from stagecrew.wire.serialization import END, pack, raised, unpack

__all__ = ["MAX_EVENT", "ScriptedEvaluation"]

#: The largest event in bytes.
MAX_EVENT: Final = 16 << 20


class Executor(Protocol):
    """Passes on the frames of evaluations; the harness implements it."""

    def received(self, executor: str, frame: bytes) -> None:
        """Passes a frame to the host, and makes the calls that result."""

    def run(self) -> None:
        """Makes the coordinator's enqueued calls, and delivers its frames."""


class ScriptedEvaluation:
    """A task's evaluation. The test plays the part of the bound function.

    `CoordinatorHarness.evaluation` creates it. Each call returns when the coordinator has handled it.

    `ended` says whether the coordinator has closed the evaluation's stream of events. `abort_reason` says why the
    attempt must fail, and is None until then. Set `acknowledges` to False to lose the acknowledgements of events.

    Args:
        harness: Passes on the evaluation's frames.
        number: The evaluation's id.
        executor: The id of the evaluation's executor.

    Examples:
        >>> import stagecrew
        >>> from stagecrew.testing import CoordinatorHarness
        >>> class Echo(stagecrew.Coordinator):
        ...     def ready(self, evaluation, gateway):
        ...         self.gateway = gateway
        ...     def handle_event(self, evaluation, event):
        ...         self.gateway.send(event)
        >>> with CoordinatorHarness(Echo) as harness:
        ...     task = harness.evaluation(subtask=0)
        ...     task.send("hello")
        ...     task.events()
        ['hello']

    Not promised: the order of messages of several tasks, which varies on a cluster.
    """

    def __init__(self, harness: Executor, number: int, executor: str) -> None:
        self._harness, self._number, self._executor = harness, number, executor
        self._sequence = 0
        self._accepted = 0
        self._events: list[Any] = []
        self._replies: dict[int, tuple[str, bytes]] = {}
        self.ended = False
        self.abort_reason: str | None = None
        self.acknowledges = True

    def send(self, event: Any) -> None:
        """Sends an event, as the task's `gateway.send` does.

        Args:
            event: The event.

        Raises:
            EventRejected: The event cannot be pickled.
            EventRejected: The event is larger than 16 MiB.
        """
        self._sequence += 1
        self.send_frame("EVENTS", first=self._sequence, payloads=[pack(event, MAX_EVENT)])

    def request(self, request: Any) -> Any:
        """Sends a request, as the task's `gateway.request` does.

        Args:
            request: The request.

        Returns:
            The reply.

        Raises:
            CoordinationTimeout: There is no reply yet. `reply` returns it later.
            RequestFailed: The coordinator raised an exception, which is the cause.
            EvaluationEnded: The evaluation was aborted.
            EventRejected: The request cannot be pickled.
            EventRejected: The request is larger than 16 MiB.
        """
        self._sequence += 1
        self.send_frame("REQUEST", sequence=self._sequence, payload=pack(request, MAX_EVENT))
        return self.reply()

    def reply(self) -> Any:
        """Reads the reply to the last request.

        Returns:
            The reply.

        Raises:
            CoordinationTimeout: There is no reply yet.
            RequestFailed: The coordinator raised an exception, which is the cause.
            EvaluationEnded: The evaluation was aborted.
        """
        self._harness.run()
        if self._sequence not in self._replies:
            if self.abort_reason is not None:
                raise EvaluationEnded(self.abort_reason)
            raise CoordinationTimeout("the coordinator has not replied yet; call reply() when it has")
        outcome, payload = self._replies[self._sequence]
        if outcome == "ok":
            return unpack(payload)
        error, text = raised(payload)
        raise RequestFailed(text) from error

    def events(self) -> list[Any]:
        """Reads the coordinator's events.

        Returns:
            The events since the last call, in order.
        """
        self._harness.run()
        events, self._events = self._events, []
        return events

    def finish(self) -> None:
        """Ends the evaluation successfully, as when the bound function returns."""
        self._sequence += 1
        self.send_frame("FINISH", sequence=self._sequence, outcome="finished", reason="")

    def abandon(self) -> None:
        """Ends the evaluation early, as Spark does when it needs no more of its rows."""
        self._sequence += 1
        self.send_frame(
            "FINISH", sequence=self._sequence, outcome="abandoned", reason="Spark needed no more of its rows"
        )

    def fail(self, reason: str = "its process is gone") -> None:
        """Fails the evaluation's attempt.

        Args:
            reason: Why it failed.
        """
        self.send_frame("ENDED", outcome="failed", reason=reason)

    # -- Frames

    def send_frame(self, kind: str, **fields: Any) -> None:
        """Sends a frame of this evaluation to the host. For tests of the protocol.

        Args:
            kind: The frame's kind.
            **fields: Its fields, without `evaluation`.
        """
        self._harness.received(self._executor, encode(kind, evaluation=self._number, **fields))

    def receive_frame(self, frame: Frame) -> None:
        """Receives a frame from the host. The harness calls this.

        Args:
            frame: The frame.
        """
        if frame.kind == "EVENTS":
            self._accepted = max(self._accepted, frame["first"] + len(frame["payloads"]) - 1)
            for payload in frame["payloads"]:
                if payload == END:
                    self.ended = True
                else:
                    self._events.append(unpack(payload))
            if self.acknowledges:
                self.send_frame("ACCEPTED", sequence=self._accepted)
        elif frame.kind == "REPLY":
            self._replies[frame["sequence"]] = (frame["outcome"], frame["payload"])
        elif frame.kind == "ABORT":
            self.abort_reason = frame["reason"]
