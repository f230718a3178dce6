"""The properties of MQTT 5: what they are called, what they hold, which packet may have which. Format: pure.

    varint length, then for each property:  varint identifier, value

The *blob* of a PUBLISH is what stands behind that length, as it came. It is what the log keeps of a message published
over MQTT and what its readers over MQTT get back; MQTT 3.1.1 has none, so its blob is empty, as that of a PUBLISH
without properties is. `scan` looks at a blob once, at ingress, and refuses all that `decode` would: what passed it can
be decoded and edited. Neighbours: fields.py below; packets.py, decoder.py, cutter.py and the mapping to AMQP above.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum, auto
from typing import NamedTuple

from headrace.filtering.tags import NO_TAGS, InvalidTags, Tags, collect
from headrace.gateways.mqtt.fields import (
    U16,
    U32,
    Reader,
    encode_binary,
    encode_text,
    encode_varint,
)
from headrace.gateways.mqtt.reasons import MqttError, PacketType, ReasonCode, Version, malformed, protocol_error


@dataclass(frozen=True, slots=True, repr=False)
class Properties:
    """All twenty-seven under their names in the standard, absent ones None. Intervals are in seconds."""

    payload_format_indicator: int | None = None
    message_expiry_interval: int | None = None
    content_type: str | None = None
    response_topic: str | None = None
    correlation_data: bytes | None = None
    # One in SUBSCRIBE; in a PUBLISH to a client, one for each subscription that matched.
    subscription_identifiers: tuple[int, ...] = ()
    session_expiry_interval: int | None = None
    assigned_client_identifier: str | None = None
    server_keep_alive: int | None = None
    authentication_method: str | None = None
    authentication_data: bytes | None = None
    request_problem_information: bool | None = None
    will_delay_interval: int | None = None
    request_response_information: bool | None = None
    response_information: str | None = None
    server_reference: str | None = None
    reason_string: str | None = None
    receive_maximum: int | None = None
    topic_alias_maximum: int | None = None
    topic_alias: int | None = None
    maximum_qos: int | None = None
    retain_available: bool | None = None
    user_properties: tuple[tuple[str, str], ...] = ()
    maximum_packet_size: int | None = None
    wildcard_subscription_available: bool | None = None
    subscription_identifier_available: bool | None = None
    shared_subscription_available: bool | None = None

    def __repr__(self) -> str:
        named = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return f"Properties({', '.join(f'{name}={value!r}' for name, value in named if value not in (None, ()))})"


NO_PROPERTIES = Properties()

_WILL = 0  # the will's properties stand in CONNECT beside CONNECT's own; no packet has this type
WILL_PROPERTIES: int = _WILL


class _Kind(Enum):
    FLAG = auto()
    BYTE = auto()
    U16 = auto()
    U32 = auto()
    VARINT = auto()
    TEXT = auto()
    BINARY = auto()
    PAIR = auto()


class _Property(NamedTuple):
    identifier: int
    name: str
    kind: _Kind
    places: frozenset[int]
    # The least and most that a number may be; None: all that fit.
    least: int = 0
    most: int | None = None


_ACKS = (PacketType.PUBACK, PacketType.PUBREC, PacketType.PUBREL, PacketType.PUBCOMP)
_ANSWERS = (PacketType.CONNACK, *_ACKS, PacketType.SUBACK, PacketType.UNSUBACK, PacketType.DISCONNECT, PacketType.AUTH)
_ASKING = (PacketType.CONNECT, PacketType.PUBLISH, _WILL, PacketType.SUBSCRIBE, PacketType.UNSUBSCRIBE)
_MESSAGE = (PacketType.PUBLISH, _WILL)
_HANDSHAKE = (PacketType.CONNECT, PacketType.CONNACK, PacketType.AUTH)
_BOTH_ENDS = (PacketType.CONNECT, PacketType.CONNACK)


def _row(
    identifier: int, name: str, kind: _Kind, *places: int, least: int = 0, most: int | None = None
) -> tuple[int, _Property]:
    return identifier, _Property(identifier, name, kind, frozenset(places), least, most)


# MQTT 5, table 2-4.
_BY_IDENTIFIER: dict[int, _Property] = dict(
    (
        _row(0x01, "payload_format_indicator", _Kind.BYTE, *_MESSAGE, most=1),
        _row(0x02, "message_expiry_interval", _Kind.U32, *_MESSAGE),
        _row(0x03, "content_type", _Kind.TEXT, *_MESSAGE),
        _row(0x08, "response_topic", _Kind.TEXT, *_MESSAGE),
        _row(0x09, "correlation_data", _Kind.BINARY, *_MESSAGE),
        _row(0x0B, "subscription_identifiers", _Kind.VARINT, PacketType.PUBLISH, PacketType.SUBSCRIBE, least=1),
        _row(0x11, "session_expiry_interval", _Kind.U32, *_BOTH_ENDS, PacketType.DISCONNECT),
        _row(0x12, "assigned_client_identifier", _Kind.TEXT, PacketType.CONNACK),
        _row(0x13, "server_keep_alive", _Kind.U16, PacketType.CONNACK),
        _row(0x15, "authentication_method", _Kind.TEXT, *_HANDSHAKE),
        _row(0x16, "authentication_data", _Kind.BINARY, *_HANDSHAKE),
        _row(0x17, "request_problem_information", _Kind.FLAG, PacketType.CONNECT),
        _row(0x18, "will_delay_interval", _Kind.U32, _WILL),
        _row(0x19, "request_response_information", _Kind.FLAG, PacketType.CONNECT),
        _row(0x1A, "response_information", _Kind.TEXT, PacketType.CONNACK),
        _row(0x1C, "server_reference", _Kind.TEXT, PacketType.CONNACK, PacketType.DISCONNECT),
        _row(0x1F, "reason_string", _Kind.TEXT, *_ANSWERS),
        _row(0x21, "receive_maximum", _Kind.U16, *_BOTH_ENDS, least=1),
        _row(0x22, "topic_alias_maximum", _Kind.U16, *_BOTH_ENDS),
        _row(0x23, "topic_alias", _Kind.U16, PacketType.PUBLISH, least=1),
        _row(0x24, "maximum_qos", _Kind.BYTE, PacketType.CONNACK, most=1),
        _row(0x25, "retain_available", _Kind.FLAG, PacketType.CONNACK),
        _row(0x26, "user_properties", _Kind.PAIR, *_ASKING, *_ANSWERS),
        _row(0x27, "maximum_packet_size", _Kind.U32, *_BOTH_ENDS, least=1),
        _row(0x28, "wildcard_subscription_available", _Kind.FLAG, PacketType.CONNACK),
        _row(0x29, "subscription_identifier_available", _Kind.FLAG, PacketType.CONNACK),
        _row(0x2A, "shared_subscription_available", _Kind.FLAG, PacketType.CONNACK),
    )
)
assert {row.name for row in _BY_IDENTIFIER.values()} == {field.name for field in fields(Properties)}
_TOPIC_ALIAS = _BY_IDENTIFIER[0x23]
_MOST = {_Kind.BYTE: 0xFF, _Kind.FLAG: 1, _Kind.U16: 0xFFFF, _Kind.U32: 0xFFFF_FFFF, _Kind.VARINT: 268_435_455}


def decode_properties(reader: Reader, place: int) -> Properties:
    """The property length and what it covers, as the packet type (or WILL_PROPERTIES) at this place allows it."""
    size = reader.varint()
    if size > reader.remaining:
        raise malformed(f"properties of {size} bytes announced, {reader.remaining} left")
    if not size:
        return NO_PROPERTIES
    inner = Reader(reader.data, reader.version, reader.pos, reader.pos + size)
    reader.pos += size
    return _decode(inner, place)


def decode_blob(blob: bytes, place: int = PacketType.PUBLISH) -> Properties:
    """A blob: the properties without their length."""
    return _decode(Reader(blob, Version.V5), place) if blob else NO_PROPERTIES


def encode_properties(properties: Properties, place: int) -> bytes:
    """With their length. A property that this place may not have is our mistake: ValueError."""
    blob = encode_blob(properties, place)
    return encode_varint(len(blob)) + blob


def encode_blob(properties: Properties, place: int = PacketType.PUBLISH) -> bytes:
    if properties is NO_PROPERTIES:
        return b""
    parts: list[bytes] = []
    for row in _BY_IDENTIFIER.values():
        value = getattr(properties, row.name)
        if value is None or value == ():
            continue
        if place not in row.places:
            raise ValueError(f"{_place_name(place)} has no {row.name}")
        values = value if isinstance(value, tuple) else (value,)
        if len(values) > 1 and not _may_repeat(row, place):
            raise ValueError(f"{_place_name(place)} has one of {row.name} at most")
        identifier = bytes((row.identifier,))
        parts += [identifier + _encode_value(row, one) for one in values]
    return b"".join(parts)


def encode_subscription_identifiers(identifiers: tuple[int, ...]) -> bytes:
    """To be put behind a blob on its way to a client: properties stand in any order."""
    return b"".join([b"\x0b" + encode_varint(identifier) for identifier in identifiers])


def encode_topic_alias(alias: int) -> bytes:
    """To be put behind a blob on its way to a client."""
    return b"\x23" + U16.pack(alias)


def with_message_expiry(blob: bytes, seconds: int) -> bytes:
    """[MQTT-3.3.2-6] The interval, as what is left of it when the message goes out; added when there is none."""
    value = b"\x02" + U32.pack(seconds)
    for identifier, start, end in entries_of(blob):
        if identifier == 0x02:
            return blob[:start] + value + blob[end:]
    return blob + value


def with_user_properties(blob: bytes, told: Mapping[str, str | int]) -> bytes:
    """The same with these user properties, in the place of those with their names."""
    found = decode_blob(blob)
    kept = [(name, value) for name, value in found.user_properties if name not in told]
    more = [(name, str(value)) for name, value in told.items()]
    return encode_blob(replace(found, user_properties=(*kept, *more)))


def entries_of(blob: bytes) -> list[tuple[int, int, int]]:
    """Identifier, start and end (identifier included) of each property of a blob that has passed `scan`."""
    found = []
    pos = 0
    while pos < len(blob):
        start = pos
        identifier = blob[pos]
        pos += 1
        match _BY_IDENTIFIER[identifier].kind:
            case _Kind.BYTE | _Kind.FLAG:
                pos += 1
            case _Kind.U16:
                pos += 2
            case _Kind.U32:
                pos += 4
            case _Kind.VARINT:
                while blob[pos] > 0x7F:
                    pos += 1
                pos += 1
            case _Kind.TEXT | _Kind.BINARY:
                pos += 2 + U16.unpack_from(blob, pos)[0]
            case _Kind.PAIR:
                pos += 2 + U16.unpack_from(blob, pos)[0]
                pos += 2 + U16.unpack_from(blob, pos)[0]
        found.append((identifier, start, pos))
    return found


# ---- the properties of a PUBLISH, at ingress -----------------------------------------------------------------------


class PublishScan(NamedTuple):
    """What the broker must know of a client's PUBLISH properties before it may store them."""

    # What the log keeps: the blob without the topic alias, which means something on one connection only.
    stored: bytes
    message_expiry_interval: int | None = None
    topic_alias: int = 0  # 0: none
    # The payload says of itself that it is UTF-8; whoever checks that answers 0x99.
    payload_is_text: bool = False
    # A user property begins with x- or tag: something inside may concern the broker, and a decode tells.
    interesting: bool = False
    # The user properties `tag`; or why they cannot be kept.
    tags: Tags = NO_TAGS
    refusal: str = ""


