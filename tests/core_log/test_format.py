"""The bytes of a batch: what goes in comes out, and whatever is changed on the way is noticed."""

import struct
from contextlib import suppress

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from headrace.core_log.errors import CorruptLog, UnknownFormat
from headrace.core_log.format import (
    BATCH_MAGIC,
    CODEC_LZ4,
    CODEC_NONE,
    FIXED,
    HASHED_FROM,
    HEADER,
    HEADER_SIZE,
    PREFIX,
    SEGMENT_HEAD_SIZE,
    BatchHeader,
    SegmentHead,
    cut,
    decode,
    decode_columns,
    encode,
    encode_segment_head,
    is_whole,
    maybe_glimpse,
    maybe_header,
    maybe_segment_head,
    restamp,
    stamp,
    summary_of,
    with_blobs,
)
from headrace.core_log.record import RecordBatch, RouteReference
from headrace.core_log.summary import key_hash, may_hold, tag_hash

from .batches import COMPRESSIONS, I64, U64, gaps, record_batches, stored
from .directories import MANY_ROUTES

compressions = st.sampled_from(COMPRESSIONS)


def read_back(data: bytes, position: int = 0, salt: int = 1) -> RecordBatch:
    header = maybe_header(data, position, salt)
    assert header is not None
    assert is_whole(data, position, header)
    return decode(data, position, header)


def assert_same(found: RecordBatch, batch: RecordBatch) -> None:
    for name in ("base_offset", "epoch", "span", "producer", "gap", "keys", "properties", "values", "offsets"):
        assert getattr(found, name) == getattr(batch, name), name
    if batch.gap is not None:
        return
    for name in ("timestamps", "expiries", "attributes", "origins", "routes", "tags", "route_sets", "tag_sets"):
        assert getattr(found, name) == getattr(batch, name), name
    assert (found.headers or [()] * batch.count) == (batch.headers or [()] * batch.count)


# -- round trip -------------------------------------------------------------------------------------------------


@given(record_batches(), compressions)
def test_batch_is_what_it_was_before_encoding(batch: RecordBatch, compress: str) -> None:
    assert_same(read_back(stored(batch, compress=compress)), batch)


@given(record_batches(), st.sampled_from(["none", "lz4"]))
def test_blobs_that_are_unpacked_later_are_those_of_a_batch_decoded_whole(batch: RecordBatch, compress: str) -> None:
    data = stored(batch, compress=compress)
    header = maybe_header(data, 0, 1)
    assert header is not None
    without = decode_columns(data, 0, header, blobs=False)
    assert [bytes(one) for one in (without.keys, without.values, without.properties)] == [b""] * 3
    assert with_blobs(without, data, 0) == decode_columns(data, 0, header)


def as_version_1(data: bytes) -> bytes:
    """An uncompressed batch as earlier releases wrote it: tag texts before the values."""
    header = maybe_header(data, 0, 1)
    assert header is not None
    columns = decode_columns(data, 0, header)
    texts = "".join(columns.tag_texts).encode()
    fixed_size, blob_size = header.fixed_size - len(texts), header.blob_size + len(texts)
    fixed_at = HEADER_SIZE + header.summary_size
    values_at = fixed_at + header.fixed_size + columns.cuts[-1]
    old = bytearray(data[:HEADER_SIZE])
    sizes = {"fixed_size": fixed_size, "fixed_stored": fixed_size, "blob_size": blob_size, "blob_stored": blob_size}
    HEADER.pack_into(old, 0, *header._replace(version=1, **sizes))
    old += data[HEADER_SIZE : fixed_at + fixed_size]
    old += data[fixed_at + header.fixed_size : values_at] + texts + data[values_at:]
    return forged(old)


@given(record_batches())
def test_batch_of_version_1_is_what_it_was_before_encoding(batch: RecordBatch) -> None:
    data = as_version_1(stored(batch))
    header = maybe_header(data, 0, 1)
    assert header is not None and is_whole(data, 0, header)
    assert_same(decode(data, 0, header), batch)
    without = decode_columns(data, 0, header, blobs=False)
    assert with_blobs(without, data, 0) == decode_columns(data, 0, header)
    assert decode_columns(data, 0, header, tags=False).values == decode_columns(data, 0, header).values


@given(gaps)
def test_gap_is_what_it_was_before_encoding(batch: RecordBatch) -> None:
    assert_same(read_back(stored(batch)), batch)


