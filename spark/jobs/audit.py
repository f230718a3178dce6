"""Is everything there, once, and as it was written? Gaps, duplicates, checksums; one key's story. Driver of pyspark.

To read a log at all is to check it: a batch whose hash is wrong, or that is not where it should be, ends the job. The
checksum here is of offsets and values, the same in whatever order rows are read, so a log and its archive can be
compared. Offsets without a record are counted as missing; in a compacted topic, and where a broker was killed, they are
lawful. Neighbours: archive.py writes what is compared with.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace.spark.jobs.inputs import Where, read_log

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession


def audit(
    spark: "SparkSession", where: Where, topics: Sequence[str], *, archive: "DataFrame | None" = None
) -> "DataFrame":
    """topic, partition, first, last, messages, missing, duplicates, checksum.

    With `archive` (what archive.py returns) also archived, archive_duplicates, absent (in the log, not there), differs
    (another value there), of what lies within the offsets of both.
    """
    from pyspark.sql import functions as F

    rows = read_log(spark, where, topics, ("topic", "partition", "offset", "value"), failOnDataLoss="false")
    whole = rows.groupBy("topic", "partition").agg(
        F.min("offset").alias("first"),
        F.max("offset").alias("last"),
        F.count("*").alias("messages"),
        (F.max("offset") - F.min("offset") + 1 - F.count_distinct("offset")).alias("missing"),
        (F.count("*") - F.count_distinct("offset")).alias("duplicates"),
        F.hex(F.bit_xor(_mark())).alias("checksum"),
    )
    if archive is None:
        return whole.orderBy("topic", "partition")
    place = ["topic", "partition", "offset"]
    there = archive.where(F.col("topic").isin(list(topics))).groupBy(*place)
    marks = there.agg(F.count("*").alias("_copies"), F.first(_mark()).alias("_archived"))
    edges = marks.groupBy("topic", "partition").agg(F.min("offset").alias("_low"), F.max("offset").alias("_high"))
    ours = rows.select(*place, _mark().alias("_mark"))
    inside = ours.join(edges, ["topic", "partition"]).where("offset BETWEEN _low AND _high")
    compared = inside.join(marks, place, "left").groupBy("topic", "partition")
    found = compared.agg(
        F.count("_archived").alias("archived"),
        F.coalesce(F.sum(F.col("_copies") - 1), F.lit(0)).alias("archive_duplicates"),
        F.count_if(F.col("_archived").isNull()).alias("absent"),
        F.count_if(F.col("_archived") != F.col("_mark")).alias("differs"),
    )
    return whole.join(found, ["topic", "partition"], "left").orderBy("topic", "partition")


def story(spark: "SparkSession", where: Where, topics: Sequence[str], key: bytes | str) -> "DataFrame":
    """Every record with this key, through all of these topics, the oldest first."""
    from pyspark.sql import functions as F

    columns = ("timestamp", "topic", "partition", "offset", "key", "value", "tags", "protocol")
    wanted = key.encode() if isinstance(key, str) else key
    rows = read_log(spark, where, topics, columns, failOnDataLoss="false")
    return rows.where(F.col("key") == F.lit(wanted)).orderBy("timestamp", "topic", "partition", "offset")


def _mark() -> "Column":
    from pyspark.sql import functions as F

    return F.xxhash64("offset", F.coalesce("value", F.lit(b"")))
