"""What MQTT clients saw while the broker was being killed, and whether that may be so. Machine: no I/O.

A message is a publisher and a number, 1, 2, 3... A publisher has one QoS. What it had not seen acknowledged when its
connection broke, it sends again when it is back, as the standard asks.

What must hold for every subscription that every message matches:
- each acknowledged message was delivered (with QoS 2 the acknowledgement is PUBREC: from then on only PUBREL is sent
  again, so the publisher's PUBCOMP shows no less);
- first deliveries of each publisher are in the order of its numbers;
- where publisher and subscription both have QoS 2, nothing comes twice;
- otherwise a message comes again in a new connection only, as QoS 1 allows: in one and the same connection it is there
  once, and once more at most for each time that a publisher with QoS 1 sent it again;
- a lasting session with a subscription, or with QoS 2 messages published, is there again after each kill.

A run in which too little happened proves nothing and says so.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from interop.amqp.ledger import Kill


class Number(NamedTuple):
    publisher: int
    number: int


class Arrival(NamedTuple):
    message: Number
    # Of the subscriber: 1, 2, 3...
    connection: int


@dataclass(slots=True)
class Subscription:
    name: str
    qos: int
    arrivals: list[Arrival] = field(default_factory=list)

    def duplicates(self) -> int:
        return len(self.arrivals) - len({arrival.message for arrival in self.arrivals})

    def problems(self, acknowledged: set[Number], copies: Counter[Number], exact: set[int]) -> list[str]:
        """`copies`: how many more there may be of a message; `exact`: publishers of which nothing may come twice."""
        exact = exact if self.qos == 2 else set()
        return [*self._lost(acknowledged), *self._out_of_order(), *self._twice(exact), *self._too_often(copies)]

    def _lost(self, acknowledged: set[Number]) -> list[str]:
        lost = sorted(acknowledged - {arrival.message for arrival in self.arrivals})
        return [f"{self.name}: {len(lost)} acknowledged messages lost, the first {lost[0]}"] if lost else []

    def _out_of_order(self) -> list[str]:
        newest: Counter[int] = Counter()
        seen: set[Number] = set()
        for place, (message, _) in enumerate(self.arrivals):
            if message in seen:
                continue
            seen.add(message)
            if message.number < newest[message.publisher]:
                return [f"{self.name}: {message} came first in place {place}, after number {newest[message.publisher]}"]
            newest[message.publisher] = message.number
        return []

    def _twice(self, exact: set[int]) -> list[str]:
        counts = Counter(arrival.message for arrival in self.arrivals if arrival.message.publisher in exact)
        twice = sorted(message for message, count in counts.items() if count > 1)
        return [f"{self.name}: {len(twice)} came twice with QoS 2, the first {twice[0]}"] if twice else []

    def _too_often(self, copies: Counter[Number]) -> list[str]:
        counts = Counter(self.arrivals)
        much = sorted(arrival for arrival, count in counts.items() if count > 1 + copies[arrival.message])
        return [f"{self.name}: {len(much)} came again in one connection, the first {much[0]}"] if much else []


@dataclass(slots=True)
class Ledger:
    subscriptions: list[Subscription]
    # Of each publisher, its QoS.
    publishers: dict[int, int]
    acknowledged: set[Number] = field(default_factory=set)
    # How often a publisher began a connection with this one unacknowledged.
    resent: Counter[Number] = field(default_factory=Counter)
    kills: list[Kill] = field(default_factory=list)
    # Names of clients that were told of no session though they had one.
    forgotten: list[str] = field(default_factory=list)
    # Of publishers and subscribers that ended otherwise than by the death of the broker.
    failures: list[str] = field(default_factory=list)

    def problems(self, *, kills_min: int, acknowledged_min: int) -> list[str]:
        """Everything that may not be; empty when the run proved what it set out to prove."""
        # What a publisher with QoS 2 sends again is the same message to the broker.
        copies = Counter({one: count for one, count in self.resent.items() if self.publishers[one.publisher] == 1})
        exact = {publisher for publisher, qos in self.publishers.items() if qos == 2}
        found = list(self.failures)
        if self.forgotten:
            found.append(f"{len(self.forgotten)} sessions were forgotten, the first that of {self.forgotten[0]}")
        for subscription in self.subscriptions:
            found += subscription.problems(self.acknowledged, copies, exact)
        return found + self._vacuous(kills_min, acknowledged_min)

    def kills_under_load(self) -> int:
        return sum(kill.unconfirmed > 0 for kill in self.kills)

    def _vacuous(self, kills_min: int, acknowledged_min: int) -> list[str]:
        under_load = self.kills_under_load()
        wanted = {
            f"{len(self.kills)} kills, {kills_min} were wanted": len(self.kills) >= kills_min,
            f"{under_load} kills with publishes on their way, {kills_min} were wanted": under_load >= kills_min,
            "nothing was ever sent again": bool(self.resent),
            "nothing was ever delivered again": any(one.duplicates() for one in self.subscriptions),
        }
        for publisher, qos in self.publishers.items():
            count = sum(one.publisher == publisher for one in self.acknowledged)
            text = f"{count} acknowledged of publisher {publisher} (QoS {qos}), {acknowledged_min} were wanted"
            wanted[text] = count >= acknowledged_min
        return [f"this run proved nothing: {what}" for what, holds in wanted.items() if not holds]