@given(record_batches(), record_batches(), compressions)
def test_batch_is_found_at_its_place_among_others(first: RecordBatch, second: RecordBatch, compress: str) -> None:
    before = stored(first, compress=compress)
    data = b"\x55" * 9 + before + stored(second, compress=compress) + b"\x55" * 9
    assert_same(read_back(data, 9), first)
    assert_same(read_back(data, 9 + len(before)), second)


@given(record_batches(), compressions, I64.filter(lambda number: number >= 0), U64)
def test_header_says_what_the_batch_holds(batch: RecordBatch, compress: str, durable: int, salt: int) -> None:
    header = maybe_header(stored(batch, compress=compress, salt=salt, durable_offset=durable), 0, salt)
    assert header is not None
    assert header.record_count == batch.count
    assert (header.base_offset, header.next_offset) == (batch.base_offset, batch.next_offset)
    assert (header.leader_epoch, header.leader_id) == (batch.epoch, 3)
    assert (header.durable_offset, header.producer) == (durable, batch.producer)
    assert header.first_timestamp == min(batch.timestamps.values)
    assert header.max_timestamp == max(batch.timestamps.values)


@given(record_batches())
def test_body_knows_its_size_before_it_is_stamped(batch: RecordBatch) -> None:
    for compress in COMPRESSIONS:
        assert encode(batch, compress=compress).size == len(stored(batch, compress=compress))


def test_columns_of_neighbours_that_are_alike_cost_nothing_per_record() -> None:
    sizes = []
    for count in (1_000, 2_000):
        batch = RecordBatch(0, 1)
        batch.add([b"key"] * count, [b"props"] * count, [b""] * count, timestamp_us=5, tags=("a",), route_set=(1, 2))
        sizes.append(len(stored(batch)))
    assert sizes[0] == sizes[1]


def test_compression_is_used_when_it_pays_and_only_then() -> None:
    def codec(value: bytes, compress: str) -> int:
        batch = RecordBatch(0, 1)
        batch.add([b"k"], [b""], [value], timestamp_us=1)
        return encode(batch, compress=compress).codec

    noise = b"".join(xxhash.xxh3_64_digest(str(number).encode()) for number in range(500))
    assert codec(b"text " * 1000, "auto") == CODEC_LZ4
    assert codec(noise, "auto") == CODEC_NONE
    assert codec(b"text " * 1000, "none") == CODEC_NONE
    # Asked for explicitly it is tried block by block, and never makes a batch larger.
    assert codec(noise, "lz4") == CODEC_LZ4
    batch = RecordBatch(0, 1)
    batch.add([b"k"], [b""], [noise], timestamp_us=1)
    assert encode(batch, compress="lz4").size <= encode(batch).size


def test_large_route_set_is_spelled_out_once_and_referred_to_afterwards() -> None:
    batch = RecordBatch(70, 1)
    batch.add([b"k"], [b""], [b"v"], timestamp_us=1, route_set=MANY_ROUTES)
    body = encode(batch)
    assert body.defined == {MANY_ROUTES: 1}
    known = {MANY_ROUTES: RouteReference(2**40 + 5, 3)}
    again = encode(batch, known_sets=known)
    assert again.defined == {}
    assert again.size < body.size - 4 * 90
    data = b"".join(stamp(again, salt=1, base_offset=70, leader_epoch=1, durable_offset=0))
    assert read_back(data).route_sets == [(), RouteReference(2**40 + 5, 3)]


def test_restamped_batch_belongs_to_another_segment_and_is_whole() -> None:
    batch = RecordBatch(7, 1)
    batch.add([b"k"], [b""], [b"v"], timestamp_us=1)
    data = stored(batch, salt=5)
    moved = restamp(data, 6)
    assert maybe_header(moved, 0, 5) is None
    assert_same(read_back(moved, salt=6), batch)
    assert restamp(moved, 5) == data


@given(record_batches(), U64)
def test_restamp_keeps_the_hash_valid(batch: RecordBatch, salt: int) -> None:
    assert_same(read_back(restamp(stored(batch), salt), salt=salt), batch)


@given(record_batches(), compressions)
def test_summary_never_says_no_wrongly(batch: RecordBatch, compress: str) -> None:
    data = stored(batch, compress=compress)
    header = maybe_header(data, 0, 1)
    assert header is not None
    summary = summary_of(data, 0, header)
    for index in range(batch.count):
        assert may_hold(summary, key_hash(batch.keys[index]))
        for tag in batch.tags_at(index):
            assert may_hold(summary, tag_hash(tag))


