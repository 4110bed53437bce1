"""Commits to Iceberg tables without Spark: what readers see, concurrent drivers, and failures of the catalogue."""

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
from stagecrew.operators.sinks import IcebergSink
from support.commit_trials import SCHEMA, SEED, Driver, Killed, SinkWrapper, Tasks, moments_without_faults
from support.commits import CallsBefore, FailingLog, commit_and_restore_old_log, trials_in
from support.local_sinks import files, iceberg, iceberg_table


@pytest.mark.parametrize("nullable", [True, False])
def test_a_nullable_column_is_refused_if_the_table_requires_values(tmp_path, nullable):
    """A nullable column is refused before any task runs if the table requires values. Other columns are accepted."""
    trial = iceberg(tmp_path)
    sink = trial.make_sink()
    with iceberg_table(sink._properties) as table, table.update_schema(True) as update:
        update.update_column("id", required=True)
    schema = pa.schema([pa.field("id", pa.int64(), nullable), ("text", pa.string())])
    batch = pa.record_batch({"id": [7], "text": ["a"]}, schema=schema)

    def run(staging):
        assert not nullable, "a task ran"
        return [sink.stage(staging, 0, 1, iter([batch]))]

    with (
        pytest.raises(CommitFailed, match="id may be null, but the table requires a value.*coalesce")
        if nullable
        else contextlib.nullcontext()
    ):
        commit(sink, trial.commit_log, "c", schema, run)
    assert trial.visible() == ([] if nullable else [(7, "a")])
    assert trial.leftovers() == []


def test_a_reader_sees_no_row_before_the_catalogue_commits(tmp_path, monkeypatch):
    """A reader sees no row before or after each write to the table's folder, until the catalogue commits."""
    from pyiceberg.catalog.sql import SqlCatalog
    from pyiceberg.io.pyarrow import PyArrowFile

    trial, tasks, seen = iceberg(tmp_path), Tasks(1), []
    sink = trial.make_sink()

    def reading_the_table(function):
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
        monkeypatch.setattr(PyArrowFile, "create", reading_the_table(PyArrowFile.create))
        monkeypatch.setattr(SqlCatalog, "_write_metadata", staticmethod(reading_the_table(SqlCatalog._write_metadata)))
        monkeypatch.setattr(SqlCatalog, "commit_table", reading_the_table(commit_table))
        return messages

    commit(sink, trial.commit_log, "c", SCHEMA, run)
    assert len(seen) > 4
    assert not any(seen)
    assert sorted(trial.visible()) == tasks.expected


def test_a_partitioned_table_is_refused(tmp_path):
    """A partitioned table is refused before any task runs. The error suggests an alternative."""
    trial = iceberg(tmp_path)
    sink = trial.make_sink()
    with iceberg_table(sink._properties) as table, table.update_spec() as update:
        update.add_identity("text")
    with pytest.raises(
        CommitFailed, match="db.target is partitioned.*unpartitioned tables only: Spark's own writer for"
    ):
        commit(sink, trial.commit_log, "c", SCHEMA, lambda staging: 1 / 0)
    assert files(tmp_path / "warehouse") == [name for name in files(tmp_path / "warehouse") if "metadata" in name]


def test_iceberg_adds_rows_once_if_another_driver_commits_first(tmp_path):
    """If another driver applies the same commit first, the catalogue refuses this one, and the rows are added once."""
    from pyiceberg.table import Table

    trial, tasks = iceberg(tmp_path), Tasks(1)
    sink = trial.make_sink()
    do_commit = Table._do_commit
    other_drivers = []

    def do_commit_after_another_driver(self, *args, **kwargs):
        if not other_drivers:
            other_drivers.append(1)
            trial.make_sink().commit(*commit_arguments)
        return do_commit(self, *args, **kwargs)

    class Recording(SinkWrapper):
        """Records the arguments of `commit` for the other driver."""

        def commit(self, staging, messages):
            commit_arguments[:] = staging, messages
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Table, "_do_commit", do_commit_after_another_driver)
                sink.commit(staging, messages)

    commit_arguments = []
    commit(Recording(sink), trial.commit_log, "c", SCHEMA, lambda staging: tasks.run(trial.make_sink(), staging))
    assert other_drivers
    assert sorted(trial.visible()) == tasks.expected


