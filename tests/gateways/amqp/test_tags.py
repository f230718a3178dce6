"""Tags of messages and filters on bindings: headers by table, then pika against a running broker."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import ChannelClosedByBroker

from headrace.filtering.expression import parse
from headrace.filtering.tags import InvalidTags
from headrace.gateways.amqp import properties
from headrace.gateways.amqp.tags import stream_filter, tagged_runs, tags_of

from .pika_client import Inbox
from .serving import Reader, Served, served

PERSISTENT = 2


# -- headers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "tags"),
    [
        ({}, ()),
        ({"x-tags": "vip,eu"}, ("eu", "vip")),
        ({"x-tags": ["b", "a, b"]}, ("a, b", "b")),
        ({"x-tags": {"region": "eu", "tier": 1, "test": False}}, ("region=eu", "test=false", "tier=1")),
        ({"x-stream-filter-value": "eu"}, ("x-stream-filter-value", "x-stream-filter-value=eu")),
        ({"x-stream-filter-value": "eu", "x-tags": "a"}, ("a", "x-stream-filter-value", "x-stream-filter-value=eu")),
    ],
)
def test_headers_give_tags(headers: Any, tags: tuple[str, ...]) -> None:
    assert tags_of(headers) == tags


@pytest.mark.parametrize(
    "headers",
    [
        {"x-tags": 7},
        {"x-tags": ["a", 7]},
        {"x-tags": {"a": {"b": "c"}}},
        {"x-tags": {"a=b": "c"}},
        {"x-tags": '"'},
        {"x-stream-filter-value": 7},
        {"x-stream-filter-value": "x" * 300},
    ],
)
def test_headers_that_give_none_are_refused(headers: Any) -> None:
    with pytest.raises(InvalidTags):
        tags_of(headers)


def props(**headers: Any) -> bytes:
    return properties.with_headers(properties.encode(properties.Properties(message_id="m")), headers)


def test_neighbours_with_equal_tags_go_together_and_whoever_has_other_business_alone() -> None:
    eu, also_eu = props(**{"x-tags": "eu"}), props(**{"x-tags": ["eu"]})
    special = props(**{"x-tags": "eu", "x-producer-id": "p"})
    bad = props(**{"x-tags": 5})
    other = props(**{"x-other": "x-tags"})
    column = [eu, eu, also_eu, special, other, bad, eu]
    assert list(tagged_runs(column, 0, 7)) == [(0, 3, ("eu",)), (3, 6, None), (6, 7, ("eu",))]
    assert list(tagged_runs(column, 1, 2)) == [(1, 2, ("eu",))]


def test_stream_filter_asks_for_values_and_perhaps_for_messages_without_any() -> None:
    value, other = tags_of({"x-stream-filter-value": "a"}), tags_of({"x-stream-filter-value": "b"})
    asked = stream_filter(["a", "c"], match_unfiltered=False)
    assert [asked.matches(tags) for tags in (value, other, ())] == [True, False, False]
    asked = stream_filter(["a"], match_unfiltered=True)
    assert [asked.matches(tags) for tags in (value, other, ("eu",))] == [True, False, True]
    assert asked == parse("'x-stream-filter-value' = a || !x-stream-filter-value")


# -- over the wire ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("tags")) as running:
        yield running


@pytest.fixture
def channel(broker: Served) -> Iterator[BlockingChannel]:
    with broker.channel() as opened:
        opened.confirm_delivery()
        yield opened


def publish(channel: BlockingChannel, exchange: str, key: str, body: str, tags: Any = None, **headers: Any) -> None:
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    if tags is not None:
        headers["x-tags"] = tags
    sent = pika.BasicProperties(headers=headers, delivery_mode=PERSISTENT)
    channel.basic_publish(exchange, key, body.encode(), sent)


def bodies(channel: BlockingChannel, queue: str) -> list[str]:
    inbox = Inbox(channel, queue, auto_ack=True)
    found = [one.body.decode() for one in inbox.quiet()]
    channel.basic_cancel(inbox.tag)
    return found


@pytest.fixture
def exchange(channel: BlockingChannel, request: pytest.FixtureRequest) -> str:
    name = str(request.node.name)
    channel.exchange_declare(name, "fanout", durable=True)
    return name


def bound(channel: BlockingChannel, exchange: str, name: str, wanted: str | None, **arguments: Any) -> str:
    queue = f"{exchange}-{name}"
    channel.queue_declare(queue, durable=True)
    if wanted is not None:
        arguments["x-filter"] = wanted
    channel.queue_bind(queue, exchange, "", arguments)
    return queue


def test_binding_with_a_filter_gets_messages_by_their_tags(channel: BlockingChannel, exchange: str) -> None:
    every = bound(channel, exchange, "all", None)
    gold = bound(channel, exchange, "gold", "region in (eu, us) && tier = gold")
    untested = bound(channel, exchange, "untested", "!test")
    for body, tags in [
        ("1", "region=eu,tier=gold"),
        ("2", {"region": "us", "tier": "gold"}),
        ("3", {"region": "asia", "tier": "gold"}),
        ("4", ["test"]),
        ("5", None),
    ]:
        publish(channel, exchange, "k", body, tags)
    assert bodies(channel, every) == ["1", "2", "3", "4", "5"]
    assert bodies(channel, gold) == ["1", "2"]
    assert bodies(channel, untested) == ["1", "2", "3", "5"]


def test_filter_on_a_binding_between_exchanges_holds(channel: BlockingChannel, exchange: str) -> None:
    channel.exchange_declare(f"{exchange}-2", "fanout", durable=True)
    channel.exchange_bind(f"{exchange}-2", exchange, "", {"x-filter": "eu"})
    queue = bound(channel, f"{exchange}-2", "q", "!test")
    for body, tags in [("1", "eu"), ("2", "us"), ("3", "eu,test")]:
        publish(channel, exchange, "k", body, tags)
    assert bodies(channel, queue) == ["1"]


def test_mandatory_message_that_every_filter_lets_pass_comes_back(channel: BlockingChannel, exchange: str) -> None:
    bound(channel, exchange, "q", "eu")
    publish(channel, exchange, "k", "1", "eu")
    with pytest.raises(pika.exceptions.UnroutableError):
        channel.basic_publish(exchange, "k", b"2", mandatory=True)


def test_binding_to_the_past_filters_the_past_too(channel: BlockingChannel, exchange: str) -> None:
    bound(channel, exchange, "all", None)
    for number in range(10):
        publish(channel, exchange, "k", str(number), "even" if number % 2 == 0 else "odd")
    queue = bound(channel, exchange, "past", "even", **{"x-from": "first"})
    publish(channel, exchange, "k", "10", "even")
    publish(channel, exchange, "k", "11", "odd")
    assert bodies(channel, queue) == ["0", "2", "4", "6", "8", "10"]


def test_tags_outlive_dead_lettering(channel: BlockingChannel, exchange: str) -> None:
    kept = bound(channel, exchange, "kept", "eu")
    work = f"{exchange}-work"
    channel.queue_declare(work, durable=True, arguments={"x-dead-letter-exchange": exchange})
    publish(channel, "", work, "1", "eu")
    publish(channel, "", work, "2", "us")
    reader = Reader(channel, work)
    reader.wait(2)
    channel.basic_nack(0, multiple=True, requeue=False)
    assert Reader(channel, kept, no_ack=True).bodies(1) == [b"1"]
    assert bodies(channel, kept) == []


def test_numbered_publishes_keep_their_tags(channel: BlockingChannel, exchange: str) -> None:
    queue = bound(channel, exchange, "q", "eu")
    for number, tags in enumerate(["eu", "us", "eu", "eu"]):
        publish(channel, exchange, "k", str(number), tags, x_producer_id=exchange, x_sequence=number)
    publish(channel, exchange, "k", "again", "eu", x_producer_id=exchange, x_sequence=3)
    assert bodies(channel, queue) == ["0", "2", "3"]


@pytest.mark.parametrize("tags", [7, '"open', {"a=b": "c"}, "x" * 300])
def test_tags_that_cannot_be_kept_are_refused_and_nothing_is_published(
    broker: Served, channel: BlockingChannel, tags: Any
) -> None:
    queue = channel.queue_declare("", exclusive=True).method.queue
    with broker.channel() as other:
        other.confirm_delivery()
        with pytest.raises(ChannelClosedByBroker, match=r"tag|dimension") as caught:
            publish(other, "", queue, "1", tags)
        assert caught.value.reply_code == 406
    assert bodies(channel, queue) == []


@pytest.mark.parametrize("wanted", ["eu &&", "", 7])
def test_filter_that_cannot_be_read_is_refused(broker: Served, channel: BlockingChannel, wanted: Any) -> None:
    queue = channel.queue_declare("", exclusive=True).method.queue
    with pytest.raises(ChannelClosedByBroker, match="x-filter") as caught:
        channel.queue_bind(queue, "amq.fanout", "", {"x-filter": wanted})
    assert caught.value.reply_code == 406


def test_filtered_binding_and_tags_outlive_a_restart(tmp_path: Path) -> None:
    with served(tmp_path) as broker:
        with broker.channel() as channel:
            channel.confirm_delivery()
            channel.exchange_declare("x", "fanout", durable=True)
            bound(channel, "x", "eu", "eu")
            publish(channel, "x", "k", "1", "eu,vip")
        broker.restart(kill=True)
        with broker.channel() as channel:
            channel.confirm_delivery()
            publish(channel, "x", "k", "2", "us")
            publish(channel, "x", "k", "3", "eu")
            assert bodies(channel, "x-eu") == ["1", "3"]
        broker.stop()
        found = [record["tags"] for record in broker.dumped("x") if "key" in record]
        assert found == [["eu", "vip"], ["us"], ["eu"]]
