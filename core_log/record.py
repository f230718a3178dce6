"""The neutral message, in bulk: records stand as columns, never as one object each. Values.

A RecordBatch is what one partition gathered between two seals. Its keys, properties and values are parallel
lists of bytes; whatever is alike for neighbours (time, expiry, attributes, routes, origin, tags) is held as
runs, so a publisher's read of 500 messages adds one run, not 500 numbers. Views keep (batch, first, last).
Neighbours: format.py turns a batch into bytes and back, log.py owns the open one.
"""

from array import array
from bisect import bisect_right
from collections.abc import Iterator, MutableSequence, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.core_log.ids import Epoch, Offset

# More values than this at once that differ are kept as machine words.
_FEW = 16

# One number for each record.
Numbers = Sequence[int] | npt.NDArray[np.int64]
RouteSet = tuple[int, ...]
Headers = tuple[tuple[bytes, bytes], ...]


class Protocol(IntEnum):
    """Whose vocabulary the properties bytes are in. Stored in the low four bits of the attributes."""

    NEUTRAL = 0
    AMQP = 1
    MQTT_3 = 2
    MQTT_5 = 3


# Attribute bits of one record, beside the protocol's four and the priority's eight.
PROTOCOL_MASK = 0xF
PERSISTENT = 1 << 4
QOS_SHIFT = 5
QOS_MASK = 3 << QOS_SHIFT
RETAIN = 1 << 7
RELOCATED = 1 << 8
TOMBSTONE = 1 << 9
PRIORITY_SHIFT = 16
PRIORITY_MASK = 0xFF << PRIORITY_SHIFT


class Gap(IntEnum):
    """Why a range of offsets holds no record. A reader is told; it never skips in silence (O2)."""

    UNCLEAN_START = 1
    COMPACTED = 2
    REPAIRED = 3
    # Somebody let a node lead that may lack what was confirmed (E7): whatever was here is lost, however much that was.
    UNCLEAN_ELECTION = 4


# Offsets that hold nothing here, and may have held something elsewhere: no record is missing from this log.
SKIPPED = frozenset({Gap.UNCLEAN_START, Gap.UNCLEAN_ELECTION})


class Producer(NamedTuple):
    """Who wrote an idempotent batch; record i of it has sequence first_sequence + i."""

    id: bytes  # 16 bytes
    epoch: int
    first_sequence: int
    # An outbox of ours (outbox.py): its numbers have no gaps, and are remembered while it lives.
    dense: bool = False


class RouteReference(NamedTuple):
    """A large route set that an earlier batch of the same segment spells out."""

    base_offset: int
    place: int


class Runs:
    """A column in which neighbours are often equal: values, and for each the index after its last record.

    Both are lists, or arrays of 64-bit integers where many records have a value of their own: there to gather, write
    and look at a column is one copy of its bytes.
    """

    __slots__ = ("ends", "values")

    def __init__(self, values: list[int] | None = None, ends: list[int] | None = None) -> None:
        self.values: MutableSequence[int] = [] if values is None else values
        self.ends: MutableSequence[int] = [] if ends is None else ends

    def add(self, value: int, count: int) -> None:
        if self.values and self.values[-1] == value:
            self.ends[-1] += count
        else:
            self.ends.append((self.ends[-1] if self.ends else 0) + count)
            self.values.append(value)

    def extend(self, values: Numbers) -> None:
        """One value for each record that follows. Those that are all alike make one run."""
        count = len(values)
        if count == 0:
            return
        column = np.asarray(values, dtype=np.int64)
        first = int(column[0])
        if bool((column == first).all()):
            return self.add(first, count)
        start = self.ends[-1] if self.ends else 0
        if count > _FEW and not isinstance(self.values, array):
            self.values, self.ends = array("q", self.values), array("q", self.ends)
        if isinstance(self.values, array) and isinstance(self.ends, array):
            self.values.frombytes(column.tobytes())
            self.ends.frombytes(np.arange(start + 1, start + count + 1, dtype=np.int64).tobytes())
        else:
            self.values += column.tolist()
            self.ends += range(start + 1, start + count + 1)

    def at(self, index: int) -> int:
        return self.values[bisect_right(self.ends, index)]

    def spans(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """(value, from, to) pieces that cover records first..last-1."""
        run = bisect_right(self.ends, first)
        while first < last:
            end = min(self.ends[run], last)
            yield self.values[run], first, end
            first = end
            run += 1

    def expand(self) -> npt.NDArray[np.int64]:
        if self.ends and self.ends[-1] == len(self.ends):
            return np.array(self.values, dtype=np.int64)
        ends = np.asarray(self.ends, dtype=np.int64)
        counts = ends.copy()
        counts[1:] -= ends[:-1]
        return np.repeat(np.asarray(self.values, dtype=np.int64), counts)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Runs) and list(self.values) == list(other.values) and list(self.ends) == list(other.ends)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Runs({self.values!r}, {self.ends!r})"


