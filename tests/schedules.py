"""Schedules of commits, at each moment: a driver that dies there, or fails once, or pauses and goes on behind another; two at once.

Each takes `make`, which makes a trial of that name, and `every`: how many moments lie between those that it takes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sinks import SCHEMA, SEED, Around, Driver, Killed, Tasks, Trial, undisturbed
from stagecrew.errors import CommitConflict, CommitFailed, CommitPending, CommitSuperseded, CommitUnknown
from stagecrew.operators.commits import CommitReport, commit

__all__ = [
    "at_once",
    "failing_at_each_moment",
    "going_on_at_each_moment",
    "going_on_behind_a_refusal",
    "killed_at_each_moment",
    "raising_once",
]

Make = Callable[[str], Trial]


def killed_at_each_moment(make: Make, every: int = 1) -> None:
    """Before and after every write: readers see all rows or none; the next driver brings all, once, and leaves nothing.

    A repeat behind that changes nothing.
    """
    names = undisturbed(make("undisturbed"))
    for moment in range(1, len(names) + 1, every):
        trial, driver, tasks = make(f"killed-{moment}"), Driver(dies_at=moment), Tasks(SEED)
        with pytest.raises(Killed):
            trial.drive(driver, tasks)
        assert driver.names == names[:moment]
        _visible_behind(names, moment, trial, tasks)
        trial.drive(Driver(), tasks)
        _all_once(trial, tasks, driver)


def failing_at_each_moment(make: Make, every: int = 1) -> None:
    """A write that raises once, before or after its effect: before the decision that is the error, and nothing is visible.

    Behind it the driver itself goes on, and brings all. Where an abort is written, nothing is left; a repeat brings all in each case.
    """
    names = undisturbed(make("undisturbed"))
    for moment in range(1, len(names) + 1, every):
        trial, driver, tasks = make(f"failing-{moment}"), Driver(raises_at=moment), Tasks(SEED)
        if moment <= names.index("before commit"):
            with pytest.raises((OSError, CommitFailed, CommitUnknown)):
                trial.drive(driver, tasks)
            assert trial.visible() == []
            asked = moment > names.index("before commit") - 2  # nobody knows whether it is decided: nothing is deleted
            assert asked or trial.left() == [], driver.names
        else:
            assert trial.drive(driver, tasks).rows == 40
            assert sorted(trial.visible()) == tasks.expected
            assert trial.left() == [] or moment > names.index("before discard"), driver.names
        trial.drive(Driver(), tasks)
        _all_once(trial, tasks, driver)


def raising_once(make: Make) -> None:
    """A commit that raises before it does anything, or when all is done: it is tried again, and all is there once.

    When it raises for good, what was staged stays, and a later driver goes on with it.
    """
    for effect in ("before", "after"):
        for times in (1, 100):
            trial, tasks, pauses = make(f"raises-{effect}-{times}"), Tasks(1), []
            sink = Raises(trial.make_sink(), effect, times)
            run = lambda staging, trial=trial, tasks=tasks: tasks.run(trial.make_sink(), staging)  # noqa: E731
            if times == 1:
                report = commit(sink, trial.commit_log, "c 1", SCHEMA, run, sleep=pauses.append)
                assert (report.rows, report.repeated, len(pauses)) == (40, False, 1)
            else:
                with pytest.raises(CommitPending, match="is decided, but could not be done: OSError: the network"):
                    commit(sink, trial.commit_log, "c 1", SCHEMA, run, sleep=pauses.append)
                assert len(pauses) == 3
                assert sorted(trial.visible()) == (tasks.expected if effect == "after" else [])
                sink.times = 0
                assert commit(sink, trial.commit_log, "c 1", SCHEMA, lambda staging: 1 / 0).repeated
            _all_once(trial, tasks)


class Raises(Around):
    """A sink whose commit raises so often, before or after its effect."""

    def __init__(self, sink: Any, effect: str, times: int) -> None:
        super().__init__(sink)
        self._effect, self.times = effect, times

    def commit(self, staging: Any, messages: Any) -> None:
        if self._effect == "after":
            self._sink.commit(staging, messages)
        if self.times:
            self.times -= 1
            raise OSError("the network is down")
        self._sink.commit(staging, messages)


def going_on_at_each_moment(make: Make, every: int = 1) -> None:
    """An old driver that pauses, and goes on when a new one has committed, or aborted: it changes nothing, and leaves nothing.

    Where it has decided nobody can abort any more; where it has not it fails, with all staged as another has taken over.
    """
    names = undisturbed(make("undisturbed"))
    for moment in range(1, len(names) + 1, every):
        decided = moment > names.index("before commit") - 1  # the moment before is that behind the decision's write
        for ends in ("commits",) if decided else ("commits", "aborts"):
            trial, old, tasks = (
                make(f"going-on-{moment}-{ends}"),
                Driver(pauses_at=moment),
                Tasks(SEED, zombies=False),
            )
            with paused(trial, old, tasks) as outcome:
                if not old.paused.is_set():
                    continue  # it would hold what the new one waits for
                if ends == "commits":
                    trial.drive(Driver(), tasks)
                else:
                    with pytest.raises(ZeroDivisionError):
                        commit(trial.make_sink(), trial.commit_log, "c 1", SCHEMA, lambda staging: 1 / 0)
                before = trial.state(), trial.commit_log.read("c 1"), sorted(trial.visible())
                assert before[2] == (tasks.expected if ends == "commits" else [])
            assert (trial.state(), trial.commit_log.read("c 1"), sorted(trial.visible())) == before, old.names
            assert trial.left() == [], old.names
            expected = CommitReport if decided else CommitSuperseded if "staged" in old.names else CommitFailed
            assert isinstance(outcome[0], expected), (old.names, outcome)


@contextlib.contextmanager
def paused(trial: Trial, old: Driver, tasks: Tasks, commit_id: str = "c 1") -> Iterator[list[Any]]:
    """As long as a driver pauses. Yields what will have come of it: its report, or what it raised."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(trial.drive(old, tasks, commit_id))
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while thread.is_alive() and not old.paused.wait(0.01):
        pass
    try:
        yield outcome
    finally:
        old.goes_on.set()
        thread.join(60)
    assert not thread.is_alive()


