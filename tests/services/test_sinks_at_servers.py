"""Sinks at real servers: PostgreSQL, and an S3 server."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import socket
import threading
import time

import psycopg
import pyarrow as pa
import pyarrow.fs
import pytest

from networks import other_host
from objectstore import s3_server
from postgres import postgresql
from schedules import (
    at_once,
    failing_at_each_moment,
    going_on_at_each_moment,
    killed_at_each_moment,
    raising_once,
)
from sinks import (
    SCHEMA,
    Driver,
    Killed,
    Tasks,
    Trial,
    connections_that_are_lost,
    files_below,
    first_commits_of_two_schemas,
    iceberg,
    late_at_each_moment,
    looked_at_within,
    lose,
    other_schemas,
    seeded,
    undisturbed,
    watch_files,
    watch_transactions,
)
from stagecrew.errors import (
    CommitConflict,
    CommitFailed,
    CommitPending,
    CommitUnknown,
    CommitUnreadable,
    OperatorMisused,
)
from stagecrew.operators.commit_log import FileCommitLog, MemoryCommitLog
from stagecrew.operators.commits import Staging, abandon, commit, resume
from stagecrew.operators.sinks import DatabaseSink, ObjectSink, postgres, read_committed
from zookeeper import Proxy


@pytest.fixture(scope="module")
def server():
    with postgresql() as found:
        yield found


def at_postgresql(server, folder, number):
    """A table of its own."""
    table = f"target_{folder.name}_{number}".replace("-", "_").lower()

    def query(text):
        with psycopg.connect(server.url) as database:
            return database.execute(text).fetchall()

    with psycopg.connect(server.url, autocommit=True) as database:
        database.execute(f'CREATE TABLE {table} (id BIGINT, "text" TEXT)')
        with contextlib.suppress(psycopg.Error):
            database.execute("TRUNCATE stagecrew_commits")

    def state():
        tables = query("SELECT relname FROM pg_class WHERE relname LIKE 'stagecrew%' ORDER BY 1")
        ids = query("SELECT * FROM stagecrew_commits ORDER BY 1, 2") if ("stagecrew_commits",) in tables else []
        return tables, ids, query(f"SELECT * FROM {table} ORDER BY 1")

    return Trial(
        lambda: DatabaseSink(server.url, table),
        FileCommitLog(folder / f"log-{number}"),
        lambda: query(f"SELECT id, text FROM {table}"),
        lambda: [name for (name,) in query("SELECT relname FROM pg_class WHERE relname LIKE 'stagecrew_stage%'")],
        watch_transactions,
        state,
    )


@pytest.fixture(scope="module")
def s3():
    """A file system with a bucket."""
    with s3_server() as (filesystem, _):
        yield filesystem


def at_s3(s3, folder, number):
    """A prefix of its own."""
    path = f"bucket/{folder.name}/{number}"

    def visible():
        try:
            table = read_committed(path, s3).to_table()
        except FileNotFoundError:
            return []
        return [(row["id"], row["text"]) for row in table.to_pylist()]

    def left():
        infos = s3.get_file_info(pyarrow.fs.FileSelector(path, recursive=True, allow_not_found=True))
        try:
            known = set(read_committed(path, s3).files)
        except FileNotFoundError:
            known = set()
        names = [info.path for info in infos if info.type == pyarrow.fs.FileType.File]
        return [name for name in names if name not in known and "/_stagecrew/" not in name]

    commit_log = FileCommitLog(folder / f"log-{number}")
    return Trial(lambda: ObjectSink(path, s3), commit_log, visible, left, watch_files, lambda: files_below(s3, path))


@pytest.fixture(params=["postgresql", "s3"])
def make(request, tmp_path):
    """Makes trials."""
    if request.param == "postgresql":
        server = request.getfixturevalue("server")
        return lambda number: at_postgresql(server, tmp_path, number)
    filesystem = request.getfixturevalue("s3")
    return lambda number: at_s3(filesystem, tmp_path, number)


def test_once(make):
    """All rows are there once, and a repeat changes nothing."""
    trial, tasks = make(0), Tasks(1)
    assert trial.drive(Driver(), tasks).rows == 40
    assert sorted(trial.visible()) == tasks.expected
    assert trial.drive(Driver(), Tasks(2)).repeated
    assert sorted(trial.visible()) == tasks.expected
    assert trial.left() == []


@pytest.mark.parametrize("seed", range(3))
def test_random_faults(make, seed):
    """Drivers die, pause and go on at random."""
    seeded(make(seed), seed, len(undisturbed(make("undisturbed"))))


@pytest.mark.long
def test_random_faults_at_length(make):
    """At least a hundred for each."""
    count = len(undisturbed(make("undisturbed")))
    for seed in range(100, 210):
        seeded(make(seed), seed, count)


#: Of the moments of a driver those of `make test`. They come in twos, before and after.
EVERY = pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.long)], ids=["some", "all"])


@EVERY
def test_the_driver_is_killed_at_each_moment(make, every):
    """Before and after every write: readers see all rows or none, and the next driver brings all, once, and leaves nothing."""
    killed_at_each_moment(make, every)


@EVERY
def test_a_write_that_fails_at_each_moment(make, every):
    """Once, before or after its effect: an error before the decision; behind it the driver goes on by itself."""
    failing_at_each_moment(make, every)


@EVERY
def test_an_old_driver_goes_on(make, every):
    """One that pauses before or after any write, and goes on when another has committed or aborted, changes nothing."""
    going_on_at_each_moment(make, every)


def test_a_commit_that_raises_once(make):
    """Before or after its effect; it is tried again. When it raises for good, a later driver goes on with what was staged."""
    raising_once(make)


def test_two_that_have_decided(make):
    """Both land, when both commit at the same time."""
    for number in range(3):
        assert at_once(make(number), "before commit") == []


@pytest.mark.parametrize("how", ["dies_at", "raises_at"])
def test_a_manifest_whose_write_is_given_up(s3, tmp_path, how):
    """What the store gets of it when its stream is collected is no manifest, nor takes the place of one."""

    opening = Driver(**{how: 4})  # behind the opening of the second stream: the first is that of the run's mark

    def watch(_driver, sink):
        sink._filesystem = opening.watched(sink._filesystem, ["open_output_stream"])

    trial, tasks = at_s3(s3, tmp_path, 0), Tasks(1)
    trial.watch = watch
    with contextlib.suppress(Killed):
        trial.drive(Driver(), tasks)
    assert opening.moments >= 4
    trial.watch = lambda _driver, _sink: None
    gc.collect()
    assert sorted(trial.visible()) == ([] if how == "dies_at" else tasks.expected)
    trial.drive(Driver(), tasks)
    assert sorted(trial.visible()) == tasks.expected


def test_other_content_is_refused(make):
    """An id that is used again for other data raises with both values, also where the sink alone knows it; a repeat is one."""
    trial, tasks = make(0), Tasks(1)

    def lands(content, commit_log):
        return commit(
            trial.make_sink(),
            commit_log,
            "c",
            SCHEMA,
            lambda staging: tasks.run(trial.make_sink(), staging),
            content=content,
        )

    assert not lands("monday", trial.commit_log).repeated
    before = trial.state()
    for commit_log in (trial.commit_log, MemoryCommitLog()):
        assert lands("monday", commit_log).repeated
        with pytest.raises(OperatorMisused, match="content is 'tuesday', there 'monday'"):
            lands("tuesday", commit_log)
    assert trial.state() == before
    long = "\U0001f600\x00'" * 100
    commit_log = MemoryCommitLog()
    staged = commit(
        trial.make_sink(),
        commit_log,
        "long",
        SCHEMA,
        lambda staging: tasks.run(trial.make_sink(), staging),
        content=long,
    )
    assert not staged.repeated
    assert len(trial.make_sink().stored_mark("long")) <= 400


def test_a_record_with_sql_in_it(server, tmp_path):
    """A run's id in a changed record, and a column's name, are no SQL: the record is refused, and the table stays."""
    trial, tasks = at_postgresql(server, tmp_path, 0), Tasks(1)
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
                with pytest.raises(CommitUnreadable, match="is no id of a run. Nothing was changed or deleted"):
                    use()
        trial.make_sink().discard(Staging("c", run, SCHEMA), ())
    assert sorted(trial.visible()) == tasks.expected
    name = f'a"; DROP TABLE {table}; --'
    with psycopg.connect(server.url, autocommit=True) as there:
        there.execute('ALTER TABLE {} ADD COLUMN "{}" BIGINT'.format(table, name.replace('"', '""')))
    schema = pa.schema([*SCHEMA, (name, pa.int64())])
    batch = pa.record_batch([pa.array([7]), pa.array(["a"]), pa.array([8])], schema=schema)
    sink = trial.make_sink()
    commit(sink, trial.commit_log, "d", schema, lambda staging: [sink.stage(staging, 0, 1, iter([batch]))])
    assert (7, "a") in trial.visible()
    assert trial.left() == []


def test_two_at_once(make):
    """Both land."""
    assert at_once(make(0), "staged") == []


@pytest.mark.parametrize("moments", [(2, 4), pytest.param((), marks=pytest.mark.long)], ids=["some", "all"])
def test_a_task_that_is_late(make, moments):
    """Whenever it pauses in its writing until the commit is over, or was given up: nothing is visible of it, nothing left."""
    late_at_each_moment(make, moments)


@pytest.mark.parametrize("moments", [(2, 4), pytest.param(range(1, 60), marks=pytest.mark.long)], ids=["some", "all"])
def test_first_commits_of_two_schemas(s3, tmp_path, moments):
    """Both find nothing there: one lands, the other is told which commit has another schema."""
    first_commits_of_two_schemas(lambda number: at_s3(s3, tmp_path, number), moments)


@pytest.mark.parametrize(
    "moments", [(14, 40), pytest.param(range(1, 200), marks=pytest.mark.long)], ids=["some", "all"]
)
def test_connections_to_a_store_that_are_lost(s3, tmp_path, moments):
    """At any call: a clear error, and never half is visible; a repeat finishes what was decided, and leaves nothing."""
    port = int(s3.__reduce__()[1][0]["endpoint_override"].rpartition(":")[2])
    with Proxy(port) as proxy:
        through = pyarrow.fs.S3FileSystem(
            access_key="test", secret_key="test", endpoint_override=f"http://{proxy.hosts}", region="us-east-1",
            request_timeout=10, connect_timeout=5, retry_strategy=pyarrow.fs.AwsStandardS3RetryStrategy(max_attempts=1),
        )  # fmt: skip

        def make(number):
            made = at_s3(s3, tmp_path, number)
            path = made.make_sink()._path
            made.make_sink = lambda: ObjectSink(path, through)
            return made

        connections_that_are_lost(make, proxy, moments)


@pytest.fixture
def catalogue(server, tmp_path):
    """Iceberg's, on PostgreSQL, behind a proxy: the proxy, and a trial whose sinks go through it, and whose eyes do not."""
    name = "c" + tmp_path.name.replace("-", "_").lower()
    with psycopg.connect(server.url, autocommit=True) as database:
        database.execute(f"CREATE DATABASE {name}")
    url = server.url.replace("postgresql://", "postgresql+psycopg://").replace("/postgres", f"/{name}")
    with Proxy(server.port) as proxy:
        made = iceberg(tmp_path, url)
        through = url.replace(f"127.0.0.1:{server.port}", proxy.hosts)
        make_sink = made.make_sink

        def at_proxy():
            sink = make_sink()
            sink._properties["uri"] = through
            return sink

        made.make_sink = at_proxy
        yield proxy, made


