"""The result of a job: its value or its error, serialized for the state storage."""

from __future__ import annotations

import base64
import dataclasses
import json
import pickle
import traceback
from typing import Any, Final

from stagecrew.errors import JobFailed, RecordUnreadable
from stagecrew.observability.error_summary import error_text

__all__ = ["Result"]

_FORMAT: Final = 1
#: The maximum number of characters stored of a value's text or of a traceback.
_MAX_TEXT: Final = 20_000
#: The maximum number of characters stored of a reason.
_MAX_REASON: Final = 2000


@dataclasses.dataclass(frozen=True)
class Result:
    """How a job ended.

    Attributes:
        state: "succeeded", "failed" or "cancelled".
        reason: Why it failed or was cancelled, in one line; empty if it succeeded.
        traceback: The Python traceback of its error, or empty.
        pickled: The pickled value, or None if there is no value.
        shown: The value in a form that can be read without unpickling: JSON types if possible, otherwise its `repr`.

    Examples:
        >>> from stagecrew.recovery import Result
        >>> result = Result.of_value({"rows": 3})
        >>> result.state, result.value(), result.shown
        ('succeeded', {'rows': 3}, {'rows': 3})
    """

    state: str
    reason: str = ""
    traceback: str = ""
    pickled: bytes | None = None
    shown: Any = None

    @classmethod
    def of_value(cls, value: Any) -> Result:
        """Returns the result of a job that returned a value. If the value cannot be pickled, the job has failed.

        Args:
            value: What the job's function returned.

        Returns:
            A result with the state `succeeded`, or `failed` if the value cannot be pickled.
        """
        try:
            from pyspark import cloudpickle

            pickled = bytes(cloudpickle.dumps(value))  # type: ignore[no-untyped-call]
        except Exception as error:
            return cls.of_error(error, "the job's return value cannot be pickled: ")
        try:
            shown = json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError, RecursionError):
            shown = repr(value)[:_MAX_TEXT]
        return cls("succeeded", pickled=pickled, shown=shown)

    @classmethod
    def of_error(cls, error: BaseException, prefix: str = "") -> Result:
        """Returns the result of a job that raised an error.

        Args:
            error: The exception.
            prefix: The text that the reason starts with.

        Returns:
            A result with the state `failed`, and with the error's message and traceback.
        """
        text = "".join(traceback.format_exception(error))
        try:
            message = str(error)
        except Exception as unreadable:
            message = f"(its message cannot be read: __str__ raised {type(unreadable).__name__})"
        return cls("failed", f"{prefix}{type(error).__name__}: {message}"[:_MAX_REASON], text[-_MAX_TEXT:])

    def value(self) -> Any:
        """Returns what the job returned, by unpickling it. Use it only if you trust the job's code.

        Returns:
            The value, or None if the job ran a script.

        Raises:
            JobFailed: The job failed or was cancelled. The message contains the job's error.
        """
        if self.state != "succeeded":
            verb = "was cancelled" if self.state == "cancelled" else self.state
            raise JobFailed(f"the job {verb}: {self.reason}\n{self.traceback}".rstrip())
        return None if self.pickled is None else pickle.loads(self.pickled)

    def to_bytes(self) -> bytes:
        """Encodes the result for the state storage.

        Returns:
            The encoded result.
        """
        body = dataclasses.asdict(self) | {"format": _FORMAT}
        body["pickled"] = None if self.pickled is None else base64.b64encode(self.pickled).decode()
        return json.dumps(body).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Result:
        """Decodes what `to_bytes` returned.

        Args:
            data: The encoded result.

        Returns:
            The result.

        Raises:
            RecordUnreadable: The bytes are not a result, or have another format.
        """
        try:
            body = json.loads(data)
            found = body.pop("format")
            if found != _FORMAT:
                raise RecordUnreadable(
                    f"the result has format {found}, but this version of stagecrew supports only format {_FORMAT}: "
                    "read it with the version that wrote it"
                )
            pickled = body.pop("pickled")
            return cls(**body, pickled=None if pickled is None else base64.b64decode(pickled))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RecordUnreadable(f"the result is damaged: {error_text(error)}") from error
