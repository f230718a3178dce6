"""A driver of its own that streams one topic into another, exactly once, for tests that end it with kill -9. Driver.

python -m tests.spark.sink_driver URL FOLDER [finish]      (FOLDER/checkpoint; finish: what there is, and end)
"""

import sys
import time

from tests.spark.conftest import SETTINGS

from headrace.spark.session import session


def main(url: str, folder: str, how: str = "") -> None:
    spark = session("headrace-sink", master="local[2]", settings=SETTINGS)
    where = {"url": url, "tokenName": "test"}
    rows = (
        spark.readStream.format("headrace")
        # A broker that was killed left offsets out, which count as read too: no limit when it is to come to an end.
        .options(
            **where, subscribe="source", startingOffsets="earliest", **({} if how else {"maxOffsetsPerTrigger": "60"})
        )
        .load()
        .selectExpr("key", "value")
        .repartition(3)
    )
    slow = rows if how else rows.mapInArrow(_slowly, rows.schema)
    query = slow.writeStream.format("headrace").options(
        **where, topic="target", idempotent="true", checkpointLocation=f"{folder}/checkpoint"
    )
    if how:
        query = query.trigger(availableNow=True)
    query.start().awaitTermination()
    spark.stop()


def _slowly(batches):  # type: ignore[no-untyped-def]
    """So that there is a middle of a batch."""
    for batch in batches:
        time.sleep(0.2)
        yield batch


if __name__ == "__main__":
    main(*sys.argv[1:])
