"""Each kind of exchange leads messages where RabbitMQ's would. Driven by pika."""

from typing import Any

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import UnroutableError

from .conftest import Connect, unlike_rabbitmq
from .pika_client import bodies, get, get_all, refused


def queues(channel: BlockingChannel, name: str, *tails: str) -> list[str]:
    made = [f"{name}.{tail}" for tail in tails]
    for queue in made:
        channel.queue_declare(queue)
    return made


def send(
    channel: BlockingChannel, exchange: str, key: str, body: bytes, headers: dict[str, Any] | None = None, **more: Any
) -> None:
    channel.basic_publish(exchange, key, body, pika.BasicProperties(headers=headers, **more))


def test_default_exchange_leads_to_the_queue_of_that_name(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name)
    send(channel, "", name, b"x")
    found = get(channel, name)
    assert found is not None
    assert (found.body, found.exchange, found.routing_key) == (b"x", "", name)


def test_direct_exchange_compares_the_whole_key(channel: BlockingChannel, name: str) -> None:
    one, two = queues(channel, name, "one", "two")
    channel.exchange_declare(name, "direct")
    channel.queue_bind(one, name, routing_key="a")
    channel.queue_bind(one, name, routing_key="b")
    channel.queue_bind(two, name, routing_key="b")
    for key in ("a", "b", "a.b", "", "*"):
        send(channel, name, key, key.encode())
    assert bodies(channel, one) == [b"a", b"b"]
    assert bodies(channel, two) == [b"b"]


def test_fanout_exchange_looks_at_no_key(channel: BlockingChannel, name: str) -> None:
    made = queues(channel, name, "1", "2", "3")
    channel.exchange_declare(name, "fanout")
    for queue in made:
        channel.queue_bind(queue, name, routing_key=queue)
    send(channel, name, "whatever", b"x")
    assert [bodies(channel, queue) for queue in made] == [[b"x"]] * 3


@pytest.mark.parametrize(
    ("pattern", "keys"),
    [
        ("stock.usd.nyse", {"stock.usd.nyse"}),
        ("stock.*.nyse", {"stock.usd.nyse"}),
        ("stock.#", {"stock", "stock.usd", "stock.usd.nyse"}),
        ("#.nyse", {"stock.usd.nyse", "nyse"}),
        ("#", {"stock", "stock.usd", "stock.usd.nyse", "nyse", "", "a..b"}),
        ("*", {"stock", "nyse"}),
        ("*.*", {"stock.usd"}),
        ("a.*.b", {"a..b"}),
        ("#.#", {"stock", "stock.usd", "stock.usd.nyse", "nyse", "", "a..b"}),
        ("", {""}),
    ],
)
def test_topic_exchange_matches_words(channel: BlockingChannel, name: str, pattern: str, keys: set[str]) -> None:
    channel.exchange_declare(name, "topic")
    channel.queue_declare(name)
    channel.queue_bind(name, name, routing_key=pattern)
    for key in ("stock", "stock.usd", "stock.usd.nyse", "nyse", "", "a..b"):
        send(channel, name, key, key.encode())
    assert {body.decode() for body in bodies(channel, name)} == keys


def test_message_comes_once_however_many_bindings_match(channel: BlockingChannel, name: str) -> None:
    channel.exchange_declare(name, "topic")
    channel.queue_declare(name)
    for pattern in ("#", "a.*", "*.b", "a.b"):
        channel.queue_bind(name, name, routing_key=pattern)
    send(channel, name, "a.b", b"x")
    assert bodies(channel, name) == [b"x"]


