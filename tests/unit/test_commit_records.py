"""Commit records: repeated commits are compared with their records, and records are validated and have a format."""

from __future__ import annotations

import base64
import contextlib
import datetime as dt
import json
import logging
import os
import sqlite3
import subprocess

import pyarrow as pa
import pyarrow.fs
import pytest

from stagecrew.errors import (
    CommitConflict,
    CommitFailed,
    CommitPending,
    ConfigurationError,
    OperatorMisused,
    RecordUnreadable,
)
from stagecrew.files import address
from stagecrew.operators.commit_log import FileCommitLog, MemoryCommitLog
from stagecrew.operators.commit_records import FORMAT, columns_of, read_mark
from stagecrew.operators.commits import Staging, abandon, commit, resume
from stagecrew.operators.sinks import DatabaseSink, ObjectSink, ParquetSink, read_committed
from stagecrew.recovery.jobs.commit_log import StoredCommitLog, finish_commits, is_done, require_readable
from stagecrew.recovery.jobs.fenced import FencedJobs
from stagecrew.recovery.jobs.spec import JobSpec
from stagecrew.recovery.state.handles import StateHandleStore
from stagecrew.recovery.state.storage import StateStorage
from stagecrew.recovery.stores import open_store
from support.commit_trials import SCHEMA, SinkWrapper, Tasks
from support.local_sinks import SINKS, files, iceberg, objects, parquet, small_disk, sqlite
from support.model_store import ModelServer
from support.simulated_jobs import MemorySink

#: The time at which the first commit of each test is decided: 2026-11-22 17:14:27 UTC.
DECIDED_AT = 1795367667.0


@pytest.fixture(params=SINKS, ids=lambda make: make.__name__)
def trial(request, tmp_path):
    return request.param(tmp_path)


def warnings(caplog):
    """Returns the warnings that were logged so far."""
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def run_commit(trial, content=None, schema=SCHEMA, commit_log=None, sink=None, clock=lambda: DECIDED_AT, **more):
    """Calls `commit` once with the id "c"."""
    target, tasks = sink or trial.make_sink(), Tasks(1)
    return commit(
        target, commit_log or trial.commit_log, "c", schema, lambda staging: tasks.run(trial.make_sink(), staging),
        sleep=lambda _: None, content=content, clock=clock, **more,
    )  # fmt: skip


# -- Different data under the same id


@pytest.mark.parametrize("log_lost", [False, True], ids=["recorded", "log lost"])
def test_a_commit_id_with_different_content_is_refused(trial, log_lost):
    """If a commit is repeated with different content, the error names both contents, and nothing changes.

    This holds even if the log was lost and only the sink still knows the commit.
    """
    run_commit(trial, "monday")
    before = sorted(trial.visible())
    commit_log = MemoryCommitLog() if log_lost else trial.commit_log
    for content in ("tuesday", None):
        with pytest.raises(OperatorMisused) as refused:
            run_commit(trial, content, commit_log=commit_log)
        message = str(refused.value)
        assert f"content is {content!r}, was 'monday'" in message
        assert "commit 'c' was decided for other data, on 2026-11-22 17:14:27 UTC, with 40 rows" in message
        assert "Use another commit id for other data" in message
    assert sorted(trial.visible()) == before
    assert run_commit(trial, "monday", commit_log=commit_log).repeated
    assert trial.leftovers() == []


@pytest.mark.parametrize("log_lost", [False, True], ids=["recorded", "log lost"])
def test_a_commit_id_with_different_columns_is_refused(trial, log_lost):
    """If a commit is repeated with different columns, the error names the columns of both, and no task runs."""
    run_commit(trial)
    commit_log = MemoryCommitLog() if log_lost else trial.commit_log
    for schema, difference in (
        (pa.schema([("id", pa.string()), ("text", pa.string())]), "id: string"),
        (pa.schema([("id", pa.int64())]), "id: int64" if log_lost else "fewer"),
        (pa.schema([*SCHEMA, ("more", pa.bool_())]), "more: bool"),
    ):
        with pytest.raises(OperatorMisused, match=f"columns are .*{difference}.*, were .*") as refused:
            commit(trial.make_sink(), commit_log, "c", schema, lambda staging: 1 / 0)
        assert "columns" in str(refused.value)
    assert len(trial.visible()) == 40


