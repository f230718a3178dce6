"""A million distinct topics: as messages, as retained messages and as subscriptions. Slow: `make flood`.

The broker has its defaults. What one client costs stays bounded, and another is served all the while. Short samples of
the same are in test_door_strain.py.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.gateways.mqtt.encoder import encode_publish_run
from headrace.gateways.mqtt.packets import Puback, QoS, Suback, Subscribe, Subscription
from headrace.gateways.mqtt.reasons import ReasonCode, Version

from .conftest import MqttBroker
from .wire import Open, Wire

COUNT = 1_000_000
MIB = 1024 * 1024
V5 = Version.V5


@contextmanager
def bounded(broker: MqttBroker, what: str, limit_bytes: int) -> Iterator[None]:
    before, begun = broker.resident_bytes(), time.monotonic()
    yield
    grown = broker.resident_bytes() - before
    print(f"\n{what}: {grown / MIB:.0f} MiB more, {time.monotonic() - begun:.0f} s")
    assert grown < limit_bytes, f"{grown / MIB:.0f} MiB more"


class Healthy:
    """Publishes to itself now and then."""

    def __init__(self, wire: Wire, topic: str) -> None:
        self.wire = wire
        self.topic = topic
        wire.subscribe(topic, qos=1)

    def check(self) -> None:
        self.wire.send_octets(encode_publish_run(0x32, [self.topic.encode()], [b""], [b"x"], [60_000], V5))
        kinds = {type(self.wire.receive()).__name__ for _ in range(2)}
        assert kinds == {"Puback", "Publish"}, kinds
        self.wire.seen_all()


def published(writer: Wire, prefix: str, first: int, count: int, *, retain: bool) -> list[ReasonCode]:
    """With QoS 1; what each is answered."""
    topics = [f"{prefix}/{number}".encode() for number in range(first, first + count)]
    head = 0x33 if retain else 0x32
    writer.send_octets(encode_publish_run(head, topics, [b""] * count, [b"x" * 20] * count, range(1, count + 1), V5))
    return [writer.expect(Puback).reason for _ in range(count)]


def test_a_million_topics_are_not_remembered(broker: MqttBroker, client: Open, name: str) -> None:
    writer, reader, healthy = client(), client(), Healthy(client(), f"{name}-other")
    reader.subscribe(f"{name}/#")
    with bounded(broker, "a million topics", 200 * MIB):
        for first in range(0, COUNT, 1_000):
            assert set(published(writer, name, first, 1_000, retain=False)) == {ReasonCode.SUCCESS}
            reader.take(1_000)
            if first % 50_000 == 0:
                healthy.check()


def test_a_million_retained_topics_meet_their_limit(broker: MqttBroker, client: Open, name: str) -> None:
    writer, healthy = client(), Healthy(client(), f"{name}-other")
    refused = 0
    with bounded(broker, "a million retained topics", 250 * MIB):
        for first in range(0, COUNT, 1_000):
            refused += published(writer, name, first, 1_000, retain=True).count(ReasonCode.QUOTA_EXCEEDED)
            if first % 50_000 == 0:
                healthy.check()
    # What is in one read with the last that fits is taken with it.
    assert COUNT - 110_000 <= refused <= COUNT - 100_000


def test_a_million_subscriptions_meet_their_limit(broker: MqttBroker, client: Open, name: str) -> None:
    greedy, healthy = client(), Healthy(client(), f"{name}-other")
    granted = 0
    with bounded(broker, "a million subscriptions", 100 * MIB):
        for first in range(0, COUNT, 1_000):
            wanted = tuple(Subscription(f"{name}/{number}/+/#", QoS(1)) for number in range(first, first + 1_000))
            greedy.send(Subscribe(1 + first // 1_000, wanted))
            granted += greedy.expect(Suback).reasons.count(ReasonCode.GRANTED_QOS_1)
            if first % 50_000 == 0:
                healthy.check()
    assert granted == 10_000
