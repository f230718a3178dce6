"""Properties that differ only in what the broker does not read: one parse for a whole read. Machine; pure.

    flags | content-type | headers: name, letter, value ... | mode | priority | correlation-id | ... | timestamp ...
                                                  ^free                         ^free                  ^free

Messages of one application carry the same properties and headers and differ in a few values of the same size: ids,
times, counters, the delay. The *shape* of a message is its bytes without those values. What `scan` finds out depends
on the shape alone, so a run of messages is one matrix of bytes, compared with a shape in one call; a delay and an id
for it are columns of that matrix (bench/delay_amqp.py).
Invariant: free are only whole values that no rule of the broker looks at, and x-delay and x-schedule-id where both may
be read as they stand. Neighbours: properties.py and fields.py below, publishing.py above.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.gateways.amqp import properties
from headrace.gateways.amqp.errors import AmqpError
from headrace.gateways.amqp.fields import entries_of
from headrace.gateways.amqp.properties import (
    CORRELATION_ID,
    HEADERS,
    MESSAGE_ID,
    REPLY_TO,
    TIMESTAMP,
    USER_ID,
    PropertyScan,
)
from headrace.gateways.delivery.delayed_when import DELAY, SCHEDULE_ID, SCHEDULE_ID_BYTES_MAX

Integers = npt.NDArray[np.int64]

# Fewer messages are not worth the calls into numpy.
COUNT_MIN = 16
# Longer properties are looked at one by one.
SIZE_MAX = 1024
# So many shapes of one size, and so many sizes, are remembered by a connection.
SHAPES_MAX = 8
SIZES_MAX = 64
# A run of more sizes, or with more new shapes, is of messages that have little in common.
SIZES_IN_RUN_MAX = 4
NEW_IN_RUN_MAX = 4

_DELAY, _SCHEDULE_ID = DELAY.encode(), SCHEDULE_ID.encode()
# Letter of an integer -> how it is stored.
_INTEGERS = dict(zip(b"bBsuIilL", map(np.dtype, (">i1", ">u1", ">i2", ">u2", ">i4", ">u4", ">i8", ">i8")), strict=True))
# Letters of other values of one size, and of those that say their size.
_SCALARS = b"tfDdT"
_STRINGS = b"Sx"


class Group(NamedTuple):
    """Neighbours first..last-1 whose scans are equal, so that they can be appended as one run."""

    first: int
    last: int
    scan: PropertyScan
    # Where a delay in milliseconds is all that concerns the broker: those of each, and the ids given (None: no ids).
    delays_ms: Integers | None = None
    ids: Sequence[bytes | None] | None = None


class Shape:
    __slots__ = ("_delay", "_id", "_mask", "_pattern", "scan", "size")

    def __init__(self, props: bytes) -> None:
        """Raises AmqpError as `properties.scan` does."""
        self.scan = properties.scan(props)
        self.size = len(props)
        mask = np.full(self.size, 0xFF, dtype=np.uint8)
        # Where the delay stands and how it is stored; where the id stands.
        self._delay: tuple[int, np.dtype[np.signedinteger]] | None = None
        self._id: slice | None = None
        for span in self._free(props):
            mask[span] = 0
        self._mask = mask
        self._pattern = np.frombuffer(props, dtype=np.uint8) & mask

    def _free(self, props: bytes) -> Iterator[slice]:
        places = properties.places_of(props)
        for bit in (CORRELATION_ID, MESSAGE_ID):
            if bit in places:
                yield slice(places[bit][0] + 1, places[bit][1])
        if TIMESTAMP in places:
            yield slice(*places[TIMESTAMP])
        if HEADERS not in places:
            return
        start, end = places[HEADERS]
        entries = entries_of(props, start + 4, end)
        plain = USER_ID not in places and REPLY_TO not in places
        ours = [name for name, _start, _end in entries if name.startswith(b"x-") or b"CC" in name]
        # Nothing else that concerns the broker, and nothing twice.
        reads = (
            plain and ours.count(_DELAY) == 1 and set(ours) <= {_DELAY, _SCHEDULE_ID} and len(set(ours)) == len(ours)
        )
        delay: tuple[int, np.dtype[np.signedinteger]] | None = None
        found: slice | None = None
        for name, at, behind in entries:
            at += 1 + len(name)
            letter = props[at]
            if name == _DELAY:
                if letter in _INTEGERS:
                    delay = at + 1, _INTEGERS[letter]
            elif name == _SCHEDULE_ID:
                reads = reads and letter == ord("S") and 1 <= behind - at - 5 <= SCHEDULE_ID_BYTES_MAX
                found = slice(at + 5, behind)
            elif name not in ours:
                if letter in _STRINGS:
                    yield slice(at + 5, behind)
                elif letter in _SCALARS or letter in _INTEGERS:
                    yield slice(at + 1, behind)
        if reads and delay is not None:
            self._delay, self._id = delay, found
            yield slice(delay[0], delay[0] + delay[1].itemsize)
            if found is not None:
                yield found

    @property
    def has_delay(self) -> bool:
        return self._delay is not None

    @property
    def has_id(self) -> bool:
        return self._id is not None

    def fits(self, rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
        """Which rows are of this shape."""
        return np.asarray(((rows ^ self._pattern) & self._mask).max(axis=1) == 0)

    def delays_ms(self, rows: npt.NDArray[np.uint8]) -> Integers:
        assert self._delay is not None
        at, kind = self._delay
        column = np.ascontiguousarray(rows[:, at : at + kind.itemsize])
        return column.view(kind).reshape(len(rows)).astype(np.int64)

    def id(self, props: bytes) -> bytes | None:
        return None if self._id is None else props[self._id]


_scan = lru_cache(maxsize=4096)(properties.scan)


@lru_cache(maxsize=1024)
def _shape_of(props: bytes) -> Shape:
    return Shape(props)


class Shapes:
    """Those that one connection has shown, by size."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[int, list[Shape]] = {}

    def groups(self, props: Sequence[bytes]) -> Iterable[Group]:
        """What stands before properties that cannot be read is given out before those are refused, with AmqpError."""
        first = props[0]
        count = len(props)
        is_small = count < COUNT_MIN or len(first) > SIZE_MAX
        if props[-1] is first and props.count(first) == count:
            return (Group(0, count, _scan(first)) if is_small else _all_alike(first, count),)
        if is_small:
            return _one_by_one(props)
        try:
            return self._sorted(props)
        except AmqpError:
            return _one_by_one(props)

    def _sorted(self, props: Sequence[bytes]) -> Iterable[Group]:
        sizes = list(map(len, props))
        count, size = len(props), sizes[0]
        shapes: list[Shape] = []
        if sizes.count(size) == count:
            which = np.zeros(count, dtype=np.int64)
            parts = {size: None}
        else:
            which = np.array(sizes)
            parts = dict.fromkeys(np.unique(which).tolist())
            if len(parts) > SIZES_IN_RUN_MAX or max(parts) > SIZE_MAX:
                return _one_by_one(props)
        delays = np.zeros(count, dtype=np.int64)
        kinds = np.zeros(count, dtype=np.int64)
        for size in parts:
            indices = np.arange(count) if len(parts) == 1 else np.flatnonzero(which == size)
            some = props if len(parts) == 1 else _picked(props, indices)
            rows = np.frombuffer(b"".join(some), dtype=np.uint8).reshape(len(indices), size)
            found = self._recognise(size, rows)
            if found is None:
                return _one_by_one(props)
            for shape, fitting in found:
                at = indices[fitting]
                kinds[at] = len(shapes)
                shapes.append(shape)
                if shape.has_delay:
                    delays[at] = shape.delays_ms(rows[fitting])
        return _grouped(props, shapes, kinds, delays)

    def _recognise(self, size: int, rows: npt.NDArray[np.uint8]) -> Sequence[tuple[Shape, npt.NDArray[np.intp]]] | None:
        """Each shape that these rows have, and which of them; None when they are too many."""
        found: list[tuple[Shape, npt.NDArray[np.intp]]] = []
        left = np.arange(len(rows))
        known = list(self._known.get(size, ()))
        new_count = 0
        while len(left):
            if known:
                shape = known.pop(0)
            elif new_count == NEW_IN_RUN_MAX:
                return None
            else:
                shape = Shape(rows[left[0]].tobytes())
                self._remember(shape)
                new_count += 1
            fits = shape.fits(rows if len(left) == len(rows) else rows[left])
            if fits.any():
                found.append((shape, left[fits]))
                left = left[~fits]
        return found

    def _remember(self, shape: Shape) -> None:
        if len(self._known) >= SIZES_MAX and shape.size not in self._known:
            self._known.clear()
        known = self._known.setdefault(shape.size, [])
        if len(known) >= SHAPES_MAX:
            known.pop()
        known.insert(0, shape)


