"""Queues that are limited by length, time, priority or patience, and where their messages go then. Driven by pika."""

import time
from typing import Any

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import NackError

from .conftest import Connect, unlike_rabbitmq
from .pika_client import Got, Inbox, bodies, counts, get, get_all, is_there, publish, quiesce, refused


def wait_for(channel: BlockingChannel, queue: str, count: int) -> list[Got]:
    """Gets so many messages, however long they take to arrive."""
    found: list[Got] = []
    until = time.monotonic() + 30
    while len(found) < count:
        one = get(channel, queue)
        if one is not None:
            found.append(one)
            continue
        assert time.monotonic() < until, f"{len(found)} of {count} came"
        time.sleep(0.01)
    return found


def numbers(first: int, last: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, last + 1)]


class DeadLetters:
    """A queue with a dead-letter exchange, and the queue behind that."""

    def __init__(self, channel: BlockingChannel, name: str, **arguments: Any) -> None:
        self.channel = channel
        self.exchange = f"{name}.dlx"
        self.dead = f"{name}.dead"
        self.queue = name
        self.durable = arguments.get("x-queue-type") == "quorum"
        channel.exchange_declare(self.exchange, "fanout")
        channel.queue_declare(self.dead)
        channel.queue_bind(self.dead, self.exchange)
        channel.queue_declare(
            name, durable=self.durable, arguments={"x-dead-letter-exchange": self.exchange, **arguments}
        )

    def wait(self, count: int) -> list[Got]:
        return wait_for(self.channel, self.dead, count)


# -- length -------------------------------------------------------------------------------------------------------


def test_drop_head_keeps_the_newest(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name, arguments={"x-max-length": 3})
    publish(channel, name, *numbers(1, 10))
    assert counts(channel, name) == (3, 0)
    assert bodies(channel, name) == numbers(8, 10)


def test_drop_head_by_bytes_of_the_bodies(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name, arguments={"x-max-length-bytes": 10})
    for body in (b"1234", b"5678", b"90", b"abcd"):
        channel.basic_publish("", name, body, pika.BasicProperties(message_id="does not count"))
    assert bodies(channel, name) == [b"5678", b"90", b"abcd"]
    publish(channel, name, b"far too long to stay")
    assert bodies(channel, name) == []


def test_unacked_does_not_count_for_the_length(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name, arguments={"x-max-length": 2})
    publish(channel, name, b"1", b"2")
    held = get_all(channel, name, auto_ack=False)
    publish(channel, name, b"3", b"4")
    assert counts(channel, name) == (2, 0)
    channel.basic_nack(held[-1].tag, multiple=True, requeue=True)
    quiesce(channel, name)
    assert bodies(channel, name) == [b"3", b"4"]


def test_length_of_0_is_for_consumers_that_wait(connect: Connect, name: str) -> None:
    connection = connect()
    channel = connection.channel()
    channel.queue_declare(name, arguments={"x-max-length": 0})
    publish(channel, name, b"nobody waits")
    assert counts(channel, name) == (0, 0)
    inbox = Inbox(connection.channel(), name, auto_ack=True)
    publish(channel, name, b"1")
    assert [one.body for one in inbox.wait(1)] == [b"1"]


def test_what_is_dropped_for_length_is_dead_lettered(channel: BlockingChannel, name: str) -> None:
    letters = DeadLetters(channel, name, **{"x-max-length": 2})
    publish(channel, name, *numbers(1, 5))
    found = letters.wait(3)
    assert [one.body for one in found] == numbers(1, 3)
    assert {one.headers["x-death"][0]["reason"] for one in found} == {"maxlen"}
    assert bodies(channel, name) == numbers(4, 5)


def test_reject_publish_dlx_nacks_and_dead_letters(connect: Connect, name: str) -> None:
    channel = connect().channel()
    letters = DeadLetters(channel, name, **{"x-max-length": 1, "x-overflow": "reject-publish-dlx"})
    channel.confirm_delivery()
    publish(channel, name, b"1")
    with pytest.raises(NackError):
        publish(channel, name, b"2", message_id="m")
    (found,) = letters.wait(1)
    assert (found.body, found.properties.message_id, found.headers["x-death"][0]["reason"]) == (b"2", "m", "maxlen")
    assert bodies(channel, name) == [b"1"]


# -- time ---------------------------------------------------------------------------------------------------------


