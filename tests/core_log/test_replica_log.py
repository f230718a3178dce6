"""A log that follows another: what it takes over, where it is cut, what a loss of power leaves of both."""

from dataclasses import replace
from itertools import pairwise
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core_log.config import DirectoryConfig, LogConfig
from headrace.core_log.directory import LogDirectory
from headrace.core_log.errors import NotLed, Refused
from headrace.core_log.log import PartitionLog, RawSlice
from headrace.core_log.record import Producer
from headrace.core_log.segment import Segment
from headrace.core_log.storage.contract import Storage
from headrace.core_log.storage.crash import TracingStorage, crash_states
from headrace.core_log.storage.memory import MemoryStorage

from .power.inline import commit, create_logs, drive, open_directory

LOGS = LogConfig(
    segment_bytes_max=1024, offsets_reserved=50, index_interval_bytes=1, compression="none", replica_count=2
)
JOURNAL = DirectoryConfig(journal_from_files=2, journal_bytes_max=4000)
LARGE_SET = tuple(range(100, 180))


class Side:
    """A directory with one log."""

    def __init__(self, storage: Storage | None = None, *, config: LogConfig = LOGS) -> None:
        self.storage = MemoryStorage() if storage is None else storage
        self.directory: LogDirectory = open_directory(self.storage, config=JOURNAL)
        streams = list(self.directory.streams.values())
        # Two, so that their commits go through the journal.
        self.log, self.other = streams[0].partitions if streams else create_logs(self.directory, 2, config)

    def write(self, *values: bytes, producer: Producer | None = None, route_set: tuple[int, ...] = ()) -> None:
        columns = [b"k"] * len(values), [b""] * len(values), values
        if producer is None:
            self.log.append(*columns, timestamp_us=1, route_set=route_set)
        else:
            self.log.append_once(producer, *columns, timestamp_us=1)
        self.commit()

    def commit(self) -> None:
        self.other.append([b""], [b""], [b"x"], timestamp_us=1)
        commit(self.directory, self.log, self.other)

    def lead(self, epoch: int, leader_id: int) -> None:
        self.log.begin_epoch(epoch, leader_id)

    def cut(self, offset: int) -> None:
        drive(self.directory.committer._env.worker.run(self.directory.committer._journal.empty))
        self.log.cut_from(offset)


def stored(log: PartitionLog, offset: int, bytes_max: int = 1 << 20) -> bytes:
    slice_ = log.read_raw(offset, bytes_max=bytes_max, end=log.written_end)
    assert slice_ is not None
    return slice_.segment.file.read(slice_.position, slice_.length)


def follow(follower: Side, leader: Side, bytes_max: int = 1 << 20) -> None:
    while follower.log.end < leader.log.written_end:
        follower.log.append_stored(stored(leader.log, follower.log.end, bytes_max))
        follower.commit()


def records(log: PartitionLog) -> list[tuple[int, bytes, tuple[int, ...]]]:
    found = []
    offset = int(log.log_start)
    while offset < log.written_end:
        for batch, first, last in log.read(offset, end=log.written_end):
            found += [(int(batch.offset_at(at)), batch.values[at], batch.route_set_at(at)) for at in range(first, last)]
            offset = int(batch.next_offset)
    return found


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 300), st.booleans(), st.booleans()), min_size=1, max_size=12),
    st.integers(1, 3000),
)
def test_a_follower_holds_what_its_leader_holds(writes: list[tuple[int, int, bool, bool]], bytes_max: int) -> None:
    leader, follower = Side(), Side()
    for number, (count, size, is_large, is_new_stint) in enumerate(writes):
        if is_new_stint:
            leader.lead(number + 2, 7)
        leader.write(
            *[bytes([number]) * size for _ in range(count)], route_set=LARGE_SET if is_large else (number + 1,)
        )
    follow(follower, leader, bytes_max)
    assert records(follower.log) == records(leader.log)
    assert follower.log.epochs.entries == leader.log.epochs.entries
    assert [one.base_offset for one in follower.log.segments] == [one.base_offset for one in leader.log.segments]


