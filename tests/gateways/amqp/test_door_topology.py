"""Exchanges, queues and bindings come, are compared and go as RabbitMQ's do. Driven by pika."""

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel

from .conftest import Connect
from .pika_client import Inbox, bodies, counts, cut_off, get, is_there, publish, refused

# -- queues: declare --------------------------------------------------------------------------------------------------


def test_declare_answers_with_name_and_counts(channel: BlockingChannel, connect: Connect, name: str) -> None:
    first = channel.queue_declare(name).method
    assert (first.queue, first.message_count, first.consumer_count) == (name, 0, 0)
    publish(channel, name, b"1", b"2", b"3")
    assert counts(channel, name) == (3, 0)
    other = connect().channel()
    other.basic_qos(prefetch_count=1)
    Inbox(other, name).wait(1)
    assert counts(channel, name) == (2, 1)


def test_queue_without_a_name_gets_one_and_it_is_the_channels_last(channel: BlockingChannel) -> None:
    queue = channel.queue_declare("", exclusive=True).method.queue
    assert queue.startswith("amq.gen-")
    channel.queue_bind("", "amq.direct", routing_key=queue)
    channel.basic_publish("amq.direct", queue, b"x")
    assert get(channel, "") is not None
    assert channel.queue_declare("", exclusive=True).method.queue != queue


def test_two_queues_without_a_name_are_two(channel: BlockingChannel) -> None:
    assert channel.queue_declare("").method.queue != channel.queue_declare("").method.queue


def test_no_name_on_a_channel_that_declared_nothing_is_404(channel: BlockingChannel) -> None:
    with refused(404):
        channel.basic_get("")


def test_passive_declare_of_what_is_not_there_is_404_and_the_connection_lives(connect: Connect, name: str) -> None:
    connection = connect()
    witness = connection.channel()
    with refused(404, f"no queue '{name}' in vhost '/'"):
        connection.channel().queue_declare(name, passive=True)
    with refused(404, f"no exchange '{name}' in vhost '/'"):
        connection.channel().exchange_declare(name, passive=True)
    assert witness.is_open
    witness.queue_declare(name)


def test_passive_declare_compares_nothing(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name, durable=True, arguments={"x-max-length": 5})
    channel.queue_declare(name, passive=True, durable=False, arguments={"x-max-length": 6})
    channel.exchange_declare(name, "topic", durable=True)
    channel.exchange_declare(name, "fanout", passive=True)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"durable": False}, "'durable'"),
        ({"auto_delete": True}, "'auto_delete'"),
        ({"arguments": {"x-max-length": 6}}, "'x-max-length'"),
        ({"arguments": {}}, "'x-max-length'"),
        ({"arguments": {"x-max-length": 5, "x-message-ttl": 1000}}, "'x-message-ttl'"),
        ({"arguments": {"x-max-length": 5, "x-queue-type": "quorum"}}, "'x-queue-type'"),
    ],
)
def test_queue_declared_otherwise_is_406_and_says_what_differs(
    connect: Connect, name: str, changed: dict[str, object], named: str
) -> None:
    connection = connect()
    asked = {"durable": True, "auto_delete": False, "arguments": {"x-max-length": 5}}
    connection.channel().queue_declare(name, **asked)
    connection.channel().queue_declare(name, **asked)
    with refused(406, f"inequivalent arg {named} for queue '{name}' in vhost '/'"):
        connection.channel().queue_declare(name, **(asked | changed))


def test_classic_said_and_not_said_is_the_same_and_numbers_have_no_width(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name, durable=True, arguments={"x-max-length": 5})
    channel.queue_declare(name, durable=True, arguments={"x-max-length": 2**40 - 2**40 + 5, "x-queue-type": "classic"})
    assert channel.is_open