def test_message_past_its_expiration_is_not_delivered(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name)
    publish(channel, name, b"short", expiration="30")
    publish(channel, name, b"long", expiration="600000")
    time.sleep(0.06)
    assert bodies(channel, name) == [b"long"]


def test_message_past_the_time_of_its_queue_is_not_delivered(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name, arguments={"x-message-ttl": 30})
    publish(channel, name, b"1")
    time.sleep(0.06)
    assert bodies(channel, name) == []


def test_lower_of_both_times_counts(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name, arguments={"x-message-ttl": 30})
    publish(channel, name, b"1", expiration="600000")
    time.sleep(0.06)
    assert bodies(channel, name) == []


@pytest.mark.parametrize("by", ["message", "queue"])
def test_time_of_0_is_for_consumers_that_wait(connect: Connect, name: str, by: str) -> None:
    connection = connect()
    channel = connection.channel()
    channel.queue_declare(name, arguments={"x-message-ttl": 0} if by == "queue" else {})
    properties = {"expiration": "0"} if by == "message" else {}
    publish(channel, name, b"nobody waits", **properties)
    assert bodies(channel, name) == []
    inbox = Inbox(connection.channel(), name, auto_ack=True)
    publish(channel, name, *numbers(1, 3), **properties)
    assert [one.body for one in inbox.wait(3)] == numbers(1, 3)


@pytest.mark.parametrize("expiration", ["-1", "soon", "1.5", ""])
def test_expiration_that_is_no_number_is_406(channel: BlockingChannel, name: str, expiration: str) -> None:
    with refused(406, "expiration"):
        publish(channel, name, b"x", expiration=expiration)
        channel.basic_qos(prefetch_count=1)


def test_unacked_does_not_expire_but_does_when_it_comes_back(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name, arguments={"x-message-ttl": 30})
    publish(channel, name, b"1", b"2")
    held = get_all(channel, name, auto_ack=False)
    assert len(held) == 2
    time.sleep(0.06)
    channel.basic_ack(held[0].tag)
    channel.basic_nack(held[1].tag, requeue=True)
    quiesce(channel, name)
    assert bodies(channel, name) == []


def test_expired_is_dead_lettered_without_its_expiration(channel: BlockingChannel, name: str) -> None:
    letters = DeadLetters(channel, name)
    publish(channel, name, b"1", expiration="20", headers={"own": 1})
    (found,) = letters.wait(1)
    assert found.properties.expiration is None
    (death,) = found.headers["x-death"]
    assert (death["reason"], death["original-expiration"], found.headers["own"]) == ("expired", "20", 1)


def test_expired_goes_to_the_dead_letters_though_nobody_asks(channel: BlockingChannel, name: str) -> None:
    letters = DeadLetters(channel, name, **{"x-message-ttl": 50})
    publish(channel, name, *numbers(1, 3))
    assert [one.body for one in letters.wait(3)] == numbers(1, 3)
    assert counts(channel, name) == (0, 0)


def test_unused_queue_with_x_expires_goes_and_a_used_one_stays(connect: Connect, name: str) -> None:
    connection = connect()
    channel = connection.channel()
    for queue in (f"{name}.unused", f"{name}.used"):
        channel.queue_declare(queue, durable=True, arguments={"x-expires": 300})
    inbox = Inbox(channel, f"{name}.used")
    # Asking whether it is there would be a use.
    time.sleep(1)
    assert not is_there(connection, f"{name}.unused")
    assert is_there(connection, f"{name}.used")
    channel.basic_cancel(inbox.tag)
    time.sleep(1)
    assert not is_there(connection, f"{name}.used")


# -- priority -----------------------------------------------------------------------------------------------------


def test_higher_priority_is_delivered_first_and_equals_in_order(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name, arguments={"x-max-priority": 5})
    for number, priority in enumerate([1, 5, 0, 3, 5, 1, 9, None]):
        channel.basic_publish("", name, b"%d" % number, pika.BasicProperties(priority=priority))
    assert bodies(channel, name) == [b"1", b"4", b"6", b"3", b"0", b"5", b"2", b"7"]


def test_queue_without_priority_keeps_the_order(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name)
    for number, priority in enumerate([1, 5, 0]):
        channel.basic_publish("", name, b"%d" % number, pika.BasicProperties(priority=priority))
    assert bodies(channel, name) == [b"0", b"1", b"2"]


