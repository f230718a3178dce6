"""headrace.read: ranges by offset and by time, columns, tags; Arrow out."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest

import headrace
from headrace.spark.access import DataLoss
from tests.spark.directories import Written

BEGIN = datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)


@pytest.fixture
def written(tmp_path: Path) -> Written:
    made = Written(tmp_path)
    first, second = made.topic("orders", partitions=2)
    made.fill(first, 20, tags=("eu",))
    made.fill(second, 10, tags=("us",))
    return made


def test_whole_topic_is_a_table_partition_by_partition(written: Written) -> None:
    table = headrace.read("orders", path=written.path).read_all()
    assert isinstance(table, pa.Table)
    assert table.column_names == ["key", "value", "topic", "partition", "offset", "timestamp", "timestampType"]
    assert table["offset"].to_pylist() == [*range(200), *range(100)]
    assert set(table["topic"].to_pylist()) == {"orders"}


def test_ranges_are_by_offset_or_by_time(written: Written) -> None:
    def places(**how: object) -> list[tuple[int, int]]:
        table = headrace.read("orders", path=written.path, columns=["partition", "offset"], **how).read_all()
        return list(zip(table["partition"].to_pylist(), table["offset"].to_pylist(), strict=True))

    assert places(start={0: 198, 1: 99}) == [(0, 198), (0, 199), (1, 99)]
    assert places(start=0, end=1) == [(0, 0), (1, 0)]
    late = BEGIN + timedelta(microseconds=190)
    assert places(start=late) == [(0, offset) for offset in range(190, 200)]
    assert places(end=BEGIN + timedelta(microseconds=1)) == [(p, offset) for p in (0, 1) for offset in range(10)]
    assert places(start="latest") == []
    assert places(tags="us") == [(1, offset) for offset in range(100)]


def test_edges_that_are_none_are_refused(written: Written) -> None:
    with pytest.raises(ValueError, match="above the watermark"):
        headrace.read("orders", path=written.path, end=150)
    with pytest.raises(ValueError, match="partition 1"):
        headrace.read("orders", path=written.path, start={0: 1})
    with pytest.raises(ValueError, match="without a zone"):
        headrace.read("orders", path=written.path, start=datetime(2026, 1, 1))
    with pytest.raises(ValueError, match="not 'newest'"):
        headrace.read("orders", path=written.path, start="newest")
    with pytest.raises(ValueError, match="before its start"):
        headrace.read("orders", path=written.path, start=50, end=20)
    (log, _) = next(iter(written.directory.streams.values())).partitions
    log.delete_before(log.segments[1].base_offset)
    written.fill(log, 1)
    with pytest.raises(DataLoss):
        headrace.read("orders", path=written.path, start=0)


def test_module_says_when_it_has_no_such_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'write'"):
        _ = headrace.write
