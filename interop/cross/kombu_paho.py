"""kombu on `amq.topic`, with devices that speak MQTT 3.1.1 or 5 by paho-mqtt. Driver: sockets."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from kombu import Connection, Exchange, Message, Queue
from paho.mqtt.client import MQTTv5, MQTTv311
from paho.mqtt.packettypes import PacketTypes

from interop.broker import Broker
from interop.client import Driven, Feature, python_version
from interop.mqtt.paho_threads import WAIT_SECONDS, Paho, properties

# kombu must not declare it: the broker has it.
TOPICS = Exchange("amq.topic", type="topic", durable=True, passive=True)


@contextmanager
def bound(connection: Connection, key: str) -> Iterator[Queue]:
    queue = Queue("", exchange=TOPICS, routing_key=key, exclusive=True)(connection.default_channel)
    queue.declare()
    yield queue


def take(connection: Connection, queue: Queue, count: int) -> list[tuple[Any, Message]]:
    """Bodies as kombu decodes them by their content type, and messages."""
    came: list[tuple[Any, Message]] = []

    def handle(body: Any, message: Message) -> None:
        came.append((body, message))
        message.ack()

    with connection.Consumer(queue, callbacks=[handle], accept=["json", "text/plain", "application/data"]):
        while len(came) < count:
            connection.drain_events(timeout=WAIT_SECONDS)
    return came


def to_amqp(broker: Broker) -> None:
    """A device says that its payload is JSON, and the consumer gets what it stands for."""
    with Connection(broker.url) as connection, bound(connection, "kombu.state.#") as queue:
        with Paho(broker, "kombu", MQTTv5).connected() as device:
            told = properties(
                PacketTypes.PUBLISH,
                PayloadFormatIndicator=1,
                ContentType="application/json",
                CorrelationData=b"k-1",
                UserProperty=[("room", "kitchen")],
            )
            device.publish("kombu/state/lamp", '{"on": true}', 1, properties=told)
        with Paho(broker, "kombu", MQTTv311).connected() as device:
            device.publish("kombu/state/old", "off", 1)
        (body, message), (text, old) = take(connection, queue, 2)
        assert body == {"on": True}
        assert message.headers == {"room": "kitchen"}
        assert message.properties["correlation_id"] == "k-1"
        assert message.delivery_info["routing_key"] == "kombu.state.lamp"
        assert (text, old.headers, old.delivery_info["routing_key"]) == ("off", {}, "kombu.state.old")


def to_mqtt(broker: Broker) -> None:
    """What kombu serializes is plain to a device, of either version."""
    new, old = Paho(broker, "kombu", MQTTv5), Paho(broker, "kombu", MQTTv311)
    with new.connected() as five, old.connected() as three, Connection(broker.url) as connection:
        for device in (five, three):
            device.subscribe("kombu/order/+", 1)
        producer = connection.Producer(serializer="json")
        producer.publish(
            {"set": 21}, exchange="amq.topic", routing_key="kombu.order.heater", headers={"by": "shop"}, expiration=60
        )
        (message,) = five.take(1)
        assert (message.topic, message.payload, message.qos) == ("kombu/order/heater", b'{"set": 21}', 1)
        assert message.properties.ContentType == "application/json"
        assert message.properties.PayloadFormatIndicator == 1
        assert ("by", "shop") in message.properties.UserProperty
        assert 50 < message.properties.MessageExpiryInterval <= 60
        (message,) = three.take(1)
        assert (message.topic, message.payload, message.qos) == ("kombu/order/heater", b'{"set": 21}', 1)


def response(broker: Broker) -> None:
    """kombu answers a device as it answers anybody: by correlation and the key in reply_to."""
    with (
        Connection(broker.url) as connection,
        bound(connection, "kombu.ask") as queue,
        Paho(broker, "kombu", MQTTv5).connected() as device,
    ):
        device.subscribe("kombu/answers/1", 1)
        told = properties(
            PacketTypes.PUBLISH,
            ContentType="application/json",
            PayloadFormatIndicator=1,
            ResponseTopic="kombu/answers/1",
            CorrelationData=b"k-2",
        )
        device.publish("kombu/ask", "[1, 2, 3]", 1, properties=told)
        ((body, message),) = take(connection, queue, 1)
        asked = message.properties
        connection.Producer().publish(
            sum(body),
            exchange="amq.topic",
            routing_key=asked["reply_to"],
            correlation_id=asked["correlation_id"],
            serializer="json",
        )
        (answer,) = device.take(1)
        assert (answer.topic, answer.payload) == ("kombu/answers/1", b"6")
        assert answer.properties.CorrelationData == b"k-2"


def _version() -> str:
    return f"{python_version('kombu')()}, {python_version('paho-mqtt')()}"


CLIENT = Driven(
    "kombu meets paho-mqtt",
    _version,
    {Feature.TO_AMQP: to_amqp, Feature.TO_MQTT: to_mqtt, Feature.RESPONSE: response},
    nullcontext,
)
