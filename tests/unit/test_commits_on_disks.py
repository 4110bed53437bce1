"""Commits and failing disks: which files are synced, and commit records that cannot be written."""

from __future__ import annotations

import contextlib
import errno
import os
import sys

import pytest

import stagecrew.operators.commit_log
import stagecrew.operators.commit_rollforward
from stagecrew.errors import CommitFailed, CommitPending, CommitUnknown
from stagecrew.operators.commit_log import FileCommitLog, MemoryCommitLog
from stagecrew.operators.commits import commit
from stagecrew.operators.sinks import ParquetSink
from support.commit_trials import SCHEMA, Driver, Tasks
from support.commits import CallsBefore, RefusingSink
from support.local_sinks import remount, small_disk, sqlite


@pytest.fixture
def synced(monkeypatch):
    """The paths that files and folders had when they were fsynced."""
    names, fsync = [], os.fsync

    def record(descriptor):
        names.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    return names


@pytest.mark.parametrize("rows", [0, 40])
@pytest.mark.parametrize("mode", ["create", "append"])
def test_a_commit_is_fsynced(tmp_path, synced, mode, rows):
    """A commit syncs each file, even without rows, the folder that it renames, and the parent of each new folder."""
    target, tasks = tmp_path / "new" / "er" / "table", Tasks(1, rows=rows)
    sink = ParquetSink(target, mode)
    commit(sink, MemoryCommitLog(), "c", SCHEMA, lambda staging: tasks.run(sink, staging))
    folder = target if mode == "create" else target / "stagecrew_commit=c"
    moved = {name.rpartition("/")[2].partition(".json.")[0] for name in synced}
    assert {path.name.removesuffix(".json") for path in folder.iterdir()} <= moved
    assert [name for name in synced if name.endswith("-whole")]
    for created in (tmp_path / "new", tmp_path / "new" / "er", target, folder):
        assert str(created.parent) in synced


def test_the_folder_of_a_commit_log_is_fsynced(tmp_path, synced):
    """A commit log syncs its folder and its new parent folders."""
    FileCommitLog(tmp_path / "new" / "er").write("c", {}, 0)
    assert {str(tmp_path), str(tmp_path / "new"), str(tmp_path / "new" / "er")} <= set(synced)


class DiskFault:
    """Makes a system call of the commit log fail once, at its n-th call."""

    def __init__(self, monkeypatch, part, number, code):
        self.remaining, self.code = number, code
        module, name = {"open": (os, "open"), "fsync": (os, "fsync"), "replace": (os, "replace")}.get(
            part, (stagecrew.operators.commit_log, "sync")
        )
        self.real = getattr(module, name)
        monkeypatch.setattr(module, name, self)

    def __call__(self, *args, **kwargs):
        if sys._getframe(1).f_globals["__name__"] == "stagecrew.operators.commit_log":
            self.remaining -= 1
            if self.remaining == 0:
                raise OSError(self.code, os.strerror(self.code))
        return self.real(*args, **kwargs)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("part", ["open", "fsync", "replace", "sync"])
def test_a_disk_that_fails_under_the_commit_log(tmp_path, part, number, code):
    """If the disk of the commit log fails, a write that did not happen and an unknown outcome raise different errors.

    A repeat completes the commit.
    """
    trial, tasks = sqlite(tmp_path), Tasks(1)
    with pytest.MonkeyPatch.context() as patch:
        fault = DiskFault(patch, part, number, code)
        unknown = part == "sync" or (part == "replace" and code == errno.EIO)
        try:
            report = commit(trial.make_sink(), trial.commit_log, "c", SCHEMA, lambda s: tasks.run(trial.make_sink(), s))
        except CommitUnknown:
            assert unknown
        except CommitFailed as error:
            message = str(error)
            assert not unknown
            assert "could not be written" in message
            assert os.strerror(code) in message
            assert trial.visible() == []
            assert trial.leftovers() == []
        else:
            assert number == 3  # only the record with the state "applied" could not be written
            assert report.rows == 40
        assert fault.remaining <= 0
    assert not list((tmp_path / "log").glob(".*.tmp"))
    trial.drive(Driver(), tasks, "c")
    assert sorted(trial.visible()) == tasks.expected
    assert trial.leftovers() == []


