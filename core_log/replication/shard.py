"""One shard on this node: its logs, its promises, its part as leader or follower. Driver: trio.

Carries out what replica.py decides, in the one order that is safe: what is kept is on the disk before anything that
follows from it leaves the node; delivery is torn down before a log is cut or a follower appends; nothing is told to be
committed before the row that it counts under is on this disk, too. `run` ends with an error when the disk can no longer
be trusted, or when a leader's records contradict what was committed here (E3): then the node must stop and say so.

    <data>/shards/<n>/     streams/, journal, trash/, recycled/ as in every log directory
        kept               what this replica promised, and the row it acted on (kept.py)
        deleted            streams that others may not have deleted yet (deletions.py)
        damaged disk aside/    of one that does not read back what was committed (damaged.py)

Neighbours: follower.py and leader.py are the two ends of its links; the node hands in how to connect, how to ask the
controller for another in-sync set, and what to do when it begins or ceases to lead.
"""

import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from uuid import UUID

import trio

from headrace.core_log.committer import FULL_DISK_PAUSE_S
from headrace.core_log.config import DirectoryConfig
from headrace.core_log.directory import TRASH, LogDirectory
from headrace.core_log.env import Env
from headrace.core_log.errors import CorruptLog, DiskFull, Refused, UnknownFormat
from headrace.core_log.log import PartitionLog
from headrace.core_log.peer.errors import LinkError
from headrace.core_log.peer.link import PeerLink
from headrace.core_log.replication.assignment import Assignment, Ballot, Member, Stint
from headrace.core_log.replication.config import ReplicationConfig
from headrace.core_log.replication.damaged import aside_count, read_mark, remove_aside
from headrace.core_log.replication.deletions import Deletions
from headrace.core_log.replication.follower import Following
from headrace.core_log.replication.kept import read_kept, write_kept
from headrace.core_log.replication.leader import FollowerSession
from headrace.core_log.replication.messages import AlterIsr, CatchUp, LogId, Report
from headrace.core_log.replication.promises import Promises
from headrace.core_log.replication.replica import CutBelowWatermark, Kept, Replica
from headrace.core_log.replication.status import FollowerStatus, Role, ShardStatus

# How often it is looked whether damaged files have lain aside long enough.
ASIDE_LOOK_S = 60.0
# A promise that was last asked for so long ago is waited for no longer.
PROMISE_WANTED_S = 1.0

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Pace:
    """How a follower keeps up, as its leader sees it."""

    # When it last had all that there was; what there was then to be had.
    caught_up_at: float
    looked_at: float
    goal: dict[LogId, int]
    # Without a link since; None: it has one.
    lost_at: float | None


