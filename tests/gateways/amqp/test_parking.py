"""Delayed messages over AMQP with a real client: RabbitMQ's delayed message exchange, and delays on any publish."""

import json
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from decimal import Decimal
from itertools import count
from typing import Any

import pika
import pytest
from celery import Celery
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import AMQPError, ChannelClosedByBroker, NackError, UnroutableError

from headrace.testing import EmbeddedBroker

HOUR_MS = 3_600_000
YEAR_MS = 365 * 24 * HOUR_MS
USERS = """
[[users]]
name = "reader"
password = "reads and nothing else"
[[permissions]]
user = "reader"
configure = ""
write = "^allowed$"
read = ".*"
"""
names = count()


@pytest.fixture(scope="module")
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(doors=("amqp",), config=USERS) as broker:
        yield broker


@pytest.fixture
def channel(broker: EmbeddedBroker) -> Iterator[BlockingChannel]:
    connection = pika.BlockingConnection(pika.URLParameters(broker.amqp_url()))
    channel = connection.channel()
    channel.confirm_delivery()
    yield channel
    with suppress(AMQPError):
        connection.close()


@pytest.fixture
def name() -> str:
    """For the queues and exchanges of one test."""
    return f"test-{next(names)}"


def publish(
    channel: BlockingChannel, exchange: str, key: str, body: bytes, headers: dict[str, Any] | None = None, **other: Any
) -> None:
    mandatory = other.pop("mandatory", False)
    properties = pika.BasicProperties(headers=headers, **{"delivery_mode": 2, **other})
    channel.basic_publish(exchange, key, body, properties, mandatory=mandatory)


def taken(channel: BlockingChannel, queue: str) -> list[bytes]:
    bodies = []
    while (found := channel.basic_get(queue, auto_ack=True))[2] is not None:
        bodies.append(found[2])
    return bodies


def delayed_exchange(channel: BlockingChannel, name: str, kind: str = "direct", key: str = "key", **other: Any) -> None:
    """With a queue of the same name."""
    channel.exchange_declare(name, "x-delayed-message", durable=True, arguments={"x-delayed-type": kind, **other})
    channel.queue_declare(name, durable=True)
    channel.queue_bind(name, name, key)


# -- the exchange type of RabbitMQ's plugin --------------------------------------------------------------------------


def test_messages_of_a_delayed_exchange_come_when_they_are_due(
    broker: EmbeddedBroker, channel: BlockingChannel, name: str
) -> None:
    delayed_exchange(channel, name)
    for hours in (5, 1, 3, 2, 4):
        publish(channel, name, "key", b"%d" % hours, {"x-delay": hours * HOUR_MS})
    assert taken(channel, name) == []
    broker.clock.advance(hours=2.5)
    assert taken(channel, name) == [b"1", b"2"]
    broker.clock.advance(hours=3)
    assert taken(channel, name) == [b"3", b"4", b"5"]


def test_a_consumer_is_sent_what_is_due(broker: EmbeddedBroker, channel: BlockingChannel, name: str) -> None:
    delayed_exchange(channel, name)
    got: list[bytes] = []
    channel.basic_consume(name, lambda _ch, _method, _properties, body: got.append(body), auto_ack=True)
    publish(channel, name, "key", b"late", {"x-delay": HOUR_MS})
    broker.clock.advance(hours=1)
    while not got:
        channel.connection.process_data_events(time_limit=10)
    assert got == [b"late"]


def test_readers_see_the_delay_negated(broker: EmbeddedBroker, channel: BlockingChannel, name: str) -> None:
    delayed_exchange(channel, name)
    publish(channel, name, "key", b"", {"x-delay": 5000, "kind": "order"}, message_id="17")
    broker.clock.advance(seconds=5)
    _method, properties, _body = channel.basic_get(name, auto_ack=True)
    assert properties.headers == {"x-delay": -5000, "kind": "order"}
    assert properties.message_id == "17"


