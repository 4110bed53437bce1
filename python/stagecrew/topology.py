"""Topologies: a run with a lifecycle that spans any number of Spark jobs, stages and streaming queries."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import functools
import json
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from stagecrew.errors import CoordinatorFailed, OperatorMisused, TopologyClosed, TopologyError
from stagecrew.listeners import Listener

if TYPE_CHECKING:
    from stagecrew.coordination.binding import Binding
    from stagecrew.coordination.context import CoordinatorContext
    from stagecrew.coordination.coordinator import Coordinator
    from stagecrew.coordination.operator import Operator
    from stagecrew.session import Crew

__all__ = ["ListenerReport", "Topology", "TopologyReport"]

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger("stagecrew")


@dataclasses.dataclass(frozen=True)
class ListenerReport:
    """One listener of a topology on one executor. `opens` and `closes` count attempts, `lost` opens without a close."""

    name: str
    scope: str
    executor: str
    opens: int
    closes: int
    failures: int
    lost: int
    open_seconds: float
    close_seconds: float
    last_error: str


@dataclasses.dataclass(frozen=True)
class TopologyReport:
    """What happened in a topology, as the driver knows it now: executors report about every second, and at its end.

    `processes` are the Python processes that opened something, per executor; `lost_processes` those that were gone before
    they closed it; `deferred` those that close when the task of another topology is over; `unclosed` says what had not
    closed when the exit gave up waiting.
    """

    id: str
    name: str
    kind: str
    state: str
    started: dt.datetime
    ended: dt.datetime | None
    jobs: int
    listeners: tuple[ListenerReport, ...]
    processes: dict[str, int]
    lost_processes: dict[str, int]
    deferred: dict[str, int]
    lost_executors: tuple[str, ...]
    unclosed: tuple[str, ...]

    @property
    def opens(self) -> int:
        """How often a listener's `open` was called."""
        return sum(listener.opens for listener in self.listeners)

    @property
    def closes(self) -> int:
        """How often a listener's `close` was called."""
        return sum(listener.closes for listener in self.listeners)

    @property
    def failures(self) -> int:
        """How often a hook raised or was interrupted."""
        return sum(listener.failures for listener in self.listeners)

    @property
    def lost(self) -> int:
        """How many opens have no close, because their process is gone."""
        return sum(listener.lost for listener in self.listeners)

    @classmethod
    def of(cls, node: dict[str, Any]) -> TopologyReport:
        """From the driver's JSON."""
        executors: dict[str, Any] = node["executors"]
        listeners = [
            ListenerReport(
                name=entry["name"],
                scope=entry["scope"],
                executor=executor,
                opens=entry["opens"],
                closes=entry["closes"],
                failures=entry["failures"],
                lost=entry["lost"],
                open_seconds=entry["openMicros"] / 1e6,
                close_seconds=entry["closeMicros"] / 1e6,
                last_error=entry["lastError"],
            )
            for executor, counts in executors.items()
            for entry in counts["listeners"]
        ]

        def numbers(name: str) -> dict[str, int]:
            return {executor: counts[name] for executor, counts in executors.items() if counts[name]}

        return cls(
            id=node["id"],
            name=node["name"],
            kind=node["kind"],
            state=node["state"],
            started=_time(node["started"]),
            ended=_time(node["ended"]) if node["ended"] else None,
            jobs=node["jobs"],
            listeners=tuple(listeners),
            processes=numbers("processes"),
            lost_processes=numbers("lostProcesses"),
            deferred={
                executor: len(counts["deferred"]) for executor, counts in executors.items() if counts["deferred"]
            },
            lost_executors=tuple(node["lostExecutors"]),
            unclosed=tuple(node["unclosed"]),
        )


def _time(milliseconds: int) -> dt.datetime:
    return dt.datetime.fromtimestamp(milliseconds / 1000, tz=dt.UTC)


