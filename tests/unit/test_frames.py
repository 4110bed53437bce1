"""The wire format: what is encoded comes back, and nothing else is accepted."""

from __future__ import annotations

import itertools
import struct

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stagecrew import FrameError
from stagecrew.wire.frames import KINDS, LARGE, Decoder, Frame, decode, encode

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
    """Any fields that a frame of this kind may have."""
    return st.fixed_dictionaries({name: VALUES[type_] for name, type_ in KINDS[kind][1]})


frames = st.sampled_from(sorted(KINDS)).flatmap(lambda kind: st.tuples(st.just(kind), fields_of(kind)))


def test_the_table_is_sound():
    """Each kind has its own number of one byte, each field a known type and its own name."""
    numbers = [number for number, _ in KINDS.values()]
    assert len(set(numbers)) == len(numbers)
    for number, fields in KINDS.values():
        assert 0 < number < 256
        assert {type_ for _, type_ in fields} <= set(VALUES)
        assert len({name for name, _ in fields}) == len(fields)


@pytest.mark.parametrize("kind", sorted(KINDS))
@given(data=st.data())
def test_every_kind_comes_back(kind, data):
    """What is encoded is decoded to the same kind and fields, and `length` counts all that follows it."""
    fields = data.draw(fields_of(kind))
    encoded = encode(kind, **fields)
    assert struct.unpack(">I", encoded[:4])[0] == len(encoded) - 4
    frame = decode(encoded[4:])
    assert frame == Frame(kind, fields)
    assert all(frame[name] == value for name, value in fields.items())
    assert decode(memoryview(encoded)[4:]) == frame


@settings(deadline=None)
@given(frame=frames)
def test_every_prefix_is_refused(frame):
    """A frame that is cut anywhere is a `FrameError`, never a shorter frame and never another exception."""
    encoded = encode(frame[0], **frame[1])[4:]
    for end in range(len(encoded)):
        with pytest.raises(FrameError):
            decode(encoded[:end])


@given(frame=frames, rest=st.binary(min_size=1, max_size=9))
def test_bytes_left_over_are_refused(frame, rest):
    """Bytes behind the last field are a `FrameError` that says how many."""
    with pytest.raises(FrameError, match=f"^{len(rest)} bytes are left over after a {frame[0]} frame"):
        decode(encode(frame[0], **frame[1])[4:] + rest)


@given(garbage=st.binary(max_size=60))
@example(b"")
@example(b"\x0f")
@example(b"\x01" + b"\xff" * 40)
@example(b"\x0b\x00\x00\x00\x00\x00\x00\x00\x00\xff\xff\xff\xff")
def test_garbage_is_a_frame_or_a_frame_error(garbage):
    """Any bytes are either exactly one frame, which encodes to the same bytes, or a `FrameError`."""
    try:
        frame = decode(garbage)
    except FrameError:
        return
    assert encode(frame.kind, **frame.fields)[4:] == garbage


@pytest.mark.parametrize("text", [b"\xff", b"\xed\xa0\x80", b"\xc0\x80", b"\xe2\x82"])
def test_text_that_is_not_utf8_is_refused(text):
    """Also lone surrogates and overlong forms, that some writers make."""
    with pytest.raises(FrameError, match="field topology of a CLOSE frame is not UTF-8"):
        decode(b"\x09" + struct.pack(">I", len(text)) + text)


def test_a_count_takes_no_memory():
    """A list that says it has four thousand million items is refused before one is made."""
    body = b"\x0b" + struct.pack(">I", 0) * 2 + b"\xff\xff\xff\xff" + b"\x00" * 4000
    with pytest.raises(FrameError, match="cut short"):
        decode(body)


@given(sent=st.lists(frames, max_size=6), data=st.data())
def test_pieces_of_any_size_are_the_whole(sent, data):
    """Frames come out in order and complete, wherever the stream was cut, and nothing stays behind."""
    stream = b"".join(encode(kind, **fields) for kind, fields in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    decoder = Decoder(LIMIT)
    got = [
        frame
        for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)
        for frame in decoder.feed(stream[start:end])
    ]
    assert got == [Frame(*frame) for frame in sent]
    assert decoder.pending == 0


