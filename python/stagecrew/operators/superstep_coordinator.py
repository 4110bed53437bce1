"""The coordinator of supersteps collects the values of each step, reduces them, and sends all tasks the result."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final

from stagecrew.coordination.contract import Coordinator
from stagecrew.coordination.evaluation import Evaluation
from stagecrew.errors import OperatorFailed
from stagecrew.observability.error_summary import error_text
from stagecrew.observability.spans import EndedSpan, SlowestSpans, topology_traceparent
from stagecrew.operators.reducers import ReducerCall, reduced
from stagecrew.operators.superstep_group import SuperstepGroup
from stagecrew.operators.superstep_messages import IN_PIECES, PIECE, WHOLE, pickled, split_into_pieces
from stagecrew.wire.serialization import Packed, packed

if TYPE_CHECKING:
    from stagecrew.coordination.context import CoordinatorContext
    from stagecrew.coordination.gateway import Gateway

__all__ = ["StopWhen", "SuperstepCoordinator"]

#: The period, in seconds, of the check for late subtasks.
_WATCH: Final = 1.0

#: Called with the number and the result of each step. Returns whether the tasks must stop.
StopWhen = Callable[[int, Any], bool]


class SuperstepCoordinator(Coordinator):
    """Runs the supersteps of each stage attempt.

    If a task fails, its stage attempt ends, and the next stage attempt begins at step 0.
    """

    kind = "supersteps"

    def __init__(
        self, context: CoordinatorContext, stop_when: StopWhen | None, timeout: float, piece: int = PIECE
    ) -> None:
        super().__init__(context)
        self._stop_when, self._timeout, self._piece = stop_when, timeout, piece
        self._attempts: dict[tuple[int, int], _StageAttempt] = {}  # by stage and attempt number
        self._pieces: dict[Evaluation, list[bytes]] = {}

    def start(self) -> None:
        """See `Coordinator`."""
        self.context.every(min(_WATCH, self._timeout / 4), self._fail_late_steps, while_live=True)

    def ready(self, evaluation: Evaluation, gateway: Gateway) -> None:
        """See `Coordinator`. A new stage attempt ends the earlier ones."""
        stage, number = evaluation.stage, evaluation.stage_attempt
        for earlier in [key for key in self._attempts if key[0] == stage and key[1] < number]:
            self._attempts.pop(earlier).fail(f"attempt {earlier[1]} at stage {stage} has ended: the stage runs again")
        is_newest = not any(key[0] == stage and key[1] > number for key in self._attempts)
        if (stage, number) not in self._attempts and is_newest:
            self._attempts[stage, number] = _StageAttempt(
                f"operator {self.context.operator!r}",
                evaluation.partitions,
                _step_spans(self.context, stage, number),
            )

    def failed(self, evaluation: Evaluation, reason: str) -> None:
        """See `Coordinator`. Spark runs the stage again, so the other tasks of the attempt get an error."""
        self._pieces.pop(evaluation, None)
        if (attempt := self._attempt_of(evaluation)) is not None:
            attempt.fail(f"subtask {evaluation.subtask} failed, and the stage runs again: {reason}")

    def finished(self, evaluation: Evaluation) -> None:
        """See `Coordinator`."""
        attempt = self._attempt_of(evaluation)
        if attempt is None or attempt.failure is not None:  # Spark runs the whole stage again
            return
        if self._or_fail_topology(attempt, attempt.group.end, evaluation):
            self._attempts.pop((evaluation.stage, evaluation.stage_attempt)).close_spans()

    def abandoned(self, evaluation: Evaluation) -> None:
        """See `Coordinator`.

        The shuffle after the stage reads all rows, so a task that was not read to its end has failed.
        """
        self.failed(evaluation, "Spark stopped reading its rows")

    def handle_event(self, evaluation: Evaluation, event: bytes) -> None:
        """Handles a piece of a request that is too large for one message."""
        self._pieces.setdefault(evaluation, []).append(event)

    def handle_request(self, evaluation: Evaluation, request: bytes) -> Future[Packed] | Packed:
        """Handles a task's value for a step, or its request for the next piece of a result."""
        if (pieces := self._pieces.pop(evaluation, None)) is not None:
            request = b"".join([*pieces, request])
        attempt = self._attempt_of(evaluation)
        if attempt is None or attempt.failure is not None:
            raise OperatorFailed(
                f"operator {self.context.operator!r}: subtask {evaluation.subtask} belongs to an attempt at its stage "
                "that has ended" + ("" if attempt is None else f": {attempt.failure}")
            )
        kind, *details = pickle.loads(request)
        if kind == "piece":
            return attempt.piece(*details)
        return self._add(attempt, evaluation, *details)

    def _add(
        self, attempt: _StageAttempt, evaluation: Evaluation, step: int, members: int, call: tuple[Any, ...], value: Any
    ) -> Future[Packed]:
        if members < attempt.group.subtasks:
            # After a loss, Spark reruns only the tasks whose output is lost. If one of them fails, it reruns all.
            raise OperatorFailed(
                f"operator {self.context.operator!r}: Spark runs {members} of {attempt.group.subtasks} tasks of stage "
                f"{evaluation.stage} again, which cannot go on without the others; this attempt fails so that all run "
                "again"
            )
        reply: Future[Packed] = Future()
        if not attempt.waiting:
            attempt.since = time.monotonic()
            if attempt.spans is not None:
                attempt.spans.begin(step)
        attempt.waiting[evaluation] = reply
        reducer = ReducerCall(*call)
        values = self._or_fail_topology(attempt, attempt.group.add, evaluation, step, reducer, value)
        if values is not None:
            self._finish_step(attempt, step, reducer, values)
        return reply

    def _finish_step(self, attempt: _StageAttempt, step: int, reducer: ReducerCall, values: list[Any]) -> None:
        try:
            value = reduced(reducer, values)
            if self._stop_when is not None and not attempt.is_stopped:
                attempt.is_stopped = bool(self._stop_when(step, value))
            result = pickled((attempt.is_stopped, value))
        except Exception as error:
            failure = OperatorFailed(
                f"operator {self.context.operator!r}: step {step} could not be reduced: {error_text(error)}"
            )
            failure.__cause__ = error
            self._fail_topology(attempt, failure)
            raise failure from error
        if attempt.spans is not None:
            attempt.spans.end(step, "ok")
        self.context.report(step=step + 1, **({"stopped": True} if attempt.is_stopped else {}))
        attempt.reply(result, self._piece)

    def _or_fail_topology(
        self, attempt: _StageAttempt, change: Callable[..., Any], evaluation: Evaluation, *args: Any
    ) -> Any:
        """Changes the group. An error fails the topology, because the next stage attempt would fail in the same way."""
        try:
            return change(evaluation.subtask, *args)
        except OperatorFailed as error:
            self._fail_topology(attempt, error)
            raise

    def _fail_topology(self, attempt: _StageAttempt, error: OperatorFailed) -> None:
        self.context.fail(error)
        attempt.fail(str(error))

    def _attempt_of(self, evaluation: Evaluation) -> _StageAttempt | None:
        return self._attempts.get((evaluation.stage, evaluation.stage_attempt))

    def _fail_late_steps(self) -> None:
        for (stage, number), attempt in self._attempts.items():
            missing = attempt.group.missing
            if missing and attempt.failure is None and time.monotonic() - attempt.since > self._timeout:
                error = OperatorFailed(
                    f"operator {self.context.operator!r}, stage {stage}, attempt {number}: for {self._timeout:g} s "
                    f"{len(attempt.waiting)} subtasks have waited in step {attempt.group.step} for these: "
                    f"{_listed(missing)}. Raise timeout= if a step may take longer"
                )
                self._fail_topology(attempt, error)

    def close(self) -> None:
        """See `Coordinator`."""
        for attempt in self._attempts.values():
            attempt.close_spans()

    def waits_for(self) -> str:
        """See `Coordinator`."""
        groups = [(one.group, len(one.waiting)) for one in self._attempts.values() if one.failure is None]
        return "; ".join(
            f"subtask {_listed(group.missing)}, which {waiting} of {group.subtasks} wait for in step {group.step}"
            for group, waiting in groups
            if group.missing
        )


