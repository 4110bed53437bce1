"""Commits to Iceberg tables, without Spark: readers, other drivers, and the catalogue."""

from __future__ import annotations

import contextlib
import pickle
import threading

import pyarrow as pa
import pyarrow.dataset
import pyarrow.fs
import pytest

from stagecrew.errors import CommitFailed, CommitPending, CommitUnknown
from stagecrew.operators.commits import abandon, commit, resume
from support.commit_trials import SCHEMA, SEED, Driver, Killed, SinkWrapper, Tasks, moments_without_faults
from support.commits import FailingLog, StepBefore, commit_and_restore_old_log, trials_in
from support.local_sinks import files, iceberg


@pytest.mark.parametrize("nullable", [True, False])
def test_a_nullable_column_for_a_required_one_is_refused(tmp_path, nullable):
    """The error is raised before any task runs. A column that is never null is accepted."""
    from pyiceberg.catalog import load_catalog

    trial = iceberg(tmp_path)
    sink = trial.make_sink()
    with load_catalog("default", **sink._properties).load_table("db.target").update_schema(True) as update:
        update.update_column("id", required=True)
    schema = pa.schema([pa.field("id", pa.int64(), nullable), ("text", pa.string())])
    batch = pa.record_batch({"id": [7], "text": ["a"]}, schema=schema)

    def run(staging):
        assert not nullable, "a task ran"
        return [sink.stage(staging, 0, 1, iter([batch]))]

    with (
        pytest.raises(CommitFailed, match="id may be null, there never.*coalesce")
        if nullable
        else contextlib.nullcontext()
    ):
        commit(sink, trial.commit_log, "c", schema, run)
    assert trial.visible() == ([] if nullable else [(7, "a")])
    assert trial.leftovers() == []


def test_a_reader_sees_no_row_before_the_catalogue_commits(tmp_path, monkeypatch):
    """A reader looks before and after each write to the table's folder, and before the catalogue's commit."""
    from pyiceberg.catalog.sql import SqlCatalog
    from pyiceberg.io.pyarrow import PyArrowFile

    trial, tasks, seen = iceberg(tmp_path), Tasks(1), []
    sink = trial.make_sink()

    def observed(function):
        def call(*args, **kwargs):
            seen.append(trial.visible())
            result = function(*args, **kwargs)
            if function is not commit_table:
                seen.append(trial.visible())
            return result

        return call

    commit_table = SqlCatalog.commit_table

    def run(staging):
        messages = tasks.run(trial.make_sink(), staging)
        monkeypatch.setattr(PyArrowFile, "create", observed(PyArrowFile.create))
        monkeypatch.setattr(SqlCatalog, "_write_metadata", staticmethod(observed(SqlCatalog._write_metadata)))
        monkeypatch.setattr(SqlCatalog, "commit_table", observed(commit_table))
        return messages

    commit(sink, trial.commit_log, "c", SCHEMA, run)
    assert len(seen) > 4
    assert not any(seen)
    assert sorted(trial.visible()) == tasks.expected


def test_a_partitioned_table_is_refused(tmp_path):
    """No task runs, and the error names an alternative."""
    from pyiceberg.catalog import load_catalog

    trial = iceberg(tmp_path)
    sink = trial.make_sink()
    table = load_catalog("default", **sink._properties).load_table("db.target")
    with table.update_spec() as update:
        update.add_identity("text")
    with pytest.raises(
        CommitFailed, match="db.target is partitioned.*unpartitioned tables only: Spark's own writer for"
    ):
        commit(sink, trial.commit_log, "c", SCHEMA, lambda staging: 1 / 0)
    assert files(tmp_path / "warehouse") == [name for name in files(tmp_path / "warehouse") if "metadata" in name]


def test_iceberg_adds_nothing_twice_if_another_driver_commits_first(tmp_path):
    """Another driver applies the same commit just before this one, so the catalogue refuses this one."""
    from pyiceberg.table import Table

    trial, tasks = iceberg(tmp_path), Tasks(1)
    sink = trial.make_sink()
    do_commit = Table._do_commit
    other_drivers = []

    def after_another_driver(self, *args, **kwargs):
        if not other_drivers:
            other_drivers.append(1)
            trial.make_sink().commit(*committing)
        return do_commit(self, *args, **kwargs)

    class Recording(SinkWrapper):
        """Records the arguments of `commit` for the other driver."""

        def commit(self, staging, messages):
            committing[:] = staging, messages
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Table, "_do_commit", after_another_driver)
                sink.commit(staging, messages)

    committing = []
    commit(Recording(sink), trial.commit_log, "c", SCHEMA, lambda staging: tasks.run(trial.make_sink(), staging))
    assert other_drivers
    assert sorted(trial.visible()) == tasks.expected


def rename(sink, old, new):
    """Renames a column, so that the table refuses the rows, or accepts them again."""
    from pyiceberg.catalog import load_catalog

    with load_catalog("default", **sink._properties).load_table("db.target").update_schema() as update:
        update.rename_column(old, new)


