"""Writers of state handles that stop, die, fail or go on at each of their steps: for the tests of handles."""

import contextlib
import functools
import pathlib
import shutil
import tempfile
import threading

from modelstore import ModelServer
from stagecrew.errors import StoreConflict
from stagecrew.recovery.state.generation import read_generation
from stagecrew.recovery.state.handles import StateHandleStore
from stagecrew.recovery.state.storage import StateStorage
from stagecrew.recovery.state.sweep import sweep
from stagecrew.recovery.stores import open_store
from stagecrew.recovery.stores.contract import Create, Replace

ROOT = "jobs"
#: By this clock, every state is old.
LATE = 1e12


class Killed(BaseException):
    """The process died here; nothing that it does has an effect any more."""


class Stepped:
    """A store or a storage that calls `moment(method, when)` before and after each of its methods.

    `half` is the middle of a state's write, and `lost`, if `repeats`, that of a transaction whose answer was lost: it is then
    asked for again, and what it finds of its own counts as done.
    """

    def __init__(self, target, moment, repeats=False):
        self._target, self._moment, self._repeats = target, moment, repeats

    def __getattr__(self, name):
        found = getattr(self._target, name)
        if name not in ("ensure", "read", "children", "transact", "write", "discard", "names", "now", "close"):
            return found

        return functools.partial(self._one, found, name)

    def _one(self, found, name, *arguments):
        self._moment(name, "before", arguments)
        if name == "write":
            try:
                self._moment(name, "half")
            except BaseException:
                hint, data, *folder = arguments
                found(hint, data[: len(data) // 2], *folder)
                raise
        result = found(*arguments)
        if name == "transact" and self._repeats:
            self._moment(name, "lost")
            try:
                found(*arguments)
            except StoreConflict:
                written = [one for one in arguments if isinstance(one, Create | Replace) and one.value]
                held = [self._target.read(one.key) for one in written]
                if [entry and entry.value for entry in held] != [one.value for one in written]:
                    raise
        self._moment(name, "after")
        return result


class Step:
    """A moment that counts, and at one of them kills, or raises what `error(method, when)` answers."""

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
    """A store, a storage, and what must hold of them at any time."""

    def __init__(self, session, storage, expire):
        self._session, self.storage, self._expire = session, storage, expire
        self._live = set()
        self.looking = self.session()

    def session(self):
        store = self._session()
        self._live.add(store.session)
        return store

    def expire(self, name):
        """The session is over."""
        self._live.discard(name)
        self._expire(name)

    def only(self):
        """All sessions but the one that looks are over."""
        for name in self._live - {self.looking.session}:
            self.expire(name)

    def handles(self, moment=None, root=ROOT, repeats=False):
        store, storage = self.session(), self.storage
        if moment is not None:
            store, storage = Stepped(store, moment, repeats), Stepped(storage, moment)
        return StateHandleStore(store, storage, root)

    def files(self):
        folder = pathlib.Path(self.storage._folder)
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())

    def held(self, root=ROOT):
        """The data of each handle that is not marked; all of them are whole, or this raises."""
        found, unreadable = StateHandleStore(self.looking, self.storage, root).get_all()
        assert not unreadable
        return {handle.name: handle.data for handle in found}

    def sweep(self, moment=None, grace=0, roots=(ROOT,)):
        store, storage = self.looking, self.storage
        if moment is not None:
            store, storage = Stepped(store, moment), Stepped(storage, moment)
        return sweep(store, storage, roots, grace, clock=lambda: LATE)

    def clean(self):
        """Nothing is left but what is referred to, and that is whole."""
        report = self.sweep()
        assert not report.failed
        held = self.held()
        assert len(self.files()) == len(held)
        assert StateHandleStore(self.looking, self.storage, ROOT).audit().unfinished == []
        assert report.kept == len(held)
        return held

    def folder(self, root=ROOT):
        return read_generation(self.looking).folder(root)


@contextlib.contextmanager
def quick_folder():
    """A folder in memory, where there is one: a real file system, whose `fsync` costs nothing."""
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
    """With a real store."""
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
    """The database is beside the states."""
    with real_world(folder, f"sqlite://{folder}.db") as world:
        yield world


class Schedule:
    """Runs actors one step at a time, in an order that is chosen: each is a thread that waits where it meets a moment."""

    def __init__(self):
        self._actors = []

    def start(self, function, switches=("before", "lost", "half")):
        """An actor; `function` is called with its moment."""
        actor = _Actor(function, switches)
        self._actors.append(actor)
        return actor

    @property
    def running(self):
        return [actor for actor in self._actors if not actor.over]

    def finish(self):
        for actor in self._actors:
            while not actor.over:
                actor.step()


class _Actor:
    def __init__(self, function, switches):
        self._switches = switches
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self.over, self.result, self.error, self.raises = False, None, None, None
        self.at, self.arguments = None, ()
        self._thread = threading.Thread(target=self._run, args=(function,), daemon=True)
        self._thread.start()
        assert self._stopped.acquire(timeout=30)

    def _run(self, function):
        try:
            self.moment("", "before")
            self.result = function(self.moment)
        except BaseException as error:
            self.error = error
        self.over = True
        self._stopped.release()

    def moment(self, method, when, arguments=()):
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
        """Goes on to the next moment; or raises this where it stands."""
        self.raises = raises if raises is not None else self.raises
        self._go.release()
        assert self._stopped.acquire(timeout=30)
        if self.over:
            self._thread.join(30)


def schedules(make, check, switches=None):
    """Every order in which two actors can take their steps, or those with so many switches between them.

    `check` is called after each step that may have changed something, and at the end. Answers how many orders there are.
    """
    prefix, count = [], 0
    while True:
        schedule = Schedule()
        world = make(schedule)
        taken = []
        last, left = 0, switches
        try:
            while running := schedule.running:
                # The one that ran goes on by the first choice; the other, by the second.
                order = [last, 1 - last] if len(running) == 2 else [0]
                if left == 0:
                    order = order[:1]
                choice = prefix[len(taken)] if len(taken) < len(prefix) else 0
                taken.append((choice, len(order)))
                if choice and left is not None and len(taken) > 1:
                    left -= 1
                last = order[choice]
                actor = running[last]
                changes = actor.at[0] in CHANGES
                actor.step()
                if changes:
                    check(world, schedule, False)
            check(world, schedule, True)
        finally:
            schedule.finish()
        count += 1
        while taken and taken[-1][0] + 1 == taken[-1][1]:
            taken.pop()
        if not taken:
            return count
        prefix = [choice for choice, _ in taken[:-1]] + [taken[-1][0] + 1]


#: The methods after which something may be otherwise.
CHANGES = ("transact", "write", "discard")
