"""What goes out: runs equal single packets, and amqtt and paho read and write the same octets as we do."""

from collections.abc import Coroutine
from dataclasses import replace
from io import BytesIO
from typing import Any

import pytest
from amqtt.adapters import BufferReader
from amqtt.mqtt import packet_class
from amqtt.mqtt.packet import MQTTFixedHeader
from hypothesis import assume, given
from hypothesis import strategies as st
from paho.mqtt import client as paho
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.subscribeoptions import SubscribeOptions

from headrace.gateways.mqtt.decoder import decode_connect, decode_packet
from headrace.gateways.mqtt.encoder import (
    encode_ack_run,
    encode_packet,
    encode_publish_run,
    publish_bytes,
    publish_first_byte,
)
from headrace.gateways.mqtt.packets import (
    Auth,
    Connack,
    Connect,
    Disconnect,
    Packet,
    Puback,
    Publish,
    QoS,
    RetainHandling,
    Suback,
    Subscribe,
    Subscription,
    Unsubscribe,
)
from headrace.gateways.mqtt.properties import NO_PROPERTIES, Properties, encode_blob
from headrace.gateways.mqtt.reasons import PacketType, ReasonCode, ReturnCode, Version

from .paho_properties import as_paho
from .strategies import (
    FILTER,
    PACKET_ID,
    QOS,
    TOPIC,
    client_packets,
    connects,
    last_packets,
    properties,
    publishes,
    server_packets,
)

V3, V5 = Version.V3_1_1, Version.V5


def split(octets: bytes) -> tuple[int, bytes]:
    """First byte and body."""
    start = 1
    while octets[start] > 0x7F:
        start += 1
    return octets[0], octets[start + 1 :]


# ---- runs ----------------------------------------------------------------------------------------------------------

ROWS = st.lists(
    st.tuples(
        st.sampled_from(["a", "a/b", "é/" * 40]),
        st.sampled_from([NO_PROPERTIES, Properties(content_type="t" * 130), Properties(payload_format_indicator=1)]),
        st.sampled_from([b"", b"x", bytes(100), bytes(20_000)]),
    ),
    min_size=1,
    max_size=8,
)


@given(ROWS, QOS, st.booleans(), st.booleans(), st.sampled_from(Version))
def test_a_run_is_the_single_packets_joined(
    rows: list[tuple[str, Properties, bytes]], qos: QoS, retain: bool, dup: bool, version: Version
) -> None:
    dup = dup and qos > 0
    ids = [*range(1, len(rows) + 1)] if qos else []
    single = [
        encode_packet(Publish(topic, payload, qos, retain, dup, ids[index] if qos else 0, found), version)
        for index, (topic, found, payload) in enumerate(rows)
    ]
    topics = [topic.encode() for topic, _, _ in rows]
    blobs = [encode_blob(found) for _, found, _ in rows]
    payloads = [payload for _, _, payload in rows]
    first_byte = publish_first_byte(qos, retain, dup)
    assert encode_publish_run(first_byte, topics, blobs, payloads, ids, version) == b"".join(single)
    for row, octets in zip(zip(topics, blobs, payloads, strict=True), single, strict=True):
        assert publish_bytes(*row, qos, version) == len(octets)


@pytest.mark.parametrize("count", [1, 2, 50])
@pytest.mark.parametrize("sizes", [(5,), (5, 6), (0,)])
@pytest.mark.parametrize("qos", QoS)
def test_a_run_of_one_topic_is_the_single_packets_joined(count: int, sizes: tuple[int, ...], qos: QoS) -> None:
    payloads = [bytes(sizes[index % len(sizes)]) for index in range(count)]
    ids = [*range(1, count + 1)] if qos else []
    single = [
        encode_packet(Publish("a/b", payload, qos, packet_id=ids[index] if qos else 0), V5)
        for index, payload in enumerate(payloads)
    ]
    octets = encode_publish_run(publish_first_byte(qos, False), [b"a/b"] * count, [b""] * count, payloads, ids, V5)
    assert octets == b"".join(single)


def test_properties_and_topics_may_differ_within_a_run() -> None:
    a, text = b"\x01\x01", b"a"
    assert encode_publish_run(0x30, [text] * 2, [b"", a], [b"x"] * 2, [], V5) == b"0\x05\0\1a\0x0\x07\0\1a\2\1\1x"
    assert encode_publish_run(0x30, [text] * 2, [b"", a], [b"x"] * 2, [], V3) == b"0\x04\0\1ax0\x04\0\1ax"
    assert encode_publish_run(0x30, [text, b"bc"], [a] * 2, [b""] * 2, [], V3) == b"0\x03\0\1a0\x04\0\2bc"


def test_an_empty_run_is_nothing() -> None:
    assert encode_publish_run(0x30, [], [], [], [], V5) == b""
    assert encode_ack_run(PacketType.PUBACK, []) == b""


@given(st.lists(PACKET_ID, min_size=1, max_size=20), st.sampled_from(Version))
def test_a_run_of_acknowledgements_is_the_single_packets_joined(ids: list[int], version: Version) -> None:
    assert encode_ack_run(PacketType.PUBACK, ids) == b"".join(encode_packet(Puback(one), version) for one in ids)


