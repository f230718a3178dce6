"""Stored batches as Arrow columns, without copying what is stored as a whole. Format; the only file with pyarrow.

A batch of a quarter of the wanted size or more becomes one RecordBatch whose keys, properties and values lie in the
buffer it was read into (or unpacked into, where it is compressed): only offsets are made, 4 bytes a row. Smaller
ones are joined up to about the wanted size, blob by blob, because a RecordBatch of a few rows costs more than its
rows. Gaps hold no records and give none. Neighbours: format.py cuts the columns, inspection.py reads the batches.

    key, value, properties      binary (32-bit offsets)
    offset                      int64
    timestamp, expiry           timestamp[us, UTC]; no expiry is null
    tags                        list<string>
    tag                         string: the first of them; none is null
    headers                     list<struct<key: string, value: binary>>; what is no UTF-8 in a name is replaced
    protocol, qos               int8 (record.Protocol; 0 to 2)
    priority                    int16
    persistent, retain          bool
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.core_log.errors import Refused
from headrace.core_log.format import FLAG_GAP, BatchHeader, Columns, decode_columns, with_blobs
from headrace.core_log.record import (
    PERSISTENT,
    PRIORITY_MASK,
    PRIORITY_SHIFT,
    PROTOCOL_MASK,
    QOS_MASK,
    QOS_SHIFT,
    RETAIN,
)

OUTPUT_BYTES = 1024 * 1024
_OFFSETS_MAX = 2**31 - 1
_TIME = pa.timestamp("us", tz="UTC")
_HEADER = pa.struct([("key", pa.string()), ("value", pa.binary())])
_HEADERS = pa.list_(_HEADER)
_TAGS = pa.list_(pa.string())
_ZERO = np.zeros(1, dtype=np.int32)
SCHEMA = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("offset", pa.int64()),
        ("timestamp", _TIME),
        ("properties", pa.binary()),
        ("tags", _TAGS),
        ("tag", pa.string()),
        ("headers", _HEADERS),
        ("protocol", pa.int8()),
        ("persistent", pa.bool_()),
        ("priority", pa.int16()),
        ("qos", pa.int8()),
        ("retain", pa.bool_()),
        ("expiry", _TIME),
    ]
)
# Columns that need the blob block; a read of others leaves it packed.
_IN_BLOBS = frozenset({"key", "value", "properties", "headers"})
_OF_TAGS = frozenset({"tag", "tags"})

Ints = npt.NDArray[np.int64]
# Which records of a batch are wanted; None: all of them.
Mask = npt.NDArray[np.bool_] | None


class Stored(NamedTuple):
    """A batch that is whole (format.is_whole): where its bytes begin in a buffer, and its header."""

    data: bytes | memoryview
    position: int
    header: BatchHeader


class Choice(NamedTuple):
    """Which records are wanted; asked of columns without blobs."""

    # False: none of this batch is, for certain.
    maybe: Callable[[Columns], bool]
    mask: Callable[[Columns], Mask]


class _Chosen(NamedTuple):
    columns: Columns
    mask: Mask


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
    choice: Choice | None = None,
) -> Iterator[pa.RecordBatch]:
    """The records of batches in the order of their offsets, those in start..end-1, in outputs of about that size.

    Raises CorruptLog or UnknownFormat for a batch whose columns do not add up, when it is reached; Refused when one
    column of one batch is larger than Arrow's 32-bit offsets can say.
    """
    wanted = schema(columns)
    blobs = not _IN_BLOBS.isdisjoint(wanted.names)
    outputs = _outputs(_within(batches, start, end), wanted, blobs, start, end, output_bytes, choice)
    return outputs if choice is None else _gathered(outputs, output_bytes)


def _within(batches: Iterable[Stored], start: int, end: int | None) -> Iterator[Stored]:
    for stored in batches:
        header = stored.header
        if header.flags & FLAG_GAP or header.next_offset <= start or (end is not None and header.base_offset >= end):
            continue
        yield stored


def _outputs(
    batches: Iterable[Stored],
    wanted: pa.Schema,
    blobs: bool,
    start: int,
    end: int | None,
    output_bytes: int,
    choice: Choice | None,
) -> Iterator[pa.RecordBatch]:
    pending: list[_Chosen] = []
    size = 0
    tags = choice is not None or not _OF_TAGS.isdisjoint(wanted.names)
    for stored in batches:
        data, position, header = stored
        if choice is None:
            chosen: _Chosen | None = _Chosen(decode_columns(data, position, header, blobs=blobs, tags=tags), None)
        else:
            chosen = _chosen(stored, blobs, choice)
        if chosen is None:
            continue
        # Without blobs a row is a few numbers, and all the more of them fit.
        weight = header.blob_size if blobs else header.fixed_size
        alone = weight >= output_bytes // 4
        if pending and (alone or size + weight > output_bytes):
            yield from _output(pending, wanted, start, end)
            pending, size = [], 0
        pending.append(chosen)
        size += weight
        if alone:
            yield from _output(pending, wanted, start, end)
            pending, size = [], 0
    if pending:
        yield from _output(pending, wanted, start, end)


def _chosen(stored: Stored, blobs: bool, choice: Choice) -> _Chosen | None:
    """None: nothing of this batch is wanted, and then its blobs stay packed."""
    data, position, header = stored
    columns = decode_columns(data, position, header, blobs=False)
    if not choice.maybe(columns):
        return None
    mask = choice.mask(columns)
    if mask is not None and not mask.any():
        return None
    return _Chosen(with_blobs(columns, data, position) if blobs else columns, mask)


def _gathered(outputs: Iterator[pa.RecordBatch], output_bytes: int) -> Iterator[pa.RecordBatch]:
    """What is left of many batches, put together."""
    pending: list[pa.RecordBatch] = []
    size = 0
    for output in outputs:
        weight = output.nbytes
        if pending and size + weight > output_bytes:
            yield pa.concat_batches(pending)
            pending, size = [], 0
        pending.append(output)
        size += weight
    if pending:
        yield pa.concat_batches(pending)


def table(
    batches: Iterable[Stored], columns: Sequence[str] | None = None, *, start: int = 0, end: int | None = None
) -> pa.Table:
    return pa.Table.from_batches(record_batches(batches, columns, start=start, end=end), schema(columns))


def _output(pending: Sequence[_Chosen], wanted: pa.Schema, start: int, end: int | None) -> Iterator[pa.RecordBatch]:
    group = [one.columns for one in pending]
    mask = _mask(pending)
    arrays = [_COLUMNS[name](group) for name in wanted.names]
    output = pa.RecordBatch.from_arrays(arrays, schema=wanted)
    low, high = group[0].header.base_offset, group[-1].header.next_offset
    if low < start or (end is not None and high > end):
        offsets = _offsets(group)
        first = int(np.searchsorted(offsets, start))
        last = len(offsets) if end is None else int(np.searchsorted(offsets, end))
        output = output.slice(first, max(last - first, 0))
        mask = None if mask is None else mask[first:last]
    if mask is not None:
        output = output.filter(_bools(mask))
    if output.num_rows:
        yield output


def _mask(pending: Sequence[_Chosen]) -> Mask:
    if all(one.mask is None for one in pending):
        return None
    return _joined(
        [np.ones(one.columns.header.record_count, np.bool_) if one.mask is None else one.mask for one in pending]
    )


# -- columns ----------------------------------------------------------------------------------------------------


def _joined(pieces: "list[npt.NDArray[Any]]") -> "npt.NDArray[Any]":
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _fixed(values: "npt.NDArray[Any]", kind: Any) -> pa.Array:
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def _bools(values: "npt.NDArray[np.bool_]") -> pa.Array:
    packed = np.packbits(values, bitorder="little")
    return pa.Array.from_buffers(pa.bool_(), len(values), [None, pa.py_buffer(packed)])


def texts(values: Collection[str | None]) -> pa.Array:
    """As pa.array does it, which loads pandas where there is one, to see whether it was given some. That takes longer
    than to read 64 MiB, and a worker of Spark's has 30,000 objects more for its collector to look at after each task.
    """
    stored = [b"" if value is None else value.encode() for value in values]
    ends = pa.py_buffer(np.cumsum([0, *map(len, stored)], dtype=np.int32))
    known = pa.py_buffer(np.packbits([value is not None for value in values], bitorder="little"))
    return pa.Array.from_buffers(pa.string(), len(stored), [known, ends, pa.py_buffer(b"".join(stored))])


def _offsets(group: Sequence[Columns]) -> Ints:
    first, end = group[0].header.base_offset, group[-1].header.next_offset
    # Small batches are many, and numpy's calls are what they cost: one for all where that is possible.
    if sum(_counts(group)) == end - first:
        return np.arange(first, end, dtype=np.int64)
    return _joined(
        [
            np.arange(one.header.base_offset, one.header.base_offset + one.header.record_count, dtype=np.int64)
            if one.offsets is None
            else np.asarray(one.offsets, dtype=np.int64)
            for one in group
        ]
    )


def _times(group: Sequence[Columns]) -> pa.Array:
    if all(one.timestamps.many <= 1 for one in group):
        values = np.array([one.timestamps.single for one in group], dtype=np.int64)
        return _fixed(np.repeat(values, _counts(group)), _TIME)
    return _fixed(_joined([one.timestamps.expand() for one in group]), _TIME)


def _expiries(group: Sequence[Columns]) -> pa.Array:
    if all(one.expiries.many == 0 for one in group):
        return pa.nulls(sum(_counts(group)), _TIME)
    values = _joined([one.expiries.expand() for one in group])
    known = pa.py_buffer(np.packbits(values != 0, bitorder="little"))
    return pa.Array.from_buffers(_TIME, len(values), [known, pa.py_buffer(values)])


def _bits(mask: int, shift: int, kind: Any, dtype: type) -> Callable[[Sequence[Columns]], pa.Array]:
    """A part of the attributes: cut out for each run, then spread over its records."""

    def column(group: Sequence[Columns]) -> pa.Array:
        parts = [one.attributes.spread(((one.attributes.values & mask) >> shift).astype(dtype)) for one in group]
        values = _joined(parts)
        return _bools(values) if dtype is np.bool_ else _fixed(values, kind)

    return column


def _sizes(sizes: Sequence[bytes], counts: Sequence[int]) -> "npt.NDArray[Any]":
    """The sizes of all entries, one behind the other; of each batch they are u32, one for all or one for each."""
    if all(len(one) == 4 for one in sizes):
        return np.repeat(np.frombuffer(b"".join(sizes), dtype="<u4"), counts)
    spread = [one * count if len(one) == 4 else one for one, count in zip(sizes, counts, strict=True)]
    return np.frombuffer(b"".join(spread), dtype="<u4")


def _ends(sizes: bytes, count: int) -> "npt.NDArray[np.int32]":
    """Where each entry of a column ends."""
    if len(sizes) == 4:
        size = int.from_bytes(sizes, "little")
        return np.arange(size, size * count + 1, size, dtype=np.int32) if size else np.zeros(count, dtype=np.int32)
    return np.cumsum(np.frombuffer(sizes, dtype="<u4"), dtype=np.int32)


def _binary(blobs: Sequence[memoryview | bytes], sizes: Sequence[bytes], counts: Sequence[int]) -> pa.Array:
    """A column of bytes; that of one batch lies where its blob lies."""
    blob = blobs[0] if len(blobs) == 1 else b"".join(blobs)
    if len(blob) > _OFFSETS_MAX:
        raise Refused(f"a column of {len(blob)} bytes in one batch is more than Arrow's binary can hold: leave it out")
    if len(blobs) > 1:
        ends = np.concatenate([_ZERO, np.cumsum(_sizes(sizes, counts), dtype=np.int32)])
    else:
        ends = np.concatenate([_ZERO, _ends(sizes[0], counts[0])])
    return pa.Array.from_buffers(pa.binary(), len(ends) - 1, [None, pa.py_buffer(ends), pa.py_buffer(blob)])


def _counts(group: Sequence[Columns]) -> list[int]:
    return [one.header.record_count for one in group]


def _keys(group: Sequence[Columns]) -> pa.Array:
    counts = _counts(group)
    # What all records share is stored once, and Arrow wants it once for each.
    blobs = [bytes(one.keys) * count if one.key_shared else one.keys for one, count in zip(group, counts, strict=True)]
    return _binary(blobs, [one.key_sizes for one in group], counts)


def _properties(group: Sequence[Columns]) -> pa.Array:
    counts = _counts(group)
    blobs = [
        bytes(one.properties) * count if one.properties_shared else one.properties
        for one, count in zip(group, counts, strict=True)
    ]
    return _binary(blobs, [one.properties_sizes for one in group], counts)


def _values(group: Sequence[Columns]) -> pa.Array:
    return _binary([one.values for one in group], [one.value_sizes for one in group], _counts(group))


def _empty_lists(group: Sequence[Columns], kind: Any) -> pa.Array:
    count = sum(_counts(group))
    ends = pa.py_buffer(np.zeros(count + 1, dtype=np.int32))
    return pa.Array.from_buffers(kind, count, [None, ends], children=[pa.nulls(0, kind.value_type)])


def _tags(group: Sequence[Columns]) -> pa.Array:
    """The sets of all batches behind each other, then for each record the set it has."""
    if all(len(one.tag_sets) == 1 for one in group):
        return _empty_lists(group, _TAGS)
    found: list[str] = []
    ends = [0]
    places = []
    for one in group:
        first = len(ends) - 1
        for tag_set in one.tag_sets:
            found += (one.tag_texts[tag] for tag in tag_set)
            ends.append(len(found))
        places.append(one.tags.expand() + first)
    sets = pa.ListArray.from_arrays(_fixed(np.array(ends, dtype=np.int32), pa.int32()), texts(found))
    return sets.take(_fixed(_joined(places), pa.int64()))


def _tag(group: Sequence[Columns]) -> pa.Array:
    """The first tags of all sets once, then for each record where its own is."""
    known: dict[str | None, int] = {None: 0}
    by_set = []
    for one in group:
        by_set.append([known.setdefault(one.tag_texts[tags[0]] if tags else None, len(known)) for tags in one.tag_sets])
    if all(one.tags.many <= 1 for one in group):
        firsts = np.array([places[one.tags.single or 0] for one, places in zip(group, by_set, strict=True)], np.int32)
        found = np.repeat(firsts, _counts(group))
    else:
        found = _joined(
            [
                one.tags.spread(np.array(places, dtype=np.int32)[one.tags.values])
                for one, places in zip(group, by_set, strict=True)
            ]
        )
    return texts(known).take(_fixed(found, pa.int32()))


def _headers(group: Sequence[Columns]) -> pa.Array:
    if not any(one.header_counts for one in group):
        return _empty_lists(group, _HEADERS)
    counts = np.concatenate(
        [
            np.frombuffer(one.header_counts, dtype="<u2")
            if one.header_counts
            else np.zeros(one.header.record_count, dtype="<u2")
            for one in group
        ]
    )
    ends = np.concatenate([_ZERO, np.cumsum(counts, dtype=np.int32)])
    name_sizes = [np.frombuffer(one.header_key_sizes, dtype="<u2").astype("<u4").tobytes() for one in group]
    pairs_each = [len(one.header_value_sizes) // 4 for one in group]
    names = _names(_binary([one.header_keys for one in group], name_sizes, pairs_each))
    values = _binary([one.header_values for one in group], [one.header_value_sizes for one in group], pairs_each)
    pairs = pa.StructArray.from_arrays([names, values], fields=list(_HEADER))
    return pa.ListArray.from_arrays(_fixed(ends, pa.int32()), pairs, type=_HEADERS)


def _names(raw: pa.Array) -> pa.Array:
    try:
        return raw.cast(pa.string())
    except pa.ArrowInvalid:
        return texts([name.decode(errors="replace") for name in raw.to_pylist()])


_COLUMNS: dict[str, Callable[[Sequence[Columns]], pa.Array]] = {
    "key": _keys,
    "value": _values,
    "offset": lambda group: _fixed(_offsets(group), pa.int64()),
    "timestamp": _times,
    "properties": _properties,
    "tags": _tags,
    "tag": _tag,
    "headers": _headers,
    "protocol": _bits(PROTOCOL_MASK, 0, pa.int8(), np.int8),
    "persistent": _bits(PERSISTENT, PERSISTENT.bit_length() - 1, pa.bool_(), np.bool_),
    "priority": _bits(PRIORITY_MASK, PRIORITY_SHIFT, pa.int16(), np.int16),
    "qos": _bits(QOS_MASK, QOS_SHIFT, pa.int8(), np.int8),
    "retain": _bits(RETAIN, RETAIN.bit_length() - 1, pa.bool_(), np.bool_),
    "expiry": _expiries,
}
