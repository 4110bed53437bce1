"""Positions in a program: the path of steps, batches and topologies that identifies a use of an operator in every run.

The identity of a use never depends on the order in which other places run, or on whether they are skipped. Uses neither
Spark nor a store.
"""

from __future__ import annotations

import contextvars
import threading
import urllib.parse
import weakref
from typing import Final

from stagecrew.errors import OperatorMisused

__all__ = ["PLACE", "Place", "ThreadMark", "Uses", "current_place", "operator_of", "this_thread", "unused"]

#: Replaces the ordinal in the key of a coordinator that was created before the session was running and is not used yet.
_UNUSED: Final = "unused"


class ThreadMark:
    """Identifies a thread. Unlike `threading.get_ident()`, a mark is never reused."""

    def __init__(self) -> None:
        self._thread = weakref.ref(threading.current_thread())

    @property
    def is_alive(self) -> bool:
        """Whether the thread is still running."""
        thread = self._thread()
        return thread is not None and thread.is_alive()


class _Thread(threading.local):
    def __init__(self) -> None:
        self.mark = ThreadMark()


_thread = _Thread()


class Place:
    """One execution of a step, of a batch or of a topology's `with` statement; or the program itself, without a parent.

    The thread that began the place owns it. Only uses by that thread are numbered, because the order of several threads
    differs from run to run. Steps and batches have unique names, but topologies need not have, so a place counts the
    topologies that begin in it.
    """

    __slots__ = ("_owner", "_topologies", "ended", "is_ordered", "kind", "name", "parent", "path", "steps")

    def __init__(self, parent: Place | None = None, kind: str = "program", name: str = "") -> None:
        self.parent, self.kind, self.name = parent, kind, name
        self.ended = False
        #: Whether the last element of the path is the same in every run.
        self.is_ordered = True
        #: The names of the enclosing steps and batches, outermost first, followed by the place's own name.
        self.steps: tuple[str, ...] = () if parent is None else parent.steps
        #: For example `step=load/batch=3/topology=daily`.
        self.path: str = "" if parent is None else parent.path
        self._owner = _thread.mark
        self._topologies: dict[str, int] = {}
        if kind == "program":
            return
        element = f"{kind}={_quoted(name)}"
        if kind == "topology" and parent is not None:
            self.is_ordered = parent.is_owned
            if self.is_ordered:
                number = parent._topologies[name] = parent._topologies.get(name, 0) + 1
                element += f"#{number}" if number > 1 else ""
            else:
                element += "?"
        elif kind in ("step", "batch"):
            self.steps = (*self.steps, name if kind == "step" else f"batch-{name}")
        self.path = f"{self.path}/{element}" if self.path else element

    def __repr__(self) -> str:
        return f"<place {self.path or 'outside of steps'}>"

    @property
    def is_owned(self) -> bool:
        """Whether the calling thread began this place."""
        return self._owner is _thread.mark

    @property
    def owners(self) -> set[ThreadMark]:
        """The calling thread, and the threads that began this place and the enclosing places."""
        owners = {_thread.mark}
        place: Place | None = self
        while place is not None:
            owners.add(place._owner)
            place = place.parent
        return owners

    def is_within(self, outer: Place) -> bool:
        """Whether this place is `outer`, or is inside it."""
        place: Place | None = self
        while place is not None:
            if place is outer:
                return True
            place = place.parent
        return False

    def is_ordered_within(self, outer: Place) -> bool:
        """Whether this place has the same path below `outer` in every run."""
        place: Place | None = self
        while place is not None and place is not outer:
            if not place.is_ordered:
                return False
            place = place.parent
        return True


#: The innermost place of this thread. A new thread is in no place, unless `Topology.wrap` copies the place to it.
PLACE: Final[contextvars.ContextVar[Place | None]] = contextvars.ContextVar("stagecrew_place", default=None)


def current_place() -> Place | None:
    """The innermost place of this thread that has not ended, or None."""
    place = PLACE.get()
    while place is not None and place.ended:
        place = place.parent
    return place


