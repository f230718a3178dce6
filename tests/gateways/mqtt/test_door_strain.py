"""Clients that read nothing, acknowledge nothing, flood, or send the longest they may: short samples, over the wire.

The broker's memory stays bounded and others are served.
"""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from select import select

import pytest

from headrace.gateways.mqtt.encoder import PINGREQ, encode_packet
from headrace.gateways.mqtt.packets import Puback, Publish, Pubrec, QoS, Suback, Subscribe, Subscription
from headrace.gateways.mqtt.reasons import ReasonCode, Version

from .conftest import MqttBroker
from .wire import Open, Wire

MIB = 1024 * 1024

# What is cached of the log for everybody is kept small, so that what one client costs can be seen.
CONFIG = """
[storage]
tail_cache_bytes = "1MiB"

[mqtt]
write_buffer_bytes = "64KiB"
topic_levels_max = 32768
retained_count_max = 2500
"""


@contextmanager
def growth_below(broker: MqttBroker, limit_bytes: int) -> Iterator[None]:
    before = broker.resident_bytes()
    yield
    grown = broker.resident_bytes() - before
    assert grown < limit_bytes, f"{grown / MIB:.0f} MiB more"


def publish_many(writer: Wire, topic: str, count: int, size: int) -> None:
    """With QoS 1; returns when all are acknowledged."""
    payload = bytes(size)
    for start in range(0, count, 500):
        writer.send(*[Publish(topic, payload, QoS(1), packet_id=number + 1) for number in range(start, start + 500)])
        for _ in range(500):
            writer.expect(Puback)


@pytest.mark.parametrize("qos", [0, 1])
def test_client_that_reads_nothing_costs_little_and_gets_all_when_it_reads(
    broker: MqttBroker, client: Open, name: str, qos: int
) -> None:
    slow, quick, writer = client(), client(), client()
    slow.subscribe(name, qos=qos)
    quick.subscribe(name, qos=qos)
    count, size = 10_000, 4_096
    # They are 40 MiB in all.
    with growth_below(broker, 25 * MIB):
        for _ in range(count // 500):
            publish_many(writer, name, 500, size)
            assert all(len(payload) == size for payload in quick.payloads(500))
    assert all(len(payload) == size for payload in slow.payloads(count))


def test_client_that_acknowledges_nothing_costs_its_window(broker: MqttBroker, client: Open, name: str) -> None:
    silent, quick, writer = client(), client(), client()
    silent.subscribe(name, qos=1)
    quick.subscribe(name, qos=1)
    # The window of a thousand is 4 MiB.
    with growth_below(broker, 25 * MIB):
        for _ in range(20):
            publish_many(writer, name, 500, 4_096)
            assert len(quick.payloads(500)) == 500
    held = [one for one in silent.seen_all() if isinstance(one, Publish)]
    assert len(held) == 1_000
    silent.send(*[Puback(one.packet_id) for one in held])
    assert len(silent.payloads(9_000)) == 9_000


def test_flood_of_pings_is_answered_and_others_are_served(client: Open, name: str) -> None:
    flooding, other = client(), client()
    other.subscribe(name)
    for _ in range(20):
        flooding.send_octets(PINGREQ * 1_000)
        other.publish(f"{name}/x", b"x", 1)
        for _ in range(1_000):
            flooding.receive()
    other.ping()


def test_client_that_reads_no_answers_is_not_read_either(client: Open, name: str) -> None:
    flooding, other = client(), client()
    flooding.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8_192)
    # Each is answered with a sentence.
    chunk = encode_packet(Publish("$SYS/x", b"x", QoS(1), packet_id=1), Version.V5) * 4_096
    place = total = 0
    # Sockets hold some MiB; then there must be an end, for a broker that reads on would hold the answers.
    while select([], [flooding.socket], [], 1.0)[1]:
        sent = flooding.socket.send(memoryview(chunk)[place:])
        place, total = (place + sent) % len(chunk), total + sent
        assert total < 32 * MIB
    other.ping()
    other.publish(name, b"x", 1)
    # Once it reads it is served again.
    for _ in range(5_000):
        assert flooding.expect(Puback).reason is ReasonCode.NOT_AUTHORIZED


