"""Tags of MQTT messages, and x-filter on subscriptions: plain, shared, asleep, after restarts; with AMQP's tags too."""

from collections.abc import Iterator
from typing import Any

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from tests.gateways.amqp.serving import Reader

from headrace.gateways.mqtt.packets import Publish, Subscription, Will
from headrace.gateways.mqtt.properties import Properties
from headrace.gateways.mqtt.reasons import ReasonCode, Version

from .conftest import MqttBroker
from .wire import Open, Wire

CONFIG = """
[[policies]]
name = "fleet"
pattern = "^amq\\\\.topic$"
apply_to = "exchanges"
definition = { tag-rules = { "fleet/{region}/#" = "region={region},mobile" } }
"""


@pytest.fixture
def channel(broker: MqttBroker) -> Iterator[BlockingChannel]:
    connection = broker.connect()
    yield connection.channel()
    connection.close()


def tags(*names: str) -> tuple[tuple[str, str], ...]:
    return tuple(("tag", name) for name in names)


def wanting(text: str) -> dict[str, Any]:
    return {"user_properties": (("x-filter", text),)}


def payloads(client: Wire, count: int) -> list[bytes]:
    return [client.expect(Publish).payload for _ in range(count)]


def publish_mixed(client: Wire, topic: str, qos: int = 1) -> None:
    client.publish(topic, b"1", qos, user_properties=tags("eu"))
    client.publish(topic, b"2", qos, user_properties=tags("us", "vip"))
    client.publish(topic, b"3", qos)
    client.publish(topic, b"4", qos, user_properties=tags("eu", "test", "region=eu"))


@pytest.mark.parametrize("qos", [0, 1])
def test_subscription_gets_what_its_filter_lets_through(client: Open, name: str, qos: int) -> None:
    eu, rest, every = client(), client(), client()
    eu.subscribe(f"{name}/#", qos=qos, **wanting("eu && !test"))
    rest.subscribe(f"{name}/#", qos=qos, **wanting("!eu || region = eu"))
    every.subscribe(f"{name}/#", qos=qos)
    publish_mixed(client(), f"{name}/a", qos)
    assert payloads(eu, 1) == [b"1"]
    assert payloads(rest, 3) == [b"2", b"3", b"4"]
    assert payloads(every, 4) == [b"1", b"2", b"3", b"4"]
    eu.seen_all()


def test_two_subscriptions_of_one_session_are_asked_each_for_itself(client: Open, name: str) -> None:
    both = client()
    both.subscribe(f"{name}/#", subscription_identifiers=(1,), **wanting("eu"))
    both.subscribe(f"{name}/a", subscription_identifiers=(2,), **wanting("test || us"))
    publish_mixed(client(), f"{name}/a")
    got = [both.expect(Publish) for _ in range(3)]
    assert [(one.payload, one.properties.subscription_identifiers) for one in got] == [
        (b"1", (1,)),
        (b"2", (2,)),
        (b"4", (1, 2)),
    ]


def test_filter_of_the_same_subscription_is_replaced(client: Open, name: str) -> None:
    one, writer = client(), client()
    one.subscribe(name, **wanting("eu"))
    one.subscribe(name, **wanting("us"))
    publish_mixed(writer, name)
    assert payloads(one, 1) == [b"2"]
    one.subscribe(name)
    publish_mixed(writer, name)
    assert payloads(one, 4) == [b"1", b"2", b"3", b"4"]


def test_retained_messages_are_filtered_as_well(client: Open, name: str) -> None:
    writer = client()
    for number, tag in enumerate(["eu", "us", "eu"]):
        writer.publish(f"{name}/{number}", b"%d" % number, 1, retain=True, user_properties=tags(tag))
    one = client()
    one.subscribe(f"{name}/#", **wanting("eu"))
    assert sorted(payloads(one, 2)) == [b"0", b"2"]
    one.seen_all()


def test_sleeping_session_wakes_with_what_its_filter_wants_also_after_a_restart(
    own_broker: MqttBroker, name: str
) -> None:
    for restarts in (False, True):
        with own_broker.wire() as sleeper:
            sleeper.connect(name, clean_start=True, session_expiry_interval=1000)
            sleeper.subscribe(f"{name}/#", qos=1, **wanting("eu && !test"))
            sleeper.disconnect()
        with own_broker.wire() as writer:
            writer.connect()
            publish_mixed(writer, f"{name}/a")
        if restarts:
            own_broker.restart(kill=True)
            with own_broker.wire() as writer:
                writer.connect()
                publish_mixed(writer, f"{name}/a")
        with own_broker.wire() as sleeper:
            assert sleeper.connect(name, clean_start=False, session_expiry_interval=1000).session_present
            assert payloads(sleeper, 1 + restarts) == [b"1"] * (1 + restarts)
            sleeper.seen_all()


