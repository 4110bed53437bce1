"""Leader election without threads: all of its rules, and processes that fail, pause and lag, on an in-memory store."""

from __future__ import annotations

import collections
import contextlib
import copy
import json

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stagecrew.errors import (
    ConfigurationError,
    LeadershipLost,
    PossiblyInconsistentError,
    SessionLost,
    StoreConflict,
    StoreUnavailable,
    StoreUnsupported,
)
from stagecrew.recovery.leadership.candidate import Candidate
from stagecrew.recovery.leadership.election import (
    Acquired,
    Election,
    Granted,
    LeaseRequestFailed,
    Lost,
    Refused,
    Renewed,
    Resigned,
    Revoked,
    Suspended,
    Ticked,
)
from stagecrew.recovery.leadership.fencing import HOLDER, TERM, FencedStore, LeaderInfo, fence, leader_of
from stagecrew.recovery.leadership.lease_client import LeaseClient
from stagecrew.recovery.stores.contract import Check, Create, Delete, Replace
from support.model_store import ModelServer, ModelStore

TIMEOUT = 3.0

# -- Rules


def test_leadership_is_granted_renewed_and_ends_by_time():
    """Leadership ends when two thirds of the session timeout have passed since the last successful request was sent."""
    election = Election()
    assert election.handle(Acquired(1, requested_at=10.0, timeout=TIMEOUT), 10.5) == Granted(1)
    assert (election.term, election.deadline) == (1, 12.0)
    assert election.handle(Renewed(1, requested_at=11.0), 11.9) is None
    assert election.deadline == 13.0
    assert election.handle(Renewed(1, requested_at=10.5), 12.0) is None
    assert election.deadline == 13.0, "an old reply must not shorten the deadline"
    assert election.handle(LeaseRequestFailed(), 12.9) is None
    assert election.is_valid(12.9)
    assert not election.is_valid(13.0)
    revoked = election.handle(Renewed(1, requested_at=12.8), 13.0)
    assert revoked == Revoked(1, "the store has not responded for two thirds of the session timeout of 3 s"), (
        "the reply is late"
    )
    assert election.handle(Ticked(), 14.0) is None


def test_without_a_timeout_leadership_does_not_end_by_time():
    """Without a session timeout, leadership does not end by time, because the session ends only with its process."""
    election = Election()
    assert election.handle(Acquired(1, 0.0), 1e6) == Granted(1)
    assert election.handle(Renewed(1, 0.0), 1e9) is None
    assert election.handle(Ticked(), 1e12) is None
    assert election.is_valid(1e15)


@pytest.mark.parametrize("end", [Suspended(), Lost("gone"), Lost("gone", 3), Resigned()], ids=repr)
def test_events_that_end_leadership_immediately(end):
    """These events end leadership immediately. An acquisition counts only if it was requested after such an event.

    After resigning, no acquisition counts.
    """
    election = Election()
    election.handle(Acquired(3, 0.0), 0.0)
    assert isinstance(election.handle(end, 1.0), Revoked)
    assert election.handle(end, 1.0) is None
    assert election.handle(Acquired(4, 0.9), 1.1) is None
    assert election.handle(Acquired(4, 1.0), 1.1) is None
    assert election.handle(Acquired(3, 1.1), 1.2) is None, "a term is granted once"
    later = election.handle(Acquired(5, 1.1), 1.2)
    assert later == (None if isinstance(end, Resigned) else Granted(5))


def test_events_of_another_term_change_nothing():
    """Events of an earlier term neither end nor extend the current leadership."""
    election = Election()
    election.handle(Acquired(5, 0.0, TIMEOUT), 0.0)
    assert election.handle(Lost("late", 4), 1.0) is None
    assert election.handle(Renewed(4, 1.0), 1.0) is None
    assert (election.term, election.deadline) == (5, 2.0)


EVENTS = [
    *(lambda now, term=term, ago=ago: Acquired(term, now - ago, TIMEOUT) for term in (1, 2) for ago in (0.5, 1.5, 2.5)),
    lambda now: Acquired(3, now - 0.5),
    *(lambda now, term=term, ago=ago: Renewed(term, now - ago) for term in (1, 2) for ago in (0.5, 1.5)),
    lambda now: Refused(),
    lambda now: Suspended(),
    lambda now: Lost("gone"),
    lambda now: Ticked(),
    lambda now: Resigned(),
]


