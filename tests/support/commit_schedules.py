"""Schedules of faults for commits.

A driver dies, fails once, or pauses and resumes after another driver, at each of its moments. Tasks write late,
connections are lost, and two drivers commit at the same time. The argument `make` creates the trial of a given name;
with `every=n` a schedule tests every n-th moment.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.fs
import pytest

from stagecrew.errors import CommitConflict, CommitFailed, CommitPending, CommitSuperseded, CommitUnknown
from stagecrew.operators.commit_log import MemoryCommitLog
from stagecrew.operators.commits import CommitReport, commit
from stagecrew.operators.sinks import parquet as parquet_module
from support.commit_trials import (
    SCHEMA,
    SEED,
    Driver,
    Killed,
    SinkWrapper,
    Tasks,
    Trial,
    moments_without_faults,
    watch_transactions,
)
from support.tcp_proxy import Proxy

Make = Callable[[str], Trial]


def killed_at_each_moment(make: Make, every: int = 1) -> None:
    """Kills the driver before and after each write: readers see all rows or none.

    The next driver publishes all rows once, and no staged data is left. A repeated commit then changes nothing.
    """
    names = moments_without_faults(make("undisturbed"))
    for moment in range(1, len(names) + 1, every):
        trial, driver, tasks = make(f"killed-{moment}"), Driver(dies_at=moment), Tasks(SEED)
        with pytest.raises(Killed):
            trial.drive(driver, tasks)
        assert driver.names == names[:moment]
        _visible_behind(names, moment, trial, tasks)
        trial.drive(Driver(), tasks)
        _all_once(trial, tasks, driver)


def failing_at_each_moment(make: Make, every: int = 1) -> None:
    """Fails each write once, before or after its effect.

    Before the decision, the driver raises the error and nothing is visible. After it, the driver itself continues and
    publishes all rows. When the abort could be written, nothing is left. In each case a repeated commit publishes all
    rows.
    """
    names = moments_without_faults(make("undisturbed"))
    for moment in range(1, len(names) + 1, every):
        trial, driver, tasks = make(f"failing-{moment}"), Driver(raises_at=moment), Tasks(SEED)
        if moment <= names.index("before commit"):
            with pytest.raises((OSError, CommitFailed, CommitUnknown)):
                trial.drive(driver, tasks)
            assert trial.visible() == []
            # If it is unknown whether the commit is decided, nothing is deleted.
            unknown = moment > names.index("before commit") - 2
            assert unknown or trial.leftovers() == [], driver.names
        else:
            assert trial.drive(driver, tasks).rows == 40
            assert sorted(trial.visible()) == tasks.expected
            assert trial.leftovers() == [] or moment > names.index("before discard"), driver.names
        trial.drive(Driver(), tasks)
        _all_once(trial, tasks, driver)


def commit_that_raises(make: Make) -> None:
    """Fails `Committer.commit` before or after its effect: the driver retries it, and all rows are there once.

    If it fails permanently, the staged rows stay, and a later driver continues the commit.
    """
    for effect in ("before", "after"):
        for times in (1, 100):
            trial, tasks, pauses = make(f"raises-{effect}-{times}"), Tasks(1), []
            sink = Raises(trial.make_sink(), effect, times)
            run = lambda staging, trial=trial, tasks=tasks: tasks.run(trial.make_sink(), staging)  # noqa: E731
            if times == 1:
                report = commit(sink, trial.commit_log, "c 1", SCHEMA, run, sleep=pauses.append)
                assert (report.rows, report.repeated, len(pauses)) == (40, False, 1)
            else:
                with pytest.raises(CommitPending, match="is decided, but could not be applied: OSError: the network"):
                    commit(sink, trial.commit_log, "c 1", SCHEMA, run, sleep=pauses.append)
                assert len(pauses) == 3
                assert sorted(trial.visible()) == (tasks.expected if effect == "after" else [])
                sink.times = 0
                assert commit(sink, trial.commit_log, "c 1", SCHEMA, lambda staging: 1 / 0).repeated
            _all_once(trial, tasks)


class Raises(SinkWrapper):
    """A sink whose commit raises `times` times, before or after its effect."""

    def __init__(self, sink: Any, effect: str, times: int) -> None:
        super().__init__(sink)
        self._effect, self.times = effect, times

    def commit(self, staging: Any, messages: Any) -> None:
        if self._effect == "after":
            self._sink.commit(staging, messages)
        if self.times:
            self.times -= 1
            raise OSError("the network is down")
        self._sink.commit(staging, messages)


def resume_at_each_moment(make: Make, every: int = 1) -> None:
    """Pauses an old driver while a new driver commits or aborts: the old driver then changes and leaves nothing.

    If the old driver has already decided, nobody can abort. If it has not, it fails; with `CommitSuperseded` if all its
    rows were staged.
    """
    names = moments_without_faults(make("undisturbed"))
    for moment in range(1, len(names) + 1, every):
        # The moment directly before "before commit" comes after the write of the decision.
        decided = moment > names.index("before commit") - 1
        for ends in ("commits",) if decided else ("commits", "aborts"):
            trial, old, tasks = (
                make(f"going-on-{moment}-{ends}"),
                Driver(pauses_at=moment),
                Tasks(SEED, zombies=False),
            )
            with paused(trial, old, tasks) as outcome:
                if not old.paused.is_set():
                    continue  # it would hold a lock on which the new driver waits
                if ends == "commits":
                    trial.drive(Driver(), tasks)
                else:
                    with pytest.raises(ZeroDivisionError):
                        commit(trial.make_sink(), trial.commit_log, "c 1", SCHEMA, lambda staging: 1 / 0)
                before = trial.state(), trial.commit_log.read("c 1"), sorted(trial.visible())
                assert before[2] == (tasks.expected if ends == "commits" else [])
            assert (trial.state(), trial.commit_log.read("c 1"), sorted(trial.visible())) == before, old.names
            assert trial.leftovers() == [], old.names
            expected = CommitReport if decided else CommitSuperseded if "staged" in old.names else CommitFailed
            assert isinstance(outcome[0], expected), (old.names, outcome)


@contextlib.contextmanager
def paused(trial: Trial, old: Driver, tasks: Tasks, commit_id: str = "c 1") -> Iterator[list[Any]]:
    """Runs the body while a driver is paused. Yields a list that later has the driver's report, or its error."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(trial.drive(old, tasks, commit_id))
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while thread.is_alive() and not old.paused.wait(0.01):
        pass
    try:
        yield outcome
    finally:
        old.resume.set()
        thread.join(60)
    assert not thread.is_alive()


