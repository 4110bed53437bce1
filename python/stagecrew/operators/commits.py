"""Commits: what tasks stage becomes visible all at once, or not at all, whatever fails and whoever repeats it."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import pyarrow as pa

from stagecrew.coordination.contract import Coordinator
from stagecrew.coordination.evaluation import Evaluation
from stagecrew.errors import (
    CommitConflict,
    CommitFailed,
    CommitPending,
    CommitSuperseded,
    CommitUnknown,
    CommitUnreadable,
    OperatorMisused,
)
from stagecrew.operators.commit_records import FORMAT, Known, States, checked, known_of, mark_of, read_mark, schema_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from stagecrew.coordination.context import CoordinatorContext
    from stagecrew.coordination.gateway import Gateway
    from stagecrew.coordination.operator import Scope
    from stagecrew.operators.commit_log import CommitLog
    from stagecrew.operators.commit_records import Record
    from stagecrew.worker.evaluations import TaskGateway

__all__ = [
    "CommitCoordinator",
    "CommitReport",
    "Committer",
    "Message",
    "Staging",
    "abandon",
    "commit",
    "commit_dataset",
    "resume",
]

_log = logging.getLogger("stagecrew")

#: What a task says of what it staged: what JSON can say. `rows` and `bytes` are summed up for the report.
Message = dict[str, Any]

#: How often what is decided is tried, and what is over is deleted, and how many seconds lie before the second try; twice as many before
#: each further one.
_TRIES: Final = 4
_PAUSE: Final = 0.2
#: How many seconds deleting may have taken to be tried again: who waits for a host that is gone is not kept for several times as long.
_BRIEF: Final = 10.0


@dataclasses.dataclass(frozen=True)
class Staging:
    """One driver's run at a commit: what it stages lies apart from that of all other runs."""

    commit_id: str
    run: str
    schema: pa.Schema
    #: A line of at most 400 characters that the sink stores with the commit's id. Empty until the commit is decided.
    mark: str = ""


@dataclasses.dataclass(frozen=True)
class CommitReport:
    """What was committed; `repeated` when it was found decided, by this driver or one before.

    The numbers are 0 when the sink alone remembers the commit.
    """

    commit_id: str
    parts: int
    rows: int
    bytes: int
    repeated: bool


class Committer(Protocol):
    """A sink. It is pickled to tasks, which call `stage`; the rest is called on the driver, one call at a time.

    Each call may be repeated, by another driver too, and may have been cut short at any point before.
    """

    def begin(self, staging: Staging) -> None:
        """Makes the place where tasks stage. Raises `CommitFailed` when what has this schema cannot be committed."""

    def stage(
        self, staging: Staging, partition: int, attempt: int, batches: Iterator[pa.RecordBatch]
    ) -> Message | None:
        """In a task: writes its rows where nobody reads, and says what `commit` needs to know; None when there are none.

        Several attempts may write for one partition, also when nobody waits for them any more: what is written behind the run's
        `discard` must not stay, so that who stages looks last whether its run goes on.
        """

    def commit(self, staging: Staging, messages: Sequence[Message]) -> None:
        """Makes visible what these messages name, all at once, together with the commit's id; does nothing when that id is there.

        Raises `CommitConflict` when that can never be, for good: not by another driver either that is in the middle of the same call.
        """

    def done(self, commit_id: str) -> bool:
        """Whether a commit with this id is visible."""

    # `identity`, a text without secrets, may say which place it is: then an id that is known for another is refused. `in_tasks()` may
    # answer what is pickled to tasks in the place of the sink, such as one without passwords that only the driver needs. `stored_mark(commit_id)`
    # may return the `Staging.mark` that the sink stores with a visible commit, or None. A repeat is compared with it when the decisions
    # have forgotten the commit.

    def discard(self, staging: Staging, kept: Sequence[Message]) -> None:
        """Ends the run, and deletes what it staged, but for what these messages name, which is visible."""


# -- The driver's procedure: without Spark


