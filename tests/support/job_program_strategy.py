"""A Hypothesis strategy for job programs. See `job_programs`."""

import itertools

from hypothesis import strategies as st

from support.job_programs import SUPPORTS_NAMES


class Block:
    """Draws the statements of a body. The other attributes describe the block of the program that has this body."""

    def __init__(self, draw, *, session):
        self.draw, self.session = draw, session
        self.numbers = itertools.count(1)
        self.topologies = 0
        self.datasets = {}  # name -> whether an action on the dataset changes a coordinator
        self.used = self.used_outside = set()  # names of steps and commits in this block, and outside of all steps
        self.steps = self.commits = self.streams = self.threads = True
        self.depth = 0
        self.in_home_thread = True  # whether this thread began the block
        self.in_step = False
        self.around_step = 0  # the number of topologies around the step
        self.remaining = itertools.count(MAX_STATEMENTS, -1)  # how many statements can still be drawn

    def inside(self, **changes):
        made = object.__new__(Block)
        made.__dict__ = self.__dict__ | {"datasets": dict(self.datasets), "depth": self.depth + 1} | changes
        return made

    def name(self, begin):
        name = next(name for i in itertools.count(1) if (name := f"{begin}{i}") not in self.used)
        self.used.add(name)
        return name

    def body(self, most=6):
        made = []
        for _ in range(self.draw(st.integers(1, most))):
            kinds = [kind for kind, depth in KINDS if depth >= self.depth and getattr(self, f"may_{kind}")]
            if not kinds or next(self.remaining) <= 0:
                break
            made += getattr(self, self.draw(st.sampled_from(kinds)))()
            if made[-1][0] in ("raise", "nameless"):
                break
        return tuple(made)

    # Whether a statement of each kind can be drawn here. Some of these properties draw, to make a kind rarer.
    may_use = property(lambda self: self.session or self.topologies > 0)
    known = property(lambda self: sorted(self.datasets))
    may_act = property(lambda self: bool(self.known))
    may_nameless = property(
        lambda self: SUPPORTS_NAMES and not self.in_home_thread and self.may_use and self.draw(st.booleans())
    )
    may_try_body = True
    may_raise_error = property(lambda self: self.draw(st.integers(0, 5)) == 5)
    may_commit = property(lambda self: self.commits and self.topologies > 0)
    may_step = property(lambda self: self.steps and (self.session or self.topologies > 0))
    may_step_with_dataset = may_step
    may_topology = property(lambda self: self.topologies < 2)
    may_stream = property(lambda self: self.streams and (self.topologies > 0 or not self.in_step))
    may_branches = property(lambda self: self.threads and (self.session or self.topologies > 0 or self.steps))

    def source(self, *, splits=True):
        kinds = ["session"] * self.session + ["topology", *["splits"] * 2 * splits] * (self.topologies > 0)
        kinds += ["outer"] * (self.topologies > 1)
        kind = self.draw(st.sampled_from(kinds))
        if kind == "splits":
            return kind, f"l{next(self.numbers)}-", self.draw(st.integers(1, 5))
        return kind, tuple(self.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))

    def use(self):
        for _ in range(self.draw(st.integers(1, 3))):
            name, source = f"v{next(self.numbers)}", self.source()
            self.datasets[name] = source[0] != "splits"
            yield "use", name, source

    def nameless(self):
        yield "nameless", f"v{next(self.numbers)}", self.source(splits=False)

    def act(self):
        name = self.draw(st.sampled_from(self.known))
        yield "act", name, None if self.datasets[name] else self.draw(st.sampled_from([None, 1, 2]))

    def commit(self):
        kind, *rest = self.source()
        yield "commit", self.name("k"), (kind, *([rest[0][:1]] if kind != "splits" else rest))

    def step(self):
        name = self.name("s")
        inside = self.inside(used=set(), in_home_thread=True, in_step=True, around_step=self.topologies)
        yield "step", name, inside.body()

    def step_with_dataset(self):
        """Draws a step that creates a dataset and runs an action on it."""
        name, source = f"v{next(self.numbers)}", self.source()
        yield "step", self.name("s"), (("use", name, source), ("act", name, None))

    def topology(self):
        yield (
            "topology",
            f"t{self.topologies + 1}",
            self.inside(topologies=self.topologies + 1, in_home_thread=True).body(),
        )

    def stream(self):
        name, count = f"q{next(self.numbers)}", self.draw(st.integers(1, 4))
        restricted = {"streams": False, "threads": False, "used": set()}
        untouched = {name: False for name, is_traced in self.datasets.items() if not is_traced}
        outside = self.inside(**restricted, datasets=dict(untouched), steps=False, commits=False, in_home_thread=False)
        made = outside.body(2) if self.draw(st.booleans()) and (outside.may_use or outside.may_topology) else ()
        body = self.inside(**restricted, in_home_thread=True).body()
        # If the topology does not wrap the function, the query's thread is in no step. This is allowed only if the
        # statement is in no step, or if no session or topology outside the step has coordinators.
        is_apart = not self.in_step or (not self.session and not self.around_step)
        wrapped = self.topologies > 0 and not (is_apart and self.draw(st.booleans()))
        broken = self.draw(st.integers(0, count - 1)) if not made and self.draw(st.booleans()) else None
        yield "stream", name, count, wrapped, broken, made, body

    def branches(self):
        """Draws threads that run steps, each in its own topology, or threads that use operators without steps."""
        changes = {"threads": False, "in_home_thread": False}
        if not self.topologies:  # no topology wraps the functions of these threads, so they are in no step
            changes["used"] = self.used_outside
        count = self.draw(st.integers(2, 3))
        if not self.session and not self.topologies and self.steps:
            bodies = [tuple(self.inside(**changes, datasets={}).topology()) for _ in range(count)]
        else:
            untouched = {name: False for name, is_traced in self.datasets.items() if not is_traced}
            changes |= {"steps": False, "streams": False}
            bodies = [self.inside(**changes, datasets=dict(untouched)).body(2) for _ in range(count)]
        yield "threads", tuple(bodies)

    def try_body(self):
        yield "try", self.inside().body()

    def raise_error(self):
        yield ("raise",)


#: The kinds of statements, each repeated according to its weight, and the depth down to which each can be drawn.
KINDS = [
    *[("use", 9)] * 3,
    *[("act", 9)] * 7,
    *[("step", 0), ("step", 1), ("step", 2)] * 2,
    *[("step_with_dataset", 2)] * 3,
    *[("topology", 0), ("topology", 2)],
    *[("commit", 9), ("stream", 2), ("branches", 2), ("raise_error", 9), ("nameless", 9), ("try_body", 1)],
]
#: The maximum number of statements in a program.
MAX_STATEMENTS = 20


@st.composite
def programs(draw):
    """Draws a program whose results do not depend on the order in which its threads run."""
    return Block(draw, session=draw(st.booleans())).body()
