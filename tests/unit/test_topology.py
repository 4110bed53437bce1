"""How topologies begin and end in threads, with a fake driver and without a JVM."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from stagecrew import Listener
from stagecrew.coordination.program_path import PLACE
from stagecrew.errors import ConfigurationError, CoordinatorFailed, NotActive, TopologyError
from stagecrew.listeners.resolution import LEFT, PROPERTY
from stagecrew.session.builder import Crew
from stagecrew.session.topology import Topology
from stagecrew.wire.frames import decode_all

DESCRIPTION = "spark.job.description"


class FakeContext:
    """A fake SparkContext with local properties and job tags, which each thread has for itself."""

    def __init__(self) -> None:
        self._jsc: Any = object()
        self._here = threading.local()
        self.master, self.pythonExec, self.environment, self._python_includes = "yarn", "python", {}, []

    appName = "nightly"  # noqa: N815

    @property
    def applicationId(self) -> str:
        if self._jsc is None:
            raise AttributeError("'NoneType' object has no attribute 'sc'")
        return "app-1"

    def getConf(self) -> dict[str, str]:
        return {}

    @property
    def thread_state(self) -> dict[str, Any]:
        if self._jsc is None:
            raise AttributeError("'NoneType' object has no attribute 'getLocalProperty'")
        return self._here.__dict__.setdefault("all", {"property": None, "tags": set()})

    def getLocalProperty(self, key: str) -> str | None:
        if key == DESCRIPTION:
            return self.description
        assert key == PROPERTY
        return self.thread_state["property"]

    @property
    def description(self) -> str | None:
        """The description of the jobs of this thread."""
        return self._here.__dict__.get("description")

    @property
    def ended_here(self) -> str | None:
        """The ids of the last topologies that have ended in this thread."""
        return self._here.__dict__.get("ended_here")

    def setLocalProperty(self, key: str, value: str | None) -> None:
        if key == LEFT:
            self._here.ended_here = value
            return
        if key == DESCRIPTION:
            self._here.description = value
            return
        assert key == PROPERTY
        self.thread_state["property"] = value

    def addJobTag(self, tag: str) -> None:
        self.thread_state["tags"].add(tag)

    def removeJobTag(self, tag: str) -> None:
        self.thread_state["tags"].discard(tag)

    def stop(self) -> None:
        self._jsc = None


class FakeDriver:
    """A fake of the driver's JVM. It records topologies and calls, and reports the activities that a test sets."""

    def __init__(self) -> None:
        self.parents: dict[str, str | None] = {}
        self.ended: list[str] = []
        self.calls: list[tuple[str, str]] = []
        self.activities: list[dict[str, Any]] = []
        self.report = lambda _: '{"topologies": []}'

    def closeTimeoutMs(self) -> int:
        return 1000

    def begin(self, description: bytes) -> None:
        body = json.loads(next(decode_all(description))["body"])
        parent = body["parent"]
        assert parent is None or (parent in self.parents and parent not in self.ended)
        self.parents[body["id"]] = parent

    def cancel(self, topology: str, _reason: str) -> None:
        self.calls.append(("cancel", topology))

    def stopQueries(self, topology: str) -> None:
        self.calls.append(("stop", topology))

    def activity(self, _topology: str) -> str:
        idle: dict[str, Any] = {"jobs": [], "executions": [], "queries": [], "isComplete": True}
        return json.dumps({**idle, **(self.activities.pop(0) if self.activities else {})})

    def end(self, topology: str, milliseconds: int, wait_milliseconds: int) -> str:
        for inside in [one for one, parent in self.parents.items() if parent == topology and one not in self.ended]:
            self.end(inside, milliseconds, wait_milliseconds)
        if topology not in self.ended:
            self.ended.append(topology)
        return self.report(topology)


@pytest.fixture
def crew() -> Any:
    """A crew whose driver refuses to begin a topology inside an ended one."""
    made: Any = Crew(FakeContext(), FakeDriver())
    return made


def topology(crew: Any, name: str) -> Topology:
    return crew.topology(name)


