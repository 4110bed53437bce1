"""A TCP proxy for a server on this host. It can hold back traffic and drop connections."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading


class _Direction:
    """Forwards one direction of one connection while its gate is open."""

    def __init__(self, source, target, gate):
        self.source, self.target, self.gate = source, target, gate
        threading.Thread(target=self._forward, daemon=True).start()

    def _forward(self):
        with contextlib.suppress(OSError):
            while data := self.source.recv(65536):
                self.gate.wait()
                self.target.sendall(data)
        self.gate.wait()
        with contextlib.suppress(OSError):
            self.target.shutdown(socket.SHUT_WR)


class Proxy:
    """A proxy for a server. It can hold back traffic in either direction, like a stalled network."""

    def __init__(self, port: int, listening: socket.socket | None = None) -> None:
        self._to = port
        self._listening = listening or socket.create_server(("127.0.0.1", 0))
        self.hosts = "{}:{}".format(*self._listening.getsockname())
        self._connections = []
        #: The directions that are held back on new connections.
        self._held = set()
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                try:
                    server = socket.create_connection(("127.0.0.1", self._to), 5)
                except OSError:
                    client.close()
                    continue
                server.settimeout(None)
                gates = {}
                for name, source, target in (("to", client, server), ("from", server, client)):
                    gates[name] = threading.Event()
                    if name not in self._held:
                        gates[name].set()
                    _Direction(source, target, gates[name])
                self._connections.append((client, server, gates))

    def hold(self, *directions: str, new: bool = True) -> None:
        """Holds back the traffic "to" or "from" the server on existing connections and, if `new`, on later ones."""
        if new:
            self._held.update(directions)
        for _, _, gates in self._connections:
            for name in directions:
                gates[name].clear()

    def heal(self) -> None:
        """Releases the traffic that was held back, and holds back no more."""
        self._held.clear()
        for _, _, gates in self._connections:
            for gate in gates.values():
                gate.set()

    def cut(self) -> None:
        """Drops all connections, together with the traffic that was held back."""
        for client, server, _ in self._connections:
            for end in (client, server):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._accepting.join(10)
        self.cut()
        self.heal()
        for end in itertools.chain.from_iterable(connection[:2] for connection in self._connections):
            end.close()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()
