"""Supersteps without Spark: which subtask reaches which step, and how values are reduced."""

from __future__ import annotations

import copy
import functools
import operator
import pickle
import threading
import tracemalloc
import types

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagecrew.errors import CoordinationTimeout, OperatorFailed, OperatorMisused, RequestFailed
from stagecrew.operators.reducers import ReducerCall, reduced, reducer_call
from stagecrew.operators.superstep_context import SuperstepContext
from stagecrew.operators.superstep_coordinator import SuperstepCoordinator
from stagecrew.operators.superstep_group import SuperstepGroup
from stagecrew.testing import CoordinatorHarness

SUM = ReducerCall("sum")


@settings(deadline=None)
@given(st.data())
def test_any_order(data):
    """In whatever order subtasks reach a step, the step has all values in the order of subtasks."""
    subtasks = data.draw(st.integers(1, 5))
    group = SuperstepGroup("x", subtasks)
    for step in range(data.draw(st.integers(0, 4))):
        order = data.draw(st.permutations(range(subtasks)))
        results = [group.add(subtask, step, SUM, (step, subtask)) for subtask in order]
        assert results[:-1] == [None] * (subtasks - 1)
        assert results[-1] == [(step, subtask) for subtask in range(subtasks)]
    for subtask in data.draw(st.permutations(range(subtasks))):
        last = group.end(subtask)
    assert last


@settings(deadline=None)
@given(st.data())
def test_a_different_number_of_calls(data):
    """If tasks call reduce a different number of times, the error names one that ended and one that waits."""
    subtasks = data.draw(st.integers(2, 4))
    calls = data.draw(
        st.lists(st.integers(0, 3), min_size=subtasks, max_size=subtasks).filter(lambda c: len(set(c)) > 1)
    )
    group, at, blocked, ended = SuperstepGroup("x", subtasks), [0] * subtasks, set(), set()
    with pytest.raises(OperatorFailed) as failed:
        while True:
            subtask = data.draw(st.sampled_from([s for s in range(subtasks) if s not in blocked and s not in ended]))
            if at[subtask] == calls[subtask]:
                ended.add(subtask)
                group.end(subtask)
            else:
                blocked.add(subtask)
                if group.add(subtask, at[subtask], SUM, 1) is not None:
                    at = [n + 1 for n in at]
                    blocked.clear()
    text = str(failed.value)
    assert "as often as the others" in text
    assert any(f"subtask {one} ended after {calls[one]} steps" in text for one in ended | set(range(subtasks)))


def test_other_differences():
    """Another reducer, another step, a second time: each is an error that names the subtask."""
    group = SuperstepGroup("operator 'x'", 3)
    group.add(1, 0, SUM, 1)
    for subtask, step, reducer, words in (
        (2, 0, ["max"], "subtask 2 reduces with 'max', but subtask 1 with 'sum'"),
        (2, 0, ["product", b"x"], "subtask 2 reduces with 'product', but subtask 1 with 'sum'"),
        (2, 1, ["sum"], "subtask 2 is at step 1, but the others are at step 0"),
        (1, 0, ["sum"], r"subtask 1 called reduce\(\) twice in step 0"),
    ):
        with pytest.raises(OperatorFailed, match=words):
            group.add(subtask, step, ReducerCall(*reducer), 1)
    assert group.missing == [0, 2]