def test_a_connection_to_a_catalogue_that_is_lost(server, catalogue):
    """Before anything runs: it is said so. Behind the decision: what was staged stays, and a repeat goes on. Nothing is told of passwords."""
    proxy, trial = catalogue
    tasks = Tasks(1)
    lose(proxy)
    with pytest.raises(CommitFailed, match="table db.target cannot be loaded: OperationalError") as failed:
        commit(trial.make_sink(), trial.commit_log, "c", SCHEMA, lambda staging: 1 / 0)
    assert server.password not in str(failed.value)
    proxy._to = server.port

    def run(staging):
        messages = tasks.run(trial.make_sink(), staging)
        lose(proxy)
        return messages

    with pytest.raises(CommitPending, match="table db.target cannot be loaded: OperationalError") as pending:
        commit(trial.make_sink(), trial.commit_log, "c", SCHEMA, run, sleep=lambda _: None)
    assert server.password not in str(pending.value)
    proxy._to = server.port
    assert trial.visible() == []
    assert commit(trial.make_sink(), trial.commit_log, "c", SCHEMA, lambda staging: 1 / 0).repeated
    assert sorted(trial.visible()) == tasks.expected
    assert trial.left() == []


@pytest.mark.parametrize("what", ["question", "answer"])
def test_a_catalogue_whose_answer_is_lost(catalogue, what):
    """It was told of the files, or was not, and nobody knows: asked again, it has them once."""
    import sqlalchemy

    proxy, trial = catalogue
    tasks, lost = Tasks(1), []

    def loses(connection):
        if not lost:
            lost.append(threading.Timer(0.5, lambda: (proxy.cut(), proxy.heal())))
            lost[0].start()
            proxy.hold("to" if what == "question" else "from")

    def run(staging):
        messages = tasks.run(trial.make_sink(), staging)
        sqlalchemy.event.listen(sqlalchemy.Engine, "commit", loses)
        return messages

    try:
        commit(trial.make_sink(), trial.commit_log, "c", SCHEMA, run, sleep=lambda _: None)
    finally:
        sqlalchemy.event.remove(sqlalchemy.Engine, "commit", loses)
    lost[0].join()
    assert sorted(trial.visible()) == tasks.expected
    assert trial.left() == []


