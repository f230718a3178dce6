"""Short words for what tests do with pika: gather deliveries, empty a queue, expect to be refused."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import ChannelClosedByBroker, ConnectionClosedByBroker

PATIENCE_S = 30.0
PERSISTENT = pika.BasicProperties(delivery_mode=2)


@dataclass(frozen=True, slots=True)
class Got:
    """One delivery, or the answer to a basic.get."""

    body: bytes
    tag: int
    redelivered: bool
    exchange: str
    routing_key: str
    properties: pika.BasicProperties

    @property
    def headers(self) -> dict[str, Any]:
        return dict(self.properties.headers or {})


class Inbox:
    """A consumer that keeps what it gets."""

    def __init__(self, channel: BlockingChannel, queue: str, **settings: Any) -> None:
        self.channel = channel
        self.queue = queue
        self.got: list[Got] = []
        self.tag = channel.basic_consume(queue, self._take, **settings)

    def _take(self, _channel: Any, method: Any, properties: pika.BasicProperties, body: bytes) -> None:
        self.got.append(
            Got(body, method.delivery_tag, method.redelivered, method.exchange, method.routing_key, properties)
        )

    def wait(self, count: int) -> list[Got]:
        """The first `count` deliveries."""
        until = time.monotonic() + PATIENCE_S
        while len(self.got) < count:
            left = until - time.monotonic()
            assert left > 0, f"{len(self.got)} of {count} came: {self.bodies}"
            self.channel.connection.process_data_events(left)
        return self.got[:count]

    def quiet(self) -> list[Got]:
        """All that is there once the broker has nothing more to say."""
        quiesce(self.channel, self.queue)
        return self.got

    @property
    def bodies(self) -> list[bytes]:
        return [one.body for one in self.got]

    def ack(self, one: Got, *, multiple: bool = False) -> None:
        self.channel.basic_ack(one.tag, multiple)


def quiesce(channel: BlockingChannel, queue: str) -> None:
    """Whatever the broker was about to send has come. Asking a queue twice does for RabbitMQ too: the second answer
    is behind all that the queue told the channel before the first."""
    for _ in range(2):
        channel.queue_declare(queue, passive=True)
        channel.connection.process_data_events(0)


def get(channel: BlockingChannel, queue: str, *, auto_ack: bool = True) -> Got | None:
    method, properties, body = channel.basic_get(queue, auto_ack=auto_ack)
    if method is None:
        return None
    return Got(body, method.delivery_tag, method.redelivered, method.exchange, method.routing_key, properties)


def get_all(channel: BlockingChannel, queue: str, *, auto_ack: bool = True) -> list[Got]:
    found: list[Got] = []
    while (one := get(channel, queue, auto_ack=auto_ack)) is not None:
        found.append(one)
    return found


def bodies(channel: BlockingChannel, queue: str) -> list[bytes]:
    """Empties the queue."""
    return [one.body for one in get_all(channel, queue)]


def counts(channel: BlockingChannel, queue: str) -> tuple[int, int]:
    """(ready messages, consumers)."""
    method = channel.queue_declare(queue, passive=True).method
    return method.message_count, method.consumer_count


def publish(channel: BlockingChannel, queue: str, *messages: bytes, **properties: Any) -> None:
    for message in messages:
        channel.basic_publish("", queue, message, pika.BasicProperties(**properties))


def is_there(connection: pika.BlockingConnection, queue: str) -> bool:
    channel = connection.channel()
    try:
        channel.queue_declare(queue, passive=True)
    except ChannelClosedByBroker as error:
        assert error.reply_code == 404, error
        return False
    channel.close()
    return True


@contextmanager
def refused(code: int, text: str = "") -> Iterator[None]:
    """The block ends with the channel closed by the broker for this reason; the connection lives."""
    with pytest.raises(ChannelClosedByBroker) as caught:
        yield
    assert caught.value.reply_code == code, caught.value
    assert text in caught.value.reply_text


@contextmanager
def cut_off(code: int, text: str = "") -> Iterator[None]:
    """The block ends with the connection closed by the broker for this reason."""
    with pytest.raises(ConnectionClosedByBroker) as caught:
        yield
    assert caught.value.reply_code == code, caught.value
    assert text in caught.value.reply_text
