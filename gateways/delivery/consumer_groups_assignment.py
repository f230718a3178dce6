"""Which member of a consumer group should read which partition. Machine; pure.

Everybody gets as even a share as the topics they asked for allow, and what somebody has stays where evenness does not
ask for it. With equal wishes shares differ by one at most; with different ones no exchange, however long its chain,
would make them more even (an optimal semi-matching: Harvey, Ladner, Lovász and Tamir, 2006).
Neighbours: consumer_groups.py decides when a partition may really change hands.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from headrace.core_log.ids import StreamId


class Slot(NamedTuple):
    """One partition of a stream: what a member is given."""

    stream: StreamId
    partition: int


def assign(
    slots: Iterable[Slot], wishes: Mapping[str, frozenset[StreamId]], before: Mapping[Slot, str]
) -> dict[Slot, str]:
    """Who should have each slot: a member that asked for its stream. Slots that nobody asked for are left out.

    `before`: who has it now, or was to have it; of these as few as possible are moved.
    """
    return _Shares(wishes).share_out(slots, before)


class _Shares:
    def __init__(self, wishes: Mapping[str, frozenset[StreamId]]) -> None:
        self._takers: dict[StreamId, list[str]] = {}
        for member in sorted(wishes):
            for stream in wishes[member]:
                self._takers.setdefault(stream, []).append(member)
        self._wishes = wishes
        self._load = dict.fromkeys(wishes, 0)
        # What each member has of each stream; the last of a list is the first to go.
        self._has: dict[str, dict[StreamId, list[Slot]]] = {member: {} for member in wishes}

    def share_out(self, slots: Iterable[Slot], before: Mapping[Slot, str]) -> dict[Slot, str]:
        free: dict[StreamId, list[Slot]] = {}
        for slot in slots:
            member = before.get(slot)
            if member is not None and slot.stream in self._wishes.get(member, ()):
                self._give(slot, member)
            elif slot.stream in self._takers:
                free.setdefault(slot.stream, []).append(slot)
        # Streams that few ask for come first: the others can make up for it.
        for stream in sorted(free, key=lambda one: (len(self._takers[one]), one)):
            self._hand_out(free[stream], self._takers[stream])
        self._even_out()
        return {slot: member for member, streams in self._has.items() for has in streams.values() for slot in has}

    def _give(self, slot: Slot, member: str) -> None:
        self._has[member].setdefault(slot.stream, []).append(slot)
        self._load[member] += 1

    def _hand_out(self, slots: list[Slot], takers: list[str]) -> None:
        waiting = [(self._load[member], member) for member in takers]
        heapify(waiting)
        for slot in slots:
            load, member = heappop(waiting)
            self._give(slot, member)
            heappush(waiting, (load + 1, member))

    def _even_out(self) -> None:
        """Move along chains from those with much to those with less, until no chain gains anything."""
        settled: set[str] = set()
        while len(settled) < len(self._load):
            member = max((one for one in self._load if one not in settled), key=lambda one: (self._load[one], one))
            if self._load[member] - min(self._load.values()) < 2:
                return
            chain = self._chain_from(member)
            if chain:
                for giver, stream, taker in reversed(chain):
                    self._give(self._take(giver, stream), taker)
                # Somebody on the chain may reach others than before.
                settled.clear()
            else:
                settled.add(member)

    def _take(self, giver: str, stream: StreamId) -> Slot:
        self._load[giver] -= 1
        return self._has[giver][stream].pop()

    def _chain_from(self, start: str) -> list[tuple[str, StreamId, str]]:
        """The shortest chain of moves (giver, stream, taker) to the one with the least who has at least two less."""
        came_by: dict[str, tuple[str, StreamId]] = {}
        seen_streams: set[StreamId] = set()
        reached = deque([start])
        found: str | None = None
        while reached:
            giver = reached.popleft()
            for stream, has in self._has[giver].items():
                if not has or stream in seen_streams:
                    continue
                seen_streams.add(stream)
                for taker in self._takers[stream]:
                    if taker == start or taker in came_by:
                        continue
                    came_by[taker] = (giver, stream)
                    reached.append(taker)
                    if self._load[taker] + 2 <= self._load[start] and (
                        found is None or self._load[taker] < self._load[found]
                    ):
                        found = taker
        chain: list[tuple[str, StreamId, str]] = []
        while found is not None and found != start:
            giver, stream = came_by[found]
            chain.append((giver, stream, found))
            found = giver
        return chain[::-1]
