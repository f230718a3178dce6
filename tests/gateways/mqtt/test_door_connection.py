"""CONNECT to DISCONNECT: what is accepted, refused and said goodbye to, in both versions. Over the wire."""

import struct

import pytest
from tests.running_broker import eventually

from headrace.gateways.mqtt.encoder import encode_packet
from headrace.gateways.mqtt.packets import (
    Auth,
    Connack,
    Connect,
    Disconnect,
    Pingreq,
    Pingresp,
    Puback,
    Publish,
    Pubrel,
    QoS,
    Subscribe,
    Subscription,
    Unsubscribe,
    Will,
)
from headrace.gateways.mqtt.properties import Properties
from headrace.gateways.mqtt.reasons import ReasonCode, ReturnCode, Version

from .conftest import MqttBroker
from .wire import Open, Wire

V3, V5 = Version.V3_1_1, Version.V5
both_versions = pytest.mark.parametrize("version", [V3, V5], ids=lambda one: one.name)

# A user with few rights, and limits short enough to run into.
CONFIG = """
[mqtt]
keep_alive_s_max = 600

[[users]]
name = "reader"
password = "secret"

[[permissions]]
user = "reader"
vhost = "/"
configure = ".*"
write = "^$"
read = ".*"
"""


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack(">H", len(data)) + data


def connect_octets(
    *, name: str | bytes = "MQTT", level: int = 4, flags: int = 2, keep_alive: int = 0, payload: bytes = text("x")
) -> bytes:
    properties = b"\0" if level == 5 else b""
    body = text(name) + bytes((level, flags)) + struct.pack(">H", keep_alive) + properties + payload
    assert len(body) < 128
    return bytes((0x10, len(body))) + body


# -- accepted -----------------------------------------------------------------------------------------------------


@both_versions
def test_connect_is_answered_with_connack_before_anything_else(wire: Open, version: Version) -> None:
    one = wire(version)
    connack = one.connect("")
    assert connack.reason == 0 and not connack.session_present
    assert connack.properties.authentication_method is None
    one.ping()


@both_versions
def test_packets_may_follow_connect_without_waiting(wire: Open, name: str, version: Version) -> None:
    one = wire(version)
    one.send(Connect("", version), Subscribe(1, (Subscription(name),)), Publish(name, b"x"), Pingreq())
    assert one.expect(Connack).reason == 0
    kinds = [type(one.receive()).__name__ for _ in range(3)]
    assert kinds == ["Suback", "Publish", "Pingresp"]


def test_connack_tells_what_the_broker_takes(wire: Open) -> None:
    told = wire().connect("").properties
    assert told.receive_maximum and told.maximum_packet_size and told.topic_alias_maximum
    # What is not said is there: QoS 2, retained messages, wildcards, identifiers, shared subscriptions.
    assert told.maximum_qos is None and told.retain_available is None
    assert told.wildcard_subscription_available is None
    assert told.subscription_identifier_available is None
    assert told.shared_subscription_available is None


@pytest.mark.parametrize("length", [1, 23, 200])
@both_versions
def test_client_identifier_of_letters_and_digits_is_taken(
    client: Open, name: str, version: Version, length: int
) -> None:
    letters = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    client((letters * 4)[:length], version).ping()


def test_client_without_an_identifier_gets_one_of_its_own(wire: Open, client: Open, name: str) -> None:
    found = set()
    for clean_start in (True, False):
        one = wire()
        told = one.connect("", clean_start=clean_start).properties.assigned_client_identifier
        assert told
        found.add(told)
        one.subscribe(f"{name}/{told}")
    assert len(found) == 2


def test_assigned_identifier_names_the_session(wire: Open, name: str) -> None:
    one = wire()
    told = one.connect("", session_expiry_interval=300).properties.assigned_client_identifier
    assert told is not None
    one.disconnect()
    again = wire()
    assert again.connect(told, clean_start=False).session_present


def test_client_without_an_identifier_and_clean_session_is_taken_in_3_1_1(client: Open) -> None:
    for one in [client("", V3), client("", V3)]:
        one.ping()


def test_client_without_an_identifier_that_wants_a_session_is_rejected_in_3_1_1(wire: Open) -> None:
    one = wire(V3)
    connack = one.connect("", clean_start=False)
    assert connack.reason is ReturnCode.IDENTIFIER_REJECTED and not connack.session_present
    one.expect_end()


