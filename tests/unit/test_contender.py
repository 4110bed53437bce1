"""A contender's threads, over a store in memory: what it tells, when, and how it ends."""

from __future__ import annotations

import contextlib
import logging
import threading

import pytest

from crewtools import eventually
from modelstore import ModelServer, ModelStore
from stagecrew.errors import LeadershipLost, RecoveryMisused, StoreUnavailable
from stagecrew.recovery.leadership.candidate import Candidate
from stagecrew.recovery.leadership.fencing import HOLDER, TERM, FencedStore, fence, leader_of
from stagecrew.recovery.stores.contract import Check, Create, Delete

TIMEOUT = 3.0


class Clock:
    """Goes on when it is told to; no two looks at it are the same."""

    def __init__(self):
        self.now, self.lock = 0.0, threading.Lock()

    def __call__(self):
        with self.lock:
            self.now += 1e-6
            return self.now

    def pass_(self, seconds):
        with self.lock:
            self.now += seconds


class Late(ModelStore):
    """Hears late that its session is over: when it is told, or asks."""

    timeout = TIMEOUT
    suspended = False


class World:
    """A server, contenders of it, and what they were told."""

    def __init__(self):
        self.server, self.clock, self.calls, self.stores, self.contenders = ModelServer(), Clock(), [], [], []
        self.lock = threading.Lock()

    def open(self):
        store = Late(self.server, self.server.session().session)
        self.stores.append(store)
        return store

    def contender(self, name="a", granted=lambda leadership: None, revoked=lambda term, reason: None, **more):
        def on_grant(leadership):
            assert threading.current_thread().name == "stagecrew-leadership"
            self.told(name, "grant", leadership.term)
            granted(leadership)

        def on_revoke(term, reason):
            self.told(name, "revoke", term)
            revoked(term, reason)

        options = {"clock": self.clock, "period": 0.01, "callback_timeout": 10.0, **more}
        contender = Candidate(options.pop("open_store", self.open), on_grant, on_revoke, **options)
        self.contenders.append(contender)
        return contender

    def told(self, *call):
        with self.lock:
            self.calls.append(call)

    def leads(self, contender):
        """Waits until it does, and is told so."""

        def told():
            led = contender.leadership
            return (
                led if led is not None and any(call[1:] == ("grant", led.term) for call in list(self.calls)) else None
            )

        return eventually(told, 10, "it does not lead")


@pytest.fixture
def world():
    """At the end nothing is left: no thread, no session, no entry of a session; a revocation for each grant."""
    world = World()
    yield world
    for contender in world.contenders:
        assert contender.close()
    world.server.fault = lambda *_: None
    assert not [one for one in threading.enumerate() if one.name in ("stagecrew-election", "stagecrew-leadership")]
    assert not world.server.live
    assert HOLDER not in world.server.entries
    for name in {name for name, *_ in world.calls}:
        calls = [call for one, *call in world.calls if one == name]
        terms = [term for kind, term in calls[::2]]
        assert calls == [[kind, term] for term in terms for kind in ("grant", "revoke")]
        assert terms == sorted(set(terms))


def test_one_leads_then_the_other(world):
    """The first leads; when it is closed the second does, in the next term; observers see who it is."""
    first = world.contender("a")
    one = world.leads(first)
    second = world.contender("b")
    assert (one.term, one.valid, one.reason) == (1, True, None)
    one.check()
    one.store.transact(Create("a", b"1"))
    observer = world.server.session()
    assert leader_of(observer).term == 1
    assert second.leadership is None
    assert first.close()
    assert first.leadership is None
    two = world.leads(second)
    assert (two.term, leader_of(observer).term) == (2, 2)
    with pytest.raises(LeadershipLost, match="does not lead in term 1 any more: it has resigned"):
        one.store.transact(Create("b"))
    assert not one.valid
    assert second.close()
    assert world.calls == [("a", "grant", 1), ("a", "revoke", 1), ("b", "grant", 2), ("b", "revoke", 2)]
    observer.close()


def test_its_session_is_lost(world):
    """It hears of it, campaigns again with a new session, and leads in a new term."""
    contender = world.contender()
    one = world.leads(contender)
    world.server.expire(world.stores[0].session)
    eventually(lambda: not one.valid)
    two = world.leads(contender)
    assert (one.term, two.term, len(world.stores)) == (1, 2, 2)
    assert one.reason == "session-1 is over"


