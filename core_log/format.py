"""The bytes of a batch and of a segment's head. Format; pure. core_log/README.md has the same drawing for people.

Little-endian throughout. A batch is a header of 128 bytes, its tag summary, the fixed block, the blob block:

      0    magic "HRb1" | size u32 | salt u64 | hash u64 |
     24    version u8 | codec u8 | flags u16 | count u32 | base offset u64 |
     40    span u32 | leader epoch u32 | leader id u32 | summary size u32 |
     56    durable offset u64 | first timestamp i64 | max timestamp i64 |
     80    producer id 16 bytes | first sequence i64 | producer epoch u32 |
    108    fixed size u32 | fixed stored u32 | blob size u32 | blob stored u32 | gap u32 |
    128    summary | fixed block | blob block

The hash is xxh3-64 over everything behind it (bytes 24 to size) as stored, so a follower may re-stamp the salt
of its own segment without hashing again. With codec lz4 each block is stored raw when that is not larger.

The fixed block opens with 16 u32 (see FIXED), then, in this order, each only where its count is not 0:
runs (values i64, then ends u32 unless there is one run or one per record) of timestamp, expiry, attributes,
route set, origin, tag set; route dictionary (sizes u32, ids u32); tag dictionary (hashes u64, text sizes u16);
tag sets (sizes u16, tag indexes u16); offset deltas u32 (compacted batches); header counts u16, header key
sizes u16, header value sizes u32; key, properties and value sizes u32 (one if all are equal, else one each);
tag texts. The blob block: keys | properties | header keys | header values | values. A key (or properties) that
all records share stands there once. In batches of version 1, which are read and not written any more, the tag
texts stand in the blob block, before the values.
"""

import struct
from array import array
from collections.abc import Mapping, Sequence
from io import BytesIO
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import lz4.block
import numpy as np
import xxhash

from headrace.core_log.errors import CorruptLog, UnknownFormat
from headrace.core_log.record import Gap, Headers, Producer, RecordBatch, RouteReference, RouteSet, Runs
from headrace.core_log.summary import ENTRIES_MAX, key_hash, summarise, tag_hash

BATCH_MAGIC = b"HRb1"
VERSION = 2
# Tag texts among the blobs.
VERSION_1 = 1
CODEC_NONE = 0
CODEC_LZ4 = 1
HEADER = struct.Struct("<4sIQQBBHIQIIIIQqq16sqIIIIII")
HEADER_SIZE = 128
assert HEADER.size == HEADER_SIZE
# What lies before the hashed part.
PREFIX = struct.Struct("<4sIQQ")
HASHED_FROM = PREFIX.size
HASHED_HEADER = struct.Struct("<BBHIQIIIIQqq16sqIIIIII")
# magic, size, salt; flags; base offset, span; summary size: the rest is passed over (bench/skip.py).
_GLIMPSE = struct.Struct("<4sIQ10xH4xQI8xI")
assert HASHED_FROM + HASHED_HEADER.size == HEADER_SIZE
_DURABLE_AT = 56

FLAG_FIRST_OF_SEGMENT = 1
FLAG_GAP = 2
FLAG_COMPACTED = 4
FLAG_DENSE = 8
KNOWN_FLAGS = FLAG_FIRST_OF_SEGMENT | FLAG_GAP | FLAG_COMPACTED | FLAG_DENSE

NO_PRODUCER = bytes(16)
NO_SEQUENCE = -1
BATCH_BYTES_MAX = 0xFFFF_FFFF
# A memoryview is one of bytes: its len is its size.
Blob = bytes | memoryview
# A route set with more ids is spelled out once per segment and referred to afterwards (K1).
ROUTE_IDS_INLINE_MAX = 64
_REFERENCE = 0xFFFF_FFFF

# timestamp, expiry, attribute, route, origin, tag runs | route sets, route words | tags, tag sets, tag places |
# offset deltas | headers | key, properties, value sizes (1: all alike; count: each; 0: none)
FIXED = struct.Struct("<16I")
_I64 = struct.Struct("<q")
_EMPTY = memoryview(b"")
SHARED = 0x8000_0000
# What a lie in a batch whose hash is right may end in.
_LIES = (struct.error, ValueError, IndexError, OverflowError, lz4.block.LZ4BlockError)

#     0                 8         16               24                40            44
#     | magic "HRsegm01" | salt u64 | base offset u64 | stream id 16 B | partition u32 | zero u32 | hash u64 | ...
SEGMENT_MAGIC = b"HRsegm01"
SEGMENT_HEAD = struct.Struct("<8sQQ16sIIQ")
SEGMENT_HEAD_SIZE = 64