def test_a_failed_job_is_cleaned_up_if_its_abort_cannot_be_written(tmp_path, monkeypatch):
    """If a failed job's abort cannot be recorded, the staged rows are still deleted, because nobody can decide for it.

    The job's own error is raised.
    """
    trial = sqlite(tmp_path)

    def fails(staging):
        Tasks(1).run(trial.make_sink(), staging)
        DiskFault(monkeypatch, "open", 1, errno.ENOSPC)
        raise ValueError("the job failed")

    with pytest.raises(ValueError, match="the job failed"):
        commit(trial.make_sink(), trial.commit_log, "c", SCHEMA, fails)
    assert trial.leftovers() == []


def test_a_refusal_that_cannot_be_written_is_pending(tmp_path, monkeypatch):
    """If a refusal cannot be recorded, the commit stays decided. The staged rows stay, and a repeat completes it."""
    trial, tasks = sqlite(tmp_path), Tasks(1)
    accepting = trial.make_sink()
    refusing = CallsBefore(RefusingSink(accepting), commit=lambda: DiskFault(monkeypatch, "open", 1, errno.ENOSPC))
    with pytest.raises(
        CommitPending,
        match="the sink refuses it: this sink refuses every commit. The refusal could not be recorded.*No space left",
    ):
        commit(refusing, trial.commit_log, "c", SCHEMA, lambda staging: tasks.run(accepting, staging))
    assert trial.leftovers() != []
    monkeypatch.undo()
    assert trial.drive(Driver(), Tasks(2), "c").repeated
    assert sorted(trial.visible()) == tasks.expected
    assert trial.leftovers() == []


@pytest.fixture
def disk(tmp_path):
    """A disk of 64 KiB."""
    with small_disk(tmp_path / "small", "64k") as folder:
        yield folder


@pytest.mark.long
def test_a_commit_log_on_a_full_disk_fails_the_commit(tmp_path, disk):
    """If the commit log's disk is full, the commit fails and leaves nothing. A repeat succeeds when there is space."""
    trial, tasks = sqlite(tmp_path), Tasks(1)
    trial.commit_log = FileCommitLog(disk)

    def fills(staging):
        messages = tasks.run(trial.make_sink(), staging)
        with contextlib.suppress(OSError):
            (disk / "large").write_bytes(bytes(1 << 20))
        return messages

    with pytest.raises(CommitFailed, match="record of commit 'c' could not be written.*No space left on device"):
        commit(trial.make_sink(), trial.commit_log, "c", SCHEMA, fills)
    assert trial.visible() == []
    assert trial.leftovers() == []
    (disk / "large").unlink()
    assert sorted(path.name for path in disk.iterdir()) == [".lock", "c.json"]
    trial.drive(Driver(), tasks, "c")
    assert sorted(trial.visible()) == tasks.expected


@pytest.mark.long
def test_a_commit_log_on_a_read_only_disk_fails_the_commit(tmp_path, disk):
    """With a commit log on a read-only disk, a new commit fails before any task runs. Existing records can be read."""
    trial, tasks = sqlite(tmp_path), Tasks(1)
    trial.commit_log = FileCommitLog(disk)
    trial.drive(Driver(), tasks, "c")
    remount(disk, "ro")
    assert trial.drive(Driver(), tasks, "c").repeated
    with pytest.raises(CommitFailed, match="record of commit 'd' could not be written.*Read-only file system"):
        commit(trial.make_sink(), trial.commit_log, "d", SCHEMA, lambda staging: 1 / 0)
    with pytest.raises(CommitFailed, match="the folder of the commit log cannot be created.*Read-only file system"):
        FileCommitLog(disk / "below")