def follow(election, now, depth, history):
    """Tries every sequence of `depth` events, one second apart, and checks each step. Returns the number of sequences.

    `history` describes the events so far: the granted terms, the current term (or None), the time at which its last
    successful request was sent, whether the process has resigned, whether the session has a timeout, and the time of
    the last event that ends leadership.
    """
    if depth == 0:
        return 1
    total = 0
    now += 1.0
    for make in EVENTS:
        event, branch = make(now), copy.copy(election)
        granted, leads, last_answer, resigned, timed, interrupted_at = history
        before = branch.is_valid(now)
        output = branch.handle(event, now)
        if isinstance(output, Granted):
            assert isinstance(event, Acquired)
            assert leads is None
            assert not resigned
            assert event.requested_at > interrupted_at
            assert branch.is_valid(now), "a late acquisition must not be granted"
            assert output.term == event.term > max(granted, default=0)
            granted, leads, timed = (*granted, output.term), output.term, event.timeout is not None
            last_answer = event.requested_at
        elif isinstance(output, Revoked):
            assert output.term == leads
            leads, interrupted_at = None, now
        elif isinstance(event, Renewed) and event.term == leads:
            last_answer = max(last_answer, event.requested_at)
        if isinstance(event, (Suspended, Lost, Resigned)):
            interrupted_at = now
            assert leads is None
        if isinstance(event, Resigned):
            resigned = True
        assert branch.term == leads
        if not before and not isinstance(output, Granted):
            assert not branch.is_valid(now), "only an acquisition can make it valid"
        if leads is not None and timed:
            assert branch.is_valid(now) == (now < last_answer + 2.0)
            assert not branch.is_valid(last_answer + 2.0)
        else:
            assert branch.is_valid(now) == (leads is not None)
        total += follow(branch, now, depth - 1, (granted, leads, last_answer, resigned, timed, interrupted_at))
    return total


def test_all_sequences_of_four_events():
    """Leadership is never valid after its end or deadline, each revocation follows a grant, and terms only grow."""
    assert follow(Election(), 10.0, 4, ((), None, 0.0, False, False, float("-inf"))) == len(EVENTS) ** 4


@pytest.mark.long
def test_all_sequences_of_five_events():
    """The rules that hold for all sequences of four events also hold for all sequences of five."""
    follow(Election(), 10.0, 5, ((), None, 0.0, False, False, float("-inf")))


# -- Fences and observers


def acquire(server, session=None):
    """Acquires leadership with a session, by default a new one. Returns its lease client and the term."""
    client = LeaseClient(session or server.session(), lambda: 0.0)
    event = client.acquire_or_renew()
    assert isinstance(event, Acquired)
    return client, event.term


def test_fenced_writes_are_refused_after_their_term():
    """After another term has begun, fenced writes raise LeadershipLost and write nothing.

    The index of a conflict counts only the caller's own operations.
    """
    server = ModelServer()
    client, term = acquire(server)
    store = FencedStore(client.store, fence(term))
    assert (term, fence(term)) == (1, Check("leader/term", 1))
    store.ensure("jobs/a", "jobs/b", "jobs")
    assert store.children("jobs") == ["a", "b"]
    assert store.transact(Replace("jobs/a", b"1", 0), Delete("jobs/b")) == [1, None]
    assert (store.read("jobs/a").value, store.read("jobs/b")) == (b"1", None)
    with pytest.raises(StoreConflict) as conflict:
        store.transact(Check("jobs/a"), Replace("jobs/a", b"2", 0))
    assert (conflict.value.index, conflict.value.why) == (1, "version")
    with pytest.raises(StoreConflict, match="no parent"):
        store.transact(Create("nowhere/a"))
    assert (store.session, store.timeout, store.suspended) == (client.store.session, None, False)

    job = FencedStore(server.session(), fence(term), Check("jobs/a", 1))  # a process with its own session
    job.transact(Replace("jobs/a", b"of the job", 1))
    with pytest.raises(LeadershipLost, match="jobs/a no longer has version 1"):
        job.transact(Create("jobs/c"))
    job = FencedStore(job, Check("jobs/a", 2))
    server.expire(client.store.session)
    _, next_term = acquire(server)
    assert next_term == 2
    before = server.entries
    for write in (
        lambda: job.transact(Replace("jobs/a", b"late", 2)),
        lambda: job.ensure("jobs/a", "jobs/d"),
        lambda: job.transact(),
    ):
        with pytest.raises(LeadershipLost, match="leader/term no longer has version 1 .version."):
            write()
    assert server.entries is before
    job.ensure("jobs/a")  # it exists, so nothing is written
    job.close()
    assert job.read("jobs/a").value == b"of the job", "only the owner of a session closes it"
    with pytest.raises(ConfigurationError, match="0 is not a term"):
        fence(0)