class BatchHeader(NamedTuple):
    """A batch's header, unpacked. Field order is the order on disk."""

    magic: bytes
    size: int
    salt: int
    hash: int
    version: int
    codec: int
    flags: int
    record_count: int
    base_offset: int
    span: int
    leader_epoch: int
    leader_id: int
    summary_size: int
    durable_offset: int
    first_timestamp: int
    max_timestamp: int
    producer_id: bytes
    first_sequence: int
    producer_epoch: int
    fixed_size: int
    fixed_stored: int
    blob_size: int
    blob_stored: int
    gap: int

    @property
    def next_offset(self) -> int:
        return self.base_offset + self.span

    @property
    def producer(self) -> Producer | None:
        if self.first_sequence == NO_SEQUENCE:
            return None
        return Producer(self.producer_id, self.producer_epoch, self.first_sequence, dense=self.flags & FLAG_DENSE != 0)


class SegmentHead(NamedTuple):
    salt: int
    base_offset: int
    stream_id: bytes
    partition: int


class Body(NamedTuple):
    """A batch's columns as bytes, before it is stamped with its place in the log."""

    codec: int
    flags: int
    record_count: int
    span: int
    first_timestamp: int
    max_timestamp: int
    producer: Producer | None
    fixed_size: int
    blob_size: int
    gap: int
    summary: bytes
    fixed: bytes
    blobs: Sequence[Blob]
    # Large route sets that this batch spells out: where in its dictionary.
    defined: dict[RouteSet, int]

    @property
    def size(self) -> int:
        return HEADER_SIZE + len(self.summary) + len(self.fixed) + sum(map(len, self.blobs))


def encode_segment_head(head: SegmentHead) -> bytes:
    packed = SEGMENT_HEAD.pack(SEGMENT_MAGIC, head.salt, head.base_offset, head.stream_id, head.partition, 0, 0)[:-8]
    return (packed + xxhash.xxh3_64_digest(packed)[::-1]).ljust(SEGMENT_HEAD_SIZE, b"\0")


def maybe_segment_head(data: bytes) -> SegmentHead | None:
    """The head of a segment file, or None when these bytes are not one."""
    if len(data) < SEGMENT_HEAD_SIZE or data[:8] != SEGMENT_MAGIC:
        return None
    _magic, salt, base_offset, stream_id, partition, _zero, digest = SEGMENT_HEAD.unpack_from(data)
    if digest != xxhash.xxh3_64_intdigest(data[: SEGMENT_HEAD.size - 8]):
        return None
    if any(data[SEGMENT_HEAD.size : SEGMENT_HEAD_SIZE]):
        return None
    return SegmentHead(salt, base_offset, stream_id, partition)


# -- encoding ---------------------------------------------------------------------------------------------------


def encode(
    batch: RecordBatch, *, compress: str = "none", known_sets: Mapping[RouteSet, RouteReference] | None = None
) -> Body:
    """Columns to bytes. `compress`: none | lz4 (always try) | auto (when a sample says that it pays)."""
    if batch.gap is not None:
        return Body(CODEC_NONE, FLAG_GAP, 0, batch.span, 0, 0, None, 0, 0, int(batch.gap), b"", b"", [], {})
    count = batch.count
    counts = [0] * 16
    fixed: list[bytes] = [b""]
    for place, runs in enumerate(
        (batch.timestamps, batch.expiries, batch.attributes, batch.routes, batch.origins, batch.tags)
    ):
        counts[place] = _encode_runs(runs, count, fixed)
    defined: dict[RouteSet, int] = {}
    if len(batch.route_sets) > 1:
        sizes, words = _encode_routes(batch.route_sets, known_sets or {}, defined)
        counts[6], counts[7] = len(sizes), len(words)
        fixed.append(struct.pack(f"<{len(sizes)}I{len(words)}I", *sizes, *words))
    texts, hashes = encode_tags(batch.tag_sets, counts, fixed)
    flags = FLAG_DENSE if batch.producer is not None and batch.producer.dense else 0
    if batch.offsets is not None:
        flags |= FLAG_COMPACTED
        counts[11] = count
        fixed.append(struct.pack(f"<{count}I", *(offset - batch.base_offset for offset in batch.offsets)))
    header_keys, header_values = encode_headers(batch.headers, counts, fixed)
    keys, counts[13] = encode_sizes(batch.keys, fixed, share=True)
    properties, counts[14] = encode_sizes(batch.properties, fixed, share=True)
    values, counts[15] = encode_sizes(batch.values, fixed, share=False)
    hashes |= {key_hash(keys[0])} if counts[13] & SHARED else hashes_of_keys(keys)
    stamps = batch.timestamps.values
    return body_of(
        counts,
        fixed,
        [b"".join(keys), b"".join(properties), header_keys, header_values, b"".join(values)],
        texts,
        hashes,
        record_count=count,
        stamps=(min(stamps, default=0), max(stamps, default=0)),
        compress=compress,
        flags=flags,
        span=batch.span,
        producer=batch.producer,
        defined=defined,
    )


