"""Who leads, without threads: the rules at length, and processes that die, pause and hear late, over a store in memory."""

from __future__ import annotations

import collections
import contextlib
import copy
import json

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from modelstore import ModelServer, ModelStore
from stagecrew.errors import (
    LeadershipLost,
    PossiblyInconsistentError,
    RecoveryMisused,
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
    Lost,
    NoResponse,
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

TIMEOUT = 3.0

# -- the rules


def test_a_leadership():
    """Granted, renewed, and over at two thirds of the time-out after the last question that was answered was sent."""
    election = Election()
    assert election.handle(Acquired(1, requested_at=10.0, timeout=TIMEOUT), 10.5) == Granted(1)
    assert (election.term, election.deadline) == (1, 12.0)
    assert election.handle(Renewed(1, requested_at=11.0), 11.9) is None
    assert election.deadline == 13.0
    assert election.handle(Renewed(1, requested_at=10.5), 12.0) is None
    assert election.deadline == 13.0, "an old answer shortens nothing"
    assert election.handle(NoResponse(), 12.9) is None
    assert election.is_valid(12.9)
    assert not election.is_valid(13.0)
    over = election.handle(Renewed(1, requested_at=12.8), 13.0)
    assert over == Revoked(1, "the store has not responded for two thirds of the session timeout of 3 s"), (
        "it came too late"
    )
    assert election.handle(Ticked(), 14.0) is None


def test_without_a_time_out():
    """Where a session ends with its process alone, time ends nothing."""
    election = Election()
    assert election.handle(Acquired(1, 0.0), 1e6) == Granted(1)
    assert election.handle(Renewed(1, 0.0), 1e9) is None
    assert election.handle(Ticked(), 1e12) is None
    assert election.is_valid(1e15)


@pytest.mark.parametrize("end", [Suspended(), Lost("gone"), Lost("gone", 3), Resigned()], ids=repr)
def test_what_ends_it_at_once(end):
    """An acquisition that was asked for before is not led with; one that was asked for later is, but after resigning."""
    election = Election()
    election.handle(Acquired(3, 0.0), 0.0)
    assert isinstance(election.handle(end, 1.0), Revoked)
    assert election.handle(end, 1.0) is None
    assert election.handle(Acquired(4, 0.9), 1.1) is None
    assert election.handle(Acquired(4, 1.0), 1.1) is None
    assert election.handle(Acquired(3, 1.1), 1.2) is None, "a term is granted once"
    later = election.handle(Acquired(5, 1.1), 1.2)
    assert later == (None if isinstance(end, Resigned) else Granted(5))


def test_what_is_heard_of_another_term():
    """It changes nothing: an old session's end is not that of a new one."""
    election = Election()
    election.handle(Acquired(5, 0.0, TIMEOUT), 0.0)
    assert election.handle(Lost("late", 4), 1.0) is None
    assert election.handle(Renewed(4, 1.0), 1.0) is None
    assert (election.term, election.deadline) == (5, 2.0)


HEARD = [
    *(lambda now, term=term, ago=ago: Acquired(term, now - ago, TIMEOUT) for term in (1, 2) for ago in (0.5, 1.5, 2.5)),
    lambda now: Acquired(3, now - 0.5),
    *(lambda now, term=term, ago=ago: Renewed(term, now - ago) for term in (1, 2) for ago in (0.5, 1.5)),
    lambda now: Refused(),
    lambda now: Suspended(),
    lambda now: Lost("gone"),
    lambda now: Ticked(),
    lambda now: Resigned(),
]


def follow(election, now, depth, story):
    """Everything that may be heard next, each after one second. `story` is the terms granted, and what would end the last one."""
    if depth == 0:
        return 1
    total = 0
    now += 1.0
    for make in HEARD:
        heard, one = make(now), copy.copy(election)
        granted, leads, last_answer, ends_at_once, timed, broken_at = story
        before = one.is_valid(now)
        output = one.handle(heard, now)
        if isinstance(output, Granted):
            assert isinstance(heard, Acquired)
            assert leads is None
            assert not ends_at_once
            assert heard.requested_at > broken_at
            assert one.is_valid(now), "what comes too late is not led with"
            assert output.term == heard.term > max(granted, default=0)
            granted, leads, timed = (*granted, output.term), output.term, heard.timeout is not None
            last_answer = heard.requested_at
        elif isinstance(output, Revoked):
            assert output.term == leads
            leads, broken_at = None, now
        elif isinstance(heard, Renewed) and heard.term == leads:
            last_answer = max(last_answer, heard.requested_at)
        if isinstance(heard, (Suspended, Lost, Resigned)):
            broken_at = now
            assert leads is None
        if isinstance(heard, Resigned):
            ends_at_once = True
        assert one.term == leads
        if not before and not isinstance(output, Granted):
            assert not one.is_valid(now), "nothing but an acquisition makes it valid"
        if leads is not None and timed:
            assert one.is_valid(now) == (now < last_answer + 2.0)
            assert not one.is_valid(last_answer + 2.0)
        else:
            assert one.is_valid(now) == (leads is not None)
        total += follow(one, now, depth - 1, (granted, leads, last_answer, ends_at_once, timed, broken_at))
    return total


def test_all_that_can_be_heard():
    """Of each sequence of four: never valid behind an end or the deadline, a grant for each revocation, terms only grow."""
    assert follow(Election(), 10.0, 4, ((), None, 0.0, False, False, float("-inf"))) == len(HEARD) ** 4


@pytest.mark.long
def test_all_that_can_be_heard_long():
    """Of five."""
    follow(Election(), 10.0, 5, ((), None, 0.0, False, False, float("-inf")))


# -- fences and observers


def acquired(server, session=None):
    """The questions of a new session, and its term."""
    questions = LeaseClient(session or server.session(), lambda: 0.0)
    heard = questions.acquire_or_renew()
    assert isinstance(heard, Acquired)
    return questions, heard.term


def test_fenced_writes():
    """They are done while the term lasts; later nothing is, and conflicts count from the operations that were given."""
    server = ModelServer()
    questions, term = acquired(server)
    store = FencedStore(questions.store, fence(term))
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
    assert (store.session, store.timeout, store.suspended) == (questions.store.session, None, False)

    job = FencedStore(server.session(), fence(term), Check("jobs/a", 1))  # of a process with a session of its own
    job.transact(Replace("jobs/a", b"of the job", 1))
    with pytest.raises(LeadershipLost, match="jobs/a does not have version 1 any more"):
        job.transact(Create("jobs/c"))
    job = FencedStore(job, Check("jobs/a", 2))
    server.expire(questions.store.session)
    _, following = acquired(server)
    assert following == 2
    before = server.entries
    for write in (
        lambda: job.transact(Replace("jobs/a", b"late", 2)),
        lambda: job.ensure("jobs/a", "jobs/d"),
        lambda: job.transact(),
    ):
        with pytest.raises(LeadershipLost, match="leader/term does not have version 1 any more .version."):
            write()
    assert server.entries is before
    job.ensure("jobs/a")  # it is there: nothing is written
    job.close()
    assert job.read("jobs/a").value == b"of the job", "its session is its owner's to close"
    with pytest.raises(RecoveryMisused, match="0 is not a term"):
        fence(0)


def test_fenced_and_nobody_knows():
    """What the store does not know, a fence does not either."""
    server = ModelServer()
    questions, term = acquired(server)
    store = FencedStore(questions.store, fence(term))

    def lost(_session, _operations, moment):
        if moment == "after":
            raise PossiblyInconsistentError("the answer was lost")

    server.fault = lost
    with pytest.raises(PossiblyInconsistentError):
        store.transact(Create("a"))
    assert "a" in server.entries


def test_who_leads():
    """It can be read by everybody: term, host, process, since when; None when nobody does; an error when it is foreign."""
    server = ModelServer()
    observer = server.session()
    assert leader_of(observer) is None
    questions, term = acquired(server)
    info = leader_of(observer)
    assert (info.term, info.session) == (term, questions.store.session)
    assert info.pid > 0
    assert info.host
    assert info.since.tzinfo is not None
    assert LeaderInfo.from_bytes(info.to_bytes()) == info
    assert server.entries[TERM].value == server.entries[HOLDER].value
    questions.store.close()
    assert leader_of(observer) is None
    for value in (b"", b"null", b"{}", b"[]", b"\xff", json.dumps({"format": 1, "term": 1}).encode()):
        observer.transact(Create(HOLDER, value))
        with pytest.raises(StoreUnsupported, match="leader/holder was not written by stagecrew"):
            leader_of(observer)
        observer.transact(Delete(HOLDER))
    observer.transact(Create(HOLDER, b'{"format": 2}'))
    with pytest.raises(StoreUnsupported, match="does not have format 1"):
        leader_of(observer)


# -- questions


def test_a_standby_writes_nothing():
    """While another leads it only reads."""
    server = ModelServer()
    acquired(server)
    standby = LeaseClient(server.session(), lambda: 0.0)
    assert standby.acquire_or_renew() == Refused()
    done = len(server.log)
    assert [standby.acquire_or_renew() for _ in range(5)] == [Refused()] * 5
    assert len(server.log) == done


def test_an_outcome_that_nobody_knows():
    """It is asked again, whether it was done or not: one term, held once."""
    for moment in ("before", "after"):
        server = ModelServer()
        times = iter(range(10))
        questions = LeaseClient(server.session(), lambda times=times: float(next(times)))
        lost = [PossiblyInconsistentError("lost")] * 3

        def fault(_session, operations, when, moment=moment, lost=lost):
            if when == moment and lost and operations[0].key == HOLDER:
                raise lost.pop()

        server.fault = fault
        heard = [questions.acquire_or_renew() for _ in range(3)]
        assert (
            [type(one) for one in heard] == [NoResponse] * 3 if moment == "before" else [NoResponse, Acquired, Renewed]
        )
        while not isinstance(heard[-1], Renewed):
            heard.append(questions.acquire_or_renew())
        (found,) = [one for one in heard if isinstance(one, Acquired)]
        assert found.term == 1 == server.entries[TERM].version
        assert found.requested_at == (3.0 if moment == "before" else 1.0), "of the question that was answered"


def test_an_acquisition_that_is_done_late():
    """A session that holds what it was refused gives it back, and does not lead with it."""
    server = ModelServer()
    late = LeaseClient(server.session(), lambda: 0.0)
    in_flight = []

    def lost(session, operations, moment):
        if moment == "before" and operations[0].key == HOLDER and session == late.store.session:
            in_flight.append((session, operations))
            server.fault = lambda *_: None
            raise PossiblyInconsistentError("the question is under way")

    server.fault = lost
    assert isinstance(late.acquire_or_renew(), NoResponse)
    other = server.session()
    other.transact(Create(HOLDER, b"of another", ephemeral=True))
    assert late.acquire_or_renew() == Refused()
    other.close()
    server.apply(*in_flight[0])
    assert late.acquire_or_renew() == Lost("this session holds a term that was not granted to it")


@pytest.mark.parametrize("gone", [HOLDER, TERM])
def test_a_leader_whose_entry_is_gone(gone):
    """It hears so with its next question."""
    server = ModelServer()
    questions, _ = acquired(server)
    assert questions.acquire_or_renew() == Renewed(1, 0.0)
    server.session().transact(Delete(gone))
    assert isinstance(questions.acquire_or_renew(), Lost)


def test_a_tree_that_was_deleted():
    """A standby makes it again."""
    server = ModelServer()
    questions, _ = acquired(server)
    standby = LeaseClient(server.session(), lambda: 0.0)
    assert standby.acquire_or_renew() == Refused()
    questions.store.close()
    server.session().transact(Delete(TERM), Delete("leader"))
    assert standby.acquire_or_renew() == Refused()
    assert isinstance(standby.acquire_or_renew(), Acquired)


# -- processes over a store in memory


class Late(ModelStore):
    """Hears late that its session is over: when it is told, or asks."""

    timeout = TIMEOUT
    suspended = False


class Process(Candidate):
    """A contender whose threads are the test."""

    def __init__(self, world):
        self.world, self.questions, self.told, self.asking = world, None, None, False
        self.leaderships, self.calls = [], []
        super().__init__(world.open, None, None, clock=world.clock)

    def _start(self):
        pass

    def turn(self):
        """Asks once; leaves the session as soon as it may."""
        if self.asking:
            return  # this is in the middle of it
        self.asking = True
        try:
            self.asked()
        finally:
            self.asking = False

    def asked(self):
        if self.questions is None:
            if self._granted is not None:
                return  # its callbacks run
            self.questions = LeaseClient(self._open_store(), self._clock)
        if not self._send_request(self.questions):
            self._handle(Lost("its session is not used any more"))
            if self._granted is None or self._granted not in self.leaderships:
                self._granted = None
                self.questions.store.close()
                self.questions = None
        elif self._granted is not None and self._granted not in self.leaderships:
            self.leaderships.append(self._granted)

    def tell(self):
        """What the other thread would: on_grant, then on_revoke, each some time later."""
        granted = self._granted
        if granted is None or granted not in self.leaderships:
            return
        if self.told is not granted and granted.valid:
            self.told = granted
            self.calls.append(("grant", granted.term))
        elif not granted.valid:
            if self.told is granted:
                self.calls.append(("revoke", granted.term))
            self._granted = None

    def impatient(self):
        """It has waited long enough for its callbacks, and leaves the session while they run on."""
        waits = self.questions is not None and not self.asking
        if waits and self._granted is not None and self._granted.reason is not None:
            self.questions.store.close()
            self.questions = None


class World(RuleBasedStateMachine):
    """Contenders over one store. Anything may happen before and behind each transaction, also that it is done much later."""

    timely = False

    @initialize(number=st.integers(2, 3))
    def begin(self, number):
        self.now, self.numbers = 0.0, 0
        self.server = ModelServer()
        self.server.fault = self.happens
        self.heard, self.script, self.in_flight, self.done = {}, [], [], []
        self.processes = [Process(self) for _ in range(number)]

    def clock(self):
        self.now += 1e-6  # no two moments are the same
        return self.now

    def open(self):
        store = Late(self.server, self.server.session().session)
        self.heard[store.session] = self.now
        return store

    def happens(self, session, operations, moment):
        script, self.script = self.script, []
        for when, what, which in script:
            if when != moment:
                self.script.append((when, what, which))
                continue
            if what == "turn":
                self.processes[which % len(self.processes)].turn()
            elif what == "time":
                self.now += which
            elif what == "expire":
                self.expire(which)
            elif what == "unavailable" and moment == "before":
                raise StoreUnavailable("the store is away")
            elif what == "lost":
                raise PossiblyInconsistentError("lost")
            elif what == "late" and moment == "before":
                self.in_flight.append((session, operations))
                raise PossiblyInconsistentError("under way")
        if moment == "before":
            self.heard[session] = self.now

    def expire(self, which):
        live = sorted(self.server.live)
        if self.timely:
            live = [name for name in live if self.now - self.heard[name] > TIMEOUT]
        if live:
            self.server.expire(live[which % len(live)])

    scripts = st.lists(
        st.tuples(
            st.sampled_from(["before", "after"]),
            st.sampled_from(["turn", "turn", "time", "expire", "unavailable", "lost", "late"]),
            st.integers(0, 4),
        ),
        max_size=3,
    )

    @rule(which=st.integers(0, 2), script=scripts, rounds=st.integers(1, 3))
    def one_asks(self, which, script, rounds):
        self.script = list(script)
        for _ in range(rounds):
            self.processes[which % len(self.processes)].turn()
        self.script = []

    @rule(which=st.integers(0, 2))
    def one_is_told(self, which):
        self.processes[which % len(self.processes)].tell()

    @rule(which=st.integers(0, 2))
    def one_is_impatient(self, which):
        self.processes[which % len(self.processes)].impatient()

    @rule(which=st.integers(0, 2), down=st.booleans())
    def a_connection_breaks_or_heals(self, which, down):
        process = self.processes[which % len(self.processes)]
        if process.questions is not None and process.questions.store.session in self.server.live:
            process.questions.store.suspended = down

    @rule(seconds=st.floats(0.01, 4.0))
    def time_passes(self, seconds):
        self.now += seconds

    @rule(which=st.integers(0, 9))
    def a_session_expires(self, which):
        self.expire(which)

    @precondition(lambda self: self.in_flight)
    @rule(which=st.integers(0, 9))
    def one_arrives(self, which):
        session, operations = self.in_flight.pop(which % len(self.in_flight))
        if session in self.server.live:
            with contextlib.suppress(StoreConflict):
                self.server.apply(session, operations)

    @rule(which=st.integers(0, 9), how=st.sampled_from(["leader", "job", "looked long ago"]), script=scripts)
    def one_writes(self, which, how, script):
        """As of any leadership there ever was: its leader, its job's process, or whoever has looked and then slept."""
        held = [one for process in self.processes for one in process.leaderships]
        if not held:
            return
        leadership = held[which % len(held)]
        store = leadership.store
        if how == "job":
            store = FencedStore(self.open(), fence(leadership.term))
        elif how == "looked long ago":
            store = FencedStore(store._store, fence(leadership.term))
        self.numbers += 1
        self.script = list(script)
        try:
            store.transact(Create(f"work-{self.numbers}", str(leadership.term).encode()))
            self.done.append((self.numbers, leadership.term))
        except LeadershipLost:
            assert f"work-{self.numbers}" not in self.server.entries
        except (SessionLost, StoreUnavailable, PossiblyInconsistentError):
            pass
        self.script = []

    @precondition(lambda self: self.now > 0)
    @rule(which=st.integers(0, 2))
    def one_resigns(self, which):
        process = self.processes[which % len(self.processes)]
        process._handle(Resigned())
        process._closing = True
        self.processes[self.processes.index(process)] = successor = Process(self)  # another is started in its place
        successor.leaderships = process.leaderships
        if process.questions is not None:
            process.questions.store.close()

    @invariant()
    def one_at_most(self):
        if not hasattr(self, "server"):
            return
        led = [one for process in self.processes for one in process.leaderships]
        valid = [one for one in led if one.valid]
        if self.timely:
            assert len(valid) <= 1, "two lead by their own clocks"
        current = self.server.entries[TERM].version if TERM in self.server.entries else 0
        terms = [one.term for one in led]
        assert len(set(terms)) == len(terms), "a term is granted once"
        assert all(term <= current for term in terms)
        for process in self.processes:
            mine = [one.term for one in process.leaderships]
            assert mine == sorted(mine)
            kinds = [kind for kind, _ in process.calls]
            assert kinds == ["grant", "revoke"] * (len(kinds) // 2) + ["grant"] * (len(kinds) % 2)
            assert [t for k, t in process.calls if k == "revoke"] == [t for k, t in process.calls if k == "grant"][
                : len(kinds) // 2
            ]

    def teardown(self):
        if not hasattr(self, "server"):
            return
        self.follow_the_log()
        self.script, self.server.fault = [], lambda *_: None
        for session in list(self.server.live):
            if not any(one.questions and one.questions.store.session == session for one in self.processes):
                self.server.expire(session)
        for process in self.processes:
            if process.questions is not None and process.questions.store.session in self.server.live:
                process.questions.store.suspended = False
        # All is well again: soon one leads, and only one.
        for _ in range(6):
            for process in self.processes:
                process.turn()
                process.tell()
        (leader,) = [one for process in self.processes for one in process.leaderships if one.valid]
        assert leader_of(self.server.session()).term == leader.term
        leader.store.transact(Create("work-last"))
        self.follow_the_log()

    def follow_the_log(self):
        """Each write was done in its own term: the store's own order knows no other."""
        term, works = 0, collections.Counter()
        for _session, operations in self.server.log:
            work = [one for one in operations if isinstance(one, Create) and one.key.startswith("work-")]
            if work:
                (check,) = [one for one in operations if isinstance(one, Check) and one.key == TERM]
                assert check.version == term
                works.update(one.key for one in work)
            term += sum(isinstance(one, Replace) and one.key == TERM for one in operations)
        assert not works or max(works.values()) == 1
        assert {f"work-{number}" for number, _ in self.done} <= set(works)


class Timely(World):
    """A store that ends sessions only after their time-out, as promised: no two lead even by their own clocks."""

    timely = True


TestWorld = World.TestCase
TestWorld.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestTimely = Timely.TestCase
TestTimely.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


@pytest.mark.long
class TestWorldLong(World.TestCase):
    """Many more."""

    settings = settings(max_examples=2000, stateful_step_count=60, deadline=None)


@pytest.mark.long
class TestTimelyLong(Timely.TestCase):
    """Many more."""

    settings = settings(max_examples=2000, stateful_step_count=60, deadline=None)


@pytest.mark.parametrize("whose", ["of its own session", "of a job's session"])
def test_the_seeds_schedule(whose):
    """Leader 1 is told late: it removes a finished job while leader 2, granted before, submits it again. The job is there."""
    world = World()
    world.begin(2)
    first, second = world.processes
    first.turn()
    (one,) = first.leaderships
    one.store.ensure("jobs")
    one.store.transact(Create("jobs/a", b"submitted to 1"))
    job = one.store if "own" in whose else FencedStore(world.open(), fence(one.term))
    finished = one.store.read("jobs/a")

    world.server.expire(first.questions.store.session)  # nobody tells
    second.turn()
    (two,) = second.leaderships
    assert (one.term, two.term) == (1, 2)
    assert one.valid
    two.store.transact(Replace("jobs/a", b"submitted to 2", finished.version))
    with pytest.raises(LeadershipLost):
        job.transact(Delete("jobs/a"))
    assert two.store.read("jobs/a").value == b"submitted to 2"

    first.turn()
    assert not one.valid
    first.tell()
    assert first.calls == []  # it was over before it was told of
    with pytest.raises(LeadershipLost, match="does not lead in term 1 any more: session-1 is over"):
        one.check()
    for _ in range(3):
        first.turn()
    assert len(first.leaderships) == 1
    assert two.valid