def rename(sink, old, new):
    """Renames a column, so that the table refuses the rows. Renaming it back makes the table accept them again."""
    with iceberg_table(sink._properties) as table, table.update_schema() as update:
        update.rename_column(old, new)


@pytest.mark.parametrize("release_after", ["discard", "done"])
def test_iceberg_never_deletes_visible_files_on_a_refusal(tmp_path, release_after):
    """Two drivers apply the same commit. The table refuses the first driver's rows, and then accepts the second's.

    The first driver must not delete the files that the second has made visible.
    """
    from pyiceberg.table import Table

    trial, tasks = iceberg(tmp_path), Tasks(1)
    other_sink, paused, released, outcome = trial.make_sink(), threading.Event(), threading.Event(), []

    def run_other():
        """Resumes the commit from its record, and pauses just before the catalogue commits."""
        try:
            outcome.append(resume(other_sink, killed_log, "c", sleep=lambda _: None))
        except (CommitFailed, CommitPending) as error:
            outcome.append(error)

    killed_log = FailingLog(trial.commit_log, CommitUnknown("the driver was killed"), "applied")
    other = threading.Thread(target=run_other)
    do_commit = Table._do_commit

    def pausing_commit(self, *args, **kwargs):
        if threading.current_thread() is other and not paused.is_set():
            paused.set()
            assert released.wait(30)
        return do_commit(self, *args, **kwargs)

    def start_other():
        other.start()
        assert paused.wait(30)
        rename(other_sink, "text", "other")

    def release_other():
        rename(other_sink, "other", "text")
        released.set()
        other.join(30)

    class ReleasingSink(CallsBefore):
        """Lets the other driver continue after the first driver calls `done`, or after it calls `discard`."""

        def done(self, commit_id):
            is_done = self._sink.done(commit_id)
            if paused.is_set() and release_after == "done":
                release_other()
            return is_done

        def discard(self, staging, kept):
            self._sink.discard(staging, kept)
            if paused.is_set() and release_after == "discard":
                release_other()

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(CommitFailed):
        patch.setattr(Table, "_do_commit", pausing_commit)
        commit(
            ReleasingSink(trial.make_sink(), commit=start_other), trial.commit_log, "c", SCHEMA,
            lambda staging: tasks.run(trial.make_sink(), staging), sleep=lambda _: None,
        )  # fmt: skip
    assert outcome
    assert not other.is_alive()
    assert sorted(trial.visible()) in ([], tasks.expected)
    trial.drive(Driver(), tasks, "c")
    assert sorted(trial.visible()) == tasks.expected
    assert trial.leftovers() == []


def expire(trial, commit_id):
    """Makes a later commit, and then expires the snapshot of the given commit, as table maintenance does."""
    trial.drive(Driver(), Tasks(2), "later")
    with iceberg_table(trial.make_sink()._properties) as table:
        (id_,) = [
            snapshot.snapshot_id
            for snapshot in table.snapshots()
            if snapshot.summary.additional_properties["stagecrew.commit-id"] == commit_id
        ]
        table.maintenance.expire_snapshots().by_id(id_).commit()
    assert not trial.make_sink().done(commit_id)