def body_of(
    counts: list[int],
    fixed: list[bytes],
    blobs: Sequence[Blob],
    texts: bytes,
    hashes: set[int],
    *,
    record_count: int,
    stamps: tuple[int, int],
    compress: str,
    flags: int = 0,
    span: int | None = None,
    producer: Producer | None = None,
    defined: dict[RouteSet, int] | None = None,
) -> Body:
    """Put the encoded columns together. The first of `fixed` is kept free for FIXED, the last blob is the values.

    `texts`, of tags. `hashes`: of all tags and keys; too many are not worth a summary.
    """
    fixed[0] = FIXED.pack(*counts)
    fixed.append(texts)
    fixed_block = b"".join(fixed)
    fixed_size = len(fixed_block)
    blob_size = sum(map(len, blobs))
    if blob_size + fixed_size > BATCH_BYTES_MAX - HEADER_SIZE - ENTRIES_MAX:
        raise ValueError(f"a batch of {blob_size} bytes is beyond the format")
    codec = CODEC_NONE
    if compress != "none" and (compress == "lz4" or _pays(blobs)):
        codec = CODEC_LZ4
        fixed_block = _compress(fixed_block)
        blobs = [_compress(b"".join(blobs))]
    return Body(
        codec,
        flags,
        record_count,
        record_count if span is None else span,
        *stamps,
        producer,
        fixed_size,
        blob_size,
        0,
        summarise(hashes),
        fixed_block,
        blobs,
        {} if defined is None else defined,
    )


def encode_tags(sets: Sequence[tuple[str, ...]], counts: list[int], fixed: list[bytes]) -> tuple[bytes, set[int]]:
    """The dictionaries of tags; returns their texts, and the hashes of all tags. The first set is empty."""
    if len(sets) == 1:
        return b"", set()
    tags: dict[str, int] = {}
    places = [tags.setdefault(tag, len(tags)) for one in sets[1:] for tag in one]
    counts[8], counts[9], counts[10] = len(tags), len(sets) - 1, len(places)
    hashes = [tag_hash(tag) for tag in tags]
    fixed.append(struct.pack(f"<{len(tags)}Q", *hashes))
    fixed.append(struct.pack(f"<{len(tags)}H", *(len(tag.encode()) for tag in tags)))
    fixed.append(struct.pack(f"<{counts[9]}H{len(places)}H", *map(len, sets[1:]), *places))
    return "".join(tags).encode(), set(hashes)


def encode_headers(headers: Sequence[Headers] | None, counts: list[int], fixed: list[bytes]) -> tuple[bytes, bytes]:
    """The columns of headers; returns their keys and values for the blob."""
    if headers is None:
        return b"", b""
    keys = [name for one in headers for name, _ in one]
    values = [value for one in headers for _, value in one]
    total = counts[12] = len(keys)
    if total:
        fixed.append(struct.pack(f"<{len(headers)}H", *map(len, headers)))
        fixed.append(struct.pack(f"<{total}H", *map(len, keys)))
        fixed.append(struct.pack(f"<{total}I", *map(len, values)))
    return b"".join(keys), b"".join(values)


def hashes_of_keys(keys: Sequence[bytes]) -> set[int]:
    """For the summary: more than it has room for, where there are many."""
    distinct = set(keys)
    return set(range(ENTRIES_MAX + 1)) if len(distinct) > ENTRIES_MAX else set(map(key_hash, distinct))


