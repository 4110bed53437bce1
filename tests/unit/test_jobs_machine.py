"""Jobs under schedules that Hypothesis generates, with three candidates for leadership, runs, submitters and a
store."""

import collections
import contextlib

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from stagecrew.errors import PossiblyInconsistentError, StagecrewError
from stagecrew.recovery.jobs.spec import JobSpec
from stagecrew.recovery.jobs.store import Jobs
from stagecrew.recovery.leadership.fencing import HOLDER
from stagecrew.recovery.stores.contract import Check
from support.simulated_jobs import Killed, SimDriver, World, assert_consistent, assert_final_state

pytestmark = pytest.mark.slow

INDEX = st.integers(0, 2)
JOBS = 5
JOB = st.sampled_from([f"job-{number}" for number in range(JOBS)])
KEYS = ["/commits/", "/steps/", "/claim", "results/", "specs/", "leader/", "jobs/", "open/", "ended/"]
#: A script has up to three entries: key, number n, "before" or "after", event, and index of the actor or job.
#: The event happens before or after the n-th transaction of an action that writes the key.
SCRIPT = st.lists(
    st.tuples(
        st.sampled_from(KEYS),
        st.sampled_from([2, 1, 3]),
        st.sampled_from(["before", "after"]),
        st.sampled_from(
            [
                "killed",
                "lost",
                "cut off",
                "replaced",
                "revoked",
                "expired",
                "granted",
                "lead",
                "lead",
                "run",
                "submit",
                "cancel",
                "prune",
            ]
        ),
        INDEX,
    ),
    min_size=1,
    max_size=3,
)


class Candidate(SimDriver):
    """A driver that learns some time later, or never, that it was granted leadership."""

    def __init__(self, world):
        super().__init__(world)
        self.term, self.action = None, ""

    def perform(self, action):
        if not self.busy and not self.dead:
            self.action = action
            self.act()

    def _act(self):
        if self.action == "campaign" and self.term is None:
            self.term = self.campaign()
        elif self.action == "is granted" and self.term is not None and self.reconciler is None:
            self.become_leader(self.term)
        elif self.action == "reconcile" and self.reconciler is not None:
            self.reconciler.reconcile()