@both_versions
def test_client_identifier_that_is_too_long_is_rejected(wire: Open, version: Version) -> None:
    one = wire(version)
    connack = one.connect("x" * 5_000)
    wanted = ReasonCode.CLIENT_IDENTIFIER_NOT_VALID if version is V5 else ReturnCode.IDENTIFIER_REJECTED
    assert connack.reason is wanted
    one.expect_end()


def test_response_information_comes_when_asked_for(wire: Open, name: str) -> None:
    told = wire().connect(name, request_response_information=True).properties.response_information
    assert told is not None and name in told


@pytest.mark.parametrize("asked", [None, False])
def test_response_information_does_not_come_unasked(wire: Open, asked: bool | None) -> None:
    assert wire().connect("", request_response_information=asked).properties.response_information is None


@pytest.mark.parametrize(("asked_s", "told_s"), [(10, None), (600, None), (601, 600), (0, 600)])
def test_keep_alive_beyond_the_limit_is_answered_with_the_limit(wire: Open, asked_s: int, told_s: int | None) -> None:
    assert wire().connect("", keep_alive_s=asked_s).properties.server_keep_alive == told_s


# -- refused ------------------------------------------------------------------------------------------------------


@both_versions
def test_wrong_password_is_refused(wire: Open, version: Version) -> None:
    one = wire(version)
    connack = one.connect("", user="guest", password=b"wrong")
    wanted = ReasonCode.BAD_USER_NAME_OR_PASSWORD if version is V5 else ReturnCode.BAD_USER_NAME_OR_PASSWORD
    assert connack.reason is wanted and not connack.session_present
    one.expect_end()


def test_reason_of_a_refusal_that_would_not_fit_is_left_out(wire: Open) -> None:
    for limit, is_told in ((1000, True), (10, False)):
        one = wire()
        connack = one.connect("", user="guest", password=b"wrong", maximum_packet_size=limit)
        assert connack.reason is ReasonCode.BAD_USER_NAME_OR_PASSWORD
        assert bool(connack.properties.reason_string) is is_told
        one.expect_end()


def test_client_that_takes_no_connack_gets_the_end(wire: Open) -> None:
    one = wire()
    one.send(Connect("", V5, properties=Properties(maximum_packet_size=4)))
    one.expect_end()


@both_versions
def test_right_password_is_accepted(client: Open, version: Version) -> None:
    client("", version, user="guest", password=b"guest").ping()
    client("", version, user="/:guest", password=b"guest").ping()


@both_versions
def test_vhost_that_is_not_there_is_refused(wire: Open, version: Version) -> None:
    one = wire(version)
    connack = one.connect("", user="nowhere:guest", password=b"guest")
    assert connack.reason is (ReasonCode.NOT_AUTHORIZED if version is V5 else ReturnCode.NOT_AUTHORIZED)
    one.expect_end()


def test_unknown_authentication_method_is_refused(wire: Open) -> None:
    one = wire()
    connack = one.connect("", authentication_method="CARRIER-PIGEON")
    assert connack.reason is ReasonCode.BAD_AUTHENTICATION_METHOD
    one.expect_end()


def test_nothing_behind_a_refused_connect_is_looked_at(wire: Open, client: Open, name: str) -> None:
    reader = client()
    reader.subscribe(name)
    one = wire()
    one.send(Connect("", V5, user_name="guest", password=b"wrong"), Publish(name, b"x"), Pingreq())
    assert one.expect(Connack).reason is ReasonCode.BAD_USER_NAME_OR_PASSWORD
    one.expect_end()
    reader.expect_nothing()


def test_later_protocol_level_is_answered_as_5_would(wire: Open) -> None:
    one = wire(V5)
    one.send_octets(connect_octets(level=6))
    assert one.expect(Connack).reason is ReasonCode.UNSUPPORTED_PROTOCOL_VERSION
    one.expect_end()


@pytest.mark.parametrize("level", [0, 3, 0x84, 255])
def test_unknown_protocol_level_is_answered_with_1_and_the_end(wire: Open, level: int) -> None:
    one = wire(V3)
    one.send_octets(connect_octets(level=level))
    assert one.expect(Connack).reason is ReturnCode.UNACCEPTABLE_PROTOCOL_VERSION
    one.expect_end()


@pytest.mark.parametrize("name", ["MQIsdp", "mqtt", "HTTP"])
def test_unknown_protocol_name_is_the_end(wire: Open, name: str) -> None:
    one = wire(V3)
    one.send_octets(connect_octets(name=name))
    found = one.receive()
    assert found is None or (isinstance(found, Connack) and found.reason == 1)
    if found is not None:
        one.expect_end()


