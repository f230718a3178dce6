"""The batch source, as a query of Spark meets it: a log that AMQP and MQTT clients have written."""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pika
import pytest
from paho.mqtt.client import CallbackAPIVersion
from paho.mqtt.client import Client as MqttClient
from pyspark.sql.datasource import CaseInsensitiveDict, EqualTo, GreaterThanOrEqual, InputPartition

from headrace.core_log.errors import CorruptLog
from headrace.spark.access import open_access
from headrace.spark.options import InvalidOption
from headrace.spark.source import BatchReader, HeadraceSource, TaskPartition
from headrace.testing import EmbeddedBroker

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

COUNT = 600
VALUES = [f"order {number}".encode() * (number % 7 + 1) for number in range(COUNT)]


@pytest.fixture(scope="module")
def data() -> Iterator[str]:
    """The data directory of a broker that has stopped; `orders` has one record in ten with the tag eu."""
    with EmbeddedBroker() as broker:
        connection = pika.BlockingConnection(pika.URLParameters(broker.amqp_url()))
        channel = connection.channel()
        channel.confirm_delivery()
        channel.queue_declare("orders", durable=True)
        channel.queue_declare("empty", durable=True)
        for number, value in enumerate(VALUES):
            tags = "eu,vip" if number % 10 == 0 else "us" if number % 2 else None
            headers = {"n": str(number)} | ({} if tags is None else {"x-tags": tags})
            channel.basic_publish("", "orders", value, pika.BasicProperties(delivery_mode=2, headers=headers))
        channel.queue_declare("bulk", durable=True)
        for _ in range(40):
            channel.basic_publish("", "bulk", os.urandom(128 * 1024), pika.BasicProperties(delivery_mode=2))
        connection.close()
        mqtt = MqttClient(CallbackAPIVersion.VERSION2)
        mqtt.connect("127.0.0.1", broker.mqtt_port)
        mqtt.loop_start()
        for number in range(20):
            mqtt.publish(f"kitchen/{number % 3}", f"plate {number}", qos=1).wait_for_publish(30)
        mqtt.loop_stop()
        mqtt.disconnect()
        broker.stop()
        yield str(broker.data)


def load(spark: "SparkSession", data: str, **options: str) -> "DataFrame":
    given = {"path": data, "subscribe": "orders"} | options
    return spark.read.format("headrace").options(**{name: text for name, text in given.items() if text}).load()


def reader(data: str, columns: str = "offset", **options: str) -> BatchReader:
    """As Spark would have it, without Spark."""
    given = CaseInsensitiveDict({"path": data, "subscribe": "orders", "columns": columns} | options)
    source = HeadraceSource(given)
    return source.reader(source.schema())


def offsets_of(one: BatchReader) -> list[int]:
    return [offset for part in one.partitions() for batch in one.read(part) for offset in batch["offset"].to_pylist()]


# -- with Spark -----------------------------------------------------------------------------------------------------


def test_schema_is_kafkas_and_found_without_a_register_call(spark: "SparkSession", data: str) -> None:
    assert load(spark, data, includeHeaders="true").schema.simpleString() == (
        "struct<key:binary,value:binary,topic:string,partition:int,offset:bigint,timestamp:timestamp,"
        "timestampType:int,headers:array<struct<key:string,value:binary>>>"
    )


def test_every_confirmed_record_is_read_once_in_all_columns(spark: "SparkSession", data: str) -> None:
    rows = load(spark, data, minPartitions="3").orderBy("offset").collect()
    assert [row.offset for row in rows] == list(range(COUNT))
    assert (
        hashlib.sha256(b"".join(bytes(row.value) for row in rows)).digest() == hashlib.sha256(b"".join(VALUES)).digest()
    )
    assert {(row.topic, row.partition, row.timestampType) for row in rows} == {("queue:orders", 0, 1)}
    assert all(before.timestamp <= after.timestamp for before, after in pairwise(rows))


def test_mqtt_records_are_read_beside_them_and_columns_are_chosen(spark: "SparkSession", data: str) -> None:
    counted = load(spark, data, subscribe="amq.topic", columns="key,tag").groupBy("key").count().collect()
    assert {bytes(row["key"]).decode(): row["count"] for row in counted} == {
        "kitchen.0": 7,
        "kitchen.1": 7,
        "kitchen.2": 6,
    }