@pytest.mark.parametrize("headers", [None, {}, {"x-delay": 0}, {"x-delay": -5000}, {"x-delay": "0"}, {"x-delay": None}])
def test_without_a_delay_it_routes_at_once(channel: BlockingChannel, name: str, headers: dict[str, Any] | None) -> None:
    delayed_exchange(channel, name)
    publish(channel, name, "key", b"now", headers)
    assert taken(channel, name) == [b"now"]


@pytest.mark.parametrize("delay", [str(HOUR_MS), Decimal(HOUR_MS) + Decimal("0.5")])
def test_the_delay_may_be_text_or_a_fraction(
    broker: EmbeddedBroker, channel: BlockingChannel, name: str, delay: object
) -> None:
    delayed_exchange(channel, name)
    publish(channel, name, "key", b"late", {"x-delay": delay})
    broker.clock.advance(minutes=59)
    assert taken(channel, name) == []
    broker.clock.advance(minutes=1)
    assert taken(channel, name) == [b"late"]


@pytest.mark.parametrize(
    ("kind", "keys"),
    [("direct", ["key"]), ("fanout", ["key", "other"]), ("topic", ["a.b", "a.c"]), ("x-consistent-hash", ["1", "2"])],
)
def test_it_routes_as_its_type_says(
    broker: EmbeddedBroker, channel: BlockingChannel, name: str, kind: str, keys: list[str]
) -> None:
    delayed_exchange(channel, name, kind, key={"topic": "a.#", "x-consistent-hash": "1"}.get(kind, "key"))
    for key in ("key", "other", "a.b", "a.c", "1", "2"):
        publish(channel, name, key, key.encode(), {"x-delay": HOUR_MS})
    broker.clock.advance(hours=1)
    assert set(taken(channel, name)) >= {key.encode() for key in keys}


def test_a_headers_exchange_may_be_delayed(broker: EmbeddedBroker, channel: BlockingChannel, name: str) -> None:
    channel.exchange_declare(name, "x-delayed-message", arguments={"x-delayed-type": "headers"})
    channel.queue_declare(name)
    channel.queue_bind(name, name, arguments={"kind": "order"})
    publish(channel, name, "", b"yes", {"x-delay": HOUR_MS, "kind": "order"})
    publish(channel, name, "", b"no", {"x-delay": HOUR_MS, "kind": "bill"})
    broker.clock.advance(hours=1)
    assert taken(channel, name) == [b"yes"]


def test_two_delayed_exchanges_in_a_row_delay_once(broker: EmbeddedBroker, channel: BlockingChannel, name: str) -> None:
    delayed_exchange(channel, name, "fanout")
    channel.exchange_declare(f"{name}-first", "x-delayed-message", arguments={"x-delayed-type": "fanout"})
    channel.exchange_bind(name, f"{name}-first")
    publish(channel, f"{name}-first", "", b"late", {"x-delay": HOUR_MS})
    broker.clock.advance(hours=1)
    assert taken(channel, name) == [b"late"]


