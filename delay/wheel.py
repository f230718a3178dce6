"""A hierarchical time wheel in memory: what is due, and when to look again. Machine: time comes in as `now_ms`.

    tick in binary    ...  | 8 bits | 8 bits | 8 bits |       with ticks of 1 ms a slot of
                              ring 2   ring 1   ring 0         ring 0 is 1 ms, of ring 1 256 ms, of ring 2 65 s ...

A timer stands in the ring of the highest 8 bits in which its tick differs from the wheel's position, in the slot that
those bits of its tick name. So everything in ring 0 is due before anything in ring 1, slots are met in rising order
and never wrap, and the next slot is the lowest one taken in the lowest ring that has any. When the position enters a
slot of an outer ring, its timers move inward (*cascade*); a timer moves at most once per ring. Rings are made as far
out as the farthest timer needs.

A timer whose tick the position has passed is *overdue*: it was added late, or the clock was set back since. The
position never goes back: after a step backwards the overdue wait in a heap until the clock reaches them, so nothing
fires early and nothing fires twice; what is added meanwhile costs O(log n) until the clock has caught up, else O(1).

Invariants: every timer of a ring is due after the position; while a slot is being emptied (*open*), what is added
within its time joins it; hence timers of one tick fire in the order in which they were added.
Neighbours: none below; views, sessions and connections keep their expiry, heartbeats and keep-alives here.
"""

from collections import deque
from heapq import heappop, heappush
from itertools import count
from typing import Generic, TypeAlias, TypeVar

T = TypeVar("T")

_RING_BITS = 8
_SLOT_MASK = (1 << _RING_BITS) - 1


class Timer(Generic[T]):
    """What `add` returns and `cancel` takes. Each is itself and equals no other."""

    __slots__ = ("bucket", "item", "tick")

    def __init__(self, tick: int, item: T) -> None:
        self.tick = tick
        self.item = item
        # Where it waits; it has fired or was cancelled when it is no longer in there.
        self.bucket: _Bucket[T] = {}


# In the order of adding; a dict, so that a timer is taken out in O(1).
_Bucket: TypeAlias = dict[Timer[T], None]


class _Ring(Generic[T]):
    """256 slots of the same length, of which most are empty."""

    __slots__ = ("buckets", "shift", "taken")

    def __init__(self, level: int) -> None:
        self.shift = level * _RING_BITS
        # One bit per slot that has a bucket: the lowest is found without looking at the others.
        self.taken = 0
        self.buckets: dict[int, _Bucket[T]] = {}

    def bucket_of(self, tick: int) -> _Bucket[T]:
        slot = tick >> self.shift & _SLOT_MASK
        bucket = self.buckets.get(slot)
        if bucket is None:
            bucket = self.buckets[slot] = {}
            self.taken |= 1 << slot
        return bucket

    def lowest(self) -> int | None:
        """The first slot that holds a timer. Slots emptied by cancelling are given up here."""
        while self.taken:
            slot = (self.taken & -self.taken).bit_length() - 1
            if self.buckets[slot]:
                return slot
            self.take(slot)
        return None

    def take(self, slot: int) -> _Bucket[T]:
        self.taken ^= 1 << slot
        return self.buckets.pop(slot)

    def start_of(self, slot: int, position: int) -> int:
        """The first tick of a slot: the bits above are those of the position."""
        above = self.shift + _RING_BITS
        return position >> above << above | slot << self.shift


