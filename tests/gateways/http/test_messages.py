"""Messages published and read over HTTP, alone and with AMQP and MQTT clients on the other side."""

import base64
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import paho.mqtt.client as mqtt
import pika
import pytest

from .conftest import PATIENCE_S, HttpBroker
from .test_app import code

CONFIG = """
[[users]]
name = "narrow"
password = "narrowly"

[[permissions]]
user = "narrow"
vhost = "/"
configure = ""
write = "^(writable|amq.topic|exchange)"
read = "^(readable|amq.topic)"

[[topic_permissions]]
user = "narrow"
vhost = "/"
exchange = "amq.topic"
write = "^open"
read = "^open"
"""
TOPICS = "/api/v1/topics"


@pytest.fixture
def narrow(broker: HttpBroker) -> Iterator[httpx.Client]:
    with broker.client(("narrow", "narrowly")) as client:
        yield client


@pytest.fixture
def topic(http: httpx.Client, name: str) -> str:
    assert http.post(TOPICS, json={"name": name}).status_code == 201
    return name


@pytest.fixture
def channel(broker: HttpBroker) -> Iterator[Any]:
    connection = broker.connect()
    yield connection.channel()
    if connection.is_open:
        connection.close()


def publish(http: httpx.Client, topic: str, *messages: dict[str, Any], **params: Any) -> list[dict[str, Any]]:
    answer = http.post(f"{TOPICS}/{topic}/messages", json=list(messages), params=params)
    assert answer.status_code == 200, answer.text
    results: list[dict[str, Any]] = answer.json()["results"]
    return results


def read(http: httpx.Client, topic: str, partition: int = 0, **params: Any) -> dict[str, Any]:
    answer = http.get(f"{TOPICS}/{topic}/partitions/{partition}/messages", params=params)
    assert answer.status_code == 200, answer.text
    page: dict[str, Any] = answer.json()
    return page


def values(page: dict[str, Any]) -> list[str]:
    return [one["value"] for one in page["messages"]]


# -- created topics -------------------------------------------------------------------------------------------------


def test_message_is_read_back_as_it_was_published(http: httpx.Client, topic: str) -> None:
    answer = http.post(
        f"{TOPICS}/{topic}/messages",
        json={
            "key": "k",
            "value": "hällo",
            "headers": {"a": "1", "b": "", "c": {"base64": "/wD+"}},
            "content_type": "text/plain",
            "tags": ["vip", "eu", "vip"],
        },
    )
    assert (answer.status_code, answer.json()) == (200, {"results": [{"partition": 0, "offset": 0}]})
    page = read(http, topic)
    (message,) = page.pop("messages")
    assert page == {
        "topic": topic,
        "partition": 0,
        "offset": 0,
        "next_offset": 1,
        "first_offset": 0,
        "end_offset": 1,
        "gaps": [],
    }
    taken = message.pop("timestamp")
    assert taken.endswith("Z") and taken.startswith("20")
    assert message == {
        "partition": 0,
        "offset": 0,
        "key": "k",
        "value": "hällo",
        "headers": {"a": "1", "b": "", "c": {"base64": "/wD+"}},
        "tags": ["eu", "vip"],
        "properties": {"content_type": "text/plain"},
    }


