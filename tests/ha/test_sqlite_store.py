"""What befalls a SQLite store: kills at any moment, full and broken disks, files that are deleted or of others."""

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

from crewtools import eventually
from stagecrew.errors import (
    PossiblyInconsistentError,
    RecoveryMisused,
    SessionLost,
    StoreConflict,
    StoreRefused,
    StoreUnavailable,
    StoreUnsupported,
)
from stagecrew.mounts import filesystem, shared
from stagecrew.recovery.leadership.election import NoResponse
from stagecrew.recovery.leadership.lease_client import LeaseClient
from stagecrew.recovery.stores.contract import FORMAT, Check, Create, Delete, Entry, Replace
from stagecrew.recovery.stores.sqlite import SQLiteStore
from stagecrew.recovery.stores.sqlite.session_files import is_alive
from storeprocess import StoreProcess


@pytest.fixture
def path(tmp_path):
    return tmp_path / "crew.db"


@pytest.fixture
def store(path):
    with contextlib.closing(SQLiteStore(path)) as opened:
        yield opened


def url(path):
    return f"sqlite://{path}"


def test_many_sessions_make_one_store(tmp_path):
    """Sessions that open a store at the same moment, which is not there yet, all open the one that one of them makes."""

    def opens(path, barrier):
        barrier.wait(30)
        SQLiteStore(path).close()

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        for number in range(30):
            barrier = threading.Barrier(8)
            opened = [threads.submit(opens, tmp_path / f"{number}.db", barrier) for _ in range(8)]
            for one in opened:
                one.result(60)


def test_files_are_for_their_user_alone_and_none_of_a_session_is_left(path):
    descriptors = len(os.listdir("/proc/self/fd"))
    before = os.umask(0)
    try:
        store = SQLiteStore(path)
        store.ensure("a")
    finally:
        os.umask(before)
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


def test_what_is_answered_is_on_the_disk(path):
    """Every session, the one that makes the store and each that opens it, has its transactions on the disk before they are answered."""
    with contextlib.closing(SQLiteStore(path)) as first, contextlib.closing(SQLiteStore(path)) as second:
        for store in (first, second):
            settings = [
                store._connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("synchronous", "journal_mode")
            ]
            assert settings == [2, "wal"]


def killed_in_the_middle(path, seed, kills):
    """Whatever was answered is there, and of what was not, all or nothing."""
    chance = random.Random(seed)
    with contextlib.closing(SQLiteStore(path)) as store:
        store.ensure("a", "b")
        for _ in range(kills):
            with StoreProcess(url(path)) as process:
                process("transact", Create("held", ephemeral=True))
                process.tell("count", "a", "b")
                answered = chance.randrange(1, 40)
                told = [int(process._process.stdout.readline()) for _ in range(answered)]
                time.sleep(chance.random() / 200)  # anywhere in a transaction
                process.kill()
            a, b = store.read("a"), store.read("b")
            assert a == b == Entry(b"%d" % a.version, a.version)
            assert a.version >= told[-1]
            assert store.children("held") == []
            assert store.read("held") is None
            store.transact(
                Replace("a", b"%d" % (a.version + 1), a.version), Replace("b", b"%d" % (a.version + 1), a.version)
            )
    with contextlib.closing(sqlite3.connect(path)) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_process_that_is_killed_leaves_no_half_transaction(path):
    killed_in_the_middle(path, 7, 4)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_many_processes_that_are_killed_leave_no_half_transaction(path, seed):
    killed_in_the_middle(path, seed, 40)


def test_processes_that_open_a_new_database_together_all_get_it(path):
    with contextlib.ExitStack() as all_of_them:
        processes = [all_of_them.enter_context(StoreProcess.begun(url(path))) for _ in range(6)]
        sessions = [process.answer() for process in processes]
        assert len(set(sessions)) == 6
        for number, process in enumerate(processes):
            process("transact", Create(f"n{number}", ephemeral=True))
        assert all(processes[0]("read", f"n{number}").session == sessions[number] for number in range(6))


def test_opening_takes_away_what_dead_sessions_left(path):
    with StoreProcess(url(path)) as process:
        process("transact", Create("e", ephemeral=True))
        process.kill()
    folder = Path(f"{path}.sessions")
    (folder / "stray").touch()  # of one that died before it was known
    with contextlib.closing(SQLiteStore(path)) as store, contextlib.closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT name FROM sessions").fetchall() == [(store.session,)]
        assert database.execute("SELECT count(*) FROM entries").fetchone() == (0,)
        assert [file.name for file in folder.iterdir()] == [store.session]


def test_a_fork_does_not_keep_the_session_of_its_dead_parent_alive(path, tmp_path):
    """G25: the lock goes over to forks. Those of Python give it back."""
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


def test_who_loses_its_file_loses_its_session_and_what_it_held(path, store):
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


