"""How topologies begin and end in threads, against a driver that is only told of them. No JVM runs here."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from stagecrew import CoordinatorFailed, Listener, NotActive, TopologyClosed, TopologyError
from stagecrew.listeners.resolution import LEFT, PROPERTY
from stagecrew.session.builder import Crew
from stagecrew.session.topology import Topology
from stagecrew.wire.frames import decode_all


class Context:
    """A SparkContext's local properties and job tags: each thread has its own."""

    def __init__(self) -> None:
        self._jsc: Any = object()
        self._here = threading.local()
        self.master, self.pythonExec, self.environment, self._python_includes = "yarn", "python", {}, []

    @property
    def here(self) -> dict[str, Any]:
        if self._jsc is None:
            raise AttributeError("'NoneType' object has no attribute 'getLocalProperty'")
        return self._here.__dict__.setdefault("all", {"property": None, "tags": set()})

    def getLocalProperty(self, key: str) -> str | None:
        assert key == PROPERTY
        return self.here["property"]

    @property
    def left(self) -> str | None:
        """The ids of the topologies that have ended in this thread."""
        return self._here.__dict__.get("left")

    def setLocalProperty(self, key: str, value: str | None) -> None:
        if key == LEFT:
            self._here.left = value
            return
        assert key == PROPERTY
        self.here["property"] = value

    def addJobTag(self, tag: str) -> None:
        self.here["tags"].add(tag)

    def removeJobTag(self, tag: str) -> None:
        self.here["tags"].discard(tag)

    def stop(self) -> None:
        self._jsc = None


class Driver:
    """The driver's side: what is active, what was asked of it, and what it says still runs."""

    def __init__(self) -> None:
        self.parents: dict[str, str | None] = {}
        self.ended: list[str] = []
        self.asked: list[tuple[str, str]] = []
        self.activities: list[dict[str, list[Any]]] = []
        self.report = lambda _: '{"topologies": []}'

    def closeTimeoutMs(self) -> int:
        return 1000

    def begin(self, description: bytes) -> None:
        body = json.loads(next(decode_all(description))["body"])
        parent = body["parent"]
        assert parent is None or (parent in self.parents and parent not in self.ended)
        self.parents[body["id"]] = parent

    def cancel(self, topology: str, _reason: str) -> None:
        self.asked.append(("cancel", topology))

    def stopQueries(self, topology: str) -> None:
        self.asked.append(("stop", topology))

    def activity(self, _topology: str) -> str:
        idle: dict[str, list[Any]] = {"jobs": [], "executions": [], "queries": []}
        return json.dumps({**idle, **(self.activities.pop(0) if self.activities else {})})

    def end(self, topology: str, milliseconds: int) -> None:
        for inside in [one for one, parent in self.parents.items() if parent == topology and one not in self.ended]:
            self.end(inside, milliseconds)
        if topology not in self.ended:
            self.ended.append(topology)

    def awaitEnd(self, _topology: str, _milliseconds: int) -> bool:
        return True


@pytest.fixture
def crew() -> Any:
    """A crew whose driver refuses to begin a topology inside one that has ended."""
    made: Any = Crew(Context(), Driver())
    return made


def topology(crew: Any, name: str) -> Topology:
    return crew.topology(name)


def marks(crew: Any, *inside: Topology, before: str | None = None) -> bool:
    """Whether this thread is marked as being in these, innermost last, and in no other."""
    here = crew.context.here
    return here == {"property": inside[-1].id if inside else before, "tags": {one.tag for one in inside}}


def in_thread(f: Callable[[], Any]) -> Any:
    """What `f` answers in another thread."""
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(f()))
    thread.start()
    thread.join(10)
    return answers[0]


def test_nested_topologies_mark_the_thread(crew):
    """Inside, the thread has the mark of the innermost and the tags of all; afterwards, what it had before."""
    crew.context.setLocalProperty(PROPERTY, "somebody's")
    with topology(crew, "a") as a:
        assert marks(crew, a)
        with topology(crew, "b") as b:
            assert marks(crew, a, b)
            assert crew.connection.facade.parents == {a.id: None, b.id: a.id}
        assert marks(crew, a)
    assert marks(crew, before="somebody's")
    assert crew.active == ()
    assert crew.connection.facade.ended == [b.id, a.id]


