"""pika on one side of `amq.topic`, paho-mqtt with MQTT 5 on the other. Driver: sockets.

The rows of docs/mapping.md that the two clients can say to each other.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import pika
from paho.mqtt.client import MQTTMessage, MQTTv5
from paho.mqtt.packettypes import PacketTypes
from pika.adapters.blocking_connection import BlockingChannel
from pika.spec import BasicProperties

from interop.amqp.pika_blocking import connected, take
from interop.broker import Broker
from interop.client import Driven, Feature, python_version
from interop.mqtt.paho_threads import Paho, Peer, properties

TOPICS = "amq.topic"
PERSISTENT = pika.DeliveryMode.Persistent.value
TRANSIENT = pika.DeliveryMode.Transient.value


@dataclass(frozen=True, slots=True)
class Meeting:
    """A channel with confirms, and an MQTT client that is connected."""

    broker: Broker
    channel: BlockingChannel
    peer: Peer

    def bound(self, *keys: str) -> str:
        """An exclusive queue with these binding keys."""
        queue = self.channel.queue_declare("", exclusive=True).method.queue
        for key in keys:
            self.channel.queue_bind(queue, TOPICS, key)
        return str(queue)

    def read(self, queue: str, count: int) -> list[tuple[str, BasicProperties, bytes]]:
        came = take(self.channel, queue, count, auto_ack=True)
        self.channel.cancel()
        return [(method.routing_key, told, body) for method, told, body in came]

    def say(self, key: str, body: bytes, **told: object) -> None:
        self.channel.basic_publish(TOPICS, key, body, BasicProperties(**told), mandatory=False)


@contextmanager
def meeting(broker: Broker) -> Iterator[Meeting]:
    with connected(broker) as connection, Paho(broker, "cross", MQTTv5).connected() as peer:
        channel = connection.channel()
        channel.confirm_delivery()
        yield Meeting(broker, channel, peer)


def to_mqtt(broker: Broker) -> None:
    """Every property of AMQP that MQTT has a place for, and headers as user properties."""
    with meeting(broker) as both:
        both.peer.subscribe("cross/to/mqtt", 2)
        both.say(
            "cross.to.mqtt",
            b"{}",
            content_type="application/json",
            content_encoding="utf-8",
            correlation_id="c-1",
            reply_to="cross.answers",
            expiration="90000",
            delivery_mode=PERSISTENT,
            message_id="m-1",
            timestamp=1_700_000_000,
            type="order",
            app_id="shop",
            priority=3,
            headers={"text": "šedá", "number": 7, "true": True, "list": ["a", "b"], "table": {"x": 1}, "none": None},
        )
        (message,) = both.peer.take(1)
        told = message.properties
        assert (message.topic, message.payload, message.qos, message.retain) == ("cross/to/mqtt", b"{}", 1, False)
        assert (told.ContentType, told.PayloadFormatIndicator) == ("application/json", 1)
        assert (told.CorrelationData, told.ResponseTopic) == (b"c-1", "cross/answers")
        assert 80 < told.MessageExpiryInterval <= 90
        assert sorted(told.UserProperty) == sorted(
            [
                ("text", "šedá"),
                ("number", "7"),
                ("true", "true"),
                ("list", "a"),
                ("list", "b"),
                ("table", '{"x":1}'),
                ("none", ""),
                ("priority", "3"),
                ("message-id", "m-1"),
                ("timestamp", "1700000000"),
                ("type", "order"),
                ("app-id", "shop"),
            ]
        )


def to_amqp(broker: Broker) -> None:
    """Every property of MQTT that AMQP has a place for, and user properties as headers."""
    with meeting(broker) as both:
        queue = both.bound("cross.to.*")
        both.peer.publish(
            "cross/to/amqp",
            "{}",
            1,
            properties=properties(
                PacketTypes.PUBLISH,
                PayloadFormatIndicator=1,
                ContentType="application/json",
                CorrelationData=b"c-2",
                ResponseTopic="cross/answers/2",
                MessageExpiryInterval=90,
                UserProperty=[("a", "1"), ("b", "šedá"), ("a", "2")],
            ),
        )
        both.peer.publish(
            "cross/to/amqp", "bytes", 0, properties=properties(PacketTypes.PUBLISH, CorrelationData=b"\xff")
        )
        both.peer.publish("cross/to/amqp", "plain", 0)
        (key, told, body), (_, odd, _), (_, plain, _) = both.read(queue, 3)
        assert (key, body) == ("cross.to.amqp", b"{}")
        assert (told.content_type, told.content_encoding) == ("application/json", "utf-8")
        assert (told.correlation_id, told.reply_to) == ("c-2", "cross.answers.2")
        assert told.headers == {"a": ["1", "2"], "b": "šedá", "x-reply-to-topic": "cross.answers.2"}
        assert told.delivery_mode == PERSISTENT
        assert 80_000 < int(told.expiration) <= 90_000
        # What is no text, nor short enough, is a header.
        assert odd.correlation_id is None
        assert odd.headers == {"x-correlation-id": b"\xff"}
        assert (plain.headers, plain.content_type, plain.expiration) == (None, None, None)


def request(broker: Broker) -> None:
    """An application asks a device: its reply queue is bound to the topic that it names."""
    with meeting(broker) as both:
        both.peer.subscribe("cross/device/ask", 1)
        answers = both.bound("cross.answers.app")
        both.say("cross.device.ask", b"21", reply_to="cross.answers.app", correlation_id="q-1")
        (asked,) = both.peer.take(1)
        _answer(both.peer, asked)
        ((key, told, body),) = both.read(answers, 1)
        assert (key, told.correlation_id, body) == ("cross.answers.app", "q-1", b"42")


def _answer(peer: Peer, asked: MQTTMessage) -> None:
    """As any MQTT 5 responder does it."""
    told = properties(PacketTypes.PUBLISH, CorrelationData=asked.properties.CorrelationData)
    peer.publish(asked.properties.ResponseTopic, str(2 * int(asked.payload)), 1, properties=told)


def response(broker: Broker) -> None:
    """A device asks an application: it answers to `amq.topic` with the key that it was given."""
    with meeting(broker) as both:
        asks = both.bound("cross.app.ask")
        both.peer.subscribe("cross/answers/device", 1)
        told = properties(PacketTypes.PUBLISH, ResponseTopic="cross/answers/device", CorrelationData=b"q-2")
        both.peer.publish("cross/app/ask", "4", 1, properties=told)
        ((_, asked, body),) = both.read(asks, 1)
        answer = b"%d" % (int(body) ** 2)
        both.say(asked.headers["x-reply-to-topic"], answer, correlation_id=asked.correlation_id)
        (message,) = both.peer.take(1)
        assert (message.topic, message.payload) == ("cross/answers/device", b"16")
        assert message.properties.CorrelationData == b"q-2"


def retained(broker: Broker) -> None:
    """By a header from AMQP; an AMQP consumer is told of the flag; empty, it is forgotten."""
    with meeting(broker) as both:
        queue = both.bound("cross.kept.#")
        both.say("cross.kept.a", b"on", headers={"x-retain": True, "unit": "W"}, delivery_mode=PERSISTENT)
        both.peer.publish("cross/kept/b", "off", 1, retain=True)
        with Paho(broker, "cross", MQTTv5).connected() as late:
            late.subscribe("cross/kept/+", 1)
            came = sorted(late.take(2), key=lambda message: message.topic)
            assert [(one.topic, one.payload, one.retain) for one in came] == [
                ("cross/kept/a", b"on", True),
                ("cross/kept/b", b"off", True),
            ]
            assert came[0].properties.UserProperty == [("unit", "W")]
        (_, _, one), (_, told, two) = both.read(queue, 2)
        assert (one, two) == (b"on", b"off")
        assert told.headers == {"x-mqtt-retain": True}
        both.say("cross.kept.a", b"", headers={"x-retain": True})
        both.peer.publish("cross/kept/b", "", 1, retain=True)
        with Paho(broker, "cross", MQTTv5).connected() as late:
            late.subscribe("cross/kept/+", 1)
            both.say("cross.kept.a", b"now")
            assert late.texts(1) == ["now"]


def qos(broker: Broker) -> None:
    """QoS 0 is transient, 1 and 2 are persistent; and back."""
    with meeting(broker) as both:
        queue = both.bound("cross.qos")
        for level in (0, 1, 2):
            both.peer.publish("cross/qos", str(level), level)
        assert [(told.delivery_mode, body) for _, told, body in both.read(queue, 3)] == [
            (TRANSIENT, b"0"),
            (PERSISTENT, b"1"),
            (PERSISTENT, b"2"),
        ]
        both.peer.subscribe("cross/qos", 2)
        both.say("cross.qos", b"transient", delivery_mode=TRANSIENT)
        both.say("cross.qos", b"persistent", delivery_mode=PERSISTENT)
        both.say("cross.qos", b"neither")
        assert [(one.payload, one.qos) for one in both.peer.take(3)] == [
            (b"transient", 0),
            (b"persistent", 1),
            (b"neither", 0),
        ]


def topics(broker: Broker) -> None:
    """Wildcards of both languages over the same keys; what is special in one of them comes back as it was."""
    names = {
        "cross/t/v1.0/x": "cross.t.v1%2E0.x",
        "cross/t//x": "cross.t..x",
        "cross/t/50%/x": "cross.t.50%25.x",
        "cross/t/*/x": "cross.t.%2A.x",
        "cross/t/světlo/x": "cross.t.světlo.x",
    }
    with meeting(broker) as both:
        queue = both.bound("cross.t.*.x")
        with Paho(broker, "cross", MQTTv5).connected() as reader:
            reader.subscribe("cross/t/+/x", 1)
            for topic, key in names.items():
                both.peer.publish(topic, "mqtt")
                both.say(key, b"amqp")
            # Neither language matches these.
            both.peer.publish("cross/t/a/b/x", "two levels")
            both.say("cross.t.x", b"no level")
            expected = [(topic, text) for topic in names for text in ("mqtt", "amqp")]
            assert [(one.topic, one.payload.decode()) for one in reader.take(len(expected))] == expected
        came = both.read(queue, len(expected))
        assert [key for key, _, _ in came] == [key for key in names.values() for _ in range(2)]
        assert both.channel.queue_declare(queue, passive=True).method.message_count == 0


def worker_down(broker: Broker) -> None:
    """A durable queue keeps what devices publish while no worker is there, through kill -9; QoS 0 need not be kept."""
    with meeting(broker) as both:
        both.channel.queue_declare("cross.work", durable=True)
        both.channel.queue_bind("cross.work", TOPICS, "cross.jobs.#")
    with Paho(broker, "cross", MQTTv5).connected() as device:
        for number in range(20):
            device.publish(f"cross/jobs/{number % 3}", str(number), 1 + number % 2)
    broker.restart()
    with meeting(broker) as both:
        came = take(both.channel, "cross.work", 20)
        assert [body for _, _, body in came] == [b"%d" % number for number in range(20)]
        assert [method.routing_key for method, _, _ in came] == [f"cross.jobs.{number % 3}" for number in range(20)]
        both.channel.basic_ack(came[-1][0].delivery_tag, multiple=True)
        both.channel.cancel()
        assert both.channel.queue_delete("cross.work").method.message_count == 0


def _version() -> str:
    return f"{python_version('pika')()}, {python_version('paho-mqtt')()}"


CLIENT = Driven(
    "pika meets paho-mqtt",
    _version,
    {
        Feature.TO_MQTT: to_mqtt,
        Feature.TO_AMQP: to_amqp,
        Feature.REQUEST: request,
        Feature.RESPONSE: response,
        Feature.RETAINED: retained,
        Feature.QOS: qos,
        Feature.TOPICS: topics,
        Feature.WORKER_DOWN: worker_down,
    },
    nullcontext,
)
