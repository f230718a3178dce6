"""Where a parked record is, and what was decided about it, in a few bytes each. Machine; pure.

A *place* is one number: which log (a source: the intake or a bucket's partition), and the offset there.

     63        44                 0
     | source  | offset           |

Marks keep one byte for each offset of one source about which something was decided, in blocks that are made when
needed: nothing for what is pending, and nothing for gaps. Neighbours: ledger.py keeps one Marks for each source.
"""

from collections.abc import Iterable, Iterator
from enum import IntEnum

import lz4.block
import numpy as np
import numpy.typing as npt

Places = npt.NDArray[np.int64]
States = npt.NDArray[np.uint8]

OFFSET_BITS = 44
OFFSET_MASK = (1 << OFFSET_BITS) - 1
# The intake has the highest number, so that of one instant what was parked earlier comes first.
INTAKE = (1 << 19) - 1
_BLOCK_BITS = 14
_BLOCK_SIZE = 1 << _BLOCK_BITS


class State(IntEnum):
    PENDING = 0
    FIRED = 1
    CANCELLED = 2
    # Its record stands elsewhere now: sorted into a bucket, or rescheduled.
    MOVED = 3


def by_source(places: Places) -> list[tuple[int, slice | npt.NDArray[np.bool_]]]:
    """Each source among these places, and which of them are its own. One source is the usual case."""
    numbers = places >> OFFSET_BITS
    if not len(numbers):
        return []
    if len(numbers) == 1 or bool((numbers == numbers[0]).all()):
        return [(int(numbers[0]), slice(None))]
    return [(number, numbers == number) for number in np.unique(numbers).tolist()]


class Marks:
    __slots__ = ("_blocks", "_packed")

    def __init__(self) -> None:
        self._blocks: dict[int, States] = {}
        # Blocks as they are written down, of those that were and have not changed since.
        self._packed: dict[int, bytes] = {}

    def set(self, offsets: Places, states: int | States) -> None:
        if not len(offsets):
            return
        blocks = offsets >> _BLOCK_BITS
        low, high = int(blocks.min()), int(blocks.max())
        # Neighbours are the usual case, and to look at each block is then cheaper than to sort.
        for number in range(low, high + 1) if high - low < 64 else np.unique(blocks).tolist():
            block = self._blocks.get(number)
            if block is None and number not in (low, high) and not bool((blocks == number).any()):
                continue
            if block is None:
                block = self._blocks[number] = np.zeros(_BLOCK_SIZE, dtype=np.uint8)
            within = blocks == number
            self._packed.pop(number, None)
            block[offsets[within] & (_BLOCK_SIZE - 1)] = states if isinstance(states, int) else states[within]

    def get(self, offsets: Places) -> States:
        found = np.zeros(len(offsets), dtype=np.uint8)
        if not self._blocks or not len(offsets):
            return found
        blocks = offsets >> _BLOCK_BITS
        low, high = int(blocks.min()), int(blocks.max())
        for number, block in self._blocks.items():
            if low <= number <= high:
                within = blocks == number
                found[within] = block[offsets[within] & (_BLOCK_SIZE - 1)]
        return found

    def at(self, offset: int) -> State:
        block = self._blocks.get(offset >> _BLOCK_BITS)
        return State.PENDING if block is None else State(int(block[offset & (_BLOCK_SIZE - 1)]))

    def forget_below(self, offset: int) -> None:
        """Offsets below are gone; whole blocks of them need no memory."""
        for number in [one for one in self._blocks if (one + 1) << _BLOCK_BITS <= offset]:
            del self._blocks[number]
            self._packed.pop(number, None)

    def packing(self) -> Iterator[None]:
        """Get ready to be encoded, a block at a time: one takes 10 to 20 us. Marks may be set in between."""
        for number in list(self._blocks):
            if number in self._blocks and number not in self._packed:
                self._pack(number)
                yield

    def _pack(self, number: int) -> bytes:
        packed = self._packed.get(number)
        if packed is None:
            packed = self._packed[number] = lz4.block.compress(self._blocks[number].tobytes())
        return packed

    def encode(self) -> list[tuple[int, bytes]]:
        return [(number, self._pack(number)) for number in self._blocks]

    @classmethod
    def decode(cls, blocks: Iterable[tuple[int, bytes]]) -> "Marks":
        marks = cls()
        for number, packed in blocks:
            marks._blocks[number] = np.frombuffer(lz4.block.decompress(packed), dtype=np.uint8).copy()
        return marks