def commit(
    sink: Committer,
    commit_log: CommitLog,
    commit_id: str,
    schema: pa.Schema,
    execute: Callable[[Staging], Sequence[Message]],
    quiet: Callable[[], None] = lambda: None,
    sleep: Callable[[float], None] = time.sleep,
    *,
    content: str | None = None,
    writer: tuple[str, int] | None = None,
    clock: Callable[[], float] = time.time,
) -> CommitReport:
    """Commits once what `execute` stages and answers the messages of; what was decided before is finished instead.

    The record is the decision: before it is written, a driver that takes over only aborts; after it, it only goes forward.
    `quiet` returns when nobody stages any more, or after a while. `writer` is the job, by its id, and the number of its run.

    Raises `OperatorMisused` for an id that was used for another sink, other columns or another `content`.
    """
    if content is not None and not isinstance(content, str):
        raise OperatorMisused(f"the content of a commit is a text, such as a date or a snapshot id, not {content!r}")
    known = _read(commit_log, commit_id)
    identity, name = getattr(sink, "identity", None), _named(sink)
    earlier = known is not None and _is_of_earlier_run(known[1], writer)
    if known is not None and known[1]["sink"] != name:
        different = (
            f"commit {commit_id!r} is known for {known[1]['sink']}, not for {name}: give each sink ids of its own, such as with its "
            f"name in front"
        )
        if not (earlier and known[1]["state"] == States.APPLIED and "messages" in known[1]):
            raise OperatorMisused(different)
        _log.warning(_OTHER_RUN, commit_id, different)  # the earlier run's sink has the rows: this one is not touched
        return _report(commit_id, known[1])
    if known is not None and known[1]["state"] == States.APPLIED and identity is None and not sink.done(commit_id):
        raise OperatorMisused(f"commit {commit_id!r} is done, but not in this sink: give each sink ids of its own")
    if known is not None and known[1]["state"] in (States.DECIDED, States.APPLIED):
        there = known_of(commit_id, known[1])
        _require_same(commit_id, there, schema, content, earlier)
        report = _forward(sink, commit_log, commit_id, known, sleep)
        if writer is None:
            _warn_of_repeat(commit_id, there, known[1]["state"] == States.DECIDED)
        return report
    if sink.done(commit_id):  # the sink remembers longer than the decisions
        mark = _marked(sink, commit_id)
        there = read_mark(commit_id, mark)
        _require_same(commit_id, there, schema, content, earlier)
        if known is not None:  # a copy of a record, from before the decision
            _clean(sink, commit_id, known[1])
            _written(commit_log, commit_id, _found(known[1], mark), known[0])
        if writer is None:
            _warn_of_repeat(commit_id, there)
        return CommitReport(commit_id, 0, 0, 0, repeated=True)
    staging = Staging(commit_id, uuid.uuid4().hex, schema)
    # None of the runs before can decide any more. One may be paused and stage yet: it is cleaned up by whoever comes behind.
    before = [*known[1]["before"], known[1]["run"]] if known else []
    job, attempt = writer or (None, None)
    opened: Record = {
        "format": FORMAT,
        "state": States.OPEN,
        "run": staging.run,
        "before": before,
        "sink": name,
        "schema": _text(schema),
        "content": content,
        "job": job,
        "attempt": attempt,
    }
    version = commit_log.write(commit_id, opened, known[0] if known else 0)
    try:
        _clean(sink, commit_id, opened)
        sink.begin(staging)
        messages = list(execute(staging))
        quiet()
    except BaseException as error:
        _abort(sink, commit_log, staging, opened, version, error, quiet, sleep)
        raise
    decided = opened | {"state": States.DECIDED, "messages": messages, "time": clock()}
    try:
        version = commit_log.write(commit_id, decided, version)
    except CommitFailed:  # it is not written, and so nobody will ever commit it
        _discard(sink, staging, (), sleep)
        raise
    return dataclasses.replace(_forward(sink, commit_log, commit_id, (version, decided), sleep), repeated=False)


def _read(commit_log: CommitLog, commit_id: str) -> tuple[int, Record] | None:
    """The version and the record of a commit. Raises `CommitUnreadable` for a record that this version may not use."""
    known = commit_log.read(commit_id)
    return None if known is None else (known[0], checked(commit_id, known[1]))


