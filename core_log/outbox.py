"""The numbers of what one owner moves into other logs, so that each record arrives exactly once (K7). Machine; pure.

An owner (a view, the delay engine, a redrive) gives every record that it moves the next number of (owner, generation,
target partition), without gaps, whatever the order of what it moves. The way of a transfer:

    assign     the next numbers of the target, for what is to be moved
    journal    the owner writes down which number is what, in a log of its own, and waits for the commit
    append     PartitionLog.append_dense(outbox.producer(transfer), ..., settled=outbox.settled_below(target))
    settle     when the target has committed them; then the owner writes down that they are done

After a crash the owner restores what it had written down and asks each target for `next_sequence(owner, generation)`:
what ends below is there and to be settled, the rest has to be sent again (append_dense writes what is missing of a
transfer that arrived in part). What was never written down was never appended. Numbers that were not appended can be
taken back (`take_back`), when their records go elsewhere.

Invariants: settled_below <= every pending number < next_number, for each target; pending transfers of a target are
disjoint and in the order of their numbers. Neighbours: producers.py is the memory of the target.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar
from uuid import UUID

from headrace.core_log.record import Producer

T = TypeVar("T")


class TargetPartition(NamedTuple):
    stream: UUID
    partition: int = 0


@dataclass(slots=True, eq=False)
class Transfer(Generic[T]):
    """Numbers first..first+count-1 of a target stand for this."""

    target: TargetPartition
    first: int
    count: int
    what: T
    # Its numbers were given to others (`take_back`).
    taken_back: bool = False

    @property
    def end(self) -> int:
        return self.first + self.count


class Outbox(Generic[T]):
    """`what` is the owner's own: where the records are that a number stands for."""

    __slots__ = ("_next", "_pending", "generation", "owner")

    def __init__(self, owner: bytes, generation: int = 0) -> None:
        assert len(owner) == 16, "an owner has the id of a producer"
        self.owner = owner
        self.generation = generation
        self._next: dict[TargetPartition, int] = {}
        # By target, in the order of the numbers.
        self._pending: dict[TargetPartition, list[Transfer[T]]] = {}

    def __len__(self) -> int:
        """How many transfers are pending; each may have many records."""
        return sum(map(len, self._pending.values()))

    @property
    def targets(self) -> list[TargetPartition]:
        """Wherever it sent something, or will."""
        return list(self._next)

    def assign(self, target: TargetPartition, count: int, what: T) -> Transfer[T]:
        """The next numbers of a target, for what is to be moved there."""
        first = self._next.get(target, 0)
        self._next[target] = first + count
        transfer = Transfer(target, first, count, what)
        self._pending.setdefault(target, []).append(transfer)
        return transfer

    def producer(self, transfer: Transfer[T]) -> Producer:
        """What the records are appended with."""
        return Producer(self.owner, self.generation, transfer.first, dense=True)

    def next_number(self, target: TargetPartition) -> int:
        return self._next.get(target, 0)

    def settled_below(self, target: TargetPartition) -> int:
        """Everything below is settled."""
        pending = self._pending.get(target)
        return pending[0].first if pending else self._next.get(target, 0)

    def pending(self, target: TargetPartition | None = None) -> Iterator[Transfer[T]]:
        """What is assigned and not settled, in the order of the numbers of each target."""
        for one in list(self._pending) if target is None else [target]:
            yield from self._pending.get(one, ())

    def settle(self, transfer: Transfer[T]) -> None:
        """The target has committed these. They may be settled in any order."""
        pending = self._pending[transfer.target]
        if pending[0] is transfer:
            # The usual case: those sent first are settled first.
            del pending[0]
        else:
            pending.remove(transfer)
        if not pending:
            del self._pending[transfer.target]

    def take_back(self, target: TargetPartition, first: int) -> list[Transfer[T]]:
        """Numbers from here on were not appended and will be assigned anew; returns what they stood for.

        `first` is where a transfer begins, or the next number.
        """
        pending = self._pending.get(target, [])
        taken = [one for one in pending if one.first >= first]
        kept = pending[: len(pending) - len(taken)]
        assert not kept or kept[-1].end <= first, "a transfer is appended whole"
        for one in taken:
            one.taken_back = True
        if taken:
            self._next[target] = first
            if kept:
                self._pending[target] = kept
            else:
                del self._pending[target]
        return taken

    def forget(self, target: TargetPartition) -> None:
        """The target is gone for good; nothing may be pending for it."""
        assert target not in self._pending
        self._next.pop(target, None)

    # -- after a restart ----------------------------------------------------------------------------------------

    def restore(self, target: TargetPartition, next_number: int, pending: Iterable[tuple[int, int, T]]) -> None:
        """Take up what was written down: the next number, and (first, count, what) of what was not settled."""
        self._next[target] = next_number
        transfers = [Transfer(target, first, count, what) for first, count, what in sorted(pending, key=_first)]
        if transfers:
            assert transfers[-1].end <= next_number
            self._pending[target] = transfers


def _first(entry: tuple[int, int, T]) -> int:
    return entry[0]
