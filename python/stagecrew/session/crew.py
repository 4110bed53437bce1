"""The crew of one application: its listeners, coordinators and topologies, from the session's start to its stop."""

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
from stagecrew.observability.notebook import one_line, public_names
from stagecrew.operators.commit_log import MemoryCommitLog
from stagecrew.partitions.report import PartitionReport, Release, policy
from stagecrew.session.active_topologies import ActiveTopologies
from stagecrew.session.application import APPLICATION, Application
from stagecrew.session.connection import PluginConnection
from stagecrew.session.registration import checked, class_names, description_frame, pickled
from stagecrew.session.reports import TopologyReport, reports_table, topology_frame
from stagecrew.session.topology import Topology

if TYPE_CHECKING:
    import pandas as pd

    from stagecrew.coordination.checkpoints import Checkpoint
    from stagecrew.coordination.operator import Operator

__all__ = ["Crew"]

_log = logging.getLogger("stagecrew")


class Crew:
    """Coordinates one Spark application. `stagecrew.crew(spark)` returns it.

    Examples:
        crew = stagecrew.crew(spark)
        with crew.topology("enrich", listeners=[orders]):
            flights.mapInArrow(enrich, schema).write.parquet(path)
    """

    def __init__(self, context: SparkContext, facade: Any) -> None:
        self.connection = PluginConnection(context, facade)
        self.application = Application()
        self.topologies = ActiveTopologies(self.connection, self.application.place)
        #: The commit log for commits without a `commit_log` argument.
        self.commit_log = MemoryCommitLog()
        self._registered: tuple[Listener, ...] | None = None
        if (
            str(context.master).startswith("local")
            and "PYSPARK_PYTHON" not in os.environ
            and context.getConf().get("spark.pyspark.python") is None
        ):
            context.pythonExec = sys.executable
        self._traceparent = ""
        #: Whether this session started the tracing. The process of a stored job starts it earlier.
        self._started_tracing = False
        if self.connection.is_traced:
            self._trace()
        self._drain_before_stop()

    def __repr__(self) -> str:
        if not self.running:  # a SparkContext that has stopped no longer knows the application's id
            return one_line("crew", str(self.context.appName), ["stopped"])
        active = ", ".join(topology.name for topology in self.active)
        parts = (str(self.context.applicationId), f"active: {active}" if active else "")
        return one_line("crew", str(self.context.appName), parts)

    def _repr_html_(self) -> str:
        return reports_table(repr(self), self.reports if self.running else [])

    def __dir__(self) -> list[str]:
        return public_names(self)

    @property
    def context(self) -> SparkContext:
        """The SparkContext of the application."""
        return self.connection.context

    @property
    def running(self) -> bool:
        """Whether the SparkContext is running."""
        return self.connection.running

    @property
    def active(self) -> tuple[Topology, ...]:
        """The active topologies of all threads, in the order in which they began: outer ones come first."""
        return tuple(cast("Topology", topology) for topology in self.topologies.all if topology.is_active)

    def close_all(self) -> None:
        """Closes all active topologies of all threads, the last one first. Use it in a notebook after a failed cell.

        It cancels everything that is still running in them, like `close(cancel=True)`. Each topology takes at most
        three times `spark.stagecrew.close.timeout` plus 5 s: its jobs, its coordinators and its listeners each have
        one timeout. If closing a topology raises an error, this closes the others too, and then raises the first
        error.

        Examples:
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
        progress: bool = False,
    ) -> Topology:
        """Creates a topology with these listeners. It begins with `with` or `start`.

        Args:
            name: Shown in logs and in the UI. It need not be unique.
            listeners: They open before the topology's first task on each worker or executor, and close after its
                last. The listeners of outer topologies are also open for its tasks.
            jvm_listeners: Names of classes that implement `stagecrew.TopologyListener`.
            release: Which of the topology's stored partitions are deleted when it ends: "shuffles", "all" or "none".
            progress: Whether to show the topology's listeners, coordinators and partitions while it runs, on stderr or
                in the notebook. The display is updated every second. It never fails the topology.

        Returns:
            The topology, which has not begun yet.

        Raises:
            ListenerError: An element of `listeners` is not a listener.
            ListenerError: A listener cannot be pickled.
            ConfigurationError: `name`, `jvm_listeners` or `release` is wrong.
            NotActive: The session has stopped.

        Examples:
            with crew.topology("enrich", listeners=[orders]) as topology:
                flights.mapInArrow(enrich, schema).write.parquet(path)
        """
        self.connection.require_running()
        every = checked(listeners)
        pickled(every)
        return Topology(
            self.connection, self.topologies, self.commit_log, name, every, class_names(jvm_listeners),
            policy(release), progress,
        )  # fmt: skip

    @property
    def reports(self) -> list[TopologyReport]:
        """The reports of all topologies that the driver still knows. The application's report is first."""
        return self.connection.reports()

    def reports_frame(self) -> pd.DataFrame:
        """The reports of all topologies that the driver still knows, as a DataFrame of pandas.

        Returns:
            One row for each topology, the application first. Durations are in seconds, and sizes in bytes.

        Raises:
            NotActive: The session has stopped.

        Examples:
            frame = crew.reports_frame()
            print(frame[["name", "seconds", "opens", "closes"]])
        """
        return topology_frame(self.reports)

    def partitions(self) -> list[PartitionReport]:
        """The partitions that topologies have stored on each executor, as the executors last reported them.

        Includes all topologies that the driver still knows.

        Returns:
            One report for each topology and executor.
        """
        return [one for report in self.reports for one in report.partitions]

    def report(self, topology: str) -> TopologyReport | None:
        """The report of one topology.

        Args:
            topology: The id of the topology. The id of the application topology is "application".

        Returns:
            The report, or None if the driver does not know the topology, or no longer knows it.
        """
        return self.connection.report(topology)

    def operator(self, name: str) -> Operator:
        """Returns an operator of the application, whose coordinator was passed to `configure`. All tasks may use it.

        Bind it to datasets like an operator of `Topology.coordinate`. When its coordinator fails, the tasks that use it
        fail with the coordinator's error.

        Args:
            name: The name of the operator.

        Returns:
            The operator.

        Raises:
            OperatorMisused: The application has no operator of this name.
            CoordinatorFailed: Its coordinator has failed.
            NotActive: The session has stopped.

        Examples:
            budget = crew.operator("budget")
        """
        from stagecrew.coordination.operator import Operator

        self.connection.require_running()
        factory = self.application.coordinators.get(name)
        if factory is None:
            known = ", ".join(map(repr, self.application.coordinators)) or "none"
            raise OperatorMisused(
                f"the application has no operator {name!r}; its operators are: {known}. Pass the coordinator to "
                f"stagecrew.configure(builder, coordinators={{{name!r}: ...}}), or use topology.coordinate"
            )
        self.application.operators.raise_failure()
        return Operator(self.application, name, factory)

    def checkpoint(self, checkpoint_id: int | None = None, timeout: float = 30.0) -> Checkpoint:
        """Takes a checkpoint of the coordinators that were passed to `configure`. See `Topology.checkpoint`.

        Pass the result to `configure` as `restore` in the next session.

        Args:
            checkpoint_id: Must be larger than that of the last checkpoint; by default the next number.
            timeout: The time that all coordinators together may take, in seconds.

        Returns:
            The states.

        Raises:
            CheckpointFailed: The id is not larger than the last one, or a coordinator declined, returned an invalid
                state or was reset.
            CheckpointTimeout: A state or an acknowledgement did not arrive in time.
            CoordinatorFailed: A coordinator has failed.
            NotActive: The session has stopped.

        Examples:
            saved = crew.checkpoint().to_bytes()
        """
        self.connection.require_running()
        return self.application.operators.checkpoint(checkpoint_id, timeout)

    def _register(self, listeners: tuple[Listener, ...], application: Application) -> None:
        """Registers the listeners and coordinators of the application. `configure` calls it before the first task."""
        if self._registered is not None:
            self._require_registered(listeners, application.coordinators)
            return
        coordinated = bool(application.coordinators)
        self.connection.register_application(
            description_frame(
                self.context, APPLICATION, APPLICATION, None, listeners, (), coordinated, traceparent=self._traceparent
            )
        )
        for listener in listeners:
            listener._stagecrew.note_registration("the application", APPLICATION)
        self._registered = listeners
        self.application = application
        self.topologies.application_place = application.place
        application.begin(self.connection)

    def _require_registered(self, listeners: tuple[Listener, ...], coordinators: Iterable[str]) -> None:
        """Raises `ConfigurationError` unless the application already has all of these listeners and coordinators."""
        registered = self._registered or ()
        missing = []
        for one in listeners:
            try:
                found = chosen(one._stagecrew, registered, lambda other: other._stagecrew)
            except RedefinedError:
                found = None
            if found is None:
                missing.append(one)
        if missing:
            names = ", ".join(map(listener_name, missing))
            raise ConfigurationError(
                f"the application is already running, and its listeners cannot change; it does not have: {names}. Stop "
                f"the session first, or use a topology: crew.topology(..., listeners=[...])"
            )
        if unknown := [name for name in coordinators if name not in self.application.coordinators]:
            raise ConfigurationError(
                f"the application is already running, and its coordinators cannot change; it does not have: "
                f"{', '.join(unknown)}. Stop the session first, or use topology.coordinate(...)"
            )

    def _drain_before_stop(self) -> None:
        stop = self.context.stop

        def drained_stop() -> None:
            if self.running:
                self._close_coordinators()
                try:
                    self.connection.drain()
                except Exception as error:  # the JVM may have ended, and `stop` must still do the rest
                    _log.warning("the listeners could not be closed before the session stops: %s", error)
                self.connection.close_channel()
                self._end_tracing()
            stop()

        self.context.stop = drained_stop  # type: ignore[method-assign]

    def _trace(self) -> None:
        from stagecrew.session import tracing

        current = tracing.current()
        self._started_tracing = current is None
        self.connection.tracing = current or tracing.start(str(self.context.appName))
        self._traceparent = self.connection.tracing.connect(self.connection)

    def _end_tracing(self) -> None:
        tracing, self.connection.tracing = self.connection.tracing, None
        if tracing is not None:
            tracing.disconnect()
            if self._started_tracing:
                tracing.stop()

    def _close_coordinators(self) -> None:
        every = [topology.operators for topology in reversed(self.topologies.all)]
        for operators in (*every, self.application.operators):
            operators.close("the session stops")
            self.connection.send_last_statistics(operators)
