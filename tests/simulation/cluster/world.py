"""The world in which a simulated cluster lives: its time, what is to happen when, its dice, and the trace. Driver for
tests.

Everything happens at a moment of the world's time and in the order in which it was asked for; nothing depends on the
real clock, on addresses of objects or on the seed of hashes. The trace is hashed as it grows: two runs of one seed have
the same hash, or the simulation is not to be trusted.
"""

from collections import Counter, deque
from collections.abc import Callable
from hashlib import blake2b
from heapq import heappop, heappush
from random import Random

TAIL = 400
# Some thirty times what a run has; more is a loop that does not end.
EVENTS_MAX = 60_000
# The wall clock of the world when it begins.
EPOCH_US = 1_700_000_000_000_000


class Violation(Exception):
    """Something that must always hold does not."""


class World:
    def __init__(self, seed: int, *, keep_trace: bool = False) -> None:
        self.seed = seed
        self.now = 0.0
        self.tail: deque[str] = deque(maxlen=None if keep_trace else TAIL)
        self.counts: Counter[str] = Counter()
        self.is_over = False
        # Whose loop is at work.
        self.running: object = None
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._event_count = 0
        self._hash = blake2b(digest_size=16)
        self._violation: Violation | None = None

    def dice(self, name: str) -> Random:
        """Dice of its own for each matter, so that one more throw for one does not change all others."""
        return Random(f"{self.seed}/{name}")

    # -- time ---------------------------------------------------------------------------------------------------

    def at(self, when: float, what: Callable[[], None]) -> None:
        self._number += 1
        heappush(self._heap, (max(when, self.now), self._number, what))

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        self.at(self.now + seconds, what)

    def run_until(self, end: float, is_done: Callable[[], bool] | None = None) -> bool:
        """Let time pass; True when it is done before the end. Raises the first Violation that was found."""
        heap = self._heap
        while heap and heap[0][0] <= end:
            self.now, _, what = heappop(heap)
            self._event_count += 1
            if self._event_count == EVENTS_MAX:
                self.violated(f"the nodes keep each other busy: {EVENTS_MAX} events in {self.now:.0f} seconds")
            what()
            self.raise_violation()
            if is_done is not None and is_done():
                return True
        self.now = max(self.now, end)
        self.raise_violation()
        return False

    def raise_violation(self) -> None:
        if self._violation is not None:
            raise self._violation

    # -- what happened ------------------------------------------------------------------------------------------

    def note(self, what: str) -> None:
        line = f"{self.now:10.4f} {what}"
        self._hash.update(line.encode())
        self.tail.append(line)

    def mark(self, *what: object) -> None:
        """Of the hash of the trace, but not worth a line."""
        self._hash.update(repr((self.now, what)).encode())

    @property
    def trace_hash(self) -> str:
        return self._hash.hexdigest()

    def violated(self, what: str) -> None:
        """Noted here rather than raised, since whoever finds out may be deep inside of a node."""
        if self._violation is None:
            self.note(f"VIOLATION {what}")
            self._violation = Violation(what)
