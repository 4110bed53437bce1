"""The jobs of a store, for clients: submit, read, cancel, prune, sweep."""

from __future__ import annotations

import contextlib
import functools
import json
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from stagecrew.errors import (
    ConfigurationError,
    JobExists,
    JobUnknown,
    PossiblyInconsistentError,
    RecordUnreadable,
    StagecrewError,
    StoreConflict,
    StoreUnsupported,
)
from stagecrew.recovery.jobs.keys import ROOTS, job_key, open_key
from stagecrew.recovery.jobs.pruning import PruneResult, prune
from stagecrew.recovery.jobs.record import JobRecord, JobState
from stagecrew.recovery.jobs.result import Result
from stagecrew.recovery.jobs.spec import JobSpec
from stagecrew.recovery.leadership.fencing import LeaderInfo, leader_of
from stagecrew.recovery.retry import is_transient, retry_if_none, retry_on, retry_until
from stagecrew.recovery.state.handles import HandleExists, StateHandleStore
from stagecrew.recovery.state.sweep import SweepReport, sweep
from stagecrew.recovery.stores.contract import Create, Store, decode_segment

if TYPE_CHECKING:
    from stagecrew.recovery.state.storage import StateStorage

__all__ = ["Jobs", "open_jobs"]

#: The longest id of a job, in characters. The ids of its commits start with it.
_MAX_ID: Final = 100
#: How many times a submit or a cancel is tried while other processes write the same job.
_TRIES: Final = 5


