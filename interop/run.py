"""`make interop`: runs every client against a broker of its own and prints what each has shown. Driver: processes.

Ends with 0 when every client showed all it should and the kill loops held; with 1 when one did not; with 3 when all
that ran held but a client is not installed here, unless --allow-missing says that this is known.
"""

import argparse
import logging
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from interop.amqp import clients as amqp
from interop.amqp import kill_loop as amqp_kill_loop
from interop.broker import running
from interop.client import Client, Feature, NotInstalled
from interop.cross import clients as cross
from interop.mqtt import clients as mqtt
from interop.mqtt import kill_loop as mqtt_kill_loop

CLIENTS: tuple[Client, ...] = (*amqp.CLIENTS, *mqtt.CLIENTS, *cross.CLIENTS)
KILL_LOOPS = {"kill -9 loop, AMQP": amqp_kill_loop.run, "kill -9 loop, MQTT": mqtt_kill_loop.run}
# Of each of the two.
KILL_LOOP_SECONDS = 60
FAILED = 1
MISSING = 3


@dataclass(frozen=True, slots=True)
class Row:
    client: str
    version: str
    showed: str
    seconds: float
    verdict: str  # ok | FAILED | not installed


def show_one(client: Client, console: Console) -> Row:
    begun = time.monotonic()
    shown: list[Feature] = []
    try:
        version = client.version()
    except NotInstalled as missing:
        return Row(client.name, "-", str(missing), 0, "not installed")
    try:
        with running() as broker:
            client.run(broker, shown.append)
        if tuple(shown) != client.shows:
            raise AssertionError(f"it was to show {client.shows}")
    except Exception:
        console.print(f"\n{client.name} failed after: {', '.join(shown) or 'nothing'}", style="red", highlight=False)
        console.print(traceback.format_exc(), markup=False, highlight=False)
        verdict = "FAILED"
    else:
        verdict = "ok"
    return Row(client.name, version, ", ".join(shown), time.monotonic() - begun, verdict)


def kill_row(name: str, seconds: float, seed: int, console: Console) -> Row:
    begun = time.monotonic()
    report = KILL_LOOPS[name](seconds, seed)
    for problem in report.problems:
        console.print(f"{name}, seed {seed}: {problem}", style="red", highlight=False)
    verdict = "FAILED" if report.problems else "ok"
    return Row(name, f"seed {seed}", report.line(), time.monotonic() - begun, verdict)


def table(rows: Sequence[Row]) -> Table:
    shown = Table("client", "version", "what it showed", "s", "", box=box.SIMPLE, pad_edge=False)
    styles = {"ok": "green", "FAILED": "bold red", "not installed": "yellow"}
    for row in rows:
        style = styles[row.verdict]
        shown.add_row(row.client, row.version, row.showed, f"{row.seconds:.0f}", f"[{style}]{row.verdict}")
    return shown


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m interop.run", description="Other people's clients, one by one.")
    parser.add_argument("--only", metavar="TEXT", default="", help="only clients whose name holds this")
    parser.add_argument("--allow-missing", action="store_true", help="do not fail for clients that are not installed")
    parser.add_argument(
        "--kill-seconds", type=float, default=KILL_LOOP_SECONDS, help="length of each kill -9 loop; 0: none"
    )
    parser.add_argument("--seed", type=int, default=None, help="of the kill -9 loops")
    asked = parser.parse_args(arguments)
    console = Console()
    chosen = [client for client in CLIENTS if asked.only.lower() in client.name.lower()]
    loops = [name for name in KILL_LOOPS if asked.only.lower() in name.lower()]
    if not chosen and not loops:
        names = ", ".join([*(client.name for client in CLIENTS), *KILL_LOOPS])
        parser.error(f"no client is called {asked.only!r}: there are {names}")
    rows: list[Row] = []
    for client in chosen:
        console.print(f"{client.name} ...", highlight=False)
        rows.append(show_one(client, console))
    for name in loops if asked.kill_seconds else ():
        console.print(f"{name} ...", highlight=False)
        seed = amqp_kill_loop.any_seed() if asked.seed is None else asked.seed
        rows.append(kill_row(name, asked.kill_seconds, seed, console))
    console.print(table(rows))
    failed = [row.client for row in rows if row.verdict == "FAILED"]
    missing = [row for row in rows if row.verdict == "not installed"]
    for row in missing:
        console.print(f"not installed here, so nothing is known of it: {row.client} ({row.showed})", highlight=False)
    if failed:
        console.print(f"failed: {', '.join(failed)}", style="red", highlight=False)
        return FAILED
    if missing and not asked.allow_missing:
        console.print("install them, or pass --allow-missing", style="yellow", highlight=False)
        return MISSING
    return 0


if __name__ == "__main__":
    # Being asked to end must end the brokers too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(FAILED))
    # Clients log each connection that they lose, and losing them is what they are here for.
    logging.getLogger().addHandler(logging.NullHandler())
    sys.exit(main())
