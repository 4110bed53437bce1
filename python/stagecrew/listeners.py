"""Lifecycle listeners: user code that is opened before the first task of a topology, closed after the last, and
wrapped around each task.

Loaded in every Python worker: the standard library only, and no thread.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import enum
import functools
import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Concatenate, Final, Generic, ParamSpec, Protocol, TypeVar, cast, overload

from stagecrew.errors import ConfigurationError, ResourceNotOpen
from stagecrew.identity import Identity
from stagecrew.logs import mark

__all__ = ["Lifetime", "Listener", "ListenerContext", "LoggingContext", "Resource", "Scope", "Task", "resource"]

P = ParamSpec("P")
T = TypeVar("T")


class Scope(enum.Enum):
    """Where a listener is opened."""

    WORKER = "worker"
    """Once in each Python worker process, on its main thread. Tasks without Python do not open it."""
    EXECUTOR = "executor"
    """Once on each executor, in a process of its own; tasks without Python open it too."""


class Lifetime(enum.Enum):
    """How long a listener that was registered for the application stays open. Ignored in a named topology."""

    APPLICATION = "application"
    """From the first task to the end of the application."""
    EXECUTION = "execution"
    """Opened and closed once for each root SQL execution, RDD job or streaming query: what Flink calls a job."""


@dataclasses.dataclass(frozen=True)
class ListenerContext:
    """What `open` and `close` are told.

    `configuration` holds the executor's Spark configuration without the keys that `spark.redaction.regex` hides.
    """

    application: str
    topology: str
    topology_id: str
    executor: str
    host: str
    scope: Scope
    configuration: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)


@dataclasses.dataclass(frozen=True)
class Task:
    """What `decorate` is told: one attempt at a Spark task. `attempt` is unique in the application."""

    application: str
    topology: str
    topology_id: str
    executor: str
    stage: int
    stage_attempt: int
    partition: int
    attempt: int
    attempt_number: int


class Resolver(Protocol):
    """Finds what a listener opened; the worker installs one while a task runs, `stagecrew.testing` another."""

    def __call__(self, identity: Identity) -> Any:
        """The opened value. Raises `LookupError` with the place it looked at when there is none."""


_resolvers: Final[list[Resolver]] = []


@contextlib.contextmanager
def resolving(resolver: Resolver) -> Iterator[None]:
    """Lets `get()` find what `resolver` knows, in all threads of this process; the innermost is asked first."""
    _resolvers.append(resolver)
    try:
        yield
    finally:
        _resolvers.remove(resolver)


def _resolve(listener: Listener) -> Any:
    where = "this process runs no task of a topology"
    for resolver in reversed(_resolvers):
        try:
            return resolver(listener._stagecrew)
        except LookupError as error:
            where = str(error.args[0]) if error.args else where
    registered = sorted(set(listener._stagecrew.topologies))
    of = f" It was registered for {' and '.join(registered)}." if registered else " It was registered nowhere."
    raise ResourceNotOpen(
        f"listener {listener_name(listener)!r} is not open here: {where}.{of} Run the action inside "
        f"`with crew.topology(..., listeners=[...])` (a lazy dataset that is run after the `with` is outside), or register "
        f"the listener for the whole application: `stagecrew.configure(builder, listeners=[...])`. A dataset whose stored "
        f"partitions went with its topology is computed again: `topology.keep(dataset)` inside it keeps them."
    )


class Listener:
    """User code with a lifecycle on the executors. Subclass it and override what you need.

    `open` runs before the first task of the topology in its scope; at most once until `close`. If it raises, the task
    fails with that exception, `close` runs once, and a later attempt may open again. `close` runs once if `open` was
    attempted, when the topology has ended and none of its tasks is live here, or when the process ends.
    `close` does **not** run in a process that is killed with SIGKILL, or that sits in C code when it is cancelled: put
    nothing into `close` on which the correctness of results depends.

    `open`, `close` and `decorate` run on the main thread of the process. Listeners open in the order registered, and
    close and un-decorate in reverse.

    Instances are pickled on the driver and may hold secrets: they never appear in a configuration value or a log.

    `required = False`: when `open` raises, the listener is switched off there with a warning, and the task goes on.

    Source: FLINK-14184, which asked for this contract per task manager.
    """

    scope: Scope = Scope.WORKER
    lifetime: Lifetime = Lifetime.APPLICATION
    required: bool = True
    name: str | None = None
    """How reports, logs and the UI call it; the name of the class when None."""

    _stagecrew: Identity

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        self = super().__new__(cls)
        object.__setattr__(self, "_stagecrew", Identity(f"{cls.__module__}:{cls.__qualname__}", args, kwargs))
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        _note_names(self)
        reduced = super().__reduce_ex__(protocol)
        if isinstance(reduced, str):
            return reduced
        make, args, *rest = reduced
        return (_restore, (self._stagecrew, make, args), *rest)

    def open(self, context: ListenerContext) -> None:
        """Called before the first task; what it raises fails the task."""

    def close(self, context: ListenerContext) -> None:
        """Called after the last task, also when `open` raised; what it raises is logged and counted."""

    def decorate(self, task: Task) -> contextlib.AbstractContextManager[Any]:
        """A context manager around one evaluation of a task in one Python process; an attempt may hold several.

        It sees the evaluation's exception or `TaskKilled`.

        What it raises on entry fails the task; what it raises on exit is logged and counted.
        """
        return contextlib.nullcontext()

    def get(self) -> Any:
        """In a task: this listener as it was opened. Raises `ResourceNotOpen` outside its topology.

        In `Scope.EXECUTOR` a pickled copy of it, because the opened one lives in another process.
        """
        return _resolve(self)


def _restore(identity: Identity, make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    self = make(*args)
    object.__setattr__(self, "_stagecrew", identity)
    return self


def _note_names(listener: Listener) -> None:
    """Notes the names of this listener in the configuration; before it is pickled on the driver."""
    for target in _configured():
        module, _, path = target.partition(":")
        found: Any = sys.modules.get(module)
        with contextlib.suppress(Exception):  # a module may compute its attributes
            for part in path.split("."):
                found = getattr(found, part, None)
        if found is listener:
            listener._stagecrew.add_name(target)


#: SparkContext -> the names in its `spark.stagecrew.listeners`.
_names: Final[weakref.WeakKeyDictionary[Any, tuple[str, ...]]] = weakref.WeakKeyDictionary()


def _configured() -> tuple[str, ...]:
    """The names in `spark.stagecrew.listeners` of the session of this process; none in a worker."""
    context = getattr(getattr(sys.modules.get("pyspark"), "SparkContext", None), "_active_spark_context", None)
    if context is None:
        return ()
    names = _names.get(context)
    if names is None:
        names = ()
        with contextlib.suppress(Exception):  # the JVM may be gone
            value = context._conf.get("spark.stagecrew.listeners", "")
            names = tuple(name.strip() for name in value.split(",") if name.strip())
            _names[context] = names
    return names


def listener_name(listener: Listener) -> str:
    """How reports, logs and errors call a listener."""
    return listener.name or type(listener).__qualname__


def decorates(listener: Listener) -> bool:
    """Whether the listener overrides `decorate`; one that does not costs a task nothing."""
    return type(listener).decorate is not Listener.decorate


#: True while a listener is pickled for its registration; else a resource travels as a bare reference. Of this thread
#: alone: another one may pickle a task's function meanwhile.
_registering: Final = contextvars.ContextVar("stagecrew_registering", default=False)


@contextlib.contextmanager
def registering() -> Iterator[None]:
    """Pickles resources whole, with their arguments, inside."""
    token = _registering.set(True)
    try:
        yield
    finally:
        _registering.reset(token)


class Resource(Listener, Generic[T]):
    """A listener made of a generator function: up to `yield` it opens, behind it closes, and `get()` is what it yielded.

    Made by `@stagecrew.resource`, not by hand. In a task's function it travels as a reference without its arguments.
    """

    def __init__(self, factory: ResourceFactory[..., T] | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._factory = factory
        self._args, self._kwargs = args, kwargs
        self._entered: contextlib.AbstractContextManager[T] | None = None
        self._value: T | None = None
        if factory is not None:
            self.scope, self.lifetime, self.required = factory.scope, factory.lifetime, factory.required
            self.name = factory.name
            object.__setattr__(self, "_stagecrew", Identity(factory.identity, args, kwargs))

    def __reduce_ex__(self, protocol: Any) -> Any:
        _note_names(self)
        if _registering.get():
            return (_whole_resource, (self._stagecrew, self._factory, self._args, self._kwargs))
        return (_bare_resource, (self._stagecrew.reference(), self.name))

    def __repr__(self) -> str:
        return f"<resource {self.name}>"

    def open(self, context: ListenerContext) -> None:
        """Runs the generator up to its `yield`."""
        if self._factory is None:
            raise ConfigurationError(f"resource {self.name!r} is only a reference here; register the one that was made")
        manager = contextlib.contextmanager(self._factory.function)(context, *self._args, **self._kwargs)
        self._value = manager.__enter__()
        self._entered = manager

    def close(self, context: ListenerContext) -> None:
        """Runs the generator to its end. A generator that raised before its `yield` has ended already."""
        manager, self._entered, self._value = self._entered, None, None
        if manager is not None:
            manager.__exit__(None, None, None)

    def opened(self) -> T:
        """What was yielded; for the process that opened it."""
        return cast(T, self._value)

    def get(self) -> T:
        """In a task: what the generator yielded. Raises `ResourceNotOpen` outside its topology.

        In `Scope.EXECUTOR` a pickled copy of it: yield a port, a URL or a path.
        """
        return cast(T, _resolve(self))


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
    """What `@stagecrew.resource` makes of a generator function: call it with the arguments to get a listener."""

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
        self.name = name or function.__qualname__
        self.identity = f"{function.__module__}:{function.__qualname__}"
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Resource[T]:
        return Resource(self, args, kwargs)

    def __reduce__(self) -> Any:
        # By its parts: `__wrapped__` and the like would carry the function twice.
        return (ResourceFactory, (self.function, self.scope, self.lifetime, self.required, self.name))


@overload
def resource(function: Callable[Concatenate[ListenerContext, P], Iterator[T]], /) -> Callable[P, Resource[T]]: ...


@overload
def resource(
    *, scope: Scope = ..., lifetime: Lifetime = ..., required: bool = ..., name: str | None = ...
) -> Callable[[Callable[Concatenate[ListenerContext, P], Iterator[T]]], Callable[P, Resource[T]]]: ...


def resource(
    function: Any = None,
    /,
    *,
    scope: Scope = Scope.WORKER,
    lifetime: Lifetime = Lifetime.APPLICATION,
    required: bool = True,
    name: str | None = None,
) -> Any:
    """Makes a listener of a generator function that yields once.

    The function gets a `ListenerContext` and the arguments of the call that made the listener:

    >>> @resource(scope=Scope.WORKER)
    ... def orders_pool(context, dsn):
    ...     pool = {"dsn": dsn, "executor": context.executor}
    ...     yield pool
    ...     pool.clear()
    >>> orders = orders_pool("orders.db")
    >>> orders
    <resource orders_pool>

    What is said of `Listener.open` and `Listener.close` holds for the parts before and behind the `yield`.
    """

    def decorator(function: Any) -> Any:
        if not callable(function):
            raise ConfigurationError(f"@resource decorates a generator function, not {function!r}")
        return ResourceFactory(function, scope, lifetime, required, name)

    return decorator if function is None else decorator(function)


def opened_value(listener: Listener) -> Any:
    """What `get()` answers for a listener that is open in this process."""
    return listener.opened() if isinstance(listener, Resource) else listener


class LoggingContext(Listener):
    """Gives every Python log record of a task the attributes `application`, `topology`, `stage`, `partition` and `attempt`.

    What a log call gives by `extra=` under one of these names stands instead.

    Use them in a format: `logging.Formatter("%(topology)s %(stage)s/%(partition)s %(message)s")`. Records outside of
    a task have none of them, so give the formatter `defaults=` for processes that log both.
    """

    @contextlib.contextmanager
    def decorate(self, task: Task) -> Iterator[None]:
        before = logging.getLogRecordFactory()
        fields = {
            "application": task.application,
            "topology": task.topology,
            "stage": task.stage,
            "partition": task.partition,
            "attempt": task.attempt,
        }

        def record(*args: Any, **kwargs: Any) -> logging.LogRecord:
            made = before(*args, **kwargs)
            mark(made, fields)
            return made

        logging.setLogRecordFactory(record)
        try:
            yield
        finally:
            logging.setLogRecordFactory(before)
