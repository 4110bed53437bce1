"""The process of one run of a job: it claims the run, watches that it may go on, and writes how the job ended.

Started through spark-submit, as a file of its own.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import pickle
import runpy
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from stagecrew.recovery.specs import JobSpec
    from stagecrew.recovery.stores.contract import Store

_log = logging.getLogger("stagecrew")

#: The exit code of a process whose job is not at its end: another run takes it.
LOST: Final = 75
#: How often it looks whether its leader leads, in seconds.
_LOOK: Final = 0.25


class Watch:
    """Ends this process when it may not go on: its leader does not lead, its claim or its session is lost, its JVM is gone.

    On a store with a time-out it ends when it has not heard of the store for two thirds of it: nobody can have taken over then.
    """

    def __init__(
        self,
        store: Store,
        term: int,
        claim_key: str,
        claim: int,
        end: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._store, self._term, self._claim = store, term, (claim_key, claim)
        self._end, self._clock = end, clock
        self._heard = clock()
        self._parent = os.getppid()

    def start(self) -> None:
        """From now on."""
        threading.Thread(target=self._watch, name="stagecrew-watch", daemon=True).start()

    def _watch(self) -> None:
        while (reason := self.look()) is None:
            time.sleep(_LOOK)
        self._end(reason)

    def look(self) -> str | None:
        """Why this process has to end; None while it may go on."""
        from stagecrew.errors import SessionLost, StoreUnavailable
        from stagecrew.recovery.election import HOLDER, TERM

        if os.getppid() != self._parent:
            return "the process that started it is gone"
        asked = self._clock()
        try:
            term, holder = self._store.read(TERM), self._store.read(HOLDER)
            claim = self._store.read(self._claim[0])
        except SessionLost as error:
            return f"its session at the store is over: {error}"
        except StoreUnavailable as error:
            timeout = self._store.timeout
            if timeout is not None and asked - self._heard > timeout * 2 / 3:
                return f"the store has not answered for {asked - self._heard:.1f} s: {error}"
            return None
        self._heard = asked
        if term is None or term.version != self._term or holder is None:
            return f"its leader, of term {self._term}, does not lead any more"
        if claim is None or claim.version != self._claim[1]:
            return "another run of the job was begun, or the job was ended"
        return None


def main(arguments: list[str] | None = None) -> int:
    """Runs what its arguments name. Answers the exit code: 0 when the job is at its end, however it ended."""
    parser = argparse.ArgumentParser(prog="stagecrew-run", description=__doc__)
    for name in ("store", "state", "job", "folder"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("run", "claim", "term"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--finish", action="store_true", help="run nothing: finish what is decided")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("py4j").setLevel(logging.WARNING)
    logging.getLogger("kazoo").setLevel(logging.WARNING)

    from stagecrew.errors import StoreConflict
    from stagecrew.recovery.election import Fenced, fence
    from stagecrew.recovery.jobs import Jobs, Run, fence_of, key_of
    from stagecrew.recovery.storage import StateStorage
    from stagecrew.recovery.stores import open_store

    def leave(reason: str) -> None:
        """Nothing that this process writes from now on would be done."""
        print(f"stagecrew: this run ends: {reason}", file=sys.stderr, flush=True)
        shutil.rmtree(given.folder, ignore_errors=True)  # nobody may be left to do it
        os._exit(LOST)

    store, storage = open_store(given.store), StateStorage(given.state)
    try:
        run = Run(given.job, given.run, given.claim)
        who = {"host": socket.gethostname(), "pid": os.getpid(), "term": given.term}
        try:
            claim = Jobs(Fenced(store, fence(given.term)), storage).take(run, who)
        except StoreConflict as error:
            _log.warning("run %d of job %r is not this process's: %s", given.run, given.job, error)
            return LOST
        Watch(store, given.term, f"{key_of(given.job)}/claim", claim, leave, time.monotonic).start()
        jobs = Jobs(Fenced(store, fence(given.term), fence_of(given.job, claim)), storage)
        return _run(jobs, run, Path(given.folder), given.finish)
    finally:
        store.close()


def _run(jobs: Any, run: Any, folder: Path, finish: bool) -> int:
    from stagecrew.recovery.decisions import finish_commits
    from stagecrew.recovery.job import Job, set_current
    from stagecrew.recovery.jobs import JobState
    from stagecrew.recovery.results import Result
    from stagecrew.recovery.specs import on_path

    known = jobs.read(run.job)
    steps, commits = jobs.below(run.job, "steps"), jobs.below(run.job, "commits")
    on_path(folder)
    finish_commits(commits, ending=finish)
    record = known[0]
    if finish:
        result = Result(str(record.outcome), record.reason)
    else:
        set_current(Job(run.job, run.number, steps, commits))
        try:
            result = Result.of_value(_called(jobs.spec(run.job), folder))
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
            result = Result.of_value(None) if code == 0 else Result.of_error(error)
        except BaseException as error:
            result = Result.of_error(error)
            _log.exception("job %r has failed", run.job)
        set_current(None)
        finish_commits(commits, ending=True)
    jobs.finish(run.job, known, JobState(result.state), result)
    return 0


def _called(spec: JobSpec, folder: Path) -> Any:
    if spec.script is not None:
        sys.argv = [spec.target, *map(str, spec.arguments)]
        runpy.run_path(str(folder / spec.target), run_name="__main__")
        return None
    module, _, function = spec.target.partition(":")
    assert isinstance(spec.arguments, bytes)
    return getattr(importlib.import_module(module), function)(**pickle.loads(spec.arguments))


if __name__ == "__main__":
    sys.exit(importlib.import_module("stagecrew.recovery.run").main())  # and not a second module, named __main__