@pytest.mark.parametrize("arguments", [{}, {"x-delayed-type": "x-delayed-message"}, {"x-delayed-type": "no-such"}])
def test_a_delayed_type_that_is_none_is_refused(channel: BlockingChannel, name: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(ChannelClosedByBroker, match="x-delayed-type") as refused:
        channel.exchange_declare(name, "x-delayed-message", arguments=arguments)
    assert refused.value.reply_code == 406


def test_an_equal_declaration_is_welcome_and_another_is_not(channel: BlockingChannel, name: str) -> None:
    delayed_exchange(channel, name)
    delayed_exchange(channel, name)
    channel.exchange_declare(name, passive=True)
    with pytest.raises(ChannelClosedByBroker, match="inequivalent arg 'type'") as refused:
        channel.exchange_declare(name, "direct", durable=True)
    assert refused.value.reply_code == 406


# -- delays on any publish -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exchange", ["", "amq.direct", "amq.topic", "amq.fanout"])
def test_a_publish_to_any_exchange_may_be_delayed(
    broker: EmbeddedBroker, channel: BlockingChannel, name: str, exchange: str
) -> None:
    channel.queue_declare(name, auto_delete=exchange == "amq.fanout")
    if exchange:
        channel.queue_bind(name, exchange, name)
    publish(channel, exchange, name, b"late", {"x-delay": HOUR_MS})
    publish(channel, exchange, name, b"now")
    assert taken(channel, name) == [b"now"]
    broker.clock.advance(hours=1)
    assert taken(channel, name) == [b"late"]
    channel.queue_delete(name)


def test_a_message_may_name_the_time_itself(broker: EmbeddedBroker, channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name)
    due = broker.clock.now() + timedelta(hours=2)
    publish(channel, "", name, b"ms", {"x-deliver-at": round(due.timestamp() * 1000)})
    publish(channel, "", name, b"text", {"x-deliver-at": (due + timedelta(seconds=1)).isoformat()})
    publish(channel, "", name, b"passed", {"x-deliver-at": "2001-01-01T00:00:00Z"})
    assert taken(channel, name) == [b"passed"]
    broker.clock.advance(hours=1, minutes=59)
    assert taken(channel, name) == []
    broker.clock.advance(minutes=2)
    assert taken(channel, name) == [b"ms", b"text"]


@pytest.mark.parametrize("level", [17, "17", "1h"])
def test_a_level_of_rocketmq_is_a_delay(
    broker: EmbeddedBroker, channel: BlockingChannel, name: str, level: object
) -> None:
    channel.queue_declare(name)
    publish(channel, "", name, b"late", {"x-delay-level": level})
    broker.clock.advance(minutes=59)
    assert taken(channel, name) == []
    broker.clock.advance(minutes=1)
    _method, properties, body = channel.basic_get(name, auto_ack=True)
    assert (body, properties.headers) == (b"late", {"x-delay-level": -17})


@pytest.mark.parametrize(
    ("headers", "text"),
    [
        ({"x-delay": 10 * YEAR_MS + 86_400_000}, "the longest delay is 3650 days"),
        ({"x-delay": "99999999999999999999"}, "the longest delay is 3650 days"),
        ({"x-deliver-at": "9999-12-31T00:00:00Z"}, "the longest delay is 3650 days"),
        ({"x-delay": "soon"}, "x-delay must be milliseconds"),
        ({"x-deliver-at": "2030-01-01T00:00:00"}, "has no time zone"),
        ({"x-delay-level": 19}, "x-delay-level must be 1 to 18"),
        ({"x-delay": 1000, "x-delay-level": 1}, "say different things"),
        ({"x-delay": 1000, "x-schedule-id": 17}, "x-schedule-id must be a string"),
    ],
)
@pytest.mark.parametrize("confirming", [True, False], ids=["confirms", "plain"])
def test_what_cannot_be_promised_is_refused_and_never_delivered_at_once(
    broker: EmbeddedBroker, channel: BlockingChannel, name: str, headers: dict[str, Any], text: str, confirming: bool
) -> None:
    channel.queue_declare(name)
    other = channel.connection.channel()
    if confirming:
        other.confirm_delivery()
    publish(other, "", name, b"before")
    with pytest.raises(ChannelClosedByBroker, match=text) as refused:
        publish(other, "", name, b"never", headers)
        other.queue_declare(name, passive=True)
    assert refused.value.reply_code == 406
    assert taken(channel, name) == [b"before"]


def test_nearly_ten_years_are_kept(broker: EmbeddedBroker, channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name)
    publish(channel, "", name, b"far", {"x-delay": 10 * YEAR_MS - 1000})
    assert taken(channel, name) == []


def test_many_of_one_read_keep_their_order_and_their_confirms(
    broker: EmbeddedBroker, channel: BlockingChannel, name: str
) -> None:
    channel.queue_declare(name)
    plain = channel.connection.channel()
    for number in range(500):
        headers = {"x-delay": HOUR_MS} if number % 5 else None
        publish(plain, "", name, b"%d" % number, headers)
    plain.queue_declare(name, passive=True)
    assert taken(channel, name) == [b"%d" % number for number in range(0, 500, 5)]
    broker.clock.advance(hours=1, seconds=10)
    assert taken(channel, name) == [b"%d" % number for number in range(500) if number % 5]


# -- mandatory, transactions, producers, copies ----------------------------------------------------------------------


def test_mandatory_is_answered_by_the_routing_of_now(
    broker: EmbeddedBroker, channel: BlockingChannel, name: str
) -> None:
    delayed_exchange(channel, name)
    publish(channel, name, "key", b"kept", {"x-delay": HOUR_MS}, mandatory=True)
    with pytest.raises(UnroutableError) as returned:
        publish(channel, name, "nobody", b"returned", {"x-delay": HOUR_MS}, mandatory=True)
    assert [one.body for one in returned.value.messages] == [b"returned"]
    channel.queue_bind(name, name, "nobody")
    broker.clock.advance(hours=1)
    assert taken(channel, name) == [b"kept"]


def test_a_transaction_parks_with_its_commit(broker: EmbeddedBroker, channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name, durable=True)
    other = channel.connection.channel()
    other.tx_select()
    publish(other, "", name, b"taken back", {"x-delay": HOUR_MS})
    other.tx_rollback()
    publish(other, "", name, b"committed", {"x-delay": HOUR_MS})
    other.tx_commit()
    broker.clock.advance(hours=1)
    assert taken(channel, name) == [b"committed"]


def test_a_numbered_message_that_is_sent_again_is_parked_once(
    broker: EmbeddedBroker, channel: BlockingChannel, name: str
) -> None:
    channel.queue_declare(name, durable=True)
    for body in (b"first", b"again"):
        publish(channel, "", name, body, {"x-delay": HOUR_MS, "x-producer-id": name, "x-sequence": 7})
    publish(channel, "", name, b"next", {"x-delay": HOUR_MS, "x-producer-id": name, "x-sequence": 8})
    with pytest.raises(NackError):
        late = {"x-delay": HOUR_MS, "x-producer-id": name, "x-producer-epoch": 1, "x-sequence": 1}
        publish(channel, "", name, b"new epoch", late)
        publish(channel, "", name, b"old epoch", {**late, "x-producer-epoch": 0, "x-sequence": 9})
    broker.clock.advance(hours=1)
    assert taken(channel, name) == [b"first", b"next", b"new epoch"]


def test_copies_are_routed_when_due_and_blind_ones_stay_hidden(
    broker: EmbeddedBroker, channel: BlockingChannel, name: str
) -> None:
    for queue in (name, f"{name}-cc", f"{name}-bcc"):
        channel.queue_declare(queue)
    publish(channel, "", name, b"late", {"x-delay": HOUR_MS, "CC": [f"{name}-cc"], "BCC": [f"{name}-bcc"]})
    broker.clock.advance(hours=1)
    for queue in (name, f"{name}-cc", f"{name}-bcc"):
        _method, properties, body = channel.basic_get(queue, auto_ack=True)
        assert (body, properties.headers) == (b"late", {"x-delay": -HOUR_MS, "CC": [f"{name}-cc"]})


def test_a_direct_reply_cannot_be_delayed(channel: BlockingChannel) -> None:
    with pytest.raises(ChannelClosedByBroker, match="direct reply"):
        publish(channel, "", "amq.rabbitmq.reply-to.somebody", b"", {"x-delay": 1000})


def test_who_may_not_write_may_not_write_later(broker: EmbeddedBroker, channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name)
    url = broker.amqp_url(user="reader", password="reads and nothing else")
    connection = pika.BlockingConnection(pika.URLParameters(url))
    other = connection.channel()
    with pytest.raises(ChannelClosedByBroker) as refused:
        publish(other, "amq.direct", name, b"", {"x-delay": 1000})
        other.queue_declare(name, passive=True)
    assert refused.value.reply_code == 403
    connection.close()


# -- when it is due --------------------------------------------------------------------------------------------------


def test_the_topology_of_the_due_time_counts(broker: EmbeddedBroker, channel: BlockingChannel, name: str) -> None:
    delayed_exchange(channel, name)
    channel.queue_declare(f"{name}-later")
    publish(channel, name, "key", b"late", {"x-delay": HOUR_MS})
    channel.queue_unbind(name, name, "key")
    channel.queue_bind(f"{name}-later", name, "key")
    broker.clock.advance(hours=1)
    assert (taken(channel, name), taken(channel, f"{name}-later")) == ([], [b"late"])


def test_the_time_to_live_counts_from_the_due_time(broker: EmbeddedBroker, channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name)
    publish(channel, "", name, b"short", {"x-delay": HOUR_MS}, expiration="60000")
    broker.clock.advance(minutes=60, seconds=50)
    assert int(channel.queue_declare(name, passive=True).method.message_count) == 1
    broker.clock.advance(seconds=20)
    assert taken(channel, name) == []


def test_what_has_no_queue_when_due_goes_to_the_alternate_exchange(
    broker: EmbeddedBroker, channel: BlockingChannel, name: str
) -> None:
    channel.exchange_declare(f"{name}-rest", "fanout")
    channel.queue_declare(f"{name}-rest")
    channel.queue_bind(f"{name}-rest", f"{name}-rest")
    delayed_exchange(channel, name, **{"alternate-exchange": f"{name}-rest"})
    publish(channel, name, "key", b"late", {"x-delay": HOUR_MS})
    channel.queue_delete(name)
    broker.clock.advance(hours=1)
    assert taken(channel, f"{name}-rest") == [b"late"]


def test_what_has_nowhere_to_go_is_dropped_and_holds_nobody_up(
    broker: EmbeddedBroker, channel: BlockingChannel, name: str
) -> None:
    delayed_exchange(channel, name)
    channel.queue_declare(f"{name}-gone")
    publish(channel, name, "key", b"exchange gone", {"x-delay": HOUR_MS})
    publish(channel, "", f"{name}-gone", b"queue gone", {"x-delay": HOUR_MS})
    publish(channel, "", name, b"there", {"x-delay": HOUR_MS})
    channel.exchange_delete(name)
    channel.queue_delete(f"{name}-gone")
    broker.clock.advance(hours=1)
    assert taken(channel, name) == [b"there"]


def test_an_exchange_made_anew_gets_what_was_meant_for_its_name(
    broker: EmbeddedBroker, channel: BlockingChannel, name: str
) -> None:
    delayed_exchange(channel, name)
    publish(channel, name, "key", b"first", {"x-delay": HOUR_MS})
    publish(channel, name, "key", b"second", {"x-delay": 2 * HOUR_MS})
    broker.clock.advance(hours=1)
    channel.exchange_delete(name)
    delayed_exchange(channel, name)
    broker.clock.advance(hours=1)
    assert taken(channel, name) == [b"first", b"second"]


@pytest.mark.parametrize("overflow", ["reject-publish", "reject-publish-dlx"])
def test_a_full_queue_refuses_it_when_due(
    broker: EmbeddedBroker, channel: BlockingChannel, name: str, overflow: str
) -> None:
    channel.queue_declare(f"{name}-dead")
    dead = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": f"{name}-dead"}
    channel.queue_declare(name, arguments={"x-max-length": 1, "x-overflow": overflow, **dead})
    for body in (b"one", b"two"):
        publish(channel, "", name, body, {"x-delay": HOUR_MS})
    broker.clock.advance(hours=1)
    assert taken(channel, name) == [b"one"]
    assert taken(channel, f"{name}-dead") == ([b"two"] if overflow.endswith("dlx") else [])


def test_a_celery_task_is_delayed_by_one_header(broker: EmbeddedBroker, channel: BlockingChannel, name: str) -> None:
    """Without a countdown, with which a worker would hold the message for all that time."""
    channel.queue_declare(name, durable=True)
    app = Celery(broker=broker.amqp_url().partition("?")[0])
    with app.connection_for_write(heartbeat=0) as connection:
        app.send_task("bill", ("late",), headers={"x-delay": HOUR_MS}, queue=name, connection=connection)
        app.send_task("bill", ("now",), queue=name, connection=connection)
    app.close()
    assert [json.loads(body)[0] for body in taken(channel, name)] == [["now"]]
    broker.clock.advance(hours=1)
    assert [json.loads(body)[0] for body in taken(channel, name)] == [["late"]]
