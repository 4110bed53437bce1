"""The socket of a channel without Spark: what is written arrives whole and in order, also where the other end is slow."""

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
    """Two channels that are connected to each other."""
    one, other = socket.socketpair()
    channels = Channel(one, 8 << 20, 10.0), Channel(other, 8 << 20, 10.0)
    yield channels
    for channel in channels:
        channel.close()


def test_pieces_arrive_whole(ends):
    """Many small frames and some that are larger than the socket's buffers, written in one call, while another reads."""
    one, other = ends
    sent = [os.urandom(size) for size in [10] * 1500 + [3 << 20, 5, 1 << 20, 7]]
    pieces = [piece for data in sent for piece in encoded("FROM", executor="1", frames=data)]
    writer = threading.Thread(target=one.write, args=pieces)
    writer.start()
    got = [other.next()["frames"] for _ in sent]
    writer.join(10)
    assert not writer.is_alive()
    assert all(data == back for data, back in zip(sent, got, strict=True))
    assert other.arrived() == []


def test_nobody_reads(ends):
    """A write that finds no room is an error when the time is over."""
    one, _ = ends
    slow = Channel(one._socket, 1 << 20, 0.2)
    with pytest.raises(ChannelClosed, match="no longer reads"):
        slow.write(encode("FROM", executor="1", frames=bytes(32 << 20)))


def test_the_other_end_is_gone(ends):
    """Both a read and a write say so; nothing waits."""
    one, other = ends
    other.close()
    with pytest.raises(ChannelClosed):
        one.arrived()
    with pytest.raises(ChannelClosed):
        one.write(b"x", b"y")
    one.close()
    with pytest.raises(ChannelClosed):
        one.write(b"x")


def test_a_signal_s_handler_reads(ends):
    """While the process waits for a frame, a handler may wait for another: both get theirs."""
    one, other = ends
    heard, done = [], threading.Event()

    def handler(*_):
        heard.append(one.wait_for("CLOSED"))
        done.set()

    def rings():
        os.kill(os.getpid(), signal.SIGUSR1)
        other.write(encode("CLOSED", topology="t"))
        done.wait(10)
        other.write(encode("CLOSE", topology="t"))

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        thread = threading.Timer(0.2, rings)
        thread.start()
        assert one.next().kind == "CLOSE"
        thread.join(10)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert [frame.kind for frame in heard] == ["CLOSED"]
