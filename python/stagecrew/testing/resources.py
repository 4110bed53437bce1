"""Opens listeners in this process, for testing functions that use them without Spark."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, Final, TypeVar, overload

from stagecrew.listeners.identity import Identity, RedefinedError, chosen
from stagecrew.listeners.listener import Listener, ListenerContext
from stagecrew.listeners.resolution import resolving
from stagecrew.listeners.resource import Resource, opened_value

__all__ = ["opened"]

L = TypeVar("L", bound=Listener)
T = TypeVar("T")
V = TypeVar("V")

_MISSING: Any = object()


@dataclasses.dataclass(frozen=True, eq=False)  # values may not support ==
class _Opened:
    identity: Identity
    value: Any


_opened: Final[list[_Opened]] = []


@overload
def opened(listener: Resource[T]) -> contextlib.AbstractContextManager[T]: ...  # type: ignore[overload-overlap]


@overload
def opened(listener: L) -> contextlib.AbstractContextManager[L]: ...


@overload
def opened(listener: Listener, value: V) -> contextlib.AbstractContextManager[V]: ...


@contextlib.contextmanager
def opened(listener: Listener, value: Any = _MISSING) -> Iterator[Any]:
    """Makes `listener.get()` return a value in all threads of this process.

    With `value`, `get()` returns this value, and nothing is opened. Without `value`, the listener is really opened, and
    closed at the end, as on an executor whose id is `test`.

    Args:
        listener: The listener, or a resource.
        value: The value for `get()`, such as a fake.

    Yields:
        The value that `get()` returns.

    Raises:
        Exception: The listener's `open` raised it.

    Examples:
        >>> import stagecrew
        >>> @stagecrew.resource()
        ... def orders_pool(context, dsn):
        ...     yield f"connected to {dsn}"
        >>> orders = orders_pool("orders.db")
        >>> with opened(orders, value="a fake"):
        ...     orders.get()
        'a fake'
        >>> with opened(orders):
        ...     orders.get()
        'connected to orders.db'

    Not promised: a copy. In EXECUTOR scope a task gets a pickled copy of the value; here `get()` returns the value
    itself.
    """
    context = ListenerContext("test", "test", "test", "test", "localhost", listener.scope)
    with contextlib.ExitStack() as stack:
        if value is _MISSING:
            stack.callback(listener.close, context)
            listener.open(context)
            value = opened_value(listener)

        entry = _Opened(listener._stagecrew, value)
        _opened.append(entry)
        stack.callback(lambda: _opened.remove(entry))
        stack.enter_context(resolving(_find))
        yield value


def _find(identity: Identity) -> Any:
    with contextlib.suppress(RedefinedError):
        if (one := chosen(identity, _opened[::-1], lambda one: one.identity)) is not None:
            return one.value
    raise LookupError("stagecrew.testing.opened has opened a different listener; open this one, too")
