"""Sinks at real servers: PostgreSQL and S3."""

from __future__ import annotations

import contextlib
import gc

import pyarrow.fs
import pytest

from stagecrew.errors import (
    OperatorMisused,
)
from stagecrew.operators.commit_log import MemoryCommitLog
from stagecrew.operators.commits import commit
from stagecrew.operators.sinks import ObjectSink
from support.commit_schedules import (
    commit_that_raises,
    concurrent_commits,
    failing_at_each_moment,
    first_commits_of_two_schemas,
    killed_at_each_moment,
    late_task_at_each_moment,
    lost_connections,
    mismatched_schemas,
    random_history,
    resume_at_each_moment,
)
from support.commit_trials import SCHEMA, Driver, Killed, Tasks, moments_without_faults
from support.postgres import postgresql
from support.s3 import s3_server
from support.server_trials import postgresql_trial, s3_trial
from support.tcp_proxy import Proxy


@pytest.fixture(scope="module")
def postgresql_server():
    with postgresql() as server:
        yield server


@pytest.fixture(scope="module")
def s3_filesystem():
    """A file system of an S3 server with one bucket."""
    with s3_server() as (filesystem, _):
        yield filesystem


@pytest.fixture(params=["postgresql", "s3"])
def make_trial(request, tmp_path):
    """Creates trials by number, at PostgreSQL or at S3."""
    if request.param == "postgresql":
        postgresql_server = request.getfixturevalue("postgresql_server")
        return lambda number: postgresql_trial(postgresql_server, tmp_path, number)
    filesystem = request.getfixturevalue("s3_filesystem")
    return lambda number: s3_trial(filesystem, tmp_path, number)


def test_a_repeated_commit_changes_nothing(make_trial):
    """After a commit all rows are visible once. A repeat of the commit changes nothing."""
    trial, tasks = make_trial(0), Tasks(1)
    assert trial.drive(Driver(), tasks).rows == 40
    assert sorted(trial.visible()) == tasks.expected
    assert trial.drive(Driver(), Tasks(2)).repeated
    assert sorted(trial.visible()) == tasks.expected
    assert trial.leftovers() == []


@pytest.mark.parametrize("seed", range(3))
def test_a_commit_survives_random_faults(make_trial, seed):
    """Commits stay all or nothing when drivers die, pause and resume at random moments."""
    random_history(make_trial(seed), seed, len(moments_without_faults(make_trial("undisturbed"))))


@pytest.mark.long
def test_a_commit_survives_more_than_a_hundred_random_faults(make_trial):
    """Commits stay all or nothing in more than a hundred random histories for each store."""
    count = len(moments_without_faults(make_trial("undisturbed")))
    for seed in range(100, 210):
        random_history(make_trial(seed), seed, count)


#: `make test` takes only every n-th moment of a driver. Moments come in pairs: before and after each write.
EVERY = pytest.mark.parametrize("every_nth", [11, pytest.param(1, marks=pytest.mark.long)], ids=["some", "all"])


@EVERY
def test_a_commit_survives_the_death_of_its_driver_at_each_moment(make_trial, every_nth):
    """If the driver dies before or after any write, readers see all rows or none.

    The next driver completes the commit once.
    """
    killed_at_each_moment(make_trial, every_nth)


@EVERY
def test_a_commit_survives_one_failing_write_at_each_moment(make_trial, every_nth):
    """If a write fails once before the decision, the commit fails. If it fails after, the same driver retries."""
    failing_at_each_moment(make_trial, every_nth)


@EVERY
def test_a_driver_that_resumes_after_another_has_finished_changes_nothing(make_trial, every_nth):
    """A driver that pauses at any write, and resumes after another has committed or aborted, changes nothing."""
    resume_at_each_moment(make_trial, every_nth)


def test_a_commit_that_raises_is_retried(make_trial):
    """A commit that raises before or after its effect is retried. If it always raises, a later driver resumes it."""
    commit_that_raises(make_trial)


def test_two_decided_commits_at_the_same_time_both_succeed(make_trial):
    """Two decided commits run at the same time, and both succeed."""
    for number in range(3):
        assert concurrent_commits(make_trial(number), "before commit") == []


