"""Faults under load: nodes killed, paused and cut off, the database stopped, while AMQP and MQTT clients go on. Driver.

    python -m interop.cluster.chaos --seconds 120 --seed 7

Three nodes, three replicas, at least two in sync. Publishers and consumers are those of the kill loops (interop/amqp,
interop/mqtt); each connection is to some node that lives. One fault at a time, drawn by the seed; after each the
cluster is waited for until it is whole, so that what is confirmed is always on two nodes that live. At the end all is
drained, and the ledgers say whether anything confirmed was lost, came twice without a flag, in another order, or twice
with QoS 2.
"""

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pika

from interop.amqp import kill_loop as amqp
from interop.amqp.ledger import Kill, QueueLedger
from interop.amqp.ledger import Ledger as AmqpLedger
from interop.cluster.nodes import Cluster, running_cluster
from interop.mqtt import kill_loop as mqtt
from interop.mqtt.ledger import Ledger as MqttLedger
from interop.mqtt.ledger import Subscription

# Between a cluster that is whole again and the next fault.
QUIET_SECONDS = (0.5, 3.0)
# How long a node is away.
DOWN_SECONDS = (0.0, 4.0)
PAUSED_SECONDS = (0.5, 14.0)
CUT_SECONDS = (0.5, 14.0)
DATABASE_SECONDS = (0.5, 8.0)
AMQP_PUBLISHERS = 2


@dataclass(frozen=True, slots=True)
class Report:
    faults: dict[str, int]
    lines: list[str]
    problems: list[str]

    def line(self) -> str:
        told = ", ".join(f"{count} x {kind}" for kind, count in sorted(self.faults.items()))
        return "; ".join([f"faults: {told}", *self.lines])


class Faults:
    """Each returns when what was broken is mended."""

    def __init__(self, cluster: Cluster, chance: random.Random) -> None:
        self._cluster = cluster
        self._chance = chance
        self.counts: Counter[str] = Counter()
        self.kinds: dict[str, Callable[[], None]] = {
            "leader killed": self._kill_leader,
            "node killed": self._kill,
            "node paused": self._pause,
            "node cut off": self._cut,
            "database stopped": self._stop_database,
        }

    def one(self, kind: str | None = None) -> None:
        kind = kind or self._chance.choice(sorted(self.kinds))
        self.counts[kind] += 1
        self.kinds[kind]()

    def _wait(self, between: tuple[float, float]) -> None:
        time.sleep(self._chance.uniform(*between))

    def _kill_leader(self) -> None:
        self._kill_one(self._cluster.leader().number)

    def _kill(self) -> None:
        self._kill_one(self._chance.choice(self._cluster.nodes).number)

    def _kill_one(self, number: int) -> None:
        node = self._cluster.nodes[number - 1]
        node.kill()
        self._wait(DOWN_SECONDS)
        node.start()

    def _pause(self) -> None:
        node = self._chance.choice(self._cluster.nodes)
        node.pause()
        self._wait(PAUSED_SECONDS)
        node.resume()

    def _cut(self) -> None:
        """What others send to it does not arrive; what it sends to them does."""
        node = self._chance.choice(self._cluster.nodes)
        node.proxy.cut()
        self._wait(CUT_SECONDS)
        node.proxy.heal()

    def _stop_database(self) -> None:
        self._cluster.database.stop("immediate")
        self._wait(DATABASE_SECONDS)
        self._cluster.database.start()


class _Amqp:
    def __init__(self, cluster: Cluster, chance: random.Random) -> None:
        one = QueueLedger("chaos.one", ordered=True, remembers=False)
        many = QueueLedger("chaos.many", ordered=False, remembers=False)
        self.ledger = AmqpLedger([one, many])
        self.story = amqp.Story(cluster, self.ledger)
        with pika.BlockingConnection(self.story.parameters()) as connection:
            channel = connection.channel()
            channel.exchange_declare(amqp.EXCHANGE, "topic", durable=True)
            for queue in (one, many):
                channel.queue_declare(queue.name, durable=True)
                channel.queue_bind(queue.name, amqp.EXCHANGE, "#")
        self.publishers = [amqp.Publisher(self.story, number) for number in range(AMQP_PUBLISHERS)]
        self.consumers = [amqp.Consumer(self.story, queue, chance.randrange(2**32)) for queue in (one, many, many)]
        for thread in (*self.publishers, *self.consumers):
            thread.start()

    def note_fault(self) -> None:
        self.ledger.kills.append(Kill(sum(len(publisher.unconfirmed) for publisher in self.publishers)))
        self.story.life += 1

    def finish(self) -> str:
        amqp.finish(self.story, self.publishers, self.consumers)
        delivered = sum(len(queue.deliveries) for queue in self.ledger.queues)
        return (
            f"AMQP: {len(self.ledger.confirmed)} confirmed, {self.ledger.republished} sent again, {delivered} delivered"
        )


class _Mqtt:
    def __init__(self, cluster: Cluster) -> None:
        subscriptions = [Subscription("reader 2", qos=2), Subscription("reader 1", qos=1)]
        self.ledger = MqttLedger(subscriptions, dict(mqtt.PUBLISHERS))
        self.story = mqtt.Story(cluster, self.ledger)
        self.readers = [mqtt.Subscriber(self.story, one) for one in subscriptions]
        self.publishers = [mqtt.Publisher(self.story, number, qos) for number, qos in mqtt.PUBLISHERS.items()]
        for reader in self.readers:
            reader.start()
        for reader in self.readers:
            assert reader.is_subscribed.wait(mqtt.DRAIN_SECONDS_MAX), f"{reader.name} could not subscribe"
        for publisher in self.publishers:
            publisher.start()

    def note_fault(self) -> None:
        self.ledger.kills.append(Kill(sum(len(publisher.unconfirmed) for publisher in self.publishers)))

    def finish(self) -> str:
        mqtt.finish(self.story, self.publishers, self.readers)
        delivered = sum(len(one.arrivals) for one in self.ledger.subscriptions)
        return f"MQTT: {len(self.ledger.acknowledged)} acknowledged, {delivered} delivered"


def run(seconds: float, seed: int, *, kinds: list[str] | None = None) -> Report:
    """Faults for that long, at least two; or just these kinds, in this order."""
    chance = random.Random(seed)
    with running_cluster() as cluster:
        faults = Faults(cluster, chance)
        loads = (_Amqp(cluster, chance), _Mqtt(cluster))
        until = time.monotonic() + seconds
        wanted = list(kinds or [])
        while wanted or (kinds is None and (time.monotonic() < until or faults.counts.total() < 2)):
            time.sleep(chance.uniform(*QUIET_SECONDS))
            for load in loads:
                load.note_fault()
            faults.one(wanted.pop(0) if wanted else None)
            cluster.wait_whole()
        lines = [load.finish() for load in loads]
    # Publishers may stand still, for readers that are far behind.
    count = (faults.counts.total() + 1) // 2
    problems = loads[0].ledger.problems(kills_min=count, confirmed_min=100)
    problems += loads[1].ledger.problems(kills_min=count, acknowledged_min=20)
    return Report(dict(faults.counts), lines, problems)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--seed", type=int, default=None)
    asked = parser.parse_args()
    seed = amqp.any_seed() if asked.seed is None else asked.seed
    print(f"seed {seed}", flush=True)
    report = run(asked.seconds, seed)
    print(report.line())
    for problem in report.problems:
        print(f"  {problem}")
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
