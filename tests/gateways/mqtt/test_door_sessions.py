"""Sessions: who has one, how long, what waits in it, and how it is resumed and taken over. Over the wire."""

import pytest

from headrace.gateways.mqtt.packets import (
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    QoS,
    Suback,
    Subscribe,
    Subscription,
)
from headrace.gateways.mqtt.reasons import ReasonCode, Version

from .wire import Open, Wire, wait_seconds

V3, V5 = Version.V3_1_1, Version.V5
both_versions = pytest.mark.parametrize("version", [V3, V5], ids=lambda one: one.name)


def lasting(version: Version) -> dict[str, object]:
    """How a client of this version asks for a session that outlives its connection."""
    return {"clean_start": False} if version is V3 else {"clean_start": False, "session_expiry_interval": 300}


def connected(wire: Wire, client_id: str, **settings: object) -> bool:
    """Whether the session was there."""
    connack = wire.connect(client_id, **settings)  # type: ignore[arg-type]
    assert connack.reason == 0
    return connack.session_present


# -- there or not -------------------------------------------------------------------------------------------------


@both_versions
def test_session_present_tells_whether_there_was_one(wire: Open, name: str, version: Version) -> None:
    for wanted in (False, True, True):
        one = wire(version)
        assert connected(one, name, **lasting(version)) is wanted
        one.disconnect()


@both_versions
def test_clean_start_ends_the_old_session_and_begins_a_new_one(wire: Open, name: str, version: Version) -> None:
    one = wire(version)
    connected(one, name, **lasting(version))
    one.subscribe(f"{name}/a", qos=1)
    one.disconnect()
    clean = wire(version)
    assert not connected(clean, name, clean_start=True)
    clean.publish(f"{name}/a", b"x", 1)
    clean.expect_nothing()
    clean.disconnect()
    again = wire(version)
    assert not connected(again, name, **lasting(version))


def test_clean_session_of_3_1_1_ends_with_its_connection(wire: Open, name: str) -> None:
    one = wire(V3)
    connected(one, name, clean_start=True)
    one.subscribe(f"{name}/a", qos=1)
    one.disconnect()
    assert not connected(wire(V3), name, clean_start=False)


@pytest.mark.parametrize("expiry", [None, 0])
def test_session_without_expiry_ends_with_its_connection_in_5(wire: Open, name: str, expiry: int | None) -> None:
    one = wire()
    connected(one, name, session_expiry_interval=expiry)
    one.cut()
    assert not connected(wire(), name, clean_start=False)


def test_clean_start_with_expiry_begins_a_session_that_lasts(wire: Open, name: str) -> None:
    one = wire()
    assert not connected(one, name, clean_start=True, session_expiry_interval=300)
    one.cut()
    assert connected(wire(), name, clean_start=False)


def test_session_ends_when_its_expiry_is_over(wire: Open, client: Open, name: str) -> None:
    one = wire()
    connected(one, name, session_expiry_interval=1)
    one.subscribe(f"{name}/a", qos=1)
    one.disconnect()
    wait_seconds(client(), name, 2)
    assert not connected(wire(), name, clean_start=False)


def test_expiry_counts_from_the_end_of_the_connection(wire: Open, client: Open, name: str) -> None:
    one = wire()
    connected(one, name, session_expiry_interval=1)
    wait_seconds(client(), name, 2)
    one.ping()
    one.disconnect(session_expiry_interval=100)
    assert connected(wire(), name, clean_start=False)


def test_disconnect_may_end_a_lasting_session(wire: Open, name: str) -> None:
    one = wire()
    connected(one, name, session_expiry_interval=300)
    one.disconnect(session_expiry_interval=0)
    assert not connected(wire(), name, clean_start=False)


def test_session_of_never_ending_expiry_is_kept(wire: Open, name: str) -> None:
    one = wire()
    connected(one, name, session_expiry_interval=0xFFFF_FFFF)
    one.disconnect()
    assert connected(wire(), name, clean_start=False, session_expiry_interval=0)


