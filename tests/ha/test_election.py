"""Leadership of real processes over real stores: killed, stopped, cut off, and over a server that is restarted."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
import uuid

import pytest

from contending import Contending
from crewtools import eventually
from stagecrew.errors import LeadershipLost
from stagecrew.recovery.leadership.fencing import FencedStore, fence, leader_of
from stagecrew.recovery.stores import open_store
from stagecrew.recovery.stores.contract import Check
from zookeeper import Proxy
from zookeeper import zookeeper as own_server

#: Seconds of a session at ZooKeeper.
TIMEOUT = 3.0
#: What a loaded machine may add to any figure.
SLACK = 3.0


class Contest:
    """Processes that contend at one store."""

    def __init__(self, kind, url, folder, stack):
        self.kind, self.url, self._folder, self._stack = kind, url, folder, stack
        self.processes = []
        self.observe()
        #: By when another leads that one died, and the figure that is promised.
        self.promised = 1.0 if kind == "sqlite" else TIMEOUT + 1.0

    def observe(self):
        self.observer = open_store(self.url)
        self._stack.callback(self.observer.close)

    def begin(self, url=None):
        process = self._stack.enter_context(Contending(url or self.url, self._folder, f"p{len(self.processes)}"))
        self.processes.append(process)
        eventually(lambda: process.said("begins"), 30, f"{process.name} begins")
        return process

    def grants(self):
        """(term, process, when), in the order of the terms."""
        return sorted(
            ((grant["term"], process, grant["at"]) for process in self.processes for grant in process.said("grant")),
            key=lambda one: one[0],
        )

    def granted(self, term, seconds=40.0):
        """Waits until this term, or a later one, was granted."""
        return eventually(lambda: [one for one in self.grants() if one[0] >= term], seconds, f"term {term}")[0]

    def writes(self):
        """The term of each write, in the store's own order."""
        keys = self.observer.children("work")
        assert keys == [f"{number:08d}" for number in range(len(keys))]
        return [self.observer.read(f"work/{key}").value.decode().split() for key in keys]

    def written(self, term, who="job"):
        """Waits for a write of that term."""
        number = len(self.observer.children("work"))
        eventually(
            lambda: [str(term), who] in [
                self.observer.read(f"work/{key}").value.decode().split() for key in self.observer.children("work")[max(0, number - 5) :]
            ], 20, f"a {who} of term {term} writes",
        )  # fmt: skip

    def check(self):
        """Each term had one process, and behind the first write of a term there is none of an earlier one."""
        terms = [term for term, _, _ in self.grants()]
        assert len(set(terms)) == len(terms), "a term was granted twice"
        for process in self.processes:
            granted = [one["term"] for one in process.said("grant")]
            revoked = [one["term"] for one in process.said("revoke")]
            assert revoked in (granted, granted[:-1])
        written = [int(term) for term, _ in self.writes()]
        assert written == sorted(written), "a leader of before has written"
        assert set(written) <= set(terms)


@pytest.fixture
def contest(request, tmp_path):
    kind = getattr(request, "param", "zookeeper")
    with contextlib.ExitStack() as stack:
        if kind == "sqlite":
            url = f"sqlite://{tmp_path}/crew.db"
        else:
            hosts = request.getfixturevalue("zookeeper").hosts
            url = f"zookeeper://{hosts}/t{uuid.uuid4().hex}?timeout={TIMEOUT}"
        contest = Contest(kind, url, tmp_path, stack)
        yield contest
        if contest.processes:
            contest.check()


both = pytest.mark.parametrize("contest", ["sqlite", "zookeeper"], indirect=True)


def killed(contest, kills):
    """Kills the leader so many times; answers how long each took until another led, in seconds."""
    leader, _standby = contest.begin(), contest.begin()
    took, term = [], 1
    _, leader, _ = contest.granted(1)
    for _ in range(kills):
        contest.written(term)
        job = FencedStore(contest.observer, fence(term))  # of a process that lives on
        job.transact(Check("count"))
        contest.begin()  # the next standby
        at = leader.signal(signal.SIGKILL)
        term, leader, granted_at = contest.granted(term + 1)
        took.append(granted_at - at)
        with pytest.raises(LeadershipLost):
            job.transact(Check("count"))
        info = leader_of(contest.observer)
        assert (info.term, info.pid) == (term, leader.pid)
    assert term == kills + 1
    print(f"\n{contest.kind}: another led {', '.join(f'{one:.2f}' for one in sorted(took))} s behind SIGKILL")
    assert max(took) < contest.promised + SLACK
    return took


