"""x-death as RabbitMQ writes it: what an entry says, what stays, and when a message goes round in a cycle."""

from collections.abc import Mapping
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.gateways.amqp import properties
from headrace.gateways.amqp.deaths import apart, aparts, stamp
from headrace.gateways.amqp.fields import FieldTable, FieldValue, Int64, Timestamp, encode_table
from headrace.gateways.amqp.properties import Properties
from headrace.gateways.delivery.queue import Reason
from headrace.gateways.delivery.transfers import Death

NOON_S = 1_700_000_000
DEATH = Death("work", Reason.REJECTED, b"jobs", b"jobs.eu", NOON_S * 1_000_000, rerouted=False)


def message(headers: Mapping[str, FieldValue] | None = None, **fields: object) -> bytes:
    encoded = None if headers is None else encode_table(headers)
    return properties.encode(Properties(headers_bytes=encoded, **fields))  # type: ignore[arg-type]


def headers_of(props: bytes) -> FieldTable:
    headers = properties.decode(props).headers
    assert headers is not None
    return headers


def deaths_of(props: bytes) -> list[FieldTable]:
    deaths = headers_of(props)["x-death"]
    assert isinstance(deaths, list)
    return [dict(one) for one in deaths]


def died(props: bytes, *deaths: Death) -> bytes:
    for death in deaths:
        props = stamp(props, death).properties
    return props


def at(queue: str, reason: Reason, **more: object) -> Death:
    return replace(DEATH, queue=queue, reason=reason, **more)  # type: ignore[arg-type]


def test_first_death_tells_everything() -> None:
    props = died(message(), DEATH)
    assert deaths_of(props) == [
        {
            "count": 1,
            "reason": "rejected",
            "queue": "work",
            "time": NOON_S,
            "exchange": "jobs",
            "routing-keys": ["jobs.eu"],
        }
    ]
    assert {name: value for name, value in headers_of(props).items() if name != "x-death"} == {
        "x-first-death-exchange": "jobs",
        "x-first-death-queue": "work",
        "x-first-death-reason": "rejected",
        "x-last-death-exchange": "jobs",
        "x-last-death-queue": "work",
        "x-last-death-reason": "rejected",
    }


def test_types_on_the_wire_are_those_of_rabbitmq() -> None:
    """Clients in typed languages take a count that is no 64-bit integer for an error."""
    (entry,) = deaths_of(died(message(), DEATH))
    assert (type(entry["count"]), type(entry["time"])) == (Int64, Timestamp)
    props = died(message(), DEATH, at("other", Reason.EXPIRED), DEATH)
    assert [type(entry["count"]) for entry in deaths_of(props)] == [Int64, Int64]


def test_same_queue_and_reason_count_up_move_to_the_front_and_keep_the_first_time() -> None:
    later = replace(DEATH, time_us=DEATH.time_us + 5_000_000, exchange=b"dlx", routing_key=b"other")
    first, second = deaths_of(died(message(), DEATH, at("delay", Reason.EXPIRED), later))
    assert (first["queue"], first["count"], first["time"]) == ("work", 2, NOON_S)
    assert (first["exchange"], first["routing-keys"]) == ("jobs", ["jobs.eu"])
    assert (second["queue"], second["count"]) == ("delay", 1)


def test_other_reason_in_the_same_queue_is_another_entry() -> None:
    entries = deaths_of(died(message(), DEATH, at("work", Reason.EXPIRED)))
    assert [(entry["reason"], entry["count"]) for entry in entries] == [("expired", 1), ("rejected", 1)]


def test_first_death_stays_and_last_death_changes() -> None:
    headers = headers_of(died(message(), DEATH, at("delay", Reason.EXPIRED, exchange=b"dlx")))
    assert (headers["x-first-death-queue"], headers["x-first-death-reason"]) == ("work", "rejected")
    assert (headers["x-last-death-queue"], headers["x-last-death-reason"]) == ("delay", "expired")
    assert (headers["x-first-death-exchange"], headers["x-last-death-exchange"]) == ("jobs", "dlx")


def test_expiration_is_taken_away_and_kept_in_the_entry() -> None:
    props = died(message(expiration="60000"), at("work", Reason.EXPIRED))
    assert properties.decode(props).expiration is None
    assert deaths_of(props)[0]["original-expiration"] == "60000"
    again = died(props, at("other", Reason.EXPIRED))
    assert "original-expiration" not in deaths_of(again)[0]


def test_routing_keys_hold_the_copies_too() -> None:
    (entry,) = deaths_of(died(message({"CC": ["a", "b"]}), DEATH))
    assert entry["routing-keys"] == ["jobs.eu", "a", "b"]


