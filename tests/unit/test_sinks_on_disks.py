"""Sinks on read-only and full disks. Errors are clear, a failed commit shows no rows, and a commit can be repeated."""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3

import pyarrow as pa
import pytest

from stagecrew.errors import CommitFailed, CommitPending
from stagecrew.operators.commit_log import FileCommitLog
from stagecrew.operators.commits import commit
from support.commit_trials import SCHEMA, Driver, Tasks
from support.local_sinks import appended, iceberg, objects, parquet, remount, small_disk, sqlite

pytestmark = [pytest.mark.long, pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a file system")]


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "small", "4m") as folder:
        yield folder


def sqlite_with_rollback_journal(disk):
    """A trial of a SQLite sink that uses SQLite's default journal mode, not a write-ahead log."""
    made = sqlite(disk)
    with contextlib.closing(sqlite3.connect(disk / "data.db")) as database:
        database.execute("PRAGMA journal_mode=DELETE")
    return made


@pytest.fixture(
    params=[parquet, appended, objects, sqlite_with_rollback_journal, iceberg], ids=lambda make: make.__name__
)
def trial(request, tmp_path, disk):
    """A trial of each sink on the small disk. Its commit log is on another disk."""
    made = request.param(disk)
    made.commit_log = FileCommitLog(tmp_path / "log")
    return made


def fill(disk):
    """Writes a file until the disk is full."""
    with open(disk / "large", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def test_a_read_only_disk(trial, disk):
    """On a read-only disk, a commit fails before any task runs. No rows are visible, and no staged data remains.

    Once the disk is writable, the same commit succeeds.
    """
    tasks = Tasks(1)
    remount(disk, "ro")
    with pytest.raises(
        CommitFailed, match="cannot be .*([Rr]ead-only file system|readonly database|unable to open database file)"
    ):
        commit(trial.make_sink(), trial.commit_log, "c", SCHEMA, lambda staging: 1 / 0)
    remount(disk, "rw")
    assert trial.visible() == []
    assert not (disk / "table").exists()
    assert trial.drive(Driver(), tasks, "c").rows == 40
    assert sorted(trial.visible()) == tasks.expected
    assert trial.leftovers() == []


def test_a_disk_that_becomes_read_only(trial, disk):
    """If the disk becomes read-only after the tasks have staged their rows, the commit is decided but pending.

    Once the disk is writable, a repeated commit applies it without running a task.
    """
    tasks = Tasks(1)

    def run(staging):
        messages = tasks.run(trial.make_sink(), staging)
        remount(disk, "ro")
        return messages

    with pytest.raises(
        CommitPending,
        match="commit 'c' is decided.*([Rr]ead-only file system|readonly database|unable to open database file)",
    ):
        commit(trial.make_sink(), trial.commit_log, "c", SCHEMA, run, sleep=lambda _: None)
    remount(disk, "rw")
    assert trial.visible() == []
    assert commit(trial.make_sink(), trial.commit_log, "c", SCHEMA, lambda staging: 1 / 0).repeated
    assert sorted(trial.visible()) == tasks.expected
    assert trial.leftovers() == []


def test_a_disk_that_is_full_during_staging(trial):
    """If the disk is full during staging, the error says so. No rows are visible, and no staged data remains.

    A commit of fewer rows with the same id then succeeds.
    """

    def batches():
        for number in range(1000):
            texts = [secrets.token_hex(500) for _ in range(100)]
            yield pa.record_batch({"id": pa.array([number] * 100, pa.int64()), "text": texts}, schema=SCHEMA)

    def run(staging):
        sink = trial.make_sink()
        return [sink.stage(staging, 0, 1, iter(Tasks.batches([(1, "a")]))), sink.stage(staging, 1, 2, batches())]

    with pytest.raises((OSError, CommitFailed), match="No space left on device|database or disk is full"):
        commit(trial.make_sink(), trial.commit_log, "c", SCHEMA, run)
    assert trial.visible() == []
    assert trial.leftovers() == []
    tasks = Tasks(1)
    assert trial.drive(Driver(), tasks, "c").rows == 40
    assert sorted(trial.visible()) == tasks.expected
    assert trial.leftovers() == []


def test_a_disk_that_is_full_during_the_commit(trial, disk):
    """If the disk is full after the tasks have staged their rows, the commit is decided but pending.

    Once there is space, a repeated commit applies it without running a task.
    """
    tasks = Tasks(1)

    def run(staging):
        messages = tasks.run(trial.make_sink(), staging)
        fill(disk)
        return messages

    with pytest.raises(
        CommitPending, match="commit 'c' is decided.*(No space left on device|database or disk is full)"
    ):
        commit(trial.make_sink(), trial.commit_log, "c", SCHEMA, run, sleep=lambda _: None)
    assert trial.visible() == []
    (disk / "large").unlink()
    assert commit(trial.make_sink(), trial.commit_log, "c", SCHEMA, lambda staging: 1 / 0).repeated
    assert sorted(trial.visible()) == tasks.expected
    assert trial.leftovers() == []
