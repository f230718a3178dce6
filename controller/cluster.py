"""A node's part in its cluster. Driver (trio): watches the lease, is the controller when it has it, attends whoever is.

    LeaseWatch --- won ---> Reign (this node is the controller)
        |                      ^
        | who has it           | the controller's own node: a link within the process
        v                      |
    attending: Register, then what the controller says -> ClusterMetadata (snapshot, listeners, commits)
                                                      -> Replicas (promise, fence, obey), in order for each shard

What is kept on the disk, beside the shards: `cluster.kept`, the highest ballot that this node took orders from and of
which life of the database it was (L4), before any of them is carried out; `cluster.metadata`, the snapshot, so that the
node starts and serves while the database is away.

Neighbours: reign.py and brain.py for the controller; cluster_metadata.py; src/headrace composes the node.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, Protocol
from uuid import UUID

import msgspec
import trio

from headrace.controller.changes import Change, PutNode, PutShard
from headrace.controller.cluster_config import DEFAULT_CONFIG, ClusterConfig
from headrace.controller.cluster_metadata import ClusterMetadata
from headrace.controller.entities import Endpoint, Node, Version
from headrace.controller.errors import Unreachable
from headrace.controller.lease import LeaseWatch
from headrace.controller.links import Link, local_links, receive, send
from headrace.controller.messages import (
    Alter,
    Announce,
    Ask,
    Beat,
    Copies,
    Delta,
    Fence,
    Message,
    Obeyed,
    Order,
    Outcome,
    Outvoted,
    Register,
    Reported,
    UnknownMessage,
    Unwanted,
    Welcome,
    Whole,
)
from headrace.controller.passwords import DEFAULT_COST, HashCost
from headrace.controller.reign import Reign
from headrace.controller.snapshot import Snapshot
from headrace.controller.snapshot_form import decode_snapshot, encode_snapshot
from headrace.controller.store import Lease, MetaStore
from headrace.core_log.env import Env
from headrace.core_log.errors import DiskFull, Poisoned, Refused, StorageError, UnknownFormat
from headrace.core_log.peer.errors import LinkError, PeerGone, PeerUnreachable
from headrace.core_log.peer.frames import Purpose
from headrace.core_log.replication.assignment import NO_BALLOT, NOBODY, Assignment, Ballot, Member
from headrace.core_log.replication.messages import AlterIsr, CatchUp, OwnCopy, Report

_log = logging.getLogger(__name__)

KEPT = "cluster.kept"
METADATA = "cluster.metadata"
PEER = "peer"
# What waits for the controller; one that is further behind has stopped reading.
_WAITING_MAX = 10_000


class Replicas(Protocol):
    """The shards of this node. What they promise is on the disk before they return (C3)."""

    async def promise(self, shard: int, ballot: Ballot) -> Report | None:
        """None: a later controller was promised. A shard that is not here yet answers as one that has nothing."""

    async def fence(self, shard: int, ballot: Ballot, epoch: int) -> Report | None: ...

    def copies(self) -> tuple[OwnCopy, ...]:
        """Of shards whose copy here is damaged, or lies on a disk of its own (core_log/replication/damaged.py)."""

    def catching_up(self) -> tuple[CatchUp, ...]:
        """Replicas of what is led here that are not in sync yet."""

    async def obey(self, shard: int, ballot: Ballot, assignment: Assignment) -> bool:
        """False: a later controller was promised. A shard that is not here yet is made, if the row names this node; one
        whose row names it no longer stops, and goes to the trash."""


class PeerConnector(Protocol):
    """What is needed of core_log/peer/link.py's Peers."""

    async def connect(self, address: Endpoint, purpose: Purpose, detail: bytes = b"") -> Link: ...


class _Kept(msgspec.Struct, frozen=True):
    """The latest controller that this node took orders from, and of which life of which database."""

    ballot: Ballot = NO_BALLOT
    database: str = ""
    timeline: int = 0


class _Heard(NamedTuple):
    """What the controller told last of who is there."""

    nodes: tuple[int, ...] = ()
    shards: tuple[tuple[int, str], ...] = ()
    catching_up: tuple[CatchUp, ...] = ()


