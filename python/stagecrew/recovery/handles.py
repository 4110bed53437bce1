"""State handles: a name in the coordination store that refers to a state in the storage."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence

from stagecrew.errors import (
    HandleExists,
    HandleLocked,
    HandleMissing,
    RecoveryError,
    StateCorrupt,
    StateStorageError,
    StoreConflict,
    StoreUnsupported,
)
from stagecrew.recovery.storage import Reference, StateStorage
from stagecrew.recovery.stores.contract import (
    Check,
    Create,
    Delete,
    Entry,
    Operation,
    Replace,
    Store,
    checked_key,
    segment,
    text_of,
)
from stagecrew.recovery.writes import TRIES, Prepared, Writes, unpacked

__all__ = ["Audit", "Handle", "Prepared", "StateHandleStore"]

_log = logging.getLogger("stagecrew")


@dataclasses.dataclass(frozen=True)
class Handle:
    """A handle as it was read. `version` is 0 when it was added, and grows by one with each `replace`."""

    name: str
    version: int
    data: bytes
    reference: Reference


@dataclasses.dataclass
class Audit:
    """What a root refers to. The removal of a handle that is marked was begun, and has to be finished."""

    states: set[str] = dataclasses.field(default_factory=set)
    marked: list[str] = dataclasses.field(default_factory=list)
    unreadable: dict[str, RecoveryError] = dataclasses.field(default_factory=dict)


class StateHandleStore:
    """States by name, below one root of the store. Usable from any thread.

    A handle is an entry with the reference to its state, and a child `locks`, whose ephemeral children say who uses it. Without
    `locks` it is marked: it counts as absent, and its state may be gone. Nothing else may be put below it.

    Guarantees:

    * A handle that is not marked has its state, whole, whatever process died at whatever step. So a state that nothing refers
      to may be left: `sweep` takes it away.
    * A write does its change and `also`, further operations of the caller, in one transaction, once, however often the store
      has to repeat it. Its three outcomes: it returns, and is done; `PossiblyInconsistentError`, and nobody knows, nothing is
      discarded; any other error, and it was not done, its new state is discarded. Who has to repeat a write of unknown outcome
      gives it a `prepare`d state: then it is done once in all.
    * Nothing is deleted because it could not be read.

    A `StoreConflict` of a write has the `index` of what did not fit in `also`; -1 is the handle's own version. Not promised: that
    one who reads while others remove and add the same name sees each of them.
    """

    def __init__(self, store: Store, storage: StateStorage, root: str) -> None:
        self._store, self._storage, self._root = store, storage, checked_key(root)
        self._writes = Writes(store, storage, root)

    def __repr__(self) -> str:
        return f"StateHandleStore({self._root!r}, {self._storage!r})"

    @staticmethod
    def prepare(data: bytes) -> Prepared:
        """A state for an `add` or a `replace` that may have to be repeated."""
        return Prepared(data)

    def add(self, name: str, data: bytes | Prepared, also: Sequence[Operation] = (), *, lock: bool = False) -> None:
        """Adds a handle, of version 0; a removal of this name that stopped half-way is finished first. Raises `HandleExists`."""
        key = self._key(name)

        def change(value: bytes) -> list[Operation]:
            made: list[Operation] = [Create(key, value), Create(f"{key}/locks")]
            return [*made, Create(self._mine(key), ephemeral=True)] if lock else made

        def refused(conflict: StoreConflict) -> None:
            if (conflict.index, conflict.why) != (0, "exists"):
                raise StoreConflict(str(conflict), -1, conflict.why)
            if self.exists(name):
                raise HandleExists(f"there is a handle {name!r} in {self._root}: replace it, or choose another name")
            self.finish(name)

        self._writes.write(key, name, _prepared(data), change, refused, also)

    def replace(self, name: str, version: int, data: bytes | Prepared, also: Sequence[Operation] = ()) -> int:
        """Puts a state in the place of that of this version, and answers its own version. Then the old state is discarded.

        Raises `HandleMissing`; `StoreConflict` when the handle has another version.
        """
        key, state = self._key(name), _prepared(data)
        if state.old is None:
            entry = self._store.read(key)
            state.old = entry.value if entry is not None and entry.version == version else None

        def refused(conflict: StoreConflict) -> None:
            if conflict.why == "version":
                raise StoreConflict(
                    f"handle {name!r} in {self._root} does not have version {version}: read it again", -1, "version"
                )
            raise HandleMissing(self._missing(name))

        self._writes.write(
            key, name, state, lambda value: [Check(f"{key}/locks"), Replace(key, value, version)], refused, also
        )
        if state.old is not None:
            try:
                self._storage.discard(unpacked(key, state.old))
            except (StateStorageError, StoreUnsupported) as error:
                _log.warning("the state that handle %r had before is left until it is swept: %s", name, error)
        return version + 1

    def exists(self, name: str) -> bool:
        """Whether there is a handle of this name that is not marked."""
        key = self._key(name)
        return self._store.read(f"{key}/locks") is not None and self._store.read(key) is not None

    def get(self, name: str, *, lock: bool = False) -> Handle:
        """The handle, locked if asked for, unless this fails. Raises `HandleMissing`, `StateCorrupt`, `StateStorageError`.

        `StoreUnsupported` is that of a handle of a newer format. When nobody knows whether it was locked, `release` it.
        """
        fresh = lock and self.lock(name)
        try:
            found = self._get(name)
            if isinstance(found, RecoveryError):
                raise found
            return found
        except BaseException:
            if fresh:
                with contextlib.suppress(RecoveryError):
                    self.release(name)
            raise

    def get_all(self, *, lock: bool = False) -> tuple[list[Handle], dict[str, RecoveryError]]:
        """All handles, by name; and those that could not be read, each with its error: nothing of them is deleted or locked."""
        found: list[Handle] = []
        unreadable: dict[str, RecoveryError] = {}
        fresh: list[str] = []
        try:
            for name in self._parts():
                try:
                    if lock and self.lock(name):
                        fresh.append(name)
                    handle = self._get(name)
                except HandleMissing:
                    continue  # removed meanwhile, and its locks with it
                if isinstance(handle, Handle):
                    found.append(handle)
                    continue
                unreadable[name] = handle
                if fresh[-1:] == [name]:
                    self.release(fresh.pop())
        except BaseException:
            for name in fresh:
                with contextlib.suppress(RecoveryError):
                    self.release(name)
            raise
        return found, unreadable

    def names(self) -> list[str]:
        """The names of all handles, sorted."""
        return [name for name in self._parts() if self.exists(name)]

    def lock(self, name: str) -> bool:
        """Says that this session uses the handle: until `release` or its end, no other session can remove it.

        A shared mark, not a mutex. Whether it is new: one for each session is all there is. Raises `HandleMissing`.
        """
        key = self._key(name)
        try:
            self._store.transact(Create(self._mine(key), ephemeral=True))
        except StoreConflict as error:
            if error.why == "exists":
                return False
            raise HandleMissing(self._missing(name)) from error
        return True

    def release(self, name: str) -> None:
        """This session does not use the handle any more. Repeatable; fine when it never did."""
        with _fine("missing"):
            self._store.transact(Delete(self._mine(self._key(name))))

    def release_all(self) -> None:
        """`release` of all; one that fails does not keep the others. Raises the first error, with the others as its notes."""
        _each(self._parts(), self.release)

    def remove(self, name: str, also: Sequence[Operation] = ()) -> bool:
        """Takes a handle and its state away: marks it, with `also`, deletes the state, then the reference.

        Repeatable at each step. True when this call marked it; False, and `also` was not done, when it was marked before or is not
        there. Raises `HandleLocked` when others use it: only this session's own lock is gone then.
        """
        marked = self._mark(name, also)
        self.finish(name)
        return marked

    def finish(self, name: str) -> None:
        """Finishes a removal that stopped half-way. Does nothing to a handle that is not marked."""
        key = self._key(name)
        entry = self._marked(key)
        if entry is None:
            return
        try:
            self._storage.discard(unpacked(key, entry.value))
        except (StateCorrupt, StoreUnsupported) as error:
            _log.warning("handle %r is removed, its state is left until it is swept: %s", name, error)
        self._forget(key, entry)

    def remove_all(self) -> None:
        """`remove` of all, also of those whose removal stopped half-way. Raises the first error, with the others as its notes."""
        _each(self._parts(), self.remove)

    def clear(self) -> None:
        """Takes all references away, and leaves the states to `sweep`; so it needs no storage that works.

        Handles that other sessions use stay. Raises the first error, with the others as its notes.
        """

        def forget(name: str) -> None:
            self._mark(name, ())
            key = self._key(name)
            entry = self._marked(key)
            if entry is not None:
                self._forget(key, entry)

        _each(self._parts(), forget)

    def audit(self) -> Audit:
        """What is referred to: for `sweep`."""
        audit = Audit()
        for name in self._parts():
            key = self._key(name)
            marked = self._store.read(f"{key}/locks") is None
            entry = self._store.read(key)
            if entry is None:
                continue
            if marked:
                audit.marked.append(name)
            try:
                audit.states.add(unpacked(key, entry.value).name)
            except (StateCorrupt, StoreUnsupported) as error:
                audit.unreadable[name] = error
        return audit

    def _get(self, name: str) -> Handle | RecoveryError:
        """The handle, or why it cannot be read."""
        key = self._key(name)
        for _ in range(TRIES):
            # The lock first: so this is the handle as it was when that was read, or as it became.
            locks = self._store.read(f"{key}/locks")
            entry = self._store.read(key)
            if locks is None or entry is None:
                raise HandleMissing(self._missing(name))
            try:
                reference = unpacked(key, entry.value)
                return Handle(name, entry.version, self._storage.read(reference), reference)
            except (StateStorageError, StoreUnsupported) as error:
                unreadable: RecoveryError = error
            # Others may have replaced or removed it meanwhile.
            if self._store.read(key) == entry and self._store.read(f"{key}/locks") is not None:
                return unreadable
        return StateStorageError(
            f"handle {name!r} in {self._root} was replaced {TRIES} times while it was read: try again"
        )

    def _mark(self, name: str, also: Sequence[Operation]) -> bool:
        key = self._key(name)
        marking = [Delete(f"{key}/locks")]
        for mine in (True, False):
            try:
                self._writes.once(marking, also)
            except StoreConflict as error:
                if error.index > 0:
                    raise StoreConflict(str(error), error.index - 1, error.why) from error
                if error.index < 0 or error.why not in ("missing", "not empty"):
                    raise
                if error.why == "missing":
                    return False
                if mine:
                    self.release(name)
            else:
                return True
        users = ", ".join(text_of(user) for user in self._store.children(f"{key}/locks")) or "one that has just ended"
        raise HandleLocked(
            f"handle {name!r} in {self._root} is used by {users}: nothing was removed, try again when it is not"
        )

    def _marked(self, key: str) -> Entry | None:
        """The entry, when it is marked. What it refers to is not in use, and never will be."""
        entry = self._store.read(key)
        return entry if self._store.read(f"{key}/locks") is None else None

    def _forget(self, key: str, entry: Entry) -> None:
        # Another may have finished this, and added it again: then it has children, or another version.
        with _fine("missing", "not empty", "version"):
            self._store.transact(Delete(key, entry.version))

    def _key(self, name: str) -> str:
        return f"{self._root}/{segment(name)}"

    def _mine(self, key: str) -> str:
        return f"{key}/locks/{segment(self._store.session)}"

    def _parts(self) -> list[str]:
        return sorted(text_of(part) for part in self._store.children(self._root))

    def _missing(self, name: str) -> str:
        return f"there is no handle {name!r} in {self._root}"


def _prepared(data: bytes | Prepared) -> Prepared:
    return data if isinstance(data, Prepared) else Prepared(data)


@contextlib.contextmanager
def _fine(*why: str) -> Iterator[None]:
    try:
        yield
    except StoreConflict as error:
        if error.why not in why:
            raise


def _each(names: list[str], do: Callable[[str], object]) -> None:
    first: RecoveryError | None = None
    for name in names:
        try:
            do(name)
        except RecoveryError as error:
            if first is None:
                first = error
            else:
                first.add_note(str(error))
    if first is not None:
        raise first
