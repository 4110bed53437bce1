"""The lifecycle of listeners in one process, as a pure state machine: no Spark, no socket, no clock.

The worker and the executor's agent drive it; user code is called through `Hooks`. What must hold:

* a listener is opened at most once until it is closed, and closed exactly once for each attempted open;
* listeners open in the order of their topologies in the chain, and within one as registered; they close in reverse;
* decorations are entered in that order and left in reverse, exactly once, whatever happens in between;
* a topology that is in use by the current task is not closed before that task has ended;
* a `close`, or an exit from `decorate`, that fails does not prevent the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from stagecrew.listeners.identity import Identity, RedefinedError, chosen
from stagecrew.listeners.listener import Listener, decorates
from stagecrew.listeners.not_open import NotRegisteredError
from stagecrew.listeners.resource import opened_value

__all__ = ["Hooks", "Lifecycle", "RegisteredListener", "State", "TopologyDescription"]

Leave = Callable[[BaseException | None], None]

#: Why a listener is not the open listener of the same name.
_REDEFINED: Final = (
    "its definition was run again with different code, as in a notebook cell, and the topology that is open has the "
    "earlier one. Close that topology (`topology.close()`, or `crew.close_all()`), and start it again with the "
    "new listener"
)
_COPY: Final = (
    "the function has a pickled copy of it that another process made, which cannot be compared with the listener of "
    "that name here. Register that copy itself, or import the listener from a module in the function"
)


@dataclasses.dataclass(frozen=True)
class RegisteredListener:
    """One listener of one topology.

    `index` is its position in the topology's registration. `value` returns the value that another process opened.
    """

    index: int
    name: str
    identity: Identity
    required: bool
    #: None if another process opens the listener: the agent opens those with scope EXECUTOR, workers open the others.
    listener: Listener | None
    value: Callable[[], Any] | None = None


@dataclasses.dataclass(frozen=True)
class TopologyDescription:
    """A topology as a process knows it."""

    id: str
    name: str
    listeners: tuple[RegisteredListener, ...]
    #: The context of its span; None if it is not traced.
    traceparent: str | None = None


class State(enum.Enum):
    """The state of one listener in one process."""

    NEW = "new"
    OPEN = "open"
    #: Its open failed, but it is not required: tasks run without it.
    OFF = "off"


class Hooks(Protocol):
    """Calls user code. The implementation limits the time of `open` and `close`, and reports to the executor."""

    def open(self, topology: TopologyDescription, registered: RegisteredListener) -> None:
        """Calls `open`, and raises its exception."""

    def close(self, topology: TopologyDescription, registered: RegisteredListener) -> None:
        """Calls `close`. Never raises."""

    def enter(self, topology: TopologyDescription, registered: RegisteredListener, task: Any) -> Leave:
        """Enters `decorate`, and raises its exception. The result leaves the decoration, and never raises."""


class Lifecycle:
    """The listeners that are open in this process. Not thread-safe: one thread owns it."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks
        self._topologies: dict[str, TopologyDescription] = {}
        self._states: dict[tuple[str, int], State] = {}
        self._opened: list[tuple[str, int]] = []  # in the order of their opens
        self._current: tuple[str, ...] = ()
        self._running = False
        self._leaves: list[Leave] = []
        self._due: list[str] = []
        self._disowned: list[object] = []
        #: True while a listener is being closed, from before the close is recorded. A signal that asks the process to
        #: end is then only noted.
        self.closing = False

    @property
    def busy(self) -> bool:
        """Whether a task is between `begin` and `end`."""
        return self._running

    @property
    def anything_open(self) -> bool:
        """Whether any listener must still be closed."""
        return bool(self._opened)

    @property
    def open_count(self) -> int:
        """The number of listeners that must still be closed."""
        return len(self._opened)

    @property
    def has_topologies(self) -> bool:
        """Whether any topology was described, and has not been closed since."""
        return bool(self._topologies)

    def knows(self, topology: str) -> bool:
        """Whether the topology was described, and has not been closed since."""
        return topology in self._topologies

    def traceparent_of(self, topology: str) -> str | None:
        """The context of a topology's span, or None if it is not traced."""
        return self._topologies[topology].traceparent

    def name_of(self, topology: str) -> str:
        """The name that the user gave the topology."""
        return self._topologies[topology].name

    def is_open(self, topology: str, index: int) -> bool:
        """Whether this listener is open here."""
        return self._states.get((topology, index)) is State.OPEN

    def add_topology(self, topology: TopologyDescription) -> None:
        """Adds a topology. A known topology does not change."""
        self._topologies.setdefault(topology.id, topology)

    def open(self, topology: str) -> None:
        """Opens the listeners of one topology that are not open.

        Raises the exception of the first required one that fails.
        """
        described = self._topologies[topology]
        for registered in described.listeners:
            key = (topology, registered.index)
            if registered.listener is None or self._states.get(key, State.NEW) is not State.NEW:
                continue
            try:
                # Recorded before the call, so that the listener is closed however `open` ends, even by a signal.
                self._opened.append(key)
                self._hooks.open(described, registered)
            except BaseException as error:
                self._close_one(key)
                if registered.required or not isinstance(error, Exception):
                    raise
                self._states[key] = State.OFF
            else:
                self._states[key] = State.OPEN

    def begin(self, chain: Sequence[str], task: Any) -> None:
        """A task of these topologies (outermost first, all known) begins: opens and decorates, or raises.

        If it raises, it has left every decoration of this call with that exception.
        """
        if self._running:
            self.end(None)
        self._current, self._running = tuple(chain), True
        try:
            for topology in self._current:
                self.open(topology)
            for topology in self._current:
                described = self._topologies[topology]
                for registered in described.listeners:
                    if (
                        registered.listener is not None
                        and decorates(registered.listener)
                        and self.is_open(topology, registered.index)
                    ):
                        self._leaves.append(self._hooks.enter(described, registered, task))
        except BaseException as error:
            self.end(error)
            raise

    def end(self, error: BaseException | None) -> None:
        """Ends the task, with its exception or None. A second call does nothing."""
        try:
            with contextlib.ExitStack() as every:  # an interrupted one does not prevent the others
                leaves, self._leaves = self._leaves, []
                for leave in leaves:
                    every.callback(leave, error)
        finally:
            self._current, self._running = (), False

    def close(self, topology: str) -> list[str]:
        """The topology has ended: closes it, or leaves it to the next `close_due` if the current task uses it.

        Returns the ids of the topologies that this call has closed.
        """
        if topology not in self._due:
            self._due.append(topology)
        return self.close_due()

    def close_due(self) -> list[str]:
        """Closes topologies that have ended and are not in use. Returns their ids."""
        done = [topology for topology in self._due if topology not in self._current]
        try:
            self._close_where(lambda key: key[0] in done)
        finally:
            self._due = [topology for topology in self._due if topology not in done]
            for topology in done:
                self._forget(topology)
        return done

    def close_all(self) -> list[str]:
        """Closes everything before the process ends, innermost first. Returns the ids of all known topologies."""
        known = list(self._topologies)
        try:
            self.end(None)
        finally:
            try:
                self._close_where(lambda _: True)
            finally:
                for topology in known:
                    self._forget(topology)
                self._due.clear()
        return known

    def disown(self) -> None:
        """Called in a forked child. The parent leaves the decorations and closes the listeners. `find` still works."""
        # Held until the process ends: a dropped generator would run its `finally`.
        self._disowned += [*self._leaves, *self._topologies.values()]
        self._opened, self._leaves, self._due = [], [], []

    def find(self, identity: Identity) -> Any:
        """The opened value of a listener of the current task's topologies.

        The same listener is preferred, then one that the configuration registers under the same name, then one with
        the same factory and arguments. Among these, the innermost is preferred.

        Raises:
            NotRegisteredError: No such listener is registered in these topologies.
            LookupError: It is registered, but not open.
        """
        inside = [
            (self._topologies[topology], registered)
            for topology in reversed(self._current)
            for registered in self._topologies[topology].listeners
        ]
        names = [self._topologies[topology].name for topology in reversed(self._current)]
        try:
            found = chosen(identity, inside, lambda one: one[1].identity)
        except RedefinedError:
            raise NotRegisteredError(names, (), _REDEFINED) from None
        if found is not None:
            return self._answer(*found)
        alike = [registered.identity for _, registered in inside if registered.identity.factory == identity.factory]
        reason = _COPY if alike and not any(map(identity.is_comparable, alike)) else ""
        others = [
            described.name
            for described in self._topologies.values()
            if any(identity.same(registered.identity) for registered in described.listeners)
        ]
        raise NotRegisteredError(names, [registered.name for _, registered in inside], reason, others[-1:])

    def _answer(self, described: TopologyDescription, registered: RegisteredListener) -> Any:
        if registered.value is not None:
            return registered.value()
        state = self._states.get((described.id, registered.index), State.NEW)
        if registered.listener is not None and state is State.OPEN:
            return opened_value(registered.listener)
        if state is State.OFF:
            raise LookupError(f"its open failed here, and it is not required (topology {described.name!r})")
        raise LookupError(
            f"it is not open yet: listeners open in the order in which they are registered (topology "
            f"{described.name!r})"
        )

    def _close_where(self, matches: Callable[[tuple[str, int]], bool]) -> None:
        with contextlib.ExitStack() as every:  # an interrupted one does not prevent the others
            for key in self._opened:
                if matches(key):
                    every.callback(self._close_one, key)

    def _close_one(self, key: tuple[str, int]) -> None:
        if key not in self._opened:
            return
        before, self.closing = self.closing, True
        try:
            described = self._topologies[key[0]]
            registered = next(one for one in described.listeners if one.index == key[1])
            self._opened.remove(key)
            self._states.pop(key, None)
            self._hooks.close(described, registered)
        finally:
            self.closing = before

    def _forget(self, topology: str) -> None:
        self._topologies.pop(topology, None)
        for key in [key for key in self._states if key[0] == topology]:
            del self._states[key]
