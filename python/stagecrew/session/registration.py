"""Checks what a user registers (listeners and names of JVM classes) before anything begins, and pickles listeners."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from pyspark import cloudpickle

from stagecrew.errors import ConfigurationError, ListenerError, ListenerNotImportable, ListenerNotPicklable
from stagecrew.listeners.listener import Listener, Resource, ResourceFactory, listener_name, normalised, registering

__all__ = ["checked", "class_names", "import_named", "pickled"]

_log = logging.getLogger("stagecrew")


def checked(listeners: Iterable[Listener]) -> tuple[Listener, ...]:
    """Returns these listeners after a check.

    Raises:
        ListenerError: One of them is no listener. The message says what to write instead.
        ConfigurationError: A listener has an attribute that is wrong.
    """
    given: Any = listeners
    if isinstance(given, str):
        raise ListenerError(
            f"listeners={given!r} is a string; register instances: listeners=[...]. Names of the form module:name go "
            f"into spark.stagecrew.listeners"
        )
    alone = isinstance(given, (Listener, ResourceFactory, type))
    every: tuple[Any, ...] = (given,) if alone else tuple(given)
    for listener in every:
        if isinstance(listener, Listener):
            normalised(listener)
            continue
        if inspect.isclass(listener) and issubclass(listener, Listener):
            raise ListenerError(
                f"{listener.__qualname__} is a class; register an instance: listeners=[{listener.__qualname__}(...)]"
            )
        if isinstance(listener, ResourceFactory):
            raise ListenerError(
                f"{listener.name} is a resource that was not called; register listeners=[{listener.name}(...)]"
            )
        raise ListenerError(
            f"{listener!r} is no stagecrew.Listener; subclass Listener or decorate a generator with @stagecrew.resource"
        )
    if alone:
        raise ListenerError(f"{listener_name(every[0])} is not in a list; register a list: listeners=[...]")
    return every


def import_named(targets: str) -> None:
    """Imports the listeners that a value of `spark.stagecrew.listeners` names: a wrong name fails before any task.

    A missing top-level module is a warning, because it may exist on the executors only.

    Raises:
        ListenerNotImportable: An executor would refuse a name for another reason.
    """
    from stagecrew.worker.descriptions import named

    for target in filter(None, map(str.strip, targets.split(","))):
        module = target.partition(":")[0].partition(".")[0]
        try:
            named(target, "on the driver")
        except ListenerNotImportable as error:
            cause = error.__cause__
            if not (isinstance(cause, ModuleNotFoundError) and cause.name == module):
                raise
            _log.warning(
                "the driver has no module %r, of %r in spark.stagecrew.listeners: it must exist on each executor. To ship it, "
                "use --py-files",
                module,
                target,
            )


def class_names(names: Iterable[str]) -> tuple[str, ...]:
    """Returns these names of JVM classes after a check.

    Raises:
        ConfigurationError: They are not a list of strings.
    """
    if isinstance(names, str):
        raise ConfigurationError(f"jvm_listeners={names!r} is a string; write a list: jvm_listeners=[{names!r}]")
    every: tuple[Any, ...] = tuple(names)
    for name in every:
        if not isinstance(name, str):
            raise ConfigurationError(
                f"{name!r} in jvm_listeners is no name of a class; write it like 'com.example.Audit'"
            )
    return every


def pickled(listeners: Sequence[Listener]) -> list[bytes]:
    """Pickles each listener.

    Raises:
        ListenerNotPicklable: A listener cannot be pickled. The message names the listener and the attribute.
    """
    return [_pickled(listener) for listener in listeners]


def _pickled(listener: Listener) -> bytes:
    with registering():
        try:
            return cloudpickle.dumps(listener)  # type: ignore[no-any-return, no-untyped-call]
        except Exception as error:
            parts = dict(vars(listener))
            if isinstance(listener, Resource):
                parts = {f"argument {i + 1}": value for i, value in enumerate(listener._args)}
                parts |= {f"argument {name!r}": value for name, value in listener._kwargs.items()}
            culprit = ""
            for name, value in parts.items():
                try:
                    cloudpickle.dumps(value)  # type: ignore[no-untyped-call]
                except Exception:
                    what = name if isinstance(listener, Resource) else f"attribute {name!r}"
                    culprit = f": its {what} is a {type(value).__name__}, which cannot travel"
                    break
            raise ListenerNotPicklable(
                f"listener {listener_name(listener)!r} cannot be pickled{culprit} ({type(error).__name__}: {error}). Create "
                f"such things in open(), which runs on the executor"
            ) from error
