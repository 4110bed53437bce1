"""Tests of the contract of state handles, for any store. A module that imports them defines the fixture `world`."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import threading

import pytest

from stagecrew.errors import (
    ConfigurationError,
    HandleError,
    LeadershipLost,
    PossiblyInconsistentError,
    SessionLost,
    StateCorrupt,
    StateStorageError,
    StoreConflict,
    StoreRefused,
    StoreUnavailable,
    StoreUnsupported,
)
from stagecrew.recovery.state.generation import GENERATION
from stagecrew.recovery.state.handles import HandleExists, HandleMissing, StateHandleStore
from stagecrew.recovery.state.sweep import SweepReport, sweep
from stagecrew.recovery.stores.contract import Check, Create, Delete, Replace, encode_segment
from support.handle_faults import FAR_FUTURE, ROOT

#: Errors after which a write was certainly not applied, and errors after which the outcome is unknown.
DEFINITE = [
    StoreUnavailable("unavailable"),
    SessionLost("expired"),
    StoreRefused("refused"),
    LeadershipLost("another leads"),
]
UNKNOWN = [PossiblyInconsistentError("lost"), RuntimeError("a bug of the client"), KeyboardInterrupt()]


@pytest.fixture
def handles(world):
    return world.handles()


def state_path(world, name):
    """Returns the path of a state's file."""
    return (
        pathlib.Path(world.storage._folder)
        / json.loads(world.observer.read(f"{ROOT}/{encode_segment(name)}").value)["name"]
    )


def failing(world, error, when="before", method="transact"):
    """Returns handles that are warmed up by an earlier write, and a function that makes the next call of `method` fail.

    The error is raised before or after the call takes effect (`when`).
    """
    armed = []

    def on_step(called, at_, arguments=()):
        if armed and (called, at_) == (method, when):
            armed.clear()
            raise error

    handles = world.handles(on_step)
    handles.add("warm", b"")
    handles.remove("warm")
    return handles, lambda: armed.append(1)


