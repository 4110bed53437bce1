"""Commits, without Spark: whatever dies, pauses, fails or goes on, a sink shows all rows once or none, and nothing is left."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import pathlib
import pickle
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading

import fsspec
import pyarrow as pa
import pyarrow.dataset
import pyarrow.fs
import pyarrow.parquet as pq
import pytest

import stagecrew.operators.commit_log
import stagecrew.operators.commit_rollforward
from schedules import (
    at_once,
    failing_at_each_moment,
    going_on_at_each_moment,
    going_on_behind_a_refusal,
    killed_at_each_moment,
    raising_once,
)
from sinks import (
    SCHEMA,
    SEED,
    SINKS,
    Around,
    Driver,
    Killed,
    Tasks,
    appended,
    files,
    first_commits_of_two_schemas,
    iceberg,
    late_at_each_moment,
    like_hdfs,
    looked_at_within,
    moved_into_another,
    objects,
    other_schemas,
    parquet,
    remount,
    seeded,
    small_disk,
    sqlite,
    undisturbed,
)
from stagecrew.errors import (
    CommitConflict,
    CommitFailed,
    CommitPending,
    CommitSuperseded,
    CommitUnknown,
    OperatorMisused,
)
from stagecrew.files import exists, list_files, remove_folder
from stagecrew.operators.commit_log import FileCommitLog, MemoryCommitLog
from stagecrew.operators.commits import Staging, abandon, commit, resume
from stagecrew.operators.sinks import DatabaseSink, IcebergSink, ObjectSink, ParquetSink
from stagecrew.operators.sinks import parquet as parquet_module


def making(make, tmp_path):
    """Makes trials of that kind, each of a name of its own."""

    def made(name):
        (tmp_path / name).mkdir()
        return make(tmp_path / name)

    return made


LONG = [pytest.param(make, marks=pytest.mark.long) for make in (appended, objects, iceberg)]


@pytest.fixture(params=[parquet, sqlite, *LONG], ids=lambda make: make.__name__)
def shaken(request, tmp_path):
    """Makes trials, for what takes long: three of the sinks in `make test-long`."""
    return making(request.param, tmp_path)


@pytest.fixture(params=SINKS, ids=lambda make: make.__name__)
def make(request, tmp_path):
    """Makes trials."""
    return making(request.param, tmp_path)


@pytest.fixture(params=SINKS, ids=lambda make: make.__name__)
def trial(request, tmp_path):
    return request.param(tmp_path)


class Refusing(Around):
    """A sink that never takes the rows."""

    def commit(self, staging, messages):
        raise CommitConflict("never")


class Meanwhile(Around):
    """A sink whose calls have something done before them, once."""

    def __init__(self, sink, **steps):
        super().__init__(sink)
        self._steps = steps

    def __getattr__(self, name):
        found, step = getattr(self._sink, name), self._steps.pop(name, None)

        def called(*args):
            if step is not None:
                step()
            return found(*args)

        return found if step is None else called


class Silent:
    """Decisions that say this when they are told one of these states."""

    def __init__(self, commit_log, error, *states):
        self._decisions, self._error, self._states, self.read = commit_log, error, states, commit_log.read

    def write(self, key, record, version):
        if record["state"] in self._states:
            raise self._error
        return self._decisions.write(key, record, version)


def test_once(trial):
    """All rows are there, whatever attempts failed, were speculative or late; a repeat changes nothing and runs nothing."""
    tasks = Tasks(1)
    report = trial.drive(Driver(), tasks)
    assert sorted(trial.visible()) == tasks.expected
    assert (report.rows, report.parts, report.repeated) == (40, 4, False)
    assert report.bytes > 0
    for zombie in tasks.zombies:
        with contextlib.suppress(Exception):
            zombie()
    assert trial.left() == []
    again = trial.drive(Driver(), Tasks(2))
    assert again.repeated
    assert (again.rows, again.parts) == (40, 4)
    assert sorted(trial.visible()) == tasks.expected
    assert trial.left() == []


def test_no_rows(trial):
    """A dataset without rows is committed too."""
    tasks = Tasks(1, rows=0)
    assert trial.drive(Driver(), tasks).rows == 0
    assert trial.visible() == []
    assert trial.drive(Driver(), tasks).repeated
    assert trial.left() == []


#: Of the moments of a driver those of `make test`. They come in twos, before and after: the number is not even, so as to meet both.
EVERY = pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.long)], ids=["some", "all"])


@EVERY
def test_the_driver_is_killed_at_each_moment(shaken, every):
    """Before and after every write: readers see all rows or none, and the next driver brings all, once, and leaves nothing."""
    killed_at_each_moment(shaken, every)


@EVERY
def test_a_write_that_fails_at_each_moment(shaken, every):
    """Once, before or after its effect: an error before the decision; behind it the driver goes on by itself."""
    failing_at_each_moment(shaken, every)


@pytest.fixture(scope="module")
def moments(tmp_path_factory):
    """How many moments a driver has to which nothing happens, of each sink."""
    counted = {}

    def count(name, make):
        if name not in counted:
            counted[name] = len(undisturbed(make("undisturbed")))
        return counted[name]

    return count


@pytest.mark.parametrize("seed", range(4))
def test_random_faults(request, shaken, seed, moments):
    """Drivers die, pause and go on at random, tasks write when nobody needs them."""
    seeded(shaken("seeded"), seed, moments(request.node.callspec.id.split("-")[0], shaken))


@pytest.mark.long
@pytest.mark.parametrize("seeds", [range(n, n + 20) for n in range(100, 220, 20)], ids=lambda seeds: f"from-{seeds[0]}")
def test_random_faults_at_length(make, seeds):
    """At least a hundred for each."""
    count = len(undisturbed(make("undisturbed")))
    for seed in seeds:
        seeded(make(str(seed)), seed, count)


def test_two_commits_at_once(trial):
    """Both land, or one says that it cannot, and leaves nothing."""
    conflicts = at_once(trial, "staged")
    if trial.make_sink.__qualname__.startswith("parquet"):
        assert len(conflicts) == 1
        assert "is there already" in str(conflicts[0])
    else:
        assert not conflicts


def test_a_folder_that_is_moved_into_another(tmp_path):
    """As HDFS does. A driver that dies there has left its files in the other's folder: a repeat takes them away."""
    filesystem, target = like_hdfs(), str(tmp_path / "out" / "table")

    def make(name):
        made = parquet(tmp_path)
        made.make_sink, made.commit_log = (
            lambda: ParquetSink(target, filesystem=filesystem),
            FileCommitLog(tmp_path / name),
        )
        return made

    moved_into_another(filesystem, target, make)


def test_two_that_have_decided(make):
    """Both land, or one says that it cannot, and leaves nothing."""
    for number in range(3):
        trial = make(f"two-{number}")
        one_only = trial.make_sink.__qualname__.startswith("parquet")
        assert len(at_once(trial, "before commit")) == one_only


@EVERY
def test_an_old_driver_goes_on(shaken, every):
    """One that pauses before or after any write, and goes on when another has committed or aborted, changes nothing."""
    going_on_at_each_moment(shaken, every)