@pytest.mark.parametrize(
    "arguments",
    [
        {"x-message-ttl": -1},
        {"x-message-ttl": "1000"},
        {"x-expires": 0},
        {"x-max-length": -1},
        {"x-max-length-bytes": "many"},
        {"x-max-priority": 256},
        {"x-overflow": "explode"},
        {"x-queue-type": "quantum"},
        {"x-dead-letter-exchange": 5},
        {"x-dead-letter-routing-key": "k"},
        {"x-single-active-consumer": "yes"},
    ],
    ids=str,
)
def test_argument_that_makes_no_sense_is_406(channel: BlockingChannel, name: str, arguments: dict[str, object]) -> None:
    with refused(406):
        channel.queue_declare(name, durable=True, arguments=arguments)


def test_unknown_argument_is_kept_and_means_nothing(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name, arguments={"x-of-my-own": [1, "two", {"three": True}], "also": 7})
    publish(channel, name, b"x")
    assert bodies(channel, name) == [b"x"]


@pytest.mark.parametrize("wrong", [{"durable": False}, {"exclusive": True}])
def test_quorum_queue_is_durable_and_shared(channel: BlockingChannel, name: str, wrong: dict[str, bool]) -> None:
    with refused(406):
        channel.queue_declare(name, **({"durable": True} | wrong), arguments={"x-queue-type": "quorum"})


def test_reserved_prefix_is_403(connect: Connect, name: str) -> None:
    connection = connect()
    with refused(403, "reserved prefix 'amq.*'"):
        connection.channel().queue_declare(f"amq.{name}")
    with refused(403, "reserved prefix 'amq.*'"):
        connection.channel().exchange_declare(f"amq.{name}", "direct")
    with refused(403):
        connection.channel().exchange_delete("amq.topic")


def test_queue_name_may_be_any_text(channel: BlockingChannel) -> None:
    queue = "grüße * # / \\ ' \" 東京"
    channel.queue_declare(queue, durable=True)
    publish(channel, queue, b"x")
    assert bodies(channel, queue) == [b"x"]
    channel.queue_delete(queue)


# -- queues: exclusive, auto-delete -----------------------------------------------------------------------------------


def test_exclusive_queue_is_locked_to_its_connection(connect: Connect, name: str) -> None:
    owner, stranger = connect(), connect()
    channel = owner.channel()
    channel.queue_declare(name, exclusive=True)
    owner.channel().queue_declare(name, exclusive=True)
    text = f"cannot obtain exclusive access to locked queue '{name}' in vhost '/'"
    with refused(405, text):
        stranger.channel().queue_declare(name, passive=True)
    with refused(405, text):
        stranger.channel().queue_declare(name, exclusive=True)
    with refused(405, text):
        stranger.channel().basic_consume(name, lambda *_: None)
    with refused(405, text):
        stranger.channel().basic_get(name)
    with refused(405, text):
        stranger.channel().queue_bind(name, "amq.fanout")
    with refused(405, text):
        stranger.channel().queue_purge(name)
    with refused(405, text):
        stranger.channel().queue_delete(name)
    with refused(405, text):
        owner.channel().queue_declare(name, exclusive=False)


def test_everybody_may_publish_to_an_exclusive_queue(connect: Connect, name: str) -> None:
    channel = connect().channel()
    channel.queue_declare(name, exclusive=True)
    stranger = connect().channel()
    stranger.confirm_delivery()
    stranger.basic_publish("", name, b"x", mandatory=True)
    assert bodies(channel, name) == [b"x"]


def test_exclusive_queue_is_gone_before_its_connection_is_told_closed(connect: Connect, name: str) -> None:
    others = connect()
    for _ in range(20):
        owner = connect()
        owner.channel().queue_declare(name, exclusive=True)
        owner.close()
        assert not is_there(others, name)


def test_exclusive_queue_survives_the_channel_that_declared_it(connect: Connect, name: str) -> None:
    owner = connect()
    channel = owner.channel()
    channel.queue_declare(name, exclusive=True)
    channel.close()
    assert is_there(owner, name)


def test_auto_delete_queue_goes_with_its_last_consumer(connect: Connect, name: str) -> None:
    connection = connect()
    one, two = connection.channel(), connection.channel()
    one.queue_declare(name, auto_delete=True)
    first, second = Inbox(one, name), Inbox(two, name)
    one.basic_cancel(first.tag)
    assert is_there(connection, name)
    two.basic_cancel(second.tag)
    assert not is_there(connection, name)


