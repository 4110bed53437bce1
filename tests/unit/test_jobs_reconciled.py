"""A leader and jobs whose processes hang, wait for room, or cannot read stored bytes."""

from __future__ import annotations

import base64
import json
import logging
import pickle
import sys
import types

import pyarrow as pa
import pytest

from stagecrew.coordination import checkpoints
from stagecrew.coordination.checkpoints import Checkpoint
from stagecrew.errors import JobError, RecordUnreadable, StateStorageError
from stagecrew.operators.commit_records import FORMAT, encoded_schema
from stagecrew.recovery.jobs.fenced import FencedJobs
from stagecrew.recovery.jobs.record import JobState
from stagecrew.recovery.jobs.spec import JobSpec
from stagecrew.recovery.jobs.stored_step import StoredStep
from support.simulated_jobs import SimDriver, World
from support.stored_job import StoredJob

SPEC = JobSpec("job-0.py", (), {}, {}, b"", 3)


@pytest.fixture
def world():
    return World(1, jobs=1, faults=0)


@pytest.fixture
def driver(world):
    """A leader that runs one job at a time."""
    made = SimDriver(world)
    world.drivers.append(made)
    made.act()
    made.reconciler._at_once = 1
    return made


@pytest.fixture
def jobs(world):
    return FencedJobs(world.server.session(), world.storage, lambda: world.clock)


def act(world, driver, seconds=1.0, times=1):
    """Lets the driver act several times, at this interval."""
    for _ in range(times):
        world.clock += seconds
        driver.act()


def test_a_cancelled_job_ends_while_all_others_run(world, driver, jobs):
    """A job that waits for room can be cancelled: it ends, although the other jobs never leave any room."""
    jobs.submit(SPEC, "endless")
    driver.act()
    jobs.submit(SPEC, "waits")
    act(world, driver)
    assert set(driver.reconciler.processes) == {"endless"}
    jobs.cancel("waits")
    act(world, driver, times=3)
    process = driver.reconciler.processes["waits"]
    assert process.finishing
    process._act()
    act(world, driver, times=3)
    assert jobs.result("waits").state == "cancelled"
    assert set(driver.reconciler.processes) == {"endless"}


def test_a_process_whose_jvm_hangs_is_killed(world, driver, jobs, caplog):
    """If a run has ended without a result, but its process does not exit, the leader kills it and continues the job."""
    jobs.submit(SPEC, "hangs")
    driver.act()
    process = driver.reconciler.processes["hangs"]
    act(world, driver, seconds=10, times=10)
    assert driver.reconciler.processes["hangs"] is process  # it has not claimed the run yet
    run = FencedJobs(process.session, world.storage, lambda: world.clock)
    run.claim_run(process.run, {"pid": 1})
    act(world, driver, seconds=10, times=10)
    assert not process.dead
    process.session.close()  # its Python has ended
    caplog.clear()
    act(world, driver, seconds=10, times=6)
    assert process.dead
    assert "run 1 of job 'hangs' has ended without a result, but its process" in caplog.text
    act(world, driver, seconds=60, times=2)
    assert jobs.read("hangs")[0].run == 2


def test_a_job_that_waits_for_room_reads_nothing(world, driver, jobs, monkeypatch):
    """While a retried job waits for room, the leader does not read its steps and commits in each pass."""
    jobs.submit(SPEC, "lost")
    driver.act()
    driver.reconciler.processes["lost"]._exit(75)
    jobs.submit(SPEC, "endless")
    act(world, driver)
    assert set(driver.reconciler.processes) == {"endless"}
    reads = []
    monkeypatch.setattr(driver.jobs, "require_readable", reads.append)
    act(world, driver, seconds=60, times=20)
    assert reads == []


def test_an_error_that_returns_is_logged_again(world, driver, jobs, caplog):
    """An error that prevents a run from starting is logged once, and again if it returns after a successful start."""
    jobs.submit(SPEC, "full")
    prepare, is_full = driver.prepare, [True]

    def prepare_unless_full(spec, job):
        if is_full:
            raise JobError("the disk is full")
        return prepare(spec, job)

    driver.prepare = prepare_unless_full
    with caplog.at_level(logging.WARNING):
        act(world, driver, seconds=60, times=5)
        assert caplog.text.count("the disk is full") == 1
        is_full.clear()
        act(world, driver, seconds=60)
        driver.reconciler.processes["full"]._exit(75)
        is_full.append(True)
        act(world, driver, seconds=60, times=5)
    assert caplog.text.count("the disk is full") == 2


