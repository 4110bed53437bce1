"""Access to the jobs of a store for the leader and for the processes of runs. All writes are fenced."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from stagecrew.errors import LeadershipLost, RecordUnreadable, StateStorageError, StoreConflict, StoreUnsupported
from stagecrew.recovery.jobs.keys import ended_key, job_key, open_key, unique_value
from stagecrew.recovery.jobs.record import JobRecord, JobState, Run
from stagecrew.recovery.jobs.result import Result
from stagecrew.recovery.jobs.store import Jobs
from stagecrew.recovery.jobs.stored_step import StoredStep, read_checkpoint
from stagecrew.recovery.retry import retry_until
from stagecrew.recovery.state.handles import HandleMissing
from stagecrew.recovery.stores.contract import Check, Create, Delete, Replace, decode_segment

__all__ = ["FencedJobs", "claim_fence"]


def claim_fence(job: str, claim: int) -> Check:
    """Returns the check that fences the transactions of the process that holds this version of a job's claim."""
    return Check(f"{job_key(job)}/claim", claim)


class FencedJobs(Jobs):
    """The jobs of a `FencedStore`, with the writes that only the leader or the process of a run is allowed to do.

    `current` is a job's record and the version of the record, as they were read.
    """

    # -- The leader

    def open_names(self) -> list[str]:
        """Returns the ids of the jobs that are not cleaned up. This takes one read, even if many jobs have ended."""
        return [decode_segment(part) for part in self._store.children("open")]

    def claim_version(self, job: str) -> int:
        """Returns the current version of the claim on a job."""
        entry = self._store.read(f"{job_key(job)}/claim")
        if entry is None:
            raise RecordUnreadable(
                f"job {job!r} has no claim in the store, because the store was changed by hand: restore it from a "
                "backup"
            )
        return entry.version

    def require_readable(self, job: str) -> None:
        """Raises `RecordUnreadable` if a run could not read the job's specification, steps or commits."""
        from stagecrew.recovery.jobs.commit_log import require_readable  # it imports pyarrow

        self.spec(job)
        for kind in ("steps", "commits"):
            handles = self.handles(job, kind)
            for name in handles.names():
                try:
                    data = handles.get(name).data
                    if kind == "commits":
                        require_readable(name, data)
                    else:
                        for checkpoint in StoredStep.from_bytes(data).checkpoints.values():
                            read_checkpoint(checkpoint)
                except HandleMissing:
                    pass  # removed in the meantime
                except (StateStorageError, StoreUnsupported, RecordUnreadable) as error:
                    raise RecordUnreadable(
                        f"{name!r} of the {kind} of job {job!r} cannot be read: {error}. Nothing of the job was "
                        f"deleted. The job continues when its {kind} are readable again"
                    ) from error

    def start_run(self, job: str, current: tuple[JobRecord, int], claim: int) -> Run:
        """Starts another run, and fences all earlier ones.

        Raises `StoreConflict` if the claim has changed since it had version `claim`.
        """
        record, version = current
        started = record.started()
        _, new_claim = self._store.transact(
            Replace(job_key(job), started.to_bytes(), version),
            Replace(f"{job_key(job)}/claim", unique_value({"run": started.run}), claim),
        )
        assert new_claim is not None
        return Run(job, started.run, new_claim)

    def undo_start(self, run: Run, record: JobRecord) -> None:
        """Restores the record from before `start_run`, because no process could be started for the run.

        The claim is renewed, so that a process that was started after all cannot claim the run. Raises `StoreConflict`
        if that process has already claimed it.
        """
        key = job_key(run.job)
        _, version = self.read(run.job)
        self._store.transact(
            Replace(key, record.to_bytes(), version),
            Replace(f"{key}/claim", unique_value({"run": record.run}), run.claim),
        )

    def start_ending(self, job: str, current: tuple[JobRecord, int], outcome: JobState, reason: str) -> None:
        """Records that a job is ending, and fences its runs. Only a run that `start_finishing` returns can write."""
        record, version = current
        claim = self.claim_version(job)
        self._store.transact(
            Replace(job_key(job), record.ending(outcome, reason).to_bytes(), version),
            Replace(f"{job_key(job)}/claim", unique_value({"ending": outcome}), claim),
        )

    def start_finishing(self, job: str, number: int) -> Run:
        """Returns a run that finishes the decided commits of an ending job. It has the number of the last run."""
        return Run(job, number, self.renew_claim(job, self.claim_version(job)))

    def clean_up(self, job: str) -> None:
        """Deletes the specification, steps and commits of a terminal job, and marks its record as clean.

        After an error, the leader can call it again.
        """
        record, version = self.read(job)
        if record.clean:
            return
        cleaned = record.cleaned()
        for kind in ("steps", "commits"):
            self.handles(job, kind).remove_all()
        self._specs.remove(job)
        ended = ended_key(job, record.ended or 0.0)
        self._store.ensure(ended.rpartition("/")[0])
        # This raises `StoreConflict` if a prune has just deleted the empty parent entry. The next pass tries again.
        self._store.transact(Replace(job_key(job), cleaned.to_bytes(), version), Delete(open_key(job)), Create(ended))

    # -- The process of a run

    def claim_run(self, run: Run, owner: Mapping[str, Any]) -> int:
        """Claims a run for this process, which `owner` describes.

        Returns the version of the claim, with which the process must fence all its later writes.

        Raises `StoreConflict` if another process has claimed the run, or another run was started.
        """
        value = unique_value(dict(owner) | {"run": run.number})
        key = job_key(run.job)
        version, _ = self._store.transact(
            Replace(f"{key}/claim", value, run.claim), Create(f"{key}/process", value, ephemeral=True)
        )
        assert version is not None
        return version

    def show_ui(self, run: Run, url: str) -> None:
        """Stores the address of the Spark UI of a run with its process, for `stagecrew submit --wait`."""
        key = f"{job_key(run.job)}/process"
        entry = self._store.read(key)
        if entry is not None:
            process = json.loads(entry.value)
            if process["run"] == run.number and process.get("ui") != url:
                self._store.transact(Replace(key, unique_value(process | {"ui": url}), entry.version))

    def renew_claim(self, job: str, claim: int, retry_timeout: float = 0.0) -> int:
        """Renews the claim of a run, so that writes under the previous claim are refused. Returns the new version.

        Retries for `retry_timeout` seconds while the store is unavailable or full.
        """
        key, value = f"{job_key(job)}/claim", unique_value({})

        def write() -> int:
            try:
                version = self._store.transact(Replace(key, value, claim))[0]
                assert version is not None
                return version
            except (StoreConflict, LeadershipLost):
                entry = self._store.read(key)
                if entry is None or entry.value != value:
                    raise
                return entry.version  # an earlier try was applied, and its response was lost

        return retry_until(write, f"job {job!r} is done and waits to renew its claim", retry_timeout)

    def finish(
        self, job: str, current: tuple[JobRecord, int], state: JobState, result: Result, retry_timeout: float = 0.0
    ) -> None:
        """Stores the result and the terminal state of a job in one transaction.

        Retries for `retry_timeout` seconds while the storage or the store is unavailable or full.
        """
        record, version = current
        finished = record.finished(state, result.reason, self._clock())
        prepared = self._results.prepare(result.to_bytes())
        also = (Replace(job_key(job), finished.to_bytes(), version),)
        retry_until(
            lambda: self._results.add(job, prepared, also),
            f"job {job!r} is done and waits for its result to be stored",
            retry_timeout,
        )