def test_sessions_of_both_versions_are_the_same_sessions(wire: Open, client: Open, name: str) -> None:
    one = wire(V3)
    connected(one, name, clean_start=False)
    one.subscribe(f"{name}/a", qos=1)
    one.disconnect()
    client().publish(f"{name}/a", b"x", 1, user_properties=(("a", "b"),))
    again = wire(V5)
    assert connected(again, name, clean_start=False)
    assert again.take()[0].properties.user_properties == (("a", "b"),)


def test_retained_messages_do_not_end_with_a_session(wire: Open, client: Open, name: str) -> None:
    one = wire(V3)
    connected(one, name, clean_start=True)
    one.publish(f"{name}/a", b"kept", 1, retain=True)
    one.disconnect()
    reader = client(version=V3)
    reader.subscribe(f"{name}/a")
    assert reader.payloads(1) == [b"kept"]


# -- what waits -----------------------------------------------------------------------------------------------------


@both_versions
def test_messages_wait_for_a_client_that_is_away(wire: Open, client: Open, name: str, version: Version) -> None:
    one = wire(version)
    connected(one, name, **lasting(version))
    one.subscribe(Subscription(f"{name}/1", QoS(1)), Subscription(f"{name}/2", QoS(2)))
    one.disconnect()
    writer = client()
    for number in range(10):
        writer.publish(f"{name}/{1 + number % 2}", b"%d" % number, 2)
    again = wire(version)
    assert connected(again, name, **lasting(version))
    found = again.take(10)
    assert [message.payload for message in found] == [b"%d" % number for number in range(10)]
    assert not any(message.dup for message in found)
    again.expect_nothing()


def test_messages_with_qos_0_do_not_wait(wire: Open, client: Open, name: str) -> None:
    one = wire()
    connected(one, name, session_expiry_interval=300)
    one.subscribe(f"{name}/+", qos=2)
    one.disconnect()
    writer = client()
    writer.publish(f"{name}/a", b"0", 0)
    writer.publish(f"{name}/a", b"1", 1)
    again = wire()
    connected(again, name, clean_start=False)
    assert again.payloads(1) == [b"1"]
    again.expect_nothing()


def test_subscription_with_qos_0_keeps_nothing_for_later(wire: Open, client: Open, name: str) -> None:
    one = wire()
    connected(one, name, session_expiry_interval=300)
    one.subscribe(f"{name}/+", qos=0)
    one.disconnect()
    client().publish(f"{name}/a", b"1", 1)
    again = wire()
    connected(again, name, clean_start=False)
    again.expect_nothing()


def test_subscriptions_are_resumed(wire: Open, client: Open, name: str) -> None:
    one = wire()
    connected(one, name, session_expiry_interval=300)
    one.subscribe(f"{name}/a", qos=1, subscription_identifiers=(5,))
    one.cut()
    again = wire()
    connected(again, name, clean_start=False)
    client().publish(f"{name}/a", b"live", 1)
    (message,) = again.take()
    assert message.payload == b"live" and message.properties.subscription_identifiers == (5,)


def publish_many(writer: Wire, topics: list[str], count: int) -> list[bytes]:
    """Messages 0, 1, 2, ... to the topics in turn, with QoS 1; returns when they are acknowledged."""
    payloads = [b"%d" % number for number in range(count)]
    for start in range(0, count, 500):
        numbers = range(start, min(count, start + 500))
        writer.send(
            *[
                Publish(topics[number % len(topics)], payloads[number], QoS(1), packet_id=1 + number)
                for number in numbers
            ]
        )
        for _ in numbers:
            writer.expect(Puback)
    return payloads


def test_new_subscription_of_a_woken_session_gets_nothing_from_before_it(wire: Open, client: Open, name: str) -> None:
    one = wire()
    connected(one, name, session_expiry_interval=300)
    one.subscribe(f"{name}/old", qos=1)
    one.disconnect()
    writer = client()
    sent = publish_many(writer, [f"{name}/old", f"{name}/new"], 8_000)
    again = wire()
    connected(again, name, clean_start=False)
    # It cannot have read all of that, so it is still behind when it subscribes.
    again.send(Subscribe(1, (Subscription(f"{name}/new", QoS(1)),)))
    found: list[bytes] = []
    while not isinstance(packet := again.receive(), Suback):
        assert isinstance(packet, Publish)
        again.acknowledge(packet)
        found.append(packet.payload)
    writer.publish(f"{name}/new", b"live", 1)
    found += again.payloads(4_001 - len(found))
    assert found == [*sent[::2], b"live"]
    again.expect_nothing()


