"""The journal in which the processes of a test record events."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.journal import Journal


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(str(tmp_path / "journal"))


def test_a_line_that_a_process_is_writing_is_read_when_it_is_complete(journal: Journal) -> None:
    """A reader that sees the first part of a line ignores it. When the line is complete, the reader returns it."""
    assert journal.read() == []
    journal.write(event="first")
    with open(journal.path, "a", encoding="utf-8") as file:
        file.write('{"pid": 1, "event": "sec')
        file.flush()
        assert [event["event"] for event in journal.read()] == ["first"]
        file.write('ond"}\n')
    assert [event["event"] for event in journal.read()] == ["first", "second"]
    assert [event["pid"] for event in journal.read(event="first")] == [os.getpid()]
