"""A broker's data directory, read where it lies: beside the running broker, or after it. Driver: files, read only.

It takes no lock and writes nothing. Names come from stream.json, ends from the `watermark` file and from nowhere else:
a file is longer than what is committed in it, and may hold the batches of a segment it was before. So a segment is
known by its head (stream, partition, base offset, salt), which is read again before anything in it is called corrupt:
a file that retention took and the broker uses again is data loss, not corruption. Bytes are read, never mapped: what
was checked cannot change afterwards, and a file that is cut kills nobody.
Neighbours: inspection.py checks what is found here, access.py says what is answered.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from uuid import UUID

import numpy as np

from headrace.core_log.checkpoint import Checkpoint
from headrace.core_log.errors import CorruptLog, StorageError
from headrace.core_log.format import FLAG_GAP, SEGMENT_HEAD_SIZE, SegmentHead, decode_columns, maybe_segment_head
from headrace.core_log.index import NEVER, SparseIndex
from headrace.core_log.inspection import Partition, StreamFound, partition_of, streams
from headrace.core_log.mended import MendedFile, MendedStorage
from headrace.core_log.segment import Segment, stem_of
from headrace.core_log.spec import REMOVED, SPEC, STREAMS, StreamSpec, folder_of
from headrace.core_log.storage.contract import File
from headrace.core_log.storage.readonly import ReadOnlyStorage
from headrace.spark.access import DataLoss, PartitionEnds, Slice, TopicInfo, TopicNotFound, covering

DEFAULT_VHOST = "/"
# What a bare name may mean, in the broker's order.
KINDS = ("topic", "exchange", "queue")
# Places to cut a segment at lie about so far apart.
CUT_BYTES = 1024 * 1024


def is_readable(path: str) -> bool:
    """Whether this machine can read a data directory there."""
    return os.access(os.path.join(path, STREAMS), os.R_OK | os.X_OK)


def public_name(spec: StreamSpec) -> str:
    """The name that leads to a stream whatever else there is, as the broker's own doors have it."""
    named = spec.name if spec.kind == "topic" else f"{spec.kind}:{spec.name}"
    return named if spec.vhost == DEFAULT_VHOST and "|" not in named else f"{spec.vhost}|{named}"


def find_spec(specs: Iterable[StreamSpec], name: str) -> StreamSpec | None:
    """The stream that a public name leads to; of several with one name, the last."""
    vhost, mark, rest = name.partition("|")
    if not mark:
        vhost, rest = DEFAULT_VHOST, name
    kind, mark, bare = rest.partition(":")
    wanted = [(kind, bare)] if mark and kind in KINDS[1:] else [(one, rest) for one in KINDS]
    known = {(spec.kind, spec.name): spec for spec in specs if spec.vhost == vhost}
    return next((known[one] for one in wanted if one in known), None)


