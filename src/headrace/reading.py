"""`headrace.read`: a topic as Arrow, for DuckDB, Polars, pandas or plain Python. Driver: files or HTTP; needs pyarrow.

    headrace.read("orders", path="/var/lib/headrace").read_all()                            # a pyarrow Table
    headrace.read("orders", url="http://broker:15672", columns=["value"], tags="eu && vip")  # batch by batch

What is committed when it is called is what is read; nothing is loaded before it is asked for. Neighbours:
spark/access.py finds the segments, spark/decode.py reads them; docs/reading.md has examples.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import pyarrow as pa

from headrace.spark.access import open_access
from headrace.spark.decode import BATCH_BYTES
from headrace.spark.decode import read as read_task
from headrace.spark.fields import KAFKA_COLUMNS, schema
from headrace.spark.plan import Task, plan

Edge = str | int | datetime | Mapping[int, int]
EARLIEST = "earliest"
LATEST = "latest"


def read(
    topic: str,
    *,
    path: str | None = None,
    url: str | None = None,
    archive: str | None = None,
    access: str = "auto",
    token_name: str | None = None,
    start: Edge = EARLIEST,
    end: Edge = LATEST,
    columns: Sequence[str] = KAFKA_COLUMNS,
    tags: str | None = None,
    check_contiguous: bool = True,
    batch_bytes: int = BATCH_BYTES,
) -> Any:
    """Records of a topic as a pyarrow RecordBatchReader; `read_all()` makes a Table of it.

    `start` and `end` (exclusive) are "earliest", "latest", an offset for each partition ({0: 100, 1: 120}), one offset
    for all, or a time: a datetime with its zone. Raises TopicNotFound, NotAllowed, DataLoss for an offset that is not
    there any more, ValueError for one that lies above what is committed, and what the decoder raises.
    """
    wanted = schema(columns)
    way = open_access(path=path, url=url, archive=archive, access=access, token_name=token_name)
    info = way.topic(topic)
    since_us, until_us = _time_us(start, "start"), _time_us(end, "end")
    ranges = {}
    for ends in info.partitions:
        low = ends.start if since_us is not None else _offset(start, ends.partition, ends.start, ends.high_watermark)
        high = (
            ends.high_watermark
            if until_us is not None
            else _offset(end, ends.partition, ends.start, ends.high_watermark)
        )
        if since_us is not None:
            first = way.offset_at(topic, ends.partition, since_us)
            low = high if first is None else min(first, high)
        ranges[topic, ends.partition] = (low, high)
    tasks = plan(way, ranges, ids={topic: info.id})
    batches = _batches(
        tasks,
        columns=tuple(columns),
        tags=tags,
        check_contiguous=check_contiguous,
        batch_bytes=batch_bytes,
        since_us=since_us,
        until_us=until_us,
    )
    return pa.RecordBatchReader.from_batches(wanted, batches)


def _batches(tasks: Sequence[Task], **options: Any) -> Iterator[pa.RecordBatch]:
    for task in tasks:
        yield from read_task(task, **options)


def _time_us(edge: Edge, name: str) -> int | None:
    if not isinstance(edge, datetime):
        return None
    if edge.tzinfo is None:
        raise ValueError(f"{name} is a time without a zone: {edge}")
    whole = int(edge.replace(microsecond=0).timestamp())
    return whole * 1_000_000 + edge.microsecond


def _offset(edge: Edge, partition: int, first: int, high_watermark: int) -> int:
    match edge:
        case "earliest":
            return first
        case "latest":
            return high_watermark
        case bool() | str() | datetime():
            raise ValueError(f"'earliest', 'latest', an offset, offsets by partition or a time, not {edge!r}")
        case int():
            return edge
        case Mapping():
            if partition not in edge:
                raise ValueError(f"no offset is given for partition {partition}")
            return edge[partition]
