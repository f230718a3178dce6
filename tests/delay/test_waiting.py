"""Rows that wait for the sorter are those that were added, however little was kept of them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.delay import waiting as waiting_module
from headrace.delay.marks import INTAKE, OFFSET_BITS, OFFSET_MASK
from headrace.delay.rows import ROW, PackedRows, Rows, id_hashes, joined, under
from headrace.delay.waiting import Waiting, between

# How many, for which target, with an id of its own, and how many offsets hold nothing before them.
_run = st.tuples(st.integers(1, 6), st.sampled_from([7, 7, 7, 8]), st.booleans(), st.sampled_from([0, 0, 0, 1]))


@settings(deadline=None)
@given(st.lists(_run, max_size=12), st.sets(st.integers(0, 11)), st.sets(st.integers(0, 11)))
def test_rows_are_those_that_were_added_whether_they_are_alike_or_not(
    runs: list[tuple[int, int, bool, int]], taken: set[int], asked: set[int]
) -> None:
    waiting, kept, at = Waiting(), list[Rows](), 5
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(waiting_module, "BLOCK_COUNT_MAX", 8)
        patch.setattr(waiting_module, "_CAPACITY_MIN", 2)
        for turn, (count, target, has_id, gap) in enumerate(runs):
            at += gap
            dues, place = np.arange(count) * 3 + turn, at | (INTAKE << OFFSET_BITS)
            rows = PackedRows.alike(dues, place, target).unpack()
            if has_id:
                rows["id"][0] = 1000 + turn
                waiting.add(rows, count, 0.0)
            else:
                waiting.add_alike(dues, place, target, count, 0.0)
            kept.append(rows)
            at += count
            if turn in taken and (block := waiting.first_unsorted()) is not None:
                # Another may be added behind one that could not be sorted.
                block.is_sorted = True
                block.is_sorted = turn % 2 == 0
    rows = joined(kept)
    assert joined([block.rows for block in waiting]).tobytes() == rows.tobytes()
    assert joined(between(waiting.snapshot(), 2, 9)).tobytes() == rows[(rows["due"] >= 2) & (rows["due"] < 9)].tobytes()
    unsorted = [block for block in waiting if not block.is_sorted]
    assert waiting.unsorted_bytes == sum(block.byte_count for block in unsorted)
    # Due times alone at the least, and at the most whole rows with room for as many.
    count = sum(block.count for block in unsorted)
    assert 8 * count <= waiting.unsorted_memory <= ROW.itemsize * (2 * count + 2 * len(unsorted))
    for block in waiting:
        places = block.rows["place"] & OFFSET_MASK
        assert (block.first, block.end) == (places[0], places[-1] + 1)
    for turn in asked:
        for hashes in ([1000 + turn], id_hashes(b"hd-%016x" % (5 + turn))):
            found = joined([under(rows, one) for one in hashes])
            assert waiting.find(hashes).tobytes() == found.tobytes()


def test_what_waits_takes_eight_bytes_where_records_differ_in_their_due_times_alone() -> None:
    waiting = Waiting()
    for first in range(0, 100_000, 1000):
        waiting.add_alike(np.arange(1000), first | (INTAKE << OFFSET_BITS), 7, 1000, 0.0)
    blocks = list(waiting)
    assert [block.count for block in blocks] == [65_000, 35_000]
    assert blocks[0].memory == 65_000 * 8
    assert (len(blocks[0]._dues), len(blocks[0]._rows)) == (0, 0)
    assert 100_000 * 8 <= waiting.unsorted_memory <= (65_000 + 2 * 35_000) * 8
