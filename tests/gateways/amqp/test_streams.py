"""Streams and reading views, driven by pika against a running broker."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import ChannelClosedByBroker, ConnectionClosedByBroker
from tests.running_broker import eventually

from .serving import Reader, Served, publish_all, ready_count, served

STREAM = {"x-queue-type": "stream"}


def numbered(first: int, end: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, end)]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("streams")) as running:
        yield running


@pytest.fixture
def channel(broker: Served) -> Iterator[BlockingChannel]:
    with broker.channel() as opened:
        opened.basic_qos(prefetch_count=100)
        yield opened


@pytest.fixture
def stream(channel: BlockingChannel, request: pytest.FixtureRequest) -> str:
    """A stream of the test's own that holds 0..9."""
    name = str(request.node.name)
    channel.queue_declare(name, durable=True, arguments=STREAM)
    publish_all(channel, "", name, numbered(0, 10))
    return name


def read(channel: BlockingChannel, queue: str, offset: Any) -> Reader:
    return Reader(channel, queue, arguments=None if offset is None else {"x-stream-offset": offset})


def test_reading_takes_nothing_away(channel: BlockingChannel, stream: str) -> None:
    for _ in range(2):
        reader = read(channel, stream, "first")
        assert reader.bodies(10) == numbered(0, 10)
        reader.ack()
        channel.basic_cancel(reader.tag)
    assert ready_count(channel, stream) == 10


def test_each_delivery_says_which_number_it_has(channel: BlockingChannel, stream: str) -> None:
    reader = read(channel, stream, "first")
    assert reader.offsets(10) == list(range(10))
    assert [method.redelivered for method, _properties, _body in reader.got] == [False] * 10


def test_other_headers_and_properties_stay(channel: BlockingChannel, stream: str) -> None:
    headers = {"before": 1, "x-stream-offset": "mine", "after": [True]}
    properties = pika.BasicProperties(headers=headers, content_type="a/b", message_id="m", delivery_mode=2)
    channel.basic_publish("", stream, b"decorated", properties)
    _method, found, _body = read(channel, stream, 10).wait(1)[0]
    assert found.headers == {"before": 1, "after": [True], "x-stream-offset": 10}
    assert (found.content_type, found.message_id, found.delivery_mode) == ("a/b", "m", 2)


@pytest.mark.parametrize(("offset", "first"), [("first", 0), ("last", 9), (0, 0), (4, 4), (9, 9)])
def test_place_to_start(channel: BlockingChannel, stream: str, offset: Any, first: int) -> None:
    publish_all(channel, "", stream, numbered(10, 12))
    first += 2 if offset == "last" else 0
    assert read(channel, stream, offset).bodies(12 - first) == numbered(first, 12)


@pytest.mark.parametrize("offset", [None, "next", 10, 1000])
def test_reader_at_the_end_gets_what_comes(channel: BlockingChannel, stream: str, offset: Any) -> None:
    reader = read(channel, stream, offset)
    publish_all(channel, "", stream, numbered(10, 15))
    assert reader.offsets(5) == list(range(10, 15))
    assert reader.bodies(5) == numbered(10, 15)


def test_start_at_a_time(channel: BlockingChannel, stream: str) -> None:
    # AMQP's timestamps have seconds.
    time.sleep(1.1)
    now = datetime.now(UTC)
    time.sleep(1.1 - now.microsecond / 1e6)
    publish_all(channel, "", stream, numbered(10, 13))
    assert read(channel, stream, now.replace(microsecond=0, tzinfo=None)).bodies(3) == numbered(10, 13)


def test_start_some_time_ago_and_at_a_time_before_all(channel: BlockingChannel, stream: str) -> None:
    for offset in ("1h", datetime(2001, 1, 1)):
        assert read(channel, stream, offset).bodies(10) == numbered(0, 10)


def test_time_still_to_come_waits_for_the_next(channel: BlockingChannel, stream: str) -> None:
    reader = read(channel, stream, datetime(2100, 1, 1))
    publish_all(channel, "", stream, numbered(10, 11))
    assert reader.bodies(1) == numbered(10, 11)


def test_readers_are_independent(broker: Served, channel: BlockingChannel, stream: str) -> None:
    with broker.channel() as other:
        other.basic_qos(prefetch_count=3)
        slow, fast = read(other, stream, "first"), read(channel, stream, 5)
        assert fast.bodies(5) == numbered(5, 10)
        assert slow.bodies(3) == numbered(0, 3)
        assert channel.queue_declare(stream, passive=True).method.consumer_count == 2


def test_acks_give_room_and_nothing_else(broker: Served, stream: str) -> None:
    with broker.channel() as channel:
        channel.basic_qos(prefetch_count=4)
        reader = read(channel, stream, "first")
        assert reader.bodies(4) == numbered(0, 4)
        channel.basic_nack(reader.got[1][0].delivery_tag, requeue=True)
        channel.basic_reject(reader.got[2][0].delivery_tag, requeue=False)
        assert reader.bodies(6) == numbered(0, 6)
        reader.ack()
        assert reader.bodies(10) == numbered(0, 10)


