"""The commands that manage jobs, with a real SQLite store and without a driver."""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import sqlite3
import subprocess
import sys
import time
from base64 import b64encode

import pytest
from click.testing import CliRunner
from pyspark import cloudpickle

from stagecrew.cli import main
from stagecrew.doctor import coordination_store
from stagecrew.errors import ConfigurationError, StoreUnsupported
from stagecrew.recovery.jobs.fenced import FencedJobs
from stagecrew.recovery.jobs.job import Job
from stagecrew.recovery.jobs.record import JobRecord, JobState
from stagecrew.recovery.jobs.result import Result
from stagecrew.recovery.jobs.spec import JobSpec
from stagecrew.recovery.jobs.store import Jobs, open_jobs
from stagecrew.recovery.leadership.fencing import HOLDER, TERM, LeaderInfo
from stagecrew.recovery.run import main as run_module
from stagecrew.recovery.stores.contract import FORMAT, Create, Replace


@pytest.fixture
def places(tmp_path, monkeypatch):
    """A folder with a store, a state storage and code for jobs. The environment variables name the two places."""
    (tmp_path / "state").mkdir()
    (tmp_path / "etl.py").write_text("def load(day):\n    return day\n")
    (tmp_path / "job.py").write_text("print(1)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STAGECREW_STORE", f"sqlite://{tmp_path}/jobs.db")
    monkeypatch.setenv("STAGECREW_STATE", str(tmp_path / "state"))
    return tmp_path


def run(*arguments):
    return CliRunner().invoke(main, arguments, catch_exceptions=False)


@contextlib.contextmanager
def stored_jobs():
    with open_jobs(os.environ["STAGECREW_STORE"], os.environ["STAGECREW_STATE"]) as jobs:
        yield FencedJobs(jobs._store, jobs._storage)


def end(job, result):
    """Ends a job with this result, as its run would."""
    with stored_jobs() as jobs:
        record, version = jobs.read(job)
        jobs.start_run(job, (record, version), jobs.claim_version(job))
        jobs.finish(job, jobs.read(job), JobState(result.state), result)


def test_an_id_submitted_twice_is_one_job(places):
    """A submit with an existing id and the same content returns the same job, even after the job has ended.

    Other content is refused.
    """
    assert run("submit", "--id", "nightly", "--arg", "day=1", "etl:load").output == "nightly\n"
    again = run("submit", "--json", "--id", "nightly", "--arg", "day=1", "etl:load")
    assert (again.exit_code, json.loads(again.output)) == (0, {"id": "nightly"})
    other = run("submit", "--id", "nightly", "--arg", "day=2", "etl:load")
    assert (other.exit_code, "already exists with different content (state: submitted)" in other.stderr) == (1, True)
    end("nightly", Result.of_value(7))
    assert run("submit", "--id", "nightly", "--arg", "day=1", "etl:load").output == "nightly\n"
    with stored_jobs() as jobs:
        assert jobs.names() == ["nightly"]
        assert jobs.read("nightly")[0].state == "succeeded"


@pytest.mark.parametrize("option", ["store", "state"])
@pytest.mark.parametrize("command", [["jobs"], ["submit", "etl:load"], ["driver"], ["result", "one"]])
def test_a_missing_store_or_state_option(places, monkeypatch, option, command):
    """The message for a missing option names the option and the environment variable."""
    monkeypatch.delenv(f"STAGECREW_{option.upper()}")
    refused = run(*command)
    assert refused.exit_code == 2
    assert f"Missing option '--{option}'. Set STAGECREW_{option.upper()} or pass --{option}, such as " in refused.stderr


def test_options_can_follow_a_function(places):
    """Options of `submit` are accepted after a function. Words after a script are the script's arguments, even if they
    look like options."""
    assert run("submit", "--id", "one", "etl:load", "--arg", "day=1").output == "one\n"
    assert run("submit", "etl:load", "--arg=day=1", "--json", "--id", "one").output == '{"id": "one"}\n'
    assert run("submit", "job.py", "--arg", "day=1", "--json", "--id", "two").output.startswith("job.py-")
    with stored_jobs() as jobs:
        (script,) = (name for name in jobs.names() if name != "one")
        assert jobs.spec(script).arguments == ("--arg", "day=1", "--json", "--id", "two")


