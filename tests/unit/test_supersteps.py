"""Supersteps without Spark: how subtasks reach steps together, and how values are reduced."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import operator
import pickle
import threading
import tracemalloc
import types

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagecrew.errors import CoordinationTimeout, OperatorFailed, OperatorMisused, RequestFailed
from stagecrew.operators.reducers import READY_MADE, ReducerCall, reduced, reducer_call
from stagecrew.operators.superstep_context import SuperstepContext
from stagecrew.operators.superstep_coordinator import SuperstepCoordinator
from stagecrew.operators.superstep_group import SuperstepGroup
from stagecrew.testing import CoordinatorHarness

SUM = ReducerCall("sum")


@given(st.data())
def test_a_step_has_all_values_in_any_order(data):
    """In whatever order subtasks reach a step, the step returns all values in the order of the subtasks."""
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


@given(st.data())
def test_a_different_number_of_calls(data):
    """If tasks call `reduce` a different number of times, the error names a subtask that ended too early."""
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


def test_a_subtask_that_differs_gets_an_error():
    """A subtask that uses another reducer, is at another step, or reaches a step twice gets an error that names it."""
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
    """Each reducer works with all types of values that it supports, ignores None, and does not change its inputs."""
    before = copy.deepcopy(values)
    result = reduced(reducer_call(op), values)
    assert pickle.dumps(values) == pickle.dumps(before)
    assert np.array_equal(result, expected) if isinstance(expected, np.ndarray) else result == expected


@pytest.mark.parametrize("one", [True, np.True_, np.array([True]), pa.array([True])])
def test_the_sum_of_one_boolean(one):
    """The sum of one boolean is a number, like the sum of several booleans."""
    assert type(reduced(SUM, [one])) is type(reduced(SUM, [one, one]))
    assert np.asarray(reduced(SUM, [one])).dtype.kind == "i"
    assert reduced(SUM, [one]) == (pa.array([1]) if isinstance(one, pa.Array) else 1)


def test_sums_are_reproducible():
    """Floating-point numbers are added in the order of subtasks, in whatever order they arrive."""
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
        ("sum", [["a"], ["b"]], "cannot sum values of type list"),
        ("concat", [1, 2], "cannot concatenate values of type number"),
    ],
)
def test_values_that_cannot_be_reduced_together(op, values, words):
    """The error for values that cannot be reduced together contains their types and shapes."""
    with pytest.raises(OperatorFailed, match=words):
        reduced(ReducerCall(op), values)


def product(a, b):
    return a * b


class Product:
    """A class of reducers whose instances and bound methods have no importable name."""

    def __call__(self, a, b):
        return a * b

    def method(self, a, b):
        return a * b


def test_an_invalid_reducer_is_refused():
    """An unknown name, an object that cannot be called, or a function that cannot be pickled is refused in the task."""
    lock = threading.Lock()
    with pytest.raises(OperatorMisused, match="'average' is none of them"):
        reducer_call("average")
    with pytest.raises(OperatorMisused, match="not int"):
        reducer_call(7)
    with pytest.raises(OperatorMisused, match=r"<lambda> cannot be pickled to send it to the driver, .* \(TypeError"):
        reducer_call(lambda a, b: lock, "product")


@pytest.mark.parametrize(
    ("function", "name"),
    [(operator.mul, "_operator.mul"), (max, "builtins.max"), (np.maximum, "numpy.maximum"), (copy.copy, "copy.copy")],
)
def test_an_importable_function_has_its_qualified_name(function, name):
    """A function that can be imported under its qualified name gets this name, unless another name is given."""
    assert reducer_call(function).name == name
    assert reducer_call(function, "mine").name == "mine"


def test_a_function_without_an_importable_name_needs_a_name():
    """A lambda, a nested function, a partial, an object, a bound method or a function of `__main__` is refused unless
    it has a name."""

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
        with pytest.raises(OperatorMisused, match=rf"{described} cannot be imported by its name. .*name='...'"):
            reducer_call(function)
        named = reducer_call(function, "mine")
        assert named.name == "mine"
        assert reduced(named, [2, None, 5]) in (10, 7)


@pytest.mark.parametrize("name", ["", 7, "sum"])
def test_a_name_that_does_not_fit_is_refused(name):
    """A function's name must be a non-empty text other than the names of ready-made reducers. A ready-made reducer
    takes no name."""
    with pytest.raises(OperatorMisused, match="name="):
        reducer_call(product, name)
    with pytest.raises(OperatorMisused, match="ready-made: leave name= out"):
        reducer_call("sum", "mine")


class FakeTask:
    """The task's side of supersteps, with an evaluation of the harness. A step gets its reply when its peers arrive."""

    def __init__(self, harness, subtask, subtasks=2, stage_attempt=0):
        self.evaluation = harness.evaluation(subtask, partitions=subtasks, stage_attempt=stage_attempt)
        self.subtask, self.requests, self.step = subtask, [], 0
        self.steps = SuperstepContext(self, subtasks, 60.0)

    def send(self, event):
        self.evaluation.send(event)

    def request(self, request, timeout):
        return self.evaluation.request(request)

    def reduce_next(self, value, op="sum", name=None):
        """Reaches the next step. Returns the result, or None if the step is still waiting for other subtasks."""
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
    """Two tasks get the same value in each step. They both learn when the driver's function stops the supersteps."""
    with harness_of(lambda step, value: step == 1) as harness:
        one, other = FakeTask(harness, 0), FakeTask(harness, 1)
        for step in range(3):
            one.reduce_next(step)
            assert other.reduce_next(10) == step + 10
            assert one.receive() == (step + 10, step >= 1)
        assert other.steps.stopped
        assert harness.operators.progress() == {"operator/1": {"step": 3, "stopped": True}}
        one.evaluation.finish(), other.evaluation.finish()
        assert harness.failure is None


