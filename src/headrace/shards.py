"""The shards of a cluster's node: the replicas that it has, those that it leads, and the way to who leads the others.
Driver.

Replicas come with the first order that names this node, and go with the first that no longer does. One whose files turn
out to be damaged leaves the others be: it is a DamagedReplica until others have taken over, and then begins anew.
Neighbours:
core_log/replication/shard.py is one of them, led_shard.py what is served of one that is led, controller/cluster.py
brings the orders, cluster_node.py puts it all together.
"""

import logging
import socket
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import cast
from uuid import UUID

import trio

from headrace.controller.cluster import PEER, ClusterAgent
from headrace.core_log.config import DirectoryConfig
from headrace.core_log.directory import remove_tree
from headrace.core_log.env import Env
from headrace.core_log.errors import CorruptLog
from headrace.core_log.peer.errors import LinkError, PeerUnreachable
from headrace.core_log.peer.frames import Hello, Purpose
from headrace.core_log.peer.link import PeerLink, Peers
from headrace.core_log.peer.wire import SocketWire
from headrace.core_log.replication.assignment import Assignment, Ballot, Member, Stint
from headrace.core_log.replication.config import ReplicationConfig
from headrace.core_log.replication.damaged import DamagedReplica, read_disk
from headrace.core_log.replication.messages import CatchUp, OwnCopy, Report
from headrace.core_log.replication.shard import ShardReplica
from headrace.core_log.replication.status import ShardStatus
from headrace.core_log.storage.contract import Storage
from headrace.exits import causes
from headrace.gateways.relay.answering import RelayAnswers
from headrace.gateways.relay.leaders import NoLeader
from headrace.led_shard import LedShard
from headrace.service import Commons, Service

_log = logging.getLogger(__name__)

FOLDER = "shards"
# How long a stop waits for what was settled to be safe with the others: they may be stopping too.
CLOSE_SECONDS_MAX = 10.0


class _Kept:
    """One replica, and what runs it."""

    def __init__(self, env: Env, replica: ShardReplica) -> None:
        self.env = env
        self.replica = replica
        self.led: LedShard | None = None
        self.scope = trio.CancelScope()
        self.ended = trio.Event()


