"""The client's part of a channel's handshake. Pure: it has no socket.

Both sides prove that they know the token of the place file, and neither sends it:

    client -> server    CONNECT      the client's nonce
    server -> client    CHALLENGE    the server's nonce, and the server's proof
    client -> server    HELLO        the client's proof, its role, process id and version
    server -> client    WELCOME      or REFUSED, with the reason

A proof is an HMAC-SHA256 with the token as its key. Its message is the name of the side, the fields of HELLO (only in
the client's proof), and both nonces. So a proof cannot be repeated on another connection, and the proof of one side is
not a proof of the other. The server proves the token first: a client that was led to another
process sends nothing but a random number. `Handshake.scala` is the server's part.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import uuid

from stagecrew._version import __version__
from stagecrew.errors import ChannelError
from stagecrew.wire.frames import Frame, encode

__all__ = ["NONCE_BYTES", "Handshake", "proof"]

NONCE_BYTES = 32


class Handshake:
    """One handshake of a process in this role. `peer` is the name of the other side, for messages."""

    def __init__(self, token: str, role: str, peer: str) -> None:
        self._token, self._role, self._peer = token, role, peer
        self._nonce = os.urandom(NONCE_BYTES)

    def connect(self) -> bytes:
        """The client's first frame."""
        return encode("CONNECT", nonce=self._nonce)

    def hello(self, challenge: Frame) -> bytes:
        """The client's second frame. Raises `ChannelError` unless the server has proved that it knows the token."""
        if challenge.kind != "CHALLENGE" or not hmac.compare_digest(
            bytes(challenge["proof"]), proof(self._token, "server", self._nonce, challenge["nonce"])
        ):
            raise ChannelError(
                f"the process that replied is not {self._peer}, because it does not know the token of the place file; "
                f"nothing was sent to it"
            )
        process, pid = uuid.uuid4().hex, os.getpid()
        said = (self._role, process, str(pid), __version__)
        return encode(
            "HELLO",
            proof=proof(self._token, "client", self._nonce, challenge["nonce"], *said),
            role=self._role,
            process=process,
            pid=pid,
            version=__version__,
        )


def proof(token: str, side: str, client_nonce: bytes, server_nonce: bytes, *said: str) -> bytes:
    """The proof that one side, "server" or "client", knows the token."""
    message = "\0".join((side, *said)).encode() + client_nonce + server_nonce
    return hmac.new(token.encode(), message, hashlib.sha256).digest()
