"""What an event, a request or a reply looks like on its way: one byte that says how, and the bytes.

`bytes` travel untouched; anything else is pickled by cloudpickle, so that what `__main__` defines travels too. Both sides
belong to one application: nothing else is ever unpickled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import traceback
from typing import Any, Final

from pyspark import cloudpickle

from stagecrew.errors import EventNotPicklable, EventTooLarge

__all__ = ["END", "TOGETHER", "WINDOW", "WINDOW_BYTES", "Packed", "failure", "pack", "packed", "raised", "unpack"]

#: How many messages of an evaluation, of how many bytes, may be unhandled by its coordinator: both sides count.
WINDOW: Final = 4096
WINDOW_BYTES: Final = 1 << 23

#: Frames travel together until they have so many bytes: the last may go beyond. Channels bound what they read at once.
TOGETHER: Final = 1 << 20

_RAW: Final = b"\0"
_PICKLED: Final = b"\1"
#: The coordinator closed its stream of events to an evaluation.
END: Final = b"\2"

#: How many characters of a traceback travel.
_TEXT: Final = 20_000

#: Of these and nothing else pickle itself makes the same bytes, in a third of the time.
_PLAIN: Final = frozenset({int, float, str, bool, type(None)})


@dataclasses.dataclass(frozen=True)
class Packed:
    """A reply that many get: packed once, and kept once. Made by `packed`."""

    payload: bytes


def packed(*parts: bytes | memoryview) -> Packed:
    """These bytes, one behind the other."""
    return Packed(b"".join([_RAW, *parts]))


def pack(event: Any, limit: int) -> bytes:
    """The bytes of an event. Raises `EventNotPicklable`, and `EventTooLarge` above so many bytes."""
    if type(event) is bytes:
        packed = _RAW + event
    elif type(event) is Packed:
        packed = event.payload
    else:
        try:
            packed = _PICKLED + (
                pickle.dumps(event, 5) if type(event) in _PLAIN else cloudpickle.dumps(event)  # type: ignore[no-untyped-call]
            )
        except Exception as error:
            raise EventNotPicklable(
                f"a {type(event).__name__} cannot travel between a task and its coordinator ({type(error).__name__}: {error}); "
                f"send what it is made of instead"
            ) from error
    if len(packed) > limit:
        raise EventTooLarge(
            f"a {type(event).__name__} takes {len(packed)} bytes on its way, more than the {limit} of "
            f"spark.stagecrew.event.maxSize; send a reference to where it lies, or raise that"
        )
    return packed


def unpack(payload: bytes | memoryview) -> Any:
    """The event that these bytes are."""
    if payload[:1] == _RAW:
        return bytes(payload[1:])
    return pickle.loads(memoryview(payload)[1:])


def failure(error: BaseException, limit: int) -> bytes:
    """An exception as the reply to a request: itself when it can travel in so many bytes, and its traceback as text."""
    text = "".join(traceback.format_exception(error))
    if len(text) > _TEXT:
        text = f"{text[: _TEXT // 2]}\n[...]\n{text[-_TEXT // 2 :]}"
    with contextlib.suppress(Exception):  # the text does
        data = cloudpickle.dumps((error, text))  # type: ignore[no-untyped-call]
        pickle.loads(data)  # some exceptions can be pickled and not read again
        if len(data) < limit:
            return _PICKLED + bytes(data)
    return _PICKLED + pickle.dumps((None, text), 5)


def raised(payload: bytes | memoryview) -> tuple[BaseException | None, str]:
    """What `failure` was made of."""
    error, text = unpack(payload)
    return error, text
