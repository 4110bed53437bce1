"""The agent: one process per executor, started when an executor-scoped listener must open there.

It owns these listeners, on its main thread, so that they live as long as the executor, not as long as a worker. When
its executor closes the channel or is gone, or on SIGTERM, it closes its open listeners and ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from types import FrameType
from typing import Any, Final

from stagecrew.errors import ChannelError, ListenerError
from stagecrew.listeners.listener import Listener
from stagecrew.listeners.resource import opened_value, registering
from stagecrew.observability.error_summary import error_text, format_message_first, shorten_error
from stagecrew.wire.channel import Channel
from stagecrew.wire.frames import Frame
from stagecrew.worker import fork_safety
from stagecrew.worker.descriptions import decode_description, lifetime_of
from stagecrew.worker.hooks import ERROR_LENGTH, CalledHooks
from stagecrew.worker.lifecycle import Lifecycle, TopologyDescription
from stagecrew.worker.sampling import FIRST_SAMPLE, Sampler, configured

__all__ = ["Agent", "main"]

#: The room that a frame needs beside the description and the values of a topology, in bytes.
_OVERHEAD: Final = 1 << 16


class _AskedToEnd(BaseException):
    """A signal asked the agent to end.

    It is not an `Exception`, so an `open` that ignores exceptions does not ignore it.
    """


class Agent:
    """Serves its executor until the executor is gone, or until SIGTERM."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._hooks = CalledHooks(channel)
        self._lifecycle = Lifecycle(self._hooks)
        self._ends, self._interruptible = False, True
        #: Whether this is a child that user code forked.
        self._is_forked = False
        self._sampler = Sampler("agent")
        seconds, _ = configured() or (None, "")
        #: The seconds between two samples of this process (None if sampling is off), and the time of the next sample.
        self._interval: float | None = seconds
        self._due = time.monotonic() + min(FIRST_SAMPLE, seconds or 0)
        fork_safety.forget_in_children(self)

    def forked(self) -> None:
        """Called in a child that user code forked. The listeners, the channel and the handler belong to the parent."""
        self._is_forked = True
        fork_safety.default_signals([signal.SIGTERM], self._signalled)
        self._hooks.forked()
        self._lifecycle.disown()
        self._channel.close()

    def run(self) -> None:
        """Runs until the executor has closed the channel, or until SIGTERM. Then closes all listeners."""
        try:
            signal.signal(signal.SIGTERM, self._signalled)
            while not self._ends:
                for frame in self._channel.receive(self._wait()):
                    if not self._ends:
                        self._handle_frame(frame)
        except (ChannelError, _AskedToEnd):
            pass
        finally:
            self._interruptible = False
            self._lifecycle.close_all()
            with contextlib.suppress(ChannelError):
                self._channel.send("GOODBYE", reason="the agent ends")
            self._channel.close()

    def _handle_frame(self, frame: Frame) -> None:
        if frame.kind == "OPEN":
            self._open(frame)
        elif frame.kind == "CLOSE":
            for topology in self._lifecycle.close(frame["topology"]):
                self._channel.send("CLOSED", topology=topology)

    def _wait(self) -> float | None:
        """How long to wait for the executor. Samples this process if a sample is due."""
        if self._interval is None:
            return None
        if (wait := self._due - time.monotonic()) > 0:
            return wait
        sample = None if self._sampler.problem else self._sampler.sample(os.getpid())
        self._channel.write(self._sampler.frame([] if sample is None else [sample]))
        self._due = time.monotonic() + self._interval
        return self._interval

    def _signalled(self, _number: int, _frame: FrameType | None) -> None:
        self._ends = True
        if self._interruptible and not self._lifecycle.closing:  # a close is not interrupted; the agent ends after it
            self._interruptible = False  # only one signal raises
            raise _AskedToEnd

    def _open(self, frame: Frame) -> None:
        """Opens the executor-scoped listeners of one topology, and tells the executor about all of its listeners."""
        blobs: list[bytes] = []
        body: dict[str, Any] = {"listeners": [], "error": None}
        try:
            lifetime = lifetime_of(frame["topology"])

            def add_entry(entry: dict[str, Any]) -> bool:  # returns whether the agent opens this listener
                body["listeners"].append(
                    {"index": entry["index"], "scope": entry["scope"], "lifetime": entry["lifetime"], "value": None}
                )
                return entry["scope"] == "executor" and lifetime in (None, entry["lifetime"])

            topology = decode_description(frame, add_entry)
            for entry, registered in zip(body["listeners"], topology.listeners, strict=True):
                entry["name"] = registered.name
            if any(registered.listener is not None for registered in topology.listeners):
                self._lifecycle.add_topology(topology)
                self._lifecycle.open(topology.id)
                self._values(topology, body, blobs, self._channel.limit - _OVERHEAD - _size(frame))
        except _AskedToEnd:
            raise
        except BaseException as error:  # a listener may call sys.exit
            if self._is_forked and not isinstance(error, Exception):
                raise  # a child that `open` forked ends
            body["error"] = shorten_error(format_message_first(error), ERROR_LENGTH)
            self._lifecycle.close(frame["topology"])
        self._channel.send("OPENED", topology=frame["topology"], body=json.dumps(body), blobs=blobs)

    def _values(self, topology: TopologyDescription, body: dict[str, Any], blobs: list[bytes], room: int) -> None:
        """Adds the pickled values of the open listeners that fit into a frame together.

        A worker gets the values in one frame together with the topology's description.
        """
        for entry, registered in zip(body["listeners"], topology.listeners, strict=True):
            if registered.listener is None:
                continue
            if not self._lifecycle.is_open(topology.id, registered.index):
                entry["problem"] = "its open failed on this executor, and it is not required"
                continue
            try:
                blob = _pickled(registered.listener)
                if len(blob) > room:
                    raise ListenerError(
                        f"its opened value takes {len(blob)} bytes when it is pickled, more than "
                        "spark.stagecrew.channel.maxFrame leaves for it, so workers cannot have a copy; yield a port, "
                        "a URL or a path from a @resource with scope='executor', or raise the setting"
                    )
                room -= len(blob)
                blobs.append(blob)
                entry["value"] = len(blobs) - 1
            except ListenerError as error:
                entry["problem"] = str(error)


def _size(frame: Frame) -> int:
    return len(frame["body"]) + sum(map(len, frame["blobs"]))


def _pickled(listener: Listener) -> bytes:
    from pyspark import cloudpickle

    try:
        with registering():
            return cloudpickle.dumps(opened_value(listener))  # type: ignore[no-any-return, no-untyped-call]
    except Exception as error:
        raise ListenerError(
            f"its opened value cannot be pickled, so workers cannot have a copy ({error_text(error)}); "
            f"yield a port, a URL or a path from a @resource with scope='executor'"
        ) from error


def main(arguments: list[str]) -> None:
    """`python -m stagecrew.worker.agent ADDRESS_FILE [FOLDER ...]`: the channel's file, and folders for `sys.path`."""
    address_file, *folders = arguments
    sys.path[1:1] = folders
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the driver's terminal is for the driver
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    Agent(Channel.connect(address_file, role="agent")).run()


if __name__ == "__main__":
    main(sys.argv[1:])