def this_thread() -> ThreadMark:
    """The mark of the calling thread."""
    return _thread.mark


class Uses:
    """Creates the keys of the operators' uses in one topology, or in the application. Not thread-safe.

    A key consists of the path of the place inside the topology, the operator's name, and either the ordinal of the use
    or the name that the user gave it.
    """

    def __init__(self, scope: Place, is_application: bool = False) -> None:
        self._scope, self._is_application = scope, is_application
        self._counts: dict[str, int] = {}
        self._named: set[str] = set()

    def key(self, operator: str, name: str | None = None, otherwise: str | None = None) -> str:
        """Returns the key of a new use in the current place of the calling thread.

        Args:
            operator: The operator's name.
            name: The name of the use, if it has one.
            otherwise: The name of the use if it has no other name, and the order of uses here differs from run to run.

        Raises:
            OperatorMisused: The use needs a name and has none, because the order of uses differs from run to run; or
                its name is taken.
        """
        place, is_ordered = self.here()
        if name is None and not is_ordered:
            name = otherwise
        path = self._path(place)
        prefix = f"{path}:{_quoted(operator)}" if path else _quoted(operator)
        if name is not None:
            key = f"{prefix}/name={_quoted(name)}"
            if key in self._named:
                raise OperatorMisused(
                    f"operator {operator!r} already has a use with name={name!r} in this place; give each use a unique "
                    f"name. In foreachBatch, where Spark may execute a batch again, use the operator in job.batch"
                )
            self._named.add(key)
            return key
        if not is_ordered:
            raise OperatorMisused(
                f"operator {operator!r} is used in a thread other than the one that began {_named(place)}, such as in "
                f"a thread pool or in foreachBatch. The order of threads differs from run to run, so give this use a "
                f"name=, or use the operator in job.step or job.batch"
            )
        number = self._counts[prefix] = self._counts.get(prefix, 0) + 1
        return f"{prefix}/{number}"

    def free_name(self, key: str) -> None:
        """Frees the name in the key of a use that was not created. Ordinals stay counted."""
        self._named.discard(key)

    def here(self) -> tuple[Place, bool]:
        """The current place of the calling thread, and whether every run creates the uses in it in the same order."""
        scope, place = self._scope, current_place()
        if place is None or not (self._is_application or place.is_within(scope)):
            place = scope  # the thread is in no place, or its place is not inside the topology
        return place, place.is_owned and place.is_ordered_within(scope)

    def forget(self, place: Place) -> None:
        """Forgets the uses in this place: they are numbered from 1 again, and their names are free."""
        path = self._path(place)
        inside = f"{path}/", f"{path}:"
        self._counts = {prefix: count for prefix, count in self._counts.items() if not prefix.startswith(inside)}
        self._named = {key for key in self._named if not key.startswith(inside)}

    def is_in(self, key: str, place: Place) -> bool:
        """Whether this is the key of a use in this place, or in a place inside it."""
        path = self._path(place)
        return key.startswith((f"{path}/", f"{path}:"))

    def _path(self, place: Place) -> str:
        """The path of a place below this topology."""
        outer = self._scope.path
        return place.path[len(outer) + 1 :] if outer and place.is_within(self._scope) else place.path


def unused(operator: str) -> str:
    """The key of a coordinator that was created before the session was running, until its first use."""
    return f"{_quoted(operator)}/{_UNUSED}"


def operator_of(key: str) -> str:
    """Returns the name of the operator from the key of a use."""
    return urllib.parse.unquote(key.rpartition(":")[2].rpartition("/")[0])


def _named(place: Place) -> str:
    return {"program": "the session"}.get(place.kind, f"{place.kind} {place.name!r}")


def _quoted(text: str) -> str:
    """Replaces the characters that separate the parts of a key."""
    for character in "%/:#?=":
        text = text.replace(character, f"%{ord(character):02X}")
    return text
