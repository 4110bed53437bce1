"""The retry policies of recovery, built on tenacity: which errors are retried, with which pauses, and for how long.

Unless its docstring says otherwise, a policy that gives up raises the error of the last try. An error that the policy
does not retry is raised immediately.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    retry_if_exception_type,
    retry_if_result,
    stop_after_attempt,
    stop_never,
    wait_exponential,
    wait_fixed,
)

from stagecrew.errors import (
    CommitPending,
    CommitUnknown,
    ConfigurationError,
    LeadershipLost,
    PossiblyInconsistentError,
    SessionLost,
    StateCorrupt,
    StateStorageError,
    StoreRefused,
    StoreUnavailable,
    StoreUnsupported,
)

__all__ = [
    "NOT_APPLIED",
    "RETRY_TIMEOUT",
    "campaign_backoff",
    "is_transient",
    "retry_if_none",
    "retry_on",
    "retry_rounds",
    "retry_until",
    "retry_when",
]

_log = logging.getLogger("stagecrew")

T = TypeVar("T")
Clock = Callable[[], float]
Sleep = Callable[[float], None]

#: How long a run retries to store what it has done, in seconds.
RETRY_TIMEOUT: Final = 600.0
#: The pause between two tries while a store, a storage or a sink is unavailable, in seconds.
_PAUSE: Final = 2.0
#: How many times an operation with an unknown outcome is tried before a pause.
_IMMEDIATE_TRIES: Final = 3
#: The first and the longest pause before a candidate opens the store again, in seconds.
_CAMPAIGN_PAUSES: Final = (0.1, 5.0)

#: Errors of a transaction that was certainly not applied.
NOT_APPLIED: Final = (
    StoreUnavailable,
    SessionLost,
    StoreRefused,
    StoreUnsupported,
    LeadershipLost,
    ConfigurationError,
)
#: Errors after which another try can succeed: something is unavailable or full, or the outcome is unknown.
_TRANSIENT: Final = (
    StateStorageError,
    StoreUnavailable,
    StoreRefused,
    PossiblyInconsistentError,
    CommitPending,
    CommitUnknown,
)


def is_transient(error: BaseException) -> bool:
    """Returns whether another try in the same run could succeed. Corrupt state does not repair itself."""
    corrupt = isinstance(error, StateCorrupt) or isinstance(error.__cause__, StateCorrupt)
    return isinstance(error, _TRANSIENT) and not corrupt


def retry_until(
    operation: Callable[[], T],
    description: str,
    timeout: float,
    *,
    clock: Clock = time.monotonic,
    sleep: Sleep = time.sleep,
) -> T:
    """Repeats an idempotent operation while the store or the storage is unavailable or full, for `timeout` seconds.

    While its outcome is unknown, an operation is tried up to `_IMMEDIATE_TRIES` times before each pause. A timeout of 0
    allows no pause, and therefore only these tries. `description` describes the waiting work in the log.

    After an unknown outcome, only the operation itself can find out whether an earlier try was applied. If the last try
    was certainly not applied, the outcome of the earlier try is still unknown, so this raises
    `PossiblyInconsistentError`.
    """
    deadline = clock() + timeout
    unknown: list[PossiblyInconsistentError] = []

    def attempt() -> T:
        try:
            return operation()
        except PossiblyInconsistentError as error:
            unknown[:] = [error]
            raise

    def attempt_at_once() -> T:
        return retry_on(attempt, PossiblyInconsistentError, tries=_IMMEDIATE_TRIES)

    def is_retried(error: BaseException) -> bool:
        return isinstance(error, (StateStorageError, PossiblyInconsistentError, *NOT_APPLIED)) and is_transient(error)

    retrying = Retrying(
        retry=retry_if_exception(is_retried),
        wait=_pause,
        stop=lambda _: clock() >= deadline,
        sleep=sleep,
        before_sleep=lambda state: _log.warning("%s: %s", description, _error(state)),
        reraise=True,
    )
    try:
        return retrying(attempt_at_once)
    except (StateStorageError, *NOT_APPLIED) as error:
        if not unknown:
            raise
        raise PossiblyInconsistentError(f"{unknown[0]}; then: {error}") from error


def retry_rounds(
    work: Callable[[bool], Sequence[Exception]],
    timeout: float,
    *,
    clock: Clock = time.monotonic,
    sleep: Sleep = time.sleep,
) -> None:
    """Repeats a round of work until it returns no errors. Raises the first error of a round that is not repeated.

    A round is repeated if all its errors are transient. `work` receives whether this is the last round: the first round
    that starts at least `timeout` seconds after this call.
    """
    deadline = clock() + timeout

    def one_round() -> tuple[bool, Sequence[Exception]]:
        last = clock() >= deadline
        return last, work(last)

    retrying = Retrying(
        retry=retry_if_result(lambda result: result[1] and not result[0] and all(map(is_transient, result[1]))),
        wait=_pause,
        stop=stop_never,
        sleep=sleep,
    )
    _, errors = retrying(one_round)
    if errors:
        raise errors[0]


def retry_on(
    operation: Callable[[], T],
    *errors: type[Exception],
    tries: int | None = None,
    deadline: float | None = None,
    clock: Clock = time.monotonic,
) -> T:
    """Repeats an operation immediately after these errors, until `tries` tries or until `clock` reaches `deadline`."""

    def stop(state: RetryCallState) -> bool:
        return (tries is not None and state.attempt_number >= tries) or (deadline is not None and clock() >= deadline)

    return Retrying(retry=retry_if_exception_type(errors), stop=stop, sleep=_no_pause, reraise=True)(operation)


def retry_when(
    operation: Callable[[], T],
    is_retried: Callable[[BaseException], bool],
    pause: float,
    timeout: float,
    *,
    clock: Clock = time.monotonic,
    sleep: Sleep = time.sleep,
) -> T:
    """Repeats an operation every `pause` seconds after errors for which `is_retried` is true, for `timeout` seconds."""
    deadline = clock() + timeout
    return Retrying(
        retry=retry_if_exception(is_retried),
        wait=wait_fixed(pause),
        stop=lambda _: clock() > deadline,
        sleep=sleep,
        reraise=True,
    )(operation)


def retry_if_none(operation: Callable[[], T | None], tries: int | None = None) -> T | None:
    """Repeats an operation immediately while it returns None, up to `tries` tries. Returns its last result."""
    return Retrying(
        retry=retry_if_result(lambda result: result is None),
        stop=stop_never if tries is None else stop_after_attempt(tries),
        sleep=_no_pause,
        retry_error_callback=lambda _: None,
    )(operation)


def campaign_backoff(campaign: Callable[[], bool], is_closing: Callable[[], bool], sleep: Sleep) -> None:
    """Repeats a campaign with growing pauses until the store responds during one, or until the candidate closes."""
    first, longest = _CAMPAIGN_PAUSES
    Retrying(
        retry=retry_if_result(lambda responded: not responded),
        wait=wait_exponential(multiplier=first, max=longest),
        stop=lambda _: is_closing(),
        sleep=sleep,
        retry_error_callback=lambda _: None,
    )(campaign)


def _pause(_state: RetryCallState) -> float:
    return _PAUSE


def _no_pause(_seconds: float) -> None:
    """Does not sleep: the operation itself waits for the store, so the next try follows immediately."""


def _error(state: RetryCallState) -> BaseException | None:
    return None if state.outcome is None else state.outcome.exception()
