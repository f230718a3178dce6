"""Records that are wanted by their places, read again from their logs. Machine over the log's segments.

    fetch    in any thread: which batches, and their bytes
    open     on the loop, a batch at a time: what is wanted of it
    take     in the order that the caller wants

Columns are picked with one C call each, never a record at a time.
Neighbours: firing.py reads what it fires, search.py what people look for; freight.py is for what is only moved.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.core_log.bulk import pick
from headrace.core_log.errors import CorruptLog
from headrace.core_log.format import BatchHeader, decode
from headrace.core_log.record import Headers
from headrace.core_log.segment import Segment
from headrace.delay.marks import OFFSET_BITS, OFFSET_MASK, Places
from headrace.delay.rows import id_of, own_headers, target_of

Integers = npt.NDArray[np.int64]


class Shelf(NamedTuple):
    """Where a source's batches lie."""

    segments: Sequence[Segment]
    index_interval_bytes: int


class Fetched(NamedTuple):
    """One batch as stored, and the records of it that are wanted: by their indices, and where each was asked for."""

    header: BatchHeader
    data: bytes
    indices: Integers
    asked: npt.NDArray[np.intp]


def fetch(shelves: Mapping[int, Shelf], places: Places) -> list[Fetched]:
    """Read every batch that holds one of these places. Blocks; raises CorruptLog when one is not there."""
    order = np.argsort(places, kind="stable")
    wanted = places[order]
    found: list[Fetched] = []
    at = 0
    while at < len(wanted):
        place = int(wanted[at])
        shelf, offset = shelves[place >> OFFSET_BITS], place & OFFSET_MASK
        segment = segment_of(shelf.segments, offset)
        position = segment.locate(offset, shelf.index_interval_bytes)
        header, data = segment.read_whole(position)
        base = place - (offset - header.base_offset)
        end = at + int(np.searchsorted(wanted[at:], base + header.span))
        found.append(Fetched(header, data, wanted[at:end] - base, order[at:end]))
        at = end
    return found


def segment_of(segments: Sequence[Segment], offset: int) -> Segment:
    """The one in which an offset lies. Raises CorruptLog when it is gone."""
    at = bisect_right(segments, offset, key=attrgetter("base_offset")) - 1
    if at < 0:
        raise CorruptLog(segments[0].path if segments else "delay", 0, offset, "a parked record is gone")
    return segments[at]


class Bodies:
    """Records as columns. Headers still begin with our id, tags with the target."""

    __slots__ = (
        "_tag_places",
        "attributes",
        "dues",
        "headers",
        "keys",
        "numbers",
        "properties",
        "tag_sets",
        "tags",
        "timestamps",
        "values",
    )

    def __init__(self) -> None:
        self.keys: list[bytes] = []
        self.properties: list[bytes] = []
        self.values: list[bytes] = []
        self.headers: list[Headers] = []
        self.dues: Integers = np.zeros(0, dtype=np.int64)
        self.numbers: Integers = self.dues
        self.timestamps: Integers = self.dues
        self.attributes: Integers = self.dues
        # For each record, which of the tag sets it has.
        self.tags: Integers = self.dues
        self.tag_sets: list[tuple[str, ...]] = []
        self._tag_places: dict[tuple[str, ...], int] = {}

    def __len__(self) -> int:
        return len(self.values)

    def tags_of(self, index: int) -> tuple[str, ...]:
        return self.tag_sets[int(self.tags[index])][1:]

    def target(self, index: int) -> bytes:
        return target_of(self.tag_sets[int(self.tags[index])])

    def id(self, index: int) -> bytes:
        return id_of(int(self.numbers[index]), self.headers[index])

    def ids(self) -> list[bytes]:
        return list(map(id_of, self.numbers.tolist(), self.headers))

    def headers_of(self, index: int) -> Headers:
        return own_headers(self.headers[index])

    @property
    def byte_count(self) -> int:
        return sum(map(len, self.values)) + sum(map(len, self.properties)) + sum(map(len, self.keys))

    def take(self, order: npt.NDArray[np.intp]) -> "Bodies":
        """These records, in this order."""
        places: list[int] = order.tolist()
        taken = Bodies()
        taken.keys = pick(self.keys, places)
        taken.properties = pick(self.properties, places)
        taken.values = pick(self.values, places)
        taken.headers = pick(self.headers, places)
        for name in ("dues", "numbers", "timestamps", "attributes", "tags"):
            setattr(taken, name, getattr(self, name)[order])
        taken.tag_sets = self.tag_sets
        taken._tag_places = self._tag_places
        return taken


class Opening:
    """Bodies in the making: batches come one by one, `finish` puts the records in the order they were asked for."""

    __slots__ = ("_asked", "_bodies", "_columns", "_count")

    def __init__(self, count: int) -> None:
        self._count = count
        self._bodies = Bodies()
        self._asked: list[npt.NDArray[np.intp]] = []
        self._columns: list[tuple[Integers, Integers, Integers, Integers, Integers]] = []

    def open(self, one: Fetched, start: int = 0) -> None:
        """`start`: how many were asked for before those of this call of `fetch`."""
        batch = decode(one.data, 0, one.header)
        bodies, which = self._bodies, one.indices
        indices: list[int] = which.tolist()
        bodies.keys += pick(batch.keys, indices)
        bodies.properties += pick(batch.properties, indices)
        bodies.values += pick(batch.values, indices)
        bodies.headers += [()] * len(indices) if batch.headers is None else pick(batch.headers, indices)
        offsets = which + batch.base_offset
        origins = batch.origins.expand()[which]
        known = bodies._tag_places
        for tags in batch.tag_sets:
            if tags not in known:
                known[tags] = len(bodies.tag_sets)
                bodies.tag_sets.append(tags)
        tags_here = np.array([known[tags] for tags in batch.tag_sets], dtype=np.int64)
        self._columns.append(
            (
                batch.expiries.expand()[which],
                np.where(origins == 0, offsets, origins - 1),
                batch.timestamps.expand()[which],
                batch.attributes.expand()[which],
                tags_here[batch.tags.expand()[which]],
            )
        )
        self._asked.append(one.asked + start)

    def finish(self) -> Bodies:
        bodies = self._bodies
        if not self._columns:
            return bodies
        bodies.dues, bodies.numbers, bodies.timestamps, bodies.attributes, bodies.tags = (
            np.concatenate(column) for column in zip(*self._columns, strict=True)
        )
        asked = np.concatenate(self._asked)
        assert len(asked) == self._count, "every record that was asked for is there"
        if bool((asked[1:] > asked[:-1]).all()):
            return bodies
        order = np.empty(len(asked), dtype=np.intp)
        order[asked] = np.arange(len(asked))
        return bodies.take(order)
