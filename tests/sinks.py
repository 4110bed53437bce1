"""Drivers that die and pause at any write, tasks that go on writing, and sinks on the disk of this host: for the tests of sinks."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import random
import sqlite3
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset
import pyarrow.fs
import pytest
from fsspec.implementations.local import LocalFileSystem

from stagecrew.errors import CommitConflict, CommitFailed, CommitPending, CommitUnknown
from stagecrew.operators.commit_log import FileCommitLog, MemoryCommitLog
from stagecrew.operators.commits import commit
from stagecrew.operators.sinks import DatabaseSink, IcebergSink, ObjectSink, ParquetSink, read_committed
from stagecrew.operators.sinks import parquet as parquet_module
from zookeeper import Proxy

SCHEMA = pa.schema([("id", pa.int64()), ("text", pa.string())])


class Killed(BaseException):
    """The driver died here; nothing that it does has an effect any more."""


class Driver:
    """One driver: its writes are counted, and it dies, or pauses, before or after one of them."""

    def __init__(
        self, dies_at: int | None = None, pauses_at: int | str | None = None, raises_at: int | None = None
    ) -> None:
        self.dies_at, self.pauses_at, self.raises_at = dies_at, pauses_at, raises_at
        self.names: list[str] = []  # of the moments that were
        self.dead = False
        self.paused, self.goes_on = threading.Event(), threading.Event()

    @property
    def moments(self) -> int:
        return len(self.names)

    def moment(self, name: str, holds: bool = False) -> None:
        """Something is about to be written, or was. Who `holds` what others wait for does not pause."""
        if self.dead:
            raise Killed
        self.names.append(name)
        if self.moments == self.dies_at:
            self.dead = True
            raise Killed
        if self.moments == self.raises_at:
            raise CommitUnknown(f"nobody knows: {name}") if name.endswith(" write") else OSError(f"in the way: {name}")
        if self.pauses_at in (self.moments, name) and not holds and not self.goes_on.is_set():
            self.paused.set()
            assert self.goes_on.wait(60)

    def watched(self, object_: Any, names: Sequence[str]) -> Any:
        """The object, with these methods as moments: before and after."""
        return Watched(self, object_, names)


class Watched:
    """Looks like what it watches, also to `isinstance`."""

    def __init__(self, driver: Driver, object_: Any, names: Sequence[str]) -> None:
        self._driver, self._object, self._names = driver, object_, frozenset(names)

    @property
    def __class__(self) -> Any:
        return self._object.__class__

    def __reduce__(self) -> Any:
        return self._object.__reduce__()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._object, name)
        if not callable(found):
            return found

        def called(*args: Any, **kwargs: Any) -> Any:
            if self._driver.dead:
                raise Killed
            if name in self._names:
                self._driver.moment(f"before {name}")
            answer = found(*args, **kwargs)
            if name in self._names:
                try:
                    self._driver.moment(f"after {name}")
                except BaseException:
                    if isinstance(answer, pa.NativeFile):
                        answer.close()  # an object store gets what is given up: now, and not when it is collected
                    raise
            return answer

        return called


class Around:
    """A sink whose calls can be changed."""

    def __init__(self, sink: Any) -> None:
        self._sink = sink

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sink, name)


class Tasks:
    """Tasks that stage rows: some attempts fail in the middle, some run twice, some go on when nobody needs them."""

    def __init__(self, seed: int, rows: int = 40, partitions: int = 4, zombies: bool = True) -> None:
        self._with_zombies = zombies
        self._random = random.Random(seed)
        self._rows, self._partitions = rows, partitions
        self._attempts = 0
        self.zombies: list[Callable[[], None]] = []
        self.expected = [(number, f"text {number}") for number in range(rows)]

    def run(self, sink: Any, staging: Any) -> list[dict[str, Any]]:
        """What Spark accepted."""
        messages = []
        for partition in range(self._partitions):
            mine = self.expected[partition :: self._partitions]
            if self._random.random() < 0.3:
                with contextlib.suppress(RuntimeError):
                    self._attempt(sink, staging, partition, self._broken(mine))
            if self._random.random() < 0.3:  # a speculative one, which nobody takes
                self._attempt(sink, staging, partition, self.batches(mine))
            if self._random.random() < 0.3 and self._with_zombies:  # one that goes on later
                number = self._number()
                self.zombies.append(
                    lambda partition=partition, mine=mine, number=number: sink.stage(
                        staging, partition, number, self.batches(mine)
                    )
                )
            message = self._attempt(sink, staging, partition, self.batches(mine))
            if message is not None:
                messages.append(message)
        return messages

    def _number(self) -> int:
        self._attempts += 1
        return self._attempts

    def _attempt(self, sink: Any, staging: Any, partition: int, batches: Iterator[pa.RecordBatch]) -> Any:
        return sink.stage(staging, partition, self._number(), batches)

    @staticmethod
    def batches(rows: list[tuple[int, str]]) -> Iterator[pa.RecordBatch]:
        for some in (rows[:3], rows[3:]):
            yield pa.RecordBatch.from_arrays(
                [pa.array([row[0] for row in some], pa.int64()), pa.array([row[1] for row in some], pa.string())],
                schema=SCHEMA,
            )

    @classmethod
    def _broken(cls, rows: list[tuple[int, str]]) -> Iterator[pa.RecordBatch]:
        yield next(cls.batches(rows))
        raise RuntimeError("the task was killed")


class Trial:
    """A sink of a test, its store of decisions, and what is to be seen there."""

    def __init__(
        self,
        make_sink: Callable[[], Any],
        commit_log: Any,
        visible: Callable[[], list[Any]],
        left: Callable[[], list[str]],
        watch: Callable[[Driver, Any], None],
        state: Callable[[], Any],
    ) -> None:
        self.watch = watch  # has the writes within one call of a sink be moments too
        self.state = state  # all that is there: files with their sizes, or tables
        self.make_sink, self.commit_log, self.visible, self.left = make_sink, commit_log, visible, left

    def drive(self, driver: Driver, tasks: Tasks, commit_id: str = "c 1") -> Any:
        """One driver's run."""
        plain, own = self.make_sink(), self.make_sink()
        self.watch(driver, own)
        sink = driver.watched(own, ("begin", "commit", "discard"))
        commit_log = driver.watched(self.commit_log, ("write",))

        def execute(staging: Any) -> list[Any]:
            driver.moment("stages")
            messages = tasks.run(plain, staging)
            driver.moment("staged")
            return messages

        return commit(sink, commit_log, commit_id, SCHEMA, execute, sleep=lambda _: None)

    def check(self, tasks: Tasks, seen: Sequence[Any]) -> None:
        assert sorted(seen) in ([], tasks.expected), "half of it is visible"

    def repeat_changes_nothing(self, commit_id: str = "c 1") -> None:
        """A driver that repeats what is done runs nothing, and all that is there stays as it is."""
        before = self.state(), self.commit_log.read(commit_id)
        assert self.drive(repeats := Driver(), Tasks(0), commit_id).repeated
        assert "stages" not in repeats.names
        assert (self.state(), self.commit_log.read(commit_id)) == before


