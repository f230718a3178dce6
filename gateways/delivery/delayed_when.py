"""When a message asks to be delivered: `x-delay`, `x-deliver-at`, `x-delay-level`, through whichever door. Pure.

    x-delay         milliseconds from now. A number, or one in text, as RabbitMQ's delayed message exchange reads it:
                    fractions are cut off; 0 and less, and no value at all, mean now
    x-deliver-at    milliseconds since 1970, or a time of RFC 3339 with its zone; what has passed means now
    x-delay-level   1 to 18 or a name of RocketMQ's: 1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h

One of them at most may say something. What cannot be understood is refused, never delivered at once.
How far ahead a time may lie is the engine's affair (delay/delays.py). Neighbours: each door's own file knows where in a
message these stand.
"""

from datetime import datetime
from decimal import Decimal

from headrace.delay.parked import DelayRefused

DELAY, DELIVER_AT, DELAY_LEVEL, SCHEDULE_ID = "x-delay", "x-deliver-at", "x-delay-level", "x-schedule-id"
# In the names of the three that delay, and of few others.
HINT = b"x-de"
LEVELS = ("1s", "5s", "10s", "30s", *(f"{minutes}m" for minutes in (*range(1, 11), 20, 30)), "1h", "2h")
SCHEDULE_ID_BYTES_MAX = 255
_SECONDS = {"s": 1, "m": 60, "h": 3600}
_LEVELS_S = tuple(int(name[:-1]) * _SECONDS[name[-1]] for name in LEVELS)


def due_us_of(now_us: int, delay: object = None, deliver_at: object = None, level: object = None) -> int | None:
    """When it is due, in microseconds since 1970; None: now. Raises DelayRefused, with the name of what is wrong."""
    asked = {
        DELAY: None if delay is None else delay_us(delay),
        DELIVER_AT: None if deliver_at is None else deliver_at_us(deliver_at) - now_us,
        DELAY_LEVEL: None if level is None else level_us(level),
    }
    waits = {name: wait_us for name, wait_us in asked.items() if wait_us is not None and wait_us > 0}
    if len(waits) > 1:
        raise DelayRefused(f"{' and '.join(waits)} say different things: give one of them")
    return now_us + next(iter(waits.values())) if waits else None


def delay_us(delay: object) -> int:
    return _number(DELAY, delay, "milliseconds") * 1000


def deliver_at_us(when: object) -> int:
    if isinstance(when, datetime):
        if when.tzinfo is None:
            raise DelayRefused(f"{DELIVER_AT} {when} has no time zone")
        return round(when.timestamp() * 1e6)
    if isinstance(when, str) and not _is_number(when):
        try:
            parsed = datetime.fromisoformat(when)
        except ValueError:
            text = f"{DELIVER_AT} '{_shown(when)}' is neither milliseconds since 1970 nor a time of RFC 3339"
            raise DelayRefused(text) from None
        if parsed.tzinfo is None:
            raise DelayRefused(f"{DELIVER_AT} '{when}' has no time zone: end it with Z or an offset such as +02:00")
        try:
            return round(parsed.timestamp() * 1e6)
        except (ValueError, OverflowError):
            raise DelayRefused(f"{DELIVER_AT} '{when}' is out of range") from None
    return _number(DELIVER_AT, when, "milliseconds since 1970") * 1000


def level_us(level: object) -> int:
    if isinstance(level, str) and level in LEVELS:
        return _LEVELS_S[LEVELS.index(level)] * 1_000_000
    number = _number(DELAY_LEVEL, level, f"1 to {len(LEVELS)} or one of {', '.join(LEVELS)}")
    if number > len(LEVELS):
        raise DelayRefused(f"{DELAY_LEVEL} must be 1 to {len(LEVELS)} or one of {', '.join(LEVELS)}, not {number}")
    return _LEVELS_S[number - 1] * 1_000_000 if number > 0 else 0


def schedule_id_of(value: object) -> bytes | None:
    """The id that a message brings for cancel and reschedule."""
    if value is None:
        return None
    found = value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value
    if not isinstance(found, bytes) or not 1 <= len(found) <= SCHEDULE_ID_BYTES_MAX:
        raise DelayRefused(f"{SCHEDULE_ID} must be a string of 1 to {SCHEDULE_ID_BYTES_MAX} bytes")
    return found


def _number(name: str, value: object, what: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, float | Decimal):
        try:
            return int(value)
        except (ValueError, OverflowError):
            pass
    elif isinstance(value, str) and _is_number(value):
        return int(value)
    raise DelayRefused(f"{name} must be {what}, not {_shown(value)!r}")


def _is_number(text: str) -> bool:
    digits = text[1:] if text[:1] in ("+", "-") else text
    # Longer ones are out of every range, and slow to read.
    return digits.isascii() and digits.isdigit() and len(digits) <= 24


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 40 else text[:40] + "..."