def test_a_write_hears_of_it_first(world):
    """Whoever writes with a session that is over is told, and so is everybody."""
    contender = world.contender(period=60.0)
    one = world.leads(contender)
    world.server.expire(world.stores[0].session)
    with pytest.raises(LeadershipLost, match="nothing was written: session-1 is over"):
        one.store.transact(Create("a"))
    assert not one.valid
    eventually(lambda: world.calls[:2] == [("a", "grant", 1), ("a", "revoke", 1)])


def test_a_write_hears_that_another_leads(world):
    """The same, when the store has another term."""
    contender = world.contender(period=60.0)
    one = world.leads(contender)
    other = world.server.session()
    other.transact(Delete(TERM), Delete(HOLDER), Create(TERM))
    with pytest.raises(LeadershipLost, match="leader/term does not have version 1 any more"):
        one.store.transact(Create("a"))
    assert not one.valid
    other.close()


def test_time_is_over(world):
    """A question that hangs in the store holds neither the end of leadership nor its telling up."""
    hangs, goes_on = threading.Event(), threading.Event()

    def hang(_session, operations, moment):
        if moment == "before" and operations == (fence(1), Check(HOLDER, 0)):
            hangs.set()
            assert goes_on.wait(20)

    world.server.fault = hang
    contender = world.contender()
    one = world.leads(contender)
    assert hangs.wait(10)
    world.clock.pass_(1.9)
    assert one.valid
    world.clock.pass_(0.2)
    assert not one.valid
    with pytest.raises(
        LeadershipLost, match="the store has not responded for two thirds of the session timeout of 3 s"
    ):
        one.check()
    eventually(lambda: world.calls[:2] == [("a", "grant", 1), ("a", "revoke", 1)])
    goes_on.set()
    assert world.leads(contender).term == 2


def test_a_connection_that_breaks(world):
    """Leadership is over at once, and for good also when the connection heals: it leads again in a new term."""
    contender = world.contender(period=60.0)
    one = world.leads(contender)
    world.stores[0].suspended = True
    assert not one.valid
    world.stores[0].suspended = False
    assert not one.valid
    assert one.reason == "the connection to the store is down"
    assert world.leads(contender).term == 2


def test_acquired_while_the_connection_breaks(world):
    """It does not lead with what was asked before: that session is left, and the next one leads."""

    def breaks(session, operations, moment):
        if session == world.stores[0].session and operations[0].key == HOLDER and moment == "after":
            world.stores[0].suspended = True
            threading.Timer(0.2, setattr, (world.stores[0], "suspended", False)).start()

    world.server.fault = breaks
    contender = world.contender()
    assert world.leads(contender).term == 2
    assert world.calls == [("a", "grant", 2)]


def test_a_grant_that_is_over_before_it_is_told(world):
    """It is not told, and neither is its revocation."""

    class Breaking(Late):
        looks = 0

        @property
        def suspended(self):
            self.looks += 1  # the first is that of whoever asked
            return 1 < self.looks < 30 and self.session == "session-1"

    contender = world.contender(open_store=lambda: Breaking(world.server, world.server.session().session))
    assert world.leads(contender).term == 2
    assert world.calls == [("a", "grant", 2)]


def test_a_connection_that_breaks_and_nobody_looks(world):
    """It is told without the store being asked."""
    contender = world.contender(period=60.0)
    world.leads(contender)
    world.stores[0].suspended = True
    eventually(lambda: ("a", "revoke", 1) in world.calls)
    world.stores[0].suspended = False


def test_an_on_grant_that_takes_long(world):
    """Leadership that ends meanwhile is seen at once; it is revoked when that returns, and only then another leads."""
    begun, goes_on, seen = threading.Event(), threading.Event(), []

    def granted(leadership):
        if leadership.term == 1:
            begun.set()
            assert goes_on.wait(20)
            seen.append(leadership.valid)

    contender = world.contender(granted=granted)
    assert begun.wait(10)
    one = world.leads(contender)
    world.stores[0].suspended = True
    assert not one.valid
    world.stores[0].suspended = False
    threading.Event().wait(0.1)  # time to do what must not be done
    assert world.calls == [("a", "grant", 1)]
    assert world.stores[0].session in world.server.live, "what began with it has not ended"
    goes_on.set()
    assert world.leads(contender).term == 2
    assert seen == [False]


