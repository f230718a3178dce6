"""Who may hand records to consumers that must be alone: single active and exclusive ones (Q5). Machine; no clock.

Neither of two leaders at once can commit for the other, but both could hand out the same record. So a follower that
takes an answer promises its leader not to begin to dispatch to such consumers for a while, counted by its own clock
from then on; the leader dispatches to them only while it has such promises of all who could be elected in its place,
counted by its own clock from when it sent the answer, which was before. No controller and no comparison of clocks is
involved.

A promise made to a node is void once that one follows us: it has closed its doors first, or is another life of it. A
node that starts does not know what it promised before, and takes it that it did.
"""

from collections.abc import Iterable

# Clocks run at rates that differ by less than this share.
MARGIN = 1 / 12


class Promises:
    def __init__(self, seconds: float, *, promised_before_s: float | None) -> None:
        """`promised_before_s`: an earlier life may have promised something until this moment; None: there was none."""
        self._seconds = seconds
        # By node, until when: what was promised here, and (of a leader) to it. None: to somebody in an earlier life.
        self._made: dict[int | None, float] = {}
        self._held: dict[int, float] = {}
        if promised_before_s is not None:
            self._made[None] = promised_before_s + seconds

    def make(self, leader: int, now_s: float) -> None:
        """A follower takes its leader's answer; the next fetch tells so."""
        self._made[leader] = now_s + self._seconds

    def begin_to_lead(self) -> None:
        self._held = {}

    def hold(self, follower: int, sent_s: float) -> None:
        """A follower of this stint has promised, on an answer that was sent at this moment by our clock."""
        until = sent_s + self._seconds * (1 - MARGIN)
        self._held[follower] = max(until, self._held.get(follower, until))

    def release(self, node: int) -> None:
        """It follows us: whatever was promised to it, it dispatches nothing."""
        self._made.pop(node, None)

    def may_dispatch(self, rivals: Iterable[int], now_s: float) -> bool:
        """`rivals`: who could be elected in our place."""
        self._made = {node: until for node, until in self._made.items() if until > now_s}
        return not self._made and all(self._held.get(node, now_s) > now_s for node in rivals)
