"""What state handles must do on any store. Who collects this gives the fixture `world`."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import threading

import pytest

from handlesteps import LATE, ROOT
from stagecrew.errors import (
    HandleExists,
    HandleLocked,
    HandleMissing,
    LeadershipLost,
    PossiblyInconsistentError,
    RecoveryMisused,
    SessionLost,
    StateCorrupt,
    StateStorageError,
    StoreConflict,
    StoreRefused,
    StoreUnavailable,
    StoreUnsupported,
)
from stagecrew.recovery.state.generation import GENERATION
from stagecrew.recovery.state.handles import StateHandleStore
from stagecrew.recovery.state.sweep import SweepReport, sweep
from stagecrew.recovery.stores.contract import Check, Create, Delete, Replace, encode_segment

DEFINITE = [StoreUnavailable("away"), SessionLost("over"), StoreRefused("no"), LeadershipLost("another leads")]
UNKNOWN = [PossiblyInconsistentError("lost"), RuntimeError("a bug of the client"), KeyboardInterrupt()]


@pytest.fixture
def handles(world):
    return world.handles()


def at(world, name):
    """The path of the file of a state."""
    return (
        pathlib.Path(world.storage._folder)
        / json.loads(world.looking.read(f"{ROOT}/{encode_segment(name)}").value)["name"]
    )


def failing(world, error, when="before", method="transact"):
    """Handles of a warm instance whose next call of a method raises."""
    armed = []

    def moment(called, at_, arguments=()):
        if armed and (called, at_) == (method, when):
            armed.clear()
            raise error

    handles = world.handles(moment)
    handles.add("warm", b"")
    handles.remove("warm")
    return handles, lambda: armed.append(1)


class TestAdd:
    def test_what_was_added_is_read(self, world, handles):
        """Each name, however odd, has its state, with version 0, and nothing else is stored."""
        odd = ["a", "a/b", "..", "Straße 7", "locks", "x" * 300]
        for name in odd:
            handles.add(name, name.encode())
        assert handles.names() == sorted(odd)
        assert {name: handles.get(name).data for name in odd} == {name: name.encode() for name in odd}
        assert {handles.get(name).version for name in odd} == {0}
        assert world.clean() == {name: name.encode() for name in odd}

    def test_the_entries_are_as_expected(self, world, handles):
        """A small reference in the store, the state in the storage below the store's and the root's folder."""
        handles.add("nightly", b"state" * 1000, lock=True)
        value = json.loads(world.looking.read("jobs/nightly").value)
        assert value["format"] == 1
        assert value["length"] == 5000
        assert value["name"].startswith(f"{world.folder()}/nightly-")
        assert world.looking.children("jobs/nightly/locks") == [handles._store.session]
        assert len(world.looking.read("jobs/nightly").value) < 400
        assert world.files() == [value["name"]]

    def test_one_of_this_name(self, world, handles):
        """It stays, and nothing is left of the second."""
        handles.add("a", b"1")
        with pytest.raises(HandleExists, match="'a'"):
            world.handles().add("a", b"2")
        assert len(world.files()) == 1
        assert world.clean() == {"a": b"1"}

    def test_what_writers_leave_in_the_store(self, world, handles):
        """One entry for each write at a time, not for each root or handle; none when the session is over."""
        for number in range(20):
            StateHandleStore(handles._store, world.storage, f"root-{number}").add("a", b"1")
            handles.add(f"{number}", b"1")
            handles.remove(f"{number}")
        assert len(world.looking.children("sweep/writers")) == 1
        world.expire(handles._store.session)
        assert world.looking.children("sweep/writers") == []

    def test_no_bytes(self, handles):
        """Anything but bytes is refused, before anything is written."""
        for wrong in (5, "text", None):
            with pytest.raises(RecoveryMisused, match="bytes"):
                handles.add("a", wrong)
        with pytest.raises(RecoveryMisused):
            handles.add("", b"")
        with pytest.raises(RecoveryMisused):
            StateHandleStore(handles._store, handles._storage, "no//key")

    @pytest.mark.parametrize("error", DEFINITE, ids=lambda error: type(error).__name__)
    def test_definitely_not_done(self, world, error):
        """The new state is discarded, the error is raised; adding again does it."""
        handles, arm = failing(world, error)
        arm()
        with pytest.raises(type(error)):
            handles.add("a", b"1")
        assert world.files() == []
        handles.add("a", b"2")
        assert world.clean() == {"a": b"2"}

    @pytest.mark.parametrize("when", ["before", "after"])
    @pytest.mark.parametrize("error", UNKNOWN, ids=lambda error: type(error).__name__)
    def test_nobody_knows(self, world, error, when):
        """Nothing is discarded; when it was done, the state is there; when not, it is swept."""
        handles, arm = failing(world, error, when)
        arm()
        with pytest.raises(type(error)):
            handles.add("a", b"1")
        assert len(world.files()) == 1
        assert world.clean() == ({"a": b"1"} if when == "after" else {})

    @pytest.mark.parametrize("when", ["before", "after"])
    def test_repeating_tells(self, world, when):
        """Who adds the same prepared state again is answered as if the first had been."""
        handles, arm = failing(world, PossiblyInconsistentError("lost"), when)
        state = handles.prepare(b"1")
        arm()
        with pytest.raises(PossiblyInconsistentError):
            handles.add("a", state)
        handles.add("a", state)
        handles.add("a", state)
        assert len(world.files()) == 1
        assert world.clean() == {"a": b"1"}
        with pytest.raises(RecoveryMisused, match="prepare another one"):
            handles.add("b", state)
        with pytest.raises(HandleExists):
            handles.add("a", b"1")

    @pytest.mark.parametrize("error", DEFINITE[:-1], ids=lambda error: type(error).__name__)
    def test_a_repetition_that_fails_does_not_settle_the_first(self, world, error):
        """After an unknown outcome, only an answer about the first settles it: until then nothing is discarded."""
        handles, arm = failing(world, PossiblyInconsistentError("lost"), "after")
        state = handles.prepare(b"1")
        arm()
        with pytest.raises(PossiblyInconsistentError):
            handles.add("a", state)
        handles._store._moment = lambda method, when, arguments=(): (
            (_ for _ in ()).throw(error) if method == "transact" else None
        )
        with pytest.raises(type(error)):
            handles.add("a", state)
        assert world.clean() == {"a": b"1"}

    def test_repeated_when_it_was_removed_meanwhile(self, world):
        """It was added once: it does not come back."""
        handles, arm = failing(world, PossiblyInconsistentError("lost"), "after")
        state = handles.prepare(b"1")
        arm()
        with pytest.raises(PossiblyInconsistentError):
            handles.add("a", state)
        world.handles().remove("a")
        handles.add("a", state)
        assert handles.names() == []
        assert world.clean() == {}

    @pytest.mark.parametrize("when", ["before", "after"])
    def test_repeated_by_a_new_session(self, world, when):
        """Also when the session of the first is over."""
        handles, arm = failing(world, PossiblyInconsistentError("lost"), when)
        state = handles.prepare(b"1")
        arm()
        with pytest.raises(PossiblyInconsistentError):
            handles.add("a", state)
        world.expire(handles._store.session)
        world.handles().add("a", state)
        assert world.clean() == {"a": b"1"}

    def test_also(self, world, handles):
        """Further operations are done with it, or it is not done; the conflict says which."""
        world.looking.ensure("other")
        handles.add("a", b"1", also=[Create("other/a", b"x"), Check("other", 0)])
        assert world.looking.read("other/a").value == b"x"
        with pytest.raises(StoreConflict) as caught:
            handles.add("b", b"1", also=[Create("other/b"), Create("other/a")])
        assert (caught.value.index, caught.value.why) == (1, "exists")
        assert world.looking.read("other/b") is None
        assert len(world.files()) == 1
        assert world.clean() == {"a": b"1"}

    def test_on_a_marked_one(self, world, handles):
        """A removal that stopped half-way is finished first."""
        handles.add("a", b"old")
        world.looking.transact(Delete("jobs/a/locks"))
        handles.add("a", b"new")
        assert len(world.files()) == 1
        assert world.clean() == {"a": b"new"}

    def test_on_a_marked_one_that_cannot_be_deleted(self, world):
        """The error is raised, and nothing is left of the new state; the next add does it."""
        handles, arm = failing(world, StateStorageError("the disk is away"), method="discard")
        handles.add("a", b"old")
        world.looking.transact(Delete("jobs/a/locks"))
        arm()
        with pytest.raises(StateStorageError):
            handles.add("a", b"new")
        assert len(world.files()) == 1
        assert handles.names() == []
        handles.add("a", b"new")
        assert world.clean() == {"a": b"new"}

    def test_storage_fails(self, world):
        """Nothing is in the store, and nothing in the way of the next."""
        handles, arm = failing(world, StateStorageError("full"), "half", "write")
        arm()
        with pytest.raises(StateStorageError):
            handles.add("a", b"1234")
        assert handles.names() == []
        handles.add("a", b"1")
        assert world.clean() == {"a": b"1"}

    def test_a_discard_that_fails_does_not_hide_the_error(self, world, handles):
        """The error is why it was not done; what is left stands beside it, and is swept."""
        handles.add("a", b"1")
        other, arm = failing(world, StateStorageError("the disk is away"), method="discard")
        arm()
        with pytest.raises(HandleExists) as caught:
            other.add("a", b"2")
        assert any("a sweep will delete it" in note for note in caught.value.__notes__)
        assert len(world.files()) == 2
        assert world.clean() == {"a": b"1"}

    def test_swept_while_it_is_written(self, world):
        """Each time a sweep has come between, the state is written again; one who never gets through says so."""
        sweeps = []

        def moment(method, when, arguments=()):
            if (method, when) == ("write", "after") and len(sweeps) < limit:
                sweeps.append(world.sweep())

        limit = 3
        world.handles(moment).add("a", b"1")
        assert [report.removed for report in sweeps] == [1, 1, 1]
        limit = 1000
        with pytest.raises(StoreUnavailable, match="sweeps or removals"):
            world.handles(moment).add("b", b"1")
        assert world.clean() == {"a": b"1"}


class TestReplace:
    def test_compare_and_set(self, world, handles):
        """The version counts; of another nothing is changed and nothing left; the old state is gone after success."""
        handles.add("a", b"0")
        assert handles.replace("a", 0, b"1") == 1
        assert handles.replace("a", 1, b"2") == 2
        assert len(world.files()) == 1
        with pytest.raises(StoreConflict, match="version 1") as caught:
            world.handles().replace("a", 1, b"3")
        assert (caught.value.index, caught.value.why) == (-1, "version")
        assert handles.get("a").version == 2
        assert len(world.files()) == 1
        assert world.clean() == {"a": b"2"}

    def test_missing_or_marked(self, world, handles):
        """There is nothing to replace, and nothing is left."""
        with pytest.raises(HandleMissing):
            handles.replace("a", 0, b"1")
        handles.add("a", b"0")
        world.looking.transact(Delete("jobs/a/locks"))
        with pytest.raises(HandleMissing):
            handles.replace("a", 0, b"1")
        assert len(world.files()) == 1
        assert world.clean() == {}

    @pytest.mark.parametrize("error", DEFINITE, ids=lambda error: type(error).__name__)
    def test_definitely_not_done(self, world, error):
        """The old state stays, the new one is discarded."""
        handles, arm = failing(world, error)
        handles.add("a", b"0")
        arm()
        with pytest.raises(type(error)):
            handles.replace("a", 0, b"1")
        assert len(world.files()) == 1
        assert handles.get("a").data == b"0"

    @pytest.mark.parametrize("when", ["before", "after"])
    @pytest.mark.parametrize("error", UNKNOWN, ids=lambda error: type(error).__name__)
    def test_nobody_knows(self, world, error, when):
        """Both states stay, until a sweep."""
        handles, arm = failing(world, error, when)
        handles.add("a", b"0")
        arm()
        with pytest.raises(type(error)):
            handles.replace("a", 0, b"1")
        assert len(world.files()) == 2
        assert world.clean() == {"a": b"1" if when == "after" else b"0"}

    @pytest.mark.parametrize("when", ["before", "after"])
    def test_repeating_tells(self, world, when):
        """The same prepared state counts once, and the old one is discarded then."""
        handles, arm = failing(world, PossiblyInconsistentError("lost"), when)
        handles.add("a", b"0")
        state = handles.prepare(b"1")
        arm()
        with pytest.raises(PossiblyInconsistentError):
            handles.replace("a", 0, state)
        assert handles.replace("a", 0, state) == 1
        assert handles.replace("a", 0, state) == 1
        assert len(world.files()) == 1
        assert handles.replace("a", 1, b"2") == 2
        assert world.clean() == {"a": b"2"}

    def test_also(self, world, handles):
        """In the same transaction, as with `add`."""
        handles.add("a", b"0")
        with pytest.raises(StoreConflict) as caught:
            handles.replace("a", 0, b"1", also=[Check("nowhere")])
        assert (caught.value.index, caught.value.why) == (0, "missing")
        assert handles.get("a").data == b"0"
        handles.replace("a", 0, b"1", also=[Create("somewhere")])
        assert world.looking.read("somewhere")
        assert world.clean() == {"a": b"1"}

    def test_an_old_state_that_cannot_be_discarded(self, world, caplog):
        """It was replaced: the rest is for the sweep."""
        handles, arm = failing(world, StateStorageError("the disk is away"), method="discard")
        handles.add("a", b"0")
        arm()
        assert handles.replace("a", 0, b"1") == 1
        assert "a sweep will delete it" in caplog.text
        assert len(world.files()) == 2
        assert world.clean() == {"a": b"1"}

    def test_what_cannot_be_read_can_be_replaced(self, world, handles):
        """A corrupt handle gets a good state."""
        handles.add("a", b"0")
        world.looking.transact(Replace("jobs/a", b"rubbish", 0))
        assert handles.replace("a", 1, b"1") == 2
        assert world.clean() == {"a": b"1"}


class TestGet:
    def test_missing(self, handles):
        """No handle: no state, no version, no lock."""
        assert not handles.exists("a")
        for ask in (handles.get, handles.lock):
            with pytest.raises(HandleMissing, match="'a' does not exist in jobs"):
                ask("a")
        assert handles.get_all() == ([], {})
        assert handles.names() == []
        handles.release("a")
        handles.release_all()
        handles.clear()

    def test_marked(self, world, handles):
        """A marked one counts as absent."""
        handles.add("a", b"1")
        handles.add("b", b"2")
        assert handles.exists("a")
        world.looking.transact(Delete("jobs/a/locks"))
        assert not handles.exists("a")
        with pytest.raises(HandleMissing):
            handles.get("a")
        with pytest.raises(HandleMissing):
            handles.lock("a")
        assert handles.names() == ["b"]
        assert [handle.name for handle in handles.get_all(lock=True)[0]] == ["b"]

    def test_all(self, handles):
        """In the order of their names."""
        for name in ("c", "a", "b"):
            handles.add(name, name.encode())
        found, unreadable = handles.get_all()
        assert [(handle.name, handle.data) for handle in found] == [("a", b"a"), ("b", b"b"), ("c", b"c")]
        assert unreadable == {}

    def test_what_cannot_be_read_does_not_stop_the_others(self, world, handles):
        """Corrupt, truncated, longer, missing states, and entries that are none or newer: named errors; nothing is deleted."""
        for name in ("corrupt", "entry", "fine", "longer", "missing", "newer", "truncated", "typed", "outside"):
            handles.add(name, b"state of " + name.encode())
        path = {name: at(world, name) for name in handles.names()}
        path["corrupt"].write_bytes(b"STATE of corrupt")
        path["longer"].write_bytes(b"state of longer than it was")
        path["truncated"].write_bytes(b"state")
        path["missing"].unlink()
        value = json.loads(world.looking.read("jobs/fine").value)
        world.looking.transact(
            Replace("jobs/entry", b"\xff", 0),
            Replace("jobs/newer", json.dumps({"format": 2, "uuid": "x"}).encode(), 0),
            Replace("jobs/typed", json.dumps({**value, "length": "5"}).encode(), 0),
            Replace("jobs/outside", json.dumps({**value, "name": "../../etc/passwd"}).encode(), 0),
        )
        before = world.files()
        found, unreadable = handles.get_all(lock=True)
        assert [handle.name for handle in found] == ["fine"]
        assert {name: type(error) for name, error in unreadable.items()} == {
            "corrupt": StateCorrupt,
            "entry": StateCorrupt,
            "longer": StateCorrupt,
            "missing": StateCorrupt,
            "newer": StoreUnsupported,
            "outside": StateCorrupt,
            "truncated": StateCorrupt,
            "typed": StateCorrupt,
        }
        for name, error in unreadable.items():
            with pytest.raises(type(error)):
                handles.get(name)
            assert world.looking.children(f"jobs/{name}/locks") == []
        report = world.sweep()
        assert set(report.failed) == {"jobs/entry", "jobs/newer", "jobs/typed"}
        assert report.removed == 0
        assert world.files() == before
        for name in unreadable:
            assert handles.remove(name)
        assert world.clean() == {"fine": b"state of fine"}

    def test_store_fails(self, world):
        """That is no handle's fault: it is raised, and no lock stays."""
        handles, arm = failing(world, StoreUnavailable("away"), method="read")
        handles.add("a", b"1")
        for ask in (lambda: handles.get("a", lock=True), lambda: handles.get_all(lock=True)):
            arm()
            with pytest.raises(StoreUnavailable):
                ask()
            assert world.looking.children("jobs/a/locks") == []

    def test_replaced_while_it_is_read(self, world, handles):
        """The new state is read, when the old one was discarded meanwhile; one that is removed meanwhile is missing."""
        handles.add("a", b"0")
        done = []

        def moment(method, when, arguments=()):
            if (method, when) == ("read", "after") and len(done) == 3:
                handles.replace("a", 0, b"1")
            if method == "read":
                done.append(when)

        assert world.handles(moment).get("a").data == b"1"
        done.clear()

        def removing(method, when, arguments=()):
            if (method, when) == ("read", "after") and len(done) == 3:
                handles.remove("a")
            if method == "read":
                done.append(when)

        with pytest.raises(HandleMissing):
            world.handles(removing).get("a")

    def test_replaced_each_time_it_is_read(self, world, handles):
        """One who never gets through says so: there is no livelock."""
        handles.add("a", b"0")

        def moment(method, when, arguments=()):
            if (method, when) == ("read", "before"):
                handles.replace("a", handles.get("a").version, b"x")

        with pytest.raises(StateStorageError, match="replaced 20 times"):
            world.handles(moment).get("a")


