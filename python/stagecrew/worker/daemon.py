"""The entry of Spark's Python daemon with stagecrew: `python -m stagecrew.worker.daemon pyspark.worker`.

Spark starts it instead of `pyspark.daemon`, because the plugin sets `spark.python.daemon.module`. It is pyspark's
daemon with these functions replaced:

- `worker`, which a forked worker calls once per task. Before the call, the worker closes topologies that have ended.
  After the call, it closes everything if the process is about to end. During the call, the task begins in
  `setup_broadcasts`, because this function runs just before the user's function is read, and Spark treats an exception
  there as a failure of the task. `handle_worker_exception` removes our frames from such an exception. The task ends in
  `main`. Our `worker` checks Spark's secret itself, so that a stranger cannot cause the import of `pyspark.worker`,
  which takes time and memory.
- `kill`, which kills workers that Spark no longer needs. A worker with listeners is asked to end first
  (`graceful_shutdown`).
- `fork`, and `poll` or `select`, so that the daemon samples its workers when its loop wakes and has nothing to do
  (`sampling`).

Source: pyspark/daemon.py and pyspark/worker.py of Spark 4.0 to 4.3.
"""

from __future__ import annotations

import contextlib
import gc
import hmac
import os
import signal
import socket
import sys
import zipimport
from types import ModuleType
from typing import Any, BinaryIO, Final, NoReturn

import pyspark.daemon

from stagecrew._version import __version__
from stagecrew.errors import ConfigurationError
from stagecrew.observability.error_summary import remove_own_frames
from stagecrew.worker import graceful_shutdown, sampling
from stagecrew.worker.process import ADDRESS_FILE, CHAIN, WorkerProcess, flush_standard_streams

#: The names that are replaced in PySpark's modules. `_missing` checks that they exist.
_REPLACED: Final = {
    "pyspark.daemon": ("worker", "manager", "os", "select"),
    "pyspark.worker": ("main", "setup_broadcasts", "handle_worker_exception"),
}

_original_worker: Any = getattr(pyspark.daemon, "worker", None)
_process: WorkerProcess | None = None
_hooked = False


def worker(sock: socket.socket, authenticated: bool) -> int:
    """Replaces `pyspark.daemon.worker`: called by the forked process once per task."""
    global _process
    if not authenticated:
        # PySpark's `worker` checks the secret too, but only after the import of `pyspark.worker`.
        _reset_signals()
        if not _knows_secret(sock):
            return 1
        authenticated = True
    if _process is not None:
        _process.wait_for_task(sock)
        if not _process.anything_open and _process._channel.fileno() < 0:
            _process = None
    graceful_shutdown.reset_in_worker()
    _hook_pyspark()
    code: int = 1
    try:
        code = _original_worker(sock, authenticated)
    finally:
        if _process is not None and (code != 0 or not os.environ.get("SPARK_REUSE_WORKER")):
            process, _process = _process, None
            process.leave("the worker ends")
            flush_standard_streams()
    return code


def _begin_task(output: BinaryIO) -> None:
    global _process
    from pyspark import TaskContext

    context = TaskContext.get()
    chain = context.getLocalProperty(CHAIN) if context is not None else None
    if not chain:
        if _process is not None:
            _process.begin_without_listeners(output)
        return
    if _process is None:
        address_file = context.getLocalProperty(ADDRESS_FILE)  # type: ignore[union-attr]
        assert address_file is not None, "the executor's shim sets both properties"
        _process = WorkerProcess(address_file)
    _process.begin(context, chain.split(" "), output)