@pytest.mark.parametrize("fault", ["dies_at", "raises_at"])
def test_an_abandoned_manifest_write_creates_no_manifest(s3_filesystem, tmp_path, fault):
    """When an abandoned output stream is garbage-collected, the bytes that it sends create or replace no manifest."""

    # The fault comes after the second stream was opened. The first stream writes the run's mark.
    manifest_driver = Driver(**{fault: 4})

    def watch(_driver, sink):
        sink._filesystem = manifest_driver.instrument(sink._filesystem, ["open_output_stream"])

    trial, tasks = s3_trial(s3_filesystem, tmp_path, 0), Tasks(1)
    trial.watch = watch
    with contextlib.suppress(Killed):
        trial.drive(Driver(), tasks)
    assert manifest_driver.moments >= 4
    trial.watch = lambda _driver, _sink: None
    gc.collect()
    assert sorted(trial.visible()) == ([] if fault == "dies_at" else tasks.expected)
    trial.drive(Driver(), tasks)
    assert sorted(trial.visible()) == tasks.expected


def test_a_commit_id_with_other_content_is_refused(make_trial):
    """A commit id that is reused for other content raises with both values, even if only the sink knows the id.

    A commit with the same content is a repeat.
    """
    trial, tasks = make_trial(0), Tasks(1)

    def run_commit(content, commit_log):
        return commit(
            trial.make_sink(),
            commit_log,
            "c",
            SCHEMA,
            lambda staging: tasks.run(trial.make_sink(), staging),
            content=content,
        )

    assert not run_commit("monday", trial.commit_log).repeated
    state_before = trial.state()
    for commit_log in (trial.commit_log, MemoryCommitLog()):
        assert run_commit("monday", commit_log).repeated
        with pytest.raises(OperatorMisused, match="content is 'tuesday', was 'monday'"):
            run_commit("tuesday", commit_log)
    assert trial.state() == state_before
    long_content = "\U0001f600\x00'" * 100
    commit_log = MemoryCommitLog()
    staged = commit(
        trial.make_sink(),
        commit_log,
        "long",
        SCHEMA,
        lambda staging: tasks.run(trial.make_sink(), staging),
        content=long_content,
    )
    assert not staged.repeated
    assert len(trial.make_sink().stored_mark("long")) <= 400


def test_two_concurrent_commits_both_succeed(make_trial):
    """Two commits with staged rows run at the same time, and both succeed."""
    assert concurrent_commits(make_trial(0), "staged") == []


@pytest.mark.parametrize("moments", [(2, 4), pytest.param((), marks=pytest.mark.long)], ids=["some", "all"])
def test_rows_of_a_late_task_are_never_visible(make_trial, moments):
    """If a task pauses while it writes until the commit has finished or was abandoned, its rows never become visible.

    None of its rows is left.
    """
    late_task_at_each_moment(make_trial, moments)


@pytest.mark.parametrize("moments", [(2, 4), pytest.param(range(1, 60), marks=pytest.mark.long)], ids=["some", "all"])
def test_of_two_first_commits_with_different_schemas_one_fails(s3_filesystem, tmp_path, moments):
    """If two first commits have different schemas, one succeeds. The other raises an error that names the first."""
    first_commits_of_two_schemas(lambda number: s3_trial(s3_filesystem, tmp_path, number), moments)


@pytest.mark.parametrize(
    "moments", [(14, 40), pytest.param(range(1, 200), marks=pytest.mark.long)], ids=["some", "all"]
)
def test_lost_connections_to_a_store_never_leave_a_partial_commit(s3_filesystem, tmp_path, moments):
    """If a connection is lost at any call, the error is clear, and no commit is partial.

    A repeat completes a decided commit.
    """
    port = int(s3_filesystem.__reduce__()[1][0]["endpoint_override"].rpartition(":")[2])
    with Proxy(port) as proxy:
        proxied = pyarrow.fs.S3FileSystem(
            access_key="test", secret_key="test", endpoint_override=f"http://{proxy.hosts}", region="us-east-1",
            request_timeout=10, connect_timeout=5, retry_strategy=pyarrow.fs.AwsStandardS3RetryStrategy(max_attempts=1),
        )  # fmt: skip

        def make_trial(number):
            trial = s3_trial(s3_filesystem, tmp_path, number)
            path = trial.make_sink()._path
            trial.make_sink = lambda: ObjectSink(path, proxied)
            return trial

        lost_connections(make_trial, proxy, moments)


def test_a_mismatched_schema_is_reported_before_anything_runs(make_trial, request):
    """If the schema does not match the table's, an error names the columns before anything runs."""
    mismatched_schemas(make_trial(0), "" if "postgresql" in request.node.name else "int64")