class TestLock:
    def test_keeps_others_from_removing(self, world, handles):
        """A handle that another session uses stays, whole; who asked gives up its own lock; the last one removes it."""
        handles.add("a", b"1", lock=True)
        other = world.handles()
        assert other.get("a", lock=True).data == b"1"
        with pytest.raises(HandleLocked, match=other._store.session):
            handles.remove("a", also=[Create("done")])
        assert world.looking.read("done") is None
        assert handles.get("a").data == b"1"
        assert other.remove("a", also=[Create("done")])
        assert world.looking.read("done")
        assert world.clean() == {}

    def test_is_one_for_each_session(self, world, handles):
        """Locked twice is locked once; released twice is fine."""
        handles.add("a", b"1")
        assert handles.lock("a")
        assert not handles.lock("a")
        assert not handles.get_all(lock=True)[1]
        handles.release("a")
        handles.release("a")
        assert world.handles().remove("a")

    def test_that_was_held_before_stays_when_a_get_fails(self, world, handles):
        """Only the lock that the failing call took is given up."""
        handles.add("a", b"1", lock=True)
        at(world, "a").unlink()
        for ask in (lambda: handles.get("a", lock=True), handles.get_all):
            with contextlib.suppress(StateStorageError):
                ask()
        assert world.looking.children("jobs/a/locks") == [handles._store.session]
        with pytest.raises(StateStorageError):
            world.handles().get("a", lock=True)
        assert world.looking.children("jobs/a/locks") == [handles._store.session]

    def test_ends_with_its_session(self, world, handles):
        """When its process dies, another can remove it."""
        handles.add("a", b"1", lock=True)
        other = world.handles()
        with pytest.raises(HandleLocked):
            other.remove("a")
        world.expire(handles._store.session)
        assert other.remove("a")
        assert world.clean() == {}

    def test_release_all(self, world):
        """All are released, also when one fails; the error comes then."""
        handles, arm = failing(world, StoreUnavailable("away"))
        for name in ("a", "b", "c"):
            handles.add(name, b"1", lock=True)
        arm()
        with pytest.raises(StoreUnavailable):
            handles.release_all()
        assert [len(world.looking.children(f"jobs/{name}/locks")) for name in ("a", "b", "c")] == [1, 0, 0]
        handles.release_all()
        assert world.handles().remove("a")

    def test_does_not_keep_from_replacing(self, world, handles):
        """It says that the handle is in use, not by whom it may be changed."""
        handles.add("a", b"0", lock=True)
        assert world.handles().replace("a", 0, b"1") == 1


