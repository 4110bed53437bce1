"""Checkpoints: the states of a topology's coordinators that belong together."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import Final

from stagecrew.coordination.contract import NO_CHECKPOINT
from stagecrew.coordination.program_path import operator_of
from stagecrew.errors import CheckpointFailed, ConfigurationError

__all__ = ["NOTHING", "Checkpoint", "PendingCheckpoint", "TakenState"]

_FORMAT: Final = 3


#: A coordinator's state, and the subtasks that have had an evaluation, one bit each.
TakenState = tuple[bytes | None, int]


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """The states of a topology's coordinators that belong together.

    `Topology.checkpoint` returns one, and `Topology.reset` restores one.

    Args:
        id: The checkpoint's id. Ids increase within a topology.
        states: The state of each use of an operator; None if the coordinator had none. The key is the position of the
            use in the program: `"budget/1"` for the first use of operator "budget" outside of steps,
            `"step=load/batch=3:budget/1"` for a use in a batch, `"budget/name=eu"` for a use that was given a name.
        subtasks: For each use, the subtasks that have had an evaluation, one bit each. When such a subtask is evaluated
            again after a restore, the coordinator's `subtask_reset` is called.

    Examples:
        >>> import stagecrew
        >>> stored = stagecrew.Checkpoint(3, {"budget/1": b"left: 7"}).to_bytes()
        >>> stagecrew.Checkpoint.from_bytes(stored).states
        {'budget/1': b'left: 7'}

    Not promised: that an older version of stagecrew can read the bytes of `to_bytes`.
    """

    id: int
    states: Mapping[str, bytes | None]
    subtasks: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def of(self, key: str) -> tuple[int, bytes | None, int]:
        """Returns the values from which the coordinator of one use is restored.

        Args:
            key: The use's key in `states`.

        Returns:
            The checkpoint's id, the state, and the subtasks; -1, None and 0 if the checkpoint has no such use.
        """
        if key not in self.states:
            return NO_CHECKPOINT, None, 0
        return self.id, self.states[key], self.subtasks.get(key, 0)

    def keys_of(self, operator: str) -> list[str]:
        """Returns the keys of an operator's uses, anywhere in the program.

        Args:
            operator: The operator's name.

        Returns:
            The keys, in the order of `states`.
        """
        return [key for key in self.states if operator_of(key) == operator]

    def to_bytes(self) -> bytes:
        """Serializes the checkpoint, so that it can be stored.

        Returns:
            The bytes, which include a digest.
        """
        header = {
            "format": _FORMAT,
            "id": self.id,
            "states": {key: None if state is None else len(state) for key, state in self.states.items()},
            "subtasks": {key: f"{bits:x}" for key, bits in self.subtasks.items()},
        }
        body = b"".join((json.dumps(header).encode(), b"\n", *filter(None, self.states.values())))
        return hashlib.sha256(body).hexdigest().encode() + b"\n" + body

    @classmethod
    def from_bytes(cls, data: bytes) -> Checkpoint:
        """Reads the bytes that `to_bytes` returned.

        Args:
            data: The bytes.

        Returns:
            The checkpoint.

        Raises:
            ConfigurationError: The bytes are not a checkpoint, were changed after they were written, or have the format
                of another version of stagecrew.
        """
        digest, _, body = data.partition(b"\n")
        if hashlib.sha256(body).hexdigest().encode() != digest:
            raise ConfigurationError(
                f"these {len(data)} bytes are not a checkpoint, or were changed after they were written: their digest "
                f"differs; use another copy"
            )
        header, _, states = body.partition(b"\n")
        try:
            found = json.loads(header)
            if found["format"] != _FORMAT:
                raise ConfigurationError(
                    f"the checkpoint has format {found['format']}, but this version of stagecrew reads format "
                    f"{_FORMAT}; use the version that wrote it"
                )
            id_, sizes = found["id"], found["states"]
            ends = list(itertools.accumulate(size or 0 for size in sizes.values()))
            if (size := ends[-1] if ends else 0) != len(states):
                raise ValueError(f"its states have {len(states)} bytes, not {size}")
            return cls(
                id_,
                {
                    key: None if size is None else states[end - size : end]
                    for (key, size), end in zip(sizes.items(), ends, strict=True)
                },
                {key: int(bits, 16) for key, bits in found["subtasks"].items()},
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigurationError(f"these {len(data)} bytes are not a checkpoint: {error}") from error


#: A checkpoint without states, which resets every coordinator to its beginning.
NOTHING: Final = Checkpoint(NO_CHECKPOINT, {})


class PendingCheckpoint:
    """One checkpoint of one coordinator. It is requested, then cut, and then taken, unless it fails before.

    The checkpoint is taken when, for every event that was sent before the cut, the event is acknowledged or its
    evaluation has ended. After the checkpoint was taken or has failed, calls have no effect. Thread-safe.
    """

    def __init__(self, checkpoint_id: int) -> None:
        self.id = checkpoint_id
        #: Completes when the checkpoint is taken.
        self.result: Future[TakenState] = Future()
        self._lock = threading.Lock()
        self._unacknowledged: set[Future[None]] = set()

    def cut(self, taken: TakenState, sent: Iterable[Future[None]]) -> None:
        """Sets the state, and the futures of the events that were sent before the cut."""
        all_added: Future[None] = Future()  # keeps the set from becoming empty before every callback is added
        with self._lock:
            self._unacknowledged = {all_added, *sent}
            futures = tuple(self._unacknowledged)
        for future in futures:
            future.add_done_callback(lambda done: self._acknowledged(done, taken))
        all_added.set_result(None)

    def fail(self, error: BaseException) -> None:
        """Fails the checkpoint, which was declined or aborted. Has no effect if the checkpoint is taken."""
        with self._lock:
            if not self.result.done():
                self.result.set_exception(error)

    def _acknowledged(self, future: Future[None], taken: TakenState) -> None:
        with self._lock:
            self._unacknowledged.discard(future)
            if not self._unacknowledged and not self.result.done():
                self.result.set_result(taken)


def check_state(state: object, operator: str) -> bytes | None:
    """Returns the state that a coordinator's `checkpoint` returned. Raises `CheckpointFailed` if its type is wrong."""
    if state is None or isinstance(state, bytes):
        return state
    raise CheckpointFailed(
        f"the coordinator of operator {operator!r} returned a {type(state).__name__} as its state; checkpoint() must "
        f"return bytes, a Future of bytes, or None"
    )
