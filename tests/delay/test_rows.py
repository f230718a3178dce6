"""Rows that are packed come back as they were; and rows are put in the order in which they fire."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.delay.marks import OFFSET_BITS
from headrace.delay.rows import ROW, PackedRows, _made_hashes, by_due, firing_order

_one = st.tuples(
    st.integers(0, 2**62),
    st.integers(1, 3),
    st.integers(0, 9),
    st.none() | st.integers(0, 2**64 - 1),
    st.sampled_from([7, 7, 7, 2**32 - 1]),
)


@settings(deadline=None)
@given(st.lists(_one, min_size=1, max_size=20), st.integers(0, 3), st.booleans())
def test_unpacked_rows_are_those_that_were_packed(
    made: list[tuple[int, int, int, int | None, int]], source: int, usual: bool
) -> None:
    rows = np.zeros(len(made), dtype=ROW)
    rows["due"] = [one[0] for one in made]
    steps = np.ones(len(made), dtype=np.int64) if usual else np.array([one[1] for one in made])
    rows["place"] = np.cumsum(steps) | (source << OFFSET_BITS)
    rows["number"] = np.cumsum(steps) - (0 if usual else np.array([one[2] for one in made]) // 9)
    rows["id"] = _made_hashes(rows["number"])
    rows["target"] = 7
    if not usual:
        for index, one in enumerate(made):
            rows["target"][index] = one[4]
            if one[3] is not None:
                rows["id"][index] = one[3]
    packed = PackedRows(rows)
    assert packed.count == len(made)
    assert packed.unpack().tobytes() == rows.tobytes()
    for hash in {*rows["id"].tolist(), 0, 5, 2**64 - 1}:
        assert packed.find(hash).tobytes() == rows[rows["id"] == np.uint64(hash)].tobytes()


_far = st.sampled_from([0, 1, 2, 2**50, 2**62])


@given(st.lists(st.tuples(_far, st.integers(0, 3), st.integers(0, 2**19 - 1)), max_size=30))
def test_the_order_of_firing_is_by_source_due_time_and_number_whatever_is_equal(
    made: list[tuple[int, int, int]],
) -> None:
    dues, numbers, sources = (np.array([one[place] for one in made], dtype=np.int64) for place in range(3))
    order = firing_order(dues, numbers, sources).tolist()
    assert sorted(order) == list(range(len(made)))
    assert [(sources[at], dues[at], numbers[at]) for at in order] == sorted(
        zip(sources.tolist(), dues.tolist(), numbers.tolist(), strict=True)
    )


def test_of_one_instant_what_was_parked_first_comes_first() -> None:
    rows = np.zeros(1000, dtype=ROW)
    rows["due"] = 7
    rows["number"] = np.arange(1000)[::-1]
    assert by_due(rows)["number"].tolist() == list(range(1000))
