"""Jobs without Spark: what may become of one, and what is stored of it."""

import dataclasses
import itertools
import subprocess
import sys
import zipfile

import pytest

from stagecrew.errors import JobError, JobFailed, JobUnreadable, RecoveryMisused, StoreUnsupported
from stagecrew.recovery.jobs.record import JobRecord, JobState
from stagecrew.recovery.jobs.result import Result
from stagecrew.recovery.jobs.spec import JobSpec

NEW = JobRecord(digest="d", max_attempts=2, submitted=1.0)

CHANGES = {
    "start": lambda record: record.started(),
    "cancel": lambda record: record.ending(JobState.CANCELLED, "asked for"),
    "give up": lambda record: record.ending(JobState.FAILED, "lost"),
    "succeed": lambda record: record.finished(JobState.SUCCEEDED, "", 2.0),
    "fail": lambda record: record.finished(JobState.FAILED, "why", 2.0),
    "be cancelled": lambda record: record.finished(JobState.CANCELLED, "why", 2.0),
    "clean": lambda record: record.cleaned(),
}


def test_no_order_of_changes_runs_a_job_behind_its_end():
    """In all 137,256 orders of up to six changes: an end stays, runs are not more than allowed, only what has ended is clean."""
    refused = taken = 0
    for length in range(1, 7):
        for order in itertools.product(CHANGES, repeat=length):
            record = NEW
            for name in order:
                try:
                    after = CHANGES[name](record)
                except JobError:
                    refused += 1
                    break
                taken += 1
                assert after.run <= after.max_attempts
                assert after.run - record.run == (name == "start")
                if record.state.is_terminal:
                    assert after == dataclasses.replace(record, clean=True)
                if after.clean:
                    assert after.state.is_terminal
                if after.state is JobState.CANCELLED and not record.state.is_terminal:
                    assert record.state is JobState.ENDING
                assert (after.outcome is not None) == (after.state is JobState.ENDING)
                record = after
    assert refused > taken > 0


def test_an_ending_job_becomes_what_it_was_ended_as():
    """A job that is ending as cancelled can neither succeed nor fail, and one that was given up is not cancelled."""
    cancelled, lost = CHANGES["cancel"](NEW.started()), CHANGES["give up"](NEW.started())
    assert CHANGES["be cancelled"](cancelled).state is JobState.CANCELLED
    assert CHANGES["fail"](lost).state is JobState.FAILED
    for record, change in ((cancelled, "succeed"), (cancelled, "fail"), (lost, "be cancelled"), (lost, "succeed")):
        with pytest.raises(JobError, match="ending as"):
            CHANGES[change](record)


def test_a_record_is_what_was_written():
    """Each state of a record comes back from its bytes, and no two writes of it are alike."""
    for record in (NEW, NEW.started(), CHANGES["cancel"](NEW), CHANGES["fail"](NEW.started()).cleaned()):
        assert JobRecord.from_bytes(record.to_bytes()) == record
        assert record.to_bytes() != record.to_bytes()


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[1]", b"\xff", NEW.to_bytes()[:-5], NEW.to_bytes().replace(b"submitted", b"smitten")]
)
def test_a_record_that_is_none(data):
    """Bytes that are no record are named, and nothing else is raised."""
    with pytest.raises(JobUnreadable):
        JobRecord.from_bytes(data)


def test_a_newer_record():
    """A record of a newer format says which format this one reads."""
    with pytest.raises(StoreUnsupported, match="format 2"):
        JobRecord.from_bytes(NEW.to_bytes().replace(b'"format": 1', b'"format": 2'))


def test_the_digest_tells_jobs_apart(tmp_path):
    """Two jobs of the same content have one digest; another argument, option or byte of a file gives another."""
    module = tmp_path / "etl.py"
    module.write_text("def load(day):\n    return day\n")
    spec = JobSpec.of_function("etl:load", {"day": "1"}, {"spark.x": "1"}, [module])
    assert spec.digests == JobSpec.of_function("etl:load", {"day": "1"}, {"spark.x": "1"}, [module]).digests
    assert JobSpec.from_bytes(spec.to_bytes()) == spec
    others = [
        JobSpec.of_function("etl:load", {"day": "2"}, {"spark.x": "1"}, [module]),
        JobSpec.of_function("etl:load", {"day": "1"}, {"spark.x": "2"}, [module]),
        JobSpec.of_function("etl:load", {"day": "1"}, {"spark.x": "1"}, [module], max_attempts=3),
    ]
    module.write_text("def load(day):\n    return day + day\n")
    others.append(JobSpec.of_function("etl:load", {"day": "1"}, {"spark.x": "1"}, [module]))
    assert len({*spec.digests, *(one for other in others for one in other.digests)}) == 10


#: What one program makes in a process of one hash, and with strings that are one object or two.
MADE = """if True:
    import datetime, decimal, pathlib, sys
    from stagecrew.recovery.jobs.spec import JobSpec
    text = "".join(["ab", "c"]) if sys.argv[1] == "1" else "abc"
    words = {f"word {number}" for number in range(20)}
    scale = 3
    print(JobSpec.of_function("builtins:dict", {
        "set": words, "map": dict.fromkeys(words, 1), "two": ["abc", text], "date": datetime.date(2013, 1, 1),
        "path": pathlib.PurePosixPath("/data"), "number": decimal.Decimal("1.50"), "function": lambda a: a in words and scale,
    }).digests[0])
"""