class Wheel(Generic[T]):
    """Items with due times. Due times are rounded up to whole ticks, so nothing fires early."""

    def __init__(self, *, tick_ms: int = 1, now_ms: int = 0) -> None:
        if tick_ms < 1:
            raise ValueError(f"tick_ms is at least 1, not {tick_ms}")
        if now_ms < 0:
            raise ValueError(f"now_ms is not negative, as {now_ms} is")
        self._tick_ms = tick_ms
        # Every tick up to here has been looked at. Never goes back.
        self._position = now_ms // tick_ms
        self._rings: list[_Ring[T]] = []
        self._overdue: list[tuple[int, int, Timer[T]]] = []
        self._overdue_bucket: _Bucket[T] = {}
        self._overdue_numbers = count()
        # The slot that is being emptied: what is left of it in order, and its last tick.
        self._open: deque[Timer[T]] = deque()
        self._open_bucket: _Bucket[T] = {}
        self._open_end = -1
        self._count = 0

    def __len__(self) -> int:
        """Timers that have neither fired nor been cancelled."""
        return self._count

    def add(self, due_ms: int, item: T) -> Timer[T]:
        """A due time that has passed is lawful: it fires with the next `advance`."""
        timer = Timer(-(-due_ms // self._tick_ms), item)
        self._count += 1
        if self._open and self._position <= timer.tick <= self._open_end:
            self._open.append(timer)
            timer.bucket = self._open_bucket
            timer.bucket[timer] = None
        else:
            self._place(timer)
        return timer

    def cancel(self, timer: Timer[T]) -> bool:
        """Whether it was still waiting: False means it has fired or was cancelled before."""
        if timer not in timer.bucket:
            return False
        del timer.bucket[timer]
        self._count -= 1
        return True

    def advance(self, now_ms: int, *, work_max: int | None = None) -> list[T]:
        """What is due at `now_ms`, by due time, then in the order of adding.

        With `work_max`, no more than so many timers are fired or moved inward; then more may be due than was returned,
        and `next_due_ms` says so: it is not after `now_ms`. To be called again, with the same or a later time.
        """
        now = now_ms // self._tick_ms
        left = work_max if work_max is not None else -1
        fired: list[T] = []
        while left:
            if self._overdue and self._overdue[0][0] <= now:
                _, _, timer = heappop(self._overdue)
                if timer in self._overdue_bucket:
                    del self._overdue_bucket[timer]
                    fired.append(timer.item)
                    left -= 1
            elif self._open:
                timer = self._open.popleft()
                if timer in self._open_bucket:
                    del self._open_bucket[timer]
                    if timer.tick == self._position <= now:
                        fired.append(timer.item)
                    else:
                        self._place(timer)
                    left -= 1
            else:
                ring, slot, start = self._next_slot()
                if ring is None or start > now:
                    self._position = max(self._position, now)
                    break
                self._position = start
                bucket = ring.take(slot)
                if ring.shift == 0 and (left < 0 or len(bucket) <= left):
                    fired.extend([timer.item for timer in bucket])
                    left -= len(bucket) if left > 0 else 0
                    bucket.clear()
                else:
                    self._open = deque(bucket)
                    self._open_bucket = bucket
                    self._open_end = start + (1 << ring.shift) - 1
        self._count -= len(fired)
        return fired

    def next_due_ms(self) -> int | None:
        """When to call `advance` next; None when nothing waits.

        Exact for what is overdue or within ring 0; otherwise the beginning of the first slot taken, which may be before
        its first timer and is never after. Calling `advance` then brings the answer nearer: at most one call per ring.
        """
        while self._overdue and self._overdue[0][2] not in self._overdue_bucket:
            heappop(self._overdue)
        if self._overdue:
            return self._overdue[0][0] * self._tick_ms
        if self._open_bucket:
            return self._position * self._tick_ms
        ring, _, start = self._next_slot()
        return start * self._tick_ms if ring is not None else None

    def _place(self, timer: Timer[T]) -> None:
        tick = timer.tick
        if tick <= self._position:
            heappush(self._overdue, (tick, next(self._overdue_numbers), timer))
            timer.bucket = self._overdue_bucket
        else:
            level = ((tick ^ self._position).bit_length() - 1) // _RING_BITS
            while level >= len(self._rings):
                self._rings.append(_Ring(len(self._rings)))
            timer.bucket = self._rings[level].bucket_of(tick)
        timer.bucket[timer] = None

    def _next_slot(self) -> tuple[_Ring[T] | None, int, int]:
        """The ring, slot and first tick of what comes next."""
        for ring in self._rings:
            slot = ring.lowest()
            if slot is not None:
                return ring, slot, ring.start_of(slot, self._position)
        return None, -1, -1