@pytest.mark.parametrize(
    ("op", "values", "expected"),
    [
        ("sum", [1, 2.5, True], 4.5),
        ("sum", [None, 2, None], 2),
        ("sum", [None, None], None),
        ("min", [3, 1, 2], 1),
        ("max", ["a", "c", "b"], "c"),
        ("concat", [[1], [], [2]], [1, 2]),
        ("concat", ["a", "b"], "ab"),
        ("concat", [b"a", b"b"], b"ab"),
        ("concat", [(1,), (2,)], (1, 2)),
        ("sum", [np.array([1, 2]), np.array([3, 4])], np.array([4, 6])),
        ("min", [np.array([1, 5]), np.array([3, 4])], np.array([1, 4])),
        ("max", [np.array([1, 5]), np.array([3, 4])], np.array([3, 5])),
        ("concat", [np.zeros((1, 2)), np.ones((2, 2))], np.array([[0, 0], [1, 1], [1, 1]])),
        ("sum", [pa.array([1, 2]), pa.array([3, 4])], pa.array([4, 6])),
        ("min", [pa.array([1, 5]), pa.array([3, 4])], pa.array([1, 4])),
        ("max", [pa.array([1, 5]), pa.array([3, 4])], pa.array([3, 5])),
        ("concat", [pa.array([1]), pa.array([2])], pa.array([1, 2])),
        ("concat", [pa.chunked_array([[1]]), pa.chunked_array([[2]])], pa.chunked_array([[1], [2]])),
        ("concat", [pa.table({"a": [1]}), pa.table({"a": [2]})], pa.table({"a": [1, 2]})),
        ("concat", [pa.record_batch({"a": [1]}), pa.record_batch({"a": [2]})], pa.table({"a": [1, 2]})),
        ("sum", [np.array([1]), np.array([2]), np.array([0.5]), np.array([1])], np.array([4.5])),
        ("max", [np.array([1, 5]), np.array([3, 4]), np.array([9, 1])], np.array([9, 5])),
        ("sum", [np.True_, np.True_], 2),
        ("sum", [np.False_, True, np.True_, np.array(True), 2.5], 5.5),
        ("sum", [np.array([True, False]), np.array([True, True])], np.array([2, 1])),
        ("sum", [np.array([True]), np.array([True]), np.array([5])], np.array([7])),
        ("sum", [pa.array([True, None]), pa.array([True, True])], pa.array([2, None])),
        ("sum", [pa.chunked_array([[True]]), pa.chunked_array([[True]])], pa.chunked_array([[2]])),
        ("max", [np.False_, np.True_], True),
        ("max", [np.array([True, False]), np.array([False, False])], np.array([True, False])),
        (operator.mul, [2, None, 5], 10),
    ],
)
def test_reducers(op, values, expected):
    """Numbers, numpy and Arrow arrays, tables, lists, text, bytes, and functions. A value of None is left out."""
    before = copy.deepcopy(values)
    result = reduced(reducer_call(op), values)
    assert pickle.dumps(values) == pickle.dumps(before)
    assert np.array_equal(result, expected) if isinstance(expected, np.ndarray) else result == expected


@pytest.mark.parametrize("one", [True, np.True_, np.array([True]), pa.array([True])])
def test_the_sum_of_one_boolean(one):
    """The sum of one boolean is a number, as with more tasks."""
    assert type(reduced(SUM, [one])) is type(reduced(SUM, [one, one]))
    assert np.asarray(reduced(SUM, [one])).dtype.kind == "i"
    assert reduced(SUM, [one]) == (pa.array([1]) if isinstance(one, pa.Array) else 1)


def test_sums_are_reproducible():
    """Floating point numbers are added in the order of subtasks, whichever arrives first."""
    values = {subtask: 0.1 * 3**subtask for subtask in range(8)}
    expected = 0.0
    for subtask in range(8):
        expected = values[subtask] if subtask == 0 else expected + values[subtask]
    for order in (range(8), reversed(range(8)), (3, 1, 7, 0, 6, 2, 5, 4)):
        group = SuperstepGroup("x", 8)
        last = [group.add(subtask, 0, SUM, values[subtask]) for subtask in order][-1]
        assert reduced(SUM, last) == expected


@pytest.mark.parametrize(
    ("op", "values", "words"),
    [
        ("sum", [1, np.array([1])], "number in subtask 0 and numpy array of shape"),
        ("max", [None, 1, None, "a"], "number in subtask 1 and str in subtask 3"),
        ("sum", [np.zeros(2), np.zeros(3)], r"shape \(2,\) in subtask 0 and numpy array of shape \(3,\) in subtask 1"),
        ("sum", [pa.array([1]), pa.array([1.5])], "Arrow array of int64"),
        ("sum", [["a"], ["b"]], "no sum of list"),
        ("concat", [1, 2], "no concatenation of number"),
    ],
)
def test_values_that_cannot_be_reduced_together(op, values, words):
    """The error has their kinds and shapes."""
    with pytest.raises(OperatorFailed, match=words):
        reduced(ReducerCall(op), values)