def test_a_server_that_takes_nothing_any_more(server, tmp_path, monkeypatch):
    """A network that stands still while rows are sent, without a word: an error in bounded time, nothing visible, nothing left."""
    monkeypatch.setattr(postgres, "_SILENCE", 1)
    monkeypatch.setattr(postgres, "_PATIENCE", 1)
    trial, began = at_postgresql(server, tmp_path, 0), []
    with Proxy(server.port) as proxy:
        url = server.url.replace(f"127.0.0.1:{server.port}", proxy.hosts)
        through = DatabaseSink(url, trial.make_sink()._table)
        inserting = through._inserting

        def stands_still(rows):
            yield next(rows)
            proxy.hold("to", "from")
            began.append(time.monotonic())
            yield from rows

        def held(*args):
            insert = inserting(*args)
            return lambda rows: insert(stands_still(iter(rows)))

        through._inserting = held
        rows = pa.record_batch({"id": list(range(20)), "text": ["x" * 4_000_000] * 20}, schema=SCHEMA)
        with pytest.raises(CommitFailed, match=r"rows for table \w+ could not be staged: OperationalError"):
            commit(
                trial.make_sink(), trial.commit_log, "c", SCHEMA,
                lambda staging: [through.stage(staging, 0, 1, iter([rows]))],
            )  # fmt: skip
        assert time.monotonic() - began[0] < 30
    assert trial.visible() == []
    assert trial.left() == []


