"""Steps and batches of a job, on an in-memory store."""

import contextlib
import contextvars
import itertools
import json
import threading
from types import SimpleNamespace

import pytest

from stagecrew.coordination.checkpoints import Checkpoint
from stagecrew.coordination.host import Host
from stagecrew.coordination.operators import Operators
from stagecrew.coordination.program_path import Place, Uses
from stagecrew.errors import ConfigurationError, JobError, PossiblyInconsistentError, StateCorrupt, StateStorageError
from stagecrew.recovery import retry
from stagecrew.recovery.jobs import coordinator_states
from stagecrew.recovery.jobs.job import current_job
from stagecrew.recovery.jobs.progress import JobProgress
from stagecrew.recovery.state.storage import StateStorage
from stagecrew.session import builder
from stagecrew.session.running_job import set_running_job
from support.operator_fakes import DroppingWire, FakeTopology, TextCoordinator
from support.stored_job import StoredJob


class FakeOperators:
    """The operators of a topology with one coordinator, whose state is a number."""

    def __init__(self, name, id_=None):
        self.name, self.id, self.state = name, id_ or f"id of {name}", 0

    def checkpoint(self, id_, timeout):
        return Checkpoint(1, {"count/1": str(self.state).encode()})

    def reset(self, checkpoint):
        self.state = int(checkpoint.states["count/1"])

    def forget(self, place):
        pass

    def used_by_another_thread(self, place):
        return None


@pytest.fixture
def stored():
    return StoredJob()


@pytest.fixture
def operators(monkeypatch):
    """The operators of the open topologies: at first, one topology with one coordinator."""
    open_ = [FakeOperators("load")]
    monkeypatch.setattr(coordinator_states, "_open_operators", lambda: open_)
    return open_


