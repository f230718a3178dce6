"""Bindings to the past (x-from), driven by pika against a running broker."""

import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import ChannelClosedByBroker

from .serving import Reader, Served, publish_all, ready_count, served


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("past")) as running:
        yield running


@pytest.fixture
def channel(broker: Served) -> Iterator[BlockingChannel]:
    with broker.channel() as opened:
        opened.confirm_delivery()
        yield opened


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)


def numbered(first: int, end: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, end)]


def exchange_with_past(channel: BlockingChannel, name: str, kind: str = "topic", count: int = 10) -> None:
    """Published to before anybody was bound: keys a.0, b.1, a.2..."""
    channel.exchange_declare(name, kind, durable=True)
    for number in range(count):
        publish_all(channel, name, f"{'ab'[number % 2]}.{number}", [b"%d" % number])


def bind(channel: BlockingChannel, name: str, key: str = "#", start: Any = "first", **arguments: Any) -> None:
    channel.queue_bind(name, name, key, arguments={"x-from": start, **arguments})


def taken(channel: BlockingChannel, queue: str) -> list[bytes]:
    bodies = []
    while (found := channel.basic_get(queue, auto_ack=True))[0] is not None:
        bodies.append(found[2])
    return bodies


def test_queue_gets_what_was_published_before_it_was_bound(channel: BlockingChannel, name: str) -> None:
    exchange_with_past(channel, name)
    channel.queue_declare(name, durable=True)
    bind(channel, name)
    publish_all(channel, name, "a.10", numbered(10, 12))
    assert ready_count(channel, name) == 12
    assert taken(channel, name) == numbered(0, 12)


def test_only_what_matches_is_attached(channel: BlockingChannel, name: str) -> None:
    exchange_with_past(channel, name)
    channel.queue_declare(name, durable=True)
    bind(channel, name, "a.*")
    assert taken(channel, name) == [b"0", b"2", b"4", b"6", b"8"]


def test_message_looks_as_if_it_had_just_been_published(channel: BlockingChannel, name: str) -> None:
    channel.exchange_declare(name, "topic", durable=True)
    sent = pika.BasicProperties(headers={"h": 1}, message_id="m", delivery_mode=2, priority=3)
    channel.basic_publish(name, "the.key", b"body", sent)
    channel.queue_declare(name, durable=True)
    bind(channel, name)
    method, properties, body = channel.basic_get(name)
    assert (method.exchange, method.routing_key, method.redelivered) == (name, "the.key", False)
    assert (properties.headers, properties.message_id, properties.priority, body) == ({"h": 1}, "m", 3, b"body")


def test_start_at_an_offset_of_the_exchange(channel: BlockingChannel, name: str) -> None:
    exchange_with_past(channel, name)
    channel.queue_declare(name, durable=True)
    bind(channel, name, start=7)
    assert taken(channel, name) == numbered(7, 10)


def test_start_at_a_time(channel: BlockingChannel, name: str) -> None:
    exchange_with_past(channel, name)
    time.sleep(1.1)
    now = datetime.now(UTC)
    time.sleep(1.1 - now.microsecond / 1e6)
    publish_all(channel, name, "a.x", numbered(10, 13))
    channel.queue_declare(name, durable=True)
    bind(channel, name, start=now.replace(microsecond=0, tzinfo=None))
    assert taken(channel, name) == numbered(10, 13)


def test_the_same_again_attaches_nothing_twice(channel: BlockingChannel, name: str) -> None:
    exchange_with_past(channel, name)
    channel.queue_declare(name, durable=True)
    for _ in range(3):
        bind(channel, name)
    publish_all(channel, name, "a.x", [b"10"])
    bind(channel, name)
    assert taken(channel, name) == numbered(0, 11)


def test_earlier_start_attaches_what_was_left_out(channel: BlockingChannel, name: str) -> None:
    exchange_with_past(channel, name)
    channel.queue_declare(name, durable=True)
    bind(channel, name, start=6)
    bind(channel, name, start=2)
    assert taken(channel, name) == numbered(6, 10) + numbered(2, 6)


def test_binding_that_is_there_already_gets_its_past_once(channel: BlockingChannel, name: str) -> None:
    exchange_with_past(channel, name)
    channel.queue_declare(name, durable=True)
    channel.queue_bind(name, name, "#")
    publish_all(channel, name, "a.x", [b"10"])
    bind(channel, name)
    publish_all(channel, name, "a.x", [b"11"])
    assert taken(channel, name) == [b"10", *numbered(0, 10), b"11"]


def test_two_bindings_that_overlap_attach_a_message_once(channel: BlockingChannel, name: str) -> None:
    exchange_with_past(channel, name)
    channel.queue_declare(name, durable=True)
    bind(channel, name, "a.*")
    bind(channel, name, "#")
    assert taken(channel, name) == [*(b"%d" % n for n in range(0, 10, 2)), *(b"%d" % n for n in range(1, 10, 2))]


def test_whoever_unbinds_may_replay(channel: BlockingChannel, name: str) -> None:
    exchange_with_past(channel, name)
    channel.queue_declare(name, durable=True)
    for _ in range(2):
        bind(channel, name)
        assert taken(channel, name) == numbered(0, 10)
        channel.queue_unbind(name, name, "#")


