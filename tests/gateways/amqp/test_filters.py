"""x-filter on consumers of queues and streams, and RabbitMQ's x-stream-filter: pika against a running broker."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import ChannelClosedByBroker

from .pika_client import Inbox
from .serving import Reader, Served, ready_count, served


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("filters")) as running:
        yield running


@pytest.fixture
def channel(broker: Served) -> Iterator[BlockingChannel]:
    with broker.channel() as opened:
        opened.confirm_delivery()
        opened.basic_qos(prefetch_count=100)
        yield opened


def declared(channel: BlockingChannel, request: pytest.FixtureRequest, **arguments: Any) -> str:
    name = str(request.node.name)
    channel.queue_declare(name, durable=True, arguments={f"x-{key}": value for key, value in arguments.items()})
    return name


def send(channel: BlockingChannel, queue: str, *pairs: tuple[str, Any], **headers: Any) -> None:
    for body, tags in pairs:
        table = {**headers, **({} if tags is None else {"x-tags": tags})}
        channel.basic_publish("", queue, body.encode(), pika.BasicProperties(headers=table, delivery_mode=2))


def reader(channel: BlockingChannel, queue: str, wanted: Any, *, no_ack: bool = False, **more: Any) -> Reader:
    arguments = {"x-filter": wanted, **{name.replace("_", "-"): value for name, value in more.items()}}
    return Reader(channel, queue, arguments=arguments, no_ack=no_ack)


MIXED = [("1", "eu"), ("2", "us"), ("3", {"region": "eu"}), ("4", None), ("5", "eu,test"), ("6", "eu")]


def test_consumer_is_given_what_it_asks_for_and_the_rest_stays(
    channel: BlockingChannel, request: pytest.FixtureRequest
) -> None:
    queue = declared(channel, request)
    send(channel, queue, *MIXED)
    got = reader(channel, queue, "(eu || region = eu) && !test")
    assert got.bodies(3) == [b"1", b"3", b"6"]
    got.ack()
    assert ready_count(channel, queue) == 3
    send(channel, queue, ("7", "us"), ("8", "eu"))
    assert got.bodies(4)[3:] == [b"8"]
    got.ack()
    channel.basic_cancel(got.tag)
    every = Inbox(channel, queue, auto_ack=True)
    assert [one.body for one in every.wait(4)] == [b"2", b"4", b"5", b"7"]


def test_consumers_with_different_filters_share_a_queue(
    channel: BlockingChannel, request: pytest.FixtureRequest
) -> None:
    queue = declared(channel, request)
    eu, us = reader(channel, queue, "eu", no_ack=True), reader(channel, queue, "us", no_ack=True)
    send(channel, queue, *MIXED)
    assert eu.bodies(3) == [b"1", b"5", b"6"]
    assert us.bodies(1) == [b"2"]
    assert ready_count(channel, queue) == 2


def test_requeued_message_goes_to_whoever_wants_it(
    broker: Served, channel: BlockingChannel, request: pytest.FixtureRequest
) -> None:
    queue = declared(channel, request)
    send(channel, queue, ("1", "eu,vip"), ("2", "eu"))
    with broker.channel() as other:
        assert reader(other, queue, "vip").bodies(1) == [b"1"]
        got = reader(channel, queue, "eu")
        assert got.bodies(1) == [b"2"]
    assert got.bodies(2) == [b"2", b"1"]
    assert got.got[1][0].redelivered
    got.ack()


def test_prefetch_holds_and_acks_bring_more(channel: BlockingChannel, request: pytest.FixtureRequest) -> None:
    queue = declared(channel, request)
    send(channel, queue, *[(str(number), "eu" if number % 3 == 0 else "us") for number in range(30)])
    channel.basic_qos(prefetch_count=2)
    got = reader(channel, queue, "eu")
    for count in range(2, 11, 2):
        got.wait(count)
        assert ready_count(channel, queue) == 30 - count
        got.ack()
    assert [body for _method, _properties, body in got.got] == [b"%d" % number for number in range(0, 30, 3)]


@pytest.mark.parametrize("unmatched", ["dead-letter", "drop"])
def test_what_matches_nobody_leaves_if_the_queue_says_so(
    channel: BlockingChannel, request: pytest.FixtureRequest, unmatched: str
) -> None:
    dead = channel.queue_declare("", exclusive=True).method.queue
    arguments = {"filter-unmatched": unmatched, "dead-letter-exchange": "", "dead-letter-routing-key": dead}
    queue = declared(channel, request, **arguments)
    send(channel, queue, *MIXED)
    assert ready_count(channel, queue) == 6
    got = reader(channel, queue, "eu")
    assert got.bodies(3) == [b"1", b"5", b"6"]
    got.ack()
    if unmatched == "dead-letter":
        letters = Reader(channel, dead, no_ack=True).wait(3)
        assert [body for _method, _properties, body in letters] == [b"2", b"3", b"4"]
        assert letters[0][1].headers["x-death"][0]["reason"] == "unmatched"
    assert ready_count(channel, queue) == 0


def test_what_matches_nobody_is_in_the_queues_own_dead_letter_queue_where_no_exchange_is_named(
    channel: BlockingChannel, request: pytest.FixtureRequest
) -> None:
    queue = declared(channel, request, **{"filter-unmatched": "dead-letter"})
    channel.queue_declare(f"{queue}.dlq", durable=True)
    send(channel, queue, *MIXED)
    reader(channel, queue, "eu").wait(3)
    assert Reader(channel, f"{queue}.dlq", no_ack=True).bodies(3) == [b"2", b"3", b"4"]


def test_unmatched_by_policy_is_as_by_argument(tmp_path: Path) -> None:
    config = """