@pytest.mark.long  # it makes a network, which only root may
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="only root makes networks, by iproute2")
@pytest.mark.parametrize("what", ["COMMIT", "SELECT pg_sleep(60)"])
def test_a_server_whose_host_vanishes(server, tmp_path, monkeypatch, what):
    """Behind the question, or while it is at its answer, and nothing comes of it any more: an error in bounded time."""
    monkeypatch.setattr(postgres, "_SILENCE", 2)
    trial = at_postgresql(server, tmp_path, 0)
    table = trial.make_sink()._table
    with other_host(server.port) as host:
        sink = DatabaseSink(server.url.replace(f"127.0.0.1:{server.port}", host.hosts), table)
        gone = threading.Timer(0.5, host.vanish)
        with pytest.raises(psycopg.OperationalError) as lost, sink._transaction() as connection:
            connection.execute(f"INSERT INTO {table} VALUES (1, 'a')")
            began = time.monotonic()
            if what == "COMMIT":
                host.vanish()
            else:
                gone.start()
                connection.execute(what)
        assert time.monotonic() - began < 30, lost
        if what != "COMMIT":
            gone.join(30)
    assert trial.visible() in ([], [(1, "a")] if what == "COMMIT" else [])  # it was asked, and its answer is lost


@pytest.mark.parametrize("own", ["", "keepalives_idle=7&tcp_user_timeout=9000"])
def test_a_server_that_vanishes_is_found_out(server, tmp_path, own):
    """A connection asks whether its server is there; who says how often in the url is heard."""
    sink = DatabaseSink(f"{server.url}?{own}", at_postgresql(server, tmp_path, 0).make_sink()._table)
    with sink._connected() as connection, socket.socket(fileno=os.dup(connection.fileno())) as there:

        def option(name):
            return there.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))

        assert there.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert option("TCP_USER_TIMEOUT") == (9000 if own else 60_000)
        assert option("TCP_KEEPIDLE") == (7 if own else 30)
        assert option("TCP_KEEPINTVL") * option("TCP_KEEPCNT") == 30


