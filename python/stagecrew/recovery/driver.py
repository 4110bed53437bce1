"""The process that campaigns, and while it leads runs every job that must be recovered, each in a process of its own."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from stagecrew.errors import JobError, JobUnreadable, LeadershipLost, SessionLost, StagecrewError, StoreConflict
from stagecrew.files import quoted
from stagecrew.jar import found_spark_submit
from stagecrew.recovery.candidate import Contender, Leadership
from stagecrew.recovery.jobs import JobRecord, Jobs, JobState, Pruned, Run
from stagecrew.recovery.processes import ProcessGroup
from stagecrew.recovery.specs import FILES, SCRIPT, JobSpec

if TYPE_CHECKING:
    from stagecrew.recovery.storage import StateStorage
    from stagecrew.recovery.stores.contract import Store

__all__ = ["Driver", "JobReconciler", "Launcher"]

_log = logging.getLogger("stagecrew")

#: How often it looks at its jobs, in seconds.
_LOOK: Final = 0.2
#: How long a job waits behind a run that was lost, in seconds: twice as long behind each, up to the second.
_PAUSE: Final = (1.0, 60.0)
#: How long a process has to end by itself when it is told to, in seconds.
_POLITE: Final = 10.0
#: How long a process may live behind its job's end, and behind its leader's before it is told, in seconds.
_LINGER: Final = 30.0
#: How many ended jobs a look examines for their age at most, and how long after all were examined that begins again, in seconds.
_PRUNED: Final = 5
_PRUNE: Final = 300.0
_PROPERTIES: Final = "spark.properties"


class Process:
    """One that was started for a run, with all that it started: the group that it leads."""

    def __init__(self, run: Run, popen: subprocess.Popen[bytes], folder: Path, finishing: bool) -> None:
        self.run, self.finishing = run, finishing
        self._popen, self._folder = popen, folder
        self._group = ProcessGroup(popen.pid)

    @property
    def pid(self) -> int:
        """Of spark-submit."""
        return self._popen.pid

    def ended(self) -> int | None:
        """Its exit code; None while it lives."""
        return self._popen.poll()

    def ask(self) -> None:
        """Asks it to end."""
        self._group.signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends what is left of it; waits for that, and deletes its files."""
        self._group.signal(signal.SIGKILL)
        self._popen.wait(_POLITE)
        shutil.rmtree(self._folder, ignore_errors=True)

    def wait(self, seconds: float) -> None:
        """Waits so long at most for its end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(max(0.0, seconds))


class Launcher:
    """Starts processes of runs: through spark-submit, with a job's files in a folder of their own.

    Store and storage reach them by the environment; a job's configuration lies in a file of this user's. So nothing that may be
    secret is on a command line.
    """

    def __init__(self, store: str, state: str, work: Path) -> None:
        self._environment = {"STAGECREW_STORE": store, "STAGECREW_STATE": state}
        self._work = work
        # Drivers of another store may work here too, and have a job of the same id.
        self._prefix = f"run-{hashlib.sha256(store.encode()).hexdigest()[:8]}-"
        self._spark_submit = found_spark_submit()

    def prepare(self, spec: JobSpec, job: str) -> Path:
        """Writes a job's files for a run into a folder of its own, which `start` takes. Raises `JobError` when it cannot.

        No other run of the job may live: what those that were killed have left here is deleted.
        """
        try:
            logs = self._work / quoted(job)
            logs.mkdir(mode=0o700, parents=True, exist_ok=True)
            for left in logs.glob(f"{self._prefix}*/"):
                shutil.rmtree(left, ignore_errors=True)
            folder = Path(tempfile.mkdtemp(prefix=self._prefix, dir=logs))
        except OSError as error:
            raise JobError(f"the files of job {job!r} cannot be written into {self._work}: {error}") from error
        try:
            (folder / FILES).mkdir()
            for name, data in spec.files.items():
                (folder / FILES / name).write_bytes(data)
            if spec.script is not None:
                (folder / SCRIPT).mkdir()
                (folder / SCRIPT / spec.target).write_bytes(spec.script)
            descriptor = os.open(folder / _PROPERTIES, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.writelines(f"{_escaped(key)}={_escaped(value)}\n" for key, value in _properties(spec).items())
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, OSError):
                raise JobError(f"the files of job {job!r} cannot be written into {self._work}: {error}") from error
            raise
        return folder

    def start(self, folder: Path, run: Run, term: int, finish: bool) -> Process:
        """Starts a run of the job whose files these are, or one that finishes what is decided."""
        arguments = [
            f"--job={run.job}", f"--folder={folder}", f"--run={run.number}", f"--claim={run.claim}", f"--term={term}",
        ]  # fmt: skip
        program = str(Path(__file__).with_name("run.py"))
        python = os.environ.get("PYSPARK_PYTHON", sys.executable)
        if finish:
            command = [python, program, *arguments, "--finish"]
        else:
            command = [self._spark_submit, "--deploy-mode", "client", "--load-spark-defaults", "--properties-file", str(folder / _PROPERTIES)]  # fmt: skip
            if files := sorted((folder / FILES).iterdir()):
                command += ["--py-files", ",".join(map(str, files))]
            command += [program, *arguments]
        log = folder.parent / f"run-{run.number}{'-finish' if finish else ''}.log"
        with log.open("ab") as output:
            popen = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
                env=os.environ | self._environment | {"PYSPARK_PYTHON": python},
            )  # fmt: skip
        _log.info("job %r: run %d begins as process %d; its output: %s", run.job, run.number, popen.pid, log)
        return Process(run, popen, folder, finish)


def _properties(spec: JobSpec) -> dict[str, str]:
    from stagecrew.jar import spark_conf

    given = {"spark.app.name": spec.name, **spec.conf}
    return given | spark_conf(plugins=given.get("spark.plugins", ""), jars=given.get("spark.jars", ""))


def _escaped(text: str) -> str:
    """As Java reads a properties file."""
    special = {
        "\\": "\\\\",
        "\n": "\\n",
        "\r": "\\r",
        "\t": "\\t",
        "=": "\\=",
        ":": "\\:",
        "#": "\\#",
        "!": "\\!",
        " ": "\\ ",
    }
    return "".join(
        special.get(char) or (char if " " < char < "\x7f" else "".join(f"\\u{unit:04x}" for unit in _utf16(char)))
        for char in text
    )


def _utf16(char: str) -> Sequence[int]:
    data = char.encode("utf-16-be")
    return [int.from_bytes(data[i : i + 2], "big") for i in range(0, len(data), 2)]


class Starter(Protocol):
    """Starts processes. See `Launcher`."""

    def prepare(self, spec: JobSpec, job: str) -> Path:
        """Makes ready what a run needs, before the run is counted."""

    def start(self, folder: Path, run: Run, term: int, finish: bool) -> Process:
        """Starts a run, or one that finishes what is decided."""


class JobReconciler:
    """What a leader does for its jobs, one look at a time. Of one thread.

    For each job that is not clean, at each look, the first of these that applies: what has ended is cleaned; whose process lives
    is left alone, or ended when that was asked for; what is ending is finished; what was lost too often is ended; all else is run.

    A look reads the open jobs alone, so its cost does not grow with the jobs that have ended. With `keep`, it also removes a few of
    the jobs that ended more than that many seconds ago.
    """

    def __init__(
        self,
        jobs: Jobs,
        term: int,
        launcher: Starter,
        at_once: int = 16,
        clock: Callable[[], float] = time.monotonic,
        keep: float | None = None,
    ) -> None:
        self._jobs, self._term, self._launcher, self._at_once, self._clock = jobs, term, launcher, at_once, clock
        self._keep = keep
        #: The prune in progress, and when the next one begins.
        self._pruning: Iterator[Pruned] | None = None
        self._prune_again = -math.inf
        self.processes: dict[str, Process] = {}
        # All below is known of open jobs alone, and forgotten when a job is open no more: another job may get its id.
        #: Of a job that was lost, or could not be tended: its last pause, and when it is looked at again.
        self._later: dict[str, tuple[float, float]] = {}
        #: Jobs that were ended while their run lives: that it ends then is no loss.
        self._stopped: set[str] = set()
        self._said: dict[str, str] = {}
        #: Since when a job has ended whose process lives, and another's process is waited for.
        self._ended: dict[str, float] = {}
        self._waiting: dict[str, tuple[float, bool]] = {}

    def look(self) -> None:
        """Does for every job what can be done now. Raises `LeadershipLost` and `SessionLost` alone."""
        names = self._jobs.open_names()
        self._forget_others(names)
        for job in names:
            try:
                self._tend(job)
            except (LeadershipLost, SessionLost):
                raise
            except StoreConflict:
                pass  # somebody has written meanwhile: the next look sees what
            except Exception as error:
                self._put_off(job)
                text = f"{type(error).__name__}: {error}"
                if self._said.get(job) != text:
                    self._said[job] = text
                    _log.warning("job %r cannot be tended to; the others are: %s", job, text)
        self._prune()

    def _forget_others(self, names: Collection[str]) -> None:
        known = {*self._later, *self._stopped, *self._said, *self._ended, *self._waiting}
        for job in known.difference(names):
            for facts in (self._later, self._said, self._ended, self._waiting):
                facts.pop(job, None)
            self._stopped.discard(job)

    def _prune(self) -> None:
        """Continues the prune by a few jobs. An error ends the prune alone; the next one begins some minutes later."""
        if self._keep is None or self._clock() < self._prune_again:
            return
        try:
            if self._pruning is None:
                self._pruning = self._jobs.prune(self._keep)
            for _ in range(_PRUNED):
                if (one := next(self._pruning, None)) is None:
                    break
                if one.removed:
                    _log.info("job %r is removed: it ended more than %g s ago", one.job, self._keep)
                elif one.reason:
                    _log.warning("job %r ended more than %g s ago, but stays: %s", one.job, self._keep, one.reason)
            else:
                return  # the next look continues
        except (LeadershipLost, SessionLost):
            raise
        except Exception as error:
            _log.warning("ended jobs cannot be removed now: %s: %s", type(error).__name__, error)
        self._pruning, self._prune_again = None, self._clock() + _PRUNE

    def stop(self) -> None:
        """Ends all processes, politely first. None of their jobs has ended by that."""
        for process in self.processes.values():
            process.ask()
        due = time.monotonic() + _POLITE
        for job, process in self.processes.items():
            try:
                process.wait(due - time.monotonic())
                process.kill()
            except Exception:  # the others are to be ended too
                _log.exception("the process %d of job %r could not be ended", process.pid, job)
        self.processes.clear()

    def _tend(self, job: str) -> None:
        mine = self._reaped(job)
        waits = mine is None and job in self._later and self._clock() < self._later[job][1]
        if waits and not self._jobs.is_cancel_requested(job):
            return
        record, version = self._jobs.read(job)
        if waits and record.state not in (JobState.SUBMITTED, JobState.RUNNING):
            return  # the cancel is done; what is left of it waits as any other job does
        if record.clean:
            return  # a later leader has cleaned it since the open jobs were listed
        if record.state.is_terminal:
            if mine is None:
                self._jobs.clean(job)
                _log.info("job %r has %s", job, record.state)
            elif self._clock() - self._ended.setdefault(job, self._clock()) > _LINGER:
                _log.warning(
                    "job %r has %s, but its process %d has not ended: it is killed", job, record.state, mine.pid
                )
                mine.kill()
        elif record.state is JobState.ENDING:
            if mine is not None and not mine.finishing:
                mine.kill()  # nothing that it writes is done any more
            elif mine is None and self._has_room() and self._is_alone(job):
                folder = self._launcher.prepare(self._readable(job), job)
                self._begin(folder, lambda: self._jobs.again(job, record.run), finish=True)
        elif self._jobs.is_cancel_requested(job):
            self._jobs.end(job, (record, version), JobState.CANCELLED, "somebody has cancelled it")
            self._later.pop(job, None)
            if mine is not None:
                self._stopped.add(job)
        elif mine is None:
            claim = self._jobs.claim(job)
            if self._is_alone(job):
                self._run(job, record, version, claim)

    def _run(self, job: str, record: JobRecord, version: int, claim: int) -> None:
        if job in self._later or record.run >= record.max_attempts:
            self._jobs.require_readable(
                job
            )  # a run that cannot read what others left is lost: none is counted for that
        if record.run >= record.max_attempts:
            reason = f"each of its {record.run} runs was lost before its end; the output of the last says more"
            self._jobs.end(job, (record, version), JobState.FAILED, reason)
        elif self._has_room():
            folder = self._launcher.prepare(self._jobs.spec(job), job)
            self._begin(folder, lambda: self._jobs.start(job, (record, version), claim), finish=False)

    def _has_room(self) -> bool:
        return len(self.processes) < self._at_once

    def _readable(self, job: str) -> JobSpec:
        """What a job ran, for its files: without them what is decided may still be finished."""
        try:
            return self._jobs.spec(job)
        except JobUnreadable as error:
            _log.warning("job %r ends without its files: %s", job, error)
            return JobSpec("unreadable")

    def _begin(self, folder: Path, counted: Callable[[], Run], finish: bool) -> None:
        try:
            run = counted()
            self.processes[run.job] = self._launcher.start(folder, run, self._term, finish)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def _is_alone(self, job: str) -> bool:
        """Whether no process of the job lives: a successor waits for each, and says for whom."""
        process = self._jobs.process(job)
        if process is None:
            self._waiting.pop(job, None)
            return True
        since, said = self._waiting.get(job, (self._clock(), False))
        if not said and self._clock() - since > _LINGER:
            said = True
            _log.warning(
                "job %r waits for process %s on %s, which ran it before and lives: is it stopped?",
                job, process.get("pid"), process.get("host"),
            )  # fmt: skip
        self._waiting[job] = (since, said)
        return False

    def _reaped(self, job: str) -> Process | None:
        """The process of this leader for the job, while it lives."""
        process = self.processes.get(job)
        if process is None or (code := process.ended()) is None:
            return process
        del self.processes[job]
        process.kill()  # what it left
        if code == 0 or job in self._stopped:
            self._stopped.discard(job)
            self._later.pop(job, None)
        else:
            pause = self._put_off(job)
            _log.warning(
                "job %r: run %d has ended with %d before the job did; looked at again in %g s",
                job, process.run.number, code, pause,
            )  # fmt: skip
        return None

    def _put_off(self, job: str) -> float:
        pause = min(self._later[job][0] * 2, _PAUSE[1]) if job in self._later else _PAUSE[0]
        self._later[job] = (pause, self._clock() + pause)
        return pause


class Driver:
    """Campaigns from now on until it is closed, and tends to all jobs while it leads.

    `keep`: after how many seconds a job that has ended is removed; None keeps all of them.
    """

    def __init__(
        self,
        open_store: Callable[[], Store],
        storage: StateStorage,
        launcher: Launcher,
        at_once: int = 16,
        keep: float | None = None,
    ) -> None:
        self._storage, self._launcher, self._at_once, self._keep = storage, launcher, at_once, keep
        self._leading: _Leading | None = None
        self._contender = Contender(open_store, self._granted, self._revoked)

    def close(self) -> bool:
        """Hands over: ends its processes, whose jobs go on elsewhere, and then its leadership. Repeatable.

        Answers whether all has ended, see `Contender.close`.
        """
        return self._contender.close()

    def _granted(self, leadership: Leadership) -> None:
        self._leading = _Leading(leadership, self._storage, self._launcher, self._at_once, self._keep)
        self._leading.start()

    def _revoked(self, term: int, reason: str) -> None:
        leading, self._leading = self._leading, None
        if leading is not None:
            leading.stop()


class _Leading(threading.Thread):
    """One leadership's work."""

    def __init__(
        self, leadership: Leadership, storage: StateStorage, launcher: Launcher, at_once: int, keep: float | None
    ) -> None:
        super().__init__(name=f"stagecrew-term-{leadership.term}", daemon=True)
        self._leadership, self._over = leadership, threading.Event()
        self._storage, self._launcher, self._at_once, self._keep = storage, launcher, at_once, keep

    def run(self) -> None:
        """See `threading.Thread`."""
        tending: JobReconciler | None = None
        try:
            while not self._over.is_set() and self._leadership.valid:
                try:
                    if tending is None:
                        jobs = Jobs(self._leadership.store, self._storage)
                        tending = JobReconciler(
                            jobs, self._leadership.term, self._launcher, self._at_once, keep=self._keep
                        )
                    tending.look()
                except (LeadershipLost, SessionLost):
                    return
                except StagecrewError as error:
                    _log.warning("the store does not answer this leader: %s", error)
                except Exception as error:
                    _log.exception("this leader cannot go on")
                    self._leadership.over(f"it cannot go on: {type(error).__name__}: {error}")
                    return
                self._over.wait(_LOOK)
        finally:
            if tending is not None:
                tending.stop()

    def stop(self) -> None:
        """Ends the work, and its processes; bounded."""
        self._over.set()
        self.join(3 * _POLITE)


def shown(record: JobRecord, job: str, process: Any) -> dict[str, Any]:
    """What the command line says of a job."""
    return {
        "id": job,
        "state": str(record.state),
        "run": record.run,
        "submitted": record.submitted,
        "ended": record.ended,
        "reason": record.reason,
        "clean": record.clean,
        "process": process,
    }