#: One attempt fails in the middle then, and there is a speculative one.
SEED = 4


def undisturbed(trial: Trial) -> list[str]:
    """The moments of a driver to which nothing happens, and whose tasks are those of the seed `SEED`."""
    driver = Driver()
    trial.drive(driver, Tasks(SEED, zombies=False))
    assert driver.names[-1] == "after write"
    return driver.names


def seeded(trial: Trial, seed: int, moments: int) -> None:
    """A random story: drivers die, pause and go on, tasks write when nobody needs them; at its end all is there, once.

    An undisturbed driver has so many moments. Who comes behind others deletes what they left first, and has some more.
    """
    randomly = random.Random(seed)
    tasks = Tasks(seed)
    paused: list[tuple[Driver, threading.Thread]] = []
    for before in range(randomly.randrange(1, 4)):
        kind = randomly.choice(["dies", "pauses", "raises"])
        driver = Driver(**{f"{kind}_at": randomly.randrange(1, moments + 1 + _CLEANING * before)})
        outcome: list[BaseException] = []

        def run(driver: Driver = driver, outcome: list[BaseException] = outcome) -> None:
            try:
                trial.drive(driver, tasks)
            except (Killed, OSError, CommitFailed, CommitUnknown) as error:
                outcome.append(error)

        if kind == "pauses":
            thread = threading.Thread(target=run)
            thread.start()
            while thread.is_alive() and not driver.paused.wait(0.01):
                pass
            paused.append((driver, thread))
        else:
            run()
        trial.check(tasks, trial.visible())
        if tasks.zombies and randomly.random() < 0.5:
            _late(tasks.zombies.pop())
        if paused and randomly.random() < 0.3:
            _go_on(paused.pop(randomly.randrange(len(paused))))
            trial.check(tasks, trial.visible())
    trial.drive(Driver(), tasks)
    assert sorted(trial.visible()) == tasks.expected
    for one in paused:
        _go_on(one)
    while tasks.zombies:
        _late(tasks.zombies.pop())
    assert trial.left() == []
    trial.repeat_changes_nothing()
    assert sorted(trial.visible()) == tasks.expected
    assert trial.left() == []


