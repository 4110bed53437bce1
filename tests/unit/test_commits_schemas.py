"""Schemas and rows that the target of a commit does or does not accept, without Spark."""

from __future__ import annotations

import contextlib
import itertools
import sqlite3

import pyarrow as pa
import pyarrow.dataset
import pyarrow.fs
import pyarrow.parquet
import pytest

from stagecrew.errors import CommitConflict, CommitFailed, CommitPending
from stagecrew.operators.commit_log import MemoryCommitLog
from stagecrew.operators.commits import commit
from stagecrew.operators.sinks import DatabaseSink, ObjectSink, ParquetSink, read_committed
from support.commit_schedules import first_commits_of_two_schemas, mismatched_schemas
from support.commit_trials import SCHEMA, Driver, Tasks
from support.local_sinks import appended, iceberg, objects, sqlite


@pytest.mark.parametrize("make", [appended, objects, sqlite, iceberg], ids=lambda make: make.__name__)
def test_a_schema_that_does_not_fit_is_refused(make, tmp_path):
    """A schema that does not fit the target is refused before any task runs. The error names the columns."""
    mismatched_schemas(make(tmp_path), {sqlite: "", iceberg: "long|int64"}.get(make, "int64"))


def test_the_order_of_columns_does_not_matter(tmp_path):
    """Columns can have another order or another Arrow memory layout than in the target."""
    trial = appended(tmp_path)
    trial.drive(Driver(), Tasks(1), "first")
    other, sink = pa.schema([("text", pa.large_string()), ("id", pa.int64())]), trial.make_sink()
    batch = pa.record_batch({"text": ["a"], "id": [7]}, schema=other)
    commit(sink, trial.commit_log, "c", other, lambda staging: [sink.stage(staging, 0, 1, iter([batch]))])
    assert (7, "a") in trial.visible()


def test_text_in_an_integer_column_is_refused(tmp_path):
    """The sink refuses text in an integer column when it stages rows, although SQLite would store it."""
    trial = sqlite(tmp_path)
    sink = trial.make_sink()

    def stage(staging):
        return [sink.stage(staging, 0, 1, iter([pa.record_batch({"id": ["one"], "text": ["a"]})]))]

    with pytest.raises(
        CommitFailed,
        match="rows for table target could not be staged: IntegrityError: cannot store TEXT value in INTEGER",
    ):
        commit(sink, trial.commit_log, "c", SCHEMA, stage)
    assert trial.visible() == []
    assert trial.leftovers() == []


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("make", [appended, objects], ids=lambda make: make.__name__)
def test_concurrent_first_commits_with_two_schemas_conflict(make, tmp_path, step):
    """Of two commits with different schemas that both find an empty target, one succeeds.

    The other's error names the columns that differ.
    """

    def make_trial(number):
        (tmp_path / str(number)).mkdir()
        return make(tmp_path / str(number))

    first_commits_of_two_schemas(make_trial, itertools.count(2, step))


@pytest.mark.parametrize("make", [appended, objects], ids=lambda make: make.__name__)
def test_a_first_commit_fails_while_another_one_with_another_schema_runs(make, tmp_path):
    """A first commit fails while a first commit with another schema is running. The error names the running commit.

    After the running commit has failed, the other schema is accepted.
    """
    trial = make(tmp_path)
    other_schema = pa.schema([("id", pa.int64())])

    def run(staging):
        with pytest.raises(
            CommitFailed,
            match="does not fit commit 'one', which is about to create .*: text is missing. Select and cast",
        ):
            commit(trial.make_sink(), trial.commit_log, "other", other_schema, lambda staging: [])
        raise ValueError("given up")

    with pytest.raises(ValueError, match="given up"):
        commit(trial.make_sink(), trial.commit_log, "one", SCHEMA, run)
    assert not commit(trial.make_sink(), trial.commit_log, "other", other_schema, lambda staging: []).repeated
    assert trial.leftovers() == []


def test_rows_that_the_table_refuses_are_a_conflict(tmp_path):
    """If the table refuses the rows, the commit raises CommitConflict and leaves no staged row. It can be repeated."""
    path = tmp_path / "data.db"
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute('CREATE TABLE target (id INTEGER PRIMARY KEY, "text" TEXT)')
        database.execute("INSERT INTO target VALUES (7, 'there')")
        database.commit()
    sink, commit_log = DatabaseSink(f"sqlite:///{path}", "target"), MemoryCommitLog()
    for _ in range(2):
        with pytest.raises(CommitConflict, match="refuses the rows: IntegrityError"):
            commit(sink, commit_log, "c", SCHEMA, lambda staging: Tasks(1).run(sink, staging))
    with contextlib.closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT count(*) FROM target").fetchone() == (1,)
        assert not database.execute("SELECT name FROM sqlite_master WHERE name LIKE 'stagecrew_stage%'").fetchall()
        database.execute("DELETE FROM target")
        database.commit()
    assert commit(sink, commit_log, "c", SCHEMA, lambda staging: Tasks(1).run(sink, staging)).rows == 40


