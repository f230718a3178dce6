"""Reason codes, and the one exception by which a peer's mistake is told. Values.

MQTT 5 has one byte for every outcome: below 0x80 it went well, from 0x80 on it failed. Which packet may carry which
code is the table below. MQTT 3.1.1 knows such a byte in CONNACK only (`ReturnCode`) and in SUBACK (0x80); everything
else is answered there by closing the connection, which `return_code` says with None.
A statement is the number that the standards give a sentence, `MQTT-3.1.2-3`; the two standards count differently.
Neighbours: every other file of this door raises MqttError; the session answers it with CONNACK, DISCONNECT or a close.
"""

from enum import IntEnum

from headrace.core_log.errors import PeerError


class Version(IntEnum):
    """The protocol level of CONNECT."""

    V3_1_1 = 4
    V5 = 5


class PacketType(IntEnum):
    """The high four bits of a packet's first byte. AUTH is MQTT 5's own."""

    CONNECT = 1
    CONNACK = 2
    PUBLISH = 3
    PUBACK = 4
    PUBREC = 5
    PUBREL = 6
    PUBCOMP = 7
    SUBSCRIBE = 8
    SUBACK = 9
    UNSUBSCRIBE = 10
    UNSUBACK = 11
    PINGREQ = 12
    PINGRESP = 13
    DISCONNECT = 14
    AUTH = 15


class ReasonCode(IntEnum):
    """MQTT 5, table 2-6. Success has two more names: 0x00 ends a session normally and grants QoS 0."""

    SUCCESS = 0x00
    GRANTED_QOS_1 = 0x01
    GRANTED_QOS_2 = 0x02
    DISCONNECT_WITH_WILL = 0x04
    NO_MATCHING_SUBSCRIBERS = 0x10
    NO_SUBSCRIPTION_EXISTED = 0x11
    CONTINUE_AUTHENTICATION = 0x18
    REAUTHENTICATE = 0x19
    UNSPECIFIED_ERROR = 0x80
    MALFORMED_PACKET = 0x81
    PROTOCOL_ERROR = 0x82
    IMPLEMENTATION_SPECIFIC_ERROR = 0x83
    UNSUPPORTED_PROTOCOL_VERSION = 0x84
    CLIENT_IDENTIFIER_NOT_VALID = 0x85
    BAD_USER_NAME_OR_PASSWORD = 0x86
    NOT_AUTHORIZED = 0x87
    SERVER_UNAVAILABLE = 0x88
    SERVER_BUSY = 0x89
    BANNED = 0x8A
    SERVER_SHUTTING_DOWN = 0x8B
    BAD_AUTHENTICATION_METHOD = 0x8C
    KEEP_ALIVE_TIMEOUT = 0x8D
    SESSION_TAKEN_OVER = 0x8E
    TOPIC_FILTER_INVALID = 0x8F
    TOPIC_NAME_INVALID = 0x90
    PACKET_IDENTIFIER_IN_USE = 0x91
    PACKET_IDENTIFIER_NOT_FOUND = 0x92
    RECEIVE_MAXIMUM_EXCEEDED = 0x93
    TOPIC_ALIAS_INVALID = 0x94
    PACKET_TOO_LARGE = 0x95
    MESSAGE_RATE_TOO_HIGH = 0x96
    QUOTA_EXCEEDED = 0x97
    ADMINISTRATIVE_ACTION = 0x98
    PAYLOAD_FORMAT_INVALID = 0x99
    RETAIN_NOT_SUPPORTED = 0x9A
    QOS_NOT_SUPPORTED = 0x9B
    USE_ANOTHER_SERVER = 0x9C
    SERVER_MOVED = 0x9D
    SHARED_SUBSCRIPTIONS_NOT_SUPPORTED = 0x9E
    CONNECTION_RATE_EXCEEDED = 0x9F
    MAXIMUM_CONNECT_TIME = 0xA0
    SUBSCRIPTION_IDENTIFIERS_NOT_SUPPORTED = 0xA1
    WILDCARD_SUBSCRIPTIONS_NOT_SUPPORTED = 0xA2

    NORMAL_DISCONNECTION = 0x00
    GRANTED_QOS_0 = 0x00

    @property
    def failed(self) -> bool:
        return self >= 0x80


class ReturnCode(IntEnum):
    """MQTT 3.1.1, table 3.1: the second byte of CONNACK."""

    ACCEPTED = 0
    UNACCEPTABLE_PROTOCOL_VERSION = 1
    IDENTIFIER_REJECTED = 2
    SERVER_UNAVAILABLE = 3
    BAD_USER_NAME_OR_PASSWORD = 4
    NOT_AUTHORIZED = 5


def _codes(*values: int) -> frozenset[ReasonCode]:
    return frozenset(map(ReasonCode, values))


