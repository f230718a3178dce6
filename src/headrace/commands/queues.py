"""`headrace queues`: list, describe, peek, rewind, purge, delete. Driver; docs/cli.md has the page."""

import click

from headrace.client import path
from headrace.commands.asking import Broker, Json, asks, confirmed, moment, table
from headrace.commands.messages import message_lines

PAGE = 1000
DEFAULT_VHOST = "/"


@click.group("queues")
def queues() -> None:
    """Queues. QUEUE is a name in vhost /, or VHOST|NAME."""


def _public(row: Json) -> str:
    return str(row["name"]) if row["vhost"] == DEFAULT_VHOST else f"{row['vhost']}|{row['name']}"


@queues.command("list")
@click.option("--vhost", help="Only of this vhost.")
@asks
def list_queues(broker: Broker, vhost: str | None) -> None:
    """List queues that the user may read or configure."""
    found: list[Json] = []
    query = {"vhost": vhost, "limit": PAGE, "after": ""}
    while True:
        page = broker.get(path("queues"), query)
        found += page["queues"]
        if not page["more"]:
            break
        query["after"] = _public(page["queues"][-1])
    columns = ("type", "state", "ready", "unacked", "consumers", "policy")
    broker.show({"queues": found}, rows="queues", columns={"queue": _public} | dict(zip(columns, columns, strict=True)))


@queues.command("describe")
@click.argument("queue")
@asks
def describe_queue(broker: Broker, queue: str) -> None:
    """Counts, arguments, policy and bindings of a queue."""
    answer = broker.get(path("queues", queue))
    fields = [name for name in answer if name not in ("name", "vhost", "bindings")]
    broker.describe(answer, {"queue": _public} | {name.replace("_", " "): name for name in fields})
    if answer["bindings"] and not broker.as_json:
        click.echo()
        table(answer["bindings"], {"exchange": "source", "routing key": "routing_key", "arguments": "arguments"})


@queues.command("peek")
@click.argument("queue")
@click.option("--count", type=click.IntRange(1, 1000), default=1, show_default=True, help="So many messages.")
@click.option("--offset", type=int, help="From this number of the queue's on, done with or not; -N: the last N.")
@asks
def peek_queue(broker: Broker, queue: str, count: int, offset: int | None) -> None:
    """Look at messages without taking them: those that are ready, in the order in which consumers will get them.

    With --json one message a line.
    """
    answer = broker.get(path("queues", queue, "messages"), {"limit": count, "offset": offset})
    for message in answer["messages"]:
        if broker.as_json:
            broker.line(message)
        else:
            for line in message_lines(queue, message):
                click.echo(line)


@queues.command("rewind")
@click.argument("queue")
@click.option("--offset", type=int, help="To this number of the queue's; -N: the last N.")
@click.option(
    "--time",
    "timestamp",
    metavar="TIME",
    callback=moment,
    help="To the first message of this time: RFC 3339, or ms since 1970.",
)
@click.option("--yes", is_flag=True, help="Do not ask.")
@asks
def rewind_queue(broker: Broker, queue: str, offset: int | None, timestamp: str | None, yes: bool) -> None:
    """Make what a queue received from some place on ready once more, acknowledged or not."""
    if (offset is None) == (timestamp is None):
        raise click.UsageError("say where to: --offset or --time")
    confirmed(yes, f"rewind queue {queue}? Its consumers get messages again that they have acknowledged.")
    body = {"offset": offset} if timestamp is None else {"timestamp": timestamp}
    answer = broker.request("POST", path("queues", queue, "rewind"), body=body)
    broker.done(answer, f"queue {queue} rewound to {answer['offset']}: {_messages(answer['ready'])} ready")


@queues.command("purge")
@click.argument("queue")
@click.option("--yes", is_flag=True, help="Do not ask.")
@asks
def purge_queue(broker: Broker, queue: str, yes: bool) -> None:
    """Settle everything that is ready in a queue; what consumers hold stays with them."""
    confirmed(yes, f"purge queue {queue}?")
    answer = broker.request("DELETE", path("queues", queue, "messages"))
    broker.done(answer, f"{_messages(answer['purged'])} purged")


@queues.command("delete")
@click.argument("queue")
@click.option("--if-unused", is_flag=True, help="Not while it has consumers.")
@click.option("--if-empty", is_flag=True, help="Not while messages are ready.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@asks
def delete_queue(broker: Broker, queue: str, if_unused: bool, if_empty: bool, yes: bool) -> None:
    """Delete a queue with its messages."""
    confirmed(yes, f"delete queue {queue} with its messages?")
    broker.request("DELETE", path("queues", queue), query={"if_unused": if_unused, "if_empty": if_empty})
    broker.done({"deleted": queue}, f"queue {queue} deleted")


def _messages(count: int) -> str:
    return f"{count:,} message{'s' if count != 1 else ''}"
