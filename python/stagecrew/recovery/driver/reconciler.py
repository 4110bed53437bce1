"""The reconciler: a leader's work on its jobs, one pass at a time."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeVar

from stagecrew.errors import LeadershipLost, RecordUnreadable, SessionLost, StagecrewError, StoreConflict
from stagecrew.observability.error_summary import error_text
from stagecrew.recovery.driver.process import TERMINATE_TIMEOUT
from stagecrew.recovery.jobs.record import JobRecord, JobState, Run
from stagecrew.recovery.jobs.spec import JobSpec

if TYPE_CHECKING:
    from pathlib import Path

    from stagecrew.recovery.driver.process import RunProcess
    from stagecrew.recovery.jobs.fenced import FencedJobs
    from stagecrew.recovery.jobs.pruning import PruneResult

__all__ = ["JobReconciler", "RunLauncher"]

T = TypeVar("T")

_log = logging.getLogger("stagecrew")

#: The first and the longest pause of a job after a lost run or an error, in seconds. Each is twice the one before. A
#: run is lost if its process exits before the job ends.
_PAUSES: Final = (1.0, 60.0)
#: How long a process may stay alive after its job has ended, in seconds. If a job waits this long for the process of an
#: earlier leader, the reconciler logs a warning.
_LINGER: Final = 30.0
#: How often to check whether a process is still running after its run has ended, in seconds.
_HUNG_CHECK: Final = 10.0
#: The maximum number of ended jobs whose age one pass checks.
_PRUNED_PER_PASS: Final = 5
#: The seconds from the end of one round of pruning to the start of the next.
_PRUNE_PERIOD: Final = 300.0


class RunLauncher(Protocol):
    """Starts the processes of runs. See `Launcher`."""

    def prepare(self, spec: JobSpec, job: str) -> Path:
        """Prepares the files of a run, before the run counts towards the job's `max_attempts`."""

    def start(self, folder: Path, run: Run, term: int, finish: bool) -> RunProcess:
        """Starts a run, or a process that only finishes the commits that are decided but not applied."""


class _Start(NamedTuple):
    """The step of a job that starts a process, if there is room. Steps with a lower order come first."""

    job: str
    order: tuple[int, float]
    step: Callable[[], None]


