"""A machine of a simulated cluster, and the lives of its process: the parts of src/headrace/cluster_node.py on a
simulated disk, network and clock. Driver for tests.

The replicas, the controller's agent, the shards and what serves them are the real ones. Left out are the doors: clients
(clients.py) call what serves them, in a task of the node's loop, as a door's connection would.
"""

import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import trio
from outcome import Error, Outcome, Value
from tests.core_log.power.inline import SeededIds
from tests.simulation.cluster.database import CLUSTER, Database
from tests.simulation.cluster.disk import FolderStorage, Fuse, SimWorker, Speed
from tests.simulation.cluster.loop import Loop, LoopClock
from tests.simulation.cluster.net import Net
from tests.simulation.cluster.world import EPOCH_US, World

from headrace.cluster_node import next_incarnation
from headrace.config import Config
from headrace.controller.cluster import PEER, ClusterAgent
from headrace.controller.cluster_config import ClusterConfig
from headrace.controller.entities import Endpoint
from headrace.core_log.env import Env
from headrace.core_log.peer.errors import LinkError
from headrace.core_log.peer.frames import Hello, Purpose
from headrace.core_log.peer.link import PeerLink
from headrace.core_log.replication.assignment import Member
from headrace.core_log.replication.config import ReplicationConfig
from headrace.core_log.replication.messages import LogId
from headrace.core_log.replication.shard import ShardReplica
from headrace.core_log.storage.memory import MemoryStorage
from headrace.node import CLEAN, open_identity, take_clean_marker
from headrace.service import Commons, Service
from headrace.shards import Shards


@dataclass(frozen=True, slots=True)
class Shape:
    """What all nodes of a cluster have in common."""

    config: Config
    timing: ClusterConfig
    replication: ReplicationConfig


# Why a process may end by itself: it may not trust its disk any more.
POISONED = frozenset({"Poisoned"})


class Machine:
    """What outlives a process: the disk, the clock of the house."""

    def __init__(self, world: World, net: Net, database: Database, number: int, shape: Shape) -> None:
        self.world = world
        self.net = net
        self.database = database
        self.number = number
        self.shape = shape
        self.random = world.dice(f"machine {number}")
        self.disk = MemoryStorage()
        self.speed = Speed(self.random)
        self.rate = 1 + self.random.uniform(-0.001, 0.001)
        # By how much its wall clock is wrong, and the latest that it had shown when it was last set.
        self._wall_offset_us = 0
        self._wall_us_max = 0
        # By shard: how far the logs of the last life said that they were synced, which the next one must find.
        self.owed: dict[int, dict[LogId, int]] = {}
        self.life: Life | None = None
        self.lives = 0
        self.buried: list[Life] = []
        # Called when its process is gone: somebody will start another.
        self.on_end: Callable[[], None] = lambda: None

    @property
    def is_up(self) -> bool:
        return self.life is not None

    def start(self) -> "Life":
        assert self.life is None
        self.lives += 1
        self.world.note(f"node {self.number}: life {self.lives} begins")
        self.life = Life(self, self.lives)
        self.net.lives[self.number] = self.life
        self.net.dark.discard(self.number)
        self.life.begin()
        return self.life

    def ended(self, life: "Life", *, silently: bool = False) -> None:
        """Its process is gone; the disk stays as it was written."""
        self.buried.append(life)
        self.life = None
        self.owed |= {
            number: {log_id: int(log.synced_end) for log_id, log in replica.logs.items()}
            for number, replica in life.replicas.items()
        }
        self.disk = self.disk.process_crash()
        self.net.lives.pop(self.number, None)
        if silently:
            self.net.dark.add(self.number)
        self.net.process_gone(life, silently=silently)
        self.on_end()

    @property
    def wall_us(self) -> int:
        return EPOCH_US + self._wall_offset_us + int(self.world.now * 1e6)

    @property
    def wall_us_max(self) -> int:
        """The latest that it has ever shown, whether or not anybody looked."""
        return max(self.wall_us, self._wall_us_max)

    def set_wall(self, offset_us: int) -> None:
        self._wall_us_max = self.wall_us_max
        self._wall_offset_us = offset_us

    def wipe(self) -> None:
        assert self.life is None
        self.disk = MemoryStorage(planted=self.disk.planted)
        self.owed = {}


