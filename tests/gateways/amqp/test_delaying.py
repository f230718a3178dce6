"""What a publish asks for is read from its headers, quickly where that is safe; readers get what the plugin gives."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.delay.parked import DelayRefused
from headrace.gateways.amqp.delaying import Asked, asked_of, fired, first_delay
from headrace.gateways.amqp.fields import FieldTable, Float32, Int64, Int64L, Timestamp, UInt16, encode_table
from headrace.gateways.amqp.properties import Properties, decode, encode

NOW_US = 1_700_000_000_000_000


def props_of(headers: FieldTable | None, **others: object) -> bytes:
    encoded = None if headers is None else encode_table(headers)
    return encode(Properties(headers_bytes=encoded, **others))  # type: ignore[arg-type]


def headers_of(props: bytes) -> FieldTable:
    return decode(props).headers or {}


@pytest.mark.parametrize(
    "delay", [5000, Int64(5000), Int64L(5000), UInt16(5000), "5000", 5000.7, Float32(5000.5), Decimal("5000.25")]
)
def test_every_spelling_of_a_delay_counts(delay: object) -> None:
    assert asked_of({"x-delay": delay}, NOW_US) == Asked(NOW_US + 5_000_000, None)  # type: ignore[dict-item]


def test_an_id_comes_along() -> None:
    assert asked_of({"x-delay": 1, "x-schedule-id": "order-17"}, NOW_US) == Asked(NOW_US + 1000, b"order-17")
    assert asked_of({"x-schedule-id": "order-17"}, NOW_US) is None


def test_a_timestamp_is_a_time_and_no_delay() -> None:
    assert asked_of({"x-deliver-at": Timestamp(1_700_000_005)}, NOW_US) == Asked(NOW_US + 5_000_000, None)
    with pytest.raises(DelayRefused, match="x-delay"):
        asked_of({"x-delay": Timestamp(5)}, NOW_US)


@pytest.mark.parametrize("headers", [{}, {"x-delay": None}, {"x-delay": 0}, {"x-delay": -5}, {"delay": 5}])
def test_without_a_delay_nothing_is_asked(headers: FieldTable) -> None:
    assert asked_of(headers, NOW_US) is None


@pytest.mark.parametrize(
    ("headers", "others", "value"),
    [
        ({"x-delay": 5000}, {}, 5000),
        ({"x-delay": Int64(7)}, {"content_type": "text/plain", "content_encoding": "utf-8"}, 7),
        ({"x-delay": 5000, "kind": "order"}, {"delivery_mode": 2, "expiration": "100"}, 5000),
        ({"x-delay": -1}, {}, -1),
        ({"kind": "order", "x-delay": 5000}, {}, None),
        ({"x-delay": "5000"}, {}, None),
        ({"x-delay": 5000, "x-tags": "eu"}, {}, None),
        ({"x-delay": 5000, "note": "x-ray"}, {}, None),
        ({"x-delay": 5000, "CC": ["other"]}, {}, None),
        ({"x-delay": 5000}, {"user_id": "guest"}, None),
        ({"x-delay": 5000}, {"reply_to": "amq.rabbitmq.reply-to"}, None),
        ({}, {}, None),
        (None, {}, None),
    ],
)
def test_the_quick_look_is_sure_or_silent(headers: FieldTable | None, others: dict[str, object], value: object) -> None:
    found = first_delay(props_of(headers, **others))
    assert (None if found is None else found[1]) == value


values = st.integers(-(2**31), 2**31 - 1) | st.text(max_size=8) | st.booleans() | st.floats(allow_nan=False)
tables = st.dictionaries(st.sampled_from(["x-delay", "a", "x-b", "note"]) | st.text(max_size=5), values, max_size=4)


@given(tables, st.none() | st.text(max_size=9), st.none() | st.just("5000"))
def test_the_quick_look_never_differs_from_a_decode(
    headers: FieldTable, content_type: str | None, expiration: str | None
) -> None:
    props = props_of(headers, content_type=content_type, expiration=expiration)
    found = first_delay(props)
    if found is not None:
        assert headers["x-delay"] == found[1]
        asked = asked_of(headers, NOW_US)
        assert asked == (Asked(NOW_US + found[1] * 1000, None) if found[1] > 0 else None)


def test_readers_see_the_delay_negated_and_all_else_as_it_was() -> None:
    for headers in ({"x-delay": 5000, "kind": "order"}, {"kind": "order", "x-delay": "5000"}):
        props = props_of(headers, content_type="text/plain", delivery_mode=2, message_id="17")
        found = fired(b"key", props, 0)
        assert headers_of(found.properties) == {"x-delay": -5000, "kind": "order"}
        assert decode(found.properties).message_id == "17"
        assert asked_of(headers_of(found.properties), NOW_US) is None


def test_a_delay_of_more_than_32_bits_is_negated_too() -> None:
    for delay in (2**40, Int64L(2**40), str(2**40)):
        found = fired(b"key", props_of({"x-delay": delay}), 0)
        assert headers_of(found.properties) == {"x-delay": -(2**40)}


@pytest.mark.parametrize(("level", "seen"), [(3, -3), ("3", -3), ("10s", -3), ("2h", -18)])
def test_a_level_is_negated_so_that_a_forwarded_message_does_not_wait_again(level: object, seen: int) -> None:
    found = fired(b"key", props_of({"x-delay-level": level}), 0)  # type: ignore[dict-item]
    assert headers_of(found.properties) == {"x-delay-level": seen}
    assert asked_of(headers_of(found.properties), NOW_US) is None


def test_a_time_stays_as_it_was_and_has_passed() -> None:
    found = fired(b"key", props_of({"x-deliver-at": 1_700_000_005_000}), 0)
    assert headers_of(found.properties) == {"x-deliver-at": 1_700_000_005_000}


def test_copies_are_routed_and_blind_ones_are_not_seen() -> None:
    found = fired(b"key", props_of({"x-delay": 5, "CC": ["open"], "BCC": ["blind"]}), 0)
    assert list(found.copies) == ["open", "blind"]
    assert headers_of(found.properties) == {"x-delay": -5, "CC": ["open"]}


@pytest.mark.parametrize("headers", [{"x-delay": 5}, {"x-delay": "5"}])
def test_the_time_to_live_counts_from_firing(headers: FieldTable) -> None:
    assert fired(b"key", props_of(headers, expiration="3000"), 0).expiration_us == 3_000_000
    assert fired(b"key", props_of(headers), 0).expiration_us is None
