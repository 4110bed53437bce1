"""`stagecrew driver`."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import tempfile
import threading
from pathlib import Path
from types import FrameType

import click

from stagecrew.errors import ConfigurationError, SessionLost, StoreUnavailable
from stagecrew.observability.logs import HarmlessFormatter
from stagecrew.recovery.commands.options import parse_age, place_options, work_option

__all__ = ["driver"]

_log = logging.getLogger("stagecrew")


@click.command()
@place_options
@work_option
@click.option(
    "--at-once",
    type=click.IntRange(min=1),
    default=16,
    show_default=True,
    help="The maximum number of jobs that run at the same time.",
)
@click.option(
    "--keep", callback=parse_age, metavar="AGE",
    help="Remove jobs that ended longer ago than this, such as 90d or 12h, with their results. Default: keep all jobs.",
)  # fmt: skip
def driver(store: str, state: str, work: Path, at_once: int, keep: float | None) -> None:
    """Campaign for leadership, and run all stored jobs while leading.

    Start one driver on each host: one leads, and the others stand by. On SIGTERM or Ctrl-C, this driver hands over: its
    jobs continue on another host.
    """
    from stagecrew.recovery.driver.launcher import Launcher
    from stagecrew.recovery.driver.service import Driver
    from stagecrew.recovery.leadership.fencing import TERM
    from stagecrew.recovery.state.storage import StateStorage
    from stagecrew.recovery.stores import open_store

    _configure_logging()
    _require_writable(work)
    stop = threading.Event()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    try:
        with contextlib.closing(open_store(store)) as session:
            session.read(TERM)  # the first read connects to a remote store
    except (StoreUnavailable, SessionLost) as error:
        _log.warning("the store is not available yet; the driver keeps trying: %s", error)
    launcher = Launcher(store, state, work.resolve())
    running = Driver(lambda: open_store(store), StateStorage(state), launcher, at_once, keep)
    _log.info("this driver campaigns for leadership as process %d", os.getpid())
    stop.wait()
    running.close()


def _configure_logging() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(HarmlessFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("stagecrew.zookeeper").setLevel(logging.WARNING)


def _require_writable(work: Path) -> None:
    try:
        work.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=work).close()
    except OSError as error:
        raise ConfigurationError(f"the folder {work} is not writable ({error}): use another one with --work") from error