def test_a_task_that_holds_on_to_its_stage(server, tmp_path, monkeypatch):
    """One that stands still in a transaction when the commit is over: its connection is ended, and its rows are gone."""
    monkeypatch.setattr(postgres, "_PATIENCE", 1)
    trial, tasks = at_postgresql(server, tmp_path, 0), Tasks(1)
    zombie, slow, ended = Driver(), trial.make_sink(), []
    within = slow._within

    @contextlib.contextmanager
    def holds(connection):
        with within(connection):
            yield
            zombie.paused.set()
            assert zombie.goes_on.wait(60)

    def stages(staging):
        try:
            slow.stage(staging, 0, 98, tasks.batches(tasks.expected))
        except CommitFailed as error:
            ended.append(error)

    slow._within = holds
    threads: list[threading.Thread] = []
    with contextlib.closing(psycopg.connect(server.url)) as stopped:

        def run(staging):
            messages = tasks.run(trial.make_sink(), staging)
            stopped.execute(f"INSERT INTO stagecrew_stage_{staging.run} VALUES (99, 1, 'late')")
            threads.append(threading.Thread(target=stages, args=(staging,)))
            threads[0].start()
            assert zombie.paused.wait(60)
            return messages

        commit(trial.make_sink(), trial.commit_log, "c", SCHEMA, run)
        assert sorted(trial.visible()) == tasks.expected
        assert trial.left() == []
        with pytest.raises(psycopg.OperationalError, match="terminating connection"):
            stopped.execute("SELECT 1")
    zombie.goes_on.set()
    threads[0].join(60)
    assert "rows for table" in str(ended[0])
    assert sorted(trial.visible()) == tasks.expected
    assert trial.left() == []


@pytest.mark.parametrize("isolation", ["read committed", "repeatable read", "serializable"])
@pytest.mark.parametrize("last", ["one", "other"])
def test_a_refusal_while_another_driver_adds_the_rows(server, tmp_path, last, isolation):
    """One is refused for a row, which is gone when another adds the same rows, before the one has said so: all is there, or it is refused."""
    trial, tasks = at_postgresql(server, tmp_path, 0), Tasks(1)
    table = trial.make_sink()._table
    url = f"{server.url}{'&' if '?' in server.url else '?'}options=-c%20default_transaction_isolation%3D" + (
        isolation.replace(" ", "%5C%20")
    )
    entered, goes_on, refuses, outcome = threading.Event(), threading.Event(), threading.Event(), []

    def change(text):
        with psycopg.connect(server.url, autocommit=True) as database:
            database.execute(text)

    change(f"CREATE UNIQUE INDEX ON {table} (id)")

    class Other(DatabaseSink):
        """It has written that it is done, in its transaction, and stands still before it looks whether it was refused."""

        def _is_free(self, database, id_, target):
            entered.set()
            assert goes_on.wait(30)
            return super()._is_free(database, id_, target)

    class One(DatabaseSink):
        def _refuse(self, database, staging):
            if not refuses.is_set():
                refuses.set()
                change(f"DELETE FROM {table}")
                if last == "one":  # the other has written first, and each waits for the other
                    thread.start()
                    assert entered.wait(30)
                    threading.Timer(0.3, goes_on.set).start()
                else:
                    goes_on.set()
            free = super()._refuse(database, staging)
            if last == "other":
                thread.start()
                assert entered.wait(30)
            return free

    class Dies:
        """The other does not get to writing down how it ended."""

        read = staticmethod(trial.commit_log.read)

        def write(self, key, record, version):
            raise CommitUnknown("it was killed")

    def other():
        try:
            outcome.append(resume(Other(url, table), Dies(), "c", sleep=lambda _: None))
        except (CommitUnknown, CommitFailed) as error:
            outcome.append(error)

    def run(staging):
        change(f"INSERT INTO {table} VALUES (7, 'there')")
        return tasks.run(trial.make_sink(), staging)

    thread = threading.Thread(target=other)
    trial.make_sink = lambda: DatabaseSink(url, table)
    try:
        report = commit(One(url, table), trial.commit_log, "c", SCHEMA, run, sleep=lambda _: None)
    except CommitConflict:
        report = None
    thread.join(60)
    assert outcome
    assert sorted(trial.visible()) == (tasks.expected if report else [])
    assert report is None or last == "one"
    assert trial.commit_log.read("c")[1]["state"] == ("applied" if report else "refused")
    assert trial.left() == []
    trial.drive(Driver(), tasks, "c")
    assert sorted(trial.visible()) == tasks.expected


