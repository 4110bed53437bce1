"""What an executor says of a topology, made into listeners: unpickled, or imported by name."""

from __future__ import annotations

import importlib
import json
import pickle
from collections.abc import Callable
from typing import Any

from stagecrew.errors import ListenerError, ListenerNotImportable
from stagecrew.listeners.listener import Listener, listener_name
from stagecrew.listeners.resource import ResourceFactory
from stagecrew.wire.frames import Frame
from stagecrew.worker.lifecycle import Described, Registered

__all__ = ["described", "named"]


def named(target: str, where: str = "on this executor") -> Listener:
    """The listener that `module:name` names. Raises `ListenerNotImportable`, whose message says `where`.

    A name of a `Listener` class or of a resource that needs no arguments is called.
    """
    module, colon, name = target.partition(":")
    if not (module and colon and name):
        raise ListenerNotImportable(f"{target!r} in spark.stagecrew.listeners is not of the form module:name")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        if isinstance(found, ResourceFactory) or (isinstance(found, type) and issubclass(found, Listener)):
            found = found()
    except Exception as error:
        raise ListenerNotImportable(
            f"{target!r} in spark.stagecrew.listeners cannot be imported {where}: {type(error).__name__}: {error}. "
            f"Ship the module to the executors, for example with --py-files."
        ) from error
    if not isinstance(found, Listener):
        raise ListenerNotImportable(
            f"{target!r} in spark.stagecrew.listeners is a {type(found).__name__}, not a stagecrew.Listener"
        )
    return found


def described(frame: Frame, mine: Callable[[dict[str, Any]], bool]) -> Described:
    """The topology of a DESCRIPTION or OPEN frame; `mine` says which listeners are opened in this process."""
    body = json.loads(frame["body"])
    # The agent is also sent those of the JVM, which are open there already.
    python = [entry for entry in body["listeners"] if entry["kind"] != "jvm"]
    registered = [_registered(entry, frame["blobs"], mine) for entry in python]
    return Described(frame["topology"], body["name"], tuple(registered))


def _registered(entry: dict[str, Any], blobs: list[bytes], mine: Callable[[dict[str, Any]], bool]) -> Registered:
    listener = _load(entry, blobs)
    owned = listener if mine({**entry, "scope": listener.scope.value, "lifetime": listener.lifetime.value}) else None
    value = _value(entry, blobs) if owned is None else None
    return Registered(
        index=entry["index"],
        name=entry["name"] or listener_name(listener),
        identity=listener._stagecrew,
        required=listener.required,
        listener=owned,
        value=value,
    )


def _load(entry: dict[str, Any], blobs: list[bytes]) -> Listener:
    if entry["kind"] == "name":
        listener = named(entry["target"])
        listener._stagecrew.add_name(entry["target"])
        return listener
    try:
        return pickle.loads(blobs[entry["blob"]])  # type: ignore[no-any-return]
    except Exception as error:
        raise ListenerError(
            f"listener {entry['name']!r} cannot be unpickled on this executor: {type(error).__name__}: {error}. "
            f"What its class imports must be there; ship modules with --py-files."
        ) from error


def _value(entry: dict[str, Any], blobs: list[bytes]) -> Callable[[], Any]:
    at, problem = entry.get("value"), entry.get("problem")

    def value() -> Any:
        if at is None:
            raise LookupError(problem or "its executor has not opened it")
        return pickle.loads(blobs[at])

    return value
