"""Records of commits: two uses of one id are compared, records are checked before use, and each has a format."""

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

from jobsim import MemorySink
from modelstore import ModelServer
from sinks import SCHEMA, SINKS, Around, Tasks, files, iceberg, objects, parquet, small_disk, sqlite
from stagecrew.errors import (
    CommitConflict,
    CommitFailed,
    CommitPending,
    CommitUnreadable,
    JobUnreadable,
    OperatorMisused,
    RecoveryMisused,
)
from stagecrew.files import address
from stagecrew.operators.commit_log import FileCommitLog, MemoryCommitLog
from stagecrew.operators.commit_records import FORMAT, columns_of, read_mark
from stagecrew.operators.commits import Staging, abandon, commit, resume
from stagecrew.operators.sinks import DatabaseSink, ObjectSink, ParquetSink, read_committed
from stagecrew.recovery.jobs.commit_log import StoredCommitLog, finish_commits, is_done
from stagecrew.recovery.jobs.fenced import FencedJobs
from stagecrew.recovery.jobs.spec import JobSpec
from stagecrew.recovery.state.handles import StateHandleStore
from stagecrew.recovery.state.storage import StateStorage
from stagecrew.recovery.stores import open_store

#: When the first commit of each test is decided: 2026-11-22 17:14:27 UTC.
MONDAY = 1795367667.0


@pytest.fixture(params=SINKS, ids=lambda make: make.__name__)
def trial(request, tmp_path):
    return request.param(tmp_path)


def warnings(caplog):
    """The warnings so far."""
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def lands(trial, content=None, schema=SCHEMA, commit_log=None, sink=None, clock=lambda: MONDAY, **more):
    """One call of `commit` with the id "c"."""
    mine, tasks = sink or trial.make_sink(), Tasks(1)
    return commit(
        mine, commit_log or trial.commit_log, "c", schema, lambda staging: tasks.run(trial.make_sink(), staging),
        sleep=lambda _: None, content=content, clock=clock, **more,
    )  # fmt: skip


# -- Other data under the same id


@pytest.mark.parametrize("forgot", [False, True], ids=["recorded", "forgotten"])
def test_other_content_is_refused(trial, forgot):
    """An id that is used again with another content raises with both values, and all stays as it is; also where only the sink knows it."""
    lands(trial, "monday")
    before = sorted(trial.visible())
    commit_log = MemoryCommitLog() if forgot else trial.commit_log
    for content in ("tuesday", None):
        with pytest.raises(OperatorMisused) as refused:
            lands(trial, content, commit_log=commit_log)
        said = str(refused.value)
        assert f"content is {content!r}, there 'monday'" in said
        assert "commit 'c' was decided for other data, on 2026-11-22 17:14:27 UTC, with 40 rows" in said
        assert "Give other data another commit id" in said
    assert sorted(trial.visible()) == before
    assert lands(trial, "monday", commit_log=commit_log).repeated
    assert trial.left() == []


@pytest.mark.parametrize("forgot", [False, True], ids=["recorded", "forgotten"])
def test_other_columns_are_refused(trial, forgot):
    """An id that is used again for a dataset of other columns raises with both; nothing runs."""
    lands(trial)
    commit_log = MemoryCommitLog() if forgot else trial.commit_log
    for schema, said in (
        (pa.schema([("id", pa.string()), ("text", pa.string())]), "id: string"),
        (pa.schema([("id", pa.int64())]), "id: int64" if forgot else "fewer"),
        (pa.schema([*SCHEMA, ("more", pa.bool_())]), "more: bool"),
    ):
        with pytest.raises(OperatorMisused, match=f"columns are .*{said}.*, there .*") as refused:
            commit(trial.make_sink(), commit_log, "c", schema, lambda staging: 1 / 0)
        assert "columns" in str(refused.value)
    assert len(trial.visible()) == 40


SAME = [
    pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("text", pa.string())]),
    SCHEMA.with_metadata({"made": "later"}),
    pa.schema([pa.field("id", pa.int64(), metadata={"comment": "a number"}), ("text", pa.string())]),
    pa.schema([("text", pa.string()), ("id", pa.int64())]),
    pa.schema([("id", pa.int64()), ("text", pa.large_string())]),
]


