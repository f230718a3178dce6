"""Messages through the MQTT door: QoS 0, 1 and 2 both ways, what a subscription gets, properties. Over the wire."""

import pytest

from headrace.gateways.mqtt.packets import (
    Disconnect,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    QoS,
    Suback,
    Subscribe,
    Subscription,
    Unsubscribe,
)
from headrace.gateways.mqtt.properties import Properties
from headrace.gateways.mqtt.reasons import ReasonCode, Version

from .wire import Open, wait_seconds

VERSIONS = [Version.V3_1_1, Version.V5]
both_versions = pytest.mark.parametrize("version", VERSIONS, ids=lambda one: one.name)


# -- QoS ----------------------------------------------------------------------------------------------------------


@both_versions
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_message_goes_from_publisher_to_subscriber(client: Open, name: str, version: Version, qos: int) -> None:
    reader, writer = client(version=version), client(version=version)
    reader.subscribe(f"{name}/a", qos=qos)
    assert writer.publish(f"{name}/a", b"hello", qos) is ReasonCode.SUCCESS
    (message,) = reader.take()
    assert (message.topic, message.payload, message.qos) == (f"{name}/a", b"hello", qos)
    assert not message.dup and not message.retain
    reader.expect_nothing()


@pytest.mark.parametrize("published", [0, 1, 2])
@pytest.mark.parametrize("granted", [0, 1, 2])
def test_message_comes_with_the_lower_of_published_and_granted_qos(
    client: Open, name: str, published: int, granted: int
) -> None:
    reader, writer = client(), client()
    assert reader.subscribe(name, qos=granted).reasons == (granted,)
    writer.publish(name, b"x", published)
    assert reader.take()[0].qos == min(published, granted)


@both_versions
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_messages_of_one_publisher_come_in_order(client: Open, name: str, version: Version, qos: int) -> None:
    reader, writer = client(version=version), client(version=version)
    reader.subscribe(f"{name}/#", qos=qos)
    wanted = [b"%d" % number for number in range(300)]
    packets = [
        Publish(f"{name}/{number % 3}", payload, QoS(qos), packet_id=number + 1 if qos else 0)
        for number, payload in enumerate(wanted)
    ]
    writer.send(*packets)
    if qos < 2:
        assert reader.payloads(300) == wanted
        return
    for number in range(300):
        assert writer.expect(Pubrec).packet_id == number + 1
    found = [reader.expect(Publish) for _ in wanted]
    assert [one.payload for one in found] == wanted
    assert len({one.packet_id for one in found}) == 300


def test_packet_identifiers_of_deliveries_are_never_zero_and_never_in_use(client: Open, name: str) -> None:
    reader, writer = client(receive_maximum=100), client()
    reader.subscribe(f"{name}/+", qos=2)
    for number in range(150):
        writer.publish(f"{name}/{number}", b"x", 1 + number % 2)
    held = [reader.expect(Publish) for _ in range(100)]
    for _ in range(50):
        reader.acknowledge(held.pop(0))
        held.append(reader.expect(Publish))
        ids = [one.packet_id for one in held]
        assert 0 not in ids and len(set(ids)) == len(ids)


def test_puback_names_the_publish_it_answers_in_order(client: Open, name: str) -> None:
    writer = client()
    ids = [7, 9, 8, 65_535, 1]
    writer.send(*[Publish(name, b"x", QoS(1), packet_id=one) for one in ids])
    assert [writer.expect(Puback).packet_id for _ in ids] == ids


def test_identifier_is_free_again_after_puback(client: Open, name: str) -> None:
    reader, writer = client(), client()
    reader.subscribe(name, qos=1)
    for payload in (b"1", b"2"):
        # [MQTT-4.3.2-5] a new message, whatever its DUP flag says.
        writer.send(Publish(name, payload, QoS(1), dup=True, packet_id=5))
        writer.expect(Puback)
    found = reader.take(2)
    assert [one.payload for one in found] == [b"1", b"2"]
    assert not any(one.dup for one in found)