def test_stream_bound_to_an_exchange_numbers_what_is_routed_to_it(channel: BlockingChannel, stream: str) -> None:
    channel.exchange_declare("topics", "topic", durable=True)
    channel.queue_bind(stream, "topics", "a.#")
    for number in range(10, 20):
        publish_all(channel, "topics", "a.b", [b"%d" % number])
        publish_all(channel, "topics", "other", [b"no"])
    publish_all(channel, "", stream, [b"20"])
    publish_all(channel, "topics", "a.c", [b"21"])
    reader = read(channel, stream, "first")
    assert reader.bodies(22) == numbered(0, 22)
    assert reader.offsets(22) == list(range(22))
    assert read(channel, stream, 13).bodies(9) == numbered(13, 22)
    assert {method.exchange for method, _properties, _body in reader.got[10:20]} == {"topics"}


@pytest.mark.parametrize("kill", [False, True], ids=["stopped", "killed"])
def test_numbers_stay_with_their_records_after_a_restart(tmp_path: Path, kill: bool) -> None:
    with served(tmp_path) as broker:
        for first in range(0, 30, 10):
            with broker.channel() as channel:
                channel.queue_declare("s", durable=True, arguments=STREAM)
                channel.queue_declare("work", durable=True)
                channel.exchange_declare("x", "fanout", durable=True)
                for queue in ("s", "work"):
                    channel.queue_bind(queue, "x")
                publish_all(channel, "x", "", numbered(first, first + 5))
                for queue in ("s", "work"):
                    publish_all(channel, "", queue, numbered(first + 5, first + 10))
                channel.basic_qos(prefetch_count=100)
                for queue in ("s", "work"):
                    reader = read(channel, queue, "first")
                    assert reader.bodies(first + 10) == numbered(0, first + 10)
                    assert reader.offsets(first + 10) == list(range(first + 10))
            broker.restart(kill=kill)
        with broker.channel() as channel:
            channel.basic_qos(prefetch_count=100)
            for queue in ("s", "work"):
                assert read(channel, queue, 17).bodies(13) == numbered(17, 30)
                assert ready_count(channel, queue) == 30


# -- ordinary queues ------------------------------------------------------------------------------------------------


@pytest.fixture
def queue(channel: BlockingChannel, request: pytest.FixtureRequest) -> str:
    """An ordinary durable queue that holds 0..9."""
    name = str(request.node.name)
    channel.queue_declare(name, durable=True)
    publish_all(channel, "", name, numbered(0, 10))
    return name


def test_reader_beside_a_work_queue_takes_nothing_from_it(channel: BlockingChannel, queue: str) -> None:
    reader = read(channel, queue, "first")
    assert reader.bodies(10) == numbered(0, 10)
    reader.ack()
    assert ready_count(channel, queue) == 10
    worker = Reader(channel, queue, no_ack=True)
    assert worker.bodies(10) == numbered(0, 10)
    assert all("x-stream-offset" not in (properties.headers or {}) for _method, properties, _body in worker.got)


def test_what_was_consumed_can_be_read_again(channel: BlockingChannel, queue: str) -> None:
    for _ in range(10):
        channel.basic_get(queue, auto_ack=True)
    assert ready_count(channel, queue) == 0
    reader = read(channel, queue, 3)
    assert reader.bodies(7) == numbered(3, 10)
    assert reader.offsets(7) == list(range(3, 10))


def test_priorities_are_read_in_the_order_of_arrival(channel: BlockingChannel, request: pytest.FixtureRequest) -> None:
    name = request.node.name
    channel.queue_declare(name, durable=True, arguments={"x-max-priority": 5})
    for number in range(10):
        channel.basic_publish("", name, b"%d" % number, pika.BasicProperties(priority=number % 3, delivery_mode=2))
    assert read(channel, name, "first").bodies(10) == numbered(0, 10)


def test_transient_queue_can_be_read_too(channel: BlockingChannel) -> None:
    name = channel.queue_declare("", exclusive=True).method.queue
    for body in numbered(0, 10):
        channel.basic_publish("", name, body)
    assert read(channel, name, 2).bodies(8) == numbered(2, 10)


# -- refusals -------------------------------------------------------------------------------------------------------


def test_reading_without_a_prefetch_is_refused(broker: Served, stream: str) -> None:
    with broker.channel() as channel, pytest.raises(ChannelClosedByBroker, match=r"406, .*prefetch count is not set"):
        read(channel, stream, "first")


def test_reading_without_acknowledgements_is_refused(broker: Served, stream: str) -> None:
    with broker.channel() as channel:
        channel.basic_qos(prefetch_count=1)
        with pytest.raises(ConnectionClosedByBroker, match=r"540, .*automatic acknowledgement not supported"):
            Reader(channel, stream, no_ack=True)


