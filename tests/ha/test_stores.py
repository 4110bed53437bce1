"""SQLite, ZooKeeper, and the model that other tests use fulfil the contract of a coordination store."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import threading
import uuid

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from stagecrew.errors import ConfigurationError, PossiblyInconsistentError, SessionLost, StoreConflict, StoreRefused
from stagecrew.recovery.stores import open_store
from stagecrew.recovery.stores.contract import (
    MAX_VALUE_BYTES,
    Check,
    Create,
    Delete,
    Entry,
    Replace,
    checked_key,
    decode_segment,
    encode_segment,
)
from support.model_store import ModelServer
from support.store_process import StoreProcess
from support.waiting import eventually

KINDS = ["sqlite", "zookeeper"]


class Backend:
    """Opens sessions at one store."""

    def __init__(self, url, server=None):
        self.url, self._server, self._opened = url, server, []

    def open(self):
        store = self._server.session() if self._server else open_store(self.url)
        self._opened.append(store)
        return store

    def fresh(self):
        """Returns a new session, and the key of a new entry without children."""
        store, root = self.open(), f"t{uuid.uuid4().hex}"
        store.ensure(root)
        return store, root

    def close(self):
        for store in self._opened:
            store.close()


def open_backend(kind, request):
    if kind == "model":
        return Backend(None, ModelServer())
    if kind == "sqlite":
        return Backend(f"sqlite://{request.getfixturevalue('tmp_path_factory').mktemp('store')}/crew.db")
    return Backend(f"zookeeper://{request.getfixturevalue('zookeeper').hosts}/test/{uuid.uuid4().hex}?timeout=4")


@pytest.fixture(params=["model", *KINDS])
def backend(request):
    backend_of_kind = open_backend(request.param, request)
    yield backend_of_kind
    backend_of_kind.close()


@pytest.fixture(params=KINDS)
def process_backend(request):
    """A backend that several processes can use."""
    backend_of_kind = open_backend(request.param, request)
    yield backend_of_kind
    backend_of_kind.close()


def conflict(store, *operations):
    """Returns the index of the operation at which a transaction fails with a conflict, and the reason."""
    with pytest.raises(StoreConflict) as raised:
        store.transact(*operations)
    return raised.value.index, raised.value.why


# -- One session


def test_entries_are_created_read_replaced_and_deleted(backend):
    store, root = backend.fresh()
    key = f"{root}/a"
    assert store.read(key) is None
    assert store.children(key) == []
    assert store.transact(Create(key, b"one")) == [0]
    assert store.read(key) == Entry(b"one", 0)
    assert store.transact(Replace(key, b"two", 0)) == [1]
    assert store.transact(Replace(key, b"three", 1)) == [2]
    assert store.read(key) == Entry(b"three", 2)
    assert store.transact(Check(key), Check(key, 2)) == [2, 2]
    assert store.children(root) == ["a"]
    assert store.transact(Delete(key, 2)) == [None]
    assert store.read(key) is None
    assert store.children(root) == []
    assert store.transact(Create(key)) == [0], "a deleted key is free again, and its versions start at 0"
    assert store.read(key) == Entry(b"", 0)


def test_a_transaction_sees_its_earlier_operations(backend):
    store, root = backend.fresh()
    a, b = f"{root}/a", f"{root}/a/b"
    assert store.transact(
        Create(a, b"1"), Create(b), Replace(a, b"2", 0), Check(a), Check(b, 0), Delete(b), Replace(a, b"3", 1), Check(a, 2)
    ) == [0, 0, 1, 1, 0, None, 2, 2]  # fmt: skip
    assert store.read(a) == Entry(b"3", 2)
    assert store.transact(Delete(a), Create(a, b"new"), Check(a)) == [None, 0, 0]
    assert conflict(store, Delete(a), Check(a)) == (1, "missing")
    assert conflict(store, Delete(a), Replace(a, b"", 0)) == (1, "missing")
    assert store.transact() == []


CONFLICTS = {
    "create an existing key": (lambda r: [Create(f"{r}/a")], "exists"),
    "create without a parent": (lambda r: [Create(f"{r}/none/b")], "no parent"),
    "create below an ephemeral entry": (lambda r: [Create(f"{r}/ephemeral/b")], "no parent"),
    "replace a missing key": (lambda r: [Replace(f"{r}/none", b"", 0)], "missing"),
    "replace another version": (lambda r: [Replace(f"{r}/a", b"", 0)], "version"),
    "replace a later version": (lambda r: [Replace(f"{r}/a", b"", 2)], "version"),
    "delete a missing key": (lambda r: [Delete(f"{r}/none")], "missing"),
    "delete a version of a missing key": (lambda r: [Delete(f"{r}/none", 0)], "missing"),
    "delete another version": (lambda r: [Delete(f"{r}/a", 3)], "version"),
    "delete with children": (lambda r: [Delete(f"{r}/a", 1)], "not empty"),
    "delete with a child of this transaction": (lambda r: [Create(f"{r}/b/c"), Delete(f"{r}/b")], "not empty"),
    "check a missing key": (lambda r: [Check(f"{r}/none")], "missing"),
    "check a version of a missing key": (lambda r: [Check(f"{r}/none", 0)], "missing"),
    "check another version": (lambda r: [Check(f"{r}/a", 0)], "version"),
    "create the same key twice": (lambda r: [Create(f"{r}/new"), Create(f"{r}/new")], "exists"),
    "check a version replaced before": (lambda r: [Replace(f"{r}/a", b"", 1), Check(f"{r}/a", 1)], "version"),
}


def test_a_conflict_names_its_operation_and_reason_and_changes_nothing(backend):
    store, root = backend.fresh()
    a = f"{root}/a"
    store.transact(Create(a, b"0"), Replace(a, b"1", 0), Create(f"{a}/child"), Create(f"{root}/b"))
    store.transact(Create(f"{root}/ephemeral", ephemeral=True), Create(f"{root}/done", b"before"))

    def contents():
        return [(key, store.read(f"{root}/{key}"), store.children(f"{root}/{key}")) for key in store.children(root)]

    contents_before = contents()
    for name, (operations, why) in CONFLICTS.items():
        requested = operations(root)
        assert conflict(store, *requested) == (len(requested) - 1, why), name
        earlier_operations = [
            Replace(f"{root}/done", b"after", 0),
            Create(f"{root}/x"),
            Delete(f"{a}/child"),
            Create(f"{a}/child2"),
        ]
        assert conflict(store, *earlier_operations, *requested, Create(f"{root}/y")) == (
            len(earlier_operations) + len(requested) - 1,
            why,
        ), name
        assert contents() == contents_before, name


def test_ensure_creates_missing_entries_and_their_parents(backend):
    store, root = backend.fresh()
    store.transact(Create(f"{root}/a", b"kept"))
    store.ensure(f"{root}/a/b/c", f"{root}/d", f"{root}/a")
    store.ensure(f"{root}/a/b/c")
    assert store.read(f"{root}/a") == Entry(b"kept", 0)
    assert store.read(f"{root}/a/b/c") == Entry(b"", 0)
    assert store.children(root) == ["a", "d"]
    store.transact(Create(f"{root}/e", ephemeral=True))
    with pytest.raises(StoreConflict, match="no parent|its parent does not exist or is ephemeral"):
        store.ensure(f"{root}/e/f")


def test_children_are_sorted_and_direct(backend):
    store, root = backend.fresh()
    names = ["b", "a", "a.b", "a-b", "B", "%41", "~", "_", "10", "9"]
    store.transact(
        *(Create(f"{root}/{name}") for name in names), Create(f"{root}/a/below"), Create(f"{root}/a/below/it")
    )
    assert store.children(root) == sorted(names)
    assert store.children(f"{root}/a") == ["below"]


@settings(max_examples=100)
@given(st.text(min_size=1))
def test_any_text_can_be_encoded_as_part_of_a_key(text):
    part = encode_segment(text)
    assert decode_segment(part) == text
    assert "/" not in part
    assert checked_key(f"jobs/{part}/state")


def test_unusual_keys_and_all_bytes_are_kept(backend):
    store, root = backend.fresh()
    texts = [
        "a/b",
        "..",
        ".",
        "%",
        "%2F",
        "ünï…",
        "\x00\n",
        " ",
        "zookeeper",
        "'; DROP TABLE entries",
        "x" * 200,
        "\U0001f600",
    ]
    keys = [f"{root}/{encode_segment(text)}" for text in texts]
    value = bytes(range(256))
    store.transact(*(Create(key, value) for key in keys))
    assert [store.read(key) for key in keys] == [Entry(value, 0)] * len(keys)
    assert {decode_segment(part) for part in store.children(root)} == set(texts)


def test_values_and_transactions_that_are_too_large_are_refused(backend):
    store, root = backend.fresh()
    key, largest = f"{root}/a", os.urandom(MAX_VALUE_BYTES)
    store.transact(Create(key, largest))
    assert store.read(key) == Entry(largest, 0)
    for operation in (Create(f"{root}/b", largest + b"x"), Replace(key, largest + b"x", 0)):
        with pytest.raises(StoreRefused, match="limit is 65536"):
            store.transact(operation)
    with pytest.raises(StoreRefused, match="split it"):
        store.transact(*(Create(f"{root}/{number}", largest) for number in range(12)))
    store.transact(*(Create(f"{root}/{number}", largest) for number in range(11)))
    assert len(store.children(root)) == 12


@pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", ".", "a/..", "%", "a b", "a\n", "ü", "a\x00"])
def test_an_invalid_key_is_refused(backend, key):
    store, _ = backend.fresh()
    for call in (store.read, store.children, store.ensure, lambda key: store.transact(Create(key))):
        with pytest.raises(ConfigurationError, match="is not a valid key"):
            call(key)


def test_invalid_values_and_versions_are_refused(backend):
    store, root = backend.fresh()
    with pytest.raises(ConfigurationError, match="is str: pass bytes"):
        store.transact(Create(f"{root}/a", "text"))
    for version in (-1, 1 << 31, 1.0, True):
        with pytest.raises(ConfigurationError, match="is not a version"):
            store.transact(Delete(root, version))
    with pytest.raises(ConfigurationError, match="None is not a version"):
        store.transact(Replace(root, b"", None))
    assert store.read(root) == Entry(b"", 0)


# -- Sessions


def test_closing_a_session_removes_its_ephemeral_entries(backend):
    one, root = backend.fresh()
    two = backend.open()
    assert one.session != two.session
    one.transact(Create(f"{root}/e", b"1", ephemeral=True), Create(f"{root}/stays"))
    one.transact(Replace(f"{root}/e", b"2", 0))
    two.transact(Replace(f"{root}/e", b"3", 1))
    assert two.read(f"{root}/e") == Entry(b"3", 2, one.session), (
        "the entry still belongs to the session that created it"
    )
    assert two.children(root) == ["e", "stays"]
    assert not one.suspended
    one.close()
    one.close()
    assert one.suspended
    assert two.children(root) == ["stays"]
    assert two.read(f"{root}/e") is None
    for call in (one.read, one.children, one.ensure, lambda key: one.transact(Check(key))):
        with pytest.raises(SessionLost):
            call(root)
    assert two.transact(Create(f"{root}/e", ephemeral=True)) == [0]
    assert not two.suspended


def test_another_session_can_delete_an_ephemeral_entry(backend):
    one, root = backend.fresh()
    two = backend.open()
    one.transact(Create(f"{root}/e", ephemeral=True))
    two.transact(Delete(f"{root}/e", 0), Create(f"{root}/e", b"2", ephemeral=True))
    one.close()
    assert two.read(f"{root}/e") == Entry(b"2", 0, two.session)


def test_transactions_of_several_threads_are_done_once(backend):
    store, root = backend.fresh()
    store.transact(Create(f"{root}/n"))
    counts = []

    def work(number):
        done = 0
        for turn in range(10):
            store.transact(Create(f"{root}/{number}-{turn}", ephemeral=True))
            with contextlib.suppress(StoreConflict):
                store.transact(Replace(f"{root}/n", b"", store.read(f"{root}/n").version))
                done += 1
        counts.append(done)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert store.read(f"{root}/n").version == sum(counts) > 0
    assert len(store.children(root)) == 41


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_fork_cannot_use_its_parents_session(process_backend):
    store, root = process_backend.fresh()
    store.transact(Create(f"{root}/e", ephemeral=True))
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        message = "nothing"
        try:
            store.read(root)
        except ConfigurationError as error:
            store.close()
            message = str(error)
        finally:
            os.write(writing, message.encode())
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        assert b"this is a fork" in pipe.read()
    os.waitpid(child, 0)
    assert store.read(f"{root}/e") == Entry(b"", 0, store.session)
    assert store.transact(Replace(f"{root}/e", b"1", 0)) == [1]


# -- Sessions of several processes


def test_ephemeral_entries_of_a_killed_process_are_removed(process_backend):
    """A killed process's ephemeral entries are removed immediately (SQLite) or after the session timeout (ZooKeeper)."""
    store, root = process_backend.fresh()
    with StoreProcess(process_backend.url) as other:
        other(
            "transact",
            Create(f"{root}/e", ephemeral=True),
            Create(f"{root}/f", ephemeral=True),
            Create(f"{root}/stays"),
        )
        assert store.children(root) == ["e", "f", "stays"]
        other.kill()
        if store.timeout is None:
            assert store.children(root) == ["stays"]
        eventually(lambda: store.children(root) == ["stays"], (store.timeout or 0) + 4)
        assert store.read(f"{root}/e") is None
        assert store.transact(Create(f"{root}/e", ephemeral=True)) == [0]


