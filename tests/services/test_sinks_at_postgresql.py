"""PostgreSQL as a sink and as an Iceberg catalog: lost connections, missing privileges, stalled networks, refusals."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import threading
import time

import psycopg
import pyarrow as pa
import pyarrow.fs
import pytest

from stagecrew.errors import (
    CommitConflict,
    CommitFailed,
    CommitPending,
    CommitUnknown,
    RecordUnreadable,
)
from stagecrew.operators.commit_log import MemoryCommitLog
from stagecrew.operators.commits import Staging, abandon, commit, resume
from stagecrew.operators.sinks import DatabaseSink, postgres
from support.commit_schedules import disconnect, rows_appear_at_once
from support.commit_trials import SCHEMA, Driver, Tasks
from support.local_sinks import iceberg
from support.network_namespaces import other_host
from support.postgres import postgresql
from support.server_trials import postgresql_trial
from support.tcp_proxy import Proxy


@pytest.fixture(scope="module")
def postgresql_server():
    with postgresql() as server:
        yield server


def test_sql_in_a_record_or_a_column_name_is_not_executed(postgresql_server, tmp_path):
    """A changed record whose run id contains SQL is refused, and SQL in a column's name is quoted. The table stays."""
    trial, tasks = postgresql_trial(postgresql_server, tmp_path, 0), Tasks(1)
    table = trial.make_sink()._table
    trial.drive(Driver(), tasks, "c")
    _, record = trial.commit_log.read("c")
    for run in (f"{record['run']}; DROP TABLE {table}", f'x"; DROP TABLE {table}; --'):
        for fields in ({"run": run}, {"before": [run]}, {"run": run, "state": "open"}):
            copy = MemoryCommitLog()
            copy.write("c", record | fields, 0)
            for use in (
                lambda copy=copy: commit(trial.make_sink(), copy, "c", SCHEMA, lambda staging: 1 / 0),
                lambda copy=copy: abandon(trial.make_sink(), copy, "c"),
            ):
                with pytest.raises(RecordUnreadable, match="is not a run id. Nothing was changed or deleted"):
                    use()
        trial.make_sink().discard(Staging("c", run, SCHEMA), ())
    assert sorted(trial.visible()) == tasks.expected
    name = f'a"; DROP TABLE {table}; --'
    with psycopg.connect(postgresql_server.url, autocommit=True) as database:
        database.execute('ALTER TABLE {} ADD COLUMN "{}" BIGINT'.format(table, name.replace('"', '""')))
    schema = pa.schema([*SCHEMA, (name, pa.int64())])
    batch = pa.record_batch([pa.array([7]), pa.array(["a"]), pa.array([8])], schema=schema)
    sink = trial.make_sink()
    commit(sink, trial.commit_log, "d", schema, lambda staging: [sink.stage(staging, 0, 1, iter([batch]))])
    assert (7, "a") in trial.visible()
    assert trial.leftovers() == []


@pytest.fixture
def catalog_behind_proxy(postgresql_server, tmp_path):
    """An Iceberg catalog in PostgreSQL behind a proxy.

    Yields the proxy, and a trial whose sinks connect through the proxy. Its reads bypass the proxy.
    """
    name = "c" + tmp_path.name.replace("-", "_").lower()
    with psycopg.connect(postgresql_server.url, autocommit=True) as database:
        database.execute(f"CREATE DATABASE {name}")
    url = postgresql_server.url.replace("postgresql://", "postgresql+psycopg://").replace("/postgres", f"/{name}")
    with Proxy(postgresql_server.port) as proxy:
        trial = iceberg(tmp_path, url)
        proxied = url.replace(f"127.0.0.1:{postgresql_server.port}", proxy.hosts)
        make_sink = trial.make_sink

        def make_proxied_sink():
            sink = make_sink()
            sink._properties["uri"] = proxied
            return sink

        trial.make_sink = make_proxied_sink
        yield proxy, trial