@both_versions
def test_repeated_qos_2_publish_is_answered_again_and_delivered_once(client: Open, name: str, version: Version) -> None:
    reader, writer = client(version=version), client(version=version)
    reader.subscribe(name, qos=2)
    for dup in (False, True, True):
        writer.send(Publish(name, b"once", QoS(2), dup=dup, packet_id=3))
        assert writer.expect(Pubrec).packet_id == 3
    writer.send(Pubrel(3))
    assert writer.expect(Pubcomp).packet_id == 3
    assert reader.payloads(1) == [b"once"]
    reader.expect_nothing()


def test_two_publishes_with_one_identifier_in_one_packet_are_one_message(client: Open, name: str) -> None:
    reader, writer = client(), client()
    reader.subscribe(name, qos=2)
    writer.send(
        Publish(name, b"once", QoS(2), packet_id=3),
        Publish(name, b"once", QoS(2), packet_id=3),
    )
    assert [writer.expect(Pubrec).packet_id for _ in range(2)] == [3, 3]
    assert reader.payloads(1) == [b"once"]
    reader.expect_nothing()


def test_identifier_is_free_again_after_pubcomp(client: Open, name: str) -> None:
    reader, writer = client(), client()
    reader.subscribe(name, qos=2)
    for payload in (b"1", b"2"):
        writer.send(Publish(name, payload, QoS(2), packet_id=3))
        writer.expect(Pubrec)
        writer.send(Pubrel(3))
        assert writer.expect(Pubcomp).reason is ReasonCode.SUCCESS
    assert reader.payloads(2) == [b"1", b"2"]


def test_pubrel_for_an_unknown_identifier_is_answered_so(client: Open) -> None:
    writer = client()
    writer.send(Pubrel(77))
    answer = writer.expect(Pubcomp)
    assert (answer.packet_id, answer.reason) == (77, ReasonCode.PACKET_IDENTIFIER_NOT_FOUND)


def test_pubrel_for_an_unknown_identifier_is_answered_in_3_1_1_too(client: Open) -> None:
    writer = client(version=Version.V3_1_1)
    writer.send(Pubrel(77))
    assert writer.expect(Pubcomp).packet_id == 77


def test_pubrec_is_answered_with_pubrel_and_repeated_pubrec_again(client: Open, name: str) -> None:
    reader, writer = client(), client()
    reader.subscribe(name, qos=2)
    writer.publish(name, b"x", 2)
    message = reader.expect(Publish)
    for _ in range(2):
        reader.send(Pubrec(message.packet_id))
        answer = reader.expect(Pubrel)
        assert (answer.packet_id, answer.reason) == (message.packet_id, ReasonCode.SUCCESS)
    reader.send(Pubcomp(message.packet_id))
    reader.expect_nothing()


@both_versions
def test_pubrels_come_in_the_order_of_the_pubrecs(client: Open, name: str, version: Version) -> None:
    reader, writer = client(version=version), client()
    reader.subscribe(name, qos=2)
    for _ in range(5):
        writer.publish(name, b"x", 2)
    ids = [reader.expect(Publish).packet_id for _ in range(5)]
    order = [ids[2], ids[0], ids[4], ids[1], ids[3]]
    reader.send(*[Pubrec(one) for one in order])
    assert [reader.expect(Pubrel).packet_id for _ in order] == order


def test_pubrec_for_an_unknown_identifier_is_answered_so(client: Open) -> None:
    reader = client()
    reader.send(Pubrec(99))
    answer = reader.expect(Pubrel)
    assert (answer.packet_id, answer.reason) == (99, ReasonCode.PACKET_IDENTIFIER_NOT_FOUND)


def test_acknowledgements_nobody_asked_for_do_no_harm(client: Open) -> None:
    reader = client()
    reader.send(Puback(99), Pubcomp(98))
    reader.expect_nothing()


