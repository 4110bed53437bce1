"""Every error that stagecrew raises.

    StagecrewError
    ├── ConfigurationError          a setting or an argument is wrong, or refused
    │   ├── NotActive               the plugin does not run in this SparkContext
    │   ├── UnsupportedSession      Spark Connect: there is no JVM to talk to
    │   ├── UnsupportedSpark        this Spark version is not one that the jar was built for
    │   ├── JarMissing              the jar is not where it should be
    │   ├── EventLogUnreadable      an event log is not there, or cannot be read
    │   └── VersionMismatch         jar and Python package are of different versions
    ├── ListenerError               something is wrong with one listener
    │   ├── ListenerNotPicklable    it cannot travel to the executors
    │   ├── ListenerNotImportable   a name in the configuration cannot be imported there
    │   └── HookTimeout             open or close took longer than allowed
    ├── TopologyError
    │   ├── TopologyClosed          it was used after it closed
    │   └── ResourceNotOpen         `get()` outside the listener's topology
    ├── CoordinationError           between a task and its coordinator
    │   ├── OperatorMisused         an operator or a bound function used where it cannot be
    │   ├── NotInitialised          a coordinator's context used before the session runs
    │   ├── CoordinatorFailed       a coordinator failed, and its topology with it
    │   ├── CheckpointFailed        a checkpoint was declined, or given up
    │   │   └── CheckpointTimeout   a state, or an acknowledgement, came too late
    │   ├── CheckpointCorrupt       bytes that are no checkpoint
    │   ├── SplitsFailed            an enumerator of splits failed
    │   ├── SuperstepsFailed        tasks that compute together have come apart
    │   ├── AlignmentFailed         a source waits for a slower one that stands still
    │   ├── CommitFailed            nothing was committed, and nothing is left of it
    │   │   ├── CommitConflict      another commit is where this one would be
    │   │   └── CommitSuperseded    another driver has taken the commit over
    │   ├── CommitPending           it is decided, and could not be done yet
    │   ├── CommitUnknown           nobody knows whether a record was written
    │   ├── CommitUnreadable        its record has another format, or was damaged: nothing of it is deleted
    │   ├── EventNotPicklable       an event cannot travel
    │   ├── EventTooLarge           it is larger than spark.stagecrew.event.maxSize
    │   ├── EvaluationEnded          the evaluation is over, or was reset
    │   ├── RequestFailed           the coordinator raised
    │   ├── RequestTimeout          it did not answer, or handle what was sent, in time
    │   └── EventTimeout            no event came in time
    ├── RecoveryError               between a driver and what outlives it
    │   ├── RecoveryMisused         an argument that cannot be right
    │   ├── StoreError              between a process and the coordination store
    │   │   ├── StoreConflict       the store is not as the transaction needs it: nothing was done
    │   │   ├── StoreUnavailable    the store cannot be reached: nothing was done
    │   │   ├── StoreRefused        the store does not allow it: nothing was done
    │   │   ├── StoreUnsupported    a store, or its format, that this stagecrew cannot use
    │   │   ├── SessionLost         the session is over, and all that it held
    │   │   └── PossiblyInconsistentError  nobody knows whether it was done: nothing is discarded
    │   ├── LeadershipLost          another leads, or none: nothing was done
    │   ├── HandleError             a state handle
    │   │   ├── HandleExists        there is one of this name
    │   │   ├── HandleMissing       there is none
    │   │   └── HandleLocked        another holds it: it was not removed
    │   ├── StateStorageError       state could not be written or read
    │   │   └── StateCorrupt        it is not as it was written
    │   └── JobError                one job
    │       ├── JobExists           its id is taken by other content
    │       ├── JobUnknown          there is none of this id
    │       ├── JobUnreadable       what is stored of it cannot be read: nothing of it is deleted
    │       ├── JobFailed           it has failed, or was cancelled: there is no value
    │       └── JobStepReused       two steps of one job with one path
    └── ChannelError                the socket between worker and executor
        ├── FrameError              bytes that are no frame
        └── ChannelClosed           the other side is gone

    TaskKilled                      (a BaseException) Spark asked this task to end

Catch `StagecrewError` to catch them all; `TaskKilled` is not among them, as `KeyboardInterrupt` is no `Exception`.
"""

from __future__ import annotations