@pytest.mark.parametrize("schema", SAME, ids=["not null", "metadata", "of a field", "order", "layout"])
def test_columns_that_are_the_same(tmp_path, schema):
    """Whether a column may be null, metadata, the order of columns and Arrow's layout tell no data apart: it is a repeat."""
    trial = parquet(tmp_path)
    lands(trial)
    for commit_log in (trial.commit_log, MemoryCommitLog()):
        assert commit(trial.make_sink(), commit_log, "c", schema, lambda staging: 1 / 0).repeated


def test_columns_of_nested_types():
    """The same holds inside of lists, maps and structs; their names and types count."""

    def schema(nullable, name="a"):
        inner = pa.struct([pa.field(name, pa.list_(pa.field("item", pa.int32(), nullable)), nullable)])
        return pa.schema([("m", pa.map_(pa.string(), pa.field("value", inner, nullable)))])

    assert columns_of(schema(True)) == columns_of(schema(False)) == ["m: map<string, struct<a: list<int32>>>"]
    assert columns_of(schema(True, "b")) != columns_of(schema(True))


@pytest.mark.parametrize("forgot", [False, True], ids=["recorded", "forgotten"])
def test_a_repeat_is_a_warning(trial, forgot, caplog):
    """It names the id, when the commit was decided, how many rows it has, and that nothing was written. A first commit logs nothing."""
    lands(trial, "monday")
    assert warnings(caplog) == []
    commit_log = MemoryCommitLog() if forgot else trial.commit_log
    assert lands(trial, "monday", commit_log=commit_log, clock=lambda: MONDAY + 86400).repeated
    assert warnings(caplog) == [
        (
            "commit 'c' was done before: it was decided on 2026-11-22 17:14:27 UTC, with 40 rows. This call has written nothing. Give other "
            "data another commit id"
        )
    ]


def test_what_a_repeat_finishes_is_a_warning(tmp_path, caplog):
    """A commit that is decided, and not done, is finished by a repeat with the same content alone: the warning says so."""
    trial = sqlite(tmp_path)

    class Away(Around):
        def commit(self, staging, messages):
            raise OSError("no route")

    with pytest.raises(CommitPending):
        lands(trial, "monday", sink=Away(trial.make_sink()))
    caplog.clear()
    with pytest.raises(OperatorMisused, match="content is 'tuesday', there 'monday'"):
        lands(trial, "tuesday")
    assert trial.visible() == []
    assert trial.left() != [], "the staged rows of a decided commit were deleted"
    assert lands(trial, "monday").repeated
    assert len(trial.visible()) == 40
    assert warnings(caplog) == [
        (
            "commit 'c' was decided before, on 2026-11-22 17:14:27 UTC, with 40 rows, and is finished now. This call has written nothing "
            "else. Give other data another commit id"
        )
    ]


def test_a_commit_that_an_earlier_version_has_done(tmp_path, caplog):
    """Its sink does not know the content: a call is a repeat, and its warning lists the missing facts."""
    for make in (parquet, objects, sqlite):
        folder = tmp_path / make.__name__
        folder.mkdir()
        trial = make(folder)
        lands(trial, "monday")
        if make is sqlite:
            with contextlib.closing(sqlite3.connect(folder / "data.db")) as database:
                database.execute("DELETE FROM stagecrew_commits WHERE target LIKE '% mark %'")
                database.commit()
        else:
            [file] = [path for path in folder.rglob("*.json") if "log" not in str(path.relative_to(folder))]
            known = json.loads(file.read_text())
            del known["mark"], known["format"]
            file.write_text(json.dumps(known))
        caplog.clear()
        assert lands(trial, "tuesday", commit_log=MemoryCommitLog()).repeated
        [said] = warnings(caplog)
        assert "with how many rows and for which content is not known. This call has written nothing" in said
        assert sorted(trial.visible()) == Tasks(1).expected


class Plain(MemorySink):
    """A sink of a user's own, which keeps no marks."""


def test_a_sink_that_keeps_no_marks(tmp_path, caplog):
    """One of a user's own with the protocol's five methods: it knows its repeats, and the warning lists the missing facts."""
    sink = Plain(str(tmp_path))

    def run(staging):
        sink.staged[staging.run].append("row")
        return [{"text": "row", "rows": 1}]

    for repeated in (False, True):
        assert commit(sink, MemoryCommitLog(), "c", SCHEMA, run, content="a").repeated == repeated
    assert "for which content is not known" in warnings(caplog)[0]


