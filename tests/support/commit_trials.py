"""Fault injection for commits: drivers that die, pause or fail at any write, tasks that write late, and sink trials.

A *moment* is a point before or after a write at which a driver can die, pause or fail. See `Driver`.
"""

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
    """The driver died here. Nothing that it does afterwards has an effect."""


class Driver:
    """Counts the moments of one driver. At one of them the driver dies, pauses or raises an error."""

    def __init__(
        self, dies_at: int | None = None, pauses_at: int | str | None = None, raises_at: int | None = None
    ) -> None:
        self.dies_at, self.pauses_at, self.raises_at = dies_at, pauses_at, raises_at
        self.names: list[str] = []  # the names of all moments so far
        self.dead = False
        self.paused, self.resume = threading.Event(), threading.Event()

    @property
    def moments(self) -> int:
        return len(self.names)

    def moment(self, name: str, holds_lock: bool = False) -> None:
        """Called before and after each write. The driver never pauses at a moment with `holds_lock`."""
        if self.dead:
            raise Killed
        self.names.append(name)
        if self.moments == self.dies_at:
            self.dead = True
            raise Killed
        if self.moments == self.raises_at:
            raise (
                CommitUnknown(f"unknown outcome: {name}")
                if name.endswith(" write")
                else OSError(f"injected failure: {name}")
            )
        if self.pauses_at in (self.moments, name) and not holds_lock and not self.resume.is_set():
            self.paused.set()
            assert self.resume.wait(60)

    def instrument(self, object_: Any, names: Sequence[str]) -> Any:
        """Returns a proxy of an object that adds moments before and after each call of the named methods."""
        return Instrumented(self, object_, names)


class Instrumented:
    """A proxy that adds moments. It passes `isinstance` checks for the class of its target."""

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
            result = found(*args, **kwargs)
            if name in self._names:
                try:
                    self._driver.moment(f"after {name}")
                except BaseException:
                    if isinstance(result, pa.NativeFile):
                        result.close()  # otherwise garbage collection would close it later, and so upload the file
                    raise
            return result

        return called


class SinkWrapper:
    """Passes all calls on to a sink. Subclasses override some of its methods."""

    def __init__(self, sink: Any) -> None:
        self._sink = sink

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sink, name)


class Tasks:
    """Tasks that stage rows. Some attempts fail halfway, some are speculative, and zombies write after the commit."""

    def __init__(self, seed: int, rows: int = 40, partitions: int = 4, zombies: bool = True) -> None:
        self._with_zombies = zombies
        self._random = random.Random(seed)
        self._rows, self._partitions = rows, partitions
        self._attempts = 0
        self.zombies: list[Callable[[], None]] = []
        self.expected = [(number, f"text {number}") for number in range(rows)]

    def run(self, sink: Any, staging: Any) -> list[dict[str, Any]]:
        """Stages all partitions. Returns one message per partition, from the attempt that Spark would accept."""
        messages = []
        for partition in range(self._partitions):
            own_rows = self.expected[partition :: self._partitions]
            if self._random.random() < 0.3:
                with contextlib.suppress(RuntimeError):
                    self._attempt(sink, staging, partition, self._broken(own_rows))
            if self._random.random() < 0.3:  # a speculative attempt whose message is not used
                self._attempt(sink, staging, partition, self.batches(own_rows))
            if self._random.random() < 0.3 and self._with_zombies:  # a zombie: an attempt that will write later
                number = self._number()
                self.zombies.append(
                    lambda partition=partition, own_rows=own_rows, number=number: sink.stage(
                        staging, partition, number, self.batches(own_rows)
                    )
                )
            message = self._attempt(sink, staging, partition, self.batches(own_rows))
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
        for part in (rows[:3], rows[3:]):
            yield pa.RecordBatch.from_arrays(
                [pa.array([row[0] for row in part], pa.int64()), pa.array([row[1] for row in part], pa.string())],
                schema=SCHEMA,
            )

    @classmethod
    def _broken(cls, rows: list[tuple[int, str]]) -> Iterator[pa.RecordBatch]:
        yield next(cls.batches(rows))
        raise RuntimeError("the task was killed")