EQUIVALENT = [
    pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("text", pa.string())]),
    SCHEMA.with_metadata({"created": "later"}),
    pa.schema([pa.field("id", pa.int64(), metadata={"comment": "a number"}), ("text", pa.string())]),
    pa.schema([("text", pa.string()), ("id", pa.int64())]),
    pa.schema([("id", pa.int64()), ("text", pa.large_string())]),
]


@pytest.mark.parametrize("schema", EQUIVALENT, ids=["not null", "metadata", "field metadata", "order", "layout"])
def test_equivalent_columns_are_a_repeat(tmp_path, schema):
    """Nullability, metadata, the order of columns and Arrow's memory layout do not count as different data."""
    trial = parquet(tmp_path)
    run_commit(trial)
    for commit_log in (trial.commit_log, MemoryCommitLog()):
        assert commit(trial.make_sink(), commit_log, "c", schema, lambda staging: 1 / 0).repeated


def test_nested_types_are_compared_by_names_and_types():
    """Nullability does not count inside lists, maps and structs either."""

    def schema(nullable, name="a"):
        inner = pa.struct([pa.field(name, pa.list_(pa.field("item", pa.int32(), nullable)), nullable)])
        return pa.schema([("m", pa.map_(pa.string(), pa.field("value", inner, nullable)))])

    assert columns_of(schema(True)) == columns_of(schema(False)) == ["m: map<string, struct<a: list<int32>>>"]
    assert columns_of(schema(True, "b")) != columns_of(schema(True))


@pytest.mark.parametrize("log_lost", [False, True], ids=["recorded", "log lost"])
def test_a_repeated_commit_logs_a_warning(trial, log_lost, caplog):
    """A repeat logs a warning with the id, the time of the decision and the number of rows. A first commit does not."""
    run_commit(trial, "monday")
    assert warnings(caplog) == []
    commit_log = MemoryCommitLog() if log_lost else trial.commit_log
    assert run_commit(trial, "monday", commit_log=commit_log, clock=lambda: DECIDED_AT + 86400).repeated
    assert warnings(caplog) == [
        (
            "commit 'c' was already done: it was decided on 2026-11-22 17:14:27 UTC, with 40 rows. This call has "
            "written nothing. Use another commit id for other data"
        )
    ]


def test_a_repeat_that_finishes_a_pending_commit_logs_a_warning(tmp_path, caplog):
    """Only a call with the same content finishes a commit that is decided but not applied."""
    trial = sqlite(tmp_path)

    class Unreachable(SinkWrapper):
        def commit(self, staging, messages):
            raise OSError("no route")

    with pytest.raises(CommitPending):
        run_commit(trial, "monday", sink=Unreachable(trial.make_sink()))
    caplog.clear()
    with pytest.raises(OperatorMisused, match="content is 'tuesday', was 'monday'"):
        run_commit(trial, "tuesday")
    assert trial.visible() == []
    assert trial.leftovers() != [], "the staged rows of a decided commit were deleted"
    assert run_commit(trial, "monday").repeated
    assert len(trial.visible()) == 40
    assert warnings(caplog) == [
        (
            "commit 'c' was already decided on 2026-11-22 17:14:27 UTC, with 40 rows, and is finished now. This call "
            "has written nothing else. Use another commit id for other data"
        )
    ]


def test_a_commit_applied_by_an_earlier_version_is_a_repeat(tmp_path, caplog):
    """If an earlier version applied a commit, the sink does not know its content, so no content is compared.

    The warning lists the unknown facts.
    """
    for make in (parquet, objects, sqlite):
        folder = tmp_path / make.__name__
        folder.mkdir()
        trial = make(folder)
        run_commit(trial, "monday")
        if make is sqlite:
            with contextlib.closing(sqlite3.connect(folder / "data.db")) as database:
                database.execute("DELETE FROM stagecrew_commits WHERE target LIKE '% mark %'")
                database.commit()
        else:
            [file] = [path for path in folder.rglob("*.json") if "log" not in str(path.relative_to(folder))]
            stored = json.loads(file.read_text())
            del stored["mark"], stored["format"]
            file.write_text(json.dumps(stored))
        caplog.clear()
        assert run_commit(trial, "tuesday", commit_log=MemoryCommitLog()).repeated
        [warning] = warnings(caplog)
        assert "Its time, number of rows and content are unknown. This call has written nothing" in warning
        assert sorted(trial.visible()) == Tasks(1).expected


class SinkWithoutMarks(MemorySink):
    """A user's sink that stores no marks."""