def _listed(subtasks: list[int]) -> str:
    return ", ".join(map(str, subtasks[:10])) + (", ..." if len(subtasks) > 10 else "")


def _step_spans(context: CoordinatorContext, stage: int, stage_attempt: int) -> SlowestSpans | None:
    """Returns the spans of a stage attempt's steps, or None if its topology is not traced.

    A span begins with the first subtask's value, and ends with the result. Its key is the number of the step.
    """
    traceparent = topology_traceparent(context._topology_id)
    if traceparent is None:
        return None
    attributes = {"stagecrew.stage": stage, "stagecrew.stage_attempt": stage_attempt}

    def make(step: int, started: int, ended: int, outcome: str) -> EndedSpan:
        error = "its stage attempt ended before the result" if outcome == "lost" else ""
        return EndedSpan(
            f"superstep {context.operator}", traceparent, started, ended, outcome, error,
            attributes | {"stagecrew.step": step},
        )  # fmt: skip

    return SlowestSpans(make)


class _StageAttempt:
    """One attempt at a stage: its group, the requests that wait for the result of a step, and the last result."""

    def __init__(self, name: str, subtasks: int, spans: SlowestSpans | None) -> None:
        self.group = SuperstepGroup(name, subtasks)
        #: None if the topology is not traced.
        self.spans = spans
        self.waiting: dict[Evaluation, Future[Packed]] = {}
        self.since = 0.0  # when the first subtask entered the current step
        self.is_stopped = False
        self.failure: str | None = None
        self._pieces: list[Packed] = []

    def reply(self, result: bytes, piece: int) -> None:
        """Sends all subtasks the result, or the number of its pieces.

        Keeps one copy of the pieces for all subtasks, until the next result.
        """
        self._pieces = []
        reply = packed(WHOLE, result)
        if len(result) > piece:
            self._pieces = [packed(part) for part in split_into_pieces(result, piece)]
            reply = packed(IN_PIECES % len(self._pieces))
        waiting, self.waiting = self.waiting, {}
        for future in waiting.values():
            future.set_result(reply)

    def close_spans(self) -> None:
        """Ends the spans of the steps."""
        if self.spans is not None:
            self.spans.close()

    def piece(self, number: int) -> Packed:
        """One piece of the last result. Still kept, because no step ends before all subtasks have the last result."""
        return self._pieces[number]

    def fail(self, reason: str) -> None:
        """Ends the attempt: all waiting and later requests of its subtasks fail."""
        self.failure = self.failure or reason
        self.close_spans()
        waiting, self.waiting = self.waiting, {}
        for future in waiting.values():
            future.set_exception(OperatorFailed(reason))
