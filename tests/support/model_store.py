"""An in-memory coordination store that fulfils the stores' contract and into which tests can inject faults."""

import itertools
import threading

from stagecrew.errors import PossiblyInconsistentError, SessionLost, StoreConflict, StoreUnavailable
from stagecrew.recovery.stores.contract import Check, Create, Delete, Entry, Replace, checked_key, parents
from stagecrew.recovery.stores.validation import check_transaction, ensure_entries


class ModelServer:
    """The state that all sessions share.

    `fault(session, operations, moment)` is called before and after each transaction. If it raises at the moment
    "before", the transaction is not applied. If it raises at the moment "after", the transaction was applied, and the
    error replaces the response.
    """

    def __init__(self):
        self.entries = {}
        self.lock = threading.RLock()
        self.log = []  # (session, operations) of each applied transaction
        self.fault = lambda session, operations, moment: None
        self.on_transaction = lambda operations: None  # called after each applied transaction
        self.on_read = lambda session, key: None  # called before each read
        self._numbers = itertools.count(1)
        self.live = set()

    def session(self):
        name = f"session-{next(self._numbers)}"
        self.live.add(name)
        return ModelStore(self, name)

    def expire(self, name):
        """Ends a session, as a store does when it has lost contact with a client."""
        with self.lock:
            self.live.discard(name)
            for key in [key for key, entry in self.entries.items() if entry.session == name]:
                del self.entries[key]

    def apply(self, session, operations):
        with self.lock:
            entries = dict(self.entries)
            versions = []
            for index, operation in enumerate(operations):
                versions.append(self._apply_one(entries, session, index, operation))
            self.entries = entries
            self.log.append((session, operations))
            self.on_transaction(operations)
            return versions

    @staticmethod
    def _apply_one(entries, session, index, operation):
        def conflict(why):
            return StoreConflict(f"{operation}: {why}", index, why)

        key = operation.key
        if isinstance(operation, Create):
            if key in entries:
                raise conflict("exists")
            if parents(key) and (parents(key)[-1] not in entries or entries[parents(key)[-1]].session):
                raise conflict("no parent")
            entries[key] = Entry(operation.value, 0, session if operation.ephemeral else None)
            return 0
        known = entries.get(key)
        if known is None:
            raise conflict("missing")
        if operation.version is not None and known.version != operation.version:
            raise conflict("version")
        if isinstance(operation, Check):
            return known.version
        if isinstance(operation, Delete):
            if any(other.startswith(key + "/") for other in entries):
                raise conflict("not empty")
            del entries[key]
            return None
        assert isinstance(operation, Replace)
        entries[key] = Entry(operation.value, known.version + 1, known.session)
        return known.version + 1


class ModelStore:
    """One session with a `ModelServer`."""

    timeout = None

    def __init__(self, server, name):
        self.server, self.session = server, name
        self._suspended = False

    @property
    def suspended(self):
        """Whether the session knows that its connection is down."""
        return self._suspended or self.session not in self.server.live

    @suspended.setter
    def suspended(self, value):
        self._suspended = value

    def _check_alive(self):
        if self.session not in self.server.live:
            raise SessionLost(f"{self.session} has expired")

    def ensure(self, *keys):
        ensure_entries(self, keys)

    def read(self, key):
        checked_key(key)
        self.server.on_read(self.session, key)
        self._check_alive()
        with self.server.lock:
            return self.server.entries.get(key)

    def children(self, key):
        checked_key(key)
        self.server.on_read(self.session, key)
        self._check_alive()
        with self.server.lock:
            return sorted(
                other[len(key) + 1 :]
                for other in self.server.entries
                if other.startswith(key + "/") and "/" not in other[len(key) + 1 :]
            )

    def transact(self, *operations):
        check_transaction(operations)
        self._check_alive()
        self.server.fault(self.session, operations, "before")
        self._check_alive()
        versions = self.server.apply(self.session, operations)
        self.server.fault(self.session, operations, "after")
        return versions

    def close(self):
        self.server.expire(self.session)


#: The errors that `ModelServer.fault` can raise at each moment.
FAULTS = {
    "before": [StoreUnavailable("the store is unavailable"), PossiblyInconsistentError("the request was lost")],
    "after": [PossiblyInconsistentError("the response was lost")],
}
