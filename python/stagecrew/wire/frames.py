"""The wire format of both channels and of the messages between JVMs: one codec.

A frame is `length:u32 | kind:u8 | fields`, big-endian; `length` counts everything after itself. Each kind has a
fixed list of fields, each of one of four types:

    q  signed 64-bit integer            8 bytes
    s  text                             u32 length, UTF-8
    b  bytes, never interpreted         u32 length, bytes; large ones are decoded as a `memoryview`
    l  list of bytes                    u32 count, then each as b

`Frames.scala` has the same table; a test compares both byte for byte. A frame that is cut short, or has bytes left
over, an unknown kind, text that is not UTF-8 or more than `limit` bytes, raises a `ChannelError`. The reader then
closes the connection, because it cannot find the beginning of the next frame.
"""

from __future__ import annotations

import dataclasses
import itertools
import struct
from collections.abc import Iterator
from typing import Any, Final, TypeAlias

from stagecrew.errors import ChannelError

__all__ = ["KINDS", "LARGE", "Decoder", "Field", "Frame", "decode", "decode_all", "encode", "encoded"]

Field: TypeAlias = int | str | bytes | list[bytes]

#: name -> (number, fields). The number of a removed kind is never reused.
KINDS: Final[dict[str, tuple[int, tuple[tuple[str, str], ...]]]] = {
    # A Python process and its executor.
    "HELLO": (1, (("proof", "b"), ("role", "s"), ("process", "s"), ("pid", "q"), ("version", "s"))),
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
    "CONNECT": (18, (("nonce", "b"),)),
    "CHALLENGE": (19, (("nonce", "b"), ("proof", "b"))),
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
    # An evaluation in a worker, its executor, and its coordinator in the driver's Python.
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
            ("stage_attempt", "q"),  # the executor sets these two, which a Python task does not know
            ("partitions", "q"),
        ),
    ),
    "EVENTS": (65, (("evaluation", "q"), ("first", "q"), ("payloads", "l"))),
    "REQUEST": (66, (("evaluation", "q"), ("sequence", "q"), ("payload", "b"))),
    "FINISH": (67, (("evaluation", "q"), ("sequence", "q"), ("outcome", "s"), ("reason", "s"))),
    "REPLY": (68, (("evaluation", "q"), ("sequence", "q"), ("outcome", "s"), ("payload", "b"))),
    "HANDLED": (69, (("evaluation", "q"), ("sequence", "q"))),
    # The task can take this many more of its coordinator's events from the executor.
    "CREDIT": (70, (("evaluation", "q"), ("events", "q"), ("bytes", "q"))),
    "ACCEPTED": (71, (("evaluation", "q"), ("sequence", "q"))),
    "OVERFLOWED": (72, (("evaluation", "q"), ("reason", "s"))),
    "ABORT": (73, (("evaluation", "q"), ("reason", "s"))),
    "ENDED": (74, (("evaluation", "q"), ("outcome", "s"), ("reason", "s"))),
    # The task has no room to send: it asks for a HANDLED frame.
    "ASK_HANDLED": (75, (("evaluation", "q"),)),
    # The coordinator asks the executor for a LIVE frame, if the evaluation has not ended.
    "ASK_LIVE": (76, (("evaluation", "q"),)),
    "LIVE": (77, (("evaluation", "q"),)),
    "FROM": (96, (("executor", "s"), ("frames", "b"))),
    "TO": (97, (("executor", "s"), ("frames", "b"))),
    "LOST": (98, (("executor", "s"), ("reason", "s"))),
    # Where the driver's Python connects directly, if it is on the executor's host.
    "ANNOUNCE": (101, (("executor", "s"), ("address_file", "s"))),
    # The driver's Python does not connect directly now.
    "NO_DIRECT": (102, ()),
    "STATISTICS": (100, (("sequence", "q"), ("body", "s"))),
}

_U32: Final = struct.Struct(">I")
_Q: Final = struct.Struct(">q")


