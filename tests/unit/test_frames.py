"""The wire format: frames survive encoding and decoding, and all other bytes are refused."""

from __future__ import annotations

import itertools
import struct

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stagecrew.errors import ChannelError
from stagecrew.wire.frames import KINDS, LARGE, Decoder, Frame, decode, encode, encoded

VALUES = {
    "q": st.integers(-(2**63), 2**63 - 1),
    "s": st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    "b": st.binary(max_size=20),
    "l": st.lists(st.binary(max_size=10), max_size=4),
}
WRONG = {
    "q": [None, "7", 7.5, b"7", 2**63, -(2**63) - 1, [b"7"]],
    "s": [None, 7, b"text", [b"text"], "\ud800", "cut \udfff pair"],
    "b": [None, 7, "text"],
    "l": [None, 7, ["text"], [7]],
}
LIMIT = 1 << 20


def fields_of(kind):
    """Returns a strategy for the fields of a frame of this kind."""
    return st.fixed_dictionaries({name: VALUES[type_] for name, type_ in KINDS[kind][1]})


frames = st.sampled_from(sorted(KINDS)).flatmap(lambda kind: st.tuples(st.just(kind), fields_of(kind)))


def test_the_table_of_kinds_is_consistent():
    """Each kind has a unique number of one byte. Each field has a unique name and a known type."""
    numbers = [number for number, _ in KINDS.values()]
    assert len(set(numbers)) == len(numbers)
    for number, fields in KINDS.values():
        assert 0 < number < 256
        assert {type_ for _, type_ in fields} <= set(VALUES)
        assert len({name for name, _ in fields}) == len(fields)


@pytest.mark.parametrize("kind", sorted(KINDS))
@given(data=st.data())
def test_every_kind_survives_encoding_and_decoding(kind, data):
    """A decoded frame has the kind and fields that were encoded. The length prefix counts all bytes after itself."""
    fields = data.draw(fields_of(kind))
    encoded = encode(kind, **fields)
    assert struct.unpack(">I", encoded[:4])[0] == len(encoded) - 4
    frame = decode(encoded[4:])
    assert frame == Frame(kind, fields)
    assert all(frame[name] == value for name, value in fields.items())
    assert decode(memoryview(encoded)[4:]) == frame


@pytest.mark.parametrize("size", [0, 1, LARGE - 1, LARGE, LARGE + 1])
def test_a_large_last_field_is_not_copied(size):
    """The pieces of a frame are the bytes of `encode`, and a large last field is a piece of its own."""
    payload = bytes(size)
    fields = {"evaluation": -1, "sequence": 2**62, "payload": payload}
    pieces = encoded("REQUEST", **fields)
    assert b"".join(pieces) == encode("REQUEST", **fields)
    assert (pieces[-1] is payload) == (size >= LARGE)


@given(frame=frames)
def test_every_prefix_is_refused(frame):
    """A truncated frame is a `ChannelError`, never a shorter frame and never another exception."""
    encoded = encode(frame[0], **frame[1])[4:]
    for end in range(len(encoded)):
        with pytest.raises(ChannelError):
            decode(encoded[:end])


@given(frame=frames, rest=st.binary(min_size=1, max_size=9))
def test_bytes_after_the_last_field_are_refused(frame, rest):
    """A frame with bytes after its last field raises a ChannelError that says how many bytes these are."""
    with pytest.raises(ChannelError, match=f"^{len(rest)} bytes are left over after a {frame[0]} frame"):
        decode(encode(frame[0], **frame[1])[4:] + rest)


@given(garbage=st.binary(max_size=60))
@example(b"")
@example(b"\x0f")
@example(b"\x01" + b"\xff" * 40)
@example(b"\x0b\x00\x00\x00\x00\x00\x00\x00\x00\xff\xff\xff\xff")
def test_garbage_is_a_frame_or_a_frame_error(garbage):
    """Any bytes are either exactly one frame, which encodes to the same bytes, or a `ChannelError`."""
    try:
        frame = decode(garbage)
    except ChannelError:
        return
    assert encode(frame.kind, **frame.fields)[4:] == garbage


@pytest.mark.parametrize("text", [b"\xff", b"\xed\xa0\x80", b"\xc0\x80", b"\xe2\x82"])
def test_text_that_is_not_utf8_is_refused(text):
    """Text that is not UTF-8 is refused, even lone surrogates and overlong forms, which some encoders produce."""
    with pytest.raises(ChannelError, match="field topology of a CLOSE frame is not UTF-8"):
        decode(b"\x09" + struct.pack(">I", len(text)) + text)


def test_a_large_count_allocates_no_memory():
    """A list that claims 4 billion items is refused before it is created."""
    body = b"\x0b" + struct.pack(">I", 0) * 2 + b"\xff\xff\xff\xff" + b"\x00" * 4000
    with pytest.raises(ChannelError, match="cut short"):
        decode(body)


