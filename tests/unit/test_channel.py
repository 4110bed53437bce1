"""Channels without Spark: data arrives complete and in order, and a peer that stalls or closes causes an error.

A client identifies itself only to the server that wrote the address file.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from stagecrew.errors import ChannelClosed, ChannelError
from stagecrew.wire import channel as channel_module
from stagecrew.wire import channel_address as address_module
from stagecrew.wire.channel import Channel
from stagecrew.wire.channel_address import ChannelAddress
from stagecrew.wire.frames import encode, encoded
from stagecrew.wire.handshake import proof
from support.fake_channel import TOKEN, FakeServer, write_address_file
from support.strangers import BECOME_NOBODY, as_nobody


@pytest.fixture
def ends():
    """Two connected channels."""
    one, other = socket.socketpair()
    channels = Channel(one, 8 << 20, 10.0), Channel(other, 8 << 20, 10.0)
    yield channels
    for channel in channels:
        channel.close()


def test_all_pieces_of_a_write_arrive_complete_and_in_order(ends):
    """One `write` with many small frames, and some larger than the socket's buffers, delivers all of them in order."""
    one, other = ends
    sent = [os.urandom(size) for size in [10] * 1500 + [3 << 20, 5, 1 << 20, 7]]
    pieces = [piece for data in sent for piece in encoded("FROM", executor="1", frames=data)]
    writer = threading.Thread(target=one.write, args=pieces)
    writer.start()
    received = [other.next()["frames"] for _ in sent]
    writer.join(10)
    assert not writer.is_alive()
    assert all(data == back for data, back in zip(sent, received, strict=True))
    assert other.receive() == []


def test_a_write_to_a_peer_that_does_not_read_times_out(ends):
    """A write to a peer that does not read fails after the timeout. The error says that the peer no longer reads."""
    one, _ = ends
    slow = Channel(one._socket, 1 << 20, 0.2)
    with pytest.raises(ChannelClosed, match="no longer reads"):
        slow.write(encode("FROM", executor="1", frames=bytes(32 << 20)))


def test_reads_and_writes_fail_immediately_when_the_peer_has_closed(ends):
    """Reads and writes fail after the peer has closed the channel. Writes also fail after this side has closed it."""
    one, other = ends
    other.close()
    with pytest.raises(ChannelClosed):
        one.receive()
    with pytest.raises(ChannelClosed):
        one.write(b"x", b"y")
    one.close()
    with pytest.raises(ChannelClosed):
        one.write(b"x")


def test_a_signal_handler_can_wait_for_its_own_frame(ends):
    """A process waits for a frame, and its signal handler waits for a different one. Each receives its own frame."""
    one, other = ends
    received, done = [], threading.Event()

    def handler(*_):
        received.append(one.wait_for("CLOSED"))
        done.set()

    def interrupt():
        os.kill(os.getpid(), signal.SIGUSR1)
        other.write(encode("CLOSED", topology="t"))
        done.wait(10)
        other.write(encode("CLOSE", topology="t"))

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        thread = threading.Timer(0.2, interrupt)
        thread.start()
        assert one.next().kind == "CLOSE"
        thread.join(10)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert [frame.kind for frame in received] == ["CLOSED"]


# -- Connecting

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can use files of other users; CI runs as root")


@pytest.fixture(params=["unix", "tcp"])
def server(tmp_path, request):
    """A fake server of each kind."""
    with FakeServer(tmp_path, request.param) as fake:
        yield fake


@pytest.fixture
def connecting():
    """A function that starts to connect in a thread, and returns a function that waits for the channel or the error."""
    with concurrent.futures.ThreadPoolExecutor() as pool:

        def start(server: FakeServer, role: str = "worker"):
            future = pool.submit(Channel.connect, server.address_file, role)
            return lambda: contextlib.closing(future.result(10))

        yield start


def test_both_sides_prove_that_they_know_the_token(server, connecting):
    """The client sends only a nonce until the server has proved the token. No frame contains the token."""
    result = connecting(server, "agent")
    server.challenge()
    (hello,) = server.frames(1)
    assert server.is_proved(hello)
    assert (hello.kind, hello["role"], hello["pid"]) == ("HELLO", "agent", os.getpid())
    assert TOKEN.encode() not in encode(hello.kind, **hello.fields)
    server.send("WELCOME", body=json.dumps({"executor": "7"}))
    with result() as channel:
        assert channel.welcome == {"executor": "7"}


