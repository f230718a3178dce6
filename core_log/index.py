"""Sparse ways into a segment: offset to position, time to offset. Machine over storage files; rebuildable.

One entry about every 32 KiB. Entry i says: the batch at position[i] begins at offset[i], and no batch before it
has a timestamp above time[i]. So a search by time starts at the last entry whose time is below the one asked.
Both files carry the segment's salt, how far they reach and a hash; whatever does not fit is rebuilt, not trusted.

    | magic 8 | salt u64 | end position u64 | end offset u64 | max timestamp i64 | entries u64 | columns | hash u64 |
    .index columns: offsets u64, positions u64       .timeindex columns: times i64, offsets u64
"""

import struct
from array import array
from bisect import bisect_left, bisect_right

import xxhash

from headrace.core_log.storage.contract import Storage

_HEAD = struct.Struct("<8sQQQqQ")
_OFFSET_MAGIC = b"HRindex1"
_TIME_MAGIC = b"HRtimes1"
NEVER = -(1 << 63)


class SparseIndex:
    """Entries of one segment, in memory. `max_timestamp` is over all batches up to `end_position`."""

    __slots__ = ("end_offset", "end_position", "interval", "max_timestamp", "offsets", "positions", "times")

    def __init__(self, base_offset: int, start_position: int, interval: int) -> None:
        self.interval = interval
        self.offsets = array("Q")
        self.positions = array("Q")
        self.times = array("q")
        self.end_offset = base_offset
        self.end_position = start_position
        self.max_timestamp = NEVER

    def add(self, next_offset: int, size: int, max_timestamp: int | None) -> None:
        """A batch of this size has been written at the end (max_timestamp None: it holds no record)."""
        if not self.positions or self.end_position - self.positions[-1] >= self.interval:
            self.offsets.append(self.end_offset)
            self.positions.append(self.end_position)
            self.times.append(self.max_timestamp)
        self.end_offset = next_offset
        self.end_position += size
        if max_timestamp is not None and max_timestamp > self.max_timestamp:
            self.max_timestamp = max_timestamp

    def position_before(self, offset: int) -> tuple[int, int] | None:
        """(offset, position) of the last entry at or below the offset."""
        place = bisect_right(self.offsets, offset) - 1
        return None if place < 0 else (self.offsets[place], self.positions[place])

    def offset_before_time(self, timestamp_us: int) -> int | None:
        """Where to begin looking for the first record at or after this time."""
        place = bisect_left(self.times, timestamp_us) - 1
        return None if place < 0 else self.offsets[place]

    def cut_from(self, offset: int, position: int) -> None:
        """Batches from this place on are gone. The max timestamp stays an upper bound."""
        keep = bisect_left(self.offsets, offset)
        del self.offsets[keep:], self.positions[keep:], self.times[keep:]
        self.end_offset = offset
        self.end_position = position

    def save(self, storage: Storage, stem: str, salt: int) -> None:
        for suffix, magic, columns in (
            (".index", _OFFSET_MAGIC, (self.offsets, self.positions)),
            (".timeindex", _TIME_MAGIC, (self.times, self.offsets)),
        ):
            data = _HEAD.pack(magic, salt, self.end_position, self.end_offset, self.max_timestamp, len(self.offsets))
            data += b"".join(column.tobytes() for column in columns)
            data += struct.pack("<Q", xxhash.xxh3_64_intdigest(data))
            name = stem + suffix
            file = storage.open(name, create=not storage.exists(name))
            file.truncate(0)
            file.write(0, [data])

    @classmethod
    def maybe_load(
        cls, storage: Storage, stem: str, salt: int, interval: int, end_offset: int, start: int
    ) -> "SparseIndex | None":
        """The saved index of a segment that ends at this offset, or None: it must be rebuilt."""
        loaded: list[tuple[tuple[int, ...], bytes]] = []
        for suffix, magic in ((".index", _OFFSET_MAGIC), (".timeindex", _TIME_MAGIC)):
            try:
                data = storage.read_file(stem + suffix)
            except FileNotFoundError:
                return None
            if len(data) < _HEAD.size + 8 or struct.unpack("<Q", data[-8:])[0] != xxhash.xxh3_64_intdigest(data[:-8]):
                return None
            head = _HEAD.unpack_from(data)
            columns = data[_HEAD.size : -8]
            if head[:2] != (magic, salt) or head[3] != end_offset or len(columns) != 16 * head[5]:
                return None
            loaded.append((head, columns))
        (head, columns), (time_head, time_columns) = loaded
        if head[2:] != time_head[2:]:
            return None
        half = len(columns) // 2
        index = cls(end_offset, start, interval)
        index.offsets.frombytes(columns[:half])
        index.positions.frombytes(columns[half:])
        index.times.frombytes(time_columns[:half])
        index.end_position, index.max_timestamp = head[2], head[4]
        return index
