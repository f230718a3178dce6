"""`headrace schedules`: messages that are published again and again. Driver; docs/cli.md has the page."""

from pathlib import Path

import click

from headrace.client import path
from headrace.commands.asking import Broker, Json, asks, confirmed, pairs
from headrace.commands.messages import marked, value_of, value_text

DEFAULT_VHOST = "/"


@click.group("schedules")
def schedules() -> None:
    """Schedules publish a message again and again, by a cron expression. NAME is in vhost /, or VHOST|NAME."""


def _public(row: Json) -> str:
    return str(row["name"]) if row["vhost"] == DEFAULT_VHOST else f"{row['vhost']}|{row['name']}"


@schedules.command("list")
@click.option("--vhost", help="Only of this vhost.")
@asks
def list_schedules(broker: Broker, vhost: str | None) -> None:
    """List schedules, with their next run."""
    broker.show(
        broker.get(path("schedules"), {"vhost": vhost}),
        rows="schedules",
        columns={
            "schedule": _public,
            "cron": "cron",
            "zone": "zone",
            "paused": "paused",
            "next run": "next_run",
            "last run": "last_run",
            "runs": "runs",
            "missed": "missed_runs",
            "failed": "failed_runs",
        },
    )


@schedules.command("describe")
@click.argument("name")
@asks
def describe_schedule(broker: Broker, name: str) -> None:
    """All that is known of a schedule, its message too."""
    answer = broker.get(path("schedules", name))
    broker.describe(
        answer,
        {
            "schedule": _public,
            **{field.replace("_", " "): field for field in answer if field not in ("name", "vhost", "message")},
            "exchange": lambda row: row["message"]["exchange"] or "amq.default",
            "key": lambda row: marked(row["message"]["key"], row["message"].get("key_encoding")),
            "headers": lambda row: row["message"].get("headers", {}),
            "properties": lambda row: row["message"].get("properties", {}),
            "tags": lambda row: row["message"].get("tags", []),
            "value": lambda row: value_text(row["message"]),
        },
    )


@schedules.command("set")
@click.argument("name")
@click.argument("value", required=False)
@click.option("--cron", required=True, help="Five fields, six with seconds, or @daily and the like.")
@click.option("--zone", default="UTC", show_default=True, help="Time zone of the IANA database: Europe/Berlin.")
@click.option(
    "--missed",
    type=click.Choice(["skip", "once", "all"]),
    default="skip",
    show_default=True,
    help="Runs that passed while the broker was down: none is made up for, one for all, or each.",
)
@click.option("--paused", is_flag=True, help="Do not run until it is resumed.")
@click.option("--exchange", help="Publish to this exchange.")
@click.option("--queue", help="Publish to this queue.")
@click.option("--key", default="", help="The routing key, with --exchange.")
@click.option("--file", "file", type=click.Path(exists=True, path_type=Path), help="The value: what is in this file.")
@click.option("--header", "headers", multiple=True, metavar="NAME=VALUE", help="A header; may be repeated.")
@click.option("--tag", "tags", multiple=True, help="A tag; may be repeated.")
@click.option("--content-type", help="What the value is: application/json.")
@click.option("--transient", is_flag=True, help="What it publishes may be lost in a crash.")
@asks
def set_schedule(
    broker: Broker,
    name: str,
    value: str | None,
    exchange: str | None,
    queue: str | None,
    key: str,
    file: Path | None,
    headers: tuple[str, ...],
    tags: tuple[str, ...],
    content_type: str | None,
    transient: bool,
    **when: str | bool,
) -> None:
    """Create a schedule, or change one: it runs as it says from now on."""
    if (exchange is None) == (queue is None):
        raise click.UsageError("say where to: --exchange or --queue")
    if queue is not None and key:
        raise click.UsageError("--key belongs to --exchange")
    if value is not None and file is not None:
        raise click.UsageError("give a value or --file, not both")
    body = (value or "").encode("utf-8", "surrogateescape") if file is None else file.read_bytes()
    where = {"exchange": exchange, "key": key} if queue is None else {"queue": queue}
    message: Json = where | value_of(body)
    message |= {"headers": pairs(headers, "--header"), "tags": list(tags), "persistent": not transient}
    message |= {} if content_type is None else {"content_type": content_type}
    answer = broker.request("PUT", path("schedules", name), body=when | {"message": message})
    broker.done(answer, f"schedule {name} {_next(answer)}")


@schedules.command("pause")
@click.argument("name")
@asks
def pause_schedule(broker: Broker, name: str) -> None:
    """Let a schedule rest until it is resumed."""
    broker.done(broker.request("POST", path("schedules", name, "pause")), f"schedule {name} is paused")


@schedules.command("resume")
@click.argument("name")
@asks
def resume_schedule(broker: Broker, name: str) -> None:
    """Let a paused schedule run again."""
    answer = broker.request("POST", path("schedules", name, "resume"))
    broker.done(answer, f"schedule {name} {_next(answer)}")


@schedules.command("run")
@click.argument("name")
@asks
def run_schedule(broker: Broker, name: str) -> None:
    """Publish a schedule's message once, now."""
    broker.done(broker.request("POST", path("schedules", name, "run")), f"schedule {name} has run")


@schedules.command("delete")
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@asks
def delete_schedule(broker: Broker, name: str, yes: bool) -> None:
    """Delete a schedule."""
    confirmed(yes, f"delete schedule {name}?")
    broker.request("DELETE", path("schedules", name))
    broker.done({"deleted": name}, f"schedule {name} deleted")


def _next(answer: Json) -> str:
    return "is paused" if answer["paused"] else f"runs next at {answer['next_run'] or 'no time'}"
