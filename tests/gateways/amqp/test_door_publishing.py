"""Confirms, transactions, user ids: what a publisher is told, and when. Driven by pika, and frame by frame."""

import threading
from typing import Any

import pika
import pytest
from pamqp import body, commands, header
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import NackError
from tests.running_broker import RunningBroker

from .conftest import Connect, unlike_rabbitmq
from .pika_client import PERSISTENT, Inbox, bodies, counts, get, publish, refused
from .wire import Wire

Basic, Confirm, Queue, Tx = commands.Basic, commands.Confirm, commands.Queue, commands.Tx


def confirmed_until(wire: Wire, count: int) -> list[Any]:
    """The acks and nacks on channel 1 until so many publishes are told of; every one told of once."""
    answers: list[Any] = []
    told: set[int] = set()
    while len(told) < count:
        answer = wire.receive()[1]
        assert isinstance(answer, Basic.Ack | Basic.Nack), answer.name
        tags = range(1, answer.delivery_tag + 1) if answer.multiple else [answer.delivery_tag]
        new = set(tags) - told
        assert new
        told |= new
        answers.append(answer)
    return answers


# -- confirms -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("mode", [1, 2])
def test_each_publish_is_confirmed(channel: BlockingChannel, name: str, durable: bool, mode: int) -> None:
    channel.queue_declare(name, durable=durable)
    channel.confirm_delivery()
    for number in range(20):
        channel.basic_publish("", name, b"%d" % number, pika.BasicProperties(delivery_mode=mode))
    assert bodies(channel, name) == [b"%d" % number for number in range(20)]
    channel.queue_delete(name)


def test_confirms_count_from_1_and_every_publish_is_told_of_once(wire: Wire, name: str) -> None:
    wire.call(1, Queue.Declare(queue=name, durable=True), Queue.DeclareOk)
    wire.publish(1, "", name, b"before confirm.select does not count")
    wire.call(1, Confirm.Select(), Confirm.SelectOk)
    for number in range(500):
        mode = 1 + number % 2
        wire.send(
            1,
            Basic.Publish(routing_key=name if number % 3 else f"{name}.absent"),
            header.ContentHeader(body_size=1, properties=Basic.Properties(delivery_mode=mode)),
            body.ContentBody(b"x"),
        )
    answers = confirmed_until(wire, 500)
    assert all(isinstance(answer, Basic.Ack) for answer in answers)
    assert max(answer.delivery_tag for answer in answers) == 500
    wire.call(1, Queue.Delete(queue=name), Queue.DeleteOk)


def test_each_channel_counts_its_own_confirms(wire: Wire, name: str) -> None:
    wire.open_channel(2)
    for channel in (1, 2):
        wire.call(channel, Confirm.Select(), Confirm.SelectOk)
    wire.publish(1, "", f"{name}.absent")
    assert wire.expect(Basic.Ack, 1).delivery_tag == 1
    wire.publish(2, "", f"{name}.absent")
    assert wire.expect(Basic.Ack, 2).delivery_tag == 1


def test_return_comes_before_its_ack(wire: Wire, name: str) -> None:
    wire.call(1, Confirm.Select(), Confirm.SelectOk)
    wire.publish(1, "", f"{name}.absent", b"r", mandatory=True)
    assert wire.expect(Basic.Return, 1).reply_code == 312
    wire.expect(header.ContentHeader, 1)
    wire.expect(body.ContentBody, 1)
    assert wire.expect(Basic.Ack, 1).delivery_tag == 1


def test_confirmed_by_one_is_there_for_the_other(broker: RunningBroker, connect: Connect, name: str) -> None:
    reader = connect().channel()
    reader.queue_declare(name, durable=True)
    writer = connect().channel()
    writer.confirm_delivery()
    for number in range(100):
        writer.basic_publish("", name, b"%d" % number, PERSISTENT)
        found = get(reader, name)
        assert found is not None
        assert found.body == b"%d" % number
    reader.queue_delete(name)


def test_publish_then_get_on_one_channel_never_misses(connect: Connect, name: str) -> None:
    channel = connect().channel()
    for durable, properties in ((True, PERSISTENT), (True, None), (False, None)):
        queue = f"{name}.{durable}.{properties is None}"
        channel.queue_declare(queue, durable=durable)
        for number in range(350):
            channel.basic_publish("", queue, b"%d" % number, properties)
            found = get(channel, queue)
            assert found is not None, f"message {number} of {queue} was missed"
            assert found.body == b"%d" % number
        channel.queue_delete(queue)


@unlike_rabbitmq(reason="it promises that for one channel only")
def test_counts_of_a_declare_include_what_the_connection_published(connect: Connect, name: str) -> None:
    connection = connect()
    writing, asking = connection.channel(), connection.channel()
    writing.queue_declare(name, durable=True)
    for number in range(1, 100):
        writing.basic_publish("", name, b"x", PERSISTENT)
        assert counts(asking, name)[0] == number
    assert asking.queue_purge(name).method.message_count == 99
    asking.queue_delete(name)