def test_a_lost_connection_to_the_catalog_is_reported(postgresql_server, catalog_behind_proxy):
    """If the connection is lost before anything runs, the commit fails with an error that says so.

    If it is lost after the decision, the staged files stay, and a repeat completes the commit. No error contains the
    password.
    """
    proxy, trial = catalog_behind_proxy
    tasks = Tasks(1)
    disconnect(proxy)
    with pytest.raises(CommitFailed, match="table db.target cannot be loaded: OperationalError") as failed:
        commit(trial.make_sink(), trial.commit_log, "c", SCHEMA, lambda staging: 1 / 0)
    assert postgresql_server.password not in str(failed.value)
    proxy._to = postgresql_server.port

    def run(staging):
        messages = tasks.run(trial.make_sink(), staging)
        disconnect(proxy)
        return messages

    with pytest.raises(CommitPending, match="table db.target cannot be loaded: OperationalError") as pending:
        commit(trial.make_sink(), trial.commit_log, "c", SCHEMA, run, sleep=lambda _: None)
    assert postgresql_server.password not in str(pending.value)
    proxy._to = postgresql_server.port
    assert trial.visible() == []
    assert commit(trial.make_sink(), trial.commit_log, "c", SCHEMA, lambda staging: 1 / 0).repeated
    assert sorted(trial.visible()) == tasks.expected
    assert trial.leftovers() == []


@pytest.mark.parametrize("lost_message", ["request", "reply"])
def test_files_are_added_once_when_the_catalogs_reply_is_lost(catalog_behind_proxy, lost_message):
    """If the connection is lost during the catalog's commit, before or after its effect, the files are added once."""
    import sqlalchemy

    proxy, trial = catalog_behind_proxy
    tasks, timers = Tasks(1), []

    def hold_once(connection):
        if not timers:
            timers.append(threading.Timer(0.5, lambda: (proxy.cut(), proxy.heal())))
            timers[0].start()
            proxy.hold("to" if lost_message == "request" else "from")

    def run(staging):
        messages = tasks.run(trial.make_sink(), staging)
        sqlalchemy.event.listen(sqlalchemy.Engine, "commit", hold_once)
        return messages

    try:
        commit(trial.make_sink(), trial.commit_log, "c", SCHEMA, run, sleep=lambda _: None)
    finally:
        sqlalchemy.event.remove(sqlalchemy.Engine, "commit", hold_once)
    timers[0].join()
    assert sorted(trial.visible()) == tasks.expected
    assert trial.leftovers() == []


def test_staging_fails_in_bounded_time_when_the_network_stalls(postgresql_server, tmp_path, monkeypatch):
    """If the network stalls silently while rows are sent, staging fails in bounded time.

    Then nothing is visible, and no staged rows are left.
    """
    monkeypatch.setattr(postgres, "_MAX_SILENCE", 1)
    monkeypatch.setattr(postgres, "_STAGE_LOCK_TIMEOUT", 1)
    trial, began = postgresql_trial(postgresql_server, tmp_path, 0), []
    with Proxy(postgresql_server.port) as proxy:
        url = postgresql_server.url.replace(f"127.0.0.1:{postgresql_server.port}", proxy.hosts)
        proxied = DatabaseSink(url, trial.make_sink()._table)
        row_inserter = proxied._row_inserter

        def stall_after_first_row(rows):
            yield next(rows)
            proxy.hold("to", "from")
            began.append(time.monotonic())
            yield from rows

        def stalling_insert(*args):
            insert = row_inserter(*args)
            return lambda rows: insert(stall_after_first_row(iter(rows)))

        proxied._row_inserter = stalling_insert
        rows = pa.record_batch({"id": list(range(20)), "text": ["x" * 4_000_000] * 20}, schema=SCHEMA)
        with pytest.raises(CommitFailed, match=r"rows for table \w+ could not be staged: OperationalError"):
            commit(
                trial.make_sink(), trial.commit_log, "c", SCHEMA,
                lambda staging: [proxied.stage(staging, 0, 1, iter([rows]))],
            )  # fmt: skip
        assert time.monotonic() - began[0] < 30
    assert trial.visible() == []
    assert trial.leftovers() == []


@pytest.mark.long  # it creates a network, which requires root
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="requires root and iproute2")
@pytest.mark.parametrize("statement", ["COMMIT", "SELECT pg_sleep(60)"])
def test_a_statement_fails_in_bounded_time_when_the_servers_host_vanishes(
    postgresql_server, tmp_path, monkeypatch, statement
):
    """If the server's host vanishes before or during a statement, the statement fails in bounded time."""
    monkeypatch.setattr(postgres, "_MAX_SILENCE", 2)
    trial = postgresql_trial(postgresql_server, tmp_path, 0)
    table = trial.make_sink()._table
    with other_host(postgresql_server.port) as host:
        sink = DatabaseSink(postgresql_server.url.replace(f"127.0.0.1:{postgresql_server.port}", host.hosts), table)
        vanish_later = threading.Timer(0.5, host.vanish)
        with pytest.raises(psycopg.OperationalError) as raised, sink._transaction() as connection:
            connection.execute(f"INSERT INTO {table} VALUES (1, 'a')")
            began = time.monotonic()
            if statement == "COMMIT":
                host.vanish()
            else:
                vanish_later.start()
                connection.execute(statement)
        assert time.monotonic() - began < 30, raised
        if statement != "COMMIT":
            vanish_later.join(30)
    assert trial.visible() in (
        [],
        [(1, "a")] if statement == "COMMIT" else [],
    )  # the COMMIT may have arrived although its reply is lost


