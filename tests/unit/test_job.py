"""Steps and batches of a job, over a store in memory."""

import contextlib
import contextvars
import itertools
import json
import threading
from types import SimpleNamespace

import pyarrow.fs
import pytest

from modelstore import ModelServer
from stagecrew.coordination.host import Host
from stagecrew.coordination.operators import Operators
from stagecrew.coordination.program_path import Place, Uses
from stagecrew.errors import (
    JobError,
    JobStepReused,
    PossiblyInconsistentError,
    RecoveryMisused,
    StateCorrupt,
    StateStorageError,
)
from stagecrew.recovery import retry
from stagecrew.recovery.jobs import coordinator_states
from stagecrew.recovery.jobs.job import Job, current_job
from stagecrew.recovery.jobs.progress import JobProgress
from stagecrew.recovery.state.handles import StateHandleStore
from stagecrew.recovery.state.storage import StateStorage
from stagecrew.session import builder
from stagecrew.session.running_job import set_running_job
from unit_scopes import Keeping, Nowhere, Scope


class Store:
    """Where the steps of one job lie, for any number of runs."""

    def __init__(self):
        self.store = ModelServer().session()
        self.store.ensure("steps", "commits")
        filesystem = pyarrow.fs._MockFileSystem()
        filesystem.create_dir("states")
        self.storage = StateStorage("states", filesystem)
        self.steps = StateHandleStore(self.store, self.storage, "steps")
        self.runs = 0

    def run(self, patience=0.0, id_="job"):
        self.runs += 1
        return Job(id_, self.runs, self.steps, StateHandleStore(self.store, self.storage, "commits"), patience)


class FakeOperators:
    """The operators of a topology: a number is the state of all its coordinators."""

    def __init__(self, name):
        self.name, self.state = name, 0

    def checkpoint(self, id_, timeout):
        from stagecrew.coordination.checkpoints import Checkpoint

        return Checkpoint(1, {"count/1": str(self.state).encode()})

    def reset(self, checkpoint):
        self.state = int(checkpoint.states["count/1"])

    def forget(self, place):
        pass

    def used_beside(self, place):
        return None


@pytest.fixture
def place():
    return Store()


@pytest.fixture
def operators(monkeypatch):
    """One topology is open, with a coordinator."""
    open_ = [FakeOperators("load")]
    monkeypatch.setattr(coordinator_states, "_open_operators", lambda: open_)
    return open_