def is_in(crew: Any, *inside: Topology, before: str | None = None) -> bool:
    """Returns whether this thread is in exactly these topologies, innermost last."""
    thread_state = crew.context.thread_state
    return thread_state == {"property": inside[-1].id if inside else before, "tags": {one.tag for one in inside}}


def in_thread(f: Callable[[], Any]) -> Any:
    """Returns the result of `f` in another thread."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(f()))
    thread.start()
    thread.join(10)
    return results[0]


@pytest.mark.parametrize("moment", ["before it begins", "after it has begun", "the thread enters it"])
def test_a_topology_that_is_interrupted_while_it_begins_is_ended(crew, monkeypatch, moment):
    """After Ctrl-C in `__enter__`, the topology has ended, and the thread is in no topology."""
    facade, begin = crew.connection.facade, crew.connection.facade.begin

    def interrupted_begin(description):
        if moment == "after it has begun":
            begin(description)
        raise KeyboardInterrupt

    def interrupted_tag(tag):
        raise KeyboardInterrupt

    if moment == "the thread enters it":
        monkeypatch.setattr(crew.context, "addJobTag", interrupted_tag)
    else:
        monkeypatch.setattr(facade, "begin", interrupted_begin)
    with pytest.raises(KeyboardInterrupt), topology(crew, "a"):
        raise AssertionError("it has begun")
    monkeypatch.undo()
    assert set(facade.parents) <= set(facade.ended)
    assert crew.active == ()
    assert is_in(crew)
    with topology(crew, "b") as b:
        assert is_in(crew, b)
        assert facade.parents[b.id] is None


def test_a_topology_that_the_driver_refuses_has_not_begun(crew, monkeypatch):
    """If the driver refuses to begin a topology, the thread is in no topology, and can begin another one."""

    def refuse(description):
        raise TopologyError("refused")

    monkeypatch.setattr(crew.connection.facade, "begin", refuse)

    def refused_and_begun():
        with pytest.raises(TopologyError, match="refused"), topology(crew, "a"):
            raise AssertionError("it has begun")
        assert crew.connection.facade.ended == []
        assert crew.active == ()
        assert is_in(crew)
        monkeypatch.undo()
        with topology(crew, "a") as again:
            return again.place.path

    token = PLACE.set(None)  # another test may have left a place
    try:
        assert refused_and_begun() == "topology=a"  # the refused one is not counted
    finally:
        PLACE.reset(token)


@pytest.mark.parametrize("name", [5, None, ""])
def test_a_topology_needs_a_name(crew, name):
    """A topology without a text as its name is refused."""
    with pytest.raises(ConfigurationError, match="name of a topology must be a text that is not empty"):
        topology(crew, name)


def test_jobs_are_described_by_the_innermost_topology_unless_they_are_described(crew):
    """The description follows the topologies of the thread. A description of the user stays, wherever it was set."""
    with crew.topology("day"):
        assert crew.context.description == "topology day"
        with crew.topology("hour"):
            assert crew.context.description == "topology hour"
        assert crew.context.description == "topology day"
        crew.context.setLocalProperty(DESCRIPTION, "mine")
        with crew.topology("hour"):
            assert crew.context.description == "mine"
    assert crew.context.description == "mine"


def test_nested_topologies_set_the_property_and_tags(crew):
    """Inside nested topologies, the thread has the property of the innermost one and the tags of all. Afterwards, its
    property and tags are restored."""
    crew.context.setLocalProperty(PROPERTY, "somebody's")
    with topology(crew, "a") as a:
        assert is_in(crew, a)
        with topology(crew, "b") as b:
            assert is_in(crew, a, b)
            assert crew.connection.facade.parents == {a.id: None, b.id: a.id}
        assert is_in(crew, a)
    assert is_in(crew, before="somebody's")
    assert crew.active == ()
    assert crew.connection.facade.ended == [b.id, a.id]


def test_closed_out_of_order(crew):
    """Closing the outer topology also ends the inner one. The thread is then in no topology, and another one can
    begin."""
    a, b = topology(crew, "a").start(), topology(crew, "b").start()
    a.close()
    assert is_in(crew)
    assert crew.active == ()
    assert crew.connection.facade.ended == [b.id, a.id]
    with pytest.raises(TopologyError, match="is closed"):
        b.wrap(print)()
    b.close()
    assert is_in(crew)
    with topology(crew, "c") as c:
        assert is_in(crew, c)
    assert crew.connection.facade.parents[c.id] is None
    assert is_in(crew)


def test_the_middle_one_is_closed_first(crew):
    """If the middle one of three topologies is closed, the thread is in the outer one, and the next topology begins
    inside that."""
    with topology(crew, "a") as a:
        b, c = topology(crew, "b").start(), topology(crew, "c").start()
        b.close()
        assert is_in(crew, a)
        with topology(crew, "d") as d:
            assert crew.connection.facade.parents[d.id] == a.id
            c.close()
            assert is_in(crew, a, d)
    assert is_in(crew)


def test_closed_in_another_thread(crew):
    """A topology can be closed in another thread. The thread that started it leaves it at its next start, wrap or
    close."""
    for clean in (lambda one: one.close(), lambda _: topology(crew, "next").start().close()):
        one = topology(crew, "one").start()
        in_thread(one.close)
        assert one.has_ended
        clean(one)
        assert is_in(crew)
    one, two = topology(crew, "one").start(), topology(crew, "two")
    in_thread(one.close)
    two.start()
    assert crew.connection.facade.parents[two.id] is None
    assert is_in(crew, two)
    two.wrap(lambda: None)()
    assert is_in(crew, two)
    two.close()
    assert is_in(crew)


def test_started_elsewhere_closed_here(crew):
    """Closing a topology of another thread does not change the topologies of this thread."""
    with topology(crew, "mine") as own_topology:
        other = in_thread(topology(crew, "other").start)
        assert crew.connection.facade.parents[other.id] is None
        other.close()
        assert is_in(crew, own_topology)
    assert is_in(crew)


def test_wrapped_in_its_own_thread(crew):
    """After a call of a function that was wrapped by one of the thread's own topologies, the thread is still in all of
    them."""
    with topology(crew, "a") as a:
        with topology(crew, "b") as b:
            assert a.wrap(lambda: is_in(crew, b, a))()
            assert is_in(crew, a, b)
        assert a.wrap(lambda: is_in(crew, a))()
        assert is_in(crew, a)
    assert is_in(crew)


def test_wrapped_in_another_thread(crew):
    """Another thread that calls a wrapped function is in the topology during the call, and topologies that it begins
    are inside that topology. Afterwards, the thread is in none."""

    def work() -> bool:
        assert is_in(crew, a)
        with topology(crew, "inner") as inner:
            assert crew.connection.facade.parents[inner.id] == a.id
        return is_in(crew, a)

    with topology(crew, "a") as a:
        assert in_thread(lambda: (a.wrap(work)(), is_in(crew))) == (True, True)


def test_a_thread_that_inherited_the_topology(crew):
    """In a thread that inherited a topology (pyspark.InheritableThread), topologies begin inside the inherited one.
    After that one has ended, they begin inside none."""
    a = topology(crew, "a").start()
    inside, closed = threading.Event(), threading.Event()

    def work() -> bool:
        crew.context.setLocalProperty(PROPERTY, a.id)
        crew.context.addJobTag(a.tag)
        with topology(crew, "b") as b:
            assert crew.connection.facade.parents[b.id] == a.id
        assert is_in(crew, a)
        a.wrap(lambda: None)()
        assert is_in(crew, a)
        c = topology(crew, "c").start()
        inside.set()
        closed.wait(10)
        c.close()
        assert crew.context.getLocalProperty(PROPERTY) is None
        with topology(crew, "d") as d:
            return crew.connection.facade.parents[d.id] is None

    results: list[bool] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    inside.wait(10)
    a.close()
    closed.set()
    thread.join(10)
    assert results == [True]


def test_a_closing_topology_keeps_its_threads(crew):
    """A wrapped function that is running when its topology begins to close stays in the topology until it returns. New
    calls are refused."""
    with topology(crew, "a") as a:

        def work() -> bool:
            a._state = "closing"
            with pytest.raises(TopologyError, match="is closing"):
                a.wrap(print)()
            b = topology(crew, "b").start()
            assert crew.connection.facade.parents[b.id] is None
            b.close()
            return is_in(crew, a)

        assert in_thread(a.wrap(work))
        a._state = "active"


def raised_by(call):
    with pytest.raises(TopologyError) as raised:
        call()
    return raised.value


def test_after_the_session_has_stopped(crew):
    """After the session has stopped, `start` and wrapped functions raise `NotActive` with the remedy, and `close` does
    nothing."""
    new, a = topology(crew, "new"), topology(crew, "a").start()
    wrapped = a.wrap(print)
    assert repr(crew) == "<crew 'nightly': app-1, active: a>"
    assert "nightly" in crew._repr_html_()
    assert {name for one in (crew, a) for name in dir(one) if name.startswith("_")} == set()
    assert {"topology", "reports", "close_all"} <= set(dir(crew))
    assert {"id", "name", "splits", "commit", "report"} <= set(dir(a))
    crew.context._jsc = None
    assert repr(crew) == "<crew 'nightly': stopped>"
    assert "not begun: use it in a `with` statement" in str(raised_by(lambda: new.report))
    for call in (new.start, wrapped, lambda: topology(crew, "late")):
        with pytest.raises(NotActive, match=r"has stopped; call stagecrew\.crew\(spark\) with the new one"):
            call()
    a.close()
    new.close()
    assert crew.active == ()
    with pytest.raises(TopologyError):
        wrapped()


def test_a_notebook_cell_that_starts_its_topology_again(crew):
    """`start` raises an error with the remedy if this thread has already started a topology of that name that is still
    active."""
    first = topology(crew, "notebook").start()
    with topology(crew, "inside"), pytest.raises(TopologyError) as refused:
        topology(crew, "notebook").start()
    assert "already in an active topology 'notebook'" in str(refused.value)
    assert "crew.close_all()" in str(refused.value)
    again = topology(crew, "notebook")
    with pytest.raises(TopologyError):
        again.start()
    assert crew.active == (first,)
    assert is_in(crew, first)
    crew.close_all()
    again.start().close()  # the failed start began nothing
    assert is_in(crew)


def test_allowed_topologies_of_one_name(crew):
    """Topologies with one name can begin in nested `with` blocks, by `start` inside `with` and vice versa, in different
    threads, and one after another."""
    with topology(crew, "t"), topology(crew, "t"):
        outer = topology(crew, "t").start()
        with topology(crew, "t"):
            topology(crew, "u").start()
            in_thread(lambda: topology(crew, "t").start().close())
        outer.close()
    topology(crew, "t").start().close()
    assert crew.active == ()


def test_a_thread_inside_the_topology_cannot_start_it_again(crew):
    """A wrapped function, or a thread that inherited a topology, is inside the topology and cannot start another one of
    that name."""
    outer = topology(crew, "t").start()

    def again() -> bool:
        with pytest.raises(TopologyError, match="this thread is already in an active topology"):
            topology(crew, "t").start()
        return True

    def inherited() -> bool:
        crew.context.setLocalProperty(PROPERTY, outer.id)
        return again()

    assert in_thread(outer.wrap(again))
    assert in_thread(inherited)


def test_active_topologies(crew):
    """`active` is a tuple of the topologies that have begun and have not begun to close, outermost first."""
    assert crew.active == ()
    with topology(crew, "a") as a, topology(crew, "b") as b:
        new = topology(crew, "new")
        assert crew.active == (a, b)
        b._state = "closing"
        assert crew.active == (a,)
        b._state = "active"
        assert not new.is_active
    assert crew.active == ()


def test_close_all(crew):
    """`close_all` closes all topologies of all threads in reverse, cancels their jobs, and raises the first error."""
    a, b = topology(crew, "a").start(), with_failed_coordinator(crew, "b")
    c = in_thread(topology(crew, "c").start)
    d = with_failed_coordinator(crew, "d")
    with pytest.raises(CoordinatorFailed, match="'d' failed"):
        crew.close_all()
    assert crew.connection.facade.ended == [d.id, c.id, b.id, a.id]
    assert [one for call, one in crew.connection.facade.calls if call == "cancel"] == [d.id, c.id, b.id, a.id]
    assert crew.active == ()
    assert is_in(crew)
    crew.close_all()


def test_close_all_is_bounded(crew, monkeypatch):
    """`close_all` waits at most `spark.stagecrew.close.timeout` for jobs that do not end although they were
    cancelled."""
    crew.connection.close_timeout = 0.05
    one, two = topology(crew, "one").start(), topology(crew, "two").start()
    activity = {"jobs": [1], "executions": [], "queries": [], "isComplete": True}
    monkeypatch.setattr(crew.connection.facade, "activity", lambda _: json.dumps(activity))
    crew.close_all()
    assert (one.has_ended, two.has_ended) == (True, True)


def test_close_all_after_the_session_has_stopped(crew):
    """After the session has stopped, `close_all` forgets the topologies and raises nothing."""
    topology(crew, "a").start()
    crew.context._jsc = None
    crew.close_all()
    assert crew.active == ()


def test_a_driver_that_has_forgotten_the_topology(crew):
    """If the driver has forgotten a topology, its exit raises nothing. Only `report` raises, because the driver has
    none."""
    with topology(crew, "a") as a:
        pass
    with pytest.raises(TopologyError, match="no longer knows it"):
        a.report  # noqa: B018
    assert (a.has_ended, is_in(crew)) == (True, True)


def test_a_query_that_starts_while_it_is_cancelled(crew):
    """A cancelling close stops queries until none are left. A close without `cancel` only waits for them."""
    a = topology(crew, "a").start()
    crew.connection.facade.activities = [{"jobs": [1]}, {"queries": ["late"]}, {"queries": ["late"]}]
    a.close(cancel=True)
    assert crew.connection.facade.calls == [("cancel", a.id), *[("stop", a.id)] * 3]
    crew.connection.facade.calls.clear()
    crew.connection.facade.activities = [{"queries": ["running"]}]
    topology(crew, "b").start().close()
    assert crew.connection.facade.calls == []


def test_an_exit_waits_for_late_events(crew):
    """An exit asks again while Spark may not have reported the start of a query, and then waits for the query."""
    one = topology(crew, "one").start()
    crew.connection.facade.activities = [{"isComplete": False}, {"queries": ["late"]}, {}]
    one.close()
    assert crew.connection.facade.activities == []


def test_an_exit_does_not_wait_without_limit_for_late_events(crew, monkeypatch):
    """An exit ends although Spark never reports its events."""
    monkeypatch.setattr("stagecrew.session.topology._MAX_EVENT_DELAY", 0.1)
    driver = crew.connection.facade
    driver.activities = [{"isComplete": False}] * 1000
    topology(crew, "one").start().close()
    assert 0 < len(driver.activities) < 1000


def with_failed_coordinator(crew: Crew, name: str) -> Topology:
    """An active topology with a failed coordinator."""
    one = topology(crew, name).start()
    one.operators.cause = ZeroDivisionError(f"of {name}")
    return one


@pytest.mark.parametrize("call", ["cancel", "stopQueries", "activity"])
@pytest.mark.parametrize("cancel", [True, False])
def test_an_interrupted_cancellation_still_ends_the_topology(crew, monkeypatch, cancel, call):
    """A Ctrl-C while the exit cancels jobs, or a second one, does not prevent the end of the topology on the driver."""
    driver = crew.connection.facade
    driver.activities = [{"jobs": [1]}]

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt(call)

    one = topology(crew, "one").start()
    inside = topology(crew, "inside").start()
    monkeypatch.setattr(driver, call, interrupt)
    if not cancel:
        monkeypatch.setattr("stagecrew.session.topology.time.sleep", interrupt)  # the first Ctrl-C
    with pytest.raises(KeyboardInterrupt, match=call):
        one.close(cancel=cancel)
    assert driver.ended == [inside.id, one.id]
    assert inside.operators._closed
    assert one.operators._closed
    assert crew.active == ()


def test_a_failure_of_a_coordinator_is_raised_once(crew):
    """A coordinator's failure is raised by the first `close` of its own topology, even if an outer topology's close has
    already ended it. Later closes do not raise it."""
    outer, inner = with_failed_coordinator(crew, "outer"), with_failed_coordinator(crew, "inner")
    with pytest.raises(CoordinatorFailed, match="'outer' failed: ZeroDivisionError: of outer"):
        outer.close()
    assert inner.has_ended
    with pytest.raises(CoordinatorFailed, match="'inner' failed: ZeroDivisionError: of inner"):
        inner.close()
    outer.close()
    inner.close()


def test_a_failure_of_a_coordinator_after_another_error(crew):
    """If closing itself fails, that error is raised first. The next `close` raises the coordinator's failure."""
    one = with_failed_coordinator(crew, "t")
    crew.connection.facade.activity = lambda _: 1 / 0
    with pytest.raises(ZeroDivisionError, match="division"):
        one.close()
    with pytest.raises(CoordinatorFailed):
        one.close()


