"""The arguments and identities of sinks: the same commit id cannot be used for two sinks."""

from __future__ import annotations

import contextlib
import sqlite3

import fsspec
import pyarrow.dataset
import pyarrow.fs
import pytest

from stagecrew.errors import OperatorMisused
from stagecrew.files import file_system
from stagecrew.operators.commit_log import MemoryCommitLog
from stagecrew.operators.commits import commit
from stagecrew.operators.sinks import DatabaseSink, IcebergSink, ObjectSink, ParquetSink
from support.commit_trials import SCHEMA, Driver, SinkWrapper, Tasks
from support.local_sinks import iceberg, sqlite


def test_object_stores_of_fsspec_are_recognized():
    """ParquetSink refuses object stores of fsspec, because they cannot rename folders."""

    class Store(fsspec.AbstractFileSystem):
        protocol = ("s3", "s3a")

    through = pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(Store()))
    with pytest.raises(OperatorMisused, match="use ObjectSink there"):
        ParquetSink("bucket/t", filesystem=through)


def test_invalid_arguments_of_sinks_are_refused(tmp_path):
    """The errors about invalid arguments of sinks name the accepted values."""
    with pytest.raises(OperatorMisused, match="mode is 'create' or 'append', not 'overwrite'"):
        ParquetSink(tmp_path, mode="overwrite")
    with pytest.raises(OperatorMisused, match="sqlite:///file or postgresql"):
        DatabaseSink("mysql://x", "t")
    with pytest.raises(OperatorMisused, match="a table is a name"):
        DatabaseSink("sqlite:///x", "t; DROP TABLE t")


def test_a_database_sink_does_not_show_its_password():
    """Neither `repr`, `str` nor the identity of a database sink contains the password."""
    sink = DatabaseSink("postgresql://user:secret@host/db", "t")
    assert "secret" not in repr(sink)
    assert "secret" not in str(sink)
    assert sink.identity == "<table t of postgresql> in host=host dbname=db"


def test_the_identity_of_a_database_sink_includes_the_environment_of_libpq(monkeypatch):
    """A part that the URL lacks is that of the environment variable that libpq reads. A service file takes precedence."""
    for name in ("PGDATABASE", "PGUSER", "PGHOST", "PGPORT", "PGSERVICE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PGUSER", "someone")
    assert DatabaseSink("postgresql://host", "t").identity.endswith(" in host=host dbname=someone")
    monkeypatch.setenv("PGDATABASE", "from-environment")
    monkeypatch.setenv("PGHOST", "other")
    assert DatabaseSink("postgresql://", "t").identity.endswith(" in host=other dbname=from-environment")
    assert DatabaseSink("postgresql://host/db", "t").identity.endswith(" in host=host dbname=db")
    assert DatabaseSink("postgresql:///?service=s", "t").identity.endswith(" in service=s")
    monkeypatch.setenv("PGPASSWORD", "se\udcffcret")  # a byte that is not UTF-8
    assert DatabaseSink("postgresql://host/db", "t").identity.endswith(" in host=host dbname=db")


def test_the_identity_of_a_database_sink_includes_the_service_of_the_environment(monkeypatch, tmp_path):
    """If the environment names a service, the identity contains it, and no name of a database that libpq does not use."""
    for name in ("PGDATABASE", "PGUSER", "PGHOST", "PGPORT"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "services.conf").write_text("[s]\nhost=real\ndbname=realdb\n")
    monkeypatch.setenv("PGSERVICEFILE", str(tmp_path / "services.conf"))
    monkeypatch.setenv("PGSERVICE", "s")
    assert DatabaseSink("postgresql://", "t").identity.endswith(" in service=s")


def test_a_local_uri_with_one_slash_is_a_local_path(tmp_path, monkeypatch):
    """`file:/path`, as Spark writes local URIs, is the path, not a folder in the current directory."""
    monkeypatch.chdir(tmp_path)
    for uri in (f"file:{tmp_path}/table", f"file://{tmp_path}/table", f"{tmp_path}/table"):
        assert file_system(uri, None)[1] == f"{tmp_path}/table"
    assert file_system("~nobody-of-this-name/table", None)[1] == f"{tmp_path}/~nobody-of-this-name/table"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert file_system("~/table", None)[1] == f"{tmp_path}/table"


def test_a_commit_id_cannot_be_used_for_two_tables(tmp_path):
    """The commit log refuses a commit id for a second table. With a new log, the other table's commit is not found."""
    (tmp_path / "one").mkdir()
    trial = sqlite(tmp_path / "one")
    trial.drive(Driver(), Tasks(1), "c")
    with contextlib.closing(sqlite3.connect(tmp_path / "one" / "data.db")) as database:
        database.execute('CREATE TABLE other (id INTEGER, "text" TEXT)')
    other = DatabaseSink(f"sqlite:///{tmp_path}/one/data.db", "other")
    with pytest.raises(
        OperatorMisused, match="commit 'c' belongs to <table target of sqlite> in .*data.db, not to <table other"
    ):
        commit(other, trial.commit_log, "c", SCHEMA, lambda staging: Tasks(1).run(other, staging))
    report = commit(other, MemoryCommitLog(), "c", SCHEMA, lambda staging: Tasks(1).run(other, staging))
    assert not report.repeated
    with contextlib.closing(sqlite3.connect(tmp_path / "one" / "data.db")) as database:
        assert database.execute("SELECT count(*) FROM other").fetchone() == (40,)


