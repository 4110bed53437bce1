"""The uses of a topology's operators: the binding of each key, and the restored states that no use has claimed yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from stagecrew.coordination.checkpoints import NOTHING, Checkpoint, TakenState
from stagecrew.coordination.contract import NO_CHECKPOINT
from stagecrew.coordination.program_path import Place, ThreadMark, Uses, this_thread, unused
from stagecrew.errors import OperatorMisused

if TYPE_CHECKING:
    from stagecrew.coordination.binding import Binding

__all__ = ["COMMIT", "BindingTable", "QueryCheck", "Restored"]

#: The default name of the operator of commits.
COMMIT: Final = "commit"

#: Returns whether a streaming query still runs.
QueryCheck = Callable[[], bool]

#: The values to restore a coordinator: the id of the checkpoint, the state, and the subtasks.
Restored = tuple[int, bytes | None, int]


class BindingTable:
    """The bindings of one topology by their keys. Pure bookkeeping, guarded by the lock of `Operators`."""

    def __init__(self, uses: Uses | None = None) -> None:
        self._names: set[str] = set()
        self._uses = uses or Uses(Place())
        #: Bindings that datasets use.
        self.used: dict[str, Binding] = {}
        #: Bindings that were made before the session ran, and wait for their first use.
        self.prepared: dict[str, Binding] = {}
        #: Bindings of commits. They end with their commit and have no state.
        self.transient: dict[str, Binding] = {}
        self._transient_count = 0
        #: The states that the last checkpoint took.
        self.states: dict[str, TakenState] = {}
        #: Restored states of uses that the program has not reached. Each waits for the use with its key.
        self.unclaimed: dict[str, TakenState] = {}
        self._restored_id = NO_CHECKPOINT
        #: Bindings whose order differs from run to run, with the place, the thread and the query that made each.
        self._unordered: dict[Binding, tuple[Place, ThreadMark, QueryCheck | None]] = {}

    # -- Names and keys

    def begin_in(self, place: Place) -> None:
        """Records the place in the program where the topology begins, on the calling thread."""
        self._uses = Uses(place)

    def reserve(self, name: str, topology: str) -> None:
        """Reserves the name of an operator. Raises `OperatorMisused` if it is taken."""
        if name in self._names or name == COMMIT:
            raise OperatorMisused(
                f"topology {topology!r} already has an operator {name!r}; use that one, or choose another name: a "
                f"checkpoint identifies coordinators by the names of their operators"
            )
        self._names.add(name)

    def next_key(self, operator: str, name: str | None, otherwise: str | None) -> tuple[str, Place, bool]:
        """The key of another use of an operator, its place, and whether every run makes it in the same order."""
        key = self._uses.key(operator, name, otherwise)
        place, is_ordered = self._uses.here()
        return key, place, is_ordered

    def next_transient_key(self, operator: str) -> str:
        """The key of another transient use."""
        self._transient_count += 1
        count = self._transient_count
        return f"{operator}/{count}" if operator == COMMIT else f"{operator}/{COMMIT}-{count}"

    # -- Bindings

    def all(self) -> list[Binding]:
        """Every binding."""
        return [*self.used.values(), *self.prepared.values(), *self.transient.values()]

    def has(self, binding: Binding) -> bool:
        """Whether the binding is one with a state."""
        return binding is (self.used.get(binding.key) or self.prepared.get(binding.key))

    def use_prepared(self, key: str, operator: str) -> Binding | None:
        """Assigns a prepared binding to the use with this key, if there is one that fits."""
        binding = self.prepared.pop(key, None)
        if binding is None and key not in self.unclaimed:
            binding = self.prepared.pop(unused(operator), None)
        if binding is not None:
            self.states.pop(binding.key, None)
            binding.key = key
            self.used[key] = binding
        return binding

    def add_unordered(self, binding: Binding, place: Place, query: QueryCheck | None) -> None:
        """Records that the calling thread created a binding whose order differs from run to run, perhaps in a query."""
        self._unordered[binding] = place, this_thread(), query

    def of_other_threads(self, place: Place) -> list[tuple[Binding, QueryCheck | None]]:
        """The unordered bindings that live threads other than the place's owners created."""
        owners = place.owners
        found = []
        for binding, (begun_in, thread, query) in tuple(self._unordered.items()):
            if begun_in.ended or not thread.is_alive or self.used.get(binding.key) is not binding:
                del self._unordered[binding]  # it can no longer change
            elif thread not in owners:
                found.append((binding, query))
        return found

    def forget_unordered(self, binding: Binding) -> None:
        """Forgets an unordered binding whose query has ended."""
        self._unordered.pop(binding, None)

    def forget(self, place: Place) -> list[Binding]:
        """Removes the uses in a place and their states. Returns their bindings."""
        self._uses.forget(place)
        ended = [self.used.pop(key) for key in tuple(self.used) if self._uses.is_in(key, place)]
        for states in (self.unclaimed, self.states):
            for key in tuple(states):
                if self._uses.is_in(key, place):
                    del states[key]
        return ended

    def end_transient(self, id_: str) -> list[Binding]:
        """Removes the transient binding with this id."""
        return [self.transient.pop(key) for key, binding in tuple(self.transient.items()) if binding.id == id_]

    def clear(self) -> list[Binding]:
        """Removes every binding, and returns them."""
        bindings = self.all()
        for known in (self.used, self.prepared, self.transient):
            known.clear()
        return bindings

    # -- States

    def claimable(self, key: str, operator: str) -> tuple[str, Restored]:
        """The restored state for the use with this key, and the key under which it waits."""
        for known in (key, unused(operator)):
            if known in self.unclaimed:
                return known, (self._restored_id, *self.unclaimed[known])
        return key, NOTHING.of(key)

    def restore(self, checkpoint: Checkpoint | None) -> list[Binding]:
        """Sets the unclaimed states from a checkpoint. Returns the bindings that must be reset."""
        restored = checkpoint or NOTHING
        bindings = self.all()
        known = {binding.key for binding in bindings}
        self.unclaimed = {key: restored.of(key)[1:] for key in restored.states if key not in known}
        self._restored_id = restored.id
        if checkpoint is not None:
            # A prepared binding that is not in the checkpoint stays as it was made: its first use claims a state.
            bindings = [one for one in bindings if one.key in restored.states or one.key not in self.prepared]
        for binding in bindings:
            self.states.pop(binding.key, None)
        return bindings

    def checkpoint(self, id_: int) -> Checkpoint:
        """The checkpoint of all taken states and of those that are not claimed yet."""
        taken = self.unclaimed | self.states
        return Checkpoint(
            id_,
            {key: state for key, (state, _) in taken.items()},
            {key: subtasks for key, (_, subtasks) in taken.items() if subtasks},
        )
