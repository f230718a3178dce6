"""Ranges of offsets as tasks of about equal bytes. Machine: no I/O of its own, it asks an Access once per partition.

A task is a part of one partition: a topic of three large partitions keeps more than three cores busy, and one of a
thousand small ones does not make a thousand tasks of nothing. Tasks are cut where a segment ends or a batch is known to
begin, so no two read the same bytes; offsets decide what a task returns, bytes only where it looks.
Neighbours: access.py knows where the bytes are, decode.py reads a task.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from uuid import UUID

from headrace.spark.access import Access, DataLoss, Slice

# As much as Spark makes of files (spark.sql.files.maxPartitionBytes): each task costs 15 ms of CPU before it reads.
TASK_BYTES = 128 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Task:
    """Offsets start..end-1 of a partition, and where they lie. Small; can be pickled."""

    topic: str
    topic_id: UUID
    partition: int
    start: int
    end: int
    is_compacted: bool
    slices: tuple[Slice, ...]

    @property
    def byte_count(self) -> int:
        return sum(one.byte_count for one in self.slices)


def plan(
    access: Access,
    ranges: Mapping[tuple[str, int], tuple[int, int]],
    *,
    ids: Mapping[str, UUID] | None = None,
    bytes_each: int = TASK_BYTES,
    min_partitions: int | None = None,
    max_records: int | None = None,
) -> list[Task]:
    """Tasks that return exactly these ranges: {(topic, partition): (start, end)}, together and each record once.

    `ids`: what each topic was when the ranges were made; DataLoss if it is another one now. `min_partitions`: at least
    so many tasks, as far as there are places to cut. `max_records`: a task spans no more offsets than that.
    Raises ValueError for a range that ends before it begins: a reader that went back would lose records in silence.
    """
    if (
        bytes_each < 1
        or (min_partitions is not None and min_partitions < 1)
        or (max_records is not None and max_records < 1)
    ):
        raise ValueError("bytes_each, min_partitions and max_records are at least 1")
    parts: list[Task] = []
    known = {name: access.topic(name) for name in sorted({topic for topic, _ in ranges})}
    for (topic, partition), (start, end) in sorted(ranges.items()):
        if end < start:
            raise ValueError(f"the range of partition {partition} of '{topic}' ends at {end}, before its start {start}")
        info = known[topic]
        if ids is not None and topic in ids and ids[topic] != info.id:
            raise DataLoss(f"'{topic}' was deleted and created again: it was {ids[topic]} and is {info.id} now")
        if start == end:
            continue
        slices = tuple(access.slices(topic, partition, start, end))
        parts.append(Task(topic, info.id, partition, start, end, info.is_compacted, slices))
    if min_partitions is not None and parts:
        total = sum(part.byte_count for part in parts)
        bytes_each = min(bytes_each, max(total // min_partitions, 1))
    tasks = [task for part in parts for task in _by_bytes(part, bytes_each)]
    if max_records is not None:
        tasks = [small for task in tasks for small in _by_records(task, max_records)]
    return tasks


def _by_bytes(part: Task, bytes_each: int) -> Iterator[Task]:
    """The pieces between two places to cut, gathered until they are large enough."""
    gathered: list[Slice] = []
    size = 0
    for piece in _pieces(part):
        if gathered and size + piece.byte_count > bytes_each:
            yield _task(part, gathered)
            gathered, size = [], 0
        gathered.append(piece)
        size += piece.byte_count
    if gathered:
        yield _task(part, gathered)


def _pieces(part: Task) -> Iterator[Slice]:
    for one in part.slices:
        places = [cut for cut in one.cuts if one.first_offset < cut[0] < one.next_offset]
        starts = [(one.first_offset, one.position), *places]
        ends = [*places, (one.next_offset, one.end_position)]
        for (offset, position), (next_offset, end_position) in zip(starts, ends, strict=True):
            if next_offset > part.start and offset < part.end:
                yield replace(
                    one,
                    position=position,
                    end_position=end_position,
                    first_offset=offset,
                    next_offset=next_offset,
                    cuts=(),
                )


def _task(part: Task, pieces: Sequence[Slice]) -> Task:
    return replace(
        part,
        start=max(part.start, pieces[0].first_offset),
        end=min(part.end, pieces[-1].next_offset),
        slices=tuple(_joined(pieces)),
    )


def _joined(pieces: Sequence[Slice]) -> Iterator[Slice]:
    """Neighbours in one segment as one piece."""
    before = pieces[0]
    for piece in pieces[1:]:
        if piece.locations == before.locations and piece.position == before.end_position:
            before = replace(before, end_position=piece.end_position, next_offset=piece.next_offset)
        else:
            yield before
            before = piece
    yield before


def _by_records(task: Task, max_records: int) -> Iterator[Task]:
    """Offsets dealt out evenly; neighbours read a batch that lies on their border both."""
    count = -(-(task.end - task.start) // max_records)
    for number in range(count):
        start = task.start + (task.end - task.start) * number // count
        end = task.start + (task.end - task.start) * (number + 1) // count
        slices = [one for one in task.slices if one.next_offset > start and one.first_offset < end]
        yield replace(task, start=start, end=end, slices=tuple(slices))