@pytest.mark.parametrize(
    ("arguments", "matching"),
    [
        ({"x-match": "all", "a": 1, "b": "two"}, {"both"}),
        ({"a": 1, "b": "two"}, {"both"}),
        ({"x-match": "any", "a": 1, "b": "two"}, {"both", "one", "other value"}),
        ({"x-match": "all", "a": 1, "x-c": 3}, {"both", "one"}),
        ({"x-match": "all", "a": None}, {"both", "one", "other value"}),
        ({"x-match": "all"}, {"both", "one", "other value", "none", "x only"}),
        ({"x-match": "any"}, set()),
        ({"x-match": "all", "a": "1"}, set()),
        ({"x-match": "all", "a": True}, set()),
    ],
    # A set is spelled in no fixed order; a dict is.
    ids=lambda given: str(given) if isinstance(given, dict) else str(len(given)),
)
def test_headers_exchange_compares_headers(
    channel: BlockingChannel, name: str, arguments: dict[str, Any], matching: set[str]
) -> None:
    channel.exchange_declare(name, "headers")
    channel.queue_declare(name)
    channel.queue_bind(name, name, routing_key="no part in it", arguments=arguments)
    for body, headers in (
        ("both", {"a": 1, "b": "two", "more": 0}),
        ("one", {"a": 1, "b": "three"}),
        ("other value", {"a": 7, "b": "two"}),
        ("none", None),
        ("x only", {"x-c": 3}),
    ):
        send(channel, name, "", body.encode(), headers)
    assert {body.decode() for body in bodies(channel, name)} == matching


@pytest.mark.parametrize(
    ("arguments", "matching"),
    [
        ({"x-match": "all-with-x", "a": 1, "x-c": 3}, {"both"}),
        ({"x-match": "any-with-x", "a": 1, "x-c": 3}, {"both", "a only", "x only"}),
        ({"x-match": "any", "a": 1, "x-c": 3}, {"both", "a only"}),
    ],
    # A set is spelled in no fixed order; a dict is.
    ids=lambda given: str(given) if isinstance(given, dict) else str(len(given)),
)
def test_headers_exchange_counts_x_headers_only_when_asked(
    channel: BlockingChannel, name: str, arguments: dict[str, Any], matching: set[str]
) -> None:
    channel.exchange_declare(name, "headers")
    channel.queue_declare(name)
    channel.queue_bind(name, name, arguments=arguments)
    for body, headers in (("both", {"a": 1, "x-c": 3}), ("a only", {"a": 1}), ("x only", {"x-c": 3})):
        send(channel, name, "", body.encode(), headers)
    assert {body.decode() for body in bodies(channel, name)} == matching


def test_x_match_that_does_not_exist_is_406(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name)
    with refused(406, "x-match"):
        channel.queue_bind(name, "amq.headers", arguments={"x-match": "some"})


