"""The process of one run of a job: it claims the run, watches that it may go on, and writes how the job ended.

Started through spark-submit, as a file of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import os
import pickle
import re
import runpy
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from stagecrew import errors
from stagecrew.errors import (
    CheckpointTimeout,
    CommitPending,
    CommitSuperseded,
    CommitUnknown,
    CommitUnreadable,
    LeadershipLost,
    SessionLost,
    StateStorageError,
    StoreConflict,
    StoreError,
    StoreUnavailable,
    StoreUnsupported,
)
from stagecrew.observability.error_summary import with_causes
from stagecrew.observability.logs import HarmlessFormatter, harmless
from stagecrew.recovery.election import HOLDER, TERM, Fenced, fence, leader_of
from stagecrew.recovery.job import Job
from stagecrew.recovery.job_commits import finish_commits
from stagecrew.recovery.jobs import Jobs, JobState, Run, fence_of, key_of
from stagecrew.recovery.results import Result
from stagecrew.recovery.specs import FILES, SCRIPT, JobSpec, on_path
from stagecrew.recovery.storage import StateStorage
from stagecrew.recovery.stores import open_store
from stagecrew.recovery.writes import PATIENCE
from stagecrew.session.registration import import_named
from stagecrew.session.running_job import set_running_job

if TYPE_CHECKING:
    from stagecrew.recovery.stores.contract import Store

_log = logging.getLogger("stagecrew")

#: The exit code of a process whose job is not at its end: another run takes it.
LOST: Final = 75
#: How long a process waits for a sink that only finishes what is decided, in seconds.
_BRIEF: Final = 30.0
#: How often it looks whether its leader leads, in seconds.
_LOOK: Final = 0.25
#: How long the store has to let go of its session when it ends itself, in seconds.
_CLOSE: Final = 2.0
#: How long a process may take to exit behind its job's end, in seconds: less than its leader leaves it.
_EXIT: Final = 25.0


class Claimed:
    """A run that this process has claimed. `jobs` writes by the claim, and nothing once another has it."""

    def __init__(
        self,
        store: Store,
        storage: StateStorage,
        term: int,
        run: Run,
        claim: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._storage, self._term, self._clock = store, storage, term, clock
        self.run = run
        self.key = f"{key_of(run.job)}/claim"
        self.version = claim
        #: Whether the version moves by this process's own doing.
        self.renewing = False
        self.jobs = self._fenced()

    def renew(self) -> None:
        """Claims it once more: what was made of `jobs` before changes nothing any more."""
        self.renewing = True
        self.version = self.jobs.renew(self.run.job, self.version, PATIENCE)
        self.jobs = self._fenced()
        self.renewing = False

    def _fenced(self) -> Jobs:
        fenced = Fenced(self._store, fence(self._term), fence_of(self.run.job, self.version))
        return Jobs(fenced, self._storage, self._clock)


class Watch:
    """Ends this process when it may not go on: its leader does not lead, its claim or its session is lost, its JVM is gone.

    On a store with a time-out it ends when it has not heard of the store for two thirds of it, also while a question hangs: nobody
    can have taken over then.
    """

    def __init__(
        self, store: Store, term: int, claimed: Claimed, end: Callable[[str], None], clock: Callable[[], float]
    ) -> None:
        self._store, self._term, self._claimed = store, term, claimed
        self._end, self._clock = end, clock
        self._heard = clock()
        self._parent = os.getppid()
        self._over = threading.Event()
        self._ending = threading.Lock()

    def start(self) -> None:
        """From now on, until it is stopped."""
        for look in (self.look, self.late):
            threading.Thread(target=self._watch, args=(look,), name=f"stagecrew-{look.__name__}", daemon=True).start()

    def stop(self) -> None:
        """The job is at its end: whatever is found behind this ends nothing."""
        with self._ending:
            self._over.set()

    def _watch(self, look: Callable[[], str | None]) -> None:
        while (reason := self._why(look)) is None:
            if self._over.wait(_LOOK):
                return
        with self._ending:
            if not self._over.is_set():
                self._end(reason)

    @staticmethod
    def _why(look: Callable[[], str | None]) -> str | None:
        try:
            return look()
        except Exception as error:  # a run that nobody watches does not go on
            return f"it cannot be seen whether it may go on: {type(error).__name__}: {error}"

    def late(self) -> str | None:
        """Why this process has to end by its own clock alone."""
        timeout, silent = self._store.timeout, self._clock() - self._heard
        if timeout is not None and silent > timeout * 2 / 3:
            return f"the store has not answered for {silent:.1f} s"
        return None

    def look(self) -> str | None:
        """Why this process has to end; None while it may go on."""
        if os.getppid() != self._parent:
            return "the process that started it is gone"
        asked, expected = self._clock(), self._claimed.version
        try:
            term, holder = self._store.read(TERM), self._store.read(HOLDER)
            claim = self._store.read(self._claimed.key)
        except SessionLost as error:
            return f"its session at the store is over: {error}"
        except StoreUnavailable:
            return self.late()
        self._heard = asked
        if term is None or term.version != self._term or holder is None:
            return f"its leader, of term {self._term}, does not lead any more"
        mine = self._claimed.renewing or self._claimed.version != expected  # it moves, or moved, by this process
        if (claim is None or claim.version != expected) and not mine:
            return "another run of the job was begun, or the job was ended"
        return None


def main(arguments: list[str] | None = None) -> int:
    """Runs what its arguments name. Answers the exit code: 0 when the job is at its end, however it ended.

    Store and storage are those of the environment: their addresses may be nobody else's business.
    """
    parser = argparse.ArgumentParser(prog="stagecrew-run", description=__doc__)
    for name in ("job", "folder"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("run", "claim", "term"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--finish", action="store_true", help="run nothing: finish what is decided")
    given = parser.parse_args(arguments)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(HarmlessFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("py4j").setLevel(logging.WARNING)
    logging.getLogger("stagecrew.zookeeper").setLevel(logging.WARNING)

    storage = StateStorage(os.environ["STAGECREW_STATE"])
    try:
        store = open_store(os.environ["STAGECREW_STORE"])
        store.read(TERM)
    except StoreUnsupported as error:
        _log.error("run %d of job %r cannot begin: %s", given.run, given.job, error)
        return LOST

    def leave(reason: str) -> NoReturn:
        """Nothing that this process writes from now on would be done."""
        # The store is closed so that the next run need not wait for a time-out; of the files nobody else may be left to take care.
        leave_behind(
            lambda: print(f"stagecrew: this run ends: {harmless(reason)}", file=sys.stderr, flush=True),
            lambda: shutil.rmtree(given.folder, ignore_errors=True),
            store.close,
        )

    signal.signal(signal.SIGTERM, lambda *_: leave("it was told to"))
    run = Run(given.job, given.run, given.claim)
    who = {"host": socket.gethostname(), "pid": os.getpid(), "term": given.term}
    try:
        claim = Jobs(Fenced(store, fence(given.term)), storage).take(run, who)
    except StoreConflict as error:
        _log.warning("run %d of job %r is not this process's: %s", given.run, given.job, error)
        store.close()
        return LOST
    claimed = Claimed(store, storage, given.term, run, claim)
    watch = Watch(store, given.term, claimed, leave, time.monotonic)
    watch.start()
    folder = Path(given.folder)
    on_path(folder / FILES)
    done = False
    try:
        facts = _facts(store, given.term)
        done = carry_out(claimed, given.finish, lambda spec: _called(spec, folder), watch.look, facts)
    except BaseException:
        _log.exception("run %d of job %r has ended before the job", given.run, given.job)
    if not done:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        leave("its job is not at its end")
    watch.stop()
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    ends_within(_EXIT, 0)
    store.close()
    return 0


def leave_behind(*last: Callable[[], object]) -> NoReturn:
    """This process ends as a lost run within `_CLOSE` seconds, whatever it does last: a disk may be full, and a server hang."""
    try:
        threads = [threading.Thread(target=one, daemon=True) for one in last]
        for thread in threads:
            thread.start()
        due = time.monotonic() + _CLOSE
        for thread in threads:
            thread.join(max(0.0, due - time.monotonic()))
    finally:
        os._exit(LOST)


def ends_within(seconds: float, code: int) -> None:
    """This process ends by then, whatever threads and exit hooks the job's code has left to it."""
    timer = threading.Timer(seconds, os._exit, (code,))
    timer.daemon = True
    timer.start()