def test_a_job_of_an_earlier_stagecrew(places):
    """For a job stored by an earlier version, which recorded the digest of the job's bytes, a submit with the same
    content returns the job, and other content is refused."""
    run("submit", "--id", "old", "--arg", "day=1", "etl:load")
    module = b"def load(day):\n    return day\n"
    body = {
        "format": 1,
        "target": "etl:load",
        "arguments": {"pickled": b64encode(cloudpickle.dumps({"day": "1"})).decode()},
        "conf": {},
        "files": [["etl.py", hashlib.sha256(module).hexdigest(), b64encode(module).decode()]],
        "script": None,
        "max_attempts": 10,
    }
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    with stored_jobs() as jobs:
        record, version = jobs.read("old")
        jobs._store.transact(Replace("jobs/old", dataclasses.replace(record, digest=digest).to_bytes(), version))
    assert run("submit", "--id", "old", "--arg", "day=1", "etl:load").output == "old\n"
    assert run("submit", "--id", "old", "--arg", "day=2", "etl:load").exit_code == 1
    assert JobSpec.from_bytes(json.dumps(body).encode()).arguments == cloudpickle.dumps({"day": "1"})


def test_a_stored_spec_submitted_again(places):
    """A spec that is read from the store and submitted again with its id is the same job."""
    run("submit", "--id", "one", "--arg", "day=1", "etl:load")
    with stored_jobs() as jobs:
        assert jobs.submit(jobs.spec("one"), "one") == "one"


def test_the_longest_names(places):
    """The ids of a job's commits can contain the longest job id. The name of a submitted file can be even longer."""
    long = places / f"{'x' * 200}.py"
    long.write_text("print(1)\n")
    assert run("submit", "--id", "y" * 100, long.name).output == "y" * 100 + "\n"
    made = run("submit", "--json", long.name)
    assert (made.exit_code, list(json.loads(made.output))) == (0, ["id"])
    assert len(json.loads(made.output)["id"]) < 100
    with stored_jobs() as jobs:
        assert jobs.names() == sorted([json.loads(made.output)["id"], "y" * 100])
        record = Job("y" * 100, 1, jobs.handles("y" * 100, "steps"), jobs.handles("y" * 100, "commits"))
        name = "z" * 40
        assert len(record.step(name, lambda: record.commit_id(name))) == 182
        with pytest.raises(ConfigurationError, match="has 201 characters, and the limit is 200"):
            record.commit_id("z" * 100)


def test_a_job_does_not_depend_on_its_submitter(places):
    """Once a job's id is printed, its script and files are stored, so the originals can be deleted."""
    job = run("submit", "--conf", "spark.x=1=2", "--py-files", "etl.py", "job.py", "--verbose", "a b").output.strip()
    (places / "job.py").unlink()
    (places / "etl.py").unlink()
    with stored_jobs() as jobs:
        spec = jobs.spec(job)
    assert (spec.script, spec.arguments, dict(spec.files)) == (
        b"print(1)\n", ("--verbose", "a b"), {"etl.py": b"def load(day):\n    return day\n"},
    )  # fmt: skip
    assert spec.conf == {"spark.x": "1=2"}


