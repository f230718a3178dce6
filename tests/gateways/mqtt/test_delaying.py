"""Delayed messages over MQTT with a real client: by topic in every version, by user properties in MQTT 5."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count

import paho.mqtt.client as mqtt
import pika
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from tests.running_broker import eventually

from headrace.gateways.mqtt.delaying import Late, read
from headrace.gateways.mqtt.packets import Connack, Connect, Pubcomp, Publish, Pubrec, Pubrel, QoS
from headrace.gateways.mqtt.properties import Properties as Sent
from headrace.gateways.mqtt.properties import encode_blob
from headrace.gateways.mqtt.reasons import MqttError, ReasonCode
from headrace.testing import EmbeddedBroker

from .wire import Wire

NOW_US = 1_700_000_000_000_000
HOUR_MS = 3_600_000
USERS = """
[[users]]
name = "sensor"
password = "writes below its own name"
[[permissions]]
user = "sensor"
configure = ""
write = ".*"
read = ".*"
[[topic_permissions]]
user = "sensor"
exchange = "amq.topic"
write = '^own\\.'
read = ".*"
"""
names = count()


# -- what is asked for -----------------------------------------------------------------------------------------------


def blob(**user_properties: str) -> bytes:
    pairs = tuple((name.replace("_", "-"), value) for name, value in user_properties.items())
    return encode_blob(Sent(user_properties=pairs))


@given(st.integers(1, 10**9), st.text(st.characters(codec="utf-8", exclude_characters="\0+#"), min_size=1, max_size=20))
def test_the_topic_behind_the_seconds_is_what_it_is_for(seconds: int, topic: str) -> None:
    name = topic.encode()
    if name.startswith(b"$delayed/"):
        return
    assert read(b"$delayed/%d/%s" % (seconds, name), b"", NOW_US) == (
        name,
        Late(name, NOW_US + seconds * 1_000_000, None),
    )


def test_no_seconds_mean_now() -> None:
    assert read(b"$delayed/0/a/b", b"", NOW_US) == (b"a/b", None)
    assert read(b"a/b", b"", NOW_US) == (b"a/b", None)


@pytest.mark.parametrize(
    "topic", ["$delayed/", "$delayed/5", "$delayed/5/", "$delayed/soon/a", "$delayed/-1/a", "$delayed/1/$delayed/2/a"]
)
def test_a_topic_that_does_not_say_how_long_is_refused(topic: str) -> None:
    with pytest.raises(MqttError, match=r"\$delayed/<seconds>/<topic>"):
        read(topic.encode(), b"", NOW_US)


@pytest.mark.parametrize("name", ["x-delay", "x-deliver-at", "x-delay-level", "x-schedule-id"])
def test_a_user_property_that_says_two_things_is_refused(name: str) -> None:
    twice = encode_blob(Sent(user_properties=((name, "1"), ("x-delay-of", "?"), (name, "2"))))
    with pytest.raises(MqttError, match=f"{name} is given twice") as refused:
        read(b"a", twice, NOW_US)
    assert refused.value.code == ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR


def test_a_user_property_that_says_one_thing_twice_is_as_good_as_once() -> None:
    twice = encode_blob(Sent(user_properties=(("x-delay", "1500"), ("x-delay", "1500"))))
    assert read(b"a", twice, NOW_US)[1] == Late(b"a", NOW_US + 1_500_000, None)


def test_user_properties_ask_in_the_same_words_as_headers() -> None:
    assert read(b"a", blob(x_delay="1500", x_schedule_id="17"), NOW_US)[1] == Late(b"a", NOW_US + 1_500_000, b"17")
    assert read(b"a", blob(x_delay_level="10s"), NOW_US)[1] == Late(b"a", NOW_US + 10_000_000, None)
    assert read(b"a", blob(x_deliver_at="2023-11-14T22:13:21Z"), NOW_US)[1] == Late(b"a", NOW_US + 1_000_000, None)
    assert read(b"a", blob(x_delay="0"), NOW_US)[1] is None
    with pytest.raises(MqttError, match="x-delay must be milliseconds"):
        read(b"a", blob(x_delay="soon"), NOW_US)
    with pytest.raises(MqttError, match="both delay it"):
        read(b"$delayed/5/a", blob(x_delay="1"), NOW_US)


# -- with a client ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(doors=("amqp", "mqtt"), config=USERS) as broker:
        yield broker


class Client:
    """paho, with what it got."""

    def __init__(
        self,
        broker: EmbeddedBroker,
        *,
        version: MQTTProtocolVersion = MQTTProtocolVersion.MQTTv5,
        user: tuple[str, str] | None = None,
    ) -> None:
        self.got: list[tuple[str, bytes, bool]] = []
        self.reasons: list[int] = []
        self.expiries: list[int | None] = []
        self.ended: list[object] = []
        self.paho = mqtt.Client(CallbackAPIVersion.VERSION2, client_id=f"c{next(names)}", protocol=version)
        if user is not None:
            self.paho.username_pw_set(*user)
        self.paho.on_message = self._on_message
        self.paho.on_publish = lambda _client, _data, _mid, reason, _properties: self.reasons.append(reason.value)
        self.paho.on_disconnect = lambda *arguments: self.ended.append(arguments)
        self.paho.connect(broker.host, broker.mqtt_port)
        self.paho.loop_start()
        eventually(self.paho.is_connected)

    def _on_message(self, _client: object, _data: object, message: mqtt.MQTTMessage) -> None:
        self.expiries.append(getattr(message.properties, "MessageExpiryInterval", None))
        self.got.append((message.topic, message.payload, message.retain))

    def subscribe(self, topic: str, qos: int = 2) -> None:
        done: list[object] = []
        self.paho.on_subscribe = lambda *arguments: done.append(arguments)
        self.paho.subscribe(topic, qos)
        eventually(lambda: bool(done))

    def publish(
        self, topic: str, payload: bytes, qos: int = 1, *, retain: bool = False, expiry: int | None = None, **user: str
    ) -> None:
        """Returns when it was answered, with QoS 0 when it was sent."""
        properties = None
        if user or expiry is not None:
            properties = Properties(PacketTypes.PUBLISH)
            properties.UserProperty = [(name.replace("_", "-"), value) for name, value in user.items()]
            if expiry is not None:
                properties.MessageExpiryInterval = expiry
        before = len(self.reasons)
        self.paho.publish(topic, payload, qos, retain, properties)
        eventually(lambda: len(self.reasons) > before or bool(self.ended))

    def close(self) -> None:
        self.paho.disconnect()
        self.paho.loop_stop()


@pytest.fixture
def connect(broker: EmbeddedBroker) -> Iterator[Callable[..., Client]]:
    clients: list[Client] = []

    def connect(**how: object) -> Client:
        clients.append(Client(broker, **how))  # type: ignore[arg-type]
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


@pytest.mark.parametrize("version", [MQTTProtocolVersion.MQTTv311, MQTTProtocolVersion.MQTTv5])
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_message_below_delayed_comes_when_it_is_due(
    broker: EmbeddedBroker, connect: Callable[..., Client], version: MQTTProtocolVersion, qos: int
) -> None:
    reader, writer = connect(), connect(version=version)
    topic = f"late/{next(names)}"
    reader.subscribe(topic)
    writer.publish(f"$delayed/3600/{topic}", b"late", qos)
    writer.publish(topic, b"now", 1)
    eventually(lambda: len(reader.got) == 1)
    broker.clock.advance(minutes=59)
    assert [payload for _, payload, _ in reader.got] == [b"now"]
    broker.clock.advance(minutes=1)
    eventually(lambda: len(reader.got) == 2)
    assert reader.got[1] == (topic, b"late", False)


def test_user_properties_delay_too_and_are_passed_on(broker: EmbeddedBroker, connect: Callable[..., Client]) -> None:
    reader, writer = connect(), connect()
    topic = f"late/{next(names)}"
    reader.subscribe(topic)
    writer.publish(topic, b"late", 1, x_delay=str(HOUR_MS), kind="order")
    broker.clock.advance(hours=1)
    eventually(lambda: len(reader.got) == 1)
    assert reader.got == [(topic, b"late", False)]


def test_a_retained_message_is_retained_from_its_due_time_on(
    broker: EmbeddedBroker, connect: Callable[..., Client]
) -> None:
    writer, topic = connect(), f"late/{next(names)}"
    writer.publish(f"$delayed/3600/{topic}", b"kept", 1, retain=True)
    early, late = connect(), connect()
    early.subscribe(topic)
    broker.clock.advance(hours=1)
    eventually(lambda: early.got == [(topic, b"kept", False)])
    late.subscribe(topic)
    eventually(lambda: late.got == [(topic, b"kept", True)])


def test_message_expiry_counts_from_the_due_time(broker: EmbeddedBroker, connect: Callable[..., Client]) -> None:
    reader, writer, topic = connect(), connect(), f"late/{next(names)}"
    reader.subscribe(topic)
    writer.publish(f"$delayed/3600/{topic}", b"late", 1, expiry=60)
    broker.clock.advance(hours=1)
    eventually(lambda: len(reader.got) == 1)
    assert reader.expiries[0] is not None and 58 <= reader.expiries[0] <= 60


def test_the_topic_behind_decides_who_may(broker: EmbeddedBroker, connect: Callable[..., Client]) -> None:
    sensor = connect(user=("sensor", "writes below its own name"))
    reader = connect()
    reader.subscribe("own/#")
    reader.subscribe("others/#")
    sensor.publish("$delayed/60/others/a", b"no", 1)
    sensor.publish("$delayed/60/own/a", b"yes", 1)
    assert sensor.reasons == [0x87, 0]
    broker.clock.advance(minutes=2)
    eventually(lambda: bool(reader.got))
    assert reader.got == [("own/a", b"yes", False)]


@pytest.mark.parametrize(
    ("topic", "user", "reason"),
    [
        ("$delayed/soon/a", {}, 0x90),
        ("$delayed/999999999/a", {}, 0x83),
        ("a", {"x_delay": "never"}, 0x83),
        ("a", {"x_deliver_at": "9999-01-01T00:00:00Z"}, 0x83),
        ("$delayed/1/$SYS/a", {}, 0x87),
    ],
)
def test_what_cannot_be_promised_is_refused(
    connect: Callable[..., Client], topic: str, user: dict[str, str], reason: int
) -> None:
    client = connect()
    client.publish(topic, b"never", 1, **user)
    assert client.reasons == [reason]
    client.publish("elsewhere", b"still here", 1)
    assert client.reasons == [reason, 0]


def test_mqtt_3_has_no_way_to_say_no_but_to_end(connect: Callable[..., Client]) -> None:
    client = connect(version=MQTTProtocolVersion.MQTTv311)
    client.publish("$delayed/soon/a", b"never", 1)
    eventually(lambda: bool(client.ended))


def test_a_run_of_late_and_usual_messages_keeps_its_answers(
    broker: EmbeddedBroker, connect: Callable[..., Client]
) -> None:
    reader, writer, topic = connect(), connect(), f"late/{next(names)}"
    reader.subscribe(topic)
    for number in range(60):
        late = f"$delayed/3600/{topic}" if number % 3 else topic
        writer.paho.publish(late, b"%d" % number, number % 2 + 1)
    eventually(lambda: len(writer.reasons) == 60 and len(reader.got) == 20)
    assert set(writer.reasons) == {0}
    broker.clock.advance(hours=1)
    eventually(lambda: len(reader.got) == 60)
    assert sorted(int(payload) for _, payload, _ in reader.got) == list(range(60))


def test_it_reaches_amqp_queues_when_due(broker: EmbeddedBroker, connect: Callable[..., Client]) -> None:
    connection = pika.BlockingConnection(pika.URLParameters(broker.amqp_url()))
    channel = connection.channel()
    name = f"q{next(names)}"
    channel.queue_declare(name)
    channel.queue_bind(name, "amq.topic", f"late.{name}")
    connect().publish(f"$delayed/3600/late/{name}", b"late", 1)
    assert channel.basic_get(name)[2] is None
    broker.clock.advance(hours=1)
    method, _properties, body = channel.basic_get(name)
    assert (method.routing_key, body) == (f"late.{name}", b"late")
    connection.close()


@pytest.mark.parametrize("released", [False, True], ids=["sent again", "released"])
def test_a_late_message_with_qos_2_is_received_once_though_the_broker_is_killed(released: bool) -> None:
    with EmbeddedBroker(doors=("mqtt",)) as broker:
        topic = f"late/{next(names)}"
        late = Publish(f"$delayed/3600/{topic}", b"once", QoS.EXACTLY_ONCE, packet_id=7)
        connect = Connect("device", clean_start=False, properties=Sent(session_expiry_interval=86_400))
        with Wire(broker.mqtt_port) as wire:
            wire.send(connect)
            wire.expect(Connack)
            wire.send(late)
            assert wire.expect(Pubrec).packet_id == 7
            broker.kill()
        broker.start()
        with Wire(broker.mqtt_port) as wire:
            wire.send(connect)
            assert wire.expect(Connack).session_present
            if not released:
                wire.send(replace(late, dup=True))
                assert wire.expect(Pubrec).reason is ReasonCode.SUCCESS
            wire.send(Pubrel(7))
            assert wire.expect(Pubcomp).reason is ReasonCode.SUCCESS
        reader = Client(broker)
        reader.subscribe(topic)
        broker.clock.advance(hours=1, seconds=1)
        eventually(lambda: bool(reader.got))
        broker.clock.advance(hours=1)
        assert reader.got == [(topic, b"once", False)]
        reader.close()
