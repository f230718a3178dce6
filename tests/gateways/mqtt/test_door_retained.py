"""Retained messages: kept, found by filters, replaced and taken away. Over the wire."""

import pytest

from headrace.gateways.mqtt.packets import (
    Puback,
    Publish,
    QoS,
    RetainHandling,
    Suback,
    Subscribe,
    Subscription,
)
from headrace.gateways.mqtt.properties import Properties
from headrace.gateways.mqtt.reasons import Version

from .wire import Open, wait_seconds

both_versions = pytest.mark.parametrize("version", [Version.V3_1_1, Version.V5], ids=lambda one: one.name)


@both_versions
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_new_subscription_gets_the_last_retained_message(client: Open, name: str, version: Version, qos: int) -> None:
    writer = client(version=version)
    for payload in (b"old", b"new"):
        writer.publish(name, payload, qos, retain=True)
    reader = client(version=version)
    reader.subscribe(name, qos=2)
    (message,) = reader.take()
    assert (message.payload, message.qos, message.retain, message.dup) == (b"new", qos, True, False)
    reader.expect_nothing()


@both_versions
def test_message_without_the_flag_is_not_retained_and_replaces_nothing(
    client: Open, name: str, version: Version
) -> None:
    writer = client(version=version)
    writer.publish(name, b"kept", 1, retain=True)
    writer.publish(name, b"passing", 1)
    reader = client(version=version)
    reader.subscribe(name)
    assert reader.payloads(1) == [b"kept"]
    reader.expect_nothing()


@both_versions
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_empty_retained_message_takes_the_retained_one_away_and_is_delivered(
    client: Open, name: str, version: Version, qos: int
) -> None:
    writer, live = client(version=version), client(version=version)
    writer.publish(name, b"kept", 1, retain=True)
    live.subscribe(name, qos=2)
    assert live.payloads(1) == [b"kept"]
    writer.publish(name, b"", qos, retain=True)
    (message,) = live.take()
    assert message.payload == b"" and not message.retain
    late = client(version=version)
    late.subscribe(name)
    late.expect_nothing()


@both_versions
def test_established_subscription_sees_the_flag_cleared(client: Open, name: str, version: Version) -> None:
    reader, writer = client(version=version), client()
    reader.subscribe(name, qos=1)
    for qos in (0, 1):
        writer.publish(name, b"x", qos, retain=True)
        assert not reader.take()[0].retain


@pytest.mark.parametrize("retain", [True, False])
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_retain_as_published_keeps_the_flag(client: Open, name: str, retain: bool, qos: int) -> None:
    reader, writer = client(), client()
    reader.subscribe(Subscription(name, QoS(2), retain_as_published=True))
    writer.publish(name, b"x", qos, retain=retain)
    assert reader.take()[0].retain is retain


FILTERS = {
    "{}/#": {"a", "a/b", "a/b/c", "x/b"},
    "{}/+": {"a"},
    "{}/+/b": {"a/b", "x/b"},
    "{}/a/#": {"a", "a/b", "a/b/c"},
    "{}/a/b": {"a/b"},
    "{}/+/+/+": {"a/b/c"},
    "{}/b": set(),
}


@pytest.mark.parametrize("pattern", FILTERS)
def test_wildcards_find_retained_messages(client: Open, name: str, pattern: str) -> None:
    writer, reader = client(), client()
    for topic in ("a", "a/b", "a/b/c", "x/b"):
        writer.publish(f"{name}/{topic}", topic.encode(), 1, retain=True)
    reader.subscribe(pattern.format(name))
    found = [one for one in reader.seen_all() if isinstance(one, Publish)]
    assert {one.payload.decode() for one in found} == FILTERS[pattern]
    assert len(found) == len(FILTERS[pattern])


def test_wildcard_at_the_front_finds_no_retained_message_behind_a_dollar(client: Open, name: str) -> None:
    writer, reader = client(), client()
    writer.publish(f"$mine/{name}", b"x", 1, retain=True)
    reader.subscribe("#", "+/" + name)
    assert not [one for one in reader.seen_all() if isinstance(one, Publish) and name in one.topic]
    reader.subscribe("$mine/+")
    assert name in reader.take()[0].topic
    writer.publish(f"$mine/{name}", b"", 1, retain=True)