__all__ = [
    "AlignmentFailed",
    "ChannelClosed",
    "ChannelError",
    "CheckpointCorrupt",
    "CheckpointFailed",
    "CheckpointTimeout",
    "CommitConflict",
    "CommitFailed",
    "CommitPending",
    "CommitSuperseded",
    "CommitUnknown",
    "CommitUnreadable",
    "ConfigurationError",
    "CoordinationError",
    "CoordinatorFailed",
    "EvaluationEnded",
    "EventLogUnreadable",
    "EventNotPicklable",
    "EventTimeout",
    "EventTooLarge",
    "FrameError",
    "HandleError",
    "HandleExists",
    "HandleLocked",
    "HandleMissing",
    "HookTimeout",
    "JarMissing",
    "JobError",
    "JobExists",
    "JobFailed",
    "JobStepReused",
    "JobUnknown",
    "JobUnreadable",
    "LeadershipLost",
    "ListenerError",
    "ListenerNotImportable",
    "ListenerNotPicklable",
    "NotActive",
    "NotInitialised",
    "OperatorMisused",
    "PossiblyInconsistentError",
    "RecoveryError",
    "RecoveryMisused",
    "RequestFailed",
    "RequestTimeout",
    "ResourceNotOpen",
    "SessionLost",
    "SplitsFailed",
    "StagecrewError",
    "StateCorrupt",
    "StateStorageError",
    "StoreConflict",
    "StoreError",
    "StoreRefused",
    "StoreUnavailable",
    "StoreUnsupported",
    "SuperstepsFailed",
    "TaskKilled",
    "TopologyClosed",
    "TopologyError",
    "UnsupportedSession",
    "UnsupportedSpark",
    "VersionMismatch",
]


class StagecrewError(Exception):
    """The root of all errors of this package."""


class ConfigurationError(StagecrewError):
    """A setting or an argument is wrong, or is one that stagecrew refuses. The message names it and the remedy."""


class NotActive(ConfigurationError):
    """The plugin does not run in this SparkContext.

    Spark reads `spark.plugins` only while a SparkContext starts: stop the session and build it again through
    `stagecrew.configure`, or start it by `spark-submit --conf spark.plugins=stagecrew.StagecrewPlugin`.
    """


class UnsupportedSession(ConfigurationError):
    """This is a Spark Connect session. stagecrew needs a classic session, whose driver has a JVM beside it."""


class UnsupportedSpark(ConfigurationError):
    """This Spark is not one that stagecrew's jar was built for. Install a supported PySpark."""


class JarMissing(ConfigurationError):
    """The jar does not travel in this installation. Reinstall the package, or run `make jar` in a checkout."""


class EventLogUnreadable(ConfigurationError):
    """An event log is not there, or Spark cannot read it. Nothing was changed."""


class VersionMismatch(ConfigurationError):
    """The jar that Spark loaded and the Python package are of different versions. Use `stagecrew.jar_path()`."""


class ListenerError(StagecrewError):
    """Something is wrong with one listener; the message names it."""


class ListenerNotPicklable(ListenerError):
    """A listener cannot be pickled. Create what cannot travel in `open`, not in `__init__`."""


class ListenerNotImportable(ListenerError):
    """A name in `spark.stagecrew.listeners` cannot be imported, on the driver or an executor. Ship its module with `--py-files`."""


class HookTimeout(ListenerError, TimeoutError):
    """`open` or `close` of a listener ran longer than its timeout and was interrupted."""


class TopologyError(StagecrewError):
    """A topology was used in a way that its state does not allow."""


class TopologyClosed(TopologyError):
    """A topology was used after it closed. Create a new one: a topology runs once."""


class ResourceNotOpen(TopologyError):
    """`get()` was called where the listener is not open.

    Run the action inside `with crew.topology(..., listeners=[...])`: a lazy dataset that is run after the `with` has
    no open listeners. In a thread of the driver, carry the topology along with `topology.wrap(f)`.
    """


class CoordinationError(StagecrewError):
    """Something is wrong between a task and its coordinator; the message names the operator."""


class OperatorMisused(CoordinationError):
    """An operator outside its topology, or a bound function where it cannot be. The message says what to write."""


class NotInitialised(CoordinationError):
    """A coordinator's context was told to do something before the session runs. Do that in `start` or later."""


class CoordinatorFailed(CoordinationError):
    """A coordinator raised, or called `context.fail`: its topology was cancelled. Its exception is the `__cause__`."""


class CheckpointFailed(CoordinationError):
    """A checkpoint was not taken: a coordinator declined it, gave no state, or was late. Take another."""


class CheckpointTimeout(CheckpointFailed, TimeoutError):
    """A checkpoint was not taken in time: a coordinator was slow, or an executor did not acknowledge an event.

    No coordinator declined. Take another checkpoint. A job whose step ends with this error is not failed: it runs again.
    """


class CheckpointCorrupt(CoordinationError):
    """Bytes that are no checkpoint, or are not as they were written."""


class SplitsFailed(CoordinationError):
    """The enumerator of splits raised, is late, or gave one split twice; or a file of one does not fit its schema.

    The message names it and the remedy.
    """


class SuperstepsFailed(CoordinationError):
    """Tasks that compute together have come apart: one ended or reduced otherwise, is late, or runs without the others."""


