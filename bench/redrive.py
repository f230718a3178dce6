"""Claim: a million dead letters go back at no less than a third of the plain durable publish rate. Driver: processes.

The plain rate is that of a publisher with confirms to a durable queue, in messages per server-CPU-second, in the same
broker. The dead letters die of a length limit, all in one queue, and go to another by one redrive over HTTP.
`python -m bench.redrive 100000` runs it smaller.
"""

import base64
import json
import sys
import time
import urllib.request
from random import Random
from typing import Any

import pika

from bench.amqp_backlog import run_loadgen
from bench.claim import Better, Claim
from bench.delay_amqp import RUN, Publisher, blobs_of
from bench.machine import cpu_s
from bench.peers.headrace import doors_of
from bench.peers.peer import private_directory, process

DEAD = 1_000_000
SAFE = ("--persistent", "1", "--durable", "--confirm", "1000", "--size", "100", "--publish-only", "--keep")
CONFIG = """
[[policies]]
name = "doomed"
vhost = "/"
pattern = "^doomed"
definition = { max-length = 0, dead-letter-exchange = "", dead-letter-routing-key = "grave" }
"""


class Http:
    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1/"
        self._login = base64.b64encode(b"guest:guest").decode()

    def ask(self, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"authorization": f"Basic {self._login}", "content-type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(self._url + path, data, headers)) as answer:
            return json.load(answer)


def claim(count: int = DEAD) -> list[Claim]:
    alike, missing, detail = _measured(count)
    differing, also_missing, other = _measured(count // 10, "--unique-properties")
    traced, missing_too, third = _measured(count // 10 // RUN * RUN, header="trace")
    lost = missing + also_missing + missing_too
    name = "redrive beside plain durable publishing, per server-CPU-s"
    return [
        Claim(name, alike, 1 / 3, detail=detail),
        Claim(f"{name}, each message with an id of its own", differing, 1 / 3, detail=other),
        Claim(f"{name}, each message with a header of its own", traced, 1 / 3, detail=third),
        Claim("dead letters that did not arrive once", lost, 0.0, Better.LESS, "messages", detail),
    ]


def _measured(count: int, *flags: str, header: str | None = None) -> tuple[float, float, str]:
    """(ratio, how many did not arrive once, in words); `header`: in which each message has a number of its own."""

    def publish(queue: str) -> None:
        if header is None:
            run_loadgen(doors["amqp"], server.pid, *SAFE, *flags, "--prefix", queue, "--count", str(count))
        else:
            Publisher(doors["amqp"], queue).publish(blobs_of(Random(1), header, queue), count)

    with private_directory("redrive") as home:
        log, config = home / "log", home / "headrace.toml"
        config.write_text(CONFIG)
        command = [sys.executable, "-m", "headrace", "serve", "--config", str(config), "--data", str(home / "data")]
        command += ["--amqp", "127.0.0.1:0", "--http", "127.0.0.1:0", "--mqtt", "off", "--ws", "off"]
        with process(command, log, lambda: doors_of(log.read_text()) is not None) as server:
            doors = doors_of(log.read_text()) or {}
            parameters = pika.ConnectionParameters("127.0.0.1", doors["amqp"])
            with pika.BlockingConnection(parameters) as connection:
                for name in ("grave", "again"):
                    connection.channel().queue_declare(name, durable=True)
            plain_s = -cpu_s(server.pid)
            publish("plain")
            plain_s += cpu_s(server.pid)
            publish("doomed")
            http = Http(doors["http"])
            while http.ask("queues/grave")["ready"] < count:
                time.sleep(0.2)
            began, moving_s = time.monotonic(), -cpu_s(server.pid)
            started = http.ask("redrives", {"queue": "grave", "to": "again"})
            while (now := http.ask(f"redrives/{started['id']}"))["state"] == "running":
                time.sleep(0.2)
            moving_s += cpu_s(server.pid)
            seconds = time.monotonic() - began
            arrived = http.ask("queues/again")["ready"]
    told = f"{count:,} dead letters in {seconds:.1f} s: {1e6 * moving_s / count:.1f} us of CPU each"
    told += f"; a publish took {1e6 * plain_s / count:.1f} us"
    return plain_s / moving_s, float(count - arrived + abs(now["moved"] - count)), told


if __name__ == "__main__":
    for one in claim(int(sys.argv[1]) if len(sys.argv) > 1 else DEAD):
        wanted = "no target" if one.target is None else f"{one.better.value} {one.target:.2f}: {one.verdict.value}"
        print(f"{one.name}: {one.figure:,.2f} {one.unit} ({wanted}); {one.detail}")
