"""Checks and pickles the listeners that a user registers, and describes topologies to the JVM."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from pyspark import SparkContext, cloudpickle

from stagecrew.errors import ConfigurationError, ListenerError
from stagecrew.listeners.listener import Listener, listener_name, normalised
from stagecrew.listeners.resource import Resource, ResourceFactory, registering
from stagecrew.observability.error_summary import error_text
from stagecrew.partitions.report import Release
from stagecrew.wire.frames import encode

__all__ = ["check_imports", "checked", "class_names", "description_frame", "pickled"]

_log = logging.getLogger("stagecrew")


def checked(listeners: Iterable[Listener]) -> tuple[Listener, ...]:
    """Returns these listeners if they are valid. Otherwise raises an error whose message says what to write instead."""
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
            f"{listener!r} is not a stagecrew.Listener; subclass Listener, or decorate a generator with "
            f"@stagecrew.resource"
        )
    if alone:
        raise ListenerError(
            f"listeners is a single listener, {listener_name(every[0])}; register a list: listeners=[...]"
        )
    return every


def check_imports(targets: str) -> None:
    """Imports the listeners in `spark.stagecrew.listeners`, so that a wrong name raises an error before any task runs.

    A missing top-level module is only a warning, because it may exist only on the executors. Raises `ListenerError` for
    every other error that an executor would raise.
    """
    from stagecrew.worker.descriptions import import_listener

    for target in filter(None, map(str.strip, targets.split(","))):
        module = target.partition(":")[0].partition(".")[0]
        try:
            import_listener(target, "on the driver")
        except ListenerError as error:
            cause = error.__cause__
            if not (isinstance(cause, ModuleNotFoundError) and cause.name == module):
                raise
            _log.warning(
                "%r in spark.stagecrew.listeners needs the module %r, which the driver does not have. The module must "
                "exist on each executor. To ship it, use --py-files",
                target,
                module,
            )


def class_names(names: Iterable[str]) -> tuple[str, ...]:
    """Returns these names of JVM classes if they are a list of strings. Otherwise raises `ConfigurationError`."""
    if isinstance(names, str):
        raise ConfigurationError(f"jvm_listeners={names!r} is a string; write a list: jvm_listeners=[{names!r}]")
    every: tuple[Any, ...] = tuple(names)
    for name in every:
        if not isinstance(name, str):
            raise ConfigurationError(
                f"{name!r} in jvm_listeners is not a class name; write it like 'com.example.Audit'"
            )
    return every


def pickled(listeners: Sequence[Listener]) -> list[bytes]:
    """Pickles each listener. Raises `ListenerError`, which names the listener and the attribute."""
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
                    culprit = f": its {what} is a {type(value).__name__}, which cannot be pickled"
                    break
            raise ListenerError(
                f"listener {listener_name(listener)!r} cannot be pickled{culprit} ({error_text(error)}). "
                f"Create such objects in open(), which runs on the executor"
            ) from error


def description_frame(
    context: SparkContext,
    topology: str,
    name: str,
    parent: str | None,
    listeners: Sequence[Listener],
    jvm_listeners: Sequence[str],
    coordinated: bool = False,
    release: Release = Release.NONE,
    traceparent: str = "",
) -> bytes:
    """Returns the description of a topology, as a frame for the driver and its executors.

    `traceparent` is the context of the topology's span. It is empty if the topology is not traced.
    """
    entries: list[dict[str, Any]] = [
        {
            "kind": "jvm",
            "name": cls.rsplit(".", 1)[-1],
            "target": cls,
            "scope": "jvm",
            "lifetime": "application",
            "required": True,
        }
        for cls in jvm_listeners
    ]
    names = [listener_name(listener) for listener in listeners]
    for i, listener in enumerate(listeners):
        repeated = names[:i].count(names[i])
        entries.append(
            {
                "kind": "pickle",
                "name": f"{names[i]}#{repeated + 1}" if repeated else names[i],
                "scope": listener.scope.value,
                "lifetime": listener.lifetime.value,
                "required": listener.required,
                "blob": i,
            }
        )
    body = {
        "id": topology,
        "name": name,
        "parent": parent,
        "executable": context.pythonExec,
        "environment": {str(key): str(value) for key, value in context.environment.items()},
        "files": list(context._python_includes or ()),
        "listeners": [{"index": i, **entry} for i, entry in enumerate(entries)],
        "coordinated": coordinated,
        "release": release.value,
        "traceparent": traceparent,
    }
    return encode("DESCRIPTION", topology=topology, body=json.dumps(body), blobs=pickled(listeners))
