"""Tasks: every offset in exactly one of them, about so many bytes each, small enough to travel."""

import pickle
from pathlib import Path
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.spark.access import Access, PartitionEnds, Slice, TopicInfo, open_access
from headrace.spark.plan import plan

from .directories import Written


class Drawn:
    """Segments of one size each, with places to cut at."""

    def __init__(self, segments: list[list[int]]) -> None:
        """For each segment, how many offsets lie between two places to cut at; 100 bytes each."""
        self.slices_: list[Slice] = []
        offset = 0
        for steps in segments:
            base, position = offset, 64
            cuts = []
            for step in steps:
                cuts.append((offset, position))
                offset += step
                position += 100 * step
            self.slices_.append(Slice((), base, 1, 64, position, base, offset, cuts=tuple(cuts[1:]), is_sealed=True))
        self.end = offset

    def topics(self) -> list[str]:
        return ["t"]

    def topic(self, name: str) -> TopicInfo:
        return TopicInfo(name, UUID(int=1), False, (PartitionEnds(0, 0, self.end),))

    def offset_at(self, topic: str, partition: int, timestamp_us: int) -> int | None:
        return None

    def slices(self, topic: str, partition: int, start: int, end: int) -> list[Slice]:
        return [one for one in self.slices_ if one.next_offset > start and one.first_offset < end]


SEGMENTS = st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=8), min_size=1, max_size=5)


@given(SEGMENTS, st.data(), st.integers(1, 5000), st.none() | st.integers(1, 40), st.none() | st.integers(1, 60))
def test_tasks_cover_a_range_once_and_in_order(
    segments: list[list[int]], data: st.DataObject, bytes_each: int, at_least: int | None, records: int | None
) -> None:
    drawn: Access = Drawn(segments)
    end = drawn.topic("t").partitions[0].high_watermark
    start = data.draw(st.integers(0, end))
    stop = data.draw(st.integers(start, end))
    tasks = plan(drawn, {("t", 0): (start, stop)}, bytes_each=bytes_each, min_partitions=at_least, max_records=records)
    at = start
    for task in tasks:
        assert task.start == at < task.end
        at = task.end
        # What it reads holds what it returns.
        assert task.slices[0].first_offset <= task.start and task.end <= task.slices[-1].next_offset
        if records is not None:
            assert task.end - task.start <= records
    assert at == stop


def test_large_partition_becomes_several_tasks_and_small_neighbours_are_joined(tmp_path: Path) -> None:
    written = Written(tmp_path)
    (log,) = written.topic()
    written.fill(log, 60)
    access = open_access(path=written.path)
    assert len(plan(access, {("t", 0): (0, 600)})) == 1
    several = plan(access, {("t", 0): (0, 600)}, min_partitions=3)
    assert len(several) >= 3
    assert max(task.byte_count for task in several) < 2 * min(task.byte_count for task in several[:-1])


def test_task_is_small_and_can_be_pickled(tmp_path: Path) -> None:
    written = Written(tmp_path)
    (log,) = written.topic()
    written.fill(log, 30)
    for task in plan(open_access(path=written.path), {("t", 0): (0, 300)}, bytes_each=1):
        data = pickle.dumps(task)
        assert pickle.loads(data) == task  # noqa: S301 - our own
        assert len(data) < 1000


def test_range_that_ends_before_it_begins_is_an_error_and_no_empty_plan() -> None:
    drawn: Access = Drawn([[10]])
    with pytest.raises(ValueError, match="before its start"):
        plan(drawn, {("t", 0): (5, 4)})
    assert plan(drawn, {("t", 0): (5, 5)}) == []
    with pytest.raises(ValueError, match="at least 1"):
        plan(drawn, {("t", 0): (0, 5)}, bytes_each=0)