def test_the_exit_code_of_result(places):
    """`result` prints a job's value, or the error with its traceback, and its exit code tells how the job ended."""
    for job in ("one", "two", "three"):
        run("submit", "--id", job, "--arg", "day=1", "etl:load")
    assert (run("result", "one").exit_code, run("result", "one", "--wait", "--timeout", "0.3").exit_code) == (5, 5)
    end("one", Result.of_value({"rows": 3}))
    try:
        raise ValueError("no such day")
    except ValueError as error:
        end("two", Result.of_error(error))
    printed = run("result", "one", "--wait")
    assert (printed.exit_code, json.loads(printed.output)) == (0, {"rows": 3})
    failed = run("result", "two")
    assert failed.exit_code == 3
    assert "job two has failed: ValueError: no such day" in failed.output
    assert "Traceback" in failed.output
    found = json.loads(run("result", "--json", "two").output)
    assert (found["state"], found["reason"]) == ("failed", "ValueError: no such day")
    assert json.loads(run("result", "--json", "three").output)["state"] == "submitted"
    end("three", Result("failed", "x" * 200))
    assert "x" * 200 in run("jobs").output, "a pipe gets the whole reason"


def test_a_result_cannot_control_the_terminal(places):
    """Escape sequences and direction marks in values, errors and tracebacks are printed as codes. Newlines and tabs of
    a value are kept."""
    for job in ("one", "two"):
        run("submit", "--id", job, "--arg", "day=1", "etl:load")
    end("one", Result.of_value("a\x1b[2Jb\u202ec\nnext\tcell"))
    assert run("result", "one").output == "a\\x1b[2Jb\\u202ec\nnext\tcell\n"
    assert json.loads(run("result", "--json", "one").output)["value"] == "a\x1b[2Jb\u202ec\nnext\tcell"
    try:
        raise ValueError("no\x1b]0;title\x07 [red]such[/red] day")
    except ValueError as error:
        end("two", Result.of_error(error))
    printed = run("result", "two").output
    assert "job two has failed: ValueError: no\\x1b]0;title\\x07 [red]such[/red] day\n" in printed
    assert "Traceback" in printed
    assert [one for one in printed if not one.isprintable() and one != "\n"] == []


@pytest.mark.parametrize("ends_after", [1, 2, 3])
def test_a_job_that_ends_during_result(places, monkeypatch, ends_after):
    """The state, the value and the exit code of `result` are consistent, even if the job ends between its reads."""
    run("submit", "--id", "one", "--arg", "day=1", "etl:load")
    real, seen = Jobs.read, []

    def read(self, job):
        found = real(self, job)
        seen.append(job)
        if len(seen) == ends_after:
            end("one", Result.of_value(7))
        return found

    monkeypatch.setattr(Jobs, "read", read)
    outcome = run("result", "--json", "one")
    body = json.loads(outcome.output)
    assert (outcome.exit_code, body["state"], body.get("value")) in [(5, "submitted", None), (0, "succeeded", 7)]


def test_the_result_of_a_cancelled_job(places):
    """For a cancelled job, `result` has exit code 4, and shows a reason and no value."""
    run("submit", "--id", "one", "--arg", "day=1", "etl:load")
    with stored_jobs() as jobs:
        jobs.start_ending("one", jobs.read("one"), JobState.CANCELLED, "somebody has cancelled it")
        assert run("result", "one").exit_code == 5  # its decided commits may not be applied yet
        result = Result("cancelled", "somebody has cancelled it")
        jobs.finish("one", jobs.read("one"), JobState.CANCELLED, result)
    outcome = run("result", "one", "--wait")
    assert (outcome.exit_code, outcome.output) == (4, "job one has been cancelled: somebody has cancelled it\n")
    outcome = run("result", "--json", "one")
    body = json.loads(outcome.output)
    assert (outcome.exit_code, body["state"], body["value"]) == (4, "cancelled", None)
    assert body["reason"] == "somebody has cancelled it"


