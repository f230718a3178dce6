"""Shared subscriptions whose topics stick to their members (mqtt.shared_lanes). Over the wire."""

from pathlib import Path

from tests.running_broker import eventually

from headrace.gateways.mqtt.packets import Publish

from .conftest import MqttBroker
from .wire import Open, Wire

CONFIG = "[mqtt]\nshared_lanes = 16\n"


def gather(members: list[Wire], found: list[list[Publish]], count: int) -> None:
    def all_came() -> bool:
        for one, got in zip(members, found, strict=True):
            got += [message for message in one.seen_all() if isinstance(message, Publish)]
        return sum(map(len, found)) >= count

    eventually(all_came)


def test_a_topic_sticks_to_one_member_in_order_and_all_have_some(client: Open, name: str) -> None:
    members = [client() for _ in range(3)]
    for one in members:
        one.subscribe(f"$share/{name}/{name}/#", qos=1)
    writer = client()
    for number in range(120):
        writer.publish(f"{name}/{number % 24}", b"%d" % number, 1)
    found: list[list[Publish]] = [[], [], []]
    gather(members, found, 120)
    topics = [{message.topic for message in got} for got in found]
    assert all(topics) and sum(map(len, topics)) == 24
    for got in found:
        for topic in {message.topic for message in got}:
            numbers = [int(message.payload) for message in got if message.topic == topic]
            assert numbers == sorted(numbers)


def test_lanes_are_there_again_after_a_restart(tmp_path: Path, name: str) -> None:
    with MqttBroker(tmp_path, config=CONFIG) as broker:
        with broker.wire() as member:
            member.connect(name, session_expiry_interval=600)
            member.subscribe(f"$share/{name}/{name}/#", qos=1)
        with broker.wire() as writer:
            writer.connect()
            for number in range(20):
                writer.publish(f"{name}/{number % 5}", b"%d" % number, 1)
        broker.restart(kill=True)
        with broker.wire() as member:
            member.connect(name, clean_start=False, session_expiry_interval=600)
            found: list[list[Publish]] = [[]]
            gather([member], found, 20)
        for part in range(5):
            got = [int(one.payload) for one in found[0] if one.topic == f"{name}/{part}"]
            assert got == list(range(part, 20, 5))