def stamp(
    body: Body,
    *,
    salt: int,
    base_offset: int,
    leader_epoch: int,
    durable_offset: int,
    leader_id: int = 0,
    first_of_segment: bool = False,
) -> list[Blob]:
    """Give a body its place in the log: the buffers to write, in order."""
    producer = body.producer or Producer(NO_PRODUCER, 0, NO_SEQUENCE)
    blob_stored = sum(map(len, body.blobs))
    header = HASHED_HEADER.pack(
        VERSION,
        body.codec,
        body.flags | (FLAG_FIRST_OF_SEGMENT if first_of_segment else 0),
        body.record_count,
        base_offset,
        body.span,
        leader_epoch,
        leader_id,
        len(body.summary),
        durable_offset,
        body.first_timestamp,
        body.max_timestamp,
        producer.id,
        producer.first_sequence,
        producer.epoch,
        body.fixed_size,
        len(body.fixed),
        body.blob_size,
        blob_stored,
        body.gap,
    )
    hasher = xxhash.xxh3_64(header)
    head = [header, body.summary, body.fixed]
    for buffer in chain(head[1:], body.blobs):
        hasher.update(buffer)
    size = HEADER_SIZE + len(body.summary) + len(body.fixed) + blob_stored
    first = PREFIX.pack(BATCH_MAGIC, size, salt, hasher.intdigest()) + b"".join(head)
    return [first, *(blob for blob in body.blobs if len(blob))]


def restamp(batch: bytes, salt: int) -> bytes:
    """The same batch as part of another segment: only the salt differs, the hash stands."""
    return batch[:8] + salt.to_bytes(8, "little") + batch[16:]


def adopt(batch: bytes | memoryview, *, salt: int, durable_offset: int) -> bytes:
    """A batch of another replica as part of a segment of ours. What that one knew to be durable is not what this disk
    holds, and a recovery would take the difference for lost records (D7): so it is said anew, and hashed anew."""
    size = int.from_bytes(batch[4:8], "little")
    parts = (batch[HASHED_FROM:_DURABLE_AT], durable_offset.to_bytes(8, "little"), batch[_DURABLE_AT + 8 : size])
    hasher = xxhash.xxh3_64()
    for part in parts:
        hasher.update(part)
    return b"".join((PREFIX.pack(BATCH_MAGIC, size, salt, hasher.intdigest()), *parts))


def _encode_runs(runs: Runs, count: int, fixed: list[bytes]) -> int:
    many = len(runs.values)
    if many == 1 and runs.values[0] == 0:
        return 0
    has_ends = many not in (1, count)
    if isinstance(runs.values, array):
        # One copy; for a few integers `pack` takes less.
        fixed.append(np.asarray(runs.values, dtype="<i8").tobytes())
        fixed.append(np.asarray(runs.ends).astype("<u4").tobytes() if has_ends else b"")
    else:
        fixed.append(struct.pack(f"<{many}q", *runs.values))
        fixed.append(struct.pack(f"<{many}I", *runs.ends) if has_ends else b"")
    return many


def _encode_routes(
    sets: Sequence[RouteSet | RouteReference], known: Mapping[RouteSet, RouteReference], defined: dict[RouteSet, int]
) -> tuple[list[int], list[int]]:
    sizes: list[int] = []
    words: list[int] = []
    for place, one in enumerate(sets[1:], start=1):
        reference = one if isinstance(one, RouteReference) else None
        if reference is None and len(one) > ROUTE_IDS_INLINE_MAX:
            assert not isinstance(one, RouteReference)
            reference = known.get(one)
            if reference is None:
                defined[one] = place
        if reference is None:
            sizes.append(len(one))
            words += one
        else:
            sizes.append(_REFERENCE)
            words += (reference.base_offset & 0xFFFF_FFFF, reference.base_offset >> 32, reference.place)
    return sizes, words


def encode_sizes(column: list[bytes], fixed: list[bytes], *, share: bool) -> tuple[list[bytes], int]:
    """What goes into the blob, and what stands for the column's sizes in FIXED."""
    first = column[0]
    count = len(column)
    # The last is looked at first: where entries differ at all, it nearly always does.
    if share and column[-1] == first and column.count(first) == count:
        fixed.append(struct.pack("<I", len(first)))
        return [first], SHARED | 1
    sizes = list(map(len, column))
    if sizes.count(len(first)) == count:
        fixed.append(struct.pack("<I", len(first)))
        return column, 1
    fixed.append(struct.pack(f"<{count}I", *sizes))
    return column, count


def _pays(blobs: Sequence[Blob]) -> bool:
    """A sample of 4 KiB of the values shrinks by a fifth: then the whole is worth compressing."""
    sample = blobs[-1][:4096]
    return len(sample) >= 512 and len(lz4.block.compress(sample, store_size=False)) < 0.8 * len(sample)


def _compress(block: bytes) -> bytes:
    packed: bytes = lz4.block.compress(block, store_size=False)
    return packed if len(packed) < len(block) else block