def going_on_behind_a_refusal(make: Make, refuse: Callable[[Trial], Callable[[], None]], stays: bool) -> None:
    """An old driver that pauses in its commit until a new one was refused: it says so, changes nothing and leaves nothing.

    `refuse` puts something in the way, and answers what takes it away: before the old one goes on, or behind it.
    """
    names = undisturbed(make("undisturbed"))
    seen = 0
    for moment in range(names.index("before commit") + 1, names.index("after commit") + 1):
        trial, old, tasks = make(f"refused-{moment}"), Driver(pauses_at=moment), Tasks(SEED, zombies=False)
        with paused(trial, old, tasks) as outcome:
            if trial.visible():
                break  # nobody can be refused any more
            if not old.paused.is_set():
                continue
            allow = refuse(trial)
            with pytest.raises(CommitConflict):
                trial.drive(Driver(), tasks)
            if not stays:
                allow()
        if stays:
            allow()
        assert isinstance(outcome[0], (CommitSuperseded, CommitConflict)), (old.names, outcome)
        assert trial.visible() == [], old.names
        assert trial.left() == [], old.names
        trial.drive(Driver(), tasks)
        _all_once(trial, tasks, old)
        seen += 1
    assert seen > 1


def at_once(trial: Trial, moment: str) -> list[Any]:
    """Two commits to one place, neither of which goes on there before the other has come: both land, or one is told of a conflict.

    Nothing is left. `moment` is one before any is done, such as "staged". Gives the conflicts.
    """
    one, other = Driver(pauses_at=moment), Driver(pauses_at=moment)
    with paused(trial, one, Tasks(1), "one") as first, paused(trial, other, Tasks(2), "other") as second:
        assert one.paused.is_set()
        assert other.paused.is_set()
        assert trial.visible() == []
        one.goes_on.set(), other.goes_on.set()
    outcomes = [*first, *second]
    conflicts = [outcome for outcome in outcomes if isinstance(outcome, CommitConflict)]
    assert len(conflicts) <= 1
    assert sum(getattr(outcome, "rows", 0) for outcome in outcomes) == 40 * (2 - len(conflicts)), outcomes
    assert sorted(trial.visible()) == sorted(Tasks(1).expected * (2 - len(conflicts)))
    assert trial.left() == []
    return conflicts


def _visible_behind(names: list[str], moment: int, trial: Trial, tasks: Tasks) -> None:
    """Behind a moment: nothing before the commit, all behind it, and never a part."""
    seen = sorted(trial.visible())
    assert seen in ([], tasks.expected), "half of it is visible"
    if moment <= names.index("before commit") + 1:
        assert seen == []
    if moment > names.index("after commit"):
        assert seen == tasks.expected


def _all_once(trial: Trial, tasks: Tasks, driver: Driver | None = None) -> None:
    assert sorted(trial.visible()) == tasks.expected, driver and driver.names
    assert trial.left() == [], driver and driver.names
    trial.repeat_changes_nothing()
    assert sorted(trial.visible()) == tasks.expected
    assert trial.left() == []
