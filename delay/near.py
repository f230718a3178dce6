"""Ring 0: the due times and places of what is due soon, in memory. Machine; pure: the time comes in.

    slot (a second of due time) -> sorted runs of (due, place), 16 bytes for each record

What is added comes as columns; it is cut at the seconds, and each slot keeps a few sorted runs that are merged while
they are small, so adding costs O(log n) of a numpy operation and no merge is long enough to be felt. The ring has no
position: whatever is due by the time given comes out, so a clock that steps back or forth makes nothing early, late for
ever or double. Neighbours: ledger.py knows which places still count; delays.py takes out what is due.
"""

import numpy as np

from headrace.delay.marks import Places
from headrace.delay.rows import firing_order

SLOT_US = 1_000_000
# Longer runs are not merged any more: sorting 32,768 takes about 3 ms.
_MERGED_MAX = 32_768


class _Run:
    __slots__ = ("dues", "head", "places")

    def __init__(self, dues: Places, places: Places) -> None:
        self.dues = dues
        self.places = places
        self.head = 0

    @property
    def left(self) -> int:
        return len(self.dues) - self.head


class NearRing:
    __slots__ = ("_count", "_slots")

    def __init__(self) -> None:
        self._slots: dict[int, list[_Run]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, dues: Places, places: Places) -> None:
        """Both columns, in any order. They are kept as they are where they are sorted: not to be changed later."""
        count = len(dues)
        if count == 0:
            return
        self._count += count
        if count > 1 and not _in_order(dues, places):
            dues, places = _sorted(dues, places)
        first, last = int(dues[0]) // SLOT_US, int(dues[-1]) // SLOT_US
        if first == last:
            return self._add_to(first, _Run(dues, places))
        bounds = np.flatnonzero(np.diff(dues // SLOT_US)) + 1
        low = 0
        for high in [*bounds.tolist(), count]:
            self._add_to(int(dues[low]) // SLOT_US, _Run(dues[low:high], places[low:high]))
            low = high

    def _add_to(self, slot: int, run: _Run) -> None:
        runs = self._slots.setdefault(slot, [])
        while runs and run.left * 2 >= runs[-1].left and run.left + runs[-1].left <= _MERGED_MAX:
            other = runs.pop()
            run = _Run(
                *_sorted(
                    np.concatenate((other.dues[other.head :], run.dues)),
                    np.concatenate((other.places[other.head :], run.places)),
                )
            )
        runs.append(run)

    def take(self, now_us: int, count_max: int) -> tuple[Places, Places]:
        """(dues, places) of what is due at `now_us`, by due time, then by place; at most so many, the first due."""
        dues: list[Places] = []
        places: list[Places] = []
        room = count_max
        while self._slots and room > 0:
            slot = min(self._slots)
            if slot * SLOT_US > now_us:
                break
            taken = self._take_from(slot, now_us, room)
            if taken is None:
                break
            dues.append(taken[0])
            places.append(taken[1])
            room -= len(taken[0])
        if not dues:
            return _NONE, _NONE
        self._count -= count_max - room
        return np.concatenate(dues), np.concatenate(places)

    def _take_from(self, slot: int, now_us: int, room: int) -> tuple[Places, Places] | None:
        runs = self._slots[slot]
        counts = [min(int(np.searchsorted(run.dues[run.head :], now_us, side="right")), room) for run in runs]
        if not any(counts):
            return None
        pieces = list(zip(runs, counts, strict=True))
        dues = np.concatenate([run.dues[run.head : run.head + count] for run, count in pieces])
        places = np.concatenate([run.places[run.head : run.head + count] for run, count in pieces])
        if len(runs) > 1:
            owners = np.repeat(np.arange(len(runs)), counts)
            order = firing_order(dues, places)[:room]
            dues, places = dues[order], places[order]
            # All runs are in the same order, so what is taken of each is its beginning.
            counts = np.bincount(owners[order], minlength=len(runs)).tolist()
        for run, count in zip(runs, counts, strict=True):
            run.head += count
        left = [run for run in runs if run.left]
        if left:
            self._slots[slot] = left
        else:
            del self._slots[slot]
        return dues, places

    def next_due_us(self) -> int | None:
        """When something is due next; None when nothing waits."""
        if not self._slots:
            return None
        return min(int(run.dues[run.head]) for run in self._slots[min(self._slots)])


def _in_order(dues: Places, places: Places) -> bool:
    later = dues[1:] > dues[:-1]
    return bool((later | ((dues[1:] == dues[:-1]) & (places[1:] > places[:-1]))).all())


def _sorted(dues: Places, places: Places) -> tuple[Places, Places]:
    order = firing_order(dues, places)
    return dues[order], places[order]


_NONE = np.zeros(0, dtype=np.int64)
