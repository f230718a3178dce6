"""A broker process is killed while delayed messages fall due: each arrives exactly once, none early, none lost."""

import random
import time
from contextlib import suppress
from pathlib import Path

import pika
from pika.exceptions import AMQPError
from tests.running_broker import RunningBroker, eventually

COUNT = 2000
KILLS = 3


def test_each_arrives_once_though_the_broker_is_killed_while_they_fire(tmp_path: Path) -> None:
    """They are due within two seconds; the broker is killed again and again in that time. Seeded, so it can be told."""
    chance = random.Random(7)
    with RunningBroker(tmp_path) as broker:
        channel = broker.connect().channel()
        channel.exchange_declare("later", "x-delayed-message", durable=True, arguments={"x-delayed-type": "direct"})
        for queue in ("bound", "direct"):
            channel.queue_declare(queue, durable=True)
        channel.queue_bind("bound", "later", "key")
        channel.tx_select()
        due: dict[bytes, float] = {}
        for number in range(COUNT):
            body, delay_ms = b"%d" % number, 1000 + chance.randrange(2000)
            due[body] = time.time() + delay_ms / 1000
            where = ("later", "key") if number % 2 else ("", "direct")
            properties = pika.BasicProperties(headers={"x-delay": delay_ms}, delivery_mode=2)
            channel.basic_publish(*where, body, properties)
        channel.tx_commit()
        for _ in range(KILLS):
            time.sleep(chance.uniform(0.1, 0.5))
            broker.kill()
            broker.start()
        got: list[bytes] = []
        early: list[bytes] = []
        connection = broker.connect()
        channel = connection.channel()

        def take() -> bool:
            for queue in ("bound", "direct"):
                while (found := channel.basic_get(queue, auto_ack=True))[2] is not None:
                    got.append(found[2])
                    if time.time() < due[found[2]]:
                        early.append(found[2])
            return len(got) >= COUNT

        eventually(take, 60)
        broker.stop()
        broker.start()
        channel = broker.connect().channel()
        take()
        with suppress(AMQPError):
            connection.close()
        broker.stop()
    assert sorted(got, key=int) == [b"%d" % number for number in range(COUNT)]
    assert early == []
