"""The operators of one topology. Creates their bindings, and fails, resets and closes them together."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol

from stagecrew.bounded import Bounded
from stagecrew.coordination.binding import Binding
from stagecrew.coordination.binding_table import COMMIT, BindingTable, QueryCheck
from stagecrew.coordination.checkpoints import NOTHING, Checkpoint
from stagecrew.coordination.contract import NO_CHECKPOINT, Coordinator
from stagecrew.coordination.program_path import Place, Uses, unused
from stagecrew.coordination.statistics import cut_to
from stagecrew.coordination.threads import Threads
from stagecrew.coordination.topology_checkpoints import TopologyCheckpoints
from stagecrew.errors import CoordinatorFailed, TopologyError
from stagecrew.observability.error_summary import error_text

if TYPE_CHECKING:
    from stagecrew.coordination.context import CoordinatorContext
    from stagecrew.coordination.host import Host

__all__ = ["COMMIT", "Factory", "Operators"]

_log = logging.getLogger("stagecrew")

#: How many uses that ended before their topology keep their progress.
_MAX_ENDED: Final = 100

#: How long a reset waits for evaluations that are ending, in seconds.
_END_OF_EVALUATIONS: Final = 2.0
#: The maximum length of an error's text for a task. The log and the cause contain the whole text.
_MAX_TEXT: Final = 1000

Factory = Callable[["CoordinatorContext"], Coordinator]


class OperatorsOwner(Protocol):
    """The topology, as its operators see it."""

    name: str
    id: str

    @property
    def is_active(self) -> bool:
        """Whether new work may begin in this scope."""

    def cancel_failed(self, cause: BaseException) -> None:
        """Cancels the topology's jobs because a coordinator failed, without waiting for them."""

    def streaming_query(self) -> QueryCheck | None:
        """Returns a check of whether the streaming query that called this thread is still running; None without one."""


