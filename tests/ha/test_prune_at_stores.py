"""Ended jobs are removed from real stores while other processes submit, read and prune."""

from __future__ import annotations

import threading
import uuid

import pytest

from stagecrew.errors import JobUnknown
from stagecrew.recovery.jobs.fenced import FencedJobs
from stagecrew.recovery.jobs.record import JobState
from stagecrew.recovery.jobs.result import Result
from stagecrew.recovery.jobs.spec import JobSpec
from stagecrew.recovery.jobs.store import open_jobs
from support.waiting import eventually

SPEC = JobSpec("job.py", (), {}, {}, b"", 50)


@pytest.fixture(params=["sqlite", "zookeeper"])
def store_and_storage(request, tmp_path):
    """The URLs of a new store and a new state storage."""
    (tmp_path / "state").mkdir()
    if request.param == "sqlite":
        return f"sqlite://{tmp_path}/jobs.db", str(tmp_path / "state")
    hosts = request.getfixturevalue("zookeeper").hosts
    return f"zookeeper://{hosts}/prune-{uuid.uuid4().hex}?timeout=10", str(tmp_path / "state")


def run_to_cleanup(jobs, id_):
    """Submits, starts, finishes and cleans up a job, as a leader and a run would."""
    jobs.submit(SPEC, id_)
    jobs = FencedJobs(jobs._store, jobs._storage)
    jobs.start_run(id_, jobs.read(id_), jobs.claim_version(id_))
    jobs.finish(id_, jobs.read(id_), JobState.SUCCEEDED, Result.of_value(id_))
    jobs.clean_up(id_)


def test_concurrent_prunes_remove_each_ended_job_once(store_and_storage, tmp_path):
    """Three concurrent prunes remove each old job once and nothing else.

    They keep open jobs, and jobs that are submitted meanwhile with an id that a prune has freed. Nothing of a removed
    job is left in the store or in the storage.
    """
    ids = [f"a/{number}" for number in range(20)]
    with open_jobs(*store_and_storage) as jobs:
        for id_ in ids:
            run_to_cleanup(jobs, id_)
        jobs.submit(SPEC, "open")
        removed, errors, barrier = [], [], threading.Barrier(4)

        def prune():
            try:
                with open_jobs(*store_and_storage) as own_jobs:
                    barrier.wait(60)
                    removed.extend(one.job for one in own_jobs.prune(0.0) if one.removed)
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=prune) for _ in range(3)]
        for thread in threads:
            thread.start()
        barrier.wait(60)
        for id_ in ids[-3:]:
            eventually(lambda id_=id_: id_ in removed or errors)
            jobs.submit(SPEC, id_)
        for thread in threads:
            thread.join(60)
        assert not errors
        assert sorted(removed) == sorted(ids)
        assert jobs.names() == FencedJobs(jobs._store, jobs._storage).open_names() == sorted([*ids[-3:], "open"])
        with pytest.raises(JobUnknown):
            jobs.result(ids[0])
        assert not list(jobs.prune(0.0))
        files = [path for path in (tmp_path / "state").rglob("*") if path.is_file()]
        assert len(files) == len(jobs.names())  # the spec of each remaining job
        run_to_cleanup(jobs, ids[0])
        assert jobs.result(ids[0]).value() == ids[0]
