"""Claims: MQTT beside Mosquitto, NATS and amqtt, in one interleaved run. Driver: processes.

Ours logs every message and syncs to disk before it acknowledges QoS 1 and 2; Mosquitto keeps them in memory only and,
by default, drops what a subscriber is more than 1,000 messages behind. So QoS 1 and 2 are also compared with a
Mosquitto that drops nothing. PROMISES says what is compared, and by how much.
A part of it: `python -m bench.mqtt_throughput --only M2,M7 --seconds 3`
"""

from collections.abc import Collection

from bench.claim import Better, Claim
from bench.comparison import OURS, Measure, Pass, Promise, broken_promise, judge, play_all, try_out, wanted_by
from bench.peers.amqtt import Amqtt
from bench.peers.headrace import Headrace
from bench.peers.mosquitto import Mosquitto
from bench.peers.nats import Nats

SECONDS = 5.0
PEERS = (Mosquitto(), Mosquitto(unbounded=True), Nats(), Amqtt())
PROMISES = tuple(
    Promise(scenario, peer, measure, target)
    for scenario, measure, targets in (
        ("M1", Measure.EFFICIENCY, {"mosquitto": 3.0, "nats": None, "amqtt": None}),
        ("M2", Measure.EFFICIENCY, {"mosquitto": 2.0, "mosquitto-unbounded": 2.0, "nats": None, "amqtt": None}),
        ("M3", Measure.EFFICIENCY, {"mosquitto": 1.5, "mosquitto-unbounded": 1.5}),
        ("M4", Measure.EFFICIENCY, {"mosquitto": 20.0, "nats": 1.0}),
        ("M5", Measure.EFFICIENCY, {"mosquitto": 1.5, "mosquitto-unbounded": 1.5}),
        ("M6", Measure.SPEED, {"mosquitto": None}),
        ("M8", Measure.EFFICIENCY, {"mosquitto": 1.0, "mosquitto-unbounded": 1.0}),
    )
    for peer, target in targets.items()
)
IDLE = "M7"
# Resident above the base, and connections accepted per CPU second of the broker.
IDLE_KB_MAX = 15.0
IDLE_CONNECTS_MIN = 1000.0
PLAYED = (*dict.fromkeys(promise.scenario for promise in PROMISES), IDLE)


def measure(scenarios: Collection[str], seconds: float) -> list[Claim]:
    promises = [promise for promise in PROMISES if promise.scenario in scenarios]
    wanted = wanted_by(promises)
    if IDLE in scenarios:
        wanted.add((IDLE, OURS))
    done = play_all(Headrace("mqtt"), PEERS, wanted, seconds)
    claims = [judge(promise, done) for promise in promises]
    return claims + idle_claims(done) if IDLE in scenarios else claims


def idle_claims(done: Pass) -> list[Claim]:
    result = done.results[IDLE, OURS]
    memory, connects = f"{IDLE}, memory of an idle connection", f"{IDLE}, connects per server-CPU-s"
    broken = broken_promise(result)
    if broken is not None:
        return [
            Claim(memory, float("inf"), IDLE_KB_MAX, Better.LESS, "KB", broken),
            Claim(connects, 0.0, IDLE_CONNECTS_MIN, unit="", detail=broken),
        ]
    opened = f"{result['connections']:,} open"
    rate = result["connections_per_server_cpu_s"]
    return [
        Claim(memory, result["rss_per_connection_kb"], IDLE_KB_MAX, Better.LESS, "KB", opened),
        Claim(connects, rate, IDLE_CONNECTS_MIN, unit="", detail=opened),
    ]


def claim() -> list[Claim]:
    return measure(PLAYED, SECONDS)


if __name__ == "__main__":
    try_out(measure, PLAYED)
