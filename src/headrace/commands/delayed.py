"""`headrace delayed`: what waits for its time: count, list, inspect, cancel, reschedule. Driver; docs/cli.md."""

import click

from headrace.client import path
from headrace.commands.asking import Broker, Json, asks, confirmed, milliseconds, moment, shown, size_text, table
from headrace.commands.messages import marked, value_text

PAGE = 500


@click.group("delayed")
def delayed() -> None:
    """Messages that wait for their time. ID is the one their publisher gave, or the broker's."""


@delayed.command("count")
@asks
def count_delayed(broker: Broker) -> None:
    """Count what is pending: in all, by what it is for, and by when it is due."""
    answer = broker.get(path("delayed"))
    broker.describe(answer, {"pending": "pending"})
    if broker.as_json:
        return
    if answer["targets"]:
        click.echo()
        table(answer["targets"], {"kind": "kind", "vhost": "vhost", "for": _target, "pending": "pending"})
    if answer["buckets"]:
        click.echo()
        table(
            answer["buckets"],
            {
                "bucket": "name",
                "due from": "start",
                "until": "end",
                "pending": "pending",
                "size": lambda row: size_text(row["bytes"]),
            },
        )


@delayed.command("list")
@click.option("--exchange", help="Only for this exchange; amq.default for the default one.")
@click.option("--queue", help="Only what returns to this queue (retries).")
@click.option("--group", help="Only what returns to this consumer group (retries).")
@click.option("--vhost", default="/", show_default=True, help="The vhost of --exchange, --queue or --group.")
@click.option("--key", help="Only with this routing key.")
@click.option("--tag", help="Only with this tag.")
@click.option(
    "--since", metavar="TIME", callback=moment, help="Only what is due from this time on: RFC 3339, or ms since 1970."
)
@click.option("--until", metavar="TIME", callback=moment, help="Only what is due before this time.")
@click.option("--limit", type=click.IntRange(1), default=100, show_default=True, help="So many at most.")
@asks
def list_delayed(
    broker: Broker,
    exchange: str | None,
    queue: str | None,
    group: str | None,
    vhost: str,
    since: str | None,
    limit: int,
    **more: str | None,
) -> None:
    """List pending messages, the next to be due first. With --json one a line."""
    named = {"publish": exchange, "retry": queue, "group": group}
    chosen = [(kind, name) for kind, name in named.items() if name is not None]
    if len(chosen) > 1:
        raise click.UsageError("only one of --exchange, --queue and --group can be given")
    kind, name = chosen[0] if chosen else (None, None)
    query: Json = {"vhost": vhost, "name": name, "kind": kind, "from": since} | more
    rows: list[Json] = []
    while len(rows) < limit:
        page = broker.get(path("delayed", "messages"), query | {"limit": min(limit - len(rows), PAGE)})
        rows += page["messages"]
        query["after"] = page["cursor"]
        if page["cursor"] is None:
            break
    if broker.as_json:
        for row in rows:
            broker.line(row)
    else:
        table(
            rows,
            {
                "due": "deliver_at",
                "id": lambda row: marked(row["id"], row.get("id_encoding")),
                "kind": "kind",
                "for": _target,
                "key": lambda row: marked(row["key"], row.get("key_encoding")),
                "tags": lambda row: row.get("tags", []),
                "value": lambda row: _short(value_text(row)),
            },
        )


@delayed.command("inspect")
@click.argument("id")
@asks
def inspect_delayed(broker: Broker, id: str) -> None:
    """All that is known of a pending message."""
    answer = broker.get(path("delayed", "messages", id))
    if broker.as_json:
        broker.line(answer)
        return
    for name, value in answer.items():
        if not name.endswith("encoding") and name not in ("key", "value"):
            click.echo(f"{name}: {shown(_target(answer) if name == 'name' else value)}")
    click.echo(f"key: {marked(answer['key'], answer.get('key_encoding'))}")
    click.echo(f"value: {value_text(answer)}")


@delayed.command("cancel")
@click.argument("id")
@click.option("--yes", is_flag=True, help="Do not ask.")
@asks
def cancel_delayed(broker: Broker, id: str, yes: bool) -> None:
    """Cancel a pending message: it will never be delivered. Exit status 1 if it was delivered or cancelled before."""
    confirmed(yes, f"cancel the message {id}?")
    broker.done(broker.request("DELETE", path("delayed", "messages", id)), f"message {id} cancelled")


@delayed.command("reschedule")
@click.argument("id")
@click.option("--delay", metavar="DURATION", help="So long from now: 90s, 2h, 30d.")
@click.option("--at", "deliver_at", metavar="TIME", callback=moment, help="At this time: RFC 3339, or ms since 1970.")
@asks
def reschedule_delayed(broker: Broker, id: str, delay: str | None, deliver_at: str | None) -> None:
    """Give a pending message another time."""
    if (delay is None) == (deliver_at is None):
        raise click.UsageError("say when: --delay or --at")
    body: Json = {"deliver_at": deliver_at} if delay is None else {"delay_ms": milliseconds(delay, "--delay")}
    answer = broker.request("PUT", path("delayed", "messages", id), body=body)
    broker.done(answer, f"message {id} is due at {answer['deliver_at']}")


def _target(row: Json) -> str:
    """By the name that --exchange takes."""
    return str(row["name"]) or "amq.default"


def _short(text: str, length: int = 60) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."