def test_copies_route_again_unless_a_dead_letter_routing_key_takes_their_place() -> None:
    props = message({"CC": ["a", "b"], "kept": 1})
    stamped = stamp(props, DEATH)
    assert list(stamped.copies) == ["a", "b"]
    assert headers_of(stamped.properties)["CC"] == ["a", "b"]
    rerouted = stamp(props, replace(DEATH, rerouted=True))
    assert list(rerouted.copies) == []
    headers = headers_of(rerouted.properties)
    assert "CC" not in headers
    assert headers["kept"] == 1
    assert deaths_of(rerouted.properties)[0]["routing-keys"] == ["jobs.eu", "a", "b"]


def test_headers_are_there_for_an_exchange_that_routes_by_them() -> None:
    stamped = stamp(message({"region": "eu"}), DEATH)
    assert callable(stamped.headers)
    headers = stamped.headers()
    assert headers is not None
    assert (headers["region"], headers["x-last-death-queue"]) == ("eu", "work")


@pytest.mark.parametrize("junk", ["text", 5, {"queue": "work"}, None])
def test_x_death_that_is_no_array_begins_anew(junk: FieldValue) -> None:
    (entry,) = deaths_of(died(message({"x-death": junk}), DEATH))
    assert (entry["queue"], entry["count"]) == ("work", 1)


@pytest.mark.parametrize("count", ["many", -5, 1 << 62, None])
def test_count_that_is_none_begins_anew(count: FieldValue) -> None:
    forged: FieldTable = {"queue": "work", "reason": "rejected", "count": count}
    (entry,) = deaths_of(died(message({"x-death": [forged]}), DEATH))
    assert entry["count"] == 1


def test_names_that_are_not_utf_8_are_told_as_they_are() -> None:
    death = replace(DEATH, exchange=b"\xff", routing_key=b"\xfe", queue="caf\udce9")
    (entry,) = deaths_of(died(message(), death))
    assert (entry["exchange"], entry["routing-keys"], entry["queue"]) == (b"\xff", [b"\xfe"], b"caf\xe9")
    (entry,) = deaths_of(died(message(), death, death))
    assert entry["count"] == 2
    assert stamp(message(), replace(death, reason=Reason.EXPIRED)).cycling == {"caf\udce9"}


# -- cycles -----------------------------------------------------------------------------------------------------


def test_queue_that_a_message_expired_in_closes_a_cycle() -> None:
    props = died(message(), at("a", Reason.EXPIRED), at("b", Reason.MAXLEN))
    assert stamp(props, at("c", Reason.DELIVERY_LIMIT)).cycling == {"a", "b", "c"}


def test_rejection_anywhere_in_the_cycle_keeps_it_going() -> None:
    """Q1 rejects to Q2, where it expires back to Q1: a retry loop, which somebody keeps turning."""
    props = died(message(), at("q1", Reason.REJECTED))
    assert stamp(props, at("q2", Reason.EXPIRED)).cycling == {"q2"}


def test_rejection_before_the_cycle_began_does_not_help() -> None:
    props = died(message(), at("start", Reason.REJECTED), at("a", Reason.EXPIRED), at("b", Reason.EXPIRED))
    assert stamp(props, at("a", Reason.EXPIRED)).cycling == {"a", "b"}


def test_message_that_is_being_rejected_closes_no_cycle() -> None:
    props = died(message(), at("a", Reason.EXPIRED), at("b", Reason.EXPIRED))
    assert stamp(props, at("c", Reason.REJECTED)).cycling == frozenset()


def test_entry_that_no_broker_wrote_is_kept_and_no_part_of_a_cycle_that_turns_by_itself() -> None:
    old: FieldTable = {"queue": "a", "reason": "expired", "count": 1}
    stamped = stamp(message({"x-death": ["mine", old]}), at("b", Reason.EXPIRED))
    assert stamped.cycling == {"b"}
    deaths = headers_of(stamped.properties)["x-death"]
    assert isinstance(deaths, list)
    assert deaths[1:] == ["mine", old]


# -- whatever comes ---------------------------------------------------------------------------------------------

NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20).filter(
    lambda name: name not in ("x-death", "CC") and not name.startswith(("x-first-", "x-last-"))
)
VALUES: st.SearchStrategy[FieldValue] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8"))
    | st.builds(Timestamp, st.integers(0, 2**64 - 1)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=5,
)
DEATHS = st.builds(
    Death,
    queue=st.sampled_from("abc"),
    reason=st.sampled_from(Reason),
    exchange=st.binary(max_size=5),
    routing_key=st.binary(max_size=5),
    time_us=st.integers(0, 1 << 60),
    rerouted=st.booleans(),
)
SHORT = st.none() | st.text(st.characters(codec="ascii"), max_size=20)