def test_who_was_buried_replaces_nothing_behind_a_check(path, store):
    """A transaction that begins with a check, as each of a leader does, is none of a session that others have taken for dead."""
    store.transact(Create("a"), Create("b", b"before"), Create("e", ephemeral=True))
    with contextlib.closing(SQLiteStore(path)) as other:
        (Path(f"{path}.sessions") / store.session).unlink()
        assert other.read("e") is None  # by which it is buried
        for operations in ((Check("a"), Replace("b", b"late", 0)), (Check("a", 0), Create("c")), (Check("a"),), ()):
            with pytest.raises(SessionLost, match="has ended"):
                store.transact(*operations)
        assert (other.read("b"), other.read("c")) == (Entry(b"before", 0, None), None)


def test_a_disk_that_fails_is_an_error_of_the_store(tmp_path):
    """Where the place of the database cannot be looked at, nothing is done, the store says so, and the session lasts until that can be."""
    place = tmp_path / "place"
    place.mkdir()
    with contextlib.closing(SQLiteStore(place / "crew.db")) as store:
        store.ensure("a")
        place.rename(tmp_path / "away")
        place.write_bytes(b"")  # in the way: the system answers ENOTDIR
        for call in (lambda: store.read("a"), lambda: store.children("a"), lambda: store.transact(Create("b"))):
            with pytest.raises(
                StoreUnavailable, match=r"crew.db cannot be used .*Not a directory.*: nothing was changed"
            ):
                call()
        assert isinstance(LeaseClient(store, time.monotonic).acquire_or_renew(), NoResponse)
        place.unlink()
        (tmp_path / "away").rename(place)
        assert store.transact(Create("b")) == [0]
        place.rename(tmp_path / "away")
        place.write_bytes(b"")
    assert not is_alive(str(tmp_path / "away" / "crew.db.sessions"), store.session)


def test_who_loses_the_database_writes_to_no_deleted_one(path, store):
    store.ensure("a")
    path.unlink()
    with pytest.raises(SessionLost, match="deleted or replaced"):
        store.transact(Create("b"))
    with contextlib.closing(SQLiteStore(path)) as other:
        assert other.read("a") is None
        with pytest.raises(SessionLost):
            store.read("a")


# -- What is refused


@pytest.mark.parametrize(
    ("kind", "refused"),
    [("nfs4", True), ("nfs", True), ("cifs", True), ("smb3", True), ("afs", True), ("ceph", True), ("lustre", True), ("gpfs", True),
     ("fuse.sshfs", True), ("fuse", True), ("9p", True), ("virtiofs", True), ("ext4", False), ("xfs", False), ("btrfs", False),
     ("tmpfs", False), ("overlay", False), ("zfs", False), ("fuseblk", False), ("fuse.fuse-overlayfs", False)],
)  # fmt: skip
def test_a_database_on_a_file_system_of_several_machines_is_refused(tmp_path, kind, refused):
    folder = tmp_path / "with space"
    folder.mkdir()
    mounts = tmp_path / "mountinfo"
    point = str(folder).replace(" ", "\\040")
    mounts.write_text(
        f"22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
        f"23 22 0:45 / {tmp_path} rw - xfs /dev/sdb rw\n"
        f"24 23 0:46 / {point} rw,relatime shared:2 master:3 - {kind} host:/export rw\n"
        f"25 23 0:47 / {point}er rw - nfs4 host:/export rw\n"
    )
    assert filesystem(str(folder), str(mounts)) == kind
    assert filesystem(str(tmp_path), str(mounts)) == "xfs"
    if refused:
        with pytest.raises(StoreUnsupported, match=f"is on {kind}.*zookeeper://"):
            SQLiteStore(folder / "crew.db", mounts=str(mounts))
        assert list(folder.iterdir()) == []
    else:
        SQLiteStore(folder / "crew.db", mounts=str(mounts)).close()


def test_where_the_system_does_not_tell_the_file_system_nothing_is_refused(tmp_path):
    assert filesystem("/", str(tmp_path / "none")) is None
    assert not shared(None)
    assert filesystem("/proc") == "proc"


def test_a_newer_format_is_refused_and_left_as_it_is(path):
    SQLiteStore(path).close()
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute(f"PRAGMA user_version = {FORMAT + 1}")
    before = path.read_bytes()
    with pytest.raises(StoreUnsupported, match=f"has format {FORMAT + 1}, and this stagecrew supports format {FORMAT}"):
        SQLiteStore(path)
    assert path.read_bytes() == before


def test_a_database_of_another_program_is_refused_and_left_as_it_is(path):
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE theirs (x)")
    before = path.read_bytes()
    with pytest.raises(StoreUnsupported, match="of another program"):
        SQLiteStore(path)
    assert path.read_bytes() == before


