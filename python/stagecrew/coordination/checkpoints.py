"""Checkpoints: the states of a topology's coordinators that belong together, and the cut that each makes."""

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
from stagecrew.errors import CheckpointCorrupt, CheckpointFailed

__all__ = ["NOTHING", "Checkpoint", "Pending", "Taken"]

_FORMAT: Final = 2


#: A coordinator's state, and the subtasks that had begun, a bit for each.
Taken = tuple[bytes | None, int]


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """The states of a topology's coordinators as of one cut.

    `states` is by the use's place in the program: `"budget/1"` for the first use of operator "budget" outside of steps,
    `"step=load/batch=3:budget/1"` for one in a batch, `"budget/name=eu"` for one that was given a name.

    `subtasks` has the subtasks that had begun by then, a bit for each, so that their next evaluations are resets to a restored
    coordinator, too.
    """

    id: int
    states: Mapping[str, bytes | None]
    subtasks: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def of(self, key: str) -> tuple[int, bytes | None, int]:
        """The id, the state and the subtasks that a coordinator is restored with; `NO_CHECKPOINT` when it has no state here."""
        if key not in self.states:
            return NO_CHECKPOINT, None, 0
        return self.id, self.states[key], self.subtasks.get(key, 0)

    def keys_of(self, operator: str) -> list[str]:
        """The keys of an operator's uses, wherever in the program they are."""
        return [key for key in self.states if operator_of(key) == operator]

    def to_bytes(self) -> bytes:
        """As bytes to be stored.

        >>> Checkpoint.from_bytes(Checkpoint(3, {"budget/1": b"left: 7"}).to_bytes()).states
        {'budget/1': b'left: 7'}
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
        """What `to_bytes` made. Raises `CheckpointCorrupt` for anything else, also for one byte that differs."""
        digest, _, body = data.partition(b"\n")
        if hashlib.sha256(body).hexdigest().encode() != digest:
            raise CheckpointCorrupt(
                f"these {len(data)} bytes are no checkpoint, or not as they were written: their digest differs"
            )
        header, _, states = body.partition(b"\n")
        try:
            found = json.loads(header)
            if found["format"] != _FORMAT:
                raise CheckpointCorrupt(
                    f"a checkpoint of format {found['format']}; this stagecrew reads format {_FORMAT}: use the one that wrote it"
                )
            id_, sizes = found["id"], found["states"]
            ends = list(itertools.accumulate(size or 0 for size in sizes.values()))
            if (ends or [0])[-1] != len(states):
                raise ValueError(f"its states have {len(states)} bytes, not {ends[-1:] or 0}")
            return cls(
                id_,
                {
                    key: None if size is None else states[end - size : end]
                    for (key, size), end in zip(sizes.items(), ends, strict=True)
                },
                {key: int(bits, 16) for key, bits in found["subtasks"].items()},
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointCorrupt(f"these bytes are no checkpoint: {error}") from error


#: Of which every coordinator begins anew.
NOTHING: Final = Checkpoint(NO_CHECKPOINT, {})


class Pending:
    """One checkpoint of one coordinator: asked, then cut, then taken; or it failed, and whatever comes later is nothing.

    Taken when what had been sent before the cut is acknowledged, or its evaluation has failed. Usable from any thread.
    """

    def __init__(self, checkpoint_id: int) -> None:
        self.id = checkpoint_id
        #: Done when it is taken, with the state and the subtasks that had begun.
        self.result: Future[Taken] = Future()
        self._lock = threading.Lock()
        self._awaited: set[Future[None]] = set()

    def cut(self, taken: Taken, sent: Iterable[Future[None]]) -> None:
        """The state is there; these were sent before it."""
        itself: Future[None] = Future()  # so that it cannot be done before all others are known
        with self._lock:
            self._awaited = {itself, *sent}
            awaited = tuple(self._awaited)
        for future in awaited:
            future.add_done_callback(lambda done: self._acknowledged(done, taken))
        itself.set_result(None)

    def fail(self, error: BaseException) -> None:
        """It was declined, or given up."""
        with self._lock:
            if not self.result.done():
                self.result.set_exception(error)

    def _acknowledged(self, which: Future[None], taken: Taken) -> None:
        with self._lock:
            self._awaited.discard(which)
            if not self._awaited and not self.result.done():
                self.result.set_result(taken)


def checked(state: object, operator: str) -> bytes | None:
    """What a coordinator gave as its state. Raises `CheckpointFailed` unless it is bytes or None."""
    if state is None or isinstance(state, bytes):
        return state
    raise CheckpointFailed(
        f"the coordinator of operator {operator!r} gave a {type(state).__name__} as its state; checkpoint() answers bytes, a "
        f"Future of bytes, or None"
    )