[[policies]]
name = "unmatched"
pattern = "^picky"
definition = { filter-unmatched = "drop" }
"""
    with served(tmp_path, config=config) as broker, broker.channel() as channel:
        channel.confirm_delivery()
        channel.queue_declare("picky", durable=True)
        got = reader(channel, "picky", "eu", no_ack=True)
        send(channel, "picky", *MIXED)
        assert got.bodies(3) == [b"1", b"5", b"6"]
        assert ready_count(channel, "picky") == 0


def test_one_filter_too_many_and_one_that_cannot_be_read_are_406(
    broker: Served, channel: BlockingChannel, request: pytest.FixtureRequest
) -> None:
    queue = declared(channel, request)
    for number in range(16):
        reader(channel, queue, f"t{number}")
    reader(channel, queue, "t3")
    for wanted, reason in (("another", "16 different filters"), ("eu &&", "column 6"), (5, "expected string")):
        with broker.channel() as other, pytest.raises(ChannelClosedByBroker, match=reason) as caught:
            reader(other, queue, wanted)
        assert caught.value.reply_code == 406
    send(channel, queue, ("1", "t3"))
    assert ready_count(channel, queue) == 0


# -- streams and reading views ------------------------------------------------------------------------------------


def test_reader_of_a_stream_gets_what_matches_under_its_own_numbers(
    channel: BlockingChannel, request: pytest.FixtureRequest
) -> None:
    queue = declared(channel, request, **{"queue-type": "stream"})
    send(channel, queue, *MIXED)
    got = reader(channel, queue, "eu", x_stream_offset="first")
    assert got.bodies(3) == [b"1", b"5", b"6"]
    assert got.offsets(3) == [0, 4, 5]
    got.ack()
    send(channel, queue, ("7", "us"), ("8", "eu"))
    assert got.offsets(4)[3:] == [7]


def test_reader_beside_a_work_queue_filters_and_takes_nothing(
    channel: BlockingChannel, request: pytest.FixtureRequest
) -> None:
    queue = declared(channel, request)
    send(channel, queue, *MIXED)
    got = reader(channel, queue, "us || test", x_stream_offset="first")
    assert got.bodies(2) == [b"2", b"5"]
    assert ready_count(channel, queue) == 6


def test_small_prefetch_sees_every_match_of_a_long_stream(
    broker: Served, channel: BlockingChannel, request: pytest.FixtureRequest
) -> None:
    queue = declared(channel, request, **{"queue-type": "stream"})
    with broker.channel() as fast:
        for number in range(5000):
            tags = "rare" if number % 100 == 7 else "often"
            fast.basic_publish("", queue, b"%d" % number, pika.BasicProperties(headers={"x-tags": tags}))
        # Behind all that was published on this channel.
        fast.queue_declare(queue, passive=True)
    channel.basic_qos(prefetch_count=3)
    got = reader(channel, queue, "rare", x_stream_offset="first")
    for count in range(1, 51):
        got.wait(count)
        channel.basic_ack(got.got[count - 1][0].delivery_tag)
    assert got.offsets(50) == list(range(7, 5000, 100))


def test_stream_filter_of_rabbitmq_is_understood(channel: BlockingChannel, request: pytest.FixtureRequest) -> None:
    queue = declared(channel, request, **{"queue-type": "stream"})
    for body, value in [("1", "invoices"), ("2", "orders"), ("3", None), ("4", "invoices"), ("5", "claims")]:
        headers = {} if value is None else {"x-stream-filter-value": value}
        send(channel, queue, (body, None), **headers)
    first = {"x-stream-offset": "first"}
    for arguments, expected in [
        ({"x-stream-filter": "invoices"}, [b"1", b"4"]),
        ({"x-stream-filter": ["invoices", "claims"]}, [b"1", b"4", b"5"]),
        ({"x-stream-filter": "claims", "x-stream-match-unfiltered": True}, [b"3", b"5"]),
    ]:
        got = Reader(channel, queue, arguments=first | arguments)
        assert got.bodies(len(expected)) == expected
        # A filter on tags beside it narrows it.
        channel.basic_cancel(got.tag)
    got = Reader(channel, queue, arguments={**first, "x-stream-filter": "claims", "x-filter": "!late"})
    assert got.bodies(1) == [b"5"]


def test_filters_go_on_after_a_restart_with_what_was_not_settled(tmp_path: Path) -> None:
    with served(tmp_path) as broker:
        with broker.channel() as channel:
            channel.confirm_delivery()
            channel.queue_declare("q", durable=True)
            send(channel, "q", *[(str(number), "eu" if number % 2 else "us") for number in range(20)])
            got = reader(channel, "q", "eu")
            got.wait(10)
            channel.basic_ack(got.got[4][0].delivery_tag, multiple=True)
            channel.queue_declare("q", passive=True)
        broker.restart()
        with broker.channel() as channel:
            again = reader(channel, "q", "eu")
            assert again.bodies(5) == [b"11", b"13", b"15", b"17", b"19"]
            again.ack()
        broker.restart()
        with broker.channel() as channel:
            left = Reader(channel, "q", no_ack=True)
            assert left.bodies(10) == [b"%d" % number for number in range(0, 20, 2)]
