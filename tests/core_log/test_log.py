"""A partition: what is read back, what a start finds, what is refused, what producers and deletes leave behind."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core_log import log as log_module
from headrace.core_log.bulk import BulkBatch, Cells
from headrace.core_log.checkpoint import read_checkpoint
from headrace.core_log.config import DirectoryConfig, LogConfig
from headrace.core_log.directory import LogDirectory
from headrace.core_log.errors import CorruptLog, DiskFull, OffsetOutOfRange, Refused, SequenceRefused
from headrace.core_log.format import HEADER_SIZE, SEGMENT_HEAD_SIZE, BatchHeader, maybe_header
from headrace.core_log.key_index import KeyIndex
from headrace.core_log.log import PartitionLog
from headrace.core_log.producers import WINDOW
from headrace.core_log.record import Gap, Producer
from headrace.core_log.segment import Segment
from headrace.core_log.spec import CHECKPOINT, EPOCHS, PRODUCERS
from headrace.core_log.storage.memory import MemoryStorage
from headrace.core_log.summary import key_hash, may_hold, tag_hash

from .power.inline import append, commit, create_logs, open_directory, values_of

SMALL = LogConfig(segment_bytes_max=1024, offsets_reserved=100, index_interval_bytes=1, compression="none")
PRODUCER = Producer(b"p" * 16, 0, 0)


class Disk:
    """One partition on a storage in memory, opened again and again."""

    def __init__(self, config: LogConfig = SMALL, directory: DirectoryConfig | None = None) -> None:
        self.storage = MemoryStorage()
        self._config = directory
        self.directory: LogDirectory = open_directory(self.storage, config=directory)
        (self.log,) = create_logs(self.directory, 1, config)

    @property
    def folder(self) -> str:
        return self.log.folder

    def write(self, *values: bytes) -> None:
        append(self.log, *values)
        self.commit()

    def commit(self) -> None:
        commit(self.directory, self.log)

    def send(self, first: int, *values: bytes, epoch: int = 0, dense: bool = False) -> int:
        """An idempotent publish, committed; returns how many records it added."""
        before = self.log.end
        append = self.log.append_dense if dense else self.log.append_once
        append(
            PRODUCER._replace(first_sequence=first, epoch=epoch),
            [b"k"] * len(values),
            [b""] * len(values),
            values,
            timestamp_us=1,
        )
        self.commit()
        return self.log.end - before

    def close(self) -> PartitionLog:
        self.directory.close_now()
        self.storage = self.storage.process_crash()
        return self._open(clean=True)

    def crash(self) -> PartitionLog:
        self.storage = self.storage.process_crash()
        return self._open(clean=False)

    def lose_power(self) -> PartitionLog:
        self.storage = self.storage.after_power_loss(lambda _: False)
        return self._open(clean=False)

    def _open(self, *, clean: bool) -> PartitionLog:
        self.directory = open_directory(self.storage, clean=clean, config=self._config)
        (stream,) = self.directory.streams.values()
        (self.log,) = stream.partitions
        return self.log


# -- reading


@given(
    st.lists(st.lists(st.binary(max_size=300), min_size=1, max_size=5), min_size=1, max_size=12),
    st.sampled_from((1, 300, 100_000)),
    st.sampled_from((1, 1 << 20)),
    st.booleans(),
)
@settings(max_examples=60)
def test_every_record_is_read_from_every_offset(
    groups: list[list[bytes]], bytes_max: int, cache: int, reopened: bool
) -> None:
    disk = Disk(directory=DirectoryConfig(tail_cache_bytes_max=cache, index_cache_count_max=1))
    for group in groups:
        disk.write(*group)
    log = disk.close() if reopened else disk.log
    expected = [value for group in groups for value in group]
    for start in range(len(expected) + 1):
        offset, found = start, list[bytes]()
        while offset < log.high_watermark:
            for batch, first, last in log.read(offset, bytes_max=bytes_max):
                found += batch.values[first:last]
                offset = batch.next_offset
        assert found == expected[start:]


@pytest.mark.parametrize("size", [0, 1_000])
def test_a_read_of_what_packs_well_is_bounded_by_what_it_is_unpacked(size: int) -> None:
    disk = Disk(LogConfig(compression="lz4"), directory=DirectoryConfig(tail_cache_bytes_max=1))
    for _ in range(20):
        disk.write(*[b"x" * size] * 200)
    batch_bytes = 200 * (size + 16)
    limits = (1, batch_bytes * 5 // 2, batch_bytes * 100)
    assert disk.log.byte_count < limits[1] or not size, "all that is stored is less than the limit"
    counts = [sum(run.last - run.first for run in disk.log.read(0, bytes_max=limit)) for limit in limits]
    assert counts == [200, 600, 4_000]


def test_reads_outside_the_log_name_both_ends() -> None:
    disk = Disk()
    disk.write(b"a", b"b", b"c")
    disk.log.delete_before(1)
    for offset in (0, 4):
        with pytest.raises(OffsetOutOfRange) as refused:
            disk.log.read(offset)
        assert (refused.value.asked, refused.value.first, refused.value.end) == (offset, 1, 3)
    assert disk.log.read(3) == []


def test_v1_nobody_reads_beyond_the_high_watermark_unless_told_how_far() -> None:
    disk = Disk()
    disk.write(b"a")
    append(disk.log, b"b")
    assert [run.last - run.first for run in disk.log.read(0)] == [1]
    assert disk.log.early_end == 2
    (run, early) = disk.log.read(0, end=2)
    assert (run.batch.values, early.batch.values) == ([b"a"], [b"b"])


def test_batch_that_somebody_made_stands_behind_what_was_gathered_and_is_read_like_any_other() -> None:
    disk = Disk()
    disk.write(b"a")
    append(disk.log, b"b")
    ones, zeros = np.ones(2, dtype=np.int64), np.zeros(2, dtype=np.int64)
    keys, properties, values = Cells(2, shared=b"k"), Cells(2, shared=b""), Cells(2, various=[b"c", b"d"])
    dues = np.array([7, 8])
    made = BulkBatch(ones, dues, zeros, zeros, ones, [(), ("red",)], keys, properties, values)
    assert disk.log.append_bulk(made) == 2
    append(disk.log, b"e")
    disk.commit()
    assert list(values_of(disk.log).values()) == [b"a", b"b", b"c", b"d", b"e"]
    log = disk.close()
    assert list(values_of(log).values()) == [b"a", b"b", b"c", b"d", b"e"]
    records = [batch.record(index) for batch, first, last in log.read(2, end=4) for index in range(first, last)]
    assert [(one.offset, one.expiry_us, one.tags) for one in records] == [(2, 7, ("red",)), (3, 8, ("red",))]


def test_index_that_leads_to_another_batch_is_refused_and_not_believed() -> None:
    disk = Disk()
    for number in range(3):
        disk.write(b"%d" % number)
    log = disk.close()
    (segment,) = log.segments
    segment.locate(0, SMALL.index_interval_bytes)
    assert segment.index is not None
    for wrong in (0, 2):
        segment.index.positions[1] = segment.index.positions[wrong]
        with pytest.raises(CorruptLog, match="leads to another batch"):
            log.read(1)


def test_reader_that_stops_inside_a_batch_sees_no_more_of_it() -> None:
    disk = Disk()
    disk.write(b"a", b"b", b"c", b"d")
    (run,) = disk.log.read(1, end=3)
    assert run.batch.values[run.first : run.last] == [b"b", b"c"]


def test_large_route_set_is_spelled_out_once_in_a_segment_and_read_everywhere() -> None:
    disk = Disk(LogConfig(segment_bytes_max=3000, compression="none"))
    routes = tuple(range(100))
    sizes = []
    for number in range(8):
        disk.log.append([b""], [b""], [b"%d" % number * 300], timestamp_us=1, route_set=routes)
        position = disk.log.segments[-1].end_position if disk.log.segments else 0
        disk.commit()
        sizes.append(disk.log.segments[-1].end_position - position)
    assert len(disk.log.segments) > 1
    log = disk.close()
    found = [run.batch.route_set_at(0) for offset in range(8) for run in log.read(offset, bytes_max=1)]
    assert found == [routes] * 8
    assert sizes[1] < 400 + len(routes) * 4 < sizes[0]


def test_scan_passes_over_batches_that_cannot_match() -> None:
    disk = Disk(LogConfig(compression="none"))
    for number in range(20):
        disk.log.append([b"key %d" % number], [b""], [b""], timestamp_us=1, tags=("odd",) if number % 2 else ())
        disk.commit()
    by_key = [batch.base_offset for batch in disk.log.scan(0, [key_hash(b"key 7")])]
    by_tag = [batch.base_offset for batch in disk.log.scan(0, [tag_hash("odd")])]
    assert by_key == [7]
    assert by_tag == list(range(1, 20, 2))
    assert list(disk.log.scan(8, [key_hash(b"key 7")])) == []


def test_raw_slices_are_whole_batches_one_behind_the_other() -> None:
    disk = Disk()
    for number in range(6):
        disk.write(b"%d" % number * 200)
    offset, found = 0, 0
    while (piece := disk.log.read_raw(offset, bytes_max=500)) is not None:
        assert piece.first_offset == offset
        data = piece.segment.file.read(piece.position, piece.length)
        header = maybe_header(data, 0, piece.segment.salt)
        assert header is not None and header.base_offset == offset
        offset = piece.next_offset
        found += 1
    assert (offset, found > 1) == (6, True)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=25), st.integers(-1, 41), st.integers(0, 5))
@settings(max_examples=60)
def test_offset_at_time_is_the_first_record_not_older(times: list[int], asked: int, deleted: int) -> None:
    disk = Disk()
    for place, time in enumerate(times):
        disk.log.append([b""], [b""], [bytes(100)], timestamp_us=time)
        if place % 3 == 0:
            disk.commit()
    disk.commit()
    disk.log.delete_before(min(deleted, len(times)))
    start = int(disk.log.log_start)
    expected = next((place for place in range(start, len(times)) if times[place] >= asked), len(times))
    assert disk.log.offset_at_time(asked) == expected


def test_offset_at_time_knows_an_empty_segment_that_a_full_disk_left() -> None:
    disk = Disk()
    disk.write(b"a" * 900)
    append(disk.log, b"b" * 200_000)
    # Room for the new segment's head and its first zeros, not for the batch.
    disk.storage.capacity_bytes = disk.storage.open(disk.log.segments[0].path).size() + 70 * 1024
    with pytest.raises(DiskFull):
        disk.log.seal()
    assert disk.log.segments[-1].is_empty
    assert disk.log.offset_at_time(0) == 0
    assert disk.log.offset_at_time(5) == 1


def test_retention_knows_an_empty_segment_that_a_full_disk_left() -> None:
    disk = Disk(LogConfig(segment_bytes_max=1024, compression="none", retention_ms=1))
    disk.write(b"a" * 900)
    append(disk.log, b"b" * 200_000)
    disk.storage.capacity_bytes = disk.storage.open(disk.log.segments[0].path).size() + 70 * 1024
    with pytest.raises(DiskFull):
        disk.log.seal()
    assert disk.log.segments[-1].is_empty
    assert disk.log.expired(1 << 60) == 1
    # Also when nothing of it is in memory.
    disk.log.segments[-1].index = None
    assert disk.log.expired(1 << 60) == 1


# -- K3: what was seen is never issued again


def test_k3_clean_stop_goes_on_where_it_stopped() -> None:
    disk = Disk()
    disk.write(b"a", b"b")
    log = disk.close()
    assert (log.end, log.high_watermark, log.epoch) == (2, 2, 1)
    disk.write(b"c")
    assert values_of(log) == {0: b"a", 1: b"b", 2: b"c"}


def test_k3_unclean_start_goes_on_above_the_ceiling_in_a_new_epoch_behind_a_typed_gap() -> None:
    disk = Disk()
    disk.write(b"a")
    append(disk.log, b"seen early")
    assert disk.log.early_end == 2
    log = disk.lose_power()
    assert log.end == log.high_watermark == 101
    assert log.epoch == 2
    disk.write(b"b")
    gaps = [(run.batch.base_offset, run.batch.next_offset, run.batch.gap) for run in log.read(1, bytes_max=1)]
    assert gaps == [(1, 101, Gap.UNCLEAN_START)]
    assert values_of(log) == {0: b"a", 101: b"b"}


def test_k3_nothing_is_shown_early_before_its_ceiling_is_on_the_disk() -> None:
    disk = Disk()
    append(disk.log, b"a")
    disk.log.seal()
    append(disk.log, b"b")
    assert (disk.log.end, disk.log.early_end) == (2, 0)
    disk.commit()
    append(disk.log, *[b"c"] * 150)
    assert (disk.log.end, disk.log.early_end) == (152, 102)


def test_start_after_a_start_writes_no_second_gap() -> None:
    disk = Disk()
    disk.write(b"a")
    for _ in range(3):
        assert disk.lose_power().end == 101
    assert disk.log.epoch == 2


def test_gap_larger_than_a_batch_can_span_is_written_in_pieces() -> None:
    disk = Disk(LogConfig(offsets_reserved=3 << 32))
    disk.write(b"a")
    log = disk.lose_power()
    assert log.end == (3 << 32) + 1
    disk.write(b"b")
    assert values_of(log) == {0: b"a", (3 << 32) + 1: b"b"}


# -- D7: torn tail or damage


def batches_of(disk: Disk) -> list[tuple[Segment, int, BatchHeader]]:
    return [(segment, at, header) for segment in disk.log.segments for at, header in segment.headers()]


def three_commits() -> tuple[Disk, list[tuple[Segment, int, BatchHeader]]]:
    """Batches 0, 1, 2 in one segment; the checkpoint was written with batch 0, batch 2 says that 1 was safe."""
    disk = Disk(LogConfig(compression="none"))
    for value in (b"a", b"b", b"c"):
        disk.write(value * 50)
    batches = batches_of(disk)
    checkpoint = read_checkpoint(disk.storage, f"{disk.folder}/{CHECKPOINT}")
    assert checkpoint is not None and checkpoint.offset == 1
    assert [header.durable_offset for _, _, header in batches] == [0, 1, 2]
    return disk, batches


@pytest.mark.parametrize("byte", [0, 6, 10, 20, 30, HEADER_SIZE + 5, HEADER_SIZE + 40])
def test_d7_damage_with_a_later_batch_that_knew_it_safe_is_refused_with_its_place(byte: int) -> None:
    disk, batches = three_commits()
    segment, at, header = batches[1]
    disk.storage.flip_bit(segment.path, at + byte)
    with pytest.raises(CorruptLog) as refused:
        disk.crash()
    assert (refused.value.path, refused.value.position, refused.value.offset) == (segment.path, at, header.base_offset)


@pytest.mark.parametrize("byte", [0, 6, 10, 20, 30, HEADER_SIZE + 5, HEADER_SIZE + 40])
def test_d7_damage_to_the_last_batch_beyond_the_checkpoint_is_a_torn_tail(byte: int) -> None:
    disk, batches = three_commits()
    segment, at, _header = batches[2]
    disk.storage.flip_bit(segment.path, at + byte)
    assert values_of(disk.crash()) == {0: b"a" * 50, 1: b"b" * 50}


def test_d7_bad_batch_before_one_that_knew_nothing_of_it_is_a_torn_tail() -> None:
    disk = Disk(LogConfig(compression="none"))
    disk.write(b"a" * 50)
    for value in (b"b", b"c"):
        append(disk.log, value * 50)
        disk.log.seal()
    segment, at, _header = batches_of(disk)[1]
    disk.storage.flip_bit(segment.path, at + HEADER_SIZE)
    assert values_of(disk.crash()) == {0: b"a" * 50}


def test_d7_damage_below_the_checkpoint_is_not_cut_and_is_refused_when_read() -> None:
    disk, batches = three_commits()
    segment, at, _header = batches[0]
    disk.storage.flip_bit(segment.path, at + HEADER_SIZE + 1)
    log = disk.crash()
    with pytest.raises(CorruptLog) as refused:
        log.read(0)
    assert (refused.value.path, refused.value.position, refused.value.offset) == (segment.path, at, 0)
    assert log.end >= 3


def test_d7_cut_segment_of_committed_records_is_refused() -> None:
    disk, batches = three_commits()
    segment, at, _header = batches[1]
    disk.close()
    file = disk.storage.open(segment.path)
    file.truncate(at)
    with pytest.raises(CorruptLog):
        disk.crash()


@pytest.mark.parametrize("which", [0, 1, -2, -1])
def test_missing_segment_is_refused_at_the_start_or_when_it_is_read(which: int) -> None:
    disk = Disk()
    for number in range(5):
        disk.write(b"%d" % number * 700)
    disk.storage.remove(disk.log.segments[which].path)
    with pytest.raises(CorruptLog):
        values_of(disk.crash())


def test_missing_first_segment_is_not_taken_for_a_delete_after_a_clean_stop() -> None:
    disk = Disk()
    for number in range(3):
        disk.write(b"%d" % number * 700)
    path = disk.log.segments[0].path
    disk.directory.close_now()
    disk.storage.remove(path)
    with pytest.raises(CorruptLog, match="log start"):
        disk._open(clean=True)


def garbled(storage: MemoryStorage, path: str) -> None:
    storage.flip_bit(path, len(storage.read_file(path)) // 2)


def emptied(storage: MemoryStorage, path: str) -> None:
    storage.open(path).truncate(0)


def removed(storage: MemoryStorage, path: str) -> None:
    storage.remove(path)


@pytest.mark.parametrize("damage", [removed, garbled, emptied])
@pytest.mark.parametrize("suffix", [".index", ".timeindex", ".keys", EPOCHS, PRODUCERS, CHECKPOINT])
@pytest.mark.parametrize("clean", [True, False])
def test_p11_derived_files_are_rebuilt(damage: Callable[[MemoryStorage, str], None], suffix: str, clean: bool) -> None:
    disk = Disk(LogConfig(segment_bytes_max=1024, index_interval_bytes=1, compression="none"))
    for number in range(6):
        disk.send(number, b"%d" % number * 300)
    for segment in disk.log.segments[:-1]:
        KeyIndex.build(disk.storage, segment)
    disk.log.begin_epoch(5, 2)
    disk.send(6, b"last")
    expected, history = values_of(disk.log), disk.log.epochs.entries
    keys = [KeyIndex.load(disk.storage, segment).keys for segment in disk.log.segments[:-1]]
    if clean:
        disk.directory.close_now()
    paths = [f"{disk.folder}/{name}" for name in disk.storage.list(disk.folder) if name.endswith(suffix)]
    assert paths
    for path in paths:
        # The slot of the checkpoint that is not in use may hold anything.
        if suffix == CHECKPOINT and damage is garbled:
            for position in (30, 542):
                disk.storage.flip_bit(path, position)
        else:
            damage(disk.storage, path)
    log = disk._open(clean=clean)
    assert values_of(log) == expected
    assert [KeyIndex.load(disk.storage, segment).keys for segment in log.segments[: len(keys)]] == keys
    assert log.epochs.entries[: len(history)] == history
    assert log.epoch >= 5
    assert log.offset_at_time(0) == 0
    assert disk.send(0, *[b"again"] * 7) == 0
    assert disk.send(7, b"new") == 1


def test_lost_checkpoint_costs_offsets_and_never_issues_one_twice() -> None:
    disk = Disk()
    disk.write(b"a", b"b")
    disk.storage.remove(f"{disk.folder}/{CHECKPOINT}")
    assert disk.crash().end >= 2 + SMALL.offsets_reserved


# -- deletes and retention


def test_must_show_delete_all_restart_resend_is_acknowledged_and_adds_nothing() -> None:
    for restart in (Disk.close, Disk.crash, Disk.lose_power):
        disk = Disk()
        assert disk.send(0, b"a" * 600, b"b" * 600) == 2
        assert disk.send(2, b"c" * 600) == 1
        disk.log.delete_before(disk.log.high_watermark)
        disk.commit()
        log = restart(disk)
        end = log.end
        assert values_of(log) == {}
        assert disk.send(0, b"a" * 600, b"b" * 600) == 0
        assert disk.send(1, b"b" * 600, b"c" * 600) == 0
        assert log.end == end
        assert disk.send(3, b"d") == 1


def test_o4_delete_inside_a_segment_forgets_no_producer() -> None:
    disk = Disk(LogConfig())
    disk.send(0, b"a", b"b")
    disk.send(2, b"c")
    disk.log.delete_before(3)
    disk.commit()
    disk.lose_power()
    assert disk.send(0, b"a", b"b", b"c") == 0


def test_committed_delete_survives_and_frees_its_segments() -> None:
    disk = Disk(directory=DirectoryConfig(removal_delay_ms=1))
    for number in range(5):
        disk.write(b"%d" % number * 700)
    assert disk.log.delete_before(3) == 3
    disk.commit()
    assert [segment.base_offset for segment in disk.log.segments] == [3, 4]
    log = disk.lose_power()
    assert (log.log_start, [segment.base_offset for segment in log.segments][:2]) == (3, [3, 4])
    assert set(values_of(log)) == {3, 4}


def test_bytes_from_an_offset_on_are_those_of_the_segments_that_hold_it_or_later_ones() -> None:
    disk = Disk()
    for number in range(5):
        disk.write(b"%d" % number * 700)
    log = disk.log
    sizes = [segment.end_position for segment in log.segments]
    assert [log.bytes_from(offset) for offset in range(6)] == [sum(sizes[offset:]) for offset in range(6)]
    assert log.bytes_from(0) == log.byte_count


def test_uncommitted_delete_takes_no_file_with_it() -> None:
    disk = Disk()
    for number in range(5):
        disk.write(b"%d" % number * 700)
    append(disk.log, b"more")
    disk.log.seal()
    job = disk.log.begin_sync()
    assert job is not None
    # Asked for while the sync is under way: its checkpoint knows nothing of it.
    disk.log.delete_before(4)
    disk.log.run_sync(job)
    disk.log.finish_sync(job)
    assert disk.log.segments[0].base_offset == 0
    assert set(values_of(disk.lose_power())) == set(range(6))


def test_delete_beyond_the_high_watermark_stops_there_and_below_the_start_does_nothing() -> None:
    disk = Disk()
    disk.write(b"a", b"b")
    append(disk.log, b"c")
    assert disk.log.delete_before(100) == 2
    assert disk.log.delete_before(1) == 2
    disk.commit()
    assert values_of(disk.log) == {2: b"c"}


def test_x5_delete_on_a_full_disk_still_frees_what_it_can() -> None:
    disk = Disk()
    for number in range(3):
        disk.write(b"%d" % number * 700)
    disk.storage.capacity_bytes = 0
    assert disk.log.delete_before(3) == 3
    disk.storage.capacity_bytes = None
    disk.commit()
    assert disk.log.log_start == 3
    assert [segment.base_offset for segment in disk.log.segments] == [2]


def test_retention_by_bytes_and_by_age_stops_at_what_somebody_pins() -> None:
    aged = Disk(LogConfig(segment_bytes_max=1024, compression="none", retention_ms=1))
    sized = Disk(LogConfig(segment_bytes_max=1024, compression="none", retention_ms=None, retention_bytes=2500))
    for disk in (aged, sized):
        for number in range(6):
            disk.log.append([b""], [b""], [b"%d" % number * 700], timestamp_us=number * 1000)
            disk.commit()
    assert aged.log.expired(4_001) == 4
    assert aged.log.expired(5_001) == 5
    # With nothing new at all the segment that was written last goes too.
    assert aged.log.expired(1 << 60) == 6
    assert aged.log.expired(1 << 60, pinned_from=2) == 2
    aged.log.append([b""], [b""], [b"new"], timestamp_us=0)
    assert aged.log.expired(1 << 60) == 5
    assert sized.log.byte_count > 2500
    assert sized.log.expired(0) == 4
    assert sized.log.expired(0, pinned_from=1) == 1


def test_log_that_was_let_go_of_whole_goes_on_where_it_was() -> None:
    disk = Disk(LogConfig(retention_ms=1))
    disk.write(b"a", b"b")
    log = disk.log
    assert log.delete_before(log.expired(1 << 60)) == 2
    disk.commit()
    assert log.expired(1 << 60) == 2
    disk.write(b"c")
    assert values_of(log) == {2: b"c"}
    assert values_of(disk.lose_power()) == {2: b"c"}


def test_short_retention_by_age_makes_short_segments() -> None:
    assert LogConfig().segment_ms == LogConfig().segment_ms_max
    assert LogConfig(retention_ms=None).segment_ms == LogConfig().segment_ms_max
    assert LogConfig(retention_ms=3_600_000).segment_ms == 900_000
    assert LogConfig(retention_ms=1).segment_ms == 1000


def test_retention_by_bytes_counts_what_is_stored_and_not_the_room_for_it_after_a_start() -> None:
    disk = Disk(LogConfig(segment_bytes_max=1024, compression="none", retention_ms=None, retention_bytes=2500))
    for number in range(6):
        disk.write(b"%d" % number * 700)
    before = disk.log.byte_count, disk.log.expired(0)
    log = disk.close()
    assert (log.byte_count, log.expired(0)) == before


def test_compacted_stream_is_not_taken_by_retention() -> None:
    disk = Disk(LogConfig(segment_bytes_max=1024, cleanup="compact", retention_ms=1))
    for number in range(4):
        disk.write(b"%d" % number * 700)
    assert disk.log.expired(1 << 60) == 0


# -- producers


def test_o4_resend_is_written_once_whether_open_written_or_committed() -> None:
    disk = Disk()
    log = disk.log
    steps: list[Callable[[], object]] = [lambda: None, log.seal, disk.commit]
    for step in steps:
        log.append_once(PRODUCER, [b"k"] * 2, [b""] * 2, [b"a", b"b"], timestamp_us=1)
        step()
    assert values_of(log) == {0: b"a", 1: b"b"}


def test_resend_waits_for_the_commit_of_what_it_repeats() -> None:
    disk = Disk()
    told: list[str] = []
    first = disk.log.append_once(PRODUCER, [b"k"], [b""], [b"a"], timestamp_us=1)
    again = disk.log.append_once(PRODUCER, [b"k"], [b""], [b"a"], timestamp_us=1)
    assert again[0].run is None
    disk.log.when_committed(first[-1].next_offset, lambda: told.append("first"))
    disk.log.when_committed(again[-1].next_offset, lambda: told.append("again"))
    assert told == []
    disk.commit()
    assert told == ["first", "again"]


def test_holes_of_a_resend_are_filled_and_the_rest_left_alone() -> None:
    disk = Disk()
    disk.send(1, b"1")
    disk.send(3, b"3")
    assert disk.send(0, b"0", b"1", b"2", b"3", b"4") == 3
    assert sorted(values_of(disk.log).values()) == [b"0", b"1", b"2", b"3", b"4"]


def test_refused_sequence_takes_nothing() -> None:
    disk = Disk()
    disk.send(0, b"a")
    with pytest.raises(SequenceRefused):
        disk.send(2, b"c", dense=True)
    disk.commit()
    assert values_of(disk.log) == {0: b"a"}


def test_numbers_of_an_outbox_are_seen_however_long_ago_they_came() -> None:
    disk = Disk()
    for first in range(0, 3 * WINDOW, 1024):
        disk.send(first, *[b"x"] * 1024, dense=True)
    assert disk.send(0, b"x", dense=True) == 0
    assert disk.log.next_sequence(PRODUCER.id, 0) == 3 * WINDOW
    assert disk.send(3 * WINDOW - 1, b"x", b"new", dense=True) == 1


@pytest.mark.parametrize("settle", [lambda disk: None, lambda disk: disk.log.seal(), lambda disk: disk.commit()])
def test_the_next_number_of_an_outbox_counts_what_is_gathered_too(settle: Callable[[Disk], None]) -> None:
    disk = Disk()
    assert disk.log.next_sequence(PRODUCER.id, 0) == 0
    disk.log.append_dense(PRODUCER, [b"k"] * 2, [b""] * 2, [b"a", b"b"], timestamp_us=1)
    settle(disk)
    assert disk.log.next_sequence(PRODUCER.id, 0) == 2


@pytest.mark.parametrize("meanwhile", ["nobody", "others", "the outbox"])
def test_numbers_are_found_a_piece_at_a_time_while_others_use_the_log(
    monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    monkeypatch.setattr(log_module, "PRODUCERS_PIECE_BYTES", 1)
    # All in one segment, of which no snapshot speaks.
    disk = Disk(replace(SMALL, segment_bytes_max=1 << 20))
    for number in range(10):
        disk.send(number, b"%d" % number, dense=True)
    log = disk.crash()
    pieces = 0
    for _ in log.loading_producers():
        pieces += 1
        if pieces == 5:
            if meanwhile == "others":
                disk.write(b"somebody else's")
            elif meanwhile == "the outbox":
                assert disk.send(9, b"9", b"10", dense=True) == 1
    # One for each batch, and the gap that the crash left.
    assert pieces == {"nobody": 11, "others": 12, "the outbox": 5}[meanwhile]
    assert log.next_sequence(PRODUCER.id, 0) == (11 if meanwhile == "the outbox" else 10)
    assert list(log.loading_producers()) == []


def test_appends_of_an_outbox_that_follow_one_another_share_a_batch() -> None:
    disk = Disk()
    for number in range(3):
        producer = PRODUCER._replace(first_sequence=number)
        disk.log.append_dense(producer, [b"k"], [b""], [b"%d" % number], timestamp_us=number, tags=(f"t{number}",))
    disk.commit()
    (run,) = disk.log.read(0)
    assert run.batch.values == [b"0", b"1", b"2"]
    assert run.batch.producer == PRODUCER._replace(dense=True)


def test_an_outbox_that_has_settled_what_the_log_lost_goes_on_behind_it() -> None:
    disk = Disk()
    producer = PRODUCER._replace(first_sequence=5)
    with pytest.raises(SequenceRefused, match="leaves a gap"):
        disk.log.append_dense(producer, [b"k"], [b""], [b"a"], timestamp_us=1, settled=4)
    disk.log.append_dense(producer, [b"k"], [b""], [b"a"], timestamp_us=1, settled=5)
    assert disk.log.next_sequence(PRODUCER.id, 0) == 6


def test_a_generation_of_an_outbox_that_is_over_is_refused() -> None:
    disk = Disk()
    disk.send(0, b"a", epoch=2, dense=True)
    with pytest.raises(SequenceRefused, match="fenced"):
        disk.send(1, b"b", epoch=1, dense=True)
    assert disk.log.next_sequence(PRODUCER.id, 3) == 0


def test_o4_lost_record_is_not_acknowledged_though_a_delete_was_committed_around_it() -> None:
    disk = Disk()
    for number in range(3):
        disk.write(b"%d" % number * 700)
    disk.log.delete_before(2)
    disk.log.seal()
    job = disk.log.begin_sync()
    assert job is not None
    # Published while the sync is under way; the snapshot of producers that this commit saves must not know it.
    disk.log.append_once(PRODUCER, [b"k"], [b""], [b"a"], timestamp_us=1)
    disk.log.seal()
    disk.log.run_sync(job)
    disk.log.finish_sync(job)
    disk.lose_power()
    assert disk.send(0, b"a") == 1


# -- a full disk, sizes, epochs


def test_full_disk_keeps_the_open_batch_and_goes_on_when_there_is_room() -> None:
    disk = Disk()
    disk.write(b"a" * 900)
    append(disk.log, b"b" * 900)
    disk.storage.capacity_bytes = 0
    for _ in range(3):
        with pytest.raises(DiskFull):
            disk.log.seal()
    disk.storage.capacity_bytes = None
    disk.commit()
    assert values_of(disk.lose_power()) == {0: b"a" * 900, 1: b"b" * 900}


def test_append_that_finds_no_room_for_the_batch_before_takes_nothing() -> None:
    disk = Disk(LogConfig(batch_bytes_max=10))
    append(disk.log, b"a" * 20)
    disk.storage.capacity_bytes = 0
    with pytest.raises(DiskFull):
        append(disk.log, b"b" * 20)
    disk.storage.capacity_bytes = None
    disk.commit()
    assert values_of(disk.log) == {0: b"a" * 20}


@pytest.mark.parametrize(
    "what", [{"tags": ("t" * 70_000,)}, {"headers": [((b"n" * 70_000, b""),)]}, {"headers": [((b"n", b""),) * 70_000]}]
)
def test_what_the_format_cannot_hold_is_refused_and_leaves_the_log_as_it_was(what: dict[str, object]) -> None:
    disk = Disk()
    with pytest.raises(Refused):
        disk.log.append([b""], [b""], [b""], timestamp_us=1, **what)  # type: ignore[arg-type]
    assert disk.log.end == 0
    disk.write(b"a")
    assert values_of(disk.log) == {0: b"a"}


def test_epochs_rise_with_each_stint_and_survive_a_start() -> None:
    disk = Disk(LogConfig(offsets_reserved=1))
    disk.write(b"a")
    disk.log.begin_epoch(4, 1)
    disk.write(b"b")
    disk.log.begin_epoch(4, 2)
    disk.write(b"c")
    history = disk.log.epochs.entries
    assert [entry[:2] for entry in history] == [(1, 0), (4, 1), (4, 2)]
    assert disk.close().epochs.entries == history
    assert disk.lose_power().epochs.entries[:3] == history


def test_segment_named_by_the_head_alone_is_dropped_after_a_loss_of_power() -> None:
    disk = Disk()
    disk.write(b"a" * 900)
    append(disk.log, b"b" * 900)
    disk.log.seal()
    path = disk.log.segments[-1].path
    left = disk.storage.after_power_loss(lambda change: "create" in str(change) or f"write {path} 0+64" in str(change))
    disk.storage = left
    assert values_of(disk._open(clean=False)) == {0: b"a" * 900}


def test_position_of_an_empty_log_is_behind_its_first_head() -> None:
    disk = Disk()
    disk.crash()
    append(disk.log, b"a")
    disk.log.seal()
    assert values_of(disk.crash()) == {0: b"a"}
    checkpoint = read_checkpoint(disk.storage, f"{disk.folder}/{CHECKPOINT}")
    assert checkpoint is not None and checkpoint.position > SEGMENT_HEAD_SIZE


def test_records_that_share_nothing_are_one_append_and_come_back() -> None:
    disk = Disk()
    count = 3
    appended = disk.log.append_columns(
        [b"k"] * count,
        [b""] * count,
        [b"a", b"b", b"c"],
        timestamps=[5] * count,
        expiries=[30, 10, 20],
        attributes=[0] * count,
        origins=[0, 7, 0],
        tags=[("x",), ("y",), ("x",)],
    )
    assert appended.next_offset == count
    disk.log.close()
    (run,) = disk.log.read(0)
    assert run.batch.expiries.expand().tolist() == [30, 10, 20]
    assert [run.batch.tags_at(index) for index in range(count)] == [("x",), ("y",), ("x",)]
    with pytest.raises(Refused, match="longer"):
        disk.log.append_columns(
            [b""], [b""], [b""], timestamps=[1], expiries=[1], attributes=[0], origins=[0], tags=[("t" * 70_000,)]
        )


# -- passing over -------------------------------------------------------------------------------------------------


class Wanted:
    """A sieve for one tag, which counts what it was asked."""

    def __init__(self, tag: str) -> None:
        self.hash = tag_hash(tag)
        self.summaries = self.columns = 0

    def may_match(self, summary: bytes) -> bool:
        self.summaries += 1
        return may_hold(summary, self.hash)

    def may_hold(self, tag_hashes: Sequence[int], tag_sets: Iterable[Sequence[int]]) -> bool:
        self.columns += 1
        return any(tag_hashes[place] == self.hash for places in tag_sets for place in places)


def tagged_log(tags_of_batches: Sequence[str]) -> PartitionLog:
    disk = Disk(LogConfig(compression="none"))
    log = disk.log
    for tag in tags_of_batches:
        log.append([b"key"] * 10, [b""] * 10, [b"value"] * 10, timestamp_us=1, tags=(tag,) if tag else ())
        log.seal()
    disk.commit()
    return log


def test_batches_without_a_wanted_tag_are_passed_over() -> None:
    log = tagged_log(["a"] * 50 + ["b"] + ["a"] * 50)
    log._tail.clear()
    sieve = Wanted("b")
    assert log.pass_over(0, sieve, end=int(log.end)) == (500, True)
    assert log.pass_over(505, sieve, end=int(log.end)) == (505, True)
    assert log.pass_over(510, sieve, end=int(log.end)) == (1010, False)
    assert log.pass_over(0, Wanted("c"), end=300) == (300, False)
    assert sieve.columns < 10
    with pytest.raises(OffsetOutOfRange):
        log.pass_over(11, sieve, end=10)


def test_only_so_many_batches_are_passed_over_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.core_log.log.PASSED_OVER_MAX", 7)
    log = tagged_log(["a"] * 20)
    log._tail.clear()
    sieve = Wanted("b")
    assert log.pass_over(0, sieve, end=int(log.end)) == (70, False)
    assert log.pass_over(70, sieve, end=int(log.end)) == (140, False)
    assert log.pass_over(140, sieve, end=int(log.end)) == (200, False)


def test_what_is_in_memory_is_not_passed_over() -> None:
    log = tagged_log(["a"] * 5)
    assert log.pass_over(0, Wanted("b"), end=int(log.end)) == (0, True)


def test_batch_ends_before_its_tags_are_too_many_for_it() -> None:
    disk = Disk(LogConfig(compression="none"))
    log = disk.log
    for number in range(80):
        tags = tuple(f"{number}-{place}" for place in range(1000))
        log.append([b"key"], [b""], [b"value"], timestamp_us=1, tags=tags)
    disk.commit()
    found = [batch.tags_at(index) for batch, first, last in log.runs() for index in range(first, last)]
    assert [len(set(tags)) for tags in found] == [1000] * 80
    with pytest.raises(Refused, match="more than 1024"):
        log.append([b"key"], [b""], [b"value"], timestamp_us=1, tags=tuple(map(str, range(1025))))


def test_batch_of_records_that_share_nothing_ends_before_its_tags_are_too_many_for_it() -> None:
    disk = Disk(LogConfig(compression="none"))
    log = disk.log
    for call in range(3):
        tags = [tuple(f"{call}-{record}-{place}" for place in range(1000)) for record in range(40)]
        blank, zeros = [b""] * 40, [0] * 40
        log.append_columns(
            blank, blank, blank, timestamps=zeros, expiries=zeros, attributes=zeros, origins=zeros, tags=tags
        )
    disk.commit()
    found = [batch.tags_at(index) for batch, first, last in log.runs() for index in range(first, last)]
    assert [len(set(one)) for one in found] == [1000] * 120
    with pytest.raises(Refused, match="in one append"):
        many = [tuple(f"{record}-{place}" for place in range(1000)) for record in range(70)]
        blank, zeros = [b""] * 70, [0] * 70
        log.append_columns(
            blank, blank, blank, timestamps=zeros, expiries=zeros, attributes=zeros, origins=zeros, tags=many
        )


def test_first_segment_that_is_full_is_not_read_again_for_producers() -> None:
    disk = Disk()
    disk.write(b"a" * 100)
    reads: list[str] = []

    def headers_from(self: PartitionLog, offset: int) -> Iterator[BatchHeader]:
        reads.append(f"from {offset}")
        return iter(())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PartitionLog, "_headers_from", headers_from)
        while len(disk.log.segments) < 3:
            disk.write(b"b" * 100)
    assert reads == []
