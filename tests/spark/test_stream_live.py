"""Streams of Spark over a broker that AMQP and MQTT clients write to: crashes, and nothing lost or twice."""

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pika
import pytest
from paho.mqtt.client import CallbackAPIVersion
from paho.mqtt.client import Client as MqttClient
from paho.mqtt.enums import MQTTProtocolVersion
from pyspark.errors import StreamingQueryException
from tests.running_broker import RunningBroker, eventually

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    doors = ["--http", "127.0.0.1:0", "--mqtt", "127.0.0.1:0"]
    with RunningBroker(tmp_path_factory.mktemp("broker"), arguments=doors) as broker:
        yield broker
        broker.stop()


@pytest.fixture(scope="module")
def url(broker: RunningBroker) -> str:
    return f"http://127.0.0.1:{broker.ports['http']}"


# Between two messages of a writer: it must not keep the processors that Spark is to read with.
PACE_S = 0.005


class Writers:
    """An AMQP and an MQTT client that publish numbers to one exchange, and remember what was confirmed."""

    def __init__(self, broker: RunningBroker) -> None:
        self.broker = broker
        self.confirmed: list[str] = []
        self._ending = threading.Event()
        self._threads = [threading.Thread(target=self._amqp), threading.Thread(target=self._mqtt)]

    def _amqp(self) -> None:
        connection = pika.BlockingConnection(self.broker.parameters())
        channel = connection.channel()
        channel.confirm_delivery()
        number = 0
        while not self._ending.wait(PACE_S):
            properties = pika.BasicProperties(delivery_mode=2, headers={"x-tags": "amqp"})
            channel.basic_publish("amq.topic", "plant.a", f"a{number}".encode(), properties)
            self.confirmed.append(f"a{number}")
            number += 1
        connection.close()

    def _mqtt(self) -> None:
        client = MqttClient(CallbackAPIVersion.VERSION2, protocol=MQTTProtocolVersion.MQTTv311)
        client.connect("127.0.0.1", self.broker.ports["mqtt"])
        client.loop_start()
        number = 0
        while not self._ending.wait(PACE_S):
            client.publish("plant/m", f"m{number}", qos=1).wait_for_publish(30)
            self.confirmed.append(f"m{number}")
            number += 1
        client.disconnect()
        client.loop_stop()

    @contextmanager
    def writing(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._ending.set()
            for thread in self._threads:
                thread.join()


class Seen:
    """What a query has handed over, batch by batch; the first one may be made to fail."""

    def __init__(self, *, fails: bool = False) -> None:
        self.batches: dict[int, list[str]] = {}
        self.fails = fails

    def __call__(self, rows: "DataFrame", number: int) -> None:
        values = [bytes(row.value).decode() for row in rows.select("value").collect()]
        if self.fails and values:
            raise RuntimeError("the sink is full")
        self.batches[number] = values

    @property
    def values(self) -> list[str]:
        return [value for batch in self.batches.values() for value in batch]


def source(spark: "SparkSession", url: str, **options: str) -> "DataFrame":
    given = {"url": url, "subscribe": "amq.topic", "tokenName": "test"} | options
    return spark.readStream.format("headrace").options(**given).load()


def run_to_end(rows: "DataFrame", checkpoint: Path, seen: Seen) -> None:
    query = rows.writeStream.foreachBatch(seen).option("checkpointLocation", str(checkpoint)).trigger(availableNow=True)
    query.start().awaitTermination()


def start_failing(rows: "DataFrame", checkpoint: Path) -> "StreamingQuery":
    return rows.writeStream.foreachBatch(Seen(fails=True)).option("checkpointLocation", str(checkpoint)).start()


def failed_in_batch_0(query: "StreamingQuery", checkpoint: Path) -> None:
    with pytest.raises(StreamingQueryException, match="the sink is full"):
        query.awaitTermination(60)
    assert (checkpoint / "offsets" / "0").exists()
    assert not (checkpoint / "commits" / "0").exists()


def first_batch(checkpoint: Path) -> tuple[int, int]:
    """Of partition 0 of the only topic: where batch 0 begins and ends, as Spark has logged it."""
    document = json.loads((checkpoint / "offsets" / "0").read_text().splitlines()[-1])
    ((began,), (end,)) = document["began"].values(), document["topics"].values()
    return began["0"], end["0"]


def test_crash_in_batch_0_with_latest_loses_nothing(
    spark: "SparkSession", broker: RunningBroker, url: str, tmp_path: Path
) -> None:
    """Its start was kept, or its end says where it began: it is run again from there, whatever came meanwhile."""
    kept, logged = tmp_path / "kept", tmp_path / "logged"
    writers = Writers(broker)
    with writers.writing():
        eventually(lambda: len(writers.confirmed) > 50)
        started = {
            kept: start_failing(source(spark, url, cursor="crash"), kept),
            logged: start_failing(source(spark, url), logged),
        }
        for checkpoint, query in started.items():
            failed_in_batch_0(query, checkpoint)
        count = len(writers.confirmed)
        eventually(lambda: len(writers.confirmed) > count + 50)
    batch = spark.read.format("headrace").options(url=url, subscribe="amq.topic", tokenName="test", columns="value")
    written = [bytes(row.value).decode() for row in batch.load().collect()]
    assert Counter(written) == Counter(writers.confirmed)
    for checkpoint, options in ((kept, {"cursor": "crash"}), (logged, {})):
        (began, end) = first_batch(checkpoint)
        seen = Seen()
        run_to_end(source(spark, url, **options), checkpoint, seen)
        assert 0 < began < end
        assert seen.batches[0] == written[began:end]
        # From there to the end: no gap, none twice.
        assert seen.values == written[began:]


def test_limits_tags_and_what_is_there_now(
    spark: "SparkSession", broker: RunningBroker, url: str, tmp_path: Path
) -> None:
    connection = broker.connect()
    channel = connection.channel()
    channel.confirm_delivery()
    channel.queue_declare("few", durable=True)
    for number in range(25):
        properties = pika.BasicProperties(delivery_mode=2, headers={"x-tags": "odd" if number % 2 else "even"})
        channel.basic_publish("", "few", str(number).encode(), properties)
    options = {"subscribe": "few", "startingOffsets": "earliest", "maxOffsetsPerTrigger": "10", "kafka.group.id": "few"}
    seen = Seen()
    run_to_end(source(spark, url, tags="odd", **options), tmp_path, seen)
    assert [len(batch) for batch in seen.batches.values()] == [5, 5, 2]
    channel.basic_publish("", "few", b"25", pika.BasicProperties(delivery_mode=2, headers={"x-tags": "odd"}))
    run_to_end(source(spark, url, tags="odd", **options), tmp_path, seen)
    assert seen.values == [str(number) for number in range(1, 26, 2)]