def product(a, b):
    return a * b


class Product:
    """A reducer with a state, whose instances have no importable name."""

    def __call__(self, a, b):
        return a * b

    def method(self, a, b):
        return a * b


def test_an_unknown_reducer_is_misused():
    """A name that no reducer has, an object that cannot be called, and a function that cannot be pickled are refused in the task."""
    lock = threading.Lock()
    with pytest.raises(OperatorMisused, match="'average' is none of them"):
        reducer_call("average")
    with pytest.raises(OperatorMisused, match="not int"):
        reducer_call(7)
    with pytest.raises(OperatorMisused, match=r"<lambda> cannot be sent there \(TypeError"):
        reducer_call(lambda a, b: lock, "product")


@pytest.mark.parametrize(
    ("function", "name"),
    [(operator.mul, "_operator.mul"), (max, "builtins.max"), (np.maximum, "numpy.maximum"), (copy.copy, "copy.copy")],
)
def test_an_importable_function_has_its_qualified_name(function, name):
    """A function that every process imports under its qualified name needs no other name."""
    assert reducer_call(function).name == name
    assert reducer_call(function, "mine").name == "mine"


def test_a_function_without_an_importable_name_needs_a_name():
    """A lambda, a nested function, a partial, an object, a bound method and a function of `__main__` are refused without a name."""

    def nested(a, b):
        return a * b

    main = types.FunctionType(product.__code__, {"__name__": "__main__"}, "product")
    assert main.__module__ == "__main__"
    for function, described in (
        (lambda a, b: a * b, "<lambda>"),
        (nested, "nested"),
        (functools.partial(product), "a partial"),
        (Product(), "a Product"),
        (Product().method, "Product.method"),
        (functools.wraps(product)(lambda a, b: a + b), "product"),
        (main, "__main__.product"),
    ):
        with pytest.raises(OperatorMisused, match=rf"no module has .*{described} under its name. .*name='...'"):
            reducer_call(function)
        named = reducer_call(function, "mine")
        assert named.name == "mine"
        assert reduced(named, [2, None, 5]) in (10, 7)


@pytest.mark.parametrize("name", ["", 7, "sum"])
def test_a_name_that_does_not_fit_is_refused(name):
    """A function's name is a text, and never that of a ready-made reducer; a ready-made reducer takes no name."""
    with pytest.raises(OperatorMisused, match="name="):
        reducer_call(product, name)
    with pytest.raises(OperatorMisused, match="ready-made: leave name= out"):
        reducer_call("sum", "mine")


class Task:
    """The side of a task, with a scripted evaluation whose requests get their replies when the peers arrive."""

    def __init__(self, harness, subtask, subtasks=2, stage_attempt=0):
        self.evaluation = harness.evaluation(subtask, partitions=subtasks, stage_attempt=stage_attempt)
        self.subtask, self.requests, self.step = subtask, [], 0
        self.steps = SuperstepContext(self, subtasks, 60.0)

    def send(self, event):
        self.evaluation.send(event)

    def request(self, request, timeout):
        return self.evaluation.request(request)

    def reduce_next(self, value, op="sum", name=None):
        """Comes to the next step; answers nothing yet."""
        try:
            return self.steps.reduce(value, op, name)
        except OperatorFailed as error:
            if not isinstance(error.__cause__, CoordinationTimeout):
                raise
            return None

    def receive(self):
        stopped, value = pickle.loads(self.evaluation.reply()[1:])
        self.steps.step += 1
        return (value, stopped)


def harness_of(stop_when=None, timeout=600.0):
    return CoordinatorHarness(lambda context: SuperstepCoordinator(context, stop_when, timeout))


def test_two_tasks():
    """Both get the same value in each step, and the stop of the driver's function."""
    with harness_of(lambda step, value: step == 1) as harness:
        one, other = Task(harness, 0), Task(harness, 1)
        for step in range(3):
            one.reduce_next(step)
            assert other.reduce_next(10) == step + 10
            assert one.receive() == (step + 10, step >= 1)
        assert other.steps.stopped
        assert harness.operators.progress() == {"operator/1": {"step": 3, "stopped": True}}
        one.evaluation.finish(), other.evaluation.finish()
        assert harness.failure is None


