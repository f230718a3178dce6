"""Claim: delayed messages are accepted at half the rate of plain durable ones, or more. Driver: sockets, a broker.

One connection publishes persistent messages of 200 B to a durable queue through `headrace serve`, with publisher
confirms and a window of 20,000: plain ones with properties that are all alike, plain ones with a number of their own
in a header, and ones with an `x-delay` of up to thirty days. What is counted is confirmed: on the disk, each time.
Sorting into buckets goes on behind the confirms: each kind begins when the broker has come to rest, and what it spent
on sorting is told apart. The bytes are made beforehand, so the client costs about the same for all.
"""

import os
import socket
import time
from random import Random
from statistics import mean
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
    def __init__(self, port: int, queue: str = "q") -> None:
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
        self._call(commands.Queue.Declare(queue=queue, durable=True), commands.Queue.DeclareOk)
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


def blobs_of(random: Random, header: str | None, queue: str = "q") -> list[bytes]:
    """Runs of messages to a queue; each has a number of its own in this header."""
    value = random.randbytes(VALUE_BYTES)
    return [b"".join(_message(random, value, header, queue) for _ in range(RUN)) for _ in range(20)]


def _message(random: Random, value: bytes, name: str | None, queue: str) -> bytes:
    headers: FieldTable | None = None if name is None else {name: random.randrange(200_000, MONTH_MS)}
    properties = commands.Basic.Properties(delivery_mode=2, headers=headers)
    return (
        frame.marshal(commands.Basic.Publish(exchange="", routing_key=queue), 1)
        + frame.marshal(header.ContentHeader(0, len(value), properties), 1)
        + frame.marshal(body.ContentBody(value), 1)
    )


class Figures:
    """Of one kind of message: rates, and CPU seconds of the broker for each message until it was confirmed, and
    until the broker had come to rest, which is the mean: what one turn leaves unsorted the next one sorts."""

    def __init__(self, header: str | None) -> None:
        self._blobs = blobs_of(Random(1), header)
        self.rates: list[float] = []
        self.accepting: list[float] = []
        self.all_in: list[float] = []

    def measure(self, publisher: Publisher, pid: int, count: int) -> None:
        before = cpu_s(pid)
        self.rates.append(publisher.publish(self._blobs, count))
        self.accepting.append((cpu_s(pid) - before) / count)
        self.all_in.append((_at_rest(pid) - before) / count)


def _at_rest(pid: int) -> float:
    """CPU seconds of the process, once it spends next to none."""
    spent = cpu_s(pid)
    while True:
        time.sleep(0.5)
        before, spent = spent, cpu_s(pid)
        if spent - before < 0.03:
            return spent


def claim() -> list[Claim]:
    """The best of each, in turns, by the clock and by what the broker's processor spent."""
    count = int(os.environ.get("N", COUNT))
    plain, unique, delayed = Figures(None), Figures("n"), Figures("x-delay")
    with Headrace("amqp").start() as running:
        publisher = Publisher(running.port)
        publisher.publish(blobs_of(Random(1), None), 20_000)
        for _ in range(3):
            for one in (plain, unique, delayed):
                one.measure(publisher, running.pid, count)
    per_cpu = min(plain.accepting) / min(delayed.accepting)
    detail = (
        f"until confirmed; with all sorting {mean(plain.all_in) / mean(delayed.all_in):.2f}; beside plain ones with a "
        f"header of their own {min(unique.accepting) / min(delayed.accepting):.2f}, with all sorting "
        f"{mean(unique.all_in) / mean(delayed.all_in):.2f}"
    )
    rates = f"{max(delayed.rates):,.0f}/s beside {max(plain.rates):,.0f}/s, with own headers {max(unique.rates):,.0f}/s"
    return [
        Claim("delayed accepted beside plain durable, AMQP, per CPU second", per_cpu, 0.5, detail=detail),
        Claim("the same by the clock", max(delayed.rates) / max(plain.rates), 0.5, detail=rates),
    ]


if __name__ == "__main__":
    for one in claim():
        print(one.verdict.value, one.name, f"{one.figure:.2f}", one.detail)
