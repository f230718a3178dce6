"""What the tests of the log's powers over AMQP share: a broker that is restarted and looked into, and readers."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pika
from pika.adapters.blocking_connection import BlockingChannel
from tests.running_broker import RunningBroker

PATIENCE_S = 60


class Served(RunningBroker):
    def restart(self, *, kill: bool = False) -> None:
        self.kill() if kill else self.stop()
        self.start()

    def dumped(self, stream: str, *, batches: bool = False) -> list[dict[str, Any]]:
        """What the log of a stream holds, as `headrace log dump` finds it. The broker must be stopped."""
        assert self.process is None
        what = "--batches" if batches else "--records"
        command = [sys.executable, "-m", "headrace", "log", "dump", "--json", what, "--stream", stream, str(self.data)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S)
        return [json.loads(line) for line in done.stdout.splitlines()]

    @contextmanager
    def connected(self) -> Iterator[pika.BlockingConnection]:
        connection = self.connect()
        try:
            yield connection
        finally:
            if connection.is_open:
                connection.close()

    @contextmanager
    def channel(self) -> Iterator[BlockingChannel]:
        with self.connected() as connection:
            yield connection.channel()


@contextmanager
def served(folder: Path, *, config: str = "") -> Iterator[Served]:
    with Served(folder, config=config) as broker:
        yield broker


Message = tuple[Any, pika.BasicProperties, bytes]


class Reader:
    """A consumer whose deliveries are gathered as they come."""

    def __init__(
        self, channel: BlockingChannel, queue: str, *, arguments: Mapping[str, Any] | None = None, no_ack: bool = False
    ) -> None:
        self.channel = channel
        self.got: list[Message] = []
        self.tag = channel.basic_consume(
            queue,
            lambda _channel, method, properties, body: self.got.append((method, properties, body)),
            auto_ack=no_ack,
            arguments=arguments,
        )

    def wait(self, count: int) -> list[Message]:
        """The first so many deliveries; fails when they do not come."""
        until = time.monotonic() + PATIENCE_S
        while len(self.got) < count:
            # It returns for any event of the connection's, also for none of ours.
            self.channel.connection.process_data_events(max(0, until - time.monotonic()))
            assert len(self.got) >= count or time.monotonic() < until, f"{len(self.got)} of {count} deliveries came"
        return self.got[:count]

    def bodies(self, count: int) -> list[bytes]:
        return [body for _method, _properties, body in self.wait(count)]

    def offsets(self, count: int) -> list[int]:
        return [properties.headers["x-stream-offset"] for _method, properties, _body in self.wait(count)]

    def ack(self) -> None:
        """Everything that came."""
        self.channel.basic_ack(self.got[-1][0].delivery_tag, multiple=True)


def ready_count(channel: BlockingChannel, queue: str) -> int:
    return int(channel.queue_declare(queue, passive=True).method.message_count)


def publish_all(channel: BlockingChannel, exchange: str, key: str, bodies: list[bytes]) -> None:
    """Persistent, and committed when this returns: the channel is in confirm mode, or gets into it."""
    if not channel._delivery_confirmation:
        channel.confirm_delivery()
    for body in bodies:
        channel.basic_publish(exchange, key, body, pika.BasicProperties(delivery_mode=2))
