"""Schedules of commits, at each moment: a driver that dies there, or fails once, or pauses and goes on behind another; two at once.

Each takes `make`, which makes a trial of that name, and `every`: how many moments lie between those that it takes.
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
    """Before and after every write: readers see all rows or none; the next driver brings all, once, and leaves nothing.

    A repeat behind that changes nothing.
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
    """A write that raises once, before or after its effect: before the decision that is the error, and nothing is visible.

    Behind it the driver itself goes on, and brings all. Where an abort is written, nothing is left; a repeat brings all in each case.
    """
    names = moments_without_faults(make("undisturbed"))
    for moment in range(1, len(names) + 1, every):
        trial, driver, tasks = make(f"failing-{moment}"), Driver(raises_at=moment), Tasks(SEED)
        if moment <= names.index("before commit"):
            with pytest.raises((OSError, CommitFailed, CommitUnknown)):
                trial.drive(driver, tasks)
            assert trial.visible() == []
            asked = moment > names.index("before commit") - 2  # nobody knows whether it is decided: nothing is deleted
            assert asked or trial.left() == [], driver.names
        else:
            assert trial.drive(driver, tasks).rows == 40
            assert sorted(trial.visible()) == tasks.expected
            assert trial.left() == [] or moment > names.index("before discard"), driver.names
        trial.drive(Driver(), tasks)
        _all_once(trial, tasks, driver)


def commit_that_raises(make: Make) -> None:
    """A commit that raises before it does anything, or when all is done: it is tried again, and all is there once.

    When it raises for good, what was staged stays, and a later driver goes on with it.
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
                with pytest.raises(CommitPending, match="is decided, but could not be done: OSError: the network"):
                    commit(sink, trial.commit_log, "c 1", SCHEMA, run, sleep=pauses.append)
                assert len(pauses) == 3
                assert sorted(trial.visible()) == (tasks.expected if effect == "after" else [])
                sink.times = 0
                assert commit(sink, trial.commit_log, "c 1", SCHEMA, lambda staging: 1 / 0).repeated
            _all_once(trial, tasks)


class Raises(SinkWrapper):
    """A sink whose commit raises so often, before or after its effect."""

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
    """An old driver that pauses, and goes on when a new one has committed, or aborted: it changes nothing, and leaves nothing.

    Where it has decided nobody can abort any more; where it has not it fails, with all staged as another has taken over.
    """
    names = moments_without_faults(make("undisturbed"))
    for moment in range(1, len(names) + 1, every):
        decided = moment > names.index("before commit") - 1  # the moment before is that behind the decision's write
        for ends in ("commits",) if decided else ("commits", "aborts"):
            trial, old, tasks = (
                make(f"going-on-{moment}-{ends}"),
                Driver(pauses_at=moment),
                Tasks(SEED, zombies=False),
            )
            with paused(trial, old, tasks) as outcome:
                if not old.paused.is_set():
                    continue  # it would hold what the new one waits for
                if ends == "commits":
                    trial.drive(Driver(), tasks)
                else:
                    with pytest.raises(ZeroDivisionError):
                        commit(trial.make_sink(), trial.commit_log, "c 1", SCHEMA, lambda staging: 1 / 0)
                before = trial.state(), trial.commit_log.read("c 1"), sorted(trial.visible())
                assert before[2] == (tasks.expected if ends == "commits" else [])
            assert (trial.state(), trial.commit_log.read("c 1"), sorted(trial.visible())) == before, old.names
            assert trial.left() == [], old.names
            expected = CommitReport if decided else CommitSuperseded if "staged" in old.names else CommitFailed
            assert isinstance(outcome[0], expected), (old.names, outcome)


@contextlib.contextmanager
def paused(trial: Trial, old: Driver, tasks: Tasks, commit_id: str = "c 1") -> Iterator[list[Any]]:
    """As long as a driver pauses. Yields what will have come of it: its report, or what it raised."""
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
        old.goes_on.set()
        thread.join(60)
    assert not thread.is_alive()


def resume_after_refusal(make: Make, refuse: Callable[[Trial], Callable[[], None]], stays: bool) -> None:
    """An old driver that pauses in its commit until a new one was refused: it says so, changes nothing and leaves nothing.

    `refuse` puts something in the way, and answers what takes it away: before the old one goes on, or behind it.
    """
    names = moments_without_faults(make("undisturbed"))
    seen = 0
    for moment in range(names.index("before commit") + 1, names.index("after commit") + 1):
        trial, old, tasks = make(f"refused-{moment}"), Driver(pauses_at=moment), Tasks(SEED, zombies=False)
        with paused(trial, old, tasks) as outcome:
            if trial.visible():
                break  # nobody can be refused any more
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
        assert trial.left() == [], old.names
        trial.drive(Driver(), tasks)
        _all_once(trial, tasks, old)
        seen += 1
    assert seen > 1


def concurrent_commits(trial: Trial, moment: str) -> list[Any]:
    """Two commits to one place, neither of which goes on there before the other has come: both land, or one is told of a conflict.

    Nothing is left. `moment` is one before any is done, such as "staged". Gives the conflicts.
    """
    one, other = Driver(pauses_at=moment), Driver(pauses_at=moment)
    with paused(trial, one, Tasks(1), "one") as first, paused(trial, other, Tasks(2), "other") as second:
        assert one.paused.is_set()
        assert other.paused.is_set()
        assert trial.visible() == []
        one.goes_on.set(), other.goes_on.set()
    outcomes = [*first, *second]
    conflicts = [outcome for outcome in outcomes if isinstance(outcome, CommitConflict)]
    assert len(conflicts) <= 1
    assert sum(getattr(outcome, "rows", 0) for outcome in outcomes) == 40 * (2 - len(conflicts)), outcomes
    assert sorted(trial.visible()) == sorted(Tasks(1).expected * (2 - len(conflicts)))
    assert trial.left() == []
    return conflicts


def _visible_behind(names: list[str], moment: int, trial: Trial, tasks: Tasks) -> None:
    """Behind a moment: nothing before the commit, all behind it, and never a part."""
    seen = sorted(trial.visible())
    assert seen in ([], tasks.expected), "half of it is visible"
    if moment <= names.index("before commit") + 1:
        assert seen == []
    if moment > names.index("after commit"):
        assert seen == tasks.expected


def _all_once(trial: Trial, tasks: Tasks, driver: Driver | None = None) -> None:
    assert sorted(trial.visible()) == tasks.expected, driver and driver.names
    assert trial.left() == [], driver and driver.names
    trial.repeat_changes_nothing()
    assert sorted(trial.visible()) == tasks.expected
    assert trial.left() == []


def random_history(trial: Trial, seed: int, moments: int) -> None:
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


def late_task_at_each_moment(make: Callable[[str], Trial], moments: Sequence[int] = ()) -> None:
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


def rows_appear_at_once(trial: Trial) -> None:
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
            disconnect(self._proxy)


def disconnect(proxy: Proxy) -> None:
    """Connections end, and new ones are refused, until it is told again which port is behind it."""
    proxy._to = 1
    proxy.cut()


def lost_connections(make: Callable[[int], Trial], proxy: Proxy, moments: Iterable[int]) -> None:
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


def mismatched_schemas(trial: Trial, known: str = "int64") -> None:
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


def rename_into_existing_folder(filesystem: pyarrow.fs.FileSystem, folder: str, make: Callable[[str], Trial]) -> None:
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
