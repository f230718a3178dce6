"""Releasing queues from logs: one that pins far more of a log than it wants gets its records copied to its own. Driver.

Retention never takes what a queue has not settled, so one forgotten message would hold on to all that came after it.
Once a second `Releases` looks at the logs whose retention would let go of something. A queue that pins more there than
the limit, and more than ten times what it wants of it, is released: its unsettled records are copied (relocation.py) to
the end of its own log, made safe, and then in one step without a pause its lanes are told that they lie there now. They
keep their sequences, so whoever holds one settles or returns it as before. The journal hears of it next; until then
the old places stay pinned, so that a crash at any point finds every record once, in the old place or in the new one.

What lies in the segment that is being written pins nothing and stays. A queue's own log is treated like any other: then
the copies go to its end. Work is done in slices with pauses; memory is a few numbers for each run of records.
Neighbours: lane.py has the places, broker.py the journal and the pins, past.py makes copies for another reason.
"""

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from headrace.core_log.errors import CorruptLog, DiskFull
from headrace.core_log.log import PartitionLog, Run
from headrace.core_log.record import RecordBatch
from headrace.gateways.delivery.lane import Extent, Lane
from headrace.gateways.delivery.ports import Source
from headrace.gateways.delivery.queue import Queue
from headrace.gateways.delivery.relocation import copy_records

if TYPE_CHECKING:
    from headrace.gateways.delivery.broker import Broker

_log = logging.getLogger(__name__)

PERIOD_S = 1.0
# What a slice reads at most, and how long others have the loop for themselves after it.
SLICE_BYTES = 512 * 1024
PAUSE_S = 0.002
# So many are copied at a time (some 10 us each, when no two have the same time).
COPY_COUNT = 256
# A queue wants so little of what it pins that a copy is worth it.
PENDING_FACTOR = 10
# One that was found to want too much is looked at again when it pins, or wants, so many times more, or less.
LOOK_AGAIN_FACTOR = 2
RETRY_S = 300.0


@dataclass(slots=True)
class Found:
    """Unsettled neighbours: sequence `seq` and following are records first..last-1 of a batch."""

    lane: int
    seq: int
    batch: RecordBatch
    first: int
    last: int

    @property
    def byte_count(self) -> int:
        batch, first, last = self.batch, self.first, self.last
        return sum(sum(map(len, one[first:last])) for one in (batch.keys, batch.properties, batch.values))

    def pieces(self, count: int) -> Iterator["Found"]:
        for first in range(self.first, self.last, count):
            yield Found(self.lane, self.seq + first - self.first, self.batch, first, min(first + count, self.last))


class _Cursor:
    """One lane's way through what it has not settled of a log below an offset."""

    def __init__(self, place: int, lane: Lane, source: Source, end: int) -> None:
        self.place = place
        self.lane = lane
        self._source = source
        self._end = end
        self._extents = deque(lane.extents_in(source, end))
        # What of them lies behind the end.
        self.rests: list[Extent] = []
        # Something that the lane counts with is not in the log.
        self.has_lost = False

    def position(self) -> int | None:
        """Where the next unsettled record may be; None: there is none."""
        extents = self._extents
        while extents:
            extent = extents[0]
            wanted = self.lane.first_unsettled(extent.seq, extent.seq + extent.count)
            stop = min(extent.end, self._end)
            if wanted is None:
                extents.popleft()
            elif extent.first >= stop:
                extents.popleft()
                if extent.end > self._end:
                    self.rests.append(extent)
                else:
                    self.has_lost = True
            elif extent.first < self._source.log_start:
                extents.popleft()
                self.has_lost = True
            else:
                self.lane.advance(extent, wanted)
                if extent.first < stop:
                    return extent.first
        return None

    def take(self, run: Run) -> Iterator[Found]:
        """What a run has of this lane. Runs come in the order of the log, from the lowest position of all cursors."""
        batch, lane = run.batch, self.lane
        while (position := self.position()) is not None and batch.base_offset <= position < batch.next_offset:
            extent = self._extents[0]
            stop = min(extent.end, self._end)
            low = max(run.first, batch.index_of(position))
            high = min(run.last, batch.index_of(stop))
            for first, last in ((low, high),) if extent.exact else lane.spans(batch, low, high):
                count = min(last - first, extent.count)
                for seq, end in lane.unsettled(extent.seq, extent.seq + count):
                    start = first + seq - extent.seq
                    yield Found(self.place, seq, batch, start, start + end - seq)
                extent.seq += count
                extent.count -= count
            extent.first = min(int(batch.next_offset), stop)


