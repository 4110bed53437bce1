"""Drivers that die and pause at any write, tasks that go on writing, and sinks on the disk of this host: for the tests of sinks."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.dataset
import pyarrow.fs

from stagecrew.errors import CommitUnknown
from stagecrew.operators.commits import commit

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


class SinkWrapper:
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


def moments_without_faults(trial: Trial) -> list[str]:
    """The moments of a driver to which nothing happens, and whose tasks are those of the seed `SEED`."""
    driver = Driver()
    trial.drive(driver, Tasks(SEED, zombies=False))
    assert driver.names[-1] == "after write"
    return driver.names


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
