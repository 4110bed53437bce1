"""The wire format of both channels and of the messages between JVMs: one codec.

A frame is `length:u32 | kind:u8 | fields`, big-endian; `length` counts everything after itself. Each kind has a
fixed list of fields, each of one of four types:

    q  signed 64-bit integer            8 bytes
    s  text                             u32 length, UTF-8
    b  bytes, never looked into         u32 length, bytes; large ones are decoded as a `memoryview`
    l  list of bytes                    u32 count, then each as b

The same table stands in `Frames.scala`; a test compares both byte for byte. A frame that is cut short, has bytes left
over, an unknown kind, text that is not UTF-8 or more than `limit` bytes is a `FrameError`: the reader closes the
connection, because after it nothing can be trusted.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator
from typing import Any, Final, TypeAlias

from stagecrew.errors import FrameError

__all__ = ["KINDS", "LARGE", "Decoder", "Field", "Frame", "decode", "decode_all", "encode", "encoded"]

Field: TypeAlias = int | str | bytes | list[bytes]

#: name -> (number, fields). Numbers are never used again.
KINDS: Final[dict[str, tuple[int, tuple[tuple[str, str], ...]]]] = {
    # A Python process and its executor.
    "HELLO": (1, (("token", "s"), ("role", "s"), ("process", "s"), ("pid", "q"), ("version", "s"))),
    "WELCOME": (2, (("body", "s"),)),
    "DESCRIBE": (3, (("topology", "s"),)),
    "DESCRIPTION": (4, (("topology", "s"), ("body", "s"), ("blobs", "l"))),
    "BEGIN": (5, (("attempt", "q"),)),
    "END": (6, (("attempt", "q"),)),
    "HOOK": (7, (("topology", "s"), ("listener", "q"), ("hook", "s"), ("timeout", "q"))),
    "HOOK_DONE": (
        8,
        (
            ("topology", "s"),
            ("listener", "q"),
            ("hook", "s"),
            ("outcome", "s"),
            ("micros", "q"),
            ("error", "s"),
            ("line", "s"),  # the line of the error's text that says what happened
        ),
    ),
    "CLOSE": (9, (("topology", "s"),)),
    "CLOSED": (10, (("topology", "s"),)),
    "OPEN": (11, (("topology", "s"), ("body", "s"), ("blobs", "l"))),
    "OPENED": (12, (("topology", "s"), ("body", "s"), ("blobs", "l"))),
    "GOODBYE": (13, (("reason", "s"),)),
    "REFUSED": (14, (("reason", "s"),)),
    "SAMPLES": (16, (("body", "s"),)),
    "TOPOLOGY": (17, (("topology", "s"), ("body", "s"), ("blobs", "l"), ("opened", "s"), ("values", "l"))),
    # An executor and the driver.
    "ASK_DESCRIPTION": (32, (("executor", "s"), ("host", "s"), ("topology", "s"))),
    "ASK_EXECUTION": (33, (("executor", "s"), ("key", "s"))),
    "EXECUTION": (34, (("topology", "s"),)),
    "OPEN_FAILED": (
        35,
        (
            ("executor", "s"),
            ("topology", "s"),
            ("listener", "s"),
            ("stage", "q"),
            ("partition", "q"),
            ("attempt", "q"),
            ("error", "s"),
        ),
    ),
    "REPORT": (36, (("executor", "s"), ("sequence", "q"), ("body", "s"))),
    "END_TOPOLOGY": (37, (("topology", "s"), ("timeout", "q"), ("body", "s"))),
    "OK": (38, ()),
    "INVENTORY": (39, (("executor", "s"), ("body", "s"))),
    "ORPHANS": (40, (("body", "s"),)),
    "UNPERSISTED": (41, (("topology", "s"), ("body", "s"))),
    # An evaluation in a worker, its executor, and the driver's Python, where its coordinator is.
    "READY": (
        64,
        (
            ("evaluation", "q"),
            ("binding", "s"),
            ("subtask", "q"),
            ("attempt", "q"),
            ("number", "q"),
            ("stage", "q"),
            ("partition", "q"),
            ("stage_attempt", "q"),  # these two by the executor: a Python task knows neither
            ("partitions", "q"),
        ),
    ),
    "EVENTS": (65, (("evaluation", "q"), ("first", "q"), ("payloads", "l"))),
    "REQUEST": (66, (("evaluation", "q"), ("sequence", "q"), ("payload", "b"))),
    "FINISH": (67, (("evaluation", "q"), ("sequence", "q"), ("outcome", "s"), ("reason", "s"))),
    "REPLY": (68, (("evaluation", "q"), ("sequence", "q"), ("outcome", "s"), ("payload", "b"))),
    "HANDLED": (69, (("evaluation", "q"), ("sequence", "q"))),
    "CREDIT_REQUEST": (70, (("evaluation", "q"), ("events", "q"), ("bytes", "q"))),
    "ACCEPTED": (71, (("evaluation", "q"), ("sequence", "q"))),
    "OVERFLOWED": (72, (("evaluation", "q"), ("reason", "s"))),
    "ABORT": (73, (("evaluation", "q"), ("reason", "s"))),
    "ENDED": (74, (("evaluation", "q"), ("outcome", "s"), ("reason", "s"))),
    "CREDIT": (75, (("evaluation", "q"),)),
    "FROM": (96, (("executor", "s"), ("frames", "b"))),
    "TO": (97, (("executor", "s"), ("frames", "b"))),
    "LOST": (98, (("executor", "s"), ("reason", "s"))),
    "READ": (99, (("messages", "q"),)),
    "STATISTICS": (100, (("sequence", "q"), ("body", "s"))),
}

_BY_NUMBER: Final = {number: (name, fields) for name, (number, fields) in KINDS.items()}
_U32: Final = struct.Struct(">I")
_HEAD: Final = struct.Struct(">IB")
_Q: Final = struct.Struct(">q")

#: Bytes of this many and more are not copied out of the frame in which they came: they are a `memoryview` of it.
LARGE: Final = 1 << 16
#: What a decoder has room for, and what it takes at once for a larger frame.
_ROOM: Final = 1 << 16
_AT_ONCE: Final = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """One decoded frame; `frame[name]` is the value of a field."""

    kind: str
    fields: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]


def encode(kind: str, **fields: Field) -> bytes:
    """The bytes of one frame.

    Raises `FrameError` when the kind is unknown, a field is missing or superfluous, or a value has the wrong type.

    >>> encode("BEGIN", attempt=7).hex()
    '00000009050000000000000007'
    """
    return b"".join(encoded(kind, **fields))


def encoded(kind: str, **fields: Field) -> list[bytes]:
    """The same in pieces, so that what is large is not copied where it can be sent as it is."""
    try:
        number, table = KINDS[kind]
    except KeyError:
        raise FrameError(f"unknown kind of frame {kind!r}; known are {', '.join(KINDS)}") from None
    if len(fields) != len(table):
        raise FrameError(f"a {kind} frame has the fields {[name for name, _ in table]}, not {list(fields)}")
    parts: list[bytes] = [b""]
    try:
        for name, type_ in table:
            value = fields[name]
            if type_ == "q":
                parts.append(_Q.pack(value))
            elif type_ == "s":
                data = value.encode("utf-8", "surrogatepass")  # type: ignore[union-attr]
                data.decode("utf-8")
                parts += (_U32.pack(len(data)), data)
            elif type_ == "b":
                parts += (_U32.pack(len(value)), bytes(value))  # type: ignore[arg-type]
            else:
                parts.append(_U32.pack(len(value)))  # type: ignore[arg-type]
                for item in value:  # type: ignore[union-attr]
                    parts += (_U32.pack(len(item)), bytes(item))  # type: ignore[arg-type]
    except (KeyError, AttributeError, TypeError, struct.error, UnicodeError) as error:
        raise FrameError(f"a {kind} frame cannot be made of {sorted(fields)}: {error}") from error
    parts[0] = _HEAD.pack(1 + sum(map(len, parts)), number)
    if len(parts[-1]) < LARGE:
        return [b"".join(parts)]
    return [b"".join(parts[:-1]), parts[-1]]


def decode(frame: bytes | memoryview) -> Frame:
    """The frame that these bytes are: `kind | fields`, without the length in front. Raises `FrameError`."""
    view = memoryview(frame)
    if not view:
        raise FrameError("an empty frame")
    try:
        kind, table = _BY_NUMBER[view[0]]
    except KeyError:
        raise FrameError(f"unknown kind of frame {view[0]}") from None
    at, end = 1, len(view)
    fields: dict[str, Any] = {}

    def chunk() -> memoryview:
        nonlocal at
        start = at + 4
        if start > end:
            raise FrameError(f"a {kind} frame is cut short")
        at = start + _U32.unpack_from(view, at)[0]
        if at > end:
            raise FrameError(f"a {kind} frame is cut short")
        return view[start:at]

    for name, type_ in table:
        if type_ == "q":
            if at + 8 > end:
                raise FrameError(f"a {kind} frame is cut short")
            fields[name] = _Q.unpack_from(view, at)[0]
            at += 8
        elif type_ == "s":
            try:
                fields[name] = str(chunk(), "utf-8")
            except UnicodeDecodeError as error:
                raise FrameError(f"field {name} of a {kind} frame is not UTF-8") from error
        elif type_ == "b":
            data = chunk()
            fields[name] = data if len(data) >= LARGE else bytes(data)
        else:
            if at + 4 > end:
                raise FrameError(f"a {kind} frame is cut short")
            (count,) = _U32.unpack_from(view, at)
            at += 4
            if count * 4 > end - at:
                raise FrameError(f"a {kind} frame is cut short")
            fields[name] = [bytes(chunk()) for _ in range(count)]
    if at != end:
        raise FrameError(f"{end - at} bytes are left over behind a {kind} frame")
    return Frame(kind, fields)


def decode_all(frames: bytes | memoryview) -> Iterator[Frame]:
    """Each of these frames, which lie one behind the other, each with its length in front. Raises `FrameError`.

    >>> [frame["attempt"] for frame in decode_all(encode("BEGIN", attempt=7) + encode("END", attempt=8))]
    [7, 8]
    """
    view, at = memoryview(frames), 0
    while at < len(view):
        start = at + _U32.size
        if start > len(view) or (at := start + _U32.unpack_from(view, at)[0]) > len(view):
            raise FrameError("the last of some frames is cut short")
        yield decode(view[start:at])


class Decoder:
    """Puts frames together from bytes as they arrive, in pieces of any size.

    `limit` is the largest allowed frame in bytes; a longer one is a `FrameError` as soon as its length is known,
    before memory is taken for it, and of a length that is allowed not much more than has arrived.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buffer = bytearray(_ROOM)
        self._begin = self._end = 0  # of what is here

    def room(self) -> memoryview:
        """Where what arrives next may be written; `filled` says then how much it was."""
        return memoryview(self._buffer)[self._end :]

    def filled(self, size: int) -> Iterator[Frame]:
        """So many bytes were written there: yields each frame that is complete now. Raises `FrameError`."""
        self._end += size
        while (frame := self._next()) is not None:
            yield frame

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The same for what arrived elsewhere. Raises `FrameError`."""
        view = memoryview(data)
        while view:
            room = self.room()
            size = min(len(room), len(view))
            room[:size] = view[:size]
            view = view[size:]
            yield from self.filled(size)

    def _next(self) -> Frame | None:
        here = self.pending
        length = _U32.unpack_from(self._buffer, self._begin)[0] if here >= _U32.size else 0
        if length > self._limit:
            raise FrameError(f"a frame of {length} bytes is larger than the {self._limit} bytes allowed")
        whole = _U32.size + length
        if here < whole:
            if not here or self._end == len(self._buffer):
                self._make_room(whole)
            return None
        frame = memoryview(self._buffer)[self._begin + _U32.size : self._begin + whole]
        self._begin += whole
        if length >= LARGE:
            self._make_room(0)  # the frame keeps this buffer
        return decode(frame)

    def _make_room(self, whole: int) -> None:
        """What is here goes to the beginning of a buffer that has room for more, at best for the whole frame."""
        here = self.pending
        if whole <= _ROOM == len(self._buffer):
            self._buffer[:here] = self._buffer[self._begin : self._end]
        else:
            rest = memoryview(self._buffer)[self._begin : self._end]
            self._buffer = bytearray(max(_ROOM, min(whole, max(_AT_ONCE, 4 * here))))
            self._buffer[:here] = rest
        self._begin, self._end = 0, here

    @property
    def pending(self) -> int:
        """How many bytes of an unfinished frame are here."""
        return self._end - self._begin
