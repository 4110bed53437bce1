"""The demo, run as users run it, on SQLite and on a PostgreSQL server that the test starts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import psutil
import psycopg
import pyarrow.parquet as pq
import pytest

from stagecrew.demo.flights import frame
from support.cli import run_stagecrew
from support.driver_scripts import java_processes
from support.postgres import postgresql

FLIGHTS = 12_000


@pytest.fixture(scope="module")
def postgresql_server():
    with postgresql() as running:
        yield running
    assert not psutil.pid_exists(running.pid)
    assert not running.folder.exists()


def java_pids() -> set[int]:
    """The ids of the Java processes below this process. Some of them may belong to other tests."""
    return {process.pid for process in java_processes()}


def run_demo(folder: Path, *arguments: str, **environment: str):
    """Runs the demo on some of the flights, by default the part about connections.

    Checks that no process and no temporary file of the demo is left.
    """
    before = java_pids()
    part = () if "--part" in arguments else ("--part", "connections")
    done = run_stagecrew(
        "demo", "--output", str(folder / "out"), "--flights", str(FLIGHTS), *part, *arguments, cwd=folder, **environment
    )
    assert java_pids() <= before
    assert list((folder / "out").glob(".stagecrew-demo-*")) == []
    return done


def table_cells(output: str, label: str) -> list[str]:
    """The two values in a row of the table."""
    row = next(line for line in output.splitlines() if re.match(rf"\W*{re.escape(label)}", line))
    return [cell.strip() for cell in re.split("[│|]", row) if cell.strip()][1:]


def assert_table(output: str, workers: int = 2) -> None:
    """Checks that without stagecrew 16 tasks open 16 connections, and that with it each worker opens and closes one."""
    without, with_ = map(int, table_cells(output, "connections of 16 tasks"))
    assert without == 16
    assert 1 <= with_ <= workers
    assert table_cells(output, "  rows") == [f"{FLIGHTS:,}", f"{FLIGHTS:,}"]
    assert table_cells(output, "  pools of executor driver") == ["-", f"{with_} opened, {with_} closed"]
    assert all(float(seconds) > 0 for seconds in table_cells(output, "  seconds"))
    assert f"Both enrichments returned the same {FLIGHTS:,} rows" in output


def assert_rows_are_enriched(folder: Path) -> None:
    """Checks that the Parquet result equals a pandas join of the same tables."""
    result = pq.read_table(folder / "out" / "flights").to_pandas()
    key = ["time_hour", "carrier", "flight", "origin"]
    flights = frame("flights")[:FLIGHTS]
    expected = (
        flights.merge(frame("airlines").rename(columns={"name": "airline"}), how="left", on="carrier")
        .merge(
            frame("airports")[["faa", "name"]].rename(columns={"faa": "dest", "name": "destination"}),
            how="left",
            on="dest",
        )
        .merge(frame("planes")[["tailnum", "manufacturer", "seats"]], how="left", on="tailnum")
        .merge(
            frame("weather")
            .drop_duplicates(["origin", "time_hour"])[["origin", "time_hour", "temp"]]
            .rename(columns={"temp": "temperature"}),
            how="left",
            on=["origin", "time_hour"],
        )
        .sort_values(key)
        .reset_index(drop=True)
    )
    result = result.sort_values(key).reset_index(drop=True)
    for column in [*key, "airline", "destination", "manufacturer", "seats", "temperature"]:
        actual_values, expected_values = result[column], expected[column]
        assert (actual_values.isna() == expected_values.isna()).all(), column
        assert (actual_values.dropna() == expected_values.dropna()).all(), column
    assert result["temperature"].notna().mean() > 0.9
    assert result["manufacturer"].notna().mean() > 0.5


def assert_secret_is_nowhere(secret: str, done, folder: Path) -> None:
    """Checks that the secret is in no output and in no file."""
    assert secret not in done.stdout + done.stderr
    for path in folder.rglob("*"):
        assert not path.is_file() or secret.encode() not in path.read_bytes(), path


def test_the_demo_on_sqlite_opens_one_pool_per_worker(tmp_path):
    """On SQLite the demo opens one pool per worker instead of one connection per task, and writes the right result."""
    done = run_demo(tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert_table(done.stdout)
    assert_rows_are_enriched(tmp_path)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["flights", "flights.sqlite", "spark.log"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.long
def test_the_demo_compares_skew_disk_and_a_killed_driver(tmp_path):
    """Splits balance the tasks, a topology leaves no shuffle file, and the job of a killed driver loads each row once.

    Without stagecrew, one task reads most flights, shuffle files remain, and the job is lost halfway.
    """
    done = run_demo(tmp_path, *(word for part in ("skew", "disk", "driver") for word in ("--part", part)), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    skew = found["skew"]
    assert [sum(skew[side]["flights"]) for side in ("without", "with_stagecrew")] == [FLIGHTS, FLIGHTS]
    shares = [max(skew[side]["flights"]) / FLIGHTS for side in ("without", "with_stagecrew")]
    assert shares[0] > 0.8
    assert shares[1] < 0.7
    assert found["disk"]["with_stagecrew"] == {"files": 0, "bytes": 0}
    assert found["disk"]["without"]["files"] > 0
    plain, ours = found["driver"]["without"], found["driver"]["with_stagecrew"]
    assert (plain["finished"], plain["rows"] < FLIGHTS) == (False, True)
    assert ours == {"finished": True, "rows": FLIGHTS, "twice": 0, "runs": 2}
    assert re.search(r"driver killed halfway\W+lost\W+finished in run 2", done.stderr)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["drivers.log", "flights.sqlite", "spark.log"]


@pytest.mark.long
def test_the_demo_on_postgresql_agrees_with_the_server(tmp_path, postgresql_server):
    """On PostgreSQL, the server counts the same number of connections as the demo.

    With --json, the standard output contains only JSON. The password appears nowhere, and the
    schema is dropped at the end.
    """
    done = run_demo(tmp_path, "--database", postgresql_server.url, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["connections"]
    assert (found["without"]["connections"], found["without"]["rows"], found["same"]) == (16, FLIGHTS, True)
    (pool,) = found["pools"].values()
    assert found["with_stagecrew"]["connections"] == pool["opens"] == pool["closes"] <= 2
    assert found["counted_by"] == "pg_stat_database.sessions"
    assert_table(done.stderr)
    assert_rows_are_enriched(tmp_path)
    assert_secret_is_nowhere(postgresql_server.password, done, tmp_path)
    with psycopg.connect(postgresql_server.url) as connection:
        names = [name for (name,) in connection.execute("SELECT nspname FROM pg_namespace").fetchall()]
    connection.close()
    assert [name for name in names if name.startswith("stagecrew")] == []


def test_a_refused_password_is_reported_in_one_line(tmp_path, postgresql_server):
    """A refused connection is reported in one line with the server and what to check, but without the password."""
    wrong = "a-wrong-password"
    done = run_demo(tmp_path, STAGECREW_DEMO_DATABASE=postgresql_server.url.replace(postgresql_server.password, wrong))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert f"port={postgresql_server.port}" in done.stderr
    assert "Check that it runs" in done.stderr
    assert_secret_is_nowhere(wrong, done, tmp_path)


def test_an_unknown_master_is_reported_in_one_line(tmp_path):
    """If Spark cannot start, one line says so and names the log to read."""
    done = run_demo(tmp_path, "--master", "nonsense")
    assert done.returncode == 1
    # If its JVM does not start, PySpark leaves a file open, and Python may warn about that when warnings are on.
    own_output = re.sub(r"Exception ignored in: .*?\nResourceWarning: [^\n]*\n", "", done.stderr, flags=re.DOTALL)
    assert own_output.count("\n") == 1, done.stderr
    assert "Spark did not start with master nonsense" in own_output
    assert "spark.log" in done.stderr
