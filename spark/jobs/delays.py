"""What is to come, and when: pending delays by day and hour. Driver of pyspark; chart.py draws the calendar."""

from typing import TYPE_CHECKING

from headrace.spark.jobs.inputs import Where, read_view

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def delays(spark: "SparkSession", where: Where, name: str | None = None) -> "DataFrame":
    """date, hour (UTC), kind, vhost, name, messages: of all targets, or of the exchange or queue `name`."""
    from pyspark.sql import functions as F

    parked = read_view(spark, where, "delayed" if name is None else f"delayed:{name}")
    utc = F.to_utc_timestamp("deliver_at", F.current_timezone())
    when = [F.to_date(utc).alias("date"), F.hour(utc).alias("hour")]
    found = parked.groupBy(*when, "kind", "vhost", "name").agg(F.count("*").alias("messages"))
    return found.orderBy("date", "hour", "kind", "vhost", "name")
