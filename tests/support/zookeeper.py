"""ZooKeeper servers for tests, started from the jars of PySpark."""

from __future__ import annotations

import contextlib
import datetime as dt
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pyspark

from support.tcp_proxy import Proxy
from support.waiting import eventually

__all__ = ["Server", "ensemble", "tls_zookeeper", "zookeeper"]

_JARS = Path(pyspark.__file__).parent / "jars"
_NEEDED = ("zookeeper-", "slf4j-api", "log4j-", "metrics-core", "snappy", "netty-")
_SMALL = [
    "-Xmx96m",
    "-Xshare:auto",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-Dzookeeper.admin.enableServer=false",
]
#: The length of a tick in milliseconds. ZooKeeper allows session timeouts of 2 to 20 ticks.
TICK = 500


def _free_ports(count):
    with contextlib.ExitStack() as probes:
        sockets = [probes.enter_context(socket.socket()) for _ in range(count)]
        for probe in sockets:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in sockets]


class Server:
    """One server. Its data survives a kill, and is deleted when `zookeeper` or `ensemble` ends."""

    def __init__(self, folder: Path, port: int, settings: list[str], main: str, properties: list[str]) -> None:
        self.hosts, self.port, self._folder, self._main = f"127.0.0.1:{port}", port, folder, main
        self._properties = properties
        (folder / "data").mkdir(parents=True)
        (folder / "zoo.cfg").write_text(
            "\n".join([f"tickTime={TICK}", f"dataDir={folder}/data", f"clientPort={port}", "clientPortAddress=127.0.0.1",
                       "admin.enableServer=false", "maxClientCnxns=0", "4lw.commands.whitelist=srvr", *settings])
        )  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    def start(self):
        jars = ":".join(str(jar) for jar in _JARS.iterdir() if jar.name.startswith(_NEEDED))
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                ["java", *_SMALL, *self._properties, "-cp", jars, f"org.apache.zookeeper.server.{self._main}", self._folder / "zoo.cfg"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self._folder,
            )  # fmt: skip
        self.pid = self._process.pid

    @property
    def alive(self):
        """Whether the server was started and has not been killed."""
        return self._process is not None

    def status(self):
        """Returns the server's status, which includes its mode, or an empty string while it is not serving."""
        assert self._process is not None
        assert self._process.poll() is None, (self._folder / "log").read_text(errors="replace")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 2) as connection:
            connection.settimeout(5)
            connection.sendall(b"srvr")
            status = b""
            while part := connection.recv(4096):
                status += part
            return status.decode() if b"Mode:" in status else ""
        return ""

    def wait(self):
        eventually(self.status, 60, f"ZooKeeper is serving; see {self._folder}/log")

    def kill(self):
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(20)
            self._process = None


@contextlib.contextmanager
def zookeeper(*settings: str, properties: tuple[str, ...] = ("-Dzookeeper.forceSync=no",)) -> Iterator[Server]:
    """Runs one server, and yields it once it is serving."""
    folder = Path(tempfile.mkdtemp(prefix="stagecrew-zookeeper-"))
    server = Server(folder, *_free_ports(1), list(settings), "ZooKeeperServerMain", list(properties))
    try:
        server.start()
        server.wait()
        yield server
    finally:
        server.kill()
        shutil.rmtree(folder)


def _certificates(folder):
    """Creates a key and a self-signed certificate for this host."""
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "crew")])
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(x509.random_serial_number()).not_valid_before(now).not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True).sign(key, hashes.SHA256())
    )  # fmt: skip
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "key.pem").write_bytes(private)
    (folder / "ca.pem").write_bytes(certificate.public_bytes(pem))
    (folder / "both.pem").write_bytes(private + certificate.public_bytes(pem))


@contextlib.contextmanager
def tls_zookeeper(folder: Path) -> Iterator[int]:
    """Runs a server, and yields its TLS port.

    Creates `key.pem` and `ca.pem` for the clients in `folder`.
    """
    _certificates(folder)
    (port,) = _free_ports(1)
    with zookeeper(
        f"secureClientPort={port}", "secureClientPortAddress=127.0.0.1", f"ssl.keyStore.location={folder}/both.pem",
        "ssl.keyStore.type=PEM", f"ssl.trustStore.location={folder}/ca.pem", "ssl.trustStore.type=PEM",
        "ssl.clientHostnameVerification=false",
        properties=("-Dzookeeper.serverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory",),
    ):  # fmt: skip
        yield port


@contextlib.contextmanager
def ensemble(network: list[Proxy] | None = None) -> Iterator[list[Server]]:
    """Runs an ensemble of three servers.

    If `network` is a list, the first server is not the initial leader. It reaches the other two servers through two
    proxies, which are appended to the list.
    """
    folder = Path(tempfile.mkdtemp(prefix="stagecrew-zookeeper-"))
    with contextlib.ExitStack() as ending:
        listening = [] if network is None else [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        free = iter(_free_ports(9))
        quorum, elections, clients = ([next(free) for _ in range(3)] for _ in range(3))
        known = [list(quorum) for _ in range(3)]
        if network is not None:
            network += [
                ending.enter_context(Proxy(port, listener))
                for port, listener in zip(quorum[1:], listening, strict=True)
            ]
            known[0][1:] = [listener.getsockname()[1] for listener in listening]
        servers = [
            Server(folder / str(number), clients[number],
                   ["initLimit=20", "syncLimit=10" if network is None else "syncLimit=40",
                    *(f"server.{peer}=127.0.0.1:{port}:{elections[peer]}" for peer, port in enumerate(known[number]))],
                   "quorum.QuorumPeerMain", ["-Dzookeeper.forceSync=no"])
            for number in range(3)
        ]  # fmt: skip
        ending.callback(shutil.rmtree, folder)
        for number, server in enumerate(servers):
            (folder / str(number) / "data" / "myid").write_text(str(number))
            ending.callback(server.kill)
        for group in [servers] if network is None else [servers[1:], servers[:1]]:
            for server in group:
                server.start()
            for server in group:
                server.wait()
        yield servers
