"""How far behind consumer groups are: records, bytes and seconds. Driver: HTTP for the numbers, Spark for the table.

Seconds behind are the age of the first record that a group has not done with, which is what people feel; records and
bytes say how much work that is. Bytes are those of the log from the batch on in which that record lies. Asked again
and again (`samples`), it is lag over time. Neighbours: spark/tables.py has the view, chart.py draws it.
"""

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from headrace.spark.access import DataLoss, Slice
from headrace.spark.access_http import Door, HttpAccess
from headrace.spark.jobs.inputs import Where
from headrace.spark.tables import parse_view, read_view

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SCHEMA = (
    "time timestamp, group string, vhost string, topic string, partition int, committed long, end_offset long, "
    "lag long, lag_bytes long, seconds_behind double, member_id string"
)


def lag(
    spark: "SparkSession",
    where: Where,
    group: str | None = None,
    *,
    samples: int = 1,
    every_s: float = 5.0,
    sampled: Callable[[int], None] = lambda count: None,
) -> "DataFrame":
    """A row for each group, partition and sample; of one group or of all."""
    rows: list[tuple[Any, ...]] = []
    for number in range(samples):
        if number:
            time.sleep(every_s)
        rows += _sample(where, group)
        sampled(number + 1)
    return spark.createDataFrame(rows, SCHEMA)


def _sample(where: Where, group: str | None) -> Iterator[tuple[Any, ...]]:
    url, token = where["url"], where.get("tokenName")
    door = Door(url, token)
    access = HttpAccess(url, token_name=token)
    now = datetime.now(UTC)
    for batch in read_view(door, parse_view("lag" if group is None else f"lag:{group}")):
        for row in batch.to_pylist():
            topic, partition = row["topic"], row["partition"]
            first = row["first_offset"] if row["committed"] is None else max(row["committed"], row["first_offset"])
            behind: float | None = 0.0
            size: int | None = 0
            if row["lag"]:
                since = _timestamp(door, topic, partition, first)
                behind = None if since is None else max((now - since).total_seconds(), 0.0)
                size = _bytes(access, topic, partition, first, row["end_offset"])
            yield (
                now,
                row["group"],
                row["vhost"],
                topic,
                partition,
                row["committed"],
                row["end_offset"],
                row["lag"],
                size,
                behind,
                row["member_id"],
            )


def _timestamp(door: Door, topic: str, partition: int, offset: int) -> datetime | None:
    path = f"/api/v1/topics/{quote(topic, safe='')}/partitions/{partition}/messages?offset={offset}&limit=1&bytes_max=1"
    found = door.json("GET", path)["messages"]
    return datetime.fromisoformat(found[0]["timestamp"]) if found else None


def _bytes(access: HttpAccess, topic: str, partition: int, start: int, end: int) -> int | None:
    try:
        slices = access.slices(topic, partition, start, end)
    except DataLoss:
        # Retention was faster than this look.
        return None
    return sum(one.end_position - _position(one, start) for one in slices)


def _position(one: Slice, offset: int) -> int:
    """Where the batch begins, as near as the index knows, that has this offset."""
    return max([one.position, *(position for at, position in one.cuts if at <= offset)])