# -- decoding ---------------------------------------------------------------------------------------------------


def maybe_header(data: bytes | memoryview, position: int, salt: int) -> BatchHeader | None:
    """The batch header at this place if there is one of this segment; its hash is not looked at."""
    if len(data) - position < HEADER_SIZE:
        return None
    fields = HEADER.unpack_from(data, position)
    if fields[0] != BATCH_MAGIC or fields[2] != salt:
        return None
    header = BatchHeader._make(fields)
    stored = HEADER_SIZE + header.summary_size + header.fixed_stored + header.blob_stored
    return header if header.size == stored else None


def maybe_glimpse(data: bytes, position: int, salt: int) -> tuple[int, bool, int, bytes] | None:
    """As much of a batch as it takes to pass over it: size, whether it is a gap, next offset, summary.

    None when no batch of this segment begins here, or the bytes end before its summary does.
    """
    start = position + HEADER_SIZE
    if start > len(data):
        return None
    magic, size, found_salt, flags, base_offset, span, summary_size = _GLIMPSE.unpack_from(data, position)
    end = start + summary_size
    if magic != BATCH_MAGIC or found_salt != salt or size < HEADER_SIZE or span == 0 or end > len(data):
        return None
    return size, flags & FLAG_GAP != 0, base_offset + span, data[start:end]


def is_whole(data: bytes | memoryview, position: int, header: BatchHeader) -> bool:
    """True if the batch at this place is all there and its hash is right."""
    end = position + header.size
    if end > len(data):
        return False
    digest: int = xxhash.xxh3_64_intdigest(memoryview(data)[position + HASHED_FROM : end])
    return digest == header.hash


def summary_of(data: bytes, position: int, header: BatchHeader) -> bytes:
    start = position + HEADER_SIZE
    return data[start : start + header.summary_size]


class RunColumn(NamedTuple):
    """Runs where they lie in a fixed block, which was found right: no object for each until somebody wants lists."""

    fixed: bytes
    at: int
    # 0: all records have 0.
    many: int
    record_count: int

    @property
    def single(self) -> int | None:
        """The value of all records, if they have one."""
        if self.many > 1:
            return None
        value: int = _I64.unpack_from(self.fixed, self.at)[0] if self.many else 0
        return value

    @property
    def values(self) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        if not self.many:
            return np.zeros(1, dtype=np.int64)
        return np.frombuffer(self.fixed, "<i8", self.many, self.at)

    def runs(self) -> Runs:
        if self.many <= 1:
            return Runs([self.single or 0], [self.record_count])
        if self.many == self.record_count:
            return Runs(self.values.tolist(), list(range(1, self.record_count + 1)))
        return Runs(self.values.tolist(), self._ends().tolist())

    def spread(self, values: "np.ndarray[tuple[int], Any]") -> "np.ndarray[tuple[int], Any]":
        """One value for each run as one for each record."""
        if self.many <= 1:
            return np.full(self.record_count, values[0])
        return values if self.many == self.record_count else np.repeat(values, np.diff(self._ends(), prepend=0))

    def expand(self) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        return self.spread(self.values)

    def _ends(self) -> "np.ndarray[tuple[int], Any]":
        return np.frombuffer(self.fixed, "<u4", self.many, self.at + 8 * self.many).astype(np.int64)

    def check_ends(self) -> None:
        """Raises ValueError for runs that do not lead to the count."""
        ends = self._ends()
        if ends[-1] != self.record_count or ends[0] == 0 or (ends[1:] <= ends[:-1]).any():
            raise ValueError("runs do not lead to the count")

    def check_places(self, dictionary: int) -> None:
        """Its values are places in a dictionary of that size. Raises ValueError for one that is not there."""
        single = self.single
        low, high = (self.values.min(), self.values.max()) if single is None else (single, single)
        if low < 0 or high >= dictionary:
            raise ValueError("a run names a set that is not there")