NOTHING_SCANNED = PublishScan(b"")
_OURS = (b"x-", b"tag")
TAG = "tag"
_TAG_FIELD = b"\x26\x00\x03tag"


def scan(blob: bytes) -> PublishScan:
    """Check the properties of a PUBLISH from a client, without building them; refuses exactly what `decode` would."""
    expiry: int | None = None
    alias = alias_start = seen = 0
    text = interesting = False
    # Bytes that are all below 0x80 need no look at their UTF-8: what most clients send.
    ascii_only = blob.isascii()
    pos = 0
    end = len(blob)
    try:
        while pos < end:
            identifier = blob[pos]
            start = pos + 3
            if identifier == 0x26:
                pos = start + (blob[pos + 1] << 8 | blob[pos + 2])
                value = pos + 2
                after = value + (blob[pos] << 8 | blob[pos + 1])
                if blob.find(0, start, pos) >= 0 or blob.find(0, value, after) >= 0:
                    raise _refusal(blob)
                interesting = interesting or blob.startswith(_OURS, start, pos)
                if not ascii_only:
                    blob[start:pos].decode("utf-8")
                    blob[value:after].decode("utf-8")
                pos = after
                continue
            if identifier > 0x23 or seen >> identifier & 1:
                raise _refusal(blob)
            seen |= 1 << identifier
            if identifier == 0x09:
                pos = start + (blob[pos + 1] << 8 | blob[pos + 2])
            elif identifier == 0x02:
                (expiry,) = U32.unpack_from(blob, pos + 1)
                pos += 5
            elif identifier == 0x03 or identifier == 0x08:
                pos = start + (blob[pos + 1] << 8 | blob[pos + 2])
                raw = blob[start:pos]
                raw.decode("utf-8")
                if b"\0" in raw or (identifier == 0x08 and (not raw or b"+" in raw or b"#" in raw)):
                    raise _refusal(blob)
            elif identifier == 0x01:
                text = blob[pos + 1] == 1
                if blob[pos + 1] > 1:
                    raise _refusal(blob)
                pos += 2
            elif identifier == 0x23:
                alias_start = pos
                (alias,) = U16.unpack_from(blob, pos + 1)
                if not alias:
                    raise _refusal(blob)
                pos += 3
            else:
                raise _refusal(blob)
    except (IndexError, ValueError, struct.error):
        raise _refusal(blob) from None
    # Whatever read past the end moved past it too.
    if pos != end:
        raise _refusal(blob)
    stored = blob[:alias_start] + blob[alias_start + 3 :] if alias else blob
    if not interesting or _TAG_FIELD not in stored:
        return PublishScan(stored, expiry, alias, text, interesting)
    try:
        tags, refusal = collect(value for name, value in decode_blob(stored).user_properties if name == TAG), ""
    except InvalidTags as error:
        tags, refusal = NO_TAGS, str(error)
    return PublishScan(stored, expiry, alias, text, interesting, tags, refusal)


