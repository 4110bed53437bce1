"""Jobs whose store is ZooKeeper: killed servers, drivers and runs without a connection, and TLS."""

import json
import os
import signal
import time
import uuid
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest

from support.cli import run_stagecrew
from support.driver_processes import KILL_POINTS, QUICK_CONF, campaigning_drivers, wait_until
from support.example_jobs import MODULE, job_spec, recorded_lines
from support.processes import is_alive
from support.tcp_proxy import Proxy
from support.zookeeper import ensemble, tls_zookeeper

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

#: The session timeout, in seconds.
TIMEOUT = 4
#: The delay, in seconds, that the tests allow on a loaded machine.
SLACK = 4


def check_rows_are_stored_once(drivers):
    assert sorted(pq.read_table(drivers.folder / "out" / "table")["id"].to_pylist()) == list(range(100))


def job_process(drivers):
    """Returns the process that runs the job, or None if no process with a live session runs it."""
    with drivers.jobs() as jobs:
        return jobs.process("job")


def leading_server(servers):
    """Returns the leading server, or None while fewer than two servers are in service."""
    modes = {server: server.status() for server in servers if server.alive}
    leading = [server for server, status in modes.items() if "Mode: leader" in status]
    return leading[0] if leading and sum("Mode:" in status for status in modes.values()) > 1 else None


def test_jobs_survive_when_the_ensembles_leader_is_killed(tmp_path):
    """If the leading ZooKeeper server is killed twice while jobs are running, finished steps and rows are kept.

    A job starts another run only if the drivers elect a new leader.
    """
    with ensemble() as servers:
        hosts = ",".join(server.hosts for server in servers)
        with campaigning_drivers(f"zookeeper://{hosts}/jobs?timeout=10", tmp_path) as drivers:
            out = tmp_path / "out"
            for name in ("hold-1", "hold-2", "hold-stage"):
                (out / name).touch()
            pair = [drivers.start(), drivers.start()]
            drivers.submit(job_spec("steps", drivers, count=4), "steps")
            drivers.submit(job_spec("storing", drivers), "rows")
            wait_until(lambda: recorded_lines(drivers, "stages"), "the job is staging rows")
            for number in (1, 2):
                wait_until(lambda number=number: recorded_lines(drivers, f"step-{number}"), f"step {number} runs")
                killed = wait_until(lambda: leading_server(servers), "a server leads")
                killed.kill()
                wait_until(lambda: leading_server(servers), "another server leads")
                (out / f"go-{number}").touch()
                wait_until(
                    lambda number=number: recorded_lines(drivers, f"step-{number + 1}"),
                    f"the job continues after step {number}",
                )
                killed.start()
                killed.wait()
            (out / "go-stage").touch()
            assert drivers.result("steps").value() == 60
            assert drivers.result("rows").value() == 100
            check_rows_are_stored_once(drivers)
            assert [driver.poll() for driver in pair] == [None, None]
            with drivers.jobs() as jobs:
                term = jobs.leader().term
            for job in ("steps", "rows"):
                assert drivers.record(job).run <= term
            assert recorded_lines(drivers, "step-0") == ["1"]
            for number in (1, 2, 3):
                runs = recorded_lines(drivers, f"step-{number}")
                assert runs == sorted(set(runs), key=int)
            assert len(recorded_lines(drivers, "step-3")) == 1
            print("runs", drivers.record("steps").run, drivers.record("rows").run, "term", term)
            drivers.assert_nothing_left("steps", "rows")


@pytest.mark.parametrize(
    ("cut_off", "is_committing"),
    [("both", False), ("both", True), ("run", False), ("run", True), ("driver", False)],
    ids=["both", "both, before the commit", "run", "run, before the commit", "driver"],
)
def test_a_run_that_is_cut_off_ends_and_commits_nothing(zookeeper, tmp_path, cut_off, is_committing):
    """If a leader, its run, or both lose the connection to ZooKeeper, the run ends in time and commits nothing.

    This holds even if the run is about to commit. Another run finishes the job. When the connection is back, the driver
    that was cut off becomes a standby again.
    """
    path = f"jobs-{uuid.uuid4().hex}?timeout={TIMEOUT}"
    direct = f"zookeeper://{zookeeper.hosts}/{path}"
    out = tmp_path / "out"
    with Proxy(zookeeper.port) as proxy, campaigning_drivers(direct, tmp_path) as drivers:
        (out / "hold-stage").touch()
        proxied = f"zookeeper://{proxy.hosts}/{path}"
        store = direct if cut_off == "run" else proxied
        run_store = direct if cut_off == "driver" else proxied
        first = drivers.start(store=store, STAGECREW_TEST_RUN_STORE=run_store, PYTHONPATH=str(KILL_POINTS))
        assert drivers.leader() is first
        second = drivers.start()
        drivers.submit(job_spec("storing", drivers), "job")
        wait_until(lambda: recorded_lines(drivers, "stages"), "the job is staging rows")
        orphan = drivers.process("job")
        proxy.hold("to", "from")
        cut_at = time.monotonic()
        if is_committing:
            (out / "go-stage").touch()
        wait_until(lambda: not is_alive(orphan), "the run has ended")
        assert time.monotonic() - cut_at < TIMEOUT + SLACK
        assert not (out / "table").exists()
        if cut_off == "run":
            wait_until(lambda: job_process(drivers) is None, "the run's session ends")
            proxy.heal()  # the next run also uses the proxy
        wait_until(lambda: len(recorded_lines(drivers, "stages")) == 2, "the next run is staging rows")
        proxy.heal()
        (out / "go-stage").touch()
        assert drivers.result("job").value() == 100
        check_rows_are_stored_once(drivers)
        stages = recorded_lines(drivers, "stages")
        assert (len(stages), stages[0], stages[1:]) == (2, "1", recorded_lines(drivers, "written"))
        # A run that started before the network healed also counts.
        assert drivers.record("job").run == 2 or cut_off == "run"
        assert drivers.leader() is (first if cut_off == "run" else second)
        with drivers.jobs() as jobs:
            assert jobs.leader().term == (1 if cut_off == "run" else 2)
        assert [driver.poll() for driver in (first, second)] == [None, None]
        drivers.assert_nothing_left("job")
        # When the second driver ends, the first driver, which was cut off, leads and runs jobs.
        second.terminate()
        assert second.wait(60) == 0
        drivers.running.remove(second)
        assert drivers.leader() is first
        (out / "go-ending").touch()
        drivers.submit(job_spec("ending", drivers), "next")
        assert drivers.result("next").value() == 7
        drivers.assert_nothing_left("job", "next")


