"""The active topologies, and the topologies that each thread is in.

Spark copies the topology of a thread to the threads, jobs and queries that it starts.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from stagecrew.coordination.program_path import Place, current_place
from stagecrew.listeners.resolution import LEFT, PROPERTY

if TYPE_CHECKING:
    from stagecrew.coordination.operators import Operators
    from stagecrew.session.connection import PluginConnection

__all__ = ["PROPERTY", "ActiveTopologies", "TopologyNode"]

#: For error messages, tasks receive the ids of this many of the last topologies that ended in the thread of their
#: action.
_REMEMBERED: Final = 5
#: The local property with the description of jobs, which Spark's pages show.
_DESCRIPTION: Final = "spark.job.description"


class TopologyNode:
    """A topology as a node of the tree of topologies: its identity, its state, its parent and where it began."""

    operators: Operators

    def __init__(self, name: str, id_: str, has_listeners: bool) -> None:
        self.name, self.id = name, id_
        self.tag = f"stagecrew-{id_}"
        self.has_listeners = has_listeners
        #: `new`, `active`, `closing` or `closed`.
        self._state = "new"
        #: Whether `start` began it. Otherwise a `with` statement did.
        self.by_start = False
        self.parent: TopologyNode | None = None
        #: The place in the program where the topology began.
        self.place = Place()

    @property
    def is_active(self) -> bool:
        """Whether the topology has begun and not yet started to close."""
        return self._state == "active"

    @property
    def has_ended(self) -> bool:
        """Whether the topology is closed. The exit of an outer topology may have closed it."""
        return self._state == "closed"


class _ThreadState(threading.local):
    """The topologies that one thread has entered."""

    def __init__(self) -> None:
        #: The innermost is last.
        self.entered: list[TopologyNode] = []
        #: The value of the local property before this thread entered the first of them, and the active topology with
        #: this id, or None.
        self.inherited_property: str | None = None
        self.inherited: TopologyNode | None = None
        #: The description of Spark's jobs that stagecrew has set for this thread, and the operator that it names.
        self.description: str | None = None
        self.operator: str | None = None
        #: The ids of topologies with listeners that ended in this thread.
        self.ended_here: list[str] = []


class ActiveTopologies:
    """The active topologies of an application, and the topologies that each thread is in.

    Each thread has a Spark local property with the id of its innermost active topology, and one job tag for each of its
    active topologies. When a thread enters or leaves a topology, it also removes the property and the tags of
    topologies that have ended, even if they ended in another thread or in another order.
    """

    def __init__(self, connection: PluginConnection, application_place: Place) -> None:
        self._connection = connection
        #: The place of threads that are not in a topology.
        self.application_place = application_place
        #: The topologies that have begun and not ended, in the order in which they began.
        self._active: list[TopologyNode] = []
        self._thread = _ThreadState()

    # -- Of the application

    @property
    def all(self) -> tuple[TopologyNode, ...]:
        """The topologies that have begun and not ended, outer ones first."""
        return tuple(self._active)

    def add(self, topology: TopologyNode) -> None:
        """Adds a topology that has begun, and keeps a reference to it."""
        self._active.append(topology)

    def remove(self, topology: TopologyNode) -> None:
        """Removes a topology that has ended. Has no effect if it is already removed."""
        with contextlib.suppress(ValueError):
            self._active.remove(topology)

    def inside(self, topology: TopologyNode) -> Iterator[TopologyNode]:
        """The active topologies that began inside this one, at any depth."""
        for other in self.all:
            if other.parent is topology and other.is_active:
                yield other
                yield from self.inside(other)

    # -- Of the calling thread

    @property
    def innermost(self) -> TopologyNode | None:
        """The innermost active topology of this thread, which may have inherited it from the thread that started it."""
        mine = self._thread
        for topology in reversed(mine.entered):
            if topology.is_active:
                return topology
        outer = mine.inherited if mine.entered else self._by_id(self._property())
        return outer if outer is not None and outer.is_active else None

    @property
    def place(self) -> Place:
        """The place in the program where this thread is. For a thread that Spark started, the place of its topology."""
        place = current_place()
        if place is None:
            topology = self.innermost
            place = self.application_place if topology is None else topology.place
        return place

    def is_in_started(self, name: str) -> bool:
        """Whether this thread is in an active topology of this name that `start` began."""
        candidates = [*self._thread.entered]
        outer = self.innermost
        while outer is not None:
            candidates.append(outer)
            outer = outer.parent
        return any(one.name == name and one.by_start and one.is_active for one in candidates)

    def enter(self, topology: TopologyNode) -> None:
        """Puts this thread into the topology: Spark jobs that it starts from now on belong to it."""
        self._remove_ended()
        mine, context = self._thread, self._connection.context
        if not mine.entered:
            mine.inherited_property = self._property()
            mine.inherited = self._by_id(mine.inherited_property)
        mine.entered.append(topology)
        context.setLocalProperty(PROPERTY, topology.id)
        context.addJobTag(topology.tag)
        self._describe_jobs()

    def leave(self, topology: TopologyNode) -> None:
        """Undoes `enter`. If this thread has not entered the topology, it only removes topologies that have ended."""
        mine = self._thread
        for i in reversed(range(len(mine.entered))):
            if mine.entered[i] is topology:
                del mine.entered[i]
                self._remove_ended(topology)
                return
        self._remove_ended()

    @contextlib.contextmanager
    def describing(self, operator: str) -> Iterator[None]:
        """While it is open, the descriptions of this thread's jobs name the operator that runs them."""
        mine = self._thread
        outer, mine.operator = mine.operator, operator
        try:
            self._describe_jobs()
            yield
        finally:
            mine.operator = outer
            with contextlib.suppress(Exception):  # the JVM may be gone, and the caller's own error is more useful
                if self._connection.running:
                    self._describe_jobs()

    def _remove_ended(self, *left: TopologyNode) -> None:
        """Removes the property and tags of topologies that this thread left, and of those that ended in any thread."""
        mine, context = self._thread, self._connection.context
        ended = [topology for topology in mine.entered if topology.has_ended]
        if not (left or ended):
            return
        mine.entered = [topology for topology in mine.entered if not topology.has_ended]
        if not self._connection.running:
            return
        if ids := [one.id for one in dict.fromkeys((*left, *ended)) if one.has_ended and one.has_listeners]:
            mine.ended_here = [*mine.ended_here, *ids][-_REMEMBERED:]
            context.setLocalProperty(LEFT, " ".join(mine.ended_here))
        for topology in {*left, *ended}:
            # A topology that was entered twice, or inherited, keeps the tag of its outer entry.
            if topology.has_ended or not (topology in mine.entered or topology is mine.inherited):
                context.removeJobTag(topology.tag)
        innermost = mine.entered[-1].id if mine.entered else self._outer_property()
        context.setLocalProperty(PROPERTY, innermost)  # type: ignore[arg-type]
        self._describe_jobs()

    def _describe_jobs(self) -> None:
        """Describes the jobs of this thread by its innermost topology and the operator that runs them.

        Does nothing if the user or Spark has described them.
        """
        mine, context = self._thread, self._connection.context
        if context.getLocalProperty(_DESCRIPTION) in (None, mine.description):
            operator = f": {mine.operator}" if mine.operator is not None else ""
            mine.description = f"topology {mine.entered[-1].name}{operator}" if mine.entered else None
            context.setLocalProperty(_DESCRIPTION, mine.description)  # type: ignore[arg-type]

    def _outer_property(self) -> str | None:
        """The value of the property after this thread has left all topologies that it entered."""
        outer = self._thread.inherited
        if outer is None:
            return self._thread.inherited_property
        while outer is not None and outer.has_ended:
            outer = outer.parent
        return None if outer is None else outer.id

    def _property(self) -> str | None:
        return self._connection.context.getLocalProperty(PROPERTY)

    def _by_id(self, id_: str | None) -> TopologyNode | None:
        return next((topology for topology in self.all if topology.id == id_), None)