def s3_at(endpoint):
    return pyarrow.fs.S3FileSystem(
        access_key="very-secret", secret_key="very-secret", endpoint_override=endpoint, region="us-east-1"
    )


def webhdfs_at(host):
    files = fsspec.filesystem("webhdfs", host=host, port=1, user="me", password="very-secret", skip_instance_cache=True)
    return pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(files))


def iceberg_at(catalog="default", **properties):
    return IcebergSink("db.target", catalog, properties)


SECRET = "://me:very-secret@"


@pytest.mark.parametrize(
    "sinks",
    [
        lambda: [ObjectSink("bucket/t", s3_at(f"http{SECRET}{host}:9?password=very-secret")) for host in "ab"],
        lambda: [
            ObjectSink(f"s3{SECRET}bucket/t?endpoint_override=http%3A%2F%2F{host}&region=us-east-1") for host in "ab"
        ],
        lambda: [ObjectSink("bucket/t", s3_at("")), ObjectSink("bucket/t", s3_at("a"))],
        lambda: [ParquetSink("/t", mode, webhdfs_at(host)) for host in "ab" for mode in ("create", "append")],
        lambda: [iceberg_at(name, uri="sqlite:///c.db", **{"s3.secret-access-key": "very-secret"}) for name in "ab"],
        lambda: [iceberg_at(uri=f"postgresql+psycopg2{SECRET}{host}/c?password=very-secret") for host in "ab"],
        lambda: [iceberg_at(uri="https://c", warehouse=name, token="very-secret") for name in "ab"],
        lambda: [
            DatabaseSink(f"postgresql{SECRET}{address}", "t")
            for address in (
                "a/db",
                "b/db",
                "a/other",
                "a:1/db",
                "a/db?options=-csearch_path%3Dx&sslpassword=very-secret",
            )
        ],
        lambda: [
            DatabaseSink("postgresql:///?" + query, "t") for query in ("host=a&password=very-secret", "service=x")
        ],
    ],
    ids=["s3", "s3-uri", "aws", "webhdfs", "names", "catalogues", "warehouses", "postgresql", "queries"],
)
def test_the_identity_of_a_sink_includes_its_server(sinks):
    """Sinks with the same name on different servers or catalogues have different identities, without any secret."""
    identities = [sink.identity for sink in sinks()]
    assert len(set(identities)) == len(identities) > 1
    assert identities == [sink.identity for sink in sinks()]
    assert "very-secret" not in f"{identities} {[repr(sink) for sink in sinks()]}"


def test_a_commit_id_cannot_be_used_in_two_catalogues(tmp_path):
    """A commit id is refused for a table with the same name in another catalogue, with the same commit log."""
    (tmp_path / "one").mkdir(), (tmp_path / "two").mkdir()
    one, two = iceberg(tmp_path / "one"), iceberg(tmp_path / "two")
    one.drive(Driver(), Tasks(1), "c")
    two.commit_log = one.commit_log
    with pytest.raises(OperatorMisused, match="commit 'c' belongs to .*/one/catalog.db.*, not to .*/two/catalog.db"):
        two.drive(Driver(), Tasks(1), "c")
    assert two.visible() == []


def test_a_relative_path_is_resolved_in_the_working_directory(tmp_path, monkeypatch):
    """The same relative path in a different working directory is a different sink."""
    commit_log, tasks = MemoryCommitLog(), Tasks(1)
    for make in (
        lambda: ParquetSink("t"),
        lambda: ObjectSink("o"),
        lambda: DatabaseSink("sqlite:///data.db", "target"),
    ):
        for name in ("one", "two"):
            (tmp_path / name).mkdir(exist_ok=True)
            if not (tmp_path / name / "data.db").exists():
                sqlite(tmp_path / name)
            monkeypatch.chdir(tmp_path / name)
            sink = make()
            with pytest.raises(OperatorMisused, match="belongs to") if name == "two" else contextlib.nullcontext():
                commit(
                    sink, commit_log, type(sink).__name__, SCHEMA, lambda staging, sink=sink: tasks.run(sink, staging)
                )


def test_a_commit_id_cannot_be_used_for_two_sinks_without_identity(tmp_path):
    """A commit id that is done in one sink is refused for a second sink of the same class, even without identities."""
    (tmp_path / "one").mkdir(), (tmp_path / "two").mkdir()
    commit_log = MemoryCommitLog()

    class Anonymous(SinkWrapper):
        def __getattr__(self, name):
            if name == "identity":
                raise AttributeError(name)
            return getattr(self._sink, name)

    one, two = (Anonymous(sqlite(tmp_path / name).make_sink()) for name in ("one", "two"))
    commit(one, commit_log, "c", SCHEMA, lambda staging: Tasks(1).run(one, staging))
    assert commit(one, commit_log, "c", SCHEMA, lambda staging: 1 / 0).repeated
    with pytest.raises(
        OperatorMisused, match="commit 'c' is done, but not in this sink: use different commit ids for different sinks"
    ):
        commit(two, commit_log, "c", SCHEMA, lambda staging: Tasks(1).run(two, staging))