@pytest.mark.parametrize(
    ("sent", "stored"),
    [
        ({"value": "text"}, b"text"),
        ({"value": "dGV4dA==", "encoding": "base64"}, b"text"),
        ({"value": "/wD+", "encoding": "base64"}, b"\xff\x00\xfe"),
        ({"value": {"a": [1, 2.5, None]}}, b'{"a":[1,2.5,null]}'),
        ({"value": 9007199254740993}, b"9007199254740993"),
        ({"value": "a string", "encoding": "json"}, b'"a string"'),
        ({"value": None}, b"null"),
        ({"value": ""}, b""),
        ({}, b""),
        ({"value": "\x00\x01"}, b"\x00\x01"),
    ],
)
def test_value_may_be_text_base64_or_json(http: httpx.Client, topic: str, sent: dict[str, Any], stored: bytes) -> None:
    body = json.dumps(sent, separators=(",", ":")).encode()
    answer = http.post(f"{TOPICS}/{topic}/messages", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 200, answer.text
    (told,) = read(http, topic)["messages"]
    assert told.get("encoding", "text") == ("base64" if stored == b"\xff\x00\xfe" else "text")
    (message,) = read(http, topic, encoding="base64")["messages"]
    assert base64.b64decode(message["value"]) == stored
    assert message["encoding"] == "base64"


def test_key_may_be_octets_and_decides_the_partition(http: httpx.Client, name: str) -> None:
    http.post(TOPICS, json={"name": name, "partitions": 4})
    keys = [base64.b64encode(bytes([255, number])).decode() for number in range(40)]
    results = publish(http, name, *({"key": key, "key_encoding": "base64", "value": key} for key in keys))
    assert {one["partition"] for one in results} == {0, 1, 2, 3}
    again = publish(http, name, *({"key": key, "key_encoding": "base64"} for key in keys))
    assert [one["partition"] for one in again] == [one["partition"] for one in results]
    for key, result in zip(keys, results, strict=True):
        page = read(http, name, result["partition"], offset=result["offset"], limit=1)
        assert page["messages"][0]["key"] == key
        assert page["messages"][0]["key_encoding"] == "base64"


def test_messages_without_a_key_go_round_a_batch_at_a_time_or_where_they_are_told(
    http: httpx.Client, name: str
) -> None:
    http.post(TOPICS, json={"name": name, "partitions": 3})
    partitions = [{one["partition"] for one in publish(http, name, {}, {}, {})} for _ in range(4)]
    assert partitions == [{0}, {1}, {2}, {0}]
    assert publish(http, name, {"key": "x", "partition": 2})[0]["partition"] == 2
    assert code(http.post(f"{TOPICS}/{name}/messages", json={"partition": 3})) == "not_found"


def test_batch_keeps_its_order_whatever_its_tags(http: httpx.Client, topic: str) -> None:
    results = publish(http, topic, *({"value": str(n), "tags": [f"t{n % 3}"]} for n in range(50)))
    assert [one["offset"] for one in results] == list(range(50))
    assert values(read(http, topic)) == [str(number) for number in range(50)]


def test_nothing_of_a_batch_is_published_when_one_of_it_is_not_lawful(http: httpx.Client, topic: str) -> None:
    answer = http.post(f"{TOPICS}/{topic}/messages", json=[{"value": "a"}, {"value": "!", "encoding": "base64"}])
    assert (answer.status_code, code(answer), answer.json()["index"]) == (422, "invalid", 1)
    assert read(http, topic)["end_offset"] == 0


@pytest.mark.parametrize(
    "message",
    [
        {"value": "x", "encoding": "rot13"},
        {"value": 5, "encoding": "text"},
        {"value": "x", "tags": [""]},
        {"value": "x", "tags": ["a"] * 3 + [str(n) for n in range(70)]},
        {"value": "x", "headers": {"a": 1}},
        {"value": "x", "headers": {"a": {"base64": "!"}}},
        {"value": "x", "headers": {"a": {"base64": "/w==", "b": ""}}},
        {"value": "x", "headers": {"a": {"base64": 1}}},
        {"value": "x", "headers": {"content-type": "a"}},
        {"value": "x", "sequence": 1},
        {"value": "x", "producer_id": "p"},
        {"value": "x", "producer_id": "", "sequence": 1},
        {"value": "x", "producer_id": "p", "sequence": -1},
        {"value": "x", "unknown": 1},
        {"key": "!", "key_encoding": "base64"},
    ],
)
def test_message_that_is_not_lawful_is_refused_with_the_reason(
    http: httpx.Client, topic: str, message: dict[str, Any]
) -> None:
    answer = http.post(f"{TOPICS}/{topic}/messages", json=message)
    assert (answer.status_code, code(answer)) == (422, "invalid")
    assert answer.json()["detail"]
    assert read(http, topic)["end_offset"] == 0


def test_empty_batch_and_one_beyond_the_limit_are_refused(http: httpx.Client, topic: str) -> None:
    assert code(http.post(f"{TOPICS}/{topic}/messages", json=[])) == "invalid"
    assert code(http.post(f"{TOPICS}/{topic}/messages", json=[{}] * 10_001)) == "invalid"
    assert len(publish(http, topic, *[{}] * 10_000)) == 10_000


def test_message_sent_again_under_its_number_is_published_once(http: httpx.Client, topic: str) -> None:
    first = publish(http, topic, *({"producer_id": "p", "sequence": n, "value": str(n)} for n in range(3)))
    assert [one["offset"] for one in first] == [0, 1, 2]
    again = publish(http, topic, *({"producer_id": "p", "sequence": n, "value": str(n)} for n in range(1, 5)))
    assert again == [
        {"partition": 0, "duplicate": True},
        {"partition": 0, "duplicate": True},
        {"partition": 0, "offset": 3},
        {"partition": 0, "offset": 4},
    ]
    assert values(read(http, topic)) == ["0", "1", "2", "3", "4"]


def test_number_below_the_window_is_refused_and_those_before_it_are_published(http: httpx.Client, topic: str) -> None:
    publish(http, topic, {"producer_id": "p", "sequence": 100_000})
    answer = http.post(
        f"{TOPICS}/{topic}/messages",
        json=[{"value": "before"}, {"producer_id": "p", "sequence": 1}, {"value": "behind"}],
    )
    assert (answer.status_code, code(answer), answer.json()["index"]) == (409, "sequence_refused", 1)
    assert values(read(http, topic, offset=1)) == ["before"]


def test_what_was_answered_is_there_after_a_kill(own_broker: HttpBroker) -> None:
    with own_broker.client() as client:
        client.post(TOPICS, json={"name": "t", "partitions": 2})
        results = publish(client, "t", *({"key": str(n), "value": str(n)} for n in range(20)))
        publish(client, "t", {"producer_id": "p", "sequence": 7, "partition": 0})
    own_broker.restart(kill=True)
    with own_broker.client() as client:
        for number, result in enumerate(results):
            page = read(client, "t", result["partition"], offset=result["offset"], limit=1)
            assert values(page) == [str(number)]
        (again,) = publish(client, "t", {"producer_id": "p", "sequence": 7, "partition": 0})
        assert again["duplicate"]


# -- reading --------------------------------------------------------------------------------------------------------


def test_page_after_page_has_every_message_once(http: httpx.Client, topic: str) -> None:
    publish(http, topic, *({"value": str(n)} for n in range(25)))
    found: list[str] = []
    offset = 0
    while True:
        page = read(http, topic, offset=offset, limit=10)
        if not page["messages"]:
            break
        found += values(page)
        offset = page["next_offset"]
    assert found == [str(number) for number in range(25)]


def test_page_is_bounded_in_bytes_but_for_its_first_message(http: httpx.Client, topic: str) -> None:
    publish(http, topic, *({"value": "x" * 1000} for _ in range(10)))
    assert len(read(http, topic, bytes_max=1)["messages"]) == 1
    page = read(http, topic, bytes_max=3500)
    assert (len(page["messages"]), page["next_offset"]) == (3, 3)


def test_offset_that_is_not_there_is_answered_with_what_is(http: httpx.Client, topic: str) -> None:
    publish(http, topic, {"value": "a"}, {"value": "b"})
    beyond = read(http, topic, offset=1000)
    assert (beyond["offset"], beyond["next_offset"], beyond["messages"]) == (2, 2, [])
    assert values(read(http, topic, offset=-1)) == ["b"]
    assert values(read(http, topic, offset=-1000)) == ["a", "b"]


def test_time_is_a_place_too(http: httpx.Client, topic: str) -> None:
    publish(http, topic, {"value": "a"})
    (first,) = read(http, topic)["messages"]
    publish(http, topic, {"value": "b"})
    second = read(http, topic, offset=1)["messages"][0]
    assert values(read(http, topic, timestamp=first["timestamp"])) == ["a", "b"]
    if second["timestamp"] > first["timestamp"]:
        assert values(read(http, topic, timestamp=second["timestamp"])) == ["b"]
    assert values(read(http, topic, timestamp="0")) == ["a", "b"]
    assert read(http, topic, timestamp="2100-01-01T00:00:00+02:00")["messages"] == []


@pytest.mark.parametrize(
    "params",
    [
        {"offset": "x"},
        {"offset": 2**80},
        {"limit": 0},
        {"limit": 10**9},
        {"bytes_max": 0},
        {"wait_ms": -1},
        {"wait_ms": 10**12},
        {"timestamp": "yesterday"},
        {"timestamp": "2026-01-01T00:00:00"},
        {"offset": 1, "timestamp": "0"},
        {"filter": "a &&"},
        {"encoding": "hex"},
        {"nothing": 1},
    ],
)
def test_parameter_that_is_not_lawful_is_refused(http: httpx.Client, topic: str, params: dict[str, Any]) -> None:
    answer = http.get(f"{TOPICS}/{topic}/partitions/0/messages", params=params)
    assert (answer.status_code, code(answer)) == (400, "invalid_parameter")
    assert answer.json()["detail"]


def test_partition_that_is_not_there_is_404_and_one_that_is_no_number_400(http: httpx.Client, topic: str) -> None:
    assert code(http.get(f"{TOPICS}/{topic}/partitions/1/messages")) == "not_found"
    assert code(http.get(f"{TOPICS}/{topic}/partitions/x/messages")) == "invalid_parameter"
    assert code(http.get(f"{TOPICS}/{topic}/partitions/-1/messages")) == "invalid_parameter"


def test_filter_by_tags_gives_what_matches_and_goes_on_behind_the_rest(http: httpx.Client, topic: str) -> None:
    publish(http, topic, *({"value": str(n), "tags": ["even" if n % 2 == 0 else "odd", f"n={n}"]} for n in range(10)))
    assert values(read(http, topic, filter="odd")) == ["1", "3", "5", "7", "9"]
    assert values(read(http, topic, filter="even && n in (2, 3)")) == ["2"]
    page = read(http, topic, filter="nobody")
    assert (page["messages"], page["next_offset"]) == ([], 10)
    page = read(http, topic, filter="odd", limit=2)
    assert values(page) == ["1", "3"]
    assert values(read(http, topic, filter="odd", offset=page["next_offset"])) == ["5", "7", "9"]


def test_long_poll_is_answered_when_something_comes(broker: HttpBroker, http: httpx.Client, topic: str) -> None:
    with ThreadPoolExecutor(1) as pool, broker.client() as other:
        waiting = pool.submit(read, other, topic, wait_ms=PATIENCE_S * 1000, filter="wanted")
        publish(http, topic, {"value": "a", "tags": ["other"]})
        assert not waiting.done()
        publish(http, topic, {"value": "b", "tags": ["wanted"]})
        assert values(waiting.result(PATIENCE_S)) == ["b"]


def test_long_poll_without_anything_is_answered_in_time(http: httpx.Client, topic: str) -> None:
    began = time.monotonic()
    page = read(http, topic, wait_ms=200)
    assert page["messages"] == []
    assert time.monotonic() - began >= 0.2


def test_long_poll_of_a_topic_that_is_deleted_ends(broker: HttpBroker, http: httpx.Client, topic: str) -> None:
    with ThreadPoolExecutor(1) as pool, broker.client() as other:
        path = f"{TOPICS}/{topic}/partitions/0/messages"
        waiting = pool.submit(other.get, path, params={"wait_ms": PATIENCE_S * 1000})
        http.delete(f"{TOPICS}/{topic}")
        assert code(waiting.result(PATIENCE_S)) == "not_found"


def test_stop_ends_long_polls(own_broker: HttpBroker) -> None:
    with own_broker.client() as client, own_broker.client() as other, ThreadPoolExecutor(1) as pool:
        client.post(TOPICS, json={"name": "t"})
        asked = threading.Event()

        def poll() -> dict[str, Any]:
            asked.set()
            return read(other, "t", wait_ms=20_000)

        waiting = pool.submit(poll)
        asked.wait()
        # Nothing tells that a request has come to wait; this is time enough, and too little of it fails.
        client.get("/api/v1/health")
        time.sleep(0.5)
        own_broker.stop()
        assert waiting.result(PATIENCE_S)["messages"] == []


# -- exchanges and queues -------------------------------------------------------------------------------------------


def test_publish_to_an_exchange_reaches_amqp_consumers_with_headers_and_content_type(
    http: httpx.Client, channel: Any, name: str
) -> None:
    channel.exchange_declare(name, "topic", durable=True)
    channel.queue_declare(name, durable=True)
    channel.queue_bind(name, name, "a.*")
    message = {
        "key": "a.b",
        "value": {"n": 1},
        "headers": {
            "text": "t",
            "number": 5,
            "list": [True, None],
            "table": {"x": "y"},
            "octets": {"base64": "/w=="},
        },
        "tags": ["eu", "vip"],
    }
    results = publish(http, f"exchange:{name}", message, {"key": "other", "value": "unrouted"})
    assert results == [{"partition": 0, "offset": 0, "queues": 1}, {"partition": 0, "offset": 1, "queues": 0}]
    method, properties, body = channel.basic_get(name, auto_ack=True)
    assert (method.exchange, method.routing_key, body) == (name, "a.b", b'{"n":1}')
    assert properties.content_type == "application/json"
    assert properties.delivery_mode == 2
    assert properties.headers == {
        "text": "t",
        "number": 5,
        "list": [True, None],
        "table": {"x": "y"},
        "octets": b"\xff",
        "x-tags": "eu,vip",
    }
    page = read(http, name)
    told = page["messages"][0]
    assert (told["key"], told["value"], told["protocol"], told["tags"]) == ("a.b", '{"n":1}', "amqp", ["eu", "vip"])
    assert told["properties"] == {"content_type": "application/json", "delivery_mode": 2}
    assert told["headers"]["table"] == {"x": "y"}
    assert told["headers"]["octets"] == {"base64": "/w=="}


def test_publish_to_a_queue_goes_to_it_and_to_its_own_stream(http: httpx.Client, channel: Any, name: str) -> None:
    channel.queue_declare(name, durable=True)
    assert publish(http, name, {"value": "one"}, {"value": "two", "key": "ignored"}) == [
        {"partition": 0, "offset": 0, "queues": 1},
        {"partition": 0, "offset": 1, "queues": 1},
    ]
    assert [channel.basic_get(name, auto_ack=True)[2] for _ in range(2)] == [b"one", b"two"]
    assert values(read(http, f"queue:{name}")) == ["one", "two"]


def test_publish_by_headers_and_copies_is_routed_as_amqp_would(http: httpx.Client, channel: Any, name: str) -> None:
    channel.exchange_declare(name, "headers")
    channel.queue_declare(name)
    channel.queue_bind(name, name, "", {"x-match": "all", "color": "red"})
    results = publish(http, name, {"headers": {"color": "red"}}, {"headers": {"color": "blue"}})
    assert [one["queues"] for one in results] == [1, 0]
    channel.exchange_declare(f"{name}-direct", "direct")
    channel.queue_bind(name, f"{name}-direct", "copy")
    assert publish(http, f"{name}-direct", {"key": "x", "headers": {"CC": ["copy"]}})[0]["queues"] == 1


@pytest.mark.parametrize("header", ["x-delay", "x-tags", "BCC", "x-producer-id"])
def test_header_that_has_a_field_is_refused_rather_than_passed_over(http: httpx.Client, header: str) -> None:
    answer = http.post(f"{TOPICS}/amq.topic/messages", json={"key": "a", "headers": {header: "1"}})
    assert (answer.status_code, code(answer)) == (422, "invalid")


def test_queue_that_is_full_refuses_and_says_which_message(http: httpx.Client, channel: Any, name: str) -> None:
    channel.queue_declare(name, arguments={"x-max-length": 2, "x-overflow": "reject-publish"})
    answer = http.post(f"{TOPICS}/queue:{name}/messages", json=[{"value": str(n)} for n in range(4)])
    assert (answer.status_code, code(answer), answer.json()["index"]) == (429, "queue_full", 2)
    assert channel.queue_declare(name, passive=True).method.message_count == 2


def test_message_sent_again_to_an_exchange_is_published_once(http: httpx.Client, channel: Any, name: str) -> None:
    channel.queue_declare(name, durable=True)
    for duplicate in (False, True):
        (result,) = publish(http, name, {"value": "x", "producer_id": "p", "sequence": 1})
        assert result.get("duplicate", False) is duplicate
    assert channel.queue_declare(name, passive=True).method.message_count == 1


def test_internal_exchange_takes_nothing(http: httpx.Client, channel: Any, name: str) -> None:
    channel.exchange_declare(name, "fanout", internal=True)
    assert code(http.post(f"{TOPICS}/{name}/messages", json={})) == "forbidden"


def test_amqp_message_is_read_with_its_properties_in_plain_words(http: httpx.Client, channel: Any, name: str) -> None:
    channel.exchange_declare(name, "fanout", durable=True)
    channel.confirm_delivery()
    properties = pika.BasicProperties(
        content_type="text/plain",
        headers={"a": 1, "b": b"\xff", "c": {"d": "e"}},
        correlation_id="c",
        expiration="60000",
        priority=3,
        delivery_mode=2,
        type="t",
    )
    channel.basic_publish(name, "key", b"\xfe\xff", properties)
    (message,) = read(http, name)["messages"]
    assert (message["value"], message["encoding"]) == ("/v8=", "base64")
    assert message["headers"] == {"a": 1, "b": {"base64": "/w=="}, "c": {"d": "e"}}
    assert message["properties"] == {
        "content_type": "text/plain",
        "correlation_id": "c",
        "expiration": "60000",
        "priority": 3,
        "delivery_mode": 2,
        "type": "t",
    }
    assert message["expires_at"] > message["timestamp"]


def test_mqtt_message_is_read_with_its_user_properties_and_mqtt_clients_get_what_http_publishes(
    broker: HttpBroker, http: httpx.Client, name: str
) -> None:
    client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2, protocol=mqtt.MQTTv5)
    got: list[Any] = []
    came, subscribed = threading.Event(), threading.Event()

    def on_message(_client: Any, _data: Any, message: Any) -> None:
        got.append(message)
        came.set()

    client.on_message = on_message
    client.on_subscribe = lambda *_: subscribed.set()
    client.connect("127.0.0.1", broker.ports["mqtt"])
    client.loop_start()
    try:
        client.subscribe(f"{name}/in", 1)
        assert subscribed.wait(PATIENCE_S)
        publish(http, "amq.topic", {"key": f"{name}.in", "value": "from http", "headers": {"h": "v"}})
        assert came.wait(PATIENCE_S)
        assert (got[0].topic, got[0].payload) == (f"{name}/in", b"from http")
        assert ("h", "v") in got[0].properties.UserProperty
        properties = mqtt.Properties(mqtt.PacketTypes.PUBLISH)
        properties.UserProperty = [("a", "1"), ("a", "2"), ("b", "3")]
        properties.ContentType = "text/plain"
        client.publish(f"{name}/out", b"from mqtt", qos=1, properties=properties).wait_for_publish(PATIENCE_S)
    finally:
        client.disconnect()
        client.loop_stop()
    messages = read(http, "amq.topic", offset=-50)["messages"]
    (message,) = [one for one in messages if one["key"] == f"{name}.out"]
    assert (message["value"], message["protocol"]) == ("from mqtt", "mqtt")
    assert message["headers"] == {"a": ["1", "2"], "b": "3"}
    assert message["properties"] == {
        "topic": f"{name}/out",
        "qos": 1,
        "retain": False,
        "content_type": "text/plain",
    }