def test_get_and_purge_of_a_stream_are_refused(broker: Served, stream: str) -> None:
    with broker.channel() as channel, pytest.raises(ConnectionClosedByBroker, match=r"540, .*basic.get not supported"):
        channel.basic_get(stream)
    with broker.channel() as channel, pytest.raises(ConnectionClosedByBroker, match=r"540, .*purge not supported"):
        channel.queue_purge(stream)


def test_exclusive_reader_is_refused(broker: Served, stream: str) -> None:
    with broker.channel() as channel:
        channel.basic_qos(prefetch_count=1)
        with pytest.raises(ChannelClosedByBroker, match=r"406, .*cannot be exclusive"):
            channel.basic_consume(stream, lambda *_: None, exclusive=True)


@pytest.mark.parametrize("offset", ["sometime", -1, True, "0m"])
def test_what_is_no_offset_is_refused(broker: Served, stream: str, offset: Any) -> None:
    with broker.channel() as channel:
        channel.basic_qos(prefetch_count=1)
        with pytest.raises(ChannelClosedByBroker, match=r"406, .*x-stream-offset"):
            read(channel, stream, offset)


def test_deleted_stream_cancels_its_readers(broker: Served, channel: BlockingChannel, stream: str) -> None:
    cancelled: list[object] = []
    channel.add_on_cancel_callback(cancelled.append)
    read(channel, stream, "first")
    with broker.channel() as other:
        other.queue_delete(stream)
    eventually(lambda: channel.connection.process_data_events(0) or cancelled)


# -- retention and memory -----------------------------------------------------------------------------------------


def test_stream_keeps_no_more_than_its_length_in_bytes(tmp_path: Path) -> None:
    limit = 1_000_000
    with served(tmp_path) as broker, broker.channel() as channel:
        channel.queue_declare("s", durable=True, arguments={**STREAM, "x-max-length-bytes": limit})
        channel.confirm_delivery()
        body = bytes(10_000)
        for _ in range(400):
            channel.basic_publish("", "s", body, pika.BasicProperties(delivery_mode=2))
        eventually(lambda: ready_count(channel, "s") * len(body) <= limit)
        kept = ready_count(channel, "s")
        assert kept * len(body) > limit // 2
        channel.basic_qos(prefetch_count=500)
        assert read(channel, "s", "first").offsets(kept) == list(range(400 - kept, 400))
        own = list((broker.data / "streams").rglob("*.log"))
        eventually(lambda: sum(path.stat().st_size for path in own if path.exists()) < 4_000_000)


def test_stream_lets_go_of_what_is_too_old(tmp_path: Path) -> None:
    with served(tmp_path) as broker, broker.channel() as channel:
        channel.queue_declare("s", durable=True, arguments={**STREAM, "x-max-age": "1s", "x-max-length-bytes": 1 << 30})
        for _ in range(3):
            publish_all(channel, "", "s", [bytes(1 << 20)])
        eventually(lambda: ready_count(channel, "s") == 1)
        channel.basic_qos(prefetch_count=10)
        assert read(channel, "s", "first").offsets(1) == [2]


def test_stream_without_limits_keeps_what_its_exchange_would_not(tmp_path: Path) -> None:
    config = '[storage]\nretention_bytes = "64 KiB"\nsegment_bytes = "1 MiB"\n'
    with served(tmp_path, config=config) as broker, broker.channel() as channel:
        channel.exchange_declare("x", "direct", durable=True)
        channel.queue_declare("s", durable=True, arguments=STREAM)
        channel.queue_bind("s", "x", "mine")
        publish_all(channel, "x", "mine", [b"kept"])
        publish_all(channel, "x", "others", [bytes(10_000)] * 100)
        time.sleep(2.5)  # retention had its turns
        channel.basic_qos(prefetch_count=10)
        assert read(channel, "s", "first").bodies(1) == [b"kept"]


def test_reader_of_a_long_stream_costs_little_memory(tmp_path: Path) -> None:
    with served(tmp_path) as broker, broker.connected() as connection:
        channel = connection.channel()
        channel.queue_declare("s", durable=True, arguments=STREAM)
        body = bytes(10_000)
        for _ in range(5000):
            channel.basic_publish("", "s", body, pika.BasicProperties(delivery_mode=2))
        assert ready_count(channel, "s") == 5000
        before = broker.resident_bytes()
        # It has credit for everything and takes nothing from its socket.
        with broker.channel() as sleeper:
            sleeper.basic_qos(prefetch_count=10_000)
            sleeper.basic_consume("s", lambda *_: None, arguments={"x-stream-offset": "first"})
            channel.basic_qos(prefetch_count=1000)
            awake = read(channel, "s", "first")
            while len(awake.got) < 5000:
                awake.wait(len(awake.got) + 1)
                awake.ack()
            assert awake.got[-1][1].headers["x-stream-offset"] == 4999
            assert broker.resident_bytes() - before < 40_000_000
