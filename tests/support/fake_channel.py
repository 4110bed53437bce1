"""A fake server of a channel, for tests of its clients: each step of the handshake is under the test's control."""

from __future__ import annotations

import json
import os
import select
import socket
from pathlib import Path
from typing import Any

from stagecrew.wire.frames import Decoder, Frame, encode
from stagecrew.wire.handshake import NONCE_BYTES, proof

__all__ = ["TOKEN", "FakeServer", "write_address_file"]

TOKEN = "t" * 64


def write_address_file(folder: Path, **changes: Any) -> str:
    """Writes an address file that only this user can read, in a folder that only this user can enter. Returns its path."""
    folder.mkdir(mode=0o700, exist_ok=True)
    folder.chmod(0o700)
    address_file = folder / "channel.json"
    address_file.unlink(missing_ok=True)
    content = {"token": TOKEN, "maxFrame": 1 << 20, "timeout": 5.0, **changes}
    with open(os.open(address_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        json.dump({name: value for name, value in content.items() if value is not None}, file)
    return str(address_file)


class FakeServer:
    """A server on a Unix socket or a port. It accepts connections when a test asks for their frames."""

    def __init__(self, folder: Path, kind: str = "unix", **changes: Any) -> None:
        self.folder = folder / "channel"
        if kind == "unix":
            self.folder.mkdir(mode=0o700)
            path = str(self.folder / "s")
            self.listening = socket.socket(socket.AF_UNIX)
            self.listening.bind(path)
            self.listening.listen()
            where = {"path": path}
        else:
            self.listening = socket.create_server(("127.0.0.1", 0))
            where = {"port": self.listening.getsockname()[1]}
        self.address_file = write_address_file(self.folder, **{**where, **changes})
        self.accepted: list[socket.socket] = []
        self._decoder = Decoder(32 << 20)

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in (self.listening, *self.accepted):
            connection.close()

    def accept(self) -> None:
        """Accepts the next connection. Later calls serve this one."""
        self.accepted.append(self.listening.accept()[0])
        self._decoder = Decoder(32 << 20)

    def frames(self, seconds: float = 0.2) -> list[Frame]:
        """The frames that have arrived on the last connection, until none arrives within this time."""
        if not self.accepted:
            self.accept()
        found: list[Frame] = []
        connection = self.accepted[-1]
        while select.select([connection], [], [], seconds)[0] and (read := connection.recv_into(self._decoder.room())):
            found += self._decoder.filled(read)
        return found

    def send(self, kind: str, **fields: Any) -> None:
        """Sends a frame on the last connection."""
        self.accepted[-1].sendall(encode(kind, **fields))

    def challenge(self, token: str = TOKEN) -> None:
        """Accepts a connection, reads CONNECT, and replies with the proof of this token."""
        self.accept()
        (connect,) = self.frames()
        assert connect.kind == "CONNECT"
        self.nonces = (connect["nonce"], os.urandom(NONCE_BYTES))
        self.send("CHALLENGE", nonce=self.nonces[1], proof=proof(token, "server", *self.nonces))

    def is_proved(self, hello: Frame) -> bool:
        """Whether the client of the last connection has proved that it knows the token."""
        said = (hello["role"], hello["process"], str(hello["pid"]), hello["version"])
        return bool(hello["proof"] == proof(TOKEN, "client", *self.nonces, *said))
