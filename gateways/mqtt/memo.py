"""Bytes that were worked out before. Value: a dict that is bounded in entries and in bytes.

Topics and property bytes come again and again, so looking one up (0.03 us) takes the place of encoding or translating
it. Nobody can fill the memory with them: a memo that is full starts again, for those in use are back after one look
each and no hit pays for an order of use, and what is long is not kept at all.
Neighbours: encoder.py and routingkeys.py look into memos.
"""

from collections.abc import Callable
from typing import TypeVar

K = TypeVar("K")


class Memo(dict[K, bytes]):
    """`memo[key]` is `compute(key)`."""

    def __init__(self, compute: Callable[[K], bytes], *, count_max: int = 16_384, bytes_max: int = 256) -> None:
        self._compute = compute
        self._count_max = count_max
        self._bytes_max = bytes_max

    def __missing__(self, key: K) -> bytes:
        found = self._compute(key)
        if len(found) <= self._bytes_max:
            if len(self) >= self._count_max:
                self.clear()
            self[key] = found
        return found