def test_a_sink_without_marks_recognizes_repeats(tmp_path, caplog):
    """A sink with only the protocol's required methods recognizes repeats. The warning lists the unknown facts."""
    sink = SinkWithoutMarks(str(tmp_path))

    def run(staging):
        sink.staged[staging.run].append("row")
        return [{"text": "row", "rows": 1}]

    for repeated in (False, True):
        assert commit(sink, MemoryCommitLog(), "c", SCHEMA, run, content="a").repeated == repeated
    assert "content are unknown" in warnings(caplog)[0]


def test_a_sink_without_an_identity_is_identified_by_its_class(tmp_path):
    """Sinks that have no identity count as different if their classes differ."""
    commit_log = MemoryCommitLog()

    class Anonymous(MemorySink):
        def __init__(self, name):
            super().__init__(name)
            del self.identity

    class Other(Anonymous):
        pass

    one, other = Anonymous("one"), Other("other")
    for sink in (one, other):
        other.visible["c"] = []  # the other sink has a commit with this id too
        with (
            pytest.raises(OperatorMisused, match="'c' belongs to .*Anonymous, not to .*Other: use")
            if (sink is other)
            else contextlib.nullcontext()
        ):
            commit(sink, commit_log, "c", SCHEMA, lambda staging: [])


def test_an_aborted_commit_can_be_repeated_with_other_content(trial):
    """The content of an aborted commit is not compared, because the commit wrote nothing."""

    def fails(staging):
        raise ValueError("the job failed")

    with pytest.raises(ValueError, match="the job failed"):
        commit(trial.make_sink(), trial.commit_log, "c", pa.schema([("id", pa.int64()), ("text", pa.string())]), fails,
               content="monday")  # fmt: skip
    assert not run_commit(trial, "tuesday").repeated
    assert trial.commit_log.read("c")[1]["content"] == "tuesday"


@pytest.mark.parametrize("content", ["x" * 1000, "\x00\n\ud800'\"%s\\" * 30, '"' * 60, "\U0001f600" * 60, ""])
def test_content_can_be_any_text(trial, content):
    """Content can be long and contain any characters, and every character counts. The sink's mark is always short."""
    run_commit(trial, content)
    for commit_log in (trial.commit_log, MemoryCommitLog()):
        assert run_commit(trial, content, commit_log=commit_log).repeated
        with pytest.raises(OperatorMisused, match="content is"):
            run_commit(trial, f"{content}!", commit_log=commit_log)
    mark = trial.make_sink().stored_mark("c")
    assert len(mark) <= 400
    assert mark.isprintable()


def test_content_must_be_a_text():
    """Content of any type other than str is refused before the sink is used."""
    with pytest.raises(
        OperatorMisused, match=r"content of a commit is a text, such as a date .*, not datetime.date\(2026"
    ):
        commit(Untouched(), MemoryCommitLog(), "c", SCHEMA, lambda staging: 1 / 0, content=dt.date(2026, 11, 23))


# -- In jobs


class Handles:
    """State handles for the commits of a job, with an in-memory store."""

    def __init__(self, tmp_path):
        session = ModelServer().session()
        session.ensure("commits")
        (tmp_path / "state").mkdir()
        self.handles = StateHandleStore(session, StateStorage(tmp_path / "state"), "commits")


@pytest.fixture(params=["memory", "file", "stored"])
def open_log(request, tmp_path):
    """A function that opens the commit log for a sink. Each call opens the same log."""
    if request.param == "stored":
        handles = Handles(tmp_path).handles
        return lambda sink: StoredCommitLog(handles, sink)
    log = MemoryCommitLog() if request.param == "memory" else FileCommitLog(tmp_path / "log")
    return lambda sink: log


def rows(sink):
    def run(staging):
        sink.staged[staging.run].append("row")
        return [{"text": "row", "rows": 1}]

    return run