def _is_of_earlier_run(record: Record, writer: tuple[str, int] | None) -> bool:
    """Whether an earlier run of the same job wrote it. Each run computes its values again, and some of them, such as a date, may differ."""
    return (
        writer is not None
        and record.get("job") == writer[0]
        and record.get("attempt") is not None
        and bool(record["attempt"] < writer[1])
    )


def _require_same(commit_id: str, there: Known | None, schema: pa.Schema, content: str | None, earlier: bool) -> None:
    """Raises `OperatorMisused` when the commit was decided for other data; an earlier run of the same job has decided for all runs."""
    difference = "" if there is None else there.difference(schema, content)
    if not difference or there is None:
        return
    text = (
        f"commit {commit_id!r} was decided for other data, on {there.when}, with {there.rows} rows: {difference}. Nothing was written. "
        f"Give other data another commit id"
    )
    if not earlier:
        raise OperatorMisused(text)
    _log.warning(_OTHER_RUN, commit_id, text)


def _warn_of_repeat(commit_id: str, there: Known | None, now: bool = False) -> None:
    if there is None:
        _log.warning(_REPEATED_UNKNOWN, commit_id)
    else:
        _log.warning(_FINISHED_NOW if now else _REPEATED, commit_id, there.when, there.rows)


_REPEATED: Final = "commit %r was done before: it was decided on %s, with %d rows. This call has written nothing. Give other data another commit id"
_FINISHED_NOW: Final = (
    "commit %r was decided before, on %s, with %d rows, and is finished now. This call has written nothing else. Give other data another "
    "commit id"
)
_REPEATED_UNKNOWN: Final = (
    "commit %r was done before, as the sink shows it; when, with how many rows and for which content is not known. This call has written "
    "nothing. Give other data another commit id"
)
_OTHER_RUN: Final = "an earlier run of this job has decided commit %r, and its rows stay. This run differs: %s"


def _marked(sink: Committer, commit_id: str) -> str | None:
    """The mark that the sink stores with a visible commit, if it stores one."""
    mark = getattr(sink, "stored_mark", None)
    return mark(commit_id) if callable(mark) else None


def resume(sink: Committer, commit_log: CommitLog, commit_id: str, sleep: Callable[[float], None] = time.sleep) -> bool:
    """Goes forward with a commit that is decided, from its record alone; answers whether it is. Raises as `commit`."""
    known = _read(commit_log, commit_id)
    if known is None or known[1]["state"] not in (States.DECIDED, States.APPLIED):
        return False
    _forward(sink, commit_log, commit_id, known, sleep)
    return True