def resume_after_refusal(make: Make, refuse: Callable[[Trial], Callable[[], None]], stays: bool) -> None:
    """Pauses an old driver in its commit until a new driver was refused.

    The old driver fails. It changes nothing and leaves nothing. `refuse` creates an obstacle and returns a function
    that removes it. With `stays`, the obstacle is removed only after the old driver has ended.
    """
    names = moments_without_faults(make("undisturbed"))
    seen = 0
    for moment in range(names.index("before commit") + 1, names.index("after commit") + 1):
        trial, old, tasks = make(f"refused-{moment}"), Driver(pauses_at=moment), Tasks(SEED, zombies=False)
        with paused(trial, old, tasks) as outcome:
            if trial.visible():
                break  # the rows are visible, so no driver is refused any more
            if not old.paused.is_set():
                continue
            allow = refuse(trial)
            with pytest.raises(CommitConflict):
                trial.drive(Driver(), tasks)
            if not stays:
                allow()
        if stays:
            allow()
        assert isinstance(outcome[0], (CommitSuperseded, CommitConflict)), (old.names, outcome)
        assert trial.visible() == [], old.names
        assert trial.leftovers() == [], old.names
        trial.drive(Driver(), tasks)
        _all_once(trial, tasks, old)
        seen += 1
    assert seen > 1


def concurrent_commits(trial: Trial, moment: str) -> list[Any]:
    """Runs two commits to one place at the same time. Both succeed, or one fails with a conflict; nothing is left.

    Both drivers wait at `moment` (for example "staged"), which comes before either has committed. Returns the
    conflicts.
    """
    one, other = Driver(pauses_at=moment), Driver(pauses_at=moment)
    with paused(trial, one, Tasks(1), "one") as first, paused(trial, other, Tasks(2), "other") as second:
        assert one.paused.is_set()
        assert other.paused.is_set()
        assert trial.visible() == []
        one.resume.set(), other.resume.set()
    outcomes = [*first, *second]
    conflicts = [outcome for outcome in outcomes if isinstance(outcome, CommitConflict)]
    assert len(conflicts) <= 1
    assert sum(getattr(outcome, "rows", 0) for outcome in outcomes) == 40 * (2 - len(conflicts)), outcomes
    assert sorted(trial.visible()) == sorted(Tasks(1).expected * (2 - len(conflicts)))
    assert trial.leftovers() == []
    return conflicts


def _visible_behind(names: list[str], moment: int, trial: Trial, tasks: Tasks) -> None:
    """Asserts that no rows are visible before the commit, all after it, and never a part."""
    seen = sorted(trial.visible())
    assert seen in ([], tasks.expected), "a part of the rows is visible"
    if moment <= names.index("before commit") + 1:
        assert seen == []
    if moment > names.index("after commit"):
        assert seen == tasks.expected


