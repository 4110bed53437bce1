"""Every error that stagecrew raises.

    StagecrewError
    ├── ConfigurationError          a setting, an argument or the installation is wrong
    │   └── NotActive               the plugin is not running in this SparkContext
    ├── ListenerError               one listener cannot be used, or its hook failed
    │   └── HookTimeout             open or close took too long
    ├── TopologyError               a topology is in the wrong state for the call
    │   └── ResourceNotOpen         get() was called where the listener is not open
    ├── CoordinationError           coordination between a task and its coordinator failed
    │   ├── OperatorMisused         an operator is used in the wrong place, or an argument is wrong
    │   ├── OperatorFailed          splits, supersteps or an alignment cannot continue
    │   ├── CoordinatorFailed       a coordinator failed, and its topology with it
    │   ├── EvaluationEnded         the evaluation of this attempt has ended
    │   ├── EventRejected           an event cannot be pickled, or is too large
    │   ├── RequestFailed           the coordinator raised in handle_request
    │   ├── CoordinationTimeout     a reply or an event did not arrive in time
    │   ├── CheckpointFailed        a checkpoint was not taken
    │   │   └── CheckpointTimeout   a coordinator or an executor was too slow
    │   ├── CommitFailed            nothing was committed, and nothing staged is left
    │   │   ├── CommitConflict      other data is at the target
    │   │   └── CommitSuperseded    another driver has taken over the commit
    │   ├── CommitPending           the commit is decided, but not applied yet
    │   └── CommitUnknown           the outcome of a write to the commit log is unknown
    ├── RecoveryError               a store, stored state or a stored job cannot be used
    │   ├── RecordUnreadable        the record of a job or a commit cannot be read
    │   ├── StoreError              the coordination store failed
    │   │   ├── StoreConflict       the entries differ from those expected: nothing was done
    │   │   ├── StoreUnavailable    the store cannot be reached: nothing was done
    │   │   ├── StoreRefused        the store does not allow the operation: nothing was done
    │   │   ├── StoreUnsupported    this stagecrew cannot use the store or its format
    │   │   ├── SessionLost         the session at the store has ended
    │   │   └── PossiblyInconsistentError  the outcome of a write is unknown
    │   ├── LeadershipLost          this process is not the leader
    │   ├── HandleError             a state handle exists, is missing, or is locked
    │   ├── StateStorageError       state cannot be written or read
    │   │   └── StateCorrupt        stored bytes are not those that were written
    │   └── JobError                the operation does not fit the job
    │       ├── JobExists           another job has this id
    │       ├── JobUnknown          no job has this id
    │       └── JobFailed           the job failed or was cancelled, so it has no value
    └── ChannelError                the connection between a Python process and a JVM failed
        └── ChannelClosed           the other side has closed the connection

    TaskKilled                      a BaseException: Spark has killed this task

`except StagecrewError` catches all of them except `TaskKilled`, which, like `KeyboardInterrupt`, is not an `Exception`.

A write that was not done and a write whose outcome is unknown always raise errors of different classes.
"""

from __future__ import annotations

__all__ = [
    "ChannelClosed",
    "ChannelError",
    "CheckpointFailed",
    "CheckpointTimeout",
    "CommitConflict",
    "CommitFailed",
    "CommitPending",
    "CommitSuperseded",
    "CommitUnknown",
    "ConfigurationError",
    "CoordinationError",
    "CoordinationTimeout",
    "CoordinatorFailed",
    "EvaluationEnded",
    "EventRejected",
    "HandleError",
    "HookTimeout",
    "JobError",
    "JobExists",
    "JobFailed",
    "JobUnknown",
    "LeadershipLost",
    "ListenerError",
    "NotActive",
    "OperatorFailed",
    "OperatorMisused",
    "PossiblyInconsistentError",
    "RecordUnreadable",
    "RecoveryError",
    "RequestFailed",
    "ResourceNotOpen",
    "SessionLost",
    "StagecrewError",
    "StateCorrupt",
    "StateStorageError",
    "StoreConflict",
    "StoreError",
    "StoreRefused",
    "StoreUnavailable",
    "StoreUnsupported",
    "TaskKilled",
    "TopologyError",
]


class StagecrewError(Exception):
    """The base class of all errors of this package."""


class ConfigurationError(StagecrewError):
    """A setting, an argument or the installation is wrong, or stagecrew does not support it.

    Nothing was changed. The message names the setting or argument, and the remedy.
    """


class NotActive(ConfigurationError):
    """The plugin is not running in this SparkContext.

    Spark reads `spark.plugins` only while a SparkContext starts. Stop the session and build it again with
    `stagecrew.configure`, or start it with `spark-submit --conf spark.plugins=stagecrew.StagecrewPlugin`.
    """


class ListenerError(StagecrewError):
    """A listener cannot be used: it cannot be pickled or imported, or its hook failed. The message names the listener.

    Create objects that cannot be pickled in `open`, not in `__init__`. Ship the module of a listener that is named in
    `spark.stagecrew.listeners` with `--py-files`.
    """


class HookTimeout(ListenerError, TimeoutError):
    """The `open` or `close` of a listener ran longer than its timeout and was interrupted."""


class TopologyError(StagecrewError):
    """A topology is not in the state that the call needs.

    A topology can run only once. After it has closed, create a new one.
    """


class ResourceNotOpen(TopologyError):
    """`get()` was called where the listener is not open.

    Run the action inside `with crew.topology(..., listeners=[...])`. A lazy dataset that runs after the `with` has no
    open listeners. Wrap a function that another thread of the driver calls: `topology.wrap(f)`.
    """


