"""What the intake holds and no bucket does: rows in memory until they are sorted or fired. Machine; pure.

Rows stand in blocks in the order of the intake. A pass of the sorter takes one block; what it keeps (due before the
edge) stays in it until it is decided. Memory is 8 bytes for a row where records differ in their due times alone, as
they nearly always do; else 36 in the last block, and 16 or more in others that wait for the sorter; nothing once it has
moved. Invariant: blocks and the rows in them are in the order of offsets; sorted blocks come before the others.
Neighbours: rows.py has the rows, engine.py adds them at each commit.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from headrace.delay.marks import OFFSET_MASK
from headrace.delay.rows import ROW, PackedRows, Rows, joined, no_rows, under

# A pass holds the bodies of one block in memory.
BLOCK_COUNT_MAX = 65_536
_CAPACITY_MIN = 256
_NONE = np.zeros(0, dtype=np.int64)


class Block:
    __slots__ = ("_dues", "_packed", "_rows", "byte_count", "count", "end", "first", "is_moving", "is_sorted", "since")

    def __init__(self, first: int, since: float) -> None:
        # Intake offsets that this block speaks for.
        self.first = first
        self.end = first
        # When its first row came.
        self.since = since
        self.is_sorted = False
        # A pass is under way: what moves is here until it is decided.
        self.is_moving = False
        self.byte_count = 0
        self.count = 0
        # With room for more; none while they are packed.
        self._rows = no_rows()
        self._packed: PackedRows | None = None
        # With room for more, of packed rows that are alike.
        self._dues = _NONE

    def add(self, rows: Rows, byte_count: int) -> None:
        if self._packed is not None:
            # It is the last one again: those behind it were sorted, and it could not be.
            self.keep(self.rows)
        count = self.count + len(rows)
        if count > len(self._rows):
            room = np.empty(max(count, 2 * len(self._rows), _CAPACITY_MIN), dtype=ROW)
            room[: self.count] = self._rows[: self.count]
            self._rows = room
        self._rows[self.count : count] = rows
        self.count = count
        self.byte_count += byte_count
        self.end = (int(rows["place"][-1]) & OFFSET_MASK) + 1

    def add_alike(self, dues: npt.NDArray[np.int64], place: int, target: int, byte_count: int) -> None:
        """Neighbours from this place on that differ in their due times alone: as a rule all of a block, and then no row
        is made for any."""
        packed, count = self._packed, self.count + len(dues)
        if self.count and (packed is None or not packed.goes_on(place, target)):
            return self.add(PackedRows.alike(dues, place, target).unpack(), byte_count)
        first = place if packed is None else packed.first_place
        if count > len(self._dues):
            room = np.empty(max(count, 2 * len(self._dues), _CAPACITY_MIN), dtype=np.int64)
            room[: self.count] = self.dues
            self._dues = room
        self._dues[self.count : count] = dues
        self._packed = PackedRows.alike(self._dues[:count], first, target)
        self._rows = no_rows()
        self.count = count
        self.byte_count += byte_count
        self.end = (place & OFFSET_MASK) + len(dues)

    def pack(self) -> None:
        """No more will come."""
        if self._packed is not None:
            self._packed = self._packed.compact()
        elif self.count:
            self._packed = PackedRows(self.rows)
        self._rows, self._dues = no_rows(), _NONE

    @property
    def rows(self) -> Rows:
        """Not to be changed."""
        return self._rows[: self.count] if self._packed is None else self._packed.unpack()

    def find(self, hash: int) -> Rows:
        """Rows under this hash of an id; where all are packed, without making the others."""
        if self._packed is not None:
            return self._packed.find(hash)
        return under(self.rows, hash)

    @property
    def memory(self) -> int:
        """Bytes."""
        return self._rows.nbytes if self._packed is None else self._packed.memory

    @property
    def first_place(self) -> int:
        """Of the first row, of which there must be one."""
        return int(self._rows["place"][0]) if self._packed is None else self._packed.first_place

    @property
    def dues(self) -> npt.NDArray[np.int64]:
        """As in the rows, without making them."""
        return self._rows["due"][: self.count] if self._packed is None else self._packed.dues

    def snapshot(self) -> Rows | PackedRows:
        return self.rows if self._packed is None else self._packed

    def keep(self, rows: Rows) -> None:
        """Only these are left."""
        self._rows, self._dues = rows, _NONE
        self._packed = None
        self.count = len(rows)


class Waiting:
    __slots__ = ("_blocks",)

    def __init__(self) -> None:
        self._blocks: list[Block] = []

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks)

    def add(self, rows: Rows, byte_count: int, now: float) -> None:
        """Rows behind all that are here, by offset; no more than a block holds."""
        self._last(int(rows["place"][0]), len(rows), now).add(rows, byte_count)

    def add_alike(self, dues: npt.NDArray[np.int64], place: int, target: int, byte_count: int, now: float) -> None:
        """The same, of neighbours from this place on that differ in their due times alone."""
        self._last(place, len(dues), now).add_alike(dues, place, target, byte_count)

    def _last(self, place: int, count: int, now: float) -> Block:
        """The block that has room for so many from this place on."""
        last = self._blocks[-1] if self._blocks else None
        if last is None or last.is_sorted or last.count + count > BLOCK_COUNT_MAX:
            if last is not None and not last.is_sorted:
                last.pack()
            last = Block(place & OFFSET_MASK, now)
            self._blocks.append(last)
        return last

    @property
    def unsorted_memory(self) -> int:
        """What the rows take, in bytes; `unsorted_bytes` is what their bodies take on the disk."""
        return sum(block.memory for block in self._blocks if not block.is_sorted)

    @property
    def unsorted_bytes(self) -> int:
        return sum(block.byte_count for block in self._blocks if not block.is_sorted)

    def first_unsorted(self) -> Block | None:
        return next((block for block in self._blocks if not block.is_sorted), None)

    def forget_empty(self) -> None:
        self._blocks = [block for block in self._blocks if block.count or not block.is_sorted]

    def floor(self, end: int) -> int:
        """The lowest intake offset of a row; `end` when there is none."""
        for block in self._blocks:
            if block.count:
                return min(block.first_place & OFFSET_MASK, end)
            if not block.is_sorted:
                return min(block.first, end)
        return end

    def snapshot(self) -> list[Rows | PackedRows]:
        """All rows that are here now, which stay as they are whatever comes or goes: for `between`."""
        return [block.snapshot() for block in self._blocks]

    def find(self, hashes: list[int]) -> Rows:
        """Rows under one of these hashes of an id."""
        return joined([block.find(one) for block in self._blocks for one in set(hashes)])


def between(parts: Sequence[Rows | PackedRows], low_us: int, high_us: int) -> list[Rows]:
    """Rows due from `low_us` on and before `high_us`. In any thread: to look at millions takes a while."""
    found = []
    for part in parts:
        dues = part.dues if isinstance(part, PackedRows) else part["due"]
        within = (dues >= low_us) & (dues < high_us)
        if within.any():
            found.append((part.unpack() if isinstance(part, PackedRows) else part).compress(within))
    return found