WILL = text("t") + text("m")
MALFORMED_CONNECTS = {
    "reserved flag": connect_octets(flags=3),
    "will without its fields": connect_octets(flags=6),
    "will QoS without a will": connect_octets(flags=2 | 8),
    "will retain without a will": connect_octets(flags=2 | 0x20),
    "will QoS 3": connect_octets(flags=2 | 4 | 0x18, payload=text("x") + WILL),
    "will fields without a will": connect_octets(payload=text("x") + WILL),
    "user name flag without a user name": connect_octets(flags=0x82),
    "user name without its flag": connect_octets(payload=text("x") + text("guest")),
    "password flag without a password": connect_octets(flags=0xC2, payload=text("x") + text("guest")),
    "password without a user name": connect_octets(flags=0x42, payload=text("x") + text("guest")),
    "password without its flag": connect_octets(flags=0x82, payload=text("x") + text("guest") + text("guest")),
    "no client identifier": connect_octets(payload=b""),
    "client identifier that is not UTF-8": connect_octets(payload=text(b"\xff")),
    "client identifier with a surrogate": connect_octets(payload=text(b"\xed\xa0\x80")),
    "client identifier with NUL": connect_octets(payload=text("a\0")),
    "will topic that is not UTF-8": connect_octets(flags=6, payload=text("x") + text(b"\xff") + text("m")),
    "user name that is not UTF-8": connect_octets(flags=0x82, payload=text("x") + text(b"\xff")),
    "octets behind the end": connect_octets(payload=text("x") + b"\0"),
}


@pytest.mark.parametrize("what", MALFORMED_CONNECTS)
def test_connect_that_breaks_the_rules_ends_without_connack_in_3_1_1(wire: Open, what: str) -> None:
    one = wire(V3)
    one.send_octets(MALFORMED_CONNECTS[what])
    one.expect_end()


V5_WILL = b"\0" + WILL
V5_MALFORMED = {
    "reserved flag": connect_octets(level=5, flags=3),
    "will without its fields": connect_octets(level=5, flags=6),
    "will QoS without a will": connect_octets(level=5, flags=2 | 8),
    "will retain without a will": connect_octets(level=5, flags=2 | 0x20),
    "will QoS 3": connect_octets(level=5, flags=2 | 4 | 0x18, payload=text("x") + V5_WILL),
    "user name flag without a user name": connect_octets(level=5, flags=0x82),
    "user name without its flag": connect_octets(level=5, payload=text("x") + text("guest")),
    "password flag without a password": connect_octets(level=5, flags=0xC2, payload=text("x") + text("guest")),
    "password without its flag": connect_octets(level=5, flags=0x82, payload=text("x") + text("a") + text("b")),
    "no client identifier": connect_octets(level=5, payload=b""),
    "client identifier that is not UTF-8": connect_octets(level=5, payload=text(b"\xff")),
    "client identifier with NUL": connect_octets(level=5, payload=text("a\0")),
    "will topic that is not UTF-8": connect_octets(
        level=5, flags=6, payload=text("x") + b"\0" + text(b"\xff") + text("m")
    ),
    "user name that is not UTF-8": connect_octets(level=5, flags=0x82, payload=text("x") + text(b"\xff")),
}


@pytest.mark.parametrize("what", V5_MALFORMED)
def test_connect_that_breaks_the_rules_is_told_why_in_5(wire: Open, what: str) -> None:
    one = wire(V5)
    one.send_octets(V5_MALFORMED[what])
    connack = one.expect(Connack)
    assert connack.reason is ReasonCode.MALFORMED_PACKET and not connack.session_present
    one.expect_end()


@pytest.mark.parametrize(
    "packet", [Pingreq(), Publish("a", b"x"), Subscribe(1, (Subscription("a"),)), Disconnect()], ids=repr
)
@both_versions
def test_first_packet_other_than_connect_is_the_end(wire: Open, version: Version, packet: Pingreq) -> None:
    one = wire(version)
    one.send(packet)
    one.expect_end()


@both_versions
def test_second_connect_is_a_protocol_error(client: Open, name: str, version: Version) -> None:
    one = client("", version)
    one.send(Connect("", version))
    one.expect_disconnect(ReasonCode.PROTOCOL_ERROR)


