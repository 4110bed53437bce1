"""Fault injection for the tests of state handles.

Writers pause, die or fail at each of their steps, in every order. A *step* is a point before, within or after a call to
a store or a storage.
"""

import contextlib
import functools
import pathlib
import shutil
import tempfile
import threading

from stagecrew.errors import StoreConflict
from stagecrew.recovery.state.generation import read_generation
from stagecrew.recovery.state.handles import StateHandleStore
from stagecrew.recovery.state.storage import StateStorage
from stagecrew.recovery.state.sweep import sweep
from stagecrew.recovery.stores import open_store
from stagecrew.recovery.stores.contract import Create, Replace
from support.model_store import ModelServer

ROOT = "jobs"
#: On this clock, every state is old.
FAR_FUTURE = 1e12


class Killed(BaseException):
    """The process died here. Nothing that it does afterwards has an effect."""


class Instrumented:
    """A proxy of a store or a storage that calls `on_step(method, when)` at each step.

    `when` is "before" or "after" the call, or "half" (in the middle of writing a state). If `repeats`, the response to
    each transaction is lost: after the step "lost", the proxy repeats the transaction. If the repetition conflicts only
    because the first one succeeded, it counts as a success.
    """

    def __init__(self, target, on_step, repeats=False):
        self._target, self._on_step, self._repeats = target, on_step, repeats

    def __getattr__(self, name):
        found = getattr(self._target, name)
        if name not in ("ensure", "read", "children", "transact", "write", "discard", "names", "now", "close"):
            return found

        return functools.partial(self._call, found, name)

    def _call(self, found, name, *arguments):
        self._on_step(name, "before", arguments)
        if name == "write":
            try:
                self._on_step(name, "half")
            except BaseException:
                hint, data, *folder = arguments
                found(hint, data[: len(data) // 2], *folder)
                raise
        result = found(*arguments)
        if name == "transact" and self._repeats:
            self._on_step(name, "lost")
            try:
                found(*arguments)
            except StoreConflict:
                written = [one for one in arguments if isinstance(one, Create | Replace) and one.value]
                entries = [self._target.read(one.key) for one in written]
                if [entry and entry.value for entry in entries] != [one.value for one in written]:
                    raise
        self._on_step(name, "after")
        return result


class FaultAtStep:
    """Counts steps. At step number `at`, it kills the process, or raises what `error(method, when)` returns, if any."""

    def __init__(self, at=0, error=None):
        self.at, self.error = at, error
        self.count = 0
        self.fired = self.dead = False

    def __call__(self, method, when, arguments=()):
        if self.dead:
            raise Killed
        self.count += 1
        if self.count != self.at:
            return
        if self.error is None:
            self.fired = self.dead = True
            raise Killed
        error = self.error(method, when)
        if error is not None:
            self.fired = True
            raise error


class World:
    """A store and a storage, with functions that inspect both."""

    def __init__(self, session, storage, expire):
        self._session, self.storage, self._expire = session, storage, expire
        self._live = set()
        self.observer = self.session()

    def session(self):
        store = self._session()
        self._live.add(store.session)
        return store

    def expire(self, name):
        """Ends a session."""
        self._live.discard(name)
        self._expire(name)

    def expire_others(self):
        """Ends all sessions except the observer's."""
        for name in self._live - {self.observer.session}:
            self.expire(name)

    def handles(self, on_step=None, root=ROOT, repeats=False):
        """Returns handles with a new session, whose calls to the store and the storage call `on_step`."""
        store, storage = self.session(), self.storage
        if on_step is not None:
            store, storage = Instrumented(store, on_step, repeats), Instrumented(storage, on_step)
        return StateHandleStore(store, storage, root)

    def files(self):
        folder = pathlib.Path(self.storage._folder)
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())

    def readable_data(self, root=ROOT):
        """Returns the data of each handle that is not marked for removal. Asserts that all of them can be read."""
        found, unreadable = StateHandleStore(self.observer, self.storage, root).get_all()
        assert not unreadable
        return {handle.name: handle.data for handle in found}

    def sweep(self, on_step=None, grace=0, roots=(ROOT,)):
        store, storage = self.observer, self.storage
        if on_step is not None:
            store, storage = Instrumented(store, on_step), Instrumented(storage, on_step)
        return sweep(store, storage, roots, grace, clock=lambda: FAR_FUTURE)

    def assert_clean(self):
        """Sweeps, and asserts that only referenced states are left and that all of them can be read.

        Returns the data of each handle.
        """
        report = self.sweep()
        assert not report.failed
        entries = self.readable_data()
        assert len(self.files()) == len(entries)
        assert StateHandleStore(self.observer, self.storage, ROOT).audit().unfinished == []
        assert report.kept == len(entries)
        return entries

    def folder(self, root=ROOT):
        return read_generation(self.observer).folder(root)


@contextlib.contextmanager
def quick_folder():
    """Creates a temporary folder, in memory if possible: a real file system on which `fsync` is fast."""
    memory = "/dev/shm"
    folder = tempfile.mkdtemp(prefix="stagecrew-", dir=memory if pathlib.Path(memory).is_dir() else None)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def model_world(folder):
    pathlib.Path(folder).mkdir(exist_ok=True)
    server = ModelServer()
    world = World(server.session, StateStorage(folder), server.expire)
    world.server = server
    return world


@contextlib.contextmanager
def real_world(folder, url):
    """A world with a real store."""
    pathlib.Path(folder).mkdir(exist_ok=True)
    opened = {}

    def session():
        store = open_store(url)
        opened[store.session] = store
        return store

    try:
        yield World(session, StateStorage(folder), lambda name: opened[name].close())
    finally:
        for store in opened.values():
            store.close()


@contextlib.contextmanager
def sqlite_world(folder):
    """A world with a SQLite store, whose database is next to the folder of the states."""
    with real_world(folder, f"sqlite://{folder}.db") as world:
        yield world


class Schedule:
    """Runs actors one step at a time, in a chosen order. Each actor is a thread that waits at each of its steps."""

    def __init__(self):
        self._actors = []

    def start(self, function, switches=("before", "lost", "half")):
        """Starts an actor, which calls `function(on_step)` and waits at the steps whose `when` is in `switches`."""
        actor = _Actor(function, switches)
        self._actors.append(actor)
        return actor

    @property
    def running(self):
        return [actor for actor in self._actors if not actor.ended]

    def finish(self):
        for actor in self._actors:
            while not actor.ended:
                actor.step()


class _Actor:
    def __init__(self, function, switches):
        self._switches = switches
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self.ended, self.result, self.error, self.raises = False, None, None, None
        self.at, self.arguments = None, ()
        self._thread = threading.Thread(target=self._run, args=(function,), daemon=True)
        self._thread.start()
        assert self._stopped.acquire(timeout=30)

    def _run(self, function):
        try:
            self.on_step("", "before")
            self.result = function(self.on_step)
        except BaseException as error:
            self.error = error
        self.ended = True
        self._stopped.release()

    def on_step(self, method, when, arguments=()):
        if isinstance(self.raises, Killed):
            raise self.raises
        if when in self._switches:
            self.at, self.arguments = (method, when), arguments
            self._stopped.release()
            assert self._go.acquire(timeout=30)
        if self.raises is not None:
            error = self.raises
            if not isinstance(error, Killed):
                self.raises = None
            raise error

    def step(self, raises=None):
        """Runs the actor to its next step. If `raises`, this error is raised in the actor where it is waiting."""
        self.raises = raises if raises is not None else self.raises
        self._go.release()
        assert self._stopped.acquire(timeout=30)
        if self.ended:
            self._thread.join(30)


def explore_schedules(make_world, check, switches=None):
    """Explores every order of the steps of two actors, or those with at most `switches` switches between the actors.

    `check(world, schedule, ended)` is called after each step that may have changed something, and at the end of each
    order. Returns the number of orders.
    """
    prefix, count = [], 0
    while True:
        schedule = Schedule()
        world = make_world(schedule)
        choices = []
        last, switches_left = 0, switches
        try:
            while running := schedule.running:
                # The first choice continues the actor that ran last; the second choice continues the other one.
                order = [last, 1 - last] if len(running) == 2 else [0]
                if switches_left == 0:
                    order = order[:1]
                choice = prefix[len(choices)] if len(choices) < len(prefix) else 0
                choices.append((choice, len(order)))
                if choice and switches_left is not None and len(choices) > 1:
                    switches_left -= 1
                last = order[choice]
                actor = running[last]
                changes = actor.at[0] in MUTATING_METHODS
                actor.step()
                if changes:
                    check(world, schedule, False)
            check(world, schedule, True)
        finally:
            schedule.finish()
        count += 1
        while choices and choices[-1][0] + 1 == choices[-1][1]:
            choices.pop()
        if not choices:
            return count
        prefix = [choice for choice, _ in choices[:-1]] + [choices[-1][0] + 1]


#: The methods that can change the store or the storage.
MUTATING_METHODS = ("transact", "write", "discard")
