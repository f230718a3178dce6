"""`headrace cluster`: who is there, who leads what; draining, moving, balancing; a cluster to try out. Driver."""

from typing import Any

import click

from headrace.client import path
from headrace.commands.asking import Broker, Json, asks, table
from headrace.commands.cluster_up import up


@click.group("cluster")
def cluster() -> None:
    """The nodes of a cluster."""


cluster.add_command(up)


@cluster.command("status")
@asks
def status(broker: Broker) -> None:
    """Nodes, shards, who leads what and who is in sync."""
    answer = broker.get(path("cluster"))
    if broker.as_json:
        broker.line(answer)
        return
    click.echo(
        f"cluster {answer['cluster']}, asked node {answer['node']}; controller: node {answer['controller'] or '-'}; "
        f"metadata {answer['metadata_version']}, store {answer['metadata_store']}"
    )
    if answer.get("metadata_risk"):
        click.echo(f"metadata RPO > 0: {answer['metadata_risk']}")
    table(
        answer["nodes"],
        {
            "node": "node",
            "state": "state",
            "up": lambda row: {True: "yes", False: "no", None: "?"}[row["up"]],
            "leads": lambda row: _numbers(row["leads"]),
            "holds": lambda row: _numbers(row["holds"]),
            "amqp": lambda row: row["endpoints"].get("amqp", ""),
            "mqtt": lambda row: row["endpoints"].get("mqtt", ""),
            "http": lambda row: row["endpoints"].get("http", ""),
        },
    )
    table(
        answer["shards"],
        {
            "shard": "shard",
            "leader": lambda row: row["leader"] or "none",
            "epoch": "epoch",
            "replicas": lambda row: _numbers(row["replicas"]),
            "in sync": lambda row: _numbers(row["in_sync"]),
            "least": "min_in_sync",
            "moves to": lambda row: _numbers(row["target"]),
            "catching up": lambda row: ", ".join(map(_progress, row.get("catching_up", ()))),
            "vhosts": lambda row: ", ".join(row["vhosts"]),
        },
    )


def _progress(one: dict[str, Any]) -> str:
    """As `3: 120.5 MB, 14 s`."""
    left = f"{one['bytes'] / 1e6:,.1f} MB" if one["bytes"] >= 100_000 else f"{one['records']:,} records"
    return f"{one['node']}: {left}" + ("" if one["seconds"] is None else f", {one['seconds']:.0f} s")


def _numbers(found: list[int]) -> str:
    return " ".join(map(str, found))


@cluster.command("drain")
@click.argument("node", type=int)
@asks
def drain(broker: Broker, node: int) -> None:
    """Let others take over what NODE leads, and copy what it holds elsewhere where there is room."""
    _ordered(broker, "POST", path("cluster", "nodes", str(node), "drain"), f"node {node} is being drained")


@cluster.command("undrain")
@click.argument("node", type=int)
@asks
def undrain(broker: Broker, node: int) -> None:
    """Let NODE lead and hold shards again."""
    _ordered(broker, "POST", path("cluster", "nodes", str(node), "undrain"), f"node {node} takes part again")


@cluster.command("remove")
@click.argument("node", type=int)
@asks
def remove(broker: Broker, node: int) -> None:
    """Forget NODE, which must hold nothing any more."""
    _ordered(broker, "DELETE", path("cluster", "nodes", str(node)), f"node {node} is forgotten")


@cluster.command("move")
@click.argument("shard", type=int)
@click.argument("nodes", type=int, nargs=-1, required=True)
@asks
def move(broker: Broker, shard: int, nodes: tuple[int, ...]) -> None:
    """Put the replicas of SHARD on NODES; the first of them leads."""
    where = path("cluster", "shards", str(shard), "move")
    _ordered(broker, "POST", where, f"shard {shard} moves to {_numbers(list(nodes))}", {"nodes": list(nodes)})


@cluster.command("balance")
@asks
def balance(broker: Broker) -> None:
    """Even shares of replicas and of leadership."""
    _ordered(broker, "POST", path("cluster", "balance"), "the cluster is being balanced")


@cluster.command("force")
@click.argument("shard", type=int)
@click.argument("node", type=int)
@click.option("--lose", is_flag=True, required=True, help="What was confirmed and NODE lacks is lost, for ever.")
@asks
def force(broker: Broker, shard: int, node: int, lose: bool) -> None:
    """Let NODE lead SHARD though it may lack what was confirmed: when all who have it are gone for good."""
    where = path("cluster", "shards", str(shard), "force")
    _ordered(broker, "POST", where, f"node {node} leads shard {shard}", {"node": node, "lose": lose})


def _ordered(broker: Broker, method: str, where: str, text: str, body: Json | None = None) -> None:
    answer: Any = broker.request(method, where, body=body)
    broker.done(answer, f"{text}; `headrace cluster status` has the progress")