class Jobs:
    """The jobs in a coordination store and a state storage. Open them with `open_jobs`. Any thread can use this.

    Clients need no leadership: a submit and a cancel only create entries, and a prune removes only clean jobs.

    Args:
        store: A session at the coordination store.
        storage: The state storage.
        clock: Returns the time in seconds since 1970.

    Examples:
        >>> import tempfile
        >>> from stagecrew.recovery import JobSpec, open_jobs
        >>> spec = JobSpec.of_function("textwrap:dedent", {"text": "  hello"})
        >>> with tempfile.TemporaryDirectory() as folder, open_jobs(f"sqlite://{folder}/jobs.db", folder) as jobs:
        ...     job = jobs.submit(spec, "nightly")
        ...     jobs.names(), jobs.read(job)[0].state.value, jobs.cancel(job).value
        (['nightly'], 'submitted', 'submitted')
    """

    def __init__(self, store: Store, storage: StateStorage, clock: Callable[[], float] = time.time) -> None:
        self._store, self._storage, self._clock = store, storage, clock
        store.ensure(*ROOTS)
        self._specs = StateHandleStore(store, storage, "specs")
        self._results = StateHandleStore(store, storage, "results")

    # -- Submit and cancel

    def submit(self, spec: JobSpec, id_: str | None = None) -> str:
        """Stores a job durably for the leader, with everything that its runs need.

        A second submit with the same id and the same content refers to the same job, even after it has ended, until it
        is pruned.

        Args:
            spec: What the job runs.
            id_: The id of the job, 1 to 100 characters. By default, a new id.

        Returns:
            The id of the job, which is stored durably when this returns.

        Raises:
            JobExists: A job with this id has different content.
            ConfigurationError: The id is empty or too long.
            PossiblyInconsistentError: It is unknown whether the job was stored. Submit it again with the same id.
            StoreError: The store has refused the job, or is unavailable.
            StateStorageError: The files of the job could not be written.
        """
        job = id_ if id_ is not None else f"{spec.name[: _MAX_ID - 13]}-{uuid.uuid4().hex[:12]}"
        if not job or len(job) > _MAX_ID:
            raise ConfigurationError(
                f"the id of a job must have 1 to {_MAX_ID} characters, and this one has {len(job)}"
            )

        digests = spec.digests

        def try_submit() -> None:
            if not self._exists(job, digests):
                self._add(job, spec, digests[0])

        # Another process may be submitting the same job now, or pruning an ended job with this id.
        retry_on(try_submit, HandleExists, StoreConflict, tries=_TRIES)
        return job

    def _add(self, job: str, spec: JobSpec, digest: str) -> None:
        key = job_key(job)
        record = JobRecord(digest, spec.max_attempts, self._clock())
        also = (
            Create(key, record.to_bytes()),
            Create(f"{key}/claim"),
            Create(f"{key}/steps"),
            Create(f"{key}/commits"),
            Create(open_key(job)),
        )
        state = self._specs.prepare(spec.to_bytes())
        try:
            retry_until(functools.partial(self._specs.add, job, state, also), f"job {job!r} is submitted", 0.0)
        except PossiblyInconsistentError as error:
            raise PossiblyInconsistentError(
                f"it is unknown whether job {job!r} was stored: submit it again with this id. {error}"
            ) from error

    def _exists(self, job: str, digests: Collection[str]) -> bool:
        """Returns whether this job exists. Raises `JobExists` if a job with this id has different content."""
        entry = self._store.read(job_key(job))
        if entry is None:
            return False
        existing = self._decode(job, entry.value)
        if existing.digest not in digests:
            raise JobExists(
                f"job {job!r} already exists with different content (state: {existing.state}): use another id"
            )
        return True

    def cancel(self, job: str) -> JobState:
        """Requests the end of a job. The job is cancelled after its decided commits are finished.

        Args:
            job: The id of the job.

        Returns:
            The state of the job at the time of the request. If it is terminal, the request has no effect.

        Raises:
            JobUnknown: No job has this id.
            RecordUnreadable: The record of the job cannot be read.
            StoreError: The store has refused the request, or is unavailable.
        """

        def try_cancel() -> JobState | None:
            record, _ = self.read(job)
            if record.state.is_terminal:
                return record.state
            try:
                self._store.transact(Create(f"{job_key(job)}/cancel", uuid.uuid4().hex.encode()))
                return record.state
            except StoreConflict as error:
                # With any other reason, the job was pruned in the meantime: read it again.
                return record.state if error.why == "exists" else None

        found = retry_if_none(try_cancel, _TRIES)
        if found is None:
            raise _unknown(job)
        return found

    # -- Reads

    def read(self, job: str) -> tuple[JobRecord, int]:
        """Returns the record of a job and the version of the record.

        Args:
            job: The id of the job.

        Returns:
            The record, and its version in the store.

        Raises:
            JobUnknown: No job has this id.
            RecordUnreadable: The record cannot be read.
            StoreError: The store is unavailable, or the record has another format.
        """
        entry = self._store.read(job_key(job))
        if entry is None:
            raise _unknown(job)
        return self._decode(job, entry.value), entry.version

    def names(self) -> list[str]:
        """Returns the ids of all jobs. The list includes ended jobs and grows until jobs are pruned.

        Returns:
            The ids.

        Raises:
            StoreError: The store is unavailable.
        """
        return [decode_segment(part) for part in self._store.children("jobs")]

    def all(self) -> tuple[dict[str, tuple[JobRecord, int]], dict[str, StagecrewError]]:
        """Returns the records of all jobs, even if some are unreadable.

        Returns:
            The readable records with their versions, by id, and the errors for the unreadable records, by id.

        Raises:
            StoreError: The store is unavailable.
        """
        found: dict[str, tuple[JobRecord, int]] = {}
        unreadable: dict[str, StagecrewError] = {}
        for job in self.names():
            try:
                found[job] = self.read(job)
            except (RecordUnreadable, StoreUnsupported) as error:
                unreadable[job] = error
            except JobUnknown:
                pass  # pruned in the meantime
        return found, unreadable

    def spec(self, job: str, retry_timeout: float = 0.0) -> JobSpec:
        """Returns the specification of a job. The leader deletes the specification after the job has ended.

        Args:
            job: The id of the job.
            retry_timeout: How long to retry while the store or the storage is unavailable, in seconds.

        Returns:
            The specification.

        Raises:
            RecordUnreadable: The specification is damaged or missing. Nothing is deleted.
            StoreError: The store is unavailable.
            StateStorageError: The state storage is unavailable.
        """
        try:
            description = f"job {job!r} waits to read its specification"
            return JobSpec.from_bytes(retry_until(lambda: self._specs.get(job), description, retry_timeout).data)
        except StagecrewError as error:
            if is_transient(error):
                raise
            raise RecordUnreadable(f"the specification of job {job!r} cannot be read: {error}") from error

    def result(self, job: str) -> Result | None:
        """Returns how a job ended.

        Args:
            job: The id of the job.

        Returns:
            The result, or None if the job has not ended.

        Raises:
            JobUnknown: No job has this id.
            RecordUnreadable: The record or the result cannot be read.
            StoreError: The store is unavailable.
        """
        record, _ = self.read(job)
        if not record.state.is_terminal:
            return None
        try:
            return Result.from_bytes(self._results.get(job).data)
        except StagecrewError as error:
            self.read(job)  # raises JobUnknown if it was pruned in the meantime
            raise RecordUnreadable(
                f"the result of job {job!r} (state: {record.state}) cannot be read: {error}"
            ) from error

    def is_cancel_requested(self, job: str) -> bool:
        """Returns whether the end of a job was requested by `cancel`.

        Args:
            job: The id of the job.

        Returns:
            Whether it was requested.

        Raises:
            StoreError: The store is unavailable.
        """
        return self._store.read(f"{job_key(job)}/cancel") is not None

    def process(self, job: str) -> Mapping[str, Any] | None:
        """Returns the process that runs a job.

        Args:
            job: The id of the job.

        Returns:
            `host`, `pid`, `term`, `run` and, if it is known, `ui` of the process, or None if no process runs the job.

        Raises:
            StoreError: The store is unavailable.
        """
        entry = self._store.read(f"{job_key(job)}/process")
        return None if entry is None else json.loads(entry.value)

    def leader(self) -> LeaderInfo | None:
        """Returns the current leader.

        Returns:
            Its term, host and process, or None if no process leads.

        Raises:
            StoreError: The store is unavailable, or the leader runs another version.
        """
        return leader_of(self._store)

    def handles(self, job: str, kind: str) -> StateHandleStore:
        """Returns the state handles of a job.

        Args:
            job: The id of the job.
            kind: `steps` or `commits`.

        Returns:
            The handles.
        """
        return StateHandleStore(self._store, self._storage, f"{job_key(job)}/{kind}")

    # -- Maintenance

    def sweep(self, grace: float, clock: Callable[[], float] | None = None) -> SweepReport:
        """Deletes states of jobs that nothing refers to. They were left by processes that died during a write.

        A state that is or will be referenced is never deleted. This can run at any time.

        Args:
            grace: Only states that are older than this are deleted, in seconds.
            clock: Returns the time in seconds since 1970. By default, the clock of the storage is used.

        Returns:
            How many states were kept and deleted, and what failed.

        Raises:
            ConfigurationError: The grace is negative.
            StoreError: The store is unavailable.
            StateStorageError: The storage is unavailable.
        """
        roots = ["specs", "results"]
        for job in self.names():
            roots += [f"{job_key(job)}/steps", f"{job_key(job)}/commits"]
        return sweep(self._store, self._storage, roots, grace, clock)

    def prune(self, older_than: float) -> Iterator[PruneResult]:
        """Removes the clean jobs that ended longer ago than `older_than`, with their results, the oldest first.

        Each iteration examines one job, so the caller bounds the work. No job that ended in a later hour is read. Jobs
        that are open, not clean, unreadable, or still have a process are kept.

        This is safe while a leader is running: a leader reads only open jobs, and each job is removed by one
        transaction, which is applied only if the job is unchanged and clean. Even if a prune is killed or loses a
        response, each job is either complete or removed. The bytes of a removed job's result can stay in the storage
        until a sweep, or a new result with the same id, deletes them.

        Not promised: that the id of a removed job stays reserved. Submitting it again runs a new job, whose commits
        have the same ids.

        Args:
            older_than: The minimum time since the end of a job, in seconds.

        Yields:
            One result for each examined job.

        Raises:
            StoreError: The store is unavailable.
            StateStorageError: The storage is unavailable.
        """
        return prune(self._store, self._storage, self._results, self.read, max(0.0, self._clock() - older_than))

    def _decode(self, job: str, data: bytes) -> JobRecord:
        try:
            return JobRecord.from_bytes(data)
        except RecordUnreadable as error:
            raise RecordUnreadable(
                f"job {job!r}: {error}. It was not deleted, and other jobs are not affected; restore the store from a "
                "backup"
            ) from error


