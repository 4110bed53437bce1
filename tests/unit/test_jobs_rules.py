"""Rules of recovery, each met by the schedule that it closes: two drivers over one store in memory, one of them paused at a write."""

import threading

import pytest

from jobsim import SCHEMA, MemorySink
from modelstore import ModelServer
from stagecrew.errors import CommitPending, CommitSuperseded
from stagecrew.operators.commits import commit
from stagecrew.recovery.decisions import StoredDecisions, finish_commits
from stagecrew.recovery.handles import StateHandleStore
from stagecrew.recovery.storage import StateStorage
from stagecrew.recovery.stores.contract import Replace


class Two:
    """Two drivers' sights of one job's commits, and a sink that both write to."""

    def __init__(self, tmp_path):
        self.server = ModelServer()
        storage = StateStorage(tmp_path)
        sessions = self.server.session(), self.server.session()
        sessions[0].ensure("commits")
        self.one, self.other = (StateHandleStore(session, storage, "commits") for session in sessions)
        self.name = sessions[0].session
        self.sink = MemorySink(str(tmp_path))

    def stage(self, staging):
        self.sink.staged[staging.run].append("row")
        return [{"text": "row", "rows": 1}]

    def commit(self, handles, execute=None):
        decisions = StoredDecisions(handles, self.sink)
        return commit(self.sink, decisions, "c", SCHEMA, execute or self.stage, sleep=lambda _: None)

    def before_the_next_write(self, name, do):
        """Does this right before that session's next write of the record: who writes it was paused there."""

        def fault(session, operations, moment):
            if (session, moment) == (name, "before") and any(
                isinstance(one, Replace) and one.key == "commits/c" for one in operations
            ):
                self.server.fault = lambda *_: None
                do()

        self.server.fault = fault


@pytest.fixture
def two(tmp_path):
    return Two(tmp_path)


def test_a_decision_that_comes_behind_an_abort(two):
    """Who is paused before it decides, and goes on behind another's abort, decides nothing: nothing is visible, and nothing left."""
    two.before_the_next_write(two.name, lambda: finish_commits(two.other, ending=True))
    with pytest.raises(CommitSuperseded):
        two.commit(two.one)
    assert (two.sink.visible, two.sink.staged) == ({}, {})
    assert two.commit(two.other).rows == 1


def test_an_abort_that_comes_behind_a_decision(two, monkeypatch):
    """Who aborts what is decided meanwhile deletes nothing, and its job does not end behind that: what was decided is done first."""
    staged, goes_on, raised = threading.Event(), threading.Event(), []

    def stage(staging):
        staged.set()
        assert goes_on.wait(30)
        return two.stage(staging)

    def decide():
        with monkeypatch.context() as patch:
            patch.setattr(two.sink, "commit", lambda *_: 1 / 0)  # it is decided, and not done
            goes_on.set()
            thread.join(30)

    def run():
        try:
            two.commit(two.one, stage)
        except CommitPending as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert staged.wait(30)
    two.before_the_next_write(two.other._store.session, decide)
    with pytest.raises(CommitSuperseded):
        finish_commits(two.other, ending=True)
    assert (len(raised), two.sink.visible, len(two.sink.staged)) == (1, {}, 1)
    finish_commits(two.other, ending=True)
    assert (two.sink.visible, two.sink.staged) == ({"c": ["row"]}, {})