@pytest.mark.parametrize("end", ["channel", "connection"])
def test_auto_delete_queue_goes_when_its_consumers_channel_or_connection_does(
    connect: Connect, name: str, end: str
) -> None:
    witness, consuming = connect(), connect()
    channel = consuming.channel()
    channel.queue_declare(name, auto_delete=True)
    Inbox(channel, name)
    (channel if end == "channel" else consuming).close()
    assert not is_there(witness, name)


def test_auto_delete_queue_that_never_had_a_consumer_stays(connect: Connect, name: str) -> None:
    connection = connect()
    connection.channel().queue_declare(name, auto_delete=True)
    connection.close()
    assert is_there(connect(), name)


# -- queues: purge, delete --------------------------------------------------------------------------------------------


def test_purge_counts_the_ready_and_leaves_the_unacked(connect: Connect, name: str) -> None:
    connection = connect()
    channel = connection.channel()
    channel.queue_declare(name)
    publish(channel, name, b"1", b"2", b"3")
    held = get(channel, name, auto_ack=False)
    assert held is not None
    assert channel.queue_purge(name).method.message_count == 2
    assert counts(channel, name) == (0, 0)
    channel.basic_nack(held.tag)
    assert bodies(channel, name) == [b"1"]
    with refused(404):
        connection.channel().queue_purge(f"{name}.absent")


def test_delete_tells_how_many_were_ready_and_what_is_not_there_is_deleted(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name)
    publish(channel, name, b"1", b"2")
    assert channel.queue_delete(name).method.message_count == 2
    assert channel.queue_delete(name).method.message_count == 0


def test_delete_if_unused_and_if_empty_are_406_while_used_and_filled(connect: Connect, name: str) -> None:
    connection = connect()
    channel = connection.channel()
    channel.queue_declare(name)
    inbox = Inbox(channel, name)
    with refused(406, f"queue '{name}' in vhost '/' in use"):
        connection.channel().queue_delete(name, if_unused=True)
    channel.basic_cancel(inbox.tag)
    publish(channel, name, b"x")
    with refused(406, f"queue '{name}' in vhost '/' not empty"):
        connection.channel().queue_delete(name, if_empty=True)
    bodies(channel, name)
    channel.queue_delete(name, if_unused=True, if_empty=True)
    assert not is_there(connection, name)


def test_queue_declared_again_after_its_end_is_another_one(channel: BlockingChannel, name: str) -> None:
    for durable in (True, False, True):
        channel.queue_declare(name, durable=durable)
        channel.queue_bind(name, "amq.direct", routing_key=name)
        publish(channel, name, b"old", delivery_mode=2)
        channel.queue_delete(name)
    channel.queue_declare(name, durable=True)
    channel.basic_publish("amq.direct", name, b"unbound")
    assert counts(channel, name) == (0, 0)


# -- exchanges --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["direct", "fanout", "topic", "headers"])
def test_the_exchanges_of_the_standard_are_there(channel: BlockingChannel, kind: str) -> None:
    for exchange in (f"amq.{kind}", *(["amq.match"] if kind == "headers" else [])):
        channel.exchange_declare(exchange, kind, durable=True)
        channel.exchange_declare(exchange, passive=True)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"exchange_type": "fanout"}, "'type'"),
        ({"durable": False}, "'durable'"),
        ({"auto_delete": True}, "'auto_delete'"),
        ({"internal": True}, "'internal'"),
        ({"arguments": {"alternate-exchange": "amq.topic"}}, "'alternate-exchange'"),
        ({"arguments": None}, "'alternate-exchange'"),
    ],
)
def test_exchange_declared_otherwise_is_406_and_says_what_differs(
    connect: Connect, name: str, changed: dict[str, object], named: str
) -> None:
    connection = connect()
    asked = {
        "exchange_type": "direct",
        "durable": True,
        "auto_delete": False,
        "internal": False,
        "arguments": {"alternate-exchange": "amq.fanout"},
    }
    connection.channel().exchange_declare(name, **asked)
    connection.channel().exchange_declare(name, **asked)
    with refused(406, f"inequivalent arg {named} for exchange '{name}' in vhost '/'"):
        connection.channel().exchange_declare(name, **(asked | changed))