def test_headers_exchange_matches_the_past_by_headers(channel: BlockingChannel, name: str) -> None:
    channel.exchange_declare(name, "headers", durable=True)
    for number in range(6):
        properties = pika.BasicProperties(headers={"n": number % 3}, delivery_mode=2)
        channel.basic_publish(name, "", b"%d" % number, properties)
    channel.queue_declare(name, durable=True)
    bind(channel, name, "", n=1)
    assert taken(channel, name) == [b"1", b"4"]


def test_copies_to_other_keys_count(channel: BlockingChannel, name: str) -> None:
    channel.exchange_declare(name, "direct", durable=True)
    channel.basic_publish(name, "one", b"cc", pika.BasicProperties(headers={"CC": ["two"]}, delivery_mode=2))
    channel.queue_declare(name, durable=True)
    bind(channel, name, "two")
    assert taken(channel, name) == [b"cc"]


def test_what_has_expired_is_not_attached(channel: BlockingChannel, name: str) -> None:
    channel.exchange_declare(name, "fanout", durable=True)
    channel.basic_publish(name, "", b"short", pika.BasicProperties(expiration="1", delivery_mode=2))
    channel.basic_publish(name, "", b"long", pika.BasicProperties(expiration="600000", delivery_mode=2))
    time.sleep(0.01)
    channel.queue_declare(name, durable=True)
    bind(channel, name)
    assert ready_count(channel, name) == 1
    assert taken(channel, name) == [b"long"]


def test_priorities_of_the_past_are_kept(channel: BlockingChannel, name: str) -> None:
    channel.exchange_declare(name, "fanout", durable=True)
    for number in range(6):
        channel.basic_publish(name, "", b"%d" % number, pika.BasicProperties(priority=number % 2, delivery_mode=2))
    channel.queue_declare(name, durable=True, arguments={"x-max-priority": 1})
    bind(channel, name)
    assert taken(channel, name) == [b"1", b"3", b"5", b"0", b"2", b"4"]


def test_stream_and_reader_see_what_was_attached(channel: BlockingChannel, name: str) -> None:
    exchange_with_past(channel, name)
    channel.queue_declare(name, durable=True, arguments={"x-queue-type": "stream"})
    bind(channel, name)
    publish_all(channel, name, "a.x", [b"10"])
    channel.basic_qos(prefetch_count=100)
    for start in (0, 4, 10):
        reader = Reader(channel, name, arguments={"x-stream-offset": start})
        assert reader.bodies(11 - start) == numbered(start, 11)
        assert reader.offsets(11 - start) == list(range(start, 11))


def test_queue_of_one_connection_gets_the_past_too(channel: BlockingChannel, name: str) -> None:
    exchange_with_past(channel, name)
    channel.queue_declare(name, exclusive=True)
    bind(channel, name)
    assert taken(channel, name) == numbered(0, 10)


def test_exchange_that_nothing_was_published_to_has_no_past(channel: BlockingChannel, name: str) -> None:
    channel.exchange_declare(name, "fanout", durable=True)
    channel.queue_declare(name, durable=True)
    bind(channel, name)
    publish_all(channel, name, "", [b"first"])
    assert taken(channel, name) == [b"first"]


def test_hash_exchange_and_exchange_as_target_are_refused(broker: Served, name: str) -> None:
    with broker.channel() as channel:
        channel.exchange_declare(name, "x-consistent-hash", durable=True)
        channel.queue_declare(name, durable=True)
        publish_all(channel, name, "k", [b"1"])
        with pytest.raises(ChannelClosedByBroker, match=r"406, .*x-consistent-hash"):
            bind(channel, name, "1")
    with broker.channel() as channel:
        channel.exchange_declare(name + ".target", "fanout", durable=True)
        with pytest.raises(ChannelClosedByBroker, match=r"406, .*x-from"):
            channel.exchange_bind(name + ".target", name, "#", arguments={"x-from": "first"})


@pytest.mark.parametrize("kill", [False, True], ids=["stopped", "killed"])
def test_attached_messages_survive_a_restart_and_are_not_attached_again(tmp_path: Path, kill: bool) -> None:
    with served(tmp_path) as broker:
        with broker.channel() as channel:
            exchange_with_past(channel, "x")
            channel.queue_declare("x", durable=True)
            bind(channel, "x")
            assert channel.basic_get("x", auto_ack=True)[2] == b"0"
            publish_all(channel, "x", "a.x", [b"10"])
        broker.restart(kill=kill)
        with broker.channel() as channel:
            bind(channel, "x")
            publish_all(channel, "x", "a.x", [b"11"])
            found = taken(channel, "x")
            # The one that was taken last may come again after a kill.
            assert found in (numbered(1, 12), numbered(0, 12)) if kill else found == numbered(1, 12)


def test_nothing_is_missed_or_doubled_at_the_seam_while_others_publish(broker: Served, name: str) -> None:
    count = 4000
    ready = threading.Event()

    def publish() -> None:
        with broker.channel() as channel:
            for number in range(count):
                channel.basic_publish(name, "k", b"%d" % number, pika.BasicProperties(delivery_mode=2))
                if number == count // 4:
                    channel.connection.process_data_events(0)
                    ready.set()
                if number % 50 == 0:
                    channel.connection.process_data_events(0)

    with broker.channel() as channel:
        channel.exchange_declare(name, "fanout", durable=True)
        channel.queue_declare(name, durable=True)
        publisher = threading.Thread(target=publish)
        publisher.start()
        ready.wait()
        bind(channel, name)
        publisher.join()
        reader = Reader(channel, name, no_ack=True)
        assert reader.bodies(count) == numbered(0, count)
        assert ready_count(channel, name) == 0
