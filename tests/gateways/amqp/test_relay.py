"""Clients of a node that leads nothing: pika and a client without manners, through the relay, and through failovers."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aio_pika
import pika
import pytest
import trio
from pamqp import commands
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import ChannelClosedByBroker, ConnectionClosedByBroker
from tests.gateways.delivery.certificates import Authority
from tests.gateways.relay.town import Secured, Town, in_thread, town

from .pika_client import PERSISTENT, Inbox, bodies, get
from .wire import Wire


class Stepwise:
    """A client's story in a thread, which stops where the test has something to do."""

    def __init__(self) -> None:
        self._reached = threading.Semaphore(0)
        self._go_on = threading.Semaphore(0)

    def pause(self) -> None:
        """In the story: let the test act, and wait for it."""
        self._reached.release()
        assert self._go_on.acquire(timeout=60)

    async def reached(self) -> None:
        await in_thread(lambda: self._reached.acquire(timeout=60))

    def go_on(self) -> None:
        self._go_on.release()


async def told(built: Town, story: Callable[[Stepwise], None], act: Callable[[], Any]) -> None:
    """The story, with `act` where it pauses."""
    steps = Stepwise()

    async def interrupt() -> None:
        await steps.reached()
        await act()
        steps.go_on()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(interrupt)
        await in_thread(lambda: story(steps))
        nursery.cancel_scope.cancel()


async def fail_over(built: Town) -> None:
    assert built.leading is not None
    await built.leading.kill()
    await built.lead()


async def test_pika_publishes_gets_and_consumes_through_the_relay() -> None:
    async with town() as built:

        def story() -> None:
            with built.connect() as connection:
                channel = connection.channel()
                channel.confirm_delivery()
                channel.queue_declare("q", durable=True)
                for number in range(100):
                    channel.basic_publish("", "q", b"%d" % number, PERSISTENT)
                assert get(channel, "q").body == b"0"  # type: ignore[union-attr]
                inbox = Inbox(channel, "q")
                assert [one.body for one in inbox.wait(99)] == [b"%d" % number for number in range(1, 100)]
                inbox.ack(inbox.got[-1], multiple=True)

        await in_thread(story)
        assert built.front is not None
        await built.until(lambda: built.front is not None and not built.front.relays)
        assert built.leading is not None
        assert built.leading.service.broker.vhosts["/"].queue("q").ready_count == 0


async def test_large_bodies_cross_in_many_frames() -> None:
    async with town() as built:

        def story() -> None:
            with built.connect() as connection:
                channel = connection.channel()
                channel.confirm_delivery()
                channel.queue_declare("q", durable=True)
                sent = [bytes([number]) * 1_500_000 for number in range(4)]
                for body in sent:
                    channel.basic_publish("", "q", body, PERSISTENT)
                assert bodies(channel, "q") == sent

        await in_thread(story)


async def test_clients_and_links_go_through_tls_and_a_certificate_is_a_login(tmp_path: Path) -> None:
    async with town(Secured(Authority(tmp_path))) as built:

        def story(steps: Stepwise) -> None:
            with built.connect() as connection:
                channel = connection.channel()
                channel.confirm_delivery()
                channel.queue_declare("q", durable=True)
                sent = [bytes([number]) * 400_000 for number in range(5)]
                for body in sent:
                    channel.basic_publish("", "q", body, PERSISTENT)
                steps.pause()
                assert bodies(channel, "q") == sent

        async def act() -> None:
            assert built.leading is not None
            (session,) = built.leading.service.amqp.sessions
            assert session.connection.tls
            assert (session.user, session.connection.certified_name) == ("guest", "guest")
            await fail_over(built)

        await told(built, story, act)


