"""The loops and executors that coordinators run on."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from typing import Any, Protocol

from stagecrew.coordination.async_calls import AsyncCalls, AsyncExecutor
from stagecrew.coordination.loop import CallsInOrder, Loop

__all__ = ["Owner", "Threads"]


class Owner(Protocol):
    """The operators of a topology, as their coordinators see them."""

    #: The topology's name and its id.
    name: str
    id: str
    #: Shared by the topology's coordinators.
    store: dict[str, Any]

    def fail(self, cause: BaseException) -> None:
        """Fails the topology, because a coordinator failed."""

    def idle(self) -> None:
        """Called when a coordinator has no more calls to make."""


class Threads:
    """Creates the loops and executors that coordinators run on. The test harness has a substitute without threads."""

    def loop(self, name: str, failed: Callable[[BaseException], None], owner: Owner) -> CallsInOrder:
        """Creates a loop on the pool that all coordinators share."""
        return Loop(name, failed, owner.idle, owner.name)

    def async_calls(self, name: str) -> AsyncExecutor:
        """Creates the executor that `call_async` uses."""
        return AsyncCalls()

    def wait(self, futures: Iterable[Future[Any]], seconds: float) -> Collection[Future[Any]]:
        """Waits until all futures are done, one has failed, or the time is up. Returns those that are not done."""
        return concurrent.futures.wait(futures, seconds, concurrent.futures.FIRST_EXCEPTION).not_done
