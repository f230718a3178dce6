"""Shared subscriptions: who of a group gets a message, and what becomes of it when its member goes. Over the wire."""

import pytest
from pika.exceptions import ChannelClosedByBroker
from tests.running_broker import eventually

from headrace.gateways.mqtt.packets import Puback, Publish, Pubrec, QoS, Subscription
from headrace.gateways.mqtt.reasons import ReasonCode, Version

from .conftest import MqttBroker
from .wire import Open, Wire

both_versions = pytest.mark.parametrize("version", [Version.V3_1_1, Version.V5], ids=lambda one: one.name)


def messages(wire: Wire) -> list[Publish]:
    return [one for one in wire.seen_all() if isinstance(one, Publish)]


def publish_some(writer: Wire, topic: str, count: int, qos: int = 1) -> list[bytes]:
    payloads = [b"%d" % number for number in range(count)]
    for payload in payloads:
        writer.publish(topic, payload, qos)
    return payloads


@both_versions
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_each_message_goes_to_one_member_and_all_get_their_share(
    client: Open, name: str, version: Version, qos: int
) -> None:
    members = [client(version=version) for _ in range(3)]
    for one in members:
        assert one.subscribe(f"$share/{name}/{name}/#", qos=qos).reasons == (qos,)
    sent = publish_some(client(), f"{name}/a", 30, qos)
    found: list[list[bytes]] = [[], [], []]

    def all_came() -> bool:
        for one, got in zip(members, found, strict=True):
            got += [message.payload for message in messages(one)]
        return sum(map(len, found)) >= 30

    eventually(all_came)
    assert sorted(payload for got in found for payload in got) == sorted(sent)
    assert [len(got) for got in found] == [10, 10, 10]


def test_members_get_messages_with_the_qos_each_was_granted(client: Open, name: str) -> None:
    members = [client() for _ in range(3)]
    for qos, one in enumerate(members):
        one.subscribe(f"$share/{name}/{name}", qos=qos)
    publish_some(client(), name, 30, 2)
    for qos, one in enumerate(members):
        found = messages(one)
        assert found and {message.qos for message in found} == {qos}


def test_groups_and_plain_subscriptions_do_not_take_from_each_other(client: Open, name: str) -> None:
    first, second, plain, writer = client(), client(), client(), client()
    first.subscribe(f"$share/{name}1/{name}", qos=1)
    second.subscribe(f"$share/{name}2/{name}", qos=1)
    plain.subscribe(name, qos=1)
    sent = publish_some(writer, name, 5)
    for one in (first, second, plain):
        assert one.payloads(5) == sent
        one.expect_nothing()


def test_client_with_a_plain_and_a_shared_subscription_gets_both(client: Open, name: str) -> None:
    one = client()
    one.subscribe(f"$share/{name}/{name}", qos=1, subscription_identifiers=(1,))
    one.subscribe(name, qos=1, subscription_identifiers=(2,))
    client().publish(name, b"x", 1)
    assert sorted(message.properties.subscription_identifiers for message in one.take(2)) == [(1,), (2,)]
    one.expect_nothing()


def test_same_share_name_with_another_filter_is_another_group(client: Open, name: str) -> None:
    one, other, writer = client(), client(), client()
    one.subscribe(f"$share/{name}/{name}/a", qos=1)
    other.subscribe(f"$share/{name}/{name}/+", qos=1)
    writer.publish(f"{name}/a", b"x", 1)
    assert one.payloads(1) == other.payloads(1) == [b"x"]


def test_unsubscribed_member_gets_nothing_more_and_the_others_all(client: Open, name: str) -> None:
    one, other, writer = client(), client(), client()
    for member in (one, other):
        member.subscribe(f"$share/{name}/{name}", qos=1)
    assert one.unsubscribe(f"$share/{name}/{name}").reasons == (ReasonCode.SUCCESS,)
    sent = publish_some(writer, name, 6)
    assert other.payloads(6) == sent
    one.expect_nothing()


def test_group_ends_with_its_last_member(client: Open, name: str) -> None:
    one, writer = client(), client()
    one.subscribe(f"$share/{name}/{name}", qos=1)
    one.disconnect()
    publish_some(writer, name, 3)
    again = client()
    again.subscribe(f"$share/{name}/{name}", qos=1)
    again.expect_nothing()


def test_messages_of_a_member_that_breaks_off_go_to_another(client: Open, name: str) -> None:
    one, other, writer = client(), client(), client()
    for member in (one, other):
        member.subscribe(f"$share/{name}/{name}", qos=1)
    sent = publish_some(writer, name, 10)
    held = messages(one)
    assert held
    one.cut()
    assert sorted(other.payloads(10)) == sorted(sent)
    other.expect_nothing()


def test_messages_of_a_lasting_member_wait_for_it(client: Open, name: str) -> None:
    one, other, writer = client(name, session_expiry_interval=300), client(), client()
    for member in (one, other):
        member.subscribe(f"$share/{name}/{name}", qos=1)
    publish_some(writer, name, 4)
    held = [message.payload for message in messages(one)]
    assert len(held) == 2
    one.cut()
    assert len(messages(other)) == 2
    other.expect_nothing()
    again = client(name, clean_start=False, session_expiry_interval=0)
    found = again.take(2)
    assert [message.payload for message in found] == held and all(message.dup for message in found)


