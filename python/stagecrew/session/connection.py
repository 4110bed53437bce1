"""The connection to the plugin in the driver's JVM. After its start, a session calls the plugin only through it."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from py4j.protocol import Py4JError
from pyspark import SparkContext

from stagecrew.conf import KEYS, parse_bytes, parse_seconds
from stagecrew.errors import ConfigurationError, NotActive
from stagecrew.session.reports import TopologyReport

if TYPE_CHECKING:
    from stagecrew.coordination.binding_table import QueryCheck
    from stagecrew.coordination.channel import DriverChannel
    from stagecrew.coordination.host import Host
    from stagecrew.coordination.operators import Operators
    from stagecrew.session.tracing import Tracing

__all__ = ["PluginConnection"]

#: The maximum size of a frame without its largest event, in bytes.
_FRAME_OVERHEAD: Final = 3 << 20
#: The driver waits for executors until this many seconds after the application's start. After the first executor has
#: registered, it waits only until no further executor has registered for `_REGISTRATION_QUIET` seconds.
_REGISTRATION_WINDOW: Final = 30.0
_REGISTRATION_QUIET: Final = 3.0
#: Spark sets this local property in the thread of a streaming query.
_QUERY_ID: Final = "sql.streaming.queryId"
#: The driver gives executors their close timeout, and waits this much longer for their reports, in seconds.
_REPORT_GRACE: Final = 5


class PluginConnection:
    """Calls the plugin in the driver's JVM. Thread-safe."""

    def __init__(self, context: SparkContext, facade: Any) -> None:
        self.context = context
        self.facade = facade
        self.close_timeout: float = facade.closeTimeoutMs() / 1000
        self._channel: DriverChannel | None = None
        self._channel_lock = threading.Lock()
        #: Traces this session; None if tracing is off.
        self.tracing: Tracing | None = None

    @property
    def running(self) -> bool:
        """Whether the SparkContext is running."""
        return self.context._jsc is not None

    def require_running(self) -> None:
        """Raises `NotActive` after the SparkContext has stopped."""
        if not self.running:
            raise NotActive("the session of this crew has stopped; call stagecrew.crew(spark) with the new one")

    @property
    def is_traced(self) -> bool:
        """Whether `spark.stagecrew.tracing` is set."""
        return self._setting("spark.stagecrew.tracing").lower() == "true"

    @property
    def request_timeout(self) -> float:
        """How long a task waits for its coordinator, in seconds."""
        return parse_seconds(self._setting("spark.stagecrew.request.timeout"))

    @property
    def streaming_query_id(self) -> str | None:
        """The id of the streaming query that called this thread, or None.

        A query keeps its id when it starts again from the same checkpoint location.
        """
        return self.context.getLocalProperty(_QUERY_ID)

    def streaming_query(self) -> QueryCheck | None:
        """Returns a function that checks whether the streaming query that called this thread is still running.

        Returns None in a thread that no streaming query called. PySpark calls the function of `foreachBatch` in a
        Python thread that outlives the query. Therefore the returned function checks the query and its thread in the
        JVM. The thread may live for a moment after `awaitTermination` has returned. The query may stay registered
        forever if stopping its sources failed.
        """
        query = self.streaming_query_id
        if query is None:
            return None
        thread = self.context._jvm.java.lang.Thread.currentThread()  # type: ignore[union-attr]
        return lambda: bool(self.facade.queryRuns(query)) and bool(thread.isAlive())

    # -- Topologies

    def register_application(self, description: bytes) -> None:
        """Gives the application topology its listeners."""
        self.facade.registerApplication(description)

    def begin(self, name: str, description: bytes) -> None:
        """Begins a topology. Raises `ConfigurationError` when the driver refuses it."""
        try:
            self.facade.begin(description)
        except Py4JError as error:
            java = getattr(error, "java_exception", None)
            raise ConfigurationError(
                f"topology {name!r} cannot begin: {(java.getMessage() or java.toString()) if java else error}"
            ) from error

    def end(self, topology: str, seconds: float) -> TopologyReport | None:
        """Ends a topology on all executors. Waits until each of them has closed it or reported its open listeners.

        Returns the report of the topology, or None if the driver does not know it. Returns at the latest 5 s after the
        timeout.
        """
        # Waits in short slices, so that Ctrl-C can interrupt it. The first call begins the end.
        deadline = time.monotonic() + seconds + _REPORT_GRACE
        while not (report := self.facade.end(topology, int(seconds * 1000), 100)):
            if time.monotonic() >= deadline:
                return self.report(topology)
        return _only_report(report)

    def cancel(self, topology: str, reason: str) -> None:
        """Cancels the jobs of a topology and stops its streaming queries. Does not wait."""
        self.facade.cancel(topology, reason)
        self.stop_queries(topology)

    def stop_queries(self, topology: str) -> None:
        """Stops the streaming queries of a topology. Does not wait."""
        self.facade.stopQueries(topology)

    def activity(self, topology: str) -> dict[str, Any]:
        """The running jobs, SQL executions and streaming queries of a topology and of those inside it.

        `isComplete` is false if Spark has not reported the latest starts yet.
        """
        found: dict[str, Any] = json.loads(self.facade.activity(topology))
        return found

    def keep(self, topology: str, dataset: Any) -> None:
        """Keeps the stored partitions of a JVM dataset when the topology ends.

        Raises `ConfigurationError` if this Spark does not make it possible.
        """
        if problems := self.problems():
            raise ConfigurationError("; ".join(problems))
        self.facade.keep(topology, dataset)

    def problems(self) -> list[str]:
        """What does not work with this Spark."""
        found: list[str] = json.loads(self.facade.problems())
        return found

    def reports(self) -> list[TopologyReport]:
        """The reports of all topologies that the driver still knows. The application's report is first."""
        return [TopologyReport._from_json(node) for node in json.loads(self.facade.report(""))["topologies"]]

    def report(self, topology: str) -> TopologyReport | None:
        """The report of the topology with this id, or None if the driver does not know it, or no longer knows it."""
        return _only_report(self.facade.report(topology))

    # -- For the UI, where failures are suppressed, and for tracing

    def send_last_statistics(self, operators: Operators) -> None:
        """Sends the final statistics of a topology's coordinators. Call it before the topology ends."""
        if (frame := operators.last_statistics()) is not None:
            self._send_statistics(frame)

    def _send_statistics(self, frame: bytes) -> None:
        with contextlib.suppress(Py4JError):  # the session may have stopped, and closing the topology must not fail
            self.facade.statistics(frame)

    def take_spans(self, most: int) -> dict[str, Any]:
        """Removes at most this many ended spans. Returns them, and how many were dropped since the last call."""
        taken: dict[str, Any] = json.loads(self.facade.takeSpans(most))
        return taken

    def send_job_progress(self, body: str) -> None:
        """Sends the progress of the stored job that this process is running."""
        with contextlib.suppress(Exception):
            self.facade.setStoredJob(body)

    # -- Executors and coordinators

    def slots(self) -> int:
        """Returns how many tasks can run at the same time now."""
        slots: int = self.facade.slots()
        return slots

    def await_slots(self, wanted: int) -> int:
        """Waits until `wanted` tasks can run at the same time, as long as more executors are likely to register.

        Returns how many tasks can run at the same time, which may be fewer.
        """
        context = self.context
        started = context.startTime / 1000
        slots = self.slots()
        changed = time.monotonic()
        while (
            slots < wanted
            and not str(context.master).startswith("local[")
            and time.time() - started < _REGISTRATION_WINDOW
        ):
            time.sleep(0.1)
            now = self.slots()
            if now != slots:
                slots, changed = now, time.monotonic()
            if slots and time.monotonic() - changed > _REGISTRATION_QUIET:
                break
        return slots

    def host(self) -> Host:
        """The host of this session's coordinators. The first call, and a call after the channel broke, creates it."""
        from stagecrew.coordination.channel import DriverChannel
        from stagecrew.coordination.host import Host

        with self._channel_lock:
            if self._channel is not None and self._channel.is_broken:
                self._channel.close()
                self._channel = None
            if self._channel is None:
                limit = parse_bytes(self._setting("spark.stagecrew.event.maxSize"))
                if limit + _FRAME_OVERHEAD > parse_bytes(self._setting("spark.stagecrew.channel.maxFrame")):
                    raise ConfigurationError(
                        f"spark.stagecrew.event.maxSize={self._setting('spark.stagecrew.event.maxSize')} does not fit "
                        f"into spark.stagecrew.channel.maxFrame={self._setting('spark.stagecrew.channel.maxFrame')}, "
                        f"the limit of the frames that contain events: set maxFrame at least 3 MiB larger than maxSize"
                    )
                ack_timeout = parse_seconds(self._setting("spark.stagecrew.ack.timeout"))
                self._channel = DriverChannel(
                    self.facade.coordinationAddressFile(),
                    lambda wire: Host(wire, limit, ack_timeout),
                    report=self._send_statistics,
                )
            return self._channel.host

    def drain(self) -> None:
        """Closes all listeners before the SparkContext stops. Raises py4j's error if the JVM has ended."""
        self.facade.drain(int(self.close_timeout * 1000))

    def close_channel(self) -> None:
        """Closes the channel of the coordinators, if there is one."""
        if self._channel is not None:
            self._channel.close()

    def _setting(self, key: str) -> str:
        default = next(one.default for one in KEYS if one.name == key)
        return str(self.context.getConf().get(key, default))


def _only_report(text: str) -> TopologyReport | None:
    """The report in the JSON of at most one topology."""
    found = json.loads(text)["topologies"]
    return TopologyReport._from_json(found[0]) if found else None