def test_different_content_in_a_job(tmp_path, open_log, caplog):
    """Different content is an error in the run that decided the commit. In a later run of the job, it is a warning.

    The rows of the earlier run stay.
    """
    sink = MemorySink(str(tmp_path))
    commit_log = open_log(sink)

    def commit_again(content, writer, sink=sink):
        return commit(sink, open_log(sink), "c", SCHEMA, rows(sink), content=content, writer=writer)

    assert not commit(sink, commit_log, "c", SCHEMA, rows(sink), content="monday", writer=("nightly", 1)).repeated
    assert commit_log.read("c")[1] | {"job": "nightly", "attempt": 1} == commit_log.read("c")[1]
    for writer in (("nightly", 1), ("weekly", 2), None):
        with pytest.raises(OperatorMisused, match="content is 'tuesday', was 'monday'"):
            commit_again("tuesday", writer)
    assert warnings(caplog) == []
    assert commit_again("monday", ("nightly", 1)).repeated
    assert warnings(caplog) == [], "a repeat in a job logs no warning"
    assert commit_again("tuesday", ("nightly", 2)).repeated
    [warning] = warnings(caplog)
    assert warning.startswith(
        "an earlier run of this job has decided commit 'c', and its rows stay. This run differs: "
    )
    assert "content is 'tuesday', was 'monday'" in warning
    assert sink.visible == {"c": ["row"]}


def test_a_different_sink_in_a_later_run_of_a_job(tmp_path, open_log, caplog):
    """If a later run of a job commits to a different sink (its path may contain a date), the earlier run's rows stay.

    A warning names both sinks, and the new sink is not used.
    """
    one, other = MemorySink(f"{tmp_path}/monday"), MemorySink(f"{tmp_path}/tuesday")
    commit(one, open_log(one), "c", SCHEMA, rows(one), writer=("nightly", 1))
    for writer in (("nightly", 1), None):
        with pytest.raises(OperatorMisused, match="belongs to .*/monday, not to .*/tuesday"):
            commit(other, open_log(other), "c", SCHEMA, rows(other), writer=writer)
    report = commit(other, open_log(other), "c", SCHEMA, rows(other), writer=("nightly", 2))
    assert (report.repeated, report.rows) == (True, 1)
    assert "/monday, not to" in warnings(caplog)[0]
    assert (one.visible, other.visible, other.staged) == ({"c": ["row"]}, {}, {})


def test_rolling_forward_uses_only_the_record(tmp_path, caplog):
    """A run finishes the previous run's commits with the stored sink, schema and content, and compares nothing."""
    handles, sink = Handles(tmp_path).handles, MemorySink(str(tmp_path))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(CommitPending):
        patch.setattr(sink, "commit", lambda *_: 1 / 0)
        commit(
            sink, StoredCommitLog(handles, sink), "c", SCHEMA, rows(sink), content="monday", writer=("nightly", 1),
            sleep=lambda _: None, clock=lambda: DECIDED_AT,
        )  # fmt: skip
    caplog.clear()
    finish_commits(handles, ending=False)
    assert sink.visible == {"c": ["row"]}
    assert warnings(caplog) == []
    record = StoredCommitLog(handles, sink).read("c")[1]
    assert (record["state"], record["content"], record["job"], record["attempt"], record["time"]) == (
        "applied", "monday", "nightly", 1, DECIDED_AT,
    )  # fmt: skip


# -- Formats


class Untouched:
    """A sink that must not be used."""

    identity = "untouched"

    def __getattr__(self, name):
        if name.startswith("__") or name in ("stored_mark", "in_tasks"):
            raise AttributeError(name)
        pytest.fail(f"{name} was called")


def earlier_record(state, **more):
    """Returns a record as an earlier version wrote it."""
    return {
        "state": state,
        "run": "0" * 32,
        "before": [],
        "sink": "untouched",
        "schema": base64.b64encode(SCHEMA.serialize()).decode(),
        "messages": [],
        **more,
    }


@pytest.mark.parametrize("number", [None, FORMAT + 1, "two"])
@pytest.mark.parametrize("state", ["open", "decided", "applied", "aborted", "refused"])
def test_a_record_of_another_format_is_refused(open_log, state, number):
    """A record of another format is not changed, finished, aborted or deleted. The error says what to do."""
    sink = Untouched()
    commit_log, record = open_log(sink), earlier_record(state) | ({} if number is None else {"format": number})
    version = commit_log.write("c", record, 0)
    for call in (
        lambda: commit(sink, open_log(sink), "c", SCHEMA, lambda staging: 1 / 0),
        lambda: resume(sink, open_log(sink), "c"),
        lambda: abandon(sink, open_log(sink), "c"),
    ):
        with pytest.raises(RecordUnreadable) as refused:
            call()
        message = str(refused.value)
        assert "record of commit 'c'" in message
        assert "Nothing was changed or deleted. Finish the commit with the version that wrote it" in message
        assert ("an earlier version of stagecrew wrote" if number is None else f"has format {number!r}") in message
    assert commit_log.read("c") == (version, record)


