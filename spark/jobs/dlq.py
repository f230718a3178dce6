"""Dead letters by what killed them: origin, reason, fingerprint, how often, since when, samples. Driver of pyspark.

The fingerprint is the error that consumers wrote into a header (`x-exception-message`, `x-error`, `error`,
`exception`), with numbers, hexadecimal words and quoted names taken out, so that one mistake is one row. `ids` are what
a redrive takes (docs/retry.md). Neighbours: spark/tables.py has the view; replay.py sends rows to another topic.
"""

from typing import TYPE_CHECKING

from headrace.spark.jobs.inputs import Where, read_view

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ERRORS = ("x-exception-message", "x-error", "error", "exception")
SAMPLES = 3
# A redrive takes so many ids at once.
IDS_MAX = 1000
_VARIABLE = r"""'[^']*'|"[^"]*"|\b0x[0-9a-fA-F]+\b|\b[0-9a-fA-F]{8}(?:-?[0-9a-fA-F]{4,})+\b|\d+"""


def dlq(spark: "SparkSession", where: Where, queue: str) -> "DataFrame":
    """died_in, exchange, reason, fingerprint, messages, attempts, first_seen, last_seen, samples, ids."""
    from pyspark.sql import functions as F

    letters = read_view(spark, where, f"dead-letters:{queue}")
    error = F.coalesce(*(F.col("headers").getItem(name) for name in ERRORS), F.lit(""))
    found = letters.select(
        "died_in",
        F.col("origin.exchange").alias("exchange"),
        "reason",
        F.regexp_replace(error, _VARIABLE, "#").alias("fingerprint"),
        "attempts",
        "died_at",
        "id",
        F.substring(F.decode(F.col("value"), "UTF-8"), 1, 200).alias("value"),
    )
    return (
        found.groupBy("died_in", "exchange", "reason", "fingerprint")
        .agg(
            F.count("*").alias("messages"),
            F.max("attempts").alias("attempts"),
            F.min("died_at").alias("first_seen"),
            F.max("died_at").alias("last_seen"),
            F.slice(F.collect_list("value"), 1, SAMPLES).alias("samples"),
            F.slice(F.collect_list("id"), 1, IDS_MAX).alias("ids"),
        )
        .orderBy(F.desc("messages"))
    )
