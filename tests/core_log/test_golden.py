"""The bytes on the disk do not change by accident: files written once decode, and are encoded to the same bytes."""

import msgspec
import pytest

from headrace.core_log.checkpoint import Checkpoint, CheckpointFile, read_checkpoint
from headrace.core_log.epochs import EpochHistory, EpochStart
from headrace.core_log.format import (
    SEGMENT_HEAD_SIZE,
    BatchHeader,
    SegmentHead,
    decode,
    decode_columns,
    encode,
    encode_segment_head,
    is_whole,
    maybe_header,
    maybe_segment_head,
    stamp,
    with_blobs,
)
from headrace.core_log.index import SparseIndex
from headrace.core_log.inspection import Tally, partition_of, streams, verify
from headrace.core_log.journal import entries
from headrace.core_log.key_index import KeyIndex
from headrace.core_log.producers import ProducerTable
from headrace.core_log.record import Gap, Producer, RecordBatch, RouteReference
from headrace.core_log.segment import Segment
from headrace.core_log.spec import StreamSpec, folder_of
from headrace.core_log.storage.memory import MemoryStorage

from .directories import MANY_ROUTES, NOW_US, commit, open_directory
from .golden_files import (
    CHECKPOINTS,
    CONFIG,
    END_OFFSET,
    GOLDEN,
    SALT,
    STREAM,
    batches,
    compacted,
    compressible,
    every_column,
    path_of,
    pieces,
    plain,
    segment_in,
)


def golden(name: str, version: int = 2) -> bytes:
    return path_of(name, version).read_bytes()


def header_at(data: bytes, position: int, salt: int) -> BatchHeader:
    header = maybe_header(data, position, salt)
    assert header is not None and is_whole(data, position, header)
    return header


def encoded_again(batch: RecordBatch, header: BatchHeader, compress: str = "none") -> bytes:
    return b"".join(
        stamp(
            encode(batch, compress=compress),
            salt=header.salt,
            base_offset=header.base_offset,
            leader_epoch=header.leader_epoch,
            durable_offset=header.durable_offset,
            leader_id=header.leader_id,
            first_of_segment=bool(header.flags & 1),
        )
    )


# lz4's own bytes may differ from release to release of lz4, and streams get new settings: those files are only read.
@pytest.mark.parametrize("name", sorted(set(GOLDEN) - {"batch-lz4", "stream.json"}))
def test_code_writes_what_the_golden_file_holds(name: str) -> None:
    assert GOLDEN[name]() == golden(name), "the format changed: see golden_files.py"


@pytest.mark.parametrize("name", ["batch-plain", "batch-every-column", "batch-compacted", "batch-gap"])
def test_batch_is_decoded_and_encoded_to_the_same_bytes(name: str) -> None:
    data = golden(name)
    header = header_at(data, 0, SALT)
    assert encoded_again(decode(data, 0, header), header) == data


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("name", "batch"),
    [
        ("batch-plain", plain()),
        ("batch-every-column", every_column()),
        ("batch-compacted", compacted()),
        ("batch-lz4", compressible()),
    ],
)
def test_batch_holds_what_was_put_in(name: str, batch: RecordBatch, version: int) -> None:
    data = golden(name, version)
    header = header_at(data, 0, SALT)
    assert header.version == version
    found = decode(data, 0, header)
    for column in ("keys", "properties", "values", "timestamps", "expiries", "attributes", "origins", "routes", "tags"):
        assert getattr(found, column) == getattr(batch, column), column
    assert (found.route_sets, found.tag_sets, found.offsets) == (batch.route_sets, batch.tag_sets, batch.offsets)
    assert (found.headers or [()] * 4) == (batch.headers or [()] * 4)
    assert (found.producer, found.span, found.epoch) == (batch.producer, batch.span, batch.epoch)
    assert (header.leader_id, header.durable_offset) == (2, 4)


def test_compressed_batch_is_smaller_than_what_it_holds() -> None:
    header = header_at(golden("batch-lz4"), 0, SALT)
    assert header.codec == 1
    assert header.size < header.blob_size


@pytest.mark.parametrize("name", ["batch-plain", "batch-every-column", "batch-compacted", "batch-lz4"])
def test_batch_of_version_1_tells_its_tags_with_and_without_its_blobs(name: str) -> None:
    data = golden(name, 1)
    header = header_at(data, 0, SALT)
    whole, without = decode_columns(data, 0, header), decode_columns(data, 0, header, blobs=False)
    assert without.tag_texts == whole.tag_texts
    assert with_blobs(without, data, 0) == whole
    assert decode_columns(data, 0, header, tags=False).values == whole.values


@pytest.mark.parametrize("version", [1, 2])
def test_gap_says_why(version: int) -> None:
    data = golden("batch-gap", version)
    gap = decode(data, 0, header_at(data, 0, SALT))
    assert (gap.gap, gap.base_offset, gap.next_offset) == (Gap.UNCLEAN_START, 50, 2**32)


def test_gap_of_an_election_by_force_says_so_and_whose_it_was() -> None:
    data = golden("batch-gap-of-an-election")
    header = header_at(data, 0, SALT)
    gap = decode(data, 0, header)
    assert (gap.gap, gap.base_offset, gap.next_offset) == (Gap.UNCLEAN_ELECTION, 50, 1_000_050)
    assert (header.leader_epoch, header.leader_id) == (3, 2)


