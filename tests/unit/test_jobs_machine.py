"""Jobs under any order of what three contenders, their runs, submitters and the store may do: chosen, and made small, by Hypothesis."""

import collections
import contextlib

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jobsim import Killed, SimDriver, World, check, consistent
from stagecrew.errors import PossiblyInconsistentError, StagecrewError
from stagecrew.recovery.jobs.spec import JobSpec
from stagecrew.recovery.jobs.store import Jobs
from stagecrew.recovery.leadership.fencing import HOLDER
from stagecrew.recovery.stores.contract import Check

WHICH = st.integers(0, 2)
JOBS = 5
JOB = st.sampled_from([f"job-{number}" for number in range(JOBS)])
WHERE = ["/commits/", "/steps/", "/claim", "results/", "specs/", "leader/", "jobs/", "open/", "ended/"]
#: What happens while somebody does something: at the n-th of its transactions that writes such a key, before or behind it.
SCRIPT = st.lists(
    st.tuples(
        st.sampled_from(WHERE),
        st.sampled_from([2, 1, 3]),
        st.sampled_from(["before", "after"]),
        st.sampled_from(
            [
                "killed",
                "lost",
                "cut off",
                "replaced",
                "revoked",
                "over",
                "granted",
                "look",
                "look",
                "run",
                "submit",
                "cancel",
                "prune",
            ]
        ),
        WHICH,
    ),
    min_size=1,
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
            self.tending.reconcile()


class Machine(RuleBasedStateMachine):
    """Each rule is one thing that one of them does; what the others do in the middle of it is in its script."""

    def __init__(self):
        super().__init__()
        self.world = World(0, jobs=JOBS, faults=0)
        self.world.server.fault = self.happens
        self.world.drivers += [Contender(self.world) for _ in range(3)]
        self.script, self.count, self.depth = [], collections.Counter(), 0

    @initialize(jobs=st.sampled_from([JOBS, 2, 0]), leads=st.booleans())
    def begin(self, jobs, leads):
        """Mostly something is there already."""
        for number in range(jobs):
            self.submits(f"job-{number}")
        if leads:
            self.leads(0)

    def contender(self, which):
        found = self.world.drivers[which]
        if found.dead and not found.busy:
            found = self.world.drivers[which] = Contender(self.world)
        return found

    def happens(self, session, operations, moment):
        if self.depth:
            return
        written = " ".join(one.key for one in operations if not isinstance(one, Check))
        if moment == "before":
            self.count.update(where for where in WHERE if where in written)
        mine = self.world.current
        for one in [one for one in self.script if one[0] in written and (self.count[one[0]], moment) == one[1:3]]:
            self.script.remove(one)
            *_, what, which = one
            if what == "killed" and mine is not None:
                mine.killed = True
                raise Killed
            if what in ("over", "cut off"):
                self.world.server.expire(session)
            if what in ("lost", "cut off"):
                raise PossiblyInconsistentError(f"lost {moment} it was done")
            self.depth += 1
            try:
                self.meanwhile(what, which)
            finally:
                self.world.current = mine
                self.depth -= 1
            if what == "replaced" and not (mine is not None and mine.dead):
                raise PossiblyInconsistentError(f"lost {moment} it was done")
            if mine is not None and mine.dead:
                mine.killed = True
                raise Killed

    def meanwhile(self, what, which):
        """Others go on while one is paused."""
        if what in ("revoked", "granted", "replaced"):
            self.world.server.entries.pop(HOLDER, None)
        if what in ("granted", "replaced", "look"):
            self.leads(which)
        if what == "run":
            self.acts(which)
        if what == "submit":
            self.submits(f"job-{which}")
        if what == "cancel":
            self.cancels(f"job-{which}")
        if what == "prune":
            self.prunes()

    def scripted(self, script, do):
        self.script, self.count = list(script), collections.Counter()
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

    def prunes(self):
        self.client(lambda jobs: list(jobs.prune(0.0)))

    def leads(self, which):
        for step in ("campaign", "is granted", "looks"):
            self.contender(which).does(step)

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

    @rule(which=WHICH, script=SCRIPT)
    def another_run_goes_on(self, which, script):
        """As that is what most is written in."""
        self.a_run_goes_on(which, script)

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
        self.scripted(script, lambda: self.leads(which))

    @rule(which=WHICH, script=SCRIPT)
    def a_run_goes_on(self, which, script):
        """From its claim to its end, or to where its script ends it; where none lives, one is begun."""
        if all(one.dead for one in self.world.processes):
            while self.world.doomed:
                self.a_session_of_the_dead_is_over(which)
            for other in range(3):
                self.world.clock += 60.0
                self.leads((which + other) % 3)
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
        """Some time later than they died."""
        if self.world.doomed:
            self.world.server.expire(self.world.doomed.pop(which % len(self.world.doomed)))

    @rule(script=SCRIPT)
    def somebody_sweeps(self, script):
        self.scripted(script, lambda: self.client(lambda jobs: jobs.sweep(0.0, lambda: float("inf"))))

    @rule(script=SCRIPT)
    def somebody_prunes(self, script):
        """A moment later than the last job has ended."""
        self.world.clock += 0.1
        self.scripted(script, self.prunes)

    @rule(keep=st.sampled_from([None, 0.0, 30.0]))
    def drivers_are_started_otherwise(self, keep):
        """How long the next leaders keep jobs that have ended."""
        self.world.keep = keep

    @invariant()
    def whole(self):
        consistent(self.world)

    def teardown(self):
        check(self.world, self.world.settle())


TestJobsUnderAnything = Machine.TestCase
TestJobsUnderAnything.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, derandomize=True, database=None
)


@pytest.mark.long
@pytest.mark.timeout(1800)
class TestJobsUnderAnythingAtLength(Machine.TestCase):
    settings = settings(max_examples=1500, stateful_step_count=50, deadline=None)
