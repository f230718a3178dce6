"""`headrace topics`: list, create, configure, grow, delete, describe. Driver; docs/cli.md has the page."""

import click

from headrace.client import path
from headrace.commands.asking import Broker, Json, asks, confirmed, size_text, table
from headrace.kinds import Milliseconds, Size

PAGE = 1000

# `default` gives a setting back to the node's configuration.
DEFAULT = "default"


settings = (
    click.option(
        "--durability",
        type=click.Choice(["sync", "interval", "os", DEFAULT]),
        help="When a message counts as committed.",
    ),
    click.option("--compression", type=click.Choice(["none", "lz4", "auto", DEFAULT]), help="How batches are stored."),
    click.option("--retention", metavar="DURATION", help="Age at which messages may go: 7d, 12h."),
    click.option("--retention-bytes", metavar="SIZE", help="Size of a partition: 10GiB."),
)


def _with_settings(command: click.decorators.FC) -> click.decorators.FC:
    for option in reversed(settings):
        command = option(command)
    return command


@click.group("topics")
def topics() -> None:
    """Topics: created ones, and the streams of exchanges and queues.

    TOPIC is a name, or says more: exchange:NAME, queue:NAME, VHOST|NAME.
    """


@topics.command("list")
@click.option("--vhost", help="Only of this vhost.")
@click.option("--kind", type=click.Choice(["topic", "exchange", "queue"]), help="Only of this kind.")
@asks
def list_topics(broker: Broker, vhost: str | None, kind: str | None) -> None:
    """List topics that the user may read or configure."""
    found: list[Json] = []
    query = {"vhost": vhost, "kind": kind, "limit": PAGE, "after": ""}
    while True:
        page = broker.get(path("topics"), query)
        found += page["topics"]
        if not page["more"]:
            break
        query["after"] = page["topics"][-1]["topic"]
    broker.show(
        {"topics": found},
        rows="topics",
        columns={"topic": "topic", "kind": "kind", "vhost": "vhost", "partitions": "partitions"},
    )


@topics.command("describe")
@click.argument("topic")
@asks
def describe_topic(broker: Broker, topic: str) -> None:
    """Settings, partitions and offsets of a topic."""
    _describe(broker, broker.get(path("topics", topic)))


@topics.command("create")
@click.argument("name")
@click.option("--vhost", default="/", show_default=True, help="In this vhost.")
@click.option("--partitions", type=click.IntRange(1), default=1, show_default=True, help="How many partitions.")
@_with_settings
@asks
def create_topic(broker: Broker, name: str, vhost: str, partitions: int, **kept: str | None) -> None:
    """Create a topic."""
    body: Json = {"name": name, "vhost": vhost, "partitions": partitions} | _asked(kept)
    answer = broker.request("POST", path("topics"), body=body)
    broker.done(answer, f"topic {answer['topic']} created, {_partitions(answer['partitions'])}")


@topics.command("configure")
@click.argument("topic")
@_with_settings
@asks
def configure_topic(broker: Broker, topic: str, **kept: str | None) -> None:
    """Change how a created topic is kept. `default` gives a setting back to the node's configuration."""
    body = _asked(kept)
    if not body:
        raise click.UsageError("nothing to change: give one of the options")
    answer = broker.request("PATCH", path("topics", topic), body=body)
    if broker.as_json:
        broker.line(answer)
    else:
        _describe(broker, answer)


@topics.command("grow")
@click.argument("topic")
@click.argument("partitions", type=click.IntRange(1))
@asks
def grow_topic(broker: Broker, topic: str, partitions: int) -> None:
    """Give a created topic more partitions. Keys are dealt out anew from then on; what is there stays where it is."""
    answer = broker.request("PATCH", path("topics", topic), body={"partitions": partitions})
    broker.done(answer, f"topic {answer['topic']} has {_partitions(answer['partitions'])}")


@topics.command("delete")
@click.argument("topic")
@click.option("--yes", is_flag=True, help="Do not ask.")
@asks
def delete_topic(broker: Broker, topic: str, yes: bool) -> None:
    """Delete a created topic with all its messages."""
    confirmed(yes, f"delete topic {topic} with all its messages?")
    broker.request("DELETE", path("topics", topic))
    broker.done({"deleted": topic}, f"topic {topic} deleted")


def _asked(kept: dict[str, str | None]) -> Json:
    """What was given, in the API's words; null is what gives a setting back."""
    body: Json = {name: text for name, text in kept.items() if text is not None}
    for option, name, kind in (
        ("retention", "retention_ms", Milliseconds(1)),
        ("retention_bytes", "retention_bytes", Size(1)),
    ):
        if (text := body.pop(option, DEFAULT)) != DEFAULT:
            try:
                body[name] = kind.read(text)
            except ValueError:
                hint = f"--{option.replace('_', '-')}"
                raise click.BadParameter(f"expected {kind.expected}, or {DEFAULT}", param_hint=hint) from None
        elif kept[option] is not None:
            body[name] = None
    return {name: None if value == DEFAULT else value for name, value in body.items()}


def _partitions(count: int) -> str:
    return f"{count:,} partition" + ("s" if count != 1 else "")


def _describe(broker: Broker, answer: Json) -> None:
    broker.describe(
        answer,
        {
            "topic": "topic",
            "kind": "kind",
            "vhost": "vhost",
            "stream": "stream",
            **{
                name.replace("_", " "): lambda row, name=name: row["settings"][name]  # type: ignore[misc]
                for name in ("durability", "compression", "retention_ms", "retention_bytes")
            },
        },
    )
    if not broker.as_json:
        click.echo()
        table(
            answer["partition_list"],
            {
                "partition": "partition",
                "first offset": "first_offset",
                "end offset": "end_offset",
                "size": lambda row: size_text(row["byte_count"]),
            },
        )
