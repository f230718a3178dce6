"""What publishers and consumers saw while the broker was being killed, and whether that may be so. Machine: no I/O.

A message is a publisher and a number, 1, 2, 3... Sent again because its confirm never came, it is another *copy* (the
attempt counts up). A *life* is the time between two starts of the broker.

What must hold for every queue that every message was routed to:
- each confirmed message was delivered;
- first deliveries of each publisher are in the order of its numbers, where one consumer at a time reads the queue;
- the same copy delivered again says `redelivered`: at most one of its deliveries may be without the flag;
- what was acknowledged before a channel.close-ok never comes back.

Times are counted, not compared with limits, and a run in which too little happened proves nothing and says so.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple


class Copy(NamedTuple):
    publisher: int
    number: int
    attempt: int


class Delivery(NamedTuple):
    copy: Copy
    redelivered: bool
    life: int


@dataclass(slots=True)
class Kill:
    """How much was under way when the broker was killed."""

    unconfirmed: int
    # It had not yet said that it is ready.
    starting: bool = False


@dataclass(slots=True)
class QueueLedger:
    name: str
    # One consumer at a time reads it, so the order of arrival is the order of delivery.
    ordered: bool
    # What was acknowledged stays so, whoever dies. Of a cluster's leader the last moments may be forgotten.
    remembers: bool = field(default=True, kw_only=True)
    # Of each publisher only every so many-th message is routed to it.
    every: int = 1
    deliveries: list[Delivery] = field(default_factory=list)
    # Acknowledged before a close-ok: the copy, and (life, count of deliveries by then).
    settled: dict[Copy, tuple[int, int]] = field(default_factory=dict)
    # Messages that were still there after everything had been acknowledged and the broker been killed once more.
    left_over: int | None = None

    def settle(self, copies: list[Copy], life: int) -> None:
        """All of these had been acknowledged when close-ok came."""
        when = (life, len(self.deliveries))
        for copy in copies:
            self.settled.setdefault(copy, when)

    def problems(self, confirmed: set[tuple[int, int]]) -> list[str]:
        return [*self._lost(confirmed), *self._out_of_order(), *self._unflagged(), *self._come_back(), *self._left()]

    def missing(self, confirmed: set[tuple[int, int]]) -> set[tuple[int, int]]:
        """Confirmed, routed here and not delivered."""
        routed = {message for message in confirmed if message[1] % self.every == 0}
        return routed - {delivery.copy[:2] for delivery in self.deliveries}

    def duplicates(self) -> int:
        return len(self.deliveries) - len({delivery.copy[:2] for delivery in self.deliveries})

    def _lost(self, confirmed: set[tuple[int, int]]) -> list[str]:
        lost = sorted(self.missing(confirmed))
        return [f"{self.name}: {len(lost)} confirmed messages lost, the first {lost[0]}"] if lost else []

    def _out_of_order(self) -> list[str]:
        if not self.ordered:
            return []
        newest: Counter[int] = Counter()
        seen: set[tuple[int, int]] = set()
        for place, (copy, _, life) in enumerate(self.deliveries):
            message = copy[:2]
            if message in seen:
                continue
            seen.add(message)
            if copy.number < newest[copy.publisher]:
                newer = newest[copy.publisher]
                return [f"{self.name}: {copy} came first as delivery {place} in life {life}, after number {newer}"]
            newest[copy.publisher] = copy.number
        return []

    def _unflagged(self) -> list[str]:
        plain = Counter(delivery.copy for delivery in self.deliveries if not delivery.redelivered)
        twice = [copy for copy, count in plain.items() if count > 1]
        return [f"{self.name}: {len(twice)} came again without the flag, the first {twice[0]}"] if twice else []

    def _come_back(self) -> list[str]:
        back = [
            delivery
            for place, delivery in enumerate(self.deliveries)
            if (when := self.settled.get(delivery.copy)) is not None
            and (delivery.life > when[0] or (delivery.life == when[0] and place >= when[1]))
        ]
        if not back or not self.remembers:
            return []
        return [f"{self.name}: {len(back)} came back though acknowledged before a close-ok, the first {back[0]}"]

    def _left(self) -> list[str]:
        if self.left_over is None:
            return [f"{self.name}: nobody looked whether it was empty at the end"]
        return [f"{self.name}: {self.left_over} messages came back at the end"] if self.left_over else []


@dataclass(slots=True)
class Ledger:
    queues: list[QueueLedger]
    confirmed: set[tuple[int, int]] = field(default_factory=set)
    # Sent again, since their confirm never came.
    republished: int = 0
    kills: list[Kill] = field(default_factory=list)
    # Of publishers and consumers that ended otherwise than by the death of the broker.
    failures: list[str] = field(default_factory=list)

    def problems(self, *, kills_min: int, confirmed_min: int) -> list[str]:
        """Everything that may not be; empty when the run proved what it set out to prove."""
        found = list(self.failures)
        for queue in self.queues:
            found += queue.problems(self.confirmed)
        return found + self._vacuous(kills_min, confirmed_min)

    def kills_under_load(self) -> int:
        return sum(kill.unconfirmed > 0 for kill in self.kills)

    def _vacuous(self, kills_min: int, confirmed_min: int) -> list[str]:
        under_load = self.kills_under_load()
        wanted = {
            f"{len(self.kills)} kills, {kills_min} were wanted": len(self.kills) >= kills_min,
            f"{under_load} kills with publishes on their way, {kills_min} were wanted": under_load >= kills_min,
            f"{len(self.confirmed)} confirmed, {confirmed_min} were wanted": len(self.confirmed) >= confirmed_min,
            "no delivery was ever repeated": any(
                each.redelivered for queue in self.queues for each in queue.deliveries
            ),
            "nothing was settled by a close-ok": all(queue.settled for queue in self.queues),
        }
        return [f"this run proved nothing: {what}" for what, holds in wanted.items() if not holds]