@pytest.mark.parametrize("damage", [b"half", None])
def test_an_unreadable_result(places, damage):
    """A damaged or missing result is an error that names the job. Other results are printed, and nothing is deleted."""
    for job in ("one", "two"):
        run("submit", "--id", job, "--arg", "day=1", "etl:load")
        end(job, Result.of_value(job))
    [file] = [path for path in (places / "state").rglob("one-*") if "results" in str(path.parent)]
    file.unlink() if damage is None else file.write_bytes(damage)
    for words in (("one",), ("--json", "one"), ("--wait", "one")):
        outcome = run("result", *words)
        assert (outcome.exit_code, outcome.output) == (1, outcome.stderr)
        assert "the result of job 'one' (state: succeeded) cannot be read" in outcome.stderr
        assert "Traceback" not in outcome.stderr
    assert run("result", "two").output == "two\n"
    assert [one["id"] for one in json.loads(run("jobs", "--json").output)["jobs"]] == ["one", "two"]
    assert file.exists() == (damage is not None)
    with stored_jobs() as jobs:
        assert jobs._store.read("results/one") is not None


def test_cancel_can_be_repeated(places):
    """A job can be cancelled repeatedly. A cancel does not change a job that has ended."""
    run("submit", "--id", "one", "--arg", "day=1", "etl:load")
    assert "the leader will end it" in run("cancel", "one").output
    assert json.loads(run("cancel", "--json", "one").output) == {"id": "one", "state": "submitted", "requested": True}
    with stored_jobs() as jobs:
        assert jobs.is_cancel_requested("one")
    end("one", Result.of_value(None))
    assert "has already ended (succeeded)" in run("cancel", "one").output


def test_one_unreadable_job_does_not_hide_the_others(places):
    """`jobs` lists all readable jobs and names the unreadable ones, of which nothing is deleted."""
    for job in ("good", "bad"):
        run("submit", "--id", job, "--arg", "day=1", "etl:load")
    with stored_jobs() as jobs:
        jobs._store.transact(Replace("jobs/bad", b"not a record", 0))
    listed = json.loads(run("jobs", "--json").output)
    assert [one["id"] for one in listed["jobs"]] == ["good"]
    assert [one["id"] for one in listed["unreadable"]] == ["bad"]
    assert "unreadable" in run("jobs").output
    for command in (("result", "bad"), ("cancel", "bad"), ("submit", "--id", "bad", "--arg", "day=1", "etl:load")):
        outcome = run(*command)
        assert (outcome.exit_code, "cannot be read" in outcome.stderr) == (1, True)
    with stored_jobs() as jobs:
        assert jobs.names() == ["bad", "good"]


def test_a_record_of_a_newer_stagecrew(places):
    """The message for a job that a newer stagecrew stored names the newer format."""
    run("submit", "--id", "new", "--arg", "day=1", "etl:load")
    with stored_jobs() as jobs:
        newer = re.sub(rb'"format": \d+', b'"format": 99', JobRecord("d", 1, 0.0).to_bytes())
        jobs._store.transact(Replace("jobs/new", newer, 0))
    outcome = run("result", "new")
    assert (outcome.exit_code, "format 99" in outcome.stderr) == (1, True)


def test_leader(places):
    """`leader` prints the leader's term, host and process, as text and as JSON. The exit code is 0."""
    with stored_jobs() as jobs:
        jobs._store.ensure("leader", TERM)
        info = LeaderInfo.of_this_process(1, jobs._store.session)
        jobs._store.transact(Create(HOLDER, info.to_bytes(), ephemeral=True), Replace(TERM, info.to_bytes(), 0))
        outcome = run("leader")
        assert (outcome.exit_code, outcome.output) == (0, f"term 1: process {os.getpid()} on {info.host}\n")
        outcome = run("leader", "--json")
        assert (outcome.exit_code, json.loads(outcome.output)) == (
            0,
            {"term": 1, "host": info.host, "pid": os.getpid()},
        )
        (places / "state").rename(places / "away")
        assert run("leader").exit_code == 0, "`leader` must read only the store"
        assert run("leader", "--state", "/nowhere").exit_code == 0, "`leader` must accept --state like other commands"
    assert run("leader").exit_code == 1  # the leader's session has ended