def test_unknown_exchange_type_is_503_for_the_whole_connection(connect: Connect, name: str) -> None:
    with cut_off(503, "unknown exchange type 'x-unheard-of'"):
        connect().channel().exchange_declare(name, "x-unheard-of")


def test_default_exchange_takes_no_declaration_no_deletion_and_no_binding(connect: Connect, name: str) -> None:
    connection = connect()
    connection.channel().queue_declare(name)
    for act in (
        lambda one: one.exchange_declare("", "direct"),
        lambda one: one.exchange_delete(""),
        lambda one: one.queue_bind(name, "", routing_key="k"),
        lambda one: one.queue_unbind(name, "", routing_key="k"),
        lambda one: one.exchange_bind("amq.direct", "", routing_key="k"),
        lambda one: one.exchange_bind("", "amq.direct", routing_key="k"),
    ):
        with refused(403, "default exchange"):
            act(connection.channel())


def test_exchange_if_unused_is_406_while_bound_and_what_is_not_there_is_deleted(connect: Connect, name: str) -> None:
    connection = connect()
    channel = connection.channel()
    channel.exchange_declare(name, "direct")
    channel.queue_declare(name)
    channel.queue_bind(name, name, routing_key="k")
    with refused(406, f"exchange '{name}' in vhost '/' in use"):
        connection.channel().exchange_delete(name, if_unused=True)
    channel.queue_unbind(name, name, routing_key="k")
    channel.exchange_delete(name, if_unused=True)
    channel.exchange_delete(name)


def test_auto_delete_exchange_goes_with_its_last_binding(connect: Connect, name: str) -> None:
    connection = connect()
    channel = connection.channel()
    channel.exchange_declare(name, "fanout", auto_delete=True)
    channel.queue_declare(f"{name}.1")
    channel.queue_declare(f"{name}.2")
    channel.queue_bind(f"{name}.1", name)
    channel.queue_bind(f"{name}.2", name)
    channel.queue_unbind(f"{name}.1", name)
    channel.exchange_declare(name, passive=True)
    channel.queue_delete(f"{name}.2")
    with refused(404):
        channel.exchange_declare(name, passive=True)


def test_auto_delete_exchange_that_was_never_bound_stays(channel: BlockingChannel, name: str) -> None:
    channel.exchange_declare(name, "fanout", auto_delete=True)
    channel.queue_declare(name)
    channel.queue_unbind(name, name, routing_key="never bound")
    channel.exchange_declare(name, passive=True)


def test_auto_delete_exchanges_go_one_after_the_other(connect: Connect, name: str) -> None:
    connection = connect()
    channel = connection.channel()
    channel.exchange_declare(f"{name}.a", "fanout", auto_delete=True)
    channel.exchange_declare(f"{name}.b", "fanout", auto_delete=True)
    channel.exchange_bind(f"{name}.b", f"{name}.a")
    channel.queue_declare(name)
    channel.queue_bind(name, f"{name}.b")
    channel.queue_delete(name)
    for exchange in (f"{name}.a", f"{name}.b"):
        with refused(404):
            connection.channel().exchange_declare(exchange, passive=True)


def test_internal_exchange_takes_no_publish_but_routes_what_comes_by_binding(connect: Connect, name: str) -> None:
    connection = connect()
    channel = connection.channel()
    channel.exchange_declare(name, "fanout", internal=True)
    channel.exchange_bind(name, "amq.direct", routing_key=name)
    channel.queue_declare(name)
    channel.queue_bind(name, name)
    channel.basic_publish("amq.direct", name, b"through")
    assert bodies(channel, name) == [b"through"]
    other = connection.channel()
    with refused(403, f"cannot publish to internal exchange '{name}' in vhost '/'"):
        other.basic_publish(name, "", b"x")
        other.queue_declare(name, passive=True)


# -- bindings ---------------------------------------------------------------------------------------------------------


