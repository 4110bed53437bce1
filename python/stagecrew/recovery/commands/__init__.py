"""The commands that submit jobs, run them and show them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagecrew.recovery.commands.driver import driver
from stagecrew.recovery.commands.jobs import cancel, list_jobs, result
from stagecrew.recovery.commands.logs import logs
from stagecrew.recovery.commands.maintenance import leader, sweep
from stagecrew.recovery.commands.submit import submit

if TYPE_CHECKING:
    import click

__all__ = ["add_to"]


def add_to(group: click.Group) -> None:
    """Adds the commands to the group."""
    for command in (submit, driver, list_jobs, logs, leader, cancel, result, sweep):
        group.add_command(command)
