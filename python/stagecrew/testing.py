"""Public fakes: functions that use listeners are tested without Spark."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from stagecrew.listeners import Identity, Listener, ListenerContext, opened_value, resolving

__all__ = ["opened"]

_MISSING: Any = object()


@contextlib.contextmanager
def opened(listener: Listener, value: Any = _MISSING) -> Iterator[Any]:
    """Lets `listener.get()` answer in this process, in all its threads.

    With `value`, that is what it answers, and nothing is opened; without, the listener is really opened, and closed at the
    end, as on an executor called `test`.

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
    """
    context = ListenerContext("test", "test", "test", "test", "localhost", listener.scope)
    with contextlib.ExitStack() as stack:
        if value is _MISSING:
            stack.callback(listener.close, context)
            listener.open(context)
            value = opened_value(listener)

        def resolve(identity: Identity) -> Any:
            if identity.same(listener._stagecrew):
                return value
            raise LookupError("stagecrew.testing.opened opened another listener")

        stack.enter_context(resolving(resolve))
        yield value