def test_silence_instead_of_connect_is_the_end(tmp_path_factory: pytest.TempPathFactory) -> None:
    with MqttBroker(tmp_path_factory.mktemp("hasty"), config="[mqtt]\nhandshake_s = 1\n") as broker:
        with broker.wire() as one:
            one.expect_end()
        with broker.wire() as one:
            one.send_octets(connect_octets()[:-1])
            one.expect_end()
        broker.stop()


# -- packets that break the rules ----------------------------------------------------------------------------------

BROKEN = {
    "packet type 0": (b"\x00\x00", ReasonCode.MALFORMED_PACKET),
    "PINGREQ with flags": (b"\xc1\x00", ReasonCode.MALFORMED_PACKET),
    "PUBREL without its flags": (b"\x60\x02\x00\x01", ReasonCode.MALFORMED_PACKET),
    "SUBSCRIBE without its flags": (b"\x80\x06\x00\x01\x00\x01a\x00", ReasonCode.MALFORMED_PACKET),
    "UNSUBSCRIBE without its flags": (b"\xa0\x05\x00\x01\x00\x01a", ReasonCode.MALFORMED_PACKET),
    "DISCONNECT with flags": (b"\xe1\x00", ReasonCode.MALFORMED_PACKET),
    "QoS 3": (b"\x36\x05\x00\x01a\x00\x01", ReasonCode.MALFORMED_PACKET),
    "QoS 0 with DUP": (b"\x38\x03\x00\x01a", ReasonCode.MALFORMED_PACKET),
    "packet identifier 0": (b"\x32\x05\x00\x01a\x00\x00", None),
    "topic with a wildcard": (b"\x30\x03\x00\x01#", None),
    "topic with NUL": (b"\x30\x03\x00\x01\x00", ReasonCode.MALFORMED_PACKET),
    "topic that is not UTF-8": (b"\x30\x03\x00\x01\xff", ReasonCode.MALFORMED_PACKET),
    "empty topic": (b"\x30\x02\x00\x00", None),
    "remaining length of five octets": (b"\x30\x80\x80\x80\x80\x01", ReasonCode.MALFORMED_PACKET),
    "SUBSCRIBE without filters": (b"\x82\x02\x00\x01", None),
    "UNSUBSCRIBE without filters": (b"\xa2\x02\x00\x01", None),
    "filter of UNSUBSCRIBE that is not UTF-8": (b"\xa2\x05\x00\x01\x00\x01\xff", ReasonCode.MALFORMED_PACKET),
    "SUBSCRIBE with identifier 0": (b"\x82\x06\x00\x00\x00\x01a\x00", None),
    "SUBSCRIBE with QoS 3": (b"\x82\x06\x00\x01\x00\x01a\x03", None),
    "SUBSCRIBE with reserved bits": (b"\x82\x06\x00\x01\x00\x01a\xc0", ReasonCode.MALFORMED_PACKET),
    "filter with # in the middle": (b"\x82\x08\x00\x01\x00\x03#/a\x00", None),
    "filter with a+": (b"\x82\x07\x00\x01\x00\x02a+\x00", None),
    "empty filter": (b"\x82\x05\x00\x01\x00\x00\x00", None),
    "filter that is not UTF-8": (b"\x82\x06\x00\x01\x00\x01\xff\x00", ReasonCode.MALFORMED_PACKET),
    "CONNACK from a client": (b"\x20\x02\x00\x00", None),
    "PINGRESP from a client": (b"\xd0\x00", None),
    "SUBACK from a client": (b"\x90\x03\x00\x01\x00", None),
}


def as_version_5(octets: bytes) -> bytes:
    """With the empty properties that MQTT 5 has behind the identifier or the topic."""
    kind, body = octets[0] >> 4, octets[2:]
    if kind in (8, 10) and len(body) >= 2:
        body = body[:2] + b"\0" + body[2:]
    elif kind == 3 and body[:1] != b"\x80":
        body += b"\0"
    elif kind in (2, 9):
        body = body[:2] + b"\0" + body[2:]
    else:
        return octets
    return bytes((octets[0], len(body))) + body


@pytest.mark.parametrize("what", BROKEN)
@both_versions
def test_packet_that_breaks_the_rules_ends_the_connection(client: Open, name: str, version: Version, what: str) -> None:
    octets, reason = BROKEN[what]
    one, other = client("", version), client()
    one.send_octets(octets if version is V3 else as_version_5(octets))
    if version is V5:
        found = one.expect(Disconnect)
        assert found.reason.failed and found.reason is (reason or found.reason)
        assert found.properties.session_expiry_interval is None
    one.expect_end()
    other.ping()