# -- later --------------------------------------------------------------------------------------------------------


def test_delayed_message_of_a_topic_comes_when_it_is_due_and_not_before(http: httpx.Client, name: str) -> None:
    http.post(TOPICS, json={"name": name, "partitions": 2})
    message = {"key": "k", "value": "later", "headers": {"a": "b"}, "tags": ["eu"], "delay_ms": 400}
    (result,) = publish(http, name, message)
    assert set(result) == {"schedule_id", "deliver_at"}
    (at_once,) = publish(http, name, {"key": "k", "value": "now"})
    partition = at_once["partition"]
    assert values(read(http, name, partition)) == ["now"]
    page = read(http, name, partition, offset=1, wait_ms=PATIENCE_S * 1000)
    (came,) = page["messages"]
    assert (came["value"], came["headers"], came["tags"]) == ("later", {"a": "b"}, ["eu"])
    assert came["timestamp"] >= result["deliver_at"]


def test_delayed_message_of_an_exchange_is_routed_when_it_is_due(http: httpx.Client, channel: Any, name: str) -> None:
    channel.exchange_declare(name, "fanout", durable=True)
    (result,) = publish(
        http, name, {"value": "later", "headers": {"a": 1}, "delay_ms": 300, "schedule_id": f"my-{name}"}
    )
    assert result["schedule_id"] == f"my-{name}"
    channel.queue_declare(name, durable=True)
    channel.queue_bind(name, name)
    for method, properties, body in channel.consume(name, auto_ack=True, inactivity_timeout=PATIENCE_S):
        assert (method.exchange, body, properties.headers["a"]) == (name, b"later", 1)
        break
    channel.cancel()


