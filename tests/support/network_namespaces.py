"""Simulates a host that vanishes, with a network namespace on this host. Needs root."""

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
    """A simulated host with a proxy to a server on the real host.

    After `vanish`, nothing arrives from the simulated host, not even TCP acknowledgements.
    """

    def __init__(self, name: str, our_address: str, proxy: Proxy) -> None:
        self._name, self._our_address, self.hosts = name, our_address, proxy.hosts

    def vanish(self) -> None:
        _ip("-n", self._name, "route", "add", "blackhole", f"{self._our_address}/32")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


def _listening_socket(name: str, address: str) -> socket.socket:
    """Opens a listening socket in a network namespace. For this, a thread enters the namespace."""
    found: list[socket.socket] = []

    def listen() -> None:
        with Path("/var/run/netns", name).open("rb") as network:
            if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"network {name} cannot be entered")
        found.append(socket.create_server((address, 0)))

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join(30)
    return found[0]


@contextlib.contextmanager
def other_host(port: int) -> Iterator[OtherHost]:
    """Creates a simulated host with a proxy to the server on this port of the real host."""
    pid = os.getpid()
    name, our_link, their_link = f"stagecrew-{pid}", f"sc{pid}h", f"sc{pid}t"
    block = f"198.18.{pid // 64 % 256}"  # a range that is reserved for network tests
    our_address, their_address = (f"{block}.{pid % 64 * 4 + number}" for number in (1, 2))
    with contextlib.ExitStack() as cleanup:
        _ip("netns", "add", name)
        cleanup.callback(_ip, "netns", "del", name)
        _ip("link", "add", our_link, "type", "veth", "peer", "name", their_link, "netns", name)
        cleanup.callback(_ip, "link", "del", our_link)
        _ip("addr", "add", f"{our_address}/30", "dev", our_link)
        _ip("link", "set", our_link, "up")
        _ip("-n", name, "addr", "add", f"{their_address}/30", "dev", their_link)
        _ip("-n", name, "link", "set", their_link, "up")
        proxy = cleanup.enter_context(Proxy(port, _listening_socket(name, their_address)))
        yield OtherHost(name, our_address, proxy)
