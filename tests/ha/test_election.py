"""Leader election with real processes and stores: killed, suspended and cut-off leaders, and a restarted server."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
import uuid

import pytest

from stagecrew.errors import LeadershipLost
from stagecrew.recovery.leadership.fencing import FencedStore, fence, leader_of
from stagecrew.recovery.stores import open_store
from stagecrew.recovery.stores.contract import Check
from support.candidate_process import CandidateProcess
from support.tcp_proxy import Proxy
from support.waiting import eventually
from support.zookeeper import zookeeper as own_server

#: The session timeout at ZooKeeper, in seconds.
TIMEOUT = 3.0
#: How many seconds a loaded machine may add to any limit.
SLACK = 3.0


class Campaign:
    """Processes that campaign for leadership at one store."""

    def __init__(self, kind, url, folder, stack):
        self.kind, self.url, self._folder, self._stack = kind, url, folder, stack
        self.processes = []
        self.observe()
        #: The promised maximum time between the death of a leader and the next grant, in seconds.
        self.promised_seconds = 1.0 if kind == "sqlite" else TIMEOUT + 1.0

    def observe(self):
        self.observer = open_store(self.url)
        self._stack.callback(self.observer.close)

    def start_process(self, url=None):
        process = self._stack.enter_context(CandidateProcess(url or self.url, self._folder, f"p{len(self.processes)}"))
        self.processes.append(process)
        eventually(lambda: process.events("begins"), 30, f"{process.name} starts")
        return process

    def grants(self):
        """Returns the term, process and time of each grant, ordered by term."""
        return sorted(
            ((grant["term"], process, grant["at"]) for process in self.processes for grant in process.events("grant")),
            key=lambda grant: grant[0],
        )

    def wait_for_term(self, term, seconds=40.0):
        """Waits until this term or a later one has been granted."""
        return eventually(lambda: [grant for grant in self.grants() if grant[0] >= term], seconds, f"term {term}")[0]

    def writes(self):
        """Returns the term and the writer of each write, in the store's order."""
        keys = self.observer.children("work")
        assert keys == [f"{number:08d}" for number in range(len(keys))]
        return [self.observer.read(f"work/{key}").value.decode().split() for key in keys]

    def wait_for_write(self, term, writer="job"):
        """Waits for a write of this term by this writer."""
        number = len(self.observer.children("work"))
        eventually(
            lambda: [str(term), writer] in [
                self.observer.read(f"work/{key}").value.decode().split() for key in self.observer.children("work")[max(0, number - 5) :]
            ], 20, f"a {writer} of term {term} writes",
        )  # fmt: skip

    def check(self):
        """Checks that each term was granted to one process, and that no write follows a write of a later term."""
        terms = [term for term, _, _ in self.grants()]
        assert len(set(terms)) == len(terms), "a term was granted twice"
        for process in self.processes:
            granted_terms = [one["term"] for one in process.events("grant")]
            revoked_terms = [one["term"] for one in process.events("revoke")]
            assert revoked_terms in (granted_terms, granted_terms[:-1])
        written_terms = [int(term) for term, _ in self.writes()]
        assert written_terms == sorted(written_terms), "an earlier leader has written"
        assert set(written_terms) <= set(terms)


@pytest.fixture
def campaign(request, tmp_path):
    kind = getattr(request, "param", "zookeeper")
    with contextlib.ExitStack() as stack:
        if kind == "sqlite":
            url = f"sqlite://{tmp_path}/crew.db"
        else:
            hosts = request.getfixturevalue("zookeeper").hosts
            url = f"zookeeper://{hosts}/t{uuid.uuid4().hex}?timeout={TIMEOUT}"
        campaign = Campaign(kind, url, tmp_path, stack)
        yield campaign
        if campaign.processes:
            campaign.check()


BOTH_STORES = pytest.mark.parametrize("campaign", ["sqlite", "zookeeper"], indirect=True)


def kill_leaders(campaign, kills):
    """Kills the leader `kills` times. Returns the seconds until another process led, for each kill."""
    leader, _standby = campaign.start_process(), campaign.start_process()
    takeover_seconds, term = [], 1
    _, leader, _ = campaign.wait_for_term(1)
    for _ in range(kills):
        campaign.wait_for_write(term)
        job = FencedStore(campaign.observer, fence(term))  # as in a job's process that survives the leader
        job.transact(Check("count"))
        campaign.start_process()  # the next standby
        killed_at = leader.signal(signal.SIGKILL)
        term, leader, granted_at = campaign.wait_for_term(term + 1)
        takeover_seconds.append(granted_at - killed_at)
        with pytest.raises(LeadershipLost):
            job.transact(Check("count"))
        info = leader_of(campaign.observer)
        assert (info.term, info.pid) == (term, leader.pid)
    assert term == kills + 1
    print(
        f"\n{campaign.kind}: another process led {', '.join(f'{one:.2f}' for one in sorted(takeover_seconds))} s after SIGKILL"
    )
    assert max(takeover_seconds) < campaign.promised_seconds + SLACK
    return takeover_seconds


