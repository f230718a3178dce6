"""How a limit is dealt out over partitions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.spark.access import Slice
from headrace.spark.stream_limits import by_bytes, by_rows

Backlogs = dict[tuple[str, int], tuple[int, int]]


@st.composite
def backlogs(draw: st.DrawFn) -> Backlogs:
    sizes = draw(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**5)), min_size=1, max_size=8))
    return {("t", number): (start, start + count) for number, (start, count) in enumerate(sizes)}


def slices_of(start: int, end: int, *, bytes_each: int = 100, cut_every: int = 10) -> list[Slice]:
    cuts = tuple((offset, (offset - start) * bytes_each) for offset in range(start + cut_every, end, cut_every))
    return [Slice((), start, 1, 0, (end - start) * bytes_each, start, end, cuts=cuts)]


@given(backlogs(), st.integers(1, 10**6))
def test_every_partition_that_has_records_moves_and_none_passes_its_end(backlog: Backlogs, rows: int) -> None:
    ends = by_rows(backlog, rows)
    for at, (start, end) in backlog.items():
        assert start + (1 if end > start else 0) <= ends[at] <= end


@given(backlogs(), st.integers(1, 10**6))
def test_limit_holds_but_for_the_one_record_that_each_may_always_take(backlog: Backlogs, rows: int) -> None:
    ends = by_rows(backlog, rows)
    taken = sum(ends[at] - start for at, (start, _) in backlog.items())
    assert taken <= max(rows, 0) + len(backlog)


def test_shares_are_in_proportion_to_what_waits() -> None:
    assert by_rows({("t", 0): (0, 900), ("t", 1): (100, 200)}, 100) == {("t", 0): 90, ("t", 1): 110}


def test_all_is_taken_where_the_limit_is_larger() -> None:
    assert by_rows({("t", 0): (5, 9)}, 100) == {("t", 0): 9}
    assert by_bytes({("t", 0): (5, 9)}, {("t", 0): slices_of(5, 9)}, 10**6) == {("t", 0): 9}


def test_empty_partition_stays_where_it_is() -> None:
    backlog = {("t", 0): (7, 7), ("t", 1): (0, 100)}
    assert by_rows(backlog, 10)["t", 0] == 7
    assert by_bytes(backlog, {("t", 1): slices_of(0, 100)}, 1000)["t", 0] == 7


def test_bytes_become_records_by_where_batches_begin() -> None:
    backlog = {("t", 0): (0, 1000), ("t", 1): (0, 1000)}
    slices = {("t", 0): slices_of(0, 1000, bytes_each=300), ("t", 1): slices_of(0, 1000, bytes_each=100)}
    ends = by_bytes(backlog, slices, 40_000)
    # A tenth of all bytes is a tenth of each.
    assert ends == {("t", 0): 100, ("t", 1): 100}


def test_slices_that_reach_beyond_the_backlog_count_only_with_it() -> None:
    backlog = {("t", 0): (500, 600)}
    ends = by_bytes(backlog, {("t", 0): slices_of(0, 1000)}, 5_000)
    assert ends["t", 0] == pytest.approx(550, abs=1)


@given(backlogs(), st.integers(1, 10**7), st.integers(1, 50))
def test_bytes_never_pass_the_end_and_always_move(backlog: Backlogs, size: int, bytes_each: int) -> None:
    slices = {at: slices_of(start, end, bytes_each=bytes_each, cut_every=5000) for at, (start, end) in backlog.items()}
    for at, end in by_bytes(backlog, slices, size).items():
        start, last = backlog[at]
        assert start + (1 if last > start else 0) <= end <= last