def test_a_step_runs_once(stored):
    """A later run gets the results of finished steps, nested or not, without calling their code. A step that raised
    runs again."""
    calls = []

    def program(job, fail):
        def outer():
            calls.append("outer")
            return job.step("inner", lambda: calls.append("inner") or 2) + 1

        first = job.step("outer", outer)
        if fail:
            job.step("last", lambda: 1 // 0)
        return first + job.step("last", lambda: calls.append("last") or 10)

    first_run = stored.run()
    with pytest.raises(ZeroDivisionError):
        program(first_run, fail=True)
    second_run = stored.run()
    assert (first_run.restored, second_run.restored, second_run.attempt) == (False, True, 2)
    assert program(second_run, fail=False) == 13
    assert program(stored.run(), fail=False) == 13
    assert calls == ["outer", "inner", "last"]


def test_an_interrupted_step_skips_its_finished_inner_steps(stored):
    """After an interrupt, the outer step runs again, but its finished inner step does not."""
    calls = []

    def outer(job, fail):
        job.step("inner", lambda: calls.append("inner"))
        calls.append("after inner")
        if fail:
            raise KeyboardInterrupt

    first_run = stored.run()
    with pytest.raises(KeyboardInterrupt):
        first_run.step("outer", lambda: outer(first_run, fail=True))
    second_run = stored.run()
    second_run.step("outer", lambda: outer(second_run, fail=False))
    assert calls == ["inner", "after inner", "after inner"]


def test_a_step_name_can_be_used_once_in_one_place(stored):
    """A name that is repeated in one place is refused. The same name in another place is another step."""
    job = stored.run()
    job.step("a", lambda: job.step("b", lambda: 1))
    job.step("b", lambda: 2)
    for name in ("a", "b"):
        with pytest.raises(JobError, match="use different names"):
            job.step(name, lambda: 3)
    assert job.commit_id("sink") == "job/sink"
    with pytest.raises(JobError):
        job.commit_id("sink")
    assert stored.run().step("c", lambda: 4) == 4


@pytest.mark.parametrize("name", ["", "a/b"])
def test_invalid_step_names_are_refused(stored, name):
    """A name must not be empty or contain a slash."""
    with pytest.raises(ConfigurationError, match="has no slash"):
        stored.run().step(name, lambda: 1)


def test_a_result_that_cannot_be_pickled_is_an_error(stored):
    """If a step's result cannot be pickled, the error names the step, and the step does not count as finished."""
    with pytest.raises(JobError, match=r"step 'a' .* cannot be pickled"):
        stored.run().step("a", lambda: (value for value in ()))
    assert stored.run().step("a", lambda: 1) == 1


def test_state_belongs_to_a_position(stored, operators):
    """A run that skips a step restores the coordinators' states at the end of that step, not earlier or later
    states."""

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
        program(stored.run(), stop_before=2)
    operators[0] = FakeOperators("load")  # in another process
    assert program(stored.run(), stop_before=None) == 1111


@pytest.mark.parametrize("outside", [False, True])
def test_each_step_has_its_own_coordinators(stored, monkeypatch, outside):
    """A coordinator is identified by the step that binds its operator. An interrupted step begins again with an empty
    coordinator, and never gets the state of a skipped step's coordinator. A use outside of steps keeps its state."""

    def program(job, fail):
        coordinators, host = [], Host(DroppingWire(), 1 << 20, 30.0)
        operators = Operators(FakeTopology(), lambda: 5.0, uses=Uses(Place(), is_application=True))
        operators.name_operator("o")
        monkeypatch.setattr(coordinator_states, "_open_operators", lambda: [operators])

        def bind(text=""):
            id_ = operators.add("o", lambda context: TextCoordinator(context, coordinators), host)
            (coordinator,) = (
                binding.instance.coordinator for binding in operators._table.used.values() if binding.id == id_
            )
            restored, coordinator.text = coordinator.text, coordinator.text + text
            return restored

        def second():
            restored = bind("second")
            if fail:
                raise KeyboardInterrupt
            return restored

        try:
            if outside:
                bind("outside")
            job.step("first", lambda: bind("first"))
            job.step("inner", lambda: job.step("first", lambda: bind("inner")))
            restored = job.step("second", second)
            return [restored, bind(), *(coordinator.text for coordinator in coordinators)]
        finally:
            operators.close("the topology has ended")

    with pytest.raises(KeyboardInterrupt):
        program(stored.run(), fail=True)
    texts = program(stored.run(), fail=False)
    assert (texts[0], texts[1]) == ("", "")
    assert ("outside" in texts) == outside
    assert not {"first", "inner"} & set(texts)


def test_after_a_stream_coordinators_have_the_state_of_its_last_batch(stored, operators):
    """`after_stream` restores the states after the query's last batch, even in a run that has no batch left."""

    def body(number):
        operators[0].state += 10**number

    first_run = stored.run()
    for number in range(3):
        first_run.batch("load", number, lambda: body(number))  # noqa: B023 (called at once)
    operators[0].state += 5
    first_run.after_stream("load")
    assert operators[0].state == 116
    operators[0] = FakeOperators("load")
    second_run = stored.run()
    second_run.after_stream("other")
    assert operators[0].state == 0
    second_run.after_stream("load")
    assert operators[0].state == 111
    operators[0].state += 5
    second_run.after_stream("load")
    assert operators[0].state == 116
    assert second_run.batch("load", 3, lambda: operators[0].state) == 116


@pytest.fixture
def open_topology(monkeypatch):
    """Opens a topology with real operators for each run, and closes them at the end. A coordinator's state is a
    text."""
    opened = []

    class OpenTopology:
        def __init__(self):
            self.operators = Operators(FakeTopology(), lambda: 5.0, uses=Uses(Place(), is_application=True))
            self.operators.name_operator("o")
            self.host = Host(DroppingWire(), 1 << 20, 30.0)
            monkeypatch.setattr(coordinator_states, "_open_operators", lambda: [self.operators])
            opened.append(self)

        def bind(self, text="", name=None):
            """Binds the operator, returns the coordinator's initial text, and appends `text` to that text."""
            id_ = self.operators.add("o", lambda context: TextCoordinator(context, []), self.host, name)
            (coordinator,) = (
                binding.instance.coordinator for binding in self.operators._table.used.values() if binding.id == id_
            )
            restored, coordinator.text = coordinator.text, coordinator.text + text
            return restored

    yield OpenTopology
    for topology in opened:
        topology.operators.close("the topology has ended")


def test_a_step_that_runs_again_begins_without_state(stored, open_topology):
    """A step that is tried again begins with empty coordinators, even if another step's checkpoint contains the states
    of its failed try."""
    first, job = open_topology(), stored.run()

    def one():
        with contextlib.suppress(JobError):  # because the two steps run at the same time
            contextvars.Context().run(job.step, "two", lambda: first.bind("from the failed try"))

    job.step("one", one)
    second, job = open_topology(), stored.run()
    job.step("one", one)
    assert second.operators.checkpoint(None, 5).states == {"step=two:o/1": b"from the failed try"}
    assert job.step("two", second.bind) == ""


def test_a_step_is_refused_while_another_thread_uses_its_topology(stored, open_topology):
    """A step is refused while another thread, which is outside of steps, uses the same topology. Once that thread has
    ended, the step is accepted."""
    topology, job = open_topology(), stored.run()
    bound, go = threading.Event(), threading.Event()

    def use_topology():
        topology.bind(name="beside")
        bound.set()
        go.wait(30)

    thread = threading.Thread(target=use_topology)
    thread.start()
    assert bound.wait(10)
    try:
        with pytest.raises(JobError, match="another thread uses operator 'o' of topology 'load' during step 'a'"):
            job.step("a", lambda: topology.bind("x"))
    finally:
        go.set()
        thread.join(10)
    job = stored.run()
    assert job.step("a", lambda: 1) == 1
    assert stored.run().step("a", lambda: 2) == 1


def test_a_step_in_a_thread_can_follow_a_use_of_the_outer_thread(stored, open_topology):
    """A use by the outer thread does not prevent a step in an inner thread."""
    topology, job = open_topology(), stored.run()
    topology.bind("x")
    results = []
    thread = threading.Thread(target=lambda: results.append(job.step("a", lambda: 5)))
    thread.start()
    thread.join(10)
    assert results == [5]


def test_a_step_whose_topology_is_not_open_is_an_error(stored, operators):
    """A stored step whose topology the changed program no longer opens is an error."""
    stored.run().step("a", lambda: 1)
    operators.clear()
    with pytest.raises(JobError, match="not open here"):
        stored.run().step("a", lambda: 1)


def test_open_topologies_with_one_name_keep_their_own_states(stored, operators):
    """A later run gives each of several open topologies of one name its own state, also if some have none."""

    def open_all():
        operators[:] = [FakeOperators("load"), FakeOperators("application"), FakeOperators("load")]
        operators.append(FakeOperators("application", id_="application"))
        operators[2].checkpoint = lambda id_, timeout: Checkpoint(1, {})

    open_all()
    stored.run().step("a", lambda: [setattr(one, "state", 10 + n) for n, one in enumerate(operators)])
    open_all()
    stored.run().step("a", lambda: None)
    assert [one.state for one in operators] == [10, 11, 0, 13]


def test_batches_of_another_query_are_refused(stored, operators, monkeypatch):
    """A second query that passes the same name to `batch` is refused, in the same run and in a later one. A query whose
    checkpoint location has changed has another id, so it is refused too."""
    query = "one"
    monkeypatch.setattr("stagecrew.recovery.jobs.job.current_query", lambda: query)
    job = stored.run()
    assert job.batch("load", 0, lambda: "rows of one") == "rows of one"
    for run in (job, stored.run()):
        for number in (0, 1):
            query = "two"
            with pytest.raises(JobError, match="belong to another streaming query"):
                run.batch("load", number, lambda: "rows of two")
        query = "one"
    later = stored.run()
    assert later.batch("load", 0, lambda: "not called") == "rows of one"
    assert later.batch("load", 1, lambda: "more rows of one") == "more rows of one"
    assert stored.steps.names() == ["load/batch-0", "load/batch-1"]


def test_a_batch_runs_once(stored, operators):
    """A stored batch does not run again. A new batch begins with the coordinators' states after the previous batch. The
    results of the last two batches are kept."""
    ran = []

    def body(number):
        operators[0].state += 10**number
        ran.append(number)
        return operators[0].state

    first_run = stored.run()
    for number in range(4):
        first_run.batch("load", number, lambda: body(number))  # noqa: B023 (called at once)
    assert stored.steps.names() == ["load/batch-2", "load/batch-3"]
    operators[0] = FakeOperators("load")
    second_run = stored.run()
    assert (
        second_run.batch("load", 3, lambda: body(3)) == 1111
    )  # finished, but Spark had not committed it: not run again
    assert (operators[0].state, second_run.batch("load", 4, lambda: body(4))) == (1111, 11111)
    operators[0] = FakeOperators("load")
    assert stored.run().batch("load", 5, lambda: body(5)) == 111111  # Spark had committed 4
    assert ran == [0, 1, 2, 3, 4, 5]
    with pytest.raises(JobError, match="previous checkpoint location"):
        stored.run().batch("load", 0, lambda: body(0))
    for invalid in (-1, "1"):
        with pytest.raises(ConfigurationError, match="is not the id of a batch"):
            stored.run().batch("load", invalid, lambda: 1)


def test_a_failed_batch_can_run_again_in_the_same_process(stored, operators):
    """A restarted query runs its failed batch again, including the batch's steps, with the coordinators' states after
    the previous batch."""
    job = stored.run()

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
    assert job.batch("load", 1, lambda: body(1)) == 11  # finished: not run again
    assert job.batch("load", 2, lambda: body(2)) == 111
    assert job.batch("load", 3, lambda: body(3)) == 1111
    assert stored.steps.names() == ["load/batch-2", "load/batch-2/inner", "load/batch-3", "load/batch-3/inner"]


@pytest.mark.parametrize("name", ["load", 'it\'s "load" \\ é'])
def test_a_failed_first_batch_can_run_again_in_the_same_process(stored, operators, name):
    """A first batch that runs again begins with the coordinators' states from before the query, in the same process or
    a later one, whatever the query's name is."""

    def body(job, number, fail):
        operators[0].state += 10**number
        job.step("it's", lambda: None)
        job.commit_id("sink")
        if fail:
            raise ConnectionError
        return operators[0].state

    for _ in range(2):  # the second time in another process, because no batch has finished
        operators[0] = FakeOperators("load")
        job = stored.run()
        job.step("before", lambda: setattr(operators[0], "state", 500))
        for _ in range(2):
            with pytest.raises(ConnectionError):
                job.batch(name, 0, lambda: body(job, 0, fail=True))  # noqa: B023 (called at once)
    assert job.batch(name, 0, lambda: body(job, 0, fail=False)) == 501
    with pytest.raises(ConnectionError):
        job.batch(name, 1, lambda: body(job, 1, fail=True))
    assert job.batch(name, 1, lambda: body(job, 1, fail=False)) == 511


def test_concurrent_steps_in_one_topology_are_refused(stored, operators):
    """Two steps must not run at the same time in a topology with coordinators. A nested step is accepted."""
    job = stored.run()
    job.step("outer", lambda: job.step("inner", lambda: 1))
    with pytest.raises(JobError, match="run at the same time in topology 'load'"):
        job.step("a", lambda: contextvars.Context().run(job.step, "b", lambda: 1))


def test_a_job_that_has_ended_cannot_commit(stored):
    """A thread that outlives the job's code gets an error, so it cannot commit once the job has ended."""
    job = stored.run()
    job.end()
    with pytest.raises(JobError, match="has ended"):
        job.commit_id("sink")


def test_a_step_is_written_again_after_a_lost_reply(stored, monkeypatch):
    """After a lost reply, a step is stored once and does not run again, whether or not its first write took effect."""
    monkeypatch.setattr(retry, "_PAUSE", 0.0)
    faults, runs = ["before", "after"], []

    def fault(session, operations, moment):
        if faults[:1] == [moment] and any("steps/" in operation.key for operation in operations):
            raise PossiblyInconsistentError(f"lost {faults.pop(0)} it was done")

    stored.store.server.fault = fault
    assert stored.run(retry_timeout=60).step("a", lambda: runs.append(1) or 7) == 7
    assert (faults, runs) == ([], [1])
    assert stored.run().step("a", lambda: 8) == 7


def test_a_result_is_written_again_while_the_storage_is_full(stored, monkeypatch):
    """While the storage is full, only the write is tried again, not the step. After the retry timeout, the error is
    raised."""
    writes_tried, runs = [], []
    real = StateStorage.write

    def full(self, *arguments):
        writes_tried.append(1)
        if len(writes_tried) < 3:
            raise StateStorageError("no space left on device")
        return real(self, *arguments)

    monkeypatch.setattr(StateStorage, "write", full)
    monkeypatch.setattr(retry, "_PAUSE", 0.0)
    assert stored.run(retry_timeout=60.0).step("a", lambda: runs.append(1) or 5) == 5
    assert (len(writes_tried), len(runs)) == (3, 1)
    monkeypatch.setattr(StateStorage, "write", lambda *_: (_ for _ in ()).throw(StateStorageError("no space left")))
    with pytest.raises(StateStorageError, match="no space"):
        stored.run().step("b", lambda: 1)


@pytest.mark.parametrize("method", ["read", "discard"])
def test_a_run_waits_for_an_unavailable_storage(stored, operators, monkeypatch, method):
    """A run retries reads of stored results and removals of old batches until the storage is available. A corrupt state
    is an error immediately."""
    monkeypatch.setattr(retry, "_PAUSE", 0.0)
    real, tried = getattr(StateStorage, method), []

    def unavailable(self, *arguments):
        tried.append(1)
        if len(tried) % 5:
            raise StateStorageError("no route")
        return real(self, *arguments)

    for number in range(3):
        assert stored.run().batch("b", number, lambda number=number: number) == number
    monkeypatch.setattr(StateStorage, method, unavailable)
    assert stored.run(retry_timeout=60.0).batch("b", 3, lambda: 3) == 3
    assert tried
    monkeypatch.setattr(StateStorage, method, real)
    assert set(stored.steps.names()) == {"b/batch-2", "b/batch-3"}
    assert stored.run().batch("b", 3, lambda: 4) == 3

    def corrupt(self, *_):
        tried.append(1)
        raise StateCorrupt("cut short")

    tried.clear()
    monkeypatch.setattr(StateStorage, "read", corrupt)
    with pytest.raises(StateCorrupt):
        stored.run(retry_timeout=60.0).batch("b", 3, lambda: 4)
    assert len(tried) == 1


def test_commit_ids_of_different_jobs_differ(stored):
    """Commit ids of different jobs differ, even if joining a job's id and a step's name gives the other job's id."""
    ids = [stored.run(id_="x/y").commit_id("sink"), stored.run(id_="x%2Fy").commit_id("sink")]
    job = stored.run(id_="x")
    job.step("y", lambda: ids.append(job.commit_id("sink")))
    assert len(set(ids)) == 3, ids


def test_the_progress_of_a_job_is_reported(stored, operators, monkeypatch):
    """Each report lists the steps in order, with states and times. A step that an earlier run finished is "found"."""
    reports = []

    connection = SimpleNamespace(send_job_progress=lambda body: reports.append(json.loads(body)))
    topologies = SimpleNamespace(place=None, innermost=None)
    crew = SimpleNamespace(connection=connection, topologies=topologies, application=SimpleNamespace(operators=None))
    monkeypatch.setattr(builder, "running_crew", lambda: crew)
    job = stored.run()
    job.step("a", lambda: 1)
    with pytest.raises(ValueError, match="no"):
        job.step("b", lambda: int("no"))
    assert reports[0]["facts"] == {"job": "job", "run": "1"}
    assert [[(step["name"], step["state"]) for step in report["steps"]] for report in reports] == [
        [("a", "running")],
        [("a", "finished")],
        [("a", "finished"), ("b", "running")],
        [("a", "finished"), ("b", "failed")],
    ]
    assert reports[0]["steps"][0]["ended"] == 0 < reports[0]["steps"][0]["started"] <= reports[1]["steps"][0]["ended"]
    second_run = stored.run()
    assert second_run.step("a", lambda: 2) == 1
    assert [(step["name"], step["state"]) for step in reports[-1]["steps"]] == [("a", "found")]


def test_progress_keeps_running_steps_and_the_last_finished_ones():
    """Progress counts the steps that it forgets. A long step is kept while it is running, and counts as recent when it
    ends."""
    progress = JobProgress({}, itertools.count(1).__next__)

    def names() -> list[str]:
        return [step["name"] for step in json.loads(progress.to_json())["steps"]]

    progress.record_step("long", "running")
    for number in range(300):
        progress.record_step(f"s{number}", "running")
        progress.record_step(f"s{number}", "finished")
    assert names() == ["long", *(f"s{number}" for number in range(101, 300))]
    assert json.loads(progress.to_json())["forgottenSteps"] == 101
    progress.record_step("long", "finished")
    progress.record_step("one more", "found")
    assert names() == ["long", *(f"s{number}" for number in range(102, 300)), "one more"]
    for number in range(300):
        progress.record_step(f"r{number}", "running")
    assert len(names()) == 300
    assert json.loads(progress.to_json())["forgottenSteps"] == 302


def test_current_job_outside_of_a_job_is_an_error(stored):
    """Outside of a job, `current_job` raises an error that says how to submit one."""
    with pytest.raises(JobError, match="stagecrew submit"):
        current_job()
    job = stored.run()
    set_running_job(job)
    try:
        assert current_job() is job
    finally:
        set_running_job(None)