def test_a_large_value():
    """A large value is sent in pieces in both directions, and arrives unchanged."""
    with harness_of() as harness:
        task = FakeTask(harness, 0, subtasks=1)
        value = np.arange(3_000_000)  # 24 MB
        assert np.array_equal(task.reduce_next(value), value)
        assert task.reduce_next(b"x" * (8 << 20), "concat") == b"x" * (8 << 20)


def test_values_about_the_size_of_a_piece():
    """A value whose size is near that of a piece arrives unchanged, and no piece stays in the coordinator's memory."""
    with harness_of() as harness:
        task = FakeTask(harness, 0, subtasks=1)
        for size in (0, 1, *range((4 << 20) - 70, (4 << 20) + 70, 20), 8 << 20, (12 << 20) - 60):
            assert task.reduce_next(b"x" * size, "concat") == b"x" * size
        assert harness.coordinator._pieces == {}
        functions = task.reduce_next([lambda: 7], "concat")  # an object that only cloudpickle can pickle
        assert functions[0]() == 7


@pytest.mark.slow
def test_memory_of_the_driver():
    """During 200 steps with values of 4 MB, the driver's memory stays below 40 MiB."""
    with harness_of() as harness:
        tasks = [FakeTask(harness, subtask) for subtask in (0, 1)]
        value = bytes((4 << 20) - 1000)
        driver_memory = []
        tracemalloc.start()
        try:
            for step in range(200):
                tasks[0].reduce_next(value, "max")
                assert len(tasks[1].reduce_next(value, "max")) == len(tasks[0].receive()[0]) == len(value)
                for task in tasks:
                    task.evaluation._replies.clear()  # only the test itself references these
                if step % 10 == 9:
                    driver_memory.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
        assert max(driver_memory) < 40 << 20
        assert harness.failure is None


def test_a_task_fails():
    """If a task fails, the step of its peers fails immediately. The next stage attempt starts from the beginning, and
    tasks of the old attempt get errors."""
    with harness_of() as harness:
        one, other = FakeTask(harness, 0), FakeTask(harness, 1)
        one.reduce_next(1)
        other.evaluation.fail("boom")
        with pytest.raises(RequestFailed, match="subtask 1 failed, and the stage runs again: boom"):
            one.receive()
        again = [FakeTask(harness, subtask, stage_attempt=1) for subtask in (0, 1)]
        with pytest.raises(OperatorFailed, match="belongs to an attempt at its stage that has ended"):
            one.reduce_next(5)
        with pytest.raises(OperatorFailed, match="belongs to an attempt at its stage that has ended"):
            FakeTask(harness, 0).reduce_next(5)  # a task of the old attempt that begins late
        again[1].reduce_next(4)
        assert again[0].reduce_next(3) == 7
        assert harness.failure is None


def test_a_peer_that_ends_after_a_failure():
    """A task whose step failed because of a peer can end before Spark kills it. The topology does not fail because of
    this."""
    with harness_of() as harness:
        one, other = FakeTask(harness, 0), FakeTask(harness, 1)
        one.reduce_next(1)
        other.evaluation.fail("boom")
        one.evaluation.finish()
        late = FakeTask(harness, 1, stage_attempt=0)
        again = [FakeTask(harness, subtask, stage_attempt=1) for subtask in (0, 1)]
        late.evaluation.abandon()
        again[0].reduce_next(1)
        assert again[1].reduce_next(2) == 3
        assert harness.failure is None


def test_a_partial_rerun():
    """If Spark reruns only some of the tasks of a stage, their step fails, so that all tasks run again."""
    with harness_of() as harness:
        task = FakeTask(harness, 1, subtasks=4)
        task.steps.subtasks = 2
        with pytest.raises(OperatorFailed, match="Spark runs 2 of 4 tasks of stage 0 again"):
            task.reduce_next(1)
        assert harness.failure is None


def test_a_difference_fails_the_topology():
    """Tasks that call `reduce` a different number of times fail the topology, because another attempt would do the
    same."""
    with harness_of() as harness:
        one, other = FakeTask(harness, 0), FakeTask(harness, 1)
        one.reduce_next(1)
        other.evaluation.finish()
        assert isinstance(harness.failure, OperatorFailed)
        assert "subtask 1 ended after 0 steps, but subtask 0 waits in step 0" in str(harness.failure)
        with pytest.raises(Exception, match="subtask 1 ended"):
            one.receive()


