"""Rows of one pass of the sorter, on the disk: by due time for the wheel, by id for people. Format over the storage.

     0                  8            12              16
     | magic "HRdrun01" | rows u32   | sources u32   | then for each source:
     | source u32 | first row u32 | rows u32 | zero u32 | hash u64 of its rows | ... | hash u64 of all that before |
     | rows of 36 bytes (rows.py) | id hash u64, row u32: for each row, by id hash |

Little-endian. Rows are by (source, due, number). Derived: what a run file holds can be read from the buckets again
(`rows_of`). The hash of a source's rows is looked at before they are read for the wheel; an id is compared with
the record itself. Neighbours: delays.py writes one for each pass and merges small ones.
"""

import struct
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import xxhash

from headrace.core_log.errors import CorruptLog
from headrace.core_log.storage.contract import File, Storage
from headrace.delay.marks import OFFSET_BITS
from headrace.delay.rows import ROW, ROW_SIZE, Rows, joined

FOLDER = "delay"
_MAGIC = b"HRdrun01"
_HEAD = struct.Struct("<8sII")
_SOURCE = struct.Struct("<IIIIQ")
_HASH = struct.Struct("<Q")
_ID = np.dtype([("id", "<u8"), ("row", "<u4")])
# Ids are found by guessing their place among evenly spread hashes; one read nearly always does.
_GUESS_ROWS = 4096


class Slice(NamedTuple):
    """The rows of one source: from the first to before the end."""

    first: int
    end: int
    hash: int


def path_of(number: int) -> str:
    return f"{FOLDER}/{number:010d}.run"


def number_of(name: str) -> int | None:
    stem, _, suffix = name.partition(".")
    return int(stem) if suffix == "run" and stem.isdecimal() else None


def encode(rows: Rows) -> bytes:
    """Rows must be sorted by (source, due, number)."""
    count = len(rows)
    numbers = rows["place"] >> OFFSET_BITS
    bounds = [0, *(np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist(), count]
    parts = [_HEAD.pack(_MAGIC, count, len(bounds) - 1)]
    data = rows.tobytes()
    for first, end in pairwise(bounds):
        digest = xxhash.xxh3_64_intdigest(memoryview(data)[first * ROW_SIZE : end * ROW_SIZE])
        parts.append(_SOURCE.pack(int(numbers[first]), first, end - first, 0, digest))
    head = b"".join(parts)
    ids = np.empty(count, dtype=_ID)
    order = np.argsort(rows["id"])
    ids["id"] = rows["id"][order]
    ids["row"] = order
    return b"".join([head, _HASH.pack(xxhash.xxh3_64_intdigest(head)), data, ids.tobytes()])


class RunFile:
    """An open one. Reads may be made in any thread."""

    __slots__ = ("_at", "_file", "checked", "count", "number", "slices")

    def __init__(self, storage: Storage, number: int) -> None:
        """Raises CorruptLog when the file is not there or is none."""
        self.number = number
        try:
            self._file: File = storage.open(path_of(number))
        except FileNotFoundError as error:
            raise CorruptLog(path_of(number), 0, 0, "the run file is gone") from error
        fixed = self._file.read(0, _HEAD.size)
        if len(fixed) < _HEAD.size or fixed[:8] != _MAGIC:
            raise CorruptLog(path_of(number), 0, 0, "not a run file")
        _magic, self.count, many = _HEAD.unpack(fixed)
        size = _HEAD.size + many * _SOURCE.size
        head = self._file.read(0, size + _HASH.size)
        if head[size:] != _HASH.pack(xxhash.xxh3_64_intdigest(head[:size])):
            raise CorruptLog(path_of(number), 0, 0, "the head of a run file fails its hash")
        self._at = size + _HASH.size
        if self._file.size() != self._at + self.count * (ROW_SIZE + _ID.itemsize):
            raise CorruptLog(path_of(number), 0, 0, "a run file has the wrong size")
        self.slices: dict[int, Slice] = {}
        # Sources whose rows were found to be as they were written.
        self.checked: set[int] = set()
        for place in range(many):
            source, first, count, _zero, digest = _SOURCE.unpack_from(head, _HEAD.size + place * _SOURCE.size)
            self.slices[source] = Slice(first, first + count, digest)

    def rows(self, first: int, count: int) -> Rows:
        data = self._file.read(self._at + first * ROW_SIZE, count * ROW_SIZE)
        return np.frombuffer(data, dtype=ROW)

    def check(self, source: int) -> None:
        """Raises CorruptLog when the rows of a source are not those that were written."""
        first, end, digest = self.slices[source]
        if xxhash.xxh3_64_intdigest(self.rows(first, end - first).tobytes()) != digest:
            raise CorruptLog(path_of(self.number), self._at, first, "rows of a run file fail their hash")

    def first_from(self, source: int, due_us: int, number: int = 0) -> int:
        """The first row of a source that is not before (due time, number); its end if there is none."""
        low, high, _hash = self.slices[source]
        while high - low > 64:
            middle = (low + high) // 2
            due, at = self.rows(middle, 1)[["due", "number"]].tolist()[0]
            if (due, at) < (due_us, number):
                low = middle
            else:
                high = middle
        rows = self.rows(low, high - low)
        return low + int(((rows["due"] < due_us) | ((rows["due"] == due_us) & (rows["number"] < number))).sum())

    def find(self, hashes: Sequence[int]) -> list[int]:
        """Places of records under one of these hashes of an id."""
        return [place for one in hashes for place in self._find(one)]

    def _find(self, wanted: int) -> list[int]:
        guess = (wanted * self.count) >> 64
        low, high = max(guess - _GUESS_ROWS, 0), min(guess + _GUESS_ROWS, self.count)
        while True:
            ids = self._ids(low, high)
            if low > 0 and (not len(ids) or int(ids["id"][0]) >= wanted):
                low = max(low - 4 * _GUESS_ROWS, 0)
            elif high < self.count and int(ids["id"][-1]) <= wanted:
                high = min(high + 4 * _GUESS_ROWS, self.count)
            else:
                break
        found = ids["row"][ids["id"] == np.uint64(wanted)].tolist()
        return [int(self.rows(row, 1)["place"][0]) for row in found]

    def _ids(self, low: int, high: int) -> "np.ndarray[tuple[int], np.dtype[np.void]]":
        start = self._at + self.count * ROW_SIZE + low * _ID.itemsize
        return np.frombuffer(self._file.read(start, (high - low) * _ID.itemsize), dtype=_ID)

    def all_rows(self, sources: Sequence[int]) -> Rows:
        """Every row of these sources: for merging."""
        parts = []
        for source in sources:
            first, end, _hash = self.slices[source]
            parts.append(self.rows(first, end - first))
        return joined(parts)
