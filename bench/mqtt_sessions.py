"""Claims: sleeping MQTT sessions cost publishers nothing, and those who wake share the work. Driver: sockets.

SLEEPERS lasting sessions, each with a subscription that matches everything, fall asleep; then the same load runs as
before there were any. WAKERS sessions with a topic of their own sleep while RECORDS messages go by, and wake within a
few seconds; what that costs is told in scans, one scan being what a single session costs that wakes over the same.
`python -m bench.mqtt_sessions 1000 100 20000` runs it smaller; a scan is then so short that the last claim says little.
It takes five minutes on two cores.
"""

import resource
import selectors
import socket
import struct
import sys
import time
from collections.abc import Iterator, Sequence

from bench.amqp_backlog import run_loadgen
from bench.claim import Better, Claim
from bench.machine import cpu_s
from bench.peers.headrace import Headrace
from headrace.gateways.mqtt.encoder import encode_ack_run, encode_packet, encode_publish_run
from headrace.gateways.mqtt.packets import Connect, Disconnect, QoS, Subscribe, Subscription
from headrace.gateways.mqtt.reasons import PacketType, Version

SLEEPERS = 100_000
WAKERS = 10_000
RECORDS = 1_000_000
TOGETHER = 200
PAYLOAD = b"x" * 100
V3 = Version.V3_1_1


def connect_packet(client_id: str) -> bytes:
    return encode_packet(Connect(client_id, V3, clean_start=False), V3)


def subscribe_packet(topic_filter: str) -> bytes:
    return encode_packet(Subscribe(1, (Subscription(topic_filter, QoS.AT_LEAST_ONCE),)), V3)


def receive(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = sock.recv(65_536)
        if not more:
            raise RuntimeError("the broker closed a connection")
        data += more
    return data


def opened(port: int) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), timeout=60)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def put_to_sleep(port: int, names: Sequence[tuple[str, str]]) -> None:
    """(client id, filter): each subscribes and goes."""
    goodbye = encode_packet(Disconnect(), V3)
    for first in range(0, len(names), TOGETHER):
        group = names[first : first + TOGETHER]
        sockets = []
        for client_id, topic_filter in group:
            sock = opened(port)
            sock.sendall(connect_packet(client_id) + subscribe_packet(topic_filter))
            sockets.append(sock)
        for sock in sockets:
            receive(sock, 4 + 5)
            sock.sendall(goodbye)
            sock.close()


def publish(port: int, topics: int, count: int) -> None:
    """Message n to topic n mod `topics`, with QoS 1."""
    with opened(port) as sock:
        sock.sendall(encode_packet(Connect("publisher", V3), V3))
        receive(sock, 4)
        for first in range(0, count, 1000):
            numbers = range(first, min(first + 1000, count))
            names = [b"dev/%d" % (number % topics) for number in numbers]
            ids = range(1, len(numbers) + 1)
            blobs = [b""] * len(numbers)
            sock.sendall(encode_publish_run(0x32, names, blobs, [PAYLOAD] * len(numbers), ids, V3))
            receive(sock, 4 * len(numbers))


class Waker:
    """One that wakes, takes what it missed, and acknowledges it."""

    def __init__(self, port: int, client_id: str) -> None:
        self.socket = opened(port)
        self.socket.sendall(connect_packet(client_id))
        self.count = 0
        self._data = b""
        self._greeted = False

    def take(self) -> None:
        more = self.socket.recv(1 << 20)
        if not more:
            raise RuntimeError("the broker closed a connection")
        data = self._data + more
        at = 0
        if not self._greeted:
            if len(data) < 4:
                self._data = data
                return
            self._greeted, at = True, 4
        ids: list[int] = []
        while True:
            found = _publish_at(data, at)
            if found is None:
                break
            packet_id, at = found
            ids.append(packet_id)
        self._data = data[at:]
        if ids:
            self.count += len(ids)
            self.socket.sendall(encode_ack_run(PacketType.PUBACK, ids))


def _publish_at(data: bytes, at: int) -> tuple[int, int] | None:
    """(packet id, position behind it) of a whole PUBLISH with QoS 1."""
    size, shift, pos = 0, 0, at + 1
    while True:
        if pos >= len(data):
            return None
        byte = data[pos]
        size |= (byte & 0x7F) << shift
        pos += 1
        shift += 7
        if byte < 0x80:
            break
    if pos + size > len(data):
        return None
    (length,) = struct.unpack_from(">H", data, pos)
    (packet_id,) = struct.unpack_from(">H", data, pos + 2 + length)
    return packet_id, pos + size