@pytest.mark.parametrize("last", ["the other", "this one"])
def test_iceberg_never_deletes_visible_files_on_a_refusal(tmp_path, last):
    """The table refuses the rows of one driver and accepts those of another driver of the same commit."""
    from pyiceberg.table import Table

    trial, tasks = iceberg(tmp_path), Tasks(1)
    slow, entered, released, outcome = trial.make_sink(), threading.Event(), threading.Event(), []

    def run():
        """Resumes from the record and pauses just before the catalogue's commit."""
        try:
            outcome.append(resume(slow, killed, "c", sleep=lambda _: None))
        except (CommitFailed, CommitPending) as error:
            outcome.append(error)

    killed = FailingLog(trial.commit_log, CommitUnknown("it was killed"), "applied")
    other = threading.Thread(target=run)
    do_commit = Table._do_commit

    def pausing_commit(self, *args, **kwargs):
        if threading.current_thread() is other and not entered.is_set():
            entered.set()
            assert released.wait(30)
        return do_commit(self, *args, **kwargs)

    def start_other():
        other.start()
        assert entered.wait(30)
        rename(slow, "text", "other")

    def release_other():
        rename(slow, "other", "text")
        released.set()
        other.join(30)

    # The other driver continues after this one's check whether the commit is done, or after its refused `discard`.
    steps = {"commit": start_other}

    class Watching(StepBefore):
        def done(self, commit_id):
            is_done = self._sink.done(commit_id)
            if entered.is_set() and last == "this one":
                release_other()
            return is_done

        def discard(self, staging, kept):
            self._sink.discard(staging, kept)
            if entered.is_set() and last == "the other":
                release_other()

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(CommitFailed):
        patch.setattr(Table, "_do_commit", pausing_commit)
        commit(
            Watching(trial.make_sink(), **steps), trial.commit_log, "c", SCHEMA,
            lambda staging: tasks.run(trial.make_sink(), staging), sleep=lambda _: None,
        )  # fmt: skip
    assert outcome
    assert not other.is_alive()
    assert sorted(trial.visible()) in ([], tasks.expected)
    trial.drive(Driver(), tasks, "c")
    assert sorted(trial.visible()) == tasks.expected
    assert trial.leftovers() == []


def expire(trial, commit_id):
    """Expires the snapshot of a commit after a later commit, as the table's maintenance does."""
    from pyiceberg.catalog import load_catalog

    trial.drive(Driver(), Tasks(2), "later")
    with contextlib.closing(load_catalog("default", **trial.make_sink()._properties)) as catalog:
        table = catalog.load_table("db.target")
        (id_,) = [
            snapshot.snapshot_id
            for snapshot in table.snapshots()
            if snapshot.summary.additional_properties["stagecrew.commit-id"] == commit_id
        ]
        table.maintenance.expire_snapshots().by_id(id_).commit()
    assert not trial.make_sink().done(commit_id)


@pytest.mark.parametrize("fits", [True, False], ids=["same schema", "changed schema"])
def test_an_iceberg_commit_is_found_done_after_its_snapshot_expired(tmp_path, fits):
    """A driver dies after the catalogue's commit, before it writes the record. The table's own files show that the
    commit is done."""
    trial, make = iceberg(tmp_path), trials_in(iceberg, tmp_path)
    dies = Driver(dies_at=moments_without_faults(make("moments_without_faults")).index("after commit") + 1)
    with pytest.raises(Killed):
        trial.drive(dies, Tasks(SEED, zombies=False), "c")
    expire(trial, "c")
    if not fits:
        rename(trial.make_sink(), "text", "other")
    assert trial.drive(Driver(), Tasks(1), "c").repeated
    assert trial.commit_log.read("c")[1]["state"] == "applied"
    if not fits:
        rename(trial.make_sink(), "other", "text")
    assert sorted(trial.visible()) == sorted(Tasks(1).expected * 2)
    assert trial.leftovers() == []


def test_abandon_keeps_the_files_of_an_expired_iceberg_snapshot(tmp_path):
    """The commit log is an older copy and the snapshot is gone, but the table still shows the files."""
    trial = iceberg(tmp_path)
    commit_and_restore_old_log(trial, Tasks(1))
    expire(trial, "c")
    abandon(trial.make_sink(), trial.commit_log, "c")
    assert sorted(trial.visible()) == sorted(Tasks(1).expected * 2)


@pytest.mark.parametrize("effect", ["before", "after"])
def test_an_unreadable_response_of_the_catalogue_is_retried(tmp_path, monkeypatch, effect):
    """It is not a refusal, because the outcome is unknown."""
    from pydantic import TypeAdapter
    from pyiceberg.catalog.sql import SqlCatalog

    trial, tasks, commit_table = iceberg(tmp_path), Tasks(1), SqlCatalog.commit_table

    def unreadable(self, *args):
        monkeypatch.undo()
        if effect == "after":
            commit_table(self, *args)
        TypeAdapter(int).validate_json("<html>")

    def run(staging):
        messages = tasks.run(trial.make_sink(), staging)
        monkeypatch.setattr(SqlCatalog, "commit_table", unreadable)
        return messages

    assert commit(trial.make_sink(), trial.commit_log, "c", SCHEMA, run, sleep=lambda _: None).rows == 40
    assert sorted(trial.visible()) == tasks.expected
    assert trial.leftovers() == []


def test_a_pickled_iceberg_sink_reaches_its_catalogue(tmp_path):
    """Another driver can use it. What tasks receive contains no credentials."""
    trial, tasks = iceberg(tmp_path), Tasks(1)
    sink = trial.make_sink()
    sink._properties["token"] = "very-secret"
    sent = pickle.dumps(sink.in_tasks())
    assert b"very-secret" not in sent
    commit(
        sink,
        trial.commit_log,
        "c",
        SCHEMA,
        lambda staging: tasks.run(pickle.loads(pickle.dumps(sink.in_tasks())), staging),
    )
    assert pickle.loads(pickle.dumps(sink)).done("c")
