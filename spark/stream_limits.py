"""How much of what waits goes into the next batch of a stream. Machine: no I/O.

A limit is dealt out in proportion to what waits in each partition, so that no partition is starved by a large one; at
least one record of each that has any, so that all of them move. Bytes are those of the log: records have no size before
they are read, so a share of bytes becomes records by the places at which batches begin.
Neighbours: stream.py knows what waits.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from headrace.spark.access import Slice
from headrace.spark.options import Position

Backlog = Mapping[Position, tuple[int, int]]


def by_rows(backlog: Backlog, rows: int) -> dict[Position, int]:
    """The ends of a batch of so many records."""
    total = sum(end - start for start, end in backlog.values())
    if total <= rows:
        return {at: end for at, (_, end) in backlog.items()}
    return {at: start + _share(end - start, rows, total) for at, (start, end) in backlog.items()}


def by_bytes(backlog: Backlog, slices: Mapping[Position, Sequence[Slice]], size: int) -> dict[Position, int]:
    """The ends of a batch of about so many bytes. `slices` are where the backlog lies."""
    places = {at: _places(slices[at], start, end) for at, (start, end) in backlog.items() if start < end}
    sizes = {at: found[-1][1] for at, found in places.items()}
    total = sum(sizes.values())
    ends = {at: end for at, (_, end) in backlog.items()}
    if total <= size:
        return ends
    for at, found in places.items():
        start, _ = backlog[at]
        ends[at] = max(start + 1, _offset_at(found, sizes[at] * size // total))
    return ends


def _share(count: int, limit: int, total: int) -> int:
    return max(count * limit // total, 1) if count else 0


def _places(slices: Sequence[Slice], start: int, end: int) -> list[tuple[int, int]]:
    """Offsets, and how many bytes of the backlog lie before each; the first is its start, the last its end."""
    points: list[tuple[int, int]] = []
    before = 0
    for one in slices:
        cuts = [(offset, before + position - one.position) for offset, position in one.cuts]
        points += [(one.first_offset, before), *cuts]
        before += one.byte_count
        points.append((one.next_offset, before))
    first, last = _bytes_at(points, start), _bytes_at(points, end)
    inner = [(offset, at - first) for offset, at in points if start < offset < end]
    return [(start, 0), *inner, (end, max(last - first, 1))]


def _bytes_at(points: Sequence[tuple[int, int]], offset: int) -> int:
    """Between two known places records are taken to be of one size."""
    for (low, low_bytes), (high, high_bytes) in pairwise(points):
        if low <= offset <= high and high > low:
            return low_bytes + (high_bytes - low_bytes) * (offset - low) // (high - low)
    return points[0][1] if offset <= points[0][0] else points[-1][1]


def _offset_at(places: Sequence[tuple[int, int]], size: int) -> int:
    for (low, low_bytes), (high, high_bytes) in pairwise(places):
        if size < high_bytes:
            within = max(size - low_bytes, 0)
            return low + (high - low) * within // max(high_bytes - low_bytes, 1)
    return places[-1][0]