def test_a_sink_without_an_identity_is_its_class(tmp_path):
    """Two sinks that do not say which place they are: of other classes they are other sinks."""
    commit_log = MemoryCommitLog()

    class Nameless(MemorySink):
        def __init__(self, name):
            super().__init__(name)
            del self.identity

    class Other(Nameless):
        pass

    one, other = Nameless("one"), Other("other")
    for sink in (one, other):
        other.visible["c"] = []  # it shows one of this id too
        with (
            pytest.raises(OperatorMisused, match="'c' is known for .*Nameless, not for .*Other: give")
            if (sink is other)
            else contextlib.nullcontext()
        ):
            commit(sink, commit_log, "c", SCHEMA, lambda staging: [])


def test_what_was_not_decided_begins_anew(trial):
    """A commit that was aborted may be tried again with another content and other columns' metadata: nothing of it was written."""

    def fails(staging):
        raise ValueError("the job failed")

    with pytest.raises(ValueError, match="the job failed"):
        commit(trial.make_sink(), trial.commit_log, "c", pa.schema([("id", pa.int64()), ("text", pa.string())]), fails,
               content="monday")  # fmt: skip
    assert not lands(trial, "tuesday").repeated
    assert trial.commit_log.read("c")[1]["content"] == "tuesday"


@pytest.mark.parametrize("content", ["x" * 1000, "\x00\n\ud800'\"%s\\" * 30, '"' * 60, "\U0001f600" * 60, ""])
def test_any_text_is_a_content(trial, content):
    """A content may be long and have any characters; two that differ at their ends only are two. The mark of a sink is short."""
    lands(trial, content)
    for commit_log in (trial.commit_log, MemoryCommitLog()):
        assert lands(trial, content, commit_log=commit_log).repeated
        with pytest.raises(OperatorMisused, match="content is"):
            lands(trial, f"{content}!", commit_log=commit_log)
    mark = trial.make_sink().stored_mark("c")
    assert len(mark) <= 400
    assert mark.isprintable()


def test_no_content_is_a_date():
    """Any other type is refused before the sink is asked."""
    with pytest.raises(
        OperatorMisused, match=r"content of a commit is a text, such as a date .*, not datetime.date\(2026"
    ):
        commit(Untouched(), MemoryCommitLog(), "c", SCHEMA, lambda staging: 1 / 0, content=dt.date(2026, 11, 23))


# -- In jobs


class Handles:
    """A job's commits in a store."""

    def __init__(self, tmp_path):
        session = ModelServer().session()
        session.ensure("commits")
        (tmp_path / "state").mkdir()
        self.handles = StateHandleStore(session, StateStorage(tmp_path / "state"), "commits")


@pytest.fixture(params=["memory", "file", "stored"])
def keep(request, tmp_path):
    """Makes decisions about a sink, which are the same ones each time."""
    if request.param == "stored":
        handles = Handles(tmp_path).handles
        return lambda sink: StoredCommitLog(handles, sink)
    known = MemoryCommitLog() if request.param == "memory" else FileCommitLog(tmp_path / "kept")
    return lambda sink: known


def rows(sink):
    def run(staging):
        sink.staged[staging.run].append("row")
        return [{"text": "row", "rows": 1}]

    return run


def test_other_content_in_a_job(tmp_path, keep, caplog):
    """In one run it raises; where an earlier run of the same job has decided it is a warning with both values, and that run's rows stay."""
    sink = MemorySink(str(tmp_path))
    commit_log = keep(sink)

    def again(content, writer, sink=sink):
        return commit(sink, keep(sink), "c", SCHEMA, rows(sink), content=content, writer=writer)

    assert not commit(sink, commit_log, "c", SCHEMA, rows(sink), content="monday", writer=("nightly", 1)).repeated
    assert commit_log.read("c")[1] | {"job": "nightly", "attempt": 1} == commit_log.read("c")[1]
    for writer in (("nightly", 1), ("weekly", 2), None):
        with pytest.raises(OperatorMisused, match="content is 'tuesday', there 'monday'"):
            again("tuesday", writer)
    assert warnings(caplog) == []
    assert again("monday", ("nightly", 1)).repeated
    assert warnings(caplog) == [], "a repeat in a job is no warning"
    assert again("tuesday", ("nightly", 2)).repeated
    [said] = warnings(caplog)
    assert said.startswith("an earlier run of this job has decided commit 'c', and its rows stay. This run differs: ")
    assert "content is 'tuesday', there 'monday'" in said
    assert sink.visible == {"c": ["row"]}