@given(sent=st.lists(frames, max_size=6), data=st.data())
def test_a_stream_can_be_cut_anywhere(sent, data):
    """Wherever a stream is cut into pieces, all frames are decoded in order, and no bytes remain."""
    stream = b"".join(encode(kind, **fields) for kind, fields in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    decoder = Decoder(LIMIT)
    received = [
        frame
        for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)
        for frame in decoder.feed(stream[start:end])
    ]
    assert received == [Frame(*frame) for frame in sent]
    assert decoder.pending == 0


@settings(max_examples=50)
@given(
    sizes=st.lists(st.sampled_from([0, 1, LARGE - 1, LARGE, LARGE + 1, 3 * LARGE, 2 << 20]), max_size=6),
    pieces=st.lists(st.sampled_from([1, 100, LARGE, 1 << 20]), min_size=1, max_size=9),
)
def test_large_frames_are_not_copied(sizes, pieces):
    """Frames of any size are decoded from pieces of any size. Later data does not overwrite them."""
    sent = [bytes([number]) * size for number, size in enumerate(sizes)]
    pieces = itertools.cycle([*pieces, LARGE])
    stream = memoryview(b"".join(encode("FROM", executor="1", frames=data) for data in sent))
    decoder, received = Decoder(4 << 20), []
    while stream:
        room = decoder.room()
        size = min(len(room), len(stream), next(pieces))
        room[:size] = stream[:size]
        stream = stream[size:]
        received += decoder.filled(size)
    assert [frame["frames"] == data for frame, data in zip(received, sent, strict=True)] == [True] * len(sent)
    assert [type(frame["frames"]) for frame in received] == [
        memoryview if len(data) >= LARGE else bytes for data in sent
    ]
    assert decoder.pending == 0
    assert len(decoder.room()) == LARGE  # the memory of large frames has been released


def test_a_large_length_allocates_no_memory():
    """The decoder allocates little more than the bytes that have arrived."""
    decoder = Decoder(1 << 30)
    assert list(decoder.feed(struct.pack(">I", 1 << 30))) == []
    assert len(decoder.room()) < 2 << 20


def test_a_frame_can_arrive_byte_by_byte():
    """A frame that arrives byte by byte is decoded with its last byte. Until then, `pending` counts its bytes."""
    encoded = encode("BEGIN", attempt=-1)
    decoder = Decoder(LIMIT)
    for i, byte in enumerate(encoded[:-1]):
        assert list(decoder.feed(bytes([byte]))) == []
        assert decoder.pending == i + 1
    assert list(decoder.feed(encoded[-1:])) == [Frame("BEGIN", {"attempt": -1})]


def test_the_limit_is_checked_before_the_bytes_arrive():
    """A frame of exactly the limit is accepted. One byte more is refused as soon as the length has arrived."""
    encoded = encode("CLOSE", topology="x" * 95)
    assert len(encoded) - 4 == 100
    assert len(list(Decoder(100).feed(encoded))) == 1
    with pytest.raises(ChannelError, match="a frame of 101 bytes is larger than the 100 bytes allowed"):
        list(Decoder(100).feed(struct.pack(">I", 101)))


def test_frames_before_garbage_are_decoded():
    """Frames before garbage are decoded, and the ChannelError is raised afterwards."""
    stream = Decoder(LIMIT).feed(encode("OK") + b"\x00\x00\x00\x00")
    assert next(stream) == Frame("OK", {})
    with pytest.raises(ChannelError, match="an empty frame"):
        next(stream)


@pytest.mark.parametrize("kind", sorted(kind for kind in KINDS if KINDS[kind][1]))
def test_wrong_fields_are_refused(kind):
    """A missing, extra or misspelt field, or a wrong value, raises a ChannelError that names the kind."""
    good = {name: {"q": 1, "s": "", "b": b"", "l": []}[type_] for name, type_ in KINDS[kind][1]}
    first, *others = good
    encode(kind, **good)
    misspelt = {"misspelt": good[first], **{name: good[name] for name in others}}
    for bad in ({name: good[name] for name in others}, {**good, "more": 1}, misspelt):
        with pytest.raises(ChannelError, match=kind):
            encode(kind, **bad)
    for name, type_ in KINDS[kind][1]:
        for value in WRONG[type_]:
            with pytest.raises(ChannelError, match=kind):
                encode(kind, **{**good, name: value})


def test_an_unknown_kind_is_refused():
    """An unknown kind is refused. When encoding, the error contains its name; when decoding, its number."""
    with pytest.raises(ChannelError, match="unknown kind of frame 'NOPE'; the known kinds are HELLO"):
        encode("NOPE")
    with pytest.raises(ChannelError, match="unknown kind of frame 255"):
        decode(b"\xff")


def test_text_can_contain_any_character():
    """Text can contain any character, including NUL and characters outside the Basic Multilingual Plane."""
    text = "a\0ü€\U0001f680"
    assert decode(encode("CLOSE", topology=text)[4:])["topology"] == text
