"""A host that vanishes: a network of its own on this one, for root."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

from support.tcp_proxy import Proxy

__all__ = ["OtherHost", "other_host"]

_CLONE_NEWNET = 0x40000000


class OtherHost:
    """Before a server of this host. Behind `vanish` nothing comes from it, not even that it has got something."""

    def __init__(self, name: str, ours: str, proxy: Proxy) -> None:
        self._name, self._ours, self.hosts = name, ours, proxy.hosts

    def vanish(self) -> None:
        _ip("-n", self._name, "route", "add", "blackhole", f"{self._ours}/32")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


def _listening(name: str, address: str) -> socket.socket:
    """A socket of that network: a thread enters it, and ends."""
    found: list[socket.socket] = []

    def listens() -> None:
        with Path("/var/run/netns", name).open("rb") as network:
            if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"network {name} cannot be entered")
        found.append(socket.create_server((address, 0)))

    thread = threading.Thread(target=listens)
    thread.start()
    thread.join(30)
    return found[0]


@contextlib.contextmanager
def other_host(port: int) -> Iterator[OtherHost]:
    """One whose server is that of this port here."""
    pid = os.getpid()
    name, here, there = f"stagecrew-{pid}", f"sc{pid}h", f"sc{pid}t"
    block = f"198.18.{pid // 64 % 256}"  # a range for tests of networks
    ours, theirs = (f"{block}.{pid % 64 * 4 + number}" for number in (1, 2))
    with contextlib.ExitStack() as made:
        _ip("netns", "add", name)
        made.callback(_ip, "netns", "del", name)
        _ip("link", "add", here, "type", "veth", "peer", "name", there, "netns", name)
        made.callback(_ip, "link", "del", here)
        _ip("addr", "add", f"{ours}/30", "dev", here)
        _ip("link", "set", here, "up")
        _ip("-n", name, "addr", "add", f"{theirs}/30", "dev", there)
        _ip("-n", name, "link", "set", there, "up")
        proxy = made.enter_context(Proxy(port, _listening(name, theirs)))
        yield OtherHost(name, ours, proxy)
