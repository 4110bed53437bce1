"""Submitters, drivers and runs that are killed at named points of what they write, as real processes over a real store."""

import signal
import uuid

import pyarrow.parquet as pq
import pytest

from stagecrew.errors import JobUnreadable
from support.cli import run_stagecrew
from support.driver_processes import QUICK_CONF, campaigning_drivers, kill_point, wait_until
from support.example_jobs import MODULE, job_spec, recorded_lines
from support.processes import is_alive

#: Of a run, what it has written, or not, when it dies; and which runs stage the rows. That there is a result and the job is still
#: running is no point: that is one write.
RUN = {
    "claimed": (["2"], r"Create:jobs/job/process"),
    "a commit is open": (["2"], r"Create:jobs/job/commits/"),
    "the bytes of a decision": (["1", "2"], r"write .*commits", "after", 2),
    "decided, not done": (["1"], r"Replace:jobs/job/commits/"),
    "done, not written down": (["1"], r"Replace:jobs/job/commits/", "before", 2),
    "done": (["1"], r"Replace:jobs/job/commits/", "after", 2),
    "the bytes of a step": (["1"], r"write .*steps"),
    "a step": (["1"], r"Create:jobs/job/steps/"),
    "claimed for the end": (["1"], r"Replace:jobs/job/claim$"),
    "no byte of the result": (["1"], r"write .*results", "before"),
    "the bytes of the result": (["1"], r"write .*results"),
    "the result": (["1"], r"Create:results/job"),
}
#: Of a driver that begins a run, and that cleans behind the job's end.
DRIVER = {
    "a run is not counted": (r"Replace:jobs/job Replace:jobs/job/claim", "before"),
    "a run is counted": (r"Replace:jobs/job Replace:jobs/job/claim",),
    "a run is started": (r"start job",),
    "a step is marked": (r"Delete:jobs/job/steps/\S+/locks",),
    "a step has no bytes": (r"discard .*steps",),
    "a step is gone": (r"Delete:jobs/job/steps/[^/ ]+$",),
    "a commit has no bytes": (r"discard .*commits",),
    "the spec is marked": (r"Delete:specs/job/locks",),
    "the spec has no bytes": (r"discard .*specs",),
    "the spec is gone": (r"Delete:specs/job$",),
    "clean": (r"Replace:jobs/job Delete:open/job",),
}
#: Of what ends a cancelled job: its driver, and the process that finishes what was decided.
CANCELLED = {
    "not ending": ("driver", r"Replace:jobs/job Replace:jobs/job/claim", "before", 2),
    "ending": ("driver", r"Replace:jobs/job Replace:jobs/job/claim", "after", 2),
    "aborted": ("run", r"Replace:jobs/job/commits/"),
    "the bytes of the end": ("run", r"write .*results"),
}
SUBMIT = {
    "the bytes of the spec": (r"write .*specs",),
    "not the job": (r"Create:jobs/job ", "before"),
    "the job": (r"Create:jobs/job ",),
}


def each(points, cheap=()):
    """The points by name; all but the cheap ones are for the long run."""
    return pytest.mark.parametrize(
        "what", [pytest.param(what, id=name, marks=[] if name in cheap else pytest.mark.long) for name, what in points.items()]
    )  # fmt: skip


def consistent(drivers):
    """What holds at any time: a job that must be recovered has all that it needs, and one that is at its end its result."""
    with drivers.jobs() as jobs:
        for job in jobs.names():
            record, version = jobs.read(job)
            try:
                assert jobs.result(job) if record.state.is_terminal else jobs.spec(job)
            except JobUnreadable:
                assert jobs.read(job)[1] != version, "it is not that it went on meanwhile"


def ended(drivers, mark, state="succeeded"):
    """What must hold at the end, whoever was killed where."""
    wait_until(mark.exists, f"somebody comes to the point: {drivers.logs('job')}")
    consistent(drivers)
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
    """Over SQLite, if it is not said otherwise."""
    url = f"sqlite://{tmp_path}/jobs.db"
    if getattr(request, "param", "sqlite") == "zookeeper":
        url = f"zookeeper://{request.getfixturevalue('zookeeper').hosts}/points-{uuid.uuid4().hex}?timeout=4"
    with campaigning_drivers(url, tmp_path) as found:
        yield found