def test_another_sink_in_a_later_run_of_a_job(tmp_path, keep, caplog):
    """One whose place has a date in it: an earlier run's rows stay where they are, a warning names both, and this sink is not touched."""
    one, other = MemorySink(f"{tmp_path}/monday"), MemorySink(f"{tmp_path}/tuesday")
    commit(one, keep(one), "c", SCHEMA, rows(one), writer=("nightly", 1))
    for writer in (("nightly", 1), None):
        with pytest.raises(OperatorMisused, match="is known for .*/monday, not for .*/tuesday"):
            commit(other, keep(other), "c", SCHEMA, rows(other), writer=writer)
    report = commit(other, keep(other), "c", SCHEMA, rows(other), writer=("nightly", 2))
    assert (report.repeated, report.rows) == (True, 1)
    assert "/monday, not for" in warnings(caplog)[0]
    assert (one.visible, other.visible, other.staged) == ({"c": ["row"]}, {}, {})


def test_rolling_forward_compares_nothing(tmp_path, caplog):
    """A run finishes the commits of the run before from the records alone, with the stored sink, schema and content."""
    handles, sink = Handles(tmp_path).handles, MemorySink(str(tmp_path))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(CommitPending):
        patch.setattr(sink, "commit", lambda *_: 1 / 0)
        commit(
            sink, StoredCommitLog(handles, sink), "c", SCHEMA, rows(sink), content="monday", writer=("nightly", 1),
            sleep=lambda _: None, clock=lambda: MONDAY,
        )  # fmt: skip
    caplog.clear()
    finish_commits(handles, ending=False)
    assert sink.visible == {"c": ["row"]}
    assert warnings(caplog) == []
    record = StoredCommitLog(handles, sink).read("c")[1]
    assert (record["state"], record["content"], record["job"], record["attempt"], record["time"]) == (
        "applied", "monday", "nightly", 1, MONDAY,
    )  # fmt: skip


# -- Formats


class Untouched:
    """A sink of which nothing may be asked."""

    identity = "untouched"

    def __getattr__(self, name):
        if name.startswith("__") or name in ("stored_mark", "in_tasks"):
            raise AttributeError(name)
        pytest.fail(f"{name} was called")


def old(state, **more):
    """A record as an earlier version wrote it."""
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
def test_a_record_of_another_format(keep, state, number):
    """It is refused with a sentence that says what to do; nothing of it is changed, finished, aborted or deleted."""
    sink = Untouched()
    commit_log, record = keep(sink), old(state) | ({} if number is None else {"format": number})
    version = commit_log.write("c", record, 0)
    for use in (
        lambda: commit(sink, keep(sink), "c", SCHEMA, lambda staging: 1 / 0),
        lambda: resume(sink, keep(sink), "c"),
        lambda: abandon(sink, keep(sink), "c"),
    ):
        with pytest.raises(CommitUnreadable) as refused:
            use()
        said = str(refused.value)
        assert "record of commit 'c'" in said
        assert "Nothing was changed or deleted. Finish the commit with the version that wrote it" in said
        assert ("an earlier version of stagecrew wrote" if number is None else f"has format {number!r}") in said
    assert commit_log.read("c") == (version, record)


def test_records_have_the_format_in_them(keep, tmp_path):
    """Each record that is written says which format it has."""
    sink = MemorySink(str(tmp_path))
    commit(sink, keep(sink), "c", SCHEMA, rows(sink))
    assert keep(sink).read("c")[1]["format"] == FORMAT


