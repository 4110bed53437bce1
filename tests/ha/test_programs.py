"""Whole programs of jobs give the same results, rows and errors whether their drivers are killed or not."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stagecrew.coordination.program_path import Uses
from support.job_program_histories import history
from support.job_program_strategy import programs

#: The errors that statements end a program by.
ERRORS = {"raise": "ValueError: the program's own error", "nameless": "OperatorMisused: operator"}


def differences(program, seed, *kills):
    """The first kills after which something differs, with both outcomes."""
    without, points = history(program, seed)
    errors = tuple(error for statement, error in ERRORS.items() if f"'{statement}'" in str(program))
    assert without.state == "succeeded" or without.reason.startswith(errors), without
    for some in [(), *kills]:
        # Without any, the threads go on in another order.
        at = [1 + one * len(points) // 1000 for one in some]
        other, _ = history(program, seed if some else seed + 1, *at)
        if other != without:
            return {"killed": [(number, points[number - 1]) for number in at], "gives": other, "instead of": without}
    return None


def at_each_third_point(program):
    """The first difference that one kill makes, wherever it is."""
    _, points = history(program, 1)
    return differences(program, 1, *([-(-1000 * i // len(points))] for i in range(0, len(points), 3)))


#: The first program of issue 22 with an action of some rows, and of all; the second; and the use of one operator by four batches.
FOUND = {
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
FOUND["session"] = (
    ("step", "a", (("use", "u", ("session", (10,))), ("act", "u", None))),
    ("use", "v", ("session", (5,))),
    ("step", "b", (("act", "v", None),)),
)
FOUND["batches"] = (("stream", "q", 4, False, None, (), (("use", "u", ("session", (5,))), ("act", "u", None))),)


@pytest.mark.parametrize("program", FOUND.values(), ids=FOUND)
def test_programs_that_once_gave_other_results(program):
    """They give the same results wherever they are killed."""
    assert at_each_third_point(program) is None


@pytest.mark.parametrize("program", FOUND.values(), ids=FOUND)
def test_the_order_of_uses_is_no_identity(monkeypatch, program):
    """The simulation finds a wrong identity: where uses are known by their order in the run, a kill changes what these programs give."""

    def key(self, operator, name=None, otherwise=None):
        self._counts[operator] = self._counts.get(operator, 0) + 1
        return f"{operator}/{self._counts[operator]}"

    monkeypatch.setattr(Uses, "key", key)
    assert at_each_third_point(program) is not None


drawn = given(
    program=programs(),
    seed=st.integers(0, 1 << 16),
    kills=st.lists(st.lists(st.integers(0, 999), min_size=1, max_size=3), min_size=4, max_size=10),
)
unhurried = settings(
    deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@settings(unhurried, max_examples=100, derandomize=True)
@drawn
def test_programs(program, seed, kills):
    """A program gives the same results, rows and errors, wherever its runs are killed, and whatever the order of its threads."""
    assert differences(program, seed, *kills) is None


@pytest.mark.long
@settings(unhurried, max_examples=2000)
@drawn
def test_two_thousand_programs(program, seed, kills):
    """The same, of other programs each time."""
    assert differences(program, seed, *kills) is None