@pytest.mark.parametrize("stays", [pytest.param(True, marks=pytest.mark.long), False], ids=["there", "gone"])
def test_an_old_driver_goes_on_behind_a_refusal(tmp_path, stays):
    """One that pauses in its commit until another was refused, for a folder that is there, or gone again: it says so, and leaves nothing."""

    def refuse(trial):
        folder = pathlib.Path(trial.make_sink()._path)
        folder.mkdir()
        (folder / "theirs").touch()
        return lambda: shutil.rmtree(folder)

    going_on_behind_a_refusal(making(parquet, tmp_path), refuse, stays)


@pytest.mark.parametrize("stays", [pytest.param(True, marks=pytest.mark.long), False], ids=["there", "gone"])
def test_an_old_driver_goes_on_behind_a_refusal_of_a_table(tmp_path, stays):
    """The same, for a row that is there."""

    def unique(folder):
        trial = sqlite(folder)
        change(trial, "CREATE UNIQUE INDEX one ON target (id)")
        return trial

    def change(trial, text):
        with contextlib.closing(
            sqlite3.connect(pathlib.Path(trial.make_sink()._url.removeprefix("sqlite:///")))
        ) as there:
            there.execute(text)
            there.commit()

    def refuse(trial):
        change(trial, "INSERT INTO target VALUES (7, 'there')")
        return lambda: change(trial, "DELETE FROM target WHERE text = 'there'")

    going_on_behind_a_refusal(making(unique, tmp_path), refuse, stays)


def test_a_table_that_takes_the_rows_again(tmp_path):
    """One driver is refused for a row, which is gone when another goes forward with the same, before the refusal is written: it is final."""
    trial, tasks = sqlite(tmp_path), Tasks(1)
    outcome = []

    def change(*texts):
        with contextlib.closing(sqlite3.connect(tmp_path / "data.db")) as database:
            for text in texts:
                database.execute(text)
            database.commit()

    change("CREATE UNIQUE INDEX one ON target (id)")

    killed = Silent(trial.commit_log, CommitUnknown("it was killed"), "refused", "applied")

    class Watching(Meanwhile):
        def done(self, commit_id):
            found = self._sink.done(commit_id)
            if trial.commit_log.read("c") and not outcome:
                change("DELETE FROM target")
                try:
                    outcome.append(resume(trial.make_sink(), killed, "c", sleep=lambda _: None))
                except (CommitUnknown, CommitFailed) as error:
                    outcome.append(error)
            return found

    def run(staging):
        change("INSERT INTO target VALUES (7, 'there')")
        return tasks.run(trial.make_sink(), staging)

    with pytest.raises(CommitConflict, match="does not take the rows: IntegrityError"):
        commit(Watching(trial.make_sink()), trial.commit_log, "c", SCHEMA, run, sleep=lambda _: None)
    assert isinstance(outcome[0], CommitUnknown), "it is not known to be refused, and was"
    assert trial.visible() == []
    assert trial.commit_log.read("c")[1]["state"] == "refused"
    assert trial.left() == []
    assert not trial.drive(Driver(), tasks, "c").repeated
    assert sorted(trial.visible()) == tasks.expected
    trial.repeat_changes_nothing("c")


def test_a_failure_aborts(trial):
    """What the job raises comes through; nothing is visible, nothing left; the same id may be tried again."""
    tasks = Tasks(1)

    def fails(staging):
        tasks.run(trial.make_sink(), staging)
        raise ValueError("the job failed")

    with pytest.raises(ValueError, match="the job failed"):
        commit(trial.make_sink(), trial.commit_log, "c", SCHEMA, fails)
    assert trial.visible() == []
    assert trial.left() == []
    trial.drive(Driver(), tasks, "c")
    assert sorted(trial.visible()) == tasks.expected


def test_a_commit_that_raises_once(make):
    """Before or after its effect; it is tried again. When it raises for good, a later driver goes on with what was staged."""
    raising_once(make)


@pytest.mark.parametrize("make", [appended, objects, sqlite, iceberg], ids=lambda make: make.__name__)
def test_a_schema_that_does_not_fit(make, tmp_path):
    """It is said by the columns, before anything runs."""
    other_schemas(make(tmp_path), {sqlite: "", iceberg: "long|int64"}.get(make, "int64"))


def test_a_schema_that_fits(tmp_path):
    """The order of columns, and how Arrow lays them out, are no difference."""
    trial = appended(tmp_path)
    trial.drive(Driver(), Tasks(1), "first")
    other, sink = pa.schema([("text", pa.large_string()), ("id", pa.int64())]), trial.make_sink()
    batch = pa.record_batch({"text": ["a"], "id": [7]}, schema=other)
    commit(sink, trial.commit_log, "c", other, lambda staging: [sink.stage(staging, 0, 1, iter([batch]))])
    assert (7, "a") in trial.visible()


@pytest.mark.parametrize("nullable", [True, False])
def test_a_column_that_the_table_requires(tmp_path, nullable):
    """A dataset whose column may be null is told before anything runs; one whose column is never null is taken."""
    from pyiceberg.catalog import load_catalog

    trial = iceberg(tmp_path)
    sink = trial.make_sink()
    with load_catalog("default", **sink._properties).load_table("db.target").update_schema(True) as update:
        update.update_column("id", required=True)
    schema = pa.schema([pa.field("id", pa.int64(), nullable), ("text", pa.string())])
    batch = pa.record_batch({"id": [7], "text": ["a"]}, schema=schema)

    def run(staging):
        assert not nullable, "it was told"
        return [sink.stage(staging, 0, 1, iter([batch]))]

    with (
        pytest.raises(CommitFailed, match="id may be null, there never.*coalesce")
        if nullable
        else contextlib.nullcontext()
    ):
        commit(sink, trial.commit_log, "c", schema, run)
    assert trial.visible() == ([] if nullable else [(7, "a")])
    assert trial.left() == []


def test_texts_for_numbers(tmp_path):
    """SQLite would take them: what is staged there is of the columns' types, or the error says so, and nothing is left."""
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
    assert trial.left() == []


def test_a_reader_within_a_transaction(tmp_path):
    """It sees all rows or none."""
    looked_at_within(sqlite(tmp_path))


def test_a_reader_while_files_are_added(tmp_path, monkeypatch):
    """Before each thing that is written to the table's folder, and before the catalogue is told: it sees nothing."""
    from pyiceberg.catalog.sql import SqlCatalog
    from pyiceberg.io.pyarrow import PyArrowFile

    trial, tasks, seen = iceberg(tmp_path), Tasks(1), []
    sink = trial.make_sink()

    def looking(function):
        def looks(*args, **kwargs):
            seen.append(trial.visible())
            answer = function(*args, **kwargs)
            if function is not commit_table:
                seen.append(trial.visible())
            return answer

        return looks

    commit_table = SqlCatalog.commit_table

    def run(staging):
        messages = tasks.run(trial.make_sink(), staging)
        monkeypatch.setattr(PyArrowFile, "create", looking(PyArrowFile.create))
        monkeypatch.setattr(SqlCatalog, "_write_metadata", staticmethod(looking(SqlCatalog._write_metadata)))
        monkeypatch.setattr(SqlCatalog, "commit_table", looking(commit_table))
        return messages

    commit(sink, trial.commit_log, "c", SCHEMA, run)
    assert len(seen) > 4
    assert not any(seen)
    assert sorted(trial.visible()) == tasks.expected


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("make", [appended, objects], ids=lambda make: make.__name__)
def test_first_commits_of_two_schemas(make, tmp_path, step):
    """Both find nothing there: one lands, the other is told which commit has another schema."""

    def made(number):
        (tmp_path / str(number)).mkdir()
        return make(tmp_path / str(number))

    first_commits_of_two_schemas(made, itertools.count(2, step))