class TestAdd:
    def test_added_states_are_read(self, world, handles):
        """A state can be read after it was added under any name, and has version 0. Nothing else is stored."""
        odd = ["a", "a/b", "..", "Straße 7", "locks", "x" * 300]
        for name in odd:
            handles.add(name, name.encode())
        assert handles.names() == sorted(odd)
        assert {name: handles.get(name).data for name in odd} == {name: name.encode() for name in odd}
        assert {handles.get(name).version for name in odd} == {0}
        assert world.assert_clean() == {name: name.encode() for name in odd}

    def test_entries_in_store_and_storage(self, world, handles):
        """The store contains a small reference. The state is in the storage, in the folder of this store and root."""
        handles.add("nightly", b"state" * 1000, lock=True)
        value = json.loads(world.observer.read("jobs/nightly").value)
        assert value["format"] == 1
        assert value["length"] == 5000
        assert value["name"].startswith(f"{world.folder()}/nightly-")
        assert world.observer.children("jobs/nightly/locks") == [handles._store.session]
        assert len(world.observer.read("jobs/nightly").value) < 400
        assert world.files() == [value["name"]]

    def test_existing_name(self, world, handles):
        """Adding a name that exists raises HandleExists, changes nothing, and leaves no new state."""
        handles.add("a", b"1")
        with pytest.raises(HandleExists, match="'a'"):
            world.handles().add("a", b"2")
        assert len(world.files()) == 1
        assert world.assert_clean() == {"a": b"1"}

    def test_entries_of_writers(self, world, handles):
        """A session has one entry as a writer, not one per root or handle, and no entry after it has ended."""
        for number in range(20):
            StateHandleStore(handles._store, world.storage, f"root-{number}").add("a", b"1")
            handles.add(f"{number}", b"1")
            handles.remove(f"{number}")
        assert len(world.observer.children("sweep/writers")) == 1
        world.expire(handles._store.session)
        assert world.observer.children("sweep/writers") == []

    def test_anything_but_bytes_is_refused(self, handles):
        """A state that is not bytes, an empty name and an invalid root raise ConfigurationError."""
        for wrong in (5, "text", None):
            with pytest.raises(ConfigurationError, match="bytes"):
                handles.add("a", wrong)
        with pytest.raises(ConfigurationError):
            handles.add("", b"")
        with pytest.raises(ConfigurationError):
            StateHandleStore(handles._store, handles._storage, "no//key")

    @pytest.mark.parametrize("error", DEFINITE, ids=lambda error: type(error).__name__)
    def test_definitely_not_done(self, world, error):
        """If a write was certainly not applied, the new state is discarded. Adding again succeeds."""
        handles, arm = failing(world, error)
        arm()
        with pytest.raises(type(error)):
            handles.add("a", b"1")
        assert world.files() == []
        handles.add("a", b"2")
        assert world.assert_clean() == {"a": b"2"}

    @pytest.mark.parametrize("when", ["before", "after"])
    @pytest.mark.parametrize("error", UNKNOWN, ids=lambda error: type(error).__name__)
    def test_unknown_outcome(self, world, error, when):
        """After an unknown outcome, nothing is discarded. A sweep removes the new state if it was not added."""
        handles, arm = failing(world, error, when)
        arm()
        with pytest.raises(type(error)):
            handles.add("a", b"1")
        assert len(world.files()) == 1
        assert world.assert_clean() == ({"a": b"1"} if when == "after" else {})

    @pytest.mark.parametrize("when", ["before", "after"])
    def test_repeating_a_prepared_state(self, world, when):
        """Adding the same prepared state again returns what the first call would have returned."""
        handles, arm = failing(world, PossiblyInconsistentError("lost"), when)
        state = handles.prepare(b"1")
        arm()
        with pytest.raises(PossiblyInconsistentError):
            handles.add("a", state)
        handles.add("a", state)
        handles.add("a", state)
        assert len(world.files()) == 1
        assert world.assert_clean() == {"a": b"1"}
        with pytest.raises(ConfigurationError, match="prepare another one"):
            handles.add("b", state)
        with pytest.raises(HandleExists):
            handles.add("a", b"1")

    @pytest.mark.parametrize("error", DEFINITE[:-1], ids=lambda error: type(error).__name__)
    def test_a_failed_repetition_does_not_settle_the_first_write(self, world, error):
        """After an unknown outcome, the state is kept even if the repeated write certainly failed."""
        handles, arm = failing(world, PossiblyInconsistentError("lost"), "after")
        state = handles.prepare(b"1")
        arm()
        with pytest.raises(PossiblyInconsistentError):
            handles.add("a", state)
        handles._store._on_step = lambda method, when, arguments=(): (
            (_ for _ in ()).throw(error) if method == "transact" else None
        )
        with pytest.raises(type(error)):
            handles.add("a", state)
        assert world.assert_clean() == {"a": b"1"}

    def test_repeated_after_a_removal(self, world):
        """Repeating an add that was applied does not restore the handle if it was removed since then."""
        handles, arm = failing(world, PossiblyInconsistentError("lost"), "after")
        state = handles.prepare(b"1")
        arm()
        with pytest.raises(PossiblyInconsistentError):
            handles.add("a", state)
        world.handles().remove("a")
        handles.add("a", state)
        assert handles.names() == []
        assert world.assert_clean() == {}

    @pytest.mark.parametrize("when", ["before", "after"])
    def test_repeated_in_a_new_session(self, world, when):
        """A prepared state can be added again after the session of the first attempt has ended."""
        handles, arm = failing(world, PossiblyInconsistentError("lost"), when)
        state = handles.prepare(b"1")
        arm()
        with pytest.raises(PossiblyInconsistentError):
            handles.add("a", state)
        world.expire(handles._store.session)
        world.handles().add("a", state)
        assert world.assert_clean() == {"a": b"1"}

    def test_additional_operations(self, world, handles):
        """Additional operations are part of the transaction of an add.

        If one of them conflicts, nothing is written, and the error has its index.
        """
        world.observer.ensure("other")
        handles.add("a", b"1", also=[Create("other/a", b"x"), Check("other", 0)])
        assert world.observer.read("other/a").value == b"x"
        with pytest.raises(StoreConflict) as caught:
            handles.add("b", b"1", also=[Create("other/b"), Create("other/a")])
        assert (caught.value.index, caught.value.why) == (1, "exists")
        assert world.observer.read("other/b") is None
        assert len(world.files()) == 1
        assert world.assert_clean() == {"a": b"1"}

    def test_add_to_a_marked_handle(self, world, handles):
        """Adding a handle that is marked for removal first finishes the removal."""
        handles.add("a", b"old")
        world.observer.transact(Delete("jobs/a/locks"))
        handles.add("a", b"new")
        assert len(world.files()) == 1
        assert world.assert_clean() == {"a": b"new"}

    def test_add_to_a_marked_handle_that_cannot_be_deleted(self, world):
        """An `add` that cannot finish the removal of a marked handle raises, and leaves no new state."""
        handles, arm = failing(world, StateStorageError("the disk is unavailable"), method="discard")
        handles.add("a", b"old")
        world.observer.transact(Delete("jobs/a/locks"))
        arm()
        with pytest.raises(StateStorageError):
            handles.add("a", b"new")
        assert len(world.files()) == 1
        assert handles.names() == []
        handles.add("a", b"new")
        assert world.assert_clean() == {"a": b"new"}

    def test_the_storage_fails(self, world):
        """If the storage fails, nothing is in the store, and the next add succeeds."""
        handles, arm = failing(world, StateStorageError("full"), "half", "write")
        arm()
        with pytest.raises(StateStorageError):
            handles.add("a", b"1234")
        assert handles.names() == []
        handles.add("a", b"1")
        assert world.assert_clean() == {"a": b"1"}

    def test_a_discard_that_fails_does_not_hide_the_error(self, world, handles):
        """If the discard also fails, the error of the add is raised, with a note on the state that a sweep removes."""
        handles.add("a", b"1")
        other, arm = failing(world, StateStorageError("the disk is unavailable"), method="discard")
        arm()
        with pytest.raises(HandleExists) as caught:
            other.add("a", b"2")
        assert any("a sweep will delete it" in note for note in caught.value.__notes__)
        assert len(world.files()) == 2
        assert world.assert_clean() == {"a": b"1"}

    def test_swept_during_the_write(self, world):
        """If a sweep runs during an add, the state is written again. A writer that never succeeds raises an error."""
        sweeps = []

        def on_step(method, when, arguments=()):
            if (method, when) == ("write", "after") and len(sweeps) < limit:
                sweeps.append(world.sweep())

        limit = 3
        world.handles(on_step).add("a", b"1")
        assert [report.removed for report in sweeps] == [1, 1, 1]
        limit = 1000
        with pytest.raises(StoreUnavailable, match="sweeps or removals"):
            world.handles(on_step).add("b", b"1")
        assert world.assert_clean() == {"a": b"1"}


