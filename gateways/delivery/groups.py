"""Who may take from which lane of a partitioned queue. Machine.

Records with one key are in one lane (`x-partitions`), and a lane is given to one consumer at a time, so each key is
worked on in order however many consumers there are. Lanes are shared out evenly among the consumers of the highest
priority; who comes or goes moves no more lanes than evenness asks for. A lane that was given to another is not taken
from before everything that its former owner holds of it is settled or came back.
Invariant: what is held of a lane is held by one taker.
"""

from collections.abc import Iterator, Sequence
from typing import Generic, Protocol, TypeVar


class Member(Protocol):
    """Somebody who takes records."""

    priority: int


M = TypeVar("M", bound=Member)


class LaneGroup(Generic[M]):
    def __init__(self, lane_count: int) -> None:
        self.owners: list[M | None] = [None] * lane_count
        # How many records of each lane are handed out and not settled yet, and to whom. None: to nobody in particular.
        self._held = [0] * lane_count
        self._holders: list[M | None] = [None] * lane_count
        self._turn = 0

    def share_out(self, members: Sequence[M]) -> None:
        """Members came or went: everybody gets an even share, and keeps what it has where that is possible."""
        top = max((member.priority for member in members), default=0)
        eligible = [member for member in members if member.priority == top]
        lanes: dict[M, list[int]] = {member: [] for member in eligible}
        free: list[int] = []
        for lane, owner in enumerate(self.owners):
            if owner is not None and owner in lanes:
                lanes[owner].append(lane)
            else:
                free.append(lane)
        # Those who have the most keep the odd ones.
        in_order = sorted(eligible, key=lambda member: -len(lanes[member]))
        for place, member in enumerate(in_order):
            share = len(self.owners) // len(in_order) + (place < len(self.owners) % len(in_order))
            # Idle lanes can move at once.
            owned = sorted(lanes[member], key=lambda lane: self._held[lane] == 0)
            lanes[member], surplus = owned[:share], owned[share:]
            free += surplus
        for lane in free:
            self.owners[lane] = None
        for place, member in enumerate(in_order):
            share = len(self.owners) // len(in_order) + (place < len(self.owners) % len(in_order))
            while len(lanes[member]) < share:
                lane = free.pop()
                lanes[member].append(lane)
                self.owners[lane] = member

    def turn(self) -> Iterator[int]:
        """All lanes, those first that were not served last."""
        count = len(self.owners)
        first = self._turn
        return ((first + step) % count for step in range(count))

    def may_take(self, lane: int, taker: M | None) -> bool:
        """Whether this taker (None: somebody who takes one record and is no member) may have the next of a lane."""
        return not self._held[lane] or (taker is not None and self._holders[lane] is taker)

    def note_taken(self, lane: int, taker: M | None, count: int) -> None:
        assert self.may_take(lane, taker)
        self._held[lane] += count
        self._holders[lane] = taker
        self._turn = (lane + 1) % len(self.owners)

    def note_done(self, lane: int, count: int) -> None:
        """Settled, rejected or given back."""
        self._held[lane] -= count
        assert self._held[lane] >= 0
        if not self._held[lane]:
            self._holders[lane] = None
