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

#: Returns whether a streaming query is still running.
QueryCheck = Callable[[], bool]

#: The values that restore a coordinator: the id of the checkpoint, the state, and the subtasks that had evaluations.
Restored = tuple[int, bytes | None, int]


class BindingTable:
    """The bindings of one topology, by key. Only bookkeeping; the lock of `Operators` guards it."""

    def __init__(self, uses: Uses | None = None) -> None:
        self._names: set[str] = set()
        self._uses = uses or Uses(Place())
        #: Bindings that datasets use.
        self.used: dict[str, Binding] = {}
        #: Bindings that were created before the session was running, and have not been used yet.
        self.prepared: dict[str, Binding] = {}
        #: Bindings of commits. They have no state, and end with their commit.
        self.transient: dict[str, Binding] = {}
        self._transient_count = 0
        #: The states that the last checkpoint took.
        self.states: dict[str, TakenState] = {}
        #: Restored states of uses that the program has not reached yet, by the key of the use.
        self.unclaimed: dict[str, TakenState] = {}
        self._restored_id = NO_CHECKPOINT
        #: Bindings whose order differs from run to run, each with the place, the thread and the query that created it.
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
        """Returns the key of a new use, its place, and whether every run creates the uses there in the same order."""
        key = self._uses.key(operator, name, otherwise)
        place, is_ordered = self._uses.here()
        return key, place, is_ordered

    def free_name(self, key: str) -> None:
        """Frees the name in the key of a use that was not created. Has no effect on a key with an ordinal."""
        self._uses.free_name(key)

    def next_transient_key(self, operator: str) -> str:
        """Returns the key of a new transient use."""
        self._transient_count += 1
        count = self._transient_count
        return f"{operator}/{count}" if operator == COMMIT else f"{operator}/{COMMIT}-{count}"

    # -- Bindings

    def all(self) -> list[Binding]:
        """Every binding."""
        return [*self.used.values(), *self.prepared.values(), *self.transient.values()]

    def keeps_state_of(self, binding: Binding) -> bool:
        """Whether checkpoints contain the state of this binding: it is used or prepared, and not transient."""
        return binding is (self.used.get(binding.key) or self.prepared.get(binding.key))

    def use_prepared(self, key: str, operator: str) -> Binding | None:
        """Assigns a prepared binding to the use with this key, and returns it. None if no prepared binding fits."""
        binding = self.prepared.pop(key, None)
        if binding is None and key not in self.unclaimed:
            binding = self.prepared.pop(unused(operator), None)
        if binding is not None:
            self.states.pop(binding.key, None)
            binding.key = key
            self.used[key] = binding
        return binding

    def add_unordered(self, binding: Binding, place: Place, query: QueryCheck | None) -> None:
        """Records that the calling thread (perhaps in a query) created a binding whose order differs between runs."""
        self._unordered[binding] = place, this_thread(), query

    def of_other_threads(self, place: Place) -> list[tuple[Binding, QueryCheck | None]]:
        """The unordered bindings that live threads other than the place's owners created."""
        owners = place.owners
        found = []
        for binding, (begun_in, thread, query) in tuple(self._unordered.items()):
            if begun_in.ended or not thread.is_alive or self.used.get(binding.key) is not binding:
                del self._unordered[binding]  # this method can never return it again
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
        """Removes the transient binding with this id. Returns a list of this binding, or an empty list if not found."""
        return [self.transient.pop(key) for key, binding in tuple(self.transient.items()) if binding.id == id_]

    def discard(self, binding: Binding) -> bool:
        """Removes a binding. Returns whether the table had it."""
        for bindings_by_key in (self.used, self.transient):
            for key in [key for key, one in bindings_by_key.items() if one is binding]:
                del bindings_by_key[key]
                return True
        return False

    def clear(self) -> list[Binding]:
        """Removes every binding, and returns them."""
        bindings = self.all()
        for bindings_by_key in (self.used, self.prepared, self.transient):
            bindings_by_key.clear()
        return bindings

    # -- States

    def claimable(self, key: str, operator: str) -> tuple[str, Restored]:
        """Returns the restored state for the use with this key, and the key under which `unclaimed` has it."""
        for stored_key in (key, unused(operator)):
            if stored_key in self.unclaimed:
                return stored_key, (self._restored_id, *self.unclaimed[stored_key])
        return key, NOTHING.of(key)

    def restore(self, checkpoint: Checkpoint | None) -> list[Binding]:
        """Sets the unclaimed states from a checkpoint. Returns the bindings that must be reset."""
        restored = checkpoint or NOTHING
        bindings = self.all()
        bound = {binding.key for binding in bindings}
        self.unclaimed = {key: restored.of(key)[1:] for key in restored.states if key not in bound}
        self._restored_id = restored.id
        if checkpoint is not None:
            # A prepared binding that is not in the checkpoint stays as it was created: no use has reached it yet.
            bindings = [
                binding for binding in bindings if binding.key in restored.states or binding.key not in self.prepared
            ]
        for binding in bindings:
            self.states.pop(binding.key, None)
        return bindings

    def checkpoint(self, id_: int) -> Checkpoint:
        """Returns a checkpoint of the taken states, and of the restored states that no use has claimed yet."""
        taken = self.unclaimed | self.states
        return Checkpoint(
            id_,
            {key: state for key, (state, _) in taken.items()},
            {key: subtasks for key, (_, subtasks) in taken.items() if subtasks},
        )