class Operators:
    """Holds the bindings of a topology, and the first failure of their coordinators. Thread-safe."""

    def __init__(
        self,
        scope: OperatorsOwner,
        close_timeout: Callable[[], float],
        threads: Threads | None = None,
        uses: Uses | None = None,
    ) -> None:
        self._scope, self._close_timeout, self._threads = scope, close_timeout, threads or Threads()
        self.name, self.id = scope.name, scope.id
        self.store: dict[str, Any] = {}
        #: The first failure of a coordinator, or None.
        self.cause: BaseException | None = None
        self._lock = threading.Lock()
        self._host: Host | None = None
        self._table = BindingTable(uses)
        #: Bindings whose coordinators were called, or reported something, since their states were taken.
        self.changed: dict[Binding, None] = {}
        self._checkpoints = TopologyCheckpoints(self, self._table, self.changed, self._lock, self._threads)
        #: Bindings that ended with the topology, and the progress of the last uses that ended before it.
        self._ended: list[Binding] = []
        self._past_progress: Bounded[str, dict[str, Any]] = Bounded(_MAX_ENDED)
        self._closing = self._closed = False

    # -- Names and bindings

    def begin_in(self, place: Place) -> None:
        """Records the place in the program where the topology begins, on the calling thread."""
        self._table.begin_in(place)

    def name_operator(self, name: str) -> None:
        """Reserves a name for an operator of the user. Raises `OperatorMisused` if the name is taken."""
        with self._lock:
            self._table.reserve(name, self.name)

    def prepare(self, name: str, factory: Factory, restored: Checkpoint = NOTHING) -> None:
        """Creates the coordinators of an operator before the session is running.

        Creates a coordinator for each state of the operator in the checkpoint. If there is no such state, creates one
        coordinator without a state.
        """
        self.name_operator(name)
        self._checkpoints.last_id = max(self._checkpoints.last_id, restored.id)
        for key in restored.keys_of(name) or [unused(name)]:
            self._table.prepared[key] = self._make(key, name, factory, *restored.of(key))

    def begin(self, host: Host) -> None:
        """Starts the prepared coordinators. Called once the session is running."""
        with self._lock:
            self._host = host
            prepared = list(self._table.prepared.values())
        for binding in prepared:
            binding.begin()

    def add(
        self, operator: str, factory: Factory, host: Host, name: str | None = None, otherwise: str | None = None
    ) -> str:
        """Adds a use of an operator in the current place of the program. The use gets its own coordinator.

        Args:
            operator: The operator's name.
            factory: Creates the coordinator.
            host: The host that serves the coordinator.
            name: The name of the use. The default is its ordinal in this place.
            otherwise: The name of the use if the order of uses in this place differs from run to run.

        Returns:
            The binding's id.

        Raises:
            CoordinatorFailed: A coordinator of the topology has failed.
            OperatorMisused: The use needs a name and has none, or its name is taken.
            TopologyError: The topology ended in another thread.
        """
        self.raise_failure()
        with self._lock:
            self._host = host
            key, place, is_ordered = self._table.next_key(operator, name, otherwise)
            binding = self._table.use_prepared(key, operator)
            if binding is not None:
                binding.mark_changed()
        if binding is None:
            with self._lock:
                claimed, restored = self._table.claimable(key, operator)
            try:
                binding = self._make(key, operator, factory, *restored)
            except BaseException:
                with self._lock:
                    self._table.free_name(key)
                raise
            binding.begin()
            with self._lock:
                self._table.unclaimed.pop(claimed, None)
                self._table.used[key] = binding
                binding.mark_changed()  # a checkpoint that was taken in the meantime did not include it
        if not is_ordered:
            query = self._scope.streaming_query()
            with self._lock:
                self._table.add_unordered(binding, place, query)
        return self._serve(binding, host)

    def add_transient(self, operator: str, factory: Factory, host: Host) -> str:
        """Adds a use without a state, such as that of a commit. Thread-safe. The caller must call `end`."""
        self.raise_failure()
        with self._lock:
            self._host = host
            key = self._table.next_transient_key(operator)
        binding = self._make(key, operator, factory)
        binding.begin()
        with self._lock:
            self._table.transient[key] = binding
        return self._serve(binding, host)

    def used_by_another_thread(self, place: Place) -> str | None:
        """Returns an operator that a live thread, other than the owners of this place, uses in it. Otherwise, None.

        A use in a batch of a streaming query counts only while the query is running, because Spark keeps the Python
        threads of ended queries.
        """
        with self._lock:
            found = self._table.of_other_threads(place)
        for binding, query_runs in found:
            if query_runs is None or query_runs():
                return binding.operator
            with self._lock:
                self._table.forget_unordered(binding)
        return None

    def _serve(self, binding: Binding, host: Host) -> str:
        host.add(binding)
        with self._lock:
            closing = self._closing
            is_missed = closing and self._table.discard(binding)  # `close` had already taken the bindings
        if closing:
            reason = f"topology {self.name!r} has ended"
            if is_missed:
                self._end_early([binding], reason)
            else:
                host.remove(binding, reason)  # `close` may have removed it before it was added
            raise TopologyError(
                f"{reason} in another thread while operator {binding.operator!r} was used; "
                "use operators inside its `with`"
            )
        if self.cause is not None:  # a coordinator failed before this binding was added, so `fail` missed it
            host.remove(binding, self._failure_message())
            self.raise_failure()
        return binding.id

    def _make(
        self,
        key: str,
        operator: str,
        factory: Factory,
        checkpoint_id: int = NO_CHECKPOINT,
        state: bytes | None = None,
        subtasks: int = 0,
    ) -> Binding:
        id_ = f"{self._scope.id}/{key}/{uuid.uuid4().hex[:12]}"
        return Binding(id_, key, operator, factory, self, self._threads, checkpoint_id, state, subtasks)

    # -- Failures and idleness, as `Owner` of the instances

    def fail(self, cause: BaseException) -> None:
        """Fails the topology and cancels its jobs. Only the first call before the end has an effect. Thread-safe."""
        with self._lock:
            first, late = self.cause is None, self._closed
            if first and not late:
                self.cause = cause
            host, bindings, closing = self._host, self._table.all(), self._closing
        if late:
            _log.warning("a coordinator of topology %r failed after the topology ended", self.name, exc_info=cause)
        if late or not first:
            return
        _log.error("a coordinator of topology %r failed; the topology is cancelled", self.name, exc_info=cause)
        if closing:
            return  # no job of the topology is running
        # Cancel the jobs first, so that Spark does not retry the attempts that fail when their bindings are removed.
        # Removing a binding immediately fails its waiting tasks, and prevents new evaluations.
        self._scope.cancel_failed(cause)
        if host is not None:
            for binding in bindings:
                host.remove(binding, self._failure_message())

    def raise_failure(self) -> None:
        """Raises `CoordinatorFailed` if a coordinator has failed."""
        if self.cause is not None:
            raise CoordinatorFailed(
                f"a coordinator of topology {self.name!r} failed: {_short(self.cause)}"
            ) from self.cause

    def _failure_message(self) -> str:
        assert self.cause is not None
        return f"topology {self.name!r} failed: {_short(self.cause)}"

    def idle(self) -> None:
        """Sends the enqueued frames. Called when a coordinator has no more calls to make."""
        if (host := self._host) is not None:
            host.transport.flush()

    # -- Checkpoints and resets

    def checkpoint(self, checkpoint_id: int | None, timeout: float) -> Checkpoint:
        """See `Topology.checkpoint`."""
        self.raise_failure()
        return self._checkpoints.take(checkpoint_id, timeout, self._host)

    def reset(self, checkpoint: Checkpoint | None) -> None:
        """See `Topology.reset`. Uses that the program reaches only later are also restored from the checkpoint."""
        self.raise_failure()
        restored = checkpoint or NOTHING
        with self._lock:
            host = self._host
            bindings = self._table.restore(checkpoint)
            self._checkpoints.last_id = max(self._checkpoints.last_id, restored.id)
        for binding in bindings:
            assert host is not None
            _await_end_of_evaluations(binding)
            id_, state, subtasks = restored.of(binding.key)
            host.reset(binding, id_, state, self._close_timeout(), subtasks)

    # -- Statistics

    def progress(self) -> dict[str, dict[str, Any]]:
        """See `Topology.progress`."""
        with self._lock:
            bindings, past = self._table.all() or self._ended, dict(self._past_progress)
        return past | {binding.key: binding.instance.progress for binding in bindings}

    def last_statistics(self) -> bytes | None:
        """A frame with the final statistics of the closed coordinators, or None if nothing is left to report."""
        with self._lock:
            host, bindings = self._host, self._ended
        return None if host is None else host.last_statistics(self.id, bindings)

    # -- End

    def forget(self, place: Place) -> None:
        """Ends the uses in a place and drops their states. Called when it has ended, or before it is executed again."""
        with self._lock:
            ended = self._table.forget(place)
        self._end_early(ended, f"{place!r} has ended, or is executed again")

    def end(self, id_: str) -> None:
        """Ends a transient use."""
        with self._lock:
            ended = self._table.end_transient(id_)
        self._end_early(ended, "its use has ended")

    def close(self, reason: str) -> None:
        """Closes all coordinators, all within one close timeout, and aborts live evaluations. Idempotent."""
        with self._lock:
            host = self._host
            self._closing = True
            bindings = self._table.clear()
            self._ended = bindings or self._ended
        self._end(bindings, host, reason)
        with self._lock:
            self._closed = True

    def _end_early(self, bindings: list[Binding], reason: str) -> None:
        with self._lock:
            host = self._host
        self._end(bindings, host, reason)
        with self._lock:
            for binding in bindings:
                self.changed.pop(binding, None)
                self._past_progress[binding.key] = binding.instance.progress
        if host is not None:
            for binding in bindings:
                host.ended(binding)

    def _end(self, bindings: list[Binding], host: Host | None, reason: str) -> None:
        seconds = self._close_timeout()
        deadline = time.monotonic() + seconds
        for binding in bindings:
            binding.finish()
        for binding in bindings:
            if not binding.await_closed(max(0.0, deadline - time.monotonic())):
                _log.warning(
                    "topology %r: the coordinator of operator %r did not close within %g s; its thread is left running",
                    self.name, binding.operator, seconds,
                )  # fmt: skip
            if host is not None:
                host.remove(binding, reason)


def _await_end_of_evaluations(binding: Binding) -> None:
    """Waits a moment for live evaluations, if they would make a reset fail the topology.

    After an action, the losing attempts of speculation, or attempts that Spark has abandoned, may still be ending.
    """
    coordinator = binding.instance.coordinator
    if coordinator is not None and coordinator._live_reset_problem:
        deadline = time.monotonic() + _END_OF_EVALUATIONS
        while binding.live and time.monotonic() < deadline:
            time.sleep(0.01)


def _short(error: BaseException) -> str:
    return cut_to(_MAX_TEXT, error_text(error))
