"""Keeps the last record of each key in the sealed segments of a log, and drops what it replaced. Driver.

Offsets stay: a rewritten batch covers the same range and says which of its offsets still hold a record. A
tombstone (attribute bit) is kept for a while so that readers hear of the deletion, then dropped too. Segments
are rewritten oldest first, each into a new file that is synced before it takes the old one's name.
"""

from collections.abc import Iterator

from headrace.core_log.env import Env
from headrace.core_log.errors import DiskFull
from headrace.core_log.format import SEGMENT_HEAD_SIZE, SegmentHead, encode, encode_segment_head, stamp
from headrace.core_log.log import PartitionLog
from headrace.core_log.record import TOMBSTONE, Gap, RecordBatch, RouteReference, RouteSet, gap_batch
from headrace.core_log.segment import Segment
from headrace.core_log.storage.contract import File

COMPACTING = ".compacting"


async def compact(env: Env, log: PartitionLog) -> bool:
    """One pass over the sealed segments, if enough of them is new since the last one; True if it ran."""
    sealed = log.sealed_segments
    fresh = [one for one in sealed if one.base_offset >= log.compacted_to]
    if not fresh or 2 * len(fresh) < len(sealed):
        return False
    latest = await env.worker.run(lambda: latest_offsets(log, sealed))
    now_us = env.clock.wall_us()
    for segment in sealed:
        if segment not in log.segments:
            # Its records were deleted meanwhile.
            continue
        path = await env.worker.run(lambda one=segment: rewrite(env, log, one, latest, now_us))  # type: ignore[misc]
        log.replace_segment(segment, path)
    log.compacted_to = sealed[-1].end_offset
    return True


def latest_offsets(log: PartitionLog, segments: list[Segment]) -> dict[bytes, int]:
    latest: dict[bytes, int] = {}
    for segment in segments:
        for _header, batch in log.batches_in(segment):
            for index, key in enumerate(batch.keys):
                latest[key] = batch.offset_at(index)
    return latest


def rewrite(env: Env, log: PartitionLog, segment: Segment, latest: dict[bytes, int], now_us: int) -> str:
    """Write what is left of a segment to a new file, synced; returns its path."""
    path = segment.stem + COMPACTING
    if env.storage.exists(path):
        env.storage.remove(path)
    file = env.storage.open(path, create=True)
    writer = SegmentWriter(
        file, log, SegmentHead(env.ids.salt(), segment.base_offset, log.stream_id.bytes, log.partition)
    )
    before_us = now_us - log.config.tombstone_ms * 1000
    try:
        for batch, leader_id in kept_batches(log, segment, latest, before_us):
            writer.write(batch, leader_id)
    except DiskFull:
        env.storage.remove(path)
        raise
    file.sync()
    return path


def kept_batches(
    log: PartitionLog, segment: Segment, latest: dict[bytes, int], tombstones_before_us: int
) -> Iterator[tuple[RecordBatch, int]]:
    """The segment's range again, in batches that hold only what is kept; together they cover every offset.

    Each comes with the id of the leader that wrote it, and holds records of one stint only (C7).
    """
    start = segment.base_offset
    pending: RecordBatch | None = None
    stint = (1, 0)
    for header, batch in log.batches_in(segment):
        before, stint = stint, (header.leader_epoch, header.leader_id)
        if pending is not None and (before != stint or pending.byte_count >= log.config.batch_bytes_max):
            yield pending, before[1]
            start = pending.next_offset
            pending = None
        for index in range(batch.count):
            if latest[batch.keys[index]] != batch.offset_at(index):
                continue
            if batch.attributes.at(index) & TOMBSTONE and batch.timestamps.at(index) < tombstones_before_us:
                continue
            if pending is None:
                pending = RecordBatch(start, batch.epoch)
                pending.offsets = []
            copy_record(batch, index, pending)
        if pending is not None:
            pending.span = batch.next_offset - pending.base_offset
    if pending is not None:
        yield pending, stint[1]
        start = pending.next_offset
    if start < segment.end_offset:
        yield gap_batch(start, segment.end_offset, stint[0], Gap.COMPACTED), stint[1]


def copy_record(batch: RecordBatch, index: int, into: RecordBatch) -> None:
    """Add one record to another batch, its offset kept."""
    assert into.offsets is not None
    into.offsets.append(batch.offset_at(index))
    into.add(
        [batch.keys[index]],
        [batch.properties[index]],
        [batch.values[index]],
        timestamp_us=batch.timestamps.at(index),
        attributes=batch.attributes.at(index),
        expiry_us=batch.expiries.at(index),
        route_set=batch.route_set_at(index),
        origin=batch.origins.at(index),
        tags=batch.tags_at(index),
        headers=None if batch.headers is None else [batch.headers[index]],
    )


class SegmentWriter:
    """Writes batches one behind the other into a new segment file."""

    def __init__(self, file: File, log: PartitionLog, head: SegmentHead) -> None:
        self._file = file
        self._log = log
        self._salt = head.salt
        self._position = SEGMENT_HEAD_SIZE
        self._known: dict[RouteSet, RouteReference] = {}
        file.write(0, [encode_segment_head(head)])

    def write(self, batch: RecordBatch, leader_id: int) -> None:
        body = encode(batch, compress=self._log.config.compression, known_sets=self._known)
        buffers = stamp(
            body,
            salt=self._salt,
            base_offset=batch.base_offset,
            leader_epoch=batch.epoch,
            leader_id=leader_id,
            durable_offset=batch.base_offset,
            first_of_segment=self._position == SEGMENT_HEAD_SIZE,
        )
        self._position += self._file.write(self._position, buffers)
        for route_set, place in body.defined.items():
            self._known[route_set] = RouteReference(batch.base_offset, place)
