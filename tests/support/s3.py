"""An S3 server for tests."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tempfile

import pyarrow.fs

from support.processes import free_port, terminate
from support.waiting import eventually


@contextlib.contextmanager
def s3_server():
    """Starts a server, and yields an Arrow file system of this server and the URI of a folder in an existing bucket.

    The server runs in a separate process, because Arrow holds the GIL while it finishes an upload.
    """
    port = free_port()
    log = tempfile.TemporaryFile()  # noqa: SIM115 (it stays open as long as the process runs)
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdin=subprocess.DEVNULL, stdout=log, stderr=log,
    )  # fmt: skip

    def listens():
        with socket.socket() as connection:
            return connection.connect_ex(("127.0.0.1", port)) == 0

    try:
        eventually(listens, 60, "the S3 server listens")
        filesystem = pyarrow.fs.S3FileSystem(
            access_key="test", secret_key="test", endpoint_override=f"http://127.0.0.1:{port}", region="us-east-1",
            allow_bucket_creation=True, request_timeout=30,
        )  # fmt: skip
        filesystem.create_dir("bucket")
        yield (
            filesystem,
            f"s3://test:very-secret@bucket/states?endpoint_override=http%3A%2F%2F127.0.0.1%3A{port}&region=us-east-1",
        )
    finally:
        terminate(process)
        log.close()