def _picked(props: Sequence[bytes], indices: npt.NDArray[np.intp]) -> Sequence[bytes]:
    places = indices.tolist()
    return itemgetter(*places)(props) if len(places) > 1 else (props[places[0]],)


def _all_alike(props: bytes, count: int) -> Group:
    shape = _shape_of(props)
    if not shape.has_delay:
        return Group(0, count, shape.scan)
    delay_ms = shape.delays_ms(np.frombuffer(props, dtype=np.uint8).reshape(1, len(props)))
    return Group(0, count, shape.scan, np.repeat(delay_ms, count), [shape.id(props)] * count if shape.has_id else None)


def _grouped(props: Sequence[bytes], shapes: Sequence[Shape], kinds: Integers, delays: Integers) -> list[Group]:
    count = len(props)
    # Shapes that are the same to the broker.
    classes: dict[tuple[PropertyScan, bool], int] = {}
    alike = np.array([classes.setdefault((shape.scan, shape.has_delay), len(classes)) for shape in shapes])[kinds]
    bounds = [0, *(np.flatnonzero(alike[1:] != alike[:-1]) + 1).tolist(), count]
    groups = []
    for first, last in pairwise(bounds):
        mine = [shapes[place] for place in np.unique(kinds[first:last]).tolist()]
        shape = mine[0]
        if not shape.has_delay:
            groups.append(Group(first, last, shape.scan))
            continue
        ids = None
        if any(one.has_id for one in mine):
            ids = [shapes[place].id(props[at]) for at, place in enumerate(kinds[first:last].tolist(), first)]
        groups.append(Group(first, last, shape.scan, delays[first:last], ids))
    return groups


def _one_by_one(props: Sequence[bytes]) -> Iterator[Group]:
    start = 0
    scan = properties.scan(props[0])
    for index in range(1, len(props)):
        try:
            other = properties.scan(props[index])
        except AmqpError:
            yield Group(start, index, scan)
            raise
        if other is not scan and other != scan:
            yield Group(start, index, scan)
            start, scan = index, other
    yield Group(start, len(props), scan)
