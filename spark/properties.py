"""The properties that AMQP and MQTT publishers sent, read from the bytes that the log keeps. Format; pure.

Readers of the log import no door of the broker, so what the doors write is read here once more, and only read: what
passed a door can be read, and what cannot (another release wrote it) gives None and never an error. Values of headers
come as bytes, since that is what a reader of Kafka's columns expects: text as it was sent, numbers and truth written
out, tables and lists as JSON. Octets that are no UTF-8 are replaced in texts and kept in bytes.
Neighbours: decode.py makes columns of it; gateways/amqp/properties.py, fields.py and gateways/mqtt/properties.py draw
the bytes, and tests hold this file to them; gateways/mqtt/routingkeys.py maps topics to keys.
"""

import json
import re
import struct
from decimal import Decimal
from typing import Any, NamedTuple

Headers = list[tuple[str, bytes]]

_U16 = struct.Struct(">H")
_U32 = struct.Struct(">I")
_U64 = struct.Struct(">Q")
# By letter: how a value of fixed size is read.
_NUMBERS = {
    ord("b"): struct.Struct(">b"),
    ord("B"): struct.Struct(">B"),
    ord("s"): struct.Struct(">h"),
    ord("u"): struct.Struct(">H"),
    ord("I"): struct.Struct(">i"),
    ord("i"): struct.Struct(">I"),
    ord("l"): struct.Struct(">q"),
    ord("L"): struct.Struct(">q"),
    ord("T"): struct.Struct(">Q"),
    ord("f"): struct.Struct(">f"),
    ord("d"): struct.Struct(">d"),
}
_DECIMAL = struct.Struct(">Bi")
# Nested deeper than any door lets in.
_DEPTH_MAX = 64


class Amqp(NamedTuple):
    """Basic properties; absent ones None. Times are microseconds."""

    content_type: str | None
    content_encoding: str | None
    delivery_mode: int | None
    priority: int | None
    correlation_id: str | None
    reply_to: str | None
    expiration: str | None
    message_id: str | None
    timestamp: int | None
    type: str | None
    user_id: str | None
    app_id: str | None
    headers: Headers


class Mqtt(NamedTuple):
    """Properties of a PUBLISH; absent ones None."""

    payload_format_indicator: int | None
    message_expiry_interval: int | None
    content_type: str | None
    response_topic: str | None
    correlation_data: bytes | None
    user_properties: Headers


_SHORT, _TABLE, _OCTET, _TIME = range(4)
_FIELDS: tuple[tuple[int, str, int], ...] = tuple(
    (0x8000 >> place, name, kind)
    for place, (name, kind) in enumerate(
        (
            ("content_type", _SHORT),
            ("content_encoding", _SHORT),
            ("headers", _TABLE),
            ("delivery_mode", _OCTET),
            ("priority", _OCTET),
            ("correlation_id", _SHORT),
            ("reply_to", _SHORT),
            ("expiration", _SHORT),
            ("message_id", _SHORT),
            ("timestamp", _TIME),
            ("type", _SHORT),
            ("user_id", _SHORT),
            ("app_id", _SHORT),
        )
    )
)
_NOTHING: dict[str, Any] = dict.fromkeys(Amqp._fields) | {"headers": []}
# Beyond what a column of microseconds can say.
_SECONDS_MAX = (2**63 - 1) // 1_000_000


def amqp(data: bytes) -> Amqp | None:
    found = dict(_NOTHING)
    try:
        (flags,) = _U16.unpack_from(data)
        at = 2
        for bit, name, kind in _FIELDS:
            if not flags & bit:
                continue
            match kind:
                case 0:
                    end = at + 1 + data[at]
                    found[name] = _text(_cut(data, at + 1, end))
                    at = end
                case 1:
                    end = at + 4 + _U32.unpack_from(data, at)[0]
                    found[name] = _headers(data, at + 4, end)
                    at = end
                case 2:
                    found[name] = data[at]
                    at += 1
                case _:
                    (seconds,) = _U64.unpack_from(data, at)
                    found[name] = seconds * 1_000_000 if seconds <= _SECONDS_MAX else None
                    at += 8
    except (IndexError, ValueError, struct.error):
        return None
    return Amqp(**found)