@given(record_batches() | gaps, compressions)
def test_glimpse_says_what_the_header_says(batch: RecordBatch, compress: str) -> None:
    data = b"xyz" + stored(batch, compress=compress)
    header = maybe_header(data, 3, 1)
    assert header is not None
    summary = summary_of(data, 3, header)
    wanted = (header.size, batch.gap is not None, header.next_offset, summary)
    assert maybe_glimpse(data, 3, 1) == wanted
    enough = 3 + HEADER_SIZE + len(summary)
    assert maybe_glimpse(data[:enough], 3, 1) == wanted
    assert maybe_glimpse(data[: enough - 1], 3, 1) is None
    assert maybe_glimpse(data, 3, 2) is None
    assert maybe_glimpse(data, 2, 1) is None


def test_batch_of_very_many_keys_has_no_summary_and_so_holds_anything() -> None:
    batch = RecordBatch(0, 1)
    keys = [str(number).encode() for number in range(2000)]
    batch.add(keys, [b""] * 2000, keys, timestamp_us=1, tags=("t",))
    data = stored(batch)
    header = maybe_header(data, 0, 1)
    assert header is not None and header.summary_size == 0
    assert may_hold(summary_of(data, 0, header), tag_hash("t"))


@given(st.lists(st.binary(max_size=9), min_size=1, max_size=30))
def test_cut_gives_back_what_was_joined(pieces: list[bytes]) -> None:
    blob = memoryview(b"".join(pieces))
    sizes = struct.pack(f"<{len(pieces)}I", *map(len, pieces))
    assert cut(blob, sizes, len(pieces), shared=False) == pieces
    alike = [pieces[0]] * 4
    assert cut(memoryview(b"".join(alike)), sizes[:4], 4, shared=False) == alike
    assert cut(memoryview(pieces[0]), sizes[:4], 4, shared=True) == alike


# -- damage -----------------------------------------------------------------------------------------------------


def is_noticed(data: bytes) -> bool:
    header = maybe_header(data, 0, 1)
    return header is None or not is_whole(data, 0, header)


def rich_batch() -> RecordBatch:
    batch = RecordBatch(1000, 4, None)
    batch.add([b"a", b"bb"], [b"p", b""], [b"one", b"three"], timestamp_us=77, tags=("eu", "vip"), route_set=(4, 5))
    batch.add([b"c"], [b""], [b"x" * 40], timestamp_us=78, headers=[((b"h", b"v"),)], expiry_us=9, origin=3)
    return batch


@pytest.mark.parametrize("compress", ["none", "lz4"])
def test_every_truncation_is_noticed(compress: str) -> None:
    data = stored(rich_batch(), compress=compress)
    for length in range(len(data)):
        assert is_noticed(data[:length]), length
        assert is_noticed(data[:length].ljust(len(data), b"\0")) or not any(data[length:]), length


@pytest.mark.parametrize("compress", ["none", "lz4"])
def test_every_flipped_bit_is_noticed(compress: str) -> None:
    data = bytearray(stored(rich_batch(), compress=compress))
    for position in range(len(data)):
        for bit in range(8):
            data[position] ^= 1 << bit
            assert is_noticed(bytes(data)), (position, bit)
            data[position] ^= 1 << bit
    assert not is_noticed(bytes(data))


@given(st.binary(max_size=400))
def test_garbage_is_no_batch(data: bytes) -> None:
    assert is_noticed(data)


def forged(data: bytearray) -> bytes:
    """The bytes with a hash that fits them, as only a broken writer could leave them."""
    digest = xxhash.xxh3_64_intdigest(bytes(data[HASHED_FROM:]))
    _magic, size, salt, _hash = PREFIX.unpack_from(data)
    return PREFIX.pack(BATCH_MAGIC, size, salt, digest) + bytes(data[HASHED_FROM:])


def touch_everything(data: bytes) -> None:
    header = maybe_header(data, 0, 1)
    if header is None:
        return
    with suppress(CorruptLog, UnknownFormat):
        batch = decode(data, 0, header)
        for index in range(batch.count):
            batch.offset_at(index)
            batch.timestamps.at(index)
            batch.expiries.at(index)
            batch.attributes.at(index)
            batch.origins.at(index)
            batch.tags_at(index)
            batch.route_sets[batch.routes.at(index)]
        assert len(batch.keys) == len(batch.values) == len(batch.properties) == header.record_count
        assert batch.headers is None or len(batch.headers) == header.record_count


@given(record_batches(), st.sampled_from(["none", "lz4"]), st.data())
def test_lies_under_a_right_hash_are_refused_in_our_own_words(
    batch: RecordBatch, compress: str, draw: st.DataObject
) -> None:
    data = bytearray(stored(batch, compress=compress))
    for _ in range(draw.draw(st.integers(1, 3))):
        position = draw.draw(st.integers(HASHED_FROM, len(data) - 1))
        data[position] = draw.draw(st.integers(0, 255))
    touch_everything(forged(data))


