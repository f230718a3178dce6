"""The body of one packet -> its value, strictly. Format: pure functions, no I/O.

     first byte: type << 4 | flags      remaining length: varint      body ...

Whatever the standards call malformed or a protocol error is refused with the reason code they give it and the number of
the sentence in the standard of the peer's version. What needs more than the packet to judge (an alias nobody set, a
packet identifier in use, rights) is for those above. Neighbours: cutter.py finds the packets in a stream and hands them
in here; packets.py, properties.py, topics.py, fields.py below.
"""

from collections.abc import Callable
from typing import TypeAlias

from headrace.gateways.mqtt.fields import Reader, packet_id
from headrace.gateways.mqtt.packets import (
    Auth,
    Connack,
    Connect,
    Disconnect,
    Packet,
    Pingreq,
    Pingresp,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    QoS,
    RetainHandling,
    Suback,
    Subscribe,
    Subscription,
    Unsuback,
    Unsubscribe,
    Will,
)
from headrace.gateways.mqtt.properties import (
    NO_PROPERTIES,
    WILL_PROPERTIES,
    Properties,
    check_from_client,
    decode_properties,
)
from headrace.gateways.mqtt.reasons import (
    CLIENT_REASONS,
    LAWFUL_REASONS,
    SERVER_REASONS,
    MqttError,
    PacketType,
    ReasonCode,
    ReturnCode,
    Version,
    malformed,
    protocol_error,
)
from headrace.gateways.mqtt.topics import check_topic_filter, check_topic_name

PROTOCOL_NAME = b"MQTT"
OLD_PROTOCOL_NAME = b"MQIsdp"  # MQTT 3.1, before OASIS

FROM_CLIENT = frozenset(
    {
        PacketType.CONNECT,
        PacketType.PUBLISH,
        PacketType.PUBACK,
        PacketType.PUBREC,
        PacketType.PUBREL,
        PacketType.PUBCOMP,
        PacketType.SUBSCRIBE,
        PacketType.UNSUBSCRIBE,
        PacketType.PINGREQ,
        PacketType.DISCONNECT,
        PacketType.AUTH,
    }
)
FROM_SERVER = (FROM_CLIENT | {PacketType.CONNACK, PacketType.SUBACK, PacketType.UNSUBACK, PacketType.PINGRESP}) - {
    PacketType.CONNECT,
    PacketType.SUBSCRIBE,
    PacketType.UNSUBSCRIBE,
    PacketType.PINGREQ,
}

# Bits 3..0 of the first byte, of all but PUBLISH.
_FLAGS = {PacketType.PUBREL: 2, PacketType.SUBSCRIBE: 2, PacketType.UNSUBSCRIBE: 2}
_FLAG_STATEMENTS = {
    PacketType.PUBREL: "MQTT-3.6.1-1",
    PacketType.SUBSCRIBE: "MQTT-3.8.1-1",
    PacketType.UNSUBSCRIBE: "MQTT-3.10.1-1",
    PacketType.DISCONNECT: "MQTT-3.14.1-1",
    PacketType.AUTH: "MQTT-3.15.1-1",
}
_REASON_STATEMENTS = {
    PacketType.CONNACK: "MQTT-3.2.2-8",
    PacketType.PUBACK: "MQTT-3.4.2-1",
    PacketType.PUBREC: "MQTT-3.5.2-1",
    PacketType.PUBREL: "MQTT-3.6.2-1",
    PacketType.PUBCOMP: "MQTT-3.7.2-1",
    PacketType.SUBACK: "MQTT-3.9.3-2",
    PacketType.UNSUBACK: "MQTT-3.11.3-2",
    PacketType.DISCONNECT: "MQTT-3.14.2-1",
    PacketType.AUTH: "MQTT-3.15.2-1",
}


def packet_type(first_byte: int, version: Version, *, from_client: bool = True) -> PacketType:
    """Type and flags of a packet that may come from this side; PUBLISH keeps its flags for `decode_packet`."""
    number = first_byte >> 4
    if not number or (number == PacketType.AUTH and version is Version.V3_1_1):
        raise malformed(f"packet type {number} is reserved")
    kind = PacketType(number)
    if kind is not PacketType.PUBLISH and first_byte & 0xF != _FLAGS.get(kind, 0):
        fallback = "MQTT-2.1.3-1" if version is Version.V5 else "MQTT-2.2.2-2"
        raise malformed(f"{kind.name} with flags {first_byte & 0xF:04b}", _FLAG_STATEMENTS.get(kind, fallback))
    if kind not in (FROM_CLIENT if from_client else FROM_SERVER):
        raise protocol_error(f"{kind.name} from a {'client' if from_client else 'server'}")
    return kind