class LocalAccess:
    def __init__(self, path: str) -> None:
        """Raises StorageError where there is no data directory."""
        self._path = os.path.abspath(path)
        self._storage = ReadOnlyStorage(Path(path))
        # How far the segments that are being written were walked: the next look goes on there.
        self._walked: dict[tuple[UUID, int], tuple[int, SparseIndex]] = {}

    def topics(self) -> list[str]:
        return sorted(public_name(spec) for spec in self._specs())

    def topic(self, name: str) -> TopicInfo:
        spec = self._spec(name)
        ends = tuple(_ends(self._partition(spec, number)) for number in range(spec.partition_count))
        return TopicInfo(public_name(spec), spec.id, spec.config.cleanup == "compact", ends)

    def offset_at(self, topic: str, partition: int, timestamp_us: int) -> int | None:
        found = self._partition(self._spec(topic), partition)
        ends = _ends(found)
        for one in self._sure_slices(found, ends.start, ends.high_watermark):
            if one.max_timestamp_us is not None and one.max_timestamp_us >= timestamp_us:
                offset = first_since(one, timestamp_us, ends.start)
                if offset is not None:
                    return offset
        return None

    def slices(self, topic: str, partition: int, start: int, end: int) -> list[Slice]:
        found = self._partition(self._spec(topic), partition)
        ends = _ends(found)
        if start < ends.start:
            what = f"offset {start} of partition {partition} of '{topic}' is not there any more"
            raise DataLoss(f"{what}: its records begin at {ends.start}")
        if end > ends.high_watermark:
            raise ValueError(f"offset {end} lies above the watermark {ends.high_watermark}")
        return covering(self._sure_slices(found, start, end), topic, partition, start, end)

    def sealed(self, topic: str, partition: int) -> list[Slice]:
        """Segments that grow no more and lie below the watermark as a whole."""
        found = self._partition(self._spec(topic), partition)
        ends = _ends(found)
        return [one for one in self._slices(found, ends.start, ends.high_watermark) if one.is_sealed]

    def spec_bytes(self, topic: str) -> bytes:
        """What stream.json says, as it stands there."""
        return self._storage.read_file(f"{folder_of(self._spec(topic).id)}/{SPEC}")

    # -- what there is ------------------------------------------------------------------------------------------

    def _specs(self) -> list[StreamSpec]:
        return [spec for spec in map(_known, streams(self._storage)) if spec.kind in KINDS]

    def _spec(self, name: str) -> StreamSpec:
        spec = find_spec(self._specs(), name)
        if spec is None:
            raise TopicNotFound(f"no topic, exchange or queue '{name}' with records in {self._path}")
        return spec

    def _partition(self, spec: StreamSpec, number: int) -> Partition:
        if not 0 <= number < spec.partition_count:
            raise TopicNotFound(f"'{spec.name}' has {spec.partition_count} partitions, and no partition {number}")
        try:
            return partition_of(self._storage, spec, number)
        except FileNotFoundError:
            raise TopicNotFound(f"'{spec.name}' was deleted a moment ago") from None

    def _sure_slices(self, partition: Partition, start: int, end: int) -> list[Slice]:
        try:
            return list(self._slices(partition, start, end))
        except CorruptLog:
            mended = MendedStorage(Path(self._path))
            if isinstance(self._storage, MendedStorage) or not mended.holds(partition.folder):
                raise
            self._storage = mended
            return list(self._slices(partition, start, end))

    def _slices(self, partition: Partition, start: int, end: int) -> Iterator[Slice]:
        checkpoint = partition.checkpoint
        if checkpoint is None:
            return
        for base in partition.bases:
            following = partition.next_base(base)
            if base >= min(end, checkpoint.offset) or (following is not None and following <= start):
                continue
            try:
                one = self._slice(partition, base, checkpoint)
            except FileNotFoundError:
                # Retention was quicker; whoever needs it hears so.
                continue
            if one is not None:
                yield one

    def _slice(self, partition: Partition, base: int, checkpoint: Checkpoint) -> Slice | None:
        spec = partition.spec
        location = LocalSegment(self._path, spec.id, partition.number, base)
        sealed = base < checkpoint.segment_base
        following = partition.next_base(base)
        segment = Segment(self._storage, partition.folder, base, following if sealed and following is not None else 0)
        salt = segment.salt
        if not sealed:
            if base != checkpoint.segment_base or checkpoint.position <= SEGMENT_HEAD_SIZE:
                return None
            index = self._walk(partition, segment, checkpoint)
        else:
            assert following is not None, "a segment below the active one has one behind it"
            # The file of the index says where the segment ends; without one that is found by going there.
            segment.locate(base, spec.config.index_interval_bytes)
            assert segment.index is not None
            index = segment.index
        first = next(segment.headers(), None) if sealed else None
        return Slice(
            locations=(location,),
            base_offset=base,
            salt=salt,
            position=SEGMENT_HEAD_SIZE,
            end_position=index.end_position,
            first_offset=base,
            next_offset=index.end_offset,
            first_timestamp_us=None if first is None or first[1].flags & FLAG_GAP else first[1].first_timestamp,
            max_timestamp_us=None if index.max_timestamp == NEVER else index.max_timestamp,
            is_sealed=sealed,
            cuts=tuple(_cuts(index)),
        )

    def _walk(self, partition: Partition, segment: Segment, checkpoint: Checkpoint) -> SparseIndex:
        """The index of the segment that is being written, up to the watermark."""
        key = partition.spec.id, partition.number
        salt, index = self._walked.get(key, (0, None))
        if index is None or salt != segment.salt or index.end_offset > checkpoint.offset:
            index = SparseIndex(segment.base_offset, SEGMENT_HEAD_SIZE, CUT_BYTES)
        segment.end_offset, segment.end_position = checkpoint.offset, checkpoint.position
        if index.end_offset < checkpoint.offset:
            for _, header in segment.headers(index.end_position):
                index.add(header.next_offset, header.size, None if header.flags & FLAG_GAP else header.max_timestamp)
        if (index.end_offset, index.end_position) != (checkpoint.offset, checkpoint.position):
            what = f"the watermark says that offset {checkpoint.offset} is at byte {checkpoint.position}"
            raise CorruptLog(segment.path, index.end_position, index.end_offset, what)
        self._walked[key] = segment.salt, index
        return index