def _facts(store: Store, term: int) -> dict[str, str]:
    """What people see of where it runs; no address of the store, which may be nobody else's business."""
    try:
        leader = leader_of(store)
    except StoreError:  # the watch finds out what that means
        leader = None
    return {
        "term": str(term),
        "leader": "" if leader is None else leader.host,
        "store": os.environ["STAGECREW_STORE"].partition("://")[0],
    }


def carry_out(
    claimed: Claimed,
    finish: bool,
    call: Callable[[JobSpec], Any],
    look: Callable[[], str | None],
    facts: Mapping[str, str] | None = None,
    patience: float = PATIENCE,
) -> bool:
    """What a process does that has claimed a run. Answers whether the job is at its end; else it is lost, and runs again.

    `call` calls the job's own code; `look` says why the process may not go on. What is away is waited for `patience` seconds.
    """
    run, jobs = claimed.run, claimed.jobs
    known = jobs.read(run.job)
    # What ends is tried again with pauses, so that others have its place meanwhile; a run would be lost.
    finish_commits(
        jobs.below(run.job, "commits"), ending=finish, patience=min(patience, _BRIEF) if finish else patience
    )
    if finish:
        result = Result(str(known[0].outcome), known[0].reason)
    else:
        spec = jobs.spec(run.job)
        job = Job(run.job, run.number, jobs.below(run.job, "steps"), jobs.below(run.job, "commits"), patience, facts)
        set_running_job(job)
        try:
            result = Result.of_value(call(spec))
        except BaseException as error:
            if (ended := _ended_by_itself(error)) is None:
                _log.exception("job %r has raised", run.job)
                if (reason := _no_fault_of_its_own(error) or look()) is not None:
                    _log.warning("job %r has not failed by that: %s. It runs again", run.job, reason)
                    return False
                ended = Result.of_error(error)
            result = ended
        finally:
            job.end()
        # What threads of the job still do from now on decides nothing: the claim has moved on.
        claimed.renew()
        jobs = claimed.jobs
        finish_commits(jobs.below(run.job, "commits"), ending=True, patience=patience)
    jobs.finish(run.job, known, JobState(result.state), result, patience)
    return True