class JobReconciler:
    """Brings every open job one step closer to its end. Only one thread may use it.

    A job is open until it is cleaned up, so a job that has ended can still be open. In each pass, the first rule that
    applies to a job decides:

    * A job that waits for its retry is left alone, unless its cancellation was requested.
    * A job that has ended is cleaned up once its process has exited. The process is killed after `_LINGER` seconds.
    * For an ending job, the process of its run is killed. A second process then finishes the decided commits.
    * A job whose cancellation was requested starts ending.
    * A job whose process is alive is left alone. If its run has ended without a result, and the process still lives
      after `_LINGER` seconds, because its JVM hangs, the process is killed.
    * A job that has lost `max_attempts` runs starts ending.
    * Any other job is run, if no process of an earlier leader runs it, and fewer than `at_once` processes are running.

    One process may finish the commits of an ending job beyond `at_once`. If there is no room for all processes, ending
    jobs come first, then the jobs that were submitted first. A pass reads only the open jobs, so its cost does not grow
    with the number of cleaned-up jobs. With `keep`, it also removes a few of the jobs that ended more than `keep`
    seconds ago.
    """

    def __init__(
        self,
        jobs: FencedJobs,
        term: int,
        launcher: RunLauncher,
        at_once: int = 16,
        clock: Callable[[], float] = time.monotonic,
        keep: float | None = None,
    ) -> None:
        self._jobs, self._term, self._launcher, self._at_once, self._clock = jobs, term, launcher, at_once, clock
        self._keep = keep
        #: The round of pruning in progress, and when the next one starts.
        self._prune: Iterator[PruneResult] | None = None
        self._next_prune = -math.inf
        self.processes: dict[str, RunProcess] = {}
        # The state below is kept only for open jobs. It is dropped when a job is no longer open, because another job
        # can get the same id.
        #: For each job with a lost run or an error: its last pause, and when it is retried.
        self._retries: dict[str, tuple[float, float]] = {}
        #: Jobs that were cancelled while their run was alive. The exit of such a run is not a loss.
        self._ended_by_us: set[str] = set()
        #: Processes that exited with code 0. Only the record says whether they ended the job.
        self._exited: dict[str, RunProcess] = {}
        #: The last error that was logged for each job.
        self._logged_errors: dict[str, str] = {}
        #: For each job that has ended while its process is still alive: when this was first seen.
        self._lingering_since: dict[str, float] = {}
        #: For each running job: since when its run has no process in the store, and when this was last checked.
        self._hung_since: dict[str, tuple[float | None, float]] = {}
        #: For each job that waits for a process of another leader: since when, and whether that was logged.
        self._waiting: dict[str, tuple[float, bool]] = {}

    def reconcile(self) -> None:
        """Makes one pass over all open jobs. An error of one job is logged, and the job is retried.

        Raises `LeadershipLost`, `SessionLost`, and any error of the store while it lists the open jobs.
        """
        names = self._jobs.open_names()
        self._forget_all_but(names)
        starts = [start for job in names if (start := self._guard(job, functools.partial(self._reconcile_job, job)))]
        for start in sorted(starts, key=lambda start: start.order):
            self._guard(start.job, start.step)
        self._continue_prune()

    def _guard(self, job: str, step: Callable[[], T]) -> T | None:
        """Calls a step of one job. After an error, logs it, schedules a retry, and returns None."""
        try:
            return step()
        except (LeadershipLost, SessionLost):
            raise
        except StoreConflict:
            pass  # another process has written the job in the meantime; the next pass reads it again
        except Exception as error:
            self._schedule_retry(job)
            text = error_text(error)
            if self._logged_errors.get(job) != text:
                self._logged_errors[job] = text
                _log.warning(
                    "job %r cannot continue now and will be retried; other jobs are not affected: %s", job, text
                )
        return None

    def stop(self) -> None:
        """Terminates all processes, first with SIGTERM, then with SIGKILL. The next leader continues their jobs."""
        for process in self.processes.values():
            process.terminate()
        deadline = time.monotonic() + TERMINATE_TIMEOUT
        for job, process in self.processes.items():
            try:
                process.wait(deadline - time.monotonic())
                process.kill()
            except Exception:  # the other processes must be killed too
                _log.exception("the processes of job %r (group %d) could not be killed", job, process.pid)
        self.processes.clear()

    # -- One job

    def _reconcile_job(self, job: str) -> _Start | None:
        """Does the next step of a job. Returns the step instead if it needs room for another process."""
        process = self._poll_process(job)
        paused = process is None and job in self._retries and self._clock() < self._retries[job][1]
        if paused and not self._jobs.is_cancel_requested(job):
            return None
        record, version = self._jobs.read(job)
        if (exited := self._exited.pop(job, None)) is not None:
            if record.run == exited.run.number and (
                record.state is JobState.RUNNING or (record.state is JobState.ENDING and exited.finishing)
            ):
                self._retry_lost(job, exited, 0)  # for example, the job called os._exit(0)
                return None
            self._retries.pop(job, None)
        if paused and record.state not in (JobState.SUBMITTED, JobState.RUNNING):
            return None  # the cancellation has been handled; the job now waits for its retry
        if record.clean:
            return None  # a later leader has cleaned it up since the open jobs were listed
        if record.state.is_terminal:
            self._clean_up(job, record, process)
        elif record.state is JobState.ENDING:
            if process is None:
                return _Start(job, (0, record.submitted), functools.partial(self._finish, job, record))
            if not process.finishing:
                process.kill()  # safe at any time: the store has refused its writes since the job began to end
        elif self._jobs.is_cancel_requested(job):
            self._jobs.start_ending(job, (record, version), JobState.CANCELLED, "it was cancelled by a user")
            self._retries.pop(job, None)
            if process is not None:
                self._ended_by_us.add(job)
        elif process is not None:
            self._kill_if_hung(job, process)
        else:
            claim = self._jobs.claim_version(job)
            if self._check_process_gone(job):
                return _Start(job, (1, record.submitted), functools.partial(self._run, job, record, version, claim))
        return None

    def _kill_if_hung(self, job: str, process: RunProcess) -> None:
        """Kills a process whose run has ended without a result, but which does not exit, because its JVM hangs."""
        since, checked = self._hung_since.get(job, (None, -math.inf))
        if self._clock() - checked < _HUNG_CHECK:
            return
        # The entry of the process exists from the claim of the run until the run ends.
        has_claimed = self._jobs.claim_version(job) > process.run.claim
        is_over = has_claimed and self._jobs.process(job) is None
        since = None if not is_over else self._clock() if since is None else since
        self._hung_since[job] = since, self._clock()
        if since is not None and self._clock() - since > _LINGER:
            _log.warning(
                "run %d of job %r has ended without a result, but its processes (group %d) still run; killing them",
                process.run.number, job, process.pid,
            )  # fmt: skip
            process.kill()

    def _clean_up(self, job: str, record: JobRecord, process: RunProcess | None) -> None:
        if process is None:
            self._jobs.clean_up(job)
            _log.info("job %r has ended: %s", job, record.state)
        elif self._clock() - self._lingering_since.setdefault(job, self._clock()) > _LINGER:
            _log.warning(
                "job %r has ended (%s), but its processes (group %d) still run; killing them",
                job, record.state, process.pid,
            )  # fmt: skip
            process.kill()

    def _finish(self, job: str, record: JobRecord) -> None:
        # One process may finish commits beyond the limit. Otherwise a job would not end while all others run on.
        is_first = not any(process.finishing for process in self.processes.values())
        if (self._has_room() or is_first) and self._check_process_gone(job):
            folder = self._launcher.prepare(self._spec_or_placeholder(job), job)
            with self._deleted_on_error(folder):
                run = self._jobs.start_finishing(job, record.run)
                self.processes[job] = self._launcher.start(folder, run, self._term, finish=True)
                self._logged_errors.pop(job, None)

    def _run(self, job: str, record: JobRecord, version: int, claim: int) -> None:
        if record.run < record.max_attempts and not self._has_room():
            return
        if job in self._retries or record.run >= record.max_attempts:
            # If the stored steps or commits cannot be read, another run would be lost for this reason only. So this is
            # checked before a run is counted, or the job fails. The first run has nothing to read.
            self._jobs.require_readable(job)
        if record.run >= record.max_attempts:
            reason = f"all its {record.run} runs were lost before the job ended; see the output of the last run"
            self._jobs.start_ending(job, (record, version), JobState.FAILED, reason)
        else:
            folder = self._launcher.prepare(self._jobs.spec(job), job)
            with self._deleted_on_error(folder):
                run = self._jobs.start_run(job, (record, version), claim)
                try:
                    self.processes[job] = self._launcher.start(folder, run, self._term, finish=False)
                    self._logged_errors.pop(job, None)
                except BaseException:
                    with contextlib.suppress(StagecrewError):
                        self._jobs.undo_start(run, record)  # a process that cannot be started is not a lost run
                    raise

    @contextlib.contextmanager
    def _deleted_on_error(self, folder: Path) -> Iterator[None]:
        try:
            yield
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def _has_room(self) -> bool:
        return len(self.processes) < self._at_once

    def _spec_or_placeholder(self, job: str) -> JobSpec:
        """Returns the specification of an ending job, or a placeholder if it is unreadable.

        The job's commits can often be finished without the specification.
        """
        try:
            return self._jobs.spec(job)
        except RecordUnreadable as error:
            _log.warning("cannot read the specification of job %r; its commits are finished without it: %s", job, error)
            return JobSpec("unreadable")

    # -- Processes

    def _check_process_gone(self, job: str) -> bool:
        """Returns whether no process runs the job. If the job waits for more than `_LINGER` seconds, logs this once."""
        process = self._jobs.process(job)
        if process is None:
            self._waiting.pop(job, None)
            return True
        since, logged = self._waiting.get(job, (self._clock(), False))
        if not logged and self._clock() - since > _LINGER:
            logged = True
            _log.warning(
                "job %r waits: process %s on %s ran this job before, and is still alive. If it is suspended, kill it",
                job, process.get("pid"), process.get("host"),
            )  # fmt: skip
        self._waiting[job] = (since, logged)
        return False

    def _poll_process(self, job: str) -> RunProcess | None:
        """Returns this leader's process for the job if it is alive. If it has just exited, handles its exit."""
        process = self.processes.get(job)
        if process is None or (code := process.exit_code()) is None:
            return process
        del self.processes[job]
        self._hung_since.pop(job, None)
        process.kill()  # kills the rest of its group
        if job in self._ended_by_us:
            self._ended_by_us.discard(job)
            self._retries.pop(job, None)
        elif code == 0:
            self._exited[job] = process
        else:
            self._retry_lost(job, process, code)
        return None

    def _retry_lost(self, job: str, process: RunProcess, code: int) -> None:
        pause = self._schedule_retry(job)
        _log.warning(
            "job %r: run %d exited with code %d before the job ended; the leader continues the job in %g s",
            job, process.run.number, code, pause,
        )  # fmt: skip

    def _schedule_retry(self, job: str) -> float:
        first, longest = _PAUSES
        pause = min(self._retries[job][0] * 2, longest) if job in self._retries else first
        self._retries[job] = (pause, self._clock() + pause)
        return pause

    def _forget_all_but(self, names: Collection[str]) -> None:
        by_job = (
            self._retries, self._logged_errors, self._lingering_since, self._waiting, self._exited, self._hung_since,
        )  # fmt: skip
        remembered = {*self._ended_by_us}.union(*by_job)
        for job in remembered.difference(names):
            for state in by_job:
                state.pop(job, None)
            self._ended_by_us.discard(job)

    # -- Old jobs

    def _continue_prune(self) -> None:
        """Examines a few more ended jobs. An error ends only the current round; the next one starts minutes later."""
        if self._keep is None or self._clock() < self._next_prune:
            return
        try:
            if self._prune is None:
                self._prune = self._jobs.prune(self._keep)
            for _ in range(_PRUNED_PER_PASS):
                if (one := next(self._prune, None)) is None:
                    break
                if one.removed:
                    _log.info("job %r was removed, because it ended more than %g s ago", one.job, self._keep)
                elif one.reason:
                    _log.warning(
                        "job %r ended more than %g s ago, but was not removed: %s", one.job, self._keep, one.reason
                    )
            else:
                return  # the next pass continues
        except (LeadershipLost, SessionLost):
            raise
        except Exception as error:
            _log.warning(
                "old jobs could not be removed; the leader will retry in %g s: %s", _PRUNE_PERIOD, error_text(error),
            )  # fmt: skip
        self._prune, self._next_prune = None, self._clock() + _PRUNE_PERIOD