def _known(found: StreamFound) -> StreamSpec:
    if found.spec is None:
        assert found.problem is not None
        raise StorageError(f"{found.problem.path}: {found.problem.what}")
    return found.spec


def _ends(partition: Partition) -> PartitionEnds:
    """Without a watermark nothing is known to be committed, whatever lies there."""
    checkpoint = partition.checkpoint
    if checkpoint is None:
        return PartitionEnds(partition.number, partition.log_start, partition.log_start)
    return PartitionEnds(partition.number, partition.log_start, max(checkpoint.offset, partition.log_start))


def _cuts(index: SparseIndex) -> Iterator[tuple[int, int]]:
    last = 0
    for offset, position in zip(index.offsets, index.positions, strict=True):
        if position - last >= CUT_BYTES:
            yield offset, position
            last = position


def first_since(one: Slice, timestamp_us: int, start: int) -> int | None:
    """The first record of a slice, not below `start`, that is as new as that."""
    # Planning by offsets does without the decoder, which takes longer to load than to plan.
    from headrace.spark.decode import stored_batches

    for data, position, header in stored_batches(one, start, one.next_offset, since_us=timestamp_us):
        if header.flags & FLAG_GAP:
            continue
        columns = decode_columns(data, position, header, blobs=False)
        for index in np.flatnonzero(columns.timestamps.expand() >= timestamp_us).tolist():
            offset = header.base_offset + index if columns.offsets is None else columns.offsets[index]
            if offset >= start:
                return offset
    return None


# -- a segment ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LocalSegment:
    """A segment's file in a data directory, by what its head says."""

    path: str
    topic_id: UUID
    partition: int
    base_offset: int

    def open(self) -> "LocalFile":
        storage = _storage(self.path)
        folder = folder_of(self.topic_id, self.partition)
        stem = stem_of(folder, self.base_offset)
        for _ in range(2):
            try:
                return LocalFile(self, storage.open(f"{stem}.log"))
            except FileNotFoundError:
                # Retention renames a file, and keeps it a while for those who are about to read it.
                removed = _removed(storage, folder, f"{self.base_offset:020d}.")
            for name in removed:
                try:
                    return LocalFile(self, storage.open(f"{folder}/{name}"))
                except FileNotFoundError:
                    continue
        raise DataLoss(f"{self.path}/{stem}.log is not there any more: retention took it, or its topic was deleted")


class LocalFile:
    __slots__ = ("_file", "_location", "path", "salt")
    read_ahead = 0

    def __init__(self, location: LocalSegment, file: File) -> None:
        self._location = location
        self._file = file
        self.path = f"{location.path}/{file.path}"
        self.salt = self._head().salt

    def read(self, position: int, length: int) -> bytes:
        return self._file.read(position, length)

    def check(self) -> None:
        if self._head().salt != self.salt:
            raise self._gone()

    def _head(self) -> SegmentHead:
        data = self._file.read(0, SEGMENT_HEAD_SIZE)
        head = maybe_segment_head(data)
        mine = self._location
        if head is None:
            raise CorruptLog(self.path, 0, mine.base_offset, "the segment's head is not readable")
        if (head.stream_id, head.partition, head.base_offset) != (
            mine.topic_id.bytes,
            mine.partition,
            mine.base_offset,
        ):
            raise self._gone()
        return head

    def _gone(self) -> DataLoss:
        return DataLoss(f"{self.path} was taken by retention and is another segment's file now")

    def mend(self) -> bool:
        if isinstance(self._file, MendedFile):
            return False
        self._file = MendedStorage(Path(self._location.path)).open(self._file.path)
        return isinstance(self._file, MendedFile)

    def close(self) -> None:
        """The file goes with the last who holds it."""


def _removed(storage: ReadOnlyStorage, folder: str, start: str) -> list[str]:
    try:
        names = storage.list(folder)
    except FileNotFoundError:
        return []
    return [name for name in names if name.startswith(start) and name.endswith(REMOVED)]


@lru_cache(maxsize=16)
def _storage(path: str) -> ReadOnlyStorage:
    return ReadOnlyStorage(Path(path))
