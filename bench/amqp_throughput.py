"""Claims: AMQP beside RabbitMQ, classic and quorum queues, in one interleaved run. Driver: processes.

Ours syncs to disk before it confirms a persistent message. PROMISES says what is compared, and by how much.
A part of it: `python -m bench.amqp_throughput --only A1-100,A8 --seconds 3`
"""

from collections.abc import Collection

from bench.claim import Claim
from bench.comparison import Measure, Promise, judge, play_all, try_out, wanted_by
from bench.peers.headrace import Headrace
from bench.peers.rabbitmq import RabbitMQ

SECONDS = 5.0
PEERS = (RabbitMQ("classic"), RabbitMQ("quorum"))
PROMISES = tuple(
    Promise(result, peer.name, measure, target)
    for result, measure, targets in (
        # targets against (classic, quorum)
        ("A1-100", Measure.EFFICIENCY, (5.0, 5.0)),
        ("A1-100", Measure.RATE, (1.0, 1.0)),
        ("A1-1K", Measure.EFFICIENCY, (5.0, 5.0)),
        ("A1-1K", Measure.RATE, (1.0, 1.0)),
        ("A2", Measure.EFFICIENCY, (5.0, 5.0)),
        ("A2", Measure.RATE, (1.0, 1.0)),
        ("A3-publish", Measure.RATE, (1.0, 1.0)),
        ("A3-drain", Measure.EFFICIENCY, (5.0, None)),
        ("A3-drain", Measure.RATE, (1.0, 1.0)),
        ("A4", Measure.EFFICIENCY, (5.0, 5.0)),
        ("A4", Measure.RATE, (1.0, 1.0)),
        ("A5-1k", Measure.SPEED, (1.0, 1.0)),
        ("A5-1k", Measure.EFFICIENCY, (1.0, 1.0)),
        ("A5-5k", Measure.SPEED, (1.0, 1.0)),
        ("A8", Measure.EFFICIENCY, (2.0, 2.0)),
    )
    for peer, target in zip(PEERS, targets, strict=True)
)
PLAYED = tuple(dict.fromkeys(promise.scenario for promise in PROMISES))


def measure(scenarios: Collection[str], seconds: float) -> list[Claim]:
    promises = [promise for promise in PROMISES if promise.scenario in scenarios]
    done = play_all(Headrace("amqp"), PEERS, wanted_by(promises), seconds)
    return [judge(promise, done) for promise in promises]


def claim() -> list[Claim]:
    return measure(PLAYED, SECONDS)


if __name__ == "__main__":
    try_out(measure, PLAYED)
