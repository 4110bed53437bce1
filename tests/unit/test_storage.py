"""State storage: a written state is read back completely, or an error of a specific class says why not."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
import subprocess

import pyarrow.fs
import pytest

from stagecrew.errors import ConfigurationError, StateCorrupt, StateStorageError
from stagecrew.recovery.state import storage as module
from stagecrew.recovery.state.storage import Reference, StateStorage


@pytest.fixture
def storage(tmp_path):
    return StateStorage(tmp_path)


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("data", [b"", b"state", bytes(range(256)) * 4000], ids=["empty", "small", "1 MB"])
def test_a_written_state_is_read(storage, tmp_path, data):
    """A written state can be read. Its reference contains its length and digest, and its file contains exactly its
    bytes."""
    reference = storage.write("nightly", data, "jobs/of/mine")
    assert reference.length == len(data)
    assert reference.sha256 == hashlib.sha256(data).hexdigest()
    assert storage.read(reference) == data
    assert files(tmp_path) == [reference.name]
    assert (tmp_path / reference.name).read_bytes() == data


def test_each_name_is_new(storage, tmp_path):
    """Each write gets a new name, so nothing is overwritten. The hint for a name can be any text."""
    hints = ["a", "a", "a/b", "..", "", "Straße 7", "x" * 500, "\n", "*"]
    names = {storage.write(hint, b"1").name for hint in hints}
    assert len(names) == len(hints) == len(files(tmp_path))
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+-[0-9a-f]{32}", name) for name in names)


def test_files_are_private(storage, tmp_path):
    """Other users cannot read files and folders of a local storage, whatever the umask."""
    before = os.umask(0)
    try:
        reference = storage.write("a", b"1", "one/two")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / reference.name).stat().st_mode) == 0o600
    assert {stat.S_IMODE((tmp_path / folder).stat().st_mode) for folder in ("one", "one/two")} == {0o700}


def test_a_write_is_synced_before_it_returns(storage, tmp_path, monkeypatch):
    """A write syncs the parents of new folders, then the file, and then the file's folder. The next write to this
    folder syncs only the file and the folder."""
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
        (lambda path: path.unlink(), StateCorrupt, "no longer exists"),
        (lambda path: (path.unlink(), path.mkdir()), StateStorageError, "could not be read"),
    ],
    ids=["corrupt", "truncated", "emptied", "longer", "missing", "a folder"],
)
def test_a_changed_state(storage, tmp_path, spoil, error, match):
    """Reading a changed state raises an error that names the state, and deletes nothing. Other states can be read."""
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


def test_a_missing_folder(storage, tmp_path):
    """If the storage's folder is missing (its disk is not mounted), a read fails, but not as if the state were
    deleted."""
    reference = storage.write("a", b"1")
    tmp_path.rename(tmp_path.with_name("elsewhere"))
    with pytest.raises(StateStorageError, match="could not be read") as caught:
        storage.read(reference)
    assert type(caught.value) is StateStorageError
    tmp_path.with_name("elsewhere").rename(tmp_path)
    assert storage.read(reference) == b"1"


def test_discard_is_idempotent_and_reports_failures(storage, tmp_path):
    """Discarding a missing state does nothing. Discarding a state that cannot be deleted raises an error."""
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
    """Whatever name a reference contains, no file outside the storage is read or deleted."""
    for ask in (storage.read, storage.discard):
        with pytest.raises(StateCorrupt, match="not the name of a state"):
            ask(Reference(name, 1, ""))


def test_listing(storage, tmp_path):
    """`names` lists the files of a folder with their sizes and write times. It returns nothing for a missing folder."""
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


def test_a_storage_without_times(tmp_path):
    """If a storage reports no write times, its states have none, and `now` raises an error."""

    storage = StateStorage(tmp_path)
    storage.write("a", b"1", "jobs")
    real = storage._filesystem

    class WithoutTimes:
        def __getattr__(self, name):
            return getattr(real, name)

        def get_file_info(self, selector):
            found = real.get_file_info(selector)
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
def test_writes_that_fail(storage, tmp_path, monkeypatch, number, words, step):
    """If any step of a write fails, the error says what to do, nothing is left, and the next write succeeds."""

    def fails(*arguments):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(module if step == "sync" else os, step, fails)
        with pytest.raises(StateStorageError, match=words) as caught:
            storage.write("a", b"1", "jobs")
        assert str(tmp_path) in str(caught.value)
    assert files(tmp_path) == []
    assert storage.read(storage.write("a", b"1", "jobs")) == b"1"


def test_a_full_device(storage, tmp_path, monkeypatch):
    """If the kernel reports that a device is full, the error says to free some space, and no file is left."""
    real = os.open
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", lambda path, flags, *mode: real("/dev/full", os.O_WRONLY))
        with pytest.raises(StateStorageError, match="free some"):
            storage.write("a", b"1" * 100_000)
    assert files(tmp_path) == []


@pytest.mark.long
def test_a_full_file_system(tmp_path):
    """On a full or read-only file system, earlier states can be read, and a failed write leaves nothing."""
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


def test_an_interrupted_write_leaves_nothing(storage, tmp_path, monkeypatch):
    """A write that is interrupted removes its file."""

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
        ("", ConfigurationError, "is empty"),
        ("ftp://host/path", ConfigurationError, "not the address of a state storage"),
        ("s3://key:very-secret@bucket/a b?secret_key=very-secret", ConfigurationError, "s3://bucket"),
        ("s3://key:very/secret@very-secret@bucket/a", ConfigurationError, "^s3://bucket/a is not the address"),
        ("s3://key:very-secret@[bucket", ConfigurationError, r"s3://\[bucket is not the address"),
        ("file://relative", ConfigurationError, "not the address of a state storage"),
        ("file:///nowhere/at/all", StateStorageError, "create it, or mount"),
        ("/nowhere/at/all", StateStorageError, "create it, or mount"),
        ("/dev/null", StateStorageError, "not an existing folder"),
    ],
)
def test_invalid_storages(uri, error, match):
    """Unknown schemes, invalid URIs and missing folders raise errors that contain no secrets."""
    with pytest.raises(error, match=match) as caught:
        StateStorage(uri)
    assert "very-secret" not in f"{caught.value} {caught.value.__cause__}"


def test_all_forms_of_a_folder(tmp_path, monkeypatch):
    """An absolute path, a relative path, a URI, and a path or base folder in a file system can denote the same
    storage."""
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


def test_a_file_system_in_python(tmp_path):
    """A storage on a file system written in Python behaves like one on a local disk."""
    fsspec = pytest.importorskip("fsspec")
    memory = pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(fsspec.filesystem("memory")))
    storage = StateStorage("states", memory)
    reference = storage.write("a", b"1", "jobs")
    assert storage.read(reference) == b"1"
    assert [one.name for one in storage.names("jobs")] == [reference.name]
    storage.discard(reference)
    storage.discard(reference)
    assert storage.names("jobs") == []
    with pytest.raises(StateCorrupt, match="no longer exists"):
        storage.read(reference)
