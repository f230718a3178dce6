"""Claims: to want 1 % of a stream costs the broker a fraction of throwing 99 % away. Driver: processes.

A stream of COUNT messages of 100 B, tagged by x-tags, is read from its beginning by two consumers one after the other:
one receives everything, the other asks for the rare tag with x-filter. Both acknowledge in groups and have the same
prefetch; compared is the CPU time of the broker until each has got all of its messages. The client is a few lines over
a socket, so that it waits for the broker and not the broker for it.
`python -m bench.filter 100000` runs it smaller.
"""

import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pamqp import commands, frame, header
from pamqp.body import ContentBody

from bench.claim import Claim
from bench.machine import cpu_s
from bench.peers.headrace import Headrace

COUNT = 400_000
RARE_EACH = 100
SIZE = 100
PREFETCH = 2000
PATIENCE_S = 300.0
_DELIVER = b"\x00\x3c\x00\x3c\x04rare"  # basic.deliver to the consumer of this name
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Client:
    """As much of AMQP as the claim needs, on one channel."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._data = b""
        self.socket.sendall(b"AMQP\x00\x00\x09\x01")
        self._expect("Connection.Start")
        self._send(commands.Connection.StartOk({}, "PLAIN", "\0guest\0guest", "en_US"), 0)
        self._expect("Connection.Tune")
        self._send(commands.Connection.TuneOk(2047, 131_072, 0), 0)
        self._send(commands.Connection.Open("/"), 0)
        self._expect("Connection.OpenOk")
        self._send(commands.Channel.Open())
        self._expect("Channel.OpenOk")

    def _send(self, method: Any, channel: int = 1) -> None:
        self.socket.sendall(frame.marshal(method, channel))

    def _expect(self, name: str) -> Any:
        while True:
            used, _channel, found = frame.unmarshal(self._data) if self._is_whole() else (0, 0, None)
            if found is None:
                data = self.socket.recv(1 << 16)
                if not data:
                    raise RuntimeError(f"the broker closed the connection before {name}")
                self._data += data
                continue
            self._data = self._data[used:]
            if getattr(found, "name", "") == name:
                return found
            if getattr(found, "name", "").endswith(".Close"):
                raise RuntimeError(f"{name} was expected, the broker said: {found.reply_text}")

    def _is_whole(self) -> bool:
        return len(self._data) >= 7 and len(self._data) >= 8 + int.from_bytes(self._data[3:7], "big")

    def declare(self, queue: str) -> int:
        """A stream; returns how many messages it holds."""
        self._send(commands.Queue.Declare(queue=queue, durable=True, arguments={"x-queue-type": "stream"}))
        return int(self._expect("Queue.DeclareOk").message_count)

    def publish(self, queue: str, tags: list[str]) -> None:
        """One message for each, in one write."""
        body = frame.marshal(ContentBody(os.urandom(SIZE)), 1)
        made = {}
        for tag in set(tags):
            properties = commands.Basic.Properties(headers={"x-tags": tag}, delivery_mode=2)
            made[tag] = (
                frame.marshal(commands.Basic.Publish(routing_key=queue), 1)
                + frame.marshal(header.ContentHeader(0, SIZE, properties), 1)
                + body
            )
        self.socket.sendall(b"".join([made[tag] for tag in tags]))

    def consume(self, queue: str, count: int, **arguments: Any) -> None:
        """Take so many messages, acknowledged in groups."""
        self._send(commands.Basic.Qos(prefetch_count=PREFETCH))
        self._expect("Basic.QosOk")
        self._send(
            commands.Basic.Consume(
                queue=queue, consumer_tag="rare", arguments={"x-stream-offset": "first", **arguments}
            )
        )
        self._expect("Basic.ConsumeOk")
        acked = 0
        rest, self._data = self._data, b""
        got = rest.count(_DELIVER)
        while got < count:
            data = self.socket.recv(1 << 18)
            if not data:
                raise RuntimeError("the broker closed the connection")
            # What was counted is not counted again: a mark cut in two is one byte longer than what is kept.
            got += (rest[1 - len(_DELIVER) :] + data).count(_DELIVER)
            rest = data
            if got - acked >= PREFETCH // 4 or got >= count:
                self._send(commands.Basic.Ack(min(got, count), multiple=True))
                acked = got


@contextmanager
def measured(pid: int) -> Iterator[list[float]]:
    spent: list[float] = []
    before = cpu_s(pid)
    yield spent
    spent.append(cpu_s(pid) - before)


def fill(port: int, queue: str, count: int, *, together: bool) -> None:
    client = Client(port)
    client.declare(queue)
    for first in range(0, count, 1000):
        numbers = range(first, first + 1000)
        if together:
            tags = ["rare" if first // 1000 % RARE_EACH == 7 else "often"] * 1000
        else:
            tags = ["rare" if number % RARE_EACH == 7 else "often" for number in numbers]
        client.publish(queue, tags)
    until = time.monotonic() + PATIENCE_S
    while client.declare(queue) < count:
        if time.monotonic() > until:
            raise RuntimeError("the stream did not fill")
        time.sleep(0.2)
    # What is still to be written to the disk is nobody's cost.
    time.sleep(1.5)


def claim(count: int = COUNT) -> list[Claim]:
    rare = count // RARE_EACH
    figures = []
    for together in (False, True):
        with Headrace("amqp").start() as server:
            fill(server.port, "bench", count, together=together)
            with measured(server.pid) as everything:
                Client(server.port).consume("bench", count)
            with measured(server.pid) as filtered:
                Client(server.port).consume("bench", rare, **{"x-filter": "rare"})
        ratio = everything[0] / max(filtered[0], _TICK_S)
        detail = f"{count:,} messages, {everything[0]:.2f} s against {filtered[0]:.2f} s of the broker's CPU time"
        figures.append((ratio, detail))
    (scattered, first), (clustered, second) = figures
    return [
        Claim("a filter for 1 % of a stream beside receiving all, per server-CPU-s", scattered, 5.0, detail=first),
        Claim("the same where the 1 % stand together", clustered, None, detail=second),
    ]


if __name__ == "__main__":
    for one in claim(int(sys.argv[1]) if len(sys.argv) > 1 else COUNT):
        print(f"{one.name}: {one.figure:,.1f} {one.unit} ({one.verdict.value}); {one.detail}")