def test_a_large_value():
    """A large value travels in pieces in both directions."""
    with harness_of() as harness:
        task = Task(harness, 0, subtasks=1)
        value = np.arange(3_000_000)  # 24 MB
        assert np.array_equal(task.reduce_next(value), value)
        assert task.reduce_next(b"x" * (8 << 20), "concat") == b"x" * (8 << 20)


def test_values_about_the_size_of_a_piece():
    """A value of any size arrives unchanged. None of it stays with the coordinator."""
    with harness_of() as harness:
        task = Task(harness, 0, subtasks=1)
        for size in (0, 1, *range((4 << 20) - 70, (4 << 20) + 70, 20), 8 << 20, (12 << 20) - 60):
            assert task.reduce_next(b"x" * size, "concat") == b"x" * size
        assert harness.coordinator._pieces == {}
        functions = task.reduce_next([lambda: 7], "concat")  # an object that only cloudpickle can pickle
        assert functions[0]() == 7


def test_memory_of_the_driver():
    """After two hundred steps of 4 MB, the driver holds as much as after one, whatever duplicates arrive."""
    with harness_of() as harness:
        tasks = [Task(harness, subtask) for subtask in (0, 1)]
        value = bytes((4 << 20) - 1000)
        driver_memory = []
        tracemalloc.start()
        try:
            for step in range(200):
                tasks[0].reduce_next(value, "max")
                assert len(tasks[1].reduce_next(value, "max")) == len(tasks[0].receive()[0]) == len(value)
                for task in tasks:
                    task.evaluation._replies.clear()  # referenced by the test itself
                if step % 10 == 9:
                    driver_memory.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
        assert max(driver_memory) < 40 << 20
        assert harness.failure is None


def test_a_task_fails():
    """The step of its peers fails at once. The next stage attempt starts again, and old attempts get no replies."""
    with harness_of() as harness:
        one, other = Task(harness, 0), Task(harness, 1)
        one.reduce_next(1)
        other.evaluation.fail("boom")
        with pytest.raises(RequestFailed, match="subtask 1 failed, and the stage runs again: boom"):
            one.receive()
        again = [Task(harness, subtask, stage_attempt=1) for subtask in (0, 1)]
        with pytest.raises(OperatorFailed, match="belongs to an attempt at its stage that has ended"):
            one.reduce_next(5)
        with pytest.raises(OperatorFailed, match="belongs to an attempt at its stage that has ended"):
            Task(harness, 0).reduce_next(5)  # one of the attempt before that begins late
        again[1].reduce_next(4)
        assert again[0].reduce_next(3) == 7
        assert harness.failure is None


def test_a_peer_that_ends_after_a_failure():
    """A task whose step failed with another may end before Spark ends it: that does not count as a difference."""
    with harness_of() as harness:
        one, other = Task(harness, 0), Task(harness, 1)
        one.reduce_next(1)
        other.evaluation.fail("boom")
        one.evaluation.finish()
        late = Task(harness, 1, stage_attempt=0)
        again = [Task(harness, subtask, stage_attempt=1) for subtask in (0, 1)]
        late.evaluation.abandon()
        again[0].reduce_next(1)
        assert again[1].reduce_next(2) == 3
        assert harness.failure is None


def test_a_partial_rerun():
    """If Spark runs only some of the tasks again, their step fails, so that all of them run again."""
    with harness_of() as harness:
        task = Task(harness, 1, subtasks=4)
        task.steps.subtasks = 2
        with pytest.raises(OperatorFailed, match="Spark runs 2 of 4 tasks of stage 0 again"):
            task.reduce_next(1)
        assert harness.failure is None