class PublishScans:
    """Scans by blob: a client's usual properties are looked at once. Bounded; one for all connections."""

    __slots__ = ("_bytes_max", "_count_max", "known")

    def __init__(self, *, count_max: int = 16_384, bytes_max: int = 512) -> None:
        # The cutter looks here without a call.
        self.known: dict[bytes, PublishScan] = {b"": NOTHING_SCANNED}
        self._count_max = count_max
        self._bytes_max = bytes_max

    def of(self, blob: bytes) -> PublishScan:
        """The scan of these properties, or MqttError."""
        found = self.known.get(blob)
        if found is None:
            found = scan(blob)
            if len(blob) <= self._bytes_max:
                if len(self.known) >= self._count_max:
                    self.known.clear()
                    self.known[b""] = NOTHING_SCANNED
                self.known[blob] = found
        return found


def check_from_client(properties: Properties) -> None:
    """What a PUBLISH may have on its way to a client, and not from one."""
    if properties.subscription_identifiers:
        raise protocol_error("a client published with a subscription identifier", "MQTT-3.3.4-6")


def _refusal(blob: bytes) -> MqttError:
    """Why `scan` does not like it; the slow way, which knows the words."""
    try:
        check_from_client(decode_blob(blob))
    except MqttError as error:
        return error
    raise AssertionError(f"scan refuses what decode accepts: {blob!r}")


