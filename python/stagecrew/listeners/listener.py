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
import inspect
import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Concatenate, Final, Generic, ParamSpec, Protocol, TypeVar, cast, overload

from stagecrew.errors import ConfigurationError, ResourceNotOpen
from stagecrew.listeners import not_open
from stagecrew.listeners.identity import Identity
from stagecrew.observability.logs import add_fields

__all__ = ["Lifetime", "Listener", "ListenerContext", "LoggingContext", "Resource", "Scope", "Task", "resource"]

#: Local properties: the topology of a task, and topologies that have ended in the thread that ran the action.
PROPERTY: Final = "spark.stagecrew.topology"
LEFT: Final = "spark.stagecrew.left"

P = ParamSpec("P")
T = TypeVar("T")
E = TypeVar("E", bound=enum.Enum)


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


def _member(kind: type[E], value: Any, what: str) -> E:
    """The member of an enumeration that is given as itself or by its value. Raises `ConfigurationError`."""
    try:
        return kind(value)
    except ValueError:
        values = ", ".join(repr(member.value) for member in kind)
        raise ConfigurationError(
            f"{what} {value!r} is none of {values}: write {kind.__name__}.{next(iter(kind)).name} or another member"
        ) from None


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
        """The opened value. Raises `NotRegisteredError`, or a `LookupError` that says why the value is missing."""


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
    identity, name = listener._stagecrew, listener_name(listener)
    refusals: list[LookupError] = []
    for resolver in reversed(_resolvers):
        try:
            return resolver(identity)
        except LookupError as error:
            refusals.append(error)
    innermost = refusals[0] if refusals else None
    if innermost is None or isinstance(innermost, not_open.NotRegisteredError):
        raise ResourceNotOpen(not_open.explained(name, identity.topologies, _task(), innermost))
    raise ResourceNotOpen(f"listener {name!r} is not open here: {innermost}.")


def _task() -> not_open.Task | None:
    """The task that this process runs; None when it runs none."""
    if "pyspark" not in sys.modules:
        return None
    from pyspark import TaskContext

    if (context := TaskContext.get()) is None:
        return None
    left = context.getLocalProperty(LEFT) or ""
    return not_open.Task(context.getLocalProperty(PROPERTY), tuple(left.split()))


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
        object.__setattr__(self, "_stagecrew", Identity(f"{cls.__module__}:{cls.__qualname__}", args, kwargs, cls))
        return self

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, kind in (("scope", Scope), ("lifetime", Lifetime)):
            # A property or a slot belongs to each instance: `normalised` converts it at the registration.
            if name in vars(cls) and not hasattr(type(vars(cls)[name]), "__get__"):
                setattr(cls, name, _member(kind, vars(cls)[name], f"{name} of {cls.__qualname__},"))

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


def normalised(listener: Listener) -> Listener:
    """This listener, whose scope and lifetime are members where it has them by value. Raises `ConfigurationError`."""
    for name, kind in (("scope", Scope), ("lifetime", Lifetime)):
        value = getattr(listener, name)
        if not isinstance(value, kind):
            object.__setattr__(listener, name, _member(kind, value, f"{name} of listener {listener_name(listener)!r},"))
    return listener


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
            object.__setattr__(self, "_stagecrew", Identity(factory.identity, args, kwargs, factory.function))

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
        called = getattr(function, "__qualname__", type(function).__qualname__)
        self.name = name or called
        self.identity = f"{function.__module__}:{called}"
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Resource[T]:
        if (signature := _signature(self.function)) is not None:
            try:
                signature.bind(None, *args, **kwargs)
            except TypeError as error:
                _, *takes = signature.parameters
                raise ConfigurationError(  # without the values: they may be secrets
                    f"resource {self.name!r} cannot be made: {error}. It takes: {', '.join(takes) or 'no arguments'}"
                ) from None
        return Resource(self, args, kwargs)

    def __reduce__(self) -> Any:
        # By its parts: `__wrapped__` and the like would carry the function twice.
        return (ResourceFactory, (self.function, self.scope, self.lifetime, self.required, self.name))


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    """The parameters of a function; None where Python does not know them."""
    try:
        return inspect.signature(function)
    except (ValueError, TypeError):
        return None


def _is_generator_function(function: Any) -> bool:
    return any(
        map(inspect.isgeneratorfunction, (function, inspect.unwrap(function), getattr(function, "__call__", None)))  # noqa: B004
    )


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

    The part before the `yield` runs as `Listener.open` does, and the part after it as `Listener.close` does. `scope` and
    `lifetime` may be given by their values, such as `"executor"`.

    Raises `ConfigurationError` for another scope or lifetime, for a function that is no generator function, and, when the
    resource is called, for arguments that the function does not take.
    """

    def decorator(function: Any) -> Any:
        if not callable(function):
            raise ConfigurationError(f"@resource decorates a generator function, not {function!r}")
        called = getattr(function, "__qualname__", type(function).__qualname__)
        if not _is_generator_function(function):
            raise ConfigurationError(
                f"@resource decorates a generator function, and {called!r} has no yield: open the resource, yield it once, "
                f"then close it"
            )
        if (signature := _signature(function)) is not None and not signature.parameters:
            raise ConfigurationError(f"@resource: the first parameter of {called!r} must be the ListenerContext")
        where = _member(Scope, scope, f"scope of resource {called!r},")
        return ResourceFactory(
            function, where, _member(Lifetime, lifetime, f"lifetime of resource {called!r},"), required, name
        )

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
            add_fields(made, fields)
            return made

        logging.setLogRecordFactory(record)
        try:
            yield
        finally:
            logging.setLogRecordFactory(before)