@pytest.mark.parametrize("make", [appended, objects], ids=lambda make: make.__name__)
def test_first_commits_of_two_schemas_while_one_goes_on(make, tmp_path):
    """The error says which commit it is; when that one is given up, the other lands."""
    trial = make(tmp_path)
    other_schema = pa.schema([("id", pa.int64())])

    def run(staging):
        with pytest.raises(
            CommitFailed, match="does not fit commit 'one', which is about to make .*: text is missing. Select and cast"
        ):
            commit(trial.make_sink(), trial.commit_log, "other", other_schema, lambda staging: [])
        raise ValueError("given up")

    with pytest.raises(ValueError, match="given up"):
        commit(trial.make_sink(), trial.commit_log, "one", SCHEMA, run)
    assert not commit(trial.make_sink(), trial.commit_log, "other", other_schema, lambda staging: []).repeated
    assert trial.left() == []


def test_decisions(tmp_path):
    """Compare-and-set: who comes second is told; a write that finds itself there is done."""
    for make in (MemoryCommitLog, lambda: FileCommitLog(tmp_path / "log")):
        commit_log = make()
        assert commit_log.read("a/b") is None
        assert commit_log.write("a/b", {"state": "open"}, 0) == 1
        assert commit_log.read("a/b") == (1, {"state": "open"})
        with pytest.raises(CommitSuperseded, match="another driver has written the record of commit 'a/b'"):
            commit_log.write("a/b", {"state": "other"}, 0)
        assert commit_log.write("a/b", {"state": "decided"}, 1) == 2
    assert commit_log.write("a/b", {"state": "decided"}, 1) == 2
    assert FileCommitLog(tmp_path / "log").read("a/b") == (2, {"state": "decided"})


@pytest.mark.parametrize("key", ["ä" * 200, " " * 84, "\U0001f600" * 200, "a" * 250, "a" * 251, "a/" * 100])
def test_decisions_about_ids_of_any_length(tmp_path, key):
    """Each id has a record of its own, whatever it is made of: also two that differ at their ends only."""
    commit_log = FileCommitLog(tmp_path)
    for one in (key, f"{key[:-1]}b"):
        assert commit_log.read(one) is None
        assert commit_log.write(one, {"id": one}, 0) == 1
    assert [commit_log.read(one) for one in (key, f"{key[:-1]}b")] == [
        (1, {"id": key}),
        (1, {"id": f"{key[:-1]}b"}),
    ]


def test_decisions_of_before(tmp_path):
    """A record that an older version wrote is found, and one of another id is not taken for its own."""
    (tmp_path / "a%2Fb.json").write_text('{"version": 3, "record": {"state": "decided"}}')
    commit_log = FileCommitLog(tmp_path)
    assert commit_log.read("a/b") == (3, {"state": "decided"})
    assert commit_log.write("a/b", {"state": "applied"}, 3) == 4
    (tmp_path / "a%2Fb.json").rename(tmp_path / "A%2Fb.json")
    with pytest.raises(CommitUnknown, match="A%2Fb.json is the record of commit 'a/b'. Give it another id"):
        commit_log.read("A/b")


def test_many_writers_of_decisions(tmp_path):
    """Of many that write at once, one wins each version."""
    won = []

    def write(number):
        try:
            FileCommitLog(tmp_path).write("c", {"by": number}, 0)
        except CommitSuperseded:
            return
        won.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert FileCommitLog(tmp_path).read("c") == (1, {"by": won[0]})
    assert [path.name for path in tmp_path.iterdir()] == [".lock", "c.json"] or sorted(files(tmp_path)) == [
        ".lock",
        "c.json",
    ]


@pytest.fixture
def synced(monkeypatch):
    """The files and folders that were brought to the disk so far, by the names that they had then."""
    names, fsync = [], os.fsync

    def noting(descriptor):
        names.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    return names


@pytest.mark.parametrize("rows", [0, 40])
@pytest.mark.parametrize("mode", ["create", "append"])
def test_what_is_committed_has_reached_the_disk(tmp_path, synced, mode, rows):
    """Each file, also one without rows, in the folder that appears; and each folder that was made, in the one that it is in."""
    target, tasks = tmp_path / "new" / "er" / "table", Tasks(1, rows=rows)
    sink = ParquetSink(target, mode)
    commit(sink, MemoryCommitLog(), "c", SCHEMA, lambda staging: tasks.run(sink, staging))
    folder = target if mode == "create" else target / "stagecrew_commit=c"
    moved = {name.rpartition("/")[2].partition(".json.")[0] for name in synced}
    assert {path.name.removesuffix(".json") for path in folder.iterdir()} <= moved
    assert [name for name in synced if name.endswith("-whole")]
    for made in (tmp_path / "new", tmp_path / "new" / "er", target, folder):
        assert str(made.parent) in synced


def test_the_folder_of_decisions_has_reached_the_disk(tmp_path, synced):
    """With those that it is in."""
    FileCommitLog(tmp_path / "new" / "er").write("c", {}, 0)
    assert {str(tmp_path), str(tmp_path / "new"), str(tmp_path / "new" / "er")} <= set(synced)


def test_a_zombie_makes_no_folder(tmp_path):
    """An attempt that stages for a run that is over fails, and leaves nothing."""
    sink, staging = ParquetSink(tmp_path / "t"), Staging("c", "r", SCHEMA)
    sink.begin(staging)
    sink.discard(staging, ())
    with pytest.raises(CommitFailed, match="the commit that this task stages for has ended"):
        sink.stage(staging, 0, 1, iter([pa.record_batch({"id": [1], "text": ["a"]}, schema=SCHEMA)]))
    assert files(tmp_path) == []


def test_a_task_that_is_late(make):
    """Whenever it pauses in its writing until the commit is over, or was given up: nothing is visible of it, nothing left."""
    late_at_each_moment(make)


def test_a_task_that_fails_takes_back_what_it_wrote(tmp_path):
    """Its own file only, and the error is its own."""
    sink, staging = ObjectSink(tmp_path / "t"), Staging("c", "r", SCHEMA)
    sink.begin(staging)
    assert sink.stage(staging, 0, 1, Tasks.batches([(1, "a")]))

    def broken():
        yield from Tasks.batches([(2, "b")])
        raise FileNotFoundError("something else is not there")

    with pytest.raises(FileNotFoundError, match="something else"):
        sink.stage(staging, 0, 2, broken())
    assert [name.rsplit("/", 1)[1] for name in files(tmp_path)] == ["_open", "part-00000-1.parquet"]