def decode_packet(first_byte: int, body: bytes, version: Version, *, from_client: bool = True) -> Packet:
    """Any packet of a connection whose version is known. `body` is what the remaining length covers, all of it."""
    kind = packet_type(first_byte, version, from_client=from_client)
    reader = Reader(body, version)
    packet: Packet
    match kind:
        case PacketType.CONNECT:
            return decode_connect(body)
        case PacketType.PUBLISH:
            return _publish(first_byte, reader, from_client)
        case PacketType.PUBACK | PacketType.PUBREC | PacketType.PUBREL | PacketType.PUBCOMP:
            packet = _acknowledgement(kind, reader)
        case PacketType.SUBSCRIBE:
            packet = _subscribe(reader)
        case PacketType.UNSUBSCRIBE:
            packet = _unsubscribe(reader)
        case PacketType.CONNACK:
            packet = _connack(reader)
        case PacketType.SUBACK:
            packet = _suback(reader)
        case PacketType.UNSUBACK:
            packet = _unsuback(reader)
        case PacketType.PINGREQ:
            packet = Pingreq()
        case PacketType.PINGRESP:
            packet = Pingresp()
        case PacketType.DISCONNECT:
            packet = _disconnect(reader, from_client)
        case PacketType.AUTH:
            packet = _auth(reader, from_client)
    reader.finish()
    return packet


# ---- CONNECT -------------------------------------------------------------------------------------------------------


def version_of_connect(body: bytes) -> Version | None:
    """In which version to answer a CONNECT, also one that cannot be accepted; None: the peer speaks no MQTT."""
    name = body[2 : 2 + int.from_bytes(body[:2], "big")]
    level = body[2 + len(name) : 3 + len(name)]
    if name not in (PROTOCOL_NAME, OLD_PROTOCOL_NAME) or not level:
        return None
    # The high bit is how some bridges mark themselves on levels 3 and 4.
    return Version.V5 if 5 <= level[0] < 0x80 else Version.V3_1_1


def decode_connect(body: bytes) -> Connect:
    """A CONNECT tells its own version. One that we do not speak is refused with 0x84, also MQTT 3.1."""
    reader = Reader(body, Version.V3_1_1)
    name = reader.binary()
    level = reader.u8()
    if name != PROTOCOL_NAME and not (name == OLD_PROTOCOL_NAME and level & 0x7F == 3):
        text = f"the protocol name is {name[:16]!r}, not {PROTOCOL_NAME!r}"
        raise MqttError(ReasonCode.UNSUPPORTED_PROTOCOL_VERSION, text, "MQTT-3.1.2-1")
    if level not in (Version.V3_1_1, Version.V5):
        text = f"protocol level {level} is not served; 4 (MQTT 3.1.1) and 5 are"
        raise MqttError(ReasonCode.UNSUPPORTED_PROTOCOL_VERSION, text, "MQTT-3.1.2-2")
    version = reader.version = Version(level)
    flags = reader.u8()
    _check_connect_flags(flags, version)
    keep_alive_s = reader.u16()
    v5 = version is Version.V5
    properties = decode_properties(reader, PacketType.CONNECT) if v5 else NO_PROPERTIES
    client_id = reader.text()
    clean_start = flags & 0x02 != 0
    will = _will(reader, flags) if flags & 0x04 else None
    user_name = reader.text() if flags & 0x80 else None
    password = reader.binary() if flags & 0x40 else None
    reader.finish()
    if not client_id and not clean_start and not v5:
        text = "an empty client identifier asks for a clean session"
        raise MqttError(ReasonCode.CLIENT_IDENTIFIER_NOT_VALID, text, "MQTT-3.1.3-8")
    return Connect(client_id, version, clean_start, keep_alive_s, user_name, password, will, properties)