@pytest.mark.parametrize("kind", [Puback, Pubrec])
def test_failure_code_settles_a_delivery_for_good(client: Open, name: str, kind: type[Puback | Pubrec]) -> None:
    qos = 1 if kind is Puback else 2
    lasting = {"session_expiry_interval": 300, "receive_maximum": 1}
    reader, writer = client(name, **lasting), client()
    reader.subscribe(name, qos=qos)
    writer.publish(name, b"1", qos)
    writer.publish(name, b"2", qos)
    message = reader.expect(Publish)
    reader.send(kind(message.packet_id, ReasonCode.UNSPECIFIED_ERROR))
    # The window of one is open again, and no PUBREL came for the first.
    assert reader.expect(Publish).payload == b"2"
    reader.cut()
    again = client(name, clean_start=False, session_expiry_interval=300)
    assert [one.payload for one in again.take()] == [b"2"]
    again.expect_nothing()
    again.disconnect(session_expiry_interval=0)


@both_versions
def test_unacknowledged_message_is_not_sent_again_on_the_same_connection(
    client: Open, name: str, version: Version
) -> None:
    reader, writer = client(version=version), client()
    reader.subscribe(name, qos=1)
    writer.publish(name, b"1", 1)
    assert reader.expect(Publish).payload == b"1"
    writer.publish(name, b"2", 1)
    assert reader.expect(Publish).payload == b"2"
    reader.expect_nothing()


# -- subscriptions ------------------------------------------------------------------------------------------------


@both_versions
def test_suback_has_a_code_for_each_filter_in_order(client: Open, name: str, version: Version) -> None:
    reader = client(version=version)
    found = reader.subscribe(*[Subscription(f"{name}/{qos}", QoS(qos)) for qos in (2, 0, 1)])
    assert found.reasons == (2, 0, 1)


@both_versions
def test_filters_of_one_subscribe_work_as_those_of_several(client: Open, name: str, version: Version) -> None:
    reader, writer = client(version=version), client()
    reader.subscribe(Subscription(f"{name}/a", QoS(1)), Subscription(f"{name}/b", QoS(2)))
    for topic in ("a", "b", "c"):
        writer.publish(f"{name}/{topic}", topic.encode(), 2)
    assert [(one.payload, one.qos) for one in reader.take(2)] == [(b"a", 1), (b"b", 2)]
    reader.expect_nothing()


@both_versions
def test_overlapping_subscriptions_get_one_copy_with_the_highest_qos(client: Open, name: str, version: Version) -> None:
    reader, writer = client(version=version), client()
    for topic_filter, qos in ((f"{name}/#", 0), (f"{name}/+", 2), (f"{name}/a", 1)):
        reader.subscribe(topic_filter, qos=qos)
    writer.publish(f"{name}/a", b"x", 2)
    assert [one.qos for one in reader.take()] == [2]
    reader.expect_nothing()


def test_one_copy_carries_the_identifiers_of_all_matching_subscriptions(client: Open, name: str) -> None:
    reader, writer = client(), client()
    reader.subscribe(f"{name}/#", subscription_identifiers=(7,))
    reader.subscribe(f"{name}/+", subscription_identifiers=(268_435_455,))
    reader.subscribe(f"{name}/b", subscription_identifiers=(9,))
    reader.subscribe(f"{name}/a")
    writer.publish(f"{name}/a", b"x")
    (message,) = reader.take()
    assert set(message.properties.subscription_identifiers) == {7, 268_435_455}


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_identifier_of_a_replaced_subscription_is_the_new_one(client: Open, name: str, qos: int) -> None:
    reader, writer = client(), client()
    for identifier in (1, 2):
        reader.subscribe(name, qos=qos, subscription_identifiers=(identifier,))
        writer.publish(name, b"x", qos)
        assert reader.take()[0].properties.subscription_identifiers == (identifier,)


@both_versions
def test_second_subscribe_with_a_filter_replaces_the_first(client: Open, name: str, version: Version) -> None:
    reader, writer = client(version=version), client()
    reader.subscribe(name, qos=2)
    reader.subscribe(name, qos=0)
    writer.publish(name, b"x", 2)
    assert [one.qos for one in reader.take()] == [0]
    reader.expect_nothing()


def test_no_message_is_lost_while_a_subscription_is_replaced(client: Open, name: str) -> None:
    reader, writer = client(), client()
    reader.subscribe(name, qos=1)
    for number in range(50):
        writer.send(Publish(name, b"%d" % number, QoS(1), packet_id=number + 1))
        reader.send(Subscribe(number + 1, (Subscription(name, QoS(1)),)))
    for _ in range(50):
        writer.expect(Puback)
    reader.send(Subscribe(51, (Subscription(name, QoS(1)),)))
    found: list[bytes] = []
    while not (isinstance(one := reader.receive(), Suback) and one.packet_id == 51):
        if isinstance(one, Publish):
            found.append(one.payload)
    assert found == [b"%d" % number for number in range(50)]


