"""Where states lie: what was written is read, whole, or a named error says why not."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
import subprocess

import pyarrow.fs
import pytest

from stagecrew.errors import RecoveryMisused, StateCorrupt, StateStorageError
from stagecrew.recovery.state import storage as module
from stagecrew.recovery.state.storage import Reference, StateStorage


@pytest.fixture
def storage(tmp_path):
    return StateStorage(tmp_path)


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("data", [b"", b"state", bytes(range(256)) * 4000], ids=["empty", "small", "1 MB"])
def test_what_is_written_is_read(storage, tmp_path, data):
    """The reference has its length and digest, and the file has the bytes as they are."""
    reference = storage.write("nightly", data, "jobs/of/mine")
    assert reference.length == len(data)
    assert reference.sha256 == hashlib.sha256(data).hexdigest()
    assert storage.read(reference) == data
    assert files(tmp_path) == [reference.name]
    assert (tmp_path / reference.name).read_bytes() == data


def test_each_name_is_fresh(storage, tmp_path):
    """Nothing is overwritten, and a hint can be any text."""
    hints = ["a", "a", "a/b", "..", "", "Straße 7", "x" * 500, "\n", "*"]
    names = {storage.write(hint, b"1").name for hint in hints}
    assert len(names) == len(hints) == len(files(tmp_path))
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+-[0-9a-f]{32}", name) for name in names)


def test_for_their_owner_alone(storage, tmp_path):
    """Files and folders of a local storage are not for others, whatever the umask."""
    before = os.umask(0)
    try:
        reference = storage.write("a", b"1", "one/two")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / reference.name).stat().st_mode) == 0o600
    assert {stat.S_IMODE((tmp_path / folder).stat().st_mode) for folder in ("one", "one/two")} == {0o700}


def test_on_the_disk_before_it_returns(storage, tmp_path, monkeypatch):
    """The file is synced before its folder, and each folder above that may be new; the next state syncs what is new."""
    synced = []
    real = os.fsync

    def fsync(descriptor):
        synced.append(os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    first = storage.write("a", b"1", "one/two")
    assert synced == [".", "one", first.name, "one/two"]
    synced.clear()
    second = storage.write("a", b"1", "one/two")
    assert synced == [second.name, "one/two"]


@pytest.mark.parametrize(
    ("spoil", "error", "match"),
    [
        (lambda path: path.write_bytes(b"12345"), StateCorrupt, "SHA-256 of state .* has changed"),
        (lambda path: path.write_bytes(b"123"), StateCorrupt, "3 bytes, but 5"),
        (lambda path: path.write_bytes(b""), StateCorrupt, "0 bytes, but 5"),
        (lambda path: path.write_bytes(b"state and more"), StateCorrupt, "longer"),
        (lambda path: path.unlink(), StateCorrupt, "does not exist any more"),
        (lambda path: (path.unlink(), path.mkdir()), StateStorageError, "could not be read"),
    ],
    ids=["corrupt", "truncated", "emptied", "longer", "missing", "a folder"],
)
def test_not_as_it_was_written(storage, tmp_path, spoil, error, match):
    """A named error, and nothing is deleted; others are fine."""
    other = storage.write("a", b"other")
    reference = storage.write("a", b"state")
    spoil(tmp_path / reference.name)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(error, match=match) as caught:
        storage.read(reference)
    assert type(caught.value) is error
    assert reference.name in str(caught.value)
    assert sorted(tmp_path.iterdir()) == before
    assert storage.read(other) == b"other"


def test_a_storage_that_is_gone(storage, tmp_path):
    """A state of a folder that is not there, as its disk is not mounted, could not be read: it is not taken for one that is gone."""
    reference = storage.write("a", b"1")
    tmp_path.rename(tmp_path.with_name("elsewhere"))
    with pytest.raises(StateStorageError, match="could not be read") as caught:
        storage.read(reference)
    assert type(caught.value) is StateStorageError
    tmp_path.with_name("elsewhere").rename(tmp_path)
    assert storage.read(reference) == b"1"


def test_discard_is_repeatable_and_says_what_failed(storage, tmp_path):
    """What is gone is fine; what cannot be deleted is reported, and stays."""
    reference = storage.write("a", b"1", "folder")
    storage.discard(reference)
    storage.discard(reference)
    storage.discard(Reference("never/was", 1, ""))
    assert files(tmp_path) == []
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(StateStorageError, match="could not be deleted"):
        storage.discard(Reference("full", 1, ""))
    assert files(tmp_path) == ["full/file"]


@pytest.mark.parametrize("name", ["", "..", "../x", "a/../../x", "/etc/passwd", "a//b", "a/.", "a\0b", "a\\b"])
def test_names_stay_in_the_storage(storage, name):
    """Whatever a reference says: nothing outside is read or deleted."""
    for ask in (storage.read, storage.discard):
        with pytest.raises(StateCorrupt, match="not the name of a state"):
            ask(Reference(name, 1, ""))


def test_listing(storage, tmp_path):
    """Files of one folder, with their size and the time they were written; none without the folder."""
    assert storage.names("jobs") == []
    references = [storage.write("a", b"1" * length, "jobs") for length in (1, 2)]
    storage.write("a", b"1", "jobs/deeper")
    storage.write("a", b"1", "other")
    listed = storage.names("jobs")
    assert sorted(one.name for one in listed) == sorted(reference.name for reference in references)
    assert sorted(one.length for one in listed) == [1, 2]
    for one in listed:
        assert abs(one.modified - (tmp_path / one.name).stat().st_mtime) < 1e-3
        assert abs(one.modified - storage.now("jobs")) < 60
    assert len(storage.names("jobs")) == 2


def test_a_storage_that_does_not_tell_times(tmp_path):
    """States have no age then, and its clock cannot be asked."""

    storage = StateStorage(tmp_path)
    storage.write("a", b"1", "jobs")
    real = storage._filesystem

    class WithoutTimes:
        def __getattr__(self, name):
            return getattr(real, name)

        def get_file_info(self, what):
            found = real.get_file_info(what)
            one = isinstance(found, pyarrow.fs.FileInfo)
            infos = [pyarrow.fs.FileInfo(info.path, info.type, size=info.size) for info in ([found] if one else found)]
            return infos[0] if one else infos

    storage._filesystem = WithoutTimes()
    assert [one.modified for one in storage.names("jobs")] == [None]
    with pytest.raises(StateStorageError, match="does not report"):
        storage.now("jobs")
    assert len(storage.names("jobs")) == 1


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "free some"),
        (errno.EDQUOT, "free some"),
        (errno.EROFS, "can write to"),
        (errno.EACCES, "can write to"),
        (errno.EIO, "could not be written"),
    ],
    ids=errno.errorcode.get,
)
@pytest.mark.parametrize("step", ["open", "fsync", "sync", "mkdir"])
def test_full_or_read_only(storage, tmp_path, monkeypatch, number, words, step):
    """Whatever step of a write fails: a named error that says what to do, nothing is left, and the next write is done."""

    def fails(*arguments):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(module if step == "sync" else os, step, fails)
        with pytest.raises(StateStorageError, match=words) as caught:
            storage.write("a", b"1", "jobs")
        assert str(tmp_path) in str(caught.value)
    assert files(tmp_path) == []
    assert storage.read(storage.write("a", b"1", "jobs")) == b"1"


def test_a_device_that_is_full(storage, tmp_path, monkeypatch):
    """The kernel's own answer to a write for which there is no room."""
    real = os.open
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", lambda path, flags, *mode: real("/dev/full", os.O_WRONLY))
        with pytest.raises(StateStorageError, match="free some"):
            storage.write("a", b"1" * 100_000)
    assert files(tmp_path) == []


