"""Leadership candidates with an in-memory store: their threads, the order of their callbacks, and how they end."""

from __future__ import annotations

import contextlib
import logging
import threading

import pytest

from stagecrew.errors import ConfigurationError, LeadershipLost, StoreUnavailable
from stagecrew.recovery.leadership.candidate import Candidate
from stagecrew.recovery.leadership.fencing import HOLDER, TERM, FencedStore, fence, leader_of
from stagecrew.recovery.stores.contract import Check, Create, Delete
from support.model_store import ModelServer, ModelStore
from support.waiting import eventually

TIMEOUT = 3.0


class Clock:
    """A clock that the test advances. Each reading is unique."""

    def __init__(self):
        self.now, self.lock = 0.0, threading.Lock()

    def __call__(self):
        with self.lock:
            self.now += 1e-6
            return self.now

    def advance(self, seconds):
        with self.lock:
            self.now += seconds


class SlowSession(ModelStore):
    """A session that has a timeout, and that does not notice by itself that it has expired."""

    timeout = TIMEOUT
    suspended = False


class World:
    """A store's server, candidates that use it, and the recorded calls of their callbacks."""

    def __init__(self):
        self.server, self.clock, self.calls, self.stores, self.candidates = ModelServer(), Clock(), [], [], []
        self.lock = threading.Lock()

    def open_session(self):
        store = SlowSession(self.server, self.server.session().session)
        self.stores.append(store)
        return store

    def candidate(self, name="a", granted=lambda leadership: None, revoked=lambda term, reason: None, **more):
        def on_grant(leadership):
            assert threading.current_thread().name == "stagecrew-leadership"
            self.record(name, "grant", leadership.term)
            granted(leadership)

        def on_revoke(term, reason):
            self.record(name, "revoke", term)
            revoked(term, reason)

        options = {"clock": self.clock, "period": 0.01, "callback_timeout": 10.0, **more}
        candidate = Candidate(options.pop("open_store", self.open_session), on_grant, on_revoke, **options)
        self.candidates.append(candidate)
        return candidate

    def record(self, *call):
        with self.lock:
            self.calls.append(call)

    def wait_for_leadership(self, candidate):
        """Waits until the candidate leads and its `on_grant` has been called. Returns its leadership."""

        def granted():
            leadership = candidate.leadership
            if leadership is None or not any(call[1:] == ("grant", leadership.term) for call in list(self.calls)):
                return None
            return leadership

        return eventually(granted, 10, "the candidate leads")


@pytest.fixture
def world():
    """A world. At the end, no thread, session or entry of a holder is left, and each grant has been revoked."""
    world = World()
    yield world
    for candidate in world.candidates:
        assert candidate.close()
    world.server.fault = lambda *_: None
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name in ("stagecrew-election", "stagecrew-leadership")]
    assert not world.server.live
    assert HOLDER not in world.server.entries
    for name in {name for name, *_ in world.calls}:
        calls = [call for caller, *call in world.calls if caller == name]
        terms = [term for kind, term in calls[::2]]
        assert calls == [[kind, term] for term in terms for kind in ("grant", "revoke")]
        assert terms == sorted(set(terms))


def test_a_second_candidate_leads_after_the_first_is_closed(world):
    """When the first candidate is closed, a second one leads in the next term. Observers see each leader's term."""
    first = world.candidate("a")
    leadership = world.wait_for_leadership(first)
    second = world.candidate("b")
    assert (leadership.term, leadership.valid, leadership.reason) == (1, True, None)
    leadership.check()
    leadership.store.transact(Create("a", b"1"))
    observer = world.server.session()
    assert leader_of(observer).term == 1
    assert second.leadership is None
    assert first.close()
    assert first.leadership is None
    second_leadership = world.wait_for_leadership(second)
    assert (second_leadership.term, leader_of(observer).term) == (2, 2)
    with pytest.raises(LeadershipLost, match="no longer leads in term 1: it has resigned"):
        leadership.store.transact(Create("b"))
    assert not leadership.valid
    assert second.close()
    assert world.calls == [("a", "grant", 1), ("a", "revoke", 1), ("b", "grant", 2), ("b", "revoke", 2)]
    observer.close()


