"""From what the options say of topics and offsets to what is there. Machine: it asks an Access and decides.

An offset below the first one there is, or above the watermark, is a loss of data: an error, or (failOnDataLoss=false)
the nearest there is. Names are those of TopicInfo, which lead to one topic whatever else there is: the option may say
`orders` for what is `exchange:orders`. Neighbours: options.py reads what is said here, plan.py cuts the ranges.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from uuid import UUID

from headrace.spark.access import Access, DataLoss, PartitionEnds, TopicInfo, TopicNotFound
from headrace.spark.options import (
    EARLIEST,
    LATEST,
    Edge,
    Everywhere,
    Given,
    InvalidOption,
    Kept,
    Partitions,
    Pattern,
    Position,
    Since,
    SourceOptions,
    Subscription,
    Topics,
)
from headrace.spark.stream_offsets import Offsets, TopicOffsets

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Subscribed:
    """The topics of a subscription with their partitions, as they are now."""

    topics: Mapping[str, TopicInfo]
    # What the options call them -> the name that they have.
    aliases: Mapping[str, str]

    def ends(self) -> dict[Position, PartitionEnds]:
        return {(name, one.partition): one for name, info in self.topics.items() for one in info.partitions}


def subscribed(access: Access, subscription: Subscription) -> Subscribed:
    """Raises TopicNotFound, NotAllowed; a pattern that matches nothing yet is no error."""
    match subscription:
        case Topics(names):
            found = {name: access.topic(name) for name in names}
        case Pattern(text):
            found = {}
            for name in access.topics():
                if re.fullmatch(text, name):
                    try:
                        found[name] = access.topic(name)
                    except TopicNotFound:
                        # It was deleted after it was listed.
                        continue
        case Partitions(numbers):
            found = {name: _only(access.topic(name), wanted) for name, wanted in numbers.items()}
    return Subscribed({info.name: info for info in found.values()}, {name: info.name for name, info in found.items()})


def _only(info: TopicInfo, numbers: tuple[int, ...]) -> TopicInfo:
    there = {one.partition: one for one in info.partitions}
    missing = [number for number in numbers if number not in there]
    if missing:
        told = f"'{info.name}' has {len(there)} partitions, and none of number {', '.join(map(str, missing))}"
        raise TopicNotFound(told)
    return replace(info, partitions=tuple(there[number] for number in numbers))


# -- batch ----------------------------------------------------------------------------------------------------------


def batch_ranges(access: Access, options: SourceOptions) -> tuple[dict[Position, Range], dict[str, UUID]]:
    """What a batch read returns, and what its topics are. Raises InvalidOption, DataLoss."""
    found = subscribed(access, options.subscription)
    starts = _resolved(access, options.start, found, options, "startingOffsets")
    ends = _resolved(access, options.end, found, options, "endingOffsets")
    both_given = isinstance(options.start, Given | Kept) and isinstance(options.end, Given | Kept)
    ranges = {}
    for position, start in starts.items():
        end = ends[position]
        if end < start and both_given:
            topic, partition = position
            raise InvalidOption(f"partition {partition} of '{topic}' starts at {start} and ends before, at {end}")
        ranges[position] = (start, max(start, end))
    return ranges, {name: info.id for name, info in found.topics.items()}


# -- stream ---------------------------------------------------------------------------------------------------------


def initial_offsets(access: Access, options: SourceOptions) -> Offsets:
    """Where a new stream begins. Raises InvalidOption, DataLoss."""
    if isinstance(options.start, Kept):
        # As they were written; the ids are checked when they are used.
        return options.start.offsets
    found = subscribed(access, options.subscription)
    starts = _resolved(access, options.start, found, options, "startingOffsets")
    return Offsets(
        {
            name: TopicOffsets(info.id, {one.partition: starts[name, one.partition] for one in info.partitions})
            for name, info in found.topics.items()
        }
    )


# -- one edge -------------------------------------------------------------------------------------------------------


def _resolved(
    access: Access, edge: Edge, found: Subscribed, options: SourceOptions, option: str
) -> dict[Position, int]:
    is_start = option == "startingOffsets"
    there = found.ends()
    match edge:
        case Everywhere(offset):
            return {at: one.start if offset == EARLIEST else one.high_watermark for at, one in there.items()}
        case Given(offsets):
            given = _complete(offsets, found, there, option)
            return {at: _within(at, given[at], there[at], options, option) for at in there}
        case Kept(kept):
            _check_ids(kept, found)
            flat = {(name, number): next for name, topic in kept.topics.items() for number, next in topic.next.items()}
            given = _complete(flat, found, there, option)
            return {at: _within(at, given[at], there[at], options, option) for at in there}
        case Since(timestamp_us, by_partition):
            name = f"{option}ByTimestamp"
            times = _complete(by_partition, found, there, name) if timestamp_us is None else {}
            return {
                at: _since(access, at, times.get(at, timestamp_us or 0), one, options, is_start=is_start)
                for at, one in there.items()
            }


def _check_ids(kept: Offsets, found: Subscribed) -> None:
    for name, topic in kept.topics.items():
        info = found.topics.get(found.aliases.get(name, name))
        if info is not None and info.id != topic.id:
            raise DataLoss(f"'{name}' was deleted and created again: it was {topic.id} and is {info.id} now")


def _complete(
    given: Mapping[Position, int], found: Subscribed, there: Mapping[Position, PartitionEnds], option: str
) -> dict[Position, int]:
    """All partitions of the subscription, and no others: as Kafka's source has it."""
    named = {(found.aliases.get(topic, topic), number): value for (topic, number), value in given.items()}
    if missing := sorted(set(there) - set(named)):
        hint = "" if option.endswith("ByTimestamp") else " (-2 is earliest, -1 is latest)"
        raise InvalidOption(f"{option!r} must name every partition{hint}; it lacks {_listed(missing)}")
    if unknown := sorted(set(named) - set(there)):
        raise InvalidOption(f"{option!r} names {_listed(unknown)}, which the subscription does not have")
    return named


def _listed(positions: list[Position]) -> str:
    told = ", ".join(f"{topic}-{number}" for topic, number in positions[:5])
    return told if len(positions) <= 5 else f"{told} and {len(positions) - 5} more"


def _within(at: Position, offset: int, ends: PartitionEnds, options: SourceOptions, option: str) -> int:
    if offset == EARLIEST:
        return ends.start
    if offset == LATEST:
        return ends.high_watermark
    if ends.start <= offset <= ends.high_watermark or (option == "endingOffsets" and offset < ends.start):
        return offset
    if options.fail_on_data_loss:
        topic, number = at
        reach = f"{ends.start} to {ends.high_watermark}"
        raise DataLoss(f"{option!r} says {offset} for partition {number} of '{topic}', which has offsets {reach}")
    return min(max(offset, ends.start), ends.high_watermark)


def _since(
    access: Access, at: Position, timestamp_us: int, ends: PartitionEnds, options: SourceOptions, *, is_start: bool
) -> int:
    topic, number = at
    found = access.offset_at(topic, number, timestamp_us)
    if found is not None:
        # What came after the ends were asked for is not ours to see.
        return min(max(found, ends.start), ends.high_watermark)
    if is_start and not options.no_match_is_latest:
        raise InvalidOption(
            f"no record of partition {number} of '{topic}' is at or after the starting time {timestamp_us // 1000}; "
            "with 'startingOffsetsByTimestampStrategy' latest it would start at its end"
        )
    return ends.high_watermark