def test_every_record_contains_its_format(open_log, tmp_path):
    """Every record has its format in the field `format`."""
    sink = MemorySink(str(tmp_path))
    commit(sink, open_log(sink), "c", SCHEMA, rows(sink))
    assert open_log(sink).read("c")[1]["format"] == FORMAT


def test_a_job_with_a_record_of_an_earlier_version_is_unreadable(tmp_path, caplog):
    """If a job has a record of an earlier version, its commits are neither finished nor aborted.

    The staged rows and the stored files stay.
    """
    session = ModelServer().session()
    (tmp_path / "state").mkdir()
    storage = StateStorage(tmp_path / "state")
    jobs = FencedJobs(session, storage)
    jobs.submit(JobSpec("job.py", (), {}, {}, b"", 2), "nightly")
    handles, sink = jobs.handles("nightly", "commits"), MemorySink(str(tmp_path))
    StoredCommitLog(handles, sink).write("nightly/sink", earlier_record("decided", sink=str(tmp_path)), 0)
    stored = {path: path.read_bytes() for path in (tmp_path / "state").rglob("*") if path.is_file()}
    sink.staged["0" * 32] = ["row"]
    with pytest.raises(
        RecordUnreadable,
        match="'nightly/sink' of the commits of job 'nightly' cannot be read: an earlier version of stagecrew wrote",
    ):
        jobs.require_readable("nightly")
    for ending in (False, True):
        with pytest.raises(RecordUnreadable, match="Finish the commit with the version that wrote it"):
            finish_commits(handles, ending=ending, retry_timeout=60.0)
    with pytest.raises(RecordUnreadable):
        is_done(handles, "nightly/sink")
    assert (sink.visible, sink.staged) == ({}, {"0" * 32: ["row"]})
    assert {path: path.read_bytes() for path in (tmp_path / "state").rglob("*") if path.is_file()} == stored


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"record": {}}', b"\x80"])
def test_a_damaged_record_of_a_job_is_unreadable(tmp_path, data):
    """Bytes that are not a record of a commit are unreadable for every reader, and nothing is deleted."""
    handles, sink = Handles(tmp_path).handles, MemorySink(str(tmp_path))
    handles.add("c", data)
    for call in (
        lambda: StoredCommitLog(handles, sink).read("c"),
        lambda: is_done(handles, "c"),
        lambda: require_readable("c", data),
        lambda: finish_commits(handles, ending=True),
    ):
        with pytest.raises(RecordUnreadable, match="the record of commit 'c' is damaged .*: restore the state storage"):
            call()
    assert handles.names() == ["c"]


def test_manifests_of_a_later_format_are_refused(tmp_path):
    """Readers and commits refuse a manifest of a later format, and nothing changes.

    A manifest without a format number has the same fields as format 1, so it is read.
    """
    trial, target = objects(tmp_path), tmp_path / "objects"
    run_commit(trial)
    [manifest] = (target / "_stagecrew").glob("*.json")
    stored = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({name: stored[name] for name in ("commit", "schema", "files")}))
    assert read_committed(target).count_rows() == 40
    manifest.write_text(json.dumps(stored | {"format": 9}))
    before = files(tmp_path)
    for call in (lambda: read_committed(target), lambda: run_commit(trial, commit_log=MemoryCommitLog())):
        with pytest.raises(
            CommitFailed, match="has format 9, and this version of stagecrew reads 1. Nothing was changed. Use"
        ):
            call()
    assert files(tmp_path) == before


@pytest.mark.parametrize("text", ['{"format":9}', '{"format":1}', "[]", "text"])
def test_an_invalid_mark_is_refused(text):
    """A mark of another format, or of another program, is refused. The error says which of the two it is."""
    with pytest.raises(RecordUnreadable, match="the sink's mark of commit 'c' (has format 9|is invalid)"):
        read_mark("c", text)


# -- Records that were tampered with


def change(trial, **fields):
    """Changes fields of the trial's only commit record, in its file."""
    [path] = [path for path in trial.commit_log._folder.iterdir() if path.suffix == ".json"]
    stored = json.loads(path.read_text())
    stored["record"] |= fields
    path.write_text(json.dumps(stored))