class TestRemove:
    def test_takes_all_away(self, world, handles):
        """State, reference, locks; again is fine, and says that it did nothing."""
        handles.add("a", b"1", lock=True)
        assert handles.remove("a")
        assert world.files() == []
        assert world.looking.children(ROOT) == []
        assert not handles.remove("a")
        assert not handles.remove("never")
        handles.add("a", b"2")
        assert world.clean() == {"a": b"2"}

    def test_a_discard_that_fails(self, world):
        """It is marked, and reported; the next one finishes it."""
        handles, arm = failing(world, StateStorageError("the disk is away"), method="discard")
        handles.add("a", b"1")
        arm()
        with pytest.raises(StateStorageError):
            handles.remove("a", also=[Create("done")])
        assert world.looking.read("done")
        assert len(world.files()) == 1
        assert not handles.exists("a")
        assert not handles.remove("a", also=[Create("done")])
        assert world.clean() == {}

    def test_also_that_does_not_fit(self, world, handles):
        """Nothing is removed."""
        handles.add("a", b"1")
        with pytest.raises(StoreConflict) as caught:
            handles.remove("a", also=[Create("x"), Check("nowhere")])
        assert (caught.value.index, caught.value.why) == (1, "missing")
        assert world.looking.read("x") is None
        assert world.clean() == {"a": b"1"}

    def test_an_entry_that_cannot_be_read(self, world, handles):
        """Who asks for it by name gets it removed; its state is swept."""
        handles.add("a", b"1")
        world.looking.transact(Replace("jobs/a", b"rubbish", 0))
        assert handles.remove("a")
        assert len(world.files()) == 1
        assert world.clean() == {}

    def test_clear(self, world):
        """All references go, also while the storage is away; what another uses stays; the states are swept."""
        handles, arm = failing(world, StateStorageError("the disk is away"), method="discard")
        for name in ("a", "b", "c"):
            handles.add(name, b"1", lock=True)
        world.looking.transact(Delete("jobs/c/locks/" + encode_segment(handles._store.session)), Delete("jobs/c/locks"))
        other = world.handles()
        other.lock("b")
        arm()
        with pytest.raises(HandleLocked, match="'b'"):
            handles.clear()
        assert handles.names() == ["b"]
        other.release_all()
        handles.clear()
        assert world.looking.children(ROOT) == []
        assert len(world.files()) == 3
        assert world.clean() == {}