async def test_aio_pika_goes_on_over_a_failover() -> None:
    async with town() as built:

        async def story(steps: Stepwise) -> None:
            connection = await aio_pika.connect(f"amqp://guest:guest@127.0.0.1:{built.ports['amqp']}/")
            channel = await connection.channel()
            queue = await channel.declare_queue("q", durable=True)
            message = aio_pika.Message(b"x", delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
            came: asyncio.Queue[aio_pika.abc.AbstractIncomingMessage] = asyncio.Queue()
            await queue.consume(came.put)
            await channel.default_exchange.publish(message, "q")
            await (await came.get()).ack()
            await asyncio.to_thread(steps.pause)
            await channel.default_exchange.publish(message, "q")
            await (await came.get()).ack()
            assert not connection.is_closed
            await connection.close()

        await told(built, lambda steps: asyncio.run(story(steps)), lambda: fail_over(built))


async def test_transactions_and_direct_answers_work_through_the_relay() -> None:
    async with town() as built:

        def story() -> None:
            with built.connect() as connection:
                channel = connection.channel()
                channel.queue_declare("q", durable=True)
                channel.tx_select()
                channel.basic_publish("", "q", b"not yet", PERSISTENT)
                channel.tx_rollback()
                channel.basic_publish("", "q", b"now", PERSISTENT)
                channel.tx_commit()
                assert bodies(channel, "q") == [b"now"]
                channel.tx_commit()
                asking = connection.channel()
                answers = Inbox(asking, "amq.rabbitmq.reply-to", auto_ack=True)
                asking.basic_publish("", "q", b"?", pika.BasicProperties(reply_to="amq.rabbitmq.reply-to"))
                asked = get(asking, "q")
                assert asked is not None
                asking.basic_publish("", asked.properties.reply_to, b"!")
                assert answers.wait(1)[0].body == b"!"

        await in_thread(story)


async def test_a_refusal_of_the_leader_reaches_the_client() -> None:
    async with town() as built:

        def story() -> None:
            with built.connect() as connection:
                with pytest.raises(ChannelClosedByBroker) as caught:
                    connection.channel().queue_declare("none", passive=True)
                assert caught.value.reply_code == 404
                assert connection.channel().is_open

        await in_thread(story)


async def test_consumers_go_on_after_a_failover_and_nothing_confirmed_is_lost() -> None:
    async with town() as built:

        def story(steps: Stepwise) -> None:
            with built.connect() as connection:
                channel = connection.channel()
                channel.basic_qos(prefetch_count=10)
                channel.queue_declare("q", durable=True)
                inbox = Inbox(channel, "q")
                publishing = connection.channel()
                publishing.confirm_delivery()
                for number in range(20):
                    publishing.basic_publish("", "q", b"%d" % number, PERSISTENT)
                first = inbox.wait(10)
                inbox.ack(first[4], multiple=True)
                inbox.wait(15)
                steps.pause()
                # Of the time before: void, and no error.
                inbox.ack(inbox.got[-1], multiple=True)
                for number in range(20, 40):
                    publishing.basic_publish("", "q", b"%d" % number, PERSISTENT)
                wanted = {b"%d" % number for number in range(40)}
                while set(inbox.bodies) != wanted:
                    count = len(inbox.got)
                    inbox.ack(inbox.got[-1], multiple=True)
                    inbox.wait(count + 1)
                inbox.ack(inbox.got[-1], multiple=True)
                assert [one.tag for one in inbox.got] == list(range(1, len(inbox.got) + 1))
                again = [one for one in inbox.got if one.redelivered]
                assert again

        await told(built, story, lambda: fail_over(built))


async def test_exclusive_queues_bindings_and_prefetch_are_there_again() -> None:
    async with town() as built:

        def story(steps: Stepwise) -> None:
            with built.connect() as connection:
                channel = connection.channel()
                channel.exchange_declare("transient", "fanout")
                name = channel.queue_declare("", exclusive=True).method.queue
                channel.queue_bind(name, "transient")
                channel.queue_bind(name, "amq.topic", "a.#")
                channel.basic_qos(prefetch_count=2)
                inbox = Inbox(channel, name)
                steps.pause()
                for number in range(3):
                    channel.basic_publish("transient", "", b"%d" % number)
                channel.basic_publish("amq.topic", "a.b", b"topic")
                assert [one.body for one in inbox.wait(2)] == [b"0", b"1"]
                assert len(inbox.quiet()) == 2
                inbox.ack(inbox.got[-1], multiple=True)
                assert [one.body for one in inbox.wait(4)][2:] == [b"2", b"topic"]

        await told(built, story, lambda: fail_over(built))


async def test_a_reader_of_a_stream_goes_on_behind_what_it_was_given() -> None:
    async with town() as built:

        def story(steps: Stepwise) -> None:
            with built.connect() as connection:
                channel = connection.channel()
                channel.queue_declare("s", durable=True, arguments={"x-queue-type": "stream"})
                channel.basic_qos(prefetch_count=7)
                cancelled: list[str] = []
                channel.add_on_cancel_callback(lambda frame: cancelled.append(frame.method.consumer_tag))
                got: dict[str, list[bytes]] = {"first": [], "third": [], "next": [], "lost": []}

                def take(channel: Any, method: Any, _properties: Any, body: bytes) -> None:
                    got[method.consumer_tag].append(body)
                    channel.basic_ack(method.delivery_tag)

                channel.basic_consume("s", take, consumer_tag="next", arguments={"x-stream-offset": "next"})
                for number in range(20):
                    channel.basic_publish("", "s", b"%d" % number)
                for tag, start in (("first", "first"), ("third", 3)):
                    channel.basic_consume("s", take, consumer_tag=tag, arguments={"x-stream-offset": start})
                # Some of them: the rest is on its way, or was not sent yet.
                while not all(got[tag] for tag in ("first", "third", "next")):
                    connection.process_data_events(0.1)
                # It is given nothing before the failover, so nobody knows where it was to begin.
                channel.basic_consume("s", take, consumer_tag="lost", arguments={"x-stream-offset": "next"})
                steps.pause()
                while not cancelled:
                    connection.process_data_events(0.1)
                for number in range(20, 30):
                    channel.basic_publish("", "s", b"%d" % number)
                while not all(b"29" in got[tag] for tag in ("first", "third", "next")):
                    connection.process_data_events(0.1)
                every = [b"%d" % number for number in range(30)]
                assert (got["first"], got["third"], got["next"]) == (every, every[3:], every)
                assert (cancelled, got["lost"]) == (["lost"], [])

        await told(built, story, lambda: fail_over(built))


async def test_a_consumer_whose_queue_is_gone_is_cancelled() -> None:
    async with town() as built:

        def story(steps: Stepwise) -> None:
            with built.connect() as other, built.connect() as connection:
                other.channel().queue_declare("transient")
                channel = connection.channel()
                channel.basic_consume("transient", lambda *_: None, consumer_tag="c")
                cancelled: list[str] = []
                channel.add_on_cancel_callback(lambda frame: cancelled.append(frame.method.consumer_tag))
                other.close()
                steps.pause()
                while not cancelled:
                    connection.process_data_events(1)
                assert cancelled == ["c"]

        await told(built, story, lambda: fail_over(built))


def with_unconfirmed(wire: Wire) -> None:
    """Log in; a publish on channel 1 that was not told confirmed, because the commit is held up by the test."""
    wire.log_in()
    wire.open_channel(1)
    wire.open_channel(2)
    wire.call(1, commands.Confirm.Select(), commands.Confirm.SelectOk)


async def test_the_channel_of_an_unconfirmed_publish_is_closed_with_the_outcome_unknown_and_others_go_on() -> None:
    async with town() as built:

        def story(steps: Stepwise) -> None:
            with Wire(built.ports["amqp"]) as wire:
                with_unconfirmed(wire)
                steps.pause()
                text = wire.expect_channel_close(1, 506)
                assert "outcome of 1 publishes is unknown" in text
                wire.call(2, commands.Queue.Declare(queue="q", durable=True), commands.Queue.DeclareOk)
                wire.open_channel(1)
                wire.call(0, commands.Connection.Close(200, "bye", 0, 0), commands.Connection.CloseOk)

        async def act() -> None:
            assert built.front is not None
            (relay,) = built.front.relays
            # As if it had been sent, and no answer had come.
            relay._tracker.published(1, 1)
            await fail_over(built)

        await told(built, story, act)


async def test_a_transaction_under_way_is_rolled_back_and_said_to_be() -> None:
    async with town() as built:

        def story(steps: Stepwise) -> None:
            with Wire(built.ports["amqp"]) as wire:
                wire.log_in()
                wire.open_channel(1)
                wire.open_channel(2)
                wire.call(1, commands.Queue.Declare(queue="q", durable=True), commands.Queue.DeclareOk)
                wire.call(1, commands.Tx.Select(), commands.Tx.SelectOk)
                wire.publish(1, "", "q", b"lost")
                # Answered behind it: it is with the leader.
                wire.call(2, commands.Queue.Declare(queue="q", passive=True), commands.Queue.DeclareOk)
                steps.pause()
                assert "rolled back" in wire.expect_channel_close(1, 506)
                found = wire.call(2, commands.Queue.Declare(queue="q", passive=True), commands.Queue.DeclareOk)
                assert found.message_count == 0

        await told(built, story, lambda: fail_over(built))


async def test_a_method_in_flight_is_asked_of_the_next_leader() -> None:
    async with town() as built:
        built.leaders.patience_s = 60

        def story(steps: Stepwise) -> None:
            with Wire(built.ports["amqp"]) as wire:
                wire.log_in()
                wire.open_channel(1)
                steps.pause()
                wire.call(1, commands.Queue.Declare(queue="q", durable=True), commands.Queue.DeclareOk)

        async def act() -> None:
            assert built.leading is not None
            await built.leading.kill()
            # The story goes on with nobody there.
            built._nursery.start_soon(lead_later)

        async def lead_later() -> None:
            await trio.sleep(0.2)
            await built.lead()

        await told(built, story, act)


async def test_without_a_leader_in_time_the_client_is_told_so() -> None:
    async with town() as built:

        def story(steps: Stepwise) -> None:
            connection = built.connect()
            steps.pause()
            with pytest.raises(ConnectionClosedByBroker) as caught:
                while True:
                    connection.process_data_events(1)
            assert caught.value.reply_code == 320
            assert "no leader" in caught.value.reply_text or "nobody leads" in caught.value.reply_text

        async def act() -> None:
            built.is_hopeless = True
            assert built.leading is not None
            await built.leading.kill()

        await told(built, story, act)
        with pytest.raises(pika.exceptions.AMQPConnectionError):
            await in_thread(built.connect)


async def test_a_link_that_is_lost_to_a_leader_that_lives_is_made_again() -> None:
    async with town() as built:

        def story(steps: Stepwise) -> None:
            with built.connect() as connection:
                channel = connection.channel()
                name = channel.queue_declare("", exclusive=True).method.queue
                channel.queue_declare("auto", durable=True, auto_delete=True)
                inbox = Inbox(channel, "auto")
                channel.basic_publish("", name, b"kept")
                channel.confirm_delivery()
                channel.basic_publish("", "auto", b"held", PERSISTENT)
                inbox.wait(1)
                steps.pause()
                assert bodies(channel, name) == [b"kept"]
                assert inbox.wait(2)[1].redelivered

        async def cut() -> None:
            assert built.front is not None
            (relay,) = built.front.relays
            assert relay._links is not None
            # The leader hears of it only when the next link comes: as if the network had swallowed the end.
            relay._links.cancel()
            await built.until(lambda: relay.failover_count == 1)

        await told(built, story, cut)


async def test_exclusive_queues_of_a_client_that_vanishes_go_at_once_those_of_a_lost_node_soon() -> None:
    async with town() as built:
        assert built.leading is not None
        queues = built.leading.service.broker.vhosts["/"].queues

        def declare() -> Wire:
            wire = Wire(built.ports["amqp"])
            wire.log_in()
            wire.open_channel(1)
            wire.call(1, commands.Queue.Declare(queue="mine", exclusive=True), commands.Queue.DeclareOk)
            return wire

        wire = await in_thread(declare)
        assert "mine" in queues
        wire.socket.close()
        await built.until(lambda: "mine" not in queues)
        wire = await in_thread(declare)
        assert built.front is not None
        (relay,) = built.front.relays
        # The node is gone, and its client with it.
        built.is_cut = True
        relay._scope.cancel()
        await built.until(lambda: "mine" not in queues)
        wire.socket.close()


async def test_an_old_leader_that_steps_down_hands_its_relayed_clients_on() -> None:
    async with town() as built:

        def story(steps: Stepwise) -> None:
            with built.connect() as connection:
                channel = connection.channel()
                channel.queue_declare("auto", durable=True, auto_delete=True)
                inbox = Inbox(channel, "auto")
                channel.confirm_delivery()
                steps.pause()
                channel.basic_publish("", "auto", b"x", PERSISTENT)
                assert inbox.wait(1)[0].body == b"x"

        async def act() -> None:
            assert built.leading is not None
            last = built.leading
            built.leading = None
            await last.service.amqp.step_down("another node leads")
            await built.until(lambda: not last.service.amqp.sessions)
            await last.service.close()
            await last.kill()
            await built.lead()

        await told(built, story, act)


async def test_clients_of_a_vhost_that_is_led_here_are_served_here() -> None:
    async with town() as built:
        built.leader = 1

        def story() -> None:
            with built.connect() as connection:
                channel = connection.channel()
                channel.queue_declare("q", durable=True)
                assert bodies(channel, "q") == []

        await in_thread(story)
        assert built.leading is not None
        assert built.front is not None
        assert not built.front.relays


async def test_a_node_that_stops_tells_its_relayed_clients() -> None:
    async with town() as built:

        def story(steps: Stepwise) -> None:
            connection = built.connect()
            steps.pause()
            with pytest.raises(ConnectionClosedByBroker) as caught:
                while True:
                    connection.process_data_events(1)
            assert caught.value.reply_code == 320

        async def act() -> None:
            built._nursery.start_soon(built.listener.drain)

        await told(built, story, act)
        assert built.leading is not None
        leading = built.leading
        await built.until(lambda: not leading.service.amqp.sessions)


async def test_publishes_get_a_definite_no_while_too_few_replicas_are_in_sync() -> None:
    async with town() as built:
        assert built.leading is not None
        broker = built.leading.service.broker
        broker.unwritable = lambda: "shard 0 has 1 replicas in sync, of at least 2"

        def story() -> None:
            with built.connect() as connection:
                channel = connection.channel()
                channel.queue_declare("q", durable=True)
                channel.confirm_delivery()
                with pytest.raises(pika.exceptions.NackError):
                    channel.basic_publish("", "q", b"x", PERSISTENT)
                plain = connection.channel()
                plain.basic_publish("", "q", b"x", PERSISTENT)
                with pytest.raises(ChannelClosedByBroker, match="replicas in sync"):
                    plain.queue_declare("q", passive=True)
                assert bodies(channel, "q") == []

        await in_thread(story)


async def test_a_slow_consumer_holds_back_no_more_than_buffers() -> None:
    async with town() as built:
        assert built.leading is not None
        assert built.front is not None
        body = b"x" * 50_000

        def fill() -> Wire:
            with built.connect() as connection:
                channel = connection.channel()
                channel.queue_declare("q", durable=True)
                channel.confirm_delivery()
                for _ in range(400):
                    channel.basic_publish("", "q", body, PERSISTENT)
            wire = Wire(built.ports["amqp"])
            wire.log_in()
            wire.open_channel(1)
            wire.call(1, commands.Basic.Consume(queue="q", no_ack=True), commands.Basic.ConsumeOk)
            return wire

        wire = await in_thread(fill)
        (relay,) = built.front.relays
        # It reads nothing: its socket fills up, and the link is not read either.
        await built.until(lambda: relay._client.is_sending)
        assert len(relay._client._rest) + relay._tracker._down.held_bytes < 1024 * 1024

        def take() -> int:
            count = 0
            while count < 400:
                _number, found = wire.receive()
                count += isinstance(found, commands.Basic.Deliver)
            return count

        assert await in_thread(take) == 400
        wire.socket.close()


async def test_heartbeats_are_this_nodes_affair_while_nobody_leads() -> None:
    async with town() as built:
        built.leaders.patience_s = 60

        def story(steps: Stepwise) -> None:
            with Wire(built.ports["amqp"]) as wire:
                wire.log_in(beat=2)
                steps.pause()
                for _ in range(2):
                    assert type(wire.receive_any()[1]).__name__ == "Heartbeat"
                steps.pause()

        steps = Stepwise()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(in_thread, lambda: story(steps))
            await steps.reached()
            assert built.leading is not None
            await built.leading.kill()
            steps.go_on()
            await steps.reached()
            steps.go_on()


async def test_a_leader_that_falls_silent_is_given_up() -> None:
    async with town() as built:

        def story(steps: Stepwise) -> None:
            with Wire(built.ports["amqp"]) as wire:
                wire.log_in()
                wire.open_channel(1)
                steps.pause()
                wire.call(1, commands.Queue.Declare(queue="q", durable=True), commands.Queue.DeclareOk)

        async def act() -> None:
            assert built.front is not None
            (relay,) = built.front.relays
            assert relay._link is not None
            relay.beat(relay._link.last_received + 9, late=False)
            await built.until(lambda: relay.failover_count == 1)

        await told(built, story, act)


class Publishing:
    """Publishes numbers with confirms, over whatever happens; knows which of them were confirmed."""

    def __init__(self, built: Town) -> None:
        self.confirmed: list[int] = []
        self.unknown: list[int] = []
        self.channel_count = 0
        self._built = built
        self._stop = threading.Event()

    def stop(self) -> None:
        self._stop.set()

    def run(self) -> None:
        with self._built.connect() as connection:
            channel = self._channel(connection)
            channel.queue_declare("q", durable=True)
            number = 0
            while not self._stop.is_set():
                try:
                    channel.basic_publish("", "q", b"%d" % number, PERSISTENT)
                    self.confirmed.append(number)
                except ChannelClosedByBroker as error:
                    assert error.reply_code == 506
                    assert "unknown" in error.reply_text
                    self.unknown.append(number)
                    channel = self._channel(connection)
                number += 1

    def _channel(self, connection: pika.BlockingConnection) -> BlockingChannel:
        self.channel_count += 1
        channel = connection.channel()
        channel.confirm_delivery()
        return channel


async def test_over_many_failovers_under_load_one_connection_stays_open_and_nothing_confirmed_is_lost() -> None:
    async with town() as built:
        publishing = Publishing(built)
        got: list[int] = []

        def consume(done: threading.Event) -> None:
            with built.connect() as connection:
                channel = connection.channel()
                channel.basic_qos(prefetch_count=50)
                channel.queue_declare("q", durable=True)

                def take(_channel: Any, method: Any, _properties: Any, body: bytes) -> None:
                    got.append(int(body))
                    channel.basic_ack(method.delivery_tag)

                channel.basic_consume("q", take)
                while not (done.is_set() and set(got) >= set(publishing.confirmed)):
                    connection.process_data_events(0.05)

        done = threading.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(in_thread, lambda: consume(done))
            async with trio.open_nursery() as publishers:
                publishers.start_soon(in_thread, publishing.run)
                for _ in range(3):
                    count = len(publishing.confirmed)
                    await built.until(lambda count=count: len(publishing.confirmed) > count + 20)  # type: ignore[misc]
                    await fail_over(built)
                count = len(publishing.confirmed)
                await built.until(lambda: len(publishing.confirmed) > count + 20)
                publishing.stop()
            done.set()
        assert set(got) >= set(publishing.confirmed)
        assert set(got) <= set(publishing.confirmed) | set(publishing.unknown)
        assert len(publishing.unknown) == publishing.channel_count - 1
