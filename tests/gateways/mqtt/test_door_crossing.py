"""AMQP meets MQTT: what one publishes the other reads, with properties in its own words. Over the wire and by pika."""

from typing import Any

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from tests.gateways.amqp.serving import Reader

from headrace.gateways.mqtt.packets import Publish, QoS, Will
from headrace.gateways.mqtt.reasons import ReasonCode, Version

from .conftest import MqttBroker
from .wire import Open

both_versions = pytest.mark.parametrize("version", [Version.V3_1_1, Version.V5], ids=lambda one: one.name)


@pytest.fixture
def channel(broker: MqttBroker) -> BlockingChannel:
    return broker.connect().channel()


def bound(channel: BlockingChannel, name: str, key: str, arguments: dict[str, Any] | None = None) -> str:
    channel.queue_declare(name, durable=True, arguments=arguments)
    channel.queue_bind(name, "amq.topic", key)
    return name


SENT: dict[str, Any] = {
    "payload_format_indicator": 1,
    "content_type": "text/plain",
    "response_topic": "answers/1",
    "correlation_data": b"c-1",
    "user_properties": (("b", "2"), ("a", "1"), ("a", "3")),
}


def check(properties: pika.BasicProperties) -> None:
    """They are SENT as AMQP says it."""
    assert properties.content_type == "text/plain"
    assert properties.content_encoding == "utf-8"
    assert properties.correlation_id == "c-1"
    assert properties.reply_to == "answers.1"
    headers = properties.headers
    assert headers is not None
    assert headers["x-reply-to-topic"] == "answers.1"
    assert headers["b"] == "2" and headers["a"] == ["1", "3"]


# -- MQTT to AMQP -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_queue_gets_what_mqtt_publishes(client: Open, channel: BlockingChannel, name: str, qos: int) -> None:
    reader = Reader(channel, bound(channel, name, f"{name}.*.temperature"))
    client().publish(f"{name}/room/temperature", b"21", qos, **SENT)
    ((method, properties, body),) = reader.wait(1)
    assert body == b"21"
    assert (method.exchange, method.routing_key) == ("amq.topic", f"{name}.room.temperature")
    check(properties)
    assert properties.delivery_mode == (2 if qos else 1)
    reader.ack()


def test_queue_gets_what_3_1_1_publishes(client: Open, channel: BlockingChannel, name: str) -> None:
    reader = Reader(channel, bound(channel, name, f"{name}.#"))
    client(version=Version.V3_1_1).publish(f"{name}/a", b"x", 1, retain=True)
    ((_method, properties, body),) = reader.wait(1)
    assert body == b"x" and properties.headers == {"x-mqtt-retain": True}
    reader.ack()


def test_get_sees_the_properties_as_amqp_has_them(client: Open, channel: BlockingChannel, name: str) -> None:
    bound(channel, name, f"{name}.#")
    client().publish(f"{name}/a", b"x", 1, **SENT)
    method, properties, body = channel.basic_get(name, auto_ack=True)
    assert method is not None and properties is not None and body == b"x"
    check(properties)


def test_messages_of_both_in_one_queue_keep_their_order_and_properties(
    client: Open, channel: BlockingChannel, name: str
) -> None:
    bound(channel, name, f"{name}.#")
    writer = client()
    channel.confirm_delivery()
    for number in range(10):
        if number % 2:
            writer.publish(f"{name}/a", b"%d" % number, 1, user_properties=(("n", str(number)),))
        else:
            sent = pika.BasicProperties(headers={"n": str(number)}, delivery_mode=2)
            channel.basic_publish("amq.topic", f"{name}.a", b"%d" % number, sent)
    found = Reader(channel, name).wait(10)
    assert [body for _method, _properties, body in found] == [b"%d" % number for number in range(10)]
    assert [properties.headers["n"] for _method, properties, _body in found] == [str(number) for number in range(10)]


def test_stream_of_amq_topic_shows_offsets_and_properties(client: Open, channel: BlockingChannel, name: str) -> None:
    bound(channel, name, f"{name}.#", {"x-queue-type": "stream"})
    client().publish(f"{name}/a", b"x", 1, **SENT)
    channel.basic_qos(prefetch_count=10)
    reader = Reader(channel, name, arguments={"x-stream-offset": "first"})
    ((_method, properties, body),) = reader.wait(1)
    assert body == b"x" and properties.headers["x-stream-offset"] == 0
    check(properties)


