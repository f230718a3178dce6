"""What must hold of a simulated cluster: noted as it happens, and looked at when all faults have stopped. Driver for
tests.

`History` is what clients know: what they attempted, what was confirmed to them, what they got and settled. `Watch`
looks into the replicas while they run: who leads in which stint, whether what is committed is synced where it must be,
whether a disk has what a life before said it has, and whether rows are written and obeyed by controllers only whom
enough replicas have promised. Letters and numbers are those of the list of invariants that the protocol promises (D1,
O1, E1 ...).
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch
from uuid import UUID

from tests.simulation.cluster.database import Database
from tests.simulation.cluster.node import Life, Machine
from tests.simulation.cluster.world import World

from headrace.controller.snapshot import Snapshot
from headrace.core_log.env import Env
from headrace.core_log.errors import CorruptLog
from headrace.core_log.ids import Offset
from headrace.core_log.log import PartitionLog
from headrace.core_log.replication.assignment import NO_BALLOT, Assignment, Ballot, Member, Stint
from headrace.core_log.replication.messages import LogId
from headrace.core_log.replication.shard import ShardReplica
from headrace.shards import Shards


class Place(NamedTuple):
    stream: UUID
    partition: int
    offset: int


class History:
    """What the clients of a run know."""

    def __init__(self, world: World) -> None:
        self.world = world
        # By body: the queue it went to, and the vhost.
        self.attempts: dict[bytes, tuple[str, str]] = {}
        self.acked: dict[bytes, Place] = {}
        self.refused: set[bytes] = set()
        # In the order of each producer's attempts to one queue.
        self.orders: dict[tuple[str, str, str], list[bytes]] = {}
        # Of numbered producers: whatever becomes of it, it is there at most once.
        self.numbered: set[bytes] = set()
        self.values: dict[Place, bytes] = {}
        # By queue and body: the latest epoch in which it was delivered.
        self.deliveries: dict[tuple[str, bytes], int] = {}
        # Settled, and the broker has said that this is safe: in which epoch. By queue and body.
        self.settled: dict[tuple[str, bytes], int] = {}
        # Acked, and the answer to that never came.
        self.maybe_settled: set[tuple[str, bytes]] = set()
        self.rejected: set[tuple[str, bytes]] = set()
        # Settled at the end; again, and marked so, where another leader took over just then.
        self.drained: set[tuple[str, bytes]] = set()
        self.due_us: dict[bytes, int] = {}

    def attempt(self, producer: str, vhost: str, queue: str, body: bytes) -> None:
        if body not in self.attempts:
            self.attempts[body] = (vhost, queue)
            self.orders.setdefault((producer, vhost, queue), []).append(body)

    def confirmed(self, body: bytes, place: Place | None) -> None:
        if body in self.refused:
            self.world.violated(f"D3: {body[:20]!r} was refused, and is confirmed")
        self.world.counts["acked"] += 1
        self.world.mark("acked", body)
        if place is None:
            self.acked.setdefault(body, Place(UUID(int=0), 0, -1))
            return
        self.acked[body] = place
        self.read(place, body)

    def read(self, place: Place, body: bytes) -> None:
        """Somebody has seen this record at this place: nobody ever sees another one there (O1)."""
        before = self.values.setdefault(place, body)
        if before != body:
            self.world.violated(f"O1: at {place} there was {before[:20]!r}, and now {body[:20]!r}")

    def delivered(self, queue: str, body: bytes, place: Place | None, epoch: int, *, redelivered: bool) -> None:
        key = queue, body
        self.world.counts["delivered"] += 1
        self.world.mark("delivered", key, redelivered)
        if body not in self.attempts:
            self.world.violated(f"D5: {body[:20]!r} was delivered, and nobody has published it")
        if body in self.refused:
            self.world.violated(f"D3: {body[:20]!r} was refused, and is delivered")
        # One that leads no longer, and does not know it, cannot know of what its follower delivered.
        if self.settled.get(key, epoch + 1) <= epoch:
            self.world.violated(f"Q3: {body[:20]!r} was settled for good in {queue}, and is delivered again")
        if self.deliveries.get(key, epoch + 1) <= epoch and not redelivered:
            self.world.violated(f"Q4: {body[:20]!r} was delivered from {queue} before, and is not marked so")
        self.deliveries[key] = max(epoch, self.deliveries.get(key, 0))
        if place is not None:
            self.read(place, body)


class Watch:
    """Looks into the replicas while they run."""

    def __init__(self, world: World, machines: Sequence[Machine], history: History) -> None:
        self.world = world
        self.machines = machines
        self.history = history
        # Who has led: (shard, stint) -> (node, incarnation).
        self.leaders: dict[tuple[int, Stint], tuple[int, int]] = {}
        # What is committed: the batch that holds an offset, by its hash.
        self.batches: dict[tuple[UUID, int], dict[int, tuple[int, bytes]]] = {}
        self.epochs: dict[int, int] = {}
        # The highest ballot that a node has ever had on its disk for a shard.
        self.promised: dict[tuple[int, int], Ballot] = {}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        begin_to_lead = ShardReplica._begin_to_lead
        advance = ShardReplica._advance
        open_replica, keep, obey = ShardReplica.open, ShardReplica.keep, ShardReplica.obey
        is_damaged, written = Shards._is_damaged, Database.written

        def began(replica: ShardReplica) -> None:
            begin_to_lead(replica)
            self._has_begun(replica)

        def advanced(replica: ShardReplica, logs: Any) -> None:
            known = replica.logs
            before = {}
            if replica.replica.is_leader:
                before = {known[one]: int(known[one].high_watermark) for one in logs or known if one in known}
            advance(replica, logs)
            for log, mark in before.items():
                if log.high_watermark > mark:
                    self._committed(replica, log)

        async def opened(replica: ShardReplica, *, clean: bool) -> None:
            await open_replica(replica, clean=clean)
            self._has_opened(replica)

        async def damaged(shards: Shards, env: Env, number: int, member: Member, error: CorruptLog) -> Any:
            self.world.violated(f"D7: nothing rots, and shard {number} is damaged on node {member.node}: {error}")
            return await is_damaged(shards, env, number, member, error)

        async def kept(replica: ShardReplica) -> None:
            await keep(replica)
            place = replica.shard, replica.member.node
            ballot = NO_BALLOT if replica._saved is None else replica._saved.ballot
            self.promised[place] = max(ballot, self.promised.get(place, NO_BALLOT))

        async def obeyed(replica: ShardReplica, ballot: Ballot, row: Assignment) -> bool:
            before, is_proven = replica.replica.kept, self._is_proven(replica.shard, row, ballot)
            found = await obey(replica, ballot, row)
            now = replica.replica.kept
            if (now.stint, now.version) != (before.stint, before.version) and not is_proven:
                self.world.violated(
                    f"C1: node {replica.member.node} obeys {ballot}, and too few of shard {replica.shard} promised it"
                )
            return found

        def row_written(database: Database, before: Snapshot, ballot: Ballot) -> None:
            written(database, before, ballot)
            for number, shard in database.memory.snapshot().shards.items():
                old = before.shards.get(number)
                is_new = old is not None and old.assignment != shard.assignment
                if is_new and not self._is_proven(number, shard.assignment, ballot):
                    self.world.violated(f"C2: {ballot} writes the row of shard {number}, and too few have promised it")

        with ExitStack() as stack:
            for target, name, wrapped in (
                (ShardReplica, "_begin_to_lead", began),
                (ShardReplica, "_advance", advanced),
                (ShardReplica, "open", opened),
                (ShardReplica, "keep", kept),
                (ShardReplica, "obey", obeyed),
                (Shards, "_is_damaged", damaged),
                (Database, "written", row_written),
            ):
                stack.enter_context(patch.object(target, name, wrapped))
            yield

    def _is_proven(self, shard: int, row: Assignment, ballot: Ballot) -> bool:
        """So many replicas have promised this controller that one of them has seen whatever was acknowledged (L5)."""
        promised = [node for node in row.replicas if self.promised.get((shard, node), NO_BALLOT) >= ballot]
        return len(promised) >= len(row.replicas) - row.min_isr + 1

    def _has_opened(self, replica: ShardReplica) -> None:
        """D1: what a life before called synced is on the disk, whatever has ended that life."""
        machine = self.machines[replica.member.node - 1]
        for log_id, synced_end in machine.owed.pop(replica.shard, {}).items():
            log = replica.logs.get(log_id)
            found = 0 if log is None else int(log.written_end)
            if found < synced_end:
                self.world.violated(
                    f"D1: node {replica.member.node} had synced {log_id} to {synced_end}, and has it to {found} now"
                )

    def _life_of(self, replica: ShardReplica) -> Life | None:
        life = self.machines[replica.member.node - 1].life
        return life if life is not None and life.replicas.get(replica.shard) is replica else None

    def _has_begun(self, replica: ShardReplica) -> None:
        stint = replica.replica.kept.stint
        member = replica.member
        self.world.note(f"node {member.node}: leads shard {replica.shard} in epoch {stint.epoch}")
        if self.epochs.get(replica.shard, 0) < stint.epoch:
            if self.epochs.get(replica.shard, 0):
                self.world.counts["leader changes"] += 1
            self.epochs[replica.shard] = stint.epoch
        known = self.leaders.setdefault((replica.shard, stint), (member.node, member.incarnation))
        if known != (member.node, member.incarnation):
            self.world.violated(f"E1: {stint} of shard {replica.shard} was led by {known}, and now by {member}")

    def _committed(self, replica: ShardReplica, log: PartitionLog) -> None:
        """D1: whatever counts as committed is synced by every member of the in-sync set, also by one that is about to
        be; and there are enough of them (V3)."""
        life = self._life_of(replica)
        if life is None or life.is_dead:
            return
        row, pending = replica.replica.assignment, replica.replica.pending
        assert row is not None
        if len(row.isr) < row.min_isr:
            self.world.violated(f"V3: {len(row.isr)} in sync of {row.min_isr}, and shard {replica.shard} has committed")
        for copy in {*row.isr, *(pending.isr if pending is not None else ())}:
            other = self.machines[copy.node - 1].life
            if other is None or other.is_dead or not other.is_serving or other.member is None:
                continue
            theirs = other.replicas.get(replica.shard)
            if theirs is None or theirs.member.copy != copy:
                continue
            stream = theirs.directory.streams.get(log.stream_id)
            reached = -1 if stream is None else int(stream.partitions[log.partition].synced_end)
            if reached < log.high_watermark:
                self.world.violated(
                    f"D1: node {replica.member.node} has committed {log.folder} to {log.high_watermark}, "
                    f"and node {copy.node}, in sync, has synced it to {reached}"
                )


# -- when all faults have stopped ------------------------------------------------------------------------------------


def problem_of_rest(machines: Sequence[Machine], shards: int) -> str | None:
    """None: every shard is led, its in-sync set is full, and its replicas hold the same."""
    lives = [machine.life for machine in machines]
    if not all(life is not None and life.is_serving for life in lives):
        return "not every node serves"
    found = [life for life in lives if life is not None]
    for number in range(shards):
        leaders = [life for life in found if _leads(life, number)]
        if len(leaders) != 1:
            return f"shard {number} is led by {[life.number for life in leaders]}"
        replica = leaders[0].replicas[number]
        row = replica.replica.assignment
        assert row is not None
        if replica.replica.pending is not None or set(row.replicas) != row.in_sync_nodes:
            return f"shard {number} has {sorted(row.in_sync_nodes)} in sync of {sorted(row.replicas)}"
        for log_id, log in replica.logs.items():
            if log.high_watermark < log.end:
                return f"shard {number} has not committed all of {log_id}"
            for copy in row.isr:
                theirs = found[copy.node - 1].replicas.get(number)
                other = None if theirs is None else theirs.logs.get(log_id)
                if other is None or other.synced_end != log.written_end or other.high_watermark != log.high_watermark:
                    return f"node {copy.node} has not all of {log_id} of shard {number}"
    return None


def _leads(life: Life, number: int) -> bool:
    kept = life.shards._kept.get(number)
    return kept is not None and kept.replica.replica.is_leader and kept.led is not None and kept.led.service is not None


def values_of(log: PartitionLog) -> dict[int, bytes]:
    """Every record of a log that is committed."""
    found: dict[int, bytes] = {}
    offset = int(log.log_start)
    while offset < log.high_watermark:
        for batch, first, last in log.read(offset):
            found |= {int(batch.offset_at(index)): bytes(batch.values[index]) for index in range(first, last)}
            offset = int(batch.next_offset)
    return found


def stored(log: PartitionLog, start: int) -> list[bytes]:
    """Batches as stored, without what differs on each disk: salt, hash, durable offset."""
    found = []
    for segment in log.segments:
        for position, header in segment.headers():
            if header.base_offset >= start and header.next_offset <= log.high_watermark:
                data = segment.file.read(position, header.size)
                found.append(data[:8] + data[24:56] + data[64:])
    return found


def check_logs(world: World, machines: Sequence[Machine], history: History, shards: int) -> None:
    """Everything is where it was confirmed to be, and the same on every replica."""
    lives = [machine.life for machine in machines if machine.life is not None]
    contents: dict[LogId, dict[int, bytes]] = {}
    starts: dict[LogId, int] = {}
    for number in range(shards):
        leader = next(life for life in lives if _leads(life, number))
        ours = leader.replicas[number]
        row = ours.replica.assignment
        assert row is not None
        for log_id, log in ours.logs.items():
            contents[log_id] = values_of(log)
            starts[log_id] = int(log.log_start)
            for life in lives:
                theirs = life.replicas.get(number)
                if theirs is None or theirs is ours or life.number not in row.replicas:
                    continue
                if log.config.cleanup == "compact":
                    # Each replica compacts on its own.
                    continue
                other = theirs.logs.get(log_id)
                if other is None:
                    world.violated(f"O1: node {life.number} has no {log_id} of shard {number}, and {leader.number} has")
                    continue
                start = max(int(log.log_start), int(other.log_start))
                if stored(log, start) != stored(other, start):
                    world.violated(f"O1: nodes {leader.number} and {life.number} differ in {log_id} of shard {number}")
    for body, place in history.acked.items():
        if place.offset < 0:
            continue
        log_id = LogId(place.stream, place.partition)
        if log_id not in contents:
            world.violated(f"D2: {body[:20]!r} was confirmed at {place}, and that log is gone")
        elif place.offset >= starts[log_id]:
            found = contents[log_id].get(place.offset)
            if found != body:
                world.violated(f"D2: {body[:20]!r} was confirmed at {place}, and there is {found and found[:20]!r}")
    for place, body in history.values.items():
        log_id = LogId(place.stream, place.partition)
        if place.offset >= starts.get(log_id, 1 << 62) and contents[log_id].get(place.offset) != body:
            world.violated(f"O1: {body[:20]!r} was read at {place}, and is not there")
    counts: Counter[bytes] = Counter()
    for values in contents.values():
        counts.update(values.values())
    for body in sorted(history.numbered):
        queue_copies = counts[body]
        if queue_copies > 1 and (history.attempts[body][1], body) not in history.rejected:
            world.violated(f"O4: {body[:20]!r} of a numbered producer is there {queue_copies} times")
    _check_order(world, history)


def _check_order(world: World, history: History) -> None:
    """O3: what one producer sent to one queue, one after the other, stands in that order."""
    for (producer, vhost, queue), bodies in history.orders.items():
        last = Offset(-1)
        for body in bodies:
            place = history.acked.get(body)
            if place is None or place.offset < 0:
                continue
            if place.offset <= last:
                world.violated(f"O3: {producer} published {body[:20]!r} to {vhost}/{queue} later than it stands")
            last = Offset(place.offset)


def check_queues(world: World, history: History) -> None:
    """Jepsen's total-queue, when everything was drained: what was confirmed is settled or was still there, and once."""
    found: Counter[bytes] = Counter()
    for _queue, body in [*history.drained, *history.settled]:
        found[body] += 1
    maybe = {body for _queue, body in history.maybe_settled}
    for body, (_vhost, queue) in history.attempts.items():
        count = found[body]
        if body in history.refused and count:
            world.violated(f"D3: {body[:20]!r} was refused, and was in a queue")
        elif body in history.acked and not count and body not in maybe:
            world.violated(f"Q1: {body[:20]!r} was confirmed, and is in no queue (it went to {queue})")
        elif count > 1:
            world.violated(f"Q1: {body[:20]!r} was in queues {count} times")
