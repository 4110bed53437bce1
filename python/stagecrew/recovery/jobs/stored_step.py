"""The stored result of a step or batch, with the states of the coordinators at its end."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping
from typing import Final

from stagecrew.coordination.checkpoints import Checkpoint
from stagecrew.errors import ConfigurationError, RecordUnreadable

__all__ = ["StoredStep", "read_checkpoint"]

_FORMAT: Final = 1


@dataclasses.dataclass(frozen=True)
class StoredStep:
    """A step that has ended. The leader can read it without the job's modules, because the value stays pickled."""

    #: The pickled result.
    value: bytes
    #: The serialized checkpoints, by the key of the topology.
    checkpoints: Mapping[str, bytes]
    #: The id of the streaming query whose batch this is, or None.
    query: str | None

    def to_bytes(self) -> bytes:
        """Serializes the step."""
        sizes = {topology: len(data) for topology, data in self.checkpoints.items()}
        header = {"format": _FORMAT, "query": self.query, "checkpoints": sizes}
        return b"".join((json.dumps(header).encode(), b"\n", *self.checkpoints.values(), self.value))

    @classmethod
    def from_bytes(cls, data: bytes) -> StoredStep:
        """Reads the bytes that `to_bytes` returned. Raises `RecordUnreadable` for other bytes or another format."""
        header, _, body = data.partition(b"\n")
        try:
            found = json.loads(header)
            if found["format"] != _FORMAT:
                raise RecordUnreadable(
                    f"the step has format {found['format']}, but this version of stagecrew reads format {_FORMAT}; "
                    "use the version that wrote it"
                )
            ends = list(itertools.accumulate(found["checkpoints"].values(), initial=0))
            checkpoints = {
                topology: body[start:end]
                for topology, (start, end) in zip(found["checkpoints"], itertools.pairwise(ends), strict=True)
            }
            return cls(body[ends[-1] :], checkpoints, found["query"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RecordUnreadable(f"these {len(data)} bytes are not a stored step: {error}") from error


def read_checkpoint(data: bytes) -> Checkpoint:
    """Reads a checkpoint of a stored step. Raises `RecordUnreadable` if this version cannot read it."""
    try:
        return Checkpoint.from_bytes(data)
    except ConfigurationError as error:
        raise RecordUnreadable(str(error)) from error
