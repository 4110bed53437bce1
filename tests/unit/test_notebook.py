"""Objects have a short `repr` and an HTML table, for consoles and notebooks."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from stagecrew.observability.notebook import amount, data_size, duration, html_table, one_line, public_names
from stagecrew.session.reports import topology_frame
from support.report_samples import COMMIT, LISTENER, NONE, OPERATOR, PARTITIONS, REPLIES, TOPOLOGY


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (LISTENER, "<listener 'orders': executor 1, 2 opens, 1 close, 1 failure, 1 lost>"),
        (REPLIES, "<durations: 10, p50 1.0 ms, p99 4.0 ms, maximum 31.5 ms>"),
        (NONE, "<durations: none>"),
        (OPERATOR, "<operator 'splits/1': active, 2 live, 5 finished, waits for 1 more task>"),
        (PARTITIONS, "<partitions 'enrich-1': executor 1, 4 outputs (2.0 kB), 4 released (2.0 kB)>"),
        (
            TOPOLOGY,
            "<topology 'enrich': closed, 3 jobs, 2 opens, 1 close, 1 failure, 1 lost, 4 partitions released (2.0 kB), 1.50 s>",
        ),
        (COMMIT, "<commit 'day-1': 1,000 rows, staged by 2 tasks, 2.0 kB>"),
    ],
)
def test_a_report_is_one_line(value, text):
    """The `repr` of each report fits on one line, and says what matters."""
    assert repr(value) == text


@pytest.mark.parametrize("value", [LISTENER, REPLIES, NONE, OPERATOR, PARTITIONS, TOPOLOGY, COMMIT])
def test_a_report_has_a_table_that_is_well_formed(value):
    """The HTML of each report is well-formed, and texts of users are escaped."""
    text = value._repr_html_()
    ET.fromstring(f"<div>{text}</div>")
    assert "<b>" not in text


def test_a_table_leaves_out_columns_of_zeros_and_later_rows():
    """Columns whose cells are all 0 or empty are not shown. A long table says how many rows it has."""
    text = html_table("numbers", ("n", "zero", "none"), [(n + 1, 0, None) for n in range(60)])
    table = ET.fromstring(text)
    assert [cell.text for cell in table.iter("th")] == ["n"]
    assert len(list(table.iter("td"))) == 50
    assert table.find("caption").text == "numbers (the first 50 of 60)"


def test_a_table_without_rows_is_empty():
    """It has a caption and no heading."""
    assert html_table("none", ("n",), []) == "<table><caption>none</caption><tbody></tbody></table>"


def test_the_frame_has_a_row_for_each_topology():
    """Its columns have names that pandas users can write as attributes."""
    frame = topology_frame([TOPOLOGY, TOPOLOGY])
    assert list(frame.opens) == [2, 2]
    assert list(frame.open_seconds) == [0.5, 0.5]
    assert all(column.isidentifier() for column in frame.columns)
    assert list(topology_frame([]).columns) == list(frame.columns)


def test_amounts_sizes_and_durations_can_be_read_by_people():
    """Numbers have their unit."""
    assert (amount(1, "open"), amount(2000, "open"), amount(2, "entry", "entries")) == (
        "1 open", "2,000 opens", "2 entries",
    )  # fmt: skip
    assert (data_size(10), data_size(1_500_000)) == ("10 bytes", "1.5 MB")
    assert [duration(value) for value in (0.0042, 1.5, 125, 7300)] == ["4.2 ms", "1.50 s", "2 min 5 s", "2 h 1 min"]


def test_one_line_cannot_be_broken_by_a_name():
    """A name with a line break or an escape sequence stays on one line, and harmless."""
    assert one_line("topology", "a\nb\x1b[2J", ("closed", "")) == r"<topology 'a\nb\x1b[2J': closed>"


def test_only_public_names_are_listed():
    """`dir` shows the methods and properties of the class, and the named attributes."""

    class Thing:
        def __init__(self):
            self.inner = self.id = 1

        def method(self):
            pass

        def _private(self):
            pass

    assert public_names(Thing(), "id") == ["id", "method"]
