"""`headrace dlq` and `headrace redrive`: look at dead letters, send them back. Driver; docs/cli.md has the page."""

import time
from collections.abc import Callable
from typing import Any

import click

from headrace.client import path
from headrace.commands.asking import Broker, Json, asks, confirmed, milliseconds, progress, table

POLL_S = 0.5


def _choosing(command: Callable[..., None]) -> Callable[..., None]:
    """The options by which dead letters are chosen."""
    for option in reversed(
        (
            click.option("--reason", help="Why they died: rejected, expired, maxlen, delivery_limit, unmatched."),
            click.option("--died-in", help="The queue they died in."),
            click.option("--key", help="The routing key they were published with."),
            click.option("--filter", "expression", help="A tag expression, as in docs/filtering.md."),
            click.option("--older-than", help="Died longer ago than this: 90s, 2h, 30d."),
            click.option("--newer-than", help="Died within this time: 90s, 2h, 30d."),
        )
    ):
        command = option(command)
    return command


def _chosen(
    reason: str | None,
    died_in: str | None,
    key: str | None,
    expression: str | None,
    older_than: str | None,
    newer_than: str | None,
) -> Json:
    now_ms = int(time.time() * 1000)
    found = {
        "reason": reason,
        "died_in": died_in,
        "key": key,
        "filter": expression,
        "died_before": None if older_than is None else str(now_ms - milliseconds(older_than, "--older-than")),
        "died_after": None if newer_than is None else str(now_ms - milliseconds(newer_than, "--newer-than")),
    }
    return {name: value for name, value in found.items() if value is not None}


@click.group("dlq")
def dlq() -> None:
    """Dead letters. QUEUE is the queue that holds them, such as orders.dlq, or VHOST|NAME."""


@dlq.command("list")
@click.argument("queue")
@_choosing
@click.option("--after", help="Those behind the one with this id.")
@click.option("--limit", type=click.IntRange(1, 1000), default=100, show_default=True, help="At most so many.")
@asks
def list_dead_letters(broker: Broker, queue: str, after: str | None, limit: int, **chosen: str | None) -> None:
    """List dead letters: where, when and why each died."""
    query: Json = _chosen(**chosen) | {"limit": limit} | ({} if after is None else {"after": after})
    answer = broker.get(path("queues", queue, "dead-letters"), query)
    broker.show(
        answer,
        rows="dead_letters",
        columns={
            "id": "id",
            "died in": "died_in",
            "reason": "reason",
            "died at": "died_at",
            "attempts": "attempts",
            "key": lambda row: row["message"]["key"],
            "tags": lambda row: row["message"].get("tags", []),
            "value": lambda row: row["message"]["value"][:60],
        },
    )
    if answer["more"] and not broker.as_json:
        click.echo(f"there are more: --after {answer['dead_letters'][-1]['id']}", err=True)


@click.command("redrive")
@click.argument("queue")
@_choosing
@click.option("--id", "ids", multiple=True, help="This one only; may be given several times.")
@click.option("--to", help="Send them to this queue, not to the one each died in.")
@click.option("--rate", type=click.FloatRange(0, min_open=True), help="At most so many a second.")
@click.option("--limit", type=click.IntRange(1), help="At most so many.")
@click.option("--dry-run", is_flag=True, help="Only say what would be done.")
@click.option("--no-wait", is_flag=True, help="Do not wait for its end; `headrace redrives` shows how far it is.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@asks
def redrive(
    broker: Broker,
    queue: str,
    ids: tuple[str, ...],
    to: str | None,
    rate: float | None,
    limit: int | None,
    dry_run: bool,
    no_wait: bool,
    yes: bool,
    **chosen: str | None,
) -> None:
    """Send dead letters of QUEUE back to where they died, each exactly once."""
    asked = {"ids": list(ids) or None, "to": to, "rate": rate, "limit": limit}
    body: Json = {"queue": queue, **_chosen(**chosen)} | {key: one for key, one in asked.items() if one is not None}
    url = path("redrives")
    if dry_run or not yes:
        planned = broker.request("POST", url, body=body | {"dry_run": True})
        if dry_run:
            broker.done(planned, _plan(planned, limit) + "; nothing was changed (--dry-run)")
            return
        confirmed(yes, f"{_plan(planned, limit)}. Go on?")
    started = broker.request("POST", url, body=body)
    if no_wait:
        broker.done(started, f"redrive {started['id']} has begun")
        return
    ended = _watched(broker, started, limit)
    text = f"{ended['moved']:,} sent back, {ended['without_way']:,} without a queue to go to; {ended['state']}"
    broker.done(ended, text + (f": {ended['failure']}" if ended["failure"] else ""))
    if ended["state"] != "done":
        raise SystemExit(1)


def _plan(planned: Json, limit: int | None) -> str:
    count = sum(planned["targets"].values())
    where = ", ".join(f"{number:,} to {name}" for name, number in planned["targets"].items()) or "none"
    limited = f" (at most {limit:,} of them)" if limit is not None and limit < count else ""
    stays = f"; {planned['without_way']:,} have no queue to go to" if planned["without_way"] else ""
    return f"{count:,} of {planned['total']:,} messages in {planned['queue']}: {where}{limited}{stays}"


def _watched(broker: Broker, started: Json, limit: int | None) -> Json:
    total = started["total"] if limit is None else min(limit, started["total"])
    now, moved = started, 0
    with progress("sent back", total) as step:
        while now["state"] == "running":
            time.sleep(POLL_S)
            now = broker.get(path("redrives", started["id"]))
            step(now["moved"] - moved)
            moved = now["moved"]
    return now


@click.group("redrives")
def redrives() -> None:
    """Redrives that run, and those that ended."""


@redrives.command("list")
@asks
def list_redrives(broker: Broker) -> None:
    """List them, the newest first; behind them those of before the broker was started."""
    answer: Any = broker.get(path("redrives"))
    columns = {
        "id": "id",
        "queue": "queue",
        "state": "state",
        "user": "user",
        "matched": "matched",
        "moved": "moved",
        "without way": "without_way",
    }
    if broker.as_json:
        broker.line(answer)
    else:
        table([*answer["redrives"], *answer["earlier"]], columns)


@redrives.command("cancel")
@click.argument("id")
@asks
def cancel_redrive(broker: Broker, id: str) -> None:
    """Stop one. What is on its way gets there."""
    answer = broker.request("DELETE", path("redrives", id))
    broker.done(answer, f"redrive {id} stops")
