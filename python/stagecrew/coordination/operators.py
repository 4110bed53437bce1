"""The operators of one topology: their bindings, and what fails, checkpoints, resets and closes them together."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol

from stagecrew.coordination.binding import Binding
from stagecrew.coordination.checkpoints import NOTHING, Checkpoint, Taken
from stagecrew.coordination.contract import NO_CHECKPOINT, Coordinator
from stagecrew.coordination.instance import Threads
from stagecrew.coordination.program_path import Place, ThreadMark, Uses, this_thread, unused
from stagecrew.errors import CheckpointFailed, CheckpointTimeout, CoordinatorFailed, OperatorMisused

if TYPE_CHECKING:
    from stagecrew.coordination.context import CoordinatorContext
    from stagecrew.coordination.host import Host

__all__ = ["COMMIT", "Factory", "Operators"]

_log = logging.getLogger("stagecrew")

#: The progress of this many uses that have ended is kept.
_ENDED: Final = 100
#: The name of the operator of commits that are given no other.
COMMIT: Final = "commit"

Factory = Callable[["CoordinatorContext"], Coordinator]


class Scope(Protocol):
    """The topology, as its operators see it."""

    name: str
    id: str

    @property
    def is_active(self) -> bool:
        """Whether it takes work."""

    def cancel_failed(self, cause: BaseException) -> None:
        """Begins to cancel what runs of it, because a coordinator failed. It does not wait."""


class Operators:
    """Knows the bindings of a topology, and its coordinators' first failure. Usable from any thread."""

    def __init__(
        self,
        scope: Scope,
        close_timeout: Callable[[], float],
        threads: Threads | None = None,
        uses: Uses | None = None,
    ) -> None:
        self._scope, self._close_timeout, self._threads = scope, close_timeout, threads or Threads()
        self.name, self.id = scope.name, scope.id
        self.store: dict[str, Any] = {}
        self.cause: BaseException | None = None
        self._lock = threading.Lock()
        self._host: Host | None = None
        self._names: set[str] = set()
        self._uses = uses or Uses(Place())
        #: By their keys: those that datasets use, and those that were made before the session ran and wait for their use.
        self._bindings: dict[str, Binding] = {}
        self._prepared: dict[str, Binding] = {}
        #: Those of commits, which end with their commit and have no state.
        self._transient: dict[str, Binding] = {}
        self._transients = 0
        self._ended: list[Binding] = []
        #: The progress of the last uses that ended before the topology.
        self._past_progress: dict[str, dict[str, Any]] = {}
        #: The uses whose coordinators were called since their states were taken, and the states that were.
        self.changed: dict[Binding, None] = {}
        self._states: dict[str, Taken] = {}
        #: Uses whose order differs from run to run, with the thread that made each.
        self._unordered: dict[Binding, tuple[Place, ThreadMark]] = {}
        #: Restored states of uses that the program has not reached: each waits for the use with its key.
        self._unclaimed: dict[str, Taken] = {}
        self._restored_id = NO_CHECKPOINT
        self._closing = self._closed = False
        self._checkpointing = threading.Lock()
        self._last_checkpoint = 0

    # -- Names and bindings

    def begin_in(self, place: Place) -> None:
        """The topology begins in this place of the program, in the calling thread."""
        self._uses = Uses(place)

    def name_operator(self, name: str) -> None:
        """Reserves a name for an operator that the user makes.

        Raises:
            OperatorMisused: another operator of the topology has the name.
        """
        with self._lock:
            if name in self._names or name == COMMIT:
                raise OperatorMisused(
                    f"topology {self.name!r} has an operator {name!r} already; use that one, or another name: a checkpoint knows "
                    f"coordinators by the names of their operators"
                )
            self._names.add(name)

    def prepare(self, name: str, factory: Factory, restored: Checkpoint = NOTHING) -> None:
        """Makes the coordinators of an operator before the session runs: one for each state of the checkpoint, or a fresh one."""
        self.name_operator(name)
        self._last_checkpoint = max(self._last_checkpoint, restored.id)
        for key in restored.keys_of(name) or [unused(name)]:
            self._prepared[key] = self._made(key, name, factory, *restored.of(key))

    def begin(self, host: Host) -> None:
        """The session runs: those that were prepared start."""
        with self._lock:
            self._host = host
            prepared = list(self._prepared.values())
        for binding in prepared:
            binding.begin()

    def add(
        self, operator: str, factory: Factory, host: Host, name: str | None = None, otherwise: str | None = None
    ) -> str:
        """One more use of an operator, here in the program, with a coordinator of its own.

        Args:
            operator: Its name.
            factory: Makes the coordinator.
            host: Serves it.
            name: The name of the use; by default it has its ordinal in this place.
            otherwise: The name of the use where its order differs from run to run.

        Returns:
            The binding's id.

        Raises:
            CoordinatorFailed: A coordinator of the topology has failed.
            OperatorMisused: The use needs a name, or its name was used here.
        """
        self.raise_failure()
        with self._lock:
            self._host = host
            key = self._uses.key(operator, name, otherwise)
            place, is_ordered = self._uses.here()
            binding = self._prepared.pop(key, None)
            if binding is None and key not in self._unclaimed:
                binding = self._prepared.pop(unused(operator), None)
            if binding is not None:
                self._states.pop(binding.key, None)
                binding.key = key
                self._bindings[key] = binding
                binding.touch()
        if binding is None:
            claimed, restored = self._claimable(key, operator)
            binding = self._made(key, operator, factory, *restored)
            binding.begin()
            with self._lock:
                self._unclaimed.pop(claimed, None)
                self._bindings[key] = binding
                binding.touch()  # a checkpoint that was taken meanwhile did not know it
        if not is_ordered:
            with self._lock:
                self._unordered[binding] = place, this_thread()
        return self._served(binding, host)

    def used_beside(self, place: Place) -> str | None:
        """The operator of a use that another thread, which still runs, has made beside this place; None when there is no such use."""
        owners = place.owners
        with self._lock:
            for binding, (where, thread) in tuple(self._unordered.items()):
                if where.ended or not thread.is_alive or self._bindings.get(binding.key) is not binding:
                    del self._unordered[binding]  # nothing comes from it any more
                elif thread not in owners:
                    return binding.operator
        return None

    def add_transient(self, operator: str, factory: Factory, host: Host) -> str:
        """A use without a state, such as that of a commit; from any thread. The caller must `end` it."""
        self.raise_failure()
        with self._lock:
            self._host = host
            self._transients += 1
            key = f"{operator}/{self._transients}" if operator == COMMIT else f"{operator}/{COMMIT}-{self._transients}"
        binding = self._made(key, operator, factory)
        binding.begin()
        with self._lock:
            self._transient[key] = binding
        return self._served(binding, host)

    def forget(self, place: Place) -> None:
        """This place is executed again, or never will be: its uses end, and their states are dropped."""
        with self._lock:
            self._uses.forget(place)
            ended = [self._bindings.pop(key) for key in tuple(self._bindings) if self._uses.is_in(key, place)]
            for states in (self._unclaimed, self._states):
                for key in tuple(states):
                    if self._uses.is_in(key, place):
                        del states[key]
        self._end_early(ended, f"{place!r} has ended, or is executed again")

    def _claimable(self, key: str, operator: str) -> tuple[str, tuple[int, bytes | None, int]]:
        """The restored state for a use: its key; and its checkpoint's id, the state, and the subtasks that had begun."""
        with self._lock:
            for known in (key, unused(operator)):
                if known in self._unclaimed:
                    return known, (self._restored_id, *self._unclaimed[known])
        return key, NOTHING.of(key)

    def _served(self, binding: Binding, host: Host) -> str:
        host.add(binding)
        if self.cause is not None:  # one failed meanwhile, which removed only those that it knew
            host.remove(binding, self._why(self.cause))
            self.raise_failure()
        return binding.id

    def _made(
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

    # -- What a coordinator's instance asks of its owner

    def fail(self, cause: BaseException) -> None:
        """Fails the topology, once: cancels what runs of it. From any thread, until its coordinators have closed."""
        with self._lock:
            first, late = self.cause is None, self._closed
            if first and not late:
                self.cause = cause
            host, bindings, closing = self._host, self._all(), self._closing
        if late:
            _log.warning("a coordinator of topology %r failed after its end", self.name, exc_info=cause)
        if late or not first:
            return
        _log.error("a coordinator of topology %r failed; the topology is cancelled", self.name, exc_info=cause)
        if closing:
            return  # nothing of it runs any more
        # First, so that Spark does not try again those that end by the other: who waits for a coordinator ends at once, and
        # nobody begins with one any more.
        self._scope.cancel_failed(cause)
        if host is not None:
            for binding in bindings:
                host.remove(binding, self._why(cause))

    def _why(self, cause: BaseException) -> str:
        return f"topology {self.name!r} failed: {_short(cause)}"

    def _all(self) -> list[Binding]:
        """With the lock."""
        return [*self._bindings.values(), *self._prepared.values(), *self._transient.values()]

    def idle(self) -> None:
        """Sends what waits to be sent."""
        if (host := self._host) is not None:
            host.wire.flush()

    def raise_failure(self) -> None:
        """Raises `CoordinatorFailed` from the first failure, if there was one."""
        if self.cause is not None:
            raise CoordinatorFailed(
                f"a coordinator of topology {self.name!r} failed: {_short(self.cause)}"
            ) from self.cause

    # -- All together

    def checkpoint(self, checkpoint_id: int | None, timeout: float) -> Checkpoint:
        """See `Topology.checkpoint`."""
        self.raise_failure()
        with self._checkpointing:
            id_ = self._last_checkpoint + 1 if checkpoint_id is None else checkpoint_id
            if id_ <= self._last_checkpoint:
                raise CheckpointFailed(
                    f"checkpoint {id_} of topology {self.name!r} does not come after {self._last_checkpoint}: ids grow"
                )
            self._last_checkpoint = id_
            bindings = self._take_changed()
            with self._lock:
                host = self._host
            if host is None:
                return _checkpoint(id_, self._unclaimed)
            taken = {binding: host.checkpoint(binding, id_) for binding in bindings}
            complete = False
            try:
                late = self._threads.wait(taken.values(), timeout)
                for binding, state in taken.items():
                    if state.done() and (error := state.exception()) is not None:
                        raise CheckpointFailed(
                            f"checkpoint {id_} of topology {self.name!r}: the coordinator of operator {binding.operator!r} gave no "
                            f"state: {_short(error)}"
                        ) from error
                if late:
                    names = ", ".join(repr(binding.operator) for binding, state in taken.items() if state in late)
                    raise CheckpointTimeout(
                        f"checkpoint {id_} of topology {self.name!r}: within {timeout:g} s no state came of {names}"
                    )
                complete = True
                with self._lock:
                    self._states |= {
                        binding.key: state.result() for binding, state in taken.items() if self._has(binding)
                    }
                    return _checkpoint(id_, self._unclaimed | self._states)
            finally:
                if not complete:
                    self.changed |= dict.fromkeys(bindings)
                for binding in bindings:
                    host.end_checkpoint(binding, id_, complete)

    def _take_changed(self) -> list[Binding]:
        """The uses that a checkpoint must ask. Those that are called from now on belong to the next checkpoint, too.

        A use with a live evaluation is one of them: threads of the coordinator's author may send to it, and count their events.
        """
        live = [] if self._host is None else self._host.live_bindings(self)
        with self._lock:
            changed = list(dict.fromkeys([*self.changed, *live]))
            for binding in changed:
                self.changed.pop(binding, None)
            return [binding for binding in changed if self._has(binding)]

    def _has(self, binding: Binding) -> bool:
        """With the lock: whether it is a use with a state."""
        return binding is (self._bindings.get(binding.key) or self._prepared.get(binding.key))

    def reset(self, checkpoint: Checkpoint | None) -> None:
        """See `Topology.reset`. A use that the program reaches later begins with its state of the checkpoint, too."""
        self.raise_failure()
        restored = checkpoint or NOTHING
        with self._lock:
            host, bindings = self._host, self._all()
            known = {binding.key for binding in bindings}
            self._unclaimed = {key: restored.of(key)[1:] for key in restored.states if key not in known}
            self._restored_id = restored.id
            self._last_checkpoint = max(self._last_checkpoint, restored.id)
            if (
                checkpoint is not None
            ):  # one that no dataset uses yet is as it was made, and its state is its first use's
                bindings = [one for one in bindings if one.key in restored.states or one.key not in self._prepared]
            for binding in bindings:
                self._states.pop(binding.key, None)
        for binding in bindings:
            assert host is not None
            id_, state, subtasks = restored.of(binding.key)
            host.reset(binding, id_, state, self._close_timeout(), subtasks)

    def progress(self) -> dict[str, dict[str, Any]]:
        """See `Topology.progress`."""
        with self._lock:
            bindings, past = self._all() or self._ended, dict(self._past_progress)
        return past | {binding.key: binding.instance.progress for binding in bindings}

    def last_statistics(self) -> bytes | None:
        """A frame for the driver's JVM: the last word of coordinators that have closed. None when there were none."""
        with self._lock:
            host, bindings = self._host, self._ended
        return None if host is None else host.last_statistics(self.id, bindings)

    def close(self, reason: str) -> None:
        """Closes all coordinators, each bounded; evaluations that still live are told the reason. A second call does nothing."""
        with self._lock:
            bindings, host = self._all(), self._host
            self._closing = True
            self._ended = bindings or self._ended
            for known in (self._bindings, self._prepared, self._transient):
                known.clear()
        self._end(bindings, host, reason)
        with self._lock:
            self._closed = True

    def end(self, id_: str) -> None:
        """Ends a transient use."""
        with self._lock:
            ended = [self._transient.pop(key) for key, one in tuple(self._transient.items()) if one.id == id_]
        self._end_early(ended, "its use has ended")

    def _end_early(self, bindings: list[Binding], reason: str) -> None:
        with self._lock:
            host = self._host
        self._end(bindings, host, reason)
        with self._lock:
            for binding in bindings:
                self.changed.pop(binding, None)
                self._past_progress[binding.key] = binding.instance.progress
                if len(self._past_progress) > _ENDED:
                    del self._past_progress[next(iter(self._past_progress))]
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
                    "topology %r: the coordinator of operator %r has not closed within %g s",
                    self.name, binding.operator, seconds,
                )  # fmt: skip
            if host is not None:
                host.remove(binding, reason)


def _checkpoint(id_: int, taken: dict[str, Taken]) -> Checkpoint:
    return Checkpoint(
        id_,
        {key: state for key, (state, _) in taken.items()},
        {key: subtasks for key, (_, subtasks) in taken.items() if subtasks},
    )


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