@pytest.mark.parametrize("parameters", ["", "keepalives_idle=7&tcp_user_timeout=9000"])
def test_connections_use_keepalives_and_the_urls_own_values(postgresql_server, tmp_path, parameters):
    """A connection detects a vanished server by TCP keepalives. Values in the URL replace the defaults."""
    sink = DatabaseSink(
        f"{postgresql_server.url}?{parameters}", postgresql_trial(postgresql_server, tmp_path, 0).make_sink()._table
    )
    with sink._connected() as connection, socket.socket(fileno=os.dup(connection.fileno())) as connection_socket:

        def option(name):
            return connection_socket.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))

        assert connection_socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert option("TCP_USER_TIMEOUT") == (9000 if parameters else 60_000)
        assert option("TCP_KEEPIDLE") == (7 if parameters else 30)
        assert option("TCP_KEEPINTVL") * option("TCP_KEEPCNT") == 30


def test_a_task_stuck_in_a_transaction_loses_its_connection(postgresql_server, tmp_path, monkeypatch):
    """If a task is stuck in a transaction when the commit ends, its connection is terminated and its rows are gone."""
    monkeypatch.setattr(postgres, "_STAGE_LOCK_TIMEOUT", 1)
    trial, tasks = postgresql_trial(postgresql_server, tmp_path, 0), Tasks(1)
    zombie, slow_sink, errors = Driver(), trial.make_sink(), []
    within = slow_sink._within

    @contextlib.contextmanager
    def hold_transaction(connection):
        with within(connection):
            yield
            zombie.paused.set()
            assert zombie.resume.wait(60)

    def stage_slowly(staging):
        try:
            slow_sink.stage(staging, 0, 98, tasks.batches(tasks.expected))
        except CommitFailed as error:
            errors.append(error)

    slow_sink._within = hold_transaction
    threads: list[threading.Thread] = []
    with contextlib.closing(psycopg.connect(postgresql_server.url)) as idle_connection:

        def run(staging):
            messages = tasks.run(trial.make_sink(), staging)
            idle_connection.execute(f"INSERT INTO stagecrew_stage_{staging.run} VALUES (99, 1, 'late')")
            threads.append(threading.Thread(target=stage_slowly, args=(staging,)))
            threads[0].start()
            assert zombie.paused.wait(60)
            return messages

        commit(trial.make_sink(), trial.commit_log, "c", SCHEMA, run)
        assert sorted(trial.visible()) == tasks.expected
        assert trial.leftovers() == []
        with pytest.raises(psycopg.OperationalError, match="terminating connection"):
            idle_connection.execute("SELECT 1")
    zombie.resume.set()
    threads[0].join(60)
    assert "rows for table" in str(errors[0])
    assert sorted(trial.visible()) == tasks.expected
    assert trial.leftovers() == []


def test_a_reader_of_all_tables_keeps_its_connection(postgresql_server, tmp_path, monkeypatch, caplog):
    """A session that reads the stage table when the commit ends, as pg_dump does, is not terminated.

    The commit succeeds, and a warning names the table that is left. A repeat of the commit deletes it.
    """
    monkeypatch.setattr(postgres, "_STAGE_LOCK_TIMEOUT", 1)
    trial, tasks = postgresql_trial(postgresql_server, tmp_path, 0), Tasks(1)
    with contextlib.closing(psycopg.connect(postgresql_server.url)) as dump:

        def run(staging):
            messages = tasks.run(trial.make_sink(), staging)
            dump.execute(f"LOCK TABLE stagecrew_stage_{staging.run} IN ACCESS SHARE MODE")
            return messages

        commit(trial.make_sink(), trial.commit_log, "c", SCHEMA, run, sleep=lambda _: None)
        assert sorted(trial.visible()) == tasks.expected
        assert len(trial.leftovers()) == 1
        assert "LockNotAvailable" in caplog.text
        dump.commit()
    assert commit(trial.make_sink(), trial.commit_log, "c", SCHEMA, lambda staging: 1 / 0).repeated
    assert trial.leftovers() == []