def test_a_candidate_whose_session_expires_leads_again_in_a_new_term(world):
    """A candidate whose session has expired campaigns with a new session, and leads in a new term."""
    candidate = world.candidate()
    leadership = world.wait_for_leadership(candidate)
    world.server.expire(world.stores[0].session)
    eventually(lambda: not leadership.valid)
    next_leadership = world.wait_for_leadership(candidate)
    assert (leadership.term, next_leadership.term, len(world.stores)) == (1, 2, 2)
    assert leadership.reason == "session-1 has expired"


def test_a_write_with_an_expired_session_ends_leadership(world):
    """A write with an expired session raises LeadershipLost immediately, and `on_revoke` is called."""
    candidate = world.candidate(period=60.0)
    leadership = world.wait_for_leadership(candidate)
    world.server.expire(world.stores[0].session)
    with pytest.raises(LeadershipLost, match="nothing was written: session-1 has expired"):
        leadership.store.transact(Create("a"))
    assert not leadership.valid
    eventually(lambda: world.calls[:2] == [("a", "grant", 1), ("a", "revoke", 1)])


def test_a_write_in_an_old_term_ends_leadership(world):
    """A write after another leader has changed the term raises LeadershipLost and ends the old leadership."""
    candidate = world.candidate(period=60.0)
    leadership = world.wait_for_leadership(candidate)
    other = world.server.session()
    other.transact(Delete(TERM), Delete(HOLDER), Create(TERM))
    with pytest.raises(LeadershipLost, match="leader/term no longer has version 1"):
        leadership.store.transact(Create("a"))
    assert not leadership.valid
    other.close()


def test_leadership_ends_by_time_while_the_store_does_not_respond(world):
    """Leadership ends in time and `on_revoke` is called, even while a request to the store hangs."""
    hangs, released = threading.Event(), threading.Event()

    def hang(_session, operations, moment):
        if moment == "before" and operations == (fence(1), Check(HOLDER, 0)):
            hangs.set()
            assert released.wait(20)

    world.server.fault = hang
    candidate = world.candidate()
    leadership = world.wait_for_leadership(candidate)
    assert hangs.wait(10)
    world.clock.advance(1.9)
    assert leadership.valid
    world.clock.advance(0.2)
    assert not leadership.valid
    with pytest.raises(
        LeadershipLost, match="the store has not responded for two thirds of the session timeout of 3 s"
    ):
        leadership.check()
    eventually(lambda: world.calls[:2] == [("a", "grant", 1), ("a", "revoke", 1)])
    released.set()
    assert world.wait_for_leadership(candidate).term == 2


def test_a_broken_connection_ends_leadership_immediately(world):
    """Leadership that a broken connection has ended stays ended. The candidate leads again in a new term."""
    candidate = world.candidate(period=60.0)
    leadership = world.wait_for_leadership(candidate)
    world.stores[0].suspended = True
    assert not leadership.valid
    world.stores[0].suspended = False
    assert not leadership.valid
    assert leadership.reason == "the connection to the store is down"
    assert world.wait_for_leadership(candidate).term == 2


def test_a_leadership_acquired_while_the_connection_breaks_is_not_used(world):
    """If the connection breaks while a candidate acquires leadership, the candidate leads with its next session."""

    def break_connection(session, operations, moment):
        if session == world.stores[0].session and operations[0].key == HOLDER and moment == "after":
            world.stores[0].suspended = True
            threading.Timer(0.2, setattr, (world.stores[0], "suspended", False)).start()

    world.server.fault = break_connection
    candidate = world.candidate()
    assert world.wait_for_leadership(candidate).term == 2
    assert world.calls == [("a", "grant", 2)]


