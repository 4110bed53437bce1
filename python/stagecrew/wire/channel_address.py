"""The address file of a channel: where its server listens, and the token that both sides know.

Only the application's user can read the file, and only this user can change the folder that contains it. A client
checks both, and that no other user's process serves the socket, before it sends anything.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import stat
from typing import Final

from stagecrew.errors import ChannelError
from stagecrew.operating_system import peer_user

__all__ = ["ChannelAddress"]

_ROOT: Final = 0


@dataclasses.dataclass(frozen=True)
class ChannelAddress:
    """The content of an address file. `path` or `port` is where the server listens; the other one is None."""

    file: str
    #: The user of the server's process.
    owner: int
    path: str | None
    port: int | None
    token: str = dataclasses.field(repr=False)
    #: The largest frame, in bytes.
    max_frame: int
    #: How long each step may take, in seconds.
    timeout: float

    @classmethod
    def read(cls, file: str, role: str) -> ChannelAddress:
        """Reads an address file, for a process with this role.

        Raises `OSError` if it cannot be read, and `ChannelError` if it cannot be trusted.
        """
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(descriptor, encoding="utf-8") as opened:
            owner = _owner(file, os.fstat(descriptor), role)
            folder = os.path.dirname(file)
            if _owner(folder, os.lstat(folder), role) != owner:
                raise ChannelError(f"cannot trust {file}: its folder belongs to another user")
            try:
                where = json.load(opened)
                path, port = where.get("path"), where.get("port")
                return cls(
                    file,
                    owner,
                    path,
                    None if port is None else int(port),
                    where["token"],
                    int(where["maxFrame"]),
                    float(where["timeout"]),
                )
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ChannelError(f"{file} is not the address file of a channel: {error!r}") from error

    def new_socket(self) -> socket.socket:
        """Returns a socket that is not connected yet."""
        connection = socket.socket(socket.AF_INET if self.path is None else socket.AF_UNIX, socket.SOCK_STREAM)
        if self.path is None:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    @property
    def address(self) -> str | tuple[str, int]:
        """Where the socket connects."""
        if self.path is not None:
            return self.path
        assert self.port is not None
        return ("127.0.0.1", self.port)

    def check_peer(self, connection: socket.socket) -> None:
        """Raises `ChannelError` if a process of another user serves the socket.

        The user of a TCP server is unknown, and so is every user where the operating system does not report it. There,
        only the handshake proves who the server is.
        """
        user = None if self.path is None else peer_user(connection)
        if user not in (None, self.owner, _ROOT):
            raise ChannelError(f"a process of user {user} serves {self.path}, not one of user {self.owner}")


def _owner(path: str, status: os.stat_result, role: str) -> int:
    """The owner of a file or folder. Raises `ChannelError` if others can use it, or if it is not ours.

    A driver that runs as root may use the files of executors that run as other users. They told it where the files are.
    """
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise ChannelError(f"cannot trust {path}: other users have access to it (mode {stat.filemode(status.st_mode)})")
    user = os.geteuid()
    if status.st_uid != user and not (role == "driver" and user == _ROOT):
        raise ChannelError(f"cannot trust {path}: it belongs to user {status.st_uid}, not to user {user}")
    return status.st_uid
