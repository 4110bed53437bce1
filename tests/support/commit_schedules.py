"""Schedules of faults for commits.

At each of its moments, a driver dies, fails once, or pauses until another driver has run. Tasks write late, connections
are lost, and two drivers commit at the same time. `make(name)` creates a trial with this name. With `every=n`, only
every n-th moment is tested.
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
    """Kills the driver before and after each write, and asserts that readers see all rows or none.

    The next driver must publish all rows once and leave no staged data. A repeated commit must then change nothing.
    """
    names = moments_without_faults(make("undisturbed"))
    for moment in range(1, len(names) + 1, every):
        trial, driver, tasks = make(f"killed-{moment}"), Driver(dies_at=moment), Tasks(SEED)
        with pytest.raises(Killed):
            trial.drive(driver, tasks)
        assert driver.names == names[:moment]
        _assert_all_or_nothing(names, moment, trial, tasks)
        trial.drive(Driver(), tasks)
        _assert_published_once(trial, tasks, driver)


def failing_at_each_moment(make: Make, every: int = 1) -> None:
    """Fails each write once, before or after its effect.

    If the write fails before the decision to commit is stored, the driver must raise an error, and no row may be
    visible. If it fails after the decision, the same driver must continue and publish all rows. No staged data may be
    left if the driver could store that it aborted. In each case, a repeated commit must publish all rows.
    """
    names = moments_without_faults(make("undisturbed"))
    for moment in range(1, len(names) + 1, every):
        trial, driver, tasks = make(f"failing-{moment}"), Driver(raises_at=moment), Tasks(SEED)
        if moment <= names.index("before commit"):
            with pytest.raises((OSError, CommitFailed, CommitUnknown)):
                trial.drive(driver, tasks)
            assert trial.visible() == []
            # If the driver does not know whether the decision is stored, it must not delete anything.
            unknown = moment > names.index("before commit") - 2
            assert unknown or trial.leftovers() == [], driver.names
        else:
            assert trial.drive(driver, tasks).rows == 40
            assert sorted(trial.visible()) == tasks.expected
            assert trial.leftovers() == [] or moment > names.index("before discard"), driver.names
        trial.drive(Driver(), tasks)
        _assert_published_once(trial, tasks, driver)


def commit_that_raises(make: Make) -> None:
    """Makes the sink's `commit` raise before or after its effect. The driver must retry, and publish all rows once.

    If `commit` always fails, the staged rows must stay, and a later driver must finish the commit.
    """
    for effect in ("before", "after"):
        for times in (1, 100):
            trial, tasks, pauses = make(f"raises-{effect}-{times}"), Tasks(1), []
            sink = FailingSink(trial.make_sink(), effect, times)
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
            _assert_published_once(trial, tasks)


class FailingSink(SinkWrapper):
    """A sink whose first `times` calls of `commit` raise, before or after their effect."""

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
    """Pauses an old driver while a new driver commits or aborts. When it resumes, it must change and leave nothing.

    If the old driver has already stored its decision, the new driver cannot abort, and the old driver succeeds.
    Otherwise the old driver fails, with `CommitSuperseded` if all of its rows were staged.
    """
    names = moments_without_faults(make("undisturbed"))
    for moment in range(1, len(names) + 1, every):
        # The moment just before "before commit" is "after write": the decision has been stored.
        decided = moment > names.index("before commit") - 1
        for ends in ("commits",) if decided else ("commits", "aborts"):
            trial, old, tasks = (
                make(f"resumed-{moment}-{ends}"),
                Driver(pauses_at=moment),
                Tasks(SEED, zombies=False),
            )
            with paused(trial, old, tasks) as outcome:
                if not old.paused.is_set():
                    continue  # the old driver holds a lock here, so it does not pause: the new driver would wait for it
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
    """Runs the body while a driver is paused. Yields a list that will contain the driver's report or its error."""
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
    """Pauses an old driver within its commit until the sink has refused a new driver's commit.

    The old driver must then fail, and change and leave nothing. `refuse` creates an obstacle and returns a function
    that removes it. If `stays`, the obstacle is removed only after the old driver has ended.
    """
    names = moments_without_faults(make("undisturbed"))
    seen = 0
    for moment in range(names.index("before commit") + 1, names.index("after commit") + 1):
        trial, old, tasks = make(f"refused-{moment}"), Driver(pauses_at=moment), Tasks(SEED, zombies=False)
        with paused(trial, old, tasks) as outcome:
            if trial.visible():
                break  # the rows are already visible, so no commit is refused any more
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
        _assert_published_once(trial, tasks, old)
        seen += 1
    assert seen > 1


