"""The record of a commit: its format, its validation, and how two uses of one commit id are compared."""

from __future__ import annotations

import base64
import dataclasses
import datetime as dt
import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa

from stagecrew.errors import RecordUnreadable
from stagecrew.operators.schemas import type_text

__all__ = [
    "FORMAT",
    "Known",
    "Record",
    "States",
    "checked",
    "columns_of",
    "encoded_schema",
    "file_of",
    "known_of",
    "mark_of",
    "schema_of",
]

#: A record, as JSON values.
Record = dict[str, Any]

#: The format of records. Records of early versions have no format number.
FORMAT: Final = 2
#: The format of the mark that a sink stores with a commit's id.
_MARK_FORMAT: Final = 1

_RUN: Final = re.compile(r"[0-9a-f]{32}")
_FILE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")
#: The longest text in a mark, in characters, and the length to which a longer text is cut. These limits keep a mark
#: under 400 characters, so that it fits in a database column of 512 characters.
_MAX_LENGTH: Final = 60
_SHORTENED_LENGTH: Final = 40


class States:
    r"""The states of a commit's record.

        open(run) --decide--> decided(run, messages) --> applied
           |   \--another driver takes over--> open(its run)   \--> refused (the sink never accepts it)
           \--> aborted

    An `open` record names the only run that may decide the commit. A driver that takes over or aborts the commit first
    writes the record, and then deletes staged data. If the sink contains a commit whose record is not decided, the
    record is an old copy. It then becomes applied, without messages.
    """

    OPEN = "open"
    DECIDED = "decided"
    APPLIED = "applied"
    ABORTED = "aborted"
    REFUSED = "refused"
    ALL = frozenset({OPEN, DECIDED, APPLIED, ABORTED, REFUSED})


def checked(commit_id: str, record: Any) -> Record:
    """Returns the record if this version of stagecrew can read it. Otherwise raises `RecordUnreadable`.

    Run ids are checked strictly, because they become names of folders and tables.
    """
    if not isinstance(record, dict):
        raise _invalid(commit_id, f"it is a {type(record).__name__}")
    format_ = record.get("format")
    if format_ is None:
        raise RecordUnreadable(
            f"an earlier version of stagecrew wrote the record of commit {commit_id!r}, and this version does not read "
            "it. Nothing was changed or deleted. Finish the commit with the version that wrote it, or use another "
            "commit id"
        )
    if format_ != FORMAT:
        raise RecordUnreadable(
            f"the record of commit {commit_id!r} has format {format_!r}, and this version of stagecrew reads {FORMAT}. "
            f"Nothing was changed or deleted. Finish the commit with the version that wrote it"
        )
    problem = _problem(record)
    if problem:
        raise _invalid(commit_id, problem)
    return record


def _invalid(commit_id: str, problem: str) -> RecordUnreadable:
    return RecordUnreadable(
        f"the record of commit {commit_id!r} is invalid: {problem}. Nothing was changed or deleted. Restore the record "
        "from a backup"
    )


def _problem(record: Record) -> str:
    """Returns the first problem in a record of this format, or an empty string."""
    if record.get("state") not in States.ALL:
        return f"its state is {record.get('state')!r}"
    before = record.get("before")
    if not isinstance(before, list):
        return "it has no list of earlier runs"
    for run in [record.get("run"), *before]:
        if not isinstance(run, str) or not _RUN.fullmatch(run):
            return f"{run!r} is not a run id"
    if not isinstance(record.get("sink"), str):
        return "it names no sink"
    for name, kinds in _OPTIONAL.items():
        if not isinstance(record.get(name), (*kinds, type(None))):
            return f"its {name} is a {type(record[name]).__name__}"
    for message in record.get("messages") or ():
        numbers = [message.get("rows", 0), message.get("bytes", 0)] if isinstance(message, dict) else [None]
        if not all(isinstance(number, int | float) for number in numbers):
            return f"{message!r} is not a message of a task"
    if record["state"] == States.DECIDED and record.get("messages") is None:
        return "it is decided, but has no messages"
    try:
        schema_of(record)
    except (KeyError, TypeError, ValueError, OSError) as error:  # pyarrow raises the last two
        return f"its schema cannot be read ({type(error).__name__})"
    return ""


_OPTIONAL: Final[dict[str, tuple[type, ...]]] = {
    "messages": (list,),
    "content": (str,),
    "mark": (str,),
    "time": (int, float),
    "job": (str,),
    "attempt": (int,),
}


