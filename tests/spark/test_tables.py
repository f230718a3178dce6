"""Views of a broker as Arrow: each kind of them, over pages, without Spark."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import httpx
import pika
import pytest
from paho.mqtt.client import CallbackAPIVersion
from paho.mqtt.client import Client as MqttClient

from headrace.spark import tables
from headrace.spark.access_http import Door
from headrace.spark.tables import Row, parse_view, read_view
from headrace.testing import EmbeddedBroker


@pytest.fixture(scope="module")
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker() as broker:
        yield broker


@pytest.fixture
def http(broker: EmbeddedBroker) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=broker.http_url(""), auth=("guest", "guest"), timeout=30) as client:
        yield client


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_TOKEN_TEST", "guest:guest")
    # So that there is more than one of them.
    monkeypatch.setattr(tables, "PAGE", 3)


def rows(broker: EmbeddedBroker, view: str) -> list[Row]:
    found = read_view(Door(broker.http_url("").rstrip("/"), "test"), parse_view(view))
    return [row for batch in found for row in batch.to_pylist()]


def test_unsettled_messages_of_a_queue(broker: EmbeddedBroker) -> None:
    with pika.BlockingConnection(pika.URLParameters(broker.amqp_url())) as connection:
        channel = connection.channel()
        channel.queue_declare("orders", durable=True)
        channel.confirm_delivery()
        for number in range(8):
            properties = pika.BasicProperties(headers={"n": number, "x-tags": "eu"})
            channel.basic_publish("", "orders", b"\xff%d" % number, properties)
        channel.basic_get("orders")
        found = rows(broker, "queue:orders")
    assert [row["value"] for row in found] == [b"\xff%d" % number for number in range(8)]
    assert [row["state"] for row in found] == ["unacked", *["ready"] * 7]
    assert found[3]["tags"] == ["eu"]
    assert ("n", "3") in found[3]["headers"]
    assert found[3]["timestamp"].tzinfo is not None


def test_dead_letters_with_origin_reason_and_attempts(broker: EmbeddedBroker) -> None:
    with pika.BlockingConnection(pika.URLParameters(broker.amqp_url())) as connection:
        channel = connection.channel()
        channel.queue_declare("dead", durable=True)
        arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
        channel.queue_declare("work", durable=True, arguments=arguments)
        channel.confirm_delivery()
        for number in range(5):
            channel.basic_publish("", "work", b"%d" % number)
        for method, _, _ in channel.consume("work", inactivity_timeout=30):
            assert method is not None
            channel.basic_reject(method.delivery_tag, requeue=False)
            if method.delivery_tag == 5:
                break
        channel.cancel()
        while len(found := rows(broker, "dead-letters:dead")) < 5:
            connection.process_data_events(0.05)
    assert [row["value"] for row in found] == [b"%d" % number for number in range(5)]
    assert {row["reason"] for row in found} == {"rejected"}
    assert {row["died_in"] for row in found} == {"work"}
    assert all(row["died_at"] is not None for row in found)


def test_pending_delays_and_schedules(broker: EmbeddedBroker, http: httpx.Client) -> None:
    http.post("/api/v1/topics", json={"name": "later"}).raise_for_status()
    due = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=1)
    messages = [
        {"value": str(n), "deliver_at": (due + timedelta(minutes=n)).isoformat(), "schedule_id": f"s{n}"}
        for n in range(7)
    ]
    http.post("/api/v1/topics/later/messages", json=messages).raise_for_status()
    found = rows(broker, "delayed")
    assert [(row["id"], row["deliver_at"], row["value"]) for row in found] == [
        (f"s{n}", due + timedelta(minutes=n), b"%d" % n) for n in range(7)
    ]
    body = {"cron": "0 3 * * *", "message": {"exchange": "amq.topic", "key": "night", "value": "x"}}
    http.put("/api/v1/schedules/nightly", json=body).raise_for_status()
    (row,) = rows(broker, "schedules")
    assert (row["name"], row["cron"], row["key"]) == ("nightly", "0 3 * * *", b"night")
    assert row["next_run"].hour == 3


def test_retained_messages(broker: EmbeddedBroker) -> None:
    mqtt = MqttClient(CallbackAPIVersion.VERSION2)
    mqtt.connect("127.0.0.1", broker.mqtt_port)
    mqtt.loop_start()
    for number in range(5):
        mqtt.publish(f"room/{number}", f"{number}", qos=1, retain=True).wait_for_publish(30)
    mqtt.disconnect()
    mqtt.loop_stop()
    assert [(row["topic"], row["value"]) for row in rows(broker, "retained:room/+")] == [
        (f"room/{n}", b"%d" % n) for n in range(5)
    ]


def test_lag_of_consumer_groups(broker: EmbeddedBroker, http: httpx.Client) -> None:
    http.post("/api/v1/topics", json={"name": "read", "partitions": 2}).raise_for_status()
    http.post("/api/v1/topics/read/messages", json=[{"value": "a", "partition": 0}] * 5).raise_for_status()
    offsets = {"offsets": [{"topic": "read", "partition": 0, "offset": 2}]}
    http.post("/api/v1/consumer-groups/workers/offsets", json=offsets).raise_for_status()
    by_partition = {row["partition"]: row for row in rows(broker, "lag:workers")}
    assert (by_partition[0]["committed"], by_partition[0]["end_offset"], by_partition[0]["lag"]) == (2, 5, 3)
    assert rows(broker, "lag") == rows(broker, "lag:workers")


@pytest.mark.parametrize(
    ("text", "told"),
    [("orders", "there is no view"), ("queue", "say which"), ("schedules:x", "takes no name"), ("queue:", "say which")],
)
def test_view_that_is_none_is_refused(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse_view(text)
