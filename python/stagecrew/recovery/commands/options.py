"""Options and output that the commands share."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from stagecrew.conf import parse_seconds
from stagecrew.observability.console import harmless

if TYPE_CHECKING:
    from stagecrew.recovery.jobs.store import Jobs

__all__ = [
    "console",
    "json_option",
    "open_places",
    "parse_age",
    "parse_pairs",
    "place_options",
    "say",
    "store_option",
    "work_option",
]

console = Console(highlight=False, soft_wrap=True)


def say(text: str) -> None:
    """Prints one line of text.

    The text can contain untrusted input, so its markup is not rendered, and its control characters are escaped.
    """
    console.print(harmless(text), markup=False)


class _Address(click.types.StringParamType):
    """A required address. If it is missing, the error message shows an example."""

    def __init__(self, example: str) -> None:
        self._example = example

    def get_missing_message(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        """See `StringParamType`."""
        return f"Set STAGECREW_{str(param.name).upper()} or pass --{param.name}, such as {self._example}"


store_option = click.option(
    "--store", envvar="STAGECREW_STORE", required=True, metavar="URL",
    type=_Address("sqlite:///var/lib/jobs.db (an absolute path) or zookeeper://host:2181/jobs"),
    help="The store: sqlite:///path or zookeeper://host:port,host:port/chroot. Default: STAGECREW_STORE.",
)  # fmt: skip
_state_option = click.option(
    "--state", envvar="STAGECREW_STATE", required=True, metavar="URI",
    type=_Address("/var/lib/states, an existing folder, or s3://bucket/folder"),
    help="The state storage: an existing folder, or a URI such as s3://bucket/folder. Default: STAGECREW_STATE.",
)  # fmt: skip
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for machines.")


work_option = click.option(
    "--work", type=click.Path(file_okay=False, path_type=Path), default=Path("stagecrew-work"), show_default=True,
    envvar="STAGECREW_WORK",
    help="The folder for the output of jobs, and for their files while they run. Default: STAGECREW_WORK.",
)  # fmt: skip


def place_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options `--store` and `--state`."""
    return store_option(_state_option(command))


def open_places(store: str, state: str) -> contextlib.AbstractContextManager[Jobs]:
    """Opens the jobs of a store and a state storage."""
    from stagecrew.recovery.jobs.store import open_jobs  # slow to import

    return open_jobs(store, state)


def parse_pairs(context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> dict[str, str]:
    """Parses the values of an option that can be repeated, each written as key=value."""
    found: dict[str, str] = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator or not key:
            raise click.BadParameter(f"{text!r} is not valid: write key=value", context, parameter)
        found[key] = value
    return found


def parse_age(context: click.Context, parameter: click.Parameter, text: str | None) -> float | None:
    """Parses an age into seconds. The unit is required, because Spark would read a bare 30 as milliseconds."""
    if text is None:
        return None
    if re.fullmatch(r"\d{1,9}[smhd]", text) is None:
        raise click.BadParameter(
            f"{text!r} is not a valid age: write a number and s, m, h or d, such as 30d", context, parameter
        )
    return parse_seconds(text)
