"""`headrace tail` and `headrace peek`: messages of a topic, as they come or from a place on. Driver.

Both only look: nothing is taken away, no group moves. Of several partitions all are asked in turn, and one of them is
waited at for a moment when none has anything.
"""

from collections.abc import Iterator
from typing import NamedTuple

import click
from click.core import ParameterSource

from headrace.client import Query, path
from headrace.commands.asking import Broker, Json, asks, moment
from headrace.commands.messages import message_line, message_lines

WAIT_MS = 20_000
# With several partitions, how long one is waited at while others may get something.
TURN_WAIT_MS = 250
PAGE = 500


class Cursor:
    """Where one partition is read next."""

    def __init__(self, broker: Broker, topic: str, partition: int, query: Query) -> None:
        self._broker = broker
        self._path = path("topics", topic, "partitions", partition, "messages")
        # Of the first request; afterwards the offset decides.
        self._query = dict(query)
        self.at_end = False

    def read(self, limit: int, wait_ms: int) -> list[Json]:
        query = self._query | {"limit": limit, "wait_ms": wait_ms}
        page = self._broker.get(self._path, query, wait_s=wait_ms / 1000)
        self._query.pop("timestamp", None)
        self._query["offset"] = page["next_offset"]
        self.at_end = page["next_offset"] >= page["end_offset"]
        messages: list[Json] = page["messages"]
        return messages


def _read(cursors: list[Cursor], limit: int | None, *, follow: bool) -> Iterator[Json]:
    """Messages of all partitions until there are so many, or (not following) no more."""
    left = limit
    turn = 0
    while left is None or left > 0:
        came = False
        for cursor in cursors:
            if cursor.at_end and not follow:
                continue
            for message in cursor.read(PAGE if left is None else min(left, PAGE), 0):
                came = True
                yield message
                left = None if left is None else left - 1
            if left == 0:
                return
        if came or not all(cursor.at_end for cursor in cursors):
            continue
        if not follow:
            return
        turn += 1
        wait_ms = WAIT_MS if len(cursors) == 1 else TURN_WAIT_MS
        for message in cursors[turn % len(cursors)].read(PAGE if left is None else min(left, PAGE), wait_ms):
            yield message
            left = None if left is None else left - 1


class Beginning(NamedTuple):
    """Where reading begins: at the end, a time, an offset (negative: so many before the end), or the oldest."""

    at_end: bool = False
    timestamp: str | None = None
    offset: int | None = None


def _beginning(start: str, timestamp: str | None) -> Beginning:
    if timestamp is not None:
        if click.get_current_context().get_parameter_source("start") is not ParameterSource.DEFAULT:
            raise click.UsageError("--from and --since cannot both be given")
        return Beginning(timestamp=timestamp)
    if start in ("first", "next"):
        return Beginning(at_end=start == "next")
    try:
        return Beginning(offset=int(start))
    except ValueError:
        raise click.BadParameter("expected first, next, an offset, or -N", param_hint="--from") from None


def _opened(
    broker: Broker, topic: str, partition: int | None, beginning: Beginning, expression: str | None
) -> tuple[str, list[Cursor]]:
    """The topic's full name, and its partitions."""
    found = broker.get(path("topics", topic))
    numbers = [one["partition"] for one in found["partition_list"] if partition in (None, one["partition"])]
    if not numbers:
        raise click.BadParameter(f"{topic} has {found['partitions']} partitions", param_hint="--partition")
    ends = {one["partition"]: one["end_offset"] for one in found["partition_list"]}
    query = {"timestamp": beginning.timestamp, "offset": beginning.offset, "filter": expression}
    return found["topic"], [
        Cursor(broker, topic, number, query | ({"offset": ends[number]} if beginning.at_end else {}))
        for number in numbers
    ]


filter_option = click.option("--filter", "expression", help="Tag expression: 'eu || (vip && !test)'.")
partition_option = click.option("--partition", type=click.IntRange(0), help="Only this partition.")
since_option = click.option(
    "--since", "timestamp", metavar="TIME", callback=moment, help="From this time on: RFC 3339, or ms since 1970."
)


@click.command("tail")
@click.argument("topic")
@partition_option
@click.option(
    "--from",
    "start",
    default="next",
    show_default=True,
    help="first, next, an offset, or -N: the last N of each partition.",
)
@since_option
@filter_option
@click.option("--limit", type=click.IntRange(1), help="End after so many messages.")
@asks
def tail(
    broker: Broker,
    topic: str,
    partition: int | None,
    start: str,
    timestamp: str | None,
    expression: str | None,
    limit: int | None,
) -> None:
    """Follow a topic: print messages as they come, until interrupted. With --json one message a line."""
    name, cursors = _opened(broker, topic, partition, _beginning(start, timestamp), expression)
    try:
        for message in _read(cursors, limit, follow=True):
            if broker.as_json:
                broker.line({"topic": name} | message)
            else:
                click.echo(message_line(name, message))
    except KeyboardInterrupt:
        return


@click.command("peek")
@click.argument("topic")
@partition_option
@click.option(
    "--from", "start", default="first", show_default=True, help="first, an offset, or -N: the last N of each partition."
)
@since_option
@filter_option
@click.option("--count", type=click.IntRange(1), default=1, show_default=True, help="So many messages.")
@asks
def peek(
    broker: Broker,
    topic: str,
    partition: int | None,
    start: str,
    timestamp: str | None,
    expression: str | None,
    count: int,
) -> None:
    """Show messages of a topic with all that is known of them. With --json one message a line."""
    name, cursors = _opened(broker, topic, partition, _beginning(start, timestamp), expression)
    for message in _read(cursors, count, follow=False):
        if broker.as_json:
            broker.line({"topic": name} | message)
        else:
            for line in message_lines(name, message):
                click.echo(line)