def test_time_that_has_passed_means_now(http: httpx.Client, topic: str) -> None:
    results = publish(http, topic, {"deliver_at": 1000}, {"deliver_at": "2020-01-01T00:00:00Z"}, {"delay_ms": 0})
    assert [one["offset"] for one in results] == [0, 1, 2]


@pytest.mark.parametrize(
    "message",
    [
        {"deliver_at": "soon"},
        {"deliver_at": "2100-01-01T00:00:00"},
        {"deliver_at": "2100-01-01T00:00:00Z"},
        {"delay_ms": 11 * 366 * 86_400_000},
        {"delay_ms": -1},
        {"delay_ms": 1000, "deliver_at": "2030-01-01T00:00:00Z"},
        {"delay_ms": 1000, "partition": 0},
        {"delay_ms": 1000, "schedule_id": ""},
        {"schedule_id": "without a time"},
    ],
)
def test_time_that_makes_no_sense_or_is_too_far_away_is_refused(
    http: httpx.Client, topic: str, message: dict[str, Any]
) -> None:
    answer = http.post(f"{TOPICS}/{topic}/messages", json=message)
    assert (answer.status_code, code(answer)) == (422, "invalid")
    assert "x-" not in answer.json()["detail"]


def test_delayed_message_outlives_a_kill_and_comes_once(own_broker: HttpBroker) -> None:
    with own_broker.client() as client:
        client.post(TOPICS, json={"name": "t"})
        numbered = {"value": "later", "delay_ms": 1500, "producer_id": "p", "sequence": 1}
        publish(client, "t", numbered)
        assert publish(client, "t", numbered) == [{"duplicate": True}]
    own_broker.restart(kill=True)
    with own_broker.client() as client:
        first = read(client, "t", wait_ms=PATIENCE_S * 1000)["first_offset"]
        assert values(read(client, "t", offset=first)) == ["later"]