class Columns(NamedTuple):
    """Where each column of a decoded batch lies, without a Python object per record. For arrow.py and decode."""

    header: BatchHeader
    timestamps: RunColumn
    expiries: RunColumn
    attributes: RunColumn
    routes: RunColumn
    origins: RunColumn
    tags: RunColumn
    route_sets: list[RouteSet | RouteReference]
    tag_hashes: list[int]
    tag_texts: list[str]
    tag_sets: list[tuple[int, ...]]
    offsets: list[int] | None
    header_counts: bytes
    header_key_sizes: bytes
    header_value_sizes: bytes
    # Sizes as stored: u32 each, one if all are alike.
    key_sizes: bytes
    key_shared: bool
    properties_sizes: bytes
    properties_shared: bool
    value_sizes: bytes
    keys: memoryview
    properties: memoryview
    header_keys: memoryview
    header_values: memoryview
    values: memoryview
    # Where the first four of those end in the blob block, and where the values begin.
    cuts: tuple[int, int, int, int, int]

    def runs(self) -> tuple[Runs, Runs, Runs, Runs, Runs, Runs]:
        """In the order in which a RecordBatch takes them."""
        # Most columns of most batches are zero throughout; those share one.
        zero = Runs([0], [self.header.record_count])
        timestamps, expiries, attributes, routes, origins, tags = [
            column.runs() if column.many else zero for column in self[1:7]
        ]
        return timestamps, expiries, attributes, routes, origins, tags


def decode_columns(
    data: bytes | memoryview, position: int, header: BatchHeader, *, blobs: bool = True, tags: bool = True
) -> Columns:
    """Cut a batch into columns. The hash must have been checked; a lie inside raises CorruptLog all the same.

    Without blobs, the blob block is not unpacked: keys, properties, header texts and values are empty, until
    `with_blobs`. Without tags, the dictionaries of tags are passed over: no record has any.
    """
    _refuse_unknown(header)
    try:
        return _decode_columns(data, position, header, blobs, tags)
    except _LIES as error:
        raise CorruptLog("batch", position, header.base_offset, f"columns do not add up ({error})") from error


def with_blobs(columns: Columns, data: bytes | memoryview, position: int) -> Columns:
    """Columns that were decoded without their blobs, with them; from the same bytes."""
    header = columns.header
    try:
        blob = _blobs(data, position, header)
    except _LIES as error:
        raise CorruptLog("batch", position, header.base_offset, f"columns do not add up ({error})") from error
    keys_end, headers_at, names_end, headers_end, values_at = columns.cuts
    return columns._replace(
        keys=blob[:keys_end],
        properties=blob[keys_end:headers_at],
        header_keys=blob[headers_at:names_end],
        header_values=blob[names_end:headers_end],
        values=blob[values_at:],
    )


def _blobs(data: bytes | memoryview, position: int, header: BatchHeader) -> memoryview:
    start = position + HEADER_SIZE + header.summary_size + header.fixed_stored
    return memoryview(_block(memoryview(data)[start : start + header.blob_stored], header.blob_size, header.codec))


def _refuse_unknown(header: BatchHeader) -> None:
    if header.version not in (VERSION, VERSION_1) or header.codec > CODEC_LZ4 or header.flags & ~KNOWN_FLAGS:
        raise UnknownFormat(
            f"batch at offset {header.base_offset}: version {header.version}, codec {header.codec}, "
            f"flags {header.flags:#x} are not known to this release"
        )