def test_messages_of_a_lasting_member_go_to_another_when_its_session_ends(client: Open, name: str) -> None:
    one, other, writer = client(name, session_expiry_interval=300), client(), client()
    for member in (one, other):
        member.subscribe(f"$share/{name}/{name}", qos=1)
    sent = publish_some(writer, name, 4)
    one.cut()
    first = other.payloads(2)
    client(name, clean_start=True)
    assert sorted(first + other.payloads(2)) == sorted(sent)


def test_group_of_lasting_members_ends_with_the_last_session(broker: MqttBroker, client: Open, name: str) -> None:
    """Else it would go on gathering what nobody will ever get."""
    queue = f"$share/{name}/{name}"

    def is_there() -> bool:
        channel = broker.connect().channel()
        try:
            channel.queue_declare(queue, passive=True)
        except ChannelClosedByBroker as error:
            assert error.reply_code == 404
            return False
        return True

    for number in range(2):
        one = client(f"{name}-{number}", session_expiry_interval=300)
        one.subscribe(queue, qos=1)
        one.disconnect()
    assert is_there()
    client(f"{name}-0", clean_start=True)
    assert is_there()
    client(f"{name}-1", clean_start=True)
    eventually(lambda: not is_there())


def test_group_goes_on_without_its_sleeping_members(client: Open, name: str) -> None:
    one, other, writer = client(name, session_expiry_interval=300), client(), client()
    for member in (one, other):
        member.subscribe(f"$share/{name}/{name}", qos=1)
    one.disconnect()
    sent = publish_some(writer, name, 4)
    assert other.payloads(4) == sent


def test_group_of_lasting_members_gathers_while_all_sleep(client: Open, name: str) -> None:
    one, writer = client(name, session_expiry_interval=300), client()
    one.subscribe(f"$share/{name}/{name}", qos=1)
    one.disconnect()
    sent = publish_some(writer, name, 4)
    again = client(name, clean_start=False, session_expiry_interval=0)
    assert again.payloads(4) == sent


@pytest.mark.parametrize("expiry", [0, 1])
def test_qos_2_message_on_its_way_goes_to_nobody_else(client: Open, name: str, expiry: int) -> None:
    one, other, writer = client(name, session_expiry_interval=expiry), client(), client()
    one.subscribe(f"$share/{name}/{name}", qos=2)
    writer.publish(name, b"mine", 2)
    assert one.expect(Publish).payload == b"mine"
    other.subscribe(f"$share/{name}/{name}", qos=2)
    one.cut()
    # A clean start ends the session now, if the end of its connection has not.
    client(name, clean_start=True)
    writer.publish(name, b"next", 2)
    assert other.payloads(1) == [b"next"]
    other.expect_nothing()


def test_qos_2_message_on_its_way_is_completed_when_its_member_comes_back(client: Open, name: str) -> None:
    one, other, writer = client(name, session_expiry_interval=300), client(), client()
    one.subscribe(f"$share/{name}/{name}", qos=2)
    writer.publish(name, b"mine", 2)
    held = one.expect(Publish)
    other.subscribe(f"$share/{name}/{name}", qos=2)
    one.cut()
    again = client(name, clean_start=False, session_expiry_interval=0)
    found = again.expect(Publish)
    assert (found.packet_id, found.payload, found.dup) == (held.packet_id, b"mine", True)
    again.acknowledge(found)
    other.expect_nothing()


@pytest.mark.parametrize("kind", [Puback, Pubrec])
def test_message_refused_by_a_member_goes_to_nobody_else(client: Open, name: str, kind: type[Puback | Pubrec]) -> None:
    qos = 1 if kind is Puback else 2
    one, other, writer = client(), client(), client()
    one.subscribe(f"$share/{name}/{name}", qos=qos)
    writer.publish(name, b"bad", qos)
    message = one.expect(Publish)
    other.subscribe(f"$share/{name}/{name}", qos=qos)
    one.send(kind(message.packet_id, ReasonCode.UNSPECIFIED_ERROR))
    one.ping()
    one.cut()
    other.expect_nothing()


def test_member_gets_no_more_than_its_window_and_another_takes_the_rest(client: Open, name: str) -> None:
    narrow, wide, writer = client(receive_maximum=1), client(), client()
    for member in (narrow, wide):
        member.subscribe(f"$share/{name}/{name}", qos=1)
    publish_some(writer, name, 10)
    assert len(messages(narrow)) == 1
    assert len(messages(wide)) == 9


def test_wildcard_at_the_front_of_a_shared_filter_does_not_match_a_dollar(client: Open, name: str) -> None:
    one, writer = client(), client()
    one.subscribe(f"$share/{name}/+/{name}", qos=1)
    writer.publish(f"$mine/{name}", b"hidden", 1)
    writer.publish(f"mine/{name}", b"seen", 1)
    assert one.payloads(1) == [b"seen"]
    one.expect_nothing()


def test_retain_as_published_holds_for_shared_subscriptions(client: Open, name: str) -> None:
    one, writer = client(), client()
    one.subscribe(Subscription(f"$share/{name}/{name}", QoS(1), retain_as_published=True))
    writer.publish(name, b"x", 1, retain=True)
    assert one.take()[0].retain


def test_subscription_made_again_counts_with_its_new_qos(client: Open, name: str) -> None:
    one, writer = client(), client()
    for qos in (2, 0):
        one.subscribe(f"$share/{name}/{name}", qos=qos)
    publish_some(writer, name, 2, 2)
    assert [message.qos for message in one.take(2)] == [0, 0]
    one.expect_nothing()
