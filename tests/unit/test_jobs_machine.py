"""Jobs under any order of what three contenders, their runs, submitters and the store may do: chosen, and made small, by Hypothesis."""

import contextlib

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from jobsim import Killed, SimDriver, World, check, consistent
from stagecrew.errors import PossiblyInconsistentError, StagecrewError
from stagecrew.recovery.election import HOLDER
from stagecrew.recovery.jobs import Jobs
from stagecrew.recovery.specs import JobSpec

WHICH = st.integers(0, 2)
JOB = st.sampled_from(["job-0", "job-1"])
#: What happens while somebody does something: at the n-th of its transactions, before or behind it.
SCRIPT = st.lists(
    st.tuples(
        st.integers(1, 14),
        st.sampled_from(["before", "after"]),
        st.sampled_from(["killed", "lost", "revoked", "over", "granted", "look", "look", "run", "submit", "cancel"]),
        WHICH,
    ),
    max_size=3,
)


class Contender(SimDriver):
    """One that is told of what the store has decided some time later, or never."""

    def __init__(self, world):
        super().__init__(world)
        self.term, self.next = None, ""

    def does(self, what):
        if not self.busy and not self.dead:
            self.next = what
            self.act()

    def _act(self):
        if self.next == "campaign" and self.term is None:
            self.term = self.campaign()
        elif self.next == "is granted" and self.term is not None and self.tending is None:
            self.granted(self.term)
        elif self.next == "looks" and self.tending is not None:
            self.tending.look()


class Machine(RuleBasedStateMachine):
    """Each rule is one thing that one of them does; what the others do in the middle of it is in its script."""

    def __init__(self):
        super().__init__()
        self.world = World(0, jobs=2, faults=0)
        self.world.server.fault = self.happens
        self.world.drivers += [Contender(self.world) for _ in range(3)]
        self.script, self.count, self.depth = [], 0, 0

    def contender(self, which):
        found = self.world.drivers[which]
        if found.dead and not found.busy:
            found = self.world.drivers[which] = Contender(self.world)
        return found

    def happens(self, session, operations, moment):
        if self.depth:
            return
        self.count += moment == "before"
        now = [one for one in self.script if one[:2] == (self.count, moment)]
        mine = self.world.current
        for one in now:
            self.script.remove(one)
            _, _, what, which = one
            if what == "killed" and mine is not None:
                mine.killed = True
                raise Killed
            if what == "lost":
                raise PossiblyInconsistentError(f"lost {moment} it was done")
            if what == "over":
                self.world.server.expire(session)
            self.depth += 1
            try:
                self.meanwhile(what, which)
            finally:
                self.world.current = mine
                self.depth -= 1
            if mine is not None and mine.dead:
                mine.killed = True
                raise Killed

    def meanwhile(self, what, which):
        """Others go on while one is paused."""
        if what in ("revoked", "granted"):
            self.world.server.entries.pop(HOLDER, None)
        if what in ("granted", "look"):
            for step in ("campaign", "is granted", "looks"):
                self.contender(which).does(step)
        if what == "run":
            self.acts(which)
        if what == "submit":
            self.submits(f"job-{which % 2}")
        if what == "cancel":
            self.cancels(f"job-{which % 2}")

    def scripted(self, script, do):
        self.script, self.count = list(script), 0
        try:
            do()
        finally:
            self.script = []

    def client(self, do):
        """Somebody with a session of its own, who is no contender."""
        with self.world.as_(None):
            session = self.world.server.session()
            with contextlib.suppress(StagecrewError):
                do(Jobs(session, self.world.storage, lambda: self.world.clock))
            session.close()

    def submits(self, job):
        self.client(lambda jobs: jobs.submit(JobSpec(f"{job}.py", (), {}, {}, b"", 50), job))

    def cancels(self, job):
        self.world.cancelled.add(job)
        self.client(lambda jobs: jobs.cancel(job))

    def acts(self, which):
        living = [one for one in self.world.processes if not one.busy and not one.dead]
        if living:
            living[which % len(living)].act()

    @rule(job=JOB, script=SCRIPT)
    def somebody_submits(self, job, script):
        self.scripted(script, lambda: self.submits(job))

    @rule(job=JOB, script=SCRIPT)
    def somebody_cancels(self, job, script):
        self.scripted(script, lambda: self.cancels(job))

    @rule(which=WHICH, script=SCRIPT)
    def one_campaigns(self, which, script):
        self.scripted(script, lambda: self.contender(which).does("campaign"))

    @rule(which=WHICH)
    def one_is_told_that_it_leads(self, which):
        self.contender(which).does("is granted")

    @rule(which=WHICH, script=SCRIPT, seconds=st.sampled_from([0.0, 1.0, 60.0]))
    def one_looks_at_its_jobs(self, which, script, seconds):
        self.world.clock += seconds
        self.scripted(script, lambda: self.contender(which).does("looks"))

    @rule(which=WHICH, script=SCRIPT, seconds=st.sampled_from([0.0, 1.0, 60.0]))
    def one_leads(self, which, script, seconds):
        """All of that at once, as it mostly is."""
        self.world.clock += seconds
        for step in ("campaign", "is granted"):
            self.contender(which).does(step)
        self.scripted(script, lambda: self.contender(which).does("looks"))

    @rule(which=WHICH, script=SCRIPT)
    def a_run_goes_on(self, which, script):
        """From its claim to its end, or to where its script ends it."""
        self.scripted(script, lambda: self.acts(which))

    @rule()
    def leadership_is_revoked(self):
        """By the store, which tells nobody."""
        self.world.server.entries.pop(HOLDER, None)

    @rule(which=WHICH)
    def one_is_told_that_it_leads_no_more(self, which):
        contender = self.contender(which)
        if contender.tending is not None:
            contender.tending.stop()
        contender.die()

    @rule(which=st.integers(0, 5), process=st.booleans())
    def one_dies(self, which, process):
        living = [one for one in (self.world.processes if process else self.world.drivers) if not one.dead]
        if living:
            living[which % len(living)].die()

    @rule(which=st.integers(0, 5))
    def a_session_of_the_dead_is_over(self, which):
        if self.world.doomed:
            self.world.server.expire(self.world.doomed.pop(which % len(self.world.doomed)))

    @rule(script=SCRIPT)
    def somebody_sweeps(self, script):
        self.scripted(script, lambda: self.client(lambda jobs: jobs.sweep(0.0, lambda: float("inf"))))

    @invariant()
    def whole(self):
        consistent(self.world)

    def teardown(self):
        check(self.world, self.world.settle())


TestJobsUnderAnything = Machine.TestCase
TestJobsUnderAnything.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, derandomize=True, database=None
)


@pytest.mark.long
class TestJobsUnderAnythingAtLength(Machine.TestCase):
    settings = settings(max_examples=3000, stateful_step_count=50, deadline=None)