def _decode_columns(
    data: bytes | memoryview, position: int, header: BatchHeader, blobs: bool, with_tags: bool
) -> Columns:
    start = position + HEADER_SIZE + header.summary_size
    fixed = bytes(_block(memoryview(data)[start : start + header.fixed_stored], header.fixed_size, header.codec))
    # What is not looked at must not keep the bytes around it in memory.
    blob = _blobs(data, position, header) if blobs else _EMPTY
    count = header.record_count
    if not 0 < count <= header.span:
        raise ValueError(f"{count} records for {header.span} offsets")
    counts = FIXED.unpack_from(fixed)
    at = FIXED.size
    zero = RunColumn(fixed, at, 0, count)
    runs = [zero] * 6
    for place in range(6):
        many = counts[place]
        if many:
            runs[place] = RunColumn(fixed, at, many, count)
            at += 8 * many
            if many not in (1, count):
                runs[place].check_ends()
                at += 4 * many
    route_sets: list[RouteSet | RouteReference] = [()]
    if counts[6]:
        at = _decode_routes(fixed, at, counts[6], counts[7], route_sets)
    tag_hashes: list[int] = []
    text_sizes: tuple[int, ...] = ()
    tag_sets: list[tuple[int, ...]] = [()]
    is_old = header.version == VERSION_1
    if counts[8] and (is_old or with_tags):
        text_sizes = struct.unpack_from(f"<{counts[8]}H", fixed, at + 8 * counts[8])
    if not with_tags:
        at += 10 * counts[8] + 2 * (counts[9] + counts[10])
        runs[5] = zero
    elif counts[8] or counts[9]:
        tag_hashes = list(struct.unpack_from(f"<{counts[8]}Q", fixed, at))
        at += 10 * counts[8]
        sizes = struct.unpack_from(f"<{counts[9]}H", fixed, at)
        places = struct.unpack_from(f"<{counts[10]}H", fixed, at + 2 * counts[9])
        at += 2 * (counts[9] + counts[10])
        tag_sets += _sets(sizes, places)
        if max(places, default=-1) >= counts[8]:
            raise ValueError("a tag set names a tag that is not there")
    timestamps, expiries, attributes, routes, origins, tags = runs
    if routes is not zero:
        routes.check_places(len(route_sets))
    if tags is not zero:
        tags.check_places(len(tag_sets))
    offsets: list[int] | None = None
    if counts[11]:
        deltas = struct.unpack_from(f"<{counts[11]}I", fixed, at)
        at += 4 * counts[11]
        if len(deltas) != count or deltas[-1] >= header.span or not all(low < high for low, high in pairwise(deltas)):
            raise ValueError("offsets do not rise within the span")
        offsets = [header.base_offset + delta for delta in deltas]
    header_counts = header_key_sizes = header_value_sizes = b""
    if counts[12]:
        header_counts = fixed[at : at + 2 * count]
        at += 2 * count
        header_key_sizes = fixed[at : at + 2 * counts[12]]
        at += 2 * counts[12]
        header_value_sizes = fixed[at : at + 4 * counts[12]]
        at += 4 * counts[12]
        if int(np.frombuffer(header_counts, dtype="<u2").sum(dtype=np.int64)) != counts[12]:
            raise ValueError("header counts do not add up")
    key_shared, properties_shared = bool(counts[13] & SHARED), bool(counts[14] & SHARED)
    keys_to = at + 4 * (counts[13] & ~SHARED)
    properties_to = keys_to + 4 * (counts[14] & ~SHARED)
    sizes_to = properties_to + 4 * counts[15]
    texts_size = sum(text_sizes)
    if sizes_to > len(fixed) or (with_tags and not is_old and sizes_to + texts_size != len(fixed)):
        raise ValueError(f"fixed block is {len(fixed)} bytes, sizes say {sizes_to + texts_size}")
    key_sizes, properties_sizes = fixed[at:keys_to], fixed[keys_to:properties_to]
    value_sizes = fixed[properties_to:sizes_to]
    keys_end = _total(key_sizes, 1 if key_shared else count)
    headers_at = names_end = headers_end = keys_end + _total(properties_sizes, 1 if properties_shared else count)
    if counts[12]:
        names_end = headers_at + int(np.frombuffer(header_key_sizes, dtype="<u2").sum(dtype=np.int64))
        headers_end = names_end + int(np.frombuffer(header_value_sizes, dtype="<u4").sum(dtype=np.int64))
    values_at = headers_end + texts_size if is_old else headers_end
    end = values_at + _total(value_sizes, count)
    if end != header.blob_size:
        raise ValueError(f"blobs are {header.blob_size} bytes, sizes say {end}")
    tag_texts: list[str] = []
    if text_sizes and with_tags:
        texts = fixed[sizes_to:]
        if is_old:
            texts = bytes((blob or _blobs(data, position, header))[headers_end:values_at])
        low = 0
        for size in text_sizes:
            tag_texts.append(str(texts[low : low + size], "utf-8"))
            low += size
    return Columns(
        header,
        timestamps,
        expiries,
        attributes,
        routes,
        origins,
        tags,
        route_sets,
        tag_hashes,
        tag_texts,
        tag_sets,
        offsets,
        header_counts,
        header_key_sizes,
        header_value_sizes,
        key_sizes,
        key_shared,
        properties_sizes,
        properties_shared,
        value_sizes,
        blob[:keys_end],
        blob[keys_end:headers_at],
        blob[headers_at:names_end] if counts[12] else _EMPTY,
        blob[names_end:headers_end] if counts[12] else _EMPTY,
        blob[values_at:],
        (keys_end, headers_at, names_end, headers_end, values_at),
    )


def _decode_routes(fixed: bytes, at: int, many: int, word_count: int, found: list[RouteSet | RouteReference]) -> int:
    sizes = struct.unpack_from(f"<{many}I", fixed, at)
    words = struct.unpack_from(f"<{word_count}I", fixed, at + 4 * many)
    spelled = _sets(tuple(3 if size == _REFERENCE else size for size in sizes), words)
    for size, one in zip(sizes, spelled, strict=True):
        found.append(RouteReference(one[1] << 32 | one[0], one[2]) if size == _REFERENCE else one)
    return at + 4 * (many + word_count)