@given(
    headers=st.none() | st.dictionaries(NAMES, VALUES, max_size=5),
    story=st.lists(DEATHS, min_size=1, max_size=8),
    message_id=SHORT,
    content_type=SHORT,
    expiration=st.none() | st.integers(0, 2**31).map(str),
    priority=st.none() | st.integers(0, 255),
    timestamp=st.none() | st.integers(0, 2**64 - 1),
)
def test_everything_else_stays_byte_for_byte(
    headers: FieldTable | None, story: list[Death], expiration: str | None, **fields: object
) -> None:
    props = message(headers, expiration=expiration, **fields)
    after = died(props, *story)
    before_fields, after_fields = properties.decode(props), properties.decode(after)
    assert after_fields == replace(before_fields, headers_bytes=after_fields.headers_bytes, expiration=None)
    assert after_fields.headers_bytes is not None
    # The old entries come first, as they were.
    assert after_fields.headers_bytes[4:].startswith((before_fields.headers_bytes or bytes(4))[4:])


@given(st.lists(DEATHS, min_size=1, max_size=12))
def test_counts_and_order_are_those_of_the_story(story: list[Death]) -> None:
    entries = deaths_of(died(message(), *story))
    expected: dict[tuple[str, str], int] = {}
    for death in story:
        key = (death.queue, str(death.reason))
        expected[key] = expected.pop(key, 0) + 1
    newest_first = [(queue, reason, count) for (queue, reason), count in reversed(expected.items())]
    assert [(entry["queue"], entry["reason"], entry["count"]) for entry in entries] == newest_first


NAMES = st.sampled_from(["x-death", "x-attempt", "x-reason", "x-first-death-queue", "x-deaths", "trace", "CC"])
VALUES = st.integers(-(2**31), 2**31 - 1) | st.text(max_size=5) | st.booleans()


@given(st.dictionaries(NAMES, VALUES | st.lists(VALUES, max_size=3), max_size=6), st.none() | st.just("text/plain"))
def test_what_tells_of_deaths_is_told_apart_from_all_else(headers: dict[str, FieldValue], kind: str | None) -> None:
    own = {name: value for name, value in headers.items() if name in ("x-deaths", "trace", "CC")}
    props = message(headers, content_type=kind)
    told, left = apart(props)
    assert left == message(own, content_type=kind)
    assert (told == b"") == (len(own) == len(headers))
    # Whatever stands beside them, the same deaths are told alike.
    assert apart(message({name: value for name, value in headers.items() if name not in own}))[0] == told


def sized(letters: st.SearchStrategy[str]) -> st.SearchStrategy[FieldValue]:
    """Values that often have one size."""
    return st.integers(0, 2**31 - 1) | st.text(letters, min_size=3, max_size=3) | st.booleans()


LETTERS = st.sampled_from("abc")


@given(
    st.lists(
        st.tuples(
            st.fixed_dictionaries(
                {}, optional={"trace": sized(LETTERS), "x-tries": sized(LETTERS), "CC": st.just(["a"])}
            ),
            st.sampled_from([(), (DEATH,), (at("work", Reason.EXPIRED, time_us=7_000_000), DEATH)]),
            st.none() | st.sampled_from(["text/plain", "text/xhtml"]),
            st.none() | st.text(LETTERS, min_size=2, max_size=2),
        ),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 12),
    st.randoms(use_true_random=False),
)
def test_many_are_taken_apart_as_each_would_be(
    made: list[tuple[dict[str, FieldValue], tuple[Death, ...], str | None, str | None]], times: int, random: Random
) -> None:
    props = [
        died(message(headers or None, content_type=kind, message_id=id), *deaths)
        for headers, deaths, kind, id in made
        for _ in range(times)
    ]
    random.shuffle(props)
    assert aparts(props) == [apart(one) for one in props]


def test_many_that_differ_in_an_id_of_their_own_keep_it_and_tell_the_same() -> None:
    plain = [message({"trace": number}, message_id=f"{number:05}") for number in range(1000)]
    found = aparts([died(one, DEATH) for one in plain])
    assert [left for _told, left in found] == plain
    assert len({id(told) for told, _left in found}) == 1


def test_without_headers_there_are_no_deaths_to_tell() -> None:
    assert apart(message(content_type="text/plain")) == (b"", message(content_type="text/plain"))