@pytest.mark.parametrize("field", ["run", "before"])
@pytest.mark.parametrize("state", ["open", "decided", "applied", "aborted"])
def test_a_run_id_that_is_a_path_is_refused(trial, tmp_path, field, state):
    """If a run id in a record is a path, the record is refused, and the folder at this path is not touched."""
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "theirs").touch()
    run_commit(trial)
    before = files(tmp_path / "victim"), sorted(trial.visible())
    for run in (
        "x/../../victim",
        "../victim",
        f"{'0' * 32}; DROP TABLE target",
        "",
        7,
        "0" * 31,
        "A" * 32,
        f"{'0' * 32}\n",
    ):
        change(trial, state=state, **{field: run if field == "run" else [run]})
        for call in (lambda: run_commit(trial), lambda: abandon(trial.make_sink(), trial.commit_log, "c")):
            with pytest.raises(RecordUnreadable, match="is not a run id. Nothing was changed or deleted"):
                call()
    assert (files(tmp_path / "victim"), sorted(trial.visible())) == before


@pytest.mark.parametrize("make", [parquet, objects, iceberg], ids=lambda make: make.__name__)
@pytest.mark.parametrize("name", ["../../victim/theirs", "/etc/passwd", "..", "", "a\\b", "a\n", None, 7])
def test_a_message_that_names_a_path_is_refused(make, tmp_path, name):
    """A record is refused if a message names anything but a staged file. Nothing is moved or deleted."""
    trial = make(tmp_path)
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "theirs").write_text("theirs")

    class Unreachable(SinkWrapper):
        def commit(self, staging, messages):
            raise OSError("no route")

    with pytest.raises(CommitPending):
        run_commit(trial, sink=Unreachable(trial.make_sink()))
    change(trial, messages=[{"file": name, "rows": 40}])
    staged = trial.leftovers()
    with pytest.raises(RecordUnreadable, match="is not the name of a staged file. Nothing was moved or deleted"):
        run_commit(trial)
    assert (victim / "theirs").read_text() == "theirs"
    assert trial.leftovers() == staged
    assert trial.visible() == []


@pytest.mark.parametrize(
    "fields",
    [
        {"state": "unknown"}, {"messages": None, "state": "decided"}, {"messages": [7]}, {"messages": [{"rows": "40"}]},
        {"messages": {}}, {"schema": "!"}, {"schema": base64.b64encode(b"no schema").decode()}, {"sink": None},
        {"before": None}, {"time": "now"}, {"content": 7}, {"attempt": "1"},
    ],
    ids=str,
)  # fmt: skip
def test_a_record_with_an_invalid_field_is_refused(tmp_path, fields):
    """Every field of a record is validated before the record is used. The error says how to continue."""
    trial = parquet(tmp_path)
    run_commit(trial)
    change(trial, **fields)
    with pytest.raises(RecordUnreadable, match="record of commit 'c' is invalid: .*Restore the record"):
        run_commit(trial)
    assert len(trial.visible()) == 40


def test_a_manifest_that_names_other_files_is_refused(tmp_path):
    """Readers refuse a manifest that names a file outside the commit, and do not open the file."""
    trial, target = objects(tmp_path), tmp_path / "objects"
    run_commit(trial)
    [manifest] = (target / "_stagecrew").glob("*.json")
    stored = json.loads(manifest.read_text())
    for file in ("../secret.parquet", "data/../../secret.parquet", "/etc/passwd", "data/./x", "other/x", 7):
        manifest.write_text(json.dumps(stored | {"files": [file]}))
        with pytest.raises(CommitFailed, match="which is not an object of a commit"):
            read_committed(target)


def test_column_names_are_quoted_in_sql(tmp_path):
    """A column name that contains quotes and SQL is only a name."""
    with contextlib.closing(sqlite3.connect(tmp_path / "data.db")) as database:
        database.execute('CREATE TABLE target ("a""; DROP TABLE target; --" INTEGER)')
    sink = DatabaseSink(f"sqlite:///{tmp_path}/data.db", "target")
    schema = pa.schema([('a"; DROP TABLE target; --', pa.int64())])
    batch = pa.record_batch([pa.array([7])], schema=schema)
    assert commit(sink, MemoryCommitLog(), "c", schema, lambda s: [sink.stage(s, 0, 1, iter([batch]))]).rows == 1
    with contextlib.closing(sqlite3.connect(tmp_path / "data.db")) as database:
        assert database.execute("SELECT * FROM target").fetchall() == [(7,)]