@pytest.mark.parametrize(
    ("contest", "kills"),
    [
        ("sqlite", 3),
        ("zookeeper", 1),
        *(pytest.param(kind, 10, marks=pytest.mark.long) for kind in ("sqlite", "zookeeper")),
    ],
    indirect=["contest"],
)
def test_a_leader_is_killed(contest, kills):
    """A standby leads within the session's time-out and one second (ZooKeeper), or one second (SQLite), in the next term."""
    killed(contest, kills)


@both
def test_a_leader_leaves(contest):
    """It stands down, and another leads at once; nothing of it is left in the store."""
    first, second = contest.begin(), contest.begin()
    _, leader, _ = contest.granted(1)
    standby = second if leader is first else first
    contest.written(1)
    began = time.time()
    assert leader.leave() == 0
    assert [one["reason"] for one in leader.said("revoke")] == ["it has resigned"]
    assert leader.said("closed", ended=True)
    _, successor, granted_at = contest.granted(2)
    assert successor is standby
    assert granted_at - began < 1.0 + SLACK
    contest.written(2)
    assert successor.leave() == 0
    assert leader_of(contest.observer) is None


def test_a_leader_is_stopped_past_its_session(contest):
    """Another leads. When the first goes on, not one write of its term is done, of its jobs neither, and it stands down by itself."""
    contest.begin()
    _, first, _ = contest.granted(1)
    contest.begin()
    contest.written(1)
    contest.written(1, "leader")
    stopped_at = first.signal(signal.SIGSTOP)
    _, second, granted_at = contest.granted(2)
    assert second is not first
    assert granted_at - stopped_at < contest.promised + SLACK
    contest.written(2)
    first.signal(signal.SIGCONT)
    eventually(lambda: first.said("revoke", term=1), 10, "it stands down")
    eventually(lambda: first.said("refused", who="leader", term=1), 20, "what the leader writes is refused")
    eventually(lambda: first.said("refused", who="job", error="LeadershipLost"), 20, "what its job writes is refused")
    contest.written(2)
    assert leader_of(contest.observer).pid == second.pid
    assert second.leave() == 0
    assert contest.granted(3)[1] is first, "it campaigns again, with a new session"


@pytest.mark.parametrize("contest", ["sqlite"], indirect=True)
def test_a_stopped_leader_on_sqlite_leads(contest):
    """Its process lives, and so does its session: nobody else leads, and it goes on in its term."""
    contest.begin()
    _, first, _ = contest.granted(1)
    contest.written(1)
    contest.begin()
    first.signal(signal.SIGSTOP)
    threading.Event().wait(1.5)  # what must not happen would have: six times a standby's period
    assert len(contest.grants()) == 1
    first.signal(signal.SIGCONT)
    contest.written(1)
    assert first.said("revoke") == []


def test_a_leader_is_cut_off_and_heals(contest, request):
    """A network that swallows all: it stands down before another leads, says so, and campaigns again when it heals."""
    server = request.getfixturevalue("zookeeper")
    proxy = Proxy(server.port)
    try:
        first = contest.begin(contest.url.replace(server.hosts, proxy.hosts))
        contest.granted(1)
        second = contest.begin()
        contest.written(1)
        cut_at = time.time()
        proxy.hold("to", "from")
        term, leader, granted_at = contest.granted(2)
        assert (term, leader) == (2, second)
        (revoked,) = first.said("revoke")
        print(
            f"\ncut off: it stood down after {revoked['at'] - cut_at:.2f} s, another led after {granted_at - cut_at:.2f} s"
        )
        assert revoked["at"] < granted_at
        assert granted_at - cut_at < contest.promised + SLACK
        contest.written(2)
        proxy.heal()
        eventually(lambda: first.said("refused", who="job", error="LeadershipLost"), 30, "its job is told")
        assert second.leave() == 0
        assert contest.granted(3)[1] is first
        assert first.leave() == 0
    finally:
        proxy.close()


@pytest.mark.long
def test_the_server_is_restarted(tmp_path):
    """Killed and started again: the leader stands down, one leads again in a later term, and no write is of two terms."""
    with own_server() as server, contextlib.ExitStack() as stack:
        contest = Contest("zookeeper", f"zookeeper://{server.hosts}/crew?timeout={TIMEOUT}", tmp_path, stack)
        contest.begin()
        contest.begin()
        _, leader, _ = contest.granted(1)
        contest.written(1)
        for _ in range(3):
            term = contest.grants()[-1][0]
            server.kill()
            eventually(lambda leader=leader, term=term: leader.said("revoke", term=term), 30, "it stands down")
            server.start()
            server.wait()
            contest.observe()  # the session of before may have ended
            term, leader, _ = contest.granted(term + 1, 60)
            contest.written(term)
        contest.check()
