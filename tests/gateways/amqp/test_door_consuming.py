"""Deliveries, prefetch, turns and settling are RabbitMQ's. Driven by pika, and frame by frame."""

import threading
import time

import pika
import pytest
from pamqp import commands, header
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import ConnectionClosedByBroker
from tests.running_broker import RunningBroker

from .conftest import Connect, unlike_rabbitmq
from .pika_client import Inbox, bodies, counts, get, get_all, is_there, publish, quiesce, refused
from .wire import Wire

Basic, Queue = commands.Basic, commands.Queue


def numbers(first: int, last: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, last + 1)]


# -- deliveries ---------------------------------------------------------------------------------------------------


def test_delivery_has_tag_exchange_key_and_counts_up(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name)
    channel.queue_bind(name, "amq.direct", routing_key=f"{name}.key")
    inbox = Inbox(channel, name)
    for body in numbers(1, 3):
        channel.basic_publish("amq.direct", f"{name}.key", body)
    got = inbox.wait(3)
    assert [(one.body, one.tag, one.redelivered) for one in got] == [
        (b"1", 1, False),
        (b"2", 2, False),
        (b"3", 3, False),
    ]
    assert {(one.exchange, one.routing_key) for one in got} == {("amq.direct", f"{name}.key")}


def test_consume_ok_comes_before_the_first_delivery(wire: Wire, name: str) -> None:
    wire.call(1, Queue.Declare(queue=name), Queue.DeclareOk)
    wire.publish(1, "", name)
    assert wire.call(1, Basic.Consume(queue=name, consumer_tag="me"), Basic.ConsumeOk).consumer_tag == "me"
    assert wire.expect(Basic.Deliver, 1).consumer_tag == "me"


def test_consumer_tag_is_made_when_none_is_given(wire: Wire, name: str) -> None:
    wire.call(1, Queue.Declare(queue=name), Queue.DeclareOk)
    first = wire.call(1, Basic.Consume(queue=name), Basic.ConsumeOk).consumer_tag
    second = wire.call(1, Basic.Consume(queue=name), Basic.ConsumeOk).consumer_tag
    assert first != second
    assert str(first).startswith("amq.ctag-")


def test_no_ack_settles_what_is_sent(connect: Connect, name: str) -> None:
    connection = connect()
    channel = connection.channel()
    channel.queue_declare(name)
    publish(channel, name, *numbers(1, 5))
    channel.basic_qos(prefetch_count=1)
    inbox = Inbox(channel, name, auto_ack=True)
    assert [one.body for one in inbox.wait(5)] == numbers(1, 5)
    channel.close()
    assert counts(connection.channel(), name) == (0, 0)


def test_get_tells_how_many_are_left_and_empty_when_none_is(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name)
    assert channel.basic_get(name) == (None, None, None)
    publish(channel, name, b"1", b"2")
    method, _properties, body = channel.basic_get(name)
    assert (method.message_count, method.redelivered, method.delivery_tag, body) == (1, False, 1, b"1")
    channel.basic_ack(method.delivery_tag)
    assert get(channel, name) is not None
    assert get(channel, name) is None