@pytest.mark.parametrize("same_schema", [True, False], ids=["same schema", "changed schema"])
def test_a_repeat_finds_an_iceberg_commit_whose_snapshot_has_expired(tmp_path, same_schema):
    """If a driver dies between the catalogue's commit and the record, a repeat recognizes the commit by its files."""
    trial, make = iceberg(tmp_path), trials_in(iceberg, tmp_path)
    dying_driver = Driver(dies_at=moments_without_faults(make("undisturbed")).index("after commit") + 1)
    with pytest.raises(Killed):
        trial.drive(dying_driver, Tasks(SEED, zombies=False), "c")
    expire(trial, "c")
    if not same_schema:
        rename(trial.make_sink(), "text", "other")
    assert trial.drive(Driver(), Tasks(1), "c").repeated
    assert trial.commit_log.read("c")[1]["state"] == "applied"
    if not same_schema:
        rename(trial.make_sink(), "other", "text")
    assert sorted(trial.visible()) == sorted(Tasks(1).expected * 2)
    assert trial.leftovers() == []


def test_abandon_keeps_the_files_of_an_expired_iceberg_snapshot(tmp_path):
    """`abandon` with an old copy of the log keeps files that the table contains, even if their snapshot has expired."""
    trial = iceberg(tmp_path)
    commit_and_restore_old_log(trial, Tasks(1))
    expire(trial, "c")
    abandon(trial.make_sink(), trial.commit_log, "c")
    assert sorted(trial.visible()) == sorted(Tasks(1).expected * 2)


@pytest.mark.parametrize("is_committed", [False, True])
def test_an_unreadable_response_from_the_catalogue_is_retried(tmp_path, monkeypatch, is_committed):
    """An unreadable response is retried and not treated as a refusal, because the catalogue may have committed."""
    from pydantic import TypeAdapter
    from pyiceberg.catalog.sql import SqlCatalog

    trial, tasks, commit_table = iceberg(tmp_path), Tasks(1), SqlCatalog.commit_table

    def unreadable(self, *args):
        monkeypatch.undo()
        if is_committed:
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
    """A pickled sink can be used by another driver. The sink that tasks receive contains no credentials."""
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


@pytest.mark.parametrize("problem", [None, "tags", "point"])
def test_nulls_in_nested_columns_are_refused_if_the_table_requires_values(tmp_path, problem):
    """A list or struct that may contain nulls is refused if the table requires values in it. Others are accepted."""
    from pyiceberg.catalog import load_catalog
    from pyiceberg.schema import Schema
    from pyiceberg.types import ListType, LongType, NestedField, StringType, StructType

    trial = iceberg(tmp_path)
    properties = trial.make_sink()._properties
    point = StructType(NestedField(5, "x", LongType(), required=True))
    table_schema = Schema(
        NestedField(1, "tags", ListType(2, StringType(), element_required=problem == "tags")),
        NestedField(3, "free", ListType(4, StringType(), element_required=False)),
        NestedField(6, "point", point),
    )
    with contextlib.closing(load_catalog("default", **properties)) as catalog:
        catalog.create_table("db.nested", table_schema)
    sink = IcebergSink("db.nested", properties=properties)
    schema = pa.schema(
        [
            ("tags", pa.list_(pa.field("element", pa.string(), nullable=problem == "tags"))),
            ("free", pa.list_(pa.field("element", pa.string(), nullable=False))),
            ("point", pa.struct([pa.field("x", pa.int64(), nullable=problem == "point")])),
        ]
    )
    batch = pa.RecordBatch.from_pylist([{"tags": ["a"], "free": ["b"], "point": {"x": 1}}], schema)

    def run(staging):
        assert problem is None, "a task ran"
        return [sink.stage(staging, 0, 1, iter([batch]))]

    with (
        contextlib.nullcontext()
        if problem is None
        else pytest.raises(
            CommitFailed, match=f"fit .*: {problem} may contain nulls in nested fields, where the table requires"
        )
    ):
        commit(sink, trial.commit_log, "c", schema, run)
    with contextlib.closing(load_catalog("default", **properties)) as catalog:
        rows = catalog.load_table("db.nested").scan().to_arrow().to_pylist()
    assert rows == ([{"tags": ["a"], "free": ["b"], "point": {"x": 1}}] if problem is None else [])