def test_a_server_without_the_token_gets_no_proof(server, connecting):
    """A process that took over the server's address gets only a nonce. The error says that it is not the executor."""
    result = connecting(server)
    server.challenge(token="x" * 64)
    with pytest.raises(ChannelError, match="the process that replied is not the executor, because it does not know"):
        result()
    assert server.frames() == []


def test_a_server_that_begins_with_another_frame_gets_no_proof(server, connecting):
    """If the server's first frame is not CHALLENGE, the error names the frame, and the client has sent only a nonce."""
    result = connecting(server)
    server.accept()
    server.frames(1)
    server.send("WELCOME", body="{}")
    with pytest.raises(ChannelError, match="the process that replied is not the executor: its first frame is WELCOME"):
        result()
    assert server.frames() == []


@pytest.mark.slow
def test_a_server_that_repeats_the_proof_of_another_connection_is_refused(server, connecting):
    """A recorded challenge proves nothing on a new connection, whose client has another nonce."""
    result = connecting(server)
    server.challenge()
    server.frames(1)
    recorded = server.nonces
    server.send("REFUSED", reason="try again")
    with pytest.raises(ChannelError, match="refused this process: try again"):
        result()
    result = connecting(server)
    server.accept()
    server.frames(1)
    server.send("CHALLENGE", nonce=recorded[1], proof=proof(TOKEN, "server", *recorded))
    with pytest.raises(ChannelError, match="does not know the token"):
        result()
    assert server.frames() == []


@pytest.mark.slow
@pytest.mark.parametrize("reply", [encode("WELCOME", body="{}"), b"HTTP/1.1 400 Bad Request\r\n\r\n" * 9])
def test_a_server_that_sends_something_else_is_refused(server, reply, connecting):
    """A server that welcomes every client, or speaks another protocol, gets only a nonce."""
    result = connecting(server)
    server.accept()
    server.frames(1)
    server.accepted[-1].sendall(reply)
    with pytest.raises(ChannelError):
        result()
    assert server.frames() == []


def welcome_after_drops(server, drops):
    """Drops the first connections of the client, and welcomes the next one."""
    for _ in range(drops):
        server.accept()
        server.accepted.pop().close()
    server.challenge()
    server.frames(1)
    server.send("WELCOME", body="{}")


def test_a_client_that_was_dropped_tries_again(server, connecting):
    """The server may drop a client among many strangers. The client connects again, until the server accepts it."""
    result = connecting(server)
    welcome_after_drops(server, 4)
    with result() as channel:
        assert channel.welcome == {}


def test_the_pauses_between_two_tries_grow(server, connecting, monkeypatch):
    """Each pause is twice the one before, up to the longest one, and shortened at random."""
    pauses = []
    monkeypatch.setattr("stagecrew.wire.channel.time.sleep", pauses.append)
    monkeypatch.setattr("stagecrew.wire.channel.random.uniform", lambda least, most: most)
    result = connecting(server)
    welcome_after_drops(server, 8)
    with result():
        pass
    assert pauses == [min(channel_module._FIRST_PAUSE * 2**n, channel_module._LONGEST_PAUSE) for n in range(8)]
    assert pauses[-1] == channel_module._LONGEST_PAUSE


def test_a_client_that_is_always_dropped_gives_up_at_the_timeout(tmp_path, connecting):
    """After the channel's timeout, the error names the address file and the last cause."""
    with FakeServer(tmp_path, timeout=0.5) as server:
        result = connecting(server)
        began = time.monotonic()
        server.listening.settimeout(2)
        with pytest.raises(TimeoutError):
            while True:
                server.accept()
                server.accepted.pop().close()
        with pytest.raises(
            ChannelError, match=f"cannot connect to the channel of the executor through {server.address_file}"
        ):
            result()
        assert 0.2 < time.monotonic() - began < 4


def test_a_server_that_is_gone_is_an_error_at_once(server):
    """Without a server, or without an address file, the client does not wait for the timeout."""
    server.listening.close()
    began = time.monotonic()
    with pytest.raises(ChannelError, match="cannot connect to the channel of the driver's JVM.*Connection refused"):
        Channel.connect(server.address_file, "driver")
    with pytest.raises(ChannelError, match="No such file"):
        Channel.connect(server.address_file + ".gone", "driver")
    assert time.monotonic() - began < 1