def test_requeued_goes_back_to_its_place_in_its_priority(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name, arguments={"x-max-priority": 3})
    for number, priority in enumerate([3, 1, 3, 1]):
        channel.basic_publish("", name, b"%d" % number, pika.BasicProperties(priority=priority))
    held = get_all(channel, name, auto_ack=False)
    channel.basic_nack(held[-1].tag, multiple=True, requeue=True)
    quiesce(channel, name)
    assert bodies(channel, name) == [b"0", b"2", b"1", b"3"]


def test_length_limit_of_a_priority_queue_drops_from_the_head(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name, arguments={"x-max-priority": 3, "x-max-length": 2})
    for number, priority in enumerate([1, 3, 2, 0]):
        channel.basic_publish("", name, b"%d" % number, pika.BasicProperties(priority=priority))
        quiesce(channel, name)
    assert bodies(channel, name) == [b"0", b"3"]


# -- dead letters -------------------------------------------------------------------------------------------------


def test_death_tells_where_why_and_how_often(channel: BlockingChannel, name: str) -> None:
    letters = DeadLetters(channel, name)
    channel.queue_bind(name, "amq.direct", routing_key=f"{name}.key")
    properties = pika.BasicProperties(message_id="m", headers={"own": 1}, delivery_mode=2)
    channel.basic_publish("amq.direct", f"{name}.key", b"x", properties)
    held = get(channel, name, auto_ack=False)
    assert held is not None
    channel.basic_reject(held.tag, requeue=False)
    (found,) = letters.wait(1)
    assert (found.exchange, found.routing_key, found.properties.message_id) == (letters.exchange, f"{name}.key", "m")
    (death,) = found.headers["x-death"]
    assert (death["count"], death["reason"], death["queue"], death["exchange"], death["routing-keys"]) == (
        1,
        "rejected",
        name,
        "amq.direct",
        [f"{name}.key"],
    )
    assert abs(death["time"].timestamp() - time.time()) < 60
    assert "original-expiration" not in death
    assert found.headers["own"] == 1
    first = {key: found.headers[f"x-first-death-{key}"] for key in ("reason", "queue", "exchange")}
    assert first == {"reason": "rejected", "queue": name, "exchange": "amq.direct"}


def test_dead_letter_routing_key_replaces_the_key_and_cc(channel: BlockingChannel, name: str) -> None:
    letters = DeadLetters(channel, name, **{"x-dead-letter-routing-key": "died"})
    publish(channel, name, b"x", headers={"CC": [f"{name}.nowhere"]})
    held = get(channel, name, auto_ack=False)
    assert held is not None
    channel.basic_nack(held.tag, requeue=False)
    (found,) = letters.wait(1)
    assert found.routing_key == "died"
    assert "CC" not in found.headers
    assert found.headers["x-death"][0]["routing-keys"] == [name, f"{name}.nowhere"]