#: The moments of deleting what one run left: of its call, and within it.
_CLEANING = 6


def late_at_each_moment(make: Callable[[str], Trial], moments: Sequence[int] = ()) -> None:
    """A task that pauses at each of its writes and batches, until its commit is over: it leaves nothing, and shows nothing.

    `make` makes a trial of that name.
    """
    over = False
    for moment in moments or itertools.count(1):
        if over:
            break
        for ends in (True, False):
            trial = make(f"late-{moment}-{ends}")
            zombie, tasks = Driver(pauses_at=moment), Tasks(moment, zombies=False)
            threads: list[threading.Thread] = []

            def execute(
                staging: Any,
                trial: Trial = trial,
                zombie: Driver = zombie,
                tasks: Tasks = tasks,
                threads: list[threading.Thread] = threads,
                ends: bool = ends,
            ) -> list[Any]:
                slow = trial.make_sink()
                _watch_task(zombie, slow)
                batches = _slowly(zombie, tasks.batches(tasks.expected))
                threads.append(threading.Thread(target=_late, args=(lambda: slow.stage(staging, 0, 99, batches),)))
                threads[0].start()
                while threads[0].is_alive() and not zombie.paused.wait(0.01):
                    pass
                messages = tasks.run(trial.make_sink(), staging)
                if not ends:
                    raise RuntimeError("the job failed")
                return messages

            with contextlib.nullcontext() if ends else contextlib.suppress(RuntimeError):
                commit(trial.make_sink(), trial.commit_log, f"late {moment}", SCHEMA, execute)
            _go_on((zombie, threads[0]))
            assert sorted(trial.visible()) == (tasks.expected if ends else []), zombie.names
            assert trial.left() == [], (zombie.names, ends)
            over = zombie.moments < moment
            assert not over or moment > 3