class CoordinationError(StagecrewError):
    """Coordination between a task and its coordinator failed. The message names the operator."""


class OperatorMisused(CoordinationError):
    """An operator, a bound function or a coordinator's context was used in the wrong place or with a wrong argument.

    The message says what to write instead.
    """


class OperatorFailed(CoordinationError):
    """An operator cannot continue. The message names the cause and the remedy.

    Splits: the enumerator raised, was too slow or returned a split twice, or a file does not match its schema.
    Supersteps: a task of the group ended, made a different call from the others, was too slow or ran alone.
    Alignment: a source waited too long for a slower source, or their event times cannot be compared.
    """


class CoordinatorFailed(CoordinationError):
    """A coordinator raised an exception, or called `context.fail`. `__cause__` is the exception.

    The coordinator's topology is cancelled. A coordinator of the application fails only the tasks that use it.
    """


class EvaluationEnded(CoordinationError):
    """The evaluation has ended: its attempt ended, its coordinator was reset, or an event to it was lost.

    Do not catch this error in a task.
    """


class EventRejected(CoordinationError):
    """An event, request or reply cannot be sent.

    If it cannot be pickled, send the values that it was created from. If it is larger than
    `spark.stagecrew.event.maxSize`, store it, and send its location.
    """


class RequestFailed(CoordinationError):
    """The coordinator's `handle_request` raised an exception. `__cause__` is the exception, if it can be pickled."""


class CoordinationTimeout(CoordinationError, TimeoutError):
    """The coordinator did not reply, did not handle earlier events, or did not send an event in time."""


class CheckpointFailed(CoordinationError):
    """A checkpoint was not taken: a coordinator declined it, returned an invalid state, or was too slow.

    Take another one.
    """


class CheckpointTimeout(CheckpointFailed, TimeoutError):
    """A checkpoint was not taken in time: a coordinator was slow, or an executor did not acknowledge an event.

    No coordinator declined. Take another checkpoint. A job whose step ends with this error has not failed: it runs
    again.
    """


class CommitFailed(CoordinationError):
    """This call committed nothing, and deleted its staged data. The log names data that could not be deleted.

    The message says why. After a `CommitSuperseded`, rows may become visible, because another driver continues the
    commit.
    """


class CommitConflict(CommitFailed):
    """The sink can never accept these rows: the target has other data, or refuses them. The message says what to do."""


class CommitSuperseded(CommitFailed):
    """Another driver has taken over the commit and continues it. This driver has changed nothing."""


class CommitPending(CoordinationError):
    """The commit is decided, but could not be applied yet. The staged data is kept. Commit again with the same id."""


class CommitUnknown(CoordinationError):
    """The commit log cannot be read, or it is unknown whether a record was written. Nothing was deleted.

    The message says whether to commit again with the same id.
    """


class RecoveryError(StagecrewError):
    """Recovery failed. The message names the store, the job or the state."""


class RecordUnreadable(RecoveryError):
    """The stored record of a job or a commit cannot be read: another version wrote it, or it was changed or damaged.

    Nothing that belongs to the record is deleted. Other jobs and commits continue.
    """


class StoreError(RecoveryError):
    """The coordination store failed."""


class StoreConflict(StoreError):
    """The entries of the store differ from those that the transaction expects. Nothing was done.

    Attributes:
        index: The index of the operation that failed, or -1 if it is unknown.
        why: "exists", "missing", "version", "not empty" or "no parent".
    """

    def __init__(self, message: str, index: int = -1, why: str = "") -> None:
        super().__init__(message)
        self.index, self.why = index, why


class StoreUnavailable(StoreError):
    """The store cannot be reached. Nothing was done. Try again later."""


class StoreRefused(StoreError):
    """The store does not allow the operation, because credentials or space are missing. Nothing was done."""


class StoreUnsupported(StoreError, ConfigurationError):
    """stagecrew cannot use this store or record: for example SQLite on a network file system, or a newer format."""


class SessionLost(StoreError):
    """The session at the store has ended, with everything that it held. Nothing was done."""


class PossiblyInconsistentError(StoreError):
    """It is unknown whether a write was done. Nothing was deleted. Repeat the write to learn its outcome."""


class LeadershipLost(RecoveryError):
    """This process is no longer the leader. Nothing was done, and its term can write nothing from now on."""


class HandleError(RecoveryError):
    """A state handle exists already, is missing, or is locked by another session. Nothing was done."""


class StateStorageError(RecoveryError):
    """State could not be written to its storage or read from it. Stored state was not changed."""


class StateCorrupt(StateStorageError):
    """Stored bytes are not those that were written. They are not deleted.

    Their length or digest differs, or they are missing although their storage is available.
    """


class JobError(RecoveryError):
    """The operation does not fit the job or its step. The message names the job."""


class JobExists(JobError):
    """A job with other content has this id. Use another id."""


class JobUnknown(JobError):
    """No job has this id."""


class JobFailed(JobError):
    """The job failed or was cancelled, so it has no value. The message contains its error."""


class ChannelError(StagecrewError):
    """The channel between a Python process and a JVM failed, or received invalid bytes. The channel is closed."""


class ChannelClosed(ChannelError):
    """The other side has closed the channel."""


class TaskKilled(BaseException):
    """Spark has killed this task, and its worker was interrupted.

    Do not catch it. It is a `BaseException`, so `except Exception` in a task does not catch it. A worker that continues
    is killed after `spark.python.task.killTimeout` plus 5 s.
    """