def wake(port: int, expected: Iterator[tuple[str, int]]) -> int:
    """(client id, messages it missed): all of them are taken. Returns how many came."""
    wakers = selectors.DefaultSelector()
    total = 0
    pending: dict[Waker, int] = {}
    for client_id, count in expected:
        waker = Waker(port, client_id)
        waker.socket.setblocking(False)
        pending[waker] = count
        wakers.register(waker.socket, selectors.EVENT_READ, waker)
    until = time.monotonic() + 300
    while pending:
        if time.monotonic() > until:
            raise RuntimeError(f"{len(pending)} sessions did not get what they missed")
        for key, _events in wakers.select(1):
            waker = key.data
            waker.take()
            if waker in pending and waker.count >= pending[waker]:
                total += waker.count
                del pending[waker]
    for key in list(wakers.get_map().values()):
        key.data.socket.close()
    return total


def allow_sockets(count: int) -> None:
    """For this process and the brokers that it starts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        raise RuntimeError(f"{count:,} open files are needed and {hard:,} allowed; see ulimit -Hn")
    if soft != resource.RLIM_INFINITY and soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


def claim(sleepers: int = SLEEPERS, wakers: int = WAKERS, records: int = RECORDS) -> list[Claim]:
    allow_sockets(wakers + 1_000)
    load = ("--qos", "1", "--inflight", "100", "--size", "100", "--seconds", "4")
    with Headrace("mqtt").start() as server:
        port, pid = server.port, server.pid
        run_loadgen(port, pid, *load, "--prefix", "warm", proto="mqtt")
        before = run_loadgen(port, pid, *load, "--prefix", "before", proto="mqtt")
        put_to_sleep(port, [(f"sleeper-{number}", "#") for number in range(sleepers)])
        after = run_loadgen(port, pid, *load, "--prefix", "after", proto="mqtt")
        again = run_loadgen(port, pid, *load, "--prefix", "again", proto="mqtt")
    ratio = max(after["sent_per_server_cpu_s"], again["sent_per_server_cpu_s"]) / before["sent_per_server_cpu_s"]
    with Headrace("mqtt").start() as server:
        port, pid = server.port, server.pid
        put_to_sleep(port, [("one", "dev/0"), ("all", "#"), *((f"w{n}", f"dev/{n}") for n in range(wakers))])
        publish(port, wakers, records)
        each = records // wakers
        began = cpu_s(pid)
        wake(port, iter([("one", each)]))
        scan_s = cpu_s(pid) - began
        began, clock = cpu_s(pid), time.monotonic()
        wake(port, iter([("all", records)]))
        all_s, all_wall_s = cpu_s(pid) - began, time.monotonic() - clock
        began = cpu_s(pid)
        took = wake(port, ((f"w{number}", each) for number in range(wakers)))
        shared_s = cpu_s(pid) - began
    scans = shared_s / max(scan_s, 0.01)
    return [
        Claim(
            f"publishing with {sleepers:,} sleeping sessions beside none, per server-CPU-s",
            ratio,
            0.9,
            detail=f"{before['sent_per_server_cpu_s']:,.0f} before, {after['sent_per_server_cpu_s']:,.0f} after",
        ),
        Claim(
            "messages per server-CPU-s of a session that wakes",
            records / max(all_s, 0.01),
            100_000.0,
            unit="msg/CPU-s",
            detail=f"{records:,} messages, {records / all_wall_s:,.0f} per second with this client",
        ),
        Claim(
            f"{wakers:,} sessions that wake over {records:,} records, in scans",
            scans,
            wakers / 20,
            Better.LESS,
            "scans",
            f"{shared_s:.2f} CPU-s for {took:,} messages; one scan {scan_s:.2f} CPU-s",
        ),
    ]


if __name__ == "__main__":
    for one in claim(*map(int, sys.argv[1:])):
        wanted = f"{one.better.value} {one.target}: {one.verdict.value}"
        print(f"{one.name}: {one.figure:,.2f} {one.unit} ({wanted}); {one.detail}")
