"""A partition: a chain of segments that only grows at its end. Machine over the storage contract.

Records gather in one open batch (K5); `seal` writes it to the active segment; a commit (committer.py) syncs and
then tells the log through `finish_sync` how far it is safe. Offsets are issued once: before an offset may be
seen, a ceiling above it stands on the disk, and a log that was not closed cleanly goes on at that ceiling, in a
new epoch, behind a typed gap (K3).

Invariants: log_start <= synced_end <= written_end <= end; high_watermark <= written_end; batches are contiguous
(each begins at the offset where the one before ends) and epochs never fall.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from headrace.core_log.bulk import BulkBatch, encode_bulk
from headrace.core_log.checkpoint import Checkpoint, CheckpointFile
from headrace.core_log.config import LogConfig
from headrace.core_log.env import Clock, Ids
from headrace.core_log.epochs import EpochHistory
from headrace.core_log.errors import (
    CorruptLog,
    DamagedBatch,
    DiskFull,
    NotLed,
    OffsetOutOfRange,
    Refused,
    SequenceRefused,
    UnknownFormat,
)
from headrace.core_log.format import (
    FLAG_FIRST_OF_SEGMENT,
    FLAG_GAP,
    HEADER_SIZE,
    SEGMENT_HEAD_SIZE,
    BatchHeader,
    Blob,
    Body,
    SegmentHead,
    adopt,
    decode,
    decode_columns,
    encode,
    is_whole,
    maybe_glimpse,
    maybe_header,
    maybe_segment_head,
    stamp,
)
from headrace.core_log.ids import Offset, StreamId
from headrace.core_log.pool import SegmentPool
from headrace.core_log.producers import ProducerTable
from headrace.core_log.record import Gap, Headers, Numbers, Producer, RecordBatch, RouteReference, RouteSet, gap_batch
from headrace.core_log.segment import Segment
from headrace.core_log.spec import CHECKPOINT, EPOCHS, PRODUCERS, REMOVED
from headrace.core_log.storage.contract import Storage
from headrace.core_log.summary import ENTRIES_MAX, Sieve, may_hold_any
from headrace.core_log.tail import Tail, TailCache

# What is read at once should fit a processor's own cache, with the objects made of it (bench/read.py).
READ_BYTES = 512 * 1024
# What packs well needs few of the octets asked for: as many are read as the last read took, and so many at least.
PIECE_BYTES = 64 * 1024
# A record counts for so much in a read beside its octets: empty ones take room too.
RECORD_BYTES = 16
# So many batches are passed over in one go: some 5 us each (bench/skip.py), and others wait meanwhile.
PASSED_OVER_MAX = 256
# A header and the largest summary there is.
_GLIMPSE_BYTES = HEADER_SIZE + ENTRIES_MAX
_GLIMPSE_WINDOW = 256 * 1024
# So much of a log is looked at in one step for the numbers of its producers: reading and hashing it takes 2 ms.
PRODUCERS_PIECE_BYTES = 4 * 1024 * 1024
# To look at a header takes as long as to read and hash so much.
_HEADER_COST_BYTES = 8 * 1024
# So much from a leader at once is a follower that catches up.
BULK_BYTES = 256 * 1024
# With so much for one sync the file grows in each, and to prepare it only fills it twice: that took two thirds of the
# loop's time while millions of messages were parked (bench/delay.py).
GROUP_BYTES = 1024 * 1024
# A batch is sealed before its dictionaries outgrow their 16-bit columns.
DICTIONARY_MAX = 16_384
HEADER_NAME_BYTES_MAX = 0xFFFF
TAG_BYTES_MAX = 0xFFFF
# Tags of all distinct sets of a batch, and of one record.
TAGS_MAX = 0xFFFF
TAGS_PER_RECORD_MAX = 1024

Done = Callable[[], None]


class Run(NamedTuple):
    """Records first..last-1 of a batch. A gap is a run without records whose batch says why."""

    batch: RecordBatch
    first: int
    last: int


class Appended(NamedTuple):
    """Where records went: a run of the open batch, and the offset that a commit must pass for them."""

    run: Run | None
    next_offset: Offset


class RawSlice(NamedTuple):
    """Whole batches as they are stored, for sendfile and ranged downloads."""

    segment: Segment
    position: int
    length: int
    first_offset: int
    next_offset: int


@dataclass(slots=True)
class Shared:
    """What the partitions of one directory have in common."""

    storage: Storage
    clock: Clock
    ids: Ids
    tails: TailCache
    pool: SegmentPool
    # Sealed segments whose indexes are in memory, least recently used first.
    indexed: dict[str, Segment] = field(default_factory=dict)
    indexed_max: int = 256
    # The stint in which logs are born.
    epoch: int = 1
    leader_id: int = 0
    # Told when what was committed does not read back, besides whoever reads.
    on_damage: Callable[[CorruptLog], None] = lambda error: None

    def touch(self, segment: Segment) -> None:
        self.indexed.pop(segment.stem, None)
        self.indexed[segment.stem] = segment
        if len(self.indexed) > self.indexed_max:
            oldest = next(iter(self.indexed))
            self.indexed.pop(oldest).index = None


@dataclass(slots=True, eq=False)
class SyncJob:
    """What one commit must make safe for one partition. Made and finished on the loop, carried out elsewhere."""

    log: "PartitionLog"
    end_offset: int
    segments: list[Segment]
    folder: str | None
    writes: list[tuple[Segment, int, Sequence[Blob]]]
    checkpoint: Checkpoint | None
    # Small files that may follow once the data is safe.
    files: list[tuple[str, bytes]]
    # `writes` holds all that the segments need, so that a journal can take their place.
    journallable: bool


class PartitionLog:
    def __init__(self, shared: Shared, folder: str, stream_id: StreamId, partition: int, config: LogConfig) -> None:
        """Not for callers: `create` or `open`."""
        self.shared = shared
        self.folder = folder
        self.stream_id = stream_id
        self.partition = partition
        self.config = config
        # For ever, whatever its settings become: what one replica has synced is not what all of them have.
        self.is_replicated = config.replica_count > 1
        self.log_start = Offset(0)
        self.written_end = Offset(0)
        self.synced_end = Offset(0)
        self.high_watermark = Offset(0)
        self.epoch = 1
        self.leader_id = shared.leader_id
        # Sealed segments below this offset hold each key once (compaction.py).
        self.compacted_to = 0
        self.advanced: list[Callable[[PartitionLog], None]] = []
        self._segments: list[Segment] = []
        self._open: RecordBatch | None = None
        self._tail: Tail = deque()
        # What a read asks the disk for at first.
        self._piece_bytes = READ_BYTES
        self._waiting: deque[tuple[int, Done]] = deque()
        self._checkpoint = CheckpointFile(shared.storage, f"{folder}/{CHECKPOINT}")
        # Offsets below it may be shown to anybody: the promise not to issue them again is on the disk.
        self._ceiling = 0
        self._epochs: EpochHistory | None = None
        self._producers: ProducerTable | None = None
        self._dirty: dict[int, Segment] = {}
        self._folder_dirty = False
        self._writes: list[tuple[Segment, int, Sequence[Blob]]] = []
        # Something was written that is not in `_writes`.
        self._unrecorded = False
        self._files: dict[str, bytes] = {}
        self._rolled = False
        self._start_moved = False
        # Segments whose files are still where they were; files of others wait to be recycled.
        self._leaving: list[Segment] = []
        self.has_removed = False
        self._syncing = False
        # Another node leads: what somebody wrote here, at the end of its records, would pass for its own.
        self._follows = False
        # Bytes written for the next sync; whether it, or the one before, is of so many that the file grows anyway.
        self._gathering_bytes = 0
        self._is_busy = False

    # -- opening and closing ------------------------------------------------------------------------------------

    @classmethod
    def create(
        cls, shared: Shared, folder: str, stream_id: StreamId, partition: int, config: LogConfig
    ) -> "PartitionLog":
        """A new, empty partition. Its first segment is born with its first record."""
        shared.storage.make_dir(folder)
        for name in shared.storage.list(folder):
            # Left by a creation that did not come to its end, so nobody has heard of it.
            shared.storage.remove(f"{folder}/{name}")
        log = cls(shared, folder, stream_id, partition, config)
        log.epoch = shared.epoch
        log._checkpoint.create(log._checkpoint_at(0, SEGMENT_HEAD_SIZE, ceiling=0))
        shared.storage.sync_dir(folder)
        return log

    @classmethod
    def open(
        cls, shared: Shared, folder: str, stream_id: StreamId, partition: int, config: LogConfig, *, clean: bool
    ) -> "PartitionLog":
        """An existing partition. `clean`: the directory was closed in good order, so nothing is scanned.

        Raises CorruptLog (with file, position and offset) when committed records cannot be read back.
        """
        log = cls(shared, folder, stream_id, partition, config)
        storage = shared.storage
        try:
            names = storage.list(folder)
        except FileNotFoundError as error:
            raise CorruptLog(folder, 0, 0, "the partition's folder is gone") from error
        for name in names:
            if name.endswith((".compacting", ".temp")):
                storage.remove(f"{folder}/{name}")
        log.has_removed = any(name.endswith(REMOVED) for name in names)
        bases = sorted(int(name[:-4]) for name in names if name.endswith(".log"))
        if config.replica_count > 1:
            bases = log._begin_again(bases)
        ends = [*bases[1:], bases[-1]] if bases else []
        log._segments = [Segment(storage, folder, base, end) for base, end in zip(bases, ends, strict=True)]
        found = log._checkpoint.value
        if found is not None and found.offset > found.log_start and bases and bases[0] > found.log_start:
            raise CorruptLog(folder, 0, found.log_start, "the segment that holds the log start is gone")
        if clean and found is not None and found.offset == found.ceiling and log._fits(found):
            log._resume(found)
        else:
            log._recover(found)
        if config.replica_count > 1:
            # What lies beyond is not thereby committed: the leader knows, or finds out from the others.
            log.high_watermark = Offset(max(log.log_start, 0 if found is None else found.offset))
        log._take_out_deleted()
        log.remove_files()
        return log

    def _fits(self, checkpoint: Checkpoint) -> bool:
        """The checkpoint speaks of the last segment (or of a log that has none)."""
        if not self._segments:
            return checkpoint.offset == checkpoint.log_start
        return self._segments[-1].base_offset == checkpoint.segment_base

    def _resume(self, found: Checkpoint) -> None:
        self._set_end(found.offset)
        self.log_start = Offset(found.log_start)
        self.epoch, self.leader_id = found.epoch, found.leader_id
        self._ceiling = found.ceiling
        if self._segments:
            self._segments[-1].end_offset = found.offset
            self._segments[-1].end_position = found.position

    def _set_end(self, offset: int) -> None:
        self.written_end = self.synced_end = self.high_watermark = Offset(offset)

    @property
    def end(self) -> Offset:
        """The offset the next record gets."""
        return self.written_end if self._open is None else self._open.next_offset

    @property
    def gathered_bytes(self) -> int:
        """Bytes of records that are not encoded yet."""
        return 0 if self._open is None else self._open.byte_count

    @property
    def early_end(self) -> Offset:
        """How far a work queue on a one-replica stream may look before the commit (K3)."""
        if self.is_replicated:
            return self.high_watermark
        return Offset(min(self.end, max(self._ceiling, self.high_watermark)))

    @property
    def byte_count(self) -> int:
        """Bytes of log held, as stored."""
        return sum(self._size_of(segment) for segment in self._segments)

    def bytes_from(self, offset: int) -> int:
        """Bytes of the segments that hold this offset or later ones."""
        return sum(self._size_of(segment) for segment in self._segments if segment.end_offset > offset)

    def bytes_behind(self, offset: int) -> int:
        """About so many bytes lie behind this offset: of the segment that holds it, its share of the records."""
        behind = 0
        for segment in reversed(self._segments):
            end = int(self.written_end if segment is self._segments[-1] else segment.end_offset)
            if end <= offset:
                break
            size, count = self._size_of(segment), end - segment.base_offset
            behind += size if segment.base_offset >= offset else size * (end - offset) // count
        return behind

    def _size_of(self, segment: Segment) -> int:
        if segment.end_position < 0:
            # The file may be much longer than what is stored in it.
            segment.locate(segment.base_offset, self.config.index_interval_bytes)
        return segment.end_position

    @property
    def segments(self) -> tuple[Segment, ...]:
        return tuple(self._segments)

    @property
    def active_segment(self) -> Segment | None:
        """The one that is written to."""
        return self._segments[-1] if self._segments else None

    @property
    def sealed_segments(self) -> list[Segment]:
        """Segments that the checkpoint on the disk has left behind: recovery reads none of their bytes."""
        if not self._syncing:
            self._checkpoint.anchor()
        safe = self._checkpoint.synced
        return [] if safe is None else [one for one in self._segments[:-1] if one.base_offset < safe.segment_base]

    def close(self) -> None:
        """Everything written is safe and the next open need not scan. Call on no log that failed."""
        self.seal()
        job = self.begin_sync()
        if job is not None:
            self.run_sync(job)
            self.finish_sync(job)
        if self._segments and self._segments[-1].index is not None:
            self._segments[-1].save_index()
        # Of a log that no producer wrote to, there is nothing to keep.
        if self._producers is not None and (
            len(self._producers) or self.shared.storage.exists(f"{self.folder}/{PRODUCERS}")
        ):
            self._save_producers()
        if self.is_replicated:
            # The tail that is not known to be committed is looked at again by the next start: it is short.
            self._checkpoint.write(self._committed_checkpoint(self.written_end), sync=True)
        elif self._checkpoint.value is None or self._checkpoint.value != self._checkpoint_now(self.written_end):
            self._checkpoint.write(self._checkpoint_now(self.written_end), sync=True)
        self._ceiling = self.written_end
        self._tail.clear()

    def _checkpoint_now(self, ceiling: int) -> Checkpoint:
        """The log's synced end as a checkpoint."""
        # Without a segment: where the first batch of the next one will lie.
        base, position = int(self.synced_end), SEGMENT_HEAD_SIZE
        for segment in reversed(self._segments):
            if segment.base_offset <= self.synced_end:
                base = segment.base_offset
                position = segment.end_position
                break
        return self._checkpoint_at(base, position, ceiling=ceiling)

    def _checkpoint_at(self, segment_base: int, position: int, *, ceiling: int) -> Checkpoint:
        return Checkpoint(self.log_start, segment_base, self.synced_end, position, ceiling, self.epoch, self.leader_id)

    # -- recovery -----------------------------------------------------------------------------------------------

    def _recover(self, found: Checkpoint | None) -> None:
        """After a crash: find the end, cut a torn tail, refuse to cut what was committed, go on above the ceiling."""
        stored = self._stored_epochs()
        self._epochs = stored or EpochHistory()
        known = Checkpoint(0, 0, 0, SEGMENT_HEAD_SIZE, 0, 1, 0) if found is None else found
        if found is None and self._segments:
            first = self._segments[0].base_offset
            known = known._replace(log_start=first, segment_base=first, offset=first)
        self.log_start = Offset(known.log_start)
        self.epoch, self.leader_id = max(known.epoch, 1), known.leader_id
        cut = self._find_end(known)
        # Also the names are safe from here on: a gap batch says so.
        self.shared.storage.sync_dir(self.folder)
        if stored is None:
            self._epochs = self._epochs_from_headers()
        end = int(self.written_end)
        self.epoch = max(self.epoch, self._epochs.latest.epoch)
        self._epochs.cut_from(end)
        ceiling = known.ceiling if found is not None else (end + self.config.offsets_reserved if self._segments else 0)
        if self.is_replicated:
            # Nothing beyond the watermark was ever shown; what lies there is the leader's to keep or to cut.
            self._ceiling = end
        elif cut or ceiling > end:
            self.epoch += 1
            self._ceiling = ceiling
            if ceiling > end:
                self._write_gap(ceiling, Gap.UNCLEAN_START)
            self._set_end(max(end, ceiling))
        self._ceiling = self.written_end
        for segment in self._dirty.values():
            segment.file.sync()
        # With it the name of a segment that the gap opened becomes safe.
        self.shared.storage.replace_file(f"{self.folder}/{EPOCHS}", self._epochs.encode())
        self._dirty.clear()
        self._writes.clear()
        self._folder_dirty = False
        value = self._checkpoint_now(self.written_end)
        if self.is_replicated:
            self.high_watermark = Offset(known.offset)
            latest = self._epochs.latest
            self.epoch, self.leader_id = max(latest.epoch, known.epoch, 1), latest.leader_id
            value = self._committed_checkpoint(self.written_end)
        if value.segment_base != known.segment_base:
            self._save_producers()
        if found is None:
            # Whatever is there is no checkpoint.
            self.shared.storage.replace_file(f"{self.folder}/{CHECKPOINT}", b"")
            self._checkpoint = CheckpointFile(self.shared.storage, f"{self.folder}/{CHECKPOINT}")
        self._checkpoint.write(value, sync=True)

    def _stored_epochs(self) -> EpochHistory | None:
        try:
            return EpochHistory.decode(self.shared.storage.read_file(f"{self.folder}/{EPOCHS}"))
        except (FileNotFoundError, ValueError):
            return None

    def _epochs_from_headers(self) -> EpochHistory:
        history = EpochHistory()
        for segment in self._segments:
            for _position, header in segment.headers():
                history.note(header.leader_epoch, header.leader_id, header.base_offset)
        return history

    def _find_end(self, known: Checkpoint) -> bool:
        """Scan from the checkpoint on; True if something was cut."""
        segments = self._segments
        place = next((at for at, one in enumerate(segments) if one.base_offset == known.segment_base), None)
        if place is None:
            if known.offset > known.segment_base:
                raise CorruptLog(
                    f"{self.folder}/{known.segment_base:020d}.log", known.position, known.offset, "the segment is gone"
                )
            place = len([one for one in segments if one.base_offset < known.segment_base])
        position, offset, epoch = known.position, known.offset, known.epoch
        if place == len(segments) and place > 0:
            # The checkpoint names a segment that was never durable; the one before it is complete up to there.
            self._set_end(known.offset)
            segments[-1].end_offset = known.offset
            segments[-1].resume(self._end_position(segments[-1]), self.config.index_interval_bytes)
            return False
        cut = False
        epochs = self._epochs
        assert epochs is not None
        last: Segment | None = None

        def visit(_position: int, header: BatchHeader) -> None:
            if epochs.latest.first_offset <= header.base_offset:
                epochs.note(header.leader_epoch, header.leader_id, header.base_offset)

        for at in range(place, len(segments)):
            segment = segments[at]
            if segment.base_offset != known.segment_base:
                position = SEGMENT_HEAD_SIZE
            if segment.base_offset > offset or not self._has_head(segment):
                self._refuse_loss(segments[at:], last, position, min(offset, segment.base_offset), known.offset)
                self._drop_tail(at)
                cut = True
                break
            # What is not known to be safe; a segment in which nothing is known to be has no safe head either.
            start = position if segment.base_offset == known.segment_base < known.offset else 0
            scan = segment.scan(position, offset, epoch, visit)
            position, offset, epoch = scan.end_position, scan.end_offset, scan.epoch
            following = segments[at + 1].base_offset if at + 1 < len(segments) else None
            segment.end_offset = offset
            segment.end_position = position
            last = segment
            if scan.end_offset == following:
                segment.write_again(start)
                continue
            if max(scan.claimed_durable, known.offset) > offset:
                raise CorruptLog(segment.path, position, offset, "a committed batch is damaged or missing")
            if following is not None:
                self._refuse_loss(segments[at + 1 :], segment, position, offset, known.offset)
                self._drop_tail(at + 1)
            if not scan.reached_file_end:
                cut = cut or following is not None or self._holds_something(segment, position)
                segment.cut(position, offset)
            segment.write_again(start)
            break
        if offset < known.offset:
            raise CorruptLog(self.folder, position, offset, f"the log ends below the committed offset {known.offset}")
        self._set_end(offset)
        self.epoch = max(self.epoch, epoch)
        if self._segments:
            active = self._segments[-1]
            active.end_offset = offset
            if active is not last:
                active.end_position = self._end_position(active)
            # What was saved may speak of batches that are gone, and fit by chance what comes in their place.
            active.remove_indexes()
            active.resume(active.end_position, self.config.index_interval_bytes)
        return cut

    def _has_head(self, segment: Segment) -> bool:
        """A recycled file may still have the head of the segment it was, of this log or of another."""
        head = maybe_segment_head(segment.file.read(0, SEGMENT_HEAD_SIZE))
        return head is not None and head[1:] == (segment.base_offset, self.stream_id.bytes, self.partition)

    def _end_position(self, segment: Segment) -> int:
        position = SEGMENT_HEAD_SIZE
        for at, header in segment.headers():
            position = at + header.size
        return position

    def _holds_something(self, segment: Segment, position: int) -> bool:
        """Something other than zeros lies where a batch could begin."""
        return any(segment.file.read(position, HEADER_SIZE))

    def _refuse_loss(
        self, beyond: Sequence[Segment], last: Segment | None, position: int, offset: int, committed: int
    ) -> None:
        """Segments behind the end are dropped only if nothing in them says that the end was passed by a commit."""
        claimed = committed
        for segment in beyond:
            if not self._has_head(segment):
                continue
            for _at, header in segment.find_batches(SEGMENT_HEAD_SIZE, segment.file.size()):
                claimed = max(claimed, header.durable_offset)
        if claimed > offset:
            path = self.folder if last is None else last.path
            raise CorruptLog(path, position, offset, f"batches up to offset {claimed} were committed and are missing")

    def _drop_tail(self, first: int) -> None:
        """Remove segments that nothing committed lies in, the newest first."""
        for segment in reversed(self._segments[first:]):
            segment.remove_indexes()
            self.shared.storage.remove(segment.path)
        del self._segments[first:]
        self.shared.storage.sync_dir(self.folder)

    def _write_gap(self, next_offset: int, reason: Gap) -> None:
        """Offsets from the end up to here were promised and may have been seen: they are never issued again."""
        while self.written_end < next_offset:
            upto = min(next_offset, self.written_end + 0xFFFF_FFFF)
            self._open = gap_batch(self.written_end, upto, self.epoch, reason)
            self.seal()

    # -- appending ----------------------------------------------------------------------------------------------

    def append(
        self,
        keys: Sequence[bytes],
        properties: Sequence[bytes],
        values: Sequence[bytes],
        *,
        timestamp_us: int,
        attributes: int = 0,
        expiry_us: int | Numbers = 0,
        route_set: RouteSet = (),
        origin: int | Sequence[int] = 0,
        tags: tuple[str, ...] = (),
        headers: Sequence[Headers] | None = None,
        byte_count: int | None = None,
    ) -> Appended:
        """Gather records that share all but key, properties, value, headers; perhaps expiry, origin. Written later.

        Raises DiskFull (nothing was taken) when an earlier batch finds no room.
        """
        batch = self._gathering()
        if tags or headers:
            _check_sizes(tags, headers)
        first = batch.add(
            keys,
            properties,
            values,
            timestamp_us=timestamp_us,
            attributes=attributes,
            expiry_us=expiry_us,
            route_set=route_set,
            origin=origin,
            tags=tags,
            headers=headers,
            byte_count=byte_count,
        )
        return Appended(Run(batch, first, batch.count), batch.next_offset)

    def append_columns(
        self,
        keys: Sequence[bytes],
        properties: Sequence[bytes],
        values: Sequence[bytes],
        *,
        timestamps: Sequence[int],
        expiries: Sequence[int],
        attributes: Sequence[int],
        origins: Sequence[int],
        tags: Sequence[tuple[str, ...]],
        headers: Sequence[Headers] | None = None,
    ) -> Appended:
        """Gather records of which each has everything of its own, but no routes: parked ones. As `append` otherwise."""
        distinct = dict.fromkeys(tags)
        for one in distinct:
            _check_sizes(one, None)
        if headers:
            _check_sizes((), headers)
        tag_count = sum(map(len, distinct))
        if tag_count > TAGS_MAX:
            raise Refused(f"{tag_count} tags in one append are more than {TAGS_MAX}")
        batch = self._gathering()
        if batch.tag_count + tag_count > TAGS_MAX:
            self.seal()
            batch = self._begin()
        first = batch.add_columns(
            keys,
            properties,
            values,
            timestamps=timestamps,
            expiries=expiries,
            attributes=attributes,
            origins=origins,
            tags=tags,
            headers=headers,
        )
        return Appended(Run(batch, first, batch.count), batch.next_offset)

    def append_once(
        self,
        producer: Producer,
        keys: Sequence[bytes],
        properties: Sequence[bytes],
        values: Sequence[bytes],
        *,
        timestamp_us: int,
        attributes: int = 0,
        expiry_us: int = 0,
        route_set: RouteSet = (),
        origin: int = 0,
        tags: tuple[str, ...] = (),
        headers: Sequence[Headers] | None = None,
    ) -> list[Appended]:
        """Idempotent append: record i has sequence first_sequence + i; what was written before is not written again.

        The last entry's next_offset is what a commit must pass before any of them is acknowledged. Raises
        SequenceRefused and takes nothing when one of them may not be acknowledged; DiskFull when some may have been
        taken: the same call later takes the rest.
        """
        if tags or headers:
            _check_sizes(tags, headers)
        table = self._load_producers()
        now_us = self.shared.clock.wall_us()
        # The table knows what is written; a batch of the same producer may still be open.
        if self._open is not None and self._open.producer is not None:
            self.seal()
        wanted = table.unseen(producer, len(values), now_us=now_us)
        written = []
        for first, end in wanted:
            self.seal()
            low, high = first - producer.first_sequence, end - producer.first_sequence
            batch = self._begin(producer._replace(first_sequence=first))
            batch.add(
                keys[low:high],
                properties[low:high],
                values[low:high],
                timestamp_us=timestamp_us,
                attributes=attributes,
                expiry_us=expiry_us,
                route_set=route_set,
                origin=origin,
                tags=tags,
                headers=None if headers is None else headers[low:high],
            )
            written.append(Appended(Run(batch, 0, batch.count), batch.next_offset))
        if not written:
            # Seen before, perhaps a moment ago: acknowledged when everything so far is safe.
            written.append(Appended(None, self.end))
        return written

    def append_dense(
        self,
        producer: Producer,
        keys: Sequence[bytes],
        properties: Sequence[bytes],
        values: Sequence[bytes],
        *,
        settled: int = 0,
        timestamp_us: int,
        attributes: int = 0,
        expiry_us: int = 0,
        route_set: RouteSet = (),
        origin: int = 0,
        tags: tuple[str, ...] = (),
        headers: Sequence[Headers] | None = None,
    ) -> Appended:
        """Idempotent append for an outbox: record i has number first_sequence + i, and no number was left out.

        What is below `next_sequence` is in the log and not written again, however long ago it came; calls that follow
        one another share a batch. A commit must pass next_offset before any of them is settled. `settled`: the
        outbox has done with everything below, whether this log still knows of it or not. Raises SequenceRefused for a
        gap or a generation that is over, and DiskFull; then nothing was taken.
        """
        if tags or headers:
            _check_sizes(tags, headers)
        following = max(self.next_sequence(producer.id, producer.epoch), settled)
        low = following - producer.first_sequence
        if low < 0:
            raise SequenceRefused(f"number {producer.first_sequence} leaves a gap: expected at most {following}")
        if low >= len(values):
            # Seen before, perhaps a moment ago: settled when everything so far is safe.
            return Appended(None, self.end)
        batch = self._open
        if batch is None or self._is_full(batch) or not _goes_on(batch, producer, following):
            self.seal()
            batch = self._begin(Producer(producer.id, producer.epoch, following, dense=True))
        first = batch.add(
            keys[low:],
            properties[low:],
            values[low:],
            timestamp_us=timestamp_us,
            attributes=attributes,
            expiry_us=expiry_us,
            route_set=route_set,
            origin=origin,
            tags=tags,
            headers=None if headers is None else headers[low:],
        )
        return Appended(Run(batch, first, batch.count), batch.next_offset)

    def next_sequence(self, owner: bytes, generation: int) -> int:
        """The next number of an outbox: everything below is in this log, though perhaps not committed.

        Raises SequenceRefused for a generation that is over.
        """
        # The table knows what is written; what is gathered may be the outbox's, too.
        if self._open is not None and self._open.producer is not None:
            known = self._open.producer
            if known.id == owner and known.epoch == generation:
                return known.first_sequence + self._open.count
            self.seal()
        return self._load_producers().next_sequence(owner, generation)

    def forget_producer(self, owner: bytes) -> None:
        """An outbox is gone for good, and will not send anything again."""
        self._load_producers().forget(owner, self.shared.clock.wall_us())

    def _gathering(self) -> RecordBatch:
        """The batch that takes records which nobody has numbered."""
        batch = self._open
        if batch is None or batch.producer is not None or self._is_full(batch):
            self.seal()
            batch = self._begin()
        return batch

    def _begin(self, producer: Producer | None = None) -> RecordBatch:
        self._refuse_while_following()
        self._open = RecordBatch(self.written_end, self.epoch, producer)
        return self._open

    def _refuse_while_following(self) -> None:
        if self._follows:
            raise NotLed(f"{self.folder}: another node leads this log")

    def _is_full(self, batch: RecordBatch) -> bool:
        return (
            batch.byte_count >= self.config.batch_bytes_max
            or len(batch.route_sets) >= DICTIONARY_MAX
            or len(batch.tag_sets) >= DICTIONARY_MAX
            or batch.tag_count > TAGS_MAX - TAGS_PER_RECORD_MAX
        )

    def append_bulk(self, batch: BulkBatch) -> Offset:
        """Write a whole batch behind what is gathered; returns the offset of its first record.

        For those who write in bulk what nobody reads soon: it is not kept in memory, not even until it is synced; so
        the segment itself is synced, and not the commit journal in its place. DiskFull: nothing was taken.
        """
        self._refuse_while_following()
        self.seal()
        segment, base_offset = self._active(), self.written_end
        body = encode_bulk(batch, compress=self.config.compression)
        if not segment.is_empty and self._rolls(segment, body.size):
            segment = self._roll(segment)
        buffers = self._stamped(segment, body, base_offset)
        self._written(
            segment,
            buffers,
            body.size,
            base_offset,
            base_offset + batch.count,
            body.max_timestamp,
            ahead=False,
            recorded=False,
        )
        # What is in memory reaches to the end, or there is nothing.
        self._tail.clear()
        return base_offset

    def seal(self) -> None:
        """Write the open batch to the active segment. On DiskFull it stays open and nothing is lost."""
        batch = self._open
        if batch is None or batch.span == 0:
            self._open = None
            return
        self._encode(batch)
        self._open = None
        if batch.gap is None:
            self.shared.tails.push(self._tail, batch)

    def _encode(self, batch: RecordBatch) -> None:
        segment = self._active()
        body = encode(batch, compress=self.config.compression, known_sets=segment.large_sets)
        if not segment.is_empty and self._rolls(segment, body.size):
            segment = self._roll(segment)
            body = encode(batch, compress=self.config.compression)
        self._write(segment, batch, body)

    def _write(self, segment: Segment, batch: RecordBatch, body: Body) -> None:
        buffers = self._stamped(segment, body, batch.base_offset)
        newest = None if batch.gap is not None else body.max_timestamp
        self._written(segment, buffers, body.size, batch.base_offset, batch.next_offset, newest)
        for route_set, place in body.defined.items():
            segment.large_sets[route_set] = RouteReference(batch.base_offset, place)
        if batch.producer is not None:
            self._load_producers().note(batch.producer, batch.count, self.shared.clock.wall_us())

    def _stamped(self, segment: Segment, body: Body, base_offset: int) -> list[Blob]:
        return stamp(
            body,
            salt=segment.salt,
            base_offset=base_offset,
            leader_epoch=self.epoch,
            leader_id=self.leader_id,
            durable_offset=self.synced_end,
            first_of_segment=segment.is_empty,
        )

    def _written(
        self,
        segment: Segment,
        buffers: Sequence[Blob],
        size: int,
        base_offset: int,
        next_offset: int,
        newest: int | None,
        *,
        ahead: bool = True,
        recorded: bool = True,
    ) -> None:
        """Put a stamped batch at the end of the active segment. `recorded`: its bytes stay in memory until they are
        synced, for the commit journal."""
        epochs = self._load_epochs()
        if epochs.note(self.epoch, self.leader_id, base_offset):
            self._files[f"{self.folder}/{EPOCHS}"] = epochs.encode()
        self._gathering_bytes += size
        if self._gathering_bytes > GROUP_BYTES:
            self._is_busy = True
        position = segment.append(buffers, size, next_offset, newest, ahead=ahead and not self._is_busy)
        self.written_end = Offset(next_offset)
        self._dirty[segment.base_offset] = segment
        if recorded and self.config.durability != "os":
            self._writes.append((segment, position, buffers))
        else:
            self._unrecorded = True

    def _active(self) -> Segment:
        if not self._segments:
            # There is nothing to read for it now; when this segment is full, it would be all of it.
            self._load_producers()
            self._segments.append(self._new_segment())
        segment = self._segments[-1]
        if segment.index is None or segment.capacity < 0:
            segment.resume(segment.end_position, self.config.index_interval_bytes)
        return segment

    def _rolls(self, segment: Segment, size: int) -> bool:
        if segment.end_position + size > self.config.segment_bytes:
            return True
        age_us = self.shared.clock.wall_us() - segment.created_us
        return bool(segment.created_us) and age_us > self.config.segment_ms * 1000

    def _roll(self, full: Segment) -> Segment:
        """Seal the active segment and begin the next one at the written end."""
        full.save_index()
        self.shared.touch(full)
        self._segments.append(self._new_segment())
        self._rolled = True
        return self._segments[-1]

    def _new_segment(self) -> Segment:
        shared = self.shared
        size = self.config.segment_bytes
        segment = Segment.create(
            shared.storage,
            self.folder,
            SegmentHead(shared.ids.salt(), self.written_end, self.stream_id.bytes, self.partition),
            interval=self.config.index_interval_bytes,
            recycled=shared.pool.take(size // 2, size + size // 2) if self._segments else None,
            now_us=shared.clock.wall_us(),
        )
        self._folder_dirty = True
        self._dirty[segment.base_offset] = segment
        return segment

    def begin_stint(self, epoch: int, leader_id: int) -> None:
        """This replica leads: what is appended from now on is of this stint."""
        latest = self._load_epochs().latest
        assert epoch > latest.epoch or (epoch, leader_id) == latest[:2], "epochs only rise"
        self.seal()
        self.epoch, self.leader_id = epoch, leader_id
        self._follows = False

    def pass_over_lost(self, next_offset: int) -> None:
        """This replica leads by force, and leaders before it may have given out offsets beyond the end: the first thing
        that it writes says so, and those below this one are not given out again (E7). DiskFull: to be tried again."""
        try:
            self._write_gap(next_offset, Gap.UNCLEAN_ELECTION)
        except DiskFull:
            self._open = None
            raise
        # What is in memory reaches to the end, or there is nothing.
        self._tail.clear()
        self._follows = False

    def begin_epoch(self, epoch: int, leader_id: int) -> None:
        """A new leader stint: what is appended from now on belongs to it."""
        assert (epoch, leader_id) > (self.epoch, self.leader_id), "epochs only rise"
        self.seal()
        self.epoch, self.leader_id = epoch, leader_id
        self._follows = False

    def _load_epochs(self) -> EpochHistory:
        if self._epochs is None:
            self._epochs = self._stored_epochs() or self._epochs_from_headers()
        return self._epochs

    @property
    def epochs(self) -> EpochHistory:
        return self._load_epochs()

    def _load_producers(self) -> ProducerTable:
        for _ in self.loading_producers():
            pass
        assert self._producers is not None
        return self._producers

    def loading_producers(self) -> Iterator[None]:
        """Find out what producers have written since their last snapshot, a piece at a time. The first append with
        numbers needs it, and would do it in one go: after a crash that is up to a segment. Others may use the log
        between the pieces."""
        if self._producers is not None:
            return
        table = self._stored_producers()
        # When it was used is not in the log (a record's time may be older): the expiry starts anew.
        now_us = self.shared.clock.wall_us()
        is_whole = False
        while self._producers is None and not is_whole:
            left = PRODUCERS_PIECE_BYTES
            is_whole = True
            for header in self._headers_from(table.next_offset):
                left -= _HEADER_COST_BYTES
                if header.producer is not None:
                    table.note(header.producer, header.record_count, now_us)
                    left -= header.size
                table.next_offset = header.next_offset
                if left <= 0:
                    is_whole = False
                    break
            if not is_whole:
                yield
        if self._producers is None:
            self._producers = table

    def _stored_producers(self) -> ProducerTable:
        table = ProducerTable(expiry_us=self.config.producer_expiry_ms * 1000, count_max=self.config.producer_count_max)
        try:
            table.restore(self.shared.storage.read_file(f"{self.folder}/{PRODUCERS}"))
        except (FileNotFoundError, UnknownFormat):
            table.next_offset = 0
        return table

    def _producer_snapshot(self) -> bytes:
        table = self._load_producers()
        table.next_offset = self.written_end
        return table.encode(self.shared.clock.wall_us())

    def _save_producers(self) -> None:
        self.shared.storage.replace_file(f"{self.folder}/{PRODUCERS}", self._producer_snapshot())

    def _headers_from(self, offset: int) -> Iterator[BatchHeader]:
        for segment in self._segments:
            start = max(offset, segment.base_offset)
            if segment.end_offset <= start:
                continue
            position = segment.locate(start, self.config.index_interval_bytes)
            for at, header in segment.headers(position):
                if header.producer is not None:
                    # What it says is acted upon, so its hash is looked at.
                    segment.read_whole(at, header)
                yield header

    # -- as one of several replicas -----------------------------------------------------------------------------

    def check_stored(self, offset: int) -> None:
        """Is the batch that covers this offset what was written? Tells of damage where it is not."""
        if self.replica_start <= offset < self.written_end:
            segment = self._segment_of(offset)
            try:
                segment.read_whole(segment.locate(offset, self.config.index_interval_bytes))
            except CorruptLog as error:
                self.shared.on_damage(error)

    @property
    def replica_start(self) -> Offset:
        """Where a replica that has nothing yet begins: batches may refer to others before them in their segment."""
        return Offset(self._segments[0].base_offset) if self._segments else self.written_end

    def append_stored(self, data: bytes | memoryview) -> Offset:
        """Whole batches as the leader's log stores them, from the end of this one on; returns the new end.

        They keep their place and their leader's epoch. A segment begins where the leader's did, for the sake of what
        batches in it refer to. Raises Refused for a batch that is damaged or does not follow; those before it are kept.
        """
        assert self._open is None, "a follower's records come from its leader only"
        self._follows = True
        at = 0
        while at < len(data):
            header = maybe_header(data, at, int.from_bytes(data[at + 8 : at + 16], "little"))
            if header is None or not is_whole(data, at, header):
                raise DamagedBatch(
                    f"{self.folder}: a batch from the leader at offset {self.end} is damaged or not whole"
                )
            last_epoch = self._load_epochs().latest.epoch
            if header.base_offset != self.written_end or header.leader_epoch < last_epoch:
                raise Refused(
                    f"{self.folder}: a batch at offset {header.base_offset} of epoch {header.leader_epoch} does not "
                    f"follow offset {self.written_end} of epoch {last_epoch}"
                )
            self.epoch, self.leader_id = header.leader_epoch, header.leader_id
            # Much at once is synced at once: a file that grows meanwhile costs less than one that is filled twice.
            self._adopt(header, data[at : at + header.size], ahead=len(data) < BULK_BYTES)
            at += header.size
        return self.written_end

    def _adopt(self, header: BatchHeader, data: bytes | memoryview, *, ahead: bool) -> None:
        segment = self._active()
        if header.flags & FLAG_FIRST_OF_SEGMENT and not segment.is_empty:
            segment = self._roll(segment)
        buffers = [adopt(data, salt=segment.salt, durable_offset=self.synced_end)]
        newest = None if header.flags & FLAG_GAP else header.max_timestamp
        self._written(segment, buffers, header.size, header.base_offset, header.next_offset, newest, ahead=ahead)
        if header.producer is not None:
            self._load_producers().note(header.producer, header.record_count, self.shared.clock.wall_us())

    def begin_at(self, offset: int) -> None:
        """A replica begins where its leader's log does, and lets go of what it has: the leader deleted all of it, or it
        has nothing. As with `cut_from`, nothing of it may lie in the commit journal. See Committer.cut."""
        assert self._open is None and not self._syncing, "nothing is under way while a log begins anew"
        assert offset >= self.written_end or self.replica_start == self.written_end, "only what is deleted is let go of"
        self.log_start = Offset(offset)
        self._set_end(offset)
        self._ceiling = offset
        self._load_epochs().cut_from(0)
        # In this order a crash leaves the old records or none: a start removes them, see `_begin_again`.
        self._checkpoint.write(self._checkpoint_at(offset, SEGMENT_HEAD_SIZE, ceiling=offset), sync=True)
        for segment in self._segments:
            self.shared.indexed.pop(segment.stem, None)
        self._drop_tail(0)
        self.shared.storage.replace_file(f"{self.folder}/{EPOCHS}", self._load_epochs().encode())
        self._forget_unsynced()

    def _begin_again(self, bases: list[int]) -> list[int]:
        """Segments that are left after one that began anew was interrupted are removed; returns the others."""
        found = self._checkpoint.value
        if found is None or not found.log_start == found.offset == found.segment_base:
            return bases
        old = [base for base in bases if base < found.segment_base]
        for base in reversed(old):
            segment = Segment(self.shared.storage, self.folder, base, base)
            segment.remove_indexes()
            self.shared.storage.remove(segment.path)
            self.shared.storage.sync_dir(self.folder)
        if old:
            self.shared.storage.replace_file(f"{self.folder}/{EPOCHS}", EpochHistory().encode())
        return bases[len(old) :]

    def _forget_unsynced(self) -> None:
        self._writes = []
        self._dirty = {}
        self._files = {}
        self._rolled = self._unrecorded = self._folder_dirty = False
        self._tail.clear()

    def follow_start(self, offset: int) -> bool:
        """The leader has deleted what lies below; True if that is news. Segments roll where the leader's do only."""
        offset = min(offset, int(self.high_watermark), int(self.synced_end))
        if offset <= self.log_start or not self._segments:
            return False
        self.log_start = Offset(offset)
        self._start_moved = True
        return True

    def follow(self) -> None:
        """Another node leads from now on, until a stint begins here: appends raise NotLed."""
        self._follows = True

    def abandon(self) -> None:
        """This replica leads no longer: what nobody has written yet is dropped, and who waits is not told anything."""
        self._open = None
        self._waiting.clear()
        self.advanced.clear()

    def cut_from(self, offset: int) -> None:
        """Records from here on are gone: the leader has others there. Blocks; what leans on the commit journal must
        have been synced and the journal emptied before, or a crash would put them back. See Committer.cut."""
        assert not self._syncing and self._open is None, "nothing is under way while a log is cut"
        assert offset >= self.high_watermark, "what was committed is never cut"
        if offset >= self.written_end:
            return
        place = next(at for at in reversed(range(len(self._segments))) if self._segments[at].base_offset <= offset)
        segment = self._segments[place]
        position = segment.locate(offset, self.config.index_interval_bytes) if offset < segment.end_offset else -1
        producers = self._load_producers()
        for header in self._headers_from(offset):
            assert header.base_offset >= offset, "a log is cut between batches"
            if header.producer is not None:
                producers.withdraw(header.producer, header.record_count)
        if position < 0:
            position = self._end_position(segment)
        # What stays is safe from here on, also in segments before this one; this one is synced when it is cut.
        for one in self._dirty.values():
            if one.base_offset < segment.base_offset:
                one.file.sync()
        if self._folder_dirty:
            self.shared.storage.sync_dir(self.folder)
        # In this order a crash leaves either the old records, to be cut again, or none of them.
        producers.next_offset = offset
        self.shared.storage.replace_file(f"{self.folder}/{PRODUCERS}", producers.encode(self.shared.clock.wall_us()))
        self._load_epochs().cut_from(offset)
        self.synced_end = Offset(min(self.synced_end, offset))
        # What it says is committed, so it lies below the cut; the one before may have been written by another promise.
        self._checkpoint.write(self._committed_checkpoint(offset), sync=True)
        while len(self._segments) > place + 1:
            self.shared.indexed.pop(self._segments[-1].stem, None)
            # One by one: of names that go together, a loss of power may keep the last and take one before it.
            self._drop_tail(len(self._segments) - 1)
        segment.remove_indexes()
        segment.cut(position, offset)
        segment.resume(position, self.config.index_interval_bytes)
        self.shared.indexed.pop(segment.stem, None)
        self.shared.storage.replace_file(f"{self.folder}/{EPOCHS}", self._load_epochs().encode())
        self.written_end = self.synced_end = Offset(offset)
        self._forget_unsynced()
        latest = self._load_epochs().latest
        self.epoch, self.leader_id = max(latest.epoch, 1), latest.leader_id

    # -- committing ---------------------------------------------------------------------------------------------

    def when_committed(self, next_offset: int, done: Done) -> None:
        """Call back once everything below this offset has the durability that the stream promises."""
        if next_offset <= self.high_watermark:
            done()
        else:
            assert not self._waiting or self._waiting[-1][0] <= next_offset, "tickets come in the order of appends"
            self._waiting.append((next_offset, done))

    @property
    def needs_sync(self) -> bool:
        return bool(self._dirty) or self._start_moved or self.synced_end < self.end

    @property
    def needs_checkpoint(self) -> bool:
        """The ceiling, the log start or the active segment on the disk is out of date."""
        low = self.end + self.config.offsets_reserved // 2 > self._ceiling
        return self._rolled or self._start_moved or (low and bool(self._dirty))

    def begin_sync(self) -> SyncJob | None:
        """What must be made safe now, or None. Everything gathered must have been sealed before."""
        assert not self._syncing, "one sync at a time"
        if not self._dirty and not self._start_moved:
            return None
        if self._rolled or self._start_moved:
            # What producers wrote must outlive the records (O4): no checkpoint leaves a segment behind before it.
            self._files[f"{self.folder}/{PRODUCERS}"] = self._producer_snapshot()
        ceiling = self._ceiling
        checkpoint = None
        if self.needs_checkpoint:
            if self._dirty:
                ceiling = max(ceiling, self.written_end + self.config.offsets_reserved)
            if self.is_replicated:
                checkpoint = self._committed_checkpoint(ceiling)
            else:
                active = self._segments[-1]
                checkpoint = Checkpoint(
                    self.log_start,
                    active.base_offset,
                    self.written_end,
                    active.end_position,
                    ceiling,
                    self.epoch,
                    self.leader_id,
                )
        job = SyncJob(
            self,
            self.written_end,
            list(self._dirty.values()),
            self.folder if self._folder_dirty else None,
            self._writes,
            checkpoint,
            list(self._files.items()) if self._files else [],
            # A new segment's head is in no list of writes, so its first commit syncs the file itself.
            not self._folder_dirty and not self._unrecorded,
        )
        self._is_busy = self._gathering_bytes > GROUP_BYTES
        self._gathering_bytes = 0
        self._dirty = {}
        self._writes = []
        self._unrecorded = False
        if self._files:
            self._files = {}
        self._folder_dirty = False
        self._rolled = False
        self._start_moved = False
        self._syncing = True
        return job

    def run_sync(self, job: SyncJob, *, journalled: bool = False) -> None:
        """The blocking part, in any thread. `journalled`: the bytes are safe in the commit journal already."""
        storage = self.shared.storage
        if not journalled:
            for segment in job.segments:
                segment.file.sync()
        if job.folder is not None:
            storage.sync_dir(job.folder)
        # These come first: recovery reads the log from the checkpoint on, and from nowhere before it.
        for path, data in job.files:
            storage.replace_file(path, data)
        if job.checkpoint is not None:
            self._checkpoint.write(job.checkpoint, sync=True)

    def finish_sync(self, job: SyncJob, *, files_later: bool = False) -> None:
        """The job is done: what it covered is safe. `files_later`: the caller sees to the files of segments that nobody
        needs any more, by `remove_files`, before the next job."""
        self._syncing = False
        assert job.end_offset >= self.synced_end
        self.synced_end = Offset(job.end_offset)
        if job.checkpoint is not None:
            self._ceiling = job.checkpoint.ceiling
        self.advance()
        self._take_out_deleted()
        if not files_later:
            self.remove_files()

    def advance(self) -> None:
        """Move the high watermark as far as the stream's promise allows, and tell who waits."""
        if self.is_replicated:
            return
        reached = self.synced_end
        if self.config.durability != "sync":
            # Less is promised, but no offset is shown that could be issued again.
            reached = Offset(max(reached, min(self.written_end, self._ceiling)))
        self.advance_to(reached)

    def advance_to(self, reached: Offset) -> None:
        """The high watermark is here, unless it was further on already. For the replicas of a log to say."""
        assert reached <= self.written_end
        if reached <= self.high_watermark:
            return
        self.high_watermark = reached
        waiting = self._waiting
        while waiting and waiting[0][0] <= reached:
            waiting.popleft()[1]()
        for tell in self.advanced:
            tell(self)

    def _committed_checkpoint(self, ceiling: int) -> Checkpoint:
        """How far a replica's log is committed, which is never beyond what is synced."""
        offset = min(self.high_watermark, self.synced_end)
        base, position = int(offset), SEGMENT_HEAD_SIZE
        for segment in reversed(self._segments):
            if segment.base_offset <= offset:
                base = segment.base_offset
                if offset < segment.end_offset:
                    position = segment.locate(offset, self.config.index_interval_bytes)
                else:
                    position = self._size_of(segment) if segment.end_offset > segment.base_offset else SEGMENT_HEAD_SIZE
                break
        # Recovery reads on from there, and takes no batch of an epoch below this one.
        written_in = self._load_epochs().epoch_at(max(offset - 1, 0))
        return Checkpoint(
            self.log_start, base, offset, position, ceiling, written_in.epoch, max(written_in.leader_id, 0)
        )

    def note_watermark(self) -> None:
        """Let offline readers see how far the log is committed. Not synced: the checkpoint before still stands."""
        value = self._checkpoint.value
        if self.is_replicated:
            committed = min(self.high_watermark, self.synced_end)
            if value is not None and value.offset < committed and not self._syncing and not self._rolled:
                now = self._committed_checkpoint(max(self._ceiling, value.ceiling))
                self._checkpoint.write(now._replace(log_start=value.log_start), sync=False)
            return
        # Nor may it leave a segment behind before what producers wrote in it is saved, which a commit does (O4).
        quiet = not self._syncing and not self._rolled
        if value is not None and value.offset != self.synced_end and quiet and self._segments:
            active = self._segments[-1]
            if active.end_offset == self.synced_end:
                # The log start moves with a commit only: more than the checkpoint has to be safe for that.
                now = self._checkpoint_now(max(self._ceiling, value.ceiling))._replace(log_start=value.log_start)
                self._checkpoint.write(now, sync=False)

    # -- reading ------------------------------------------------------------------------------------------------

    def read(self, offset: int, *, bytes_max: int = READ_BYTES, end: int | None = None) -> list[Run]:
        """Runs of records from an offset on, at least one batch and about bytes_max unpacked; empty at the end.

        `end` (the high watermark unless said otherwise) is where the reader must stop. A gap comes as a run without
        records. Raises OffsetOutOfRange below the log start or beyond the end.
        """
        end = int(self.high_watermark) if end is None else end
        if offset < self.log_start or offset > end:
            raise OffsetOutOfRange(offset, self.log_start, end)
        runs: list[Run] = []
        for batch in self._batches(offset, end, bytes_max):
            # Only the first and the last batch of a read can reach beyond what was asked for.
            first = 0 if batch.base_offset >= offset else batch.index_of(offset)
            last = len(batch.values) if batch.next_offset <= end else batch.index_of(end)
            runs.append(Run(batch, first, last))
        return runs

    def runs(self, offset: int | None = None) -> Iterator[Run]:
        """Everything that is committed, from an offset (the log start unless said otherwise) on."""
        offset = int(self.log_start) if offset is None else offset
        while found := self.read(offset):
            yield from found
            offset = int(found[-1].batch.next_offset)

    def entries(self) -> Iterator[tuple[int, bytes, bytes]]:
        """(offset, key, value) of every record: for logs in which the last value of a key is the truth."""
        for batch, first, last in self.runs():
            for index in range(first, last):
                yield batch.offset_at(index), batch.keys[index], batch.values[index]

    def _batches(self, offset: int, end: int, bytes_max: int) -> list[RecordBatch]:
        if offset >= end:
            return []
        oldest = self._tail[0].base_offset if self._tail else self.written_end
        if offset < oldest:
            return self._read_segment(offset, min(end, self.written_end), bytes_max)
        found: list[RecordBatch] = []
        taken = 0
        if self._open is not None and self._open.base_offset < end:
            found.append(self._open)
        for batch in reversed(self._tail):
            if found and batch.next_offset != found[-1].base_offset:
                # A gap lies between; it is on the disk only.
                break
            if batch.next_offset <= offset:
                break
            if batch.base_offset < end:
                found.append(batch)
        found.reverse()
        if not found or found[0].base_offset > offset:
            return self._read_segment(offset, min(end, self.written_end), bytes_max)
        for count, batch in enumerate(found, start=1):
            taken += batch.byte_count
            if taken >= bytes_max:
                return found[:count]
        return found

    def _segment_of(self, offset: int) -> Segment:
        low, high = 0, len(self._segments)
        while high - low > 1:
            middle = (low + high) // 2
            if self._segments[middle].base_offset <= offset:
                low = middle
            else:
                high = middle
        segment = self._segments[low]
        if segment is not self._segments[-1]:
            self.shared.touch(segment)
        return segment

    def _read_segment(self, offset: int, end: int, bytes_max: int) -> list[RecordBatch]:
        try:
            return self._checked(self._segment_of(offset), offset, end, bytes_max)
        except CorruptLog as error:
            self.shared.on_damage(error)
            raise

    def _checked(self, segment: Segment, offset: int, end: int, bytes_max: int) -> list[RecordBatch]:
        position = segment.locate(offset, self.config.index_interval_bytes)
        begin = position
        data = b""
        batches: list[RecordBatch] = []
        at = unpacked = 0
        stop = min(end, segment.end_offset)
        while True:
            header = maybe_header(data, at, segment.salt)
            if header is None or at + header.size > len(data):
                position, at = position + at, 0
                wanted = HEADER_SIZE if header is None else header.size
                data = segment.file.read(position, max(wanted, min(self._piece_bytes, bytes_max - unpacked)))
                header = maybe_header(data, 0, segment.salt)
                if header is not None and header.size > len(data):
                    data += segment.file.read(position + len(data), header.size - len(data))
            if header is None or at + header.size > len(data):
                if batches:
                    return batches
                raise CorruptLog(segment.path, position + at, offset, "no batch where one must be")
            if not batches and not header.base_offset <= offset < header.next_offset:
                raise CorruptLog(segment.path, position + at, offset, "the index leads to another batch")
            if not is_whole(data, at, header):
                raise CorruptLog(segment.path, position + at, header.base_offset, "a batch fails its hash")
            batch = decode(data, at, header)
            self.resolve_routes(segment, batch)
            batches.append(batch)
            at += header.size
            # What packs well is much more when it is unpacked: records that are all alike, some hundred times as much.
            unpacked += HEADER_SIZE + header.blob_size + RECORD_BYTES * header.record_count
            if unpacked >= bytes_max:
                self._piece_bytes = max(PIECE_BYTES, position + at - begin)
                return batches
            if header.next_offset >= stop:
                return batches

    def batches_in(self, segment: Segment) -> Iterator[tuple[BatchHeader, RecordBatch]]:
        """Every batch of one segment, checked and decoded, with its header."""
        for position, header in segment.headers():
            _header, data = segment.read_whole(position, header)
            batch = decode(data, 0, header)
            self.resolve_routes(segment, batch)
            yield header, batch

    def resolve_routes(self, segment: Segment, batch: RecordBatch) -> None:
        """Put large route sets in the place of references to them."""
        for place, one in enumerate(batch.route_sets):
            if isinstance(one, RouteReference):
                batch.route_sets[place] = segment.route_set(one, self.config.index_interval_bytes)

    def scan(self, offset: int, hashes: Sequence[int], *, end: int | None = None) -> Iterator[RecordBatch]:
        """Batches that may hold a record with one of these tag or key hashes; the others are not even read."""
        end = int(self.high_watermark) if end is None else end
        if offset < self.log_start or offset > end:
            raise OffsetOutOfRange(offset, self.log_start, end)
        try:
            yield from self._scan(offset, partial(_holds_any, hashes), end)
        except CorruptLog as error:
            self.shared.on_damage(error)
            raise

    def _scan(self, offset: int, wanted: Callable[[bytes], bool], end: int) -> Iterator[RecordBatch]:
        while offset < min(end, self.written_end):
            segment = self._segment_of(offset)
            position: int | None = segment.locate(offset, self.config.index_interval_bytes)
            while position is not None:
                position, offset, _ = _pass_over(segment, position, offset, end, wanted)
                if position is not None:
                    header, data = segment.read_whole(position)
                    batch = decode(data, 0, header)
                    self.resolve_routes(segment, batch)
                    yield batch
                    offset = header.next_offset
                    position = position + header.size if offset < min(end, segment.end_offset) else None

    def pass_over(self, offset: int, sieve: Sieve, *, end: int) -> tuple[int, bool]:
        """(offset, True) where the next batch below the end begins that may hold a record which the sieve wants, or
        (offset, False) as far as was looked in one go. Asked are a batch's summary, then the hashes of its tags; the
        rest of it is not unpacked. Batches in memory are cheap to read, and all count as such."""
        if offset < self.log_start or offset > end:
            raise OffsetOutOfRange(offset, self.log_start, end)
        try:
            return self._passed_over(offset, sieve, end)
        except CorruptLog as error:
            self.shared.on_damage(error)
            raise

    def _passed_over(self, offset: int, sieve: Sieve, end: int) -> tuple[int, bool]:
        in_memory = int(self._tail[0].base_offset if self._tail else self.written_end)
        stop = min(end, in_memory)
        left = PASSED_OVER_MAX
        while offset < stop and left > 0:
            segment = self._segment_of(offset)
            position: int | None = segment.locate(offset, self.config.index_interval_bytes)
            while position is not None and left > 0:
                position, offset, looked = _pass_over(segment, position, offset, stop, sieve.may_match, left)
                left -= looked
                if position is None:
                    break
                header, data = segment.read_whole(position)
                columns = decode_columns(data, 0, header, blobs=False)
                if sieve.may_hold(columns.tag_hashes, columns.tag_sets):
                    return offset, True
                offset = header.next_offset
                position = position + header.size if offset < min(stop, segment.end_offset) else None
        return min(offset, end), in_memory <= offset < end

    def read_raw(
        self, offset: int, *, bytes_max: int = READ_BYTES, end: int | None = None, behind: RawSlice | None = None
    ) -> RawSlice | None:
        """Whole stored batches from the one that holds the offset, for a peer or a download; None at the end. `behind`:
        the slice before, if there was one, so that nothing has to be looked for."""
        end = int(self.high_watermark) if end is None else end
        # Replicas begin with a whole segment.
        start = min(self.log_start, self.replica_start) if self.is_replicated else self.log_start
        if offset < start or offset > end:
            raise OffsetOutOfRange(offset, start, end)
        if offset >= min(end, self.written_end):
            return None
        segment = self._segment_of(offset)
        if behind is not None and behind.segment is segment and behind.next_offset == offset:
            position = behind.position + behind.length
        else:
            position = segment.locate(offset, self.config.index_interval_bytes)
        length = 0
        first = following = offset
        for at, header in segment.headers(position):
            if header.next_offset > end or (length and length + header.size > bytes_max):
                break
            if not length:
                first = header.base_offset
            length = at + header.size - position
            following = header.next_offset
        return RawSlice(segment, position, length, first, following) if length else None

    def offset_at_time(self, timestamp_us: int) -> Offset:
        """The first committed record at or after this time; the high watermark when there is none."""
        for segment in self._segments:
            start = max(segment.base_offset, self.log_start)
            if segment.end_offset <= start:
                continue
            segment.locate(start, self.config.index_interval_bytes)
            assert segment.index is not None
            if segment.index.max_timestamp < timestamp_us:
                continue
            offset = max(start, segment.index.offset_before_time(timestamp_us) or 0)
            while offset < min(self.high_watermark, segment.end_offset):
                for batch in self._read_segment(offset, self.high_watermark, READ_BYTES):
                    offset = batch.next_offset
                    for value, first, last in batch.timestamps.spans(0, batch.count) if batch.count else ():
                        if value >= timestamp_us:
                            for index in range(first, last):
                                if batch.offset_at(index) >= self.log_start:
                                    return Offset(min(batch.offset_at(index), self.high_watermark))
        return self.high_watermark

    # -- removing -----------------------------------------------------------------------------------------------

    def delete_before(self, offset: int) -> Offset:
        """Records below the offset are gone for every reader; the next commit makes that safe and frees the files."""
        offset = min(offset, int(self.high_watermark))
        if self.is_replicated:
            # A follower may know of a commit before its own sync.
            offset = min(offset, int(self.synced_end))
        if offset <= self.log_start:
            return self.log_start
        self.log_start = Offset(offset)
        self._start_moved = True
        if offset == self.end and not self._segments[-1].is_empty:
            # Without room for an empty segment the last one goes with a later roll.
            with suppress(DiskFull):
                self._roll(self._active())
        return self.log_start

    def expired(self, now_us: int, pinned_from: int | None = None) -> Offset:
        """How far retention by age and by bytes would delete now; never past what a view still pins (R1)."""
        limit = int(self.high_watermark) if pinned_from is None else min(pinned_from, self.high_watermark)
        config = self.config
        segments = self._segments
        before_us = None if config.retention_ms is None else now_us - config.retention_ms * 1000
        if config.cleanup == "compact" or not segments or (len(segments) == 1 and not _is_old(segments[0], before_us)):
            return self.log_start
        total = self.byte_count
        upto = int(self.log_start)
        for segment in segments:
            # An empty one has no time, and nothing to let go of.
            if segment.end_offset > limit or segment.end_offset == segment.base_offset:
                break
            old = before_us is not None and segment.max_timestamp(config.index_interval_bytes) < before_us
            large = config.retention_bytes is not None and total > config.retention_bytes
            # The segment that is being written goes by age only, when there is nothing new at all.
            if segment is segments[-1]:
                large = False
                old = old and self.end == segment.end_offset
            if not old and not large:
                break
            total -= self._size_of(segment)
            upto = segment.end_offset
        return Offset(max(upto, self.log_start))

    def _take_out_deleted(self) -> None:
        """Take segments below the log start out of the chain."""
        if len(self._segments) < 2 or self._segments[0].end_offset > self.log_start:
            return
        self._checkpoint.anchor()
        safe = self._checkpoint.synced
        assert safe is not None
        # What a checkpoint on the disk still speaks of stays: recovery begins at its segment, the log at its start.
        gone = [
            one
            for one in self._segments[:-1]
            if one.end_offset <= safe.log_start and one.base_offset < safe.segment_base
        ]
        if not gone:
            return
        for segment in gone:
            self.shared.indexed.pop(segment.stem, None)
            self._dirty.pop(segment.base_offset, None)
        self._writes = [write for write in self._writes if write[0] not in gone]
        del self._segments[: len(gone)]
        self._leaving += gone
        self._folder_dirty = True
        while self._tail and self._tail[0].next_offset <= safe.log_start:
            self._tail.popleft()

    @property
    def has_files_to_remove(self) -> bool:
        return bool(self._leaving)

    def remove_files(self) -> None:
        """Files of segments that were taken out of the chain wait under another name from here on. In any thread."""
        stamp_ms = self.shared.clock.wall_us() // 1000
        while self._leaving:
            segment = self._leaving[0]
            segment.remove_indexes()
            self.shared.storage.rename(segment.path, f"{segment.stem}.{stamp_ms}{REMOVED}")
            self.has_removed = True
            del self._leaving[0]

    def recycle(self, before_ms: int) -> int:
        """Give files that were removed before this time to the pool; returns how many.

        Those for which the pool has no room go at once: whoever reads one of them still has it open, and nobody will
        write over it. In any thread, while others use the log: to free a large file takes milliseconds.
        """
        # Those that are removed from here on are for the next time.
        self.has_removed = False
        names = [name for name in self.shared.storage.list(self.folder) if name.endswith(REMOVED)]
        surplus = max(len(names) - self.shared.pool.room, 0)
        due = [name for name in names[surplus:] if int(name.split(".")[1]) <= before_ms]
        if surplus + len(due) < len(names):
            self.has_removed = True
        # One that is not there any more somebody else has seen to.
        for name in names[:surplus]:
            with suppress(FileNotFoundError):
                self.shared.storage.remove(f"{self.folder}/{name}")
        for name in due:
            with suppress(FileNotFoundError):
                self.shared.pool.give(f"{self.folder}/{name}")
        return surplus + len(due)

    def replace_segment(self, old: Segment, new_path: str) -> None:
        """A rewritten (compacted, repaired) file takes the place of a sealed segment's. The file is synced already."""
        storage = self.shared.storage
        if old not in self._segments:
            # Its records were deleted meanwhile.
            storage.remove(new_path)
            return
        place = self._segments.index(old)
        old.remove_indexes()
        storage.rename(new_path, old.path)
        storage.sync_dir(self.folder)
        self.shared.indexed.pop(old.stem, None)
        self._segments[place] = Segment(storage, self.folder, old.base_offset, old.end_offset)
        # Who reads from memory and who reads the file see the same.
        while self._tail and self._tail[0].next_offset <= old.end_offset:
            self._tail.popleft()


def _holds_any(hashes: Sequence[int], summary: bytes) -> bool:
    return may_hold_any(summary, hashes)


def _pass_over(
    segment: Segment,
    position: int,
    offset: int,
    end: int,
    wanted: Callable[[bytes], bool],
    count_max: int = 1 << 62,
) -> tuple[int | None, int, int]:
    """(position, offset) of the next batch below the end whose summary is wanted, and how many were looked at;
    position None: there is none, or it is not among the first so many.

    Of large batches only the header and the summary are read; small ones lie so close together that one read for
    several is cheaper than one for each.
    """
    salt = segment.salt
    stop = min(end, segment.end_offset)
    data = b""
    start = position
    window = _GLIMPSE_WINDOW
    looked = 0
    while offset < stop and looked < count_max:
        looked += 1
        glimpse = maybe_glimpse(data, position - start, salt)
        if glimpse is None:
            data, start = segment.file.read(position, window), position
            glimpse = maybe_glimpse(data, 0, salt)
            if glimpse is None:
                raise CorruptLog(segment.path, position, offset, "no batch where one must be")
        size, is_gap, next_offset, summary = glimpse
        if not is_gap and wanted(summary):
            return position, offset, looked
        position += size
        offset = next_offset
        window = _GLIMPSE_BYTES if size > _GLIMPSE_WINDOW // 8 else _GLIMPSE_WINDOW
    return None, offset, looked


def _goes_on(batch: RecordBatch, producer: Producer, number: int) -> bool:
    """This number of an outbox is the next of a batch."""
    known = batch.producer
    return known == Producer(producer.id, producer.epoch, number - batch.count, dense=True)


def _is_old(segment: Segment, before_us: int | None) -> bool:
    """Known to be older than that. Of a log that nobody has touched in this life nothing is read just to know it."""
    return before_us is not None and segment.index is not None and segment.index.max_timestamp < before_us


def _check_sizes(tags: tuple[str, ...], headers: Sequence[Headers] | None) -> None:
    if len(tags) > TAGS_PER_RECORD_MAX:
        raise Refused(f"{len(tags)} tags on one record are more than {TAGS_PER_RECORD_MAX}")
    for tag in tags:
        if len(tag.encode()) > TAG_BYTES_MAX:
            raise Refused(f"a tag of {len(tag.encode())} bytes is longer than {TAG_BYTES_MAX}")
    for one in headers or ():
        if len(one) > 0xFFFF:
            raise Refused(f"{len(one)} headers on one record are more than {0xFFFF}")
        for name, _value in one:
            if len(name) > HEADER_NAME_BYTES_MAX:
                raise Refused(f"a header name of {len(name)} bytes is longer than {HEADER_NAME_BYTES_MAX}")
