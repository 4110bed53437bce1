"""The agent: one process per executor, started when a listener of the executor's scope is to be opened there.

It owns these listeners, on its main thread, so that they live as long as the executor and not as one of its workers. It
ends when its executor says so or is gone, and closes what is open then.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from types import FrameType
from typing import Any

from stagecrew.errors import ChannelError, ListenerError
from stagecrew.listeners.listener import Listener
from stagecrew.listeners.resource import opened_value, registering
from stagecrew.observability.error_summary import format_message_first
from stagecrew.wire.channel import Channel
from stagecrew.wire.frames import Frame
from stagecrew.worker import fork_safety
from stagecrew.worker.descriptions import described
from stagecrew.worker.hooks import CalledHooks
from stagecrew.worker.lifecycle import Described, Lifecycle

__all__ = ["Agent", "main"]


class _AskedToEnd(BaseException):
    """A signal asked the agent to end. No `Exception`: an `open` that goes on after any of these must not go on after it."""


class Agent:
    """Obeys its executor until that is gone, or SIGTERM asks it to end."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._hooks = CalledHooks(channel)
        self._lifecycle = Lifecycle(self._hooks)
        self._ends, self._interruptible = False, True
        fork_safety.forget_in_children(self)

    def forked(self) -> None:
        """In a child that user code forked: everything is the parent's."""
        fork_safety.default_signals([signal.SIGTERM], self._signalled)
        self._hooks.forked()
        self._lifecycle.disown()
        self._channel.close()

    def run(self) -> None:
        """Returns when the executor has closed the channel, or at SIGTERM, with every listener closed."""
        try:
            signal.signal(signal.SIGTERM, self._signalled)
            while not self._ends:
                frame = self._channel.next()
                if frame.kind == "OPEN":
                    self._open(frame)
                elif frame.kind == "CLOSE":
                    for topology in self._lifecycle.close(frame["topology"]):
                        self._channel.send("CLOSED", topology=topology)
        except (ChannelError, _AskedToEnd):
            pass
        finally:
            self._interruptible = False
            self._lifecycle.close_all()
            with contextlib.suppress(ChannelError):
                self._channel.send("GOODBYE", reason="the agent ends")
            self._channel.close()

    def _signalled(self, _number: int, _frame: FrameType | None) -> None:
        self._ends = True
        if self._interruptible and not self._lifecycle.closing:  # a close is not interrupted; then the agent ends
            self._interruptible = False  # once
            raise _AskedToEnd

    def _open(self, frame: Frame) -> None:
        """Opens the executor's listeners of one topology and answers, also for the others, what they are.

        `lifetime` in the request chooses: the application's topology opens those of that lifetime, an execution its own.
        """
        blobs: list[bytes] = []
        body: dict[str, Any] = {"listeners": [], "error": None}
        try:
            lifetime = json.loads(frame["body"]).get("lifetime")

            def mine(entry: dict[str, Any]) -> bool:
                body["listeners"].append(
                    {"index": entry["index"], "scope": entry["scope"], "lifetime": entry["lifetime"], "value": None}
                )
                return entry["scope"] == "executor" and lifetime in (None, entry["lifetime"])

            topology = described(frame, mine)
            for entry, registered in zip(body["listeners"], topology.listeners, strict=True):
                entry["name"] = registered.name
            if any(registered.listener is not None for registered in topology.listeners):
                self._lifecycle.describe(topology)
                self._lifecycle.open(topology.id)
                self._values(topology, body, blobs)
        except Exception as error:
            body["error"] = format_message_first(error)
            self._lifecycle.close(frame["topology"])
        body["open"] = self._lifecycle.anything_open
        self._channel.send("OPENED", topology=frame["topology"], body=json.dumps(body), blobs=blobs)

    def _values(self, topology: Described, body: dict[str, Any], blobs: list[bytes]) -> None:
        for entry, registered in zip(body["listeners"], topology.listeners, strict=True):
            if registered.listener is None:
                continue
            if not self._lifecycle.is_open(topology.id, registered.index):
                entry["problem"] = "its open failed on this executor, and it is not required"
                continue
            try:
                blobs.append(_pickled(registered.listener))
                entry["value"] = len(blobs) - 1
            except ListenerError as error:
                entry["problem"] = str(error)


def _pickled(listener: Listener) -> bytes:
    from pyspark import cloudpickle

    try:
        with registering():
            return cloudpickle.dumps(opened_value(listener))  # type: ignore[no-any-return, no-untyped-call]
    except Exception as error:
        raise ListenerError(
            f"what it opened cannot be pickled, so no worker can have a copy ({type(error).__name__}: {error}); yield a "
            f"port, a URL or a path from a @resource of the executor's scope"
        ) from error


def main(arguments: list[str]) -> None:
    """`python -m stagecrew.worker.agent PLACE [FOLDER ...]`: the executor's place file, and what to put on the path."""
    place, *folders = arguments
    sys.path[1:1] = folders
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the driver's terminal is the driver's
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    Agent(Channel.connect(place, role="agent")).run()


if __name__ == "__main__":
    main(sys.argv[1:])