class _Layout:
    """The layout of a kind of frame. The integers before its first other field are packed together with the head."""

    __slots__ = ("body", "fields", "head", "integers", "kind", "number", "others", "size")

    def __init__(self, kind: str, number: int, fields: tuple[tuple[str, str], ...]) -> None:
        self.kind, self.number, self.fields = kind, number, fields
        self.integers = tuple(name for name, _ in itertools.takewhile(lambda field: field[1] == "q", fields))
        self.others = fields[len(self.integers) :]
        #: The length, the kind and the integers.
        self.head = struct.Struct(">IB" + "q" * len(self.integers))
        #: The integers alone.
        self.body = struct.Struct(">" + "q" * len(self.integers))
        #: The size of the kind and the integers.
        self.size = 1 + self.body.size


_LAYOUTS: Final = {kind: _Layout(kind, *described) for kind, described in KINDS.items()}
_BY_NUMBER: Final = {layout.number: layout for layout in _LAYOUTS.values()}
#: A bytes field of this size or more is not copied out of its frame: it is a `memoryview` of it.
LARGE: Final = 1 << 16
#: The size of a decoder's buffer, and the first size of a buffer for a larger frame.
_ROOM: Final = 1 << 16
_FIRST_SIZE: Final = 1 << 20


@dataclasses.dataclass(slots=True)  # not frozen, because that takes a microsecond for each frame
class Frame:
    """One decoded frame; `frame[name]` is the value of a field."""

    kind: str
    fields: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]


def encode(kind: str, **fields: Field) -> bytes:
    """Returns the bytes of one frame.

    Raises `ChannelError` if the kind is unknown, a field is missing or superfluous, or a value has the wrong type.

    >>> encode("BEGIN", attempt=7).hex()
    '00000009050000000000000007'
    """
    return b"".join(_pieces(kind, fields))


def encoded(kind: str, **fields: Field) -> list[bytes]:
    """Like `encode`, but returns pieces, so that a large last field can be sent without copying it."""
    return _pieces(kind, fields)


def _pieces(kind: str, fields: dict[str, Field]) -> list[bytes]:
    layout = _LAYOUTS.get(kind)
    if layout is None:
        raise ChannelError(f"unknown kind of frame {kind!r}; the known kinds are {', '.join(KINDS)}")
    if len(fields) != len(layout.fields):
        raise ChannelError(f"a {kind} frame has the fields {[name for name, _ in layout.fields]}, not {list(fields)}")
    parts: list[bytes] = [b""]
    try:
        for name, type_ in layout.others:
            value = fields[name]
            if type_ == "b":
                parts += (_U32.pack(len(value)), bytes(value))  # type: ignore[arg-type]
            elif type_ == "s":
                data = value.encode()  # type: ignore[union-attr]
                parts += (_U32.pack(len(data)), data)
            elif type_ == "q":
                parts.append(_Q.pack(value))
            else:
                parts.append(_U32.pack(len(value)))  # type: ignore[arg-type]
                for item in value:  # type: ignore[union-attr]
                    parts += (_U32.pack(len(item)), bytes(item))  # type: ignore[arg-type]
        integers = [fields[name] for name in layout.integers]
        parts[0] = layout.head.pack(layout.size + sum(map(len, parts)), layout.number, *integers)
    except (KeyError, AttributeError, TypeError, struct.error, UnicodeError) as error:
        raise ChannelError(f"cannot encode a {kind} frame with the fields {sorted(fields)}: {error}") from error
    if len(parts[-1]) < LARGE:
        return [b"".join(parts)]
    return [b"".join(parts[:-1]), parts[-1]]


def decode(frame: bytes | memoryview) -> Frame:
    """Decodes a frame from `kind | fields`, without its length. Raises `ChannelError`."""
    end = len(frame)
    # A small frame is copied once, so that its fields are slices of bytes.
    data = bytes(frame) if end < LARGE else memoryview(frame)
    if not end:
        raise ChannelError("an empty frame")
    layout = _BY_NUMBER.get(data[0])
    if layout is None:
        raise ChannelError(f"unknown kind of frame {data[0]}")
    if layout.size > end:
        raise _cut_short(layout)
    fields: dict[str, Any] = dict(zip(layout.integers, layout.body.unpack_from(data, 1), strict=True))
    at = layout.size
    for name, type_ in layout.others:
        start = at + (8 if type_ == "q" else 4)
        if start > end:
            raise _cut_short(layout)
        if type_ == "q":
            fields[name] = _Q.unpack_from(data, at)[0]
            at = start
            continue
        (count,) = _U32.unpack_from(data, at)
        if type_ == "l":
            fields[name], at = _items(layout, data, start, end, count)
            continue
        at = start + count
        if at > end:
            raise _cut_short(layout)
        if type_ == "b":
            fields[name] = data[start:at] if count >= LARGE else bytes(data[start:at])
        else:
            try:
                fields[name] = str(data[start:at], "utf-8")
            except UnicodeDecodeError as error:
                raise ChannelError(f"field {name} of a {layout.kind} frame is not UTF-8") from error
    if at != end:
        raise ChannelError(f"{end - at} bytes are left over after a {layout.kind} frame")
    return Frame(layout.kind, fields)


