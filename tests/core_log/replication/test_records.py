"""What a follower is sent next."""

from itertools import pairwise
from unittest.mock import patch

from tests.core_log.test_replica_log import Side

from headrace.core_log.log import PartitionLog, RawSlice
from headrace.core_log.replication.records import next_records
from headrace.core_log.segment import Segment


def next_slice(log: PartitionLog, offset: int, behind: RawSlice | None, bytes_max: int = 1 << 20) -> RawSlice:
    found = next_records(log, offset, bytes_max, behind)
    assert found is not None
    piece, following = found
    assert isinstance(piece, RawSlice)
    assert piece.next_offset == following
    return piece


def test_what_was_written_behind_the_last_slice_is_found_without_a_read() -> None:
    leader = Side()
    leader.write(b"1")
    behind = next_slice(leader.log, 0, None)
    leader.write(b"2", b"3")
    leader.write(b"4")
    looked_up = next_slice(leader.log, 1, None)
    with patch.object(Segment, "headers", side_effect=AssertionError("a header was read")):
        assert next_slice(leader.log, 1, behind) == looked_up
    assert looked_up.next_offset == 4


def test_more_than_is_wanted_is_cut_between_batches() -> None:
    leader = Side()
    leader.write(b"1")
    behind = next_slice(leader.log, 0, None)
    leader.write(b"2")
    leader.write(b"3")
    assert next_slice(leader.log, 1, behind, bytes_max=1).next_offset == 2


def test_a_slice_behind_which_another_segment_begins_leads_nowhere() -> None:
    leader = Side()
    slices: list[RawSlice] = []
    for number in range(40):
        leader.write(b"%d" % number * 60)
        slices.append(next_slice(leader.log, number, slices[-1] if slices else None))
    assert len(leader.log.segments) > 2
    assert [one.first_offset for one in slices] == list(range(40))
    assert all(
        after.position == before.position + before.length
        for before, after in pairwise(slices)
        if before.segment is after.segment
    )
