"""Runs of properties are sorted into shapes, and nothing comes out otherwise than message by message."""

from collections.abc import Sequence
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.gateways.amqp import properties
from headrace.gateways.amqp.delaying import asked_of
from headrace.gateways.amqp.errors import AmqpError
from headrace.gateways.amqp.fields import FieldTable, Int8, Int16, Int64, Int64L, UInt8, UInt16, UInt32, encode_table
from headrace.gateways.amqp.properties import Properties, decode, encode
from headrace.gateways.amqp.shapes import COUNT_MIN, SIZE_MAX, Group, Shapes

MANY = 2 * COUNT_MIN
NOW_US = 1_700_000_000_000_000


def props_of(headers: FieldTable | None, **others: object) -> bytes:
    encoded = None if headers is None else encode_table(headers)
    return encode(Properties(headers_bytes=encoded, **others))  # type: ignore[arg-type]


def groups_of(props: Sequence[bytes]) -> list[Group]:
    return list(Shapes().groups(props))


def test_messages_that_differ_in_ids_and_times_are_one_group() -> None:
    props = [
        props_of(
            {"order": f"{number:08d}", "count": number},
            delivery_mode=2,
            message_id=str(UUID(int=number)),
            correlation_id=f"{number:04d}",
            timestamp=number,
        )
        for number in range(MANY)
    ]
    (group,) = groups_of(props)
    assert group == Group(0, MANY, properties.scan(props[0]))


@pytest.mark.parametrize("kind", [Int8, UInt8, Int16, UInt16, int, UInt32, Int64, Int64L])
def test_delays_are_a_column_whatever_integers_they_are(kind: type[int]) -> None:
    props = [props_of({"x-delay": kind(number), "note": "x-ray"}, message_id=f"{number:03}") for number in range(MANY)]
    (group,) = groups_of(props)
    assert group.delays_ms is not None
    assert group.delays_ms.tolist() == list(range(MANY))
    assert group.ids is None


def test_integers_of_two_sizes_are_one_group() -> None:
    delays = [1 << (place % 40) for place in range(MANY)]
    (group,) = groups_of([props_of({"x-delay": delay}, delivery_mode=2) for delay in delays])
    assert group.delays_ms is not None
    assert group.delays_ms.tolist() == delays


def test_ids_for_cancelling_come_along() -> None:
    props = [props_of({"x-delay": number, "x-schedule-id": f"order-{number:04}"}) for number in range(MANY)]
    (group,) = groups_of(props)
    assert group.ids == [f"order-{number:04}".encode() for number in range(MANY)]
    (group,) = groups_of([props[3]] * MANY)
    assert group.ids == [b"order-0003"] * MANY


@pytest.mark.parametrize(
    "more",
    [
        {"x-tags": "eu"},
        {"x-deliver-at": 5},
        {"CC": ["other"]},
        {"x-producer-id": "p", "x-sequence": 1},
        {"x-schedule-id": 5},
        {"x-schedule-id": ""},
        {"x-schedule-id": "i" * 256},
    ],
)
def test_what_else_concerns_the_broker_is_left_to_a_decode(more: FieldTable) -> None:
    (group,) = groups_of([props_of({"x-delay": 1000 + number, **more}) for number in range(MANY)])
    assert group.delays_ms is None
    assert group.scan.interesting


@pytest.mark.parametrize("others", [{"user_id": "guest"}, {"reply_to": "amq.rabbitmq.reply-to"}])
def test_a_sender_or_a_place_for_answers_is_left_to_a_decode(others: dict[str, object]) -> None:
    (group,) = groups_of([props_of({"x-delay": number}, **others) for number in range(MANY)])
    assert group.delays_ms is None


@pytest.mark.parametrize("delay", ["5000", 5000.5, True, None])
def test_delays_that_are_no_integers_are_left_to_a_decode(delay: object) -> None:
    props = [props_of({"x-delay": delay, "n": number}) for number in range(MANY)]  # type: ignore[dict-item]
    assert all(group.delays_ms is None for group in groups_of(props))


def test_a_header_that_stands_twice_is_left_to_a_decode() -> None:
    entry = encode_table({"x-delay": 7})[4:]
    twice = [encode_table({"n": number})[4:] + entry + entry for number in range(MANY)]
    props = [
        encode(Properties(headers_bytes=len(entries).to_bytes(4, "big") + entries, delivery_mode=2))
        for entries in twice
    ]
    (group,) = groups_of(props)
    assert group.delays_ms is None


def test_groups_end_where_the_scan_changes() -> None:
    props = [props_of({"n": number}, delivery_mode=1 + number // COUNT_MIN) for number in range(MANY)]
    assert [(group.first, group.last) for group in groups_of(props)] == [(0, COUNT_MIN), (COUNT_MIN, MANY)]


@pytest.mark.parametrize("size", [8, SIZE_MAX])
def test_what_stands_before_malformed_properties_is_given_out(size: int) -> None:
    props = [props_of({"n": number, "text": "t" * size}) for number in range(MANY)]
    props[20] = props[20][:-1]
    groups = iter(Shapes().groups(props))
    assert next(groups) == Group(0, 20, properties.scan(props[0]))
    with pytest.raises(AmqpError):
        next(groups)


def test_a_run_of_nothing_but_strangers_is_looked_at_one_by_one() -> None:
    props = [props_of({f"name-{number:03}": 1}) for number in range(MANY)]
    (group,) = groups_of(props)
    assert (group.first, group.last) == (0, MANY)


_values = st.integers(-(2**31), 2**63 - 1) | st.text(max_size=3) | st.booleans() | st.none() | st.just({"x-delay": 5})
_names = st.sampled_from(["x-delay", "x-schedule-id", "a", "x-b", "note", "CC"])
_messages = st.builds(
    props_of,
    st.none() | st.dictionaries(_names, _values, max_size=3),
    delivery_mode=st.sampled_from([None, 1, 2]),
    message_id=st.none() | st.text("ab", min_size=2, max_size=2),
    timestamp=st.none() | st.integers(0, 9),
    expiration=st.sampled_from([None, "5", "7"]),
    user_id=st.sampled_from([None, None, None, "guest"]),
)


@given(st.lists(_messages, min_size=1, max_size=6), st.lists(st.integers(0, 5), min_size=COUNT_MIN, max_size=MANY))
def test_shapes_never_say_anything_else_than_a_decode(pool: Sequence[bytes], picks: Sequence[int]) -> None:
    props = [pool[pick % len(pool)][:] for pick in picks]
    shapes = Shapes()
    for _ in range(2):
        behind = 0
        for group in shapes.groups(props):
            assert group.first == behind
            behind = group.last
            for place, one in enumerate(props[group.first : group.last]):
                scan = properties.scan(one)
                # Where only a value hints at something, either is right.
                assert (group.scan.delivery_mode, group.scan.expiration_ms) == (scan.delivery_mode, scan.expiration_ms)
                decoded = decode(one)
                ours = [name for name in decoded.headers or {} if name.startswith("x-") or "CC" in name]
                assert group.scan.interesting or not (ours or decoded.user_id)
                if group.delays_ms is not None:
                    asked = asked_of(decoded.headers or {}, NOW_US)
                    delay_ms = int(group.delays_ms[place])
                    assert (None if asked is None else asked.due_us) == (
                        NOW_US + delay_ms * 1000 if delay_ms > 0 else None
                    )
                    if asked is not None:
                        assert asked.id == (None if group.ids is None else group.ids[place])
                    assert set(ours) <= {"x-delay", "x-schedule-id"} and decoded.user_id is None
        assert behind == len(props)
