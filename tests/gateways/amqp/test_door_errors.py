"""Every refusal has its code, is laid to its method, and closes as little as RabbitMQ would. Driven frame by frame."""

import struct

import pytest
from pamqp import base, body, commands, frame, header
from pika.adapters.blocking_connection import BlockingChannel
from tests.running_broker import RunningBroker

from .conftest import Connect, unlike_rabbitmq
from .pika_client import Inbox, bodies, cut_off, get, publish, refused
from .wire import Wire

Basic, Channel, Connection = commands.Basic, commands.Channel, commands.Connection
Exchange, Queue, Tx, Confirm = commands.Exchange, commands.Queue, commands.Tx, commands.Confirm


def alive(wire: Wire, channel: int) -> None:
    """This channel answers."""
    wire.call(channel, Basic.Qos(prefetch_count=0), Basic.QosOk)


# -- soft errors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "code"),
    [
        (Queue.Declare(queue="absent", passive=True), 404),
        (Queue.Bind(queue="absent", exchange="amq.direct"), 404),
        (Queue.Unbind(queue="absent", exchange=""), 403),
        (Queue.Purge(queue="absent"), 404),
        (Queue.Declare(queue="amq.mine"), 403),
        (Exchange.Declare(exchange="absent", passive=True), 404),
        (Exchange.Declare(exchange="amq.mine"), 403),
        (Exchange.Declare(exchange="amq.direct", exchange_type="fanout", durable=True), 406),
        (Exchange.Delete(exchange="amq.direct"), 403),
        (Exchange.Bind(destination="absent", source="amq.direct"), 404),
        (Basic.Consume(queue="absent"), 404),
        (Basic.Get(queue="absent"), 404),
        (Basic.Ack(delivery_tag=1), 406),
        (Basic.Nack(delivery_tag=1), 406),
        (Basic.Reject(delivery_tag=1), 406),
        (Tx.Commit(), 406),
        (Tx.Rollback(), 406),
    ],
    ids=lambda value: f"{value.name} {dict(value)}" if isinstance(value, base.Frame) else str(value),
)
def test_soft_error_closes_its_channel_alone_and_names_its_method(wire: Wire, method: base.Frame, code: int) -> None:
    wire.open_channel(2)
    wire.send(1, method)
    wire.expect_channel_close(1, code, type(method))
    alive(wire, 2)
    wire.open_channel(1)
    alive(wire, 1)


def test_what_follows_an_error_in_the_same_packet_is_passed_over(wire: Wire, name: str) -> None:
    wire.open_channel(2)
    wire.send(
        1,
        Queue.Declare(queue=name, passive=True),
        Queue.Declare(queue=name),
        Basic.Publish(exchange=name),
        header.ContentHeader(body_size=1, properties=Basic.Properties()),
        body.ContentBody(b"x"),
        Basic.Ack(delivery_tag=7),
        Basic.Get(queue=name),
    )
    wire.expect_channel_close(1, 404, Queue.Declare)
    alive(wire, 2)
    wire.open_channel(1)
    wire.send(1, Queue.Declare(queue=name, passive=True))
    wire.expect_channel_close(1, 404, Queue.Declare)


def test_what_came_before_an_error_in_the_same_packet_is_done(wire: Wire, name: str) -> None:
    wire.call(1, Queue.Declare(queue=name), Queue.DeclareOk)
    content = (header.ContentHeader(body_size=1, properties=Basic.Properties()), body.ContentBody(b"x"))
    wire.send(
        1,
        *(Basic.Publish(routing_key=name), *content) * 3,
        *(Basic.Publish(exchange=name, routing_key=name), *content),
        *(Basic.Publish(routing_key=name), *content),
    )
    wire.expect_channel_close(1, 404, Basic.Publish)
    wire.open_channel(1)
    assert wire.call(1, Queue.Declare(queue=name, passive=True), Queue.DeclareOk).message_count == 3


def test_publishes_before_one_with_a_bad_property_are_kept(wire: Wire, name: str) -> None:
    wire.call(1, Queue.Declare(queue=name), Queue.DeclareOk)

    def message(properties: commands.Basic.Properties) -> list[base.Frame | header.ContentHeader | body.ContentBody]:
        parts = [Basic.Publish(routing_key=name), header.ContentHeader(body_size=1, properties=properties)]
        return [*parts, body.ContentBody(b"x")]

    good, bad = Basic.Properties(), Basic.Properties(expiration="soon")
    wire.send(1, *message(good), *message(good), *message(bad), *message(good))
    wire.expect_channel_close(1, 406, Basic.Publish)
    wire.open_channel(1)
    assert wire.call(1, Queue.Declare(queue=name, passive=True), Queue.DeclareOk).message_count == 2


def test_client_may_close_a_channel_that_the_broker_is_closing(wire: Wire) -> None:
    wire.send(1, Queue.Purge(queue="absent"), Channel.Close(200, "bye", 0, 0))
    found = [wire.receive()[1] for _ in range(2)]
    assert {type(one) for one in found} == {Channel.Close, Channel.CloseOk}
    wire.send(1, Channel.CloseOk())
    wire.open_channel(1)
    alive(wire, 1)