class TestReplace:
    def test_compare_and_set(self, world, handles):
        """`replace` removes the old state. With a wrong version, it changes nothing and leaves no new state."""
        handles.add("a", b"0")
        assert handles.replace("a", 0, b"1") == 1
        assert handles.replace("a", 1, b"2") == 2
        assert len(world.files()) == 1
        with pytest.raises(StoreConflict, match="version 1") as caught:
            world.handles().replace("a", 1, b"3")
        assert (caught.value.index, caught.value.why) == (-1, "version")
        assert handles.get("a").version == 2
        assert len(world.files()) == 1
        assert world.assert_clean() == {"a": b"2"}

    def test_missing_or_marked(self, world, handles):
        """Replacing a missing handle, or one marked for removal, raises HandleMissing and leaves no new state."""
        with pytest.raises(HandleMissing):
            handles.replace("a", 0, b"1")
        handles.add("a", b"0")
        world.observer.transact(Delete("jobs/a/locks"))
        with pytest.raises(HandleMissing):
            handles.replace("a", 0, b"1")
        assert len(world.files()) == 1
        assert world.assert_clean() == {}

    @pytest.mark.parametrize("error", DEFINITE, ids=lambda error: type(error).__name__)
    def test_definitely_not_done(self, world, error):
        """If a write was certainly not applied, the old state stays and the new state is discarded."""
        handles, arm = failing(world, error)
        handles.add("a", b"0")
        arm()
        with pytest.raises(type(error)):
            handles.replace("a", 0, b"1")
        assert len(world.files()) == 1
        assert handles.get("a").data == b"0"

    @pytest.mark.parametrize("when", ["before", "after"])
    @pytest.mark.parametrize("error", UNKNOWN, ids=lambda error: type(error).__name__)
    def test_unknown_outcome(self, world, error, when):
        """After an unknown outcome, the old and the new state both stay until a sweep."""
        handles, arm = failing(world, error, when)
        handles.add("a", b"0")
        arm()
        with pytest.raises(type(error)):
            handles.replace("a", 0, b"1")
        assert len(world.files()) == 2
        assert world.assert_clean() == {"a": b"1" if when == "after" else b"0"}

    @pytest.mark.parametrize("when", ["before", "after"])
    def test_repeating_a_prepared_state(self, world, when):
        """Replacing with the same prepared state again writes it once, and discards the old state."""
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
        assert world.assert_clean() == {"a": b"2"}

    def test_additional_operations(self, world, handles):
        """Additional operations are part of the transaction of a replace."""
        handles.add("a", b"0")
        with pytest.raises(StoreConflict) as caught:
            handles.replace("a", 0, b"1", also=[Check("nowhere")])
        assert (caught.value.index, caught.value.why) == (0, "missing")
        assert handles.get("a").data == b"0"
        handles.replace("a", 0, b"1", also=[Create("somewhere")])
        assert world.observer.read("somewhere")
        assert world.assert_clean() == {"a": b"1"}

    def test_the_old_state_cannot_be_discarded(self, world, caplog):
        """If the old state cannot be discarded, the handle is still replaced. A sweep removes the old state."""
        handles, arm = failing(world, StateStorageError("the disk is unavailable"), method="discard")
        handles.add("a", b"0")
        arm()
        assert handles.replace("a", 0, b"1") == 1
        assert "a sweep will delete it" in caplog.text
        assert len(world.files()) == 2
        assert world.assert_clean() == {"a": b"1"}

    def test_a_corrupt_handle_can_be_replaced(self, world, handles):
        """A handle whose entry is corrupt can be replaced."""
        handles.add("a", b"0")
        world.observer.transact(Replace("jobs/a", b"rubbish", 0))
        assert handles.replace("a", 1, b"1") == 2
        assert world.assert_clean() == {"a": b"1"}