def test_a_step_runs_once(place):
    """A later run gets the stored result, of a step in another too, and calls nothing; a step that raised runs again."""
    calls = []

    def program(job, fail):
        def outer():
            calls.append("outer")
            return job.step("inner", lambda: calls.append("inner") or 2) + 1

        first = job.step("outer", outer)
        if fail:
            job.step("last", lambda: 1 // 0)
        return first + job.step("last", lambda: calls.append("last") or 10)

    one = place.run()
    with pytest.raises(ZeroDivisionError):
        program(one, fail=True)
    two = place.run()
    assert (one.restored, two.restored, two.attempt) == (False, True, 2)
    assert program(two, fail=False) == 13
    assert program(place.run(), fail=False) == 13
    assert calls == ["outer", "inner", "last"]


def test_the_inner_step_of_one_that_was_cut_short(place):
    """A step that was cut short runs again, but for the steps in it that were done."""
    calls = []

    def outer(job, fail):
        job.step("inner", lambda: calls.append("inner"))
        calls.append("behind")
        if fail:
            raise KeyboardInterrupt

    one = place.run()
    with pytest.raises(KeyboardInterrupt):
        one.step("outer", lambda: outer(one, fail=True))
    two = place.run()
    two.step("outer", lambda: outer(two, fail=False))
    assert calls == ["inner", "behind", "behind"]


def test_a_name_that_comes_twice(place):
    """A step's name that comes twice in one place is refused; in another place it is another step."""
    job = place.run()
    job.step("a", lambda: job.step("b", lambda: 1))
    job.step("b", lambda: 2)
    for again in ("a", "b"):
        with pytest.raises(JobStepReused, match="use different names"):
            job.step(again, lambda: 3)
    assert job.commit_id("sink") == "job/sink"
    with pytest.raises(JobStepReused):
        job.commit_id("sink")
    assert place.run().step("c", lambda: 4) == 4


@pytest.mark.parametrize("name", ["", "a/b"])
def test_names_that_are_none(place, name):
    """An empty name, and one with a slash, are refused."""
    with pytest.raises(RecoveryMisused, match="has no slash"):
        place.run().step(name, lambda: 1)


def test_a_result_that_cannot_be_pickled(place):
    """It is an error that names the step; the step is not done then."""
    with pytest.raises(JobError, match=r"step 'a' .* cannot be pickled"):
        place.run().step("a", lambda: (one for one in ()))
    assert place.run().step("a", lambda: 1) == 1


def test_state_belongs_to_a_position(place, operators):
    """A run that skips a step gives the coordinators the states of that step's end: not of later, not of the beginning."""

    def program(job, stop_before):
        [topology] = operators
        for number in range(4):
            if number == stop_before:
                raise KeyboardInterrupt

            def body(number=number):
                topology.state += 10**number
                return topology.state

            job.step(f"step-{number}", body)
        return topology.state

    with pytest.raises(KeyboardInterrupt):
        program(place.run(), stop_before=2)
    operators[0] = FakeOperators("load")  # of another process
    assert program(place.run(), stop_before=None) == 1111


@pytest.mark.parametrize("outside", [False, True])
def test_uses_of_one_operator_in_several_steps(place, monkeypatch, outside):
    """Steps that bind one operator each have a coordinator of their own, known by its step: one of a step that is cut short begins empty
    again, and has not the state of one that a skipped step bound. That of a use outside of steps goes on."""

    def program(job, fail):
        made, host = [], Host(Nowhere(), 1 << 20, 30.0)
        operators = Operators(Scope(), lambda: 5.0, uses=Uses(Place(), is_application=True))
        operators.name_operator("o")
        monkeypatch.setattr(coordinator_states, "_open_operators", lambda: [operators])

        def bind(text=""):
            id_ = operators.add("o", lambda context: Keeping(context, made), host)
            (mine,) = (one.instance.coordinator for one in operators._bindings.values() if one.id == id_)
            found, mine.text = mine.text, mine.text + text
            return found

        def second():
            found = bind("second")
            if fail:
                raise KeyboardInterrupt
            return found

        try:
            if outside:
                bind("outside")
            job.step("first", lambda: bind("first"))
            job.step("inner", lambda: job.step("first", lambda: bind("inner")))
            found = job.step("second", second)
            return [found, bind(), *(one.text for one in made)]
        finally:
            operators.close("the topology has ended")

    with pytest.raises(KeyboardInterrupt):
        program(place.run(), fail=True)
    found = program(place.run(), fail=False)
    assert (found[0], found[1]) == ("", "")
    assert ("outside" in found) == outside
    assert not {"first", "inner"} & set(found)


def test_after_a_stream(place, operators):
    """When a query has ended, the coordinators are as of its last batch, also in a run in which it has no batch left."""

    def body(number):
        operators[0].state += 10**number

    one = place.run()
    for number in range(3):
        one.batch("load", number, lambda: body(number))  # noqa: B023 (called at once)
    operators[0].state += 5
    one.after_stream("load")
    assert operators[0].state == 116
    operators[0] = FakeOperators("load")
    two = place.run()
    two.after_stream("other")
    assert operators[0].state == 0
    two.after_stream("load")
    assert operators[0].state == 111
    operators[0].state += 5
    two.after_stream("load")
    assert operators[0].state == 116
    assert two.batch("load", 3, lambda: operators[0].state) == 116


@pytest.fixture
def real(monkeypatch):
    """Makes the operators of one topology for each run, which are closed at the end; and binds its operator, with a text as its state."""
    made = []

    class Real:
        def __init__(self):
            self.operators = Operators(Scope(), lambda: 5.0, uses=Uses(Place(), is_application=True))
            self.operators.name_operator("o")
            self.host = Host(Nowhere(), 1 << 20, 30.0)
            monkeypatch.setattr(coordinator_states, "_open_operators", lambda: [self.operators])
            made.append(self)

        def bind(self, text="", name=None):
            """Returns the text that the coordinator begins with, and adds to it."""
            id_ = self.operators.add("o", lambda context: Keeping(context, []), self.host, name)
            (mine,) = (one.instance.coordinator for one in self.operators._bindings.values() if one.id == id_)
            found, mine.text = mine.text, mine.text + text
            return found

    yield Real
    for one in made:
        one.operators.close("the topology has ended")


def test_a_step_that_runs_anew_begins_with_no_state(place, real):
    """Its coordinators begin empty, also when the checkpoint of another step has states of a try that failed."""
    first, job = real(), place.run()

    def one():
        with contextlib.suppress(JobError):  # they run at once
            contextvars.Context().run(job.step, "two", lambda: first.bind("of the try that failed"))

    job.step("one", one)
    second, job = real(), place.run()
    job.step("one", one)
    assert second.operators.checkpoint(None, 5).states == {"step=two:o/1": b"of the try that failed"}
    assert job.step("two", second.bind) == ""


def test_a_use_in_another_thread_beside_a_step(place, real):
    """A step is refused while another thread, outside of steps, has a use in its topology; not when that thread has ended."""
    topology, job = real(), place.run()
    bound, go = threading.Event(), threading.Event()

    def beside():
        topology.bind(name="beside")
        bound.set()
        go.wait(30)

    thread = threading.Thread(target=beside)
    thread.start()
    assert bound.wait(10)
    try:
        with pytest.raises(JobError, match="another thread uses operator 'o' of topology 'load' during step 'a'"):
            job.step("a", lambda: topology.bind("x"))
    finally:
        go.set()
        thread.join(10)
    job = place.run()
    assert job.step("a", lambda: 1) == 1
    assert place.run().step("a", lambda: 2) == 1


def test_a_step_in_a_thread_that_uses_what_the_program_bound(place, real):
    """A use that an outer thread made is no obstacle to a step in an inner one."""
    topology, job = real(), place.run()
    topology.bind("x")
    results = []
    thread = threading.Thread(target=lambda: results.append(job.step("a", lambda: 5)))
    thread.start()
    thread.join(10)
    assert results == [5]


def test_a_topology_that_is_not_there_any_more(place, operators):
    """A step whose topology is not open in a later run is an error that says so; the program has changed."""
    place.run().step("a", lambda: 1)
    operators.clear()
    with pytest.raises(JobError, match="not open here"):
        place.run().step("a", lambda: 1)


def test_two_topologies_of_one_name(place, operators):
    """Two open topologies with coordinators and one name cannot be told apart by a later run: refused."""
    operators.append(FakeOperators("load"))
    with pytest.raises(JobStepReused, match="two topologies named 'load'"):
        place.run().step("a", lambda: 1)


def test_batches(place, operators):
    """A batch that was done is not run again; else the coordinators are as of the batch before; two are kept."""
    ran = []

    def body(number):
        operators[0].state += 10**number
        ran.append(number)
        return operators[0].state

    one = place.run()
    for number in range(4):
        one.batch("load", number, lambda: body(number))  # noqa: B023 (called at once)
    assert place.steps.names() == ["load/batch-2", "load/batch-3"]
    operators[0] = FakeOperators("load")
    two = place.run()
    assert two.batch("load", 3, lambda: body(3)) == 1111  # Spark had not committed it: done, not run again
    assert (operators[0].state, two.batch("load", 4, lambda: body(4))) == (1111, 11111)
    operators[0] = FakeOperators("load")
    assert place.run().batch("load", 5, lambda: body(5)) == 111111  # Spark had committed 4
    assert ran == [0, 1, 2, 3, 4, 5]
    with pytest.raises(JobError, match="previous checkpoint location"):
        place.run().batch("load", 0, lambda: body(0))
    for wrong in (-1, "1"):
        with pytest.raises(RecoveryMisused, match="is not the id of a batch"):
            place.run().batch("load", wrong, lambda: 1)


def test_a_batch_that_is_run_again_in_the_same_process(place, operators):
    """A query that is started again does its last batch again, with the coordinators as of the one before, and its steps anew."""
    job = place.run()

    def body(number, fail=False):
        operators[0].state += 10**number
        job.step("inner", lambda: None)
        if fail:
            raise ConnectionError
        return operators[0].state

    assert job.batch("load", 0, lambda: body(0)) == 1
    with pytest.raises(ConnectionError):
        job.batch("load", 1, lambda: body(1, fail=True))
    assert job.batch("load", 1, lambda: body(1)) == 11
    assert job.batch("load", 1, lambda: body(1)) == 11  # done: not run again
    assert job.batch("load", 2, lambda: body(2)) == 111
    assert job.batch("load", 3, lambda: body(3)) == 1111
    assert place.steps.names() == ["load/batch-2", "load/batch-2/inner", "load/batch-3", "load/batch-3/inner"]


@pytest.mark.parametrize("name", ["load", 'it\'s "load" \\ é'])
def test_the_first_batch_that_is_run_again_in_the_same_process(place, operators, name):
    """So does the first batch of a query, which has none before: with the coordinators as they were when the query began; and also one that
    begins in a later process. What its name is made of does not matter."""

    def body(job, number, fail):
        operators[0].state += 10**number
        job.step("it's", lambda: None)
        job.commit_id("sink")
        if fail:
            raise ConnectionError
        return operators[0].state

    for _ in range(2):  # another process, as none of its batches was done
        operators[0] = FakeOperators("load")
        job = place.run()
        job.step("before", lambda: setattr(operators[0], "state", 500))
        for _ in range(2):
            with pytest.raises(ConnectionError):
                job.batch(name, 0, lambda: body(job, 0, fail=True))  # noqa: B023 (called at once)
    assert job.batch(name, 0, lambda: body(job, 0, fail=False)) == 501
    with pytest.raises(ConnectionError):
        job.batch(name, 1, lambda: body(job, 1, fail=True))
    assert job.batch(name, 1, lambda: body(job, 1, fail=False)) == 511


def test_steps_at_once(place, operators):
    """Two steps that run at once in one topology with coordinators are refused; a step inside another is not."""
    job = place.run()
    job.step("outer", lambda: job.step("inner", lambda: 1))
    with pytest.raises(JobError, match="run at the same time in topology 'load'"):
        job.step("a", lambda: contextvars.Context().run(job.step, "b", lambda: 1))


def test_a_job_that_has_ended_commits_nothing(place):
    """A thread that outlives the job's code is refused, and not left to commit outside of it."""
    job = place.run()
    job.end()
    with pytest.raises(JobError, match="has ended"):
        job.commit_id("sink")


def test_a_lost_answer_is_asked_for_again(place, monkeypatch):
    """A step whose write nobody knows the outcome of is written again, once in all, and not run again."""
    monkeypatch.setattr(retry, "_PAUSE", 0.0)
    faults, runs = ["before", "after"], []

    def fault(session, operations, moment):
        if faults[:1] == [moment] and any("steps/" in one.key for one in operations):
            raise PossiblyInconsistentError(f"lost {faults.pop(0)} it was done")

    place.store.server.fault = fault
    assert place.run(patience=60).step("a", lambda: runs.append(1) or 7) == 7
    assert (faults, runs) == ([], [1])
    assert place.run().step("a", lambda: 8) == 7


def test_a_full_storage_is_waited_for(place, monkeypatch):
    """A result that cannot be stored is tried again, and the step is not run again for it; behind the patience it is an error."""
    tried, runs = [], []
    real = StateStorage.write

    def full(self, *arguments):
        tried.append(1)
        if len(tried) < 3:
            raise StateStorageError("no space left on device")
        return real(self, *arguments)

    monkeypatch.setattr(StateStorage, "write", full)
    monkeypatch.setattr(retry, "_PAUSE", 0.0)
    assert place.run(patience=60.0).step("a", lambda: runs.append(1) or 5) == 5
    assert (len(tried), len(runs)) == (3, 1)
    monkeypatch.setattr(StateStorage, "write", lambda *_: (_ for _ in ()).throw(StateStorageError("no space left")))
    with pytest.raises(StateStorageError, match="no space"):
        place.run().step("b", lambda: 1)


@pytest.mark.parametrize("what", ["read", "discard"])
def test_a_storage_that_is_away_for_a_while(place, operators, monkeypatch, what):
    """A run waits for what is stored to be read, and for old batches to be removed; what is corrupt is an error at once."""
    monkeypatch.setattr(retry, "_PAUSE", 0.0)
    real, tried = getattr(StateStorage, what), []

    def away(self, *arguments):
        tried.append(1)
        if len(tried) % 5:
            raise StateStorageError("no route")
        return real(self, *arguments)

    for number in range(3):
        assert place.run().batch("b", number, lambda number=number: number) == number
    monkeypatch.setattr(StateStorage, what, away)
    assert place.run(patience=60.0).batch("b", 3, lambda: 3) == 3
    assert tried
    monkeypatch.setattr(StateStorage, what, real)
    assert set(place.steps.names()) == {"b/batch-2", "b/batch-3"}
    assert place.run().batch("b", 3, lambda: 4) == 3

    def corrupt(self, *_):
        tried.append(1)
        raise StateCorrupt("cut short")

    tried.clear()
    monkeypatch.setattr(StateStorage, "read", corrupt)
    with pytest.raises(StateCorrupt):
        place.run(patience=60.0).batch("b", 3, lambda: 4)
    assert len(tried) == 1


def test_commits_of_two_jobs_are_never_of_one_id(place):
    """Also where one's id ends as the other's steps begin."""
    ids = [place.run(id_="x/y").commit_id("sink"), place.run(id_="x%2Fy").commit_id("sink")]
    job = place.run(id_="x")
    job.step("y", lambda: ids.append(job.commit_id("sink")))
    assert len(set(ids)) == 3, ids


def test_what_people_see_of_a_job(place, operators, monkeypatch):
    """Each step with its state and times, in order; one that a run before did is found; what shows it may raise."""
    shown = []

    connection = SimpleNamespace(send_job_progress=lambda body: shown.append(json.loads(body)))
    topologies = SimpleNamespace(place=None, innermost=None)
    crew = SimpleNamespace(connection=connection, topologies=topologies, application=SimpleNamespace(operators=None))
    monkeypatch.setattr(builder, "running_crew", lambda: crew)
    job = place.run()
    job.step("a", lambda: 1)
    with pytest.raises(ValueError, match="no"):
        job.step("b", lambda: int("no"))
    assert shown[0]["facts"] == {"job": "job", "run": "1"}
    assert [[(step["name"], step["state"]) for step in one["steps"]] for one in shown] == [
        [("a", "running")],
        [("a", "finished")],
        [("a", "finished"), ("b", "running")],
        [("a", "finished"), ("b", "failed")],
    ]
    assert shown[0]["steps"][0]["ended"] == 0 < shown[0]["steps"][0]["started"] <= shown[1]["steps"][0]["ended"]
    again = place.run()
    assert again.step("a", lambda: 2) == 1
    assert [(step["name"], step["state"]) for step in shown[-1]["steps"]] == [("a", "found")]


def test_the_last_steps_are_shown_and_those_that_run():
    """However many there were, which is said: one that runs for long stays, and when it has ended it is one of the last."""
    many = JobProgress({}, itertools.count(1).__next__)

    def names() -> list[str]:
        return [step["name"] for step in json.loads(many.to_json())["steps"]]

    many.record_step("long", "running")
    for number in range(300):
        many.record_step(f"s{number}", "running")
        many.record_step(f"s{number}", "finished")
    assert names() == ["long", *(f"s{number}" for number in range(101, 300))]
    assert json.loads(many.to_json())["forgottenSteps"] == 101
    many.record_step("long", "finished")
    many.record_step("one more", "found")
    assert names() == ["long", *(f"s{number}" for number in range(102, 300)), "one more"]
    for number in range(300):
        many.record_step(f"r{number}", "running")
    assert len(names()) == 300
    assert json.loads(many.to_json())["forgottenSteps"] == 302


def test_current_job(place):
    """Outside of a job there is none, and the error says how to start one."""
    with pytest.raises(JobError, match="stagecrew submit"):
        current_job()
    job = place.run()
    set_running_job(job)
    try:
        assert current_job() is job
    finally:
        set_running_job(None)
