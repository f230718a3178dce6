"""`headrace publish`: messages from arguments, a file or lines. Driver.

Messages go in batches, each answered when it is committed; if the broker goes away in between, the last line says how
many were confirmed. Numbered messages (--producer-id) may be sent again from the start: none is published twice.
"""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

import click

from headrace.client import path
from headrace.commands.asking import Broker, Json, asks, milliseconds, moment, pairs, progress
from headrace.commands.messages import value_of
from headrace.core_log.errors import HeadraceError
from headrace.exits import BrokerAway
from headrace.redaction import printable

BATCH_COUNT = 1000
BATCH_BYTES = 1024 * 1024


@click.command("publish")
@click.argument("topic")
@click.argument("values", nargs=-1)
@click.option("--file", "file", type=click.Path(exists=True, path_type=Path), help="One message: what is in this file.")
@click.option(
    "--lines",
    type=click.File("rb"),
    help="One message a line of this file; - for stdin, which is also read when nothing else is given.",
)
@click.option("--key", default="", help="The key: decides the partition; of an exchange, the routing key.")
@click.option("--partition", type=click.IntRange(0), help="Of a created topic: into this partition.")
@click.option("--header", "headers", multiple=True, metavar="NAME=VALUE", help="A header; may be repeated.")
@click.option("--tag", "tags", multiple=True, help="A tag; may be repeated.")
@click.option("--content-type", help="What the values are: application/json.")
@click.option("--delay", metavar="DURATION", help="Deliver after so long: 90s, 2h, 30d.")
@click.option(
    "--at", "deliver_at", metavar="TIME", callback=moment, help="Deliver at this time: RFC 3339, or ms since 1970."
)
@click.option(
    "--schedule-id", help="The id to cancel or reschedule a delayed message by; the broker makes one if not given."
)
@click.option("--transient", is_flag=True, help="May be lost in a crash.")
@click.option("--producer-id", help="Number the messages under this name: sent again, none is published again.")
@click.option("--sequence", type=click.IntRange(0), default=0, help="The number of the first one, with --producer-id.")
@asks
def publish(
    broker: Broker,
    topic: str,
    values: tuple[str, ...],
    file: Path | None,
    lines: IO[bytes] | None,
    headers: tuple[str, ...],
    tags: tuple[str, ...],
    producer_id: str | None,
    sequence: int,
    transient: bool,
    delay: str | None,
    **more: str | int | None,
) -> None:
    """Publish to a topic, an exchange (exchange:NAME) or a queue (queue:NAME). Returns when everything is committed.

    Of messages that are to come later, their ids and times. With --json the results of the broker, one batch a line.
    """
    if sum((bool(values), file is not None, lines is not None)) > 1:
        raise click.UsageError("give values, --file or --lines, not several of them")
    common: Json = {name: value for name, value in more.items() if value not in (None, "")}
    common |= {"headers": pairs(headers, "--header")} if headers else {}
    common |= {"tags": list(tags)} if tags else {}
    common |= {"persistent": False} if transient else {}
    if delay is not None:
        common["delay_ms"] = milliseconds(delay, "--delay")
    bodies = _bodies(values, file, lines)
    messages = (common | value_of(body) for body in bodies)
    if producer_id is not None:
        messages = (
            one | {"producer_id": producer_id, "sequence": number} for number, one in enumerate(messages, sequence)
        )
    count = _send(broker, topic, messages)
    if not broker.as_json:
        click.echo(f"{count:,} message{'s' if count != 1 else ''} published")


def _bodies(values: tuple[str, ...], file: Path | None, lines: IO[bytes] | None) -> Iterator[bytes]:
    if file is not None:
        yield file.read_bytes()
    elif values:
        yield from (value.encode("utf-8", "surrogateescape") for value in values)
    else:
        for line in lines or sys.stdin.buffer:
            yield line.removesuffix(b"\n").removesuffix(b"\r")


def _send(broker: Broker, topic: str, messages: Iterable[Json]) -> int:
    count = 0
    url = path("topics", topic, "messages")
    with progress("publish") as bar:
        for batch in _batches(messages):
            try:
                answer = broker.request("POST", url, body=batch)
            except HeadraceError as error:
                if count or isinstance(error, BrokerAway):
                    error.add_note(f"{count:,} messages were confirmed before")
                raise
            count += len(batch)
            bar(len(batch))
            if broker.as_json:
                broker.line(answer)
            else:
                _tell_parked(answer["results"])
    return count


def _tell_parked(results: Iterable[Json]) -> None:
    """The ids by which what is to come later can be cancelled."""
    for one in results:
        if "schedule_id" in one:
            click.echo(f"message {printable(one['schedule_id'])} is due at {one['deliver_at']}")


def _batches(messages: Iterable[Json]) -> Iterator[list[Json]]:
    batch: list[Json] = []
    size = 0
    for message in messages:
        length = len(message["value"])
        if batch and (len(batch) == BATCH_COUNT or size + length > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(message)
        size += length
    if batch:
        yield batch