def test_consistent_hash_gives_a_key_to_one_queue_and_all_queues_a_share(channel: BlockingChannel, name: str) -> None:
    made = queues(channel, name, *"1234")
    channel.exchange_declare(name, "x-consistent-hash")
    for queue in made:
        channel.queue_bind(queue, name, routing_key="10")
    for _again in range(2):
        for key in range(400):
            send(channel, name, f"key {key}", b"%d" % key)
    shares = [bodies(channel, queue) for queue in made]
    assert sum(map(len, shares)) == 800
    assert all(len(share) > 40 for share in shares), list(map(len, shares))
    assert all(share[: len(share) // 2] == share[len(share) // 2 :] for share in shares)


def test_consistent_hash_by_header_and_by_property(connect: Connect, name: str) -> None:
    channel = connect().channel()
    for how, arguments in (
        ("header", {"hash-header": "customer"}),
        ("property", {"hash-property": "message_id"}),
    ):
        exchange = f"{name}.{how}"
        channel.exchange_declare(exchange, "x-consistent-hash", arguments=arguments)
        made = queues(channel, exchange, *"12")
        for queue in made:
            channel.queue_bind(queue, exchange, routing_key="1")
        for number in range(60):
            who = f"c{number % 30}"
            send(channel, exchange, f"key {number}", who.encode(), {"customer": who}, message_id=who)
        shares = [bodies(channel, queue) for queue in made]
        assert all(shares)
        assert not set(shares[0]) & set(shares[1])
    with refused(406):
        channel.exchange_declare(
            f"{name}.both",
            "x-consistent-hash",
            arguments={"hash-header": "a", "hash-property": "message_id"},
        )


def test_weight_of_a_consistent_hash_binding_is_a_number(connect: Connect, name: str) -> None:
    channel = connect().channel()
    channel.exchange_declare(name, "x-consistent-hash")
    channel.queue_declare(name)
    with refused(406):
        channel.queue_bind(name, name, routing_key="heavy")


# -- exchanges behind exchanges -----------------------------------------------------------------------------------


def test_exchange_to_exchange_follows_the_bindings_of_both(channel: BlockingChannel, name: str) -> None:
    channel.exchange_declare(f"{name}.in", "topic")
    channel.exchange_declare(f"{name}.out", "direct")
    channel.exchange_bind(f"{name}.out", f"{name}.in", routing_key="a.#")
    channel.queue_declare(name)
    channel.queue_bind(name, f"{name}.out", routing_key="a.b")
    for key in ("a.b", "a.c", "b.b"):
        send(channel, f"{name}.in", key, key.encode())
    found = get_all(channel, name)
    assert [(one.body, one.exchange, one.routing_key) for one in found] == [(b"a.b", f"{name}.in", "a.b")]
    channel.exchange_unbind(f"{name}.out", f"{name}.in", routing_key="a.#")
    send(channel, f"{name}.in", "a.b", b"not this")
    assert bodies(channel, name) == []


def test_exchanges_in_a_circle_end_and_deliver_once(channel: BlockingChannel, name: str) -> None:
    made = [f"{name}.{letter}" for letter in "abc"]
    for exchange in made:
        channel.exchange_declare(exchange, "fanout")
    for here, there in zip(made, made[1:] + made[:1], strict=True):
        channel.exchange_bind(there, here)
    channel.queue_declare(name)
    for exchange in made:
        channel.queue_bind(name, exchange)
    send(channel, made[0], "", b"x")
    assert bodies(channel, name) == [b"x"]


def test_alternate_exchange_gets_what_nobody_wanted(channel: BlockingChannel, name: str) -> None:
    wanted, unwanted = queues(channel, name, "wanted", "unwanted")
    channel.exchange_declare(f"{name}.rest", "fanout")
    channel.exchange_declare(name, "direct", arguments={"alternate-exchange": f"{name}.rest"})
    channel.queue_bind(wanted, name, routing_key="a")
    channel.queue_bind(unwanted, f"{name}.rest")
    channel.confirm_delivery()
    channel.basic_publish(name, "a", b"a", mandatory=True)
    channel.basic_publish(name, "b", b"b", mandatory=True)
    assert bodies(channel, wanted) == [b"a"]
    found = get_all(channel, unwanted)
    assert [(one.body, one.exchange, one.routing_key) for one in found] == [(b"b", name, "b")]


def test_alternate_exchange_that_is_not_there_is_as_none(channel: BlockingChannel, name: str) -> None:
    channel.exchange_declare(name, "direct", arguments={"alternate-exchange": f"{name}.absent"})
    channel.confirm_delivery()
    channel.basic_publish(name, "a", b"dropped")
    with pytest.raises(UnroutableError):
        channel.basic_publish(name, "a", b"returned", mandatory=True)


# -- CC and BCC ---------------------------------------------------------------------------------------------------


def test_cc_and_bcc_are_further_keys_and_bcc_is_not_shown(channel: BlockingChannel, name: str) -> None:
    to, cc, bcc = queues(channel, name, "to", "cc", "bcc")
    send(channel, "", to, b"x", {"CC": [cc], "BCC": [bcc, to], "own": 1})
    for queue in (to, cc, bcc):
        (found,) = get_all(channel, queue)
        assert found.headers == {"CC": [cc], "own": 1}
        assert found.routing_key == to


def test_cc_works_on_topic_exchanges_and_for_mandatory(channel: BlockingChannel, name: str) -> None:
    channel.exchange_declare(name, "topic")
    channel.queue_declare(name)
    channel.queue_bind(name, name, routing_key="a.*")
    channel.confirm_delivery()
    properties = pika.BasicProperties(headers={"CC": ["a.b", "a.c"]})
    channel.basic_publish(name, "nowhere", b"x", properties, mandatory=True)
    assert bodies(channel, name) == [b"x"]


@pytest.mark.parametrize("headers", [{"CC": "a"}, {"BCC": 5}], ids=str)
def test_cc_that_is_no_list_is_406(channel: BlockingChannel, name: str, headers: dict[str, Any]) -> None:
    with refused(406, "CC"):
        send(channel, "", name, b"x", headers)
        channel.basic_qos(prefetch_count=1)


def test_what_is_no_text_in_a_list_of_keys_is_passed_over(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name)
    send(channel, "", f"{name}.absent", b"x", {"CC": [1, name, None]})
    assert bodies(channel, name) == [b"x"]


# -- mandatory ----------------------------------------------------------------------------------------------------


def test_mandatory_and_unroutable_comes_back_whole_before_its_confirm(channel: BlockingChannel, name: str) -> None:
    channel.exchange_declare(name, "direct")
    channel.confirm_delivery()
    properties = pika.BasicProperties(content_type="text/plain", message_id="m", headers={"a": 1})
    body = b"x" * 300_000
    with pytest.raises(UnroutableError) as caught:
        channel.basic_publish(name, "nowhere", body, properties, mandatory=True)
    (returned,) = caught.value.messages
    method = returned.method
    assert (method.reply_code, method.reply_text, method.exchange, method.routing_key) == (
        312,
        "NO_ROUTE",
        name,
        "nowhere",
    )
    assert returned.body == body
    assert (returned.properties.message_id, returned.properties.headers) == ("m", {"a": 1})


def test_mandatory_without_confirms_comes_back_too(connect: Connect, name: str) -> None:
    connection = connect()
    channel = connection.channel()
    returned: list[bytes] = []
    channel.add_on_return_callback(lambda _channel, _method, _properties, body: returned.append(body))
    for number in range(3):
        channel.basic_publish("", f"{name}.absent", b"%d" % number, mandatory=True)
    channel.basic_publish("", f"{name}.absent", b"dropped")
    channel.basic_qos(prefetch_count=1)
    connection.process_data_events(0)
    assert returned == [b"0", b"1", b"2"]


def test_unroutable_without_mandatory_is_acked_and_dropped(channel: BlockingChannel, name: str) -> None:
    channel.confirm_delivery()
    channel.basic_publish("", f"{name}.absent", b"x")
    channel.basic_publish("amq.direct", f"{name}.absent", b"x")


# -- what is in a message stays -----------------------------------------------------------------------------------


def test_message_keeps_every_property_and_its_bytes(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name)
    properties = pika.BasicProperties(
        content_type="application/json",
        content_encoding="gzip",
        headers={"text": "ü", "number": -5, "big": 2**40, "yes": True, "no": None, "list": [1, "a", {}]},
        delivery_mode=2,
        priority=7,
        correlation_id="c",
        reply_to="r",
        expiration="60000",
        message_id="m",
        timestamp=1_700_000_000,
        type="t",
        user_id="guest",
        app_id="a",
        cluster_id="k",
    )
    body = bytes(range(256)) * 3
    channel.basic_publish("", name, body, properties)
    found = get(channel, name)
    assert found is not None
    assert found.body == body
    assert {field: getattr(found.properties, field) for field in vars(properties)} == vars(properties)


def test_empty_body_and_no_properties_are_a_message(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name)
    channel.basic_publish("", name, b"")
    found = get(channel, name)
    assert found is not None
    assert (found.body, found.properties.headers, found.properties.delivery_mode) == (b"", None, None)


@unlike_rabbitmq(reason="routing keys are binary there too, but pika cannot send one")
def test_routing_key_may_be_any_text(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name)
    channel.queue_bind(name, "amq.topic", routing_key=f"{name}.日本.*")
    send(channel, "amq.topic", f"{name}.日本.é", b"x")
    found = get(channel, name)
    assert found is not None
    assert found.routing_key == f"{name}.日本.é"
