"""Three replicas of a shard in one process, with links over loopback sockets or in memory. Driver for tests: trio.

The controller is the test: it orders, and grants what leaders ask for unless told not to.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from random import Random
from typing import NamedTuple
from uuid import UUID

import trio
from tests.core_log.peer.memory import hello_of, memory_pair

from headrace.controller.elections import altered, elected
from headrace.core_log.config import DirectoryConfig, LogConfig
from headrace.core_log.directory import Stream
from headrace.core_log.env import Env
from headrace.core_log.errors import CorruptLog, StorageError
from headrace.core_log.log import PartitionLog
from headrace.core_log.peer.door import PeerDoor
from headrace.core_log.peer.errors import PeerUnreachable
from headrace.core_log.peer.frames import Purpose
from headrace.core_log.peer.link import PeerLink, Peers
from headrace.core_log.real import SystemClock, SystemIds, ThreadWorker
from headrace.core_log.record import Gap
from headrace.core_log.replication.assignment import Assignment, Ballot, Member, RowVersion, Stint
from headrace.core_log.replication.config import ReplicationConfig
from headrace.core_log.replication.messages import AlterIsr
from headrace.core_log.replication.shard import ShardReplica
from headrace.core_log.storage.contract import Storage
from headrace.core_log.storage.memory import MemoryStorage
from headrace.exits import causes

BALLOT = Ballot(1, 1)
SECRET = b"a secret of the cluster"
QUICK = ReplicationConfig(
    lag_s=0.6, gone_s=0.3, wait_s=0.1, silence_s=30, watermark_s=0.005, retry_s=0.01, tick_s=0.02, alter_s=0.05
)
SMALL = LogConfig(
    segment_bytes_max=4096, batch_bytes_max=1024, index_interval_bytes=256, offsets_reserved=100, compression="none"
)


class Where(NamedTuple):
    host: str
    port: int


@dataclass(slots=True)
class Node:
    """One node: its disk, and the life that it leads now."""

    number: int
    storage: Storage
    disk: UUID
    incarnation: int = 0
    replica: ShardReplica | None = None
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    ended: trio.Event = field(default_factory=trio.Event)
    address: Where | None = None
    served: list[Stint] = field(default_factory=list)
    stepped_down_count: int = 0
    links: list[PeerLink] = field(default_factory=list)
    # Of this life: who serves its followers dies with it.
    nursery: trio.Nursery | None = None
    on_step_down: Callable[[], None] = lambda: None

    @property
    def member(self) -> Member:
        return Member(self.number, self.incarnation, self.disk)

    @property
    def shard(self) -> ShardReplica:
        assert self.replica is not None
        return self.replica


class Cluster:
    def __init__(
        self,
        nursery: trio.Nursery,
        *,
        config: ReplicationConfig = QUICK,
        storages: list[Storage] | None = None,
        sockets: bool = False,
        directory: DirectoryConfig | None = None,
        ended: list[CorruptLog] | None = None,
    ) -> None:
        """`ended`: a replica that turns out to be damaged puts into this what it found."""
        self.nursery = nursery
        self.ended = ended
        self.config = config
        self.directory = directory or DirectoryConfig()
        self.sockets = sockets
        found = storages or [MemoryStorage() for _ in range(3)]
        self.nodes = [Node(number, storage, UUID(int=number + 1)) for number, storage in enumerate(found)]
        self.row: Assignment
        self.requests: list[AlterIsr] = []
        self.grants = True
        # Nodes that nobody can reach, and that reach nobody.
        self.cut_off: set[int] = set()
        self._ordered = trio.Event()

    async def start(self, number: int, *, clean: bool = False) -> None:
        node = self.nodes[number]
        node.incarnation += 1
        node.scope, node.ended = trio.CancelScope(), trio.Event()
        node.links = []
        node.replica = node.nursery = None
        env = Env(SystemClock(), node.storage, ThreadWorker(2), SystemIds(), Random(number))

        async def stepped_down() -> None:
            node.stepped_down_count += 1
            node.on_step_down()
            await trio.lowlevel.checkpoint()

        async def connect(other: int) -> PeerLink:
            return await self._connect(node, other)

        replica = ShardReplica(
            env,
            0,
            node.member,
            self.directory,
            connect=connect,
            alter=lambda _shard, request: self._alter(request),
            stepped_down=stepped_down,
            leading=node.served.append,
            config=self.config,
        )
        await replica.open(clean=clean)
        node.replica = replica
        await self.nursery.start(self._run, node)

    async def _run(self, node: Node, *, task_status: "trio.TaskStatus[None]") -> None:
        replica = node.shard
        try:
            await self._run_replica(node, replica, task_status)
        except* CorruptLog as group:
            if self.ended is None:
                raise
            self.ended += causes(group)  # type: ignore[arg-type]

    async def _run_replica(self, node: Node, replica: ShardReplica, task_status: "trio.TaskStatus[None]") -> None:
        try:
            with node.scope:
                async with trio.open_nursery() as node.nursery:
                    nursery = node.nursery
                    if self.sockets:
                        door = PeerDoor(
                            lambda: hello_of(node.number, incarnation=node.incarnation, disk=node.disk),
                            SECRET,
                            lambda: Random().randbytes(32),
                            {Purpose.FETCH: replica.serve_fetch},
                        )
                        node.address = Where(*await door.open("127.0.0.1", 0))
                        nursery.start_soon(door.serve)
                    nursery.start_soon(replica.run)
                    task_status.started()
        finally:
            for link in node.links:
                link.close()
            node.ended.set()

    async def _connect(self, node: Node, other: int) -> PeerLink:
        target = self.nodes[other]
        # One that is about to run, or was cancelled a moment ago, takes no tasks.
        is_there = target.nursery is not None and not target.scope.cancel_called and not target.ended.is_set()
        if self.cut_off & {node.number, other} or not is_there:
            await trio.lowlevel.checkpoint()
            raise PeerUnreachable(f"node {other}")
        me = hello_of(node.number, Purpose.FETCH, incarnation=node.incarnation, disk=node.disk)
        if self.sockets:
            assert target.address is not None
            link = await Peers(lambda: me, SECRET, lambda: Random().randbytes(32)).connect(
                target.address, Purpose.FETCH, b"0"
            )
            node.links.append(link)
            return link
        await trio.lowlevel.checkpoint()
        link, far = memory_pair(me, hello_of(other, incarnation=target.incarnation, disk=target.disk))
        node.links.append(link)
        target.links.append(far)
        assert target.nursery is not None
        target.nursery.start_soon(target.shard.serve_fetch, far)
        return link

    async def kill(self, number: int) -> None:
        """As kill -9: what the process has written stays, and nothing is closed in good order."""
        node = self.nodes[number]
        node.scope.cancel()
        await node.ended.wait()
        if isinstance(node.storage, MemoryStorage):
            node.storage = node.storage.process_crash()

    def disconnect(self, number: int) -> None:
        self.cut_off.add(number)
        for node in self.nodes:
            for link in node.links:
                if number in (node.number, link.hello.node):
                    link.close()

    # -- the controller -----------------------------------------------------------------------------------------

    async def found(self, *, leader: int = 0, min_isr: int = 2, isr: tuple[int, ...] = (0, 1, 2)) -> None:
        """The shard's first row."""
        copies = tuple(self.nodes[number].member.copy for number in isr)
        life = self.nodes[leader].incarnation
        self.row = Assignment((0, 1, 2), leader, life, 1, copies, RowVersion(1, BALLOT), min_isr)
        await self.order()

    async def order(self) -> None:
        for node in self.nodes:
            if node.replica is not None and not node.ended.is_set() and node.number not in self.cut_off:
                disk = node.storage
                try:
                    assert await node.replica.obey(BALLOT, self.row)
                except StorageError:
                    if node.storage is disk:
                        raise
                    # It died while it wrote the order down.

    async def elect(self, leader: int) -> None:
        row = elected(self.row, self._active(), BALLOT, prefer=(leader,))
        assert row is not None and row.leader == leader
        self.row = row
        await self.order()

    async def force(self, leader: int) -> None:
        """As an operator does it when nobody who has everything will come back."""
        row, member = self.row, self.nodes[leader].member
        epoch = row.epoch + 1
        self.row = replace(
            row,
            leader=leader,
            leader_incarnation=member.incarnation,
            epoch=epoch,
            isr=(member.copy,),
            eligible=(),
            version=RowVersion(row.version.number + 1, BALLOT),
            forced_epoch=epoch,
        )
        await self.order()

    def _active(self) -> dict[int, Member]:
        alive = [node for node in self.nodes if not node.ended.is_set() and node.number not in self.cut_off]
        return {node.number: node.member for node in alive}

    def _alter(self, request: AlterIsr) -> None:
        self.requests.append(request)
        if self.grants:
            row = altered(self.row, request, self._active(), BALLOT)
            if row is not None:
                self.row = row
                self.nursery.start_soon(self.order)

    # -- what tests do ------------------------------------------------------------------------------------------

    @property
    def leader(self) -> ShardReplica:
        return self.nodes[self.row.leader].shard

    def log(self, number: int, stream: Stream, partition: int = 0) -> PartitionLog:
        return self.nodes[number].shard.directory.streams[stream.spec.id].partitions[partition]

    async def create(self, name: str = "orders", config: LogConfig = SMALL, partitions: int = 1) -> Stream:
        directory = self.leader.directory
        return await directory.create_stream(name, kind="topic", config=config, partition_count=partitions)

    def write(self, stream: Stream, *values: bytes, partition: int = 0, number: int | None = None) -> trio.Event:
        """Append at the leader; the event is set when the last of them is committed."""
        shard = self.leader if number is None else self.nodes[number].shard
        log = shard.directory.streams[stream.spec.id].partitions[partition]
        appended = log.append([b"k"] * len(values), [b""] * len(values), values, timestamp_us=1)
        done = trio.Event()
        log.when_committed(appended.next_offset, done.set)
        shard.directory.committer.urgent(log)
        return done

    def values(self, number: int, stream: Stream, partition: int = 0) -> list[bytes]:
        """All that a replica holds, committed or not."""
        log = self.log(number, stream, partition)
        found: list[bytes] = []
        offset = int(log.log_start)
        while offset < log.written_end:
            for batch, first, last in log.read(offset, end=int(log.written_end)):
                found += batch.values[first:last]
                offset = int(batch.next_offset)
        return found

    def batches(self, number: int, stream: Stream, partition: int = 0) -> list[bytes]:
        """Batches as stored, below the watermark, without what differs on each disk: salt, hash, durable offset."""
        log = self.log(number, stream, partition)
        found = []
        for segment in log.segments:
            for position, header in segment.headers():
                if header.next_offset <= log.high_watermark and header.base_offset >= log.log_start:
                    data = segment.file.read(position, header.size)
                    found.append(data[:8] + data[24:56] + data[64:])
        return found

    def gaps(self, number: int, stream: Stream, partition: int = 0) -> list[tuple[int, int, Gap]]:
        """Below the watermark: from which offset on, up to which one, why."""
        log = self.log(number, stream, partition)
        batches = [run.batch for run in log.runs()]
        return [(int(one.base_offset), int(one.next_offset), one.gap) for one in batches if one.gap is not None]

    def ends_equal(self, stream: Stream, *numbers: int) -> bool:
        """All hold, synced and committed, what the leader has."""
        end = self.log(self.row.leader, stream).written_end
        logs = [self.nodes[one].shard.directory.streams.get(stream.spec.id) for one in numbers or (0, 1, 2)]
        return all(
            one is not None and one.partitions[0].synced_end == end and one.partitions[0].high_watermark == end
            for one in logs
        )


async def until(condition: Callable[[], bool], seconds: float = 40) -> None:
    with trio.fail_after(seconds):
        while not condition():
            await trio.sleep(0.002)


@asynccontextmanager
async def cluster(**more: object) -> AsyncIterator[Cluster]:
    async with trio.open_nursery() as nursery:
        found = Cluster(nursery, **more)  # type: ignore[arg-type]
        with trio.fail_after(120):
            for number in range(3):
                await found.start(number)
            yield found
        nursery.cancel_scope.cancel()


def without_gone(config: ReplicationConfig = QUICK) -> ReplicationConfig:
    """Nobody leaves the in-sync set by itself."""
    return replace(config, lag_s=1000, gone_s=1000)
