"""`headrace cluster up`: some nodes on this machine, and a PostgreSQL for them, for trying a cluster out. Driver.

Everything it starts is a process of its own, so one of the nodes can be killed and started again while the others go
on; how is printed. stdout gets a line for each node that is ready, and one when all of them are. Ctrl-C stops all.
Neighbours: serve.py is what each of the nodes runs.
"""

import os
import secrets
import shlex
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE
from typing import TextIO

import click
import trio

from headrace.local_postgres import LocalPostgres, NoPostgres

USUAL_PORTS = {"amqp": 5672, "mqtt": 1883, "ws": 8083, "http": 15672, "peer": 25672}
POSTGRES_PORT = 25432
STOP_SECONDS_MAX = 30


@dataclass(frozen=True, slots=True)
class Launch:
    """One node: what runs it, and where its doors are."""

    number: int
    command: tuple[str, ...]

    @property
    def line(self) -> str:
        return shlex.join(self.command)


def launches(
    count: int, data: Path, store: str, secret: Path, ports: Sequence[dict[str, int]], more: Sequence[str]
) -> list[Launch]:
    found = []
    for number in range(1, count + 1):
        doors = [word for door, port in ports[number - 1].items() for word in (f"--{door}", f"127.0.0.1:{port}")]
        command = [sys.executable, "-m", "headrace", "serve", "--cluster", store, "--node-id", str(number)]
        command += ["--secret-file", str(secret), "--data", str(data / f"node-{number}"), *doors, *more]
        found.append(Launch(number, tuple(command)))
    return found


@click.command("up")
@click.option("--nodes", type=click.IntRange(1, 15), default=3, show_default=True, help="How many nodes.")
@click.option(
    "--data",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("headrace-cluster"),
    show_default=True,
    help="Folder of all of them; what it holds already is gone on with.",
)
@click.option("--store", help="A PostgreSQL that runs already, as postgresql://user@host/database.")
@click.option("--free-ports", is_flag=True, help="Any ports that are free, rather than the usual ones and those above.")
@click.argument("more", nargs=-1, type=click.UNPROCESSED)
def up(nodes: int, data: Path, store: str | None, free_ports: bool, more: tuple[str, ...]) -> None:
    """Start a cluster on this machine, for trying it out. What stands behind -- goes to each `headrace serve`."""
    data = data.absolute()
    data.mkdir(mode=0o711, parents=True, exist_ok=True)
    ports = [_free_ports() if free_ports else _usual_ports(place) for place in range(nodes)]
    database: LocalPostgres | None = None
    try:
        if store is None:
            port = _free_port() if free_ports else POSTGRES_PORT
            database = LocalPostgres(data / "postgresql", port)
            database.create()
            database.start()
            store = database.url()
    except NoPostgres as error:
        raise click.ClickException(f"{error}\nor give one that runs already with --store") from error
    try:
        trio.run(_run, launches(nodes, data, store, _secret(data), ports, more))
    finally:
        if database is not None:
            database.stop()


def _usual_ports(place: int) -> dict[str, int]:
    return {door: port + place for door, port in USUAL_PORTS.items()}


def _free_ports() -> dict[str, int]:
    return {door: _free_port() for door in USUAL_PORTS}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _secret(data: Path) -> Path:
    """The one that is there, else a new one."""
    path = data / "secret"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return path
    with open(descriptor, "w") as file:
        file.write(secrets.token_urlsafe(32) + "\n")
    return path


async def _run(nodes: Sequence[Launch]) -> None:
    ready = {node.number: trio.Event() for node in nodes}
    stop = trio.Event()
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with trio.open_nursery() as nursery:
            async with trio.open_nursery() as running:
                for node in nodes:
                    running.start_soon(_keep, node, ready[node.number], stop)
                nursery.start_soon(_tell_when_ready, list(ready.values()), len(nodes))
                async for _number in signals:
                    stop.set()
                    break
            nursery.cancel_scope.cancel()


async def _tell_when_ready(all_ready: Sequence[trio.Event], count: int) -> None:
    for one in all_ready:
        await one.wait()
    print(f"cluster ready nodes={count}", flush=True)


async def _keep(node: Launch, ready: trio.Event, stop: trio.Event) -> None:
    """One node, until it ends or all are stopped. A node that dies is not started again: that is for you to try."""
    # In a session of its own, so that a Ctrl-C reaches it once, through us.
    process = await trio.lowlevel.open_process(list(node.command), stdout=PIPE, stderr=PIPE, start_new_session=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_copy, process.stdout, node.number, sys.stdout, ready)
        nursery.start_soon(_copy, process.stderr, node.number, sys.stderr, None)
        nursery.start_soon(_end, process, stop)
        status = await process.wait()
        if not stop.is_set():
            print(f"node {node.number} ended with status {status}; to start it again: {node.line}", flush=True)
        nursery.cancel_scope.cancel()


async def _copy(source: trio.abc.ReceiveStream | None, number: int, target: TextIO, ready: trio.Event | None) -> None:
    assert source is not None
    rest = b""
    async for data in source:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            text = line.decode("utf-8", "replace")
            print(f"node {number}: {text}", file=target, flush=True)
            if ready is not None and text.startswith("ready"):
                ready.set()


async def _end(process: trio.Process, stop: trio.Event) -> None:
    await stop.wait()
    process.terminate()
    with trio.move_on_after(STOP_SECONDS_MAX):
        await process.wait()
        return
    process.kill()
