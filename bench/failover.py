"""Claims: how long a client waits when the leader of its vhost is lost. Driver: processes.

Three nodes and a PostgreSQL. A client of a node that lives publishes with confirms, one message after the other, over
one connection; the leader is killed (kill -9), or paused (SIGSTOP: it is there, and says nothing). What is told is the
longest time between two confirms. Each case several times; the worst counts.
"""

import signal
import statistics
import time

import pika
from interop.cluster.nodes import Cluster, running_cluster

from bench.claim import Better, Claim

TIMES = 3
# Between what is done to the leader and the end of the client's patience.
PATIENCE_S = 60.0
QUEUE = "bench.failover"


def claim() -> list[Claim]:
    # Target, whether the leader is the controller too, whether it is killed.
    cases = {
        "leader killed": (3.0, False, True),
        "leader and controller killed": (15.0, True, True),
        "leader silent": (12.0, False, False),
    }
    found = []
    with running_cluster(is_proxied=False) as cluster:
        for name, (target, controls, is_killed) in cases.items():
            waits = [_wait(cluster, controls, is_killed) for _ in range(TIMES)]
            detail = f"served again after {statistics.median(waits):.2f} s in the middle case"
            found.append(Claim(f"failover, {name}", max(waits), target, Better.LESS, "s", detail))
    return found


def _wait(cluster: Cluster, controls: bool, is_killed: bool) -> float:
    cluster.wait_whole()
    controller = cluster.controller()
    leader = controller if controls else next(node for node in cluster.nodes if node is not controller)
    cluster.move_leader(leader)
    other = next(node for node in cluster.nodes if node is not leader)
    with pika.BlockingConnection(pika.URLParameters(other.url)) as connection:
        waits = _Waits(connection)
        waits.publish_until_served(time.monotonic())
        assert leader.process is not None
        begun = time.monotonic()
        if is_killed:
            leader.kill()
        else:
            leader.process.send_signal(signal.SIGSTOP)
        waits.publish_until_served(begun)
        longest = time.monotonic() - begun
    if is_killed:
        leader.start()
    else:
        leader.process.send_signal(signal.SIGCONT)
    return longest


class _Waits:
    def __init__(self, connection: pika.BlockingConnection) -> None:
        self._connection = connection
        self._open()

    def _open(self) -> None:
        self._channel = self._connection.channel()
        self._channel.queue_declare(QUEUE, durable=True)
        self._channel.confirm_delivery()

    def publish(self, count: int) -> None:
        for _ in range(count):
            self._channel.basic_publish("", QUEUE, b"x", pika.BasicProperties(delivery_mode=2))

    def publish_until_served(self, begun: float) -> None:
        """Until a message is confirmed that was sent after the leader was lost. A channel with an unknown outcome is
        closed by the broker; the connection stays. What is refused, since too few are in sync, is sent again."""
        confirmed = 0
        while confirmed < 20:
            assert time.monotonic() - begun < PATIENCE_S, "nobody serves the vhost"
            try:
                self.publish(1)
                confirmed += 1
            except pika.exceptions.NackError:
                confirmed = 0
            except pika.exceptions.ChannelClosedByBroker:
                confirmed = 0
                self._open()


if __name__ == "__main__":
    for one in claim():
        print(one)
