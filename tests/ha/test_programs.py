"""Whole programs of jobs give the same results, rows and errors whether or not their drivers are killed."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stagecrew.coordination.program_path import Uses
from support.job_program_histories import history
from support.job_program_strategy import programs

#: The errors with which statements end a program.
ERRORS = {"raise": "ValueError: the program's own error", "nameless": "OperatorMisused: operator"}


def differences(program, seed, *kills):
    """Returns the first list of kills that changes the outcome, with both outcomes, or None."""
    undisturbed, points = history(program, seed)
    errors = tuple(error for statement, error in ERRORS.items() if f"'{statement}'" in str(program))
    assert undisturbed.state == "succeeded" or undisturbed.reason.startswith(errors), undisturbed
    for killed_at in [(), *kills]:
        # Without kills, another seed changes the order of the threads.
        points_killed = [1 + one * len(points) // 1000 for one in killed_at]
        other, _ = history(program, seed if killed_at else seed + 1, *points_killed)
        if other != undisturbed:
            return {
                "killed": [(number, points[number - 1]) for number in points_killed],
                "gives": other,
                "instead of": undisturbed,
            }
    return None


def difference_at_each_third_point(program):
    """Returns the first difference that a single kill makes, trying every third point."""
    _, points = history(program, 1)
    return differences(program, 1, *([-(-1000 * i // len(points))] for i in range(0, len(points), 3)))


#: Programs that once gave other results after a kill: splits with an action on some rows and on all rows, a session
#: use inside a step and one outside of it, and one operator in four batches.
REGRESSIONS = {
    f"splits-{limit}": (
        (
            "topology",
            "t",
            (
                ("step", "a", (("use", "a", ("splits", "a", 3)), ("act", "a", None))),
                ("use", "x", ("splits", "x", 3)),
                ("use", "y", ("splits", "y", 3)),
                ("step", "b", (("act", "x", None),)),
                ("step", "c", (("act", "y", None),)),
                ("step", "d", (("act", "y", limit),)),
            ),
        ),
    )
    for limit in (2, None)
}
REGRESSIONS["session"] = (
    ("step", "a", (("use", "u", ("session", (10,))), ("act", "u", None))),
    ("use", "v", ("session", (5,))),
    ("step", "b", (("act", "v", None),)),
)
REGRESSIONS["batches"] = (("stream", "q", 4, False, None, (), (("use", "u", ("session", (5,))), ("act", "u", None))),)


@pytest.mark.parametrize("program", REGRESSIONS.values(), ids=REGRESSIONS)
def test_earlier_failures_give_the_same_results_at_every_kill(program):
    """Programs that once gave other results after a kill now give the same results wherever they are killed."""
    assert difference_at_each_third_point(program) is None


@pytest.mark.parametrize("program", REGRESSIONS.values(), ids=REGRESSIONS)
def test_the_simulation_detects_uses_identified_by_their_order(monkeypatch, program):
    """If a use were identified by its order in the run, kills would change the results of these programs."""

    def key(self, operator, name=None, otherwise=None):
        self._counts[operator] = self._counts.get(operator, 0) + 1
        return f"{operator}/{self._counts[operator]}"

    monkeypatch.setattr(Uses, "key", key)
    assert difference_at_each_third_point(program) is not None


with_drawn_programs = given(
    program=programs(),
    seed=st.integers(0, 1 << 16),
    kills=st.lists(st.lists(st.integers(0, 999), min_size=1, max_size=3), min_size=4, max_size=10),
)
NO_DEADLINE = settings(database=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@settings(NO_DEADLINE, max_examples=40, derandomize=True)
@with_drawn_programs
def test_programs_give_the_same_results_at_any_kill(program, seed, kills):
    """A program gives the same results, rows and errors wherever its runs are killed, in any order of its threads."""
    assert differences(program, seed, *kills) is None


@pytest.mark.long
@settings(NO_DEADLINE, max_examples=2000)
@with_drawn_programs
def test_two_thousand_programs_give_the_same_results_at_any_kill(program, seed, kills):
    """Two thousand programs, which differ in each test run, give the same results wherever their runs are killed."""
    assert differences(program, seed, *kills) is None
