"""The commit journal: one file to sync when many segments are dirty. Format and machine over a storage file.

A group commit over more than a few files writes the same bytes here, one entry for each written batch, and syncs
only this file (K4). After a crash the entries are written to their segments again before any log is opened.
When the journal is full, the segments it speaks of are synced and it starts over with a new salt.

    head   | magic "HRjourn1" | salt u64 | hash u64 |                                                 (64 bytes)
    entry  | magic "HRj1" | size u32 | salt u64 | hash u64 | stream id 16 B | partition u32 | zero u32 |
           | segment base u64 | segment salt u64 | position u64 | the batch's bytes |
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple
from uuid import UUID

import xxhash

from headrace.core_log.env import Ids
from headrace.core_log.format import SEGMENT_HEAD_SIZE, maybe_segment_head
from headrace.core_log.segment import Segment, stem_of
from headrace.core_log.storage.contract import File, Storage

if TYPE_CHECKING:
    from headrace.core_log.log import SyncJob

PATH = "journal"
_HEAD_MAGIC = b"HRjourn1"
_HEAD = struct.Struct("<8sQQ")
_HEAD_SIZE = 64
_ENTRY_MAGIC = b"HRj1"
_PREFIX = struct.Struct("<4sIQQ")
_PLACE = struct.Struct("<16sIIQQQ")
_ENTRY_HEAD_SIZE = _PREFIX.size + _PLACE.size
_ZEROS = bytes(1024 * 1024)

# Where a partition's folder is, by stream and partition; None when it is no longer there.
FolderOf = Callable[[UUID, int], str | None]


class CommitJournal:
    """The writer's side. Called from the worker that syncs, never from two threads at once."""

    __slots__ = ("_bytes_max", "_end", "_file", "_ids", "_salt", "_storage", "_unsynced")

    def __init__(self, storage: Storage, ids: Ids, bytes_max: int) -> None:
        self._storage = storage
        self._ids = ids
        self._bytes_max = bytes_max
        self._file: File | None = None
        self._salt = 0
        self._end = _HEAD_SIZE
        # Segments that only the journal keeps safe.
        self._unsynced: dict[str, Segment] = {}

    def commit(self, jobs: "Sequence[SyncJob]") -> None:
        """Make every job's writes safe with one sync."""
        buffers: list[bytes] = []
        size = 0
        salt = self._salt
        for job in jobs:
            stream = job.log.stream_id.bytes
            partition = job.log.partition
            for segment, position, data in job.writes:
                place = _PLACE.pack(stream, partition, 0, segment.base_offset, segment.salt, position)
                body = b"".join((place, *data))
                entry = _PREFIX.size + len(body)
                buffers.append(_PREFIX.pack(_ENTRY_MAGIC, entry, salt, xxhash.xxh3_64_intdigest(body)))
                buffers.append(body)
                size += entry
        if self._file is None or self._end + size > self._bytes_max:
            self._begin(size)
            return self.commit(jobs)
        self._file.write(self._end, buffers)
        self._file.sync()
        self._end += size
        for job in jobs:
            for segment in job.segments:
                self._unsynced[segment.stem] = segment
        return None

    def settle(self) -> None:
        """Sync every segment that leans on the journal; nothing in it is needed afterwards."""
        for segment in self._unsynced.values():
            # A segment that was removed meanwhile needs nothing.
            with suppress(FileNotFoundError):
                segment.file.sync()
        self._unsynced.clear()

    def empty(self) -> None:
        """Settle, and leave nothing in it: a later unclean start must not put old bytes back."""
        self.settle()
        self._file = None
        if self._storage.exists(PATH):
            file = self._storage.open(PATH)
            file.write(0, [bytes(_HEAD_SIZE)])
            file.sync()

    def _begin(self, needed: int) -> None:
        """Start over, with room for at least this many bytes of entries."""
        self.settle()
        # Taken up only when it is ready: a full disk may end this half way.
        self._file = None
        file = self._storage.open(PATH, create=not self._storage.exists(PATH))
        size = file.size()
        self._bytes_max = max(self._bytes_max, _HEAD_SIZE + needed)
        while size < self._bytes_max:
            step = min(len(_ZEROS), self._bytes_max - size)
            file.write(size, [_ZEROS[:step]])
            size += step
        self._salt = self._ids.salt()
        file.write(0, [_encode_head(self._salt)])
        file.sync()
        self._storage.sync_dir("")
        self._file = file
        self._end = _HEAD_SIZE


def _encode_head(salt: int) -> bytes:
    packed = _HEAD.pack(_HEAD_MAGIC, salt, 0)[:-8]
    return (packed + struct.pack("<Q", xxhash.xxh3_64_intdigest(packed))).ljust(_HEAD_SIZE, b"\0")


class Entry(NamedTuple):
    """One batch that was committed here, and where in its segment it belongs."""

    stream_id: UUID
    partition: int
    segment_base: int
    segment_salt: int
    position: int
    data: memoryview


def entries(storage: Storage) -> Iterator[Entry]:
    """What the journal holds, oldest first, up to the first entry that is not whole: it was the last one begun."""
    try:
        data = storage.read_file(PATH)
    except FileNotFoundError:
        return
    if len(data) < _HEAD_SIZE or data[:8] != _HEAD_MAGIC:
        return
    _magic, salt, digest = _HEAD.unpack_from(data)
    if digest != xxhash.xxh3_64_intdigest(data[: _HEAD.size - 8]):
        return
    view = memoryview(data)
    at = _HEAD_SIZE
    while at + _ENTRY_HEAD_SIZE <= len(data):
        magic, size, entry_salt, digest = _PREFIX.unpack_from(data, at)
        if magic != _ENTRY_MAGIC or entry_salt != salt or not _ENTRY_HEAD_SIZE <= size <= len(data) - at:
            return
        if digest != xxhash.xxh3_64_intdigest(view[at + _PREFIX.size : at + size]):
            return
        stream, partition, _zero, base, segment_salt, position = _PLACE.unpack_from(data, at + _PREFIX.size)
        body = view[at + _ENTRY_HEAD_SIZE : at + size]
        yield Entry(UUID(bytes=stream), partition, base, segment_salt, position, body)
        at += size


def replay(storage: Storage, folder_of: FolderOf) -> int:
    """After a crash: put the journal's entries back into their segments and sync those. Returns how many.

    Entries of segments that have been removed or recycled since (another salt) are passed over.
    """
    count = 0
    touched: dict[str, File] = {}
    for entry in entries(storage):
        folder = folder_of(entry.stream_id, entry.partition)
        path = "" if folder is None else stem_of(folder, entry.segment_base) + ".log"
        if path and storage.exists(path):
            file = touched.get(path) or storage.open(path)
            head = maybe_segment_head(file.read(0, SEGMENT_HEAD_SIZE))
            if head is not None and head.salt == entry.segment_salt:
                file.write(entry.position, [entry.data])
                touched[path] = file
                count += 1
    for file in touched.values():
        file.sync()
    return count