class Broken:
    """Parts of the system that fail in the n-th record that is written."""

    def __init__(self, monkeypatch, part, number, code):
        self.left, self.code = number, code
        module, name = {"open": (os, "open"), "fsync": (os, "fsync"), "replace": (os, "replace")}.get(
            part, (stagecrew.operators.commit_log, "sync")
        )
        self.real = getattr(module, name)
        monkeypatch.setattr(module, name, self)

    def __call__(self, *args, **kwargs):
        if sys._getframe(1).f_globals["__name__"] == "stagecrew.operators.commit_log":
            self.left -= 1
            if self.left == 0:
                raise OSError(self.code, os.strerror(self.code))
        return self.real(*args, **kwargs)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("part", ["open", "fsync", "replace", "sync"])
def test_a_disk_that_fails_under_the_decisions(tmp_path, part, number, code):
    """Each outcome has its name: where nothing was written nothing is visible or left, and a repeat brings all in each case."""
    trial, tasks = sqlite(tmp_path), Tasks(1)
    with pytest.MonkeyPatch.context() as patch:
        broken = Broken(patch, part, number, code)
        unknown = part == "sync" or (part == "replace" and code == errno.EIO)
        try:
            report = commit(trial.make_sink(), trial.commit_log, "c", SCHEMA, lambda s: tasks.run(trial.make_sink(), s))
        except CommitUnknown:
            assert unknown
        except CommitFailed as error:
            said = str(error)
            assert not unknown
            assert "could not be written" in said
            assert os.strerror(code) in said
            assert trial.visible() == []
            assert trial.left() == []
        else:
            assert number == 3  # that it was done is what could not be written
            assert report.rows == 40
        assert broken.left <= 0
    assert not list((tmp_path / "log").glob(".*.tmp"))
    trial.drive(Driver(), tasks, "c")
    assert sorted(trial.visible()) == tasks.expected
    assert trial.left() == []


def test_a_writer_of_decisions_that_is_killed(tmp_path):
    """In the middle of a record: nothing of it is read, and whoever writes next takes away what it left."""
    commit_log = FileCommitLog(tmp_path)
    commit_log.write("c", {"state": "open"}, 0)
    for moment in ("os.fsync", "os.replace"):
        code = f"""
import os, signal, stagecrew
{moment} = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
stagecrew.FileCommitLog({str(tmp_path)!r}).write("c", {{"state": "decided"}}, 1)
"""
        killed = subprocess.run([sys.executable, "-c", code], check=False, timeout=60)
        assert killed.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) > 2
    assert commit_log.read("c") == (1, {"state": "open"})
    commit_log.write("other", {"state": "open"}, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "c.json", "other.json"]
    assert (tmp_path / "other.json").stat().st_mode & 0o77 == 0


def test_an_abort_that_cannot_be_written(tmp_path, monkeypatch):
    """Nobody decides for its run any more: nothing is left, and the error is the job's."""
    trial = sqlite(tmp_path)

    def fails(staging):
        Tasks(1).run(trial.make_sink(), staging)
        Broken(monkeypatch, "open", 1, errno.ENOSPC)
        raise ValueError("the job failed")

    with pytest.raises(ValueError, match="the job failed"):
        commit(trial.make_sink(), trial.commit_log, "c", SCHEMA, fails)
    assert trial.left() == []


def test_a_refusal_on_a_full_disk(tmp_path, monkeypatch):
    """It is decided, and not known to be refused: what was staged stays, for a repeat, which finds out."""
    trial, tasks = sqlite(tmp_path), Tasks(1)
    plain = trial.make_sink()
    refusing = Meanwhile(Refusing(plain), commit=lambda: Broken(monkeypatch, "open", 1, errno.ENOSPC))
    with pytest.raises(
        CommitPending, match="the sink refuses it: never. The refusal could not be recorded.*No space left"
    ):
        commit(refusing, trial.commit_log, "c", SCHEMA, lambda staging: tasks.run(plain, staging))
    assert trial.left() != []
    monkeypatch.undo()
    assert trial.drive(Driver(), Tasks(2), "c").repeated
    assert sorted(trial.visible()) == tasks.expected
    assert trial.left() == []


@pytest.fixture
def disk(tmp_path):
    """A disk of 64 kB."""
    with small_disk(tmp_path / "small", "64k") as folder:
        yield folder


@pytest.mark.long
def test_decisions_on_a_full_disk(tmp_path, disk):
    """It says so, nothing is visible, nothing left; when there is room again, the same commit lands."""
    trial, tasks = sqlite(tmp_path), Tasks(1)
    trial.commit_log = FileCommitLog(disk)

    def fills(staging):
        messages = tasks.run(trial.make_sink(), staging)
        with contextlib.suppress(OSError):
            (disk / "large").write_bytes(bytes(1 << 20))
        return messages

    with pytest.raises(CommitFailed, match="record of commit 'c' could not be written.*No space left on device"):
        commit(trial.make_sink(), trial.commit_log, "c", SCHEMA, fills)
    assert trial.visible() == []
    assert trial.left() == []
    (disk / "large").unlink()
    assert sorted(path.name for path in disk.iterdir()) == [".lock", "c.json"]
    trial.drive(Driver(), tasks, "c")
    assert sorted(trial.visible()) == tasks.expected


@pytest.mark.long
def test_decisions_in_a_folder_that_is_read_only(tmp_path, disk):
    """It is said before anything runs; what was decided there is read."""
    trial, tasks = sqlite(tmp_path), Tasks(1)
    trial.commit_log = FileCommitLog(disk)
    trial.drive(Driver(), tasks, "c")
    remount(disk, "ro")
    assert trial.drive(Driver(), tasks, "c").repeated
    with pytest.raises(CommitFailed, match="record of commit 'd' could not be written.*Read-only file system"):
        commit(trial.make_sink(), trial.commit_log, "d", SCHEMA, lambda staging: 1 / 0)
    with pytest.raises(CommitFailed, match="the folder of the commit log cannot be made.*Read-only file system"):
        FileCommitLog(disk / "below")


def test_a_record_that_cannot_be_read(tmp_path):
    """What was decided is not known then: nothing runs, and the error names the file."""
    trial = sqlite(tmp_path)
    (tmp_path / "log" / "c.json").write_text('{"version": 1')
    with pytest.raises(CommitUnknown, match="record of commit 'c' cannot be read from .*c.json: JSONDecodeError"):
        commit(trial.make_sink(), trial.commit_log, "c", SCHEMA, lambda staging: 1 / 0)


def test_memory_keeps_what_is_not_over():
    """Of commits that are over the last ones; a driver of one that was forgotten does not take a later record for its own."""
    commit_log = MemoryCommitLog()
    old = commit_log.write("c", {"state": "open"}, 0)
    commit_log.write("pending", {"state": "decided"}, 0)
    commit_log.write("c", {"state": "aborted"}, old)
    for number in range(100):
        commit_log.write(f"c{number}", {"state": "applied"}, 0)
    assert commit_log.read("c") is None
    assert commit_log.read("c0") is not None
    assert commit_log.read("pending") is not None
    commit_log.write("c", {"state": "open"}, 0)
    with pytest.raises(CommitSuperseded):
        commit_log.write("c", {"state": "decided"}, old)


def test_a_partitioned_table(tmp_path):
    """It is refused before anything runs, and the error says what to take."""
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


