"""Stored batches as Arrow columns: equal to what decode gives, and values stay where they were read."""

import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core_log import format
from headrace.core_log.arrow import OUTPUT_BYTES, SCHEMA, Stored, record_batches, schema, table
from headrace.core_log.errors import CorruptLog
from headrace.core_log.format import HASHED_FROM, decode, maybe_header
from headrace.core_log.inspection import Whole, batches, partition_of, streams
from headrace.core_log.record import PERSISTENT, RETAIN, Gap, Protocol, RecordBatch, gap_batch
from headrace.core_log.storage.memory import MemoryStorage

from .batches import COMPRESSIONS, stored
from .batches import record_batches as random_batches
from .directories import NOW_US, SMALL, add_stream, fill, open_directory
from .test_format import forged

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def placed(*data: bytes) -> list[Stored]:
    found = []
    for one in data:
        header = maybe_header(one, 0, 1)
        assert header is not None
        found.append(Stored(one, 0, header))
    return found


def rows(decoded: Sequence[RecordBatch]) -> list[dict[str, object]]:
    """What the columns must say, record by record."""
    return [
        {
            "key": record.key,
            "value": record.value,
            "offset": record.offset,
            "timestamp": record.timestamp_us,
            "properties": record.properties,
            "tags": list(record.tags),
            "tag": record.tags[0] if record.tags else None,
            "headers": [{"key": name.decode(errors="replace"), "value": value} for name, value in record.headers],
            "protocol": record.attributes & 15,
            "persistent": bool(record.attributes & PERSISTENT),
            "priority": record.attributes >> 16 & 255,
            "qos": record.attributes >> 5 & 3,
            "retain": bool(record.attributes & RETAIN),
            "expiry": record.expiry_us or None,
        }
        for batch in decoded
        for record in batch.records()
    ]


def found_rows(outputs: pa.Table) -> list[dict[str, object]]:
    """The table's rows, times as numbers: Python's datetime does not reach as far as ours."""
    for name in ("timestamp", "expiry"):
        if name in outputs.column_names:
            place = outputs.column_names.index(name)
            outputs = outputs.set_column(place, name, outputs.column(name).cast(pa.int64()))
    found: list[dict[str, object]] = outputs.to_pylist()
    return found


# A later batch has higher offsets, as in a log.
def in_order(drawn: list[RecordBatch]) -> list[RecordBatch]:
    at = 0
    for batch in drawn:
        shift = at - int(batch.base_offset)
        if batch.offsets is not None:
            batch.offsets = [offset + shift for offset in batch.offsets]
        batch.base_offset = type(batch.base_offset)(at)
        at += batch.span
    return drawn


several = st.lists(random_batches(references=False), min_size=1, max_size=5).map(in_order)


@given(several, st.sampled_from(COMPRESSIONS), st.sampled_from([1, 500, OUTPUT_BYTES]))
def test_columns_are_what_decode_gives(drawn: list[RecordBatch], compress: str, output_bytes: int) -> None:
    source = placed(*(stored(batch, compress=compress) for batch in drawn))
    outputs = list(record_batches(source, output_bytes=output_bytes))
    for output in outputs:
        output.validate(full=True)
        assert output.schema == SCHEMA
    assert found_rows(pa.Table.from_batches(outputs, SCHEMA)) == rows(drawn)


@given(several, st.data())
def test_range_of_offsets_is_cut_exactly(drawn: list[RecordBatch], draw: st.DataObject) -> None:
    last = int(drawn[-1].next_offset)
    start = draw.draw(st.integers(0, last))
    end = draw.draw(st.none() | st.integers(start, last))
    source = placed(*map(stored, drawn))
    found = table(source, ["offset", "value"], start=start, end=end)
    wanted = [
        {"offset": row["offset"], "value": row["value"]}
        for row in rows(drawn)
        if start <= int(str(row["offset"])) < (last + 1 if end is None else end)
    ]
    assert found.to_pylist() == wanted


@settings(max_examples=30)
@given(several, st.lists(st.sampled_from(SCHEMA.names), min_size=1, max_size=4, unique=True))
def test_columns_asked_for_come_in_that_order_and_no_others(drawn: list[RecordBatch], names: list[str]) -> None:
    found = table(placed(*(stored(batch, compress="lz4") for batch in drawn)), names)
    assert found.column_names == names
    assert found_rows(found) == [{name: row[name] for name in names} for row in rows(drawn)]


