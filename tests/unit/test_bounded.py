"""`Bounded`, a dict that keeps only its newest keys."""

from hypothesis import given
from hypothesis import strategies as st

from stagecrew.bounded import Bounded


@given(st.lists(st.integers(0, 9), max_size=60), st.integers(1, 5))
def test_bounded_keeps_the_keys_that_were_added_last(keys, limit):
    """`Bounded` keeps the newest keys with their latest values, and passes older entries to `evicted`."""
    evicted, model = [], []
    bounded = Bounded(limit, lambda key, value: evicted.append((key, value)))
    for number, key in enumerate(keys):
        bounded[key] = number
        if key in (one for one, _ in model):
            model = [(one, number if one == key else value) for one, value in model]
        else:
            model.append((key, number))
        if len(model) > limit:
            assert evicted.pop() == model.pop(0)
        assert list(bounded.items()) == model
        assert not evicted


def test_an_evicted_key_can_be_added_again():
    """An evicted key that is added again counts as the newest key."""
    bounded = Bounded(2)
    for key in ("a", "b", "c", "a"):
        bounded[key] = key.upper()
    assert bounded == {"c": "C", "a": "A"}
    bounded["c"] = "again"
    assert list(bounded.items()) == [("c", "again"), ("a", "A")]
