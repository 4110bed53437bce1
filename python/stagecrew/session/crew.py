"""The crew of one application: what talks to the plugin on the driver, from the session's begin to its stop."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

from pyspark import SparkContext

from stagecrew.errors import ConfigurationError, OperatorMisused
from stagecrew.listeners.identity import RedefinedError, chosen
from stagecrew.listeners.listener import Listener, listener_name
from stagecrew.operators.commit_log import MemoryCommitLog
from stagecrew.partitions.report import PartitionReport, Release, policy
from stagecrew.session.active_topologies import ActiveTopologies
from stagecrew.session.application import APPLICATION, Application
from stagecrew.session.connection import PluginConnection
from stagecrew.session.registration import checked, class_names, describe, pickled
from stagecrew.session.reports import TopologyReport
from stagecrew.session.topology import Topology

if TYPE_CHECKING:
    from stagecrew.coordination.checkpoints import Checkpoint
    from stagecrew.coordination.operator import Operator

__all__ = ["Crew"]

_log = logging.getLogger("stagecrew")


class Crew:
    """What coordinates one Spark application. Made by `stagecrew.crew(spark)`."""

    def __init__(self, context: SparkContext, facade: Any) -> None:
        self.connection = PluginConnection(context, facade)
        self.application = Application()
        self.topologies = ActiveTopologies(self.connection, self.application.place)
        #: Of commits that are given no others.
        self.commit_log = MemoryCommitLog()
        self._registered: tuple[Listener, ...] | None = None
        if (
            str(context.master).startswith("local")
            and "PYSPARK_PYTHON" not in os.environ
            and context.getConf().get("spark.pyspark.python") is None
        ):
            context.pythonExec = sys.executable
        self._drain_before_stop()

    @property
    def context(self) -> SparkContext:
        """The SparkContext of the application."""
        return self.connection.context

    @property
    def running(self) -> bool:
        """Whether the SparkContext has not stopped."""
        return self.connection.running

    @property
    def active(self) -> tuple[Topology, ...]:
        """The topologies that are active, in all threads: in the order in which they began, so that outer ones come first."""
        return tuple(cast("Topology", topology) for topology in self.topologies.all if topology.is_active)

    def close_all(self) -> None:
        """Closes every active topology, of all threads, the last one first; for notebooks, after a cell that failed.

        It cancels what still runs of them, as `close(cancel=True)`, so each takes at most twice `spark.stagecrew.close.timeout`
        and 5 s. When one raises, it closes the others too, and then raises the first error.

        Example:
            crew.close_all()
            topology = crew.topology("explore", listeners=[orders]).start()
        """
        errors: list[Exception] = []
        for topology in reversed(self.active):
            try:
                topology.close(cancel=True)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def topology(
        self,
        name: str,
        listeners: Iterable[Listener] = (),
        jvm_listeners: Iterable[str] = (),
        release: Release | str = Release.SHUFFLES,
    ) -> Topology:
        """A new topology with these listeners; it begins with `with` or `start`.

        `name` is shown in logs and in the UI and may be used again; `jvm_listeners` are names of classes that implement
        `stagecrew.TopologyListener`. A topology that begins inside another is covered by the outer one's listeners too.
        `release` is what of its stored partitions goes when it ends: "shuffles", "all" or "none".

        Raises `ListenerError`, `ListenerNotPicklable` and `ConfigurationError`, `NotActive` after the session has stopped.
        """
        self.connection.require_running()
        every = checked(listeners)
        pickled(every)
        return Topology(
            self.connection, self.topologies, self.commit_log, name, every, class_names(jvm_listeners), policy(release)
        )

    @property
    def reports(self) -> list[TopologyReport]:
        """Of every topology that the driver remembers, the application's first."""
        return self.connection.reports()

    def partitions(self) -> list[PartitionReport]:
        """What topologies have stored on each executor, as these said last; of all that the driver remembers."""
        return [one for report in self.reports for one in report.partitions]

    def report(self, topology: str) -> TopologyReport | None:
        """Of one topology by its id; None when it is not known (any more). The application's is `application`."""
        return self.connection.report(topology)

    def operator(self, name: str) -> Operator:
        """An operator of the application, whose coordinator was given to `configure`; for tasks of any topology, or of none.

        Bind it as one of `Topology.coordinate`. When its coordinator fails, the tasks that use it fail by its reason.

        Raises `OperatorMisused` when there is none of this name, `CoordinatorFailed` when it failed, and `NotActive`.
        """
        from stagecrew.coordination.operator import Operator

        self.connection.require_running()
        factory = self.application.coordinators.get(name)
        if factory is None:
            known = ", ".join(map(repr, self.application.coordinators)) or "none"
            raise OperatorMisused(
                f"the application has no operator {name!r}, but {known}: give its coordinator to stagecrew.configure(builder, "
                f"coordinators={{{name!r}: ...}}), or use topology.coordinate"
            )
        self.application.operators.raise_failure()
        return Operator(self.application, name, factory)

    def checkpoint(self, checkpoint_id: int | None = None, timeout: float = 30.0) -> Checkpoint:
        """The states of the coordinators that were given to `configure`, which takes it as `restore` in the next session.

        As `Topology.checkpoint`. Raises `CheckpointFailed`, `CoordinatorFailed` and `NotActive`.
        """
        self.connection.require_running()
        return self.application.operators.checkpoint(checkpoint_id, timeout)

    def register(self, listeners: tuple[Listener, ...], application: Application) -> None:
        """Gives the application its listeners and coordinators; before its first task, by `configure`."""
        if self._registered is not None:
            self.already_has(listeners, application.coordinators)
            return
        coordinated = bool(application.coordinators)
        self.connection.register_application(
            describe(self.context, APPLICATION, APPLICATION, None, listeners, (), coordinated)
        )
        for listener in listeners:
            listener._stagecrew.registered_for("the application", APPLICATION)
        self._registered = listeners
        self.application = application
        self.topologies.application_place = application.place
        application.begin(self.connection)

    def already_has(self, listeners: tuple[Listener, ...], coordinators: Iterable[str]) -> None:
        """Raises `ConfigurationError` unless all of these are the application's listeners, and operators with coordinators."""
        mine = self._registered or ()
        missing = []
        for one in listeners:
            try:
                found = chosen(one._stagecrew, mine, lambda other: other._stagecrew)
            except RedefinedError:
                found = None
            if found is None:
                missing.append(one)
        if missing:
            names = ", ".join(map(listener_name, missing))
            raise ConfigurationError(
                f"the application runs already, and its listeners cannot change any more; not among them: {names}. Stop the "
                f"session first, or use a topology: crew.topology(..., listeners=[...])"
            )
        if unknown := [name for name in coordinators if name not in self.application.coordinators]:
            raise ConfigurationError(
                f"the application runs already, and its coordinators cannot change any more; not among them: "
                f"{', '.join(unknown)}. Stop the session first, or use topology.coordinate(...)"
            )

    def _drain_before_stop(self) -> None:
        stop = self.context.stop

        def drained_stop() -> None:
            if self.running:
                self._close_coordinators()
                try:
                    self.connection.drain()
                except Exception as error:  # the JVM may be gone: the user's stop must still do what it can
                    _log.warning("closing listeners before the session stops failed: %s", error)
                self.connection.close_channel()
            stop()

        self.context.stop = drained_stop  # type: ignore[method-assign]

    def _close_coordinators(self) -> None:
        every = [topology.operators for topology in reversed(self.topologies.all)]
        for operators in (*every, self.application.operators):
            operators.close("the session stops")
            self.connection.send_last_statistics(operators)
