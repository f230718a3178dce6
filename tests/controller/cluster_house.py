"""Nodes of a cluster in one process: links in memory, a clock that jumps, replicas that only keep their word."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import Any
from uuid import UUID

import trio
import trio.testing
from tests.core_log.power.inline import InlineWorker, SeededIds

from headrace.controller.cluster import ClusterAgent
from headrace.controller.cluster_config import ClusterConfig
from headrace.controller.entities import Endpoint
from headrace.controller.links import Link, LocalLink, local_links
from headrace.controller.passwords import HashCost
from headrace.controller.store import MetaStore
from headrace.core_log.env import Env
from headrace.core_log.peer.errors import PeerGone, PeerUnreachable
from headrace.core_log.peer.frames import Purpose
from headrace.core_log.replication.assignment import NO_VERSION, NOBODY, Assignment, Ballot, Member, Stint
from headrace.core_log.replication.messages import CatchUp, OwnCopy, Report
from headrace.core_log.storage.memory import MemoryStorage

CHEAP = HashCost(8, 1)


class TrioClock:
    wall_look_s = 60.0

    def monotonic(self) -> float:
        return trio.current_time()

    def wall_us(self) -> int:
        return int(trio.current_time() * 1e6)

    async def sleep(self, seconds: float) -> None:
        await trio.sleep(seconds)

    async def sleep_until(self, monotonic_s: float) -> None:
        await trio.sleep_until(monotonic_s)


class WordKeepers:
    """Replicas without records: what they promised outlives their node."""

    def __init__(self) -> None:
        self.ballots: dict[int, Ballot] = {}
        self.rows: dict[int, Assignment] = {}
        self.fences: dict[int, int] = {}
        self.member: Member | None = None
        self.own: tuple[OwnCopy, ...] = ()
        # Every order that was obeyed, in order.
        self.orders: list[tuple[int, Ballot, Assignment]] = []

    def _hears(self, shard: int, ballot: Ballot) -> bool:
        if ballot < self.ballots.get(shard, Ballot(0, 0)):
            return False
        self.ballots[shard] = ballot
        return True

    def _report(self, shard: int) -> Report:
        assert self.member is not None
        row = self.rows.get(shard)
        if row is None:
            nothing = Stint(0, NOBODY)
            return Report(self.member, nothing, NO_VERSION, nothing, 0, True, False)
        fence = self.fences.get(shard, 0)
        stint = Stint(fence, NOBODY) if fence > row.epoch else row.stint
        return Report(self.member, stint, row.version, row.stint, 1, False, False, row.isr, row.eligible)

    async def promise(self, shard: int, ballot: Ballot) -> Report | None:
        return self._report(shard) if self._hears(shard, ballot) else None

    async def fence(self, shard: int, ballot: Ballot, epoch: int) -> Report | None:
        if not self._hears(shard, ballot):
            return None
        before = self._report(shard)
        self.fences[shard] = max(epoch, self.fences.get(shard, 0))
        return before

    async def obey(self, shard: int, ballot: Ballot, assignment: Assignment) -> bool:
        if not self._hears(shard, ballot):
            return False
        before = self.rows.get(shard)
        if before is None or assignment.epoch > before.epoch or assignment.version.age > before.version.age:
            self.rows[shard] = assignment
            self.orders.append((shard, ballot, assignment))
        return True

    def copies(self) -> tuple[OwnCopy, ...]:
        return self.own

    def catching_up(self) -> tuple[CatchUp, ...]:
        return ()

    def leads(self) -> list[int]:
        assert self.member is not None
        return [
            shard
            for shard, row in sorted(self.rows.items())
            if row.leader == self.member.node
            and row.leader_incarnation == self.member.incarnation
            and row.epoch >= self.fences.get(shard, 0)
        ]


class House:
    """`open_store` for each node; tests may put faults between."""

    def __init__(self, nursery: trio.Nursery, open_store: Callable[[], MetaStore], config: ClusterConfig) -> None:
        self.nursery = nursery
        self.open_store = open_store
        self.config = config
        self.nodes: dict[int, HouseNode] = {}
        # Links that find nobody: (from, to).
        self.cut: set[tuple[int, int]] = set()

    def node(self, number: int) -> "HouseNode":
        if number not in self.nodes:
            self.nodes[number] = HouseNode(self, number)
        return self.nodes[number]

    async def start(self, *numbers: int) -> None:
        async with trio.open_nursery() as nursery:
            for number in numbers:
                nursery.start_soon(self.node(number).start)

    @property
    def controllers(self) -> list[int]:
        return [number for number, node in self.nodes.items() if node.is_up and node.agent.is_controller]

    async def until(self, what: Callable[[], object]) -> None:
        """Virtual time passes until it is so."""
        with trio.fail_after(120):
            while not what():
                await trio.sleep(0.1)


class HouseNode:
    def __init__(self, house: House, number: int) -> None:
        self.house = house
        self.number = number
        self.storage = MemoryStorage()
        self.disk = UUID(int=number)
        self.incarnation = 0
        self.replicas = WordKeepers()
        self.clean = True
        self.open_store: Callable[[], MetaStore] = house.open_store
        self.noted: list[str] = []
        self.scope: trio.CancelScope | None = None
        self.links: set[Link] = set()
        self.worker: Any = InlineWorker()

    @property
    def is_up(self) -> bool:
        return self.scope is not None

    async def start(self, *, wait: bool = True) -> None:
        await self.house.nursery.start(self._run) if wait else self.house.nursery.start_soon(self._run)

    async def _run(self, *, task_status: "trio.TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        self.incarnation += 1
        member = Member(self.number, self.incarnation * 1000 + self.number, self.disk)
        self.replicas.member = member
        random = Random(self.number * 1000 + self.incarnation)
        env = Env(TrioClock(), self.storage, self.worker, SeededIds(random), random)  # type: ignore[arg-type]
        self.agent = ClusterAgent(
            env,
            member,
            lambda: self.open_store(),
            _Peers(self),
            self.replicas,
            clean=self.clean,
            config=self.house.config,
            hash_cost=CHEAP,
            noted=self.noted.append,
        )
        try:
            with trio.CancelScope() as self.scope:
                await self.agent.open()
                async with trio.open_nursery() as self.nursery:
                    await self.nursery.start(self.agent.run, {"peer": Endpoint("memory", self.number)})
                    task_status.started()
        finally:
            self.scope = None

    async def kill(self) -> None:
        """Its links are reset at once."""
        assert self.scope is not None
        self.scope.cancel()
        self.scope = None
        for link in tuple(self.links):
            await link.aclose()
        await trio.testing.wait_all_tasks_blocked()

    async def serve(self, link: LocalLink) -> None:
        self.links.add(link)
        try:
            await self.agent.handle(link)
        except PeerGone:
            pass
        finally:
            self.links.discard(link)
            await link.aclose()


class _Peers:
    def __init__(self, node: HouseNode) -> None:
        self._node = node

    async def connect(self, address: Endpoint, purpose: Purpose, detail: bytes = b"") -> Link:
        await trio.lowlevel.checkpoint()
        house = self._node.house
        other = house.nodes[address.port]
        if not other.is_up or (self._node.number, other.number) in house.cut:
            raise PeerUnreachable(f"nobody listens at node {other.number}")
        here, there = local_links()
        self._node.links.add(here)
        other.nursery.start_soon(other.serve, there)
        return here


@asynccontextmanager
async def cluster(open_store: Callable[[], MetaStore], config: ClusterConfig | None = None) -> AsyncIterator[House]:
    async with trio.open_nursery() as nursery:
        yield House(nursery, open_store, config or ClusterConfig())
        nursery.cancel_scope.cancel()