def large_batch(size: int = 200_000) -> RecordBatch:
    batch = RecordBatch(10, 1)
    count = 400
    values = [bytes([number % 251]) * (size // count) for number in range(count)]
    keys = [b"key %d" % number for number in range(count)]
    batch.add(keys, [b"p%d" % number for number in range(count)], values, timestamp_us=NOW_US)
    return batch


def address(data: bytes) -> range:
    start = pa.py_buffer(data).address
    return range(start, start + len(data))


@pytest.mark.parametrize("name", ["value", "key", "properties"])
def test_blobs_of_a_large_batch_lie_in_the_buffer_that_was_read(name: str) -> None:
    data = b"x" * 77 + stored(large_batch(OUTPUT_BYTES)) + b"y" * 77
    header = maybe_header(data, 77, 1)
    assert header is not None
    (output,) = record_batches([Stored(data, 77, header)])
    _validity, _offsets, blob = output.column(name).buffers()
    assert blob.address in address(data)
    assert blob.address + blob.size - 1 in address(data)


def test_compressed_batch_is_unpacked_once_and_not_copied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    unpacked: list[bytes] = []
    real = format.lz4.block.decompress

    def decompress(*arguments: object, **more: object) -> bytes:
        unpacked.append(real(*arguments, **more))
        return unpacked[-1]

    monkeypatch.setattr(format.lz4.block, "decompress", decompress)
    batch = large_batch(OUTPUT_BYTES)
    (output,) = record_batches(placed(stored(batch, compress="lz4")))
    assert len(unpacked) == 2
    blob = output.column("value").buffers()[2]
    assert blob.address in address(unpacked[1])
    assert found_rows(pa.Table.from_batches([output])) == rows([batch])


def test_blobs_stay_packed_when_no_column_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    (source,) = placed(stored(large_batch(), compress="lz4"))
    sizes: list[int] = []
    real = format.lz4.block.decompress

    def decompress(data: memoryview, uncompressed_size: int) -> bytes:
        sizes.append(uncompressed_size)
        return bytes(real(data, uncompressed_size=uncompressed_size))

    monkeypatch.setattr(format.lz4.block, "decompress", decompress)
    found = table([source], ["offset", "timestamp", "priority"])
    assert found.num_rows == 400
    assert sizes == [source.header.fixed_size]


def test_small_batches_are_joined_and_large_ones_stand_alone() -> None:
    small = [large_batch(20_000) for _ in range(100)]
    large = [large_batch(600_000) for _ in range(2)]
    drawn = in_order([*small, *large, *(large_batch(20_000) for _ in range(3))])
    outputs = list(record_batches(placed(*map(stored, drawn))))
    counts = [output.num_rows // 400 for output in outputs]
    assert counts[-3:] == [1, 1, 3]
    assert sum(counts) == 105
    assert all(count > 30 for count in counts[:-4])


def test_gap_gives_no_rows() -> None:
    batch = large_batch()
    gap = gap_batch(int(batch.next_offset), 5000, 1, Gap.UNCLEAN_START)
    assert table(placed(stored(batch), stored(gap))).num_rows == 400
    assert table(placed(stored(gap))).num_rows == 0


def test_key_that_all_share_is_there_for_each() -> None:
    batch = RecordBatch(0, 1)
    batch.add([b"same"] * 5, [b"also"] * 5, [b"%d" % number for number in range(5)], timestamp_us=1)
    found = table(placed(stored(batch)), ["key", "properties", "value"])
    assert found.column("key").to_pylist() == [b"same"] * 5
    assert found.column("properties").to_pylist() == [b"also"] * 5


def test_times_are_in_utc_to_the_microsecond() -> None:
    batch = RecordBatch(0, 1)
    batch.add([b"k"], [b""], [b"v"], timestamp_us=NOW_US + 1, expiry_us=NOW_US + 2, attributes=Protocol.MQTT_5)
    batch.add([b"k"], [b""], [b"v"], timestamp_us=-5)
    found = table(placed(stored(batch)))
    assert found.column("timestamp").to_pylist() == [
        EPOCH + timedelta(microseconds=NOW_US + 1),
        EPOCH - timedelta(microseconds=5),
    ]
    assert found.column("expiry").to_pylist() == [EPOCH + timedelta(microseconds=NOW_US + 2), None]
    assert found.column("protocol").to_pylist() == [3, 0]


def test_unknown_column_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="no column vlaue; there are key, value"):
        schema(["key", "vlaue"])


def test_batch_that_lies_under_a_right_hash_is_corrupt_and_not_a_crash() -> None:
    data = bytearray(stored(large_batch()))
    data[HASHED_FROM + 4] ^= 1
    with pytest.raises(CorruptLog):
        table(placed(forged(data)))


def test_partition_on_disk_is_read_as_a_table() -> None:
    storage = MemoryStorage()
    directory = open_directory(storage)
    (log,) = add_stream(directory, "one", SMALL).partitions
    for _ in range(3):
        fill(log)
    directory.close_now()
    (found,) = streams(storage)
    assert found.spec is not None
    partition = partition_of(storage, found.spec, 0)
    wholes = [item for _, item in batches(partition) if isinstance(item, Whole)]
    columns = table(Stored(item.data, item.at, item.header) for item in wholes)
    decoded = [decode(item.data, item.at, item.header) for item in wholes]
    assert columns.column("offset").to_pylist() == list(range(log.high_watermark))
    assert columns.column("value").to_pylist() == [value for batch in decoded for value in batch.values]


def test_only_this_file_of_the_log_needs_pyarrow() -> None:
    code = (
        "import pkgutil, sys, importlib, headrace.core_log as room\n"
        "for one in pkgutil.walk_packages(room.__path__, 'headrace.core_log.'):\n"
        "    if one.name != 'headrace.core_log.arrow': importlib.import_module(one.name)\n"
        "sys.exit('pyarrow' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