def test_a_job_with_a_record_of_an_earlier_version(tmp_path, caplog):
    """It is unreadable for the leader, and nothing finishes or aborts its commits: all its staged rows and its records stay."""
    session = ModelServer().session()
    (tmp_path / "state").mkdir()
    storage = StateStorage(tmp_path / "state")
    jobs = FencedJobs(session, storage)
    jobs.submit(JobSpec("job.py", (), {}, {}, b"", 2), "nightly")
    handles, sink = jobs.handles("nightly", "commits"), MemorySink(str(tmp_path))
    StoredCommitLog(handles, sink).write("nightly/sink", old("decided", sink=str(tmp_path)), 0)
    stored = {path: path.read_bytes() for path in (tmp_path / "state").rglob("*") if path.is_file()}
    sink.staged["0" * 32] = ["row"]
    with pytest.raises(
        JobUnreadable,
        match="'nightly/sink' of the commits of job 'nightly' cannot be read: an earlier version of stagecrew wrote",
    ):
        jobs.require_readable("nightly")
    for ending in (False, True):
        with pytest.raises(CommitUnreadable, match="Finish the commit with the version that wrote it"):
            finish_commits(handles, ending=ending, retry_timeout=60.0)
    with pytest.raises(CommitUnreadable):
        is_done(handles, "nightly/sink")
    assert (sink.visible, sink.staged) == ({}, {"0" * 32: ["row"]})
    assert {path: path.read_bytes() for path in (tmp_path / "state").rglob("*") if path.is_file()} == stored


def test_manifests_and_marks_of_another_format(tmp_path):
    """Those without a number have the same fields, and are read; a later number is refused, by readers too, and nothing is changed."""
    trial, target = objects(tmp_path), tmp_path / "objects"
    lands(trial)
    [manifest] = (target / "_stagecrew").glob("*.json")
    known = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({name: known[name] for name in ("commit", "schema", "files")}))
    assert read_committed(target).count_rows() == 40
    manifest.write_text(json.dumps(known | {"format": 9}))
    before = files(tmp_path)
    for use in (lambda: read_committed(target), lambda: lands(trial, commit_log=MemoryCommitLog())):
        with pytest.raises(
            CommitFailed, match="has format 9, and this version of stagecrew reads 1. Nothing was changed. Use"
        ):
            use()
    assert files(tmp_path) == before


@pytest.mark.parametrize("text", ['{"format":9}', '{"format":1}', "[]", "text"])
def test_a_mark_that_is_none(text):
    """A mark of another format, or of another program, is refused by name."""
    with pytest.raises(
        CommitUnreadable, match="the sink's mark of commit 'c' (has format 9|is not as stagecrew writes it)"
    ):
        read_mark("c", text)


# -- Records that somebody has changed


def change(trial, **fields):
    """Changes the record of a commit in its file."""
    [path] = [path for path in trial.commit_log._folder.iterdir() if path.suffix == ".json"]
    stored = json.loads(path.read_text())
    stored["record"] |= fields
    path.write_text(json.dumps(stored))


@pytest.mark.parametrize("field", ["run", "before"])
@pytest.mark.parametrize("state", ["open", "decided", "applied", "aborted"])
def test_a_run_that_is_a_path(trial, tmp_path, field, state):
    """A record whose run id leads elsewhere is refused, and the folder that it leads to stays."""
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "theirs").touch()
    lands(trial)
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
        for use in (lambda: lands(trial), lambda: abandon(trial.make_sink(), trial.commit_log, "c")):
            with pytest.raises(CommitUnreadable, match="is no id of a run. Nothing was changed or deleted"):
                use()
    assert (files(tmp_path / "victim"), sorted(trial.visible())) == before


@pytest.mark.parametrize("make", [parquet, objects, iceberg], ids=lambda make: make.__name__)
@pytest.mark.parametrize("name", ["../../victim/theirs", "/etc/passwd", "..", "", "a\\b", "a\n", None, 7])
def test_a_message_that_names_a_path(make, tmp_path, name):
    """A record whose messages name anything but a staged file moves and deletes nothing, before it is done and after."""
    trial = make(tmp_path)
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "theirs").write_text("theirs")

    class Dies(Around):
        def commit(self, staging, messages):
            raise OSError("no route")

    with pytest.raises(CommitPending):
        lands(trial, sink=Dies(trial.make_sink()))
    change(trial, messages=[{"file": name, "rows": 40}])
    staged = trial.left()
    with pytest.raises(CommitUnreadable, match="is no name of a staged file. Nothing was moved or deleted"):
        lands(trial)
    assert (victim / "theirs").read_text() == "theirs"
    assert trial.left() == staged
    assert trial.visible() == []