class TestSweep:
    def test_what_is_referred_to_stays(self, world, handles):
        """Only states that nothing refers to, older than the grace, of these roots; half-done removals are finished."""
        other = world.handles(root="results")
        handles.add("a", b"1")
        other.add("r", b"22")
        folder, results = world.folder(), world.folder("results")
        world.storage.write("orphan", b"333", folder)
        world.storage.write("orphan", b"333", results)
        world.storage.write("another store's", b"333", "another/jobs")
        handles.add("half", b"4444")
        world.looking.transact(Delete("jobs/half/locks"))
        young = sweep(world.looking, world.storage, [ROOT], 3600)
        assert (young.kept, young.removed, young.bytes) == (2, 0, 0)
        assert world.sweep() == SweepReport(kept=1, removed=1, bytes=3)
        assert world.sweep() == SweepReport(kept=1)
        assert len(world.files()) == 4
        assert world.sweep(roots=[ROOT, "results", "results", "never"]) == SweepReport(kept=2, removed=1, bytes=3)
        assert world.held() == {"a": b"1"}
        assert world.held("results") == {"r": b"22"}

    def test_by_the_clock_of_the_storage(self, world, handles):
        """The age is the difference of two times of the storage's own clock."""
        handles.add("a", b"1")
        reference = world.storage.write("orphan", b"333", world.folder())
        path = pathlib.Path(world.storage._folder) / reference.name
        os.utime(path, (path.stat().st_mtime - 500,) * 2)
        assert sweep(world.looking, world.storage, [ROOT], 600).removed == 0
        assert sweep(world.looking, world.storage, [ROOT], 400).removed == 1
        assert len(world.files()) == 1

    def test_nothing_to_do_disturbs_nobody(self, world, handles):
        """The generation moves only when there is something to remove."""
        handles.add("a", b"1")
        before = world.looking.read(GENERATION)
        world.sweep()
        assert world.looking.read(GENERATION) == before

    def test_two_at_once(self, world, handles):
        """A sweep that meets another goes on."""
        handles.add("a", b"1")
        world.storage.write("orphan", b"333", world.folder())
        reports = []

        def moment(method, when, arguments=()):
            if (method, when) == ("transact", "before") and not reports:
                reports.append(None)
                reports[0] = world.sweep()

        report = world.sweep(moment)
        assert (reports[0].removed, world.held()) == (1, {"a": b"1"})
        assert not report.failed

    def test_failures_are_reported(self, world, handles):
        """One that cannot be deleted does not keep the others."""
        handles.add("a", b"1")
        world.looking.transact(Delete("jobs/a/locks"))
        for _ in range(2):
            world.storage.write("orphan", b"333", world.folder())
        failures = iter([True, False, True])

        def moment(method, when, arguments=()):
            if (method, when) == ("discard", "before") and next(failures):
                raise StateStorageError("the disk is away")

        report = world.sweep(moment)
        assert report.removed == 1
        assert len(report.failed) == 2
        assert "jobs/a" in report.failed
        assert world.clean() == {}

    def test_bad_input(self, world, handles):
        """A grace below 0, a generation of a newer format, or one that is none: named errors, and nothing is removed."""
        with pytest.raises(RecoveryMisused, match="grace"):
            sweep(world.looking, world.storage, [ROOT], -1)
        handles.add("a", b"1")
        for value, error in (
            (b'{"format": 2}', StoreUnsupported),
            (b"?", StateCorrupt),
            (b'{"format": 1}', StateCorrupt),
        ):
            entry = world.looking.read(GENERATION)
            world.looking.transact(Replace(GENERATION, value, entry.version))
            with pytest.raises(error, match=GENERATION):
                sweep(world.looking, world.storage, [ROOT], 0, lambda: LATE)
            with pytest.raises(error, match=GENERATION):
                handles.add("b", b"1")
        assert len(world.files()) == 1


def test_threads(world):
    """Eight threads of two sessions that add, replace, lock, read and remove, beside a sweeper: all are whole, nothing is left."""
    instances, errors = [world.handles(), world.handles()], []
    over = threading.Event()

    def work(number):
        handles = instances[number % 2]
        try:
            for turn in range(40):
                name = f"n{(number + turn) % 3}"
                try:
                    handles.add(name, b"x" * turn)
                    handles.replace(name, 0, b"y" * turn)
                    handles.get(name, lock=True)
                    handles.release(name)
                    handles.get_all()
                    handles.remove(name)
                except (HandleExists, HandleMissing, HandleLocked, StoreConflict):
                    handles.release(name)
        except BaseException as error:
            errors.append(error)

    def sweeping():
        try:
            while not over.wait(0.02):
                assert not world.sweep().failed
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    sweeper = threading.Thread(target=sweeping)
    for thread in (*threads, sweeper):
        thread.start()
    for thread in threads:
        thread.join(60)
    over.set()
    sweeper.join(60)
    assert not any(thread.is_alive() for thread in (*threads, sweeper))
    assert not errors, errors
    for instance in instances:
        instance.release_all()
    world.clean()
    instances[0].clear()
    assert world.clean() == {}
    assert world.files() == []
