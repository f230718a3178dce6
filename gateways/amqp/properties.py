"""Basic properties: the bytes behind the 12-byte prefix of a content header. Format: pure functions, no I/O.

    u16 flags, then one field per set flag, from the highest bit down:

    bit  property          type          bit  property        type
    15   content-type      short string   8   expiration      short string
    14   content-encoding  short string   7   message-id      short string
    13   headers           field table    6   timestamp       u64 seconds
    12   delivery-mode     u8             5   type            short string
    11   priority          u8             4   user-id         short string
    10   correlation-id    short string   3   app-id          short string
     9   reply-to          short string   2   cluster-id      short string

Bits 1 and 0 (another flags word follows) belong to no property of this class and are refused: RabbitMQ skips both
bits and then trips over the second word.
The bytes are kept as they came. `scan` looks at them once, at ingress, and checks everything that a later reader
relies on: what passed `scan` can always be decoded and edited. An edit leaves all other bytes as they are.
Strings that are not UTF-8 keep their bytes by surrogateescape. Neighbours: fields.py below, frames.py beside.
"""

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache

from headrace.gateways.amqp.errors import AmqpError, ReplyCode, amqp_error
from headrace.gateways.amqp.fields import (
    U32,
    FieldTable,
    FieldValue,
    check_table,
    decode_table,
    encode_name,
    encode_value,
    entries_of,
)

NO_PROPERTIES = b"\x00\x00"
# Whole milliseconds that every client language holds exactly, and that fit the log's microseconds.
EXPIRATION_MS_MAX = 2**53
DIRECT_REPLY_TO = b"amq.rabbitmq.reply-to"
PERSISTENT = 2

CONTENT_TYPE, CONTENT_ENCODING, HEADERS, DELIVERY_MODE = 0x8000, 0x4000, 0x2000, 0x1000
PRIORITY, CORRELATION_ID, REPLY_TO, EXPIRATION = 0x0800, 0x0400, 0x0200, 0x0100
MESSAGE_ID, TIMESTAMP, MESSAGE_TYPE, USER_ID = 0x0080, 0x0040, 0x0020, 0x0010
APP_ID, CLUSTER_ID = 0x0008, 0x0004
_NO_PROPERTY = 0x0003
_BEHIND_PRIORITY = 0x07FC

_FLAGS = struct.Struct(">H")
_OCTET = struct.Struct(">B")
_SECONDS = struct.Struct(">Q")
_PUBLISH = (60, 40)  # class and method of basic.publish, the only method whose content comes from a client


@dataclass(frozen=True, slots=True)
class PropertyScan:
    """What the broker must know of a message's properties before it may store them."""

    delivery_mode: int | None
    priority: int | None
    expiration_ms: int | None
    has_headers: bool
    # False: nothing inside concerns the broker. True: something may, and only a decode tells: a header named x-*,
    # CC or BCC, a user-id, a direct reply-to.
    interesting: bool

    @property
    def persistent(self) -> bool:
        return self.delivery_mode == PERSISTENT


@dataclass(frozen=True, slots=True)
class Properties:
    """All fourteen, absent ones None. The headers stay undecoded until `headers` is asked for."""

    content_type: str | None = None
    content_encoding: str | None = None
    headers_bytes: bytes | None = None  # the table with its length
    delivery_mode: int | None = None
    priority: int | None = None
    correlation_id: str | None = None
    reply_to: str | None = None
    expiration: str | None = None
    message_id: str | None = None
    timestamp: int | None = None
    message_type: str | None = None
    user_id: str | None = None
    app_id: str | None = None
    cluster_id: str | None = None

    @property
    def headers(self) -> FieldTable | None:
        """Decoded anew at every call: keep it."""
        # No bound on the size: ingress has set one, and x-death may have grown past it since.
        return None if self.headers_bytes is None else decode_table(self.headers_bytes, bytes_max=None)[0]


_BIT_OF_FIELD = {field.name: 0x8000 >> place for place, field in enumerate(fields(Properties))}


