"""Claims: Spark reading the log beside Spark reading Parquet with the same rows. Driver: a JVM, files, /proc.

CPU-seconds of the JVM and of its Python workers together, on the same data in the same run; both sides take turns and
the least of the rounds counts, for a JVM gets quicker while it runs. Rows go nowhere (the sink `noop`). Values are half
random, so that lz4 has something to do; each record has its own time within an hour, each run of 50 one of 100 tags.
The same records also lie in small batches, of about 16 KB, as many publishers without load leave them.
What of a query does not grow with the data, its plan and the start of its tasks, is in the figures: so there is much of
it. Some 0.2 CPU-seconds are a quarter of the scan of half a GB, and nothing that reads 1 % of that could be five times
as cheap as it; of 2 GB they are a tenth. A query by a tag that nobody has shows them. SCALE=0.1 makes a tenth of the
data.
"""

import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from bench.claim import Better, Claim, NotRun
from bench.scratch import commit, new_logs, open_directory, scratch_folder
from headrace.core_log.config import LogConfig
from headrace.core_log.log import PartitionLog
from headrace.spark.java import NoJava

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SCALE = float(os.environ.get("SCALE", "1"))
ROUNDS = 3
PARTITIONS = 4
RUN = 50
TAGS = [f"tag{number:02}" for number in range(100)]
HOUR_US = 3600 * 1_000_000
# Bytes of a value -> how many there are, and how many records a batch of the log has: about 256 KB, and about 16 KB.
KINDS = {1000: (2_000_000, 250, 16), 100: (4_000_000, 2_500, 160)}
TICKS = os.sysconf("SC_CLK_TCK")


