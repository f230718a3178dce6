"""The filters of a queue's consumers: who asked for what, one scan for each filter and lane. Machine.

Consumers with the same filter share its scans, so their number costs nothing; filters that are different are bounded,
since each goes through the backlog for itself. Neighbours: queue.py deals by them, scan.py does the looking.
"""

from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Final, Generic, TypeVar

from headrace.core_log.errors import Refused
from headrace.filtering.expression import Expression
from headrace.gateways.delivery.lane import Lane, Stretch
from headrace.gateways.delivery.scan import Patience, Scan

C = TypeVar("C")

FILTERS_MAX: Final = 16
# So many bytes of batches are looked at in one turn of a queue (some 10 ms); the rest has the next one.
TURN_BYTES: Final = 4 * 1024 * 1024


class TooManyFilters(Refused):
    """A queue has as many different filters as it may have."""


class Unmatched(StrEnum):
    """What becomes of records that nobody's filter wants."""

    STAY = "stay"
    DEAD_LETTER = "dead-letter"
    DROP = "drop"


class Filters(Generic[C]):
    def __init__(self) -> None:
        self._wants: dict[C, Expression] = {}
        self._scans: dict[tuple[Lane, Expression], Scan] = {}
        self._patience = Patience(TURN_BYTES)
        # Those who are away and will come back for theirs; None: for everything.
        self._away: dict[C, Expression | None] = {}

    def __bool__(self) -> bool:
        """Whether any consumer has one."""
        return bool(self._wants)

    def add(self, consumer: C, wants: Expression) -> None:
        known = {*self._wants.values(), *filter(None, self._away.values())}
        if wants not in known and len(known) >= FILTERS_MAX:
            raise TooManyFilters(
                f"its consumers have {FILTERS_MAX} different filters, which is as many as there may be"
            )
        self._wants[consumer] = wants

    def remove(self, consumer: C) -> None:
        wants = self._wants.pop(consumer, None)
        if wants is not None and wants not in self._wants.values():
            for key in [key for key in self._scans if key[1] == wants]:
                self._scans.pop(key).close()

    def note_away(self, consumer: C, wants: Expression | None) -> None:
        self._away[consumer] = wants

    def forget_away(self, consumer: C) -> None:
        self._away.pop(consumer, None)

    def of(self, consumer: C) -> Expression | None:
        return self._wants.get(consumer)

    def begin_turn(self) -> None:
        self._patience = Patience(TURN_BYTES)

    @property
    def is_tired(self) -> bool:
        """There may be more to find, in another turn."""
        return self._patience.left <= 0

    def take(self, lane: Lane, wants: Expression, count_max: int, *, early: bool) -> Stretch | None:
        return self._scan(lane, wants).take(count_max, early=early, patience=self._patience)

    def _scan(self, lane: Lane, wants: Expression) -> Scan:
        scan = self._scans.get((lane, wants))
        if scan is None:
            scan = self._scans[lane, wants] = Scan(lane, wants)
        return scan

    def is_done(self, lane: Lane) -> bool:
        """Every filter that looks at a lane has seen all of it."""
        return all(scan.is_done for (one, _wants), scan in self._scans.items() if one is lane)

    def unmatched(self, lane: Lane, takers: Iterable[C]) -> Callable[[Stretch], int]:
        """How many records at the front of what is ready in a lane are wanted by none of these consumers, nor by those
        who are away."""
        wanted = {self._wants.get(one) for one in takers}
        scans = [self._scans.get((lane, wants)) for wants in wanted if wants is not None]

        def leading(head: Stretch) -> int:
            if not scans or None in wanted:
                return 0
            count = min(0 if scan is None else scan.judged(head.seq, head.count) for scan in scans)
            for wants in set(self._away.values()) if count else ():
                if wants is None:
                    return 0
                spans = wants.spans(head.loaded(), head.index, head.index + count)
                if spans:
                    count = spans[0][0] - head.index
            return count

        return leading