class JobsMachine(RuleBasedStateMachine):
    """Each rule is an action of one actor. The rule's script says which faults and other actors interrupt the
    action."""

    def __init__(self):
        super().__init__()
        self.world = World(0, jobs=JOBS, faults=0)
        self.world.server.fault = self.run_script
        self.world.drivers += [Candidate(self.world) for _ in range(3)]
        self.script, self.count, self.depth = [], collections.Counter(), 0

    @initialize(jobs=st.sampled_from([JOBS, 2, 0]), leads=st.booleans())
    def begin(self, jobs, leads):
        """Submits some jobs. In most cases there are jobs from the beginning."""
        for number in range(jobs):
            self.submit(f"job-{number}")
        if leads:
            self.lead(0)

    def candidate(self, index):
        candidate = self.world.drivers[index]
        if candidate.dead and not candidate.busy:
            candidate = self.world.drivers[index] = Candidate(self.world)
        return candidate

    def run_script(self, session, operations, moment):
        if self.depth:
            return
        written = " ".join(operation.key for operation in operations if not isinstance(operation, Check))
        if moment == "before":
            self.count.update(key for key in KEYS if key in written)
        current = self.world.current
        for entry in [
            entry for entry in self.script if entry[0] in written and (self.count[entry[0]], moment) == entry[1:3]
        ]:
            self.script.remove(entry)
            *_, event, index = entry
            if event == "killed" and current is not None:
                current.killed = True
                raise Killed
            if event in ("expired", "cut off"):
                self.world.server.expire(session)
            if event in ("lost", "cut off"):
                raise PossiblyInconsistentError(f"lost {moment} it was done")
            self.depth += 1
            try:
                self.interrupt(event, index)
            finally:
                self.world.current = current
                self.depth -= 1
            if event == "replaced" and not (current is not None and current.dead):
                raise PossiblyInconsistentError(f"lost {moment} it was done")
            if current is not None and current.dead:
                current.killed = True
                raise Killed

    def interrupt(self, event, index):
        """Lets other actors act while the current actor is paused."""
        if event in ("revoked", "granted", "replaced"):
            self.world.server.entries.pop(HOLDER, None)
        if event in ("granted", "replaced", "lead"):
            self.lead(index)
        if event == "run":
            self.run_process(index)
        if event == "submit":
            self.submit(f"job-{index}")
        if event == "cancel":
            self.cancel(f"job-{index}")
        if event == "prune":
            self.prune()

    def with_script(self, script, action):
        self.script, self.count = list(script), collections.Counter()
        try:
            action()
        finally:
            self.script = []

    def as_client(self, action):
        """Runs an action in a session of its own, like a user's command."""
        with self.world.acting_as(None):
            session = self.world.server.session()
            with contextlib.suppress(StagecrewError):
                action(Jobs(session, self.world.storage, lambda: self.world.clock))
            session.close()

    def submit(self, job):
        self.as_client(lambda jobs: jobs.submit(JobSpec(f"{job}.py", (), {}, {}, b"", 50), job))

    def cancel(self, job):
        self.world.cancelled.add(job)
        self.as_client(lambda jobs: jobs.cancel(job))

    def prune(self):
        self.as_client(lambda jobs: list(jobs.prune(0.0)))

    def lead(self, index):
        for action in ("campaign", "is granted", "reconcile"):
            self.candidate(index).perform(action)

    def run_process(self, index):
        living = [process for process in self.world.processes if not process.busy and not process.dead]
        if living:
            living[index % len(living)].act()

    @rule(job=JOB, script=SCRIPT)
    def a_job_is_submitted(self, job, script):
        self.with_script(script, lambda: self.submit(job))

    @rule(job=JOB, script=SCRIPT)
    def a_job_is_cancelled(self, job, script):
        self.with_script(script, lambda: self.cancel(job))

    @rule(index=INDEX, script=SCRIPT)
    def a_candidate_campaigns(self, index, script):
        self.with_script(script, lambda: self.candidate(index).perform("campaign"))

    @rule(index=INDEX, script=SCRIPT)
    def another_process_runs(self, index, script):
        """Repeats the rule `a_process_runs`, so that Hypothesis picks it more often: runs write most."""
        self.a_process_runs(index, script)

    @rule(index=INDEX)
    def a_candidate_is_granted_leadership(self, index):
        self.candidate(index).perform("is granted")

    @rule(index=INDEX, script=SCRIPT, seconds=st.sampled_from([0.0, 1.0, 60.0]))
    def a_leader_reconciles_its_jobs(self, index, script, seconds):
        self.world.clock += seconds
        self.with_script(script, lambda: self.candidate(index).perform("reconcile"))

    @rule(index=INDEX, script=SCRIPT, seconds=st.sampled_from([0.0, 1.0, 60.0]))
    def a_candidate_leads(self, index, script, seconds):
        """A candidate campaigns, is granted leadership and reconciles without interruption, as it usually does."""
        self.world.clock += seconds
        self.with_script(script, lambda: self.lead(index))

    @rule(index=INDEX, script=SCRIPT)
    def a_process_runs(self, index, script):
        """The process of a run works from its claim to its end, or until the script kills it. If no process is alive,
        one is started first."""
        if all(process.dead for process in self.world.processes):
            while self.world.dead_sessions:
                self.the_session_of_a_dead_process_expires(index)
            for other in range(3):
                self.world.clock += 60.0
                self.lead((index + other) % 3)
        self.with_script(script, lambda: self.run_process(index))

    @rule()
    def leadership_is_revoked(self):
        """The store revokes the leadership and notifies nobody."""
        self.world.server.entries.pop(HOLDER, None)

    @rule(index=INDEX)
    def a_candidate_notices_lost_leadership(self, index):
        candidate = self.candidate(index)
        if candidate.reconciler is not None:
            candidate.reconciler.stop()
        candidate.die()

    @rule(index=st.integers(0, 5), is_run=st.booleans())
    def a_process_dies(self, index, is_run):
        living = [actor for actor in (self.world.processes if is_run else self.world.drivers) if not actor.dead]
        if living:
            living[index % len(living)].die()

    @rule(index=st.integers(0, 5))
    def the_session_of_a_dead_process_expires(self, index):
        """The session of a dead process expires some time after its death."""
        if self.world.dead_sessions:
            self.world.server.expire(self.world.dead_sessions.pop(index % len(self.world.dead_sessions)))

    @rule(script=SCRIPT)
    def the_storage_is_swept(self, script):
        self.with_script(script, lambda: self.as_client(lambda jobs: jobs.sweep(0.0, lambda: float("inf"))))

    @rule(script=SCRIPT)
    def ended_jobs_are_pruned(self, script):
        """Ended jobs are pruned 0.1 s after the previous action."""
        self.world.clock += 0.1
        self.with_script(script, self.prune)

    @rule(keep=st.sampled_from([None, 0.0, 30.0]))
    def later_leaders_keep_ended_jobs_for(self, keep):
        """Changes how long later leaders keep ended jobs."""
        self.world.keep = keep

    @invariant()
    def the_store_is_consistent(self):
        assert_consistent(self.world)

    def teardown(self):
        assert_final_state(self.world, self.world.settle())


TestJobsUnderAnything = JobsMachine.TestCase
TestJobsUnderAnything.settings = settings(max_examples=60, stateful_step_count=30, derandomize=True, database=None)


@pytest.mark.long
@pytest.mark.timeout(1800)
class TestJobsUnderAnythingAtLength(JobsMachine.TestCase):
    settings = settings(max_examples=1500, stateful_step_count=50)