_PUBLISHED = _codes(0x00, 0x10, 0x80, 0x83, 0x87, 0x90, 0x91, 0x97, 0x99)
_RELEASED = _codes(0x00, 0x92)
_SUBSCRIBED = _codes(0x00, 0x01, 0x02, 0x80, 0x83, 0x87, 0x8F, 0x91, 0x97, 0x9E, 0xA1, 0xA2)
_UNSUBSCRIBED = _codes(0x00, 0x11, 0x80, 0x83, 0x87, 0x8F, 0x91)
_CONNECTED = _codes(0x00, *range(0x80, 0x8B), 0x8C, 0x90, 0x95, 0x97, 0x99, 0x9A, 0x9B, 0x9C, 0x9D, 0x9F)
# [MQTT-3.14.2-1] 0x04 comes from clients alone; these from servers alone. 0x8C stands in table 2-6, not in 3-10.
_SERVER_ENDS = _codes(0x87, 0x89, 0x8B, 0x8C, 0x8D, 0x8E, 0x8F, *range(0x9A, 0xA3))
_EITHER_ENDS = _codes(0x00, 0x80, 0x81, 0x82, 0x83, 0x90, 0x93, 0x94, 0x95, 0x96, 0x97, 0x98, 0x99)

# Which codes a packet may carry. CONNECT, PUBLISH, SUBSCRIBE, UNSUBSCRIBE, PINGREQ and PINGRESP carry none.
LAWFUL_REASONS: dict[PacketType, frozenset[ReasonCode]] = {
    PacketType.CONNACK: _CONNECTED,
    PacketType.PUBACK: _PUBLISHED,
    PacketType.PUBREC: _PUBLISHED,
    PacketType.PUBREL: _RELEASED,
    PacketType.PUBCOMP: _RELEASED,
    PacketType.SUBACK: _SUBSCRIBED,
    PacketType.UNSUBACK: _UNSUBSCRIBED,
    PacketType.DISCONNECT: _EITHER_ENDS | _SERVER_ENDS | _codes(0x04),
    PacketType.AUTH: _codes(0x00, 0x18, 0x19),
}
# What only one side may say.
CLIENT_REASONS: dict[PacketType, frozenset[ReasonCode]] = {
    PacketType.DISCONNECT: _EITHER_ENDS | _codes(0x04),
    PacketType.AUTH: _codes(0x18, 0x19),
}
SERVER_REASONS: dict[PacketType, frozenset[ReasonCode]] = {
    PacketType.DISCONNECT: _EITHER_ENDS | _SERVER_ENDS,
    PacketType.AUTH: _codes(0x00, 0x18),
}

_RETURN_CODES = {
    ReasonCode.SUCCESS: ReturnCode.ACCEPTED,
    ReasonCode.UNSUPPORTED_PROTOCOL_VERSION: ReturnCode.UNACCEPTABLE_PROTOCOL_VERSION,
    ReasonCode.CLIENT_IDENTIFIER_NOT_VALID: ReturnCode.IDENTIFIER_REJECTED,
    ReasonCode.SERVER_UNAVAILABLE: ReturnCode.SERVER_UNAVAILABLE,
    ReasonCode.SERVER_BUSY: ReturnCode.SERVER_UNAVAILABLE,
    ReasonCode.SERVER_SHUTTING_DOWN: ReturnCode.SERVER_UNAVAILABLE,
    ReasonCode.QUOTA_EXCEEDED: ReturnCode.SERVER_UNAVAILABLE,
    ReasonCode.CONNECTION_RATE_EXCEEDED: ReturnCode.SERVER_UNAVAILABLE,
    ReasonCode.BAD_USER_NAME_OR_PASSWORD: ReturnCode.BAD_USER_NAME_OR_PASSWORD,
    ReasonCode.NOT_AUTHORIZED: ReturnCode.NOT_AUTHORIZED,
    ReasonCode.BANNED: ReturnCode.NOT_AUTHORIZED,
}


def return_code(reason: ReasonCode) -> ReturnCode | None:
    """What CONNACK of MQTT 3.1.1 says for it; None: nothing, the connection is closed without a CONNACK."""
    return _RETURN_CODES.get(reason)


class MqttError(PeerError):
    """The peer broke the protocol, and the connection ends.

    In MQTT 5 `code` goes into CONNACK before the connection stands and into DISCONNECT afterwards. `statement` is the
    numbered sentence that was broken, in the standard of the peer's version; empty where no sentence has a number.
    """

    def __init__(self, code: ReasonCode, text: str, statement: str = "") -> None:
        super().__init__(code, text)
        self.code: ReasonCode = code
        self.statement = statement

    def __str__(self) -> str:
        numbered = f" [{self.statement}]" if self.statement else ""
        return f"0x{self.code:02X} {self.code.name}: {self.text}{numbered}"


def malformed(text: str, statement: str = "") -> MqttError:
    """Cannot be read."""
    return MqttError(ReasonCode.MALFORMED_PACKET, text, statement)


def protocol_error(text: str, statement: str = "") -> MqttError:
    """Can be read, and is not allowed (here, or twice)."""
    return MqttError(ReasonCode.PROTOCOL_ERROR, text, statement)