def fill(folder: Path, size: int, *, small: bool = False) -> int:
    count, large_batch, small_batch = KINDS[size]
    count = int(count * SCALE) // (PARTITIONS * large_batch) * PARTITIONS * large_batch
    batch = small_batch if small else large_batch
    random = Random(size)
    filler = bytes(size // 2)
    directory = open_directory(folder)
    logs = new_logs(directory, PARTITIONS, LogConfig(durability="os", compression="lz4"))
    waiting: dict[PartitionLog, int] = {}
    for number in range(0, count, RUN):
        log = logs[number // large_batch % PARTITIONS]
        values = [random.randbytes(size - len(filler)) + filler for _ in range(RUN)]
        tag = random.choice(TAGS)
        stamps = [HOUR_US * (number + one) // count for one in range(RUN)]
        # Small batches end within a run.
        for first in range(0, RUN, batch):
            part = values[first : first + batch]
            many = len(part)
            log.append_columns(
                [tag.encode()] * many,
                [b""] * many,
                part,
                timestamps=stamps[first : first + batch],
                expiries=[0] * many,
                attributes=[0] * many,
                origins=[0] * many,
                tags=[(tag,)] * many,
            )
            waiting[log] = waiting.get(log, 0) + many
            if waiting[log] >= batch:
                commit(log)
                waiting[log] = 0
    for log in logs:
        commit(log)
        log.note_watermark()
    directory.close_now()
    return count


def spent_s(root: int) -> dict[tuple[int, int], float]:
    """CPU-seconds of a process and of all below it, each by its number and when it began."""
    parents: dict[int, list[int]] = {}
    found: dict[int, tuple[int, float]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents.setdefault(int(fields[1]), []).append(int(entry))
            found[int(entry)] = int(fields[19]), sum(map(int, fields[11:13])) / TICKS
    spent, waiting = {}, [root]
    while waiting:
        one = waiting.pop()
        if one in found:
            began, seconds = found[one]
            spent[one, began] = seconds
        waiting += parents.get(one, [])
    return spent


def least(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """The least CPU-seconds of each; the first round warms up and does not count.

    Counted process by process: Spark ends Python workers that had nothing to do for a minute, and what such a one had
    spent before must not be missing from the query that was running then.
    """
    found: dict[str, float] = {}
    for number in range(ROUNDS + 1):
        for name, call in calls.items():
            before = spent_s(os.getpid())
            call()
            after = spent_s(os.getpid())
            taken = sum(seconds - before.get(process, 0.0) for process, seconds in after.items())
            if number:
                found[name] = min(found.get(name, taken), taken)
    return found


def drained(rows: "DataFrame") -> None:
    rows.write.format("noop").mode("overwrite").save()


def by_tag_and_minute(rows: "DataFrame") -> None:
    from pyspark.sql.functions import date_trunc

    drained(rows.groupBy("tag", date_trunc("minute", "timestamp")).count())


def measured(spark: "SparkSession", folder: Path, size: int) -> tuple[dict[str, float], int]:
    count = fill(folder / "log", size)
    fill(folder / "small", size, small=True)

    def log(where: str = "log", **options: str) -> "DataFrame":
        given = {"path": str(folder / where), "subscribe": "bench"} | options
        return spark.read.format("headrace").options(**given).load()

    columns = "key,value,topic,partition,offset,timestamp,timestampType,tag"
    log(columns=columns).write.option("compression", "lz4").parquet(str(folder / "parquet"))
    table = spark.read.parquet(str(folder / "parquet"))
    assert table.count() == count
    return least(
        {
            "scan": lambda: drained(log()),
            "small scan": lambda: drained(log("small")),
            "parquet scan": lambda: drained(table.drop("tag")),
            "tags": lambda: by_tag_and_minute(log(columns="timestamp,tag")),
            "parquet tags": lambda: by_tag_and_minute(table),
            "one tag": lambda: drained(log(tags=TAGS[7])),
            "no tag": lambda: drained(log(tags="nobody")),
        }
    ), count


def claim() -> list[Claim]:
    from headrace.spark.session import session

    with scratch_folder() as folder:
        settings = {
            "spark.driver.memory": "2g",
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.sql.shuffle.partitions": "2",
            "spark.local.dir": str(folder / "local"),
            "spark.sql.warehouse.dir": str(folder / "warehouse"),
        }
        try:
            spark = session("headrace-bench", master="local[2]", settings=settings)
        except NoJava as error:
            raise NotRun(str(error)) from None
        spark.sparkContext.setLogLevel("ERROR")
        try:
            found = {}
            for size in KINDS:
                for name in ("log", "small"):
                    (folder / str(size) / name).mkdir(parents=True)
                found[size] = measured(spark, folder / str(size), size)
        finally:
            spark.stop()
    claims = []
    for size, most in ((1000, 2.5), (100, 2.2)):
        taken, count = found[size]
        claims.append(_beside(f"full scan, {size} B values", taken, "scan", "parquet scan", most, count))
    for size, (taken, count) in found.items():
        detail = f"{taken['small scan']:.2f} CPU-s, in large ones {taken['scan']:.2f}, {count:,} rows"
        figure = taken["small scan"] / taken["scan"]
        name = f"full scan, {size} B values, batches of 16 KB beside 256 KB"
        claims.append(Claim(name, figure, 1.3, Better.LESS, detail=detail))
    taken, count = found[100]
    claims.append(_beside("count by tag and minute, 100 B values", taken, "tags", "parquet tags", 2.0, count))
    for size, least_ratio in ((1000, 5.0), (100, None)):
        taken, count = found[size]
        detail = f"{taken['one tag']:.2f} CPU-s for 1 % of {count:,} rows, {taken['scan']:.2f} for all"
        figure = taken["scan"] / taken["one tag"]
        claims.append(Claim(f"read of 1 % by tag beside the full scan, {size} B", figure, least_ratio, detail=detail))
        detail = "the plan, the tasks, and a look at each batch's summary"
        name = f"read by a tag that nobody has, {size} B"
        claims.append(Claim(name, taken["no tag"], None, Better.LESS, unit="CPU-s", detail=detail))
    return claims


def _beside(name: str, taken: dict[str, float], ours: str, theirs: str, most: float, count: int) -> Claim:
    detail = f"{taken[ours]:.2f} CPU-s, Parquet {taken[theirs]:.2f}, {count:,} rows"
    return Claim(f"{name}, beside Parquet", taken[ours] / taken[theirs], most, Better.LESS, detail=detail)


if __name__ == "__main__":
    for one in claim():
        print(f"{one.name}: {one.figure:.2f} ({one.verdict.value}; {one.better.value} {one.target}); {one.detail}")