def test_tags_of_deliveries_and_gets_are_one_row(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(f"{name}.got")
    channel.queue_declare(f"{name}.consumed")
    publish(channel, f"{name}.got", b"1", b"2")
    publish(channel, f"{name}.consumed", b"3")
    first = get(channel, f"{name}.got", auto_ack=False)
    inbox = Inbox(channel, f"{name}.consumed")
    second = inbox.wait(1)[0]
    third = get(channel, f"{name}.got")
    assert first is not None
    assert third is not None
    assert (first.tag, second.tag, third.tag) == (1, 2, 3)
    channel.basic_ack(2, multiple=True)
    with refused(406):
        channel.basic_ack(1)
        channel.basic_qos(prefetch_count=0)


# -- prefetch -----------------------------------------------------------------------------------------------------


def test_prefetch_holds_each_consumer_to_its_own_count(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name)
    publish(channel, name, *numbers(1, 20))
    channel.basic_qos(prefetch_count=3)
    one = Inbox(channel, name)
    one.wait(3)
    channel.basic_qos(prefetch_count=5)
    two = Inbox(channel, name)
    two.wait(5)
    assert (len(one.quiet()), len(two.quiet())) == (3, 5)
    one.ack(one.got[0])
    assert len(one.wait(4)) == 4
    assert (len(one.quiet()), len(two.quiet())) == (4, 5)


def test_global_prefetch_holds_all_consumers_of_the_channel(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name)
    channel.queue_declare(f"{name}.2")
    publish(channel, name, *numbers(1, 10))
    publish(channel, f"{name}.2", *numbers(11, 20))
    channel.basic_qos(prefetch_count=4, global_qos=True)
    one, two = Inbox(channel, name), Inbox(channel, f"{name}.2")
    quiesce(channel, name)
    quiesce(channel, f"{name}.2")
    assert len(one.got) + len(two.got) == 4
    channel.basic_ack(0, multiple=True)
    quiesce(channel, name)
    quiesce(channel, f"{name}.2")
    assert len(one.got) + len(two.got) == 8
    channel.basic_qos(prefetch_count=0, global_qos=True)
    one.wait(10)
    two.wait(10)


def test_prefetch_of_consumer_and_channel_hold_both(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name)
    publish(channel, name, *numbers(1, 20))
    channel.basic_qos(prefetch_count=3)
    channel.basic_qos(prefetch_count=5, global_qos=True)
    one, two = Inbox(channel, name), Inbox(channel, name)
    quiesce(channel, name)
    assert sorted((len(one.got), len(two.got))) == [2, 3]


def test_get_does_not_count_for_the_prefetch(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name)
    publish(channel, name, *numbers(1, 5))
    channel.basic_qos(prefetch_count=2, global_qos=True)
    assert get(channel, name, auto_ack=False) is not None
    assert get(channel, name, auto_ack=False) is not None
    assert get(channel, name, auto_ack=False) is not None
    assert len(Inbox(channel, name).wait(2)) == 2


def test_prefetch_counts_what_was_acked_and_nacked_alike(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name)
    publish(channel, name, *numbers(1, 6))
    channel.basic_qos(prefetch_count=2)
    inbox = Inbox(channel, name)
    inbox.wait(2)
    inbox.ack(inbox.got[0])
    channel.basic_reject(inbox.got[1].tag, requeue=False)
    inbox.wait(4)
    channel.basic_nack(0, multiple=True, requeue=False)
    assert [one.body for one in inbox.wait(6)] == numbers(1, 6)


# -- turns, priority, single active, exclusive --------------------------------------------------------------------


def test_consumers_take_turns(connect: Connect, name: str) -> None:
    connection = connect()
    channel = connection.channel()
    channel.queue_declare(name)
    boxes = [Inbox(connection.channel(), name) for _ in range(3)]
    for body in numbers(1, 9):
        publish(channel, name, body)
        counts(channel, name)
    for place, box in enumerate(boxes):
        assert [one.body for one in box.wait(3)] == numbers(1, 9)[place::3]


def test_burst_is_shared_evenly(connect: Connect, name: str) -> None:
    connection = connect()
    channel = connection.channel()
    channel.queue_declare(name)
    boxes = [Inbox(connection.channel(), name, auto_ack=True) for _ in range(2)]
    publish(channel, name, *numbers(1, 400))
    quiesce(channel, name)
    for box in boxes:
        box.quiet()
    shares = [len(box.got) for box in boxes]
    assert sum(shares) == 400
    assert min(shares) >= 150, shares


def test_consumer_with_no_room_is_passed_over(connect: Connect, name: str) -> None:
    connection = connect()
    channel = connection.channel()
    channel.queue_declare(name)
    slow, quick = connection.channel(), connection.channel()
    slow.basic_qos(prefetch_count=1)
    full, free = Inbox(slow, name), Inbox(quick, name)
    publish(channel, name, *numbers(1, 6))
    free.wait(5)
    full.wait(1)
    assert sorted(full.bodies + free.bodies) == numbers(1, 6)


def test_higher_priority_goes_first_while_it_has_room(connect: Connect, name: str) -> None:
    connection = connect()
    channel = connection.channel()
    channel.queue_declare(name)
    low, high = connection.channel(), connection.channel()
    high.basic_qos(prefetch_count=2)
    below = Inbox(low, name, arguments={"x-priority": -5})
    above = Inbox(high, name, arguments={"x-priority": 10})
    publish(channel, name, *numbers(1, 4))
    above.wait(2)
    below.wait(2)
    assert (above.bodies, below.bodies) == (numbers(1, 2), numbers(3, 4))
    above.ack(above.got[1], multiple=True)
    quiesce(channel, name)
    publish(channel, name, b"5")
    assert above.wait(3)[2].body == b"5"


def test_single_active_consumer_is_the_first_and_the_next_follows(connect: Connect, name: str) -> None:
    connection = connect()
    channel = connection.channel()
    channel.queue_declare(name, arguments={"x-single-active-consumer": True})
    one, two, three = connection.channel(), connection.channel(), connection.channel()
    first, second, third = Inbox(one, name), Inbox(two, name), Inbox(three, name)
    publish(channel, name, *numbers(1, 3))
    first.wait(3)
    assert second.quiet() == third.quiet() == []
    assert counts(channel, name)[1] == 3
    one.basic_cancel(first.tag)
    publish(channel, name, b"4")
    assert second.wait(1)[0].body == b"4"
    # What the first still holds comes back when its channel goes, to the one that is active then.
    one.close()
    assert sorted(one.body for one in second.wait(4)[1:]) == numbers(1, 3)
    two.close()
    assert [one.body for one in third.wait(4)] == numbers(1, 4)
    assert all(one.redelivered for one in third.got)


def test_exclusive_consumer_is_alone(connect: Connect, name: str) -> None:
    connection = connect()
    channel = connection.channel()
    channel.queue_declare(name)
    inbox = Inbox(channel, name, exclusive=True)
    with refused(403, f"queue '{name}' in vhost '/' in exclusive use"):
        connection.channel().basic_consume(name, lambda *_: None)
    channel.basic_cancel(inbox.tag)
    other = connection.channel()
    Inbox(other, name)
    with refused(403, f"queue '{name}' in vhost '/' in exclusive use"):
        connection.channel().basic_consume(name, lambda *_: None, exclusive=True)


# -- cancelling ---------------------------------------------------------------------------------------------------


def test_cancelled_consumer_gets_no_more_and_may_still_ack(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name)
    publish(channel, name, b"1")
    inbox = Inbox(channel, name)
    held = inbox.wait(1)[0]
    channel.basic_cancel(inbox.tag)
    publish(channel, name, b"2")
    assert len(inbox.quiet()) == 1
    channel.basic_ack(held.tag)
    assert bodies(channel, name) == [b"2"]


def test_cancelling_a_consumer_that_is_not_there_is_fine(wire: Wire) -> None:
    assert wire.call(1, Basic.Cancel(consumer_tag="nobody"), Basic.CancelOk).consumer_tag == "nobody"


def test_deleting_a_queue_cancels_its_consumers_and_tells_them(connect: Connect, name: str) -> None:
    consuming, deleting = connect(), connect()
    channel = consuming.channel()
    channel.queue_declare(name)
    cancelled: list[str] = []
    channel.add_on_cancel_callback(lambda method: cancelled.append(method.method.consumer_tag))
    publish(channel, name, b"1")
    inbox = Inbox(channel, name)
    held = inbox.wait(1)[0]
    deleting.channel().queue_delete(name)
    until = time.monotonic() + 30
    while not cancelled and time.monotonic() < until:
        consuming.process_data_events(1)
    assert cancelled == [inbox.tag]
    # Acks for what the queue had are lawful, and of no effect.
    channel.basic_ack(held.tag)
    channel.basic_qos(prefetch_count=1)
    assert not is_there(consuming, name)


def test_client_that_did_not_ask_for_it_is_not_told(broker: RunningBroker, connect: Connect, name: str) -> None:
    with Wire(broker.port) as wire:
        wire.greet()
        wire.authenticate(capabilities={})
        wire.send(0, commands.Connection.TuneOk(2047, 131_072, 0))
        wire.call(0, commands.Connection.Open("/"), commands.Connection.OpenOk)
        wire.open_channel(1)
        wire.call(1, Queue.Declare(queue=name), Queue.DeclareOk)
        wire.call(1, Basic.Consume(queue=name), Basic.ConsumeOk)
        connect().channel().queue_delete(name)
        wire.call(1, Basic.Qos(prefetch_count=1), Basic.QosOk)


@pytest.mark.parametrize("act", ["ack", "requeue", "reject", "recover", "close"])
def test_settling_what_came_from_a_deleted_queue_is_fine(connect: Connect, name: str, act: str) -> None:
    connection = connect()
    channel, other = connection.channel(), connection.channel()
    arguments = {"x-dead-letter-exchange": "amq.fanout"}
    channel.queue_declare(name, durable=True, arguments=arguments)
    publish(channel, name, *numbers(1, 3), delivery_mode=2)
    held = get_all(channel, name, auto_ack=False)
    other.queue_delete(name)
    # Time for what belonged to the queue to be cleaned away.
    time.sleep(0.5)
    match act:
        case "ack":
            channel.basic_ack(held[-1].tag, multiple=True)
        case "requeue":
            channel.basic_nack(held[-1].tag, multiple=True)
        case "reject":
            channel.basic_nack(held[-1].tag, multiple=True, requeue=False)
        case "recover":
            channel.basic_recover(requeue=True)
        case _:
            channel.close()
    other.basic_qos(prefetch_count=1)
    assert connection.is_open


# -- settling -----------------------------------------------------------------------------------------------------


def test_requeue_brings_back_to_the_old_place_and_flags(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name)
    publish(channel, name, *numbers(1, 5))
    held = [get(channel, name, auto_ack=False) for _ in range(3)]
    for one in (held[1], held[0], held[2]):
        assert one is not None
        channel.basic_nack(one.tag, requeue=True)
    found = get_all(channel, name)
    assert [(one.body, one.redelivered) for one in found] == [
        (b"1", True),
        (b"2", True),
        (b"3", True),
        (b"4", False),
        (b"5", False),
    ]


def test_reject_without_requeue_drops(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name)
    publish(channel, name, *numbers(1, 4))
    held = [one for one in (get(channel, name, auto_ack=False) for _ in range(4)) if one is not None]
    channel.basic_reject(held[0].tag, requeue=False)
    channel.basic_nack(held[2].tag, multiple=True, requeue=False)
    channel.basic_reject(held[3].tag, requeue=True)
    assert [(one.body, one.redelivered) for one in get_all(channel, name)] == [(b"4", True)]


def test_ack_of_several_takes_all_up_to_it(connect: Connect, name: str) -> None:
    connection = connect()
    channel = connection.channel()
    channel.queue_declare(name)
    publish(channel, name, *numbers(1, 6))
    held = get_all(channel, name, auto_ack=False)
    channel.basic_ack(held[1].tag)
    channel.basic_ack(held[3].tag, multiple=True)
    channel.close()
    assert [(one.body, one.redelivered) for one in get_all(connection.channel(), name)] == [(b"5", True), (b"6", True)]


def test_ack_of_tag_0_takes_all_there_are(connect: Connect, name: str) -> None:
    connection = connect()
    channel = connection.channel()
    channel.queue_declare(name)
    publish(channel, name, *numbers(1, 3))
    get_all(channel, name, auto_ack=False)
    channel.basic_ack(0, multiple=True)
    channel.basic_ack(0, multiple=True)
    channel.close()
    assert bodies(connection.channel(), name) == []


def test_recover_redelivers_to_the_consumers_in_order(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name)
    publish(channel, name, *numbers(1, 3))
    inbox = Inbox(channel, name)
    inbox.ack(inbox.wait(3)[1])
    channel.basic_recover(requeue=True)
    again = inbox.wait(5)[3:]
    assert [(one.body, one.redelivered, one.tag) for one in again] == [(b"1", True, 4), (b"3", True, 5)]


@pytest.mark.parametrize("end", ["channel", "connection", "socket"])
def test_unacked_comes_back_in_order_when_its_channel_connection_or_socket_ends(
    broker: RunningBroker, connect: Connect, name: str, end: str
) -> None:
    witness = connect().channel()
    witness.queue_declare(name)
    publish(witness, name, *numbers(1, 50))
    if end == "socket":
        with Wire(broker.port) as wire:
            wire.log_in()
            wire.open_channel(1)
            wire.call(1, Basic.Consume(queue=name), Basic.ConsumeOk)
            for _ in range(50):
                wire.expect(Basic.Deliver)
                wire.expect(header.ContentHeader)
                wire.receive()
    else:
        connection = connect()
        channel = connection.channel()
        Inbox(channel, name).wait(50)
        (channel if end == "channel" else connection).close()
    inbox = Inbox(witness, name, auto_ack=True)
    assert [(one.body, one.redelivered) for one in inbox.wait(50)] == [(body, True) for body in numbers(1, 50)]


def test_order_is_kept_through_requeues_and_consumers_that_come_and_go(connect: Connect, name: str) -> None:
    connection = connect()
    channel = connection.channel()
    channel.queue_declare(name, durable=True)
    publish(channel, name, *numbers(1, 300), delivery_mode=2)
    done: list[bytes] = []
    for taken in (7, 50, 100, 150):
        reader = connection.channel()
        reader.basic_qos(prefetch_count=taken)
        inbox = Inbox(reader, name)
        got = inbox.wait(taken)
        done += [one.body for one in got[: taken // 2]]
        reader.basic_ack(got[taken // 2 - 1].tag, multiple=True)
        if taken == 50:
            reader.basic_nack(got[-1].tag, multiple=True, requeue=True)
        reader.close()
    done += bodies(channel, name)
    assert done == numbers(1, 300)
    channel.queue_delete(name)


def test_unacked_of_a_closed_connection_goes_to_waiting_consumers(connect: Connect, name: str) -> None:
    one, two = connect(), connect()
    channel = one.channel()
    channel.queue_declare(name)
    first = Inbox(channel, name)
    publish(channel, name, *numbers(1, 5))
    first.wait(5)
    second = Inbox(two.channel(), name)
    assert second.quiet() == []
    one.close()
    assert [one.body for one in second.wait(5)] == numbers(1, 5)


# -- flow ---------------------------------------------------------------------------------------------------------


@unlike_rabbitmq(reason="540 there: not implemented")
def test_client_may_stop_and_restart_its_deliveries(connect: Connect, name: str) -> None:
    connection = connect()
    channel = connection.channel()
    channel.queue_declare(name)
    inbox = Inbox(channel, name)
    channel._impl.flow(False)
    publish(connection.channel(), name, *numbers(1, 3))
    assert inbox.quiet() == []
    channel._impl.flow(True)
    assert [one.body for one in inbox.wait(3)] == numbers(1, 3)


def test_reader_that_sleeps_does_not_keep_others_waiting(broker: RunningBroker, connect: Connect, name: str) -> None:
    channel = connect().channel()
    channel.queue_declare(name)
    with Wire(broker.port) as wire:
        wire.log_in()
        wire.open_channel(1)
        wire.send(1, Basic.Consume(queue=name, no_ack=True))
        # It never reads. Its socket, the broker's buffer for it and the kernel's fill up; then it has no room.
        body = b"x" * 100_000
        writer = connect().channel()
        writer.confirm_delivery()
        for _ in range(200):
            writer.basic_publish("", name, body)
        other = Inbox(channel, name, auto_ack=True)
        writer.basic_publish("", name, b"last")
        until = time.monotonic() + 30
        while b"last" not in other.bodies:
            assert time.monotonic() < until
            channel.connection.process_data_events(1)


def test_channel_may_be_closed_with_deliveries_under_way(connect: Connect, name: str) -> None:
    connection = connect()
    channel = connection.channel()
    channel.queue_declare(name)
    publish(channel, name, *numbers(1, 500))
    for _ in range(10):
        reader = connection.channel()
        Inbox(reader, name)
        reader.close()
    quiesce(channel, name)
    assert bodies(channel, name) == numbers(1, 500)


def test_connection_may_be_closed_with_publishes_and_deliveries_under_way(
    broker: RunningBroker, connect: Connect, name: str
) -> None:
    witness = connect().channel()
    witness.queue_declare(name)
    connection = broker.connect()
    channel = connection.channel()
    Inbox(channel, name)
    for body in numbers(1, 100):
        channel.basic_publish("", name, body, pika.BasicProperties(delivery_mode=1))
    connection.close()
    assert bodies(witness, name) == numbers(1, 100)


def test_delivery_to_a_socket_that_was_reset_is_no_loss(broker: RunningBroker, connect: Connect, name: str) -> None:
    witness = connect().channel()
    witness.queue_declare(name)
    wire = Wire(broker.port)
    wire.log_in()
    wire.open_channel(1)
    wire.call(1, Basic.Consume(queue=name), Basic.ConsumeOk)
    wire.socket.close()
    publish(witness, name, *numbers(1, 20))
    inbox = Inbox(witness, name, auto_ack=True)
    assert sorted(one.body for one in inbox.wait(20)) == sorted(numbers(1, 20))


def test_broker_that_stops_closes_its_connections_with_320(own_broker: RunningBroker) -> None:
    connection = pika.BlockingConnection(own_broker.parameters())
    stopping = threading.Thread(target=own_broker.stop)
    stopping.start()
    with pytest.raises(ConnectionClosedByBroker) as caught:
        connection.process_data_events(30)
    assert caught.value.reply_code == 320
    stopping.join()