class Trial:
    """A sink under test, its commit log, and functions that inspect the result."""

    def __init__(
        self,
        make_sink: Callable[[], Any],
        commit_log: Any,
        visible: Callable[[], list[Any]],
        leftovers: Callable[[], list[str]],
        watch: Callable[[Driver, Any], None],
        state: Callable[[], Any],
    ) -> None:
        self.watch = watch  # adds moments at the writes within each call of a sink
        self.state = state  # returns everything that exists: files with their sizes, or tables
        self.make_sink, self.commit_log, self.visible, self.leftovers = make_sink, commit_log, visible, leftovers

    def drive(self, driver: Driver, tasks: Tasks, commit_id: str = "c 1") -> Any:
        """Runs one driver's commit, and returns its report."""
        plain, instrumented = self.make_sink(), self.make_sink()
        self.watch(driver, instrumented)
        sink = driver.instrument(instrumented, ("begin", "commit", "discard"))
        commit_log = driver.instrument(self.commit_log, ("write",))

        def execute(staging: Any) -> list[Any]:
            driver.moment("stages")
            messages = tasks.run(plain, staging)
            driver.moment("staged")
            return messages

        return commit(sink, commit_log, commit_id, SCHEMA, execute, sleep=lambda _: None)

    def check(self, tasks: Tasks, seen: Sequence[Any]) -> None:
        assert sorted(seen) in ([], tasks.expected), "only some of the rows are visible"

    def repeat_changes_nothing(self, commit_id: str = "c 1") -> None:
        """Repeats a finished commit, and asserts that the driver runs no tasks and changes nothing."""
        before = self.state(), self.commit_log.read(commit_id)
        assert self.drive(repeats := Driver(), Tasks(0), commit_id).repeated
        assert "stages" not in repeats.names
        assert (self.state(), self.commit_log.read(commit_id)) == before


#: With this seed, one attempt fails halfway and one is speculative.
SEED = 4


def moments_without_faults(trial: Trial) -> list[str]:
    """Runs a commit without faults, with tasks of seed `SEED`. Returns the names of the driver's moments."""
    driver = Driver()
    trial.drive(driver, Tasks(SEED, zombies=False))
    assert driver.names[-1] == "after write"
    return driver.names


def watch_files(driver: Driver, sink: Any) -> None:
    """Adds moments before and after each write to the sink's file system."""
    sink._filesystem = driver.instrument(
        sink._filesystem, ("create_dir", "move", "copy_file", "open_output_stream", "delete_dir", "delete_file")
    )


def watch_transactions(driver: Driver, sink: Any) -> None:
    """Adds moments before each transaction, just before its end, and after it."""
    within = sink._within

    @contextlib.contextmanager
    def watched(database: Any) -> Iterator[None]:
        driver.moment("before a transaction")
        with within(database):
            yield
            driver.moment("in a transaction", holds_lock=True)
        driver.moment("after a transaction")

    sink._within = watched


def watch_iceberg(driver: Driver, sink: Any) -> None:
    """Adds moments at each file that pyiceberg writes or deletes, each catalog call, and each UPDATE of the catalog."""
    from sqlalchemy import event

    load = sink._table

    def before(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("UPDATE"):
            driver.moment("before the update")

    def after(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("UPDATE"):
            driver.moment("in a transaction", holds_lock=True)

    @contextlib.contextmanager
    def watched() -> Iterator[Any]:
        with load() as table:
            files, catalog = table.io, table.catalog
            new_output = files.new_output

            def opened(location: str) -> Any:
                output = new_output(location)
                output.create = driver.instrument(_Plain(output.create), ("create",)).create
                return output

            files.new_output = opened
            files.delete = driver.instrument(_Plain(files.delete), ("delete",)).delete
            for name in ("commit_table", "_write_metadata"):
                setattr(catalog, name, getattr(driver.instrument(_Plain(getattr(catalog, name)), (name,)), name))
            event.listen(catalog.engine, "before_cursor_execute", before)
            event.listen(catalog.engine, "after_cursor_execute", after)
            yield table

    sink._table = watched


class _Plain:
    """An object with one method."""

    def __init__(self, method: Callable[..., Any]) -> None:
        setattr(self, method.__name__, method)


def files_below(filesystem: pyarrow.fs.FileSystem, folder: str) -> list[tuple[str, int | None]]:
    """Returns all files and folders below a folder, with their sizes."""
    infos = filesystem.get_file_info(pyarrow.fs.FileSelector(folder, recursive=True, allow_not_found=True))
    return sorted((info.path, info.size) for info in infos)