@both_versions
def test_unsubscribed_filter_gets_nothing_more(client: Open, name: str, version: Version) -> None:
    reader, writer = client(version=version), client()
    reader.subscribe(f"{name}/+", f"{name}/b")
    found = reader.unsubscribe(f"{name}/+", f"{name}/nobody")
    if version is Version.V5:
        assert found.reasons == (ReasonCode.SUCCESS, ReasonCode.NO_SUBSCRIPTION_EXISTED)
    writer.publish(f"{name}/a", b"a")
    writer.publish(f"{name}/b", b"b")
    assert reader.payloads(1) == [b"b"]
    reader.expect_nothing()


@both_versions
def test_unsubscribe_compares_filters_letter_by_letter(client: Open, name: str, version: Version) -> None:
    reader, writer = client(version=version), client()
    reader.subscribe(f"{name}/+")
    reader.unsubscribe(f"{name}/a", f"{name}/#", f"{name}/+/", name.upper() + "/+")
    writer.publish(f"{name}/a", b"x")
    assert reader.payloads(1) == [b"x"]


@both_versions
def test_started_delivery_is_completed_after_unsubscribe(client: Open, name: str, version: Version) -> None:
    reader, writer = client(version=version), client()
    reader.subscribe(name, qos=2)
    writer.publish(name, b"x", 2)
    message = reader.expect(Publish)
    reader.unsubscribe(name)
    reader.acknowledge(message)
    reader.expect_nothing()


def test_no_local_keeps_a_clients_own_messages_away(client: Open, name: str) -> None:
    one, other = client(name), client()
    one.subscribe(Subscription(f"{name}/a", QoS(1), no_local=True))
    one.publish(f"{name}/a", b"own", 1)
    other.publish(f"{name}/a", b"other", 1)
    assert one.payloads(1) == [b"other"]
    one.expect_nothing()


def test_no_local_does_not_shadow_another_subscription(client: Open, name: str) -> None:
    one = client(name)
    one.subscribe(Subscription(f"{name}/a", no_local=True), f"{name}/+")
    one.send(Publish(f"{name}/a", b"own"))
    assert one.payloads(1) == [b"own"]


def test_without_no_local_a_client_gets_its_own_messages(client: Open, name: str) -> None:
    one = client()
    one.subscribe(name)
    one.send(Publish(name, b"own"))
    assert one.payloads(1) == [b"own"]


def test_no_local_holds_across_connections_of_a_session(client: Open, name: str) -> None:
    one = client(name, session_expiry_interval=300)
    one.subscribe(Subscription(f"{name}/a", QoS(1), no_local=True))
    one.disconnect()
    stranger = client()
    stranger.publish(f"{name}/a", b"other", 1)
    again = client(name, clean_start=False, session_expiry_interval=0)
    assert again.payloads(1) == [b"other"]
    again.publish(f"{name}/a", b"own", 1)
    again.expect_nothing()


# -- topics -------------------------------------------------------------------------------------------------------

MATCHES = [
    ("a/b/c", "a/b/c", True),
    ("a/+/c", "a/b/c", True),
    ("a/#", "a/b/c", True),
    ("a/#", "a", True),
    ("+/+", "a/b", True),
    ("+/+", "/b", True),
    ("/+", "/b", True),
    ("+", "/b", False),
    ("a/+", "a", False),
    ("a/+", "a/", True),
    ("a/+", "a/b/c", False),
    ("A", "a", False),
    ("a/", "a", False),
    ("a b", "a b", True),
    ("a.b", "a.b", True),
    ("a.b", "a/b", False),
    ("a*", "a*", True),
    ("é", "e\u0301", False),
    ("\ufeffa", "a", False),
]


