"""`headrace cluster up`: some nodes on this machine, and a PostgreSQL for them, for trying a cluster out. Driver.

Everything it starts is a process of its own, so one of the nodes can be killed and started again while the others go
on; how is printed. stdout gets a line for each node that is ready, and one when all of them are. Ctrl-C stops all.
Neighbours: serve.py is what each of the nodes runs, local_cluster.py keeps them.
"""

import os
import secrets
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from headrace.local_postgres import LocalPostgres, NoPostgres

USUAL_PORTS = {"amqp": 5672, "mqtt": 1883, "ws": 8083, "http": 15672, "peer": 25672}
POSTGRES_PORT = 25432


def launches(
    count: int, data: Path, store: str, secret: Path, ports: Sequence[dict[str, int]], more: Sequence[str]
) -> list[list[str]]:
    found = []
    for number in range(1, count + 1):
        doors = [word for door, port in ports[number - 1].items() for word in (f"--{door}", f"127.0.0.1:{port}")]
        command = [sys.executable, "-m", "headrace", "serve", "--cluster", store, "--node-id", str(number)]
        command += ["--secret-file", str(secret), "--data", str(data / f"node-{number}"), *doors, *more]
        found.append(command)
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
        # Here, since every other command that asks a broker does without it.
        from headrace.local_cluster import run

        run(launches(nodes, data, store, _secret(data), ports, more))
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