def test_the_same_job_from_other_processes():
    """Arguments that are equal make one digest in whatever process: hashes of sets, and which strings are one object, say nothing."""
    found = {
        subprocess.run(
            [sys.executable, "-c", MADE, seed],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(found) == 1


def test_what_other_arguments_are():
    """Arguments that are not equal, or not of one type, make other jobs; so do those of another name."""
    made = [
        {"s": {1, 2}}, {"s": {1, 3}}, {"s": frozenset({1, 2})}, {"s": [1, 2]}, {"s": (1, 2)}, {"s": "1"}, {"s": b"1"}, {"s": 1},
        {"s": True}, {"s": 1.0}, {"s": None}, {}, {"t": 1}, {"s": {"a": 1}}, {"s": {"a": 2}}, {"s": 1, "t": 1},
        {"s": lambda: 1}, {"s": lambda: 2},
    ]  # fmt: skip
    digests = [JobSpec.of_function("builtins:dict", arguments).digests[0] for arguments in made]
    assert len(set(digests)) == len(made)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:-9],
        lambda data: data.replace(b'"target"', b'"goal"'),
        lambda data: b"",
        lambda data: data.replace(b'"format": 1', b'"format": 9'),
    ],
)
def test_a_spec_that_is_none(change):
    """Bytes that are no job are named as such."""
    spec = JobSpec("etl:load", b"", {}, {"etl.py": b"x = 1"})
    with pytest.raises(JobUnreadable):
        JobSpec.from_bytes(change(spec.to_bytes()))


def test_a_module_travels_by_itself(tmp_path, monkeypatch):
    """A module that is a file on the path is among the job's files; one that is installed is not, and a package is refused."""
    (tmp_path / "nightly_etl.py").write_text("def load():\n    return 1\n")
    (tmp_path / "nightly_package").mkdir()
    (tmp_path / "nightly_package" / "__init__.py").write_text("def load(): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert list(JobSpec.of_function("nightly_etl:load", {}).files) == ["nightly_etl.py"]
    assert JobSpec.of_function("json:loads", {"s": "1"}).files == {}
    with pytest.raises(RecoveryMisused, match="--py-files"):
        JobSpec.of_function("nightly_package:load", {})
    with pytest.raises(RecoveryMisused, match="does not define 'unload'"):
        JobSpec.of_function("nightly_etl:unload", {})
    with zipfile.ZipFile(tmp_path / "package.zip", "w") as archive:
        archive.write(tmp_path / "nightly_package" / "__init__.py", "nightly_package/__init__.py")
    assert list(JobSpec.of_function("nightly_package:load", {}, None, [tmp_path / "package.zip"]).files) == [
        "package.zip"
    ]


def test_bad_jobs(tmp_path):
    """What cannot run is refused before anything is stored, and the message says what to write."""
    script = tmp_path / "job.py"
    script.write_text("print(1")
    other = tmp_path / "other"
    other.mkdir()
    (other / "job.py").write_text("print(1)")
    for call, text in (
        (lambda: JobSpec.of_function("etl.load", {}), "module:function"),
        (lambda: JobSpec.of_function("no_such_module_here:load", {}), "module 'no_such_module_here' is neither"),
        (lambda: JobSpec.of_function("json:loads", {"s": (one for one in ())}), "cannot be pickled"),
        (lambda: JobSpec.of_function("json:loads", {}, None, [tmp_path / "absent.zip"]), "cannot be read"),
        (lambda: JobSpec.of_function("json:loads", {}, None, [script, other / "job.py"]), "two files are named job.py"),
        (lambda: JobSpec.of_function("json:loads", {}, max_attempts=0), "must be at least 1"),
        (lambda: JobSpec.of_script(script), "not a valid Python script"),
        (lambda: JobSpec.of_script(tmp_path / "absent.py"), "cannot be read"),
    ):
        with pytest.raises(RecoveryMisused, match=text):
            call()


def test_results():
    """A result comes back as it was: a value, shown as JSON where it is that; an error with its traceback, which `value` raises."""
    for value, shown in (({"rows": 3}, {"rows": 3}), (None, None), ({1, 2}, "{1, 2}"), ((1, 2), [1, 2])):
        result = Result.from_bytes(Result.of_value(value).to_bytes())
        assert (result.state, result.value(), result.shown) == ("succeeded", value, shown)
    try:
        raise ValueError("no such day")
    except ValueError as error:
        failed = Result.from_bytes(Result.of_error(error).to_bytes())
    assert (failed.state, failed.reason) == ("failed", "ValueError: no such day")
    with pytest.raises(JobFailed, match=r"(?s)no such day.*test_results"):
        failed.value()
    assert Result.of_value(one for one in ()).state == "failed"
    for data in (b"", b"{}", Result("failed").to_bytes()[:-3]):
        with pytest.raises(JobUnreadable):
            Result.from_bytes(data)