class TestGet:
    def test_missing(self, handles):
        """`get` and `lock` of a missing handle raise HandleMissing. `release` and `clear` do nothing."""
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
        """A handle that is marked for removal counts as missing."""
        handles.add("a", b"1")
        handles.add("b", b"2")
        assert handles.exists("a")
        world.observer.transact(Delete("jobs/a/locks"))
        assert not handles.exists("a")
        with pytest.raises(HandleMissing):
            handles.get("a")
        with pytest.raises(HandleMissing):
            handles.lock("a")
        assert handles.names() == ["b"]
        assert [handle.name for handle in handles.get_all(lock=True)[0]] == ["b"]

    def test_all(self, handles):
        """`get_all` returns the handles in the order of their names."""
        for name in ("c", "a", "b"):
            handles.add(name, name.encode())
        found, unreadable = handles.get_all()
        assert [(handle.name, handle.data) for handle in found] == [("a", b"a"), ("b", b"b"), ("c", b"c")]
        assert unreadable == {}

    def test_unreadable_handles_do_not_affect_others(self, world, handles):
        """`get_all` returns an error for each handle whose state or entry is corrupt, missing or of a newer format.

        It returns all other handles. A sweep deletes nothing of the unreadable handles.
        """
        for name in ("corrupt", "entry", "fine", "longer", "missing", "newer", "truncated", "typed", "outside"):
            handles.add(name, b"state of " + name.encode())
        path = {name: state_path(world, name) for name in handles.names()}
        path["corrupt"].write_bytes(b"STATE of corrupt")
        path["longer"].write_bytes(b"state of longer than it was")
        path["truncated"].write_bytes(b"state")
        path["missing"].unlink()
        value = json.loads(world.observer.read("jobs/fine").value)
        world.observer.transact(
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
            assert world.observer.children(f"jobs/{name}/locks") == []
        report = world.sweep()
        assert set(report.failed) == {"jobs/entry", "jobs/newer", "jobs/typed"}
        assert report.removed == 0
        assert world.files() == before
        for name in unreadable:
            assert handles.remove(name)
        assert world.assert_clean() == {"fine": b"state of fine"}

    def test_the_store_fails(self, world):
        """If the store fails, `get` and `get_all` raise the error, and keep no lock."""
        handles, arm = failing(world, StoreUnavailable("unavailable"), method="read")
        handles.add("a", b"1")
        for ask in (lambda: handles.get("a", lock=True), lambda: handles.get_all(lock=True)):
            arm()
            with pytest.raises(StoreUnavailable):
                ask()
            assert world.observer.children("jobs/a/locks") == []

    def test_replaced_during_a_read(self, world, handles):
        """If a handle is replaced during a `get`, the new state is read. If it is removed, HandleMissing is raised."""
        handles.add("a", b"0")
        done = []

        def on_step(method, when, arguments=()):
            if (method, when) == ("read", "after") and len(done) == 3:
                handles.replace("a", 0, b"1")
            if method == "read":
                done.append(when)

        assert world.handles(on_step).get("a").data == b"1"
        done.clear()

        def removing(method, when, arguments=()):
            if (method, when) == ("read", "after") and len(done) == 3:
                handles.remove("a")
            if method == "read":
                done.append(when)

        with pytest.raises(HandleMissing):
            world.handles(removing).get("a")

    def test_replaced_during_each_read(self, world, handles):
        """A reader gives up with an error if the handle is replaced during each of its reads."""
        handles.add("a", b"0")

        def on_step(method, when, arguments=()):
            if (method, when) == ("read", "before"):
                handles.replace("a", handles.get("a").version, b"x")

        with pytest.raises(StateStorageError, match="replaced 20 times"):
            world.handles(on_step).get("a")


class TestLock:
    def test_a_lock_prevents_removal(self, world, handles):
        """A handle that another session has locked cannot be removed. `remove` releases its own session's lock."""
        handles.add("a", b"1", lock=True)
        other = world.handles()
        assert other.get("a", lock=True).data == b"1"
        with pytest.raises(HandleError, match=other._store.session):
            handles.remove("a", also=[Create("done")])
        assert world.observer.read("done") is None
        assert handles.get("a").data == b"1"
        assert other.remove("a", also=[Create("done")])
        assert world.observer.read("done")
        assert world.assert_clean() == {}

    def test_one_lock_per_session(self, world, handles):
        """A second `lock` of the same session has no effect, and neither has a second `release`."""
        handles.add("a", b"1")
        assert handles.lock("a")
        assert not handles.lock("a")
        assert not handles.get_all(lock=True)[1]
        handles.release("a")
        handles.release("a")
        assert world.handles().remove("a")

    def test_an_earlier_lock_stays_when_a_get_fails(self, world, handles):
        """A `get` that fails releases only a lock that it acquired itself."""
        handles.add("a", b"1", lock=True)
        state_path(world, "a").unlink()
        for ask in (lambda: handles.get("a", lock=True), handles.get_all):
            with contextlib.suppress(StateStorageError):
                ask()
        assert world.observer.children("jobs/a/locks") == [handles._store.session]
        with pytest.raises(StateStorageError):
            world.handles().get("a", lock=True)
        assert world.observer.children("jobs/a/locks") == [handles._store.session]

    def test_a_lock_ends_with_its_session(self, world, handles):
        """When the session that holds a lock has expired, another session can remove the handle."""
        handles.add("a", b"1", lock=True)
        other = world.handles()
        with pytest.raises(HandleError):
            other.remove("a")
        world.expire(handles._store.session)
        assert other.remove("a")
        assert world.assert_clean() == {}

    def test_release_all(self, world):
        """If one release fails, all other locks are still released, and the error is then raised."""
        handles, arm = failing(world, StoreUnavailable("unavailable"))
        for name in ("a", "b", "c"):
            handles.add(name, b"1", lock=True)
        arm()
        with pytest.raises(StoreUnavailable):
            handles.release_all()
        assert [len(world.observer.children(f"jobs/{name}/locks")) for name in ("a", "b", "c")] == [1, 0, 0]
        handles.release_all()
        assert world.handles().remove("a")

    def test_a_lock_does_not_prevent_replacing(self, world, handles):
        """A handle that another session has locked can be replaced. A lock prevents only removal."""
        handles.add("a", b"0", lock=True)
        assert world.handles().replace("a", 0, b"1") == 1


class TestRemove:
    def test_removal_is_complete(self, world, handles):
        """`remove` removes the state, the reference and the locks. A second call does nothing and returns False."""
        handles.add("a", b"1", lock=True)
        assert handles.remove("a")
        assert world.files() == []
        assert world.observer.children(ROOT) == []
        assert not handles.remove("a")
        assert not handles.remove("never")
        handles.add("a", b"2")
        assert world.assert_clean() == {"a": b"2"}

    def test_the_discard_fails(self, world):
        """If the state cannot be discarded, `remove` raises and the handle stays marked. A second call removes it."""
        handles, arm = failing(world, StateStorageError("the disk is unavailable"), method="discard")
        handles.add("a", b"1")
        arm()
        with pytest.raises(StateStorageError):
            handles.remove("a", also=[Create("done")])
        assert world.observer.read("done")
        assert len(world.files()) == 1
        assert not handles.exists("a")
        assert not handles.remove("a", also=[Create("done")])
        assert world.assert_clean() == {}

    def test_additional_operations_with_a_conflict(self, world, handles):
        """If an additional operation conflicts, nothing is removed."""
        handles.add("a", b"1")
        with pytest.raises(StoreConflict) as caught:
            handles.remove("a", also=[Create("x"), Check("nowhere")])
        assert (caught.value.index, caught.value.why) == (1, "missing")
        assert world.observer.read("x") is None
        assert world.assert_clean() == {"a": b"1"}

    def test_an_unreadable_entry(self, world, handles):
        """`remove` removes the reference of an unreadable handle. A sweep removes its state."""
        handles.add("a", b"1")
        world.observer.transact(Replace("jobs/a", b"rubbish", 0))
        assert handles.remove("a")
        assert len(world.files()) == 1
        assert world.assert_clean() == {}

    def test_clear(self, world):
        """`clear` removes all references, without using the storage, except of handles that another session has locked.

        A sweep removes the states.
        """
        handles, arm = failing(world, StateStorageError("the disk is unavailable"), method="discard")
        for name in ("a", "b", "c"):
            handles.add(name, b"1", lock=True)
        world.observer.transact(
            Delete("jobs/c/locks/" + encode_segment(handles._store.session)), Delete("jobs/c/locks")
        )
        other = world.handles()
        other.lock("b")
        arm()
        with pytest.raises(HandleError, match="'b'"):
            handles.clear()
        assert handles.names() == ["b"]
        other.release_all()
        handles.clear()
        assert world.observer.children(ROOT) == []
        assert len(world.files()) == 3
        assert world.assert_clean() == {}


class TestSweep:
    def test_referenced_states_stay(self, world, handles):
        """A sweep removes only states without a reference that belong to the given roots and exceed the grace period.

        It also finishes removals that stopped halfway.
        """
        other = world.handles(root="results")
        handles.add("a", b"1")
        other.add("r", b"22")
        folder, results = world.folder(), world.folder("results")
        world.storage.write("orphan", b"333", folder)
        world.storage.write("orphan", b"333", results)
        world.storage.write("another store's", b"333", "another/jobs")
        handles.add("half", b"4444")
        world.observer.transact(Delete("jobs/half/locks"))
        young = sweep(world.observer, world.storage, [ROOT], 3600)
        assert (young.kept, young.removed, young.bytes) == (2, 0, 0)
        assert world.sweep() == SweepReport(kept=1, removed=1, bytes=3)
        assert world.sweep() == SweepReport(kept=1)
        assert len(world.files()) == 4
        assert world.sweep(roots=[ROOT, "results", "results", "never"]) == SweepReport(kept=2, removed=1, bytes=3)
        assert world.readable_data() == {"a": b"1"}
        assert world.readable_data("results") == {"r": b"22"}

    def test_ages_use_the_clock_of_the_storage(self, world, handles):
        """A sweep determines the ages of states with the storage's own clock."""
        handles.add("a", b"1")
        reference = world.storage.write("orphan", b"333", world.folder())
        path = pathlib.Path(world.storage._folder) / reference.name
        os.utime(path, (path.stat().st_mtime - 500,) * 2)
        assert sweep(world.observer, world.storage, [ROOT], 600).removed == 0
        assert sweep(world.observer, world.storage, [ROOT], 400).removed == 1
        assert len(world.files()) == 1

    def test_nothing_to_remove(self, world, handles):
        """A sweep that has nothing to remove does not advance the generation."""
        handles.add("a", b"1")
        before = world.observer.read(GENERATION)
        world.sweep()
        assert world.observer.read(GENERATION) == before

    def test_two_concurrent_sweeps(self, world, handles):
        """Of two sweeps that run at the same time, both succeed."""
        handles.add("a", b"1")
        world.storage.write("orphan", b"333", world.folder())
        reports = []

        def on_step(method, when, arguments=()):
            if (method, when) == ("transact", "before") and not reports:
                reports.append(None)
                reports[0] = world.sweep()

        report = world.sweep(on_step)
        assert (reports[0].removed, world.readable_data()) == (1, {"a": b"1"})
        assert not report.failed

    def test_failures_are_reported(self, world, handles):
        """If a state cannot be deleted, the sweep reports the failure and deletes the other states."""
        handles.add("a", b"1")
        world.observer.transact(Delete("jobs/a/locks"))
        for _ in range(2):
            world.storage.write("orphan", b"333", world.folder())
        failures = iter([True, False, True])

        def on_step(method, when, arguments=()):
            if (method, when) == ("discard", "before") and next(failures):
                raise StateStorageError("the disk is unavailable")

        report = world.sweep(on_step)
        assert report.removed == 1
        assert len(report.failed) == 2
        assert "jobs/a" in report.failed
        assert world.assert_clean() == {}

    def test_bad_input(self, world, handles):
        """A negative grace period, and a generation that is invalid or of a newer format, raise errors that name them.

        Nothing is removed.
        """
        with pytest.raises(ConfigurationError, match="grace"):
            sweep(world.observer, world.storage, [ROOT], -1)
        handles.add("a", b"1")
        for value, error in (
            (b'{"format": 2}', StoreUnsupported),
            (b"?", StateCorrupt),
            (b'{"format": 1}', StateCorrupt),
        ):
            entry = world.observer.read(GENERATION)
            world.observer.transact(Replace(GENERATION, value, entry.version))
            with pytest.raises(error, match=GENERATION):
                sweep(world.observer, world.storage, [ROOT], 0, lambda: FAR_FUTURE)
            with pytest.raises(error, match=GENERATION):
                handles.add("b", b"1")
        assert len(world.files()) == 1


def test_many_threads(world):
    """Eight threads with two sessions add, replace, lock, read and remove handles while another thread sweeps.

    No operation finds an incomplete state, and no state is left at the end.
    """
    instances, errors = [world.handles(), world.handles()], []
    done = threading.Event()

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
                except (HandleExists, HandleMissing, HandleError, StoreConflict):
                    handles.release(name)
        except BaseException as error:
            errors.append(error)

    def sweeping():
        try:
            while not done.wait(0.02):
                assert not world.sweep().failed
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    sweeper = threading.Thread(target=sweeping)
    for thread in (*threads, sweeper):
        thread.start()
    for thread in threads:
        thread.join(60)
    done.set()
    sweeper.join(60)
    assert not any(thread.is_alive() for thread in (*threads, sweeper))
    assert not errors, errors
    for instance in instances:
        instance.release_all()
    world.assert_clean()
    instances[0].clear()
    assert world.assert_clean() == {}
    assert world.files() == []
