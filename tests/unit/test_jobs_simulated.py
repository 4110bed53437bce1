"""Jobs under random schedules of drivers, runs, kills, pauses and lost answers: each ends once, and nothing is done twice or lost."""

import math

import pytest

from jobsim import World


def history(seed):
    """One schedule, to its end, and what must hold then."""
    world = World(seed)
    for _ in range(60):
        world.act()
    jobs = world.settle()
    entries = world.server.entries
    for job in world.names:
        record, _ = jobs.read(job)
        # Each job is at its end, clean, and has a result of that kind.
        assert record.clean, (seed, job, record)
        assert jobs.result(job).state == str(record.state)
        # A job that was not cancelled has ended as its code does; one that was cancelled before it ended is.
        if job not in world.cancelled:
            assert str(record.state) == ("failed" if world.fails(job) else "succeeded"), (seed, job, record)
        # Rows are there once or not at all; those of a job that has succeeded are there.
        visible = world.sink.visible.get(f"{job}/write/sink")
        assert visible is not None or record.state == "cancelled", (seed, job, record)
        # There is a reference if and only if the job must be recovered.
        assert f"specs/{job}" not in entries
        assert not [key for key in entries if key.startswith((f"jobs/{job}/steps/", f"jobs/{job}/commits/"))]
    assert not world.sink.staged, (seed, "what was staged is left")
    # Behind a sweep there is no state but the results.
    report = jobs.sweep(0.0, lambda: math.inf)
    assert not report.failed, (seed, report)
    assert len(world.states()) == len(world.names), (seed, world.states())
    return world


def many(seeds):
    killed = 0
    for seed in seeds:
        world = history(seed)
        killed += sum(one.dead for one in world.drivers + world.processes)
    return killed


def test_schedules_of_two_drivers():
    """Whatever is killed, paused or not answered, each job ends once, with its rows once; some schedules of each make test."""
    assert many(range(60)) > 100


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_ten_thousand_schedules_of_two_drivers():
    """The same, ten thousand times."""
    many(range(1000, 11000))