def test_stores_are_known_through_fsspec_too():
    """Its object stores rename no folders either."""

    class Store(fsspec.AbstractFileSystem):
        protocol = ("s3", "s3a")

    through = pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(Store()))
    with pytest.raises(OperatorMisused, match="use ObjectSink there"):
        ParquetSink("bucket/t", filesystem=through)


def test_bad_input(tmp_path):
    """Each says what to write."""
    with pytest.raises(OperatorMisused, match="mode is 'create' or 'append', not 'overwrite'"):
        ParquetSink(tmp_path, mode="overwrite")
    with pytest.raises(OperatorMisused, match="sqlite:///file or postgresql"):
        DatabaseSink("mysql://x", "t")
    with pytest.raises(OperatorMisused, match="a table is a name"):
        DatabaseSink("sqlite:///x", "t; DROP TABLE t")


def test_a_password_is_not_shown():
    """The url of a database is in no text of the sink."""
    sink = DatabaseSink("postgresql://user:secret@host/db", "t")
    assert "secret" not in repr(sink)
    assert "secret" not in str(sink)
    assert sink.identity == "<table t of postgresql> in host=host dbname=db"


def test_readers_of_parquet(tmp_path):
    """What a commit leaves is a folder of Parquet files like any other."""
    ParquetSink(tmp_path / "t", compression="zstd")
    trial = parquet(tmp_path)
    trial.drive(Driver(), Tasks(1))
    table = pq.read_table(tmp_path / "out" / "table")
    assert table.num_rows == 40
    assert table.schema.equals(SCHEMA)


def test_iceberg_behind_another_driver(tmp_path):
    """Another driver does the same commit in between: the catalogue refuses ours, and nothing is added twice."""
    from pyiceberg.table import Table

    trial, tasks = iceberg(tmp_path), Tasks(1)
    mine = trial.make_sink()
    do_commit = Table._do_commit
    others = []

    def behind(self, *args, **kwargs):
        if not others:
            others.append(1)
            trial.make_sink().commit(*committing)
        return do_commit(self, *args, **kwargs)

    class Noting(Around):
        """What is committed, for the other driver."""

        def commit(self, staging, messages):
            committing[:] = staging, messages
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Table, "_do_commit", behind)
                mine.commit(staging, messages)

    committing = []
    commit(Noting(mine), trial.commit_log, "c", SCHEMA, lambda staging: tasks.run(trial.make_sink(), staging))
    assert others
    assert sorted(trial.visible()) == tasks.expected


def rename(sink, old, new):
    """Changes the table so that it takes the rows no more, or takes them again."""
    from pyiceberg.catalog import load_catalog

    with load_catalog("default", **sink._properties).load_table("db.target").update_schema() as update:
        update.rename_column(old, new)


@pytest.mark.parametrize("filesystem", [pyarrow.fs.LocalFileSystem(), like_hdfs()], ids=["local", "like hdfs"])
def test_a_refused_folder_appears_in_the_middle_of_its_deletion(tmp_path, monkeypatch, filesystem):
    """Another driver of the same commit renames what this one, which was refused, deletes: never half of it is visible."""
    trial, tasks, target = parquet(tmp_path), Tasks(1), tmp_path / "out" / "table"
    trial.make_sink = lambda: ParquetSink(str(target), filesystem=filesystem)
    entered, goes_on, outcome = threading.Event(), threading.Event(), []
    move = parquet_module.move

    def held(on, source, destination):
        if threading.current_thread() is other and destination == str(target):
            entered.set()
            assert goes_on.wait(30)
        move(on, source, destination)

    def run():
        try:
            outcome.append(resume(trial.make_sink(), trial.commit_log, "c", sleep=lambda _: None))
        except (CommitFailed, CommitPending) as error:
            outcome.append(error)

    other = threading.Thread(target=run)

    def begins():
        other.start()
        assert entered.wait(30)
        target.mkdir()
        (target / "theirs").touch()

    def remove_slowly(on, folder):
        """The first file is gone, and the rest is not, when the other goes on, and there is room again."""
        if entered.is_set() and not goes_on.is_set() and "-whole" in folder and exists(on, folder):
            on.delete_file(next(file for file in list_files(on, folder) if file.endswith(".parquet")))
            shutil.rmtree(target)
            goes_on.set()
            other.join(30)
        remove_folder(on, folder)

    monkeypatch.setattr(parquet_module, "move", held)
    monkeypatch.setattr(parquet_module, "remove_folder", remove_slowly)
    with pytest.raises(CommitConflict):
        commit(
            Meanwhile(trial.make_sink(), commit=begins), trial.commit_log, "c", SCHEMA,
            lambda staging: tasks.run(trial.make_sink(), staging), sleep=lambda _: None,
        )  # fmt: skip
    assert not other.is_alive()
    assert isinstance(outcome[0], CommitSuperseded)
    assert trial.visible() == []
    assert trial.left() == []
    trial.drive(Driver(), tasks, "c")
    assert sorted(trial.visible()) == tasks.expected
    assert trial.left() == []


@pytest.mark.parametrize("last", ["the other", "this one"])
def test_iceberg_is_refused_while_another_driver_commits(tmp_path, last):
    """One is told that the table does not take the rows, the other that it does: what readers can see is never deleted."""
    from pyiceberg.table import Table

    trial, tasks = iceberg(tmp_path), Tasks(1)
    slow, entered, goes_on, outcome = trial.make_sink(), threading.Event(), threading.Event(), []

    def run():
        """Goes forward from the record, and stands still when the catalogue is about to be told."""
        try:
            outcome.append(resume(slow, killed, "c", sleep=lambda _: None))
        except (CommitFailed, CommitPending) as error:
            outcome.append(error)

    killed = Silent(trial.commit_log, CommitUnknown("it was killed"), "applied")
    other = threading.Thread(target=run)
    do_commit = Table._do_commit

    def held(self, *args, **kwargs):
        if threading.current_thread() is other and not entered.is_set():
            entered.set()
            assert goes_on.wait(30)
        return do_commit(self, *args, **kwargs)

    def begins():
        other.start()
        assert entered.wait(30)
        rename(slow, "text", "other")

    def ends():
        rename(slow, "other", "text")
        goes_on.set()
        other.join(30)

    # Behind the look whether it is done; or when it is refused, and nothing was deleted yet.
    steps = {"commit": begins}

    class Watching(Meanwhile):
        def done(self, commit_id):
            found = self._sink.done(commit_id)
            if entered.is_set() and last == "this one":
                ends()
            return found

        def discard(self, staging, kept):
            self._sink.discard(staging, kept)
            if entered.is_set() and last == "the other":
                ends()

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(CommitFailed):
        patch.setattr(Table, "_do_commit", held)
        commit(
            Watching(trial.make_sink(), **steps), trial.commit_log, "c", SCHEMA,
            lambda staging: tasks.run(trial.make_sink(), staging), sleep=lambda _: None,
        )  # fmt: skip
    assert outcome
    assert not other.is_alive()
    assert sorted(trial.visible()) in ([], tasks.expected)
    trial.drive(Driver(), tasks, "c")
    assert sorted(trial.visible()) == tasks.expected
    assert trial.left() == []


