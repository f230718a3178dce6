"""A task's records as Arrow: the decoder under Spark, DuckDB, Polars and pandas. Driver: reads segments, no pyspark.

Batches are walked one behind the other: each must begin where the one before ended, with the segment's salt, and its
hash must be right, or it is corruption, for everything here lies below the watermark. What cannot hold a wanted record
(by offset, by time, by the summary of its tags) is passed over unread. What is left becomes record batches of about a
MiB by core_log/arrow.py, which joins small batches and copies no values of large ones; columns that nobody asks for are
not made, and without one of bytes the larger block of a batch is not even unpacked.

    key, value          binary
    topic               string
    partition           int32
    offset              int64
    timestamp           timestamp[us, UTC]: when the broker took it, so timestampType (int32) is 1, as Kafka has it
    headers             list<struct<key: string, value: binary>>: the publisher's, whatever the protocol
    tags                list<string>
    tag                 string: the first of them, which can be grouped by; null: none
    protocol            string: amqp, mqtt or http
    routing_key         string; null for http
    amqp, mqtt          struct: the protocol's own properties; null for records of another. mqtt has the topic
    properties          binary: those properties as they are stored
    priority, qos       int16, int8
    persistent, retain  bool
    expiry              timestamp[us, UTC]; null: never

Neighbours: plan.py makes tasks, properties.py reads the bytes of the protocols, filtering/expression.py the tags.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.core_log import arrow
from headrace.core_log.arrow import Stored
from headrace.core_log.errors import CorruptLog, StorageError
from headrace.core_log.format import (
    FLAG_COMPACTED,
    FLAG_GAP,
    HEADER_SIZE,
    SEGMENT_HEAD_SIZE,
    BatchHeader,
    Columns,
    is_whole,
    maybe_header,
    summary_of,
)
from headrace.core_log.record import Gap, Protocol
from headrace.core_log.summary import ENTRIES_MAX
from headrace.filtering.expression import Expression, parse
from headrace.spark.access import DataLoss, SegmentBytes, Slice
from headrace.spark.fields import FIELDS, KAFKA_COLUMNS, schema
from headrace.spark.plan import Task
from headrace.spark.properties import Amqp, amqp, mqtt, mqtt_topic

BATCH_BYTES = arrow.OUTPUT_BYTES
# What is read of a file at once: it should fit a processor's own cache. Downloads ask for more (read_ahead).
WINDOW = 512 * 1024
# A header and the largest summary: all that is read of a batch that may be passed over, where batches are large.
_GLIMPSE = HEADER_SIZE + ENTRIES_MAX
_LARGE = 32 * 1024

LOG_APPEND_TIME = 1


def read(
    task: Task,
    *,
    columns: Sequence[str] = KAFKA_COLUMNS,
    tags: str | None = None,
    check_contiguous: bool = True,
    batch_bytes: int = BATCH_BYTES,
    since_us: int | None = None,
    until_us: int | None = None,
) -> Iterator[pa.RecordBatch]:
    """The records of a task, in the order of their offsets, in record batches of about that size.

    `tags` is a tag expression (`eu && !test`), `since_us`..`until_us` (exclusive) bounds their timestamps.
    Raises CorruptLog for bytes below the watermark that are not what was written. With check_contiguous also DataLoss
    where records are gone: segments that retention took, offsets that a repair gave up, holes in a topic that is not
    compacted. Without it the reader goes on behind them.
    """
    wanted = schema(columns)
    needed = _needed(wanted.names)
    expression = None if tags is None else parse(tags)
    batches = _batches(task, expression, check_contiguous, since_us, until_us)
    choice = _choice(expression, since_us, until_us)
    for output in arrow.record_batches(
        batches, needed, start=task.start, end=task.end, output_bytes=batch_bytes, choice=choice
    ):
        arrays = [_MADE[name](task, output) if name in _MADE else output.column(name) for name in wanted.names]
        # A batch of no columns still has rows, which a count wants.
        yield pa.RecordBatch.from_arrays(arrays, schema=wanted) if arrays else output


# -- walking --------------------------------------------------------------------------------------------------------


def _batches(
    task: Task, expression: Expression | None, contiguous: bool, since_us: int | None, until_us: int | None
) -> Iterator[Stored]:
    at = task.start
    for one in task.slices:
        if contiguous and one.first_offset > at:
            raise _lost(task, at, one.first_offset)
        try:
            for stored in stored_batches(
                one, max(at, task.start), task.end, expression=expression, since_us=since_us, until_us=until_us
            ):
                if contiguous:
                    _check_holes(task, stored.header)
                yield stored
        except DataLoss:
            if contiguous:
                raise
        at = one.next_offset
    if contiguous and at < task.end:
        raise _lost(task, at, task.end)


def _lost(task: Task, first: int, end: int) -> DataLoss:
    return DataLoss(f"offsets {first} to {end - 1} of partition {task.partition} of '{task.topic}' are not there")


def _check_holes(task: Task, header: BatchHeader) -> None:
    """Offsets without a record that nobody ever saw are lawful; those of a record that was there are a loss."""
    if header.flags & FLAG_GAP:
        if header.gap == Gap.UNCLEAN_START or (header.gap == Gap.COMPACTED and task.is_compacted):
            return
    elif header.record_count == header.span or (header.flags & FLAG_COMPACTED and task.is_compacted):
        return
    low, high = max(header.base_offset, task.start), min(header.next_offset, task.end)
    what = f"{low} to {high - 1} of partition {task.partition} of '{task.topic}'"
    if header.flags & FLAG_GAP and header.gap == Gap.UNCLEAN_ELECTION:
        raise DataLoss(
            f"an election by force (unclean_election) in epoch {header.leader_epoch} lost whatever was confirmed among "
            f"offsets {what}"
        )
    raise DataLoss(f"records are gone among offsets {what}: {Gap(header.gap).name.lower() if header.gap else 'holes'}")


def stored_batches(
    one: Slice,
    start: int,
    end: int,
    *,
    expression: Expression | None = None,
    since_us: int | None = None,
    until_us: int | None = None,
) -> Iterator[Stored]:
    """The batches of a slice that may hold a wanted record of start..end-1, whole, each where its neighbour ends; gaps
    too. Raises CorruptLog, and DataLoss when the segment is nowhere any more."""
    offset, position = one.first_offset, one.position
    end = min(end, one.next_offset)
    lost: DataLoss | None = None
    for location in one.locations:
        try:
            with closing(location.open()) as file:
                if file.salt != one.salt:
                    # It was rewritten (compaction, repair) or is another replica's: same offsets, other places.
                    walk = _Walk(file, SEGMENT_HEAD_SIZE, None, one.base_offset)
                else:
                    walk = _Walk(file, position, one.end_position, offset)
                for stored in walk.batches(max(start, offset), end, expression, since_us, until_us):
                    yield stored
                    offset, position = walk.offset, walk.position
                return
        except DataLoss as error:
            lost = error
    raise lost or DataLoss(f"nobody knows where offsets {offset} to {end - 1} are")


class _Walk:
    """A place in a segment, and the bytes around it."""

    __slots__ = ("_data", "_file", "_start", "_stop", "offset", "position")

    def __init__(self, file: SegmentBytes, position: int, stop: int | None, offset: int) -> None:
        self._file = file
        self._stop = stop
        self.position = position
        self.offset = offset
        self._data = b""
        self._start = position

    def batches(
        self, start: int, end: int, expression: Expression | None, since_us: int | None, until_us: int | None
    ) -> Iterator[Stored]:
        sparse = expression is not None or since_us is not None or until_us is not None
        while self.offset < end:
            try:
                header = self._header(WINDOW if not sparse else _LARGE)
                skipped = header.next_offset <= start
                if not skipped and sparse and not header.flags & FLAG_GAP:
                    skipped = (
                        (since_us is not None and header.max_timestamp < since_us)
                        or (until_us is not None and header.first_timestamp >= until_us)
                        or (expression is not None and not expression.may_match(self._summary(header)))
                    )
                stored = None if skipped else self._whole(header)
            except CorruptLog:
                if not self._file.mend():
                    raise
                self._data = b""
                continue
            self.offset = header.next_offset
            self.position += header.size
            if stored is not None:
                yield stored

    def _header(self, window: int) -> BatchHeader:
        """The header of the batch that must be here."""
        salt = self._file.salt
        header = maybe_header(self._data, self.position - self._start, salt)
        if header is None:
            self._fill(window)
            header = maybe_header(self._data, 0, salt)
        if header is None or header.base_offset != self.offset or header.span == 0:
            raise self._corrupt("no batch where one must be")
        if self._stop is not None and header.size > self._stop - self.position:
            raise self._corrupt("a batch reaches beyond the watermark")
        return header

    def _summary(self, header: BatchHeader) -> bytes:
        at = self.position - self._start
        if at + HEADER_SIZE + header.summary_size > len(self._data):
            # Large batches are looked at one by one, small ones many at a time.
            self._fill(_GLIMPSE if header.size >= _LARGE else WINDOW)
            at = 0
        return summary_of(self._data, at, header)

    def _whole(self, header: BatchHeader) -> Stored:
        at = self.position - self._start
        if at + header.size > len(self._data):
            self._fill(max(header.size, WINDOW))
            at = 0
        if not is_whole(self._data, at, header):
            raise self._corrupt("a batch fails its hash")
        return Stored(self._data, at, header)

    def _fill(self, length: int) -> None:
        self._start = self.position
        length = max(length, self._file.read_ahead)
        stop = self._stop
        self._data = self._file.read(self.position, length if stop is None else min(length, stop - self.position))

    def _corrupt(self, what: str) -> StorageError:
        # Never before it is certain that these are still the bytes that were meant.
        self._file.check()
        return CorruptLog(self._file.path, self.position, self.offset, what)


# -- choosing -------------------------------------------------------------------------------------------------------


def _choice(expression: Expression | None, since_us: int | None, until_us: int | None) -> arrow.Choice | None:
    """The summary has said yes; now the hashes of the tags are asked, then the tags themselves, then the times."""
    if expression is None and since_us is None and until_us is None:
        return None

    def maybe(columns: Columns) -> bool:
        return expression is None or expression.may_hold(columns.tag_hashes, columns.tag_sets)

    def mask_of(columns: Columns) -> npt.NDArray[np.bool_] | None:
        mask: npt.NDArray[np.bool_] | None = None
        if expression is not None:
            texts = columns.tag_texts
            by_set = [expression.matches(tuple(texts[tag] for tag in one)) for one in columns.tag_sets]
            if not all(by_set):
                mask = np.asarray(by_set, dtype=np.bool_)[columns.tags.expand()]
        if since_us is not None or until_us is not None:
            header = columns.header
            low = since_us if since_us is not None and header.first_timestamp < since_us else None
            high = until_us if until_us is not None and header.max_timestamp >= until_us else None
            if low is not None or high is not None:
                times = columns.timestamps.expand()
                for within in (None if low is None else times >= low, None if high is None else times < high):
                    if within is not None:
                        mask = within if mask is None else mask & within
        return mask

    return arrow.Choice(maybe, mask_of)


# -- columns --------------------------------------------------------------------------------------------------------

Made = Callable[[Task, pa.RecordBatch], pa.Array]


def _topic(task: Task, output: pa.RecordBatch) -> pa.Array:
    count = output.num_rows
    name = task.topic.encode()
    ends = np.arange(0, len(name) * (count + 1), len(name), dtype=np.int32) if name else np.zeros(count + 1, np.int32)
    return pa.Array.from_buffers(pa.string(), count, [None, pa.py_buffer(ends), pa.py_buffer(name * count)])


def _number(count: int, value: int) -> pa.Array:
    return pa.Array.from_buffers(pa.int32(), count, [None, pa.py_buffer(np.full(count, value, dtype=np.int32))])


def _protocol(_task: Task, output: pa.RecordBatch) -> pa.Array:
    return arrow.texts(_PROTOCOLS).take(output.column("protocol"))


def _routing_key(_task: Task, output: pa.RecordBatch) -> pa.Array:
    # Loaded where it is needed: it takes longer than all else here, in each process in which Spark plans.
    import pyarrow.compute as pc

    known = pc.not_equal(output.column("protocol"), int(Protocol.NEUTRAL))
    keys = output.column("key")
    try:
        texts = keys.cast(pa.string())
    except pa.ArrowInvalid:
        texts = arrow.texts([key.decode("utf-8", "replace") for key in keys.to_pylist()])
    return pc.if_else(known, texts, pa.scalar(None, pa.string()))


def _amqp(_task: Task, output: pa.RecordBatch) -> pa.Array:
    return pa.array(
        [
            None if (found := _amqp_of(protocol, data)) is None else dict(zip(_AMQP_NAMES, found, strict=False))
            for protocol, data in _with_protocols(output)
        ],
        FIELDS["amqp"],
    )


def _mqtt(_task: Task, output: pa.RecordBatch) -> pa.Array:
    rows: list[dict[str, Any] | None] = []
    keys, kinds, retained = output.column("key"), output.column("qos").to_pylist(), output.column("retain").to_pylist()
    for (protocol, data), key, qos, retain in zip(
        _with_protocols(output), keys.to_pylist(), kinds, retained, strict=True
    ):
        found = mqtt(data) if protocol in (Protocol.MQTT_3, Protocol.MQTT_5) else None
        rows.append(
            None
            if found is None
            else {"topic": mqtt_topic(key), "qos": qos, "retain": retain, **found._asdict()}
            | {
                "user_properties": _pairs(
                    [(name, value.decode("utf-8", "replace")) for name, value in found.user_properties]
                )
            }
        )
    return pa.array(rows, FIELDS["mqtt"])


def _headers(_task: Task, output: pa.RecordBatch) -> pa.Array:
    """A publisher's headers stand where its protocol has them; beside those of AMQP and MQTT the log keeps notes of the
    broker, of which consumers are told those whose names begin with x-."""
    neutral = output.column("headers")
    protocols = output.column("protocol")
    # Where they lie: to_numpy would load pandas.
    if (np.frombuffer(protocols.buffers()[1], np.int8, len(protocols), protocols.offset) == Protocol.NEUTRAL).all():
        return neutral
    rows: list[list[dict[str, Any]]] = []
    for (protocol, data), notes in zip(_with_protocols(output), neutral.to_pylist(), strict=True):
        match protocol:
            case Protocol.AMQP:
                known = _amqp_of(protocol, data)
                sent = [] if known is None else known.headers
            case Protocol.MQTT_3 | Protocol.MQTT_5:
                read = mqtt(data)
                sent = [] if read is None else read.user_properties
            case _:
                rows.append(notes)
                continue
        rows.append([*_pairs(sent), *(note for note in notes if note["key"].startswith("x-"))])
    return pa.array(rows, FIELDS["headers"])


def _with_protocols(output: pa.RecordBatch) -> Iterator[tuple[int, bytes]]:
    return zip(output.column("protocol").to_pylist(), output.column("properties").to_pylist(), strict=True)


@lru_cache(maxsize=4096)
def _amqp_cached(data: bytes) -> Amqp | None:
    return amqp(data)


def _amqp_of(protocol: int, data: bytes) -> Amqp | None:
    # Publishers that send the same properties again and again are many; those that do not would only fill the cache.
    return None if protocol != Protocol.AMQP else _amqp_cached(data) if len(data) <= 64 else amqp(data)


def _pairs(headers: Sequence[tuple[str, Any]]) -> list[dict[str, Any]]:
    return [{"key": name, "value": value} for name, value in headers]


_PROTOCOLS = ("http", "amqp", "mqtt", "mqtt")
_AMQP_NAMES = Amqp._fields[:-1]
# Columns that the log does not have as such.
_MADE: dict[str, Made] = {
    "topic": _topic,
    "partition": lambda task, output: _number(output.num_rows, task.partition),
    "timestampType": lambda _task, output: _number(output.num_rows, LOG_APPEND_TIME),
    "protocol": _protocol,
    "routing_key": _routing_key,
    "amqp": _amqp,
    "mqtt": _mqtt,
    "headers": _headers,
}
# What of the log they are made of.
_NEEDS: dict[str, tuple[str, ...]] = {
    "protocol": ("protocol",),
    "routing_key": ("protocol", "key"),
    "amqp": ("protocol", "properties"),
    "mqtt": ("protocol", "properties", "key", "qos", "retain"),
    "headers": ("protocol", "properties", "headers"),
}


def _needed(columns: Sequence[str]) -> list[str]:
    """The columns of the log that these are made of, each once."""
    names = [part for name in columns for part in (_NEEDS.get(name, ()) if name in _MADE else (name,))]
    # Something must carry the number of rows.
    return list(dict.fromkeys(names)) or ["offset"]