def _headers(data: bytes, at: int, end: int) -> Headers:
    found: dict[str, bytes] = {}
    while at < end:
        value_at = at + 1 + data[at]
        name = _text(_cut(data, at + 1, value_at))
        value, at = _value(data, value_at, end, _DEPTH_MAX)
        found.setdefault(name, _written(value))
    return list(found.items())


def _value(data: bytes, at: int, end: int, depth: int) -> tuple[Any, int]:
    """The value whose letter is at `at`, and the place behind it."""
    if not depth:
        raise ValueError("nested too deeply")
    letter = data[at]
    at += 1
    if letter in _NUMBERS:
        layout = _NUMBERS[letter]
        return layout.unpack_from(data, at)[0], at + layout.size
    match chr(letter):
        case "V":
            return None, at
        case "t":
            return data[at] != 0, at + 1
        case "D":
            places, number = _DECIMAL.unpack_from(data, at)
            return Decimal(number).scaleb(-places), at + _DECIMAL.size
        case "S" | "x":
            behind = at + 4 + _U32.unpack_from(data, at)[0]
            return _cut(data, at + 4, min(behind, end + 1)), behind
        case "A":
            behind = at + 4 + _U32.unpack_from(data, at)[0]
            items: list[Any] = []
            at += 4
            while at < behind:
                item, at = _value(data, at, behind, depth - 1)
                items.append(item)
            return items, behind
        case "F":
            behind = at + 4 + _U32.unpack_from(data, at)[0]
            table: dict[str, Any] = {}
            at += 4
            while at < behind:
                value_at = at + 1 + data[at]
                name = _text(_cut(data, at + 1, value_at))
                value, at = _value(data, value_at, behind, depth - 1)
                table.setdefault(name, value)
            return table, behind
    raise ValueError(f"no field has the letter {letter}")


def _written(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, dict | list):
        return json.dumps(value, default=_plain, ensure_ascii=False, separators=(",", ":")).encode()
    if value is None:
        return b""
    if isinstance(value, bool):
        return b"true" if value else b"false"
    return str(value).encode()


def _plain(value: Any) -> Any:
    return _text(value) if isinstance(value, bytes) else str(value)


def _cut(data: bytes, start: int, end: int) -> bytes:
    if end > len(data):
        raise ValueError("ends too early")
    return data[start:end]


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def mqtt(data: bytes) -> Mqtt | None:
    """Of a PUBLISH; 3.1.1 has none, and so has nothing here."""
    texts: dict[int, str] = {}
    numbers: dict[int, int] = {}
    correlation: bytes | None = None
    pairs: Headers = []
    at = 0
    try:
        while at < len(data):
            identifier = data[at]
            at += 1
            match identifier:
                case 0x01:
                    numbers[identifier] = data[at]
                    at += 1
                case 0x02:
                    (numbers[identifier],) = _U32.unpack_from(data, at)
                    at += 4
                case 0x03 | 0x08:
                    raw, at = _sized(data, at)
                    texts[identifier] = _text(raw)
                case 0x09:
                    correlation, at = _sized(data, at)
                case 0x26:
                    name, at = _sized(data, at)
                    value, at = _sized(data, at)
                    pairs.append((_text(name), value))
                case 0x0B:
                    while data[at] & 0x80:
                        at += 1
                    at += 1
                case 0x23:
                    at += 2
                case _:
                    return None
    except (IndexError, ValueError, struct.error):
        return None
    return Mqtt(numbers.get(1), numbers.get(2), texts.get(3), texts.get(8), correlation, pairs)


def _sized(data: bytes, at: int) -> tuple[bytes, int]:
    end = at + 2 + _U16.unpack_from(data, at)[0]
    return _cut(data, at + 2, end), end


_UNESCAPED = {
    b"%25": b"%",
    b"%2E": b".",
    b"%2A": b"*",
    b".": b"/",
    b"/": b"%2F",
    b"+": b"%2B",
    b"#": b"%23",
    b"\0": b"%00",
}
_PATTERN = re.compile(b"|".join(map(re.escape, _UNESCAPED)))


def mqtt_topic(key: bytes) -> str:
    """The MQTT topic of a record's key, by the broker's own mapping."""
    if not key:
        return "%"
    topic = _PATTERN.sub(lambda found: _UNESCAPED[found[0]], key)
    text = topic.decode("utf-8", "surrogateescape")
    return "".join([f"%{ord(one) - 0xDC00:02X}" if "\udc80" <= one <= "\udcff" else one for one in text])
