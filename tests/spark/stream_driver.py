"""A driver of its own that streams a topic into Parquet, for tests that end it with kill -9. Driver: a Spark session.

python stream_driver.py URL TOPIC FOLDER      (FOLDER/checkpoint and FOLDER/out)
"""

import sys
import time

from tests.spark.conftest import SETTINGS

from headrace.spark.session import session
from headrace.spark.stream_start import stream_topic


def main(url: str, topic: str, folder: str) -> None:
    spark = session("headrace-stream", master="local[2]", settings=SETTINGS)
    options = {"tokenName": "test", "maxOffsetsPerTrigger": "50", "startingOffsets": "earliest"}
    rows = stream_topic(spark, topic, url=url, checkpoint=f"{folder}/checkpoint", options=options)
    slow = rows.mapInArrow(_slowly, rows.schema)
    query = (
        slow.writeStream.format("parquet").option("checkpointLocation", f"{folder}/checkpoint").start(f"{folder}/out")
    )
    query.awaitTermination()


def _slowly(batches):  # type: ignore[no-untyped-def]
    """So that there is a middle of a batch."""
    for batch in batches:
        time.sleep(0.2)
        yield batch


if __name__ == "__main__":
    main(*sys.argv[1:])