@pytest.mark.parametrize("call", ["read", "children", "create", "delete above", "replace"])
def test_any_call_on_sqlite_detects_a_dead_process(call, request):
    backend = open_backend("sqlite", request)
    store, root = backend.fresh()
    store.transact(Create(f"{root}/a"))
    key = f"{root}/a/e"
    with StoreProcess(backend.url) as other:
        other("transact", Create(key, ephemeral=True))
        other.kill()
        if call == "read":
            assert store.read(key) is None
        elif call == "children":
            assert store.children(f"{root}/a") == []
        elif call == "create":
            assert store.transact(Create(key)) == [0]
        elif call == "delete above":
            assert store.transact(Delete(f"{root}/a")) == [None]
        else:
            assert conflict(store, Replace(key, b"", 0)) == (0, "missing")
    backend.close()


def test_exactly_one_of_two_racing_processes_wins(process_backend):
    store, root = process_backend.fresh()
    store.transact(Create(f"{root}/n"))
    with StoreProcess(process_backend.url) as one, StoreProcess(process_backend.url) as two:
        for turn in range(20):
            for operation in (Create(f"{root}/{turn}", b"", ephemeral=True), Replace(f"{root}/n", b"", turn)):
                for process in (one, two):
                    process.send("transact", operation)
                results = []
                for process in (one, two):
                    try:
                        results.append(process.receive())
                    except StoreConflict as error:
                        results.append(error.why)
                assert sorted(map(str, results)) in (["[0]", "exists"], [f"[{turn + 1}]", "version"])
        assert store.read(f"{root}/n").version == 20


