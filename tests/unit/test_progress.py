"""The live progress of a topology shows its report every second, never raises, and ends with its topology."""

from __future__ import annotations

import dataclasses
import threading

import pytest

from stagecrew.session import progress
from stagecrew.session.progress import Progress, progress_rows
from support.report_samples import LISTENER, OPERATOR, TOPOLOGY
from support.waiting import eventually


class Recorded:
    """A view that records its rows. It fails from the given call on."""

    def __init__(self, fails_at=None):
        self.shown, self.ended, self.fails_at = [], 0, fails_at

    def show(self, key, rows):
        self.shown.append(rows)
        if self.fails_at is not None and len(self.shown) >= self.fails_at:
            raise OSError("the terminal is gone")

    def end(self, key):
        self.ended += 1


def live_threads():
    return [thread for thread in threading.enumerate() if thread.name == "stagecrew-progress"]


def test_rows_name_listeners_coordinators_and_what_they_wait_for():
    """The rows say how many listeners are open, how far operators are, and what waits for what."""
    rows = progress_rows(TOPOLOGY)
    assert rows[0] == ("topology enrich", "closed", "1.50 s, 3 jobs")
    assert rows[1] == ("listener orders", "0 open", "2 opens, 500.0 ms in open, 1 failure, 1 lost")
    assert rows[2] == ("operator splits/1", "2 live, 5 finished", "done: 3, waits for 1 more task")
    assert rows[3] == ("partitions", "4 stored", "2.0 kB, 4 released")


def test_listeners_of_several_executors_are_one_row():
    """The counts of all executors are added up."""
    more = dataclasses.replace(LISTENER, executor="2", opens=3, closes=0, failures=0, lost=0)
    rows = progress_rows(dataclasses.replace(TOPOLOGY, listeners=(LISTENER, more)))
    assert rows[1] == ("listener orders", "3 open", "5 opens, 1.00 s in open, 1 failure, 1 lost")


def test_progress_shows_the_report_until_it_is_stopped(monkeypatch):
    """The report is shown again and again, and once more at the end. No thread is left."""
    monkeypatch.setattr(progress, "_PERIOD", 0.01)
    view = Recorded()
    shown = Progress(lambda: TOPOLOGY, view)
    eventually(lambda: len(view.shown) >= 3)
    shown.stop()
    shown.stop()
    assert view.ended == 1
    assert live_threads() == []


@pytest.mark.parametrize("fails_at", [1, 2])
def test_a_failing_display_ends_the_progress_only(monkeypatch, caplog, fails_at):
    """A view that raises is not called again. A warning says so, and `stop` works."""
    monkeypatch.setattr(progress, "_PERIOD", 0.01)
    view = Recorded(fails_at)
    shown = Progress(lambda: TOPOLOGY, view)
    eventually(lambda: not live_threads())
    shown.stop()
    assert (len(view.shown), view.ended) == (fails_at, 1)
    assert "the terminal is gone" in caplog.text


def test_a_failing_report_ends_the_progress_only(caplog):
    """An error while the report is read, for example because the JVM has ended, is a warning."""

    def fail():
        raise ConnectionError("the JVM has ended")

    shown = Progress(fail, Recorded())
    shown.stop()
    assert "the JVM has ended" in caplog.text
    assert live_threads() == []


def test_stop_does_not_wait_for_a_report_that_never_arrives(monkeypatch):
    """The end of a topology waits for the last update for a limited time only. A later report is not shown."""
    monkeypatch.setattr(progress, "_LAST_UPDATE", 0.05)
    arrives = threading.Event()
    view = Recorded()

    def wait():
        arrives.wait(10)
        return TOPOLOGY

    shown = Progress(wait, view)
    shown.stop()
    eventually(lambda: view.ended == 1)
    shown.stop()
    arrives.set()
    eventually(lambda: not live_threads())
    assert (view.shown, view.ended) == ([], 1)


def test_stop_does_not_wait_for_a_terminal_that_accepts_nothing(monkeypatch):
    """If the output is blocked, the end of the topology is not. The view ends when the output continues."""
    monkeypatch.setattr(progress, "_LAST_UPDATE", 0.05)
    continues, blocked = threading.Event(), threading.Event()
    view = Recorded()
    show = view.show

    def wait(key, rows):
        blocked.set()
        continues.wait(10)
        show(key, rows)

    view.show = wait
    shown = Progress(lambda: TOPOLOGY, view)
    assert blocked.wait(10)
    shown.stop()
    assert view.ended == 0
    continues.set()
    eventually(lambda: not live_threads())
    assert (len(view.shown), view.ended) == (1, 1)


def test_nested_topologies_share_one_terminal(capsys):
    """The display of the outer topology is updated with that of the inner one. Both remain when they have ended."""
    terminal = progress._Terminal()
    terminal.show("outer", [("topology outer", "active", "")])
    terminal.show("inner", progress_rows(dataclasses.replace(TOPOLOGY, operators=(OPERATOR,))))
    terminal.end("inner")
    terminal.end("outer")
    terminal.end("outer")
    printed = capsys.readouterr().err
    assert "topology outer" in printed
    assert "topology enrich" in printed
