"""Takes the checkpoint of one binding: the coordinator's state, once the events sent before it have arrived."""

from __future__ import annotations

import functools
import threading
from concurrent.futures import Future

from stagecrew.coordination.binding import Binding
from stagecrew.coordination.checkpoints import PendingCheckpoint, TakenState
from stagecrew.coordination.transport import Transport
from stagecrew.errors import CheckpointFailed

__all__ = ["BindingCheckpoints"]


class BindingCheckpoints:
    """Asks coordinators for their states, and holds back events after the cut (the moment the state is taken)."""

    def __init__(self, transport: Transport, lock: threading.Lock) -> None:
        self._transport, self._lock = transport, lock

    def begin(self, binding: Binding, checkpoint_id: int) -> Future[TakenState]:
        """Asks the coordinator for its state.

        Returns a future of the state. It completes when every event that was sent before the cut is in its mailbox, or
        its evaluation has ended. Events that are sent after the cut are held back until the caller calls `end`, which
        it must do in any case.
        """
        with self._lock:
            pending = binding.pending = PendingCheckpoint(checkpoint_id)
            binding.instance.loop.call(binding.instance.checkpoint, pending, functools.partial(self._cut, binding))
        return pending.result

    def _cut(self, binding: Binding, pending: PendingCheckpoint, state: bytes | None) -> None:
        with self._lock:
            if binding.pending is not pending:
                return  # the checkpoint was aborted in the meantime
            binding.holds_events = True
            unacknowledged = [live.gateway.hold() for live in binding.live.values()]
            taken = state, binding.seen
        pending.cut(taken, [future for future in unacknowledged if future is not None])
        self._transport.flush()

    def end(self, binding: Binding, checkpoint_id: int, complete: bool) -> None:
        """Completes or aborts the checkpoint, and sends the events that were held back."""
        with self._lock:
            pending = binding.pending
            if pending is None or pending.id != checkpoint_id:
                return  # a new instance has replaced the coordinator, and was never asked for this checkpoint
            binding.pending, binding.holds_events = None, False
            binding.instance.notify("checkpoint_complete" if complete else "checkpoint_aborted", checkpoint_id)
            gateways = [live.gateway for live in binding.live.values()]
        # This has no effect if the state was taken.
        pending.fail(CheckpointFailed(f"checkpoint {checkpoint_id} was aborted"))
        for gateway in gateways:
            gateway.release()
        self._transport.flush()