def _check_connect_flags(flags: int, version: Version) -> None:
    v5 = version is Version.V5
    if flags & 0x01:
        raise malformed("the reserved flag of CONNECT is set", "MQTT-3.1.2-3")
    if not flags & 0x04:
        if flags & 0x18:
            raise malformed("a will QoS without a will", "MQTT-3.1.2-11" if v5 else "MQTT-3.1.2-13")
        if flags & 0x20:
            raise malformed("will retain without a will", "MQTT-3.1.2-13" if v5 else "MQTT-3.1.2-15")
    if flags & 0x18 == 0x18:
        raise malformed("the will QoS is 3", "MQTT-3.1.2-12" if v5 else "MQTT-3.1.2-14")
    if flags & 0xC0 == 0x40 and not v5:
        raise malformed("a password without a user name", "MQTT-3.1.2-22")


def _will(reader: Reader, flags: int) -> Will:
    v5 = reader.version is Version.V5
    properties = decode_properties(reader, WILL_PROPERTIES) if v5 else NO_PROPERTIES
    topic = reader.text()
    check_topic_name(topic, reader.version)
    payload = reader.binary()
    return Will(topic, payload, QoS(flags >> 3 & 3), flags & 0x20 != 0, properties)


# ---- PUBLISH and its acknowledgements ------------------------------------------------------------------------------


def check_publish_flags(first_byte: int) -> None:
    qos = first_byte >> 1 & 3
    if qos == 3:
        raise malformed("a PUBLISH with QoS 3", "MQTT-3.3.1-4")
    if not qos and first_byte & 0x08:
        raise malformed("a PUBLISH of QoS 0 marked as a duplicate", "MQTT-3.3.1-2")


def _publish(first_byte: int, reader: Reader, from_client: bool) -> Publish:
    check_publish_flags(first_byte)
    qos = QoS(first_byte >> 1 & 3)
    topic = reader.text()
    number = packet_id(reader) if qos else 0
    v5 = reader.version is Version.V5
    properties = decode_properties(reader, PacketType.PUBLISH) if v5 else NO_PROPERTIES
    if from_client:
        check_from_client(properties)
    if topic or properties.topic_alias is None:
        check_topic_name(topic, reader.version, "MQTT-3.3.2-2")
    payload = reader.take(reader.remaining)
    return Publish(topic, payload, qos, first_byte & 0x01 != 0, first_byte & 0x08 != 0, number, properties)


_Acknowledgement: TypeAlias = Callable[[int, ReasonCode, Properties], Puback | Pubrec | Pubrel | Pubcomp]
_ACKNOWLEDGEMENTS: dict[PacketType, _Acknowledgement] = {
    PacketType.PUBACK: Puback,
    PacketType.PUBREC: Pubrec,
    PacketType.PUBREL: Pubrel,
    PacketType.PUBCOMP: Pubcomp,
}


def _acknowledgement(kind: PacketType, reader: Reader) -> Puback | Pubrec | Pubrel | Pubcomp:
    number = packet_id(reader)
    reason = ReasonCode.SUCCESS
    properties = NO_PROPERTIES
    if reader.version is Version.V5:
        if reader.remaining:
            reason = _reason(reader, kind)
        if reader.remaining:
            properties = decode_properties(reader, kind)
    return _ACKNOWLEDGEMENTS[kind](number, reason, properties)


# ---- SUBSCRIBE and UNSUBSCRIBE -------------------------------------------------------------------------------------


def _subscribe(reader: Reader) -> Subscribe:
    v5 = reader.version is Version.V5
    number = packet_id(reader)
    properties = decode_properties(reader, PacketType.SUBSCRIBE) if v5 else NO_PROPERTIES
    subscriptions = []
    while reader.remaining:
        subscriptions.append(_subscription(reader))
    if not subscriptions:
        raise protocol_error("a SUBSCRIBE without a topic filter", "MQTT-3.8.3-2" if v5 else "MQTT-3.8.3-3")
    return Subscribe(number, tuple(subscriptions), properties)


def _subscription(reader: Reader) -> Subscription:
    text = reader.text()
    options = reader.u8()
    shared = check_topic_filter(text, reader.version)
    if reader.version is Version.V3_1_1:
        if options > 2:
            raise malformed(f"a requested QoS of {options:#04x}", "MQTT-3-8.3-4")
        return Subscription(text, QoS(options))
    if options & 0xC0:
        raise malformed(f"reserved bits in the subscription options {options:#04x}", "MQTT-3.8.3-5")
    if options & 0x03 == 3:
        raise protocol_error("a maximum QoS of 3")
    if options & 0x30 == 0x30:
        raise protocol_error("a retain handling of 3")
    if options & 0x04 and shared:
        raise protocol_error(f"no local on the shared subscription {text!r}", "MQTT-3.8.3-4")
    handling = RetainHandling(options >> 4)
    return Subscription(text, QoS(options & 3), options & 0x04 != 0, options & 0x08 != 0, handling)


