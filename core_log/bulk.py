"""Records moved in bulk from log to log, as columns of bytes and numbers: no object stands for a record. Format; pure.

    Cells          the byte strings of one column: one that all share, cells of one size, or a list
    BulkBatch      a batch that is written as it is

What differs in size is kept as a list, which C loops cut, pick and join; cells of one size are an array, of which numpy
picks what is wanted. A bulk batch has no routes and no producer: it holds what views do not look at, as parked records.
Invariant: `encode_bulk` gives the bytes that format.encode gives for the same records.
Neighbours: format.py has the format, log.py writes, delay/freight.py moves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from headrace.core_log.format import (
    SHARED,
    Blob,
    Body,
    body_of,
    cut,
    encode_headers,
    encode_sizes,
    encode_tags,
    hashes_of_keys,
)
from headrace.core_log.record import Headers
from headrace.core_log.summary import key_hash

T = TypeVar("T")
Integers = npt.NDArray[np.int64]
Order = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Cells:
    """Exactly one of the three: `shared`, `fixed` (numpy's void items), `various`."""

    count: int
    shared: bytes | None = None
    fixed: npt.NDArray[np.void] | None = None
    various: list[bytes] | None = None

    @classmethod
    def of(cls, blob: memoryview, sizes: bytes, count: int, shared: bool) -> "Cells":
        """A column as `decode_columns` has it. What has one size is not copied."""
        size = int.from_bytes(sizes, "little") if len(sizes) == 4 else -1
        if shared or size == 0 or (size > 0 and count == 1):
            return cls(count, shared=bytes(blob))
        if size > 0:
            return cls(count, fixed=np.frombuffer(blob, dtype=f"V{size}"))
        return cls(count, various=cut(blob, sizes, count, shared=False))

    @property
    def byte_count(self) -> int:
        if self.shared is not None:
            return len(self.shared) * self.count
        return self.fixed.nbytes if self.fixed is not None else sum(map(len, self._list))

    @property
    def _list(self) -> list[bytes]:
        if self.various is not None:
            return self.various
        if self.shared is not None:
            return [self.shared] * self.count
        assert self.fixed is not None
        cells: list[bytes] = self.fixed.tolist()
        return cells

    def take(self, order: Order) -> "Cells":
        """These, in this order."""
        if self.shared is not None:
            return Cells(len(order), shared=self.shared)
        if self.fixed is not None:
            return Cells(len(order), fixed=self.fixed[order])
        return Cells(len(order), various=pick(self._list, order.tolist()))

    def part(self, first: int, last: int) -> "Cells":
        if self.shared is not None:
            return Cells(last - first, shared=self.shared)
        if self.fixed is not None:
            return Cells(last - first, fixed=self.fixed[first:last])
        return Cells(last - first, various=self._list[first:last])

    def encode(self, fixed: list[bytes], *, share: bool) -> tuple[Blob, int]:
        """What goes into the blob, and what stands for the column's sizes in FIXED."""
        if self.shared is not None and share:
            fixed.append(len(self.shared).to_bytes(4, "little"))
            return self.shared, SHARED | 1
        if self.fixed is not None and not (share and self.count == 1):
            fixed.append(self.fixed.itemsize.to_bytes(4, "little"))
            return self.fixed.view("u1").data, 1
        entries, word = encode_sizes(self._list, fixed, share=share)
        return b"".join(entries), word

    def key_hashes(self) -> set[int]:
        return {key_hash(self.shared)} if self.shared is not None else hashes_of_keys(self._list)


def placed(parts: Sequence[tuple[Cells, Order]]) -> Cells:
    """All of them, each entry at its place: what is copied is copied once."""
    count = sum(one.count for one, _places in parts)
    first = parts[0][0]
    if first.shared is not None and all(one.shared == first.shared for one, _places in parts):
        return Cells(count, shared=first.shared)
    if first.fixed is not None:
        size = first.fixed.itemsize
        if all(one.fixed is not None and one.fixed.itemsize == size for one, _places in parts):
            cells = np.empty(count, dtype=first.fixed.dtype)
            for one, places in parts:
                cells[places] = one.fixed
            return Cells(count, fixed=cells)
    order = np.empty(count, dtype=np.intp)
    order[np.concatenate([places for _one, places in parts])] = np.arange(count)
    return Cells(count, various=pick([cell for one, _places in parts for cell in one._list], order.tolist()))


@dataclass(slots=True, eq=False)
class BulkBatch:
    """Records that will lie next to each other in a log."""

    timestamps: Integers
    expiries: Integers
    attributes: Integers
    origins: Integers
    # For each record, which of the tag sets it has; the first is the empty one.
    tags: Integers
    tag_sets: list[tuple[str, ...]]
    keys: Cells
    properties: Cells
    values: Cells
    headers: list[Headers] | None = None

    @property
    def count(self) -> int:
        return len(self.timestamps)


def encode_bulk(batch: BulkBatch, *, compress: str = "none") -> Body:
    counts = [0] * 16
    fixed: list[bytes] = [b""]
    for place, column in ((0, batch.timestamps), (1, batch.expiries), (2, batch.attributes), (4, batch.origins)):
        counts[place] = _encode_column(column, fixed)
    counts[5] = _encode_column(batch.tags, fixed)
    texts, hashes = encode_tags(batch.tag_sets, counts, fixed)
    header_keys, header_values = encode_headers(batch.headers, counts, fixed)
    keys, counts[13] = batch.keys.encode(fixed, share=True)
    properties, counts[14] = batch.properties.encode(fixed, share=True)
    values, counts[15] = batch.values.encode(fixed, share=False)
    return body_of(
        counts,
        fixed,
        [keys, properties, header_keys, header_values, values],
        texts,
        hashes | batch.keys.key_hashes(),
        record_count=batch.count,
        stamps=(int(batch.timestamps.min()), int(batch.timestamps.max())),
        compress=compress,
    )


def _encode_column(column: Integers, fixed: list[bytes]) -> int:
    """As runs: one where all are alike, else one each."""
    first = column[0]
    if bool((column == first).all()):
        if first == 0:
            return 0
        fixed.append(int(first).to_bytes(8, "little", signed=True))
        return 1
    fixed.append(column.astype("<i8", copy=False).tobytes())
    return len(column)


def pick(column: Sequence[T], places: list[int]) -> list[T]:
    """The entries at these places: a slice where they follow one another, else one C loop."""
    if not places:
        return []
    first, last = places[0], places[-1]
    if last - first + 1 == len(places) and (len(places) < 3 or places == list(range(first, last + 1))):
        return list(column[first : last + 1])
    return list(itemgetter(*places)(column))