def _slowly(zombie: Driver, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        zombie.moment("before a batch")
        yield batch
    zombie.moment("behind the batches")


def _watch_task(zombie: Driver, sink: Any) -> None:
    """What a task writes is a moment."""
    if hasattr(sink, "_filesystem"):
        names = ("open_output_stream", "get_file_info", "delete_file", "delete_dir")
        sink._filesystem = zombie.watched(sink._filesystem, names)
    elif hasattr(sink, "_within"):
        watch_transactions(zombie, sink)


class _Interrupted(Driver):
    """At one of its calls to the file system something else is done."""

    def __init__(self, at: int, then: Callable[[], None]) -> None:
        super().__init__()
        self._at, self._then, self.was = at, then, False

    def moment(self, name: str, holds: bool = False) -> None:
        super().moment(name, holds)
        if self.moments == self._at:
            self.was = True
            self._then()


def first_commits_of_two_schemas(make: Callable[[int], Trial], moments: Iterable[int]) -> None:
    """Whenever the first commit of another schema is done while one begins: one of them lands at most, and says why not else."""
    other_schema = pa.schema([("id", pa.int64()), ("name", pa.string())])
    for at in moments:
        trial, tasks, landed, told = make(at), Tasks(1), [], []
        trial.commit_log = MemoryCommitLog()

        def commits(
            sink: Any, name: str, schema: pa.Schema, trial: Trial = trial, tasks: Tasks = tasks,
            landed: list[str] = landed, told: list[str] = told,
        ) -> None:  # fmt: skip
            def stage(staging: Any) -> list[Any]:
                batch = pa.record_batch({"id": [1], schema.names[1]: ["other"]}, schema=schema)
                return tasks.run(sink, staging) if schema is SCHEMA else [sink.stage(staging, 0, 1, iter([batch]))]

            try:
                commit(sink, trial.commit_log, name, schema, stage, sleep=lambda _: None)
                landed.append(name)
            except CommitFailed as error:
                told.append(str(error))

        one = trial.make_sink()
        interrupted = _Interrupted(
            at, lambda commits=commits, trial=trial: commits(trial.make_sink(), "other", other_schema)
        )
        one._filesystem = interrupted.watched(
            one._filesystem,
            ("create_dir", "open_output_stream", "open_input_stream", "get_file_info", "copy_file", "move"),
        )
        commits(one, "one", SCHEMA)
        if not interrupted.was:
            assert at > 6
            return
        assert len(landed) == len(told) == 1, (at, landed)
        assert "the dataset does not fit " in told[0]
        assert "text is not there; name is missing" in told[0] or "name is not there; text is missing" in told[0]
        assert trial.left() == []
        if landed == ["one"]:
            assert sorted(trial.visible()) == tasks.expected
        commits(trial.make_sink(), "again", SCHEMA if landed == ["one"] else other_schema)
        assert landed[1:] == ["again"]


def looked_at_within(trial: Trial) -> None:
    """Another connection looks before the end of each transaction of a database: it sees nothing before the last one ends."""
    sink, tasks, seen = trial.make_sink(), Tasks(1), []
    within = sink._within

    @contextlib.contextmanager
    def looks(database: Any) -> Iterator[None]:
        with within(database):
            yield
            seen.append((database.execute("SELECT count(*) FROM " + sink._table).fetchone()[0], len(trial.visible())))

    sink._within = looks
    commit(sink, trial.commit_log, "c", SCHEMA, lambda staging: tasks.run(sink, staging))
    assert (40, 0) in seen, "nobody looked when all was added"
    assert {visible for added, visible in seen if seen.index((added, visible)) <= seen.index((40, 0))} == {0}
    assert sorted(trial.visible()) == tasks.expected


class _Losing(Driver):
    """Its connection is lost at one of its calls to the file system."""

    def __init__(self, at: int, proxy: Proxy) -> None:
        super().__init__()
        self._at, self._proxy, self.lost = at, proxy, False

    def moment(self, name: str, holds: bool = False) -> None:
        super().moment(name, holds)
        if self.moments == self._at:
            self.lost = True
            lose(self._proxy)


def lose(proxy: Proxy) -> None:
    """Connections end, and new ones are refused, until it is told again which port is behind it."""
    proxy._to = 1
    proxy.cut()


def connections_that_are_lost(make: Callable[[int], Trial], proxy: Proxy, moments: Iterable[int]) -> None:
    """At each call to the file system: a clear error, never half is visible; a repeat brings all, once, and leaves nothing.

    `make` makes trials whose sinks go through the proxy, and whose eyes do not.
    """
    port = proxy._to
    for at in moments:
        trial, losing, tasks = make(at), _Losing(at, proxy), Tasks(1, zombies=False)
        own = trial.make_sink()
        own._filesystem = losing.watched(
            own._filesystem,
            ("create_dir", "open_output_stream", "open_input_stream", "get_file_info", "copy_file", "move",
             "delete_file", "delete_dir"),
        )  # fmt: skip
        try:
            commit(
                own,
                trial.commit_log,
                "c",
                SCHEMA,
                lambda staging, tasks=tasks, own=own: tasks.run(own, staging),
                sleep=lambda _: None,
            )
        except (OSError, RuntimeError, CommitFailed, CommitPending) as error:
            outcome = error
        else:
            outcome = None
        assert outcome is None or str(outcome), "it says nothing"
        proxy._to = port
        seen = sorted(trial.visible())
        assert seen == (tasks.expected if outcome is None else []) or (
            isinstance(outcome, CommitPending) and seen == tasks.expected
        )
        report = commit(
            trial.make_sink(),
            trial.commit_log,
            "c",
            SCHEMA,
            lambda staging, tasks=tasks, trial=trial: tasks.run(trial.make_sink(), staging),
        )
        assert report.repeated == (outcome is None or isinstance(outcome, CommitPending))
        assert sorted(trial.visible()) == tasks.expected
        assert trial.left() == []
        if not losing.lost:
            assert at > 20
            return


def other_schemas(trial: Trial, known: str = "int64") -> None:
    """Columns that are missing, or of another type: it is said by name before anything runs, nothing is visible, nothing left."""
    trial.drive(Driver(), Tasks(1), "first")
    for fields, problem in (
        ([("id", pa.int64()), ("name", pa.string())], "name is not there; text is missing"),
        ([("id", pa.int64())], "text is missing"),
        ([("id", pa.string()), ("text", pa.string())], f"id is string, there {known}"),
    ):
        if known or "there" not in problem.replace("not there", ""):
            with pytest.raises(
                CommitFailed, match=f"the dataset does not fit .*{problem}. Select and cast its columns"
            ):
                commit(trial.make_sink(), trial.commit_log, "other", pa.schema(fields), lambda staging: 1 / 0)
    assert len(trial.visible()) == 40
    assert trial.left() == []


class _LikeHdfs(LocalFileSystem):
    """Its renames move into a folder that is there, put nothing in the place of a file, and fail without a word."""

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        if os.path.isdir(path2):
            path2 = os.path.join(path2, os.path.basename(path1))
        if os.path.exists(path1) and not os.path.exists(path2):
            os.rename(path1, path2)


def like_hdfs() -> pyarrow.fs.FileSystem:
    """The disk of this host, which renames as HDFS does."""
    return pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(_LikeHdfs(auto_mkdir=True, skip_instance_cache=True)))


