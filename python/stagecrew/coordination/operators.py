"""The operators of one topology: their bindings, and what fails, checkpoints, resets and closes them together."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from stagecrew.coordination.binding import Binding, Threads
from stagecrew.coordination.checkpoints import NOTHING, Checkpoint
from stagecrew.coordination.coordinator import Coordinator
from stagecrew.coordination.positions import keyed
from stagecrew.errors import CheckpointFailed, CheckpointTimeout, CoordinatorFailed, OperatorMisused

if TYPE_CHECKING:
    from stagecrew.coordination.context import CoordinatorContext
    from stagecrew.coordination.host import Host
    from stagecrew.coordination.loop import Loop

__all__ = ["Factory", "Operators"]

_log = logging.getLogger("stagecrew")

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

    def __init__(self, scope: Scope, close_timeout: Callable[[], float], threads: Threads | None = None) -> None:
        self._scope, self._close_timeout, self._threads = scope, close_timeout, threads or Threads()
        self.name, self.id = scope.name, scope.id
        self.store: dict[str, Any] = {}
        self.cause: BaseException | None = None
        self._lock = threading.Lock()
        self._host: Host | None = None
        self._names: set[str] = set()
        self._uses: dict[str, int] = {}
        self._bindings: list[Binding] = []
        self._ended: list[Binding] = []
        #: Made before the session ran, by their keys; taken by the binding that comes first.
        self._prepared: dict[str, Binding] = {}
        #: What coordinators begin as of that are made from now on, each once.
        self._restored = NOTHING
        self._closing = self._closed = False
        self._checkpointing = threading.Lock()
        self._last_checkpoint = 0

    # -- Names and bindings

    def name_operator(self, name: str) -> None:
        """Takes a name. Raises `OperatorMisused` when another operator of the topology has it."""
        with self._lock:
            if name in self._names:
                raise OperatorMisused(
                    f"topology {self.name!r} has an operator {name!r} already; use that one, or another name: a checkpoint knows "
                    f"coordinators by the names of their operators"
                )
            self._names.add(name)

    def free_name(self, wanted: str) -> str:
        """Takes this name, or the first of `wanted-2`, `wanted-3`… that nobody has."""
        with self._lock:
            name, number = wanted, 1
            while name in self._names:
                number += 1
                name = f"{wanted}-{number}"
            self._names.add(name)
            return name

    def prepare(self, name: str, factory: Factory, restored: Checkpoint = NOTHING) -> None:
        """Makes the coordinators of an operator before the session runs, restored as of a checkpoint."""
        self.name_operator(name)
        self._last_checkpoint = max(self._last_checkpoint, restored.id)
        for key in restored.keys_of(name) or [f"{name}/1"]:
            self._prepared[key] = self._made(key, name, factory, restored)

    def begin(self, host: Host) -> None:
        """The session runs: those that were prepared start."""
        with self._lock:
            self._host = host
            prepared = list(self._prepared.values())
        for binding in prepared:
            binding.begin()

    def add(self, operator: str, factory: Factory, host: Host) -> str:
        """One more use of an operator: a coordinator for it. Answers the binding's id. Raises `CoordinatorFailed` when one did."""
        self.raise_failure()
        place = keyed(operator)
        with self._lock:
            self._host = host
            self._uses[place] = self._uses.get(place, 0) + 1
            key = f"{place}/{self._uses[place]}"
            # Those that were made before the session ran are taken in their order, wherever they are used.
            mine = [prepared for prepared in self._prepared if prepared.rpartition("/")[0] == operator]
            binding = self._prepared.pop(mine[0]) if mine else None
            if binding is not None:
                self._bindings.append(binding)
        if binding is None:
            binding = self._made(key, operator, factory, self._restored)
            binding.begin()
            with self._lock:
                self._bindings.append(binding)
        host.add(binding)
        if self.cause is not None:  # one failed meanwhile, which removed only those that it knew
            host.remove(binding, self._why(self.cause))
            self.raise_failure()
        return binding.id

    def _made(self, key: str, operator: str, factory: Factory, restored: Checkpoint = NOTHING) -> Binding:
        id_ = f"{self._scope.id}/{key}/{uuid.uuid4().hex[:12]}"
        return Binding(id_, key, operator, factory, self, self._threads, *restored.of(key))

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
        return [*self._bindings, *self._prepared.values()]

    def idle(self) -> None:
        """Sends what waits to be sent."""
        if (host := self._host) is not None:
            host.wire.flush()

    def wait(self, loop: Loop) -> bool:
        """Reads what comes from executors on this coordinator's thread, which has nothing else to do."""
        return (host := self._host) is not None and host.wire.wait(loop)

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
            with self._lock:
                host, bindings = self._host, self._all()
            if host is None:
                return Checkpoint(id_, {})
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
                return Checkpoint(id_, {binding.key: state.result() for binding, state in taken.items()})
            finally:
                for binding in bindings:
                    host.end_checkpoint(binding, id_, complete)

    def reset(self, checkpoint: Checkpoint | None) -> None:
        """See `Topology.reset`."""
        self.raise_failure()
        with self._lock:
            host, bindings = self._host, self._all()
        for binding in bindings:
            assert host is not None
            host.reset(binding, *(checkpoint or NOTHING).of(binding.key), self._close_timeout())

    def restore(self, checkpoint: Checkpoint) -> None:
        """All coordinators begin as of a checkpoint: those that are there are reset, and those that are made from now on."""
        with self._lock:
            self._restored = checkpoint
            self._last_checkpoint = max(self._last_checkpoint, checkpoint.id)
        self.reset(checkpoint)

    def progress(self) -> dict[str, dict[str, Any]]:
        """See `Topology.progress`."""
        with self._lock:
            bindings = self._all() or self._ended
        return {binding.key: dict(binding.instance.context.progress) for binding in bindings}

    def last_statistics(self) -> bytes | None:
        """A frame for the driver's JVM: the last word of coordinators that have closed. None when there were none."""
        with self._lock:
            host, bindings = self._host, self._ended
        return None if host is None else host.last_statistics(bindings)

    def close(self, reason: str) -> None:
        """Closes all coordinators, each bounded; evaluations that still live are told the reason. A second call does nothing."""
        with self._lock:
            bindings, host = self._all(), self._host
            self._closing = True
            self._ended = bindings or self._ended
            self._bindings.clear()
            self._prepared.clear()
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
        with self._lock:
            self._closed = True


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
