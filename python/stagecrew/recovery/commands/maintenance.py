"""`stagecrew leader` and `stagecrew sweep`."""

from __future__ import annotations

import contextlib
import json

import click

from stagecrew.recovery.commands.options import console, json_option, open_places, place_options, say, store_option

__all__ = ["leader", "sweep"]


@click.command()
@store_option
@click.option("--state", hidden=True, expose_value=False)
@json_option
@click.pass_context
def leader(context: click.Context, store: str, as_json: bool) -> None:
    """Show the leading driver: its term, host and process. The exit code is 1 if no driver leads.

    This reads only the store, so it works while the state storage is unavailable.
    """
    from stagecrew.recovery.leadership.fencing import leader_of
    from stagecrew.recovery.stores import open_store

    with contextlib.closing(open_store(store)) as session:
        found = leader_of(session)
    if as_json:
        click.echo(json.dumps(None if found is None else {"term": found.term, "host": found.host, "pid": found.pid}))
    elif found is None:
        console.print("no driver leads: start `stagecrew driver`")
    else:
        say(f"term {found.term}: process {found.pid} on {found.host}")
    context.exit(1 if found is None else 0)


@click.command()
@place_options
@click.option(
    "--grace", type=click.FloatRange(min=0), default=3600.0, show_default=True, metavar="SECONDS",
    help="Keep states that are younger than this.",
)  # fmt: skip
@json_option
@click.pass_context
def sweep(context: click.Context, store: str, state: str, grace: float, as_json: bool) -> None:
    """Delete states that nothing refers to. They were left by processes that died during a write.

    This is safe while drivers and submitters are running. The exit code is 1 if something could not be checked or
    deleted.
    """
    with open_places(store, state) as jobs:
        found = jobs.sweep(grace)
    if as_json:
        click.echo(
            json.dumps({"kept": found.kept, "removed": found.removed, "bytes": found.bytes, "failed": found.failed})
        )
    else:
        say(f"{found.removed} states deleted, {found.bytes} bytes; {found.kept} kept")
        for name, reason in found.failed.items():
            say(f"{name}: {reason}")
    context.exit(1 if found.failed else 0)