def moved_into_another(filesystem: pyarrow.fs.FileSystem, folder: str, make: Callable[[str], Trial]) -> None:
    """Two commits make one folder; the rename of the second moves into it, and its driver dies: its repeat says conflict, nothing is left.

    `make` makes a trial of mode "create" with decisions of that name, whose table is `folder`.
    """
    one, other = make("one"), make("other")

    def behind(on: Any, source: str, destination: str) -> None:
        if destination != folder:
            move(on, source, destination)
            return
        patch.undo()
        one.drive(Driver(), Tasks(1), "one")
        move(on, source, destination)
        raise Killed

    move = parquet_module.move
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet_module, "move", behind)
        with pytest.raises(Killed):
            other.drive(Driver(), Tasks(2), "other")

    def names() -> list[str]:
        infos = filesystem.get_file_info(pyarrow.fs.FileSelector(os.path.dirname(folder), recursive=True))
        return [info.path for info in infos if "_stagecrew-" in info.path]

    assert any(name.startswith(f"{folder}/_stagecrew-") for name in names()), "it was not moved into the other's"
    assert sorted(one.visible()) == Tasks(1).expected
    for _ in range(2):
        with pytest.raises(CommitConflict, match="is there already"):
            other.drive(Driver(), Tasks(3), "other")
        assert names() == []
        assert sorted(one.visible()) == Tasks(1).expected


