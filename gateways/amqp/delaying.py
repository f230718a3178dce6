"""Delays in AMQP's words: what a publish asks for, and what readers get once it was delivered late. Format; pure.

`x-delay` is the header of RabbitMQ's archived delayed message exchange, and is read here on a publish to any exchange;
the other names are ours (delivery/delayed_when.py). As with the plugin, readers see the delay negated: the message is
known as one that came late, and whoever forwards it with its headers does not delay it again. A level is negated too;
`x-deliver-at` has passed by then. Neighbours: publishing.py asks, delivery/delayed_publish.py fires.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass

from headrace.gateways.amqp import properties
from headrace.gateways.amqp.fields import FieldTable, FieldValue, Int64, Timestamp
from headrace.gateways.amqp.properties import CONTENT_ENCODING, CONTENT_TYPE, EXPIRATION, HEADERS, REPLY_TO, USER_ID
from headrace.gateways.delivery.delayed_publish import Fired
from headrace.gateways.delivery.delayed_when import (
    DELAY,
    DELAY_LEVEL,
    DELIVER_AT,
    HINT,
    LEVELS,
    SCHEDULE_ID,
    delay_us,
    due_us_of,
    schedule_id_of,
)
from headrace.gateways.delivery.routing import Fields

# The headers of most delayed messages begin so: the length of the table, then this.
_KEY = b"\x07x-delay"
_INT32, _INT64 = struct.Struct(">i"), struct.Struct(">q")


@dataclass(frozen=True, slots=True)
class Asked:
    due_us: int
    # For cancel and reschedule; None: the broker makes one.
    id: bytes | None


def asked_of(headers: FieldTable, now_us: int) -> Asked | None:
    """None: it is to be delivered now. Raises DelayRefused."""
    due_us = due_us_of(
        now_us,
        _plain(DELAY, headers),
        _plain(DELIVER_AT, headers),
        _plain(DELAY_LEVEL, headers),
    )
    return None if due_us is None else Asked(due_us, schedule_id_of(headers.get(SCHEDULE_ID)))


def _plain(name: str, headers: FieldTable) -> object:
    value = headers.get(name)
    if isinstance(value, Timestamp):
        # Seconds since 1970, which only one of them can be.
        return int(value) * 1000 if name == DELIVER_AT else [value]
    return value


def first_delay(props: bytes) -> tuple[int, int] | None:
    """The place and the value of `x-delay` where it is the first header, a plain integer, and nothing else in these
    properties concerns the broker; None: that cannot be told without decoding them, as with any other message.

    For the hot path: a decode costs ten times as much.
    """
    flags = props[0] << 8 | props[1]
    if not flags & HEADERS or flags & (REPLY_TO | USER_ID):
        return None
    start = 2
    if flags & CONTENT_TYPE:
        start += 1 + props[start]
    if flags & CONTENT_ENCODING:
        start += 1 + props[start]
    start += 4
    # Any other x- or CC, be it in a value, has to be looked at.
    if not props.startswith(_KEY, start) or props.count(b"x-") != 1 or b"CC" in props:
        return None
    start += len(_KEY)
    kind = props[start]
    if kind == 0x49:
        return start, _INT32.unpack_from(props, start + 1)[0]
    if kind == 0x6C or kind == 0x4C:
        return start, _INT64.unpack_from(props, start + 1)[0]
    return None


def fired(key: bytes, props: bytes, attributes: int) -> Fired:
    """What a parked message is published as."""
    usual = first_delay(props)
    if usual is not None:
        place, delay_ms = usual
        if delay_ms > 0:
            kind = _INT32 if props[place] == 0x49 else _INT64
            props = props[: place + 1] + kind.pack(-delay_ms) + props[place + 1 + kind.size :]
        expiration_us = None
        if (props[0] << 8 | props[1]) & EXPIRATION:
            expiration_us = _expiration_us(props)
        return Fired(props, (), lambda: properties.decode(props).headers, _fields_of(props), expiration_us)
    headers = properties.decode(props).headers or {}
    copies: list[str] = []
    for name in ("CC", "BCC"):
        found = headers.get(name)
        copies += [one for one in found if isinstance(one, str)] if isinstance(found, list) else []
    props = properties.without_header(props, "BCC")
    if HINT in props:
        props = properties.with_headers(props, _negated(headers))
    stored = props
    return Fired(stored, copies, lambda: properties.decode(stored).headers, _fields_of(stored), _expiration_us(stored))


def _negated(headers: Mapping[str, FieldValue]) -> dict[str, FieldValue]:
    changes: dict[str, FieldValue] = {}
    if headers.get(DELAY) is not None:
        delay_ms = delay_us(headers[DELAY]) // 1000
        if delay_ms > 0:
            changes[DELAY] = -delay_ms if delay_ms < 1 << 31 else Int64(-delay_ms)
    level = headers.get(DELAY_LEVEL)
    if isinstance(level, str) and level in LEVELS:
        changes[DELAY_LEVEL] = -1 - LEVELS.index(level)
    elif isinstance(level, int | str) and int(level) > 0:
        changes[DELAY_LEVEL] = -int(level)
    return changes


def _expiration_us(props: bytes) -> int | None:
    expiration_ms = properties.scan(props).expiration_ms
    return None if expiration_ms is None else expiration_ms * 1000


def _fields_of(props: bytes) -> Fields:
    def fields() -> dict[str, object]:
        decoded = properties.decode(props)
        return {
            "correlation_id": decoded.correlation_id,
            "message_id": decoded.message_id,
            "timestamp": decoded.timestamp,
        }

    return fields