def _unsubscribe(reader: Reader) -> Unsubscribe:
    number = packet_id(reader)
    v5 = reader.version is Version.V5
    properties = decode_properties(reader, PacketType.UNSUBSCRIBE) if v5 else NO_PROPERTIES
    filters = []
    while reader.remaining:
        text = reader.text()
        check_topic_filter(text, reader.version)
        filters.append(text)
    if not filters:
        raise protocol_error("an UNSUBSCRIBE without a topic filter", "MQTT-3.10.3-2")
    return Unsubscribe(number, tuple(filters), properties)


# ---- what servers say ----------------------------------------------------------------------------------------------


def _connack(reader: Reader) -> Connack:
    flags = reader.u8()
    if flags & 0xFE:
        raise malformed(f"CONNACK with flags {flags:08b}", "MQTT-3.2.2-1")
    if reader.version is Version.V3_1_1:
        code = reader.u8()
        if code > ReturnCode.NOT_AUTHORIZED:
            raise malformed(f"the return code {code} is reserved")
        return Connack(ReturnCode(code), flags == 1)
    reason = _reason(reader, PacketType.CONNACK)
    return Connack(reason, flags == 1, decode_properties(reader, PacketType.CONNACK))


def _suback(reader: Reader) -> Suback:
    number = packet_id(reader)
    v5 = reader.version is Version.V5
    properties = decode_properties(reader, PacketType.SUBACK) if v5 else NO_PROPERTIES
    reasons = []
    while reader.remaining:
        reason = _reason(reader, PacketType.SUBACK)
        if not v5 and reason > 2 and reason != ReasonCode.UNSPECIFIED_ERROR:
            raise malformed(f"the return code 0x{reason:02X} of SUBACK is reserved", "MQTT-3.9.3-2")
        reasons.append(reason)
    return Suback(number, tuple(reasons), properties)


def _unsuback(reader: Reader) -> Unsuback:
    number = packet_id(reader)
    if reader.version is Version.V3_1_1:
        return Unsuback(number)
    properties = decode_properties(reader, PacketType.UNSUBACK)
    reasons = []
    while reader.remaining:
        reasons.append(_reason(reader, PacketType.UNSUBACK))
    return Unsuback(number, tuple(reasons), properties)


# ---- the end, and enhanced authentication --------------------------------------------------------------------------


def _disconnect(reader: Reader, from_client: bool) -> Disconnect:
    if reader.version is Version.V3_1_1 or not reader.remaining:
        return Disconnect()
    reason = _reason(reader, PacketType.DISCONNECT, from_client)
    properties = decode_properties(reader, PacketType.DISCONNECT) if reader.remaining else NO_PROPERTIES
    if properties.session_expiry_interval is not None and not from_client:
        raise protocol_error("a session expiry interval in a server's DISCONNECT", "MQTT-3.14.2-2")
    return Disconnect(reason, properties)


def _auth(reader: Reader, from_client: bool) -> Auth:
    if not reader.remaining:
        if from_client:
            raise protocol_error("an AUTH from a client says success", "MQTT-3.15.2-1")
        return Auth()
    reason = _reason(reader, PacketType.AUTH, from_client)
    properties = decode_properties(reader, PacketType.AUTH)
    if properties.authentication_method is None:
        raise protocol_error("an AUTH without an authentication method")
    return Auth(reason, properties)


def _reason(reader: Reader, kind: PacketType, from_client: bool | None = None) -> ReasonCode:
    """A code that this packet may carry; from this side, where it matters which."""
    number = reader.u8()
    lawful = LAWFUL_REASONS[kind]
    if from_client is not None:
        lawful = (CLIENT_REASONS if from_client else SERVER_REASONS)[kind]
    if number not in lawful:
        raise protocol_error(f"{kind.name} with the reason code 0x{number:02X}", _REASON_STATEMENTS[kind])
    return ReasonCode(number)