def test_segment_is_walked_decoded_and_encoded_to_the_same_bytes() -> None:
    data = golden("segment")
    head = maybe_segment_head(data)
    assert head == SegmentHead(SALT, 0, STREAM.bytes, 0)
    again = encode_segment_head(head)
    found = []
    while len(again) < len(data):
        header = header_at(data, len(again), head.salt)
        found.append(decode(data, len(again), header))
        again += encoded_again(found[-1], header)
    assert again == data
    assert found[-1].next_offset == END_OFFSET
    assert found[1].route_sets == [(), MANY_ROUTES]
    assert found[2].route_sets == [(), RouteReference(2, 1)]


def loaded(*names: str) -> tuple[MemoryStorage, Segment]:
    """A storage with the golden segment and what belongs beside it."""
    storage = MemoryStorage()
    segment = segment_in(storage, "p", golden("segment"))
    for name in names:
        storage.replace_file(f"{segment.stem}.{name}", golden(name))
    return storage, segment


def test_indexes_lead_into_the_golden_segment_and_are_saved_as_the_same_bytes() -> None:
    storage, segment = loaded("index", "timeindex")
    index = SparseIndex.maybe_load(storage, segment.stem, segment.salt, 256, END_OFFSET, SEGMENT_HEAD_SIZE)
    assert index is not None
    positions = {header.base_offset: position for position, header in segment.headers()}
    assert len(index.offsets) > 2
    assert all(positions[offset] == position for offset, position in zip(index.offsets, index.positions, strict=True))
    index.save(storage, "p/other", segment.salt)
    assert storage.read_file("p/other.index") == golden("index")
    assert storage.read_file("p/other.timeindex") == golden("timeindex")


def test_key_index_leads_into_the_golden_segment_and_is_encoded_to_the_same_bytes() -> None:
    storage, segment = loaded("keys")
    keys = KeyIndex.maybe_load(storage, segment)
    assert keys is not None
    assert keys.batches_of(b"\xfe\xff") == [3]
    assert keys.encode(segment.salt, END_OFFSET) == golden("keys")


def test_watermark_is_read_and_written_again_to_the_same_bytes() -> None:
    storage = MemoryStorage()
    storage.replace_file("old", golden("watermark"))
    assert read_checkpoint(storage, "old") == CHECKPOINTS[1]
    file = CheckpointFile(storage, "new")
    file.create(CHECKPOINTS[0])
    file.write(CHECKPOINTS[1], sync=True)
    assert storage.read_file("new") == golden("watermark")


def test_producers_are_restored_and_encoded_to_the_same_bytes() -> None:
    table = ProducerTable(expiry_us=10**12, count_max=10)
    table.restore(golden("producers"))
    assert table.next_offset == 77
    assert table.unseen(Producer(b"a" * 16, 1, 3), 9, now_us=NOW_US) == [(5, 10)]
    assert table.encode(NOW_US) == golden("producers")


def test_journal_is_read() -> None:
    storage = MemoryStorage()
    storage.replace_file("journal", golden("journal"))
    found = list(entries(storage))
    assert [bytes(entry.data) for entry in found] == pieces()[1:3]
    assert [entry[:4] for entry in found] == [(STREAM, number, 0, SALT) for number in range(2)]
    assert [entry.position for entry in found] == [SEGMENT_HEAD_SIZE, SEGMENT_HEAD_SIZE + len(pieces()[1])]


def test_epochs_are_read_and_written_to_the_same_bytes() -> None:
    history = EpochHistory.decode(golden("epochs"))
    assert history.entries == (EpochStart(1, 0, 0), EpochStart(4, 2, 13))
    assert history.encode() == golden("epochs")


def test_stream_json_is_read() -> None:
    spec = msgspec.json.decode(golden("stream.json"), type=StreamSpec)
    assert (spec.name, spec.kind, spec.partition_count, spec.config, spec.format) == ("golden", "topic", 1, CONFIG, 1)


@pytest.mark.parametrize("version", [1, 2])
def test_directory_of_golden_files_is_opened_by_the_broker_and_verified(version: int) -> None:
    storage = MemoryStorage()
    segment = segment_in(storage, folder_of(STREAM, 0), golden("segment", version))
    storage.replace_file(f"{folder_of(STREAM)}/stream.json", golden("stream.json"))
    for name in ("index", "timeindex", "keys"):
        storage.replace_file(f"{segment.stem}.{name}", golden(name))
    end = len(golden("segment"))
    place = Checkpoint(0, 0, END_OFFSET, end, END_OFFSET, 3, 0)
    CheckpointFile(storage, f"{folder_of(STREAM, 0)}/watermark").create(place)
    (found,) = streams(storage)
    assert found.spec is not None
    assert list(verify(partition_of(storage, found.spec, 0), Tally())) == []
    log = open_directory(storage, clean=True).streams[STREAM].partitions[0]
    assert [run.batch.values for run in log.read(0)] == [batch.values for batch in batches()]
    assert log.read(3)[0].batch.route_set_at(0) == MANY_ROUTES
    assert log.read(0)[0].batch.tags_at(0) == ("eu", "vip")
    # What is appended now is of this version, in the same segment.
    log.append([b"k"], [b""], [b"new"], timestamp_us=NOW_US, tags=("eu",))
    commit(log)
    assert log.read(END_OFFSET)[0].batch.tags_at(0) == ("eu",)


def test_journal_of_version_1_is_read() -> None:
    storage = MemoryStorage()
    storage.replace_file("journal", golden("journal", 1))
    first, second = entries(storage)
    values = [decode(bytes(one.data), 0, header_at(bytes(one.data), 0, SALT)).values for one in (first, second)]
    assert values == [one.values for one in batches()[:2]]