def test_a_paused_process_writes_nothing_after_its_session_has_ended(request):
    """A process that is paused until its ZooKeeper session has expired writes nothing when it continues.

    On SQLite, sessions do not expire.
    """
    backend = open_backend("zookeeper", request)
    store, root = backend.fresh()
    store.transact(Create(f"{root}/n"))
    with StoreProcess(backend.url) as other:
        other("transact", Create(f"{root}/e", ephemeral=True))
        other.kill(signal.SIGSTOP)
        eventually(lambda: store.read(f"{root}/e") is None, store.timeout + 4)
        for number in range(5):
            other.send("transact", Create(f"{root}/late-{number}"))
        other.send("transact", Create(f"{root}/late-e", ephemeral=True))
        other.kill(signal.SIGCONT)
        for _ in range(6):
            with pytest.raises((SessionLost, PossiblyInconsistentError)):
                other.receive()
        assert other("suspended")
        assert store.children(root) == ["n"]
    backend.close()


def test_a_suspended_process_on_sqlite_keeps_its_session(request):
    backend = open_backend("sqlite", request)
    store, root = backend.fresh()
    with StoreProcess(backend.url) as other:
        other("transact", Create(f"{root}/e", ephemeral=True))
        other.kill(signal.SIGSTOP)
        assert conflict(store, Create(f"{root}/e")) == (0, "exists")
        other.kill(signal.SIGCONT)
        assert other("transact", Replace(f"{root}/e", b"", 0)) == [1]
    backend.close()


