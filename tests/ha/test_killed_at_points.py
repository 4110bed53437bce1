"""Submitters, drivers and runs are killed at named points of their writes, as real processes with a real store."""

import signal
import uuid

import pyarrow.parquet as pq
import pytest

from stagecrew.errors import RecordUnreadable
from support.cli import run_stagecrew
from support.driver_processes import QUICK_CONF, campaigning_drivers, kill_point, wait_until
from support.example_jobs import MODULE, job_spec, recorded_lines
from support.processes import is_alive

#: Points at which a run is killed, each with the numbers of the runs that stage the rows. There is no point between
#: storing the result and ending the job, because that is one write.
RUN_POINTS = {
    "job claimed": (["2"], r"Create:jobs/job/process"),
    "commit opened": (["2"], r"Create:jobs/job/commits/"),
    "decision bytes written": (["1", "2"], r"write .*commits", "after", 2),
    "commit decided, not applied": (["1"], r"Replace:jobs/job/commits/"),
    "commit applied, not recorded": (["1"], r"Replace:jobs/job/commits/", "before", 2),
    "commit recorded as applied": (["1"], r"Replace:jobs/job/commits/", "after", 2),
    "step bytes written": (["1"], r"write .*steps"),
    "step stored": (["1"], r"Create:jobs/job/steps/"),
    "end claimed": (["1"], r"Replace:jobs/job/claim$"),
    "before result bytes": (["1"], r"write .*results", "before"),
    "result bytes written": (["1"], r"write .*results"),
    "result stored": (["1"], r"Create:results/job"),
}
#: Points at which a driver is killed: when it starts a run, and when it cleans up after the job's end.
DRIVER_POINTS = {
    "before run counted": (r"Replace:jobs/job Replace:jobs/job/claim", "before"),
    "run counted": (r"Replace:jobs/job Replace:jobs/job/claim",),
    "run started": (r"start job",),
    "step marked": (r"Delete:jobs/job/steps/\S+/locks",),
    "step bytes deleted": (r"discard .*steps",),
    "step deleted": (r"Delete:jobs/job/steps/[^/ ]+$",),
    "commit bytes deleted": (r"discard .*commits",),
    "spec marked": (r"Delete:specs/job/locks",),
    "spec bytes deleted": (r"discard .*specs",),
    "spec deleted": (r"Delete:specs/job$",),
    "job clean": (r"Replace:jobs/job Delete:open/job",),
}
#: Points at which the driver of a cancelled job, or the process that finishes its commits, is killed.
CANCELLED_POINTS = {
    "before ending": ("driver", r"Replace:jobs/job Replace:jobs/job/claim", "before", 2),
    "ending": ("driver", r"Replace:jobs/job Replace:jobs/job/claim", "after", 2),
    "commit aborted": ("run", r"Replace:jobs/job/commits/"),
    "result bytes written": ("run", r"write .*results"),
}
SUBMIT_POINTS = {
    "spec bytes written": (r"write .*specs",),
    "before job stored": (r"Create:jobs/job ", "before"),
    "job stored": (r"Create:jobs/job ",),
}


def at_each_point(points, cheap=()):
    """Parametrizes a test with these points, by name. All points except those in `cheap` are marked as long."""
    return pytest.mark.parametrize(
        "fault", [pytest.param(fault, id=name, marks=[] if name in cheap else pytest.mark.long) for name, fault in points.items()]
    )  # fmt: skip


def check_consistency(drivers):
    """Checks what must hold at any time: an open job can be recovered, and an ended job has its result."""
    with drivers.jobs() as jobs:
        for job in jobs.names():
            record, version = jobs.read(job)
            try:
                assert jobs.result(job) if record.state.is_terminal else jobs.spec(job)
            except RecordUnreadable:
                assert jobs.read(job)[1] != version, "the record has not changed meanwhile, so the job is inconsistent"


def check_end(drivers, reached, state="succeeded"):
    """Checks what must hold at the end, whichever process was killed."""
    wait_until(reached.exists, f"a process reaches the point: {drivers.logs('job')}")
    check_consistency(drivers)
    result = drivers.result("job")
    assert result.state == state
    table = drivers.folder / "out" / "table"
    if state == "succeeded":
        assert result.value() == 100
        assert sorted(pq.read_table(table)["id"].to_pylist()) == list(range(100))
    else:
        assert not table.exists()
    drivers.assert_nothing_left("job")


@pytest.fixture
def drivers(request, tmp_path):
    """Drivers that use SQLite, or the store named by the parameter."""
    url = f"sqlite://{tmp_path}/jobs.db"
    if getattr(request, "param", "sqlite") == "zookeeper":
        url = f"zookeeper://{request.getfixturevalue('zookeeper').hosts}/points-{uuid.uuid4().hex}?timeout=4"
    with campaigning_drivers(url, tmp_path) as found:
        yield found


