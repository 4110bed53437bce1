"""The record of a job: its state, and the rules for how the state changes."""

from __future__ import annotations

import dataclasses
import enum
import json
import uuid
from typing import Any, Final

from stagecrew.errors import JobError, RecordUnreadable, StoreUnsupported
from stagecrew.observability.error_summary import error_text

__all__ = ["JobRecord", "JobState", "Run"]

_FORMAT: Final = 3
#: The maximum number of characters stored of a reason.
_MAX_REASON: Final = 2000


class JobState(enum.StrEnum):
    """The state of a job.

    | from | to | when |
    |---|---|---|
    | submitted | running | a leader starts the first run |
    | submitted, running | ending | the job is cancelled, or its last run is lost |
    | running | succeeded, failed | the run writes its result |
    | ending | failed, cancelled | the decided commits are finished |

    `succeeded`, `failed` and `cancelled` are terminal. The first terminal state that is written is final. A run that
    ends without writing a terminal state is lost, not failed: the next run takes over the job, up to `max_attempts`
    runs. After that, the job is ending. An ending job finishes its decided commits before it reaches its outcome.

    Examples:
        >>> from stagecrew.recovery import JobState
        >>> [state.value for state in JobState if state.is_terminal]
        ['succeeded', 'failed', 'cancelled']
    """

    SUBMITTED = "submitted"
    RUNNING = "running"
    ENDING = "ending"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_terminal(self) -> bool:
        """Whether the job has ended, and so never runs again."""
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


@dataclasses.dataclass(frozen=True)
class JobRecord:
    """The stored record of a job. Times are in seconds since 1970, by the clock of the process that wrote them.

    The methods that return a new record are pure. They raise `JobError` for a change that the current state does not
    allow.

    Attributes:
        digest: The digest of the job's content, which differs from that of a job with other content.
        max_attempts: The maximum number of runs.
        submitted: When the job was submitted.
        state: The state of the job.
        run: How many runs were started.
        outcome: The state that an ending job will reach; None for any other job.
        reason: Why the job has ended or is ending; empty for a job that succeeded.
        ended: When the job ended, or None while it is not terminal.
        clean: Whether the job is terminal, and its specification, steps and commits were deleted.

    Examples:
        >>> from stagecrew.recovery import JobRecord
        >>> record = JobRecord(digest="0" * 64, max_attempts=3, submitted=0.0).started()
        >>> record.state.value, record.run
        ('running', 1)
    """

    digest: str
    max_attempts: int
    submitted: float
    state: JobState = JobState.SUBMITTED
    run: int = 0
    outcome: JobState | None = None
    reason: str = ""
    ended: float | None = None
    clean: bool = False

    def started(self) -> JobRecord:
        """Returns the record with one more run.

        Returns:
            The record of the running job.

        Raises:
            JobError: The job is neither submitted nor running, or all its runs were started.
        """
        self._require("start a run", JobState.SUBMITTED, JobState.RUNNING)
        if self.run >= self.max_attempts:
            raise JobError(
                f"all {self.max_attempts} runs of the job were started: submit it with a higher max_attempts"
            )
        return dataclasses.replace(self, state=JobState.RUNNING, run=self.run + 1)

    def ending(self, outcome: JobState, reason: str) -> JobRecord:
        """Returns the record of a job that is ending. Its run must stop; only its decided commits are still finished.

        Args:
            outcome: The state that the job will reach, failed or cancelled.
            reason: Why the job ends, in one line.

        Returns:
            The record of the ending job.

        Raises:
            JobError: The job is neither submitted nor running, or the outcome is neither failed nor cancelled.
        """
        self._require("be ended", JobState.SUBMITTED, JobState.RUNNING)
        if outcome not in (JobState.FAILED, JobState.CANCELLED):
            raise JobError(f"a leader cannot end a job as {outcome}: only its own run can")
        return dataclasses.replace(self, state=JobState.ENDING, outcome=outcome, reason=reason[:_MAX_REASON])

    def finished(self, state: JobState, reason: str, now: float) -> JobRecord:
        """Returns the record of a job that has ended.

        Args:
            state: The terminal state.
            reason: Why the job ended; empty if it succeeded.
            now: The time, in seconds since 1970.

        Returns:
            The record of the terminal job.

        Raises:
            JobError: The job cannot reach this state from its current one.
        """
        if state is JobState.CANCELLED or self.state is JobState.ENDING:
            self._require(f"become {state}", JobState.ENDING)
            if state is not self.outcome:
                raise JobError(f"the job is ending as {self.outcome}, so it cannot become {state}")
        else:
            self._require(f"become {state}", JobState.RUNNING)
        if not state.is_terminal:
            raise JobError(f"{state} is not a terminal state: use succeeded, failed or cancelled")
        return dataclasses.replace(self, state=state, outcome=None, reason=reason[:_MAX_REASON], ended=now)

    def cleaned(self) -> JobRecord:
        """Returns the record of a terminal job whose specification, steps and commits were deleted.

        Returns:
            The record of the clean job.

        Raises:
            JobError: The job is not terminal, or is already clean.
        """
        self._require("be cleaned up", JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)
        return dataclasses.replace(self, clean=True)

    def _require(self, action: str, *states: JobState) -> None:
        if self.state not in states or self.clean:
            raise JobError(f"a job that is {self.state}{' and clean' if self.clean else ''} cannot {action}")

    def to_bytes(self) -> bytes:
        """Encodes the record for the store.

        Every call returns different bytes, so that a writer can recognize its own record.

        Returns:
            The encoded record.
        """
        return json.dumps({"format": _FORMAT, **dataclasses.asdict(self), "write": uuid.uuid4().hex}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> JobRecord:
        """Decodes what `to_bytes` returned.

        Args:
            data: The encoded record.

        Returns:
            The record.

        Raises:
            RecordUnreadable: The bytes are not a record.
            StoreUnsupported: The record has another format.
        """
        try:
            fields: dict[str, Any] = json.loads(data)
            found = fields.pop("format")
            if found != _FORMAT:
                raise StoreUnsupported(
                    f"its record has format {found}, but this version of stagecrew supports only format {_FORMAT}: use "
                    "the version that wrote it"
                )
            del fields["write"]
            outcome = fields.pop("outcome")
            return cls(
                **fields | {"state": JobState(fields["state"])},
                outcome=None if outcome is None else JobState(outcome),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RecordUnreadable(f"its record cannot be read: {error_text(error)}") from error


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a job. The first process that claims the run executes it."""

    job: str
    number: int
    #: The version that the job's claim must have when the process claims the run.
    claim: int