def test_a_leadership_that_ends_before_its_grant_calls_no_callback(world):
    """For a leadership that ends before `on_grant` is called, neither `on_grant` nor `on_revoke` is called."""

    class Breaking(SlowSession):
        reads = 0

        @property
        def suspended(self):
            self.reads += 1  # the first read is for the request that acquires leadership
            return 1 < self.reads < 30 and self.session == "session-1"

    candidate = world.candidate(open_store=lambda: Breaking(world.server, world.server.session().session))
    assert world.wait_for_leadership(candidate).term == 2
    assert world.calls == [("a", "grant", 2)]


def test_a_broken_connection_is_noticed_without_a_request(world):
    """When the connection breaks, `on_revoke` is called without waiting for the next renewal."""
    candidate = world.candidate(period=60.0)
    world.wait_for_leadership(candidate)
    world.stores[0].suspended = True
    eventually(lambda: ("a", "revoke", 1) in world.calls)
    world.stores[0].suspended = False


def test_a_slow_on_grant_is_followed_by_on_revoke(world):
    """Leadership that ends during `on_grant` is invalid immediately. `on_revoke` is called after `on_grant` returns."""
    entered, released, seen = threading.Event(), threading.Event(), []

    def granted(leadership):
        if leadership.term == 1:
            entered.set()
            assert released.wait(20)
            seen.append(leadership.valid)

    candidate = world.candidate(granted=granted)
    assert entered.wait(10)
    leadership = world.wait_for_leadership(candidate)
    world.stores[0].suspended = True
    assert not leadership.valid
    world.stores[0].suspended = False
    threading.Event().wait(0.1)  # gives a wrong implementation time to act
    assert world.calls == [("a", "grant", 1)]
    assert world.stores[0].session in world.server.live, "the session was closed before on_grant returned"
    released.set()
    assert world.wait_for_leadership(candidate).term == 2
    assert seen == [False]


def test_leadership_is_released_after_on_revoke(world):
    """Until `callback_timeout`, no other candidate leads while `on_revoke` is running. So the old leader can end its jobs."""
    entered, released = threading.Event(), threading.Event()

    def revoked(_term, _reason):
        entered.set()
        assert released.wait(20)

    first = world.candidate("a", revoked=revoked)
    leadership = world.wait_for_leadership(first)
    second = world.candidate("b")
    closing = threading.Thread(target=first.close)
    closing.start()
    assert entered.wait(10)
    assert not leadership.valid
    threading.Event().wait(0.1)  # gives a wrong implementation time to act
    assert second.leadership is None
    released.set()
    assert world.wait_for_leadership(second).term == 2
    closing.join(10)
    assert not closing.is_alive()


def test_an_on_revoke_that_does_not_return_delays_others_only_until_its_timeout(world, caplog):
    """After `callback_timeout`, another candidate leads. `close` returns False, because a thread is still running."""
    released = threading.Event()
    first = world.candidate("a", revoked=lambda term, reason: released.wait(20), callback_timeout=0.1)
    world.wait_for_leadership(first)
    second = world.candidate("b")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stagecrew.recovery.leadership.candidate._JOIN_TIMEOUT", 0.5)
        assert not first.close()
    assert "the callbacks of term 1 have not returned" in caplog.text
    assert "these threads are still running: stagecrew-leadership" in caplog.text
    assert world.wait_for_leadership(second).term == 2
    released.set()
    assert first.close()


def test_a_candidate_does_not_campaign_while_its_callbacks_run(world):
    """A candidate whose callbacks are still running does not open a new session, even after `callback_timeout`."""
    released = threading.Event()
    first = world.candidate("a", revoked=lambda term, reason: released.wait(20), callback_timeout=0.05)
    leadership = world.wait_for_leadership(first)
    leadership.end("ended by the test")
    eventually(lambda: world.stores[0].session not in world.server.live)
    threading.Event().wait(0.1)  # gives a wrong implementation time to act
    assert len(world.stores) == 1
    released.set()
    assert world.wait_for_leadership(first).term == 2


