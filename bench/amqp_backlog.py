"""Claims: five million messages in one queue cost no memory, a restart is quick, the drain is fast. Driver: processes.

Publishes BACKLOG messages of 100 B to a durable queue with nobody reading, ends the broker by kill -9, starts it again
on the same data, and drains. The tail rate beside which the drain stands is A1's, from the same broker.
`python -m bench.amqp_backlog 100000` runs it smaller.
"""

import json
import subprocess
import sys
import time

from bench.claim import Better, Claim
from bench.peers.headrace import doors_of
from bench.peers.peer import private_directory, process
from bench.scenarios import loadgen

BACKLOG = 5_000_000
SAFE = ("--persistent", "1", "--durable", "--confirm", "1000", "--prefetch", "1000", "--size", "100")


def claim(count: int = BACKLOG) -> list[Claim]:
    with private_directory("backlog") as home:
        log, again = home / "log", home / "log-again"
        command = [sys.executable, "-m", "headrace", "serve", "--data", str(home / "data"), "--amqp", "127.0.0.1:0"]
        with process(command, log, lambda: doors_of(log.read_text()) is not None) as server:
            port = (doors_of(log.read_text()) or {})["amqp"]
            tail = run_loadgen(port, server.pid, *SAFE, "--seconds", "5", "--prefix", "tail")
            filled = run_loadgen(port, server.pid, *SAFE, "--publish-only", "--keep", "--count", str(count))
            server.kill()
            server.wait()
        began = time.monotonic()
        with process(command, again, lambda: doors_of(again.read_text()) is not None) as server:
            port = (doors_of(again.read_text()) or {})["amqp"]
            tasted = run_loadgen(port, server.pid, *SAFE, "--consume-only", "--no-declare", "--keep", "--count", "1")
            first = time.monotonic() - began
            # Without a count it takes as many as the queue says it has.
            drained = run_loadgen(port, server.pid, *SAFE, "--consume-only", "--no-declare")
    rss = max(filled["server_peak_rss_kb"], drained["server_peak_rss_kb"]) / 1024
    rate = drained["received_per_server_cpu_s"] / tail["received_per_server_cpu_s"]
    lost = count - tasted["received"] - drained["received"]
    detail = f"{count:,} messages of 100 B, {lost:,} of the confirmed ones missing after kill -9"
    return [
        Claim("resident memory with the backlog", rss, 500.0, Better.LESS, "MB", detail),
        Claim("kill -9 to first delivery", first, 10.0, Better.LESS, "s", detail),
        Claim("drain beside the tail rate, per server-CPU-s", rate, 0.5, detail=detail),
        Claim("confirmed messages lost", float(max(lost, 0)), 0.0, Better.LESS, "messages", detail),
    ]


def run_loadgen(port: int, pid: int, *flags: str, proto: str = "amqp") -> dict[str, float]:
    command = [
        loadgen(),
        "--proto",
        proto,
        "--port",
        str(port),
        "--server-pid",
        str(pid),
        "--quiet",
    ]
    done = subprocess.run([*command, "--allow-loss", *flags], capture_output=True, text=True, check=False)
    result: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    if result.get("errors"):
        raise RuntimeError(f"loadgen {' '.join(flags)}: {result.get('error_text')}")
    return result


if __name__ == "__main__":
    for one in claim(int(sys.argv[1]) if len(sys.argv) > 1 else BACKLOG):
        wanted = f"{one.better.value} {one.target}: {one.verdict.value}"
        print(f"{one.name}: {one.figure:,.2f} {one.unit} ({wanted}); {one.detail}")
