"""An archive of sealed segments as a way to them, alone or behind a broker that no longer has them. Driver: pyarrow.fs.

What the archive has is what its entries say. Behind a broker (or its directory) the archive begins where retention got
to: both hold the same bytes, so a reader goes from one to the other without noticing, and a segment that goes while it
is read is taken from the archive in the middle. Only a topic of the same id counts.
Neighbours: archive.py wrote it and draws the layout, access.py says what is answered.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any
from uuid import UUID

import msgspec

from headrace.core_log.errors import CorruptLog, UnknownFormat
from headrace.core_log.format import SEGMENT_HEAD_SIZE, maybe_segment_head
from headrace.core_log.spec import StreamSpec
from headrace.spark.access import Access, DataLoss, PartitionEnds, Slice, TopicInfo, TopicNotFound, covering
from headrace.spark.access_local import find_spec, first_since, public_name
from headrace.spark.archive import FORMAT, SPEC, STREAMS, Entry, infos, listed, log_path, opened, read_file

READ_AHEAD = 2 * 1024 * 1024


class ArchiveAccess:
    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._files, self._root = opened(uri)

    def topics(self) -> list[str]:
        return sorted({public_name(spec) for spec in self._specs()})

    def topic(self, name: str) -> TopicInfo:
        return self._info(self._spec(name))

    def offset_at(self, topic: str, partition: int, timestamp_us: int) -> int | None:
        spec = self._spec(topic)
        for base, following in listed(self._files, self._root, spec.id, partition):
            one = self._slice(spec.id, partition, base, following)
            if one.max_timestamp_us is not None and one.max_timestamp_us >= timestamp_us:
                offset = first_since(one, timestamp_us, base)
                if offset is not None:
                    return offset
        return None

    def slices(self, topic: str, partition: int, start: int, end: int) -> list[Slice]:
        spec = self._spec(topic)
        return covering(self.slices_of(spec.id, partition, start, end), topic, partition, start, end)

    # -- by id ----------------------------------------------------------------------------------------------------

    def slices_of(self, stream: UUID, partition: int, start: int, end: int) -> list[Slice]:
        """What there is of these offsets, with holes where there is nothing."""
        return [
            self._slice(stream, partition, base, following)
            for base, following in listed(self._files, self._root, stream, partition)
            if following > start and base < end
        ]

    def start_before(self, stream: UUID, partition: int, offset: int) -> int:
        """How far back the archive goes from an offset without a hole; the offset itself if it has nothing there."""
        for base, following in reversed(listed(self._files, self._root, stream, partition)):
            if base < offset <= following:
                offset = base
        return offset

    def has(self, stream: UUID) -> bool:
        return any(spec.id == stream for spec in self._specs())

    # -- inside ---------------------------------------------------------------------------------------------------

    def _specs(self) -> list[StreamSpec]:
        found = []
        for one in infos(self._files, f"{self._root}/{STREAMS}"):
            try:
                data = read_file(self._files, f"{self._root}/{STREAMS}/{one.base_name}/{SPEC}")
                found.append(msgspec.json.decode(data, type=StreamSpec))
            except FileNotFoundError:
                continue
            except (msgspec.DecodeError, ValueError) as error:
                raise UnknownFormat(f"{one.path}/{SPEC}: {error}") from error
        # Of two that had one name, the newer is meant by it.
        return sorted(found, key=lambda spec: spec.created_us)

    def _spec(self, name: str) -> StreamSpec:
        spec = find_spec(self._specs(), name)
        if spec is None:
            raise TopicNotFound(f"no topic, exchange or queue '{name}' in the archive {self._uri}")
        return spec

    def _info(self, spec: StreamSpec) -> TopicInfo:
        ends = []
        for partition in range(spec.partition_count):
            found = listed(self._files, self._root, spec.id, partition)
            start, end = (found[0][0], found[-1][1]) if found else (0, 0)
            ends.append(PartitionEnds(partition, start, end))
        return TopicInfo(public_name(spec), spec.id, spec.config.cleanup == "compact", tuple(ends))

    def _slice(self, stream: UUID, partition: int, base: int, following: int) -> Slice:
        path = f"{self._root}/{STREAMS}/{stream}/{partition}/{base:020d}-{following:020d}.json"
        try:
            entry = msgspec.json.decode(read_file(self._files, path), type=Entry)
        except FileNotFoundError:
            raise DataLoss(f"{path} was taken out of the archive a moment ago") from None
        except (msgspec.DecodeError, ValueError) as error:
            raise UnknownFormat(f"{path}: {error}") from error
        if entry.format != FORMAT:
            raise UnknownFormat(f"{path}: format {entry.format} is not known to this release")
        return Slice(
            locations=(ArchivedSegment(self._uri, stream, partition, base),),
            base_offset=base,
            salt=int(entry.salt, 16),
            position=entry.position,
            end_position=entry.size,
            first_offset=base,
            next_offset=following,
            first_timestamp_us=entry.first_timestamp_us,
            max_timestamp_us=entry.max_timestamp_us,
            is_sealed=True,
            cuts=entry.cuts,
        )


class WithArchive:
    """What is live, and what the archive has of the same topics before and beside it."""

    def __init__(self, live: Access, archived: ArchiveAccess) -> None:
        self._live = live
        self._archived = archived

    def topics(self) -> list[str]:
        return sorted({*self._live.topics(), *self._archived.topics()})

    def topic(self, name: str) -> TopicInfo:
        try:
            info = self._live.topic(name)
        except TopicNotFound:
            return self._archived.topic(name)
        if not self._archived.has(info.id):
            return info
        partitions = tuple(
            replace(ends, start=self._archived.start_before(info.id, ends.partition, ends.start))
            for ends in info.partitions
        )
        return replace(info, partitions=partitions)

    def offset_at(self, topic: str, partition: int, timestamp_us: int) -> int | None:
        try:
            info = self._live.topic(topic)
        except TopicNotFound:
            return self._archived.offset_at(topic, partition, timestamp_us)
        live_start = _start(info, partition)
        first = self._archived.start_before(info.id, partition, live_start)
        for one in self._archived.slices_of(info.id, partition, first, live_start):
            if one.max_timestamp_us is not None and one.max_timestamp_us >= timestamp_us:
                offset = first_since(one, timestamp_us, first)
                if offset is not None and offset < live_start:
                    return offset
        return self._live.offset_at(topic, partition, timestamp_us)

    def slices(self, topic: str, partition: int, start: int, end: int) -> list[Slice]:
        try:
            info = self._live.topic(topic)
        except TopicNotFound:
            return self._archived.slices(topic, partition, start, end)
        try:
            return self._joined(info, topic, partition, start, end)
        except DataLoss:
            # Retention may have come between the two looks; what it took is in the archive then.
            return self._joined(self._live.topic(topic), topic, partition, start, end)

    def _joined(self, info: TopicInfo, topic: str, partition: int, start: int, end: int) -> list[Slice]:
        live_start = _start(info, partition)
        old = self._archived.slices_of(info.id, partition, start, end)
        found = [one for one in old if one.first_offset < live_start]
        live = self._live.slices(topic, partition, max(start, live_start), end) if end > live_start else []
        after = found[-1].next_offset if found else start
        behind = {one.base_offset: one.locations for one in old}
        for one in live:
            if one.next_offset > after:
                # Where the segment goes meanwhile, the archive has it.
                found.append(replace(one, locations=one.locations + behind.get(one.base_offset, ())))
        return covering(found, topic, partition, start, end)


def _start(info: TopicInfo, partition: int) -> int:
    if not 0 <= partition < len(info.partitions):
        raise TopicNotFound(f"'{info.name}' has {len(info.partitions)} partitions, and no partition {partition}")
    return info.partitions[partition].start


# -- a segment ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ArchivedSegment:
    uri: str
    topic_id: UUID
    partition: int
    base_offset: int

    def open(self) -> "ArchivedFile":
        return ArchivedFile(self)


class ArchivedFile:
    __slots__ = ("_file", "path", "salt")
    read_ahead = READ_AHEAD

    def __init__(self, location: ArchivedSegment) -> None:
        files, root = _opened(location.uri)
        self.path = log_path(root, location.topic_id, location.partition, location.base_offset)
        try:
            self._file = files.open_input_file(self.path)
        except FileNotFoundError:
            raise DataLoss(f"{self.path} is not in the archive any more") from None
        head = maybe_segment_head(self.read(0, SEGMENT_HEAD_SIZE))
        mine = (location.topic_id.bytes, location.partition, location.base_offset)
        if head is None or (head.stream_id, head.partition, head.base_offset) != mine:
            raise CorruptLog(self.path, 0, location.base_offset, "the segment's head is not what its entry says")
        self.salt = head.salt

    def read(self, position: int, length: int) -> bytes:
        data: bytes = self._file.read_at(length, position)
        return data

    def check(self) -> None:
        """Nobody writes over it."""

    def mend(self) -> bool:
        """There are no others."""
        return False

    def close(self) -> None:
        self._file.close()


@lru_cache(maxsize=16)
def _opened(uri: str) -> tuple[Any, str]:
    return opened(uri)