def test_error_in_a_channel_does_not_touch_the_deliveries_of_another(connect: Connect, name: str) -> None:
    connection = connect()
    channel = connection.channel()
    channel.queue_declare(name)
    inbox = Inbox(channel, name)
    publish(channel, name, b"1")
    inbox.wait(1)
    with refused(404):
        connection.channel().basic_get(f"{name}.absent")
    publish(channel, name, b"2")
    assert [one.body for one in inbox.wait(2)] == [b"1", b"2"]
    inbox.ack(inbox.got[1], multiple=True)


def test_channel_closed_for_an_error_gives_its_unacked_back(connect: Connect, name: str) -> None:
    connection = connect()
    connection.channel().queue_declare(name)
    channel = connection.channel()
    publish(channel, name, b"1", b"2")
    get(channel, name, auto_ack=False)
    get(channel, name, auto_ack=False)
    with refused(406, "unknown delivery tag 99"):
        channel.basic_ack(99)
        channel.queue_declare(name, passive=True)
    assert bodies(connection.channel(), name) == [b"1", b"2"]


@pytest.mark.parametrize("multiple", [False, True])
def test_acknowledging_twice_is_406(connect: Connect, name: str, multiple: bool) -> None:
    channel = connect().channel()
    channel.queue_declare(name)
    publish(channel, name, b"1")
    held = get(channel, name, auto_ack=False)
    assert held is not None
    channel.basic_ack(held.tag, multiple)
    with refused(406, f"unknown delivery tag {held.tag}"):
        channel.basic_ack(held.tag, multiple)
        channel.queue_declare(name, passive=True)


def test_delivery_tags_belong_to_their_channel(connect: Connect, name: str) -> None:
    connection = connect()
    one, other = connection.channel(), connection.channel()
    one.queue_declare(name)
    publish(one, name, b"1")
    held = get(one, name, auto_ack=False)
    assert held is not None
    with refused(406, "unknown delivery tag"):
        other.basic_ack(held.tag)
        other.queue_declare(name, passive=True)
    one.basic_ack(held.tag)


# -- hard errors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "code"),
    [
        (Exchange.Declare(exchange="new", exchange_type="unheard-of"), 503),
        (Basic.Qos(prefetch_size=1), 540),
        (Basic.Recover(requeue=False), 540),
        (Channel.Open(), 504),
        pytest.param(
            Basic.GetOk(delivery_tag=1, exchange="", routing_key="", message_count=0),
            503,
            marks=unlike_rabbitmq(reason="it goes silent"),
        ),
    ],
    ids=lambda value: f"{value.name} {dict(value)}" if isinstance(value, base.Frame) else str(value),
)
def test_hard_error_closes_the_connection_and_names_its_method(wire: Wire, method: base.Frame, code: int) -> None:
    wire.send(1, method)
    wire.expect_connection_close(code, type(method))
    wire.expect_end()


def test_immediate_is_540(wire: Wire) -> None:
    wire.publish(1, "", "k", immediate=True)
    wire.expect_connection_close(540, Basic.Publish)
    wire.expect_end()


def test_consumer_tag_used_twice_is_530(connect: Connect, name: str) -> None:
    channel = connect().channel()
    channel.queue_declare(name)
    channel.basic_consume(name, lambda *_: None, consumer_tag="mine")
    # pika itself refuses a tag it knows.
    channel._consumer_infos.clear()
    channel._impl._consumers.clear()
    with cut_off(530, "attempt to reuse consumer tag 'mine'"):
        channel.basic_consume(name, lambda *_: None, consumer_tag="mine")


def test_method_on_a_channel_that_is_not_open_is_504(wire: Wire) -> None:
    wire.send(5, Queue.Declare(queue="q"))
    wire.expect_connection_close(504, Queue.Declare)
    wire.expect_end()


def test_publish_on_a_channel_that_is_not_open_is_504(wire: Wire) -> None:
    wire.publish(5, "", "k")
    wire.expect_connection_close(504, Basic.Publish)
    wire.expect_end()


def test_channel_above_the_maximum_is_530(broker: RunningBroker) -> None:
    with Wire(broker.port) as wire:
        wire.log_in(channel_max=2)
        wire.open_channel(1)
        wire.open_channel(2)
        wire.send(3, Channel.Open())
        wire.expect_connection_close(530)
        wire.expect_end()


@unlike_rabbitmq(reason="it closes the socket without a word")
def test_unknown_method_is_540(wire: Wire) -> None:
    wire.send_octets(struct.pack(">BHIHHB", 1, 1, 4, 60, 999, 0xCE))
    found = wire.expect(Connection.Close, 0)
    assert (found.reply_code, found.class_id, found.method_id) == (540, 60, 999)
    wire.send(0, Connection.CloseOk())
    wire.expect_end()


def test_content_without_its_method_is_505(wire: Wire) -> None:
    wire.send(1, body.ContentBody(b"x"))
    wire.expect_connection_close(505)
    wire.expect_end()


