"""The socket of a channel without Spark: data arrives complete and in order, even if the peer reads slowly."""

from __future__ import annotations

import os
import signal
import socket
import threading

import pytest

from stagecrew.errors import ChannelClosed
from stagecrew.wire.channel import Channel
from stagecrew.wire.frames import encode, encoded


@pytest.fixture
def ends():
    """Two connected channels."""
    one, other = socket.socketpair()
    channels = Channel(one, 8 << 20, 10.0), Channel(other, 8 << 20, 10.0)
    yield channels
    for channel in channels:
        channel.close()


def test_all_pieces_of_a_write_arrive_complete_and_in_order(ends):
    """One call writes many small frames and some larger than the socket's buffers while the peer reads."""
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
    """The error says that the peer no longer reads."""
    one, _ = ends
    slow = Channel(one._socket, 1 << 20, 0.2)
    with pytest.raises(ChannelClosed, match="no longer reads"):
        slow.write(encode("FROM", executor="1", frames=bytes(32 << 20)))


def test_reads_and_writes_fail_at_once_when_the_peer_has_closed(ends):
    """So do writes to a channel that is closed on this side."""
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
    """The process waits for a frame and its signal handler for another. Both receive theirs."""
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