class ShardReplica:
    def __init__(
        self,
        env: Env,
        shard: int,
        member: Member,
        directory_config: DirectoryConfig,
        *,
        connect: Callable[[int], Awaitable[PeerLink]],
        alter: Callable[[int, AlterIsr], None],
        stepped_down: Callable[[], Awaitable[None]],
        leading: Callable[[Stint], None],
        config: ReplicationConfig | None = None,
    ) -> None:
        """`env.storage` is rooted in the shard's folder.

        `connect`: a FETCH link to this shard on a node; raises LinkError. `alter`: pass a request on to the controller;
        it is called again until an order settles it. `leading`: this replica leads, and all that it took over is
        committed: delivery may open. `stepped_down`: delivery is closed when it returns; only then are logs touched.
        """
        self.env = env
        self.shard = shard
        self.member = member
        self.config = config or ReplicationConfig()
        self.directory: LogDirectory
        self.replica: Replica
        self.deletions: Deletions
        self.logs: dict[LogId, PartitionLog] = {}
        # Counts what the streams of this directory were, for followers that take them over.
        self.catalog = 0
        self._noted_version = -1
        # Held while streams come and go, logs are cut, and orders are taken: none of them meets another half way.
        self.changing = trio.Lock()
        # Set, and made anew, whenever something was synced.
        self.synced = trio.Event()
        self._directory_config = replace(directory_config, replica_count=max(directory_config.replica_count, 2))
        self._connect = connect
        self._alter = alter
        self._stepped_down = stepped_down
        self._leading = leading
        self._saving = trio.Lock()
        self._saved: Kept | None = None
        self._ids: dict[PartitionLog, LogId] = {}
        self._sessions: dict[int, FollowerSession] = {}
        self._following: Following | None = None
        self._paces: dict[int, _Pace] = {}
        # Written and not known to be committed.
        self._uncommitted: set[LogId] = set()
        # What this stint began with, as far as it is not known to be committed.
        self._inherited: dict[LogId, int] = {}
        self._role_moved = trio.Event()
        self._alter_due = 0.0
        self._asked: AlterIsr | None = None
        # Catalog at which each deletion was noticed.
        self._deleted_at: dict[UUID, int] = {}
        # Until `open`.
        self.promises = Promises(self.config.promise_s, promised_before_s=None)
        # When somebody last waited for a promise.
        self._promise_wanted_s = float("-inf")
        self._received_bytes = 0
        self._aside_count = 0
        # What was found to be damaged; set once.
        self._damage: CorruptLog | None = None
        self._found_damage = trio.Event()
        self._taking_part = trio.CancelScope()
        # Set while nobody leads or follows here.
        self._left = trio.Event()
        self._left.set()

    # -- opening and closing ------------------------------------------------------------------------------------

    async def open(self, *, clean: bool) -> None:
        """Open the logs, and what was promised. Raises CorruptLog, UnknownFormat."""
        storage = self.env.storage
        found = await self.env.worker.run(lambda: read_mark(storage))
        if found is not None:
            raise found
        kept = await self.env.worker.run(lambda: read_kept(storage))
        self.directory = await LogDirectory.open(self.env, self._directory_config, clean=clean)
        if kept is None and self.directory.streams:
            raise UnknownFormat("kept: the shard has streams, and what its replica promised is gone")
        trashed = [UUID(name.partition(".")[0]) for name in storage.list(TRASH)]
        self.deletions = Deletions(storage, self.directory.streams, trashed)
        self.replica = Replica(self.member, self.logs, Kept(is_blank=True) if kept is None else kept)
        self._saved = kept
        if kept is not None:
            self.promises = Promises(self.config.promise_s, promised_before_s=self.env.clock.monotonic())
        self.directory.pinned_from = _everything
        self.directory.committer.on_written = self._on_written
        self.directory.committer.on_synced = self._on_synced
        loop = trio.lowlevel.current_trio_token()
        # Also from threads that read.
        self.directory.on_damage(lambda error: loop.run_sync_soon(self.note_damage, error))
        self._aside_count = await self.env.worker.run(lambda: aside_count(storage))
        self.note_streams()
        await self.env.worker.run(self.deletions.save)
        await self.keep()

    async def run(self) -> None:
        """Until cancelled. Raises when this replica must not go on; CorruptLog (in a group) when it alone must not, and
        nothing else is wrong."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.directory.run)
            nursery.start_soon(self._take_part)
            nursery.start_soon(self._end_by_damage)
            if self._aside_count:
                nursery.start_soon(self._forget_aside)

    def note_damage(self, error: CorruptLog) -> None:
        """Something that was committed does not read back: this replica ends."""
        self._damage = self._damage or error
        self._found_damage.set()

    async def _end_by_damage(self) -> None:
        await self._found_damage.wait()
        assert self._damage is not None
        raise self._damage

    async def abandon(self) -> None:
        """After `run` has ended: nobody fetches here any more, and what was promised last is on the disk."""
        async with self.changing:
            self._sessions_end()
            await self.keep()

    async def _forget_aside(self) -> None:
        storage = self.env.storage
        while self._aside_count:
            before_ms = self.env.clock.wall_us() // 1000 - self._directory_config.trash_ms
            await self.env.worker.run(lambda before_ms=before_ms: remove_aside(storage, before_ms))  # type: ignore[misc]
            self._aside_count = await self.env.worker.run(lambda: aside_count(storage))
            await self.env.clock.sleep(ASIDE_LOOK_S)

    async def _take_part(self) -> None:
        self._left = trio.Event()
        try:
            with self._taking_part:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._play_roles)
                    nursery.start_soon(self._watch_followers)
        finally:
            self._left.set()

    async def close(self) -> None:
        """Everything is safe and the next start need not scan. While `run` still runs, or after it; no order is taken
        any more."""
        # Never let go of: nothing is begun that a log would still be at work on when it is closed.
        await self.changing.acquire()
        self._taking_part.cancel()
        self._sessions_end()
        await self._left.wait()
        await self.directory.close()

    # -- the controller speaks ----------------------------------------------------------------------------------

    async def promise(self, ballot: Ballot) -> Report | None:
        """A new controller asks; the promise is on the disk when this returns. None: a later one was promised."""
        async with self.changing:
            report = self.replica.promise(ballot)
            await self.keep()
        return report

    async def fence(self, ballot: Ballot, epoch: int) -> Report | None:
        """Nothing below this epoch is led, served or followed any more when this returns."""
        async with self.changing:
            report = self.replica.fence(ballot, epoch)
            await self._after_order()
        return report

    async def obey(self, ballot: Ballot, assignment: Assignment) -> bool:
        """An order, kept when this returns. False: it is refused, a later controller was promised."""
        async with self.changing:
            led = self.replica.kept.stint if self.replica.is_leader else None
            is_obeyed = self.replica.obey(ballot, assignment)
            if self.replica.is_leader and self.replica.kept.stint != led:
                self._begin_to_lead()
                await self._pass_over_lost()
            await self._after_order()
        return is_obeyed

    def _begin_to_lead(self) -> None:
        stint = self.replica.kept.stint
        self.directory.begin_stint(*stint)
        self._sessions_end()
        now = self.env.clock.monotonic()
        self._paces = {}
        self.promises.begin_to_lead()
        self._alter_due = now
        self._inherited = {
            log_id: int(log.written_end) for log_id, log in self.logs.items() if log.high_watermark < log.written_end
        }
        self._uncommitted = set(self._inherited)
        self._deleted_at = dict.fromkeys(self.deletions.streams, self.catalog)

    async def _pass_over_lost(self) -> None:
        """After an election by force the first entry of each log says that its end may be lost. It goes above all that
        this replica knows to have been given out, and as far again as a log reserves for what it does not know of; and
        delivery opens when that is committed, so that nobody reads on without having met it (E7)."""
        ends = self.replica.lost_ends(self._born_in)
        if not ends:
            return
        upto = {log_id: end + self.logs[log_id].config.offsets_reserved for log_id, end in ends.items()}
        self._inherited.update(upto)
        self._uncommitted.update(upto)
        logs = {log_id: self.logs[log_id] for log_id in upto}
        for log in logs.values():
            # Whoever still delivers for an earlier stint of this node writes nothing before it.
            log.follow()
        for log_id, log in logs.items():
            while True:
                try:
                    log.pass_over_lost(upto[log_id])
                    break
                except DiskFull:
                    _log.warning("shard %d: the disk is full, and what was lost cannot be noted", self.shard)
                    await self.env.clock.sleep(FULL_DISK_PAUSE_S)
            self.directory.committer.urgent(log)
            await trio.lowlevel.checkpoint()
        _log.warning("shard %d: led by force, and the ends of %d logs may be lost", self.shard, len(logs))

    def _born_in(self, log_id: LogId) -> int:
        stream = self.directory.streams.get(log_id.stream)
        return 0 if stream is None else stream.spec.born_in(log_id.partition)

    async def _after_order(self) -> None:
        await self.keep()
        if not self.replica.is_leader:
            self._sessions_end()
        self._advance(None)
        for session in self._sessions.values():
            session.look()
        self._role_moved.set()

    def _sessions_end(self) -> None:
        for session in self._sessions.values():
            session.scope.cancel()

    async def keep(self) -> None:
        """What the replica must not forget is on the disk when this returns."""
        while self._saved != self.replica.kept:
            async with self._saving:
                kept = self.replica.kept
                if self._saved != kept:
                    try:
                        await self.env.worker.run(lambda kept=kept: write_kept(self.env.storage, kept))  # type: ignore[misc]
                    except DiskFull:
                        # What follows from it waits, as records do.
                        _log.warning("shard %d: the disk is full, and what was promised cannot be kept", self.shard)
                        await self.env.clock.sleep(FULL_DISK_PAUSE_S)
                    else:
                        self._saved = kept

    # -- roles --------------------------------------------------------------------------------------------------

    @property
    def role(self) -> Role:
        if self.replica.is_leader:
            return Role.LEADER
        return Role.WAITING if self.replica.leader is None else Role.FOLLOWER

    async def _play_roles(self) -> None:
        """Delivery is open in one stint, or the leader of one is followed, or neither: never both."""
        served: Stint | None = None
        while True:
            moved = self._role_moved = trio.Event()
            stint = self.replica.kept.stint
            if served is not None and not (self.replica.is_leader and served == stint):
                await self._stepped_down()
                self._lay_down()
                served = None
                continue
            if self.replica.is_leader and served is None and self._has_settled():
                served = stint
                self._leading(stint)
            elif (leader := self.replica.leader) is not None:
                await self._follow(leader, moved)
                continue
            await moved.wait()

    def _lay_down(self) -> None:
        """What delivery left in the logs that nobody has written yet, and who waited for it."""
        self.directory.pinned_from = _everything
        self.directory.committer.on_commit = _nothing
        for log in self.logs.values():
            log.abandon()

    def _has_settled(self) -> bool:
        """All that this stint began with is known to be committed, so what is shown is what those before have shown."""
        return not self._inherited and self._saved == self.replica.kept

    async def _follow(self, leader: int, moved: trio.Event) -> None:
        """Until another order comes, or the link ends; then the caller looks again."""
        for log in self.logs.values():
            log.follow()
        async with trio.open_nursery() as nursery:

            async def until_moved() -> None:
                await moved.wait()
                # Whatever is being done to a log is brought to its end first.
                async with self.changing:
                    nursery.cancel_scope.cancel()

            nursery.start_soon(until_moved)
            try:
                await self._follow_once(leader)
            except* CutBelowWatermark:
                _log.critical("shard %d: this replica and its leader contradict each other", self.shard)
                raise
            except* (LinkError, DiskFull, Refused) as group:
                _log.debug("shard %d: following node %d ended: %s", self.shard, leader, group.exceptions)
            await self.env.clock.sleep(self.config.retry_s)
            nursery.cancel_scope.cancel()

    async def _follow_once(self, leader: int) -> None:
        link = await self._connect(leader)
        async with link:
            self._following = Following(self, link)
            try:
                await self._following.run()
            finally:
                self._received_bytes += self._following.received_bytes
                self._following = None

    # -- logs ---------------------------------------------------------------------------------------------------

    def note_streams(self) -> None:
        """Take up logs that came, and let go of those that went."""
        version, streams = self.directory.version, self.directory.streams
        if version == self._noted_version:
            return
        self._noted_version = version
        found = {
            LogId(stream.spec.id, place): log
            for stream in list(streams.values())
            for place, log in enumerate(list(stream.partitions))
        }
        gone = self.logs.keys() - found.keys()
        for stream_id in {log_id.stream for log_id in gone if log_id.stream not in streams}:
            self.deletions.note(stream_id)
            self._deleted_at[stream_id] = self.catalog + 1
        self.catalog += 1
        for log_id in gone:
            self._uncommitted.discard(log_id)
            self._inherited.pop(log_id, None)
            self.replica.forget(log_id)
        self.logs.clear()
        self.logs.update(found)
        self._ids = {log: log_id for log_id, log in found.items()}

    def _ids_of(self, logs: Sequence[PartitionLog]) -> list[LogId]:
        if any(log not in self._ids for log in logs):
            self.note_streams()
        return [self._ids[log] for log in logs if log in self._ids]

    def _on_written(self, logs: Sequence[PartitionLog]) -> None:
        if self.replica.is_leader and logs:
            found = self._ids_of(logs)
            self._uncommitted.update(found)
            for session in self._sessions.values():
                session.notice(found)

    def _on_synced(self, logs: Sequence[PartitionLog]) -> None:
        found = self._ids_of(logs)
        self.synced.set()
        self.synced = trio.Event()
        if self._following is not None:
            self._following.synced(found)
        if self.replica.is_leader:
            self._advance(found)
            for session in self._sessions.values():
                session.notice(found)

    # -- leading ------------------------------------------------------------------------------------------------

    async def serve_fetch(self, link: PeerLink) -> None:
        """The door's handler of FETCH links to this shard. A newer link of a node takes the place of the one before."""
        node = link.hello.node
        before = self._sessions.get(node)
        if before is not None:
            before.scope.cancel()
        session = self._sessions[node] = FollowerSession(self, link)
        try:
            await session.run()
        except* CorruptLog as group:
            # Found while a batch was looked for.
            self.note_damage(next(_leaves(group)))
        except* LinkError as group:
            _log.debug("shard %d: the link of follower %d ended: %s", self.shard, node, group.exceptions)
        finally:
            link.close()
            if self._sessions.get(node) is session:
                del self._sessions[node]
                if node in self._paces:
                    self._paces[node].lost_at = self.env.clock.monotonic()

    def heard(self, session: FollowerSession, logs: Sequence[LogId] | None) -> None:
        """A follower has told what it has of these logs; None: any watermark may move, since it counts now."""
        pace = self._paces.get(session.member.node)
        if pace is not None:
            pace.lost_at = None
        self._advance(logs)
        if self._deleted_at:
            self._forget_deletions()

    def _advance(self, logs: Sequence[LogId] | None) -> None:
        """Move watermarks, tell who waits, and pass it on."""
        replica = self.replica
        if not replica.is_leader or self._saved != replica.kept:
            return
        committer = self.directory.committer
        committer.telling = True
        moved = replica.advance(None if logs is None else [log for log in logs if log in self.logs])
        committer.telling = False
        if not moved:
            return
        committer.on_commit()
        for log_id in moved:
            log = self.logs[log_id]
            if log.high_watermark >= log.written_end:
                self._uncommitted.discard(log_id)
            if log_id in self._inherited and log.high_watermark >= self._inherited[log_id]:
                del self._inherited[log_id]
                if not self._inherited:
                    self._role_moved.set()
        for session in self._sessions.values():
            session.notice(moved)

    def _forget_deletions(self) -> None:
        """What every replica has deleted need not be told to any."""
        assignment = self.replica.assignment
        if assignment is None:
            return
        others = [node for node in assignment.replicas if node != self.member.node]
        if all(node in self._sessions for node in others):
            heard = min((self._sessions[node].catalog for node in others), default=self.catalog)
            done = [stream for stream, at in self._deleted_at.items() if at <= heard]
            for stream in done:
                del self._deleted_at[stream]
            self.deletions.forget(done)

    def is_in_sync(self, node: int) -> bool:
        assignment = self.replica.assignment
        return assignment is not None and node in assignment.in_sync_nodes

    def writable(self) -> str | None:
        """Why nothing can be committed now; None: it can."""
        assignment = self.replica.assignment
        if not self.replica.is_leader or assignment is None:
            return f"this node does not lead shard {self.shard}"
        if len(assignment.isr) < assignment.min_isr:
            return f"shard {self.shard} has {len(assignment.isr)} replicas in sync, of at least {assignment.min_isr}"
        return None

    def may_dispatch_alone(self) -> bool:
        """Whether consumers that must be alone may be given anything now (Q5)."""
        assignment, pending, now = self.replica.assignment, self.replica.pending, self.env.clock.monotonic()
        if not self.replica.is_leader or assignment is None:
            return False
        counted = (*assignment.isr, *assignment.eligible, *(pending.isr if pending is not None else ()))
        rivals = {copy.node for copy in counted} - {self.member.node}
        if self.promises.may_dispatch(rivals, now):
            return True
        self._promise_wanted_s = now
        return False

    # -- who keeps up -------------------------------------------------------------------------------------------

    async def _watch_followers(self) -> None:
        while True:
            await self.env.clock.sleep(self.config.tick_s)
            self.note_streams()
            if not self.deletions.is_saved:
                # On a full disk with the next turn.
                with suppress(DiskFull):
                    await self.env.worker.run(self.deletions.save)
            if self.replica.is_leader:
                self._look()

    def _look(self) -> None:
        """Ask for another in-sync set where that is due, and again for one that was asked for."""
        replica, assignment, now = self.replica, self.replica.assignment, self.env.clock.monotonic()
        assert assignment is not None
        slow = [copy.node for copy in assignment.isr if copy.node != self.member.node and self._is_slow(copy.node, now)]
        if replica.pending is None:
            joining = [node for node in replica.caught_up() if node in self._sessions]
            if slow:
                _log.warning("shard %d: nodes %s do not keep up and leave the in-sync set", self.shard, slow)
                replica.shrink(*slow)
            elif joining:
                replica.expand(joining[0])
        if replica.pending is not None and (replica.pending != self._asked or now >= self._alter_due):
            self._asked = replica.pending
            self._alter_due = now + self.config.alter_s
            self._alter(self.shard, replica.pending)
        elif replica.pending is None:
            self._asked = None

    def _is_slow(self, node: int, now: float) -> bool:
        pace = self._paces.get(node)
        if pace is None:
            lost_at = None if node in self._sessions else now
            self._paces[node] = _Pace(now, now, self._goal(node), lost_at)
            return False
        pace.goal = {
            log: end for log, end in pace.goal.items() if log in self.logs and self.replica.position(node, log) < end
        }
        if not pace.goal:
            pace.caught_up_at, pace.looked_at, pace.goal = pace.looked_at, now, self._goal(node)
        if now - pace.caught_up_at > self.config.lag_s:
            return True
        # Nobody waits for one that is gone while there is nothing to do.
        is_waited_for = bool(self._uncommitted) or now - self._promise_wanted_s < PROMISE_WANTED_S
        return pace.lost_at is not None and now - pace.lost_at > self.config.gone_s and is_waited_for

    def _goal(self, node: int) -> dict[LogId, int]:
        """What a follower lacks now: it lies in logs of which something is not committed."""
        return {
            log_id: int(self.logs[log_id].written_end)
            for log_id in self._uncommitted
            if log_id in self.logs and self.replica.position(node, log_id) < self.logs[log_id].written_end
        }

    # -- for operators ------------------------------------------------------------------------------------------

    def status(self) -> ShardStatus:
        replica, now = self.replica, self.env.clock.monotonic()
        assignment = replica.assignment
        others = [] if assignment is None else [node for node in assignment.replicas if node != self.member.node]
        return ShardStatus(
            self.shard,
            self.role,
            replica.kept.stint,
            replica.kept.version,
            replica.kept.isr,
            sum(max(0, log.written_end - log.high_watermark) for log in self.logs.values()),
            len(self.logs),
            tuple(self._follower_status(node, now) for node in others),
            self._received_bytes + (0 if self._following is None else self._following.received_bytes),
            self._aside_count,
        )

    def catching_up(self) -> list[CatchUp]:
        """Of a leader: replicas that are not in sync yet."""
        assignment, now = self.replica.assignment, self.env.clock.monotonic()
        if assignment is None:
            return []
        found = []
        for node in assignment.replicas:
            if node not in assignment.in_sync_nodes and node != self.member.node:
                one = self._follower_status(node, now)
                pace = one.sent_bytes / one.connected_s if one.connected_s > 0 else 0.0
                found.append(
                    CatchUp(self.shard, node, one.record_lag, one.byte_lag, one.byte_lag / pace if pace else None)
                )
        return found

    def _follower_status(self, node: int, now: float) -> FollowerStatus:
        session, pace = self._sessions.get(node), self._paces.get(node)
        lag = size = 0
        for log_id, log in self.logs.items():
            position = max(self.replica.position(node, log_id), int(log.replica_start))
            if position < log.written_end:
                lag += log.written_end - position
                size += log.bytes_behind(position)
        return FollowerStatus(
            node,
            self.is_in_sync(node),
            session is not None,
            lag,
            size,
            0.0 if pace is None or not lag else now - pace.caught_up_at,
            0 if session is None else session.sent_bytes,
            0.0 if session is None else now - session.since_s,
        )


def _leaves(group: BaseExceptionGroup[CorruptLog]) -> Iterator[CorruptLog]:
    for one in group.exceptions:
        if isinstance(one, BaseExceptionGroup):
            yield from _leaves(one)
        else:
            yield one


def _everything(log: PartitionLog) -> int | None:
    """Retention is the leader's to decide, by what its views need."""
    return 0


def _nothing() -> None:
    pass