def _ended_by_itself(error: BaseException) -> Result | None:
    """A script's `sys.exit()`."""
    return Result.of_value(None) if isinstance(error, SystemExit) and error.code in (None, 0) else None


def _no_fault_of_its_own(error: BaseException) -> str | None:
    """Why a job that raised has not failed: the store, the storage or its JVM were away, also where its code wraps that.

    A checkpoint that was late is such an error too. A checkpoint that a coordinator declined is not.
    """
    ours = (
        StoreError,
        LeadershipLost,
        StateStorageError,
        CommitUnknown,
        CommitUnreadable,
        CommitPending,
        CommitSuperseded,
        CheckpointTimeout,
    )
    for one in with_causes(error):
        if isinstance(one, ours):
            return f"{type(one).__name__}: {one}"
        if (said := _said_across_a_jvm(one, ours)) is not None:
            return said
    return _jvm_gone()


def _said_across_a_jvm(error: BaseException, ours: tuple[type[BaseException], ...]) -> str | None:
    """What one of our errors says that was raised where a JVM called Python, as `foreachBatch` is: it comes back as text alone."""
    if type(error).__module__.partition(".")[0] not in ("pyspark", "py4j"):
        return None
    for name, text in re.findall(r"^stagecrew\.errors\.(\w+): (.*)$", str(error), re.MULTILINE):
        if issubclass(getattr(errors, name, object), ours):
            return f"{name}: {text}"
    return None


def _jvm_gone() -> str | None:
    if (pyspark := sys.modules.get("pyspark")) is None or (gateway := pyspark.SparkContext._gateway) is None:
        return None
    try:
        gateway.jvm.System.currentTimeMillis()
    except Exception as error:
        return f"its JVM does not answer: {type(error).__name__}: {error}"
    return None


def _called(spec: JobSpec, folder: Path) -> Any:
    import_named(spec.conf.get("spark.stagecrew.listeners", ""))  # a job may build its session without `configure`
    if spec.script is not None:
        sys.argv = [spec.target, *map(str, spec.arguments)]
        runpy.run_path(str(folder / SCRIPT / spec.target), run_name="__main__")
        return None
    module, _, function = spec.target.partition(":")
    assert isinstance(spec.arguments, bytes)
    return getattr(importlib.import_module(module), function)(**pickle.loads(spec.arguments))


if __name__ == "__main__":
    sys.path.pop(0)  # this folder: its modules are none of the job's
    sys.exit(importlib.import_module("stagecrew.recovery.run").main())  # and not a second module, named __main__
