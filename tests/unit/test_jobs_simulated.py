"""Under random schedules of drivers, runs, kills, pauses and lost replies, each job ends once and no row is lost."""

import pytest

from support.simulated_jobs import World, assert_final_state

pytestmark = pytest.mark.slow


def run_schedule(seed):
    """Runs one random schedule to its end, and checks the final state."""
    world = World(seed)
    world.keep = None if seed % 2 else 3.0
    for _ in range(60):
        world.act()
    assert_final_state(world, world.settle())
    return world


def run_schedules(seeds):
    killed = pruned = 0
    for seed in seeds:
        world = run_schedule(seed)
        killed += sum(actor.dead for actor in world.drivers + world.processes)
        pruned += world.lives.total()
    return killed, pruned


def test_schedules_of_two_drivers():
    """Whatever is killed, paused or pruned, and whichever replies are lost, each job ends once and its rows are written
    once."""
    killed, pruned = run_schedules(range(60))
    assert killed > 100
    assert pruned > 20


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_ten_thousand_schedules_of_two_drivers():
    """In ten thousand schedules, each job ends once and its rows are written once."""
    run_schedules(range(1000, 11000))