def test_members_of_a_group_share_what_each_wants_and_nothing_piles_up(
    client: Open, channel: BlockingChannel, name: str
) -> None:
    group = f"$share/g/{name}/#"
    eu, us = client(name, session_expiry_interval=1000), client()
    eu.subscribe(group, qos=1, **wanting("eu"))
    us.subscribe(group, qos=1, **wanting("us"))
    publish_mixed(client(), f"{name}/a")
    assert payloads(eu, 2) == [b"1", b"4"]
    assert payloads(us, 1) == [b"2"]
    assert channel.queue_declare(group, passive=True).method.message_count == 0


def test_what_a_sleeping_member_wants_is_kept_for_it(client: Open, channel: BlockingChannel, name: str) -> None:
    group = f"$share/g/{name}/#"
    sleeper = client(f"{name}-s", session_expiry_interval=1000)
    sleeper.subscribe(group, qos=1, **wanting("us"))
    sleeper.disconnect()
    eu = client(f"{name}-e", session_expiry_interval=1000)
    eu.subscribe(group, qos=1, **wanting("eu"))
    publish_mixed(client(), f"{name}/a")
    assert payloads(eu, 2) == [b"1", b"4"]
    again = client(f"{name}-s", clean_start=False, session_expiry_interval=1000)
    assert payloads(again, 1) == [b"2"]
    assert channel.queue_declare(group, passive=True).method.message_count == 0


@pytest.mark.parametrize(
    ("values", "reason"), [(("eu &&",), "column 6"), (("eu", "us"), "2 times")], ids=["unreadable", "twice"]
)
def test_filter_that_cannot_be_is_refused_with_the_reason(
    client: Open, name: str, values: tuple[str, ...], reason: str
) -> None:
    one = client()
    told = one.subscribe(name, f"{name}/a", user_properties=tuple(("x-filter", value) for value in values))
    assert told.reasons == (ReasonCode.TOPIC_FILTER_INVALID,) * 2
    assert told.properties.reason_string is not None and reason in told.properties.reason_string
    client().publish(name, b"x", 1)
    one.seen_all()


def test_reason_of_a_refused_filter_that_would_not_fit_is_left_out(client: Open, name: str) -> None:
    one = client(name, maximum_packet_size=30)
    told = one.subscribe(name, user_properties=(("x-filter", "eu &&"),))
    assert told.reasons == (ReasonCode.TOPIC_FILTER_INVALID,)
    assert told.properties.reason_string is None
    one.ping()


def test_one_filter_too_many_in_a_group_is_refused(client: Open, name: str) -> None:
    group = f"$share/g/{name}"
    for number in range(16):
        assert client().subscribe(group, **wanting(f"t{number}")).reasons == (ReasonCode.SUCCESS,)
    late = client()
    told = late.subscribe(group, **wanting("another"))
    assert told.reasons == (ReasonCode.QUOTA_EXCEEDED,)
    assert told.properties.reason_string is not None and "16 different filters" in told.properties.reason_string
    assert late.subscribe(group, **wanting("t3")).reasons == (ReasonCode.SUCCESS,)


@pytest.mark.parametrize("qos", [1, 2])
def test_tags_that_cannot_be_kept_are_refused_for_that_message_alone(client: Open, name: str, qos: int) -> None:
    reader, writer = client(), client()
    reader.subscribe(name)
    assert writer.publish(name, b"bad", qos, user_properties=tags("")) is ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR
    assert not writer.publish(name, b"good", qos, user_properties=tags("eu")).failed
    assert payloads(reader, 1) == [b"good"]


