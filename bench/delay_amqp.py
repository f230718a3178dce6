"""Claim: delayed messages are accepted at half the rate of plain durable ones, or more. Driver: sockets, a broker.

One connection publishes persistent messages of 200 B to a durable queue through `headrace serve`, with publisher
confirms and a window of 20,000, first plain and then with an `x-delay` of up to thirty days in each. What is counted is
confirmed: on the disk, both times. The bytes are made beforehand, so the client costs about the same for both.
"""

import os
import socket
import time
from random import Random
from typing import TypeVar

from pamqp import base, body, commands, frame, header
from pamqp.common import FieldTable
from pamqp.heartbeat import Heartbeat

from bench.claim import Claim
from bench.machine import cpu_s
from bench.peers.headrace import Headrace

T = TypeVar("T")
COUNT = 200_000
RUN = 500
WINDOW = 20_000
MONTH_MS = 30 * 24 * 3600 * 1000
VALUE_BYTES = 200


class Publisher:
    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._data = b""
        self._socket.sendall(b"AMQP\x00\x00\x09\x01")
        self._expect(commands.Connection.Start)
        self._send(commands.Connection.StartOk({}, "PLAIN", "\0guest\0guest", "en_US"), 0)
        tune = self._expect(commands.Connection.Tune)
        self._send(commands.Connection.TuneOk(tune.channel_max, tune.frame_max, 0), 0)
        self._call(commands.Connection.Open("/"), commands.Connection.OpenOk, 0)
        self._call(commands.Channel.Open(), commands.Channel.OpenOk)
        self._call(commands.Queue.Declare(queue="q", durable=True), commands.Queue.DeclareOk)
        self._call(commands.Confirm.Select(), commands.Confirm.SelectOk)
        self._acked = 0
        self._sent = 0

    def _send(self, method: base.Frame, channel: int = 1) -> None:
        self._socket.sendall(frame.marshal(method, channel))

    def _call(self, method: base.Frame, answer: type[base.Frame], channel: int = 1) -> None:
        self._send(method, channel)
        self._expect(answer)

    def _expect(self, kind: type[T]) -> T:
        while True:
            found = self._next()
            if isinstance(found, kind):
                return found

    def _next(self) -> object:
        while True:
            consumed, _channel, value = frame.unmarshal(self._data) if len(self._data) >= 8 else (0, 0, None)
            if consumed:
                self._data = self._data[consumed:]
                if not isinstance(value, Heartbeat):
                    return value
            else:
                more = self._socket.recv(1 << 16)
                if not more:
                    raise ConnectionError("the broker closed the connection")
                self._data += more

    def publish(self, blobs: list[bytes], count: int) -> float:
        """Publish and wait for every confirm; returns messages per second."""
        goal = self._sent + count
        begun = time.perf_counter()
        while self._sent < goal:
            while self._sent - self._acked > WINDOW:
                self._take_ack()
            self._socket.sendall(blobs[self._sent // RUN % len(blobs)])
            self._sent += RUN
        while self._acked < goal:
            self._take_ack()
        return count / (time.perf_counter() - begun)

    def _take_ack(self) -> None:
        ack = self._expect(commands.Basic.Ack)
        self._acked = max(self._acked, ack.delivery_tag)


def blobs_of(random: Random, *, delayed: bool) -> list[bytes]:
    value = random.randbytes(VALUE_BYTES)
    return [b"".join(_message(random, value, delayed) for _ in range(RUN)) for _ in range(20)]


def _message(random: Random, value: bytes, delayed: bool) -> bytes:
    headers: FieldTable | None = {"x-delay": random.randrange(200_000, MONTH_MS)} if delayed else None
    properties = commands.Basic.Properties(delivery_mode=2, headers=headers)
    return (
        frame.marshal(commands.Basic.Publish(exchange="", routing_key="q"), 1)
        + frame.marshal(header.ContentHeader(0, len(value), properties), 1)
        + frame.marshal(body.ContentBody(value), 1)
    )


def claim() -> list[Claim]:
    """The rate of the one beside the other, in turns, by the clock and by what the broker's processor spent."""
    count = int(os.environ.get("N", COUNT))
    random = Random(1)
    plain_blobs, delayed_blobs = blobs_of(random, delayed=False), blobs_of(random, delayed=True)
    plain: list[float] = []
    delayed: list[float] = []
    spent: list[float] = []
    with Headrace("amqp").start() as running:
        publisher = Publisher(running.port)
        publisher.publish(plain_blobs, 20_000)
        for _ in range(3):
            before = cpu_s(running.pid)
            plain.append(publisher.publish(plain_blobs, count))
            between = cpu_s(running.pid)
            delayed.append(publisher.publish(delayed_blobs, count))
            spent.append((between - before) / max(cpu_s(running.pid) - between, 0.01))
    best = max(delayed) / max(plain)
    detail = f"{max(delayed):,.0f}/s beside {max(plain):,.0f}/s; per CPU second of the broker {max(spent):.2f}"
    return [Claim("delayed accepted beside plain durable, AMQP", best, 0.5, detail=detail)]


if __name__ == "__main__":
    for one in claim():
        print(one.verdict.value, one.name, f"{one.figure:.2f}", one.detail)