def test_names_with_percent_signs(postgresql_server, tmp_path):
    """The name of a column can contain percent signs, which begin a placeholder in psycopg."""
    trial = postgresql_trial(postgresql_server, tmp_path, 0)
    table, names = trial.make_sink()._table, ["% a", "%s %(id)s"]
    with psycopg.connect(postgresql_server.url, autocommit=True) as database:
        for name in names:
            psycopg.ClientCursor(database).execute(f'ALTER TABLE {table} ADD COLUMN "{name}" BIGINT')
    schema = pa.schema([*SCHEMA, *((name, pa.int64()) for name in names)])
    batch = pa.record_batch([[7], ["a"], [8], [9]], schema=schema)
    sink = trial.make_sink()
    commit(sink, trial.commit_log, "d", schema, lambda staging: [sink.stage(staging, 0, 1, iter([batch]))])
    assert trial.visible() == [(7, "a")]
    with psycopg.connect(postgresql_server.url) as database:
        quoted = ", ".join(f'"{name}"' for name in names)
        assert psycopg.ClientCursor(database).execute(f"SELECT {quoted} FROM {table}").fetchall() == [(8, 9)]


def test_a_trigger_that_skips_rows_is_a_refusal(postgresql_server, tmp_path):
    """If a trigger of the table skips rows, the commit raises CommitConflict and adds none. It can be repeated."""
    trial, tasks = postgresql_trial(postgresql_server, tmp_path, 0), Tasks(1)
    table = trial.make_sink()._table
    with psycopg.connect(postgresql_server.url, autocommit=True) as database:
        database.execute(f"CREATE FUNCTION skip_{table}() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'")
        database.execute(
            f"CREATE TRIGGER skip BEFORE INSERT ON {table} FOR EACH ROW WHEN (NEW.id = 3) "
            f"EXECUTE FUNCTION skip_{table}()"
        )
        with pytest.raises(
            CommitConflict, match="it added 9 of 10 rows without an error. Look for a trigger or a rule"
        ):
            trial.drive(Driver(), tasks, "c")
        assert trial.visible() == []
        assert trial.leftovers() == []
        database.execute(f"DROP FUNCTION skip_{table} CASCADE")
    trial.drive(Driver(), tasks, "c")
    assert sorted(trial.visible()) == tasks.expected


@pytest.mark.parametrize("isolation", ["read committed", "repeatable read", "serializable"])
@pytest.mark.parametrize("written_last", ["one", "other"])
def test_a_refusal_that_races_with_another_drivers_commit_is_consistent(
    postgresql_server, tmp_path, written_last, isolation
):
    """If one driver refuses a commit while another driver applies it, all rows are visible or the commit is refused.

    The refusal is for a row in the table, which is deleted in the meantime.
    """
    trial, tasks = postgresql_trial(postgresql_server, tmp_path, 0), Tasks(1)
    table = trial.make_sink()._table
    separator = "&" if "?" in postgresql_server.url else "?"
    escaped_isolation = isolation.replace(" ", "%5C%20")
    url = f"{postgresql_server.url}{separator}options=-c%20default_transaction_isolation%3D{escaped_isolation}"
    entered, may_continue, refusing, outcome = threading.Event(), threading.Event(), threading.Event(), []

    def change(text):
        with psycopg.connect(postgresql_server.url, autocommit=True) as database:
            database.execute(text)

    change(f"CREATE UNIQUE INDEX ON {table} (id)")

    class OtherDriverSink(DatabaseSink):
        """Records in its transaction that the commit is applied, then waits before it checks for a refusal."""

        def _is_free(self, database, id_, target):
            entered.set()
            assert may_continue.wait(30)
            return super()._is_free(database, id_, target)

    class RefusingSink(DatabaseSink):
        def _refuse(self, database, staging):
            if not refusing.is_set():
                refusing.set()
                change(f"DELETE FROM {table}")
                if written_last == "one":  # the other driver writes first, and each driver then waits for the other
                    thread.start()
                    assert entered.wait(30)
                    threading.Timer(0.3, may_continue.set).start()
                else:
                    may_continue.set()
            free = super()._refuse(database, staging)
            if written_last == "other":
                thread.start()
                assert entered.wait(30)
            return free

    class UnwritableCommitLog:
        """A commit log of a driver that dies before it writes the outcome."""

        read = staticmethod(trial.commit_log.read)

        def write(self, key, record, version):
            raise CommitUnknown("it was killed")

    def resume_in_other_driver():
        try:
            outcome.append(resume(OtherDriverSink(url, table), UnwritableCommitLog(), "c", sleep=lambda _: None))
        except (CommitUnknown, CommitFailed) as error:
            outcome.append(error)

    def run(staging):
        change(f"INSERT INTO {table} VALUES (7, 'there')")
        return tasks.run(trial.make_sink(), staging)

    thread = threading.Thread(target=resume_in_other_driver)
    trial.make_sink = lambda: DatabaseSink(url, table)
    try:
        report = commit(RefusingSink(url, table), trial.commit_log, "c", SCHEMA, run, sleep=lambda _: None)
    except CommitConflict:
        report = None
    thread.join(60)
    assert outcome
    assert sorted(trial.visible()) == (tasks.expected if report else [])
    assert report is None or written_last == "one"
    assert trial.commit_log.read("c")[1]["state"] == ("applied" if report else "refused")
    assert trial.leftovers() == []
    trial.drive(Driver(), tasks, "c")
    assert sorted(trial.visible()) == tasks.expected


