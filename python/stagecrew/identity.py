"""By which a listener that was registered on the driver is found again in a task.

Loaded in every Python worker: the standard library only, and no thread.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import uuid
from typing import Any, Final

__all__ = ["Identity"]


@functools.cache
def _key() -> bytes:
    return os.urandom(32)


#: Of how many registrations a listener knows.
_REMEMBERED: Final = 5
#: The pickled arguments of a listener that has none: they hold no secret.
_NO_ARGUMENTS: Final = pickle.dumps(((), {}), protocol=5)


class Identity:
    """By which a listener is found again in a task, however the task's function came to know of it.

    `id` travels with a listener that is pickled. A module that is imported in the worker makes its listeners anew: these
    are recognised by `factory` (module and name of the class or function) and equal arguments. A reference that travels
    without its arguments, because they may be secrets, carries a digest of them under a key that never leaves its process.
    Another process cannot compare that digest. So a listener that `spark.stagecrew.listeners` names carries this name too.
    """

    def __init__(self, factory: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.id = uuid.uuid4().hex
        self.factory = factory
        self.topologies: list[str] = []
        self.names: tuple[str, ...] = ()
        self._arguments: tuple[Any, Any] | None = (args, kwargs)
        self._pickled: bytes | None = None
        self._digest: bytes | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "factory": self.factory,
            "topologies": self.topologies,
            "names": self.names,
            "_pickled": self.pickled_arguments,
            "_digest": self.digest,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _arguments=None)

    def registered_for(self, topology: str) -> None:
        """Remembers where the listener was registered, for errors: the last few, as they travel with each task's function."""
        # A new list: another thread may pickle the old one.
        self.topologies = [*(one for one in self.topologies if one != topology), topology][-_REMEMBERED:]

    def add_name(self, name: str) -> None:
        """Adds a name, `module:name`, of the listener in the configuration."""
        if name not in self.names:
            self.names = (*self.names, name)

    def same_name(self, other: Identity) -> bool:
        """Whether the configuration registers both by one name."""
        return not set(self.names).isdisjoint(other.names)

    @property
    def pickled_arguments(self) -> bytes | None:
        """The arguments as bytes; None when they cannot be pickled."""
        if self._pickled is None and self._arguments is not None:
            with contextlib.suppress(Exception):
                self._pickled = pickle.dumps(self._arguments, protocol=5)
        return self._pickled

    @property
    def digest(self) -> bytes | None:
        """A keyed digest of the arguments, made where the listener was made; None when they cannot be pickled."""
        if self._digest is None and self._arguments is not None and self.pickled_arguments is not None:
            import hmac

            self._digest = hmac.digest(_key(), self.pickled_arguments, "sha256")
        return self._digest

    def same(self, other: Identity) -> bool:
        """Whether both name the same listener."""
        if self.id == other.id or self.same_name(other):
            return True
        if self.factory != other.factory:
            return False
        if self.digest is not None and self.digest == other.digest:
            return True
        mine, theirs = self.pickled_arguments, other.pickled_arguments
        if mine is None or theirs is None:
            return False
        if mine == theirs:
            return True
        with contextlib.suppress(Exception):
            return bool(pickle.loads(mine) == pickle.loads(theirs))
        return False

    def reference(self) -> Identity:
        """The same identity without the arguments, which may hold secrets."""
        bare = Identity.__new__(Identity)
        nothing = self.pickled_arguments == _NO_ARGUMENTS
        bare.__dict__.update(
            id=self.id,
            factory=self.factory,
            topologies=self.topologies,
            names=self.names,
            _arguments=None,
            _pickled=_NO_ARGUMENTS if nothing else None,
            _digest=self.digest,
        )
        return bare
