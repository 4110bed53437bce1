"""Summarizes errors and their tracebacks. Workers import this module, so it uses the standard library only."""

from __future__ import annotations

import contextlib
import importlib
import re
import traceback
import types
from collections.abc import Iterator
from typing import Final

__all__ = [
    "error_line", "error_text", "format_message_first", "remove_own_frames", "shorten_error", "with_causes",
    "without_surrogates",
]  # fmt: skip

_OWN: Final = __file__.rpartition("/observability/")[0] + "/"
#: Part of the package, but treated as user code.
_LIKE_USERS: Final = _OWN + "demo/"
#: Modules that this package calls and that call user code.
_BETWEEN: Final = (contextlib.__file__, importlib.__file__, "<frozen importlib")

#: A frame of a traceback. In an exception group, the frame's line begins with a bar.
_FRAME: Final = re.compile(r'( *\| )?( +)File ".*", line \d')

#: Follows the summary line of a shortened text.
_CUT: Final = "\u2026"
#: The number of frames to inspect, from the end. A message may contain any number of lines that look like frames.
_MAX_FRAMES: Final = 200


def without_surrogates(text: str) -> str:
    """Replaces lone surrogates, such as those in the name of an undecodable file: no frame can contain them."""
    return text.encode("utf-8", "replace").decode("utf-8")


def error_text(error: BaseException) -> str:
    """Returns the class and the message of an error, even if its `__str__` raises."""
    try:
        message = str(error)
    except Exception:
        message = "<its text cannot be shown>"
    return f"{type(error).__name__}: {message}"


def error_line(text: str) -> str:
    """The one line of an error's text that summarizes it.

    For a text with a Python traceback, that is the first line of the exception's message. Otherwise it is the first
    line that is not empty. The exception's line follows its last frame, and is indented less. The lines after it may be
    the rest of the message, notes, or the exceptions of a group; for a group, the result is the group's own line. For
    an error without this line, the shim has a simpler rule (`Show.error`).
    """
    lines = text.split("\n")  # not splitlines: messages may have other line separators
    if lines[1:2] == [_CUT]:
        return lines[0].strip()
    found, depth, inspected = "", 0, 0
    for number in range(len(lines) - 1, -1, -1):
        frame = _FRAME.match(lines[number])
        if frame is None:
            continue
        inspected += 1
        if inspected > _MAX_FRAMES:
            break
        bar = frame[1] or ""
        if found and not bar:
            break
        if (not found or len(bar) < depth) and (line := _line_after_frame(lines[number + 1 :], bar, frame[2])):
            found, depth = line, len(bar)
            if not bar:
                break
    return found or next((line.strip() for line in lines if line.strip()), "")


def remove_own_frames(error: BaseException) -> None:
    """Removes this package's frames from the tracebacks of an exception, its causes and its group's members."""
    for one in with_causes(error):
        one.__traceback__ = _without_own(one.__traceback__)


def with_causes(error: BaseException) -> Iterator[BaseException]:
    """The exception, its causes and the members of its group, each once."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        waiting += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]


def _without_own(found: types.TracebackType | None) -> types.TracebackType | None:
    kept: list[types.TracebackType] = []
    after_ours = False
    while found is not None:
        file = found.tb_frame.f_code.co_filename
        ours = file.startswith(_OWN) and not file.startswith(_LIKE_USERS)
        after_ours = ours or (after_ours and file.startswith(_BETWEEN))
        if not after_ours:
            kept.append(found)
        found = found.tb_next
    made: types.TracebackType | None = None
    for one in reversed(kept):
        made = types.TracebackType(made, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return made


def format_message_first(error: BaseException) -> str:
    """The exception's own lines, followed by its traceback without the frames of this package."""
    remove_own_frames(error)
    message = "".join(traceback.format_exception_only(error))
    whole = "".join(traceback.format_exception(error))
    return whole if whole.startswith(message) else f"{message}\n{whole}"


def shorten_error(text: str, length: int) -> str:
    """Shortens an error's text to its last `length` characters. The summary line is put first if it would be lost."""
    kept = text[-length:]
    line = error_line(text)[: length // 2]
    if error_line(kept)[: length // 2] == line:
        return kept
    begin = f"{line}\n{_CUT}\n"
    return begin + text[len(begin) - length :]


def _line_after_frame(lines: list[str], bar: str, indentation: str) -> str:
    """The first line after a frame that is indented less: not its source line, its carets, or a note on repetition."""
    for line in lines:
        if not line.startswith(bar):
            return ""
        text = line[len(bar) :]
        if text.strip() and not text.startswith(indentation):
            return text.strip()
    return ""