def test_a_reader_during_the_commit_sees_all_rows_or_none(postgresql_server, tmp_path):
    """A reader sees all rows of a commit or none while the commit runs."""
    rows_appear_at_once(postgresql_trial(postgresql_server, tmp_path, 0))


def test_rows_of_the_wrong_type_fail_without_a_trace(postgresql_server, tmp_path):
    """If a column rejects the rows' type, the commit fails with an error that says so, and leaves nothing."""
    trial = postgresql_trial(postgresql_server, tmp_path, 0)
    sink = trial.make_sink()

    def stage(staging):
        mistyped = pa.record_batch({"id": ["one"], "text": ["a"]})
        return [sink.stage(staging, 0, 1, iter([mistyped]))]

    with pytest.raises(CommitFailed, match="could not be staged: InvalidTextRepresentation"):
        commit(sink, trial.commit_log, "c", SCHEMA, stage)
    assert trial.visible() == []
    assert trial.leftovers() == []


@pytest.mark.parametrize("missing", ["INSERT", "INSERT into the commits", "SELECT", "CREATE"])
def test_a_missing_privilege_is_reported_before_anything_runs(postgresql_server, tmp_path, missing):
    """A missing privilege is reported before anything runs. No row becomes visible, and no staged rows are left."""
    trial = postgresql_trial(postgresql_server, tmp_path, 0)
    table = trial.make_sink()._table
    trial.drive(Driver(), Tasks(1), "first")  # the table of commits exists, created by another user
    privileges = {"INSERT", "SELECT"} - {missing}
    with psycopg.connect(postgresql_server.url, autocommit=True) as database:
        user = f"reader_{table}"
        database.execute(f"CREATE ROLE {user} LOGIN PASSWORD '{postgresql_server.password}'")
        if missing != "CREATE":
            database.execute(f"GRANT CREATE ON SCHEMA public TO {user}")
        database.execute(f"GRANT {', '.join(privileges)} ON {table} TO {user}")
        commit_privileges = {"INSERT", "SELECT"} - ({"INSERT"} if missing.endswith("commits") else set())
        database.execute(f"GRANT {', '.join(commit_privileges)} ON stagecrew_commits TO {user}")
    sink = DatabaseSink(postgresql_server.url.replace("//crew:", f"//{user}:"), table)
    with pytest.raises(
        CommitFailed, match=f"table {table}.*cannot be .*: InsufficientPrivilege: permission denied for"
    ):
        commit(sink, trial.commit_log, "c", SCHEMA, lambda staging: 1 / 0)
    assert len(trial.visible()) == 40
    assert trial.leftovers() == []


