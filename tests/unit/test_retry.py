"""The retry policies of recovery: which errors are retried, with which pauses, and for how long."""

from __future__ import annotations

import itertools

import pytest

from stagecrew.errors import (
    CommitPending,
    JobError,
    PossiblyInconsistentError,
    StateCorrupt,
    StateStorageError,
    StoreConflict,
    StoreUnavailable,
)
from stagecrew.recovery import retry


class FakeTime:
    """A clock that only `sleep` advances."""

    def __init__(self):
        self.now, self.pauses = 0.0, []

    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.pauses.append(seconds)
        self.now += seconds


class Operation:
    """An operation that raises the given errors in turn, and then returns 7."""

    def __init__(self, *errors):
        self.errors, self.calls = list(errors), 0

    def __call__(self):
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return 7


@pytest.fixture
def time():
    return FakeTime()


@pytest.fixture(autouse=True)
def pause(monkeypatch):
    """Sets the pause that these tests expect, because other test modules set it to 0."""
    monkeypatch.setattr(retry, "_PAUSE", 2.0)


def retry_until(operation, timeout, time):
    return retry.retry_until(operation, "the test waits", timeout, clock=time.clock, sleep=time.sleep)


def test_an_unavailable_store_is_retried_every_two_seconds(time, caplog):
    """While a store is unavailable, its operation is retried every two seconds. Each pause is logged with the
    description of the waiting work."""
    operation = Operation(*[StoreUnavailable("away")] * 3)
    assert retry_until(operation, 600.0, time) == 7
    assert (operation.calls, time.pauses) == (4, [2.0, 2.0, 2.0])
    assert [record.getMessage() for record in caplog.records] == ["the test waits: away"] * 3


def test_the_last_error_is_raised_at_the_deadline(time):
    """The first try that ends at the deadline or later is the last one, and its error is raised."""
    operation = Operation(*[StateStorageError(str(number)) for number in range(100)])
    with pytest.raises(StateStorageError, match=r"^3$"):
        retry_until(operation, 5.0, time)
    assert time.now == 6.0


def test_an_unknown_outcome_is_repeated_three_times_without_a_pause(time):
    """An operation with an unknown outcome is tried three times without a pause, even with a timeout of 0."""
    operation = Operation(*[PossiblyInconsistentError("lost")] * 2)
    assert retry_until(operation, 0.0, time) == 7
    assert time.pauses == []
    operation = Operation(*[PossiblyInconsistentError("lost")] * 5)
    with pytest.raises(PossiblyInconsistentError, match=r"^lost$"):
        retry_until(operation, 0.0, time)
    assert (operation.calls, time.pauses) == (3, [])
    operation = Operation(*[PossiblyInconsistentError("lost")] * 5)
    assert retry_until(operation, 60.0, time) == 7
    assert time.pauses == [2.0]


def test_an_outcome_stays_unknown_after_a_definite_error(time):
    """If an outcome was unknown and a later try was certainly not applied, the outcome stays unknown. The error
    contains both messages."""
    operation = Operation(PossiblyInconsistentError("lost"), StoreUnavailable("away"))
    with pytest.raises(PossiblyInconsistentError, match="lost; then: away"):
        retry_until(operation, 0.0, time)


@pytest.mark.parametrize("error", [StateCorrupt("cut short"), StoreConflict("a"), JobError("b"), KeyError("c")])
def test_other_errors_are_raised_at_once(time, error):
    """A corrupt state, a conflict or any unexpected error is raised without another try."""
    operation = Operation(error)
    with pytest.raises(type(error)) as raised:
        retry_until(operation, 600.0, time)
    assert raised.value is error
    assert operation.calls == 1


def test_an_interrupt_ends_the_retries(time):
    """A KeyboardInterrupt in an operation or in a pause is raised immediately."""

    def interrupted(seconds):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        retry_until(Operation(KeyboardInterrupt()), 600.0, time)
    operation = Operation(StoreUnavailable("away"))
    with pytest.raises(KeyboardInterrupt):
        retry.retry_until(operation, "the test waits", 600.0, clock=time.clock, sleep=interrupted)
    assert operation.calls == 1


def test_rounds_are_repeated_while_all_errors_are_transient(time):
    """Rounds are repeated while all their errors are transient. A round that starts after the deadline is the last one,
    and `last` is true for it. Any other error ends the rounds and is raised."""
    rounds = []

    def work(last):
        rounds.append(last)
        return [] if len(rounds) == 3 else [CommitPending("away"), StoreUnavailable("away")]

    retry.retry_rounds(work, 600.0, clock=time.clock, sleep=time.sleep)
    assert (rounds, time.pauses) == ([False] * 3, [2.0, 2.0])
    rounds.clear()
    with pytest.raises(CommitPending):
        retry.retry_rounds(
            lambda last: rounds.append(last) or [CommitPending("away")], 3.0, clock=time.clock, sleep=time.sleep
        )
    assert rounds == [False, False, True]
    rounds.clear()
    error = JobError("not transient")
    with pytest.raises(JobError) as raised:
        retry.retry_rounds(
            lambda last: rounds.append(last) or [error, CommitPending("away")], 3.0, clock=time.clock, sleep=time.sleep
        )
    assert (rounds, raised.value) == ([False], error)


def test_an_error_with_a_corrupt_cause_is_not_transient():
    """An error caused by a corrupt state is not transient, because a corrupt record cannot be read later either."""
    error = CommitPending("its record cannot be read")
    assert retry.is_transient(error)
    error.__cause__ = StateCorrupt("cut short")
    assert not retry.is_transient(error)


def test_conflicts_are_retried_at_once_and_not_forever(time):
    """Conflicts are retried without a pause, until the number of tries or the deadline is reached."""
    operation = Operation(*[StoreConflict("a")] * 4)
    assert retry.retry_on(operation, StoreConflict, tries=5) == 7
    with pytest.raises(StoreConflict):
        retry.retry_on(Operation(*[StoreConflict("a")] * 5), StoreConflict, tries=5)
    ticks = itertools.count()
    operation = Operation(*[StoreConflict("a")] * 9)
    with pytest.raises(StoreConflict):
        retry.retry_on(operation, StoreConflict, deadline=3, clock=lambda: next(ticks))
    assert operation.calls == 4


def test_an_operation_is_repeated_while_it_returns_none():
    """An operation is repeated while it returns None. If every try returns None, the result is None."""
    results = iter([None, None, 3, 4])
    assert retry.retry_if_none(lambda: next(results), 5) == 3
    calls = []
    assert retry.retry_if_none(lambda: calls.append(1), 4) is None
    assert len(calls) == 4


def test_a_campaign_backs_off_until_the_store_responds(time):
    """The pauses between campaigns double from 0.1 s to at most 5 s. A candidate that is closing does not campaign
    again."""
    results = iter([False] * 8 + [True])
    retry.campaign_backoff(lambda: next(results), lambda: False, time.sleep)
    assert time.pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0])
    time.pauses.clear()
    retry.campaign_backoff(lambda: False, lambda: True, time.sleep)
    assert time.pauses == []