def _sets(sizes: tuple[int, ...], members: tuple[int, ...]) -> list[tuple[int, ...]]:
    bounds = list(accumulate(sizes, initial=0))
    if bounds[-1] != len(members):
        raise ValueError(f"a dictionary has {len(members)} members, sizes say {bounds[-1]}")
    return [members[low:high] for low, high in pairwise(bounds)]


def _total(sizes: bytes, count: int) -> int:
    """The bytes of a column of `count` entries (one, where all share it) by its sizes: one for all, or one each."""
    if len(sizes) == 4:
        return int.from_bytes(sizes, "little") * count
    if len(sizes) != 4 * count:
        raise ValueError("a size column has the wrong length")
    return int(np.frombuffer(sizes, dtype="<u4").sum(dtype=np.int64))


def decode(data: bytes | memoryview, position: int, header: BatchHeader) -> RecordBatch:
    """A batch as it was before encoding. References to large route sets are left for the log to resolve."""
    if header.flags & FLAG_GAP:
        _refuse_unknown(header)
        if header.gap not in Gap._value2member_map_:
            raise UnknownFormat(f"gap at offset {header.base_offset}: reason {header.gap} is not known to this release")
        empty = RecordBatch(header.base_offset, header.leader_epoch, header.producer)
        empty.span = header.span
        empty.gap = Gap(header.gap)
        return empty
    columns = decode_columns(data, position, header)
    count = header.record_count
    batch = RecordBatch(header.base_offset, header.leader_epoch, header.producer, columns.runs())
    batch.span = header.span
    batch.route_sets = columns.route_sets
    if len(columns.tag_sets) > 1:
        texts = columns.tag_texts
        batch.tag_sets = [tuple(texts[place] for place in one) for one in columns.tag_sets]
    batch.offsets = columns.offsets
    batch.keys = cut(columns.keys, columns.key_sizes, count, columns.key_shared)
    batch.properties = cut(columns.properties, columns.properties_sizes, count, columns.properties_shared)
    batch.values = cut(columns.values, columns.value_sizes, count, shared=False)
    if columns.header_counts:
        batch.headers = cut_headers(columns)
    batch.byte_count = header.blob_size
    return batch


def cut(blob: memoryview, sizes: bytes, count: int, shared: bool) -> list[bytes]:
    """A blob column as a list of bytes."""
    if shared or count == 1:
        return [bytes(blob)] * count
    if len(sizes) == 4:
        size = int.from_bytes(sizes, "little")
        if size == 0:
            return [b""] * count
        # numpy's void items come out as bytes in one C loop: 16 ns each against 80 for slices (bench/read.py).
        cells: list[bytes] = np.frombuffer(blob, dtype=f"V{size}").tolist()
        return cells
    return cut_sized(blob, np.frombuffer(sizes, dtype="<u4"))


def cut_headers(columns: Columns) -> list[Headers]:
    names = cut_sized(columns.header_keys, np.frombuffer(columns.header_key_sizes, dtype="<u2"))
    values = cut_sized(columns.header_values, np.frombuffer(columns.header_value_sizes, dtype="<u4"))
    pairs = list(zip(names, values, strict=True))
    ends = np.cumsum(np.frombuffer(columns.header_counts, dtype="<u2"), dtype=np.int64).tolist()
    return [tuple(pairs[low:high]) for low, high in zip([0, *ends], ends, strict=False)]


def cut_sized(blob: memoryview, sizes: "np.ndarray[tuple[int], np.dtype[np.unsignedinteger]]") -> list[bytes]:
    """Pieces of a blob, by a numpy column of sizes."""
    # Reading on and on costs half of what slices do, which each need two numbers and a slice object.
    return list(map(BytesIO(blob).read, sizes.tolist()))


def _block(stored: memoryview, size: int, codec: int) -> memoryview | bytes:
    if codec == CODEC_NONE or len(stored) == size:
        if len(stored) != size:
            raise ValueError("a block is shorter than its header says")
        return stored
    # lz4 shrinks to no less than a 255th; whoever says more would have us set aside the memory first.
    if size > 255 * len(stored):
        raise ValueError("a block cannot unpack to the size its header says")
    plain: bytes = lz4.block.decompress(stored, uncompressed_size=size)
    if len(plain) != size:
        raise ValueError("a block unpacks to the wrong size")
    return plain