def test_tags_cross_from_door_to_door(client: Open, channel: BlockingChannel, name: str) -> None:
    subscriber = client()
    subscriber.subscribe(f"{name}/#", **wanting("eu"))
    queue = channel.queue_declare("", exclusive=True).method.queue
    channel.queue_bind(queue, "amq.topic", f"{name}.#", {"x-filter": "eu"})
    publish_mixed(client(), f"{name}/a")
    channel.basic_publish("amq.topic", f"{name}.b", b"5", pika.BasicProperties(headers={"x-tags": "eu"}))
    channel.basic_publish("amq.topic", f"{name}.b", b"6", pika.BasicProperties(headers={"x-tags": "us"}))
    assert payloads(subscriber, 3) == [b"1", b"4", b"5"]
    assert Reader(channel, queue, no_ack=True).bodies(3) == [b"1", b"4", b"5"]


@pytest.mark.parametrize("version", [Version.V3_1_1, Version.V5], ids=lambda one: one.name)
def test_rule_tags_messages_of_clients_that_cannot(client: Open, channel: BlockingChannel, version: Version) -> None:
    region = f"eu-{version.name}"
    subscriber = client()
    subscriber.subscribe(Subscription("fleet/#"), **wanting(f"mobile && region = {region}"))
    queue = channel.queue_declare("", exclusive=True).method.queue
    channel.queue_bind(queue, "amq.topic", "#", {"x-filter": f"region = {region}"})
    writer = client(version=version)
    writer.publish(f"fleet/{region}/truck/1", b"1", 1)
    writer.publish("fleet/us/truck/1", b"2", 1)
    writer.publish(f"plant/{region}/1", b"3", 1)
    assert payloads(subscriber, 1) == [b"1"]
    subscriber.seen_all()
    assert Reader(channel, queue, no_ack=True).bodies(1) == [b"1"]
    channel.basic_publish("amq.topic", f"fleet.{region}.x", b"4")
    assert payloads(subscriber, 1) == [b"4"]


def test_tags_go_along_over_bindings_between_exchanges(client: Open, channel: BlockingChannel, name: str) -> None:
    channel.exchange_declare(name, "fanout")
    channel.exchange_bind("amq.topic", name)
    subscriber = client()
    subscriber.subscribe(f"{name}/#", **wanting("eu"))
    for body, tag in ((b"1", "eu"), (b"2", "us")):
        channel.basic_publish(name, f"{name}.a", body, pika.BasicProperties(headers={"x-tags": tag}))
    channel.queue_declare("", exclusive=True)
    assert payloads(subscriber, 1) == [b"1"]
    subscriber.seen_all()


def test_mandatory_message_that_no_subscription_wants_comes_back(
    client: Open, channel: BlockingChannel, name: str
) -> None:
    subscriber = client()
    subscriber.subscribe(name, **wanting("eu"))
    channel.confirm_delivery()
    channel.basic_publish("amq.topic", name, b"1", pika.BasicProperties(headers={"x-tags": "eu"}), mandatory=True)
    with pytest.raises(pika.exceptions.UnroutableError):
        channel.basic_publish("amq.topic", name, b"2", mandatory=True)
    assert payloads(subscriber, 1) == [b"1"]


def test_will_has_tags_and_one_that_cannot_be_kept_is_refused_at_once(wire: Open, client: Open, name: str) -> None:
    subscriber = client()
    subscriber.subscribe(name, **wanting("eu"))
    refused = wire()
    bad = Will(name, b"gone", properties=Properties(user_properties=tags("")))
    assert refused.connect(will=bad).reason is ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR
    for tag in ("us", "eu"):
        client(will=Will(name, tag.encode(), properties=Properties(user_properties=tags(tag)))).cut()
    assert payloads(subscriber, 1) == [b"eu"]


def test_group_keeps_what_a_sleeping_member_wants_over_a_restart(own_broker: MqttBroker, name: str) -> None:
    group, kept = f"$share/g/{name}/#", {"session_expiry_interval": 1000}
    with own_broker.wire() as sleeper:
        sleeper.connect(f"{name}-s", **kept)
        sleeper.subscribe(group, qos=1, **wanting("us"))
        sleeper.disconnect()
    own_broker.restart()
    with own_broker.wire() as eu, own_broker.wire() as writer, own_broker.wire() as again:
        eu.connect(f"{name}-e", **kept)
        eu.subscribe(group, qos=1, **wanting("eu"))
        writer.connect()
        publish_mixed(writer, f"{name}/a")
        assert payloads(eu, 2) == [b"1", b"4"]
        again.connect(f"{name}-s", clean_start=False, **kept)
        assert payloads(again, 1) == [b"2"]