@pytest.fixture
def mark(tmp_path):
    """The file that says that the point was reached."""
    return tmp_path / "reached"


@each(RUN, cheap=["the bytes of the result"])
def test_a_run_that_is_killed(drivers, mark, what):
    """The job's own process dies there: another goes on to the end, unless there was the result, and what was decided is not staged again."""
    stages, *where = what
    drivers.start(**kill_point(mark, "run", *where))
    drivers.submit(job_spec("storing", drivers), "job")
    ended(drivers, mark)
    assert recorded_lines(drivers, "stages") == stages
    assert drivers.record("job").run == (1 if where == [RUN["the result"][1]] else 2)


@each(DRIVER)
def test_a_driver_that_is_killed(drivers, mark, what):
    """The leader dies there: a standby ends the job, or cleans behind it; a job that had ended does not run again."""
    leader = drivers.start(**kill_point(mark, "driver", *what))
    assert drivers.leader() is leader
    drivers.start()
    drivers.submit(job_spec("storing", drivers), "job")
    drivers.assert_killed(leader)
    had_ended = drivers.record("job").state.is_terminal
    ended(drivers, mark)
    if had_ended:
        assert (drivers.record("job").run, recorded_lines(drivers, "stages")) == (1, ["1"])


@each({name: RUN[name] for name in ("decided, not done", "claimed for the end", "no byte of the result", "the bytes of the result", "the result")})  # fmt: skip
@pytest.mark.parametrize("drivers", ["sqlite", "zookeeper"], indirect=True)
def test_a_leader_that_is_killed_while_a_run_ends(drivers, mark, what):
    """The leader dies while its job's process is there, which lives: whichever of that one and the next run ends the job, one does."""
    _, *where = what
    moment, number = (where[1:] + ["after", 1][len(where) - 1 :])[:2]
    leader = drivers.start(**kill_point(mark, "run", where[0], moment, number, "driver"))
    assert drivers.leader() is leader
    drivers.start()
    drivers.submit(job_spec("storing", drivers), "job")
    drivers.assert_killed(leader)
    ended(drivers, mark)
    assert recorded_lines(drivers, "stages") == ["1"]


@each(CANCELLED)
def test_a_cancelled_job_that_somebody_is_killed_at(drivers, mark, what):
    """Its driver, or who finishes what was decided, dies there: the job is cancelled in the end, and its commit is not there."""
    (drivers.folder / "out" / "hold-stage").touch()
    role, *where = what
    leader = drivers.start(**kill_point(mark, role, *where))
    assert drivers.leader() is leader
    drivers.start()
    drivers.submit(job_spec("storing", drivers), "job")
    wait_until(lambda: recorded_lines(drivers, "stages"), "the job stages")
    orphan = drivers.process("job")
    with drivers.jobs() as jobs:
        jobs.cancel("job")
    if role == "driver":
        drivers.assert_killed(leader)
    ended(drivers, mark, "cancelled")
    assert not is_alive(orphan)
    assert recorded_lines(drivers, "stages") == ["1"]


@each(SUBMIT)
def test_a_submitter_that_is_killed(drivers, mark, tmp_path, what):
    """Who submits dies there: the job is there, whole, or it is not; submitted again it is that job, and runs once."""
    (tmp_path / "ha_jobs.py").write_text(MODULE)
    places = {"STAGECREW_STORE": drivers.store, "STAGECREW_STATE": str(drivers.state)}
    conf = [word for key, value in QUICK_CONF.items() for word in ("--conf", f"{key}={value}")]
    words = ["submit", "--id", "job", *conf, "--arg", f"folder={tmp_path}/out", "ha_jobs:storing"]
    died = run_stagecrew(*words, cwd=tmp_path, **places, **kill_point(mark, "submit", *what))
    assert (died.returncode, died.stdout) == (-signal.SIGKILL, "")
    consistent(drivers)
    with drivers.jobs() as jobs:
        assert jobs.names() == (["job"] if what == SUBMIT["the job"] else [])
    again = run_stagecrew(*words, cwd=tmp_path, **places)
    assert (again.returncode, again.stdout) == (0, "job\n"), again.stderr
    (tmp_path / "ha_jobs.py").unlink()
    drivers.start()
    ended(drivers, mark)
    assert (drivers.record("job").run, recorded_lines(drivers, "stages")) == (1, ["1"])