def test_a_result_that_cannot_be_pickled():
    """A result that cannot be pickled fails the topology with an error that names the step, and no task waits for the
    result."""
    with harness_of() as harness:
        one, other = FakeTask(harness, 0), FakeTask(harness, 1)
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
    """If two tasks reduce with different functions, the topology fails whichever task is last. The error names both
    subtasks and both reducers."""
    with harness_of() as harness:
        tasks = [FakeTask(harness, 0), FakeTask(harness, 1)]
        first, last = order
        tasks[first].reduce_next(3, *reducers[first])
        words = f"subtask {last} reduces with '{names[last]}', but subtask {first} with '{names[first]}'"
        with pytest.raises(OperatorFailed, match=words):
            tasks[last].reduce_next(4, *reducers[last])
        assert isinstance(harness.failure, OperatorFailed)
        with pytest.raises(RequestFailed, match=f"in step 0 {words}"):
            tasks[first].receive()


def test_a_named_function_can_be_created_again_in_each_step():
    """Lambdas that each task creates again in each step are one reducer if they have the same name."""
    with harness_of() as harness:
        one, other = FakeTask(harness, 0), FakeTask(harness, 1)
        for step in range(200):
            one.reduce_next(step, lambda a, b, step=step: a + b + step, f"add {step}")
            assert other.reduce_next(10, lambda a, b, step=step: a + b + step, f"add {step}") == 2 * step + 10
            one.receive()
        assert harness.failure is None


def test_an_unnamed_lambda_fails_its_task_before_it_sends_anything():
    """An unnamed lambda raises `OperatorMisused` in its task. The task can then continue the step with a named
    lambda."""
    with harness_of() as harness:
        one, other = FakeTask(harness, 0), FakeTask(harness, 1)
        one.reduce_next(2, lambda a, b: a * b, "multiply")
        with pytest.raises(
            OperatorMisused, match=r"<lambda> cannot be imported by its name. Pass a name that is the same in all tasks"
        ):
            other.reduce_next(5, lambda a, b: a * b)
        assert other.reduce_next(5, lambda a, b: a * b, "multiply") == 10
        assert harness.failure is None


def test_a_reducer_that_raises():
    """An error raised by a reducer fails the topology, and is the cause of the topology's error."""
    with harness_of() as harness:
        task = FakeTask(harness, 0, subtasks=1)
        with pytest.raises(Exception, match="step 0 could not be reduced"):
            task.reduce_next([1], "sum")
        assert isinstance(harness.failure.__cause__, OperatorFailed)


def test_late_subtasks_are_named():
    """A step that waits longer than its timeout fails the topology, and the error names the missing subtasks."""
    with harness_of(timeout=0.05) as harness:
        tasks = [FakeTask(harness, subtask, subtasks=3) for subtask in range(3)]
        tasks[1].reduce_next(1)
        harness.coordinator._attempts[0, 0].since -= 1
        harness.advance(2)
        assert "1 subtasks have waited in step 0 for these: 0, 2" in str(harness.failure)


@pytest.mark.parametrize("name", ["min", "max"])
@pytest.mark.parametrize("make", [float, lambda value: np.array([value, 1.0]), lambda value: pa.array([value, 1.0])])
def test_nan_is_the_minimum_and_the_maximum(name, make):
    """A NaN of any subtask is the result of "min" and "max", in whatever order the subtasks arrive."""
    nan = float("nan")
    for values in itertools.permutations((1.0, nan, 3.0)):
        result = READY_MADE[name]([make(value) for value in values])
        first = (
            result if isinstance(result, float) else result[0].as_py() if isinstance(result, pa.Array) else result[0]
        )
        assert math.isnan(first)


@pytest.mark.parametrize("kind", ["uint8", "int8", "int32", "uint64", "int64"])
def test_sums_of_numpys_integers_do_not_overflow_silently(kind):
    """Small integers of numpy are widened before they are summed. Scalars are summed as Python's integers."""
    dtype = np.dtype(kind)
    largest = int(np.iinfo(dtype).max)
    assert READY_MADE["sum"]([dtype.type(largest)] * 3) == 3 * largest
    if dtype.itemsize < 8:
        assert READY_MADE["sum"]([np.array([largest, 1], dtype)] * 3).tolist() == [3 * largest, 3]


def test_sums_of_mixed_integers_are_exact_and_use_little_memory():
    """Unsigned integers of several sizes are summed exactly. The sum holds one array, not one for each subtask."""
    big = 2**60 + 1
    total = READY_MADE["sum"]([np.array([big], np.uint64), np.array([1], np.uint32), np.array([1], np.uint8)])
    assert (total.dtype, total.tolist()) == (np.uint64, [big + 2])
    values = [np.ones(1_000_000, np.int8) for _ in range(20)]
    tracemalloc.start()
    try:
        assert READY_MADE["sum"](values)[0] == 20
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()
    assert READY_MADE["sum"]([np.int64(16777217), np.float32(0)]) == 16777217
    assert READY_MADE["sum"]([np.array([True]), np.array([True]), np.array([0.5])]).tolist() == [2.5]