def test_exceptions_in_callbacks_are_logged(world, caplog, monkeypatch):
    """After a callback has raised, the candidate continues. After `on_grant` has raised, it first lets others lead."""
    monkeypatch.setattr("stagecrew.recovery.leadership.candidate._HOLD_OFF", 0.3)

    def granted(leadership):
        if leadership.term == 1:
            raise SystemExit("in on_grant")

    def revoked(term, reason):
        assert "on_grant raised SystemExit: in on_grant" in reason or term > 1
        raise ValueError("in on_revoke")

    first = world.candidate("a", granted=granted, revoked=revoked)
    eventually(lambda: ("a", "revoke", 1) in world.calls)
    second = world.candidate("b")
    assert world.wait_for_leadership(second).term == 2
    second.close()
    assert world.wait_for_leadership(first).term == 3
    first.close()
    assert caplog.text.count("ValueError: in on_revoke") == 2
    assert "on_grant of term 1 failed: this process gives up leadership" in caplog.text


def test_a_store_that_cannot_be_opened_is_retried(world, caplog):
    """A candidate retries until the store can be opened. It logs the same error once."""
    errors = [StoreUnavailable("the store does not exist yet")] * 3 + [ZeroDivisionError("in open_store")]

    def open_store():
        if errors:
            raise errors.pop(0)
        return world.open_session()

    with caplog.at_level(logging.WARNING):
        candidate = world.candidate(open_store=open_store)
        assert eventually(lambda: candidate.error) is not None
        world.wait_for_leadership(candidate)
    assert candidate.error is None
    assert caplog.text.count("the store does not exist yet") == 1
    assert caplog.text.count("the coordination store responds again") == 1


def test_an_unexpected_exception_from_the_store_ends_leadership(world, caplog):
    """An unexpected exception from the store is logged with its traceback. The candidate campaigns again."""
    bugs = [ZeroDivisionError("in transact")]

    def bug(_session, operations, _moment):
        if operations == (fence(1), Check(HOLDER, 0)) and bugs:
            raise bugs.pop()

    world.server.fault = bug
    candidate = world.candidate(period=0.3)
    assert world.wait_for_leadership(candidate).term == 1
    eventually(lambda: ("a", "grant", 2) in world.calls)
    assert "Traceback" in caplog.text


def test_leadership_survives_a_short_outage_of_the_store(world):
    """Leadership survives an outage of less than two thirds of the session timeout."""
    candidate = world.candidate()
    leadership = world.wait_for_leadership(candidate)

    def unavailable(_session, _operations, _moment):
        raise StoreUnavailable("the store is unavailable")

    world.server.fault = unavailable
    eventually(lambda: isinstance(candidate.error, StoreUnavailable))
    world.clock.advance(1.5)
    assert leadership.valid
    world.server.fault = lambda *_: None
    eventually(lambda: candidate.error is None)
    world.clock.advance(1.0)
    assert leadership.valid
    world.server.fault = unavailable
    world.clock.advance(1.5)
    assert not leadership.valid
    world.server.fault = lambda *_: None
    assert world.wait_for_leadership(candidate).term == 2


def test_a_candidate_can_be_closed_while_the_store_is_unavailable(world):
    """`close` ends a candidate even while it is waiting for its next retry. A second `close` does nothing."""

    def open_store():
        raise StoreUnavailable("no store")

    candidate = world.candidate(open_store=open_store)
    eventually(lambda: candidate.error)
    assert candidate.close()
    assert candidate.close()


def test_a_candidate_can_be_closed_at_any_moment(world):
    """A candidate can be closed before and while it leads, from several threads. Each grant is revoked once."""
    for number in range(60):
        candidate = world.candidate(str(number), period=0.001)
        threading.Event().wait(number * 0.0003)
        closers = [threading.Thread(target=candidate.close) for _ in range(2)]
        for closer in closers:
            closer.start()
        assert candidate.close()
        for closer in closers:
            closer.join(10)
        assert candidate.leadership is None
        assert HOLDER not in world.server.entries


def test_close_ends_a_hanging_request(world):
    """`close` closes the candidate's session, which ends a hanging request."""
    hangs, closed = threading.Event(), threading.Event()

    class Hanging(SlowSession):
        def transact(self, *operations):
            hangs.set()
            assert closed.wait(20)
            return super().transact(*operations)

        def close(self):
            super().close()
            closed.set()

    candidate = world.candidate(open_store=lambda: Hanging(world.server, world.server.session().session))
    assert hangs.wait(10)
    assert candidate.close()
    assert world.calls == []


