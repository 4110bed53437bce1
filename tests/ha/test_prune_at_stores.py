"""Ended jobs are removed from real stores, while other processes submit, look and prune."""

from __future__ import annotations

import threading
import uuid

import pytest

from crewtools import eventually
from stagecrew.errors import JobUnknown
from stagecrew.recovery.jobs.fenced import FencedJobs
from stagecrew.recovery.jobs.record import JobState
from stagecrew.recovery.jobs.result import Result
from stagecrew.recovery.jobs.spec import JobSpec
from stagecrew.recovery.jobs.store import open_jobs

SPEC = JobSpec("job.py", (), {}, {}, b"", 50)


@pytest.fixture(params=["sqlite", "zookeeper"])
def places(request, tmp_path):
    """The store and the storage of the test's own."""
    (tmp_path / "state").mkdir()
    if request.param == "sqlite":
        return f"sqlite://{tmp_path}/jobs.db", str(tmp_path / "state")
    hosts = request.getfixturevalue("zookeeper").hosts
    return f"zookeeper://{hosts}/prune-{uuid.uuid4().hex}?timeout=10", str(tmp_path / "state")


def lives(jobs, id_):
    """A job from its submit to its cleanup, as a run and a leader would do it."""
    jobs.submit(SPEC, id_)
    jobs = FencedJobs(jobs._store, jobs._storage)
    jobs.start_run(id_, jobs.read(id_), jobs.claim_version(id_))
    jobs.finish(id_, jobs.read(id_), JobState.SUCCEEDED, Result.of_value(id_))
    jobs.clean_up(id_)


def test_prunes_that_meet(places, tmp_path):
    """Three prunes at once remove each old job once, and nothing else: neither open jobs, nor any that is submitted meanwhile under an id
    that a prune has freed. Nothing of a removed job is left in the store or in the storage."""
    ids = [f"a/{number}" for number in range(20)]
    with open_jobs(*places) as jobs:
        for id_ in ids:
            lives(jobs, id_)
        jobs.submit(SPEC, "open")
        removed, errors, begun = [], [], threading.Barrier(4)

        def prunes():
            try:
                with open_jobs(*places) as mine:
                    begun.wait(60)
                    removed.extend(one.job for one in mine.prune(0.0) if one.removed)
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=prunes) for _ in range(3)]
        for thread in threads:
            thread.start()
        begun.wait(60)
        for id_ in ids[-3:]:
            eventually(lambda id_=id_: id_ in removed or errors)
            jobs.submit(SPEC, id_)
        for thread in threads:
            thread.join(60)
        assert not errors
        assert sorted(removed) == sorted(ids)
        assert jobs.names() == jobs.open_names() == sorted([*ids[-3:], "open"])
        with pytest.raises(JobUnknown):
            jobs.result(ids[0])
        assert not list(jobs.prune(0.0))
        files = [path for path in (tmp_path / "state").rglob("*") if path.is_file()]
        assert len(files) == len(jobs.names())  # what each of them runs
        lives(jobs, ids[0])
        assert jobs.result(ids[0]).value() == ids[0]
