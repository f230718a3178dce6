"""Ring 0 against a sorted list: whatever is added in whatever pieces, it comes out by due time, once and not early."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.delay.near import SLOT_US, NearRing

pieces = st.lists(st.lists(st.integers(0, 5 * SLOT_US), max_size=40), max_size=12)
times = st.lists(st.tuples(st.integers(-SLOT_US, 6 * SLOT_US), st.integers(1, 30)), max_size=12)


@given(pieces, times)
def test_ring_is_a_sorted_list(parts: list[list[int]], looks: list[tuple[int, int]]) -> None:
    ring, number = NearRing(), 0
    naive: list[tuple[int, int]] = []
    for at in range(max(len(parts), len(looks))):
        dues = parts[at] if at < len(parts) else []
        places = list(range(number, number + len(dues)))
        number += len(dues)
        ring.add(np.array(dues, dtype=np.int64), np.array(places, dtype=np.int64))
        naive = sorted(naive + list(zip(dues, places, strict=True)))
        assert ring.next_due_us() == (naive[0][0] if naive else None)
        if at < len(looks):
            now_us, count = looks[at]
            taken = [one for one in naive if one[0] <= now_us][:count]
            found_dues, found_places = ring.take(now_us, count)
            assert list(zip(found_dues.tolist(), found_places.tolist(), strict=True)) == taken
            naive = naive[len(taken) :]
        assert len(ring) == len(naive)
