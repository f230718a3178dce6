"""Filters of a query that spare the source some reading. Machine: no I/O; of pyspark only the values of filters.

What is found here narrows what is read; Spark looks at every row again, so a filter that is not understood, or that is
understood as less than it says, costs time and never a row. Columns: offset, partition, topic, timestamp, tag.
Neighbours: source.py hands them over when Spark's switch is on.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

from headrace.core_log.errors import Refused
from headrace.filtering.expression import parse
from headrace.spark.options import Position

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Rows outside of these are not wanted. None: nothing is known."""

    start: int | None = None
    end: int | None = None
    partitions: frozenset[int] | None = None
    first_partition: int | None = None
    end_partition: int | None = None
    topics: frozenset[str] | None = None
    since_us: int | None = None
    until_us: int | None = None
    tags: str | None = None

    def within(self, ranges: Mapping[Position, tuple[int, int]]) -> dict[Position, tuple[int, int]]:
        """What is left of them."""
        found = {}
        for (topic, partition), (start, end) in ranges.items():
            low, high = _clipped(start, end, self.start, self.end)
            if low < high and self._has(topic, partition):
                found[topic, partition] = (low, high)
        return found

    def _has(self, topic: str, partition: int) -> bool:
        low, high = _clipped(partition, partition + 1, self.first_partition, self.end_partition)
        listed = self.partitions is None or partition in self.partitions
        return low < high and listed and (self.topics is None or topic in self.topics)


def bounds(filters: Iterable[Filter], tags: str | None = None) -> Bounds:
    """What all of them together say, and the tag expression that was asked for beside them."""
    found = Bounds(tags=tags)
    for one in filters:
        found = _narrowed(found, one)
    return found


def _narrowed(bounds: Bounds, given: Filter) -> Bounds:
    match given:
        case EqualTo(attribute=(column,), value=value) | EqualNullSafe(attribute=(column,), value=value):
            return _one_of(bounds, column, (value,))
        case In(attribute=(column,), value=values):
            return _one_of(bounds, column, tuple(values))
        case GreaterThanOrEqual(attribute=(column,), value=value):
            return _between(bounds, column, low=value)
        case GreaterThan(attribute=(column,), value=value):
            return _between(bounds, column, low=value, beyond=1)
        case LessThan(attribute=(column,), value=value):
            return _between(bounds, column, high=value)
        case LessThanOrEqual(attribute=(column,), value=value):
            return _between(bounds, column, high=value, beyond=1)
    return bounds


def _one_of(bounds: Bounds, column: str, values: tuple[Any, ...]) -> Bounds:
    # Nothing equals null.
    known = [value for value in values if value is not None]
    match column:
        case "partition" if all(map(_is_number, known)):
            return replace(bounds, partitions=_both(bounds.partitions, frozenset(known)))
        case "topic" if all(isinstance(value, str) for value in known):
            return replace(bounds, topics=_both(bounds.topics, frozenset(known)))
        case "offset" | "timestamp" if known:
            try:
                low, high = min(known), max(known)
            except TypeError:
                return bounds
            return _between(_between(bounds, column, low=low), column, high=high, beyond=1)
        case "tag" if known and all(isinstance(value, str) for value in known):
            return _tagged(bounds, known)
    return bounds


def _between(bounds: Bounds, column: str, *, low: Any = None, high: Any = None, beyond: int = 0) -> Bounds:
    """`beyond`: how far the bound lies behind the value: a bound from below is in, one from above is not."""
    value = high if low is None else low
    match column:
        case "offset" | "partition" if _is_number(value):
            names = ("start", "end") if column == "offset" else ("first_partition", "end_partition")
        case "timestamp" if isinstance(value, datetime) and value.tzinfo is not None:
            names, value = ("since_us", "until_us"), (value - _EPOCH) // _MICROSECOND
        case _:
            return bounds
    name, narrower = (names[0], max) if high is None else (names[1], min)
    known = getattr(bounds, name)
    return replace(bounds, **{name: value + beyond if known is None else narrower(known, value + beyond)})


def _tagged(bounds: Bounds, tags: list[str]) -> Bounds:
    """A record whose first tag is this one has it among its tags."""
    text = " || ".join(map(_quoted, tags))
    if bounds.tags is not None:
        text = f"({bounds.tags}) && ({text})"
    try:
        return replace(bounds, tags=parse(text).canonical)
    except Refused:
        # More of them than an expression takes.
        return bounds


def _quoted(tag: str) -> str:
    escaped = tag.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _clipped(start: int, end: int, low: int | None, high: int | None) -> tuple[int, int]:
    return start if low is None else max(start, low), end if high is None else min(end, high)


def _both(one: frozenset[Any] | None, other: frozenset[Any]) -> frozenset[Any]:
    return other if one is None else one & other


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
