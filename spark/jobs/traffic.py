"""Who sends how much, when: traffic of topics by tag and minute, by partition, by key, by size; who is silent. Driver.

Only the columns that a report needs are read: counting by tag and minute touches no keys and values of the log.
Neighbours: chart.py draws it.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Literal

from headrace.spark.jobs.inputs import Where, read_log

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Report = Literal["tag", "partition", "key", "size", "silent"]
REPORTS: tuple[Report, ...] = ("tag", "partition", "key", "size", "silent")
_COLUMNS: dict[Report, tuple[str, ...]] = {
    "tag": ("topic", "timestamp", "tags"),
    "partition": ("topic", "partition", "timestamp"),
    "key": ("topic", "key"),
    "size": ("topic", "value"),
    "silent": ("topic", "timestamp", "key"),
}


def traffic(
    spark: "SparkSession",
    where: Where,
    topics: Sequence[str],
    *,
    by: Report = "tag",
    with_bytes: bool = False,
    since: datetime | None = None,
    until: datetime | None = None,
    silent_minutes: int = 60,
) -> "DataFrame":
    """Messages (and with `with_bytes` the bytes of their values) of these topics.

    tag        topic, minute, tag (null: none), messages; a message with two tags counts under both
    partition  topic, partition, messages, share, first, last: hot partitions come first
    key        topic, key, messages, share: the keys that come most often first
    size       topic, bytes_from (a power of two), messages
    silent     topic, key, messages, last: keys not heard of for so many minutes before the newest record of the topic
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    wanted = _COLUMNS[by]
    if with_bytes and "value" not in wanted:
        wanted = (*wanted, "value")
    rows = read_log(spark, where, topics, wanted, since=since, until=until)
    measures = [F.count("*").alias("messages")]
    if with_bytes:
        measures.append(F.sum(F.length("value")).alias("bytes"))
    share = F.round(F.col("messages") / F.sum("messages").over(Window.partitionBy("topic")), 4).alias("share")
    match by:
        case "tag":
            tagged = rows.withColumn("tag", F.explode_outer("tags"))
            minute = F.date_trunc("minute", "timestamp").alias("minute")
            return tagged.groupBy("topic", minute, "tag").agg(*measures).orderBy("topic", "minute", "tag")
        case "partition":
            times = [F.min("timestamp").alias("first"), F.max("timestamp").alias("last")]
            found = rows.groupBy("topic", "partition").agg(*measures, *times)
            return found.select("*", share).orderBy("topic", F.desc("messages"))
        case "key":
            return rows.groupBy("topic", "key").agg(*measures).select("*", share).orderBy("topic", F.desc("messages"))
        case "size":
            size = F.when(F.length("value") == 0, 0).otherwise(
                F.pow(2, F.floor(F.log2(F.greatest(F.length("value"), F.lit(1))))).cast("long")
            )
            return rows.groupBy("topic", size.alias("bytes_from")).agg(*measures).orderBy("topic", "bytes_from")
        case "silent":
            seen = rows.groupBy("topic", "key").agg(*measures, F.max("timestamp").alias("last"))
            newest = F.max("last").over(Window.partitionBy("topic"))
            quiet = F.col("newest") - F.col("last") > F.make_dt_interval(mins=F.lit(silent_minutes))
            return seen.withColumn("newest", newest).where(quiet).drop("newest").orderBy("topic", "last")
