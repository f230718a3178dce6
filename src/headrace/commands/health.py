"""`headrace health`: whether a broker is alive and ready for clients. Driver."""

import sys

import click

from headrace.client import path
from headrace.commands.asking import Broker, asks


@click.command("health")
@asks
def health(broker: Broker) -> None:
    """Say how a broker is. Exit status 0: ready for clients; 1: it lives and publishers wait, or it stops; 69: away."""
    answer = broker.get(path("health"))
    broker.describe(answer, {"status": "status", "alarms": "alarms", "url": lambda _row: broker.client.url})
    if answer["status"] != "ok":
        sys.exit(1)
