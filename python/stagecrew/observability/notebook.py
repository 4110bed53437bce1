"""How objects look in notebooks and consoles: one line for `repr`, and a small HTML table."""

from __future__ import annotations

import dataclasses
import datetime as dt
import html
from collections.abc import Iterable, Sequence
from typing import Any, Final

from rich.filesize import decimal

from stagecrew.observability.logs import harmless

__all__ = ["amount", "data_size", "duration", "field_table", "html_table", "one_line", "public_names"]

#: A table in a notebook shows at most this many rows.
_ROWS: Final = 50


def amount(number: int, one: str, many: str | None = None) -> str:
    """A number with its noun: "1 open", "2 opens"."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def data_size(number: int) -> str:
    """A size in bytes, such as "1.2 MB"."""
    return decimal(number)


def duration(seconds: float) -> str:
    """A duration that people can read: "4.2 ms", "1.53 s", "2 min 5 s"."""
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 60:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def one_line(kind: str, name: str, parts: Iterable[str]) -> str:
    """The `repr` of a report: "<topology 'enrich': closed, 2 opens>". Empty parts are left out."""
    return harmless(f"<{kind} {name!r}: {', '.join(filter(None, parts))}>")


def public_names(instance: object, *attributes: str) -> list[str]:
    """The names for `__dir__`: the public methods and properties of a class, and some attributes of the instance."""
    return sorted({name for name in dir(type(instance)) if not name.startswith("_")} | set(attributes))


def field_table(values: Sequence[Any]) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    """The columns and the rows of a table of dataclasses of one kind: a column for each field."""
    names = [field.name for field in dataclasses.fields(values[0])]
    rows = [tuple(getattr(one, name) for name in names) for one in values]
    return tuple(name.replace("_", " ") for name in names), rows


def html_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], limit: int | None = _ROWS) -> str:
    """A table in HTML without scripts or styles of its own. All texts are escaped.

    Args:
        title: The caption.
        columns: The headings. A column whose cells are all 0, None or empty is left out.
        rows: The cells.
        limit: How many rows are shown; None for all. The caption says how many there are.

    Returns:
        The HTML.
    """
    shown = [
        at for at in range(len(columns)) if not rows or any(row[at] not in (0, 0.0, None, "", {}, ()) for row in rows)
    ]
    if limit is not None and len(rows) > limit:
        title = f"{title} (the first {limit} of {len(rows):,})"
    parts = [f"<table><caption>{_escaped(title)}</caption>"]
    if rows:
        parts.append(f"<thead><tr>{''.join(f'<th>{_escaped(columns[at])}</th>' for at in shown)}</tr></thead>")
    parts.append("<tbody>")
    parts += [f"<tr>{''.join(f'<td>{_escaped(_cell(row[at]))}</td>' for at in shown)}</tr>" for row in rows[:limit]]
    return "".join([*parts, "</tbody></table>"])


def _cell(value: Any) -> str:
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float():
            return f"{value:.3g}"
        case dt.datetime():
            return value.astimezone().strftime("%Y-%m-%d %H:%M:%S")
        case dict():
            return ", ".join(f"{key}: {one}" for key, one in value.items())
    return str(value)


def _escaped(text: str) -> str:
    return html.escape(harmless(text))