def test_jobs_end_before_a_release(world):
    """While on_revoke runs the entry is held: a successor leads when it has returned."""
    begun, goes_on = threading.Event(), threading.Event()

    def revoked(_term, _reason):
        begun.set()
        assert goes_on.wait(20)

    first = world.contender("a", revoked=revoked)
    one = world.leads(first)
    second = world.contender("b")
    closing = threading.Thread(target=first.close)
    closing.start()
    assert begun.wait(10)
    assert not one.valid
    threading.Event().wait(0.1)  # time to do what must not be done
    assert second.leadership is None
    goes_on.set()
    assert world.leads(second).term == 2
    closing.join(10)
    assert not closing.is_alive()


def test_an_on_revoke_that_does_not_return(world, caplog):
    """Others are not held up for longer than `callback_timeout`; whoever closed it is told that it has not ended."""
    goes_on = threading.Event()
    first = world.contender("a", revoked=lambda term, reason: goes_on.wait(20), callback_timeout=0.1)
    world.leads(first)
    second = world.contender("b")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stagecrew.recovery.leadership.candidate._JOIN_TIMEOUT", 0.5)
        assert not first.close()
    assert "the callbacks of term 1 have not returned" in caplog.text
    assert "these threads still run: stagecrew-leadership" in caplog.text
    assert world.leads(second).term == 2
    goes_on.set()
    assert first.close()


def test_it_does_not_campaign_while_callbacks_run(world):
    """However long they take: it could not lead."""
    goes_on = threading.Event()
    first = world.contender("a", revoked=lambda term, reason: goes_on.wait(20), callback_timeout=0.05)
    one = world.leads(first)
    one.end("a test says so")
    eventually(lambda: world.stores[0].session not in world.server.live)
    threading.Event().wait(0.1)  # time to do what must not be done
    assert len(world.stores) == 1
    goes_on.set()
    assert world.leads(first).term == 2


def test_callbacks_that_raise(world, caplog, monkeypatch):
    """It is logged, and the host lives. Behind an on_grant that raised another may lead first."""
    monkeypatch.setattr("stagecrew.recovery.leadership.candidate._HOLD_OFF", 0.3)

    def granted(leadership):
        if leadership.term == 1:
            raise SystemExit("in on_grant")

    def revoked(term, reason):
        assert "on_grant raised SystemExit: in on_grant" in reason or term > 1
        raise ValueError("in on_revoke")

    first = world.contender("a", granted=granted, revoked=revoked)
    eventually(lambda: ("a", "revoke", 1) in world.calls)
    second = world.contender("b")
    assert world.leads(second).term == 2
    second.close()
    assert world.leads(first).term == 3
    first.close()
    assert caplog.text.count("ValueError: in on_revoke") == 2
    assert "on_grant of term 1 failed: this process gives up leadership" in caplog.text


def test_the_store_comes_later(world, caplog):
    """It is tried again, and said once what is wrong."""
    away = [StoreUnavailable("there is no store yet")] * 3 + [ZeroDivisionError("in open_store")]

    def open_store():
        if away:
            raise away.pop(0)
        return world.open()

    with caplog.at_level(logging.WARNING):
        contender = world.contender(open_store=open_store)
        assert eventually(lambda: contender.error) is not None
        world.leads(contender)
    assert contender.error is None
    assert caplog.text.count("there is no store yet") == 1
    assert caplog.text.count("the coordination store responds again") == 1


def test_a_store_with_a_bug(world, caplog):
    """What it raises and should not ends that leadership, is logged with its traceback, and the campaign goes on."""
    bugs = [ZeroDivisionError("in transact")]

    def bug(_session, operations, _moment):
        if operations == (fence(1), Check(HOLDER, 0)) and bugs:
            raise bugs.pop()

    world.server.fault = bug
    contender = world.contender(period=0.3)
    assert world.leads(contender).term == 1
    eventually(lambda: ("a", "grant", 2) in world.calls)
    assert "Traceback" in caplog.text


def test_the_store_goes_and_comes(world):
    """While it is away for less than two thirds of the time-out, leadership goes on."""
    contender = world.contender()
    one = world.leads(contender)

    def away(_session, _operations, _moment):
        raise StoreUnavailable("the store is away")

    world.server.fault = away
    eventually(lambda: isinstance(contender.error, StoreUnavailable))
    world.clock.pass_(1.5)
    assert one.valid
    world.server.fault = lambda *_: None
    eventually(lambda: contender.error is None)
    world.clock.pass_(1.0)
    assert one.valid
    world.server.fault = away
    world.clock.pass_(1.5)
    assert not one.valid
    world.server.fault = lambda *_: None
    assert world.leads(contender).term == 2