@pytest.mark.long
def test_a_file_system_that_is_full(tmp_path):
    """A small file system of its own: what was written before is read, nothing is left of what has no room; then read-only."""
    if (
        os.getuid() != 0
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path], check=False).returncode
    ):
        pytest.skip("this user cannot mount a file system")
    try:
        storage = StateStorage(tmp_path)
        first = storage.write("a", b"1" * 30_000)
        with pytest.raises(StateStorageError, match="free some"):
            storage.write("a", b"2" * 100_000)
        assert files(tmp_path) == [first.name]
        storage.discard(first)
        second = storage.write("a", b"2" * 30_000)
        subprocess.run(["mount", "-o", "remount,ro", tmp_path], check=True)
        assert storage.read(second) == b"2" * 30_000
        for ask in (lambda: storage.write("a", b"1"), lambda: storage.discard(second)):
            with pytest.raises(StateStorageError, match="read-only"):
                ask()
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_who_is_interrupted_leaves_nothing(storage, tmp_path, monkeypatch):
    """Also an interrupt in the middle of a write takes the file away."""

    def interrupted(descriptor):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            storage.write("a", b"1")
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    ("uri", "error", "match"),
    [
        ("", RecoveryMisused, "is empty"),
        ("ftp://host/path", RecoveryMisused, "not the address of a state storage"),
        ("s3://key:very-secret@bucket/a b?secret_key=very-secret", RecoveryMisused, "s3://bucket"),
        ("s3://key:very/secret@very-secret@bucket/a", RecoveryMisused, "^s3://bucket/a is not the address"),
        ("s3://key:very-secret@[bucket", RecoveryMisused, r"s3://\[bucket is not the address"),
        ("file://relative", RecoveryMisused, "not the address of a state storage"),
        ("file:///nowhere/at/all", StateStorageError, "create it, or mount"),
        ("/nowhere/at/all", StateStorageError, "create it, or mount"),
        ("/dev/null", StateStorageError, "not an existing folder"),
    ],
)
def test_no_storage(uri, error, match):
    """Unknown schemes, what is no URI, and folders that are not there: named errors, without the secrets."""
    with pytest.raises(error, match=match) as caught:
        StateStorage(uri)
    assert "very-secret" not in f"{caught.value} {caught.value.__cause__}"


