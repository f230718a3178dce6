"""What spark-submit runs on the cluster of a test: reads a topic, as a batch and as a stream. Driver: a Spark session.

spark-submit --master spark://... --py-files headrace.zip cluster_job.py URL TOPIC FOLDER
"""

import json
import sys
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql.functions import col, count, countDistinct, crc32
from pyspark.sql.functions import sum as total


def where(batches):  # type: ignore[no-untyped-def]
    """Which executor this is, and where it has the package from."""
    import os

    import pyarrow as pa

    import headrace

    for _ in batches:
        pass
    yield pa.RecordBatch.from_pydict({"folder": [os.getcwd()], "package": [headrace.__file__ or ""]})


def main(url: str, topic: str, folder: str) -> None:
    spark = SparkSession.builder.appName("headrace-cluster").getOrCreate()
    options = {"url": url, "subscribe": topic, "tokenName": "test"}
    rows = spark.read.format("headrace").options(minPartitions="4", **options).load()
    found = rows.agg(
        count("*").alias("rows"), countDistinct("offset").alias("offsets"), total(crc32(col("value"))).alias("sum")
    )
    executors = spark.range(0, 8, 1, 8).mapInArrow(where, "folder string, package string").distinct().collect()
    stream = spark.readStream.format("headrace").options(startingOffsets="earliest", **options).load()
    query = stream.writeStream.format("parquet").option("checkpointLocation", f"{folder}/checkpoint")
    query.trigger(availableNow=True).start(f"{folder}/out").awaitTermination()
    answer = {
        **found.first().asDict(),
        "tasks": rows.rdd.getNumPartitions(),
        "executors": [[row.folder, row.package] for row in executors],
        "streamed": spark.read.parquet(f"{folder}/out").count(),
    }
    Path(folder, "answer.json").write_text(json.dumps(answer))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