@pytest.mark.parametrize(
    "fields",
    [
        {"state": "unheard of"}, {"messages": None, "state": "decided"}, {"messages": [7]}, {"messages": [{"rows": "40"}]},
        {"messages": {}}, {"schema": "!"}, {"schema": base64.b64encode(b"no schema").decode()}, {"sink": None},
        {"before": None}, {"time": "now"}, {"content": 7}, {"attempt": "1"},
    ],
    ids=str,
)  # fmt: skip
def test_a_record_that_is_not_ours(tmp_path, fields):
    """Any field of another kind is named before the record is used."""
    trial = parquet(tmp_path)
    lands(trial)
    change(trial, **fields)
    with pytest.raises(
        CommitUnreadable, match="record of commit 'c' is not as stagecrew writes it: .*Put a copy of the record"
    ):
        lands(trial)
    assert len(trial.visible()) == 40


def test_a_manifest_that_names_other_files(tmp_path):
    """Readers are not led elsewhere."""
    trial, target = objects(tmp_path), tmp_path / "objects"
    lands(trial)
    [manifest] = (target / "_stagecrew").glob("*.json")
    known = json.loads(manifest.read_text())
    for file in ("../secret.parquet", "data/../../secret.parquet", "/etc/passwd", "data/./x", "other/x", 7):
        manifest.write_text(json.dumps(known | {"files": [file]}))
        with pytest.raises(CommitFailed, match="which is no object of a commit"):
            read_committed(target)


def test_columns_of_any_name(tmp_path):
    """A name with quotes in it is a name, and no SQL."""
    with contextlib.closing(sqlite3.connect(tmp_path / "data.db")) as database:
        database.execute('CREATE TABLE target ("a""; DROP TABLE target; --" INTEGER)')
    sink = DatabaseSink(f"sqlite:///{tmp_path}/data.db", "target")
    schema = pa.schema([('a"; DROP TABLE target; --', pa.int64())])
    batch = pa.record_batch([pa.array([7])], schema=schema)
    assert commit(sink, MemoryCommitLog(), "c", schema, lambda s: [sink.stage(s, 0, 1, iter([batch]))]).rows == 1
    with contextlib.closing(sqlite3.connect(tmp_path / "data.db")) as database:
        assert database.execute("SELECT * FROM target").fetchall() == [(7,)]


def test_a_stage_of_any_name(tmp_path):
    """A sink quotes the table of a run, also for an id that nobody has checked."""
    trial = sqlite(tmp_path)
    lands(trial)
    trial.make_sink().discard(Staging("c", "x; DROP TABLE target", SCHEMA), ())
    trial.make_sink().discard(Staging("c", 'x"; DROP TABLE target; --', SCHEMA), ())
    assert len(trial.visible()) == 40


# -- Folders that a rename cannot replace


def mounted_at(folder, how):
    """Has a disk of its own, or another folder of the same disk, be at this place."""
    if how == "mount":
        return small_disk(folder, "64k")

    @contextlib.contextmanager
    def bound():
        folder.mkdir()
        (folder.parent / "source").mkdir()
        subprocess.run(["mount", "--bind", str(folder.parent / "source"), str(folder)], check=True)
        try:
            yield folder
        finally:
            subprocess.run(["umount", str(folder)], check=True)

    return bound()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts disks")
@pytest.mark.parametrize("how", ["mount", "bind"])
@pytest.mark.parametrize("name", ["table", "a b"])
def test_a_folder_that_is_a_mount_point(tmp_path, how, name):
    """It is refused before anything runs, nothing is decided, and nothing left; a folder in it is fine."""
    with mounted_at(tmp_path / name, how) as folder:
        commit_log = FileCommitLog(tmp_path / "log")
        sink = ParquetSink(folder)
        for _ in range(2):
            with pytest.raises(
                CommitConflict, match=f"{folder} is a mount point, which no folder can be renamed onto: .*Write to"
            ):
                commit(sink, commit_log, "c", SCHEMA, lambda staging: 1 / 0)
            assert commit_log.read("c")[1]["state"] == "aborted"
        assert [path for path in files(tmp_path) if not path.startswith("log/")] == []
        assert not list(tmp_path.glob("_stagecrew*"))
        below = ParquetSink(folder / "table")
        assert commit(below, commit_log, "d", SCHEMA, lambda s: Tasks(1).run(below, s)).rows == 40


