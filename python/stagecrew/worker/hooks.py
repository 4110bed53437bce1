"""How user code is called in a worker and in the agent: bounded in time, counted, and told to the executor.

A hook that exceeds its timeout is interrupted by a timer signal, which raises `HookTimeout` in it. The executor is told
before each hook and after, and ends the process when a hook ignores the signal (it sits in C code).
"""

from __future__ import annotations

import contextlib
import logging
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from stagecrew.errors import ChannelError, HookTimeout
from stagecrew.listeners import Listener, ListenerContext, Scope
from stagecrew.worker.channel import Channel
from stagecrew.worker.lifecycle import Described, Leave, Registered

__all__ = ["CalledHooks"]

_log = logging.getLogger("stagecrew")

#: The error text of a hook that is sent to the driver is cut at this many characters.
ERROR_LENGTH = 8000


@contextlib.contextmanager
def _bounded(seconds: float, what: str) -> Iterator[None]:
    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise HookTimeout(f"{what} took longer than {seconds:g} s and was interrupted")

    before = signal.signal(signal.SIGALRM, interrupt)
    remaining, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    started = time.monotonic()
    try:
        yield
    finally:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0)
        finally:  # also when the timer went off in this very moment
            signal.signal(signal.SIGALRM, before)
        if remaining:  # somebody else's timer: it goes on, less the time that the hook took
            signal.setitimer(signal.ITIMER_REAL, max(0.001, remaining - (time.monotonic() - started)), interval)


class CalledHooks:
    """Calls listeners of one process and tells its executor."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        welcome = channel.welcome
        self._open_timeout: float = welcome["openTimeout"]
        self._close_timeout: float = welcome["closeTimeout"]
        #: Set while a listener closes: a signal that asks the process to end then has nothing to add.
        self.closing = False

    def context(self, topology: Described, scope: Scope) -> ListenerContext:
        """What a listener of this topology is told."""
        welcome = self._channel.welcome
        return ListenerContext(
            application=welcome["application"],
            topology=topology.name,
            topology_id=topology.id,
            executor=welcome["executor"],
            host=welcome["host"],
            scope=scope,
            configuration=welcome["configuration"],
        )

    def open(self, topology: Described, registered: Registered) -> None:
        """See `Hooks`."""
        listener = self._listener(registered)
        context = self.context(topology, listener.scope)
        try:
            self._called("open", topology, registered, self._open_timeout, lambda: listener.open(context))
        except BaseException as error:
            error.add_note(f"raised by {self._what('open', topology, registered)}")
            if not registered.required and isinstance(error, Exception):
                _log.warning(
                    "listener %r is switched off here, as it is not required: %s",
                    registered.name,
                    self._what("open", topology, registered),
                    exc_info=True,
                )
            raise

    def close(self, topology: Described, registered: Registered) -> None:
        """See `Hooks`."""
        listener = self._listener(registered)
        context = self.context(topology, listener.scope)
        before, self.closing = self.closing, True
        try:
            self._called("close", topology, registered, self._close_timeout, lambda: listener.close(context))
        except BaseException:
            _log.warning("%s failed", self._what("close", topology, registered), exc_info=True)
        finally:
            self.closing = before

    def enter(self, topology: Described, registered: Registered, task: Any) -> Leave:
        """See `Hooks`."""
        try:
            manager = self._listener(registered).decorate(task)
            manager.__enter__()
        except BaseException as error:
            error.add_note(f"raised by {self._what('decorate', topology, registered)}")
            self._failed_decoration(topology, registered, error)
            raise

        def leave(error: BaseException | None) -> None:
            try:
                if error is None:
                    manager.__exit__(None, None, None)
                else:
                    manager.__exit__(type(error), error, error.__traceback__)
            except BaseException as raised:
                if raised is error:
                    return
                _log.warning("%s failed at its end", self._what("decorate", topology, registered), exc_info=True)
                self._failed_decoration(topology, registered, raised)

        return leave

    def _called(
        self, hook: str, topology: Described, registered: Registered, seconds: float, call: Callable[[], None]
    ) -> None:
        what = self._what(hook, topology, registered)
        self._tell("HOOK", topology=topology.id, listener=registered.index, hook=hook, timeout=int(seconds * 1000))
        started = time.monotonic()
        try:
            with _bounded(seconds, what):
                call()
        except BaseException as error:
            outcome = "timeout" if isinstance(error, HookTimeout) else "failed"
            self._done(hook, topology, registered, outcome, started, error)
            raise
        self._done(hook, topology, registered, "ok", started, None)

    def _done(
        self,
        hook: str,
        topology: Described,
        registered: Registered,
        outcome: str,
        started: float,
        error: BaseException | None,
    ) -> None:
        text = "" if error is None else "".join(traceback.format_exception(error))
        self._tell(
            "HOOK_DONE",
            topology=topology.id,
            listener=registered.index,
            hook=hook,
            outcome=outcome,
            micros=int((time.monotonic() - started) * 1e6),
            error=text[-ERROR_LENGTH:].encode("utf-8", "replace").decode("utf-8"),
        )

    def _failed_decoration(self, topology: Described, registered: Registered, error: BaseException) -> None:
        self._done("decorate", topology, registered, "failed", time.monotonic(), error)

    def _tell(self, kind: str, **fields: Any) -> None:
        # An executor that is gone must not keep a listener from being closed.
        with contextlib.suppress(ChannelError):
            self._channel.send(kind, **fields)

    def _what(self, hook: str, topology: Described, registered: Registered) -> str:
        welcome = self._channel.welcome
        return (
            f"{hook} of listener {registered.name!r} (topology {topology.name!r}, executor {welcome['executor']}, "
            f"host {welcome['host']})"
        )

    @staticmethod
    def _listener(registered: Registered) -> Listener:
        assert registered.listener is not None, "hooks are called in the process that owns the listener"
        return registered.listener