def test_tags_choose_records_and_are_a_column(spark: "SparkSession", data: str) -> None:
    rows = load(spark, data, tags="eu && vip", columns="offset,tag,tags").collect()
    assert sorted(row.offset for row in rows) == list(range(0, COUNT, 10))
    assert {(row.tag, tuple(row.tags)) for row in rows} == {("eu", ("eu", "vip"))}


@pytest.mark.parametrize("switch", ["true", "false"])
def test_filters_give_the_same_rows_whether_they_are_pushed_or_not(
    spark: "SparkSession", data: str, switch: str
) -> None:
    spark.conf.set("spark.sql.python.filterPushdown.enabled", switch)
    try:
        for push in ("true", "false"):
            loaded = load(spark, data, columns="offset,tag,partition", pushFilters=push)
            found = loaded.where("offset >= 100 and offset < 200 and tag = 'us' and partition = 0").collect()
            assert sorted(row.offset for row in found) == list(range(101, 200, 2))
    finally:
        spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")


def test_dataframe_that_is_used_twice_has_all_rows_in_both_uses(spark: "SparkSession", data: str) -> None:
    """Spark keeps what was planned for one filter and takes it for the other: so filters are pushed when asked only."""
    loaded = load(spark, data, columns="offset")
    both = loaded.where("offset < 100").union(loaded.where("offset >= 590"))
    assert (both.count(), loaded.count()) == (110, COUNT)


def test_empty_topic_is_a_table_without_rows(spark: "SparkSession", data: str) -> None:
    assert load(spark, data, startingOffsets=f'{{"orders":{{"0":{COUNT}}}}}').count() == 0
    assert load(spark, data, subscribe="", subscribePattern="no.such.topic").count() == 0


def test_unknown_option_is_refused_before_anything_runs(spark: "SparkSession", data: str) -> None:
    with pytest.raises(Exception, match="unknown option 'startingofsets': did you mean 'startingOffsets'"):
        load(spark, data, startingOfsets="earliest")


def test_plan_shows_no_secret_and_a_secret_is_refused(spark: "SparkSession", data: str) -> None:
    shown = load(spark, data, tokenName="nightly")._jdf.queryExecution().toString()
    assert "headrace" in shown
    with pytest.raises(Exception, match="tokenName") as told:
        load(spark, data, password="hunter2")
    assert "hunter2" not in str(told.value)


def test_schema_of_the_user_chooses_columns(spark: "SparkSession", data: str) -> None:
    source = spark.read.format("headrace").option("path", data).option("subscribe", "orders")
    assert source.schema("value binary, offset bigint").load().where("offset = 3").first().value == VALUES[3]
    with pytest.raises(Exception, match="the schema does not fit: offset is bigint, not string"):
        source.schema("offset string").load().count()


def test_workers_run_this_python_though_nobody_had_said_so(spark: "SparkSession") -> None:
    """PYSPARK_PYTHON was not set, and `python3` on PATH is another one."""

    def which(batches: Any) -> Any:
        import sys

        import pyarrow

        for _ in batches:
            yield pyarrow.RecordBatch.from_pydict({"python": [sys.executable]})

    (row,) = spark.range(0, 1, 1, 1).mapInArrow(which, "python string").collect()
    assert row.python == sys.executable


# -- without ---------------------------------------------------------------------------------------------------------


def test_tasks_are_cut_by_bytes_not_by_partition(data: str) -> None:
    one = reader(data, subscribe="bulk", minPartitions="3")
    assert len(one.partitions()) >= 3
    assert offsets_of(one) == list(range(40))
    assert len(reader(data, subscribe="bulk").partitions()) == 1
    assert len(reader(data, maxRecordsPerPartition="100").partitions()) == 6


def test_few_bytes_are_cut_too_when_more_tasks_are_wanted(data: str) -> None:
    one = reader(data, minPartitions="4")
    assert len(one.partitions()) >= 4
    assert offsets_of(one) == list(range(COUNT))