def expire(trial, commit_id):
    """The snapshot of a commit, as maintenance of the table does it when there is a later one."""
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


@pytest.mark.parametrize("fits", [True, False], ids=["the same", "changed"])
def test_an_iceberg_snapshot_that_expires_before_the_repeat(tmp_path, fits):
    """A driver dies when the catalogue knows of its commit, and the record does not: the table's own files say that it is done."""
    trial, made = iceberg(tmp_path), making(iceberg, tmp_path)
    dies = Driver(dies_at=undisturbed(made("undisturbed")).index("after commit") + 1)
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
    assert trial.left() == []


def test_an_iceberg_snapshot_that_expires_is_not_abandoned(tmp_path):
    """A copy of the decisions, from before this one, and a snapshot that is gone: what the table shows stays, whoever cleans up."""
    trial = iceberg(tmp_path)
    restored(trial, Tasks(1))
    expire(trial, "c")
    abandon(trial.make_sink(), trial.commit_log, "c")
    assert sorted(trial.visible()) == sorted(Tasks(1).expected * 2)


@pytest.mark.parametrize("effect", ["before", "after"])
def test_a_catalogue_whose_answer_is_none(tmp_path, monkeypatch, effect):
    """What cannot be read of it is no refusal: nobody knows what was done, so that it is tried again."""
    from pydantic import TypeAdapter
    from pyiceberg.catalog.sql import SqlCatalog

    trial, tasks, commit_table = iceberg(tmp_path), Tasks(1), SqlCatalog.commit_table

    def answers(self, *args):
        monkeypatch.undo()
        if effect == "after":
            commit_table(self, *args)
        TypeAdapter(int).validate_json("<html>")

    def run(staging):
        messages = tasks.run(trial.make_sink(), staging)
        monkeypatch.setattr(SqlCatalog, "commit_table", answers)
        return messages

    assert commit(trial.make_sink(), trial.commit_log, "c", SCHEMA, run, sleep=lambda _: None).rows == 40
    assert sorted(trial.visible()) == tasks.expected
    assert trial.left() == []


def test_a_refusal_that_is_not_written(trial):
    """Where nobody knows whether a refusal is written, what was staged stays: another may go forward."""
    tasks = Tasks(1)

    silent = Silent(trial.commit_log, CommitUnknown("no answer"), "refused")
    with pytest.raises(CommitUnknown):
        commit(Refusing(trial.make_sink()), silent, "c", SCHEMA, lambda staging: tasks.run(trial.make_sink(), staging))
    assert trial.drive(Driver(), Tasks(2), "c").repeated
    assert sorted(trial.visible()) == tasks.expected
    assert trial.left() == []


def restored(trial, tasks):
    """The decisions as they were when the commit, which is done, was not decided: a copy that was brought back."""
    copy = MemoryCommitLog()

    def run(staging):
        version, record = trial.commit_log.read("c")
        for number in range(version):
            copy.write("c", record, number)
        return tasks.run(trial.make_sink(), staging)

    commit(trial.make_sink(), trial.commit_log, "c", SCHEMA, run)
    trial.commit_log = copy
    return sorted(trial.visible()), trial.state()


@pytest.mark.parametrize("repeated", [True, False], ids=["repeated", "at once"])
def test_what_is_done_is_not_abandoned(trial, repeated):
    """A copy of the decisions, from before this one: what the sink shows stays as it is, and is written down as done."""
    before = restored(trial, Tasks(1))
    if repeated:
        assert trial.drive(Driver(), Tasks(2), "c").repeated
        assert trial.commit_log.read("c")[1]["state"] == "applied"
    for _ in range(2):
        abandon(trial.make_sink(), trial.commit_log, "c")
        assert trial.commit_log.read("c")[1]["state"] == "applied"
        assert resume(trial.make_sink(), trial.commit_log, "c")
        assert (sorted(trial.visible()), trial.state()) == before
    assert before[0] == Tasks(1).expected
    trial.repeat_changes_nothing("c")


def test_a_copy_that_says_refused(tmp_path):
    """The sink shows what a later run has done: of the numbers of the one that was refused nothing is reported."""
    trial = sqlite(tmp_path)
    restored(trial, Tasks(1))
    version, record = trial.commit_log.read("c")
    trial.commit_log.write("c", record | {"state": "refused", "messages": [{"attempt": 1, "rows": 7}]}, version)
    for _ in range(2):
        report = trial.drive(Driver(), Tasks(1), "c")
        assert (report.repeated, report.rows, report.parts) == (True, 0, 0)
        assert trial.commit_log.read("c")[1]["state"] == "applied"


@pytest.mark.parametrize("repeats", [1, 2])
def test_what_an_earlier_run_left_goes_behind_a_copy(tmp_path, monkeypatch, repeats):
    """Of a commit that is found done what the runs before it have staged is deleted, also by a later repeat."""
    trial, runs, delete = sqlite(tmp_path), [], DatabaseSink.discard

    def fails(staging):
        runs.append(staging.run)
        raise RuntimeError("no rows")

    def discard(sink, staging, kept):
        if staging.run in runs:
            raise OSError("no route")
        delete(sink, staging, kept)

    with monkeypatch.context() as patch:
        patch.setattr(DatabaseSink, "discard", discard)
        with pytest.raises(RuntimeError):
            commit(trial.make_sink(), trial.commit_log, "c", SCHEMA, fails, sleep=lambda _: None)
        restored(trial, Tasks(1))
        for _ in range(repeats - 1):
            assert trial.drive(Driver(), Tasks(2), "c").repeated
        assert len(trial.left()) == 1
    assert trial.drive(Driver(), Tasks(2), "c").repeated
    assert (trial.left(), sorted(trial.visible())) == ([], Tasks(1).expected)


def test_decisions_behind_a_link(tmp_path, monkeypatch):
    """A folder is taken as the system takes it, with its links."""
    (tmp_path / "far" / "in").mkdir(parents=True)
    (tmp_path / "near").mkdir()
    (tmp_path / "near" / "link").symlink_to(tmp_path / "far" / "in")
    monkeypatch.chdir(tmp_path / "near")
    commit_log = FileCommitLog("link/../log")
    assert commit_log.write("c", {"state": "open"}, 0) == 1
    assert [folder.name for folder in (tmp_path / "far").iterdir()] != ["in"]
    assert [folder.name for folder in (tmp_path / "near").iterdir()] == ["link"]


def test_what_may_be_done_is_not_abandoned(trial):
    """Where the sink does not say whether it is done, it is aborted, so that its job may end, and nothing is deleted."""
    before = restored(trial, Tasks(1))

    def away(*_):
        raise CommitFailed("it is away")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(trial.make_sink()), "done", away)
        for _ in range(2):
            abandon(trial.make_sink(), trial.commit_log, "c")
    assert trial.commit_log.read("c")[1]["state"] == "aborted"
    assert (sorted(trial.visible()), trial.state()) == before
    abandon(trial.make_sink(), trial.commit_log, "c")
    assert trial.commit_log.read("c")[1]["state"] == "applied"
    assert (sorted(trial.visible()), trial.state()) == before