@pytest.mark.parametrize(("pattern", "topic", "matches"), MATCHES)
def test_filter_matches_topics_as_the_standard_says(
    client: Open, name: str, pattern: str, topic: str, matches: bool
) -> None:
    reader, writer = client(), client()
    reader.subscribe(f"{name}/{pattern}", qos=1)
    writer.publish(f"{name}/{topic}", b"x", 1)
    found = [one for one in reader.seen_all() if isinstance(one, Publish)]
    assert [one.topic for one in found] == ([f"{name}/{topic}"] if matches else [])


@pytest.mark.parametrize("pattern", ["#", "+/{}", "+/#"])
def test_wildcard_at_the_front_does_not_match_topics_with_a_dollar(client: Open, name: str, pattern: str) -> None:
    reader, writer = client(), client()
    reader.subscribe(pattern.format(name), qos=1)
    writer.publish(f"$mine/{name}", b"x", 1)
    assert not [one for one in reader.seen_all() if isinstance(one, Publish) and name in one.topic]


def test_filter_that_names_the_dollar_matches(client: Open, name: str) -> None:
    reader, writer = client(), client()
    reader.subscribe(f"$mine/{name}/#")
    writer.publish(f"$mine/{name}/a", b"x")
    assert reader.payloads(1) == [b"x"]


def test_longest_topic_goes_through(client: Open, name: str) -> None:
    topic = f"{name}/".ljust(65_535, "x")
    reader, writer = client(), client()
    reader.subscribe(topic, qos=1)
    writer.publish(topic, b"x", 1)
    assert reader.take()[0].topic == topic


def test_byte_order_mark_in_a_topic_is_kept(client: Open, name: str) -> None:
    reader, writer = client(), client()
    reader.subscribe(f"{name}/#")
    writer.publish(f"{name}/\ufeffa", b"x")
    assert reader.take()[0].topic == f"{name}/\ufeffa"


def test_topics_below_sys_are_not_for_clients_to_publish(client: Open) -> None:
    writer = client()
    assert writer.publish("$SYS/broker/load", b"x", 1) is ReasonCode.NOT_AUTHORIZED
    assert writer.publish("$SYS/broker/load", b"x", 2) is ReasonCode.NOT_AUTHORIZED


# -- payloads and properties --------------------------------------------------------------------------------------


