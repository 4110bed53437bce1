"""The committed byte vectors of the wire format, which the shim's tests read too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stagecrew.wire.frames import KINDS, decode, encode

FILE = Path(__file__).parents[1] / "frames-vectors.json"

#: Values for each type of field: minimal, ordinary, and extreme.
SAMPLES: list[dict[str, Any]] = [
    {"q": 0, "s": "", "b": b"", "l": []},
    {"q": 7, "s": "enrich-0123456789ab", "b": b"\x00\x01\xff", "l": [b"one", b"", b"\x80\x04."]},
    {"q": -(2**63), "s": "\x00 ä€\U0001f600 \"'<>&\n", "b": bytes(range(256)), "l": [bytes(range(256))]},
    {"q": 2**63 - 1, "s": "x" * 700, "b": b"y" * 700, "l": [b""] * 300},
]


def to_json(value: Any) -> Any:
    """Returns a field's value for JSON, with bytes as hexadecimal digits."""
    if isinstance(value, list):
        return [item.hex() for item in value]
    return value.hex() if isinstance(value, bytes) else value


def vectors() -> list[dict[str, Any]]:
    """Returns the vectors: each kind with each sample, with bytes as hexadecimal digits."""
    result = []
    for kind, (_, fields) in KINDS.items():
        # The longest sample is used for one kind only, to keep the file small.
        samples = SAMPLES if kind == "DESCRIPTION" else SAMPLES[: 3 if fields else 1]
        for sample in samples:
            values = {name: sample[type_] for name, type_ in fields}
            json_values = {name: to_json(value) for name, value in values.items()}
            types = "".join(type_ for _, type_ in fields)
            result.append({"kind": kind, "types": types, "fields": json_values, "frame": encode(kind, **values).hex()})
    return result


def text() -> str:
    return "[\n" + ",\n".join(json.dumps(vector) for vector in vectors()) + "\n]\n"


def test_the_committed_vectors_match_encode() -> None:
    """`encode` produces the vectors in the committed file, so a change of the format is visible in its diff."""
    assert FILE.read_text() == text(), f"run `python {Path(__file__).name}` if you meant to change the format"


@pytest.mark.parametrize("vector", vectors(), ids=lambda vector: vector["kind"])
def test_each_vector_decodes_to_its_fields(vector: dict[str, Any]) -> None:
    """Decoding a vector's bytes gives the fields from which they were encoded."""
    frame = decode(bytes.fromhex(vector["frame"])[4:])
    fields = {name: to_json(value) for name, value in frame.fields.items()}
    assert (frame.kind, fields) == (vector["kind"], vector["fields"])


if __name__ == "__main__":
    FILE.write_text(text())
