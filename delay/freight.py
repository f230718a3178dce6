"""Parked records on their way into buckets, as columns of bytes: nobody looks at one of them. Machine; pure.

    load      in any thread: the records at some places, each where it is wanted
    batches   on the loop: some neighbours, as they are appended

What the rows know of them already, when they are due and their numbers, is not read again.
Neighbours: bodies.py reads records that somebody looks at; sorter.py moves these.
"""

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from headrace.core_log.bulk import BulkBatch, Cells, pick, placed
from headrace.core_log.format import cut_headers, decode_columns
from headrace.core_log.log import TAGS_MAX
from headrace.core_log.record import Headers
from headrace.delay.bodies import Integers, Shelf, fetch
from headrace.delay.marks import Places
from headrace.delay.rows import Rows

Order = npt.NDArray[np.intp]


class Freight:
    """Invariant: columns are equally long. The first tag of each record is its target."""

    __slots__ = ("attributes", "headers", "keys", "properties", "tag_sets", "tags", "timestamps", "values")

    def __init__(
        self,
        keys: Cells,
        properties: Cells,
        values: Cells,
        timestamps: Integers,
        attributes: Integers,
        tags: Integers,
        tag_sets: list[tuple[str, ...]],
        headers: list[Headers] | None = None,
    ) -> None:
        self.keys = keys
        self.properties = properties
        self.values = values
        self.timestamps = timestamps
        self.attributes = attributes
        # For each record, which of the tag sets it has.
        self.tags = tags
        self.tag_sets = tag_sets
        self.headers = headers

    def __len__(self) -> int:
        return len(self.timestamps)

    @property
    def byte_count(self) -> int:
        return self.keys.byte_count + self.properties.byte_count + self.values.byte_count

    def batches(self, rows: Rows, first: int, last: int) -> Iterator[BulkBatch]:
        """Records first..last-1, which these rows tell of, as a batch to be written; more where they have too many
        tags for one. Each keeps its number, as its origin."""
        used, tags = self._tags_of(first, last)
        if len(used) > 1 and sum(len(self.tag_sets[place]) for place in used) > TAGS_MAX:
            middle = (last - first) // 2
            yield from self.batches(rows[:middle], first, first + middle)
            yield from self.batches(rows[middle:], first + middle, last)
            return
        yield BulkBatch(
            self.timestamps[first:last],
            rows["due"],
            self.attributes[first:last],
            rows["number"] + 1,
            tags + 1,
            [(), *(self.tag_sets[place] for place in used)],
            self.keys.part(first, last),
            self.properties.part(first, last),
            self.values.part(first, last),
            None if self.headers is None else self.headers[first:last],
        )

    def _tags_of(self, first: int, last: int) -> tuple[list[int], Integers]:
        """The tag sets that these records have, and which of those each has."""
        tags = self.tags[first:last]
        if bool((tags == tags[0]).all()):
            return [int(tags[0])], np.zeros(last - first, dtype=np.int64)
        used, which = np.unique(tags, return_inverse=True)
        return used.tolist(), which.reshape(-1)


def load(shelves: Mapping[int, Shelf], places: Places, order: Order) -> Freight:
    """The records at these places, which must rise, in this order. Blocks; raises CorruptLog when one is not there."""
    count = len(places)
    # Where each of the places is wanted.
    wanted = np.empty(count, dtype=np.intp)
    wanted[order] = np.arange(count)
    keys: list[tuple[Cells, Order]] = []
    properties: list[tuple[Cells, Order]] = []
    values: list[tuple[Cells, Order]] = []
    columns = np.empty((3, count), dtype=np.int64)
    headers: list[Headers] | None = None
    known: dict[tuple[str, ...], int] = {}
    at = 0
    for one in fetch(shelves, places):
        found, many = decode_columns(one.data, 0, one.header), one.header.record_count
        which = None if len(one.indices) == many else one.indices
        here = wanted[at : at + len(one.indices)]
        at += len(here)
        for cells, blob, sizes, shared in (
            (keys, found.keys, found.key_sizes, found.key_shared),
            (properties, found.properties, found.properties_sizes, found.properties_shared),
            (values, found.values, found.value_sizes, False),
        ):
            column = Cells.of(blob, sizes, many, shared)
            cells.append((column if which is None else column.take(which), here))
        sets = [tuple(found.tag_texts[place] for place in tag_set) for tag_set in found.tag_sets]
        in_all = np.array([known.setdefault(tag_set, len(known)) for tag_set in sets], dtype=np.int64)
        for row, runs in enumerate((found.timestamps, found.attributes, found.tags)):
            if runs.single is not None:
                columns[row, here] = runs.single
            else:
                expanded = runs.expand()
                columns[row, here] = expanded if which is None else expanded[which]
        columns[2, here] = in_all[columns[2, here]]
        if found.header_counts:
            headers = [()] * count if headers is None else headers
            for place, its in zip(here.tolist(), pick(cut_headers(found), one.indices.tolist()), strict=True):
                headers[place] = its
    assert at == count, "every record that was asked for is there"
    timestamps, attributes, tags = columns
    return Freight(placed(keys), placed(properties), placed(values), timestamps, attributes, tags, list(known), headers)
