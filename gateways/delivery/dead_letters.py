"""What a record in a queue tells of its death, and which of them somebody wants. Machine; pure.

A dead letter says where it died, why, when and after how many attempts: in its neutral headers, where a retry policy or
a delivery limit brought it here (retry.py), else in `x-death`, which RabbitMQ's dead-letter exchanges write. What says
neither is an ordinary message that somebody put there.
Neighbours: redrive.py takes them back, gateways/http/dead_letters.py lists them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from headrace.core_log.record import Headers, RecordBatch
from headrace.filtering.expression import Expression, Spans
from headrace.gateways.delivery.relocation import (
    ORIGIN_EXCHANGE,
    ORIGIN_OFFSET,
    ORIGIN_PARTITION,
    ORIGIN_STREAM,
)
from headrace.gateways.delivery.retry import ATTEMPT, EXPIRY, REASON, TIMESTAMP, attempts_in

T = TypeVar("T")

# The header of a dead letter that died in a consumer group: its name.
DIED_IN_GROUP = b"died-in-group"
# What a record that is tried anew does not keep: its time to live is counted anew, too.
_OF_A_LIFE = frozenset((ATTEMPT, REASON, TIMESTAMP, EXPIRY, DIED_IN_GROUP))

# The headers of a record in the words of its protocol, as AMQP has them.
HeadersOf = Callable[[RecordBatch, int], Mapping[str, object]]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a record was first."""

    stream: str
    partition: int
    offset: int
    exchange: str


@dataclass(frozen=True, slots=True)
class DeadLetter:
    # The queue, or the consumer group, in which it died last.
    queue: str
    reason: str
    died_us: int
    attempts: int
    # (when, why) of those that are known, the first first.
    history: Sequence[tuple[int, str]] = ()
    # The exchange and the routing key it was published with.
    exchange: str = ""
    key: str = ""
    origin: Origin | None = None
    is_of_group: bool = False


def read(batch: RecordBatch, index: int, headers_of: HeadersOf) -> DeadLetter | None:
    """None: it does not say that it died."""
    neutral = dict(batch.headers[index]) if batch.headers is not None else {}
    found = headers_of(batch, index)
    deaths = found.get("x-death")
    newest = deaths[0] if isinstance(deaths, list) and deaths and isinstance(deaths[0], dict) else None
    if newest is None and REASON not in neutral:
        return None
    told = newest or {}
    history = attempts_in(neutral)
    seconds = told.get("time")
    died_us = history[-1][0] if history else int(seconds) * 1_000_000 if isinstance(seconds, int) else 0
    keys = told.get("routing-keys")
    count = told.get("count")
    return DeadLetter(
        queue=neutral[DIED_IN_GROUP].decode() if DIED_IN_GROUP in neutral else _text(told.get("queue", "")),
        reason=neutral[REASON].decode() if REASON in neutral else _text(told.get("reason", "")),
        died_us=died_us,
        attempts=int(neutral[ATTEMPT]) if ATTEMPT in neutral else int(count) if isinstance(count, int) else 1,
        history=history,
        exchange=_text(told.get("exchange", "")),
        key=_text(keys[0]) if isinstance(keys, list) and keys else batch.keys[index].decode("utf-8", "surrogateescape"),
        origin=_origin(neutral),
        is_of_group=DIED_IN_GROUP in neutral,
    )


def _origin(neutral: Mapping[bytes, bytes]) -> Origin | None:
    if ORIGIN_STREAM not in neutral:
        return None
    return Origin(
        neutral[ORIGIN_STREAM].decode(),
        int(neutral[ORIGIN_PARTITION]),
        int(neutral[ORIGIN_OFFSET]),
        neutral.get(ORIGIN_EXCHANGE, b"").decode("utf-8", "surrogateescape"),
    )


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape")
    return value if isinstance(value, str) else ""


def revived(letter: DeadLetter, headers: Headers) -> Headers:
    """The neutral headers of a record that is tried anew, from the first attempt on; its history stays with it."""
    kept = tuple(one for one in headers if one[0] not in _OF_A_LIFE)
    if letter.exchange and not any(name == ORIGIN_EXCHANGE for name, _value in kept):
        kept += ((ORIGIN_EXCHANGE, letter.exchange.encode("utf-8", "surrogateescape")),)
    return kept


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which dead letters. Everything that is given must hold."""

    reason: str | None = None
    died_before_us: int | None = None
    died_after_us: int | None = None
    # The routing key it was published with.
    key: str | None = None
    # The queue it died in.
    queue: str | None = None
    tags: Expression | None = None
    # (stream, partition, offset) of where each lies now; empty: wherever.
    places: frozenset[tuple[str, int, int]] = field(default_factory=frozenset)

    def matches(self, letter: DeadLetter) -> bool:
        """All but tags and places."""
        return (
            (self.reason is None or letter.reason == self.reason)
            and (self.died_before_us is None or letter.died_us < self.died_before_us)
            and (self.died_after_us is None or letter.died_us >= self.died_after_us)
            and (self.key is None or letter.key == self.key)
            and (self.queue is None or letter.queue == self.queue)
        )


class Selection(Generic[T]):
    """Goes through a lane as a filter does (scan.py), and asks more of a record than its tags."""

    def __init__(self, wanted: Wanted, judge: Callable[[RecordBatch, int], T | None]) -> None:
        """`judge` tells, of a record whose tags are right, what becomes of it; None: it stays where it is."""
        self.wanted = wanted
        self._judge = judge
        # What was found in the batch that was looked at last: a scan asks about it again and again.
        self._batch: RecordBatch | None = None
        self._found: dict[int, T | None] = {}

    def may_match(self, summary: bytes) -> bool:
        return self.wanted.tags is None or self.wanted.tags.may_match(summary)

    def may_hold(self, tag_hashes: Sequence[int], tag_sets: Iterable[Sequence[int]]) -> bool:
        return self.wanted.tags is None or self.wanted.tags.may_hold(tag_hashes, tag_sets)

    def spans(self, batch: RecordBatch, first: int, last: int) -> Spans:
        tags = self.wanted.tags
        within = [(first, last)] if tags is None else tags.spans(batch, first, last)
        return list(self._runs(batch, within))

    def found(self, batch: RecordBatch, index: int) -> T | None:
        if batch is not self._batch:
            self._batch, self._found = batch, {}
        if index not in self._found:
            self._found[index] = self._judge(batch, index)
        return self._found[index]

    def _runs(self, batch: RecordBatch, within: Spans) -> Iterator[tuple[int, int]]:
        for low, high in within:
            start: int | None = None
            for index in range(low, high):
                if self.found(batch, index) is not None:
                    start = index if start is None else start
                elif start is not None:
                    yield start, index
                    start = None
            if start is not None:
                yield start, high
