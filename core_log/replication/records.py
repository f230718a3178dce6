"""Stored batches on their way from a leader's log into a follower's. Machine over logs.

Batches go as they are stored, so that all replicas hold the same bytes (but for each segment's salt and what each disk
knew to be durable). Compacted logs are the exception: each replica compacts on its own, so a follower may ask for what
lies in the middle of a batch, and batches refer to others that it holds in another shape: sealed segments of these are
encoded anew.
"""

from collections.abc import Iterator

from headrace.core_log.compaction import copy_record
from headrace.core_log.format import FLAG_FIRST_OF_SEGMENT, BatchHeader, Blob, decode, encode, stamp
from headrace.core_log.log import PartitionLog, RawSlice
from headrace.core_log.record import Gap, RecordBatch, gap_batch


def next_records(
    log: PartitionLog, offset: int, bytes_max: int, behind: RawSlice | None = None
) -> tuple[RawSlice | bytes, int] | None:
    """What a follower that ends at this offset appends next, and the offset behind it; None: it has all of it.

    At least one batch, however large. `behind`: what it was sent last, as a hint where to look."""
    if offset >= log.written_end:
        return None
    if log.config.cleanup == "compact" and offset < log.segments[-1].base_offset:
        return _encoded_anew(log, offset, bytes_max)
    piece = _rest(log, offset, bytes_max, behind)
    if piece is not None:
        return piece, piece.next_offset
    piece = log.read_raw(offset, bytes_max=bytes_max, end=int(log.written_end), behind=behind)
    assert piece is not None, "the follower is behind"
    if piece.first_offset != offset:
        # It was compacted once.
        return _encoded_anew(log, offset, bytes_max)
    return piece, piece.next_offset


def _rest(log: PartitionLog, offset: int, bytes_max: int, behind: RawSlice | None) -> RawSlice | None:
    """All that was written behind a slice of the segment that is written to, so that no header has to be read."""
    if behind is None or behind.next_offset != offset or behind.segment is not log.active_segment:
        return None
    position = behind.position + behind.length
    length = behind.segment.end_position - position
    return RawSlice(behind.segment, position, length, offset, int(log.written_end)) if length <= bytes_max else None


def _encoded_anew(log: PartitionLog, offset: int, bytes_max: int) -> tuple[bytes, int]:
    segment = next(one for one in reversed(log.segments) if one.base_offset <= offset)
    found: list[Blob] = []
    size = 0
    following = offset
    for position, header in segment.headers(segment.locate(offset, log.config.index_interval_bytes)):
        if found and size >= bytes_max:
            break
        _header, data = segment.read_whole(position, header)
        batch = decode(data, 0, header)
        log.resolve_routes(segment, batch)
        if header.base_offset < offset:
            batch = _from(batch, header, offset)
        buffers = stamp(
            encode(batch, compress=log.config.compression),
            salt=segment.salt,
            base_offset=batch.base_offset,
            leader_epoch=header.leader_epoch,
            leader_id=header.leader_id,
            durable_offset=0,
            first_of_segment=bool(header.flags & FLAG_FIRST_OF_SEGMENT) and batch.base_offset == header.base_offset,
        )
        found += buffers
        size += sum(map(len, buffers))
        following = header.next_offset
    return b"".join(found), following


def _from(batch: RecordBatch, header: BatchHeader, offset: int) -> RecordBatch:
    """What of a compacted batch lies at this offset or behind it."""
    left = [index for index in range(batch.count) if batch.offset_at(index) >= offset]
    if not left:
        return gap_batch(offset, header.next_offset, header.leader_epoch, batch.gap or Gap.COMPACTED)
    found = RecordBatch(offset, header.leader_epoch)
    found.offsets = []
    for index in left:
        copy_record(batch, index, found)
    found.span = header.next_offset - offset
    return found


def in_portions(data: bytes, size: int) -> Iterator[memoryview]:
    """Whole batches again, about so many bytes at a time: the loop has others to serve."""
    view = memoryview(data)
    start = at = 0
    while at < len(data):
        at += max(int.from_bytes(data[at + 4 : at + 8], "little"), 1)
        if at - start >= size:
            yield view[start:at]
            start = at
    if start < len(data):
        yield view[start:]
