"""Claims: one forgotten message does not hold the disk, and is still there after kill -9. Driver: processes.

A queue that wants little of an exchange gets one message, which a client takes and never acknowledges; then 1 GiB goes
through the exchange, whose retention is 64 MiB. The broker is ended by kill -9 and started again: the message comes.
`python -m bench.amqp_release 64` runs it with so many MiB, and a retention in proportion.
"""

import os
import signal
import sys
import time
from pathlib import Path

import pika
from pika.adapters.blocking_connection import BlockingChannel

from bench.claim import Better, Claim
from bench.peers.headrace import doors_of
from bench.peers.peer import private_directory, process

MIB = 1 << 20
THROUGH_MIB = 1024
BODY_BYTES = 64 * 1024
# So long retention, which works once a second, has for the last of it.
SETTLE_S = 5.0


def claim(through_mib: int = THROUGH_MIB) -> list[Claim]:
    retention_mib = max(through_mib // 16, 1)
    with private_directory("release") as home:
        log, again, data = home / "log", home / "log-again", home / "data"
        command = [sys.executable, "-m", "headrace", "serve", "--data", str(data), "--amqp", "127.0.0.1:0"]
        command += [flag for door in ("mqtt", "ws", "http") for flag in (f"--{door}", "off")]
        environ = dict(os.environ, HEADRACE_STORAGE__RETENTION_BYTES=f"{retention_mib}MiB")
        with process(command, log, lambda: doors_of(log.read_text()) is not None, environ) as server:
            peak = _publish(log, data, through_mib)
            time.sleep(SETTLE_S)
            left = directory_bytes(data)
            server.send_signal(signal.SIGKILL)
            server.wait()
        with process(command, again, lambda: doors_of(again.read_text()) is not None, environ):
            method, _properties, body = _connect(again).basic_get("picky")
    came = body == b"precious" and method.redelivered
    detail = f"{through_mib:,} MiB through the exchange, retention {retention_mib:,} MiB, {peak / MIB:,.0f} MiB at most"
    return [
        Claim("data directory beside one unacked message", left / MIB, 4.0 * retention_mib, Better.LESS, "MiB", detail),
        Claim("the message comes after kill -9", float(came), 1.0, unit="of 1", detail=detail),
    ]


def _connect(log: Path) -> BlockingChannel:
    port = (doors_of(log.read_text()) or {})["amqp"]
    return pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", port, heartbeat=0)).channel()


def _publish(log: Path, data: Path, through_mib: int) -> int:
    """Returns the most that the data directory had meanwhile."""
    holder, channel = _connect(log), _connect(log)
    channel.exchange_declare("events", "topic", durable=True)
    channel.queue_declare("picky", durable=True)
    channel.queue_bind("picky", "events", "rare")
    channel.confirm_delivery()
    persistent = pika.BasicProperties(delivery_mode=2)
    channel.basic_publish("events", "rare", b"precious", persistent)
    holder.basic_get("picky")
    # What does not compress: as much is stored as goes through.
    body = os.urandom(BODY_BYTES)
    peak = 0
    for number in range(through_mib * MIB // BODY_BYTES):
        channel.basic_publish("events", "common", body, persistent)
        if number % 256 == 0:
            peak = max(peak, directory_bytes(data))
    return peak


def directory_bytes(folder: Path) -> int:
    """What it takes of the disk. Files may go meanwhile."""
    total = 0
    for at, _folders, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(at) / name).stat().st_blocks * 512
            except FileNotFoundError:
                continue
    return total


if __name__ == "__main__":
    for one in claim(int(sys.argv[1]) if len(sys.argv) > 1 else THROUGH_MIB):
        wanted = f"{one.better.value} {one.target}: {one.verdict.value}"
        print(f"{one.name}: {one.figure:,.2f} {one.unit} ({wanted}); {one.detail}")