def test_a_difference_fails_the_topology():
    """Another attempt would have the same result, so tasks that call differently fail the topology."""
    with harness_of() as harness:
        one, other = Task(harness, 0), Task(harness, 1)
        one.reduce_next(1)
        other.evaluation.finish()
        assert isinstance(harness.failure, OperatorFailed)
        assert "subtask 1 ended after 0 steps, but subtask 0 waits in step 0" in str(harness.failure)
        with pytest.raises(Exception, match="subtask 1 ended"):
            one.receive()


def test_a_result_that_cannot_be_pickled():
    """A result that cannot be pickled fails the topology with a named error, and no task waits for it."""
    with harness_of() as harness:
        one, other = Task(harness, 0), Task(harness, 1)
        one.reduce_next(1, lambda a, b: (n for n in (a, b)), "pair")
        with pytest.raises(Exception, match="step 0 could not be reduced: TypeError"):
            other.reduce_next(2, lambda a, b: (n for n in (a, b)), "pair")
        with pytest.raises(Exception, match="step 0 could not be reduced"):
            one.receive()
        assert isinstance(harness.failure, OperatorFailed)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize(
    ("reducers", "names"),
    [
        ([(operator.add,), (operator.mul,)], ["_operator.add", "_operator.mul"]),
        ([(lambda a, b: a + b, "add"), (lambda a, b: a * b, "multiply")], ["add", "multiply"]),
        ([(operator.add,), (lambda a, b: a * b, "multiply")], ["_operator.add", "multiply"]),
        ([(operator.add,), ("sum",)], ["_operator.add", "sum"]),
    ],
    ids=["importable", "named", "both", "ready-made"],
)
def test_tasks_that_reduce_with_different_functions_fail(order, reducers, names):
    """Whichever task comes last, the topology fails, and the error names both subtasks and both reducers."""
    with harness_of() as harness:
        tasks = [Task(harness, 0), Task(harness, 1)]
        first, last = order
        tasks[first].reduce_next(3, *reducers[first])
        words = f"subtask {last} reduces with '{names[last]}', but subtask {first} with '{names[first]}'"
        with pytest.raises(OperatorFailed, match=words):
            tasks[last].reduce_next(4, *reducers[last])
        assert isinstance(harness.failure, OperatorFailed)
        with pytest.raises(RequestFailed, match=f"in step 0 {words}"):
            tasks[first].receive()


def test_a_named_function_may_be_made_again_in_each_step():
    """A lambda that each task makes for itself in each step is the same reducer in all tasks, by its name."""
    with harness_of() as harness:
        one, other = Task(harness, 0), Task(harness, 1)
        for step in range(200):
            one.reduce_next(step, lambda a, b, step=step: a + b + step, f"add {step}")
            assert other.reduce_next(10, lambda a, b, step=step: a + b + step, f"add {step}") == 2 * step + 10
            one.receive()
        assert harness.failure is None


def test_an_unnamed_lambda_fails_its_task_before_it_sends_anything():
    """The task gets `OperatorMisused`, and the step goes on when it gives a name."""
    with harness_of() as harness:
        one, other = Task(harness, 0), Task(harness, 1)
        one.reduce_next(2, lambda a, b: a * b, "multiply")
        with pytest.raises(OperatorMisused, match=r"<lambda> under its name. Give it one, the same in all tasks"):
            other.reduce_next(5, lambda a, b: a * b)
        assert other.reduce_next(5, lambda a, b: a * b, "multiply") == 10
        assert harness.failure is None


def test_a_reducer_that_raises():
    """An error of a reducer fails the topology, with the exception as the cause."""
    with harness_of() as harness:
        task = Task(harness, 0, subtasks=1)
        with pytest.raises(Exception, match="step 0 could not be reduced"):
            Task.reduce_next(task, [1], "sum")
        assert isinstance(harness.failure.__cause__, OperatorFailed)


def test_late_subtasks_are_named():
    """A step that waits for longer than its timeout fails, and names the missing subtasks."""
    with harness_of(timeout=0.05) as harness:
        tasks = [Task(harness, subtask, subtasks=3) for subtask in range(3)]
        tasks[1].reduce_next(1)
        harness.coordinator._attempts[0, 0].since -= 1
        harness.advance(2)
        assert "1 subtasks have waited in step 0 for these: 0, 2" in str(harness.failure)