def test_default_exchange_as_dead_letter_exchange(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(f"{name}.dead")
    arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": f"{name}.dead"}
    channel.queue_declare(name, arguments=arguments)
    publish(channel, name, b"x")
    held = get(channel, name, auto_ack=False)
    assert held is not None
    channel.basic_reject(held.tag, requeue=False)
    assert [one.body for one in wait_for(channel, f"{name}.dead", 1)] == [b"x"]


def test_dead_letter_exchange_that_is_not_there_drops(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name, arguments={"x-dead-letter-exchange": f"{name}.absent"})
    publish(channel, name, b"x")
    held = get(channel, name, auto_ack=False)
    assert held is not None
    channel.basic_reject(held.tag, requeue=False)
    assert counts(channel, name) == (0, 0)


def test_deaths_of_the_same_kind_are_counted_and_the_newest_is_first(channel: BlockingChannel, name: str) -> None:
    work, wait = f"{name}.work", f"{name}.wait"
    channel.queue_declare(work, arguments={"x-dead-letter-exchange": "", "x-dead-letter-routing-key": wait})
    retry = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": work, "x-message-ttl": 10}
    channel.queue_declare(wait, arguments=retry)
    publish(channel, work, b"x")
    inbox = Inbox(channel, work)
    for round_ in range(1, 4):
        found = inbox.wait(round_)[-1]
        deaths = [(one["queue"], one["reason"], one["count"]) for one in found.headers.get("x-death", [])]
        if round_ > 1:
            assert deaths == [(wait, "expired", round_ - 1), (work, "rejected", round_ - 1)]
            assert found.headers["x-first-death-queue"] == work
        channel.basic_reject(found.tag, requeue=False)


def test_message_that_only_expires_in_a_circle_is_dropped(channel: BlockingChannel, name: str) -> None:
    one, two = f"{name}.1", f"{name}.2"
    for queue, next_queue in ((one, two), (two, one)):
        channel.queue_declare(
            queue,
            arguments={
                "x-dead-letter-exchange": "",
                "x-dead-letter-routing-key": next_queue,
                "x-message-ttl": 20,
            },
        )
    publish(channel, one, b"x")
    until = time.monotonic() + 30
    seen_in_second = False
    while time.monotonic() < until:
        there = (counts(channel, one)[0], counts(channel, two)[0])
        seen_in_second |= there[1] == 1
        if seen_in_second and there == (0, 0):
            break
        time.sleep(0.002)
    else:
        raise AssertionError("it goes round and round")
    time.sleep(0.1)
    assert (counts(channel, one)[0], counts(channel, two)[0]) == (0, 0)


def test_only_the_queue_that_closes_a_circle_is_left_out(channel: BlockingChannel, name: str) -> None:
    letters = DeadLetters(channel, name, **{"x-message-ttl": 20})
    channel.queue_bind(name, letters.exchange)
    publish(channel, name, b"x")
    assert [one.body for one in letters.wait(1)] == [b"x"]
    time.sleep(0.1)
    assert (counts(channel, name)[0], counts(channel, letters.dead)[0]) == (0, 0)


def test_delivery_mode_and_priority_survive_death(channel: BlockingChannel, name: str) -> None:
    letters = DeadLetters(channel, name)
    publish(channel, name, b"x", delivery_mode=2, priority=4, timestamp=5, content_type="a/b")
    held = get(channel, name, auto_ack=False)
    assert held is not None
    channel.basic_reject(held.tag, requeue=False)
    (found,) = letters.wait(1)
    properties = found.properties
    assert (properties.delivery_mode, properties.priority, properties.timestamp, properties.content_type) == (
        2,
        4,
        5,
        "a/b",
    )


def test_dead_letters_keep_their_order(channel: BlockingChannel, name: str) -> None:
    letters = DeadLetters(channel, name)
    publish(channel, name, *numbers(1, 200))
    held = get_all(channel, name, auto_ack=False)
    channel.basic_nack(held[-1].tag, multiple=True, requeue=False)
    assert [one.body for one in letters.wait(200)] == numbers(1, 200)


# -- delivery limit -----------------------------------------------------------------------------------------------


def test_quorum_queue_counts_deliveries_and_gives_up_at_the_limit(connect: Connect, name: str) -> None:
    connection = connect()
    channel = connection.channel()
    letters = DeadLetters(channel, name, **{"x-queue-type": "quorum", "x-delivery-limit": 2})
    publish(channel, name, b"x", delivery_mode=2)
    seen: list[Any] = []
    for _ in range(3):
        reader = connection.channel()
        inbox = Inbox(reader, name)
        found = inbox.wait(1)[0]
        seen.append((found.redelivered, found.headers.get("x-delivery-count", 0)))
        reader.close()
    assert seen == [(False, 0), (True, 1), (True, 2)]
    (dead,) = letters.wait(1)
    assert dead.headers["x-death"][0]["reason"] == "delivery_limit"
    channel.queue_delete(name)


@unlike_rabbitmq(reason="3.10 counts every return, 4.3 those by basic.reject and lost consumers")
def test_nack_with_requeue_does_not_count_for_the_limit(connect: Connect, name: str) -> None:
    channel = connect().channel()
    channel.queue_declare(name, durable=True, arguments={"x-queue-type": "quorum", "x-delivery-limit": 1})
    publish(channel, name, b"x", delivery_mode=2)
    for _ in range(5):
        held = get(channel, name, auto_ack=False)
        assert held is not None
        channel.basic_nack(held.tag, requeue=True)
    channel.queue_delete(name)


def test_classic_queue_has_no_delivery_limit(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name)
    publish(channel, name, b"x")
    for _ in range(30):
        held = get(channel, name, auto_ack=False)
        assert held is not None
        channel.basic_reject(held.tag, requeue=True)
    assert bodies(channel, name) == [b"x"]