def test_pushed_filters_spare_reading(data: str) -> None:
    one = reader(data, pushFilters="true")
    filters = [GreaterThanOrEqual(("offset",), 590), EqualTo(("tag",), "us")]
    assert list(one.pushFilters(filters)) == filters
    (part,) = one.partitions()
    assert isinstance(part, TaskPartition)
    assert (part.task.start, part.task.end) == (590, 600)
    assert offsets_of(one) == [591, 593, 595, 597, 599]


def test_filters_are_not_pushed_unless_asked(data: str) -> None:
    one = reader(data)
    filters = [GreaterThanOrEqual(("offset",), 590)]
    assert one.pushFilters(filters) == filters
    assert offsets_of(one) == list(range(COUNT))


def test_spark_takes_the_reader_for_one_that_pushes_nothing_while_its_switch_is_off(data: str) -> None:
    """As pyspark's planner asks: with the switch off it refuses readers that have the method."""
    from pyspark.sql.datasource import DataSourceReader

    for push in ("true", "false"):
        method: Any = reader(data, pushFilters=push).pushFilters
        assert method.__func__ is DataSourceReader.pushFilters


def test_time_that_is_pushed_leaves_out_what_is_older(data: str) -> None:
    one = reader(data, columns="offset,timestamp", pushFilters="true")
    times = [time for part in one.partitions() for batch in one.read(part) for time in batch["timestamp"].to_pylist()]
    one.pushFilters([GreaterThanOrEqual(("timestamp",), times[300])])
    (part,) = one.partitions()
    assert isinstance(part, TaskPartition)
    assert part.task.start == times.index(times[300])
    assert offsets_of(one) == list(range(times.index(times[300]), COUNT))


def test_partition_that_spark_makes_of_nothing_reads_nothing(data: str) -> None:
    assert list(reader(data).read(InputPartition(None))) == []


@pytest.mark.parametrize("what", ["torn", "whole"])
def test_what_lies_above_the_watermark_is_not_read(data: str, tmp_path: Path, what: str) -> None:
    """A tail that a crash tore, and a batch that was written and never committed."""
    folder = tmp_path / "data"
    shutil.copytree(data, folder)
    file, start, end = log_file(folder)
    octets = file.read_bytes()
    tail = os.urandom(5000) if what == "torn" else octets[start:end]
    file.write_bytes(octets[:end] + tail + octets[end + len(tail) :])
    assert offsets_of(reader(str(folder))) == list(range(COUNT))


def test_what_is_wrong_below_the_watermark_is_an_error_and_not_an_end(data: str, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    shutil.copytree(data, folder)
    file, start, end = log_file(folder)
    octets = bytearray(file.read_bytes())
    octets[(start + end) // 2] ^= 0xFF
    file.write_bytes(octets)
    for loss in ("true", "false"):
        with pytest.raises(CorruptLog):
            offsets_of(reader(str(folder), columns="offset,value", failOnDataLoss=loss))


def log_file(folder: Path) -> tuple[Path, int, int]:
    """The only segment of `orders`, and where what was committed begins and ends in it."""
    access = open_access(path=str(folder))
    (one,) = access.slices("orders", 0, 0, COUNT)
    id = access.topic("orders").id
    (file,) = (folder / "streams" / str(id)).rglob(f"{0:020}.log")
    return file, one.position, one.end_position


def test_executors_need_neither_trio_nor_the_broker() -> None:
    """Nor pandas: loading it would be half the cost of planning a query."""
    program = (
        "import sys, headrace.spark.source, headrace.spark.stream\n"
        "names = ('trio', 'pandas', 'sqlalchemy', 'headrace.gateways', 'headrace.controller', 'headrace.delay')\n"
        "sys.exit(', '.join(name for name in names if name in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_columns_that_there_are_not_are_refused(data: str) -> None:
    with pytest.raises(InvalidOption, match="there is no colour; there are key, value"):
        reader(data, columns="value,colour")
    with pytest.raises(InvalidOption, match="has one twice"):
        reader(data, columns="value,value")


def test_making_a_reader_asks_nobody() -> None:
    """Spark makes several of each, on the driver and on executors."""
    source = HeadraceSource(CaseInsensitiveDict({"url": "http://127.0.0.1:1", "subscribe": "orders"}))
    source.reader(source.schema())
    source.streamReader(source.schema())
