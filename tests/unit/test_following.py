"""Commands that follow a job: `submit --wait`, `logs`, `jobs --watch`, with a real SQLite store and without a driver."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys

import pytest
from click.testing import CliRunner

from stagecrew.cli import main
from stagecrew.errors import JobError
from stagecrew.recovery.commands.following import JobView, changes, run_logs
from stagecrew.recovery.jobs.fenced import FencedJobs
from stagecrew.recovery.jobs.job import Job
from stagecrew.recovery.jobs.record import JobState
from stagecrew.recovery.jobs.result import Result
from stagecrew.recovery.jobs.store import open_jobs


@pytest.fixture
def places(tmp_path, monkeypatch):
    """A folder with a store, a state storage and code for jobs. The environment variables name the two places."""
    (tmp_path / "state").mkdir()
    (tmp_path / "etl.py").write_text("def load(day):\n    return day\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STAGECREW_STORE", f"sqlite://{tmp_path}/jobs.db")
    monkeypatch.setenv("STAGECREW_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("STAGECREW_WORK", str(tmp_path / "work"))
    return tmp_path


def run(*arguments):
    return CliRunner().invoke(main, list(map(str, arguments)), catch_exceptions=False)


@contextlib.contextmanager
def stored_jobs():
    with open_jobs(os.environ["STAGECREW_STORE"], os.environ["STAGECREW_STATE"]) as jobs:
        yield FencedJobs(jobs._store, jobs._storage)


def start(jobs, job, **process):
    """Starts a run of a job, as a leader and the process of the run would."""
    run = jobs.start_run(job, jobs.read(job), jobs.claim_version(job))
    jobs.claim_run(run, {"host": "worker-7", "pid": 41, "term": 1} | process)
    return run


def finish(jobs, job, result):
    """Ends a job with this result, as its run would."""
    jobs.finish(job, jobs.read(job), JobState(result.state), result)


@contextlib.contextmanager
def started(*arguments):
    """The command in a process of its own, with pipes for its output."""
    command = [sys.executable, "-c", "from stagecrew.cli import main; main()", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


ACTIVE = JobView("running", 1, host="worker-7", pid=41, ui="http://worker-7:4040", steps=("count",))


@pytest.mark.parametrize(
    ("before", "now", "lines"),
    [
        (None, JobView("submitted"), ["submitted"]),
        (JobView("submitted"), JobView("submitted"), []),
        (
            JobView("submitted"),
            ACTIVE,
            [
                "running",
                "run 1 is process 41 on worker-7",
                "Spark UI: http://worker-7:4040",
                "step count has finished",
            ],
        ),
        (ACTIVE, JobView("running", 1, steps=("count",)), []),  # its process has ended, and the next run has not begun
        (
            JobView("running", 1, steps=("count",)),
            JobView("running", 2, host="worker-8", pid=9, steps=("count", "write")),
            ["run 2 is process 9 on worker-8", "step write has finished"],
        ),
        (ACTIVE, JobView("succeeded", 1, is_terminal=True), ["succeeded"]),
    ],
)
def test_each_change_of_a_job_is_one_line(before, now, lines):
    """The lines name the state, the process, the Spark UI and finished steps. What did not change is not repeated."""
    assert changes(before, now) == lines


def test_submit_waits_for_the_result(places):
    """`submit --wait` prints the progress to stderr and the result to stdout. The exit code is that of `result`."""
    with started("submit", "--wait", "--id", "one", "--arg", "day=1", "etl:load") as command, stored_jobs() as jobs:
        assert command.stderr.readline() == "job one is stored\n"
        assert command.stderr.readline() == "submitted\n"
        current = start(jobs, "one")
        jobs.show_ui(current, "http://worker-7:4040")
        Job("one", 1, jobs.handles("one", "steps"), jobs.handles("one", "commits")).step("count", lambda: 3)
        lines = {command.stderr.readline().strip() for _ in range(4)}
        assert lines == {
            "running", "run 1 is process 41 on worker-7", "Spark UI: http://worker-7:4040", "step count has finished",
        }  # fmt: skip
        finish(jobs, "one", Result.of_value({"rows": 3}))
        output, errors = command.communicate(timeout=30)
    assert (command.returncode, json.loads(output), errors) == (0, {"rows": 3}, "succeeded\n")


@pytest.mark.parametrize(
    ("result", "code", "text"),
    [
        (Result.of_error(ValueError("no rows")), 3, "job one has failed: ValueError: no rows"),
        (Result("cancelled", "it was cancelled"), 4, "job one has been cancelled: it was cancelled"),
    ],
)
def test_submit_exits_like_result(places, result, code, text):
    """A job that failed gives 3, and one that was cancelled 4. `--json` prints the state and the reason."""
    run("submit", "--id", "one", "--arg", "day=1", "etl:load")
    with stored_jobs() as jobs:
        start(jobs, "one")
        if result.state == "cancelled":
            jobs.start_ending("one", jobs.read("one"), JobState.CANCELLED, result.reason)
        finish(jobs, "one", result)
    again = run("submit", "--wait", "--id", "one", "--arg", "day=1", "etl:load")
    assert (again.exit_code, text in again.stdout) == (code, True)
    as_json = run("submit", "--wait", "--json", "--id", "one", "--arg", "day=1", "etl:load")
    assert as_json.exit_code == code
    assert json.loads(as_json.stdout)["state"] == result.state


def test_the_address_of_the_spark_ui_is_stored_with_the_process(places):
    """It is in `jobs --json` while the run lives. The address of an earlier run does not replace that of a later one."""
    run("submit", "--id", "one", "--arg", "day=1", "etl:load")
    with stored_jobs() as jobs:
        first = start(jobs, "one")
        jobs.show_ui(first, "http://worker-7:4040")
        jobs.show_ui(first, "http://worker-7:4040")  # a second session with the same UI
        (listed,) = json.loads(run("jobs", "--json").stdout)["jobs"]
        assert listed["process"]["ui"] == "http://worker-7:4040"
        jobs.show_ui(type(first)("one", 2, 0), "http://worker-8:4040")
        assert jobs.process("one")["ui"] == "http://worker-7:4040"


def write_log(places, job, name, text):
    folder = places / "work" / job
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


def test_logs_prints_the_output_of_the_latest_run(places):
    """Without `--run`, it is the latest run, with the process that finished its commits. The bytes are unchanged."""
    run("submit", "--id", "one", "--arg", "day=1", "etl:load")
    write_log(places, "one", "run-1.log", "first\n")
    write_log(places, "one", "run-10.log", "tenth é\n")
    write_log(places, "one", "run-10-finish.log", "finished\n")
    write_log(places, "one", "run-x.log", "not a run\n")
    assert run("logs", "one").stdout == "tenth é\nfinished\n"
    assert run("logs", "--run", "1", "one").stdout == "first\n"
    assert list(run_logs(places / "work", "one")) == [(1, False), (10, False), (10, True)]


@pytest.mark.parametrize(
    ("host", "arguments", "text"),
    [
        (None, [], "there is no output of job 'one', because no run of it has started"),
        ("worker-7", [], "run 1 of the job is on worker-7: run this command there"),
        (socket.gethostname(), ["--run", "3"], "name the --work folder of the driver"),
    ],
)
def test_logs_that_are_not_here(places, host, arguments, text):
    """The message says on which host the output is, or which folder to name."""
    run("submit", "--id", "one", "--arg", "day=1", "etl:load")
    with stored_jobs() as jobs:
        if host is not None:
            start(jobs, "one", host=host)
        refused = run("logs", *arguments, "one")
    assert refused.exit_code == 1
    assert text in refused.stderr


def test_logs_of_an_unknown_job(places):
    """One line says that the job does not exist."""
    refused = run("logs", "nothing")
    assert refused.exit_code == 1
    assert "'nothing'" in refused.stderr


def test_logs_can_be_followed_until_the_job_ends(places):
    """New output, also of a later run, is printed once and in order. The command ends with the job."""
    run("submit", "--id", "one", "--arg", "day=1", "etl:load")
    write_log(places, "one", "run-1.log", "old\n")
    write_log(places, "one", "run-2.log", "second, ")
    with stored_jobs() as jobs, started("logs", "--follow", "one") as command:
        start(jobs, "one")
        assert command.stdout.read(8) == "second, "
        write_log(places, "one", "run-2.log", "second, more\n")
        write_log(places, "one", "run-3.log", "third\n")
        finish(jobs, "one", Result.of_value(None))
        output, errors = command.communicate(timeout=30)
    assert (command.returncode, output, errors) == (0, "more\nthird\n", "")


def test_watch_prints_each_change_until_it_is_interrupted(places):
    """In a pipe, the table is printed when it changes. Ctrl-C ends the command with 0 and without a traceback."""
    run("submit", "--id", "one", "--arg", "day=1", "etl:load")
    with started("jobs", "--watch") as command:
        assert command.stdout.readline().split()[:2] == ["id", "state"]
        assert command.stdout.readline().split()[:2] == ["one", "submitted"]
        with stored_jobs() as jobs:
            start(jobs, "one")
            assert command.stdout.readline().split()[:2] == ["id", "state"]
            assert command.stdout.readline().split()[:2] == ["one", "running"]
        command.send_signal(signal.SIGINT)
        _, errors = command.communicate(timeout=30)
    assert (command.returncode, errors) == (0, "")


@pytest.mark.parametrize("option", [["--json"], ["--prune", "1d"]])
def test_watch_stands_alone(places, option):
    """`--watch` with `--json` or `--prune` is a wrong command line."""
    refused = run("jobs", "--watch", *option)
    assert refused.exit_code == 2
    assert "--watch cannot be combined with --json or --prune" in refused.stderr


def test_a_failing_store_does_not_fail_a_session(places, caplog):
    """If the address of the Spark UI cannot be stored, the run logs a warning and continues."""

    def fail(url):
        raise JobError("the store is gone")

    with stored_jobs() as jobs:
        job = Job("one", 1, jobs.handles("one", "steps"), jobs.handles("one", "commits"), show_ui=fail)
    job._progress.ui = lambda: "http://worker-7:4040"
    job.show()
    assert "the address of the Spark UI could not be stored: JobError: the store is gone" in caplog.text
