"""Takes the checkpoint of a topology: the states of all its coordinators together."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from stagecrew.errors import CheckpointFailed, CheckpointTimeout
from stagecrew.observability.error_summary import error_text

if TYPE_CHECKING:
    from stagecrew.coordination.binding import Binding
    from stagecrew.coordination.binding_table import BindingTable
    from stagecrew.coordination.checkpoints import Checkpoint
    from stagecrew.coordination.host import Host
    from stagecrew.coordination.threads import Owner, Threads

__all__ = ["TopologyCheckpoints"]


class TopologyCheckpoints:
    """Takes one checkpoint at a time. Asks only coordinators that may have changed since their last checkpoint.

    `lock` guards the table and `changed`, which contains the bindings whose coordinators were called since their states
    were taken.
    """

    def __init__(
        self, owner: Owner, table: BindingTable, changed: dict[Binding, None], lock: threading.Lock, threads: Threads
    ) -> None:
        self._owner, self._table, self._changed, self._lock, self._threads = owner, table, changed, lock, threads
        self._taking = threading.Lock()
        #: The id of the last checkpoint that was begun or restored.
        self.last_id = 0

    def take(self, checkpoint_id: int | None, timeout: float, host: Host | None) -> Checkpoint:
        """See `Topology.checkpoint`. The host is None until the session is running."""
        with self._taking:
            id_ = self.last_id + 1 if checkpoint_id is None else checkpoint_id
            if id_ <= self.last_id:
                raise CheckpointFailed(
                    f"checkpoint {id_} of topology {self._owner.name!r} is not newer than checkpoint {self.last_id}; "
                    f"use a larger id"
                )
            self.last_id = id_
            bindings = self._take_changed(host)
            if host is not None:
                self._take_states(bindings, id_, timeout, host)
            with self._lock:
                return self._table.checkpoint(id_)

    def _take_changed(self, host: Host | None) -> list[Binding]:
        """Returns the bindings whose coordinators must be asked for their state. Clears the set of changed bindings.

        Bindings with a live evaluation are included, because the user's own threads may send events to the evaluation
        and count them in the state.
        """
        live = [] if host is None else host.live_bindings(self._owner)
        with self._lock:
            changed = list(dict.fromkeys([*self._changed, *live]))
            for binding in changed:
                self._changed.pop(binding, None)
            return [binding for binding in changed if self._table.keeps_state_of(binding)]

    def _take_states(self, bindings: list[Binding], id_: int, timeout: float, host: Host) -> None:
        """Stores the states of these bindings in the table. If this raises, the next checkpoint asks for them again."""
        complete = False
        futures = {binding: host.checkpoint(binding, id_) for binding in bindings}
        try:
            late = self._threads.wait(futures.values(), timeout)
            for binding, state in futures.items():
                if state.done() and (error := state.exception()) is not None:
                    raise CheckpointFailed(
                        f"checkpoint {id_} of topology {self._owner.name!r} failed: the coordinator of operator "
                        f"{binding.operator!r} provided no state: {error_text(error)}"
                    ) from error
            if late:
                names = ", ".join(repr(binding.operator) for binding, state in futures.items() if state in late)
                raise CheckpointTimeout(
                    f"checkpoint {id_} of topology {self._owner.name!r} was not complete within {timeout:g} s: no "
                    f"state, or no acknowledgement of earlier events, for the coordinators of {names}; take another "
                    f"checkpoint"
                )
            complete = True
            with self._lock:
                self._table.states |= {
                    binding.key: state.result()
                    for binding, state in futures.items()
                    if self._table.keeps_state_of(binding)
                }
        finally:
            if not complete:
                self._changed |= dict.fromkeys(bindings)
            for binding in bindings:
                host.end_checkpoint(binding, id_, complete)
