"""A driver killed in the middle of a batch, with its JVM: no gap and none twice afterwards. make spark-cluster.

Not in the suite: it is the start of two JVMs. What is decided by a restart is there (test_stream_live.py).
"""

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from tests.running_broker import RunningBroker, eventually
from tests.spark.test_stream_live import Writers, broker, url

from headrace.spark.stream_start import stream_topic

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["broker", "url"]
ROOT = Path(__file__).parent.parent.parent
KILLS = int(os.environ.get("KILLS", "1"))


def test_driver_killed_in_the_middle_of_a_batch_leaves_no_gap_and_no_duplicate(
    spark: "SparkSession", broker: RunningBroker, url: str, tmp_path: Path
) -> None:
    writers = Writers(broker)
    with writers.writing():
        for _ in range(KILLS):
            run_and_kill(url, tmp_path)
    checkpoint, out = str(tmp_path / "checkpoint"), str(tmp_path / "out")
    options = {"tokenName": "test", "startingOffsets": "earliest"}
    rows = stream_topic(spark, "amq.topic", url=url, checkpoint=checkpoint, options=options)
    query = rows.writeStream.format("parquet").option("checkpointLocation", checkpoint).trigger(availableNow=True)
    query.start(out).awaitTermination()
    written = spark.read.parquet(out).collect()
    assert sorted(row.offset for row in written) == list(range(len(written)))
    assert Counter(bytes(row.value).decode() for row in written) == Counter(writers.confirmed)


def run_and_kill(url: str, folder: Path) -> None:
    before = _last(folder, "offsets")
    with (folder / "log").open("a") as log:
        driver = subprocess.Popen(
            [sys.executable, "-m", "tests.spark.stream_driver", url, "amq.topic", str(folder)],
            cwd=ROOT,
            start_new_session=True,
            stdout=log,
            stderr=log,
        )
        try:
            # In the middle: an end that was logged and not committed.
            eventually(lambda: before + 1 < _last(folder, "offsets") > _last(folder, "commits"), 180)
        finally:
            os.killpg(driver.pid, signal.SIGKILL)
            driver.wait()


def _last(folder: Path, log: str) -> int:
    try:
        return max((int(name) for name in os.listdir(folder / "checkpoint" / log) if name.isdigit()), default=-1)
    except FileNotFoundError:
        return -1
