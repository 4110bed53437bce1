"""Executes a claimed run: finishes the decided commits, calls the job's code, and stores how the job ended."""

from __future__ import annotations

import importlib
import logging
import pickle
import re
import runpy
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from stagecrew import errors
from stagecrew.errors import (
    CheckpointTimeout,
    CommitPending,
    CommitSuperseded,
    CommitUnknown,
    LeadershipLost,
    RecordUnreadable,
    StateStorageError,
    StoreError,
)
from stagecrew.observability.error_summary import error_text, with_causes
from stagecrew.recovery.jobs.commit_log import finish_commits
from stagecrew.recovery.jobs.job import Job
from stagecrew.recovery.jobs.record import JobState
from stagecrew.recovery.jobs.result import Result
from stagecrew.recovery.jobs.run_files import SCRIPT
from stagecrew.recovery.retry import RETRY_TIMEOUT, retry_until
from stagecrew.recovery.run.job_trace import JobTrace
from stagecrew.session.registration import check_imports
from stagecrew.session.running_job import set_running_job

if TYPE_CHECKING:
    from stagecrew.recovery.jobs.spec import JobSpec
    from stagecrew.recovery.run.claim import ClaimedRun

__all__ = ["call_job", "execute_run", "infrastructure_error"]

_log = logging.getLogger("stagecrew")

#: The retry timeout, in seconds, of a process that only finishes decided commits. The leader starts it again later.
_FINISH_TIMEOUT: Final = 30.0

#: Errors that are not the job's fault.
_INFRASTRUCTURE_ERRORS: Final = (
    StoreError,
    LeadershipLost,
    StateStorageError,
    CommitUnknown,
    RecordUnreadable,
    CommitPending,
    CommitSuperseded,
    CheckpointTimeout,
)


def execute_run(
    claimed: ClaimedRun,
    commits_only: bool,
    call: Callable[[JobSpec], Any],
    stop_reason: Callable[[], str | None],
    facts: Mapping[str, str] | None = None,
    retry_timeout: float = RETRY_TIMEOUT,
) -> bool:
    """Executes a claimed run. Returns whether the job has ended; if not, the run is lost and the job runs again.

    If `commits_only`, this only finishes the decided commits of an ending job, and does not call the job's code. `call`
    calls that code. `stop_reason` returns why the process must stop, or None. `facts` describe the run in the Spark UI.
    Sinks, the storage and the store are retried for `retry_timeout` seconds.
    """
    run, jobs = claimed.run, claimed.jobs
    record, version = retry_until(
        lambda: jobs.read(run.job), f"run {run.number} of job {run.job!r} waits to read its job", retry_timeout
    )
    # A process that only finishes commits gives up early: the leader starts it again after a pause, and other jobs can
    # run in the meantime. A normal run that gives up is lost and counts as one of the job's runs, so it retries for the
    # full `retry_timeout`.
    finish_timeout = min(retry_timeout, _FINISH_TIMEOUT) if commits_only else retry_timeout
    finish_commits(jobs.handles(run.job, "commits"), commits_only, finish_timeout)
    if commits_only:
        result = Result(str(record.outcome), record.reason)
    else:
        spec = jobs.spec(run.job, retry_timeout)
        trace = JobTrace.begin(spec.conf, run, record)
        code_result = _run_code(claimed, spec, call, stop_reason, facts, retry_timeout)
        if trace is not None:
            if code_result is None:
                trace.lose()
            else:
                trace.end("ok" if code_result.state == JobState.SUCCEEDED else "failed", code_result.reason)
        if code_result is None:
            return False
        result = code_result
        # After this, writes of threads that the job has left running are refused.
        claimed.renew()
        jobs = claimed.jobs
        finish_commits(jobs.handles(run.job, "commits"), True, retry_timeout)
    jobs.finish(run.job, (record, version), JobState(result.state), result, retry_timeout)
    return True


def _run_code(
    claimed: ClaimedRun,
    spec: JobSpec,
    call: Callable[[JobSpec], Any],
    stop_reason: Callable[[], str | None],
    facts: Mapping[str, str] | None,
    retry_timeout: float,
) -> Result | None:
    """Calls the job's code. Returns its result, or None if the run is lost because of an infrastructure error."""
    run, jobs = claimed.run, claimed.jobs
    steps, commits = jobs.handles(run.job, "steps"), jobs.handles(run.job, "commits")
    job = Job(
        run.job, run.number, steps, commits, retry_timeout, facts, lambda url: claimed.jobs.show_ui(claimed.run, url)
    )
    set_running_job(job)
    try:
        return Result.of_value(call(spec))
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):  # a script's `sys.exit()`
            return Result.of_value(None)
        _log.exception("job %r raised an error", run.job)
        if (reason := infrastructure_error(error) or stop_reason()) is not None:
            _log.warning(
                "this run of job %r is lost, not failed, because the error is not the job's fault: %s", run.job, reason
            )
            return None
        return Result.of_error(error)
    finally:
        job.end()


def call_job(spec: JobSpec, folder: Path) -> Any:
    """Calls the function or runs the script of a job, whose files are in this folder."""
    # `configure` would import the modules of the listeners, but a job can build its session without it.
    check_imports(spec.conf.get("spark.stagecrew.listeners", ""))
    if spec.script is not None:
        sys.argv = [spec.target, *map(str, spec.arguments)]
        runpy.run_path(str(folder / SCRIPT / spec.target), run_name="__main__")
        return None
    module, _, function = spec.target.partition(":")
    assert isinstance(spec.arguments, bytes)
    return getattr(importlib.import_module(module), function)(**pickle.loads(spec.arguments))


def infrastructure_error(error: BaseException) -> str | None:
    """Returns why an error is not the job's fault, or None if it is.

    It is not the job's fault if the store, the storage or the JVM failed, if a decided commit could not be applied, if
    another driver took over a commit, or if a checkpoint timed out, even if the job's code has wrapped the error. It is
    the job's fault if a sink fails before the commit is decided, or if a coordinator declines a checkpoint.
    """
    for cause in with_causes(error):
        if isinstance(cause, _INFRASTRUCTURE_ERRORS):
            return error_text(cause)
        if (text := _error_in_jvm_message(cause)) is not None:
            return text
    return _jvm_failure()


def _error_in_jvm_message(error: BaseException) -> str | None:
    """Returns the infrastructure error that a JVM error's message contains, or None.

    The JVM reports an error that a `foreachBatch` function raised only as text.
    """
    if type(error).__module__.partition(".")[0] not in ("pyspark", "py4j"):
        return None
    for name, text in re.findall(r"^stagecrew\.errors\.(\w+): (.*)$", str(error), re.MULTILINE):
        if issubclass(getattr(errors, name, object), _INFRASTRUCTURE_ERRORS):
            return f"{name}: {text}"
    return None


def _jvm_failure() -> str | None:
    if (pyspark := sys.modules.get("pyspark")) is None or (gateway := pyspark.SparkContext._gateway) is None:
        return None
    try:
        gateway.jvm.System.currentTimeMillis()
    except Exception as error:
        return f"its JVM does not respond: {error_text(error)}"
    return None
