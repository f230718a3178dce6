"""Claim: AMQP through a node that does not lead beside AMQP at the leader, per CPU second of both. Driver: processes.

Two processes: one that leads, and one that takes clients and relays them to it over a peer link. The load is the same
scenario, once at each. What is compared is messages per CPU second of all that served them: the leader alone, or both
nodes together. A part of it: `python -m bench.relay --only A1-100 --seconds 3`
"""

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID

import trio

from bench.claim import Claim
from bench.comparison import broken_promise, try_out
from bench.machine import cpu_s
from bench.peers.headrace import doors_of
from bench.peers.peer import Running, private_directory, process
from bench.scenarios import BY_NAME, Result, play
from headrace import __version__
from headrace.config import load_config
from headrace.controller.config import Definitions
from headrace.controller.service import MetadataService
from headrace.controller.sqlite_store import SqliteStore
from headrace.core_log.directory import LogDirectory
from headrace.core_log.peer.door import PeerDoor
from headrace.core_log.peer.frames import NONCE_BYTES, Hello, Purpose
from headrace.core_log.peer.link import PeerLink, Peers
from headrace.core_log.real import real_env
from headrace.gateways.amqp.front import AmqpFront, AmqpFrontListener
from headrace.gateways.amqp.server import AmqpListener
from headrace.gateways.relay.answering import RelayAnswers
from headrace.kinds import Address
from headrace.service import Commons, Service, open_service

SECONDS = 4.0
SCENARIOS = ("A1-100", "A1-1K", "A2", "A8")
HERE = "127.0.0.1"
SECRET = b"of a benchmark"


def _hello(node: int) -> Hello:
    return Hello(UUID(int=1), node, 1, UUID(int=node), Purpose.RELAY)


class _Leaders:
    """One node leads everything."""

    patience_s = 10.0

    def __init__(self, service: Service | None, peers: Peers | None, where: Address | None) -> None:
        self._service = service
        self._peers = peers
        self._where = where

    def here(self, vhost: str) -> Service | None:
        return self._service

    async def connect(self, vhost: str, detail: bytes) -> PeerLink:
        assert self._peers is not None and self._where is not None
        return await self._peers.connect(self._where, Purpose.RELAY, detail)


async def _serve(data: Path, leader: Address | None) -> None:
    """A node: the leader, or one that relays to it."""
    env = real_env(data)
    config = load_config(None, {}, {"node.data": str(data)})
    nonce = lambda: b"".join(env.ids.uuid().bytes for _ in range(NONCE_BYTES // 16))  # noqa: E731
    async with trio.open_nursery() as nursery:
        metadata = MetadataService(
            lambda: SqliteStore(data / "meta.sqlite", new_uuid=env.ids.uuid), new_uuid=env.ids.uuid
        )
        await nursery.start(metadata.run)
        await metadata.seed(Definitions())
        commons = Commons(config, env, metadata, trio.CapacityLimiter(2))
        if leader is None:
            directory = await LogDirectory.open(env, config.storage.directory(), clean=True)
            nursery.start_soon(directory.run)
            service = await open_service(commons, directory, nursery, clean=True)
            answers = RelayAnswers(_Leaders(service, None, None))
            door = PeerDoor(lambda: _hello(1), SECRET, nonce, {Purpose.RELAY: answers.handle})
            peer_port = (await door.open(HERE, 0))[1]
            nursery.start_soon(door.serve)
            listener: AmqpListener | AmqpFrontListener = AmqpListener("amqp", service.amqp)
        else:
            peer_port = 0
            front = AmqpFront(
                _Leaders(None, Peers(lambda: _hello(2), SECRET, nonce), leader),
                env,
                commons.access,
                commons.authentication,
                commons.limits,
                commons.watch.alarms,
                has_vhost=lambda name: name in metadata.snapshot.vhosts,
                config=config.amqp.door(),
            )
            nursery.start_soon(front.run)
            listener = AmqpFrontListener("amqp", front)
        port = (await listener.open(HERE, 0))[1]
        nursery.start_soon(listener.serve)
        print(f"ready amqp={HERE}:{port} peer={HERE}:{peer_port}", flush=True)


@contextmanager
def _node(home: Path, name: str, *arguments: str) -> Iterator[tuple[Running, dict[str, int]]]:
    data, log = home / name, home / f"{name}.log"
    data.mkdir()
    command = [sys.executable, "-m", "bench.relay", "--node", str(data), *arguments]
    with process(command, log, lambda: doors_of(log.read_text()) is not None) as server:
        doors = doors_of(log.read_text()) or {}
        yield Running(name, "amqp", doors["amqp"], server.pid, __version__, log), doors


def measure(scenarios: Collection[str], seconds: float) -> list[Claim]:
    claims: list[Claim] = []
    with (
        private_directory("relay") as home,
        _node(home, "leader") as (leader, doors),
        _node(home, "front", str(doors["peer"])) as (front, _doors),
    ):
        for name in scenarios:
            direct, direct_s = _played(name, leader, [leader], seconds)
            relayed, relayed_s = _played(name, front, [leader, front], seconds)
            ours, beside = relayed["received"] / relayed_s, direct["received"] / direct_s
            detail = f"{ours:,.0f} messages per CPU second of two nodes, {beside:,.0f} of the leader alone"
            claims.append(Claim(f"relayed / direct, {name}", ours / beside, target=None, detail=detail))
    return claims


def _played(name: str, server: Running, nodes: list[Running], seconds: float) -> tuple[Result, float]:
    before = sum(cpu_s(node.pid) for node in nodes)
    result = play(BY_NAME[name], server, seconds)[name]
    if (why := broken_promise(result)) is not None:
        raise AssertionError(f"{name} at the {server.name}: {why}")
    return result, sum(cpu_s(node.pid) for node in nodes) - before


def claim() -> list[Claim]:
    return measure(SCENARIOS, SECONDS)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--node"]:
        port = sys.argv[3] if len(sys.argv) > 3 else ""
        trio.run(_serve, Path(sys.argv[2]), Address(HERE, int(port)) if port else None)
    else:
        try_out(measure, SCENARIOS)
