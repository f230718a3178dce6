"""Segments over HTTP, from a real broker that real clients write to: the same records as in its directory."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paho.mqtt.client as paho
import pika
import pytest
from paho.mqtt.enums import CallbackAPIVersion
from tests.gateways.http.conftest import HttpBroker

import headrace
from headrace.spark import access_http
from headrace.spark.access import BrokerAway, DataLoss, NotAllowed, TopicNotFound, open_access
from headrace.spark.access_http import Door, HttpAccess
from headrace.spark.decode import read
from headrace.spark.plan import plan

PATIENCE_S = 30
COUNT = 300


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpBroker]:
    config = """
[[users]]
name = "stranger"
password = "strange"

[[permissions]]
user = "stranger"
vhost = "/"
configure = ""
write = ""
read = "^public"
"""
    with HttpBroker(tmp_path_factory.mktemp("broker"), config=config) as running:
        yield running


@pytest.fixture(autouse=True)
def tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_TOKEN_READER", "guest:guest")
    monkeypatch.setenv("HEADRACE_TOKEN_STRANGER", "stranger:strange")
    for name in ("HEADRACE_USER", "HEADRACE_PASSWORD", "HEADRACE_TOKENS"):
        monkeypatch.delenv(name, raising=False)


def publish(broker: HttpBroker, topic: str, count: int, *, each: int = 50, size: int = 100) -> None:
    with broker.client() as http:
        http.post("/api/v1/topics", json={"name": topic, "partitions": 2})
        for first in range(0, count, each):
            messages = [{"key": f"{n}", "value": f"{n}." + "x" * size} for n in range(first, min(first + each, count))]
            http.post(f"/api/v1/topics/{topic}/messages", json=messages).raise_for_status()


def rows(broker: HttpBroker, topic: str, **how: Any) -> list[dict[str, Any]]:
    table = headrace.read(topic, url=broker.url, token_name="reader", **how).read_all()
    found: list[dict[str, Any]] = table.to_pylist()
    return found


def test_records_over_http_are_those_that_were_published(broker: HttpBroker) -> None:
    publish(broker, "plain", COUNT)
    found = rows(broker, "plain", columns=["key", "value", "partition", "offset"])
    assert sorted(int(row["key"]) for row in found) == list(range(COUNT))
    for partition in (0, 1):
        offsets = [row["offset"] for row in found if row["partition"] == partition]
        assert offsets == list(range(len(offsets)))


def test_small_ranges_read_the_same(broker: HttpBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(broker, "small", COUNT, each=7)
    whole = rows(broker, "small")
    monkeypatch.setattr("headrace.spark.decode.WINDOW", 700)
    monkeypatch.setattr("headrace.spark.access_http.HttpFile.read_ahead", 0)
    assert rows(broker, "small") == whole
    assert len(whole) == COUNT


def test_local_files_and_http_agree_on_what_amqp_and_mqtt_clients_wrote(broker: HttpBroker) -> None:
    connection = broker.connect()
    channel = connection.channel()
    channel.confirm_delivery()
    channel.queue_declare("work", durable=True)
    channel.queue_bind("work", "amq.topic", "#")
    for number in range(20):
        properties = pika.BasicProperties(
            delivery_mode=2, headers={"n": number, "x-tags": "eu" if number % 2 else "us"}
        )
        channel.basic_publish("amq.topic", f"amqp.{number}", b"%d" % number, properties)
    client = paho.Client(CallbackAPIVersion.VERSION2, client_id="meter", protocol=paho.MQTTv5)
    client.username_pw_set("guest", "guest")
    ready = threading.Event()
    client.on_connect = lambda *_: ready.set()
    client.connect("127.0.0.1", broker.ports["mqtt"])
    client.loop_start()
    assert ready.wait(PATIENCE_S)
    for number in range(20):
        client.publish(f"mqtt/{number}", b"%d" % number, qos=1).wait_for_publish(PATIENCE_S)
    client.disconnect()
    client.loop_stop()
    columns = ["offset", "value", "routing_key", "protocol", "headers", "tags", "amqp", "mqtt"]
    found = rows(broker, "exchange:amq.topic", columns=columns)
    assert [row["value"] for row in found] == [b"%d" % number for number in range(20)] * 2
    assert [row["protocol"] for row in found] == ["amqp"] * 20 + ["mqtt"] * 20
    assert found[3]["tags"] == ["eu"] and {"key": "n", "value": b"3"} in found[3]["headers"]
    assert found[25]["mqtt"]["topic"] == "mqtt/5" and found[25]["routing_key"] == "mqtt.5"
    assert len(rows(broker, "exchange:amq.topic", tags="eu")) == 10
    # The file follows within moments; until then a reader of it sees less, never other things.
    local = open_access(path=str(broker.data)).topic("exchange:amq.topic")
    remote = open_access(url=broker.url, token_name="reader").topic("exchange:amq.topic")
    assert (local.name, local.id) == (remote.name, remote.id)
    broker.stop()
    assert headrace.read("exchange:amq.topic", path=str(broker.data), columns=columns).read_all().to_pylist() == found
    broker.start()


def test_times_lead_to_offsets(broker: HttpBroker) -> None:
    publish(broker, "timed", 10, each=1)
    access = HttpAccess(broker.url, token_name="reader")
    found = [row for row in rows(broker, "timed") if row["partition"] == 0]
    third = found[2]["timestamp"]
    microseconds = round(third.replace(microsecond=0).timestamp()) * 1_000_000 + third.microsecond
    assert access.offset_at("timed", 0, microseconds) == 2
    assert access.offset_at("timed", 0, 0) == 0
    assert access.offset_at("timed", 0, 4_000_000_000_000_000) is None


def test_nothing_above_the_watermark_and_nothing_below_the_start(broker: HttpBroker) -> None:
    publish(broker, "edges", 10)
    access = HttpAccess(broker.url, token_name="reader")
    end = access.topic("edges").partitions[0].high_watermark
    with pytest.raises(ValueError, match="above the watermark"):
        access.slices("edges", 0, 0, end + 1)


def test_reader_that_retention_has_overtaken_hears_so_and_a_lease_keeps_that_from_happening(broker: HttpBroker) -> None:
    door = Door(broker.url, "reader")
    access = HttpAccess(broker.url, token_name="reader")
    for name in ("overtaken", "held"):
        door.json("POST", "/api/v1/topics", body={"name": name, "retention_ms": 1000})
        door.json("POST", f"/api/v1/topics/{name}/messages", body=[{"value": f"{number}"} for number in range(5)])
    door.json("PUT", "/api/v1/topics/held/leases/test", body={"offsets": {"0": 0}})
    (taken,) = plan(access, {("overtaken", 0): (0, 5)})
    (held,) = plan(access, {("held", 0): (0, 5)})
    deadline = time.monotonic() + PATIENCE_S
    while access.topic("overtaken").partitions[0].start == 0:
        assert time.monotonic() < deadline, "retention takes nothing"
        time.sleep(0.1)
    # Files stay while a moved start is made safe, which takes a commit.
    door.json("POST", "/api/v1/topics/overtaken/messages", body={"value": "after"})
    with pytest.raises(DataLoss):
        while time.monotonic() < deadline:
            list(read(taken))
            time.sleep(0.1)
    with pytest.raises(DataLoss, match="begin at 5"):
        access.slices("overtaken", 0, 0, 5)
    assert sum(batch.num_rows for batch in read(held)) == 5


def test_topic_that_was_created_again_is_data_loss(broker: HttpBroker) -> None:
    publish(broker, "again", 10)
    access = HttpAccess(broker.url, token_name="reader")
    info = access.topic("again")
    ranges = {("again", one.partition): (one.start, one.high_watermark) for one in info.partitions}
    tasks = plan(access, ranges)
    with broker.client() as http:
        http.delete("/api/v1/topics/again").raise_for_status()
    publish(broker, "again", 30)
    with pytest.raises(DataLoss):
        [batch for task in tasks for batch in read(task)]
    with pytest.raises(DataLoss, match="created again"):
        plan(access, ranges, ids={"again": info.id})


def test_who_may_not_read_is_refused_and_says_who_by_name_only(
    broker: HttpBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(broker, "private", 10)
    for token in ("stranger", None):
        with pytest.raises(NotAllowed):
            headrace.read("private", url=broker.url, token_name=token)
    with pytest.raises(NotAllowed, match="knows no token 'nobody'"):
        headrace.read("private", url=broker.url, token_name="nobody")
    with pytest.raises(ValueError, match="never the token itself") as refused:
        headrace.read("private", url=broker.url, token_name="guest:guest")
    assert "guest" not in str(refused.value)
    with pytest.raises(ValueError, match="name a token"):
        headrace.read("private", url=broker.url.replace("http://", "http://guest:guest@"))
    (tmp_path / "filed").write_text("guest:guest\n")
    monkeypatch.setenv("HEADRACE_TOKENS", str(tmp_path))
    assert headrace.read("private", url=broker.url, token_name="filed").read_all().num_rows == 10
    # Nothing that travels holds the secret.
    access = HttpAccess(broker.url, token_name="reader")
    assert "guest:guest" not in repr(access.slices("private", 0, 0, 1))


def test_names_that_are_none_are_not_found(broker: HttpBroker) -> None:
    access = HttpAccess(broker.url, token_name="reader")
    for name in ("nothing", "../private", "a/../../etc/passwd"):
        with pytest.raises(TopicNotFound):
            access.topic(name)
    assert "plain" in access.topics()


def test_broker_that_starts_again_meanwhile_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with HttpBroker(tmp_path) as own:
        publish(own, "t", 100)
        reader = headrace.read("t", url=own.url, token_name="reader")
        own.stop()
        monkeypatch.setattr(access_http, "PAUSE_S", 0.25)
        monkeypatch.setattr(access_http, "ATTEMPTS", 10)
        own._arguments = [one.replace("127.0.0.1:0", f"127.0.0.1:{own.ports['http']}") for one in own._arguments[:2]]
        thread = threading.Thread(target=own.start)
        thread.start()
        assert reader.read_all().num_rows == 100
        thread.join()
        own.stop()
        monkeypatch.setattr(access_http, "PAUSE_S", 0.001)
        with pytest.raises(BrokerAway, match="no broker answers"):
            Door(own.url, "reader").get("/api/v1/health")
