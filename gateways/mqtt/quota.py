"""How many messages may wait for one session, and what becomes of those beyond that. Machine.

Those wait that have QoS 1 or 2, match, and are not in flight: what the client's window has room for does not count. For
a session that is connected the count is exact: `unread` has what lies ahead in the log, the session itself the rest.
What a sleeping one missed is counted when it wakes (catch_up.py).

drop-oldest lets go of what has waited longest. refuse-newest does not take what comes; such records stay in the log, in
front of others that are taken later, and the session passes over them: each stretch of them is a `Hole`. Either way a
record keeps its number, which follows from the log alone (session.py).
Invariant: holes are in the order of the log, and something that waits lies between any two: there are few.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class Overflow(StrEnum):
    DROP_OLDEST = "drop-oldest"
    REFUSE_NEWEST = "refuse-newest"


@dataclass(slots=True)
class Hole:
    """Refused: `count` of the records from first to end-1, all that the session would have had there."""

    first: int
    end: int
    count: int


class Quota:
    __slots__ = (
        "_kept_to",
        "_taken_to",
        "count_max",
        "counting_from",
        "holes",
        "missed_count",
        "overflow",
        "passing_over",
        "unread",
    )

    def __init__(self, count_max: int, overflow: Overflow) -> None:
        self.count_max = count_max
        self.overflow = overflow
        # Records that were appended since the session is connected, and it has not been offered yet.
        self.unread = 0
        # So many of the oldest of them are let go of.
        self.passing_over = 0
        self.holes: deque[Hole] = deque()
        # While what it missed is counted: from where it reads again afterwards (-1: it is not), and how many so far.
        self.counting_from = -1
        self.missed_count = 0
        # Behind the last of those that it may have of them.
        self._kept_to = -1
        # Behind the last record that was taken.
        self._taken_to = 0

    @property
    def is_counting(self) -> bool:
        return self.counting_from >= 0

    def forget(self) -> None:
        """The client has gone, or has caught up: nothing that is known lies ahead."""
        self.unread = self.passing_over = 0
        self.counting_from = -1

    # -- what a sleeping session missed -------------------------------------------------------------------------

    def begin_counting(self, position: int, awake_from: int) -> None:
        self.counting_from = position
        self.missed_count = 0
        self._kept_to = -1
        # What is refused from now on is no part of a hole from before it slept.
        self._taken_to = awake_from

    def count_missed(self, offset: int, count: int) -> None:
        """Neighbours of the log that it missed, the next in order."""
        room = self.count_max - self.missed_count
        self.missed_count += count
        if room > 0:
            self._kept_to = offset + min(room, count)

    def end_counting(self, awake_from: int) -> int:
        """All below `awake_from` are counted. Returns how many were refused; the oldest are let go of on the way."""
        self.counting_from = -1
        excess = max(0, self.missed_count - self.count_max)
        self.unread += self.missed_count
        if self.overflow is Overflow.DROP_OLDEST:
            self.passing_over = excess
            return 0
        if excess:
            self.unread -= excess
            self._insert(Hole(self._kept_to, awake_from, excess))
        return excess

    def _insert(self, hole: Hole) -> None:
        """In front of those that were made since the session is awake; it takes in whatever it covers."""
        later = [one for one in self.holes if one.first >= hole.end]
        earlier = [one for one in self.holes if one.first < hole.first]
        hole.count += sum(one.count for one in self.holes if hole.first <= one.first < hole.end)
        self.holes = deque((*earlier, hole, *later))

    # -- what comes while it is awake ---------------------------------------------------------------------------

    def admitted(self, waiting_count: int, room: int, offset: int, count: int) -> int:
        """How many of so many neighbours are taken; the rest is refused. For refuse-newest."""
        # While it is counted, as much as may wait is taken to be there.
        ahead = self.count_max + self.unread if self.is_counting else self.unread
        free = self.count_max + room - waiting_count - ahead
        taken = max(0, min(count, free))
        if taken:
            self._taken_to = offset + taken
        if taken < count:
            self._refuse(offset + taken, offset + count, count - taken)
        return taken

    def _refuse(self, first: int, end: int, count: int) -> None:
        last = self.holes[-1] if self.holes else None
        if last is not None and self._taken_to <= last.first:
            last.end = end
            last.count += count
        else:
            self.holes.append(Hole(first, end, count))

    # -- what was refused, when it is met in the log -------------------------------------------------------------

    def outside(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """The parts of a stretch of the log that were not refused."""
        for hole in self.holes:
            if hole.end <= first:
                continue
            if hole.first >= end:
                break
            if first < hole.first:
                yield first, hole.first
            first = hole.end
        if first < end:
            yield first, end

    def passed(self, offset: int) -> int:
        """Everything before this offset has gone out or never will: how many of that were refused. Forgets them."""
        count = 0
        while self.holes and self.holes[0].end <= offset:
            count += self.holes.popleft().count
        return count

    def before(self, offset: int) -> tuple[int, int]:
        """The same for whoever only asks: the number, and the offset or the hole's beginning if it lies in one."""
        count = 0
        for hole in self.holes:
            if hole.first >= offset:
                break
            if hole.end > offset:
                return count, hole.first
            count += hole.count
        return count, offset