def _all_once(trial: Trial, tasks: Tasks, driver: Driver | None = None) -> None:
    assert sorted(trial.visible()) == tasks.expected, driver and driver.names
    assert trial.leftovers() == [], driver and driver.names
    trial.repeat_changes_nothing()
    assert sorted(trial.visible()) == tasks.expected
    assert trial.leftovers() == []


def random_history(trial: Trial, seed: int, moments: int) -> None:
    """Runs a random history: drivers die, pause and resume, and tasks write late. At the end all rows are there once.

    `moments` is the number of moments of a driver without faults. A driver that comes after others first deletes their
    remains, which adds some moments.
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
    assert trial.leftovers() == []
    trial.repeat_changes_nothing()
    assert sorted(trial.visible()) == tasks.expected
    assert trial.leftovers() == []


#: The number of moments of one cleanup: those around the call and those within it.
_CLEANING = 6


def late_task_at_each_moment(make: Callable[[str], Trial], moments: Sequence[int] = ()) -> None:
    """Pauses a task at each of its writes and batches until its commit has ended.

    The task's rows are not visible, and nothing is left. `make` creates the trial of a given name.
    """
    ended = False
    for moment in moments or itertools.count(1):
        if ended:
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
            assert trial.leftovers() == [], (zombie.names, ends)
            ended = zombie.moments < moment
            assert not ended or moment > 3


def _slowly(zombie: Driver, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        zombie.moment("before a batch")
        yield batch
    zombie.moment("behind the batches")


def _watch_task(zombie: Driver, sink: Any) -> None:
    """Makes each write of a task a moment."""
    if hasattr(sink, "_filesystem"):
        names = ("open_output_stream", "get_file_info", "delete_file", "delete_dir")
        sink._filesystem = zombie.instrument(sink._filesystem, names)
    elif hasattr(sink, "_within"):
        watch_transactions(zombie, sink)


class _Interrupted(Driver):
    """Runs a function at one of its calls to the file system."""

    def __init__(self, at: int, then: Callable[[], None]) -> None:
        super().__init__()
        self._at, self._then, self.was = at, then, False

    def moment(self, name: str, holds_lock: bool = False) -> None:
        super().moment(name, holds_lock)
        if self.moments == self._at:
            self.was = True
            self._then()


def first_commits_of_two_schemas(make: Callable[[int], Trial], moments: Iterable[int]) -> None:
    """Makes the first commit of another schema at each moment of a first commit.

    At most one of the two succeeds, and the error of the other says why.
    """
    other_schema = pa.schema([("id", pa.int64()), ("name", pa.string())])
    for at in moments:
        trial, tasks, landed, messages = make(at), Tasks(1), [], []
        trial.commit_log = MemoryCommitLog()

        def commits(
            sink: Any, name: str, schema: pa.Schema, trial: Trial = trial, tasks: Tasks = tasks,
            landed: list[str] = landed, messages: list[str] = messages,
        ) -> None:  # fmt: skip
            def stage(staging: Any) -> list[Any]:
                batch = pa.record_batch({"id": [1], schema.names[1]: ["other"]}, schema=schema)
                return tasks.run(sink, staging) if schema is SCHEMA else [sink.stage(staging, 0, 1, iter([batch]))]

            try:
                commit(sink, trial.commit_log, name, schema, stage, sleep=lambda _: None)
                landed.append(name)
            except CommitFailed as error:
                messages.append(str(error))

        one = trial.make_sink()
        interrupted = _Interrupted(
            at, lambda commits=commits, trial=trial: commits(trial.make_sink(), "other", other_schema)
        )
        one._filesystem = interrupted.instrument(
            one._filesystem,
            ("create_dir", "open_output_stream", "open_input_stream", "get_file_info", "copy_file", "move"),
        )
        commits(one, "one", SCHEMA)
        if not interrupted.was:
            assert at > 6
            return
        assert len(landed) == len(messages) == 1, (at, landed)
        assert "the dataset does not fit " in messages[0]
        assert (
            "text does not exist there; name is missing" in messages[0]
            or "name does not exist there; text is missing" in messages[0]
        )
        assert trial.leftovers() == []
        if landed == ["one"]:
            assert sorted(trial.visible()) == tasks.expected
        commits(trial.make_sink(), "again", SCHEMA if landed == ["one"] else other_schema)
        assert landed[1:] == ["again"]


def rows_appear_at_once(trial: Trial) -> None:
    """Reads from another connection before each transaction ends: no row is visible before the end of the last one."""
    sink, tasks, seen = trial.make_sink(), Tasks(1), []
    within = sink._within

    @contextlib.contextmanager
    def reading_before_end(database: Any) -> Iterator[None]:
        with within(database):
            yield
            seen.append((database.execute("SELECT count(*) FROM " + sink._table).fetchone()[0], len(trial.visible())))

    sink._within = reading_before_end
    commit(sink, trial.commit_log, "c", SCHEMA, lambda staging: tasks.run(sink, staging))
    assert (40, 0) in seen, "no read happened after all rows were added"
    assert {visible for added, visible in seen if seen.index((added, visible)) <= seen.index((40, 0))} == {0}
    assert sorted(trial.visible()) == tasks.expected


class _Losing(Driver):
    """A driver that loses its connection at one of its calls to the file system."""

    def __init__(self, at: int, proxy: Proxy) -> None:
        super().__init__()
        self._at, self._proxy, self.lost = at, proxy, False

    def moment(self, name: str, holds_lock: bool = False) -> None:
        super().moment(name, holds_lock)
        if self.moments == self._at:
            self.lost = True
            disconnect(self._proxy)


def disconnect(proxy: Proxy) -> None:
    """Ends all connections and refuses new ones, until the target port of the proxy is set again."""
    proxy._to = 1
    proxy.cut()


def lost_connections(make: Callable[[int], Trial], proxy: Proxy, moments: Iterable[int]) -> None:
    """Loses the connection at each call to the file system.

    The error is clear, and never a part of the rows is visible. A repeated commit then publishes all rows once, and
    leaves nothing. The sinks of the trials that `make` creates use the proxy; the functions that inspect the result do
    not.
    """
    port = proxy._to
    for at in moments:
        trial, losing, tasks = make(at), _Losing(at, proxy), Tasks(1, zombies=False)
        losing_sink = trial.make_sink()
        losing_sink._filesystem = losing.instrument(
            losing_sink._filesystem,
            ("create_dir", "open_output_stream", "open_input_stream", "get_file_info", "copy_file", "move",
             "delete_file", "delete_dir"),
        )  # fmt: skip
        try:
            commit(
                losing_sink,
                trial.commit_log,
                "c",
                SCHEMA,
                lambda staging, tasks=tasks, losing_sink=losing_sink: tasks.run(losing_sink, staging),
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
        assert trial.leftovers() == []
        if not losing.lost:
            assert at > 20
            return


def mismatched_schemas(trial: Trial, known: str = "int64") -> None:
    """Commits with missing columns, or with columns of another type: the error names them before anything runs.

    Nothing is visible, and nothing is left.
    """
    trial.drive(Driver(), Tasks(1), "first")
    for fields, problem in (
        ([("id", pa.int64()), ("name", pa.string())], "name does not exist there; text is missing"),
        ([("id", pa.int64())], "text is missing"),
        ([("id", pa.string()), ("text", pa.string())], f"id is string, expected {known}"),
    ):
        if known or "expected" not in problem:
            with pytest.raises(
                CommitFailed, match=f"the dataset does not fit .*{problem}. Select and cast its columns"
            ):
                commit(trial.make_sink(), trial.commit_log, "other", pa.schema(fields), lambda staging: 1 / 0)
    assert len(trial.visible()) == 40
    assert trial.leftovers() == []


def rename_into_existing_folder(filesystem: pyarrow.fs.FileSystem, folder: str, make: Callable[[str], Trial]) -> None:
    """Lets two commits create one folder. The second one's rename moves its files into the folder, and its driver dies.

    A repeated commit of the second reports a conflict and leaves nothing. `make` creates a trial of mode "create" with
    a commit log of the given name, whose table is `folder`.
    """
    one, other = make("one"), make("other")

    def move_after_other(on: Any, source: str, destination: str) -> None:
        if destination != folder:
            move(on, source, destination)
            return
        patch.undo()
        one.drive(Driver(), Tasks(1), "one")
        move(on, source, destination)
        raise Killed

    move = parquet_module.move
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet_module, "move", move_after_other)
        with pytest.raises(Killed):
            other.drive(Driver(), Tasks(2), "other")

    def names() -> list[str]:
        infos = filesystem.get_file_info(pyarrow.fs.FileSelector(os.path.dirname(folder), recursive=True))
        return [info.path for info in infos if "_stagecrew-" in info.path]

    assert any(name.startswith(f"{folder}/_stagecrew-") for name in names()), (
        "the files were not moved into the other commit's folder"
    )
    assert sorted(one.visible()) == Tasks(1).expected
    for _ in range(2):
        with pytest.raises(CommitConflict, match="already exists"):
            other.drive(Driver(), Tasks(3), "other")
        assert names() == []
        assert sorted(one.visible()) == Tasks(1).expected


def _late(zombie: Callable[[], None]) -> None:
    with contextlib.suppress(Exception):
        zombie()


def _go_on(one: tuple[Driver, threading.Thread]) -> None:
    driver, thread = one
    driver.resume.set()
    thread.join(60)
    assert not thread.is_alive()