def test_thousands_that_wait_come_all_and_in_order(wire: Open, client: Open, name: str) -> None:
    one = wire()
    connected(one, name, session_expiry_interval=300)
    one.subscribe(f"{name}/#", qos=1)
    one.disconnect()
    writer = client()
    sent = publish_many(writer, [f"{name}/{number}" for number in range(7)], 6_000)
    again = wire()
    connected(again, name, clean_start=False)
    assert again.payloads(6_000) == sent
    writer.publish(f"{name}/0", b"live", 1)
    assert again.payloads(1) == [b"live"]
    again.expect_nothing()


def test_identifiers_of_deliveries_go_round(client: Open, name: str) -> None:
    """There are 32,767 of them for the messages of the log; what is in use is not used again."""
    reader, writer = client(), client()
    reader.subscribe(name, qos=1)
    in_use: set[int] = set()
    seen: set[int] = set()
    for _ in range(70):
        publish_many(writer, [name], 500)
        found = [reader.expect(Publish) for _ in range(500)]
        for message in found:
            assert message.packet_id and message.packet_id not in in_use
            in_use.add(message.packet_id)
            seen.add(message.packet_id)
        reader.send(*[Puback(message.packet_id) for message in found])
        reader.ping()
        in_use.clear()
    assert len(seen) == 32_767


# -- resumed --------------------------------------------------------------------------------------------------------


@both_versions
def test_unacknowledged_messages_come_again_with_dup_in_order_and_with_their_identifiers(
    wire: Open, client: Open, name: str, version: Version
) -> None:
    one = wire(version)
    connected(one, name, **lasting(version))
    one.subscribe(f"{name}/+", qos=2)
    writer = client()
    for number in range(6):
        writer.publish(f"{name}/{number}", b"%d" % number, 1 + number % 2)
    sent = [one.expect(Publish) for _ in range(6)]
    one.send(Puback(sent[2].packet_id))
    one.ping()
    one.cut()
    writer.publish(f"{name}/new", b"new", 1)
    again = wire(version)
    assert connected(again, name, **lasting(version))
    left = [message for message in sent if message.payload != b"2"]
    found = [again.expect(Publish) for _ in left]
    assert [message.packet_id for message in found] == [message.packet_id for message in left]
    assert [message.payload for message in found] == [message.payload for message in left]
    assert all(message.dup for message in found)
    fresh = again.expect(Publish)
    assert fresh.payload == b"new" and not fresh.dup


def test_received_message_is_not_sent_again_but_its_pubrel_is(wire: Open, client: Open, name: str) -> None:
    one = wire()
    connected(one, name, session_expiry_interval=300)
    one.subscribe(f"{name}/a", qos=2)
    client().publish(f"{name}/a", b"once", 2)
    message = one.expect(Publish)
    one.send(Pubrec(message.packet_id))
    one.expect(Pubrel)
    for _ in range(2):
        one.cut()
        one = wire()
        assert connected(one, name, clean_start=False, session_expiry_interval=300)
        assert one.expect(Pubrel).packet_id == message.packet_id
    one.send(Pubcomp(message.packet_id))
    one.ping()
    one.cut()
    one = wire()
    connected(one, name, clean_start=False)
    one.expect_nothing()


def test_window_holds_for_what_is_sent_again(wire: Open, client: Open, name: str) -> None:
    one = wire()
    connected(one, name, session_expiry_interval=300)
    one.subscribe(f"{name}/a", qos=1)
    writer = client()
    for number in range(5):
        writer.publish(f"{name}/a", b"%d" % number, 1)
    assert [one.expect(Publish).payload for _ in range(5)][-1] == b"4"
    one.cut()
    again = wire()
    connected(again, name, clean_start=False, receive_maximum=2)
    held = [message for message in again.seen_all() if isinstance(message, Publish)]
    assert [message.payload for message in held] == [b"0", b"1"]
    for message in held:
        again.acknowledge(message)
    assert again.payloads(3) == [b"2", b"3", b"4"]


