"""`headrace groups`: list, describe, configure, reset, delete consumer groups. Driver; docs/cli.md has the page."""

import click

from headrace.client import path
from headrace.commands.asking import Broker, Json, asks, confirmed, milliseconds, moment, table


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
    broker.describe(
        answer, dict(zip(fields, fields, strict=True)) | {"retry": _retry, "waiting for a retry": "waiting"}
    )
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


def _retry(answer: Json) -> str:
    settings = answer["settings"]
    if settings["retry_max"] is None:
        return "none"
    text = f"{settings['retry_max']} times, {settings['retry_backoff']}"
    if settings["retry_backoff"] != "levels":
        text += f" from {settings['retry_delay_ms']} ms"
    if settings["retry_backoff"] == "exponential":
        text += f" to {settings['retry_delay_max_ms']} ms"
    if settings["retry_jitter"]:
        text += ", with jitter"
    if settings["dead_letter_exchange"] is not None:
        text += f"; then to exchange {settings['dead_letter_exchange']}"
    return text


@groups.command("configure")
@click.argument("group")
@click.option("--retry-max", type=click.IntRange(0), help="Attempts after the first; 0: dead at the first failure.")
@click.option(
    "--retry-backoff", type=click.Choice(["fixed", "exponential", "levels"]), help="exponential if not given."
)
@click.option("--retry-delay", metavar="DURATION", help="The first wait (500ms, 2s, 1h); 1s unless given.")
@click.option("--retry-delay-max", metavar="DURATION", help="The longest wait of exponential; 1h unless given.")
@click.option("--retry-jitter", is_flag=True, help="Each wait is taken from its upper half by chance.")
@click.option("--dead-letter-exchange", metavar="EXCHANGE", help="For the dead; GROUP.dlq unless given.")
@click.option("--no-retry", is_flag=True, help="No retry policy any more.")
@asks
def configure_group(
    broker: Broker,
    group: str,
    retry_delay: str | None,
    retry_delay_max: str | None,
    no_retry: bool,
    **given: str | int | bool | None,
) -> None:
    """Set a group's retry policy: the whole of it. The group is made if it is not there."""
    if no_retry == (given["retry_max"] is not None):
        raise click.UsageError("give --retry-max, and what else the policy has, or --no-retry")
    body: Json = {name: value for name, value in given.items() if value is not None and value is not False}
    if retry_delay is not None:
        body["retry_delay_ms"] = milliseconds(retry_delay, "--retry-delay")
    if retry_delay_max is not None:
        body["retry_delay_max_ms"] = milliseconds(retry_delay_max, "--retry-delay-max")
    answer = broker.request("PUT", path("consumer-groups", group), body=body)
    if broker.as_json:
        broker.line(answer)
    else:
        click.echo(f"retry: {_retry({'settings': answer})}")


@groups.command("delete")
@click.argument("group")
@click.option("--yes", is_flag=True, help="Do not ask.")
@asks
def delete_group(broker: Broker, group: str, yes: bool) -> None:
    """Delete a group without members: its offsets, its settings and what waits to come back to it."""
    waiting = broker.get(path("consumer-groups", group))["waiting"]
    confirmed(yes, f"delete group {group}, its offsets and {waiting} messages that wait for another attempt?")
    broker.request("DELETE", path("consumer-groups", group))
    if not broker.as_json:
        click.echo(f"group {group} is deleted")


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