def test_closed_out_of_order(crew):
    """Closing the outer one ends the inner one with it; the thread is clean, and another topology begins."""
    a, b = topology(crew, "a").start(), topology(crew, "b").start()
    a.close()
    assert marks(crew)
    assert crew.active == ()
    assert crew.connection.facade.ended == [b.id, a.id]
    with pytest.raises(TopologyClosed, match="is closed"):
        b.wrap(print)()
    b.close()
    assert marks(crew)
    with topology(crew, "c") as c:
        assert marks(crew, c)
    assert crew.connection.facade.parents[c.id] is None
    assert marks(crew)


def test_the_middle_one_is_closed_first(crew):
    """The thread is then in the innermost that is still active, and the next one begins in that."""
    with topology(crew, "a") as a:
        b, c = topology(crew, "b").start(), topology(crew, "c").start()
        b.close()
        assert marks(crew, a)
        with topology(crew, "d") as d:
            assert crew.connection.facade.parents[d.id] == a.id
            c.close()
            assert marks(crew, a, d)
    assert marks(crew)


def test_closed_in_another_thread(crew):
    """It ends; the thread that started it loses the mark when it next starts, wraps or closes one, and all works there."""
    for clean in (lambda one: one.close(), lambda _: topology(crew, "next").start().close()):
        one = topology(crew, "one").start()
        in_thread(one.close)
        assert one.has_ended
        clean(one)
        assert marks(crew)
    one, two = topology(crew, "one").start(), topology(crew, "two")
    in_thread(one.close)
    two.start()
    assert crew.connection.facade.parents[two.id] is None
    assert marks(crew, two)
    two.wrap(lambda: None)()
    assert marks(crew, two)
    two.close()
    assert marks(crew)


def test_started_elsewhere_closed_here(crew):
    """Closing a topology of another thread leaves this thread's own marks as they are."""
    with topology(crew, "mine") as mine:
        other = in_thread(topology(crew, "other").start)
        assert crew.connection.facade.parents[other.id] is None
        other.close()
        assert marks(crew, mine)
    assert marks(crew)


def test_wrapped_in_its_own_thread(crew):
    """A wrapped function that is called inside its topology leaves the thread in it."""
    with topology(crew, "a") as a:
        with topology(crew, "b") as b:
            assert a.wrap(lambda: marks(crew, b, a))()
            assert marks(crew, a, b)
        assert a.wrap(lambda: marks(crew, a))()
        assert marks(crew, a)
    assert marks(crew)


def test_wrapped_in_another_thread(crew):
    """It takes part there, what begins inside lies in the topology, and the thread is then as it was."""

    def work() -> bool:
        assert marks(crew, a)
        with topology(crew, "inner") as inner:
            assert crew.connection.facade.parents[inner.id] == a.id
        return marks(crew, a)

    with topology(crew, "a") as a:
        assert in_thread(lambda: (a.wrap(work)(), marks(crew))) == (True, True)


def test_a_thread_that_inherited_the_mark(crew):
    """As pyspark.InheritableThread: what begins there lies in the topology; when that has ended, the thread is in none."""
    a = topology(crew, "a").start()
    inside, closed = threading.Event(), threading.Event()

    def work() -> bool:
        crew.context.setLocalProperty(PROPERTY, a.id)
        crew.context.addJobTag(a.tag)
        with topology(crew, "b") as b:
            assert crew.connection.facade.parents[b.id] == a.id
        assert marks(crew, a)
        a.wrap(lambda: None)()
        assert marks(crew, a)
        c = topology(crew, "c").start()
        inside.set()
        closed.wait(10)
        c.close()
        assert crew.context.getLocalProperty(PROPERTY) is None
        with topology(crew, "d") as d:
            return crew.connection.facade.parents[d.id] is None

    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(work()))
    thread.start()
    inside.wait(10)
    a.close()
    closed.set()
    thread.join(10)
    assert answers == [True]