@both_versions
def test_qos_2_publish_that_was_received_is_the_same_message_on_the_next_connection(
    wire: Open, client: Open, name: str, version: Version
) -> None:
    reader, one = client(), wire(version)
    reader.subscribe(f"{name}/a", qos=2)
    connected(one, name, **lasting(version))
    one.send(Publish(f"{name}/a", b"once", QoS(2), packet_id=7))
    one.expect(Pubrec)
    one.cut()
    again = wire(version)
    assert connected(again, name, **lasting(version))
    again.send(Publish(f"{name}/a", b"once", QoS(2), dup=True, packet_id=7))
    assert again.expect(Pubrec).packet_id == 7
    again.send(Pubrel(7))
    again.expect(Pubcomp)
    assert reader.payloads(1) == [b"once"]
    reader.expect_nothing()


def test_qos_2_publish_of_a_session_that_has_ended_is_a_new_message(wire: Open, client: Open, name: str) -> None:
    reader = client()
    reader.subscribe(f"{name}/a", qos=2)
    for payload in (b"1", b"2"):
        one = wire()
        connected(one, name)
        one.send(Publish(f"{name}/a", payload, QoS(2), packet_id=7))
        one.expect(Pubrec)
        one.cut()
    assert reader.payloads(2) == [b"1", b"2"]


# -- taken over -----------------------------------------------------------------------------------------------------


@both_versions
def test_second_client_with_the_same_identifier_takes_over(wire: Open, name: str, version: Version) -> None:
    first, second = wire(version), wire(V5)
    connected(first, name, **lasting(version))
    assert connected(second, name, **lasting(V5))
    first.expect_disconnect(ReasonCode.SESSION_TAKEN_OVER)
    second.ping()


def test_taken_over_session_goes_on_with_its_messages(wire: Open, client: Open, name: str) -> None:
    first, second, writer = wire(), wire(), client()
    connected(first, name, **lasting(V5))
    first.subscribe(f"{name}/a", qos=1)
    writer.publish(f"{name}/a", b"1", 1)
    held = first.expect(Publish)
    connected(second, name, **lasting(V5))
    again = second.expect(Publish)
    assert (again.packet_id, again.payload, again.dup) == (held.packet_id, b"1", True)
    writer.publish(f"{name}/a", b"2", 1)
    assert second.expect(Publish).payload == b"2"
    first.expect_disconnect(ReasonCode.SESSION_TAKEN_OVER)


def test_clean_start_takes_over_and_begins_anew(wire: Open, client: Open, name: str) -> None:
    first, second, writer = wire(), wire(), client()
    connected(first, name, **lasting(V5))
    first.subscribe(f"{name}/a", qos=1)
    assert not connected(second, name, clean_start=True)
    first.expect_disconnect(ReasonCode.SESSION_TAKEN_OVER)
    writer.publish(f"{name}/a", b"x", 1)
    second.expect_nothing()


def test_qos_2_publish_is_once_across_a_take_over(wire: Open, client: Open, name: str) -> None:
    reader, first, second = client(), wire(), wire()
    reader.subscribe(f"{name}/a", qos=2)
    connected(first, name, **lasting(V5))
    # It may or may not be on the disk when the other comes.
    first.send(Publish(f"{name}/a", b"once", QoS(2), packet_id=7))
    connected(second, name, **lasting(V5))
    second.send(Publish(f"{name}/a", b"once", QoS(2), dup=True, packet_id=7))
    second.expect(Pubrec)
    second.send(Pubrel(7))
    second.expect(Pubcomp)
    second.publish(f"{name}/a", b"end", 2)
    assert reader.payloads(2) == [b"once", b"end"]


def test_many_take_overs_leave_one_connection(wire: Open, name: str) -> None:
    wires = [wire() for _ in range(20)]
    for one in wires:
        connected(one, name, **lasting(V5))
    for one in wires[:-1]:
        one.expect_disconnect(ReasonCode.SESSION_TAKEN_OVER)
    wires[-1].ping()
