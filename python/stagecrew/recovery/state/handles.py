"""State handles: names in the coordination store that refer to states in the storage."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import cast

from stagecrew.errors import (
    HandleError,
    RecoveryError,
    StateCorrupt,
    StateStorageError,
    StoreConflict,
    StoreUnsupported,
)
from stagecrew.recovery.retry import retry_if_none
from stagecrew.recovery.state.references import decode_reference
from stagecrew.recovery.state.storage import Reference, StateStorage
from stagecrew.recovery.state.writer import MAX_TRIES, HandleWriter, PreparedState
from stagecrew.recovery.stores.contract import (
    Check,
    Create,
    Delete,
    Entry,
    Operation,
    Replace,
    Store,
    checked_key,
    decode_segment,
    encode_segment,
)

__all__ = ["Audit", "Handle", "HandleExists", "HandleMissing", "StateHandleStore"]

_log = logging.getLogger("stagecrew")


class HandleExists(HandleError):  # noqa: N818
    """A handle with this name already exists. Callers catch or exclude this case, so users never get this error."""


class HandleMissing(HandleError):  # noqa: N818
    """No handle has this name. Callers catch or exclude this case, so users never get this error."""


@dataclasses.dataclass(frozen=True)
class Handle:
    """A handle as it was read. `version` is 0 at first and grows by one with each `replace`."""

    name: str
    version: int
    data: bytes
    reference: Reference


@dataclasses.dataclass
class Audit:
    """All states that the handles of one root refer to. `unfinished` names handles whose removal must be finished."""

    states: set[str] = dataclasses.field(default_factory=set)
    unfinished: list[str] = dataclasses.field(default_factory=list)
    unreadable: dict[str, RecoveryError] = dataclasses.field(default_factory=dict)


class StateHandleStore:
    """Named states below one root of the store. Any thread can use it.

    A handle is an entry with the reference to its state, and a child `locks`. Each ephemeral child of `locks` names a
    session that uses the handle. A handle without `locks` is marked for removal: it counts as absent, and its state can
    already be deleted. Nothing else may be stored below a handle.

    Guarantees:

    * A handle that is not marked has its complete state, no matter which process died at which step. A state that
      nothing refers to can remain; `sweep` deletes it.
    * A write applies its change and the caller's operations `also` in one transaction, at most once, even if the store
      repeats the transaction. If the write returns, it was applied. If it raises `PossiblyInconsistentError`, the
      outcome is unknown, and nothing is discarded. If it raises anything else, it was not applied, and its new state is
      discarded. To repeat a write with an unknown outcome, pass the same state from `prepare` again: then the write is
      still applied at most once.
    * A failed read never deletes anything.

    If a write raises `StoreConflict`, its `index` is that of the operation in `also` that failed, or -1 if the change
    to the handle itself failed.

    Not promised: that a reader finds a handle that another process removes and adds again during the read.
    """

    def __init__(self, store: Store, storage: StateStorage, root: str) -> None:
        self._store, self._storage, self._root = store, storage, checked_key(root)
        self._writer = HandleWriter(store, storage, root)

    def __repr__(self) -> str:
        return f"StateHandleStore({self._root!r}, {self._storage!r})"

    @staticmethod
    def prepare(data: bytes) -> PreparedState:
        """Returns a state with which an `add` or a `replace` can be repeated."""
        return PreparedState(data)

    # -- Writes

    def add(
        self, name: str, data: bytes | PreparedState, also: Sequence[Operation] = (), *, lock: bool = False
    ) -> None:
        """Adds a handle with version 0. Finishes an interrupted removal of this name first. Raises `HandleExists`."""
        key = self._key(name)

        def change(value: bytes) -> list[Operation]:
            created: list[Operation] = [Create(key, value), Create(f"{key}/locks")]
            return [*created, Create(self._own_lock(key), ephemeral=True)] if lock else created

        def on_conflict(conflict: StoreConflict) -> None:
            if (conflict.index, conflict.why) != (0, "exists"):
                raise StoreConflict(str(conflict), -1, conflict.why)
            if self.exists(name):
                raise HandleExists(f"handle {name!r} in {self._root} already exists: replace it, or use another name")
            self.finish_removal(name)

        self._writer.write(key, name, _prepared(data), change, on_conflict, also)

    def replace(self, name: str, version: int, data: bytes | PreparedState, also: Sequence[Operation] = ()) -> int:
        """Replaces the state of a handle that has this version, then discards the old state. Returns the new version.

        Raises `HandleMissing`, or `StoreConflict` if the handle has another version.
        """
        key, state = self._key(name), _prepared(data)
        if state.old is None:
            entry = self._store.read(key)
            state.old = entry.value if entry is not None and entry.version == version else None

        def on_conflict(conflict: StoreConflict) -> None:
            if conflict.why == "version":
                raise StoreConflict(
                    f"handle {name!r} in {self._root} does not have version {version}: read it again", -1, "version"
                )
            raise HandleMissing(self._missing(name))

        self._writer.write(
            key, name, state, lambda value: [Check(f"{key}/locks"), Replace(key, value, version)], on_conflict, also
        )
        if state.old is not None:
            try:
                self._storage.discard(decode_reference(key, state.old))
            except (StateStorageError, StoreUnsupported) as error:
                _log.warning(
                    "the previous state of handle %r could not be deleted; a sweep will delete it: %s", name, error
                )
        return version + 1

    # -- Reads

    def exists(self, name: str) -> bool:
        """Returns whether a handle with this name exists and is not marked for removal."""
        key = self._key(name)
        return self._store.read(f"{key}/locks") is not None and self._store.read(key) is not None

    def get(self, name: str, *, lock: bool = False) -> Handle:
        """Returns the handle, and locks it if `lock` is true. If this raises an error, it leaves no new lock.

        Raises `HandleMissing`, `StateCorrupt`, `StateStorageError`, or `StoreUnsupported` for a handle of another
        format. If it is unknown whether the handle was locked, call `release`.
        """
        is_new = lock and self.lock(name)
        try:
            found = self._read(name)
            if isinstance(found, RecoveryError):
                raise found
            return found
        except BaseException:
            if is_new:
                with contextlib.suppress(RecoveryError):
                    self.release(name)
            raise

    def get_all(self, *, lock: bool = False) -> tuple[list[Handle], dict[str, RecoveryError]]:
        """Returns all readable handles, and the errors for the unreadable handles, by name.

        Unreadable handles are neither deleted nor locked.
        """
        handles: list[Handle] = []
        unreadable: dict[str, RecoveryError] = {}
        locked: list[str] = []
        try:
            for name in self._all_names():
                try:
                    if lock and self.lock(name):
                        locked.append(name)
                    found = self._read(name)
                except HandleMissing:
                    continue  # removed in the meantime, with its locks
                if isinstance(found, Handle):
                    handles.append(found)
                    continue
                unreadable[name] = found
                if locked[-1:] == [name]:
                    self.release(locked.pop())
        except BaseException:
            for name in locked:
                with contextlib.suppress(RecoveryError):
                    self.release(name)
            raise
        return handles, unreadable

    def names(self) -> list[str]:
        """Returns the sorted names of all handles."""
        return [name for name in self._all_names() if self.exists(name)]

    # -- Locks

    def lock(self, name: str) -> bool:
        """Locks the handle. No other session can remove it until `release` or the end of this session.

        The lock is shared, not exclusive, and each session has at most one. Returns whether it is new. Raises
        `HandleMissing`.
        """
        key = self._key(name)
        try:
            self._store.transact(Create(self._own_lock(key), ephemeral=True))
        except StoreConflict as error:
            if error.why == "exists":
                return False
            raise HandleMissing(self._missing(name)) from error
        return True

    def release(self, name: str) -> None:
        """Releases this session's lock on the handle, if it has one. Idempotent."""
        with _ignored_conflicts("missing"):
            self._store.transact(Delete(self._own_lock(self._key(name))))

    def release_all(self) -> None:
        """Releases all locks of this session.

        Raises the first error after all were tried, with the others as its notes.
        """
        _for_each(self._all_names(), self.release)

    # -- Removals

    def remove(self, name: str, also: Sequence[Operation] = ()) -> bool:
        """Removes a handle and its state: marks it, applies `also`, deletes the state, then deletes the reference.

        After an error at any step, it can be called again. Returns true if this call marked the handle. Returns false,
        and does not apply `also`, if the handle was already marked or does not exist. If other sessions use the handle,
        this releases only this session's own lock, and raises `HandleError`.
        """
        marked = self._mark(name, also)
        self.finish_removal(name)
        return marked

    def finish_removal(self, name: str) -> None:
        """Finishes an interrupted removal. Does nothing to a handle that is not marked."""
        key = self._key(name)
        entry = self._marked(key)
        if entry is None:
            return
        try:
            self._storage.discard(decode_reference(key, entry.value))
        except (StateCorrupt, StoreUnsupported) as error:
            _log.warning("handle %r is removed, but not its state; a sweep will delete it: %s", name, error)
        self._delete_reference(key, entry)

    def remove_all(self) -> None:
        """Removes all handles, and finishes interrupted removals.

        Raises the first error, with the others as its notes.
        """
        _for_each(self._all_names(), self.remove)

    def clear(self) -> None:
        """Deletes all references, and leaves the states to `sweep`. So this works while the storage is unavailable.

        Handles that other sessions use are kept. Raises the first error, with the others as its notes.
        """

        def delete_reference(name: str) -> None:
            self._mark(name, ())
            key = self._key(name)
            entry = self._marked(key)
            if entry is not None:
                self._delete_reference(key, entry)

        _for_each(self._all_names(), delete_reference)

    def audit(self) -> Audit:
        """Returns everything that these handles refer to, for `sweep`."""
        audit = Audit()
        for name in self._all_names():
            key = self._key(name)
            is_marked = self._store.read(f"{key}/locks") is None
            entry = self._store.read(key)
            if entry is None:
                continue
            if is_marked:
                audit.unfinished.append(name)
            try:
                audit.states.add(decode_reference(key, entry.value).name)
            except (StateCorrupt, StoreUnsupported) as error:
                audit.unreadable[name] = error
        return audit

    # -- Entries

    def _read(self, name: str) -> Handle | RecoveryError:
        """Returns the handle, or the error that makes it unreadable."""
        key = self._key(name)

        def try_read() -> Handle | RecoveryError | None:
            # The locks are read first, so the entry is the handle's version at that time or a later one.
            locks = self._store.read(f"{key}/locks")
            entry = self._store.read(key)
            if locks is None or entry is None:
                raise HandleMissing(self._missing(name))
            try:
                reference = decode_reference(key, entry.value)
                return Handle(name, entry.version, self._storage.read(reference), reference)
            except (StateStorageError, StoreUnsupported) as error:
                unreadable: RecoveryError = error
            # If another session has replaced or removed the handle in the meantime, ignore the error and read again.
            unchanged = self._store.read(key) == entry and self._store.read(f"{key}/locks") is not None
            return unreadable if unchanged else None

        found = cast("Handle | RecoveryError | None", retry_if_none(try_read, MAX_TRIES))
        if found is None:
            return StateStorageError(
                f"handle {name!r} in {self._root} was replaced {MAX_TRIES} times while it was read: try again"
            )
        return found

    def _mark(self, name: str, also: Sequence[Operation]) -> bool:
        key = self._key(name)
        marking = [Delete(f"{key}/locks")]
        for may_have_own_lock in (True, False):
            try:
                self._writer.transact_once(marking, also)
            except StoreConflict as error:
                if error.index > 0:
                    raise StoreConflict(str(error), error.index - 1, error.why) from error
                if error.index < 0 or error.why not in ("missing", "not empty"):
                    raise
                if error.why == "missing":
                    return False
                if may_have_own_lock:
                    self.release(name)
            else:
                return True
        sessions = [decode_segment(session) for session in self._store.children(f"{key}/locks")]
        users = ", ".join(sessions) or "one that has just ended"
        raise HandleError(
            f"handle {name!r} in {self._root} is in use by session {users}: nothing was removed; try again when that "
            "session has released it"
        )

    def _marked(self, key: str) -> Entry | None:
        """Returns the entry if it is marked for removal. Then nothing uses its state, or ever will."""
        entry = self._store.read(key)
        return entry if self._store.read(f"{key}/locks") is None else None

    def _delete_reference(self, key: str, entry: Entry) -> None:
        # If another session has finished this removal and added the handle again, the new handle has children or
        # another version.
        with _ignored_conflicts("missing", "not empty", "version"):
            self._store.transact(Delete(key, entry.version))

    def _key(self, name: str) -> str:
        return f"{self._root}/{encode_segment(name)}"

    def _own_lock(self, key: str) -> str:
        return f"{key}/locks/{encode_segment(self._store.session)}"

    def _all_names(self) -> list[str]:
        return sorted(decode_segment(part) for part in self._store.children(self._root))

    def _missing(self, name: str) -> str:
        return f"handle {name!r} does not exist in {self._root}: list the names, or add it"


def _prepared(data: bytes | PreparedState) -> PreparedState:
    return data if isinstance(data, PreparedState) else PreparedState(data)


@contextlib.contextmanager
def _ignored_conflicts(*reasons: str) -> Iterator[None]:
    try:
        yield
    except StoreConflict as error:
        if error.why not in reasons:
            raise


def _for_each(names: list[str], action: Callable[[str], object]) -> None:
    first: RecoveryError | None = None
    for name in names:
        try:
            action(name)
        except RecoveryError as error:
            if first is None:
                first = error
            else:
                first.add_note(str(error))
    if first is not None:
        raise first