class Shards:
    """The Replicas of the controller's agent, and the Leaders of the doors."""

    def __init__(
        self,
        env: Env,
        storage_of: Callable[[str], Storage],
        member: Member,
        *,
        clean: bool,
        directory: DirectoryConfig,
        replication: ReplicationConfig,
        patience_s: float,
    ) -> None:
        """`storage_of`: a folder of the data directory, as a storage of its own."""
        self.patience_s = patience_s
        # Handed in by cluster_node.py, before `run`.
        self.agent: ClusterAgent
        self.peers: Peers
        self.commons: Commons
        self.answers = RelayAnswers(self)
        # Called when another node leads a vhost than before, or clients can be served here.
        self.moved: list[Callable[[str], None]] = []
        self._env = env
        self._storage_of = storage_of
        self._member = member
        self._clean = clean
        self._directory = directory
        self._replication = replication
        self._kept: dict[int, _Kept] = {}
        self._damaged: dict[int, DamagedReplica] = {}
        # Of shards that lie on a disk of their own.
        self._disks: dict[int, UUID] = {}
        self._making = trio.Lock()
        # What the controller wants of a replica, and that it was found to be damaged, one after the other.
        self._turns: dict[int, trio.Lock] = {}
        self._nursery: trio.Nursery | None = None
        self._leaders: dict[str, int | None] = {}
        self._changed = trio.Event()
        self._stopping = False

    # -- running --------------------------------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Open what is there, and keep it, until cancelled. Raises when a replica must not go on."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            if self._env.storage.exists(FOLDER):
                for name in sorted(self._env.storage.list(FOLDER), key=int):
                    async with self._turn(int(name)):
                        await self._have(int(name))
            self.agent.changed.append(self._look)
            task_status.started()
            await trio.sleep_forever()

    async def close(self) -> None:
        """What was settled is safe, and the next start need not scan."""
        self._stopping = True
        for kept in list(self._kept.values()):
            led = kept.led
            if led is not None:
                with trio.move_on_after(CLOSE_SECONDS_MAX) as patience:
                    await led.close()
                if patience.cancelled_caught:
                    _log.warning("shard %d: too few others are there to keep what was settled", kept.replica.shard)
                    # It may have been told meanwhile that another one leads: once is enough.
                    await led.step_down("this node stops")
        for kept in list(self._kept.values()):
            await kept.replica.close()
        self._kept = {}

    @property
    def replicas(self) -> dict[int, ShardReplica | DamagedReplica]:
        return {**{number: kept.replica for number, kept in self._kept.items()}, **self._damaged}

    def statuses(self) -> list[ShardStatus]:
        return [replica.status() for replica in self.replicas.values()]

    def services(self) -> Iterable[tuple[int, Service]]:
        """Of the shards that are served here."""
        for number, kept in self._kept.items():
            if kept.led is not None and kept.led.service is not None:
                yield number, kept.led.service

    # -- replicas -------------------------------------------------------------------------------------------------

    def copies(self) -> tuple[OwnCopy, ...]:
        own = {number: OwnCopy(number, disk, False) for number, disk in self._disks.items()}
        own |= {number: OwnCopy(number, one.member.disk, True) for number, one in self._damaged.items()}
        return tuple(found for _number, found in sorted(own.items()))

    def catching_up(self) -> tuple[CatchUp, ...]:
        return tuple(one for kept in self._kept.values() for one in kept.replica.catching_up())

    async def promise(self, shard: int, ballot: Ballot) -> Report | None:
        async with self._turn(shard):
            return await (await self._have(shard)).promise(ballot)

    async def fence(self, shard: int, ballot: Ballot, epoch: int) -> Report | None:
        async with self._turn(shard):
            return await (await self._have(shard)).fence(ballot, epoch)

    async def obey(self, shard: int, ballot: Ballot, assignment: Assignment) -> bool:
        async with self._turn(shard):
            replica = await self._have(shard)
            is_obeyed = await replica.obey(ballot, assignment)
            if is_obeyed and self._member.node not in assignment.replicas:
                await self._let_go(shard)
            elif isinstance(replica, DamagedReplica) and replica.is_superfluous:
                await replica.set_aside()
                del self._damaged[shard]
                await self._have(shard)
                self.agent.copies_changed()
            return is_obeyed

    def _turn(self, number: int) -> trio.Lock:
        return self._turns.setdefault(number, trio.Lock())

    async def _have(self, number: int) -> ShardReplica | DamagedReplica:
        async with self._making:
            if number in self._damaged:
                return self._damaged[number]
            kept = self._kept.get(number)
            if kept is not None:
                return kept.replica
            return await self._open(number)

    async def _open(self, number: int) -> ShardReplica | DamagedReplica:
        assert self._nursery is not None, "orders are taken while it runs"
        storage = await self._env.worker.run(lambda: self._storage_of(f"{FOLDER}/{number}"))
        env = replace(self._env, storage=storage)
        own_disk = await self._env.worker.run(lambda: read_disk(storage))
        if own_disk is not None:
            self._disks[number] = own_disk
        member = self._member._replace(disk=own_disk or self._member.disk)

        async def connect(node: int) -> PeerLink:
            return await self._connect(node, Purpose.FETCH, str(number).encode())

        async def stepped_down() -> None:
            await self._stepped_down(kept)

        replica = ShardReplica(
            env,
            number,
            member,
            self._directory,
            connect=connect,
            alter=self.agent.alter,
            stepped_down=stepped_down,
            leading=lambda stint: self._lead(kept, stint),
            config=self._replication,
        )
        try:
            await replica.open(clean=self._clean)
        except CorruptLog as error:
            return await self._is_damaged(env, number, member, error)
        kept = self._kept[number] = _Kept(env, replica)
        self._nursery.start_soon(self._run, kept)
        return replica

    async def _run(self, kept: _Kept) -> None:
        found: list[CorruptLog] = []
        try:
            with kept.scope:
                await kept.replica.run()
        except* CorruptLog as group:
            found += cast(list[CorruptLog], causes(group))
        finally:
            kept.ended.set()
        if found:
            await self._put_out_of_service(kept, found[0])

    async def _put_out_of_service(self, kept: _Kept, error: CorruptLog) -> None:
        number = kept.replica.shard
        async with self._turn(number), self._making:
            if self._kept.get(number) is not kept:
                return
            await self._stepped_down(kept)
            await kept.replica.abandon()
            del self._kept[number]
            await self._is_damaged(kept.env, number, kept.replica.member, error)
        self.agent.copies_changed()

    async def _is_damaged(self, env: Env, number: int, member: Member, error: CorruptLog) -> DamagedReplica:
        damaged = DamagedReplica(env, number, member, error)
        await damaged.open()
        self._damaged[number] = damaged
        return damaged

    async def _let_go(self, number: int) -> None:
        """This node is no longer one of the shard's; others have all that it had."""
        async with self._making:
            self._damaged.pop(number, None)
            self._disks.pop(number, None)
            kept = self._kept.pop(number, None)
            if kept is not None:
                await self._stepped_down(kept)
                kept.scope.cancel()
                await kept.ended.wait()
            _log.info("shard %d is kept by others now", number)

            def remove() -> None:
                remove_tree(self._env.storage, f"{FOLDER}/{number}")
                self._env.storage.sync_dir(FOLDER)

            await self._env.worker.run(remove)

    # -- leading --------------------------------------------------------------------------------------------------

    def _lead(self, kept: _Kept, stint: Stint) -> None:
        if self._stopping:
            return
        assert self._nursery is not None and kept.led is None
        number = kept.replica.shard
        _log.info("this node leads shard %d", number, extra={"epoch": stint.epoch})
        replica = kept.replica
        kept.led = LedShard(
            number, self.commons, kept.env, replica.directory, replica.writable, replica.may_dispatch_alone
        )
        self._nursery.start_soon(self._serve, kept, kept.led)

    async def _serve(self, kept: _Kept, led: LedShard) -> None:
        try:
            await led.run(self._serving)
        except* CorruptLog as group:
            kept.replica.note_damage(cast(CorruptLog, causes(group)[0]))

    def _serving(self, led: LedShard) -> None:
        self._wake()
        for vhost, found in self.agent.metadata.snapshot.vhosts.items():
            if found.shard == led.number:
                self._tell(vhost)

    async def _stepped_down(self, kept: _Kept) -> None:
        if kept.led is not None:
            led, kept.led = kept.led, None
            await led.step_down("another node leads this vhost now: connect again")

    # -- leaders --------------------------------------------------------------------------------------------------

    def parts(self) -> list[list[str]]:
        found: dict[int, list[str]] = {}
        for name, vhost in sorted(self.agent.metadata.snapshot.vhosts.items()):
            found.setdefault(vhost.shard, []).append(name)
        return [names for _number, names in sorted(found.items())]

    def here(self, vhost: str) -> Service | None:
        number = self.agent.shard_of(vhost)
        kept = None if number is None else self._kept.get(number)
        return None if kept is None or kept.led is None else kept.led.service

    async def connect(self, vhost: str, detail: bytes) -> PeerLink:
        """A link to whoever leads the vhost. Raises LinkError, NoLeader."""
        with trio.move_on_after(self.patience_s):
            while True:
                changed = self._changed
                if self.here(vhost) is not None:
                    return self._to_myself(detail)
                leader = self.agent.leader_of(vhost)
                if leader is not None and leader != self._member.node:
                    link = await self._connect_while_leading(vhost, leader, detail)
                    if link is not None:
                        return link
                    continue
                await changed.wait()
        raise NoLeader(f"nobody leads vhost '{vhost}'")

    async def _connect_while_leading(self, vhost: str, leader: int, detail: bytes) -> PeerLink | None:
        """None: another one leads by now. One that has fallen silent is not waited for any longer then."""
        link: PeerLink | None = None
        failure: LinkError | None = None
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                while self.agent.leader_of(vhost) == leader:
                    await self._changed.wait()
                nursery.cancel_scope.cancel()

            nursery.start_soon(watch)
            try:
                link = await self._connect(leader, Purpose.RELAY, detail)
            except LinkError as error:
                failure = error
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure
        return link

    async def _connect(self, node: int, purpose: Purpose, detail: bytes) -> PeerLink:
        where = self.agent.endpoint(node, PEER)
        if where is None:
            raise PeerUnreachable(f"it is not known where node {node} is")
        return await self.peers.connect(where, purpose, detail)

    def _to_myself(self, detail: bytes) -> PeerLink:
        """A client that came in here, was relayed, and whose vhost this node leads by now."""
        assert self._nursery is not None
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setblocking(False)
        member = self._member
        hello = Hello(self.agent.cluster, member.node, member.incarnation, member.disk, Purpose.RELAY, detail)
        self._nursery.start_soon(self._answer, PeerLink(SocketWire(theirs), hello))
        return PeerLink(SocketWire(ours), hello)

    async def _answer(self, link: PeerLink) -> None:
        try:
            await self.answers.handle(link)
        except LinkError as error:
            _log.debug("a link of this node to itself ended: %s", error)
        finally:
            link.close()

    async def serve_fetch(self, link: PeerLink) -> None:
        """The peer door's handler of FETCH links."""
        kept = self._kept.get(int(link.hello.detail)) if link.hello.detail.isdigit() else None
        if kept is not None:
            await kept.replica.serve_fetch(link)

    def _look(self) -> None:
        """Rows have changed."""
        self._wake()
        for vhost in self.agent.metadata.snapshot.vhosts:
            leader = self.agent.leader_of(vhost)
            if leader is not None and self._leaders.get(vhost) != leader:
                self._leaders[vhost] = leader
                # One that is to lead here is told of when it serves.
                if leader != self._member.node:
                    self._tell(vhost)

    def _tell(self, vhost: str) -> None:
        for tell in self.moved:
            tell(vhost)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()
