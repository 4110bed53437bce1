"""The crew of one application: what talks to the plugin on the driver, from the session's begin to its stop."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from py4j.protocol import Py4JError
from pyspark import SparkContext

from stagecrew.conf import KEYS, parse_bytes, parse_seconds
from stagecrew.coordination.checkpoints import NOTHING
from stagecrew.coordination.operators import Factory, Operators
from stagecrew.coordination.program_path import Place, Uses, current_place
from stagecrew.errors import ConfigurationError, CoordinatorFailed, NotActive, OperatorMisused
from stagecrew.listeners.identity import RedefinedError, chosen
from stagecrew.listeners.listener import Listener, listener_name
from stagecrew.operators.commit_log import MemoryCommitLog
from stagecrew.partitions.report import PartitionReport, Release, policy
from stagecrew.session.active_topologies import ActiveTopologies
from stagecrew.session.registration import checked, class_names, pickled
from stagecrew.session.reports import TopologyReport
from stagecrew.session.topology import Topology
from stagecrew.wire.frames import encode

if TYPE_CHECKING:
    from stagecrew.coordination.channel import DriverChannel
    from stagecrew.coordination.checkpoints import Checkpoint
    from stagecrew.coordination.host import Host
    from stagecrew.coordination.operator import Operator

__all__ = ["Application", "Crew"]

_log = logging.getLogger("stagecrew")

#: What may travel in one frame with the largest event.
_AROUND: Final = 3 << 20
#: How long after its begin executors of an application may still come, and how long none came when all are there, in seconds.
_COME: Final = 30.0
_STABLE: Final = 3.0


class Application:
    """The topology that spans everything, with the coordinators of the session builder: they exist before Spark does."""

    name = id = "application"

    def __init__(self, coordinators: Mapping[str, Factory] | None = None, restore: Checkpoint | None = None) -> None:
        self.coordinators = dict(coordinators or {})
        self.crew: Crew | None = None
        #: The program outside of steps and topologies; the thread that starts the session began it.
        self.place = Place()
        self.operators = Operators(
            self,
            lambda: 30.0 if self.crew is None else self.crew.close_timeout,
            uses=Uses(self.place, is_application=True),
        )
        try:
            for name, factory in self.coordinators.items():
                try:
                    self.operators.prepare(name, factory, restore or NOTHING)
                except Exception as error:
                    raise CoordinatorFailed(
                        f"the coordinator of operator {name!r} cannot be made"
                        f"{'' if restore is None else f', or restored from checkpoint {restore.id}'}: "
                        f"{type(error).__name__}: {error}. Spark was not started"
                    ) from error
        except BaseException:
            self.operators.close("the session did not start")
            raise

    @property
    def is_active(self) -> bool:
        """Whether the session runs."""
        return self.crew is not None and self.crew.running

    def begin(self, crew: Crew) -> None:
        """The session runs."""
        self.crew = crew
        if self.coordinators:
            self.operators.begin(crew.host())

    def host(self) -> Host:
        """What serves its coordinators."""
        assert self.crew is not None
        return self.crew.host()

    @property
    def request_timeout(self) -> float:
        """How long tasks wait for their coordinator, in seconds."""
        assert self.crew is not None
        return self.crew.request_timeout

    def cancel_failed(self, cause: BaseException) -> None:
        """Whoever uses the coordinator fails by its reason; other jobs of the application go on."""


class Crew:
    """What coordinates one Spark application. Made by `stagecrew.crew(spark)`."""

    def __init__(self, context: SparkContext, facade: Any) -> None:
        self.context = context
        self.facade = facade
        self.application = Application()
        self.close_timeout: float = facade.closeTimeoutMs() / 1000
        #: Those that have begun and not ended, in the order in which they began.
        self._active: list[Topology] = []
        self.marks = ActiveTopologies(self)
        #: Of commits that are given no others.
        self.commit_log = MemoryCommitLog()
        self._registered: tuple[Listener, ...] | None = None
        self._channel: DriverChannel | None = None
        self._making = threading.Lock()
        if (
            str(context.master).startswith("local")
            and "PYSPARK_PYTHON" not in os.environ
            and context.getConf().get("spark.pyspark.python") is None
        ):
            context.pythonExec = sys.executable
        self._drain_before_stop()

    @property
    def running(self) -> bool:
        """Whether the SparkContext has not stopped."""
        return self.context._jsc is not None

    @property
    def active(self) -> tuple[Topology, ...]:
        """The topologies that are active, in all threads: in the order in which they began, so that outer ones come first."""
        return tuple(topology for topology in tuple(self._active) if topology.is_active)

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

    @property
    def place(self) -> Place:
        """Where in the program this thread is; in one that Spark started, the topology that it works for."""
        place = current_place()
        if place is None:
            topology = self.marks.innermost
            place = self.application.place if topology is None else topology.place
        return place

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
        self.require_running()
        every = checked(listeners)
        pickled(every)
        return Topology(self, name, every, class_names(jvm_listeners), policy(release))

    def require_running(self) -> None:
        """Raises `NotActive` after the SparkContext has stopped."""
        if not self.running:
            raise NotActive("the session of this crew has stopped; call stagecrew.crew(spark) with the new one")

    def await_slots(self, wanted: int) -> int:
        """Waits until so many tasks can run at once, while executors still come: in the first seconds of an application.

        Returns how many tasks can run at once then, which may be fewer.
        """
        began = self.context.startTime / 1000
        last: int = self.facade.slots()
        since = time.monotonic()
        while last < wanted and not str(self.context.master).startswith("local[") and time.time() - began < _COME:
            time.sleep(0.1)
            now = self.facade.slots()
            if now != last:
                last, since = now, time.monotonic()
            if last and time.monotonic() - since > _STABLE:
                break
        return last

    @property
    def reports(self) -> list[TopologyReport]:
        """Of every topology that the driver remembers, the application's first."""
        return [TopologyReport.of(node) for node in json.loads(self.facade.report(""))["topologies"]]

    def partitions(self) -> list[PartitionReport]:
        """What topologies have stored on each executor, as these said last; of all that the driver remembers."""
        return [one for report in self.reports for one in report.partitions]

    def report(self, topology: str) -> TopologyReport | None:
        """Of one topology by its id; None when it is not known (any more). The application's is `application`."""
        found = json.loads(self.facade.report(topology))["topologies"]
        return TopologyReport.of(found[0]) if found else None

    def operator(self, name: str) -> Operator:
        """An operator of the application, whose coordinator was given to `configure`; for tasks of any topology, or of none.

        Bind it as one of `Topology.coordinate`. When its coordinator fails, the tasks that use it fail by its reason.

        Raises `OperatorMisused` when there is none of this name, `CoordinatorFailed` when it failed, and `NotActive`.
        """
        from stagecrew.coordination.operator import Operator

        self.require_running()
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
        self.require_running()
        return self.application.operators.checkpoint(checkpoint_id, timeout)

    def register(self, listeners: tuple[Listener, ...], application: Application) -> None:
        """Gives the application its listeners and coordinators; before its first task, by `configure`."""
        if self._registered is not None:
            self.already_has(listeners, application.coordinators)
            return
        self.facade.registerApplication(
            self._description("application", "application", None, listeners, (), bool(application.coordinators))
        )
        for listener in listeners:
            listener._stagecrew.registered_for("the application", "application")
        self._registered = listeners
        self.application = application
        application.begin(self)

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

    def begin(
        self,
        topology: str,
        name: str,
        parent: str | None,
        listeners: Sequence[Listener],
        jvm_listeners: Sequence[str],
        release: Release,
    ) -> None:
        """Tells the driver of a topology."""
        try:
            self.facade.begin(self._description(topology, name, parent, listeners, jvm_listeners, release=release))
        except Py4JError as error:
            java = getattr(error, "java_exception", None)
            raise ConfigurationError(
                f"topology {name!r} cannot begin: {java.getMessage() if java else error}"
            ) from error

    def tell(self, operators: Operators) -> None:
        """Tells the driver's JVM the last word of a topology's coordinators; before it ends the topology. It raises nothing."""
        if (frame := operators.last_statistics()) is not None:
            self._report_statistics(frame)

    def _report_statistics(self, frame: bytes) -> None:
        with contextlib.suppress(Py4JError):  # the session may be gone: that must not make an exit fail
            self.facade.statistics(frame)

    def tell_job(self, body: str) -> None:
        """Tells the driver's JVM of the stored job that this process runs. It raises nothing: it only shows."""
        with contextlib.suppress(Exception):
            self.facade.recovery(body)

    def end(self, topology: str, seconds: float) -> None:
        """Ends a topology on all executors; returns when they have closed it, or say who has not."""
        self.facade.end(topology, int(seconds * 1000))
        # In slices, so that Ctrl-C is heard; the driver's own bound is a little longer than that of executors.
        deadline = time.monotonic() + seconds + 5
        while not self.facade.awaitEnd(topology, 100) and time.monotonic() < deadline:
            pass

    def _description(
        self,
        topology: str,
        name: str,
        parent: str | None,
        listeners: Sequence[Listener],
        jvm_listeners: Sequence[str],
        coordinated: bool = False,
        release: Release = Release.NONE,
    ) -> bytes:
        entries: list[dict[str, Any]] = [
            {
                "kind": "jvm",
                "name": cls.rsplit(".", 1)[-1],
                "target": cls,
                "scope": "jvm",
                "lifetime": "application",
                "required": True,
            }
            for cls in jvm_listeners
        ]
        names = [listener_name(listener) for listener in listeners]
        for i, listener in enumerate(listeners):
            repeated = names[:i].count(names[i])
            entries.append(
                {
                    "kind": "pickle",
                    "name": f"{names[i]}#{repeated + 1}" if repeated else names[i],
                    "scope": listener.scope.value,
                    "lifetime": listener.lifetime.value,
                    "required": listener.required,
                    "blob": i,
                }
            )
        context = self.context
        body = {
            "id": topology,
            "name": name,
            "parent": parent,
            "executable": context.pythonExec,
            "environment": {str(key): str(value) for key, value in context.environment.items()},
            "files": list(context._python_includes or ()),
            "listeners": [{"index": i, **entry} for i, entry in enumerate(entries)],
            "coordinated": coordinated,
            "release": release.value,
        }
        return encode("DESCRIPTION", topology=topology, body=json.dumps(body), blobs=pickled(listeners))

    def host(self) -> Host:
        """What serves the coordinators of this session; made at the first call."""
        from stagecrew.coordination.channel import DriverChannel
        from stagecrew.coordination.host import Host

        with self._making:
            if self._channel is not None and self._channel.is_broken:
                self._channel.close()
                self._channel = None
            if self._channel is None:
                conf = self._setting
                limit = parse_bytes(conf("spark.stagecrew.event.maxSize"))
                if limit + _AROUND > parse_bytes(conf("spark.stagecrew.channel.maxFrame")):
                    raise ConfigurationError(
                        f"spark.stagecrew.event.maxSize={conf('spark.stagecrew.event.maxSize')} does not fit into "
                        f"spark.stagecrew.channel.maxFrame={conf('spark.stagecrew.channel.maxFrame')}, in which events travel: "
                        f"raise that, by some megabytes more"
                    )
                ack_timeout = parse_seconds(conf("spark.stagecrew.ack.timeout"))
                self._channel = DriverChannel(
                    self.facade.coordinationPlace(),
                    lambda wire: Host(wire, limit, ack_timeout),
                    report=self._report_statistics,
                )
            return self._channel.host

    @property
    def request_timeout(self) -> float:
        """How long a task waits for its coordinator, in seconds."""
        return parse_seconds(self._setting("spark.stagecrew.request.timeout"))

    def _setting(self, key: str) -> str:
        default = next(one.default for one in KEYS if one.name == key)
        return str(self.context.getConf().get(key, default))

    def _drain_before_stop(self) -> None:
        stop = self.context.stop

        def drained_stop() -> None:
            if self.running:
                self._close_coordinators()
                try:
                    self.facade.drain(int(self.close_timeout * 1000))
                except Exception as error:  # the JVM may be gone: the user's stop must still do what it can
                    _log.warning("closing listeners before the session stops failed: %s", error)
                if self._channel is not None:
                    self._channel.close()
            stop()

        self.context.stop = drained_stop  # type: ignore[method-assign]

    def _close_coordinators(self) -> None:
        every = [topology.operators for topology in reversed(tuple(self._active))]
        for operators in (*every, self.application.operators):
            operators.close("the session stops")
            self.tell(operators)