def test_a_failure_of_a_coordinator_hides_no_interrupt(crew):
    """A KeyboardInterrupt is raised instead of a coordinator's failure, both by `close` in a `finally` block and by a
    `with` block."""
    one = with_failed_coordinator(crew, "t")
    with pytest.raises(KeyboardInterrupt):
        try:
            raise KeyboardInterrupt
        finally:
            one.close()
    with pytest.raises(CoordinatorFailed):
        one.close()
    with pytest.raises(KeyboardInterrupt), topology(crew, "u") as other:
        other.operators.cause = ValueError()
        raise KeyboardInterrupt


def test_a_failure_of_a_coordinator_is_raised_once_by_with(crew):
    """A `with` block does not raise a coordinator's failure again that a `close` inside the block has already
    raised."""
    with topology(crew, "t") as one:
        one.operators.cause = ValueError()
        with pytest.raises(CoordinatorFailed):
            one.close()


def test_a_listener_remembers_few_topologies(crew):
    """A listener remembers only the last five topologies that it was registered for."""
    listener = Listener()
    for i in range(20):
        crew.topology(f"run {i % 10}", listeners=[listener]).start().close()
    assert [one.description for one in listener._stagecrew.topologies] == [f"topology 'run {i}'" for i in range(5, 10)]
    assert all(one.ended for one in listener._stagecrew.topologies)


