"""The application topology, with the coordinators that were passed to `configure`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from stagecrew.coordination.checkpoints import NOTHING
from stagecrew.coordination.operators import Factory, Operators
from stagecrew.coordination.program_path import Place, Uses
from stagecrew.errors import CoordinatorFailed
from stagecrew.observability.error_summary import error_text

if TYPE_CHECKING:
    from stagecrew.coordination.binding_table import QueryCheck
    from stagecrew.coordination.checkpoints import Checkpoint
    from stagecrew.coordination.host import Host
    from stagecrew.session.connection import PluginConnection

__all__ = ["APPLICATION", "Application"]

#: The id and the name of the application topology.
APPLICATION: Final = "application"


class Application:
    """The topology that spans the whole application. Its coordinators are created before Spark starts."""

    name = id = APPLICATION

    def __init__(self, coordinators: Mapping[str, Factory] | None = None, restore: Checkpoint | None = None) -> None:
        self.coordinators = dict(coordinators or {})
        self.connection: PluginConnection | None = None
        #: The place in the program outside of steps and topologies. It belongs to the thread that starts the session.
        self.place = Place()
        self.operators = Operators(
            self,
            lambda: 30.0 if self.connection is None else self.connection.close_timeout,
            uses=Uses(self.place, is_application=True),
        )
        try:
            for name, factory in self.coordinators.items():
                try:
                    self.operators.prepare(name, factory, restore or NOTHING)
                except Exception as error:
                    restored = "" if restore is None else f", or restored from checkpoint {restore.id}"
                    raise CoordinatorFailed(
                        f"the coordinator of operator {name!r} cannot be created{restored}: "
                        f"{error_text(error)}. Spark was not started"
                    ) from error
        except BaseException:
            self.operators.close("the session did not start")
            raise

    def __repr__(self) -> str:
        return "the application"

    @property
    def is_active(self) -> bool:
        """Whether the session is running."""
        return self.connection is not None and self.connection.running

    def begin(self, connection: PluginConnection) -> None:
        """Starts the coordinators. Called once the session is running."""
        self.connection = connection
        if self.coordinators:
            self.operators.begin(connection.host())

    def host(self) -> Host:
        """The host of the application's coordinators."""
        assert self.connection is not None
        return self.connection.host()

    @property
    def request_timeout(self) -> float:
        """How long tasks wait for a reply from their coordinator, in seconds."""
        assert self.connection is not None
        return self.connection.request_timeout

    def streaming_query(self) -> QueryCheck | None:
        """Returns a function that checks whether the streaming query that called this thread is still running.

        Returns None in a thread that no streaming query called.
        """
        return None if self.connection is None else self.connection.streaming_query()

    def cancel_failed(self, cause: BaseException) -> None:
        """Does nothing. A failed coordinator fails only the tasks that use it; other jobs continue."""
