"""Jobs without Spark: their states, records, specs and results."""

import dataclasses
import itertools
import re
import subprocess
import sys
import zipfile

import pytest

from stagecrew.errors import ConfigurationError, JobError, JobFailed, RecordUnreadable, StoreUnsupported
from stagecrew.recovery.jobs.record import JobRecord, JobState
from stagecrew.recovery.jobs.result import Result
from stagecrew.recovery.jobs.spec import JobSpec

SUBMITTED = JobRecord(digest="d", max_attempts=2, submitted=1.0)

CHANGES = {
    "start": lambda record: record.started(),
    "start to cancel": lambda record: record.ending(JobState.CANCELLED, "requested"),
    "start to fail": lambda record: record.ending(JobState.FAILED, "lost"),
    "succeed": lambda record: record.finished(JobState.SUCCEEDED, "", 2.0),
    "fail": lambda record: record.finished(JobState.FAILED, "reason", 2.0),
    "be cancelled": lambda record: record.finished(JobState.CANCELLED, "reason", 2.0),
    "clean up": lambda record: record.cleaned(),
}


def test_a_job_never_runs_after_its_end():
    """A job that has ended stays ended, its runs are limited, and only ended jobs are cleaned up.

    The test tries all 137,256 sequences of up to six changes.
    """
    refused = accepted = 0
    for length in range(1, 7):
        for sequence in itertools.product(CHANGES, repeat=length):
            record = SUBMITTED
            for name in sequence:
                try:
                    after = CHANGES[name](record)
                except JobError:
                    refused += 1
                    break
                accepted += 1
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
    assert refused > accepted > 0


def test_an_ending_job_ends_in_the_state_that_was_decided():
    """A job that is being cancelled can neither succeed nor fail. A job that is ending as failed can only fail."""
    cancelled, lost = CHANGES["start to cancel"](SUBMITTED.started()), CHANGES["start to fail"](SUBMITTED.started())
    assert CHANGES["be cancelled"](cancelled).state is JobState.CANCELLED
    assert CHANGES["fail"](lost).state is JobState.FAILED
    for record, change in ((cancelled, "succeed"), (cancelled, "fail"), (lost, "be cancelled"), (lost, "succeed")):
        with pytest.raises(JobError, match="ending as"):
            CHANGES[change](record)


def test_a_record_is_the_same_after_serialization():
    """A deserialized record equals the original in each state. Two serializations of one record have different
    bytes."""
    for record in (
        SUBMITTED,
        SUBMITTED.started(),
        CHANGES["start to cancel"](SUBMITTED),
        CHANGES["fail"](SUBMITTED.started()).cleaned(),
    ):
        assert JobRecord.from_bytes(record.to_bytes()) == record
        assert record.to_bytes() != record.to_bytes()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[1]",
        b"\xff",
        SUBMITTED.to_bytes()[:-5],
        SUBMITTED.to_bytes().replace(b"submitted", b"smitten"),
    ],
)
def test_invalid_record_bytes_are_unreadable(data):
    """For invalid bytes, `JobRecord.from_bytes` raises `RecordUnreadable` and no other error."""
    with pytest.raises(RecordUnreadable):
        JobRecord.from_bytes(data)


def test_a_record_of_a_newer_format_is_refused():
    """The error for a record of a newer format names that format."""
    newer = re.sub(rb'"format": \d+', b'"format": 99', SUBMITTED.to_bytes())
    with pytest.raises(StoreUnsupported, match="format 99"):
        JobRecord.from_bytes(newer)


def test_the_digest_depends_on_the_content_of_a_job(tmp_path):
    """Equal jobs have equal digests. A different argument, option or byte of a file changes the digests."""
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
    assert len({*spec.digests, *(digest for other in others for digest in other.digests)}) == 10


#: Prints the digest of a job. Each process has its own hash seed. With argument 1, the two strings "abc" are different
#: objects.
PRINT_DIGEST = """if True:
    import datetime, decimal, pathlib, sys
    from stagecrew.recovery.jobs.spec import JobSpec
    text = "".join(["ab", "c"]) if sys.argv[1] == "1" else "abc"
    words = {f"word {number}" for number in range(20)}
    scale = 3
    print(JobSpec.of_function("builtins:dict", {
        "set": words, "map": dict.fromkeys(words, 1), "two": ["abc", text], "date": datetime.date(2013, 1, 1),
        "path": pathlib.PurePosixPath("/data"), "number": decimal.Decimal("1.50"),
        "function": lambda a: a in words and scale,
    }).digests[0])
"""


