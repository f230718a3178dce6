"""What jobs read: topics of a log and views of a broker, as DataFrames. Driver of pyspark.

`where` is what the options of the source say of the place: {"url": ..., "tokenName": ...}, {"path": ...} and the like.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Where = Mapping[str, str]


def read_log(
    spark: "SparkSession",
    where: Where,
    topics: Sequence[str],
    columns: Sequence[str],
    *,
    since: datetime | None = None,
    until: datetime | None = None,
    **options: str,
) -> "DataFrame":
    """Records of these topics, of this time. A topic in which nothing is as new as `since` has none."""
    given = {**where, "subscribe": ",".join(topics), "columns": ",".join(columns), **options}
    if since is not None:
        given |= {"startingTimestamp": _ms(since), "startingOffsetsByTimestampStrategy": "latest"}
    if until is not None:
        given["endingTimestamp"] = _ms(until)
    return spark.read.format("headrace").options(**given).load()


def read_view(spark: "SparkSession", where: Where, view: str) -> "DataFrame":
    """A view needs the broker."""
    given = {name: text for name, text in where.items() if name in ("url", "tokenName")}
    return spark.read.format("headrace").options(**given, view=view).load()


def _ms(time: datetime) -> str:
    """A time without a zone is UTC."""
    known = time if time.tzinfo is not None else time.replace(tzinfo=UTC)
    return str(int(known.timestamp() * 1000))