def test_a_session_that_cannot_be_closed_is_logged(world, caplog):
    """An error in closing a session is logged, and the next campaign begins."""

    def close():
        world.server.expire(store.session)
        raise OSError("in close")

    candidate = world.candidate()
    leadership, store = world.wait_for_leadership(candidate), world.stores[0]
    store.close = close
    leadership.end("ended by the test")
    assert world.wait_for_leadership(candidate).term == 2
    assert "OSError: in close" in caplog.text


@pytest.mark.parametrize("callback", ["on_grant", "on_revoke"])
def test_a_callback_can_close_its_candidate(world, callback):
    """`close` in a callback does not wait for the callback's own thread. The candidate's threads still end."""
    candidates = []

    def close(*_):
        eventually(lambda: candidates)
        assert not candidates[0].close()

    def nothing(*_):
        pass

    candidates.append(
        world.candidate(
            granted=close if callback == "on_grant" else nothing, revoked=close if callback == "on_revoke" else nothing
        )
    )
    if callback == "on_revoke":
        world.wait_for_leadership(candidates[0]).end("ended by the test")
    eventually(lambda: len(world.calls) == 2)
    eventually(lambda: not any(thread.is_alive() for thread in candidates[0]._threads))


def test_close_during_on_grant_ends_leadership_immediately(world):
    """`close` ends leadership immediately, but releases it only after `on_grant` and then `on_revoke` have returned."""
    entered, released = threading.Event(), threading.Event()

    def granted(leadership):
        entered.set()
        assert released.wait(20)

    candidate = world.candidate(granted=granted)
    assert entered.wait(10)
    leadership = candidate.leadership
    closing = threading.Thread(target=candidate.close)
    closing.start()
    eventually(lambda: not leadership.valid)
    assert HOLDER in world.server.entries
    released.set()
    closing.join(10)
    assert world.calls == [("a", "grant", 1), ("a", "revoke", 1)]


def test_a_job_of_an_old_term_cannot_write(world):
    """A job's writes are refused after another term has begun, even if the job has a session of its own."""
    candidate = world.candidate()
    leadership = world.wait_for_leadership(candidate)
    session = world.server.session()
    job = FencedStore(session, fence(leadership.term))
    job.transact(Create("a"))
    world.server.expire(world.stores[0].session)
    next_leadership = eventually(lambda: (led := candidate.leadership) and led.term == 2 and led)
    with pytest.raises(LeadershipLost):
        job.transact(Create("b"))
    next_leadership.store.close()  # does nothing: only the candidate closes its session
    next_leadership.store.transact(Create("b"))
    session.close()


def test_invalid_arguments_are_refused():
    """A candidate with invalid arguments raises ConfigurationError."""
    for bad, message in (
        ({"period": 0}, "period must be positive, not 0"),
        ({"period": -1}, "period must be positive, not -1"),
        ({"callback_timeout": -1}, "callback_timeout must not be negative"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            Candidate(None, None, None, **bad)


def test_terms_grow_and_every_write_is_in_the_current_term(world):
    """Three candidates campaign while leaders' sessions expire. Terms grow, and each write is fenced by its term."""
    candidates = [world.candidate(name) for name in "abc"]
    done = 0
    while done < 15:
        leader = eventually(lambda: next(filter(None, (candidate.leadership for candidate in candidates)), None))
        with contextlib.suppress(LeadershipLost):  # this leader has not noticed yet that its session has expired
            leader.store.transact(Create(f"work-{leader.term}"))
            world.server.expire(leader.store.session)
            done += 1
    term = 0
    for _session, operations in world.server.log:
        if operations[-1].key.startswith("work-"):
            assert operations[0] == fence(term)
        term += any(operation.key == TERM and not isinstance(operation, (Check, Create)) for operation in operations)
    assert term >= 15