def test_a_run_retries_to_read_its_specification(world, driver, jobs, monkeypatch):
    """If the storage fails once while a run reads its job's specification, the run is not lost."""
    jobs.submit(SPEC, "job-0")
    driver.act()
    failures = [StateStorageError("slow down")]
    read = type(world.storage).read

    def fail_once(self, reference):
        if failures:
            raise failures.pop()
        return read(self, reference)

    monkeypatch.setattr(type(world.storage), "read", fail_once)
    monkeypatch.setattr("stagecrew.recovery.retry._PAUSE", 0.0)
    world.patience = 5.0
    driver.reconciler.processes["job-0"]._act()
    assert failures == []
    assert jobs.read("job-0")[0].state is JobState.SUCCEEDED


def test_an_unavailable_storage_does_not_make_a_specification_unreadable(world, driver, jobs, monkeypatch):
    """While the storage is unavailable, an ending job waits. Its commits are not finished without its files."""
    jobs.submit(SPEC, "job-0")
    driver.act()
    driver.reconciler.processes["job-0"]._exit(75)
    jobs.cancel("job-0")
    prepared, prepare = [], driver.prepare
    driver.prepare = lambda spec, job: (prepared.append(spec), prepare(spec, job))[1]

    def fail(self, reference):
        raise StateStorageError("slow down")

    with monkeypatch.context() as patch:
        patch.setattr(type(world.storage), "read", fail)
        with pytest.raises(StateStorageError, match="slow down"):
            jobs.spec("job-0")
        act(world, driver, seconds=60, times=3)
        assert prepared == []
    act(world, driver, seconds=60)
    assert [spec.target for spec in prepared] == [SPEC.target]


def test_a_step_is_the_same_after_serialization():
    """A stored step is read as it was written. Bytes of another format, or other bytes, are unreadable."""
    for step in (
        StoredStep(b"value", {}, None),
        StoredStep(b"", {"t": b"one", "u/2": b""}, "query"),
        StoredStep(b"\n{}\n", {"t": b"\n"}, None),
    ):
        assert StoredStep.from_bytes(step.to_bytes()) == step
    header, _, body = StoredStep(b"value", {}, None).to_bytes().partition(b"\n")
    newer = json.dumps(json.loads(header) | {"format": 2}).encode()
    with pytest.raises(RecordUnreadable, match="the step has format 2, but this version of stagecrew reads format 1"):
        StoredStep.from_bytes(newer + b"\n" + body)
    for damaged in (b"", b"{", b"[]\n", b'{"format": 1}\n', b"\x80\x05\n"):
        with pytest.raises(RecordUnreadable):
            StoredStep.from_bytes(damaged)


def test_a_checkpoint_of_another_format_loses_neither_the_job_nor_its_steps(world, driver, jobs, monkeypatch):
    """A job whose steps have checkpoints of another format waits. It does not fail, and its steps stay."""
    jobs.submit(SPEC, "job-0")
    driver.act()
    monkeypatch.setattr(checkpoints, "_FORMAT", 99)
    checkpoint = Checkpoint(1, {"budget/1": b"7"}).to_bytes()
    monkeypatch.undo()
    jobs.handles("job-0", "steps").add("make", StoredStep(b"", {"t": checkpoint}, None).to_bytes())
    driver.reconciler.processes["job-0"]._exit(75)
    act(world, driver, seconds=100, times=5)
    record, _ = jobs.read("job-0")
    assert (record.state, record.run) == (JobState.RUNNING, 1)
    assert jobs.handles("job-0", "steps").names() == ["make"]
    assert driver.reconciler.processes == {}


def test_an_ended_commit_does_not_need_its_sink(world, driver, jobs, monkeypatch, caplog):
    """A cancelled job ends, although the sinks of its ended commits cannot be unpickled, because their class is gone."""
    module = types.ModuleType("sinks_of_the_job")
    module.Sink = type("Sink", (), {"__module__": "sinks_of_the_job"})
    monkeypatch.setitem(sys.modules, "sinks_of_the_job", module)
    sink = base64.b64encode(pickle.dumps(module.Sink())).decode()
    monkeypatch.delitem(sys.modules, "sinks_of_the_job")
    jobs.submit(SPEC, "job-0")
    driver.act()
    record = {
        "format": FORMAT, "state": "applied", "run": "0" * 32, "before": [], "sink": "<sink>",
        "schema": encoded_schema(pa.schema([])),
    }  # fmt: skip
    data = json.dumps({"record": record, "sink": sink}).encode()
    jobs.handles("job-0", "commits").add("job-0/daily", data)
    jobs.cancel("job-0")
    act(world, driver, times=3)
    driver.reconciler.processes["job-0"]._act()
    assert jobs.result("job-0").state == "cancelled"
    assert "commit 'job-0/daily' has ended, but its sink cannot be unpickled" in caplog.text


def test_a_long_stream_keeps_only_the_names_of_its_last_batches():
    """The memory of a run does not grow with the number of batches whose steps and commits had names."""
    job = StoredJob().run()
    for batch in range(50):
        job.batch("stream", batch, lambda: job.step("inner", lambda: 1))
    assert len(job._used) <= 2
