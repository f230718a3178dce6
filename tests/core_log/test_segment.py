"""One segment file: where its data ends, what is found behind that, and what a full disk leaves."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core_log.errors import CorruptLog, DiskFull
from headrace.core_log.format import HEADER_SIZE, SEGMENT_HEAD_SIZE, BatchHeader, SegmentHead, encode, stamp
from headrace.core_log.record import RecordBatch
from headrace.core_log.segment import GROWTH_BYTES_MAX, GROWTH_BYTES_MIN, Scan, Segment
from headrace.core_log.storage.memory import MemoryStorage

SALT = 0x0123_4567_89AB_CDEF
HEAD = SegmentHead(SALT, 100, b"s" * 16, 3)


def created(storage: MemoryStorage, *, recycled: str | None = None, head: SegmentHead = HEAD) -> Segment:
    return Segment.create(storage, ".", head, interval=200, recycled=recycled, now_us=0)


def add(segment: Segment, *values: bytes, epoch: int = 1, durable: int = 0) -> int:
    batch = RecordBatch(segment.end_offset, epoch)
    batch.add([b""] * len(values), [b""] * len(values), values, timestamp_us=segment.end_offset)
    body = encode(batch)
    buffers = stamp(body, salt=segment.salt, base_offset=segment.end_offset, leader_epoch=epoch, durable_offset=durable)
    return segment.append(buffers, body.size, batch.next_offset, body.max_timestamp)


def scanned(segment: Segment, epoch: int = 1) -> tuple[list[int], Scan]:
    """Offsets of the batches that a scan from the head accepts, and what it says at its end."""
    found: list[int] = []

    def visit(_position: int, header: BatchHeader) -> None:
        found.append(header.base_offset)

    return found, segment.scan(SEGMENT_HEAD_SIZE, segment.base_offset, epoch, visit)


def reopened(storage: MemoryStorage, segment: Segment) -> Segment:
    return Segment(storage, ".", segment.base_offset, segment.end_offset)


@given(st.lists(st.lists(st.binary(max_size=100_000), min_size=1, max_size=3), max_size=6))
@settings(max_examples=30)
def test_scan_finds_every_batch_and_the_end(groups: list[list[bytes]]) -> None:
    storage = MemoryStorage()
    segment = created(storage)
    positions = [add(segment, *group) for group in groups]
    again = reopened(storage, segment)
    found, end = scanned(again)
    assert len(found) == len(groups)
    assert end[:2] == (segment.end_offset, segment.end_position)
    assert [at for at, _header in segment.headers()] == positions
    for at, (_at, header) in zip(positions, segment.headers(), strict=True):
        assert segment.read_whole(at) == segment.read_whole(at, header)


def test_file_grows_ahead_of_the_data_in_steps_that_double() -> None:
    segment = created(MemoryStorage())
    sizes = {segment.file.size()}
    while segment.end_position < 3 * GROWTH_BYTES_MAX:
        add(segment, bytes(GROWTH_BYTES_MIN - HEADER_SIZE - 100))
        sizes.add(segment.file.size())
    ordered = sorted(sizes)
    assert ordered[0] == GROWTH_BYTES_MIN
    assert ordered[1:4] == [2 * ordered[0], 4 * ordered[0], 8 * ordered[0]]
    assert ordered[-1] - ordered[-2] == GROWTH_BYTES_MAX


def test_batch_larger_than_the_growth_step_finds_room() -> None:
    segment = created(MemoryStorage())
    add(segment, bytes(GROWTH_BYTES_MAX + 5))
    assert scanned(segment)[0] == [100]


def test_lower_epoch_behind_a_higher_one_is_not_ours() -> None:
    segment = created(MemoryStorage())
    add(segment, b"a", epoch=3)
    add(segment, b"b", epoch=2)
    found, end = scanned(segment)
    assert found == [100]
    assert end.epoch == 3


def test_scan_names_the_durable_offset_that_a_batch_behind_the_end_claims() -> None:
    storage = MemoryStorage()
    segment = created(storage)
    add(segment, b"a")
    damaged = add(segment, b"b")
    add(segment, b"c", durable=101)
    add(segment, b"d", durable=102)
    storage.flip_bit(segment.path, damaged + HEADER_SIZE)
    found, end = scanned(segment)
    assert (found, end.end_position, end.claimed_durable) == ([100], damaged, 102)


def test_batch_that_lies_across_two_pieces_of_the_search_is_found() -> None:
    segment = created(MemoryStorage())
    # The search reads in pieces of four MiB, and the salt of the second batch lies over the border.
    piece = 4 * 1024 * 1024
    empty = add(segment, b"")
    overhead = segment.end_position - empty
    add(segment, bytes(piece - 2 * overhead - 12))
    at = add(segment, b"across")
    found = [position for position, _header in segment.find_batches(SEGMENT_HEAD_SIZE, segment.file.size())]
    assert found[-1] == at
    assert len(found) == 3


def test_old_batches_of_a_recycled_file_are_not_found() -> None:
    storage = MemoryStorage()
    old = created(storage)
    add(old, b"old" * 20)
    add(old, b"old" * 20)
    storage.rename(old.path, "recycled")
    new = created(storage, recycled="recycled", head=HEAD._replace(salt=SALT + 1))
    assert new.file.size() == GROWTH_BYTES_MIN
    assert scanned(new)[0] == []
    add(new, b"new" * 20)
    assert scanned(reopened(storage, new))[0] == [100]
    assert list(new.find_batches(new.end_position, new.file.size())) == []


def test_cut_is_for_good_and_appending_goes_on_there() -> None:
    storage = MemoryStorage()
    segment = created(storage)
    add(segment, b"a")
    at = add(segment, b"b")
    add(segment, b"c")
    segment.cut(at, 101)
    storage = storage.after_power_loss(lambda _: True)
    assert scanned(reopened(storage, segment))[0] == [100]
    add(segment, b"d")
    assert scanned(segment)[0] == [100, 101]


def test_write_again_makes_safe_what_a_failed_sync_left_behind() -> None:
    storage = MemoryStorage()
    segment = created(storage)
    storage.sync_dir("")
    add(segment, b"a" * 300)
    storage.fail("sync")
    with pytest.raises(Exception, match="sync failed"):
        segment.file.sync()
    storage = storage.process_crash()
    again = reopened(storage, segment)
    again.end_position = segment.end_position
    again.file.sync()
    assert storage.after_power_loss(lambda _: False).read_file(segment.path) == b""
    again.write_again(0)
    left = storage.after_power_loss(lambda _: False)
    assert scanned(Segment(left, ".", 100, 101))[0] == [100]


@pytest.mark.parametrize("free", [0, 10, GROWTH_BYTES_MIN - 1])
def test_full_disk_leaves_no_half_of_a_segment(free: int) -> None:
    storage = MemoryStorage(capacity_bytes=free)
    with pytest.raises(DiskFull):
        created(storage)
    assert storage.list("") == []
    storage.capacity_bytes = None
    add(created(storage), b"a")


def test_every_offset_is_located_with_and_without_the_saved_index() -> None:
    storage = MemoryStorage()
    segment = created(storage)
    positions = {100 + 3 * number: add(segment, b"x" * 50, b"y", b"z") for number in range(20)}
    segment.save_index()
    for again in (reopened(storage, segment), reopened(storage, segment)):
        for offset in range(100, 160):
            assert again.locate(offset, 200) == positions[offset - (offset - 100) % 3]
        assert again.max_timestamp(200) == 157
        segment.remove_indexes()
    with pytest.raises(CorruptLog, match="no batch holds the offset"):
        segment.locate(160, 200)


def test_head_of_another_segment_is_refused() -> None:
    storage = MemoryStorage()
    segment = created(storage)
    storage.rename(segment.path, f"./{7:020d}.log")
    with pytest.raises(CorruptLog, match="head is not readable"):
        _ = Segment(storage, ".", 7, 8).salt
