"""SQLite stores under faults: killed processes, full and failing disks, deleted files, and other programs' files."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import random
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from stagecrew import operating_system
from stagecrew.errors import (
    ConfigurationError,
    PossiblyInconsistentError,
    SessionLost,
    StoreConflict,
    StoreRefused,
    StoreUnavailable,
    StoreUnsupported,
)
from stagecrew.mounts import filesystem, shared
from stagecrew.recovery.leadership.election import LeaseRequestFailed
from stagecrew.recovery.leadership.lease_client import LeaseClient
from stagecrew.recovery.stores.contract import FORMAT, Check, Create, Delete, Entry, Replace
from stagecrew.recovery.stores.sqlite import SQLiteStore
from stagecrew.recovery.stores.sqlite.session_files import is_alive
from support.store_process import StoreProcess
from support.waiting import eventually


@pytest.fixture
def path(tmp_path):
    return tmp_path / "crew.db"


@pytest.fixture
def store(path):
    with contextlib.closing(SQLiteStore(path)) as store:
        yield store


def url(path):
    return f"sqlite://{path}"


def test_concurrent_sessions_create_one_store(tmp_path):
    """When several sessions open a store that does not exist yet, one creates it, and all of them use this store."""

    def open_and_close(path, barrier):
        barrier.wait(30)
        SQLiteStore(path).close()

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        for number in range(30):
            barrier = threading.Barrier(8)
            opened = [threads.submit(open_and_close, tmp_path / f"{number}.db", barrier) for _ in range(8)]
            for one in opened:
                one.result(60)


def test_files_are_private_and_a_closed_session_leaves_none(path):
    descriptors = len(os.listdir("/proc/self/fd"))
    umask_before = os.umask(0)
    try:
        store = SQLiteStore(path)
        store.ensure("a")
    finally:
        os.umask(umask_before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert all(stat.S_IMODE(one.stat().st_mode) == 0o600 for one in path.parent.iterdir() if one.is_file())
    folder = Path(f"{path}.sessions")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [file.name for file in folder.iterdir()] == [store.session]
    SQLiteStore(path).close()
    store.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert sorted(one.name for one in path.parent.iterdir()) == ["crew.db", "crew.db.sessions"]
    assert list(folder.iterdir()) == []


def test_transactions_are_on_disk_before_they_return(path):
    """Transactions are on disk before they return, in the session that created the store and in any other session."""
    with contextlib.closing(SQLiteStore(path)) as first, contextlib.closing(SQLiteStore(path)) as second:
        for store in (first, second):
            settings = [
                store._connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("synchronous", "journal_mode")
            ]
            assert settings == [2, "wal"]


def check_kills_in_transactions(path, seed, kills):
    """Checks that each transaction that returned is stored, and each interrupted one completely or not at all."""
    rng = random.Random(seed)
    with contextlib.closing(SQLiteStore(path)) as store:
        store.ensure("a", "b")
        for _ in range(kills):
            with StoreProcess(url(path)) as process:
                process("transact", Create("held", ephemeral=True))
                process.send("count", "a", "b")
                replies = rng.randrange(1, 40)
                versions = [int(process._process.stdout.readline()) for _ in range(replies)]
                time.sleep(rng.random() / 200)  # so that the kill interrupts a transaction at a random point
                process.kill()
            a, b = store.read("a"), store.read("b")
            assert a == b == Entry(b"%d" % a.version, a.version)
            assert a.version >= versions[-1]
            assert store.children("held") == []
            assert store.read("held") is None
            store.transact(
                Replace("a", b"%d" % (a.version + 1), a.version), Replace("b", b"%d" % (a.version + 1), a.version)
            )
    with contextlib.closing(sqlite3.connect(path)) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_killed_process_leaves_no_partial_transaction(path):
    check_kills_in_transactions(path, 7, 4)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_many_killed_processes_leave_no_partial_transaction(path, seed):
    check_kills_in_transactions(path, seed, 40)


def test_processes_can_open_a_new_database_at_the_same_time(path):
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(StoreProcess.start_without_waiting(url(path))) for _ in range(6)]
        sessions = [process.receive() for process in processes]
        assert len(set(sessions)) == 6
        for number, process in enumerate(processes):
            process("transact", Create(f"n{number}", ephemeral=True))
        assert all(processes[0]("read", f"n{number}").session == sessions[number] for number in range(6))


def test_opening_removes_what_dead_sessions_left(path):
    with StoreProcess(url(path)) as process:
        process("transact", Create("e", ephemeral=True))
        process.kill()
    folder = Path(f"{path}.sessions")
    (folder / "stray").touch()  # from a session that died before it was registered
    with contextlib.closing(SQLiteStore(path)) as store, contextlib.closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT name FROM sessions").fetchall() == [(store.session,)]
        assert database.execute("SELECT count(*) FROM entries").fetchone() == (0,)
        assert [file.name for file in folder.iterdir()] == [store.session]


def test_a_fork_does_not_keep_its_dead_parents_session_alive(path, tmp_path):
    """A fork made by Python releases the lock that it inherits, so the session ends when the parent dies."""
    program = """if True:
        import os, sys, time
        from stagecrew.recovery.stores.contract import Create
        from stagecrew.recovery.stores.sqlite import SQLiteStore
        store = SQLiteStore(sys.argv[1])
        store.transact(Create("e", ephemeral=True))
        if os.fork() == 0:
            print(os.getpid(), flush=True)
            time.sleep(60)
            os._exit(0)
        time.sleep(60)
    """
    with contextlib.closing(SQLiteStore(path)) as store:
        parent = subprocess.Popen([sys.executable, "-c", program, path], stdout=subprocess.PIPE)
        child = int(parent.stdout.readline())
        try:
            assert store.read("e") is not None
            parent.kill()
            parent.wait(20)
            parent.stdout.close()
            assert store.read("e") is None
            os.kill(child, 0)
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_session_whose_file_is_deleted_is_lost(path, store):
    with contextlib.closing(SQLiteStore(path)) as other:
        store.transact(Create("e", ephemeral=True))
        (Path(f"{path}.sessions") / store.session).unlink()
        assert store.suspended
        assert other.read("e") is None
        with pytest.raises(SessionLost, match="has ended"):
            store.transact(Create("late"))
        with pytest.raises(SessionLost, match="has ended"):
            store.read("late")
        assert other.read("late") is None


def test_a_session_that_was_declared_dead_writes_nothing(path, store):
    """After another session has declared this one dead, all its transactions fail, even if they begin with a check."""
    store.transact(Create("a"), Create("b", b"before"), Create("e", ephemeral=True))
    with contextlib.closing(SQLiteStore(path)) as other:
        (Path(f"{path}.sessions") / store.session).unlink()
        assert other.read("e") is None  # this read declares the session dead
        for operations in ((Check("a"), Replace("b", b"late", 0)), (Check("a", 0), Create("c")), (Check("a"),), ()):
            with pytest.raises(SessionLost, match="has ended"):
                store.transact(*operations)
        assert (other.read("b"), other.read("c")) == (Entry(b"before", 0, None), None)


def test_an_inaccessible_directory_makes_the_store_unavailable(tmp_path):
    """While the database's directory is inaccessible, calls raise `StoreUnavailable`, and the session survives."""
    directory = tmp_path / "place"
    directory.mkdir()
    with contextlib.closing(SQLiteStore(directory / "crew.db")) as store:
        store.ensure("a")
        directory.rename(tmp_path / "away")
        directory.write_bytes(b"")  # a file in its place, so that system calls fail with ENOTDIR
        for call in (lambda: store.read("a"), lambda: store.children("a"), lambda: store.transact(Create("b"))):
            with pytest.raises(
                StoreUnavailable, match=r"crew.db cannot be used .*Not a directory.*: nothing was changed"
            ):
                call()
        assert isinstance(LeaseClient(store, time.monotonic).acquire_or_renew(), LeaseRequestFailed)
        directory.unlink()
        (tmp_path / "away").rename(directory)
        assert store.transact(Create("b")) == [0]
        directory.rename(tmp_path / "away")
        directory.write_bytes(b"")
    assert not is_alive(str(tmp_path / "away" / "crew.db.sessions"), store.session)