def test_a_run_that_is_suspended_until_its_session_expires_commits_nothing(zookeeper, tmp_path):
    """A run that is suspended until its session has expired ends without a commit when it resumes.

    The leader starts the next run.
    """
    out = tmp_path / "out"
    with campaigning_drivers(
        f"zookeeper://{zookeeper.hosts}/jobs-{uuid.uuid4().hex}?timeout={TIMEOUT}", tmp_path
    ) as drivers:
        (out / "hold-stage").touch()
        drivers.start()
        drivers.submit(job_spec("storing", drivers), "job")
        wait_until(lambda: recorded_lines(drivers, "stages"), "the job is staging rows")
        run = drivers.process("job")
        os.kill(run, signal.SIGSTOP)
        wait_until(lambda: job_process(drivers) is None, "the run's session ends")
        (out / "go-stage").touch()
        os.kill(run, signal.SIGCONT)
        wait_until(lambda: not is_alive(run), "the run ends itself")
        assert drivers.result("job").value() == 100
        check_rows_are_stored_once(drivers)
        assert [recorded_lines(drivers, name) for name in ("stages", "written")] == [["1", "2"], ["2"]]
        with drivers.jobs() as jobs:
            assert jobs.leader().term == 1
        drivers.assert_nothing_left("job")


def test_a_job_runs_over_tls_without_leaking_the_secret(tmp_path, monkeypatch):
    """With certificates, and credentials from the environment, a job is submitted, run and queried over TLS.

    The secret appears in no command line and no log. A command without the right secret fails and prints no result.
    """
    secret = "crew:s3cret"
    monkeypatch.setenv("STAGECREW_STORE_CREDENTIALS", secret)
    (tmp_path / "tls").mkdir()
    files = "&".join(
        f"{name}={tmp_path}/tls/{file}.pem" for name, file in (("ca", "ca"), ("certfile", "ca"), ("keyfile", "key"))
    )
    with tls_zookeeper(tmp_path / "tls") as port:
        with campaigning_drivers(f"zookeeper://127.0.0.1:{port}/jobs?timeout=10&{files}", tmp_path) as drivers:
            (tmp_path / "out" / "hold-stage").touch()
            driver = drivers.start()
            (tmp_path / "ha_jobs.py").write_text(MODULE)
            environment = {"STAGECREW_STORE": drivers.store, "STAGECREW_STATE": str(drivers.state)}
            conf = [word for key, value in QUICK_CONF.items() for word in ("--conf", f"{key}={value}")]
            words = ["submit", "--id", "job", *conf, "--arg", f"folder={tmp_path}/out", "ha_jobs:storing"]
            submitted = run_stagecrew(*words, cwd=tmp_path, **environment)
            assert (submitted.returncode, submitted.stdout) == (0, "job\n"), submitted.stderr
            wait_until(lambda: recorded_lines(drivers, "stages"), "the job is staging rows")
            tree = [driver.pid, *(child.pid for child in psutil.Process(driver.pid).children(recursive=True))]
            assert job_process(drivers)["pid"] in tree
            for pid in filter(is_alive, tree):
                assert b"s3cret" not in Path(f"/proc/{pid}/cmdline").read_bytes()
            for other in ("crew:wrong", None):
                with monkeypatch.context() as patch:
                    patch.delenv("STAGECREW_STORE_CREDENTIALS")
                    credentials = {} if other is None else {"STAGECREW_STORE_CREDENTIALS": other}
                    refused = run_stagecrew("result", "job", **environment, **credentials)
                assert (refused.returncode, refused.stdout) == (1, "")
                assert "STAGECREW_STORE_CREDENTIALS" in refused.stderr, refused.stderr
            (tmp_path / "out" / "go-stage").touch()
            result = run_stagecrew("result", "job", "--wait", "--timeout", "120", "--json", **environment)
            assert result.returncode == 0, result.stderr
            assert (json.loads(result.stdout)["value"], json.loads(result.stdout)["run"]) == (100, 1)
            check_rows_are_stored_once(drivers)
            drivers.assert_nothing_left("job")
        for log in [*tmp_path.glob("driver-*.log"), *tmp_path.glob("work-*/job/*.log")]:
            assert "s3cret" not in log.read_text()
