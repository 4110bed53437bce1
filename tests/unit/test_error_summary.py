"""The summary line of an error says what happened. It is found in any text that Python prints for an error."""

from __future__ import annotations

import json
import time
import traceback
from pathlib import Path

import pytest

from stagecrew.observability.error_summary import error_line, shorten_error
from stagecrew.observability.event_log import _counts

#: Texts of CPython 3.11 and 3.13, with their summary lines. The shim's own tests read them too.
FILE = Path(__file__).parents[1] / "error-lines.json"


def text_of(call) -> str:
    """Returns the traceback of the error that a function raises."""
    try:
        call()
    except BaseException as error:
        return "".join(traceback.format_exception(error))
    raise AssertionError("nothing was raised")


def fails(message="no"):
    """Raises a simple error."""
    raise ValueError(message)


def deep(n):
    """Fails many frames deep."""
    if n == 0:
        fails()
    deep(n - 1)


def many():
    """Fails with a group of more errors than are kept."""
    errors = []
    for _ in range(15):
        try:
            handling()
        except KeyError as error:
            errors.append(error)
    raise ExceptionGroup("many", errors)


def noted():
    """Fails with notes, one of which looks like an error."""
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
    """Fails with a group as its cause."""
    try:
        group()
    except ExceptionGroup as error:
        raise RuntimeError("all of them") from error


def group():
    """Fails with a group that contains a group."""
    found = []
    for call in (fails, handling, inner):
        try:
            call()
        except Exception as error:
            found.append(error)
    raise ExceptionGroup("many\nof them", found)


def inner():
    """Fails with a group of two errors that were never raised."""
    raise ExceptionGroup("inner", [TypeError("a"), OSError("b")])


def because():
    """Fails with a group that has a cause."""
    try:
        fails("first")
    except ValueError as error:
        raise ExceptionGroup("behind it", [error]) from error


def remote():
    """Fails with another traceback as its message, like PySpark's exceptions."""
    raise RuntimeError(f"\n  An exception was thrown from the worker.\n{text_of(handling)}")


def yaml():
    """Fails with a message that ends like a frame."""
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
def test_the_summary_of_an_exception(call, line):
    """Text may follow it, it may have any cause, and the beginning of the text may be missing."""
    text = text_of(call)
    assert error_line(text) == line
    last = text.rindex('  File "') if call not in (group, because, remote, yaml) else 0
    for cut in range(0, max(0, last - 20), 37):
        assert error_line(text[cut:]) == line, text[cut:]


def test_without_a_traceback_the_summary_is_the_first_line():
    """As for errors of coordinators, of a JVM, or of processes. The summary of an empty text is empty."""
    assert error_line("\n  \n  ValueError: no\nmore\n") == "ValueError: no"
    assert (
        error_line("open ignored its timeout; its process was killed")
        == "open ignored its timeout; its process was killed"
    )
    assert error_line('ValueError: in\n  File "x", line 3, in f') == "ValueError: in"
    assert error_line("") == error_line(" \n ") == ""


def test_a_cut_text_keeps_its_summary():
    """A cut text is at most as long as requested, and has the end and the same summary line."""
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


def test_a_message_of_many_frames_is_parsed_in_time():
    """However much of it looks like a traceback without an end."""
    began = time.monotonic()
    error_line('  File "x", line 3\n' * 100_000)
    assert time.monotonic() - began < 10


def test_the_command_prints_the_summary_of_a_listeners_error():
    """In each scope of the listener."""
    numbers = dict.fromkeys(("opens", "closes", "failures", "lost", "openMicros", "closeMicros"), 0)
    for scope in ("worker", "executor", "jvm"):
        assert _counts({"scope": scope, "lastError": text_of(noted), **numbers})[-1] == "ValueError: no"


@pytest.mark.parametrize("one", json.loads(FILE.read_text()), ids=lambda one: one["name"])
def test_the_shim_finds_the_same_summaries(one):
    """The tab shows the same line as the command and the log."""
    assert error_line(one["text"]) == one["line"]
