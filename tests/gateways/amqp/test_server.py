"""What happens to connections when memory, disk or their rights go: pika against a door in this process, so that the
test can turn the meter and the metadata by hand."""

import logging
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

import pika
import pytest
import trio
from pamqp import commands
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import ConnectionClosedByBroker
from tests.gateways.delivery.house import House, Running

from headrace.controller.changes import DeleteUser, DeleteVhost, PutPermission, PutUser
from headrace.controller.entities import Permission, User
from headrace.controller.passwords import HashCost, hash_password
from headrace.gateways.amqp.config import AmqpConfig
from headrace.gateways.amqp.server import AmqpDoor, AmqpListener
from headrace.gateways.delivery.access import Access
from headrace.gateways.delivery.alarms import GIB, Alarms, Measured
from headrace.gateways.delivery.authentication import Authentication
from headrace.gateways.delivery.limits import Limits
from headrace.gateways.delivery.login import LoginConfig
from headrace.gateways.delivery.meter import Watch
from headrace.gateways.delivery.turn import Turn

from .wire import Closed, Wire

T = TypeVar("T")
CHEAP = HashCost(memory_kib=8, passes=1)
PLENTY = Measured(memory_bytes=100, memory_bytes_max=1000, disk_free_bytes=50 * GIB, disk_bytes=100 * GIB)
SCARCE = replace(PLENTY, memory_bytes=700)
PATIENCE_S = 30


class Meter:
    def __init__(self) -> None:
        self.now = PLENTY

    def read(self) -> Measured:
        return self.now


class Served:
    def __init__(self, running: Running, door: AmqpDoor, watch: Watch, meter: Meter) -> None:
        self.running = running
        self.door = door
        self.port = 0
        self._watch = watch
        self._meter = meter

    async def measure(self, now: Measured) -> None:
        self._meter.now = now
        await self._watch.look()

    def connect(self, user: str = "guest", **settings: Any) -> pika.BlockingConnection:
        credentials = pika.PlainCredentials(user, "guest")
        settings = {"heartbeat": 0, "socket_timeout": PATIENCE_S, "blocked_connection_timeout": PATIENCE_S} | settings
        return pika.BlockingConnection(
            pika.ConnectionParameters("127.0.0.1", self.port, credentials=credentials, **settings)
        )

    async def until(self, holds: Callable[[], object]) -> None:
        with trio.fail_after(PATIENCE_S):
            while not holds():
                await trio.sleep(0.005)


@asynccontextmanager
async def served(config: AmqpConfig | None = None) -> AsyncIterator[Served]:
    house = House()
    async with house.broker() as running, trio.open_nursery() as nursery:
        metadata = running.metadata
        access = Access(metadata.snapshot)
        metadata.listen(lambda snapshot, changes: access.update(snapshot))
        authentication = Authentication(
            metadata, key=b"k" * 32, monotonic=house.clock.monotonic, config=LoginConfig(hash_cost=CHEAP)
        )
        meter = Meter()
        watch = Watch(Alarms(), meter, house.env)
        door = AmqpDoor(
            running.broker, Turn(running.broker), access, authentication, Limits(metadata.snapshot), watch, config
        )
        listener = AmqpListener("amqp", door)
        built = Served(running, door, watch, meter)
        _host, built.port = await listener.open("127.0.0.1", 0)
        nursery.start_soon(door.run)
        nursery.start_soon(listener.serve)
        yield built
        with trio.move_on_after(5):
            await listener.drain()
        nursery.cancel_scope.cancel()


async def in_thread(call: Callable[[], T]) -> T:
    with trio.fail_after(2 * PATIENCE_S):
        return await trio.to_thread.run_sync(call, abandon_on_cancel=True)


class Publisher:
    """Publishes from a thread, and notes when it is told to stop and to go on."""

    def __init__(self, built: Served) -> None:
        self.told: list[str] = []
        self.confirmed = 0
        self._built = built
        self._stop = threading.Event()

    def run(self) -> None:
        with self._built.connect() as connection:
            connection.add_on_connection_blocked_callback(lambda _, frame: self.told.append(frame.method.reason))
            connection.add_on_connection_unblocked_callback(lambda *_: self.told.append("unblocked"))
            channel = connection.channel()
            channel.queue_declare("q", durable=True)
            channel.confirm_delivery()
            while not self._stop.is_set():
                if not self.told or self.told[-1] == "unblocked":
                    channel.basic_publish("", "q", b"x")
                    self.confirmed += 1
                # pika tells of being blocked only here.
                connection.process_data_events(0.01)

    def stop(self) -> None:
        self._stop.set()