@pytest.mark.parametrize(
    ("break_file", "problem"),
    [
        (lambda file: file.chmod(0o644), "channel.json: other users have access to it"),
        (lambda file: file.parent.chmod(0o711), "channel: other users have access to it"),
        (lambda file: file.write_text("{"), "is not the address file of a channel"),
        (lambda file: file.write_text("[]"), "is not the address file of a channel"),
        (lambda file: file.write_text('{"port": "x", "token": "t"}'), "is not the address file of a channel"),
    ],
)
def test_an_address_file_that_others_can_change_is_not_used(tmp_path, break_file, problem):
    """The client does not connect if another user could have written the address file, or if it is not one."""
    with FakeServer(tmp_path) as server:
        break_file(server.folder / "channel.json")
        with pytest.raises(ChannelError, match=problem):
            Channel.connect(server.address_file, "worker")
        server.listening.settimeout(0.1)
        with pytest.raises(TimeoutError):
            server.accept()


def test_a_link_instead_of_an_address_file_is_not_followed(tmp_path):
    """An address file that was replaced by a symbolic link is not read."""
    with FakeServer(tmp_path) as server:
        file = server.folder / "channel.json"
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(ChannelError, match="cannot connect"):
            Channel.connect(server.address_file, "worker")


@needs_root
def test_an_address_file_of_another_user_is_not_used(tmp_path):
    """A process uses only address files of its user. In a folder, all must belong to one user.

    The driver's Python of root may also connect to executors of other users.
    """
    with FakeServer(tmp_path) as server:
        os.chown(server.address_file, 65534, -1)
        with pytest.raises(ChannelError, match="its folder belongs to another user"):
            Channel.connect(server.address_file, "driver")
    address_file = write_address_file(tmp_path / "mine", port=1)
    for path in (address_file, os.path.dirname(address_file)):
        os.chown(path, 65534, -1)
    assert ChannelAddress.read(address_file, "driver").owner == 65534
    with pytest.raises(ChannelError, match="it belongs to user 65534, not to user 0"):
        ChannelAddress.read(address_file, "worker")
    for folder in (tmp_path, *tmp_path.parents[:-2]):
        folder.chmod(0o755)
    os.chown(address_file, 12345, -1)
    os.chown(os.path.dirname(address_file), 65534, -1)
    # The process changes its user after its imports: the other user may be unable to read the checkout.
    script = f"from stagecrew.wire.channel_address import ChannelAddress\n{BECOME_NOBODY}\nChannelAddress.read({address_file!r}, 'driver')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1
    assert "Permission denied" in done.stderr


@needs_root
def test_a_socket_of_another_user_gets_nothing(tmp_path):
    """If a process of another user serves the socket, the client sends nothing, not even a nonce."""
    script = """
listening = socket.socket(socket.AF_UNIX)
listening.bind(sys.argv[1])
listening.listen()
print("listening", flush=True)
print(repr(listening.accept()[0].recv(100)), flush=True)
"""
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    for folder in (tmp_path, *tmp_path.parents[:-2]):
        folder.chmod(0o755)
    path = str(open_to_all / "s")
    with subprocess.Popen(as_nobody(script, path), stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "listening\n"
        address_file = write_address_file(tmp_path / "address_file", path=path)
        with pytest.raises(ChannelError, match="a process of user 65534 serves .*, not one of user 0"):
            Channel.connect(address_file, "worker")
        assert other.stdout.readline() == "b''\n"


def test_without_the_identity_of_the_peer_the_handshake_decides(tmp_path, monkeypatch, connecting):
    """Where the operating system does not tell a peer's user, such as macOS, both proofs are still required."""
    monkeypatch.delattr(address_module.socket, "SO_PEERCRED")
    with FakeServer(tmp_path) as server:
        result = connecting(server)
        server.challenge()
        (hello,) = server.frames(1)
        assert server.is_proved(hello)
        server.send("WELCOME", body="{}")
        with result():
            pass


def test_the_token_is_not_in_the_description_of_an_address(tmp_path):
    """The token does not appear in a log or a traceback that shows the address."""
    address_file = ChannelAddress.read(write_address_file(tmp_path / "address_file", port=1), "worker")
    assert address_file.token == TOKEN
    assert TOKEN not in repr(address_file)