class _Clock:
    """A node's Env.clock."""

    wall_look_s = 5.0

    def __init__(self, machine: Machine, clock: LoopClock) -> None:
        self._machine = machine
        self._clock = clock

    def monotonic(self) -> float:
        return self._clock.current_time()

    def wall_us(self) -> int:
        return self._machine.wall_us

    async def sleep(self, seconds: float) -> None:
        await trio.sleep(seconds)

    async def sleep_until(self, monotonic_s: float) -> None:
        await trio.sleep_until(monotonic_s)


class _Ids(SeededIds):
    def nonce(self) -> str:
        return f"{self._random.getrandbits(144):036x}"


class Life:
    """One process."""

    def __init__(self, machine: Machine, count: int) -> None:
        self.machine = machine
        self.world = machine.world
        self.number = machine.number
        self.count = count
        self.random = Random(machine.random.getrandbits(64))
        self.fuse = Fuse()
        self.is_paused = False
        self.listens = False
        self.is_serving = False
        self.member: Member | None = None
        self.shards: Shards | None = None
        self.agent: ClusterAgent
        self.clock = LoopClock(lambda: self.world.now, machine.rate, self.random.uniform(0, 1e5))
        self.loop = Loop(self.clock, self._main)
        self._is_gone = False
        self._deferred: list[Callable[[], None]] = []
        self._wake_at = float("inf")
        self._inbox: deque[Callable[[], Awaitable[object]]] = deque()
        self._porter: trio.lowlevel.Task | None = None
        self._stop = False

    # -- the loop -----------------------------------------------------------------------------------------------

    @property
    def is_dead(self) -> bool:
        return self._is_gone or self.fuse.is_blown

    def begin(self) -> None:
        self._run()

    def reschedule(self, task: trio.lowlevel.Task, value: Outcome[Any]) -> None:
        if not self.is_dead:
            self.loop.reschedule(task, value)
            self.poke()

    def poke(self) -> None:
        """Something is runnable."""
        if self.world.running is None:
            self._run()
        elif self.world.running is not self:
            self.world.at(self.world.now, self._run)

    def _run(self) -> None:
        if self._is_gone:
            return
        if self.is_paused:
            return
        self.world.running = self
        try:
            timeout = self.loop.run()
        finally:
            self.world.running = None
        if self._is_gone:
            return
        if self.fuse.is_blown:
            self.die("in the middle of a change of its disk")
        elif timeout is None:
            self._exited()
        else:
            when = self.world.now + self.clock.world_seconds(timeout) + 1e-9
            if when < self._wake_at:
                self._wake_at = when
                self.world.at(when, self._wake)

    def _wake(self) -> None:
        if not self._is_gone and self.world.now >= self._wake_at:
            self._wake_at = float("inf")
            self._run()

    def _exited(self) -> None:
        self._is_gone = True
        outcome = self.loop.outcome
        if isinstance(outcome, Error):
            errors = list(_leaves(outcome.error))
            self.world.note(f"node {self.number}: its process has ended: {errors[0]!r}")
            self.world.counts["processes that ended"] += 1
            excused = POISONED if self.is_serving else POISONED | {"DiskFull"}
            inexcusable = next((error for error in errors if type(error).__name__ not in excused), None)
            if inexcusable is not None:
                text = "".join(traceback.format_exception(inexcusable))
                self.world.violated(f"node {self.number} has failed: {inexcusable!r}\n{text}")
        else:
            self.world.note(f"node {self.number}: stopped")
        self.machine.ended(self)

    # -- what befalls it ----------------------------------------------------------------------------------------

    def die(self, how: str, *, silently: bool = False) -> None:
        """As by kill -9: nothing of it runs any more."""
        if self._is_gone:
            return
        self.fuse.is_blown = True
        self._is_gone = True
        self.loop.is_abandoned = True
        self.world.note(f"node {self.number}: killed {how}")
        self.machine.ended(self, silently=silently)

    def pause(self) -> None:
        self.is_paused = True
        self.world.note(f"node {self.number}: paused")

    def resume(self) -> None:
        if self.is_paused and not self._is_gone:
            self.is_paused = False
            self.world.note(f"node {self.number}: goes on")
            deferred, self._deferred = self._deferred, []
            for act in deferred:
                act()
            self._run()

    def when_resumed(self, act: Callable[[], None]) -> None:
        self._deferred.append(act)

    def stop(self) -> None:
        """As by SIGTERM."""
        self.post(self._stop_in_order)

    # -- what runs in it ----------------------------------------------------------------------------------------

    def hello(self) -> Hello:
        assert self.member is not None
        return Hello(CLUSTER, self.number, self.member.incarnation, self.member.disk, Purpose.CONTROL)

    def post(self, job: Callable[[], Awaitable[object]]) -> None:
        """Run this as a task of the node."""
        if self.is_dead:
            return
        self._inbox.append(job)
        if self._porter is not None:
            task, self._porter = self._porter, None
            self.reschedule(task, Value(None))

    def accept(self, link: PeerLink) -> None:
        self.post(lambda: self._serve(link))

    async def _serve(self, link: PeerLink) -> None:
        purpose = link.hello.purpose
        try:
            if purpose is Purpose.CONTROL:
                await self.agent.handle(link)
            else:
                await self.shards.serve_fetch(link)
        except* LinkError:
            pass
        finally:
            link.close()

    async def _carry(self, nursery: trio.Nursery) -> None:
        while True:
            while self._inbox:
                nursery.start_soon(self._inbox.popleft())
            self._porter = trio.lowlevel.current_task()

            def abort(_raise: object) -> trio.lowlevel.Abort:
                self._porter = None
                return trio.lowlevel.Abort.SUCCEEDED

            await trio.lowlevel.wait_task_rescheduled(abort)

    async def _main(self) -> None:
        machine, shape = self.machine, self.machine.shape
        root = FolderStorage(machine.disk, self.fuse)
        worker = SimWorker(self, machine.speed, self.random)
        env = Env(
            _Clock(machine, self.clock),
            root,
            worker,
            _Ids(Random(self.random.getrandbits(64))),
            Random(self.random.getrandbits(64)),
        )
        await env.worker.run(root.lock)
        identity = await env.worker.run(lambda: open_identity(env))
        clean = await env.worker.run(lambda: take_clean_marker(env))
        incarnation = await env.worker.run(lambda: next_incarnation(env))
        member = self.member = Member(self.number, incarnation, identity.disk)
        shards = self.shards = Shards(
            env,
            lambda folder: FolderStorage(machine.disk, self.fuse, folder),
            member,
            clean=clean,
            directory=shape.config.storage.directory(),
            replication=shape.replication,
            patience_s=10.0,
        )
        peers = _Peers(self)
        agent = self.agent = ClusterAgent(
            env,
            member,
            lambda: machine.database.open(self.number),
            peers,
            shards,
            clean=True,
            config=shape.timing,
            noted=lambda text: self.world.note(f"node {self.number} notes: {text}"),
        )
        shards.agent, shards.peers = agent, peers  # type: ignore[assignment]
        await agent.open()
        shards.commons = Commons(shape.config, env, agent.metadata, trio.CapacityLimiter(2))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._carry, nursery)
            self.listens = True
            await nursery.start(shards.run)
            await nursery.start(agent.run, {PEER: Endpoint("node", self.number)})
            self.is_serving = True
            self._nursery = nursery
            await trio.sleep_forever()
        await env.worker.run(lambda: env.storage.replace_file(CLEAN, b""))
        env.storage.unlock()

    async def _stop_in_order(self) -> None:
        if self.is_serving:
            self.is_serving = False
            await self.shards.close()
            self._nursery.cancel_scope.cancel()

    @property
    def replicas(self) -> dict[int, ShardReplica]:
        """Those that are not damaged."""
        return {} if self.shards is None else {number: kept.replica for number, kept in self.shards._kept.items()}

    def service(self, vhost: str) -> Service | None:
        return self.shards.here(vhost) if self.is_serving and not self.is_dead else None


class _Peers:
    """Connects as core_log/peer/link.py does, without the handshake."""

    def __init__(self, life: Life) -> None:
        self._life = life

    async def connect(self, address: Endpoint, purpose: Purpose, detail: bytes = b"") -> PeerLink:
        await trio.lowlevel.checkpoint_if_cancelled()
        return await self._life.machine.net.connect(self._life, address.port, purpose, detail)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            yield from _leaves(one)
    else:
        yield error
