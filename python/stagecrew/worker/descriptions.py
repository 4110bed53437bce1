"""Creates listeners from an executor's description of a topology: unpickles them, or imports them by name."""

from __future__ import annotations

import importlib
import json
import pickle
from collections.abc import Callable
from typing import Any, Final

from stagecrew.errors import ListenerError
from stagecrew.listeners.listener import Listener, listener_name
from stagecrew.listeners.resource import ResourceFactory
from stagecrew.observability.error_summary import error_text
from stagecrew.wire.frames import Frame
from stagecrew.worker.lifecycle import RegisteredListener, TopologyDescription

__all__ = ["decode_description", "import_listener", "lifetime_of"]

#: The first part of the id of an execution's topology.
EXECUTION: Final = "execution-"


def import_listener(target: str, where: str = "on this executor") -> Listener:
    """Imports the listener that `module:name` names.

    If the name refers to a `Listener` class or a resource, this calls it without arguments.

    Raises:
        ListenerError: The name cannot be imported, or is not a listener. The message says `where`.
    """
    module, colon, name = target.partition(":")
    if not (module and colon and name):
        raise ListenerError(f"{target!r} in spark.stagecrew.listeners is not of the form module:name")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        if isinstance(found, ResourceFactory) or (isinstance(found, type) and issubclass(found, Listener)):
            found = found()
    except Exception as error:
        raise ListenerError(
            f"{target!r} in spark.stagecrew.listeners cannot be imported {where}: {error_text(error)}. "
            f"Check the name. If the module is missing there, add it, for example with --py-files."
        ) from error
    if not isinstance(found, Listener):
        raise ListenerError(
            f"{target!r} in spark.stagecrew.listeners refers to an object of type {type(found).__name__}, not to a "
            f"stagecrew.Listener"
        )
    return found


def decode_description(frame: Frame, mine: Callable[[dict[str, Any]], bool]) -> TopologyDescription:
    """Returns the topology of a TOPOLOGY frame (to a worker) or an OPEN frame (to the agent).

    Args:
        frame: The driver's description. A TOPOLOGY frame also contains the response of the executor's agent.
        mine: Returns whether this process opens a listener. It is called once for each listener, with the listener's
            entry including its scope and its lifetime.
    """
    body = json.loads(frame["body"])
    entries = [entry for entry in body["listeners"] if entry["kind"] != "jvm"]  # the JVM opens these itself
    values: list[bytes] = []
    if frame.kind == "TOPOLOGY":
        entries = _with_opened(entries, frame)
        values = frame["values"]
    registered = [_registered(entry, frame["blobs"], values, mine) for entry in entries]
    return TopologyDescription(frame["topology"], body["name"], tuple(registered), body.get("traceparent") or None)


def lifetime_of(topology: str) -> str | None:
    """Returns the lifetime of the listeners that open in this topology, or None if listeners of any lifetime do."""
    if topology.startswith(EXECUTION):
        return "execution"
    return "application" if topology == "application" else None


def _with_opened(entries: list[dict[str, Any]], frame: Frame) -> list[dict[str, Any]]:
    """The entries that open in this topology, with the values or problems that the agent reported.

    The topology of an execution has all listeners of the application. Only the agent knows the lifetime of a listener
    that is registered by name.
    """
    opened = json.loads(frame["opened"])["listeners"] if frame["opened"] else []
    responses = {entry["index"]: entry for entry in opened}
    wanted = lifetime_of(frame["topology"])
    found = []
    for entry in entries:
        response = responses.get(entry["index"], {})
        lifetime = response.get("lifetime") or entry.get("lifetime") or "application"
        if wanted in (None, lifetime):
            found.append(entry | {"value": response.get("value"), "problem": response.get("problem")})
    return found


def _registered(
    entry: dict[str, Any], blobs: list[bytes], values: list[bytes], mine: Callable[[dict[str, Any]], bool]
) -> RegisteredListener:
    listener = _load(entry, blobs)
    owned = listener if mine({**entry, "scope": listener.scope.value, "lifetime": listener.lifetime.value}) else None
    value = _value(entry, values) if owned is None else None
    return RegisteredListener(
        index=entry["index"],
        name=entry["name"] or listener_name(listener),
        identity=listener._stagecrew,
        required=listener.required,
        listener=owned,
        value=value,
    )


def _load(entry: dict[str, Any], blobs: list[bytes]) -> Listener:
    if entry["kind"] == "name":
        listener = import_listener(entry["target"])
        listener._stagecrew.add_name(entry["target"])
        return listener
    try:
        return pickle.loads(blobs[entry["blob"]])  # type: ignore[no-any-return]
    except Exception as error:
        raise ListenerError(
            f"listener {entry['name']!r} cannot be unpickled on this executor: {error_text(error)}. "
            f"The modules that its class imports must exist there; ship them with --py-files."
        ) from error


def _value(entry: dict[str, Any], values: list[bytes]) -> Callable[[], Any]:
    at, problem = entry.get("value"), entry.get("problem")

    def value() -> Any:
        if at is None:
            raise LookupError(problem or "its executor has not opened it")
        return pickle.loads(values[at])

    return value