def test_a_thread_remembers_its_ended_topologies(crew):
    """A thread remembers the last five of its ended topologies that had listeners, so that errors of its later tasks
    can name them. Other threads do not remember them."""
    ids = []
    for i in range(8):
        with crew.topology(f"run {i}", listeners=[Listener()]) as one, topology(crew, "without listeners"):
            assert crew.context.ended_here == (" ".join(ids[-5:]) or None)
        ids.append(one.id)
    assert crew.context.ended_here == " ".join(ids[-5:])
    assert in_thread(lambda: crew.context.ended_here) is None
    with crew.topology("outer", listeners=[Listener()]) as outer:
        in_thread(outer.wrap(lambda: None))
        assert crew.context.ended_here == " ".join(ids[-5:])
    assert crew.context.ended_here == " ".join([*ids[-4:], outer.id])


def test_failures_of_all_ended_topologies_are_reported(crew, caplog):
    """Failures of a topology that ended together with its outer topology are reported, too."""
    failed = SimpleNamespace(name="pool", failures=1, executor="1", last_error="")
    failed.last_error = (
        'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    no()\nValueError: no\nmore\na note\n'
    )
    a, b = topology(crew, "a").start(), topology(crew, "b").start()
    for one in (a, b):
        one._last_report = SimpleNamespace(listeners=[failed], unclosed=())  # type: ignore[assignment]
    a.close()
    assert [record.args[0] for record in caplog.records if record.args] == ["b", "a"]
    assert all(record.getMessage().endswith(", last: ValueError: no") for record in caplog.records if record.args)
