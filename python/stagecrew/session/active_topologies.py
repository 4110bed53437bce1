"""Which topologies a thread is in: the marks that Spark copies to all that the thread starts."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from stagecrew.listeners.listener import LEFT, PROPERTY

if TYPE_CHECKING:
    from stagecrew.session.crew import Crew
    from stagecrew.session.topology import Topology

__all__ = ["PROPERTY", "ActiveTopologies"]

#: How many of the topologies that a thread has left it remembers, for errors.
_REMEMBERED: Final = 5


class ActiveTopologies(threading.local):
    """Which topologies this thread is in, innermost last, as the mark that Spark copies to all that the thread starts.

    The mark is a local property with the innermost topology that is active, and a job tag of each. Whatever order they are
    left in, and wherever they end, a thread that enters or leaves one bears no mark of one that has ended.
    """

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._inside: list[Topology] = []
        #: The property as it was before the outermost of them, and the topology that it named, if that was active.
        self._before: str | None = None
        self._around: Topology | None = None
        #: Topologies with listeners that ended in this thread, by their ids.
        self._left: list[str] = []

    @property
    def innermost(self) -> Topology | None:
        """The active topology that this thread is in; also one whose mark it inherited from another thread."""
        for topology in reversed(self._inside):
            if topology.is_active:
                return topology
        around = self._around if self._inside else self._named(self._crew.context.getLocalProperty(PROPERTY))
        return around if around is not None and around.is_active else None

    def started(self, name: str) -> bool:
        """Whether this thread is in an active topology of this name that began by `start`."""
        inside = [*self._inside]
        around = self.innermost
        while around is not None:
            inside.append(around)
            around = around.parent
        return any(one.name == name and one.by_start and one.is_active for one in inside)

    def enter(self, topology: Topology) -> None:
        """What the thread starts from here on belongs to the topology."""
        self._take_off()
        if not self._inside:
            self._before = self._crew.context.getLocalProperty(PROPERTY)
            self._around = self._named(self._before)
        self._inside.append(topology)
        self._crew.context.setLocalProperty(PROPERTY, topology.id)
        self._crew.context.addJobTag(topology.tag)

    def leave(self, topology: Topology) -> None:
        """As it was before; only what has ended is taken off when this thread is not in the topology."""
        for i in reversed(range(len(self._inside))):
            if self._inside[i] is topology:
                del self._inside[i]
                self._take_off(topology)
                return
        self._take_off()

    def _take_off(self, *left: Topology) -> None:
        """The marks of these, and of all that have ended, wherever they did."""
        ended = [topology for topology in self._inside if topology.has_ended]
        if not (left or ended):
            return
        self._inside = [topology for topology in self._inside if not topology.has_ended]
        if not self._crew.running:
            return
        if ids := [
            topology.id for topology in dict.fromkeys((*left, *ended)) if topology.has_ended and topology.listens
        ]:
            self._left = [*self._left, *ids][-_REMEMBERED:]
            self._crew.context.setLocalProperty(LEFT, " ".join(self._left))
        for topology in {*left, *ended}:
            # Entered twice, or inherited: the mark is still that of the outer one.
            if topology.has_ended or not (topology in self._inside or topology is self._around):
                self._crew.context.removeJobTag(topology.tag)
        self._crew.context.setLocalProperty(PROPERTY, self._inside[-1].id if self._inside else self._outside())  # type: ignore[arg-type]

    def _outside(self) -> str | None:
        around = self._around
        if around is None:
            return self._before
        while around is not None and around.has_ended:
            around = around.parent
        return None if around is None else around.id

    def _named(self, mark: str | None) -> Topology | None:
        return next((topology for topology in tuple(self._crew._active) if topology.id == mark), None)
