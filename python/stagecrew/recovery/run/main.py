"""The process of one run of a job: claims the run, executes it under a watchdog, and stores how the job ended.

spark-submit runs this file.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import os
import shutil
import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from stagecrew.errors import StoreConflict, StoreError, StoreUnsupported
from stagecrew.observability.logs import HarmlessFormatter, harmless
from stagecrew.recovery.jobs.fenced import FencedJobs
from stagecrew.recovery.jobs.record import Run
from stagecrew.recovery.jobs.run_files import FILES, add_to_path
from stagecrew.recovery.leadership.fencing import TERM, FencedStore, fence, leader_of
from stagecrew.recovery.run.claim import ClaimedRun
from stagecrew.recovery.run.execution import call_job, execute_run
from stagecrew.recovery.run.exits import EXIT_LOST, exit_as_lost, exit_within
from stagecrew.recovery.run.watchdog import RunWatchdog
from stagecrew.recovery.state.storage import StateStorage
from stagecrew.recovery.stores import open_store

if TYPE_CHECKING:
    from stagecrew.recovery.stores.contract import Store

_log = logging.getLogger("stagecrew")

#: How long the process may take to exit after its job has ended, in seconds. The leader waits longer before it kills
#: the process.
_EXIT_TIMEOUT: Final = 25.0


def main(arguments: list[str] | None = None) -> int:
    """Executes the run that the arguments name. Returns the exit code: 0 if the job has ended, however it ended.

    The addresses of the store and the storage come from the environment, because command lines are visible to other
    users.
    """
    options = _parse(arguments)
    _configure_logging()
    storage = StateStorage(os.environ["STAGECREW_STATE"])
    try:
        store = open_store(os.environ["STAGECREW_STORE"])
        store.read(TERM)
    except StoreUnsupported as error:
        _log.error("run %d of job %r cannot start: %s", options.run, options.job, error)
        return EXIT_LOST

    def leave(reason: str) -> NoReturn:
        """Exits as a lost run, without waiting for the job's code."""
        # Closing the store lets the next run start without waiting for the session timeout.
        exit_as_lost(
            lambda: print(f"stagecrew: this run ends: {harmless(reason)}", file=sys.stderr, flush=True),
            lambda: shutil.rmtree(options.folder, ignore_errors=True),
            store.close,
        )

    signal.signal(signal.SIGTERM, lambda *_: leave("it received SIGTERM"))
    run = Run(options.job, options.run, options.claim)
    owner = {"host": socket.gethostname(), "pid": os.getpid(), "term": options.term}
    try:
        claim = FencedJobs(FencedStore(store, fence(options.term)), storage).claim_run(run, owner)
    except StoreConflict as error:
        _log.warning("run %d of job %r belongs to another process: %s", options.run, options.job, error)
        store.close()
        return EXIT_LOST
    claimed = ClaimedRun(store, storage, options.term, run, claim)
    watchdog = RunWatchdog(store, options.term, claimed, leave, time.monotonic)
    watchdog.start()
    folder = Path(options.folder)
    add_to_path(folder / FILES)
    has_ended = False
    try:
        facts = _facts(store, options.term)
        has_ended = execute_run(claimed, options.finish, lambda spec: call_job(spec, folder), watchdog.check, facts)
    except BaseException:
        _log.exception("run %d of job %r ended before its job did", options.run, options.job)
    if not has_ended:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        leave("its job has not ended")
    watchdog.stop()
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    exit_within(_EXIT_TIMEOUT, 0)
    store.close()
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="stagecrew-run", description=__doc__)
    for name in ("job", "folder"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("run", "claim", "term"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--finish", action="store_true", help="only finish the decided commits")
    return parser.parse_args(arguments)


def _configure_logging() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(HarmlessFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("py4j").setLevel(logging.WARNING)
    logging.getLogger("stagecrew.zookeeper").setLevel(logging.WARNING)


def _facts(store: Store, term: int) -> dict[str, str]:
    """Returns facts about this run for the Spark UI, without the store's address, which can be confidential."""
    try:
        leader = leader_of(store)
    except StoreError:  # the watchdog decides what this means
        leader = None
    return {
        "term": str(term),
        "leader": "" if leader is None else leader.host,
        "store": os.environ["STAGECREW_STORE"].partition("://")[0],
    }


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, whose modules must not be importable by their short names
    # Call the package's module, not this second copy of it, which is named __main__.
    sys.exit(importlib.import_module("stagecrew.recovery.run.main").main())
