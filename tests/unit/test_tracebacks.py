"""One line of an error says what happened: it is found in whatever text Python makes of one."""

from __future__ import annotations

import json
import time
import traceback
from pathlib import Path

import pytest

from stagecrew.observability.error_summary import error_line, shorten_error
from stagecrew.observability.event_log import _counts

#: Texts as CPython 3.11 and 3.13 make them, and their lines; the shim's own tests read them too.
FILE = Path(__file__).parents[1] / "error-lines.json"


def text_of(call) -> str:
    """The traceback of what this raises."""
    try:
        call()
    except BaseException as error:
        return "".join(traceback.format_exception(error))
    raise AssertionError("nothing was raised")


def fails(message="no"):
    """Raises plainly."""
    raise ValueError(message)


def deep(n):
    """Fails many frames below."""
    if n == 0:
        fails()
    deep(n - 1)


def many():
    """Fails as a group with more frames in it than are kept."""
    errors = []
    for _ in range(15):
        try:
            handling()
        except KeyError as error:
            errors.append(error)
    raise ExceptionGroup("many", errors)


def noted():
    """Fails with notes, of which one looks like an error."""
    try:
        fails()
    except ValueError as error:
        error.add_note("raised by decorate of listener 'orders'\nTypeError: no error")
        raise


def handling():
    """Fails while it handles a failure."""
    try:
        fails("first")
    except ValueError:
        raise KeyError("second")  # noqa: B904


def caused():
    """Fails because of a group."""
    try:
        group()
    except ExceptionGroup as error:
        raise RuntimeError("all of them") from error


def group():
    """Fails in several ways, one of which is a group."""
    found = []
    for call in (fails, handling, inner):
        try:
            call()
        except Exception as error:
            found.append(error)
    raise ExceptionGroup("many\nof them", found)


def inner():
    """Fails in two ways that were never raised."""
    raise ExceptionGroup("inner", [TypeError("a"), OSError("b")])


def because():
    """Fails as a group, because of something else."""
    try:
        fails("first")
    except ValueError as error:
        raise ExceptionGroup("behind it", [error]) from error


def remote():
    """Fails with the traceback of somebody else as its message, as PySpark's exceptions have it."""
    raise RuntimeError(f"\n  An exception was thrown from the worker.\n{text_of(handling)}")


def yaml():
    """Fails with a message that ends as a frame does."""
    raise ValueError('cannot parse\n  File "config.yml", line 3')


REAL = [
    (fails, "ValueError: no"),
    (lambda: deep(20), "ValueError: no"),
    (lambda: fails("(psycopg) refused\n[SQL: SELECT 1\n  FROM t]\n(Background on this error at: https://x)"),
     "ValueError: (psycopg) refused"),
    (noted, "ValueError: no"),
    (handling, "KeyError: 'second'"),
    (caused, "RuntimeError: all of them"),
    (group, "ExceptionGroup: many"),
    (because, "ExceptionGroup: behind it (1 sub-exception)"),
    (lambda: exec("x = (\n"), "SyntaxError: '(' was never closed"),
    (lambda: compile("if 1:\nx", "job.py", "exec"), "IndentationError: expected an indented block after 'if' statement on line 1"),
    (lambda: fails('see File "a", line 1\nFile "b", line 2'), 'ValueError: see File "a", line 1'),
    (remote, "KeyError: 'second'"),
    (yaml, "ValueError: cannot parse"),
    (lambda: fails(""), "ValueError"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "line"), REAL)
def test_the_line_of_an_exception(call, line):
    """Whatever follows it, and whatever it was raised from; also when the beginning of the text is missing."""
    text = text_of(call)
    assert error_line(text) == line
    last = text.rindex('  File "') if call not in (group, because, remote, yaml) else 0
    for cut in range(0, max(0, last - 20), 37):
        assert error_line(text[cut:]) == line, text[cut:]


def test_without_a_traceback_it_is_the_first_line():
    """As of a coordinator's error, a JVM's, or what was said of a process; of nothing it is empty."""
    assert error_line("\n  \n  ValueError: no\nmore\n") == "ValueError: no"
    assert (
        error_line("open ignored its timeout; its process was ended")
        == "open ignored its timeout; its process was ended"
    )
    assert error_line('ValueError: in\n  File "x", line 3, in f') == "ValueError: in"
    assert error_line("") == error_line(" \n ") == ""


def test_what_is_cut_says_still_what_happened():
    """However long a message is: it is at most as long as was asked, it has the end, and the same line."""
    for call, line in REAL:
        text = text_of(call)
        for length in range(200, len(text) + 10, 61):
            cut = shorten_error(text, length)
            assert len(cut) <= length
            assert cut.endswith(text[-length // 3 :])
            assert error_line(cut) == line[: length // 2]
    text = text_of(lambda: fails("refused\n" + "SELECT\n" * 1000 + "end"))
    assert error_line(shorten_error(text, 500)) == "ValueError: refused"
    assert len(shorten_error(text, 500)) == 500
    assert len(shorten_error("x" * 1000, 500)) == 500
    once = shorten_error(text_of(many), 4000)
    assert len(text_of(many)) > 8000
    assert error_line(once) == error_line(shorten_error(once, 500)) == "ExceptionGroup: many (15 sub-exceptions)"


def test_a_message_of_many_frames_is_looked_at_in_time():
    """However much of it looks like a traceback without an end."""
    began = time.monotonic()
    error_line('  File "x", line 3\n' * 100_000)
    assert time.monotonic() - began < 10


def test_the_command_shows_that_line_of_a_listeners_error():
    """Whichever scope the listener has."""
    numbers = dict.fromkeys(("opens", "closes", "failures", "lost", "openMicros", "closeMicros"), 0)
    for scope in ("worker", "executor", "jvm"):
        assert _counts({"scope": scope, "lastError": text_of(noted), **numbers})[-1] == "ValueError: no"


@pytest.mark.parametrize("one", json.loads(FILE.read_text()), ids=lambda one: one["name"])
def test_the_lines_that_the_shim_finds_too(one):
    """The tab says the same as the command and the log."""
    assert error_line(one["text"]) == one["line"]
