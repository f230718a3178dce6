"""Whole nodes of a cluster in one process: real doors, links and disks, one store of metadata in memory. Driver: trio.

    async with whole_cluster(tmp_path) as three:
        await three.start(1, 2, 3)
        leader = three.leader("/")

Each node is `run_cluster_node` as `headrace serve` runs it. For stories of several nodes that processes would tell too
slowly; kill -9 and SIGSTOP are the business of interop/cluster.
"""

import base64
import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any
from uuid import UUID

import trio

from headrace.cluster_node import Surroundings, run_cluster_node
from headrace.config import Config, load_config
from headrace.controller.cluster import ClusterAgent
from headrace.controller.cluster_config import ClusterConfig
from headrace.controller.store import MemoryStore
from headrace.core_log.env import Env
from headrace.core_log.real import SystemClock, SystemIds, ThreadWorker
from headrace.core_log.storage.disk import DiskStorage
from headrace.kinds import Address
from headrace.shards import Shards

QUICK = ClusterConfig(
    shards=2, lease_ttl_s=1.5, renew_s=0.2, self_deadline_s=1.0, heartbeat_s=0.1, session_s=9.0, grace_s=2.0
)


class WholeNode:
    def __init__(self, number: int, folder: Path) -> None:
        self.number = number
        self.folder = folder
        self.doors: Mapping[str, Address] = {}
        self.shards: Shards
        self.agent: ClusterAgent
        self.scope = trio.CancelScope()
        self.stop = trio.Event()
        self.ended = trio.Event()
        self.is_up = False

    async def ask(self, method: str, path: str, body: object = None, user: str = "guest:guest") -> tuple[int, Any]:
        """Of its HTTP door: status and JSON."""
        status, answer = await self._ask(method, path, body, user)
        return status, json.loads(answer) if answer else None

    async def metrics(self) -> str:
        return (await self._ask("GET", "/metrics", None, "guest:guest"))[1].decode()

    async def _ask(self, method: str, path: str, body: object, user: str) -> tuple[int, bytes]:
        data = b"" if body is None else json.dumps(body).encode()
        head = [
            f"{method} {path} HTTP/1.1",
            "host: localhost",
            f"content-length: {len(data)}",
            "content-type: application/json",
            "authorization: Basic " + base64.b64encode(user.encode()).decode(),
            "connection: close",
        ]
        stream = await trio.open_tcp_stream(self.doors["http"].host, self.doors["http"].port)
        async with stream:
            await stream.send_all("\r\n".join(head).encode() + b"\r\n\r\n" + data)
            answer = b"".join([part async for part in stream])
        top, _, rest = answer.partition(b"\r\n\r\n")
        if b"transfer-encoding: chunked" in top.lower():
            rest = _unchunked(rest)
        return int(top.split(b" ", 2)[1]), rest


def _unchunked(data: bytes) -> bytes:
    found = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        found += data[: int(size, 16)]
        data = data[int(size, 16) + 2 :]
    return found


class WholeCluster:
    def __init__(self, nursery: trio.Nursery, folder: Path, timing: ClusterConfig, more: Mapping[str, str]) -> None:
        self.nursery = nursery
        self.folder = folder
        self.timing = timing
        self.more = dict(more)
        self.store = MemoryStore(UUID(int=7))
        self.nodes: dict[int, WholeNode] = {}
        self.secret = folder / "secret"
        self.secret.touch(mode=0o600)
        self.secret.write_text("a secret of all the nodes")

    async def start(self, *numbers: int) -> None:
        """Nodes of a new cluster wait for each other."""
        async with trio.open_nursery() as nursery:
            for number in numbers:
                nursery.start_soon(self.begin, number)
        await until(lambda: all(self.is_served(shard) for shard in range(self.timing.shards)))

    async def begin(self, number: int) -> None:
        """A node's doors are open when this returns, whether or not its shards are served."""
        node = self.nodes[number] = WholeNode(number, self.folder / str(number))
        node.folder.mkdir(exist_ok=True)
        await self.nursery.start(self._run, node)

    async def _run(self, node: WholeNode, *, task_status: "trio.TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        config = self._config(node)
        env = Env(SystemClock(), DiskStorage(node.folder), ThreadWorker(2), SystemIds(), Random(node.number))

        def opened(shards: Shards, agent: ClusterAgent) -> None:
            node.shards, node.agent = shards, agent

        around = Surroundings(lambda: self.store, lambda folder: DiskStorage(node.folder / folder), self.timing)
        try:
            with node.scope:
                async with trio.open_nursery() as nursery:
                    node.doors = await nursery.start(_serving, config, env, node.stop, around, opened)
                    node.is_up = True
                    task_status.started()
        finally:
            node.is_up = False
            node.ended.set()

    def _config(self, node: WholeNode) -> Config:
        doors = {f"doors.{name}": "127.0.0.1:0" for name in ("amqp", "mqtt", "http", "peer")} | {"doors.ws": "off"}
        cluster = {
            "cluster.store": "postgresql://nowhere/nothing",
            "cluster.node_id": str(node.number),
            "cluster.secret_file": str(self.secret),
        }
        settings = {"node.data": str(node.folder), "node.drain_seconds": "0", **doors, **cluster, **self.more}
        return load_config(None, {}, settings)

    async def kill(self, number: int) -> None:
        """Nothing is closed in good order."""
        node = self.nodes[number]
        node.scope.cancel()
        await node.ended.wait()

    async def stop(self, number: int) -> None:
        """In good order."""
        node = self.nodes[number]
        node.stop.set()
        await node.ended.wait()

    def up(self) -> list[WholeNode]:
        return [node for _number, node in sorted(self.nodes.items()) if node.is_up]

    def is_served(self, shard: int) -> bool:
        return any(found == shard for node in self.up() for found, _service in node.shards.services())

    def leader(self, vhost: str = "/") -> WholeNode:
        """The node that serves the vhost now."""
        return next(node for node in self.up() if node.shards.here(vhost) is not None)

    def other(self, vhost: str = "/") -> WholeNode:
        """One that does not."""
        return next(node for node in self.up() if node.shards.here(vhost) is None)

    def in_sync(self, shard: int) -> set[int]:
        found = self.store.snapshot().shards.get(shard)
        return set() if found is None else set(found.assignment.in_sync_nodes)


async def _serving(
    config: Config,
    env: Env,
    stop: trio.Event,
    around: Surroundings,
    opened: Callable[[Shards, ClusterAgent], None],
    *,
    task_status: "trio.TaskStatus[Mapping[str, Address]]",
) -> None:
    await run_cluster_node(
        config, env, stop=stop, tune_process=False, around=around, opened=opened, task_status=task_status
    )


async def until(condition: Callable[[], object], seconds: float = 60) -> None:
    with trio.fail_after(seconds):
        while not condition():
            await trio.sleep(0.005)


@asynccontextmanager
async def whole_cluster(
    folder: Path, timing: ClusterConfig = QUICK, more: Mapping[str, str] | None = None
) -> AsyncIterator[WholeCluster]:
    logging.getLogger("headrace").setLevel(logging.INFO)
    with trio.fail_after(300):
        async with trio.open_nursery() as nursery:
            yield WholeCluster(nursery, folder, timing, more or {})
            nursery.cancel_scope.cancel()
