"""All runs of a stored job share one trace."""

import os
import signal

import pytest

from stagecrew.recovery.run.job_trace import job_traceparent
from support.driver_processes import campaigning_drivers, wait_until
from support.example_jobs import job_spec, recorded_lines
from support.otlp import receiver


@pytest.fixture
def drivers(tmp_path):
    """Drivers that use SQLite, and a directory that jobs write to."""
    with campaigning_drivers(f"sqlite://{tmp_path}/jobs.db", tmp_path) as found:
        yield found


@pytest.fixture
def collector():
    with receiver() as found:
        yield found


def test_the_runs_of_a_job_share_one_trace(drivers, collector):
    """The run that takes over a job exports a failover, the step, and the job, with the ids that each run computes."""
    (drivers.folder / "out" / "hold-task").touch()
    drivers.start(OTEL_EXPORTER_OTLP_ENDPOINT=collector.url)
    drivers.submit(job_spec("committing", drivers, {"spark.stagecrew.tracing": "true"}), "job")
    wait_until(lambda: recorded_lines(drivers, "writes"), "the first run writes")
    os.kill(drivers.process("job"), signal.SIGKILL)
    assert drivers.result("job").value() == 100
    submitted = drivers.record("job").submitted

    (job,) = collector.named("job job")
    assert (job.traceparent, job.parent, job.outcome) == (job_traceparent("job", submitted), "", "ok")
    assert job.started == pytest.approx(submitted, abs=0.001)
    (failover,) = collector.named("failover", run=2)
    assert failover.parent == job.id
    assert submitted < failover.started < failover.ended < job.ended
    (application,) = collector.named("application")
    assert application.parent == job.id
    (step,) = collector.named("step write", run=2)
    assert step.parent == application.id
    (topology,) = collector.named("topology load")
    assert topology.parent == step.id
    (commit,) = collector.named("commit")
    assert commit.parent == topology.id
    assert {span.trace for span in collector.spans} == {job.trace}