class Topology:
    """A run with a lifecycle: its listeners open before the first task on each worker and close after the last.

    Made by `Crew.topology`. Use it as a context manager, or with `start` and `close` in a notebook:

        with crew.topology("enrich", listeners=[orders]) as topology:
            flights.mapInArrow(enrich, schema).write.parquet(path)
        print(topology.report)

    What the thread starts between `start` and `close` belongs to it: jobs, SQL queries, streaming queries and what these
    start. Another thread takes part with `wrap`. A lazy dataset belongs to the topology in which its *action* runs.

    Topologies that begin inside this one in its thread end with it at the latest, so close them in reverse order. `close`
    may be called in another thread; the one that called `start` bears the mark of the ended topology until it next starts,
    wraps or closes one, and what it starts meanwhile runs under the application's topology.

    A normal exit waits for the jobs and streaming queries of the topology, and says every 10 s for whom. An exit by an
    exception or Ctrl-C, and `close(cancel=True)`, stop the queries and cancel the jobs; the exception is unchanged. Then
    the exit waits until every executor has closed what it can, at most `spark.stagecrew.close.timeout`, and names who has
    not. It does **not** wait for workers that are busy with a task of another topology: these close right after it.
    """

    def __init__(self, crew: Crew, name: str, listeners: Sequence[Listener], jvm_listeners: Sequence[str]) -> None:
        self._crew = crew
        self.name = name
        self.id = f"{name.replace(' ', '-').replace(',', '-')}-{uuid.uuid4().hex[:12]}"
        self.tag = f"stagecrew-{self.id}"
        self._listeners, self._jvm_listeners = tuple(listeners), tuple(jvm_listeners)
        self._state = "new"
        self.parent: Topology | None = None
        self._last_report: TopologyReport | None = None
        self._bindings: list[Binding] = []
        self._store: dict[str, Any] = {}
        self._failing = threading.Lock()
        self._cause: BaseException | None = None

    def __repr__(self) -> str:
        return f"<topology {self.name!r} ({self._state})>"

    @property
    def is_active(self) -> bool:
        """Whether it has begun, and not begun to close."""
        return self._state == "active"

    @property
    def has_ended(self) -> bool:
        """Whether it is closed, by itself or with the one that it lay in."""
        return self._state == "closed"

    def start(self) -> Topology:
        """Begins the topology in this thread, inside the active one that the thread is in.

        Raises `TopologyClosed` when it began before, `NotActive` after the session has stopped.
        """
        if self._state != "new":
            raise TopologyClosed(
                f"topology {self.name!r} is {self._state}: a topology runs once; create another with crew.topology({self.name!r})"
            )
        crew = self._crew
        crew.require_running()
        self.parent = crew.marks.innermost
        parent = None if self.parent is None else self.parent.id
        crew.begin(self.id, self.name, parent, self._listeners, self._jvm_listeners)
        for listener in self._listeners:
            listener._stagecrew.registered_for(f"topology {self.name!r}")
        self._state = "active"
        crew.active.append(self)  # also when nobody keeps the object: the thread belongs to it until `close`
        crew.marks.enter(self)
        return self

    def close(self, cancel: bool = False) -> None:
        """Ends the topology, and those that began inside it; a second call does nothing.

        `cancel` stops its streaming queries and cancels its jobs instead of waiting for them.
        """
        if self._state == "new":
            self._state = "closed"
        if self._state in ("closing", "closed"):
            self._crew.marks.leave(self)  # it may have ended in another thread, or with the one that it lay in
            return
        self._state = "closing"
        try:
            if self._crew.running:
                self._finish(cancel)
        finally:
            for topology in (self, *self._inside()):  # the driver ended those inside too
                topology._state = "closed"
                with contextlib.suppress(ValueError):
                    self._crew.active.remove(topology)
            self._crew.marks.leave(self)

    def _inside(self) -> Iterator[Topology]:
        """The active ones that lie in this one, at any depth."""
        for topology in tuple(self._crew.active):
            if topology.parent is self and topology.is_active:
                yield topology
                yield from topology._inside()

    def __enter__(self) -> Topology:
        return self.start()

    def __exit__(
        self, type_: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            self._raise_failure(None)
            return
        try:
            self.close(cancel=True)
        except Exception:
            _log.warning(
                "closing topology %r failed; the exception that ended it is unchanged", self.name, exc_info=True
            )
        self._raise_failure(error)

    def wrap(self, f: Callable[P, T]) -> Callable[P, T]:
        """`f` as a function that takes part in this topology in whatever thread it is called.

        Calling it after the topology closed raises `TopologyClosed`, after the session has stopped `NotActive`.
        """

        @functools.wraps(f)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
            if not self.is_active:
                raise TopologyClosed(
                    f"{getattr(f, '__qualname__', f)!r} was wrapped for topology {self.name!r}, which is {self._state}; "
                    f"call it inside the `with`"
                )
            self._crew.require_running()
            self._crew.marks.enter(self)
            try:
                return f(*args, **kwargs)
            finally:
                self._crew.marks.leave(self)

        return wrapped

    @property
    def report(self) -> TopologyReport:
        """What happened so far; after the session has stopped, what was known last. Raises `TopologyError` before `start`."""
        report = self._known()
        if report is None:
            raise TopologyError(f"topology {self.name!r} has not begun, or was forgotten; there is no report of it")
        return report

    # -- Coordination

    def coordinate(self, name: str, factory: Callable[[CoordinatorContext], Coordinator]) -> Operator:
        """An operator of this topology: bind it to datasets, whose tasks then talk to a coordinator that the factory makes.

        `factory` is a `Coordinator` class, or anything that makes one of a `CoordinatorContext`. Raises `OperatorMisused` when it
        cannot be called, `TopologyClosed` unless the topology is active.
        """
        from stagecrew.coordination.operator import Operator

        if not callable(factory):
            raise OperatorMisused(
                f"operator {name!r}: a coordinator is made by a factory, such as its class; {type(factory).__name__} cannot be called"
            )
        if not self.is_active:
            raise TopologyClosed(f"topology {self.name!r} is {self._state}: coordinate operators inside the `with`")
        self._crew.require_running()
        return Operator(self, name, factory)

    def host_binding(self, id_: str, operator: str, factory: Callable[[CoordinatorContext], Coordinator]) -> None:
        """A binding that the session's host serves until the topology ends."""
        from stagecrew.coordination.binding import Binding

        host = self._crew.host()
        binding = Binding(id_, operator, self.name, factory, self._store, self.fail, host.wire.flush)
        self._bindings.append(binding)
        host.add(binding)

    @property
    def coordination_settings(self) -> tuple[int, float]:
        """The largest event in bytes, and how long a task waits for its coordinator in seconds."""
        return self._crew.host().limit, self._crew.request_timeout

    def fail(self, cause: BaseException) -> None:
        """Fails the topology, once: cancels what runs of it; the `with` raises `CoordinatorFailed`. From any thread."""
        with self._failing:
            if self._cause is not None or self._state != "active":
                return
            self._cause = cause
        _log.error("a coordinator of topology %r failed; the topology is cancelled", self.name, exc_info=cause)
        # Not on the coordinator's thread, nor under a lock of ours: this asks the JVM.
        threading.Thread(target=self._cancel_failed, name="stagecrew-fail", daemon=True).start()

    def _cancel_failed(self) -> None:
        with contextlib.suppress(Exception):  # the session may be stopping, which cancels as well
            self._crew.facade.cancel(self.id, f"a coordinator of topology {self.name!r} failed: {self._cause!r}")
            self._crew.facade.stopQueries(self.id)

    def _close_bindings(self) -> None:
        for binding in self._bindings:
            if not binding.close(self._crew.close_timeout):
                _log.warning(
                    "topology %r: the coordinator of operator %r has not closed within %g s",
                    self.name, binding.operator, self._crew.close_timeout,
                )  # fmt: skip
            self._crew.host().remove(binding, f"topology {self.name!r} has ended")
        self._bindings.clear()

    def _raise_failure(self, error: BaseException | None) -> None:
        if self._cause is not None and (error is None or isinstance(error, Exception)):
            raise CoordinatorFailed(
                f"a coordinator of topology {self.name!r} failed: {type(self._cause).__name__}: {self._cause}"
            ) from self._cause

    def _known(self) -> TopologyReport | None:
        if self._crew.running and (found := self._crew.report(self.id)) is not None:
            self._last_report = found
        return self._last_report

    def _finish(self, cancel: bool) -> None:
        if not cancel:
            try:
                self._wait_for_activity(None)
            except BaseException:
                self._cancel()
                self._end()
                raise
        else:
            self._cancel()
        self._end()

    def _cancel(self) -> None:
        self._crew.facade.cancel(self.id, f"topology {self.name!r} was cancelled")
        self._crew.facade.stopQueries(self.id)
        self._wait_for_activity(self._crew.close_timeout)

    def _wait_for_activity(self, seconds: float | None) -> None:
        """Until nothing of the topology runs; with a bound, that is for the end of what was cancelled."""
        started = said = time.monotonic()
        pause = 0.01
        while True:
            activity: dict[str, list[Any]] = json.loads(self._crew.facade.activity(self.id))
            if seconds is not None and activity["queries"]:
                self._crew.facade.stopQueries(self.id)  # again: one may have been about to start
            waiting = [
                f"{kind[:-1] if kind != 'queries' else 'streaming query'} {one}"
                for kind, ones in activity.items()
                for one in ones
            ]
            now = time.monotonic()
            if not waiting:
                return
            if seconds is not None and now - started > seconds:
                _log.warning(
                    "topology %r was cancelled, and after %g s still runs: %s", self.name, seconds, ", ".join(waiting)
                )
                return
            if now - said >= 10:
                said = now
                _log.warning("topology %r waits for %s", self.name, ", ".join(waiting))
            time.sleep(pause)
            pause = min(pause * 2, 0.2)

    def _end(self) -> None:
        self._close_bindings()
        inside = tuple(self._inside())
        self._crew.end(self.id, self._crew.close_timeout)
        for topology in (*inside, self):
            topology._warn()

    def _warn(self) -> None:
        report = self._known()
        if report is None:  # the driver remembers only so many: no reason for an exit to fail
            return
        for one in report.listeners:
            if one.failures:
                last = one.last_error.strip().rsplit("\n", 1)[-1]
                _log.warning(
                    "topology %r: listener %r failed %d times on executor %s, last: %s",
                    self.name, one.name, one.failures, one.executor, last,
                )  # fmt: skip
        if report.unclosed:
            _log.warning(
                "topology %r has ended; not closed after %g s: %s",
                self.name, self._crew.close_timeout, "; ".join(report.unclosed),
            )  # fmt: skip
