"""Serialization of events, requests and replies: one byte for the encoding, followed by the data.

`bytes` travel unchanged. All other objects are pickled by cloudpickle, so that classes of `__main__` work. Both sides
belong to one application; no other data is ever unpickled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import traceback
from typing import Any, Final

from pyspark import cloudpickle

from stagecrew.errors import EventRejected
from stagecrew.observability.error_summary import error_text

__all__ = ["END", "TOGETHER", "WINDOW", "WINDOW_BYTES", "Packed", "failure", "pack", "packed", "raised", "unpack"]

#: The maximum number of messages of an evaluation, and of their bytes, that its coordinator has not handled yet. Both
#: sides count them.
WINDOW: Final = 4096
WINDOW_BYTES: Final = 1 << 23

#: Frames are sent together until they exceed this many bytes. Channels limit how much they read at once.
TOGETHER: Final = 1 << 20

_RAW: Final = b"\0"
_PICKLED: Final = b"\1"
#: The end of the coordinator's stream of events to an evaluation.
END: Final = b"\2"

#: The number of characters of a traceback to send.
_MAX_TEXT: Final = 20_000

#: For objects of these types, pickle makes the same bytes as cloudpickle in a third of the time.
_PLAIN: Final = frozenset({int, float, str, bool, type(None)})


@dataclasses.dataclass(frozen=True)
class Packed:
    """A reply for many tasks that is serialized and stored only once. `packed` makes it."""

    payload: bytes


def packed(*parts: bytes | memoryview) -> Packed:
    """Concatenates bytes into a reply."""
    return Packed(b"".join([_RAW, *parts]))


def pack(event: Any, limit: int) -> bytes:
    """Serializes an event. Raises `EventRejected` if it cannot be pickled or takes more than `limit` bytes."""
    if type(event) is bytes:
        packed = _RAW + event
    elif type(event) is Packed:
        packed = event.payload
    else:
        try:
            dumps = pickle.dumps if type(event) in _PLAIN else cloudpickle.dumps
            packed = _PICKLED + dumps(event, 5)
        except Exception as error:
            raise EventRejected(
                f"cannot pickle a {type(event).__name__} to send it between a task and its coordinator "
                f"({error_text(error)}); send plain data instead"
            ) from error
    if len(packed) > limit:
        raise EventRejected(
            f"a {type(event).__name__} takes {len(packed)} bytes when serialized, more than the {limit} bytes of "
            f"spark.stagecrew.event.maxSize; send a reference to the data, or raise that limit"
        )
    return packed


def unpack(payload: bytes | memoryview) -> Any:
    """Deserializes an event."""
    if payload[:1] == _RAW:
        return bytes(payload[1:])
    return pickle.loads(memoryview(payload)[1:])


def failure(error: BaseException, limit: int) -> bytes:
    """Serializes an exception as the reply to a request: its traceback, and the exception itself if it fits."""
    text = "".join(traceback.format_exception(error))
    if len(text) > _MAX_TEXT:
        text = f"{text[: _MAX_TEXT // 2]}\n[...]\n{text[-_MAX_TEXT // 2 :]}"
    with contextlib.suppress(Exception):  # if the exception cannot be pickled, only the text is sent
        pickled = cloudpickle.dumps(error)  # type: ignore[no-untyped-call]
        pickle.loads(pickled)  # some exceptions can be pickled but not unpickled
        data = pickle.dumps((pickled, text), 5)
        if len(data) < limit:
            return _PICKLED + data
    return _PICKLED + pickle.dumps((None, text), 5)


def raised(payload: bytes | memoryview) -> tuple[BaseException | None, str]:
    """Deserializes the result of `failure`: the exception and the traceback.

    The exception is None if it was not sent, or if this process cannot import its class.
    """
    pickled, text = unpack(payload)
    with contextlib.suppress(Exception):
        if pickled is not None:
            return pickle.loads(pickled), text
    return None, text