# -- reject-publish -----------------------------------------------------------------------------------------------


def test_full_queue_with_reject_publish_nacks_and_keeps_the_old(connect: Connect, name: str) -> None:
    channel = connect().channel()
    channel.queue_declare(name, arguments={"x-max-length": 2, "x-overflow": "reject-publish"})
    channel.confirm_delivery()
    publish(channel, name, b"1", b"2")
    for _ in range(2):
        with pytest.raises(NackError):
            channel.basic_publish("", name, b"too many")
    assert counts(channel, name) == (2, 0)
    assert get(channel, name) is not None
    publish(channel, name, b"3")
    assert bodies(channel, name) == [b"2", b"3"]


def test_reject_publish_by_bytes(connect: Connect, name: str) -> None:
    channel = connect().channel()
    channel.queue_declare(name, arguments={"x-max-length-bytes": 10, "x-overflow": "reject-publish"})
    channel.confirm_delivery()
    publish(channel, name, b"12345", b"67890")
    with pytest.raises(NackError):
        channel.basic_publish("", name, b"x")
    assert bodies(channel, name) == [b"12345", b"67890"]


def test_full_queue_does_not_keep_others_from_their_copy(connect: Connect, name: str) -> None:
    channel = connect().channel()
    channel.exchange_declare(name, "fanout")
    channel.queue_declare(f"{name}.full", arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
    channel.queue_declare(f"{name}.free")
    for queue in (f"{name}.full", f"{name}.free"):
        channel.queue_bind(queue, name)
    channel.confirm_delivery()
    channel.basic_publish(name, "", b"1")
    with pytest.raises(NackError):
        channel.basic_publish(name, "", b"2")
    assert bodies(channel, f"{name}.full") == [b"1"]
    assert bodies(channel, f"{name}.free") == [b"1", b"2"]


def test_acks_and_nacks_of_one_burst_are_told_apart(wire: Wire, name: str) -> None:
    arguments = {"x-max-length": 3, "x-overflow": "reject-publish"}
    wire.call(1, Queue.Declare(queue=name, arguments=arguments), Queue.DeclareOk)
    wire.call(1, Confirm.Select(), Confirm.SelectOk)
    for _ in range(10):
        wire.publish(1, "", name)
    acked = nacked = 0
    told = 0
    for answer in sorted(confirmed_until(wire, 10), key=lambda one: int(one.delivery_tag)):
        count = answer.delivery_tag - told if answer.multiple else 1
        told = answer.delivery_tag
        if isinstance(answer, Basic.Ack):
            acked += count
        else:
            nacked += count
    assert (acked, nacked) == (3, 7)
    assert wire.call(1, Queue.Declare(queue=name, passive=True), Queue.DeclareOk).message_count == 3


# -- transactions -------------------------------------------------------------------------------------------------


def test_publishes_of_a_transaction_come_with_the_commit(connect: Connect, name: str) -> None:
    connection = connect()
    channel, witness = connection.channel(), connection.channel()
    channel.queue_declare(name, durable=True)
    channel.tx_select()
    for number in range(3):
        channel.basic_publish("", name, b"%d" % number, PERSISTENT)
    assert counts(witness, name)[0] == 0
    channel.tx_commit()
    assert bodies(witness, name) == [b"0", b"1", b"2"]
    channel.tx_commit()
    assert bodies(witness, name) == []
    channel.queue_delete(name)


def test_publishes_that_are_rolled_back_never_come(connect: Connect, name: str) -> None:
    connection = connect()
    channel, witness = connection.channel(), connection.channel()
    channel.queue_declare(name)
    channel.tx_select()
    publish(channel, name, b"gone")
    channel.tx_rollback()
    publish(channel, name, b"kept")
    channel.tx_commit()
    assert bodies(witness, name) == [b"kept"]


def test_acks_of_a_transaction_count_with_the_commit(connect: Connect, name: str) -> None:
    connection = connect()
    channel = connection.channel()
    channel.queue_declare(name)
    channel.tx_select()
    publish(channel, name, b"1", b"2")
    channel.tx_commit()
    first = get(channel, name, auto_ack=False)
    assert first is not None
    channel.basic_ack(first.tag)
    channel.close()
    channel = connection.channel()
    channel.tx_select()
    first = get(channel, name, auto_ack=False)
    assert first is not None
    assert first.body == b"1", "an ack without commit is none"
    channel.basic_ack(first.tag)
    channel.tx_commit()
    channel.close()
    assert bodies(connection.channel(), name) == [b"2"]


def test_acks_that_are_rolled_back_may_be_given_again(connect: Connect, name: str) -> None:
    connection = connect()
    channel = connection.channel()
    channel.queue_declare(name)
    publish(channel, name, b"1", b"2", b"3")
    channel.tx_select()
    held = [get(channel, name, auto_ack=False) for _ in range(3)]
    tags = [one.tag for one in held if one is not None]
    channel.basic_ack(tags[1])
    channel.basic_nack(tags[2], requeue=False)
    channel.tx_rollback()
    assert counts(channel, name)[0] == 0, "they are unacked again, not back in the queue"
    channel.basic_ack(tags[1])
    channel.tx_commit()
    channel.close()
    assert bodies(connection.channel(), name) == [b"1", b"3"]


def test_returns_of_a_transaction_come_with_the_commit(wire: Wire, name: str) -> None:
    wire.call(1, Tx.Select(), Tx.SelectOk)
    wire.publish(1, "", f"{name}.absent", b"r", mandatory=True)
    wire.call(1, Basic.Qos(prefetch_count=1), Basic.QosOk)
    wire.send(1, Tx.Commit())
    wire.expect(Basic.Return, 1)
    wire.expect(header.ContentHeader, 1)
    wire.expect(body.ContentBody, 1)
    wire.expect(Tx.CommitOk, 1)


def test_queue_that_goes_before_the_commit_takes_only_its_own_copy_along(connect: Connect, name: str) -> None:
    connection = connect()
    channel, witness = connection.channel(), connection.channel()
    channel.exchange_declare(name, "fanout", durable=True)
    for queue in (f"{name}.gone", f"{name}.kept"):
        channel.queue_declare(queue, durable=True)
        channel.queue_bind(queue, name)
    channel.tx_select()
    channel.basic_publish(name, "", b"x", PERSISTENT)
    witness.queue_delete(f"{name}.gone")
    witness.exchange_delete(name)
    channel.tx_commit()
    assert bodies(witness, f"{name}.kept") == [b"x"]
    witness.queue_delete(f"{name}.kept")


def test_prefetch_opens_with_the_commit(connect: Connect, name: str) -> None:
    connection = connect()
    channel = connection.channel()
    channel.queue_declare(name)
    publish(channel, name, b"1", b"2")
    channel.tx_select()
    channel.basic_qos(prefetch_count=1)
    inbox = Inbox(channel, name)
    inbox.ack(inbox.wait(1)[0])
    assert [one.body for one in inbox.quiet()] == [b"1"]
    channel.tx_commit()
    assert [one.body for one in inbox.wait(2)] == [b"1", b"2"]


def test_transaction_that_is_never_committed_leaves_nothing(connect: Connect, name: str) -> None:
    connection = connect()
    channel = connection.channel()
    channel.queue_declare(name)
    channel.tx_select()
    publish(channel, name, b"x")
    channel.close()
    assert counts(connection.channel(), name)[0] == 0


def test_publish_and_ack_of_one_transaction_are_seen_together(connect: Connect, name: str) -> None:
    connection = connect()
    channel, witness = connection.channel(), connection.channel()
    channel.queue_declare(f"{name}.in")
    channel.queue_declare(f"{name}.out")
    publish(witness, f"{name}.in", b"order")
    channel.tx_select()
    held = get(channel, f"{name}.in", auto_ack=False)
    assert held is not None
    channel.basic_publish("", f"{name}.out", held.body)
    channel.basic_ack(held.tag)
    channel.tx_commit()
    assert counts(witness, f"{name}.in")[0] == 0
    assert bodies(witness, f"{name}.out") == [b"order"]
    channel.close()
    assert counts(witness, f"{name}.in")[0] == 0


# -- user ids -----------------------------------------------------------------------------------------------------


def test_user_id_must_be_the_users_own(connect: Connect, name: str) -> None:
    channel = connect().channel()
    channel.queue_declare(name)
    publish(channel, name, b"x", user_id="guest")
    assert bodies(channel, name) == [b"x"]
    with refused(406, "user_id property set to 'somebody' but authenticated user was 'guest'"):
        publish(channel, name, b"x", user_id="somebody")
        channel.queue_declare(name, passive=True)


# -- many at once -------------------------------------------------------------------------------------------------


def test_publishers_at_once_keep_their_own_order(broker: RunningBroker, connect: Connect, name: str) -> None:
    channel = connect().channel()
    channel.queue_declare(name, durable=True)

    def write(who: int) -> None:
        connection = broker.connect()
        writer = connection.channel()
        writer.confirm_delivery()
        for number in range(150):
            writer.basic_publish("", name, b"%d %d" % (who, number), PERSISTENT)
        connection.close()

    writers = [threading.Thread(target=write, args=(who,)) for who in range(4)]
    for writer in writers:
        writer.start()
    inbox = Inbox(channel, name, auto_ack=True)
    inbox.wait(600)
    for writer in writers:
        writer.join()
    for who in range(4):
        mine = [one for one in inbox.bodies if one.startswith(b"%d " % who)]
        assert mine == [b"%d %d" % (who, number) for number in range(150)]
    channel.queue_delete(name)
