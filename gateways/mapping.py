"""AMQP's basic properties <-> MQTT 5's properties: the one file that knows a property's name in both. Values: pure.

The log keeps a message's properties in its publisher's own bytes; they are translated when a reader of the other
protocol gets it, and never on the way between two of the same. docs/mapping.md has the table, with a test for each row.
The names of headers are RabbitMQ's where it has one. What a side has no place for is kept as a header or user property
where that can hold it, and dropped where not; the table says which.

A door never imports another door, and this file imports both formats: it stands above the doors, and the broker's
composition hands them a `PropertyMapping`. Neighbours: amqp/properties.py, mqtt/properties.py, mqtt/routingkeys.py.
"""

import json
from collections.abc import Mapping, Sequence
from decimal import Decimal
from functools import lru_cache
from typing import NamedTuple

from headrace.core_log.record import QOS_MASK, QOS_SHIFT, RETAIN
from headrace.gateways.amqp import properties as amqp
from headrace.gateways.amqp.fields import FieldTable, FieldValue, encode_table
from headrace.gateways.mqtt import properties as mqtt
from headrace.gateways.mqtt.routingkeys import ROUTING_KEY_BYTES_MAX, RoutingKeys

# Headers of a message that was published over MQTT.
REPLY_TO_TOPIC = "x-reply-to-topic"  # the response topic, as a routing key of amq.topic
CORRELATION_ID = "x-correlation-id"  # correlation data that a short string does not hold, or that is not UTF-8
MQTT_RETAIN = "x-mqtt-retain"  # it was published with the retain flag
MQTT_TOPIC = "x-mqtt-topic"  # the topic, where its routing key is longer than AMQP can say
# Header by which an AMQP publisher asks that MQTT retain the message.
RETAIN_HEADER = "x-retain"

UTF_8 = "utf-8"
_SHORT_BYTES_MAX = 255
_TEXT_BYTES_MAX = 65_535
_EXPIRY_S_MAX = 0xFFFF_FFFF
# Longer properties are translated each time, so that what is kept is bounded in bytes.
_CACHED_BYTES_MAX = 1024

# Basic properties that MQTT has no name for: user properties there, under AMQP's name.
_AS_USER_PROPERTIES = (
    ("priority", "priority"),
    ("message_id", "message-id"),
    ("timestamp", "timestamp"),
    ("message_type", "type"),
    ("user_id", "user-id"),
    ("app_id", "app-id"),
)


class MqttMessage(NamedTuple):
    """What a message from AMQP is to an MQTT subscriber: the blob, the QoS it was published with, the retain flag."""

    blob: bytes
    qos: int
    retain: bool


class PropertyMapping:
    """Both directions. What comes in has passed its own door's `scan`."""

    def __init__(self, keys: RoutingKeys) -> None:
        self._keys = keys
        self._known_to_amqp = lru_cache(maxsize=4096)(self._to_amqp)
        self._known_to_mqtt = lru_cache(maxsize=4096)(self._to_mqtt)

    def to_amqp(self, key: bytes, blob: bytes, attributes: int) -> bytes:
        """The basic properties of a record that was published over MQTT (3.1.1 or 5), as AMQP writes them."""
        qos = (attributes & QOS_MASK) >> QOS_SHIFT
        retain = attributes & RETAIN != 0
        if len(key) > ROUTING_KEY_BYTES_MAX:
            return self._to_amqp(blob, qos, retain, self._keys.topic_of(key))
        if len(blob) > _CACHED_BYTES_MAX:
            return self._to_amqp(blob, qos, retain)
        return self._known_to_amqp(blob, qos, retain)

    def to_mqtt(self, properties: bytes) -> MqttMessage:
        """The properties of a record that was published over AMQP, as MQTT 5 writes them; 3.1.1 sends none of them."""
        return self._to_mqtt(properties) if len(properties) > _CACHED_BYTES_MAX else self._known_to_mqtt(properties)

    def _to_amqp(self, blob: bytes, qos: int, retain: bool, topic: bytes | None = None) -> bytes:
        found = mqtt.decode_blob(blob)
        headers = _headers_of(found.user_properties)
        reply_to = correlation_id = None
        if found.response_topic is not None:
            reply_key = self._keys.key_of(found.response_topic.encode()).decode()
            headers[REPLY_TO_TOPIC] = reply_key
            reply_to = reply_key if _is_short(reply_key) else None
        if found.correlation_data is not None:
            correlation_id = _short_text(found.correlation_data)
            if correlation_id is None:
                headers[CORRELATION_ID] = found.correlation_data
        if retain:
            headers[MQTT_RETAIN] = True
        if topic is not None:
            headers[MQTT_TOPIC] = topic
        content_type = found.content_type
        expiry = found.message_expiry_interval
        return amqp.encode(
            amqp.Properties(
                content_type=content_type if content_type is not None and _is_short(content_type) else None,
                content_encoding=UTF_8 if found.payload_format_indicator else None,
                headers_bytes=encode_table(headers) if headers else None,
                delivery_mode=amqp.PERSISTENT if qos else 1,
                correlation_id=correlation_id,
                reply_to=reply_to,
                expiration=None if expiry is None else str(expiry * 1000),
            )
        )

    def _to_mqtt(self, properties: bytes) -> MqttMessage:
        found = amqp.decode(properties)
        headers = found.headers or {}
        retain = headers.get(RETAIN_HEADER) is True
        if retain:
            del headers[RETAIN_HEADER]
        response_topic = self._response_topic(found, headers)
        correlation_data = _correlation_data(found, headers)
        user_properties = _user_properties_of(headers)
        payload_is_text = False
        if found.content_encoding is not None:
            payload_is_text = found.content_encoding.lower() == UTF_8
            if not payload_is_text:
                user_properties.append(("content-encoding", found.content_encoding))
        for field, name in _AS_USER_PROPERTIES:
            value = getattr(found, field)
            if value is not None:
                user_properties.append((name, str(value)))
        blob = mqtt.encode_blob(
            mqtt.Properties(
                payload_format_indicator=1 if payload_is_text else None,
                message_expiry_interval=_expiry_s(found.expiration),
                content_type=found.content_type if _is_text(found.content_type) else None,
                response_topic=response_topic,
                correlation_data=correlation_data,
                user_properties=tuple((name, text) for name, text in user_properties if _is_text(name, text)),
            )
        )
        return MqttMessage(blob, 1 if found.delivery_mode == amqp.PERSISTENT else 0, retain)

    def _response_topic(self, found: amqp.Properties, headers: FieldTable) -> str | None:
        """From the header, as RabbitMQ reads it, else from reply-to: both are taken as a key of amq.topic."""
        key = headers.pop(REPLY_TO_TOPIC, None)
        if not isinstance(key, str):
            key = found.reply_to
            # Direct reply-to names a channel of one connection: no topic leads there.
            if key is None or key.startswith(amqp.DIRECT_REPLY_TO.decode()):
                return None
        return self._keys.topic_of(key.encode("utf-8", "surrogateescape")).decode() if key else None


