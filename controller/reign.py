"""A node's time as the controller of its cluster. Driver (trio): sessions of the nodes, commits, the lease.

    nodes' requests --.                               .--> Delta to every session, then each one's Outcome
    Brain.decide -----+--> one transaction, by ballot +--> Brain.committed -> orders
                      '--- what was refused, at once

It ends (`run` returns) when the lease could not be renewed in time, when somebody else has moved the metadata, or when
a replica has promised a later controller. Whatever it ordered until then carries its ballot, by which it is told from
what its successor orders; nothing here must be right about the time for that.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from uuid import UUID

import trio

from headrace.controller.brain import Arrival, Brain, Note, ToAsk, ToFence, ToOrder
from headrace.controller.changes import (
    Change,
    DeleteNode,
    PutNode,
    PutShard,
    decode_changes,
    encode_changes,
)
from headrace.controller.cluster_config import ClusterConfig
from headrace.controller.entities import Version
from headrace.controller.errors import Invalid, OutcomeUnknown, Unreachable
from headrace.controller.lease import LeaseWatch
from headrace.controller.links import Link, receive, send
from headrace.controller.messages import (
    Alter,
    Ask,
    Beat,
    Commit,
    Copies,
    Delta,
    Fence,
    Message,
    Obeyed,
    Operate,
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
from headrace.controller.snapshot import Snapshot, apply
from headrace.controller.snapshot_form import encode_snapshot
from headrace.controller.store import Committed, Lease, Lost, MetaStore, NotCommitted, Unknown
from headrace.core_log.env import Env
from headrace.core_log.errors import DiskFull, HeadraceError, Refused, StorageError, UnknownFormat
from headrace.core_log.peer.errors import PeerGone
from headrace.core_log.replication.messages import CatchUp

_log = logging.getLogger(__name__)

# What waits for a session; one that is further behind than this has stopped reading.
_WAITING_MAX = 10_000
_PART_BYTES = 4 * 1024 * 1024
# How many changes are applied to memory before others on the loop get a turn (some 10 us each).
_CHANGES_PER_TURN = 50


class _Session:
    def __init__(self, member_node: int, incarnation: int) -> None:
        self.node = member_node
        self.incarnation = incarnation
        self.scope = trio.CancelScope()
        self.catching_up: tuple[CatchUp, ...] = ()
        self._put, self.waiting = trio.open_memory_channel[Message](_WAITING_MAX)

    def tell(self, message: Message) -> None:
        try:
            self._put.send_nowait(message)
        except trio.WouldBlock:
            self.scope.cancel()
        except trio.ClosedResourceError:
            pass

    def finish(self, message: Message, within_s: float) -> None:
        """That is the last it hears."""
        self.tell(message)
        self._put.close()
        self.scope.deadline = trio.current_time() + within_s


@dataclass(slots=True)
class _Request:
    session: _Session
    number: int
    # Given the brain as it is when its turn comes; raises what the caller is to hear.
    make: Callable[[Brain], list[Change]]
    # Decided by the brain, on its rows: goes alone.
    is_operation: bool

    def answer(self, version: Version) -> None:
        self.session.tell(Outcome(self.number, version))

    def fail(self, error: HeadraceError) -> None:
        # By the nearest name that the other side knows.
        self.session.tell(Outcome(self.number, None, type(error).__name__, str(error)))


class Reign:
    def __init__(
        self,
        env: Env,
        watch: LeaseWatch,
        store: MetaStore,
        lease: Lease,
        since_s: float,
        snapshot: Snapshot,
        config: ClusterConfig,
        *,
        noted: Callable[[str], None],
    ) -> None:
        """`lease` counts from `since_s` on; `noted` is told what operators must hear of."""
        self._env = env
        self._watch = watch
        self._store = store
        self._config = config
        self._noted = noted
        self.lease = lease
        self.brain = Brain(lease.ballot, snapshot, config, env.clock.monotonic())
        self._since = snapshot.version
        self.ended: str | None = None
        self._deadline_s = since_s + config.self_deadline_s
        self._sessions: dict[int, _Session] = {}
        self._requests: list[_Request] = []
        self._under_way: list[_Request] = []
        self._wake = trio.Event()
        # Renewing compares the version, which a commit moves.
        self._turn = trio.Lock()
        self._scope = trio.CancelScope()
        self._whole: tuple[int, bytes] | None = None

    # -- its term -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Returns when it is over; `ended` says why."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._renew)
                    nursery.start_soon(self._decide)
                    nursery.start_soon(self._beat)
        finally:
            self.ended = self.ended or "this node is stopping"
            # Nothing of what waits will be done; what was under way when this ended, nobody knows.
            for request in self._requests:
                request.fail(Unreachable("the controller has stepped down; nothing was changed"))
            for request in self._under_way:
                request.fail(OutcomeUnknown("the controller was lost while it made this change: it may count, or not"))
            self._requests, self._under_way = [], []
            for session in tuple(self._sessions.values()):
                session.finish(Unwanted(self.ended, 0), self._config.heartbeat_s)

    def end(self, why: str) -> None:
        self.ended = self.ended or why
        self._scope.cancel()

    async def _renew(self) -> None:
        while True:
            await trio.sleep(self._config.renew_s)
            async with self._turn:
                sent_s = self._env.clock.monotonic()
                try:
                    renewed = await self._watch.renew(self.lease)
                except Unreachable as error:
                    _log.warning("the lease was not renewed: %s", error)
                else:
                    if isinstance(renewed, Lost):
                        self.end("somebody else has taken the lease, or moved the metadata")
                        return
                    self.lease = renewed
                    self._deadline_s = sent_s + self._config.self_deadline_s
            if self._is_late():
                return

    def _is_late(self) -> bool:
        if self._env.clock.monotonic() < self._deadline_s:
            return False
        self.end("the lease could not be renewed in time")
        return True

    async def _beat(self) -> None:
        while True:
            trusts = tuple((number, trust.name.lower()) for number, trust in sorted(self.brain.trusts.items()))
            behind = tuple(one for _node, session in sorted(self._sessions.items()) for one in session.catching_up)
            beat = Beat(self.brain.snapshot.version, tuple(sorted(self.brain.sessions)), trusts, behind)
            for session in self._sessions.values():
                session.tell(beat)
            await trio.sleep(self._config.heartbeat_s)

    # -- deciding and committing --------------------------------------------------------------------------------

    def wake(self) -> None:
        self._wake.set()

    def unanswered(self, node: int) -> None:
        """Nobody listens at that node's door."""
        if node not in self._sessions:
            self.brain.left(node, self._env.clock.monotonic())
            self.wake()

    async def _decide(self) -> None:
        while not self._is_late():
            self._send_effects()
            operations = [request for request in self._requests if request.is_operation]
            batch = operations[:1] or self._requests
            own = [] if operations else self.brain.decide(self._env.clock.monotonic())
            self._send_effects()
            if own or batch:
                self._requests = [request for request in self._requests if request not in batch]
                self._under_way = list(batch)
                await self._commit_batch(own, batch)
                self._under_way = []
                # What was decided may lead to more; whoever waits has a turn first.
                await trio.lowlevel.checkpoint()
                continue
            with trio.move_on_after(self._config.heartbeat_s):
                await self._wake.wait()
            self._wake = trio.Event()

    async def _commit_batch(self, own: Sequence[Change], batch: Sequence[_Request]) -> None:
        seen = self.brain.snapshot
        version = Version(seen.version + 1)
        after = apply(seen, own, version)
        changes = list(own)
        accepted: list[_Request] = []
        # Told when the rest was committed: a refusal may rest on a request before it, which its caller will look for.
        refused: list[tuple[_Request, Refused]] = []
        pause = _CHANGES_PER_TURN
        for request in batch:
            try:
                wanted = request.make(self.brain)
                after = apply(after, wanted, version)
            except Refused as refusal:
                refused.append((request, refusal))
            else:
                accepted.append(request)
                changes += wanted
                pause -= len(wanted)
                if pause <= 0:
                    pause = _CHANGES_PER_TURN
                    await trio.lowlevel.checkpoint()
        if changes or accepted:
            try:
                await self._commit(seen.version, changes)
            except (Unreachable, DiskFull, OutcomeUnknown) as error:
                for request in accepted:
                    request.fail(error)
                for request, reason in refused:
                    request.fail(reason)
                self._under_way = []
                if not isinstance(error, OutcomeUnknown):
                    # The store may be there again in a moment.
                    await trio.sleep(self._config.heartbeat_s)
                return
            self._publish(after, changes)
        for request in accepted:
            request.answer(version)
        for request, reason in refused:
            request.fail(reason)

    def _publish(self, after: Snapshot, changes: Sequence[Change]) -> None:
        delta = Delta(after.version, encode_changes(changes))
        for session in self._sessions.values():
            session.tell(delta)
        self.brain.committed(after)

    async def _commit(self, seen: Version, changes: Sequence[Change]) -> None:
        """Returns when it counts. Unreachable, DiskFull: it does not. OutcomeUnknown: this term is over."""
        async with self._turn:
            txn = self._env.ids.uuid()
            ballot = self.lease.ballot
            outcome: Committed | NotCommitted | Lost | Unknown
            try:
                outcome = await self._env.worker.run(lambda: self._store.commit(seen, changes, txn, ballot))
            except (Unreachable, DiskFull):
                raise
            except StorageError as error:
                self.end(f"the metadata store has failed: {error}")
                raise OutcomeUnknown(f"the metadata store has failed: {error}") from error
            while isinstance(outcome, Unknown):
                outcome = await self._resolve(seen, txn)
        match outcome:
            case Committed(version):
                self.lease = replace(self.lease, version=version)
            case NotCommitted():
                raise Unreachable("the metadata store was lost on the way; nothing was changed")
            case Lost():
                self.end("somebody else has moved the metadata")
                raise Unreachable("this node is no longer the controller; nothing was changed")

    async def _resolve(self, seen: Version, txn: UUID) -> Committed | NotCommitted | Lost:
        """What became of it; asked until the store answers, or this term is over."""
        while True:
            try:
                found = await self._env.worker.run(lambda: self._store.resolve(seen, txn))
            except (Unreachable, StorageError) as error:
                if self._is_late():
                    raise OutcomeUnknown(f"the metadata store was lost while it committed: {error}") from error
                await trio.sleep(self._config.heartbeat_s / 4)
            else:
                if isinstance(found, Lost):
                    # Somebody has moved on since: whether from before or from behind this change is not known.
                    self.end("somebody else has moved the metadata")
                    raise OutcomeUnknown("another controller has moved the metadata: this change may count, or not")
                return found

    def _send_effects(self) -> None:
        ballot = self.lease.ballot
        for effect in self.brain.effects():
            if isinstance(effect, Note):
                self._noted(effect.text)
                continue
            session = self._sessions.get(effect.node)
            if session is None:
                continue
            match effect:
                case ToAsk(_, shard):
                    session.tell(Ask(ballot, session.incarnation, shard))
                case ToFence(_, shard, epoch):
                    session.tell(Fence(ballot, session.incarnation, shard, epoch))
                case ToOrder(_, shard, assignment):
                    session.tell(Order(ballot, session.incarnation, shard, assignment))

    # -- sessions -----------------------------------------------------------------------------------------------

    async def serve(self, link: Link, register: Register) -> None:
        """One node, from its Register until its link ends, it falls silent, or this term is over."""
        member = register.member
        arrival = Arrival(
            member,
            register.endpoints,
            register.clean,
            register.version,
            register.next_view,
            register.shards,
            register.copies,
        )
        refusal = self.ended or self.brain.joined(arrival, self._env.clock.monotonic())
        if refusal:
            await send(link, Unwanted(refusal, 0))
            return
        before = self._sessions.get(member.node)
        if before is not None:
            before.scope.cancel()
        session = self._sessions[member.node] = _Session(member.node, member.incarnation)
        generation = self.lease.generation
        session.tell(
            Welcome(self.lease.ballot, self.lease.node, self._since, generation.database, generation.timeline),
        )
        data = self._encoded()
        for start in range(0, len(data), _PART_BYTES):
            session.tell(Whole(data[start : start + _PART_BYTES], start + _PART_BYTES >= len(data)))
        self.wake()
        try:
            with session.scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._send_all, session, link)
                    await self._hear(session, link)
                    nursery.cancel_scope.cancel()
        except* PeerGone as errors:
            _log.info("the session of node %d has ended: %s", session.node, errors.exceptions[0])
        except* UnknownMessage as errors:
            _log.error("the session of node %d was ended: %s", session.node, errors.exceptions[0])
        finally:
            if self._sessions.get(member.node) is session:
                del self._sessions[member.node]
                self.brain.left(member.node, self._env.clock.monotonic())
                self.wake()

    def _encoded(self) -> bytes:
        snapshot = self.brain.snapshot
        if self._whole is None or self._whole[0] != snapshot.version:
            self._whole = snapshot.version, encode_snapshot(snapshot)
        return self._whole[1]

    async def _send_all(self, session: _Session, link: Link) -> None:
        async for message in session.waiting:
            await send(link, message)
        session.scope.cancel()

    async def _hear(self, session: _Session, link: Link) -> None:
        while True:
            with trio.move_on_after(self._config.session_s) as silence:
                message = await receive(link)
            if silence.cancelled_caught:
                _log.warning("node %d has been silent for %g s", session.node, self._config.session_s)
                return
            self._take(session, message)

    def _take(self, session: _Session, message: Message) -> None:
        if self.ended is not None:
            return
        brain = self.brain
        match message:
            case Beat(catching_up=catching_up):
                session.catching_up = catching_up
                return
            case Reported(shard, 0, report):
                brain.reported(shard, report)
            case Reported(shard, epoch, report):
                brain.fenced(shard, epoch, report)
            case Obeyed():
                return
            case Outvoted(ballot):
                self.end(f"node {session.node} has promised a later controller, of ballot {tuple(ballot)}")
            case Alter(shard, request):
                brain.alter(shard, request)
            case Copies(copies):
                brain.copied(session.node, copies)
            case Commit(number, text):
                self._requests.append(_Request(session, number, _wanted(text), is_operation=False))
            case Operate(number, name, arguments):
                make = _operation(name, arguments)
                self._requests.append(_Request(session, number, make, is_operation=True))
            case _:
                raise UnknownMessage(f"{type(message).__name__} is not for a controller to hear")
        self.wake()