def test_a_fenced_write_can_have_an_unknown_outcome():
    """If the outcome of a fenced write is unknown, the store's error is raised unchanged."""
    server = ModelServer()
    client, term = acquire(server)
    store = FencedStore(client.store, fence(term))

    def lose_reply(_session, _operations, moment):
        if moment == "after":
            raise PossiblyInconsistentError("the reply was lost")

    server.fault = lose_reply
    with pytest.raises(PossiblyInconsistentError):
        store.transact(Create("a"))
    assert "a" in server.entries


def test_any_process_can_read_who_leads():
    """`leader_of` returns the leader's term, host, process and start, or None. A foreign record is an error."""
    server = ModelServer()
    observer = server.session()
    assert leader_of(observer) is None
    client, term = acquire(server)
    info = leader_of(observer)
    assert (info.term, info.session) == (term, client.store.session)
    assert info.pid > 0
    assert info.host
    assert info.since.tzinfo is not None
    assert LeaderInfo.from_bytes(info.to_bytes()) == info
    assert server.entries[TERM].value == server.entries[HOLDER].value
    client.store.close()
    assert leader_of(observer) is None
    for value in (b"", b"null", b"{}", b"[]", b"\xff", json.dumps({"format": 1, "term": 1}).encode()):
        observer.transact(Create(HOLDER, value))
        with pytest.raises(StoreUnsupported, match="leader/holder was not written by stagecrew"):
            leader_of(observer)
        observer.transact(Delete(HOLDER))
    observer.transact(Create(HOLDER, b'{"format": 2}'))
    with pytest.raises(StoreUnsupported, match="does not have format 1"):
        leader_of(observer)


# -- Requests


def test_a_standby_writes_nothing():
    """While another process leads, a standby only reads."""
    server = ModelServer()
    acquire(server)
    standby = LeaseClient(server.session(), lambda: 0.0)
    assert standby.acquire_or_renew() == Refused()
    done = len(server.log)
    assert [standby.acquire_or_renew() for _ in range(5)] == [Refused()] * 5
    assert len(server.log) == done


def test_a_request_with_an_unknown_outcome_is_repeated():
    """A request with an unknown outcome is repeated. Whether or not it was applied, one term is acquired once."""
    for moment in ("before", "after"):
        server = ModelServer()
        times = iter(range(10))
        client = LeaseClient(server.session(), lambda times=times: float(next(times)))
        lost = [PossiblyInconsistentError("lost")] * 3

        def fault(_session, operations, when, moment=moment, lost=lost):
            if when == moment and lost and operations[0].key == HOLDER:
                raise lost.pop()

        server.fault = fault
        events = [client.acquire_or_renew() for _ in range(3)]
        assert (
            [type(event) for event in events] == [LeaseRequestFailed] * 3
            if moment == "before"
            else [LeaseRequestFailed, Acquired, Renewed]
        )
        while not isinstance(events[-1], Renewed):
            events.append(client.acquire_or_renew())
        (acquired,) = [event for event in events if isinstance(event, Acquired)]
        assert acquired.term == 1 == server.entries[TERM].version
        assert acquired.requested_at == (3.0 if moment == "before" else 1.0), "the time of the successful request"