@dataclass(slots=True)
class Moved:
    """Sequence `seq` and following, so many, lie at `offset` and following of the queue's own log."""

    seq: int
    count: int
    offset: int


@dataclass(slots=True)
class _Moves:
    lane: Lane
    # Sequences from here on came after the release began.
    below: int
    moved: list[Moved] = field(default_factory=list)


class Release:
    """One queue's release from one log. The lanes are not told before `finish`."""

    def __init__(self, lanes: Sequence[Lane], source: PartitionLog) -> None:
        self.source = source
        # Everything below is committed and in segments that retention could take.
        self.end = min(int(source.segments[-1].base_offset), int(source.high_watermark))
        self.record_count = self.byte_count = 0
        self._lanes = lanes
        self._target: PartitionLog | None = None
        self._first_copy = 0
        self._exchange = b""
        self._moves: list[_Moves] = []
        self._cursors = self._new_cursors()

    @property
    def pins(self) -> dict[Source, int]:
        """Copies that no lane knows of yet. The originals are pinned by the queue itself."""
        return {} if self._target is None else {self._target: self._first_copy}

    def _new_cursors(self) -> list[_Cursor]:
        return [_Cursor(place, lane, self.source, self.end) for place, lane in enumerate(self._lanes)]

    def read(self) -> list[Found] | None:
        """The unsettled records of the next slice, perhaps none; None when there is no more."""
        cursors = self._cursors
        positions = [position for cursor in cursors if (position := cursor.position()) is not None]
        if not positions:
            return None
        runs = self.source.read(min(positions), bytes_max=SLICE_BYTES, end=self.end)
        return [found for run in runs for cursor in cursors for found in cursor.take(run)]

    @property
    def has_lost(self) -> bool:
        return any(cursor.has_lost for cursor in self._cursors)

    def begin(self, target: PartitionLog, exchange: bytes) -> None:
        """From here on what is read is to be copied; what was read before was only weighed.

        `exchange`: what is in the log was published to this.
        """
        self._target, self._first_copy, self._exchange = target, int(target.end), exchange
        self._moves = [_Moves(lane, lane.hold_places()) for lane in self._lanes]
        self._cursors = self._new_cursors()

    def copy(self, found: Found) -> None:
        """Raises DiskFull; then the release must be given up."""
        assert self._target is not None, "it has begun"
        start, end = copy_records(self._target, self.source, found.batch, found.first, found.last, self._exchange)
        self.record_count += end - start
        self.byte_count += found.byte_count
        moved = self._moves[found.lane].moved
        if moved and moved[-1].seq + moved[-1].count == found.seq and moved[-1].offset + moved[-1].count == start:
            moved[-1].count += end - start
        else:
            moved.append(Moved(found.seq, end - start, start))

    def finish(self) -> None:
        """The copies are safe: from now on the queue's records are there."""
        assert self._target is not None, "it has begun"
        for moves, cursor in zip(self._moves, self._cursors, strict=True):
            moves.lane.move(
                self.source,
                self.end,
                moves.below,
                self._target,
                [(one.seq, one.count, one.offset) for one in moves.moved],
                cursor.rests,
            )