@pytest.fixture
def reached(tmp_path):
    """The file that is created when the point is reached."""
    return tmp_path / "reached"


@at_each_point(RUN_POINTS, cheap=["result bytes written"])
def test_a_job_survives_its_run_killed_at_each_point(drivers, reached, fault):
    """If a run is killed before the job's result is stored, another run finishes the job.

    Rows whose commit was decided are not staged again.
    """
    stages, *point_arguments = fault
    drivers.start(**kill_point(reached, "run", *point_arguments))
    drivers.submit(job_spec("storing", drivers), "job")
    check_end(drivers, reached)
    assert recorded_lines(drivers, "stages") == stages
    assert drivers.record("job").run == (1 if point_arguments == [RUN_POINTS["result stored"][1]] else 2)


@at_each_point(DRIVER_POINTS)
def test_a_job_survives_its_driver_killed_at_each_point(drivers, reached, fault):
    """If the leading driver is killed, a standby finishes the job or cleans up after it.

    A job that had already ended does not run again.
    """
    leader = drivers.start(**kill_point(reached, "driver", *fault))
    assert drivers.leader() is leader
    drivers.start()
    drivers.submit(job_spec("storing", drivers), "job")
    drivers.assert_killed(leader)
    had_ended = drivers.record("job").state.is_terminal
    check_end(drivers, reached)
    if had_ended:
        assert (drivers.record("job").run, recorded_lines(drivers, "stages")) == (1, ["1"])


@at_each_point({name: RUN_POINTS[name] for name in ("commit decided, not applied", "end claimed", "before result bytes", "result bytes written", "result stored")})  # fmt: skip
@pytest.mark.parametrize("drivers", ["sqlite", "zookeeper"], indirect=True)
def test_a_job_ends_once_when_the_leader_dies_while_its_run_ends(drivers, reached, fault):
    """If the leader is killed while the job's process ends the job, either this process or the next run ends it."""
    _, *point_arguments = fault
    moment, number = (point_arguments[1:] + ["after", 1][len(point_arguments) - 1 :])[:2]
    leader = drivers.start(**kill_point(reached, "run", point_arguments[0], moment, number, "driver"))
    assert drivers.leader() is leader
    drivers.start()
    drivers.submit(job_spec("storing", drivers), "job")
    drivers.assert_killed(leader)
    check_end(drivers, reached)
    assert recorded_lines(drivers, "stages") == ["1"]


@at_each_point(CANCELLED_POINTS)
def test_a_cancelled_job_commits_nothing_whichever_process_dies(drivers, reached, fault):
    """If a cancelled job's driver, or the process that finishes its commits, is killed, the job ends as cancelled.

    Nothing is committed.
    """
    (drivers.folder / "out" / "hold-stage").touch()
    role, *point_arguments = fault
    leader = drivers.start(**kill_point(reached, role, *point_arguments))
    assert drivers.leader() is leader
    drivers.start()
    drivers.submit(job_spec("storing", drivers), "job")
    wait_until(lambda: recorded_lines(drivers, "stages"), "the job is staging rows")
    orphan = drivers.process("job")
    with drivers.jobs() as jobs:
        jobs.cancel("job")
    if role == "driver":
        drivers.assert_killed(leader)
    check_end(drivers, reached, "cancelled")
    assert not is_alive(orphan)
    assert recorded_lines(drivers, "stages") == ["1"]


@at_each_point(SUBMIT_POINTS)
def test_a_job_is_stored_completely_or_not_at_all_if_its_submitter_dies(drivers, reached, tmp_path, fault):
    """If a submitter is killed, its job is stored completely or not at all.

    If the job is submitted again with the same id, it runs once.
    """
    (tmp_path / "ha_jobs.py").write_text(MODULE)
    environment = {"STAGECREW_STORE": drivers.store, "STAGECREW_STATE": str(drivers.state)}
    conf = [word for key, value in QUICK_CONF.items() for word in ("--conf", f"{key}={value}")]
    words = ["submit", "--id", "job", *conf, "--arg", f"folder={tmp_path}/out", "ha_jobs:storing"]
    killed = run_stagecrew(*words, cwd=tmp_path, **environment, **kill_point(reached, "submit", *fault))
    assert (killed.returncode, killed.stdout) == (-signal.SIGKILL, "")
    check_consistency(drivers)
    with drivers.jobs() as jobs:
        assert jobs.names() == (["job"] if fault == SUBMIT_POINTS["job stored"] else [])
    repeated = run_stagecrew(*words, cwd=tmp_path, **environment)
    assert (repeated.returncode, repeated.stdout) == (0, "job\n"), repeated.stderr
    (tmp_path / "ha_jobs.py").unlink()
    drivers.start()
    check_end(drivers, reached)
    assert (drivers.record("job").run, recorded_lines(drivers, "stages")) == (1, ["1"])