@both_versions
@pytest.mark.parametrize("size", [0, 1, 126, 127, 128, 16_383, 16_384, 2_097_152, 5_000_000])
def test_payload_of_any_size_is_the_same_on_the_other_side(
    client: Open, name: str, version: Version, size: int
) -> None:
    reader, writer = client(version=version), client(version=version)
    reader.subscribe(name, qos=1)
    payload = bytes(range(256)) * (size // 256) + bytes(size % 256)
    writer.publish(name, payload, 1)
    assert reader.payloads(1) == [payload]


SENT = {
    "payload_format_indicator": 1,
    "content_type": "text/plain",
    "response_topic": "answers/1",
    "correlation_data": b"\x00\xff",
    "user_properties": (("b", "2"), ("a", "1"), ("b", ""), ("\ufeffk", "é")),
}


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_properties_reach_the_subscriber_as_they_were(client: Open, name: str, qos: int) -> None:
    reader, writer = client(), client()
    reader.subscribe(name, qos=qos)
    writer.publish(name, b"x", qos, **SENT)
    assert reader.take()[0].properties == Properties(**SENT)


def test_properties_are_left_out_for_3_1_1(client: Open, name: str) -> None:
    reader, writer = client(version=Version.V3_1_1), client()
    reader.subscribe(name)
    writer.publish(name, b"x", **SENT)
    assert reader.payloads(1) == [b"x"]


def test_message_of_3_1_1_has_no_properties_in_5(client: Open, name: str) -> None:
    reader, writer = client(), client(version=Version.V3_1_1)
    reader.subscribe(name)
    writer.publish(name, b"x")
    assert reader.take()[0].properties == Properties()


def test_request_finds_its_answer_by_response_topic_and_correlation(client: Open, name: str) -> None:
    asker, answerer = client(name, request_response_information=True), client()
    answerer.subscribe(f"{name}/ask")
    asker.subscribe(f"{name}/answers")
    asker.send(
        Publish(
            f"{name}/ask",
            b"6*7",
            properties=Properties(response_topic=f"{name}/answers", correlation_data=b"1"),
        )
    )
    (question,) = answerer.take()
    assert question.properties.response_topic is not None
    answerer.publish(question.properties.response_topic, b"42", correlation_data=question.properties.correlation_data)
    (answer,) = asker.take()
    assert (answer.payload, answer.properties.correlation_data) == (b"42", b"1")


def test_client_publish_with_a_subscription_identifier_is_a_protocol_error(client: Open, name: str) -> None:
    writer = client()
    writer.send(Publish(name, b"x", properties=Properties(subscription_identifiers=(1,))))
    writer.expect_disconnect(ReasonCode.PROTOCOL_ERROR)


# -- message expiry -----------------------------------------------------------------------------------------------


def test_time_to_live_is_counted_down_while_a_message_waits(client: Open, name: str) -> None:
    sleeper = client(name, session_expiry_interval=300)
    sleeper.subscribe(f"{name}/a", qos=1)
    sleeper.disconnect()
    writer = client()
    writer.publish(f"{name}/a", b"x", 1, message_expiry_interval=1000)
    wait_seconds(writer, name, 2)
    again = client(name, clean_start=False)
    left = again.take()[0].properties.message_expiry_interval
    assert left is not None and 900 < left <= 998


def test_message_whose_time_is_over_is_not_delivered(client: Open, name: str) -> None:
    sleeper = client(name, session_expiry_interval=300)
    sleeper.subscribe(f"{name}/a", qos=1)
    sleeper.disconnect()
    writer = client()
    writer.publish(f"{name}/a", b"short", 1, message_expiry_interval=1)
    writer.publish(f"{name}/a", b"long", 1)
    wait_seconds(writer, name, 1)
    again = client(name, clean_start=False)
    assert again.payloads(1) == [b"long"]
    again.expect_nothing()


def test_message_that_was_sent_is_sent_again_though_its_time_is_over(client: Open, name: str) -> None:
    reader, writer = client(name, session_expiry_interval=300), client()
    reader.subscribe(f"{name}/a", qos=2)
    writer.publish(f"{name}/a", b"sent", 2, message_expiry_interval=1)
    assert reader.expect(Publish).payload == b"sent"
    reader.cut()
    wait_seconds(writer, name, 1)
    again = client(name, clean_start=False)
    (message,) = again.take()
    assert message.payload == b"sent" and message.dup
    again.expect_nothing()


def test_expired_qos_2_publish_is_still_acknowledged_to_the_end(client: Open, name: str) -> None:
    sleeper, writer = client(name, session_expiry_interval=300), client()
    sleeper.subscribe(f"{name}/a", qos=2)
    sleeper.disconnect()
    writer.send(Publish(f"{name}/a", b"x", QoS(2), packet_id=9, properties=Properties(message_expiry_interval=1)))
    assert writer.expect(Pubrec).reason is ReasonCode.SUCCESS
    wait_seconds(writer, name, 1)
    writer.send(Pubrel(9))
    assert writer.expect(Pubcomp).reason is ReasonCode.SUCCESS
    again = client(name, clean_start=False)
    again.expect_nothing()


# -- topic alias --------------------------------------------------------------------------------------------------


def test_broker_takes_every_alias_it_announced(wire: Open, client: Open, name: str) -> None:
    reader, writer = client(), wire()
    most = writer.connect().properties.topic_alias_maximum
    assert most is not None and most > 1
    reader.subscribe(f"{name}/#")
    for alias in range(1, most + 1):
        writer.send(Publish(f"{name}/{alias}", b"1", properties=Properties(topic_alias=alias)))
        writer.send(Publish("", b"2", properties=Properties(topic_alias=alias)))
    for alias in range(1, most + 1):
        found = reader.take(2)
        assert [(one.topic, one.payload) for one in found] == [(f"{name}/{alias}", b"1"), (f"{name}/{alias}", b"2")]
        assert not any(one.properties.topic_alias for one in found)


def test_alias_given_again_means_the_new_topic(client: Open, name: str) -> None:
    reader, writer = client(), client()
    reader.subscribe(f"{name}/#")
    for topic in ("a", "b"):
        writer.send(Publish(f"{name}/{topic}", b"1", properties=Properties(topic_alias=1)))
        writer.send(Publish("", b"2", properties=Properties(topic_alias=1)))
    assert [one.topic for one in reader.take(4)] == [f"{name}/{topic}" for topic in "aabb"]


def test_alias_of_zero_ends_the_connection(client: Open) -> None:
    writer = client()
    writer.send_octets(b"\x30\x08\x00\x01a\x03\x23\x00\x00x")
    writer.expect_disconnect(ReasonCode.TOPIC_ALIAS_INVALID)


@pytest.mark.parametrize(("topic", "alias"), [("a", 65_535), ("", 5)])
def test_alias_that_is_too_high_or_unknown_ends_the_connection(client: Open, topic: str, alias: int) -> None:
    writer = client()
    writer.send(Publish(topic, b"x", properties=Properties(topic_alias=alias)))
    found = writer.expect(Disconnect)
    assert found.reason in (ReasonCode.TOPIC_ALIAS_INVALID, ReasonCode.PROTOCOL_ERROR)
    writer.expect_end()


def test_alias_is_forgotten_with_its_connection(client: Open, name: str) -> None:
    one = client(name, session_expiry_interval=300)
    one.send(Publish(f"{name}/a", b"1", properties=Properties(topic_alias=1)))
    one.disconnect()
    again = client(name, clean_start=False, session_expiry_interval=0)
    again.send(Publish("", b"2", properties=Properties(topic_alias=1)))
    assert again.expect(Disconnect).reason is not ReasonCode.SUCCESS
    again.expect_end()


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_client_that_takes_aliases_gets_no_more_than_it_takes(client: Open, name: str, qos: int) -> None:
    reader, writer = client(topic_alias_maximum=2), client()
    reader.subscribe(f"{name}/#", qos=qos)
    for topic in "abcabc":
        writer.publish(f"{name}/{topic}", topic.encode(), qos)
    found = reader.take(6)
    assert [one.topic for one in found] == [f"{name}/{topic}" for topic in "abcabc"]
    assert [one.payload for one in found] == [topic.encode() for topic in "abcabc"]


def test_aliases_of_a_client_begin_anew_with_each_connection(client: Open, name: str) -> None:
    one, writer = client(name, session_expiry_interval=300, topic_alias_maximum=10), client()
    one.subscribe(f"{name}/#", qos=1)
    writer.publish(f"{name}/a", b"1", 1)
    writer.publish(f"{name}/a", b"2", 1)
    assert one.payloads(2) == [b"1", b"2"]
    one.cut()
    writer.publish(f"{name}/a", b"3", 1)
    again = client(name, clean_start=False, topic_alias_maximum=10)
    assert [(message.topic, message.payload) for message in again.take()] == [(f"{name}/a", b"3")]


# -- receive maximum ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("qos", [1, 2])
def test_client_gets_no_more_than_its_receive_maximum(client: Open, name: str, qos: int) -> None:
    reader, writer = client(receive_maximum=3), client()
    reader.subscribe(name, qos=qos)
    for number in range(5):
        writer.publish(name, b"%d" % number, qos)
    held = [one for one in reader.seen_all() if isinstance(one, Publish)]
    assert [one.payload for one in held] == [b"0", b"1", b"2"]
    # [MQTT-3.3.4-10] Everything else goes on: the ping was answered, and so is a SUBSCRIBE.
    reader.subscribe(f"{name}/other")
    reader.acknowledge(held[0])
    assert reader.expect(Publish).payload == b"3"
    reader.expect_nothing()


def test_window_full_with_qos_1_does_not_stop_qos_0_of_others(client: Open, name: str) -> None:
    reader, other, writer = client(receive_maximum=1), client(), client()
    reader.subscribe(name, qos=1)
    other.subscribe(name, qos=1)
    for number in range(3):
        writer.publish(name, b"%d" % number, 1)
    assert other.payloads(3) == [b"0", b"1", b"2"]


def test_publisher_beyond_the_receive_maximum_is_told_0x93(wire: Open, name: str) -> None:
    writer = wire()
    most = writer.connect().properties.receive_maximum
    assert most is not None
    writer.send(*[Publish(name, b"x", QoS(2), packet_id=number) for number in range(1, most + 2)])
    while isinstance(one := writer.receive(), Pubrec):
        pass
    assert isinstance(one, Disconnect) and one.reason is ReasonCode.RECEIVE_MAXIMUM_EXCEEDED
    writer.expect_end()


def test_publisher_may_use_all_of_the_receive_maximum(wire: Open, name: str) -> None:
    writer = wire()
    most = writer.connect().properties.receive_maximum
    assert most is not None
    for _ in range(2):
        writer.send(*[Publish(name, b"x", QoS(2), packet_id=number) for number in range(1, most + 1)])
        for number in range(1, most + 1):
            assert writer.expect(Pubrec).packet_id == number
        writer.send(*[Pubrel(number) for number in range(1, most + 1)])
        for number in range(1, most + 1):
            assert writer.expect(Pubcomp).packet_id == number
    writer.ping()


# -- maximum packet size ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_message_too_large_for_a_client_is_left_out_as_if_it_was_delivered(client: Open, name: str, qos: int) -> None:
    reader, writer = client(maximum_packet_size=200, receive_maximum=1), client()
    reader.subscribe(f"{name}/a", qos=qos)
    writer.publish(f"{name}/a", bytes(300), qos)
    writer.publish(f"{name}/a", b"small", qos)
    assert reader.payloads(1) == [b"small"]
    reader.expect_nothing()


def test_message_of_exactly_the_maximum_packet_size_is_delivered(client: Open, name: str) -> None:
    head = 1 + 1 + 2 + len(name) + 1
    reader, writer = client(maximum_packet_size=100), client()
    reader.subscribe(name)
    writer.publish(name, bytes(100 - head))
    writer.publish(name, bytes(100 - head + 1))
    assert [len(one.payload) for one in reader.take()] == [100 - head]
    reader.expect_nothing()


def test_reason_string_that_would_not_fit_is_left_out(client: Open, name: str) -> None:
    writer = client(name, maximum_packet_size=30)
    packet_id = writer.next_id()
    writer.send(Publish("$SYS/x", b"x", QoS(1), packet_id=packet_id))
    answer = writer.expect(Puback)
    assert answer.reason is ReasonCode.NOT_AUTHORIZED
    assert answer.properties.reason_string is None
    writer.send(Publish("$SYS/x", b"x", QoS(2), packet_id=packet_id))
    assert writer.expect(Pubrec).properties.reason_string is None
    writer.send_octets(b"\x00\x00")
    found = writer.expect(Disconnect)
    assert found.reason is ReasonCode.MALFORMED_PACKET and found.properties.reason_string is None


def test_reason_string_says_why(client: Open, name: str) -> None:
    writer = client()
    writer.send(Publish("$SYS/x", b"x", QoS(1), packet_id=1))
    assert "$SYS" in (writer.expect(Puback).properties.reason_string or "")


def test_without_problem_information_no_reason_string_is_sent(client: Open, name: str) -> None:
    writer = client(request_problem_information=False)
    for qos, kind in ((1, Puback), (2, Pubrec)):
        writer.send(Publish("$SYS/x", b"x", QoS(qos), packet_id=qos))
        assert writer.expect(kind).properties == Properties()


def test_refused_qos_2_publish_frees_its_identifier(client: Open, name: str) -> None:
    reader, writer = client(), client()
    reader.subscribe(name, qos=2)
    writer.send(Publish("$SYS/x", b"x", QoS(2), packet_id=4))
    assert writer.expect(Pubrec).reason is ReasonCode.NOT_AUTHORIZED
    writer.send(Publish(name, b"new", QoS(2), packet_id=4))
    assert writer.expect(Pubrec).reason is ReasonCode.SUCCESS
    assert reader.payloads(1) == [b"new"]


def test_unsubscribe_of_an_unknown_filter_is_answered(client: Open, name: str) -> None:
    reader = client()
    reader.send(Unsubscribe(9, (name,)))
    found = reader.receive()
    assert found is not None and getattr(found, "packet_id", 0) == 9