@pytest.mark.parametrize("kind", ["view", "generated column"])
def test_a_table_that_cannot_be_written_is_refused(tmp_path, kind):
    """A table that cannot be written is refused before any task runs, and nothing is left."""
    trial = sqlite(tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / "data.db")) as database:
        if kind == "view":
            database.execute("CREATE VIEW other AS SELECT * FROM target")
        else:
            database.execute("CREATE TABLE other (id INTEGER, \"text\" TEXT AS ('text ' || id))")
    sink = DatabaseSink(f"sqlite:///{tmp_path}/data.db", "other")
    with pytest.raises(CommitFailed, match=f"table other cannot be written: OperationalError: cannot .* {kind}"):
        commit(sink, trial.commit_log, "c", SCHEMA, lambda staging: 1 / 0)
    assert trial.leftovers() == []


def test_lost_staged_rows_make_the_commit_pending(tmp_path):
    """If staged rows were lost, the sink notices this when it counts them, and adds none. The commit is pending."""
    trial = sqlite(tmp_path)
    sink = trial.make_sink()

    def run_and_lose_a_row(staging):
        messages = Tasks(1).run(sink, staging)
        with contextlib.closing(sqlite3.connect(tmp_path / "data.db")) as database:
            database.execute(f"DELETE FROM stagecrew_stage_{staging.run} WHERE id = 3")
            database.commit()
        return messages

    with pytest.raises(
        CommitPending, match="10 rows were staged for table target, but its staging table has 9 of them"
    ):
        commit(sink, trial.commit_log, "c", SCHEMA, run_and_lose_a_row, sleep=lambda _: None)
    assert trial.visible() == []


def test_a_trigger_that_skips_rows_is_a_refusal(tmp_path):
    """If a trigger of the table skips rows, the commit raises CommitConflict and adds none. It can be repeated."""
    trial, tasks = sqlite(tmp_path), Tasks(1)
    with contextlib.closing(sqlite3.connect(tmp_path / "data.db")) as database:
        database.execute("CREATE TRIGGER skip BEFORE INSERT ON target WHEN NEW.id = 3 BEGIN SELECT RAISE(IGNORE); END")

        with pytest.raises(
            CommitConflict, match="it added 9 of 10 rows without an error. Look for a trigger or a rule"
        ):
            trial.drive(Driver(), tasks)
        assert trial.visible() == []
        assert trial.leftovers() == []
        database.execute("DROP TRIGGER skip")
    trial.drive(Driver(), tasks)
    assert sorted(trial.visible()) == tasks.expected


def nested(nullable):
    """A schema with a list, a map, a list of maps, and a struct, whose nested fields are nullable or not."""
    value = pa.field("value", pa.int64(), nullable)
    counts = pa.map_(pa.string(), value)
    return pa.schema(
        [
            pa.field("id", pa.int64(), nullable),
            pa.field("tags", pa.list_(pa.field("element", pa.string(), nullable)), nullable),
            pa.field("counts", counts, nullable),
            pa.field("history", pa.list_(pa.field("element", counts, nullable)), nullable),
            pa.field("point", pa.struct([pa.field("x", pa.int64(), nullable)]), nullable),
        ]
    )


ROW = {"id": 1, "tags": ["a"], "counts": [("a", 1)], "history": [[("b", 2)]], "point": {"x": 3}}
NULLS = {"id": None, "tags": [None], "counts": [("a", None)], "history": [[("b", None)]], "point": {"x": None}}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("sink_type", [ParquetSink, ObjectSink])
def test_nested_columns_can_be_appended_whatever_their_nullability_is(tmp_path, sink_type, first):
    """Datasets with maps, lists and structs can be appended to one table. Spark derives their nullability from its plan,
    so it may differ. A reader gets all rows, also with nulls."""
    options = {"mode": "append"} if sink_type is ParquetSink else {}
    sink, written = sink_type(str(tmp_path / "table"), **options), []
    for number, nullable in enumerate((first, not first, first)):
        schema, rows = nested(nullable), [NULLS, ROW] if nullable else [ROW]
        batch = pa.RecordBatch.from_pylist(rows, schema)
        commit(
            sink,
            MemoryCommitLog(),
            f"c{number}",
            schema,
            lambda staging, batch=batch: [sink.stage(staging, 0, 1, iter([batch]))],
        )
        written += rows
    if sink_type is ParquetSink:
        found = pyarrow.dataset.dataset(tmp_path / "table", partitioning="hive", format="parquet")
    else:
        found = read_committed(str(tmp_path / "table"))
    rows = [{name: row[name] for name in ROW} for row in found.to_table().to_pylist()]
    assert sorted(map(str, rows)) == sorted(map(str, written))
    pyarrow.parquet.write_table(found.to_table(), tmp_path / "copy.parquet")