def test_a_late_acquisition_is_not_used():
    """A session whose delayed request acquires a term, after the store refused a later request, does not lead."""
    server = ModelServer()
    late = LeaseClient(server.session(), lambda: 0.0)
    in_flight = []

    def delay(session, operations, moment):
        if moment == "before" and operations[0].key == HOLDER and session == late.store.session:
            in_flight.append((session, operations))
            server.fault = lambda *_: None
            raise PossiblyInconsistentError("the request is delayed")

    server.fault = delay
    assert isinstance(late.acquire_or_renew(), LeaseRequestFailed)
    other = server.session()
    other.transact(Create(HOLDER, b"another holder", ephemeral=True))
    assert late.acquire_or_renew() == Refused()
    other.close()
    server.apply(*in_flight[0])
    assert late.acquire_or_renew() == Lost("this session holds a term that was not granted to it")


@pytest.mark.parametrize("deleted", [HOLDER, TERM])
def test_a_leader_whose_entry_is_deleted_loses_leadership(deleted):
    """A leader whose entry is deleted loses leadership with its next request."""
    server = ModelServer()
    client, _ = acquire(server)
    assert client.acquire_or_renew() == Renewed(1, 0.0)
    server.session().transact(Delete(deleted))
    assert isinstance(client.acquire_or_renew(), Lost)


def test_a_standby_creates_deleted_entries_again():
    """A standby creates the deleted entries again with one request, and acquires leadership with the next."""
    server = ModelServer()
    client, _ = acquire(server)
    standby = LeaseClient(server.session(), lambda: 0.0)
    assert standby.acquire_or_renew() == Refused()
    client.store.close()
    server.session().transact(Delete(TERM), Delete("leader"))
    assert standby.acquire_or_renew() == Refused()
    assert isinstance(standby.acquire_or_renew(), Acquired)


# -- Processes on an in-memory store


class SlowSession(ModelStore):
    """A session that has a timeout, and that does not notice by itself that it has expired."""

    timeout = TIMEOUT
    suspended = False


class Process(Candidate):
    """A candidate without threads. The test calls what its threads would do."""

    def __init__(self, world):
        self.world, self.client, self.notified, self.asking = world, None, None, False
        self.leaderships, self.calls = [], []
        super().__init__(world.open, None, None, clock=world.clock)

    def _start(self):
        pass

    def turn(self):
        """Makes one request. If the session is no longer usable, closes it as soon as no callback is running."""
        if self.asking:
            return  # a fault within this process's own request has called it
        self.asking = True
        try:
            self.request()
        finally:
            self.asking = False

    def request(self):
        if self.client is None:
            if self._granted is not None:
                return  # its callbacks are still running
            self.client = LeaseClient(self._open_store(), self._clock)
        if not self._send_request(self.client):
            self._handle(Lost("its session is no longer used"))
            if self._granted is None or self._granted not in self.leaderships:
                self._granted = None
                self.client.store.close()
                self.client = None
        elif self._granted is not None and self._granted not in self.leaderships:
            self.leaderships.append(self._granted)

    def notify(self):
        """Does one step of the callback thread: calls on_grant for a new leadership, or on_revoke after its end."""
        granted = self._granted
        if granted is None or granted not in self.leaderships:
            return
        if self.notified is not granted and granted.valid:
            self.notified = granted
            self.calls.append(("grant", granted.term))
        elif not granted.valid:
            if self.notified is granted:
                self.calls.append(("revoke", granted.term))
            self._granted = None

    def stop_waiting(self):
        """Closes the session while callbacks are still running, as after `callback_timeout`."""
        waits = self.client is not None and not self.asking
        if waits and self._granted is not None and self._granted.reason is not None:
            self.client.store.close()
            self.client = None