class AlignmentFailed(CoordinationError):
    """A source waits in event time for a slower one that stands still, or their event times cannot be compared."""


class CommitFailed(CoordinationError):
    """Nothing of the commit is visible, and nothing that was staged is left. The message says why."""


class CommitConflict(CommitFailed):
    """Another commit is where this one would be, for good. Commit elsewhere, or make room."""


class CommitSuperseded(CommitFailed):
    """Another driver has taken the commit over: that one goes on, this one has changed nothing."""


class CommitPending(CoordinationError):
    """The commit is decided, but could not be done yet: what was staged stays. Commit with the same id again."""


class CommitUnknown(CoordinationError):
    """Nobody knows whether a record of a commit was written: nothing is deleted. Commit with the same id again."""


class CommitUnreadable(CoordinationError):
    """The record of a commit has the format of another version, or is not as stagecrew writes it. Nothing of the commit is deleted."""


class EventNotPicklable(CoordinationError):
    """An event, request or reply cannot be pickled. Send what it is made of."""


class EventTooLarge(CoordinationError):
    """An event, request or reply is larger than `spark.stagecrew.event.maxSize`. Send a reference to where it lies."""


class EvaluationEnded(CoordinationError):
    """The evaluation is over: its attempt ended, its coordinator was reset, or an event to it was lost. Let it propagate."""


class RequestFailed(CoordinationError):
    """The coordinator's `handle_request` raised. Its exception is the `__cause__`, where it can travel."""


class RequestTimeout(CoordinationError, TimeoutError):
    """The coordinator did not answer in time, or did not handle in time what was sent before."""


class EventTimeout(CoordinationError, TimeoutError):
    """No event of the coordinator came in time."""


class RecoveryError(StagecrewError):
    """Something is wrong between a driver and what outlives it; the message names the store, the job or the state."""


class RecoveryMisused(RecoveryError):
    """An argument that cannot be right. The message says what to write."""


class StoreError(RecoveryError):
    """Something is wrong with the coordination store."""


class StoreConflict(StoreError):
    """The store is not as the transaction needs it: nothing was done.

    `index` is the operation that failed, `why` is "exists", "missing", "version", "not empty" or "no parent".
    """

    def __init__(self, message: str, index: int = -1, why: str = "") -> None:
        super().__init__(message)
        self.index, self.why = index, why


class StoreUnavailable(StoreError):
    """The store cannot be reached: nothing was done. Try again later."""


class StoreRefused(StoreError):
    """The store does not allow it, for want of credentials or room: nothing was done."""


class StoreUnsupported(StoreError, ConfigurationError):
    """A store that stagecrew refuses, such as SQLite on a network file system, or one of a newer format."""


class SessionLost(StoreError):
    """The session at the store is over, and with it all that it held. Nothing was done."""


class PossiblyInconsistentError(StoreError):
    """Nobody knows whether a write was done: nothing is discarded. Repeating the write tells."""


class LeadershipLost(RecoveryError):
    """This process does not lead any more: nothing was done, and nothing of its term will be."""


class HandleError(RecoveryError):
    """Something is wrong with a state handle; the message names it."""


class HandleExists(HandleError):
    """There is a handle of this name."""


class HandleMissing(HandleError):
    """There is no handle of this name."""


class HandleLocked(HandleError):
    """Another session holds the handle: it was not removed."""


class StateStorageError(RecoveryError):
    """State could not be written to its storage, or read from it. What is stored was not touched."""


class StateCorrupt(StateStorageError):
    """State is not as it was written: its length or digest differs, or it is gone though its storage is there. It is not deleted."""


class JobError(RecoveryError):
    """Something is wrong with one job; the message names it."""


class JobExists(JobError):
    """The id is taken by a job of other content. Choose another."""


class JobUnknown(JobError):
    """There is no job of this id."""


class JobUnreadable(JobError):
    """What is stored of the job cannot be read. Nothing of it is deleted, and others are not held up."""


class JobFailed(JobError):
    """The job has failed, or was cancelled: it has no value. The message has its error."""


class JobStepReused(JobError):
    """Two steps of one job have one path, or one position of a coordinator's state is used twice. Name them apart."""


class ChannelError(StagecrewError):
    """The channel between a Python process and its executor failed."""


class FrameError(ChannelError):
    """Bytes that are no frame, or a frame that is larger than allowed. The connection is closed."""


class ChannelClosed(ChannelError):
    """The other side of the channel is gone."""


class TaskKilled(BaseException):
    """Spark asked this task to end, and its worker was interrupted.

    Let it propagate: a `BaseException`, so that `except Exception` in a task does not swallow it. A worker that goes
    on is killed after `spark.python.task.killTimeout` and 5 s more.
    """