@pytest.mark.parametrize("handling", list(RetainHandling))
def test_retain_handling_says_when_retained_messages_are_sent(
    client: Open, name: str, handling: RetainHandling
) -> None:
    writer, reader = client(), client()
    writer.publish(name, b"kept", 1, retain=True)
    counts = []
    for _ in range(2):
        reader.subscribe(Subscription(name, retain_handling=handling))
        counts.append(len(reader.seen_all()))
    wanted = {RetainHandling.SEND: [1, 1], RetainHandling.SEND_IF_NEW: [1, 0], RetainHandling.DO_NOT_SEND: [0, 0]}
    assert counts == wanted[handling]


def test_retained_messages_are_sent_again_when_a_subscription_is_made_again_in_3_1_1(client: Open, name: str) -> None:
    writer, reader = client(), client(version=Version.V3_1_1)
    writer.publish(name, b"kept", 1, retain=True)
    for _ in range(2):
        reader.subscribe(name)
        assert reader.payloads(1) == [b"kept"]


def test_retained_message_comes_with_its_properties_and_the_subscriptions_identifier(client: Open, name: str) -> None:
    writer, reader = client(), client()
    pairs = (("b", "1"), ("a", "2"))
    writer.publish(name, b"kept", 1, retain=True, content_type="text/plain", user_properties=pairs)
    reader.subscribe(name, subscription_identifiers=(9,))
    wanted = Properties(content_type="text/plain", user_properties=pairs, subscription_identifiers=(9,))
    assert reader.take()[0].properties == wanted


def test_retained_message_is_not_sent_to_a_shared_subscription(client: Open, name: str) -> None:
    writer, reader = client(), client()
    writer.publish(name, b"kept", 1, retain=True)
    reader.subscribe(f"$share/g/{name}")
    reader.expect_nothing()


def test_retained_message_lives_as_long_as_it_says(client: Open, name: str) -> None:
    writer, reader = client(), client()
    writer.publish(f"{name}/long", b"kept", 1, retain=True, message_expiry_interval=1000)
    writer.publish(f"{name}/short", b"kept", 1, retain=True, message_expiry_interval=1)
    wait_seconds(writer, f"{name}x", 2)
    reader.subscribe(f"{name}/+")
    (message,) = reader.take()
    left = message.properties.message_expiry_interval
    assert message.topic == f"{name}/long" and left is not None and 900 < left < 1000
    reader.expect_nothing()


def test_no_local_holds_for_ones_own_retained_messages(client: Open, name: str) -> None:
    one, other = client(name), client()
    one.publish(f"{name}/own", b"own", 1, retain=True)
    other.publish(f"{name}/other", b"other", 1, retain=True)
    one.subscribe(Subscription(f"{name}/+", no_local=True))
    assert one.payloads(1) == [b"other"]
    one.expect_nothing()


def test_each_of_many_filters_gets_its_retained_messages(client: Open, name: str) -> None:
    writer, reader = client(), client()
    for topic in ("a", "b", "c"):
        writer.publish(f"{name}/{topic}", topic.encode(), 1, retain=True)
    reader.subscribe(f"{name}/a", f"{name}/c", f"{name}/nothing")
    assert sorted(reader.payloads(2)) == [b"a", b"c"]
    reader.expect_nothing()


def test_retained_messages_obey_the_window(client: Open, name: str) -> None:
    writer, reader = client(), client(receive_maximum=2)
    for number in range(5):
        writer.publish(f"{name}/{number}", b"%d" % number, 1, retain=True)
    reader.subscribe(f"{name}/+", qos=1)
    assert len(reader.seen_all()) == 2


@pytest.mark.parametrize("lasting", [False, True])
def test_message_retained_while_a_subscription_is_made_comes_exactly_once(
    client: Open, name: str, lasting: bool
) -> None:
    writer = client()
    reader = client(name, session_expiry_interval=300 if lasting else 0)
    reader.subscribe(f"{name}/last", qos=1)
    for number in range(100):
        topic = f"{name}/{number}"
        reader.send(Subscribe(100 + number, (Subscription(topic, QoS(1)),)))
        writer.send(Publish(topic, b"x", QoS(1), True, packet_id=100 + number))
    for _ in range(100):
        writer.expect(Puback)
    # The answer to a ping may overtake what a session has yet to read from the log; a last message does not.
    writer.publish(f"{name}/last", b"x", 1)
    topics: list[str] = []
    answered = 0
    while answered < 100 or f"{name}/last" not in topics:
        match reader.receive():
            case Publish() as message:
                topics.append(message.topic)
            case other:
                assert isinstance(other, Suback), f"a message or the answer to SUBSCRIBE expected, not {other}"
                answered += 1
    topics += [one.topic for one in reader.seen_all() if isinstance(one, Publish)]
    assert sorted(topics) == sorted(f"{name}/{end}" for end in [*range(100), "last"])
