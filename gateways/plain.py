"""The properties of AMQP and MQTT in plain words, for those who read and publish over HTTP. Values: pure.

A door never imports another door; this file stands above them, like mapping.py, and the broker's composition hands it
to the HTTP door. What has no place in JSON is written as {"base64": "..."}.
"""

from base64 import b64encode
from collections.abc import Mapping
from decimal import Decimal

from headrace.controller.errors import Invalid
from headrace.core_log.record import PROTOCOL_MASK, QOS_MASK, QOS_SHIFT, RETAIN, Headers, Protocol
from headrace.filtering.tags import to_text
from headrace.gateways.amqp import properties as amqp
from headrace.gateways.amqp.errors import AmqpError
from headrace.gateways.amqp.fields import ByteArray, FieldTable, FieldValue, Timestamp, encode_table
from headrace.gateways.http.records import CONTENT_TYPE, header_octets
from headrace.gateways.http.words import Json, Plain
from headrace.gateways.mqtt import properties as mqtt
from headrace.gateways.mqtt.reasons import MqttError
from headrace.gateways.mqtt.routingkeys import RoutingKeys

_SHORT_BYTES_MAX = 255
_INTEGER_MAX = 2**63
# AMQP's name where ours is another.
_AMQP_NAMES = (
    "content_type",
    "content_encoding",
    "delivery_mode",
    "priority",
    "correlation_id",
    "reply_to",
    "expiration",
    "message_id",
    "timestamp",
    "message_type",
    "user_id",
    "app_id",
)
_MQTT_NAMES = (
    "payload_format_indicator",
    "message_expiry_interval",
    "content_type",
    "response_topic",
    "correlation_data",
)
# Headers that the broker acts upon when an AMQP client sends them; over HTTP each has a field, or no meaning.
_FIELDS = {
    "BCC": "",
    "x-tags": "tags",
    "x-delay": "delay_ms",
    "x-deliver-at": "deliver_at",
    "x-delay-level": "delay_ms",
    "x-schedule-id": "schedule_id",
    "x-producer-id": "producer_id",
    "x-producer-epoch": "producer_epoch",
    "x-sequence": "sequence",
}


class PlainWords:
    def __init__(self, keys: RoutingKeys) -> None:
        self._keys = keys

    def read(self, key: bytes, properties: bytes, attributes: int) -> Plain:
        try:
            match attributes & PROTOCOL_MASK:
                case Protocol.AMQP:
                    return _of_amqp(properties)
                case Protocol.MQTT_3 | Protocol.MQTT_5:
                    return self._of_mqtt(key, properties, attributes)
        except (AmqpError, MqttError):
            # They were checked when they came, so this is for what another release wrote.
            return Plain({"unreadable": _plain(properties)})
        return Plain()

    def _of_mqtt(self, key: bytes, blob: bytes, attributes: int) -> Plain:
        found = mqtt.decode_blob(blob)
        told: dict[str, Json] = {
            "topic": _plain(self._keys.topic_of(key).decode("utf-8", "surrogateescape")),
            "qos": (attributes & QOS_MASK) >> QOS_SHIFT,
            "retain": attributes & RETAIN != 0,
        }
        for name in _MQTT_NAMES:
            value = getattr(found, name)
            if value is not None:
                told[name] = _plain(value)
        headers: dict[str, Json] = {}
        for name, text in found.user_properties:
            known = headers.get(name)
            if known is None:
                headers[name] = text
            else:
                headers[name] = [*known, text] if isinstance(known, list) else [known, text]
        return Plain(told, headers)

    def write(
        self, headers: Mapping[str, Json], *, content_type: str | None, tags: tuple[str, ...], persistent: bool
    ) -> bytes:
        for name in headers:
            if name in _FIELDS:
                instead = f": use the field {_FIELDS[name]}" if _FIELDS[name] else ""
                raise Invalid(f"the header '{name}' cannot be given here{instead}")
            if len(name.encode("utf-8", "surrogateescape")) > _SHORT_BYTES_MAX:
                raise Invalid(f"a header's name is longer than {_SHORT_BYTES_MAX} bytes")
        if content_type is not None and len(content_type.encode()) > _SHORT_BYTES_MAX:
            raise Invalid(f"content_type is longer than {_SHORT_BYTES_MAX} bytes")
        table: FieldTable = {name: _field(value, 0) for name, value in headers.items()}
        copies = table.get("CC")
        if copies is not None and not (isinstance(copies, list) and all(isinstance(one, str) for one in copies)):
            raise Invalid("the header 'CC' is a list of routing keys")
        if tags:
            table["x-tags"] = to_text(tags)
        return amqp.encode(
            amqp.Properties(
                content_type=content_type,
                headers_bytes=encode_table(table) if table else None,
                delivery_mode=amqp.PERSISTENT if persistent else 1,
            )
        )


def restated(headers: Headers) -> bytes:
    """The headers of a topic's record as AMQP's properties: of a record that leaves its topic (retries, dead letters).

    AMQP's names are short: of a longer one the beginning is kept.
    """
    table: FieldTable = {}
    content_type: str | None = None
    for name, value in headers:
        text = value.decode("utf-8", "surrogateescape")
        if name == CONTENT_TYPE and len(value) <= _SHORT_BYTES_MAX:
            content_type = text
        else:
            table[name[:_SHORT_BYTES_MAX].decode("utf-8", "surrogateescape")] = text
    return amqp.encode(
        amqp.Properties(
            content_type=content_type,
            headers_bytes=encode_table(table) if table else None,
            delivery_mode=amqp.PERSISTENT,
        )
    )


def _of_amqp(properties: bytes) -> Plain:
    found = amqp.decode(properties)
    told: dict[str, Json] = {}
    for name in _AMQP_NAMES:
        value = getattr(found, name)
        if value is not None:
            told["type" if name == "message_type" else name] = _plain(value)
    headers = found.headers or {}
    return Plain(told, {_text(name): _plain(value) for name, value in headers.items()})


def _text(text: str) -> str:
    """Octets that are no UTF-8 are written out."""
    return text.encode("utf-8", "backslashreplace").decode()


def _plain(value: FieldValue) -> Json:
    match value:
        case str():
            return _text(value)
        case bytes():
            return {"base64": b64encode(value).decode()}
        case bool() | None:
            return value
        case Timestamp():
            return {"timestamp": int(value)}
        case int():
            return int(value)
        case float():
            # JSON has no name for what is not a number.
            return float(value) if value - value == 0 else str(value)
        case Decimal():
            return str(value)
        case Mapping():
            return {_text(name): _plain(inner) for name, inner in value.items()}
        case _:
            return [_plain(inner) for inner in value]


def _field(value: Json, depth: int) -> FieldValue:
    if depth > 16:
        raise Invalid("headers are nested more than 16 deep")
    data = header_octets(value)
    if data is not None:
        return ByteArray(data)
    if isinstance(value, dict):
        if any(len(name.encode("utf-8", "surrogateescape")) > _SHORT_BYTES_MAX for name in value):
            raise Invalid(f"a name in a header is longer than {_SHORT_BYTES_MAX} bytes")
        return {name: _field(inner, depth + 1) for name, inner in value.items()}
    if isinstance(value, list):
        return [_field(inner, depth + 1) for inner in value]
    if isinstance(value, int) and not -_INTEGER_MAX <= value < _INTEGER_MAX:
        raise Invalid(f"the number {value} in a header is larger than 64 bits")
    assert value is None or isinstance(value, str | bool | int | float)
    return value
