"""Writes a state to the storage, and then its handle to the store, in a transaction that is applied at most once."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from stagecrew.errors import (
    ConfigurationError,
    PossiblyInconsistentError,
    StateStorageError,
    StoreConflict,
    StoreError,
    StoreUnavailable,
)
from stagecrew.recovery.retry import NOT_APPLIED, retry_if_none
from stagecrew.recovery.state.generation import GENERATION, Generation, read_generation
from stagecrew.recovery.state.references import encode_reference
from stagecrew.recovery.state.storage import Reference, StateStorage
from stagecrew.recovery.stores.contract import Check, Create, Operation, Replace, Store

__all__ = ["MAX_TRIES", "HandleWriter", "PreparedState"]

_log = logging.getLogger("stagecrew")

_WRITERS: Final = "sweep/writers"
#: How many times one write is tried when a sweep or an unfinished removal interferes.
MAX_TRIES: Final = 20


class PreparedState:
    """A state for one handle. If a session passes it to `add` or `replace` again, it is still written only once.

    Use it to repeat a write whose outcome is unknown. Only one thread may use it at a time. The promise holds within
    one session: a later session can add the state a second time, after others have removed its handle. To prevent
    this, create an entry that nobody deletes in `also`: then the second write fails.
    """

    def __init__(self, data: bytes) -> None:
        if not isinstance(data, bytes | bytearray | memoryview):
            raise ConfigurationError(f"a state must be bytes, not {type(data).__name__}: pickle or encode it first")
        self.data = bytes(data)
        self.token = uuid.uuid4().hex
        self.key: str | None = None
        #: Whether the write was applied.
        self.done = False
        #: Whether an earlier try may have been applied.
        self.unknown = False
        self.generation: Generation | None = None
        self.slot: WriterSlot | None = None
        self.reference: Reference | None = None
        #: The value of the handle that a `replace` replaces.
        self.old: bytes | None = None

    def __repr__(self) -> str:
        return f"PreparedState({len(self.data)} bytes for {self.key})"


@dataclasses.dataclass(frozen=True)
class WriterSlot:
    """An ephemeral entry of this session. A transaction that replaces its `version` is applied at most once.

    Without a slot, this could happen: the response to an `add` is lost, others remove the handle and its state, and the
    repeated `add` creates a reference to the deleted state.
    """

    key: str
    version: int


#: The unused slots of each store, shared by all roots. A store has as many as it had writes at the same time.
_SLOTS: Final[weakref.WeakKeyDictionary[Store, collections.deque[WriterSlot]]] = weakref.WeakKeyDictionary()
_SLOTS_LOCK: Final = threading.Lock()


class HandleWriter:
    """Writes the handles of one root in one session."""

    def __init__(self, store: Store, storage: StateStorage, root: str) -> None:
        self._store, self._storage, self._root = store, storage, root
        with _SLOTS_LOCK:
            self._slots = _SLOTS.setdefault(store, collections.deque())
        self._ready = False

    def transact_once(self, operations: Sequence[Operation], also: Sequence[Operation]) -> None:
        """Applies a transaction once, even if the store repeats it.

        `StoreConflict.index` counts through `operations` and then `also`; -1 is the writer slot.
        """
        slot, token = self._take_slot(), uuid.uuid4().hex
        try:
            self._transact(slot, token, "", [*operations, *also])
        except (StoreConflict, *NOT_APPLIED) as error:
            if not (isinstance(error, StoreConflict) and error.index < 0):
                self._slots.append(slot)
            raise
        self._slots.append(WriterSlot(slot.key, slot.version + 1))

    def write(
        self,
        key: str,
        name: str,
        state: PreparedState,
        change: Callable[[bytes], Sequence[Operation]],
        on_conflict: Callable[[StoreConflict], None],
        also: Sequence[Operation],
    ) -> None:
        """Writes the state, then applies the operations of `change(reference)` and `also` in one transaction.

        If an operation of the change fails, calls `on_conflict`. If this raises nothing, tries the write again.
        """
        if state.key not in (None, key):
            raise ConfigurationError(
                f"the state prepared for {state.key} cannot be written to {key}: prepare another one"
            )
        state.key = key
        if retry_if_none(lambda: self._try_write(key, name, state, change, on_conflict, also), MAX_TRIES):
            return
        busy = StoreUnavailable(
            f"{key} was not written, because sweeps or removals interfered {MAX_TRIES} times: try again later"
        )
        self._discard(state, busy)
        raise busy

    def _try_write(
        self,
        key: str,
        name: str,
        state: PreparedState,
        change: Callable[[bytes], Sequence[Operation]],
        on_conflict: Callable[[StoreConflict], None],
        also: Sequence[Operation],
    ) -> bool | None:
        """Returns true if the state is written, or None if the write must be tried again."""
        if state.done:
            return True
        slot, generation, reference = self._ensure_stored(state, name)
        changes = change(encode_reference(reference, state.token))
        try:
            self._transact(slot, state.token, key, [Check(GENERATION, generation.number), *changes, *also])
        except StoreConflict as error:
            state.unknown = False
            self._handle_conflict(error, slot, state, len(changes), on_conflict)
            return None
        except NOT_APPLIED as error:
            if not state.unknown:
                self._discard(state, error)
            raise
        except BaseException:
            state.unknown = True
            raise
        state.done = True
        self._slots.append(WriterSlot(slot.key, slot.version + 1))
        return True

    def _handle_conflict(
        self,
        error: StoreConflict,
        slot: WriterSlot,
        state: PreparedState,
        change_count: int,
        on_conflict: Callable[[StoreConflict], None],
    ) -> None:
        """Prepares another try. If another try makes no sense, discards the state and raises the final error."""
        index = error.index - 1
        interfered = index < 0  # a sweep, or the slot was deleted with the session of an earlier try
        state.slot = None if error.index < 0 else slot
        try:
            if index >= change_count:
                raise StoreConflict(str(error), index - change_count, error.why) from error
            if not interfered:
                on_conflict(StoreConflict(str(error), index, error.why))
        except BaseException as final:
            self._discard(state, final)
            raise
        if interfered:
            self._discard(state)

    def _ensure_stored(self, state: PreparedState, name: str) -> tuple[WriterSlot, Generation, Reference]:
        """Writes the state to the storage, unless it is already written.

        The generation is read before the state is written. So if a sweep finds the state before a handle refers to it,
        the sweep advances the generation after this read, and the handle's transaction fails.
        """
        if state.slot is None or state.generation is None or state.reference is None:
            if not self._ready:
                with self._unknown_as_unavailable():
                    self._store.ensure(self._root)
                self._ready = True
            state.slot = self._take_slot()
            try:
                state.generation = read_generation(self._store)
                state.reference = self._storage.write(name, state.data, state.generation.folder(self._root))
            except BaseException:
                self._discard(state)
                raise
        return state.slot, state.generation, state.reference

    def _discard(self, state: PreparedState, error: BaseException | None = None) -> None:
        """Deletes a state that no handle refers to, now or later, and returns its slot."""
        slot, reference = state.slot, state.reference
        state.slot = state.generation = state.reference = None
        if slot is not None:
            self._slots.append(slot)
        if reference is None:
            return
        try:
            self._storage.discard(reference)
        except StateStorageError as failure:
            _log.warning("state %s could not be deleted; a sweep will delete it: %s", reference.name, failure)
            if error is not None:
                error.add_note(f"state {reference.name} could not be deleted; a sweep will delete it: {failure}")

    def _take_slot(self) -> WriterSlot:
        try:
            return self._slots.popleft()
        except IndexError:
            key = f"{_WRITERS}/{uuid.uuid4().hex}"
        with self._unknown_as_unavailable():
            self._store.ensure(_WRITERS)
            self._store.transact(Create(key, ephemeral=True))
        return WriterSlot(key, 0)

    @contextlib.contextmanager
    def _unknown_as_unavailable(self) -> Iterator[None]:
        """Raises `StoreUnavailable` for an unknown outcome. Only for steps before the write, which can be repeated."""
        try:
            yield
        except PossiblyInconsistentError as error:
            raise StoreUnavailable(f"nothing was written to {self._root} yet: {error}") from error

    def _transact(self, slot: WriterSlot, token: str, key: str, operations: Sequence[Operation]) -> None:
        """Applies the operations, and replaces the slot. Raises `StoreConflict` only if no try was applied.

        The conflict's index is a position in `operations`, or -1 for the slot.
        """
        try:
            self._store.transact(Replace(slot.key, token.encode(), slot.version), *operations)
        except StoreConflict as error:
            try:
                was_applied = self._was_applied(slot, token, key)
            except StoreError as unreadable:
                raise PossiblyInconsistentError(
                    f"{error}; and it is unknown whether an earlier try was applied, because the store cannot be read "
                    f"({unreadable}): repeat the write"
                ) from error
            if not was_applied:
                raise StoreConflict(str(error), error.index - 1, error.why) from error

    def _was_applied(self, slot: WriterSlot, token: str, key: str) -> bool:
        entry = self._store.read(slot.key)
        if entry is not None:
            return entry.value == token.encode()
        # The slot was deleted with its session, whose requests can no longer be applied.
        written = self._store.read(key) if key else None
        return written is not None and token.encode() in written.value
