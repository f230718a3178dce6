"""Copies of records in a queue's own log: of the past that it was bound to, and of what it was released from. Driver.

A copy keeps key, properties, value, time, expiry and tags, is flagged relocated, and says where it came from in headers
of its own. It is routed to nobody: only the view that it was made for knows of it, by an exact extent; a crash
before that is journalled leaves records that nobody sees. Neighbours: past.py and release.py make them, lane.py reads
them.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from headrace.core_log.log import PartitionLog
from headrace.core_log.record import PERSISTENT, RELOCATED, Headers, RecordBatch, Runs
from headrace.gateways.delivery.ports import Source

ORIGIN_STREAM = b"x-origin-stream"
ORIGIN_PARTITION = b"x-origin-partition"
ORIGIN_OFFSET = b"x-origin-offset"
ORIGIN_EXCHANGE = b"x-origin-exchange"


def copy_records(
    target: PartitionLog, source: Source, batch: RecordBatch, first: int, last: int, exchange: bytes
) -> tuple[int, int]:
    """Append records first..last-1 of a batch of `source` to the target; returns the range of offsets they got.

    Raises DiskFull: then some may have been copied, which nobody knows of.
    """
    start = end = int(target.end)
    for low, high in _alike(batch, first, last):
        appended = target.append(
            batch.keys[low:high],
            batch.properties[low:high],
            batch.values[low:high],
            timestamp_us=batch.timestamps.at(low),
            attributes=batch.attributes.at(low) | RELOCATED | PERSISTENT,
            expiry_us=batch.expiries.at(low),
            tags=batch.tags_at(low),
            headers=[with_origin(source, batch, index, exchange) for index in range(low, high)],
        )
        end = int(appended.next_offset)
    assert end - start == last - first, "nobody else appends meanwhile"
    return start, end


def exchanges_of(batch: RecordBatch, first: int, last: int, otherwise: bytes) -> Sequence[bytes]:
    """The exchange that each record was published to; `otherwise` for those that are no copies."""
    if batch.headers is None:
        return [otherwise] * (last - first)
    return [dict(headers).get(ORIGIN_EXCHANGE, otherwise) for headers in batch.headers[first:last]]


def with_origin(source: Source, batch: RecordBatch, index: int, exchange: bytes) -> Headers:
    """The headers of a record, with where it was first."""
    kept = batch.headers[index] if batch.headers is not None else ()
    if any(name == ORIGIN_STREAM for name, _value in kept):
        # A copy of a copy has the origin of the first.
        return kept
    return (*kept, *origin_headers(source, int(batch.offset_at(index)), exchange))


def origin_headers(source: Source, offset: int, exchange: bytes) -> Headers:
    """What tells where a record was first."""
    return (
        (ORIGIN_STREAM, str(source.stream_id).encode()),
        (ORIGIN_PARTITION, b"%d" % source.partition),
        (ORIGIN_OFFSET, b"%d" % offset),
        (ORIGIN_EXCHANGE, exchange),
    )


def _alike(batch: RecordBatch, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Ranges of records with the same time, expiry, attributes and tags."""
    columns = (batch.timestamps, batch.expiries, batch.attributes, batch.tags)
    while first < last:
        end = min(last, *(_run_end(column, first) for column in columns))
        yield first, end
        first = end


def _run_end(column: Runs, index: int) -> int:
    return column.ends[bisect_right(column.ends, index)]