@pytest.mark.parametrize(
    ("first_byte", "ids"), [(0x30, [1]), (0x32, []), (0x32, [0]), (0x36, [1]), (0x38, []), (0x40, [])]
)
def test_a_run_that_no_version_can_say_is_our_mistake(first_byte: int, ids: list[int]) -> None:
    with pytest.raises(ValueError):
        encode_publish_run(first_byte, [b"a"], [b""], [b"x"], ids, V5)


# ---- single packets ------------------------------------------------------------------------------------------------

OUR_MISTAKES = [
    pytest.param(Publish("a", packet_id=1), V5, id="identifier at QoS 0"),
    pytest.param(Publish("a", qos=QoS(1)), V5, id="no identifier at QoS 1"),
    pytest.param(Publish("a", dup=True), V5, id="dup at QoS 0"),
    pytest.param(Publish("a\0"), V5, id="null character"),
    pytest.param(Publish("a" * 65_536), V5, id="topic too long"),
    pytest.param(Puback(0), V5, id="identifier 0"),
    pytest.param(Puback(65_536), V5, id="identifier too large"),
    pytest.param(Puback(1, ReasonCode.BANNED), V5, id="reason of another packet"),
    pytest.param(Puback(1, properties=Properties(topic_alias=1)), V5, id="property of another packet"),
    pytest.param(Subscribe(1, ()), V5, id="no filter"),
    pytest.param(Unsubscribe(1, ()), V3, id="no filter to give up"),
    pytest.param(Suback(1, (ReasonCode.SERVER_BUSY,)), V5, id="reason that SUBACK has not"),
    pytest.param(Connack(ReturnCode.NOT_AUTHORIZED), V5, id="return code in MQTT 5"),
    pytest.param(Connack(ReasonCode.MALFORMED_PACKET), V3, id="reason that 3.1.1 cannot say"),
    pytest.param(Connect("c", V3, password=b"p"), V3, id="password alone in 3.1.1"),
    pytest.param(Auth(ReasonCode.CONTINUE_AUTHENTICATION), V3, id="AUTH in 3.1.1"),
]


@pytest.mark.parametrize(("packet", "version"), OUR_MISTAKES)
def test_what_the_wire_cannot_say_is_our_mistake(packet: Packet, version: Version) -> None:
    with pytest.raises(ValueError):
        encode_packet(packet, version)


def test_3_1_1_hears_every_failure_of_a_subscription_as_0x80() -> None:
    packet = Suback(1, (ReasonCode.GRANTED_QOS_1, ReasonCode.QUOTA_EXCEEDED))
    assert encode_packet(packet, V3) == b"\x90\x04\0\1\1\x80"


def test_3_1_1_hears_a_refusal_as_its_return_code() -> None:
    assert encode_packet(Connack(ReasonCode.BANNED), V3) == b"\x20\x02\0\x05"


@given(server_packets(V5).filter(lambda packet: isinstance(packet, Puback | Suback | Publish)))
def test_what_3_1_1_has_no_place_for_is_left_out(packet: Puback | Suback | Publish) -> None:
    assume(not isinstance(packet, Publish) or packet.topic)
    plain = replace(packet, properties=NO_PROPERTIES)
    if isinstance(plain, Puback):
        plain = Puback(plain.packet_id)
    assert encode_packet(packet, V3) == encode_packet(plain, V3)
    assert decode_packet(*split(encode_packet(plain, V3)), V3, from_client=False)


# ---- amqtt: MQTT 3.1.1 ---------------------------------------------------------------------------------------------


