"""kill -9 while parked messages fire: each arrives exactly once. A real broker as a process, over AMQP.

COUNT=100000 python -m pytest tests/delay/test_kill.py runs it at full size (`make kill-delay`).
"""

import os
import time
from pathlib import Path

import pika
from tests.running_broker import RunningBroker

COUNT = int(os.environ.get("COUNT", 2_000))
KILLS = 2


def parked(broker: RunningBroker, count: int, due_ms: int) -> None:
    """Park `count` messages, all due at once, and wait for the confirms."""
    connection = broker.connect()
    channel = connection.channel()
    channel.queue_declare("q", durable=True)
    channel.tx_select()
    for number in range(count):
        properties = pika.BasicProperties(delivery_mode=2, headers={"x-deliver-at": due_ms})
        channel.basic_publish("", "q", b"%d" % number, properties)
        if number % 1000 == 999:
            channel.tx_commit()
    channel.tx_commit()
    connection.close()


def test_t3_each_arrives_exactly_once_though_the_broker_is_killed_while_they_fire(tmp_path: Path) -> None:
    with RunningBroker(tmp_path) as broker:
        # Far enough away to park all of them before.
        due_ms = int(time.time() * 1000) + 3_000 + COUNT // 3
        parked(broker, COUNT, due_ms)
        for kill in range(KILLS):
            # Into the middle of it: from the moment it is due on, later each time.
            time.sleep(max(due_ms / 1000 - time.time(), 0) + 0.05 * (kill + 1))
            broker.kill()
            broker.start()
        found: list[int] = []
        connection = broker.connect()
        channel = connection.channel()
        # Until nothing has come for a while, so that one that comes twice is seen.
        for _method, _properties, body in channel.consume("q", auto_ack=True, inactivity_timeout=2):
            if body is None:
                break
            found.append(int(body))
        connection.close()
    assert sorted(found) == list(range(COUNT))