# ---- one property --------------------------------------------------------------------------------------------------


def _decode(reader: Reader, place: int) -> Properties:
    values: dict[str, object] = {}
    repeated: dict[str, list[object]] = {}
    while reader.remaining:
        identifier = reader.varint()
        row = _BY_IDENTIFIER.get(identifier)
        if row is None or place not in row.places:
            raise malformed(f"{_place_name(place)} has no property 0x{identifier:02X}")
        value = _decode_value(reader, row)
        if _may_repeat(row, place):
            repeated.setdefault(row.name, []).append(value)
        elif row.name in values:
            raise protocol_error(f"{row.name} stands twice in {_place_name(place)}")
        else:
            values[row.name] = (value,) if row.kind is _Kind.VARINT else value
    for name, found in repeated.items():
        values[name] = tuple(found)
    properties = Properties(**values)  # type: ignore[arg-type]  # the row's kind decides the type, field by field
    _check_together(properties)
    return properties


def _check_together(properties: Properties) -> None:
    topic = properties.response_topic
    if topic is not None and (not topic or "+" in topic or "#" in topic):
        raise protocol_error(f"the response topic {topic!r} is no topic name", "MQTT-3.3.2-14")
    if properties.authentication_data is not None and properties.authentication_method is None:
        raise protocol_error("authentication data without an authentication method")


def _decode_value(reader: Reader, row: _Property) -> object:
    match row.kind:
        case _Kind.TEXT:
            return reader.text()
        case _Kind.BINARY:
            return reader.binary()
        case _Kind.PAIR:
            return reader.text(), reader.text()
        case _Kind.FLAG | _Kind.BYTE:
            number = reader.u8()
        case _Kind.U16:
            number = reader.u16()
        case _Kind.U32:
            number = reader.u32()
        case _Kind.VARINT:
            number = reader.varint()
    if not _fits(row, number):
        text = f"{row.name} cannot be {number}"
        if row is _TOPIC_ALIAS:
            raise MqttError(ReasonCode.TOPIC_ALIAS_INVALID, text, "MQTT-3.3.2-8")
        raise protocol_error(text)
    return bool(number) if row.kind is _Kind.FLAG else number


def _encode_value(row: _Property, value: object) -> bytes:
    match value:
        case str():
            return encode_text(value)
        case bytes():
            return encode_binary(value)
        case (str() as name, str() as text):
            return encode_text(name) + encode_text(text)
        case int():
            if not _fits(row, value):
                raise ValueError(f"{row.name} cannot be {value}")
            if row.kind is _Kind.VARINT:
                return encode_varint(value)
            return value.to_bytes({_Kind.U16: 2, _Kind.U32: 4}.get(row.kind, 1), "big")
    raise TypeError(f"{row.name} cannot be {value!r}")


def _fits(row: _Property, number: int) -> bool:
    return row.least <= number <= (_MOST[row.kind] if row.most is None else row.most)


def _may_repeat(row: _Property, place: int) -> bool:
    return row.kind is _Kind.PAIR or (row.kind is _Kind.VARINT and place == PacketType.PUBLISH)


def _place_name(place: int) -> str:
    return PacketType(place).name if place else "a will"
