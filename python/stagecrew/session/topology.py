"""Topologies: a run with a lifecycle that spans any number of Spark jobs, stages and streaming queries."""

from __future__ import annotations

import contextlib
import functools
import html
import logging
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar, cast

from stagecrew.coordination.program_path import PLACE, Place, current_place
from stagecrew.errors import ConfigurationError, TopologyError
from stagecrew.listeners.listener import Listener
from stagecrew.observability.error_summary import error_line
from stagecrew.observability.notebook import public_names
from stagecrew.partitions.report import PartitionReport, Release, java_dataset
from stagecrew.session.registration import description_frame
from stagecrew.session.reports import TopologyReport
from stagecrew.session.topology_operators import TopologyOperators

if TYPE_CHECKING:
    from stagecrew.operators.commit_log import CommitLog
    from stagecrew.session.active_topologies import ActiveTopologies
    from stagecrew.session.connection import PluginConnection
    from stagecrew.session.progress import Progress

__all__ = ["Topology"]

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger("stagecrew")

#: How long an exit waits for the events of starts that Spark may not have reported yet, in seconds.
_MAX_EVENT_DELAY: Final = 30.0


class Topology(TopologyOperators):
    """A run with a lifecycle: its listeners open before its first task on each worker and close after its last.

    `Crew.topology` creates it. Use it as a context manager, or with `start` and `close` in a notebook.

    Everything that the thread starts between `start` and `close` belongs to the topology: jobs, SQL queries,
    streaming queries, and everything that these start. Another thread takes part through `wrap`. A lazy dataset belongs
    to the topology in which its *action* runs.

    Topologies nest. A topology that begins inside this one, in the same thread, ends with it at the latest. Close
    nested topologies in reverse order. `close` may be called in another thread. The jobs of the thread that called
    `start` then belong to the application topology, until this thread starts or closes a topology or calls a wrapped
    function.

    A normal exit waits for the jobs and streaming queries of the topology, and logs every 10 s which of them are still
    running. An exit with an exception, Ctrl-C, and `close(cancel=True)` stop the queries and cancel the jobs. The
    exception is not changed. The exit then closes the coordinators, all within `spark.stagecrew.close.timeout`. It
    waits until every executor has closed its listeners, for at most this timeout plus 5 s, and logs listeners that are
    still open.

    When the topology ends, its shuffle files are deleted, except those that another topology or a job outside of
    topologies uses, and those of datasets that were passed to `keep`. The argument `release` changes this. If you use a
    dataset later, Spark computes it again, with the same rows if it is deterministic.

    Examples:
        with crew.topology("enrich", listeners=[orders]) as topology:
            flights.mapInArrow(enrich, schema).write.parquet(path)
        print(topology.report)

    Not promised: that listeners in a worker that is running a task of another topology have closed when the exit
    returns. That worker closes them right after its task.
    """

    def __init__(
        self,
        connection: PluginConnection,
        topologies: ActiveTopologies,
        commit_log: CommitLog,
        name: str,
        listeners: Sequence[Listener],
        jvm_listeners: Sequence[str],
        release: Release = Release.SHUFFLES,
        progress: bool = False,
    ) -> None:
        if not isinstance(name, str) or not name:
            raise ConfigurationError(f"the name of a topology must be a text that is not empty, not {name!r}")
        id_ = f"{name.replace(' ', '-').replace(',', '-')}-{uuid.uuid4().hex[:12]}"
        super().__init__(connection, topologies, name, id_, bool(listeners), commit_log)
        self.release = release
        self._listeners, self._jvm_listeners = tuple(listeners), tuple(jvm_listeners)
        self._failure_raised = False
        self._shows_progress = progress
        self._progress: Progress | None = None
        self._last_report: TopologyReport | None = None
        #: The exception that ended the `with` statement, and a token for the current span of its thread.
        self._error: BaseException | None = None
        self._span_token: object = None

    def __repr__(self) -> str:
        return f"<topology {self.name!r} ({self._state})>"

    def _repr_html_(self) -> str:
        try:
            report = self._newest_report()
        except Exception:  # for example because the JVM has ended
            report = self._last_report
        return f"<code>{html.escape(repr(self))}</code>" if report is None else report._repr_html_()

    def __dir__(self) -> list[str]:
        return public_names(self, "id", "name", "parent", "release")

    def start(self) -> Topology:
        """Begins the topology in this thread. If the thread is in an active topology, the new one is nested inside it.

        Returns:
            The topology itself.

        Raises:
            TopologyError: The topology has already begun.
            TopologyError: The thread is already in an active topology of this name that `start` began, for example
                because a notebook cell ran twice. Use `with` for nested topologies of the same name.
            ConfigurationError: The driver refused the topology.
            NotActive: The session has stopped.

        Examples:
            topology = crew.topology("explore", listeners=[orders]).start()
        """
        if self._state == "new" and self._connection.running and self._topologies.is_in_started(self.name):
            raise TopologyError(
                f"this thread is already in an active topology {self.name!r} that start() began, perhaps in an earlier "
                f"run of this cell: call its close(), or crew.close_all(), and start again"
            )
        self._begin()
        self.by_start = True
        return self

    def _begin(self) -> None:
        if self._state != "new":
            raise TopologyError(
                f"topology {self.name!r} is {self._state}, and a topology runs once: create another with "
                f"crew.topology({self.name!r})"
            )
        self._connection.require_running()
        outer = self._topologies.innermost
        self.parent = outer
        outer_place = self._topologies.place
        outer_id = None if outer is None else outer.id
        tracing = self._connection.tracing
        has_begun = False
        try:
            traceparent = "" if tracing is None else tracing.begin(self.id, self.name, outer_id)
            description = description_frame(
                self._connection.context, self.id, self.name, outer_id, self._listeners, self._jvm_listeners,
                release=self.release, traceparent=traceparent,
            )  # fmt: skip
            self._connection.begin(self.name, description)
            has_begun = True
            for listener in self._listeners:
                listener._stagecrew.note_registration(f"topology {self.name!r}", self.id)
            self.place = Place(outer_place, "topology", self.name)
            self.operators.begin_in(self.place)
            self._state = "active"
            self._topologies.add(self)
            self._topologies.enter(self)
            PLACE.set(self.place)
            if self._shows_progress:
                from stagecrew.session.progress import Progress

                self._progress = Progress(self._newest_report)
        except BaseException as error:
            if tracing is not None:
                tracing.end(self.id, error)
            if has_begun or not isinstance(error, Exception):  # for example Ctrl-C: Python calls no `__exit__`
                self._state = "active"
                with contextlib.suppress(Exception):
                    self._end_once(cancel=True)
            raise

    def close(self, cancel: bool = False) -> None:
        """Ends the topology and those that began inside it. A second call has no effect.

        Args:
            cancel: Stops the topology's streaming queries and cancels its jobs, instead of waiting for them.

        Raises:
            CoordinatorFailed: One of its coordinators failed. The call that ends the topology raises it, once, after
                everything else is done, unless an exception such as `KeyboardInterrupt` propagates.

        Examples:
            topology.close(cancel=True)
        """
        self._end_once(cancel)
        self._raise_failure(sys.exc_info()[1])

    def _raise_failure(self, error: BaseException | None) -> None:
        """Raises the failure of a coordinator, once. An `error` such as `KeyboardInterrupt` propagates instead."""
        if (
            self.operators.cause is not None
            and not self._failure_raised
            and (error is None or isinstance(error, Exception))
        ):
            self._failure_raised = True
            self.operators.raise_failure()

    def _end_once(self, cancel: bool) -> None:
        if self._state == "new":
            self._state = "closed"
        if self._state in ("closing", "closed"):
            self._topologies.leave(self)  # another thread, or the exit of an outer topology, may have ended it
            return
        self._state = "closing"
        try:
            if self._connection.running:
                self._finish(cancel)
        finally:
            self._end_spans()
            for topology in (self, *self._inside()):
                if topology._progress is not None:
                    topology._progress.stop()
            for topology in (self, *self._inside()):  # the driver has ended the inner ones too
                topology._state = "closed"
                for listener in topology._listeners:
                    listener._stagecrew.note_end(topology.id)
                topology.place.ended = True
                self._topologies.remove(topology)
            self._topologies.leave(self)
            PLACE.set(current_place())

    def _end_spans(self) -> None:
        if (tracing := self._connection.tracing) is not None:
            tracing.collect()  # the executors have reported the last opens and closes
            for topology in (*self._inside(), self):
                tracing.end(topology.id, topology._error)

    def _inside(self) -> list[Topology]:
        """The active topologies that began inside this one, at any depth."""
        return [cast("Topology", topology) for topology in self._topologies.inside(self)]

    def __enter__(self) -> Topology:
        self._begin()
        if self._connection.tracing is not None:
            self._span_token = self._connection.tracing.enter(self.id)
        return self

    def __exit__(
        self, type_: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._connection.tracing is not None:
            self._connection.tracing.leave(self._span_token)
        self._error = error
        if error is None:
            self._end_once(cancel=False)
            self._raise_failure(None)
            return
        if (supersteps := sys.modules.get("stagecrew.operators.supersteps")) is not None:
            with contextlib.suppress(Exception):  # if Spark has stopped, the text of its error cannot be read
                supersteps.note_remedy(error, self._connection.slots)
        try:
            self._end_once(cancel=True)
        except Exception:
            _log.warning(
                "closing topology %r failed; the exception that ended it is unchanged", self.name, exc_info=True
            )
        self._raise_failure(error)

    def wrap(self, f: Callable[P, T]) -> Callable[P, T]:
        """Returns `f` as a function that takes part in this topology in every thread that calls it.

        Args:
            f: Any function.

        Returns:
            The wrapped function. It raises `TopologyError` when the topology is not active, and `NotActive` after the
            session has stopped.

        Examples:
            with ThreadPoolExecutor() as pool:
                pool.map(topology.wrap(load), tables)
        """
        here = current_place()
        place = here if here is not None and here.is_within(self.place) else self.place

        @functools.wraps(f)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
            if not self.is_active:
                raise TopologyError(
                    f"{getattr(f, '__qualname__', f)!r} was wrapped for topology {self.name!r}, which is "
                    f"{self._state}: call it inside its `with` statement"
                )
            self._connection.require_running()
            self._topologies.enter(self)
            token = PLACE.set(place)
            try:
                return f(*args, **kwargs)
            finally:
                PLACE.reset(token)
                self._topologies.leave(self)

        return wrapped

    @property
    def report(self) -> TopologyReport:
        """The current report of the topology. After the session has stopped, the last report.

        Raises:
            TopologyError: The topology has not begun, or the driver no longer knows it.
        """
        report = self._newest_report()
        if report is None and self._state == "new":
            raise TopologyError(
                f"there is no report of topology {self.name!r}, because it has not begun: use it in a `with` "
                "statement, or call its start()"
            )
        if report is None:
            raise TopologyError(f"there is no report of topology {self.name!r}: the driver no longer knows it")
        return report

    # -- Partitions

    def keep(self, *datasets: Any) -> None:
        """Keeps the stored partitions of these datasets when the topology ends. They then belong to the application.

        This includes the datasets' own shuffles, if they have run by then, and their cached blocks. It does not include
        datasets that are derived from them: `df.count()` runs another plan than `df.collect()`, with other shuffles.

        Args:
            datasets: DataFrames and RDDs.

        Raises:
            TopologyError: An argument is neither a DataFrame nor an RDD.
            TopologyError: The topology is not active.
            ConfigurationError: This Spark lacks private fields from which the stored partitions are known.
            NotActive: The session has stopped.

        Examples:
            topology.keep(joined)
        """
        every = [java_dataset(dataset) for dataset in datasets]
        self._require_active("keep datasets")
        for dataset in every:
            self._connection.keep(self.id, dataset)

    @property
    def partitions(self) -> tuple[PartitionReport, ...]:
        """The partitions that the topology has stored, for each executor. See `report`.

        Raises:
            TopologyError: The topology has not begun, or the driver no longer knows it.
        """
        return self.report.partitions

    # -- The end

    def _newest_report(self) -> TopologyReport | None:
        """Returns the driver's report, or the last report that it returned if it no longer has one."""
        if self._connection.running and (found := self._connection.report(self.id)) is not None:
            self._last_report = found
        return self._last_report

    def _finish(self, cancel: bool) -> None:
        try:
            if cancel:
                self._cancel()
            else:
                self._wait_or_cancel()
        finally:  # also after a second Ctrl-C during the cancellation
            self._end()

    def _wait_or_cancel(self) -> None:
        try:
            self._wait_for_activity(None)
        except BaseException:
            self._cancel()
            raise

    def _cancel(self) -> None:
        self._connection.cancel(self.id, f"topology {self.name!r} was cancelled")
        self._wait_for_activity(self._connection.close_timeout)

    def _wait_for_activity(self, seconds: float | None) -> None:
        """Waits until no job or query of the topology is running, for at most `seconds`. None means no limit."""
        started = last_logged = time.monotonic()
        pause = 0.01
        while True:
            activity = self._connection.activity(self.id)
            is_complete = activity.pop("isComplete")
            if seconds is not None and activity["queries"]:
                self._connection.stop_queries(self.id)  # again, because a query may have started since
            waiting = [
                f"{kind[:-1] if kind != 'queries' else 'streaming query'} {one}"
                for kind, ones in activity.items()
                for one in ones
            ]
            now = time.monotonic()
            if not (waiting or is_complete) and now - started < _MAX_EVENT_DELAY:
                waiting = ["the events of Spark, which may report the start of a job or query"]
            if not waiting:
                return
            if seconds is not None and now - started > seconds:
                _log.warning(
                    "topology %r was cancelled, but after %g s these are still running: %s",
                    self.name,
                    seconds,
                    ", ".join(waiting),
                )
                return
            if now - last_logged >= 10:
                last_logged = now
                _log.warning("topology %r is waiting for %s", self.name, ", ".join(waiting))
            time.sleep(pause)
            pause = min(pause * 2, 0.2)

    def _end(self) -> None:
        inside = self._inside()
        try:
            for topology in (*inside, self):
                topology.operators.close(
                    f"topology {topology.name!r} has ended: run the datasets of its operators inside its `with` "
                    "statement"
                )
                self._connection.send_last_statistics(topology.operators)
        finally:
            ended = self._connection.end(self.id, self._connection.close_timeout)
        for topology in inside:
            topology._warn(topology._newest_report())
        self._last_report = ended or self._last_report
        self._warn(self._last_report)

    def _warn(self, report: TopologyReport | None) -> None:
        if report is None:  # the driver no longer knows it, and the exit must not fail
            return
        for one in report.listeners:
            if one.failures:
                _log.warning(
                    "topology %r: listener %r failed %d times on executor %s, last: %s",
                    self.name, one.name, one.failures, one.executor, error_line(one.last_error),
                )  # fmt: skip
        if report.unclosed:
            _log.warning(
                "topology %r has ended, but after %g s these are not closed: %s",
                self.name, self._connection.close_timeout, "; ".join(report.unclosed),
            )  # fmt: skip