def test_a_refusal_of_a_driver_that_lost_its_session(trial):
    """The record stays decided then, though it is said to be another's: what was staged stays, and whoever goes on brings all."""
    tasks = Tasks(1)
    lost = Silent(trial.commit_log, CommitSuperseded("the session is lost"), "refused")
    with pytest.raises(CommitPending, match="the sink refuses it: never. The refusal could not be recorded: the session"):
        commit(Refusing(trial.make_sink()), lost, "c", SCHEMA, lambda staging: tasks.run(trial.make_sink(), staging))
    assert trial.commit_log.read("c")[1]["state"] == "decided"
    assert trial.drive(Driver(), Tasks(2), "c").repeated
    assert sorted(trial.visible()) == tasks.expected
    assert trial.left() == []


def test_a_conflict_of_a_sink_that_is_gone(tmp_path):
    """Behind the decision nobody can say then whether it is done: what was staged stays, for a repeat."""
    trial, tasks = sqlite(tmp_path), Tasks(1)
    plain, decided = trial.make_sink(), []

    class Gone(Around):
        def commit(self, staging, messages):
            decided.append(1)
            raise CommitConflict("is there already")

        def done(self, commit_id):
            if decided:
                raise CommitFailed("the server is gone")
            return plain.done(commit_id)

    with pytest.raises(CommitPending, match="the sink does not say whether it is done: the server is gone"):
        commit(Gone(plain), trial.commit_log, "c", SCHEMA, lambda staging: tasks.run(plain, staging))
    assert trial.drive(Driver(), Tasks(2), "c").repeated
    assert sorted(trial.visible()) == tasks.expected
    assert trial.left() == []


class Away(Around):
    """A sink that cannot be asked to delete so often."""

    def __init__(self, sink, times):
        super().__init__(sink)
        self._times = times

    def discard(self, staging, kept):
        if self._times:
            self._times -= 1
            raise CommitFailed("the server is gone")
        self._sink.discard(staging, kept)


@pytest.mark.parametrize("lands", [True, False], ids=["done", "failed"])
def test_a_sink_that_is_away_for_a_moment_when_it_is_over(trial, lands):
    """It is asked again, as often as for a commit: nothing is left."""
    tasks, pauses = Tasks(SEED), []

    def run(staging):
        messages = tasks.run(trial.make_sink(), staging)
        if not lands:
            raise ValueError("the job failed")
        return messages

    with contextlib.nullcontext() if lands else pytest.raises(ValueError, match="the job failed"):
        commit(Away(trial.make_sink(), 3), trial.commit_log, "c", SCHEMA, run, sleep=pauses.append)
    assert pauses == [0.2, 0.4, 0.8]
    assert sorted(trial.visible()) == (tasks.expected if lands else [])
    assert trial.left() == []


@pytest.mark.parametrize("lands", [True, False], ids=["done", "failed"])
def test_a_sink_that_is_away_when_it_is_over(tmp_path, caplog, lands):
    """The log says what stays, and how it goes away: by hand only what nobody sees. A repeat with the id deletes it."""
    trial, tasks, runs = sqlite(tmp_path), Tasks(SEED), []

    def run(staging):
        runs.append(staging.run)
        messages = tasks.run(trial.make_sink(), staging)
        if not lands:
            raise ValueError("the job failed")
        return messages

    with contextlib.nullcontext() if lands else pytest.raises(ValueError, match="the job failed"):
        commit(Away(trial.make_sink(), 9), trial.commit_log, "c", SCHEMA, run, sleep=lambda _: None)
    assert trial.left() == [f"stagecrew_stage_{runs[0]}"]
    [said] = [record.message for record in caplog.records if "could not be deleted" in record.message]
    assert f"commit 'c' has staged for <table target of sqlite> in {tmp_path}" in said
    assert runs[0] in said
    assert ("delete them when the sink is back" in said) is not lands
    trial.drive(Driver(), Tasks(1), "c")
    assert sorted(trial.visible()) == tasks.expected
    assert trial.left() == []


def test_a_sink_whose_host_is_gone_when_it_is_over(tmp_path, monkeypatch):
    """It is not asked again where it has taken long to say nothing."""
    trial, pauses = sqlite(tmp_path), []
    sink = Away(trial.make_sink(), 9)
    monkeypatch.setattr(stagecrew.operators.commit_rollforward, "_BRIEF", -1.0)
    commit(
        sink, trial.commit_log, "c", SCHEMA, lambda staging: Tasks(1).run(trial.make_sink(), staging), sleep=pauses.append
    )  # fmt: skip
    assert (pauses, sink._times) == ([], 8)


def test_an_id_of_another_sink(tmp_path):
    """One id for two places: with decisions it is refused, and a table never takes another's commit for its own."""
    (tmp_path / "one").mkdir()
    trial = sqlite(tmp_path / "one")
    trial.drive(Driver(), Tasks(1), "c")
    with contextlib.closing(sqlite3.connect(tmp_path / "one" / "data.db")) as database:
        database.execute('CREATE TABLE other (id INTEGER, "text" TEXT)')
    other = DatabaseSink(f"sqlite:///{tmp_path}/one/data.db", "other")
    with pytest.raises(
        OperatorMisused, match="commit 'c' is known for <table target of sqlite> in .*data.db, not for <table other"
    ):
        commit(other, trial.commit_log, "c", SCHEMA, lambda staging: Tasks(1).run(other, staging))
    report = commit(other, MemoryCommitLog(), "c", SCHEMA, lambda staging: Tasks(1).run(other, staging))
    assert not report.repeated
    with contextlib.closing(sqlite3.connect(tmp_path / "one" / "data.db")) as database:
        assert database.execute("SELECT count(*) FROM other").fetchone() == (40,)


def s3_at(endpoint):
    return pyarrow.fs.S3FileSystem(
        access_key="very-secret", secret_key="very-secret", endpoint_override=endpoint, region="us-east-1"
    )


def webhdfs_at(host):
    files = fsspec.filesystem("webhdfs", host=host, port=1, user="me", password="very-secret", skip_instance_cache=True)
    return pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(files))


def iceberg_at(catalog="default", **properties):
    return IcebergSink("db.target", catalog, properties)


SECRET = "://me:very-secret@"


@pytest.mark.parametrize(
    "sinks",
    [
        lambda: [ObjectSink("bucket/t", s3_at(f"http{SECRET}{host}:9?password=very-secret")) for host in "ab"],
        lambda: [
            ObjectSink(f"s3{SECRET}bucket/t?endpoint_override=http%3A%2F%2F{host}&region=us-east-1") for host in "ab"
        ],
        lambda: [ObjectSink("bucket/t", s3_at("")), ObjectSink("bucket/t", s3_at("a"))],
        lambda: [ParquetSink("/t", mode, webhdfs_at(host)) for host in "ab" for mode in ("create", "append")],
        lambda: [iceberg_at(name, uri="sqlite:///c.db", **{"s3.secret-access-key": "very-secret"}) for name in "ab"],
        lambda: [iceberg_at(uri=f"postgresql+psycopg2{SECRET}{host}/c?password=very-secret") for host in "ab"],
        lambda: [iceberg_at(uri="https://c", warehouse=name, token="very-secret") for name in "ab"],
        lambda: [
            DatabaseSink(f"postgresql{SECRET}{where}", "t")
            for where in ("a/db", "b/db", "a/other", "a:1/db", "a/db?options=-csearch_path%3Dx&sslpassword=very-secret")
        ],
        lambda: [DatabaseSink("postgresql:///?" + what, "t") for what in ("host=a&password=very-secret", "service=x")],
    ],
    ids=["s3", "s3-uri", "aws", "webhdfs", "names", "catalogues", "warehouses", "postgresql", "queries"],
)
def test_what_a_sink_is_known_by(sinks):
    """Its store, catalogue or server too, so that one of the same name elsewhere is another; and no secret."""
    known = [sink.identity for sink in sinks()]
    assert len(set(known)) == len(known) > 1
    assert known == [sink.identity for sink in sinks()]
    assert "very-secret" not in f"{known} {[repr(sink) for sink in sinks()]}"


