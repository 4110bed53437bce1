"""How a state and its reference are written: the state first, then one transaction, which is done once however often it is asked for."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import logging
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

from stagecrew.errors import (
    CommitPending,
    CommitUnknown,
    LeadershipLost,
    PossiblyInconsistentError,
    RecoveryMisused,
    SessionLost,
    StateCorrupt,
    StateStorageError,
    StoreConflict,
    StoreError,
    StoreRefused,
    StoreUnavailable,
    StoreUnsupported,
)
from stagecrew.files import quoted
from stagecrew.recovery.storage import Reference, StateStorage
from stagecrew.recovery.stores.contract import Check, Create, Operation, Replace, Store

__all__ = [
    "GENERATION",
    "PATIENCE",
    "Generation",
    "Prepared",
    "Writes",
    "generation",
    "packed",
    "passes",
    "pause",
    "repeated",
    "retry_until",
    "unpacked",
]

_log = logging.getLogger("stagecrew")

T = TypeVar("T")

#: Moves with each sweep; its value names the store, so that stores which share a storage leave each other's states alone.
GENERATION: Final = "sweep/generation"
_WRITERS: Final = "sweep/writers"
_FORMAT: Final = 1
#: How often one write begins again as it was swept, or met a half-done removal.
TRIES: Final = 20
#: How often a write is asked for whose outcome nobody knows.
_AGAIN: Final = 3
#: How long what a run has done waits to be stored, in seconds, and how often that is tried.
PATIENCE: Final = 600.0
_PAUSE: Final = 2.0
#: After these, the transaction was not done.
_DEFINITE: Final = (StoreUnavailable, SessionLost, StoreRefused, StoreUnsupported, LeadershipLost, RecoveryMisused)
#: Behind these it is worth trying again.
_PASSING: Final = (
    StateStorageError,
    StoreUnavailable,
    StoreRefused,
    PossiblyInconsistentError,
    CommitPending,
    CommitUnknown,
)


def packed(reference: Reference, token: str) -> bytes:
    """A reference as the value of an entry; the token makes it differ from all others."""
    return json.dumps({"format": _FORMAT, "uuid": token, **dataclasses.asdict(reference)}).encode()


def unpacked(key: str, value: bytes) -> Reference:
    """The inverse. Raises `StateCorrupt`, and `StoreUnsupported` for a newer format."""
    known = _fields(key, value)
    try:
        reference = Reference(known["name"], known["length"], known["sha256"])
    except KeyError as error:
        raise StateCorrupt(f"what is stored at {key} is no reference to a state: {error} is missing") from None
    if [type(field) for field in (reference.name, reference.length, reference.sha256)] != [str, int, str]:
        raise StateCorrupt(f"what is stored at {key} is no reference to a state: {known}")
    return reference


def _fields(key: str, value: bytes) -> dict[str, Any]:
    try:
        known = json.loads(value)
        format_ = known["format"]
    except (ValueError, TypeError, KeyError):
        raise StateCorrupt(f"what is stored at {key} is not what stagecrew writes: {value[:80]!r}") from None
    if format_ != _FORMAT:
        raise StoreUnsupported(
            f"what is stored at {key} has format {format_!r}, this stagecrew reads {_FORMAT}: use the stagecrew that wrote it"
        )
    return dict(known)


@dataclasses.dataclass(frozen=True)
class Generation:
    """Which sweep was the last. `store` names the store."""

    number: int
    store: str

    def folder(self, root: str) -> str:
        """Where the states of a root lie."""
        return f"{self.store}/{quoted(root)}"


def generation(store: Store) -> Generation:
    """As it is now; the first who asks makes it."""
    entry = store.read(GENERATION)
    if entry is None:
        with contextlib.suppress(StoreConflict, PossiblyInconsistentError):
            store.ensure("sweep")
            store.transact(Create(GENERATION, moved(uuid.uuid4().hex)))
        entry = store.read(GENERATION)
        if entry is None:
            raise StoreUnavailable(f"{GENERATION} could not be made: nothing was done yet")
    name = _fields(GENERATION, entry.value).get("store")
    if not isinstance(name, str):
        raise StateCorrupt(f"what is stored at {GENERATION} is not what stagecrew writes: {entry.value[:80]!r}")
    return Generation(entry.version, name)


def moved(store: str) -> bytes:
    """The next value of the generation."""
    return json.dumps({"format": _FORMAT, "store": store, "uuid": uuid.uuid4().hex}).encode()


def repeated(write: Callable[[], Any]) -> Any:
    """Does a write of something prepared, and again where nobody knows whether it was done: it is done once. Raises what is left.

    Once nobody knows, only the store's word about this very write ends that: that a later try was not done says nothing about the
    first. So `PossiblyInconsistentError` is what is raised then, whatever the last try met.
    """
    return retry_until(write, "", 0.0)


def retry_until(write: Callable[[], T], waits: str, seconds: float) -> T:
    """`repeated`, and again while storage or store are away or full, for so long; `waits` says in the log what waits for what."""
    due = time.monotonic() + seconds
    unknown: PossiblyInconsistentError | None = None
    at_once = _AGAIN
    while True:
        at_once -= 1
        last: Exception
        try:
            return write()
        except PossiblyInconsistentError as error:
            last = unknown = error
            if at_once:
                continue
        except (StateStorageError, *_DEFINITE) as error:
            last = error
        if not passes(last) or time.monotonic() >= due:
            if unknown is None or last is unknown:
                raise last
            raise PossiblyInconsistentError(f"{unknown}; then: {last}") from last
        # Nothing was written; or nobody knows, and then the same write again is done once.
        _log.warning("%s: %s", waits, last)
        pause()
        at_once = _AGAIN


def passes(error: Exception) -> bool:
    """Whether it is worth trying again, in the same run: what it needs is away or full, or nobody knows. What is corrupt stays so."""
    corrupt = isinstance(error, StateCorrupt) or isinstance(error.__cause__, StateCorrupt)
    return isinstance(error, _PASSING) and not corrupt


def pause() -> None:
    """Between two tries."""
    time.sleep(_PAUSE)


class Prepared:
    """A state on its way to a handle: the same one, given to `add` or `replace` again by the same session, is done once.

    For who has to repeat a write whose outcome nobody knows. For one handle; from one thread at a time. When that session is
    over, another may add it again if it was added, and removed by others, before: what must not come back needs an entry of
    its own in `also`.
    """

    def __init__(self, data: bytes) -> None:
        if not isinstance(data, bytes | bytearray | memoryview):
            raise RecoveryMisused(f"a state is bytes, not {type(data).__name__}: pickle it, or encode it")
        self.data = bytes(data)
        self.token = uuid.uuid4().hex
        self.key: str | None = None
        self.done = False
        #: Whether an earlier attempt may have been done.
        self.unknown = False
        self.generation: Generation | None = None
        self.turn: Turn | None = None
        self.reference: Reference | None = None
        #: What stood where a `replace` puts this.
        self.old: bytes | None = None

    def __repr__(self) -> str:
        return f"Prepared({len(self.data)} bytes for {self.key})"


@dataclasses.dataclass(frozen=True)
class Turn:
    """An entry of this session alone, at a version: a transaction that replaces it is done at most once.

    Without it, an add whose answer was lost, repeated when others have removed the handle already, would bring back a reference
    whose state is deleted.
    """

    key: str
    version: int


#: The turns of each store that nobody uses: one entry for each write at a time, however many roots are written to.
_TURNS: Final[weakref.WeakKeyDictionary[Store, collections.deque[Turn]]] = weakref.WeakKeyDictionary()
_TURNS_LOCK: Final = threading.Lock()


class Writes:
    """The writes of one session to one root."""

    def __init__(self, store: Store, storage: StateStorage, root: str) -> None:
        self._store, self._storage, self._root = store, storage, root
        with _TURNS_LOCK:
            self._turns = _TURNS.setdefault(store, collections.deque())
        self._ready = False

    def once(self, operations: Sequence[Operation], also: Sequence[Operation]) -> None:
        """A transaction that is done once, also where the store has to repeat it. `StoreConflict.index` counts in `operations`."""
        turn, token = self._turn(), uuid.uuid4().hex
        try:
            self._transact(turn, token, "", [*operations, *also])
        except (StoreConflict, *_DEFINITE) as error:
            if not (isinstance(error, StoreConflict) and error.index < 0):
                self._turns.append(turn)
            raise
        self._turns.append(Turn(turn.key, turn.version + 1))

    def write(
        self,
        key: str,
        name: str,
        state: Prepared,
        change: Callable[[bytes], Sequence[Operation]],
        refused: Callable[[StoreConflict], None],
        also: Sequence[Operation],
    ) -> None:
        """Writes the state, then does the change with the reference, and `also`, in one transaction.

        `refused` is told which operation of the change did not fit; when it returns, all is tried again.
        """
        if state.key not in (None, key):
            raise RecoveryMisused(f"what was prepared for {state.key} cannot be written to {key}: prepare it again")
        state.key = key
        for _ in range(TRIES):
            if state.done:
                return
            turn, known, reference = self._stored(state, name)
            changes = change(packed(reference, state.token))
            own = [Check(GENERATION, known.number), *changes]
            try:
                self._transact(turn, state.token, key, [*own, *also])
            except StoreConflict as error:
                state.unknown = False
                index = error.index - 1
                swept = index < 0  # or the turn is gone, with the session of an earlier attempt
                state.turn = None if error.index < 0 else turn
                try:
                    if index >= len(changes):
                        raise StoreConflict(str(error), index - len(changes), error.why) from error
                    if not swept:
                        refused(StoreConflict(str(error), index, error.why))
                except BaseException as final:
                    self._drop(state, final)
                    raise
                if swept:
                    self._drop(state)
            except _DEFINITE as error:
                if not state.unknown:
                    self._drop(state, error)
                raise
            except BaseException:
                state.unknown = True
                raise
            else:
                state.done = True
                self._turns.append(Turn(turn.key, turn.version + 1))
        if state.done:
            return
        busy = StoreUnavailable(
            f"{key} was not written: {TRIES} times, a sweep or a removal came first. Try again later"
        )
        self._drop(state, busy)
        raise busy

    def _stored(self, state: Prepared, name: str) -> tuple[Turn, Generation, Reference]:
        """The state is written. The generation is older than it: a sweep that may have met it has moved on from there."""
        if state.turn is None or state.generation is None or state.reference is None:
            if not self._ready:
                with self._nothing_yet():
                    self._store.ensure(self._root)
                self._ready = True
            state.turn = self._turn()
            try:
                state.generation = generation(self._store)
                state.reference = self._storage.write(name, state.data, state.generation.folder(self._root))
            except BaseException:
                self._drop(state)
                raise
        return state.turn, state.generation, state.reference

    def _drop(self, state: Prepared, error: BaseException | None = None) -> None:
        """Nothing refers to the state, and nothing will."""
        turn, reference = state.turn, state.reference
        state.turn = state.generation = state.reference = None
        if turn is not None:
            self._turns.append(turn)
        if reference is None:
            return
        try:
            self._storage.discard(reference)
        except StateStorageError as left:
            _log.warning("%s is left until it is swept: %s", reference.name, left)
            if error is not None:
                error.add_note(f"{reference.name} is left until it is swept: {left}")

    def _turn(self) -> Turn:
        try:
            return self._turns.popleft()
        except IndexError:
            key = f"{_WRITERS}/{uuid.uuid4().hex}"
        with self._nothing_yet():
            self._store.ensure(_WRITERS)
            self._store.transact(Create(key, ephemeral=True))
        return Turn(key, 0)

    @contextlib.contextmanager
    def _nothing_yet(self) -> Iterator[None]:
        try:
            yield
        except PossiblyInconsistentError as error:
            raise StoreUnavailable(f"nothing was written to {self._root} yet: {error}") from error

    def _transact(self, turn: Turn, token: str, key: str, operations: Sequence[Operation]) -> None:
        """Raises `StoreConflict`, its index counted in `operations`, when it was neither done now nor by an earlier attempt."""
        try:
            self._store.transact(Replace(turn.key, token.encode(), turn.version), *operations)
        except StoreConflict as error:
            try:
                ours = self._was_done(turn, token, key)
            except StoreError as unreadable:
                raise PossiblyInconsistentError(
                    f"{error}; and whether it had been done cannot be read: {unreadable}"
                ) from error
            if not ours:
                raise StoreConflict(str(error), error.index - 1, error.why) from error

    def _was_done(self, turn: Turn, token: str, key: str) -> bool:
        entry = self._store.read(turn.key)
        if entry is not None:
            return entry.value == token.encode()
        # It ended with the session it belonged to, and nothing of that one will be done any more.
        written = self._store.read(key) if key else None
        return written is not None and token.encode() in written.value
