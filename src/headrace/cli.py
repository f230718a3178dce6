"""The headrace command. Driver."""

import click

from headrace import __version__


@click.group()
@click.version_option(__version__)
def main() -> None:
    """A message broker: AMQP and MQTT doors on one commit log."""
