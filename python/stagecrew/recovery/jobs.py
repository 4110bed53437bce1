"""Jobs: what is known of each, how that may change, and how it is kept in a store."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import enum
import functools
import json
import logging
import math
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from stagecrew.errors import (
    CommitUnreadable,
    HandleError,
    HandleExists,
    HandleMissing,
    JobError,
    JobExists,
    JobUnknown,
    JobUnreadable,
    LeadershipLost,
    PossiblyInconsistentError,
    RecoveryMisused,
    StagecrewError,
    StateStorageError,
    StoreConflict,
    StoreUnsupported,
)
from stagecrew.recovery.election import LeaderInfo, leader_of
from stagecrew.recovery.handles import StateHandleStore
from stagecrew.recovery.results import Result
from stagecrew.recovery.specs import JobSpec
from stagecrew.recovery.stores.contract import Check, Create, Delete, Replace, Store, segment, text_of
from stagecrew.recovery.sweep import Report, sweep
from stagecrew.recovery.writes import repeated, retry_until

if TYPE_CHECKING:
    from stagecrew.recovery.storage import StateStorage

__all__ = ["JobRecord", "JobState", "Jobs", "Pruned", "Run", "open_jobs"]

_log = logging.getLogger("stagecrew")

_FORMAT: Final = 1
#: Of a job's id, in characters: the ids of its commits begin with it.
_LONGEST_ID: Final = 100
#: How often a submit or a cancel begins again because another process wrote meanwhile.
_TRIES: Final = 5
#: The entries below a job that are removed with it.
_BELOW: Final = frozenset({"claim", "steps", "commits", "cancel"})


class JobState(enum.StrEnum):
    """Where a job is.

        submitted --> running --(the run itself)--> succeeded | failed
            \\            \\--> ending(outcome) ----> failed | cancelled
             \\-----------------------/

    The last three are terminal: the first one that is written stays. A run that ends without one is lost, not failed: the next
    run takes the job, up to `max_attempts`; then it is ending. `ending` goes forward with what is decided before its outcome.
    """

    SUBMITTED = "submitted"
    RUNNING = "running"
    ENDING = "ending"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_terminal(self) -> bool:
        """Whether the job never runs again."""
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


@dataclasses.dataclass(frozen=True)
class JobRecord:
    """What is known of a job. Times are seconds since 1970, by the clock of who wrote them."""

    digest: str
    max_attempts: int
    submitted: float
    state: JobState = JobState.SUBMITTED
    #: How many runs were started.
    run: int = 0
    #: Of an ending one, what it will be.
    outcome: JobState | None = None
    reason: str = ""
    ended: float | None = None
    #: Of a terminal one: nothing is left of it but this, and its result.
    clean: bool = False

    @property
    def must_recover(self) -> bool:
        """Whether a leader has something to do for it."""
        return not self.clean

    # How it may change. Pure; what cannot be raises `JobError`.

    def started(self) -> JobRecord:
        """One more run begins."""
        self._require("be started", JobState.SUBMITTED, JobState.RUNNING)
        if self.run >= self.max_attempts:
            raise JobError(f"all {self.max_attempts} runs of the job were started")
        return dataclasses.replace(self, state=JobState.RUNNING, run=self.run + 1)

    def ending(self, outcome: JobState, reason: str) -> JobRecord:
        """No run of it goes on; what is decided is finished, and then it is this."""
        self._require("be ended", JobState.SUBMITTED, JobState.RUNNING)
        if outcome not in (JobState.FAILED, JobState.CANCELLED):
            raise JobError(f"a job does not end as {outcome} but by its own run")
        return dataclasses.replace(self, state=JobState.ENDING, outcome=outcome, reason=reason[:2000])

    def finished(self, state: JobState, reason: str, now: float) -> JobRecord:
        """It is terminal."""
        if state is JobState.CANCELLED or self.state is JobState.ENDING:
            self._require(f"be {state}", JobState.ENDING)
            if state is not self.outcome:
                raise JobError(f"the job is ending as {self.outcome}, not as {state}")
        else:
            self._require(f"be {state}", JobState.RUNNING)
        if not state.is_terminal:
            raise JobError(f"{state} is not an end")
        return dataclasses.replace(self, state=state, outcome=None, reason=reason[:2000], ended=now)

    def cleaned(self) -> JobRecord:
        """What it held is gone."""
        self._require("be clean", JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)
        return dataclasses.replace(self, clean=True)

    def _require(self, what: str, *states: JobState) -> None:
        if self.state not in states or self.clean:
            raise JobError(f"a job that is {self.state} cannot {what}")

    def to_bytes(self) -> bytes:
        """As it is stored; no two writes are alike, so that a write knows its own success."""
        return json.dumps({"format": _FORMAT, **dataclasses.asdict(self), "write": uuid.uuid4().hex}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> JobRecord:
        """What `to_bytes` made. Raises `JobUnreadable`, `StoreUnsupported` for a newer format."""
        try:
            found: dict[str, Any] = json.loads(data)
            format_ = found.pop("format")
            if format_ != _FORMAT:
                raise StoreUnsupported(
                    f"its record is of format {format_}; this stagecrew reads {_FORMAT}: use the one that wrote it"
                )
            del found["write"]
            outcome = found.pop("outcome")
            return cls(
                **found | {"state": JobState(found["state"])}, outcome=None if outcome is None else JobState(outcome)
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise JobUnreadable(f"its record cannot be read: {type(error).__name__}: {error}") from error


@dataclasses.dataclass(frozen=True)
class Run:
    """One start of a job: whoever claims it first is its process."""

    job: str
    number: int
    #: The version of the claim that the process has to find.
    claim: int


@dataclasses.dataclass(frozen=True)
class Pruned:
    """One ended job that a prune examined."""

    job: str
    #: Whether this prune removed it.
    removed: bool
    #: Why it stays, where it is old enough.
    reason: str = ""


class Jobs:
    """The jobs of a store. Submit and cancel write unfenced, create-if-absent; so does a prune, which removes clean jobs alone.
    All else is for a fenced store.

    For each job: `jobs/<id>` the record, which stays until the job is pruned, with `claim` (whose version fences its runs), `process` (ephemeral:
    one is alive), `cancel` (it was asked for), `steps` and `commits` below it; and the handles `specs/<id>` and `results/<id>`.

    Two indexes, so that no process reads all jobs ever run:

    * `open/<id>` exists if and only if the job is there and is not clean. A leader reads these alone.
    * `ended/<hour>/<token>-<id>` exists if and only if the job is clean. The hour is that of its end, in UTC. The token is new for each
      job, also for one that has the id of a pruned job: a prune that was paused cannot remove the later job.

    Each entry is created and deleted in the transaction that makes it true or false.
    """

    def __init__(self, store: Store, storage: StateStorage, clock: Callable[[], float] = time.time) -> None:
        self._store, self._storage, self._clock = store, storage, clock
        store.ensure("jobs", "specs", "results", "open", "ended")
        self._specs = StateHandleStore(store, storage, "specs")
        self._results = StateHandleStore(store, storage, "results")

    # -- Who submits

    def submit(self, spec: JobSpec, id_: str | None = None) -> str:
        """Stores a job for whoever leads; answers its id when it is durable.

        An id that is given twice with the same content is the same job, also after its end, until it is pruned. Raises `JobExists` for
        other content; what the store raises: behind `PossiblyInconsistentError`, submit again with the same id.
        """
        job = id_ if id_ is not None else f"{spec.name[: _LONGEST_ID - 13]}-{uuid.uuid4().hex[:12]}"
        if not job or len(job) > _LONGEST_ID:
            raise RecoveryMisused(f"a job's id is a text of 1 to {_LONGEST_ID} characters, not of {len(job)}")
        digests = spec.digests
        tries = 0
        while not self._same(job, digests):
            try:
                self._add(job, spec, digests[0])
                break
            except (HandleExists, StoreConflict):
                # Another process has submitted the job; or it had ended, and was pruned between the two looks.
                tries += 1
                if tries == _TRIES:
                    raise
        return job

    def _add(self, job: str, spec: JobSpec, digest: str) -> None:
        key = key_of(job)
        record = JobRecord(digest, spec.max_attempts, self._clock())
        also = (
            Create(key, record.to_bytes()),
            Create(f"{key}/claim"),
            Create(f"{key}/steps"),
            Create(f"{key}/commits"),
            Create(_open_key(job)),
        )
        state = self._specs.prepare(spec.to_bytes())
        try:
            repeated(functools.partial(self._specs.add, job, state, also))
        except PossiblyInconsistentError as error:
            raise PossiblyInconsistentError(
                f"nobody knows whether job {job!r} is stored: submit it again with this id. {error}"
            ) from error

    def _same(self, job: str, digests: Collection[str]) -> bool:
        """Whether there is this job; raises `JobExists` for one of other content."""
        entry = self._store.read(key_of(job))
        if entry is None:
            return False
        known = self._record(job, entry.value)
        if known.digest not in digests:
            raise JobExists(f"job {job!r} is there with other content, {known.state}: choose another id")
        return True

    def cancel(self, job: str) -> JobState:
        """Asks whoever leads to end a job; answers the state that it was found in. Nothing changes for one that has ended."""
        for _ in range(_TRIES):
            record, _ = self.read(job)
            if record.state.is_terminal:
                return record.state
            try:
                self._store.transact(Create(f"{key_of(job)}/cancel", uuid.uuid4().hex.encode()))
                return record.state
            except StoreConflict as error:
                if error.why == "exists":
                    return record.state
                # It has ended meanwhile, and was pruned: the next read says so.
        raise _unknown(job)

    # -- Who looks

    def read(self, job: str) -> tuple[JobRecord, int]:
        """The record of a job and its version. Raises `JobUnknown`, `JobUnreadable`."""
        entry = self._store.read(key_of(job))
        if entry is None:
            raise _unknown(job)
        return self._record(job, entry.value), entry.version

    def names(self) -> list[str]:
        """The ids of all jobs, also of those that have ended: a list that grows until jobs are pruned."""
        return [text_of(part) for part in self._store.children("jobs")]

    def open_names(self) -> list[str]:
        """The ids of the jobs that are not clean, which a leader tends to. One read, however many jobs have ended."""
        return [text_of(part) for part in self._store.children("open")]

    def all(self) -> tuple[dict[str, tuple[JobRecord, int]], dict[str, StagecrewError]]:
        """The records of all jobs, and beside them the errors of those that cannot be read."""
        found: dict[str, tuple[JobRecord, int]] = {}
        unreadable: dict[str, StagecrewError] = {}
        for job in self.names():
            try:
                found[job] = self.read(job)
            except (JobUnreadable, StoreUnsupported) as error:
                unreadable[job] = error
            except JobUnknown:
                pass  # pruned meanwhile
        return found, unreadable

    def spec(self, job: str) -> JobSpec:
        """What a job runs. Raises `JobUnreadable` when it cannot be read; nothing is deleted."""
        try:
            return JobSpec.from_bytes(self._specs.get(job).data)
        except StagecrewError as error:
            raise JobUnreadable(f"what job {job!r} runs cannot be read: {error}") from error

    def require_readable(self, job: str) -> None:
        """Raises `JobUnreadable` when what a run of the job begins from cannot be read: what it runs, its steps and its commits."""
        from stagecrew.recovery.job_commits import require_readable  # which needs what Spark needs

        self.spec(job)
        for what in ("steps", "commits"):
            handles = self.below(job, what)
            for name in handles.names():
                try:
                    data = handles.get(name).data
                    if what == "commits":
                        require_readable(name, data)
                except HandleMissing:
                    pass  # removed meanwhile
                except (StateStorageError, StoreUnsupported, CommitUnreadable) as error:
                    raise JobUnreadable(
                        f"what job {job!r} has left of {name!r}, of its {what}, cannot be read: {error}. Nothing of the job is deleted; "
                        f"it goes on when that can be read"
                    ) from error

    def result(self, job: str) -> Result | None:
        """How a job has ended; None while it has not. Raises `JobUnknown`, `JobUnreadable`."""
        record, _ = self.read(job)
        if not record.state.is_terminal:
            return None
        try:
            return Result.from_bytes(self._results.get(job).data)
        except StagecrewError as error:
            self.read(job)  # or it was pruned meanwhile
            raise JobUnreadable(
                f"the result of job {job!r}, which has {record.state}, cannot be read: {error}"
            ) from error

    def is_cancel_requested(self, job: str) -> bool:
        """Whether somebody has asked for its end."""
        return self._store.read(f"{key_of(job)}/cancel") is not None

    def process(self, job: str) -> Mapping[str, Any] | None:
        """Who runs it now, as the process said of itself; None when nobody does."""
        entry = self._store.read(f"{key_of(job)}/process")
        return None if entry is None else json.loads(entry.value)

    def leader(self) -> LeaderInfo | None:
        """Who leads; None when nobody does."""
        return leader_of(self._store)

    def claim(self, job: str) -> int:
        """The version that the claim on a job has."""
        entry = self._store.read(f"{key_of(job)}/claim")
        if entry is None:
            raise JobUnreadable(f"job {job!r} has no claim in the store: somebody has changed it by hand")
        return entry.version

    def below(self, job: str, what: str) -> StateHandleStore:
        """The handles that a job keeps as `steps`, or as `commits`."""
        return StateHandleStore(self._store, self._storage, f"{key_of(job)}/{what}")

    def sweep(self, grace: float, clock: Callable[[], float] | None = None) -> Report:
        """Deletes state of jobs that nothing refers to and that is older than `grace` seconds; see `stagecrew.recovery.sweep`."""
        roots = ["specs", "results"]
        for job in self.names():
            roots += [f"{key_of(job)}/steps", f"{key_of(job)}/commits"]
        return sweep(self._store, self._storage, roots, grace, clock)

    def prune(self, older_than: float) -> Iterator[Pruned]:
        """Removes the clean jobs that ended more than `older_than` seconds ago, with their results, the oldest hour first.

        The iterator examines one job at each step, and reads no job that ended later than that hour. So the caller bounds the work.
        A job that is open, or not clean, or cannot be read, stays. A job whose process is still there stays too.

        Safe beside a leader, also unfenced: a leader only reads open jobs, and each job is removed by one transaction, which is done
        only while the job is the same, and clean. A prune that is killed, or loses a reply, leaves each job whole or
        removed; of a removed one the result's bytes may be left, until `sweep` or a new result of that id deletes them.

        A removed id is free: submitting it again runs a new job. Commits of the new job have the ids of the old one's.

        Raises errors of the store but for conflicts, and `StateStorageError` when the storage is away. Repeatable.
        """
        moment = max(0.0, self._clock() - older_than)
        last = _hour(moment)
        for hour in self._store.children("ended"):
            if hour > last:
                return
            for name in self._store.children(f"ended/{hour}"):
                yield self._pruned(text_of(name.partition("-")[2]), f"ended/{hour}/{name}", moment)
            if hour < last:
                with contextlib.suppress(StoreConflict):  # something is left there, or another prune has deleted it
                    self._store.transact(Delete(f"ended/{hour}"))

    def _pruned(self, job: str, entry: str, moment: float) -> Pruned:
        try:
            return Pruned(job, self._prune(job, entry, moment))
        except (JobUnknown, StoreConflict):
            return Pruned(job, False)  # another process has removed it, or writes to it now
        except (JobError, HandleError, StoreUnsupported) as error:
            return Pruned(job, False, str(error))

    def _prune(self, job: str, entry: str, moment: float) -> bool:
        record, _ = self.read(job)
        if not record.clean or record.ended is None or record.ended >= moment:
            return False
        key = key_of(job)
        below = self._store.children(key)
        if others := set(below) - _BELOW:
            raise JobError(
                f"job {job!r} has ended, but has {', '.join(sorted(others))} in the store: it stays until that is gone"
            )
        # Nothing finds the folders of these states when the job is removed, so states that dead writers have left go first.
        swept = sweep(self._store, self._storage, [f"{key}/steps", f"{key}/commits"], 0.0, lambda: math.inf)
        if swept.failed:
            raise JobError(f"states of job {job!r} could not be deleted: {'; '.join(swept.failed.values())}")
        gone = [*(Delete(f"{key}/{name}") for name in below), Delete(key), Delete(entry)]
        try:
            if not self._results.remove(job, gone):
                self._store.transact(*gone)  # somebody has removed its result by hand
        except StateStorageError as error:
            # The handle was marked, and the record deleted with it.
            _log.warning("job %r is removed; its result is left until it is swept: %s", job, error)
        return True

    # -- Who leads

    def start(self, job: str, known: tuple[JobRecord, int], claim: int) -> Run:
        """Begins one more run; every earlier one is fenced by it. Raises `StoreConflict` when one has claimed meanwhile."""
        record, version = known
        started = record.started()
        _, new = self._store.transact(
            Replace(key_of(job), started.to_bytes(), version),
            Replace(f"{key_of(job)}/claim", _unique({"run": started.run}), claim),
        )
        assert new is not None
        return Run(job, started.run, new)

    def end(self, job: str, known: tuple[JobRecord, int], outcome: JobState, reason: str) -> None:
        """Has a job end: no run of it can write any more, but one that finishes what is decided."""
        record, version = known
        claim = self.claim(job)
        self._store.transact(
            Replace(key_of(job), record.ending(outcome, reason).to_bytes(), version),
            Replace(f"{key_of(job)}/claim", _unique({"ending": outcome}), claim),
        )

    def again(self, job: str, number: int) -> Run:
        """A process of an ending one, whose last run has this number, that finishes what is decided."""
        return Run(job, number, self.renew(job, self.claim(job)))

    def clean(self, job: str) -> None:
        """Deletes what a terminal job held, but for its record and its result. Repeatable; raises what could not be done."""
        record, version = self.read(job)
        if record.clean:
            return
        cleaned = record.cleaned()
        for below in ("steps", "commits"):
            self.below(job, below).remove_all()
        self._specs.remove(job)
        hour = f"ended/{_hour(record.ended or 0.0)}"
        self._store.ensure(hour)
        self._store.transact(  # a conflict also where a prune has just deleted the hour, as it was empty: clean again
            Replace(key_of(job), cleaned.to_bytes(), version),
            Delete(_open_key(job)),
            Create(f"{hour}/{uuid.uuid4().hex[:12]}-{segment(job)}"),
        )

    # -- The process of a run

    def take(self, run: Run, who: Mapping[str, Any]) -> int:
        """Claims a run for this process: once. Answers the claim's version, which fences all that it writes from now on.

        Raises `StoreConflict` when another has it, or another run was begun.
        """
        mine = _unique(dict(who) | {"run": run.number})
        key = key_of(run.job)
        version, _ = self._store.transact(
            Replace(f"{key}/claim", mine, run.claim), Create(f"{key}/process", mine, ephemeral=True)
        )
        assert version is not None
        return version

    def renew(self, job: str, claim: int, patience: float = 0.0) -> int:
        """Claims the run once more: what still writes by the claim before changes nothing. Answers the version.

        Waits `patience` seconds for a store that is away or full.
        """
        key, mine = f"{key_of(job)}/claim", _unique({})

        def write() -> int:
            try:
                version = self._store.transact(Replace(key, mine, claim))[0]
                assert version is not None
                return version
            except (StoreConflict, LeadershipLost):
                known = self._store.read(key)
                if known is None or known.value != mine:
                    raise
                return known.version  # it had been done, and its answer was lost

        return retry_until(write, f"job {job!r} is done, and waits for its claim to be renewed", patience)

    def finish(
        self, job: str, known: tuple[JobRecord, int], state: JobState, result: Result, patience: float = 0.0
    ) -> None:
        """Stores how a job ended, and that it has: one transaction. Waits `patience` seconds for storage and store."""
        record, version = known
        finished = record.finished(state, result.reason, self._clock())
        prepared, also = self._results.prepare(result.to_bytes()), (Replace(key_of(job), finished.to_bytes(), version),)
        waits = f"job {job!r} is done, and waits for its result to be stored"
        retry_until(lambda: self._results.add(job, prepared, also), waits, patience)

    def _record(self, job: str, data: bytes) -> JobRecord:
        try:
            return JobRecord.from_bytes(data)
        except JobUnreadable as error:
            raise JobUnreadable(f"job {job!r}: {error}. Nothing of it is deleted; others are not held up") from error


@contextlib.contextmanager
def open_jobs(store: str, state: str) -> Iterator[Jobs]:
    """The jobs that are kept in a store and a state storage, as `stagecrew driver` has them; for submitting and looking.

        with stagecrew.open_jobs("sqlite:///var/lib/stagecrew/jobs.db", "/var/lib/stagecrew/state") as jobs:
            job = jobs.submit(JobSpec.of_function("etl:load", {"day": "2013-01-01"}))

    Raises `RecoveryMisused` for what is no URL of a store, `StoreUnsupported`, `StoreUnavailable`, `StateStorageError`.
    """
    from stagecrew.recovery.storage import StateStorage
    from stagecrew.recovery.stores import open_store

    opened = open_store(store)
    try:
        yield Jobs(opened, StateStorage(state))
    finally:
        opened.close()


def key_of(job: str) -> str:
    """The key of a job's record."""
    return f"jobs/{segment(job)}"


def _open_key(job: str) -> str:
    return f"open/{segment(job)}"


def _hour(seconds: float) -> str:
    """An hour in UTC, as the part of a key: later hours sort after earlier ones.

    >>> _hour(1_800_000_000.0)
    '2027-01-15T08'
    """
    return dt.datetime.fromtimestamp(seconds, dt.UTC).strftime("%Y-%m-%dT%H")


def _unknown(job: str) -> JobUnknown:
    return JobUnknown(f"there is no job {job!r}; `stagecrew jobs` shows those that there are")


def fence_of(job: str, claim: int) -> Check:
    """What every write of a job's process checks."""
    return Check(f"{key_of(job)}/claim", claim)


def _unique(what: Mapping[str, Any]) -> bytes:
    return json.dumps({**what, "write": uuid.uuid4().hex}).encode()