# ---- headers and user properties -----------------------------------------------------------------------------------


def _headers_of(user_properties: Sequence[tuple[str, str]]) -> FieldTable:
    """A name that repeats becomes one header with an array; a name that no header can have is left out."""
    texts: dict[str, list[FieldValue]] = {}
    for name, text in user_properties:
        if _is_short(name):
            texts.setdefault(name, []).append(text)
    return {name: found[0] if len(found) == 1 else found for name, found in texts.items()}


def _user_properties_of(headers: FieldTable) -> list[tuple[str, str]]:
    """An array becomes one user property for each of its items; what has no text is left out."""
    found: list[tuple[str, str]] = []
    for name, value in headers.items():
        for item in value if isinstance(value, list) else [value]:
            text = _text_of(item)
            if text is not None:
                found.append((name, text))
    return found


def _text_of(value: FieldValue) -> str | None:
    match value:
        case None:
            return ""
        case bool():
            return "true" if value else "false"
        case str():
            return value
        case bytes():
            return None
        case int():
            return str(int(value))
        case float():
            return repr(float(value))
        case Decimal():
            return str(value)
        case _:
            try:
                return json.dumps(_plain(value), ensure_ascii=False, separators=(",", ":"))
            except ValueError:
                return None


def _plain(value: FieldValue) -> object:
    """A nested table or array as JSON has it; ValueError where bytes are inside."""
    match value:
        case bytes():
            raise ValueError("bytes have no text")
        case str() | bool() | None:
            return value
        case int():
            return int(value)
        case float():
            return float(value)
        case Decimal():
            return str(value)
        case Mapping():
            return {name: _plain(item) for name, item in value.items()}
        case _:
            return [_plain(item) for item in value]


# ---- single properties ---------------------------------------------------------------------------------------------


def _correlation_data(found: amqp.Properties, headers: FieldTable) -> bytes | None:
    if found.correlation_id is not None:
        return found.correlation_id.encode("utf-8", "surrogateescape")
    value = headers.get(CORRELATION_ID)
    data = value.encode() if isinstance(value, str) else value
    if not isinstance(data, bytes) or len(data) > _TEXT_BYTES_MAX:
        return None
    del headers[CORRELATION_ID]
    return bytes(data)


def _expiry_s(expiration: str | None) -> int | None:
    """Whole seconds, rounded up: rounding down would make 900 ms expire at once."""
    if expiration is None:
        return None
    seconds = -(-int(expiration) // 1000)
    return seconds if seconds <= _EXPIRY_S_MAX else None


def _short_text(data: bytes) -> str | None:
    if len(data) > _SHORT_BYTES_MAX:
        return None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _is_short(text: str) -> bool:
    return len(text.encode()) <= _SHORT_BYTES_MAX


def _is_text(*texts: str | None) -> bool:
    """Whether MQTT can say it: UTF-8 (surrogates mark what was not), no U+0000, at most 65,535 bytes."""
    for text in texts:
        if text is None or "\0" in text:
            return False
        try:
            if len(text.encode()) > _TEXT_BYTES_MAX:
                return False
        except UnicodeEncodeError:
            return False
    return True
