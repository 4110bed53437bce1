"""Commit logs: versions of records, concurrent writers, and killed writers."""

from __future__ import annotations

import errno
import fcntl
import signal
import subprocess
import sys
import threading

import pytest

from stagecrew.errors import CommitFailed, CommitSuperseded, CommitUnknown, OperatorMisused
from stagecrew.operators.commit_log import FileCommitLog, MemoryCommitLog, commit_log_of
from stagecrew.operators.commits import commit
from support.commit_trials import SCHEMA
from support.local_sinks import files, sqlite


def test_a_commit_log_compares_versions(tmp_path):
    """A write with an old version is refused. A file log accepts a repetition of its own successful write."""
    for make in (MemoryCommitLog, lambda: FileCommitLog(tmp_path / "log")):
        commit_log = make()
        assert commit_log.read("a/b") is None
        assert commit_log.write("a/b", {"state": "open"}, 0) == 1
        assert commit_log.read("a/b") == (1, {"state": "open"})
        with pytest.raises(CommitSuperseded, match="another driver has written the record of commit 'a/b'"):
            commit_log.write("a/b", {"state": "other"}, 0)
        assert commit_log.write("a/b", {"state": "decided"}, 1) == 2
    assert commit_log.write("a/b", {"state": "decided"}, 1) == 2
    assert FileCommitLog(tmp_path / "log").read("a/b") == (2, {"state": "decided"})


@pytest.mark.parametrize("key", ["ä" * 200, " " * 84, "\U0001f600" * 200, "a" * 250, "a" * 251, "a/" * 100])
def test_a_commit_log_accepts_ids_of_any_length(tmp_path, key):
    """Each commit id has its own record, even if two long ids differ only in their last character."""
    commit_log = FileCommitLog(tmp_path)
    for id_ in (key, f"{key[:-1]}b"):
        assert commit_log.read(id_) is None
        assert commit_log.write(id_, {"id": id_}, 0) == 1
    assert [commit_log.read(id_) for id_ in (key, f"{key[:-1]}b")] == [
        (1, {"id": key}),
        (1, {"id": f"{key[:-1]}b"}),
    ]


def test_a_commit_log_reads_records_of_older_versions(tmp_path):
    """Records of older versions are read. The record of an id that differs only in case is refused, not confused."""
    (tmp_path / "a%2Fb.json").write_text('{"version": 3, "record": {"state": "decided"}}')
    commit_log = FileCommitLog(tmp_path)
    assert commit_log.read("a/b") == (3, {"state": "decided"})
    assert commit_log.write("a/b", {"state": "applied"}, 3) == 4
    (tmp_path / "a%2Fb.json").rename(tmp_path / "A%2Fb.json")
    with pytest.raises(CommitUnknown, match="A%2Fb.json is the record of commit 'a/b'. Use another commit id"):
        commit_log.read("A/b")


def test_one_of_many_concurrent_writers_wins(tmp_path):
    """Of many concurrent writers, one succeeds and the others get CommitSuperseded. No temporary file is left."""
    won = []

    def write(number):
        try:
            FileCommitLog(tmp_path).write("c", {"by": number}, 0)
        except CommitSuperseded:
            return
        won.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert FileCommitLog(tmp_path).read("c") == (1, {"by": won[0]})
    assert [path.name for path in tmp_path.iterdir()] == [".lock", "c.json"] or sorted(files(tmp_path)) == [
        ".lock",
        "c.json",
    ]


def test_a_killed_writer_of_the_commit_log_changes_no_record(tmp_path):
    """The unfinished file of a killed writer is never read, and the next writer deletes it."""
    commit_log = FileCommitLog(tmp_path)
    commit_log.write("c", {"state": "open"}, 0)
    for moment in ("os.fsync", "os.replace"):
        code = f"""
import os, signal, stagecrew
{moment} = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
stagecrew.operators.FileCommitLog({str(tmp_path)!r}).write("c", {{"state": "decided"}}, 1)
"""
        killed = subprocess.run([sys.executable, "-c", code], check=False, timeout=60)
        assert killed.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) > 2
    assert commit_log.read("c") == (1, {"state": "open"})
    commit_log.write("other", {"state": "open"}, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "c.json", "other.json"]
    assert (tmp_path / "other.json").stat().st_mode & 0o77 == 0


def test_an_unreadable_record_fails_the_commit(tmp_path):
    """If a record cannot be read, its decision is unknown, so no task runs. The error names the file."""
    trial = sqlite(tmp_path)
    (tmp_path / "log" / "c.json").write_text('{"version": 1')
    with pytest.raises(CommitUnknown, match="record of commit 'c' cannot be read from .*c.json: JSONDecodeError"):
        commit(trial.make_sink(), trial.commit_log, "c", SCHEMA, lambda staging: 1 / 0)


def test_a_folder_without_locks_fails_the_commit(tmp_path, monkeypatch):
    """If the file system of the commit log has no locks, nothing is decided, and the error names the folder."""

    def flock(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    commit_log = FileCommitLog(tmp_path)
    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(CommitFailed, match=f"could not be written to {tmp_path}.*No locks available"):
        commit_log.write("c", {"state": "open"}, 0)
    assert commit_log.read("c") is None


def test_the_memory_log_forgets_only_ended_commits():
    """The memory log keeps all pending commits and the latest ended ones.

    The driver of a forgotten commit cannot overwrite a later record with the same id.
    """
    commit_log = MemoryCommitLog()
    old = commit_log.write("c", {"state": "open"}, 0)
    commit_log.write("pending", {"state": "decided"}, 0)
    commit_log.write("c", {"state": "aborted"}, old)
    for number in range(100):
        commit_log.write(f"c{number}", {"state": "applied"}, 0)
    assert commit_log.read("c") is None
    assert commit_log.read("c0") is not None
    assert commit_log.read("pending") is not None
    commit_log.write("c", {"state": "open"}, 0)
    with pytest.raises(CommitSuperseded):
        commit_log.write("c", {"state": "decided"}, old)


def test_the_folder_of_a_commit_log_may_contain_links(tmp_path, monkeypatch):
    """The path of a commit log's folder is resolved as the operating system resolves it, including symbolic links."""
    (tmp_path / "far" / "in").mkdir(parents=True)
    (tmp_path / "near").mkdir()
    (tmp_path / "near" / "link").symlink_to(tmp_path / "far" / "in")
    monkeypatch.chdir(tmp_path / "near")
    commit_log = FileCommitLog("link/../log")
    assert commit_log.write("c", {"state": "open"}, 0) == 1
    assert [folder.name for folder in (tmp_path / "far").iterdir()] != ["in"]
    assert [folder.name for folder in (tmp_path / "near").iterdir()] == ["link"]


def test_a_commit_log_in_the_home_folder(tmp_path, monkeypatch):
    """~ in the path of a commit log is the home folder. A `file:` URI is refused, and creates no folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    commit_log_of("~/log")
    with pytest.raises(OperatorMisused, match="file:///data/log"):
        commit_log_of("file:/data/log")
    assert files(tmp_path) == [] or all(name.startswith("home/") for name in files(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_a_commit_log_in_an_object_store_is_refused_without_its_secrets():
    """The error for a commit log that is no local folder does not repeat the keys in its address."""
    with pytest.raises(OperatorMisused, match="s3://bucket/log") as refused:
        commit_log_of("s3://KEY:SECRET@bucket/log?token=SECRET")
    assert "SECRET" not in str(refused.value)
