"""Which nodes hold the replicas of which partitions. Machine; pure.

The first replica of a partition is the one that should lead it. Both are kept even: how many replicas a node holds, and
how many of them it should lead. Who shares partitions with whom is spread by hash, so that the work of a node that is
lost falls on all the others and not on two neighbours. A change moves as few replicas as it can: what a lost node held,
or what a new one must get for the shares to be even; a move of leadership moves no data.
"""

from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import Generic, TypeVar

from xxhash import xxh3_64_intdigest

from headrace.controller.errors import Invalid

P = TypeVar("P", bound=Hashable)

Replicas = tuple[int, ...]


class Placement(Generic[P]):
    """What is where, and how much each node has."""

    def __init__(self, nodes: Iterable[int], replicas: Mapping[P, Replicas] | None = None) -> None:
        """`replicas` may name nodes that are not among `nodes`: those are gone. See `repair`."""
        self.replicas: dict[P, Replicas] = dict(replicas or {})
        self.held: dict[int, int] = dict.fromkeys(sorted(nodes), 0)
        self.led: dict[int, int] = dict.fromkeys(self.held, 0)
        for found in self.replicas.values():
            self._count(found, 1)

    def _count(self, replicas: Replicas, by: int) -> None:
        for node in replicas:
            if node in self.held:
                self.held[node] += by
        if replicas and replicas[0] in self.led:
            self.led[replicas[0]] += by

    def _set(self, partition: P, replicas: Replicas) -> None:
        self._count(self.replicas.get(partition, ()), -1)
        self.replicas[partition] = replicas
        self._count(replicas, 1)

    # -- placing ------------------------------------------------------------------------------------------------

    def place(self, partitions: Iterable[P], factor: int) -> None:
        """New partitions, each on so many nodes. Invalid when there are fewer."""
        if factor > len(self.held):
            raise Invalid(f"{factor} replicas need {factor} nodes, and there are {len(self.held)}")
        for partition in partitions:
            chosen: list[int] = []
            for _ in range(factor):
                chosen.append(self._choose(partition, chosen))
                self.held[chosen[-1]] += 1
            for node in chosen:
                self.held[node] -= 1
            self._set(partition, self._led_evenly(partition, tuple(chosen)))

    def _choose(self, partition: P, taken: Collection[int], among: Iterable[int] | None = None) -> int:
        """One of the nodes that hold least; of those, whichever the hash says."""
        free = [node for node in (self.held if among is None else among) if node not in taken]
        least = min(self.held[node] for node in free)
        return min((node for node in free if self.held[node] == least), key=lambda node: _draw(partition, node))

    def _led_evenly(self, partition: P, replicas: Replicas) -> Replicas:
        first = min(replicas, key=lambda node: (self.led.get(node, 0), _draw(partition, node)))
        return (first, *(node for node in replicas if node != first))

    # -- changing -----------------------------------------------------------------------------------------------

    def repair(self) -> list[P]:
        """Nodes are gone: each replica that one of them held goes elsewhere, and no other moves. Returns what changed.

        With fewer nodes than replicas a partition has as many as there are nodes.
        """
        changed = []
        for partition, replicas in self.replicas.items():
            left = tuple(node for node in replicas if node in self.held)
            if left == replicas:
                continue
            changed.append(partition)
            # Who leads stays, if it is there; else one that has the records already.
            if left and left[0] != replicas[0]:
                left = self._led_evenly(partition, left)
            self._set(partition, left)
            for _ in range(min(len(replicas), len(self.held)) - len(left)):
                now = self.replicas[partition]
                self._set(partition, (*now, self._choose(partition, now)))
        return changed

    def spread(self, *, tolerance: float = 0.05) -> list[P]:
        """Nodes have come, or shares are uneven: move replicas from who holds more than its share to who holds less,
        until all are within the tolerance. Returns what changed."""
        total = sum(self.held.values())
        if not total:
            return []
        share = total / len(self.held)
        low, high = share * (1 - tolerance), share * (1 + tolerance)
        changed: dict[P, None] = {}
        for partition in sorted(self.replicas, key=lambda one: _draw(one, -1)):
            needy = [node for node, count in self.held.items() if count < low]
            heavy = [node for node, count in self.held.items() if count > high]
            if not needy and not heavy:
                break
            replicas = self.replicas[partition]
            giver = max(replicas, key=lambda node: self.held[node])
            takers = [node for node in (needy or self.held) if node not in replicas and self.held[node] < share]
            # A share that is too small is filled by whoever holds more than its own.
            if self.held[giver] <= (share if needy else high) or not takers:
                continue
            taker = self._choose(partition, replicas, takers)
            self._set(partition, tuple(taker if node == giver else node for node in replicas))
            changed[partition] = None
        return list(changed)

    def lead_evenly(self, *, tolerance: float = 0.05) -> list[P]:
        """Let others of the replicas lead, until nobody leads more than its share. Moves no records."""
        changed: list[P] = []
        if not self.replicas:
            return changed
        share = len(self.replicas) / len(self.led)
        for partition in sorted(self.replicas, key=lambda one: _draw(one, -2)):
            replicas = self.replicas[partition]
            lightest = min(replicas, key=lambda node: self.led[node])
            if self.led[replicas[0]] > share * (1 + tolerance) and self.led[lightest] < share:
                self._set(partition, (lightest, *(node for node in replicas if node != lightest)))
                changed.append(partition)
        return changed


def _draw(partition: Hashable, node: int) -> int:
    return xxh3_64_intdigest(f"{partition}/{node}".encode())