def test_create_insert_and_select_are_sufficient_privileges(postgresql_server, tmp_path):
    """A commit needs only the right to create tables, and INSERT and SELECT on the target and the table of commits."""
    trial = postgresql_trial(postgresql_server, tmp_path, 0)
    table = trial.make_sink()._table
    trial.drive(Driver(), Tasks(1), "first")
    with psycopg.connect(postgresql_server.url, autocommit=True) as database:
        user = f"writer_{table}"
        database.execute(f"CREATE ROLE {user} LOGIN PASSWORD '{postgresql_server.password}'")
        database.execute(f"GRANT CREATE ON SCHEMA public TO {user}")
        database.execute(f"GRANT INSERT, SELECT ON {table}, stagecrew_commits TO {user}")
    sink = DatabaseSink(postgresql_server.url.replace("//crew:", f"//{user}:"), table)
    assert commit(sink, trial.commit_log, "c", SCHEMA, lambda staging: Tasks(1).run(sink, staging)).rows == 40
    assert len(trial.visible()) == 80
    assert trial.leftovers() == []


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("{password}@", "wrong-{password}@", "password authentication failed for user"),
        ("/postgres", "/postgres?sslmode=require", "server does not support SSL, but SSL was required"),
        ("/postgres", "/no_such_database", 'database "no_such_database" does not exist'),
    ],
)
def test_a_refused_connection_names_its_reason(postgresql_server, old, new, reason):
    """The error says that the password is wrong, TLS is missing, or the database does not exist.

    The server's own error is its cause.
    """
    old, new = (text.replace("{password}", postgresql_server.password) for text in (old, new))
    sink = DatabaseSink(postgresql_server.url.replace(old, new), "target")
    with pytest.raises(CommitFailed, match=reason) as failed:
        sink.begin(Staging("c", "run", SCHEMA))
    assert isinstance(failed.value.__cause__, psycopg.OperationalError)
    assert postgresql_server.password not in f"{failed.value} {failed.value.__cause__}"


def test_a_lost_connection_aborts_staging_and_retries_the_commit(postgresql_server, tmp_path):
    """If a connection is lost while rows are staged, the commit fails with a clear error and leaves nothing.

    If it is lost while the commit is applied, that is retried.
    """
    trial = postgresql_trial(postgresql_server, tmp_path, 0)
    sink, tasks = trial.make_sink(), Tasks(1)

    def terminate_connections():
        with psycopg.connect(postgresql_server.url, autocommit=True) as database:
            database.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")

    def lose_connection(batches):
        yield next(batches)
        terminate_connections()
        yield from batches

    def stage(staging):
        batches = [pa.record_batch({"id": [n], "text": ["a"]}, schema=SCHEMA) for n in range(3)]
        return [sink.stage(staging, 0, 1, lose_connection(iter(batches)))]

    with pytest.raises(CommitFailed, match="could not be staged: AdminShutdown"):
        commit(sink, trial.commit_log, "c", SCHEMA, stage)
    assert trial.visible() == []
    assert trial.leftovers() == []

    within, times = sink._within, []

    @contextlib.contextmanager
    def lose_connection_once(database):
        with within(database):
            yield
            if len(times) == 1:
                terminate_connections()
            times.append(1)

    def stage_then_disturb(staging):
        messages = tasks.run(trial.make_sink(), staging)
        sink._within = lose_connection_once
        times.append(1)
        return messages

    report = commit(sink, trial.commit_log, "d", SCHEMA, stage_then_disturb, sleep=lambda _: None)
    assert report.rows == 40
    assert sorted(trial.visible()) == tasks.expected
    assert trial.leftovers() == []


def test_an_unreachable_server_is_reported(tmp_path):
    """If the server is unreachable before anything runs, the commit fails.

    If it is unreachable after the decision, the commit is pending, and the staged rows stay for a repeat.
    """
    with postgresql() as postgresql_server:
        trial = postgresql_trial(postgresql_server, tmp_path, 0)
        sink = trial.make_sink()
        staging: list[Staging] = []

        def run(given_staging):
            staging.append(given_staging)
            return Tasks(1).run(trial.make_sink(), given_staging)

        class UnreachableSink(DatabaseSink):
            def commit(self, staging, messages):
                raise psycopg.OperationalError("the server is gone")

        sink.__class__ = UnreachableSink
        with pytest.raises(CommitPending, match="the server is gone"):
            commit(sink, trial.commit_log, "c", SCHEMA, run, sleep=lambda _: None)
        assert trial.leftovers() != []
        assert trial.drive(Driver(), Tasks(2), "c").repeated
        assert len(trial.visible()) == 40
        assert trial.leftovers() == []
        trial.make_sink()
    with pytest.raises(CommitFailed, match="cannot be reached: OperationalError: .*Connection refused") as failed:
        commit(trial.make_sink(), trial.commit_log, "e", SCHEMA, lambda staging: [])
    assert isinstance(failed.value.__cause__, psycopg.OperationalError)
    assert postgresql_server.password not in str(failed.value)
