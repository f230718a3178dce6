"""A forgotten message does not fill the disk: through a real broker, with a small retention and kill -9."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from pika.adapters.blocking_connection import BlockingChannel
from tests.running_broker import RunningBroker, eventually

from .pika_client import PERSISTENT

MIB = 1 << 20
CONFIG = """
[storage]
segment_bytes = "1MiB"
journal_bytes = "1MiB"
retention_bytes = "4MiB"
"""
# The retention, the segment that is written, one on the way out, and files kept for the next ones.
BOUND = 4 * MIB + 2 * MIB + 8 * MIB
# What does not compress, so that what goes through is what is stored.
BODY = os.urandom(64 * 1024)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[RunningBroker]:
    with RunningBroker(tmp_path, config=CONFIG) as running:
        yield running


def data_bytes(broker: RunningBroker) -> int:
    """What the data directory takes of the disk."""
    total = 0
    for folder, _folders, names in os.walk(broker.data):
        for name in names:
            try:
                total += (Path(folder) / name).stat().st_blocks * 512
            except FileNotFoundError:
                continue
    return total


def declare(channel: BlockingChannel, queue: str) -> None:
    channel.exchange_declare("events", "topic", durable=True)
    channel.queue_declare(queue, durable=True)
    channel.queue_bind(queue, "events", "rare.#")


def pass_by(channel: BlockingChannel, count: int) -> None:
    """What the queue does not want, each confirmed."""
    channel.confirm_delivery()
    for number in range(count):
        channel.basic_publish("events", f"common.{number % 7}", BODY)


def test_one_unacked_message_and_64_mib_past_it_leave_a_small_directory_and_the_message_after_kill_9(
    broker: RunningBroker,
) -> None:
    channel = broker.connect().channel()
    declare(channel, "picky")
    channel.basic_publish("events", "rare.one", b"precious", PERSISTENT)
    holder = broker.connect().channel()
    method, _properties, body = holder.basic_get("picky")
    assert body == b"precious" and not method.redelivered
    pass_by(channel, 1024)
    eventually(lambda: data_bytes(broker) < BOUND)
    assert "a queue was released from a log" in broker.log_path.read_text()
    # It is still with the one who got it, and nobody else gets it.
    assert channel.queue_declare("picky", passive=True).method.message_count == 0
    broker.kill()
    assert data_bytes(broker) < BOUND
    broker.start()
    channel = broker.connect().channel()
    method, properties, body = channel.basic_get("picky")
    assert (body, method.redelivered, method.exchange, method.routing_key) == (b"precious", True, "events", "rare.one")
    assert properties.delivery_mode == 2
    channel.basic_ack(method.delivery_tag)
    assert channel.queue_declare("picky", passive=True).method.message_count == 0


def test_delivery_tag_of_a_released_message_acks_it_and_a_requeue_brings_it_back_to_its_place(
    broker: RunningBroker,
) -> None:
    channel = broker.connect().channel()
    declare(channel, "picky")
    for number in range(4):
        channel.basic_publish("events", "rare.one", b"%d" % number, PERSISTENT)
    tags = [channel.basic_get("picky")[0].delivery_tag for _ in range(3)]
    pass_by(broker.connect().channel(), 200)
    eventually(lambda: "a queue was released from a log" in broker.log_path.read_text())
    eventually(lambda: data_bytes(broker) < BOUND)
    channel.basic_nack(tags[2])
    channel.basic_ack(tags[1])
    channel.basic_nack(tags[0])
    got = [channel.basic_get("picky") for _ in range(4)]
    assert [body for _method, _properties, body in got] == [b"0", b"2", b"3", None]
    assert [method.redelivered for method, _properties, _body in got[:3]] == [True, True, False]