def test_nothing_is_written_to_a_deleted_database(path, store):
    store.ensure("a")
    path.unlink()
    with pytest.raises(SessionLost, match="deleted or replaced"):
        store.transact(Create("b"))
    with contextlib.closing(SQLiteStore(path)) as other:
        assert other.read("a") is None
        with pytest.raises(SessionLost):
            store.read("a")


# -- Refused databases


@pytest.mark.parametrize(
    ("kind", "refused"),
    [("nfs4", True), ("nfs", True), ("cifs", True), ("smb3", True), ("afs", True), ("ceph", True), ("lustre", True), ("gpfs", True),
     ("fuse.sshfs", True), ("fuse", True), ("9p", True), ("virtiofs", True), ("ext4", False), ("xfs", False), ("btrfs", False),
     ("tmpfs", False), ("overlay", False), ("zfs", False), ("fuseblk", False), ("fuse.fuse-overlayfs", False)],
)  # fmt: skip
def test_a_database_on_a_network_file_system_is_refused(tmp_path, monkeypatch, kind, refused):
    folder = tmp_path / "with space"
    folder.mkdir()
    mounts = tmp_path / "self" / "mountinfo"
    mounts.parent.mkdir()
    monkeypatch.setattr(operating_system, "PROC", str(tmp_path))
    point = str(folder).replace(" ", "\\040")
    mounts.write_text(
        f"22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
        f"23 22 0:45 / {tmp_path} rw - xfs /dev/sdb rw\n"
        f"24 23 0:46 / {point} rw,relatime shared:2 master:3 - {kind} host:/export rw\n"
        f"25 23 0:47 / {point}er rw - nfs4 host:/export rw\n"
    )
    assert filesystem(str(folder)) == kind
    assert filesystem(str(tmp_path)) == "xfs"
    if refused:
        with pytest.raises(StoreUnsupported, match=f"is on {kind}.*zookeeper://"):
            SQLiteStore(folder / "crew.db")
        assert list(folder.iterdir()) == []
    else:
        SQLiteStore(folder / "crew.db").close()


