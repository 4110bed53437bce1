"""Configuration keys: parsing of values in Spark's syntax, the table for the documentation, and misspelt keys."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagecrew.conf import KEYS, PLUGIN, closest, parse_bytes, parse_seconds, table
from stagecrew.errors import ConfigurationError

PARSERS = {"duration": parse_seconds, "bytes": parse_bytes, "count": int}
PARSERS["boolean"] = {"true": True, "false": False}.__getitem__
PARSERS |= dict.fromkeys(("names", "class", "classes", "choice"), str)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *[("0s", 0.0), ("90s", 90.0), ("1500ms", 1.5), ("2m", 120.0), ("2min", 120.0), ("1h", 3600.0), ("1d", 86400.0)],
        *[("250", 0.25), (" 5s ", 5.0), ("5 s", 5.0)],
    ],
)
def test_durations_are_parsed_as_in_spark(text, seconds):
    """A duration can have any of Spark's units, and blanks around it. A number without a unit is in milliseconds."""
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", " ", "s", "-1s", "1.5s", "1 year", "5ss", "1s 2s", "0x10", "five", "5s\n5s"])
def test_an_invalid_duration_is_refused(text):
    """The error quotes the text and shows the right form."""
    with pytest.raises(
        ConfigurationError, match=r"is not a duration; write a number with a unit \(ms, s, m, h, d\)"
    ) as raised:
        parse_seconds(text)
    assert repr(text) in str(raised.value)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *[("0", 0), ("17", 17), ("17b", 17), ("1k", 1024), ("1kb", 1024), ("64m", 64 << 20), ("64MB", 64 << 20)],
        *[("2g", 2 << 30), ("1T", 1 << 40), (" 64m ", 64 << 20)],
    ],
)
def test_sizes_are_parsed_as_in_spark(text, size):
    """A size can have any of Spark's units, in lower or upper case. A number without a unit is in bytes."""
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "m", "-1m", "1.5m", "64 megabytes", "64mm", "1m1m", "many"])
def test_an_invalid_size_is_refused(text):
    """The error quotes the text and shows the right form."""
    with pytest.raises(ConfigurationError, match=r"is not a size; write a number with a unit \(k, m, g\)") as raised:
        parse_bytes(text)
    assert repr(text) in str(raised.value)


@given(text=st.text(max_size=12))
def test_any_text_is_a_value_or_a_configuration_error(text):
    """Any text either is parsed as a value or raises ConfigurationError, never any other exception."""
    for parse in (parse_seconds, parse_bytes):
        with contextlib.suppress(ConfigurationError):
            assert parse(text) >= 0


def test_every_key_has_our_prefix_a_description_and_a_valid_default():
    """Names are unique, types are known, and each default parses as its type."""
    names = [key.name for key in KEYS]
    assert len(set(names)) == len(names)
    for key in KEYS:
        assert key.name.startswith("spark.stagecrew.")
        assert key.doc.endswith(".")
        assert key.doc[0].isupper()
        PARSERS[key.type](key.default)


def test_the_table_lists_each_key_once():
    """Each row has the key's type, default and description. No cell breaks the table."""
    head, line, *rows = table().splitlines()
    assert head.count("|") == line.count("|") == 5
    assert table().endswith("|\n")
    assert len(rows) == len(KEYS)
    for key, row in zip(KEYS, rows, strict=True):
        assert [cell.strip() for cell in row.strip("|").split("|")] == [
            f"`{key.name}`",
            key.type,
            f"`{key.default}`" if key.default else "",
            key.doc,
        ]


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("spark.stagecrew.listener", "spark.stagecrew.listeners"),
        ("spark.stagecrew.open.timout", "spark.stagecrew.open.timeout"),
        ("spark.stagecrew.closeTimeout", "spark.stagecrew.close.timeout"),
        ("stagecrew.jvmlisteners", "spark.stagecrew.jvmListeners"),
        ("xyz", None),
        ("", None),
    ],
)
def test_the_closest_key_is_suggested_for_a_misspelt_one(wrong, right):
    """For a misspelt key, the closest key is suggested. For an unrelated text, none is."""
    assert closest(wrong) == right


def test_each_key_is_closest_to_itself():
    """For a correct key, the key itself is suggested."""
    assert [closest(key.name) for key in KEYS] == [key.name for key in KEYS]


def test_the_plugin_keeps_its_class_name():
    """Configurations and event logs contain this name."""
    assert PLUGIN == "stagecrew.StagecrewPlugin"