def test_what_follows_a_slice_is_found_behind_it_and_wherever_else_it_is() -> None:
    leader = Side(config=replace(LOGS, index_interval_bytes=1 << 20))
    for number in range(40):
        leader.write(b"%d" % number * 60)
    log, end = leader.log, int(leader.log.written_end)
    assert len(log.segments) > 2
    slices: list[RawSlice] = []
    while not slices or slices[-1].next_offset < end:
        offset = slices[-1].next_offset if slices else 0
        looked_up = log.read_raw(offset, bytes_max=1, end=end)
        for behind in (None, *slices):
            assert log.read_raw(offset, bytes_max=1, end=end, behind=behind) == looked_up
        assert looked_up is not None
        slices.append(looked_up)
    locate = Segment.locate
    with patch.object(Segment, "locate", autospec=True, side_effect=locate) as looks:
        for behind, piece in pairwise(slices):
            log.read_raw(piece.first_offset, bytes_max=1, end=end, behind=behind)
    assert looks.call_count == len(log.segments) - 1, "once for each segment that begins"


def test_a_follower_goes_on_after_a_restart_and_a_loss_of_power() -> None:
    leader = Side()
    leader.write(*[b"v" * 100] * 30)
    follower = Side()
    follow(follower, leader, 1)
    for storage in (follower.storage.process_crash(), follower.storage.after_power_loss(lambda _: False)):
        again = Side(storage)
        assert records(again.log) == records(leader.log)
        assert again.log.end == leader.log.end, "no offsets are given up: the leader issues them"


def test_a_batch_that_does_not_follow_is_refused() -> None:
    leader, follower = Side(), Side()
    leader.write(b"1")
    leader.write(b"2")
    with pytest.raises(Refused, match="does not follow"):
        follower.log.append_stored(stored(leader.log, 1))
    assert follower.log.end == 0


def test_a_batch_of_an_older_stint_is_refused() -> None:
    old, new, follower = Side(), Side(), Side()
    new.lead(3, 1)
    new.write(b"1")
    follow(follower, new)
    old.write(b"0")
    old.write(b"0")
    with pytest.raises(Refused, match="does not follow"):
        follower.log.append_stored(stored(old.log, 1))


def test_o1_nobody_else_writes_behind_what_a_leader_wrote_until_a_stint_begins_here() -> None:
    """It would have the leader's name on it."""
    leader, follower = Side(), Side()
    leader.lead(3, 1)
    leader.write(b"1")
    follow(follower, leader)
    columns = [b""], [b""], [b"mine"]
    with pytest.raises(NotLed):
        follower.log.append(*columns, timestamp_us=1)
    with pytest.raises(NotLed):
        follower.log.append_once(Producer(b"p" * 16, 0, 0), *columns, timestamp_us=1)
    assert follower.log.end == leader.log.end
    follower.log.begin_stint(4, 2)
    follower.write(b"mine")
    assert [value for _, value, _ in records(follower.log)] == [b"1", b"mine"]
    follower.log.follow()
    with pytest.raises(NotLed):
        follower.log.append(*columns, timestamp_us=1)


def test_a_damaged_batch_is_refused_and_those_before_it_are_kept() -> None:
    leader, follower = Side(), Side()
    leader.write(b"first")
    leader.write(b"second")
    data = bytearray(stored(leader.log, 0))
    data[-1] ^= 1
    with pytest.raises(Refused, match="damaged"):
        follower.log.append_stored(bytes(data))
    assert [value for _, value, _ in records(follower.log)] == [b"first"]


def test_what_producers_wrote_is_known_to_a_follower_and_forgotten_where_it_is_cut() -> None:
    leader, follower = Side(), Side()
    who = Producer(b"p" * 16, 0, 0)
    leader.write(b"a", producer=who)
    leader.write(b"b", producer=who._replace(first_sequence=1))
    follow(follower, leader)
    follower.lead(5, 2)
    follower.write(b"a", producer=who)
    assert follower.log.end == 2, "seen before"
    follower.cut(1)
    follower.write(b"b", producer=who._replace(first_sequence=1))
    assert [value for _, value, _ in records(follower.log)] == [b"a", b"b"]


def test_the_watermark_of_a_replica_moves_when_it_is_told_to() -> None:
    leader = Side()
    leader.write(b"1", b"2")
    assert leader.log.high_watermark == 0
    assert leader.log.early_end == 0
    told: list[str] = []
    leader.log.when_committed(2, lambda: told.append("committed"))
    leader.log.advance_to(leader.log.written_end)
    assert leader.log.high_watermark == 2
    assert told == ["committed"]


def test_a_replica_stays_one_whatever_its_settings_become() -> None:
    side = Side()
    side.log.config = replace(LOGS, replica_count=1)
    side.write(b"1", b"2", b"3")
    assert side.log.synced_end == 3 and side.log.high_watermark == 0 and side.log.early_end == 0


