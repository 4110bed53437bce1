"""What an error's text says happened, in one line. Loaded in workers too: the standard library only."""

from __future__ import annotations

import contextlib
import importlib
import re
import traceback
import types
from collections.abc import Iterator
from typing import Final

__all__ = ["end_of", "error_line", "sentence_first", "with_causes", "without_our_frames"]

_OURS: Final = __file__.rpartition("/observability/")[0] + "/"
#: Inside the package, but written as a user's code.
_AS_USERS: Final = _OURS + "demo/"
#: Modules that we call, and that call a user's code.
_BETWEEN: Final = (contextlib.__file__, importlib.__file__, "<frozen importlib")

#: A frame of a traceback, with the bar of an exception group in front where it is one's.
_FRAME: Final = re.compile(r'( *\| )?( +)File ".*", line \d')

#: Stands behind the line that says what happened where what was between is left out.
_CUT: Final = "\u2026"
#: At how many frames is looked, the last ones: a message may have any number of them.
_LOOKS: Final = 200


def error_line(text: str) -> str:
    """The line that says what happened: of a text with a Python traceback its exception's, else the first that is not empty.

    An exception's line stands behind its last frame, and is not indented as that is; what follows may be more of its message, notes, or
    the exceptions of a group. Of a group it is the group's own. The shim has the same rule (`Show.errorLine`).
    """
    lines = text.split("\n")  # not at what else ends lines: messages may have that
    if lines[1:2] == [_CUT]:
        return lines[0].strip()
    found, depth, looks = "", 0, 0
    for number in range(len(lines) - 1, -1, -1):
        frame = _FRAME.match(lines[number])
        if frame is None:
            continue
        looks += 1
        if looks > _LOOKS:
            break
        bar = frame[1] or ""
        if found and not bar:
            break
        if (not found or len(bar) < depth) and (said := _behind(lines[number + 1 :], bar, frame[2])):
            found, depth = said, len(bar)
            if not bar:
                break
    return found or next((line.strip() for line in lines if line.strip()), "")


def without_our_frames(error: BaseException) -> None:
    """Removes the frames of this package from the tracebacks of an exception, its causes and the members of its group."""
    for one in with_causes(error):
        one.__traceback__ = _of_others(one.__traceback__)


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


def _of_others(found: types.TracebackType | None) -> types.TracebackType | None:
    kept: list[types.TracebackType] = []
    after_ours = False
    while found is not None:
        file = found.tb_frame.f_code.co_filename
        ours = file.startswith(_OURS) and not file.startswith(_AS_USERS)
        after_ours = ours or (after_ours and file.startswith(_BETWEEN))
        if not after_ours:
            kept.append(found)
        found = found.tb_next
    made: types.TracebackType | None = None
    for one in reversed(kept):
        made = types.TracebackType(made, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return made


def sentence_first(error: BaseException) -> str:
    """The exception's own lines, and after them its traceback with the frames of others."""
    without_our_frames(error)
    said = "".join(traceback.format_exception_only(error))
    whole = "".join(traceback.format_exception(error))
    return whole if whole.startswith(said) else f"{said}\n{whole}"


def end_of(text: str, length: int) -> str:
    """At most so many characters of an error's text, the last ones: with the line that says what happened before them if it is not there."""
    kept = text[-length:]
    line = error_line(text)[: length // 2]
    if error_line(kept)[: length // 2] == line:
        return kept
    begin = f"{line}\n{_CUT}\n"
    return begin + text[len(begin) - length :]


def _behind(lines: list[str], bar: str, indentation: str) -> str:
    """The first line behind a frame that is indented less than it: not its code, its marks, or that it was repeated."""
    for line in lines:
        if not line.startswith(bar):
            return ""
        said = line[len(bar) :]
        if said.strip() and not said.startswith(indentation):
            return said.strip()
    return ""
