"""Exchanges bound to `amq.topic`, and publishers who want to know whether anybody listens. By wire and pika."""

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import UnroutableError

from headrace.gateways.mqtt.packets import Publish

from .conftest import MqttBroker
from .wire import Open


@pytest.fixture
def channel(broker: MqttBroker) -> BlockingChannel:
    opened = broker.connect().channel()
    opened.confirm_delivery()
    return opened


def upstream_of_topic(channel: BlockingChannel, name: str) -> str:
    channel.exchange_declare(name, "fanout", durable=True)
    channel.exchange_bind("amq.topic", name)
    return name


def test_subscriber_gets_what_reaches_the_topic_exchange_by_way_of_another(
    client: Open, channel: BlockingChannel, name: str
) -> None:
    subscriber = client()
    subscriber.subscribe(f"{name}/#", qos=1)
    channel.basic_publish(upstream_of_topic(channel, name), f"{name}.a", b"x", pika.BasicProperties(delivery_mode=2))
    found = subscriber.expect(Publish)
    assert (found.topic, found.payload, int(found.qos)) == (f"{name}/a", b"x", 1)


def test_sleeping_session_finds_it_when_it_wakes(client: Open, channel: BlockingChannel, name: str) -> None:
    sleeper = client(name, session_expiry_interval=600)
    sleeper.subscribe(f"{name}/#", qos=1)
    sleeper.disconnect()
    channel.basic_publish(upstream_of_topic(channel, name), f"{name}.a", b"x", pika.BasicProperties(delivery_mode=2))
    awake = client(name, clean_start=False, session_expiry_interval=600)
    assert awake.expect(Publish).payload == b"x"


def test_queue_bound_to_the_topic_exchange_gets_it_once(client: Open, channel: BlockingChannel, name: str) -> None:
    client().subscribe(f"{name}/#")
    channel.queue_declare(name, durable=True)
    channel.queue_bind(name, "amq.topic", f"{name}.#")
    channel.basic_publish(upstream_of_topic(channel, f"{name}-up"), f"{name}.a", b"x")
    assert channel.basic_get(name, auto_ack=True)[2] == b"x"
    assert channel.basic_get(name, auto_ack=True)[0] is None


def test_mandatory_message_that_only_a_subscriber_gets_is_not_returned(
    client: Open, channel: BlockingChannel, name: str
) -> None:
    subscriber = client()
    subscriber.subscribe(f"{name}/a")
    channel.basic_publish("amq.topic", f"{name}.a", b"x", mandatory=True)
    assert subscriber.expect(Publish).payload == b"x"
    with pytest.raises(UnroutableError):
        channel.basic_publish("amq.topic", f"{name}.b", b"x", mandatory=True)