async def test_publisher_waits_while_an_alarm_is_up_and_is_told_so_both_ways(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with served() as built, trio.open_nursery() as nursery:
        publisher = Publisher(built)
        nursery.start_soon(in_thread, publisher.run)
        await built.until(lambda: publisher.confirmed > 10)
        await built.measure(SCARCE)
        await built.until(lambda: any(session.is_blocked for session in built.door.sessions))
        await built.until(lambda: publisher.told == ["low on memory"])
        published = built.running.host.queue("q").ready_count
        await built.measure(replace(SCARCE, disk_free_bytes=0))
        assert built.running.host.queue("q").ready_count == published
        assert all(session.is_blocked for session in built.door.sessions)
        await built.measure(PLENTY)
        await built.until(lambda: publisher.told == ["low on memory", "unblocked"])
        went_on = publisher.confirmed + 10
        await built.until(lambda: publisher.confirmed > went_on)
        publisher.stop()


async def test_consumers_and_declarations_go_on_while_publishers_wait() -> None:
    async with served() as built:

        def consume() -> list[bytes]:
            with built.connect() as connection:
                channel = connection.channel()
                channel.queue_declare("made-meanwhile")
                got = []
                for method, _properties, body in channel.consume("q", inactivity_timeout=PATIENCE_S):
                    assert body is not None
                    got.append(body)
                    channel.basic_ack(method.delivery_tag)
                    if len(got) == 3:
                        break
                channel.cancel()
                return got

        await built.running.declare("q")
        await built.running.publish("q", b"1", b"2", b"3")
        await built.measure(SCARCE)
        assert await in_thread(consume) == [b"1", b"2", b"3"]
        assert "made-meanwhile" in built.running.host.queues
        assert built.running.host.queue("q").message_count == 0


async def test_blocked_publisher_still_gets_what_it_consumes() -> None:
    async with served() as built:
        queue = await built.running.declare("mine")
        await built.measure(SCARCE)

        def publish_and_read() -> bytes:
            with Wire(built.port) as wire:
                wire.log_in()
                wire.open_channel(1)
                wire.call(1, commands.Basic.Consume(queue="mine", no_ack=True), commands.Basic.ConsumeOk)
                wire.publish(1, "", "mine", b"mine own")
                wire.expect(commands.Basic.Deliver)
                wire.receive()
                return bytes(wire.receive()[1].value)

        assert await in_thread(publish_and_read) == b"mine own"
        assert queue.message_count == 0


async def test_client_that_did_not_say_it_understands_is_not_told_but_not_read_either() -> None:
    async with served() as built:
        queue = await built.running.declare("q")
        await built.measure(SCARCE)

        def publish() -> Wire:
            wire = Wire(built.port)
            wire.log_in()
            wire.open_channel(1)
            for _ in range(3):
                wire.publish(1, "", "q", b"x")
            return wire

        wire = await in_thread(publish)
        await built.until(lambda: any(session.is_blocked for session in built.door.sessions))
        wire.publish(1, "", "q", b"unread")
        before = queue.ready_count
        assert 1 <= before <= 3
        await built.measure(PLENTY)
        await built.until(lambda: queue.ready_count == 4)
        wire.socket.settimeout(0.05)
        with pytest.raises(TimeoutError):
            wire.receive()
        wire.socket.close()


async def test_blocked_connection_is_closed_in_good_order_when_the_broker_stops() -> None:
    async with served() as built, trio.open_nursery() as nursery:
        publisher = Publisher(built)
        ended: list[BaseException] = []

        def run() -> None:
            try:
                publisher.run()
            except ConnectionClosedByBroker as error:
                ended.append(error)

        nursery.start_soon(in_thread, run)
        await built.until(lambda: publisher.confirmed > 3)
        await built.measure(SCARCE)
        await built.until(lambda: any(session.is_blocked for session in built.door.sessions))
        for session in list(built.door.sessions):
            await session.shut("broker is shutting down")
        await built.until(lambda: ended)
        [error] = ended
        assert isinstance(error, ConnectionClosedByBroker) and error.reply_code == 320


async def test_vanished_client_is_noticed_though_it_is_not_read() -> None:
    async with served(AmqpConfig(heartbeat_s=1)) as built:
        await built.running.declare("q")
        await built.measure(SCARCE)

        def publish_and_vanish() -> None:
            with Wire(built.port) as wire:
                wire.log_in(beat=1)
                wire.open_channel(1)
                wire.publish(1, "", "q", b"x")

        await in_thread(publish_and_vanish)
        await built.until(lambda: not built.door.sessions)


# -- users, vhosts, rights --------------------------------------------------------------------------------------------


async def add_user(built: Served, name: str) -> None:
    everything = Permission(name, "/", ".*", ".*", ".*")
    await built.running.metadata.commit(PutUser(User(name, hash_password("guest", CHEAP))), PutPermission(everything))


class Consumer:
    """Takes deliveries and keeps them, until the broker closes the connection."""

    def __init__(self, built: Served, user: str) -> None:
        self._built = built
        self._user = user
        self.got: list[bytes] = []
        self.ready = threading.Event()
        self.ended: ConnectionClosedByBroker | None = None

    def run(self) -> None:
        connection = self._built.connect(self._user)
        channel: BlockingChannel = connection.channel()
        channel.basic_consume("q", lambda _channel, _method, _properties, body: self.got.append(body))
        self.ready.set()
        try:
            while True:
                connection.process_data_events(1)
        except ConnectionClosedByBroker as error:
            self.ended = error


@pytest.mark.parametrize(
    ("change", "text"),
    [(DeleteUser("ann"), "user 'ann' is deleted"), (DeleteVhost("/"), "vhost '/' is deleted")],
    ids=["user", "vhost"],
)
async def test_connections_of_a_deleted_user_or_vhost_are_closed(
    change: DeleteUser | DeleteVhost, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with served() as built, trio.open_nursery() as nursery:
        await add_user(built, "ann")
        queue = await built.running.declare("q")
        await built.running.publish("q", b"held")
        consumer = Consumer(built, "ann")
        nursery.start_soon(in_thread, consumer.run)
        await built.until(lambda: consumer.got == [b"held"])
        with caplog.at_level(logging.WARNING):
            await built.running.metadata.commit(change)
        assert not any(one.room() for one in queue.consumers), "nothing more is sent to it from now on"
        await built.until(lambda: consumer.ended is not None)
        assert consumer.ended is not None and consumer.ended.reply_code == 320
        assert text in consumer.ended.reply_text
        if isinstance(change, DeleteUser):
            assert queue.ready_count == 1
        await built.until(lambda: not built.door.sessions)
        assert not any(record.exc_info for record in caplog.records)


async def test_others_stay_when_a_user_is_deleted() -> None:
    async with served() as built:
        await add_user(built, "ann")
        await add_user(built, "bob")
        connection = await in_thread(lambda: built.connect("bob"))
        await built.running.metadata.commit(DeleteUser("ann"))
        await in_thread(lambda: connection.channel().queue_declare("q"))
        await in_thread(connection.close)


async def test_client_that_does_not_answer_is_cut_off_within_five_seconds() -> None:
    async with served() as built:
        await add_user(built, "ann")

        def log_in() -> Wire:
            wire = Wire(built.port)
            wire.log_in(user="ann")
            return wire

        wire = await in_thread(log_in)
        await built.running.metadata.commit(DeleteUser("ann"))

        def wait_for_the_end() -> None:
            with pytest.raises(Closed):
                while True:
                    wire.receive()
            wire.socket.close()

        with trio.fail_after(5):
            await in_thread(wait_for_the_end)


async def test_login_in_progress_of_a_deleted_user_comes_to_nothing() -> None:
    async with served() as built:
        await add_user(built, "ann")

        def half_way() -> Wire:
            wire = Wire(built.port)
            wire.greet()
            response = b"\0ann\0guest".decode()
            wire.call(0, commands.Connection.StartOk({}, "PLAIN", response, "en_US"), commands.Connection.Tune)
            return wire

        wire = await in_thread(half_way)
        await built.running.metadata.commit(DeleteUser("ann"))

        def go_on() -> None:
            with pytest.raises((Closed, OSError, AssertionError)):
                wire.send(0, commands.Connection.TuneOk(0, 131072, 0), commands.Connection.Open("/"))
                wire.expect(commands.Connection.OpenOk)
            wire.socket.close()

        await in_thread(go_on)