class World(RuleBasedStateMachine):
    """Candidates on one store. Faults happen before and after transactions, and transactions can be delayed."""

    timely = False

    @initialize(number=st.integers(2, 3))
    def begin(self, number):
        self.now, self.numbers = 0.0, 0
        self.server = ModelServer()
        self.server.fault = self.inject_faults
        self.last_requests, self.faults, self.in_flight, self.done = {}, [], [], []
        self.processes = [Process(self) for _ in range(number)]

    def clock(self):
        self.now += 1e-6  # no two readings are the same
        return self.now

    def open(self):
        store = SlowSession(self.server, self.server.session().session)
        self.last_requests[store.session] = self.now
        return store

    def inject_faults(self, session, operations, moment):
        faults, self.faults = self.faults, []
        for when, kind, number in faults:
            if when != moment:
                self.faults.append((when, kind, number))
                continue
            if kind == "turn":
                self.processes[number % len(self.processes)].turn()
            elif kind == "time":
                self.now += number
            elif kind == "expire":
                self.expire(number)
            elif kind == "unavailable" and moment == "before":
                raise StoreUnavailable("the store is unavailable")
            elif kind == "lost":
                raise PossiblyInconsistentError("lost")
            elif kind == "late" and moment == "before":
                self.in_flight.append((session, operations))
                raise PossiblyInconsistentError("under way")
        if moment == "before":
            self.last_requests[session] = self.now

    def expire(self, index):
        live = sorted(self.server.live)
        if self.timely:
            live = [name for name in live if self.now - self.last_requests[name] > TIMEOUT]
        if live:
            self.server.expire(live[index % len(live)])

    fault_lists = st.lists(
        st.tuples(
            st.sampled_from(["before", "after"]),
            st.sampled_from(["turn", "turn", "time", "expire", "unavailable", "lost", "late"]),
            st.integers(0, 4),
        ),
        max_size=3,
    )

    @rule(index=st.integers(0, 2), faults=fault_lists, rounds=st.integers(1, 3))
    def a_process_makes_requests(self, index, faults, rounds):
        self.faults = list(faults)
        for _ in range(rounds):
            self.processes[index % len(self.processes)].turn()
        self.faults = []

    @rule(index=st.integers(0, 2))
    def a_process_runs_callbacks(self, index):
        self.processes[index % len(self.processes)].notify()

    @rule(index=st.integers(0, 2))
    def a_process_stops_waiting_for_callbacks(self, index):
        self.processes[index % len(self.processes)].stop_waiting()

    @rule(index=st.integers(0, 2), down=st.booleans())
    def a_connection_breaks_or_recovers(self, index, down):
        process = self.processes[index % len(self.processes)]
        if process.client is not None and process.client.store.session in self.server.live:
            process.client.store.suspended = down

    @rule(seconds=st.floats(0.01, 4.0))
    def time_passes(self, seconds):
        self.now += seconds

    @rule(index=st.integers(0, 9))
    def a_session_expires(self, index):
        self.expire(index)

    @precondition(lambda self: self.in_flight)
    @rule(index=st.integers(0, 9))
    def a_delayed_transaction_arrives(self, index):
        session, operations = self.in_flight.pop(index % len(self.in_flight))
        if session in self.server.live:
            with contextlib.suppress(StoreConflict):
                self.server.apply(session, operations)

    @rule(index=st.integers(0, 9), writer=st.sampled_from(["leader", "job", "unchecked"]), faults=fault_lists)
    def a_leadership_writes(self, index, writer, faults):
        """A past or present leader writes: it, its job's process, or a writer that does not check leadership first."""
        leaderships = [leadership for process in self.processes for leadership in process.leaderships]
        if not leaderships:
            return
        leadership = leaderships[index % len(leaderships)]
        store = leadership.store
        if writer == "job":
            store = FencedStore(self.open(), fence(leadership.term))
        elif writer == "unchecked":
            store = FencedStore(store._store, fence(leadership.term))
        self.numbers += 1
        self.faults = list(faults)
        try:
            store.transact(Create(f"work-{self.numbers}", str(leadership.term).encode()))
            self.done.append((self.numbers, leadership.term))
        except LeadershipLost:
            assert f"work-{self.numbers}" not in self.server.entries
        except (SessionLost, StoreUnavailable, PossiblyInconsistentError):
            pass
        self.faults = []

    @precondition(lambda self: self.now > 0)
    @rule(index=st.integers(0, 2))
    def a_process_resigns(self, index):
        process = self.processes[index % len(self.processes)]
        process._handle(Resigned())
        process._closing = True
        self.processes[self.processes.index(process)] = successor = Process(self)  # another process replaces it
        successor.leaderships = process.leaderships
        if process.client is not None:
            process.client.store.close()

    @invariant()
    def at_most_one_leads(self):
        if not hasattr(self, "server"):
            return
        leaderships = [leadership for process in self.processes for leadership in process.leaderships]
        valid = [leadership for leadership in leaderships if leadership.valid]
        if self.timely:
            assert len(valid) <= 1, "two processes lead by their own clocks"
        current = self.server.entries[TERM].version if TERM in self.server.entries else 0
        terms = [leadership.term for leadership in leaderships]
        assert len(set(terms)) == len(terms), "a term is granted once"
        assert all(term <= current for term in terms)
        for process in self.processes:
            terms = [leadership.term for leadership in process.leaderships]
            assert terms == sorted(terms)
            kinds = [kind for kind, _ in process.calls]
            assert kinds == ["grant", "revoke"] * (len(kinds) // 2) + ["grant"] * (len(kinds) % 2)
            granted = [term for kind, term in process.calls if kind == "grant"]
            revoked = [term for kind, term in process.calls if kind == "revoke"]
            assert revoked == granted[: len(kinds) // 2]

    def teardown(self):
        if not hasattr(self, "server"):
            return
        self.check_log()
        self.faults, self.server.fault = [], lambda *_: None
        for session in list(self.server.live):
            if not any(process.client and process.client.store.session == session for process in self.processes):
                self.server.expire(session)
        for process in self.processes:
            if process.client is not None and process.client.store.session in self.server.live:
                process.client.store.suspended = False
        # Without faults, exactly one process leads after a few turns.
        for _ in range(6):
            for process in self.processes:
                process.turn()
                process.notify()
        (leader,) = [leadership for process in self.processes for leadership in process.leaderships if leadership.valid]
        assert leader_of(self.server.session()).term == leader.term
        leader.store.transact(Create("work-last"))
        self.check_log()

    def check_log(self):
        """Asserts that, in the store's order of transactions, each write was applied in its own term."""
        term, works = 0, collections.Counter()
        for _session, operations in self.server.log:
            work = [create for create in operations if isinstance(create, Create) and create.key.startswith("work-")]
            if work:
                (check,) = [check for check in operations if isinstance(check, Check) and check.key == TERM]
                assert check.version == term
                works.update(create.key for create in work)
            term += sum(isinstance(operation, Replace) and operation.key == TERM for operation in operations)
        assert not works or max(works.values()) == 1
        assert {f"work-{number}" for number, _ in self.done} <= set(works)


class Timely(World):
    """The store ends sessions only after their timeout, so even by their own clocks, no two processes lead."""

    timely = True


TestWorld = World.TestCase
TestWorld.settings = settings(max_examples=80, stateful_step_count=40)
TestTimely = Timely.TestCase
TestTimely.settings = settings(max_examples=80, stateful_step_count=40)


@pytest.mark.long
class TestWorldLong(World.TestCase):
    """More and longer schedules."""

    settings = settings(max_examples=2000, stateful_step_count=60)


@pytest.mark.long
class TestTimelyLong(Timely.TestCase):
    """More and longer schedules."""

    settings = settings(max_examples=2000, stateful_step_count=60)


@pytest.mark.parametrize("session", ["own session", "job's session"])
def test_a_late_leader_cannot_remove_a_resubmitted_job(session):
    """A leader that has not yet noticed the loss of its leadership cannot remove a job that was submitted again since.

    The leader of the next term has stored the new submission, so the old leader's write is refused.
    """
    world = World()
    world.begin(2)
    first, second = world.processes
    first.turn()
    (leadership,) = first.leaderships
    leadership.store.ensure("jobs")
    leadership.store.transact(Create("jobs/a", b"submitted to 1"))
    job = leadership.store if "own" in session else FencedStore(world.open(), fence(leadership.term))
    finished = leadership.store.read("jobs/a")

    world.server.expire(first.client.store.session)  # the first process is not notified
    second.turn()
    (next_leadership,) = second.leaderships
    assert (leadership.term, next_leadership.term) == (1, 2)
    assert leadership.valid
    next_leadership.store.transact(Replace("jobs/a", b"submitted to 2", finished.version))
    with pytest.raises(LeadershipLost):
        job.transact(Delete("jobs/a"))
    assert next_leadership.store.read("jobs/a").value == b"submitted to 2"

    first.turn()
    assert not leadership.valid
    first.notify()
    assert first.calls == []  # the leadership ended before its callbacks were called
    with pytest.raises(LeadershipLost, match="no longer leads in term 1: session-1 has expired"):
        leadership.check()
    for _ in range(3):
        first.turn()
    assert len(first.leaderships) == 1
    assert next_leadership.valid
