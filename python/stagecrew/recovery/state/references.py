"""References: entries of the store whose values refer to states in the storage."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Final

from stagecrew.errors import StateCorrupt, StoreUnsupported
from stagecrew.recovery.state.storage import Reference

__all__ = ["FORMAT", "decode_fields", "decode_reference", "encode_reference"]

#: The format of the values that state handles store.
FORMAT: Final = 1


def encode_reference(reference: Reference, token: str) -> bytes:
    """Encodes a reference as the value of an entry. The token makes the value unique."""
    return json.dumps({"format": FORMAT, "uuid": token, **dataclasses.asdict(reference)}).encode()


def decode_reference(key: str, value: bytes) -> Reference:
    """Decodes the value of an entry. Raises `StateCorrupt`, or `StoreUnsupported` for another format."""
    fields = decode_fields(key, value)
    try:
        reference = Reference(fields["name"], fields["length"], fields["sha256"])
    except KeyError as error:
        raise StateCorrupt(
            f"the value of {key} is not a reference to a state: {error} is missing. Remove the handle, or restore the "
            "store"
        ) from None
    if [type(field) for field in (reference.name, reference.length, reference.sha256)] != [str, int, str]:
        raise StateCorrupt(
            f"the value of {key} is not a reference to a state: {fields}. Remove the handle, or restore the store"
        )
    return reference


def decode_fields(key: str, value: bytes) -> dict[str, Any]:
    """Decodes the fields of a value. Raises `StateCorrupt`, or `StoreUnsupported` for another format."""
    try:
        fields = json.loads(value)
        found = fields["format"]
    except (ValueError, TypeError, KeyError):
        raise StateCorrupt(
            f"the value of {key} was not written by stagecrew: {value[:80]!r}. Check which other program writes to "
            "this store"
        ) from None
    if found != FORMAT:
        raise StoreUnsupported(
            f"the value of {key} has format {found!r}, but this version of stagecrew supports only format {FORMAT}: "
            "use the version that wrote it"
        )
    return dict(fields)
