"""Intervals against a plain set of numbers."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from headrace.core_log.intervals import Intervals

numbers = st.integers(0, 60)
ranges = st.tuples(numbers, numbers)
edits = st.lists(st.tuples(st.sampled_from(("add", "remove", "cut_below")), ranges), max_size=30)


def after(changes: list[tuple[str, tuple[int, int]]]) -> tuple[Intervals, set[int]]:
    """The intervals and the set that the same edits lead to; what each edit returns is compared on the way."""
    intervals, naive = Intervals(), set[int]()
    for change, (first, end) in changes:
        given_range = set(range(first, end))
        match change:
            case "add":
                assert intervals.add(first, end) == len(given_range - naive)
                naive |= given_range
            case "remove":
                assert intervals.remove(first, end) == len(given_range & naive)
                naive -= given_range
            case _:
                intervals.cut_below(first)
                naive = {number for number in naive if number >= first}
    return intervals, naive


@given(edits)
def test_edits_leave_the_same_numbers_as_in_a_set(changes: list[tuple[str, tuple[int, int]]]) -> None:
    intervals, naive = after(changes)
    assert {number for first, end in intervals for number in range(first, end)} == naive
    assert intervals.count == len(naive)
    assert all((number in intervals) == (number in naive) for number in range(-1, 62))


@given(edits)
def test_intervals_are_sorted_and_apart(changes: list[tuple[str, tuple[int, int]]]) -> None:
    intervals, _naive = after(changes)
    borders = [border for interval in intervals for border in interval]
    assert all(low < high for low, high in pairwise(borders))
    assert len(intervals) == len(borders) // 2


@given(edits, ranges)
def test_missing_and_first_missing_are_what_the_set_lacks(
    changes: list[tuple[str, tuple[int, int]]], asked: tuple[int, int]
) -> None:
    intervals, naive = after(changes)
    first, end = asked
    missing = [number for low, high in intervals.missing(first, end) for number in range(low, high)]
    assert missing == [number for number in range(first, end) if number not in naive]
    assert intervals.first_missing(first) == next(number for number in range(first, 200) if number not in naive)


def test_equal_numbers_make_equal_intervals() -> None:
    one, other = Intervals(), Intervals()
    one.add(0, 5)
    other.add(3, 5)
    assert one != other
    other.add(0, 3)
    assert one == other