def test_the_ways_to_name_one_folder(tmp_path, monkeypatch):
    """A path, a relative one, a URI, a file system with a path, and a folder of one are the same storage."""
    reference = StateStorage(tmp_path).write("a", b"1", "jobs")
    local = pyarrow.fs.LocalFileSystem()
    monkeypatch.chdir(tmp_path.parent)
    for storage in (
        StateStorage(str(tmp_path)),
        StateStorage(f"{tmp_path}/"),
        StateStorage(tmp_path.name),
        StateStorage(f"file://{tmp_path}"),
        StateStorage(tmp_path, local),
        StateStorage(tmp_path.name, pyarrow.fs.SubTreeFileSystem(str(tmp_path.parent), local)),
        StateStorage("/", pyarrow.fs.SubTreeFileSystem(str(tmp_path), local)),
    ):
        assert storage.read(reference) == b"1"
        mode = (tmp_path / storage.write("a", b"1", "jobs").name).stat().st_mode
        assert stat.S_IMODE(mode) == 0o600, storage


def test_another_file_system_of_the_callers(tmp_path):
    """One that is written in Python: all of the same, its own way."""
    fsspec = pytest.importorskip("fsspec")
    memory = pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(fsspec.filesystem("memory")))
    storage = StateStorage("states", memory)
    reference = storage.write("a", b"1", "jobs")
    assert storage.read(reference) == b"1"
    assert [one.name for one in storage.names("jobs")] == [reference.name]
    storage.discard(reference)
    storage.discard(reference)
    assert storage.names("jobs") == []
    with pytest.raises(StateCorrupt, match="does not exist any more"):
        storage.read(reference)
