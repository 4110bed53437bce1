"""Identifies, in a task, a listener that was registered on the driver.

Every Python worker imports this module, so it uses only the standard library and starts no thread.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pickle
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

__all__ = ["Identity", "RedefinedError", "RegisteredTopology", "chosen"]

T = TypeVar("T")


@functools.cache
def _key() -> bytes:
    return os.urandom(32)


@functools.cache
def _maker() -> bytes:
    """Identifies this process without revealing its key. Digests of different processes never match."""
    return hashlib.sha256(b"maker" + _key()).digest()[:8]


#: The number of registrations that a listener remembers.
_REMEMBERED: Final = 5
#: The pickled arguments of a listener without arguments: they contain no secret.
_NO_ARGUMENTS: Final = pickle.dumps(((), {}), protocol=5)


class RegisteredTopology(NamedTuple):
    """A topology that uses a listener.

    In a task, `ended` says whether the topology had ended when the listener was pickled.
    """

    #: The text that names the topology in error messages.
    description: str
    id: str
    ended: bool = False


class RedefinedError(LookupError):
    """The open listener has the same factory and arguments, but different code."""


class Identity:
    """Recognizes a listener in a task. The task's function can refer to the listener in three ways.

    * By a pickled copy: the copy has the same `id`.
    * By importing its module: the worker then creates the listener again, with another id. It has the same `factory`
      (the module and name of the class or function) and equal arguments.
    * By `reference()`, which is pickled without the arguments, because they may be secrets. It contains a digest of
      them. The key of the digest never leaves its process, so digests of different processes cannot be compared.
      Therefore a listener in `spark.stagecrew.listeners` is also identified by its name there.
    """

    def __init__(
        self, factory: str, args: tuple[Any, ...], kwargs: dict[str, Any], defined_by: Callable[..., Any] | None = None
    ) -> None:
        self.id = uuid.uuid4().hex
        self.factory = factory
        self.topologies: list[RegisteredTopology] = []
        self.names: tuple[str, ...] = ()
        self._arguments: tuple[Any, Any] | None = (args, kwargs)
        self._pickled: bytes | None = None
        self._digest: bytes | None = None
        #: The class or the function. Only in the process that created the listener.
        self._defined_by = defined_by
        #: A digest of its code. The key belongs to the process that created the listener.
        self._definition: bytes | None = None
        self._maker = _maker()

    def __getstate__(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "factory": self.factory,
            "topologies": self.topologies,
            "names": self.names,
            "_pickled": self.pickled_arguments,
            "_digest": self.digest,
            "_definition": self.definition,
            "_maker": self._maker,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _arguments=None, _defined_by=None)

    def note_registration(self, description: str, topology_id: str) -> None:
        """Records a topology that uses this listener, for error messages. Keeps only a few: each task receives them."""
        # A new list: another thread may pickle the old one.
        others = [one for one in self.topologies if one.description != description]
        self.topologies = [*others, RegisteredTopology(description, topology_id)][-_REMEMBERED:]

    def note_end(self, topology: str) -> None:
        """Records that the topology with this id has ended."""
        self.topologies = [one._replace(ended=True) if one.id == topology else one for one in self.topologies]

    def add_name(self, name: str) -> None:
        """Adds a name, `module:name`, of the listener in the configuration."""
        if name not in self.names:
            self.names = (*self.names, name)

    def same_name(self, other: Identity) -> bool:
        """Whether the configuration registers both under the same name."""
        return not set(self.names).isdisjoint(other.names)

    @property
    def pickled_arguments(self) -> bytes | None:
        """The pickled arguments, or None if they cannot be pickled."""
        if self._pickled is None and self._arguments is not None:
            with contextlib.suppress(Exception):
                self._pickled = pickle.dumps(self._arguments, protocol=5)
        return self._pickled

    @property
    def digest(self) -> bytes | None:
        """A digest of the arguments, keyed by the process that created them. None if they cannot be pickled."""
        if self._digest is None and self._arguments is not None and self.pickled_arguments is not None:
            import hmac

            self._digest = hmac.digest(_key(), self.pickled_arguments, "sha256")
        return self._digest

    @property
    def definition(self) -> bytes | None:
        """A digest of the code, with the same key. None if the code is imported by name."""
        function = self._defined_by
        if function is not None:
            if function.__module__ == "__main__" or "<locals>" in getattr(function, "__qualname__", ""):
                import hmac

                from stagecrew.listeners.fingerprints import fingerprint  # only on the driver: it needs PySpark

                self._definition = hmac.digest(_key(), fingerprint(function, b""), "sha256")
            self._defined_by = None
        return self._definition

    def redefines(self, other: Identity) -> bool:
        """Whether the same process created both, from different code."""
        mine, theirs = self.definition, other.definition
        return self._maker == other._maker and mine is not None and theirs is not None and mine != theirs

    def is_comparable(self, other: Identity) -> bool:
        """Whether `same` can compare the arguments of both."""
        by_digest = self._maker == other._maker and None not in (self.digest, other.digest)
        return by_digest or None not in (self.pickled_arguments, other.pickled_arguments)

    def same(self, other: Identity) -> bool:
        """Whether both identify the same listener."""
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
        """Returns the same identity without the arguments, which may contain secrets."""
        reference = Identity.__new__(Identity)
        has_no_arguments = self.pickled_arguments == _NO_ARGUMENTS
        reference.__dict__.update(
            id=self.id,
            factory=self.factory,
            topologies=self.topologies,
            names=self.names,
            _arguments=None,
            _pickled=_NO_ARGUMENTS if has_no_arguments else None,
            _digest=self.digest,
            _defined_by=None,
            _definition=self.definition,
            _maker=self._maker,
        )
        return reference


def chosen(identity: Identity, candidates: Sequence[T], identity_of: Callable[[T], Identity]) -> T | None:
    """Returns the first of the candidates that is the same listener, or None.

    A listener with the same id is preferred, then one that the configuration registers under the same name, then one
    with the same factory and arguments. Raises `RedefinedError` if only listeners with different code match.
    """
    for matches in (lambda other: other.id == identity.id, identity.same_name):
        for one in candidates:
            if matches(identity_of(one)):
                return one
    alike = [one for one in candidates if identity.same(identity_of(one))]
    for one in alike:
        if not identity.redefines(identity_of(one)):
            return one
    if alike:
        raise RedefinedError(identity_of(alike[0]))
    return None
