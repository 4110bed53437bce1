"""The messages between the tasks of supersteps and their coordinator. Large values are sent in pieces."""

from __future__ import annotations

import contextlib
import pickle
from typing import Any, Final

__all__ = ["IN_PIECES", "PIECE", "WHOLE", "limited_piece", "pickled", "split_into_pieces"]

#: The maximum number of bytes in one piece, unless `spark.stagecrew.event.maxSize` is smaller.
PIECE: Final = 4 << 20
#: A piece is at least this many bytes smaller than `spark.stagecrew.event.maxSize`, to leave space for its frame.
_OVERHEAD: Final = 64
#: The first bytes of a reply. They tell whether the reply is the result, or the number of pieces of the result.
WHOLE: Final = b"\0"
IN_PIECES: Final = b"\1%d"


def pickled(value: Any) -> bytes:
    """Pickles a value. Uses cloudpickle for values that pickle cannot handle, such as lambdas."""
    with contextlib.suppress(Exception):
        return pickle.dumps(value, 5)
    from pyspark import cloudpickle

    return bytes(cloudpickle.dumps(value))  # type: ignore[no-untyped-call]


def limited_piece(max_event: int) -> int:
    """The maximum size of a piece if an event may have this many bytes."""
    return max(1, min(PIECE, max_event - _OVERHEAD))


def split_into_pieces(data: bytes, piece: int) -> list[memoryview]:
    """Splits the bytes into pieces of at most this size."""
    return [memoryview(data)[start : start + piece] for start in range(0, len(data), piece)]