def test_method_where_content_must_come_is_505(wire: Wire) -> None:
    wire.send(1, Basic.Publish(routing_key="k"), Queue.Declare(queue="q"))
    wire.expect_connection_close(505, Basic.Publish)
    wire.expect_end()


@unlike_rabbitmq(reason="it goes silent")
def test_body_longer_than_its_header_said_is_501(wire: Wire) -> None:
    content = header.ContentHeader(body_size=1, properties=Basic.Properties())
    wire.send(1, Basic.Publish(routing_key="k"), content, body.ContentBody(b"xyz"))
    wire.expect_connection_close(501, Basic.Publish)
    wire.expect_end()


@pytest.mark.parametrize(
    "octets",
    [
        pytest.param(frame.marshal(Queue.Declare(queue="q"), 1)[:-1] + b"\x00", id="frame end"),
        pytest.param(b"\x09" + frame.marshal(Queue.Declare(queue="q"), 1)[1:], id="frame type"),
        pytest.param(struct.pack(">BHI", 1, 1, 2**31), id="frame size"),
    ],
)
def test_octets_that_are_no_frame_are_501_and_the_end(wire: Wire, octets: bytes) -> None:
    wire.send_octets(octets + b"\0" * 100_000)
    found = wire.expect(Connection.Close, 0)
    assert found.reply_code == 501
    wire.expect_end()


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(b"\x00\x32\x00\x0a", id="queue.declare without its arguments"),
        pytest.param(b"\x00\x32\x00\x0a\x00\x00\xffq\x00\x00\x00\x00\x00", id="a string longer than the frame"),
        pytest.param(b"\x00\x32\x00\x0a\x00\x00\x01q\x00\x00\x00\x00\x09\x01aS\x00\x00\x00\x50x", id="a broken table"),
        pytest.param(b"\x00\x32\x00\x0a\x00\x00\x01q\x00\x00\x00\x00\x00more", id="octets too many"),
    ],
)
def test_arguments_that_cannot_be_read_end_the_connection_and_nothing_else(
    wire: Wire, connect: Connect, payload: bytes
) -> None:
    other = connect().channel()
    wire.send_octets(struct.pack(">BHI", 1, 1, len(payload)) + payload + b"\xce")
    found = wire.expect(Connection.Close, 0)
    assert found.reply_code in (501, 502)
    other.basic_qos(prefetch_count=1)


def test_connection_method_on_a_channel_is_503(wire: Wire) -> None:
    wire.send(1, Connection.Open("/"))
    wire.expect_connection_close(503, Connection.Open)
    wire.expect_end()


def test_channel_method_on_channel_0_ends_the_connection(wire: Wire) -> None:
    wire.send(0, Queue.Declare(queue="q"))
    found = wire.expect(Connection.Close, 0)
    assert found.reply_code in (503, 504)


def test_hard_error_frees_the_exclusive_queues_and_the_unacked_at_once(wire: Wire, connect: Connect, name: str) -> None:
    channel = connect().channel()
    channel.queue_declare(name)
    publish(channel, name, b"1")
    wire.call(1, Queue.Declare(queue=f"{name}.own", exclusive=True), Queue.DeclareOk)
    wire.call(1, Basic.Get(queue=name), Basic.GetOk)
    wire.expect(header.ContentHeader)
    wire.expect(body.ContentBody)
    wire.send(1, Basic.Recover(requeue=False))
    wire.expect(Connection.Close, 0)
    # Not answered: the broker does not wait for it.
    channel.queue_declare(f"{name}.own")
    assert bodies(channel, name) == [b"1"]


def test_nothing_more_is_done_for_a_connection_that_is_being_closed(wire: Wire, connect: Connect, name: str) -> None:
    content = (header.ContentHeader(body_size=1, properties=Basic.Properties()), body.ContentBody(b"x"))
    wire.call(1, Queue.Declare(queue=name), Queue.DeclareOk)
    wire.send(1, Basic.Recover(requeue=False), *(Basic.Publish(routing_key=name), *content))
    wire.expect(Connection.Close, 0)
    wire.send(1, Basic.Publish(routing_key=name), *content)
    wire.send(0, Connection.CloseOk())
    wire.expect_end()
    assert bodies(connect().channel(), name) == []


def test_confirm_and_tx_exclude_each_other(wire: Wire) -> None:
    wire.call(1, Confirm.Select(), Confirm.SelectOk)
    wire.send(1, Tx.Select())
    wire.expect_channel_close(1, 406, Tx.Select)
    wire.open_channel(1)
    wire.call(1, Tx.Select(), Tx.SelectOk)
    wire.call(1, Tx.Select(), Tx.SelectOk)
    wire.send(1, Confirm.Select())
    wire.expect_channel_close(1, 406, Confirm.Select)


def test_reply_text_is_cut_to_what_a_short_string_holds(channel: BlockingChannel) -> None:
    with refused(404, "NOT_FOUND - no queue 'qqqq"):
        channel.queue_declare("q" * 255, passive=True)