# -- Random transactions of several sessions, compared with the model

NAMES = ["a", "b", "a/a", "a/b", "b/a", "a/a/a"]
keys = st.sampled_from(NAMES)
versions = st.sampled_from([None, 0, 0, 1, 2])
operations = st.one_of(
    st.builds(Create, keys, st.binary(max_size=3), st.booleans()),
    st.builds(Replace, keys, st.binary(max_size=3), st.integers(0, 2)),
    st.builds(Delete, keys, versions),
    st.builds(Check, keys, versions),
)


class ModelComparison(RuleBasedStateMachine):
    """Makes the same calls to a store and to the model, which must return the same results."""

    backend = None  # set by the test

    @initialize()
    def begin(self):
        self.root = f"m{uuid.uuid4().hex}"
        self.model = ModelServer()
        self.sessions = []
        for _ in range(2):
            self.open()
        self.sessions[0][0].ensure(self.root)
        self.sessions[0][1].ensure(self.root)

    def open(self):
        self.sessions.append((self.backend.open(), self.model.session()))

    @rule(session_number=st.integers(0, 1), requested=st.lists(operations, min_size=1, max_size=4))
    def transact(self, session_number, requested):
        rooted = [dataclasses.replace(one, key=f"{self.root}/{one.key}") for one in requested]
        outcomes = []
        for store in self.sessions[session_number]:
            try:
                outcomes.append(store.transact(*rooted))
            except StoreConflict as error:
                outcomes.append((error.index, error.why))
        assert outcomes[0] == outcomes[1]

    @rule(session_number=st.integers(0, 1))
    def close(self, session_number):
        for store in self.sessions.pop(session_number):
            store.close()
        self.open()

    @invariant()
    def both_have_the_same_entries(self):
        if not hasattr(self, "sessions"):
            return
        keys_to_compare = [self.root, *(f"{self.root}/{name}" for name in NAMES)]
        names = [
            {store.session: number for number, store in enumerate(side)} for side in zip(*self.sessions, strict=True)
        ]
        for real_store, model_store in self.sessions[:1]:
            for key in keys_to_compare:
                real_state, model_state = (
                    (
                        entry and (entry.value, entry.version, entry.session and session_numbers[entry.session]),
                        store.children(key),
                    )
                    for store, session_numbers, entry in (
                        (real_store, names[0], real_store.read(key)),
                        (model_store, names[1], model_store.read(key)),
                    )
                )
                assert real_state == model_state

    def teardown(self):
        for pair in getattr(self, "sessions", ()):
            for store in pair:
                store.close()


def check_against_model(backend, examples, steps):
    machine = type("Machine", (ModelComparison,), {"backend": backend})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples, stateful_step_count=steps, database=None, derandomize=True)
    )  # fmt: skip


def test_transactions_of_several_sessions_agree_with_the_model(process_backend):
    check_against_model(process_backend, 12, 15)


@pytest.mark.long
def test_many_transactions_of_several_sessions_agree_with_the_model(process_backend):
    check_against_model(process_backend, 100, 40)