def test_table_names_of_a_run_are_quoted_in_sql(tmp_path):
    """The sink quotes the names of its staging tables, even if nothing has validated the run id that they contain."""
    trial = sqlite(tmp_path)
    run_commit(trial)
    trial.make_sink().discard(Staging("c", "x; DROP TABLE target", SCHEMA), ())
    trial.make_sink().discard(Staging("c", 'x"; DROP TABLE target; --', SCHEMA), ())
    assert len(trial.visible()) == 40


# -- Folders that a rename cannot replace


def mounted_at(folder, kind):
    """Mounts a separate disk ("mount") or another folder of the same disk ("bind") at this path."""
    if kind == "mount":
        return small_disk(folder, "64k")

    @contextlib.contextmanager
    def bind_mount():
        folder.mkdir()
        (folder.parent / "source").mkdir()
        subprocess.run(["mount", "--bind", str(folder.parent / "source"), str(folder)], check=True)
        try:
            yield folder
        finally:
            subprocess.run(["umount", str(folder)], check=True)

    return bind_mount()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts disks")
@pytest.mark.parametrize("kind", ["mount", "bind"])
@pytest.mark.parametrize("name", ["table", "a b"])
def test_a_mount_point_is_refused_as_target(tmp_path, kind, name):
    """A mount point is refused as target before any task runs, and no file is left. A folder below it is accepted."""
    with mounted_at(tmp_path / name, kind) as folder:
        commit_log = FileCommitLog(tmp_path / "log")
        sink = ParquetSink(folder)
        for _ in range(2):
            with pytest.raises(
                CommitConflict, match=f"{folder} is a mount point, which a rename cannot replace.*Write to"
            ):
                commit(sink, commit_log, "c", SCHEMA, lambda staging: 1 / 0)
            assert commit_log.read("c")[1]["state"] == "aborted"
        assert [path for path in files(tmp_path) if not path.startswith("log/")] == []
        assert not list(tmp_path.glob("_stagecrew*"))
        below = ParquetSink(folder / "table")
        assert commit(below, commit_log, "d", SCHEMA, lambda s: Tasks(1).run(below, s)).rows == 40


@pytest.mark.parametrize("to", ["an empty folder", "nothing"])
def test_a_symbolic_link_is_refused_as_target(tmp_path, to):
    """A symbolic link is refused as target before any task runs, and no file is left. A folder below it is accepted."""
    (tmp_path / "far").mkdir()
    (tmp_path / "out").mkdir()
    link = tmp_path / "out" / "table"
    link.symlink_to(tmp_path / ("far" if to == "an empty folder" else "nothing"))
    commit_log, sink = MemoryCommitLog(), ParquetSink(link)
    with pytest.raises(CommitConflict, match=f"{link} is a symbolic link, which a rename cannot replace.*Write to a"):
        commit(sink, commit_log, "c", SCHEMA, lambda staging: 1 / 0)
    assert commit_log.read("c")[1]["state"] == "aborted"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["table"]
    assert list((tmp_path / "far").iterdir()) == []
    if to == "an empty folder":
        below = ParquetSink(link / "table")
        assert commit(below, commit_log, "d", SCHEMA, lambda s: Tasks(1).run(below, s)).rows == 40
        appends = ParquetSink(link / "many", "append")
        assert commit(appends, commit_log, "e", SCHEMA, lambda s: Tasks(1).run(appends, s)).rows == 40


def test_a_target_that_becomes_a_link_while_tasks_run_is_refused(tmp_path):
    """If the target becomes a link while tasks run, the commit is refused, not pending, and no file is left."""
    (tmp_path / "far").mkdir()
    trial = parquet(tmp_path)

    def run(staging):
        messages = Tasks(1).run(trial.make_sink(), staging)
        (tmp_path / "out" / "table").symlink_to(tmp_path / "far")
        return messages

    with pytest.raises(CommitConflict, match="is a symbolic link"):
        commit(trial.make_sink(), trial.commit_log, "c", SCHEMA, run, sleep=lambda _: None)
    assert trial.commit_log.read("c")[1]["state"] == "refused"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["table"]


def test_the_root_folder_is_refused_as_target():
    """The target `/` is refused, and is not mistaken for the working directory of the process."""
    sink = ParquetSink("/")
    assert sink.identity == "<Parquet files, to create, in />"
    with pytest.raises(CommitConflict, match="/ is a mount point"):
        sink.begin(Staging("c", "0" * 32, SCHEMA))


