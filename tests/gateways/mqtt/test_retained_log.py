"""Retained messages whose payloads are in the log and not in memory, and whose publishers have lost their rights."""

from contextlib import ExitStack
from pathlib import Path

import pika
import pytest

from headrace.gateways.mqtt.retained import LOADED_BYTES_MAX, Retained, RetainedMessages

from .conftest import MqttBroker
from .wire import Open, Wire

USERS = """
[mqtt]
retained_bytes_max = "4KiB"

[[users]]
name = "guest"
password = "guest"
tags = ["administrator"]

[[users]]
name = "device"
password = "secret"

[[permissions]]
user = "guest"
vhost = "/"
configure = ".*"
write = ".*"
read = ".*"

[[permissions]]
user = "device"
vhost = "/"
configure = ""
write = ".*"
read = ".*"
"""
CONFIG = USERS
DEVICE = {"user": "device", "password": b"secret"}
RETAINED = pika.BasicProperties(headers={"x-retain": True}, delivery_mode=2)


def without_its_right(user: str) -> str:
    """USERS, but that this one may publish nothing."""
    before, name, after = USERS.rpartition(f'user = "{user}"')
    return before + name + after.replace('write = ".*"', 'write = "^$"', 1)


def message(topic: str, size: int) -> Retained:
    return Retained(topic.encode(), b"", b"x" * size, 0, stored=0)


def payloads(reader: Wire, topic_filter: str, count: int) -> dict[str, bytes]:
    reader.subscribe(topic_filter, qos=1)
    found = {one.topic: one.payload for one in reader.take(count)}
    reader.unsubscribe(topic_filter)
    return found


def test_payloads_are_in_memory_as_long_as_the_budget_lasts() -> None:
    messages = RetainedMessages(1000)
    for number in range(5):
        messages.put(message(f"t/{number}", 300))
    assert messages.byte_count == 900
    assert [one.is_loaded for one in sorted(messages.matching("t/#", 0), key=lambda one: one.topic)] == [
        True,
        True,
        True,
        False,
        False,
    ]
    messages.remove(b"t/0")
    messages.put(message("t/4", 300))
    assert messages.byte_count == 900


def test_large_payloads_are_never_in_memory() -> None:
    messages = RetainedMessages(1 << 30)
    messages.put(message("t", LOADED_BYTES_MAX + 1))
    assert messages.byte_count == 0


@pytest.mark.parametrize("size", [1_000, 100_000])
def test_messages_beyond_the_budget_come_all_the_same(client: Open, name: str, size: int) -> None:
    writer = client()
    sent = {f"{name}/{number}": b"%d " % number + bytes(size) for number in range(12)}
    for topic, payload in sent.items():
        writer.publish(topic, payload, 1, retain=True)
    assert payloads(client(), f"{name}/#", 12) == sent
    writer.publish(f"{name}/3", b"newer" + bytes(size), 1, retain=True)
    writer.publish(f"{name}/4", b"", 1, retain=True)
    del sent[f"{name}/4"]
    assert payloads(client(), f"{name}/#", 11) == sent | {f"{name}/3": b"newer" + bytes(size)}


def test_messages_beyond_the_budget_survive_a_restart(tmp_path: Path) -> None:
    with MqttBroker(tmp_path, config=CONFIG) as broker, ExitStack() as wires:
        writer = wires.enter_context(broker.wire())
        writer.connect()
        sent = {f"t/{number}": b"%d " % number + bytes(1_000) for number in range(12)}
        for topic, payload in sent.items():
            writer.publish(topic, payload, 0, retain=True)
        broker.restart()
        reader = wires.enter_context(broker.wire())
        reader.connect()
        assert payloads(reader, "t/#", 12) == sent


def test_who_has_lost_the_right_to_publish_is_no_longer_heard_by_new_subscribers(
    broker: MqttBroker, client: Open, name: str
) -> None:
    device, other = client("device-1", **DEVICE), client()
    device.publish(f"{name}/device", b"hello", 1, retain=True)
    other.publish(f"{name}/other", b"hello", 1, retain=True)
    assert payloads(client(), f"{name}/#", 2).keys() == {f"{name}/device", f"{name}/other"}
    broker.reload(without_its_right("device"))
    reader = client()
    assert payloads(reader, f"{name}/#", 1).keys() == {f"{name}/other"}
    reader.expect_nothing()
    broker.reload(USERS)
    assert payloads(client(), f"{name}/#", 2).keys() == {f"{name}/device", f"{name}/other"}


def test_who_published_over_amqp_is_known_too_and_by_way_of_another_exchange_is_not(
    tmp_path: Path,
) -> None:
    with MqttBroker(tmp_path, config=CONFIG) as broker, ExitStack() as wires:

        def found(count: int) -> set[str]:
            reader = wires.enter_context(broker.wire())
            reader.connect()
            topics = payloads(reader, "a/#", count).keys()
            reader.expect_nothing()
            return set(topics)

        admin = broker.connect().channel()
        admin.exchange_declare("other", "topic")
        admin.exchange_bind("amq.topic", "other", "#")
        device = broker.connect(user="device", password="secret").channel()
        device.confirm_delivery()
        for exchange, key in (("amq.topic", "a.device"), ("other", "a.around")):
            device.basic_publish(exchange, key, b"hello", RETAINED)
        admin.confirm_delivery()
        admin.basic_publish("amq.topic", "a.guest", b"hello", RETAINED)
        assert found(3) == {"a/device", "a/around", "a/guest"}
        broker.reload(without_its_right("device"))
        assert found(2) == {"a/around", "a/guest"}
        # It is written down with the message.
        broker.restart()
        assert found(2) == {"a/around", "a/guest"}
        broker.reload(USERS)
        assert found(3) == {"a/device", "a/around", "a/guest"}