@contextlib.contextmanager
def open_jobs(store: str, state: str) -> Iterator[Jobs]:
    """Opens the jobs of a store and a state storage. Pass the same addresses as to `stagecrew driver`.

    Args:
        store: The URL of the store, such as `sqlite:///var/lib/stagecrew/jobs.db` or `zookeeper://host:2181/jobs`.
        state: The path or URI of the state storage, such as `/var/lib/stagecrew/state` or `s3://bucket/folder`.

    Yields:
        The jobs. The session at the store is closed at the end of the block.

    Raises:
        ConfigurationError: An address is invalid.
        StoreUnsupported: The store belongs to another program or has another format.
        StoreUnavailable: The store is unavailable.
        StateStorageError: The storage is unavailable.

    Examples:
        >>> import tempfile
        >>> from stagecrew.recovery import JobSpec, open_jobs
        >>> spec = JobSpec.of_function("textwrap:dedent", {"text": "  hello"})
        >>> with tempfile.TemporaryDirectory() as folder, open_jobs(f"sqlite://{folder}/jobs.db", folder) as jobs:
        ...     jobs.submit(spec, "nightly")
        'nightly'
    """
    from stagecrew.recovery.state.storage import StateStorage
    from stagecrew.recovery.stores import open_store

    session = open_store(store)
    try:
        yield Jobs(session, StateStorage(state))
    finally:
        session.close()


def _unknown(job: str) -> JobUnknown:
    return JobUnknown(f"job {job!r} does not exist: `stagecrew jobs` lists the existing jobs")