def concurrent_commits(trial: Trial, moment: str) -> list[Any]:
    """Runs two commits to the same target concurrently. Both must succeed, or one must fail with a conflict.

    Both drivers wait at `moment` (for example "staged") before either commits. No staged data may be left. Returns the
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


def _assert_all_or_nothing(names: list[str], moment: int, trial: Trial, tasks: Tasks) -> None:
    """Asserts that no row is visible before the commit, all are visible after it, and never only some of them."""
    seen = sorted(trial.visible())
    assert seen in ([], tasks.expected), "only some of the rows are visible"
    if moment <= names.index("before commit") + 1:
        assert seen == []
    if moment > names.index("after commit"):
        assert seen == tasks.expected


def _assert_published_once(trial: Trial, tasks: Tasks, driver: Driver | None = None) -> None:
    assert sorted(trial.visible()) == tasks.expected, driver and driver.names
    assert trial.leftovers() == [], driver and driver.names
    trial.repeat_changes_nothing()
    assert sorted(trial.visible()) == tasks.expected
    assert trial.leftovers() == []


def random_history(trial: Trial, seed: int, moments: int) -> None:
    """Runs a random history: drivers die, fail, pause and resume, and tasks write late.

    At the end, all rows must be visible once. `moments` is the number of moments of a driver without faults. A driver
    that runs after others first deletes what they left, which adds some moments.
    """
    randomly = random.Random(seed)
    tasks = Tasks(seed)
    paused: list[tuple[Driver, threading.Thread]] = []
    for before in range(randomly.randrange(1, 4)):
        kind = randomly.choice(["dies", "pauses", "raises"])
        driver = Driver(**{f"{kind}_at": randomly.randrange(1, moments + 1 + _CLEANUP_MOMENTS * before)})
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
            _run_late(tasks.zombies.pop())
        if paused and randomly.random() < 0.3:
            _resume(paused.pop(randomly.randrange(len(paused))))
            trial.check(tasks, trial.visible())
    trial.drive(Driver(), tasks)
    assert sorted(trial.visible()) == tasks.expected
    for one in paused:
        _resume(one)
    while tasks.zombies:
        _run_late(tasks.zombies.pop())
    assert trial.leftovers() == []
    trial.repeat_changes_nothing()
    assert sorted(trial.visible()) == tasks.expected
    assert trial.leftovers() == []


#: The number of moments of one cleanup: those before, within and after the call of `discard`.
_CLEANUP_MOMENTS = 6


def late_task_at_each_moment(make: Callable[[str], Trial], moments: Sequence[int] = ()) -> None:
    """Pauses a task at each of its writes and batches until its commit has ended.

    The task's rows must not become visible, and no staged data may be left.
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
                threads.append(threading.Thread(target=_run_late, args=(lambda: slow.stage(staging, 0, 99, batches),)))
                threads[0].start()
                while threads[0].is_alive() and not zombie.paused.wait(0.01):
                    pass
                messages = tasks.run(trial.make_sink(), staging)
                if not ends:
                    raise RuntimeError("the job failed")
                return messages

            with contextlib.nullcontext() if ends else contextlib.suppress(RuntimeError):
                commit(trial.make_sink(), trial.commit_log, f"late {moment}", SCHEMA, execute)
            _resume((zombie, threads[0]))
            assert sorted(trial.visible()) == (tasks.expected if ends else []), zombie.names
            assert trial.leftovers() == [], (zombie.names, ends)
            ended = zombie.moments < moment
            assert not ended or moment > 3


