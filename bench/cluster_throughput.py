"""Claims: three nodes beside RabbitMQ's quorum queue on three, CPU of all nodes together. Driver: processes.

Persistent messages with confirms, three replicas, on this one machine. Ours syncs on two nodes or more before it
confirms. A part of it: `python -m bench.cluster_throughput --only A1-100 --seconds 3`
"""

from collections.abc import Collection

from bench.claim import Claim
from bench.comparison import Measure, Promise, judge, play_all, try_out, wanted_by
from bench.peers.headrace_cluster import HeadraceCluster
from bench.peers.rabbitmq import RabbitMQCluster

SECONDS = 5.0
PEERS = (RabbitMQCluster(),)
PROMISES = (
    Promise("A1-100", PEERS[0].name, Measure.EFFICIENCY, 2.0),
    Promise("A1-100", PEERS[0].name, Measure.RATE, None),
    Promise("A1-1K", PEERS[0].name, Measure.EFFICIENCY, None),
)
PLAYED = tuple(dict.fromkeys(promise.scenario for promise in PROMISES))


def measure(scenarios: Collection[str], seconds: float) -> list[Claim]:
    promises = [promise for promise in PROMISES if promise.scenario in scenarios]
    done = play_all(HeadraceCluster(), PEERS, wanted_by(promises), seconds)
    return [judge(promise, done) for promise in promises]


def claim() -> list[Claim]:
    return measure(PLAYED, SECONDS)


if __name__ == "__main__":
    try_out(measure, PLAYED)
