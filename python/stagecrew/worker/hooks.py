"""Calls the hooks of listeners in a worker and in the agent, and reports opens, closes and failures to the executor.

`open` and `close` have a timeout. A timer signal interrupts a hook that exceeds its timeout, and raises `HookTimeout`
in it. The executor gets a frame before and after each `open` and `close`. It kills the process if a hook ignores the
signal, for example in C code. A failure of `decorate` is also reported.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import signal
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

from stagecrew.errors import ChannelError, HookTimeout
from stagecrew.listeners.listener import Listener, ListenerContext, Scope
from stagecrew.observability.error_summary import error_line, remove_own_frames, shorten_error, without_surrogates
from stagecrew.wire.channel import Channel
from stagecrew.worker import fork_safety
from stagecrew.worker.lifecycle import Leave, RegisteredListener, TopologyDescription

__all__ = ["CalledHooks"]

_log = logging.getLogger("stagecrew")

#: The maximum length of a hook's error text that is sent to the driver.
ERROR_LENGTH = 8000


class CalledHooks:
    """Calls the listeners of one process, and reports to the executor."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        welcome = channel.welcome
        self._open_timeout: float = welcome["openTimeout"]
        self._close_timeout: float = welcome["closeTimeout"]
        #: The handler of the current hook's timer.
        self._interrupt: Callable[[int, FrameType | None], None] | None = None

    def forked(self) -> None:
        """Called in a child that a hook forked. The timer and its handler belong to the parent."""
        if self._interrupt is not None:
            fork_safety.default_signals([signal.SIGALRM], self._interrupt)

    def context(self, topology: TopologyDescription, scope: Scope) -> ListenerContext:
        """The context of a listener of this topology."""
        welcome = self._channel.welcome
        return ListenerContext(
            application=welcome["application"],
            topology=topology.name,
            topology_id=topology.id,
            executor=welcome["executor"],
            host=welcome["host"],
            scope=scope,
            configuration=welcome["configuration"],
            traceparent=topology.traceparent,
        )

    def open(self, topology: TopologyDescription, registered: RegisteredListener) -> None:
        """See `Hooks`."""
        listener = self._listener(registered)
        context = self.context(topology, listener.scope)
        try:
            self._call_and_report("open", topology, registered, self._open_timeout, lambda: listener.open(context))
        except BaseException as error:
            error.add_note(f"raised by {self._what('open', topology, registered)}")
            if not registered.required and isinstance(error, Exception):
                _log.warning(
                    "listener %r is switched off in this process, because its open failed and it is not required: %s",
                    registered.name,
                    self._what("open", topology, registered),
                    exc_info=True,
                )
            raise

    def close(self, topology: TopologyDescription, registered: RegisteredListener) -> None:
        """See `Hooks`."""
        listener = self._listener(registered)
        context = self.context(topology, listener.scope)
        try:
            self._call_and_report("close", topology, registered, self._close_timeout, lambda: listener.close(context))
        except BaseException:
            _log.warning("%s failed", self._what("close", topology, registered), exc_info=True)

    def enter(self, topology: TopologyDescription, registered: RegisteredListener, task: Any) -> Leave:
        """See `Hooks`."""
        manager: Any = None
        entered: list[Any] = []
        try:
            manager = self._listener(registered).decorate(task)
            # `map`, because after a direct call to C code (such as a lock's `__enter__`) Python could run a signal
            # handler before the entry is recorded.
            entered.extend(map(type(manager).__enter__, (manager,)))
            return functools.partial(self._leave, manager, topology, registered)
        except BaseException as error:
            # A generator that was interrupted after its `yield`, but before its manager returned, counts as entered.
            generator = manager.gen if isinstance(manager, contextlib._GeneratorContextManager) else None
            if entered or getattr(generator, "gi_suspended", False):
                self._leave(manager, topology, registered, error)
            self._failed_decoration(topology, registered, error)  # without the note: the report names the listener
            error.add_note(f"raised by {self._what('decorate', topology, registered)}")
            raise

    def _leave(
        self, manager: Any, topology: TopologyDescription, registered: RegisteredListener, error: BaseException | None
    ) -> None:
        try:
            if error is None:
                manager.__exit__(None, None, None)
            else:
                manager.__exit__(type(error), error, error.__traceback__)
        except BaseException as raised:
            if raised is error:
                return
            _log.warning("%s failed on exit", self._what("decorate", topology, registered), exc_info=True)
            self._failed_decoration(topology, registered, raised)

    def _call_and_report(
        self,
        hook: str,
        topology: TopologyDescription,
        registered: RegisteredListener,
        seconds: float,
        call: Callable[[], None],
    ) -> None:
        what = self._what(hook, topology, registered)
        self._tell("HOOK", topology=topology.id, listener=registered.index, hook=hook, timeout=int(seconds * 1000))
        started = time.monotonic()
        try:
            self._call_with_timeout(seconds, hook, what, call)
        except BaseException as error:
            outcome = "timeout" if isinstance(error, HookTimeout) else "failed"
            self._done(hook, topology, registered, outcome, started, error)
            raise
        self._done(hook, topology, registered, "ok", started, None)

    def _call_with_timeout(self, seconds: float, hook: str, what: str, call: Callable[[], None]) -> None:
        def interrupt(_signal: int, _frame: FrameType | None) -> None:
            raise HookTimeout(
                f"{what} took longer than {seconds:g} s (spark.stagecrew.{hook}.timeout) and was interrupted"
            )

        before = signal.getsignal(signal.SIGALRM)
        remaining = interval = 0.0
        started = time.monotonic()
        self._interrupt = interrupt
        # No context manager: the timer must not outlive its hook, wherever another signal raises an exception.
        try:
            signal.signal(signal.SIGALRM, interrupt)
            remaining, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
            call()
        finally:
            try:
                signal.setitimer(signal.ITIMER_REAL, 0)
            finally:  # even if the timer fires at this moment
                signal.signal(signal.SIGALRM, before)
                self._interrupt = None
            if remaining:  # the user's timer continues, minus the time that the hook took
                signal.setitimer(signal.ITIMER_REAL, max(0.001, remaining - (time.monotonic() - started)), interval)

    def _done(
        self,
        hook: str,
        topology: TopologyDescription,
        registered: RegisteredListener,
        outcome: str,
        started: float,
        error: BaseException | None,
    ) -> None:
        if error is not None:
            remove_own_frames(error)
        text = "" if error is None else "".join(traceback.format_exception(error))
        text = without_surrogates(shorten_error(text, ERROR_LENGTH))
        self._tell(
            "HOOK_DONE",
            topology=topology.id,
            listener=registered.index,
            hook=hook,
            outcome=outcome,
            micros=int((time.monotonic() - started) * 1e6),
            error=text,
            line=error_line(text),
        )

    def _failed_decoration(
        self, topology: TopologyDescription, registered: RegisteredListener, error: BaseException
    ) -> None:
        self._done("decorate", topology, registered, "failed", time.monotonic(), error)

    def _tell(self, kind: str, **fields: Any) -> None:
        # Hooks are called even if the executor is gone.
        with contextlib.suppress(ChannelError):
            self._channel.send(kind, **fields)

    def _what(self, hook: str, topology: TopologyDescription, registered: RegisteredListener) -> str:
        welcome = self._channel.welcome
        return (
            f"{hook} of listener {registered.name!r} (topology {topology.name!r}, executor {welcome['executor']}, "
            f"host {welcome['host']})"
        )

    @staticmethod
    def _listener(registered: RegisteredListener) -> Listener:
        assert registered.listener is not None, "hooks are called in the process that owns the listener"
        return registered.listener
