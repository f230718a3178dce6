"""Retries and dead-letter queues with a real client, over kill -9: each message fails its attempts and dies once."""

from collections import Counter
from typing import Any

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import AMQPError
from tests.running_broker import RunningBroker, eventually

from headrace.controller.policies import RETRY_DELAY_MS_MAX

from .conftest import PEER
from .pika_client import Got, Inbox, bodies, counts, get, is_there, publish, refused

pytestmark = pytest.mark.skipif(bool(PEER), reason="RabbitMQ has no retry policies")

RETRY: dict[str, Any] = {"x-retry-max": 2, "x-retry-backoff": "fixed", "x-retry-delay-ms": 50}


def wait_for(channel: BlockingChannel, queue: str) -> Got:
    """The next message, as soon as it is there; unacked."""
    found: list[Got] = []

    def is_found() -> bool:
        one = get(channel, queue, auto_ack=False)
        found.extend([] if one is None else [one])
        return bool(found)

    eventually(is_found)
    return found[0]


def read(channel: BlockingChannel, queue: str, count: int) -> list[Got]:
    """The first messages of a queue, which is made when it is first needed."""
    eventually(lambda: is_there(channel.connection, queue))
    channel.basic_qos(prefetch_count=1000)
    inbox = Inbox(channel, queue, arguments={"x-stream-offset": "first"})
    inbox.wait(count)
    channel.basic_cancel(inbox.tag)
    return inbox.quiet()


def test_rejected_message_comes_back_and_says_which_attempt_it_is(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name, durable=True, arguments=RETRY)
    publish(channel, name, b"job", delivery_mode=2, headers={"mine": "kept"})
    for attempt in (1, 2, 3):
        got = wait_for(channel, name)
        assert (got.headers.get("x-attempt", 1), got.headers["mine"]) == (attempt, "kept")
        channel.basic_nack(got.tag, requeue=False)
    (dead,) = read(channel, f"{name}.dlq", 1)
    assert (dead.body, dead.routing_key, dead.headers["mine"]) == (b"job", name, "kept")
    assert (dead.headers["x-attempt"], dead.headers["x-reason"]) == (3, "rejected")
    assert dead.headers["x-death"][0]["queue"] == name
    assert {"x-origin-stream", "x-origin-partition", "x-origin-offset"} <= dead.headers.keys()


def test_requeued_message_uses_up_no_attempt(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name, durable=True, arguments=RETRY)
    publish(channel, name, b"job")
    for _ in range(5):
        channel.basic_nack(wait_for(channel, name).tag, requeue=True)
    assert "x-attempt" not in wait_for(channel, name).headers


def test_headers_exchange_sorts_the_dead_by_why_they_died(channel: BlockingChannel, name: str) -> None:
    """Per-error routing: what a record tells of its end is there before it is routed."""
    channel.exchange_declare(f"{name}.dlx", "headers")
    for reason in ("rejected", "delivery_limit"):
        channel.queue_declare(f"{name}.{reason}")
        channel.queue_bind(f"{name}.{reason}", f"{name}.dlx", "", {"x-match": "all-with-x", "x-reason": reason})
    arguments = {"x-retry-max": 0, "x-dead-letter-exchange": f"{name}.dlx", "x-queue-type": "quorum"}
    channel.queue_declare(name, durable=True, arguments=arguments | {"x-delivery-limit": 0})
    publish(channel, name, b"refused", b"crashed")
    refused_one, crashed = wait_for(channel, name), wait_for(channel, name)
    channel.basic_reject(refused_one.tag, requeue=False)
    channel.basic_reject(crashed.tag, requeue=True)
    eventually(lambda: counts(channel, f"{name}.rejected")[0] == counts(channel, f"{name}.delivery_limit")[0] == 1)
    assert bodies(channel, f"{name}.rejected") == [b"refused"]
    assert bodies(channel, f"{name}.delivery_limit") == [b"crashed"]


def test_dead_letter_queue_outlives_its_queue(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name, durable=True, arguments={"x-retry-max": 0})
    publish(channel, name, b"job", delivery_mode=2)
    channel.basic_reject(wait_for(channel, name).tag, requeue=False)
    read(channel, f"{name}.dlq", 1)
    channel.queue_delete(name)
    assert [one.body for one in read(channel, f"{name}.dlq", 1)] == [b"job"]


def test_queue_without_a_policy_drops_what_is_rejected_as_ever(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name, durable=True)
    publish(channel, name, b"job")
    channel.basic_reject(wait_for(channel, name).tag, requeue=False)
    channel.queue_declare(name, passive=True)
    assert not is_there(channel.connection, f"{name}.dlq")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"x-retry-max": -1}, "x-retry-max"),
        ({"x-retry-max": 1, "x-retry-backoff": "soon"}, "x-retry-backoff"),
        ({"x-retry-max": 1, "x-retry-backoff": "levels", "x-retry-delay-ms": 5}, "levels have delays of their own"),
        ({"x-retry-max": 1, "x-retry-delay-ms": 50, "x-retry-delay-max-ms": 10}, "less than the delay of 50"),
        ({"x-retry-max": 1, "x-retry-delay-ms": RETRY_DELAY_MS_MAX + 1}, "more than ten years"),
        ({"x-retry-max": 1, "x-retry-delay-max-ms": 2**53}, "more than ten years"),
        ({"x-retry-max": 1, "x-queue-type": "stream"}, "x-retry-max"),
    ],
)
def test_policy_that_makes_no_sense_is_refused(
    channel: BlockingChannel, name: str, arguments: dict[str, Any], text: str
) -> None:
    with refused(406, text):
        channel.queue_declare(name, durable=True, arguments=arguments)


@pytest.mark.parametrize("arguments", [{"x-retry-max": 1}, {"x-filter-unmatched": "dead-letter"}])
def test_queue_whose_dead_letter_queue_would_have_too_long_a_name_is_refused(
    channel: BlockingChannel, name: str, arguments: dict[str, Any]
) -> None:
    name = name.ljust(252, "x")
    channel.queue_declare(name, durable=True, arguments=arguments | {"x-dead-letter-exchange": ""})
    channel.queue_delete(name)
    with refused(406, "longer than 255 bytes"):
        channel.queue_declare(name, durable=True, arguments=arguments)


def test_each_message_dies_once_though_the_broker_is_killed_again_and_again(own_broker: RunningBroker) -> None:
    """Attempts that a kill swallowed are made again; none is dead twice, none is lost."""
    values = [b"%d" % number for number in range(200)]
    with own_broker.connect() as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        channel.queue_declare("work", durable=True, arguments={"x-retry-max": 1, "x-retry-delay-ms": 20})
        for value in values:
            channel.basic_publish("", "work", value, pika.BasicProperties(delivery_mode=2))
    for patience in (20, 60, 150, 400):
        try:
            with own_broker.connect() as connection:
                channel = connection.channel()
                for _ in range(patience):
                    found = get(channel, "work", auto_ack=False)
                    if found is not None:
                        channel.basic_reject(found.tag, requeue=False)
                own_broker.kill()
        except AMQPError:
            pass
        own_broker.start()
    with own_broker.connect() as connection:
        channel = connection.channel()

        def is_done() -> bool:
            while (found := get(channel, "work", auto_ack=False)) is not None:
                channel.basic_reject(found.tag, requeue=False)
            return is_there(connection, "work.dlq") and counts(channel, "work.dlq")[0] >= len(values)

        eventually(is_done)
        dead = read(connection.channel(), "work.dlq", len(values))
    assert Counter(one.body for one in dead) == Counter(values)
    assert {one.headers["x-attempt"] for one in dead} == {2}