def test_flood_of_subscriptions_meets_a_limit(client: Open, name: str) -> None:
    one, other = client(), client()
    refused = 0
    for start in range(0, 12_000, 1_000):
        wanted = tuple(Subscription(f"{name}/{number}/+/#") for number in range(start, start + 1_000))
        one.send(Subscribe(1 + start, wanted))
        answer = one.expect(Suback)
        refused += sum(reason is ReasonCode.QUOTA_EXCEEDED for reason in answer.reasons)
    assert refused == 2_000
    other.publish(f"{name}/5/a/b", b"x", 1)
    assert one.payloads(1) == [b"x"]


def test_retained_messages_of_subscriptions_made_again_and_again_do_not_pile_up(
    broker: MqttBroker, client: Open, name: str
) -> None:
    writer, greedy = client(), client()
    for number in range(500):
        writer.publish(f"{name}/{number}", bytes(1_000), 1, retain=True)
    with growth_below(broker, 40 * MIB):
        for number in range(1_000):
            greedy.send(Subscribe(1 + number, (Subscription(f"{name}/+"),)))
        writer.ping()
    answers: list[ReasonCode] = []
    while len(answers) < 1_000:
        found = greedy.receive()
        if isinstance(found, Suback):
            answers += found.reasons
    assert answers[0] is ReasonCode.SUCCESS and ReasonCode.QUOTA_EXCEEDED in answers
    while greedy.seen_all():
        pass
    assert greedy.subscribe(f"{name}/+").reasons == (ReasonCode.SUCCESS,)


def test_very_many_topics_are_forgotten_again(broker: MqttBroker, client: Open, name: str) -> None:
    writer, reader = client(), client()
    reader.subscribe(f"{name}/#")
    total = 70_000
    # A first round fills what is bounded in entries.
    for number in range(0, total, 1_000):
        writer.send(*[Publish(f"{name}/first/{one}", b"x") for one in range(number, number + 1_000)])
        assert len(reader.payloads(1_000)) == 1_000
    with growth_below(broker, 30 * MIB):
        for number in range(0, total, 1_000):
            writer.send(*[Publish(f"{name}/second/{one}", b"x") for one in range(number, number + 1_000)])
            assert len(reader.payloads(1_000)) == 1_000


def test_longest_topics_are_not_kept(broker: MqttBroker, client: Open, name: str) -> None:
    writer, reader = client(), client()
    reader.subscribe(f"{name}/+")
    # They are 60 MB in all.
    with growth_below(broker, 25 * MIB):
        for number in range(1_000):
            writer.send(Publish(f"{name}/{number}-".ljust(60_000, "x"), b"x"))
            assert reader.expect(Publish).payload == b"x"


def test_deepest_topics_and_filters_are_matched(client: Open, name: str) -> None:
    reader, writer = client(), client()
    depth = 20_000
    deep = f"{name}" + "/a" * depth
    wild = f"{name}" + "/+" * depth
    reader.subscribe(deep, qos=1)
    reader.subscribe(wild, qos=1)
    reader.subscribe(f"{name}" + "/+" * (depth - 1) + "/#", qos=1)
    writer.publish(deep, b"deep", 1, retain=True)
    assert reader.payloads(1) == [b"deep"]
    late = client()
    late.subscribe(wild, qos=1)
    assert late.payloads(1) == [b"deep"]
    writer.publish(deep, b"", 1, retain=True)
    assert reader.payloads(1) == [b""]
    reader.unsubscribe(deep, wild)
    writer.publish(deep, b"again", 1)
    assert reader.payloads(1) == [b"again"]


def test_longest_client_identifiers_are_refused_one_by_one(broker: MqttBroker, client: Open, name: str) -> None:
    other = client()
    other.subscribe(name)

    def refuse(first: int, count: int) -> None:
        for number in range(first, first + count):
            with broker.wire() as one:
                answer = one.connect(f"{number}".ljust(65_535, "x"), clean_start=False, session_expiry_interval=300)
                assert answer.reason is ReasonCode.CLIENT_IDENTIFIER_NOT_VALID
                one.expect_end()

    refuse(0, 20)
    # They are 20 MB in all.
    with growth_below(broker, 10 * MIB):
        refuse(20, 300)
    client().publish(name, b"x", 1)
    assert other.payloads(1) == [b"x"]


