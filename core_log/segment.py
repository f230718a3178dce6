"""One segment: a file of batches after a head that names its salt. Machine over the storage contract.

Files are zero-filled ahead of the data, or are recycled ones that hold an older segment's batches: a sync then
moves data only, no metadata (bench/commit.py). So the end of the data is not the end of the file: it is the
first place that holds no whole batch with this segment's salt, the expected offset and no falling epoch.
Neighbours: log.py chains segments, index.py finds a place inside one.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from headrace.core_log.errors import CorruptLog, DiskFull
from headrace.core_log.format import (
    FLAG_GAP,
    HEADER_SIZE,
    SEGMENT_HEAD_SIZE,
    BatchHeader,
    Blob,
    SegmentHead,
    decode,
    encode_segment_head,
    is_whole,
    maybe_header,
    maybe_segment_head,
)
from headrace.core_log.index import SparseIndex
from headrace.core_log.record import RouteReference, RouteSet
from headrace.core_log.storage.contract import File, Storage

# A fresh file is zero-filled in steps that double from the first to the second of these. Whoever appends waits for it:
# 4 MiB at once held the loop for up to 13 ms of a busy machine (bench/delay.py).
GROWTH_BYTES_MIN = 64 * 1024
GROWTH_BYTES_MAX = 1024 * 1024
_ZEROS = bytes(GROWTH_BYTES_MAX)
_WINDOW = 64 * 1024

Visit = Callable[[int, BatchHeader], None]


class Scan(NamedTuple):
    """Where whole batches end, and the highest durable offset that a whole batch beyond that place claims."""

    end_offset: int
    end_position: int
    # Of the last whole batch, or the one that was asked from.
    epoch: int
    claimed_durable: int
    reached_file_end: bool


def stem_of(folder: str, base_offset: int) -> str:
    return f"{folder}/{base_offset:020d}"


class Segment:
    """Invariant: SEGMENT_HEAD_SIZE <= end_position <= capacity, and batches fill what lies between."""

    __slots__ = (
        "_file",
        "_salt",
        "_storage",
        "base_offset",
        "capacity",
        "created_us",
        "end_offset",
        "end_position",
        "index",
        "large_sets",
        "stem",
    )

    def __init__(self, storage: Storage, folder: str, base_offset: int, end_offset: int) -> None:
        self._storage = storage
        self.stem = stem_of(folder, base_offset)
        self.base_offset = base_offset
        self.end_offset = end_offset
        # -1: not looked at yet (sealed segments are opened when first read).
        self.end_position = -1
        self.capacity = -1
        self.created_us = 0
        self.index: SparseIndex | None = None
        self.large_sets: dict[RouteSet, RouteReference] = {}
        self._file: File | None = None
        self._salt: int | None = None

    @property
    def path(self) -> str:
        return self.stem + ".log"

    @property
    def file(self) -> File:
        if self._file is None:
            self._file = self._storage.open(self.path)
        return self._file

    @property
    def salt(self) -> int:
        if self._salt is None:
            head = maybe_segment_head(self.file.read(0, SEGMENT_HEAD_SIZE))
            if head is None or head.base_offset != self.base_offset:
                raise CorruptLog(self.path, 0, self.base_offset, "the segment's head is not readable")
            self._salt = head.salt
        return self._salt

    @property
    def is_empty(self) -> bool:
        return self.end_position == SEGMENT_HEAD_SIZE

    @classmethod
    def create(
        cls, storage: Storage, folder: str, head: SegmentHead, *, interval: int, recycled: str | None, now_us: int
    ) -> "Segment":
        """A new, empty segment; durable once the file and its folder are synced."""
        segment = cls(storage, folder, head.base_offset, head.base_offset)
        if recycled is not None:
            storage.rename(recycled, segment.path)
            segment._file = storage.open(segment.path)
        else:
            segment._file = storage.open(segment.path, create=True)
        segment._salt = head.salt
        segment.capacity = segment._file.size()
        segment.end_position = SEGMENT_HEAD_SIZE
        segment.created_us = now_us
        segment.index = SparseIndex(head.base_offset, SEGMENT_HEAD_SIZE, interval)
        try:
            segment._make_room(SEGMENT_HEAD_SIZE)
            segment._file.write(0, [encode_segment_head(head)])
        except DiskFull:
            # The next try begins from nothing.
            storage.remove(segment.path)
            raise
        return segment

    def resume(self, end_position: int, interval: int) -> None:
        """Go on writing behind this place (the log was closed there)."""
        self.end_position = end_position
        self.capacity = self.file.size()
        self.index = SparseIndex.maybe_load(
            self._storage, self.stem, self.salt, interval, self.end_offset, SEGMENT_HEAD_SIZE
        )
        if self.index is None or self.index.end_position != end_position:
            self.index = self._rebuild_index(interval)

    def append(
        self, buffers: Sequence[Blob], size: int, next_offset: int, max_timestamp: int | None, *, ahead: bool = True
    ) -> int:
        """Write one stamped batch at the end; returns its position. Not synced. `ahead`: prepare the file for more."""
        position = self.end_position
        if position + size > self.capacity and ahead:
            self._make_room(position + size)
        self.file.write(position, buffers)
        self.capacity = max(self.capacity, position + size)
        self.end_position = position + size
        self.end_offset = next_offset
        assert self.index is not None, "only the active segment is appended to"
        self.index.add(next_offset, size, max_timestamp)
        return position

    def _make_room(self, needed: int) -> None:
        """Zero-fill ahead, so that writing data later changes no metadata."""
        while self.capacity < needed:
            step = min(max(self.capacity, GROWTH_BYTES_MIN), GROWTH_BYTES_MAX)
            self.file.write(self.capacity, [_ZEROS[:step]])
            self.capacity += step

    # -- reading ------------------------------------------------------------------------------------------------

    def locate(self, offset: int, interval: int) -> int:
        """Position of the batch that covers the offset. The offset must lie in this segment."""
        if self.index is None:
            self.index = SparseIndex.maybe_load(
                self._storage, self.stem, self.salt, interval, self.end_offset, SEGMENT_HEAD_SIZE
            ) or self._rebuild_index(interval)
            self.end_position = self.index.end_position
        entry = self.index.position_before(offset)
        if entry is not None and entry[0] == offset:
            # A reader that goes on from batch to batch: nothing has to be read to find it (bench/read.py).
            return entry[1]
        position = SEGMENT_HEAD_SIZE if entry is None else entry[1]
        for at, header in self.headers(position):
            if header.next_offset > offset:
                return at
        raise CorruptLog(self.path, position, offset, "no batch holds the offset")

    def headers(self, position: int = SEGMENT_HEAD_SIZE) -> Iterator[tuple[int, BatchHeader]]:
        """Every batch's header from this position to the segment's end, hopping over the rest."""
        if self.base_offset == self.end_offset or position == self.end_position:
            return
        window = b""
        start = position
        expected: int | None = None
        while expected is None or expected < self.end_offset:
            header = maybe_header(window, position - start, self.salt)
            if header is None:
                window = self.file.read(position, _WINDOW)
                start = position
                header = maybe_header(window, 0, self.salt)
            if header is None or (expected is not None and header.base_offset != expected):
                raise CorruptLog(self.path, position, expected or self.base_offset, "no batch where one must be")
            yield position, header
            position += header.size
            expected = header.next_offset

    def read_whole(self, position: int, header: BatchHeader | None = None) -> tuple[BatchHeader, bytes]:
        """One batch, checked against its hash."""
        size = header.size if header is not None else _WINDOW
        data = self.file.read(position, size)
        if header is None:
            header = maybe_header(data, 0, self.salt)
            if header is None:
                raise CorruptLog(self.path, position, self.base_offset, "no batch where one must be")
            if header.size > len(data):
                data += self.file.read(position + len(data), header.size - len(data))
        if not is_whole(data, 0, header):
            raise CorruptLog(self.path, position, header.base_offset, "a batch fails its hash")
        return header, data[: header.size]

    def route_set(self, reference: RouteReference, interval: int) -> RouteSet:
        """The large set that an earlier batch spells out."""
        position = self.locate(reference.base_offset, interval)
        header, data = self.read_whole(position)
        if header.base_offset == reference.base_offset and not header.flags & FLAG_GAP:
            sets = decode(data, 0, header).route_sets
            found = sets[reference.place] if reference.place < len(sets) else reference
            if not isinstance(found, RouteReference):
                return found
        raise CorruptLog(self.path, position, reference.base_offset, "a batch refers to a route set that is not there")

    def _rebuild_index(self, interval: int) -> SparseIndex:
        index = SparseIndex(self.base_offset, SEGMENT_HEAD_SIZE, interval)
        for _position, header in self.headers():
            index.add(header.next_offset, header.size, None if header.flags & FLAG_GAP else header.max_timestamp)
        return index

    def remove_indexes(self) -> None:
        for suffix in (".index", ".timeindex", ".keys"):
            if self._storage.exists(self.stem + suffix):
                self._storage.remove(self.stem + suffix)

    def save_index(self) -> None:
        if self.index is not None:
            self.index.save(self._storage, self.stem, self.salt)

    def max_timestamp(self, interval: int) -> int:
        """The newest record's time; the index is read for it when it is not in memory."""
        if self.index is None:
            self.locate(self.base_offset, interval)
        assert self.index is not None
        return self.index.max_timestamp

    # -- recovery -----------------------------------------------------------------------------------------------

    def scan(self, position: int, offset: int, epoch: int, visit: Visit) -> Scan:
        """Read on from a known place, checking every hash, until something is not a whole batch of ours.

        What lies beyond that place is searched for whole batches with this salt: the highest durable offset
        that one of them claims tells a torn tail from lost data (D7).
        """
        size = self.file.size()
        while True:
            data = self.file.read(position, _WINDOW)
            header = maybe_header(data, 0, self.salt)
            if header is None or header.base_offset != offset or header.leader_epoch < epoch:
                break
            if header.size > size - position:
                break
            if header.size > len(data):
                data += self.file.read(position + len(data), header.size - len(data))
            if not is_whole(data, 0, header):
                break
            visit(position, header)
            position += header.size
            offset = header.next_offset
            epoch = header.leader_epoch
        return Scan(offset, position, epoch, self._claimed_beyond(position, size), position == size)

    def _claimed_beyond(self, position: int, size: int) -> int:
        return max((header.durable_offset for _, header in self.find_batches(position, size)), default=0)

    def find_batches(self, position: int, size: int) -> Iterator[tuple[int, BatchHeader]]:
        """Whole batches with this segment's salt anywhere behind a place, however they got there."""
        needle = self.salt.to_bytes(8, "little")
        step = 4 * 1024 * 1024
        while position < size:
            chunk = self.file.read(position, step)
            if not chunk:
                return
            found = chunk.find(needle)
            while found >= 0:
                at = position + found - 8
                if at >= SEGMENT_HEAD_SIZE:
                    header = maybe_header(self.file.read(at, HEADER_SIZE), 0, self.salt)
                    if header is not None and is_whole(self.file.read(at, header.size), 0, header):
                        yield at, header
                found = chunk.find(needle, found + 1)
            position += max(len(chunk) - 7, 1)

    def write_again(self, position: int) -> None:
        """Make safe what lies from this place to the end, whatever became of the process that wrote it.

        If it died of a failed sync, the kernel holds pages that it calls clean and that the disk has never seen:
        only what is written anew is written by the next sync (D6).
        """
        while position < self.end_position:
            data = self.file.read(position, min(GROWTH_BYTES_MAX, self.end_position - position))
            position += self.file.write(position, [data])
        self.file.sync()

    def cut(self, position: int, offset: int) -> None:
        """Everything from this place on is gone, for good once the file is synced."""
        self.file.truncate(position)
        self.file.sync()
        self.capacity = position
        self.end_position = position
        self.end_offset = offset
        if self.index is not None:
            self.index.cut_from(offset, position)
        self.large_sets = {
            one: reference for one, reference in self.large_sets.items() if reference.base_offset < offset
        }