def finish(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that waits for nothing."""
    with pytest.raises(StopIteration) as stopped:
        coroutine.send(None)
    return stopped.value.value


def read_by_amqtt(octets: bytes) -> Any:
    reader = BufferReader(octets)
    head = finish(MQTTFixedHeader.from_stream(reader))
    return finish(packet_class(head).from_stream(reader, fixed_header=head))


@given(client_packets(V3) | last_packets(V3) | connects(V3).filter(lambda packet: bool(packet.client_id)))
def test_amqtt_reads_what_we_write_and_writes_the_same_octets(packet: Packet) -> None:
    octets = encode_packet(packet, V3)
    # amqtt reads a password as text.
    if isinstance(packet, Connect) and packet.password is not None and not packet.password.isascii():
        return
    assert bytes(read_by_amqtt(octets).to_bytes()) == octets


@given(server_packets(V3))
def test_amqtt_reads_what_we_send_as_a_server(packet: Packet) -> None:
    octets = encode_packet(packet, V3)
    assert bytes(read_by_amqtt(octets).to_bytes()) == octets


@given(publishes(V3))
def test_amqtt_finds_in_a_publish_what_we_put_there(packet: Publish) -> None:
    found = read_by_amqtt(encode_packet(packet, V3))
    assert (found.topic_name, bytes(found.data), found.qos) == (packet.topic, packet.payload, packet.qos)
    assert (found.retain_flag, found.dup_flag, found.packet_id or 0) == (packet.retain, packet.dup, packet.packet_id)


# ---- paho: both versions -------------------------------------------------------------------------------------------


class Paho(paho.Client):
    """A client whose packets stay here."""

    def __init__(self, version: Version, **arguments: Any) -> None:
        super().__init__(paho.CallbackAPIVersion.VERSION2, "c", protocol=version, **arguments)
        self.sent: list[bytes] = []
        self._sock = BytesIO()  # it sends nothing without one; this one is only closed

    def _packet_queue(self, command: int, packet: bytes, *others: Any, **more: Any) -> paho.MQTTErrorCode:
        self.sent.append(bytes(packet))
        return paho.MQTTErrorCode.MQTT_ERR_SUCCESS

    def receive(self, octets: bytes) -> list[paho.MQTTMessage]:
        """The messages that paho hands to its user for these octets."""
        messages: list[paho.MQTTMessage] = []
        self.on_message = lambda client, userdata, message: messages.append(message)
        first_byte, body = split(octets)
        self._in_packet.update(command=first_byte, packet=bytearray(body), remaining_length=len(body))
        self._packet_handle()
        return messages


@pytest.mark.parametrize("version", Version)
@given(data=st.data())
def test_we_read_a_publish_of_paho(version: Version, data: st.DataObject) -> None:
    packet = data.draw(publishes(version, ("subscription_identifiers",)))
    client = Paho(version)
    client._send_publish(
        packet.packet_id,
        packet.topic.encode(),
        packet.payload,
        packet.qos,
        packet.retain,
        packet.dup,
        properties=as_paho(packet.properties, PacketTypes.PUBLISH) if version is V5 else None,
    )
    assert decode_packet(*split(client.sent[0]), version) == packet


@pytest.mark.parametrize("version", Version)
@given(data=st.data())
def test_paho_reads_our_publish(version: Version, data: st.DataObject) -> None:
    packet = data.draw(publishes(version, ("subscription_identifiers", "topic_alias")).filter(lambda one: one.qos < 2))
    (message,) = Paho(version).receive(encode_packet(packet, version))
    assert (message.topic, message.payload, message.qos) == (packet.topic, packet.payload, packet.qos)
    assert (bool(message.retain), bool(message.dup), message.mid) == (packet.retain, packet.dup, packet.packet_id)
    if version is V5:
        assert message.properties is not None
        assert bytes(message.properties.pack())[1:] == bytes(as_paho(packet.properties, PacketTypes.PUBLISH).pack())[1:]


@pytest.mark.parametrize("version", Version)
@given(data=st.data())
def test_we_read_a_connect_of_paho(version: Version, data: st.DataObject) -> None:
    packet = data.draw(connects(version).filter(lambda one: one.user_name is not None or one.password is None))
    arguments = {} if version is V5 else {"clean_session": packet.clean_start}
    client = Paho(version, **arguments)
    client._client_id = packet.client_id.encode()
    client._username = None if packet.user_name is None else packet.user_name.encode()
    client._password = packet.password
    if version is V5:
        client._clean_start = packet.clean_start
        client._connect_properties = as_paho(packet.properties, PacketTypes.CONNECT)
    if packet.will is not None:
        will = as_paho(packet.will.properties, PacketTypes.WILLMESSAGE) if version is V5 else None
        client.will_set(packet.will.topic, packet.will.payload, packet.will.qos, packet.will.retain, will)
    client._send_connect(packet.keep_alive_s)
    assert decode_connect(split(client.sent[0])[1]) == packet


@given(
    st.lists(st.tuples(FILTER, QOS, st.booleans(), st.booleans(), st.sampled_from(RetainHandling)), min_size=1),
    properties(PacketType.SUBSCRIBE),
)
def test_we_read_a_subscribe_of_paho(
    asked: list[tuple[str, QoS, bool, bool, RetainHandling]], found: Properties
) -> None:
    client = Paho(V5)
    topics = [
        (text, SubscribeOptions(int(qos), no_local, kept, int(when))) for text, qos, no_local, kept, when in asked
    ]
    client._send_subscribe(False, topics, as_paho(found, PacketTypes.SUBSCRIBE))
    packet = decode_packet(*split(client.sent[0]), V5)
    assert packet == Subscribe(1, tuple(Subscription(*one) for one in asked), found)


@pytest.mark.parametrize("version", Version)
@given(filters=st.lists(FILTER, min_size=1, max_size=3))
def test_we_read_an_unsubscribe_of_paho(version: Version, filters: list[str]) -> None:
    client = Paho(version)
    client._send_unsubscribe(False, [one.encode() for one in filters])
    assert decode_packet(*split(client.sent[0]), version) == Unsubscribe(1, tuple(filters))


@given(TOPIC)
def test_we_read_the_short_packets_of_paho(topic: str) -> None:
    client = Paho(V5)
    client._send_pingreq()
    client._send_puback(7)
    client._send_pubrel(8)
    client._send_disconnect()
    assert client.sent[0] == b"\xc0\0"
    assert [decode_packet(*split(octets), V5) for octets in client.sent[1:]] == [
        Puback(7),
        decode_packet(0x62, b"\0\x08", V5),
        Disconnect(),
    ]