def _late(zombie: Callable[[], None]) -> None:
    with contextlib.suppress(Exception):
        zombie()


def _go_on(one: tuple[Driver, threading.Thread]) -> None:
    driver, thread = one
    driver.goes_on.set()
    thread.join(60)
    assert not thread.is_alive()


def watch_files(driver: Driver, sink: Any) -> None:
    """Each write to its file system is a moment."""
    sink._filesystem = driver.watched(
        sink._filesystem, ("create_dir", "move", "copy_file", "open_output_stream", "delete_dir", "delete_file")
    )


def watch_transactions(driver: Driver, sink: Any) -> None:
    """The begin of each transaction is a moment, that before its end, and its end."""
    within = sink._within

    @contextlib.contextmanager
    def watched(database: Any) -> Iterator[None]:
        driver.moment("before a transaction")
        with within(database):
            yield
            driver.moment("in a transaction", holds=True)
        driver.moment("after a transaction")

    sink._within = watched


def watch_iceberg(driver: Driver, sink: Any) -> None:
    """Each file that pyiceberg writes or deletes is a moment, each call of its catalogue, and the update there."""
    from sqlalchemy import event

    load = sink._table

    def before(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("UPDATE"):
            driver.moment("before the update")

    def behind(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("UPDATE"):
            driver.moment("in a transaction", holds=True)

    @contextlib.contextmanager
    def watched() -> Iterator[Any]:
        with load() as table:
            files, catalog = table.io, table.catalog
            new_output = files.new_output

            def opened(location: str) -> Any:
                output = new_output(location)
                output.create = driver.watched(_Plain(output.create), ("create",)).create
                return output

            files.new_output = opened
            files.delete = driver.watched(_Plain(files.delete), ("delete",)).delete
            for name in ("commit_table", "_write_metadata"):
                setattr(catalog, name, getattr(driver.watched(_Plain(getattr(catalog, name)), (name,)), name))
            event.listen(catalog.engine, "before_cursor_execute", before)
            event.listen(catalog.engine, "after_cursor_execute", behind)
            yield table

    sink._table = watched


class _Plain:
    """An object with one method."""

    def __init__(self, method: Callable[..., Any]) -> None:
        setattr(self, method.__name__, method)


def files_below(filesystem: pyarrow.fs.FileSystem, folder: str) -> list[tuple[str, int | None]]:
    """All files and folders there, and their sizes."""
    infos = filesystem.get_file_info(pyarrow.fs.FileSelector(folder, recursive=True, allow_not_found=True))
    return sorted((info.path, info.size) for info in infos)


# -- On the disk of this host


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def files_in(folder: Path) -> Callable[[], list[tuple[str, int | None]]]:
    return lambda: files_below(pyarrow.fs.LocalFileSystem(), str(folder))


def rows_of(dataset: Any) -> list[tuple[int, str]]:
    return [(row["id"], row["text"]) for row in dataset.to_table().to_pylist()]


def parquet(tmp_path: Path) -> Trial:
    target = tmp_path / "out" / "table"

    def visible():
        if not target.exists():
            return []
        assert (target / "_stagecrew.json").exists(), "the folder is there, but not whole"
        return rows_of(pyarrow.dataset.dataset(str(target), exclude_invalid_files=True))

    def left():
        return [name for name in files(tmp_path / "out") if not name.startswith("table/")] + [
            path.name for path in (tmp_path / "out").glob("_stagecrew-*")
        ]

    state = files_in(tmp_path / "out")
    return Trial(lambda: ParquetSink(target), FileCommitLog(tmp_path / "log"), visible, left, watch_files, state)


def appended(tmp_path: Path) -> Trial:
    target = tmp_path / "table"

    def visible():
        if not any(target.rglob("*.parquet")):
            return []
        return rows_of(pyarrow.dataset.dataset(str(target), partitioning="hive"))

    def left():
        return [name for name in files(target) if not name.startswith("stagecrew_commit=")] + [
            path.name for path in target.glob("_*")
        ]

    make = lambda: ParquetSink(target, mode="append")  # noqa: E731
    return Trial(make, FileCommitLog(tmp_path / "log"), visible, left, watch_files, files_in(target))


def objects(tmp_path: Path) -> Trial:
    target = tmp_path / "objects"

    def visible():
        try:
            return rows_of(read_committed(target))
        except FileNotFoundError:
            return []

    def left():
        try:
            known = {str(file)[len(str(target)) + 1 :] for file in read_committed(target).files}
        except FileNotFoundError:
            known = set()
        return [name for name in files(target) if name not in known and not name.startswith("_stagecrew/")]

    commit_log, state = FileCommitLog(tmp_path / "log"), files_in(target)
    return Trial(lambda: ObjectSink(target), commit_log, visible, left, watch_files, state)


def sqlite(tmp_path: Path) -> Trial:
    path = tmp_path / "data.db"
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute('CREATE TABLE target (id INTEGER, "text" TEXT)')

    def query(text):
        with contextlib.closing(sqlite3.connect(path)) as database:
            return database.execute(text).fetchall()

    def state():
        with contextlib.closing(sqlite3.connect(path)) as database:
            return list(database.iterdump())

    return Trial(
        lambda: DatabaseSink(f"sqlite:///{path}", "target"),
        FileCommitLog(tmp_path / "log"),
        lambda: query("SELECT id, text FROM target"),
        lambda: [name for (name,) in query("SELECT name FROM sqlite_master WHERE name LIKE 'stagecrew_stage%'")],
        watch_transactions,
        state,
    )


def iceberg(tmp_path: Path, uri: str = "") -> Trial:
    from pyiceberg.catalog import load_catalog

    where = {
        "type": "sql",
        "uri": uri or f"sqlite:///{tmp_path}/catalog.db",
        "warehouse": f"file://{tmp_path}/warehouse",
    }
    with contextlib.closing(load_catalog("default", **where)) as catalog:
        catalog.create_namespace_if_not_exists("db")
        catalog.create_table("db.target", SCHEMA)

    def table() -> Any:
        with contextlib.closing(load_catalog("default", **where)) as catalog:
            return catalog.load_table("db.target")

    def left():
        known = {task.file.file_path.removeprefix("file://") for task in table().scan().plan_files()}
        return [
            name
            for name in files(tmp_path / "warehouse")
            if "stagecrew-" in name and not any(one.endswith(name) for one in known)
        ]

    return Trial(
        lambda: IcebergSink("db.target", properties=where),
        FileCommitLog(tmp_path / "log"),
        lambda: [(row["id"], row["text"]) for row in table().scan().to_arrow().to_pylist()],
        left,
        watch_iceberg,
        lambda: (table().metadata_location, files_in(tmp_path / "warehouse" / "db" / "target" / "data")()),
    )


SINKS = [parquet, appended, objects, sqlite, iceberg]


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A disk of its own, for root."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        gc.collect()  # connections of tests that nobody closed
        subprocess.run(["umount", str(folder)], check=True)


def remount(folder: Path, how: str) -> None:
    """Has a disk be read-only, "ro", or not, "rw"."""
    gc.collect()
    subprocess.run(["mount", "-o", f"remount,{how}", str(folder)], check=True)
