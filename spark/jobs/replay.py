"""Rows back into a topic, each once: from an archive, dead letters, a topic of the past, any DataFrame. Driver.

Through the idempotent sink, under a job's name: what was replayed before is not replayed again, whatever broke in
between. Where a row came from (topic, partition and offset, where it has them) is kept in the headers x-origin-stream,
x-origin-partition and x-origin-offset. With a rate the rows go in portions of a second each, every one of them a job of
its own, so a replay that is taken up again goes on behind the last portion that arrived; for that the rows need an
order, and have to be the same again: topic, partition and offset are it.
Neighbours: sink.py writes; dlq.py and archive.py are where rows often come from.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace.spark.jobs.inputs import Where

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_PLACE = ("topic", "partition", "offset")


def replay(
    rows: "DataFrame",
    where: Where,
    to: str,
    *,
    job_id: str,
    rate: int | None = None,
    dry_run: bool = False,
    sent: Callable[[int, int], None] = lambda portion, portions: None,
) -> "DataFrame":
    """What is replayed (or with `dry_run` would be): topic, partition, messages, first and last offset.

    `rate` is messages a second. `sent` is told of each portion that arrived, and how many there are.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    has_place = all(name in rows.columns for name in _PLACE)
    if rate is not None and not has_place:
        raise ValueError("a rate needs an order: rows with the columns topic, partition and offset")
    if rate is not None and rate < 1:
        raise ValueError("a rate is one message a second or more")
    measures = [F.count("*").alias("messages")]
    if has_place:
        places = [F.min("offset").alias("first_offset"), F.max("offset").alias("last_offset")]
        summary = rows.groupBy("topic", "partition").agg(*measures, *places).orderBy("topic", "partition")
    else:
        summary = rows.agg(*measures)
    if dry_run:
        return summary
    ready = _ready(rows, has_place=has_place)
    if rate is None:
        _write(ready.drop("_place"), where, to, job_id)
        sent(1, 1)
        return summary
    numbered = ready.withColumn("_portion", F.floor((F.row_number().over(Window.orderBy("_place")) - 1) / rate))
    kept = numbered.drop("_place").persist()
    try:
        count = kept.count()
        portions = -(-count // rate)
        for portion in range(portions):
            begun_s = time.monotonic()
            part = kept.where(F.col("_portion") == portion).drop("_portion")
            _write(part, where, to, f"{job_id}-{portion}")
            sent(portion + 1, portions)
            if portion + 1 < portions:
                time.sleep(max(0.0, 1.0 - (time.monotonic() - begun_s)))
    finally:
        kept.unpersist()
    return summary


def _ready(rows: "DataFrame", *, has_place: bool) -> "DataFrame":
    """As the sink takes them, with where they came from among the headers."""
    from pyspark.sql import functions as F
    from pyspark.sql.types import MapType

    columns = [F.col("value")]
    if "key" in rows.columns:
        columns.append(F.col("key"))
    if "tags" in rows.columns:
        columns.append(F.col("tags"))
    origin = F.array()
    if has_place:
        named = {"x-origin-stream": "topic", "x-origin-partition": "partition", "x-origin-offset": "offset"}
        origin = F.array(*(_header(name, F.col(column).cast("string")) for name, column in named.items()))
        columns.append(F.struct(*_PLACE).alias("_place"))
    else:
        columns.append(F.lit(0).alias("_place"))
    if "headers" in rows.columns:
        theirs = F.col("headers")
        if isinstance(rows.schema["headers"].dataType, MapType):
            theirs = F.map_entries(theirs)
        texts = F.transform(F.coalesce(theirs, F.array()), lambda one: _header(one["key"], one["value"].cast("string")))
        kept = F.filter(texts, lambda one: ~one["key"].startswith("x-origin-"))
        headers = F.concat(kept, origin) if has_place else kept
        columns.append(headers.alias("headers"))
    elif has_place:
        columns.append(origin.alias("headers"))
    return rows.select(*columns)


def _header(name: object, value: object) -> object:
    from pyspark.sql import functions as F

    return F.struct(F.lit(name).alias("key") if isinstance(name, str) else name.alias("key"), value.alias("value"))  # type: ignore[attr-defined]


def _write(rows: "DataFrame", where: Where, to: str, job_id: str) -> None:
    given = {name: text for name, text in where.items() if name in ("url", "tokenName")}
    writer = rows.write.format("headrace").options(**given, topic=to, idempotent="true", jobId=job_id)
    writer.mode("append").save()