class Releases:
    """Looks for queues that pin too much, and releases them one after the other."""

    def __init__(self, broker: "Broker", bytes_min: int) -> None:
        """`bytes_min`: who pins less of a log is left alone, unless the log's own retention is smaller still."""
        self.count = self.record_count = 0
        self._broker = broker
        self._bytes_min = bytes_min
        # Two at a time would move the same records.
        self._one_at_a_time = trio.Lock()
        # By view and log: what the queue pinned and how many records it wanted when it was found to want too much.
        self._declined: dict[tuple[int, PartitionLog], tuple[int, int]] = {}
        # When a release that failed may be tried again (monotonic).
        self._retry_s: dict[tuple[int, PartitionLog], float] = {}

    async def run(self) -> None:
        while True:
            await self._broker.env.clock.sleep(PERIOD_S)
            await self.look()

    async def look(self) -> None:
        """Release every queue that pins too much now."""
        broker = self._broker
        logs = [log for stream in broker.directory.streams.values() for log in stream.partitions]
        for log in logs:
            if len(log.segments) < 2 or log.byte_count <= self.limit_of(log):
                continue
            for vhost, queue in broker.views_of(log):
                if not queue.deleted and log.stream_id in broker.directory.streams:
                    await self._look_at(queue, vhost, log)
        known = {log.stream_id for log in logs}
        for memory in (self._declined, self._retry_s):
            for view_id, log in [one for one in memory if one[1].stream_id not in known or not broker.has_view(one[0])]:
                del memory[view_id, log]

    def limit_of(self, log: PartitionLog) -> int:
        """What a queue may pin of a log however little it wants: as much as retention would keep is no loss."""
        by_retention = log.config.retention_bytes
        return self._bytes_min if by_retention is None else min(self._bytes_min, by_retention)

    async def _look_at(self, queue: Queue, vhost: str, log: PartitionLog) -> None:
        broker = self._broker
        found = [lane.lowest_offsets().get(log) for lane in queue.lanes]
        lowest = min((offset for offset in found if offset is not None), default=None)
        # Without the queue, retention would take everything below this.
        if lowest is None or lowest >= log.expired(broker.env.clock.wall_us()):
            return
        pinned = log.bytes_from(lowest)
        wanted_count = sum(lane.count_unsettled(log) for lane in queue.lanes)
        key = queue.view_id, log
        if pinned <= self.limit_of(log) or self._is_known(key, pinned, wanted_count):
            return
        # Whoever wants every second record is not weighed.
        if wanted_count * 2 > log.end - lowest or broker.env.clock.monotonic() < self._retry_s.get(key, 0):
            return
        release = Release(queue.lanes, log)
        try:
            if not await self._is_worth_it(queue, release, pinned):
                self._declined[key] = pinned, wanted_count
            elif await self._carry_out(queue, vhost, release):
                self._tell(queue, vhost, release, pinned)
        except (DiskFull, CorruptLog) as error:
            # What cannot be read is found by whoever consumes it; the others are served meanwhile.
            self._retry_s[key] = broker.env.clock.monotonic() + RETRY_S
            _log.warning(
                "a queue could not be released from a log: it goes on holding what came after its records",
                extra={"queue": queue.name, "vhost": vhost, "bytes": pinned, "why": error},
            )

    def _is_known(self, key: tuple[int, PartitionLog], pinned: int, wanted_count: int) -> bool:
        """It was found to want too much, and nothing much has changed since."""
        before = self._declined.get(key)
        if before is None:
            return False
        return pinned < before[0] * LOOK_AGAIN_FACTOR and wanted_count * LOOK_AGAIN_FACTOR > before[1]

    async def _is_worth_it(self, queue: Queue, release: Release, pinned: int) -> bool:
        """Weigh what the queue wants."""
        byte_count = 0
        while not queue.deleted and (found := release.read()) is not None:
            byte_count += sum(one.byte_count for one in found)
            if byte_count * PENDING_FACTOR >= pinned:
                return False
            await self._broker.env.clock.sleep(PAUSE_S)
        return not release.has_lost and not queue.deleted

    async def _carry_out(self, queue: Queue, vhost: str, release: Release) -> bool:
        async with self._one_at_a_time:
            return await self._copy_and_move(queue, vhost, release)

    async def _copy_and_move(self, queue: Queue, vhost: str, release: Release) -> bool:
        broker = self._broker
        if queue.deleted or release.source.stream_id not in broker.directory.streams:
            return False
        target = broker.own_log(queue, vhost) if queue.durable else broker.transient_log
        with broker.holding(release):
            release.begin(target, broker.exchange_names.get(release.source.stream_id, b""))
            while not queue.deleted and (found := release.read()) is not None:
                for piece in (piece for one in found for piece in one.pieces(COPY_COUNT)):
                    release.copy(piece)
                    broker.appended(target)
                    await trio.lowlevel.checkpoint()
                await broker.env.clock.sleep(PAUSE_S)
            if queue.durable:
                # On the disk, whatever the log promises: the originals were.
                await broker.directory.committer.synced(target)
            else:
                await broker.wait_committed(target, int(target.end))
            if queue.deleted or release.has_lost or target.stream_id not in broker.directory.streams:
                return False
            release.finish()
            broker.note_change(queue)
        return True

    def _tell(self, queue: Queue, vhost: str, release: Release, pinned: int) -> None:
        self.count += 1
        self.record_count += release.record_count
        names = self._broker.directory.streams.get(release.source.stream_id)
        _log.info(
            "a queue was released from a log: its records were copied, and what came after them may go",
            extra={
                "queue": queue.name,
                "vhost": vhost,
                "stream": "" if names is None else names.spec.name,
                "records": release.record_count,
                "bytes": release.byte_count,
                "pinned_bytes": pinned,
            },
        )
