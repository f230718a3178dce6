"""`headrace groups`: list, describe, reset consumer groups. Driver; docs/cli.md has the page."""

import click

from headrace.client import path
from headrace.commands.asking import Broker, Json, asks, confirmed, moment, table


@click.group("groups")
def groups() -> None:
    """Consumer groups: who reads what, and how far behind. GROUP is a name, or VHOST|NAME."""


@groups.command("list")
@asks
def list_groups(broker: Broker) -> None:
    """List the groups of topics that the user may read."""
    broker.show(
        broker.get(path("consumer-groups")),
        rows="groups",
        columns={
            "group": "group",
            "vhost": "vhost",
            "state": "state",
            "generation": "generation",
            "members": "member_count",
            "lag": "lag",
            "topics": "topics",
        },
    )


@groups.command("describe")
@click.argument("group")
@asks
def describe_group(broker: Broker, group: str) -> None:
    """Members, assignment, offsets and lag of a group."""
    answer = broker.get(path("consumer-groups", group))
    fields = ("group", "vhost", "state", "generation", "lag")
    broker.describe(answer, dict(zip(fields, fields, strict=True)))
    if broker.as_json:
        return
    if answer["members"]:
        click.echo()
        table(
            answer["members"],
            {
                "member": "member_id",
                "name": "name",
                "user": "user",
                "partitions": lambda row: [f"{one['topic']}/{one['partition']}" for one in row["partitions"]],
            },
        )
    if answer["partitions"]:
        click.echo()
        table(
            answer["partitions"],
            {
                "topic": "topic",
                "partition": "partition",
                "first offset": "first_offset",
                "committed": "committed",
                "end offset": "end_offset",
                "lag": "lag",
                "lost": "lost",
                "member": "member_id",
            },
        )


@groups.command("reset")
@click.argument("group")
@click.option("--topic", required=True, help="Of this topic.")
@click.option("--partition", type=click.IntRange(0), help="Of this partition only.")
@click.option(
    "--to",
    type=click.Choice(["first", "last", "next"]),
    help="The oldest message; the newest once more; only what comes from now on.",
)
@click.option("--offset", type=click.IntRange(0), help="This offset.")
@click.option(
    "--time",
    "timestamp",
    metavar="TIME",
    callback=moment,
    help="The first message of this time: RFC 3339, or ms since 1970.",
)
@click.option("--force", is_flag=True, help="Also while members read: what they have read comes again.")
@click.option("--dry-run", is_flag=True, help="Only say what would be done.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@asks
def reset_group(broker: Broker, group: str, topic: str, dry_run: bool, yes: bool, **where: str | int | None) -> None:
    """Let a group go on elsewhere in a topic."""
    if sum(where[name] is not None for name in ("to", "offset", "timestamp")) != 1:
        raise click.UsageError("say where to go on: one of --to, --offset and --time")
    body: Json = {"topic": topic} | {name: value for name, value in where.items() if value is not None}
    url = path("consumer-groups", group, "offsets")
    if not dry_run and not yes:
        planned = broker.request("PUT", url, body=body | {"dry_run": True})
        if not broker.as_json:
            _moves(planned)
        confirmed(yes, f"reset group {group}?")
    answer = broker.request("PUT", url, body=body | {"dry_run": dry_run})
    if broker.as_json:
        broker.line(answer)
    elif dry_run:
        _moves(answer)
        click.echo("nothing was changed (--dry-run)")
    else:
        if yes:
            _moves(answer)
        click.echo(f"done; the group is at generation {answer['generation']}")


def _moves(answer: Json) -> None:
    table(answer["offsets"], {"topic": "topic", "partition": "partition", "was": "was", "becomes": "offset"})