@given(record_batches())
def test_no_byte_of_the_fixed_block_can_lie_in_words_that_are_not_ours(batch: RecordBatch) -> None:
    data = bytearray(stored(batch))
    header = maybe_header(bytes(data), 0, 1)
    assert header is not None
    start = HEADER_SIZE + header.summary_size
    for position in range(start, start + header.fixed_size):
        true = data[position]
        data[position] = (true + 1) % 256
        touch_everything(forged(data))
        data[position] = true


@given(record_batches(), st.integers(0, 15), st.sampled_from([0, 1, 2, 3, 7, 255, 2**31, 2**31 + 1, 2**32 - 1]))
def test_wrong_counts_in_the_fixed_block_are_refused_in_our_own_words(
    batch: RecordBatch, place: int, number: int
) -> None:
    data = bytearray(stored(batch))
    header = maybe_header(bytes(data), 0, 1)
    assert header is not None
    counts = list(FIXED.unpack_from(data, HEADER_SIZE + header.summary_size))
    counts[place] = number
    FIXED.pack_into(data, HEADER_SIZE + header.summary_size, *counts)
    touch_everything(forged(data))


@given(record_batches(), st.sampled_from(["none", "lz4"]), st.sampled_from(BatchHeader._fields[4:]), st.data())
def test_wrong_header_fields_are_refused_in_our_own_words(
    batch: RecordBatch, compress: str, field: str, draw: st.DataObject
) -> None:
    data = bytearray(stored(batch, compress=compress))
    header = BatchHeader(*HEADER.unpack_from(data))
    if field == "producer_id":
        wrong = header._replace(producer_id=draw.draw(st.binary(min_size=16, max_size=16)))
    else:
        bits = 7 if field in ("version", "codec") else 15 if field == "flags" else 31
        number = draw.draw(st.integers(0, 2**bits))
        # Two lies that agree would be a batch of that many empty records, and lawful.
        if field in ("record_count", "span"):
            number = min(number, 1 << 16)
        wrong = header._replace(**{field: number})
    stored_size = HEADER_SIZE + wrong.summary_size + wrong.fixed_stored + wrong.blob_stored
    HEADER.pack_into(data, 0, *wrong._replace(size=min(stored_size, 2**32 - 1)))
    touch_everything(forged(data))


def reforged(header: BatchHeader, **changes: int) -> bytes:
    data = bytearray(stored(rich_batch()))
    HEADER.pack_into(data, 0, *header._replace(**changes))
    return forged(data)


@pytest.mark.parametrize(
    "changes", [{"version": 3}, {"version": 0}, {"codec": 2}, {"flags": 16}, {"flags": 2, "gap": 99}]
)
def test_what_a_later_release_may_write_is_unknown_and_not_corrupt(changes: dict[str, int]) -> None:
    header = maybe_header(stored(rich_batch()), 0, 1)
    assert header is not None
    data = reforged(header, **changes)
    found = maybe_header(data, 0, 1)
    assert found is not None and is_whole(data, 0, found)
    with pytest.raises(UnknownFormat, match="not known to this release"):
        decode(data, 0, found)


def test_block_that_claims_to_unpack_to_gigabytes_is_refused_before_memory_is_taken() -> None:
    data = bytearray(stored(rich_batch(), compress="lz4"))
    header = BatchHeader(*HEADER.unpack_from(data))
    assert header.fixed_stored < header.fixed_size
    HEADER.pack_into(data, 0, *header._replace(fixed_size=2**32 - 1))
    with pytest.raises(CorruptLog, match="cannot unpack"):
        decode_columns(bytes(data), 0, BatchHeader(*HEADER.unpack_from(data)))


# -- the head of a segment --------------------------------------------------------------------------------------

HEAD = SegmentHead(2**64 - 1, 12345, b"s" * 16, 7)


def test_segment_head_is_what_it_was_before_encoding() -> None:
    data = encode_segment_head(HEAD)
    assert len(data) == SEGMENT_HEAD_SIZE
    assert maybe_segment_head(data + b"more") == HEAD


def test_every_truncation_and_flipped_bit_of_a_segment_head_is_noticed() -> None:
    data = bytearray(encode_segment_head(HEAD))
    for length in range(len(data)):
        assert maybe_segment_head(bytes(data[:length])) is None
    for position in range(len(data)):
        for bit in range(8):
            data[position] ^= 1 << bit
            assert maybe_segment_head(bytes(data)) is None, (position, bit)
            data[position] ^= 1 << bit