@settings(deadline=None, max_examples=50)
@given(
    sizes=st.lists(st.sampled_from([0, 1, LARGE - 1, LARGE, LARGE + 1, 3 * LARGE, 2 << 20]), max_size=6),
    pieces=st.lists(st.sampled_from([1, 100, LARGE, 1 << 20]), min_size=1, max_size=9),
)
def test_large_frames(sizes, pieces):
    """Frames of any size come out whole, however they arrive; what is large is not copied, and nothing changes it later."""
    sent = [bytes([number]) * size for number, size in enumerate(sizes)]
    pieces = itertools.cycle([*pieces, LARGE])
    stream = memoryview(b"".join(encode("FROM", executor="1", frames=data) for data in sent))
    decoder, got = Decoder(4 << 20), []
    while stream:
        room = decoder.room()
        size = min(len(room), len(stream), next(pieces))
        room[:size] = stream[:size]
        stream = stream[size:]
        got += decoder.filled(size)
    assert [frame["frames"] == data for frame, data in zip(got, sent, strict=True)] == [True] * len(sent)
    assert [type(frame["frames"]) for frame in got] == [memoryview if len(data) >= LARGE else bytes for data in sent]
    assert decoder.pending == 0
    assert len(decoder.room()) == LARGE  # what was large is given back


def test_a_length_takes_no_memory():
    """A frame that announces its length and never comes takes not much more than has arrived."""
    decoder = Decoder(1 << 30)
    assert list(decoder.feed(struct.pack(">I", 1 << 30))) == []
    assert len(decoder.room()) < 2 << 20


def test_byte_by_byte():
    """The frame comes with its last byte, and `pending` says what is here before."""
    encoded = encode("BEGIN", attempt=-1)
    decoder = Decoder(LIMIT)
    for i, byte in enumerate(encoded[:-1]):
        assert list(decoder.feed(bytes([byte]))) == []
        assert decoder.pending == i + 1
    assert list(decoder.feed(encoded[-1:])) == [Frame("BEGIN", {"attempt": -1})]


def test_the_limit_holds_before_the_bytes_come():
    """A frame of exactly the limit passes; one byte more is refused as soon as its length is here."""
    encoded = encode("CLOSE", topology="x" * 95)
    assert len(encoded) - 4 == 100
    assert len(list(Decoder(100).feed(encoded))) == 1
    with pytest.raises(FrameError, match="a frame of 101 bytes is larger than the 100 bytes allowed"):
        list(Decoder(100).feed(struct.pack(">I", 101)))


def test_a_frame_error_comes_behind_the_good_frames():
    """What arrived whole before the garbage is still delivered."""
    stream = Decoder(LIMIT).feed(encode("OK") + b"\x00\x00\x00\x00")
    assert next(stream) == Frame("OK", {})
    with pytest.raises(FrameError, match="an empty frame"):
        next(stream)


@pytest.mark.parametrize("kind", sorted(kind for kind in KINDS if KINDS[kind][1]))
def test_wrong_fields_are_refused(kind):
    """A field that is missing, superfluous or misspelt is a `FrameError`, with the kind in its text."""
    good = {name: {"q": 1, "s": "", "b": b"", "l": []}[type_] for name, type_ in KINDS[kind][1]}
    first, *others = good
    encode(kind, **good)
    misspelt = {"misspelt": good[first], **{name: good[name] for name in others}}
    for bad in ({name: good[name] for name in others}, {**good, "more": 1}, misspelt):
        with pytest.raises(FrameError, match=kind):
            encode(kind, **bad)
    for name, type_ in KINDS[kind][1]:
        for value in WRONG[type_]:
            with pytest.raises(FrameError, match=kind):
                encode(kind, **{**good, name: value})


def test_an_unknown_kind_is_refused():
    """In both directions, by name and by number."""
    with pytest.raises(FrameError, match="unknown kind of frame 'NOPE'; the known kinds are HELLO"):
        encode("NOPE")
    with pytest.raises(FrameError, match="unknown kind of frame 255"):
        decode(b"\xff")


def test_text_of_every_plane():
    """Also beyond the basic plane, and with a NUL inside."""
    text = "a\0ü€\U0001f680"
    assert decode(encode("CLOSE", topology=text)[4:])["topology"] == text
