"""Finding the summary line, the one that says what happened, in any text that Python prints for an error."""

from __future__ import annotations

import json
import time
import traceback
from pathlib import Path

import pytest

from stagecrew.observability.error_summary import error_line, shorten_error
from stagecrew.observability.event_log import _listener_cells

#: Error texts from CPython 3.11 and 3.13 with their summary lines. The shim's own tests read this file too.
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
    """Fails `n` frames deep."""
    if n == 0:
        fails()
    deep(n - 1)


def many():
    """Fails with a group of 15 errors, whose text is too long to be kept whole."""
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


def error_caused_by_group():
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


def group_with_cause():
    """Fails with a group that has a cause."""
    try:
        fails("first")
    except ValueError as error:
        raise ExceptionGroup("several", [error]) from error


def remote():
    """Fails with an error whose message is another traceback, as in PySpark's exceptions."""
    raise RuntimeError(f"\n  An exception was thrown from the worker.\n{text_of(handling)}")


def message_like_a_traceback():
    """Fails with a message that ends like a line of a traceback."""
    raise ValueError('cannot parse\n  File "config.yml", line 3')


REAL = [
    (fails, "ValueError: no"),
    (lambda: deep(20), "ValueError: no"),
    (lambda: fails("(psycopg) refused\n[SQL: SELECT 1\n  FROM t]\n(Background on this error at: https://x)"),
     "ValueError: (psycopg) refused"),
    (noted, "ValueError: no"),
    (handling, "KeyError: 'second'"),
    (error_caused_by_group, "RuntimeError: all of them"),
    (group, "ExceptionGroup: many"),
    (group_with_cause, "ExceptionGroup: several (1 sub-exception)"),
    (lambda: exec("x = (\n"), "SyntaxError: '(' was never closed"),
    (lambda: compile("if 1:\nx", "job.py", "exec"), "IndentationError: expected an indented block after 'if' statement on line 1"),
    (lambda: fails('see File "a", line 1\nFile "b", line 2'), 'ValueError: see File "a", line 1'),
    (remote, "KeyError: 'second'"),
    (message_like_a_traceback, "ValueError: cannot parse"),
    (lambda: fails(""), "ValueError"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "line"), REAL)
def test_the_summary_of_an_exception(call, line):
    """The summary is found for every kind of error, even if text follows it or the beginning of the text is missing."""
    text = text_of(call)
    assert error_line(text) == line
    last = text.rindex('  File "') if call not in (group, group_with_cause, remote, message_like_a_traceback) else 0
    for cut in range(0, max(0, last - 20), 37):
        assert error_line(text[cut:]) == line, text[cut:]


def test_without_a_traceback_the_summary_is_the_first_line():
    """Without a traceback, as in errors from the JVM, the summary is the first line that is not blank.

    The summary of an empty text is empty.
    """
    assert error_line("\n  \n  ValueError: no\nmore\n") == "ValueError: no"
    assert (
        error_line("open ignored its timeout; its process was killed")
        == "open ignored its timeout; its process was killed"
    )
    assert error_line('ValueError: in\n  File "x", line 3, in f') == "ValueError: in"
    assert error_line("") == error_line(" \n ") == ""


def test_a_cut_text_keeps_its_summary():
    """A shortened text is at most as long as requested, and keeps the end and the summary line of the original."""
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


def test_a_message_with_many_lines_of_tracebacks_is_parsed_quickly():
    """A message with 100,000 lines that look like a traceback is parsed within seconds."""
    began = time.monotonic()
    error_line('  File "x", line 3\n' * 100_000)
    assert time.monotonic() - began < 10


def test_a_report_has_the_summary_of_a_listeners_error():
    """The row of a listener in `stagecrew report` ends with the summary line of its last error, for each scope."""
    numbers = dict.fromkeys(("opens", "closes", "failures", "lost", "openMicros", "closeMicros"), 0)
    for scope in ("worker", "executor", "jvm"):
        assert _listener_cells({"scope": scope, "lastError": text_of(noted), **numbers})[-1] == "ValueError: no"


@pytest.mark.parametrize("one", json.loads(FILE.read_text()), ids=lambda one: one["name"])
def test_python_finds_the_same_summaries_as_the_shim(one):
    """Python finds the summary lines that the shim's tests expect, so Python and the UI tab show the same lines."""
    assert error_line(one["text"]) == one["line"]