def test_a_schema_that_does_not_fit(make, request):
    """It is said by the columns, before anything runs."""
    other_schemas(make(0), "" if "postgresql" in request.node.name else "int64")


def test_a_reader_within_a_transaction(server, tmp_path):
    """It sees all rows or none."""
    looked_at_within(at_postgresql(server, tmp_path, 0))


def test_types_that_do_not_fit(server, tmp_path):
    """Rows that a column does not take: the error says so, nothing is visible, nothing left."""
    trial = at_postgresql(server, tmp_path, 0)
    sink = trial.make_sink()

    def stage(staging):
        wrong = pa.record_batch({"id": ["one"], "text": ["a"]})
        return [sink.stage(staging, 0, 1, iter([wrong]))]

    with pytest.raises(CommitFailed, match="could not be staged: InvalidTextRepresentation"):
        commit(sink, trial.commit_log, "c", SCHEMA, stage)
    assert trial.visible() == []
    assert trial.left() == []


@pytest.mark.parametrize("missing", ["INSERT", "INSERT into the commits", "SELECT", "CREATE"])
def test_a_user_who_may_not(server, tmp_path, missing):
    """Without one of the rights that a commit takes: it is said before anything runs, nothing is visible, nothing left."""
    trial = at_postgresql(server, tmp_path, 0)
    table = trial.make_sink()._table
    trial.drive(Driver(), Tasks(1), "first")  # the table of commits is there, and another's
    rights = {"INSERT", "SELECT"} - {missing}
    with psycopg.connect(server.url, autocommit=True) as database:
        user = f"reader_{table}"
        database.execute(f"CREATE ROLE {user} LOGIN PASSWORD '{server.password}'")
        if missing != "CREATE":
            database.execute(f"GRANT CREATE ON SCHEMA public TO {user}")
        database.execute(f"GRANT {', '.join(rights)} ON {table} TO {user}")
        own = {"INSERT", "SELECT"} - ({"INSERT"} if missing.endswith("commits") else set())
        database.execute(f"GRANT {', '.join(own)} ON stagecrew_commits TO {user}")
    sink = DatabaseSink(server.url.replace("//crew:", f"//{user}:"), table)
    with pytest.raises(
        CommitFailed, match=f"table {table}.*cannot be .*: InsufficientPrivilege: permission denied for"
    ):
        commit(sink, trial.commit_log, "c", SCHEMA, lambda staging: 1 / 0)
    assert len(trial.visible()) == 40
    assert trial.left() == []