def test_an_unknown_file_system_is_accepted(tmp_path, monkeypatch):
    assert filesystem("/proc") == "proc"
    monkeypatch.setattr(operating_system, "PROC", str(tmp_path / "none"))
    assert filesystem("/") is None
    assert not shared(None)


def test_a_newer_format_is_refused_and_unchanged(path):
    SQLiteStore(path).close()
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute(f"PRAGMA user_version = {FORMAT + 1}")
    before = path.read_bytes()
    with pytest.raises(
        StoreUnsupported, match=f"has format {FORMAT + 1}, but this version of stagecrew supports only format {FORMAT}"
    ):
        SQLiteStore(path)
    assert path.read_bytes() == before


def test_a_database_of_another_program_is_refused_and_unchanged(path):
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE theirs (x)")
    before = path.read_bytes()
    with pytest.raises(StoreUnsupported, match="of another program"):
        SQLiteStore(path)
    assert path.read_bytes() == before


def test_a_file_that_is_not_a_database_is_refused_and_unchanged(path):
    path.write_bytes(b"a letter to my aunt\n" * 100)
    with pytest.raises(StoreUnsupported, match="is damaged or not a database"):
        SQLiteStore(path)
    assert path.read_bytes() == b"a letter to my aunt\n" * 100


def test_a_damaged_database_is_refused_and_not_deleted(path):
    with contextlib.closing(SQLiteStore(path)) as store:
        store.ensure(*(f"a/{'x' * 100}{number}" for number in range(500)))
    damaged = bytearray(path.read_bytes())
    for page in range(3, len(damaged) // 4096):
        damaged[page * 4096 : page * 4096 + 100] = b"\xff" * 100
    path.write_bytes(damaged)
    with pytest.raises(StoreUnsupported, match="is damaged"), contextlib.closing(SQLiteStore(path)) as store:
        store.children("a")
    assert len(path.read_bytes()) == len(damaged)


def test_a_missing_directory_is_named(tmp_path):
    with pytest.raises(ConfigurationError, match="the folder of .*none/crew.db does not exist"):
        SQLiteStore(tmp_path / "none" / "crew.db")


def test_an_unwritable_directory_is_refused(path):
    SQLiteStore(path).close()
    program = """if True:
        import os, sys
        if os.geteuid() == 0:
            os.chown(sys.argv[1], 12345, -1)
            os.chown(sys.argv[1] + ".sessions", 12345, -1)
            os.chmod(sys.argv[2], 0o555)
            for folder in sys.argv[3:]:
                os.chmod(folder, 0o755)
            os.setuid(12345)
        else:
            os.chmod(sys.argv[2], 0o555)
        from stagecrew.recovery.stores.sqlite import SQLiteStore
        try:
            SQLiteStore(sys.argv[1]).ensure("a")
        except Exception as error:
            print(type(error).__name__, error)
    """
    parents = [
        str(one) for one in path.parents if one.owner() == Path("~").expanduser().owner() and "pytest" in str(one)
    ]
    done = subprocess.run(
        [sys.executable, "-c", "import stagecrew.recovery.stores.sqlite\n" + program, path, path.parent, *parents],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    path.parent.chmod(0o700)
    assert done.stdout.startswith("StoreRefused"), done
    assert str(path) in done.stdout


# -- Full disks


def test_a_full_database_refuses_writes_until_there_is_room(store):
    """A full database refuses writes until it has room again. SQLite's page limit simulates the full disk."""
    store.ensure("a")
    (pages,) = store._connection.execute("PRAGMA page_count").fetchone()
    store._connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StoreRefused, match="no room .*nothing was changed"):
        store.transact(Replace("a", b"1", 0), *(Create(f"a/{number}", b"x" * 4000) for number in range(20)))
    assert store.read("a") == Entry(b"", 0)
    store._connection.execute("PRAGMA max_page_count = 1000000")
    assert store.transact(Replace("a", b"1", 0)) == [1]


def test_a_commit_that_cannot_be_written_has_an_unknown_outcome(path):
    """If files cannot grow, which SQLite notices only during the commit, the transaction's outcome is unknown.

    Other sessions can still write.
    """
    with contextlib.closing(SQLiteStore(path)) as store, StoreProcess(url(path)) as process:
        process("transact", Create("a"))
        process("limit_file_size", os.path.getsize(f"{path}-wal"))
        with pytest.raises(PossiblyInconsistentError, match="it is unknown"):
            process("transact", Replace("a", b"x" * 9000, 0))
        with pytest.raises(PossiblyInconsistentError, match="it is unknown"):
            process("transact", Replace("a", b"x" * 9000, 0))
        assert process("read", "a") == Entry(b"", 0)
        assert store.transact(Replace("a", b"y" * 9000, 0)) == [1]
        process.kill()
    with contextlib.closing(SQLiteStore(path)) as store:
        assert store.read("a") == Entry(b"y" * 9000, 1)


FULL_DISK_PROGRAM = """if True:
    import os, sys
    from stagecrew.errors import *
    from stagecrew.recovery.stores.contract import *
    from stagecrew.recovery.stores.contract import Check
    from stagecrew.recovery.stores.sqlite import SQLiteStore
    store = SQLiteStore(sys.argv[1] + "/crew.db")
    store.ensure("a")
    done, refused = 0, 0
    while refused < 5:
        try:
            store.transact(Create(f"a/{done}", os.urandom(20000)), Replace("a", b"%d" % done, done))
            done += 1
        except StoreRefused as error:
            refused += 1
        assert store.read("a").version == done == len(store.children("a"))
    os.unlink(sys.argv[1] + "/filler")
    store.transact(Create(f"a/{done}", b""), Replace("a", b"", done))
    store.close()
    store = SQLiteStore(sys.argv[1] + "/crew.db")
    assert len(store.children("a")) == done + 1
    store.close()
    print(done, refused)
"""


def test_a_full_disk_refuses_writes_and_changes_nothing(tmp_path):
    if os.geteuid() != 0 or not shutil.which("unshare"):
        pytest.skip("needs root, to mount a small disk")
    (tmp_path / "disk").mkdir()
    completed = subprocess.run(
        ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=2m full "$2" && head -c 400000 /dev/zero > "$2/filler" && "$1" -c "$3" "$2"',
         "sh", sys.executable, tmp_path / "disk", FULL_DISK_PROGRAM],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stderr
    done, refused = map(int, completed.stdout.split())
    assert done > 5
    assert refused == 5


# -- Other processes


def test_waiting_too_long_for_a_lock_raises_and_changes_nothing(path):
    with (
        contextlib.closing(SQLiteStore(path, call_timeout=0.3)) as store,
        contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other,
    ):
        store.ensure("a")
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailable, match="another process has held .*crew.db for 0.3 s"):
            store.transact(Replace("a", b"1", 0))
        assert store.read("a") == Entry(b"", 0), "readers do not wait"
        with pytest.raises(StoreUnavailable):
            SQLiteStore(path, call_timeout=0.3)
        assert len(list(Path(f"{path}.sessions").iterdir())) == 1
        started = time.monotonic()
        SQLiteStore.close(store)
        assert time.monotonic() - started < 3
        other.execute("ROLLBACK")
    with contextlib.closing(SQLiteStore(path)) as store, contextlib.closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT name FROM sessions").fetchall() == [(store.session,)]


def test_a_process_suspended_in_a_transaction_blocks_others_only_while_suspended(path):
    with contextlib.closing(SQLiteStore(path, call_timeout=0.2)) as store, StoreProcess(url(path)) as process:
        store.ensure("a", "b")
        process.send("count", "a", "b")
        rng = random.Random(3)

        def held_up():
            process.kill(signal.SIGSTOP)
            try:
                store.transact(Check("a"))
            except StoreUnavailable:
                return True
            process.kill(signal.SIGCONT)
            time.sleep(rng.random() / 100)
            return False

        eventually(held_up, 60)
        assert store.read("a") == store.read("b")
        process.kill()
        with pytest.raises(StoreConflict):
            store.transact(Delete("a", 1 << 30))
        assert store.read("a") == store.read("b")
