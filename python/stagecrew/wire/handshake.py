"""The client's part of a channel's handshake. It makes and checks frames, and has no socket.

Both sides prove that they know the token in the channel's address file (`channel_address.py`), and neither sends it:

    client -> server    CONNECT      the client's nonce
    server -> client    CHALLENGE    the server's nonce, and the server's proof
    client -> server    HELLO        the client's proof, its role, a random id of its process, its pid and version
    server -> client    WELCOME      the configuration; or REFUSED, if the versions differ

If the client's proof is wrong, the server closes the connection without a reply.

A proof is an HMAC-SHA256 with the token as its key. Its message is the name of the side, the other fields of HELLO
(only in the client's proof), and both nonces. So nobody can replay a proof on another connection, or present the proof
of one side as that of the other. The server proves first that it knows the token, so a client that reaches the wrong
process sends it only a nonce. `Handshake.scala` is the server's part.
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
    """One handshake of this process. `role` is its purpose, such as "sampler". `peer` names the server in errors."""

    def __init__(self, token: str, role: str, peer: str) -> None:
        self._token, self._role, self._peer = token, role, peer
        self._nonce = os.urandom(NONCE_BYTES)

    def connect(self) -> bytes:
        """The client's first frame."""
        return encode("CONNECT", nonce=self._nonce)

    def hello(self, challenge: Frame) -> bytes:
        """The client's second frame. Raises `ChannelError` unless the server has proved that it knows the token."""
        if challenge.kind != "CHALLENGE":
            raise ChannelError(f"the process that replied is not {self._peer}: its first frame is {challenge.kind}")
        if not hmac.compare_digest(
            bytes(challenge["proof"]), proof(self._token, "server", self._nonce, challenge["nonce"])
        ):
            raise ChannelError(
                f"the process that replied is not {self._peer}, because it does not know the token in the address "
                "file; only a random number was sent to it"
            )
        process, pid = uuid.uuid4().hex, os.getpid()
        others = (self._role, process, str(pid), __version__)
        return encode(
            "HELLO",
            proof=proof(self._token, "client", self._nonce, challenge["nonce"], *others),
            role=self._role,
            process=process,
            pid=pid,
            version=__version__,
        )


def proof(token: str, side: str, client_nonce: bytes, server_nonce: bytes, *others: str) -> bytes:
    """Returns the proof of one side, "server" or "client". `others` are the client's other fields of HELLO."""
    message = "\0".join((side, *others)).encode() + client_nonce + server_nonce
    return hmac.new(token.encode(), message, hashlib.sha256).digest()
