"""Partitioned queues (x-partitions), driven by pika against a running broker."""

import time
from collections.abc import Iterator
from pathlib import Path

import pika
import pytest
from pamqp import header
from pamqp.commands import Basic
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import ChannelClosedByBroker

from .serving import PATIENCE_S, Reader, Served, publish_all, ready_count, served
from .wire import Wire

LANES = {"x-partitions": 8}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("partitions")) as running:
        yield running


@pytest.fixture
def channel(broker: Served) -> Iterator[BlockingChannel]:
    with broker.channel() as opened:
        yield opened


@pytest.fixture
def queue(channel: BlockingChannel, request: pytest.FixtureRequest) -> str:
    name = str(request.node.name)
    channel.exchange_declare(name, "fanout", durable=True)
    channel.queue_declare(name, durable=True, arguments=LANES)
    channel.queue_bind(name, name)
    return name


def publish(channel: BlockingChannel, queue: str, first: int, end: int, *, keys: int = 16) -> None:
    for number in range(first, end):
        publish_all(channel, queue, f"key{number % keys}", [b"%d" % number])


def by_key(*readers: Reader) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for reader in readers:
        for method, _properties, body in reader.got:
            found.setdefault(method.routing_key, []).append(int(body))
    return found


def keys_of(reader: Reader) -> set[str]:
    return {method.routing_key for method, _properties, _body in reader.got}


def wait_for(count: int, *readers: Reader) -> None:
    """Until they have so many together; fails when they do not come."""
    until = time.monotonic() + PATIENCE_S
    while (came := sum(len(reader.got) for reader in readers)) < count:
        assert time.monotonic() < until, f"{came} of {count} deliveries came"
        for reader in readers:
            reader.channel.connection.process_data_events(0.01)


def test_each_key_goes_to_one_consumer_and_all_have_some(broker: Served, channel: BlockingChannel, queue: str) -> None:
    with broker.channel() as first, broker.channel() as second:
        readers = [Reader(one, queue, no_ack=True) for one in (first, second)]
        publish(channel, queue, 0, 160)
        wait_for(160, *readers)
        assert keys_of(readers[0]) and keys_of(readers[1])
        assert not keys_of(readers[0]) & keys_of(readers[1])
        assert all(numbers == sorted(numbers) for numbers in by_key(*readers).values())


def test_header_x_key_takes_the_place_of_the_routing_key(broker: Served, channel: BlockingChannel, queue: str) -> None:
    with broker.channel() as first, broker.channel() as second:
        readers = [Reader(one, queue, no_ack=True) for one in (first, second)]
        for number in range(40):
            properties = pika.BasicProperties(headers={"x-key": "the one"}, delivery_mode=2)
            channel.basic_publish(queue, f"key{number}", b"%d" % number, properties)
        ready_count(channel, queue)
        wait_for(40, *readers)
        assert sorted(len(reader.got) for reader in readers) == [0, 40]


def test_one_who_comes_gets_lanes_only_when_they_are_settled(
    broker: Served, channel: BlockingChannel, queue: str
) -> None:
    with broker.channel() as first, broker.channel() as second:
        first.basic_qos(prefetch_count=1000)
        old = Reader(first, queue)
        publish(channel, queue, 0, 64)
        old.wait(64)
        new = Reader(second, queue)
        publish(channel, queue, 64, 128)
        # Half of the lanes are the newcomer's by now; nobody gets anything of them before they are settled.
        stayed = {method.routing_key for method, _properties, body in wait_all(old) if int(body) >= 64}
        assert stayed and not new.got
        old.channel.basic_ack(0, multiple=True)
        wait_for(128, old, new)
        assert keys_of(new) and not keys_of(new) & stayed
        assert all(numbers == sorted(numbers) for numbers in by_key(old, new).values())


def wait_all(reader: Reader) -> list[tuple[object, pika.BasicProperties, bytes]]:
    """Whatever is on its way: a synchronous method is answered behind it."""
    reader.channel.queue_declare("amq.rabbitmq.reply-to", passive=True)
    reader.channel.connection.process_data_events(0)
    return reader.got


def test_lanes_of_one_who_crashes_go_on_with_the_others_in_order(
    broker: Served, channel: BlockingChannel, queue: str
) -> None:
    with broker.channel() as surviving:
        surviving.basic_qos(prefetch_count=1000)
        kept = Reader(surviving, queue)
        with Wire(broker.port) as dying:
            dying.log_in()
            dying.open_channel(1)
            dying.call(1, Basic.Consume(queue=queue), Basic.ConsumeOk)
            publish(channel, queue, 0, 64)
            wait_for(32, kept)
            held = set()
            for _ in range(32):
                held.add(dying.expect(Basic.Deliver).routing_key)
                dying.expect(header.ContentHeader)
                dying.receive()
        wait_for(64, kept)
        publish(channel, queue, 64, 128)
        wait_for(128, kept)
        assert by_key(kept) == {f"key{key}": list(range(key, 128, 16)) for key in range(16)}
        assert {m.routing_key for m, _properties, _body in kept.got if m.redelivered} == held


@pytest.mark.parametrize("kill", [False, True], ids=["stopped", "killed"])
def test_lanes_survive_a_restart(tmp_path: Path, kill: bool) -> None:
    with served(tmp_path) as broker:
        with broker.channel() as channel:
            channel.exchange_declare("q", "fanout", durable=True)
            channel.queue_declare("q", durable=True, arguments=LANES)
            channel.queue_bind("q", "q")
            publish(channel, "q", 0, 64)
            channel.basic_qos(prefetch_count=20)
            reader = Reader(channel, "q")
            reader.wait(20)
            reader.ack()
        broker.restart(kill=kill)
        with broker.channel() as channel:
            assert ready_count(channel, "q") == 44
            rest = Reader(channel, "q", no_ack=True)
            rest.wait(44)
            settled = by_key(reader)
            for key, numbers in by_key(rest).items():
                done = [number for number in settled.get(key, []) if number not in numbers]
                assert done + numbers == list(range(int(key[3:]), 64, 16))


@pytest.mark.parametrize(
    "other", [{"x-max-priority": 3}, {"x-single-active-consumer": True}, {"x-queue-type": "stream"}], ids=str
)
def test_what_makes_no_sense_together_is_refused(broker: Served, other: dict[str, object]) -> None:
    with broker.channel() as channel, pytest.raises(ChannelClosedByBroker, match=r"406, .*x-partitions"):
        channel.queue_declare("refused", durable=True, arguments={**LANES, **other})


def test_another_number_of_partitions_is_another_queue(channel: BlockingChannel, queue: str) -> None:
    with pytest.raises(ChannelClosedByBroker, match=r"406, .*inequivalent arg 'x-partitions'"):
        channel.queue_declare(queue, durable=True, arguments={"x-partitions": 9})


def test_partitions_of_an_exchange_are_refused(channel: BlockingChannel) -> None:
    with pytest.raises(ChannelClosedByBroker, match=r"406, .*x-partitions"):
        channel.exchange_declare("lanes", "fanout", durable=True, arguments={"x-partitions": 4})


def test_get_works_without_consumers(channel: BlockingChannel, queue: str) -> None:
    publish(channel, queue, 0, 32)
    found: dict[str, list[int]] = {}
    for _ in range(32):
        method, _properties, body = channel.basic_get(queue)
        channel.basic_ack(method.delivery_tag)
        found.setdefault(method.routing_key, []).append(int(body))
    assert found == {f"key{key}": list(range(key, 32, 16)) for key in range(16)}
