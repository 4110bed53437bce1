"""Jobs under random schedules of drivers, runs, kills, pauses and lost answers: each ends once, and nothing is done twice or lost."""

import pytest

from support.simulated_jobs import World, assert_final_state


def history(seed):
    """One schedule, to its end."""
    world = World(seed)
    world.keep = None if seed % 2 else 3.0
    for _ in range(60):
        world.act()
    assert_final_state(world, world.settle())
    return world


def many(seeds):
    killed = pruned = 0
    for seed in seeds:
        world = history(seed)
        killed += sum(one.dead for one in world.drivers + world.processes)
        pruned += world.lives.total()
    return killed, pruned


def test_schedules_of_two_drivers():
    """Whatever is killed, paused, pruned or not answered, each job ends once, with its rows once; some schedules of each make test."""
    killed, pruned = many(range(60))
    assert killed > 100
    assert pruned > 20


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_ten_thousand_schedules_of_two_drivers():
    """The same, ten thousand times."""
    many(range(1000, 11000))