def test_an_id_of_a_sink_in_another_catalogue(tmp_path):
    """The same table's name and the same decisions: it is not found done where it is not."""
    (tmp_path / "one").mkdir(), (tmp_path / "two").mkdir()
    one, two = iceberg(tmp_path / "one"), iceberg(tmp_path / "two")
    one.drive(Driver(), Tasks(1), "c")
    two.commit_log = one.commit_log
    with pytest.raises(OperatorMisused, match="commit 'c' is known for .*/one/catalog.db.*, not for .*/two/catalog.db"):
        two.drive(Driver(), Tasks(1), "c")
    assert two.visible() == []


def test_an_id_of_a_sink_in_another_folder(tmp_path, monkeypatch):
    """A path that is not absolute is one of the folder in which the driver runs."""
    commit_log, tasks = MemoryCommitLog(), Tasks(1)
    for make in (
        lambda: ParquetSink("t"),
        lambda: ObjectSink("o"),
        lambda: DatabaseSink("sqlite:///data.db", "target"),
    ):
        for name in ("one", "two"):
            (tmp_path / name).mkdir(exist_ok=True)
            if not (tmp_path / name / "data.db").exists():
                sqlite(tmp_path / name)
            monkeypatch.chdir(tmp_path / name)
            sink = make()
            with pytest.raises(OperatorMisused, match="is known for") if name == "two" else contextlib.nullcontext():
                commit(
                    sink, commit_log, type(sink).__name__, SCHEMA, lambda staging, sink=sink: tasks.run(sink, staging)
                )


def test_an_iceberg_sink_that_is_stored(tmp_path):
    """Another driver reaches the catalogue with what was stored of it; a task is not told how to."""
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


def test_an_id_of_another_sink_that_does_not_say_which_it_is(tmp_path):
    """One id for two sinks without an identity: the second is not taken for done."""
    (tmp_path / "one").mkdir(), (tmp_path / "two").mkdir()
    commit_log = MemoryCommitLog()

    class Nameless(Around):
        def __getattr__(self, name):
            if name == "identity":
                raise AttributeError(name)
            return getattr(self._sink, name)

    one, two = (Nameless(sqlite(tmp_path / name).make_sink()) for name in ("one", "two"))
    commit(one, commit_log, "c", SCHEMA, lambda staging: Tasks(1).run(one, staging))
    assert commit(one, commit_log, "c", SCHEMA, lambda staging: 1 / 0).repeated
    with pytest.raises(
        OperatorMisused, match="commit 'c' is done, but not in this sink: give each sink ids of its own"
    ):
        commit(two, commit_log, "c", SCHEMA, lambda staging: Tasks(1).run(two, staging))


def test_rows_that_the_table_refuses(tmp_path):
    """Behind the decision: it can never be, so that it is refused, and nothing is left; a repeat tries anew."""
    path = tmp_path / "data.db"
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute('CREATE TABLE target (id INTEGER PRIMARY KEY, "text" TEXT)')
        database.execute("INSERT INTO target VALUES (7, 'there')")
        database.commit()
    sink, commit_log = DatabaseSink(f"sqlite:///{path}", "target"), MemoryCommitLog()
    for _ in range(2):
        with pytest.raises(CommitConflict, match="does not take the rows: IntegrityError"):
            commit(sink, commit_log, "c", SCHEMA, lambda staging: Tasks(1).run(sink, staging))
    with contextlib.closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT count(*) FROM target").fetchone() == (1,)
        assert not database.execute("SELECT name FROM sqlite_master WHERE name LIKE 'stagecrew_stage%'").fetchall()
        database.execute("DELETE FROM target")
        database.commit()
    assert commit(sink, commit_log, "c", SCHEMA, lambda staging: Tasks(1).run(sink, staging)).rows == 40


@pytest.mark.parametrize("what", ["view", "generated column"])
def test_a_table_that_takes_no_rows(tmp_path, what):
    """It is said before anything runs, and nothing is left."""
    trial = sqlite(tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / "data.db")) as database:
        if what == "view":
            database.execute("CREATE VIEW other AS SELECT * FROM target")
        else:
            database.execute("CREATE TABLE other (id INTEGER, \"text\" TEXT AS ('text ' || id))")
    sink = DatabaseSink(f"sqlite:///{tmp_path}/data.db", "other")
    with pytest.raises(CommitFailed, match=f"table other cannot be written: OperationalError: cannot .* {what}"):
        commit(sink, trial.commit_log, "c", SCHEMA, lambda staging: 1 / 0)
    assert trial.left() == []


def test_rows_that_were_lost(tmp_path):
    """What was staged is counted when it is added: with fewer rows nothing is."""
    trial = sqlite(tmp_path)
    sink = trial.make_sink()

    def loses(staging):
        messages = Tasks(1).run(sink, staging)
        with contextlib.closing(sqlite3.connect(tmp_path / "data.db")) as database:
            database.execute(f"DELETE FROM stagecrew_stage_{staging.run} WHERE id = 3")
            database.commit()
        return messages

    with pytest.raises(CommitPending, match="10 rows were staged for table target, and 9 of them are there"):
        commit(sink, trial.commit_log, "c", SCHEMA, loses, sleep=lambda _: None)
    assert trial.visible() == []


def test_discarding_leaves_other_runs_alone(tmp_path):
    """What a run of before deletes is its own, also where another run of the commit has begun and staged nothing yet."""
    sink = ObjectSink(tmp_path / "t")
    for run in ("one", "other"):
        sink.begin(Staging("c", run, SCHEMA))
    sink.discard(Staging("c", "one", SCHEMA), ())
    assert sink.stage(
        Staging("c", "other", SCHEMA), 0, 1, iter([pa.record_batch({"id": [1], "text": ["a"]}, schema=SCHEMA)])
    )


def test_spark_hides_what_is_staged(tmp_path):
    """Names that begin with an underscore are hidden, but for those with a = in them."""
    for sink in (ParquetSink(tmp_path / "t", mode="append"), ParquetSink(tmp_path / "t" / "day=1")):
        sink.begin(Staging("c", "r", SCHEMA))
        (staged,) = [path.name for path in (tmp_path / "t").iterdir() if path.name.startswith("_")]
        assert "=" not in staged
        sink.discard(Staging("c", "r", SCHEMA), ())
