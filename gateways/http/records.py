"""A record as JSON, and JSON as a record: keys and values that may be any octets. Format; pure.

A key or value that is UTF-8 is text; what is not is base64, and says so. A publisher says which of the two it sends, or
sends JSON, which is stored as its text.
"""

from base64 import b64decode, b64encode
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, field

from headrace.core_log.record import PROTOCOL_MASK, RELOCATED, Headers, Protocol, RecordBatch
from headrace.delay.parked import DelayRefused
from headrace.filtering.expression import Expression, ExpressionError, parse
from headrace.gateways.delivery.delayed_when import deliver_at_us
from headrace.gateways.delivery.retry import told
from headrace.gateways.http.operations import Answer
from headrace.gateways.http.problems import Code, Problem
from headrace.gateways.http.words import Words

Encoding = Literal["text", "base64"]
CONTENT_TYPE = b"content-type"
_PROTOCOLS = {Protocol.NEUTRAL: "http", Protocol.AMQP: "amqp", Protocol.MQTT_3: "mqtt", Protocol.MQTT_5: "mqtt"}


class Message(Answer, frozen=True, kw_only=True, omit_defaults=True):
    """One record of a partition."""

    partition: int
    offset: int
    timestamp: Annotated[str, Meta(description="when it was taken, RFC 3339 in UTC")]
    key: str
    key_encoding: Encoding = "text"
    value: str
    encoding: Annotated[Encoding, Meta(description="base64 where the value is no UTF-8")] = "text"
    # Of HTTP and AMQP; of MQTT, the user properties.
    headers: dict[str, Any] = field(default_factory=dict)
    tags: list[str] = field(default_factory=list)
    protocol: Annotated[str, Meta(description="amqp, mqtt or http: whose words the properties are")] = "http"
    properties: dict[str, Any] = field(default_factory=dict)
    expires_at: str | None = None
    relocated: Annotated[bool, Meta(description="a copy of a record that lies, or lay, in another stream too")] = False
    deliver_at: Annotated[str | None, Meta(description="in a topic `.retry`: when it comes back")] = None
    schedule_id: Annotated[str | None, Meta(description="in a topic `.retry`: its id among what is delayed")] = None


def shown(words: Words, partition: int, batch: RecordBatch, index: int, *, base64: bool = False) -> Message:
    """A record as its readers get it. `base64`: whatever is in it."""
    attributes = batch.attributes.at(index)
    neutral = batch.headers[index] if batch.headers is not None else ()
    properties, headers = plain(words, batch.keys[index], batch.properties[index], attributes, neutral)
    key, key_encoding = written(batch.keys[index], base64=base64)
    value, encoding = written(batch.values[index], base64=base64)
    expiry_us = batch.expiries.at(index)
    return Message(
        partition=partition,
        offset=batch.offset_at(index),
        timestamp=time_text(batch.timestamps.at(index)),
        key=key,
        key_encoding=key_encoding,
        value=value,
        encoding=encoding,
        headers=headers,
        tags=list(batch.tags_at(index)),
        protocol=protocol_of(attributes),
        properties=properties,
        expires_at=time_text(expiry_us) if expiry_us else None,
        relocated=attributes & RELOCATED != 0,
    )


def protocol_of(attributes: int) -> str:
    return _PROTOCOLS[Protocol(attributes & PROTOCOL_MASK)]


def plain(
    words: Words, key: bytes, properties: bytes, attributes: int, neutral: Headers
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(properties, headers) of a record in plain words.

    The neutral headers of a topic's record are its publisher's. Those of AMQP's and MQTT's are the broker's notes, of
    which everybody is told what consumers are told, and no more.
    """
    if attributes & PROTOCOL_MASK == Protocol.NEUTRAL:
        headers = {_text(name): _header(value) for name, value in neutral}
        content_type = headers.pop(CONTENT_TYPE.decode(), None)
        return {} if content_type is None else {"content_type": content_type}, headers
    found = words.read(key, properties, attributes)
    return dict(found.properties), {**found.headers, **told(neutral)}


def written(data: bytes, *, base64: bool = False) -> tuple[str, Encoding]:
    if not base64:
        try:
            return data.decode(), "text"
        except UnicodeDecodeError:
            pass
    return b64encode(data).decode(), "base64"


def octets(text: str, encoding: Encoding) -> bytes:
    """ValueError for what is no base64."""
    if encoding == "text":
        return text.encode()
    try:
        return b64decode(text, validate=True)
    except ValueError as error:
        raise ValueError(f"not base64: {error}") from None


def value_octets(raw: msgspec.Raw, encoding: Literal["text", "base64", "json"] | None) -> bytes:
    """What a publisher's value is stored as. ValueError for what is not what it says it is."""
    data = bytes(raw)
    if not data:
        return b""
    is_text = data.startswith(b'"')
    if not is_text and encoding not in (None, "json"):
        raise ValueError(f"a value whose encoding is {encoding} is a string")
    try:
        # What is inside was passed over when the body was read.
        decoded = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"the value is not JSON: {error}") from None
    if encoding == "json" or not is_text:
        return data
    return octets(decoded, "base64" if encoding == "base64" else "text")


def _header(value: bytes) -> str | dict[str, str]:
    """A publisher may give it back as it is read."""
    text, encoding = written(value)
    return text if encoding == "text" else {"base64": text}


def header_octets(value: object) -> bytes | None:
    """Of a header that is written as {"base64": "..."}; None for any other. ValueError for what is no base64."""
    if not isinstance(value, dict) or set(value) != {"base64"} or not isinstance(value["base64"], str):
        return None
    return octets(value["base64"], "base64")


def _text(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")


def filter_of(text: str | None) -> Expression | None:
    """A tag expression as callers write it; Problem, with the column, for what is none."""
    try:
        return None if text is None else parse(text)
    except ExpressionError as error:
        raise Problem(Code.INVALID_PARAMETER, f"filter: {error}") from None


def time_us_of(text: str | int, *, name: str = "timestamp", code: Code = Code.INVALID) -> int:
    """A time as callers write it, in microseconds since 1970; Problem for what is none, in the field `name`."""
    try:
        return deliver_at_us(text)
    except DelayRefused:
        what = f"{name} '{text}' is neither milliseconds since 1970 nor a time of RFC 3339 with its zone"
        raise Problem(code, what) from None


def time_text(time_us: int) -> str:
    """Microseconds since 1970 as RFC 3339."""
    try:
        found = datetime.fromtimestamp(time_us // 1_000_000, UTC).replace(microsecond=time_us % 1_000_000)
    except (ValueError, OverflowError):
        return f"@{time_us / 1e6:.6f}"
    return found.isoformat(timespec="microseconds").replace("+00:00", "Z")
