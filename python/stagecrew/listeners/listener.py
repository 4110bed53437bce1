"""Lifecycle listeners: code that opens before a topology's first task, closes after its last, and decorates each task.

Every Python worker imports this module, so it uses only the standard library and starts no thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import Any, Self, TypeVar, cast

from stagecrew.errors import ConfigurationError
from stagecrew.listeners.configured_names import note_names
from stagecrew.listeners.identity import Identity
from stagecrew.listeners.resolution import resolve

__all__ = [
    "Lifetime",
    "Listener",
    "ListenerContext",
    "Scope",
    "Task",
    "decorates",
    "listener_name",
    "member",
    "normalised",
]

E = TypeVar("E", bound=enum.Enum)


class Scope(enum.Enum):
    """Where a listener opens.

    Examples:
        >>> import stagecrew
        >>> stagecrew.Scope("executor")
        <Scope.EXECUTOR: 'executor'>
    """

    WORKER = "worker"
    """Once in each Python worker, on its main thread. Tasks without Python do not open it."""
    EXECUTOR = "executor"
    """Once on each executor, in its own process. Tasks without Python also open it."""


class Lifetime(enum.Enum):
    """How long a listener of the application stays open. Ignored for listeners of a named topology.

    Examples:
        >>> import stagecrew
        >>> class PerExecution(stagecrew.Listener):
        ...     lifetime = stagecrew.Lifetime.EXECUTION
    """

    APPLICATION = "application"
    """From the first task to the end of the application."""
    EXECUTION = "execution"
    """Once for each root SQL execution, RDD job or streaming query, which Flink calls a job."""


def member(kind: type[E], value: Any, what: str) -> E:
    """Returns the member of an enumeration for a member or its value. Raises `ConfigurationError` for anything else."""
    try:
        return kind(value)
    except ValueError:
        values = ", ".join(repr(member.value) for member in kind)
        raise ConfigurationError(
            f"{what} {value!r} is none of {values}: write {kind.__name__}.{next(iter(kind)).name} or another member"
        ) from None


@dataclasses.dataclass(frozen=True)
class ListenerContext:
    """The argument of `open` and `close`.

    `configuration` contains the executor's Spark configuration, without the keys that `spark.redaction.regex` hides.
    `traceparent` is the trace context of the topology's span, as in the W3C header of this name. It is None without
    `spark.stagecrew.tracing`.

    Examples:
        >>> import stagecrew
        >>> context = stagecrew.ListenerContext(
        ...     application="app-1", topology="enrich", topology_id="enrich-1", executor="2", host="worker-7",
        ...     scope=stagecrew.Scope.WORKER, configuration={"spark.orders.dsn": "dbname=orders"},
        ... )
        >>> context.configuration["spark.orders.dsn"]
        'dbname=orders'
    """

    application: str
    topology: str
    topology_id: str
    executor: str
    host: str
    scope: Scope
    configuration: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)
    traceparent: str | None = None


@dataclasses.dataclass(frozen=True)
class Task:
    """The argument of `decorate`: one attempt at a Spark task. `attempt` is unique in the application.

    `traceparent` is the trace context of the task's span, as in the W3C header of this name. It is None without
    `spark.stagecrew.tracing`.

    Examples:
        >>> import stagecrew
        >>> task = stagecrew.Task(
        ...     application="app-1", topology="enrich", topology_id="enrich-1", executor="2", stage=3, stage_attempt=0,
        ...     partition=5, attempt=41, attempt_number=1,
        ... )
        >>> f"partition {task.partition}, attempt {task.attempt_number}"
        'partition 5, attempt 1'
    """

    application: str
    topology: str
    topology_id: str
    executor: str
    stage: int
    stage_attempt: int
    partition: int
    attempt: int
    attempt_number: int
    traceparent: str | None = None


class Listener:
    """User code with a lifecycle on the executors. Subclass it, and override the methods that you need.

    `open` runs before the first task of the topology in the listener's scope, at most once until `close`. If it
    raises, the task fails with that exception, `close` runs once, and a later attempt may open the listener again.
    `close` runs once for each attempt to open, when the topology has ended and none of its tasks is live in this
    process, or when the process ends.

    `open`, `close` and `decorate` run on the main thread of the process. Listeners open in the order in which they
    are registered, and close and leave `decorate` in reverse order.

    Instances are pickled on the driver and may contain secrets: they never appear in a configuration value or a log.

    With `required = False`, a failing `open` does not fail the task. The listener is switched off in this process, and
    a warning is logged.

    Examples:
        class OrdersPool(stagecrew.Listener):
            def __init__(self, dsn):
                self.dsn = dsn

            def open(self, context):
                self.pool = ConnectionPool(self.dsn)

            def close(self, context):
                self.pool.close()

    Not promised: that `close` runs in a process that is killed with SIGKILL, or that is running C code when its task is
    killed. The correctness of results must not depend on `close`.

    Source: FLINK-14184, which asks for this contract per task manager.
    """

    scope: Scope = Scope.WORKER
    lifetime: Lifetime = Lifetime.APPLICATION
    required: bool = True
    name: str | None = None
    """Its name in reports, logs and the UI; the name of the class if None."""

    _stagecrew: Identity

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Records the class and the arguments, which identify the listener in other processes."""
        self = super().__new__(cls)
        object.__setattr__(self, "_stagecrew", Identity(f"{cls.__module__}:{cls.__qualname__}", args, kwargs, cls))
        return self

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, kind in (("scope", Scope), ("lifetime", Lifetime)):
            # A property or a slot belongs to each instance: `normalised` converts it at registration.
            if name in vars(cls) and not hasattr(type(vars(cls)[name]), "__get__"):
                setattr(cls, name, member(kind, vars(cls)[name], f"{name} of {cls.__qualname__},"))

    def __reduce_ex__(self, protocol: Any) -> Any:
        note_names(self, self._stagecrew)
        reduced = super().__reduce_ex__(protocol)
        if isinstance(reduced, str):
            return reduced
        make, args, *rest = reduced
        return (_restore, (self._stagecrew, make, args), *rest)

    def open(self, context: ListenerContext) -> None:
        """Called before the first task. An exception fails the task.

        Args:
            context: The process, the topology and the configuration.
        """

    def close(self, context: ListenerContext) -> None:
        """Called after the last task, even if `open` raised. An exception is logged and counted.

        Args:
            context: The process, the topology and the configuration.
        """

    def decorate(self, task: Task) -> contextlib.AbstractContextManager[Any]:
        """Returns a context manager around one evaluation of a task in one Python process. An attempt may have several.

        The context manager sees the evaluation's exception, or `TaskKilled`. An exception on entry fails the task. An
        exception on exit is logged and counted. With `Scope.EXECUTOR`, stagecrew does not call `decorate`, because no
        task runs in the listener's process.

        Args:
            task: The attempt.

        Returns:
            The context manager.
        """
        return contextlib.nullcontext()

    def get(self) -> Self:
        """Returns the open listener. Call it in a task.

        With `Scope.EXECUTOR` it is a pickled copy, because the listener is open in another process.

        Returns:
            The open listener.

        Raises:
            ResourceNotOpen: The task is not running in a topology that has this listener.
        """
        return cast("Self", resolve(self._stagecrew, listener_name(self)))


def _restore(identity: Identity, make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    self = make(*args)
    object.__setattr__(self, "_stagecrew", identity)
    return self


def listener_name(listener: Listener) -> str:
    """The name of a listener in reports, logs and errors."""
    return listener.name or type(listener).__qualname__


def normalised(listener: Listener) -> Listener:
    """Converts the values of scope and lifetime to members of their enumerations. Raises `ConfigurationError`."""
    for name, kind in (("scope", Scope), ("lifetime", Lifetime)):
        value = getattr(listener, name)
        if not isinstance(value, kind):
            object.__setattr__(listener, name, member(kind, value, f"{name} of listener {listener_name(listener)!r},"))
    return listener


def decorates(listener: Listener) -> bool:
    """Whether the listener overrides `decorate`. If it does not, it adds no cost to a task."""
    return type(listener).decorate is not Listener.decorate
