"""What is to happen while a client sleeps happens at its time, also if the broker was down when that came or before."""

from collections.abc import Iterator
from itertools import count

import paho.mqtt.client as mqtt
import pytest
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from tests.running_broker import eventually

from headrace.testing import EmbeddedBroker

DAY_S = 86_400
names = count()


@pytest.fixture
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(doors=("mqtt",)) as broker:
        yield broker


class Client:
    def __init__(
        self,
        broker: EmbeddedBroker,
        client_id: str,
        *,
        will_delay_s: int | None = None,
        will_topic: str = "wills",
        expiry_s: int = 100 * DAY_S,
        clean: bool = False,
    ) -> None:
        self.got: list[bytes] = []
        self.present: list[bool] = []
        self.ended: list[object] = []
        self.paho = mqtt.Client(CallbackAPIVersion.VERSION2, client_id=client_id, protocol=MQTTProtocolVersion.MQTTv5)
        if will_delay_s is not None:
            properties = Properties(PacketTypes.WILLMESSAGE)
            properties.WillDelayInterval = will_delay_s
            self.paho.will_set(will_topic, client_id.encode(), qos=1, properties=properties)
        self.paho.on_message = lambda _client, _data, message: self.got.append(message.payload)
        self.paho.on_connect = lambda _client, _data, flags, _reason, _p: self.present.append(flags.session_present)
        self.paho.on_disconnect = lambda *arguments: self.ended.append(arguments)
        properties = Properties(PacketTypes.CONNECT)
        properties.SessionExpiryInterval = expiry_s
        self.paho.connect(broker.host, broker.mqtt_port, clean_start=clean, properties=properties)
        self.paho.loop_start()
        eventually(self.paho.is_connected)

    def subscribe(self, topic: str) -> None:
        done: list[object] = []
        self.paho.on_subscribe = lambda *arguments: done.append(arguments)
        self.paho.subscribe(topic, 1)
        eventually(lambda: bool(done))

    def vanish(self, broker: EmbeddedBroker) -> None:
        """Without a goodbye; returns when the broker has noticed."""
        self.paho.loop_stop()
        socket = self.paho.socket()
        assert socket is not None
        socket.close()
        broker.clock.advance(0)

    def close(self) -> None:
        self.paho.disconnect()
        self.paho.loop_stop()


def reader(broker: EmbeddedBroker) -> Client:
    client = Client(broker, "reader")
    client.subscribe("wills")
    return client


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_a_will_that_waits_is_published_at_its_time_after_a_restart(broker: EmbeddedBroker, how: str) -> None:
    reader(broker).close()
    Client(broker, "device", will_delay_s=2 * DAY_S).vanish(broker)
    broker.clock.advance(days=1)
    getattr(broker, how)()
    broker.start()
    broker.clock.advance(hours=23)
    client = reader(broker)
    assert client.got == []
    broker.clock.advance(hours=2)
    eventually(lambda: client.got == [b"device"])
    client.close()


def test_a_will_whose_time_came_while_the_broker_was_down_is_published_at_the_start(broker: EmbeddedBroker) -> None:
    reader(broker).close()
    Client(broker, "device", will_delay_s=DAY_S).vanish(broker)
    broker.clock.advance(seconds=5)
    broker.stop()
    broker.clock.advance(days=3)
    broker.start()
    broker.clock.advance(seconds=1)
    client = reader(broker)
    eventually(lambda: client.got == [b"device"])
    client.close()


def test_a_will_is_published_once_though_the_broker_is_killed_behind_it(broker: EmbeddedBroker) -> None:
    reader(broker).close()
    Client(broker, "device", will_delay_s=3600).vanish(broker)
    broker.clock.advance(hours=1)
    broker.kill()
    broker.start()
    broker.clock.advance(hours=2)
    client = reader(broker)
    eventually(lambda: bool(client.got))
    broker.clock.advance(hours=2)
    assert client.got == [b"device"]
    client.close()


def test_a_client_that_came_back_takes_its_will_back_for_good(broker: EmbeddedBroker) -> None:
    reader(broker).close()
    Client(broker, "device", will_delay_s=3600).vanish(broker)
    back = Client(broker, "device")
    broker.clock.advance(seconds=5)
    broker.kill()
    broker.start()
    broker.clock.advance(days=1)
    client = reader(broker)
    assert client.got == []
    client.close()
    back.paho.loop_stop()


def test_a_will_may_be_delayed_by_its_topic_as_well(broker: EmbeddedBroker) -> None:
    client = reader(broker)
    Client(broker, "device", will_delay_s=0, will_topic="$delayed/3600/wills").vanish(broker)
    broker.clock.advance(minutes=59)
    assert client.got == []
    broker.clock.advance(minutes=2)
    eventually(lambda: client.got == [b"device"])
    client.close()


@pytest.mark.parametrize(("days", "present"), [(1, True), (3, False)])
def test_a_session_expires_at_its_time_though_the_broker_was_down(
    broker: EmbeddedBroker, days: int, present: bool
) -> None:
    Client(broker, "device", expiry_s=2 * DAY_S).close()
    broker.clock.advance(seconds=5)
    broker.stop()
    broker.clock.advance(days=days)
    broker.start()
    broker.clock.advance(seconds=1)
    client = Client(broker, "device")
    assert client.present == [present]
    client.close()