@pytest.mark.parametrize("to", ["an empty folder", "nothing"])
def test_a_folder_that_is_a_link(tmp_path, to):
    """It is refused before anything runs, nothing is decided, and nothing left; a folder below a link is fine."""
    (tmp_path / "far").mkdir()
    (tmp_path / "out").mkdir()
    link = tmp_path / "out" / "table"
    link.symlink_to(tmp_path / ("far" if to == "an empty folder" else "nothing"))
    commit_log, sink = MemoryCommitLog(), ParquetSink(link)
    with pytest.raises(
        CommitConflict, match=f"{link} is a symbolic link, which no folder can be renamed onto: .*Write to a"
    ):
        commit(sink, commit_log, "c", SCHEMA, lambda staging: 1 / 0)
    assert commit_log.read("c")[1]["state"] == "aborted"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["table"]
    assert list((tmp_path / "far").iterdir()) == []
    if to == "an empty folder":
        below = ParquetSink(link / "table")
        assert commit(below, commit_log, "d", SCHEMA, lambda s: Tasks(1).run(below, s)).rows == 40
        appends = ParquetSink(link / "many", "append")
        assert commit(appends, commit_log, "e", SCHEMA, lambda s: Tasks(1).run(appends, s)).rows == 40


def test_a_folder_that_becomes_a_link(tmp_path):
    """While tasks stage: the commit is refused for good, nothing is left, and nothing stays pending."""
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


def test_the_root_is_no_folder_to_make():
    """`/` is itself, and not the folder in which the process runs."""
    sink = ParquetSink("/")
    assert sink.identity == "<Parquet files, to create, in />"
    with pytest.raises(CommitConflict, match="/ is a mount point"):
        sink.begin(Staging("c", "0" * 32, SCHEMA))


# -- What people see, and who may read


@pytest.mark.parametrize(
    ("text", "shown"),
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
def test_an_address_has_no_credentials(text, shown):
    """All up to the last @ is left out, and the query; a path of this host is shown."""
    assert address(text) == shown


@pytest.mark.parametrize(
    "use",
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
def test_no_error_tells_credentials(use):
    """Addresses that cannot be used, with keys as people paste them: the error has nothing of the secret."""
    with pytest.raises((OperatorMisused, RecoveryMisused, pa.ArrowInvalid)) as told:
        use()
    shown = f"{told.value} {told.value.__cause__}"
    assert not [part for part in ("SEC", "RET", "KEY") if part in shown], shown


@pytest.mark.parametrize("url", ["postgresql://h:1,i:2/db", "postgresql://[::1]:5432/db", "postgresql:///db?application_name=a@b",
                                 "postgresql://me:p%40ss@h/db?options=-csearch_path%3Da@b"])  # fmt: skip
def test_urls_of_servers_that_are_fine(url):
    """An @ in a query, several hosts, and addresses in brackets are taken as the server's library takes them."""
    assert DatabaseSink(url, "t").identity.startswith("<table t of postgresql> in ")


def test_the_lock_of_decisions_is_for_its_owner(tmp_path):
    """The folder that `FileCommitLog` makes has the mode 0700 and its lock 0600, whatever the umask is; a wide lock is narrowed."""
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
    assert folder.stat().st_mode & 0o777 == 0o755, "a folder that was there is its owner's matter"


def test_records_of_our_logger_change_no_terminal(caplog, capsys):
    """Control characters of names and errors are shown as codes, and no line of them looks like a record of its own."""
    logging.getLogger("stagecrew").warning(
        "job %r: %s, %d", "a", ValueError("no\x1b[2J\n2026 INFO all is well\u202e"), 7
    )
    assert caplog.messages == ["job 'a': no\\x1b[2J\n    2026 INFO all is well\\u202e, 7"]