PROPERTIES_REFUSED = {
    "user property whose name is not UTF-8": (b"\x26\x00\x01\xff\x00\x01a", ReasonCode.MALFORMED_PACKET),
    "user property whose value is not UTF-8": (b"\x26\x00\x01a\x00\x01\xff", ReasonCode.MALFORMED_PACKET),
    "content type that is not UTF-8": (b"\x03\x00\x01\xff", ReasonCode.MALFORMED_PACKET),
    "response topic that is not UTF-8": (b"\x08\x00\x01\xff", ReasonCode.MALFORMED_PACKET),
    "response topic with a wildcard": (b"\x08\x00\x01#", ReasonCode.PROTOCOL_ERROR),
    "content type twice": (b"\x03\x00\x01a\x03\x00\x01a", ReasonCode.PROTOCOL_ERROR),
    "property of CONNECT": (b"\x21\x00\x01", ReasonCode.MALFORMED_PACKET),
    "unknown property": (b"\x7f\x00", ReasonCode.MALFORMED_PACKET),
}


@pytest.mark.parametrize("what", PROPERTIES_REFUSED)
def test_property_that_breaks_the_rules_ends_the_connection(client: Open, what: str) -> None:
    octets, reason = PROPERTIES_REFUSED[what]
    one = client()
    body = text("a") + bytes((len(octets),)) + octets
    one.send_octets(bytes((0x30, len(body))) + body)
    one.expect_disconnect(reason)


def test_auth_without_a_method_is_a_protocol_error(client: Open) -> None:
    one = client()
    one.send(Auth(ReasonCode.REAUTHENTICATE, Properties(authentication_method="x")))
    one.expect_disconnect(ReasonCode.PROTOCOL_ERROR)


def test_no_local_on_a_shared_subscription_is_a_protocol_error(client: Open, name: str) -> None:
    one = client()
    one.send(Subscribe(1, (Subscription(f"$share/g/{name}", no_local=True),)))
    one.expect_disconnect(ReasonCode.PROTOCOL_ERROR)


@pytest.mark.parametrize("topic_filter", ["$share", "$share/", "$share/g", "$share//a", "$share/g/", "$share/+/a"])
def test_malformed_shared_subscription_is_refused(client: Open, topic_filter: str) -> None:
    one = client()
    one.send_octets(
        encode_packet(Subscribe(1, (Subscription("x" * len(topic_filter)),)), V5).replace(
            b"x" * len(topic_filter), topic_filter.encode()
        )
    )
    found = one.receive()
    if topic_filter == "$share":
        # An ordinary filter: nothing stands behind the dollar word.
        assert found is not None and not isinstance(found, Disconnect)
        return
    assert isinstance(found, Disconnect) and found.reason.failed
    one.expect_end()


def test_packet_larger_than_the_broker_takes_is_0x95(tmp_path_factory: pytest.TempPathFactory) -> None:
    config = "[mqtt]\npacket_bytes_max = 1024\n"
    with MqttBroker(tmp_path_factory.mktemp("small"), config=config) as broker:
        with broker.wire() as one:
            assert one.connect("").properties.maximum_packet_size == 1024
            one.publish("a", bytes(1024 - 7))
            one.send_octets(b"\x30\xff\xff\xff\x7f")
            one.expect_disconnect(ReasonCode.PACKET_TOO_LARGE)
        broker.stop()


# -- ping and keep alive --------------------------------------------------------------------------------------------


@both_versions
def test_ping_is_answered(client: Open, version: Version) -> None:
    one = client("", version)
    one.send(Pingreq(), Pingreq())
    one.expect(Pingresp)
    one.expect(Pingresp)


@both_versions
def test_client_that_is_silent_for_too_long_is_let_go_and_its_will_published(
    client: Open, name: str, version: Version
) -> None:
    reader = client()
    reader.subscribe(f"{name}/will", qos=1)
    one = client(name, version, keep_alive_s=1, will=Will(f"{name}/will", b"gone", QoS(1)))
    one.expect_disconnect(ReasonCode.KEEP_ALIVE_TIMEOUT)
    assert reader.payloads(1) == [b"gone"]


def test_client_without_keep_alive_in_3_1_1_may_be_silent(client: Open, name: str) -> None:
    silent, other = client("", V3, keep_alive_s=0), client("", V3, keep_alive_s=1)
    other.expect_end()
    silent.ping()