def _wanted(text: str) -> Callable[[Brain], list[Change]]:
    def make(brain: Brain) -> list[Change]:
        try:
            changes = decode_changes(text)
        except UnknownFormat as error:
            raise Invalid(str(error)) from error
        if any(isinstance(change, PutNode | DeleteNode | PutShard) for change in changes):
            raise Invalid("nodes and shards are changed by the controller alone")
        return brain.placed(changes)

    return make


def _operation(name: str, arguments: dict[str, int | str | bool | list[int]]) -> Callable[[Brain], list[Change]]:
    def number(key: str) -> int:
        found = arguments.get(key)
        if not isinstance(found, int):
            raise Invalid(f"'{name}' needs the number of a {key}")
        return found

    def make(brain: Brain) -> list[Change]:
        match name:
            case "drain":
                return brain.drain(number("node"))
            case "undrain":
                return brain.undrain(number("node"))
            case "remove":
                return brain.remove(number("node"))
            case "move":
                nodes = arguments.get("nodes")
                if not isinstance(nodes, list):
                    raise Invalid("'move' needs the nodes")
                return brain.move(number("shard"), nodes)
            case "balance":
                return brain.balance()
            case "force":
                return brain.force(number("shard"), number("node"))
            case _:
                raise Invalid(f"a controller knows no '{name}'")

    return make
