"""A PostgreSQL server for tests, with a temporary database cluster and a free loopback port."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg

from support.requirements import bootstrap

__all__ = ["Server", "postgresql"]

DEADLINE = 60.0


@dataclasses.dataclass(frozen=True)
class Server:
    """A running server. `url` contains the password, as a user's URL does. `pid` is the postmaster's process id."""

    url: str
    password: str
    port: int
    pid: int
    folder: Path


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def postgresql() -> Iterator[Server]:
    """Runs a server with a user `crew` who has a random password. Stops the server and deletes its data at the end."""
    programs = Path(bootstrap.initdb()).parent
    # PostgreSQL refuses to run as root. Its package has created a user `postgres`.
    as_user = {"user": "postgres", "group": "postgres", "extra_groups": []} if os.geteuid() == 0 else {}
    folder = Path(tempfile.mkdtemp(prefix="stagecrew-postgresql-"))
    password = secrets.token_hex(16)
    try:
        secret = folder / "password"
        secret.write_text(password)
        if as_user:
            entry = pwd.getpwnam("postgres")
            for path in (folder, secret):
                os.chown(path, entry.pw_uid, entry.pw_gid)
        subprocess.run(
            [programs / "initdb", "-D", folder / "data", "-U", "crew", "--pwfile", secret, "--auth=scram-sha-256",
             "--encoding=UTF8", "--locale=C", "--no-sync"],
            check=True, capture_output=True, cwd=folder, timeout=DEADLINE, **as_user,
        )  # fmt: skip
        port = _free_port()
        settings = {"listen_addresses": "127.0.0.1", "unix_socket_directories": str(folder), "fsync": "off"}
        with (folder / "server.log").open("wb") as log:
            server = subprocess.Popen(
                [programs / "postgres", "-D", folder / "data", "-p", str(port),
                 *(word for key, value in settings.items() for word in ("-c", f"{key}={value}"))],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder, **as_user,
            )  # fmt: skip
        try:
            url = f"postgresql://crew:{password}@127.0.0.1:{port}/postgres"
            _wait_until_it_responds(url, server, folder / "server.log")
            yield Server(url, password, port, server.pid, folder)
        finally:
            # SIGINT is PostgreSQL's fast shutdown: the server ends all sessions and closes its files properly.
            server.send_signal(signal.SIGINT)
            try:
                server.wait(DEADLINE)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
                raise
    finally:
        shutil.rmtree(folder)


def _wait_until_it_responds(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + DEADLINE
    while True:
        try:
            psycopg.connect(url, connect_timeout=5).close()
            return
        except psycopg.OperationalError:
            assert server.poll() is None, f"PostgreSQL ended: {log.read_text(errors='replace')}"
            assert time.monotonic() < deadline, f"PostgreSQL does not respond: {log.read_text(errors='replace')}"
            time.sleep(0.1)