# -- rights and alarms ----------------------------------------------------------------------------------------------


def test_publishing_and_reading_need_their_rights(
    http: httpx.Client, narrow: httpx.Client, channel: Any, name: str
) -> None:
    for topic in (f"writable-{name}", f"readable-{name}"):
        http.post(TOPICS, json={"name": topic})
    channel.queue_declare(f"writable-q-{name}")
    publish(narrow, f"writable-{name}", {})
    assert read(narrow, f"readable-{name}")["messages"] == []
    for refused in (
        narrow.post(f"{TOPICS}/readable-{name}/messages", json={}),
        narrow.get(f"{TOPICS}/writable-{name}/partitions/0/messages"),
        narrow.post(f"{TOPICS}/nothing-{name}/messages", json={}),
        # A queue is published to through the default exchange.
        narrow.post(f"{TOPICS}/queue:writable-q-{name}/messages", json={}),
    ):
        assert code(refused) == "forbidden"
    assert code(narrow.post(f"{TOPICS}/writable-nothing/messages", json={})) == "not_found"


def test_topic_permissions_narrow_the_keys_that_are_published_and_read(
    http: httpx.Client, narrow: httpx.Client, name: str
) -> None:
    publish(http, "amq.topic", {"key": f"open.{name}"}, {"key": f"closed.{name}"})
    answer = narrow.post(f"{TOPICS}/amq.topic/messages", json=[{"key": "open.x"}, {"key": "closed.x"}])
    assert (code(answer), answer.json()["index"]) == ("forbidden", 1)
    keys = {one["key"] for one in read(narrow, "amq.topic", offset=-100)["messages"]}
    assert f"open.{name}" in keys
    assert all(key.startswith("open") for key in keys)


