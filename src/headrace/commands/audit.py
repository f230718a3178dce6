"""`headrace audit`: who did what to messages, and when. Driver; docs/cli.md has the page."""

import click

from headrace.client import path
from headrace.commands.asking import Broker, Json, asks, table

PAGE = 500


@click.command("audit")
@click.option("--kind", help="Only of this kind: redrive, group-reset, group-delete.")
@click.option("--limit", type=click.IntRange(1), default=100, show_default=True, help="So many at most.")
@asks
def audit(broker: Broker, kind: str | None, limit: int) -> None:
    """Who did what to messages: redrives, resets of consumer groups. The newest first; with --json one a line."""
    query: Json = {"kind": kind}
    rows: list[Json] = []
    while len(rows) < limit:
        page = broker.get(path("audit"), query | {"limit": min(limit - len(rows), PAGE)})
        rows += page["events"]
        query["after"] = page["cursor"]
        if page["cursor"] is None:
            break
    if broker.as_json:
        for row in rows:
            broker.line(row)
    else:
        table(rows, {"time": "time", "kind": "kind", "user": "user", "about": "about"})