def _reset_signals() -> None:
    """PySpark's `worker` does this too, but only later. Until then the daemon's own handlers would be active."""
    for number in (signal.SIGHUP, signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def _knows_secret(sock: socket.socket) -> bool:
    """Checks the secret that Spark sends first, and replies as PySpark does.

    Never reads more bytes than the right secret has. With Unix domain sockets, PySpark has no secret.
    """
    secret = os.environ["PYTHON_WORKER_FACTORY_SECRET"].encode()
    expected = len(secret).to_bytes(4, "big") + secret
    received = b""
    with contextlib.suppress(OSError):
        while len(received) < len(expected) and (data := sock.recv(len(expected) - len(received))):
            received += data
        is_right = hmac.compare_digest(received, expected)
        reply = b"ok" if is_right else b"err"
        sock.sendall(len(reply).to_bytes(4, "big") + reply)
        if is_right:
            return True
    sock.close()
    return False


def _worker_module() -> str:
    """The module that PySpark's daemon runs. It ignores a `spark.python.worker.module` outside of PySpark."""
    requested = sys.argv[1] if len(sys.argv) > 1 else ""
    return requested if requested.startswith("pyspark") else "pyspark.worker"


def _missing(module: ModuleType) -> str | None:
    """Returns what this module of PySpark lacks, as a message. Returns None if it has everything."""
    names = [name for name in _REPLACED[module.__name__] if not hasattr(module, name)]
    if not names:
        return None
    return (
        f"stagecrew {__version__} does not work with PySpark {pyspark.__version__}, whose {module.__name__} has no "
        f"{', '.join(names)}: use another PySpark on the executors"
    )


def _refuse(problem: str) -> None:
    """Makes each task fail with this message."""

    def main(infile: Any, outfile: Any) -> NoReturn:
        from pyspark.util import handle_worker_exception

        try:
            raise ConfigurationError(problem)  # before 4.3, PySpark sends the exception that is being handled
        except ConfigurationError as error:
            handle_worker_exception(error, outfile)
        outfile.flush()
        sys.exit(-1)

    _replace_main(main)


def _replace_main(main: Any) -> None:
    pyspark.worker.main = main
    if hasattr(pyspark.daemon, "worker_main"):  # before 4.2, the daemon imports `main` when it starts
        pyspark.daemon.worker_main = main


def _freeze_imported_objects() -> None:
    """Excludes the objects that exist now from garbage collections.

    PySpark calls `gc.collect()` after each task of a worker that it reuses. A visit to all objects of PySpark's modules
    takes 6 to 11 ms, and the worker cannot close topologies in this time. Objects that are created later are collected
    as before.
    """
    gc.collect()
    gc.freeze()


def _hook_pyspark() -> None:
    """Wraps three functions of `pyspark.worker`. It runs after the fork, because the import may start threads."""
    global _hooked
    if _hooked or _worker_module() != "pyspark.worker":
        return
    _reset_signals()
    import pyspark.worker

    _hooked = True
    if (problem := _missing(pyspark.worker)) is not None:
        _refuse(problem)
        return
    if os.environ.get("SPARK_REUSE_WORKER"):  # otherwise the process ends after its task, and collects nothing
        _freeze_imported_objects()
    original_main = pyspark.worker.main
    original_setup = pyspark.worker.setup_broadcasts  # type: ignore[attr-defined]  # imported there, not defined
    original_handle = pyspark.worker.handle_worker_exception  # type: ignore[attr-defined]

    output: Any = None
    begin_error: BaseException | None = None

    def main(infile: Any, outfile: Any) -> None:
        nonlocal output, begin_error
        output, begin_error = outfile, None
        if _process is not None:
            _process.resumed()
        error: BaseException | None = None
        try:
            original_main(infile, outfile)
        except SystemExit as exit_:
            error = exit_.__context__ or exit_
            raise
        except BaseException as raised:
            error = raised
            raise
        finally:
            output = begin_error = None
            if _process is not None:
                _process.end(error)

    def setup_broadcasts(*args: Any, **kwargs: Any) -> None:
        nonlocal begin_error
        original_setup(*args, **kwargs)
        try:
            _begin_task(output)
        except BaseException as error:
            begin_error = error
            raise

    def handle_worker_exception(error: BaseException, *args: Any, **kwargs: Any) -> None:
        # An `open` or `decorate` raised: the frames between Spark's and the user's frames are stagecrew's.
        if error is begin_error:
            remove_own_frames(error)
        original_handle(error, *args, **kwargs)

    _replace_main(main)
    pyspark.worker.setup_broadcasts = setup_broadcasts  # type: ignore[attr-defined]
    pyspark.worker.handle_worker_exception = handle_worker_exception  # type: ignore[attr-defined, assignment]


class _Jar(zipimport.zipimporter):
    """Imports from stagecrew's jar, and reads the jar's list of files only once.

    PySpark calls `importlib.invalidate_caches()` for each task. Python's own importers then read the list again for
    each folder of the jar, which takes 4 ms per task. The jar does not change while a daemon runs.
    """

    def invalidate_caches(self) -> None:
        """Keeps the list."""


def _read_our_jar_once() -> None:
    # Do not compare names: the user's path may contain the jar under another name, such as a link.
    loader = getattr(graceful_shutdown.__spec__, "loader", None)
    if not isinstance(loader, zipimport.zipimporter):
        return
    ours = [path for path in sys.path if os.path.isfile(path) and os.path.samefile(path, loader.archive)]

    def belongs(path: str) -> bool:
        return any(path == jar or path.startswith(jar + os.sep) for jar in ours)

    def importer(path: str) -> _Jar:
        if not belongs(path):
            raise ImportError(path)
        return _Jar(path)

    sys.path_hooks.insert(0, importer)
    for path in [path for path in sys.path_importer_cache if belongs(path)]:
        del sys.path_importer_cache[path]


if __name__ == "__main__":
    if (missing := _missing(pyspark.daemon)) is not None:
        sys.exit(missing)  # Spark shows it as the error of the task
    _read_our_jar_once()
    # PySpark recognizes its own frames by these names, and our frames are between them (pyspark/logger/worker_io.py).
    # Spark 4.1 reads `__name__`.
    __name__ = pyspark.daemon.__name__
    if __spec__ is not None:
        __spec__.name = pyspark.daemon.__name__
    pyspark.daemon.worker = worker
    graceful_shutdown.install()
    sampling.install()
    pyspark.daemon.manager()