class ClusterAgent:
    def __init__(
        self,
        env: Env,
        member: Member,
        open_store: Callable[[], MetaStore],
        peers: PeerConnector,
        replicas: Replicas,
        *,
        clean: bool,
        config: ClusterConfig = DEFAULT_CONFIG,
        hash_cost: HashCost = DEFAULT_COST,
        hashing: trio.CapacityLimiter | None = None,
        noted: Callable[[str], None] = _log.warning,
    ) -> None:
        """`env.storage` is rooted where the node keeps its own files; `open_store` is called in the worker, once for
        the lease and once for each term as the controller. `clean`: what this node holds is all that it ever
        confirmed (it was shut down cleanly, or syncs before it confirms). `noted`: what operators must hear of, as
        elections by force; told on the controller only, and logged unless said otherwise."""
        self.member = member
        self.metadata = ClusterMetadata(config, new_uuid=env.ids.uuid, hash_cost=hash_cost, hashing=hashing)
        # Called after each change of a shard's row or of a node.
        self.changed: list[Callable[[], None]] = []
        self._env = env
        self._open_store = open_store
        self._peers = peers
        self._replicas = replicas
        self._clean = clean
        self._config = config
        self._noted = noted
        self._endpoints: tuple[tuple[str, Endpoint], ...] = ()
        self._watch = LeaseWatch(env, open_store, member.node, member.incarnation, config)
        self._reign: Reign | None = None
        self._kept = _Kept()
        self._keeping = trio.Lock()
        self._was_kept = False
        # Of the attended controller: what goes to it, and how to leave it.
        self._waiting: trio.MemorySendChannel[Message] | None = None
        self._attending: trio.CancelScope | None = None
        self._attended: Welcome | None = None
        # Who was said to be the controller, by itself.
        self._announced: Announce | None = None
        self._heard = _Heard()
        # What is known here is later than what the controller began with.
        self._is_store_older = False
        self._look_again = trio.Event()
        self._registered = trio.Event()
        self._unsaved = trio.Event()
        # Orders for a shard are carried out one after the other.
        self._turns: dict[int, trio.Lock] = {}
        self.metadata.listen(self._metadata_changed)

    # -- for the node -------------------------------------------------------------------------------------------

    @property
    def cluster(self) -> UUID:
        """Known once opened."""
        return self.metadata.snapshot.cluster

    async def open(self) -> None:
        """Read what this node kept, or else the store; waits for that. After it there is a snapshot, maybe an old one.
        UnknownFormat: a file here is not what this release writes."""
        storage = self._env.storage

        def load() -> tuple[_Kept, Snapshot | None]:
            kept = msgspec.json.decode(storage.read_file(KEPT), type=_Kept) if storage.exists(KEPT) else _Kept()
            return kept, decode_snapshot(storage.read_file(METADATA)) if storage.exists(METADATA) else None

        try:
            self._kept, snapshot = await self._env.worker.run(load)
        except msgspec.MsgspecError as error:
            raise UnknownFormat(f"{KEPT} is not what this release writes: {error}") from error
        self._was_kept = snapshot is not None
        while snapshot is None:
            try:
                snapshot = await self._watch.snapshot()
            except Unreachable as error:
                _log.warning("waiting for the metadata store: %s", error)
                await trio.sleep(self._config.heartbeat_s)
        self.metadata.begin(snapshot)

    async def run(
        self,
        endpoints: Mapping[str, Endpoint],
        *,
        task_status: "trio.TaskStatus[None]" = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Take part, until cancelled. `endpoints`: where the doors of this node are reached; "peer" is among them.

        Started once this node is registered and has the controller's snapshot; or, when no controller is found for
        `start_s`, with what it kept of an earlier run.
        """
        assert PEER in endpoints, "other nodes must be told where to connect"
        self._endpoints = tuple(sorted((door, Endpoint(*where)) for door, where in endpoints.items()))
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._save)
                nursery.start_soon(self._rule)
                nursery.start_soon(self._attend)
                nursery.start_soon(self.metadata.reserve_views)
                await self._wait_registered()
                task_status.started()
        finally:
            await self._watch.aclose()

    async def _wait_registered(self) -> None:
        with trio.move_on_after(self._config.start_s if self._was_kept else float("inf")):
            await self._registered.wait()
            await self.metadata.has_views.wait()
            return
        _log.warning(
            "no controller was found in %g s (%s): going on with the metadata of version %d that were kept",
            self._config.start_s,
            self._watch.problem or "the metadata store can be reached",
            self.metadata.snapshot.version,
        )

    def alter(self, shard: int, request: AlterIsr) -> None:
        """A leader's request, for the controller. It may be lost: ask again until an order settles it."""
        self._tell(Alter(shard, request))

    def copies_changed(self) -> None:
        """A replica was found to be damaged, or was set aside."""
        self._tell(Copies(self._replicas.copies()))

    def leader_of(self, vhost: str) -> int | None:
        """The node that leads the vhost's shard, as far as is known here; None: nobody, or no such vhost."""
        snapshot = self.metadata.snapshot
        found = snapshot.vhosts.get(vhost)
        shard = None if found is None else snapshot.shards.get(found.shard)
        return None if shard is None or shard.assignment.leader == NOBODY else shard.assignment.leader

    def shard_of(self, vhost: str) -> int | None:
        found = self.metadata.snapshot.vhosts.get(vhost)
        return None if found is None else found.shard

    def endpoint(self, node: int, door: str) -> Endpoint | None:
        found = self.metadata.snapshot.nodes.get(node)
        return None if found is None else found.endpoint(door)

    @property
    def is_controller(self) -> bool:
        return self._reign is not None

    async def drain(self, node: int) -> Version:
        """Let others lead what it leads, and copy what it holds elsewhere, if there is room; `status` has progress."""
        return await self.metadata.operate("drain", {"node": node})

    async def undrain(self, node: int) -> Version:
        return await self.metadata.operate("undrain", {"node": node})

    async def remove(self, node: int) -> Version:
        """Forget a node that holds nothing."""
        return await self.metadata.operate("remove", {"node": node})

    async def move(self, shard: int, nodes: list[int]) -> Version:
        """Replicas of the shard go to these nodes; the first leads. `status` has progress."""
        return await self.metadata.operate("move", {"shard": shard, "nodes": nodes})

    async def balance(self) -> Version:
        """Even shares, of replicas and of leadership."""
        return await self.metadata.operate("balance", {})

    async def force(self, shard: int, node: int) -> Version:
        """Let a node lead that may lack what was confirmed. Recorded."""
        return await self.metadata.operate("force", {"shard": shard, "node": node})

    def status(self) -> dict[str, Any]:
        """Plain values, for operators."""
        snapshot = self.metadata.snapshot
        attended = self._attended
        up = set(self._heard.nodes) if attended is not None else set()
        trusts = dict(self._heard.shards)
        return {
            "cluster": str(snapshot.cluster),
            "node": self.member.node,
            "incarnation": self.member.incarnation,
            "controller": None if attended is None else attended.node,
            "ballot": list(self._kept.ballot),
            "metadata_version": snapshot.version,
            "metadata_store": self._watch.problem or "ok",
            # What a failover of it may lose, if anything.
            "metadata_risk": self._watch.risk or None,
            "nodes": [
                {
                    "node": node.id,
                    "incarnation": node.incarnation,
                    "state": node.state.value,
                    # Not known without a controller.
                    "up": None if attended is None else node.id in up,
                    "leads": [one.number for one in snapshot.shards.values() if one.assignment.leader == node.id],
                    "holds": [one.number for one in snapshot.shards.values() if node.id in one.assignment.replicas],
                    "endpoints": {door: f"{where.host}:{where.port}" for door, where in node.endpoints},
                }
                for node in sorted(snapshot.nodes.values(), key=lambda node: node.id)
            ],
            "shards": [
                {
                    "shard": shard.number,
                    "leader": None if shard.assignment.leader == NOBODY else shard.assignment.leader,
                    "epoch": shard.assignment.epoch,
                    "replicas": list(shard.assignment.replicas),
                    "in_sync": sorted(shard.assignment.in_sync_nodes),
                    "min_in_sync": shard.assignment.min_isr,
                    "target": list(shard.target),
                    # Replicas that are not in sync yet, as the leader told last.
                    "catching_up": [
                        {
                            "node": one.node,
                            "records": one.records,
                            "bytes": one.size,
                            "seconds": None if one.seconds is None else round(one.seconds, 1),
                        }
                        for one in self._heard.catching_up
                        if one.shard == shard.number and attended is not None
                    ],
                    "forced_epoch": shard.forced_epoch or None,
                    "row": trusts.get(shard.number),
                    "vhosts": sorted(name for name, vhost in snapshot.vhosts.items() if vhost.shard == shard.number),
                }
                for shard in sorted(snapshot.shards.values(), key=lambda shard: shard.number)
            ],
        }

    # -- links from others --------------------------------------------------------------------------------------

    async def handle(self, link: Link) -> None:
        """The peer door's handler of Purpose.CONTROL."""
        try:
            with trio.fail_after(self._config.session_s):
                first = await receive(link)
            match first:
                case Announce():
                    self._hear_announcement(first)
                case Register() if self._reign is not None:
                    await self._reign.serve(link, first)
                case Register():
                    await send(link, Unwanted("this node is not the controller", self._holder() or 0))
                case _:
                    raise UnknownMessage(f"{type(first).__name__} does not begin anything")
        except trio.TooSlowError:
            _log.warning("a link to the controller began with silence")
        except UnknownMessage as error:
            _log.error("a link was ended: %s", error)

    def _hear_announcement(self, said: Announce) -> None:
        if said.ballot < self._kept.ballot:
            return
        self._announced = said
        if self._attended is not None and self._attended.ballot < said.ballot:
            self._leave()
        self._wake_up()

    def _wake_up(self) -> None:
        self._look_again.set()
        self._look_again = trio.Event()

    # -- being the controller -----------------------------------------------------------------------------------

    async def _rule(self) -> None:
        while True:
            lease, since_s = await self._watch.win(lambda: self._look_again)
            try:
                await self._reign_with(lease, since_s)
            except (Unreachable, StorageError) as error:
                _log.warning("this node could have been the controller, but: %s", error)
            await trio.sleep(self._config.heartbeat_s)

    async def _reign_with(self, lease: Lease, since_s: float) -> None:
        run = self._env.worker.run
        store = await run(self._open_store)
        try:
            snapshot = await run(store.snapshot)
            if snapshot.version != lease.version:
                return
            reign = self._reign = Reign(
                self._env, self._watch, store, lease, since_s, snapshot, self._config, noted=self._noted
            )
            _log.info("node %d is the controller, with ballot %s", self.member.node, tuple(lease.ballot))
            self._leave()
            self._wake_up()
            async with trio.open_nursery() as nursery:
                for node in snapshot.nodes.values():
                    if node.id != self.member.node:
                        nursery.start_soon(self._announce, reign, node)
                await reign.run()
                nursery.cancel_scope.cancel()
            _log.warning("node %d is no longer the controller: %s", self.member.node, reign.ended)
        finally:
            self._reign = None
            with trio.CancelScope(shield=True):
                await run(store.close)

    async def _announce(self, reign: Reign, node: Node) -> None:
        """Tell a node who is the controller now; one at whose door nobody listens is not waited for."""
        where = node.endpoint(PEER)
        if where is None:
            return
        try:
            link = await self._peers.connect(where, Purpose.CONTROL)
            try:
                await send(link, Announce(self.member.node, reign.lease.ballot))
            finally:
                await link.aclose()
        except PeerUnreachable:
            reign.unanswered(node.id)
        except LinkError as error:
            _log.warning("node %d could not be told who is the controller: %s", node.id, error)

    # -- attending the controller -------------------------------------------------------------------------------

    def _holder(self) -> int | None:
        """The node that is the controller, as far as this one knows."""
        if self._reign is not None:
            return self.member.node
        seen, said = self._watch.seen, self._announced
        if said is not None and (seen is None or seen.ballot <= said.ballot):
            return said.node
        return None if seen is None or seen.ballot == NO_BALLOT else seen.node

    async def _attend(self) -> None:
        while True:
            again = self._look_again
            try:
                await self._attend_once()
            except* Poisoned:
                # Nothing can be kept here any more, so no orders can be taken: this node must stop and say so (D6).
                raise
            except* (LinkError, Refused, StorageError) as errors:
                _log.info("not with a controller: %s", _first(errors))
            with trio.move_on_after(self._config.heartbeat_s / 2):
                await again.wait()

    async def _attend_once(self) -> None:
        holder = self._holder()
        if holder is None:
            return
        reign = self._reign
        if reign is not None:
            link, other = local_links()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._serve_here, reign, other)
                await self._converse(link)
                nursery.cancel_scope.cancel()
            return
        if holder == self.member.node:
            return
        await self._converse(await self._connect(holder))

    async def _serve_here(self, reign: Reign, link: Link) -> None:
        try:
            register = await receive(link)
            assert isinstance(register, Register)
            await reign.serve(link, register)
        except PeerGone:
            pass
        finally:
            await link.aclose()

    async def _connect(self, node: int) -> Link:
        known = self.endpoint(node, PEER)
        if known is not None:
            with suppress(PeerUnreachable):
                return await self._peers.connect(known, Purpose.CONTROL)
            self._watch.doubt(node)
            if self._announced is not None and self._announced.node == node:
                self._announced = None
        # It joined, or moved, after what this node has heard of.
        found = (await self._watch.snapshot()).nodes.get(node)
        where = None if found is None else found.endpoint(PEER)
        if where is None or where == known:
            raise PeerUnreachable(f"node {node} cannot be reached")
        return await self._peers.connect(where, Purpose.CONTROL)

    def _leave(self) -> None:
        if self._attending is not None:
            self._attending.cancel()

    async def _converse(self, link: Link) -> None:
        """One session with the controller, until it ends."""
        put, waiting = trio.open_memory_channel[Message](_WAITING_MAX)
        try:
            with trio.CancelScope() as self._attending:
                async with trio.open_nursery() as nursery:
                    self._waiting = put
                    nursery.start_soon(self._send_all, link, waiting)
                    self._tell(self._introduction())
                    await self._hear(link, nursery)
                    nursery.cancel_scope.cancel()
        finally:
            self._waiting = self._attending = self._attended = None
            self.metadata.unlinked()
            with trio.CancelScope(shield=True):
                await link.aclose()

    def _introduction(self) -> Register:
        snapshot = self.metadata.snapshot
        return Register(
            self.member,
            self._endpoints,
            self._clean,
            snapshot.version,
            self._kept.ballot,
            snapshot.next_view,
            tuple(snapshot.shards.values()),
            self._replicas.copies(),
        )

    def _tell(self, message: Message) -> None:
        if self._waiting is None:
            return
        try:
            self._waiting.send_nowait(message)
        except trio.WouldBlock:
            self._leave()

    async def _send_all(self, link: Link, waiting: trio.MemoryReceiveChannel[Message]) -> None:
        """What waits, and a sign of life whenever nothing does for a while."""
        while True:
            message: Message | None = None
            with trio.move_on_after(self._config.heartbeat_s):
                message = await waiting.receive()
            if message is None:
                message = Beat(self.metadata.snapshot.version, catching_up=self._replicas.catching_up())
            await send(link, message)

    async def _hear(self, link: Link, nursery: trio.Nursery) -> None:
        parts: list[bytes] = []
        while True:
            with trio.move_on_after(self._config.session_s) as silence:
                message = await receive(link)
            if silence.cancelled_caught:
                raise PeerGone(f"the controller has been silent for {self._config.session_s:g} s")
            match message:
                case Welcome():
                    if not await self._take_orders_of(message):
                        await send(link, Outvoted(self._kept.ballot))
                        return
                case Unwanted(reason, controller):
                    self.metadata.dismissed()
                    if self._announced is not None and self._announced.node != controller:
                        self._announced = None
                    raise PeerGone(reason)
                case Beat(_, nodes, shards, catching_up):
                    self._heard = _Heard(nodes, shards, catching_up)
                case Whole(data, is_last):
                    parts.append(data)
                    if is_last:
                        self._take_whole(b"".join(parts), nursery)
                        parts = []
                case Delta():
                    self.metadata.take_delta(message)
                case Outcome():
                    self.metadata.take_outcome(message)
                case Ask() | Fence() | Order():
                    # Aside, since it may take a while; signs of life go on meanwhile.
                    nursery.start_soon(self._obey, message)
                case _:
                    raise UnknownMessage(f"{type(message).__name__} is not for a node to hear")

    async def _take_orders_of(self, welcome: Welcome) -> bool:
        """Kept before anything that it orders is done (L4). False: a later one, or a later life of the database, has
        given orders here."""
        async with self._keeping:
            kept = self._kept
            is_same = kept.database == welcome.database
            if (welcome.ballot < kept.ballot) or (is_same and welcome.timeline < kept.timeline):
                _log.warning("orders of ballot %s are refused: there was a later one", tuple(welcome.ballot))
                return False
            self._is_store_older = (
                welcome.ballot != kept.ballot and kept.ballot != NO_BALLOT
            ) and self.metadata.snapshot.version >= welcome.since
            found = _Kept(welcome.ballot, welcome.database, welcome.timeline)
            if found != kept:
                data = msgspec.json.encode(found)
                await self._env.worker.run(lambda: self._env.storage.replace_file(KEPT, data))
                self._kept = found
        self._attended = welcome
        return True

    def _take_whole(self, data: bytes, nursery: trio.Nursery) -> None:
        snapshot = decode_snapshot(data)
        if snapshot.cluster != self.cluster:
            raise PeerGone("the controller has the metadata of another cluster")
        lost = self.metadata.take_whole(snapshot, is_older=self._is_store_older)
        self._is_store_older = False
        self.metadata.linked(self._tell)
        if lost:
            _log.error("the metadata store has forgotten %d things that were created: they are put back", len(lost))
            nursery.start_soon(self.metadata.offer, lost)

    async def _obey(self, message: Ask | Fence | Order) -> None:
        if message.incarnation != self.member.incarnation:
            # Meant for an earlier life of this node (C4).
            return
        shard, ballot = message.shard, message.ballot
        async with self._turns.setdefault(shard, trio.Lock()):
            match message:
                case Ask():
                    report = await self._replicas.promise(shard, ballot)
                    answer: Message | None = None if report is None else Reported(shard, 0, report)
                case Fence(epoch=epoch):
                    report = await self._replicas.fence(shard, ballot, epoch)
                    answer = None if report is None else Reported(shard, epoch, report)
                case Order(assignment=assignment):
                    obeyed = await self._replicas.obey(shard, ballot, assignment)
                    answer = Obeyed(shard, assignment.epoch) if obeyed else None
        self._tell(answer if answer is not None else Outvoted(self._kept.ballot))

    # -- keeping ------------------------------------------------------------------------------------------------

    def _metadata_changed(self, snapshot: Snapshot, changes: Sequence[Change]) -> None:
        self._unsaved.set()
        mine = snapshot.nodes.get(self.member.node)
        if mine is not None and mine.member == self.member:
            self._registered.set()
        if any(isinstance(change, PutShard | PutNode) for change in changes):
            for callback in tuple(self.changed):
                callback()

    async def _save(self) -> None:
        """The snapshot, soon after it has changed; changes come in bursts, and one file is enough for many."""
        while True:
            await self._unsaved.wait()
            self._unsaved = trio.Event()
            try:
                await self._env.worker.run(partial(self._write_metadata, self.metadata.snapshot))
            except DiskFull as error:
                _log.warning("the metadata were not kept for the next start: %s", error)
                self._unsaved.set()
            await trio.sleep(self._config.heartbeat_s)

    def _write_metadata(self, snapshot: Snapshot) -> None:
        self._env.storage.replace_file(METADATA, encode_snapshot(snapshot))


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    found: BaseException = errors
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found
