"""The progress of tasks that read splits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stagecrew.coordination.evaluation import Evaluation
from stagecrew.operators.split_progress import SplitProgress, uneven


def evaluation(id_: int, subtask: int) -> Evaluation:
    return Evaluation(id_, "splits", subtask, 40 + id_, 0, 3, subtask, "2", 0, 64)


def test_the_split_that_takes_longest_is_named() -> None:
    """After one second, the task that has read its split for longest is named, until it asks for the next or ends."""
    progress = SplitProgress(2)
    one, two = evaluation(1, 5), evaluation(2, 6)
    progress.reads(one, 10.0)
    progress.reads(two, 11.0)
    assert "slowest split" not in progress.values(2, None, 10.9)
    assert progress.values(2, None, 22.0)["slowest split"] == "subtask 5 on executor 2 (attempt 41), for 12 s"
    progress.asks(one, 1)
    assert progress.values(2, 7, 22.0) == {
        "splits done": 1, "splits in progress": 1, "splits left": 7,
        "slowest split": "subtask 6 on executor 2 (attempt 42), for 11 s",
    }  # fmt: skip
    progress.ended(two)
    progress.ended(two)
    assert progress.values(2, 0, 99.0) == {"splits done": 1, "splits in progress": 1, "splits left": 0}


def test_a_repeated_evaluation_does_not_count_twice() -> None:
    """A second attempt at a subtask reads its log from the beginning: the splits count once."""
    progress = SplitProgress(1)
    progress.asks(evaluation(1, 0), 3)
    progress.asks(evaluation(2, 0), 1)
    assert progress.values(4, None, 0.0) == {"splits done": 3, "splits in progress": 1}


def test_few_tasks_with_most_splits_are_named() -> None:
    """A few of many tasks with most splits are named. Equal shares, few tasks and few splits are not."""
    assert uneven([40, 40, *[1] * 14], 64) == "2 of 64 tasks have read 80 % of the splits"
    assert uneven([10] * 64, 64) is None
    assert uneven([100, 1], 2) is None
    assert uneven([5], 64) is None
    assert uneven([], 64) is None
    assert uneven([], None) is None


@given(st.lists(st.integers(0, 100), max_size=100), st.integers(0, 100))
def test_the_named_tasks_do_hold_most_splits(done: list[int], subtasks: int) -> None:
    """If tasks are named, this many tasks hold 80 % of the splits, and one task less does not."""
    if (text := uneven(done, subtasks)) is not None:
        few = int(text.split()[0])
        counts = sorted(done, reverse=True)
        assert sum(counts[:few]) >= 0.8 * sum(counts) > sum(counts[: few - 1])
        assert few <= max(len(done), subtasks) / 10