def test_rights_that_suffice(server, tmp_path):
    """To make tables, to read and to add rows to the table and to that of commits: with no more a commit lands."""
    trial = at_postgresql(server, tmp_path, 0)
    table = trial.make_sink()._table
    trial.drive(Driver(), Tasks(1), "first")
    with psycopg.connect(server.url, autocommit=True) as database:
        user = f"writer_{table}"
        database.execute(f"CREATE ROLE {user} LOGIN PASSWORD '{server.password}'")
        database.execute(f"GRANT CREATE ON SCHEMA public TO {user}")
        database.execute(f"GRANT INSERT, SELECT ON {table}, stagecrew_commits TO {user}")
    sink = DatabaseSink(server.url.replace("//crew:", f"//{user}:"), table)
    assert commit(sink, trial.commit_log, "c", SCHEMA, lambda staging: Tasks(1).run(sink, staging)).rows == 40
    assert len(trial.visible()) == 80
    assert trial.left() == []


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("{password}@", "wrong-{password}@", "password authentication failed for user"),
        ("/postgres", "/postgres?sslmode=require", "server does not support SSL, but SSL was required"),
        ("/postgres", "/no_such_database", 'database "no_such_database" does not exist'),
    ],
)
def test_why_a_server_refuses_a_connection(server, old, new, reason):
    """A wrong password, missing TLS and a wrong database are named, with the server's own error as the cause."""
    old, new = (text.replace("{password}", server.password) for text in (old, new))
    sink = DatabaseSink(server.url.replace(old, new), "target")
    with pytest.raises(CommitFailed, match=reason) as failed:
        sink.begin(Staging("c", "run", SCHEMA))
    assert isinstance(failed.value.__cause__, psycopg.OperationalError)
    assert server.password not in f"{failed.value} {failed.value.__cause__}"


def test_a_connection_that_is_lost(server, tmp_path):
    """While it stages: abort, a clear error, nothing visible or left. While it commits: tried again."""
    trial = at_postgresql(server, tmp_path, 0)
    sink, tasks = trial.make_sink(), Tasks(1)

    def end_all():
        with psycopg.connect(server.url, autocommit=True) as database:
            database.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")

    def cut_off(batches):
        yield next(batches)
        end_all()
        yield from batches

    def stage(staging):
        batches = [pa.record_batch({"id": [n], "text": ["a"]}, schema=SCHEMA) for n in range(3)]
        return [sink.stage(staging, 0, 1, cut_off(iter(batches)))]

    with pytest.raises(CommitFailed, match="could not be staged: AdminShutdown"):
        commit(sink, trial.commit_log, "c", SCHEMA, stage)
    assert trial.visible() == []
    assert trial.left() == []

    within, times = sink._within, []

    @contextlib.contextmanager
    def cut_once(database):
        with within(database):
            yield
            if len(times) == 1:
                end_all()
            times.append(1)

    def staged(staging):
        messages = tasks.run(trial.make_sink(), staging)
        sink._within = cut_once
        times.append(1)
        return messages

    report = commit(sink, trial.commit_log, "d", SCHEMA, staged, sleep=lambda _: None)
    assert report.rows == 40
    assert sorted(trial.visible()) == tasks.expected
    assert trial.left() == []


def test_a_server_that_is_gone(tmp_path):
    """Before anything runs; and behind the decision, when what was staged stays."""
    with postgresql() as server:
        trial = at_postgresql(server, tmp_path, 0)
        sink = trial.make_sink()
        staging: list[Staging] = []

        def run(given):
            staging.append(given)
            return Tasks(1).run(trial.make_sink(), given)

        class Gone(DatabaseSink):
            def commit(self, staging, messages):
                raise psycopg.OperationalError("the server is gone")

        sink.__class__ = Gone
        with pytest.raises(CommitPending, match="the server is gone"):
            commit(sink, trial.commit_log, "c", SCHEMA, run, sleep=lambda _: None)
        assert trial.left() != []
        assert trial.drive(Driver(), Tasks(2), "c").repeated
        assert len(trial.visible()) == 40
        assert trial.left() == []
        trial.make_sink()
    with pytest.raises(CommitFailed, match="cannot be reached: OperationalError: .*Connection refused") as failed:
        commit(trial.make_sink(), trial.commit_log, "e", SCHEMA, lambda staging: [])
    assert isinstance(failed.value.__cause__, psycopg.OperationalError)
    assert server.password not in str(failed.value)