def test_an_empty_replica_begins_where_its_leader_does() -> None:
    leader = Side(config=replace(LOGS, replica_count=1))
    for _ in range(20):
        leader.write(b"v" * 200)
    leader.log.delete_before(12)
    leader.commit()
    leader.commit()
    follower = Side()
    follower.log.begin_at(leader.log.replica_start)
    assert 0 < follower.log.end <= 12
    follow(follower, leader)
    assert records(follower.log)[-8:] == records(leader.log)[-8:]
    expected = records(follower.log)
    assert records(Side(follower.storage.process_crash()).log) == expected


def test_a_log_is_cut_where_the_lineages_part_whatever_a_loss_of_power_leaves() -> None:
    old = Side()
    for number in range(8):
        old.write(b"common %d" % number * 20)
    traced = TracingStorage(MemoryStorage())
    follower = Side(traced)
    follow(follower, old)
    for number in range(8):
        old.write(b"lost %d" % number * 20)
    follow(follower, old)
    new = Side()
    follow_to(new, old, 8)
    new.lead(2, 1)
    new.write(b"new" * 50)
    began = len(traced.trace)
    parted = follower.log.epochs.divergence(follower.log.end, new.log.epochs, new.log.end)
    assert parted == 8
    follower.cut(parted)
    assert [value for _, value, _ in records(follower.log)] == [b"common %d" % number * 20 for number in range(8)]
    traced.mark("cut", None)
    follow(follower, new)
    traced.mark("after", None)
    expected = records(new.log)
    assert records(follower.log) == expected
    seen: set[str] = set()
    for state in crash_states(traced, limit_per_prefix=12):
        if state.prefix < began:
            continue
        found = Side(state.storage)
        values = records(found.log)
        assert values[:8] == expected[:8]
        if state.marked("after"):
            seen.add("after")
            assert values == expected
        elif state.marked("cut"):
            seen.add("cut")
            assert values == expected[: len(values)]
        else:
            seen.add("before")
        # Whatever is there, the way on is the same.
        parted = found.log.epochs.divergence(found.log.end, new.log.epochs, new.log.end)
        found.cut(parted)
        follow(found, new)
        assert records(found.log) == expected
    assert seen == {"before", "cut", "after"}


def follow_to(follower: Side, leader: Side, offset: int) -> None:
    while follower.log.end < offset:
        follower.log.append_stored(stored(leader.log, follower.log.end, 1))
        follower.commit()


@pytest.mark.parametrize("is_at_its_end", [False, True])
def test_a_replica_that_begins_anew_has_the_old_records_or_none_whatever_a_loss_of_power_leaves(
    is_at_its_end: bool,
) -> None:
    leader = Side()
    for number in range(30):
        leader.write(b"%d " % number * 60)
    start = leader.log.segments[-1].base_offset
    assert start > 5
    traced = TracingStorage(MemoryStorage())
    follower = Side(traced)
    follow_to(follower, leader, start if is_at_its_end else 5)
    follower.log.advance_to(follower.log.written_end)
    old = records(follower.log)
    began = len(traced.trace)
    drive(follower.directory.committer._env.worker.run(follower.directory.committer._journal.empty))
    follower.log.begin_at(start)
    traced.mark("begun", None)
    follow(follower, leader)
    traced.mark("after", None)
    expected = records(follower.log)
    assert expected == records(leader.log)[start:]
    seen: set[str] = set()
    for state in crash_states(traced, limit_per_prefix=12):
        if state.prefix < began:
            continue
        found = Side(state.storage)
        values = records(found.log)
        if state.marked("after"):
            seen.add("after")
            assert values == expected
        elif state.marked("begun"):
            seen.add("begun")
            assert values == expected[: len(values)]
        else:
            seen.add("before")
            assert values in ([], old)
            if not values:
                assert found.log.end == start
                follow(found, leader)
                assert records(found.log) == expected
    assert seen == {"before", "begun", "after"}


def test_the_watermark_file_of_a_replica_says_what_is_committed_and_never_more() -> None:
    side = Side()
    for number in range(6):
        side.write(b"%d " % number * 100)
    side.log.advance_to(side.log.segments[-1].base_offset)
    committed = side.log.high_watermark
    assert 0 < committed < side.log.synced_end
    side.log.note_watermark()
    again = Side(side.storage.process_crash())
    assert again.log.high_watermark == committed
    assert again.log.end == side.log.end
    again.log.begin_stint(9, 3)
    again.write(b"new")
    again.log.note_watermark()
    third = Side(again.storage.process_crash())
    assert third.log.high_watermark == committed
    assert [value for _, value, _ in records(third.log)][-1] == b"new", "a lower epoch below is no torn tail"