def test_publishers_are_told_to_wait_while_an_alarm_is_up(tmp_path: Any) -> None:
    for setting, expected in (
        ("memory_share = 0.0001", (503, "alarm")),
        ("disk_free_share = 1.0", (507, "disk_full")),
    ):
        folder = tmp_path / setting.partition(" ")[0]
        folder.mkdir()
        with HttpBroker(folder, config=f"[alarms]\n{setting}\n") as broker, broker.client() as client:
            client.post(TOPICS, json={"name": "t"})
            answer = client.post(f"{TOPICS}/t/messages", json={})
            assert (answer.status_code, code(answer)) == expected
            assert answer.headers["retry-after"]
            assert read(client, "t")["messages"] == []


def test_large_messages_may_come_up_to_the_limit(http: httpx.Client, topic: str) -> None:
    value = "x" * (8 * 1024 * 1024)
    publish(http, topic, {"value": value})
    assert values(read(http, topic)) == [value]
    answer = http.post(f"{TOPICS}/{topic}/messages", json={"value": value * 2})
    assert (answer.status_code, code(answer)) == (413, "body_too_large")


def test_answer_with_acks_0_comes_before_the_commit_and_the_message_all_the_same(
    http: httpx.Client, topic: str
) -> None:
    assert publish(http, topic, {"value": "a"}, acks="0") == [{"partition": 0, "offset": 0}]
    assert values(read(http, topic, wait_ms=PATIENCE_S * 1000)) == ["a"]
    assert code(http.post(f"{TOPICS}/{topic}/messages", params={"acks": "2"}, json={})) == "invalid_parameter"