def _items(layout: _Layout, data: bytes | memoryview, at: int, end: int, count: int) -> tuple[list[bytes], int]:
    """Returns the items of a list that begins here, and where it ends."""
    if count * 4 > end - at:
        raise _cut_short(layout)
    items = []
    for _ in range(count):
        start = at + 4
        if start > end:
            raise _cut_short(layout)
        at = start + _U32.unpack_from(data, at)[0]
        if at > end:
            raise _cut_short(layout)
        items.append(bytes(data[start:at]))
    return items, at


def _cut_short(layout: _Layout) -> ChannelError:
    return ChannelError(f"a {layout.kind} frame is cut short")


def decode_all(frames: bytes | memoryview) -> Iterator[Frame]:
    """Decodes consecutive frames with their lengths. Raises `ChannelError`.

    >>> [frame["attempt"] for frame in decode_all(encode("BEGIN", attempt=7) + encode("END", attempt=8))]
    [7, 8]
    """
    view, at = memoryview(frames), 0
    while at < len(view):
        start = at + _U32.size
        if start > len(view) or (at := start + _U32.unpack_from(view, at)[0]) > len(view):
            raise ChannelError("the last frame is cut short")
        yield decode(view[start:at])


class Decoder:
    """Assembles frames from bytes that arrive in pieces of any size.

    `limit` is the largest allowed frame in bytes. A longer frame raises `ChannelError` as soon as its length is known,
    before memory is allocated. For an allowed frame, the buffer is never much larger than the bytes that have arrived.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buffer = bytearray(_ROOM)
        #: The range of unread bytes in the buffer.
        self._begin = self._end = 0

    def room(self) -> memoryview:
        """The free part of the buffer. Write arriving bytes there, then call `filled`."""
        return memoryview(self._buffer)[self._end :]

    def filled(self, size: int) -> Iterator[Frame]:
        """Yields the frames that this number of new bytes in `room` completes. Raises `ChannelError`."""
        self._end += size
        while (frame := self._next()) is not None:
            yield frame

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yields the frames that these bytes complete. Raises `ChannelError`."""
        view = memoryview(data)
        while view:
            room = self.room()
            size = min(len(room), len(view))
            room[:size] = view[:size]
            view = view[size:]
            yield from self.filled(size)

    def _next(self) -> Frame | None:
        begin, here = self._begin, self._end - self._begin
        if here < _U32.size:
            if here or len(self._buffer) != _ROOM:
                self._make_room(_U32.size)
            else:
                self._begin = self._end = 0
            return None
        length = _U32.unpack_from(self._buffer, begin)[0]
        if length > self._limit:
            raise ChannelError(f"a frame of {length} bytes is larger than the {self._limit} bytes allowed")
        whole = _U32.size + length
        if here < whole:
            if self._end == len(self._buffer):
                self._make_room(whole)
            return None
        frame = memoryview(self._buffer)[begin + _U32.size : begin + whole]
        self._begin = begin + whole
        if length >= LARGE:
            self._make_room(0)  # the frame refers to the old buffer
        return decode(frame)

    def _make_room(self, whole: int) -> None:
        """Moves the unread bytes to the beginning of a buffer with more room, if possible for the whole frame."""
        here = self.pending
        if whole <= _ROOM == len(self._buffer):
            self._buffer[:here] = self._buffer[self._begin : self._end]
        else:
            rest = memoryview(self._buffer)[self._begin : self._end]
            self._buffer = bytearray(max(_ROOM, min(whole, max(_FIRST_SIZE, 4 * here))))
            self._buffer[:here] = rest
        self._begin, self._end = 0, here

    @property
    def pending(self) -> int:
        """The number of bytes of an incomplete frame that have arrived."""
        return self._end - self._begin
