"""DataFrames into a broker, and its views as DataFrames, as Spark has them: nothing lost, nothing twice."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from headrace.testing import EmbeddedBroker

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

COUNT = 400


@pytest.fixture(scope="module")
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(doors=("amqp", "http")) as broker:
        yield broker


@pytest.fixture(scope="module")
def url(broker: EmbeddedBroker) -> str:
    return broker.http_url("").rstrip("/")


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, auth=("guest", "guest"), timeout=30) as client:
        yield client


def create(http: httpx.Client, name: str, partitions: int = 2) -> None:
    http.post("/api/v1/topics", json={"name": name, "partitions": partitions}).raise_for_status()


def values(http: httpx.Client, topic: str, partitions: int = 2) -> list[str]:
    found: list[str] = []
    for partition in range(partitions):
        path = f"/api/v1/topics/{topic}/partitions/{partition}/messages"
        page = http.get(path, params={"offset": 0, "limit": 1000}).raise_for_status().json()
        found += [one["value"] for one in page["messages"]]
    return found


def numbers(spark: "SparkSession", count: int = COUNT) -> "DataFrame":
    return spark.range(0, count, 1, 3).selectExpr("cast(id AS string) AS key", "concat('v', id) AS value")


def write(rows: "DataFrame", url: str, topic: str | None, **options: str) -> None:
    writer = rows.write.format("headrace").option("url", url).option("tokenName", "test").mode("append")
    if topic is not None:
        writer = writer.option("topic", topic)
    writer.options(**options).save()


def test_every_column_arrives_and_is_read_back(spark: "SparkSession", http: httpx.Client, url: str) -> None:
    create(http, "a")
    create(http, "b")
    rows = spark.sql(
        "SELECT if(id % 2 = 0, 'a', 'b') AS topic, cast(id AS string) AS key, cast(concat('v', id) AS binary) AS value,"
        " array(concat('t', id % 3)) AS tags, array(named_struct('key', 'n', 'value', cast(cast(id AS string) AS "
        "binary)), named_struct('key', 'octets', 'value', unhex('FF00'))) AS headers, cast(1 AS int) AS partition "
        "FROM range(60)"
    )
    write(rows, url, None)
    back = spark.read.format("headrace").options(url=url, tokenName="test", subscribe="a,b")
    found = back.option("columns", "topic,partition,key,value,headers,tags").load().collect()
    assert sorted((row.topic, int(row.key), bytes(row.value)) for row in found) == sorted(
        ("ab"[n % 2], n, b"v%d" % n) for n in range(60)
    )
    for row in found:
        n = int(row.key)
        assert row.partition == 1
        assert row.tags == [f"t{n % 3}"]
        assert [(one.key, bytes(one.value)) for one in row.headers] == [("n", b"%d" % n), ("octets", b"\xff\0")]


def test_job_that_fails_publishes_nothing_and_repeated_it_publishes_once(
    spark: "SparkSession", http: httpx.Client, url: str
) -> None:
    create(http, "jobs")
    rows = numbers(spark)

    def fail_late(batches: "Iterator[pa.RecordBatch]") -> "Iterator[pa.RecordBatch]":
        for batch in batches:
            yield batch
            if "399" in batch.column("key").to_pylist():
                raise RuntimeError("on purpose")

    with pytest.raises(Exception, match="on purpose"):
        write(rows.mapInArrow(fail_late, rows.schema), url, "jobs", idempotent="true", jobId="nightly")
    assert values(http, "jobs") == []
    for _ in range(2):
        write(rows.repartition(5), url, "jobs", idempotent="true", jobId="nightly")
    assert sorted(values(http, "jobs")) == sorted(f"v{n}" for n in range(COUNT))
    assert http.get("/api/v1/stages").json()["total"] == 0


def test_stream_whose_batch_runs_again_publishes_it_once(
    spark: "SparkSession", http: httpx.Client, url: str, tmp_path: Path
) -> None:
    """As after a driver that died between the commit and Spark's own note of it: with and without `idempotent`."""
    create(http, "source", 1)
    messages = [{"value": f"v{n}", "key": str(n)} for n in range(COUNT)]
    http.post("/api/v1/topics/source/messages", json=messages).raise_for_status()
    for sink, options in (("once", {"idempotent": "true"}), ("least", {})):
        create(http, sink)
        checkpoint = tmp_path / sink
        run(spark, url, sink, checkpoint, options)
        # What the driver did not live to write: the last batch counts as not done, and runs again.
        commits = sorted((int(one.name), one) for one in (checkpoint / "commits").iterdir() if one.name.isdigit())
        assert len(commits) == 2
        for path in (commits[-1][1], commits[-1][1].with_name(f".{commits[-1][1].name}.crc")):
            path.unlink(missing_ok=True)
        run(spark, url, sink, checkpoint, options)
    wanted = sorted(f"v{n}" for n in range(COUNT))
    assert digest(values(http, "once")) == digest(wanted)
    assert len(values(http, "least")) == COUNT + COUNT // 2


def run(spark: "SparkSession", url: str, sink: str, checkpoint: Path, options: dict[str, str]) -> None:
    given = {"url": url, "tokenName": "test"}
    rows = (
        spark.readStream.format("headrace")
        .options(**given, subscribe="source", startingOffsets="earliest", maxOffsetsPerTrigger=str(COUNT // 2))
        .load()
        .selectExpr("key", "value")
        .repartition(2)
    )
    query = (
        rows.writeStream.format("headrace")
        .options(**given, topic=sink, checkpointLocation=str(checkpoint), **options)
        .trigger(availableNow=True)
        .start()
    )
    try:
        assert query.awaitTermination(60)
        assert query.exception() is None
    finally:
        query.stop()


def digest(found: list[str]) -> tuple[int, str]:
    return len(found), hashlib.sha256("\n".join(sorted(found)).encode()).hexdigest()


def test_dataframe_schedules_messages_and_views_are_dataframes(
    spark: "SparkSession", http: httpx.Client, url: str
) -> None:
    create(http, "later")
    rows = spark.sql(
        "SELECT concat('v', id) AS value, timestamp'2030-01-01 00:00:00' + make_interval(0, 0, 0, id) AS deliver_at "
        "FROM range(5)"
    )
    write(rows, url, "later", idempotent="true", jobId="plan")
    assert values(http, "later") == []
    view = spark.read.format("headrace").options(url=url, tokenName="test")
    parked = view.option("view", "delayed").load().selectExpr("day(deliver_at) AS day", "value").collect()
    assert sorted((row.day, bytes(row.value)) for row in parked) == [(n + 1, b"v%d" % n) for n in range(5)]
    assert view.option("view", "lag").load().count() == 0


@pytest.mark.parametrize(
    ("options", "told"),
    [({"idempotnt": "true"}, "did you mean 'idempotent'"), ({"idempotent": "true"}, "needs 'jobId'")],
)
def test_what_cannot_be_written_is_told_before_anything_is(
    spark: "SparkSession", url: str, options: dict[str, Any], told: str
) -> None:
    with pytest.raises(Exception, match=told):
        write(numbers(spark, 1), url, "jobs", **options)
    with pytest.raises(Exception, match="no column vlaue"):
        write(numbers(spark, 1).withColumnRenamed("key", "vlaue"), url, "jobs")