def _slowly(zombie: Driver, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        zombie.moment("before a batch")
        yield batch
    zombie.moment("after the batches")


def _watch_task(zombie: Driver, sink: Any) -> None:
    """Adds moments before and after each of a task's calls to its file system, or around its transactions."""
    if hasattr(sink, "_filesystem"):
        names = ("open_output_stream", "get_file_info", "delete_file", "delete_dir")
        sink._filesystem = zombie.instrument(sink._filesystem, names)
    elif hasattr(sink, "_within"):
        watch_transactions(zombie, sink)


class _Interrupted(Driver):
    """A driver that runs a function at moment number `at`."""

    def __init__(self, at: int, then: Callable[[], None]) -> None:
        super().__init__()
        self._at, self._then, self.interrupted = at, then, False

    def moment(self, name: str, holds_lock: bool = False) -> None:
        super().moment(name, holds_lock)
        if self.moments == self._at:
            self.interrupted = True
            self._then()


def first_commits_of_two_schemas(make: Callable[[int], Trial], moments: Iterable[int]) -> None:
    """At each moment of a first commit, runs a first commit that has another schema.

    Exactly one of the two must succeed, and the error of the other must name the columns that differ.
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
        driver = _Interrupted(
            at, lambda commits=commits, trial=trial: commits(trial.make_sink(), "other", other_schema)
        )
        one._filesystem = driver.instrument(
            one._filesystem,
            ("create_dir", "open_output_stream", "open_input_stream", "get_file_info", "copy_file", "move"),
        )
        commits(one, "one", SCHEMA)
        if not driver.interrupted:
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
    """Reads through another connection before each transaction ends.

    No row may be visible before the transaction that adds the rows to the table has ended.
    """
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


class _DisconnectedDriver(Driver):
    """A driver that loses its connection at moment number `at`."""

    def __init__(self, at: int, proxy: Proxy) -> None:
        super().__init__()
        self._at, self._proxy, self.lost = at, proxy, False

    def moment(self, name: str, holds_lock: bool = False) -> None:
        super().moment(name, holds_lock)
        if self.moments == self._at:
            self.lost = True
            disconnect(self._proxy)


def disconnect(proxy: Proxy) -> None:
    """Drops all connections and refuses new ones, until the target port of the proxy is set again."""
    proxy._to = 1
    proxy.cut()


def lost_connections(make: Callable[[int], Trial], proxy: Proxy, moments: Iterable[int]) -> None:
    """Drops the connection at each call to the file system.

    An error must have a message, and readers must see all rows or none. A repeated commit must then publish all rows
    once and leave nothing. In the trials that `make` creates, the sinks use the proxy, but the functions that inspect
    the result do not.
    """
    port = proxy._to
    for at in moments:
        trial, losing, tasks = make(at), _DisconnectedDriver(at, proxy), Tasks(1, zombies=False)
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
        assert outcome is None or str(outcome), "the error has no message"
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
    """Commits datasets with missing, unknown or wrongly typed columns. The error must name them before any task runs.

    The rows of the first commit must stay the only ones, and no staged data may be left. `known` is the type of `id` in
    the error message, or empty if the sink does not check types.
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
    """Runs two commits that create the same folder, on a file system that renames into an existing folder.

    The second commit's rename moves its files into the folder of the first, and then its driver dies. When the second
    commit is repeated, it must report a conflict and leave nothing. `make(name)` creates a trial of mode "create" whose
    table is `folder`, with a commit log of this name.
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


def _run_late(zombie: Callable[[], None]) -> None:
    with contextlib.suppress(Exception):
        zombie()


def _resume(paused: tuple[Driver, threading.Thread]) -> None:
    driver, thread = paused
    driver.resume.set()
    thread.join(60)
    assert not thread.is_alive()