def test_a_topology_that_is_closing_keeps_its_marks(crew):
    """A wrapped function that the exit waits for stays in its topology to its end; new calls are refused."""
    with topology(crew, "a") as a:

        def work() -> bool:
            a._state = "closing"
            with pytest.raises(TopologyClosed, match="is closing"):
                a.wrap(print)()
            b = topology(crew, "b").start()
            assert crew.connection.facade.parents[b.id] is None
            b.close()
            return marks(crew, a)

        assert in_thread(a.wrap(work))
        a._state = "active"


def test_after_the_session_has_stopped(crew):
    """`start` and wrapped functions raise `NotActive` with the remedy; `close` does nothing, and nothing raises else."""
    new, a = topology(crew, "new"), topology(crew, "a").start()
    wrapped = a.wrap(print)
    crew.context._jsc = None
    for call in (new.start, wrapped, lambda: topology(crew, "late")):
        with pytest.raises(NotActive, match=r"has stopped; call stagecrew\.crew\(spark\) with the new one"):
            call()
    a.close()
    new.close()
    assert crew.active == ()
    with pytest.raises(TopologyClosed):
        wrapped()


def test_a_cell_that_starts_its_topology_again(crew):
    """`start` raises while a topology of that name, begun by `start`, is active in the thread; the message names the remedy."""
    first = topology(crew, "notebook").start()
    with topology(crew, "inside"), pytest.raises(TopologyError) as refused:
        topology(crew, "notebook").start()
    assert "already in an active topology 'notebook'" in str(refused.value)
    assert "crew.close_all()" in str(refused.value)
    again = topology(crew, "notebook")
    with pytest.raises(TopologyError):
        again.start()
    assert crew.active == (first,)
    assert marks(crew, first)
    crew.close_all()
    again.start().close()  # nothing had begun of it
    assert marks(crew)


def test_topologies_of_one_name_that_are_legal(crew):
    """Nested `with` blocks, a `start` inside a `with` or the other way round, another name, another thread, one after another."""
    with topology(crew, "t"), topology(crew, "t"):
        outer = topology(crew, "t").start()
        with topology(crew, "t"):
            topology(crew, "u").start()
            in_thread(lambda: topology(crew, "t").start().close())
        outer.close()
    topology(crew, "t").start().close()
    assert crew.active == ()


def test_a_thread_that_takes_part_does_not_start_it_again(crew):
    """A wrapped function and a thread that inherited the mark are in the topology too."""
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


def test_what_is_active(crew):
    """A tuple of the topologies that have begun and not begun to close, outermost first."""
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
    """It closes all topologies in reverse order, also those of other threads, cancels their jobs, and raises the first error at the end."""
    a, b = topology(crew, "a").start(), failed(crew, "b")
    c = in_thread(topology(crew, "c").start)
    d = failed(crew, "d")
    with pytest.raises(CoordinatorFailed, match="'d' failed"):
        crew.close_all()
    assert crew.connection.facade.ended == [d.id, c.id, b.id, a.id]
    assert [one for what, one in crew.connection.facade.asked if what == "cancel"] == [d.id, c.id, b.id, a.id]
    assert crew.active == ()
    assert marks(crew)
    crew.close_all()


def test_close_all_is_bounded(crew, monkeypatch):
    """What does not end when it is cancelled is waited for until `spark.stagecrew.close.timeout`, and is named."""
    crew.connection.close_timeout = 0.05
    one, two = topology(crew, "one").start(), topology(crew, "two").start()
    monkeypatch.setattr(
        crew.connection.facade, "activity", lambda _: json.dumps({"jobs": [1], "executions": [], "queries": []})
    )
    crew.close_all()
    assert (one.has_ended, two.has_ended) == (True, True)


def test_close_all_after_the_session_has_stopped(crew):
    """It forgets them, and raises nothing."""
    topology(crew, "a").start()
    crew.context._jsc = None
    crew.close_all()
    assert crew.active == ()