def test_equal_jobs_have_equal_digests_in_other_processes():
    """A job's digest is the same in all processes: it depends neither on the order of sets nor on whether equal strings
    are the same object."""
    outputs = {
        subprocess.run(
            [sys.executable, "-c", PRINT_DIGEST, seed],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(outputs) == 1


def test_different_arguments_make_different_jobs():
    """Jobs differ if an argument has a different value, type or name."""
    different = [
        {"s": {1, 2}}, {"s": {1, 3}}, {"s": frozenset({1, 2})}, {"s": [1, 2]}, {"s": (1, 2)}, {"s": "1"}, {"s": b"1"},
        {"s": 1},
        {"s": True}, {"s": 1.0}, {"s": None}, {}, {"t": 1}, {"s": {"a": 1}}, {"s": {"a": 2}}, {"s": 1, "t": 1},
        {"s": lambda: 1}, {"s": lambda: 2},
    ]  # fmt: skip
    digests = [JobSpec.of_function("builtins:dict", arguments).digests[0] for arguments in different]
    assert len(set(digests)) == len(different)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:-9],
        lambda data: data.replace(b'"target"', b'"goal"'),
        lambda data: b"",
        lambda data: data.replace(b'"format": 1', b'"format": 9'),
    ],
)
def test_invalid_spec_bytes_are_unreadable(change):
    """For invalid bytes, `JobSpec.from_bytes` raises `RecordUnreadable` and no other error."""
    spec = JobSpec("etl:load", b"", {}, {"etl.py": b"x = 1"})
    with pytest.raises(RecordUnreadable):
        JobSpec.from_bytes(change(spec.to_bytes()))


def test_the_module_of_a_function_is_part_of_the_job(tmp_path, monkeypatch):
    """If a function's module is a single file on the path, the file is added to the job. An installed module is not
    added. A package on the path is refused unless it is among the job's files."""
    (tmp_path / "nightly_etl.py").write_text("def load():\n    return 1\n")
    (tmp_path / "nightly_package").mkdir()
    (tmp_path / "nightly_package" / "__init__.py").write_text("def load(): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert list(JobSpec.of_function("nightly_etl:load", {}).files) == ["nightly_etl.py"]
    assert JobSpec.of_function("json:loads", {"s": "1"}).files == {}
    with pytest.raises(ConfigurationError, match="--py-files"):
        JobSpec.of_function("nightly_package:load", {})
    with pytest.raises(ConfigurationError, match="does not define 'unload'"):
        JobSpec.of_function("nightly_etl:unload", {})
    with zipfile.ZipFile(tmp_path / "package.zip", "w") as archive:
        archive.write(tmp_path / "nightly_package" / "__init__.py", "nightly_package/__init__.py")
    assert list(JobSpec.of_function("nightly_package:load", {}, None, [tmp_path / "package.zip"]).files) == [
        "package.zip"
    ]


def test_invalid_jobs_are_refused(tmp_path):
    """The error for an invalid job names the problem."""
    script = tmp_path / "job.py"
    script.write_text("print(1")
    other = tmp_path / "other"
    other.mkdir()
    (other / "job.py").write_text("print(1)")
    for call, text in (
        (lambda: JobSpec.of_function("etl.load", {}), "module:function"),
        (lambda: JobSpec.of_function("no_such_module_here:load", {}), "module 'no_such_module_here' is neither"),
        (lambda: JobSpec.of_function("json:loads", {"s": (value for value in ())}), "cannot be pickled"),
        (lambda: JobSpec.of_function("json:loads", {}, None, [tmp_path / "absent.zip"]), "cannot be read"),
        (lambda: JobSpec.of_function("json:loads", {}, None, [script, other / "job.py"]), "two files are named job.py"),
        (lambda: JobSpec.of_function("json:loads", {}, max_attempts=0), "must be at least 1"),
        (lambda: JobSpec.of_script(script), "not a valid Python script"),
        (lambda: JobSpec.of_script(tmp_path / "absent.py"), "cannot be read"),
    ):
        with pytest.raises(ConfigurationError, match=text):
            call()


def test_results_are_the_same_after_serialization():
    """A deserialized result has the same state and value as the original. A value is shown as JSON where possible. For
    an error, `value` raises `JobFailed` with the error's traceback."""
    for value, shown in (({"rows": 3}, {"rows": 3}), (None, None), ({1, 2}, "{1, 2}"), ((1, 2), [1, 2])):
        result = Result.from_bytes(Result.of_value(value).to_bytes())
        assert (result.state, result.value(), result.shown) == ("succeeded", value, shown)
    try:
        raise ValueError("no such day")
    except ValueError as error:
        failed = Result.from_bytes(Result.of_error(error).to_bytes())
    assert (failed.state, failed.reason) == ("failed", "ValueError: no such day")
    with pytest.raises(JobFailed, match=r"(?s)no such day.*test_results_are_the_same_after_serialization"):
        failed.value()
    assert Result.of_value(value for value in ()).state == "failed"

    class UnreadableError(Exception):
        def __str__(self):
            raise AttributeError("no such attribute")

    unreadable = Result.from_bytes(Result.of_error(UnreadableError()).to_bytes())
    assert unreadable.reason == "UnreadableError: (its message cannot be read: __str__ raised AttributeError)"
    for data in (b"", b"{}", Result("failed").to_bytes()[:-3]):
        with pytest.raises(RecordUnreadable):
            Result.from_bytes(data)