def test_connect_larger_than_a_stranger_may_send_is_refused_by_its_head(wire: Open) -> None:
    one = wire(Version.V3_1_1)
    one.send_octets(b"\x10\xff\xff\xff\x7f")
    one.expect_end()


def test_second_connects_end_their_connection_alone(wire: Open, client: Open, name: str) -> None:
    other = client()
    for _ in range(50):
        one = client()
        one.send_octets(b"\x10\x10\x00\x04MQTT\x05\x02\x00\x00\x00\x00\x03abc")
        one.expect_disconnect(ReasonCode.PROTOCOL_ERROR)
    other.ping()


def test_connections_that_come_and_go_leave_nothing(broker: MqttBroker, client: Open, name: str) -> None:
    def round_of(count: int) -> None:
        for number in range(count):
            with broker.wire() as one:
                one.connect(f"{name}-{number % 7}")
                one.subscribe(f"{name}/{number}/#", f"$share/g{number}/{name}", qos=1)
                one.publish(f"{name}/other/{number}", b"x", 1)

    round_of(100)
    with growth_below(broker, 15 * MIB):
        round_of(300)


def test_qos_2_publishes_that_are_never_released_meet_the_receive_maximum(client: Open, name: str) -> None:
    one = client(name, session_expiry_interval=300)
    for number in range(1, 1_001):
        one.send(Publish(name, b"x", QoS(2), packet_id=number))
    for _ in range(1_000):
        one.expect(Pubrec)
    one.send_octets(encode_packet(Publish(name, b"x", QoS(2), packet_id=2_000), Version.V5))
    one.expect_disconnect(ReasonCode.RECEIVE_MAXIMUM_EXCEEDED)


def test_flood_of_retained_topics_meets_a_limit_and_others_are_served(
    broker: MqttBroker, client: Open, name: str
) -> None:
    flooding, other = client(), client()
    other.publish(f"{name}/mine", b"1", 1, retain=True)
    payload = bytes(4_096)

    def flood(start: int, count: int) -> list[ReasonCode]:
        found: list[ReasonCode] = []
        for first in range(start, start + count, 500):
            flooding.send(
                *[
                    Publish(f"{name}/many/{number}", payload, QoS(1), retain=True, packet_id=1 + number % 65_535)
                    for number in range(first, first + 500)
                ]
            )
            found += [flooding.expect(Puback).reason for _ in range(500)]
        return found

    # How many are taken in one go beyond the limit is bounded by a read.
    flood(0, 3_000)
    with growth_below(broker, 20 * MIB):
        # They would be 40 MiB.
        assert set(flood(3_000, 10_000)) == {ReasonCode.QUOTA_EXCEEDED}
    # Whoever has one may replace it and take it away, and then there is room for another.
    assert other.publish(f"{name}/mine", b"2", 1, retain=True) is ReasonCode.SUCCESS
    late = client()
    late.subscribe(f"{name}/mine")
    assert late.payloads(1) == [b"2"]
    assert other.publish(f"{name}/new", b"x", 1, retain=True) is ReasonCode.QUOTA_EXCEEDED
    assert other.publish(f"{name}/new", b"x", 1) is ReasonCode.SUCCESS
    for number in range(3_000):
        flooding.publish(f"{name}/many/{number}", b"", 0, retain=True) if number % 500 == 499 else flooding.send(
            Publish(f"{name}/many/{number}", b"", retain=True)
        )
    assert other.publish(f"{name}/new", b"x", 1, retain=True) is ReasonCode.SUCCESS


def test_flood_of_deep_wildcards_costs_what_the_filters_cost(broker: MqttBroker, client: Open, name: str) -> None:
    greedy, reader, writer = client(), client(), client()
    reader.subscribe(f"{name}/#", qos=1)
    with growth_below(broker, 60 * MIB):
        for first in range(0, 2_000, 100):
            wanted = tuple(Subscription(f"{name}/{number}" + "/+" * 120) for number in range(first, first + 100))
            assert greedy.subscribe(*wanted).reasons == (ReasonCode.SUCCESS,) * 100
    # A topic that all of them are looked at for, and one that goes down to the bottom of one.
    writer.publish(f"{name}/x" + "/a" * 119, b"1", 1)
    writer.publish(f"{name}/7" + "/a" * 120, b"2", 1)
    assert reader.payloads(2) == [b"1", b"2"]
    assert greedy.payloads(1) == [b"2"]