def scan(props: bytes) -> PropertyScan:
    """Check the bytes and tell what the broker needs: no object but a shared one for the usual message.

    Refuses malformed properties (501, 502: hard) and an expiration that is none (406: soft), both laid to
    basic.publish.
    """
    delivery_mode = priority = expiration_ms = None
    interesting = False
    try:
        flags = props[0] << 8 | props[1]
        pos = 2
        if flags & CONTENT_TYPE:
            pos += 1 + props[pos]
        if flags & CONTENT_ENCODING:
            pos += 1 + props[pos]
        if flags & HEADERS:
            start = pos
            pos = check_table(props, start)
            # Also true of values, and of CC in BCC: a hint, so that most headers are never decoded.
            interesting = props.find(b"x-", start, pos) >= 0 or props.find(b"CC", start, pos) >= 0
        if flags & DELIVERY_MODE:
            delivery_mode = props[pos]
            pos += 1
        if flags & PRIORITY:
            priority = props[pos]
            pos += 1
        if flags & _BEHIND_PRIORITY:
            if flags & CORRELATION_ID:
                pos += 1 + props[pos]
            if flags & REPLY_TO:
                start = pos + 1
                pos = start + props[pos]
                interesting = interesting or props.startswith(DIRECT_REPLY_TO, start, pos)
            if flags & EXPIRATION:
                start = pos + 1
                pos = start + props[pos]
                expiration_ms = _expiration_ms(props[start:pos])
            if flags & MESSAGE_ID:
                pos += 1 + props[pos]
            if flags & TIMESTAMP:
                pos += 8
            if flags & MESSAGE_TYPE:
                pos += 1 + props[pos]
            if flags & USER_ID:
                pos += 1 + props[pos]
                interesting = True
            if flags & APP_ID:
                pos += 1 + props[pos]
            if flags & CLUSTER_ID:
                pos += 1 + props[pos]
    except IndexError:
        raise _malformed().during(*_PUBLISH) from None
    except AmqpError as error:
        raise error.during(*_PUBLISH) from None
    # Whatever read past the end moved past it too.
    if pos != len(props) or flags & _NO_PROPERTY:
        raise (_unknown(flags) if flags & _NO_PROPERTY else _malformed()).during(*_PUBLISH)
    has_headers = flags & HEADERS != 0
    if expiration_ms is None and (delivery_mode is None or delivery_mode <= PERSISTENT):
        return _usual_scan(delivery_mode, priority, has_headers, interesting)
    return PropertyScan(delivery_mode, priority, expiration_ms, has_headers, interesting)


@cache  # bounded: 4 delivery modes, 257 priorities, 4 pairs of booleans
def _usual_scan(delivery_mode: int | None, priority: int | None, has_headers: bool, interesting: bool) -> PropertyScan:
    return PropertyScan(delivery_mode, priority, None, has_headers, interesting)


def decode(props: bytes) -> Properties:
    values: dict[str, str | bytes | int] = {}
    places = places_of(props)
    for name, bit in _BIT_OF_FIELD.items():
        place = places.get(bit)
        if place is None:
            continue
        start, end = place
        match bit:
            case 0x2000:
                values[name] = props[start:end]
            case 0x1000 | 0x0800:
                values[name] = props[start]
            case 0x0040:
                values[name] = _SECONDS.unpack_from(props, start)[0]
            case _:
                values[name] = props[start + 1 : end].decode("utf-8", "surrogateescape")
    return Properties(**values)  # type: ignore[arg-type]  # the bit decides the type, field by field


def routing_fields(props: bytes) -> tuple[FieldTable, list[str]]:
    """What a stored message is routed by besides its key: its headers, and the keys of CC (BCC is not kept)."""
    headers = decode(props).headers or {}
    copies = headers.get("CC")
    return headers, [one for one in copies if isinstance(one, str)] if isinstance(copies, list) else []


def encode(properties: Properties) -> bytes:
    """A string over 255 bytes or a number over its field is our mistake: ValueError."""
    flags = 0
    parts = [b""]
    for name, bit in _BIT_OF_FIELD.items():
        value = getattr(properties, name)
        if value is None:
            continue
        flags |= bit
        match value:
            case str():
                parts.append(_short_string(value))
            case bytes():
                parts.append(value)
            case int():
                layout = _SECONDS if bit == TIMESTAMP else _OCTET
                try:
                    parts.append(layout.pack(value))
                except struct.error:
                    raise ValueError(f"{name} cannot be {value}") from None
    parts[0] = _FLAGS.pack(flags)
    return b"".join(parts)


def with_headers(props: bytes, changes: Mapping[str, FieldValue]) -> bytes:
    """Set these headers: a known one at its place, a new one behind the others, which keep their bytes."""
    if not changes:
        return props
    encoded = {encode_name(name): encode_value(value) for name, value in changes.items()}
    place = places_of(props).get(HEADERS)
    kept: list[bytes] = []
    if place is not None:
        for name, start, end in entries_of(props, place[0] + 4, place[1]):
            key = bytes((len(name),)) + name
            if key not in encoded:
                kept.append(props[start:end])
            elif encoded[key]:
                kept.append(key + encoded[key])
                encoded[key] = b""  # a second entry of the name goes
    kept.extend(key + value for key, value in encoded.items() if value)
    return _replaced(props, HEADERS, _table_of(kept))


def without_header(props: bytes, name: str) -> bytes:
    """The same properties, the same object, when there is no such header."""
    place = places_of(props).get(HEADERS)
    if place is None:
        return props
    unwanted = encode_name(name)[1:]
    entries = entries_of(props, place[0] + 4, place[1])
    kept = [props[start:end] for found, start, end in entries if found != unwanted]
    return props if len(kept) == len(entries) else _replaced(props, HEADERS, _table_of(kept))


def with_expiration(props: bytes, expiration: str | None) -> bytes:
    """Set it, or (None) take it away: a dead-lettered message must not expire again."""
    if expiration is None:
        return _replaced(props, EXPIRATION, None) if EXPIRATION in places_of(props) else props
    return _replaced(props, EXPIRATION, _short_string(expiration))


