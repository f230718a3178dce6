"""The headrace command: its subcommands, and the border where errors become one line and an exit status. Driver.

A subcommand is one line of COMMANDS and one file of commands/; it is imported when it is called, so that
`headrace --version` and a mistyped name answer at once.
"""

import importlib
import logging
import os
import sys

import click

from headrace import __version__
from headrace.exits import EXPECTED, causes, exit_status, report
from headrace.logs import configure_logging
from headrace.redaction import printable, redacted_text

_log = logging.getLogger(__name__)

COMMANDS = {
    "audit": "headrace.commands.audit:audit",
    "cluster": "headrace.commands.cluster:cluster",
    "delayed": "headrace.commands.delayed:delayed",
    "dlq": "headrace.commands.dead_letters:dlq",
    "doctor": "headrace.commands.doctor:doctor",
    "groups": "headrace.commands.groups:groups",
    "health": "headrace.commands.health:health",
    "log": "headrace.commands.log:log",
    "peek": "headrace.commands.tail:peek",
    "publish": "headrace.commands.publish:publish",
    "queues": "headrace.commands.queues:queues",
    "redrive": "headrace.commands.dead_letters:redrive",
    "redrives": "headrace.commands.dead_letters:redrives",
    "schedules": "headrace.commands.schedules:schedules",
    "serve": "headrace.commands.serve:serve",
    "spark": "headrace.commands.spark:spark",
    "tail": "headrace.commands.tail:tail",
    "topics": "headrace.commands.topics:topics",
}


class Commands(click.Group):
    """The group whose members are imported by name when asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command


@click.group("headrace", cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="headrace")
def commands() -> None:
    """A message broker: AMQP and MQTT doors on one commit log."""


def main() -> None:
    if not __debug__:
        click.echo("headrace: refuses to run under python -O: its assertions guard the data", err=True)
        sys.exit(2)
    configure_logging("warning", "human")
    failures: list[BaseException] = []
    unexpected = False
    try:
        commands()
    except* EXPECTED as group:
        failures = causes(group)
    except* Exception as group:
        unexpected = True
        _log.critical("unexpected error, please report it", exc_info=group)
    for line in (line for failure in failures for line in report(failure)):
        click.echo(f"headrace: {printable(redacted_text(line))}", err=True)
    sys.exit(os.EX_SOFTWARE if unexpected else exit_status(failures[0]) if failures else 0)
