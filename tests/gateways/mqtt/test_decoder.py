"""One packet's bytes: every lawful packet comes back, every unlawful one gets the code that the standards give it."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from headrace.gateways.mqtt.decoder import decode_connect, decode_packet, packet_type, version_of_connect
from headrace.gateways.mqtt.encoder import encode_packet
from headrace.gateways.mqtt.packets import Connect, Packet, Publish, QoS
from headrace.gateways.mqtt.properties import Properties
from headrace.gateways.mqtt.reasons import MqttError, PacketType, ReasonCode, Version, return_code

from .strategies import client_packets, connects, last_packets, publishes, server_packets

V3, V5 = Version.V3_1_1, Version.V5
VERSIONS = st.sampled_from(Version)
FROM_CLIENT = st.one_of(
    [st.tuples(st.just(version), client_packets(version) | last_packets(version)) for version in Version]
)
FROM_SERVER = st.one_of([st.tuples(st.just(version), server_packets(version)) for version in Version])


def bodied(packet: Packet, version: Version) -> tuple[int, bytes]:
    """First byte and body of an encoded packet."""
    octets = encode_packet(packet, version)
    start = 1
    while octets[start] > 0x7F:
        start += 1
    return octets[0], octets[start + 1 :]


@given(FROM_CLIENT)
def test_every_packet_of_a_client_comes_back_as_it_went(case: tuple[Version, Packet]) -> None:
    version, packet = case
    assert decode_packet(*bodied(packet, version), version) == packet


@given(FROM_SERVER)
def test_every_packet_of_a_server_comes_back_as_it_went(case: tuple[Version, Packet]) -> None:
    version, packet = case
    assert decode_packet(*bodied(packet, version), version, from_client=False) == packet


@given(connects(V3) | connects(V5))
def test_a_connect_comes_back_and_tells_its_version(packet: Connect) -> None:
    _, body = bodied(packet, packet.version)
    assert decode_connect(body) == packet
    assert version_of_connect(body) is packet.version


@given(FROM_CLIENT, st.data())
def test_a_packet_cut_short_is_malformed_or_another_lawful_packet(
    case: tuple[Version, Packet], data: st.DataObject
) -> None:
    version, packet = case
    first_byte, body = bodied(packet, version)
    shorter = body[: data.draw(st.integers(0, max(0, len(body) - 1)))]
    try:
        found = decode_packet(first_byte, shorter, version)
    except MqttError as error:
        assert error.code in (ReasonCode.MALFORMED_PACKET, ReasonCode.PROTOCOL_ERROR)
    else:
        assert found == decode_packet(*bodied(found, version), version)


@given(VERSIONS, st.integers(0, 255), st.binary(max_size=60), st.booleans())
def test_garbage_gives_a_packet_or_an_error_of_the_protocol(
    version: Version, first_byte: int, body: bytes, from_client: bool
) -> None:
    try:
        packet = decode_packet(first_byte, body, version, from_client=from_client)
    except MqttError as error:
        assert error.code.failed
    else:
        again = bodied(packet, version)
        assert decode_packet(*again, version, from_client=from_client) == packet


@given(FROM_CLIENT)
def test_bytes_behind_the_end_are_refused_where_no_payload_takes_them(case: tuple[Version, Packet]) -> None:
    version, packet = case
    first_byte, body = bodied(packet, version)
    assume(not isinstance(packet, Publish))
    # Enough to fill what a short form left out, and then some; to SUBSCRIBE they are an empty filter.
    with pytest.raises(MqttError):
        decode_packet(first_byte, body + b"\0\0\0", version)


# ---- what is refused, and how --------------------------------------------------------------------------------------


def text(value: str) -> bytes:
    return len(value.encode()).to_bytes(2, "big") + value.encode()


def connect(flags: int, payload: bytes, level: int = 5, properties: bytes = b"\0", name: str = "MQTT") -> bytes:
    return text(name) + bytes((level, flags)) + b"\0\x0a" + (properties if level == 5 else b"") + payload


MALFORMED, PROTOCOL_ERROR = ReasonCode.MALFORMED_PACKET, ReasonCode.PROTOCOL_ERROR
BAD_FILTER, BAD_NAME = ReasonCode.TOPIC_FILTER_INVALID, ReasonCode.TOPIC_NAME_INVALID

REFUSED = [
    # first byte, body, version, code, statement
    pytest.param(0x00, b"", V5, MALFORMED, "", id="type 0"),
    pytest.param(0xF0, b"", V3, MALFORMED, "", id="AUTH in 3.1.1"),
    pytest.param(0x41, b"\0\1", V5, MALFORMED, "MQTT-2.1.3-1", id="flags of PUBACK"),
    pytest.param(0x41, b"\0\1", V3, MALFORMED, "MQTT-2.2.2-2", id="flags of PUBACK in 3.1.1"),
    pytest.param(0x60, b"\0\1", V5, MALFORMED, "MQTT-3.6.1-1", id="flags of PUBREL"),
    pytest.param(0x80, b"\0\1\0\0\1a\0", V5, MALFORMED, "MQTT-3.8.1-1", id="flags of SUBSCRIBE"),
    pytest.param(0xA0, b"\0\1\0\0\1a", V5, MALFORMED, "MQTT-3.10.1-1", id="flags of UNSUBSCRIBE"),
    pytest.param(0xC1, b"", V5, MALFORMED, "MQTT-2.1.3-1", id="flags of PINGREQ"),
    pytest.param(0xE1, b"", V3, MALFORMED, "MQTT-3.14.1-1", id="flags of DISCONNECT"),
    pytest.param(0xF1, b"", V5, MALFORMED, "MQTT-3.15.1-1", id="flags of AUTH"),
    pytest.param(0x20, b"\0\0\0", V5, PROTOCOL_ERROR, "", id="CONNACK from a client"),
    pytest.param(0x90, b"\0\1\0\0", V5, PROTOCOL_ERROR, "", id="SUBACK from a client"),
    pytest.param(0xD0, b"", V3, PROTOCOL_ERROR, "", id="PINGRESP from a client"),
    # PUBLISH
    pytest.param(0x36, text("a") + b"\0\1", V3, MALFORMED, "MQTT-3.3.1-4", id="QoS 3"),
    pytest.param(0x38, text("a"), V3, MALFORMED, "MQTT-3.3.1-2", id="dup at QoS 0"),
    pytest.param(0x30, b"\0\5a", V3, MALFORMED, "", id="topic longer than the packet"),
    pytest.param(0x30, b"", V5, MALFORMED, "", id="PUBLISH without anything"),
    pytest.param(0x30, b"\0\2\xc3\x28\0", V5, MALFORMED, "MQTT-1.5.4-1", id="topic not UTF-8"),
    pytest.param(0x30, b"\0\3\xed\xa0\x80", V3, MALFORMED, "MQTT-1.5.3-1", id="surrogate"),
    pytest.param(0x30, b"\0\2a\0\0", V5, MALFORMED, "MQTT-1.5.4-2", id="null character"),
    pytest.param(0x30, b"\0\2a\0", V3, MALFORMED, "MQTT-1.5.3-2", id="null character in 3.1.1"),
    pytest.param(0x30, text("a/+"), V3, BAD_NAME, "MQTT-3.3.2-2", id="+ in a topic name in 3.1.1"),
    pytest.param(0x30, text("a/#") + b"\0", V5, BAD_NAME, "MQTT-3.3.2-2", id="# in a topic name"),
    pytest.param(0x30, b"\0\0", V3, PROTOCOL_ERROR, "MQTT-4.7.3-1", id="empty topic in 3.1.1"),
    pytest.param(0x30, b"\0\0\0", V5, PROTOCOL_ERROR, "MQTT-4.7.3-1", id="empty topic without an alias"),
    pytest.param(0x32, text("a") + b"\0\0", V3, PROTOCOL_ERROR, "MQTT-2.3.1-1", id="packet id 0 in 3.1.1"),
    pytest.param(0x34, text("a") + b"\0\0\0", V5, PROTOCOL_ERROR, "MQTT-2.2.1-3", id="packet id 0"),
    pytest.param(0x30, text("a"), V5, MALFORMED, "", id="no property length"),
    pytest.param(0x30, text("a") + b"\5\2\0", V5, MALFORMED, "", id="properties cut short"),
    pytest.param(0x30, text("a") + b"\x80\0", V5, MALFORMED, "MQTT-1.5.5-1", id="property length too long"),
    pytest.param(0x30, text("a") + b"\3\x0b\1x", V5, MALFORMED, "", id="property cut short"),
    pytest.param(0x30, text("a") + b"\2\x0b\1", V5, PROTOCOL_ERROR, "MQTT-3.3.4-6", id="subscription id"),
    pytest.param(0x30, text("a") + b"\3\x23\0\0", V5, ReasonCode.TOPIC_ALIAS_INVALID, "MQTT-3.3.2-8", id="alias 0"),
    pytest.param(0x30, text("a") + b"\4\1\0\1\0", V5, PROTOCOL_ERROR, "", id="property twice"),
    pytest.param(0x30, text("a") + b"\2\1\2", V5, PROTOCOL_ERROR, "", id="payload format 2"),
    pytest.param(0x30, text("a") + b"\5\x11\0\0\0\1", V5, MALFORMED, "", id="CONNECT's property in PUBLISH"),
    pytest.param(0x30, text("a") + b"\2\x7f\0", V5, MALFORMED, "", id="unknown property"),
    pytest.param(0x30, text("a") + b"\4\x08\0\1+", V5, PROTOCOL_ERROR, "MQTT-3.3.2-14", id="response topic"),
    # acknowledgements
    pytest.param(0x40, b"\0\0", V5, PROTOCOL_ERROR, "MQTT-2.2.1-3", id="PUBACK of 0"),
    pytest.param(0x40, b"\0", V3, MALFORMED, "", id="PUBACK of one byte"),
    pytest.param(0x40, b"\0\1\0", V3, MALFORMED, "", id="PUBACK of three bytes in 3.1.1"),
    pytest.param(0x40, b"\0\1\1", V5, PROTOCOL_ERROR, "MQTT-3.4.2-1", id="PUBACK with QoS 1 granted"),
    pytest.param(0x50, b"\0\1\x92", V5, PROTOCOL_ERROR, "MQTT-3.5.2-1", id="PUBREC not found"),
    pytest.param(0x62, b"\0\1\x10", V5, PROTOCOL_ERROR, "MQTT-3.6.2-1", id="PUBREL no subscribers"),
    pytest.param(0x70, b"\0\1\xff", V5, PROTOCOL_ERROR, "MQTT-3.7.2-1", id="PUBCOMP with no reason"),
    pytest.param(0x40, b"\0\1\0\0\0", V5, MALFORMED, "", id="PUBACK with a byte too many"),
    # SUBSCRIBE and UNSUBSCRIBE
    pytest.param(0x82, b"\0\1", V3, PROTOCOL_ERROR, "MQTT-3.8.3-3", id="no filter in 3.1.1"),
    pytest.param(0x82, b"\0\1\0", V5, PROTOCOL_ERROR, "MQTT-3.8.3-2", id="no filter"),
    pytest.param(0x82, b"\0\0\0\0\1a\0", V5, PROTOCOL_ERROR, "MQTT-2.2.1-3", id="SUBSCRIBE of 0"),
    pytest.param(0x82, b"\0\1\0" + text("a"), V5, MALFORMED, "", id="no options"),
    pytest.param(0x82, b"\0\1" + text("a") + b"\3", V3, MALFORMED, "MQTT-3-8.3-4", id="QoS 3 in 3.1.1"),
    pytest.param(0x82, b"\0\1" + text("a") + b"\4", V3, MALFORMED, "MQTT-3-8.3-4", id="no local in 3.1.1"),
    pytest.param(0x82, b"\0\1\0" + text("a") + b"\x40", V5, MALFORMED, "MQTT-3.8.3-5", id="reserved options"),
    pytest.param(0x82, b"\0\1\0" + text("a") + b"\3", V5, PROTOCOL_ERROR, "", id="maximum QoS 3"),
    pytest.param(0x82, b"\0\1\0" + text("a") + b"\x30", V5, PROTOCOL_ERROR, "", id="retain handling 3"),
    pytest.param(
        0x82, b"\0\1\0" + text("$share/g/a") + b"\4", V5, PROTOCOL_ERROR, "MQTT-3.8.3-4", id="no local, shared"
    ),
    pytest.param(0x82, b"\0\1\2\x0b\0" + text("a") + b"\0", V5, PROTOCOL_ERROR, "", id="subscription id 0"),
    pytest.param(0x82, b"\0\1\4\x0b\1\x0b\2" + text("a") + b"\0", V5, PROTOCOL_ERROR, "", id="two of them"),
    pytest.param(0x82, b"\0\1\0" + text("a#") + b"\0", V5, BAD_FILTER, "MQTT-4.7.1-1", id="a#"),
    pytest.param(0x82, b"\0\1" + text("#/a") + b"\0", V3, BAD_FILTER, "MQTT-4.7.1-2", id="#/a"),
    pytest.param(0x82, b"\0\1" + text("a+/b") + b"\0", V3, BAD_FILTER, "MQTT-4.7.1-3", id="a+/b"),
    pytest.param(0x82, b"\0\1\0\0\0\0", V5, BAD_FILTER, "MQTT-4.7.3-1", id="empty filter"),
    pytest.param(0x82, b"\0\1\0" + text("$share//a") + b"\0", V5, BAD_FILTER, "MQTT-4.8.2-1", id="no share name"),
    pytest.param(0x82, b"\0\1\0" + text("$share/g+/a") + b"\0", V5, BAD_FILTER, "MQTT-4.8.2-2", id="share name g+"),
    pytest.param(0x82, b"\0\1\0" + text("$share/g") + b"\0", V5, BAD_FILTER, "MQTT-4.8.2-2", id="no filter shared"),
    pytest.param(0xA2, b"\0\1", V3, PROTOCOL_ERROR, "MQTT-3.10.3-2", id="UNSUBSCRIBE of nothing"),
    pytest.param(0xA2, b"\0\1\0" + text("a/#/b"), V5, BAD_FILTER, "MQTT-4.7.1-1", id="UNSUBSCRIBE of a/#/b"),
    # the end
    pytest.param(0xC0, b"\0", V5, MALFORMED, "", id="PINGREQ with a body"),
    pytest.param(0xE0, b"\0", V3, MALFORMED, "", id="DISCONNECT with a body in 3.1.1"),
    pytest.param(0xE0, b"\x8b", V5, PROTOCOL_ERROR, "MQTT-3.14.2-1", id="a client shuts the server down"),
    pytest.param(0xE0, b"\0\2\x11\0", V5, MALFORMED, "", id="DISCONNECT cut short"),
    pytest.param(0xF0, b"", V5, PROTOCOL_ERROR, "MQTT-3.15.2-1", id="AUTH success from a client"),
    pytest.param(0xF0, b"\x18", V5, MALFORMED, "", id="AUTH without property length"),
    pytest.param(0xF0, b"\x18\0", V5, PROTOCOL_ERROR, "", id="AUTH without a method"),
]


@pytest.mark.parametrize(("first_byte", "body", "version", "code", "statement"), REFUSED)
def test_packet_is_refused_with_its_code(
    first_byte: int, body: bytes, version: Version, code: ReasonCode, statement: str
) -> None:
    with pytest.raises(MqttError) as caught:
        decode_packet(first_byte, body, version)
    assert (caught.value.code, caught.value.statement) == (code, statement)


UNSUPPORTED, BAD_CLIENT_ID = ReasonCode.UNSUPPORTED_PROTOCOL_VERSION, ReasonCode.CLIENT_IDENTIFIER_NOT_VALID
REFUSED_CONNECTS = [
    # body, code, statement, what 3.1.1 answers (None: nothing), version of the answer
    pytest.param(connect(2, text("c"), level=3, name="MQIsdp"), UNSUPPORTED, "MQTT-3.1.2-2", V3, id="MQTT 3.1"),
    pytest.param(connect(2, text("c"), level=0x84), UNSUPPORTED, "MQTT-3.1.2-2", V3, id="a bridge"),
    pytest.param(connect(2, text("c"), level=6), UNSUPPORTED, "MQTT-3.1.2-2", V5, id="MQTT 6"),
    pytest.param(connect(2, text("c"), name="HTTP"), UNSUPPORTED, "MQTT-3.1.2-1", None, id="another protocol"),
    pytest.param(connect(3, text("c")), MALFORMED, "MQTT-3.1.2-3", V5, id="reserved flag"),
    pytest.param(connect(0x0A, text("c")), MALFORMED, "MQTT-3.1.2-11", V5, id="will QoS without will"),
    pytest.param(connect(0x0A, text("c"), 4), MALFORMED, "MQTT-3.1.2-13", V3, id="will QoS, 3.1.1"),
    pytest.param(connect(0x22, text("c")), MALFORMED, "MQTT-3.1.2-13", V5, id="will retain without will"),
    pytest.param(connect(0x22, text("c"), 4), MALFORMED, "MQTT-3.1.2-15", V3, id="will retain, 3.1.1"),
    pytest.param(connect(0x1E, text("c")), MALFORMED, "MQTT-3.1.2-12", V5, id="will QoS 3"),
    pytest.param(connect(0x1E, text("c"), 4), MALFORMED, "MQTT-3.1.2-14", V3, id="will QoS 3, 3.1.1"),
    pytest.param(connect(0x42, text("c") + text("p"), 4), MALFORMED, "MQTT-3.1.2-22", V3, id="password alone"),
    pytest.param(connect(0x00, text(""), 4), BAD_CLIENT_ID, "MQTT-3.1.3-8", V3, id="no client id to keep"),
    pytest.param(
        connect(0x06, text("c") + b"\0" + text("a/+") + text("")), BAD_NAME, "MQTT-4.7.0-1", V5, id="will a/+"
    ),
    pytest.param(connect(0x06, text("c") + text("#") + text(""), 4), BAD_NAME, "MQTT-4.7.1-1", V3, id="will #"),
    pytest.param(connect(0x82, text("c")), MALFORMED, "", V5, id="user name missing"),
    pytest.param(connect(0x02, text("c") + b"x"), MALFORMED, "", V5, id="a byte too many"),
    pytest.param(connect(0x02, b"\0\1\xff"), MALFORMED, "MQTT-1.5.4-1", V5, id="client id not UTF-8"),
    pytest.param(connect(0x02, text("c"), properties=b"\3\x21\0\0"), PROTOCOL_ERROR, "", V5, id="receive maximum 0"),
    pytest.param(connect(0x02, text("c"), properties=b"\5\x27\0\0\0\0"), PROTOCOL_ERROR, "", V5, id="packet size 0"),
    pytest.param(connect(0x02, text("c"), properties=b"\2\x17\2"), PROTOCOL_ERROR, "", V5, id="problem information 2"),
    pytest.param(connect(0x02, text("c"), properties=b"\4\x16\0\1x"), PROTOCOL_ERROR, "", V5, id="data, no method"),
    pytest.param(b"\0\4MQ", MALFORMED, "", None, id="cut short"),
]


@pytest.mark.parametrize(("body", "code", "statement", "answered_in"), REFUSED_CONNECTS)
def test_connect_is_refused_with_its_code(
    body: bytes, code: ReasonCode, statement: str, answered_in: Version | None
) -> None:
    with pytest.raises(MqttError) as caught:
        decode_connect(body)
    assert (caught.value.code, caught.value.statement) == (code, statement)
    assert version_of_connect(body) is answered_in


def test_only_some_errors_have_a_connack_in_3_1_1() -> None:
    assert return_code(UNSUPPORTED) == 1
    assert return_code(BAD_CLIENT_ID) == 2
    assert return_code(MALFORMED) is None


def test_password_without_a_user_name_is_lawful_in_mqtt_5() -> None:
    assert decode_connect(connect(0x42, text("c") + text("p"))).password == b"p"


def test_byte_order_mark_is_kept() -> None:
    packet = decode_packet(0x30, text("\ufeffa"), V3)
    assert isinstance(packet, Publish) and packet.topic == "\ufeffa"


def test_empty_topic_with_an_alias_is_lawful() -> None:
    packet = decode_packet(0x30, b"\0\0\3\x23\0\7x", V5)
    assert packet == Publish("", b"x", QoS.AT_MOST_ONCE, properties=Properties(topic_alias=7))


@given(publishes(V5, ()))
def test_a_server_may_send_what_a_client_may_not(packet: Publish) -> None:
    assert decode_packet(*bodied(packet, V5), V5, from_client=False) == packet


def test_server_may_not_set_the_session_expiry_at_the_end() -> None:
    with pytest.raises(MqttError, match=r"MQTT-3\.14\.2-2"):
        decode_packet(0xE0, b"\0\5\x11\0\0\0\1", V5, from_client=False)


def test_type_is_known_from_the_first_byte_alone() -> None:
    assert packet_type(0x62, V5) is PacketType.PUBREL