def test_what_is_no_database_is_refused_and_left_as_it_is(path):
    path.write_bytes(b"a letter to my aunt\n" * 100)
    with pytest.raises(StoreUnsupported, match="is damaged or not a database"):
        SQLiteStore(path)
    assert path.read_bytes() == b"a letter to my aunt\n" * 100


def test_a_damaged_database_is_refused_in_clear_words_and_not_deleted(path):
    with contextlib.closing(SQLiteStore(path)) as store:
        store.ensure(*(f"a/{'x' * 100}{number}" for number in range(500)))
    damaged = bytearray(path.read_bytes())
    for page in range(3, len(damaged) // 4096):
        damaged[page * 4096 : page * 4096 + 100] = b"\xff" * 100
    path.write_bytes(damaged)
    with pytest.raises(StoreUnsupported, match="is damaged"), contextlib.closing(SQLiteStore(path)) as store:
        store.children("a")
    assert len(path.read_bytes()) == len(damaged)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(RecoveryMisused, match="the folder of .*none/crew.db does not exist"):
        SQLiteStore(tmp_path / "none" / "crew.db")


def test_a_folder_that_cannot_be_written_is_refused(path):
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
    above = [str(one) for one in path.parents if one.owner() == Path("~").expanduser().owner() and "pytest" in str(one)]
    said = subprocess.run(
        [sys.executable, "-c", "import stagecrew.recovery.stores.sqlite\n" + program, path, path.parent, *above],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    path.parent.chmod(0o700)
    assert said.stdout.startswith("StoreRefused"), said
    assert str(path) in said.stdout


# -- Disks


def test_a_full_database_refuses_and_does_nothing_and_goes_on_when_there_is_room(store):
    """SQLite's own limit of pages is met in the same way as the end of a disk."""
    store.ensure("a")
    (pages,) = store._connection.execute("PRAGMA page_count").fetchone()
    store._connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StoreRefused, match="no room .*nothing was changed"):
        store.transact(Replace("a", b"1", 0), *(Create(f"a/{number}", b"x" * 4000) for number in range(20)))
    assert store.read("a") == Entry(b"", 0)
    store._connection.execute("PRAGMA max_page_count = 1000000")
    assert store.transact(Replace("a", b"1", 0)) == [1]


def test_a_write_that_the_disk_does_not_take_is_unknown_and_repeating_it_tells(path):
    """No file may grow further, which SQLite meets while it commits."""
    with contextlib.closing(SQLiteStore(path)) as store, StoreProcess(url(path)) as process:
        process("transact", Create("a"))
        process("limit", os.path.getsize(f"{path}-wal"))
        with pytest.raises(PossiblyInconsistentError, match="it is unknown"):
            process("transact", Replace("a", b"x" * 9000, 0))
        with pytest.raises(PossiblyInconsistentError, match="it is unknown"):
            process("transact", Replace("a", b"x" * 9000, 0))
        assert process("read", "a") == Entry(b"", 0)
        assert store.transact(Replace("a", b"y" * 9000, 0)) == [1]
        process.kill()
    with contextlib.closing(SQLiteStore(path)) as store:
        assert store.read("a") == Entry(b"y" * 9000, 1)


FULL = """if True:
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


def test_a_full_disk_refuses_and_does_nothing(tmp_path):
    if os.geteuid() != 0 or not shutil.which("unshare"):
        pytest.skip("needs root, to mount a small disk")
    (tmp_path / "disk").mkdir()
    said = subprocess.run(
        ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=2m full "$2" && head -c 400000 /dev/zero > "$2/filler" && "$1" -c "$3" "$2"',
         "sh", sys.executable, tmp_path / "disk", FULL],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    done, refused = map(int, said.stdout.split())
    assert done > 5
    assert refused == 5


# -- Others


def test_who_waits_too_long_for_another_says_for_whom_and_has_done_nothing(path):
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
        begun = time.monotonic()
        SQLiteStore.close(store)
        assert time.monotonic() - begun < 3
        other.execute("ROLLBACK")
    with contextlib.closing(SQLiteStore(path)) as store, contextlib.closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT name FROM sessions").fetchall() == [(store.session,)]


def test_a_process_that_is_stopped_in_a_transaction_holds_others_up_and_no_longer_than_it_is(path):
    with contextlib.closing(SQLiteStore(path, call_timeout=0.2)) as store, StoreProcess(url(path)) as process:
        store.ensure("a", "b")
        process.tell("count", "a", "b")
        chance = random.Random(3)

        def held_up():
            process.kill(signal.SIGSTOP)
            try:
                store.transact(Check("a"))
            except StoreUnavailable:
                return True
            process.kill(signal.SIGCONT)
            time.sleep(chance.random() / 100)
            return False

        eventually(held_up, 60)
        assert store.read("a") == store.read("b")
        process.kill()
        with pytest.raises(StoreConflict):
            store.transact(Delete("a", 1 << 30))
        assert store.read("a") == store.read("b")
