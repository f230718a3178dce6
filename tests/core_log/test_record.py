"""Records in bulk: runs stand for columns, and a batch answers for each of its records."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core_log.format import decode, encode, maybe_header, stamp
from headrace.core_log.ids import Offset
from headrace.core_log.record import PROTOCOL_MASK, Gap, Protocol, Record, RecordBatch, RouteReference, Runs, gap_batch

from .batches import record_batches

pieces = st.lists(st.tuples(st.integers(-3, 3), st.integers(1, 5)), min_size=1, max_size=12)


def spelled(parts: list[tuple[int, int]]) -> tuple[Runs, list[int]]:
    runs = Runs()
    column: list[int] = []
    for value, count in parts:
        runs.add(value, count)
        column += [value] * count
    return runs, column


def expiries_as_text(column: list[int]) -> list[bytes]:
    return [b"%d" % value for value in column]


def decoded(batch: RecordBatch) -> RecordBatch:
    data = b"".join(
        stamp(encode(batch), salt=3, base_offset=batch.base_offset, leader_epoch=batch.epoch, durable_offset=0)
    )
    header = maybe_header(data, 0, 3)
    assert header is not None
    return decode(data, 0, header)


@given(pieces)
def test_runs_are_the_column_they_stand_for(parts: list[tuple[int, int]]) -> None:
    runs, column = spelled(parts)
    assert [runs.at(index) for index in range(len(column))] == column
    assert runs.expand().tolist() == column


@given(pieces)
def test_neighbours_that_are_equal_are_one_run(parts: list[tuple[int, int]]) -> None:
    runs, column = spelled(parts)
    assert len(runs.values) == 1 + sum(low != high for low, high in pairwise(column))
    assert runs.ends == sorted(set(runs.ends))


@given(pieces, st.data())
def test_spans_cover_a_range_piece_by_piece(parts: list[tuple[int, int]], draw: st.DataObject) -> None:
    runs, column = spelled(parts)
    first = draw.draw(st.integers(0, len(column)))
    last = draw.draw(st.integers(first, len(column)))
    covered: list[int] = []
    for value, low, high in runs.spans(first, last):
        assert low == first + len(covered) and low < high
        covered += [value] * (high - low)
    assert covered == column[first:last]


@given(pieces, st.lists(st.integers(-3, 3), max_size=12))
def test_runs_go_on_with_a_value_for_each_record(parts: list[tuple[int, int]], more: list[int]) -> None:
    runs, column = spelled(parts)
    runs.extend(more)
    assert runs.expand().tolist() == column + more


@given(pieces, st.lists(st.integers(-(2**63), 2**63 - 1), min_size=20, max_size=40), pieces)
def test_a_column_of_which_each_has_a_value_of_its_own_is_written_and_read_as_any_other(
    parts: list[tuple[int, int]], many: list[int], more: list[tuple[int, int]]
) -> None:
    batch = RecordBatch(7, 1)
    column: list[int] = []
    for expiries in ([value] * count for value, count in parts):
        batch.add(
            [b""] * len(expiries), [b""] * len(expiries), expiries_as_text(expiries), timestamp_us=1, expiry_us=expiries
        )
        column += expiries
    for expiries in (many, *([value] * count for value, count in more)):
        batch.add(
            [b""] * len(expiries),
            [b""] * len(expiries),
            expiries_as_text(expiries),
            timestamp_us=1,
            expiry_us=np.array(expiries),
        )
        column += expiries
    found = decoded(batch)
    assert batch.expiries == found.expiries and found.expiries.expand().tolist() == column
    assert [batch.expiries.at(index) for index in range(len(column))] == column
    assert [value for value, low, high in batch.expiries.spans(0, len(column)) for _ in range(low, high)] == column


def test_columns_of_records_that_share_nothing_come_back_record_by_record() -> None:
    batch = RecordBatch(7, 1)
    batch.add([b"k0"], [b""], [b"v0"], timestamp_us=1)
    batch.add_columns(
        [b"k1", b"k2"],
        [b"p1", b""],
        [b"v1", b"v2"],
        timestamps=[5, 4],
        expiries=[50, 40],
        attributes=[1, 0],
        origins=[9, 8],
        tags=[("a", "b"), ("c",)],
        headers=[(), ((b"n", b"x"),)],
    )
    kept = decoded(batch)
    assert kept.record(1) == Record(
        offset=Offset(8),
        key=b"k1",
        properties=b"p1",
        value=b"v1",
        timestamp_us=5,
        expiry_us=50,
        attributes=1,
        origin=9,
        tags=("a", "b"),
    )
    assert kept.record(2).tags == ("c",) and kept.record(2).headers == ((b"n", b"x"),)
    assert kept.record(0).headers == () and kept.record(0).expiry_us == 0
    assert batch.byte_count == len(b"k0v0" + b"k1p1v1" + b"k2v2" + b"nx" + b"abc")


def test_runs_are_equal_by_what_they_hold() -> None:
    assert Runs([1, 2], [3, 4]) == Runs([1, 2], [3, 4])
    assert Runs([1, 2], [3, 4]) != Runs([1, 2], [2, 4])
    assert Runs([1], [1]) != [1]
    with pytest.raises(TypeError):
        hash(Runs())


def test_batch_answers_for_each_record() -> None:
    batch = RecordBatch(100, 2)
    assert batch.add([b"a", b"b"], [b"", b"p"], [b"1", b"2"], timestamp_us=5, tags=("x",), route_set=(1,)) == 0
    assert batch.add([b"c"], [b""], [b"3"], timestamp_us=6, headers=[((b"h", b"v"),)], origin=9, expiry_us=7) == 2
    assert batch.record(1) == Record(101, b"b", b"2", b"p", 5, 0, 0, (1,), 0, ("x",), ())
    assert batch.record(2) == Record(102, b"c", b"3", b"", 6, 7, 0, (), 9, (), ((b"h", b"v"),))
    assert (batch.count, batch.span, batch.next_offset) == (3, 3, 103)
    assert [record.offset for record in batch.records()] == [100, 101, 102]


def test_sets_that_come_again_are_held_once() -> None:
    batch = RecordBatch(0, 1)
    for _ in range(3):
        batch.add([b"k"], [b""], [b"v"], timestamp_us=1, tags=("a", "b"), route_set=(1, 2))
        batch.add([b"k"], [b""], [b"v"], timestamp_us=1)
    assert batch.route_sets == [(), (1, 2)]
    assert batch.tag_sets == [(), ("a", "b")]
    assert [batch.route_set_at(index) for index in range(6)] == [(1, 2), ()] * 3


def test_bytes_are_counted_or_taken_from_who_knows() -> None:
    batch = RecordBatch(0, 1)
    batch.add([b"kk"], [b"p"], [b"vvv"], timestamp_us=1, headers=[((b"h", b"12"),)])
    assert batch.byte_count == 2 + 1 + 3 + 3
    batch.add([b"k"], [b""], [b"v"], timestamp_us=1, byte_count=500)
    assert batch.byte_count == 509


def test_columns_of_unequal_length_are_our_own_mistake() -> None:
    with pytest.raises(AssertionError):
        RecordBatch(0, 1).add([b"k"], [b""], [b"v", b"w"], timestamp_us=1)


@given(record_batches(references=False))
def test_index_of_is_the_first_record_at_or_after_an_offset(batch: RecordBatch) -> None:
    offsets = [batch.offset_at(index) for index in range(batch.count)]
    for wanted in {0, *offsets, *(offset + 1 for offset in offsets), batch.next_offset}:
        expected = next((index for index, offset in enumerate(offsets) if offset >= wanted), batch.count)
        assert batch.index_of(wanted) == expected


def test_reference_that_nobody_resolved_is_our_own_mistake() -> None:
    batch = RecordBatch(0, 1)
    batch.add([b"k"], [b""], [b"v"], timestamp_us=1, route_set=(1,))
    batch.route_sets[1] = RouteReference(0, 1)
    with pytest.raises(AssertionError):
        batch.route_set_at(0)


def test_gap_covers_its_offsets_and_says_why() -> None:
    gap = gap_batch(10, 25, 3, Gap.REPAIRED)
    assert (gap.count, gap.span, gap.next_offset, gap.gap) == (0, 15, 25, Gap.REPAIRED)
    assert list(gap.records()) == []


def test_every_protocol_fits_its_bits() -> None:
    for protocol in Protocol:
        assert protocol & PROTOCOL_MASK == protocol
        assert Record(0, b"", b"", attributes=protocol | 1 << 4).protocol is protocol
