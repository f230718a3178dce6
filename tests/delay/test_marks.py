"""A byte for each place of which something was decided, against a dict."""

from itertools import islice

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.delay.marks import INTAKE, OFFSET_BITS, Marks, State, by_source

edits = st.lists(
    st.tuples(st.lists(st.integers(0, 200_000), min_size=1, max_size=30, unique=True), st.sampled_from(list(State)))
)


@given(edits, st.integers(0, 200_000))
def test_marks_are_a_dict(changes: list[tuple[list[int], State]], floor: int) -> None:
    marks, naive = Marks(), dict.fromkeys([0, 16_384, floor], State.PENDING)
    for offsets, state in changes:
        marks.set(np.array(offsets, dtype=np.int64), int(state))
        naive |= dict.fromkeys(offsets, state)
        # What is ready to be written down is made anew where it changes.
        for _ in islice(marks.packing(), 3):
            pass
    offsets = sorted(naive)
    column = np.array(offsets, dtype=np.int64)
    assert marks.get(column).tolist() == [naive[one] for one in offsets]
    assert all(marks.at(one) == naive[one] for one in offsets)
    again = Marks.decode(marks.encode())
    again.forget_below(floor)
    kept = column[column >= floor]
    assert again.get(kept).tolist() == [naive[one] for one in kept.tolist()]


def test_places_are_told_apart_by_their_source() -> None:
    places = np.array([1 << OFFSET_BITS | 5, INTAKE << OFFSET_BITS | 7, 1 << OFFSET_BITS | 6], dtype=np.int64)
    found = {number: places[which].tolist() for number, which in by_source(places)}
    assert found == {1: [places[0], places[2]], INTAKE: [places[1]]}
    assert by_source(places[:0]) == []
