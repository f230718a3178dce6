"""A broker in a process of its own, and pika connections to it: what the client-driven tests of this folder share."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pika
from pika.adapters.blocking_connection import BlockingChannel

PATIENCE_S = 60


class Served:
    """`headrace serve` on a data directory; stopped in good order, killed, and started again as a test wants it."""

    def __init__(self, data: Path, *, config: str = "") -> None:
        self.data = data
        self._arguments: list[str] = []
        if config:
            path = data.with_suffix(".toml")
            path.write_text(config)
            self._arguments = ["--config", str(path)]
        self._process: subprocess.Popen[str] | None = None
        self.port = 0

    def start(self) -> None:
        command = [sys.executable, "-m", "headrace", "serve", "--data", str(self.data), "--amqp", "127.0.0.1:0"]
        self._process = subprocess.Popen(
            [*command, "--log-level", "error", *self._arguments], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        found = re.search(r"amqp=127\.0\.0\.1:(\d+)", self._process.stdout.readline())
        assert found, "the broker did not start"
        self.port = int(found[1])

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def stop(self) -> None:
        """SIGTERM; the broker must end clean."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        assert self._ended() == 0

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._ended()

    def _ended(self) -> int:
        assert self._process is not None and self._process.stdout is not None
        status = self._process.wait(PATIENCE_S)
        self._process.stdout.close()
        self._process = None
        return status

    def restart(self, *, kill: bool = False) -> None:
        self.kill() if kill else self.stop()
        self.start()

    def dumped(self, stream: str, *, batches: bool = False) -> list[dict[str, Any]]:
        """What the log of a stream holds, as `headrace log dump` finds it. The broker must be stopped."""
        assert self._process is None
        what = "--batches" if batches else "--records"
        command = [sys.executable, "-m", "headrace", "log", "dump", "--json", what, "--stream", stream, str(self.data)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S)
        return [json.loads(line) for line in done.stdout.splitlines()]

    @contextmanager
    def connected(self) -> Iterator[pika.BlockingConnection]:
        connection = pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", self.port))
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
def served(data: Path, *, config: str = "") -> Iterator[Served]:
    broker = Served(data, config=config)
    broker.start()
    try:
        yield broker
    finally:
        if broker._process is not None:
            broker.kill()


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

    def settled(self) -> list[Message]:
        """Everything that comes before the broker answers a question asked now."""
        self.channel.basic_qos(0)
        self.channel.connection.process_data_events(0)
        return self.got


def ready_count(channel: BlockingChannel, queue: str) -> int:
    return int(channel.queue_declare(queue, passive=True).method.message_count)