#: Writes a store with one job, as stagecrew did before format 2. Arguments: the path, the format number, and how the
#: process ends.
OLD_STORE = """if True:
    import json, os, sqlite3, sys
    path, number, ending = sys.argv[1:]
    database = sqlite3.connect(path, isolation_level=None)
    database.execute("PRAGMA journal_mode = WAL")
    for statement in (
        "BEGIN",
        "CREATE TABLE sessions (name TEXT PRIMARY KEY) WITHOUT ROWID",
        "CREATE TABLE entries (parent TEXT, name TEXT, value BLOB NOT NULL, version INTEGER NOT NULL, session TEXT,"
        " PRIMARY KEY (parent, name)) WITHOUT ROWID",
        "CREATE INDEX ephemerals ON entries (session) WHERE session IS NOT NULL",
        "PRAGMA application_id = 1668441463",
        f"PRAGMA user_version = {number}",
        "COMMIT",
    ):
        database.execute(statement)
    record = {"format": 1, "digest": "d", "max_attempts": 10, "submitted": 1.0, "state": "running", "run": 1,
              "outcome": None, "reason": "", "ended": None, "clean": False, "write": "0" * 32}
    entries = {"jobs": b"", "specs": b"", "results": b"", "jobs/one": json.dumps(record).encode(),
               "jobs/one/claim": b"{}", "jobs/one/steps": b"", "jobs/one/commits": b"",
               "specs/one": b"{}", "specs/one/locks": b""}
    for key, value in entries.items():
        parent, _, name = key.rpartition("/")
        database.execute("INSERT INTO entries VALUES (?, ?, ?, 0, NULL)", (parent, name, value))
    database.execute("INSERT INTO sessions VALUES ('a-session')")
    os.mkdir(path + ".sessions")
    open(path + ".sessions/a-session", "w").close()
    if ending == "killed":
        os._exit(0)  # its transactions stay in the write-ahead log
    database.close()
"""