def file_of(commit_id: str, message: dict[str, Any]) -> str:
    """Returns the file name in a message. Raises `RecordUnreadable` for a name that no sink uses, such as a path."""
    name = message.get("file")
    if not isinstance(name, str) or not _FILE.fullmatch(name):
        raise RecordUnreadable(
            f"the record of commit {commit_id!r} names {name!r}, which is not the name of a staged file. Nothing was "
            "moved or deleted. Restore the record from a backup"
        )
    return name


def encoded_schema(schema: pa.Schema) -> str:
    """Encodes a schema for a record."""
    return base64.b64encode(schema.serialize()).decode("ascii")


def schema_of(record: Record) -> pa.Schema:
    """The schema of a record's dataset."""
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(record["schema"], validate=True)))


def columns_of(schema: pa.Schema) -> list[str]:
    """The names and types of a schema's columns, sorted. A repeat of a commit must have the same columns.

    The order is ignored, because sinks accept columns in any order. Nullability and metadata are also ignored, even in
    nested types, because Spark derives them from its plan. So they may change although the data is the same.
    """
    return sorted(f"{field.name}: {type_text(field.type)}" for field in schema)


@dataclasses.dataclass(frozen=True)
class Known:
    """The known facts about a commit that was already decided."""

    content: str | None
    columns: Sequence[str]
    rows: int
    time: float
    #: Whether the values come from a sink's mark, in which long texts are shortened.
    is_shortened: bool = False

    def difference(self, schema: pa.Schema, content: str | None) -> str:
        """Describes how a dataset differs from the committed one. Returns an empty string if it does not differ."""
        columns = columns_of(schema)
        if self.is_shortened:
            content, columns = None if content is None else _shortened(content), [_shortened(", ".join(columns))]
        differences = []
        if content != self.content:
            differences.append(f"content is {content!r}, was {self.content!r}")
        ours = [column for column in columns if column not in self.columns]
        theirs = [column for column in self.columns if column not in columns]
        if ours or theirs:
            differences.append(f"columns are {', '.join(ours) or 'fewer'}, were {', '.join(theirs) or 'fewer'}")
        return "; ".join(differences)

    @property
    def when(self) -> str:
        """The time of the decision, as a text."""
        return dt.datetime.fromtimestamp(self.time, dt.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def known_of(commit_id: str, record: Record) -> Known | None:
    """The facts in the record of a decided or applied commit. None if the record contains no facts."""
    if "messages" not in record:
        return read_mark(commit_id, record.get("mark"))
    rows = sum(message.get("rows", 0) for message in record["messages"])
    return Known(record["content"], columns_of(schema_of(record)), rows, record["time"])


def mark_of(record: Record) -> str:
    """The text of at most 400 characters that a sink stores with the id of a decided commit."""
    content = record["content"]
    mark = {
        "format": _MARK_FORMAT,
        "time": record["time"],
        "rows": sum(message.get("rows", 0) for message in record["messages"]),
        "content": None if content is None else _shortened(content),
        "columns": _shortened(", ".join(columns_of(schema_of(record)))),
    }
    return json.dumps(mark, ensure_ascii=False, separators=(",", ":"))


def read_mark(commit_id: str, text: str | None) -> Known | None:
    """Reads the text that `mark_of` returned. Returns None if there is no mark, as in commits of early versions.

    Raises `RecordUnreadable` if the mark is invalid or has another format.
    """
    if not text:
        return None
    try:
        mark = json.loads(text)
        if mark["format"] == _MARK_FORMAT:
            return Known(mark["content"], [mark["columns"]], int(mark["rows"]), float(mark["time"]), is_shortened=True)
    except (ValueError, KeyError, TypeError) as error:
        raise RecordUnreadable(
            f"the sink's mark of commit {commit_id!r} is invalid ({type(error).__name__}). Nothing was changed. Use "
            "another commit id"
        ) from error
    raise RecordUnreadable(
        f"the sink's mark of commit {commit_id!r} has format {mark['format']!r}, and this version of stagecrew reads "
        f"{_MARK_FORMAT}. Nothing was changed. Use the version that wrote it, or another commit id"
    )


def _shortened(text: str) -> str:
    """Returns the text, or, if it is long or not printable, its beginning and a digest."""
    if len(text) <= _MAX_LENGTH and text.isprintable():
        return text
    begin = "".join(character if character.isprintable() else "?" for character in text[:_SHORTENED_LENGTH])
    return f"{begin}\u2026{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"
