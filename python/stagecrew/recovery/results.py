"""How a job has ended: its value, or its error, as bytes that outlive it."""

from __future__ import annotations

import base64
import dataclasses
import json
import pickle
import traceback
from typing import Any, Final

from stagecrew.errors import JobFailed, JobUnreadable

__all__ = ["Result"]

_FORMAT: Final = 1
#: How much of a value or a traceback is shown, in characters.
_SHOWN: Final = 20_000


@dataclasses.dataclass(frozen=True)
class Result:
    """A job's end. `state` is "succeeded", "failed" or "cancelled"."""

    state: str
    #: Why, in a line; empty for one that succeeded.
    reason: str = ""
    traceback: str = ""
    #: The value, pickled; None where there is none.
    pickled: bytes | None = None
    #: The value for people and machines that do not unpickle: as JSON where it is that, else its repr.
    shown: Any = None

    @classmethod
    def of_value(cls, value: Any) -> Result:
        """Of a job that returned this. What cannot be pickled is a failure of the job."""
        try:
            from pyspark import cloudpickle

            pickled = bytes(cloudpickle.dumps(value))  # type: ignore[no-untyped-call]
        except Exception as error:
            return cls.of_error(error, "what the job returned cannot be pickled: ")
        try:
            shown = json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError, RecursionError):
            shown = repr(value)[:_SHOWN]
        return cls("succeeded", pickled=pickled, shown=shown)

    @classmethod
    def of_error(cls, error: BaseException, what: str = "") -> Result:
        """Of a job that raised this."""
        text = "".join(traceback.format_exception(error))
        return cls("failed", f"{what}{type(error).__name__}: {error}"[:2000], text[-_SHOWN:])

    def value(self) -> Any:
        """What the job returned. Raises `JobFailed` when it returned nothing, with its error. It unpickles what the job has written."""
        if self.state != "succeeded":
            raise JobFailed(f"the job has {self.state}: {self.reason}\n{self.traceback}".rstrip())
        return None if self.pickled is None else pickle.loads(self.pickled)

    def to_bytes(self) -> bytes:
        """As bytes to be stored."""
        body = dataclasses.asdict(self) | {"format": _FORMAT}
        body["pickled"] = None if self.pickled is None else base64.b64encode(self.pickled).decode()
        return json.dumps(body).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Result:
        """What `to_bytes` made. Raises `JobUnreadable`."""
        try:
            body = json.loads(data)
            if body.pop("format") != _FORMAT:
                raise JobUnreadable(f"a result of another format; this stagecrew reads {_FORMAT}")
            pickled = body.pop("pickled")
            return cls(**body, pickled=None if pickled is None else base64.b64decode(pickled))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise JobUnreadable(f"it is not as it was written: {type(error).__name__}: {error}") from error
