"""Resources: listeners that are defined by generator functions.

Every Python worker imports this module, so it uses only the standard library and starts no thread.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Concatenate, Final, Generic, ParamSpec, TypeVar, cast, overload

from stagecrew.errors import ConfigurationError
from stagecrew.listeners.configured_names import note_names
from stagecrew.listeners.identity import Identity
from stagecrew.listeners.listener import Lifetime, Listener, ListenerContext, Scope, listener_name, member
from stagecrew.listeners.resolution import resolve

__all__ = ["Resource", "ResourceFactory", "opened_value", "registering", "resource"]

P = ParamSpec("P")
T = TypeVar("T")

#: True while this thread pickles a listener for its registration. Otherwise a resource is pickled as a bare reference.
_registering: Final = contextvars.ContextVar("stagecrew_registering", default=False)


@contextlib.contextmanager
def registering() -> Iterator[None]:
    """Inside the `with`, resources are pickled with their arguments. Outside, they are pickled as references."""
    token = _registering.set(True)
    try:
        yield
    finally:
        _registering.reset(token)


class Resource(Listener, Generic[T]):
    """A listener that is defined by a generator function, which opens it before the `yield` and closes it after.

    `@stagecrew.resource` creates it, and `get` returns the yielded value. A function that a task runs pickles
    it as a reference, without its arguments.

    Examples:
        >>> import stagecrew
        >>> @stagecrew.resource
        ... def orders(context, dsn):
        ...     yield f"a connection to {dsn}"
        >>> pool = orders("dbname=orders")
        >>> with stagecrew.testing.opened(pool):
        ...     pool.get()
        'a connection to dbname=orders'
    """

    def __init__(self, factory: ResourceFactory[..., T] | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._factory = factory
        self._args, self._kwargs = args, kwargs
        self._entered: contextlib.AbstractContextManager[T] | None = None
        self._value: T | None = None
        if factory is not None:
            self.scope, self.lifetime, self.required = factory.scope, factory.lifetime, factory.required
            self.name = factory.name
            object.__setattr__(self, "_stagecrew", Identity(factory.identity, args, kwargs, factory.function))

    def __reduce_ex__(self, protocol: Any) -> Any:
        note_names(self, self._stagecrew)
        if _registering.get():
            return (_whole_resource, (self._stagecrew, self._factory, self._args, self._kwargs))
        return (_bare_resource, (self._stagecrew.reference(), self.name))

    def __repr__(self) -> str:
        return f"<resource {self.name}>"

    def open(self, context: ListenerContext) -> None:
        """Runs the generator up to its `yield`."""
        if self._factory is None:
            raise ConfigurationError(
                f"this is only a reference to resource {self.name!r}; register the resource itself"
            )
        manager = contextlib.contextmanager(self._factory.function)(context, *self._args, **self._kwargs)
        self._value = manager.__enter__()
        self._entered = manager

    def close(self, context: ListenerContext) -> None:
        """Runs the generator to its end. A generator that raised before its `yield` has already ended."""
        manager, self._entered, self._value = self._entered, None, None
        if manager is not None:
            manager.__exit__(None, None, None)

    def _opened(self) -> T:
        """The yielded value, in the process that opened the resource."""
        return cast(T, self._value)

    def get(self) -> T:  # type: ignore[override]
        """Returns the yielded value. Call it in a task.

        With `Scope.EXECUTOR` it is a pickled copy: yield a port, a URL or a path.

        Returns:
            The yielded value.

        Raises:
            ResourceNotOpen: The task is not running in a topology that has this resource.
        """
        return cast(T, resolve(self._stagecrew, listener_name(self)))


def _whole_resource(identity: Identity, factory: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Resource[Any]:
    self: Resource[Any] = Resource(factory, args, kwargs)
    object.__setattr__(self, "_stagecrew", identity)
    return self


def _bare_resource(identity: Identity, name: str) -> Resource[Any]:
    self: Resource[Any] = Resource(None, (), {})
    self.name = name
    object.__setattr__(self, "_stagecrew", identity)
    return self


class ResourceFactory(Generic[P, T]):
    """The result of `@stagecrew.resource`: call it with arguments to create a listener."""

    def __init__(
        self,
        function: Callable[Concatenate[ListenerContext, P], Iterator[T]],
        scope: Scope,
        lifetime: Lifetime,
        required: bool,
        name: str | None,
    ) -> None:
        self.function = function
        self.scope, self.lifetime, self.required = scope, lifetime, required
        called = getattr(function, "__qualname__", type(function).__qualname__)
        self.name = name or called
        self.identity = f"{function.__module__}:{called}"
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Resource[T]:
        """Returns a listener whose `open` calls the function with these arguments."""
        if (signature := _signature(self.function)) is not None:
            try:
                signature.bind(None, *args, **kwargs)
            except TypeError as error:
                _, *takes = signature.parameters
                raise ConfigurationError(  # without the values: they may be secrets
                    f"resource {self.name!r} cannot be created: {error}. Its arguments: {', '.join(takes) or 'none'}"
                ) from None
        return Resource(self, args, kwargs)

    def __repr__(self) -> str:
        return f"<resource {self.name!r}, not called: call it with its arguments to create a listener>"

    def __reduce__(self) -> Any:
        # Only these parts: because of `__wrapped__`, the function would be pickled twice.
        return (ResourceFactory, (self.function, self.scope, self.lifetime, self.required, self.name))


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    """The parameters of a function, or None if Python cannot determine them."""
    try:
        return inspect.signature(function)
    except (ValueError, TypeError):
        return None


def _is_generator_function(function: Any) -> bool:
    call = getattr(function, "__call__", None)  # noqa: B004
    return any(map(inspect.isgeneratorfunction, (function, inspect.unwrap(function), call)))


@overload
def resource(function: Callable[Concatenate[ListenerContext, P], Iterator[T]], /) -> Callable[P, Resource[T]]: ...


@overload
def resource(
    *, scope: Scope | str = ..., lifetime: Lifetime | str = ..., required: bool = ..., name: str | None = ...
) -> Callable[[Callable[Concatenate[ListenerContext, P], Iterator[T]]], Callable[P, Resource[T]]]: ...


def resource(
    function: Any = None,
    /,
    *,
    scope: Scope | str = Scope.WORKER,
    lifetime: Lifetime | str = Lifetime.APPLICATION,
    required: bool = True,
    name: str | None = None,
) -> Any:
    """Turns a generator function that yields once into a listener.

    The part before the `yield` runs as `Listener.open`, and the part after it as `Listener.close`.

    Args:
        function: The generator function. It takes a `ListenerContext`, and the arguments that create the listener.
        scope: A `Scope`, or its value, such as "executor".
        lifetime: A `Lifetime`, or its value, such as "execution".
        required: Whether a failure to open fails the task; see `Listener`.
        name: The name in reports, logs and the UI; by default the name of the function.

    Returns:
        A callable that takes the function's arguments and returns a `Resource`. It raises `ConfigurationError` for
        arguments that the function does not take.

    Raises:
        ConfigurationError: `scope` or `lifetime` is unknown, or `function` is not a generator function.

    Examples:
        >>> @resource(scope=Scope.WORKER)
        ... def orders_pool(context, dsn):
        ...     pool = {"dsn": dsn, "executor": context.executor}
        ...     yield pool
        ...     pool.clear()
        >>> orders = orders_pool("orders.db")
        >>> orders
        <resource orders_pool>
    """

    def decorator(function: Any) -> Any:
        if not callable(function):
            raise ConfigurationError(f"@resource decorates a generator function, not {function!r}")
        called = getattr(function, "__qualname__", type(function).__qualname__)
        if not _is_generator_function(function):
            raise ConfigurationError(
                f"@resource decorates a generator function, but {called!r} has no yield: open the resource, yield it "
                f"once, then close it"
            )
        if (signature := _signature(function)) is not None and not signature.parameters:
            raise ConfigurationError(f"@resource: the first parameter of {called!r} must be the ListenerContext")
        where = member(Scope, scope, f"scope of resource {called!r},")
        return ResourceFactory(
            function, where, member(Lifetime, lifetime, f"lifetime of resource {called!r},"), required, name
        )

    return decorator if function is None else decorator(function)


def opened_value(listener: Listener) -> Any:
    """The value that `get()` returns for a listener that is open in this process."""
    return listener._opened() if isinstance(listener, Resource) else listener
