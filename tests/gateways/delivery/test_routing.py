"""Routing: every kind of exchange by table, then topologies with circles and alternates against a naive reading."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from headrace.controller.entities import DestinationKind
from headrace.controller.errors import Invalid, NotFound
from headrace.controller.table import EMPTY, Table
from headrace.gateways.delivery.routing import Binding, Exchange, ExchangeKind, Route, Router

DIRECT, FANOUT, TOPIC, HEADERS, HASH = ExchangeKind


class House:
    """A router over queues that are their own names."""

    def __init__(self, **exchanges: ExchangeKind) -> None:
        self.queues: dict[str, str] = {}
        self.router: Router[str] = Router(self.queues.get, name_of=str)
        for name, kind in exchanges.items():
            self.router.put_exchange(name, kind)

    def declare(self, *queues: str) -> None:
        for queue in queues:
            self.queues[queue] = queue
            self.router.put_queue(queue)

    def delete(self, queue: str) -> tuple[str, ...]:
        del self.queues[queue]
        return self.router.remove_queue(queue)

    def goes_to(self, exchange: str, *keys: str, headers: Mapping[str, object] | None = None) -> list[str]:
        route = self.router.route(exchange, keys, headers)
        assert route.unroutable == (not route.queues)
        return list(route.queues)


def test_direct_exchange_matches_the_equal_key() -> None:
    house = House(x=DIRECT)
    for queue, key in [("q1", "error"), ("q2", "error"), ("q2", "info"), ("q3", ""), ("q4", "err.#")]:
        house.router.bind_queue("x", queue, key)
    assert house.goes_to("x", "error") == ["q1", "q2"]
    assert house.goes_to("x", "info") == ["q2"]
    assert house.goes_to("x", "") == ["q3"]
    assert house.goes_to("x", "err.or") == []
    assert house.goes_to("x", "Error") == []


def test_fanout_exchange_matches_whatever_the_key() -> None:
    house = House(x=FANOUT)
    for queue, key in [("q2", "a"), ("q1", "b"), ("q1", "c")]:
        house.router.bind_queue("x", queue, key)
    assert house.goes_to("x", "z") == ["q1", "q2"]


def test_topic_exchange_matches_patterns() -> None:
    house = House(x=TOPIC)
    for queue, key in [("q1", "*.orange.*"), ("q2", "*.*.rabbit"), ("q2", "lazy.#"), ("q3", "#")]:
        house.router.bind_queue("x", queue, key)
    assert house.goes_to("x", "quick.orange.rabbit") == ["q1", "q2", "q3"]
    assert house.goes_to("x", "lazy.orange.elephant") == ["q1", "q2", "q3"]
    assert house.goes_to("x", "lazy") == ["q2", "q3"]
    assert house.goes_to("x", "quick.brown.fox") == ["q3"]
    assert house.goes_to("x", "") == ["q3"]


@pytest.mark.parametrize(
    ("arguments", "headers", "matches"),
    [
        ({"x-match": "all", "format": "pdf", "type": "report"}, {"format": "pdf", "type": "report", "more": 1}, True),
        ({"x-match": "all", "format": "pdf", "type": "report"}, {"format": "pdf"}, False),
        ({"x-match": "all", "format": "pdf", "type": "report"}, {"format": "pdf", "type": "log"}, False),
        ({"format": "pdf"}, {"format": "pdf"}, True),
        ({"format": "pdf", "type": "log"}, {"format": "pdf"}, False),
        ({"x-match": "any", "format": "pdf", "type": "report"}, {"type": "report"}, True),
        ({"x-match": "any", "format": "pdf", "type": "report"}, {"type": "log"}, False),
        ({}, {}, True),
        ({"x-match": "all"}, {"a": 1}, True),
        ({"x-match": "any"}, {"a": 1}, False),
        ({"x-match": "all", "x-a": 1}, {}, True),
        ({"x-match": "any", "x-a": 1}, {"x-a": 1}, False),
        ({"x-match": "all-with-x", "x-a": 1}, {}, False),
        ({"x-match": "all-with-x", "x-a": 1}, {"x-a": 1}, True),
        ({"x-match": "any-with-x", "x-a": 1, "b": 1}, {"x-a": 1}, True),
        ({"x-match": "any-with-x", "x-a": 1}, {"x-a": 2}, False),
        ({"x-match": "all-with-x"}, {}, True),
        ({"h": None}, {"h": "anything"}, True),
        ({"h": None}, {"h": None}, True),
        ({"h": None}, {}, False),
        ({"h": 1}, {"h": None}, False),
        ({"h": 1}, {"h": 1.0}, False),
        ({"h": 1}, {"h": "1"}, False),
        ({"h": 1}, {"h": True}, False),
        ({"h": True}, {"h": True}, True),
        ({"h": 1.5}, {"h": 1.5}, True),
        ({"h": "å"}, {"h": "å"}, True),
        ({"h": "a"}, {"h": b"a"}, True),
        ({"h": b"\xff"}, {"h": bytearray(b"\xff")}, True),
        ({"h": datetime(2020, 1, 1, tzinfo=UTC)}, {"h": 1577836800}, True),
        ({"h": Decimal("1.50")}, {"h": Decimal("1.50")}, True),
        ({"h": Decimal("1.50")}, {"h": 1.5}, False),
        ({"h": {"a": [1, "b"]}}, {"h": {"a": [1, b"b"]}}, True),
        ({"h": {"a": [1, "b"]}}, {"h": {"a": ["b", 1]}}, False),
    ],
)
def test_headers_exchange_compares_as_rabbitmq_does(
    arguments: dict[str, object], headers: dict[str, object], matches: bool
) -> None:
    house = House(x=HEADERS)
    house.router.bind_queue("x", "q", "key is ignored", Table(arguments))  # type: ignore[arg-type]
    assert house.goes_to("x", "any key", headers=headers) == (["q"] if matches else [])


def test_headers_are_fetched_when_first_needed_and_once() -> None:
    calls = []

    def fetch() -> dict[str, object]:
        calls.append(1)
        return {"h": 1}

    house = House(plain=DIRECT, one=HEADERS, two=HEADERS)
    house.router.route("one", ["k"], fetch)
    assert not calls, "nothing is bound that could ask"
    house.router.bind_queue("plain", "q", "k")
    house.router.route("plain", ["k"], fetch)
    assert not calls
    house.router.bind_queue("two", "q2", "", Table({"h": 1}))
    house.router.bind_exchange("one", "two", "")
    assert house.router.route("one", ["k"], fetch).queues == ("q2",)
    assert len(calls) == 1


def test_message_without_headers_matches_what_asks_for_none() -> None:
    house = House(x=HEADERS)
    house.router.bind_queue("x", "any", "", Table({"x-match": "any", "a": 1}))
    house.router.bind_queue("x", "all", "")
    assert house.goes_to("x", "") == ["all"]
    assert house.router.route("x", [""], lambda: None).queues == ("all",)


def test_default_exchange_leads_to_the_queue_named_by_the_key() -> None:
    house = House()
    assert house.goes_to("", "q") == []
    house.declare("q", "r")
    assert house.goes_to("", "q") == ["q"]
    assert house.goes_to("", "r", "q", "r") == ["q", "r"]
    house.delete("q")
    assert house.goes_to("", "q") == []


def test_cc_and_bcc_keys_count_like_the_routing_key_and_each_queue_once() -> None:
    house = House(d=DIRECT, t=TOPIC)
    for exchange in ("d", "t"):
        for queue, key in [("q1", "a"), ("q2", "b"), ("q2", "c"), ("q3", "d")]:
            house.router.bind_queue(exchange, queue, key)
        assert house.goes_to(exchange, "a", "b", "c") == ["q1", "q2"]


def test_exchange_to_exchange_carries_the_key_and_ends_in_circles() -> None:
    house = House(a=TOPIC, b=FANOUT, c=DIRECT)
    house.router.bind_exchange("a", "b", "x.#")
    house.router.bind_exchange("b", "c", "")
    house.router.bind_exchange("c", "a", "x.y")
    house.router.bind_exchange("b", "b", "")
    house.router.bind_queue("c", "qc", "x.y")
    house.router.bind_queue("a", "qa", "#.y")
    assert house.goes_to("a", "x.y") == ["qa", "qc"]
    assert house.goes_to("b", "x.y") == ["qa", "qc"]
    assert house.goes_to("b", "x.z") == []
    assert house.goes_to("a", "y") == ["qa"]


def with_alternate(house: House, name: str, kind: ExchangeKind, alternate: str | None) -> None:
    house.router.put_exchange(name, kind, alternate=alternate)


def test_alternate_exchange_gets_what_no_binding_matched() -> None:
    house = House(ae=FANOUT)
    with_alternate(house, "x", DIRECT, "ae")
    house.router.bind_queue("x", "routed", "key1")
    house.router.bind_queue("ae", "unrouted", "")
    assert house.goes_to("x", "key1") == ["routed"]
    assert house.goes_to("x", "key2") == ["unrouted"]
    assert house.goes_to("x", "key2", "key1") == ["routed"]


def test_alternates_follow_one_another_and_may_form_a_circle() -> None:
    house = House()
    with_alternate(house, "x", DIRECT, "y")
    with_alternate(house, "y", DIRECT, "z")
    with_alternate(house, "z", DIRECT, "x")
    assert house.goes_to("x", "k") == []
    house.router.bind_queue("z", "q", "k")
    assert house.goes_to("x", "k") == ["q"]


def test_match_that_leads_to_an_exchange_counts_even_if_it_ends_nowhere() -> None:
    house = House(dead=DIRECT, ae=FANOUT)
    with_alternate(house, "x", FANOUT, "ae")
    house.router.bind_exchange("x", "dead", "")
    house.router.bind_queue("ae", "unrouted", "")
    assert house.goes_to("x", "k") == []


def test_alternate_of_a_downstream_exchange_is_used_for_what_comes_through_it() -> None:
    house = House(x=FANOUT, ae=FANOUT)
    with_alternate(house, "y", DIRECT, "ae")
    house.router.bind_exchange("x", "y", "")
    house.router.bind_queue("x", "q", "")
    house.router.bind_queue("ae", "unrouted", "")
    assert house.goes_to("x", "k") == ["q", "unrouted"]


def test_alternate_may_be_missing_come_later_and_be_changed_by_policy() -> None:
    house = House(other=FANOUT)
    with_alternate(house, "x", DIRECT, "later")
    house.router.bind_queue("other", "q2", "")
    assert house.goes_to("x", "k") == []
    house.router.put_exchange("later", FANOUT)
    house.router.bind_queue("later", "q1", "")
    assert house.goes_to("x", "k") == ["q1"]
    with_alternate(house, "x", DIRECT, "other")
    assert house.goes_to("x", "k") == ["q2"]
    with_alternate(house, "x", DIRECT, None)
    assert house.goes_to("x", "k") == []


def test_default_exchange_can_be_an_alternate() -> None:
    house = House()
    with_alternate(house, "x", DIRECT, "")
    assert house.goes_to("x", "q") == []
    house.declare("q")
    assert house.goes_to("x", "q") == ["q"]


def shares(house: House, keys: int = 20_000) -> Counter[str]:
    return Counter(house.goes_to("h", f"key{number}")[0] for number in range(keys))


def test_consistent_hash_shares_keys_by_weight() -> None:
    house = House(h=HASH)
    weights = {"q1": 1, "q2": 1, "q3": 2, "q4": 6}
    for queue, weight in weights.items():
        house.router.bind_queue("h", queue, str(weight))
    found = shares(house)
    for queue, weight in weights.items():
        assert found[queue] == pytest.approx(20_000 * weight / 10, rel=0.1)


def test_consistent_hash_moves_only_the_share_of_a_queue_that_comes_or_goes() -> None:
    house = House(h=HASH)
    for number in range(10):
        house.router.bind_queue("h", f"q{number}", "1")
    keys = [f"key{number}" for number in range(5_000)]
    before = {key: house.goes_to("h", key) for key in keys}
    house.router.unbind_queue("h", "q3", "1")
    without = {key: house.goes_to("h", key) for key in keys}
    assert {key for key in keys if before[key] != without[key]} == {key for key in keys if before[key] == ["q3"]}
    assert len({queue for key in keys if before[key] == ["q3"] for queue in without[key]}) == 9, "spread over all"
    house.router.bind_queue("h", "q3", "1")
    assert {key: house.goes_to("h", key) for key in keys} == before


def test_consistent_hash_does_not_depend_on_the_order_of_binding() -> None:
    bindings = [(f"q{number}", str(number % 3 + 1)) for number in range(7)]
    forth, back = House(h=HASH), House(h=HASH)
    for queue, weight in bindings:
        forth.router.bind_queue("h", queue, weight)
    for queue, weight in reversed(bindings):
        back.router.bind_queue("h", queue, weight)
    for number in range(2_000):
        assert forth.goes_to("h", str(number)) == back.goes_to("h", str(number))


def test_consistent_hash_gives_a_message_to_one_queue_by_its_routing_key_whatever_cc_says() -> None:
    house = House(h=HASH)
    for number in range(5):
        house.router.bind_queue("h", f"q{number}", "1")
    assert house.goes_to("h", "a", "b", "c", "d") == house.goes_to("h", "a")


@pytest.mark.parametrize("argument", ["hash-header", "hash-property"])
def test_consistent_hash_on_a_header_or_property_ignores_the_key(argument: str) -> None:
    house = House()
    house.router.put_exchange("h", HASH, arguments=Table({argument: "message_id"}))
    for number in range(8):
        house.router.bind_queue("h", f"q{number}", "1")

    def goes_to(key: str, fields: dict[str, object]) -> tuple[str, ...]:
        if argument == "hash-header":
            return house.router.route("h", [key], fields).queues
        return house.router.route("h", [key], None, fields).queues

    assert len({goes_to("k", {"message_id": str(number)}) for number in range(200)}) == 8
    assert len({goes_to(str(number), {"message_id": "same"}) for number in range(200)}) == 1
    assert len({goes_to(str(number), {}) for number in range(200)}) == 1, "all without it go to one queue"
    assert goes_to("k", {"message_id": 5}) == goes_to("k", {"message_id": "5"})
    assert goes_to("k", {"message_id": {"b": 1, "a": [2]}}) == goes_to("k", {"message_id": {"a": [2], "b": 1}})


def test_first_of_several_bindings_gives_a_hashed_queue_its_weight_and_then_the_next() -> None:
    house = House(h=HASH)
    house.router.bind_queue("h", "q1", "1")
    house.router.bind_queue("h", "q2", "1")
    house.router.bind_queue("h", "q2", "9")
    assert shares(house, 4_000)["q2"] == pytest.approx(2_000, rel=0.1)
    house.router.unbind_queue("h", "q2", "1")
    assert shares(house, 4_000)["q2"] == pytest.approx(3_600, rel=0.1)
    house.router.unbind_queue("h", "q2", "9")
    assert shares(house, 4_000)["q1"] == 4_000
    house.router.unbind_queue("h", "q1", "1")
    assert house.goes_to("h", "k") == []


@pytest.mark.parametrize("weight", ["", "0", "-1", "1.5", "ten", "1_0", " 1", "٣", "9" * 256])
def test_weight_that_is_no_whole_number_above_zero_is_refused(weight: str) -> None:
    house = House(h=HASH)
    with pytest.raises(Invalid, match="weight"):
        house.router.bind_queue("h", "q", weight)
    assert house.goes_to("h", "k") == []
    assert house.router.is_unused("h")


def test_weight_costs_no_memory_however_large() -> None:
    house = House(h=HASH)
    house.router.bind_queue("h", "q1", "9" * 255)
    house.router.bind_queue("h", "q2", "+1")
    assert house.goes_to("h", "k") == ["q1"]


@pytest.mark.parametrize(
    "arguments",
    [{"hash-header": "a", "hash-property": "message_id"}, {"hash-property": "app_id"}, {"hash-header": 1}],
    ids=str,
)
def test_senseless_hash_arguments_are_refused(arguments: dict[str, str | int]) -> None:
    house = House()
    with pytest.raises(Invalid, match="hash-"):
        house.router.put_exchange("h", HASH, arguments=Table(arguments))
    assert house.router.exchange("h") is None


@pytest.mark.parametrize("mode", ["some", "ALL", "", 1, True, None])
def test_x_match_of_no_known_mode_is_refused(mode: str | int | None) -> None:
    house = House(x=HEADERS)
    with pytest.raises(Invalid, match="x-match"):
        house.router.bind_queue("x", "q", "", Table({"x-match": mode}))
    assert house.router.is_unused("x")


def test_binding_is_identified_by_both_ends_key_and_arguments() -> None:
    house = House(x=DIRECT, y=DIRECT)
    bind, unbind = house.router.bind_queue, house.router.unbind_queue
    assert bind("x", "q", "k")
    assert not bind("x", "q", "k"), "the same again"
    assert bind("x", "q", "k", Table({"a": 1}))
    assert bind("x", "q", "k", Table({"a": 1.0}))
    assert bind("x", "q", "l")
    assert bind("y", "q", "k")
    assert len(house.router.bindings_to_queue("q")) == 5
    assert unbind("x", "q", "k")
    assert house.goes_to("x", "k") == ["q"], "two more bindings with that key are left"
    assert unbind("x", "q", "k", Table({"a": 1}))
    assert unbind("x", "q", "k", Table({"a": 1.0}))
    assert house.goes_to("x", "k") == []
    assert not unbind("x", "q", "k"), "gone already"
    assert not unbind("nowhere", "q", "k")
    assert not unbind("x", "nobody", "k")
    assert not house.router.unbind_exchange("x", "nowhere", "k")


@pytest.mark.parametrize("kind", [DIRECT, FANOUT, TOPIC])
def test_bindings_that_differ_in_arguments_alone_count_one_by_one(kind: ExchangeKind) -> None:
    house = House(x=kind)
    house.router.bind_queue("x", "q", "k", Table({"a": 1}))
    house.router.bind_queue("x", "q", "k", Table({"a": 2}))
    house.router.unbind_queue("x", "q", "k", Table({"a": 1}))
    assert house.goes_to("x", "k") == ["q"]
    house.router.unbind_queue("x", "q", "k", Table({"a": 2}))
    assert house.goes_to("x", "k") == []


def test_queue_and_exchange_of_one_name_are_two_destinations() -> None:
    house = House(a=FANOUT, b=FANOUT)
    house.router.bind_exchange("a", "b", "")
    house.router.bind_queue("a", "b", "")
    house.router.bind_queue("b", "q", "")
    assert house.goes_to("a", "") == ["b", "q"]
    house.router.unbind_queue("a", "b", "")
    assert house.goes_to("a", "") == ["q"]


def test_bindings_are_listed_from_both_ends() -> None:
    house = House(a=TOPIC, b=FANOUT)
    house.router.bind_queue("a", "q", "x.*", Table({"n": 1}))
    house.router.bind_exchange("a", "b", "#")
    to_queue: Binding[str] = Binding("a", DestinationKind.QUEUE, "q", "x.*", Table({"n": 1}))
    to_exchange: Binding[str] = Binding("a", DestinationKind.EXCHANGE, "b", "#", EMPTY)
    assert house.router.bindings_from("a") == (to_queue, to_exchange)
    assert house.router.bindings_to_queue("q") == (to_queue,)
    assert house.router.bindings_to_exchange("b") == (to_exchange,)
    assert house.router.bindings_from("b") == ()
    assert house.router.bindings_to_queue("unknown") == ()


def test_exchange_is_shown_with_its_settings() -> None:
    house = House()
    house.router.put_exchange("x", TOPIC, durable=False, auto_delete=True, internal=True, alternate="y")
    shown = Exchange("x", TOPIC, durable=False, auto_delete=True, internal=True, alternate="y")
    assert house.router.exchange("x") == shown
    assert house.router.exchanges() == (shown,)
    assert house.router.exchange("z") is None


def test_removing_a_queue_names_the_auto_delete_exchanges_it_leaves_unused() -> None:
    house = House(kept=DIRECT)
    house.declare("q", "other")
    for name in ("gone", "busy"):
        house.router.put_exchange(name, DIRECT, auto_delete=True)
    for exchange in ("kept", "gone", "busy"):
        house.router.bind_queue(exchange, "q", "k1")
        house.router.bind_queue(exchange, "q", "k2")
    house.router.bind_queue("busy", "other", "k1")
    assert house.delete("q") == ("gone",)
    assert house.router.is_unused("kept")
    assert house.goes_to("busy", "k1") == ["other"]
    assert house.goes_to("busy", "k2") == []


def test_removing_an_exchange_drops_its_bindings_on_both_sides() -> None:
    house = House(b=FANOUT, c=FANOUT)
    house.router.put_exchange("a", FANOUT, auto_delete=True)
    house.router.bind_exchange("a", "b", "")
    house.router.bind_exchange("b", "b", "")
    house.router.bind_exchange("b", "c", "")
    house.router.bind_queue("b", "q", "")
    assert house.goes_to("a", "") == ["q"]
    assert house.router.remove_exchange("b") == ("a",)
    assert house.goes_to("a", "") == []
    assert house.router.bindings_to_queue("q") == ()
    assert house.router.bindings_to_exchange("c") == ()
    house.router.put_exchange("b", FANOUT)
    assert house.goes_to("b", "") == [], "a new exchange of the old name has no bindings"


def test_unknown_exchange_is_not_found() -> None:
    house = House(x=DIRECT)
    router = house.router
    for call in (
        lambda: router.route("no", ["k"]),
        lambda: router.bind_queue("no", "q", "k"),
        lambda: router.bind_exchange("no", "x", "k"),
        lambda: router.bind_exchange("x", "no", "k"),
        lambda: router.remove_exchange("no"),
        lambda: router.bindings_from("no"),
        lambda: router.bindings_to_exchange("no"),
        lambda: router.is_unused("no"),
        lambda: router.exchange_version("no"),
    ):
        with pytest.raises(NotFound, match="'no'"):
            call()


def test_default_exchange_is_neither_declared_nor_deleted_nor_bound() -> None:
    house = House(x=DIRECT)
    router = house.router
    for call in (
        lambda: router.put_exchange("", DIRECT),
        lambda: router.remove_exchange(""),
        lambda: router.bind_queue("", "q", "k"),
        lambda: router.bind_exchange("", "x", "k"),
        lambda: router.bind_exchange("x", "", "k"),
    ):
        with pytest.raises(Invalid, match="default exchange"):
            call()


def test_exchange_never_changes_its_kind() -> None:
    house = House(x=DIRECT)
    with pytest.raises(Invalid, match="another type"):
        house.router.put_exchange("x", FANOUT)


def test_routes_with_the_same_queues_are_the_same_object_until_a_change() -> None:
    house = House(x=DIRECT)
    for queue, key in [("q1", "a"), ("q1", "b"), ("q2", "c")]:
        house.router.bind_queue("x", queue, key)
    first = house.router.route("x", ["a"])
    assert house.router.route("x", ["a"]) is first
    assert house.router.route("x", ["b"]) is first
    assert house.router.route("x", ["a", "b"]) is first
    assert house.router.route("x", ["c"]) is not first


def test_a_change_makes_stale_the_routes_that_can_reach_it_and_no_others() -> None:
    house = House(far=FANOUT, near=FANOUT, changed=DIRECT, below=FANOUT, beside=FANOUT)
    with_alternate(house, "by_alternate", DIRECT, "near")
    house.router.bind_exchange("far", "near", "")
    house.router.bind_exchange("near", "changed", "")
    house.router.bind_exchange("changed", "below", "x")
    names = ("far", "near", "changed", "below", "beside", "by_alternate", "")
    routes = {name: house.router.route(name, ["k"]) for name in names}
    assert all(house.router.is_current(route) for route in routes.values())
    assert house.router.bind_queue("changed", "q", "k")
    stale = {name for name, route in routes.items() if not house.router.is_current(route)}
    assert stale == {"far", "near", "changed", "by_alternate"}
    for name in stale:
        assert house.goes_to(name, "k") == ["q"]
    routes = {name: house.router.route(name, ["k"]) for name in names}
    assert not house.router.bind_queue("changed", "q", "k")
    assert all(house.router.is_current(route) for route in routes.values()), "a binding that was there changes nothing"


def test_a_former_alternate_makes_nothing_stale() -> None:
    house = House(ae=FANOUT)
    for name in ("changed_by_policy", "declared_anew"):
        with_alternate(house, name, DIRECT, "ae")
    with_alternate(house, "changed_by_policy", DIRECT, None)
    house.router.remove_exchange("declared_anew")
    with_alternate(house, "declared_anew", DIRECT, None)
    routes = [house.router.route(name, ["k"]) for name in ("changed_by_policy", "declared_anew")]
    house.router.bind_queue("ae", "q", "")
    assert all(house.router.is_current(route) for route in routes)


def test_route_of_a_removed_exchange_stays_stale_when_the_name_comes_back() -> None:
    house = House(x=DIRECT)
    route = house.router.route("x", ["k"])
    house.router.remove_exchange("x")
    assert not house.router.is_current(route)
    house.router.put_exchange("x", DIRECT)
    assert not house.router.is_current(route)


def test_routes_that_read_the_message_say_so_and_are_not_kept_by_key() -> None:
    house = House(x=FANOUT, h=HEADERS)
    house.router.bind_exchange("x", "h", "")
    house.router.bind_queue("h", "q", "", Table({"a": 1}))
    assert house.router.route("x", ["k"], {"a": 1}).reads_message
    assert house.goes_to("x", "k", headers={"a": 1}) == ["q"]
    assert house.goes_to("x", "k", headers={"a": 2}) == []


def test_known_key_is_answered_without_asking_again() -> None:
    asked = []

    def queue_named(name: str) -> str:
        asked.append(name)
        return name

    router: Router[str] = Router(queue_named, name_of=str, cached_keys_max=2)
    for key in ("a", "a", "b", "b", "a"):
        assert router.route("", [key]).queues == (key,)
    assert asked == ["a", "b"]
    for key in ("c", "a", "c"):
        assert router.route("", [key]).queues == (key,)
    assert asked == ["a", "b", "c", "a"], "no more than two keys are kept"


def test_order_of_queues_depends_on_their_names_alone() -> None:
    queues = ["q10", "q2", "b", "ä", "a", "Z"]
    for order in (queues, queues[::-1], sorted(queues)):
        house = House(x=FANOUT, y=FANOUT)
        house.router.bind_exchange("x", "y", "")
        for number, queue in enumerate(order):
            house.router.bind_queue("xy"[number % 2], queue, "")
        assert house.goes_to("x", "") == sorted(queues)


# The naive reading: all bindings looked at every time, no cache, nothing arranged.


def topic_matches(pattern: list[str], words: list[str]) -> bool:
    if not pattern:
        return not words
    if pattern[0] == "#":
        return topic_matches(pattern[1:], words) or (bool(words) and topic_matches(pattern, words[1:]))
    return bool(words) and pattern[0] in ("*", words[0]) and topic_matches(pattern[1:], words[1:])


def headers_match(arguments: Table, headers: Mapping[str, object]) -> bool:
    mode = str(arguments.get("x-match", "all"))
    results = []
    for name, wanted in arguments.items():
        if name == "x-match" or (name.startswith("x-") and not mode.endswith("-with-x")):
            continue
        found = headers.get(name)
        results.append(name in headers and (wanted is None or (type(found) is type(wanted) and found == wanted)))
    return all(results) if mode.startswith("all") else any(results)


def splitmix64(number: int) -> int:
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    number = (number ^ number >> 27) * 0x94D049BB133111EB % 2**64
    return number ^ number >> 31


def hashed_to(weights: Mapping[tuple[DestinationKind, str], int], value: str) -> tuple[DestinationKind, str]:
    slot = xxh3_64_intdigest(value.encode()) // 2**48

    def draw(member: tuple[DestinationKind, str]) -> float:
        kind, name = member
        mixed = splitmix64((slot * 0x9E3779B97F4A7C15 + xxh3_64_intdigest(f"{kind.value}:{name}".encode())) % 2**64)
        return -math.log((mixed // 2**11 + 0.5) / 2**53) / weights[member]

    return min(weights, key=draw)


@dataclass
class Naive:
    queues: set[str] = field(default_factory=set)
    exchanges: dict[str, tuple[ExchangeKind, str | None]] = field(default_factory=dict)
    bindings: list[Binding[str]] = field(default_factory=list)

    def destinations(
        self, name: str, keys: list[str], headers: Mapping[str, object]
    ) -> set[tuple[DestinationKind, str]]:
        if name == "":
            return {(DestinationKind.QUEUE, key) for key in keys if key in self.queues}
        kind, _ = self.exchanges[name]
        weights: dict[tuple[DestinationKind, str], int] = {}
        found = set()
        for binding in self.bindings:
            if binding.source == name:
                match kind:
                    case ExchangeKind.DIRECT:
                        matches = binding.key in keys
                    case ExchangeKind.FANOUT:
                        matches = True
                    case ExchangeKind.TOPIC:
                        pattern = binding.key.split(".") if binding.key else []
                        matches = any(topic_matches(pattern, key.split(".") if key else []) for key in keys)
                    case ExchangeKind.HEADERS:
                        matches = headers_match(binding.arguments, headers)
                    case ExchangeKind.CONSISTENT_HASH:
                        matches = False
                        weights.setdefault((binding.destination_kind, binding.destination), int(binding.key))
                if matches:
                    found.add((binding.destination_kind, binding.destination))
        return {hashed_to(weights, keys[0])} if weights else found

    def route(self, name: str, keys: list[str], headers: Mapping[str, object]) -> tuple[str, ...]:
        queues: set[str] = set()
        seen: set[str] = set()
        waiting = [name]
        while waiting:
            name = waiting.pop()
            if name in seen or (name and name not in self.exchanges):
                continue
            seen.add(name)
            found = self.destinations(name, keys, headers)
            queues.update(each for kind, each in found if kind is DestinationKind.QUEUE)
            waiting.extend(each for kind, each in found if kind is DestinationKind.EXCHANGE)
            if not found and name and (alternate := self.exchanges[name][1]) is not None:
                waiting.append(alternate)
        return tuple(sorted(queues))


EXCHANGES = ["e0", "e1", "e2", "e3", "e4"]
QUEUES = ["a", "q1", "q2", "q3"]
PATTERNS = ["a", "b", "a.b", "a.*", "#", "a.#", "#.b", "*", ""]
KEYS = ["a", "b", "a.b", "a.b.b", "", "q1"]
ARGUMENTS = [
    EMPTY,
    Table({"h": 1}),
    Table({"x-match": "any", "h": 1, "g": "x"}),
    Table({"x-match": "all", "h": None, "x-y": 1}),
    Table({"x-match": "any-with-x", "x-y": 1}),
]
HEADERS_SENT: list[dict[str, object]] = [{}, {"h": 1}, {"h": True, "g": "x"}, {"x-y": 1}]


class Both:
    """A router and the naive reading of it, told the same."""

    def __init__(self) -> None:
        self.naive = Naive()
        self.router: Router[str] = Router(lambda name: name if name in self.naive.queues else None, name_of=str)

    def put_exchange(self, name: str, kind: ExchangeKind, alternate: str | None) -> None:
        if name in self.naive.exchanges:
            kind, _ = self.naive.exchanges[name]
        self.naive.exchanges[name] = (kind, alternate)
        self.router.put_exchange(name, kind, alternate=alternate)

    def remove_exchange(self, name: str) -> None:
        if name in self.naive.exchanges:
            del self.naive.exchanges[name]
            ends = (name, (DestinationKind.EXCHANGE, name))
            self.naive.bindings = [
                binding
                for binding in self.naive.bindings
                if binding.source != ends[0] and (binding.destination_kind, binding.destination) != ends[1]
            ]
            self.router.remove_exchange(name)

    def put_queue(self, queue: str) -> None:
        self.naive.queues.add(queue)
        self.router.put_queue(queue)

    def remove_queue(self, queue: str) -> None:
        if queue in self.naive.queues:
            self.naive.queues.remove(queue)
            gone = (DestinationKind.QUEUE, queue)
            self.naive.bindings = [
                binding for binding in self.naive.bindings if (binding.destination_kind, binding.destination) != gone
            ]
            self.router.remove_queue(queue)

    def binding(
        self, source: str, destination: str, pattern: str, weight: int, arguments: Table
    ) -> Binding[str] | None:
        to_queue = destination in QUEUES
        known = self.naive.queues if to_queue else self.naive.exchanges
        if source not in self.naive.exchanges or destination not in known:
            return None
        key = str(weight) if self.naive.exchanges[source][0] is HASH else pattern
        kind = DestinationKind.QUEUE if to_queue else DestinationKind.EXCHANGE
        return Binding(source, kind, destination, key, arguments)

    def bind(self, binding: Binding[str]) -> None:
        ends = (binding.source, binding.destination, binding.key, binding.arguments)
        call = self.router.bind_queue if binding.destination_kind == "queue" else self.router.bind_exchange
        assert call(*ends) == (binding not in self.naive.bindings)
        if binding not in self.naive.bindings:
            self.naive.bindings.append(binding)

    def unbind(self, binding: Binding[str]) -> None:
        ends = (binding.source, binding.destination, binding.key, binding.arguments)
        call = self.router.unbind_queue if binding.destination_kind == "queue" else self.router.unbind_exchange
        assert call(*ends) == (binding in self.naive.bindings)
        if binding in self.naive.bindings:
            self.naive.bindings.remove(binding)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_topology_routes_as_a_naive_reading_of_its_bindings(data: st.DataObject) -> None:
    both = Both()
    for name in EXCHANGES:
        kind = data.draw(st.sampled_from(list(ExchangeKind)))
        both.put_exchange(name, kind, data.draw(st.sampled_from([None, None, *EXCHANGES, ""])))
    for queue in QUEUES[:3]:
        both.put_queue(queue)
    kept: dict[tuple[str, str], Route[str]] = {}
    for _ in range(data.draw(st.integers(1, 25))):
        verb = data.draw(
            st.sampled_from(["bind"] * 8 + ["unbind"] * 3 + ["exchange", "no exchange", "queue", "no queue"])
        )
        name = data.draw(st.sampled_from(EXCHANGES))
        match verb:
            case "bind" | "unbind":
                if verb == "unbind" and both.naive.bindings:
                    both.unbind(data.draw(st.sampled_from(both.naive.bindings)))
                else:
                    binding = both.binding(
                        name,
                        data.draw(st.sampled_from(QUEUES + EXCHANGES)),
                        data.draw(st.sampled_from(PATTERNS)),
                        data.draw(st.integers(1, 3)),
                        data.draw(st.sampled_from(ARGUMENTS)),
                    )
                    if binding is not None:
                        (both.bind if verb == "bind" else both.unbind)(binding)
            case "exchange":
                kind = data.draw(st.sampled_from(list(ExchangeKind)))
                both.put_exchange(name, kind, data.draw(st.sampled_from([None, *EXCHANGES, ""])))
            case "no exchange":
                both.remove_exchange(name)
            case "queue":
                both.put_queue(data.draw(st.sampled_from(QUEUES)))
            case _:
                both.remove_queue(data.draw(st.sampled_from(QUEUES)))
        headers = data.draw(st.sampled_from(HEADERS_SENT))
        keys = data.draw(st.lists(st.sampled_from(KEYS), min_size=1, max_size=3))
        for name in ("", *both.naive.exchanges):
            for sent in (keys, keys[:1]):
                route = both.router.route(name, sent, headers)
                assert route.queues == both.naive.route(name, sent, headers)
                assert route.unroutable == (not route.queues)
                assert both.router.is_current(route)
                if len(sent) == 1 and not route.reads_message:
                    assert both.router.route(name, sent) is route
                    kept[name, sent[0]] = route
        for (name, key), route in kept.items():
            if both.router.is_current(route):
                assert route.queues == both.naive.route(name, [key], headers)


# -- bindings with filters ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [DIRECT, FANOUT, TOPIC, HEADERS])
def test_binding_with_a_filter_leads_on_only_for_tags_that_it_wants(kind: ExchangeKind) -> None:
    house = House(x=kind)
    house.router.bind_queue("x", "all", "k")
    house.router.bind_queue("x", "eu", "k", Table({"x-filter": "region = eu"}))
    house.router.bind_queue("x", "both", "k", Table({"x-filter": "region = eu"}))
    house.router.bind_queue("x", "both", "k", Table({"x-filter": "vip"}))

    def goes_to(*tags: str) -> list[str]:
        return list(house.router.route("x", ["k"], {}, tags=tags).queues)

    for _again in range(2):
        assert goes_to() == ["all"]
        assert goes_to("region=eu") == ["all", "both", "eu"]
        assert goes_to("vip") == ["all", "both"]
    assert house.router.unbind_queue("x", "both", "k", Table({"x-filter": "vip"}))
    assert goes_to("vip") == ["all"]
    assert goes_to("region=eu") == ["all", "both", "eu"]


def test_filter_that_wants_nothing_counts_as_no_match_for_the_alternate_and_may_lead_to_exchanges() -> None:
    house = House(x=FANOUT, y=FANOUT, other=FANOUT)
    house.router.put_exchange("x", FANOUT, alternate="other")
    house.router.bind_exchange("x", "y", "", Table({"x-filter": "!test"}))
    house.router.bind_queue("y", "wanted", "")
    house.router.bind_queue("other", "rest", "")
    assert house.router.route("x", ["k"]).queues == ("wanted",)
    assert house.router.route("x", ["k"], tags=("test",)).queues == ("rest",)


def test_filter_on_a_headers_binding_is_not_one_of_the_headers() -> None:
    house = House(x=HEADERS)
    arguments = Table({"x-match": "all-with-x", "x-filter": "vip", "x-kind": "a"})
    house.router.bind_queue("x", "q", "", arguments)
    assert house.router.route("x", [""], {"x-kind": "a"}, tags=("vip",)).queues == ("q",)
    assert house.router.route("x", [""], {"x-kind": "b"}, tags=("vip",)).queues == ()


@pytest.mark.parametrize(
    ("kind", "value", "reason"),
    [(FANOUT, "eu &&", "column 6"), (FANOUT, 7, "is text"), (HASH, "eu", "x-consistent-hash")],
)
def test_filter_that_cannot_be_is_refused_and_nothing_is_bound(
    kind: ExchangeKind, value: str | int, reason: str
) -> None:
    house = House(x=kind)
    with pytest.raises(Invalid, match=reason):
        house.router.bind_queue("x", "q", "1", Table({"x-filter": value}))
    assert house.router.is_unused("x")


@given(
    st.lists(
        st.tuples(
            st.booleans(),
            st.sampled_from(["q1", "q2", "q3"]),
            st.sampled_from(["a", "a.*", "#"]),
            st.sampled_from([None, "eu", "!eu", "eu && vip", "vip || us"]),
            st.sampled_from(["a", "a.b"]),
            st.sets(st.sampled_from(["eu", "us", "vip"])).map(lambda tags: tuple(sorted(tags))),
        ),
        max_size=40,
    )
)
def test_cached_route_is_the_one_that_a_new_router_finds(
    steps: list[tuple[bool, str, str, str | None, str, tuple[str, ...]]],
) -> None:
    house = House(x=TOPIC)
    bound: dict[tuple[str, str, Table], None] = {}
    for binds, queue, pattern, wanted, key, tags in steps:
        arguments = EMPTY if wanted is None else Table({"x-filter": wanted})
        if binds:
            house.router.bind_queue("x", queue, pattern, arguments)
            bound[queue, pattern, arguments] = None
        else:
            house.router.unbind_queue("x", queue, pattern, arguments)
            bound.pop((queue, pattern, arguments), None)
        fresh = House(x=TOPIC)
        for one in bound:
            fresh.router.bind_queue("x", *one)
        for _again in range(2):
            assert house.router.route("x", [key], tags=tags).queues == fresh.router.route("x", [key], tags=tags).queues
