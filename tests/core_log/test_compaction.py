"""Compaction: the last value of each key stays, at its offset; what it replaced goes, and nothing else does."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core_log.compaction import COMPACTING, compact
from headrace.core_log.config import LogConfig
from headrace.core_log.directory import LogDirectory
from headrace.core_log.errors import DiskFull
from headrace.core_log.log import PartitionLog
from headrace.core_log.record import TOMBSTONE, Gap, Producer, Record
from headrace.core_log.storage.memory import MemoryStorage

from .power.inline import Clock, append, commit, create_logs, drive, open_directory

CONFIG = LogConfig(cleanup="compact", segment_bytes_max=600, compression="none", index_interval_bytes=100)


class Keyed:
    """A compacted log in memory."""

    def __init__(self, config: LogConfig = CONFIG) -> None:
        self.storage = MemoryStorage()
        self.directory: LogDirectory = open_directory(self.storage)
        (self.log,) = create_logs(self.directory, 1, config)
        self.count = 0

    @property
    def clock(self) -> Clock:
        clock = self.directory.env.clock
        assert isinstance(clock, Clock)
        return clock

    def put(self, key: bytes, value: bytes, *, tombstone: bool = False) -> None:
        self.log.append(
            [key],
            [b""],
            [value],
            timestamp_us=self.clock.now_us,
            attributes=TOMBSTONE if tombstone else 0,
            route_set=(1, 2, 3),
            tags=("t",),
            headers=[((b"name", value),)],
        )

    def commit(self) -> None:
        commit(self.directory, self.log)

    def roll(self) -> None:
        """Everything so far into sealed segments, by records of a key that nobody asks for."""
        for _ in range(2):
            self.put(b"filler", bytes(500))
            self.commit()

    def compact(self) -> bool:
        return drive(compact(self.directory.env, self.log))

    def restart(self, *, clean: bool = False) -> PartitionLog:
        self.storage = self.storage.process_crash()
        self.directory = open_directory(self.storage, clean=clean)
        (stream,) = self.directory.streams.values()
        (self.log,) = stream.partitions
        return self.log


def records(log: PartitionLog) -> dict[int, Record]:
    found: dict[int, Record] = {}
    offset = int(log.log_start)
    while offset < log.high_watermark:
        for batch, first, last in log.read(offset, bytes_max=1):
            assert batch.base_offset <= offset < batch.next_offset
            offset = batch.next_offset
            found |= {record.offset: record for record in (batch.record(index) for index in range(first, last))}
    return found


def last_values(log: PartitionLog) -> dict[bytes, bytes]:
    return {record.key: record.value for record in records(log).values() if record.key != b"filler"}


puts = st.lists(
    st.lists(st.tuples(st.sampled_from((b"a", b"b", b"c", b"d")), st.binary(max_size=200)), min_size=1, max_size=4),
    min_size=1,
    max_size=10,
)


@given(puts, st.booleans(), st.booleans())
@settings(max_examples=60)
def test_must_show_compact_delete_the_indexes_restart_last_value_per_key_equals_a_dict(
    groups: list[list[tuple[bytes, bytes]]], clean: bool, twice: bool
) -> None:
    keyed = Keyed()
    expected: dict[bytes, bytes] = {}
    for group in groups:
        for key, value in group:
            keyed.put(key, value)
            expected[key] = value
        keyed.commit()
    keyed.roll()
    before = records(keyed.log)
    assert keyed.compact()
    if twice:
        keyed.roll()
        before = records(keyed.log)
        keyed.compact()
    assert last_values(keyed.log) == expected
    if clean:
        keyed.directory.close_now()
    for name in keyed.storage.list(keyed.log.folder):
        if name.endswith((".index", ".timeindex", ".keys")):
            keyed.storage.remove(f"{keyed.log.folder}/{name}")
    log = keyed.restart(clean=clean)
    after = records(log)
    assert last_values(log) == expected
    # What is left is what it was, in every column, at its offset.
    assert all(before[offset] == record for offset, record in after.items())


def test_replaced_values_are_gone_from_the_disk() -> None:
    keyed = Keyed()
    for number in range(5):
        keyed.put(b"a", b"value %d" % number + bytes(300))
        keyed.commit()
    keyed.roll()
    size = keyed.log.byte_count
    assert keyed.compact()
    assert keyed.log.byte_count < size - 4 * 600
    stored = b"".join(keyed.storage.read_file(segment.path) for segment in keyed.log.segments)
    assert [number for number in range(5) if b"value %d" % number in stored] == [4]


def test_o2_dropped_offsets_are_a_typed_gap() -> None:
    keyed = Keyed()
    for number in range(3):
        keyed.put(b"a", b"%d" % number + bytes(400))
        keyed.commit()
    keyed.roll()
    keyed.compact()
    (run, *_rest) = keyed.log.read(0, bytes_max=1)
    assert (run.batch.gap, run.first, run.last) == (Gap.COMPACTED, 0, 0)
    assert keyed.log.end == 5


def test_offsets_and_time_still_find_their_records() -> None:
    keyed = Keyed()
    for number in range(12):
        keyed.put(b"k%d" % (number % 3), b"%d" % number + bytes(150))
        keyed.clock.now_us += 1000
        keyed.commit()
    keyed.roll()
    times = {offset: record.timestamp_us for offset, record in records(keyed.log).items()}
    keyed.compact()
    kept = records(keyed.log)
    assert set(range(9, 12)) <= set(kept)
    for offset in kept:
        assert keyed.log.offset_at_time(times[offset]) == min(
            other for other, record in kept.items() if record.timestamp_us >= times[offset]
        )


def test_tombstone_is_kept_for_its_time_and_then_goes_with_what_it_deleted() -> None:
    keyed = Keyed(replace(CONFIG, tombstone_ms=60_000))
    keyed.put(b"a", b"value" + bytes(400))
    keyed.commit()
    keyed.put(b"a", b"", tombstone=True)
    keyed.commit()
    keyed.roll()
    keyed.compact()
    assert [record.attributes for record in records(keyed.log).values() if record.key == b"a"] == [TOMBSTONE]
    keyed.clock.now_us += 61 * 1_000_000
    keyed.roll()
    keyed.roll()
    assert keyed.compact()
    assert last_values(keyed.log) == {}


def test_nothing_to_do_is_not_done_again() -> None:
    keyed = Keyed()
    assert not keyed.compact()
    keyed.put(b"a", b"1")
    keyed.commit()
    assert not keyed.compact()
    keyed.roll()
    assert keyed.compact()
    assert not keyed.compact()


def test_o4_producers_are_known_though_their_batches_are_rewritten() -> None:
    keyed = Keyed()
    producer = Producer(b"p" * 16, 0, 0)
    for number in range(4):
        keyed.log.append_once(
            producer._replace(first_sequence=number), [b"a"], [b""], [b"%d" % number * 300], timestamp_us=1
        )
        keyed.commit()
    keyed.roll()
    keyed.compact()
    log = keyed.restart()
    end = log.end
    keyed.log.append_once(producer, [b"a"] * 4, [b""] * 4, [b"again"] * 4, timestamp_us=1)
    keyed.commit()
    assert log.end == end


def test_segment_that_the_checkpoint_names_is_left_alone() -> None:
    keyed = Keyed()
    keyed.put(b"a", b"old" + bytes(300))
    keyed.commit()
    # Rolled and written, but no commit has said so: recovery would begin in the segment before.
    keyed.put(b"a", b"new" + bytes(500))
    keyed.log.seal()
    assert len(keyed.log.segments) == 2
    assert keyed.log.sealed_segments == []
    assert not keyed.compact()
    keyed.restart()
    assert last_values(keyed.log) == {b"a": b"new" + bytes(500)}


def test_segment_deleted_while_it_was_rewritten_stays_deleted() -> None:
    keyed = Keyed()
    for number in range(4):
        keyed.put(b"k%d" % number, bytes(400))
        keyed.commit()
    keyed.roll()
    worker = keyed.directory.env.worker
    calls = 0

    async def run(call: object) -> object:
        nonlocal calls
        calls += 1
        result = call()  # type: ignore[operator]
        if calls == 2:
            keyed.log.delete_before(3)
            keyed.log.seal()
            job = keyed.log.begin_sync()
            assert job is not None
            keyed.log.run_sync(job)
            keyed.log.finish_sync(job)
        return result

    worker.run = run  # type: ignore[method-assign, assignment]
    assert keyed.compact()
    assert keyed.log.log_start == 3
    assert keyed.log.segments[0].base_offset == 3
    names = keyed.storage.list(keyed.log.folder)
    assert [name for name in names if name.endswith(COMPACTING)] == []
    assert sorted(last_values(keyed.restart())) == [b"k3"]


def test_x5_full_disk_leaves_the_log_as_it_was_and_no_file_behind() -> None:
    keyed = Keyed()
    for number in range(4):
        keyed.put(b"k%d" % (number % 2), b"%d" % number + bytes(400))
        keyed.commit()
    keyed.roll()
    before = records(keyed.log)
    keyed.storage.capacity_bytes = 0
    with pytest.raises(DiskFull):
        keyed.compact()
    keyed.storage.capacity_bytes = None
    assert records(keyed.log) == before
    assert keyed.compact()
    assert set(last_values(keyed.log)) == {b"k0", b"k1"}


def test_large_route_sets_are_spelled_out_again() -> None:
    keyed = Keyed(replace(CONFIG, segment_bytes_max=4000))
    routes = tuple(range(200))
    for number in range(12):
        keyed.log.append([b"k%d" % (number % 4)], [b""], [bytes(250)], timestamp_us=1, route_set=routes)
        keyed.commit()
    for _ in range(8):
        keyed.roll()
    assert keyed.compact()
    kept = [record.route_set for record in records(keyed.restart()).values() if record.key != b"filler"]
    assert kept == [routes] * 4


def test_epochs_of_what_is_left_do_not_fall() -> None:
    keyed = Keyed()
    for number in range(6):
        if number in (2, 4):
            keyed.log.begin_epoch(number, 0)
        keyed.put(b"k%d" % (number % 3), bytes(250))
        keyed.commit()
    keyed.roll()
    keyed.compact()
    epochs = [run.batch.epoch for offset in sorted(records(keyed.log)) for run in keyed.log.read(offset, bytes_max=1)]
    assert epochs == sorted(epochs)
    keyed.storage.remove(f"{keyed.log.folder}/epochs")
    assert keyed.restart().epoch >= 4


def stints(log: PartitionLog) -> dict[int, tuple[int, int]]:
    """For each record, the epoch and leader that its batch names."""
    return {
        int(batch.offset_at(index)): (header.leader_epoch, header.leader_id)
        for segment in log.segments
        for header, batch in log.batches_in(segment)
        for index in range(batch.count)
    }


@given(
    st.lists(st.tuples(st.booleans(), st.lists(st.sampled_from((b"a", b"b", b"c")), max_size=3)), max_size=6),
    st.booleans(),
)
@settings(max_examples=60)
def test_c7_record_keeps_the_stint_that_wrote_it_whatever_is_dropped_around_it(
    groups: list[tuple[bool, list[bytes]]], twice: bool
) -> None:
    keyed = Keyed(replace(CONFIG, segment_bytes_max=2000))
    for same_epoch, keys in groups:
        # A restored metadata store may give out the number of an epoch again, to another leader.
        keyed.log.begin_epoch(keyed.log.epoch + (not same_epoch), keyed.log.leader_id + 1)
        for key in keys:
            keyed.put(key, b"value")
            keyed.commit()
    for _ in range(4):
        keyed.roll()
    before = stints(keyed.log)
    assert keyed.compact()
    if twice:
        for _ in range(8):
            keyed.roll()
        before |= stints(keyed.log)
        assert keyed.compact()
    after = stints(keyed.log)
    assert after.keys() == records(keyed.log).keys()
    assert after == {offset: before[offset] for offset in after}


def test_o4_producer_is_known_after_a_watermark_for_offline_readers_a_crash_and_a_compaction() -> None:
    storage = MemoryStorage()
    directory = open_directory(storage)
    (log,) = create_logs(directory, 1, replace(CONFIG, segment_bytes_max=1 << 20))
    producer = Producer(b"p" * 16, 0, 0)
    for _ in range(2):
        append(log, b"x")
        commit(directory, log)
    log.append_once(producer, [b"k"], [b""], [b"numbered"], timestamp_us=1)
    commit(directory, log)
    # It begins a segment that no commit has told the checkpoint of.
    log.delete_before(log.end)
    log.note_watermark()
    directory = open_directory(storage.process_crash())
    ((log,),) = [stream.partitions for stream in directory.streams.values()]
    drive(compact(directory.env, log))
    before = log.end
    log.append_once(producer, [b"k"], [b""], [b"numbered"], timestamp_us=1)
    assert log.end == before
