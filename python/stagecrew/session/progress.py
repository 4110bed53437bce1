"""The live progress of a topology, in a terminal or a notebook. `Crew.topology(..., progress=True)` shows it."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol

from rich.console import Console, Group
from rich.live import Live

from stagecrew.observability.console import table
from stagecrew.observability.notebook import amount, data_size, duration, html_table

if TYPE_CHECKING:
    from stagecrew.session.reports import TopologyReport

__all__ = ["Progress", "progress_rows"]

_log = logging.getLogger("stagecrew")

#: How often the progress is updated, in seconds. Executors report as often.
_PERIOD: Final = 1.0
#: How long the end of a topology waits for the last update, in seconds.
_LAST_UPDATE: Final = 2.0
_COLUMNS: Final = ("what", "state", "details")

Row = tuple[str, str, str]


def progress_rows(report: TopologyReport) -> list[Row]:
    """The rows that show the progress of a topology: its state, listeners, coordinators and partitions."""
    rows = [(f"topology {report.name}", report.state, f"{duration(report.seconds)}, {amount(report.jobs, 'job')}")]
    names = dict.fromkeys(one.name for one in report.listeners)
    for name in names:
        same = [one for one in report.listeners if one.name == name]
        opens, closes, failures, lost = (
            sum(getattr(one, field) for one in same) for field in ("opens", "closes", "failures", "lost")
        )
        details = [amount(opens, "open"), f"{duration(sum(one.open_seconds for one in same))} in open"]
        details += [amount(failures, "failure")] * bool(failures) + [f"{lost:,} lost"] * bool(lost)
        rows.append((f"listener {name}", f"{opens - closes - lost:,} open", ", ".join(details)))
    for operator in report.operators:
        state = f"{operator.live:,} live, {operator.finished:,} finished" if operator.live else operator.state
        details = [f"{name}: {value}" for name, value in operator.progress.items()]
        details += [f"waits for {operator.waits_for}"] * bool(operator.waits_for)
        details += [f"{operator.failed:,} failed"] * bool(operator.failed)
        rows.append((f"operator {operator.name}", state, ", ".join(details)))
    stored = sum(one.outputs + one.blocks for one in report.partitions)
    if stored or report.released:
        size = data_size(sum(one.output_bytes + one.block_bytes for one in report.partitions))
        rows.append(("partitions", f"{stored:,} stored", f"{size}, {report.released:,} released"))
    return rows


class View(Protocol):
    """Where progress is shown."""

    def show(self, key: object, rows: list[Row]) -> None:
        """Shows the rows of one topology, instead of its earlier rows."""

    def end(self, key: object) -> None:
        """Leaves the last rows of a topology as they are."""


class _Terminal:
    """A terminal, or a file. All topologies share one display, because a terminal can have only one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: Live | None = None
        self._shown: dict[object, list[Row]] = {}
        self._active: set[object] = set()

    def show(self, key: object, rows: list[Row]) -> None:
        with self._lock:
            self._active.add(key)
            self._shown[key] = rows
            if self._live is None:
                self._live = Live(console=Console(stderr=True, highlight=False), auto_refresh=False)
                self._live.start()
            self._live.update(Group(*(table(_COLUMNS, one) for one in self._shown.values())), refresh=True)

    def end(self, key: object) -> None:
        with self._lock:
            self._active.discard(key)
            if not self._active:
                live, self._live = self._live, None
                self._shown.clear()
                if live is not None:
                    live.stop()


class _Notebook:
    """The output of a notebook's cell."""

    def __init__(self) -> None:
        self._handles: dict[object, Any] = {}

    def show(self, key: object, rows: list[Row]) -> None:
        from IPython.display import HTML, display

        content = HTML(html_table("", _COLUMNS, rows))
        if key in self._handles:
            self._handles[key].update(content)
        else:
            self._handles[key] = display(content, display_id=True)

    def end(self, key: object) -> None:
        self._handles.pop(key, None)


_TERMINAL: Final = _Terminal()
_NOTEBOOK: Final = _Notebook()


def current_view() -> View:
    """The view for this process: a notebook in a Jupyter kernel, otherwise the terminal."""
    with contextlib.suppress(Exception):
        if getattr(sys.modules["IPython"].get_ipython(), "kernel", None) is not None:
            return _NOTEBOOK
    return _TERMINAL


class Progress:
    """Shows the report of a topology every second until `stop`.

    It never raises an error. After an error, it stops showing the report.

    Args:
        report: Returns the current report. None is not shown.
        view: Where to show it.
    """

    def __init__(self, report: Callable[[], TopologyReport | None], view: View | None = None) -> None:
        self._report = report
        self._view = view or current_view()
        self._ended = threading.Event()
        #: Held while the view shows or ends. Nothing is shown after `_is_over` is set.
        self._lock = threading.Lock()
        self._is_over = self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="stagecrew-progress", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Shows the last report, and ends. Waits for at most two seconds. A second call has no effect.

        A report that arrives later is not shown.
        """
        self._ended.set()
        self._thread.join(_LAST_UPDATE)
        if self._thread.is_alive():  # in another thread, because a terminal may not accept output
            self._is_over = True
            threading.Thread(target=self._end, name="stagecrew-progress", daemon=True).start()

    def _end(self) -> None:
        with self._lock:
            self._is_over = True
            if not self._has_ended:
                self._has_ended = True
                with contextlib.suppress(Exception):
                    self._view.end(self)

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                self._show()
                self._ended.wait(_PERIOD)
            self._show()
        except Exception as error:
            _log.warning("the progress of a topology is no longer shown: %s", error)
        finally:
            self._end()

    def _show(self) -> None:
        if (report := self._report()) is None:
            return
        rows = progress_rows(report)
        with self._lock:
            if not self._is_over:
                self._view.show(self, rows)