def test_dead_letter_of_an_mqtt_message_tells_its_story(client: Open, channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(f"{name}-dead", durable=True)
    arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": f"{name}-dead"}
    bound(channel, name, f"{name}.#", arguments)
    client().publish(f"{name}/a", b"bad", 1, **SENT)
    ((method, _properties, _body),) = Reader(channel, name).wait(1)
    channel.basic_nack(method.delivery_tag, requeue=False)
    ((_method, properties, body),) = Reader(channel, f"{name}-dead").wait(1)
    assert body == b"bad"
    check(properties)
    assert properties.headers["x-death"][0]["queue"] == name
    assert properties.headers["x-death"][0]["routing-keys"] == [f"{name}.a"]


def test_dead_letter_of_an_mqtt_message_may_go_back_to_mqtt(client: Open, channel: BlockingChannel, name: str) -> None:
    arguments = {"x-dead-letter-exchange": "amq.topic", "x-dead-letter-routing-key": f"{name}.dead"}
    bound(channel, name, f"{name}.a", arguments)
    reader = client()
    reader.subscribe(f"{name}/dead", qos=1)
    client().publish(f"{name}/a", b"bad", 1, retain=True, **SENT)
    ((method, _properties, _body),) = Reader(channel, name).wait(1)
    channel.basic_nack(method.delivery_tag, requeue=False)
    (message,) = reader.take()
    assert message.payload == b"bad" and message.qos == 1
    assert message.properties.content_type == "text/plain"
    assert message.properties.correlation_data == b"c-1"
    assert ("b", "2") in message.properties.user_properties
    late = client()
    late.subscribe(f"{name}/dead")
    late.expect_nothing()


def test_time_to_live_of_an_mqtt_message_holds_in_a_queue(client: Open, channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(f"{name}-dead", durable=True)
    arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": f"{name}-dead"}
    bound(channel, name, f"{name}.#", arguments)
    client().publish(f"{name}/a", b"short", 1, message_expiry_interval=1)
    ((_method, properties, body),) = Reader(channel, f"{name}-dead").wait(1)
    assert body == b"short" and properties.headers["x-death"][0]["reason"] == "expired"


def test_headers_exchange_behind_amq_topic_routes_by_user_properties(
    client: Open, channel: BlockingChannel, name: str
) -> None:
    channel.exchange_declare(f"{name}-h", "headers")
    channel.exchange_bind(f"{name}-h", "amq.topic", f"{name}.#")
    channel.queue_declare(name)
    channel.queue_bind(name, f"{name}-h", "", {"x-match": "all", "kind": "alarm"})
    writer = client()
    for kind in ("alarm", "noise", "alarm"):
        writer.publish(f"{name}/a", kind.encode(), 1, user_properties=(("kind", kind),))
    reader = Reader(channel, name)
    assert reader.bodies(2) == [b"alarm", b"alarm"]
    channel.exchange_delete(f"{name}-h")


def test_topic_longer_than_a_routing_key_comes_with_all_of_it_in_a_header(
    client: Open, channel: BlockingChannel, name: str
) -> None:
    topic = f"{name}/" + "é" * 300
    reader = Reader(channel, bound(channel, name, f"{name}.#"))
    client().publish(topic, b"x", 1)
    ((method, properties, body),) = reader.wait(1)
    assert body == b"x" and topic.replace("/", ".").startswith(method.routing_key)
    found = properties.headers["x-mqtt-topic"]
    assert (found if isinstance(found, str) else found.decode()) == topic
    reader.ack()


def test_will_reaches_a_queue(client: Open, channel: BlockingChannel, name: str) -> None:
    reader = Reader(channel, bound(channel, name, f"{name}.will"))
    client(name, will=Will(f"{name}/will", b"gone", QoS(1))).cut()
    assert reader.bodies(1) == [b"gone"]
    reader.ack()


LIMITED = {"x-max-length": 2, "x-overflow": "reject-publish"}


@pytest.mark.parametrize("qos", [1, 2])
def test_full_queue_that_rejects_publishes_is_told_to_the_publisher(
    client: Open, channel: BlockingChannel, name: str, qos: int
) -> None:
    bound(channel, name, f"{name}.#", LIMITED)
    reader, writer = client(), client()
    reader.subscribe(f"{name}/#", qos=qos)
    answers = [writer.publish(f"{name}/a", b"%d" % number, qos) for number in range(4)]
    assert answers == [ReasonCode.SUCCESS] * 2 + [ReasonCode.QUOTA_EXCEEDED] * 2
    # As with AMQP, whoever else matches has them all the same.
    assert len(reader.payloads(4)) == 4
    assert Reader(channel, name).bodies(2) == [b"0", b"1"]


def test_full_queue_that_rejects_publishes_ends_a_connection_of_3_1_1(
    client: Open, channel: BlockingChannel, name: str
) -> None:
    bound(channel, name, f"{name}.#", LIMITED)
    writer = client(version=Version.V3_1_1)
    for _ in range(2):
        writer.publish(f"{name}/a", b"x", 1)
    writer.send(Publish(f"{name}/a", b"x", QoS(1), packet_id=9))
    writer.expect_end()


def test_full_queue_may_send_what_it_rejects_to_its_dead_letters(
    client: Open, channel: BlockingChannel, name: str
) -> None:
    channel.queue_declare(f"{name}-dead", durable=True)
    arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": f"{name}-dead"}
    bound(channel, name, f"{name}.#", LIMITED | {"x-overflow": "reject-publish-dlx"} | arguments)
    writer = client()
    for number in range(3):
        writer.publish(f"{name}/a", b"%d" % number, 1, content_type="text/plain")
    ((_method, properties, body),) = Reader(channel, f"{name}-dead").wait(1)
    assert (body, properties.content_type) == (b"2", "text/plain")


# -- AMQP to MQTT -----------------------------------------------------------------------------------------------------


def publish(channel: BlockingChannel, key: str, body: bytes, **properties: Any) -> None:
    channel.confirm_delivery()
    channel.basic_publish("amq.topic", key, body, pika.BasicProperties(**properties))


@both_versions
@pytest.mark.parametrize("mode", [1, 2])
def test_mqtt_gets_what_amqp_publishes(
    client: Open, channel: BlockingChannel, name: str, version: Version, mode: int
) -> None:
    reader = client(version=version)
    reader.subscribe(f"{name}/+/temperature", qos=2)
    publish(channel, f"{name}.room.temperature", b"21", delivery_mode=mode)
    (message,) = reader.take()
    assert (message.topic, message.payload, message.qos) == (f"{name}/room/temperature", b"21", mode - 1)


def test_mqtt_sees_the_properties_of_amqp(client: Open, channel: BlockingChannel, name: str) -> None:
    reader = client()
    reader.subscribe(f"{name}/#")
    publish(
        channel,
        f"{name}.a",
        b"x",
        content_type="text/plain",
        correlation_id="c-1",
        reply_to="answers.1",
        headers={"n": 5, "a": ["1", "2"]},
        message_id="m-1",
    )
    found = reader.take()[0].properties
    assert (found.content_type, found.correlation_data, found.response_topic) == ("text/plain", b"c-1", "answers/1")
    assert set(found.user_properties) >= {("n", "5"), ("a", "1"), ("a", "2"), ("message-id", "m-1")}


def test_amqp_retains_by_a_header(client: Open, channel: BlockingChannel, name: str) -> None:
    live = client()
    live.subscribe(f"{name}/#", qos=1)
    publish(channel, f"{name}.a", b"kept", delivery_mode=2, headers={"x-retain": True, "n": "1"})
    publish(channel, f"{name}.b", b"passing", delivery_mode=2)
    assert live.payloads(2) == [b"kept", b"passing"]
    late = client()
    late.subscribe(f"{name}/#", qos=1)
    (message,) = late.take()
    assert (message.payload, message.retain, message.qos) == (b"kept", True, 1)
    assert message.properties.user_properties == (("n", "1"),)
    late.expect_nothing()
    publish(channel, f"{name}.a", b"", delivery_mode=2, headers={"x-retain": True})
    last = client()
    last.subscribe(f"{name}/#", qos=1)
    last.expect_nothing()


def test_amqp_message_waits_for_a_sleeping_session(client: Open, channel: BlockingChannel, name: str) -> None:
    one = client(name, session_expiry_interval=300)
    one.subscribe(f"{name}/#", qos=1)
    one.disconnect()
    publish(channel, f"{name}.a", b"x", delivery_mode=2, content_type="text/plain")
    again = client(name, clean_start=False)
    (message,) = again.take()
    assert (message.payload, message.properties.content_type) == (b"x", "text/plain")


def test_amqp_message_is_shared_out_to_one_member(client: Open, channel: BlockingChannel, name: str) -> None:
    members = [client(), client()]
    for one in members:
        one.subscribe(f"$share/{name}/{name}/#", qos=1)
    for number in range(4):
        publish(channel, f"{name}.a", b"%d" % number, delivery_mode=2)
    found = [[packet for packet in one.seen_all() if isinstance(packet, Publish)] for one in members]
    assert sorted(message.payload for one in found for message in one) == [b"0", b"1", b"2", b"3"]
    assert all(one for one in found)


def test_amqp_expiration_is_counted_down_for_mqtt(client: Open, channel: BlockingChannel, name: str) -> None:
    reader = client()
    reader.subscribe(f"{name}/#")
    publish(channel, f"{name}.a", b"x", expiration="500000")
    left = reader.take()[0].properties.message_expiry_interval
    assert left is not None and 400 < left <= 500


@pytest.mark.parametrize(
    ("topic", "key"), [("a/b", "a.b"), ("a.b/c", "a%2Eb.c"), ("/a", ".a"), ("a//b", "a..b"), ("100%/*", "100%25.%2A")]
)
def test_topic_and_routing_key_lead_to_each_other(
    client: Open, channel: BlockingChannel, name: str, topic: str, key: str
) -> None:
    reader = client()
    reader.subscribe(f"{name}/{topic}")
    publish(channel, f"{name}.{key}", b"to mqtt")
    assert reader.take()[0].topic == f"{name}/{topic}"
    consumer = Reader(channel, bound(channel, name, f"{name}.{key}"))
    client().publish(f"{name}/{topic}", b"to amqp", 1)
    ((method, _properties, _body),) = consumer.wait(1)
    assert method.routing_key == f"{name}.{key}"
    consumer.ack()


def test_request_over_amqp_is_answered_over_mqtt(client: Open, channel: BlockingChannel, name: str) -> None:
    answerer = client()
    answerer.subscribe(f"{name}/ask")
    replies = Reader(channel, bound(channel, name, f"{name}.answers"))
    publish(channel, f"{name}.ask", b"6*7", reply_to=f"{name}.answers", correlation_id="1")
    (question,) = answerer.take()
    assert question.properties.response_topic is not None
    answerer.publish(
        question.properties.response_topic, b"42", 1, correlation_data=question.properties.correlation_data
    )
    ((_method, properties, body),) = replies.wait(1)
    assert body == b"42" and properties.correlation_id == "1"
    replies.ack()


def test_restart_keeps_the_properties_of_both(own_broker: MqttBroker) -> None:
    channel = own_broker.connect().channel()
    bound(channel, "both", "both.#")
    with own_broker.wire() as writer, own_broker.wire() as sleeper:
        sleeper.connect("sleeper", session_expiry_interval=300)
        sleeper.subscribe("both/#", qos=1)
        sleeper.disconnect()
        writer.connect("")
        writer.publish("both/a", b"mqtt", 1, **SENT)
    publish(channel, "both.a", b"amqp", delivery_mode=2, content_type="text/plain", correlation_id="c-1")
    own_broker.restart(kill=True)
    channel = own_broker.connect().channel()
    found = Reader(channel, "both").wait(2)
    assert [body for _method, _properties, body in found] == [b"mqtt", b"amqp"]
    check(found[0][1])
    with own_broker.wire() as sleeper:
        assert sleeper.connect("sleeper", clean_start=False).session_present
        for message, payload in zip(sleeper.take(2), (b"mqtt", b"amqp"), strict=True):
            assert message.payload == payload
            assert message.properties.content_type == "text/plain"
            assert message.properties.correlation_data == b"c-1"