def test_binding_to_or_from_what_is_not_there_is_404(connect: Connect, name: str) -> None:
    connection = connect()
    connection.channel().queue_declare(name)
    for act, text in (
        (lambda one: one.queue_bind(name, f"{name}.x"), f"no exchange '{name}.x' in vhost '/'"),
        (lambda one: one.queue_bind(f"{name}.q", "amq.direct"), f"no queue '{name}.q' in vhost '/'"),
        (lambda one: one.exchange_bind(f"{name}.x", "amq.direct"), f"no exchange '{name}.x' in vhost '/'"),
        (lambda one: one.exchange_bind("amq.direct", f"{name}.x"), f"no exchange '{name}.x' in vhost '/'"),
    ):
        with refused(404, text):
            act(connection.channel())


def test_binding_twice_is_once_and_unbinding_nothing_is_fine(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name)
    channel.queue_unbind(name, "amq.direct", routing_key=name)
    channel.queue_bind(name, "amq.direct", routing_key=name)
    channel.queue_bind(name, "amq.direct", routing_key=name)
    channel.basic_publish("amq.direct", name, b"once")
    assert bodies(channel, name) == [b"once"]
    channel.queue_unbind(name, "amq.direct", routing_key=name)
    channel.basic_publish("amq.direct", name, b"never")
    assert bodies(channel, name) == []


def test_bindings_that_differ_in_arguments_alone_are_two(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name)
    channel.queue_bind(name, "amq.direct", routing_key=name, arguments={"a": 1})
    channel.queue_bind(name, "amq.direct", routing_key=name, arguments={"a": 2})
    channel.queue_unbind(name, "amq.direct", routing_key=name, arguments={"a": 1})
    channel.basic_publish("amq.direct", name, b"x")
    assert bodies(channel, name) == [b"x"]


def test_unbinding_what_is_gone_is_fine(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name)
    channel.queue_unbind(name, f"{name}.nowhere", routing_key="k")
    channel.queue_unbind(f"{name}.nowhere", "amq.direct", routing_key="k")
    channel.exchange_unbind("amq.direct", f"{name}.nowhere", routing_key="k")
    channel.exchange_unbind(f"{name}.nowhere", "amq.direct", routing_key="k")
    assert channel.queue_declare(name, passive=True).method.queue == name


def test_bind_and_unbind_hold_for_the_very_next_publish(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name, durable=True)
    for number in range(50):
        channel.queue_bind(name, "amq.topic", routing_key=f"{name}.#")
        channel.basic_publish("amq.topic", f"{name}.k", b"%d" % number)
        channel.queue_unbind(name, "amq.topic", routing_key=f"{name}.#")
        channel.basic_publish("amq.topic", f"{name}.k", b"not this")
    assert bodies(channel, name) == [b"%d" % number for number in range(50)]
    channel.queue_delete(name)


def test_deleting_an_exchange_leaves_what_it_routed_in_the_queues(channel: BlockingChannel, name: str) -> None:
    channel.exchange_declare(name, "fanout", durable=True)
    channel.queue_declare(name, durable=True)
    channel.queue_bind(name, name)
    for number in range(5):
        channel.basic_publish(name, "k", b"%d" % number, pika.BasicProperties(delivery_mode=2))
    channel.exchange_delete(name)
    channel.exchange_declare(name, "direct", durable=True)
    assert bodies(channel, name) == [b"0", b"1", b"2", b"3", b"4"]
    channel.exchange_delete(name)
    channel.queue_delete(name)


def test_nowait_is_not_answered_and_still_done(channel: BlockingChannel, name: str) -> None:
    # pika offers no nowait but through its inner channel.
    inner = channel._impl
    inner.queue_declare(name, callback=None)
    inner.queue_bind(name, "amq.direct", routing_key=name, callback=None)
    channel.basic_publish("amq.direct", name, b"x")
    assert bodies(channel, name) == [b"x"]
    inner.queue_purge(name, callback=None)
    inner.queue_delete(name, callback=None)
    assert channel.queue_delete(name).method.message_count == 0