@pytest.mark.parametrize(
    ("campaign", "kills"),
    [
        ("sqlite", 3),
        ("zookeeper", 1),
        *(pytest.param(kind, 10, marks=pytest.mark.long) for kind in ("sqlite", "zookeeper")),
    ],
    indirect=["campaign"],
)
def test_a_standby_leads_after_the_leader_is_killed(campaign, kills):
    """A standby leads in the next term within 1 s (SQLite), or within the session timeout plus 1 s (ZooKeeper)."""
    kill_leaders(campaign, kills)


@BOTH_STORES
def test_a_standby_leads_immediately_after_the_leader_resigns(campaign):
    """When a leader resigns, another process leads immediately. The store no longer names the resigned leader."""
    first, second = campaign.start_process(), campaign.start_process()
    _, leader, _ = campaign.wait_for_term(1)
    standby = second if leader is first else first
    campaign.wait_for_write(1)
    began = time.time()
    assert leader.close() == 0
    assert [one["reason"] for one in leader.events("revoke")] == ["it has resigned"]
    assert leader.events("closed", ended=True)
    _, successor, granted_at = campaign.wait_for_term(2)
    assert successor is standby
    assert granted_at - began < 1.0 + SLACK
    campaign.wait_for_write(2)
    assert successor.close() == 0
    assert leader_of(campaign.observer) is None


def test_a_leader_suspended_past_its_session_writes_nothing_more(campaign):
    """If a leader is suspended until its session expires, another process leads.

    When the suspended leader resumes, no write of its term succeeds, and it stands down.
    """
    campaign.start_process()
    _, first, _ = campaign.wait_for_term(1)
    campaign.start_process()
    campaign.wait_for_write(1)
    campaign.wait_for_write(1, "leader")
    stopped_at = first.signal(signal.SIGSTOP)
    _, second, granted_at = campaign.wait_for_term(2)
    assert second is not first
    assert granted_at - stopped_at < campaign.promised_seconds + SLACK
    campaign.wait_for_write(2)
    first.signal(signal.SIGCONT)
    eventually(lambda: first.events("revoke", term=1), 10, "the stopped leader stands down")
    eventually(lambda: first.events("refused", who="leader", term=1), 20, "the leader's writes are refused")
    eventually(lambda: first.events("refused", who="job", error="LeadershipLost"), 20, "its job's writes are refused")
    campaign.wait_for_write(2)
    assert leader_of(campaign.observer).pid == second.pid
    assert second.close() == 0
    assert campaign.wait_for_term(3)[1] is first, "the first process must campaign again, with a new session"


@pytest.mark.parametrize("campaign", ["sqlite"], indirect=True)
def test_a_suspended_leader_on_sqlite_keeps_leading(campaign):
    """On SQLite, a suspended leader's session stays alive, so no other process leads. Its term continues."""
    campaign.start_process()
    _, first, _ = campaign.wait_for_term(1)
    campaign.wait_for_write(1)
    campaign.start_process()
    first.signal(signal.SIGSTOP)
    threading.Event().wait(1.5)  # six times a standby's period: a takeover would have happened by now
    assert len(campaign.grants()) == 1
    first.signal(signal.SIGCONT)
    campaign.wait_for_write(1)
    assert first.events("revoke") == []


def test_a_leader_that_is_cut_off_stands_down_and_campaigns_again(campaign, request):
    """A leader that is cut off stands down before another process leads. When the network heals, it campaigns again."""
    server = request.getfixturevalue("zookeeper")
    proxy = Proxy(server.port)
    try:
        first = campaign.start_process(campaign.url.replace(server.hosts, proxy.hosts))
        campaign.wait_for_term(1)
        second = campaign.start_process()
        campaign.wait_for_write(1)
        cut_at = time.time()
        proxy.hold("to", "from")
        term, leader, granted_at = campaign.wait_for_term(2)
        assert (term, leader) == (2, second)
        (revoked,) = first.events("revoke")
        print(
            f"\ncut off: the leader stood down after {revoked['at'] - cut_at:.2f} s, a standby led after {granted_at - cut_at:.2f} s"
        )
        assert revoked["at"] < granted_at
        assert granted_at - cut_at < campaign.promised_seconds + SLACK
        campaign.wait_for_write(2)
        proxy.heal()
        eventually(
            lambda: first.events("refused", who="job", error="LeadershipLost"),
            30,
            "its job learns that leadership is lost",
        )
        assert second.close() == 0
        assert campaign.wait_for_term(3)[1] is first
        assert first.close() == 0
    finally:
        proxy.close()


@pytest.mark.long
def test_leadership_survives_restarts_of_the_server(tmp_path):
    """When the server is killed, the leader stands down. After a restart, a later term begins. Writes stay in order."""
    with own_server() as server, contextlib.ExitStack() as stack:
        campaign = Campaign("zookeeper", f"zookeeper://{server.hosts}/crew?timeout={TIMEOUT}", tmp_path, stack)
        campaign.start_process()
        campaign.start_process()
        _, leader, _ = campaign.wait_for_term(1)
        campaign.wait_for_write(1)
        for _ in range(3):
            term = campaign.grants()[-1][0]
            server.kill()
            eventually(
                lambda leader=leader, term=term: leader.events("revoke", term=term), 30, "the leader stands down"
            )
            server.start()
            server.wait()
            campaign.observe()  # the observer's previous session can have ended
            term, leader, _ = campaign.wait_for_term(term + 1, 60)
            campaign.wait_for_write(term)
        campaign.check()