def test_closed_while_the_store_is_away(world):
    """It ends, also in the middle of waiting to try again."""

    def open_store():
        raise StoreUnavailable("no store")

    contender = world.contender(open_store=open_store)
    eventually(lambda: contender.error)
    assert contender.close()
    assert contender.close()


def test_closed_at_any_moment(world):
    """Before, while and after it leads, twice and from several threads: each grant that began is revoked once."""
    for number in range(60):
        contender = world.contender(str(number), period=0.001)
        threading.Event().wait(number * 0.0003)
        closers = [threading.Thread(target=contender.close) for _ in range(2)]
        for one in closers:
            one.start()
        assert contender.close()
        for one in closers:
            one.join(10)
        assert contender.leadership is None
        assert HOLDER not in world.server.entries


def test_closed_while_a_question_hangs(world):
    """Its session is closed, and so the question is over."""
    hangs, closed = threading.Event(), threading.Event()

    class Hanging(Late):
        def transact(self, *operations):
            hangs.set()
            assert closed.wait(20)
            return super().transact(*operations)

        def close(self):
            super().close()
            closed.set()

    contender = world.contender(open_store=lambda: Hanging(world.server, world.server.session().session))
    assert hangs.wait(10)
    assert contender.close()
    assert world.calls == []


def test_a_session_that_cannot_be_closed(world, caplog):
    """It is logged, and the next campaign begins."""

    def close():
        world.server.expire(store.session)
        raise OSError("in close")

    contender = world.contender()
    one, store = world.leads(contender), world.stores[0]
    store.close = close
    one.end("a test says so")
    assert world.leads(contender).term == 2
    assert "OSError: in close" in caplog.text


@pytest.mark.parametrize("where", ["on_grant", "on_revoke"])
def test_closed_in_a_callback(world, where):
    """It does not wait for itself, and ends."""
    made = []

    def close(*_):
        eventually(lambda: made)
        assert not made[0].close()

    def nothing(*_):
        pass

    made.append(
        world.contender(
            granted=close if where == "on_grant" else nothing, revoked=close if where == "on_revoke" else nothing
        )
    )
    if where == "on_revoke":
        world.leads(made[0]).end("a test says so")
    eventually(lambda: len(world.calls) == 2)
    eventually(lambda: not any(thread.is_alive() for thread in made[0]._threads))


def test_closed_during_on_grant(world):
    """Leadership is over at once; on_revoke follows on_grant; then it is released."""
    begun, goes_on = threading.Event(), threading.Event()

    def granted(leadership):
        begun.set()
        assert goes_on.wait(20)

    contender = world.contender(granted=granted)
    assert begun.wait(10)
    one = contender.leadership
    closing = threading.Thread(target=contender.close)
    closing.start()
    eventually(lambda: not one.valid)
    assert HOLDER in world.server.entries
    goes_on.set()
    closing.join(10)
    assert world.calls == [("a", "grant", 1), ("a", "revoke", 1)]


def test_a_job_of_an_old_term(world):
    """What goes on after its leader is told of another's term writes nothing, with a session of its own too."""
    contender = world.contender()
    one = world.leads(contender)
    session = world.server.session()
    job = FencedStore(session, fence(one.term))
    job.transact(Create("a"))
    world.server.expire(world.stores[0].session)
    two = eventually(lambda: (led := contender.leadership) and led.term == 2 and led)
    with pytest.raises(LeadershipLost):
        job.transact(Create("b"))
    two.store.close()  # is the contender's to close
    two.store.transact(Create("b"))
    session.close()


def test_bad_arguments():
    """They are refused before anything begins."""
    for bad in ({"period": 0}, {"period": -1}, {"callback_timeout": -1}):
        with pytest.raises(RecoveryMisused, match="must be positive"):
            Candidate(None, None, None, **bad)


def test_three_that_lead_in_turn(world):
    """Sessions that expire at any moment: terms grow, and each write is of the term that the store had then."""
    contenders = [world.contender(name) for name in "abc"]
    done = 0
    while done < 15:
        leader = eventually(lambda: next(filter(None, (one.leadership for one in contenders)), None))
        with contextlib.suppress(LeadershipLost):  # it has not heard yet
            leader.store.transact(Create(f"work-{leader.term}"))
            world.server.expire(leader.store.session)
            done += 1
    term = 0
    for _session, operations in world.server.log:
        if operations[-1].key.startswith("work-"):
            assert operations[0] == fence(term)
        term += any(one.key == TERM and not isinstance(one, (Check, Create)) for one in operations)
    assert term >= 15
