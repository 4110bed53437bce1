"""Creates a `Trial` (`commit_trials`) of each sink that writes to a server: PostgreSQL and S3."""

from __future__ import annotations

import contextlib

import psycopg
import pyarrow.fs

from stagecrew.operators.commit_log import FileCommitLog
from stagecrew.operators.sinks import DatabaseSink, ObjectSink, read_committed
from support.commit_trials import Trial, files_below, watch_files, watch_transactions


def postgresql_trial(postgresql_server, folder, number):
    """A trial with a table of its own."""
    table = f"target_{folder.name}_{number}".replace("-", "_").lower()

    def query(text):
        with psycopg.connect(postgresql_server.url) as database:
            return database.execute(text).fetchall()

    with psycopg.connect(postgresql_server.url, autocommit=True) as database:
        database.execute(f'CREATE TABLE {table} (id BIGINT, "text" TEXT)')
        with contextlib.suppress(psycopg.Error):  # the first commit creates this table
            database.execute("TRUNCATE stagecrew_commits")

    def state():
        tables = query("SELECT relname FROM pg_class WHERE relname LIKE 'stagecrew%' ORDER BY 1")
        commits = query("SELECT * FROM stagecrew_commits ORDER BY 1, 2") if ("stagecrew_commits",) in tables else []
        return tables, commits, query(f"SELECT * FROM {table} ORDER BY 1")

    return Trial(
        lambda: DatabaseSink(postgresql_server.url, table),
        FileCommitLog(folder / f"log-{number}"),
        lambda: query(f"SELECT id, text FROM {table}"),
        lambda: [name for (name,) in query("SELECT relname FROM pg_class WHERE relname LIKE 'stagecrew_stage%'")],
        watch_transactions,
        state,
    )


def s3_trial(s3_filesystem, folder, number):
    """A trial with a prefix of its own."""
    path = f"bucket/{folder.name}/{number}"

    def visible():
        try:
            table = read_committed(path, s3_filesystem).to_table()
        except FileNotFoundError:
            return []
        return [(row["id"], row["text"]) for row in table.to_pylist()]

    def leftovers():
        infos = s3_filesystem.get_file_info(pyarrow.fs.FileSelector(path, recursive=True, allow_not_found=True))
        try:
            committed = set(read_committed(path, s3_filesystem).files)
        except FileNotFoundError:
            committed = set()
        names = [info.path for info in infos if info.type == pyarrow.fs.FileType.File]
        return [name for name in names if name not in committed and "/_stagecrew/" not in name]

    commit_log = FileCommitLog(folder / f"log-{number}")
    return Trial(
        lambda: ObjectSink(path, s3_filesystem),
        commit_log,
        visible,
        leftovers,
        watch_files,
        lambda: files_below(s3_filesystem, path),
    )