# -- Credentials and permissions


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://KEY:SEC/RET@bucket/folder", "s3://bucket/folder"),
        ("s3://KEY:SE@C/RE@T@bucket/folder?region=x", "s3://bucket/folder"),
        ("s3://KEY:SE?CRET@bucket/folder", "s3://bucket/folder"),
        ("s3://KEY:SE#CRET@bucket", "s3://bucket"),
        ("s3://bucket/folder?secret_key=SECRET", "s3://bucket/folder"),
        ("s3://KEY:SECRET@[bucket", "s3://[bucket"),
        ("https://me:SEC://RET@host:9000", "https://host:9000"),
        ("me:SECRET@host", "host"),
        ("file:///home/me@work/x", "file:///home/me@work/x"),
        ("sqlite:////home/me@work/x.db", "sqlite:////home/me@work/x.db"),
        ("bucket", "bucket"),
    ],
)
def test_an_address_is_shown_without_credentials(text, expected):
    """In an address, everything before the last @ and the query are omitted. Local paths are shown in full."""
    assert address(text) == expected


@pytest.mark.parametrize(
    "call",
    [
        lambda: ObjectSink("s3://KEY:SEC/RET@bucket/x"),
        lambda: ParquetSink("hdfs://KEY:SEC/RET@bucket/x y"),
        lambda: ObjectSink("nothing://KEY:SECRET@bucket/x"),
        lambda: StateStorage("s3://KEY:SEC/RET@bucket/x"),
        lambda: StateStorage("s3://KEY:SEC?RET@bucket/x"),
        lambda: open_store("postgres://KEY:SEC/RET@host/x"),
        lambda: open_store("zookeeper://KEY:SEC/RET@host/x"),
        lambda: open_store("zookeeper://KEY:SEC?RET@host/x"),
        lambda: DatabaseSink("postgresql://KEY:SEC/RET@host/db", "t").identity,
        lambda: DatabaseSink("postgresql://KEY:SEC/RET@host/db?sslmode=require", "t").identity,
        lambda: DatabaseSink("postgresql://KEY:1/RET@host/db", "t").identity,
        lambda: DatabaseSink("postgresql://KEY:SEC%ZZRET@host/db", "t").identity,
        lambda: DatabaseSink("KEY:SECRET@host/db", "t").identity,
    ],
)
def test_errors_do_not_contain_credentials(call):
    """Errors about unusable addresses do not contain the credentials that people paste into addresses."""
    with pytest.raises((OperatorMisused, ConfigurationError, pa.ArrowInvalid)) as error:
        call()
    text = f"{error.value} {error.value.__cause__}"
    assert not [part for part in ("SEC", "RET", "KEY") if part in text], text


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://h:1,i:2/db",
        "postgresql://[::1]:5432/db",
        "postgresql:///db?application_name=a@b",
        "postgresql://me:p%40ss@h/db?options=-csearch_path%3Da@b",
    ],
)
def test_valid_server_urls_are_accepted(url):
    """URLs with several hosts, IPv6 addresses in brackets, or an @ in the query are accepted, as in libpq."""
    assert DatabaseSink(url, "t").identity.startswith("<table t of postgresql> in ")


def test_only_the_owner_can_lock_a_commit_log(tmp_path):
    """`FileCommitLog` creates its folder with mode 0700 and its lock with mode 0600, whatever the umask.

    It also restricts the mode of an existing lock, but not of an existing folder.
    """
    before = os.umask(0)
    try:
        commit_log = FileCommitLog(tmp_path / "new" / "log")
        commit_log.write("c", {"state": "open"}, 0)
    finally:
        os.umask(before)
    folder = tmp_path / "new" / "log"
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in (folder, *folder.iterdir())}
    assert modes == {"log": "0o700", ".lock": "0o600", "c.json": "0o600"}
    (folder / ".lock").chmod(0o666)
    folder.chmod(0o755)
    FileCommitLog(folder).write("c", {"state": "aborted"}, 1)
    assert (folder / ".lock").stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o755, "the mode of an existing folder must not change"


def test_log_records_cannot_control_the_terminal(caplog, capsys):
    """Log records escape control characters, and indent further lines so that none of them looks like a new record."""
    logging.getLogger("stagecrew").warning(
        "job %r: %s, %d", "a", ValueError("no\x1b[2J\n2026 INFO all is well\u202e"), 7
    )
    assert caplog.messages == ["job 'a': no\\x1b[2J\n    2026 INFO all is well\\u202e, 7"]