def abandon(
    sink: Committer,
    commit_log: CommitLog,
    commit_id: str,
    last: bool = True,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Aborts a commit that is not decided, for good, and deletes what was staged. Raises what writing that down raises.

    What the sink shows stays: then the record is a copy from before the decision. Where the sink does not say, this raises
    `CommitPending`; the `last` time it aborts then, and deletes nothing.
    """
    known = _read(commit_log, commit_id)
    if known is None or known[1]["state"] not in (States.OPEN, States.ABORTED):
        return
    version, record = known
    try:
        done = sink.done(commit_id)
    except Exception as error:
        if not last:
            raise CommitPending(
                f"whether commit {commit_id!r} is done is not known: {type(error).__name__}: {error}"
            ) from error
        done = None
        runs = ", ".join([*record["before"], record["run"]])
        _log.warning(_UNTOLD, commit_id, _named(sink), runs, exc_info=True)
    if done:
        commit_log.write(commit_id, _found(record, _marked(sink, commit_id)), version)
        return
    if record["state"] == States.OPEN:  # behind this nobody decides, so that what is not done never will be
        commit_log.write(commit_id, record | {"state": States.ABORTED, "reason": "its job has ended"}, version)
    if done is None:
        return
    _clean(sink, commit_id, record)
    _discard(sink, _staging_of(commit_id, record), (), sleep)


def _forward(
    sink: Committer, commit_log: CommitLog, commit_id: str, known: tuple[int, Record], sleep: Callable[[float], None]
) -> CommitReport:
    """Has what was decided done, as often as it takes."""
    version, record = known
    if "messages" not in record:  # it was found done, and which files are its own is not known
        _clean(sink, commit_id, record)
        return CommitReport(commit_id, 0, 0, 0, repeated=True)
    staging, messages = _staging_of(commit_id, record), record["messages"]
    report = _report(commit_id, record)
    _clean(sink, commit_id, record)
    if record["state"] == States.APPLIED:
        _discard(sink, staging, messages, sleep)
        return report
    pause = _PAUSE
    for number in range(1, _TRIES + 1):
        try:
            sink.commit(staging, messages)
            break
        except CommitConflict as error:
            if _is_done(sink, commit_id):
                break
            if not _is_refused(commit_log, commit_id, staging):
                # Where this is not written, another may go forward, or have done: nothing is deleted then that it may show.
                try:
                    _refuse(commit_log, commit_id, record, version, error)
                except CommitSuperseded as unwritten:
                    # So too who lost its session: then it is decided still, and whoever goes on needs all that was staged.
                    if not _is_ended(commit_log, commit_id, version):
                        raise _unrefused(commit_id, error, unwritten) from error
                    _discard(sink, staging, messages, sleep)
                    raise
            _discard(sink, staging, (), sleep)
            raise
        except CommitUnreadable:
            raise  # no try changes that
        except Exception as error:
            if _is_refused(commit_log, commit_id, staging):  # what this try has made anew is not left there
                _discard(sink, staging, (), sleep)
                raise CommitSuperseded(
                    f"commit {commit_id!r} was refused for another driver meanwhile, and what was staged is deleted: this one changes "
                    f"nothing. Committing with this id again begins anew"
                ) from error
            if number == _TRIES:
                if _is_ended(commit_log, commit_id, version):
                    _discard(sink, staging, messages, sleep)
                    raise CommitSuperseded(
                        f"another driver has ended commit {commit_id!r} meanwhile, and this one changed nothing: "
                        f"{type(error).__name__}: {error}"
                    ) from error
                raise CommitPending(
                    f"commit {commit_id!r} is decided, but could not be done: {type(error).__name__}: {error}. What was staged stays; "
                    f"committing with this id and the same decisions again goes on with it"
                ) from error
            _log.warning("commit %r is decided and will be tried again: %s: %s", commit_id, type(error).__name__, error)
            sleep(pause)
            pause *= 2
    _discard(sink, staging, messages, sleep)
    _written(commit_log, commit_id, record | {"state": States.APPLIED}, version)
    return report


def _report(commit_id: str, record: Record) -> CommitReport:
    messages = record["messages"]
    rows, size = (sum(message.get(name, 0) for message in messages) for name in ("rows", "bytes"))
    return CommitReport(commit_id, len(messages), rows, size, repeated=True)


def _abort(
    sink: Committer,
    commit_log: CommitLog,
    staging: Staging,
    opened: Record,
    version: int,
    error: BaseException,
    quiet: Callable[[], None],
    sleep: Callable[[float], None],
) -> None:
    """An abort is a write: only behind it is anything deleted. It never hides why."""
    try:
        record = opened | {"state": States.ABORTED, "reason": str(error)[:1000]}
        commit_log.write(staging.commit_id, record, version)
    except CommitFailed:
        pass  # another driver has, or nobody: none will decide for this run
    except Exception:
        _log.warning("commit %r is not known to be aborted: what was staged stays", staging.commit_id, exc_info=True)
        return
    with contextlib.suppress(Exception):
        quiet()
    _discard(sink, staging, (), sleep)


def _is_done(sink: Committer, commit_id: str) -> bool:
    """Behind the decision, where a sink that cannot say is no failed commit."""
    try:
        return sink.done(commit_id)
    except CommitFailed as error:
        raise CommitPending(
            f"commit {commit_id!r} is decided, and the sink does not say whether it is done: {error}. Committing with this id and the same "
            f"decisions again goes on with it"
        ) from error


def _is_refused(commit_log: CommitLog, commit_id: str, staging: Staging) -> bool:
    """Whether it is written that what this run has staged will never be committed."""
    known = _known(commit_log, commit_id)
    return known is not None and (known[1]["run"] != staging.run or known[1]["state"] == States.REFUSED)


def _is_ended(commit_log: CommitLog, commit_id: str, version: int) -> bool:
    """Whether another driver has written more of what is decided: behind the decision that is how it ended."""
    known = _known(commit_log, commit_id)
    return known is not None and known[0] != version


def _known(commit_log: CommitLog, commit_id: str) -> tuple[int, Record] | None:
    """What is written of a commit; None also where that cannot be read."""
    try:
        return _read(commit_log, commit_id)
    except (CommitFailed, CommitUnknown, CommitUnreadable):
        return None


def _refuse(commit_log: CommitLog, commit_id: str, record: Record, version: int, error: CommitConflict) -> None:
    try:
        commit_log.write(commit_id, record | {"state": States.REFUSED, "reason": str(error)[:1000]}, version)
    except CommitSuperseded:
        raise
    except CommitFailed as unwritten:
        raise _unrefused(commit_id, error, unwritten) from error


def _unrefused(commit_id: str, error: CommitConflict, unwritten: CommitFailed) -> CommitPending:
    return CommitPending(
        f"commit {commit_id!r} is decided, and the sink refuses it: {error}. That could not be written down: {unwritten}. What was "
        f"staged stays; committing with this id and the same decisions again goes on with it"
    )


def _found(record: Record, mark: str | None) -> Record:
    """The record of a commit that the sink shows. Its run and its messages are not known; the sink's mark has the rest."""
    kept = ("format", "run", "before", "sink", "schema", "job", "attempt")
    return {name: record.get(name) for name in kept} | {"state": States.APPLIED, "mark": mark}


def _written(commit_log: CommitLog, commit_id: str, record: Record, version: int) -> None:
    try:
        commit_log.write(commit_id, record, version)
    except CommitSuperseded:
        pass  # another driver has done the same
    except (CommitFailed, CommitUnknown):
        _log.warning("that commit %r is done could not be written down; a repeat finds out", commit_id, exc_info=True)


def _clean(sink: Committer, commit_id: str, record: Record) -> None:
    """Deletes what runs before have left. Once: each repeat does, and where the sink is away the caller finds out."""
    for run in record["before"]:
        _discard(sink, Staging(commit_id, run, schema_of(record)), (), None)


def _discard(sink: Committer, staging: Staging, kept: Sequence[Message], sleep: Callable[[float], None] | None) -> None:
    """Deletes what was staged, in as many tries as a commit has; in one without `sleep`. What stays is said in the log."""
    pause, due = _PAUSE, time.monotonic() + _BRIEF
    for left in reversed(range(_TRIES if sleep else 1)):
        try:
            sink.discard(staging, kept)
            return
        except Exception:
            if sleep is None or not left or time.monotonic() > due:
                _log.warning(_STAYS if kept else _ORPHANS, staging.commit_id, _named(sink), staging.run, exc_info=True)
                return
        sleep(pause)
        pause *= 2


#: What stays beside what may be visible: nothing to delete by hand.
_STAYS: Final = "what commit %r has staged for %s beside what was committed could not be deleted: that of run %s. A repeat with its id deletes it"
_ORPHANS: Final = (
    "what commit %r has staged for %s could not be deleted, and stays: the folders or the table with %s in their names, which nobody will "
    "commit. A repeat with its id deletes them; where there will be none, delete them when the sink is back"
)
_UNTOLD: Final = (
    "commit %r is aborted, and nobody will go on with it, but what was staged for %s stays, as that does not say whether it has been "
    "done: the folders or the tables with %s in their names. Delete them when the sink is back, unless it shows this commit"
)


def _named(sink: Committer) -> str:
    """The sink's class and place, without secrets."""
    return str(getattr(sink, "identity", sink.__class__.__qualname__))


def _text(schema: pa.Schema) -> str:
    return base64.b64encode(schema.serialize()).decode("ascii")


def _staging_of(commit_id: str, record: Record) -> Staging:
    mark = mark_of(record) if record.get("messages") is not None else ""
    return Staging(commit_id, record["run"], schema_of(record), mark)


# -- With Spark


class CommitCoordinator(Coordinator):
    """Hears what tasks stage. What they offer is a hint: what is committed is what the action's result names."""

    kind = "commit"

    def __init__(self, context: CoordinatorContext) -> None:
        super().__init__(context)
        self._live: set[int] = set()
        self._offered: set[int] = set()
        self._changed = threading.Condition()

    def ready(self, evaluation: Evaluation, gateway: Gateway) -> None:
        """See `Coordinator`."""
        with self._changed:
            self._live.add(evaluation.id)
        self._report()

    def failed(self, evaluation: Evaluation, reason: str) -> None:
        """See `Coordinator`."""
        self._over(evaluation)

    def finished(self, evaluation: Evaluation) -> None:
        """See `Coordinator`."""
        self._over(evaluation)

    def abandoned(self, evaluation: Evaluation) -> None:
        """See `Coordinator`."""
        self._over(evaluation)

    def handle_event(self, evaluation: Evaluation, event: Any) -> None:
        """A task has staged all of its rows."""
        self._offered.add(evaluation.id)
        self._report()

    def waits_for(self) -> str:
        """See `Coordinator`."""
        number = len(self._live)
        return f"{number} task{'' if number == 1 else 's'} to stage their rows" if number else ""

    def close(self) -> None:
        """See `Coordinator`."""
        with self._changed:
            self._live.clear()
            self._changed.notify_all()

    def quiet(self, seconds: float) -> bool:
        """Waits, in another thread, until nobody stages any more; answers whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._live, seconds)

    def _over(self, evaluation: Evaluation) -> None:
        with self._changed:
            self._live.discard(evaluation.id)
            self._changed.notify_all()
        self._report()

    def _report(self) -> None:
        self.context.report(staging=len(self._live), staged=len(self._offered))


def commit_dataset(
    scope: Scope,
    dataset: DataFrame,
    sink: Committer,
    name: str,
    commit_id: str,
    commit_log: CommitLog,
    patience: float,
    content: str | None = None,
    writer: tuple[str, int] | None = None,
) -> CommitReport:
    """See `Topology.commit`."""
    from pyspark.sql.pandas.types import to_arrow_schema

    from stagecrew.coordination.operator import Operator

    if not hasattr(dataset, "mapInArrow"):
        raise OperatorMisused(f"commit() takes a DataFrame, not {type(dataset).__name__}")
    missing = [
        part for part in ("begin", "stage", "commit", "done", "discard") if not callable(getattr(sink, part, None))
    ]
    if missing:
        raise OperatorMisused(f"{type(sink).__name__} is no Committer: it has no {', '.join(missing)}")
    made: list[CommitCoordinator] = []

    def coordinator(context: CoordinatorContext) -> Coordinator:
        made.append(CommitCoordinator(context))
        return made[-1]

    operator = Operator(scope, name, coordinator, is_transient=True)

    def execute(staging: Staging) -> Sequence[Message]:
        sent = getattr(sink, "in_tasks", lambda: sink)()

        def stage(gateway: TaskGateway, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            from pyspark import TaskContext

            context = TaskContext.get()
            assert context is not None
            message = sent.stage(staging, context.partitionId(), context.taskAttemptId(), batches)
            for _ in batches:  # a sink need not have read all
                pass
            if message is not None:
                gateway.send(context.taskAttemptId())
                yield pa.record_batch({"message": [json.dumps(message)]})

        rows = operator.map(dataset, stage, "message string").collect()
        # Whatever attempts offered: Spark took these.
        return [json.loads(row.message) for row in rows]

    def quiet() -> None:
        if made and not made[-1].quiet(patience):
            _log.warning("commit %r: tasks whose rows are not needed still stage after %g s", commit_id, patience)

    schema = to_arrow_schema(dataset.schema)
    try:
        report = commit(sink, commit_log, commit_id, schema, execute, quiet, content=content, writer=writer)
        if made:
            made[-1].context.report(committed=report.parts)
        return report
    finally:
        operator.end()