def test_any_packet_keeps_a_connection_alive(client: Open, name: str) -> None:
    busy, silent = client(keep_alive_s=1), client(keep_alive_s=1)
    silent.socket.settimeout(0.2)

    def silent_is_gone() -> bool:
        busy.publish(name, b"x")
        try:
            return silent.receive() is not None
        except TimeoutError:
            return False

    eventually(silent_is_gone)
    busy.ping()


# -- goodbye --------------------------------------------------------------------------------------------------------


@both_versions
def test_disconnect_is_the_end(client: Open, version: Version) -> None:
    one = client("", version)
    one.send(Disconnect())
    one.expect_end()


def test_nothing_behind_disconnect_is_looked_at(client: Open, name: str) -> None:
    reader, one = client(), client()
    reader.subscribe(name)
    one.send(Publish(name, b"before"), Disconnect(), Publish(name, b"after"))
    one.expect_end()
    assert reader.payloads(1) == [b"before"]
    reader.expect_nothing()


def test_session_that_was_to_end_cannot_be_kept_by_disconnect(client: Open) -> None:
    one = client()
    one.send(Disconnect(properties=Properties(session_expiry_interval=10)))
    one.expect_disconnect(ReasonCode.PROTOCOL_ERROR)


# -- rights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("qos", [1, 2])
def test_publish_without_the_right_is_refused_and_delivered_to_nobody(client: Open, name: str, qos: int) -> None:
    other, one = client(), client("", user="reader", password=b"secret")
    other.subscribe(name)
    assert one.publish(name, b"x", qos) is ReasonCode.NOT_AUTHORIZED
    one.publish(name, b"x", 0)
    other.expect_nothing()


@pytest.mark.parametrize("qos", [0, 1])
def test_publish_without_the_right_ends_the_connection_in_3_1_1(client: Open, name: str, qos: int) -> None:
    one = client("", V3, user="reader", password=b"secret")
    one.send(Publish(name, b"x", QoS(qos), packet_id=qos))
    one.expect_end()


def test_will_without_the_right_is_refused_at_connect(wire: Open, name: str) -> None:
    one = wire()
    connack = one.connect(name, user="reader", password=b"secret", will=Will(name, b"x"))
    assert connack.reason is ReasonCode.NOT_AUTHORIZED
    one.expect_end()


def test_subscription_without_the_right_is_refused_alone(tmp_path_factory: pytest.TempPathFactory) -> None:
    config = CONFIG + (
        '[[topic_permissions]]\nuser = "reader"\nvhost = "/"\nexchange = "amq.topic"\nwrite = "^$"\nread = "^open"\n'
    )
    with MqttBroker(tmp_path_factory.mktemp("rights"), config=config) as broker:
        for version, refused in ((V5, ReasonCode.NOT_AUTHORIZED), (V3, ReasonCode.UNSPECIFIED_ERROR)):
            with broker.wire(version) as one:
                one.connect("", user="reader", password=b"secret")
                assert one.subscribe("open/a", "closed/a", "open/b", qos=1).reasons == (1, refused, 1)
        broker.stop()


# -- octets -----------------------------------------------------------------------------------------------------------


@both_versions
def test_packets_may_come_octet_by_octet(wire: Open, name: str, version: Version) -> None:
    one = wire(version)
    packets = [
        Connect("", version),
        Subscribe(1, (Subscription(name, QoS(1)),)),
        Publish(name, b"hello", QoS(1), packet_id=2),
    ]
    for octet in b"".join(encode_packet(packet, version) for packet in packets):
        one.send_octets(bytes((octet,)))
    one.expect(Connack)
    found = [one.receive() for _ in range(3)]
    assert {type(packet).__name__ for packet in found} == {"Suback", "Publish", "Puback"}


def test_octets_that_mean_nothing_do_not_harm_others(broker: MqttBroker, client: Open) -> None:
    other = client()
    for octets in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 100, b"\xff" * 100, b"\x10\xff\xff\xff\x7f", b"AMQP\0\0\x09\x01"):
        with Wire(broker.mqtt_port, V3) as one:
            one.send_octets(octets)
            one.expect_end()
    other.ping()


def test_packets_that_only_a_server_may_answer_wrongly_are_ignored_or_answered(client: Open) -> None:
    one = client()
    one.send(Puback(5), Pubrel(6), Unsubscribe(7, ("nothing",)))
    kinds = [type(one.receive()).__name__ for _ in range(2)]
    assert kinds == ["Pubcomp", "Unsuback"]