def bytes_below(folder):
    """Returns the bytes of each file below a folder, except the write-ahead log's index, which readers write too."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.suffix != ".db-shm"}


@pytest.mark.parametrize("ending", ["closed", "killed"])
@pytest.mark.parametrize("number", [1, 0])
def test_a_store_of_an_older_stagecrew(places, number, ending):
    """Commands, a driver and a run refuse a store of an older format, or without a format number, with one line.

    The line contains the format found, the supported format, and the remedy. No byte of the store or of the storage
    changes, even if the process that wrote the store was killed.
    """
    subprocess.run(
        [sys.executable, "-c", OLD_STORE, str(places / "jobs.db"), str(number), ending], check=True, timeout=60
    )
    (places / "state" / "a-state").write_bytes(b"of the job")
    (places / "work").mkdir()
    before = bytes_below(places)
    assert (places / "jobs.db-wal" in before) == (ending == "killed")
    commands = (
        ("jobs",), ("jobs", "--json"), ("leader",), ("cancel", "one"), ("result", "one"), ("sweep", "--grace", "0"),
        ("driver", "--work", "work"), ("submit", "--id", "two", "--arg", "day=1", "etl:load"),
    )  # fmt: skip
    words = (
        f"has format {number}, but this version of stagecrew supports only format {FORMAT}",
        "An older stagecrew wrote it", "it was not changed",
        "Finish its jobs with that version, or use another store",
    )  # fmt: skip
    for command in commands:
        outcome = run(*command)
        assert outcome.exit_code == 1, command
        [line] = outcome.stderr.splitlines()
        assert not [part for part in words if part not in line], line
        assert bytes_below(places) == before, command
    started = [sys.executable, run_module.__file__, "--job=one", "--folder=work", "--run=2", "--claim=1", "--term=1"]
    ended = subprocess.run(started, check=False, timeout=120, capture_output=True, text=True)
    assert ended.returncode == run_module.EXIT_LOST
    [line] = ended.stderr.splitlines()
    assert "run 2 of job 'one' cannot start" in line
    assert not [part for part in words if part not in line], line
    with pytest.raises(StoreUnsupported, match="An older stagecrew wrote it"), stored_jobs():
        pass
    found = coordination_store(os.environ["STAGECREW_STORE"])
    assert found.status == "failed"
    assert not [part for part in words if part not in found.found], found
    assert bytes_below(places) == before


def test_a_store_of_a_newer_stagecrew(places):
    """Every command refuses a store of a newer format, and changes nothing.

    The exit code is 1, and the message is one line with the format.
    """
    run("submit", "--id", "one", "--arg", "day=1", "etl:load")
    with contextlib.closing(sqlite3.connect(places / "jobs.db")) as database:
        database.execute(f"PRAGMA user_version = {FORMAT + 1}")
    commands = (
        ("jobs",), ("jobs", "--json"), ("leader",), ("cancel", "one"), ("result", "one"), ("sweep", "--grace", "0"),
        ("driver",), ("submit", "--id", "two", "--arg", "day=1", "etl:load"),
    )  # fmt: skip
    files = {path for path in (places / "state").rglob("*") if path.is_file()}
    for words in commands:
        outcome = run(*words)
        assert outcome.exit_code == 1, words
        [line] = outcome.stderr.splitlines()
        assert f"format {FORMAT + 1}" in line
    assert {path for path in (places / "state").rglob("*") if path.is_file()} == files
    with contextlib.closing(sqlite3.connect(places / "jobs.db")) as database:
        assert database.execute("PRAGMA user_version").fetchone() == (FORMAT + 1,)
        database.execute(f"PRAGMA user_version = {FORMAT}")
    assert [one["id"] for one in json.loads(run("jobs", "--json").output)["jobs"]] == ["one"]


def test_leader_without_a_driver(places):
    """If no driver leads, `leader` says so and has exit code 1."""
    outcome = run("leader")
    assert (outcome.exit_code, "no driver leads" in outcome.output) == (1, True)
    assert run("leader", "--json").output == "null\n"
    assert run("jobs").output == "no jobs\n"


def test_doctor_checks_store_and_storage(places, monkeypatch):
    """`doctor` reports whether the store and the storage can be used, and leaves no files there."""
    from stagecrew import doctor

    found = {check.name: check for check in doctor.examine(None)}
    assert (found["Store"].status, found["State"].status) == ("ok", "ok")
    assert "there is no leader" in found["Store"].found
    assert [path for path in (places / "state").rglob("*") if path.is_file()] == []
    monkeypatch.setenv("STAGECREW_STORE", "sqlite:///nowhere/at/all/jobs.db")
    monkeypatch.setenv("STAGECREW_STATE", str(places / "absent"))
    found = {check.name: check for check in doctor.examine(None)}
    assert (found["Store"].status, found["State"].status) == ("failed", "failed")
    assert found["Store"].remedy


def test_sweep(places):
    """`sweep` deletes only unreferenced states that are older than its grace period."""
    run("submit", "--id", "one", "--arg", "day=1", "etl:load")
    before = {path for path in (places / "state").rglob("*") if path.is_file()}
    [state] = [path for path in before if "spec" in str(path)]
    state.with_name("orphan").write_bytes(b"left by a dead process")
    assert json.loads(run("sweep", "--json").output)["removed"] == 0
    assert json.loads(run("sweep", "--json", "--grace", "0").output)["removed"] == 1
    assert {path for path in (places / "state").rglob("*") if path.is_file()} == before
    with stored_jobs() as jobs:
        assert jobs.spec("one").target == "etl:load"


def test_a_sweep_with_unreadable_records(places):
    """`sweep` names unreadable records, keeps all states that they could refer to, and has exit code 1."""
    for job in ("one", "two"):
        run("submit", "--id", job, "--arg", "day=1", "etl:load")
    with stored_jobs() as jobs:
        jobs._store.transact(Replace("specs/one", b"no reference", jobs._store.read("specs/one").version))
    before = {path for path in (places / "state").rglob("*") if path.is_file()}
    outcome = run("sweep", "--grace", "0")
    assert (outcome.exit_code, "specs/one" in outcome.output) == (1, True), outcome.output
    outcome = run("sweep", "--grace", "0", "--json")
    body = json.loads(outcome.output)
    assert (outcome.exit_code, body["removed"], len(body["failed"])) == (1, 0, 1)
    assert {path for path in (places / "state").rglob("*") if path.is_file()} == before


def submit_and_clean(job, ended_ago):
    """Submits a job, ends it `ended_ago` seconds in the past as its run would, and cleans it as a leader would."""
    run("submit", "--id", job, "--arg", "day=1", "etl:load")
    with stored_jobs() as jobs:
        jobs._clock = lambda: time.time() - ended_ago
        jobs.start_run(job, jobs.read(job), jobs.claim_version(job))
        jobs.finish(job, jobs.read(job), JobState.SUCCEEDED, Result.of_value(job))
        jobs.clean_up(job)


def test_prune(places):
    """`jobs --prune` removes clean jobs that ended longer ago than the given age, with their results, and prints their
    number.

    It never removes another job, and a removed id can be submitted again.
    """
    for job, ended_ago in (("old", 40 * 86400), ("older", 50 * 86400), ("young", 20 * 86400)):
        submit_and_clean(job, ended_ago)
    run("submit", "--id", "open", "--arg", "day=1", "etl:load")
    run("submit", "--id", "unclean", "--arg", "day=1", "etl:load")
    end("unclean", Result.of_value(7))
    assert [one["id"] for one in json.loads(run("jobs", "--json").output)["jobs"]] == [
        "old", "older", "young", "open", "unclean",
    ]  # fmt: skip
    states = len(bytes_below(places / "state"))
    outcome = run("jobs", "--prune", "30d")
    assert (outcome.exit_code, outcome.output) == (0, "2 jobs removed\n")
    assert len(bytes_below(places / "state")) == states - 2
    assert [one["id"] for one in json.loads(run("jobs", "--json").output)["jobs"]] == ["young", "open", "unclean"]
    assert "job 'old' does not exist" in run("result", "old").stderr
    assert run("result", "young").output == "young\n"
    assert json.loads(run("jobs", "--json", "--prune", "30d").output) == {"removed": 0, "failed": {}}
    assert run("jobs", "--prune", "12h").output == "1 job removed\n"
    assert json.loads(run("jobs", "--json", "--prune", "0s").output) == {"removed": 0, "failed": {}}
    assert run("submit", "--id", "old", "--arg", "day=2", "etl:load").output == "old\n"
    with stored_jobs() as jobs:
        assert jobs.open_names() == ["old", "open", "unclean"]
        assert jobs.result("unclean").value() == 7


def test_a_prune_that_cannot_remove_a_job(places):
    """`jobs --prune` removes all old jobs that it can, names each one that it cannot remove, and then has exit code
    1."""
    for job in ("bad", "good"):
        submit_and_clean(job, 40 * 86400)
    with stored_jobs() as jobs:
        jobs._store.transact(Replace("jobs/bad", b"not a record", jobs._store.read("jobs/bad").version))
    outcome = run("jobs", "--prune", "30d")
    assert outcome.exit_code == 1
    assert outcome.output.splitlines()[0] == "1 job removed"
    assert "job 'bad': its record cannot be read" in outcome.output.splitlines()[1]
    outcome = run("jobs", "--json", "--prune", "30d")
    assert (outcome.exit_code, list(json.loads(outcome.output)["failed"])) == (1, ["bad"])
    with stored_jobs() as jobs:
        assert jobs.names() == ["bad"]


def test_the_option_keep_of_a_driver(places, monkeypatch):
    """`driver --keep` sets the age at which a leader removes ended jobs. Without it, a leader keeps all ended jobs."""
    keep_arguments = []

    class Started:
        def __init__(self, *arguments):
            keep_arguments.append(arguments[-1])

        def close(self):
            return True

    monkeypatch.setattr("stagecrew.recovery.driver.service.Driver", Started)
    monkeypatch.setattr("threading.Event.wait", lambda *_: True)
    for words in ((), ("--keep", "90d"), ("--keep", "12h")):
        outcome = run("driver", "--work", "work", *words)
        assert outcome.exit_code == 0, outcome.output
    assert keep_arguments == [None, 90 * 86400.0, 12 * 3600.0]


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("result", "absent"), 1, "job 'absent' does not exist"),
        (("cancel", "absent"), 1, "job 'absent' does not exist"),
        (("submit", "--id", "", "--arg", "day=1", "etl:load"), 1, "1 to 100 characters"),
        (("submit", "--id", "x" * 101, "--arg", "day=1", "etl:load"), 1, "1 to 100 characters, and this one has 101"),
        (("submit", "etl.load"), 1, "module:function"),
        (("submit", "etl:unload"), 1, "does not define 'unload'"),
        (("submit", "no_such_module:load"), 1, "module 'no_such_module' is neither"),
        (("submit", "absent.py"), 1, "cannot be read"),
        (("submit", "etl:load", "1"), 1, "--arg name=text"),
        (("submit", "--arg", "day=1", "job.py"), 1, "--arg is only for functions"),
        (("submit", "--arg", "day", "etl:load"), 2, "is not valid: write key=value"),
        (("submit", "etl:load"), 1, "etl:load is called without day"),
        (("submit", "etl:load", "--arg", "days=1"), 1, "etl:load is called without day and does not take days"),
        (("submit", "--conf", "=1", "etl:load"), 2, "is not valid: write key=value"),
        (("submit", "--max-attempts", "0", "etl:load"), 2, "0 is not in the range"),
        (("jobs", "--store", "postgres://host/db"), 1, "sqlite:///path"),
        (("jobs", "--store", "sqlite:///nowhere/at/all/jobs.db"), 1, "nowhere"),
        (("jobs", "--state", "nowhere"), 1, "is not an existing folder"),
        (("jobs", "--state", "gopher://host/x"), 1, "is not the address of a state storage"),
        (("submit", "--conf", "spark.submit.deployMode=cluster", "etl:load"), 1, "client mode"),
        (("driver", "--store", "postgres://host/db"), 1, "sqlite:///path"),
        (("driver", "--state", "nowhere"), 1, "is not an existing folder"),
        (("driver", "--work", "etl.py/work"), 1, "etl.py/work is not writable"),
        (("driver", "--work", "/proc"), 1, "/proc is not writable"),
        (("submit",), 2, "Missing argument"),
        (("jobs", "--prune", "30"), 2, "'30' is not a valid age: write a number and s, m, h or d, such as 30d"),
        (("jobs", "--prune", "-1d"), 2, "is not a valid age"),
        (("jobs", "--prune", "5ms"), 2, "is not a valid age"),
        (("driver", "--keep", "for ever"), 2, "is not a valid age"),
    ],
)
def test_bad_input(places, arguments, code, text):
    """A wrong call prints a message that says what to write, has the expected exit code, and stores nothing."""
    outcome = run(*arguments)
    assert (outcome.exit_code, text in outcome.stderr) == (code, True), outcome.output + outcome.stderr
    assert "Traceback" not in outcome.stderr
    with stored_jobs() as jobs:
        assert jobs.names() == []


def test_without_a_store(monkeypatch):
    """Without a store, `jobs` has exit code 2 and names the option."""
    monkeypatch.delenv("STAGECREW_STORE", raising=False)
    monkeypatch.delenv("STAGECREW_STATE", raising=False)
    outcome = run("jobs")
    assert (outcome.exit_code, "--store" in outcome.stderr) == (2, True)


def test_the_api_sees_the_same_jobs(places):
    """The Python API shows the jobs that the commands submitted."""
    run("submit", "--id", "one", "--arg", "day=1", "etl:load")
    with stored_jobs() as jobs:
        assert isinstance(jobs, Jobs)
        assert jobs.result("one") is None
        records, unreadable = jobs.all()
        assert (list(records), unreadable) == (["one"], {})
