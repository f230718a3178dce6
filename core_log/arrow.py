"""Stored batches as Arrow columns, without copying what is stored as a whole. Format; the only file with pyarrow.

A batch of a quarter of the wanted size or more becomes one RecordBatch whose keys, properties and values lie in the
buffer it was read into (or unpacked into, where it is compressed): only offsets are made, 4 bytes a row. Smaller
ones are joined up to about the wanted size, blob by blob, because a RecordBatch of a few rows costs more than its
rows. Gaps hold no records and give none. Neighbours: format.py cuts the columns, inspection.py reads the batches.

    key, value, properties      binary (32-bit offsets)
    offset                      int64
    timestamp, expiry           timestamp[us, UTC]; no expiry is null
    tags                        list<string>
    headers                     list<struct<key: string, value: binary>>; what is no UTF-8 in a name is replaced
    protocol, qos               int8 (record.Protocol; 0 to 2)
    priority                    int16
    persistent, retain          bool
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.core_log.errors import Refused
from headrace.core_log.format import FLAG_GAP, BatchHeader, Columns, decode_columns
from headrace.core_log.record import (
    PERSISTENT,
    PRIORITY_MASK,
    PRIORITY_SHIFT,
    PROTOCOL_MASK,
    QOS_MASK,
    QOS_SHIFT,
    RETAIN,
    Runs,
)

OUTPUT_BYTES = 1024 * 1024
_OFFSETS_MAX = 2**31 - 1
_TIME = pa.timestamp("us", tz="UTC")
_HEADER = pa.struct([("key", pa.string()), ("value", pa.binary())])
SCHEMA = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("offset", pa.int64()),
        ("timestamp", _TIME),
        ("properties", pa.binary()),
        ("tags", pa.list_(pa.string())),
        ("headers", pa.list_(_HEADER)),
        ("protocol", pa.int8()),
        ("persistent", pa.bool_()),
        ("priority", pa.int16()),
        ("qos", pa.int8()),
        ("retain", pa.bool_()),
        ("expiry", _TIME),
    ]
)
# Columns that need the blob block; a read of others leaves it packed.
_IN_BLOBS = frozenset({"key", "value", "properties", "tags", "headers"})

Ints = npt.NDArray[np.int64]


class Stored(NamedTuple):
    """A batch that is whole (format.is_whole): where its bytes begin in a buffer, and its header."""

    data: bytes | memoryview
    position: int
    header: BatchHeader


class _Part(NamedTuple):
    """One blob column of one batch."""

    blob: memoryview
    sizes: "npt.NDArray[np.unsignedinteger[Any]]"


def schema(columns: Sequence[str] | None = None) -> pa.Schema:
    """All columns, or those asked for in that order. Raises ValueError for a name that there is not."""
    if columns is None:
        return SCHEMA
    unknown = [name for name in columns if name not in SCHEMA.names]
    if unknown:
        raise ValueError(f"no column {', '.join(unknown)}; there are {', '.join(SCHEMA.names)}")
    return pa.schema([SCHEMA.field(name) for name in columns])


def record_batches(
    batches: Iterable[Stored],
    columns: Sequence[str] | None = None,
    *,
    start: int = 0,
    end: int | None = None,
    output_bytes: int = OUTPUT_BYTES,
) -> Iterator[pa.RecordBatch]:
    """The records of batches in the order of their offsets, those in start..end-1, in outputs of about that size.

    Raises CorruptLog or UnknownFormat for a batch whose columns do not add up, when it is reached; Refused when one
    column of one batch is larger than Arrow's 32-bit offsets can say.
    """
    wanted = schema(columns)
    blobs = not _IN_BLOBS.isdisjoint(wanted.names)
    pending: list[Columns] = []
    size = 0
    for data, position, header in batches:
        if header.flags & FLAG_GAP or header.next_offset <= start or (end is not None and header.base_offset >= end):
            continue
        # Without blobs a row is a few numbers, and all the more of them fit.
        weight = header.blob_size if blobs else header.fixed_size
        alone = weight >= output_bytes // 4
        if pending and (alone or size + weight > output_bytes):
            yield from _output(pending, wanted, start, end)
            pending, size = [], 0
        pending.append(decode_columns(data, position, header, blobs=blobs))
        size += weight
        if alone:
            yield from _output(pending, wanted, start, end)
            pending, size = [], 0
    if pending:
        yield from _output(pending, wanted, start, end)


def table(
    batches: Iterable[Stored], columns: Sequence[str] | None = None, *, start: int = 0, end: int | None = None
) -> pa.Table:
    return pa.Table.from_batches(record_batches(batches, columns, start=start, end=end), schema(columns))


def _output(group: Sequence[Columns], wanted: pa.Schema, start: int, end: int | None) -> Iterator[pa.RecordBatch]:
    offsets = _offsets(group)
    first = int(np.searchsorted(offsets, start))
    last = len(offsets) if end is None else int(np.searchsorted(offsets, end))
    if first < last:
        arrays = [_COLUMNS[name](group) for name in wanted.names]
        yield pa.RecordBatch.from_arrays(arrays, schema=wanted).slice(first, last - first)


# -- columns ----------------------------------------------------------------------------------------------------


def _offsets(group: Sequence[Columns]) -> Ints:
    return np.concatenate(
        [
            np.arange(one.header.base_offset, one.header.base_offset + one.header.record_count, dtype=np.int64)
            if one.offsets is None
            else np.asarray(one.offsets, dtype=np.int64)
            for one in group
        ]
    )


def _expanded(group: Sequence[Columns], runs: Callable[[Columns], Runs]) -> Ints:
    return np.concatenate([runs(one).expand() for one in group])


def _fixed(values: "npt.NDArray[Any]", kind: Any) -> pa.Array:
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(np.ascontiguousarray(values))])


def _times(group: Sequence[Columns]) -> pa.Array:
    return _fixed(_expanded(group, lambda one: one.timestamps), _TIME)


def _expiries(group: Sequence[Columns]) -> pa.Array:
    values = _expanded(group, lambda one: one.expiries)
    return pa.array(values, type=_TIME, mask=values == 0)


def _bits(mask: int, shift: int, kind: Any, dtype: type) -> Callable[[Sequence[Columns]], pa.Array]:
    def column(group: Sequence[Columns]) -> pa.Array:
        values = (_expanded(group, lambda one: one.attributes) & mask) >> shift
        return pa.array(values.astype(dtype), type=kind)

    return column


def _sizes(stored: bytes, count: int) -> "npt.NDArray[np.unsignedinteger[Any]]":
    sizes = np.frombuffer(stored, dtype="<u4")
    return np.repeat(sizes, count) if len(sizes) == 1 and count > 1 else sizes


def _blob(blob: memoryview, sizes: bytes, shared: bool, count: int) -> _Part:
    # What all records share is stored once, and Arrow wants it once for each.
    return _Part(memoryview(bytes(blob) * count) if shared else blob, _sizes(sizes, count))


def _binary(parts: Sequence[_Part], kind: Any) -> pa.Array:
    """A column of bytes; of one part it lies where the part lies."""
    sizes = parts[0].sizes if len(parts) == 1 else np.concatenate([part.sizes for part in parts])
    blob = parts[0].blob if len(parts) == 1 else b"".join(part.blob for part in parts)
    if len(blob) > _OFFSETS_MAX:
        raise Refused(f"a column of {len(blob)} bytes in one batch is more than Arrow's binary can hold: leave it out")
    count = len(sizes)
    ends = np.zeros(count + 1, dtype=np.int32)
    np.cumsum(sizes, out=ends[1:])
    return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(ends), pa.py_buffer(blob)])


def _keys(group: Sequence[Columns]) -> pa.Array:
    parts = [_blob(one.keys, one.key_sizes, one.key_shared, one.header.record_count) for one in group]
    return _binary(parts, pa.binary())


def _properties(group: Sequence[Columns]) -> pa.Array:
    parts = [
        _blob(one.properties, one.properties_sizes, one.properties_shared, one.header.record_count) for one in group
    ]
    return _binary(parts, pa.binary())


def _values(group: Sequence[Columns]) -> pa.Array:
    return _binary([_blob(one.values, one.value_sizes, False, one.header.record_count) for one in group], pa.binary())


def _tags(group: Sequence[Columns]) -> pa.Array:
    """The sets of all batches behind each other, then for each record the set it has."""
    texts: list[str] = []
    ends = [0]
    places = []
    for one in group:
        first = len(ends) - 1
        for tag_set in one.tag_sets:
            texts += (one.tag_texts[tag] for tag in tag_set)
            ends.append(len(texts))
        places.append(one.tags.expand() + first)
    sets = pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(texts, pa.string()))
    return sets.take(pa.array(np.concatenate(places)))


def _headers(group: Sequence[Columns]) -> pa.Array:
    counts = np.concatenate(
        [
            np.frombuffer(one.header_counts, dtype="<u2")
            if one.header_counts
            else np.zeros(one.header.record_count, dtype="<u2")
            for one in group
        ]
    )
    ends = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=ends[1:])
    names = _names([_Part(one.header_keys, np.frombuffer(one.header_key_sizes, dtype="<u2")) for one in group])
    values = _binary(
        [_Part(one.header_values, np.frombuffer(one.header_value_sizes, dtype="<u4")) for one in group], pa.binary()
    )
    pairs = pa.StructArray.from_arrays([names, values], fields=list(_HEADER))
    return pa.ListArray.from_arrays(pa.array(ends), pairs, type=pa.list_(_HEADER))


def _names(parts: Sequence[_Part]) -> pa.Array:
    raw = _binary(parts, pa.binary())
    try:
        return raw.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([name.decode(errors="replace") for name in raw.to_pylist()], pa.string())


_COLUMNS: dict[str, Callable[[Sequence[Columns]], pa.Array]] = {
    "key": _keys,
    "value": _values,
    "offset": lambda group: _fixed(_offsets(group), pa.int64()),
    "timestamp": _times,
    "properties": _properties,
    "tags": _tags,
    "headers": _headers,
    "protocol": _bits(PROTOCOL_MASK, 0, pa.int8(), np.int8),
    "persistent": _bits(PERSISTENT, PERSISTENT.bit_length() - 1, pa.bool_(), np.bool_),
    "priority": _bits(PRIORITY_MASK, PRIORITY_SHIFT, pa.int16(), np.int16),
    "qos": _bits(QOS_MASK, QOS_SHIFT, pa.int8(), np.int8),
    "retain": _bits(RETAIN, RETAIN.bit_length() - 1, pa.bool_(), np.bool_),
    "expiry": _expiries,
}