def test_a_driver_that_forgot_the_topology(crew):
    """A normal exit raises nothing; only asking for the report says that there is none."""
    with topology(crew, "a") as a:
        pass
    with pytest.raises(TopologyError, match="no longer knows it"):
        a.report  # noqa: B018
    assert (a.has_ended, marks(crew)) == (True, True)


def test_a_query_that_starts_while_it_is_cancelled(crew):
    """The cancelling exit stops queries again as long as there are any; an exit that only waits stops none."""
    a = topology(crew, "a").start()
    crew.connection.facade.activities = [{"jobs": [1]}, {"queries": ["late"]}, {"queries": ["late"]}]
    a.close(cancel=True)
    assert crew.connection.facade.asked == [("cancel", a.id), *[("stop", a.id)] * 3]
    crew.connection.facade.asked.clear()
    crew.connection.facade.activities = [{"queries": ["running"]}]
    topology(crew, "b").start().close()
    assert crew.connection.facade.asked == []


def failed(crew: Crew, name: str) -> Topology:
    """An active topology one of whose coordinators failed."""
    one = topology(crew, name).start()
    one.operators.cause = ZeroDivisionError(f"of {name}")
    return one


def test_a_coordinator_s_failure_is_raised_once(crew):
    """By the first close of its own topology, whoever ended that; not by others, and not a second time."""
    outer, inner = failed(crew, "outer"), failed(crew, "inner")
    with pytest.raises(CoordinatorFailed, match="'outer' failed: ZeroDivisionError: of outer"):
        outer.close()
    assert inner.has_ended
    with pytest.raises(CoordinatorFailed, match="'inner' failed: ZeroDivisionError: of inner"):
        inner.close()
    outer.close()
    inner.close()


def test_a_coordinator_s_failure_behind_another_error(crew):
    """What fails the end itself comes first, and the next close still tells of the coordinator."""
    one = failed(crew, "t")
    crew.connection.facade.activity = lambda _: 1 / 0
    with pytest.raises(ZeroDivisionError, match="division"):
        one.close()
    with pytest.raises(CoordinatorFailed):
        one.close()


def test_a_coordinator_s_failure_hides_no_interrupt(crew):
    """What is no Exception passes a `close` in its `finally`, as it passes a `with`."""
    one = failed(crew, "t")
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


def test_a_coordinator_s_failure_is_raised_once_by_a_with(crew):
    """One that was raised by a `close` inside, and caught, is not raised again."""
    with topology(crew, "t") as one:
        one.operators.cause = ValueError()
        with pytest.raises(CoordinatorFailed):
            one.close()


def test_many_topologies_leave_little_in_a_listener(crew):
    """A listener that is used again and again knows only the last few places."""
    listener = Listener()
    for i in range(20):
        crew.topology(f"run {i % 10}", listeners=[listener]).start().close()
    assert [one.what for one in listener._stagecrew.topologies] == [f"topology 'run {i}'" for i in range(5, 10)]
    assert all(one.ended for one in listener._stagecrew.topologies)


def test_a_thread_remembers_the_topologies_that_ended_in_it(crew):
    """The last few that have listeners, for errors of tasks that it starts later; other threads do not."""
    ids = []
    for i in range(8):
        with crew.topology(f"run {i}", listeners=[Listener()]) as one, topology(crew, "without listeners"):
            assert crew.context.left == (" ".join(ids[-5:]) or None)
        ids.append(one.id)
    assert crew.context.left == " ".join(ids[-5:])
    assert in_thread(lambda: crew.context.left) is None
    with crew.topology("outer", listeners=[Listener()]) as outer:
        in_thread(outer.wrap(lambda: None))
        assert crew.context.left == " ".join(ids[-5:])
    assert crew.context.left == " ".join([*ids[-4:], outer.id])


def test_failures_of_all_that_ended_are_told(crew, caplog):
    """Also those of a topology that ended with the one that it lay in."""
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