def around_header(props: bytes, name: str, value_size: int) -> tuple[bytes, bytes]:
    """What stands before and behind the value of this header, which is set behind the others and has a fixed size.

    For a header that counts up from message to message: the value, with its type, goes between the two.
    """
    place = places_of(props).get(HEADERS)
    key = encode_name(name)
    kept: list[bytes] = []
    if place is not None:
        entries = entries_of(props, place[0] + 4, place[1])
        kept = [props[start:end] for found, start, end in entries if found != key[1:]]
    kept.append(key)
    table = b"".join(kept)
    marked = _replaced(props, HEADERS, U32.pack(len(table) + value_size) + table)
    end = _places_before(marked, HEADERS) + 4 + len(table)
    return marked[:end], marked[end:]


def number_in(props: bytes, name: str) -> int | None:
    """The header of this name, if it is a long integer, as `around_header` leaves room for; None: it is not."""
    place = places_of(props).get(HEADERS)
    if place is None:
        return None
    wanted = encode_name(name)[1:]
    for found, _start, end in entries_of(props, place[0] + 4, place[1]):
        if found == wanted and props[end - 9 : end - 8] == b"l":
            return int.from_bytes(props[end - 8 : end], "big", signed=True)
    return None


def with_reply_to(props: bytes, reply_to: str) -> bytes:
    return _replaced(props, REPLY_TO, _short_string(reply_to))


def _replaced(props: bytes, bit: int, field: bytes | None) -> bytes:
    """One field put in, exchanged or (None) left out; all others byte for byte as they were."""
    places = places_of(props)
    (flags,) = _FLAGS.unpack_from(props)
    if bit in places:
        start, end = places[bit]
    else:
        start = end = min((place[0] for other, place in places.items() if other < bit), default=len(props))
    flags = flags & ~bit if field is None else flags | bit
    return _FLAGS.pack(flags) + props[2:start] + (field or b"") + props[end:]


def places_of(props: bytes) -> dict[int, tuple[int, int]]:
    """Start and end of the field behind each set flag, in wire order."""
    try:
        (flags,) = _FLAGS.unpack_from(props)
        if flags & _NO_PROPERTY:
            raise _unknown(flags)
        places = {}
        pos = 2
        for bit in _BIT_OF_FIELD.values():
            if not flags & bit:
                continue
            start = pos
            if bit == HEADERS:
                pos += 4 + U32.unpack_from(props, pos)[0]
            elif bit in (DELIVERY_MODE, PRIORITY):
                pos += 1
            elif bit == TIMESTAMP:
                pos += 8
            else:
                pos += 1 + props[pos]
            places[bit] = (start, pos)
    except (IndexError, struct.error):
        raise _malformed() from None
    if pos != len(props):
        raise _malformed()
    return places


def headers_place(props: bytes) -> tuple[int, int]:
    """Where the table of headers begins and ends, its length with it; (0, 0): there is none."""
    flags = props[0]
    if not flags & HEADERS >> 8:
        return 0, 0
    start = 2
    if flags & CONTENT_TYPE >> 8:
        start += 1 + props[start]
    if flags & CONTENT_ENCODING >> 8:
        start += 1 + props[start]
    return start, start + 4 + int.from_bytes(props[start : start + 4], "big")


def _places_before(props: bytes, bit: int) -> int:
    """Where the field of this flag begins; what follows it is not looked at."""
    (flags,) = _FLAGS.unpack_from(props)
    pos = 2
    for other in (CONTENT_TYPE, CONTENT_ENCODING):
        if other > bit and flags & other:
            pos += 1 + props[pos]
    return pos


def _table_of(entries: Iterable[bytes]) -> bytes:
    joined = b"".join(entries)
    return U32.pack(len(joined)) + joined


def _short_string(text: str) -> bytes:
    encoded = text.encode("utf-8", "surrogateescape")
    if len(encoded) > 255:
        raise ValueError(f"a short string holds 255 bytes, this one has {len(encoded)}")
    return bytes((len(encoded),)) + encoded


def _expiration_ms(text: bytes) -> int:
    digits = text[1:] if text[:1] in (b"+", b"-") else text
    if not digits.isdigit():
        reason = "not a number of milliseconds"
    elif text.startswith(b"-") and digits.strip(b"0"):
        reason = "must not be negative"
    elif int(digits) > EXPIRATION_MS_MAX:
        reason = f"must not be above {EXPIRATION_MS_MAX}"
    else:
        return int(digits)
    shown = text.decode("utf-8", "backslashreplace")
    raise amqp_error(ReplyCode.PRECONDITION_FAILED, f"invalid expiration '{shown}': {reason}")


def _malformed() -> AmqpError:
    return amqp_error(ReplyCode.FRAME_ERROR, "content properties are cut short or longer than their flags say")


def _unknown(flags: int) -> AmqpError:
    return amqp_error(ReplyCode.SYNTAX_ERROR, f"content properties with flags {flags:#06x}: the last two bits are none")
