"""A set of whole numbers kept as disjoint intervals. Value with edits; pure.

Serves wherever nearly everything below a mark is in: sequences of a producer, settled records of a view.
Invariant: starts and ends (exclusive) are sorted, and between two intervals at least one number is missing.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator


class Intervals:
    __slots__ = ("_ends", "_starts", "count")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self.count = 0

    def add(self, first: int, end: int) -> int:
        """Put first..end-1 in; returns how many of them were new."""
        if first >= end:
            return 0
        starts, ends = self._starts, self._ends
        # The usual case: it goes on where the last one ends.
        if starts and ends[-1] == first:
            ends[-1] = end
            self.count += end - first
            return end - first
        low = bisect_left(ends, first)
        high = bisect_right(starts, end)
        before = sum(ends[place] - starts[place] for place in range(low, high))
        if low < high:
            first = min(first, starts[low])
            end = max(end, ends[high - 1])
        starts[low:high] = [first]
        ends[low:high] = [end]
        added = end - first - before
        self.count += added
        return added

    def remove(self, first: int, end: int) -> int:
        """Take first..end-1 out; returns how many of them were in."""
        starts, ends = self._starts, self._ends
        low = bisect_right(ends, first)
        high = bisect_left(starts, end)
        if low >= high or first >= end:
            return 0
        removed = sum(min(ends[place], end) - max(starts[place], first) for place in range(low, high))
        kept_starts: list[int] = []
        kept_ends: list[int] = []
        if starts[low] < first:
            kept_starts.append(starts[low])
            kept_ends.append(first)
        if ends[high - 1] > end:
            kept_starts.append(end)
            kept_ends.append(ends[high - 1])
        starts[low:high] = kept_starts
        ends[low:high] = kept_ends
        self.count -= removed
        return removed

    def missing(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """The parts (first, end) of the range that are not in."""
        place = bisect_right(self._ends, first)
        while first < end:
            if place == len(self._starts) or self._starts[place] >= end:
                yield first, end
                return
            if self._starts[place] > first:
                yield first, self._starts[place]
            first = self._ends[place]
            place += 1

    def first_missing(self, at: int) -> int:
        """The smallest number >= at that is not in."""
        place = bisect_right(self._starts, at) - 1
        if place >= 0 and self._ends[place] > at:
            return self._ends[place]
        return at

    def cut_below(self, mark: int) -> None:
        """Forget everything below the mark."""
        self.remove(self._starts[0] if self._starts else mark, mark)

    def __contains__(self, number: int) -> bool:
        place = bisect_right(self._starts, number) - 1
        return place >= 0 and self._ends[place] > number

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._starts, self._ends, strict=True)

    def __len__(self) -> int:
        """How many intervals, not how many numbers (that is `count`)."""
        return len(self._starts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Intervals) and self._starts == other._starts and self._ends == other._ends

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Intervals({list(self)!r})"