@dataclass(frozen=True, slots=True)
class Record:
    """One record, for those who want to look at a single one. Not for the hot path."""

    offset: Offset
    key: bytes
    value: bytes
    properties: bytes = b""
    timestamp_us: int = 0
    expiry_us: int = 0
    attributes: int = 0
    route_set: RouteSet = ()
    origin: int = 0
    tags: tuple[str, ...] = ()
    headers: Headers = ()

    @property
    def protocol(self) -> Protocol:
        return Protocol(self.attributes & PROTOCOL_MASK)


class RecordBatch:
    """Records of one partition that lie next to each other.

    Invariant: keys, properties, values (and headers, offsets where present) are equally long, and each Runs
    ends there. Offsets are base_offset + index unless `offsets` (compacted batches) says otherwise.
    `span` is how many offsets the batch covers, records or not.
    """

    __slots__ = (
        "attributes",
        "base_offset",
        "byte_count",
        "epoch",
        "expiries",
        "gap",
        "headers",
        "keys",
        "offsets",
        "origins",
        "producer",
        "properties",
        "route_places",
        "route_sets",
        "routes",
        "span",
        "tag_count",
        "tag_places",
        "tag_sets",
        "tags",
        "timestamps",
        "values",
    )

    def __init__(
        self,
        base_offset: int,
        epoch: int,
        producer: Producer | None = None,
        runs: tuple[Runs, Runs, Runs, Runs, Runs, Runs] | None = None,
    ) -> None:
        self.base_offset = Offset(base_offset)
        self.epoch = Epoch(epoch)
        self.span = 0
        self.producer = producer
        self.gap: Gap | None = None
        self.keys: list[bytes] = []
        self.properties: list[bytes] = []
        self.values: list[bytes] = []
        # Given by whoever decodes one: to make them only to throw them away is 3 % of a read (bench/read.py).
        self.timestamps, self.expiries, self.attributes, self.routes, self.origins, self.tags = (
            (Runs(), Runs(), Runs(), Runs(), Runs(), Runs()) if runs is None else runs
        )
        # Entry 0 of both dictionaries is the empty set.
        self.route_sets: list[RouteSet | RouteReference] = [()]
        self.tag_sets: list[tuple[str, ...]] = [()]
        # Where each entry stands, for whoever adds.
        self.route_places: dict[RouteSet, int] = {(): 0}
        self.tag_places: dict[tuple[str, ...], int] = {(): 0}
        # Of all sets together: how many tags were put in.
        self.tag_count = 0
        self.headers: list[Headers] | None = None
        self.offsets: list[int] | None = None
        self.byte_count = 0

    @property
    def count(self) -> int:
        return len(self.values)

    @property
    def next_offset(self) -> Offset:
        return Offset(self.base_offset + self.span)

    def add(
        self,
        keys: Sequence[bytes],
        properties: Sequence[bytes],
        values: Sequence[bytes],
        *,
        timestamp_us: int,
        attributes: int = 0,
        expiry_us: int | Numbers = 0,
        route_set: RouteSet = (),
        origin: int | Sequence[int] = 0,
        tags: tuple[str, ...] = (),
        headers: Sequence[Headers] | None = None,
        byte_count: int | None = None,
    ) -> int:
        """Append one run of records that share everything but key, properties, value, headers; perhaps expiry, origin.

        Returns the index of the first. `byte_count` may be given by a caller who knows it.
        """
        first = len(self.values)
        count = len(values)
        assert len(keys) == count and len(properties) == count, "columns of one run are equally long"
        self.keys += keys
        self.properties += properties
        self.values += values
        self.timestamps.add(timestamp_us, count)
        if isinstance(expiry_us, int):
            self.expiries.add(expiry_us, count)
        else:
            assert len(expiry_us) == count, "columns of one run are equally long"
            self.expiries.extend(expiry_us)
        self.attributes.add(attributes, count)
        if isinstance(origin, int):
            self.origins.add(origin, count)
        else:
            assert len(origin) == count, "columns of one run are equally long"
            self.origins.extend(origin)
        place = self.route_places.get(route_set)
        if place is None:
            place = self.route_places[route_set] = len(self.route_sets)
            self.route_sets.append(route_set)
        self.routes.add(place, count)
        self.tags.add(self._tag_place(tags), count)
        self._add_headers(headers, first, count)
        if byte_count is None:
            byte_count = _bytes_in(keys) + _bytes_in(properties) + _bytes_in(values)
            if headers is not None:
                byte_count += sum(len(name) + len(value) for one in headers for name, value in one)
        self.byte_count += byte_count
        self.span += count
        return first

    def add_columns(
        self,
        keys: Sequence[bytes],
        properties: Sequence[bytes],
        values: Sequence[bytes],
        *,
        timestamps: Sequence[int],
        expiries: Sequence[int],
        attributes: Sequence[int],
        origins: Sequence[int],
        tags: Sequence[tuple[str, ...]],
        headers: Sequence[Headers] | None = None,
    ) -> int:
        """Append records of which each has everything of its own, but no routes. Returns the index of the first."""
        first = len(self.values)
        count = len(values)
        assert all(len(one) == count for one in (keys, properties, timestamps, expiries, attributes, origins, tags))
        self.keys += keys
        self.properties += properties
        self.values += values
        self.timestamps.extend(timestamps)
        self.expiries.extend(expiries)
        self.attributes.extend(attributes)
        self.origins.extend(origins)
        self.routes.add(0, count)
        places = {one: self._tag_place(one) for one in dict.fromkeys(tags)}
        self.tags.extend([places[one] for one in tags])
        self._add_headers(headers, first, count)
        self.byte_count += _bytes_in(keys) + _bytes_in(properties) + _bytes_in(values)
        if headers is not None:
            self.byte_count += sum(len(name) + len(value) for one in headers for name, value in one)
        self.span += count
        return first

    def _tag_place(self, tags: tuple[str, ...]) -> int:
        """Where this set of tags stands in the dictionary; it is put there if it does not."""
        place = self.tag_places.get(tags)
        if place is None:
            self.tag_count += len(tags)
            self.byte_count += sum(map(len, tags))
            place = self.tag_places[tags] = len(self.tag_sets)
            self.tag_sets.append(tags)
        return place

    def _add_headers(self, headers: Sequence[Headers] | None, first: int, count: int) -> None:
        """Of the records first..first+count-1; a batch in which none has any has no such column."""
        if headers is not None or self.headers is not None:
            if self.headers is None:
                self.headers = [()] * first
            self.headers += headers if headers is not None else [()] * count

    def offset_at(self, index: int) -> Offset:
        return Offset(self.offsets[index] if self.offsets is not None else self.base_offset + index)

    def index_of(self, offset: int) -> int:
        """Index of the first record at or after the offset (count when there is none)."""
        if self.offsets is None:
            return min(max(offset - self.base_offset, 0), len(self.values))
        return bisect_right(self.offsets, offset - 1)

    def route_set_at(self, index: int) -> RouteSet:
        found = self.route_sets[self.routes.at(index)]
        assert not isinstance(found, RouteReference), "references are resolved by the log when it reads"
        return found

    def tags_at(self, index: int) -> tuple[str, ...]:
        return self.tag_sets[self.tags.at(index)]

    def record(self, index: int) -> Record:
        return Record(
            offset=self.offset_at(index),
            key=self.keys[index],
            value=self.values[index],
            properties=self.properties[index],
            timestamp_us=self.timestamps.at(index),
            expiry_us=self.expiries.at(index),
            attributes=self.attributes.at(index),
            route_set=self.route_set_at(index),
            origin=self.origins.at(index),
            tags=self.tags_at(index),
            headers=self.headers[index] if self.headers is not None else (),
        )

    def records(self) -> Iterator[Record]:
        return (self.record(index) for index in range(len(self.values)))


def _bytes_in(column: Sequence[bytes]) -> int:
    if not column:
        return 0
    first = column[0]
    # Keys and properties are often one and the same object, which count() sees at 0.6 ns each (bench/append.py).
    if column[-1] is first and column.count(first) == len(column):
        return len(first) * len(column)
    # For short ones a join that is thrown away takes half the time of a sum of lengths.
    return len(b"".join(column)) if len(first) <= 256 else sum(map(len, column))


def gap_batch(base_offset: int, next_offset: int, epoch: int, reason: Gap) -> RecordBatch:
    """A batch that holds no record and says why its offsets are empty."""
    batch = RecordBatch(base_offset, epoch)
    batch.span = next_offset - base_offset
    batch.gap = reason
    return batch
