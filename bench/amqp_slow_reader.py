"""Claims: a consumer that stops reading costs one buffer, and its neighbour is unharmed. Driver: processes.

A consumer without prefetch subscribes and never reads its socket again; then COUNT messages of 1 KiB go through the
same queue, which a second consumer drains. The same load runs once before, without it, so that caches are full.
`python -m bench.amqp_slow_reader 50000` runs it smaller.
"""

import sys

import pika

from bench.amqp_backlog import run_loadgen
from bench.claim import Better, Claim
from bench.peers.headrace import Headrace

COUNT = 1_000_000


def claim(count: int = COUNT) -> list[Claim]:
    flags = ("--size", "1024", "--persistent", "1", "--durable", "--confirm", "1000")
    with Headrace("amqp").start() as server:
        run_loadgen(server.port, server.pid, *flags, "--prefix", "warm", "--count", str(count // 4))
        connection = pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", server.port, heartbeat=0))
        channel = connection.channel()
        channel.queue_declare("slow-q0", durable=True)
        channel.basic_consume("slow-q0", lambda *delivery: None)
        # From here on nobody reads this socket.
        load = run_loadgen(server.port, server.pid, *flags, "--prefix", "slow", "--no-declare", "--count", str(count))
        connection.close()
    grown = (load["server_peak_rss_kb"] - load["server_start_rss_kb"]) / 1024
    share = load["received"] / count
    detail = f"{count:,} messages of 1 KiB; the other consumer got {load['received']:,.0f} of them"
    return [
        Claim("resident memory grown while a reader sleeps", grown, 64.0, Better.LESS, "MB", detail),
        Claim("share of the messages that the other consumer got", share, 0.99, detail=detail),
    ]


if __name__ == "__main__":
    for one in claim(int(sys.argv[1]) if len(sys.argv) > 1 else COUNT):
        print(f"{one.name}: {one.figure:,.3f} {one.unit} (target {one.target}: {one.verdict.value}); {one.detail}")
